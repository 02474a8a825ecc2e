# SPDX-License-Identifier: Apache-2.0
"""Reads by queue: spans of queue offsets as partitions, for topics that are a small part of the log, or when a
partition may have so many messages at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.spark.options import ReadOptions
from rmq.spark.selection import FOREVER, Bounds, DataLossError, Selection, check_units
from rmq.splits import CLOCK_SLACK
from rmq.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

SMALL_SHARE = 0.2  # of the log's bytes: below it finding each message costs less than passing over the others
SAMPLE = 64  # units of a queue whose sizes stand for those of all
MOST_PARTITIONS = 1_000_000


class Span(NamedTuple):
    """Messages [first, last) of a queue."""

    topic: str
    queue_id: int
    first: int
    last: int


def reads_by_queue(store: Store, selection: Selection, ranges: list[tuple[int, int]], asked: ReadOptions) -> bool:
    """Whether a read takes its messages from its queues one by one, or else passes over `ranges` of the log.

    Cost: one read of each queue.
    """
    if asked["maxRecordsPerPartition"] is not None or asked["scanMode"] == "queue":
        return True
    if asked["scanMode"] == "log" or selection.bounds is None:
        return False
    try:
        wanted = sum(count * size for count, size in _sizes(store, selection.bounds))
    except (UnsupportedFormatError, CorruptFileError):
        return False
    return wanted < SMALL_SHARE * sum(end - begin for begin, end in ranges)


def _sizes(store: Store, bounds: Bounds) -> Iterator[tuple[int, float]]:
    """Of each queue: messages in its bounds, and their size, by a sample from the middle."""
    for topic, queues in bounds.items():
        for queue, (first, last) in queues.items():
            if first < last:
                sizes = store.units(topic, queue, (first + last) // 2, SAMPLE)[1]
                yield last - first, float(np.maximum(sizes, 1).mean()) if len(sizes) else 1.0


def plan_spans(store: Store, selection: Selection, asked: ReadOptions, min_partitions: int) -> list[list[Span]]:
    """Partitions of a read by queue: of about splitBytes, of at most maxRecordsPerPartition messages.

    Cost: for each queue a read, and with a time range two binary searches.
    """
    bounds = _in_time(store, selection, fail=asked["failOnDataLoss"])
    sizes = list(_sizes(store, bounds))
    total = sum(count for count, _ in sizes)
    if not total:
        return []
    size = sum(count * size for count, size in sizes) / total
    step = max(1, min(int(asked["splitBytes"] / size), -(-total // max(1, min_partitions)),
                      asked["maxRecordsPerPartition"] or total))  # fmt: skip
    if total / step > MOST_PARTITIONS:
        raise ValueError(f"option maxRecordsPerPartition: {total} messages are more than {MOST_PARTITIONS} partitions "
                         f"of {step}")  # fmt: skip
    parts: list[list[Span]] = []
    room = 0
    for topic, queues in bounds.items():
        for queue, (first, last) in queues.items():
            while first < last:
                if not room:
                    parts.append([])
                    room = step
                count = min(room, last - first)
                parts[-1].append(Span(topic, queue, first, first + count))
                first += count
                room -= count
    return parts


def _in_time(store: Store, selection: Selection, *, fail: bool) -> Bounds:
    """Bounds of queues in which messages of the selection's time can lie, though the clock went back for a while."""
    assert selection.bounds is not None
    on_damage: Literal["raise", "skip"] = "raise" if fail else "skip"
    found: Bounds = {}
    for topic, queues in selection.bounds.items():
        for queue, (first, last) in queues.items():
            if selection.begin is not None:
                time = selection.begin - CLOCK_SLACK
                first = max(first, store.search_offset(topic, queue, time, on_damage=on_damage))
            if selection.end is not None:
                time = min(selection.end + CLOCK_SLACK + 1, FOREVER)
                last = min(last, store.search_offset(topic, queue, time, on_damage=on_damage))
            found.setdefault(topic, {})[queue] = first, last
    return found


def batches_of(store: Store, span: Span, selection: Selection, columns: list[str],
               asked: ReadOptions) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """The messages of a span in the selection's time. DataLossError, CorruptFileError for what is not there, unless
    failOnDataLoss is false."""
    import pyarrow as pa
    import pyarrow.compute as pc

    topic, queue, at, last = span
    names = list(dict.fromkeys([*columns, "topic", "queue_id", "queue_offset", "store_timestamp"]))
    low_time, high_time = (pa.scalar(time, pa.int64()) for time in (selection.begin, selection.end))
    before = store.units(topic, queue, at - 1, 1)[0]  # which another partition reads
    while at < last:
        offsets, sizes, _ = store.units(topic, queue, at, min(asked["batchRows"], last - at))
        check_units(store, asked)
        if not len(offsets):
            _lose(store, span, at, asked)
            low, high = store.topics().get(topic, {}).get(queue, (0, 0))
            at = low if at < low < high else last
            continue
        ends = np.cumsum(np.clip(sizes.astype(np.int64), 1, 2**31))
        count = max(1, int(np.searchsorted(ends, asked["batchBytes"], side="right")))
        offsets, sizes = offsets[:count], sizes[:count]
        steps = np.diff(offsets, prepend=before[-1] if len(before) else -1)
        before = offsets
        is_missing = np.ones(count, np.bool_)
        for batch, places in _found(store, offsets, names, asked, np.clip(sizes, 1, None)):
            kept = pc.and_(pc.equal(batch["topic"], topic), pc.equal(batch["queue_id"], pa.scalar(queue, pa.int32())))
            # Else a unit repeats a message; behind one that points too far the next message is its own unit's.
            is_own = batch["queue_offset"].to_numpy() == at + places
            kept = pc.and_(kept, pa.array((steps[places] > 0) | (is_own & (steps[places] < 0))))
            # A step back tells that the unit before points too far: its message came, the one of its number did not.
            is_missing[places[kept.to_numpy(zero_copy_only=False) & (steps[places] > 0)]] = False
            times = batch["store_timestamp"].cast(pa.int64())
            if low_time.is_valid or high_time.is_valid:
                kept = pc.and_(kept, pc.fill_null(pc.greater_equal(times, low_time), True))
                kept = pc.and_(kept, pc.fill_null(pc.less_equal(times, high_time), True))
            yield batch.filter(kept)
        if is_missing.any():
            _lose(store, span, at + int(is_missing.argmax()), asked)
        at += count


def _lose(store: Store, span: Span, at: int, asked: ReadOptions) -> None:
    if asked["failOnDataLoss"]:
        raise DataLossError(f"{store.path}: {span.topic} queue {span.queue_id} has no message {at} any more; "
                            "failOnDataLoss=false reads what is left")  # fmt: skip


def _found(store: Store, offsets: np.ndarray, columns: list[str], asked: ReadOptions,
           sizes: np.ndarray | None = None) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:  # fmt: skip
    """Records at phy offsets with their places, read ahead when their sizes are told; compressed bodies are unpacked as
    the batches are taken. With failOnDataLoss=false those that can be read, one by one when it must be.
    """
    is_left = np.ones(len(offsets), np.bool_)
    how = {"crc": asked["verifyCrc"], "skip_damage": not asked["failOnDataLoss"], "limit": asked["batchBytes"]}
    try:
        for batch, places in store._placed(offsets, columns, store.max_phy_offset, sizes, **how):
            yield batch, places
            is_left[places] = False
        return
    except CorruptFileError:
        if asked["failOnDataLoss"]:
            raise
    left = np.flatnonzero(is_left)
    for part in np.array_split(left, 2) if len(offsets) > 1 else ():
        for batch, places in _found(store, offsets[part], columns, asked):
            yield batch, part[places]
