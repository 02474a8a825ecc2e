"""Queues of inner batches (BatchCQ): one record stands for several messages."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from commandline import call
from test_foreign_formats import SEGMENT, T0, Builder, refused

import rmq
from rmq import batchconsumequeue, paths
from rmq.batchconsumequeue import BatchConsumeQueue

BATCH_UNIT = struct.Struct(">qiqqqhii")


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


def batches(tmp_path: Path, *numbers: tuple[int, int, int, int]) -> Path:
    """Batches of two: base and count of each unit, base and number of messages that its record tells."""
    builder, units = Builder(tmp_path / "store"), b""
    for number, (base, count, own, own_count) in enumerate(numbers):
        body = packed(*((b"%d%d" % (number, item), b"", 0) for item in range(own_count)))
        place = builder.record("BT", body, b"INNER_BASE\1%d\2INNER_NUM\1%d\2" % (own, own_count), sys_flag=0xC0,
                               queue_offset=own)  # fmt: skip
        units += BATCH_UNIT.pack(*place, 0, builder.times, base, count, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    return builder.finish()


def test_a_gap_between_batches_is_stepped_over(tmp_path: Path) -> None:
    with rmq.open(batches(tmp_path, (0, 2, 0, 2), (2**40, 2, 2**40, 2))) as store:
        assert [message.body for message in store.pull("BT", 0, 0, 2).messages] == [b"00", b"01"]
        assert [message.body for message in store.pull("BT", 0, 2, 5).messages] == [b"10", b"11"]
        assert store.pull("BT", 0, 2, 5).next_queue_offset == 2**40 + 2


@pytest.mark.parametrize("wrong", [(3, 2, 2, 2), (2, 2, 10**15, 2), (2, 2, 1, 2), (2, 1, 2, 2), (2, 2, 2, 3)])
def test_a_unit_whose_record_has_other_messages_is_an_error(tmp_path: Path, wrong: tuple[int, int, int, int]) -> None:
    """Else some would be passed over, or a consumer would begin again and again."""
    path = batches(tmp_path, (0, 2, 0, 2), wrong, (6, 2, 6, 2))
    with rmq.open(path) as store:
        consumer = rmq.Consumer(store, "g", "BT")
        assert [message.body for message in consumer.poll(10)] == [b"00", b"01"]
        for ask in (lambda: store.pull("BT", 0, 0, 10), lambda: consumer.poll(10)):
            with pytest.raises(rmq.CorruptFileError, match="unit points to other messages of this queue") as error:
                ask()
            assert (error.value.offset, error.value.__notes__) == (46, [f"BT queue 0, queue offset {wrong[0]}"])


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
    units = BATCH_UNIT.pack(*first, 0, T0 - 9, 0, 2, -1, 0) + BATCH_UNIT.pack(*second, 0, T0, 2, 3, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    builder.file("batchconsumequeue/BT/\u00b2/stray", b"", 0)
    builder.file(f"commitlog/{SEGMENT:020d}", builder.log[SEGMENT:], SEGMENT)
    with rmq.open(builder.path) as store:
        assert store.topics() == {"BT": {0: (2, 5)}}
        assert store.pull("BT", 0, 0).status is rmq.PullStatus.OFFSET_TOO_SMALL
        assert [message.queue_offset for message in store.pull("BT", 0, 2).messages] == [2, 3, 4]
        found = {boundary: [store.search_offset("BT", 0, time, boundary) for time in (T0 - 10, T0 - 9, T0)]
                 for boundary in ("LOWER", "UPPER")}  # fmt: skip
        assert found == {"LOWER": [2, 2, 2], "UPPER": [2, 2, 4]}


def test_a_plain_message_in_a_queue_of_inner_batches_lacks_no_unit(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    first = builder.record("BT", FIRST, b"INNER_BASE\0010\2INNER_NUM\0012\2", sys_flag=0xC0)
    second = builder.record("BT", b"plain", queue_offset=2)
    units = BATCH_UNIT.pack(*first, 0, T0, 0, 2, -1, 0) + BATCH_UNIT.pack(*second, 0, T0, 2, 1, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    path = builder.finish()
    assert rmq.verify(path).is_sound
    with rmq.open(path) as store:
        assert [message.body for message in store.pull("BT").messages] == [b"one", b"two!", b"plain"]


@pytest.mark.parametrize("is_filled", [False, True])
def test_queues_with_files_of_their_own_are_verified_beside_batch_queues(tmp_path: Path, is_filled: bool) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", b"%d" % number) for number in range(5)])
    directory = tmp_path / "s" / "batchconsumequeue" / "T" / "0"
    directory.mkdir(parents=True)
    if is_filled:
        (directory / f"{0:020d}").write_bytes(bytes(460))
    result = rmq.verify(tmp_path / "s")
    assert (result.is_sound, result.unit_count) == (True, 5)


def test_a_reader_follows_a_queue_as_it_grows_and_is_cut_and_reads_known_units_once(
        batched: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = batched / f"batchconsumequeue/BT/0/{0:020d}"
    whole, real, lengths = path.read_bytes(), os.pread, []

    def pread(descriptor: int, size: int, position: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            lengths.append(position)
        return real(descriptor, size, position)

    def show(units: int) -> None:
        """As a broker's map does: neither length nor inode change."""
        with path.open("r+b") as file:
            file.write(whole[: 46 * units].ljust(len(whole), b"\0"))

    show(1)
    with rmq.open(batched) as store:
        assert [m.queue_offset for m in store.pull("BT", 0, 0, 9).messages] == [0, 1, 2, 3, 4]
        show(2)
        assert [m.queue_offset for m in store.pull("BT", 0, 2, 9).messages] == [2, 3, 4]
        monkeypatch.setattr(os, "pread", pread)
        assert store.pull("BT", 0, 3, 9).max_queue_offset == 5
        assert lengths == [46]
        show(1)
        assert store.pull("BT", 0, 0, 9).max_queue_offset == 5
        behind = batched / f"batchconsumequeue/BT/0/{460:020d}"
        behind.write_bytes(whole[46:92].ljust(460, b"\0"))
        assert store.pull("BT", 0, 0, 9).max_queue_offset == 5
        assert store.pull("BT", 0, 0, 9).max_queue_offset == 5
        path.unlink()
        answer = store.pull("BT", 0, 0, 9)
        assert (answer.min_queue_offset, answer.max_queue_offset) == (2, 5)


def test_a_queue_that_another_thread_ends_earlier_stays_as_it_is_for_who_reads_it(
        batched: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real = BatchConsumeQueue.unit_of

    def unit_of(queue: BatchConsumeQueue, at: int) -> int | None:
        found = real(queue, at)
        assert queue.end_at(895, 0).max_offset == 2
        return found

    monkeypatch.setattr(BatchConsumeQueue, "unit_of", unit_of)
    with rmq.open(batched) as store:
        assert [message.queue_offset for message in store.pull("BT", 0, 2, 9).messages] == [2, 3, 4]


@pytest.mark.parametrize("ask", [
    lambda store: store.topics().get("BT"), lambda store: store.pull("BT").max_queue_offset], ids=["topics", "pull"])
def test_a_queue_s_file_that_a_broker_removes_once_it_is_listed_is_as_one_removed_before(
        batched: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[rmq.Store], object]) -> None:  # fmt: skip
    real = batchconsumequeue._files_of

    def files_of(directory: Path) -> list[Path]:
        monkeypatch.undo()
        found = real(directory)
        found[0].unlink()
        return found

    with rmq.open(batched) as store:
        ask(store)
        monkeypatch.setattr(batchconsumequeue, "_files_of", files_of)
        answer = ask(store)
        assert not real(batched / "batchconsumequeue/BT/0")
        assert answer == ask(store)


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


def test_a_queue_of_batches_has_the_single_messages_of_its_topic_too(tmp_path: Path) -> None:
    """Their units stand for one message each. The log alone would make a queue of these only."""
    builder = Builder(tmp_path / "store")
    units = b""
    for base, body, count in [(0, b"single", 1), (1, FIRST, 2), (3, b"another", 1)]:
        properties, sys_flag = (b"INNER_BASE\1%d\2" % base, 0xC0) if count > 1 else (b"TAGS\1t\2", 0)
        place = builder.record("BT", body, properties, sys_flag=sys_flag, queue_offset=base)
        units += BATCH_UNIT.pack(*place, 0, builder.times, base, count, -1, 0)
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", units, 460)
    with rmq.open(builder.finish()) as store:
        assert store.topics() == {"BT": {0: (0, 4)}}
        answer = store.pull("BT")
        assert [message.body for message in answer.messages] == [b"single", b"one", b"two!", b"another"]
        assert [store.lookup(("BT", 0, number)).body for number in range(4)] == [b"single", b"one", b"two!", b"another"]
        assert (answer.next_queue_offset, answer.max_queue_offset) == (4, 4)


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


@pytest.mark.parametrize("limit", [1, 2, 3, 4, None])
@pytest.mark.parametrize("columns", [["phy_offset", "queue_offset"], ["phy_offset"], []])
def test_many_keys_find_the_messages_that_one_does(batched: Path, limit: int | None, columns: list[str]) -> None:
    """Newest first, as many as the limit lets through, and the same keys have more."""
    keys = ["u10", "k5", "none", "k3", "u9", "k3"]
    with rmq.open(batched) as store:
        each = [store.query("BT", key, limit=limit) for key in keys]
        found = store.query_many("BT", keys, limit=limit, columns=columns)
    assert found.table["key_index"].to_pylist() == [number for number, one in enumerate(each) for _ in one]
    assert found.truncated_keys.tolist() == [number for number, one in enumerate(each) if one.truncated]
    for column in columns:
        assert found.table[column].to_pylist() == [getattr(message, column) for one in each for message in one]


@pytest.mark.parametrize(("keys", "offsets"), [(["k5"], [4]), (["k3"], [2, 4]), (["u9", "k5"], [0, 1, 4]),
                                               (["k5", "u10"], [2, 3, 4]), (["i3"], []), ([], [])])  # fmt: skip
def test_a_scan_by_keys_finds_the_messages_that_queries_do(batched: Path, keys: list[str], offsets: list[int]) -> None:
    """In the order of the log: of u10 the record alone knows, so all inside it are found by that."""
    with rmq.open(batched) as store:
        for on_damage in ("raise", "skip"):
            assert store.scan(keys=keys, on_damage=on_damage).read_all()["queue_offset"].to_pylist() == offsets
        assert {message.queue_offset for key in keys for message in store.query("BT", key)} == set(offsets)


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


def test_a_batch_without_messages_is_one_itself(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.record("BT", b"", b"KEYS\1k\2UNIQ_KEY\1u\2", sys_flag=0xC0)
    with rmq.open(builder.finish()) as store:
        assert [message.phy_offset for message in store.query("BT", "k")] == [0]
        assert store.query_many("BT", ["k"]).table["phy_offset"].to_pylist() == [0]
        assert store.lookup("u", topic="BT").phy_offset == 0
        assert store.scan(columns=["keys"]).read_all()["keys"].to_pylist() == [["k"]]


def test_a_pull_looks_at_the_directories_of_its_topic_alone(batched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of others."""
    for number in range(20):
        (batched / f"batchconsumequeue/X{number}/0").mkdir(parents=True)
    seen, listdir = list[str](), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (seen.append(str(path)), listdir(path))[1])
    monkeypatch.setattr(batchconsumequeue, "queue_directories", lambda _: pytest.fail("lists all"))
    with rmq.open(batched) as store:
        assert [message.body for message in store.pull("BT").messages][:2] == [b"one", b"two!"]
        assert store.pull("nix").status is rmq.PullStatus.NO_MESSAGE_IN_QUEUE
        for topic in ("..", "../consumequeue/T", "\ud800"):
            with contextlib.suppress(rmq.IllegalMessageError, ValueError):
                assert not store.pull(topic).messages
    assert not [path for path in seen if "/X" in path]


def test_batch_queues_that_are_read_in_turn_are_read_once(batched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(batched / "batchconsumequeue/BT", batched / "batchconsumequeue/Other")
    with rmq.open(batched) as store:
        for topic in ("BT", "Other"):
            store.search_offset(topic, 0, 2**42)
        monkeypatch.setattr(batchconsumequeue, "BatchConsumeQueue", lambda *_: pytest.fail("read again"))
        for topic in ("BT", "Other", "BT"):
            assert store.search_offset(topic, 0, 2**42) == 5


def test_a_topic_may_be_deleted_while_queues_are_listed(batched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = paths.topic_of

    def deleted(name: str) -> str | None:
        if name == "Gone":
            shutil.rmtree(batched / "batchconsumequeue/Gone")
        return real(name)

    monkeypatch.setattr(paths, "topic_of", deleted)
    with rmq.open(batched) as store:
        for ask in (store.topics, store.info):
            (batched / "batchconsumequeue/Gone/0").mkdir(parents=True)
            ask()
            assert not (batched / "batchconsumequeue/Gone").exists()


@pytest.mark.parametrize("counts", [[1, 2, 3], [5], []])
def test_the_unit_of_an_offset_is_the_one_that_holds_it_or_the_next(counts: list[int]) -> None:
    """Edges: before the first unit, in a gap between two, behind the last."""
    queue = BatchConsumeQueue(Path("/nowhere"), "BT", 0)
    bases = np.cumsum([4, *(count + 2 for count in counts[:-1])])[: len(counts)]
    queue.units = np.zeros((len(counts), 6), np.int64)
    queue.units[:, 4], queue.units[:, 5] = bases, counts
    for offset in range(-1, 20):
        expected = next((number for number, (base, count) in enumerate(zip(bases, counts, strict=True))
                         if base + count > offset), None)  # fmt: skip
        assert queue.unit_of(offset) == expected
