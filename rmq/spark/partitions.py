# SPDX-License-Identifier: Apache-2.0
"""Partitions of a read, and what an executor does with one, for batch and stream alike."""

from __future__ import annotations

import errno
import inspect
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.spark.opened import Head, Place, check_version, forget, log_head, using
from rmq.spark.options import ReadOptions
from rmq.spark.queues import Span, batches_of, plan_spans, reads_by_queue
from rmq.spark.schema import in_pieces, kafka_batch, native_batch, sources_of
from rmq.spark.selection import DataLossError, Selection
from rmq.splits import Split, plan
from rmq.store import Store
from rmq.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("rmq")

KEYS_AT_ONCE = 1000
_IN_UTC: Any = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}  # 4.1: always


class SplitPartition(InputPartition):
    """One range of one store's log, and what is wanted of it. planned_by: rmq's version on the driver."""

    def __init__(self, split: Split, selection: Selection, place: Place | None = None) -> None:
        super().__init__(split)
        self.split, self.selection = split, selection
        self.path, self.place = split.path, place or split.path
        self.head: Head | None = None
        self.planned_by = __version__


class KeysPartition(InputPartition):
    """Messages of one store that carry one of some keys and stand in [begin, end) of the log."""

    def __init__(self, path: str, keys: tuple[str, ...], end: int, selection: Selection, *, begin: int = 0,
                 place: Place | None = None) -> None:  # fmt: skip
        super().__init__(path)
        self.place = place or path
        self.path, self.keys, self.end, self.selection = path, keys, end, selection
        self.begin = begin
        self.head: Head | None = None
        self.planned_by = __version__


class QueuePartition(InputPartition):
    """Spans of one store's queues, whose messages are found one by one."""

    def __init__(self, path: str, spans: list[Span], selection: Selection) -> None:
        super().__init__(path)
        self.path, self.place, self.spans, self.selection = path, path, spans, selection
        self.head: Head | None = None
        self.planned_by = __version__


class NoPartition(InputPartition):
    """Nothing: Spark takes an empty list for one partition of None."""


def store_of(path: str, options: ReadOptions) -> AbstractContextManager[Store]:
    """The store, open in this worker."""
    return using(path, config_of(options))


def config_of(options: ReadOptions) -> StoreConfig | None:
    found: StoreConfig | None = options["brokerConf"]
    return found


def partitions_of(path: str, store: Store, selection: Selection, ranges: list[tuple[int, int]], asked: ReadOptions,
                  min_partitions: int) -> list[InputPartition]:  # fmt: skip
    """Partitions of one store's messages, which lie in `ranges` of its log: by queue, or pieces of those ranges."""
    parts: list[SplitPartition | QueuePartition]
    if reads_by_queue(store, selection, ranges, asked):
        parts = [QueuePartition(path, spans, selection) for spans in plan_spans(store, selection, asked,
                                                                                min_partitions)]  # fmt: skip
    else:
        splits = plan(path, ranges, split_bytes=asked["splitBytes"], min_partitions=min_partitions)
        parts = [SplitPartition(split, selection) for split in splits]
    head = log_head(path, config_of(asked)) if parts else None
    for part in parts:
        part.head = head
    return list(parts)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Exactly the Arrow types that Spark wants of a schema."""
    return to_arrow_schema(schema, **_IN_UTC)


def read_partition(partition: InputPartition, asked: ReadOptions, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Batches of what partitions() planned, in log order."""
    if not isinstance(partition, SplitPartition | KeysPartition | QueuePartition):
        return
    path, place = partition.path, partition.place
    selection = partition.selection if not isinstance(partition, QueuePartition) else partition.selection.of_tags()
    check_version(partition.planned_by, path)
    mode = asked["schemaMode"]
    wanted = sources_of(target.names, mode)
    columns = list(dict.fromkeys([*wanted, *selection.columns])) or ["phy_offset"]
    shape = kafka_batch if mode == "kafka" else native_batch
    try:
        with using(place, config_of(asked), "mmap" if isinstance(partition, KeysPartition) else asked["io"]) as store:
            check_same(partition, asked)
            found = scanned(store, partition, columns, asked) if isinstance(partition, SplitPartition) else \
                pulled(store, partition, columns, asked) if isinstance(partition, QueuePartition) else \
                queried(store, partition, columns, asked)  # fmt: skip
            try:
                for batch in found:
                    kept = selection.keep(batch)
                    if len(kept):
                        yield shape(kept, target, path)
            except OSError as error:
                check_same(partition, asked)
                if error.errno != errno.ESTALE or asked["failOnDataLoss"]:
                    raise
                logger.warning("%s: %s; a partition of the read ends", path, error.strerror)
            check_same(partition, asked)  # segments are opened one by one
    finally:
        if isinstance(partition, SplitPartition) and not isinstance(place, str):
            forget(place, wait=False)  # no other task reads that range


def scanned(store: Store, partition: SplitPartition, columns: list[str],
            asked: ReadOptions) -> Iterator[pa.RecordBatch]:  # fmt: skip
    split, selection = partition.split, partition.selection
    batches = store.scan(topics=selection.topics, keys=asked["keys"], begin=selection.begin, end=selection.end,
                         begin_phy_offset=split.begin, end_phy_offset=split.end, columns=columns,
                         batch_rows=asked["batchRows"], batch_bytes=asked["batchBytes"], check_crc=asked["verifyCrc"],
                         on_damage="raise" if asked["failOnDataLoss"] else "skip", skip_removed=False)  # fmt: skip
    check_range(store, (split.begin, split.end), asked)  # behind the scan, which has fixed by now where it begins
    try:
        yield from batches
    except CorruptFileError:
        check_range(store, (split.begin, split.end), asked)  # what is missing may have been cleaned away meanwhile
        raise
    if store.max_phy_offset < split.end:  # a broker cut it meanwhile: the scan ended there
        check_range(store, (store.min_phy_offset, split.end), asked)


def check_same(partition: SplitPartition | KeysPartition | QueuePartition, asked: ReadOptions) -> None:
    """DataLossError when there is another store at the path than the read was planned for, by its first record."""
    planned = partition.head
    if planned is None or not asked["failOnDataLoss"]:
        return
    found = log_head(partition.path, config_of(asked))
    if found is not None and found[0] < planned[0]:  # older segments were put back, or it is another store
        found = log_head(partition.path, config_of(asked), planned[0]) or ("", b"")
    if found is not None and found[0] <= planned[0] and found != planned:
        raise DataLossError(f"{partition.path}: the store was made anew since the read was planned; load anew, or "
                            "failOnDataLoss=false reads what is there")  # fmt: skip


def check_range(store: Store, planned: tuple[int, int], asked: ReadOptions) -> None:
    """DataLossError when the log has lost some of the bytes [begin, end) that it had when the read was planned."""
    (begin, end), low, high = planned, store.min_phy_offset, store.max_phy_offset
    if asked["failOnDataLoss"] and (begin < low or end > high):
        raise DataLossError(f"{store.path}: the log has bytes {low} to {high} by now, the read {begin} to {end}; load "
                            "anew, or failOnDataLoss=false reads what is left")  # fmt: skip


def pulled(store: Store, partition: QueuePartition, columns: list[str],
           asked: ReadOptions) -> Iterator[pa.RecordBatch]:  # fmt: skip
    for span in partition.spans:
        yield from batches_of(store, span, partition.selection, columns, asked)


def queried(store: Store, partition: KeysPartition, columns: list[str],
            asked: ReadOptions) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Each message once, though it has several of the keys."""
    keys, selection = partition.keys, partition.selection
    seen, all_keys = np.empty(0, np.int64), frozenset(keys)
    for topic in selection.topics or ():
        for first in range(0, len(keys), KEYS_AT_ONCE):
            table = store.query_many(topic, list(keys[first : first + KEYS_AT_ONCE]), begin=selection.begin,
                                     end=selection.end, limit=None, columns=["phy_offset"]).table  # fmt: skip
            found = table["phy_offset"].to_numpy()
            wanted = np.setdiff1d(found[found < partition.end], seen)
            seen = np.union1d(seen, wanted)
            # query_many has looked at their CRCs.
            for batch, _ in store._placed(wanted, columns, store.max_phy_offset, crc=False, limit=asked["batchBytes"],
                                          keys_of=lambda _: all_keys):  # fmt: skip
                for start in range(0, len(batch), asked["batchRows"]):
                    yield from in_pieces(batch.slice(start, asked["batchRows"]), asked["batchBytes"])
    check_range(store, (partition.begin, partition.end), asked)
