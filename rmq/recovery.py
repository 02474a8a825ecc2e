# SPDX-License-Identifier: Apache-2.0
"""Opening a store: where its log ends, what is cut, and from where queues and index follow.

The rules: docs/architecture.md, "Recovery". Source: RocketMQ CommitLog#recoverNormally, #recoverAbnormally,
ConsumeQueue#truncateDirtyLogicFiles, IndexService#load, and stricter where RocketMQ loses messages.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmq._core._queuetable import QueueTable
from rmq._core._record import SCAN_ZERO
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.consumequeue import ConsumeQueue, QueueGapError
from rmq.consumeroffsets import ConsumerOffsets
from rmq.coverage import hides_keys
from rmq.dispatch import Dispatcher
from rmq.errors import CorruptFileError
from rmq.index import Index
from rmq.indexfile import IndexFile
from rmq.lock import Crash
from rmq.logcuts import last_epoch
from rmq.logend import (
    LogEnd,
    OnDisk,
    find_end,
    fits,
    look_behind,
    misses_last_segment,
    on_disk_since,
    start_without_marks,
    time_on_disk,
    was_closed,
    was_left_alone,
)
from rmq.marks import Manifest, Mark, keep_cut, set_aside, shown_end, void_manifest
from rmq.paths import StorePaths
from rmq.query import messages_at
from rmq.queueends import QueueKey, cut_queues, lost_queues, refuse_light
from rmq.queueset import QueueSet
from rmq.segment import sync_directory
from rmq.storeroot import NO_LOG

logger = logging.getLogger("rmq")

def cut_log(paths: StorePaths, log: CommitLog, end: LogEnd, repair: bool) -> None:
    """End the log behind its last whole record; what is taken off is kept under <store>/rmq/cut/.

    Raises CorruptFileError when that had been durable and repair is not allowed; then nothing was changed.
    """
    if end.is_damage and not repair:
        raise log.damage(end.phy_offset, end.stop)
    if end.blank_phy_offset >= 0:  # it announces a segment of which no record is left
        end.phy_offset = end.blank_phy_offset
    reason = "damage in what had been durable" if end.is_damage else "torn tail behind the last whole record"
    for segment, begin, stop in log.behind(end.phy_offset):
        if segment is not log.segment_at(end.phy_offset) or not segment.ends_with_blank(begin):
            keep_cut(paths, segment.path, begin, segment.pieces(begin, stop), reason)
    log.truncate(end.phy_offset)
    log.position = end.phy_offset
    if end.blank_phy_offset >= 0 and log.segment_at(end.phy_offset) is None:
        log.position = end.blank_phy_offset  # it closes nothing: the segment behind it is gone


# ---- queues ----------------------------------------------------------------------------------------------------


def fill_table(queues: QueueSet, table: QueueTable) -> None:
    """Next offsets of all queues, which hold every record. Source: CommitLog's topicQueueTable after load."""
    ends = {(queue.topic.encode(), queue.queue_id): queue.max_offset for queue in queues.queues.values()}
    for number in range(len(table)):
        ends.setdefault(table.queue(number), 0)
    for (topic, queue_id), end in ends.items():
        table.set_next_offset(table.add(topic, queue_id), end)


# ---- index -----------------------------------------------------------------------------------------------------


def index_is_whole(index: Index, mark: Mark, manifest: Manifest | None, *, is_closed: bool) -> bool:
    """Whether every index file that there must be is there, full but for the last. Without a manifest nobody knows:
    their headers tell.

    is_closed: the last one ends as the mark says. If not, what follows the mark is of no account.
    """
    names = {file.path.name for file in index.files}
    if index.damaged or manifest is None or not names.issuperset(manifest.index_files):
        return False
    files = [file for file in index.files if is_closed or int(file.path.name) <= mark.index_name]
    if not all(file.is_full for file in files[:-1]):
        return False
    if not files or mark.index_name == 0:
        return not files and mark.index_name == 0
    last = files[-1]
    return int(last.path.name) == mark.index_name and (
        last.has_header(mark.index_header) if is_closed else last.has_entries(mark.index_header))


def _remove_files(index: Index, files: list[IndexFile]) -> None:
    """Remove derived files; their names are given again to those that take their place."""
    index.spare_names += [file.path.name for file in files]
    for file in files:
        file.close()
        os.unlink(file.path)
    if files:
        sync_directory(index.directory)
        index.files = [file for file in index.files if file not in files]


def _set_damaged_aside(paths: StorePaths, index: Index) -> None:
    for path in sorted(index.damaged, reverse=True):
        set_aside(paths, path, "its length, entries, slots and links do not fit together; derived again")
    index.damaged = ()


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
    if not index.files[active].has_entries(mark.index_header):
        logger.warning("%s: not the file that the mark speaks of; indexing it again", index.files[active].path)
        return None
    _remove_files(index, index.files[active + 1 :])
    wrong = index.files[active].reset(mark.index_header)
    if wrong:
        logger.warning("%s: %s; indexing it again", index.files[active].path, wrong)
        return None
    return mark.indexed_phy_offset, 0


def _is_new(index: Index) -> bool:
    """Whether the last file has the header that a new file gets from the one before it."""
    previous = index.files[-2] if len(index.files) > 1 else None
    phy_offset = max(0, previous.end_phy_offset) if previous else 0
    time = max(0, previous.end_timestamp) if previous else 0
    return index.files[-1].view.header().startswith(struct.pack(">4qi", time, time, phy_offset, phy_offset, 0))


def adopt_index(paths: StorePaths, log: CommitLog, index: Index, end: int, clean: bool,
                checkpoint: Checkpoint) -> tuple[int, int]:  # fmt: skip
    """Judge a broker's index files; returns (phy offset, keys of its record done) to dispatch from.

    After an unclean end only files flushed at roll-over are trusted, others are removed. A gap between files that
    hides keys (a file that a broker lost) or a damaged file sets those behind it aside. All are derived again.
    """
    keep = 0
    while keep < len(index.files):
        file = index.files[keep]
        if not clean and not (file.is_full and file.end_timestamp <= checkpoint.index_msg_timestamp):
            _remove_files(index, index.files[keep:])
            break
        if index.damaged and file.path > min(index.damaged):
            wrong = "follows a damaged file"
        elif not file.is_full and keep < len(index.files) - 1:
            wrong = "is not full, though files follow it"
        elif file.end_phy_offset >= end:
            wrong = "indexes records that are not in the log"
        elif file.index_count > 1 and hides_keys(log, index.files, keep, end):
            wrong = "keys of earlier records are missing before it"
        else:
            keep += 1
            continue
        checkpoint.withdraw()
        for lost in reversed(index.files[keep:]):
            lost.close()
            set_aside(paths, lost.path, f"{wrong}; derived again")
        index.files = index.files[:keep]
        break
    if index.damaged:
        checkpoint.withdraw()
        _set_damaged_aside(paths, index)
    if index.files and index.files[-1].index_count <= 1 and not _is_new(index):
        _remove_files(index, index.files[-1:])
        keep = min(keep, len(index.files))
    phy_offset, keys = index.end()
    return (phy_offset, keys) if phy_offset >= log.min_phy_offset else (log.min_phy_offset, 0)


# ---- whole stores ----------------------------------------------------------------------------------------------


@dataclass
class OpenedStore:
    """The parts of a store that recovery works on."""

    paths: StorePaths
    log: CommitLog
    queues: QueueSet
    index: Index
    table: QueueTable
    dispatcher: Dispatcher[ConsumeQueue]
    checkpoint: Checkpoint
    offsets: ConsumerOffsets


def _withdraw(store: OpenedStore) -> None:
    """Before queues or index are derived again: until all of it is on disk nothing vouches for them, also to a
    broker that comes next.
    """
    void_manifest(store.paths)
    store.checkpoint.withdraw()


def recover(store: OpenedStore, mark: Mark | None, manifest: Manifest | None, *, crashed: Crash | None,
            repair: bool) -> None:  # fmt: skip
    """Make log, queues and index agree, ready for puts. May be interrupted anywhere and run again.

    crashed: how it was left, None: it was closed.
    repair: read the whole log, cut at the first damage and derive queues and index again. Without it raises
    CorruptFileError when what had been durable is damaged, and changes nothing.
    """
    log, clean = store.log, crashed is None
    store.queues.bridges_gaps = mark is not None or repair
    store.queues.load()
    if not log.segments:
        if shown_end(store.paths) > 0 or (mark is not None and mark.durable_phy_offset > 0) or store.queues.extents():
            raise CorruptFileError(log.directories[0], 0, NO_LOG)
        _set_damaged_aside(store.paths, store.index)
        log.remove_unfilled()
        return
    if repair:
        refuse_light(log, store.queues, 0, mark.durable_phy_offset if mark and crashed is not Crash.OURS else None)
        _repair(store, mark, crashed)
        return
    gap = log.first_gap()
    if gap >= 0:
        raise log.damage(gap, SCAN_ZERO)
    if mark is None:
        refuse_light(log, store.queues)
        _recover_without_marks(store, crashed if was_closed(crashed) else Crash.BROKERS)
        return
    if mark.durable_phy_offset > log.max_phy_offset:
        raise log.damage(log.max_phy_offset, SCAN_ZERO)
    if not fits(log, mark):
        raise log.no_record(mark.last_phy_offset, "the record that rmq/marks names as the last one is not here")
    is_whole = not misses_last_segment(log, store.checkpoint, store.queues.end_phy_offset())
    if clean and is_whole and was_left_alone(log, mark):
        _recover_clean(store, mark, manifest)
    else:
        is_ours = crashed is Crash.OURS  # else a broker may have been here
        refuse_light(log, store.queues, log.max_phy_offset if is_ours else None,
                     None if is_ours else mark.durable_phy_offset)  # fmt: skip
        _recover_with_mark(store, mark, manifest, crashed)


def _last_timestamp(log: CommitLog) -> int:
    """Of the last record; 0 when there is none, or nobody knows it."""
    last = log.tail.last_phy_offset
    found = messages_at(log, np.array([last], np.int64), log.max_phy_offset) if last >= log.min_phy_offset else {}
    return found[last].store_timestamp if last in found else 0


def _recover_clean(store: OpenedStore, mark: Mark, manifest: Manifest | None) -> None:
    """Closed by us and left alone: nothing is read but names, lengths and the ends of files."""
    log, derived = store.log, mark.derived_phy_offset
    log.position, log.tail.last_phy_offset = mark.durable_phy_offset, mark.last_phy_offset
    lost: list[QueueKey] = []
    if store.queues.end_phy_offset() > log.position:  # a broker's, which cut its records off again after a crash
        lost = cut_queues(log, store.queues, derived, derived, derived)
        store.checkpoint.lower(_last_timestamp(log))
    begin = mark.indexed_phy_offset, 0
    if not index_is_whole(store.index, mark, manifest, is_closed=True):
        _withdraw(store)
        restored = restore_index(store.index, mark) if manifest is not None and not store.index.damaged else None
        if restored is not None and index_is_whole(store.index, mark, manifest, is_closed=True):
            _continue(store, derived, restored, manifest, lost)
            return
        begin = adopt_index(store.paths, log, store.index, log.position, True, store.checkpoint)
    _continue(store, derived if manifest is not None else log.min_phy_offset, begin, manifest, lost)


def _recover_with_mark(store: OpenedStore, mark: Mark, manifest: Manifest | None, crashed: Crash | None) -> None:
    """Records below the mark stand. Behind it: ours after a crash of ours, or a broker's that ran since.

    After a crash the mark's own segment is read again from its start, so that damage there is not built upon.
    """
    log, durable, clean = store.log, mark.durable_phy_offset, crashed is None
    segment = log.segment_at(max(durable - 1, log.min_phy_offset))
    begin = max(durable, log.min_phy_offset) if clean or segment is None else segment.start
    on_disk = on_disk_since(durable, crashed, store.checkpoint, last_epoch(store.paths.epochs))
    own_from = durable if crashed is Crash.OURS else None
    end = find_end(log, begin, log.max_phy_offset, own_from=own_from, on_disk=on_disk)
    if end.last_phy_offset < 0:
        end.last_phy_offset = mark.last_phy_offset
    end = look_behind(log, end, on_disk)
    queue_end = store.queues.end_phy_offset()
    end.is_damage = end.is_damage or (was_closed(crashed) and
                                      misses_last_segment(log, store.checkpoint, queue_end))  # fmt: skip
    cut_log(store.paths, log, end, False)
    log.tail.last_phy_offset = end.last_phy_offset
    if not clean:
        log.distrust(durable)
    if not clean or queue_end > log.position:
        store.checkpoint.lower(_last_timestamp(log))
    if not clean:
        store.checkpoint.withdraw()  # it may be newer than the mark that the index goes back to
    derived = mark.derived_phy_offset
    lost = cut_queues(log, store.queues, log.position if clean else derived, derived, derived, is_closed=clean)
    index_begin = None if clean or manifest is None else restore_index(store.index, mark)
    if index_begin is None or not index_is_whole(store.index, mark, manifest, is_closed=False):
        _withdraw(store)
        if not clean and manifest is None:  # files that were derived again may have lost pages since
            _remove_files(store.index, store.index.files)
        index_begin = adopt_index(store.paths, log, store.index, log.position, clean, store.checkpoint)
    _continue(store, derived if manifest is not None else log.min_phy_offset, index_begin, manifest, lost)


def _recover_without_marks(store: OpenedStore, crashed: Crash | None) -> None:
    """A broker's store, or one whose marks were lost."""
    log, queues, clean = store.log, store.queues, crashed is None
    queue_end = queues.end_phy_offset()
    start = start_without_marks(log, clean, store.checkpoint, queue_end)
    on_disk = on_disk_since(0, crashed, store.checkpoint, last_epoch(store.paths.epochs))
    end = look_behind(log, find_end(log, start, log.max_phy_offset, on_disk=on_disk), on_disk)
    end.is_damage = end.is_damage or (was_closed(crashed) and
                                      misses_last_segment(log, store.checkpoint, queue_end))  # fmt: skip
    cut_log(store.paths, log, end, False)
    log.tail.last_phy_offset = end.last_phy_offset
    lost = cut_queues(log, queues, log.position, derived=log.position if clean else start, is_closed=clean)
    if not clean or queue_end > log.position:
        store.checkpoint.lower(_last_timestamp(log))
    if not clean:
        log.distrust(start)
        for queue in queues.queues.values():
            queue.files.distrust()
            queues.touch(queue)
    queue_end = queues.end_phy_offset()
    begin = adopt_index(store.paths, log, store.index, log.position, clean, store.checkpoint)
    if clean and min(queue_end, begin[0]) < log.position:  # files are gone that the checkpoint vouches for
        _withdraw(store)
    _continue(store, queue_end if clean else min(start, log.position), begin, None, lost)


def _repair(store: OpenedStore, mark: Mark | None, crashed: Crash | None) -> None:
    """The log up to its first damage; everything else anew from it."""
    log, index = store.log, store.index
    _withdraw(store)
    durable = mark.durable_phy_offset if mark else 0
    on_disk = OnDisk(durable, time_on_disk(crashed, store.checkpoint))
    end = find_end(log, log.min_phy_offset, log.max_phy_offset, on_disk=on_disk)
    end = look_behind(log, end, OnDisk(durable, None))
    cut_log(store.paths, log, end, True)
    log.tail.last_phy_offset = end.last_phy_offset
    cut_queues(log, store.queues, log.position)
    _remove_files(index, index.files)
    _set_damaged_aside(store.paths, index)
    store.dispatcher.fills_gaps = True
    store.checkpoint.logics_msg_timestamp = store.checkpoint.index_msg_timestamp = 0  # as if nothing had been derived
    _continue(store, log.min_phy_offset, (log.min_phy_offset, 0))
    store.checkpoint.physic_msg_timestamp = store.dispatcher.last_unit_timestamp


def _continue(store: OpenedStore, queue_phy_offset: int, index_begin: tuple[int, int],
              manifest: Manifest | None = None, lost: Sequence[QueueKey] = ()) -> None:  # fmt: skip
    """Dispatch from where queues and index stand; from the start of the log when a queue misses units."""
    dispatcher, low = store.dispatcher, store.log.min_phy_offset
    lost = [*lost, *lost_queues(store.log, store.queues, manifest, queue_phy_offset)]
    if lost:
        _withdraw(store)
    dispatcher.queue_phy_offset = low if lost else max(queue_phy_offset, low)
    store.queues.end_at_gaps(is_derived_again=dispatcher.queue_phy_offset == low)
    dispatcher.fills_gaps = dispatcher.fills_gaps or bool(lost)
    dispatcher.index_phy_offset, dispatcher.index_key = index_begin if index_begin[0] >= low else (low, 0)
    try:
        dispatcher.advance(store.log.position)
    except QueueGapError as error:
        logger.warning("%s; deriving the queues from the whole log", error)
        _withdraw(store)
        dispatcher.fills_gaps = True
        dispatcher.queue_phy_offset = low
        dispatcher.advance(store.log.position)
    dispatcher.fills_gaps = False
    for queue in [queue for key, queue in store.queues.queues.items() if key in lost]:
        queue.cut(queue.max_offset)  # only now: what stood behind its end was the sign that it goes on
        store.queues.touch(queue)
    store.queues.correct_min_offsets(low)
    fill_table(store.queues, store.table)
    store.log.remove_unfilled()
