# SPDX-License-Identifier: Apache-2.0
"""Look-ups as Spark functions: the compiled index, called on Arrow batches of keys."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    StructType,
)

from rmq.config import StoreConfig
from rmq.keys import MAX_MS, MIN_MS, checked_int, encoded, hash_keys, list_array, time_range
from rmq.message import is_hex_id, parse_offset_msg_id
from rmq.scan import checked_columns, schema_of
from rmq.spark.opened import check_session, check_version, checked_path, for_lookups, hash_slots, using
from rmq.spark.partitions import arrow_schema
from rmq.spark.schema import native_batch
from rmq.store import Store
from rmq.version import __version__

MAX_OFFSETS = 32
Times = npt.NDArray[np.int64]  # ms of each row
PIECE_BYTES = 8 * 1024 * 1024  # of messages that a join hands to Spark at a time
AS_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
           pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_integer, pa.types.is_null)  # fmt: skip
FEWER = "ask for fewer columns, or lower spark.sql.execution.arrow.maxRecordsPerBatch"
ID = pa.schema([("store_host", pa.string()), ("phy_offset", pa.int64())])  # what an offset_msg_id says
MESSAGE_COLUMNS = ("phy_offset", "queue_id", "queue_offset", "store_timestamp", "tags", "body")


class Probe:
    """One store as a look-up asks it: picklable; opened on the executor, once for a worker.

    begin, end: inclusive, ms or aware datetime, of all keys; a row's own range is the part of it that lies inside.
    limit_name: what the user calls the limit.
    """

    def __init__(self, path: str | os.PathLike[str], topic: str, begin: Any, end: Any, limit: int | None,
                 config: StoreConfig | None, *, limit_name: str = "limit") -> None:  # fmt: skip
        self.path = checked_path(path)
        encoded(topic, "topic")
        if limit is not None:
            checked_int(limit, limit_name, least=1)
        self.topic, self.limit, self.config = topic, limit, config
        self.begin, self.end = time_range(begin, end)
        self._version, self._place = __version__, for_lookups(self.path, config)

    def hash_slots(self) -> int:
        """max_hash_slot_num of the store as it is now, asked on the driver."""
        return hash_slots(self._place, self.config)

    def ask(self, call: Callable[[Store], Any]) -> Any:
        """call(store). After an error the store is opened anew next time."""
        check_version(self._version, self.path)
        with using(self._place, self.config) as store:
            return call(store)

    def raw_offsets(self, keys: pa.Array, begins: Times | None = None, ends: Times | None = None) -> pa.ListArray:
        """RocketMQ's own answers, keys not compared; one call for each range that differs."""
        if not len(keys) or (begins is None and ends is None):
            return self._raw_offsets(keys, self.begin, self.end)
        firsts = np.full(len(keys), self.begin) if begins is None else np.maximum(begins, self.begin)
        lasts = np.full(len(keys), self.end) if ends is None else np.minimum(ends, self.end)
        order = np.lexsort((lasts, firsts))
        differs = (np.diff(firsts[order]) != 0) | (np.diff(lasts[order]) != 0)
        groups = np.split(order, np.flatnonzero(differs) + 1)
        parts = [self._raw_offsets(keys.take(pa.array(rows)), int(firsts[rows[0]]), int(lasts[rows[0]]))
                 for rows in groups]  # fmt: skip
        return pa.concat_arrays(parts).take(pa.array(np.argsort(order)))

    def _raw_offsets(self, keys: pa.Array, begin: int, end: int) -> pa.ListArray:
        return self.ask(lambda store: store.select_phy_offset_many(
            self.topic, keys, max_num=self.limit or MAX_OFFSETS, begin=max(begin, 0), end=end))  # fmt: skip

    def found(self, keys: pa.Array, columns: Sequence[str], begins: Times | None = None,
              ends: Times | None = None) -> pa.Table:  # fmt: skip
        """Messages of keys, newest first for each: key_index and the columns."""
        first = self.begin if begins is None else np.maximum(begins, self.begin)
        last = self.end if ends is None else np.minimum(ends, self.end)
        return self.ask(lambda store: store.query_many(
            self.topic, keys, begin=first, end=last, limit=self.limit, columns=columns).table)  # fmt: skip

    def matches(self, keys: pa.Array,
                columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
        """found for gigabytes: in the order of the log, about PIECE_BYTES at a time, with each one's key_index."""
        check_version(self._version, self.path)
        with using(self._place, self.config) as store:
            table = store.query_many(self.topic, keys, begin=self.begin, end=self.end, limit=self.limit,
                                     columns=["phy_offset"]).table  # fmt: skip
            numbers, offsets = table["key_index"].to_numpy(), table["phy_offset"].to_numpy()
            is_first = (np.diff(numbers, prepend=-1) != 0) | (np.diff(offsets, prepend=-1) != 0)
            numbers, offsets = numbers[is_first], offsets[is_first]  # an inner batch has a row for each message
            # query_many has looked at their CRCs.
            for batch, places in store._placed(offsets, columns, store.max_phy_offset, crc=False, limit=PIECE_BYTES,
                                               keys_of=lambda place: {keys[numbers[place]].as_py()}):  # fmt: skip
                yield batch, numbers[places]


Answer = Callable[[pa.Array, Times | None, Times | None], pa.ListArray]  # keys, begins, ends


def answered(keys: pa.Array, answer: Answer, begin: pa.Array | None = None,
             end: pa.Array | None = None) -> pa.ListArray:  # fmt: skip
    """answer of the keys that are texts: a NULL has NULL, bytes that are no UTF-8 have no answers."""
    keys = as_text(keys)
    begins = None if begin is None else times_of_column(begin, "begin")
    ends = None if end is None else times_of_column(end, "end")
    valid = pc.is_valid(keys) if keys.null_count else None
    readable = readable_keys(keys)
    if valid is None and readable is None:
        return answer(keys, begins, ends)
    asked = valid if readable is None else readable if valid is None else pc.and_(valid, readable)
    numbers = pc.indices_nonzero(asked)
    rows = numbers.to_numpy()
    found = answer(keys.take(numbers), None if begins is None else begins[rows], None if ends is None else ends[rows])
    counts = np.zeros(len(keys), np.int64)
    counts[rows] = found.value_lengths().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    mask = pc.invert(valid) if valid is not None else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), found.flatten(), type=found.type, mask=mask)


def as_text(values: pa.Array) -> pa.Array:
    """The same as Arrow strings, which may hold bytes that are no UTF-8, as Spark's do. A literal NULL has no type.

    TypeError for what Spark's own cast may make another text of.
    """
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not any(is_it(kind) for is_it in AS_TEXT):
        raise TypeError(f"keys must be texts, binary or integers, got {kind}: cast them to string")
    return values if pa.types.is_string(values.type) else values.cast(pa.string(), safe=False)


def times_of_column(column: pa.Array, name: str) -> Times:
    """ms of a column of integers (ms) or timestamps; NULL: open. TypeError, ValueError for what says no point in time.

    A timestamp between two ms: the first behind it for `begin`, the last before it for `end`.
    """
    kind, is_open = column.type, MIN_MS if name == "begin" else MAX_MS
    if pa.types.is_null(kind):
        return np.full(len(column), is_open, np.int64)
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            raise ValueError(f"{name} is timestamp_ntz, which says no point in time: cast it to timestamp")
        micros = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).fill_null(0).to_numpy()
        found = micros // 1000 + (micros % 1000 > 0) if name == "begin" else micros // 1000
    elif pa.types.is_integer(kind):
        found = column.cast(pa.int64()).fill_null(0).to_numpy()
    else:
        raise TypeError(f"{name} must be bigint (ms since 1970) or timestamp, got {kind}")
    return np.where(column.is_null().to_numpy(zero_copy_only=False), is_open, found)


def readable_keys(keys: pa.Array) -> pa.Array | None:
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


def offsets(path: str | os.PathLike[str], topic: str, *, max_offsets: int | None = MAX_OFFSETS, begin: Any = None,
            end: Any = None, exact: bool = True, config: StoreConfig | None = None) -> Any:  # fmt: skip
    """A function of Spark: key column -> array<bigint>, the phy offsets of its messages, newest first.

    max_offsets: for each key at most, None: all. begin, end: store timestamp, inclusive, ms or aware datetime. The
    function also takes them as columns, f("key", "begin", "end"): bigint (ms) or timestamp, NULL: open; within what is
    given here. exact: as Store.query, topic and key compared, records that no index file covers found too; False: the
    index's raw answers, the log is not touched, at most 64 for a key, and one call for each different range of a batch.
    NULL gives NULL, a key without messages an empty array.
    Source: RocketMQ IndexService#queryOffset.
    """
    return _offsets(Probe(path, topic, begin, end, max_offsets, config, limit_name="max_offsets"), exact)


def _offsets(probe: Probe, exact: bool) -> Any:
    if not exact and probe.limit is None:
        raise ValueError("max_offsets: exact=False has RocketMQ's limit on the answers of a key, give a number")

    def exact_offsets(keys: pa.Array, begins: Times | None, ends: Times | None) -> pa.ListArray:
        table = probe.found(keys, ["phy_offset"], begins, ends).combine_chunks()
        counts = np.bincount(table["key_index"].to_numpy(), minlength=len(keys))
        return list_array(counts, table["phy_offset"].to_numpy())

    answer = exact_offsets if exact else probe.raw_offsets

    @arrow_udf(ArrayType(LongType()))  # type: ignore[untyped-decorator]
    def rmq_offsets(key: pa.Array, begin: pa.Array = None, end: pa.Array = None) -> pa.Array:
        return answered(key, answer, begin, end)

    return rmq_offsets


def messages(path: str | os.PathLike[str], topic: str, *, columns: Sequence[str] = MESSAGE_COLUMNS,
             limit: int | None = MAX_OFFSETS, begin: Any = None, end: Any = None,
             config: StoreConfig | None = None) -> Any:  # fmt: skip
    """A function of Spark: key column -> array<struct<...>> of its messages, newest first, for F.inline.

    columns: of StoredMessage, in their order. The rest as of `offsets`; always exact.
    """
    return _messages(Probe(path, topic, begin, end, limit, config), columns)


def _messages(probe: Probe, columns: Sequence[str]) -> Any:
    names = checked_columns(columns)
    if not names:
        raise ValueError("columns: a struct of no columns is no type of Spark; ask `offsets` for how many there are")
    fields = struct_of(names)

    def rows(keys: pa.Array, begins: Times | None, ends: Times | None) -> pa.ListArray:
        target = arrow_schema(fields)
        table = probe.found(keys, names, begins, ends).combine_chunks()
        counts = np.bincount(table["key_index"].to_numpy(), minlength=len(keys))
        batch = table.drop_columns(["key_index"]).to_batches() if len(table) else []
        if len(batch) > 1:
            raise ValueError(f"{probe.path}: messages of {len(keys)} keys have more than 2 GiB; {FEWER}")
        items = native_batch(batch[0], target, probe.path) if batch else pa.RecordBatch.from_pylist([], schema=target)
        values = pa.StructArray.from_arrays(items.columns, fields=list(target))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), values)

    @arrow_udf(ArrayType(fields))  # type: ignore[untyped-decorator]
    def rmq_messages(key: pa.Array, begin: pa.Array = None, end: pa.Array = None) -> pa.Array:
        return answered(key, rows, begin, end)

    return rmq_messages


def struct_of(names: Sequence[str]) -> StructType:
    """Types as values: as text Spark reads them only in a session."""
    return from_arrow_schema(schema_of(names))


def key_hash_function() -> Any:
    @arrow_udf(IntegerType())  # type: ignore[untyped-decorator]
    def rmq_key_hash(keys: pa.Array) -> pa.Array:
        return _of_texts(keys, hash_keys)

    return rmq_key_hash


def slot_function(slots: int) -> Any:
    @arrow_udf(IntegerType())  # type: ignore[untyped-decorator]
    def rmq_slot(keys: pa.Array) -> pa.Array:
        return _of_texts(keys, lambda texts: hash_keys(texts) % slots)

    return rmq_slot


def _of_texts(keys: pa.Array, hashes: Callable[[pa.Array], Any]) -> pa.Array:
    keys = as_text(keys)
    valid = keys.drop_null()
    found = pa.array(hashes(valid), pa.int32())
    if not keys.null_count:
        return found
    places = np.cumsum(pc.is_valid(keys).to_numpy(zero_copy_only=False)) - 1
    return found.take(pa.array(places, pa.int64(), mask=pc.is_null(keys).to_numpy(zero_copy_only=False)))


def parse_id_function() -> Any:
    @arrow_udf(from_arrow_schema(ID))  # type: ignore[untyped-decorator]
    def rmq_parse_id(ids: pa.Array) -> pa.Array:
        texts = (None if item is None else item.decode(errors="replace") for item in
                 as_text(ids).cast(pa.binary()).to_pylist())  # fmt: skip
        rows = [parse_offset_msg_id(text)._asdict() if text is not None and is_hex_id(text) else None for text in texts]
        return pa.array(rows, pa.struct(list(ID)))

    return rmq_parse_id


def register(spark: SparkSession, path: str | os.PathLike[str], topic: str, *, prefix: str = "rmq_",
             columns: Sequence[str] = MESSAGE_COLUMNS, max_offsets: int | None = MAX_OFFSETS, begin: Any = None,
             end: Any = None, exact: bool = True, config: StoreConfig | None = None) -> None:  # fmt: skip
    """Register for SQL: rmq_offsets(key [, begin, end]), rmq_messages(key [, begin, end]), rmq_key_hash(index_key),
    rmq_slot(index_key), rmq_parse_id(id). max_offsets and what follows: as of `offsets`. columns: of rmq_messages.
    prefix: for a second store or topic. rmq_slot: the slot in an index file of this store, by its max_hash_slot_num as
    the call finds it; the driver opens the store for that. What is wrong with one is an error before any is registered.
    """
    check_session(spark)
    probe = Probe(path, topic, begin, end, max_offsets, config, limit_name="max_offsets")
    made = {"offsets": _offsets(probe, exact), "messages": _messages(probe, columns), "key_hash": key_hash_function(),
            "slot": slot_function(probe.hash_slots()), "parse_id": parse_id_function()}  # fmt: skip
    for name, function in made.items():
        spark.udf.register(prefix + name, function)
