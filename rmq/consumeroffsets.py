# SPDX-License-Identifier: Apache-2.0
"""config/consumerOffset.json: the queue offset from which each consumer group goes on in each queue.

Source: RocketMQ ConsumerOffsetManager; LmqConsumerOffsetManager, which takes its place where a broker has light queues.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.fastjson import CONFIG_LIMIT, count_on, document_bytes, read_document, with_backup, write_document
from rmq.keys import checked_int, encoded
from rmq.lock import check_same
from rmq.paths import LARGEST_OFFSET, LMQ_PREFIX, FileVersion, StorePaths, is_rocksdb, version_of
from rmq.segment import make_directory, open_regular, read_file

logger = logging.getLogger("rmq")

Offsets = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue id -> queue offset
_Table = dict[str, dict[str, int]]  # as the file has it; what a commit replaces is never changed in place

SEPARATOR = "@"  # "topic@group" is the key of what a group has consumed of a topic
_TABLE, _LMQ_TABLE = "offsetTable", "lmqOffsetTable"
_INT = re.compile(r"0|-?[1-9]\d{0,9}", re.ASCII)
_LONGS = range(-(2**63), 2**63)
LOOK_S, SOON_S, WAIT_S = 0.002, 0.1, 10  # while another process commits, which takes a sync of the disk


def check_group(group: Any, topic: Any) -> None:
    """TypeError or ValueError for what are no names of a group and a topic."""
    if not encoded(group, "group") or SEPARATOR in group:
        raise ValueError(f"group must be a name without {SEPARATOR!r}, got {group!r}")
    if not encoded(topic, "topic"):
        raise ValueError("topic must not be empty")


def checked_queue_id(queue_id: Any) -> int:
    """TypeError or ValueError for what is no queue id of Java's: a broker would read no offset of any group then."""
    number = checked_int(queue_id, "queue_id", least=0)
    if number >= 2**31:
        raise ValueError(f"queue_id must be an int of Java's, got {number}")
    return number


def read_offsets(paths: StorePaths) -> Offsets:
    """What a broker that starts now goes by; {} when no group has committed anything.

    Raises CorruptFileError, UnsupportedFormatError (RocksDB), OSError.
    """
    damage: CorruptFileError | None = None
    for path in with_backup(_kept_file(paths)):
        try:
            found = _by_group(path, _document(path))
        except FileNotFoundError:  # a broker renames it
            continue
        except CorruptFileError as error:  # or writes in place, after it has written to the .bak what was
            damage = damage or error
            continue
        if damage is not None:
            logger.warning("%s; read from %s, as a broker does", damage, path.name)
        return found
    if damage is not None:
        raise damage
    return {}


def _kept_file(paths: StorePaths) -> Path:
    """The file that the last broker kept; it need not be there."""
    for path in paths.rocksdb_offsets:
        if is_rocksdb(path):
            raise UnsupportedFormatError(path, "consumer offsets in RocksDB", "mqadmin rocksDBConfigToJson shows them")
    return max((paths.consumer_offsets, paths.lmq_consumer_offsets), key=_last_change)


def _last_change(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _document(path: Path) -> dict[str, Any]:
    """A file's object; CorruptFileError when it is none."""
    try:
        return read_document(path, _TABLE)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, 0, f"no table of consumer offsets: {error}") from None


def _by_group(path: Path, document: dict[str, Any]) -> Offsets:
    """Sorted by name and number. Raises CorruptFileError."""
    found: Offsets = {}
    for group, topic, queue_id, queue_offset in sorted(_rows(path, document)):
        found.setdefault(group, {}).setdefault(topic, {})[queue_id] = queue_offset
    return found


def _rows(path: Path, document: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    light = document.get(_LMQ_TABLE, {})
    tables = [document[_TABLE], {key: {"0": place} for key, place in light.items()} if isinstance(light, dict) else {}]
    for table in tables:
        for key, queues in table.items():
            topic, separator, group = key.rpartition(SEPARATOR)
            if not separator or not isinstance(queues, dict):
                raise CorruptFileError(path, 0, f"no consumer offsets of a topic@group: {key!r}")
            for queue_id, place in queues.items():
                if not _INT.fullmatch(queue_id) or type(place) is not int or place not in _LONGS:
                    raise CorruptFileError(path, 0, f"no queue's consumer offset: {key!r}: {queue_id!r}")
                yield group, topic, int(queue_id), place


class ConsumerOffsets:
    """Those of a store, to which several processes commit. Thread-safe.

    The one that writes the store keeps its commits in memory between flushes: `commit`, `taken`, `write`. A reader's go
    to the file at once: `commit_now`.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._lock = threading.RLock()  # behind `_alone`, where both are held
        self._file: tuple[Path, FileVersion | None, dict[str, Any]] | None = None  # as it was, once it was read
        self._data = b""  # that was written last
        self._commits: _Table = {}  # which the file lacks
        self._leaving: Collection[tuple[str, int]] = ()
        self._at_work: tuple[int, io.FileIO] | None = None  # the thread that is alone, while the file is open
        self._must_write = False  # a write failed: the file may have what the disk lacks

    @property
    def is_behind(self) -> bool:
        """Whether the file lacks a commit."""
        return bool(self._commits)

    def groups(self) -> Offsets:
        """read_offsets, with what was committed since."""
        with self._lock:
            if self._file is None and not self._commits:
                return read_offsets(self._paths)
            path, document = self._loaded()
            return _by_group(path, _with(document, self._commits))

    def commit(self, group: str, topic: str, tell: Callable[[], Mapping[int, int]]) -> None:
        """In memory. tell: the queue offsets, asked while no queue begins anew. Raises as read_offsets and what it
        raises; where a broker would go by the .bak, CorruptFileError.
        """
        with self._lock:
            self._keep(group, topic, tell())

    def commit_now(self, group: str, topic: str, tell: Callable[[], Mapping[int, int]]) -> None:
        """On disk. tell: as of commit. Raises as write, and what it raises."""
        with self.lock_file() as file, self._alone(file, WAIT_S):
            key, places = _row_of(group, topic, tell())
            try:
                with self._lock:
                    queues = self._table_of(group).get(key, {})
                if places.items() - queues.items() or (places and self._must_write):
                    self._write({key: places})
            finally:
                with self._lock:
                    self._file = None  # a broker may come, which writes in place

    def cut_back(self, max_offset_of: Callable[[str, int], int]) -> None:
        """Where a queue ends before it, by a crash or lost files: what will be put there has not been consumed.

        Raises OSError: with offsets that are not known now, groups would pass over what is put.
        """
        try:
            if not with_backup(_kept_file(self._paths)):
                return
            with self.lock_file() as file, self._alone(file, WAIT_S):  # what others commit comes before, or after
                with self._lock:
                    self._cut(max_offset_of)
                if commits := self.taken():
                    self._write(commits)
        except UnsupportedFormatError:
            pass  # who commits is told
        except (CorruptFileError, PermissionError) as error:
            logger.warning("%s: left as it is: %s", self._paths.consumer_offsets, error)

    @contextmanager
    def leaving(self, file: io.FileIO, queues: Collection[tuple[str, int]]) -> Iterator[None]:
        """While whole queues go, by topic and queue id, which begin at 0 again: nothing of them is consumed, on disk
        before they go, and nobody commits otherwise meanwhile. Raises as write; of offsets in RocksDB nothing is known.
        """
        with self._alone(file, WAIT_S):
            try:
                with self._lock, contextlib.suppress(UnsupportedFormatError):
                    self._leaving = queues
                    self._cut(lambda *queue: 0 if queue in queues else LARGEST_OFFSET)
                # No others: their messages need not be on disk yet.
                gone = {key: {number: place for number, place in places.items()
                              if (key.rpartition(SEPARATOR)[0], int(number)) in queues}
                        for key, places in self.taken().items()}  # fmt: skip
                if any(gone.values()):
                    self._write({key: places for key, places in gone.items() if places})
                yield
            finally:
                self._leaving = ()

    def taken(self) -> _Table:
        """What a flush writes. Before the flush asks where the log ends."""
        with self._lock:
            return dict(self._commits)

    def write(self, commits: _Table, *, waits: bool = True) -> None:
        """On disk, beside what others have committed meanwhile. Raises as commit, and OSError: BlockingIOError (passes)
        where another process has been at it for WAIT_S seconds; not waits: they are left to the next time, soon.
        """
        if commits:
            try:
                with self.lock_file() as file, self._alone(file, WAIT_S if waits else SOON_S):
                    self._write(commits)
            except BlockingIOError:
                if waits:
                    raise

    def _keep(self, group: str, topic: str, queue_offsets: Mapping[int, int]) -> None:
        leaving = self._leaving if self._at_work is not None and not self._at_work[1].closed else ()
        places = {queue_id: 0 if (topic, queue_id) in leaving else place
                  for queue_id, place in queue_offsets.items()}  # fmt: skip
        key, row = _row_of(group, topic, places)
        kept = self._commits.get(key, {})
        if row.items() - {**self._table_of(group).get(key, {}), **kept}.items():
            self._commits[key] = {**kept, **row}

    def _cut(self, max_offset_of: Callable[[str, int], int]) -> None:
        path, document = self._loaded()
        table = _with(document, self._commits)[_TABLE]
        for group, topic, queue_id, place in list(_rows(path, {_TABLE: table})):
            is_light = topic.startswith(LMQ_PREFIX) or self._is_light(group, path)
            if not is_light and place > (end := max_offset_of(topic, queue_id)):
                self._keep(group, topic, {queue_id: end})
                logger.warning("%s: group %s had consumed %s queue %d up to %d, which now ends at %d", path, group,
                               topic, queue_id, place, end)  # fmt: skip

    def _write(self, commits: _Table) -> None:
        with self._lock:
            if self._file is not None and not self._is_as_written(self._file[0]):
                self._file = None  # a version may come again within a tick of the file system's clock
            path, document = self._loaded()
        count_on(document)
        document = _with(document, commits)
        self._must_write = True
        data = write_document(path, document)
        self._must_write = False
        with self._lock:
            self._file, self._data = (path, version_of(str(path)), document), data
            left = {key: dict(places.items() - commits.get(key, {}).items()) for key, places in self._commits.items()}
            self._commits = {key: places for key, places in left.items() if places}

    def _is_as_written(self, path: Path) -> bool:
        with contextlib.suppress(OSError, CorruptFileError):
            return not path.is_symlink() and read_file(path, CONFIG_LIMIT) == self._data
        return False

    def lock_file(self) -> io.FileIO:
        """What `_alone` locks, for a `with` of its caller's own: that closes it in C, so that no interrupt leaves it
        locked, as one does that keeps a generator from its end while its traceback is kept.
        """
        path = self._paths.offsets_lock
        if self._at_work is not None and self._at_work[0] == threading.get_ident() and not self._at_work[1].closed:
            raise RuntimeError(f"{path}: called in the middle of another call of its thread, as by a signal handler")
        make_directory(path.parent)
        file = io.FileIO(open_regular(path, os.O_RDWR | os.O_CREAT), "r+")
        _held.difference_update([other for other in list(_held) if other.closed])
        _held.add(file)
        return file

    @contextmanager
    def _alone(self, file: io.FileIO, wait_s: float) -> Iterator[None]:
        """No other process or thread changes the offsets meanwhile, but a broker."""
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    held = f"held by another process for {wait_s} s"
                    raise BlockingIOError(errno.EAGAIN, held, str(self._paths.offsets_lock)) from None
            time.sleep(LOOK_S)
        # That took its time, and what follows goes by names: they may lead to another store by now.
        check_same(self._paths.offsets_lock, os.fstat(file.fileno()), self._paths.root)
        self._at_work = threading.get_ident(), file
        try:
            yield
        finally:
            self._at_work = None
            if not file.closed:
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # also where a fork's child has the file

    def _is_light(self, group: str, path: Path) -> bool:
        """Whether it is one of a broker with light queues, which keeps its offsets in a table of their own."""
        return group.startswith(LMQ_PREFIX) and path == self._paths.lmq_consumer_offsets

    def _table_of(self, group: str) -> _Table:
        path, document = self._loaded()
        if self._is_light(group, path):
            raise UnsupportedFormatError(path, f"consumer offsets of a light group, {group!r}", "a broker commits them")
        table: _Table = document[_TABLE]
        return table

    def _loaded(self) -> tuple[Path, dict[str, Any]]:
        """The file that commits go to, as it is now."""
        path = _kept_file(self._paths)
        version = version_of(str(path))
        if self._file is None or self._file[:2] != (path, version):
            if path.is_symlink():
                raise CorruptFileError(path, 0, "is a symbolic link, which is not written through")
            files = with_backup(path)
            document = _document(files[0]) if files else {_TABLE: {}}
            _by_group(path, document)
            try:
                document_bytes(document)
            except RecursionError as error:
                raise CorruptFileError(path, 0, f"nests too deep: {error}") from None
            self._file = path, version, document
        return path, self._file[2]


_held: set[io.FileIO] = set()  # no weak one: an interrupt in its callback would be lost


def _drop_in_child() -> None:
    """A child that kept the parent's descriptors would hold its locks when the parent has died."""
    for file in list(_held):
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def _row_of(group: str, topic: str, queue_offsets: Mapping[int, int]) -> tuple[str, dict[str, int]]:
    """What the file has for it."""
    return f"{topic}{SEPARATOR}{group}", {str(queue_id): place for queue_id, place in queue_offsets.items()}


def _with(document: dict[str, Any], commits: _Table) -> dict[str, Any]:
    """A document that has these commits, too."""
    table = document[_TABLE]
    return {**document, _TABLE: {**table, **{key: {**table.get(key, {}), **commits[key]} for key in commits}}}
