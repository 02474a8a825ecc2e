# SPDX-License-Identifier: Apache-2.0
"""Consume queues: their files, the units that a pass over the log found wrong, and those that it did not come to."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from rmq._core._consumequeue import unpack_units, valid_units
from rmq._core._javahash import decode_text
from rmq._core._layout import UNIT_PRE_BLANK_SIZE, UNIT_SIZE
from rmq._core._message import check_directory
from rmq._core._record import PARSE_PROPERTIES, parse_properties
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import StoredFields, stored_at
from rmq.filecache import FileCache
from rmq.lock import Holder, lock_holder
from rmq.mappedfile import data_end
from rmq.message import dispatched_to
from rmq.paths import (
    LMQ_PREFIX,
    SEGMENT_NAME,
    is_queue_id,
    queue_directories,
    queue_directory,
    segment_name,
    topic_of,
)
from rmq.storeroot import foreign_queues
from rmq.verification.findings import Report
from rmq.verification.ground import UNFILLED, Ground, check_mode, scan_directory, size_of

Name = tuple[str, int]
Span = tuple[int, int, int, bool]  # queue offsets [low, high), phy offset of the record at low, is_right
CHUNK = 65536  # units
SPAN_LIMIT = 4096


@dataclass
class Queue:
    """Files of one queue: first bytes of the readable ones; ranges of bytes whose files were reported."""

    directory: Path
    starts: list[int] = field(default_factory=list)
    unreadable: list[tuple[int, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _known: tuple[int, Path] | None = field(default=None, init=False, repr=False, compare=False)

    def path_of(self, start: int) -> Path:
        """The file of that first byte; the last one is kept, for most calls want it again."""
        known = self._known
        if known is None or known[0] != start:
            known = self._known = start, self.directory / segment_name(start)
        return known[1]


def last_unit_of(ground: Ground) -> int:
    """Below which phy offset, in the segments that were listed, all records of a live broker have their units by now:
    it dispatches in log order. 0 beside others: our recovery has no such order.
    """
    if ground.mark is not None or lock_holder(ground.paths.lock) is not Holder.OTHER:
        return 0
    is_read = foreign_queues(ground.paths) is None
    with contextlib.closing(QueueFiles(replace(ground, report=Report(0)), is_read=is_read)) as files:
        return min(files.last_phy_offset(), ground.log.max_phy_offset)


class QueueFiles:
    """The queues of a store by (topic, queue id). Thread-safe once listed."""

    def __init__(self, ground: Ground, *, is_read: bool, known: dict[Name, Queue] | None = None) -> None:
        """is_read: False leaves all queues alone, because they are no files of units. known: as they were listed."""
        self.queues: dict[Name, Queue] = {} if known is None else known
        self.is_read = is_read
        self._ground = ground
        self._root = ground.paths.consume_queue
        self._segment_size = ground.config.mapped_file_size_consume_queue
        self._files = FileCache(False)
        batched = queue_directories(ground.paths.batch_consume_queue)
        self._batched = {(topic, queue_id) for path, topic, queue_id in batched if any(path.iterdir())}
        if is_read and known is None:
            self._list()

    def close(self) -> None:
        self._files.close()

    # ---- files ----

    def _list(self) -> None:
        report = self._ground.report
        check_mode(self._root, report)
        for topic in scan_directory(self._root):
            if not Path(topic.path).is_dir():
                if os.path.lexists(topic.path):  # else cleaned away
                    report.note(Path(topic.path), 0, "name", "no topic's directory")
                continue
            check_mode(Path(topic.path), report)
            text = topic_of(topic.name)
            if text is None:
                report.note(Path(topic.path), 0, "name", "no topic's directory, its name is not UTF-8")
                continue
            for queue in scan_directory(Path(topic.path)):
                name = queue.name
                if not Path(queue.path).is_dir() or not is_queue_id(name):
                    if os.path.lexists(queue.path):  # else cleaned away
                        report.note(Path(queue.path), 0, "name", "no queue's directory")
                    continue
                self.queues[text, int(name)] = self._list_files(Path(queue.path))

    def _list_files(self, directory: Path) -> Queue:
        report, size = self._ground.report, self._segment_size
        check_mode(directory, report)
        queue = Queue(directory)
        for entry in scan_directory(directory):
            path = Path(entry.path)
            if path.is_dir():
                report.note(path, 0, "name", "a directory among a queue's files; it is passed over")
                continue
            if not SEGMENT_NAME.fullmatch(entry.name) or int(entry.name) % size:
                report.derived(path, 0, "name", f"no consume-queue segment of {size} bytes has this name; "
                               "a store does not open with it")  # fmt: skip
                continue
            check_mode(path, report)
            start, length = int(entry.name), size_of(entry)
            if length is None:
                continue
            if length == size:
                queue.starts.append(start)
            elif length == 0:
                if not self._ground.is_live:
                    report.note(path, 0, "leftover", UNFILLED)
            else:
                report.derived(path, min(length, size), "size", f"file has {length} bytes, expected {size}")
                queue.unreadable.append((start, start + size))
        there = sorted(queue.starts + [start for start, _ in queue.unreadable])
        for start, following in pairwise(there):
            if following != start + size and self._are_there(queue, start, following):
                report.derived(directory / segment_name(start + size), 0, "missing",
                               "consume-queue segment is missing")  # fmt: skip
                queue.unreadable.append((start + size, following))
        queue.unreadable.sort()
        return queue

    def _are_there(self, queue: Queue, start: int, following: int) -> bool:
        """Whether no cleaning removed two files since they were listed, and power loss none between: behind the mark it
        may have taken some.
        """
        mark = self._ground.mark
        if not (queue.path_of(start).exists() and queue.path_of(following).exists()):
            return False
        if self._ground.is_closed or mark is None:
            return True
        phy_offset, size, _ = unpack_units(self._read_file(queue, following, 0, UNIT_SIZE))
        return bool(len(size) and size[0] > 0 and phy_offset[0] < mark.derived_phy_offset)

    def name_of(self, topic: bytes, queue_id: int) -> Name | None:
        """Topic and queue id as they name a directory; None when they cannot, or when no queues are read. A queue of
        inner batches has the units of plain messages, too, unless it has files of both kinds."""
        text = decode_text(topic)
        try:
            if not self.is_read or check_directory(text) != topic or queue_id < 0:
                return None
        except ValueError:
            return None
        name = text, queue_id
        return None if name in self._batched and name not in self.queues else name

    def read(self, name: Name, first: int, count: int) -> bytes:
        """Units from a queue offset on; zeros where there is no file."""
        queue, size = self.queues.get(name), self._segment_size
        parts = []
        position, end = first * UNIT_SIZE, (first + count) * UNIT_SIZE
        while position < end:
            start = position - position % size
            wanted = min(end, start + size) - position
            part = b""
            if queue is not None and start in queue.starts:
                part = self._read_file(queue, start, position - start, wanted)
            self._ground.read(len(part))
            parts.append(part.ljust(wanted, b"\0"))
            position += wanted
        return b"".join(parts)

    def _read_file(self, queue: Queue, start: int, position: int, size: int) -> bytes:
        """Bytes of one file; none when it was cleaned away."""
        try:
            return self._files.read(queue.path_of(start), position, size)
        except FileNotFoundError:
            return b""

    def place_of(self, name: Name, queue_offset: int) -> tuple[Path, int]:
        """File and position of a unit, whether there is one or not."""
        position = queue_offset * UNIT_SIZE
        start = position - position % self._segment_size
        queue = self.queues.get(name) or Queue(queue_directory(self._root, *name))
        return queue.path_of(start), position - start

    def last_phy_offset(self) -> int:
        """The highest phy offset that a unit at a queue's end points to; 0 without units."""
        highest = 0
        for name, queue in self.queues.items():
            for start in sorted(queue.starts, reverse=True):
                first = start // UNIT_SIZE
                places = range(first, first + self._segment_size // UNIT_SIZE)
                count = bisect.bisect_left(places, True, key=partial(self._ends_at, name))
                if count:
                    phy, sizes, _ = unpack_units(self.read(name, first + count - 1, 1))
                    highest = max(highest, int(phy[0])) if sizes[0] != UNIT_PRE_BLANK_SIZE else highest
                    break
        return highest

    def _ends_at(self, name: Name, queue_offset: int) -> bool:
        return not valid_units(self.read(name, queue_offset, 1))

    # ---- spans ----

    def add_spans(self, name: Name, spans: list[Span]) -> None:
        """Take what one segment's records say of a queue, segments in the order of the log.

        Memory: a span for each stretch without a fault.
        """
        queue = self.queues.setdefault(name, Queue(queue_directory(self._root, *name)))
        for low, high, phy_offset, is_right in spans:
            at = bisect.bisect_left(queue.spans, (low, high, phy_offset, is_right))
            if at and _goes_on(queue.spans[at - 1], low, is_right):
                at -= 1
                low, _, phy_offset, _ = queue.spans.pop(at)
            if at < len(queue.spans) and _goes_on((low, high, phy_offset, is_right), *queue.spans[at][::3]):
                high = queue.spans.pop(at)[1]
            if len(queue.spans) < SPAN_LIMIT:
                queue.spans.insert(at, (low, high, phy_offset, is_right))
            else:
                last = queue.spans[-1]
                queue.spans[-1] = min(last[0], low), max(last[1], high), last[2], last[3] and is_right

    # ---- judging ----

    def judge(self, name: Name) -> None:
        """Report what is wrong with one queue, once the whole log was read."""
        queue = self.queues[name]
        self._ground.log.refresh()
        for span in queue.spans:
            if not span[3] and not _was_left_behind(queue, span[2]):
                self._report_wrong(name, queue, span)
        extents = list(self._extents(queue))
        known = sorted((low, high) for low, high, _, _ in queue.spans)
        reach = max((end for _, end in extents), default=0)  # a record may say any queue offset
        last = max((high for _, high in known if high <= reach), default=0)
        begun = min((low for low, _ in known), default=2**62)
        for first, end in _without(extents, known):
            self._judge_rest(name, first, end, begun, last)

    def _extents(self, queue: Queue) -> Iterator[tuple[int, int]]:
        """Queue offsets [first, end) of each file that is there; the zeros of a hole at its end are left out."""
        for start in sorted(queue.starts):
            with contextlib.suppress(FileNotFoundError):  # cleaned away
                used = min(data_end(queue.path_of(start), self._segment_size), self._segment_size)
                yield start // UNIT_SIZE, (start + used + UNIT_SIZE - 1) // UNIT_SIZE

    def _report_wrong(self, name: Name, queue: Queue, span: Span) -> None:
        low, high, phy_offset, _ = span
        report = self._ground.report
        if low < 0 or low * UNIT_SIZE >= 2**62:
            segment = self._ground.log.segment_at(phy_offset)
            if segment is not None:
                report.damage(segment.path, phy_offset - segment.start, "unit-missing",
                              f"the record has queue offset {low}, which no unit can have")  # fmt: skip
            return
        for begin, end in queue.unreadable:
            if begin <= low * UNIT_SIZE < end:
                low = end // UNIT_SIZE
        if low >= high:
            return
        phy, sizes, tags = unpack_units(self.read(name, low, 1))
        path, position = self.place_of(name, low)
        more = f", and {high - low - 1} more of {name[0]}/{name[1]}" if high - low > 1 else ""
        if not phy[0] and not tags[0] and sizes[0] in (0, UNIT_PRE_BLANK_SIZE):
            what = "is pre-blank" if sizes[0] else "is not there"
            report.derived(path, position, "unit-missing", f"unit {low} {what}; the record at {phy_offset} needs it"
                           + more)  # fmt: skip
            return
        own = self._record_of(phy_offset)
        if low == span[0] and phy[0] == phy_offset:
            reason = f"unit {low} of the record at {phy_offset} says size {sizes[0]} and tags code {tags[0]}"
            if own is not None:
                reason += f", the record has size {own[0]}"
        else:
            reason = f"unit {low} points to {phy[0]}, but the message is the record at {phy_offset}"
        report.derived(path, position, "unit", reason + more)

    def _judge_rest(self, name: Name, first: int, end: int, begun: int, last: int) -> None:
        """Units that no record in the log claims: cleaned, pre-blank, of another queue's records, or wrong."""
        for low in range(first, end, CHUNK):
            count = min(CHUNK, end - low)
            data = self.read(name, low, count)
            if low >= last and not any(data):
                continue
            phy, sizes, tags = unpack_units(data)
            is_zero = (phy == 0) & (sizes == 0) & (tags == 0)
            is_pre_blank = (phy == 0) & (sizes == UNIT_PRE_BLANK_SIZE) & (tags == 0)
            offsets = np.arange(low, low + count)
            wrong = is_zero & (offsets < last)
            wrong |= is_pre_blank & (offsets > begun)
            is_unit = ~is_zero & ~is_pre_blank
            wrong |= is_unit & ((phy < 0) | (sizes <= 0) | (phy >= self._ground.log.min_phy_offset))
            for number in np.flatnonzero(wrong).tolist():
                self._judge_unit(name, low + number, int(phy[number]), int(sizes[number]), bool(is_zero[number]))

    def _judge_unit(self, name: Name, queue_offset: int, phy_offset: int, size: int, is_zero: bool) -> None:
        ground = self._ground
        path, position = self.place_of(name, queue_offset)
        if ground.is_blind(phy_offset) and not is_zero:
            return
        if not ground.is_closed and (is_zero or phy_offset + size > ground.unit_end or phy_offset < 0):
            return  # behind what was on disk, or made visible: any mix of old and new
        if is_zero or (size == UNIT_PRE_BLANK_SIZE and phy_offset == 0):
            what = "zero" if is_zero else "pre-blank"
            ground.report.derived(path, position, "unit-extra", f"unit {queue_offset} is {what}, though units stand "
                                  "before and behind it")  # fmt: skip
            return
        if phy_offset < 0 or size <= 0:
            ground.report.derived(path, position, "unit-extra", f"unit {queue_offset} is none: phy offset "
                                  f"{phy_offset}, size {size}")  # fmt: skip
            return
        found = self._record_of(phy_offset)
        if found is not None and (name[0].startswith(LMQ_PREFIX) or (
                found[1] != name[0] and self._is_dispatched_to(name[0], phy_offset))):
            if found[0] != size:
                ground.report.derived(path, position, "unit", f"unit {queue_offset} says size {size}, the record at "
                                      f"{phy_offset} has {found[0]}")  # fmt: skip
            return
        if found is None:
            if phy_offset >= ground.log_end and ground.tail is not None:
                ground.log_lost = max(ground.log_lost, phy_offset)
                return  # the tail is damage then, and the unit no fault
            reason = f"unit {queue_offset} points to {phy_offset}, where no record begins"
        else:
            reason = f"unit {queue_offset} points to the record at {phy_offset}, which is message {found[3]} of " \
                     f"{found[1]}/{found[2]}"  # fmt: skip
        if not ground.was_cleaned(phy_offset):
            ground.report.derived(path, position, "unit-extra", reason)

    def _is_dispatched_to(self, topic: str, phy_offset: int) -> bool:
        """Whether the record at a phy offset has its place in a light queue."""
        batch = RecordBatch(1)
        try:
            return self._ground.load(batch, phy_offset, checks=PARSE_PROPERTIES) and \
                topic in dispatched_to(parse_properties(stored_at(batch, 0, StoredFields).raw_properties))
        finally:
            batch.release()

    def _record_of(self, phy_offset: int) -> tuple[int, str, int, int] | None:
        """(size, topic, queue id, queue offset) of the record at a phy offset, None when there is none."""
        batch = RecordBatch(1)
        try:
            if not self._ground.load(batch, phy_offset, checks=PARSE_PROPERTIES):
                return None
            found = stored_at(batch, 0, StoredFields)
            return found.size, found.topic, found.queue_id, found.queue_offset
        finally:
            batch.release()


def _was_left_behind(queue: Queue, phy_offset: int) -> bool:
    """Whether the queue began at 0 again behind a record: a broker deleted its topic, and made it again."""
    return any(is_right and low == 0 and begun > phy_offset for low, _, begun, is_right in queue.spans)


def _goes_on(span: Span, low: int, is_right: bool) -> bool:
    """Whether a span that begins at low is more of the same; a queue offset below 0 stands alone."""
    return span[0] >= 0 and span[1] == low and span[3] == is_right


def _without(extents: list[tuple[int, int]], known: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Parts of ascending ranges that ascending, maybe overlapping ranges leave."""
    number = 0
    for first, end in extents:
        place = first
        while number < len(known) and known[number][1] <= place:
            number += 1
        at = number
        while at < len(known) and known[at][0] < end:
            if known[at][0] > place:
                yield place, known[at][0]
            place = max(place, known[at][1])
            at += 1
        if place < end:
            yield place, end
