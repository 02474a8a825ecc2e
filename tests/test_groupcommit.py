# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the disk together, and for a lock that knows its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rmq._core._ownedlock import OwnedLock
from rmq.groupcommit import GroupCommit


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_sync_wakes_those_it_served_and_one_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which syncs for those that are left: these sleep on."""
    monkeypatch.setattr("rmq.groupcommit.HEARD_S", 20)
    group, go_on = GroupCommit(0), threading.Event()
    syncs: list[int] = []

    def work() -> int:
        syncs.append(len(group._waiting))
        if len(syncs) == 1:
            go_on.wait(20)
            return 5
        asleep.append(list(group._waiting))
        return 9

    asleep: list[list[object]] = []
    threads = [threading.Thread(target=group.sync, args=(end, work)) for end in (4, 5, 9, 8, 9)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: syncs and len(group._waiting) == number)
    before = list(group._waiting)
    go_on.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert (len(syncs), group.synced, group._waiting) == (2, 9, [])
    assert asleep == [before[2:]]  # the very entries: these threads were not awake in between


def test_a_lock_is_given_to_a_thread_that_was_passed_over_often_enough() -> None:
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
