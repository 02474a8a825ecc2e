"""Stores with what only RocketMQ writes: read where that is promised, and never written on."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import pyarrow as pa
import pytest
from commandline import call, good
from conftest import digests

import rmq

T0 = 1_700_000_000_000
SEGMENT = 4096
UNIT = struct.Struct(">qiq")
BATCH_UNIT = struct.Struct(">qiqqqhii")
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


# ---- inner batches ---------------------------------------------------------------------------------------

def packed(*messages: tuple[bytes, bytes, int]) -> bytes:
    """MessageDecoder#encodeMessage of (body, properties, flag) each."""
    return b"".join(struct.pack(">iiiii", 22 + len(body) + len(properties), 0, 0, flag, len(body)) + body
                    + struct.pack(">h", len(properties)) + properties
                    for body, properties, flag in messages)  # fmt: skip


FIRST = packed((b"one", b"KEYS\1k1\2WAIT\1true\2TAGS\1t1\2", 0), (b"two!", b"KEYS\1k2\2WAIT\1true\2TAGS\1t2\2", 0))
SECOND = packed((b"three", b"KEYS\1k3\2UNIQ_KEY\1i3\2", 5), (b"", b"", -1), (b"five", b"KEYS\1k3 k5\2TAGS\1t1\2", 7))


@pytest.fixture
def batched(tmp_path: Path) -> Path:
    """An inner batch of two at phy 642 as in section O.9, then one of three whose record carries their keys."""
    builder = Builder(tmp_path / "store")
    first = builder.record(body=bytes(550))
    builder.units("T", 0, [(*first, 0)])
    assert first == (0, 642)
    properties = b"INNER_BASE\0010\2UNIQ_KEY\1u9\2INNER_NUM\0012\2"
    properties += b"__CRC32#\1" + b"0" * 10 + b"\2"
    wrapper = builder.record("BT", FIRST, properties, sys_flag=0xC0, store_timestamp=T0 + 2000)
    assert wrapper == (642, 253)
    digits = f"{oracle.body_crc(builder.log[642:-20]):010d}"[::-1].encode()
    builder.log = builder.log[:-11] + digits + b"\2"
    unit = bytes.fromhex("0000000000000282 000000fd 0000000000000000 0000018bcfe56fd0 0000000000000000 0002"
                         "ffffffff 00000000")  # fmt: skip
    properties = b"INNER_BASE\0012\2UNIQ_KEY\1u10\2INNER_NUM\0013\2KEYS\1k3 k5\2"
    second = builder.record("BT", SECOND, properties, sys_flag=0xC0, queue_offset=2, store_timestamp=T0 + 3000)
    unit += BATCH_UNIT.pack(*second, 0, T0 + 3000, 2, 3, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", unit, 460)
    return builder.finish()


INNER = [
    (0, b"one", ("k1",), "t1", 0), (1, b"two!", ("k2",), "t2", 0), (2, b"three", ("k3",), None, 5),
    (3, b"", (), None, -1), (4, b"five", ("k3", "k5"), "t1", 7),
]  # fmt: skip


@pytest.mark.parametrize(("number", "field", "value", "at"), [
    (0, 0, 0, 0), (1, 1, 5, 46), (1, 4, 1, 46), (1, 4, 2**62 + 1, 46), (0, 5, 4, 46)])  # fmt: skip
def test_a_unit_that_is_not_the_batch_s_or_out_of_order_is_an_error(
    batched: Path, number: int, field: int, value: int, at: int
) -> None:
    """Its phy offset, size, base or count; the error names the unit."""
    path = batched / f"batchconsumequeue/BT/0/{0:020d}"
    units = [list(BATCH_UNIT.unpack_from(path.read_bytes(), 46 * place)) for place in (0, 1)]
    units[number][field] = value
    path.write_bytes(b"".join(BATCH_UNIT.pack(*unit) for unit in units).ljust(460, b"\0"))
    with rmq.open(batched) as store, pytest.raises(rmq.CorruptFileError) as error:
        store.pull("BT", 0, 0, 5)
    assert (error.value.path, error.value.offset) == (str(path), at)


def test_a_gap_between_batches_is_stepped_over(batched: Path) -> None:
    path = batched / f"batchconsumequeue/BT/0/{0:020d}"
    units = [list(BATCH_UNIT.unpack_from(path.read_bytes(), 46 * place)) for place in (0, 1)]
    units[1][4] = 2**40
    path.write_bytes(b"".join(BATCH_UNIT.pack(*unit) for unit in units).ljust(460, b"\0"))
    with rmq.open(batched) as store:
        assert [message.body for message in store.pull("BT", 0, 0, 2).messages] == [b"one", b"two!"]
        assert store.pull("BT", 0, 2, 5).next_queue_offset == 2**40 + 3


@pytest.mark.parametrize("base", [b"-1", b"9" * 25, b"9223372036854775807"])
def test_a_base_that_is_no_queue_offset_is_damage(tmp_path: Path, base: bytes) -> None:
    builder = Builder(tmp_path / "store")
    builder.record()
    builder.record("BT", FIRST, b"INNER_BASE\1" + base + b"\2INNER_NUM\0012\2", sys_flag=0xC0)
    with rmq.open(builder.finish()) as store:
        with pytest.raises(rmq.CorruptFileError, match="INNER_BASE"):
            store.scan().read_all()
        assert store.scan(on_damage="skip").read_all().num_rows == 1


def test_batches_of_removed_segments_are_below_the_minimum(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    first = builder.record("BT", FIRST, b"INNER_BASE\0010\2INNER_NUM\0012\2", sys_flag=0xC0)
    left = SEGMENT - len(builder.log)
    builder.log += struct.pack(">iI", left, oracle.MAGIC_BLANK).ljust(left, b"\0")
    second = builder.record("BT", SECOND, b"INNER_BASE\0012\2INNER_NUM\0013\2", sys_flag=0xC0, queue_offset=2)
    units = BATCH_UNIT.pack(*first, 0, T0, 0, 2, -1, 0) + BATCH_UNIT.pack(*second, 0, T0, 2, 3, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    builder.file("batchconsumequeue/BT/\u00b2/stray", b"", 0)
    builder.file(f"commitlog/{SEGMENT:020d}", builder.log[SEGMENT:], SEGMENT)
    with rmq.open(builder.path) as store:
        assert store.topics() == {"BT": {0: (2, 5)}}
        assert store.pull("BT", 0, 0).status is rmq.PullStatus.OFFSET_TOO_SMALL
        assert [message.queue_offset for message in store.pull("BT", 0, 2).messages] == [2, 3, 4]


def test_the_packed_body_is_rocketmq_s() -> None:
    assert FIRST.hex(" ", -4) == bytes.fromhex(
        "00000033 00000000 00000000 00000000 00000003 6f6e65 001a"
        "4b455953016b3102574149540174727565025441475301743102"
        "00000034 00000000 00000000 00000000 00000004 74776f21 001a"
        "4b455953016b3202574149540174727565025441475301743202"
    ).hex(" ", -4)  # fmt: skip


def seen(message: Any) -> tuple[Any, ...]:
    return message.queue_offset, message.body, tuple(message.keys), message.tags, message.flag


def test_a_scan_gives_each_message_of_an_inner_batch(batched: Path) -> None:
    with rmq.open(batched) as store:
        table = pa.table(store)
        table.validate(full=True)
        for rows in (1, 2, 3, 100):
            assert store.scan(batch_rows=rows).read_all().equals(table)
        only = store.scan(topics=["BT"], begin=T0 + 3000).read_all()
    found = [(row["queue_offset"], row["body"], tuple(row["keys"]), row["tags"], row["flag"])
             for row in table.to_pylist()[1:]]  # fmt: skip
    assert found == INNER
    assert table["topic"].to_pylist() == ["T"] + ["BT"] * 5
    assert table["phy_offset"].to_pylist() == [0, 642, 642, 895, 895, 895]
    assert table["size"].to_pylist()[:3] == [642, 253, 253]
    assert table["sys_flag"].to_pylist() == [0] * 6
    assert table["body_crc"].to_pylist()[1:3] == [0x7A6C86F1, 0x3AABF134]
    assert only["queue_offset"].to_pylist() == [2, 3, 4]


@pytest.mark.parametrize(("offset", "limit", "status", "offsets", "following"), [
    (-1, 9, "OFFSET_TOO_SMALL", [], 0), (0, 32, "FOUND", [0, 1, 2, 3, 4], 5), (0, 1, "FOUND", [0], 1),
    (1, 1, "FOUND", [1], 2), (1, 2, "FOUND", [1, 2], 3), (3, 9, "FOUND", [3, 4], 5), (4, 1, "FOUND", [4], 5),
    (5, 9, "OFFSET_OVERFLOW_ONE", [], 5), (6, 9, "OFFSET_OVERFLOW_BADLY", [], 5),
])  # fmt: skip
def test_a_pull_counts_the_messages_inside(
    batched: Path, offset: int, limit: int, status: str, offsets: list[int], following: int
) -> None:
    with rmq.open(batched) as store:
        answer = store.pull("BT", 0, offset, limit)
    assert (answer.status.name, answer.next_queue_offset) == (status, following)
    assert (answer.min_queue_offset, answer.max_queue_offset) == (0, 5)
    assert list(map(seen, answer.messages)) == [INNER[number] for number in offsets]


@pytest.mark.parametrize(("tags", "offsets"), [("t1", [0, 4]), ("t2", [1]), ("t1||t2", [0, 1, 4]), ("none", [])])
def test_a_pull_compares_the_tags_of_the_messages_inside(batched: Path, tags: str, offsets: list[int]) -> None:
    with rmq.open(batched) as store:
        answer = store.pull("BT", 0, 0, 32, tags=tags)
    assert [message.queue_offset for message in answer.messages] == offsets
    assert answer.next_queue_offset == 5


def test_a_query_for_offsets_alone_counts_the_messages_inside(batched: Path) -> None:
    with rmq.open(batched) as store:
        for keys in (["k1"], ["k3", "k1"], ["k5", "none"]):
            one, more = (store.query_many("BT", keys, columns=columns) for columns in (["phy_offset"], None))
            assert one.table["phy_offset"].to_pylist() == more.table["phy_offset"].to_pylist()
            assert one.table["key_index"].to_pylist() == more.table["key_index"].to_pylist()


def test_topics_and_searches_know_the_queue(batched: Path) -> None:
    with rmq.open(batched) as store:
        assert store.topics() == {"BT": {0: (0, 5)}, "T": {0: (0, 1)}}
        for time, lower, upper in [(1999, 0, 0), (2000, 0, 1), (2001, 2, 1), (3000, 2, 4), (3001, 5, 4)]:
            assert store.search_offset("BT", 0, T0 + time) == lower, time
            assert store.search_offset("BT", 0, T0 + time, "UPPER") == upper, time


@pytest.mark.parametrize(("key", "offsets"), [("k5", [4]), ("k3", [4, 2]), ("u9", [1, 0]), ("u10", [4, 3, 2]),
                                              ("k9", [])])  # fmt: skip
def test_a_query_gives_the_messages_inside_that_carry_the_key(batched: Path, key: str, offsets: list[int]) -> None:
    """All of them when only the wrapper has it."""
    with rmq.open(batched) as store:
        assert [message.queue_offset for message in store.query("BT", key)] == offsets


@pytest.mark.parametrize(("limit", "offsets"), [(1, [4]), (2, [4, 3]), (3, [4, 3, 2]), (4, [4, 3, 2]),
                                                (None, [4, 3, 2])])  # fmt: skip
def test_a_limit_counts_the_messages_inside(batched: Path, limit: int | None, offsets: list[int]) -> None:
    with rmq.open(batched) as store:
        found = store.query("BT", "u10", limit=limit)
        assert ([message.queue_offset for message in found], found.truncated) == (offsets, limit in (1, 2))


def test_lookup_by_place_gives_the_wrapper_and_by_queue_offset_the_message(batched: Path) -> None:
    with rmq.open(batched) as store:
        wrapper = store.lookup(642)
        assert (wrapper.body, wrapper.sys_flag, wrapper.size, wrapper.uniq_key) == (FIRST, 0xC0, 253, "u9")
        assert [seen(store.lookup(("BT", 0, number))) for number in range(5)] == INNER
        with pytest.raises(KeyError):
            store.lookup(("BT", 0, 5))


@pytest.mark.parametrize("cut", [1, 20, 52, 60])
def test_a_damaged_inner_batch_is_an_error(tmp_path: Path, cut: int) -> None:
    builder = Builder(tmp_path / "store")
    builder.record("BT", FIRST[:-cut], b"INNER_BASE\0010\2INNER_NUM\0012\2", sys_flag=0xC0)
    with rmq.open(builder.finish()) as store:
        if cut == 52:  # a whole message less
            assert store.scan().read_all().num_rows == 1
            return
        with pytest.raises(rmq.CorruptFileError, match="inner batch") as error:
            store.scan().read_all()
        assert (error.value.path, error.value.offset) == (str(builder.path / f"commitlog/{0:020d}"), 0)


@pytest.mark.parametrize(("count", "is_whole"), [(32_767, True), (32_768, False)])
def test_an_inner_batch_holds_at_most_what_its_unit_can_count(tmp_path: Path, count: int, is_whole: bool) -> None:
    """Compressed, three million empty messages take 160 KB in the log."""
    builder = Builder(tmp_path / "store")
    builder.record("BT", zlib.compress(packed((b"", b"", 0)) * count), b"INNER_BASE\0010\2", sys_flag=0xC1)
    with rmq.open(builder.finish()) as store:
        if is_whole:
            assert store.scan().read_all().num_rows == count
        else:
            with pytest.raises(rmq.CorruptFileError, match="over 32767 messages"):
                store.scan().read_all()


def test_cat_shows_each_message_between_gaps_and_damage_once(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    units = b""
    for base, batch in [(0, FIRST), (5, FIRST), (9, FIRST[:-1])]:
        place = builder.record("BT", batch, b"INNER_BASE\1%d\2" % base, sys_flag=0xC0, queue_offset=base)
        units += BATCH_UNIT.pack(*place, 0, builder.times, base, 2, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    done = call("cat", builder.finish(), "BT", "-f", "{queue_offset}")
    assert (done.code, done.out.split()) == (3, ["0", "1", "5", "6"])


def test_a_store_of_inner_batches_is_not_written(batched: Path) -> None:
    refused(batched, "BatchCQ")


# ---- light queues ----------------------------------------------------------------------------------------

@pytest.fixture
def light(tmp_path: Path) -> Path:
    """Two messages of T/1 that were handed to %LMQ%a and one of them to %LMQ%b."""
    builder = Builder(tmp_path / "store")
    places = []
    for number, names in enumerate(["%LMQ%a", "%LMQ%a,%LMQ%b"]):
        offsets = ["0", "1,0"][number]
        raw = f"INNER_MULTI_QUEUE_OFFSET\1{offsets}\2TAGS\1A\2WAIT\1true\2INNER_MULTI_DISPATCH\1{names}\2".encode()
        places.append(builder.record(body=b"%d" % number, raw_properties=raw, queue_id=1, queue_offset=number))
    units = [(*place, 65) for place in places]
    builder.units("T", 1, units)
    builder.units("%LMQ%a", 0, units)
    builder.units("%LMQ%b", 0, units[1:])
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
