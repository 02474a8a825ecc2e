"""Spark beside a RocketMQ that goes on writing: snapshots, streams and look-ups of a store that is never at rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rocketmq import RELEASES, RocketMQ

import rmq
import rmq.spark
from spark.cluster import until

pytestmark = [pytest.mark.spark, pytest.mark.interop]

NOTHING: dict[str, list[object]] = {"pulls": [], "keys": [], "times": []}
QUEUES, SOME = 4, 600

Row = tuple[int, int, bytes]


@pytest.fixture
def rocketmq(tmp_path: Path) -> Iterator[RocketMQ]:
    java = RocketMQ(RELEASES[0], tmp_path / "java")
    yield java
    java.close()


def orders(count: int, first: int) -> list[rmq.Message]:
    return [rmq.Message("orders", b"body %d" % number, keys=[f"o-{number}", f"c-{number % 100}"],
                        queue_id=number % QUEUES, born_timestamp=1, born_host="10.0.0.1:1", store_host="10.0.0.2:10911")
            for number in range(first, first + count)]  # fmt: skip


def expected(count: int) -> list[Row]:
    """Queue, offset and body of the first orders."""
    return sorted((number % QUEUES, number // QUEUES, b"body %d" % number) for number in range(count))


def rows(frame: Any) -> list[Row]:
    return sorted((row.queue_id, row.queue_offset, bytes(row.body)) for row in frame.collect())


def stream(spark: Any, store: Path, place: Path) -> None:
    """All there is now, into Parquet."""
    frame = spark.readStream.format("rmq").option("columns", "queue_id,queue_offset,body").load(str(store))
    query = (frame.writeStream.format("parquet").option("path", f"{place}/data")
             .option("checkpointLocation", f"{place}/checkpoint").trigger(availableNow=True).start())  # fmt: skip
    query.awaitTermination()


class Broker(threading.Thread):
    """Puts orders, some at a time, until it is told to stop."""

    def __init__(self, rocketmq: RocketMQ, store: Path) -> None:
        super().__init__()
        self.rocketmq, self.store = rocketmq, store
        self.config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20 * 100,
                                      max_hash_slot_num=100, max_index_num=4000,
                                      rocketmq_version=rocketmq.release)  # fmt: skip
        self.count = 0
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def put(self, *, leave_open: bool = True) -> None:
        done = self.rocketmq.open(self.store, self.config, NOTHING, put=orders(SOME, self.count), leave_open=leave_open)
        assert {result["status"] for result in done.put} == {"PUT_OK"}
        self.count += SOME

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self.put()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.stopped.set()
        self.join()
        if self.error is not None:
            raise self.error

    def await_more(self, count: int) -> None:
        until(lambda: self.count > count or not self.is_alive(), "more messages")


def test_reads_streams_and_look_ups_beside_a_broker(spark: Any, rocketmq: RocketMQ, tmp_path: Path) -> None:
    path, lake = tmp_path / "s", tmp_path / "lake"

    def load() -> Any:
        return spark.read.format("rmq").load(str(path)).select("queue_id", "queue_offset", "body")

    broker = Broker(rocketmq, path)
    broker.put()
    first = load()
    assert rows(first) == expected(SOME)
    at = rmq.spark.offsets(str(path), "orders")
    count = SOME
    broker.start()
    try:
        for _ in range(2):
            broker.await_more(count)
            found = rows(load())
            assert len(found) > count
            assert found == expected(len(found)), "each queue from its first message on, without a gap"
            stream(spark, path, lake)
            count = len(found)
    finally:
        broker.stop()

    assert rows(first) == expected(SOME)
    assert rows(load()) == expected(broker.count)
    stream(spark, path, lake)
    assert rows(spark.read.parquet(f"{lake}/data")) == expected(broker.count)
    numbers = [0, SOME - 1, SOME, broker.count - 1]
    asked = spark.createDataFrame([(f"o-{number}",) for number in [*numbers, broker.count]], "key string")
    assert [len(row[0]) for row in asked.select(at("key")).collect()] == [1, 1, 1, 1, 0]
    joined = rmq.spark.lookup_join(asked, str(path), "orders", key="key", columns=["body"])
    assert sorted(bytes(row.body) for row in joined.collect()) == sorted(b"body %d" % number for number in numbers)

    broker.put(leave_open=False)
    assert [len(row[0]) for row in asked.select(at("key")).collect()] == [1] * 5
    assert rows(load()) == expected(broker.count)
