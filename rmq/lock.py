# SPDX-License-Identifier: Apache-2.0
"""Who writes: the lock that makes one writer, and the files owner and abort, which tell whose it is or was."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import functools
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rmq.errors import CorruptFileError, StoreLockedError
from rmq.paths import StorePaths
from rmq.segment import (
    EXHAUSTED,
    SMALL_FILE,
    open_regular,
    read_file,
    sync_directories,
    sync_file,
    telling,
    write_atomically,
    write_file,
    write_fully,
    write_marker,
)

UNREAD = (*EXHAUSTED, errno.EIO)  # what may well be there
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def check_same(path: Path, held: os.stat_result, place: Path) -> None:
    """OSError (ESTALE), which names `place`, when a path leads to nothing or something else than it did."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found is None or not os.path.samestat(held, found):
        raise OSError(errno.ESTALE, "the store was moved or replaced since it was opened", str(place))


class StoreLock:
    """Exclusive lock on byte 0 of <store>/lock, as a broker's JVM takes it; held until close.

    An open-file-description lock: it also conflicts with a second Store of this process, and no other
    descriptor of the file can drop it. Source: RocketMQ DefaultMessageStore#start.
    """

    _descriptor = -1

    def __init__(self, path: Path, holder: Callable[[], int | None]) -> None:
        """holder: tells the pid that a StoreLockedError names, when the kernel does not."""
        self._path, self._descriptor = path, open_regular(path, os.O_RDWR | os.O_CREAT)
        self._watched: dict[Path, os.stat_result] = {}
        try:
            with telling(path):
                self._take(path, holder)
            if os.pread(self._descriptor, 4, 0) != b"lock":
                write_fully(self._descriptor, b"lock", 0)
                sync_file(self._descriptor)
        except BaseException:
            self._drop()
            raise
        _held.add(self)

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

    def watch(self, directories: Iterable[Path]) -> None:
        """check_place looks at these, too: they lie elsewhere."""
        self._watched = {path: os.stat(path) for path in directories}

    def check_place(self) -> None:
        """OSError (ESTALE) when the path leads to no lock, or another one than is held: the store's directory was moved
        or replaced, and what is made, opened or removed by name from here on would be another store's.
        """
        for path, held in ((self._path, os.fstat(self._descriptor)), *self._watched.items()):
            check_same(path, held, path.parent if path == self._path else path)

    def close(self) -> None:
        """Let go of the lock, also where a fork's child that came about elsewhere than in Python still has the file."""
        if self._descriptor < 0:
            return
        try:
            _held.discard(self)
            with contextlib.suppress(OSError):
                if hasattr(fcntl, "F_OFD_SETLK"):
                    request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)
                    fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
                else:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._drop()

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:  # where an interrupt kept its owner from closing it
        if os is not None:  # see FileCache
            self._drop()


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    """A lock is the parent's: a child that kept its descriptor would hold it when the parent has died."""
    for lock in _held:
        lock._drop()
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


class Holder(enum.Enum):
    """Whose writer holds the lock: this library's, or another's, such as a broker."""

    RMQ = enum.auto()
    OTHER = enum.auto()


def lock_holder(path: Path) -> Holder | None:
    """Who holds the lock file, None: nobody; asked without taking it. OSError: it cannot be opened now.

    Ours is a lock of an open file description, a JVM's one of a process: the kernel tells which at the same instant.
    """
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe has no writer to wait for
    except OSError as error:
        if error.errno in UNREAD:
            raise
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


class Crash(enum.Enum):
    """How a store was left that its writer did not close."""

    OURS = enum.auto()  # by this library's writer: what follows the mark is its own
    OPENING = enum.auto()  # by this library's, before that: the store had been closed, and nothing was put since
    BROKERS = enum.auto()  # by another's, such as a broker


def _write_owner(paths: StorePaths, aborts: list[str], *, is_open: bool) -> None:
    """Who writes: pid, host and start time, for the message of a second writer. aborts: what `abort` holds when this
    library left the store behind; is_open: it had opened it, else the store had been closed before.
    """
    now = time.time_ns()
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
             "aborts": aborts, "open": is_open, "written": now,
             "lock": os.stat(paths.lock).st_mtime_ns}  # fmt: skip
    # Readers tell writers apart by its time; the system's clock ticks too slowly.
    write_atomically(paths.owner, (json.dumps(owner) + "\n").encode(), mtime_ns=now)


def _abort_text(paths: StorePaths) -> str:
    """What `abort` holds: a pid, or nothing. FileNotFoundError; no text: CorruptFileError, ValueError."""
    return read_file(paths.abort, SMALL_FILE).decode("ascii").strip()


def _broker_came(paths: StorePaths, owner: dict[str, Any]) -> bool:
    """Whether a broker has started since: each writes `lock` anew. A copy that did not keep times tells nothing.

    Source: RocketMQ DefaultMessageStore#start.
    """
    return os.stat(paths.owner).st_mtime_ns == owner.get("written") and \
        os.stat(paths.lock).st_mtime_ns != owner.get("lock")  # fmt: skip


def crash_of(paths: StorePaths) -> Crash | None:
    """How the store was left behind, by the files `abort` and `owner`; None: closed, or open. What nobody tells is a
    broker's. OSError: they cannot be read now.
    """
    try:
        text, owner = _abort_text(paths), json.loads(read_file(paths.owner, SMALL_FILE))
        ours = Crash.OURS if owner["open"] is True else Crash.OPENING
        is_ours = text in owner["aborts"] and not _broker_came(paths, owner)
    except (CorruptFileError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if getattr(error, "errno", None) in UNREAD:
            raise
        return Crash.BROKERS if os.path.lexists(paths.abort) else None
    return ours if is_ours else Crash.BROKERS


def restorer(path: Path) -> Callable[[], None]:
    """What gives a small file the bytes and the time it has now, or takes it away when there is none; not durable."""
    try:
        mtime_ns = os.stat(path).st_mtime_ns
        return functools.partial(write_file, path, read_file(path, SMALL_FILE), mtime_ns=mtime_ns)
    except FileNotFoundError:
        return functools.partial(path.unlink, missing_ok=True)
    except CorruptFileError:
        return lambda: None  # large, or no file: who must read it tells


def announce_writer(paths: StorePaths, *, holds_pid: bool) -> Crash | None:
    """Make `owner`, then `abort`, durably. Returns crash_of what was there, which stays true until `keep_announced`.
    holds_pid: what `abort` gets.
    """
    crashed, text = crash_of(paths), str(os.getpid()) if holds_pid else ""
    linked = [path for path in (paths.consume_queue, paths.index, paths.own, paths.config) if path.is_symlink()]
    for path in {paths.root, *paths.commit_logs, *linked} if crashed else ():
        sync_directories(path)  # a writer that was killed leaves names that were never synced
    found = [_abort_text(paths)] if crashed in (Crash.OURS, Crash.OPENING) else []
    aborts = [] if crashed is Crash.BROKERS else [*found, text]
    _write_owner(paths, aborts, is_open=crashed is Crash.OURS)
    write_marker(paths.abort, paths.abort_bak, text.encode() if holds_pid else None)
    return crashed


def keep_announced(paths: StorePaths) -> None:
    """The log is recovered and the mark stands at its end: the next crash is ours."""
    _write_owner(paths, [_abort_text(paths)], is_open=True)


def holder_pid(paths: StorePaths) -> int | None:
    """Pid of the process that holds the store, as far as its files tell."""
    try:
        return int(json.loads(read_file(paths.owner, SMALL_FILE))["pid"])
    except (CorruptFileError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    try:
        return int(read_file(paths.abort, SMALL_FILE))
    except (CorruptFileError, OSError, ValueError):
        return None
