# SPDX-License-Identifier: Apache-2.0
"""The lock that makes one writer."""

from __future__ import annotations

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


def is_locked(path: Path) -> bool:
    """Whether some process, a broker or this library, holds the lock file; asked without taking it."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe has no writer to wait for
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
