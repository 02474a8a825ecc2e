# SPDX-License-Identifier: Apache-2.0
"""Where a thread sleeps until others wake it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Sleeper:
    """For one thread that sleeps. Not an Event: an interrupt in its `set` leaves it locked for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self, timeout_s: float = -1) -> bool:
        """Whether it was woken, now or since it last slept; -1: for as long as that takes."""
        return self._lock.acquire(timeout=timeout_s)

    def wake(self) -> None:
        if self._lock.locked():
            with suppress(RuntimeError):  # another was faster
                self._lock.release()


def waking(sleeper: Sleeper) -> Callable[[object], None]:
    """A weak reference's callback: whoever sleeps for the object is woken when it goes."""
    return lambda _: sleeper.wake()
