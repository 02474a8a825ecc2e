# SPDX-License-Identifier: Apache-2.0
"""Stores that a broker or power loss left in a state of its own: rebuilds, verify and readers judge as opens do."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest

import rmq

SIZES: dict[str, Any] = {"mapped_file_size_commit_log": 65536, "mapped_file_size_consume_queue": 1000,
                         "max_hash_slot_num": 97, "max_index_num": 500}  # fmt: skip
CONFIG = rmq.StoreConfig(**SIZES)
UNFLUSHED = rmq.StoreConfig(flush_interval_commit_log=2**31 - 1, **SIZES)
TIME = 1_700_000_000_000
LOG = f"{0:020d}"


def make(path: Path, count: int, **options: Any) -> Path:
    clock = iter(range(TIME, 2**62))
    with rmq.open(path, "x", config=rmq.StoreConfig(**SIZES, **options), clock=lambda: next(clock)) as store:
        for number in range(count):
            store.put(rmq.Message("T", b"x" * 100, keys=f"k{number}"))
    return path


def as_a_broker_s(path: Path) -> Path:
    shutil.rmtree(path / "rmq")
    return path


def bodies(path: Path, topic: str = "T") -> list[bytes]:
    with rmq.open(path) as store:
        return [message.body for message in store.pull(topic).messages]


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except rmq.CorruptFileError:
        return True
    return False


def killed(path: Path, image: Path, *, tear: int, size: int) -> tuple[int, int]:
    """Ten messages that were flushed, ten that were not: of these power loss takes bytes of the fourth. Where the first
    ten end, and the size of each."""
    with rmq.open(path, "x", config=UNFLUSHED) as store:
        messages = [rmq.Message("T", b"x" * 50, keys="a")] * 10
        store.put_many(messages)
        store.flush()
        durable = store.max_phy_offset
        store.put_many(messages)
        shutil.copytree(path, image)
    with (image / "commitlog" / LOG).open("r+b") as log:
        log.seek(durable + 3 * durable // 10 + tear)
        log.write(bytes(size))
    return durable, durable // 10


# ---- rebuild ------------------------------------------------------------------------------------------------


def test_a_rebuild_refuses_a_closed_store_that_lacks_its_last_segment(tmp_path: Path) -> None:
    """With queues that end where the log does nothing would tell of it any more."""
    path = as_a_broker_s(make(tmp_path / "s", 1000))
    last = max((path / "commitlog").iterdir())
    last.rename(tmp_path / "lost")
    assert refused(lambda: rmq.open(path, "r+"))
    assert refused(lambda: rmq.rebuild(path, processes=1))
    assert refused(lambda: rmq.rebuild(path, tmp_path / "out", processes=1))
    (tmp_path / "lost").rename(last)
    assert rmq.rebuild(path, tmp_path / "whole", processes=1).unit_count == 1000


@pytest.mark.parametrize(("tear", "size"), [(0, 40), (90, 40)], ids=["header", "body"])
def test_a_rebuild_of_a_killed_store_ends_where_its_readers_do(tmp_path: Path, tear: int, size: int) -> None:
    image = tmp_path / "image"
    killed(tmp_path / "s", image, tear=tear, size=size)
    with rmq.open(image) as reader:
        assert reader.scan().read_all().num_rows == 13
    assert rmq.rebuild(image, tmp_path / "out", processes=1).unit_count == 13


def light(number: int, place: int) -> bytes:
    properties = b"INNER_MULTI_DISPATCH\1%%LMQ%%a\2INNER_MULTI_QUEUE_OFFSET\1%d\2KEYS\1k\2" % number
    return oracle.encode_record("T", 0, 5 + number, place, b"x", properties, store_timestamp=TIME + 1000 + number)


def batched(number: int, place: int) -> bytes:
    properties = b"INNER_BASE\1%d\2INNER_NUM\0012\2KEYS\1k\2" % (2 * number)
    packed = b"".join(struct.pack(">iiiii", 23, 0, 0, 0, 1) + body + b"\0\0" for body in (b"a", b"b"))
    return oracle.encode_record("B", 0, 2 * number, place, packed, properties, sys_flag=0xC0,
                                store_timestamp=TIME + 1000 + number)  # fmt: skip


def append(path: Path, record: Callable[[int, int], bytes], count: int = 6) -> None:
    """What a broker appends to a store, without units."""
    with rmq.open(path) as store:
        end = store.max_phy_offset
    log = b""
    for number in range(count):
        log += record(number, end + len(log))
    with (path / "commitlog" / LOG).open("r+b") as file:
        file.seek(end)
        file.write(log)


@pytest.mark.parametrize("record", [light, batched])
def test_a_rebuild_refuses_queues_that_no_log_gives_again(tmp_path: Path, record: Callable[[int, int], bytes]) -> None:
    path = as_a_broker_s(make(tmp_path / "s", 5))
    append(path, record)
    for output in (None, tmp_path / "out"):
        with pytest.raises(rmq.UnsupportedFormatError):
            rmq.rebuild(path, output, processes=1)


def test_a_rebuild_takes_copies_of_messages_of_light_queues(tmp_path: Path) -> None:
    """In a store of ours they have none: a writer makes no such queues."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        for number in range(3):
            properties = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)}
            store.put(rmq.Message("T", b"x", keys="k", properties=properties))
    assert rmq.rebuild(path, processes=1).unit_count == 3
    assert rmq.verify(path).is_sound


# ---- readers and recovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "topic", "found"), [
    (light, "%LMQ%a", [b"x"] * 6), (batched, "B", [b"a", b"b"] * 6)], ids=["light", "batched"])  # fmt: skip
def test_units_that_a_broker_has_not_written_are_derived_also_in_a_store_that_was_ours(
    tmp_path: Path, record: Callable[[int, int], bytes], topic: str, found: list[bytes]
) -> None:
    """An open for writing, which would never make them, refuses."""
    path = make(tmp_path / "s", 5)
    append(path, record)
    assert bodies(path, topic) == found
    assert bodies(as_a_broker_s(Path(shutil.copytree(path, tmp_path / "t"))), topic) == found
    with pytest.raises(rmq.UnsupportedFormatError):
        rmq.open(path, "r+")


def test_a_queue_offset_that_a_broker_gave_twice_stays_the_first_one_s(tmp_path: Path) -> None:
    """After its crash, too, where units are derived over those that are there."""
    path = tmp_path / "s"
    for directory in ("commitlog", "consumequeue/T/0"):
        (path / directory).mkdir(parents=True)
    log, places = b"", list[int]()
    for number, offset in enumerate([0, 1, 2, 2, 3, 4]):
        places.append(len(log))
        log += oracle.encode_record("T", 0, offset, len(log), b"%d" % number, b"KEYS\1k\2",
                                    store_timestamp=TIME + number)  # fmt: skip
    (path / "commitlog" / LOG).write_bytes(log.ljust(65536, b"\0"))
    units = b"".join(struct.pack(">qiq", places[number], len(log) // 6, 0) for number in (0, 1, 2, 4, 5))
    (path / "consumequeue/T/0" / LOG).write_bytes(units.ljust(1000, b"\0"))
    (path / "abort").write_bytes(b"")
    expected = [b"0", b"1", b"2", b"4", b"5"]
    assert bodies(path) == expected
    rmq.open(path, "r+", config=rmq.StoreConfig(max_hash_slot_num=97, max_index_num=500)).close()
    assert bodies(path) == expected


def test_a_reader_beside_the_recovery_of_a_segment_that_holds_half_a_record_goes_on(tmp_path: Path) -> None:
    """The record that closes the segment before announces nothing then, and is taken off."""
    image, config = tmp_path / "image", {**SIZES, "mapped_file_size_commit_log": 8192}
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**config, flush_interval_commit_log=2**31 - 1)) as store:
        store.put(rmq.Message("T", b"x" * 100))
        store.flush()
        for size in (2000, 2000, 2000, 1000):
            store.put(rmq.Message("T", b"x" * size))
        assert store.put(rmq.Message("T", b"x" * 1500)).phy_offset == 8192
        shutil.copytree(tmp_path / "s", image)
    with (image / "commitlog" / f"{8192:020d}").open("r+b") as log:
        log.seek(100)
        log.write(bytes(412))
    with rmq.open(image) as reader:
        before = reader.max_phy_offset, reader.scan().read_all().num_rows
        with rmq.open(image, "r+") as writer:
            assert before == (writer.max_phy_offset, 5)
            for number, size in enumerate([20, 2000, 2000, 2000], 6):
                writer.put(rmq.Message("T", b"x" * size))
                assert reader.max_phy_offset == writer.max_phy_offset
                assert len(reader.pull("T").messages) == reader.scan().read_all().num_rows == number


# ---- verification -------------------------------------------------------------------------------------------------


def test_properties_that_end_with_nul_are_a_broker_s_own_also_where_this_library_opened_its_store(
    tmp_path: Path,
) -> None:
    """4.9.1 to 5.1.4 write no last separator."""
    path, old = tmp_path / "s", "4.9.8"
    with rmq.open(path, "x", config=rmq.StoreConfig(rocketmq_version=old, **SIZES)) as store:
        store.put_many([rmq.Message("T", b"x" * 50, keys="a", properties={"k": "abcX"})] * 5)
        size = store.max_phy_offset // 5
    as_a_broker_s(path)
    with (path / "commitlog" / LOG).open("r+b") as log:
        log.seek(2 * size - 1)
        log.write(b"\0")
    assert rmq.verify(path).is_sound
    rmq.open(path, "r+", config=rmq.StoreConfig(rocketmq_version=old)).close()
    assert rmq.verify(path).is_sound


def test_what_power_loss_tore_is_a_note_also_where_whole_records_follow(tmp_path: Path) -> None:
    image = tmp_path / "image"
    durable, size = killed(tmp_path / "s", image, tear=0, size=40)
    found = rmq.verify(image)
    assert not found.damage_count
    assert [(finding.kind, finding.offset) for finding in found if finding.kind == "tail"] == [
        ("tail", durable + 3 * size)]  # fmt: skip
    with rmq.open(image, "r+", config=UNFLUSHED) as store:
        assert store.max_phy_offset == durable + 3 * size
    assert rmq.verify(image).is_sound


# ---- brokers that cut their log ---------------------------------------------------------------------------------


def written(offsets: list[tuple[str, int]]) -> tuple[bytes, dict[tuple[str, int], int]]:
    """A log of messages of topics and queue offsets, all of a size, and where each lies."""
    log, places = b"", dict[tuple[str, int], int]()
    for number, (topic, offset) in enumerate(offsets):
        places[topic, offset] = len(log)
        log += oracle.encode_record(topic, 0, offset, len(log), b"%s%06d" % (topic.encode(), number), b"KEYS\1k\2",
                                    store_timestamp=TIME + number)  # fmt: skip
    return log, places


def numbered(topics: str) -> list[tuple[str, int]]:
    return [(topic, topics[:number].count(topic)) for number, topic in enumerate(topics)]


def test_units_of_what_a_broker_cut_off_count_for_nothing_where_they_point_to_earlier_messages(tmp_path: Path) -> None:
    """Power loss kept an old page of the queue's file, behind a new one."""
    path = tmp_path / "s"
    for directory in ("commitlog", "consumequeue/A/0"):
        (path / directory).mkdir(parents=True)
    _, cut_off = written(numbered("A" * 16 + "BBBB" + "A" + "BBBB" + "AA"))
    log, places = written(numbered("A" * 10 + "BB" + "A" * 31))
    size = places["A", 1]
    units = b"".join(struct.pack(">qiq", (places if offset < 12 else cut_off)["A", offset], size, 0)
                     for offset in range(19))  # fmt: skip
    (path / "commitlog" / LOG).write_bytes(log.ljust(65536, b"\0"))
    (path / "consumequeue/A/0" / LOG).write_bytes(units.ljust(1000, b"\0"))
    (path / "abort").write_bytes(b"")

    def offsets() -> list[int]:
        with rmq.open(path) as store:
            return [message.queue_offset for message in store.pull("A", limit=100).messages]

    assert offsets() == [*range(41)]
    rmq.open(path, "r+", config=rmq.StoreConfig(max_hash_slot_num=97, max_index_num=500)).close()
    assert offsets() == [*range(41)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_mark_of_ours_above_which_a_broker_cut_its_log_tells_nothing_of_its_messages(
    tmp_path: Path, is_killed: bool
) -> None:
    """It lies within a record by now; queues are derived over it."""
    path = make(tmp_path / "s", 10)
    with rmq.open(path) as store:
        messages = store.pull("T").messages
        cut, end = messages[8].phy_offset, store.max_phy_offset
    log = b""
    for number in range(4):
        log += oracle.encode_record("T", 0, 8 + number, cut + len(log), b"new%d" % number + b"y" * 60, b"KEYS\1k\2",
                                    store_timestamp=TIME + 1000 + number)  # fmt: skip
    with (path / "commitlog" / LOG).open("r+b") as file:
        file.seek(cut)
        file.write(log.ljust(2 * (end - cut) + len(log), b"\0"))
    shutil.rmtree(path / "consumequeue")
    if is_killed:
        (path / "abort").write_bytes(b"")
    assert [body[:4] for body in bodies(path)] == [b"xxxx"] * 8 + [b"new%d" % number for number in range(4)]
    assert rmq.rebuild(path, tmp_path / "out", processes=1).unit_count == 12


# ---- without rmq/marks ------------------------------------------------------------------------------------------


def test_a_rebuild_of_a_killed_store_without_marks_refuses_damage_as_an_open_does(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with rmq.open(tmp_path / "s", "x", config=UNFLUSHED) as store:
        places = [store.put(rmq.Message("T", b"x" * 100)).phy_offset for _ in range(10)]
        store.flush()
        shutil.copytree(tmp_path / "s", image)
    (image / "rmq/marks").unlink()
    with (image / "commitlog" / LOG).open("r+b") as log:
        log.seek(places[3] + 4)
        log.write(bytes(4))
    assert refused(lambda: rmq.open(image, "r+"))
    assert refused(lambda: rmq.rebuild(image, tmp_path / "out", processes=1))


@pytest.mark.parametrize("record", [light, batched])
def test_what_a_killed_broker_put_into_a_store_that_was_ours_is_refused_in_every_way(
    tmp_path: Path, record: Callable[[int, int], bytes]
) -> None:
    """Its units would be lost."""
    path = make(tmp_path / "s", 5)
    append(path, record)
    (path / "abort").write_bytes(b"")
    for call in (lambda: rmq.open(path, "r+"), lambda: rmq.open(path, "r+", repair=True),
                 lambda: rmq.rebuild(path, tmp_path / "out", processes=1)):  # fmt: skip
        with pytest.raises(rmq.UnsupportedFormatError):
            call()


def test_light_queues_of_any_name_in_a_store_that_was_ours_are_read(tmp_path: Path) -> None:
    """RocketMQ 4.9 has such."""
    path = make(tmp_path / "s", 5)
    with rmq.open(path) as store:
        end = store.max_phy_offset

    def named(number: int, place: int) -> bytes:
        properties = b"INNER_MULTI_DISPATCH\1lq\2INNER_MULTI_QUEUE_OFFSET\1%d\2KEYS\1k\2" % number
        return oracle.encode_record("T", 0, 5 + number, place, b"x", properties, store_timestamp=TIME + 1000 + number)

    append(path, named)
    size = len(named(0, 0))
    units = b"".join(struct.pack(">qiq", end + number * size, size, 0) for number in range(6))
    (path / "consumequeue/lq/0").mkdir(parents=True)
    (path / "consumequeue/lq/0" / LOG).write_bytes(units.ljust(1000, b"\0"))
    with (path / "consumequeue/T/0" / LOG).open("r+b") as file:
        file.seek(100)
        file.write(units)
    with (path / "checkpoint").open("r+b") as file:
        file.write(struct.pack(">2q", TIME + 1005, TIME + 1005))
    assert bodies(path, "lq") == [b"x"] * 6
