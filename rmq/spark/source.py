# SPDX-License-Identifier: Apache-2.0
"""Spark's data source `rmq`: spark.read.format("rmq"). Batches cross to Spark as Arrow, of exactly its types."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from rmq.paths import is_elsewhere
from rmq.scan import COLUMNS
from rmq.spark.opened import Place, check_version, log_head, using
from rmq.spark.options import ReadOptions
from rmq.spark.partitions import (
    KeysPartition,
    NoPartition,
    arrow_schema,
    config_of,
    partitions_of,
    read_partition,
    store_of,
)
from rmq.spark.remote import for_table, location, remote_partitions, snapshots, with_uris
from rmq.spark.schema import STORE, TABLES_DDL, ddl, kafka_ddl, may_be_null, native_batch, native_ddl
from rmq.spark.selection import log_bounds, ranges, select
from rmq.spark.staging import roots
from rmq.spark.stream import RefusedStream, StreamReader
from rmq.spark.write import BatchWriter, StreamWriter
from rmq.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa


class StorePartition(InputPartition):
    """A whole store, for the tables of its structures."""

    def __init__(self, path: str, place: Place | None = None) -> None:
        super().__init__(path)
        self.path, self.place = path, place or path
        self.planned_by = __version__


class RmqDataSource(DataSource):
    """Apache RocketMQ's message stores as tables and streams. Options: docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        return "rmq"

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._given = options

    @property
    def asked(self) -> ReadOptions:
        asked = ReadOptions.parse(self._given)
        check_once(asked)
        return asked

    def schema(self) -> str:
        asked = self.asked
        return ddl(offered(asked), asked.has_store_column)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return BatchWriter(self._given, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamWriter(self._given, schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            asked = self.asked
            check_subset(schema, asked)
            asked.check_stream()
            return StreamReader(asked, schema)
        except Exception as error:
            return RefusedStream(error)

    def reader(self, schema: StructType) -> DataSourceReader:
        asked = self.asked
        check_subset(schema, asked)
        return MessageReader(asked, schema) if asked["table"] == "messages" else TableReader(asked, schema)


def offered(asked: ReadOptions) -> dict[str, str]:
    """Columns and their types that a read offers without a schema of the user's."""
    if asked["table"] != "messages":
        return TABLES_DDL[asked["table"]]
    if asked["schemaMode"] == "kafka":
        return kafka_ddl(asked["includeHeaders"])
    return native_ddl(asked["columns"] or COLUMNS)


def check_subset(schema: StructType, asked: ReadOptions) -> None:
    """ValueError for a user's schema with columns or types that there are not, NOT NULL of what may be NULL, a column
    twice, or without any: it has no rows.
    """
    if not schema.fields:
        raise ValueError("schema: has no columns; to count messages, take one that is small, as phy_offset")
    if repeated := {name for name in schema.names if schema.names.count(name) > 1}:
        raise ValueError(f"schema: column {min(repeated)!r} is there twice")
    known = dict(offered(asked))
    if asked["table"] == "messages":
        known |= kafka_ddl(True) if asked["schemaMode"] == "kafka" else native_ddl([*COLUMNS, "raw_body",
                                                                                    "raw_properties"])  # fmt: skip
    if asked.has_store_column:
        known[STORE] = "string"
    for column in schema.fields:
        if column.name not in known:
            raise ValueError(f"schema: no column {column.name!r}; there are {', '.join(known)}")
        if column.dataType.simpleString() != known[column.name]:
            raise ValueError(f"schema: column {column.name!r} is {known[column.name]}, "
                             f"not {column.dataType.simpleString()}")  # fmt: skip
        if not column.nullable and may_be_null(column.name, known[column.name]):
            raise ValueError(f"schema: column {column.name!r} may be NULL, it cannot be NOT NULL")


def check_once(asked: ReadOptions) -> None:
    """ValueError for a store that is named twice, in whatever way: its messages would be read twice."""
    known: dict[object, str] = {}
    for path in asked.paths:
        if is_elsewhere(path):
            there = location(path, asked)
            place: object = there.uri, there.endpoint
        else:
            place = os.path.realpath(path)
        if place in known:
            raise ValueError(f"option paths: {path} is the same store as {known[place]}; name it once")
        known[place] = path


def stores_of(asked: ReadOptions) -> list[tuple[str, Place]]:
    """Stores and, of directories that Spark wrote, the shards that were committed: path, and how it is opened."""
    stores: list[tuple[str, Place]] = [store for path in asked.paths for store in
              (snapshots(path, asked) if is_elsewhere(path) else [(root, root) for root in roots(path)])]  # fmt: skip
    _check_shards_once(stores)
    return stores


def _check_shards_once(stores: Iterable[tuple[str, Place]]) -> None:
    """ValueError for a shard that is named by itself, too."""
    known: set[object] = set()
    for path, place in stores:
        shard = os.path.realpath(path) if isinstance(place, str) else (place.location.uri, place.location.endpoint)
        if shard in known:
            raise ValueError(f"option paths: {path} is named twice; name it once")
        known.add(shard)


class MessageReader(DataSourceReader):
    """Messages of one or several stores. What it reads is fixed when partitions() is called."""

    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._target = arrow_schema(schema)

    def partitions(self) -> list[InputPartition]:
        asked = self._asked
        parts: list[InputPartition] = []
        for path, place in stores_of(asked):
            if not isinstance(place, str):
                parts += remote_partitions(path, place, asked)
                continue
            with store_of(path, asked) as store:
                selection = select(store, asked)
                if asked.is_by_index:
                    begin, end = log_bounds(store)
                    part = KeysPartition(path, asked["keys"], end, selection, begin=begin)
                    part.head = log_head(path, config_of(asked)) if begin < end else None
                    parts.append(part)
                    continue
                parts += partitions_of(path, store, selection, ranges(store, selection, asked), asked,
                                       -(-asked["minPartitions"] // len(asked.paths)))  # fmt: skip
        return parts or [NoPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._asked, self._target)


class TableReader(DataSourceReader):
    """Units, entries, queues or segments of one or several stores, a partition for each store."""

    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        self._asked = asked
        self._target = arrow_schema(schema)

    def partitions(self) -> list[InputPartition]:
        return [StorePartition(path, place if isinstance(place, str) else for_table(place, self._asked["table"]))
                for path, place in stores_of(self._asked)] or [NoPartition(None)]  # fmt: skip

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StorePartition):
            return
        check_version(partition.planned_by, partition.path)
        asked = self._asked
        with using(partition.place, config_of(asked)) as store:
            topics = asked["subscribe"]
            if asked["subscribePattern"] is not None:
                topics = [name for name in store.topics() if asked["subscribePattern"].fullmatch(name)]
            for batch in store.table(asked["table"], topics=topics):
                yield native_batch(with_uris(store, batch), self._target, partition.path)
