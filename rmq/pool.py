# SPDX-License-Identifier: Apache-2.0
"""Tasks on several processes of this machine. Whole-store jobs take a Runner, so that Spark can be one too."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from numbers import Integral
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

AHEAD = 2  # tasks for each process that are begun or wait
SOON = 0.1  # s: how long an interrupt may wait for it


class Runner(Protocol):
    """Runs a task for each item, somewhere; answers in the order of items. Both must be picklable."""

    def __call__(self, task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]: ...


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(count: int | None = None) -> Runner:
    """A Runner of `count` processes, None: one for each core this process may use. One process: this one, and so is any
    count in a worker of a multiprocessing.Pool, which may have no processes of its own.

    They are spawned: a script that calls this at its top level needs `if __name__ == "__main__":`, and task and items
    must be importable there. Raises what a task raises, RuntimeError with its text where that cannot be pickled, or of
    an answer that cannot be unpickled, and ChildProcessError when a process died.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, Integral)):
        raise TypeError(f"processes must be int, got {type(count).__name__}")
    if count is not None and count < 1:
        raise ValueError(f"processes must be at least 1, got {count}")
    wanted = cores() if count is None else int(count)
    wanted = 1 if multiprocessing.current_process().daemon else wanted

    def run(task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        workers = min(wanted, len(items))
        return _here(task, items) if workers <= 1 else _spawned(workers, task, items)

    return run


def _here(task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    for item in items:
        yield task(item)  # a StopIteration from it is an error here, where it would end a map()


def _spawned(workers: int, task: Callable[[Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
    # Pickled here: where the pool's own thread fails at it, a shutdown may wait for ever.
    pickled = pickle.dumps(task)
    mine, its = socket.socketpair()
    with mine:
        crew: _Crew[Item, Answer] = _Crew(workers, pickled, items, its)
        crew.start()
        try:
            for _ in range(len(items)):
                mine.send(_MORE)
                mine.recv(1)
                yield crew.take()
        except BrokenProcessPool as error:
            if error.__cause__ is not None:  # the pool gives up where it cannot unpickle what a worker sent
                raise RuntimeError("an answer of the task cannot be unpickled") from error.__cause__
            raise ChildProcessError("a worker process died: it was killed, or the script that started it lacks "
                                    "`if __name__ == \"__main__\":`") from None  # fmt: skip
        finally:
            mine.close()
            crew.join()


class _Crew(threading.Thread, Generic[Item, Answer]):
    """Has processes do a task for each item, in a thread of its own: an interrupt amid a call would leave the pool's
    locks taken. Gives an answer for each byte that it gets, and a byte for each answer.
    """

    def __init__(self, workers: int, task: bytes, items: Sequence[Item], asked: socket.socket) -> None:
        """task: pickled. asked: closed by who wants no more; amid an answer when it was interrupted, and waits for no
        task then."""
        super().__init__(name="rmq-pool", daemon=True)
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin)
        self._ahead, self._task, self._items = workers * AHEAD, task, iter(items)
        self._running: deque[Future[Answer]] = deque()
        self._asked = asked
        self._answers: deque[tuple[Answer | None, BaseException | None]] = deque()

    def run(self) -> None:
        try:
            with self._asked, suppress(ConnectionError):
                while self._asked.recv(1):
                    self._answers.append(self._next())
                    self._asked.send(_MORE)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _next(self) -> tuple[Answer | None, BaseException | None]:
        try:
            while len(self._running) < self._ahead and (item := next(self._items, _NOTHING)) is not _NOTHING:
                self._running.append(self._pool.submit(_told, self._task, pickle.dumps(item)))
            future = self._running.popleft()
            while not wait_for([future], SOON).done:
                if self._is_left():
                    self._kill()
            return future.result(), None
        except BaseException as error:
            return None, error

    def take(self) -> Answer:
        """The answer that was told; raises what its task raised."""
        answer, error = self._answers.popleft()
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def _is_left(self) -> bool:
        """Whether nobody waits for an answer any more."""
        with suppress(BlockingIOError):
            return not self._asked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    def _kill(self) -> None:
        """End its processes."""
        for process in list((getattr(self._pool, "_processes", None) or {}).values()):
            process.kill()


def _told(task: bytes, item: bytes) -> Any:
    """Of a pickled task. Of an exception that does not survive the way to the parent, its name and text do."""
    try:
        return pickle.loads(task)(pickle.loads(item))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


_NOTHING = object()
_MORE = b"."


def _begin() -> None:
    """Ctrl-C is the parent's business, and without a parent there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
