# SPDX-License-Identifier: Apache-2.0
"""Descriptors of many small files."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rmq.closers import close_all
from rmq.errors import StoreClosedError
from rmq.segment import (
    EXHAUSTED,
    begin_write_out,
    open_regular,
    room_for_files,
    sync_file,
    telling,
    write_fully,
)

Answer = TypeVar("Answer")
FILE_CACHE_LIMIT = 1024  # files, of all caches of the process together
FILE_CACHE_LEAST = 96  # of each, however many caches there are
SYNCED_TOGETHER = 32  # files

_caches: dict[int, weakref.ref[FileCache]] = {}  # that are open; a dict's values are listed in one step


def _drop_in_child() -> None:
    """The parent's files: its stores are closed to a fork's child, which would hold them as long as it lives."""
    for cache in _open_caches():
        cache._is_closed = True
        while cache._open:
            with suppress(OSError):
                cache._keep(len(cache._open) - 1)
    _caches.clear()


def _open_caches() -> list[FileCache]:
    return [cache for found in list(_caches.values()) if (cache := found()) is not None]


os.register_at_fork(after_in_child=_drop_in_child)


class FileCache:
    """Descriptors of many small files, opened on demand, FILE_CACHE_LIMIT or fewer at a time. Thread-safe.

    What others keep it leaves to them.
    """

    _pid = -1

    def __init__(self, writable: bool) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()  # a Path's hash is Python, in which a signal can raise
        self._all = room_for_files(FILE_CACHE_LIMIT)
        self._least = min(self._all, FILE_CACHE_LEAST)
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._pid = os.getpid()
        self._is_closed = False
        self.changes = 0  # files made or removed by those that share the cache
        self.syncs_new = True  # whether they make a new file durable at once
        self.check_place: Callable[[], None] = lambda: None  # raises where these paths are no longer the store's
        self._lock = threading.RLock()  # of a signal handler's call amid another of its thread, too
        _caches[id(self)] = weakref.ref(self)

    @property
    def limit(self) -> int:
        """How many files it may keep open now."""
        return max(self._least, self._all - sum(len(cache._open) for cache in _open_caches() if cache is not self))

    def _descriptor(self, path: Path) -> int:
        name = str(path)
        descriptor = self._open.get(name, -1)
        if descriptor >= 0:
            self._open.move_to_end(name)
            return descriptor
        if self._is_closed:
            raise StoreClosedError(f"{path}: store is closed")
        self.check_place()
        self._keep(self.limit - 1)
        self._open[name] = descriptor = self._with_room(0, functools.partial(open_regular, path, self._flags))
        if self._is_closed:  # by a signal handler meanwhile
            self._keep(0)
            raise StoreClosedError(f"{path}: store is closed")
        return descriptor

    def _with_room(self, kept: int, call: Callable[[], int]) -> int:
        """The descriptor that a call makes; when there are no more, those of all but the last `kept` files are closed.
        """
        try:
            return call()
        except OSError as error:
            if error.errno not in EXHAUSTED or len(self._open) <= kept:
                raise
            self._keep(kept)
            return call()

    def _keep(self, count: int) -> None:
        """Close those not used for longest."""
        while len(self._open) > count:
            os.close(self._open.popitem(last=False)[1])

    def with_file(self, path: Path, call: Callable[[int], Answer]) -> Answer:
        """What a call makes of a descriptor of its own: the cache is not locked while the disk is waited for."""
        with self._lock:
            descriptor = self._with_room(1, functools.partial(os.dup, self._descriptor(path)))
        try:
            with telling(path):
                return call(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path, position: int, size: int) -> bytes:
        """Up to `size` bytes at a position; fewer at the end of the file."""
        return self.with_file(path, lambda descriptor: os.pread(descriptor, size, position))

    def write(self, path: Path, position: int, data: bytes | memoryview) -> None:
        """All bytes of data at a position. OSError (ENOSPC) before it touches a block that is not there."""
        with self._lock, telling(path):
            write_fully(self._descriptor(path), data, position)

    def sync(self, path: Path) -> None:
        """Everything written to the file is on disk."""
        self.with_file(path, sync_file)

    def sync_all(self, paths: Sequence[Path]) -> None:
        """sync of each, in order; the disk begins with many at once, where each sync would wait for its own."""
        for first in range(0, len(paths), SYNCED_TOGETHER):
            together = paths[first : first + SYNCED_TOGETHER]
            for path in together[1:]:
                self.with_file(path, lambda descriptor: begin_write_out(descriptor, 0, 0))
            for path in together:
                self.sync(path)

    def forget(self, path: Path) -> None:
        """Close the file before it is removed or replaced."""
        with self._lock:
            self.changes += 1
            descriptor = self._open.pop(str(path), -1)
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        """Where an interrupt kept its owner from closing it; in a fork's child the numbers may be others' by now."""
        if os is not None:  # the interpreter's end takes a module's names, then closes all files
            _caches.pop(id(self), None)
            if self._pid == os.getpid():
                self._keep(0)

    def close(self) -> None:
        _caches.pop(id(self), None)
        with self._lock:
            self._is_closed = True
            close_all([functools.partial(self._keep, left) for left in reversed(range(len(self._open)))])
