# SPDX-License-Identifier: Apache-2.0
"""How answers are shown: a table for people, jsonl and csv for programs. Notes and errors go to stderr.

Times are UTC everywhere. A table rounds sizes and cuts long text to the terminal; jsonl and csv are exact.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import IO, TYPE_CHECKING, Any, cast

import click

from rmq._core._messagelines import MessageLines
from rmq.cli import complain, flush_stdout, of_stdout, printable
from rmq.cli.fields import FIELDS, body_text, iso_time, message_row
from rmq.message import StoredMessage

if TYPE_CHECKING:
    from rich.console import Console

FORMS = ("table", "jsonl", "csv")
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_FLUSH_SECONDS = 0.05  # lines that come more slowly are not kept back for more
_WRITE_BYTES = 64 * 1024  # of lines that come faster
_GAP = 2  # columns between two of a table
_WIDEST = 40  # of any column but the last
_LEAST = 12  # of the last one and of those that may be cut; with less room each row becomes a block of lines
_CELL_LIMIT = 400  # characters of a body
_PLAIN = (str, int, type(None))  # what a csv.writer takes as it is
_TEXTS = ("topic", "tags", "keys", "body")  # columns that may be cut
_FIELD = re.compile(r"[^.\[]*|keys\[[0-9]+\]|properties\[[^\]]+\]")  # of a template

Row = Mapping[str, Any]


def people_time(ms: int | None) -> str:
    """iso_time for a table, "" for none."""
    return str(iso_time(ms) if ms is not None else "").replace("T", " ").removesuffix("Z")


def people_size(size: int) -> str:
    """Bytes with three figures: 999 B, 1.19 MB."""
    if size < 1000:
        return f"{size} B"
    power = min(6, (len(str(size)) - 1) // 3)
    if round(size / 1000**power) == 1000 and power < 6:
        power += 1
    value = size / 1000**power
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {_SIZE_UNITS[power]}"


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 row, 1,000 rows."""
    return f"{number:,} {noun if number == 1 else ('entries' if noun == 'entry' else noun + 's')}"


def note(text: str) -> None:
    """A remark about the answer, on stderr."""
    complain(text)


class _Several:
    """Keys or properties to a template: the text of one in brackets, else of all; one that is not there is empty."""

    def __init__(self, items: Mapping[str, str], text: str) -> None:
        self._items = items
        self._text = text

    def __getitem__(self, name: str | int) -> str:
        return self._items.get(str(name), "")

    def __str__(self) -> str:
        return self._text

    def __format__(self, spec: str) -> str:
        return format(self._text, spec)

    __repr__ = __str__


class Output:
    """Writes rows to stdout in one form."""

    def __init__(self, form: str | None, template: str | None = None) -> None:
        if template is not None and form is not None:
            raise click.UsageError("-f and -o exclude each other")
        self._template = None if template is None else _checked_template(template)
        self.is_terminal = sys.stdout.isatty()
        self.form = form or ("table" if self.is_terminal else "jsonl")
        self._has_header = False
        self._flushed = -math.inf
        self._table: Table | None = None
        self._csv = csv.writer(_Sink(self._put_csv))  # its own \r\n makes it quote both

    def rows(self, names: Iterable[str], rows: Iterable[Row], shown: Callable[[Row], dict[str, str]]) -> int:
        """Write rows of exact values under their names; `shown` gives a table's cells under their headings. Returns how
        many."""
        if self.form == "table":
            cells = [shown(row) for row in rows]
            if cells:
                Table(list(cells[0])).write([list(row.values()) for row in cells])
            return len(cells)
        self._begin_csv(names)
        return self._write_all(rows)

    def _put(self, text: str) -> None:
        try:
            sys.stdout.write(text)
        except OSError as error:
            raise of_stdout(error) from None

    def _write_all(self, rows: Iterable[Row]) -> int:
        count = 0
        for row in rows:
            self._write(row)
            self._flush_if_due()
            count += 1
        return count

    def _is_due(self) -> bool:
        return time.monotonic() - self._flushed >= _FLUSH_SECONDS

    def _flush_if_due(self) -> None:
        """So that a pipe gets the first line at once, and one that was looked for long as soon as it is found."""
        if self._is_due():
            flush_stdout()
            self._flushed = time.monotonic()

    def messages(self, messages: Iterable[StoredMessage]) -> int:
        """Write messages; returns how many. A table takes them in pages, so that a long answer starts at once."""
        if self._template is not None:
            return self._write_lines(self._filled(*self._template, messages))
        if self.form != "table":
            self._begin_csv(FIELDS)
            return self._write_messages(messages)
        names = ["time (UTC)", "queue", "offset", "tags", "keys", "body"]
        table = self._table = self._table or Table(names)
        count = 0
        for page in _pages(messages, 100):
            table.write([_message_cells(message) for message in page])
            count += len(page)
        return count

    def _write_messages(self, messages: Iterable[StoredMessage]) -> int:
        """Many lines at a time; on a terminal, which would obey what is in them, each by itself."""
        lines, count = MessageLines(self.form), 0
        try:
            for message in messages:
                lines.add(message)
                count += 1
                if self.is_terminal or lines.size >= _WRITE_BYTES or self._is_due():
                    self._put(self._printable_line(lines.take()))
                    self._flush_if_due()
        finally:  # also those before one that cannot be read
            self._put(self._printable_line(lines.take()))
        return count

    def _printable_line(self, text: str) -> str:
        """Lines, of which there is one on a terminal at most."""
        if not text or not self.is_terminal:
            return text
        line = text.removesuffix("\n")
        return (printable(line) if self.form == "csv" else self._safe_json(line)) + "\n"

    def _write_lines(self, lines: Iterable[str]) -> int:
        count = 0
        for line in lines:
            self._put(line)
            self._flush_if_due()
            count += 1
        return count

    def _filled(self, template: str, names: set[str], messages: Iterable[StoredMessage]) -> Iterator[str]:
        for message in messages:
            row = {name: self._harmless(value) for name, value in message_row(message, names).items()}
            try:
                yield template.format_map(row)
            except (ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError) as error:
                reason = str(error) or "a width is too large: memory has no room for the line"
                raise click.UsageError(f"-f: {reason}") from None

    def _harmless(self, value: Any) -> Any:
        """A value of -f as a terminal may show it; what the template itself says is the user's."""
        if isinstance(value, list):
            return _Several({str(place): self._harmless(key) for place, key in enumerate(value)},
                            self._harmless(" ".join(value)))  # fmt: skip
        if isinstance(value, dict):
            return _Several({name: self._harmless(text) for name, text in value.items()}, self._json(value))
        if isinstance(value, str) and self.is_terminal:
            return "\n".join(map(printable, value.split("\n")))
        return "" if value is None else value

    def facts(self, exact: Row, shown: Row) -> None:
        """One thing's facts: `exact` for programs, `shown` as lines of name and text for people."""
        if self.form == "table":
            width = max(len(name) for name in shown)
            console = make_console()
            for name, text in shown.items():
                for number, line in enumerate(_wrapped(text, console.width - width - _GAP)):
                    label = (name if number == 0 else "").ljust(width + _GAP)
                    console.out(label, style="bold", highlight=False, end="")
                    console.out(line, highlight=False)
        elif self.form == "csv":
            for row in (("name", "value"), *zip(exact, _csv_cells(exact), strict=True)):
                self._csv.writerow(row)
        else:
            self._write(exact)

    def _write(self, row: Row) -> None:
        if self.form == "csv":
            self._csv.writerow(_csv_cells(row))
        else:
            self._put(self._json(row) + "\n")

    def _json(self, value: Any) -> str:
        return self._safe_json(json.dumps(value, ensure_ascii=False))

    def _safe_json(self, text: str) -> str:
        """JSON as stdout takes it: no lone surrogate, and on a terminal nothing that it would obey."""
        safe = text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
        return "".join(map(_json_printable, safe)) if self.is_terminal else safe

    def _begin_csv(self, names: Iterable[str]) -> None:
        """The header, once, and of no rows too."""
        if self.form == "csv" and not self._has_header:
            self._has_header = True
            self._csv.writerow(names)

    def _put_csv(self, line: str) -> None:
        text = line.removesuffix("\r\n")
        self._put((printable(text) if self.is_terminal else text) + "\n")


class Table:
    """Rows in columns, whose widths the first page decides; on a narrow terminal a block of lines for each row."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._widths: list[int] = []
        self._console = make_console()

    def write(self, rows: list[list[str]]) -> None:
        from rich.cells import cell_len, set_cell_size

        if not self._widths:
            self._decide([[cell_len(cell) for cell in row] for row in rows])
            if not self._is_block:
                self._line([set_cell_size(name, width) for name, width in zip(self._names, self._widths, strict=True)],
                           style="bold")  # fmt: skip
        for row in rows:
            if self._is_block:
                for number, (name, cell) in enumerate(zip(self._names, row, strict=True)):
                    lead = name if number == 0 else f"  {name}"
                    room = max(1, self._console.width - len(lead) - 1)
                    self._console.out(f"{lead} {_cropped(cell, room)}", highlight=False)
            else:
                cells = [_cropped(cell, width) for cell, width in zip(row, self._widths, strict=True)]
                self._line([set_cell_size(cell, width) for cell, width in zip(cells, self._widths, strict=True)])

    def _decide(self, sizes: list[list[int]]) -> None:
        widest = [max([len(name), *(row[i] for row in sizes)]) for i, name in enumerate(self._names)]
        self._widths = [min(width, _WIDEST) for width in widest[:-1]]
        least = min(widest[-1], _LEAST) if self._names[-1] in _TEXTS else widest[-1]
        while (room := self._console.width - sum(self._widths) - _GAP * len(self._widths)) < least:
            number = max(range(len(self._widths)), key=lambda i: self._widths[i] if self._names[i] in _TEXTS else 0)
            if self._names[number] not in _TEXTS or self._widths[number] <= _LEAST:
                break
            self._widths[number] -= 1
        self._widths.append(min(widest[-1], max(room, 0)))
        self._is_block = room < least

    def _line(self, cells: list[str], style: str | None = None) -> None:
        self._console.out((" " * _GAP).join(cells).rstrip(), style=style, highlight=False)


def make_console(*, stderr: bool = False) -> Console:
    """rich's console for stdout or stderr; NO_COLOR and a pipe mean plain text."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    class Stdout:
        def __getattr__(self, name: str) -> Any:
            return getattr(sys.stdout, name)

        def write(self, text: str) -> int:
            try:
                return sys.stdout.write(text)
            except OSError as error:
                raise of_stdout(error) from None

        def flush(self) -> None:
            flush_stdout()

    width = None if sys.stdout.isatty() or stderr else shutil.get_terminal_size().columns
    return PlainConsole(stderr=stderr, file=None if stderr else cast(IO[str], Stdout()), width=width,
                        color_system=None if os.environ.get("NO_COLOR") else "auto")  # fmt: skip


def _checked_template(template: str) -> tuple[str, set[str]]:
    r"""The line of -f with \n and \t as such, ended, and the fields in it; UsageError when it names what is none."""
    text = template.replace(r"\n", "\n").replace(r"\t", "\t")
    try:
        names = set(_fields_in(text))
    except ValueError as error:
        raise click.UsageError(f"-f: {error}") from None
    if names - set(FIELDS):
        raise click.UsageError(f"-f names no field {min(names - set(FIELDS))!r}; there are: {' '.join(FIELDS)}")
    return text if text.endswith("\n") else text + "\n", names


def _fields_in(text: str) -> Iterator[str]:
    """Names of the fields of a template, those in the widths of others too. ValueError: a part of one that has none."""
    for _, name, spec, _ in Formatter().parse(text):
        if name is not None:
            if not _FIELD.fullmatch(name):
                raise ValueError(f"no {{{name}}}: parts of a field are {{keys[0]}} and {{properties[NAME]}}")
            yield name.partition("[")[0]
            yield from _fields_in(spec or "")


def _pages(messages: Iterable[StoredMessage], size: int) -> Iterator[list[StoredMessage]]:
    page: list[StoredMessage] = []
    for message in messages:
        page.append(message)
        if len(page) == size:
            yield page
            page = []
    if page:
        yield page


def _message_cells(message: StoredMessage) -> list[str]:
    body, encoding = body_text(message.body)
    body = f"{'hex ' if encoding == 'hex' else ''}{body[:_CELL_LIMIT]}"
    cells = [people_time(message.store_timestamp), str(message.queue_id),
             str(message.queue_offset), message.tags or "", " ".join(message.keys) or message.uniq_key or "",
             body]  # fmt: skip
    return [printable(cell) for cell in cells]


class _Sink:
    """What a csv.writer writes its lines to."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write


def _csv_cells(row: Row) -> list[Any]:
    """Keys, which hold no space, between spaces; other lists and mappings as JSON."""
    return [value if type(value) in _PLAIN else " ".join(value) if name == "keys" else
            json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple | Mapping) else value
            for name, value in row.items()]  # fmt: skip


def _json_printable(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _cropped(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text, broken between words and, where a word is too long, in it."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(printable(text)).wrap(Console(), max(width, 8), overflow="fold")
    return [line.plain.rstrip() for line in lines] or [""]
