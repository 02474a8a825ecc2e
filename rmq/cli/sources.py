# SPDX-License-Identifier: Apache-2.0
"""CSV, JSONL and Parquet as batches of rows: a body and the columns that become keys and tags."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from rmq.cli.bodies import json_objects

BLOCK_SIZE = 4 * 1024 * 1024
LINE_LIMIT = 64 * 1024 * 1024  # bytes of one row: a file without line ends is not loaded whole
BATCH_ROWS = 65536
FORMATS = ("csv", "jsonl", "parquet")
_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
             ".parquet": "parquet", ".pq": "parquet"}  # fmt: skip
_BOM = b"\xef\xbb\xbf"


class SourceError(Exception):
    """A file that cannot be read as what it is said to be. row: counted from 1, without a CSV's header; or None."""

    def __init__(self, path: str, row: int | None, reason: str) -> None:
        where = f"{path}: row {row}" if row is not None else path
        super().__init__(f"{where}: {reason}")
        self.row = row


@dataclass
class Rows:
    """Part of a file. numbers: row numbers, from 1; columns: text of the wanted columns; bad: (row, why) of rows that
    are none, in order; those are not among the others."""

    numbers: npt.NDArray[np.int64]
    body: pa.Array
    columns: dict[str, pa.Array]
    bad: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What becomes of a row: the columns whose text is needed, and the body column (None: the whole row)."""

    columns: tuple[str, ...]
    body: str | None

    def check(self, path: str, names: list[str]) -> None:
        for name in (*self.columns, *([self.body] if self.body else [])):
            if name not in names:
                raise SourceError(path, None, f"no column {name!r}; there are: {', '.join(names)}")


class Source:
    """One input file. rows() reads it once; position of size tells how far it is (0 of 0: not known)."""

    def __init__(self, path: str, form: str | None, delimiter: str | None, wanted: Wanted) -> None:
        self.path = path
        self._wanted = wanted
        name = Path(path)
        suffixes = [suffix.lower() for suffix in name.suffixes]
        packed = suffixes[-1:] == [".gz"]
        self._form = form or _SUFFIXES.get((suffixes[:-1] if packed else suffixes)[-1:][0] if suffixes else "")
        if self._form is None:
            raise SourceError(path, None, "the name tells no format; --format csv, jsonl or parquet does")
        self._delimiter = delimiter or ("\t" if ".tsv" in suffixes else ",")
        self._raw: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        self._stream: BinaryIO = gzip.GzipFile(fileobj=self._raw) if packed else self._raw  # type: ignore[assignment]
        self.size = 0 if path == "-" else os.fstat(self._raw.fileno()).st_size
        self._names: list[str] = []
        with self._reading():
            if self._form == "csv":
                self._names = self._csv_header()
            elif self._form == "parquet":
                stream = self._stream if path != "-" else io.BytesIO(self._stream.read())
                self._file = pyarrow.parquet.ParquetFile(stream)
                self._names = self._file.schema_arrow.names
        if self._names:
            wanted.check(path, self._names)

    @property
    def position(self) -> int:
        return self._raw.tell() if self.size and not self._raw.closed else 0

    def rows(self) -> Iterator[Rows]:
        readers: dict[str | None, Callable[[], Iterator[Rows]]] = {
            "csv": self._csv_rows, "jsonl": self._jsonl_rows, "parquet": self._parquet_rows,
        }  # fmt: skip
        with self._reading():
            yield from readers[self._form]()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError, gzip.BadGzipFile) as error:
            raise SourceError(self.path, None, " ".join(str(error).split())) from error

    def close(self) -> None:
        self._stream.close()

    # ---- CSV ----

    def _csv_rows(self) -> Iterator[Rows]:
        names = self._names
        if not names:
            return
        ragged: list[tuple[int, str]] = []

        def note_ragged(row: Any) -> str:
            ragged.append((row.number, f"{row.actual_columns} columns, the header has {row.expected_columns}"))
            return "skip"

        stream = pyarrow.csv.open_csv(
            self._stream,
            read_options=pyarrow.csv.ReadOptions(column_names=names, use_threads=False, block_size=BLOCK_SIZE),
            parse_options=pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True,
                                                   invalid_row_handler=note_ragged),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()),
                                                       check_utf8=False, strings_can_be_null=False),
        )  # fmt: skip
        following = 1
        for batch in stream:
            numbers, past = _number(following, batch.num_rows, [row for row, _ in ragged])
            due = [item for item in ragged if item[0] < past]
            ragged[:] = [item for item in ragged if item[0] >= past]
            following = past
            for first in range(0, max(batch.num_rows, 1), BATCH_ROWS):
                part = slice(first, first + BATCH_ROWS)
                yield self._of_table(batch.slice(first, BATCH_ROWS), numbers[part], due if first == 0 else [])
        if ragged:
            yield Rows(np.empty(0, np.int64), pa.array([], pa.large_binary()), self._no_columns(), ragged)

    def _csv_header(self) -> list[str]:
        lines: list[str] = []
        while not lines or sum(line.count('"') for line in lines) % 2:
            line = self._stream.readline(LINE_LIMIT)
            if not line:
                break
            try:
                text = (line.removeprefix(_BOM) if not lines else line).decode()
            except UnicodeDecodeError:
                raise SourceError(self.path, None, "the header is not UTF-8") from None
            if not lines and not text.strip():
                continue
            lines.append(text)
        if not lines:
            return []
        names = next(csv.reader(io.StringIO("".join(lines)), delimiter=self._delimiter))
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise SourceError(self.path, None, f"the header repeats {min(double)!r}")
        return names

    def _no_columns(self) -> dict[str, pa.Array]:
        return {name: pa.array([], pa.large_string()) for name in self._wanted.columns}

    # ---- JSON lines ----

    def _jsonl_rows(self) -> Iterator[Rows]:
        following, rest = 1, b""
        while True:
            block = self._stream.read(BLOCK_SIZE)
            if following == 1 and not rest:
                block = block.removeprefix(_BOM)
            data = rest + block
            end = data.rfind(b"\n") + 1 if block else len(data)
            rest = data[end:]
            if len(rest) > LINE_LIMIT:
                raise SourceError(self.path, following, f"row is longer than {LINE_LIMIT:,} bytes")
            if end:
                part = self._of_lines(data[:end], following)
                following += data.count(b"\n", 0, end) + (not data[:end].endswith(b"\n"))
                yield part
            if not block:
                return

    def _of_lines(self, data: bytes, first: int) -> Rows:
        """Rows of whole lines. A row's number is its line's; blank lines are no rows."""
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        offsets = np.r_[0, ends, [] if data.endswith(b"\n") else len(data)].astype(np.int64)
        kind = pa.large_binary()
        lines = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        numbers = np.arange(first, first + len(lines))
        names = [*self._wanted.columns, *([self._wanted.body] if self._wanted.body else [])]
        try:
            texts = pc.ascii_trim(lines.cast(pa.large_string()), " \t\r\n")
            filled = pc.not_equal(texts, "")
            texts, numbers = texts.filter(filled), numbers[filled.to_numpy(zero_copy_only=False)]
            if not len(texts):
                return Rows(numbers, texts.cast(kind), self._no_columns())
            schema = pa.schema([(name, pa.string()) for name in names])
            table = pyarrow.json.read_json(
                io.BytesIO(data),
                read_options=pyarrow.json.ReadOptions(block_size=max(len(data), 1), use_threads=False),
                parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )  # fmt: skip
            if table.num_rows != len(texts):
                raise pa.ArrowInvalid("not one object a line")
        except pa.ArrowInvalid:
            return self._of_each_line(data.split(b"\n"), first)
        columns = {name: table.column(name).combine_chunks().cast(pa.large_string()) for name in names}
        body = columns[self._wanted.body] if self._wanted.body else texts
        missing = np.flatnonzero(body.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            return self._of_each_line(data.split(b"\n"), first)
        return Rows(numbers, body.cast(kind), {name: columns[name] for name in self._wanted.columns})

    def _of_each_line(self, lines: list[bytes], first: int) -> Rows:
        """The same line by line, where columns are no text or a line is no object."""
        numbers: list[int] = []
        bodies: list[bytes] = []
        columns: dict[str, list[str | None]] = {name: [] for name in self._wanted.columns}
        bad: list[tuple[int, str]] = []
        for number, line in enumerate(lines, first):
            text = line.strip(b" \t\r")
            if not text:
                continue
            try:
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise ValueError("no JSON object")
                body = text if self._wanted.body is None else _json_text(row.get(self._wanted.body))
                if body is None:
                    raise ValueError(f"no field {self._wanted.body!r}")
                values = {name: _json_text(row.get(name)) for name in columns}
            except UnicodeDecodeError:
                bad.append((number, "not UTF-8"))
            except (ValueError, RecursionError) as error:
                bad.append((number, f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)))
            else:
                numbers.append(number)
                bodies.append(body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass"))
                for name, value in values.items():
                    columns[name].append(value)
        arrays = {name: pa.array(texts, pa.large_string()) for name, texts in columns.items()}
        return Rows(np.array(numbers, np.int64), pa.array(bodies, pa.large_binary()), arrays, bad)

    # ---- Parquet ----

    def _parquet_rows(self) -> Iterator[Rows]:
        needed = None if self._wanted.body is None else [*self._wanted.columns, self._wanted.body]
        following = 1
        for batch in self._file.iter_batches(batch_size=BATCH_ROWS, columns=needed):
            yield self._of_table(batch, np.arange(following, following + batch.num_rows), [])
            following += batch.num_rows

    # ---- tables ----

    def _of_table(self, batch: pa.RecordBatch, numbers: npt.NDArray[np.int64], bad: list[tuple[int, str]]) -> Rows:
        """Rows of a batch; those with text that is not UTF-8 are bad."""
        broken: dict[int, str] = {}
        raw = self._wanted.body
        columns: dict[str, pa.Array] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in self._wanted.columns or raw is None:
                columns[name] = _as_text(column, name, broken) if pa.types.is_binary(column.type) else column
        if raw is not None:
            body = batch.column(batch.schema.get_field_index(raw))
            for row in np.flatnonzero(body.is_null().to_numpy(zero_copy_only=False)).tolist():
                broken.setdefault(row, f"{raw} is null")
            body = body if pa.types.is_binary(body.type) or pa.types.is_large_binary(body.type) else \
                body.cast(pa.large_string())  # fmt: skip
        if broken:
            kept = np.ones(batch.num_rows, np.bool_)
            kept[list(broken)] = False
            bad = sorted([*bad, *((int(numbers[row]), why) for row, why in broken.items())])
            columns = {name: column.filter(pa.array(kept)) for name, column in columns.items()}
            numbers = numbers[kept]
            body = body.filter(pa.array(kept)) if raw is not None else None
        if raw is None:
            body = json_objects(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))
        texts = {name: _key_text(columns[name]) for name in self._wanted.columns}
        return Rows(numbers, body.cast(pa.large_binary()), texts, bad)


def _number(following: int, count: int, left_out: list[int]) -> tuple[npt.NDArray[np.int64], int]:
    """Numbers of the next `count` rows, without those left out, and the number after them."""
    numbers = np.arange(following, following + count + len(left_out))
    numbers = numbers[~np.isin(numbers, left_out)][:count]
    past = int(numbers[-1]) + 1 if count else following
    while past in left_out:
        past += 1
    return numbers, past


def _as_text(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """A binary column as text; rows that are not UTF-8 become null and are put into `broken`."""
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts: list[str | None] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                texts.append(None)
                broken.setdefault(row, f"{name} is not UTF-8")
        return pa.array(texts, pa.large_string())


def _key_text(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_string())


def _json_text(value: Any) -> str | None:
    """A field's text: of text itself, of anything else its JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
