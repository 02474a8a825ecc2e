# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the disk together: one syncs for all. RocketMQ's GroupCommitService, without a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

HEARD_S = 0.1  # until a thread looks by itself whether a sync has ended: an interrupt may end it before it tells


class GroupCommit:
    """How far the log is on disk, and whose turn it is to bring it there. An interrupt anywhere leaves it usable."""

    def __init__(self, synced: int) -> None:
        self.synced = synced  # phy offset
        self._is_syncing = False
        # `with` on a lock of C lets no signal in between taking and holding; a Condition's own `with` and wait do.
        self._lock = threading.Lock()
        self._waiting: list[Any] = []  # a lock of each thread that waits for a sync, released at its end

    def sync(self, end: int, work: Callable[[], int]) -> None:
        """The log is on disk up to `end`: by another thread's work, or by ours, which returns how far it is then."""
        is_mine, synced = False, -1
        try:
            while not is_mine:
                turn = threading.Lock()
                turn.acquire()
                with self._lock:
                    if self.synced >= end:
                        return
                    if not self._is_syncing:
                        is_mine = self._is_syncing = True
                        break
                    self._waiting.append(turn)
                turn.acquire(timeout=HEARD_S)
            synced = work()
        finally:
            if is_mine:  # without a call up to where the next may sync: an interrupt comes with a call
                self.synced, self._is_syncing = synced if synced > self.synced else self.synced, False
                self._tell()

    def note(self, end: int) -> None:
        """Who else has synced the log up to `end` says so."""
        with self._lock:
            self.synced = max(self.synced, end)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for turn in waiting:
            turn.release()
