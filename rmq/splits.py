# SPDX-License-Identifier: Apache-2.0
"""The plan of a parallel read: ranges of the log, picklable, planned by size. Any byte may be a border."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rmq._core._message import to_ms

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT_BYTES = 128 * 1024 * 1024
CLOCK_SLACK = 3_600_000  # ms that the clock of a store may have gone back between two segments


class Planned(Protocol):
    """What planning needs of an open store."""

    @property
    def min_phy_offset(self) -> int: ...
    @property
    def max_phy_offset(self) -> int: ...
    def table(self, name: Literal["segments"]) -> pa.RecordBatchReader: ...


@dataclass(frozen=True)
class Split:
    """Records of a store that start in [begin, end) of the log."""

    path: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def plan(path: str, ranges: list[tuple[int, int]], *, split_bytes: int = SPLIT_BYTES,
         min_partitions: int = 1) -> list[Split]:  # fmt: skip
    """Splits of about split_bytes, in the order of the log; at least min_partitions when there are as many bytes.

    A split begins anywhere: its reader goes on to the first record at or behind that byte. Cost: O(splits).
    """
    total = sum(end - begin for begin, end in ranges)
    if total <= 0:
        return []
    step = max(1, min(split_bytes, -(-total // max(1, min_partitions))))
    splits = []
    for begin, end in ranges:
        count = -(-(end - begin) // step)
        borders = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
        splits += [Split(path, first, last) for first, last in pairwise(borders)]
    return splits


def time_ranges(store: Planned, begin: Any, end: Any, low: int | None = None,
                high: int | None = None) -> list[tuple[int, int]]:  # fmt: skip
    """Ranges of the log, as it stands now, in [low, high) in which messages stored from `begin` to `end` can lie.

    begin, end: inclusive, ms or aware datetime, None: open. low, high: of the log when None. Cost: one record read for
    each segment when a time is given.
    """
    low = store.min_phy_offset if low is None else low
    high = store.max_phy_offset if high is None else high
    if begin is None and end is None:
        return [(low, high)] if low < high else []
    earliest = None if begin is None else to_ms(begin, "begin", True)
    latest = None if end is None else to_ms(end, "end")
    rows = store.table("segments").read_all()
    begins = [*rows["begin_phy_offset"].to_pylist(), high]
    times = [*rows["first_store_timestamp"].cast("int64").to_pylist(), None]
    kept: list[tuple[int, int]] = []
    for (first, last), (time, following) in zip(pairwise(begins), pairwise(times), strict=True):
        if latest is not None and time is not None and time - CLOCK_SLACK > latest:
            continue
        if earliest is not None and following is not None and following + CLOCK_SLACK < earliest:
            continue
        first, last = max(first, low), min(last, high)
        if first < last:
            if kept and kept[-1][1] == first:
                first = kept.pop()[0]
            kept.append((first, last))
    return kept


def plan_segments(path: str, ranges: list[tuple[int, int]], segment_size: int, bounds: tuple[int, int], *,
                  split_bytes: int = SPLIT_BYTES, min_partitions: int = 1) -> list[Split]:  # fmt: skip
    """Splits of whole segments that hold the ranges, for logs of which a reader should not walk what it does not want.

    bounds: of the log. About split_bytes or one segment each; min_partitions when there are as many segments.
    """
    runs: list[tuple[int, int]] = []
    for begin, end in ranges:
        first, last = begin // segment_size, -(-end // segment_size)
        if runs and first <= runs[-1][1]:
            first, last = runs[-1][0], max(last, runs.pop()[1])
        runs.append((first, last))
    total = sum(last - first for first, last in runs)
    step = max(1, min(split_bytes // segment_size, total // max(1, min_partitions)))
    spans = ((at, min(at + step, last)) for first, last in runs for at in range(first, last, step))
    low, high = bounds
    return [Split(path, max(low, first * segment_size), min(high, last * segment_size)) for first, last in spans]
