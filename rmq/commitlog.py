# SPDX-License-Identifier: Apache-2.0
"""The commit log: segments end to end, appended by one writer, read by the one record iterator.

Source: RocketMQ CommitLog, MappedFileQueue. Layout: docs/format/commitlog.md.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._logtail import LogTail
from rmq._core._mapguard import lost_pages
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq._core._record import (
    CHECK_BODY_CRC,
    CHECK_RECORD_CRC,
    SCAN_BLANK,
    SCAN_FULL,
    SCAN_LIMIT,
    SCAN_REASONS,
    SCAN_TRUNCATED,
    SCAN_ZERO,
    encode_blank,
)
from rmq._core._recordbatch import RecordBatch
from rmq.errors import CorruptFileError, MessageTooLargeError
from rmq.logsegment import RESERVE_AHEAD, WRITTEN_FROM, FollowingSegment, RecordWriter, Segment, SegmentMaps
from rmq.mappedfile import MappedFile, room_for_maps
from rmq.paths import LARGEST_OFFSET, SEGMENT_NAME, segment_name
from rmq.segment import DirectoryWatch, close_all, is_hidden, make_directory, remove_file

logger = logging.getLogger("rmq")

PIECE = 1024 * 1024  # bytes that are cleared at a time
READ_GAP = 64 * 1024  # bytes between records: where they are fewer, the kernel's own read-ahead does as well
CHECK_CRC = CHECK_BODY_CRC | CHECK_RECORD_CRC
_START = attrgetter("start")


class LogScan:
    """Iterates over record batches of a range; then `phy_offset` and `stop` tell where and why it ended.

    blank_phy_offset: the end-of-segment record right before that place, -1 when there is none.
    Yields the same RecordBatch again and again: use its rows before going on.
    """

    def __init__(self, log: CommitLog, begin: int, end: int, batch: RecordBatch, skip_removed: bool,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.phy_offset = begin
        self.stop = SCAN_LIMIT
        self.blank_phy_offset = -1
        self._log, self._end, self._batch = log, end, batch
        self._skip_removed, self._options = skip_removed, options

    def __iter__(self) -> Iterator[RecordBatch]:
        while self.phy_offset < self._end:
            segment = self._log.segment_at(self.phy_offset)
            if segment is None and self._skip_removed and self.phy_offset < (low := self._log.min_phy_offset):
                logger.warning("phy offsets %d to %d were cleaned away while they were read", self.phy_offset, low)
                self.phy_offset, self.blank_phy_offset = low, -1
                continue
            if segment is None:
                # A blank record with no segment behind it closes nothing: the log ends before it.
                self.stop = SCAN_BLANK if self.blank_phy_offset >= 0 else SCAN_ZERO
                break
            batch = self._batch
            until = segment.reach(self.phy_offset, min(self._end, segment.end), batch.capacity)
            file = segment.holding(self.phy_offset, until)
            self.stop = batch.scan(file.map, file.start, self.phy_offset, until, behind=file.behind, **self._options)
            if self.stop == SCAN_TRUNCATED and batch.count:
                self.stop = SCAN_FULL  # seen whole in the next step, if it is
            file.check()
            self.phy_offset = batch.next_phy_offset
            if batch.count:
                self.blank_phy_offset = -1
                yield batch
                file.check()  # the rows borrow the map
            if self.stop == SCAN_BLANK:
                if self.blank_phy_offset < 0:
                    self.blank_phy_offset = self.phy_offset
                self.phy_offset = segment.end
            elif self.stop == SCAN_ZERO and self.blank_phy_offset >= 0:
                self.phy_offset = self.blank_phy_offset
                break
            elif self.stop not in (SCAN_FULL, SCAN_LIMIT):
                break
        if self.stop == SCAN_BLANK and self.blank_phy_offset >= 0 and self._log.segment_at(self.phy_offset) is None:
            self.phy_offset = self.blank_phy_offset
        self._batch.release()


class CommitLog:
    """Segments of one size, in one or several directories. The put lock is the caller's."""

    def __init__(self, directories: list[Path], segment_size: int, *, writable: bool,
                 make_segment: Callable[..., Segment] = Segment) -> None:  # fmt: skip
        """make_segment: takes Segment's arguments."""
        self.directories, self.segment_size, self.writable = directories, segment_size, writable
        self.segments: list[Segment] = []  # replaced or appended to, so that threads that read it need no lock
        self.writer, self.tail = RecordWriter(), LogTail()  # it stands on the last of `unsynced` or nowhere
        self.tail.written_from = WRITTEN_FROM
        self.appends_crc = self.judges_crc = False  # each record has its CRC: by our last writer; or by the config
        self.unsynced: list[Segment] = []
        self._watch, self._make_segment, self._lost_pages = DirectoryWatch(self.directories), make_segment, 0
        # What is not synced, and the end of the log, stay mapped: an error of the disk shows at an open descriptor.
        room = room_for_maps(segment_size)
        self.following = FollowingSegment(self._new_segment)
        self._maps = SegmentMaps(room, lambda: {*self.unsynced, *self.segments[-1:], *self.following.kept})
        self.unsynced_limit = max(1, room // 2)  # above it, some should be synced
        self.refresh()

    # ---- files ----

    def refresh(self) -> None:
        """Look at the directories again; known segments keep maps. CorruptFileError for strange names."""
        if not self.writable and self._watch.is_unchanged(self.segments):
            return
        known = {(segment.path, segment.inode): segment for segment in self.segments}
        found: list[Segment] = []
        empty: list[int] = []
        for directory in self.directories:
            try:
                entries = list(os.scandir(directory))
            except FileNotFoundError:
                continue
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir() or (not self.writable and is_hidden(entry.name)):
                    if self.writable and SEGMENT_NAME.fullmatch(entry.name):
                        raise CorruptFileError(path, 0, "a directory stands where a segment belongs")
                    continue
                if (path, entry.inode()) in known:
                    found.append(known[path, entry.inode()])
                    continue
                if not SEGMENT_NAME.fullmatch(entry.name) or int(entry.name) > LARGEST_OFFSET:
                    raise CorruptFileError(path, 0, "name is no commit-log segment's")
                try:
                    size, start = entry.stat().st_size, int(entry.name)
                except FileNotFoundError:
                    continue  # removed by a writer meanwhile
                if size == 0:
                    empty.append(start)
                if self.writable and size not in (0, self.segment_size):
                    raise CorruptFileError(path, min(size, self.segment_size),
                                           f"segment has {size} bytes, expected {self.segment_size}")  # fmt: skip
                if start % self.segment_size:
                    raise CorruptFileError(path, 0, f"segment starts off the grid of {self.segment_size} bytes")
                found.append(self.segment(path, start, entry.inode()))
        found.sort(key=lambda segment: segment.start)
        while found and found[-1].start in empty:
            found.pop()  # made and not filled by a process that was killed; RocketMQ deletes it
        for segment in found:
            if self.writable and segment.start in empty:
                raise CorruptFileError(segment.path, 0, "segment is empty")
        for number in range(len(found) - 1, 0, -1):
            if found[number].start != found[number - 1].end and not found[number - 1].path.exists():
                found = found[number:]  # cleaned away while the directory was read
                break
        self.hold(found)
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

    def _new_segment(self, start: int) -> Segment:
        directory = self.directories[0]
        make_directory(directory)
        return self.segment(directory / segment_name(start), start)

    # ---- append ----

    def append(self, batch: PutBatch, store_timestamp: int, queues: QueueTable, *,
               whole: bool = False) -> int:  # fmt: skip
        """Encode all rows at the end of the log; returns the new end. Nothing is written when it raises.

        whole: all rows in one segment, as RocketMQ's batch. Raises MessageTooLargeError, OSError (disk full).
        Source: CommitLog#asyncPutMessage, DefaultAppendMessageCallback#doAppend.
        """
        if self.tail.append(batch, store_timestamp, queues):
            return self.tail.position
        phy_offset = self.tail.position
        plan: list[tuple[Segment, MappedFile, int, int, int]] = []  # position, rows [first, stop); none: blank
        row = 0
        while row < len(batch):
            segment = self._known_segment(phy_offset) or self.following.append_to(self.segments, phy_offset)
            position = phy_offset - segment.start
            fitting, used = batch.fit(row, self.segment_size - position)
            if whole and fitting < len(batch):
                fitting = used = 0
            if position == 0 and not fitting:
                raise MessageTooLargeError(f"{batch.records_size} bytes fit into no segment of "
                                           f"{self.segment_size}")  # fmt: skip
            file = segment.file
            file.reserve(position, position + used + L.BLANK_HEADER_SIZE, RESERVE_AHEAD)
            if fitting:
                plan.append((segment, file, position, row, row + fitting))
            file.check()
            row += fitting
            phy_offset += used
            if row < len(batch):
                plan.append((segment, file, position + used, row, row))
                phy_offset = segment.end
        self.tail.rest()
        self.tail.planned, self.writer.is_small = phy_offset, batch.records_size < self.tail.written_from
        for segment, file, position, first, stop in plan:
            if not self.unsynced or self.unsynced[-1] is not segment:
                self.unsynced.append(segment)
            if first == stop:
                file.take(file.size)
                encode_blank(file.map, position)
            else:
                self.writer.write(batch, file, segment.start, position, first, stop, store_timestamp, queues)
            file.check()
        self.tail.reach(phy_offset, batch)
        if plan and self.writer.is_small:
            self.tail.stand(file.map, file.map.guard, segment.start, file.reserved)
        return phy_offset

    def distrust(self, phy_offset: int) -> None:
        """Take what lies behind a phy offset as not synced: a process that was killed wrote it."""
        self._owe([segment for segment in self.segments if segment.end > phy_offset])

    def _owe(self, segments: list[Segment]) -> None:
        """These are not synced, and no others."""
        self.unsynced = segments
        if not segments or not self.tail.is_on(segments[-1].start):
            self.tail.rest()

    @property
    def position(self) -> int:
        """Phy offset of the next byte to write."""
        return self.tail.position

    @position.setter
    def position(self, phy_offset: int) -> None:
        self.tail.position = self.tail.planned = phy_offset

    def erase_interrupted(self) -> None:
        """Zero what an interrupted append may have written; the queue offsets it took are the caller's to restore."""
        for segment in self.segments:
            begin, end = max(self.position, segment.start), min(self.tail.planned, segment.end)
            if begin < end:
                file = segment.file
                file.map[begin - segment.start : end - segment.start] = bytes(end - begin)
                file.check()
        self.tail.planned = self.position

    def take_unsynced(self, into: list[Segment]) -> None:
        """Move the segments written since the last call, oldest first, to a list, for the caller to sync."""
        into += [segment for segment in self.unsynced if segment not in into]
        self._owe([])

    def drop_unsynced(self, synced: list[Segment]) -> None:
        """Segments that are on disk and were full before their sync began."""
        self._owe([segment for segment in self.unsynced if segment not in synced])

    # ---- read ----

    def scan(self, begin: int, end: int, *, batch: RecordBatch | None = None, skip_removed: bool = True,
             **options: Any) -> LogScan:  # fmt: skip
        """Records from `begin` (a record's start) up to `end`, in batches. Options: RecordBatch.scan's."""
        return LogScan(self, begin, end, RecordBatch() if batch is None else batch, skip_removed, options)

    def records(self, begin: int, end: int, **options: Any) -> Iterator[RecordBatch]:
        """scan of a range known to be whole: raises CorruptFileError where it is not."""
        scan = self.scan(begin, end, **options)
        yield from scan
        if scan.phy_offset < end:
            raise self.damage(scan.phy_offset, scan.stop)

    def align(self, phy_offset: int, end: int, known: int = -1) -> int:
        """Start of the first record at or behind a phy offset, or `end`. known: one before it, in its segment."""
        while phy_offset < end:
            segment = self._known_segment(phy_offset)
            if segment is None or phy_offset in (segment.start, known):
                return phy_offset
            for batch in self.records(max(segment.start, known), min(end, segment.end)):
                offsets = batch.numbers("phy_offset")
                if offsets[-1] >= phy_offset:
                    return int(offsets[np.searchsorted(offsets, phy_offset)])
            phy_offset = segment.end
        return min(phy_offset, end)

    def damage(self, phy_offset: int, stop: int) -> CorruptFileError:
        """The error for bytes that are no record, naming file and byte."""
        segment = self._known_segment(phy_offset)
        if segment is None:
            start = phy_offset - phy_offset % self.segment_size + (self.segment_size if stop == SCAN_BLANK else 0)
            return CorruptFileError(self.directories[0] / segment_name(start), 0, "segment is missing")
        is_last = stop == SCAN_BLANK and self._known_segment(segment.end) is None
        if is_last or (stop in (SCAN_BLANK, SCAN_ZERO) and segment.ends_with_blank(phy_offset - segment.start)):
            return self.damage(segment.end, SCAN_ZERO)
        return CorruptFileError(segment.path, phy_offset - segment.start, SCAN_REASONS.get(stop, "no record"))

    def no_record(self, phy_offset: int, reason: str) -> CorruptFileError:
        """The error for a place that something points to, naming file and byte."""
        segment = self._known_segment(phy_offset)
        return (self.damage(phy_offset, SCAN_ZERO) if segment is None
                else CorruptFileError(segment.path, phy_offset - segment.start, reason))  # fmt: skip

    def load(self, phy_offsets: npt.NDArray[np.int64], end: int, *, checks: int = 0, capacity: int = 8192,
             any_size: bool = False) -> Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
        """Records at ascending phy offsets: batches, each with the positions in phy_offsets of its rows.

        What is no whole record below `end` is left out. any_size: a file that is cut short is no error.
        """
        batch = RecordBatch(min(capacity, max(1, len(phy_offsets))))
        first = 0
        while first < len(phy_offsets):
            segment = self.segment_at(int(phy_offsets[first]))
            if segment is None:
                first += 1
                continue
            last = min(int(phy_offsets.searchsorted(segment.end)), first + segment.at_once(batch.capacity))
            hold = segment.holding_what_is_left if any_size else segment.holding_records
            file = hold(phy_offsets[first:last])
            found = batch.load(file.map, file.start, phy_offsets[first:last], end, checks=checks, behind=file.behind)
            file.check()
            if batch.count:
                yield batch, found.astype(np.int64) + first
                file.check()
            first = last
        batch.release()

    def read_ahead(self, phy_offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        """Ask the disk for records of some sizes, one for each, unless they lie near each other. ValueError."""
        if len(phy_offsets) != len(sizes):
            raise ValueError(f"sizes must have a number for each of {len(phy_offsets)} phy offsets, got {len(sizes)}")
        order = np.argsort(phy_offsets)
        begins, ends = phy_offsets[order], phy_offsets[order] + sizes[order]
        if not len(sizes) or int(ends[-1]) - int(begins[0]) < READ_GAP * len(sizes):
            return
        cuts = np.flatnonzero(begins[1:] - ends[:-1] >= READ_GAP) + 1
        for begin, end in zip(begins[np.r_[0, cuts]].tolist(), ends[np.r_[cuts - 1, -1]].tolist(), strict=True):
            while begin < end and (segment := self.segment_at(begin)) is not None:
                segment.read_ahead(begin, min(end, segment.end))
                begin = segment.end

    # ---- end ----

    def behind(self, phy_offset: int) -> Iterator[tuple[Segment, int, int]]:
        """What lies at and behind a phy offset and is not zero: (segment, begin and end in it)."""
        for segment in self.segments:
            if segment.end > phy_offset:
                begin = max(0, phy_offset - segment.start)
                end = segment.used_end(begin)
                if end > begin:
                    yield segment, begin, end

    def truncate(self, phy_offset: int) -> None:
        """End the log at a phy offset: its segment is zero from there, later segments are gone. Durable."""
        kept = list(self.segments)
        while kept and kept[-1].start >= phy_offset and kept[-1].start > self.min_phy_offset:
            segment = kept.pop()  # the last first: no crash may leave a gap
            segment.close()
            remove_file(segment.path)
            self.hold(list(kept))
        if not kept:
            return
        segment = kept[-1]
        begin = max(0, phy_offset - segment.start)
        if segment.end > phy_offset and (end := segment.used_end(begin)) > begin:
            # A new record may end where a torn one ended: what follows must not be a record again. Nor may an old
            # end-of-segment record stand where a new one was lost: newer records would follow the gap.
            file = segment.file
            file.reserve(begin, end, 0)
            for at in range(begin, end, PIECE):
                file.map[at : min(at + PIECE, end)] = bytes(min(PIECE, end - at))
            file.check()
            file.sync()

    def forget_first(self, segment: Segment) -> None:
        """The log begins behind its first segment, which is that one."""
        assert self.segments[0] is segment
        self.hold(self.segments[1:])

    def check(self) -> None:
        """CorruptFileError when pages of a segment's map were gone. Cost: nothing until another page is lost."""
        if (count := lost_pages()) != self._lost_pages:
            for segment in self.segments:
                segment.check()
            self._lost_pages = count

    def close(self) -> None:
        self.tail.release()
        close_all(segment.close for segment in [*self.segments, *self.following.kept])

