# SPDX-License-Identifier: Apache-2.0
"""The plan of a parallel read: ranges of the log, picklable, planned by size. Any byte may be a border."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

SPLIT_BYTES = 128 * 1024 * 1024
CLOCK_SLACK = 3_600_000  # ms that the clock of a store may have gone back between two segments


class Planned(Protocol):
    """What planning needs of an open store."""

    path: object

    @property
    def min_phy_offset(self) -> int: ...
    @property
    def max_phy_offset(self) -> int: ...


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
