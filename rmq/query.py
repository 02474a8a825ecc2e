# SPDX-License-Identifier: Apache-2.0
"""Exact queries by key: index files for the candidates, the log for the truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys
from rmq._core._layout import SYS_FLAG_COMPRESSED, SYS_FLAG_INNER_BATCH
from rmq._core._record import PARSE_PROPERTIES, SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC, SCAN_ZERO
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import are_of_queue, has_compressed, stored
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError
from rmq.logscan import CHECK_CRC
from rmq.message import SOME_SEGMENT, StoredMessage, carrying, inner_messages

if TYPE_CHECKING:
    import pyarrow as pa

Times = int | npt.NDArray[np.int64]  # ms
Item = tuple[bytes | None, bytes]  # topic (None: any) and key, as in the record
FIRST_ROUND = 64  # candidates per key that are looked at before anything is known about the key
CANDIDATES_AT_A_TIME = 2**20
ALL = 2**62
CRC_STOPS = (SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC)


class Wanted:
    """Which rows of scanned batches are asked for: of topics (None: any), stored in [begin, end], and, with keys, those
    that an index would find by one of them.
    """

    def __init__(self, topics: Sequence[bytes] | None, begin: int, end: int, keys: Sequence[str] | None) -> None:
        self._bounds = topics, begin, end
        self.keys = None if keys is None else frozenset(keys)
        self._items: set[Item] = {(None, key.encode()) for key in keys or ()}
        self._hashes = np.sort(hash_str_keys(list(keys or ())))
        self.is_all = topics is None and keys is None and end - begin == 2**64 - 1
        self.checks = 0 if keys is None else PARSE_PROPERTIES

    def keep(self, batch: RecordBatch) -> None:
        """Keep those rows, of a batch that was scanned with `checks`."""
        batch.keep(*self._bounds)
        if self.keys is not None:
            mask = np.zeros(len(batch), np.uint8)
            mask[[row for row, _ in batch.find_keys(self._items, self._hashes)]] = 1
            batch.keep(mask=mask)


class QueryResult(list[StoredMessage]):
    """Messages that carry a key, newest first.

    complete: every part of the log that the query is about was covered by an index file or scanned.
    truncated: more messages match than the limit let through. scanned_size: bytes of the log that no index file covers
    and that were scanned.
    """

    def __init__(self, messages: Sequence[StoredMessage], complete: bool, truncated: bool, scanned_size: int) -> None:
        super().__init__(messages)
        self.complete = complete
        self.truncated = truncated
        self.scanned_size = scanned_size


@dataclass(frozen=True, eq=False)
class QueryManyResult:
    """table: key_index and message columns, by key_index, newest first within a key. complete: as of QueryResult.

    truncated: more messages of some key match than the limit let through; truncated_keys: the key_index of each such.
    """

    table: pa.Table
    complete: bool
    truncated: bool
    truncated_keys: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """Matches ordered by key number, in it by descending phy offset; truncated: per key, if more match.

    is_sound: each is one message whose CRCs were looked at; False: not known.
    """

    numbers: npt.NDArray[np.int64]
    phy_offsets: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    is_sound: bool = False


def find(log: CommitLog, topic: bytes, keys: list[str], groups: npt.NDArray[np.int64],
         candidates: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], uncovered: list[tuple[int, int]],
         log_end: int, *, begin: Times, end: Times, limit: int | None, is_all: bool = False) -> Found:  # fmt: skip
    """The records that truly carry each key. is_all: nobody loads them again, so their CRCs are looked at here.

    groups: number of each key's hash among the distinct ones. candidates: (numbers of hashes, phy offsets) from the
    index, in any order, repeats allowed. uncovered: ranges of the log to scan. begin, end: inclusive, ms, on the
    record's store timestamp; of all keys or of each.
    """
    items = [(topic, key.encode()) for key in keys] if uncovered else []
    begins, ends = (np.broadcast_to(np.asarray(time, np.int64), len(keys)) for time in (begin, end))
    found = [_scan_uncovered(log, items, uncovered, begins, ends)]
    enough = ALL if limit is None else limit + 1
    numbers, places = _in_order(*candidates)
    totals = np.bincount(numbers, minlength=int(groups.max(initial=-1)) + 1)
    firsts, totals = (np.cumsum(totals) - totals)[groups], totals[groups]
    counts = np.zeros(len(keys), np.int64)
    is_sound, lost = is_all and not len(found[0][0]), list[tuple[int, int]]()
    low, high = 0, max(FIRST_ROUND, min(enough, 8192))
    while (asked := np.flatnonzero((totals > low) & (counts < enough))).size:
        for part in _portions(asked, np.minimum(totals[asked], high) - low):
            sizes = np.minimum(totals[part], high) - low
            numbers = np.repeat(part, sizes)
            offsets = places[np.repeat(firsts[part] + low, sizes) + rank_in(numbers, sizes)]
            matched = _matches(log, topic, keys, numbers, offsets, log_end, begins, ends, is_sound)
            if matched is None:
                is_sound = False
                matched = _matches(log, topic, keys, numbers, offsets, log_end, begins, ends, False)
                assert matched is not None
            mask, is_there = matched
            is_lost = ~is_there & (offsets >= log.min_phy_offset)  # else cleaned away
            lost += zip(numbers[is_lost].tolist(), offsets[is_lost].tolist(), strict=True)
            found.append((numbers[mask], offsets[mask]))
            counts += np.bincount(numbers[mask], minlength=len(keys))
        low, high = high, high * 4
    numbers, offsets = _in_order(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    for number, phy_offset in lost:
        first, last = np.searchsorted(numbers, [number, number + 1])
        if np.count_nonzero(offsets[first:last] > phy_offset) < enough:  # else older than all that are wanted
            _check_lost(log, phy_offset, log_end)
    totals = np.bincount(numbers, minlength=len(keys))
    if limit is None:
        return Found(numbers, offsets, np.zeros(len(keys), np.bool_), is_sound)
    kept = rank_in(numbers, totals) < limit
    return Found(numbers[kept], offsets[kept], totals > limit, is_sound)


def _portions(numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Parts of an array, one behind the other, each of so many candidates that memory has room for them."""
    ends = np.cumsum(sizes) // CANDIDATES_AT_A_TIME
    return np.split(numbers, np.flatnonzero(ends[1:] > ends[:-1]) + 1)


def _in_order(numbers: npt.NDArray[np.int64],
              offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
    """Pairs by number, in it by descending phy offset, without repeats."""
    order = np.argsort(numbers, kind="stable")  # of sorted runs, such as index files give: it merges them
    numbers, offsets = numbers[order], offsets[order]
    is_next = numbers[1:] > numbers[:-1]
    if not (is_next | (offsets[1:] < offsets[:-1])).all():
        order = np.lexsort((-offsets, numbers))
        numbers, offsets = numbers[order], offsets[order]
        fresh = np.r_[True, is_next | (offsets[1:] != offsets[:-1])]
        numbers, offsets = numbers[fresh], offsets[fresh]
    return numbers, offsets


def rank_in(numbers: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of pairs by number: how many of the same number come before each. totals: pairs of each number."""
    return np.arange(len(numbers)) - np.repeat(np.cumsum(totals) - totals, totals)


def carriers(log: CommitLog, item: Item, candidates: Iterable[int], uncovered: list[tuple[int, int]], log_end: int, *,
             limit: int | None, begin: int = -(2**63),
             end: int = 2**63 - 1) -> Iterator[StoredMessage | None]:  # fmt: skip
    """find for one item: the messages, newest first, wrappers of inner batches as they are; None at the end: more match
    than the limit lets through.

    One record after the other, as they are asked for: for few candidates, as a key has. CorruptFileError for a match
    that is whole but for a CRC.
    """
    times = np.array([begin], np.int64), np.array([end], np.int64)
    places = {*candidates, *(_scan_uncovered(log, [item], uncovered, *times)[1].tolist() if uncovered else ())}
    topic, key = item
    count, batch = 0, RecordBatch(1)
    for phy_offset in sorted(places, reverse=True):
        segment = log.segment_at(phy_offset)
        stop = SCAN_ZERO
        batch.release()
        if segment is not None and phy_offset < log_end:
            stop = segment.scan(batch, phy_offset, min(segment.end, log_end), checks=CHECK_CRC | PARSE_PROPERTIES)
            if stop in CRC_STOPS:  # of no account in a message that does not carry the key
                segment.scan(batch, phy_offset, min(segment.end, log_end), checks=PARSE_PROPERTIES)
        if not batch.count:
            _check_lost(log, phy_offset, log_end)
        elif batch.carries(0, topic, key, begin, end):
            if count == limit:
                yield None
                return
            if stop in CRC_STOPS:
                raise log.damage(phy_offset, stop)
            count += 1
            yield from _stored(log, batch)


def _stored(log: CommitLog, batch: RecordBatch) -> list[StoredMessage]:
    """The rows of a batch, which all lie in one segment."""
    messages = stored(batch, StoredMessage)
    if has_compressed(batch) and (segment := log.segment_at(batch.phy_offset(0))) is not None:
        for message in messages:
            if message.sys_flag & SYS_FLAG_COMPRESSED:
                message._segment = segment.path, segment.start
    return messages


def raise_with_file(log: CommitLog, error: Exception) -> None:
    """The error again with file and byte, when it has a phy offset alone."""
    if isinstance(error, CorruptFileError) and error.path == SOME_SEGMENT:
        found = log.no_record(error.offset, error.reason)
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)
        raise found from None


def _check_lost(log: CommitLog, phy_offset: int, log_end: int) -> None:
    """CorruptFileError for an index entry that points where no whole record lies, unless that was cleaned away."""
    if log.min_phy_offset <= phy_offset < log_end:
        raise log.no_record(phy_offset, "an index entry points here, where no whole record lies; "
                            "repair=True derives the index again")  # fmt: skip


def _matches(log: CommitLog, topic: bytes, keys: list[str], numbers: npt.NDArray[np.int64],
             offsets: npt.NDArray[np.int64], log_end: int, begins: npt.NDArray[np.int64],
             ends: npt.NDArray[np.int64],
             check_crc: bool) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:  # fmt: skip
    """Masks of the pairs (key number, phy offset) whose record is whole, in the key's time and carries the key, and of
    those whose record is whole.

    check_crc: None when some record is not there with a right CRC, or is a batch of messages.
    """
    order = np.argsort(offsets)
    mask = np.zeros(len(offsets), np.bool_)
    loaded = np.zeros(len(offsets), np.bool_)
    for batch, rows in log.load(offsets[order], log_end, checks=PARSE_PROPERTIES | (CHECK_CRC if check_crc else 0)):
        if check_crc and (batch.numbers("sys_flag") & SYS_FLAG_INNER_BATCH).any():
            return None
        wanted = order[rows]
        loaded[wanted] = True
        times = batch.numbers("store_timestamp")
        asked = numbers[wanted]
        mask[wanted] = batch.match(topic, keys, asked) & (times >= begins[asked]) & (times <= ends[asked])
    if check_crc and not loaded.all():
        return None
    return mask, loaded


def _scan_uncovered(log: CommitLog, items: Sequence[Item], uncovered: list[tuple[int, int]],
                    begins: npt.NDArray[np.int64],
                    ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
    """Matches in ranges that no index file covers; begins, ends: of each item."""
    if not uncovered or not items:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    wanted: dict[Item, list[int]] = {}
    for number, item in enumerate(items):
        wanted.setdefault(item, []).append(number)
    numbers: list[int] = []
    offsets: list[int] = []
    shared, asked = RecordBatch(), set(wanted)
    hashes = np.sort(hash_str_keys([key.decode() for _, key in wanted]))
    begin, end = int(begins.min()), int(ends.max())
    for first, last in uncovered:
        for batch in log.records(first, last, batch=shared, checks=PARSE_PROPERTIES):
            batch.keep(None, begin, end)
            places, times = batch.numbers("phy_offset"), batch.numbers("store_timestamp")
            for row, item in batch.find_keys(asked, hashes):
                for number in wanted[item]:
                    if begins[number] <= times[row] <= ends[number]:
                        numbers.append(number)
                        offsets.append(int(places[row]))
    return np.array(numbers, np.int64), np.array(offsets, np.int64)


def has_keys(log: CommitLog, begin: int, end: int) -> bool:
    """Whether some record in a range carries a key that the index should hold."""
    return any(batch.has_keys() for batch in log.records(begin, end, checks=PARSE_PROPERTIES))


def messages_at(log: CommitLog, phy_offsets: npt.NDArray[np.int64], log_end: int, *,
                check_crc: bool = False) -> dict[int, StoredMessage]:  # fmt: skip
    """Whole records at the given phy offsets, wrappers of inner batches as they are.

    check_crc: CorruptFileError for a record that is whole but for a CRC.
    """
    found: dict[int, StoredMessage] = {}
    is_ascending = bool((phy_offsets[1:] > phy_offsets[:-1]).all())
    order = phy_offsets if is_ascending else np.unique(phy_offsets)
    for batch, _ in load_sound(log, order, log_end) if check_crc else log.load(order, log_end):
        found |= {message.phy_offset: message for message in _stored(log, batch)}
    return found


def own_messages(log: CommitLog, of: tuple[bytes | None, int], queue_offsets: npt.NDArray[np.int64],
                 phy_offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32], log_end: int, *,
                 is_exact: bool) -> list[StoredMessage] | None:  # fmt: skip
    """The messages that units point to; None when some unit does not point to a message of its queue.

    of: topic (None: of any queue) and queue id. is_exact: the messages have the queue offsets of their units.
    CorruptFileError for a record that is whole but for a CRC.
    """
    messages: list[StoredMessage] = []
    if not (phy_offsets[1:] > phy_offsets[:-1]).all():
        return None
    for batch, rows in load_sound(log, phy_offsets, log_end):
        if not are_of_queue(batch, *of, queue_offsets[rows] if is_exact else None, sizes[rows]):
            return None
        messages += _stored(log, batch)
    return messages if len(messages) == len(phy_offsets) else None


def load_sound(log: CommitLog, phy_offsets: npt.NDArray[np.int64], log_end: int,
               checks: int = 0) -> Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
    """CommitLog.load, and at its end CorruptFileError when a record there is whole but for a CRC, or its segment is
    missing.
    """
    is_left_out = np.ones(len(phy_offsets), np.bool_)
    count = 0
    for batch, positions in log.load(phy_offsets, log_end, checks=checks | CHECK_CRC):
        is_left_out[positions] = False
        count += len(batch)
        yield batch, positions
    for phy_offset in phy_offsets[is_left_out].tolist() if count < len(phy_offsets) else ():
        segment = log.segment_at(phy_offset)
        if segment is not None and phy_offset < log_end:
            scan = log.scan(phy_offset, min(segment.end, log_end), batch=RecordBatch(1), checks=CHECK_CRC)
            next(iter(scan), None)
            if scan.phy_offset == phy_offset and scan.stop in CRC_STOPS:
                raise log.damage(phy_offset, scan.stop)
        elif log.min_phy_offset <= phy_offset < log_end:
            raise log.damage(phy_offset, SCAN_ZERO)


def unwrap(message: StoredMessage, key: str) -> Iterator[StoredMessage]:
    """The message, as which a batch without messages counts, or those of its inner batch with a key, all when only the
    wrapper has it; newest first.
    """
    inner = inner_messages(message)
    if not inner:
        yield message
        return
    yield from reversed(carrying(message, inner, {key}))


def messages_with(log: CommitLog, topic: bytes, key: str, candidates: Iterable[int], uncovered: list[tuple[int, int]],
                  log_end: int, *, begin: int, end: int,
                  limit: int | None) -> tuple[list[StoredMessage], bool]:  # fmt: skip
    """carriers, inner batches unwrapped: as many messages as the limit lets through, and whether more match."""
    found = list(carriers(log, (topic, key.encode()), candidates, uncovered, log_end, begin=begin, end=end,
                          limit=limit))  # fmt: skip
    parts = (part for message in found if message is not None for part in unwrap(message, key))
    messages = list(islice(parts, None if limit is None else min(limit, ALL) + 1))
    return messages[:limit], found[-1:] == [None] or (limit is not None and len(messages) > limit)


def newest_with_id(log: CommitLog, item: Item, candidates: Iterable[int], uncovered: list[tuple[int, int]],
                   log_end: int) -> StoredMessage | None:  # fmt: skip
    """The newest message whose unique key is the item's."""
    uniq_key = item[1].decode()
    for message in carriers(log, item, candidates, uncovered, log_end, limit=None):  # which may be many: none is kept
        if message is not None and message.uniq_key == uniq_key:
            return next(unwrap(message, uniq_key))
    return None
