# SPDX-License-Identifier: Apache-2.0
"""Sidecars, which make selects of sealed index files quick. Derived, never needed. Layout: docs/format/sidecar.md."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._sidecar import SidecarView, build_sidecar, sidecar_size
from rmq.errors import CorruptFileError
from rmq.mappedfile import GuardedMap, MappedFile, room_for_maps
from rmq.paths import INDEX_NAME, sidecar_path
from rmq.segment import allocate, make_directory, open_regular, remove_file, sync_directory, sync_file

logger = logging.getLogger("rmq")

WORTHWHILE = 16 * 1024 * 1024  # bytes of an index file; a smaller one is in the CPU's cache, where a walk is quick
TEMPORARY = ".tmp"
DISK_LEFT = 2  # times its own size that a disk must have free

_mapped: weakref.WeakSet[GuardedMap] = weakref.WeakSet()  # all that this process asks
_running: weakref.WeakSet[SidecarMaker] = weakref.WeakSet()


def open_sidecar(index: Path, inode: int, view: IndexFileView) -> SidecarView | None:
    """The sidecar of a full index file that is open; None when it has none that fits, whatever lies there."""
    path = sidecar_path(index)
    try:
        if path is None or not path.exists():
            return None
        status = os.stat(index)
        size = sidecar_size(view.hash_slot_num, view.index_num)
        if status.st_ino != inode or len(_mapped) >= room_for_maps(size):
            return None
        file = MappedFile(path, size=size)
        found = SidecarView(file.map, file.map.guard, hash_slot_num=view.hash_slot_num, index_num=view.index_num,
                            index_mtime_ns=status.st_mtime_ns, index_header=view.header())  # fmt: skip
        _mapped.add(file.map)
        return found
    except (CorruptFileError, OSError, ValueError, MemoryError) as error:
        logger.debug("%s: not used: %s", path, error)
        return None


def make_sidecar(index: Path, hash_slot_num: int, index_num: int,
                 goes_on: Callable[[], bool] = lambda: True) -> str:  # fmt: skip
    """Make the sidecar of a full index file of a store, or make it anew: under its name only when it is whole and on
    disk. Returns "" or why there is none. Raises CorruptFileError, OSError.
    """
    target = sidecar_path(index)
    if target is None:
        return "it is no store's index file"
    os.stat(index)  # FileNotFoundError before anything is made: the store may have been moved
    make_directory(target.parent)
    size = sidecar_size(hash_slot_num, index_num)
    disk = os.statvfs(target.parent)
    if disk.f_bavail * disk.f_frsize < (1 + DISK_LEFT) * size:
        return f"the disk has not {1 + DISK_LEFT} times its {size} bytes free"
    with _temporary(target) as descriptor:
        if descriptor < 0:
            return "another process makes it"
        status = os.stat(index)
        source = MappedFile(index, size=index_file_size(hash_slot_num, index_num))
        if source.inode != status.st_ino:
            return "it was replaced meanwhile"
        os.ftruncate(descriptor, 0)  # of a process that was killed
        allocate(descriptor, 0, size)
        made = GuardedMap.of(descriptor, size, mmap.ACCESS_WRITE)
        with contextlib.suppress(OSError, AttributeError):  # a system without
            made.madvise(mmap.MADV_HUGEPAGE)  # all of it is written, in no order, and read so: fewer pages to look up
        why = build_sidecar(source.map, made, hash_slot_num=hash_slot_num, index_num=index_num,
                            index_mtime_ns=status.st_mtime_ns, goes_on=goes_on)  # fmt: skip
        source.check()
        if made.lost >= 0:
            raise CorruptFileError(target, made.lost, "page is gone while the sidecar was made")
        if why:
            return why
        sync_file(descriptor)
        os.replace(_temporary_path(target), target)
        sync_directory(target.parent)
    sweep_sidecars(target.parent, index.parent)
    return ""


def sweep_sidecars(directory: Path, indexes: Path) -> None:
    """Remove sidecars whose index files are gone, as a recovery or a cleaning that was interrupted leaves them, and
    those that nobody goes on making. Other names, and a directory elsewhere that a link names, are not ours."""
    if directory.is_symlink() or not directory.is_dir():
        return
    for path in directory.iterdir():
        if INDEX_NAME.fullmatch(path.stem) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == TEMPORARY:
                    with _temporary(path.with_suffix("")):
                        pass  # it goes
                elif not path.suffix and not (indexes / path.name).exists():
                    remove_file(path)


def _temporary_path(target: Path) -> Path:
    return target.with_name(target.name + TEMPORARY)


@contextmanager
def _temporary(target: Path) -> Iterator[int]:
    """Descriptor of a file beside the target, -1 while somebody else has it. Unless it is renamed, it goes."""
    path = _temporary_path(target)
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.fstat(descriptor).st_ino == os.stat(path).st_ino  # else it was renamed before it was locked
        except (BlockingIOError, FileNotFoundError):
            is_mine = False
        if not is_mine:
            yield -1
            return
        try:
            yield descriptor
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    os.unlink(path)
    finally:
        os.close(descriptor)


class SidecarMaker:
    """Makes sidecars in the thread rmq-sidecar, one after the other. What goes wrong is told and changes nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[tuple[Path, int, int]] = []
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.pid = os.getpid()

    def add(self, index: Path, hash_slot_num: int, index_num: int) -> None:
        """Make that of a full index file whose bytes are on disk, if it is worthwhile. Nothing once stopped."""
        if index_file_size(hash_slot_num, index_num) < WORTHWHILE or self._is_stopped:
            return
        with self._lock:
            self._wanted.append((index, hash_slot_num, index_num))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rmq-sidecar", daemon=True)
                try:
                    thread.start()  # it waits for the lock
                except RuntimeError as error:  # no thread to be had
                    self._wanted.clear()
                    logger.info("%s: no sidecar: %s", index, error)
                    return
                self._thread = thread
                _running.add(self)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._is_stopped:
                    self._thread = None
                    return
                index, hash_slot_num, index_num = self._wanted.pop(0)
            try:
                why = make_sidecar(index, hash_slot_num, index_num, lambda: not self._is_stopped)
                if why:
                    logger.info("%s: no sidecar: %s", index, why)
            except (CorruptFileError, OSError, ValueError, MemoryError) as error:
                logger.info("%s: no sidecar: %s", index, error)

    def stop(self) -> None:
        """End the thread; what it was making is given up."""
        self._is_stopped = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self.pid == os.getpid():
            thread.join()


@atexit.register
def _stop_threads() -> None:
    """Before the interpreter ends, as those that flush."""
    for maker in list(_running):
        maker.stop()
