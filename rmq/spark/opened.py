# SPDX-License-Identifier: Apache-2.0
"""Stores that a Python worker of Spark has open: read only, opened once, used by all its tasks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rmq._core import _layout as L
from rmq.config import StoreConfig, config_or_default
from rmq.errors import CorruptFileError, RmqError, UnsupportedFormatError
from rmq.mirror import MirroredStore, told
from rmq.objectcache import CacheFullError
from rmq.objects import Location
from rmq.paths import SEGMENT_NAME, StorePaths, is_elsewhere, local_path, path_text, store_root
from rmq.segment import opened as opened_file
from rmq.snapshot import META, Snapshot
from rmq.store import Store
from rmq.store import open as open_store
from rmq.storeroot import check_readable
from rmq.version import __version__
from rmq.windows import WindowedStore

LIMIT = 16  # stores of a worker; of more, the one that nobody uses for longest is closed

Identity = tuple[object, ...]  # of a process and of the files that a directory's store began with
Head = tuple[str, bytes]  # of a log
Place = str | Snapshot  # a directory here, or what the driver has listed elsewhere

_lock = threading.Lock()
Key = tuple[Place, StoreConfig | None, str]
_stores: OrderedDict[Key, tuple[Identity, Store]] = OrderedDict()
_in_use: dict[object, tuple[Key, Store | None]] = {}  # of each `using`; None: not opened yet
_let_go: list[tuple[Key, Store]] = []  # closed when the last `using` of them ends


class ExecutorError(RmqError):
    """What a task cannot do on its host: host, path and reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"host {socket.gethostname()}: {self.path}: {self.reason}"


def check_version(planned_by: str, path: str) -> None:
    """ExecutorError when the driver's rmq, whose plan this is, is not the executor's."""
    if planned_by != __version__:
        raise ExecutorError(path, f"rmq {__version__} is installed here, the driver has {planned_by}")


def check_seen(path: str) -> None:
    """ExecutorError when there is nothing at the path on this host."""
    _identity(path)


def check_session(spark: Any) -> None:
    """TypeError for what is no session of Spark, nor of Spark Connect."""
    from pyspark.sql import SparkSession

    connect = sys.modules.get("pyspark.sql.connect.session")  # a class of its own; loaded where there is one of it
    if not isinstance(spark, SparkSession) and not (connect and isinstance(spark, connect.SparkSession)):
        raise TypeError(f"spark must be a SparkSession, got {type(spark).__name__}")


def check_frame(df: Any) -> None:
    """TypeError for what is no frame of either."""
    from pyspark.sql import DataFrame

    if not isinstance(df, DataFrame):
        raise TypeError(f"df must be a DataFrame, got {type(df).__name__}")


def opened(place: Place, config: StoreConfig | None = None, io: str = "mmap") -> Store:
    """The store, open for reading. Another store at the same path is opened anew; ExecutorError when there is none.

    io: how its log is read, mmap, pread or auto, if it is a directory; with the last two it may have no index.
    """
    key = place, config, io
    with _lock:
        identity = _identity(place, config)
        if key in _stores:
            known, store = _stores[key]
            if known == identity and not store.closed:
                _stores.move_to_end(key)
                return store
            _close(key)
        try:
            store = _open(place, config, io) if isinstance(place, str) else _mirrored(place, config)
        except (OSError, MemoryError, UnsupportedFormatError) as error:
            raise ExecutorError(path_of(place), f"cannot be opened: {_advice(error)}") from error
        _stores[key] = identity, store
        used = [key, *_used_keys()]
        unused = [other for other in _stores if other not in used]
        for other in unused[: max(0, len(_stores) - LIMIT)]:
            _close(other)
        return store


def _open(path: str, config: StoreConfig | None, io: str) -> Store:
    if io == "mmap":
        return open_store(path, config=config)
    if io == "auto":
        try:
            return WindowedStore(path, config, maps_first=True, has_index=True)
        except OSError as error:
            if not _is_no_room(error):
                raise
    return WindowedStore(path, config, maps_first=io == "auto", has_index=False)


def _mirrored(snapshot: Snapshot, config: StoreConfig | None) -> MirroredStore:
    """A snapshot, open. Others that nobody uses give way: former ones of its store, and any when the cache is full."""
    used = _used_keys()
    unused = [(key, place) for key in _stores if isinstance(place := key[0], Snapshot) and key not in used]
    former = [key for key, place in unused if place != snapshot
              and (place.location, place.parts) == (snapshot.location, snapshot.parts)]  # fmt: skip
    for key in former:
        _close(key)
    others = [key for key, _ in unused if key not in former]  # the one used longest ago first
    while True:
        try:
            return MirroredStore(snapshot, config)
        except CacheFullError:
            if not others:
                raise
            _close(others.pop(0))


def path_of(place: Place) -> str:
    return place if isinstance(place, str) else place.location.uri


def _identity(place: Place, config: StoreConfig | None = None) -> Identity:
    if not isinstance(place, str):
        return (os.getpid(),)
    try:
        found = os.stat(place)
    except OSError as error:
        raise ExecutorError(place, f"no store is to be read here: {error.strerror}; "
                            "all executors and the driver need it at this path") from None  # fmt: skip
    paths = StorePaths(Path(place), config.store_path_commit_log if config is not None else None)
    identity = os.getpid(), found.st_dev, found.st_ino, *_head_of_log(paths)
    with contextlib.suppress(OSError):  # a store that a broker made has none
        meta = paths.meta.stat()
        return *identity, meta.st_ino, meta.st_mtime_ns
    return identity


def _head_of_log(paths: StorePaths) -> Identity:
    """The first segment and its first record's fixed part: a number of a file that was removed is soon another's."""
    if (first := _first_segment(paths)) is not None:
        with contextlib.suppress(OSError, ValueError, CorruptFileError), opened_file(first) as file:
            found = os.fstat(file)
            return found.st_dev, found.st_ino, os.pread(file, L.RECORD_FIXED_SIZE, 0)
    return ()


def _first_segment(paths: StorePaths, name: str | None = None) -> Path | None:
    """name: the segment of that name."""
    segments: list[tuple[str, Path]] = []
    for directory in paths.commit_logs:
        with contextlib.suppress(OSError):
            segments += [(found, directory / found) for found in os.listdir(directory)
                         if SEGMENT_NAME.fullmatch(found) and name in (None, found)]  # fmt: skip
    return min(segments)[1] if segments else None


def log_head(path: str, config: StoreConfig | None = None, name: str | None = None) -> Head | None:
    """What tells a store from another one at its path, on every host: the name and the first record's fixed part of its
    first segment, or of the one of a name. None: there is none."""
    paths = StorePaths(Path(path), config.store_path_commit_log if config is not None else None)
    first = _first_segment(paths, name)
    if first is not None:
        with contextlib.suppress(OSError, ValueError, CorruptFileError), opened_file(first) as file:
            return first.name, os.pread(file, L.RECORD_FIXED_SIZE, 0)
    return None


@contextlib.contextmanager
def having_room(path: str) -> Iterator[None]:
    """ExecutorError, which names Spark's setting, when there is no room for a map or for what is made of it."""
    try:
        yield
    except (OSError, MemoryError) as error:
        if _is_no_room(error):
            raise ExecutorError(path, _advice(error)) from error
        raise


@contextlib.contextmanager
def using(place: Place, config: StoreConfig | None = None, io: str = "mmap") -> Iterator[Store]:
    """opened. After an error the store is opened anew next time. ExecutorError when memory or disk is full."""
    key = place, config, io
    with _held(key) as user:
        store = opened(place, config, io)
        _in_use[user] = key, store
        try:
            with having_room(path_of(place)):
                yield store
        except (RmqError, OSError) as error:
            forget(place)
            if isinstance(error, OSError) and isinstance(place, Snapshot):
                raise ExecutorError(path_of(place), _advice(error)) from error
            if (better := told(store, error)) is not error:
                raise better from None
            raise


@contextlib.contextmanager
def _held(key: Key) -> Iterator[object]:
    """Not to be closed for others."""
    user = object()
    _in_use[user] = key, None
    try:
        yield user
    finally:  # without the lock: a generator that was let go of may end where its own thread has it
        del _in_use[user]
        _close_unused()


def _used_keys() -> list[Key]:
    return [key for key, _ in list(_in_use.values())]


@contextlib.contextmanager
def planning(snapshot: Snapshot, config: StoreConfig | None) -> Iterator[Store]:
    """A snapshot, open as long as the driver plans."""
    with MirroredStore(snapshot, config) as store:
        try:
            yield store
        except RmqError as error:
            raise told(store, error) from None


def checked_path(path: str | os.PathLike[str]) -> str:
    """As text. TypeError for what is no path, FileNotFoundError for an empty one."""
    text = path_text(path, "path")
    if not is_elsewhere(text):
        store_root(text)
    return text


def for_lookups(path: str, config: StoreConfig | None) -> Place:
    """How executors open a store whose keys are asked for. Of one elsewhere: as it is now; SETTINGS behind its `?`."""
    if not is_elsewhere(path):
        given = config_or_default(config).store_path_commit_log
        root = Path(local_path(path)).absolute()  # the workers' own directory is another
        check_readable(StorePaths(root, given))
        return str(root)
    taken = Snapshot.take(Location.parse(path)).require_store()
    with planning(taken.of(), config) as store:
        return taken.of("index", end=store.max_phy_offset)


def hash_slots(place: Place, config: StoreConfig | None) -> int:
    """max_hash_slot_num of a store. Cost: where no meta.json tells it, index files are looked through."""
    if isinstance(place, str):
        with open_store(place, config=config) as store:
            return store.config.max_hash_slot_num
    with planning(place.of(end=place.end) if META in dict(place.small) else place, config) as store:
        return store.config.max_hash_slot_num


def forget(place: Place, *, wait: bool = True) -> None:
    """Open it anew next time, for after an error: files may have been replaced below a store that is open.

    wait: False where a generator that was let go of may end below the lock, then it stays open.
    """
    if _lock.acquire(blocking=wait):
        try:
            for key in [key for key in _stores if key[0] == place]:
                _close(key)
        finally:
            _lock.release()


def _close(key: Key) -> None:
    identity, store = _stores.pop(key)
    if identity[0] == os.getpid():
        _let_go.append((key, store))
        _close_unused()


def _close_unused() -> None:
    """Close the stores that were let go of and that nobody reads."""
    users = list(_in_use.values())
    for key, store in list(_let_go):
        if not any(user[1] is store or user == (key, None) for user in users):
            with contextlib.suppress(ValueError):  # another thread closes it too
                _let_go.remove((key, store))
            store.close()


def _is_no_room(error: Exception) -> bool:
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM  # the latter of a map


def _advice(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error) or "out of memory"
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename}: {reason}"
    if _is_no_room(error):
        reason += "; spark.executor.pyspark.memory limits the address space: leave it unset, or at 4g and more"
    return reason
