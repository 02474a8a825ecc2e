# SPDX-License-Identifier: Apache-2.0
"""Exact queries with a time leave out index files of other times, and lose nothing when the clock goes back an hour."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmq
from rmq._core._javahash import hash_str_keys
from rmq.config import CLOCK_SLACK
from rmq.index import Index
from rmq.indexfile import IndexFile

TIME, MINUTE, HOUR = 1_700_000_000_000, 60_000, 3_600_000
ENTRIES = 9  # of a file
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=5, max_index_num=ENTRIES + 1)


def fill(path: Path, times: list[int]) -> Path:
    """A message of the key `k` and of one of its own for each time."""
    clock = iter(times)
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(clock, times[-1])) as store:
        for number in range(len(times)):
            store.put(rmq.Message("t", b"%d" % number, keys=["k", f"n-{number}"]))
    return path


def numbers(store: rmq.Store, begin: int | None, end: int | None) -> list[int]:
    one = [int(message.body) for message in store.query("t", "k", begin=begin, end=end, limit=None)]
    table = store.query_many("t", ["nix", "k"], begin=begin, end=end, limit=None, columns=["body"]).table
    assert one == [int(body) for body in table["body"].to_pylist()]
    return one


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the index files that are walked."""
    found: list[str] = []
    look = IndexFile.look

    def noted(file: IndexFile) -> None:
        found.append(file.path.name)
        look(file)

    monkeypatch.setattr(IndexFile, "look", noted)
    return found


@pytest.mark.parametrize("back", [0, 1, 30 * MINUTE, CLOCK_SLACK])
@pytest.mark.parametrize("step", [1, MINUTE, 17 * MINUTE])
def test_a_clock_that_went_back_loses_nothing(tmp_path: Path, back: int, step: int) -> None:
    times = [TIME + number * step - (back if number % 7 in (3, 4) or 40 < number < 60 else 0) for number in range(100)]
    rng = random.Random(back + step)
    with rmq.open(fill(tmp_path / "s", times)) as store:
        for _ in range(60):
            begin, end = (rng.choice(times) + rng.choice((-1, 0, 1)) for _ in range(2))
            expected = [number for number in range(99, -1, -1) if begin <= times[number] <= end]
            assert numbers(store, begin, end) == expected
        assert numbers(store, times[50], None) == [n for n in range(99, -1, -1) if times[n] >= times[50]]
        assert numbers(store, None, times[50]) == [n for n in range(99, -1, -1) if times[n] <= times[50]]


def test_files_of_other_times_are_not_walked(tmp_path: Path, asked: list[str]) -> None:
    times = [TIME + number * HOUR for number in range(90)]
    with rmq.open(fill(tmp_path / "s", times)) as store:
        names = sorted(file.name for file in (tmp_path / "s" / "index").iterdir())
        assert len(names) == 20
        for begin, end, count in ((times[30], times[30], 3), (times[30], times[40], 5), (None, times[0] - HOUR, 1),
                                  (None, times[0] - HOUR - 1, 0), (times[89] + 9 * HOUR, None, 1), (None, None, 20),
                                  (times[40], times[30], 2)):  # fmt: skip
            asked.clear()
            store.query("t", "k", begin=begin, end=end)
            assert len(asked) <= count, (begin, end)
            assert begin is not None or end is not None or asked == names[::-1]
        asked.clear()
        assert store.lookup(store.query("t", "n-7")[0].offset_msg_id).body == b"7"
        found = store.query_many("t", ["n-30", "n-70", "n-70"], columns=["phy_offset"], limit=None,
                                 begin=np.array([times[30], times[70], times[71]]),
                                 end=np.array([times[30], times[70], times[72]])).table  # fmt: skip
        assert found["key_index"].to_pylist() == [0, 1]
        empty = np.empty(0, np.int64)
        assert store.query_many("t", [], begin=empty, end=empty).table.num_rows == 0


def test_the_file_that_grows_may_be_ahead_of_its_times(tmp_path: Path) -> None:
    """A writer stores the entry first, the header's end timestamp last."""
    times = [TIME + number * HOUR for number in range(22)]
    path = fill(tmp_path / "s", times)
    last = max((path / "index").iterdir())
    data = bytearray(last.read_bytes())
    assert struct.unpack_from(">q", data, 8)[0] == times[21]
    struct.pack_into(">q", data, 8, times[18])
    last.write_bytes(data)
    with rmq.open(path) as store:
        assert numbers(store, times[21], times[21]) == [21]


HEADERS = [(0, 0), (0, TIME), (TIME, 0), (-1, -1), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63)), (2**63 - 1, 1),
           (TIME + 99 * HOUR, TIME)]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_times_of_no_entries_leave_nothing_out(tmp_path: Path, header: tuple[int, int]) -> None:
    times = [TIME + number * HOUR for number in range(40)]
    path = fill(tmp_path / "s", times)
    for file in sorted((path / "index").iterdir())[:-1]:
        data = bytearray(file.read_bytes())
        struct.pack_into(">qq", data, 0, *header)
        file.write_bytes(data)
    with rmq.open(path) as store:
        for begin, end in ((times[3], times[9]), (None, times[5]), (times[5], times[5])):
            low, high = begin or 0, end
            assert numbers(store, begin, end) == [n for n in range(39, -1, -1) if low <= times[n] <= high]


def test_of_a_crashed_store_nothing_is_left_out(tmp_path: Path) -> None:
    """Headers of its files may be older than their entries, or newer."""
    path = fill(tmp_path / "s", [TIME + number * HOUR for number in range(20)])
    index = Index(path / "index", CONFIG, writable=False)
    hashes: Any = hash_str_keys(["k"], "t")
    far = TIME - 99 * HOUR
    assert len(index.collect(hashes, far, far)[1]) == 0
    index.durable = int(index.files[-1].path.name), 3
    assert len(index.collect(hashes, far, far)[1]) >= 18
    index.close()
