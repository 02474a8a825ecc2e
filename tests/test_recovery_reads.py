"""What an opening reads of the log again: nothing of a closed store; of a killed one what was not flushed, and at most
the segment that the last flush ended in. Counted in bytes that the record iterator walks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from conftest import copy_store

import rmq
from rmq import commitlog
from rmq._core._recordbatch import RecordBatch
from rmq.logsegment import Segment

SEGMENT = 16 * 1024
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=400,
                         max_hash_slot_num=10, max_index_num=40, flush_interval_commit_log=2**31 - 1)  # fmt: skip
EDGES = [0, 1, SEGMENT // 3, SEGMENT - 1, 5 * SEGMENT // 2]  # unflushed at least so many bytes


@dataclass
class Reads:
    """ranges: what the iterator walked, [begin, end) of each batch. single: records read one by one, and headers."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    single: int = 0

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    load, scan = commitlog.CommitLog.load, Segment.scan

    class CountedScan(commitlog.LogScan):
        def __iter__(self) -> Iterator[RecordBatch]:
            before = self.phy_offset
            for batch in super().__iter__():
                found.ranges.append((before, batch.next_phy_offset))
                yield batch
                before = batch.next_phy_offset

    def counted_load(self: commitlog.CommitLog, phy_offsets: npt.NDArray[np.int64], end: int,
                     **options: int) -> Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
        found.single += len(phy_offsets)
        return load(self, phy_offsets, end, **options)

    def counted_scan(self: Segment, batch: RecordBatch, begin: int, end: int, **options: int) -> int:
        stop = scan(self, batch, begin, end, **options)
        found.single += len(batch)
        return stop

    monkeypatch.setattr(commitlog, "LogScan", CountedScan)
    monkeypatch.setattr(commitlog.CommitLog, "load", counted_load)
    monkeypatch.setattr(Segment, "scan", counted_scan)
    return found


def fill(store: rmq.Store, end: int) -> None:
    number = 0
    while store.max_phy_offset < end:
        store.put(rmq.Message("a", bytes(number % 700), queue_id=number % 2, keys=[f"k{number % 7}"]))
        number += 1


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_opening_a_closed_store_walks_no_record_however_large_it_is(tmp_path: Path, mode: str, reads: Reads) -> None:
    single = set()
    for segments in (1, 4, 16):
        path = tmp_path / str(segments)
        with rmq.open(path, "x", config=CONFIG) as store:
            fill(store, segments * SEGMENT - SEGMENT // 2)
        reads.ranges, reads.single = [], 0
        with rmq.open(path, mode) as store:
            assert len(list((path / "commitlog").iterdir())) == segments
            assert len(store.topics()["a"]) == 2
            assert store.query("a", "k3").complete
            # The answer's records are read one by one; the opening's are counted without them.
            assert reads.ranges == []
        reads.single = 0
        rmq.open(path, mode).close()
        single.add(reads.single)
    assert len(single) == 1
    assert single.pop() <= 6, "the record that the mark names, and those at both ends of each of the two queues"


@pytest.mark.parametrize("segments", [1, 4, 16])
@pytest.mark.parametrize("unflushed", EDGES)
def test_opening_a_killed_store_walks_what_was_not_flushed_and_at_most_one_segment(
        tmp_path: Path, unflushed: int, segments: int, reads: Reads) -> None:  # fmt: skip
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        fill(store, segments * SEGMENT - SEGMENT // 2)
        store.flush()
        flushed = store.max_phy_offset
        fill(store, flushed + unflushed)
        end, topics = store.max_phy_offset, store.topics()
        copy_store(tmp_path / "live", tmp_path / "killed")
    for mode in ("r", "r+"):
        reads.ranges = []
        with rmq.open(tmp_path / "killed", mode) as store:
            assert (store.max_phy_offset, store.topics()) == (end, topics)
        begin = min((begin for begin, _ in reads.ranges), default=end)
        before = flushed - (flushed - 1) // SEGMENT * SEGMENT if mode == "r+" else 0
        assert begin >= flushed - before, "no record of an earlier segment"
        # Once to find the end, once more for units and entries.
        assert end - flushed <= reads.size <= 2 * (end - flushed) + before
