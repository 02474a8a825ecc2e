# SPDX-License-Identifier: Apache-2.0
"""The one walk over the records of a range of the log, segment by segment, in batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from rmq._core._record import (
    CHECK_BODY_CRC,
    CHECK_RECORD_CRC,
    SCAN_BLANK,
    SCAN_FULL,
    SCAN_LIMIT,
    SCAN_TRUNCATED,
    SCAN_ZERO,
)
from rmq._core._recordbatch import RecordBatch
from rmq.logfiles import LogFiles

logger = logging.getLogger("rmq")

CHECK_CRC = CHECK_BODY_CRC | CHECK_RECORD_CRC


class LogScan:
    """Iterates over record batches of a range; then `phy_offset` and `stop` tell where and why it ended.

    blank_phy_offset: the end-of-segment record right before that place, -1 when there is none.
    Yields the same RecordBatch again and again: use its rows before going on.
    """

    def __init__(self, log: LogFiles, begin: int, end: int, batch: RecordBatch, skip_removed: bool,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.phy_offset = begin
        self.stop = SCAN_LIMIT
        self.blank_phy_offset = -1
        self._log, self._end, self._batch = log, end, batch
        self._skip_removed, self._options = skip_removed, options

    def __iter__(self) -> Iterator[RecordBatch]:
        while self.phy_offset < self._end:
            segment = self._log.segment_at(self.phy_offset)
            if segment is None and self._skip_removed and self.phy_offset < (low := self._log.min_phy_offset):
                logger.warning("phy offsets %d to %d were cleaned away while they were read", self.phy_offset, low)
                self.phy_offset, self.blank_phy_offset = low, -1
                continue
            if segment is None:
                # A blank record with no segment behind it closes nothing: the log ends before it.
                self.stop = SCAN_BLANK if self.blank_phy_offset >= 0 else SCAN_ZERO
                break
            batch = self._batch
            until = segment.reach(self.phy_offset, min(self._end, segment.end), batch.capacity)
            file = segment.holding(self.phy_offset, until)
            self.stop = batch.scan(file.map, file.start, self.phy_offset, until, behind=file.behind, **self._options)
            if self.stop == SCAN_TRUNCATED and batch.count:
                self.stop = SCAN_FULL  # seen whole in the next step, if it is
            file.check()
            self.phy_offset = batch.next_phy_offset
            if batch.count:
                self.blank_phy_offset = -1
                yield batch
                file.check()  # the rows borrow the map
            if self.stop == SCAN_BLANK:
                if self.blank_phy_offset < 0:
                    self.blank_phy_offset = self.phy_offset
                self.phy_offset = segment.end
            elif self.stop == SCAN_ZERO and self.blank_phy_offset >= 0:
                self.phy_offset = self.blank_phy_offset
                break
            elif self.stop not in (SCAN_FULL, SCAN_LIMIT):
                break
        if self.stop == SCAN_BLANK and self.blank_phy_offset >= 0 and self._log.segment_at(self.phy_offset) is None:
            self.phy_offset = self.blank_phy_offset
        self._batch.release()
