"""df.write.format("rmq") and the stream sink: what is written is what the engine would have written."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark import clean_staging
from rmq.spark.staging import commits, roots
from spark.orders import TIME

pytestmark = pytest.mark.spark
SMALL = {"segmentBytes": "65536"}
SCHEMA = "topic string, body binary, keys array<string>, tags string, queue_id int, properties map<string,string>"
COMPRESSED = 0x1
OWN_TIMES = {"store_timestamp", "born_timestamp", "store_host", "born_host"}


def rows(count: int, first: int = 0) -> list[tuple[Any, ...]]:
    return [("orders", b"body %d" % number, [f"o-{number}", f"c-{number % 10}"], "AB"[number % 2], number % 4,
             {"n": str(number)}) for number in range(first, first + count)]  # fmt: skip


def frame(spark: Any, count: int, first: int = 0, parts: int = 1) -> Any:
    return spark.createDataFrame(rows(count, first), SCHEMA).coalesce(1).repartition(parts) if parts > 1 else \
        spark.createDataFrame(rows(count, first), SCHEMA).coalesce(1)  # fmt: skip


def write(frame: Any, path: Path, how: str = "append", **options: str) -> None:
    frame.write.format("rmq").mode(how).options(**SMALL | options).save(str(path))


def failure(frame: Any, path: Path, how: str = "append", **options: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        write(frame, path, how, **options)
    return str(caught.value)


def scanned(path: Path, *names: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for root in roots(str(path)):
        assert rmq.verify(root) == []
        with rmq.open(root) as store:
            found += store.scan(columns=names or None).read_all().to_pylist()
    return found


def numbers(path: Path) -> list[int]:
    return sorted(int(dict(row["properties"])["n"]) for row in scanned(path, "properties"))


def nothing_is_left(path: Path) -> bool:
    named = {shard for commit in commits(path) for shard in commit.shards}
    return {item.name for item in path.glob("part-*")} == named and not list((path / "rmq/spark/staging").glob("*"))


def test_shards_are_appended_and_replaced_and_read_back(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(frame(spark, 100, parts=3), path)
    assert numbers(path) == list(range(100))
    assert len(roots(str(path))) == 3
    write(frame(spark, 50, first=100), path)
    back = spark.read.format("rmq").load(str(path))
    assert sorted(map(tuple, back.select(*(name.split()[0] for name in SCHEMA.split(", ")[:3])).collect())) == \
        sorted(row[:3] for row in rows(150))  # fmt: skip
    write(frame(spark, 7, first=1000), path, "overwrite")
    assert numbers(path) == list(range(1000, 1007))
    assert nothing_is_left(path)
    with rmq.open(roots(str(path))[0]) as store:
        assert store.query("orders", "o-1003")[0].body == b"body 1003"


def test_one_store_equals_what_the_engine_makes_of_the_same_messages(spark: Any, tmp_path: Path) -> None:
    path, peer = tmp_path / "out", tmp_path / "peer"
    write(frame(spark, 60), path, mode="single")
    write(frame(spark, 40, first=60), path, mode="single")
    with rmq.open(peer, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        for topic, body, keys, tags, queue, properties in rows(100):
            store.put(rmq.Message(topic, body, keys=keys, tags=tags, queue_id=queue, properties=properties))
    names = [name for name in rmq.scan.COLUMNS if name not in OWN_TIMES | {"offset_msg_id"}]
    assert scanned(path, *names) == scanned(peer, *names)
    assert nothing_is_left(path)
    with rmq.open(path, "r+") as store, rmq.open(peer) as other:
        assert store.topics() == other.topics()
        assert [message.body for message in store.query("orders", "c-7")] == \
            [message.body for message in other.query("orders", "c-7")]  # fmt: skip
        store.put(rmq.Message("orders", b"more"))


def test_a_copy_of_a_store_has_all_that_a_reader_gives(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "a", "x") as store:
        store.put_many([rmq.Message("t", zlib.compress(b"x" * 3000), sys_flag=COMPRESSED, keys=[f"k{number}"],
                                    born_timestamp=TIME + number, properties={"p": "q"})
                        for number in range(5)])  # fmt: skip
    write(spark.read.format("rmq").load(str(tmp_path / "a")), tmp_path / "b", mode="single")
    names = ["topic", "queue_id", "queue_offset", "body", "keys", "uniq_key", "born_timestamp", "born_host"]
    assert scanned(tmp_path / "b", *names) == scanned(tmp_path / "a", *names)
    assert scanned(tmp_path / "b", "body")[0]["body"] == b"x" * 3000


def test_a_thousand_empty_partitions_and_an_empty_frame(spark: Any, tmp_path: Path) -> None:
    write(frame(spark, 3, parts=1000), tmp_path / "out")
    assert numbers(tmp_path / "out") == [0, 1, 2]
    assert 1 <= len(roots(str(tmp_path / "out"))) <= 3
    write(frame(spark, 3).where("false"), tmp_path / "none")
    assert roots(str(tmp_path / "none")) == []
    assert spark.read.format("rmq").load(str(tmp_path / "none")).count() == 0


def test_columns_are_mapped_and_a_topic_and_queues_given(spark: Any, tmp_path: Path) -> None:
    made = spark.sql("SELECT cast(id AS STRING) order_id, cast('x' AS BINARY) payload, "
                     "timestamp_millis(1700000000000 + id) at FROM range(0, 10, 1, 1)")  # fmt: skip
    write(made, tmp_path / "out", topic="orders", queues="3",
          columns='{"keys": "order_id", "body": "payload", "born_timestamp": "at"}')  # fmt: skip
    found = scanned(tmp_path / "out", "topic", "queue_id", "keys", "body", "born_timestamp")
    assert [(row["topic"], row["queue_id"], row["keys"], row["body"]) for row in found] == \
        [("orders", number % 3, [str(number)], b"x") for number in range(10)]  # fmt: skip
    assert [round(row["born_timestamp"].timestamp() * 1000) - TIME for row in found] == list(range(10))


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_rows_of_small_partitions_go_to_all_queues(spark: Any, tmp_path: Path, mode: str) -> None:
    made = spark.range(16).selectExpr("cast(id AS STRING) body").repartition(16)
    write(made, tmp_path / "out", mode=mode, topic="t", queues="4")
    queues = sorted(row["queue_id"] for row in scanned(tmp_path / "out", "queue_id"))
    filled = made.selectExpr("spark_partition_id() AS at").groupBy("at").count().collect()
    assert queues == sorted((row["at"] + turn) % 4 for row in filled for turn in range(row["count"]))
    assert len(set(queues)) > 2


def test_without_an_index_a_store_has_none(spark: Any, tmp_path: Path) -> None:
    write(frame(spark, 3), tmp_path / "out", buildIndex="false")
    root = Path(roots(str(tmp_path / "out"))[0])
    assert not list(root.glob("index/*"))


@pytest.mark.parametrize(("select", "options", "message"), [
    ("'t' topic", {}, "the frame has no column body"),
    ("body", {}, "the frame has no column topic"),
    ("*, 1 AS nix", {}, "the frame's column nix is no field of a message"),
    ("*", {"columns": '{"keys": "nix"}'}, "the frame has no column nix"),
    ("*", {"columns": '{"nix": "body"}'}, "no field nix"),
    ("*, body AS other", {"columns": '{"body": "other"}'}, "the frame's column body stands beside other"),
    ("topic, body AS raw_body, 'x' AS other", {"columns": '{"body": "other"}'}, "the frame has raw_body"),
    ("*", {"mode": "nix"}, "option mode: 'nix' is none of shards, single"),
    ("*", {"subscribe": "t"}, "no option 'subscribe'"),
    ("cast(NULL AS STRING) topic, body", {}, "topic"),
    ("'' topic, body", {}, "topic"),
], ids=str)  # fmt: skip
def test_a_frame_that_is_no_messages_is_an_error(spark: Any, tmp_path: Path, select: str, options: Any,
                                                 message: str) -> None:  # fmt: skip
    assert message in failure(frame(spark, 3).selectExpr(*select.split(", ")), tmp_path / "out", **options)
    assert numbers_or_none(tmp_path / "out") == []


def numbers_or_none(path: Path) -> list[int]:
    return numbers(path) if commits(path) else []


def test_overwrite_of_one_store_is_an_error(spark: Any, tmp_path: Path) -> None:
    assert "mode=single: only append" in failure(frame(spark, 1), tmp_path / "out", "overwrite", mode="single")


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_a_failing_task_shows_nothing_and_what_it_left_can_be_cleaned(spark: Any, tmp_path: Path, mode: str) -> None:
    write(frame(spark, 2), tmp_path / "out", mode=mode)
    bad = frame(spark, 100, first=100, parts=4).selectExpr(
        "topic", "body", "properties", "if(properties['n'] = '177', raise_error('no more'), tags) tags")  # fmt: skip
    assert "no more" in failure(bad, tmp_path / "out", mode=mode)
    assert numbers(tmp_path / "out") == [0, 1]
    for _ in range(300):  # tasks that Spark is stopping may still stage
        clean_staging(str(tmp_path / "out"), older_than=0)
        if nothing_is_left(tmp_path / "out"):
            break
        time.sleep(0.1)
    assert nothing_is_left(tmp_path / "out")
    assert numbers(tmp_path / "out") == [0, 1]


def test_a_task_that_is_tried_again_writes_once(spark: Any, tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def once(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        if not flag.exists():
            flag.touch()
            raise RuntimeError("first try")

    write(frame(spark, 20).mapInArrow(once, SCHEMA), tmp_path / "out")
    assert flag.exists()
    assert numbers(tmp_path / "out") == list(range(20))
    assert nothing_is_left(tmp_path / "out")


def test_a_commit_that_fails_leaves_nothing_visible(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)):
        assert "StoreLockedError" in failure(frame(spark, 3), tmp_path / "s", mode="single")
    assert scanned(tmp_path / "s") == []
    assert nothing_is_left(tmp_path / "s")
    assert "is a store: mode=single appends to it" in failure(frame(spark, 3), tmp_path / "s")


def test_a_view_takes_inserts(spark: Any, tmp_path: Path) -> None:
    write(frame(spark, 2), tmp_path / "out")
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW sink (topic STRING, body BINARY, properties MAP<STRING, STRING>) "
              f"USING rmq OPTIONS (path '{tmp_path / 'out'}')")  # fmt: skip
    spark.sql("INSERT INTO sink SELECT 't', cast('x' AS BINARY), map('n', '9')")
    assert numbers(tmp_path / "out") == [0, 1, 9]


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_a_stream_writes_each_batch_once(spark: Any, store: Path, tmp_path: Path, mode: str) -> None:
    path, checkpoint = tmp_path / "out", tmp_path / "checkpoint"

    def run() -> None:
        source = spark.readStream.format("rmq").options(subscribe="orders", maxOffsetsPerTrigger="1500")
        query = (source.load(str(store)).writeStream.format("rmq").trigger(availableNow=True)
                 .options(mode=mode, checkpointLocation=str(checkpoint), **SMALL).start(str(path)))  # fmt: skip
        query.awaitTermination()

    run()
    assert numbers(path) == list(range(4000))
    assert [commit.rows for commit in commits(path)] == [1500, 1500, 1000]
    for name in ("2", ".2.crc"):  # as if the driver had died behind the sink's commit
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    run()
    assert numbers(path) == list(range(4000))
    assert nothing_is_left(path)
    assert clean_staging(str(path), older_than=0) == []


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_a_column_that_is_named_for_a_field_is_that_field_alone(spark: Any, tmp_path: Path, mode: str) -> None:
    made = spark.sql("SELECT 'a' keys, 'b' queue_id, X'31' body")
    write(made, tmp_path / "s", mode=mode, topic="t", columns='{"tags": "keys", "uniq_key": "queue_id"}')
    write(made, tmp_path / "s", mode=mode, topic="t", columns='{"keys": "queue_id", "tags": "keys"}')
    found = scanned(tmp_path / "s", "keys", "tags", "uniq_key", "queue_id")
    assert sorted((row["keys"], row["tags"], row["uniq_key"], row["queue_id"]) for row in found) == \
        [([], "a", "b", 0), (["b"], "a", None, 0)]  # fmt: skip


def test_a_bad_row_is_told_by_its_number_in_the_partition(spark: Any, tmp_path: Path) -> None:
    """Spark cuts a partition in batches of 10,000 rows."""
    frame = spark.range(0, 25_000, 1, 1).selectExpr("if(id = 20005, NULL, 'b') body", "'t' topic")
    with pytest.raises(Exception, match="row 20005: body is null"):
        frame.write.format("rmq").mode("append").save(str(tmp_path / "s"))
