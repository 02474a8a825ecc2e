# SPDX-License-Identifier: Apache-2.0
"""Mapped files: blocks before use, pages that may vanish, how many at a time."""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from rmq._core._mapguard import MapGuard, lost_pages
from rmq.errors import CorruptFileError, is_handlers
from rmq.segment import (
    allocate,
    begin_write_out,
    create_file,
    open_regular,
    opened,
    room_for_files,
    sync_directory,
    sync_file,
    telling,
    write_fully,
)

logger = logging.getLogger("rmq")

MAP_LIMIT = 1024


def data_end(path: Path, size: int) -> int:
    """Position behind the last byte that the file system holds data for; what follows up to `size` reads as zeros."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    end = position = 0
    with opened(path) as descriptor:
        try:
            while position < size:
                position = os.lseek(descriptor, position, os.SEEK_DATA)
                end = position = os.lseek(descriptor, position, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data behind `position`
                raise
    return end


_Parameters = ParamSpec("_Parameters")
_Answer = TypeVar("_Answer")


class HasMaps(Protocol):
    def _check_maps(self) -> None: ...


_Self = TypeVar("_Self", bound=HasMaps)


def guarded(method: Callable[Concatenate[_Self, _Parameters], _Answer]) -> Callable[Concatenate[_Self, _Parameters],
                                                                                   _Answer]:  # fmt: skip
    """For methods that read maps: when pages were gone meanwhile, CorruptFileError in place of what they made of it."""
    @functools.wraps(method)
    def answer(self: _Self, /, *args: _Parameters.args, **options: _Parameters.kwargs) -> _Answer:
        try:
            return method(self, *args, **options)
        finally:
            if lost_pages():
                self._check_maps()

    return answer


class GuardedMap(mmap.mmap):
    """A map of a file that others may truncate: pages that are gone read as zeros, and `lost` tells."""

    __slots__ = ("_guard",)
    _guard: MapGuard

    @classmethod
    def of(cls, descriptor: int, size: int, access: int) -> Self:
        made = cls(descriptor, size, access=access)
        made._guard = MapGuard(made)
        return made

    @property
    def lost(self) -> int:
        """Position of the first page that was gone when it was touched, -1: none so far."""
        return self._guard.lost

    @property
    def guard(self) -> MapGuard:
        """What `lost` asks, for compiled code."""
        return self._guard

    def close(self) -> None:
        """Unmap; BufferError while somebody looks at it, who stays guarded."""
        super().close()
        self._guard.release()


class MappedFile:
    """One file of fixed size, mapped whole. Writable ones keep a descriptor and reserve blocks before use."""

    behind = 0  # bytes of the file that are not in the map

    def __init__(self, path: Path, *, size: int | None = None, writable: bool = False, create: bool = False,
                 start: int = 0) -> None:  # fmt: skip
        """size: bytes the file must have, None: what it has. create: make it, sparse and zero-filled. start: of a
        segment, the phy offset of its first byte.

        Raises CorruptFileError for another size, OSError of the system.
        """
        self.path = path
        self.start = start
        self.writable = writable
        self.reserved = 0  # bytes from the start that have blocks for sure
        self.filled = 0  # bytes from the start whose blocks were written, if only with zeros; 0: not known
        self._taken = 0  # behind it fill may write
        self.warmed = 0  # bytes from the start that are in the page cache, or were
        self._growing = threading.Lock()
        self._descriptor = -1
        flags = os.O_RDWR if writable else os.O_RDONLY
        descriptor = create_file(path) if create else open_regular(path, flags)
        try:
            if create:
                assert size is not None
                with telling(path):
                    os.ftruncate(descriptor, size)
            status = os.fstat(descriptor)
            self.size, self.inode = status.st_size, status.st_ino
            if size is not None and self.size != size:
                raise CorruptFileError(path, min(self.size, size),
                                       f"file has {self.size} bytes, expected {size}")  # fmt: skip
            if self.size == 0:
                raise CorruptFileError(path, 0, "file is empty")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            with telling(path):
                self.map = GuardedMap.of(descriptor, self.size, access)
        except BaseException:
            os.close(descriptor)
            if create:
                os.unlink(path)
            raise
        if writable:
            self._descriptor = descriptor
        else:
            os.close(descriptor)

    def reserve(self, begin: int, end: int, ahead: int) -> None:
        """Make sure that blocks stand behind [begin, end); if not, reserve `ahead` bytes from begin or more.

        CorruptFileError when the file was truncated: blocks would make it long again. OSError (ENOSPC).
        """
        if end <= self.reserved:
            return
        with self._growing:
            begin = max(begin, self.reserved) if self.reserved else begin
            target = min(self.size, max(end, begin + ahead))
            if end > self.reserved:
                self._check_end()
                with telling(self.path):
                    allocate(self._descriptor, begin, target - begin)
                self.reserved = target

    def fill(self, used: int, count: int) -> None:
        """Zeros on disk behind what is filled: about `count` bytes. The file is known to be zero from `used` on.

        May run beside `write` and `sync`. OSError (ENOSPC), as of sync_file.
        """
        # The kernel tells of an error once per descriptor: this must not take it from a sync of records.
        with opened(self.path, os.O_WRONLY) as descriptor:
            if os.fstat(descriptor).st_ino != self.inode:
                raise OSError(errno.ESTALE, "another file has its name", str(self.path))
            with self._growing:
                begin = max(used, self._taken, self.filled or self.data_end())
                end = min(self.size, (begin // count + 1) * count)
                write_fully(descriptor, bytes(end - begin), begin)
                self.filled = end
            sync_file(descriptor, getattr(os, "fdatasync", None))

    def warm(self, used: int, buffer: bytearray) -> None:
        """Bring the pages behind `used`, as many bytes as the buffer has, into the page cache in large folios: a store
        through the map then finds them there. Changes nothing. OSError.
        """
        begin = max(self.warmed, used - used % len(buffer))
        os.preadv(self._descriptor, [buffer], begin)
        self.warmed = begin + len(buffer)

    def read_on(self, used: int, *, behind: bool) -> None:
        """Whether a fault of the map behind `used` reads the file ahead; below it one does. An advice: no error."""
        begin = used - used % mmap.PAGESIZE
        with suppress(OSError):
            if begin:
                self.map.madvise(mmap.MADV_NORMAL, 0, begin)
            if begin < self.size:
                self.map.madvise(mmap.MADV_NORMAL if behind else mmap.MADV_RANDOM, begin)

    def take(self, end: int) -> None:
        """From here on fill leaves alone what lies below a position."""
        if end > self.filled:
            with self._growing:
                self._taken = max(self._taken, end)

    def write(self, position: int, data: memoryview) -> None:
        """Bytes at a position, not through the map. CorruptFileError when the file was truncated; OSError."""
        self._check_end()
        self.take(position + len(data))
        write_fully(self._descriptor, data, position)

    def _check_end(self) -> None:
        # Not fstat: who asks for the times of a file makes the next write note a new one, and the sync after it slower.
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        if size < self.size:
            raise CorruptFileError(self.path, size, "page is gone: the file was truncated while it was open")

    def begin_write_out(self, position: int, size: int) -> None:
        """Let the disk begin with what was just written: less is left for `sync`."""
        begin_write_out(self._descriptor, position, size)

    def data_end(self) -> int:
        """data_end of the file; all of a file that was removed since, as by a recovery beside a reader."""
        try:
            return data_end(self.path, self.size)
        except FileNotFoundError:
            return self.size

    def check(self) -> None:
        """CorruptFileError when pages of the map were gone: ask after each use, before concluding anything."""
        if lost_pages() and (lost := self.map.lost) >= 0:
            raise CorruptFileError(self.path, lost, "page is gone: the file was truncated while it was open, "
                                                    "or the disk cannot read it")  # fmt: skip

    def check_size(self) -> None:
        """CorruptFileError when the file is shorter than its map: where it ends within a page no page is gone, but what
        follows there reads as zeros.
        """
        try:
            size = self.map.size()
        except (ValueError, OSError) as error:  # closed by another thread, before or in the midst of the call
            if isinstance(error, OSError) and is_handlers(error):
                raise
            size = 0
        if size < self.size:
            raise CorruptFileError(self.path, size, "file was truncated while it was open")

    def sync(self) -> None:
        """Everything written so far is on disk. Does not hold the GIL."""
        with telling(self.path):
            sync_file(self._descriptor, getattr(os, "fdatasync", None))

    def sync_all(self) -> None:
        """sync, and the directory entry too: for new files."""
        sync_file(self._descriptor)
        sync_directory(self.path.parent)

    def detach(self) -> None:
        """Close the descriptor; the map stays for those that read it, until nobody refers to it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def touch(self, begin: int, end: int) -> None:
        """Read a byte of each page in a range: those that are gone are found."""
        bytes(memoryview(self.map)[begin - begin % mmap.PAGESIZE : end : mmap.PAGESIZE])

    def close(self) -> None:
        """Unmap and close; a map that a caller still looks at lives until it lets go."""
        try:
            self.map.close()
        except BufferError:
            logger.debug("%s: still looked at, unmapped later", self.path)
        self.detach()

    def __del__(self) -> None:
        """The map goes by itself, with the last that looks at it; the descriptor does not."""
        if os is not None and getattr(self, "_descriptor", -1) >= 0:  # see FileCache
            self.detach()  # a store in the same cycle may close it after this


def room_for_maps(size: int) -> int:
    """How many files of so many bytes to map at a time: descriptors allow it, and a quarter of the address space."""
    count = room_for_files(MAP_LIMIT)  # a map of Python holds a descriptor
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed == resource.RLIM_INFINITY:
        return count
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except (OSError, ValueError):
        used = 0
    return max(1, min(count, (allowed - used) // 4 // size))
