# SPDX-License-Identifier: Apache-2.0
"""Where a stream begins while others write: what Spark asks of a reader, in its order, without Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark.options import ReadOptions
from rmq.spark.selection import DataLossError, select
from rmq.spark.source import RmqDataSource
from rmq.spark.stream import StreamReader

pytestmark = pytest.mark.spark

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=400)
FUTURE = 9_000_000_000_000
MOVING = pytest.mark.parametrize("asked", [
    {"startingOffsets": "latest"}, {"startingOffsets": '{"t": {"0": -1}}'},
    {"startingOffsetsByTimestamp": json.dumps({"t": {"0": FUTURE}})}], ids=lambda asked: next(iter(asked)))  # fmt: skip


def made(path: Path, count: int = 60) -> Path:
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", b"z" * 400) for _ in range(count)])
    return path


def put(path: Path, count: int) -> None:
    with rmq.open(path, "r+") as store:
        store.put_many([rmq.Message("t", b"new")] * count)


def reader(*paths: Path, **options: str) -> StreamReader:
    place = {"path": str(paths[0])} if len(paths) == 1 else {"paths": json.dumps([*map(str, paths)])}
    schema = "topic string, queue_id int, queue_offset bigint, size int" + ", store string" * (len(paths) > 1)
    made = RmqDataSource({**place, "subscribe": "t", **options}).streamReader(_struct(schema))
    assert isinstance(made, StreamReader)
    return made


def _struct(ddl: str) -> Any:
    from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

    kinds = {"string": StringType(), "int": IntegerType(), "bigint": LongType()}
    fields = (item.split() for item in ddl.split(","))
    return StructType([StructField(name, kinds[kind]) for name, kind in fields])


def as_json(offsets: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(offsets))  # type: ignore[no-any-return]


def offsets_of(stream: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [offset for part in stream.partitions(start, end) for batch in stream.read(part)
            for offset in batch.column("queue_offset").to_pylist()]  # fmt: skip


@MOVING
def test_available_now_beside_a_writer_reads_nothing_and_is_no_data_loss(tmp_path: Path, asked: dict[str, str]) -> None:
    """Spark fixes the target before it asks for the start."""
    path = made(tmp_path / "s")
    stream = reader(path, **asked)
    stream.prepareForTriggerAvailableNow()
    put(path, 3)
    start = as_json(stream.initialOffset())
    for _ in range(2):
        assert as_json(stream.latestOffset(start)) == start
    assert offsets_of(stream, start, start) == []


@MOVING
def test_a_batch_that_failed_before_anything_was_written_down_loses_nothing(tmp_path: Path,
                                                                           asked: dict[str, str]) -> None:  # fmt: skip
    """Another run begins where the first one did: batch 0 is empty, and says where."""
    path = made(tmp_path / "s")
    stream = reader(path, **asked)
    start = as_json(stream.initialOffset())
    assert start == {"t": {"0": 60}}
    put(path, 3)
    assert as_json(stream.latestOffset(start)) == start
    put(path, 2)
    again = reader(path, **asked)  # of which Spark asks no start: it has one
    end = as_json(again.latestOffset(start))
    assert offsets_of(again, start, end) == [60, 61, 62, 63, 64]


def test_a_start_that_stays_needs_no_empty_batch(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    for asked in ({}, {"startingOffsets": '{"t": {"0": 58}}'}, {"startingOffsetsByTimestamp": '{"t": {"0": 0}}'}):
        stream = reader(path, **asked)
        start = as_json(stream.initialOffset())
        assert as_json(stream.latestOffset(start)) == {"t": {"0": 60}}


@pytest.mark.parametrize("side", ["starting", "ending"])
def test_a_time_that_is_not_yet_lies_at_the_end_of_what_is_read(tmp_path: Path, side: str) -> None:
    """Edge: an append of Spark's is under way, whose messages nobody sees."""
    path = made(tmp_path / "s")
    with rmq.open(path) as store:
        begin = store.pull("t", 0, 20, 1).messages[0].phy_offset
    commits = path / "rmq" / "spark" / "commits"
    commits.mkdir(parents=True)
    (commits / "job.intent").write_text(json.dumps({"begin": begin, "staged": []}))
    asked = ReadOptions.parse({"path": str(path), "subscribe": "t",
                               f"{side}OffsetsByTimestamp": json.dumps({"t": {"0": FUTURE}})})  # fmt: skip
    with rmq.open(path) as store:
        assert select(store, asked).bounds == {"t": {0: (20 if side == "starting" else 0, 20)}}
    (commits / "job.json").write_text(json.dumps({"number": 1, "overwrite": False, "shards": [], "rows": 0}))
    with rmq.open(path) as store:  # the append has happened, whatever became of its intent
        assert select(store, asked).bounds == {"t": {0: (60 if side == "starting" else 0, 60)}}


def test_a_store_that_joins_a_stream_begins_with_its_first_message(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    os.remove(min((second / "commitlog").iterdir()))  # as a cleaning has left it
    stream = reader(first, made(tmp_path / "c"))
    known = as_json(stream.latestOffset(as_json(stream.initialOffset())))
    joined = reader(first, tmp_path / "c", second)
    end = as_json(joined.latestOffset(known))
    with rmq.open(second) as store:
        low, high = store.topics()["t"][0]
    assert low > 0
    assert offsets_of(joined, known, end) == [*range(low, high)]


def test_a_queue_that_comes_and_was_cleaned_meanwhile_is_data_loss(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    stream = reader(path, subscribe="t,u")
    known = as_json(stream.latestOffset(as_json(stream.initialOffset())))
    with rmq.open(path, "r+") as store:
        store.put_many([rmq.Message("u", b"z" * 400)] * 60)
    for segment in sorted((path / "commitlog").iterdir())[:5]:
        segment.unlink()
    with pytest.raises(DataLossError, match="u queue 0 has offsets"):
        stream.partitions(known, as_json(stream.latestOffset(known)))


@pytest.mark.parametrize("others", [[], ["other"]], ids=str)
def test_a_store_without_queues_when_the_stream_began_loses_nothing_unnoticed(
    tmp_path: Path, others: list[str]
) -> None:
    paths = [tmp_path / "s", *(tmp_path / name for name in others)]
    for path in paths:
        rmq.open(path, "x", config=CONFIG).close()
    stream = reader(*paths)
    known = as_json(stream.latestOffset(as_json(stream.initialOffset())))
    with rmq.open(paths[0], "r+") as store:
        store.put_many([rmq.Message("t", b"z" * 400)] * 60)
    for segment in sorted((paths[0] / "commitlog").iterdir())[:2]:
        segment.unlink()
    with pytest.raises(DataLossError, match="t queue 0 has offsets"):
        stream.partitions(known, as_json(stream.latestOffset(known)))


@pytest.mark.parametrize("size", [1, 491, 492, 493, 983, 984, 1000, 5000])
def test_a_batch_has_no_more_bytes_than_it_may_but_one_message(tmp_path: Path, size: int) -> None:
    path = made(tmp_path / "s")
    stream = reader(path, maxBytesPerTrigger=str(size))
    start = as_json(stream.initialOffset())
    with rmq.open(path) as store:
        rows = store.scan(columns=["phy_offset", "size"]).read_all()
    begins = rows["phy_offset"].to_pylist()
    ends = [begin + length for begin, length in zip(begins, rows["size"].to_pylist(), strict=True)]
    done = 0
    while done < 15:
        end = as_json(stream.latestOffset(start, stream.getDefaultReadLimit()))
        following = end["t"]["0"]
        assert following == done + 1 or ends[following - 1] - begins[done] <= size
        assert following > done
        assert ends[following] - begins[done] > size
        done, start = following, end


def test_a_stream_that_cannot_be_says_why_when_it_is_asked(tmp_path: Path) -> None:
    """What is raised sooner PySpark's own runner hides."""
    path = made(tmp_path / "s")
    stream = RmqDataSource({"path": str(path), "subscribe": "t", "keys": "k"}).streamReader(_struct("topic string"))
    for ask in (stream.initialOffset, lambda: stream.latestOffset({}), stream.getDefaultReadLimit,
                lambda: stream.partitions({}, {})):  # fmt: skip
        with pytest.raises(ValueError, match="options keys: not for streams"):
            ask()
    stream.stop()


def test_queues_that_offsets_leave_out_begin_and_end_where_they_stand(tmp_path: Path) -> None:
    """In batches and in a stream's first start; docs/spark.md."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message(topic, b"x", queue_id=queue) for topic in "tu" for queue in (0, 1)] * 10)
    first, last = '{"t": {"0": 4}}', '{"t": {"1": 6}}'
    asked = ReadOptions.parse({"path": str(tmp_path / "s"), "startingOffsets": first, "endingOffsets": last})
    with rmq.open(tmp_path / "s") as store:
        assert select(store, asked).bounds == {"t": {0: (4, 10), 1: (0, 6)}, "u": {0: (0, 10), 1: (0, 10)}}
    assert reader(tmp_path / "s", startingOffsets=first).initialOffset() == {"t": {"0": 4, "1": 0}}
    with pytest.raises(DataLossError, match="option startingOffsets: the store has no t queue 2"):
        reader(tmp_path / "s", startingOffsets='{"t": {"2": 4}}').initialOffset()
    assert reader(tmp_path / "s", startingOffsets='{"t": {"2": 4}}', failOnDataLoss="false").initialOffset() == \
        {"t": {"0": 0, "1": 0}}  # fmt: skip


@pytest.mark.parametrize(("queue", "asked"), [
    (2, {}), (2, {"startingOffsets": "latest"}), (0, {"startingOffsets": '{"t": {"0": -1}}'}),
    (2, {"startingOffsets": "latest", "failOnDataLoss": "false"}),
    (0, {"startingOffsets": '{"t": {"0": -1}}', "failOnDataLoss": "false"})], ids=str)  # fmt: skip
def test_what_is_put_between_the_target_of_available_now_and_the_start_is_read_once_or_lies_before(
    tmp_path: Path, queue: int, asked: dict[str, str]
) -> None:
    """Also in a queue that is new; two runs, the second one with what the first one's target left."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", b"z", queue_id=number % 2) for number in range(10)])
        stream = reader(tmp_path / "s", **asked)
        stream.prepareForTriggerAvailableNow()
        store.put(rmq.Message("t", b"new", queue_id=queue))
        ends = {number: high for number, (_, high) in store.topics()["t"].items()}
    first = place = as_json(stream.initialOffset())
    found: list[tuple[int, int]] = []
    for run in [stream] * 3 + [reader(tmp_path / "s", **asked)] * 2:
        start, place = place, as_json(run.latestOffset(place))
        found += [(row["queue_id"], row["queue_offset"]) for part in run.partitions(start, place)
                  for batch in run.read(part) for row in batch.to_pylist()]  # fmt: skip
    assert sorted(found) == [(queue, at) for queue, end in sorted(ends.items())
                             for at in range(first["t"][str(queue)], end)]  # fmt: skip


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_batch_that_was_planned_for_another_topic_is_played_again_whole(tmp_path: Path, fail: str) -> None:
    """A query that is started again with another `subscribe`."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message(topic, b"") for topic in "tu"] * 10)
    stream, planned = reader(tmp_path / "s", subscribe="u", failOnDataLoss=fail), {"t": {"0": 10}}
    assert offsets_of(stream, {"t": {"0": 5}}, planned) == [*range(5, 10)]
    assert offsets_of(stream, planned, as_json(stream.latestOffset(planned))) == [*range(10)]
