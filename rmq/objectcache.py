# SPDX-License-Identifier: Apache-2.0
"""Whole objects on this disk, shared by the processes of a user, up to a size.

    <directory>/objects/<sha256 of what it is>      whole; .part: being fetched, by who has it locked
    <directory>/open/<name>/, <name>.lock           of the process that has the lock; else a leftover

A file in use has a second name below open/: nothing is taken from under who reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rmq.errors import RmqError
from rmq.segment import open_file, sync_file


class CacheFullError(RmqError):
    """Objects that are needed at once are larger than the cache may be."""


def default_directory() -> Path:
    """On the disk that Spark has for such things, else that of temporary files."""
    base = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return Path(base) / f"rmq-cache-{os.getuid()}"


class ObjectCache:
    """limit: bytes of whole objects; the one not used for longest goes first."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._objects, self._open, self._limit = directory / "objects", directory / "open", limit
        self._guard = directory / "lock"
        for path in (directory, self._objects, self._open):
            path.mkdir(0o700, parents=True, exist_ok=True)
            if path.is_symlink() or path.stat().st_uid != os.getuid():  # a link could be anybody's
                reason = "is a symbolic link" if path.is_symlink() else "belongs to another user"
                raise PermissionError(f"{path}: {reason}; choose fs.cacheDirectory")

    # ---- whole objects ----

    def place(self, identity: str, size: int, target: Path, fetch: Callable[[int], None]) -> None:
        """Name an object `target`, fetched into a descriptor when it is not here. identity: another one, other bytes.

        Several processes: one fetches, the others wait. Raises CacheFullError, OSError, and what fetch raises.
        """
        path = self._objects / hashlib.sha256(identity.encode()).hexdigest()
        part = path.with_suffix(".part")
        while True:
            with _locked(part) as descriptor:
                with contextlib.suppress(FileNotFoundError):
                    os.link(path, target)
                    os.utime(target)  # the object's, whose own name another process may just have removed
                    if target.stat().st_size == size:
                        if _is_named(descriptor, part):
                            _remove(part)
                        return
                    target.unlink()  # somebody cut it: it is fetched anew
                if not _is_named(descriptor, part):
                    continue  # whoever had it locked was done with it
                try:
                    self._make_room(descriptor, size)
                    fetch(descriptor)
                    sync_file(descriptor)  # its name may be on disk before its bytes
                    os.link(part, target)
                    os.replace(part, path)
                except BaseException:
                    _remove(part)
                    raise
                return

    def _make_room(self, descriptor: int, size: int) -> None:
        """Take up `size` bytes, after removing what nobody uses."""
        with _locked(self._guard):
            os.ftruncate(descriptor, 0)
            found = []
            for entry in os.scandir(self._objects):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat(), Path(entry.path)))
            total = sum(status.st_size for status, _ in found) + size
            for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
                if total <= self._limit:
                    break
                if status.st_nlink == 1 and _removed(path, path):
                    total -= status.st_size
            if total > self._limit:
                raise CacheFullError(f"{self._objects}: {total} bytes are needed at once, more than fs.cacheBytes="
                                     f"{self._limit}")  # fmt: skip
            os.ftruncate(descriptor, size)

    # ---- directories of processes ----

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory of this process's own; removed at the end, or by the next one when the process was killed."""
        for lock in filter(Path.is_file, self._open.glob("*.lock")):
            _removed(lock, lock.with_suffix(""))  # of a process that was killed
        while True:
            path = self._open / uuid.uuid4().hex
            lock = path.with_suffix(".lock")
            with _locked(lock) as descriptor:
                if not _is_named(descriptor, lock):
                    continue  # somebody took it for a leftover before it was locked
                owner = os.getpid()
                try:
                    path.mkdir(0o700)
                    yield path
                finally:
                    if os.getpid() == owner:  # a fork's child lets go of the parent's objects, too
                        shutil.rmtree(path, ignore_errors=True)
                        _remove(lock)
                return


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Descriptor of a file that this holder alone has locked."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _removed(lock: Path, target: Path) -> bool:
    """Remove a file or directory and its lock, or the file that is both, unless somebody has it locked."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if target != lock:
            shutil.rmtree(target, ignore_errors=True)
        _remove(lock)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
