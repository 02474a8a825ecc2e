"""Which messages a read asks for and where they lie, resolved without Spark's JVM."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import rmq
from rmq.scan import schema_of
from rmq.spark.options import ReadOptions
from rmq.spark.selection import DataLossError, ranges, select
from rmq.spark.source import MessageReader
from rmq.spark.stream import StreamReader
from rmq.splits import Split, plan
from spark.orders import COUNT, TIME


def read(path: Path, **options: str) -> list[dict[str, Any]]:
    """What all partitions of a batch read together give."""
    asked = ReadOptions.parse({"path": str(path), "splitBytes": "65536"} | options)
    rows: list[dict[str, Any]] = []
    with rmq.open(path) as store:
        chosen = pickle.loads(pickle.dumps(select(store, asked)))
        for split in plan(str(path), ranges(store, chosen, asked), split_bytes=asked["splitBytes"]):
            for batch in store.scan(topics=chosen.topics, begin=chosen.begin, end=chosen.end,
                                    begin_phy_offset=split.begin, end_phy_offset=split.end):  # fmt: skip
                rows += chosen.keep(batch).to_pylist()
    return rows


def numbers(path: Path, **options: str) -> list[int]:
    return [int(dict(row["properties"])["n"]) for row in read(path, **options) if row["topic"] == "orders"]


@pytest.mark.parametrize("size", [1, 7, 4096, 65536, 10**9])
def test_splits_of_any_size_give_each_message_once(store: Path, size: int) -> None:
    with rmq.open(store) as opened:
        end = opened.max_phy_offset
        count = min(200, -(-end // size))
        splits = plan(str(store), [(0, end)], split_bytes=-(-end // count))
        assert splits[0].begin == 0
        assert splits[-1].end == end
        found = [offset for split in splits
                 for offset in opened.scan(begin_phy_offset=split.begin, end_phy_offset=split.end,
                                           columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()]  # fmt: skip
        assert found == opened.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()


def test_at_least_as_many_partitions_as_wanted() -> None:
    assert len(plan("s", [(0, 100)], min_partitions=7)) == 7
    assert plan("s", [(0, 2)], min_partitions=7) == [Split("s", 0, 1), Split("s", 1, 2)]
    assert plan("s", []) == plan("s", [(5, 5)]) == []


def test_the_whole_log_without_a_topic(store: Path) -> None:
    assert len(read(store)) == COUNT + 10


@pytest.mark.parametrize(("options", "count"), [
    ({"subscribe": "orders"}, COUNT), ({"subscribe": "orders,other"}, COUNT + 10),
    ({"subscribe": "nix"}, 0), ({"subscribePattern": "oth.*"}, 10), ({"subscribePattern": "th"}, 0),
    ({"assign": '{"orders": [1, 3]}'}, COUNT // 2), ({"assign": '{"orders": [9]}'}, 0),
    ({"tags": "A"}, COUNT // 2), ({"tags": "A || B"}, COUNT), ({"tags": "*"}, COUNT + 10)], ids=str)  # fmt: skip
def test_topics_queues_and_tags_choose(store: Path, options: dict[str, str], count: int) -> None:
    assert len(read(store, **options)) == count


def test_offsets_of_queues_are_a_half_open_range(store: Path) -> None:
    found = numbers(store, subscribe="orders", startingOffsets='{"orders": {"0": 10, "1": -1, "2": -2, "3": 5}}',
                    endingOffsets='{"orders": {"0": 12, "2": 1, "3": -2}}')  # fmt: skip
    assert found == [2, 40, 44]


def test_times_are_a_half_open_range(store: Path) -> None:
    assert numbers(store, startingTimestamp=str(TIME + 100), endingTimestamp=str(TIME + 103)) == [100, 101, 102]


def test_times_of_queues_begin_at_the_first_message_then_or_later(store: Path) -> None:
    times = f'{{"orders": {{"0": {TIME + 3990}, "1": {TIME + 3990}, "2": {TIME + 9999}, "3": {TIME + 9999}}}}}'
    assert numbers(store, subscribe="orders", startingOffsetsByTimestamp=times) == [3992, 3993, 3996, 3997]


def test_a_time_range_reads_few_segments(tmp_path: Path) -> None:
    """Segments that begin an hour and more outside are left out."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096)
    clock = iter(TIME + number * 600_000 for number in range(1000))
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: next(clock)) as store:
        for number in range(500):
            store.put(rmq.Message("t", b"x" * 200, properties={"n": str(number)}))
        asked = ReadOptions.parse({"path": "s", "startingTimestamp": str(TIME + 200 * 600_000),
                                   "endingTimestamp": str(TIME + 201 * 600_000)})  # fmt: skip
        selection = select(store, asked)
        found = ranges(store, selection, asked)
        assert len(found) == 1
        assert found[0][1] - found[0][0] <= 4 * 4096
        rows = store.scan(begin=selection.begin, end=selection.end, begin_phy_offset=found[0][0],
                          end_phy_offset=found[0][1]).read_all()  # fmt: skip
        assert [dict(row)["n"] for row in rows["properties"].to_pylist()] == ["200"]


def test_an_offset_that_was_cleaned_away_is_data_loss(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 10)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("t", b"x" * 200, properties={"n": "1"}) for _ in range(100)])
    (tmp_path / "s" / "commitlog" / f"{0:020d}").unlink()
    with rmq.open(tmp_path / "s") as store:
        low = store.topics()["t"][0][0]
        assert low > 0
        given = {"path": "s", "subscribe": "t", "startingOffsets": '{"t": {"0": 0}}'}
        with pytest.raises(DataLossError, match=f"begins at {low}, 0 is gone"):
            select(store, ReadOptions.parse(given))
        kept = select(store, ReadOptions.parse(given | {"failOnDataLoss": "false"}))
        assert kept.bounds == {"t": {0: (low, 100)}}


@pytest.mark.parametrize(("name", "place"), [("startingOffsets", 1001), ("endingOffsets", 1001),
                                             ("startingOffsets", 2**40)])  # fmt: skip
def test_an_offset_behind_a_queue_s_end_is_data_loss(store: Path, name: str, place: int) -> None:
    given = {"subscribe": "orders", name: f'{{"orders": {{"0": {place}}}}}'}
    with pytest.raises(DataLossError, match=f"{name}: orders queue 0 ends at 1000, before {place}"):
        read(store, **given)
    kept = COUNT if name == "endingOffsets" else COUNT - 1000
    assert len(read(store, **given, failOnDataLoss="false")) == kept
    assert len(read(store, **given | {name: '{"orders": {"0": 1000}}'})) == kept


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"subscribe": "orders"}, {"subscribe": "orders", "keys": "o-5"}], ids=str)
def test_a_log_that_is_shorter_than_when_it_was_planned_is_data_loss(tmp_path: Path, options: dict[str, str]) -> None:
    """An older copy was put back: what is missing now would be no rows without a word."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536)
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config) as store:
        store.put_many([rmq.Message("orders", bytes(500), keys=f"o-{number}") for number in range(300)])
    shutil.copytree(path, tmp_path / "older")
    with rmq.open(path, "r+") as store:
        store.put_many([rmq.Message("orders", bytes(500), keys=f"o-{number}") for number in range(300)])
    schema = from_arrow_schema(schema_of(["body"]))

    def rows(fail: str) -> int:
        asked = ReadOptions.parse({"path": str(path), "splitBytes": "65536", "failOnDataLoss": fail} | options)
        reader = MessageReader(asked, schema)
        parts = plans.setdefault(fail, reader.partitions())
        return sum(len(batch) for part in parts for batch in reader.read(part))

    plans: dict[str, list[Any]] = {}
    whole = rows("true")
    is_by_key = "keys" in options
    if not is_by_key:
        rows("false")
    shutil.rmtree(path)
    (tmp_path / "older").rename(path)
    with pytest.raises(DataLossError, match="the log has bytes 0 to"):
        rows("true")
    if not is_by_key:
        assert rows("false") == whole // 2


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """100 messages of one queue in eight segments of 4 KiB, three of them in the first 1,000 bytes of each."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 10)
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        made.put_many([rmq.Message("t", b"%03d" % number + bytes(200)) for number in range(100)])
    return tmp_path / "s"


def numbers_by_queue(path: Path, fail: str, *, stream: bool) -> list[int]:
    asked = ReadOptions.parse({"path": str(path), "subscribe": "t", "scanMode": "queue", "failOnDataLoss": fail})
    schema = from_arrow_schema(schema_of(["body"]))
    reader: Any = StreamReader(asked, schema) if stream else MessageReader(asked, schema)
    parts = reader.partitions({}, {"t": {"0": 100}}) if stream else reader.partitions()
    return [int(body[:3]) for part in parts for batch in reader.read(part) for body in batch.column("body").to_pylist()]


def zero_a_record(file: Path) -> None:
    with file.open("r+b") as segment:
        size = int.from_bytes(segment.read(4), "big")
        segment.seek(size)
        segment.write(bytes(size))


@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(("segment", "lost"), [(0, range(3, 13)), (2, range(29, 39)), (7, range(94, 100))], ids=str)
def test_by_queue_a_segment_that_is_cut_short_is_data_loss_or_read_to_its_last_whole_record(
    clean: Path, segment: int, lost: range, stream: bool
) -> None:
    file = clean / "commitlog" / f"{segment * 4096:020d}"
    os.truncate(file, 1000)
    for _ in range(2):
        with pytest.raises((DataLossError, rmq.CorruptFileError), match=f"{file}: byte 1000: file has 1000 bytes"):
            numbers_by_queue(clean, "true", stream=stream)
        assert numbers_by_queue(clean, "false", stream=stream) == [n for n in range(100) if n not in lost]


@pytest.mark.parametrize("mode", ["log", "queue"])
@pytest.mark.parametrize("option", ["startingTimestamp", "startingOffsetsByTimestamp"])
@pytest.mark.parametrize(("segment", "lost"), [(0, range(3, 13)), (2, range(29, 39)), (7, range(94, 100))], ids=str)
def test_a_time_finds_what_is_left_of_a_log_that_is_cut_short(
    tmp_path: Path, segment: int, lost: range, option: str, mode: str
) -> None:
    path, step = tmp_path / "s", 600_000
    times = iter(range(TIME, TIME + 100 * step, step))
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 10)
    with rmq.open(path, "x", config=config, clock=lambda: next(times)) as made:
        for number in range(100):
            made.put(rmq.Message("t", b"%03d" % number + bytes(200)))
    os.truncate(path / "commitlog" / f"{segment * 4096:020d}", 1000)
    schema = from_arrow_schema(schema_of(["body"]))
    for first in (0, 5, 20, 33, 60, 97):
        time = TIME + first * step - 1
        told = str(time) if option == "startingTimestamp" else f'{{"t": {{"0": {time}}}}}'
        asked = ReadOptions.parse({"path": str(path), "subscribe": "t", "scanMode": mode, "failOnDataLoss": "false",
                                   option: told})  # fmt: skip
        reader = MessageReader(asked, schema)
        found = [int(body[:3]) for part in reader.partitions() for batch in reader.read(part)
                 for body in batch.column("body").to_pylist()]  # fmt: skip
        assert found == [number for number in range(first, 100) if number not in lost]


@pytest.mark.parametrize("segment", [0, 2, 7])
def test_queues_that_must_be_made_of_a_log_that_is_cut_short_are_data_loss(clean: Path, segment: int) -> None:
    """What units the rest of the segment had nobody knows."""
    shutil.rmtree(clean / "consumequeue")
    file = clean / "commitlog" / f"{segment * 4096:020d}"
    os.truncate(file, 1000)
    with pytest.raises(DataLossError, match=f"{file}: byte 1000: .*; failOnDataLoss=false reads what is left"):
        numbers_by_queue(clean, "true", stream=False)
    assert len(numbers_by_queue(clean, "false", stream=False)) == (91 if segment == 7 else 87)


@pytest.mark.parametrize(("damage", "left"), [(os.unlink, 87), (zero_a_record, 99)], ids=["removed", "zeroed"])
def test_queues_that_must_be_made_of_a_damaged_log_are_data_loss(
    clean: Path, damage: Callable[[Path], None], left: int
) -> None:
    shutil.rmtree(clean / "consumequeue")
    damage(clean / f"commitlog/{2 * 4096:020d}")
    for stream in (False, True):
        with pytest.raises(DataLossError, match="failOnDataLoss=false reads what is left"):
            numbers_by_queue(clean, "true", stream=stream)
    assert len(numbers_by_queue(clean, "false", stream=False)) == left


@pytest.mark.parametrize("fail", ["true", "false"])
def test_what_is_cleaned_away_before_a_task_comes_to_it_is_data_loss(clean: Path, fail: str) -> None:
    asked = ReadOptions.parse({"path": str(clean), "batchRows": "5", "failOnDataLoss": fail})
    reader = MessageReader(asked, from_arrow_schema(schema_of(["body"])))
    (part,) = reader.partitions()
    batches = reader.read(part)
    assert len(next(batches)) == 5
    with rmq.open(clean, "r+") as store:
        for file in (clean / "commitlog").iterdir():
            os.utime(file, (1, 1))
        store.clean(limit=3)
    if fail == "true":
        with pytest.raises(DataLossError, match=r"the log has bytes 12288 to .* by now, the read 0 to"):
            list(batches)
    else:
        assert sum(map(len, batches)) == 100 - 5 - 2 * 13


def test_a_queue_that_is_not_there_is_data_loss(store: Path) -> None:
    given = {"subscribe": "orders", "startingOffsets": '{"orders": {"17": 0}}'}
    with pytest.raises(DataLossError, match="the store has no orders queue 17"):
        read(store, **given)
    assert len(read(store, **given, failOnDataLoss="false")) == COUNT


@pytest.mark.parametrize("number", [0, 50, 99])
def test_a_damaged_message_at_an_end_of_the_offsets_is_left_out(tmp_path: Path, number: int) -> None:
    """Or the error of the read, as anywhere else: the plan does not need it whole."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        store.put_many([rmq.Message("t", b"body %03d" % n) for n in range(100)])
    segment = path / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"body %03d" % number, b"bodY %03d" % number))
    asked = ReadOptions.parse({"path": str(path), "assign": '{"t": [0]}'})
    with rmq.open(path) as store:
        selection = select(store, asked)
        [(begin, end)] = ranges(store, selection, asked)
        scanned = store.scan(begin_phy_offset=begin, end_phy_offset=end, on_damage="skip")
        assert sum(len(selection.keep(batch)) for batch in scanned) == 99
        with pytest.raises(rmq.CorruptFileError):
            store.scan(begin_phy_offset=begin, end_phy_offset=end).read_all()
