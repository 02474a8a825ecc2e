# SPDX-License-Identifier: Apache-2.0
"""Consume queues: where the units of messages belong, by the queue offsets that their records say.

Source: RocketMQ ConsumeQueue. Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import bisect
import logging
from typing import Protocol

import numpy as np

from rmq._core._consumequeue import unpack_units
from rmq._core._layout import RECORD_FIXED_SIZE, UNIT_PRE_BLANK_SIZE, UNIT_SIZE, UNIT_SIZE_OFFSET
from rmq.errors import RmqError
from rmq.paths import LARGEST_OFFSET
from rmq.queueunits import QueueUnits

logger = logging.getLogger("rmq")


class Told(Protocol):
    """What a dispatch knows of the log."""

    def holds(self, topic: str, queue_id: int, queue_offset: int | None, phy_offset: int, size: int) -> bool:
        """Whether there is a message of a queue and queue offset (None: any) at a phy offset, of a size."""

    def may_fill(self, count: int) -> bool:
        """Whether so many places more may be filled whose messages are missing."""


class QueueGapError(RmqError):
    """Units between the queue's end and the next one are missing: they must be dispatched first."""


class ConsumeQueue(QueueUnits):
    """One queue. In a read-only store units behind the files are kept in memory (`append` adds them there)."""

    # ---- write ----

    def append(self, first: int, data: bytes, lost_below: int | None = None, told: Told | None = None) -> None:
        """Add units with consecutive queue offsets from `first`. What is there and equal is left alone.

        When units before `first` are missing: QueueGapError. With `lost_below` (the phy offset from which on all is
        dispatched) an empty queue, or an exact one of earlier records only, gets pre-blank units in front; any other
        goes on at its end, as RocketMQ's does. So does a single record of an exact queue whose place another one has.
        OSError of the disk. Source: ConsumeQueue#putMessagePositionInfo.
        """
        with self._lock:
            if not self.is_exact:
                first, data = self._place_in_shifted(first, data)
            elif lost_below is not None and not 0 <= first < self.max_offset:
                first, data = self._without_older(first, data, told)
            if not data:
                return
            if first < 0 or first > self.max_offset:
                if lost_below is None:
                    raise QueueGapError(f"{self.directory}: units {self.max_offset} to {first - 1} are missing")
                if first > 0 and self.is_exact and self.end_phy_offset() <= lost_below:
                    self.cut(0) if self._writable else self.forget_files()
                if first < 0 or self.max_offset or first * UNIT_SIZE > LARGEST_OFFSET - self.files.segment_size:
                    logger.warning("%s: record has queue offset %d, %d is next", self.directory, first, self.max_offset)
                    data = self._filler(first, data, told) + data
                    first = self.max_offset
            if 0 <= first < self.max_offset:
                first, data = self._place_among(first, data, lost_below is not None, told)
            if not data:
                return
            if self._writable:
                self._append_to_files(first, data)
            else:
                if not self._tail:
                    self._tail_start = first
                    self.min_offset = first if self.max_offset == 0 else self.min_offset
                self._tail[(first - self._tail_start) * UNIT_SIZE :] = data  # by place: it may come again
            self.max_offset = first + len(data) // UNIT_SIZE

    def _without_older(self, first: int, data: bytes, told: Told | None) -> tuple[int, bytes]:
        """A record of an exact queue before its last one has its unit, or its place was never here."""
        done = int(np.searchsorted(unpack_units(data)[0], self.end_phy_offset()))
        if done and self._says(self.max_offset - 1, None, told):
            return first + done, data[done * UNIT_SIZE :]
        return first, data

    def _filler(self, first: int, data: bytes, told: Told | None) -> bytes:
        """What stands for messages that are missing before units of an exact queue that follow each other, so that
        these keep their places: copies of the first. Empty where the log had no room for so many messages.
        """
        missing, before = first - self.max_offset, self.max_offset - 1
        phy_offset = int(unpack_units(data)[0][0])
        if told is None or not self.is_exact or missing <= 0:
            return b""
        if missing <= (phy_offset - self.end_phy_offset(2)) // RECORD_FIXED_SIZE and \
                self._says(before, before + missing, told):  # fmt: skip
            unit = self._read(before, 1)  # it came alone, so that it went to the end
        elif missing <= (phy_offset - self.end_phy_offset()) // RECORD_FIXED_SIZE and len(data) > UNIT_SIZE:
            unit = data[:UNIT_SIZE]
        else:
            return b""
        return unit * missing if told.may_fill(missing) else b""

    def _place_among(self, first: int, data: bytes, is_dispatched: bool, told: Told | None) -> tuple[int, bytes]:
        """What of units that begin before the queue's end is still to be put, and where; what it replaces is cut off.

        is_dispatched: units in memory are judged, too. Of records that say one place of an exact queue a later one has
        it when another follows it: a broker made the topic anew. Else it is wrong, and goes to the end.
        """
        if not self._writable and self._is_over():
            self.forget_files()
            if first > 0:
                raise QueueGapError(f"{self.directory}: units 0 to {first - 1} are missing")
            return first, data
        is_newer = self._is_newer(first, data)
        is_repeated = is_newer and first > 0 and self._ends_in_log(told)
        if is_newer and not is_repeated and not self._writable and not self._says(self.max_offset - 1, None, told):
            self.forget_files()  # the queue had ended and begins again
            return first, data
        if is_repeated or not self._judges or (self._tail and not is_dispatched and not is_newer):
            done = min(len(data) // UNIT_SIZE, self.max_offset - first)
            return first + done, data[done * UNIT_SIZE :]
        last = self.max_offset - 1
        if is_newer and first - 1 != last and self._says(last, first - 1, told):
            first, data = first - 1, self._read(last, 1) + data  # it had come alone, and another follows it now
            self.cut(first)
            return first, data
        while data and first < self.max_offset:
            equal = _equal_units(self._read(first, len(data) // UNIT_SIZE), data)
            first, data = first + equal, data[equal * UNIT_SIZE :]
            if not data or first == self.max_offset:
                break
            is_newer = self._is_newer(first, data)
            if not is_newer and self._has_earlier(first, data, told):
                first, data = first + 1, data[UNIT_SIZE:]
                continue
            is_held = self._says(first, first, told)
            if is_newer and is_held and len(data) == UNIT_SIZE:
                return self.max_offset, data
            if is_newer or not is_held:
                self.cut(first)
                return first, data
            first, data = first + 1, data[UNIT_SIZE:]
        return self._without_older(first, data, told) if data else (first, data)

    def _is_over(self) -> bool:
        """Whether zeros stand where the last unit was: its file was removed, and made again for fewer units."""
        _, size, _ = self.read(self.max_offset - 1, 1)
        return len(size) > 0 and size[0] == 0

    def _is_newer(self, first: int, data: bytes) -> bool:
        """Whether units are of later records than the queue's last one. Size 0: a recovery's cut."""
        last, size, _ = self.read(self.max_offset - 1, 1)
        return bool(size[0] > 0 and unpack_units(data[:UNIT_SIZE])[0][0] > last[0]) if len(last) else first == 0

    def _ends_in_log(self, told: Told | None) -> bool:
        """Whether the last unit of a broker's queue is of a message of it that is there. Made anew, the queue would
        begin at 0: a queue offset behind that, which comes again, was given twice, and its first message keeps it.
        """
        phy_offset, size, _ = self.read(self.max_offset - 1, 1)
        return not self.is_exact and told is not None and len(size) > 0 and \
            told.holds(self.topic, self.queue_id, None, int(phy_offset[0]), int(size[0]))

    def _has_earlier(self, first: int, data: bytes, told: Told | None) -> bool:
        """Whether a place of a broker's queue has an earlier message of it than the unit for it: the offset was given
        twice, and the first one keeps it."""
        phy_offset, size, _ = self.read(first, 1)
        return not self.is_exact and told is not None and len(size) > 0 and \
            phy_offset[0] < unpack_units(data[:UNIT_SIZE])[0][0] and \
            told.holds(self.topic, self.queue_id, first, int(phy_offset[0]), int(size[0]))

    def _says(self, number: int, queue_offset: int | None, told: Told | None) -> bool:
        """Whether a unit of an exact queue is of a record of it that says a queue offset (None: any)."""
        phy_offset, size, _ = self.read(number, 1)
        return self.is_exact and told is not None and len(size) > 0 and \
            told.holds(self.topic, self.queue_id, queue_offset, int(phy_offset[0]), int(size[0]))

    def _place_in_shifted(self, first: int, data: bytes) -> tuple[int, bytes]:
        """Where units of records from queue offset `first` on belong in a broker's queue, whose numbers may differ: at
        the unit that has the first record. One that is not judged takes none up to its last record, which have theirs
        or never had one. Source: ConsumeQueue#putMessagePositionInfo."""
        def phy_offset_of(number: int) -> int:
            found = self._read(number, 1)[:UNIT_SIZE_OFFSET]
            return int.from_bytes(found or b"\xff", "big", signed=True)  # -1 for none

        last, size, _ = self.read(self.max_offset - 1, 1)
        if not self._judges and len(size) and 0 < size[0] < UNIT_PRE_BLANK_SIZE:
            done = int(np.searchsorted(unpack_units(data)[0], last[0], side="right"))
            return first + done, data[done * UNIT_SIZE :]
        phy_offset = int.from_bytes(data[:UNIT_SIZE_OFFSET], "big", signed=True)
        if first < 0 or not len(last) or last[0] < phy_offset:
            return first, data
        lowest = min(self.first_offset, self.max_offset)
        place = bisect.bisect_left(range(self.max_offset), phy_offset, lo=lowest, key=phy_offset_of)
        return place if phy_offset_of(place) == phy_offset else first, data

    def _append_to_files(self, first: int, data: bytes) -> None:
        if first and (first > self.max_offset or not self.files.starts):
            self.files.write_pre_blank(first)
            self.min_offset = first
        self.files.write(first, data)

    def follow_files(self, phy_offset: int, min_phy_offset: int = 0) -> None:
        """Look at the files again; in memory stay the units whose records lie at or behind a phy offset.

        For readers. The writer has the units below it in its files, unless it removed them with their records: a queue
        with none at or behind min_phy_offset may have begun at 0 again.
        """
        with self._lock:
            last, _, _ = self.read(self.max_offset - 1, 1)
            is_over = not len(last) or last[0] < min_phy_offset
            offsets, _, _ = unpack_units(self._tail)
            done = int(np.searchsorted(offsets, phy_offset))
            kept, kept_start = self._tail[done * UNIT_SIZE :], self._tail_start + done
            self.files.forget_open()
            fresh = ConsumeQueue(self.directory, self.topic, self.queue_id, self.files.segment_size, self._cache,
                                 writable=False, is_exact=self.is_exact,
                                 bridges_gap=self.files.bridges_gap)  # fmt: skip
            if fresh.max_offset < kept_start and is_over:
                kept_start = fresh.max_offset
                self.lives += 1
            if fresh.max_offset < kept_start:
                return  # a recovery took them off again: only the tail has them
            # A unit that was removed meanwhile lay below it.
            end = bisect.bisect_left(range(fresh.max_offset), True, lo=fresh.min_offset,
                                     key=lambda n: bool((fresh.read(n, 1)[0] >= phy_offset).any()))  # fmt: skip
            if not is_over:  # what was seen is not dispatched again
                end = max(end, min(self.max_offset, fresh.max_offset))
            self.files.take(fresh.files)
            self._tail, self._tail_start = kept, kept_start
            self.max_offset = kept_start + len(kept) // UNIT_SIZE if kept else end

    # ---- cleaning ----

    def count_below(self, min_phy_offset: int) -> int:
        """Segments in front whose records lie below a phy offset; never the one with the last unit. Source:
        MappedFileQueue#deleteExpiredFileByOffset, which looks at the last unit only."""
        size = self.files.segment_size // UNIT_SIZE
        starts = self.files.starts  # a put may begin another file meanwhile, of which nothing is known
        for count, start in enumerate(starts):
            following = start // UNIT_SIZE + size
            for first in (following - 1, following - size):
                offsets, _, _ = self.read(first, following - first)
                is_below = (offsets >= 0) & (offsets < min_phy_offset)
                if following >= self.max_offset or not len(offsets) or not is_below.all():
                    return count
        return len(starts)

    def forget_first(self, count: int) -> None:
        """The queue's files begin behind the first `count` segments, which the caller removes."""
        with self._lock:
            self.files.forget_first(count)


def _equal_units(some: bytes, others: bytes) -> int:
    """How many units are equal before the first that differs."""
    size = min(len(some), len(others))
    if some[:size] == others[:size]:
        return size // UNIT_SIZE
    differs = np.frombuffer(some, np.uint8, size) != np.frombuffer(others, np.uint8, size)
    return int(differs.argmax()) // UNIT_SIZE
