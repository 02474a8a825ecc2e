"""Whole-store jobs: the tasks of the process pool, run by executors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import copy_store, digests

import rmq
from spark.orders import COUNT, TIME

pytestmark = pytest.mark.spark


def double(number: int) -> int:
    return 2 * number


def damaged(number: int) -> int:
    raise rmq.CorruptFileError("a", number, "reason")


def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    found = [len(body) for batch in batches for body in batch.column("body").to_pylist()]
    yield pa.RecordBatch.from_pydict({"count": [len(found)], "bytes": [sum(found)]})


def test_answers_come_in_the_order_of_items(spark: Any) -> None:
    from rmq.spark.jobs import on_executors

    run = on_executors(spark)
    assert list(run(double, list(range(25)))) == list(range(0, 50, 2))
    assert list(run(double, [])) == []
    with pytest.raises(Exception, match="a: byte 7: reason"):
        list(run(damaged, [7]))


def test_only_what_the_function_yields_crosses_to_spark(spark: Any, store: Path) -> None:
    import rmq.spark

    frame = rmq.spark.scan_map(spark, str(store), sizes, "count bigint, bytes bigint", split_bytes=40_000,
                               topics=["orders"], columns=["body"])  # fmt: skip
    rows = frame.collect()
    assert frame.rdd.getNumPartitions() == len(rows) > 10
    assert sum(row["count"] for row in rows) == COUNT
    assert sum(row["bytes"] for row in rows) == sum(len(b"body %d" % number) for number in range(COUNT))


def test_a_time_range_and_an_empty_store_may_leave_no_part(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    schema = "count bigint, bytes bigint"
    assert rmq.spark.scan_map(spark, str(store), sizes, schema, end=TIME - 10**10).collect() == []
    rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)).close()
    assert rmq.spark.scan_map(spark, str(tmp_path / "s"), sizes, schema).collect() == []
    with pytest.raises(ValueError, match="nope"):
        rmq.spark.scan_map(spark, str(store), sizes, schema, columns=["nope"])


def test_queues_and_index_are_made_by_executors(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    result = rmq.spark.rebuild(spark, str(store), str(tmp_path / "new"))
    assert digests(tmp_path / "new", "consumequeue") == digests(store, "consumequeue")
    assert list(digests(tmp_path / "new", "index").values()) == list(digests(store, "index").values())
    assert result.unit_count == COUNT + 10
    again = copy_store(store, tmp_path / "again")
    shutil.rmtree(again / "consumequeue")
    assert rmq.spark.rebuild(spark, str(again)).queue_count == result.queue_count
    assert rmq.verify(again).is_sound
    with pytest.raises(FileExistsError):
        rmq.spark.rebuild(spark, str(store), str(tmp_path / "new"))
