# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for a lock that knows its thread."""

from __future__ import annotations

import threading
import time

from rmq._core._ownedlock import OwnedLock


def test_a_lock_is_given_to_a_thread_that_waits() -> None:
    """Others that take it again and again keep nobody from it for ever."""
    lock, stop = OwnedLock(), threading.Event()

    def takes() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0)  # lets go of the GIL while it is held

    def takes_it_a_hundred_times() -> None:
        for _ in range(100):
            with lock:
                pass

    others = [threading.Thread(target=takes) for _ in range(3)]
    patient = threading.Thread(target=takes_it_a_hundred_times)
    for thread in (*others, patient):
        thread.start()
    patient.join(20)
    was_kept_from_it = patient.is_alive()
    stop.set()
    for thread in (*others, patient):
        thread.join(20)
    assert not was_kept_from_it


def test_a_lock_has_one_holder_however_many_wait() -> None:
    """Of eight threads that add under it no addition is lost."""
    lock, total = OwnedLock(), [0]

    def add() -> None:
        for number in range(2000):
            with lock, lock:
                before = total[0]
                if number % 50 == 0:
                    time.sleep(0)
                total[0] = before + 1

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert total == [16_000]
