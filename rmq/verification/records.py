# SPDX-License-Identifier: Apache-2.0
"""One pass over one segment: its records, and beside them the units and index entries that are theirs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
    SCAN_REASONS,
    SCAN_ZERO,
    resync,
)
from rmq._core._recordbatch import RecordBatch
from rmq._core._unitcheck import UnitCheck, misnamed_crcs
from rmq.commitlog import CHECK_CRC
from rmq.logsegment import ZEROS_AT_END
from rmq.verification.ground import Ground
from rmq.verification.indexes import EntryCursor, IndexFiles
from rmq.verification.queues import QueueFiles

WINDOW_MEMORY = 32 * 1024 * 1024  # bytes of units in memory for each thread
ROUND_BYTES = 2 * 1024 * 1024  # of the log: what is compared of records is still in the cache
_PASSABLE = {SCAN_BAD_BODY_CRC: "crc", SCAN_BAD_RECORD_CRC: "crc", SCAN_LOST_SECTOR: "sector"}


@dataclass
class SegmentReport:
    """What one segment holds. start: its phy offset; end: behind its last whole record; stop: SCAN_* there.

    spans: per queue, (low, high, phy offset, is_right) of queue offsets, as UnitCheck gives them.
    """

    start: int
    end: int
    stop: int = SCAN_LIMIT
    record_count: int = 0
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    has_damage: bool = False
    spans: dict[tuple[str, int], list[tuple[int, int, int, bool]]] = field(default_factory=dict)
    unit_count: int = 0
    entry_count: int = 0
    units_behind: int = 0
    keys_behind: int = 0


class SegmentCheck:
    """Reads one segment from its first to its last byte below the ground's limit."""

    def __init__(self, ground: Ground, start: int, queues: QueueFiles, index: IndexFiles) -> None:
        segment = ground.log.segment_at(start)
        assert segment is not None
        self._ground = ground
        self._segment = segment
        self._queue_files = queues
        self._table = QueueTable()
        self._names: list[tuple[str, int] | None] = []
        self._units = UnitCheck(np.array(ground.config.delay_levels_ms, np.int64), is_lenient=not ground.is_own,
                                has_ext=(ground.paths.root / "consumequeue_ext").is_dir())  # fmt: skip
        self._entries = EntryCursor(ground, index, segment)
        self._checks = PARSE_PROPERTIES
        if ground.is_own and ground.config.parses_legacy_properties:
            self._checks |= LEGACY_PROPERTIES
        self._used = -1  # end of what is not zero, once it was asked for
        self._report = SegmentReport(start, start)

    def run(self) -> SegmentReport:
        """Raises OSError, and InterruptedError when the verification was given up."""
        segment, batch, one = self._segment, RecordBatch(), RecordBatch(1)
        end = min(self._ground.log_limit, segment.end)
        place, retried = segment.start, -1
        while True:
            before = place
            stop = batch.scan(segment.file.map, segment.start, place, end, byte_limit=ROUND_BYTES, queues=self._table,
                              checks=self._checks | CHECK_CRC | CHECK_SECTORS)  # fmt: skip
            self._use(batch)
            place = batch.next_phy_offset
            self._ground.read(place - before)
            if stop == SCAN_FULL:
                continue
            if stop in (SCAN_LIMIT, SCAN_BLANK):
                break
            if self._ground.is_live and retried != place:
                retried = place  # a broker may have been in the middle of it
                continue
            if stop in _PASSABLE and not self._may_be_torn(place, stop, end):
                self._ground.report.damage(segment.path, place - segment.start, _PASSABLE[stop], SCAN_REASONS[stop])
                self._report.has_damage = True
                one.scan(segment.file.map, segment.start, place, end, queues=self._table, checks=self._checks)
                self._use(one)
                place = one.next_phy_offset
                continue
            following = self._next_record(place, stop, end)
            if following < 0:
                break
            self._pass_over(place, following, stop)
            place = following
        batch.release()
        one.release()
        self._report.end, self._report.stop = place, stop
        self._finish()
        segment.let_go()
        return self._report

    def _may_be_torn(self, place: int, stop: int, end: int) -> bool:
        """Whether a crash may have left a record with a wrong CRC half written: the last, and not yet on disk."""
        ground = self._ground
        durable = ground.mark.durable_phy_offset if ground.mark is not None else 0
        return not ground.is_closed and place >= durable and self._next_record(place, stop, end) < 0

    def _next_record(self, place: int, stop: int, end: int) -> int:
        """The first whole record behind bytes that are none, -1 without one."""
        segment = self._segment
        begin = min(end, place + (0 if stop == SCAN_ZERO else 1))
        if self._ground.is_live or self._used < 0:
            self._used = segment.start + segment.used_end(0)
        return resync(segment.file.map, segment.start, begin, max(begin, min(end, self._used + ZEROS_AT_END)))

    def _pass_over(self, place: int, following: int, stop: int) -> None:
        segment = self._segment
        self._ground.report.damage(
            segment.path, place - segment.start, "record",
            f"{SCAN_REASONS.get(stop, 'no record')}; the next record begins {following - place} bytes on")  # fmt: skip
        self._report.has_damage = True
        self._ground.add_blind(place, following)
        self._entries.blind_end = following

    def _use(self, batch: RecordBatch) -> None:
        if not batch.count:
            return
        report, times, segment = self._report, batch.numbers("store_timestamp"), self._segment
        for phy_offset in misnamed_crcs(batch):
            self._ground.report.damage(segment.path, phy_offset - segment.start, "crc",
                                       "the name or the end of its whole-record CRC is damaged")  # fmt: skip
        report.record_count += len(batch)
        first, last = int(times.min()), int(times.max())
        report.first_timestamp = first if report.first_timestamp is None else min(report.first_timestamp, first)
        report.last_timestamp = last if report.last_timestamp is None else max(report.last_timestamp, last)
        self._compare_units(batch)
        self._entries.compare(batch)

    # ---- units ----

    def _compare_units(self, batch: RecordBatch) -> None:
        row = 0
        while len(self._names) < len(self._table):
            number = len(self._names)
            self._names.append(self._queue_files.name_of(*self._table.queue(number)))
            if self._names[number] is None:
                self._units.ignore(number)
        while row < len(batch):
            row, number, queue_offset = self._units.compare(batch, row, self._ground.unit_end)
            if number >= 0:
                name = self._names[number]
                assert name is not None
                room = max(16, min(4096, WINDOW_MEMORY // (20 * len(self._names))))
                self._units.load(number, queue_offset, self._queue_files.read(name, queue_offset, room))
        self._take_spans(self._units.take_spans())

    def _take_spans(self, spans: npt.NDArray[np.int64]) -> None:
        for number, low, high, phy_offset, is_right in spans.tolist():
            name = self._names[number]
            assert name is not None
            self._report.spans.setdefault(name, []).append((low, high, phy_offset, bool(is_right)))

    def _finish(self) -> None:
        report = self._report
        self._take_spans(self._units.take_spans(last=True))
        report.unit_count, report.units_behind = self._units.right, self._units.behind
        report.entry_count, report.keys_behind = self._entries.finish(report.end)
