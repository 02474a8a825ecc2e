# SPDX-License-Identifier: Apache-2.0
"""Queues and index from the log alone, in tasks that may run anywhere: one for each segment, then one for each index
file. The files are those that one dispatch of the whole log makes, but for an index file in which nothing is yet.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._consumequeue import pre_blank_units
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import Told
from rmq.dispatch import Dispatcher
from rmq.filecache import FileCache
from rmq.indexfile import ENTRY, IndexFile
from rmq.paths import LARGEST_OFFSET, next_index_name, queue_directory, segment_name
from rmq.pool import Runner
from rmq.queueset import QueueSet
from rmq.segment import DIRECTORY_MODE, make_directory, open_file, sync_directories, telling

KEYS = np.dtype([("hash", "<i4"), ("phy_offset", "<i8"), ("store_timestamp", "<i8")])  # staged, read by this machine
_FIELDS = ("hash", "phy_offset", "store_timestamp")
SCRATCH_SLOTS = 1024
SCRATCH_ENTRIES = 16384
PUT_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SegmentTask:
    """Records in [begin, end) of one segment. queues: directory of the new queues; keys: that of their index keys."""

    commit_logs: tuple[Path, ...]
    begin: int
    end: int
    queues: Path
    keys: Path | None
    config: StoreConfig


@dataclass(frozen=True)
class SegmentPart:
    """What a segment gave. runs: (topic, queue id) -> (first queue offset, next one).

    is_shifted: a record's queue offset is not the next one; then units must be made by one dispatch of the whole log.
    """

    keys: Path | None
    key_count: int = 0
    runs: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    is_shifted: bool = False


@dataclass(frozen=True)
class IndexTask:
    """One index file. pieces: (file of keys, number of the first, count). before: the last key of the file before."""

    path: Path
    pieces: tuple[tuple[Path, int, int], ...]
    before: tuple[int, int]
    config: StoreConfig


@dataclass
class Derived:
    """New queues and index below a directory. extents: of QueueSet. index_header: of the last index file."""

    extents: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    index_files: list[Path] = field(default_factory=list)
    index_header: bytes = bytes(L.INDEX_HEADER_SIZE)
    unit_count: int = 0
    key_count: int = 0


class _Units:
    """A queue's part of one segment, written where it belongs in the queue's files, which other tasks write too."""

    def __init__(self, directory: Path, segment_size: int, files: FileCache) -> None:
        self._directory, self._segment_size, self._files = directory, segment_size, files
        self.paths: set[Path] = set()
        self.first = self.following = -1
        self.is_shifted = False  # queue offsets leave gaps: what is next one segment alone cannot tell

    def append(self, first: int, data: bytes, lost_below: int | None = None, told: Told | None = None) -> None:
        if first < 0 or self.following not in (-1, first) or first * L.UNIT_SIZE > LARGEST_OFFSET - len(data):
            self.is_shifted = True
        if not self.is_shifted:
            self.first = first if self.first < 0 else self.first
            self.following = first + len(data) // L.UNIT_SIZE
            self.write(first, data)

    def write(self, first: int, data: bytes) -> None:
        view, position = memoryview(data), first * L.UNIT_SIZE
        while view:
            start = position - position % self._segment_size
            path = self._directory / segment_name(start)
            if path not in self.paths:
                _make_file(path, self._segment_size)
                self.paths.add(path)
            size = min(len(view), start + self._segment_size - position)
            self._files.write(path, position - start, view[:size])
            view, position = view[size:], position + size


def _make_file(path: Path, size: int) -> None:
    """A file of zeros, unless another task made it."""
    for parent in (path.parent.parent, path.parent):  # all are synced together; none above: a rebuild may have ended
        parent.mkdir(DIRECTORY_MODE, exist_ok=True)
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


class _UnitSink:
    """Takes what a Dispatcher gives to its queues."""

    def __init__(self, directory: Path, segment_size: int) -> None:
        self._directory, self._segment_size = directory, segment_size
        self.files = FileCache(writable=True)
        self.queues: dict[tuple[str, int], _Units] = {}

    def open(self, topic: str, queue_id: int) -> _Units:
        key = topic, queue_id
        if key not in self.queues:
            self.queues[key] = _Units(queue_directory(self._directory, topic, queue_id), self._segment_size, self.files)
        return self.queues[key]

    def touch(self, queue: _Units) -> None: ...

    def sync(self) -> None:
        self.files.sync_all([path for queue in self.queues.values() for path in queue.paths])


class _KeySink:
    """Takes what a Dispatcher gives to its index: hash, phy offset and time of each key go to a file, in order."""

    def __init__(self, path: Path, indexes_tags: bool) -> None:
        self._path, self._file = path, path.open("wb")
        self._indexes_tags = indexes_tags
        self._size = index_file_size(SCRATCH_SLOTS, SCRATCH_ENTRIES)
        self._entries_at = L.INDEX_HEADER_SIZE + SCRATCH_SLOTS * L.INDEX_SLOT_SIZE
        self.count = 0

    def end(self) -> tuple[int, int]:
        raise AssertionError("a task that was interrupted is not gone on with")

    def put_rows(self, batch: RecordBatch, row: int, key: int) -> tuple[int, int]:
        buffer = bytearray(self._size)
        view = IndexFileView(buffer, hash_slot_num=SCRATCH_SLOTS, index_num=SCRATCH_ENTRIES, writable=True)
        following = view.put_rows(batch, row, key, index_tags=self._indexes_tags)
        count = max(1, view.index_count) - 1
        view.release()
        entries = np.frombuffer(buffer, ENTRY, count, self._entries_at + L.ENTRY_SIZE)
        found = np.empty(count, KEYS)
        found["hash"], found["phy_offset"] = entries["hash"], entries["phy_offset"]
        rows = np.searchsorted(batch.numbers("phy_offset"), found["phy_offset"])
        found["store_timestamp"] = batch.numbers("store_timestamp")[rows]
        with telling(self._path):
            self._file.write(found.tobytes())
        self.count += count
        return following

    def close(self) -> None:
        with telling(self._path):
            self._file.close()


def derive_segment(task: SegmentTask) -> SegmentPart:
    """Units of a segment's records into the new queues' files, on disk; its keys into a file of this try's own.

    Raises CorruptFileError where the segment is no record, OSError of the disk. May run again, beside itself too: the
    same units.
    """
    config = task.config
    log = CommitLog(list(task.commit_logs), config.mapped_file_size_commit_log, writable=False)
    units = _UnitSink(task.queues, config.mapped_file_size_consume_queue)
    path = None if task.keys is None else task.keys / f"{task.begin}.{uuid.uuid4().hex}"
    keys = None if path is None else _KeySink(path, config.indexes_tags)
    dispatcher = Dispatcher(log, units, keys, config)
    dispatcher.queue_phy_offset = dispatcher.index_phy_offset = task.begin
    try:
        dispatcher.advance(task.end)
        units.sync()
    finally:
        units.files.close()
        log.close()
        if keys is not None:
            keys.close()
    runs = {key: (queue.first, queue.following) for key, queue in units.queues.items() if queue.first >= 0}
    is_shifted = any(queue.is_shifted for queue in units.queues.values())
    return SegmentPart(path, 0 if keys is None else keys.count, runs, is_shifted)


def build_index_file(task: IndexTask) -> bytes:
    """One index file, on disk under its name when it is whole; returns its header. May run again, beside itself too."""
    config, staged = task.config, task.pieces[0][0].parent  # which goes, with what a try that is killed leaves there
    path = staged / f"{task.path.name}.{uuid.uuid4().hex}"
    phy_offset, timestamp = task.before
    try:
        with IndexFile(path, "x", max_hash_slot_num=config.max_hash_slot_num, max_index_num=config.max_index_num,
                       end_phy_offset=phy_offset, end_timestamp=timestamp,
                       rocketmq_version=config.rocketmq_version) as file:  # fmt: skip
            for keys in _staged(task.pieces):
                file.put_hashes(*(np.ascontiguousarray(keys[name]) for name in _FIELDS))
            file.flush()
            header = file.view.header()
        os.replace(path, task.path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return header


def _staged(pieces: Sequence[tuple[Path, int, int]]) -> Iterator[npt.NDArray[np.void]]:
    for path, first, count in pieces:
        for start in range(first, first + count, PUT_AT_ONCE):
            size = min(PUT_AT_ONCE, first + count - start)
            yield np.fromfile(path, KEYS, size, offset=start * KEYS.itemsize)


def derive(commit_logs: Sequence[Path], starts: Sequence[int], end: int, target: Path, config: StoreConfig,
           run: Runner, *, is_exact: bool) -> Derived:  # fmt: skip
    """Queues and index of the log's records below `end` under a directory: consumequeue/ and index/, on disk.

    starts: of the log's segments, the first to the one with the last record. target must be seen by all tasks.
    is_exact: as of ConsumeQueue. Raises CorruptFileError where the log is damaged, OSError of the disk. Memory: about
    50 MiB for each task, whatever the sizes, beside the mapped files. Disk: 20 bytes for each key until it is done.
    """
    derived, queues = Derived(), target / "consumequeue"
    # A task that runs twice may write on when its answer is used: into what is gone, or the same bytes.
    staged, units = target / "keys", target / f"units.{uuid.uuid4().hex}"
    for directory in (staged, units, target / "index"):
        make_directory(directory)
    indexes = config.message_index_enable
    tasks = [SegmentTask(tuple(commit_logs), begin, min(following, end), units,
                         staged if indexes else None, config)
             for begin, following in pairwise([*starts, end])]  # fmt: skip
    parts = list(run(derive_segment, tasks))
    if _are_shifted(parts):
        make_directory(queues)
        _dispatch_queues(commit_logs, starts, end, queues, config, derived, is_exact=is_exact)
    else:
        os.rename(units, queues)
        _finish_queues(parts, queues, config, derived)
    index_tasks = plan_index(parts, target / "index", config)
    for header in run(build_index_file, index_tasks):
        derived.index_header = header
    derived.index_files = [task.path for task in index_tasks]
    derived.key_count = sum(part.key_count for part in parts)
    for directory in (staged, units):
        shutil.rmtree(directory, ignore_errors=True)
    sync_directories(target)
    return derived


def _are_shifted(parts: Sequence[SegmentPart]) -> bool:
    """Whether some record's queue offset is not the next one of its queue."""
    ends: dict[tuple[str, int], int] = {}
    for part in parts:
        for key, (first, following) in part.runs.items():
            if ends.setdefault(key, first) != first:
                return True
            ends[key] = following
    return any(part.is_shifted for part in parts)


def _finish_queues(parts: Sequence[SegmentPart], queues: Path, config: StoreConfig, derived: Derived) -> None:
    """Pre-blank units in front of what cleaning has left of a queue."""
    firsts: dict[tuple[str, int], int] = {}
    ends: dict[tuple[str, int], int] = {}
    for part in parts:
        for key, (first, following) in part.runs.items():
            firsts.setdefault(key, first)
            ends[key] = following
    units = config.mapped_file_size_consume_queue // L.UNIT_SIZE
    files = FileCache(writable=True)
    try:
        for (topic, queue_id), first in firsts.items():
            begin = first - first % units
            if first > begin:
                path = queue_directory(queues, topic, queue_id) / segment_name(begin * L.UNIT_SIZE)
                files.write(path, 0, pre_blank_units(first - begin))
                files.sync(path)
            derived.extents[topic, queue_id] = begin, ends[topic, queue_id]
            derived.unit_count += ends[topic, queue_id] - first
    finally:
        files.close()


def _dispatch_queues(commit_logs: Sequence[Path], starts: Sequence[int], end: int, queues: Path, config: StoreConfig,
                     derived: Derived, *, is_exact: bool) -> None:  # fmt: skip
    """All queues by one dispatch of the whole log, as recovery makes them."""
    log = CommitLog(list(commit_logs), config.mapped_file_size_commit_log, writable=False)
    made = QueueSet(queues, config.mapped_file_size_consume_queue, writable=True, is_exact=is_exact)
    dirty: set[Path] = set()
    try:
        dispatcher = Dispatcher(log, made, None, config)
        dispatcher.fills_gaps = True
        dispatcher.queue_phy_offset = starts[0] if starts else end
        dispatcher.advance(end)
        made.take_dirty(dirty)
        made.sync(dirty)
        derived.extents = made.extents()
        derived.unit_count = sum(queue.max_offset - queue.min_offset for queue in made.queues.values())
    finally:
        made.close()
        log.close()


def plan_index(parts: Sequence[SegmentPart], directory: Path, config: StoreConfig) -> list[IndexTask]:
    """Which keys go to which index file: each takes all it can, as one put after the other would fill them.

    A file is named by the store timestamp of its first key, in local time as RocketMQ names it, and behind the last.
    """
    room = config.max_index_num - 1  # entries are numbered from 1
    tasks: list[IndexTask] = []
    pieces: list[tuple[Path, int, int]] = []
    left, before, name = room, (0, 0), ""
    for part in parts:
        first = 0
        while part.keys is not None and first < part.key_count:
            if not pieces:
                name = _named(name, _key(part.keys, first)[1])
            count = min(left, part.key_count - first)
            pieces.append((part.keys, first, count))
            first, left = first + count, left - count
            if left == 0:
                tasks.append(IndexTask(directory / name, tuple(pieces), before, config))
                before, pieces, left = _key(part.keys, first - 1), [], room
    if pieces:
        tasks.append(IndexTask(directory / name, tuple(pieces), before, config))
    return tasks


def _named(before: str, store_timestamp: int) -> str:
    try:
        return next_index_name(before, store_timestamp)
    except (ValueError, OverflowError, OSError):  # a record's time may be anything
        return next_index_name(before, 0)


def _key(path: Path, number: int) -> tuple[int, int]:
    """Phy offset and store timestamp of a staged key."""
    [key] = np.fromfile(path, KEYS, 1, offset=number * KEYS.itemsize)
    return int(key["phy_offset"]), int(key["store_timestamp"])
