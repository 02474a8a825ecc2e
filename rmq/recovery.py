# SPDX-License-Identifier: Apache-2.0
"""Opening a store: where its log ends, what is cut, and from where queues and index follow.

The rules: docs/architecture.md, "Recovery". Source: RocketMQ CommitLog#recoverNormally, #recoverAbnormally,
ConsumeQueue#truncateDirtyLogicFiles, IndexService#load, and stricter where RocketMQ loses messages.
"""

from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass
from functools import partial

import numpy as np

from rmq._core import _layout as L
from rmq._core._queuetable import QueueTable
from rmq._core._record import CHECK_SECTORS, SCAN_BLANK, SCAN_LIMIT, SCAN_ZERO, resync
from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CHECK_CRC, CommitLog
from rmq.consumequeue import ConsumeQueue, QueueGapError, QueueSet
from rmq.dispatch import Dispatcher
from rmq.errors import CorruptFileError
from rmq.index import Index, IndexFile
from rmq.marks import Mark, keep_cut, set_aside
from rmq.paths import StorePaths
from rmq.query import has_keys
from rmq.segment import sync_directory

logger = logging.getLogger("rmq")

CLOCK_SLACK_MS = 3000  # RocketMQ: StoreCheckpoint#getMinTimestamp


@dataclass
class LogEnd:
    """phy_offset: behind the last whole record. stop: SCAN_* there. next_phy_offset: the first whole record behind
    it, -1 when none. is_damage: what lies there had been durable."""

    phy_offset: int
    stop: int
    next_phy_offset: int = -1
    is_damage: bool = False


# ---- the end of the log ----------------------------------------------------------------------------------------


def _first_record_time(log: CommitLog, start: int) -> int | None:
    """Store timestamp of a segment's first record, or None when none is readable there."""
    segment = log.segment_at(start)
    assert segment is not None
    batch = RecordBatch(1)
    batch.scan(segment.file.map, segment.start, segment.start, segment.end, checks=CHECK_CRC)
    time = int(batch.numbers("store_timestamp")[0]) if batch.count else None
    batch.release()
    return time or None


def start_without_marks(log: CommitLog, clean: bool, checkpoint: Checkpoint, max_queue_phy_offset: int) -> int:
    """Where to begin a scan of a broker's log: RocketMQ's rules (store-format I.4, I.5)."""
    latest = max(0, min(checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp) - CLOCK_SLACK_MS)
    for segment in reversed(log.segments):
        time = _first_record_time(log, segment.start)
        if time is None:
            continue
        if (segment.start <= max_queue_phy_offset) if clean else (time <= latest):
            return segment.start
    return log.min_phy_offset


def find_end(log: CommitLog, begin: int, limit: int, *, queues: QueueTable | None = None,
             strict: bool = False) -> tuple[LogEnd, int]:  # fmt: skip
    """Scan from `begin`, a record's start, to the last whole record: (end, store timestamp of that record or 0).

    strict: records must also carry their queue's next offset, and no zeroed sectors.
    """
    options = {"checks": CHECK_CRC | CHECK_SECTORS, "queues": queues, "expect_queue_offsets": True} if strict else \
        {"checks": CHECK_CRC}  # fmt: skip
    scan = log.scan(begin, limit, **options)
    last_time = 0
    for batch in scan:
        last_time = int(batch.numbers("store_timestamp")[-1])
    return LogEnd(scan.phy_offset, scan.stop), last_time


def look_behind(log: CommitLog, end: LogEnd, *, durable: int, durable_time: int | None) -> LogEnd:
    """Judge what lies behind the end: a torn tail, or damage in what had been durable.

    durable: every byte below was on disk. durable_time: a record stored up to then was on disk; None: every record was.
    """
    end.is_damage = end.phy_offset < durable
    if end.stop in (SCAN_LIMIT, SCAN_BLANK) and not end.is_damage:
        return end
    for segment in log.segments:
        if segment.end <= end.phy_offset:
            continue
        begin = max(segment.start, end.phy_offset + (0 if end.stop == SCAN_ZERO else 1))
        used = segment.start + segment.used_end(min(begin, segment.end) - segment.start)
        found = resync(segment.file.map, segment.start, min(begin, used), used)
        if found >= 0:
            end.next_phy_offset = found
            batch = RecordBatch(1)
            batch.scan(segment.file.map, segment.start, found, segment.end)
            time = int(batch.numbers("store_timestamp")[0])
            batch.release()
            end.is_damage = end.is_damage or durable_time is None or time <= durable_time
            break
    return end


def end_past_damage(log: CommitLog, end: LogEnd) -> int:
    """For readers: the end of the last whole record behind the damage, found by looking for records again."""
    phy_offset = end.phy_offset
    while end.next_phy_offset >= 0:
        following, _ = find_end(log, end.next_phy_offset, log.max_phy_offset)
        phy_offset = following.phy_offset
        end = look_behind(log, following, durable=0, durable_time=None)
    return phy_offset


def cut_log(paths: StorePaths, log: CommitLog, end: LogEnd, repair: bool) -> None:
    """End the log behind its last whole record; what is taken off is kept under <store>/rmq/cut/.

    Raises CorruptFileError when that had been durable and repair is not allowed; then nothing was changed.
    """
    if end.is_damage and not repair:
        raise log.damage(end.phy_offset, end.stop)
    reason = "damage in what had been durable" if end.is_damage else "torn tail behind the last whole record"
    for path, position, data in log.behind(end.phy_offset):
        blank = struct.pack(">ii", log.segment_size - position, L.BLANK_MAGIC)
        if data.startswith(blank) and len(log.segments) and path == log.segments[-1].path:
            continue  # an end-of-segment record with nothing behind it: the next put writes over it
        keep_cut(paths, path, position, data, reason)
    if end.stop != SCAN_BLANK:
        log.truncate(end.phy_offset)
    log.position = end.phy_offset


# ---- queues ----------------------------------------------------------------------------------------------------


def cut_queues(log: CommitLog, queues: QueueSet, limit: int) -> None:
    """Drop units of records that end past `limit`, and those at a queue's end that point to no record of it."""
    batch = RecordBatch(1)

    def is_own(queue: ConsumeQueue, phy_offset: int, size: int) -> bool:
        segment = log.segment_at(phy_offset)
        if segment is None:
            return phy_offset < log.min_phy_offset
        batch.load(segment.file.map, segment.start, np.array([phy_offset], np.int64), limit)
        if not batch.count:
            return False
        fields = batch.fields(0)
        batch.release()
        is_light = queue.topic.startswith("%LMQ%")
        return bool(fields[4] == size and (is_light or (fields[0], fields[1]) == (queue.topic, queue.queue_id)))

    for queue in queues.queues.values():
        before = queue.max_offset
        queue.cut_where(limit, partial(is_own, queue))
        if queue.max_offset != before:
            queues.touch(queue)
            logger.warning("%s: dropped units %d to %d, whose records are not in the log", queue.directory,
                           queue.max_offset, before - 1)  # fmt: skip


def fill_table(queues: QueueSet, table: QueueTable) -> None:
    """Next offsets of all queues. Source: CommitLog's topicQueueTable after load."""
    for queue in queues.queues.values():
        table.set_next_offset(table.add(queue.topic.encode(), queue.queue_id), queue.max_offset)


# ---- index -----------------------------------------------------------------------------------------------------


def _remove_files(index: Index, files: list[IndexFile]) -> None:
    for file in files:
        file.close()
        os.unlink(file.path)
    if files:
        sync_directory(index.directory)
        index.files = [file for file in index.files if file not in files]


def restore_index(index: Index, mark: Mark) -> tuple[int, int] | None:
    """Take the index back to the mark: (phy offset, keys of its record done) to dispatch from; None: it cannot be.

    Files made after the mark are removed: their entries come again from the log.
    """
    if mark.index_name == 0:
        _remove_files(index, index.files)
        return mark.indexed_phy_offset, 0
    numbers = [int(file.path.name) for file in index.files]
    if mark.index_name not in numbers:
        return None
    active = numbers.index(mark.index_name)
    _remove_files(index, index.files[active + 1 :])
    wrong = index.files[active].reset(mark.index_header)
    if wrong:
        logger.warning("%s: %s; indexing it again", index.files[active].path, wrong)
        return None
    return mark.indexed_phy_offset, 0


def _keys_done(index: Index, number: int) -> int:
    """Keys of the record that the last entry of file `number` points to which are in the index."""
    done, end = 0, index.files[number].end_phy_offset
    while number >= 0:
        own = index.files[number].view.entries_of(end)
        done += own
        if own < index.files[number].index_count - 1 or own == 0:
            break
        number -= 1
    return done


def _preset_header(index: Index, number: int) -> bytes:
    """Header of file `number` as it was when the file was new."""
    previous = index.files[number - 1] if number else None
    phy_offset = max(0, previous.end_phy_offset) if previous else 0
    time = max(0, previous.end_timestamp) if previous else 0
    return struct.pack(">4q2i", time, time, phy_offset, phy_offset, 0, 0)


def adopt_index(paths: StorePaths, log: CommitLog, index: Index, end: int, clean: bool,
                checkpoint: Checkpoint) -> tuple[int, int]:  # fmt: skip
    """Judge a broker's index files; returns (phy offset, keys of its record done) to dispatch from.

    After an unclean end only files flushed at roll-over are trusted: the first other one is derived again in place,
    later ones are removed. A gap between files that hides keys (a file that a broker lost) sets the files behind it
    aside, to be derived again.
    """
    keep = 0
    while keep < len(index.files):
        file = index.files[keep]
        last = index.files[keep - 1].end_phy_offset if keep else log.min_phy_offset
        if not clean and not (file.is_full and file.end_timestamp <= checkpoint.index_msg_timestamp):
            _remove_files(index, index.files[keep + 1 :])
            file.reset(_preset_header(index, keep))
            break
        if file.end_phy_offset >= end:
            wrong = "indexes records that are not in the log"
        elif file.index_count > 1 and file.begin_phy_offset > last and has_keys(
                log, max(_after(log, last, keep > 0), log.min_phy_offset), file.begin_phy_offset):
            wrong = "keys of earlier records are missing before it"
        else:
            keep += 1
            continue
        for lost in index.files[keep:]:
            lost.close()
            set_aside(paths, lost.path, f"{wrong}; derived again")
        index.files = index.files[:keep]
        break
    number = keep - 1
    while number >= 0 and index.files[number].index_count <= 1:
        number -= 1
    if number < 0 or index.files[number].end_phy_offset < log.min_phy_offset:
        return log.min_phy_offset, 0
    return index.files[number].end_phy_offset, _keys_done(index, number)


def _after(log: CommitLog, phy_offset: int, is_record: bool) -> int:
    """The place behind the record at a phy offset; the offset itself when it is no record."""
    segment = log.segment_at(phy_offset)
    if not is_record or segment is None:
        return phy_offset
    batch = RecordBatch(1)
    batch.scan(segment.file.map, segment.start, phy_offset, segment.end)
    following = batch.next_phy_offset
    batch.release()
    return following


# ---- whole stores ----------------------------------------------------------------------------------------------


@dataclass
class OpenedStore:
    """The parts of a store that recovery works on."""

    paths: StorePaths
    log: CommitLog
    queues: QueueSet
    index: Index
    table: QueueTable
    dispatcher: Dispatcher
    checkpoint: Checkpoint


def was_left_alone(log: CommitLog, mark: Mark) -> bool:
    """Whether nobody appended to a cleanly closed store since its mark: nothing lies at its end."""
    segment = log.segment_at(mark.durable_phy_offset)
    if segment is None:
        return log.max_phy_offset == mark.durable_phy_offset
    position = mark.durable_phy_offset - segment.start
    head = bytes(segment.file.map[position : position + L.BLANK_HEADER_SIZE])
    if not any(head):
        return True
    following = log.segment_at(segment.end)
    is_blank = head == struct.pack(">ii", log.segment_size - position, L.BLANK_MAGIC)
    return is_blank and (following is None or not any(bytes(following.file.map[: L.BLANK_HEADER_SIZE])))


def recover(store: OpenedStore, mark: Mark | None, *, clean: bool, repair: bool) -> None:
    """Make log, queues and index agree, ready for puts. May be interrupted anywhere and run again.

    Raises CorruptFileError when what had been durable is damaged and repair is not allowed.
    """
    log, queues = store.log, store.queues
    queues.load()
    if not log.segments:
        if (mark is not None and mark.durable_phy_offset > 0) or any(q.max_offset for q in queues.queues.values()):
            raise CorruptFileError(log.directories[0], 0, "the commit log has no segments, but other files do")
        return
    if mark is not None and mark.durable_phy_offset > log.max_phy_offset and not repair:
        raise log.damage(log.max_phy_offset, SCAN_ZERO)
    if mark is not None and mark.durable_phy_offset <= log.max_phy_offset:
        if clean and was_left_alone(log, mark):
            log.position = mark.durable_phy_offset
            fill_table(queues, store.table)
            _continue(store, mark.derived_phy_offset, (mark.indexed_phy_offset, 0))
            return
        _recover_with_mark(store, mark, clean=clean, repair=repair)
        return
    _recover_without_marks(store, clean=clean, repair=repair)


def _recover_with_mark(store: OpenedStore, mark: Mark, *, clean: bool, repair: bool) -> None:
    """Records below the mark stand. Behind it: ours after a crash, or a broker's that ran since.

    After a crash the durable part of the mark's own segment is read again, so that damage there is not built upon.
    """
    log = store.log
    segment = log.segment_at(max(mark.durable_phy_offset - 1, 0))
    if not clean and segment is not None and mark.durable_phy_offset > segment.start:
        whole, _ = find_end(log, segment.start, mark.durable_phy_offset)
        if whole.phy_offset < mark.durable_phy_offset and whole.stop != SCAN_BLANK:
            whole.is_damage = True
            cut_log(store.paths, log, whole, repair)
            cut_queues(log, store.queues, whole.phy_offset)
            begin = adopt_index(store.paths, log, store.index, whole.phy_offset, clean, store.checkpoint)
            _continue(store, min(mark.derived_phy_offset, whole.phy_offset), begin)
            fill_table(store.queues, store.table)
            return
    cut_queues(log, store.queues, log.max_phy_offset if clean else mark.derived_phy_offset)
    fill_table(store.queues, store.table)
    end, _ = find_end(log, mark.derived_phy_offset, log.max_phy_offset, queues=store.table, strict=not clean)
    end = look_behind(log, end, durable=mark.durable_phy_offset,
                      durable_time=None if clean else -(2**63))  # fmt: skip
    cut_log(store.paths, log, end, repair)
    restored = None if clean else restore_index(store.index, mark)
    begin = restored or adopt_index(store.paths, log, store.index, end.phy_offset, clean, store.checkpoint)
    _continue(store, mark.derived_phy_offset, begin)
    fill_table(store.queues, store.table)


def _recover_without_marks(store: OpenedStore, *, clean: bool, repair: bool) -> None:
    """A broker's store, or one whose marks were lost."""
    log, queues = store.log, store.queues
    queue_end = max((queue.end_phy_offset() for queue in queues.queues.values()), default=0)
    start = start_without_marks(log, clean, store.checkpoint, queue_end)
    end, _ = find_end(log, start, log.max_phy_offset)
    end = look_behind(log, end, durable=0, durable_time=None if clean else store.checkpoint.physic_msg_timestamp)
    cut_log(store.paths, log, end, repair)
    cut_queues(log, queues, end.phy_offset)
    queue_end = max((queue.end_phy_offset() for queue in queues.queues.values()), default=0)
    begin = adopt_index(store.paths, log, store.index, end.phy_offset, clean, store.checkpoint)
    _continue(store, max(queue_end, log.min_phy_offset) if clean else min(start, end.phy_offset), begin)
    fill_table(queues, store.table)


def _continue(store: OpenedStore, queue_phy_offset: int, index_begin: tuple[int, int]) -> None:
    """Dispatch from where queues and index stand; from the start of the log when a queue misses units."""
    dispatcher = store.dispatcher
    dispatcher.queue_phy_offset = max(queue_phy_offset, store.log.min_phy_offset)
    dispatcher.index_phy_offset, dispatcher.index_key = index_begin
    try:
        dispatcher.advance(store.log.position)
    except QueueGapError as error:
        logger.warning("%s; deriving the queues from the whole log", error)
        dispatcher.queue_phy_offset = store.log.min_phy_offset
        dispatcher.advance(store.log.position)
    for queue in store.queues.queues.values():
        queue.correct_min_offset(store.log.min_phy_offset)
