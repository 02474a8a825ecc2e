# SPDX-License-Identifier: Apache-2.0
"""bulk_load: a frame becomes one new store, encoded by all tasks. The protocol, without Spark: `loading`."""

from __future__ import annotations

import json
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from rmq.config import StoreConfig
from rmq.paths import is_elsewhere, local_path
from rmq.spark.loading import Placed, Staged, check_new, plan, publish, put_in_place, stage
from rmq.spark.opened import check_frame, check_version
from rmq.spark.options import WriteOptions
from rmq.spark.staging import Staging
from rmq.spark.write import Task
from rmq.version import __version__


def bulk_load(df: DataFrame, path: str | os.PathLike[str], *, topic: str | None = None,
              columns: Mapping[str, str] | None = None, queues: int = 1, segment_bytes: int | None = None,
              build_index: bool = True) -> int:  # fmt: skip
    """Make one new store at `path` of the rows of df; returns how many. Driver and executors must see the path.

    topic, columns, queues, segment_bytes, build_index: as the options of df.write.format("rmq") with the like names.
    Messages of a queue stand in the order of partitions, and of the rows in them; all have one store timestamp, that of
    the call. A partition takes whole segments, the last one filled in part. When it returns, everything is on disk;
    until the log is whole there is no store. Raises FileExistsError, ValueError, OSError, and what a task raised: then
    nothing is there, unless a note of the error says that the store is.
    Cost: df is computed once; the log is written twice, by tasks; the driver reads it for queues and index.
    """
    check_frame(df)
    given = os.fspath(path)
    root = given if is_elsewhere(given) else os.path.abspath(local_path(given))
    asked = _options(root, topic=topic, columns=None if columns is None else json.dumps(dict(columns)), queues=queues,
                     segmentBytes=segment_bytes, buildIndex=str(build_index).lower())  # fmt: skip
    staging, config = Staging(root, uuid.uuid4().hex), StoreConfig(**asked.geometry)
    check_new(staging.path)
    task, timestamp = Task(asked, df.schema), time.time_ns() // 1_000_000
    segment_size = config.mapped_file_size_commit_log

    def stage_rows(batches: Iterator[pa.RecordBatch]) -> Staged | None:
        partition, attempt = _numbers()
        return stage(staging, partition, attempt, batches, partial(task.put, turn=partition), config, timestamp)

    def place_parts(batches: Iterator[pa.RecordBatch]) -> list[Placed]:
        found = [pickle.loads(item) for batch in batches for item in batch.column(0).to_pylist()]
        return [put_in_place(staging, place, segment_size, _numbers()[1]) for place in found]

    try:
        staged = [item for item in _answers(df, root, stage_rows) if item is not None]
        places = plan(staged, segment_size)
        rows = df.sparkSession.createDataFrame([(pickle.dumps(place),) for place in places], "place binary")
        spread = rows.coalesce(1).repartition(max(1, len(places)))  # one by one in turn: each task has one
        placed = [item for items in _answers(spread, root, place_parts) for item in items]
        publish(staging, places, placed, config)
    finally:
        staging.abandon()
    return sum(item.rows for item in staged)


def _options(path: str, **given: Any) -> WriteOptions:
    options = {name: str(value) for name, value in given.items() if value is not None}
    return WriteOptions.parse({"path": path, "mode": "single", **options})


def _numbers() -> tuple[int, int]:
    """Partition and attempt of the task."""
    context = TaskContext.get()
    assert context is not None
    return context.partitionId(), context.attemptNumber()


def _answers(df: DataFrame, path: str, task: Callable[[Iterator[pa.RecordBatch]], Any]) -> list[Any]:
    """What the task of each partition answers, of the attempt that Spark took."""
    planned_by = __version__

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_version(planned_by, path)
        yield pa.RecordBatch.from_pydict({"answer": [pickle.dumps(task(batches))]})

    return [pickle.loads(row.answer) for row in df.mapInArrow(answer, "answer binary").collect()]
