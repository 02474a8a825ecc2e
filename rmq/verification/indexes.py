# SPDX-License-Identifier: Apache-2.0
"""Index files: each by itself, the chain that they form, and their entries beside the records of a segment."""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._entrycheck import (
    FAULT_HASH_RANGE,
    FAULT_LINK,
    FAULT_MISSING,
    FAULT_NO_KEY,
    FAULT_NO_RECORD,
    FAULT_ORDER,
    FAULT_SLOT,
    FAULT_TIME,
    EntryCheck,
    check_links,
)
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._record import used_size
from rmq._core._recordbatch import RecordBatch
from rmq.errors import CorruptFileError
from rmq.mappedfile import MappedFile
from rmq.paths import INDEX_NAME, LARGEST_OFFSET
from rmq.segment import file_size
from rmq.verification.findings import DERIVED, Report
from rmq.verification.ground import UNFILLED, Ground, check_mode, scan_directory, size_of

_HEADER = struct.Struct(">4q2i")
_KINDS = {FAULT_HASH_RANGE: "entry", FAULT_LINK: "link", FAULT_ORDER: "entry", FAULT_SLOT: "slot",
          FAULT_NO_RECORD: "entry", FAULT_NO_KEY: "entry", FAULT_TIME: "entry",
          FAULT_MISSING: "entry-missing"}  # fmt: skip


@dataclass
class Header:
    """The fields of an index file's first 40 bytes."""

    begin_timestamp: int
    end_timestamp: int
    begin_phy_offset: int
    end_phy_offset: int
    hash_slot_count: int
    index_count: int


class PartPlan(NamedTuple):
    """A Part without what is open, picklable."""

    path: Path
    header: Header
    limit: int
    is_settled: bool
    times: PartTimes


class PartTimes(NamedTuple):
    """Of a Part what its own judgement finds for the segments' passes."""

    base: int
    first_base: int
    firsts: npt.NDArray[np.int32]


@dataclass
class Part:
    """One index file. Entries 1 .. limit - 1 are judged; is_settled: nobody changes slots and header meanwhile.

    base: the begin timestamp from which its entries count seconds; first_base: that of entry 1, -1 when not known.
    firsts: for each of the ground's places the first entry at or behind it.
    """

    path: Path
    file: MappedFile
    view: IndexFileView
    header: Header
    limit: int
    is_settled: bool
    base: int = 0
    first_base: int = -1
    firsts: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def times(self) -> PartTimes:
        return PartTimes(self.base, self.first_base, self.firsts)

    @times.setter
    def times(self, found: PartTimes) -> None:
        self.base, self.first_base, self.firsts = found

    def phy_offset(self, entry: int) -> int:
        at = self.file.size - (self.view.index_num - entry) * L.ENTRY_SIZE
        return int(struct.unpack_from(">q", self.file.map, at + L.ENTRY_PHY_OFFSET_OFFSET)[0])


class IndexFiles:
    """The index files of a store, oldest first, mapped."""

    def __init__(self, ground: Ground, *, is_read: bool, known: list[PartPlan] | None = None) -> None:
        """is_read: False leaves all files alone. known: as they were listed and judged so far."""
        self.parts: list[Part] = []
        self.size = 0  # bytes to read
        self._ground = ground
        self._entries_at = L.INDEX_HEADER_SIZE + ground.config.max_hash_slot_num * L.INDEX_SLOT_SIZE
        if known is not None:
            for plan in known:
                with contextlib.suppress(FileNotFoundError):  # cleaned away
                    file, view = self._mapped(plan.path)
                    self.parts.append(Part(plan.path, file, view, *plan[1:-1], *plan.times))
        elif is_read:
            self._list()

    def plan(self) -> list[PartPlan]:
        """The files as they stand, for `known` in another process."""
        return [PartPlan(part.path, part.header, part.limit, part.is_settled, part.times) for part in self.parts]

    def close(self) -> None:
        for part in self.parts:
            part.view.release()
            part.file.close()

    # ---- files ----

    def _list(self) -> None:
        ground, config = self._ground, self._ground.config
        size = index_file_size(config.max_hash_slot_num, config.max_index_num)
        check_mode(ground.paths.index, ground.report)
        for entry in scan_directory(ground.paths.index):
            path = Path(entry.path)
            if not INDEX_NAME.fullmatch(entry.name):
                ground.report.note(path, 0, "name", "no index file has this name; it is passed over")
                continue
            if not path.is_file():
                if os.path.lexists(path):  # else cleaned away
                    ground.report.derived(path, 0, "name", "no regular file, where an index file belongs")
                continue
            check_mode(path, ground.report)
            length = size_of(entry)
            if length is None:
                continue
            if length == 0:
                if not ground.is_live:
                    ground.report.note(path, 0, "leftover", UNFILLED)
            elif length != size:
                ground.report.derived(path, min(length, size), "size", f"index file has {length} bytes, expected "
                                      f"{size}")  # fmt: skip
            elif not self._is_newer_than_mark(path):
                try:
                    self._open(path)
                except (FileNotFoundError, CorruptFileError):  # cleaned away, or made again just now
                    if file_size(path):
                        raise
        if ground.is_live and self.parts:
            self.parts[-1].is_settled = False  # the end of its header comes behind the count that makes it full

    def _is_newer_than_mark(self, path: Path) -> bool:
        """Whether a file was made behind what is on disk for sure: recovery makes it again."""
        mark = self._ground.mark
        return mark is not None and not self._ground.is_closed and int(path.name) > mark.index_name

    def _open(self, path: Path) -> None:
        ground = self._ground
        file, view = self._mapped(path)
        count = view.index_count  # before the header: beside a writer it may be newer, never older
        header = Header(*_HEADER.unpack_from(file.map))
        part = Part(path, file, view, header, count, ground.is_closed or count >= view.index_num)
        if ground.mark is not None and not ground.is_closed and int(path.name) == ground.mark.index_name:
            part.header = Header(*_HEADER.unpack(ground.mark.index_header))
            part.limit = max(1, min(part.header.index_count, view.index_num))
            part.is_settled = False
        elif ground.mark is None and ground.state == "not closed" and not self._was_flushed(part):
            part.limit = 1  # a broker deletes such a file, and so does recovery
            part.is_settled = False
        self.parts.append(part)
        self.size += self._entries_at + part.limit * L.ENTRY_SIZE

    def _mapped(self, path: Path) -> tuple[MappedFile, IndexFileView]:
        file, config = MappedFile(path), self._ground.config
        return file, IndexFileView(file.map, hash_slot_num=config.max_hash_slot_num, index_num=config.max_index_num)

    def _was_flushed(self, part: Part) -> bool:
        """Whether a crash cannot have spoiled a broker's file. Source: IndexService#load."""
        checkpoint = self._ground.checkpoint
        return checkpoint is not None and part.view.is_full and \
            part.header.end_timestamp <= checkpoint.index_msg_timestamp  # fmt: skip

    def place_of(self, entry: int) -> int:
        """Position of an entry: all files have one geometry."""
        return self._entries_at + entry * L.ENTRY_SIZE

    # ---- each by itself ----

    def judge(self, number: int) -> PartTimes:
        """Slots, links, order and header of one file; notes where each of the ground's places begins in it.

        After cut_counts; what is judged here of a file says nothing of the others.
        """
        part, ground = self.parts[number], self._ground
        self._judge_times(number)
        faults, omitted, part.firsts, used = check_links(
            part.view, number, part.limit, ground.places, most=min(ground.report.limit, LARGEST_OFFSET),
            check_slots=part.is_settled or ground.is_live, is_growing=not part.is_settled)  # fmt: skip
        self.report(faults, ground.report)
        ground.report.count(DERIVED, omitted)
        ground.read(self._entries_at + part.limit * L.ENTRY_SIZE)
        if part.is_settled:
            self._judge_header(number, used)
        self._judge_neighbour(number)
        return part.times

    def cut_counts(self) -> None:
        """Leave out empty entries at the end, which a count that is too large would let in."""
        for part in self.parts:
            self._cut_count(part)

    def _cut_count(self, part: Part) -> None:
        begin = self.place_of(2)
        size = used_size(memoryview(part.file.map)[: self.place_of(part.limit)], begin) - begin
        used = min(part.limit, 2 + -(-size // L.ENTRY_SIZE))
        if used < part.limit:
            self._ground.report.derived(part.path, L.INDEX_COUNT_OFFSET, "header", f"entry count is {part.limit}, but "
                                        f"the entries end before {used}")  # fmt: skip
            part.limit = used

    def _judge_header(self, number: int, used: int) -> None:
        part, report = self.parts[number], self._ground.report
        header = part.header
        count = part.limit - 1

        def wrong(offset: int, reason: str) -> None:
            report.derived(part.path, offset, "header", reason)

        if not 0 <= header.index_count <= part.view.index_num:
            wrong(L.INDEX_COUNT_OFFSET, f"entry count is {header.index_count}, at most {part.view.index_num} fit")
        elif part.limit < part.view.index_num and self._is_used(part, part.limit):
            wrong(L.INDEX_COUNT_OFFSET, f"entry count is {header.index_count}, but an entry stands there")
        elif used_size(memoryview(part.file.map)[: part.file.data_end()], begin := self.place_of(part.limit)) \
                > begin:  # fmt: skip
            report.derived(part.path, begin, "entry", "the bytes behind the last entry are not zero")
        if self._is_used(part, 0):
            report.derived(part.path, self.place_of(0), "entry", "entry 0, which means none, is used")
        if count == 0:
            if header.begin_phy_offset != header.end_phy_offset or header.begin_timestamp != header.end_timestamp:
                wrong(L.INDEX_BEGIN_TIMESTAMP_OFFSET, "a file without entries begins and ends at different records")
        else:
            for offset, name, stored, right in (
                    (L.INDEX_BEGIN_PHY_OFFSET_OFFSET, "begin", header.begin_phy_offset, part.phy_offset(1)),
                    (L.INDEX_END_PHY_OFFSET_OFFSET, "end", header.end_phy_offset, part.phy_offset(count))):  # fmt: skip
                if stored != right:
                    wrong(offset, f"{name} phy offset is {stored}, but the entry there points to {right}")
        least = most = count if self._ground.config.counts_every_index_put else used
        if not self._ground.is_own:  # brokers up to 4.7.0 counted each entry, later ones go on with used slots
            least, most = used, count
        if not least <= header.hash_slot_count <= most:
            wrong(L.INDEX_HASH_SLOT_COUNT_OFFSET, f"slot count is {header.hash_slot_count}, {used} are used")

    def _is_used(self, part: Part, entry: int) -> bool:
        at = self.place_of(entry)
        return any(part.file.map[at : at + L.ENTRY_SIZE])

    def _judge_times(self, number: int) -> None:
        """Begin and end timestamp are those of the first and the last record; where not, the records' hold."""
        part, report = self.parts[number], self._ground.report
        part.base = part.header.begin_timestamp
        before = self.parts[number - 1] if number else None
        if before is None and not self._ground.was_cleaned(0):
            part.first_base = 0  # nothing was cleaned, so no file was before it
        if before is not None and before.view.is_full and before.limit > 1:
            end = self._time_of(before.phy_offset(before.limit - 1))
            part.first_base = max(0, before.header.end_timestamp if end is None else end)
        if part.limit <= 1:
            return
        first, last = self._time_of(part.phy_offset(1)), self._time_of(part.phy_offset(part.limit - 1))
        if first is not None and first != part.base:
            report.derived(part.path, L.INDEX_BEGIN_TIMESTAMP_OFFSET, "header", f"begin timestamp is {part.base}, but "
                           f"the first record was stored at {first}")  # fmt: skip
            part.base = first
        if part.is_settled and last is not None and last != part.header.end_timestamp:
            report.derived(part.path, L.INDEX_END_TIMESTAMP_OFFSET, "header", "end timestamp is "
                           f"{part.header.end_timestamp}, but the last record was stored at {last}")  # fmt: skip

    def _time_of(self, phy_offset: int) -> int | None:
        batch = RecordBatch(1)
        time = int(batch.numbers("store_timestamp")[0]) if self._ground.load(batch, phy_offset) else None
        batch.release()
        return time

    def _judge_neighbour(self, number: int) -> None:
        part, report = self.parts[number], self._ground.report
        if number + 1 < len(self.parts) and part.is_settled and part.limit < part.view.index_num:
            report.derived(part.path, L.INDEX_COUNT_OFFSET, "order", f"holds {part.limit - 1} entries of "
                           f"{part.view.index_num - 1}, though a file follows it")  # fmt: skip
        if number and part.limit > 1 and self.parts[number - 1].limit > 1:
            before = self.parts[number - 1]
            end = before.phy_offset(before.limit - 1)
            if part.phy_offset(1) < end and part.phy_offset(part.limit - 1) < end:
                report.derived(part.path, 0, "order", f"its entries end at {part.phy_offset(part.limit - 1)}, those of "
                               f"{before.path.name}, which has the smaller name, at {end}")  # fmt: skip

    # ---- faults ----

    def report(self, faults: npt.NDArray[np.int64], report: Report) -> None:
        """Findings from the faults that the compiled checks give; past the report's limit they are only counted."""
        for at in range(len(faults)):
            if report.is_full(DERIVED):
                report.count(DERIVED, len(faults) - at)
                return
            kind, number, entry, phy_offset, a, b = faults[at].tolist()
            part = self.parts[number]
            offset = self.place_of(entry)
            if kind == FAULT_HASH_RANGE:
                reason = f"entry {entry} has the negative key hash {a}"
            elif kind == FAULT_LINK:
                offset += L.ENTRY_PREVIOUS_OFFSET
                reason = f"entry {entry} links to {a}, the newest entry of its slot before it is {b}"
            elif kind == FAULT_ORDER:
                offset += L.ENTRY_PHY_OFFSET_OFFSET
                reason = f"entry {entry} points to {phy_offset}, out of the order of its neighbours"
            elif kind == FAULT_SLOT:
                offset = L.INDEX_HEADER_SIZE + entry * L.INDEX_SLOT_SIZE
                reason = f"slot {entry} holds {a}, its newest entry is {b}"
            elif kind == FAULT_NO_RECORD:
                reason = f"entry {entry} points to {phy_offset}, where no record begins"
            elif kind == FAULT_NO_KEY:
                reason = f"entry {entry} has key hash {a}, which no key of the record at {phy_offset} has"
            elif kind == FAULT_TIME:
                offset += L.ENTRY_TIME_DIFF_OFFSET
                reason = f"entry {entry} says {a} seconds, the record at {phy_offset} was stored at {b}"
            else:
                until = f" to the one at {a}" if a != phy_offset else ""
                reason = f"{b} keys of the record at {phy_offset}{until} have no entry"
                if b == 1:
                    reason = f"a key of the record at {phy_offset} has no entry"
            report.derived(part.path, offset, _KINDS[kind], reason)


class EntryCursor:
    """Has the entries of the records of a segment, or of a piece of one, compared across index files."""

    def __init__(self, ground: Ground, index: IndexFiles, begin: int, end: int, findings: Report, *,
                 is_piece: bool) -> None:  # fmt: skip
        """begin: one of the ground's places. is_piece: faults are left untold, has_faults says that there are some."""
        self.has_faults = False
        self.check = EntryCheck(begin=begin, required_end=ground.entry_end, is_lenient=not ground.is_own,
                                index_tags=ground.config.indexes_tags)  # fmt: skip
        self._index = index
        self._findings = findings
        self._end = end
        self._is_piece = is_piece
        number, last = int(np.searchsorted(ground.places, begin)), len(index.parts) - 1
        for self._file, part in enumerate(index.parts):
            if (entry := int(part.firsts[number])) < part.limit or self._file == last:
                self._open(entry)
                break

    def _open(self, entry: int) -> None:
        part = self._index.parts[self._file]
        self.check.open_file(part.view, self._file, entry, part.limit, begin_timestamp=part.base,
                             first_begin_timestamp=part.first_base,
                             is_last=self._file == len(self._index.parts) - 1)  # fmt: skip

    def go_on(self) -> None:
        """Tell the faults so far; the next file, when one is through."""
        self._report(self.check.take_faults())
        if self.check.is_through:
            self._file += 1
            self._open(1)

    def finish(self) -> tuple[int, int]:
        """The records are through; returns (right entries, keys behind)."""
        while not self.check.finish(self._end):
            self.go_on()
        self._report(self.check.take_faults(last=True))
        return self.check.right, self.check.behind

    def _report(self, faults: npt.NDArray[np.int64]) -> None:
        self.has_faults |= len(faults) > 0
        if not self._is_piece:
            self._index.report(faults, self._findings)
