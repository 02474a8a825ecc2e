# SPDX-License-Identifier: Apache-2.0
"""Files: allocate, map, sync, delete; the lock that makes one writer; atomic small files."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from rmq.errors import CorruptFileError, StoreClosedError, StoreLockedError

logger = logging.getLogger("rmq")

FILE_MODE = 0o644
DIRECTORY_MODE = 0o755
FILE_CACHE_LIMIT = 96
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents; each new name is made durable."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(DIRECTORY_MODE, exist_ok=True)
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file: temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_marker(path: Path, backup: Path, text: bytes | None) -> None:
    """Create the abort file durably: empty (None), or with a text, as RocketMQ 5 does, with its side effect.

    There the file is made empty when missing, its content copied to `backup`, then the text written.
    """
    directory_changed = not path.exists()
    if directory_changed:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE))
    if text is not None:
        backup.write_bytes(path.read_bytes())
        path.write_bytes(text)
    sync_directory(path.parent)


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Reserve blocks, so that a later store through a map cannot meet a full disk. OSError (ENOSPC)."""
    if length <= 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, length)
        return
    end = offset + length  # no fallocate here: write what is there once more, block by block
    for start in range(offset, end, 1 << 20):
        size = min(1 << 20, end - start)
        os.pwrite(descriptor, os.pread(descriptor, size, start).ljust(size, b"\0"), start)


def create_file(path: Path) -> int:
    """Descriptor of a new file. One of no bytes, which a killed process may leave, counts as not there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_EXCL, FILE_MODE)
    except FileExistsError:
        if not path.is_file() or path.stat().st_size:
            raise
        return os.open(path, flags, FILE_MODE)


class MappedFile:
    """One file of fixed size, mapped whole. Writable ones keep a descriptor and reserve blocks before use."""

    def __init__(self, path: Path, *, size: int | None = None, writable: bool = False,
                 create: bool = False) -> None:  # fmt: skip
        """size: bytes the file must have, None: what it has. create: make it, sparse and zero-filled.

        Raises CorruptFileError for another size, OSError of the system.
        """
        self.path = path
        self.writable = writable
        self.reserved = 0  # bytes from the start that have blocks for sure
        self._descriptor = -1
        flags = os.O_RDWR if writable else os.O_RDONLY
        descriptor = create_file(path) if create else os.open(path, flags)
        try:
            if create:
                assert size is not None
                os.ftruncate(descriptor, size)
            status = os.fstat(descriptor)
            self.size, self.inode = status.st_size, status.st_ino
            if size is not None and self.size != size:
                raise CorruptFileError(path, min(self.size, size),
                                       f"file has {self.size} bytes, expected {size}")  # fmt: skip
            if self.size == 0:
                raise CorruptFileError(path, 0, "file is empty")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.map = mmap.mmap(descriptor, self.size, access=access)
        except BaseException:
            os.close(descriptor)
            raise
        if writable:
            self._descriptor = descriptor
        else:
            os.close(descriptor)

    def reserve(self, begin: int, end: int, ahead: int) -> None:
        """Make sure that blocks stand behind [begin, end); if not, reserve `ahead` bytes from begin or more."""
        if end <= self.reserved:
            return
        begin = max(begin, self.reserved) if self.reserved else begin
        target = min(self.size, max(end, begin + ahead))
        allocate(self._descriptor, begin, target - begin)
        self.reserved = target

    def data_end(self) -> int:
        """Position behind the last byte that the file system holds data for; what follows reads as zeros."""
        if not hasattr(os, "SEEK_DATA"):
            return self.size
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            end = position = 0
            while position < self.size:
                position = os.lseek(descriptor, position, os.SEEK_DATA)
                end = position = os.lseek(descriptor, position, os.SEEK_HOLE)
            return end
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind `position`
                return end
            raise
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Everything written so far is on disk. Does not hold the GIL."""
        os.fdatasync(self._descriptor) if hasattr(os, "fdatasync") else os.fsync(self._descriptor)

    def sync_all(self) -> None:
        """sync, and the directory entry too: for new files."""
        os.fsync(self._descriptor)
        sync_directory(self.path.parent)

    def close(self) -> None:
        """Unmap and close; a map that a caller still looks at lives until it lets go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        try:
            self.map.close()
        except BufferError:
            logger.debug("%s: still looked at, unmapped later", self.path)


class FileCache:
    """Descriptors of many small files, opened on demand, at most FILE_CACHE_LIMIT at a time. Thread-safe."""

    def __init__(self, writable: bool) -> None:
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._is_closed = False
        self.changes = 0  # files made or removed by those that share the cache
        self._lock = threading.Lock()

    def _descriptor(self, path: Path) -> int:
        descriptor = self._open.get(path, -1)
        if descriptor >= 0:
            self._open.move_to_end(path)
            return descriptor
        if self._is_closed:
            raise StoreClosedError(f"{path}: store is closed")
        while len(self._open) >= FILE_CACHE_LIMIT:
            os.close(self._open.popitem(last=False)[1])
        descriptor = os.open(path, self._flags)
        self._open[path] = descriptor
        return descriptor

    def read(self, path: Path, position: int, size: int) -> bytes:
        """Up to `size` bytes at a position; fewer at the end of the file."""
        with self._lock:
            return os.pread(self._descriptor(path), size, position)

    def write(self, path: Path, position: int, data: bytes | memoryview) -> None:
        """All bytes of data at a position. OSError (ENOSPC) before it touches a block that is not there."""
        view = memoryview(data)
        with self._lock:
            descriptor = self._descriptor(path)
            while view:
                written = os.pwrite(descriptor, view, position)
                view, position = view[written:], position + written

    def sync(self, path: Path) -> None:
        """Everything written to the file is on disk; the cache is not locked meanwhile."""
        with self._lock:
            descriptor = os.dup(self._descriptor(path))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget(self, path: Path) -> None:
        """Close the file before it is removed or replaced."""
        with self._lock:
            self.changes += 1
            descriptor = self._open.pop(path, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._open:
                os.close(self._open.popitem()[1])


class StoreLock:
    """Exclusive lock on byte 0 of <store>/lock, as a broker's JVM takes it; held until close.

    An open-file-description lock: it also conflicts with a second Store of this process, and no other
    descriptor of the file can drop it. Source: RocketMQ DefaultMessageStore#start.
    """

    def __init__(self, path: Path, holder: Callable[[], int | None]) -> None:
        """holder: tells the pid that a StoreLockedError names, when the kernel does not."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, FILE_MODE)
        try:
            self._take(path, holder)
            if os.pread(self._descriptor, 4, 0) != b"lock":
                os.pwrite(self._descriptor, b"lock", 0)
                os.fsync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, path: Path, holder: Callable[[], int | None]) -> None:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            if hasattr(fcntl, "F_OFD_SETLK"):
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
            else:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            pid = None
            if hasattr(fcntl, "F_OFD_GETLK"):
                answer = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request))
                pid = answer[4] if answer[4] > 0 else None
            # The kernel does not tell the pid of a holder such as ours.
            raise StoreLockedError(path, pid if pid is not None else holder()) from None

    def close(self) -> None:
        os.close(self._descriptor)


def is_locked(path: Path) -> bool:
    """Whether some process, a broker or this library, holds the lock file; asked without taking it."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))
        return bool(answer[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
