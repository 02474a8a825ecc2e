# SPDX-License-Identifier: Apache-2.0
"""Where a consumer's place is in a queue that was cleaned, cut, or began anew since."""

from __future__ import annotations

from typing import Any

import pytest

from rmq.queuereading import QueuePlace


class Queue:
    """As much of a queue as a place looks at: the phy offsets of its units from a first offset on."""

    def __init__(self, min_offset: int, phy_offsets: list[int]) -> None:
        self.min_offset, self._phy_offsets = min_offset, phy_offsets
        self.max_offset = min_offset + len(phy_offsets)

    def phy_offset_below(self, queue_offset: int) -> int:
        number = min(queue_offset, self.max_offset) - 1 - self.min_offset
        return self._phy_offsets[number] if number >= 0 else -1


class Log:
    """Whose messages cannot be read."""

    def segment_at(self, phy_offset: int) -> None:
        return None


PLACES = {
    "it grew": (Queue(0, [7, 8]), 2, Queue(0, [7, 8, 9]), 2),
    "nothing was consumed": (Queue(0, [7]), 0, Queue(0, [9]), 0),
    "its front was cleaned": (Queue(0, [5, 6, 7, 8]), 3, Queue(2, [7, 8]), 3),
    "cleaned over the place": (Queue(0, [5, 6, 7, 8]), 2, Queue(3, [8, 9]), 2),
    "begun at the first message": (Queue(3, [5, 6]), 3, Queue(3, [5, 6, 7]), 3),
    "anew, shorter": (Queue(0, [5, 6, 7]), 3, Queue(0, [8]), 0),
    "anew, as long": (Queue(0, [5, 6, 7]), 3, Queue(0, [8, 9, 10]), 0),
    "anew, longer": (Queue(0, [5, 6, 7]), 3, Queue(0, [8, 9, 10, 11]), 0),
    "anew, begun at the first message": (Queue(3, [5, 6]), 3, Queue(0, [8, 9, 10, 11]), 0),
    "gone": (Queue(0, [5, 6, 7]), 3, None, 0),
    "gone, begun at the first message": (Queue(3, [5, 6]), 3, None, 0),
    "cut": (Queue(0, [5, 6, 7]), 3, Queue(0, [5]), 1),
    "cut to nothing": (Queue(0, [5, 6, 7]), 3, Queue(0, []), 0),
    "not there yet": (None, 0, Queue(0, [5, 6, 7]), 0),
}


@pytest.mark.parametrize(("noted", "place", "queue", "expected"), PLACES.values(), ids=PLACES)
def test_where_a_place_is_now(noted: Queue | None, place: int, queue: Queue | None, expected: int) -> None:
    log: Any = Log()
    assert QueuePlace.of(log, noted, place).now(log, queue) == expected  # type: ignore[arg-type]
