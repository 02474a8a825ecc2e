"""Stores with what only RocketMQ writes: read where that is promised, and never written on."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pyarrow as pa
import pytest
from commandline import good
from conftest import digests
from forks import lock_of_a_broker

import rmq

T0 = 1_700_000_000_000
SEGMENT = 4096
UNIT = struct.Struct(">qiq")
EXT = -(2**63)  # tags_code of the extension unit at byte 0
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=20)  # fmt: skip
WRITING = ["r+", "a"]


class Builder:
    """Lays out a store's files byte by byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = b""
        self.times = T0

    def record(self, topic: str = "T", body: bytes = b"body", raw_properties: bytes = b"", *, queue_id: int = 0,
               queue_offset: int = 0, **fields: Any) -> tuple[int, int]:  # fmt: skip
        """Append one; returns its place and size."""
        phy, self.times = len(self.log), self.times + 1000
        fields = {"store_timestamp": self.times, "born_timestamp": T0} | fields
        self.log += oracle.encode_record(topic, queue_id, queue_offset, phy, body, raw_properties, **fields)
        return phy, len(self.log) - phy

    def file(self, name: str, data: bytes, size: int) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.ljust(size, b"\0"))

    def units(self, topic: str, queue_id: int, units: Sequence[tuple[int, int, int]]) -> None:
        data = b"".join(UNIT.pack(*unit) for unit in units)
        self.file(f"consumequeue/{topic}/{queue_id}/{0:020d}", data, 200)

    def finish(self) -> Path:
        self.file(f"commitlog/{0:020d}", self.log, SEGMENT)
        return self.path


def refused(path: Path, what: str, config: rmq.StoreConfig | None = None) -> None:
    """No mode that writes opens it, the error tells what and what to do, and nothing is touched."""
    before, names = digests(path, "."), sorted(path.rglob("*"))
    for mode in WRITING:
        with pytest.raises(rmq.UnsupportedFormatError) as error:
            rmq.open(path, mode, config=config)
        assert what in error.value.what
        assert error.value.reads_it
        assert str(path) in str(error.value)
    assert (digests(path, "."), sorted(path.rglob("*"))) == (before, names)


# ---- extended queues -------------------------------------------------------------------------------------

@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """Section O.9's segment of extension units, and queue units that hold addresses in it."""
    builder = Builder(tmp_path / "store")
    tags = ["TagA", "TagB", "TagA"]
    places = [builder.record(raw_properties=f"TAGS\1{tag}\2".encode(), queue_offset=number)
              for number, tag in enumerate(tags)]  # fmt: skip
    places.append(builder.record(queue_offset=3))
    builder.units("T", 0, [(*place, code) for place, code in zip(places, (EXT, EXT + 20, EXT + 44, 0), strict=True)])
    unit = bytes.fromhex("0014 0000000000000041 0000018bcfe56be8 0000")
    builder.file(f"consumequeue_ext/T/0/{0:020d}", unit + unit + b"\xff\xff", 44)
    builder.file(f"consumequeue_ext/T/0/{44:020d}", unit, 44)
    return builder.finish()


@pytest.mark.parametrize(("tags", "offsets"), [
    (None, [0, 1, 2, 3]), ("*", [0, 1, 2, 3]), ("TagA", [0, 2]), ("TagB", [1]), ("TagA || TagB", [0, 1, 2]),
    ("A", []),
])  # fmt: skip
def test_a_pull_compares_the_tags_where_units_hold_addresses(extended: Path, tags: str | None,
                                                             offsets: list[int]) -> None:  # fmt: skip
    with rmq.open(extended) as store:
        answer = store.pull("T", tags=tags)
        assert [message.queue_offset for message in answer.messages] == offsets
        assert (answer.next_queue_offset, answer.max_queue_offset) == (4, 4)


def test_an_extended_queue_is_not_written(extended: Path) -> None:
    refused(extended, "consumequeue_ext")


# ---- light queues ----------------------------------------------------------------------------------------

@pytest.fixture
def light(tmp_path: Path) -> Path:
    """Two messages of T/1 that were handed to %LMQ%a and one of them to %LMQ%b."""
    return light_store(tmp_path, "%LMQ%a", "%LMQ%b")


def light_store(tmp_path: Path, one: str, other: str, queue_id: int = 0) -> Path:
    builder = Builder(tmp_path / "store")
    places = []
    for number, names in enumerate([one, f"{one},{other}"]):
        offsets = ["0", "1,0"][number]
        raw = f"INNER_MULTI_QUEUE_OFFSET\1{offsets}\2TAGS\1A\2WAIT\1true\2INNER_MULTI_DISPATCH\1{names}\2".encode()
        places.append(builder.record(body=b"%d" % number, raw_properties=raw, queue_id=1, queue_offset=number))
    units = [(*place, 65) for place in places]
    builder.units("T", 1, units)
    builder.units(one, queue_id, units)
    builder.units(other, queue_id, units[1:])
    return builder.finish()


def test_a_light_queue_holds_the_messages_of_another_topic(light: Path) -> None:
    with rmq.open(light) as store:
        assert store.topics() == {"%LMQ%a": {0: (0, 2)}, "%LMQ%b": {0: (0, 1)}, "T": {1: (0, 2)}}
        for topic, queue_id, bodies in [("%LMQ%a", 0, [b"0", b"1"]), ("%LMQ%b", 0, [b"1"]), ("T", 1, [b"0", b"1"])]:
            answer = store.pull(topic, queue_id, tags="A")
            assert [(message.topic, message.queue_id, message.body) for message in answer.messages] == [
                ("T", 1, body) for body in bodies]  # fmt: skip
        assert store.pull("%LMQ%a", 0, 1).messages[0].body == b"1"
        assert store.search_offset("%LMQ%a", 0, T0 + 1001) == 1


def assert_counts_units(path: Path, topic: str, bodies: list[str]) -> None:
    """cat, get and lookup count the units of queue 0, whatever queue offsets the records have."""
    assert good("cat", path, topic, "-f", "{body}").out.split() == bodies
    for number, body in enumerate(bodies):
        assert good("get", path, f"{topic}/0/{number}", "-f", "{body}").out.split() == [body]
    with rmq.open(path) as store, pytest.raises(KeyError):
        store.lookup((topic, 0, len(bodies)))


def test_messages_of_a_light_queue_are_found_by_its_own_offsets(light: Path) -> None:
    assert_counts_units(light, "%LMQ%a", ["0", "1"])
    assert_counts_units(light, "%LMQ%b", ["1"])


def test_messages_of_a_queue_that_lost_units_are_found_by_those_it_has(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    places = [builder.record(body=b"%d" % number, queue_offset=number) for number in range(5)]
    builder.units("T", 0, [(*place, 0) for place in places[2:]])
    assert_counts_units(builder.finish(), "T", ["2", "3", "4"])


def test_a_store_of_light_queues_is_not_written(light: Path) -> None:
    refused(light, "LMQ")


def test_a_light_queue_of_another_name_is_read_and_kept(tmp_path: Path) -> None:
    """As RocketMQ 4.9 makes them: of any name, with the queue id of the message."""
    path = light_store(tmp_path, "x", "y", queue_id=1)
    with rmq.open(path) as store:
        assert store.topics() == {"T": {1: (0, 2)}, "x": {1: (0, 2)}, "y": {1: (0, 1)}}
        for topic, bodies in [("x", [b"0", b"1"]), ("y", [b"1"]), ("T", [b"0", b"1"])]:
            assert [message.body for message in store.pull(topic, 1, tags="A").messages] == bodies
    assert rmq.verify(path).is_sound
    before = digests(path, "commitlog"), digests(path, "consumequeue")
    for write in (*(partial(rmq.open, path, mode) for mode in ("a", "r+")), partial(rmq.rebuild, path),
                  partial(rmq.open, path, "r+", repair=True)):  # fmt: skip
        with pytest.raises(rmq.UnsupportedFormatError, match="light queue"):
            write()
    assert (digests(path, "commitlog"), digests(path, "consumequeue")) == before
    assert list((path / "rmq").iterdir()) == []


def test_a_queue_with_messages_of_its_own_and_of_others_is_read_and_kept(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    raw = b"INNER_MULTI_QUEUE_OFFSET\x010\2INNER_MULTI_DISPATCH\1x\2"
    other = builder.record(body=b"other", topic="T", raw_properties=raw)
    own = builder.record(body=b"own", topic="x", queue_offset=1)
    builder.units("T", 0, [(*other, 0)])
    builder.units("x", 0, [(*other, 0), (*own, 0), (10**6, 100, 0)])  # the last one's record did not reach the log
    path = builder.finish()
    with rmq.open(path) as store:
        assert [message.body for message in store.pull("x").messages] == [b"other", b"own"]
    for write in (partial(rmq.open, path, "r+"), partial(rmq.rebuild, path)):
        with pytest.raises(rmq.UnsupportedFormatError, match="light queue"):
            write()


@pytest.mark.parametrize("lost", ["consumequeue", "all topics"])
def test_a_store_whose_light_queues_are_gone_is_left_to_a_broker(light: Path, lost: str) -> None:
    """It makes them again from the log; queues of ours would keep it from that."""
    shutil.rmtree(light / "consumequeue")
    if lost == "all topics":
        (light / "consumequeue").mkdir()
    before = digests(light, "commitlog")
    for write in (*(partial(rmq.open, light, mode) for mode in WRITING), partial(rmq.rebuild, light),
                  partial(rmq.open, light, "r+", repair=True)):  # fmt: skip
        with pytest.raises(rmq.UnsupportedFormatError, match="light queues, which are gone"):
            write()
    assert not list((light / "consumequeue").iterdir())
    assert digests(light, "commitlog") == before
    with rmq.open(light) as store:
        assert pa.table(store)["body"].to_pylist() == [b"0", b"1"]


def test_a_store_whose_queues_of_inner_batches_are_gone_is_left_to_a_broker(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.record()
    builder.record("B", b"\0" * 22, b"INNER_NUM\x011\2", sys_flag=0xC0)
    path = builder.finish()
    for write in (partial(rmq.open, path, "r+", config=CONFIG), partial(rmq.rebuild, path, config=CONFIG)):
        with pytest.raises(rmq.UnsupportedFormatError, match="inner batches, whose queues"):
            write()


def test_a_property_that_made_no_light_queue_keeps_no_store_from_being_written(tmp_path: Path) -> None:
    """The broker did not dispatch it: it wrote no offset. Bodies may hold anything."""
    builder = Builder(tmp_path / "store")
    builder.record(body=b"INNER_MULTI_DISPATCH\1x\2", raw_properties=b"INNER_MULTI_DISPATCH\1%LMQ%a\2")
    with rmq.open(builder.finish(), "r+", config=CONFIG) as store:
        assert store.topics() == {"T": {0: (0, 1)}}


# ---- other storage ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("folder", ["consumequeue", "consumequeue_r"])
def test_queues_in_rocksdb_leave_the_log_readable(tmp_path: Path, folder: str) -> None:
    builder = Builder(tmp_path / "store")
    builder.record(raw_properties=b"KEYS\1k\2")
    builder.file(f"{folder}/CURRENT", b"MANIFEST-000001\n", 0)
    builder.file(f"{folder}/MANIFEST-000001", b"", 0)
    path = builder.finish()
    with rmq.open(path) as store:
        assert pa.table(store)["body"].to_pylist() == [b"body"]
        assert [message.body for message in store.query("T", "k")] == [b"body"]
        assert store.lookup(0).body == b"body"
        for use in (store.topics, lambda: store.pull("T"), lambda: store.search_offset("T", 0, 0),
                    lambda: store.lookup(("T", 0, 0))):  # fmt: skip
            with pytest.raises(rmq.UnsupportedFormatError, match="RocksDB"):
                use()
    refused(path, "RocksDB")


def test_beside_a_broker_that_has_made_its_rocksdb_and_no_segment_yet_a_store_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for name in ("commitlog", "consumequeue_r"):
        (path / name).mkdir(parents=True)
    for name in ("lock", "consumequeue_r/CURRENT", "consumequeue_r/MANIFEST-000001"):
        (path / name).touch()
    with lock_of_a_broker(path):
        with rmq.open(path) as store:
            assert (store.max_phy_offset, store.scan().read_all().num_rows) == (0, 0)
        assert {item.severity for item in rmq.verify(path)} == {"note"}


def test_an_index_in_rocksdb_leaves_all_but_keys_readable(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.record(raw_properties=b"KEYS\1k\2")
    builder.file("index/CURRENT", b"MANIFEST-000001\n", 0)
    builder.file("index/MANIFEST-000001", b"", 0)
    with rmq.open(builder.finish()) as store:
        assert pa.table(store)["body"].to_pylist() == [b"body"]
        for use in (lambda: store.query("T", "k"), lambda: store.query_many("T", ["k"]),
                    lambda: store.select_phy_offset_many("T", ["k"])):  # fmt: skip
            with pytest.raises(rmq.UnsupportedFormatError, match="RocksDB"):
                use()


@pytest.mark.parametrize("mode", ["r", *WRITING])
def test_a_store_of_dledger_alone_is_not_read(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "store" / "dledger-n0" / "data"
    folder.mkdir(parents=True)
    (folder / f"{0:020d}").write_bytes(bytes(100))
    with pytest.raises(rmq.UnsupportedFormatError) as error:
        rmq.open(tmp_path / "store", mode)
    assert "DLedger" in error.value.what + error.value.reads_it
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["dledger-n0"]


def test_a_log_beside_dledger_s_is_read_but_not_written(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.record()
    builder.file(f"dledger-n0/data/{0:020d}", b"", 100)
    with rmq.open(builder.finish()) as store:
        assert pa.table(store).num_rows == 1
    refused(tmp_path / "store", "DLedger")


def test_a_log_that_a_broker_went_over_from_to_dledger_is_no_whole_store(tmp_path: Path) -> None:
    """Its newest messages lie there; of a copy of the old log alone the older ones are read."""
    builder = Builder(tmp_path / "store")
    builder.record()
    builder.file(f"dledger-n0/data/{SEGMENT:020d}", b"\0\0\0\1", 100)
    path = builder.finish()
    for mode in ("r", *WRITING):
        with pytest.raises(rmq.UnsupportedFormatError, match="DLedger"):
            rmq.open(path, mode)
    for use in (rmq.verify, rmq.rebuild):
        with pytest.raises(rmq.UnsupportedFormatError, match=r"copy of commitlog/ alone"):
            use(path)
    shutil.copytree(path / "commitlog", tmp_path / "copy" / "commitlog")
    with rmq.open(tmp_path / "copy") as store:
        assert store.scan().read_all().num_rows == 1


def test_a_log_in_several_paths_is_read_but_not_written(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", bytes(300)) for _ in range(30)])
    folders = [path / "log1", path / "log2"]
    for number, segment in enumerate(sorted((path / "commitlog").iterdir())):
        folders[number % 2].mkdir(exist_ok=True)
        shutil.move(segment, folders[number % 2] / segment.name)
    shutil.rmtree(path / "commitlog")
    shutil.rmtree(path / "rmq")
    config = rmq.StoreConfig(store_path_commit_log=",".join(map(str, folders)), max_hash_slot_num=10, max_index_num=20)
    with rmq.open(path, config=config) as store:
        assert pa.table(store).num_rows == 30
        assert len(store.pull("T", limit=99).messages) == 30
    refused(path, "several paths", config)
    for mode in ("a", "x"):
        with pytest.raises(rmq.UnsupportedFormatError, match="several paths"):
            rmq.open(tmp_path / "new", mode, config=config)
    assert not (tmp_path / "new").exists()
    twice = rmq.StoreConfig(store_path_commit_log=",".join(map(str, [*folders, *folders])), max_hash_slot_num=10,
                            max_index_num=20)  # fmt: skip
    with rmq.open(path, config=twice) as store:
        assert pa.table(store).num_rows == 30


# ---- mixtures that are read and written ------------------------------------------------------------------

def test_versions_and_host_families_may_be_mixed(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    kinds = [
        {"store_host": "192.168.0.1:10911"}, {"store_host": "[2001:db8::1]:10911", "born_host": "[::1]:5"},
        {"magic": oracle.MAGIC_V2}, {"store_host": "[::1]:1", "magic": oracle.MAGIC_V2},
        {"raw_properties": b"KEYS\1k\2TAGS\1a"}, {"raw_properties": b"KEYS\1k\2TAGS\1a\2"},
    ]  # fmt: skip
    for number, fields in enumerate(kinds):
        builder.record(queue_offset=number, **fields)
    path = builder.finish()
    expected = oracle.read_records(path)
    assert len(expected) == 6
    for mode in ("r", "r+"):
        with rmq.open(path, mode, config=CONFIG if mode == "r+" else None) as store:
            found = [store.lookup(record.phy_offset) for record in expected]
            assert [message.offset_msg_id for message in found] == [record.offset_msg_id for record in expected]
            assert [message.properties for message in found] == [record.properties for record in expected]
            assert [store.lookup(message.offset_msg_id).phy_offset for message in found] == [
                record.phy_offset for record in expected]  # fmt: skip
            assert [message.queue_offset for message in store.query("T", "k")] == [5, 4]
            assert store.topics() == {"T": {0: (0, 6)}}
    with rmq.open(path, "r+") as store:
        assert store.put(rmq.Message("T", b"")).queue_offset == 6
    assert (path / "commitlog" / f"{0:020d}").read_bytes()[: len(builder.log)] == builder.log


def test_a_store_of_4_0_has_neither_lock_nor_checkpoint(tmp_path: Path) -> None:
    """Only log, queues and an index whose header counts every put; taken over, none of that changes."""
    path, config = tmp_path / "store", rmq.StoreConfig(
        mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
        max_index_num=20, rocketmq_version="4.0.0")  # fmt: skip
    times = iter(range(T0, T0 + 99_000, 1000))
    with rmq.open(path, "x", config=config, clock=lambda: next(times)) as store:
        for number in range(12):
            store.put(rmq.Message("T", b"%d" % number, keys=["same", f"k{number}"], queue_id=number % 2))
    for name in ("lock", "checkpoint"):
        (path / name).unlink()
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "config", ignore_errors=True)
    parts = ("commitlog", "consumequeue", "index")
    before = digests(path, *parts)
    for mode in ("r", "r+"):
        with rmq.open(path, mode, config=None if mode == "r" else config) as store:
            assert store.topics() == {"T": {0: (0, 6), 1: (0, 6)}}
            assert [message.body for message in store.query("T", "same", limit=2)] == [b"11", b"10"]
            assert [message.body for message in store.query("T", "k3")] == [b"3"]
        assert digests(path, *parts) == before
    assert (path / "lock").read_bytes() == b"lock"
    assert (path / "checkpoint").stat().st_size == 4096
    assert oracle.check_store(path, 10, 20, "4.0.0") == []


TOPICS = '{"topicConfigTable": {"B": {"attributes": {"%s": "%s"}, "topicName": "B"}}}'
LIGHT = b"INNER_MULTI_QUEUE_OFFSET\x010\x02INNER_MULTI_DISPATCH\x01%LMQ%a\x02"
BATCH = b"INNER_BASE\x010\x02INNER_NUM\x011\x02"


@pytest.mark.parametrize(("raw", "sys_flag"), [(LIGHT, 0), (BATCH, 0xC0)])
def test_a_tail_with_messages_of_queues_not_written_is_left_to_a_broker(tmp_path: Path, raw: bytes,
                                                                        sys_flag: int) -> None:  # fmt: skip
    builder = Builder(tmp_path / "store")
    place = builder.record()
    builder.record(topic="U", body=b"", raw_properties=raw, sys_flag=sys_flag)  # its units are not there yet
    builder.units("T", 0, [(*place, 0)])
    builder.file("abort", b"1", 1)
    for repair in (False, True):
        with pytest.raises(rmq.UnsupportedFormatError):
            rmq.open(builder.finish(), "r+", config=CONFIG, repair=repair)
    with pytest.raises(rmq.UnsupportedFormatError):
        rmq.rebuild(builder.path, config=CONFIG)


@pytest.mark.parametrize(("name", "value", "what"), [
    ("queue.type", "BatchCQ", "topic 'B' with queues of inner batches"),
    ("cleanup.policy", "COMPACTION", "topic 'B' that is compacted")])  # fmt: skip
def test_a_store_with_topics_that_a_broker_keeps_otherwise_is_not_written(
    tmp_path: Path, name: str, value: str, what: str
) -> None:
    builder = Builder(tmp_path / "store")
    builder.units("T", 0, [(*builder.record(), 0)])
    builder.file("config/topics.json", (TOPICS % (name, value)).encode(), 0)
    refused(builder.finish(), what, CONFIG)
    (builder.path / "config/topics.json").rename(builder.path / "config/topics.json.bak")
    for text in (b"", b'{"topicConfigTable": {', b"[]"):  # a broker then loads the .bak
        builder.file("config/topics.json", text, 0)
        refused(builder.path, what, CONFIG)


SIZES_BEFORE = {"mapped_file_size_consume_queue": 400, "max_hash_slot_num": 7, "max_index_num": 20}
SIZES_SINCE = {"consumequeue": {"mapped_file_size_consume_queue": 200},
               "index": {"max_hash_slot_num": 9, "max_index_num": 15}}  # fmt: skip


def as_a_broker_leaves_it(path: Path, count: int, queues: int = 1, **sizes: int) -> None:
    """A closed store without anything of ours."""
    with rmq.open(path, "x", config=rmq.StoreConfig(**sizes), clock=lambda: 1_700_000_000_000) as store:
        store.put_many([rmq.Message("T", b"%d" % number, keys=f"k{number}", queue_id=number % queues)
                        for number in range(count)])  # fmt: skip
    shutil.rmtree(path / "rmq")


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("part", SIZES_SINCE)
@pytest.mark.parametrize("count", [40, 3])
def test_sizes_that_a_broker_changed_since_we_wrote_are_those_of_the_files(
    tmp_path: Path, part: str, mode: Any, count: int
) -> None:
    """Its operator removes a directory and gives other sizes; it derives the files again. Of one file the caller must
    say them.
    """
    path, changed = tmp_path / "s", SIZES_SINCE[part]
    as_a_broker_leaves_it(path, count, **SIZES_BEFORE)
    rmq.open(path, "a", config=rmq.StoreConfig(**SIZES_BEFORE)).close()
    as_a_broker_leaves_it(tmp_path / "other", count, **SIZES_BEFORE | changed)
    shutil.rmtree(path / part)
    shutil.copytree(tmp_path / "other" / part, path / part)
    passed = rmq.StoreConfig(**changed) if count == 3 else None
    assert rmq.verify(path, config=passed).damage_count == 0
    with rmq.open(path, mode, config=passed) as store:
        assert {name: getattr(store.config, name) for name in changed} == changed
        assert len(store.pull("T", limit=100).messages) == count
        assert [message.body for message in store.query("T", "k2")] == [b"2"]
    with pytest.raises(ValueError, match="contradicts the store"):
        rmq.open(path, config=rmq.StoreConfig(**dict.fromkeys(changed, 4000)))


@pytest.mark.slow
@pytest.mark.parametrize("part", SIZES_SINCE)
def test_files_that_were_all_cut_short_are_no_other_sizes(tmp_path: Path, part: str) -> None:
    path = tmp_path / "s"
    as_a_broker_leaves_it(path, 40, 2, **SIZES_BEFORE)
    rmq.open(path, "a", config=rmq.StoreConfig(**SIZES_BEFORE)).close()
    files = [item for item in (path / part).rglob("*") if item.is_file()]
    for item in files:
        os.truncate(item, 100)
    assert any(finding.path in map(str, [*files, path / "rmq/meta.json"]) for finding in rmq.verify(path)
               if finding.severity != "note")  # fmt: skip
    assert rmq.rebuild(path).unit_count == 40
    assert rmq.verify(path) == []


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("twice", [[9], [5], [5, 6, 7], [1, 2]], ids=str)
@pytest.mark.parametrize("is_killed", [True, False])
def test_queue_offsets_that_a_broker_gave_twice_move_no_other_message(
    tmp_path: Path, mode: Any, twice: list[int], is_killed: bool
) -> None:
    """As after a start with a lagging dispatch, or with duplicationEnable: the units that are there stand."""
    builder = Builder(tmp_path / "store")
    places = [builder.record(body=b"%d" % number, queue_offset=number) for number in range(10)]
    for number in twice:
        builder.record(body=b"again", queue_offset=number)
    builder.units("T", 0, [(*place, 0) for place in places])
    path = builder.finish()
    if is_killed:
        (path / "abort").touch()
    with rmq.open(path, mode, config=CONFIG) as store:
        assert store.topics() == {"T": {0: (0, 10)}}
        assert [message.body for message in store.pull("T").messages] == [b"%d" % number for number in range(10)]
        assert store.scan().read_all().num_rows == 10 + len(twice)
