# SPDX-License-Identifier: Apache-2.0
"""Look-ups as Spark functions: the compiled index, called on Arrow batches of keys."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]
from pyspark.sql.types import StructType

from rmq.config import StoreConfig
from rmq.keys import check_limit, encoded, hash_keys, list_array
from rmq.message import is_hex_id, parse_offset_msg_id
from rmq.scan import checked_columns
from rmq.spark.opened import check_version, for_lookups, using
from rmq.spark.partitions import arrow_schema
from rmq.spark.schema import ddl, native_batch, native_ddl
from rmq.store import Store
from rmq.version import __version__

MAX_OFFSETS = 32
DEFAULT_SLOTS = 5_000_000
MESSAGE_COLUMNS = ("phy_offset", "queue_id", "queue_offset", "store_timestamp", "tags", "body")


class Probe:
    """One store as a look-up asks it: picklable; opened on the executor, once for a worker."""

    def __init__(self, path: str, topic: str, begin: int | None, end: int | None, limit: int | None,
                 config: StoreConfig | None) -> None:  # fmt: skip
        if not isinstance(path, str):
            raise TypeError(f"path must be str, got {type(path).__name__}")
        encoded(topic, "topic")
        check_limit(limit)
        self.path, self.topic, self.begin, self.end, self.limit, self.config = path, topic, begin, end, limit, config
        self._version, self._place = __version__, for_lookups(path, config)

    def ask(self, call: Callable[[Store], Any]) -> Any:
        """call(store). After an error the store is opened anew next time."""
        check_version(self._version, self.path)
        with using(self._place, self.config) as store:
            return call(store)

    def raw_offsets(self, keys: pa.Array) -> pa.ListArray:
        """RocketMQ's own answers, keys not compared."""
        begin = 0 if self.begin is None else self.begin
        end = 2**63 - 1 if self.end is None else self.end
        return self.ask(lambda store: store.select_phy_offset_many(
            self.topic, keys, max_num=self.limit or MAX_OFFSETS, begin=begin, end=end))  # fmt: skip

    def found(self, keys: pa.Array, columns: Sequence[str]) -> pa.Table:
        """Messages of keys, newest first for each: key_index and the columns."""
        return self.ask(lambda store: store.query_many(
            self.topic, keys, begin=self.begin, end=self.end, limit=self.limit, columns=columns).table)  # fmt: skip


def answered(keys: pa.Array, answer: Callable[[pa.Array], pa.ListArray]) -> pa.ListArray:
    """answer of the keys that are texts: a NULL has NULL, bytes that are no UTF-8 have no answers."""
    keys = keys.cast(pa.string()) if not pa.types.is_string(keys.type) else keys
    valid = pc.is_valid(keys) if keys.null_count else None
    readable = _utf8(keys)
    if valid is None and readable is None:
        return answer(keys)
    asked = valid if readable is None else readable if valid is None else pc.and_(valid, readable)
    numbers = pc.indices_nonzero(asked)
    found = answer(keys.take(numbers))
    counts = np.zeros(len(keys), np.int64)
    counts[numbers.to_numpy()] = found.value_lengths().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    mask = pc.invert(valid) if valid is not None else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), found.flatten(), type=found.type, mask=mask)


def _utf8(keys: pa.Array) -> pa.Array | None:
    """Which keys are UTF-8; None: all. Spark's strings may hold any bytes."""
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([_is_utf8(item) for item in keys.cast(pa.binary()).to_pylist()])
    return None


def _is_utf8(item: bytes | None) -> bool:
    try:
        return item is not None and item.decode() is not None
    except UnicodeDecodeError:
        return False


def offsets(path: str, topic: str, *, max_offsets: int | None = MAX_OFFSETS, begin: int | None = None,
            end: int | None = None, exact: bool = True, config: StoreConfig | None = None) -> Any:  # fmt: skip
    """A function of Spark: key column -> array<bigint>, the phy offsets of its messages, newest first.

    max_offsets: for each key at most, None: all. begin, end: store timestamp in ms, inclusive. exact: as Store.query,
    topic and key compared, records that no index file covers found too; False: the index's raw answers, the log is
    not touched, at most 64 for a key. NULL gives NULL, a key without messages an empty array.
    Source: RocketMQ IndexService#queryOffset.
    """
    if not exact and max_offsets is None:
        raise ValueError("max_offsets: exact=False has RocketMQ's limit on the answers of a key, give a number")
    probe = Probe(path, topic, begin, end, max_offsets, config)

    def exact_offsets(keys: pa.Array) -> pa.ListArray:
        table = probe.found(keys, ["phy_offset"]).combine_chunks()
        counts = np.bincount(table["key_index"].to_numpy(), minlength=len(keys))
        return list_array(counts, table["phy_offset"].to_numpy())

    answer = exact_offsets if exact else probe.raw_offsets

    @arrow_udf("array<bigint>")  # type: ignore[untyped-decorator]
    def rmq_offsets(keys: pa.Array) -> pa.Array:
        return answered(keys, answer)

    return rmq_offsets


def messages(path: str, topic: str, *, columns: Sequence[str] = MESSAGE_COLUMNS, limit: int | None = MAX_OFFSETS,
             begin: int | None = None, end: int | None = None, config: StoreConfig | None = None) -> Any:  # fmt: skip
    """A function of Spark: key column -> array<struct<...>> of its messages, newest first, for F.inline.

    columns: of StoredMessage, in their order. The rest as of `offsets`; always exact.
    """
    names = checked_columns(columns)
    kinds = native_ddl(names)
    probe = Probe(path, topic, begin, end, limit, config)
    struct = ",".join(f"{name}:{kind}" for name, kind in kinds.items())
    fields = struct_of(names)

    def rows(keys: pa.Array) -> pa.ListArray:
        target = arrow_schema(fields)
        table = probe.found(keys, names).combine_chunks()
        counts = np.bincount(table["key_index"].to_numpy(), minlength=len(keys))
        batch = table.drop_columns(["key_index"]).to_batches() if len(table) else []
        items = native_batch(batch[0], target, path) if batch else pa.RecordBatch.from_pylist([], schema=target)
        values = pa.StructArray.from_arrays(items.columns, fields=list(target))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values)

    @arrow_udf(f"array<struct<{struct}>>")  # type: ignore[untyped-decorator]
    def rmq_messages(keys: pa.Array) -> pa.Array:
        return answered(keys, rows)

    return rmq_messages


def struct_of(names: Sequence[str]) -> StructType:
    found = StructType.fromDDL(ddl(native_ddl(names), False))
    assert isinstance(found, StructType)
    return found


def key_hash_function() -> Any:
    @arrow_udf("int")  # type: ignore[untyped-decorator]
    def rmq_key_hash(keys: pa.Array) -> pa.Array:
        return _of_texts(keys, hash_keys)

    return rmq_key_hash


def slot_function(slots: int = DEFAULT_SLOTS) -> Any:
    @arrow_udf("int")  # type: ignore[untyped-decorator]
    def rmq_slot(keys: pa.Array) -> pa.Array:
        return _of_texts(keys, lambda texts: hash_keys(texts) % slots)

    return rmq_slot


def _of_texts(keys: pa.Array, hashes: Callable[[pa.Array], Any]) -> pa.Array:
    keys = keys.cast(pa.string())  # a literal NULL has no type
    valid = keys.drop_null()
    found = pa.array(hashes(valid), pa.int32())
    if not keys.null_count:
        return found
    places = np.cumsum(pc.is_valid(keys).to_numpy(zero_copy_only=False)) - 1
    return found.take(pa.array(places, pa.int64(), mask=pc.is_null(keys).to_numpy(zero_copy_only=False)))


def parse_id_function() -> Any:
    @arrow_udf("struct<store_host:string,phy_offset:bigint>")  # type: ignore[untyped-decorator]
    def rmq_parse_id(ids: pa.Array) -> pa.Array:
        rows = [parse_offset_msg_id(text)._asdict() if text is not None and is_hex_id(text) else None
                for text in ids.to_pylist()]  # fmt: skip
        return pa.array(rows, pa.struct([("store_host", pa.string()), ("phy_offset", pa.int64())]))

    return rmq_parse_id


def register(spark: SparkSession, path: str, topic: str, *, prefix: str = "rmq_", **options: Any) -> None:
    """Register for SQL: rmq_offsets(key), rmq_messages(key), rmq_key_hash(index_key), rmq_slot(index_key),
    rmq_parse_id(id). options: of `offsets`. prefix: for a second store or topic.
    """
    shared = {name: value for name, value in options.items() if name in ("begin", "end", "config")}
    made = {"offsets": offsets(path, topic, **options),
            "messages": messages(path, topic, limit=options.get("max_offsets", MAX_OFFSETS), **shared),
            "key_hash": key_hash_function(), "slot": slot_function(), "parse_id": parse_id_function()}  # fmt: skip
    for name, function in made.items():
        spark.udf.register(prefix + name, function)


def lookup_join(df: DataFrame, path: str, topic: str, *, key: str, columns: Sequence[str] = MESSAGE_COLUMNS,
                limit: int | None = None, begin: int | None = None, end: int | None = None,
                config: StoreConfig | None = None) -> DataFrame:  # fmt: skip
    """The rows of df joined (inner) with the messages that carry the row's key: one row for each pair.

    Cost: one probe of all index files for a batch of rows, one record read for each candidate. No shuffle.
    Raises ValueError when df has no column `key`, or one that is named like a column of `columns`.
    """
    names = checked_columns(columns)
    if key not in df.columns:
        raise ValueError(f"key: df has no column {key!r}; it has {', '.join(df.columns)}")
    both = sorted(set(names) & set(df.columns))
    if both:
        raise ValueError(f"columns: df has {', '.join(both)} too; rename them first")
    probe = Probe(path, topic, begin, end, limit, config)
    added = struct_of(names)
    schema = StructType([*df.schema.fields, *added.fields])

    def join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        target = arrow_schema(added)
        for batch in batches:
            keys = batch.column(key)
            asked = pc.is_valid(keys)
            readable = _utf8(keys)
            numbers = pc.indices_nonzero(asked if readable is None else pc.and_(asked, readable))
            table = probe.found(keys.take(numbers), names).combine_chunks()
            for part in table.to_batches():
                left = batch.take(numbers.take(part.column("key_index")))
                right = native_batch(part.drop_columns(["key_index"]), target, path)
                yield pa.RecordBatch.from_arrays([*left.columns, *right.columns],
                                                 names=[*left.schema.names, *right.schema.names])  # fmt: skip

    return df.mapInArrow(join, schema)
