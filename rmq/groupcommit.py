# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the disk together: one syncs for all. RocketMQ's GroupCommitService, without a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rmq._core._ownedlock import OwnedLock

HEARD_S = 0.1  # until a thread looks by itself whether a sync has ended: an interrupt may end it before it tells
# Soon: within that part of a sync's time, if it is LEAST_SOON_S, and within MOST_SOON_S. Who came soon OFTEN times
# running is waited for.
SOON, LEAST_SOON_S, MOST_SOON_S = 0.5, 100e-6, 2e-3
OFTEN = 3

Waiter = tuple[int, Any, int]  # where a thread's records end, a lock that is released to wake it, the thread


class GroupCommit:
    """How far the log is on disk, and whose turn it is to bring it there. An interrupt anywhere leaves it usable.

    Of threads that put without pause each sync would serve one half, while the other half waits for the next: whoever
    syncs lets those come back first that the last sync has served, if they have a way of coming soon.
    """

    def __init__(self, synced: int) -> None:
        self.synced = synced  # phy offset
        self._syncer = 0  # the thread that syncs, 0: none
        # `with` on a lock of C lets no signal in between taking and holding; a Condition's own `with` and wait do.
        self._lock = OwnedLock()
        self._waiting: list[Waiter] = []
        self.is_shared = False  # whether others waited when the last sync ended
        self._sync_s = 0.0  # how long the last sync took, 0: it failed
        self._served: set[int] = set()  # threads that it served and that have not come back
        self._awaited = 0  # of these, those waited for
        self._soon = 0.0  # until then who comes back comes soon
        self._often: dict[int, int] = {}  # how many times running each thread came soon
        self._gate: Any = None  # a lock, released when nobody is awaited

    def sync(self, end: int, work: Callable[[], int]) -> None:
        """The log is on disk up to `end`: by another thread's work, or by ours, which returns how far it is then."""
        me, is_mine, synced, waiter = threading.get_ident(), False, -1, None
        try:
            while True:
                turn = threading.Lock()
                turn.acquire()
                with self._lock:
                    if self.synced >= end:
                        return
                    if me in self._served:
                        self._come(me)
                    if not self._syncer:
                        is_mine, self._syncer = True, me
                        break
                    waiter = end, turn, me
                    self._waiting.append(waiter)
                turn.acquire(timeout=HEARD_S)
                self._leave(waiter)
            self._gather()
            begin, self._sync_s = time.monotonic(), 0.0
            synced = work()
            self._sync_s = time.monotonic() - begin
        finally:
            if is_mine:  # without a call up to where the next may sync: an interrupt comes with a call
                self.synced, self._syncer = synced if synced > self.synced else self.synced, 0
                self._tell(me)
            elif waiter is not None and self.synced < end:  # interrupted
                self._leave(waiter)
                self._tell()

    def is_mine(self) -> bool:
        """Whether the calling thread syncs, or is about to change what is here: it would wait for itself."""
        return self._syncer == threading.get_ident() or self._lock.is_mine()

    def note(self, end: int) -> None:
        """Who else has synced the log up to `end` says so."""
        with self._lock:
            self.synced = max(self.synced, end)
        self._tell()

    def _come(self, thread: int) -> None:
        """Note that a thread is back. Call under the lock."""
        self._served.remove(thread)
        times = self._often.get(thread, 0)
        self._awaited -= times >= OFTEN
        self._often[thread] = times + 1 if time.monotonic() < self._soon else 0
        if self._gate is not None and self._awaited <= 0:
            gate, self._gate = self._gate, None
            gate.release()

    def _gather(self) -> None:
        """Before a sync: let those come who are awaited, as long as they are not late."""
        if self._awaited <= 0:
            return
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            left = self._soon - time.monotonic()
            if self._awaited <= 0 or left <= 0:
                return
            self._gate = gate
        gate.acquire(timeout=left)
        self._gate = None

    def _leave(self, waiter: Waiter) -> None:
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _tell(self, syncer: int = 0) -> None:
        """Wake those that are served and one of the others, who syncs next. syncer: whose sync has just ended."""
        with self._lock:
            synced = self.synced  # once: a sync that ends meanwhile raises it
            woken = [waiter for waiter in self._waiting if waiter[0] <= synced]
            self._waiting = [waiter for waiter in self._waiting if waiter[0] > synced]
            if syncer:
                self._await(syncer, woken)
            if self._waiting and not self._syncer:
                woken.append(self._waiting.pop(0))
        for _, turn, _ in woken:
            turn.release()

    def _await(self, syncer: int, woken: list[Waiter]) -> None:
        """Who may come back soon. Call under the lock."""
        self.is_shared = bool(woken or self._waiting)
        self._awaited, soon_s = 0, min(self._sync_s * SOON, MOST_SOON_S)
        self._served = {syncer, *(thread for _, _, thread in woken)} if soon_s >= LEAST_SOON_S else set()
        if self._served:
            self._soon = time.monotonic() + soon_s
            known = self._served.union(thread for _, _, thread in self._waiting)
            self._often = {thread: times for thread, times in self._often.items() if thread in known}
            self._awaited = sum(self._often.get(thread, 0) >= OFTEN for thread in self._served)
