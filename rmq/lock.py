# SPDX-License-Identifier: Apache-2.0
"""The lock that makes one writer."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from rmq.errors import StoreLockedError
from rmq.segment import FILE_MODE, sync_file, write_fully

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


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
                write_fully(self._descriptor, b"lock", 0)
                sync_file(self._descriptor)
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


class Holder(enum.Enum):
    """Whose writer holds the lock: this library's, or another's, such as a broker."""

    RMQ = enum.auto()
    OTHER = enum.auto()


def lock_holder(path: Path) -> Holder | None:
    """Who holds the lock file, None: nobody; asked without taking it.

    Ours is a lock of an open file description, a JVM's one of a process: the kernel tells which at the same instant.
    """
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe has no writer to wait for
    except OSError:
        return None
    try:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))
        if kind == fcntl.F_UNLCK:
            return None
        return Holder.RMQ if pid == -1 else Holder.OTHER
    except OSError:
        return None
    finally:
        os.close(descriptor)
