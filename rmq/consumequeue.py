# SPDX-License-Identifier: Apache-2.0
"""Consume queues: for each topic and queue id the 20-byte units of its messages, by queue offset.

Source: RocketMQ ConsumeQueue. Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_units, valid_units
from rmq._core._layout import UNIT_PRE_BLANK_SIZE, UNIT_SIZE
from rmq.errors import CorruptFileError, RmqError
from rmq.paths import LARGEST_OFFSET
from rmq.queuefiles import QueueFiles
from rmq.segment import LOOKS, FileCache

logger = logging.getLogger("rmq")

Units = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]


class QueueGapError(RmqError):
    """Units between the queue's end and the next one are missing: they must be dispatched first."""


class ConsumeQueue:
    """One queue. In a read-only store units behind the files are kept in memory (`append` adds them there).

    min_offset, max_offset: queue offsets [min, max) that have a unit.
    """

    def __init__(self, directory: Path, topic: str, queue_id: int, segment_size: int, cache: FileCache, *,
                 writable: bool, is_exact: bool, trusted: int | None = None, bridges_gap: bool = False,
                 judges_files: bool = False) -> None:  # fmt: skip
        """is_exact: record and unit number agree; a broker that lost units goes on with a shift between them.
        trusted: of the files only units of records that end at or below it count (None: all).
        bridges_gap: where a file is missing the queue ends; whoever opens it knows what units there must be.
        judges_files: units that differ from those appended give way; for writers and in exact queues always.
        """
        self.directory, self.topic, self.queue_id = directory, topic, queue_id
        self.is_exact = is_exact
        self.min_offset = self.max_offset = 0
        self.files = QueueFiles(directory, segment_size, cache, writable=writable, bridges_gap=bridges_gap)
        self._cache, self._writable = cache, writable
        self._judges = judges_files or is_exact or writable
        self._tail = bytearray()  # units from queue offset _tail_start on, of a reader only
        self._tail_start = 0
        self._lock = threading.RLock()
        for attempt in range(LOOKS, 0, -1):
            try:
                self._load(is_last=writable or attempt == 1)
                break
            except (FileNotFoundError, CorruptFileError):
                if writable or attempt == 1:
                    raise  # else a writer's recovery may have removed a file meanwhile
        if trusted is not None:
            self.cut_where(trusted, lambda *place: True)

    def _load(self, is_last: bool) -> None:
        """List segments and find the end: the last valid unit of the last segment that begins with one.

        is_last: a missing file is no file that another process has just removed.
        """
        files = self.files
        files.look(is_last=is_last)
        self.min_offset = self.max_offset = files.first_offset() or 0
        for start in reversed(files.starts):
            first = start // UNIT_SIZE
            count = bisect.bisect_left(range(first, first + files.segment_size // UNIT_SIZE), True,
                                       key=lambda place: valid_units(files.read(place, 1)) != 1)  # fmt: skip
            if not self._writable and not files.path(start).exists():
                raise FileNotFoundError(files.path(start))  # cleaned away: what was read of it tells nothing
            if count:
                self.max_offset = first + count
                break

    # ---- read ----

    def read(self, queue_offset: int, count: int) -> Units:
        """(phy_offset int64, size int32, tags_code int64) of up to `count` units from a queue offset on."""
        return unpack_units(self._read(queue_offset, count))

    def _read(self, queue_offset: int, count: int) -> bytes:
        with self._lock:
            count = max(0, min(count, self.max_offset - queue_offset))
            in_files = max(0, min(count, self._tail_start - queue_offset)) if self._tail else count
            data = self.files.read(queue_offset, in_files) if in_files else b""
            if in_files < count and len(data) == in_files * UNIT_SIZE:
                first = (queue_offset + in_files - self._tail_start) * UNIT_SIZE
                data += bytes(self._tail[first : first + (count - in_files) * UNIT_SIZE])
            return data

    @property
    def first_offset(self) -> int:
        """Queue offset of the first unit in the files, or of those in memory where these took the files' place."""
        with self._lock:
            first = self.files.first_offset()
            return self._tail_start if first is None else min(first, self._tail_start) if self._tail else first

    @property
    def files_end(self) -> int:
        """Behind the last unit in the files: one beside us that writes through a map may be at it still."""
        with self._lock:
            return self._tail_start if self._tail else self.max_offset

    def place_of(self, queue_offset: int) -> tuple[Path, int]:
        """File and position of a unit."""
        return self.files.place_of(queue_offset)

    def behind_lost_file(self, queue_offset: int) -> int:
        """QueueFiles.behind_lost, of the files as they are in this moment."""
        with self._lock:
            return self.files.behind_lost(queue_offset)

    def end_phy_offset(self) -> int:
        """End of the record of the last unit; 0 for an empty queue or one that ends with pre-blank units."""
        phy_offset, size, _ = self.read(self.max_offset - 1, 1)
        return int(phy_offset[0]) + int(size[0]) if len(size) and size[0] != UNIT_PRE_BLANK_SIZE else 0

    def correct_min_offset(self, min_phy_offset: int) -> None:
        """Move min_offset to the first unit, not a pre-blank one, of a record in the log. Source: #correctMinOffset."""
        def in_log(queue_offset: int) -> bool:
            phy_offset, size, _ = self.read(queue_offset, 1)
            if not len(size) or size[0] == UNIT_PRE_BLANK_SIZE:
                return False
            return bool(phy_offset[0] >= min_phy_offset or phy_offset[0] < 0 or size[0] <= 0)  # damage shows when read

        lowest = min(self.first_offset, self.max_offset)
        self.min_offset = bisect.bisect_left(range(self.max_offset), True, lo=lowest, key=in_log)

    # ---- write ----

    def append(self, first: int, data: bytes, lost_below: int | None = None) -> None:
        """Add units with consecutive queue offsets from `first`. What is there and equal is left alone.

        When units before `first` are missing: QueueGapError. With `lost_below` (the phy offset from which on all is
        dispatched) an empty queue, or an exact one of earlier records only, gets pre-blank units in front; any other
        goes on at its end, as RocketMQ's does. OSError of the disk. Source: ConsumeQueue#putMessagePositionInfo.
        """
        with self._lock:
            if not self.is_exact:
                first, data = self._place_in_shifted(first, data)
                if not data:
                    return
            if first < 0 or first > self.max_offset:
                if lost_below is None:
                    raise QueueGapError(f"{self.directory}: units {self.max_offset} to {first - 1} are missing")
                if first > 0 and self.is_exact and self.end_phy_offset() <= lost_below:
                    self.cut(0) if self._writable else self.forget_files()
                if first < 0 or self.max_offset or first * UNIT_SIZE > LARGEST_OFFSET - self.files.segment_size:
                    logger.warning("%s: record has queue offset %d, %d is next", self.directory, first, self.max_offset)
                    first = self.max_offset
                    if self.is_exact:  # a record before the last one has its unit, or its place was never here
                        done = int(np.searchsorted(unpack_units(data)[0], self.end_phy_offset()))
                        data = data[done * UNIT_SIZE :]
            if not self._writable and 0 <= first < self.max_offset and self._is_begun_again(first, data):
                self.forget_files()
            if first < self.max_offset:
                common = min(len(data) // UNIT_SIZE, self.max_offset - first)
                is_judged = self._judges and (not self._tail or lost_below is not None)
                if is_judged and self._read(first, common) != data[: common * UNIT_SIZE]:
                    self.cut(first)
                else:
                    first, data = first + common, data[common * UNIT_SIZE :]
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

    def _is_begun_again(self, first: int, data: bytes) -> bool:
        """Whether units of lower queue offsets are of later records: the queue had ended. Size 0: a recovery's cut."""
        last, size, _ = self.read(self.max_offset - 1, 1)
        return bool(size[0] > 0 and unpack_units(data[:UNIT_SIZE])[0][0] > last[0]) if len(last) else first == 0

    def _place_in_shifted(self, first: int, data: bytes) -> tuple[int, bytes]:
        """Where units of records from queue offset `first` on belong in a broker's queue, whose numbers may differ: at
        the unit that has the first record. One that is not judged takes none up to its last record, which have theirs
        or never had one. Source: ConsumeQueue#putMessagePositionInfo."""
        def phy_offset_of(number: int) -> int:
            return int.from_bytes(self._read(number, 1)[:8] or b"\xff", "big", signed=True)  # -1 for none

        last, size, _ = self.read(self.max_offset - 1, 1)
        if not self._judges and len(size) and 0 < size[0] < UNIT_PRE_BLANK_SIZE:
            done = int(np.searchsorted(unpack_units(data)[0], last[0], side="right"))
            return first + done, data[done * UNIT_SIZE :]
        phy_offset = int.from_bytes(data[:8], "big", signed=True)
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

    def cut(self, max_offset: int) -> None:
        """End the queue at a queue offset: units from there on are zero, later segments gone; a reader forgets them."""
        self.max_offset = min(self.max_offset, max_offset)
        self.min_offset = min(self.min_offset, self.max_offset)
        if self._writable:
            self.files.cut(max_offset)
            return
        self.files.starts = self.files.starts if self.max_offset else []
        self._tail = self._tail[: max(0, self.max_offset - self._tail_start) * UNIT_SIZE]

    def end_at_gap(self, max_offset: int) -> None:
        """cut, and remove the files that are not the queue's own, before it grows into their names."""
        self.files.remove_strangers()
        self.cut(max_offset)

    def cut_where(self, limit: int, is_own: Callable[[int, int, int], bool],
                  goes_on: Callable[[], bool] = lambda: False) -> bool:  # fmt: skip
        """Drop units of records that end past `limit`, then those at the end whose record is not the queue's.

        is_own(queue_offset, phy_offset, size) judges the record; a unit in the middle is left alone, whatever became of
        its record. goes_on: asked at the end so found; if so the files stay as they are. Returns its answer.
        """
        def is_past(queue_offset: int) -> bool:
            phy_offset, size, _ = self.read(queue_offset, 1)
            if not len(size) or size[0] == UNIT_PRE_BLANK_SIZE:  # removed meanwhile, as what lies before it
                return False
            # Behind a lost page stand zeros, then newer units: neither may count as the queue's.
            return bool(size[0] <= 0 or phy_offset[0] < 0 or int(phy_offset[0]) + int(size[0]) > limit)

        first = self.files.first_offset() or 0
        end = bisect.bisect_left(range(self.max_offset), True, lo=min(first, self.max_offset), key=is_past)
        while end > first:
            phy_offset, size, _ = self.read(end - 1, 1)
            if not len(size) or size[0] == UNIT_PRE_BLANK_SIZE or is_own(end - 1, int(phy_offset[0]), int(size[0])):
                break
            end -= 1
        if end == first and self.files.bridges_gap and not any(self.read(first, 1)[1] == UNIT_PRE_BLANK_SIZE):
            end = 0  # no cleaning leaves a queue without a unit: its first files are missing
        self.max_offset = end
        if goes_on():
            return True
        self.cut(end)
        return False

    def forget_files(self) -> None:
        """For readers: take the queue as empty, to be derived in memory, because files of it are gone."""
        with self._lock:
            self.files.starts, self._tail = [], bytearray()
            self.min_offset = self.max_offset = self._tail_start = 0

    def follow_files(self, phy_offset: int, min_phy_offset: int = 0) -> None:
        """Look at the files again; in memory stay the units whose records lie at or behind a phy offset.

        For readers. The writer has the units below it in its files, unless it removed them with their records: a queue
        with none at or behind min_phy_offset may have begun at 0 again.
        """
        with self._lock:
            last, _, _ = self.read(self.max_offset - 1, 1)
            is_over = self.is_exact and (not len(last) or last[0] < min_phy_offset)
            offsets, _, _ = unpack_units(self._tail)
            done = int(np.searchsorted(offsets, phy_offset))
            kept, kept_start = self._tail[done * UNIT_SIZE :], self._tail_start + done
            self.files.forget_open()
            fresh = ConsumeQueue(self.directory, self.topic, self.queue_id, self.files.segment_size, self._cache,
                                 writable=False, is_exact=self.is_exact,
                                 bridges_gap=self.files.bridges_gap)  # fmt: skip
            if fresh.max_offset < kept_start and is_over:
                kept_start = fresh.max_offset
            if fresh.max_offset < kept_start:
                return  # a recovery took them off again: only the tail has them
            # A unit that was removed meanwhile lay below it.
            end = bisect.bisect_left(range(fresh.max_offset), True, lo=fresh.min_offset,
                                     key=lambda n: bool((fresh.read(n, 1)[0] >= phy_offset).any()))  # fmt: skip
            self.files.starts, self._tail, self._tail_start = fresh.files.starts, kept, kept_start
            self.max_offset = kept_start + len(kept) // UNIT_SIZE if kept else end

    # ---- cleaning ----

    def count_below(self, min_phy_offset: int) -> int:
        """Segments in front whose records lie below a phy offset; never the one with the last unit. Source:
        MappedFileQueue#deleteExpiredFileByOffset, which looks at the last unit only."""
        size = self.files.segment_size // UNIT_SIZE
        for count, start in enumerate(self.files.starts):
            following = start // UNIT_SIZE + size
            for first in (following - 1, following - size):
                offsets, _, _ = self.read(first, following - first)
                is_below = (offsets >= 0) & (offsets < min_phy_offset)
                if following >= self.max_offset or not len(offsets) or not is_below.all():
                    return count
        return len(self.files.starts)

    def forget_first(self, count: int) -> None:
        """The queue's files begin behind the first `count` segments, which the caller removes."""
        with self._lock:
            self.files.forget_first(count)

    @property
    def tail_size(self) -> int:
        """Bytes of units kept in memory."""
        return len(self._tail)
