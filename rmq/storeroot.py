# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is a store, whose, and what of it is not read or written here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from rmq.config import StoreConfig
from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.index import index_paths
from rmq.lock import lock_holder
from rmq.marks import is_ours, shown_end
from rmq.paths import BEGUN_BY_SPARK, LMQ_PREFIX, PATH_BELOW, StorePaths, is_rocksdb, store_root
from rmq.segment import directories_in, make_directory, opened, segments_in, sync_directory
from rmq.topics import unwritten_topic

BEGUN = "a write of Spark began here and has not committed"
EMPTY_OR_NEW = "choose an empty or new directory"
NO_LOG = "the commit log has no segments, but other files do; one that lies elsewhere: store_path_commit_log"
DLEDGER_READS_IT = "a RocketMQ broker in DLedger mode reads it"
DLEDGER_MAGIC_SIZE = 4  # of an entry's begin
READS_IT = 'open it with "r", or let a broker write it'  # what is not written here


def has_segments(paths: StorePaths) -> bool:
    """Whether the commit log has any segment."""
    return next(segments_in(paths.commit_logs), None) is not None


def has_lost_log(paths: StorePaths) -> bool:
    """Whether files tell of messages and the commit log has none: it was not copied, is not mounted, or elsewhere."""
    is_told = bool(index_paths(paths.index)) or shown_end(paths) > 0 or _has_queue_files(paths) or (
        foreign_queues(paths) is not None and lock_holder(paths.lock) is None)  # a broker makes a database first
    return is_told and not has_segments(paths)  # a writer makes a segment before all others of these


def _has_queue_files(paths: StorePaths) -> bool:
    with contextlib.suppress(FileNotFoundError):  # a cleaning removes a directory
        return any(path.is_file() for queues in (paths.consume_queue, paths.batch_consume_queue)
                   for path in queues.glob("*/*/*"))  # fmt: skip
    return False


def require_log(paths: StorePaths) -> None:
    """CorruptFileError for a store that has lost its log."""
    if has_lost_log(paths):
        raise CorruptFileError(paths.commit_logs[0], 0, NO_LOG)


def check_log_place(paths: StorePaths) -> None:
    """ValueError where the log is said to lie elsewhere, and lies in the store's own directory."""
    own = paths.root / "commitlog"
    if own not in paths.commit_logs and not has_segments(paths) and next(segments_in([own]), None) is not None:
        named = f"store_path_commit_log names {paths.commit_logs[0]}, where no segment lies"
        raise ValueError(f"{named}; the store's lie in {own}")


def is_own_store(paths: StorePaths, meta: dict[str, Any] | None) -> bool:
    """Whether we made the store, or make it now. require_log, before a file of ours says anything of it."""
    if meta is not None:
        return is_ours(meta)
    require_log(paths)
    return not has_segments(paths)


def foreign_queues(paths: StorePaths) -> UnsupportedFormatError | None:
    """The error for queues that are not files of units, or None."""
    for path in (paths.consume_queue, *paths.root.glob("consumequeue_r*")):
        if is_rocksdb(path):
            return UnsupportedFormatError(path, "consume queues in RocksDB (storeType=defaultRocksDB)",
                                          "RocketMQ 5.2 or later reads them; scan reads the commit log")  # fmt: skip
    return None


def foreign_index(paths: StorePaths) -> UnsupportedFormatError | None:
    """The error for an index that is not files of slots and entries, or None."""
    for path in (paths.index, *paths.root.glob("index*[rR]ocks*")):
        if is_rocksdb(path):
            return UnsupportedFormatError(path, "index in RocksDB",
                                          "RocketMQ reads it; scan reads the commit log")  # fmt: skip
    return None


def check_readable(paths: StorePaths) -> None:
    """Refuse directories whose messages are in no commit log that is read here, or not all of them."""
    for path in paths.root.glob("dledger-*"):
        if _has_entries(path / "data"):
            raise UnsupportedFormatError(path, "commit log wrapped by DLedger", f"{DLEDGER_READS_IT}; of an older log "
                                         "beside it a copy of commitlog/ alone is read")  # fmt: skip
    if any(path.is_dir() for path in paths.commit_logs):
        return
    shards = paths.shards()
    if shards:
        raise UnsupportedFormatError(paths.root, f"no store, but a directory of {len(shards)} that Spark wrote",
                                     'spark.read.format("rmq") reads them as one; open each alone, as '
                                     f"{paths.root / shards[0]}")  # fmt: skip
    if paths.own.is_dir():
        return
    for path in paths.root.glob("dledger-*"):
        if path.is_dir():
            raise UnsupportedFormatError(path, "commit log wrapped by DLedger", DLEDGER_READS_IT)
    for path in paths.root.glob("tiered*"):
        if path.is_dir():
            raise UnsupportedFormatError(path, "tiered storage", "RocketMQ's tiered store reads it")


def _has_entries(data: Path) -> bool:
    """Whether a DLedger log holds entries: its first file may be made ahead, of zeros. Of an object nobody knows."""
    for path in data.glob("[0-9]*"):
        with contextlib.suppress(OSError, CorruptFileError), opened(path) as descriptor:
            if os.pread(descriptor, DLEDGER_MAGIC_SIZE, 0) != bytes(DLEDGER_MAGIC_SIZE):
                return True
    return False


def check_is_store(paths: StorePaths) -> None:
    """Refuse to read a directory in which nothing is a store's."""
    if not _is_store(paths):
        reason = BEGUN if paths.is_begun_by_spark() else "it has no commitlog directory"
        raise UnsupportedFormatError(paths.root, "no message store", reason)


def _is_store(paths: StorePaths) -> bool:
    """Whether anything is a store's, or a writer is about to make it one."""
    return paths.looks_like_store() or lock_holder(paths.lock) is not None


def check_writable(paths: StorePaths) -> None:
    """Refuse to write stores that need what is not written here: UnsupportedFormatError says what."""
    foreign = foreign_queues(paths) or foreign_index(paths)
    if foreign is not None:
        raise foreign
    for path in paths.root.glob("dledger-*"):
        raise UnsupportedFormatError(path, "DLedger log", READS_IT)
    if len(paths.commit_logs) > 1:
        raise UnsupportedFormatError(paths.root, "commit log in several paths", READS_IT)
    if directories_in(paths.root / "consumequeue_ext"):
        raise UnsupportedFormatError(paths.root / "consumequeue_ext",
                                     "extended consume queues (consumequeue_ext)", READS_IT)  # fmt: skip
    if directories_in(paths.batch_consume_queue):
        raise UnsupportedFormatError(paths.batch_consume_queue, "queues of inner batches (BatchCQ)", READS_IT)
    if what := unwritten_topic(paths.topics_json):
        raise UnsupportedFormatError(paths.topics_json, what, READS_IT)
    for path in directories_in(paths.consume_queue):
        if path.name.startswith(LMQ_PREFIX):
            raise UnsupportedFormatError(path, "light message queue (LMQ)", READS_IT)


def make_root(path: Path, paths: StorePaths, mode: str) -> None:
    """The directory of a store to write; it may be made, or must be there, as `mode` says."""
    try:
        require_directory(path)
    except FileNotFoundError:
        if mode == "r+":
            raise
        check_writable(paths)  # before anything is made
        _check_room(paths)
        make_directory(path)
        return
    check_log_place(paths)
    is_empty = not _names(path)
    if mode == "x":  # an empty lock is one of a process that was killed, or had no room for it
        has_begun = paths.lock.is_file() and not paths.lock.is_symlink() and not paths.lock.stat().st_size
        require_empty(path, but=paths.lock.name if has_begun else "")
    check_beginning(path, paths, by_spark=paths.is_begun_by_spark())
    if mode == "r+" and not _is_store(paths):
        raise FileNotFoundError(errno.ENOENT, "no store in it" + f"; {BEGUN}" * paths.is_begun_by_spark(), str(path))
    if is_empty:  # perhaps made by a process that was killed
        _check_room(paths)
        with contextlib.suppress(PermissionError):
            sync_directory(paths.root.parent)


def require_empty(path: Path, *, but: str = "") -> None:
    """FileExistsError for a directory with anything in it; but: one name may be there."""
    if _names(path) - {but}:
        raise FileExistsError(errno.EEXIST, "exists and is not empty", str(path))


def empty_root(path: Path, paths: StorePaths) -> None:
    """Take away what an exclusive open that failed has made in a directory that was empty; the lock last, which is
    ours until it goes."""
    own = {"commitlog", "consumequeue", "index", "config", "rmq", "checkpoint", "abort", "abort.bak"}
    for name in _names(path) & own:
        if (item := path / name).is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
    paths.lock.unlink(missing_ok=True)


def _check_room(paths: StorePaths) -> None:
    """Of a store that is made now: a queue whose path is too long would keep it from being opened again."""
    if len(os.fsencode(paths.root)) + PATH_BELOW >= os.pathconf("/", "PC_PATH_MAX"):
        raise OSError(errno.ENAMETOOLONG, f"leaves less than {PATH_BELOW} bytes for paths below it", str(paths.root))


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {"lost+found"}  # what mkfs makes


def names_beside_spark(paths: StorePaths) -> set[str]:
    """What lies in a directory that a write of Spark may begin in, but for what such writes leave before they commit,
    and for names that Spark passes over, as those of checkpoints and checksums.
    """
    own = {"rmq", "lock"} if {path.name for path in paths.own.glob("*")} <= BEGUN_BY_SPARK else set()
    return {name for name in _names(paths.root) - own if not name.startswith(("_", "."))}


def check_beginning(path: Path, paths: StorePaths, *, by_spark: bool) -> None:
    """Refuse to begin a store among files of others: UnsupportedFormatError."""
    if not _is_store(paths) and (names_beside_spark(paths) if by_spark else _names(path)):
        raise UnsupportedFormatError(path, "no message store, but a directory with other files", EMPTY_OR_NEW)


def require_store(path: Path, paths: StorePaths) -> None:
    """require_directory, FileNotFoundError also when directories of the log were named and none of them is there, and
    check_log_place.
    """
    require_directory(path)
    if paths.is_log_elsewhere and not any(path.is_dir() for path in paths.commit_logs):
        raise FileNotFoundError(errno.ENOENT, "no such commit-log directory", ", ".join(map(str, paths.commit_logs)))
    check_log_place(paths)


def paths_to_read(path: str | os.PathLike[str], config: StoreConfig) -> StorePaths:
    """The files of a store that is there and can be read, else the errors of an open."""
    root = store_root(path)
    paths = StorePaths(root.absolute(), config.store_path_commit_log)
    require_store(root, paths)
    check_readable(paths)
    check_is_store(paths)
    return paths


def require_directory(path: Path) -> None:
    """FileNotFoundError or NotADirectoryError when no directory is there."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)  # asked once: a writer may make it at any time
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, "no such store directory", str(path)) from None
    if not is_directory:
        raise NotADirectoryError(errno.ENOTDIR, "not a directory, so no store", str(path))
