# SPDX-License-Identifier: Apache-2.0
"""Queues of inner batches: for each topic and queue id the 46-byte units of its batches.

Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_batch_units
from rmq._core._layout import BATCH_UNIT_SIZE
from rmq.errors import CorruptFileError
from rmq.message import LARGEST_BASE
from rmq.paths import SEGMENT_NAME, queue_directories
from rmq.segment import is_hidden, opened

_NO_UNITS = np.empty((0, 6), np.int64)


class BatchConsumeQueue:
    """A queue of inner batches (46-byte units), read only. Source: RocketMQ BatchConsumeQueue."""

    lives = 0  # as of QueueUnits: a look that finds other files makes another object

    def __init__(self, directory: Path, topic: str, queue_id: int, min_phy_offset: int = 0,
                 known: BatchConsumeQueue | None = None) -> None:  # fmt: skip
        """min_phy_offset: of the log; units below it are of removed records. known: the queue as it was, whose units
        are not read again when the last of them still stands. CorruptFileError."""
        self.directory = directory
        self.topic = topic
        self.queue_id = queue_id
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not is_hidden(path.name))
        for path in paths:
            if not SEGMENT_NAME.fullmatch(path.name) or path.stat().st_size % BATCH_UNIT_SIZE:
                raise CorruptFileError(path, 0, "no segment of 46-byte units")
        self._firsts: list[tuple[int, Path]] = []  # number of the first unit of each file
        count, at = 0, 0  # at: where reading begins in the first file that is read
        parts: list[npt.NDArray[np.int64]] = []
        if known is not None and (place := known._last_place(paths)) is not None:
            count, at, parts = len(known.units), place[1] + BATCH_UNIT_SIZE, [known.units]
            self._firsts = [item for item in known._firsts if item[1] < place[0]]
        for path in paths[len(self._firsts) :]:
            self._firsts.append((count - at // BATCH_UNIT_SIZE, path))
            for part in _units_from(path, at):
                parts.append(part)
                count += len(part)
            at = 0
        self.units: npt.NDArray[np.int64] = parts[0] if len(parts) == 1 else np.concatenate([_NO_UNITS, *parts])
        self._check_order()
        self.max_offset = int(self.units[-1, 4] + self.units[-1, 5]) if len(self.units) else 0
        kept = self.units[self.units[:, 0] >= min_phy_offset, 4]
        self.min_offset = int(kept[0]) if len(kept) else self.max_offset

    def _last_place(self, paths: list[Path]) -> tuple[Path, int] | None:
        """Where the last unit is that stands there still, of files that begin with ours; None: files have changed."""
        if not len(self.units) or paths[: len(self._firsts)] != [path for _, path in self._firsts]:
            return None
        path, position = self.place_of(len(self.units) - 1)
        part = next(_units_from(path, position), _NO_UNITS)
        return (path, position) if np.array_equal(part[:1], self.units[-1:]) else None

    def _check_order(self) -> None:
        bases, counts = self.units[:, 4], self.units[:, 5]
        wrong = bases > LARGEST_BASE
        wrong[1:] |= bases[1:] < bases[:-1] + counts[:-1]
        if wrong.any():
            raise CorruptFileError(*self.place_of(int(np.argmax(wrong))), "unit is out of order")

    def place_of(self, number: int) -> tuple[Path, int]:
        """File and position of a unit."""
        first, path = next(item for item in reversed(self._firsts) if item[0] <= number)
        return path, (number - first) * BATCH_UNIT_SIZE

    def unit_of(self, queue_offset: int) -> int | None:
        """Number of the unit of the batch that holds a queue offset, or of the next one; None behind the last."""
        number = int(np.searchsorted(self.units[:, 4] + self.units[:, 5], queue_offset, side="right"))
        return number if number < len(self.units) else None

    def phy_offset_below(self, queue_offset: int) -> int:
        """Of the batch that holds the last message below a queue offset; -1 where there is none."""
        number = int(np.searchsorted(self.units[:, 4], queue_offset)) - 1
        return int(self.units[number, 0]) if number >= 0 else -1


def _units_from(path: Path, position: int) -> Iterator[npt.NDArray[np.int64]]:
    """The units of a file from a position on, as far as they are valid, in parts."""
    with opened(path) as descriptor:
        while data := os.pread(descriptor, BATCH_UNIT_SIZE * 4096, position):
            yield (part := unpack_batch_units(data))
            position += len(data)
            if len(part) * BATCH_UNIT_SIZE < len(data):
                return


def batch_queues(root: Path, min_phy_offset: int) -> Iterator[BatchConsumeQueue]:
    """The queues of inner batches below a directory. CorruptFileError."""
    for directory, topic, queue_id in queue_directories(root):
        yield BatchConsumeQueue(directory, topic, queue_id, min_phy_offset)


def batch_queue(root: Path, topic: str, queue_id: int, min_phy_offset: int,
                known: BatchConsumeQueue | None) -> BatchConsumeQueue | None:  # fmt: skip
    """The queue of inner batches of a topic and number. known: one as it was read, maybe this one. CorruptFileError."""
    for directory, own_topic, own_id in queue_directories(root):
        if (own_topic, own_id) == (topic, queue_id):
            is_known = known is not None and known.directory == directory
            return BatchConsumeQueue(directory, topic, queue_id, min_phy_offset, known if is_known else None)
    return None
