# SPDX-License-Identifier: Apache-2.0
"""lookup_many with sizes: the disk is asked for what lies far apart, and the answers are the same."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import rmq
from rmq import commitlog
from rmq.logsegment import Segment
from rmq.windows import WindowedStore

SEGMENT = 65536


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rng = random.Random(3)
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT)) as made:
        made.put_many(rmq.Message("t", rng.randbytes(rng.randrange(3000))) for _ in range(200))
    return tmp_path / "s"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    ask = Segment.read_ahead

    def noted(segment: Segment, begin: int, end: int) -> None:
        assert segment.start <= begin < end <= segment.end
        found.append((begin, end))
        ask(segment, begin, end)

    monkeypatch.setattr(Segment, "read_ahead", noted)
    return found


@pytest.mark.parametrize("gap", [1, 1000, 8000, 2**40])
def test_the_disk_is_asked_for_records_that_lie_apart(store: Path, asked: list[tuple[int, int]], gap: int,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(commitlog, "READ_GAP", gap)
    with rmq.open(store) as opened:
        offsets, sizes, _ = opened.units("t", 0, 0, 200)
        for step in (1, 3, 20, 200):
            asked.clear()
            some, own = offsets[::step][::-1], sizes[::step][::-1]
            found = opened.lookup_many(some, columns=["phy_offset", "body"], sizes=own)
            assert found.equals(opened.lookup_many(some, columns=["phy_offset", "body"]))
            assert found["phy_offset"].to_pylist() == some.tolist()
            covered = [any(begin <= place and place + size <= end for begin, end in asked)
                       for place, size in zip(some.tolist(), own.tolist(), strict=True)]  # fmt: skip
            assert all(covered) or not asked
            assert bool(asked) == (int(offsets[::step][-1] + sizes[::step][-1] - offsets[0]) >= gap * len(some))
            for (_, end), (begin, _) in pairwise(asked):
                assert begin - end >= gap or begin % SEGMENT == 0


@pytest.mark.parametrize("windows", [True, False])
def test_hostile_offsets_and_sizes_are_no_error(store: Path, asked: list[tuple[int, int]], windows: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(commitlog, "READ_GAP", 1)
    made = WindowedStore(store, maps_first=False, has_index=False) if windows else rmq.open(store)
    with made as opened:
        edges = [-(2**63), -1, 0, 1, SEGMENT - 1, SEGMENT, 5 * SEGMENT, 2**62, 2**63 - 1]
        for size in (-(2**63), -1, 0, 1, SEGMENT, 2**31, 2**63 - 1):
            found = opened.lookup_many(edges, columns=["phy_offset"], sizes=np.full(len(edges), size))
            assert found["phy_offset"].to_pylist()[0] == 0
        assert opened.lookup_many([], columns=["phy_offset"], sizes=[]).num_rows == 0
        for sizes, kind in (([1], ValueError), ([], ValueError), (["x", "y"], TypeError)):
            with pytest.raises(kind, match="sizes"):
                opened.lookup_many([0, 1], sizes=sizes)
