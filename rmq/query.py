# SPDX-License-Identifier: Apache-2.0
"""Exact queries by key: index files for the candidates, the log for the truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys
from rmq._core._layout import SYS_FLAG_INNER_BATCH
from rmq._core._record import PARSE_PROPERTIES, SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC, SCAN_ZERO
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CHECK_CRC, CommitLog
from rmq.message import StoredMessage, inner_messages

if TYPE_CHECKING:
    import pyarrow as pa

Item = tuple[bytes | None, bytes]  # topic (None: any) and key, as in the record
FIRST_ROUND = 64  # candidates per key that are looked at before anything is known about the key
ALL = 2**62
CRC_STOPS = (SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC)


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


@dataclass(frozen=True)
class QueryManyResult:
    """table: key_index and message columns, by key_index, newest first within a key.

    truncated: more messages of some key match than the limit let through; truncated_keys: the key_index of each such.
    """

    table: pa.Table
    complete: bool
    truncated: bool
    truncated_keys: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """Matches ordered by item number, in it by descending phy offset; truncated: per item, if more match."""

    numbers: npt.NDArray[np.int64]
    phy_offsets: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    scanned_size: int


def find(log: CommitLog, items: Sequence[Item],
         candidates: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], uncovered: list[tuple[int, int]],
         log_end: int, *, begin: int, end: int, limit: int | None) -> Found:  # fmt: skip
    """The records that truly carry each item.

    candidates: (item numbers, phy offsets) from the index, in any order, repeats allowed. uncovered: ranges
    of the log to scan. begin, end: inclusive, ms, on the record's store timestamp.
    """
    numbers, offsets = _scan_uncovered(log, items, uncovered, begin, end)
    found_numbers, found_offsets = [numbers], [offsets]
    enough = ALL if limit is None else limit + 1
    pairs = np.unique(np.stack([candidates[0], -candidates[1]], axis=1), axis=0) if len(candidates[0]) else \
        np.empty((0, 2), np.int64)  # fmt: skip
    pairs[:, 1] *= -1
    starts = np.flatnonzero(np.r_[True, pairs[1:, 0] != pairs[:-1, 0]]) if len(pairs) else \
        np.empty(0, np.int64)  # fmt: skip
    rank = np.arange(len(pairs)) - np.repeat(starts, np.diff(np.r_[starts, len(pairs)]))
    counts = np.zeros(len(items), np.int64)
    low, high = 0, max(FIRST_ROUND, min(enough, 8192))
    while True:
        chosen = np.flatnonzero((rank >= low) & (rank < high) & (counts[pairs[:, 0]] < enough))
        if not chosen.size:
            break
        matched = pairs[chosen[_matches(log, items, pairs[chosen], log_end, begin, end)]]
        found_numbers.append(matched[:, 0])
        found_offsets.append(matched[:, 1])
        np.add.at(counts, matched[:, 0], 1)
        low, high = high, high * 4
    scanned_size = sum(last - first for first, last in uncovered)
    return _settle(np.concatenate(found_numbers), np.concatenate(found_offsets), len(items), limit, scanned_size)


def carriers(log: CommitLog, item: Item, candidates: Iterable[int], uncovered: list[tuple[int, int]], log_end: int, *,
             begin: int, end: int, limit: int | None) -> tuple[list[StoredMessage], bool]:  # fmt: skip
    """find for one item: the messages, newest first, wrappers of inner batches as they are, and whether more match.

    One record after the other: for few candidates, as a key has. CorruptFileError for a match that is whole but for a
    CRC.
    """
    places = {*candidates, *(_scan_uncovered(log, [item], uncovered, begin, end)[1].tolist() if uncovered else ())}
    topic, key = item
    messages: list[StoredMessage] = []
    batch = RecordBatch(1)
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
            if len(messages) == limit:
                return messages, True
            if stop in CRC_STOPS:
                raise log.damage(phy_offset, stop)
            messages.append(StoredMessage(batch.fields(0)))
    return messages, False


def _check_lost(log: CommitLog, phy_offset: int, log_end: int) -> None:
    """CorruptFileError for an index entry that points where no whole record lies, unless that was cleaned away."""
    if log.min_phy_offset <= phy_offset < log_end:
        raise log.no_record(phy_offset, "an index entry points here, where no whole record lies; "
                            "repair=True derives the index again")  # fmt: skip


def _settle(numbers: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], count: int,
            limit: int | None, scanned_size: int) -> Found:  # fmt: skip
    """Order, drop repeats, cut at the limit."""
    order = np.lexsort((-offsets, numbers))
    numbers, offsets = numbers[order], offsets[order]
    if len(numbers):
        fresh = np.r_[True, (numbers[1:] != numbers[:-1]) | (offsets[1:] != offsets[:-1])]
        numbers, offsets = numbers[fresh], offsets[fresh]
    totals = np.bincount(numbers, minlength=count)
    if limit is None:
        return Found(numbers, offsets, np.zeros(count, np.bool_), scanned_size)
    rank = np.arange(len(numbers)) - np.repeat(np.cumsum(totals) - totals, totals)
    kept = rank < limit
    return Found(numbers[kept], offsets[kept], totals > limit, scanned_size)


def _matches(log: CommitLog, items: Sequence[Item], pairs: npt.NDArray[np.int64], log_end: int, begin: int,
             end: int) -> npt.NDArray[np.bool_]:  # fmt: skip
    """Mask of the (item, phy offset) pairs whose record is whole, in time and carries the item."""
    topics = [item[0] for item in items]
    keys = [item[1] for item in items]
    order = np.argsort(pairs[:, 1], kind="stable")
    mask = np.zeros(len(pairs), np.bool_)
    loaded = np.zeros(len(pairs), np.bool_)
    for batch, rows in log.load(pairs[order, 1], log_end, checks=PARSE_PROPERTIES):
        wanted = order[rows]
        loaded[wanted] = True
        times = batch.numbers("store_timestamp")
        mask[wanted] = batch.match(topics, keys, pairs[wanted, 0]) & (times >= begin) & (times <= end)
    for phy_offset in pairs[~loaded, 1].tolist():
        _check_lost(log, phy_offset, log_end)
    return mask


def _scan_uncovered(log: CommitLog, items: Sequence[Item], uncovered: list[tuple[int, int]], begin: int,
                    end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
    """Matches in ranges that no index file covers."""
    if not uncovered:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    wanted: dict[Item, list[int]] = {}
    for number, item in enumerate(items):
        wanted.setdefault(item, []).append(number)
    numbers: list[int] = []
    offsets: list[int] = []
    shared = RecordBatch()
    hashes = np.unique(hash_str_keys([key.decode() for _, key in wanted]))
    for first, last in uncovered:
        for batch in log.records(first, last, batch=shared, checks=PARSE_PROPERTIES):
            batch.keep(None, begin, end)
            places = batch.numbers("phy_offset")
            for row, item in batch.find_keys(set(wanted), hashes):
                for number in wanted[item]:
                    numbers.append(number)
                    offsets.append(int(places[row]))
    return np.array(numbers, np.int64), np.array(offsets, np.int64)


def has_keys(log: CommitLog, begin: int, end: int) -> bool:
    """Whether some record in a range carries a key that the index should hold."""
    return any(batch.has_keys() for batch in log.records(begin, end, checks=PARSE_PROPERTIES))


def ambiguous_records(log: CommitLog, begin: int, end: int) -> list[tuple[int, int]]:
    """Records of a range whose keys RocketMQ <= 4.9.0 indexed by other rules than they are read by."""
    batches = log.records(begin, end, checks=PARSE_PROPERTIES)
    return [place for batch in batches for place in batch.ambiguous()]


def messages_at(log: CommitLog, phy_offsets: npt.NDArray[np.int64], log_end: int, *,
                check_crc: bool = False) -> dict[int, StoredMessage]:  # fmt: skip
    """Whole records at the given phy offsets, wrappers of inner batches as they are.

    check_crc: CorruptFileError for a record that is whole but for a CRC.
    """
    found = {}
    is_ascending = bool((phy_offsets[1:] > phy_offsets[:-1]).all())
    order = phy_offsets if is_ascending else np.unique(phy_offsets)
    for batch, _ in load_sound(log, order, log_end) if check_crc else log.load(order, log_end):
        for row in range(len(batch)):
            message = StoredMessage(batch.fields(row))
            found[message.phy_offset] = message
    return found


def load_sound(log: CommitLog, phy_offsets: npt.NDArray[np.int64], log_end: int,
               checks: int = 0) -> Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
    """CommitLog.load, and at its end CorruptFileError when a record there is whole but for a CRC."""
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


def unwrap(message: StoredMessage, key: str | None = None) -> Iterator[StoredMessage]:
    """The message, or those of its inner batch; with a key those with it, all when only the wrapper has it."""
    inner = inner_messages(message.as_tuple()) if message.sys_flag & SYS_FLAG_INNER_BATCH else None
    if inner is None:
        yield message
        return
    own = [StoredMessage(fields) for fields in inner]
    carrying = [item for item in own if key is not None and (key in item.keys or key == item.uniq_key)]
    yield from reversed(carrying or own)
