# SPDX-License-Identifier: Apache-2.0
"""Where a log ends: the last whole record, and what lies behind it.

Source: RocketMQ CommitLog#recoverNormally, #recoverAbnormally, #isMappedFileMatchedRecover, and stricter.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace

from rmq._core import _layout as L
from rmq._core._record import (
    CHECK_BODY_CRC,
    CHECK_HAS_CRC,
    CHECK_SECTORS,
    SCAN_BAD_BODY_CRC,
    SCAN_BLANK,
    SCAN_LIMIT,
    SCAN_LOST_SECTOR,
    SCAN_NUL_END,
    SCAN_ZERO,
)
from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError
from rmq.lock import Crash, Holder
from rmq.logscan import CHECK_CRC
from rmq.logsegment import BLANK_HEADER
from rmq.marks import Mark
from rmq.segment import LOOKS

logger = logging.getLogger("rmq")

SOON = 0.01  # seconds until a writer that has begun a record is done with it
BEFORE_ALL = -(2**63)  # before any store timestamp
CLOCK_SLACK_MS = 3000  # RocketMQ: StoreCheckpoint#getMinTimestamp


@dataclass
class LogEnd:
    """phy_offset: behind the last whole record, which begins at last_phy_offset (-1: not scanned). stop: SCAN_* there.

    next_phy_offset: the first whole record behind it, -1 when none. is_damage: what lies there had been durable.
    blank_phy_offset: an end-of-segment record between the last whole record and phy_offset, -1 when none.
    """

    phy_offset: int
    stop: int
    last_phy_offset: int = -1
    next_phy_offset: int = -1
    is_damage: bool = False
    blank_phy_offset: int = -1

    @property
    def place(self) -> int:
        """Where the log goes on: an end-of-segment record that announces a segment without a record is taken off."""
        return self.phy_offset if self.is_damage or self.blank_phy_offset < 0 else self.blank_phy_offset


@dataclass(frozen=True)
class OnDisk:
    """What of a log had been durable: each byte below a phy offset, each record stored up to a time, None: each.

    What is older, all of it, than the record before it was left behind by a broker that cut its log. epoch: where one
    of controller mode began its last one, which cuts there or behind it. latest: a time at or behind that of the last
    record; the log went on behind a later one.
    """

    phy_offset: int
    time: int | None
    epoch: int | None = None
    latest: int = 2**63 - 1

    def holds(self, end: int, time: int) -> bool:
        """A record that ends at `end`, stored at `time`."""
        return end <= self.phy_offset or self.time is None or time <= self.time


# ---- the end of the log ----------------------------------------------------------------------------------------


def start_without_marks(log: CommitLog, clean: bool, checkpoint: Checkpoint, max_queue_phy_offset: int) -> int:
    """Where to begin a scan of a broker's log: by RocketMQ's rules, as the module's source has them."""
    latest = max(0, min(checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp) - CLOCK_SLACK_MS)
    for segment in reversed(log.segments):
        time = _time_at(log, segment.start, checks=CHECK_CRC)
        if time in (0, BEFORE_ALL):
            continue
        if (segment.start <= max_queue_phy_offset) if clean else (time <= latest):
            return segment.start
    return log.min_phy_offset


def find_end(log: CommitLog, begin: int, limit: int, *, own_from: int | None = None,
             on_disk: OnDisk | None = None) -> LogEnd:  # fmt: skip
    """Scan from `begin`, a record's start, to the last whole record below `limit`.

    own_from: from that record's start on the records are ours: no sector of one is zeros, and each has what its CRC
    property says.
    on_disk: if it does not hold the last record, the writer may have been at that: half of its properties would end
    with NUL.
    """
    # Else the CRC of a record may be a producer's own property, which is no reason to cut its message off.
    crc = CHECK_CRC if log.judges_crc else CHECK_BODY_CRC
    own = CHECK_SECTORS | (CHECK_HAS_CRC if log.appends_crc else 0)
    middle = limit if own_from is None else min(max(begin, own_from), limit)
    before = last = -1
    time = 0
    for start, stop, more in ((begin, middle, 0), (middle, limit, own)):
        scan = log.scan(start, stop, checks=crc | more)
        for batch in scan:
            before, last = [before, last, *batch.numbers("phy_offset")[-2:].tolist()][-2:]
            time = int(batch.numbers("store_timestamp")[-1])
        if scan.phy_offset != middle or middle == limit:
            break
    may_be_torn = own_from is None and on_disk is not None and last >= 0 and not on_disk.holds(scan.phy_offset, time)
    if may_be_torn and scan.stop in (SCAN_ZERO, SCAN_LIMIT):  # nothing behind it proves it whole
        again = log.scan(last, scan.phy_offset, checks=crc | CHECK_SECTORS)
        for _ in again:
            pass
        if again.stop in (SCAN_LOST_SECTOR, SCAN_NUL_END):
            return _end_before(log, last, before, crc)
    return LogEnd(scan.phy_offset, scan.stop, last, blank_phy_offset=scan.blank_phy_offset)


def _end_before(log: CommitLog, last: int, before: int, checks: int) -> LogEnd:
    """The log without its last record. before: a record before that one, -1: none is known."""
    segment = log.segment_at(last - 1)
    begin = before if before >= 0 else segment.start if segment is not None else last
    scan = log.scan(begin, last, checks=checks)
    for batch in scan:
        before = int(batch.numbers("phy_offset")[-1])
    return LogEnd(last, SCAN_LOST_SECTOR, before, blank_phy_offset=scan.blank_phy_offset)


def was_closed(crashed: Crash | None) -> bool:
    """Whether all of the log was on disk: the store was closed, and nothing was put since."""
    return crashed in (None, Crash.OPENING)


def time_on_disk(crashed: Crash | None, checkpoint: Checkpoint) -> int | None:
    """Up to which store timestamp records behind our mark were on disk: None: all, of a closed store; none, ours."""
    if was_closed(crashed):
        return None
    return checkpoint.physic_msg_timestamp if crashed is Crash.BROKERS else BEFORE_ALL


def on_disk_since(durable: int, crashed: Crash | None, checkpoint: Checkpoint, epoch: int | None) -> OnDisk:
    """Of a store that nobody writes. durable: by our mark."""
    time = time_on_disk(crashed, checkpoint)
    return OnDisk(durable, time, epoch) if time is not None else \
        OnDisk(durable, None, epoch, checkpoint.physic_msg_timestamp)


def rules_of(crashed: Crash | None, mark: Mark | None, checkpoint: Checkpoint,
             holder: Holder | None) -> tuple[int | None, OnDisk | None]:  # fmt: skip
    """own_from and on_disk of find_end, for a reader."""
    durable = mark.durable_phy_offset if mark is not None else 0
    own_from = durable if crashed is Crash.OURS and mark is not None else None
    is_killed = crashed is Crash.BROKERS or (crashed is Crash.OURS and mark is None)  # as recovery judges it
    since = checkpoint.physic_msg_timestamp if is_killed else BEFORE_ALL
    return own_from, OnDisk(durable, since) if is_killed or holder is Holder.OTHER else None


def look_behind(log: CommitLog, end: LogEnd, on_disk: OnDisk) -> LogEnd:
    """Judge what lies behind the end: a torn tail, or damage in what had been durable.

    A segment that is missing between others is damage: no crash takes one off.
    """
    last = log.segment_at(end.phy_offset) if end.stop == SCAN_BLANK else None
    following = end.phy_offset if last is None else last.end
    is_gone = log.min_phy_offset <= following < log.max_phy_offset and log.segment_at(following) is None
    end.is_damage = is_gone or end.phy_offset < on_disk.phy_offset
    if end.stop in (SCAN_LIMIT, SCAN_BLANK) and not end.is_damage:
        return end
    for start in [segment.start for segment in log.segments if segment.end > end.phy_offset]:
        segment = log.segment_at(start)
        if segment is None:
            continue  # taken off by a recovery beside a reader
        begin = max(segment.start, end.phy_offset + (0 if end.stop == SCAN_ZERO else 1))
        found = segment.resync(min(begin, segment.end), segment.end)
        if found >= 0:
            end.next_phy_offset = found
            was_on_disk = on_disk.time is None or _time_at(log, found) <= on_disk.time
            end.is_damage = end.is_damage or (was_on_disk and not _is_cut(log, end, on_disk))
            break
    return end


def _is_cut(log: CommitLog, end: LogEnd, on_disk: OnDisk) -> bool:
    """Whether a broker cut the log at this end: whole records behind it are all older than the last one before it."""
    time = _time_at(log, end.last_phy_offset)
    may_be = time <= on_disk.latest if on_disk.epoch is None else end.phy_offset >= on_disk.epoch
    return may_be and _time_at(log, end.next_phy_offset) < time and _newest(log, end.next_phy_offset) < time


def last_start(log: CommitLog) -> int:
    """Where the last segment that holds anything starts."""
    return next((segment.start for segment in reversed(log.segments) if any(segment.read(0, 8))), log.min_phy_offset)


def _time_at(log: CommitLog, phy_offset: int, *, checks: int = 0) -> int:
    """Store timestamp of the record at a place; BEFORE_ALL without one, or where it was cleaned away."""
    segment = log.segment_at(phy_offset) if phy_offset >= 0 else None
    if segment is None:
        return BEFORE_ALL
    batch = RecordBatch(1)
    segment.scan(batch, phy_offset, segment.end, checks=checks)
    time = batch.store_timestamp(0) if batch.count else BEFORE_ALL
    batch.release()
    return time


def _newest(log: CommitLog, phy_offset: int) -> int:
    """Latest store timestamp of the whole records from one on. A clock that was set back has come up again since."""
    newest = BEFORE_ALL
    while phy_offset >= 0:
        scan = log.scan(phy_offset, log.max_phy_offset, checks=CHECK_BODY_CRC)
        newest = max([newest, *(int(batch.numbers("store_timestamp").max()) for batch in scan)])
        phy_offset = record_behind(log, scan.phy_offset)
    return newest


def ends_for_sure(log: CommitLog, end: LogEnd, epoch: int | None) -> bool:
    """Beside a broker: whether no whole record lies behind the end but those that it appended since. One that does is
    behind damage, or was cut off by a recovery: nobody tells which, but for an `epoch` as OnDisk has it.
    """
    end = look_behind(log, replace(end), OnDisk(0, BEFORE_ALL if epoch is None else None, epoch))
    is_sure = not end.is_damage and (epoch is not None or end.next_phy_offset in (-1, end.phy_offset))
    if not is_sure and find_end(log, end.phy_offset, log.max_phy_offset).phy_offset > end.phy_offset:
        return True  # it was being written
    if not is_sure:
        logger.warning("%s: the log is read up to %d; behind it lie whole records, damage or what a recovery cut off",
                       log.directories[0], end.phy_offset)  # fmt: skip
    return is_sure


def may_go_on(log: CommitLog, phy_offset: int) -> bool:
    """False when what lies at a place is no record for sure."""
    segment = log.segment_at(phy_offset)
    return segment is None or any(segment.read(phy_offset - segment.start, L.BLANK_HEADER_SIZE))


def record_behind(log: CommitLog, phy_offset: int) -> int:
    """For readers: the first whole record behind a damaged place, -1 when none. Files cut short are passed over."""
    for start in [segment.start for segment in log.segments if segment.end > phy_offset]:
        segment = log.segment_at(start)
        if segment is None:
            continue  # taken off by a recovery beside a reader
        with contextlib.suppress(CorruptFileError):
            found = segment.resync(max(start, phy_offset + 1), segment.end)
            if found >= 0:
                return found
    return -1


def misses_last_segment(log: CommitLog, checkpoint: Checkpoint, queue_end: int) -> bool:
    """Of a closed store whose queues end at a phy offset: whether the segment behind its last one was lost.

    Units of records that a broker cut off after a crash prove nothing; the checkpoint goes back then.
    """
    if not log.segments or queue_end <= log.max_phy_offset:
        return False
    scan = log.scan(log.segments[-1].start, log.max_phy_offset, checks=CHECK_CRC)
    newest = max((int(batch.numbers("store_timestamp").max()) for batch in scan), default=0)
    latest = max(checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp)
    return scan.stop in (SCAN_LIMIT, SCAN_BLANK) and 0 < newest < latest


def end_past_damage(log: CommitLog, end: LogEnd) -> LogEnd:
    """For readers: the end of the last whole record behind the damage, found by looking for records again."""
    while end.next_phy_offset >= 0:
        end = look_behind(log, find_end(log, end.next_phy_offset, log.max_phy_offset), OnDisk(0, BEFORE_ALL))
    return end


def end_past_bodies(log: CommitLog, end: LogEnd, durable: int, seen: OnDisk) -> LogEnd:
    """The end behind records of which the body alone is wrong: of a body nothing is derived. The last ones of them may
    be half on disk, but below `durable`.
    """
    kept = end
    while end.stop == SCAN_BAD_BODY_CRC and (segment := log.segment_at(end.phy_offset)) is not None:
        size = int.from_bytes(segment.read(end.phy_offset - segment.start, 4), "big")  # it adds up
        end = find_end(log, end.phy_offset + size, log.max_phy_offset, on_disk=seen)
        if end.last_phy_offset >= 0 or end.phy_offset <= durable:
            kept = end
    return kept


def end_to_derive(log: CommitLog, on_disk: OnDisk, is_live: bool, crashed: Crash | None,
                  checkpoint: Checkpoint) -> int:  # fmt: skip
    """For rebuilds: behind the last whole record. CorruptFileError when more had been there, or is.

    is_live: a writer may put records meanwhile: one that was not there at the first look is no damage at the next.
    crashed: else how the store was left; what its recovery takes off is not there.
    """
    gap = log.first_gap()
    if gap >= 0:
        raise log.damage(gap, SCAN_ZERO)
    seen = replace(on_disk, time=BEFORE_ALL) if is_live else on_disk
    begin, own_from = last_start(log), on_disk.phy_offset if crashed is Crash.OURS else None
    if on_disk.time is not None:  # a tear may lie in an earlier segment
        known = on_disk.phy_offset or start_without_marks(log, False, checkpoint, 0)
        begin = min(begin, max(known, log.min_phy_offset))
    end = look_behind(log, find_end(log, begin, log.max_phy_offset, own_from=own_from, on_disk=seen), on_disk)
    for _ in range(LOOKS if is_live and end.is_damage else 0):
        time.sleep(SOON)
        later = find_end(log, end.phy_offset, log.max_phy_offset, on_disk=seen)
        if later.phy_offset > end.phy_offset:
            end = later
            break
    if end.is_damage:
        end = look_behind(log, end_past_bodies(log, end, on_disk.phy_offset, seen), on_disk)
    if end.is_damage:
        raise log.damage(end.phy_offset, end.stop)
    return end.place


def fits(log: CommitLog, mark: Mark) -> bool:
    """Whether the record that the mark names as the last one lies there; else: another log's mark, or damage."""
    if mark.last_phy_offset < log.min_phy_offset:
        return True  # none, not known, or cleaned away
    segment = log.segment_at(mark.last_phy_offset)
    if segment is None:
        return False
    batch = RecordBatch(1)
    segment.scan(batch, mark.last_phy_offset, segment.end)
    found = batch.count == 1 and batch.next_phy_offset == mark.durable_phy_offset
    batch.release()
    return found


def own_end(log: CommitLog, mark: Mark | None) -> int:
    """Up to where a store of ours has its own messages, whoever went on with it: 0 when no mark that fits tells."""
    with contextlib.suppress(CorruptFileError):  # of a segment that is cut short
        return mark.durable_phy_offset if mark is not None and fits(log, mark) else 0
    return 0


def is_outdated(log: CommitLog, mark: Mark, checkpoint: Checkpoint, queue_end: int) -> bool:
    """Whether a broker cut the log below the mark since, and it has grown past it: the mark tells nothing then."""
    if not log.segments or fits(log, mark):
        return False
    start = start_without_marks(log, True, checkpoint, queue_end)
    return find_end(log, start, log.max_phy_offset).phy_offset >= mark.durable_phy_offset


def was_left_alone(log: CommitLog, mark: Mark) -> bool:
    """Whether nobody appended to a cleanly closed store since its mark: nothing lies at its end."""
    segment = log.segment_at(mark.durable_phy_offset)
    if segment is None:
        return log.max_phy_offset == mark.durable_phy_offset
    position = mark.durable_phy_offset - segment.start
    head = segment.read(position, L.BLANK_HEADER_SIZE)
    if not any(head):
        return True
    following = log.segment_at(segment.end)
    is_blank = head == BLANK_HEADER.pack(log.segment_size - position, L.BLANK_MAGIC)
    return is_blank and (following is None or not any(following.read(0, L.BLANK_HEADER_SIZE)))
