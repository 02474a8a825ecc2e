# SPDX-License-Identifier: Apache-2.0
"""The command line `rmq`: thin verbs over the library. A verb's module is loaded when the verb is used."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import click

from rmq.errors import CorruptFileError, RmqError
from rmq.version import __version__

NOT_FOUND, USAGE, DAMAGE, FAILED = 1, 2, 3, 4
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended,
PIPE_CLOSED = 141  # SIGPIPE,
TERMINATED = 143  # SIGTERM
VERBS = {
    "info": "rmq.cli.info",
    "topics": "rmq.cli.info",
    "groups": "rmq.cli.info",
    "query": "rmq.cli.find",
    "get": "rmq.cli.find",
    "cat": "rmq.cli.cat",
    "verify": "rmq.cli.verify",
    "export": "rmq.cli.export",
    "ingest": "rmq.cli.ingest",
    "clean": "rmq.cli.clean",
    "rebuild": "rmq.cli.rebuild",
    "completion": "rmq.cli.completion",
}


class Fault(Exception):
    """Ends a verb with one line on stderr and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a verb as Ctrl-C does."""


def stopped_by(error: BaseException) -> int:
    """The exit code after Ctrl-C or SIGTERM; click raises its own error for these."""
    return TERMINATED if isinstance(error.__cause__ or error, Terminated) else INTERRUPTED


def terminate(number: int, frame: Any) -> None:
    raise Terminated


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises Terminated, unless somebody else sees to it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _loaded(name: str) -> ModuleType:
    """A module and all that it loads, which stay to the end: garbage is looked for among other objects only."""
    if name in sys.modules:
        return sys.modules[name]
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        module = import_module(name)
        gc.freeze()
    finally:
        if is_enabled:
            gc.enable()
    return module


class Verbs(click.Group):
    """The verbs, and one place where errors become a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(_loaded(VERBS[cmd_name]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"no verb {args[0]!r}{did_you_mean(args[0], VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None,
                     **extra: Any) -> click.Context:  # fmt: skip
        with _ending():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending():
            answer = super().invoke(ctx)
            flush_stdout()
            return answer

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             complete_var: str | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # fmt: skip
        """Run and exit. Every error is one line."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by whoever started us
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            _write_utf8(getattr(sys, name))
        # Before a verb loads numpy: no verb needs the threads for matrices that start, and spin, with it.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        handler = logging.StreamHandler()
        handler.setFormatter(_PlainFormatter("rmq: %(message)s"))
        logging.getLogger("rmq").addHandler(handler)
        try:
            with _terminable():
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                click.echo(error.format_message(), err=True)
                sys.exit(USAGE)
            path = error.ctx.command_path if error.ctx else "rmq"
            complain(f"{' '.join(error.format_message().split()).rstrip('.')} (see {path} --help)")
            code = USAGE
        except click.ClickException as error:
            complain(error.format_message())
            code = error.exit_code
        except Fault as error:
            complain(str(error))
            code = error.code
        except (click.Abort, KeyboardInterrupt) as error:
            code = stopped_by(error)
        finally:
            logging.getLogger("rmq").removeHandler(handler)
            _drop_unwritten()
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _write_utf8(stream: Any) -> None:
    """Whatever the locale says, but on a terminal, which knows no other encoding than the locale's."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace", **({} if stream.isatty() else {"encoding": "utf-8"}))


@contextmanager
def _ending() -> Iterator[None]:
    """Errors as what they mean for a command: a line and an exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise click.exceptions.Exit(stopped_by(error)) from None
    except CorruptFileError as error:
        raise Fault(str(error), DAMAGE) from error
    except RmqError as error:
        raise Fault(str(error), FAILED) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(PIPE_CLOSED) from None
        raise Fault(reason_of(error), FAILED) from error
    except MemoryError as error:
        raise Fault(str(error) or "out of memory", FAILED) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise  # click's own, or a defect of ours
        raise Fault(str(error), FAILED) from error


def did_you_mean(name: str, known: Any) -> str:
    """A question with the nearest known name, or nothing."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    lowered = {item.lower(): item for item in known}
    if name.lower() in lowered:
        near = [lowered[name.lower()]]
    return f"; did you mean {' or '.join(repr(item) for item in near)}?" if near else ""


def reason_of(error: OSError) -> str:
    """The path and what the system said, without Python's error number."""
    if error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return error.strerror or str(error)


def of_stdout(error: OSError) -> OSError:
    """The error with its place: a full disk below stdout is not the store's."""
    return error if error.filename is not None else OSError(error.errno, error.strerror or str(error), "stdout")


def say(text: str) -> None:
    """A text and a line's end on stdout."""
    try:
        click.echo(text)
    except OSError as error:
        raise of_stdout(error) from None


def flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        raise of_stdout(error) from None


def printable(text: str) -> str:
    """Text in which nothing moves a terminal's cursor: control and format characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def complain(message: str) -> None:
    """A line on stderr; without anybody who can read it the exit code has to do."""
    with contextlib.suppress(OSError):
        click.echo(f"rmq: {printable(message)}", err=True)


def _drop_unwritten() -> None:
    """What stdout or stderr did not take has been told, or nobody reads it: the interpreter, which would try once more
    and end with a code of its own, finds nothing.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):  # no file behind it
                sink = os.open(os.devnull, os.O_WRONLY)
                os.dup2(sink, stream.fileno())
                os.close(sink)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rmq", message="%(prog)s %(version)s")
def main() -> None:
    """Apache RocketMQ's message store: look into it, find messages, fill it, clean it.

    STORE is a store's directory: a broker's, a backup, or one that rmq wrote. Reading verbs change nothing and work
    beside a running broker.

    Exit codes: 0 done or found, 1 not found, 2 wrong arguments or input, 3 damage found, 4 the system's or the store's
    own error, 130 stopped by Ctrl-C, 143 by SIGTERM.
    """
