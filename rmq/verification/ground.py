# SPDX-License-Identifier: Apache-2.0
"""What a verification stands on: how the store was left, up to where it may be judged, and its segments."""

from __future__ import annotations

import bisect
import os
import stat
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.logsegment import Segment
from rmq.marks import Mark
from rmq.paths import LARGEST_OFFSET, SEGMENT_NAME, StorePaths
from rmq.verification.findings import Report

NO_LIMIT = LARGEST_OFFSET
EMPTY = "an empty file, made and not filled by a process that was killed"


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
    log: CommitLog
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
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_live(self) -> bool:
        return self.state == "open"

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

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


def list_segments(directories: list[Path], log: CommitLog, report: Report, *, is_live: bool) -> tuple[list[Segment],
                                                                                                      list[int]]:
    """The log's readable segments, and the starts of those that are there and cannot be read.

    Reports strange names, lengths, and segments that are missing between others. Source: MappedFileQueue#load.
    """
    size = log.segment_size
    found: list[Segment] = []
    unreadable: list[int] = []
    empty: dict[int, Path] = {}
    for directory in directories:
        for entry in scan_directory(directory):
            path = Path(entry.path)
            if not SEGMENT_NAME.fullmatch(entry.name) or int(entry.name) > LARGEST_OFFSET or not entry.is_file():
                if entry.is_dir() and not SEGMENT_NAME.fullmatch(entry.name):
                    report.note(path, 0, "name", "a directory among the segments; it is passed over")
                else:
                    report.damage(path, 0, "name", "no commit-log segment has this name; a store does not open with it")
                continue
            check_mode(path, report)
            start, length = int(entry.name), entry.stat().st_size
            if start % size:
                report.damage(path, 0, "name", f"segment starts off the grid of {size} bytes")
            elif length == 0:
                empty[start] = path
            elif length != size:
                report.damage(path, min(length, size), "size", f"segment has {length} bytes, expected {size}")
                unreadable.append(start)
            else:
                found.append(log.segment(path, start))
    found.sort(key=lambda segment: segment.start)
    last = max([segment.start for segment in found] + unreadable, default=-1)
    for start, path in empty.items():
        if start < last:
            report.damage(path, 0, "size", f"segment has 0 bytes, expected {size}")
            unreadable.append(start)
        elif not is_live:
            report.note(path, 0, "leftover", EMPTY)
    there = sorted([segment.start for segment in found] + unreadable)
    for start, following in pairwise(there):
        if following != start + size:
            path = directories[0] / f"{start + size:020d}"
            report.damage(path, 0, "missing", f"{(following - start) // size - 1} commit-log segments are missing here")
    return found, unreadable


def scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    """Entries by name; none when the directory is not there."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def check_mode(path: Path, report: Report) -> None:
    """A file that everybody may write is one that anybody may damage."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if mode & stat.S_IWOTH and not stat.S_ISLNK(mode):
        report.note(path, 0, "mode", f"everybody may write it (mode {stat.S_IMODE(mode):03o})")
