# SPDX-License-Identifier: Apache-2.0
"""Which units of the queues count at an open: what is cut off their ends, and which queues have lost units."""

from __future__ import annotations

import contextlib
import logging
from functools import partial

import numpy as np

from rmq._core._consumequeue import unpack_units
from rmq._core._layout import SYS_FLAG_INNER_BATCH, SYS_FLAG_PREPARED, UNIT_PRE_BLANK_SIZE, UNIT_SIZE
from rmq._core._queuetable import QueueTable
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._storedfields import rows_with, stored_at
from rmq.commitlog import CommitLog
from rmq.consumequeue import ConsumeQueue
from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.marks import Manifest, read_manifest
from rmq.message import MULTI_DISPATCH, StoredMessage, dispatched_to
from rmq.paths import StorePaths
from rmq.query import messages_at
from rmq.queueset import QueueSet
from rmq.storeroot import READS_IT

logger = logging.getLogger("rmq")

QueueKey = tuple[str, int]  # topic, queue id
LOOK_BEHIND = 1024 * UNIT_SIZE  # bytes of a file: more than any page that reads as zeros
LOOKED_AT = 4  # units at the end: a crash may leave some without a record
SEARCHED = 4 * 1024 * 1024  # bytes of records at a time
TOLD = 8  # queues, one by one: a store may have thousands
TRIED = 64  # units: the first may be halves, cut by the end of a lost sector


def _stands(log: CommitLog, queue: ConsumeQueue, trusted: int, queue_offset: int, phy_offset: int, size: int) -> bool:
    """Whether a unit is its queue's: its record is, or was below `trusted` and has been damaged since.

    One below `trusted` that points between records, or to another's, never was a record's: half of it was lost.
    """
    if phy_offset < log.min_phy_offset:
        return True
    message = messages_at(log, np.array([phy_offset], np.int64), log.max_phy_offset).get(phy_offset)
    if message is not None and message.size == size:
        if not _is_of(queue, message):
            return phy_offset + size <= trusted and (not queue.is_exact or message.queue_offset == queue_offset)
        # A broker's queue may lack units before this one. One of a record that it cut off may come to point to a later
        # record of the queue, which has its unit before it. A light queue's record tells the offset in its own queue.
        is_ahead = message.queue_offset > queue_offset or queue.is_light
        return message.queue_offset == queue_offset or (is_ahead and (queue.is_light or not queue.is_exact))
    if message is not None or phy_offset + size > trusted:
        return False
    try:
        return log.align(phy_offset, trusted) == phy_offset
    except CorruptFileError:
        return True


def _is_of(queue: ConsumeQueue, message: StoredMessage) -> bool:
    """Whether a message is a queue's; that of a light queue says so in its properties."""
    if (message.topic, message.queue_id) == (queue.topic, queue.queue_id):
        return True
    queue.is_light = queue.is_light or queue.topic in dispatched_to(message.properties)
    return queue.is_light and queue.topic in message.properties.get(MULTI_DISPATCH, "").split(",")


def refuse_light(log: CommitLog, queues: QueueSet, begin: int | None = None, own_end: int | None = None) -> None:
    """UnsupportedFormatError when some queue begins or ends with messages of another topic, by whatever name, or when a
    record from `begin` on (None: behind all units), which is to get its units, has one in a queue not made here.
    own_end: of a store of ours up to where its messages are ours, None: all.
    """
    if not queues.is_exact:
        _refuse_others_units(log, queues.end_phy_offset() if begin is None else begin)
    elif own_end is not None:  # a broker may have put what lies behind
        _refuse_others_units(log, own_end)
    for queue in queues.queues.values():
        last = max(queue.min_offset, queue.max_offset - LOOKED_AT)
        places = np.concatenate([queue.read(at, count)[0] for at, count in ((queue.min_offset, 1), (last, LOOKED_AT))])
        for message in messages_at(log, places[places >= 0], log.max_phy_offset).values():
            if message.topic != queue.topic and _is_of(queue, message):
                raise UnsupportedFormatError(queue.directory, "light queue, of messages of other topics", READS_IT)


def _refuse_others_units(log: CommitLog, begin: int) -> None:
    begin = max(log.min_phy_offset, begin)
    for batch in log.scan(begin, log.max_phy_offset, checks=PARSE_PROPERTIES, byte_limit=SEARCHED):
        segment = log.segment_at(batch.phy_offset(0))
        assert segment is not None
        if (batch.numbers("sys_flag") & SYS_FLAG_INNER_BATCH).any():
            raise UnsupportedFormatError(segment.path, "inner batches, whose queues (BatchCQ) are gone", READS_IT)
        for row in rows_with(batch, MULTI_DISPATCH.encode()):
            message = stored_at(batch, row, StoredMessage)
            if dispatched_to(message.properties).keys() - {message.topic}:
                raise UnsupportedFormatError(segment.path, "messages of light queues, which are gone", READS_IT)


def cut_queues(log: CommitLog, queues: QueueSet, limit: int, trusted: int = 0, derived: int = 0, *,
               is_closed: bool = False, level: int = logging.WARNING) -> list[QueueKey]:  # fmt: skip
    """Drop units of records that end past `limit`, and those at a queue's end that point to no record of it.

    Units of records below `trusted` or below the log's begin stand, whatever has become of the records. Returns the
    queues that lost units of records below `derived`: what follows these stays, as the sign, until all came again.
    is_closed: every record below `limit` has its unit; one whose unit would be dropped is damage. level: of the log
    for what is dropped.
    """
    lost, cut = [], 0
    for key, queue in list(queues.queues.items()):
        before = queue.max_offset

        def goes_on(queue: ConsumeQueue = queue, before: int = before) -> bool:
            if _goes_on(log, queues, queue, derived):
                return True
            if is_closed and queue.max_offset < before:
                _check_whole(log, queue, limit)
            return False

        try:
            is_lost = queue.cut_where(max(limit, log.min_phy_offset), partial(_stands, log, queue, trusted), goes_on)
        except CorruptFileError as error:
            queues.refuse(key, error)
            continue
        if is_lost:
            logger.warning("%s: unit %d is lost; deriving the queues from the whole log", queue.directory,
                           queue.max_offset)  # fmt: skip
            lost.append(key)
            continue
        queues.touch(queue)  # behind its end there may have been others' units, which are zeros now
        if queue.max_offset != before:
            cut += 1
            logger.log(level if cut <= TOLD else logging.DEBUG,
                       "%s: units %d to %d are behind the mark or have no record; dispatched again from the log",
                       queue.directory, queue.max_offset, before - 1)  # fmt: skip
    if cut > TOLD:
        logger.log(level, "%s: so are units of %d more queues", queues.directory, cut - TOLD)
    return lost


def _goes_on(log: CommitLog, queues: QueueSet, queue: ConsumeQueue, derived: int) -> bool:
    """Whether shortly behind a queue's end stand units of records below `derived`, of which none lacks its unit.

    What a crash left there points to records behind `derived`, or to none.
    """
    if derived <= log.min_phy_offset:
        return False
    try:
        data = queues.cache.read(*queue.place_of(queue.max_offset), LOOK_BEHIND)
    except FileNotFoundError:
        return False
    if not data:  # a mark tells without it what there must be, and power loss may leave it behind the mark
        return not queues.bridges_gaps
    phy_offset, size, _ = unpack_units(data)
    is_below = (phy_offset >= log.min_phy_offset) & (size > 0) & (phy_offset <= derived - size.astype(np.int64))
    offsets, sizes = phy_offset[is_below][:TRIED], size[is_below][:TRIED]
    found = messages_at(log, offsets, derived)
    return any(offset in found and found[offset].size == size for offset, size in zip(offsets, sizes, strict=True))


def _check_whole(log: CommitLog, queue: ConsumeQueue, end: int) -> None:
    """CorruptFileError when behind the record of a queue's last unit the log has more messages of it.

    Cost: headers of all records from there to `end`.
    """
    table = QueueTable()
    number = table.add(queue.topic.encode(), queue.queue_id)
    for batch in log.scan(max(queue.end_phy_offset(), log.min_phy_offset), end, queues=table):
        has_unit = batch.numbers("sys_flag") & SYS_FLAG_PREPARED == 0  # nor has ROLLBACK, which has this bit too
        if (has_unit & (batch.numbers("queue") == number)).any():
            path, position = queue.place_of(queue.max_offset)
            raise CorruptFileError(path, position, "unit points to no message of its queue, of which the log has more")


def lost_queues(log: CommitLog, queues: QueueSet, manifest: Manifest | None, durable: int,
                beside: StorePaths | None = None) -> list[QueueKey]:  # fmt: skip
    """Queues that have fewer units than the manifest knows of, or others at their ends: files are gone or wrong.

    durable: the log was whole up to there; a unit that points to what is lost below it is no fault of the queue.
    beside: of readers beside a writer, whose cleaning takes a queue off the manifest before its files.
    """
    if manifest is None:
        return []
    extents = queues.extents()
    lost = []
    for key, (first, following) in manifest.queues.items():
        if key in queues.damage:
            continue  # told by itself
        own_first, own_following = extents.get(key, (following + 1, 0))
        # Cleaning removes files in front, but only with the log.
        is_short = own_following < following or (own_first > first and log.min_phy_offset <= manifest.min_phy_offset)
        ends = ((own_first, own_first + 1), (own_following - 1, own_following - 2))
        if is_short or not all(_end_holds(log, queues.queues[key], *end, durable) for end in ends):
            lost.append(key)
    if lost and beside is not None and (now := read_manifest(beside)) is not None:
        lost = [key for key in lost if key in now.queues]
    if lost:
        logger.warning("%d of %d queues have lost units, such as %s/%d; deriving the queues from the whole log",
                       len(lost), len(manifest.queues), *lost[0])  # fmt: skip
    return lost


def _end_holds(log: CommitLog, queue: ConsumeQueue, queue_offset: int, beside: int, durable: int) -> bool:
    """_unit_holds; a record that names another queue may be damaged itself: the unit beside it decides."""
    held = _unit_holds(log, queue, queue_offset, durable)
    if held is None:
        held = queue.first_offset <= beside < queue.max_offset and _unit_holds(log, queue, beside, durable) is True
    return held


def _unit_holds(log: CommitLog, queue: ConsumeQueue, queue_offset: int, durable: int) -> bool | None:
    """Whether a unit points to its message, or to what is no longer in the log. None: to a record of
    its size that names another queue or queue offset.
    """
    phy_offset, size, _ = queue.read(queue_offset, 1)
    if not len(size):
        return bool(queue.files.first(1))  # a listed file was cleaned away since, beside a reader; or none is left
    if size[0] == UNIT_PRE_BLANK_SIZE:
        return True
    if 0 <= phy_offset[0] < log.min_phy_offset:  # nothing but its place tells
        before = queue.read(queue_offset - 1, 1)[0]
        return not len(before) or bool(before[0] < phy_offset[0])
    message = None
    with contextlib.suppress(CorruptFileError):  # a segment that is cut short: damage that whoever reads it is told of
        message = messages_at(log, phy_offset, log.max_phy_offset).get(int(phy_offset[0]))
    if message is None:
        return bool(phy_offset[0] >= 0 and size[0] > 0) and int(phy_offset[0]) + int(size[0]) <= durable
    if message.size != size[0]:
        return False
    is_own = (message.topic, message.queue_id) == (queue.topic, queue.queue_id)
    is_placed = message.queue_offset == queue_offset or not queue.is_exact
    return True if is_own and is_placed else None
