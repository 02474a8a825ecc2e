# SPDX-License-Identifier: Apache-2.0
"""`rmq query` and `rmq get`: messages by key, one message by id."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import click

from rmq.cli import NOT_FOUND, Fault
from rmq.cli.arguments import (
    LIMIT,
    TIME,
    form_option,
    no_topic,
    open_store,
    store_argument,
    template_option,
    topic_argument,
)
from rmq.cli.fields import FIELDS, TIME_FIELDS, body_text, message_row
from rmq.cli.output import Output, note, people_size, people_time
from rmq.config import StoreConfig
from rmq.errors import UnsupportedFormatError
from rmq.message import StoredMessage
from rmq.store import Store

_PLACE = re.compile(r"([^/]+)/(\d{1,10})/(\d{1,19})", re.ASCII)
_HEX = re.compile(r"[0-9A-Fa-f]+")
_BODY_LIMIT = 4096  # characters of a body that a table shows


@click.command()
@store_argument
@topic_argument()
@click.argument("key")
@click.option("--begin", type=TIME, help="Only messages stored at or after this time.")
@click.option("--end", type=TIME, help="Only messages stored at or before this time.")
@click.option("--limit", type=LIMIT, default=32, show_default=True, help="Newest messages to show, or all.")
@template_option
@form_option
def query(store: Path, topic: str, key: str, begin: int | None, end: int | None, limit: int | None,
          template: str | None, conf: StoreConfig | None, form: str | None) -> None:  # fmt: skip
    """Messages of TOPIC by KEY, newest first.

    KEY is one of a message's keys or its unique key.

    TIME is ms since 1970, ISO 8601 (UTC when it names no zone), or a span before now such as -2h.
    """
    output = Output(form, template)
    with open_store(store, conf) as opened:
        try:
            found = opened.query(topic, key, begin=begin, end=end, limit=limit)
        except ValueError:  # text that is not UTF-8: no message can have it
            raise Fault(_why_none(opened, topic, key, ""), NOT_FOUND) from None
        if found or topic in opened.topics():
            output.messages(found)
        if found.scanned_size:
            note(f"{people_size(found.scanned_size)} of the log are in no index file and were scanned")
        if found.truncated:
            note(f"only the newest {len(found):,} are shown; --limit all shows the rest")
        if not found:
            when = "" if begin is None and end is None else " in that time"
            raise Fault(_why_none(opened, topic, key, when), NOT_FOUND)


def _why_none(store: Store, topic: str, key: str, when: str) -> str:
    return f"{store.path}: no message of {topic!r} has the key {key!r}{when}" if topic in store.topics() \
        else no_topic(store, topic)  # fmt: skip


@click.command()
@store_argument
@click.argument("id")
@click.option("--topic", help="Only a message of this topic; an ID that looks like an offset may be its unique key.")
@template_option
@form_option
def get(store: Path, id: str, topic: str | None, template: str | None, conf: StoreConfig | None,
        form: str | None) -> None:  # fmt: skip
    """One message by its ID.

    ID is an offset message id (32 or 56 hex digits), TOPIC/QUEUE/OFFSET, a phy offset (digits), or else a unique key;
    with --topic it is a unique key first.
    """
    output = Output(form, template)
    with open_store(store, conf) as opened:
        try:
            message = _lookup(opened, id, topic)
        except KeyError:
            _note_scan(opened, topic or "-")
            of = "" if topic is None else f" of {topic!r}"
            hint = no_topic(opened, topic) if topic is not None and topic not in opened.topics() else \
                f"{opened.path}: no message{of} has the id {id!r}{_length_hint(id)}"  # fmt: skip
            raise Fault(hint, NOT_FOUND) from None
        if message.uniq_key == id:
            _note_scan(opened, message.topic)
        if template is not None:
            output.messages([message])
        else:
            output.facts(message_row(message), _shown(message))


def _note_scan(store: Store, topic: str) -> None:
    """Tell of the part of the log that a look for a unique key had to scan."""
    with suppress(ValueError, UnsupportedFormatError):
        if not store.query(topic, "-", limit=1, complete=False).complete:
            note("a part of the log is in no index file and was scanned")


def _lookup(store: Store, id: str, topic: str | None) -> StoredMessage:
    """By the first form of the ID under which there is a message. KeyError: under none."""
    if topic is not None:
        with suppress(UnsupportedFormatError, ValueError):
            for message in store.query(topic, id):
                if message.uniq_key == id:
                    return message
    forms: list[int | str | tuple[str, int, int]] = [id]
    if place := _PLACE.fullmatch(id):
        forms.append((place[1], int(place[2]), int(place[3])))
    elif id.isascii() and id.isdigit() and len(id) < 20:
        forms.append(int(id))
    for form in forms if topic is not None else reversed(forms):
        with suppress(KeyError, ValueError):
            message = store.lookup(form, topic=topic)
            if topic in (None, message.topic):
                return message
    raise KeyError(id)


def _length_hint(id: str) -> str:
    if _HEX.fullmatch(id) and 24 <= len(id) <= 64 and len(id) not in (32, 56):
        return f"; an offset message id has 32 or 56 digits, this has {len(id)}"
    return ""


def _shown(message: StoredMessage) -> dict[str, str]:
    shown = {}
    for name in FIELDS[:-2]:
        value = getattr(message, name)
        if name in TIME_FIELDS:
            shown[name] = f"{people_time(value)} UTC"
        elif name == "keys":
            shown[name] = " ".join(value)
        elif name == "properties":
            shown[name] = ", ".join(f"{item}={text}" for item, text in value.items())
        else:
            shown[name] = "" if value is None else str(value)
    body, encoding = body_text(message.body)
    rest = f" … {len(body) - _BODY_LIMIT:,} more characters" if len(body) > _BODY_LIMIT else ""
    shown["body"] = f"{'hex ' if encoding == 'hex' else ''}{body[:_BODY_LIMIT]}{rest}"
    return shown
