# SPDX-License-Identifier: Apache-2.0
"""The files of the commit log: its segments end to end, and which of them are mapped.

Source: RocketMQ MappedFileQueue. Layout: docs/format/directory.md.
"""

from __future__ import annotations

import bisect
import os
import sys
import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

from rmq._core._mapguard import lost_pages
from rmq.directorywatch import DirectoryWatch
from rmq.errors import CorruptFileError
from rmq.logsegment import Segment, SegmentMaps
from rmq.mappedfile import room_for_maps
from rmq.paths import LARGEST_OFFSET, SEGMENT_NAME
from rmq.segment import is_hidden, is_unlinked

_START = attrgetter("start")


class LogFiles:
    """Segments of one size, in one or several directories."""

    def __init__(self, directories: list[Path], segment_size: int, *, writable: bool,
                 make_segment: Callable[..., Segment],
                 stay_mapped: Callable[[], Iterable[Segment]]) -> None:  # fmt: skip
        """make_segment: takes Segment's arguments. stay_mapped: segments that do, besides the last."""
        self.directories, self.segment_size, self.writable = directories, segment_size, writable
        self.unfilled: list[Path] = []  # last ones that a process made, and was killed; it is none of the log
        self.segments: list[Segment] = []  # replaced or appended to, so that threads that read it need no lock
        self._watch, self._make_segment, self._lost_pages = DirectoryWatch(directories), make_segment, 0
        self._loss: tuple[int, CorruptFileError | None] = 0, None  # that a thread was told of last, and lost_pages then
        self._one_look = threading.RLock()  # of two looks at once the older one could be kept
        self._maps = SegmentMaps(room_for_maps(segment_size), lambda: {*stay_mapped(), *self.segments[-1:]})
        self.refresh()

    def refresh(self) -> None:
        """Look at the directories again; known segments keep maps. CorruptFileError for strange names."""
        with self._one_look:
            if self.writable or not self._watch.is_unchanged(self.segments):
                self._look()

    def _look(self) -> None:
        known = {(segment.path, segment.inode): segment for segment in self.segments}
        self.unfilled = []
        found: list[Segment] = []
        empty: list[int] = []
        nowhere: list[Path] = []  # links
        for directory in self.directories:
            try:
                entries = list(os.scandir(directory))
            except FileNotFoundError:
                continue
            for entry in entries:
                path = Path(entry.path)
                is_left_out = is_unlinked(entry.name) or (not self.writable and is_hidden(entry.name))
                if entry.is_dir() or is_left_out:
                    if self.writable and SEGMENT_NAME.fullmatch(entry.name):
                        raise CorruptFileError(path, 0, "a directory stands where a segment belongs")
                    continue
                segment = known.get((path, entry.inode()))
                if segment is not None and (self.writable or not segment.is_emptied()):
                    found.append(segment)
                    continue
                if not SEGMENT_NAME.fullmatch(entry.name) or int(entry.name) > LARGEST_OFFSET - self.segment_size:
                    raise CorruptFileError(path, 0, "name is no commit-log segment's")
                try:
                    size, start = entry.stat().st_size, int(entry.name)
                except FileNotFoundError:
                    if entry.is_symlink():
                        nowhere.append(path)
                    continue  # else removed by a writer meanwhile
                if size == 0:
                    empty.append(start)
                if self.writable and size not in (0, self.segment_size):
                    raise CorruptFileError(path, min(size, self.segment_size),
                                           f"segment has {size} bytes, expected {self.segment_size}")  # fmt: skip
                if start % self.segment_size:
                    raise CorruptFileError(path, 0, f"segment starts off the grid of {self.segment_size} bytes")
                found.append(self.segment(path, start, entry.inode()))
        found.sort(key=lambda segment: segment.start)
        for path in nowhere:  # behind others a gap tells
            if not found or int(path.name) < found[0].start:
                raise CorruptFileError(path, 0, "a symbolic link to nothing")
        while found and found[-1].start in empty:
            self.unfilled.append(found.pop().path)
        for segment in found:
            if self.writable and segment.start in empty:
                raise CorruptFileError(segment.path, 0, "segment is empty")
        for number in range(len(found) - 1, 0, -1):
            if found[number].start != found[number - 1].end and not found[number - 1].path.exists():
                found = found[number:]  # cleaned away while the directory was read
                break
        self.hold(found)
        if not self.writable:
            self._watch.keep(found)

    def segment(self, path: Path, start: int, inode: int = 0) -> Segment:
        """A file as a segment of this log."""
        return self._make_segment(self._maps, path, start, self.segment_size, self.writable, inode)

    def hold(self, segments: list[Segment]) -> None:
        """Be the log of these segments, in ascending order, whatever else lies in the directories."""
        known, self.segments = self.segments, segments
        if len({*known, *segments}) > len(segments):
            self._maps.retain(set(segments))

    def first_gap(self) -> int:
        """Phy offset of the first missing segment between others, or -1."""
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            if following.start != segment.end:
                return segment.end
        return -1

    def segment_at(self, phy_offset: int) -> Segment | None:
        """The segment that holds a phy offset, or None. A reader maps it: a writer may remove it at any time."""
        segment = self._known_segment(phy_offset)
        if segment is not None and not self.writable and not segment.is_there():
            self._watch.forget()
            self.refresh()
            segment = self._known_segment(phy_offset)
        return segment

    def _known_segment(self, phy_offset: int) -> Segment | None:
        segments = self.segments
        number = bisect.bisect_right(segments, phy_offset, key=_START) - 1
        return segments[number] if number >= 0 and phy_offset < segments[number].end else None

    @property
    def min_phy_offset(self) -> int:
        """Start of the first segment; 0 for an empty log."""
        segments = self.segments
        return segments[0].start if segments else 0

    @property
    def max_phy_offset(self) -> int:
        """End of the last segment's file: no byte of the log lies at or past it."""
        return self.segments[-1].end if self.segments else 0

    def forget_first(self, segment: Segment) -> None:
        """The log begins behind its first segment, which is that one."""
        assert self.segments[0] is segment
        self.segments = self.segments[1:]
        self._maps.forget(segment)

    def check(self, since: int = sys.maxsize) -> None:
        """CorruptFileError when pages of a segment's map were gone, or another thread was told so since lost_pages was
        `since`. Cost: nothing until another page is lost.
        """
        if (count := lost_pages()) != self._lost_pages:
            with self._one_look:  # who is told takes the map away: others must find the note
                for segment in self.segments:
                    try:
                        segment.check()
                    except CorruptFileError as error:
                        self._loss = lost_pages(), CorruptFileError(error.path, error.offset, error.reason)
                        raise
                self._lost_pages = count
        at, loss = self._loss
        if loss is not None and at > since:
            raise CorruptFileError(loss.path, loss.offset, loss.reason)
