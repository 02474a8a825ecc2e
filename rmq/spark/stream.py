# SPDX-License-Identifier: Apache-2.0
"""spark.readStream.format("rmq"): offsets for each queue in Kafka's JSON shape, batches that are ranges of the log.

A batch takes the messages of all queues up to one place of the log, so that it reads each byte once.
"""

from __future__ import annotations

import bisect
import heapq
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from rmq.spark.options import Offsets, ReadOptions, per_queue
from rmq.spark.partitions import NoPartition, arrow_schema, partitions_of, read_partition, store_of
from rmq.spark.selection import (
    FOREVER,
    Bounds,
    DataLossError,
    Selection,
    chooses,
    chosen_queues,
    limits_of,
    log_range,
    may_move,
    phy_offset_of,
    starts,
)
from rmq.spark.staging import roots
from rmq.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

try:  # PySpark 4.2
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS = True
except ImportError:  # 4.1 knows no limits and asks for all there is
    HAS_LIMITS = False

    class SupportsTriggerAvailableNow: ...  # type: ignore[no-redef]



class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that cannot be: raised in a call, for what a constructor raises PySpark's runner hides by its own."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


Spans = dict[tuple[str, int], range]  # queue offsets by topic and queue id
ROWS_TOGETHER = 1_000_000  # whose units are looked at together


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process of the driver for a run of a query. Offsets: {topic: {queue id: queue offset}}.

    Of several stores a topic's name stands behind its store's absolute path: path/topic.
    """

    def __init__(self, asked: ReadOptions, schema: StructType) -> None:
        for path in asked.paths:
            if roots(path) != [path]:
                raise ValueError(f"{path} is a directory of shards, a stream reads stores: "
                                 "option paths with the stores themselves, or write with mode=single")  # fmt: skip
        limits = sorted(asked.given & {"maxOffsetsPerTrigger", "maxBytesPerTrigger"})
        if limits and not HAS_LIMITS:
            warnings.warn(f"options {', '.join(limits)} need PySpark 4.2 or newer: batches have no limit", stacklevel=2)
        self._asked = asked
        self._target = arrow_schema(schema)
        self._initial: dict[str, Any] | None = None
        self._target_end: dict[str, Offsets] | None = None
        self._prefixes = {path: os.path.abspath(path) if asked.has_store_column else "" for path in asked.paths}
        self._is_pinned = True  # whether another look, after a failure, would find the same start

    # ---- offsets ----

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            self._initial = self._as_json({path: self._starts(path) for path in self._asked.paths})
        return self._initial

    def _starts(self, path: str) -> Offsets:
        with store_of(path, self._asked) as store:
            queues = chosen_queues(store, self._asked)
            places = starts(store, queues, self._asked)
            self._is_pinned = self._is_pinned and not may_move(queues, places, self._asked)
            return places

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        if not self._is_pinned and start is not None and start == self._initial:
            self._is_pinned = True  # an empty batch 0 writes it down in the checkpoint
            return start
        if self._target_end and start is not None and start == self._initial:
            self._target_end = _at_least(self._target_end, self._of_json(start))  # which was looked for behind it
        ends = self._target_end or self._available()
        if start is None:
            return self._as_json(ends)
        reached = {}
        for path, known in self._of_json(start).items():
            first, last = places_left(path, known, ends[path], self._asked), ends[path]
            for bound in self._limits(limit):
                with store_of(path, self._asked) as store:
                    last = limited_offsets(store, first, last, bound)
            reached[path] = {topic: first.get(topic, {}) | last.get(topic, {}) for topic in [*first, *last]}
        return self._as_json(reached)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._as_json(self._available())

    def getDefaultReadLimit(self) -> ReadLimit:
        rows, size = self._asked["maxOffsetsPerTrigger"], self._asked["maxBytesPerTrigger"]
        return ReadMaxRows(rows) if rows is not None else ReadMaxBytes(size) if size is not None else ReadAllAvailable()

    def _limits(self, limit: ReadLimit | None) -> list[ReadLimit]:
        """Spark hands back one of the limits that were given; the other holds too."""
        if limit is None or isinstance(limit, ReadAllAvailable):
            return []
        size = self._asked["maxBytesPerTrigger"]
        return [limit, ReadMaxBytes(size)] if isinstance(limit, ReadMaxRows) and size is not None else [limit]

    def prepareForTriggerAvailableNow(self) -> None:
        self._target_end = self._available()

    def _available(self) -> dict[str, Offsets]:
        return {path: self._ends(path) for path in self._asked.paths}

    def _ends(self, path: str) -> Offsets:
        with store_of(path, self._asked) as store:
            return ends_of(chosen_queues(store, self._asked))

    def _as_json(self, offsets: dict[str, Offsets]) -> dict[str, Any]:
        named = {f"{prefix}/{topic}" if prefix else topic: {str(queue): place for queue, place in queues.items()}
                 for path, prefix in self._prefixes.items() for topic, queues in offsets[path].items()}  # fmt: skip
        return named | {f"{prefix}/": {} for path, prefix in self._prefixes.items() if prefix and not offsets[path]}

    def _is_new(self, path: str, offsets: dict[str, Any]) -> bool:
        """Whether a store joined the stream behind these offsets; one without queues has a name of its own there."""
        prefix = self._prefixes[path]
        return bool(prefix) and prefix not in map(_prefix_of, offsets)

    def _of_json(self, offsets: dict[str, Any]) -> dict[str, Offsets]:
        """By path. ValueError for a name that is of none: the messages behind it would be read again."""
        found: dict[str, Offsets] = {path: {} for path in self._prefixes}
        for name, queues in per_queue("startingOffsets", offsets).items():
            prefix, topic = _prefix_of(name), name.rpartition("/")[2]
            paths = [path for path, known in self._prefixes.items() if known == prefix]
            if not paths:
                raise ValueError(f"the checkpoint has offsets of {name!r}, which is of no store of this stream "
                                 f"({', '.join(found)}): give the stores with which the checkpoint began, a single one "
                                 "still alone, or another checkpointLocation")  # fmt: skip
            for path in paths:
                found[path][topic] = queues
        return found

    # ---- batches ----

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        asked = self._asked
        parts: list[InputPartition] = []
        begins, ends = self._of_json(start), self._of_json(end)
        for path in asked.paths:
            with store_of(path, asked) as store:
                queues = chosen_queues(store, asked, ends[path])
                known = places_left(path, begins[path], ends_of(queues), asked)
                bounds = batch_bounds(path, queues, known, ends[path], is_new=self._is_new(path, start),
                                      fail=asked["failOnDataLoss"])  # fmt: skip
                selection = Selection.of_options(tuple(bounds), bounds, asked, limits_of(store, bounds))
                first, last = log_range(store, bounds)
                parts += partitions_of(path, store, selection, [(first, last)] if first < last else [], asked,
                                       asked["minPartitions"])  # fmt: skip
        return parts or [NoPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._asked, self._target)

    def commit(self, end: dict[str, Any]) -> None: ...

    def stop(self) -> None: ...


def _at_least(ends: dict[str, Offsets], places: dict[str, Offsets]) -> dict[str, Offsets]:
    """Ends, those that lie before a place moved there, and the places of queues that came since."""
    reached: dict[str, Offsets] = {}
    for path, known in ends.items():
        reached[path] = {topic: dict(numbers) for topic, numbers in known.items()}
        for topic, numbers in places[path].items():
            for queue, place in numbers.items():
                queues = reached[path].setdefault(topic, {})
                queues[queue] = max(place, queues.get(queue, 0))
    return reached


def ends_of(queues: Bounds) -> Offsets:
    return {topic: {queue: high for queue, (_, high) in numbers.items()} for topic, numbers in queues.items()}


def _prefix_of(name: str) -> str:
    """The store of a topic's name in a checkpoint, "" for a single one's."""
    written = name.rpartition("/")[0]
    return os.path.abspath(written) if written else ""


def places_left(path: str, start: Offsets, ends: Offsets, asked: ReadOptions) -> Offsets:
    """`start`, as far as the store reaches: a queue that ends before its place goes on at its end, one that is gone is
    left out, so that it is new when it comes again. With failOnDataLoss both are a DataLossError."""
    left: Offsets = {}
    for topic, queues in start.items():
        for queue, place in queues.items():
            end = ends.get(topic, {}).get(queue) if chooses(asked, topic, queue) else place
            if asked["failOnDataLoss"] and (end is None or end < place):
                state = "is gone" if end is None else f"ends at {end}"
                raise DataLossError(f"{path}: {topic} queue {queue} {state}, the stream goes on from {place}: a store "
                                    "that was made anew wants another checkpointLocation; failOnDataLoss=false goes on "
                                    "with what comes")  # fmt: skip
            if end is not None:
                left.setdefault(topic, {})[queue] = min(place, end)
    return left


def batch_bounds(path: str, queues: Bounds, start: Offsets, end: Offsets, *, is_new: bool, fail: bool) -> Bounds:
    """Per queue [first, last) of a batch. A queue that is not in `start` is new: all of it is wanted; of a store that
    is new, what there is.

    DataLossError when the store has not all of that any more and `fail`; else what is left.
    """
    bounds: Bounds = {}
    for topic, numbers in end.items():
        for queue, last in numbers.items():
            low, high = queues.get(topic, {}).get(queue, (0, 0))
            first = start.get(topic, {}).get(queue, low if is_new else 0)
            if first >= last:
                continue
            if fail and (first < low or last > high):
                raise DataLossError(f"{path}: {topic} queue {queue} has offsets {low} to {high}, the stream goes on "
                                    f"from {first} to {last}; failOnDataLoss=false takes what is left")  # fmt: skip
            bounds.setdefault(topic, {})[queue] = max(first, low), max(min(last, high), low)
    return bounds


def limited_offsets(store: Store, start: Offsets, end: Offsets, limit: ReadLimit) -> Offsets:
    """Offsets of all queues at one place of the log: as far as a limit on rows or bytes lets a batch go, at least
    one message. Cost: of a limit on bytes a binary search in each queue, on rows about twice as many units read."""
    lowest = store.topics()
    spans = {}
    for topic, numbers in end.items():
        for queue, last in numbers.items():
            low, _ = lowest.get(topic, {}).get(queue, (0, 0))
            spans[topic, queue] = range(max(low, start.get(topic, {}).get(queue, 0)), last)
    wanted = {key: span for key, span in spans.items() if span}
    if not wanted or not isinstance(limit, ReadMaxBytes | ReadMaxRows):
        return end
    if isinstance(limit, ReadMaxBytes):
        reached = _within_bytes(store, wanted, limit.max_bytes)
    else:
        reached = _behind_rows(store, wanted, max(1, limit.max_rows))
    limited = {topic: dict(numbers) for topic, numbers in end.items()}
    for (topic, queue), offset in reached.items():
        limited[topic][queue] = offset
    return limited


def _within_bytes(store: Store, spans: Spans, size: int) -> dict[tuple[str, int], int]:
    """Where each queue stands behind the messages that end within so many bytes of the first one's begin in the log,
    or behind that one. Several queues may share a message."""
    begins = {key: phy_offset_of(store, *key, span.start) for key, span in spans.items()}
    first = min(begins.values())
    reached = {key: span.start + bisect.bisect_right(span, first + size, key=partial(_end_of, store, key))
               for key, span in spans.items()}  # fmt: skip
    if all(offset == spans[key].start for key, offset in reached.items()):
        reached = {key: span.start + (begins[key] == first) for key, span in spans.items()}
    return reached


def _end_of(store: Store, queue: tuple[str, int], offset: int) -> int:
    """Where a message ends in the log; behind everything when the queue does not have it."""
    phy_offsets, sizes, _ = store.units(*queue, offset, 1)
    return int(phy_offsets[0]) + int(sizes[0]) if len(phy_offsets) else FOREVER


def _behind_rows(store: Store, spans: Spans, rows: int) -> dict[tuple[str, int], int]:
    """Where each queue stands behind the first `rows` messages of their spans, in log order."""
    reached = {key: span.start for key, span in spans.items()}
    while rows > 0 and (left := {key: range(reached[key], span.stop) for key, span in spans.items()
                                 if reached[key] < span.stop}):  # fmt: skip
        step = _behind_few_rows(store, left, min(rows, ROWS_TOGETHER))
        rows -= sum(offset - reached[key] for key, offset in step.items())
        reached |= step
    return reached


def _behind_few_rows(store: Store, spans: Spans, rows: int) -> dict[tuple[str, int], int]:
    """_behind_rows, of as many units as memory may hold; several queues may share a message, that all have then.

    Units are read of the queue first whose known ones end first in the log: up to there those of all are known.
    """
    if sum(map(len, spans.values())) <= rows:
        return {key: span.stop for key, span in spans.items()}
    known = dict.fromkeys(spans, np.empty(0, np.int64))
    ends = [(-1, key, 2 * rows // len(spans) + 16) for key in spans]
    count = 0
    while True:
        end, key, more = ends[0]
        if count > rows or end == FOREVER:
            places = np.concatenate(list(known.values()))
            places = np.sort(places[places <= end])
            if len(places) > rows:
                place = max(int(places[0]) + 1, int(places[rows]))
                return {key: span.start + int(np.searchsorted(known[key], place)) for key, span in spans.items()}
            if end == FOREVER:  # units have gone meanwhile
                return {key: span.stop for key, span in spans.items()}
        at, stop = spans[key].start + len(known[key]), spans[key].stop
        fresh, _, _ = store.units(*key, at, min(more, stop - at))
        known[key] = np.maximum.accumulate(np.concatenate([known[key], fresh]))  # a wrong unit may go back
        count += len(fresh)
        is_all = not len(fresh) or at + len(fresh) == stop
        heapq.heapreplace(ends, (FOREVER if is_all else int(known[key][-1]), key, 2 * more))
