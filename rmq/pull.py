# SPDX-License-Identifier: Apache-2.0
"""Queues to messages: pages by queue offset with tag filters, and search by store timestamp.

Source: RocketMQ DefaultMessageStore#getMessage, ConsumeQueue#getOffsetInQueueByTime.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import java_hash
from rmq._core._layout import UNIT_PRE_BLANK_SIZE, UNIT_TAGS_HASH_MIN
from rmq.batchconsumequeue import BatchConsumeQueue
from rmq.commitlog import CommitLog
from rmq.consumequeue import ConsumeQueue
from rmq.errors import CorruptFileError
from rmq.message import PullResult, PullStatus, StoredMessage, dispatched_to, inner_messages
from rmq.query import messages_at, own_messages
from rmq.topics import SCHEDULE_TOPIC

PulledUnits = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]  # queue and phy offsets, sizes

PULL_CHUNK = 1024
PULL_BYTES = 1024 * 1024  # of messages whose tags are looked at together where most have others than their units say
NEAR = 256 * 1024  # bytes of the log that are walked rather than searched for in queues
QUEUES_ASKED = 64
LOOKS = 32  # an end where times do nothing but fall
_JAVA_TRIMS = "".join(map(chr, range(0x21)))  # String#trim; Python's strip() takes U+00A0 and U+3000, too
STEP_BACK = 32  # messages of a queue among which the clock may have gone back and come up again


def tag_set(tags: str | None) -> set[str] | None:
    """Tags of a subscription such as "A || B"; None: every message. Source: FilterAPI#buildSubscriptionData."""
    if tags is None:
        return None
    if not isinstance(tags, str):
        raise TypeError(f"tags must be str, got {type(tags).__name__}")
    wanted = {tag.strip(_JAVA_TRIMS) for tag in tags.split("||")} - {""}
    return None if not wanted or tags.strip(_JAVA_TRIMS) == "*" else wanted


def pull_from(log: CommitLog, queue: ConsumeQueue | BatchConsumeQueue | None, tell_end: Callable[[], int], place: int,
              limit: int, wanted: set[str] | None) -> PullResult:  # fmt: skip
    """Store.pull of a queue. tell_end: where the log ends, asked behind the queue's bounds: puts go on."""
    if queue is None or queue.max_offset == 0:
        return PullResult(PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    low, high = queue.min_offset, queue.max_offset
    if place < low:
        return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high)
    if place == high:
        return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, place, low, high)
    if place > high:
        return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    if isinstance(queue, BatchConsumeQueue):
        return pull_batches(log, queue, tell_end(), place, limit, wanted)
    return pull_units(log, queue, (low, high), tell_end(), place, limit, wanted)


def pull_units(log: CommitLog, queue: ConsumeQueue, bounds: tuple[int, int], log_end: int, queue_offset: int,
               limit: int, wanted: set[str] | None) -> PullResult:  # fmt: skip
    """Up to `limit` messages from a queue offset in the queue's bounds. log_end: not older than the bounds. A
    CorruptFileError has a note of its message's queue offset.
    """
    low, high = bounds
    hashes = None if wanted is None else {java_hash(tag) for tag in wanted}
    of = None if queue.is_light else queue.topic.encode(errors="replace"), queue.queue_id
    is_exact = queue.is_exact and not queue.is_light
    messages: list[StoredMessage] = []
    removed = has_strangers = is_one_by_one = False
    at = queue_offset
    chunk = min(PULL_CHUNK, limit if wanted is None else 4 * limit)
    while at < high and len(messages) < limit:
        files_end = queue.files_end
        offsets, sizes, tags_codes = queue.read(at, min(chunk, high - at))
        chunk = PULL_CHUNK
        if not len(offsets):
            break
        numbers, room = np.arange(at, at + len(offsets)), 1 if is_one_by_one else limit - len(messages)
        chosen: slice | npt.NDArray[np.int64] = slice(None)
        if hashes is not None:
            # Of the newest unit in the files a broker beside us may not have written the tags code yet.
            newest = [end - 1 - at for end in (files_end, queue.files_end) if 0 < end - at <= len(offsets)]
            chosen = np.arange(len(offsets)) if queue.topic == SCHEDULE_TOPIC else _of_tags(tags_codes, hashes, newest)
            if has_strangers and not is_one_by_one:
                ends = np.cumsum(np.clip(sizes[chosen], 1, None).astype(np.int64))
                room = max(room, int(np.searchsorted(ends, PULL_BYTES)))
        units = _first_of(room, chosen, (numbers, offsets, sizes))
        page: Sequence[StoredMessage | None] | None = None
        try:
            if not len(units[0]) or units[2][0] != UNIT_PRE_BLANK_SIZE:  # they stand in front of others
                page = own_messages(log, of, *units, log_end, is_exact=is_exact)
            if page is None:
                gone = _gone(log, offsets, sizes)
                removed = removed or bool(gone.any())
                units = _first_of(room, np.arange(len(gone))[chosen][~gone[chosen]], (numbers, offsets, sizes))
                page = list(_looked_at(log, queue, *units, log_end))
        except CorruptFileError as error:
            if len(units[0]) > 1:
                is_one_by_one = True  # which of them it is
                continue
            error.add_note(f"{queue.topic} queue {queue.queue_id}, queue offset {units[0][0]}")
            raise
        following = at + len(offsets) if len(units[0]) < room else int(units[0][-1]) + 1
        for number, message in zip(units[0].tolist(), page, strict=True):
            if message is None:
                messages.clear()  # cleaned away since the units were read, as all before it: look again
                following = at
                break
            if wanted is None or (message.tags or "") in wanted:
                messages.append(message)
                if len(messages) == limit:
                    following = number + 1
                    break
            else:
                has_strangers = True
        removed = removed or (not messages and bool(_gone(log, offsets, sizes).any()))
        at = following
    if messages:
        status = PullStatus.FOUND
    elif at == queue_offset:
        status, at = PullStatus.OFFSET_FOUND_NULL, min(queue.behind_lost_file(at), high)
    else:
        status = PullStatus.MESSAGE_WAS_REMOVING if removed else PullStatus.NO_MATCHED_MESSAGE
    return PullResult(status, at, low, high, messages)


def _of_tags(tags_codes: npt.NDArray[np.int64], hashes: set[int], newest: list[int]) -> npt.NDArray[np.int64]:
    """Rows of units whose messages may have tags of these hashes, or one of the rows `newest`. A unit of an extended
    queue holds an address there; only the message tells its tags.
    """
    codes = tags_codes.astype(np.int32)
    passes = np.logical_or.reduce([tags_codes < UNIT_TAGS_HASH_MIN, *(codes == code for code in hashes)])
    passes[newest] = True
    return np.flatnonzero(passes)


def _gone(log: CommitLog, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Units of removed messages. One of zeros is none of these, but a lost one."""
    is_below = (offsets >= 0) & (offsets < log.min_phy_offset) & (sizes > 0)
    gone: npt.NDArray[np.bool_] = is_below | (sizes == UNIT_PRE_BLANK_SIZE)
    return gone


def _first_of(room: int, chosen: slice | npt.NDArray[np.int64], units: PulledUnits) -> PulledUnits:
    numbers, offsets, sizes = units
    return numbers[chosen][:room], offsets[chosen][:room], sizes[chosen][:room]


def _looked_at(log: CommitLog, queue: ConsumeQueue, queue_offsets: npt.NDArray[np.int64],
               phy_offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32],
               log_end: int) -> Iterator[StoredMessage | None]:  # fmt: skip
    """own_messages, one by one: CorruptFileError at a unit of no message of the queue, None for one cleaned away."""
    found = messages_at(log, phy_offsets, log_end, check_crc=True)
    for number, phy_offset, size in zip(queue_offsets.tolist(), phy_offsets.tolist(), sizes.tolist(), strict=True):
        if phy_offset not in found and 0 <= phy_offset < log.min_phy_offset and size > 0:
            yield None
            return
        yield _own_message(log, queue, number, (phy_offset, size), found.get(phy_offset), log_end)


def record_before(log: CommitLog, queues: Iterable[ConsumeQueue], phy_offset: int, log_end: int,
                  near: int | None = None) -> int:  # fmt: skip
    """Start of a record at or before a phy offset, in its segment: the nearest that units tell, or the segment's first.

    near: within so many bytes (None: NEAR) the log is walked, no unit asked. A unit counts when the record that it
    points to is its own: no body can pass for one. Cost: a binary search in each of the longest queues.
    """
    start = phy_offset - phy_offset % log.segment_size
    near = NEAR if near is None else near
    if phy_offset - start < near:
        return start
    found: list[tuple[int, int, ConsumeQueue]] = []
    for queue in heapq.nlargest(QUEUES_ASKED, queues, lambda queue: queue.max_offset - queue.min_offset):
        try:
            unit = _unit_before(queue, phy_offset)
        except (CorruptFileError, OSError):
            continue  # the walk from the segment's start needs no queue
        if unit is not None and start < unit[0] <= phy_offset:
            found.append((*unit, queue))
            if phy_offset - unit[0] < near:
                break
    for place, size, queue in sorted(found, key=lambda item: item[:2], reverse=True):
        message = messages_at(log, np.array([place], np.int64), log_end).get(place)
        own = queue.topic, queue.queue_id, size
        if message is not None and (message.topic, message.queue_id, message.size) == own:
            return place
    return start


def _unit_before(queue: ConsumeQueue, phy_offset: int) -> tuple[int, int] | None:
    """Phy offset and size of the last unit at or before a phy offset."""
    def place(offset: int) -> int:
        places, _, _ = queue.read(offset, 1)
        return int(places[0]) if len(places) else -1  # cleaned away meanwhile

    units = range(queue.min_offset, queue.max_offset)
    number = bisect.bisect_right(units, phy_offset, key=place) - 1
    places, sizes, _ = queue.read(units[number], 1) if number >= 0 else queue.read(0, 0)
    return (int(places[0]), int(sizes[0])) if len(places) else None


def _own_message(log: CommitLog, queue: ConsumeQueue, queue_offset: int, place: tuple[int, int],
                 message: StoredMessage | None, log_end: int) -> StoredMessage:  # fmt: skip
    """The message that a unit (phy offset, size) points to; CorruptFileError when it is none of this queue's."""
    phy_offset, size = place
    if message is None and size > 0 and log.min_phy_offset <= phy_offset < log_end:
        raise log.no_record(phy_offset, f"{queue.directory} points here, where no whole record lies")
    if message is not None and message.size == size:
        is_own = message.topic == queue.topic and message.queue_id == queue.queue_id and (
            message.queue_offset == queue_offset or not queue.is_exact)  # fmt: skip
        if is_own or queue.is_light or queue.topic in dispatched_to(message.properties):
            return message
    path, position = queue.place_of(queue_offset)
    raise CorruptFileError(path, position, "unit points to no message of this queue")


def pull_batches(log: CommitLog, queue: BatchConsumeQueue, log_end: int, queue_offset: int, limit: int,
                 wanted: set[str] | None) -> PullResult:  # fmt: skip
    """pull_units for a queue of inner batches."""
    messages: list[StoredMessage] = []
    at = queue_offset
    while len(messages) < limit and (number := queue.unit_of(at)) is not None:
        base, count = map(int, queue.units[number][4:])
        at = max(at, base)
        try:
            items = _batch(log, queue, number, log_end)
        except CorruptFileError as error:
            error.add_note(f"{queue.topic} queue {queue.queue_id}, queue offset {at}")
            raise
        for message in items:
            if message.queue_offset < at or len(messages) == limit:
                continue
            at = message.queue_offset + 1
            if wanted is None or (message.tags or "") in wanted:
                messages.append(message)
        if len(messages) < limit:
            at = max(at, base + count)
    status = PullStatus.FOUND if messages else PullStatus.NO_MATCHED_MESSAGE
    return PullResult(status, at, queue.min_offset, queue.max_offset, messages)


def _batch(log: CommitLog, queue: BatchConsumeQueue, number: int, log_end: int) -> list[StoredMessage]:
    """The messages of a unit; none when they were cleaned away. Raises CorruptFileError."""
    phy_offset, size = map(int, queue.units[number][:2])
    wrapper = messages_at(log, np.array([phy_offset], np.int64), log_end, check_crc=True).get(phy_offset)
    if wrapper is None and log.min_phy_offset <= phy_offset < log_end:
        raise log.no_record(phy_offset, f"{queue.directory} points here, where no whole record lies")
    if wrapper is None:
        return []
    if (wrapper.topic, wrapper.queue_id, wrapper.size) != (queue.topic, queue.queue_id, size):
        raise CorruptFileError(*queue.place_of(number), "unit points to no message of this queue")
    base, count = map(int, queue.units[number][4:])
    items = inner_messages(wrapper) or [wrapper]
    if items[0].queue_offset != base or (len(items) != count and items[0] is not wrapper):
        raise CorruptFileError(*queue.place_of(number), "unit points to other messages of this queue")
    return items


def search_from(log: CommitLog, queue: ConsumeQueue | BatchConsumeQueue | None, tell_end: Callable[[], int], time: int,
                boundary: str, *, skips_damage: bool) -> int:  # fmt: skip
    """Store.search_offset of a queue. tell_end: as of pull_from."""
    if queue is None or queue.max_offset == 0:
        return 0
    if isinstance(queue, BatchConsumeQueue):
        return search_batches(queue, time, boundary)
    bounds = queue.min_offset, queue.max_offset
    return search_units(log, queue, bounds, tell_end(), time, boundary, skips_damage=skips_damage)


def search_units(log: CommitLog, queue: ConsumeQueue, bounds: tuple[int, int], log_end: int, time: int, boundary: str,
                 *, skips_damage: bool) -> int:  # fmt: skip
    """LOWER: first queue offset stored at or after `time`; UPPER: last at or before it.

    Binary search, then a look at STEP_BACK units beyond: the clock may have gone back. skips_damage: of messages that
    cannot be read, those behind them tell.
    """

    def store_timestamp(queue_offset: int) -> int:
        offsets, sizes, _ = queue.read(queue_offset, 1)
        stored = messages_at(log, offsets, log_end)
        if not len(offsets) or (not stored and 0 <= offsets[0] < log.min_phy_offset):
            return -(2**63)  # cleaned away meanwhile: what is left lies behind it
        place = int(offsets[0]), int(sizes[0])
        return _own_message(log, queue, queue_offset, place, stored.get(place[0]), log_end).store_timestamp

    def readable(begin: int, end: int) -> tuple[int, int | None]:
        """A queue offset in [begin, end) and its time, by growing steps; begin and None when none was readable."""
        for step in (0, *(1 << power for power in range((end - begin).bit_length()))):
            try:
                if begin + step < end:
                    return begin + step, store_timestamp(begin + step)
            except CorruptFileError:
                if not skips_damage:
                    raise
        return begin, None

    first, end = bounds
    low, high = first, end
    while low < high:
        place, found = readable((low + high) // 2, high)
        if found is not None and (found < time or (boundary == "UPPER" and found == time)):
            low = place + 1
        else:
            high = place
    is_lower = boundary == "LOWER"
    if skips_damage:  # what lay between two readable ones may have counted as later than it is
        low = _first_after(log, queue, (low, end), log_end, time if is_lower else time + 1)
    for _ in range(LOOKS):
        part = (max(first, low - STEP_BACK - 1), low) if is_lower else (low, min(end, low + STEP_BACK + 1))
        passing = [offset for offset, found in _times(log, queue, *part, log_end, skips_damage)
                   if (found >= time if is_lower else found <= time)]  # fmt: skip
        if not passing:
            break
        low = passing[0] if is_lower else passing[-1] + 1
    return low if is_lower else max(low - 1, first)


def _first_after(log: CommitLog, queue: ConsumeQueue, part: tuple[int, int], log_end: int, time: int) -> int:
    """First queue offset in [begin, end) whose message can be read and was stored at or after `time`; the end."""
    begin, end = part
    for first in range(begin, end, PULL_CHUNK):
        for offset, found in _times(log, queue, first, min(first + PULL_CHUNK, end), log_end, True):
            if found >= time:
                return offset
    return end


def _times(log: CommitLog, queue: ConsumeQueue, begin: int, end: int, log_end: int,
           any_size: bool) -> list[tuple[int, int]]:  # fmt: skip
    """Queue offset and store timestamp of those in [begin, end) that can be read. any_size: as CommitLog.load."""
    places, _, _ = queue.read(begin, end - begin)
    order = np.argsort(places, kind="stable")
    found = [(begin + int(order[position]), int(time))
             for batch, positions in log.load(places[order], log_end, any_size=any_size)
             for position, time in zip(positions, batch.numbers("store_timestamp"), strict=True)]  # fmt: skip
    return sorted(found)


def search_batches(queue: BatchConsumeQueue, time: int, boundary: str) -> int:
    """search_units by the store timestamps in the units of a queue of inner batches: exact in any order."""
    units = queue.units[queue.units[:, 4] >= queue.min_offset]  # others are those of segments that are gone
    times, bases, counts = units[:, 3], units[:, 4], units[:, 5]
    passing = np.flatnonzero(times >= time if boundary == "LOWER" else times <= time)
    if boundary == "LOWER":
        return int(bases[passing[0]]) if len(passing) else queue.max_offset
    return int(bases[passing[-1]] + counts[passing[-1]]) - 1 if len(passing) else queue.min_offset
