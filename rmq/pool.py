# SPDX-License-Identifier: Apache-2.0
"""Tasks on several processes of this machine. Whole-store jobs take a Runner, so that Spark can be one too."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

AHEAD = 2  # tasks for each process that are begun or wait


class Runner(Protocol):
    """Runs a task for each item, somewhere; answers in the order of items. Both must be picklable."""

    def __call__(self, task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]: ...


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def in_processes(count: int | None = None) -> Runner:
    """A Runner of `count` processes, None: one for each core this process may use. One process: this one.

    They are spawned: a script that calls this at its top level needs `if __name__ == "__main__":`, and task and items
    must be importable there. Raises what a task raises, RuntimeError with its text where that cannot be pickled, and
    ChildProcessError when a process died.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError(f"processes must be int, got {type(count).__name__}")
    if count is not None and count < 1:
        raise ValueError(f"processes must be at least 1, got {count}")
    wanted = count or cores()

    def run(task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        workers = min(wanted, len(items))
        return _here(task, items) if workers <= 1 else _spawned(workers, task, items)

    return run


def _here(task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    for item in items:
        yield task(item)  # a StopIteration from it is an error here, where it would end a map()


def _spawned(workers: int, task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin)
    running: deque[Future[Answer]] = deque()
    left = iter(items)
    try:
        for _ in range(len(items)):
            while len(running) < workers * AHEAD and (item := next(left, _NOTHING)) is not _NOTHING:
                running.append(pool.submit(_told, task, item))  # type: ignore[arg-type]
            yield running.popleft().result()
    except KeyboardInterrupt:
        # A second one would leave them waiting for tasks for ever, and this process for them.
        for process in (getattr(pool, "_processes", None) or {}).values():
            process.kill()
        raise
    except BrokenProcessPool:
        raise ChildProcessError("a worker process died: it was killed, or the script that started it lacks "
                                "`if __name__ == \"__main__\":`") from None  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)


def _told(task: Callable[[Item], Answer], item: Item) -> Answer:
    """Of an exception that does not survive the way to the parent, its name and text do."""
    try:
        return task(item)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


_NOTHING = object()


def _begin() -> None:
    """Ctrl-C is the parent's business, and without a parent there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
