# SPDX-License-Identifier: Apache-2.0
"""Reading beside putting: what an iterator gives is made in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from queue import SimpleQueue
from typing import TypeVar

DEPTH = 2  # items that are made and not taken: one more is being made

_Item = TypeVar("_Item")


class _End:
    """What the thread leaves last: why it ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@contextmanager
def read_ahead(items: Generator[_Item, None, None], wake: Callable[[], None]) -> Iterator[Iterator[_Item]]:
    """The items in order, then the error that ended them. When the block is left, Ctrl-C or not, their thread is gone.

    wake: called when the block is left before the end; a read that waits for a pipe must end then.
    """
    ready: SimpleQueue[_Item | _End] = SimpleQueue()
    room = threading.Semaphore(DEPTH)
    is_left, is_closed = False, threading.Event()

    def read() -> None:
        error = None
        try:
            with closing(items):
                for item in items:
                    ready.put(item)
                    room.acquire()
                    if is_left:
                        break
        except BaseException as caught:
            error = caught
        ready.put(_End(error))
        is_closed.set()

    ends: list[_End] = []

    def taken() -> Iterator[_Item]:
        while not isinstance(item := ready.get(), _End):
            room.release()
            yield item
        ends.append(item)
        if item.error is not None:
            raise item.error

    reader = threading.Thread(target=read, name="rmq-read", daemon=True)
    reader.start()
    try:
        yield taken()
    finally:
        is_left = True
        room.release()
        if not ends:  # else it ends by itself, and pipes that are still to be read must not
            wake()
        _wait(is_closed)
        reader.join()


def _wait(event: threading.Event) -> None:
    """Till it is set, whatever signals say: what reads in Arrow's threads must not meet an interpreter that ends."""
    stopped: KeyboardInterrupt | None = None
    while not event.is_set():
        try:
            event.wait()
        except KeyboardInterrupt as error:
            stopped = error
    if stopped is not None:
        raise stopped
