"""One key or many at a time: the same entries, and the same answers in the same order."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest

import rmq
from rmq._core._answerlists import AnswerLists
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq.indexfile import RESERVE_AHEAD, RESERVE_FIRST
from rmq.keys import HASHED_TOGETHER, hash_keys

T0 = 1_700_000_000_000
MAX = rmq.MAX_TIMESTAMP
TEN: dict[str, Any] = {"max_hash_slot_num": 10, "max_index_num": 20}


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[rmq.IndexFile]:
    with rmq.IndexFile(tmp_path / "filled", "x", **TEN) as file:
        file.put_keys(["T#Aa", "T#b", "T#Aa", "T#\u8ba2\u5355"], [1000, 1100, 1200, 1300],
                      [T0, T0, T0 + 2000, T0 + 2000])  # fmt: skip
        yield file


@pytest.mark.parametrize("asked", [1, 63, 96, 97, 159, 160, 161, 4095, 4096, 4097, 9000])
def test_any_number_of_keys_at_a_time_has_the_answers_of_each_alone(tmp_path: Path, asked: int) -> None:
    """Chains of every length, keys that are asked for again, keys that are not there, three windows of time."""
    rng = random.Random(asked)
    names = [f"T#{number}" for number in range(700)]
    puts = [(rng.choice(names), number, T0 + 5 * number) for number in range(2000)]
    with rmq.IndexFile(tmp_path / "s", "x", max_hash_slot_num=331, max_index_num=2100) as new:
        assert new.put_keys(*map(list, zip(*puts, strict=True))) == len(puts)
    file = oracle.IndexFile((tmp_path / "s").read_bytes(), 331, 2100)
    keys = [rng.choice([*names[:5], rng.choice(names), f"T#{rng.randrange(10**6)}"]) for _ in range(asked)]
    for arguments in ((32, 0, MAX), (1, 0, MAX), (2, T0 + 3000, T0 + 7000)):
        expected = {key: file.select(key, *arguments) for key in set(keys)}
        with rmq.IndexFile(tmp_path / "s", max_hash_slot_num=331, max_index_num=2100) as opened:
            assert opened.select_phy_offset_many(keys, *arguments).to_pylist() == [expected[key] for key in keys]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 8, 127, 128, 129, 641, 65535, 65536, 65537, 99991, 5_000_000])
def test_every_hash_is_put_into_the_slot_of_its_remainder(slots: int) -> None:
    rng = random.Random(slots)
    hashes = [0, 1, slots - 1, slots, slots + 1, 2**31 - 1, 2**31 - 2, (2**31 - 1) // slots * slots,
              (2**31 - 1) // slots * slots - 1, *(rng.randrange(2**31) for _ in range(200))]  # fmt: skip
    data = bytearray(index_file_size(slots, 300))
    numbers = np.zeros(len(hashes), np.int64)
    view = IndexFileView(data, hash_slot_num=slots, index_num=300, writable=True)
    assert view.put(np.array(hashes, np.int32), numbers, numbers) == len(hashes)
    newest = {key_hash % slots: number for number, key_hash in enumerate(hashes, 1)}
    table = np.frombuffer(data, ">i4", slots, 40)
    assert {int(slot): int(table[slot]) for slot in np.flatnonzero(table)} == newest
    assert view.fits()


SCRIPTS = "kÿ漢😀"


@pytest.mark.parametrize("version", ["4.7.0", "5.3.3"])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300])
def test_any_number_of_keys_at_a_time_leaves_the_bytes_of_each_alone(tmp_path: Path, count: int, version: str) -> None:
    """Keys of all lengths and scripts, into few slots, of a list and of Arrow; the file gets full."""
    rng = random.Random(count)
    options: dict[str, Any] = {"max_hash_slot_num": 37, "max_index_num": 250, "rocketmq_version": version}
    keys = [rng.choice(SCRIPTS) * rng.randrange(70) + str(rng.randrange(50)) for _ in range(count)]
    puts = [(key, rng.randrange(-5, 2**63), T0 + rng.randrange(-9000, 9000)) for key in keys]
    columns = [list(column) for column in zip(*puts, strict=True)] or [[], [], []]
    for first in ([], [("", 7, T0)]):
        images = []
        with rmq.IndexFile(tmp_path / "alone", "x", **options) as file:
            done = [file.put_key(*put) for put in (*first, *puts)].count(True) - len(first)
        images.append((tmp_path / "alone").read_bytes())
        for hold in (list, lambda keys: pa.array(keys, pa.string()), lambda keys: pa.array(keys, pa.large_string()),
                     lambda keys: pa.array(["before", *keys, "behind"]).slice(1, len(keys))):  # fmt: skip
            path = tmp_path / str(len(images))
            with rmq.IndexFile(path, "x", **options) as file:
                for put in first:
                    file.put_key(*put)
                assert file.put_keys(hold(columns[0]), *columns[1:]) == done == min(count, 249 - len(first))
            images.append(path.read_bytes())
        assert images.count(images[0]) == len(images)
        for path in tmp_path.iterdir():
            path.unlink()


def test_keys_of_many_reservations_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.indexfile.RESERVE_AHEAD", 4096)
    keys = [f"T#{number}" for number in range(3000)]
    for name, some in (("list", keys), ("arrow", pa.array(keys))):
        with rmq.IndexFile(tmp_path / name, "x", max_hash_slot_num=331, max_index_num=2100) as file:
            assert file.put_keys(some, range(3000), range(3000)) == 2099
            assert file.view.fits()
    assert (tmp_path / "list").read_bytes() == (tmp_path / "arrow").read_bytes()
    with rmq.IndexFile(tmp_path / "list", max_hash_slot_num=331, max_index_num=2100) as file:
        assert file.select_phy_offset_many(keys).to_pylist() == [[number] * (number < 2099) for number in range(3000)]


PARTS = [HASHED_TOGETHER - 1, HASHED_TOGETHER, HASHED_TOGETHER + 1, 2 * HASHED_TOGETHER + 77]


@pytest.mark.parametrize("count", PARTS)
def test_keys_of_several_parts_leave_the_bytes_of_a_list(tmp_path: Path, count: int) -> None:
    keys = [f"T#{number}" for number in range(count)]
    for name, some in (("list", keys), ("arrow", pa.array(keys))):
        with rmq.IndexFile(tmp_path / name, "x", max_hash_slot_num=331, max_index_num=PARTS[-1]) as file:
            assert file.put_keys(some, range(count), range(count)) == min(count, PARTS[-1] - 1)
    assert (tmp_path / "list").read_bytes() == (tmp_path / "arrow").read_bytes()


@pytest.mark.parametrize("count", [0, *PARTS])
@pytest.mark.parametrize("max_num", [0, 1, 32])
def test_keys_of_several_parts_have_the_answers_of_a_list(tmp_path: Path, count: int, max_num: int) -> None:
    """Every third key is there, every sixth twice: answers grow past what a key each takes."""
    with rmq.IndexFile(tmp_path / "f", "x", max_hash_slot_num=5000, max_index_num=100_001) as file:
        there = [f"T#{number}" for number in range(0, 70_000, 3)] + [f"T#{number}" for number in range(0, 70_000, 6)]
        file.put_keys(there, range(len(there)), [T0] * len(there))
        keys = [f"T#{number}" for number in range(count)]
        found = file.select_phy_offset_many(pa.array(keys, pa.string()), max_num)
        assert found.equals(file.select_phy_offset_many(keys, max_num))
        found.validate(full=True)
        alone = random.Random(count).sample(range(count), min(count, 50))
        assert [found[number].as_py() for number in alone] == \
            [file.select_phy_offset(keys[number], max_num) for number in alone]  # fmt: skip
        assert len(found.values) == (sum(len(range(0, count, step)) for step in (3, 6)) if max_num > 1 else
                                     max_num * len(range(0, count, 3)))  # fmt: skip


def test_answers_are_taken_once_all_keys_are_answered_and_no_more(filled: rmq.IndexFile) -> None:
    answers, hashes = AnswerLists(3), hash_keys(["T#Aa", "none"])
    filled.view.select_into(answers, hashes, 32, 0, MAX)
    with pytest.raises(RuntimeError, match="2 of 3 keys are answered"):
        answers.take()
    with pytest.raises(ValueError, match="more keys than were to be answered"):
        filled.view.select_into(answers, hashes, 32, 0, MAX)
    filled.view.select_into(answers, hashes[:0], 32, 0, MAX)
    filled.view.select_into(answers, hashes[:1], 1, 0, MAX)
    offsets, values = answers.take()
    assert (offsets.tolist(), values.tolist()) == ([0, 2, 2, 3], [1200, 1000, 1200])
    with pytest.raises(RuntimeError, match="all were taken"):
        answers.take()
    with pytest.raises(ValueError, match="more keys than were to be answered"):
        filled.view.select_into(answers, hashes[:1], 1, 0, MAX)
    del answers
    assert (offsets.tolist(), values.tolist()) == ([0, 2, 2, 3], [1200, 1000, 1200])
    for count in (-1, 2**62):
        with pytest.raises(ValueError, match="number of keys"):
            AnswerLists(count)


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize(("wrong", "value"), [(1, 9), (HASHED_TOGETHER, 3), (69_999, -5), (69_999, 10**6)])
def test_a_column_whose_offsets_are_wrong_anywhere_puts_nothing(tmp_path: Path, width: Any, wrong: int,
                                                                value: int) -> None:  # fmt: skip
    offsets = np.arange(0, 2 * 70_001, 2, dtype=width)
    offsets[wrong] = value
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(bytes(2 * 70_000))]
    keys = pa.Array.from_buffers(pa.string() if width is np.int32 else pa.large_string(), 70_000, buffers)
    with rmq.IndexFile(tmp_path / "file", "x", max_hash_slot_num=331, max_index_num=80_000) as file:
        with pytest.raises(ValueError, match=r"offsets\[\d+\] lies outside the data"):
            file.put_keys(keys, range(70_000), range(70_000))
        assert file.index_count == 1


def test_a_new_file_reserves_little_and_then_as_much_again_as_it_holds(tmp_path: Path) -> None:
    entries_at = 40 + 4 * 5_000_000
    with rmq.IndexFile(tmp_path / "s", "x") as file:
        assert file._file.reserved - entries_at <= RESERVE_FIRST
        for count in (10, 60_000, 200_000, 700_000):
            numbers = np.arange(count)
            assert file.put_hashes(numbers.astype(np.int32), numbers, numbers) == count
            used = 20 * file.index_count
            ahead = file._file.reserved - entries_at - used
            assert -20 <= ahead <= min(RESERVE_AHEAD, max(RESERVE_FIRST, used))


PLAIN = ("T#a", 100, T0)
ODD = [("T#a", np.int64(100), T0), ("T#a", 100, np.int32(1000)), ("T#a", True, T0), ("T#a", 1.5, T0),
       ("T#a", 2**63, T0), ("T#a", 100, -(2**63) - 1), ("T#a", None, T0), (b"T#a", 100, T0),
       (None, 100, T0), (5, 100, T0),
       ("T#\ud83d", 100, T0), ("T#\u8ba2", -(2**63), 2**63 - 1), PLAIN]  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error), str(error).replace("keys[0] ", "key ").replace("phy_offsets ", "phy_offset ").replace(
            "store_timestamps ", "store_timestamp ")  # fmt: skip


@pytest.mark.parametrize("put", ODD, ids=repr)
def test_a_put_of_one_key_is_one_of_many(tmp_path: Path, put: Any) -> None:
    found = []
    for path, by_one in ((tmp_path / "one", True), (tmp_path / "many", False)):
        with rmq.IndexFile(path, "x", **TEN) as file:
            file.put_key(*PLAIN)
            found.append(outcome(lambda file=file, by_one=by_one: bool(
                file.put_key(*put) if by_one else file.put_keys([put[0]], [put[1]], [put[2]]))))  # fmt: skip
        found.append(path.read_bytes())
    assert found[:2] == found[2:]


@pytest.mark.parametrize("arguments", [
    ("T#Aa", np.int32(2)), ("T#Aa", True), ("T#Aa", -1), ("T#Aa", 1.0), ("T#Aa", 2**70), ("T#Aa", 2**31),
    ("T#Aa", None),
    ("T#Aa", 32, datetime.fromtimestamp(T0 / 1000, UTC)), ("T#Aa", 32, 0, datetime.fromtimestamp(T0 / 1000 + 1, UTC)),
    ("T#Aa", 32, np.int64(T0)), ("T#Aa", 32, False), ("T#Aa", 32, -(2**63) - 1), ("T#Aa", 32, 0, 2**63),
    (b"T#Aa",), (None,), (7,), ("T#\ud83d",), ("T#\u8ba2\u5355",), (np.str_("T#Aa"),)], ids=repr)  # fmt: skip
def test_a_select_of_one_key_is_one_of_many(filled: rmq.IndexFile, arguments: Any) -> None:
    key, *others = arguments
    assert filled.select_phy_offset("T#Aa") == [1200, 1000]
    many = outcome(lambda: filled.select_phy_offset_many([key], *others).to_pylist()[0])
    assert outcome(lambda: filled.select_phy_offset(key, *others)) == many


@pytest.mark.parametrize("max_num", [0, 1, 31, 32, 33, 34, 2**40])
@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_however_many_answers_one_key_has_they_are_those_of_many(tmp_path: Path, count: int, max_num: int) -> None:
    numbers = list(range(count))
    with rmq.IndexFile(tmp_path / "s", "x", max_hash_slot_num=2, max_index_num=100) as file:
        assert file.put_keys(["k"] * count, numbers, [T0 + 1000 * number for number in numbers]) == count
        for window in ((0, MAX), (T0 + 3000, T0 + 40_000), (T0 + 10**7, MAX), (0, T0 - 1)):
            answer = file.select_phy_offset("k", max_num, *window)
            assert answer == file.select_phy_offset_many(["k"], max_num, *window).to_pylist()[0]
        assert file.select_phy_offset("k", max_num) == numbers[::-1][:max_num]


def test_no_key_is_put_before_its_block_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.IndexFile(tmp_path / "s", "x", **TEN) as new:
        new.put_key(*PLAIN)
    before = (tmp_path / "s").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("rmq.mappedfile.allocate", full)
    with rmq.IndexFile(tmp_path / "s", "r+", **TEN) as file:
        with pytest.raises(OSError, match="no space"):
            file.put_key("T#a", 1, T0)
        assert (tmp_path / "s").read_bytes() == before
        monkeypatch.undo()
        assert file.put_key("T#a", 1, T0)


def wrapped(value: int) -> int:
    """A sum as Java's long holds it."""
    return (value + 2**63) % 2**64 - 2**63


def walked(data: bytes, slots: int, number: int, key_hash: int, max_num: int, begin: int, end: int) -> list[int]:
    """RocketMQ IndexFile#selectPhyOffset, as it is written there."""
    base, count = struct.unpack_from(">q", data)[0], min(max(struct.unpack_from(">i", data, 36)[0], 1), number)
    (position,) = struct.unpack_from(">i", data, 40 + key_hash % slots * 4)
    found: list[int] = []
    if position <= 0 or position > min(count, number - 1) or count <= 1:
        return found
    while len(found) < max_num:
        entry_hash, phy_offset, seconds, previous = struct.unpack_from(">iqii", data, 40 + slots * 4 + position * 20)
        if seconds < 0:
            break
        time = wrapped(base + seconds * 1000)
        if entry_hash == key_hash and begin <= time <= end:
            found.append(phy_offset)
        if previous <= 0 or previous >= position or time < begin:
            break
        position = previous
    return found


@pytest.mark.parametrize("base", [0, 1, T0, -1, -T0, -(2**63), 2**62, 2**62 + 1, 2**63 - 1, 2**63 - 10**12])
def test_any_bytes_have_the_answers_of_rocketmq_s_walk(base: int) -> None:
    rng = random.Random(base)
    slots, number = 7, 400
    keys = [f"T#{i}" for i in range(40)]
    hashes = hash_keys(keys)
    for count in (number, number - 30, 1, 0, -5, 2**31 - 1):
        data = bytearray(struct.pack(">qqqqii", base, 0, 0, 0, 0, count))
        data += b"".join(struct.pack(">i", rng.choice([0, -1, rng.randrange(number), 2**31 - 1])) for _ in range(slots))
        for i in range(number):
            data += struct.pack(">iqii", int(rng.choice(hashes)), rng.getrandbits(63),
                                rng.choice([0, 1, 5, 60, 61, 2**31 - 1, -1, rng.randrange(200)]),
                                rng.choice([max(0, i - 1), max(0, i - rng.randrange(1, 9)), i, -1, 2**31 - 1] +
                                           [max(0, i - 1)] * 20))  # fmt: skip
        assert len(data) == index_file_size(slots, number)
        view = IndexFileView(data, hash_slot_num=slots, index_num=number)
        asked = [rng.randrange(len(keys)) for _ in range(rng.choice([1, 15, 16, 17, 97, 500]))]
        for max_num in (1, 2, 32, 10**6):
            for begin, end in [(0, MAX), (-(2**63), 2**63 - 1), (base, base),
                               (wrapped(base + 5000), wrapped(base + 61_000)),
                               (wrapped(base + 5001), 2**63 - 1), (2**63 - 1, 2**63 - 1), (T0 + 999, T0 + 60_001),
                               (wrapped(base + 2**31 * 1000), 2**63 - 1)]:  # fmt: skip
                counts, values = view.select(hashes[asked], max_num, begin, end)
                expected = [walked(data, slots, number, int(hashes[i]), max_num, begin, end) for i in asked]
                assert counts.tolist() == [len(one) for one in expected]
                assert values.tolist() == [value for one in expected for value in one]
