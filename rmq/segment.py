# SPDX-License-Identifier: Apache-2.0
"""Files: allocate, sync, delete; atomic small files; how many may be open at a time."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rmq.errors import CorruptFileError, is_handlers
from rmq.paths import SEGMENT_NAME

FILE_MODE = 0o644
DIRECTORY_MODE = 0o755
LAST_STANDARD = 2  # stderr's descriptor
LOOKS = 10  # at a directory in which another process removes files
SMALL_FILE = 1024 * 1024  # bytes looked at of files that hold a line or two
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2
SYNC_FILE_RANGE_WRITE = 2
NO_DIRECTORY = "a file or a broken link stands where a directory belongs"
EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # other files of this process stand in the way
REFUSED = (errno.EACCES, errno.EPERM)  # by modes and owners, which change
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR, errno.EAGAIN, *REFUSED, *EXHAUSTED)


def passes(error: OSError) -> bool:
    """Whether what it is about is full, used up, refused, busy or interrupted: the same call may succeed later."""
    return (is_handlers(error) or error.errno in PASSING) and not getattr(error, "failed_sync", False)


def sync_file(descriptor: int, sync: Callable[[int], None] | None = None) -> None:
    """fsync. Its OSError says `failed_sync`: the kernel may have dropped what was written, and forget it."""
    try:
        (sync or os.fsync)(descriptor)
    except OSError as error:
        error.failed_sync = not is_handlers(error)  # type: ignore[attr-defined]
        raise


def open_file(path: str | Path, flags: int, mode: int = FILE_MODE) -> int:
    """os.open, but never 0 to 2, which a daemon may have closed: what it prints would be written into the file. They
    are /dev/null from then on: a map, too, keeps a copy of its file's descriptor. OSError.
    """
    descriptor = os.open(path, flags, mode)
    if descriptor > LAST_STANDARD:
        return descriptor
    try:
        above = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LAST_STANDARD + 1)
    finally:
        os.close(descriptor)
    try:
        while (spare := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
            pass
    except OSError:
        os.close(above)
        raise
    os.close(spare)
    return above


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """Its descriptor, which syncs the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    with open_directory(path) as descriptor:
        sync_file(descriptor)


def sync_directories(path: Path) -> None:
    """Make durable what a process that was killed may have named in a directory and in those below it."""
    for name, _, _ in os.walk(path):
        sync_directory(Path(name))


class telling:  # a context manager, quicker than one of a generator
    """Have an error's text tell the file, as that of a call on a descriptor does not."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not is_handlers(error):
            error.filename = error.filename or str(self._path)


def write_fully(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """All bytes of data at a position, however many the system takes at a time."""
    written = os.pwrite(descriptor, data, position)
    while written < len(data):
        data, position = memoryview(data)[written:], position + written
        written = os.pwrite(descriptor, data, position)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return call


def begin_write_out(descriptor: int, position: int, size: int) -> None:
    """Let the disk begin with bytes that a sync will ask for. What fails is for the sync to tell; holds no GIL."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, position, size, SYNC_FILE_RANGE_WRITE)


def remove_file(path: Path, sync: Callable[[int], None] = sync_file) -> None:
    """Remove a file; durable before anything else is removed. sync: makes the names in a directory durable, by its
    descriptor, without which nothing is removed.
    """
    with open_directory(path.parent) as descriptor:
        os.unlink(path)
        sync(descriptor)


def exchange(path: Path, other: Path) -> bool:
    """Two files or directories take each other's names at one instant. False: this system cannot, nothing was done."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    reason = "no rename replaces it, as in a lower layer of an overlay (a container's image): rebuild with an output"
    raise OSError(number, reason if number == errno.EXDEV else os.strerror(number), str(other))


def remove_tree(path: Path) -> None:
    """Remove a directory, or what stands in its place, as far as that can be: rmtree would wait for a pipe's writer."""
    with contextlib.suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def make_directory(path: Path, sync: Callable[[Path], object] = sync_directory) -> None:
    """Create a directory and its parents. sync: makes new names in a directory durable, or notes that somebody must."""
    if path.is_dir():
        return
    make_directory(path.parent, sync)
    try:
        path.mkdir(DIRECTORY_MODE, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, NO_DIRECTORY, str(path)) from None
    with contextlib.suppress(PermissionError):  # it may be written, but not listed
        sync(path.parent)


def is_hidden(name: str) -> bool:
    """Whether a name is one of those that copying and desktops leave in directories; a broker makes none."""
    return name.startswith(".")


def is_unlinked(name: str) -> bool:
    """Whether a name is one that NFS keeps a removed file by, as long as somebody has it open."""
    return name.startswith(".nfs")


def file_size(path: Path) -> int:
    """Bytes of a file; 0 too where it was removed since its directory was read."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sized_files(directory: Path, size: int, *, skip_hidden: bool) -> tuple[list[int], list[int]]:
    """Numbers that name a directory's files, in order: of those of `size` bytes, and of empty ones.

    CorruptFileError for a file of another size, or whose name is no multiple of it. No directory, or a file in its
    place: no files.
    """
    sized: list[int] = []
    empty: list[int] = []
    try:
        entries = [entry for entry in os.scandir(directory)
                   if not entry.is_dir() and not is_unlinked(entry.name)
                   and not (skip_hidden and is_hidden(entry.name))]  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        return sized, empty
    for entry in entries:
        path = Path(entry.path)
        if not SEGMENT_NAME.fullmatch(entry.name) or int(entry.name) % size:
            raise CorruptFileError(path, 0, f"name is no consume-queue segment's of {size} bytes")
        try:
            length = entry.stat().st_size
        except FileNotFoundError:
            continue  # cleaned away since the directory was read
        if length not in (0, size):
            raise CorruptFileError(path, min(length, size), f"file has {length} bytes, expected {size}")
        (sized if length else empty).append(int(entry.name))
    return sorted(sized), sorted(empty)


def open_regular(path: Path, flags: int) -> int:
    """Descriptor of what must be a regular file: a FIFO is not waited for, and what is written is no symbolic link's
    target. CorruptFileError when it is something else, OSError of the system.
    """
    follow = 0 if flags & (os.O_RDWR | os.O_WRONLY) == 0 else os.O_NOFOLLOW
    descriptor = open_file(path, flags | follow | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptFileError(path, 0, "no regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """open_regular, closed at the end."""
    descriptor = open_regular(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """All of a small file. Raises as open_regular, and CorruptFileError for more than `limit` bytes."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CorruptFileError(path, limit, f"file has {size} bytes, at most {limit} make sense")
        data = b""
        with telling(path):  # a read names no file
            while len(data) < size and (more := os.read(descriptor, size - len(data))):
                data += more
        return data


def write_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool = False,
               mtime_ns: int | None = None) -> None:  # fmt: skip
    """Make a file of bytes, or of pieces one behind the other, or give it another content. Raises as open_regular.

    mtime_ns: its time of change, None: now.
    """
    with telling(path), opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        position = 0
        for piece in (data,) if isinstance(data, bytes) else data:
            write_fully(descriptor, piece, position)
            position += len(piece)
        if mtime_ns is not None:
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        if durable:
            sync_file(descriptor)


def hand_on(old: os.stat_result, path: Path) -> None:
    """Give a path the mode of the one that it replaces, and its owner, where the system lets us."""
    new, mode = path.stat(), stat.S_IMODE(old.st_mode)
    for former, own, place in ((old.st_gid, new.st_gid, (-1, old.st_gid)), (old.st_uid, new.st_uid, (old.st_uid, -1))):
        try:
            if former != own:
                os.chown(path, *place)
        except OSError:  # not ours to give, or no user of this namespace: who had a file may read it as others do
            mode |= stat.S_IMODE(new.st_mode) & 0o044 if stat.S_ISREG(new.st_mode) else 0
    os.chmod(path, mode)


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, mtime_ns: int | None = None,
                     keeps_mode: bool = False) -> None:  # fmt: skip
    """Replace a file: temporary name, fsync, rename, fsync of the directory. mtime_ns: as write_file. keeps_mode: that
    of the file before, and its owner.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_file(temporary, data, durable=True, mtime_ns=mtime_ns)
        if keeps_mode and path.exists():
            hand_on(path.stat(), temporary)
        os.replace(temporary, path)
    except (OSError, CorruptFileError):
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def write_marker(path: Path, backup: Path, text: bytes | None) -> None:
    """Create the abort file durably: empty (None), or with a text, as RocketMQ 5 does, with its side effect.

    There the content that was, nothing of a new file, goes to `backup`. With a text the file never shows without it.
    """
    if text is not None:
        write_file(backup, read_file(path, SMALL_FILE) if os.path.lexists(path) else b"")
        write_atomically(path, text)
        return
    if not path.exists():
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW))
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
        return open_file(path, flags | os.O_EXCL)
    except FileExistsError:
        if not path.is_file() or path.stat().st_size:
            raise
        return open_file(path, flags)


def directories_in(path: Path) -> list[Path]:
    """In order of names; none where there is no such directory."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments_in(directories: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """(start, length) of every segment file that is not empty."""
    for directory in directories:
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(directory)
        for name in filter(SEGMENT_NAME.fullmatch, names):
            path = directory / name
            if path.is_file() and (size := file_size(path)):
                yield int(name), size


def room_for_files(limit: int) -> int:
    """How many files to hold open at a time: an eighth of what the process may, at most `limit`."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if allowed == resource.RLIM_INFINITY else max(4, min(limit, allowed // 8))
