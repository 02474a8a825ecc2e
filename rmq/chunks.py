# SPDX-License-Identifier: Apache-2.0
"""What put_many and put_batch take, messages or Arrow data, in chunks of rows that are checked and put at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

from rmq._core import _layout as L
from rmq._core._message import Message, check_topic, next_messages
from rmq._core._putbatch import PutBatch
from rmq.columns import ColumnReader, check_queue_id
from rmq.errors import IllegalMessageError, MessageTypeError
from rmq.keys import is_arrow

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 8192
CHUNK_BYTES = 64 * 1024 * 1024  # that a chunk would hold in memory: bodies of an iterator, what dictionaries stand for


class Load(Protocol):
    """Gives a batch the rows of a chunk from `first` on."""

    def __call__(self, batch: PutBatch, first: int = 0) -> None: ...


Chunk = tuple[int, Load]


def _batches_of(table: Any) -> Iterator[pa.RecordBatch]:
    """Arrow record batches of anything with an Arrow C interface, one at a time."""
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        yield table
    elif isinstance(table, pa.Table | pa.RecordBatchReader):
        yield from _at_least_one(table.to_reader() if isinstance(table, pa.Table) else table)
    elif isinstance(table, pa.StructArray):  # C's interface has no slices and no nulls of rows
        yield pa.RecordBatch.from_struct_array(table)
    elif isinstance(table, pa.ChunkedArray):
        yield from chain.from_iterable(map(_batches_of, table.chunks))
    elif hasattr(table, "__arrow_c_stream__"):
        yield from _at_least_one(_imported(pa.RecordBatchReader.from_stream, table))
    elif hasattr(table, "__arrow_c_array__"):
        yield _imported(pa.record_batch, table)
    else:
        raise MessageTypeError(f"expected Arrow data as before, got {type(table).__name__}", row=0)


def _at_least_one(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The batches; one without rows where there is none, whose columns are checked. Errors of a scan pass as they are.
    """
    import pyarrow as pa

    is_empty = True
    for batch in reader:
        is_empty = False
        yield batch
    if is_empty:
        yield pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in reader.schema], schema=reader.schema)


def _imported(load: Callable[[Any], Any], table: Any) -> Any:
    import pyarrow as pa

    try:
        return load(table)
    except pa.ArrowInvalid as error:
        if "non-struct" not in str(error):  # of one column, which has no name
            raise
        got = type(table).__name__
        raise TypeError(f"messages must be Arrow data with named columns, got {got}: {error}") from None


def put_chunks(messages: Any, topic: str | None, queue_id: int | None,
               columns: Mapping[str, str] | None) -> Iterator[Chunk]:  # fmt: skip
    """(rows, loader) for each chunk of what put_many was given; a table's columns are checked before its first."""
    is_plain = topic is None and queue_id is None and columns is None
    if is_plain and type(messages) is list and messages and type(messages[0]) is Message:  # as most are, at once
        return _list_chunks(messages)
    if is_arrow(messages):
        return _table_chunks([messages], topic, queue_id, columns)
    _check_iterable(messages, "Message or Arrow data")
    source = iter(messages)
    head = list(islice(source, 1))
    items = chain(head, source) if head else iter(head)  # one that ended is not asked again
    if head and is_arrow(head[0]):
        return _table_chunks(items, topic, queue_id, columns)
    if head and not is_plain:
        raise ValueError("topic, queue_id and columns are for Arrow data: a Message has its own")
    if topic is not None:  # of no row
        check_topic(topic)
    check_queue_id(queue_id)
    return _list_chunks(messages if type(messages) is list else items)


def _check_iterable(messages: Any, of: str) -> None:
    if isinstance(messages, Message | str | bytes) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be an iterable of {of}, got {type(messages).__name__}")


def _list_chunks(source: list[Message] | Iterator[Message]) -> Iterator[Chunk]:
    for chunk in _collected(source):
        yield len(chunk), lambda batch, first=0, chunk=chunk: batch.load(chunk[first:] if first else chunk)


def _collected(source: list[Message] | Iterator[Message]) -> Iterator[list[Message]]:
    """CHUNK_ROWS messages at a time; of an iterator fewer with CHUNK_BYTES: nobody else may hold them."""
    first, is_over = 0, False
    if isinstance(source, list):
        while chunk := source[first : first + CHUNK_ROWS]:
            first += CHUNK_ROWS
            yield chunk
        return
    while not is_over:
        chunk, is_over = next_messages(source, CHUNK_ROWS, CHUNK_BYTES)
        if chunk:
            yield chunk


def _table_chunks(tables: Iterable[Any], topic: str | None, queue_id: int | None,
                  columns: Mapping[str, str] | None) -> Iterator[Chunk]:  # fmt: skip
    reader, schema = None, None
    for table in chain.from_iterable(map(_batches_of, tables)):
        if reader is None or not table.schema.equals(schema, check_metadata=True):
            reader, schema = ColumnReader(table.schema, topic=topic, queue_id=queue_id, columns=columns), table.schema
        first = 0
        for end in reader.chunk_ends(table, CHUNK_ROWS, CHUNK_BYTES):
            chunk = table.slice(first, end - first)
            yield chunk.num_rows, partial(_load_rows, reader, chunk)
            first = end


def _load_rows(reader: ColumnReader, chunk: pa.RecordBatch, batch: PutBatch, first: int = 0) -> None:
    reader.load(chunk.slice(first) if first else chunk, batch)


def batch_items(messages: Iterable[Message]) -> list[Message]:
    """The messages of a batch of RocketMQ's. IllegalMessageError unless they have one queue, no transaction, no delay.
    """
    _check_iterable(messages, "Message")
    items = list(messages)
    topic, queue_id = None, 0
    for row, message in enumerate(items):
        if not isinstance(message, Message):
            raise MessageTypeError(f"expected Message, got {type(message).__name__}", row=row)
        if row == 0:
            topic, queue_id = message.topic, message.queue_id
        wrong = ""
        if message.topic != topic or message.queue_id != queue_id:
            wrong = "a batch has one topic and one queue"
        elif message.sys_flag & L.SYS_FLAG_TRANSACTION_MASK:
            wrong = "a batch holds no transactional messages"
        elif message.is_delayed:
            wrong = "a batch holds no delayed messages"
        if wrong:
            raise IllegalMessageError(wrong, row=row)
    return items
