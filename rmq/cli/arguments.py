# SPDX-License-Identifier: Apache-2.0
"""Arguments that several verbs take: the store, its broker.conf, the output form, times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from rmq.cli import did_you_mean
from rmq.cli.output import FORMS, note
from rmq.config import StoreConfig
from rmq.keys import Mode
from rmq.store import Store
from rmq.store import open as open_any

_Command = TypeVar("_Command", bound=Callable[..., Any])
_AGO = re.compile(r"-(?:[0-9]{1,19}(?:ms|[smhdw]))+")
_AGO_PART = re.compile(r"(\d+)(ms|[smhdw])", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_INT64 = 2**63
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimeType(click.ParamType):  # type: ignore[type-arg]
    """Ms since 1970, ISO 8601 (UTC when it names no zone), a span before now such as -2h, or `now`.

    Between two ms: the first behind it for `begin`, else the last before it.
    """

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        now = time.time_ns() // 1_000_000
        if text == "now":
            return now
        if re.fullmatch(r"0*[0-9]{1,19}", text) and int(text[-19:]) < _INT64:
            return int(text[-19:])
        if _AGO.fullmatch(text):
            ago = sum(int(count) * _UNIT_MS[unit] for count, unit in _AGO_PART.findall(text))
            return max(now - ago, -_INT64)
        try:
            moment = datetime.fromisoformat("" if text.isdigit() else text)  # Python takes many digits for a date
        except ValueError:
            self.fail(f"{value!r} is no time: ms since 1970, ISO 8601 such as 2026-11-21T05:00Z, or -2h, -30m, -7d",
                      param, ctx)  # fmt: skip
        micros = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
        return -(-micros // 1000) if param is not None and param.name == "begin" else micros // 1000


class LimitType(click.ParamType):  # type: ignore[type-arg]
    """A number of at least 1, or `all` (None)."""

    name = "number|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or str(value).lower() == "all":
            return None
        try:
            number = int(value)
        except ValueError:
            number = 0
        if not 1 <= number < _INT64:
            self.fail(f"{value!r} is no limit: a number from 1 on, or all", param, ctx)
        return number


TIME = TimeType()
LIMIT = LimitType()


def _complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        with open_any(ctx.params["store"]) as store:
            return [CompletionItem(topic) for topic in store.topics() if topic.startswith(incomplete)]
    except Exception:
        return []  # the shell is no place for errors


class NamedPath(click.Path):
    """click.Path that takes no empty name, as of a shell's unset variable, for the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class ConfType(NamedPath):
    """A broker.conf, read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        try:
            config = StoreConfig.from_broker_conf(path)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from error
        if not any(config.is_explicit(field.name) for field in fields(config)):
            note(f"{path}: no line is a property that is read of a broker.conf, such as storePathCommitLog")
        return config


def store_argument(command: _Command) -> _Command:
    """STORE, and --conf for stores whose files do not tell everything."""
    command = click.option("--conf", metavar="FILE", type=ConfType(path_type=Path, readable=False),
                           help="The broker's own broker.conf: sizes, paths, host that the files do not tell.")(command)
    return click.argument("store", type=NamedPath(path_type=Path, readable=False))(command)


def topic_argument(**options: Any) -> Callable[[_Command], _Command]:
    """TOPIC, completed from the store."""
    return click.argument("topic", shell_complete=_complete_topic, **options)


def _form(*names: str) -> Callable[[_Command], _Command]:
    return click.option(*names, "form", type=click.Choice(FORMS), help="Default: table on a terminal, jsonl on a pipe.")


form_option = _form("-o", "--output")
short_form_option = _form("-o")  # of a verb whose --output is a directory
template_option = click.option(
    "-f", "--format", "template", metavar="FORMAT",
    help=r"In place of -o: this line for each message, with fields in braces, such as '{keys}\t{body}'.")  # fmt: skip


def open_store(path: Path, conf: StoreConfig | None, mode: Mode = "r") -> Store:
    """The store, opened; a broker.conf or geometry that does not fit is a usage error."""
    try:
        return open_any(path, mode, config=conf)
    except ValueError as error:
        hint = "" if conf else "; --conf FILE can tell"
        raise click.UsageError(f"{error}{hint}") from error


def check_names(option: str, names: Sequence[str]) -> None:
    """A usage error when an option names something twice."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise click.UsageError(f"{option} repeats {name!r}")


def no_topic(store: Store, topic: str, more: str = "") -> str:
    """Why nothing was found under a topic that the store does not have."""
    return f"{store.path}: no topic {topic!r}{more}{did_you_mean(topic, store.topics())}"
