# SPDX-License-Identifier: Apache-2.0
"""Arrow batches of exactly Spark's types: what a scan gives, cast and renamed at the edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rmq._core._columns import KINDS
from rmq.tables import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

DDL = {"text": "string", "nullable text": "string", "int32": "int", "int64": "bigint", "timestamp": "timestamp",
       "binary": "binary", "list": "array<string>", "map": "map<string,string>"}  # fmt: skip
STORE = "store"  # column that says of which of several stores a row is
KAFKA_DDL = {"key": "binary", "value": "binary", "topic": "string", "partition": "int", "offset": "bigint",
             "timestamp": "timestamp", "timestampType": "int"}  # fmt: skip
HEADERS_DDL = {"headers": "array<struct<key:string,value:binary>>"}
MOST_MS = (2**63 - 1) // 1000  # Spark's times are 64 bits of microseconds
LOG_APPEND_TIME = 1  # Kafka's timestampType of a time that the broker set
KAFKA_SOURCES = {"key": "keys", "value": "body", "topic": "topic", "partition": "queue_id", "offset": "queue_offset",
                 "timestamp": "store_timestamp", "timestampType": None, "headers": "properties"}  # fmt: skip
TABLES_DDL = {name: {column: DDL[kind] for column, kind in table.items()} for name, table in TABLES.items()}


def ddl(columns: dict[str, str], with_store: bool) -> str:
    """Schema text of Spark: name type, ... What `timestamp` is there spark.sql.timestampType says."""
    named = ({STORE: "string"} if with_store else {}) | columns
    kinds = {"timestamp": "timestamp_ltz"}
    return ", ".join(f"`{name}` {kinds.get(kind, kind)}" for name, kind in named.items())


def native_ddl(columns: Sequence[str]) -> dict[str, str]:
    return {name: DDL[KINDS[name]] for name in columns}


def may_be_null(column: str, kind: str) -> bool:
    """Whether rows lack a column of a Spark type: texts that messages may not have, times beyond Spark's."""
    return kind == "timestamp" or column == "key" or KINDS.get(column) == "nullable text"


def kafka_ddl(include_headers: bool) -> dict[str, str]:
    return KAFKA_DDL | (HEADERS_DDL if include_headers else {})


def native_batch(batch: pa.RecordBatch, target: pa.Schema, store: str) -> pa.RecordBatch:
    """The columns of `target` by name, each of its type; `store` is constant."""
    import pyarrow as pa

    arrays = [pa.repeat(pa.scalar(store), len(batch)) if field.name == STORE else batch.column(field.name)
              for field in target]  # fmt: skip
    return pa.RecordBatch.from_arrays([_cast(array, field.type) for array, field in zip(arrays, target, strict=True)],
                                      schema=target)  # fmt: skip


def kafka_batch(batch: pa.RecordBatch, target: pa.Schema, store: str) -> pa.RecordBatch:
    """The same in the shape of Spark's Kafka source. key: its keys with a space
    between them, NULL when a message has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    made = {}
    for field in target:
        source = KAFKA_SOURCES.get(field.name)
        if field.name == STORE:
            made[field.name] = pa.repeat(pa.scalar(store), len(batch))
        elif field.name == "timestampType":
            made[field.name] = pa.repeat(pa.scalar(LOG_APPEND_TIME, pa.int32()), len(batch))
        elif field.name == "key":
            keys = batch.column("keys")
            joined = pc.binary_join(keys, " ").cast(pa.binary())
            made[field.name] = pc.if_else(pc.equal(pc.list_value_length(keys), 0), pa.scalar(None, pa.binary()), joined)
        elif field.name == "headers":
            made[field.name] = _headers(batch.column("properties"), field.type)
        else:
            assert source is not None
            made[field.name] = batch.column(source)
    return pa.RecordBatch.from_arrays([_cast(made[field.name], field.type) for field in target], schema=target)


def _headers(properties: pa.MapArray, type_: pa.DataType) -> pa.ListArray:
    import pyarrow as pa

    items = pa.StructArray.from_arrays([properties.keys, properties.items.cast(pa.binary())],
                                       fields=list(type_.value_type))  # fmt: skip
    return pa.ListArray.from_arrays(properties.offsets, items, type=type_)


def _cast(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """The array as another type; of times, which are ms, those that Spark's microseconds cannot hold are NULL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.type == type_:
        return array
    try:
        return array.cast(type_)
    except pa.ArrowInvalid:
        if not pa.types.is_timestamp(type_):
            raise
        ms = array.cast(pa.int64())
        fits = pc.and_(pc.greater_equal(ms, -MOST_MS), pc.less_equal(ms, MOST_MS))
        return pc.if_else(fits, array, pa.scalar(None, array.type)).cast(type_)


def in_pieces(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """A batch as slices of at most `size` bytes, or of one row: Spark's JVM holds each whole."""
    if len(batch) <= 1 or batch.nbytes <= size:
        yield batch
        return
    half = len(batch) // 2
    yield from in_pieces(batch.slice(0, half), size)
    yield from in_pieces(batch.slice(half), size)


def sources_of(target: Sequence[str], mode: str) -> list[str]:
    """Columns of a scan that a batch of these Spark columns is made of."""
    if mode == "native":
        return [name for name in target if name != STORE]
    named = (KAFKA_SOURCES[name] for name in target if name != STORE)
    return list(dict.fromkeys(name for name in named if name))
