# SPDX-License-Identifier: Apache-2.0
"""Reading beside putting: what an iterator gives is made in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

DEPTH = 2  # items that are made and not taken: one more is being made

_Item = TypeVar("_Item")


class _End:
    """What the thread leaves last: why it ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@contextmanager
def read_ahead(items: Iterable[_Item], wake: Callable[[], None]) -> Iterator[Iterator[_Item]]:
    """The items in order, then the error that ended them. The thread is gone when the block is left.

    wake: called when the block is left before the end; a read that waits for a pipe must end then.
    """
    ready: SimpleQueue[_Item | _End] = SimpleQueue()
    room = threading.Semaphore(DEPTH)
    is_left = False

    def read() -> None:
        try:
            for item in items:
                ready.put(item)
                room.acquire()
                if is_left:
                    return
        except BaseException as error:
            ready.put(_End(error))
        else:
            ready.put(_End(None))

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
        reader.join()
