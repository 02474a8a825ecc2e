# SPDX-License-Identifier: Apache-2.0
"""`rmq ingest`: files of rows into a store, in batches."""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq._core._javahash import java_hash
from rmq._core._message import check_topic
from rmq.arrays import flags, integers, number_array
from rmq.cli import INTERRUPTED, TERMINATED, USAGE, Fault, flush_stdout, reason_of
from rmq.cli.ahead import read_ahead
from rmq.cli.arguments import NamedPath, check_names, form_option, open_store, store_argument
from rmq.cli.inputs import Interrupt
from rmq.cli.output import Output, counted, make_console, note
from rmq.cli.rows import Rows, SourceError, Wanted
from rmq.cli.sources import Source
from rmq.cli.texts import NO_TEXT, NULL
from rmq.config import StoreConfig
from rmq.errors import IllegalMessageError
from rmq.keys import encoded, hash_keys
from rmq.store import Store

_FALSE = pa.Array.from_buffers(pa.bool_(), 1, [None, pa.py_buffer(b"\0")])[0]  # made without pandas: see texts
SHOWN_ROWS = 5  # bad rows that are named on stderr with --skip-bad


@click.command()
@store_argument
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=NamedPath(readable=False, allow_dash=True))
@click.option("--topic", required=True, help="Topic of the messages.")
@click.option("--key-column", "key_columns", multiple=True, metavar="COLUMN",
              help="Its text is a key of the message; a list's texts are several. May be given several times.")
@click.option("--tags-column", metavar="COLUMN", help="Its text is the message's tag.")
@click.option("--body-column", metavar="COLUMN", help="Its text or bytes are the body. Default: the row as JSON.")
@click.option("--queues", type=click.IntRange(1, 65536), default=1, show_default=True,
              help="Queues to spread over: by hash of the first key, in turn without one.")
@click.option("--format", "input_form", type=click.Choice(("csv", "jsonl", "parquet")),
              help="Default: by the file's name.")
@click.option("--delimiter", help=r"Of CSV; \t is a tab. Default: a comma, in .tsv files a tab.")
@click.option("--skip-bad", is_flag=True, help="Leave out rows that are broken or make no message, and count them.")
@click.option("--skip-rows", type=click.IntRange(0), default=0, metavar="N",
              help="Leave out the first N rows, which an earlier run has stored or skipped.")
@form_option
def ingest(store: Path, files: tuple[str, ...], topic: str, key_columns: tuple[str, ...], tags_column: str | None,
           body_column: str | None, queues: int, input_form: str | None, delimiter: str | None, skip_bad: bool,
           skip_rows: int, conf: StoreConfig | None, form: str | None) -> None:  # fmt: skip
    """Put the rows of FILEs into STORE.

    FILE is CSV, JSONL or Parquet; the store is made when it is missing. FILE may be - for stdin (with --format), and
    CSV and JSONL may end in .gz. At the end everything is on disk. A bad row stops the work: what stands before it is
    kept, and counted. So does Ctrl-C. --skip-rows goes on from there.
    """
    delimiter = "\t" if delimiter == r"\t" else delimiter  # shells hand the two characters over
    _check(topic, input_form, files, delimiter)
    check_names("--key-column", key_columns)
    names = dict.fromkeys([*key_columns, *([] if tags_column is None else [tags_column])])
    _check_columns(*names, *([] if body_column is None else [body_column]))
    wanted = Wanted(tuple(names), body_column, tuple(name for name in key_columns if name != tags_column))
    output = Output(form)
    started = time.monotonic()
    work = Ingest(topic, key_columns, tags_column, queues, skip_bad, skip_rows)
    try:
        with Interrupt().installed() as interrupt:
            sources = [Source(path, input_form, delimiter, wanted, interrupt.wake) for path in files]
            with open_store(store, conf, "a") as opened:
                work.run(opened, sources, interrupt)
    except SourceError as error:
        _check_not_stopped(interrupt, work)  # what it cuts short looks broken
        raise Fault(f"{error}{work.count()}", USAGE) from error
    except OSError as error:
        raise OSError(error.errno, f"{reason_of(error)}{work.count()}") from error
    except MemoryError as error:
        raise MemoryError(f"{str(error) or 'out of memory'}{work.count()}") from error
    seconds = time.monotonic() - started
    row = {"stored": work.stored, "skipped": work.skipped, "seconds": round(seconds, 3),
           "rows_per_second": round(work.stored / max(seconds, 1e-9))}  # fmt: skip
    rate = f"in {seconds:.1f} s ({row['rows_per_second']:,} a second)"
    try:
        output.facts(row, {"stored": f"{counted(work.stored, 'message')} {rate}",
                           "skipped": counted(work.skipped, "row")})  # fmt: skip
        flush_stdout()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise OSError(error.errno, f"{reason_of(error)}; stored: {counted(work.stored, 'message')}") from error
    if work.skipped > SHOWN_ROWS:
        note(f"{counted(work.skipped, 'row')} skipped; the first {SHOWN_ROWS} are named above")
    _check_not_stopped(interrupt, work)


def _check_not_stopped(interrupt: Interrupt, work: Ingest) -> None:
    if interrupt.noted is signal.SIGTERM:
        raise Fault(f"stopped by SIGTERM{work.count()}", TERMINATED)
    if interrupt.is_noted:
        raise Fault(f"stopped by Ctrl-C{work.count()}", INTERRUPTED)


def _check(topic: str, input_form: str | None, files: tuple[str, ...], delimiter: str | None) -> None:
    try:
        check_topic(topic)
    except ValueError as error:
        raise click.UsageError(f"--topic: {error}") from None
    if "-" in files and input_form is None:
        raise click.UsageError("stdin has no name that tells its format: pass --format")
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise click.UsageError(f"--delimiter must be one ASCII character other than \", CR and LF, got {delimiter!r}")


def _check_columns(*names: str) -> None:
    for name in names:
        try:
            encoded(name, f"column {name!r}")
        except ValueError as error:
            raise click.UsageError(str(error)) from None


class Ingest:
    """Rows to messages, and the count of what became of them."""

    def __init__(self, topic: str, key_columns: tuple[str, ...], tags_column: str | None, queues: int,
                 skip_bad: bool, skip_rows: int) -> None:  # fmt: skip
        self.stored = 0
        self.skipped = 0
        self._skip_rows = skip_rows
        self._left = skip_rows  # of them
        self._done = skip_rows  # rows that need not be read again
        self._topic = topic
        self._key_columns = key_columns
        self._tags_column = tags_column
        self._queues = queues
        self._skip_bad = skip_bad
        self._began = False
        self._turn = skip_rows % queues
        self._unseen = {*key_columns, *([] if tags_column is None else [tags_column])}

    def count(self) -> str:
        """What to say of an end before the end."""
        if not self._began:
            return ""
        advice = f"; --skip-rows {self._done} goes on behind them" if self._done else ""
        return f"; {counted(self.stored, 'message')} stored before{advice}"

    def run(self, store: Store, sources: list[Source], interrupt: Interrupt) -> None:
        """Put all rows, or those before Ctrl-C: what a reader gives after it may be cut, and is left."""
        self._began = True
        with _progress(sources) as show:
            for source in sources:
                try:
                    with read_ahead(source.rows(), interrupt.end_reading) as parts:
                        for rows in parts:
                            if interrupt.is_noted:
                                return
                            self._put(store, source, self._behind(rows))
                            self._unseen -= {name for name, texts in rows.columns.items() if _has_text(texts)}
                            show(source, self.stored)
                except SourceError:
                    if not interrupt.is_noted:
                        raise
                    return
                source.close()
        if self._unseen and self.stored and not interrupt.is_noted:
            note(f"no row has a {' or a '.join(repr(name) for name in sorted(self._unseen))}")
        if self._left and not interrupt.is_noted:
            note(f"--skip-rows {self._skip_rows}: the input has {counted(self._skip_rows - self._left, 'row')}")

    def _behind(self, rows: Rows) -> Rows:
        """Less those of the first rows that are to be left out, broken ones among them."""
        if not self._left:
            return rows
        numbers = np.sort(np.r_[rows.numbers, np.array([number for number, _ in rows.bad], np.int64)])
        passed = min(self._left, len(numbers))
        self._left -= passed
        last = numbers[passed - 1] if passed else 0
        first = int(np.searchsorted(rows.numbers, last, side="right"))
        return _part(rows, slice(first, None), [(number, why) for number, why in rows.bad if number > last])

    def _put(self, store: Store, source: Source, rows: Rows) -> None:
        bad = rows.bad
        first_bad = None if self._skip_bad or not bad else bad[0]
        if first_bad is not None:  # what stands before it is kept
            rows = _part(rows, slice(int(np.searchsorted(rows.numbers, first_bad[0]))), [])
        else:
            for number, reason in bad:
                self._leave_out(source, rows.place(number), reason)
        batch = self._messages(rows)
        at, ends, stored, illegal = 0, [(batch.num_rows, "")], self.stored, 0
        try:
            while ends:
                try:
                    self._store(store, batch.slice(at, ends[-1][0] - at))
                except IllegalMessageError as error:  # a row before that one may be illegal too
                    ends.append((at + (error.row or 0), str(error.args[0])))
                    at += error.stored or 0
                    continue
                at, reason = ends.pop()
                if ends:
                    self._leave_out(source, rows.place(int(rows.numbers[at])), reason)
                    at, illegal = at + 1, illegal + 1
        finally:
            done = self.stored - stored + illegal
            end = np.inf if first_bad is None else first_bad[0]
            following = rows.numbers[done] if done < len(rows.numbers) else end
            self._done += done + sum(number < following for number, _ in bad)
        if first_bad is not None:
            self._leave_out(source, rows.place(first_bad[0]), first_bad[1])

    def _store(self, store: Store, batch: pa.RecordBatch) -> None:
        try:
            self.stored += store.put_many(batch, topic=self._topic, results=False)
        except Exception as error:
            self.stored += getattr(error, "stored", None) or 0
            raise

    def _leave_out(self, source: Source, place: str, reason: str) -> None:
        error = SourceError(source.path, place, reason)
        if not self._skip_bad:
            raise error
        self.skipped += 1
        if self.skipped <= SHOWN_ROWS:
            note(f"skipped {error}")

    def _messages(self, rows: Rows) -> pa.RecordBatch:
        columns: dict[str, Any] = {"body": rows.body}
        found = [rows.columns[name] for name in self._key_columns]
        if len(found) == 1 and not pa.types.is_large_list(found[0].type):
            columns["keys"] = _without_empty(found[0])
        elif found:
            columns["keys"] = _lists(found)
        if self._tags_column is not None:
            columns["tags"] = _without_empty(rows.columns[self._tags_column])
        if self._queues > 1:
            columns["queue_id"] = number_array(self._queue_ids(columns.get("keys"), len(rows.body)))
        return pa.RecordBatch.from_pydict(columns)

    def _queue_ids(self, keys: pa.Array | None, count: int) -> npt.NDArray[np.int64]:
        """Rows with a key by its Java hash, as RocketMQ's SelectMessageQueueByHash; the others in turn."""
        turns = (self._turn + np.arange(count)) % self._queues
        self._turn = (self._turn + count) % self._queues
        if keys is None:
            return turns
        first = _first_of(keys) if pa.types.is_large_list(keys.type) else keys
        texts = pc.fill_null(first, NO_TEXT)
        hashed, is_missing = hash_keys(texts).astype(np.int64), flags(first.is_null())
        for row in np.flatnonzero((hashed == 0) & ~is_missing).tolist():  # the index has 0 for -2^31, a selector not
            hashed[row] = abs(java_hash(texts[row].as_py()))
        hashed %= self._queues
        return np.where(is_missing, turns, hashed)


def _has_text(column: pa.Array) -> bool:
    texts = column.flatten() if pa.types.is_large_list(column.type) else column
    return bool(texts.null_count < len(texts))


def _without_empty(texts: pa.Array) -> pa.Array:
    return pc.replace_with_mask(texts, pc.equal(texts, NO_TEXT), NULL)  # if_else of a slice fails before pyarrow 24


def _lists(columns: list[pa.Array]) -> pa.Array:
    """For each row one list of its texts, those of the first column first; null and empty ones are left out."""
    parts, rows = [], []
    for column in columns:
        is_list = pa.types.is_large_list(column.type)
        texts = column.flatten() if is_list else column
        counts = np.diff(integers(column.offsets)) if is_list else np.ones(len(column), np.int64)
        kept = pc.fill_null(pc.not_equal(texts, NO_TEXT), _FALSE)
        parts.append(texts.filter(kept))
        rows.append(np.repeat(np.arange(len(column)), counts)[flags(kept)])
    row = np.concatenate(rows)
    offsets = np.r_[0, np.cumsum(np.bincount(row, minlength=len(columns[0])))]
    texts = pa.concat_arrays(parts).take(number_array(np.argsort(row, kind="stable")))
    return pa.LargeListArray.from_arrays(number_array(offsets), texts)


def _first_of(lists: pa.LargeListArray) -> pa.Array:
    """The first text of each list, null of none."""
    offsets, texts = integers(lists.offsets), pa.concat_arrays([lists.values, pa.nulls(1, pa.large_string())])
    return texts.take(number_array(np.where(np.diff(offsets) > 0, offsets[:-1], len(texts) - 1)))


def _part(rows: Rows, part: slice, bad: list[tuple[int, str]]) -> Rows:
    return replace(rows, numbers=rows.numbers[part], body=rows.body[part], bad=bad,
                   columns={name: text[part] for name, text in rows.columns.items()})  # fmt: skip


@contextmanager
def _progress(sources: list[Source]) -> Iterator[Any]:
    """A function (source, rows) that moves a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda source, rows: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    total = sum(source.size for source in sources)
    console = make_console(stderr=True)
    started = time.monotonic()
    columns = [TaskProgressColumn(), TextColumn("{task.fields[rows]}"), TimeRemainingColumn()]
    if console.width >= 60:
        columns.insert(0, BarColumn(None))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total or None, rows="")
        done: dict[str, int] = {}

        def show(source: Source, rows: int) -> None:
            done[source.path] = source.position
            rate = rows / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=sum(done.values()), rows=f"{rows:,} rows, {rate:,.0f}/s")

        yield show
