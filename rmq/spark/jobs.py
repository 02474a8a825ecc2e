# SPDX-License-Identifier: Apache-2.0
"""Whole-store jobs on Spark: the tasks that `rmq.pool` runs in processes, one for each partition."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.exporting import Compression, ExportResult, run_export
from rmq.parallel import ScanTask, plan_scan
from rmq.paths import store_root
from rmq.pool import Answer, Item, Runner
from rmq.rebuilding import RebuildResult, rebuild_by
from rmq.spark.opened import check_seen, check_session, check_version, having_room, using
from rmq.splits import SPLIT_BYTES
from rmq.verification.findings import LIMIT, VerifyResult
from rmq.verification.verify import verify_by
from rmq.version import __version__

ANSWERS = "number bigint, answer binary"
CHANGED = (CorruptFileError, FileNotFoundError)  # what a file that a writer changes may look like


def on_executors(spark: SparkSession, path: str | os.PathLike[str], *, looks_again: bool = False) -> Runner:
    """A Runner of whole-store jobs: one task for each item, answers come when all are done.

    path: of the store. What the tasks read and write must be seen by all executors at the same path. looks_again: for
    jobs that do so where a writer changed a file meanwhile: these errors of a task are raised as they are, when all
    tasks have ended; else the first one ends the job, and is Spark's.
    """
    check_session(spark)
    root = os.path.abspath(store_root(path))
    answered = CHANGED if looks_again else ()

    def outcome(task: Callable[[Item], Answer], item: Item) -> Answer | Exception:
        try:
            return task(item)
        except answered as error:
            error.add_note(f"in a task on host {socket.gethostname()}")
            return error

    def run(task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        planned_by = __version__

        def answers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _numbers(batches):
                check_version(planned_by, root)
                check_seen(root)
                with having_room(root):
                    answer = pickle.dumps(outcome(task, items[number]))
                yield pa.RecordBatch.from_arrays([pa.array([number]), pa.array([answer], pa.binary())],
                                                 names=["number", "answer"])  # fmt: skip

        if not items:
            return
        rows = spark.range(0, len(items), 1, len(items)).mapInArrow(answers, ANSWERS).collect()
        for row in sorted(rows):
            answer = pickle.loads(row.answer)
            if isinstance(answer, answered):
                raise answer
            yield answer

    return run


def rebuild(spark: SparkSession, path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *,
            config: StoreConfig | None = None) -> RebuildResult:  # fmt: skip
    """`rmq.rebuild` with its tasks on the executors, one for each segment and one for each index file.

    They write the new files: the store, or output, must be the same disk for all of them. Memory: an index file's
    size, 420 MB of the page cache by default, for each task that runs at a time.
    """
    return rebuild_by(on_executors(spark, path, looks_again=True), path, output, config)


def _numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def scan_map(spark: SparkSession, path: str | os.PathLike[str],
             function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: StructType | str, *,
             split_bytes: int = SPLIT_BYTES, min_partitions: int = 1, config: StoreConfig | None = None,
             **options: Any) -> DataFrame:  # fmt: skip
    """The rows that function(batches) yields for each part of a store: only they cross to Spark, not the messages.

    batches: an iterator of the part's Arrow record batches, as `Store.scan` with the same options gives them (topics,
    keys, begin, end, columns, batch_rows, batch_bytes, check_crc, on_damage). function yields record batches of
    `schema`, whose types are Spark's. A part is a partition; together they are the store as it stands now, each message
    once; what the log has lost by the time a part is read is damage.
    """
    check_session(spark)
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    tasks = plan_scan(path, config=config, split_bytes=split_bytes, min_partitions=min_partitions, **options)
    planned_by = __version__

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in _numbers(batches):
            yield from mapped(tasks[number], function, planned_by)

    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(work, schema)


def mapped(task: ScanTask, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
           planned_by: str) -> Iterator[pa.RecordBatch]:  # fmt: skip
    path = task.split.path
    check_version(planned_by, path)
    with using(path, task.config) as store:
        yield from function(task.batches(store))


def export(spark: SparkSession, path: str | os.PathLike[str], target: str | os.PathLike[str], *,
           partition_by: Iterable[str] = ("topic", "date"), topics: Iterable[str] | None = None,
           begin: Any = None, end: Any = None, columns: Iterable[str] | None = None, compression: Compression = "zstd",
           on_damage: Literal["raise", "skip"] = "raise", split_bytes: int = SPLIT_BYTES, min_partitions: int = 1,
           config: StoreConfig | None = None) -> ExportResult:  # fmt: skip
    """`rmq.export` whose parts are written by Spark's executors: the same directory, all or nothing.

    target: a path that driver and executors see, as the store's. Messages do not cross to the JVM.
    """
    return run_export(on_executors(spark, path), path, target, partition_by=partition_by, compression=compression,
                      columns=columns, config=config, split_bytes=split_bytes, min_partitions=min_partitions,
                      topics=topics, begin=begin, end=end, on_damage=on_damage)  # fmt: skip


def verify(spark: SparkSession, path: str | os.PathLike[str], *, config: StoreConfig | None = None,
           limit: int = LIMIT) -> VerifyResult:  # fmt: skip
    """`rmq.verify` whose passes are done by Spark's executors: the same findings and the same counts.

    Three jobs: index files, segments with their units and entries, queues; names and small files are the driver's.
    Past the limit others may be kept than `rmq.verify` keeps. Raises as `rmq.verify`, and what Spark raises.
    """
    return verify_by(on_executors(spark, path, looks_again=True), path, config=config, limit=limit)
