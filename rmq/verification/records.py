# SPDX-License-Identifier: Apache-2.0
"""One pass over a segment or a piece of it: its records, and the units and index entries that are theirs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rmq._core._layout import UNIT_SIZE
from rmq._core._queuetable import QueueTable
from rmq._core._record import (
    CHECK_SECTORS,
    LEGACY_PROPERTIES,
    PARSE_PROPERTIES,
    SCAN_BAD_BODY_CRC,
    SCAN_BAD_RECORD_CRC,
    SCAN_BLANK,
    SCAN_FULL,
    SCAN_LIMIT,
    SCAN_LOST_SECTOR,
    SCAN_NUL_END,
    SCAN_REASONS,
    SCAN_TRUNCATED,
    SCAN_ZERO,
    resync,
)
from rmq._core._recordbatch import RecordBatch
from rmq._core._recordcheck import WANTS_NOTHING, WANTS_UNITS, RecordCheck
from rmq._core._unitcheck import UnitCheck
from rmq.logscan import CHECK_CRC
from rmq.logsegment import ZEROS_AT_END, Segment
from rmq.mappedfile import MappedFile
from rmq.segment import EXHAUSTED, opened
from rmq.verification.findings import Report
from rmq.verification.ground import Ground
from rmq.verification.indexes import EntryCursor, IndexFiles
from rmq.verification.queues import QueueFiles

WINDOW_MEMORY = 32 * 1024 * 1024  # bytes of units in memory for each thread
FIRST_UNITS, WINDOW_GROWTH, MOST_UNITS = 16, 4, 16384  # of a queue: a segment has few units of it, or many in a row
STEP_BYTES = 8 * 1024 * 1024  # of the log: at least so often progress is told
_PASSABLE = {SCAN_BAD_BODY_CRC: "crc", SCAN_BAD_RECORD_CRC: "crc", SCAN_LOST_SECTOR: "sector",
             SCAN_NUL_END: "sector"}  # fmt: skip


Range = tuple[int, int]  # phy offsets [begin, end)


class UnsoundPieceError(Exception):
    """Something is wrong in a piece of a segment: a pass over the whole segment tells what."""


@dataclass
class SegmentReport:
    """What one segment holds. start: its phy offset; end: behind its last whole record; stop: SCAN_* there.

    spans: per queue, (low, high, phy offset, is_right) of queue offsets, as UnitCheck gives them.
    used_end: behind the last byte that is not zero, where it was looked for; -1 elsewhere.
    is_sound: False of a piece of which nothing is told because something is wrong with it.
    """

    start: int
    end: int
    used_end: int = -1
    is_sound: bool = True
    stop: int = SCAN_LIMIT
    record_count: int = 0
    last_timestamp: int | None = None
    least_timestamp: int = 0  # of those below 0
    spans: dict[tuple[str, int], list[tuple[int, int, int, bool]]] = field(default_factory=dict)
    unit_count: int = 0
    entry_count: int = 0
    units_behind: int = 0
    keys_behind: int = 0


def joined(pieces: list[SegmentReport]) -> SegmentReport | None:
    """The report of a segment from those of its pieces, in any order; None when one is not sound, or does not end where
    the next one begins.
    """
    first, *others = sorted(pieces, key=lambda piece: piece.start)
    for piece in others:
        if piece.start != first.end:
            return None
        first.end, first.stop, first.used_end = piece.end, piece.stop, piece.used_end
        first.is_sound = first.is_sound and piece.is_sound
        for name in ("record_count", "unit_count", "entry_count", "units_behind", "keys_behind"):
            setattr(first, name, getattr(first, name) + getattr(piece, name))
        times = [time for time in (first.last_timestamp, piece.last_timestamp) if time is not None]
        first.last_timestamp = max(times, default=None)
        first.least_timestamp = min(first.least_timestamp, piece.least_timestamp)
        for queue, spans in piece.spans.items():
            first.spans.setdefault(queue, []).extend(spans)
    return first if first.is_sound else None


def check_range(ground: Ground, begin: int, end: int, queues: QueueFiles, index: IndexFiles) -> SegmentReport:
    """SegmentCheck of a range; nothing is told of a segment that was cleaned away meanwhile, maybe with its units."""
    segment, findings = ground.log.segment_at(begin), Report(ground.report.limit)
    if segment is not None:
        try:
            found = SegmentCheck(ground, segment, begin, end, queues, index, findings).run()
        except FileNotFoundError:
            if not ground.was_cleaned(begin):
                raise
        if not ground.was_cleaned(begin):
            ground.report.merge(findings.kept(), findings.counts)
            return found
    return SegmentReport(begin, begin)


class Window:
    """Bytes of a segment, the phy offsets [start, end), read into memory that is used again. To map pages for one look
    takes as long as that, and longer where several threads do.
    """

    def __init__(self, segment: Segment, descriptor: int, data: memoryview) -> None:
        self._segment, self._descriptor, self._data = segment, descriptor, data
        self._hold(segment.start, 0)

    def _hold(self, start: int, size: int) -> None:
        self.map = self._data[:size]
        self.start, self.end = start, start + size
        self.behind = self._segment.end - self.end  # bytes of the segment

    def move(self, start: int, end: int) -> None:
        """Hold the phy offsets [start, end), as many as there is room for; none when the file does not give them."""
        wanted = self._data[: end - start]
        try:
            is_whole = os.preadv(self._descriptor, [wanted], start - self._segment.start) == len(wanted)
        except OSError:
            is_whole = False
        self._hold(start, len(wanted) if is_whole else 0)


class SegmentCheck:
    """Reads one segment from its first to its last byte below the ground's limit, or a piece of it.

    begin, end: of the segment, or of records. A piece that is not sound finds nothing.
    """

    def __init__(self, ground: Ground, segment: Segment, begin: int, end: int, queues: QueueFiles, index: IndexFiles,
                 findings: Report) -> None:  # fmt: skip
        self._ground = ground
        self._findings = findings
        self._begin, self._end = begin, min(ground.log_limit, end)
        self._is_piece = (begin, end) != (segment.start, segment.end)
        self._segment = segment
        self._queue_files = queues
        self._names: list[tuple[str, int] | None] = []
        self._windows: list[int] = []  # units that were last read of each queue
        self._units = UnitCheck(np.array(ground.config.delay_levels_ms, np.int64), required_end=ground.unit_end,
                                is_lenient=not ground.is_own,
                                has_ext=(ground.paths.root / "consumequeue_ext").is_dir())  # fmt: skip
        self._entries = EntryCursor(ground, index, begin, end, findings, is_piece=self._is_piece)
        self._table = QueueTable()
        self._check = RecordCheck(self._table, self._units, self._entries.check)
        self._checks = PARSE_PROPERTIES
        if ground.is_own and ground.config.parses_legacy_properties:
            self._checks |= LEGACY_PROPERTIES
        self._report = SegmentReport(begin, begin)
        self._window: Window | None = None

    def run(self) -> SegmentReport:
        """Raises OSError, and InterruptedError when the verification was given up."""
        with self._ground.room() as room:
            try:
                with contextlib.ExitStack() as closing:
                    self._begin_window(room.data, closing)
                    self._run(room.batch, room.one)
            except UnsoundPieceError:
                return SegmentReport(self._begin, self._begin, is_sound=False)
        return self._report

    def _begin_window(self, data: memoryview, closing: contextlib.ExitStack) -> None:
        """Read in windows, unless it changes meanwhile or no descriptor is left: then by the map alone."""
        if self._ground.is_live:
            return
        try:
            descriptor = closing.enter_context(opened(self._segment.path))
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        else:
            self._window = Window(self._segment, descriptor, data)

    def _run(self, batch: RecordBatch, one: RecordBatch) -> None:
        place, retried = self._begin, -1
        while True:
            before = place
            stop = self._step(batch, place, self._checks | CHECK_CRC | CHECK_SECTORS, STEP_BYTES)
            place = batch.next_phy_offset
            self._ground.read(place - before)
            if stop == SCAN_FULL:
                continue
            if stop in (SCAN_LIMIT, SCAN_BLANK):
                break
            is_settled = stop in _PASSABLE and self._is_settled(place)
            following = -1 if is_settled else self._next_record(place, stop)
            if following == place:  # a writer came, which was not there when the window was read: the map shows more
                self._window = None
                continue
            if following >= 0 and self._ground.is_live and retried != place:
                retried = place  # a broker writes front to back: with one behind it, it is whole by now
                continue
            if is_settled or (stop in _PASSABLE and following >= 0):  # else a crash may have left the last one torn
                if stop != SCAN_NUL_END or self._ground.is_own:  # some releases store such properties
                    self._damage(place, _PASSABLE[stop], SCAN_REASONS[stop])
                self._step(one, place, self._checks, 1)
                place = one.next_phy_offset
                continue
            if following < 0:
                break
            self._pass_over(place, following, stop)
            place = following
        self._report.end, self._report.stop = place, stop
        self._finish()

    def _damage(self, place: int, kind: str, reason: str) -> None:
        if self._is_piece:
            raise UnsoundPieceError
        self._findings.damage(self._segment.path, place - self._segment.start, kind, reason)

    def _is_settled(self, place: int) -> bool:
        """Whether a record was on disk when its writer was last heard of."""
        mark = self._ground.mark
        return self._ground.is_closed or (mark is not None and place < mark.durable_phy_offset)

    def _next_record(self, place: int, stop: int) -> int:
        """The first whole record behind bytes that are none, -1 without one."""
        segment, report, end = self._segment, self._report, self._end
        begin = min(end, place + (0 if stop == SCAN_ZERO else 1))
        if self._ground.is_live or report.used_end < 0:
            report.used_end = segment.start + segment.used_end(0)
        return resync(segment.file.map, segment.start, begin, max(begin, min(end, report.used_end + ZEROS_AT_END)))

    def _pass_over(self, place: int, following: int, stop: int) -> None:
        self._damage(place, "record", f"{SCAN_REASONS.get(stop, 'no record')}; the next record begins "
                     f"{following - place} bytes on")  # fmt: skip
        self._ground.add_blind(place, following)
        self._entries.check.pass_over(following)

    def _step(self, batch: RecordBatch, place: int, checks: int, step: int) -> int:
        """Records from a place on, at least one and up to `step` bytes or somewhat more, with their units and entries;
        returns the scan's stop code, SCAN_FULL where only the window ended.

        Bytes that a window does not hold whole, or the file does not give, are looked at in the map.
        """
        window = self._window
        if window is None:
            return self._take(batch, self._segment.file, self._end, place, checks, step)
        if not window.start <= place < window.end:
            window.move(place, self._end)
        while window.start < window.end:
            stop = self._take(batch, window, window.end, place, checks, step)
            if stop not in (SCAN_LIMIT, SCAN_TRUNCATED) or (stop == SCAN_LIMIT and window.end == self._end):
                return stop
            if batch.next_phy_offset > place:
                return SCAN_FULL
            if window.start == place:
                break  # a longer record, or the end of the data
            window.move(place, self._end)  # for the second and last time
        return self._take(batch, self._segment.file, self._end, place, checks, step)

    def _take(self, batch: RecordBatch, held: MappedFile | Window, end: int, place: int, checks: int, step: int) -> int:
        check = self._check
        check.begin(batch, held.map, held.start, place, end, checks=checks, step=step, behind=held.behind)
        while (wants := check.go_on()) != WANTS_NOTHING:
            if wants == WANTS_UNITS:
                self._load_units(*self._units.wanted)
            else:
                self._entries.go_on()
        for phy_offset in check.take_misnamed():
            self._damage(phy_offset, "crc", "the name or the end of its whole-record CRC is damaged")
        self._take_spans(self._units.take_spans())
        self._entries.go_on()
        return batch.stop

    # ---- units ----

    def _load_units(self, number: int, queue_offset: int) -> None:
        """Those of a queue from an offset on; of a queue without a directory none will be asked for again."""
        while len(self._names) <= number:
            self._names.append(self._queue_files.name_of(*self._table.queue(len(self._names))))
            self._windows.append(FIRST_UNITS // WINDOW_GROWTH)
        name = self._names[number]
        if name is None:
            self._units.ignore(number)
            return
        most = max(FIRST_UNITS, min(MOST_UNITS, WINDOW_MEMORY // (UNIT_SIZE * len(self._names))))
        self._windows[number] = count = min(most, self._windows[number] * WINDOW_GROWTH)
        self._units.load(number, queue_offset, self._queue_files.read(name, queue_offset, count))

    def _take_spans(self, spans: npt.NDArray[np.int64]) -> None:
        for number, low, high, phy_offset, is_right in spans.tolist():
            if self._is_piece and not is_right:
                raise UnsoundPieceError
            name = self._names[number]
            assert name is not None
            self._report.spans.setdefault(name, []).append((low, high, phy_offset, bool(is_right)))

    def _finish(self) -> None:
        report, check = self._report, self._check
        self._take_spans(self._units.take_spans(last=True))
        report.record_count = check.record_count
        if check.record_count:
            report.last_timestamp, report.least_timestamp = check.newest, min(0, check.oldest)
        report.unit_count, report.units_behind = self._units.right, self._units.behind
        report.entry_count, report.keys_behind = self._entries.finish()
        if self._is_piece and self._entries.has_faults:
            raise UnsoundPieceError
