# SPDX-License-Identifier: Apache-2.0
"""Ranges of the log to Arrow record batches, with column and row selection."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rmq._core import _layout as L
from rmq._core._columns import KINDS, ColumnBuilder
from rmq._core._record import (
    PARSE_PROPERTIES,
)
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored_at
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError, undamaged
from rmq.message import SOME_SEGMENT, StoredMessage, carrying, inner_messages, plain_body
from rmq.paths import segment_name
from rmq.wholerecords import Tell, WholeRecords

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("rmq")

COLUMNS = tuple(name for name in KINDS if not name.startswith("raw_"))
PLAIN_BODY, RAW_BODY = {b"rmq.body": b"plain"}, {b"rmq.body": b"raw"}  # tell put_many whether compression bits hold
BLOCK_BYTES = 1024 * 1024  # records that are checked, then copied: what the cache still holds
TABLE_BYTES = 64 * 1024 * 1024  # text of a batch of records that are made one table
_HEAD = struct.Struct(">iiiiiqqiq")
_TAIL = struct.Struct(">iqi")


Keep = Callable[[RecordBatch], object]
KeysOf = Callable[[int], Set[str]]


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
    copies = bool({"body", "raw_body", "properties", "raw_properties"} & set(maker.schema.names))
    whole = None if tell is None else WholeRecords(log, begin, end, batch, tell, copies=copies, **options)
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
