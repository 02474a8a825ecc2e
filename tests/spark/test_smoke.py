"""A little of everything, on each release of PySpark that is supported: tools/spark_versions.sh."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import rmq
import rmq.spark
from rmq.spark.options import ReadOptions
from rmq.spark.staging import roots
from spark.orders import COUNT, orders

pytestmark = pytest.mark.spark
OLD = {"maxOffsetsPerTrigger": "300", "maxBytesPerTrigger": "60000"}


def has_limits() -> bool:
    from rmq.spark.stream import HAS_LIMITS

    return HAS_LIMITS


def bodies(path: Path) -> list[bytes]:
    found: list[bytes] = []
    for root in roots(str(path)):
        assert rmq.verify(root) == []
        with rmq.open(root) as store:
            found += store.scan(columns=["body"]).read_all()["body"].to_pylist()
    return sorted(found)


def expected(count: int) -> list[bytes]:
    return sorted(message.body for message in orders(count))


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """1,000 orders, of its own for each test."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as made:
        made.put_many(orders(1000))
    return tmp_path / "s"


def test_all_columns_are_read(spark: Any, store: Path) -> None:
    rows = spark.read.format("rmq").option("splitBytes", "65536").load(str(store)).collect()
    with rmq.open(store) as opened:
        messages = opened.scan(columns=["phy_offset", "keys", "body"]).read_all().to_pylist()
    assert [{"phy_offset": row.phy_offset, "keys": row.keys, "body": bytes(row.body)}
            for row in sorted(rows, key=lambda row: row.phy_offset)] == messages  # fmt: skip
    assert spark.read.format("rmq").options(schemaMode="kafka", subscribe="orders").load(str(store)).count() == COUNT
    for table in ("queues", "index", "topics", "segments"):
        assert spark.read.format("rmq").option("table", table).load(str(store)).count() > 0


def test_keys_are_looked_up(spark: Any, store: Path) -> None:
    from pyspark.sql import functions as F

    keys = ["o-1", "c-7", "nix", None]
    frame = spark.createDataFrame([(key,) for key in keys], "key string")
    with rmq.open(store) as opened:
        found = {key: opened.query("orders", key, limit=None) for key in keys if key is not None}
    offsets = rmq.spark.offsets(str(store), "orders", max_offsets=None)
    rows = {row.key: row.offsets for row in frame.select("key", offsets("key").alias("offsets")).collect()}
    assert rows == {None: None} | {key: [message.phy_offset for message in one] for key, one in found.items()}
    messages = rmq.spark.messages(str(store), "orders", columns=["body", "store_timestamp"], limit=None)
    inlined = frame.select("key", F.inline(messages("key")))
    joined = rmq.spark.lookup_join(frame, str(store), "orders", key="key", columns=["body", "store_timestamp"])
    pairs = sorted((key, message.body) for key, one in found.items() for message in one)
    for made in (inlined, joined):
        assert sorted((row.key, bytes(row.body)) for row in made.collect()) == pairs
    rmq.spark.register(spark, str(store), "orders")
    row = spark.sql("SELECT rmq_offsets('o-1') a, rmq_key_hash('orders#o-1') b").first()
    assert (row.a, row.b) == (rows["o-1"], rmq.index_key_hash("orders#o-1"))


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_what_is_written_is_what_was_read(spark: Any, live: Path, tmp_path: Path, mode: str) -> None:
    frame = spark.read.format("rmq").option("minPartitions", "2").load(str(live))
    frame.write.format("rmq").mode("append").options(mode=mode, segmentBytes="65536").save(str(tmp_path / "out"))
    assert bodies(tmp_path / "out") == expected(1000)


@pytest.mark.parametrize("sink", ["parquet", "rmq"])
def test_a_stream_goes_on_where_it_ended(spark: Any, live: Path, tmp_path: Path, sink: str) -> None:
    def run() -> int:
        frame = spark.readStream.format("rmq").options(subscribe="orders", maxOffsetsPerTrigger="300").load(str(live))
        writer = frame.writeStream.format(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        options = {"segmentBytes": "65536"} if sink == "rmq" else {}
        query = writer.options(**options).trigger(availableNow=True).start(str(tmp_path / "out"))
        query.awaitTermination()
        return sum(progress["numInputRows"] > 0 for progress in query.recentProgress)

    def seen() -> list[bytes]:
        read = spark.read.format(sink).load(str(tmp_path / "out"))
        return sorted(bytes(row.body) for row in read.select("body").collect())

    assert run() == (4 if has_limits() else 1)
    with rmq.open(live, "r+") as store:
        store.put_many(orders(200, first=1000))
    assert run() == 1
    assert seen() == expected(1200)
    last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda item: int(item.name))
    for item in (last, last.with_name(f".{last.name}.crc")):  # as if the driver had died behind the sink's commit
        item.unlink(missing_ok=True)
    run()
    assert seen() == expected(1200)


def test_latest_begins_behind_what_is_there(spark: Any, live: Path, tmp_path: Path) -> None:
    """4.1 asks for the latest offset before the initial one."""

    def run() -> None:
        frame = spark.readStream.format("rmq").options(subscribe="orders", startingOffsets="latest").load(str(live))
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()

    run()
    with rmq.open(live, "r+") as store:
        store.put_many(orders(8, first=1000))
    run()
    rows = spark.read.schema("body binary").parquet(str(tmp_path / "out")).collect()
    assert sorted(bytes(row.body) for row in rows) == sorted(b"body %d" % number for number in range(1000, 1008))


@pytest.mark.parametrize("are_known", [False, True])
def test_limits_that_spark_does_not_know_are_told_once(live: Path, monkeypatch: pytest.MonkeyPatch,
                                                       are_known: bool) -> None:  # fmt: skip
    from pyspark.sql.types import StringType, StructField, StructType

    from rmq.spark.stream import StreamReader

    schema = StructType([StructField("topic", StringType())])

    monkeypatch.setattr("rmq.spark.stream.HAS_LIMITS", are_known)

    def made(**options: str) -> list[str]:
        asked = ReadOptions.parse({"path": str(live)} | options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                StreamReader(asked, schema)
        return [str(warning.message) for warning in caught]

    told = "options {} need PySpark 4.2 or newer: batches have no limit"
    both = ", ".join(sorted(OLD))
    assert made(**OLD) == ([] if are_known else [told.format(both)])
    assert made(maxBytesPerTrigger="1") == ([] if are_known else [told.format("maxBytesPerTrigger")])
    assert made() == []


def test_offsets_are_given_in_either_order(live: Path) -> None:
    """4.1 asks latestOffset() without arguments, then initialOffset(); 4.2 the other way round, with both."""
    from pyspark.sql.types import StringType, StructField, StructType

    from rmq.spark.stream import StreamReader

    schema = StructType([StructField("topic", StringType())])

    for start, first in (("earliest", 0), ("latest", 250)):
        asked = ReadOptions.parse({"path": str(live), "startingOffsets": start})
        reader = StreamReader(asked, schema)
        end, begin = reader.latestOffset(), reader.initialOffset()
        assert begin == {"orders": {str(queue): first for queue in range(4)}}
        assert end == {"orders": {str(queue): 250 for queue in range(4)}}
        assert json.loads(json.dumps(end)) == end
        rows = sum(batch.num_rows for part in reader.partitions(begin, end) for batch in reader.read(part))
        assert rows == 4 * (250 - first)
