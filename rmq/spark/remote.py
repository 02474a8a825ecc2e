# SPDX-License-Identifier: Apache-2.0
"""Stores on object stores: the driver lists them once, tasks open what was listed. Splits are whole segments, so that
no task fetches what others read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from rmq.errors import CorruptFileError
from rmq.mirror import MirroredStore
from rmq.objects import Location
from rmq.snapshot import Part, Snapshot
from rmq.spark.opened import planning
from rmq.spark.options import OF_OBJECT_STORES, ReadOptions
from rmq.spark.partitions import KeysPartition, SplitPartition, config_of
from rmq.spark.selection import log_bounds, ranges, select
from rmq.spark.staging import roots
from rmq.splits import plan_segments
from rmq.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

OF_QUEUES = {"subscribePattern", "assign", "startingOffsets", "endingOffsets", "startingOffsetsByTimestamp",
             "endingOffsetsByTimestamp"}  # options that ask the queues  # fmt: skip
OF_TABLES: dict[str, tuple[Part, ...]] = {"queues": ("queues",), "topics": ("queues",), "index": ("index",),
                                          "segments": ()}  # fmt: skip


def location(path: str, asked: ReadOptions) -> Location:
    """Of a URI and the options fs.*; ValueError."""
    given = {name.removeprefix("fs."): asked[name] for name in OF_OBJECT_STORES & asked.given}
    return Location.parse(path, {name: str(value).lower() if isinstance(value, bool) else str(value)
                                 for name, value in given.items()})  # fmt: skip


def snapshots(path: str, asked: ReadOptions) -> list[tuple[str, Snapshot]]:
    """The store at a URI, or the shards that Spark wrote there: path and what was listed of each."""
    taken = Snapshot.take(location(path, asked))
    if taken.is_store or not any(name.startswith("rmq/spark/commits/") for name, _ in taken.small):
        return [(path, taken.require_store())]
    base, mark, settings = path.partition("?")
    with tempfile.TemporaryDirectory(prefix="rmq-") as directory:
        for name, data in taken.small:
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        try:
            found = roots(directory)
        except CorruptFileError as error:
            marker = error.path.replace(directory, taken.location.uri)
            raise CorruptFileError(marker, error.offset, error.reason) from None
        if found == [directory]:
            return [(path, taken.require_store())]
        shards = [f"{base.rstrip('/')}/{Path(shard).name}{mark}{settings}" for shard in found]
    return [(shard, Snapshot.take(location(shard, asked)).require_store()) for shard in shards]


def remote_partitions(path: str, taken: Snapshot, asked: ReadOptions) -> list[InputPartition]:
    """What a read of one store comes to, as it was listed. ValueError for one message after the other by its queue."""
    if asked.is_by_queue:
        raise ValueError("options scanMode=queue, maxRecordsPerPartition: not for stores on object stores")
    parts: list[InputPartition] = []
    with planning(taken.of("queues") if OF_QUEUES & asked.given else taken.of(), config_of(asked)) as store:
        selection, bounds = select(store, asked), log_bounds(store)
        if asked.is_by_index:
            place = taken.of("index", end=store.max_phy_offset)
            return [KeysPartition(path, asked["keys"], bounds[1], selection, begin=bounds[0], place=place)]
        splits = plan_segments(path, ranges(store, selection, asked), store.config.mapped_file_size_commit_log, bounds,
                               split_bytes=asked["splitBytes"],
                               min_partitions=-(-asked["minPartitions"] // len(asked.paths)))  # fmt: skip
        for split in splits:
            parts.append(SplitPartition(split, selection, taken.range(split.begin, split.end, store)))
    return parts


def for_table(taken: Snapshot, table: str) -> Snapshot:
    """What the table of a structure is made of."""
    return taken.of(*OF_TABLES[table])


def with_uris(store: Store, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Files of a mirror by their URIs."""
    import pyarrow as pa

    if not isinstance(store, MirroredStore) or "path" not in batch.schema.names:
        return batch
    number = batch.schema.get_field_index("path")
    return batch.set_column(number, "path", pa.array(map(store.place, batch.column(number).to_pylist()), pa.string()))
