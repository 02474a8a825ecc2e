# SPDX-License-Identifier: Apache-2.0
"""df.write.format("rmq") and the stream sink: each task writes a small store, the driver publishes all of them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmq.config import StoreConfig
from rmq.errors import RowError, UnsupportedFormatError
from rmq.paths import StorePaths, local_path
from rmq.segment import sync_directory
from rmq.spark.loading import made
from rmq.spark.opened import check_version
from rmq.spark.options import WriteOptions
from rmq.spark.staging import SHARD, Staging, Written, commits, is_store
from rmq.store import open as open_store
from rmq.storeroot import EMPTY_OR_NEW, check_beginning, names_beside_spark
from rmq.version import __version__

PLAIN = {"rmq.body": "plain"}  # `body` is no compressed one, whatever sys_flag says; `raw_body` is as stored
QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class TaskMessage(WriterCommitMessage):
    job: str
    written: Written


def check_target(path: str, mode: str, checkpoint: str | None = None) -> None:
    """ValueError when shards shall go into a store, or one store among shards; UnsupportedFormatError when what is
    written would begin among files of others. checkpoint: a stream's, which may lie among its shards.
    """
    root, paths = Path(path), StorePaths(Path(path).absolute())
    if mode == "shards" and is_store(root):
        raise ValueError(f"{path} is a store: mode=single appends to it, shards need a directory of their own")
    if mode == "single" and any(commit.shards for commit in commits(root)):
        raise ValueError(f"{path} is a directory of shards: mode=single needs a store or a new directory")
    if not root.exists():
        return
    if mode == "single":
        check_beginning(root, paths, by_spark=True)
        return
    if any(paths.commits.glob("*.json")):
        return  # it is one of shards by now, whatever lies beside them
    others = {name for name in names_beside_spark(paths) if not SHARD.fullmatch(name)}
    if checkpoint is not None:
        others.discard(os.path.relpath(checkpoint, path).partition("/")[0])
    if others:
        raise UnsupportedFormatError(root, f"no directory of shards, but one with other files ({min(others)})",
                                     EMPTY_OR_NEW)  # fmt: skip


class Task:
    """One task's part: rows to a store of its own, below the job's staging directory.

    checkpoint: of the stream.
    """

    def __init__(self, asked: WriteOptions, schema: StructType, *, checkpoint: str | None = None) -> None:
        check_target(asked.path, asked["mode"], checkpoint)
        self.asked = asked
        self.columns = asked.columns_of(schema.fieldNames())
        self.planned_by = __version__

    def run(self, job: str, batches: Iterator[pa.RecordBatch], turn: int = 0) -> TaskMessage:
        """turn: that of the first row of partition 0, see `put`."""
        check_version(self.planned_by, self.asked.path)
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        filled = (batch for batch in batches if len(batch))
        first = next(filled, None)
        if first is None:
            return TaskMessage(job, Written(partition, None, 0))
        with (made(Staging(self.asked.path, job).directory, partition, attempt) as place,
              open_store(place, "x", config=self._config()) as store):  # fmt: skip
            rows = self.put(partial(store.put_many, results=False), chain([first], filled), turn + partition)
        sync_directory(place.parent)
        return TaskMessage(job, Written(partition, place.stem, rows))

    def put(self, put_many: Callable[..., object], batches: Iterable[pa.RecordBatch], turn: int) -> int:
        """Put the rows of all batches; returns how many. turn: which queue the first row goes to, of those in turn."""
        rows = 0
        for batch in batches:
            try:
                put_many(self._messages(batch, turn + rows), topic=self._topic)
            except RowError as error:
                if error.row is not None:
                    error.row += rows  # of the partition, which Spark has cut in batches
                raise
            rows += len(batch)
        return rows

    def _config(self) -> StoreConfig:
        config = StoreConfig(**self.asked.geometry)
        return replace(config, message_index_enable=False) if self.asked["mode"] == "single" else config

    @property
    def _topic(self) -> str | None:
        return None if "topic" in self.columns else self.asked["topic"]

    def _messages(self, batch: pa.RecordBatch, turn: int) -> pa.RecordBatch:
        """Fields of messages only, by their names; rows without a queue of their own go to `queues` queues in turn."""
        batch = pa.RecordBatch.from_arrays([batch.column(name) for name in self.columns.values()],
                                           names=list(self.columns))  # fmt: skip
        if "queue_id" not in self.columns:
            numbers = np.arange(turn, turn + len(batch)) % self.asked["queues"]
            batch = batch.append_column("queue_id", pa.array(numbers, pa.int32()))
        return batch.replace_schema_metadata(PLAIN)


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message.written for message in messages if isinstance(message, TaskMessage)]


class BatchWriter(DataSourceArrowWriter):
    """The job's name is made when it is planned: tasks and commit share it."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._asked = asked = WriteOptions.parse(options)
        if overwrite and asked["mode"] == "single":
            raise ValueError("mode=single: only append; overwrite replaces the shards of a directory")
        self._task, self._overwrite = Task(asked, schema), overwrite  # no file is touched before a task has rows
        self._staging = Staging(asked.path, uuid.uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._task.run(self._staging.job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        publish(self._staging, self._asked, _written(messages), self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._staging.abandon()


class StreamWriter(DataSourceStreamArrowWriter):
    """Spark makes a new one for each batch, and another for its commit: the job's name is query and batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._asked = asked = WriteOptions.parse(options)
        if overwrite:
            raise ValueError("a stream appends: output mode append")
        checkpoints = (local_path(value) for name, value in options.items() if name.lower() == "checkpointlocation")
        self._task = Task(asked, schema, checkpoint=next(checkpoints, None))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            raise ValueError(f"Spark names no query and batch ({QUERY_ID}, {BATCH_ID})")
        return self._task.run(f"{query}-{int(batch):010d}", iterator, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for job in _jobs(messages):
            publish(Staging(self._asked.path, job), self._asked, _written(messages), False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for job in _jobs(messages):
            Staging(self._asked.path, job).abandon()


def _jobs(messages: Sequence[WriterCommitMessage | None]) -> set[str]:
    return {message.job for message in messages if isinstance(message, TaskMessage)}


def publish(staging: Staging, asked: WriteOptions, written: list[Written], overwrite: bool) -> None:
    """What the tasks have staged is in the directory, or in its one store, when this returns."""
    if asked["mode"] == "single":
        staging.commit_single(written, StoreConfig(**asked.geometry))
    else:
        staging.commit_shards(written, overwrite=overwrite)
