# SPDX-License-Identifier: Apache-2.0
"""The units of one consume queue by queue offset: those in its files, and of a reader those behind them in memory.

Source: RocketMQ ConsumeQueue. Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_units
from rmq._core._layout import UNIT_PRE_BLANK_SIZE, UNIT_SIZE
from rmq.errors import CorruptFileError
from rmq.filecache import FileCache
from rmq.paths import LMQ_PREFIX
from rmq.queuefiles import QueueFiles
from rmq.segment import LOOKS

Units = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]


class QueueUnits:
    """Units of one queue.

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
        self.is_light = topic.startswith(LMQ_PREFIX)  # its units point to messages of other topics
        self.min_offset = self.max_offset = 0
        self.lives = 0  # how often it began at 0 again
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
            count = files.valid_in(start)
            if not self._writable and not files.is_filled(start):
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

    def end_phy_offset(self, place: int = 1) -> int:
        """End of the record of the last unit, or of one before it; 0 where there is none, or a pre-blank one."""
        phy_offset, size, _ = self.read(self.max_offset - place, 1)
        return int(phy_offset[0]) + int(size[0]) if len(size) and size[0] != UNIT_PRE_BLANK_SIZE else 0

    def phy_offset_below(self, queue_offset: int) -> int:
        """Of the record of the last unit below a queue offset; -1 where there is none, or a pre-blank one."""
        phy_offset, size, _ = self.read(min(queue_offset, self.max_offset) - 1, 1)
        return int(phy_offset[0]) if len(size) and size[0] != UNIT_PRE_BLANK_SIZE else -1

    def correct_min_offset(self, min_phy_offset: int) -> None:
        """Move min_offset to the first unit, not a pre-blank one, of a record in the log. Source: #correctMinOffset."""
        def in_log(queue_offset: int) -> bool:
            phy_offset, size, _ = self.read(queue_offset, 1)
            if not len(size) or size[0] == UNIT_PRE_BLANK_SIZE:
                return False
            return bool(phy_offset[0] >= min_phy_offset or phy_offset[0] < 0 or size[0] <= 0)  # damage shows when read

        lowest = min(self.first_offset, self.max_offset)
        self.min_offset = bisect.bisect_left(range(self.max_offset), True, lo=lowest, key=in_log)

    # ---- end ----

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
            self.lives += 1

    @property
    def behind(self) -> int:
        """Units in memory alone."""
        return len(self._tail) // UNIT_SIZE

    @property
    def tail_size(self) -> int:
        """Bytes of units kept in memory."""
        return len(self._tail)
