# SPDX-License-Identifier: Apache-2.0
"""What the log will be written into, made ready off the put path: blocks, their zeros, the next segment."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from rmq.commitlog import CommitLog
from rmq.logsegment import RESERVE_AHEAD, Segment
from rmq.sleeper import Sleeper, waking

logger = logging.getLogger("rmq")

SMALLEST = 4 * 1024 * 1024  # segments below it are made by the put that needs them
FILL_STEP = 1024 * 1024  # a sync of the log may have to wait for so many zeros
FILL_AHEAD = 64 * 1024 * 1024
WARM_AHEAD = 16 * 1024 * 1024
NOTHING_DUE = 2**63 - 1


class Preparer:
    """Keeps blocks ahead of the log's end, in the thread rmq-prepare; what it cannot do the next put does, or tells.

    Under SYNC_FLUSH they are written with zeros: syncing a record then changes no metadata of the file, and many at a
    time: beside them a sync takes longer. Else their pages are brought into the cache, while batches are small: the
    first store into a folio of 2 MiB takes milliseconds.
    """

    def __init__(self, log: CommitLog, lock: object, *, fills: bool, failed: Callable[[OSError], None]) -> None:
        """lock: the store's, which must not go amid a step. failed: told of a sync that failed."""
        self.due_at = NOTHING_DUE  # the log's end from which on there is something to do
        self.is_stopped = False
        self._log, self._lock = log, lock
        self._fills = fills
        self._failed = failed
        self._read = bytearray(FILL_STEP)
        self._sleeper = Sleeper()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._log.segment_size >= SMALLEST:
            self.due_at = self._log.position + 1
            mine = weakref.ref(self, waking(self._sleeper))
            thread = threading.Thread(target=_run, name="rmq-prepare", daemon=True, args=(mine, self._sleeper))
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """End the thread; a step under way is finished."""
        self.is_stopped, self.due_at = True, NOTHING_DUE
        self._sleeper.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        self._sleeper.wake()

    def work(self) -> None:
        """All that is to do now."""
        position = self._log.position
        try:
            self._read_on()
            while not self.is_stopped and self.step():
                position = self._log.position
        except Exception as error:  # the put that needs it meets it again
            logger.warning("the log is not prepared: %r", error)
        if self.due_at != NOTHING_DUE:
            ahead = (FILL_AHEAD if self._fills else WARM_AHEAD) // 2
            self.due_at = min(position + ahead, self._log.max_phy_offset)  # where the next segment begins

    def step(self) -> bool:
        """One piece of work, of some milliseconds; false when there is none."""
        log, position = self._log, self._log.position
        segment = log.segments[-1] if log.segments else None
        if segment is None or not segment.start <= position < segment.end:
            return False
        if self._prepare(segment, position - segment.start):
            return True
        if segment.end - position > RESERVE_AHEAD:
            return False
        following = log.following.prepare()
        return self._prepare(following, 0)

    def _read_on(self) -> None:
        """Where large batches come, let no dispatch of them read ahead behind the log's end: megabytes of zeros."""
        log, segment = self._log, self._log.segments[-1] if self._log.segments else None
        position, behind = log.position, not log.writer.has_written
        log.writer.has_written = False
        if segment is not None and segment.start <= position < segment.end:
            segment.file.read_on(position - segment.start, behind=behind)
            if log.tail.planned >= segment.end:  # a put left it meanwhile
                segment.file.read_on(segment.end - segment.start, behind=True)

    def _prepare(self, segment: Segment, used: int) -> bool:
        file = segment.file
        if self._fills and file.filled < min(file.size, used + FILL_AHEAD):
            try:
                file.fill(used, FILL_STEP)
            except OSError as error:
                if getattr(error, "failed_sync", False):
                    self._failed(error)
                raise
            return True
        if file.reserved < min(file.size, used + RESERVE_AHEAD // 2):
            file.reserve(used, min(file.size, used + RESERVE_AHEAD), 0)
            return True
        if not self._fills and self._log.writer.is_small and file.warmed < min(file.size, used + WARM_AHEAD):
            file.warm(used, self._read)
            return True
        return False


def _run(reference: weakref.ref[Preparer], sleeper: Sleeper) -> None:
    """Holds the preparer only while it works, so that a store nobody holds can go."""
    while True:
        sleeper.sleep()
        preparer = reference()
        if preparer is None or preparer.is_stopped:
            return
        preparer.work()
        del preparer


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A method that does not keep its object: it is called as long as that is there."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        if (found := reference()) is not None:
            found(*arguments)

    return call
