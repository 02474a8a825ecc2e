# SPDX-License-Identifier: Apache-2.0
"""Queues of inner batches: for each topic and queue id the 46-byte units of its batches.

Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_batch_units
from rmq._core._layout import BATCH_UNIT_SIZE
from rmq.errors import CorruptFileError
from rmq.message import LARGEST_BASE
from rmq.paths import SEGMENT_NAME
from rmq.segment import is_hidden, opened


class BatchConsumeQueue:
    """A queue of inner batches (46-byte units), read only. Source: RocketMQ BatchConsumeQueue."""

    def __init__(self, directory: Path, topic: str, queue_id: int, min_phy_offset: int = 0) -> None:
        """min_phy_offset: of the log; units below it are of removed records. CorruptFileError."""
        self.directory = directory
        self.topic = topic
        self.queue_id = queue_id
        parts: list[npt.NDArray[np.int64]] = []
        self._firsts: list[tuple[int, Path]] = []  # number of the first unit of each file
        for path in sorted(path for path in directory.iterdir() if path.is_file() and not is_hidden(path.name)):
            if not SEGMENT_NAME.fullmatch(path.name) or path.stat().st_size % BATCH_UNIT_SIZE:
                raise CorruptFileError(path, 0, "no segment of 46-byte units")
            self._firsts.append((sum(len(part) for part in parts), path))
            with opened(path) as descriptor:
                while data := os.read(descriptor, BATCH_UNIT_SIZE * 4096):
                    parts.append(unpack_batch_units(data))
                    if len(parts[-1]) * BATCH_UNIT_SIZE < len(data):
                        break
        self.units = np.concatenate(parts) if parts else np.empty((0, 6), np.int64)
        self._check_order()
        self.max_offset = int(self.units[-1, 4] + self.units[-1, 5]) if len(self.units) else 0
        kept = self.units[self.units[:, 0] >= min_phy_offset, 4]
        self.min_offset = int(kept[0]) if len(kept) else self.max_offset

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
