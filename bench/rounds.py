# SPDX-License-Identifier: Apache-2.0
"""Rounds of several contenders in turn, so that all meet the same machine."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Round = Callable[[int], float]  # number of the round -> ns per item
Clock = Callable[[], int]
Taken = dict[str, list[float]]
ROUNDS, WARM = 9, 2
QUICK_ROUNDS, QUICK_WARM = 5, 1
CPU, WALL = time.thread_time_ns, time.perf_counter_ns


def timed(items: int, make: Callable[[int], Callable[[], Any]], clock: Clock = CPU) -> Round:
    """A round of this process. make, untimed: number of the round -> the call that is timed."""

    def run(number: int) -> float:
        call = make(number)
        gc.disable()
        begin = clock()
        call()
        taken = clock() - begin
        gc.enable()
        return taken / items

    return run


def interleaved(contenders: Mapping[str, Round], rounds: int = ROUNDS, warm: int = WARM) -> Taken:
    """ns per item of each contender in each round, after `warm` rounds that do not count."""
    taken: Taken = {name: [] for name in contenders}
    for number in range(warm + rounds):
        for name, run in contenders.items():
            nanos = run(number)
            if number >= warm:
                taken[name].append(nanos)
    return taken


def together(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """All of them, a thread each; the threads are there when the time begins."""
    barrier = threading.Barrier(len(calls) + 1)

    def work(call: Callable[[], Any]) -> None:
        barrier.wait()
        call()

    workers = [threading.Thread(target=work, args=(call,)) for call in calls]
    for worker in workers:
        worker.start()

    def run() -> None:
        barrier.wait()
        for worker in workers:
            worker.join()

    return run
