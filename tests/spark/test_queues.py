"""Reads by queue: the same messages as a pass over the log, in partitions of so many at most."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from test_foreign_formats import Builder

import rmq
from rmq.spark import source
from rmq.spark.options import ReadOptions
from rmq.spark.queues import MOST_PARTITIONS, plan_spans
from rmq.spark.selection import DataLossError, select
from spark.orders import COUNT, TIME

pytestmark = pytest.mark.spark
SEGMENT = 65536


@pytest.fixture(autouse=True)
def _session(spark: Any) -> None:
    """Spark parses schemas in its JVM."""


def parts(path: Path, **options: str) -> list[list[dict[str, Any]]]:
    """Rows of each partition of a batch read."""
    reader = planned(path, **options)
    return [[row for batch in reader.read(pickle.loads(pickle.dumps(part))) for row in batch.to_pylist()]
            for part in reader.partitions()]  # fmt: skip


def planned(path: Path, **options: str) -> Any:
    from pyspark.sql.types import StructType

    asked = ReadOptions.parse({"path": str(path)} | options)
    schema = StructType.fromDDL(source.ddl(source.offered(asked), asked.has_store_column))
    return source.MessageReader(asked, schema)  # type: ignore[arg-type]


def in_order(rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sorted((row for part in rows for row in part), key=lambda row: row["phy_offset"])


@pytest.mark.parametrize("options", [
    {"subscribe": "orders"}, {"subscribe": "other"}, {"subscribe": "nix"}, {"subscribe": "orders,other"},
    {"subscribePattern": "o.*"}, {"assign": '{"orders": [1, 3], "other": [7]}'}, {"subscribe": "orders", "tags": "B"},
    {"subscribe": "orders", "startingTimestamp": str(TIME + 700), "endingTimestamp": str(TIME + 900)},
    {"subscribe": "orders", "startingTimestamp": str(2**63 - 1)}, {"subscribe": "orders", "endingTimestamp": "0"},
    {"subscribe": "orders", "endingTimestamp": str(2**63 - 1)},
    {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 10, "1": -1, "2": -2, "3": 5}}',
     "endingOffsets": '{"orders": {"0": 12, "2": 1, "3": -2}}'}], ids=str)  # fmt: skip
@pytest.mark.parametrize("how", [{"scanMode": "queue"}, {"maxRecordsPerPartition": "97"},
                                 {"batchBytes": "4000", "batchRows": "100", "scanMode": "queue"}], ids=str)  # fmt: skip
def test_queues_give_what_the_log_gives(store: Path, options: dict[str, str], how: dict[str, str]) -> None:
    expected = in_order(parts(store, scanMode="log", **options))
    assert in_order(parts(store, **options, **how)) == expected


@pytest.mark.parametrize("limit", [9, 999, 1000, 1001, 4000, 10**12])
def test_no_partition_has_more_than_it_may(store: Path, limit: int) -> None:
    found = parts(store, subscribe="orders", columns="phy_offset,queue_id", maxRecordsPerPartition=str(limit))
    assert max(map(len, found)) == min(limit, COUNT)
    assert len(found) == -(-COUNT // limit)
    assert len({row["phy_offset"] for part in found for row in part}) == COUNT


@pytest.mark.parametrize("option", ["batchBytes", "batchRows", "maxRecordsPerPartition"])
def test_one_message_at_a_time(store: Path, option: str) -> None:
    asked = {"startingOffsets": '{"orders": {"2": 7}}', "endingOffsets": '{"orders": {"2": 20}}'}
    rows = parts(store, assign='{"orders": [2]}', scanMode="queue", **asked, **{option: "1"})
    assert [row["queue_offset"] for part in rows for row in part] == [*range(7, 20)]


def test_as_many_partitions_as_wanted_and_none_without_messages(store: Path) -> None:
    assert len(parts(store, subscribe="orders", scanMode="queue", minPartitions="7")) == 7
    assert parts(store, subscribe="nix", scanMode="queue") == [[]]
    size = sum(row["size"] for part in parts(store, subscribe="orders") for row in part)
    found = parts(store, subscribe="orders", scanMode="queue", splitBytes=str(SEGMENT))
    assert abs(len(found) - size / SEGMENT) < 2


def test_kafka_s_shape_and_columns(store: Path) -> None:
    rows = [row for part in parts(store, subscribe="orders", scanMode="queue", schemaMode="kafka") for row in part]
    assert {(row["partition"], row["offset"]) for row in rows} == {(n % 4, n // 4) for n in range(COUNT)}
    rows = [row for part in parts(store, subscribe="other", scanMode="queue", columns="raw_body") for row in part]
    assert rows == [{"raw_body": b"x"}] * 10


def kinds(path: Path, **options: str) -> set[str]:
    return {type(part).__name__ for part in planned(path, **options).partitions()}


def test_auto_takes_queues_for_a_small_part_whose_bounds_are_offsets(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT)
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        for number in range(900):
            made.put(rmq.Message("small" if number % 30 == 0 else "large", b"x" * 100))
    path = tmp_path / "s"
    assert kinds(path, assign='{"small": [0]}') == {"QueuePartition"}
    assert kinds(path, subscribe="small", startingOffsets='{"small": {"0": 3}}') == {"QueuePartition"}
    assert kinds(path, assign='{"small": [0]}', scanMode="log") == {"SplitPartition"}
    assert kinds(path, assign='{"large": [0]}') == kinds(path, subscribe="small") == kinds(path) == {"SplitPartition"}
    assert kinds(path, assign='{"large": [0]}', scanMode="queue") == {"QueuePartition"}
    assert kinds(path, assign='{"small": [9]}') == {"NoPartition"}
    assert in_order(parts(path, assign='{"small": [0]}')) == in_order(parts(path, subscribe="small"))


def test_a_stream_s_batch_may_be_read_by_queue(store: Path) -> None:
    from pyspark.sql.types import StructType

    from rmq.spark.stream import StreamReader

    asked = ReadOptions.parse({"path": str(store), "subscribe": "orders", "maxRecordsPerPartition": "600"})
    asked.check_stream()
    reader = StreamReader(asked, StructType.fromDDL("queue_id int, queue_offset bigint"))  # type: ignore[arg-type]
    end = {"orders": {"0": 1000, "1": 10}}
    split = reader.partitions({"orders": {"0": 100}}, end)
    assert [len([row for batch in reader.read(part) for row in batch.to_pylist()]) for part in split] == [600, 310]


def test_more_partitions_than_any_driver_can_hold_are_an_error(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.spark.queues.MOST_PARTITIONS", 399)
    with pytest.raises(ValueError, match="option maxRecordsPerPartition: 4000 messages are more than 399"):
        parts(store, subscribe="orders", maxRecordsPerPartition="10")
    assert MOST_PARTITIONS == 1_000_000


@pytest.mark.parametrize("back", [1, 3_599_999])
def test_a_clock_that_went_back_hides_no_message(tmp_path: Path, back: int) -> None:
    times = [TIME + number * 600_000 - (back if number % 7 == 3 else 0) for number in range(100)]
    clock = iter(times)
    with rmq.open(tmp_path / "s", "x", clock=lambda: next(clock, TIME)) as made:
        for _ in times:
            made.put(rmq.Message("t", b"x"))
    for begin in (times[20], times[24], times[38], times[31] + 1):
        found = parts(tmp_path / "s", subscribe="t", scanMode="queue", startingTimestamp=str(begin),
                      endingTimestamp=str(begin + 3_000_000))  # fmt: skip
        assert len(found[0]) == sum(begin <= time < begin + 3_000_000 for time in times)


# ---- what is not there ----


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """100 messages of one queue in segments of 4 KiB."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 10)
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        made.put_many([rmq.Message("t", b"%03d" % number + b"x" * 200) for number in range(100)])
    return tmp_path / "s"


def unit_file(path: Path) -> Path:
    return path / "consumequeue" / "t" / "0" / f"{20 * 50:020d}"


def test_damage_is_an_error_or_left_out(clean: Path) -> None:
    with rmq.open(clean) as opened:
        place = opened.lookup(("t", 0, 55)).phy_offset
    segment = clean / "commitlog" / f"{place // 4096 * 4096:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"055", b"x55"))
    options = {"subscribe": "t", "scanMode": "queue"}
    with pytest.raises(rmq.CorruptFileError, match="body CRC differs"):
        parts(clean, **options)
    assert len(parts(clean, **options, failOnDataLoss="false")[0]) == 99
    assert len(parts(clean, **options, verifyCrc="false")[0]) == 100


@pytest.mark.parametrize("unit", [(0, 5), (2**40, 300), (7, 300), (-1, -1), (2**63 - 1, 2**31 - 1)])
def test_a_unit_that_points_elsewhere_is_an_error_or_left_out(clean: Path, unit: tuple[int, int]) -> None:
    file = unit_file(clean)
    data = bytearray(file.read_bytes())
    data[60:72] = unit[0].to_bytes(8, "big", signed=True) + unit[1].to_bytes(4, "big", signed=True)
    file.write_bytes(data)
    options = {"assign": '{"t": [0]}', "scanMode": "queue"}
    with pytest.raises((DataLossError, rmq.CorruptFileError)):
        parts(clean, **options)
    found = parts(clean, **options, failOnDataLoss="false")
    assert {row["queue_offset"] for part in found for row in part} >= {*range(100)} - {53, 54}


def test_what_was_cleaned_away_since_the_plan_is_data_loss(clean: Path) -> None:
    for fails in ("true", "false"):
        reader = planned(clean, subscribe="t", scanMode="queue", failOnDataLoss=fails)
        plan = reader.partitions()
        if fails == "true":
            for number in range(2):
                (clean / "commitlog" / f"{number * 4096:020d}").unlink()
            with pytest.raises(DataLossError, match="t queue 0 has no message 0 any more"):
                list(reader.read(plan[0]))
        else:
            rows = [row for batch in reader.read(plan[0]) for row in batch.to_pylist()]
            with rmq.open(clean) as opened:
                assert len(rows) == opened.scan().read_all().num_rows < 100


def test_queues_that_have_no_units_are_an_error_for_queue_and_none_for_auto(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As batch consume queues have none."""

    def units(self: rmq.Store, *_: Any) -> None:
        raise rmq.UnsupportedFormatError(self.path, "units of a batch consume queue", "pull reads them")

    monkeypatch.setattr(rmq.Store, "units", units)
    assert kinds(store, assign='{"other": [7]}') == {"SplitPartition"}
    with pytest.raises(rmq.UnsupportedFormatError, match="units of a batch consume queue"):
        kinds(store, assign='{"other": [7]}', scanMode="queue")


def test_a_plan_reads_no_log(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ReadOptions.parse({"path": str(store), "subscribe": "orders", "scanMode": "queue"})
    with rmq.open(store) as opened:
        selection = select(opened, asked)
        monkeypatch.setattr(rmq.Store, "lookup_many", None)
        monkeypatch.setattr(rmq.Store, "scan", None)
        assert sum(span.last - span.first for part in plan_spans(opened, selection, asked, 3) for span in part) == COUNT


def test_through_spark(spark: Any, store: Path) -> None:
    frame = spark.read.format("rmq").options(subscribe="orders", maxRecordsPerPartition="1500").load(str(store))
    assert frame.rdd.getNumPartitions() == 3
    assert frame.selectExpr("count(*)", "count(DISTINCT phy_offset)").first()[:] == (COUNT, COUNT)


def test_light_queues_are_left_out(tmp_path: Path) -> None:
    """Their messages come once, as those of their own topic."""
    from pyspark.sql.types import StructType

    made = Builder(tmp_path)
    units = [(*made.record("T", b"%d" % number, b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02INNER_MULTI_QUEUE_OFFSET\x010\x02",
                           queue_offset=number), 0) for number in range(2)]  # fmt: skip
    for topic in ("T", "%LMQ%a"):
        made.units(topic, 0, units)
    path = made.finish()
    for options in ({"scanMode": "queue"}, {"scanMode": "log"}, {"startingOffsets": "earliest"}):
        assert [row["body"] for row in in_order(parts(path, subscribePattern=".*", **options))] == [b"0", b"1"]
    reader = source.TableReader(ReadOptions.parse({"path": str(path), "table": "queues", "subscribe": "%LMQ%a"}),
                                StructType.fromDDL("topic string"))  # type: ignore[arg-type]  # fmt: skip
    assert sum(len(batch) for part in reader.partitions() for batch in reader.read(part)) == 2
