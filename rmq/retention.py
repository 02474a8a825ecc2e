# SPDX-License-Identifier: Apache-2.0
"""Retention: which segments have expired, which queue and index files follow them, and their removal.

The order, so that a crash between any two steps leaves a store that opens as it is: the log's segments, oldest first;
the manifest, which then names none of the files to come; those of queues and index, oldest first. Each removal is on
disk before the next. Source: RocketMQ DefaultMessageStore.CleanCommitLogService, CleanConsumeQueueService.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rmq._core._ownedlock import OwnedLock
from rmq._core._queuetable import QueueTable
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import ConsumeQueue
from rmq.consumeroffsets import ConsumerOffsets
from rmq.errors import RmqError
from rmq.index import Index
from rmq.keys import checked_int, checked_limit
from rmq.logsegment import Segment
from rmq.paths import SEGMENT_NAME, sidecar_path
from rmq.queueset import QueueSet
from rmq.segment import open_directory, remove_file
from rmq.topics import is_system_topic

_HOUR_MS = 3_600_000
_BLOCK_SIZE = 512  # of st_blocks
_PIECE = 65_536  # units of a queue that are looked at together
_UNITS_REASON = "units of removed messages"
_WHOLE_REASON = "queue without messages"
_INDEX_REASON = "entries of removed messages"
_SIDECAR_REASON = "sidecar of a removed index file"

DiskUsage = Callable[[Path], Any]  # as shutil.disk_usage: .used and .free in bytes


class RemovedFile(NamedTuple):
    """A file that went, or with dry_run would go. size: bytes of disk it held; reason: for people."""

    path: str
    size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """What clean removed, or with dry_run would remove.

    removed: segments of the log, queue files, index files and their sidecars, in the order of removal, but that whole
    queues (expired_queues) go last, wherever they stand; queue files that an interrupted cleaning left are not listed.
    freed_bytes: the disk they held, which is free once no reader has them mapped. min_phy_offset: of the log
    afterwards. disk_used_percent: of the log's disk afterwards, rounded up. truncated: `limit` let segments stay that
    would go too.
    """

    removed: tuple[RemovedFile, ...]
    freed_bytes: int
    min_phy_offset: int
    disk_used_percent: int
    truncated: bool
    dry_run: bool


class Disk:
    """How full the disk under a directory is, counting bytes as free that are about to be."""

    def __init__(self, path: Path, usage: DiskUsage) -> None:
        found = usage(path)
        self._used, self._free = int(found.used), int(found.free)
        self.device = os.stat(path).st_dev

    def release(self, size: int) -> None:
        size = min(size, self._used)
        self._used, self._free = self._used - size, self._free + size

    @property
    def used_percent(self) -> int:
        """Rounded up; 0 for a disk that tells no size. Source: UtilAll#getDiskPartitionSpaceUsedPercent."""
        total = self._used + self._free
        return -(-self._used * 100 // total) if total > 0 else 0


def forced_level(config: StoreConfig) -> int:
    """Percent used above which RocketMQ removes segments that have not expired; 100 when it never does.

    Source: CleanCommitLogService#isSpaceToDelete, with the bounds that it puts on both levels.
    """
    if not config.clean_file_forcibly_enable:
        return 100
    return min(max(35, min(90, config.disk_space_warning_level_ratio)),
               max(30, min(85, config.disk_space_clean_forcibly_ratio)))  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """now: ms. reserved_hours: a segment expires that long after its last change. max_used_percent: above it segments
    go that have not expired. limit: segments at most, None: all. expired_queues: queues without messages go too.
    """

    now: int
    reserved_hours: int
    max_used_percent: int
    limit: int | None
    expired_queues: bool
    disk_usage: DiskUsage


def checked_rules(config: StoreConfig, now: int, file_reserved_time: int | None, max_used_percent: int | None,
                  limit: int | None, expired_queues: bool, disk_usage: DiskUsage) -> Rules:  # fmt: skip
    """Rules from the arguments of Store.clean. TypeError, ValueError with the argument's name."""
    most = checked_limit(limit)
    hours = config.file_reserved_time if file_reserved_time is None else file_reserved_time
    percent = forced_level(config) if max_used_percent is None else max_used_percent
    for name, value, last in (("file_reserved_time", hours, 2**31 - 1), ("max_used_percent", percent, 100)):
        if not 0 <= checked_int(value, name) <= last:
            raise ValueError(f"{name} must lie in [0, {last}], got {value}")
    return Rules(now, int(hours), int(percent), most, expired_queues, disk_usage)


class Flushing(Protocol):
    """What removal needs of the open store. flush writes a manifest that fits the parts."""

    def dispatch(self) -> None: ...
    def flush(self) -> None: ...
    def sync_names(self, descriptor: int) -> None: ...
    def check_place(self) -> None: ...
    @property
    def offsets(self) -> ConsumerOffsets: ...


def _remove(path: Path, flusher: Flushing) -> None:
    """Remove a file of the store's, durably; OSError when the path is no longer the store's."""
    flusher.check_place()
    remove_file(path, flusher.sync_names)


class Retention:
    """Applies rules to the parts of a store. The log must be level with its queues and index."""

    def __init__(self, log: CommitLog, queues: QueueSet, index: Index, rules: Rules) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._rules = rules
        self._removed: list[RemovedFile] = []
        self._disks: list[Disk] = []
        for path in (log.directories[0], queues.directory):
            if path.is_dir():
                disk = Disk(path, rules.disk_usage)
                if disk.device not in [other.device for other in self._disks]:
                    self._disks.append(disk)

    def plan(self, log_end: int) -> CleanResult:
        """What would go. Changes nothing."""
        segments, truncated = self._expired(log_end)
        low = segments[-1].end if segments else self._log.min_phy_offset
        for queue, count, following in self._queues_below(low):
            self._note(queue.files.first(count), _UNITS_REASON if following is None else _WHOLE_REASON)
        self._note_index_files(self._index.count_below(low))
        return self._result(low, truncated, dry_run=True)

    def clean(self, log_end: int, table: QueueTable, put_lock: OwnedLock, flusher: Flushing) -> CleanResult:
        """Remove it. Below log_end everything is on disk, and nobody else flushes meanwhile; puts may go on.

        Raises OSError; the store is then as a crash would leave it, and what is left over goes at the next time.
        """
        self._forget_gone(put_lock)
        segments, truncated = self._expired(log_end)
        try:
            for segment in segments:
                segment.detach()
                try:
                    _remove(segment.path, flusher)
                finally:
                    if not segment.path.exists():  # gone, though maybe not for good: its sync failed
                        with put_lock:
                            self._log.forget_first(segment)
        finally:
            low = self._log.min_phy_offset
            for queue in list(self._queues.queues.values()):
                with put_lock:
                    queue.correct_min_offset(low)
        leaving: list[tuple[ConsumeQueue, int]] = []
        try:
            paths = self._choose(low, put_lock, flusher, leaving)
            if self._removed:
                flusher.flush()
            for path in paths:  # before the queues, which may have to stay
                _remove(path, flusher)
            if leaving:
                self._remove_queues(leaving, table, put_lock, flusher)
        except (OSError, RmqError):
            self._queues.leave()
            with suppress(OSError, RmqError):  # the manifest names what stays, again
                flusher.flush()
            raise
        finally:
            if leaving:
                self._queues.leave()
        return self._result(low, truncated, dry_run=False)

    def _choose(self, low: int, put_lock: OwnedLock, flusher: Flushing,
                leaving: list[tuple[ConsumeQueue, int]]) -> list[Path]:  # fmt: skip
        """Files that go, which the parts know no longer. leaving: gets the whole queues that go unless they get a
        message before, each with its next queue offset.
        """
        paths: list[Path] = []
        with put_lock:
            flusher.dispatch()
        for queue, count, following in self._queues_below(low):
            files = queue.files.first(count)
            if following is not None:
                self._note(files, _WHOLE_REASON)
                leaving.append((queue, following))
                continue
            self._note(files, _UNITS_REASON)
            with put_lock:
                queue.forget_first(count)
            paths += _left_over(files) + files
        if leaving:
            self._queues.leave(*((queue.topic, queue.queue_id) for queue, _ in leaving))
        with put_lock:
            count = self._index.count_below(low)
            paths += self._note_index_files(count)
            self._index.forget_first(count)
        return paths

    def _remove_queues(self, leaving: list[tuple[ConsumeQueue, int]], table: QueueTable, put_lock: OwnedLock,
                       flusher: Flushing) -> None:  # fmt: skip
        queues = {(queue.topic, queue.queue_id) for queue, _ in leaving}
        with flusher.offsets.lock_file() as file, flusher.offsets.leaving(file, queues):
            for queue, following in leaving:
                with put_lock:  # a put could begin a queue again whose files are about to go
                    flusher.dispatch()
                    if queue.max_offset == following:
                        self._remove_queue(queue, table, flusher)
                        continue
                files = queue.files.first()  # it got messages
                self._removed = [file for file in self._removed if Path(file.path) not in files]

    def _remove_queue(self, queue: ConsumeQueue, table: QueueTable, flusher: Flushing) -> None:
        files = queue.files.first()
        for path in _left_over(files):
            _remove(path, flusher)
        for path in files:  # up to the last one the queue goes on where it ends
            try:
                _remove(path, flusher)
            finally:
                if not path.exists():
                    queue.forget_first(1)
        # In this order: a unit at 0 takes the place of units that are gone, one behind a queue's end would be a gap.
        table.set_next_offset(table.add(queue.topic.encode(), queue.queue_id), 0)
        queue.forget_files()
        with open_directory(queue.directory.parent) as descriptor:
            try:
                queue.directory.rmdir()
            except OSError:  # others' files are in it
                return
            flusher.sync_names(descriptor)
        with suppress(OSError):  # other queues are in it
            queue.directory.parent.rmdir()

    def _note_index_files(self, count: int) -> list[Path]:
        """The first files of the index, each behind its sidecar if it has one."""
        files = [file.path for file in self._index.files[:count]]
        paths = [path for file in files for path in (sidecar_path(file), file) if path is not None and path.exists()]
        for path in paths:
            self._note([path], _INDEX_REASON if path in files else _SIDECAR_REASON)
        return paths

    def _forget_gone(self, put_lock: OwnedLock) -> None:
        """First segments that a cleaning removed, and was interrupted before the log knew."""
        while len(self._log.segments) > 1 and not self._log.segments[0].path.exists():
            with put_lock:
                self._log.forget_first(self._log.segments[0])

    def _expired(self, log_end: int) -> tuple[list[Segment], bool]:
        """Segments that go, oldest first, and whether the limit kept others. Never the one with the last byte.

        Source: MappedFileQueue#deleteExpiredFileByTime; there, forced cleaning does not look at the disk in between.
        """
        rules = self._rules
        chosen: list[Segment] = []
        for segment in self._log.segments:
            if segment.end >= log_end:
                break
            found = _stat(segment.path)
            if found is None:
                continue
            age_ms = rules.now - found.st_mtime_ns // 1_000_000
            used = max(disk.used_percent for disk in self._disks)
            if age_ms >= rules.reserved_hours * _HOUR_MS:
                reason = f"last changed {rules.reserved_hours} h ago or earlier"
            elif used > rules.max_used_percent:
                reason = f"disk {used} % full, over {rules.max_used_percent} %"
            else:
                break
            if len(chosen) == rules.limit:
                return chosen, True
            chosen.append(segment)
            self._note([segment.path], reason)
        return chosen, False

    def _queues_below(self, low: int) -> Iterator[tuple[ConsumeQueue, int, int | None]]:
        """(queue, files in front that go, next offset up to which all of it has expired, None: not all).

        Source: ConsumeQueueStore#cleanExpired for whole queues.
        """
        for (topic, _), queue in sorted(self._queues.queues.items()):
            following = queue.max_offset  # before the look at its units: puts go on
            if self._rules.expired_queues and not is_system_topic(topic) and _has_expired(queue, low, following):
                yield queue, len(queue.files.first()), following
            elif count := queue.count_below(low):
                yield queue, count, None

    def _note(self, paths: list[Path], reason: str) -> None:
        for path in paths:
            found = _stat(path)
            if found is None:
                continue
            size = found.st_blocks * _BLOCK_SIZE
            self._removed.append(RemovedFile(str(path), size, reason))
            for disk in self._disks:
                if disk.device == found.st_dev:
                    disk.release(size)

    def _result(self, low: int, truncated: bool, *, dry_run: bool) -> CleanResult:
        return CleanResult(removed=tuple(self._removed), freed_bytes=sum(file.size for file in self._removed),
                           min_phy_offset=low, disk_used_percent=self._disks[0].used_percent if self._disks else 0,
                           truncated=truncated, dry_run=dry_run)  # fmt: skip


def _has_expired(queue: ConsumeQueue, low: int, following: int) -> bool:
    """Whether a queue has units, those before a next offset of records below `low`: the last one alone may be wrong."""
    if not 0 < queue.end_phy_offset() < low:
        return False
    pieces = (queue.read(first, min(_PIECE, following - first))[0]
              for first in range(queue.first_offset, following, _PIECE))  # fmt: skip
    return all(((piece >= 0) & (piece < low)).all() for piece in pieces)


def _left_over(files: list[Path]) -> list[Path]:
    """Files of a queue before these: a cleaning forgot them and was interrupted. They go first, to leave no gap."""
    if not files:
        return []
    return sorted(path for path in files[0].parent.iterdir() if SEGMENT_NAME.fullmatch(path.name) and path < files[0])


def _stat(path: Path) -> os.stat_result | None:
    """None when a writer beside this reader has removed the file."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
