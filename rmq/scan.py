# SPDX-License-Identifier: Apache-2.0
"""Ranges of the log to Arrow record batches, with column and row selection."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rmq._core import _layout as L
from rmq._core._columns import KINDS, ColumnBuilder
from rmq._core._mapguard import lost_pages
from rmq._core._record import (
    PARSE_PROPERTIES,
    SCAN_BAD_BODY_CRC,
    SCAN_BAD_RECORD_CRC,
    SCAN_BLANK,
    SCAN_FULL,
    SCAN_LIMIT,
    SCAN_REASONS,
    resync,
)
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored_at
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError, undamaged
from rmq.logscan import CHECK_CRC
from rmq.logsegment import Segment
from rmq.mappedfile import MappedFile
from rmq.message import SOME_SEGMENT, StoredMessage, carrying, inner_messages, plain_body
from rmq.paths import segment_name
from rmq.segment import EXHAUSTED

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("rmq")

COLUMNS = tuple(name for name in KINDS if not name.startswith("raw_"))
PLAIN_BODY, RAW_BODY = {b"rmq.body": b"plain"}, {b"rmq.body": b"raw"}  # tell put_many whether compression bits hold
BLOCK_BYTES = 1024 * 1024  # records that are checked, then copied: what the cache still holds
TABLE_BYTES = 64 * 1024 * 1024  # text of a batch of records that are made one table
_HEAD = struct.Struct(">iiiiiqqiq")
_TAIL = struct.Struct(">iqi")


@dataclass(frozen=True)
class LostRange:
    """Bytes [begin_phy_offset, end_phy_offset) of the log in which a scan found no whole record; `path` holds them all.

    What lay there is not known: messages, or the unused end of a segment. reason: what is wrong at the first byte.
    """

    path: str
    begin_phy_offset: int
    end_phy_offset: int
    reason: str


Tell = Callable[[Path, int, int, str], None]
Keep = Callable[[RecordBatch], object]
KeysOf = Callable[[int], Set[str]]


def teller(on_damage: str, lost: list[LostRange] | None) -> Tell | None:
    """What a scan that goes on behind damage calls for each range: a warning, and an item of `lost`; None: "raise"."""
    if on_damage not in ("raise", "skip"):
        raise ValueError(f"on_damage must be 'raise' or 'skip', got {on_damage!r}")
    if lost is not None and not isinstance(lost, list):
        raise TypeError(f"lost must be a list, got {type(lost).__name__}")
    if on_damage == "raise":
        return None

    def tell(path: Path, begin: int, end: int, reason: str) -> None:
        logger.warning("%s: no whole record in the log's bytes %d to %d: %s", path, begin, end - 1, reason)
        if lost is not None:
            lost.append(LostRange(str(path), begin, end, reason))

    return tell


def checked_columns(columns: Iterable[str] | None) -> tuple[str, ...]:
    """Column names as a tuple; None: all but the raw ones. TypeError, ValueError naming what is wrong."""
    if columns is None:
        return COLUMNS
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise TypeError(f"columns must be a sequence of names, got {type(columns).__name__}")
    names = []
    for name in columns:
        if not isinstance(name, str):
            raise TypeError(f"columns must be names, got {type(name).__name__}")
        names.append(str(name))  # of a subclass, as NumPy's
        if name not in KINDS:
            raise ValueError(f"columns: no column {name!r}; there are: {', '.join(KINDS)}")
    if len(set(names)) != len(names):
        raise ValueError(f"columns repeat {next(name for name in names if names.count(name) > 1)!r}")
    return tuple(names)


@cache
def arrow_field(name: str, kind: str) -> pa.Field:
    """A column of a kind, as of KINDS."""
    import pyarrow as pa

    text = pa.string()
    types = {"int32": pa.int32(), "int64": pa.int64(), "timestamp": pa.timestamp("ms", tz="UTC"), "binary": pa.binary(),
             "text": text, "nullable text": text, "list": pa.list_(text), "map": pa.map_(text, text)}  # fmt: skip
    return pa.field(name, types[kind])


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Arrow schema of the given columns."""
    import pyarrow as pa

    return pa.schema([arrow_field(column, KINDS[column]) for column in columns],
                     metadata=PLAIN_BODY if "body" in columns else RAW_BODY if "raw_body" in columns else None)


def _text(count: int, offsets: Any, data: Any, valid: Any = None) -> pa.Array:
    import pyarrow as pa

    bits = None if valid is None else np.packbits(np.frombuffer(valid, np.uint8, count), bitorder="little")
    bitmap = None if bits is None else pa.py_buffer(bits)
    return pa.Array.from_buffers(pa.string(), count, [bitmap, pa.py_buffer(offsets), pa.py_buffer(data)])


def _array(kind: str, type_: pa.DataType, count: int, buffers: tuple[Any, ...]) -> pa.Array:
    import pyarrow as pa

    if kind in ("text", "nullable text"):
        *valid, offsets, data = buffers
        return _text(count, offsets, data, *valid)
    if kind == "list":
        starts, offsets, data = buffers
        items = _text(len(offsets) // 4 - 1, offsets, data)
        return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(starts)], children=[items])
    if kind == "map":
        starts, name_offsets, names, value_offsets, values = buffers
        items = len(name_offsets) // 4 - 1
        places = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(starts)])
        return pa.MapArray.from_arrays(places, _text(items, name_offsets, names),
                                       _text(items, value_offsets, values))  # fmt: skip
    return pa.Array.from_buffers(type_, count, [None, *(pa.py_buffer(buffer) for buffer in buffers)])


class BatchMaker:
    """Collects rows of scanned batches into Arrow record batches of the wanted columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.schema = schema_of(columns)
        helpers = [name for name in ("sys_flag", "phy_offset") if "body" in columns and name not in columns]
        self._builder = ColumnBuilder([*columns, *helpers])
        self.checks = PARSE_PROPERTIES if {"keys", "tags", "uniq_key"} & set(columns) else 0

    @property
    def count(self) -> int:
        return self._builder.count

    @property
    def data_size(self) -> int:
        return self._builder.data_size

    def append(self, batch: RecordBatch, first: int = 0, last: int | None = None) -> None:
        self._builder.append(batch, first, last)

    def finish(self, limit: int) -> Iterator[pa.RecordBatch]:
        """The rows so far; of decompressed bodies about `limit` bytes a batch. CorruptFileError when one is none."""
        import pyarrow as pa

        compressed = self._builder.compressed
        count, columns = self._builder.finish()
        arrays = {name: _array(KINDS[name], arrow_field(name, KINDS[name]).type, count, buffers)
                  for name, buffers in columns.items()}  # fmt: skip
        whole = pa.RecordBatch.from_arrays([arrays[name] for name in self.schema.names], schema=self.schema)
        if not arrays:  # from_arrays would count no rows
            whole = pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None]))
        if not (compressed and "body" in arrays):
            yield whole
            return
        needed = [arrays[name].to_pylist() for name in ("body", "sys_flag", "phy_offset")]
        damage: list[CorruptFileError] = []
        plain = undamaged((plain_body(*values) for values in zip(*needed, strict=True)), damage)
        place, first = self.schema.get_field_index("body"), 0
        while bodies := list(_some(plain, limit)):
            part = whole.slice(first, len(bodies))
            yield part.set_column(place, self.schema.field(place), pa.array(bodies, pa.binary()))
            first += len(bodies)
        if damage:
            raise damage.pop()


def _some(bodies: Iterator[bytes], limit: int) -> Iterator[bytes]:
    """The next ones, about `limit` bytes of them."""
    size = 0
    while size < limit and (body := next(bodies, None)) is not None:
        size += len(body)
        yield body


def unwrapped(batch: RecordBatch, keys: Set[str] | None) -> Iterator[RecordBatch]:
    """The batch with each inner batch replaced by its messages, each with its own queue offset. keys: for carrying."""
    if not batch.has_inner_batches():
        return iter((batch,))
    return (part for _, part in unwrapped_rows(batch, None if keys is None else lambda _: keys))


def unwrapped_rows(batch: RecordBatch, keys_of: KeysOf | None) -> Iterator[tuple[int, RecordBatch]]:
    """Each row, with batches of its own: the messages of an inner batch, or the one message."""
    for row in range(len(batch)):
        wrapper = stored_at(batch, row, StoredMessage)
        for part in _adopted(_items(wrapper, None if keys_of is None else keys_of(row))):
            yield row, part


def _items(wrapper: StoredMessage, keys: Set[str] | None) -> list[StoredMessage]:
    items = inner_messages(wrapper)
    return [wrapper] if not items else items if keys is None else carrying(wrapper, items, keys)


def _adopted(items: list[StoredMessage]) -> Iterator[RecordBatch]:
    """Messages of one record, about BLOCK_BYTES together: each has its topic, however long. Raises before the first."""
    topic = items[0].topic.encode()
    if len(topic) > 0xFFFF:
        raise CorruptFileError(SOME_SEGMENT, items[0].phy_offset, "topic is no UTF-8 and too long to be shown")

    def parts() -> Iterator[RecordBatch]:
        data, places = bytearray(), []
        for number, item in enumerate(items, 1):
            places.append((len(data), item.size))
            data += _record_of(item, topic)
            if len(data) >= BLOCK_BYTES or number == len(items):
                own = RecordBatch(len(places))
                own.adopt(bytes(data), places)
                yield own
                data, places = bytearray(), []

    return parts()


def sound(log: CommitLog, batch: RecordBatch, has_bodies: bool, keys: Set[str] | None,
          tell: Tell) -> Iterator[RecordBatch]:  # fmt: skip
    """unwrapped, less the rows whose inner batch or compressed body breaks the format: those are told."""
    if not (batch.numbers("sys_flag") & (L.SYS_FLAG_INNER_BATCH | L.SYS_FLAG_COMPRESSED)).any():
        yield batch
        return
    for row in range(len(batch)):
        wrapper = stored_at(batch, row, StoredMessage)
        try:
            items = _items(wrapper, keys)
            for item in items if has_bodies else ():
                plain_body(item.raw_body, item.sys_flag, item.phy_offset)
            parts = _adopted(items)
        except CorruptFileError as error:
            segment = log.segment_at(wrapper.phy_offset)
            start = wrapper.phy_offset - wrapper.phy_offset % log.segment_size  # of one that was cleaned meanwhile
            path = log.directories[0] / segment_name(start) if segment is None else segment.path
            tell(path, wrapper.phy_offset, wrapper.phy_offset + wrapper.size, error.reason)
            continue
        yield from parts


def _record_of(message: StoredMessage, name: bytes) -> bytes:
    """A record in memory for one message of a batch: the wrapper's place, its own flag, body and properties."""
    body, properties = message.raw_body, message.raw_properties
    tail = _TAIL.pack(message.reconsume_times, message.prepared_transaction_offset, len(body)) + body
    tail += struct.pack(">H", len(name)) + name + struct.pack(">H", len(properties)) + properties
    middle = message._born_host + struct.pack(">q", message.store_timestamp) + message._store_host
    size = _HEAD.size + len(middle) + len(tail)
    head = _HEAD.pack(size, L.RECORD_MAGIC_V2, message.body_crc, message.queue_id, message.flag, message.queue_offset,
                      message.phy_offset, message.sys_flag, message.born_timestamp)  # fmt: skip
    return b"".join((head, middle, tail))


class WholeRecords:
    """CommitLog.records that goes on at the next whole record; what it leaves out is told, file by file."""

    def __init__(self, log: CommitLog, begin: int, end: int, batch: RecordBatch, tell: Tell, *, checks: int = 0,
                 **options: Any) -> None:  # fmt: skip
        self._log, self._begin, self._end = log, begin, end
        self._batch, self._tell, self._checks, self._options = batch, tell, checks, options
        self._file: MappedFile | None = None  # of the rows at hand
        self._lost = 0  # pages of any file, when these rows had been found whole

    def __iter__(self) -> Iterator[RecordBatch]:
        log, begin = self._log, self._begin
        while begin < self._end:
            start = begin - begin % log.segment_size
            stop = min(self._end, start + log.segment_size)
            segment = log.segment_at(begin)
            if segment is None:
                self._tell(log.directories[0] / segment_name(start), begin, stop, "segment is missing")
            else:
                yield from self._of_segment(segment, begin, stop)
            begin = stop

    def check(self) -> None:
        """CorruptFileError when a page has gone since the rows at hand were found whole: ask once they are copied."""
        if self._file is not None and lost_pages() != self._lost:
            self._file.check()

    def _of_segment(self, segment: Segment, begin: int, end: int) -> Iterator[RecordBatch]:
        """The whole records of one segment in [begin, end), whatever lies between them."""
        batch, tell = self._batch, self._tell
        try:
            file = segment.of_any_size(begin, end)  # what is there is read
        except (CorruptFileError, OSError) as error:
            if getattr(error, "errno", None) in EXHAUSTED:
                raise  # of this process: the file may be whole
            tell(segment.path, begin, end, error.reason if isinstance(error, CorruptFileError) else str(error.strerror))
            return
        with closing(file), memoryview(file.map)[: self._log.segment_size] as data:
            limit = min(end, segment.start + file.size)
            while begin < limit:
                stop = self._scan(file, data, begin, limit)
                begin = batch.next_phy_offset
                if batch.count:
                    yield batch
                    self.check()
                if stop == SCAN_BLANK:
                    break
                if stop in (SCAN_FULL, SCAN_LIMIT):
                    continue
                position = begin - segment.start
                if stop in (SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC):  # lengths add up: they say where the next one is
                    following = begin + int.from_bytes(data[position : position + 4], "big")
                elif (following := resync(data, segment.start, begin + 1, limit)) < 0:
                    following = limit
                tell(segment.path, begin, following, SCAN_REASONS[stop])
                begin = following
            batch.release()
            self._file = None
            if begin < limit:  # a blank record ends the segment
                return
        if max(begin, limit) < end:
            tell(segment.path, max(begin, limit), end,
                 f"file has {file.size} bytes, expected {self._log.segment_size}")  # fmt: skip

    def _scan(self, file: MappedFile, data: memoryview, begin: int, limit: int) -> int:
        """Rows from `begin` on. A page that is gone reads as zeros: bodies are checked then, wanted or not."""
        stop = self._batch.scan(data, file.start, begin, limit, checks=self._checks, **self._options)
        if lost_pages() and file.map.lost >= 0:
            stop = self._batch.scan(data, file.start, begin, limit, checks=self._checks | CHECK_CRC, **self._options)
        self._file, self._lost = file, lost_pages()
        return stop


def aligned(log: CommitLog, phy_offset: int, end: int) -> int:
    """CommitLog.align on a damaged log."""
    segment = log.segment_at(phy_offset) if phy_offset < end else None
    if segment is None or segment.start == phy_offset:
        return min(phy_offset, end)
    for batch in WholeRecords(log, segment.start, min(end, segment.end), RecordBatch(), lambda *_: None):
        offsets = batch.numbers("phy_offset")
        if offsets[-1] >= phy_offset:
            return int(offsets[np.searchsorted(offsets, phy_offset)])
    return min(segment.end, end)


def record_batches(log: CommitLog, begin: int, end: int, maker: BatchMaker, *, checks: int, keep: Keep | None,
                   keys: Set[str] | None, batch_rows: int, batch_bytes: int, tell: Tell | None,
                   skip_removed: bool) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Arrow batches of the records in [begin, end): at most batch_rows rows, about batch_bytes of text each.

    keep: takes what is not wanted out of a scanned batch; None: all is. keys: what carrying has to go by; None: all
    messages of an inner batch. checks: what keep and the reader need.
    Raises CorruptFileError at the first byte that is no record; what lies before was yielded. With `tell` it goes on
    at the next whole record, with skip_removed behind what is cleaned away meanwhile.
    """
    batch = RecordBatch(min(8192, batch_rows))
    damage: list[CorruptFileError] = []  # one at most: what came before it is still handed out
    options = {"checks": maker.checks | checks, "byte_limit": min(batch_bytes, BLOCK_BYTES)}
    whole = None if tell is None else WholeRecords(log, begin, end, batch, tell, **options)
    check = log.check if whole is None else whole.check
    records = whole or log.records(begin, end, batch=batch, skip_removed=skip_removed, **options)
    for scanned in undamaged(records, damage):
        if keep is not None:
            keep(scanned)
        for rows in undamaged(unwrapped(scanned, keys), damage) if tell is None else \
                sound(log, scanned, "body" in maker.schema.names, keys, tell):  # fmt: skip
            first = 0
            while first < len(rows):
                last = min(len(rows), first + batch_rows - maker.count)
                maker.append(rows, first, last)
                check()
                first = last
                if maker.count >= batch_rows or maker.data_size >= batch_bytes:
                    yield from maker.finish(batch_bytes)
        if damage:
            break
    if maker.count:
        yield from maker.finish(batch_bytes)
    if damage:
        raise damage.pop()
