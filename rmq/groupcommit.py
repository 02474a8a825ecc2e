# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the disk together: one syncs for all. RocketMQ's GroupCommitService, without a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

HEARD_S = 0.1  # until a thread looks by itself whether a sync has ended: an interrupt may end it before it tells
# Of the time that a sync takes the next one may wait so long for the threads that the last one served.
GATHERED, LEAST_GATHERED_S, MOST_GATHERED_S = 0.25, 100e-6, 2e-3
MOST_SKIPPED = 63

Entry = tuple[int, Any]  # where the records of a thread end, and a lock that is released to wake it


class GroupCommit:
    """How far the log is on disk, and whose turn it is to bring it there. An interrupt anywhere leaves it usable.

    Of threads that put in turn each sync would serve one half, while the other half waits for the next: whoever syncs
    lets those that the last sync has served come back first.
    """

    def __init__(self, synced: int) -> None:
        self.synced = synced  # phy offset
        self._is_syncing = False
        # `with` on a lock of C lets no signal in between taking and holding; a Condition's own `with` and wait do.
        self._lock = threading.Lock()
        self._waiting: list[Entry] = []
        self._sync_s = 0.0  # how long the last sync took, 0: it failed
        self._expected = 0  # threads that it served or that waited at its end
        self._gate: Any = None  # a lock, released when as many wait
        self._skipped = self._skips = 0  # gatherings left out since nobody came, and how many to leave out

    def sync(self, end: int, work: Callable[[], int]) -> None:
        """The log is on disk up to `end`: by another thread's work, or by ours, which returns how far it is then."""
        is_mine, synced, entry = False, -1, None
        try:
            while True:
                turn = threading.Lock()
                turn.acquire()
                with self._lock:
                    if self.synced >= end:
                        return
                    if not self._is_syncing:
                        is_mine = self._is_syncing = True
                        break
                    entry = end, turn
                    self._waiting.append(entry)
                    if self._gate is not None and len(self._waiting) + 1 >= self._expected:
                        gate, self._gate = self._gate, None
                        gate.release()
                turn.acquire(timeout=HEARD_S)
                self._leave(entry)
            self._gather()
            begin, self._sync_s = time.monotonic(), 0.0
            synced = work()
            self._sync_s = time.monotonic() - begin
        finally:
            if is_mine:  # without a call up to where the next may sync: an interrupt comes with a call
                self.synced, self._is_syncing = synced if synced > self.synced else self.synced, False
                self._expected = self._tell() + 1
            elif entry is not None and self.synced < end:  # interrupted
                self._leave(entry)
                self._tell()

    def note(self, end: int) -> None:
        """Who else has synced the log up to `end` says so."""
        with self._lock:
            self.synced = max(self.synced, end)
        self._tell()

    def _gather(self) -> None:
        """Before a sync: until all that are expected wait for it, for a while."""
        limit = min(self._sync_s * GATHERED, MOST_GATHERED_S)
        if limit < LEAST_GATHERED_S:
            return
        if self._skipped < self._skips:
            self._skipped += 1
            return
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            before = len(self._waiting)
            if before + 1 >= self._expected:
                return
            self._gate = gate
        begin = time.monotonic()
        gate.acquire(timeout=limit)
        waited = time.monotonic() - begin
        with self._lock:
            self._gate = None
            # Who came is served one sync earlier; all others were, this much later.
            has_paid = (len(self._waiting) - before) * self._sync_s > (before + 1) * waited
            self._skipped, self._skips = 0, 0 if has_paid else min(2 * self._skips + 1, MOST_SKIPPED)

    def _leave(self, entry: Entry) -> None:
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _tell(self) -> int:
        """Wake those that are served and one of the others, who syncs next. Returns how many there were of both."""
        with self._lock:
            count, woken = len(self._waiting), [turn for end, turn in self._waiting if end <= self.synced]
            self._waiting = [entry for entry in self._waiting if entry[0] > self.synced]
            if self._waiting and not self._is_syncing:
                woken.append(self._waiting.pop(0)[1])
        for turn in woken:
            turn.release()
        return count
