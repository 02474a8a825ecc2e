# SPDX-License-Identifier: Apache-2.0
"""Queues of inner batches: for each topic and queue id the 46-byte units of its batches.

Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from rmq._core._consumequeue import unpack_batch_units
from rmq._core._layout import BATCH_UNIT_SIZE
from rmq.errors import CorruptFileError
from rmq.paths import SEGMENT_NAME
from rmq.segment import opened


class BatchConsumeQueue:
    """A queue of inner batches (46-byte units), read only. Source: RocketMQ BatchConsumeQueue."""

    def __init__(self, directory: Path, topic: str, queue_id: int) -> None:
        self.directory = directory
        self.topic = topic
        self.queue_id = queue_id
        parts = []
        for path in sorted(path for path in directory.iterdir() if path.is_file()):
            if not SEGMENT_NAME.fullmatch(path.name) or path.stat().st_size % BATCH_UNIT_SIZE:
                raise CorruptFileError(path, 0, "no segment of 46-byte units")
            with opened(path) as descriptor:
                while data := os.read(descriptor, BATCH_UNIT_SIZE * 4096):
                    parts.append(unpack_batch_units(data))
                    if len(parts[-1]) * BATCH_UNIT_SIZE < len(data):
                        break
        self.units = np.concatenate(parts) if parts else np.empty((0, 6), np.int64)
        self.min_offset = int(self.units[0, 4]) if len(self.units) else 0
        self.max_offset = int(self.units[-1, 4] + self.units[-1, 5]) if len(self.units) else 0

    def unit_of(self, queue_offset: int) -> tuple[int, int, int, int] | None:
        """(phy_offset, size, base offset, count) of the batch that holds a queue offset, or None."""
        number = int(np.searchsorted(self.units[:, 4], queue_offset, side="right")) - 1
        if number < 0 or queue_offset >= self.units[number, 4] + self.units[number, 5]:
            return None
        unit = self.units[number]
        return int(unit[0]), int(unit[1]), int(unit[4]), int(unit[5])
