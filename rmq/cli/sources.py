# SPDX-License-Identifier: Apache-2.0
"""CSV, JSONL and Parquet as batches of rows: a body and the columns that become keys and tags."""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq.arrays import flag_array, flags
from rmq.cli.ahead import read_ahead
from rmq.cli.bodies import json_objects, key_texts, plain_text
from rmq.cli.inputs import END, MASK, Blocks, Input
from rmq.cli.rows import Rows, SourceError, Wanted, row_numbers
from rmq.cli.texts import (
    NO_TEXT,
    Texts,
    as_it_was,
    as_text,
    is_bytes,
    json_text,
    json_value,
    last_value,
    leave_out,
    may_hold_nan,
    text_array,
)
from rmq.cli.values import nests_dictionary, readable, repeated_field

BLOCK_SIZE = 4 * 1024 * 1024
LINE_LIMIT = 64 * 1024 * 1024  # bytes of one row: a file without line ends is not loaded whole
_NUMBER = re.compile(r"Column\(/(.+)\) changed from string to number")
BATCH_ROWS = 65536
BATCH_ROWS_LEAST = 8  # however large a Parquet file says that its columns are
BUFFER_SIZE = 256 * 1024  # of each Parquet column, in place of a whole row group of it
BATCH_BYTES = 32 * 1024 * 1024  # of a Parquet file's columns before they were packed
_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
             ".parquet": "parquet", ".pq": "parquet"}  # fmt: skip
_NO_END = "a quoted field has no end"
_TWO_VALUES = re.compile(rb"\}[ \t\r]*[{n]")
_MINUS_ZERO = re.compile(rb"[:,\[][ \t\r]*-0(?![.\deE])")  # an integer to Arrow, which writes it as 0


class Source:
    """One input file. rows() reads it once; `position` of `size` tells how far it is (0 of 0: nobody knows)."""

    def __init__(self, path: str, form: str | None, delimiter: str | None, wanted: Wanted, wake: int = -1) -> None:
        """wake: a descriptor; when it can be read, a pipe that is read ends."""
        self.path = path
        self._wanted = wanted
        suffixes = [suffix.lower() for suffix in Path(path).suffixes]
        packed = suffixes[-1:] == [".gz"]
        suffix = "".join((suffixes[:-1] if packed else suffixes)[-1:])
        self._form = form or _SUFFIXES.get(suffix)
        if self._form is None:
            raise SourceError(path, None, "the name tells no format; --format csv, jsonl or parquet does")
        self._delimiter = delimiter or ("\t" if suffix == ".tsv" else ",")
        self._is_packed = packed
        self._open_input = partial(Input, path, wake, packed=packed)
        self.size = self.position = 0
        self._names: list[str] = []
        self._integers: set[str] = set()  # fields of JSON that were integers last
        self._open()
        if self._input.is_there:  # of many files one is open at a time
            self.close()

    def _open(self) -> None:
        """Open the file, and look at what it says of its columns."""
        self._input = self._open_input()
        self._is_open = True
        self.size = self._input.size
        with self._reading():  # of pyarrow's readers only the one that is needed is loaded
            if self._form == "csv":
                self._head = b""
                self._names = self._csv_header()
            elif self._form == "parquet":
                import pyarrow.parquet

                is_plain = self._input.is_there and not self._is_packed
                self._file = pyarrow.parquet.ParquetFile(  # a path as text might be the URI of something else
                    pa.OSFile(bytes(Path(self.path))) if is_plain else io.BytesIO(self._input.stream.read()),
                    buffer_size=BUFFER_SIZE, pre_buffer=False)  # fmt: skip
                self._names = self._file.schema_arrow.names
                self.size = self._file.metadata.num_rows
                if fault := repeated_field(self._file.schema_arrow, self._needed()):
                    raise SourceError(self.path, None, fault)
        double = {name for name, count in Counter(self._names).items() if count > 1}
        if double:
            raise SourceError(self.path, None, f"the header repeats {min(double)!r}")
        if self._names:
            self._wanted.check(self.path, self._names)

    def rows(self) -> Generator[Rows, None, None]:
        readers: dict[str, Callable[[], Iterator[Rows]]] = {
            "csv": self._csv_rows, "jsonl": self._jsonl_rows, "parquet": self._parquet_rows,
        }  # fmt: skip
        if not self._is_open:
            self._open()
        with self._reading():
            yield from readers[self._form or ""]()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, EOFError, OSError, zlib.error, csv.Error, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's, not Arrow's or gzip's
            raise SourceError(self.path, None, " ".join(str(error).split())) from error

    def close(self) -> None:
        """Let go of the file; rows() opens it again."""
        self._input.close()
        self._head, self._file, self._is_open = b"", None, False

    # ---- CSV ----

    def _csv_rows(self) -> Iterator[Rows]:
        names = self._names
        while names and not self._head.strip(b"\r\n"):
            self._head = self._input.read(BLOCK_SIZE)
            if not self._head:
                return
        if not names:
            return
        ragged: list[tuple[int, str]] = []

        def note_ragged(row: Any) -> str:
            columns = f"{row.actual_columns} columns, the header has {row.expected_columns}"
            if row.text != END:
                ragged.append((row.number, _NO_END if row.text.endswith(END) else columns))
            return "skip"

        blocks = self._blocks = Blocks(self._head, self._input, LINE_LIMIT, self._delimiter)
        stream, following = iter(()), 1
        try:
            kind = pa.large_string() if self._wanted.body is None else pa.binary()
            stream = self._csv_stream(blocks, kind, note_ragged)
            for whole in stream:
                # Of one column END is a row like others.
                batch = whole[:-1] if len(names) == 1 and last_value(whole) == END.encode() else whole
                numbers, past = row_numbers(following, batch.num_rows, [row for row, _ in ragged])
                due = [item for item in ragged if item[0] < past]
                ragged[:] = [item for item in ragged if item[0] >= past]
                following = past
                self.position = blocks.position()
                for first in range(0, max(batch.num_rows, 1), BATCH_ROWS):
                    behind = numbers[first + BATCH_ROWS] if first + BATCH_ROWS < batch.num_rows else past
                    bad = [item for item in due if item[0] < behind]
                    del due[: len(bad)]
                    yield self._of_csv(batch.slice(first, BATCH_ROWS), numbers[first : first + BATCH_ROWS], bad)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error):
                raise
            raise SourceError(self.path, following, f"no end of the row in {BLOCK_SIZE:,} bytes, or in {LINE_LIMIT:,} "
                                                    "of one line") from error  # fmt: skip
        finally:
            blocks.end(stream)
        if ragged:
            yield Rows(np.empty(0, np.int64), pa.array([], pa.large_binary()), self._no_columns(), ragged)

    def _csv_stream(self, blocks: Blocks, kind: pa.DataType, note_ragged: Callable[[Any], str]) -> Any:
        import pyarrow.csv

        return pyarrow.csv.open_csv(
            blocks,
            read_options=pyarrow.csv.ReadOptions(column_names=self._names, use_threads=False, block_size=BLOCK_SIZE),
            parse_options=pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True,
                                                   invalid_row_handler=note_ragged),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(self._names, kind),
                                                       check_utf8=False, strings_can_be_null=False),
        )  # fmt: skip

    def _csv_header(self) -> list[str]:
        """Names of the first line; what was read behind it stays in _head."""
        delimiter = re.escape(self._delimiter.encode())
        # Quotes count where a name begins. Possessive, so that no turn of a loop is kept, one for each byte.
        name = rb'(?:"[^"]*+(?:""[^"]*+)*+(?:"|(\Z)))?+[^\r\n%s]*+' % delimiter
        header = re.compile(rb"%s(?:%s%s)*+" % (name, delimiter, name))
        data = self._input.first(BLOCK_SIZE)
        while True:
            data = data.lstrip(b"\r\n")
            line = header.match(data)
            end = line.end() if line else 0
            if end < len(data) and data[end : end + 1] in (b"\r", b"\n"):
                break
            more = self._input.read(BLOCK_SIZE) if len(data) < LINE_LIMIT else b""
            if not more:
                end = len(data)
                break
            data += more
        if line and any(group is not None for group in line.groups()):
            raise SourceError(self.path, None, "the header: a quoted name has no end")
        self._head = data[end:]
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            raise SourceError(self.path, None, "the header is not UTF-8") from None
        return next(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter), [])

    def _of_csv(self, batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], bad: list[tuple[int, str]]) -> Rows:
        """All columns are text, but for the body."""
        broken = {len(numbers) - 1: _NO_END} if last_value(batch).endswith(END.encode()) else {}
        wanted = batch.schema.names if self._wanted.body is None else self._wanted.columns
        columns = {name: as_text(column, name, broken) if name in wanted else column
                   for name, column in zip(batch.schema.names, batch.columns, strict=True)}  # fmt: skip
        if self._blocks.has_masked:
            for name in wanted:
                leave_out(pc.match_substring(columns[name], MASK), f"{name} is not UTF-8", broken)
            if (body := self._wanted.body) is not None:
                columns[body] = as_it_was(columns[body])
        return self._of_table(columns, numbers, broken, bad)

    def _no_columns(self) -> dict[str, pa.Array]:
        return {name: pa.array([], pa.large_string()) for name in self._wanted.columns}

    # ---- JSON lines ----

    def _jsonl_rows(self) -> Iterator[Rows]:
        row, line, rest = 1, 1, list[bytes]()  # rest: of a row whose end has not come; a pipe gives many pieces
        block = self._input.first(BLOCK_SIZE)
        while True:
            cut = block.rfind(b"\n") + 1
            data, rest = (b"".join([*rest, block[:cut]]), [block[cut:]]) if cut or not block else (b"", [*rest, block])
            self.position = self._input.tell()
            if sum(map(len, rest)) > LINE_LIMIT:
                raise SourceError(self.path, row, f"row is longer than {LINE_LIMIT:,} bytes")
            if data:
                rows, lines = self._of_lines(data, row)
                rows.lines, rows.first = line + lines, row
                yield rows
                row += len(lines)
                line += int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
            if not block:
                return
            block = self._input.read(BLOCK_SIZE)

    def _of_lines(self, data: bytes, first: int) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Rows of whole lines, and those lines, from 0, that are rows, good or bad: blank ones are none."""
        try:
            return self._of_objects(data, first)
        except pa.ArrowInvalid:
            return self._of_each_line(data.split(b"\n"), first)

    def _of_objects(self, data: bytes, first: int) -> tuple[Rows, npt.NDArray[np.int64]]:
        """The same for lines that hold one object each, whose wanted fields are text; ArrowInvalid for others."""
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        offsets = np.r_[0, ends, [] if data.endswith(b"\n") else len(data)].astype(np.int64)
        kind = pa.large_binary()
        lines = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        names = [*self._wanted.columns, *([] if self._wanted.body is None else [self._wanted.body])]
        texts = pc.ascii_trim(lines.cast(pa.large_string()), " \t\r\n")
        filled = pc.not_equal(texts, NO_TEXT)
        texts, places = texts.filter(filled), np.flatnonzero(flags(filled))
        numbers = np.arange(first, first + len(places))
        if not len(texts):
            return Rows(numbers, texts.cast(kind), self._no_columns()), places
        # No value begins behind another, so each begins a line; with as many of them as lines each line holds one.
        is_object = pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))
        if not pc.all(is_object).as_py() or _TWO_VALUES.search(data) or \
                _MINUS_ZERO.search(data) or may_hold_nan(data):  # fmt: skip
            raise pa.ArrowInvalid("not one object a line")
        table = self._parsed(data, names)
        if table.num_rows != len(texts):
            raise pa.ArrowInvalid("not one object a line")
        columns = {name: table.column(name).combine_chunks().cast(pa.large_string()) for name in names}
        body = texts if self._wanted.body is None else columns[self._wanted.body]
        if body.null_count:
            raise pa.ArrowInvalid("a body is missing")
        return Rows(numbers, body.cast(kind), {name: columns[name] for name in self._wanted.columns}), places

    def _parsed(self, data: bytes, names: list[str]) -> pa.Table:
        """The named fields of objects, each all text or all integers."""
        import pyarrow.json

        while True:
            schema = pa.schema([(name, pa.int64() if name in self._integers else pa.string()) for name in names])
            try:
                return pyarrow.json.read_json(
                    io.BytesIO(data),
                    read_options=pyarrow.json.ReadOptions(block_size=max(len(data), 1), use_threads=False),
                    parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
                )  # fmt: skip
            except pa.ArrowInvalid as error:
                number = _NUMBER.search(str(error))
                if number is None or number[1] not in names or number[1] in self._integers:
                    self._integers.clear()
                    raise
                self._integers.add(number[1])

    def _of_each_line(self, lines: list[bytes], first: int) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Rows line by line, where a field is no text or a line is no object."""
        numbers: list[int] = []
        bodies: list[bytes] = []
        columns: dict[str, list[Texts]] = {name: [] for name in self._wanted.columns}
        bad: list[tuple[int, str]] = []
        texts = [line.strip(b" \t\r") for line in lines]
        for number, text in enumerate(filter(None, texts), first):
            try:
                body, values = self._of_line(text)
            except UnicodeDecodeError:
                bad.append((number, "not UTF-8"))
            except ValueError as error:
                bad.append((number, f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)))
            else:
                numbers.append(number)
                bodies.append(body)
                for name, value in values.items():
                    columns[name].append(value)
        arrays = {name: text_array(values) for name, values in columns.items()}
        return Rows(np.array(numbers, np.int64), pa.array(bodies, pa.large_binary()), arrays, bad), \
            np.flatnonzero([*map(bool, texts)])  # fmt: skip

    def _of_line(self, text: bytes) -> tuple[bytes, dict[str, Texts]]:
        """Body and columns of one line; ValueError says why it is no row."""
        try:
            row = json_value(text)
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            # Deep nesting and long numbers are no fault of a line: it may be read without looking at them.
            try:
                rows, _ = self._of_objects(text, 1)
            except pa.ArrowInvalid:
                raise (error if isinstance(error, ValueError) else ValueError("nested too deep")) from None
            return rows.body[0].as_py(), {name: column[0].as_py() for name, column in rows.columns.items()}
        if not isinstance(row, dict):
            raise ValueError("no JSON object")
        values = {name: [json_text(item, name) for item in row[name]]
                  if name in self._wanted.keys and isinstance(row.get(name), list) else json_text(row.get(name), name)
                  for name in self._wanted.columns}  # fmt: skip
        if self._wanted.body is None:
            return text, values
        body = json_text(row.get(self._wanted.body), self._wanted.body)
        if body is None:
            raise ValueError(f"{self._wanted.body} is null" if self._wanted.body in row
                             else f"no field {self._wanted.body!r}")  # fmt: skip
        return body.encode(), values

    # ---- Parquet ----

    def _needed(self) -> list[str] | None:
        """Columns to be read; None: all."""
        return None if self._wanted.body is None else [*self._wanted.columns, self._wanted.body]

    def _parquet_rows(self) -> Iterator[Rows]:
        needed = self._needed()
        following = 1
        metadata = self._file.metadata
        every = [*range(metadata.num_row_groups)]
        groups = [[group] for group in every] if nests_dictionary(self._file.schema_arrow) else [every]
        size = sum(metadata.row_group(group).total_byte_size for group in every)
        count = max(BATCH_ROWS_LEAST, min(BATCH_ROWS, BATCH_BYTES * metadata.num_rows // max(size, 1)))
        decoded = (batch for some in groups for batch in self._file.iter_batches(count, some, needed))
        # Text is made of a batch while the next is decoded. No pipe is read here, so there is nothing to wake.
        with read_ahead(decoded, lambda: None) as batches:
            for batch in batches:
                broken: dict[int, str] = {}
                columns = {name: readable(column, name, broken)
                           for name, column in zip(batch.schema.names, batch.columns, strict=True)}  # fmt: skip
                self.position = following + batch.num_rows - 1
                yield self._of_table(columns, np.arange(following, following + batch.num_rows), broken, [])
                following += batch.num_rows

    # ---- tables ----

    def _of_table(self, columns: dict[str, pa.Array], numbers: npt.NDArray[np.int64], broken: dict[int, str],
                  bad: list[tuple[int, str]]) -> Rows:  # fmt: skip
        """Rows of readable columns; `broken`: positions of bad ones, and why."""
        texts = {name: (key_texts if name in self._wanted.keys else plain_text)(columns[name], name, broken)
                 for name in self._wanted.columns}  # fmt: skip
        if self._wanted.body is None:
            bodies = json_objects(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)), broken)
        else:
            name, bodies = self._wanted.body, columns[self._wanted.body]
            bodies = bodies if is_bytes(bodies.type) else plain_text(bodies, name, broken)
            leave_out(bodies.is_null(), f"{name} is null", broken)
        bodies = bodies.cast(pa.large_binary())
        if broken:
            kept = np.ones(len(numbers), np.bool_)
            kept[list(broken)] = False
            bad = sorted([*bad, *((int(numbers[row]), why) for row, why in broken.items())])
            mask = flag_array(kept)
            numbers, bodies = numbers[kept], bodies.filter(mask)
            texts = {name: column.filter(mask) for name, column in texts.items()}
        return Rows(numbers, bodies, texts, bad)
