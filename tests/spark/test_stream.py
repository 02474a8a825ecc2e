"""spark.readStream.format("rmq"): every message once, whatever happens in between."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark.options import ReadOptions
from rmq.spark.partitions import NoPartition
from rmq.spark.selection import DataLossError
from rmq.spark.staging import Staging
from spark.orders import COUNT, orders

pytestmark = pytest.mark.spark
KILLS = 5


class Stream:
    """A query into Parquet with its checkpoint, run as often as wanted."""

    def __init__(self, spark: Any, store: Path, out: Path) -> None:
        self.spark, self.store, self.out = spark, store, out
        self.query: Any = None

    def run(self, **options: str) -> int:
        """All there is now; returns how many batches had rows."""
        frame = self.spark.readStream.format("rmq").options(**options).load(str(self.store))
        self.query = (frame.writeStream.format("parquet").option("path", f"{self.out}/data")
                      .option("checkpointLocation", f"{self.out}/checkpoint")
                      .trigger(availableNow=True).start())  # fmt: skip
        self.query.awaitTermination()
        return sum(progress["numInputRows"] > 0 for progress in self.query.recentProgress)

    def rows(self) -> list[tuple[str, int, int]]:
        found = self.spark.read.schema("topic string, queue_id int, queue_offset bigint").parquet(f"{self.out}/data")
        return sorted(map(tuple, found.collect()))


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A closed store of 1,000 orders of 170 bytes and more, of its own for each test."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as made:
        made.put_many(orders(1000))
    return tmp_path / "s"


def expected(store: Path, *topics: str) -> list[tuple[str, int, int]]:
    with rmq.open(store) as opened:
        return sorted((topic, queue, offset) for topic, queues in opened.topics().items()
                      if not topics or topic in topics
                      for queue, (low, high) in queues.items() for offset in range(low, high))  # fmt: skip


@pytest.mark.parametrize(("options", "batches"), [({}, 1), ({"maxOffsetsPerTrigger": "300"}, 4),
                                                  ({"maxBytesPerTrigger": "60000"}, None)], ids=str)  # fmt: skip
def test_a_backlog_is_read_once_in_batches_as_large_as_allowed(spark: Any, live: Path, tmp_path: Path, options: Any,
                                                               batches: int | None) -> None:  # fmt: skip
    if batches is None:
        with rmq.open(live) as store:
            batches = -(-store.max_phy_offset // 60000)
    stream = Stream(spark, live, tmp_path / "out")
    assert stream.run(**options) == batches
    assert stream.rows() == expected(live)


def test_later_messages_queues_and_topics_are_read_by_the_next_run(spark: Any, live: Path, tmp_path: Path) -> None:
    stream = Stream(spark, live, tmp_path / "out")
    stream.run(maxOffsetsPerTrigger="600")
    with rmq.open(live, "r+") as store:
        store.put_many([rmq.Message("new", b"x", queue_id=number % 3) for number in range(100)])
        store.put_many([rmq.Message("orders", b"x", queue_id=9)] * 10)
    stream.run(maxOffsetsPerTrigger="30")
    assert stream.rows() == expected(live)
    progress = stream.query.lastProgress["sources"][0]
    assert json.loads(progress["latestOffset"])["orders"]["9"] == 10
    behind = [sum(sum(place.values()) for place in json.loads(item["sources"][0]["latestOffset"]).values())
              - sum(sum(place.values()) for place in json.loads(item["sources"][0]["endOffset"]).values())
              for item in stream.query.recentProgress if item["numInputRows"]]  # fmt: skip
    assert behind == [80, 50, 20, 0]
    assert stream.run() == 0


def test_latest_begins_behind_what_is_there(spark: Any, live: Path, tmp_path: Path) -> None:
    stream = Stream(spark, live, tmp_path / "out")
    assert stream.run(startingOffsets="latest") == 0
    with rmq.open(live, "r+") as store:
        store.put_many(orders(8, first=1000))
    stream.run(startingOffsets="latest")
    assert stream.rows() == [("orders", queue, 250 + turn) for queue in range(4) for turn in range(2)]


def test_topics_and_queues_are_chosen(spark: Any, live: Path, tmp_path: Path) -> None:
    with rmq.open(live, "r+") as store:
        store.put_many([rmq.Message("other", b"x")] * 5)
    stream = Stream(spark, live, tmp_path / "out")
    stream.run(assign='{"orders": [2]}', startingOffsets='{"orders": {"2": 240}}')
    assert stream.rows() == [("orders", 2, offset) for offset in range(240, 250)]


def test_segments_cleaned_away_between_runs_are_data_loss(spark: Any, live: Path, tmp_path: Path) -> None:
    stream = Stream(spark, live, tmp_path / "out")
    stream.run(maxOffsetsPerTrigger="100", startingOffsets='{"orders": {"0": 0, "1": 250, "2": 250, "3": 250}}')
    with rmq.open(live, "r+") as store:
        store.put_many(orders(2000, first=1000))
    for segment in sorted((live / "commitlog").iterdir())[:6]:
        segment.unlink()
    shutil.rmtree(live / "rmq", ignore_errors=True)
    with rmq.open(live) as store:
        low = store.topics()["orders"][0][0]
    assert low > 250
    with pytest.raises(Exception, match=r"(?s)DataLossError.*queue 0 has offsets .* the stream goes on from 250"):
        stream.run()
    stream.run(failOnDataLoss="false")
    assert stream.rows() == [("orders", 0, offset) for offset in range(250)] + expected(live)


def test_a_store_shorter_than_the_checkpoint_is_data_loss(spark: Any, live: Path, tmp_path: Path) -> None:
    stream = Stream(spark, live, tmp_path / "out")
    stream.run()
    shutil.rmtree(live)
    with rmq.open(live, "x") as store:
        store.put_many(orders(60))
    with pytest.raises(Exception, match=r"(?s)DataLossError.*queue 0 ends at 15, the stream goes on from 250"):
        stream.run()
    assert stream.run(failOnDataLoss="false") == 0
    with rmq.open(live, "r+") as store:
        store.put_many(orders(8, first=60))
    stream.run()
    assert stream.rows() == sorted(("orders", queue, offset) for queue in range(4) for offset in [*range(250), 15, 16])


def reader_of(*paths: Any, **options: str) -> Any:
    """What Spark asks on the driver, without Spark."""
    from pyspark.sql.types import StringType, StructField, StructType

    from rmq.spark.stream import StreamReader

    asked = ReadOptions.parse({"paths": json.dumps(list(map(str, paths)))} | options)
    return StreamReader(asked, StructType([StructField("topic", StringType())]))


def test_a_queue_that_is_gone_is_data_loss_while_it_is_chosen(live: Path) -> None:
    end = {"orders": {str(queue): 250 for queue in range(4)}}
    gone = end | {"expired": {"0": 5}}
    lost = "expired queue 0 is gone, the stream goes on from 5"
    for options in ({}, {"subscribe": "expired"}, {"subscribePattern": "e.*"}, {"assign": '{"expired": [0]}'}):
        with pytest.raises(DataLossError, match=lost):
            reader_of(live, **options).latestOffset(gone)
    with pytest.raises(DataLossError, match=lost):  # PySpark 4.1 has no other place to tell
        reader_of(live).partitions(gone, end)
    assert reader_of(live, failOnDataLoss="false").latestOffset(gone) == end
    for options in ({"subscribe": "orders"}, {"subscribePattern": "o.*"}, {"assign": '{"orders": [0, 1, 2, 3]}'}):
        assert reader_of(live, **options).latestOffset(gone) == gone


def test_a_checkpoint_knows_its_stores_however_paths_are_written(live: Path, store: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(live.parent)
    end = reader_of(live, store).latestOffset()
    older = {name.replace(f"{live}/", f"{live}//"): queues for name, queues in end.items()}
    for path in (f"{live}/", live.name, f"./{live.name}/../{live.name}", live.as_uri()):
        for start in (end, older):
            assert reader_of(path, store).latestOffset(start) == end
            assert {type(part) for part in reader_of(path, store).partitions(start, end)} == {NoPartition}


def test_offsets_of_another_store_are_an_error(live: Path, store: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(live, tmp_path / "other"))
    alone, both = reader_of(live).latestOffset(), reader_of(live, store).latestOffset()
    for reader, start in ((reader_of(live, store), alone), (reader_of(live), both), (reader_of(live, other), both)):
        with pytest.raises(ValueError, match=r"of no store of this stream .* or another checkpointLocation"):
            reader.latestOffset(start)
        with pytest.raises(ValueError, match="of no store of this stream"):
            reader.partitions(start, start)


def test_a_limit_takes_one_message_at_least_and_no_more_when_queues_share_it(live: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from rmq.spark.stream import limited_offsets

    shutil.copytree(live / "consumequeue" / "orders" / "0", live / "consumequeue" / "light" / "0")
    with rmq.open(live) as store:
        end = {"orders": {0: 250, 1: 250}, "light": {0: 250}}
        assert limited_offsets(store, {}, end, ReadMaxRows(1)) == {"orders": {0: 1, 1: 0}, "light": {0: 1}}


def test_a_limit_on_queues_that_have_lost_their_units_is_for_the_batch_to_judge(live: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from rmq.spark.stream import limited_offsets

    with rmq.open(live) as store:
        assert limited_offsets(store, {}, {"gone": {0: 10}}, ReadMaxRows(3)) == {"gone": {0: 10}}


@pytest.mark.parametrize("together", [1, 3, 50, 10**6])
def test_limits_on_rows_take_queues_of_any_shape_in_log_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              together: int) -> None:  # fmt: skip
    """Against a count of the log: a long queue, short ones, one that comes late and one that ends early."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    import rmq.spark.stream as stream

    monkeypatch.setattr(stream, "ROWS_TOGETHER", together)
    chance = random.Random(6)
    numbers = [chance.choice([0] * 30 + [1] * 5 + [2 if at < 100 else 3 if at > 900 else 4]) for at in range(1000)]
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", b"", queue_id=number) for number in numbers])
        end = {"T": {number: numbers.count(number) for number in range(5)}}
        for begin in (0, 1, 500, 990):
            start = {number: numbers[:begin].count(number) for number in range(5)}
            for rows in (1, 2, 7, 16, 17, 99, 400, 999, 1000, 10**9):
                behind = numbers[: begin + rows]
                assert stream.limited_offsets(store, {"T": start}, end, ReadMaxRows(rows)) == {
                    "T": {number: behind.count(number) for number in range(5)}}, (begin, rows)  # fmt: skip


def test_a_limit_on_rows_asks_each_queue_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxRows

    from rmq.spark.stream import limited_offsets

    asked = []
    real = rmq.Store.units
    monkeypatch.setattr(rmq.Store, "units", lambda store, *place: asked.append(place) or real(store, *place))
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", b"", queue_id=number % 50) for number in range(20_000)])
        found = limited_offsets(store, {}, {"T": dict.fromkeys(range(50), 400)}, ReadMaxRows(5000))
    assert found == {"T": dict.fromkeys(range(50), 100)}
    assert len(asked) <= 2 * 50


def test_a_limit_counts_from_what_is_left(tmp_path: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

    from rmq.spark.stream import limited_offsets

    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20 * 10)
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        made.put_many(orders(1000))
    (tmp_path / "s" / "commitlog" / f"{0:020d}").unlink()
    with rmq.open(tmp_path / "s") as store:
        bounds = store.topics()["orders"]
        lows, end = [low for low, _ in bounds.values()], {"orders": dict.fromkeys(bounds, 250)}
        assert min(lows) > 0
        for limit, count in ((ReadMaxRows(10), 10), (ReadMaxBytes(1), 1), (ReadMaxRows(10**6), 1000 - sum(lows))):
            found = limited_offsets(store, {"orders": dict.fromkeys(bounds, 3)}, end, limit)
            assert sum(found["orders"].values()) - sum(lows) == count


def test_a_memory_of_offsets_is_kafkas_json(spark: Any, live: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
    from pyspark.sql.types import StructType

    from rmq.spark.stream import StreamReader

    def reader(**options: str) -> StreamReader:
        return StreamReader(ReadOptions.parse({"path": str(live)} | options), StructType.fromDDL("topic string"))

    plain = reader()
    start, end = plain.initialOffset(), plain.latestOffset()
    assert start == {"orders": {str(queue): 0 for queue in range(4)}}
    assert end == {"orders": {str(queue): 250 for queue in range(4)}}
    assert plain.latestOffset(start, ReadAllAvailable()) == plain.reportLatestOffset() == end
    assert sum(plain.latestOffset(start, ReadMaxRows(10))["orders"].values()) == 10
    assert sum(plain.latestOffset(start, ReadMaxBytes(1))["orders"].values()) == 1
    assert plain.latestOffset(end, ReadMaxRows(10)) == end
    assert reader(maxOffsetsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)
    parts = plain.partitions(start, end)
    rows = [row for part in parts for batch in plain.read(part) for row in batch.to_pylist()]
    assert len(rows) == 1000
    assert all(batch.num_rows == 0 for part in plain.partitions(end, end) for batch in plain.read(part))
    ahead = {"orders": {"0": 251}}
    with pytest.raises(ValueError, match="queue 0 has offsets 0 to 250, the stream goes on from 0 to 251"):
        plain.partitions(start, ahead)


@pytest.mark.parametrize(("rows", "size", "count"), [(10, 10**9, 10), (10**9, 1, 1), (10, 1, 1), (1, 10**9, 1)])
def test_both_limits_hold(live: Path, rows: int, size: int, count: int) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from rmq.spark.stream import StreamReader

    asked = {"path": str(live), "maxOffsetsPerTrigger": str(rows), "maxBytesPerTrigger": str(size)}
    reader = StreamReader(ReadOptions.parse(asked), StructType([StructField("topic", StringType())]))
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert sum(end["orders"].values()) == count


def test_a_directory_of_shards_is_no_stream(spark: Any, live: Path, tmp_path: Path) -> None:
    from pyspark.sql.types import StructType

    from rmq.spark.stream import StreamReader

    shards = tmp_path / "shards"
    Staging(str(shards), "job").commit_shards([])
    with pytest.raises(ValueError, match="shards is a directory of shards, a stream reads stores"):
        StreamReader(ReadOptions.parse({"path": str(shards)}), StructType.fromDDL("topic string"))


def test_offsets_of_several_stores_stand_behind_their_paths(spark: Any, live: Path, store: Path) -> None:
    from pyspark.sql.types import StructType

    from rmq.spark.stream import StreamReader

    asked = ReadOptions.parse({"paths": json.dumps([str(live), str(store)]), "subscribe": "orders"})
    reader = StreamReader(asked, StructType.fromDDL("store string, topic string"))
    end = reader.latestOffset()
    assert end == {f"{live}/orders": {str(queue): 250 for queue in range(4)},
                   f"{store}/orders": {str(queue): COUNT // 4 for queue in range(4)}}  # fmt: skip
    rows = [row for part in reader.partitions(reader.initialOffset(), end) for batch in reader.read(part)
            for row in batch.column("store").to_pylist()]  # fmt: skip
    assert (rows.count(str(live)), rows.count(str(store))) == (1000, COUNT)


def killed(command: list[str], place: Path, ready: Callable[[], bool]) -> bool:
    """Run a whole application until `ready`, then kill its driver, JVM and workers. False: it ended before.

    place: its working directory. It shares no JVM, environment or directory with this process.
    """
    environment = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "PATH", "PYTHONPATH")
                   if name in os.environ} | {"TMPDIR": str(place)}  # fmt: skip
    process = subprocess.Popen(command, cwd=place, env=environment, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None and not ready():
        time.sleep(0.02)
    ended = process.poll()
    if ended is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    assert ended == 0
    return False


@pytest.mark.slow
def test_every_message_comes_once_through_kills_of_the_application(spark: Any, live: Path, tmp_path: Path) -> None:
    with rmq.open(live, "r+") as store:
        store.put_many(orders(1000, first=1000))
    rng, out, kills = random.Random(7), tmp_path / "out", 0
    command = [sys.executable, str(Path(__file__).with_name("streamer.py")), str(live), str(out)]
    commits, place = out / "checkpoint" / "commits", tmp_path / "application"
    place.mkdir()
    while kills < KILLS:
        seen = len(list(commits.glob("[0-9]*"))) if commits.exists() else 0
        wanted, moment = seen + rng.randint(1, 3), rng.random() * 0.5

        def ready(wanted: int = wanted, moment: float = moment) -> bool:
            if commits.exists() and len(list(commits.glob("[0-9]*"))) >= wanted:
                time.sleep(moment)
                return True
            return False

        assert killed(command, place, ready), "the backlog is too small for so many kills"
        kills += 1
    assert not killed(command, place, lambda: False)
    stream = Stream(spark, live, out)
    assert stream.rows() == expected(live, "orders")
