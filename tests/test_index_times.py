# SPDX-License-Identifier: Apache-2.0
"""Exact queries with a time: entries that tell another time are left out, and none that may be of it, whatever the
clock did and whatever the bytes of an index file say."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import rmq
from rmq._core import _layout as L
from rmq._core._indexfile import IndexFileView
from rmq.rebuilding import rebuild_sidecars

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=100)
NOW = 1_700_000_000_000
DAY = 86_400_000
MIN, MAX = -(2**63), 2**63 - 1
INT_MAX = 2**31 - 1
KEYS = ["k0", "k1", "k2"]


def view_of(base_ms: int, seconds: list[int]) -> IndexFileView:
    """An index file whose entries, of one hash, have these differences, behind one of another hash; their offsets count
    from 0."""
    count = len(seconds) + 1
    header = struct.pack(">qqqqii", base_ms, 0, 0, 0, 1, count + 1)
    entries = struct.pack(">iqii", 8, 99, 0, 0)
    entries += b"".join(struct.pack(">iqii", 7, number, diff, number + 1) for number, diff in enumerate(seconds))
    data = bytearray(header + struct.pack(">i", count) + bytes(L.ENTRY_SIZE) + entries)
    return IndexFileView(data, hash_slot_num=1, index_num=count + 1)


def collected(view: IndexFileView, begin: int = MIN, end: int = MAX) -> list[int]:
    return sorted(view.collect(np.array([7], np.int32), begin, end)[1].tolist())


@pytest.mark.parametrize(("begin", "end", "found"), [
    (MIN, MAX, [0, 1, 2, 3]), (NOW, NOW, [0, 1]), (NOW - 1, NOW - 1, [0]), (MIN, MIN, [0]),
    (NOW + 999, MAX, [0, 1, 2, 3]), (NOW + 1000, MAX, [1, 2, 3]), (NOW + 1999, NOW + 1999, [1]),
    (NOW + 2000, MAX, [2, 3]), (NOW + 60_999, MAX, [2, 3]), (NOW + 61_000, MAX, [3]), (MAX, MAX, [3]),
    (NOW + 1000, NOW + 59_999, [1]), (NOW, NOW + 60_000, [0, 1, 2]), (MIN, NOW + 60_000, [0, 1, 2]),
    (NOW + 5000, NOW + 4000, [])])  # fmt: skip
def test_an_entry_is_of_a_second_or_older_or_newer(begin: int, end: int, found: list[int]) -> None:
    """0 is what is older than the first too, the greatest number all that lies further ahead."""
    seconds = [0, 1, 60, INT_MAX]
    if (begin, end) == (NOW, NOW):
        seconds[1] = 0
    assert collected(view_of(NOW, seconds), begin, end) == found


@pytest.mark.parametrize("base_ms", [0, -1, MIN, MAX, MAX - 999])
@pytest.mark.parametrize("seconds", [[0, 5, INT_MAX], [-1, -(2**31), 3]])
def test_a_header_that_tells_no_time_leaves_nothing_out(base_ms: int, seconds: list[int]) -> None:
    for begin, end in [(MIN, MAX), (MIN, MIN), (MAX, MAX), (0, 0), (NOW, NOW)]:
        assert collected(view_of(base_ms, seconds), begin, end) == [0, 1, 2]


def test_differences_below_0_are_as_0() -> None:
    view = view_of(NOW, [-1, -(2**31), 0])
    assert collected(view, MIN, NOW - 1) == [0, 1, 2]
    assert collected(view, NOW + 1000, MAX) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_query_is_right_where_the_clock_went_back(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    times: list[int] = []

    def clock() -> int:
        step = rng.choice([0, 1, 400, 1000, 3_700_000, -1, -999, -5000, -DAY, DAY, -40 * DAY])
        times.append(max(1, (times[-1] if times else NOW) + step))
        return times[-1]

    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=clock) as store:
        for number in range(400):
            store.put(rmq.Message("T", b"%d" % number, keys=[KEYS[number % 3]]))
        every = [message for key in KEYS for message in store.query("T", key, limit=None)]
        stored = {message.body: message.store_timestamp for message in every}
        assert len(stored) == 400
        for _ in range(60):
            begin, end = sorted(rng.choice(times) + rng.choice([-1001, -1, 0, 1, 999]) for _ in range(2))
            found = [message.body for key in KEYS
                     for message in store.query("T", key, begin=begin, end=end, limit=None)]  # fmt: skip
            assert sorted(found) == sorted(body for body, time in stored.items() if begin <= time <= end)
            many = store.query_many("T", KEYS, begin=begin, end=end, limit=None, columns=["body"])
            assert sorted(many.table["body"].to_pylist()) == sorted(found)


@pytest.mark.parametrize("sidecar", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("pause", [-3_600_000, *(pytest.param(pause, marks=pytest.mark.slow) for pause in (
    0, 999, 1000, 3_600_000, 2**31 * 1000 + 5000))])
def test_the_first_entry_of_a_file_is_found_however_long_nothing_was_put(tmp_path: Path, pause: int,
                                                                         sidecar: bool) -> None:  # fmt: skip
    """Its difference counts from the end of the file before, those of the others from its own time."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=4)
    times = [NOW, NOW + 5, NOW + 1000]
    for _ in range(3):
        times += [times[-1] + pause, times[-1] + pause + 2500, times[-1] + pause + 61_000]
    clock = iter(times)
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: next(clock)) as store:
        for number in range(len(times)):
            store.put(rmq.Message("T", b"%d" % number, keys=["k"]))
    shutil.rmtree(tmp_path / "s" / "rmq" / "sidecar", ignore_errors=True)
    if sidecar:
        assert len(list(rebuild_sidecars(tmp_path / "s"))) == 4
    with rmq.open(tmp_path / "s") as store:
        assert len(list((tmp_path / "s" / "index").iterdir())) == 4
        for begin in [MIN, *times, *(time + 1 for time in times)]:
            for end in [MAX, *times, *(time - 1 for time in times)]:
                expected = sorted(b"%d" % number for number, time in enumerate(times) if begin <= time <= end)
                found = store.query("T", "k", begin=begin, end=end, limit=None)
                assert sorted(message.body for message in found) == expected
                many = store.query_many("T", ["k"], begin=begin, end=end, limit=None, columns=["body"])
                assert sorted(many.table["body"].to_pylist()) == expected


def test_records_of_another_time_are_not_read(tmp_path: Path) -> None:
    clock = iter(range(NOW, NOW + 10**9, 10_000))
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: next(clock)) as store:
        places = [store.put(rmq.Message("T", b"%d" % number, keys=["k"])) for number in range(20)]
        times = [message.store_timestamp for message in reversed(store.query("T", "k", limit=None))]
    with (tmp_path / "s" / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(places[3].phy_offset + L.RECORD_BODY_OFFSET)
        file.write(b"X")
    with rmq.open(tmp_path / "s") as store:
        with pytest.raises(rmq.CorruptFileError):
            store.query("T", "k", limit=None)
        assert len(store.query("T", "k", begin=times[4], limit=None)) == 16
        assert len(store.query("T", "k", end=times[2], limit=None)) == 3
        assert store.query_many("T", ["k"], begin=times[4], limit=None).table.num_rows == 16
