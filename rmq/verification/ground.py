# SPDX-License-Identifier: Apache-2.0
"""What a verification stands on: how the store was left, up to where it may be judged, and its segments."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.lock import Crash, crash_of
from rmq.logcuts import last_epoch
from rmq.logend import (
    BEFORE_ALL,
    OnDisk,
    find_end,
    fits,
    last_start,
    look_behind,
)
from rmq.logsegment import Segment
from rmq.marks import Mark
from rmq.paths import LARGEST_OFFSET, SEGMENT_NAME, StorePaths, segment_name
from rmq.verification.findings import Report

NO_LIMIT = LARGEST_OFFSET
READ_BYTES = 2 * 1024 * 1024  # bytes of the log that are read at a time
UNFILLED = "an empty file, made and not filled by a process that was killed"


class HeldLog(CommitLog):
    """The segments that were listed, less those in front that a cleaning removed since; no others are looked for."""

    def __init__(self, directories: list[Path], segment_size: int) -> None:
        self.listed: dict[int, Segment] = {}  # by start, ascending
        self._looking = threading.Lock()
        super().__init__(directories, segment_size, writable=False)

    def take(self, segments: list[Segment]) -> None:
        """Be the log of these segments, in ascending order."""
        self.listed = {segment.start: segment for segment in segments}
        self.hold(segments)

    def listed_at(self, phy_offset: int) -> Segment:
        """The segment that holds a phy offset, or did when the log was listed."""
        return self.listed[phy_offset - phy_offset % self.segment_size]

    def refresh(self) -> None:
        """Pass over the segments in front that are gone."""
        with self._looking:
            there = list(dropwhile(lambda segment: not segment.path.exists(), self.segments))
            if len(there) < len(self.segments):
                self.hold(there)

    @property
    def min_phy_offset(self) -> int:
        """Start of the first segment, or the end of the last one when all are gone; 0 for an empty log."""
        if self.listed and not self.segments:
            return max(self.listed) + self.segment_size
        return super().min_phy_offset


class Room(NamedTuple):
    """What one pass over records needs: rows, one row, and bytes of the log."""

    batch: RecordBatch
    one: RecordBatch
    data: memoryview


@dataclass
class Ground:
    """One verification. Offsets are phy offsets.

    log_limit: no byte at or past it is looked at. unit_end, entry_end: records below must have their units and index
    entries. blind: ranges of the log whose records are lost or unreadable; what points there is not judged.
    """

    paths: StorePaths
    config: StoreConfig
    report: Report
    state: str
    mark: Mark | None
    checkpoint: Checkpoint | None
    log: HeldLog
    is_own: bool = False  # only this library wrote it, by the rules of config.rocketmq_version
    log_limit: int = NO_LIMIT
    unit_end: int = NO_LIMIT
    entry_end: int = NO_LIMIT
    blind: list[tuple[int, int]] = field(default_factory=list)
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    log_end: int = 0
    tail: tuple[Path, int, str] | None = None  # file, position and reason of the bytes behind the end
    log_lost: int = -1  # a record at or past the end of the log that a unit of a closed store points to
    size_read: int = 0
    spare: list[Room] = field(default_factory=list)  # that no thread has; new ones cost fresh pages
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_live(self) -> bool:
        return self.state == "open"

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    def leave_out_cut(self) -> None:
        """What a broker had cut off, and has not written over, is no part of its log."""
        log, epoch = self.log, last_epoch(self.paths.epochs)
        if not log.segments:
            return
        with contextlib.suppress(CorruptFileError):  # who walks the log tells
            start = last_start(log)
            mark = self.mark if self.mark is not None and fits(log, self.mark) else None
            durable = mark.durable_phy_offset if mark is not None else 0
            begin = min(max(start, durable), log.max_phy_offset)
            on_disk, crashed = OnDisk(durable, None, epoch), None if self.is_live else crash_of(self.paths)
            if self.is_closed:
                on_disk = replace(on_disk, latest=self.checkpoint.physic_msg_timestamp if self.checkpoint else 0)
            own_from = None
            if crashed is Crash.OURS and mark is not None:  # power loss may have torn it, in an earlier segment, too
                on_disk, own_from = OnDisk(durable, BEFORE_ALL, epoch), durable
                begin = min(max(durable, log.min_phy_offset), log.max_phy_offset)
            end = look_behind(log, find_end(log, begin, log.max_phy_offset, own_from=own_from), on_disk)
            if end.next_phy_offset < 0 or end.is_damage:
                return
            self.log_limit = min(self.log_limit, end.phy_offset)
            segment = log.listed_at(end.phy_offset if end.phy_offset < log.max_phy_offset else start)
            kind, what = "tail", "bytes behind the end of the log: a torn record, whole ones behind it"
            if own_from is None:
                kind, what = "record", "the log ends here; older records follow, which its broker had cut off"
            self.report.note(segment.path, end.phy_offset - segment.start, kind, what)

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        """For one pass over records."""
        try:
            room = self.spare.pop()
        except IndexError:
            room = Room(RecordBatch(), RecordBatch(1), memoryview(bytearray(READ_BYTES)))
        try:
            yield room
        finally:
            room.batch.release()
            room.one.release()
            self.spare.append(room)

    def read(self, size: int) -> None:
        """Account for bytes that were looked at; ends the thread when the verification was given up."""
        with self.lock:
            self.size_read += size
        if self.stop.is_set():
            raise InterruptedError("verification was given up")

    def add_blind(self, begin: int, end: int) -> None:
        """Records of a range, which lies in no other one, are lost or unreadable."""
        with self.lock:
            bisect.insort(self.blind, (begin, end))

    def is_blind(self, phy_offset: int) -> bool:
        number = bisect.bisect_right(self.blind, (phy_offset, NO_LIMIT)) - 1
        return number >= 0 and phy_offset < self.blind[number][1]

    def was_cleaned(self, phy_offset: int) -> bool:
        """Whether the log begins behind a phy offset by now. A cleaning removes units and entries after their records:
        while a segment is there, theirs must be.
        """
        self.log.refresh()
        return phy_offset < self.log.min_phy_offset

    def was_cut_off(self) -> bool:
        """Whether a broker's recovery ended the log where it ends: it leaves what was behind, and units of that.

        Source: RocketMQ >= 5.1.1 CommitLog#recoverAbnormally, which confirms the last record.
        """
        batch = RecordBatch(1)
        last = self.checkpoint.confirm_phy_offset if self.checkpoint is not None else 0
        try:
            return self.checkpoint is not None and last > 0 and self.load(batch, last) and \
                last + int(batch.numbers("size")[0]) == self.log_end and \
                self.checkpoint.physic_msg_timestamp <= batch.store_timestamp(0)
        finally:
            batch.release()

    def load(self, batch: RecordBatch, phy_offset: int, *, checks: int = 0) -> bool:
        """Whether a record begins at a phy offset, which the batch holds then; none does where the log was cleaned."""
        segment = self.log.segment_at(phy_offset) if phy_offset < self.log_limit else None
        if segment is None:
            return False
        try:
            file = segment.file
        except FileNotFoundError:  # another thread had it let go of
            return False
        return len(batch.load(file.map, segment.start, np.array([phy_offset], np.int64), segment.end,
                              checks=checks)) > 0  # fmt: skip


def list_segments(log: HeldLog, report: Report, *, is_live: bool) -> list[tuple[int, int]]:
    """Have a log take its readable segments; returns the ranges between the first and the last that none of them holds.

    Reports strange names, lengths, segments that are there twice, and those that are missing between others. Source:
    MappedFileQueue#load.
    """
    size = log.segment_size
    readable: dict[int, Segment] = {}
    there: dict[int, Path] = {}
    empty: dict[int, Path] = {}
    gone: dict[int, Path] = {}
    for path, start, length in _named_files(log, report):
        if length is None:
            gone[start] = path
        elif start % size:
            report.damage(path, 0, "name", f"segment starts off the grid of {size} bytes")
        elif length == 0:
            empty[start] = path
        elif start in there:
            report.damage(path, 0, "name", f"the segment is there twice: {there[start]}; only that one is read")
        else:
            there[start] = path
            if length == size:
                readable[start] = log.segment(path, start)
            else:
                report.damage(path, min(length, size), "size", f"segment has {length} bytes, expected {size}")
    last = max(there, default=-1)
    for start, path in empty.items():
        if start < last:
            report.damage(path, 0, "size", f"segment has 0 bytes, expected {size}")
            there.setdefault(start, path)
        elif not is_live:
            report.note(path, 0, "leftover", UNFILLED)
    first = min(there, default=NO_LIMIT)
    for start, path in gone.items():
        if start < first and start % size == 0:
            there[start], readable[start] = path, log.segment(path, start)
    log.take([readable[start] for start in sorted(readable)])
    # Beside a cleaning a listing may show a file and none of those behind it: the file is gone by now.
    starts = list(dropwhile(lambda start: not there[start].exists(), sorted(there)))
    log.refresh()
    blind = [(start, start + size) for start in starts if start not in readable]
    for start, following in pairwise(starts):
        if following != start + size:
            path = log.directories[0] / segment_name(start + size)
            report.damage(path, 0, "missing", f"{(following - start) // size - 1} commit-log segments are missing here")
            blind.append((start + size, following))
    return blind


def _named_files(log: HeldLog, report: Report) -> Iterator[tuple[Path, int, int | None]]:
    """Path, start and length of each file with a segment's name; None: it has gone since it was listed. Reports what
    else lies in the log's directories.
    """
    seen: set[Path] = set()
    for directory in log.directories:
        if directory.resolve() in seen:
            report.note(directory, 0, "name", "the commit-log directory is configured twice; it is read once")
            continue
        seen.add(directory.resolve())
        check_mode(directory, report)
        for entry in scan_directory(directory):
            path = Path(entry.path)
            is_named = SEGMENT_NAME.fullmatch(entry.name) and int(entry.name) <= LARGEST_OFFSET - log.segment_size
            if is_named and path.is_file():
                check_mode(path, report)
                yield path, int(entry.name), size_of(entry)
            elif not os.path.lexists(path):  # cleaned away
                if is_named:
                    yield path, int(entry.name), None
            elif not is_named and path.is_dir():
                report.note(path, 0, "name", "a directory among the segments; it is passed over")
            else:
                what = "no regular file" if is_named else "no commit-log segment has this name"
                report.damage(path, 0, "name", f"{what}; a store does not open with it")


def scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    """Entries by name; none when the directory is not there."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def holds_bytes(path: Path) -> bool:
    """Whether it is a regular file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def size_of(entry: os.DirEntry[str]) -> int | None:
    """Bytes of a file; None when it was cleaned away since its directory was read, or is a link to nowhere."""
    try:
        return entry.stat().st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise


def check_mode(path: Path, report: Report) -> None:
    """A file that everybody may write is one that anybody may damage."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if mode & stat.S_IWOTH and not stat.S_ISLNK(mode):
        report.note(path, 0, "mode", f"everybody may write it (mode {stat.S_IMODE(mode):03o})")
