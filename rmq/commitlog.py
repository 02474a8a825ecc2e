# SPDX-License-Identifier: Apache-2.0
"""The commit log: appended by one writer, read by the one record iterator.

Source: RocketMQ CommitLog. Layout: docs/format/commitlog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._logtail import LogTail
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq._core._record import SCAN_BLANK, SCAN_REASONS, SCAN_ZERO, encode_blank
from rmq._core._recordbatch import RecordBatch
from rmq.closers import close_all
from rmq.errors import CorruptFileError, MessageTooLargeError
from rmq.logfiles import LogFiles
from rmq.logscan import LogScan
from rmq.logsegment import RESERVE_AHEAD, WRITTEN_FROM, FollowingSegment, RecordWriter, Segment
from rmq.mappedfile import MappedFile, room_for_maps
from rmq.paths import segment_name
from rmq.segment import remove_file

PIECE = 1024 * 1024  # bytes that are cleared at a time
LOADED_ROWS = 8192  # at a time
READ_GAP = 64 * 1024  # bytes between records: where they are fewer, the kernel's own read-ahead does as well


class CommitLog(LogFiles):
    """The log in its files. The put lock is the caller's."""

    def __init__(self, directories: list[Path], segment_size: int, *, writable: bool,
                 make_segment: Callable[..., Segment] = Segment) -> None:  # fmt: skip
        """make_segment: takes Segment's arguments."""
        self.writer, self.tail = RecordWriter(), LogTail()  # it stands on the last of `unsynced` or nowhere
        self.tail.written_from = WRITTEN_FROM
        self.appends_crc = self.judges_crc = False  # each record has its CRC: by our last writer; or by the config
        self.unsynced: list[Segment] = []
        self.unsynced_limit = max(1, room_for_maps(segment_size) // 2)  # above it, some should be synced
        self.following = FollowingSegment(self._new_segment, lambda: self.segments)
        # What is not synced, and the end of the log, stay mapped: an error of the disk shows at an open descriptor.
        super().__init__(directories, segment_size, writable=writable, make_segment=make_segment,
                         stay_mapped=lambda: [*self.unsynced, *self.following.kept])  # fmt: skip

    def watch(self, check_place: Callable[[], None]) -> None:
        """Call it before a file is made or mapped: it raises where the directory is no longer the store's."""
        self._maps.check_place = check_place

    def _new_segment(self, start: int) -> Segment:
        self._maps.check_place()
        return self.segment(self.directories[0] / segment_name(start), start)

    # ---- append ----

    def trim(self, batch: PutBatch) -> None:
        """Leave of a batch what one append may take: its segments are all mapped until they are synced."""
        room = self.unsynced_limit * self.segment_size
        if batch.records_size > room:
            batch.keep(max(1, batch.fit(0, room)[0]))

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
            segment = self._known_segment(phy_offset) or self.following.append(phy_offset)
            position = phy_offset - segment.start
            if self.segment_size - position < L.BLANK_HEADER_SIZE:
                raise CorruptFileError(segment.path, position, "no room is left for the record that ends a segment")
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
                file.read_on(file.size, behind=True)
            else:
                self.writer.write(batch, file, segment.start, position, first, stop, store_timestamp, queues)
            file.check()
        self.tail.reach(phy_offset, batch)
        if self.writer.is_small:
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

    def load(self, phy_offsets: npt.NDArray[np.int64], end: int, *, checks: int = 0,
             any_size: bool = False) -> Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
        """Records at ascending phy offsets: batches, each with the positions in phy_offsets of its rows.

        What is no whole record below `end` is left out. any_size: a file that is cut short is no error.
        """
        batch = RecordBatch(min(LOADED_ROWS, max(1, len(phy_offsets))))
        first = 0
        while first < len(phy_offsets):
            segment = self.segment_at(int(phy_offsets[first]))
            if segment is None:
                first += 1
                continue
            last = min(int(phy_offsets.searchsorted(segment.end)), first + segment.at_once(batch.capacity))
            hold = segment.holding_what_is_left if any_size else segment.holding_records
            file = hold(phy_offsets[first:last])
            if file.behind:  # a window of the first record: the map was let go of since, and could not be made again
                last = first + 1
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

    def remove_unfilled(self) -> None:
        """RocketMQ up to 4.9 loads no log with an empty segment."""
        for path in self.unfilled:
            remove_file(path)
        self.unfilled = []

    def close(self) -> None:
        self.tail.release()
        close_all(segment.close for segment in [*self.segments, *self.following.kept])

