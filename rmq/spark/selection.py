# SPDX-License-Identifier: Apache-2.0
"""Which messages of a store a read asks for, resolved once on the driver; and the ranges of the log they lie in."""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq.errors import CorruptFileError, RmqError, UnsupportedFormatError
from rmq.message import StoredMessage
from rmq.paths import LMQ_PREFIX
from rmq.pull import tag_set
from rmq.spark.options import EARLIEST, LATEST, Offsets, ReadOptions
from rmq.spark.staging import beside_appends
from rmq.splits import time_ranges
from rmq.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

FOREVER = 2**63 - 1
Bounds = dict[str, dict[int, tuple[int, int]]]
Limits = dict[str, dict[int, tuple[int, int, int]]]


class DataLossError(RmqError, ValueError):
    """Messages that were asked for are not in the store any more."""


@dataclass(frozen=True)
class Selection:
    """topics None: the whole log. bounds: per queue [first, last) queue offsets; None: whatever the split holds.

    begin, end: store timestamp in ms, both inclusive. limits: of each queue what its messages within the bounds say and
    where they lie, see limits_of. Picklable; filters the batches of a scan.
    """

    topics: tuple[str, ...] | None = None
    bounds: Bounds | None = None
    begin: int | None = None
    end: int | None = None
    tags: frozenset[str] | None = None
    limits: Limits | None = None
    _table: list[Any] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of_options(cls, topics: tuple[str, ...] | None, bounds: Bounds | None, options: ReadOptions,
                   limits: Limits | None = None) -> Selection:  # fmt: skip
        """With the times and tags that the options say."""
        tags, end = tag_set(options["tags"]), options["endingTimestamp"]
        return cls(topics, bounds, options["startingTimestamp"], None if end is None else end - 1,
                   None if tags is None else frozenset(tags), limits)  # fmt: skip

    def of_tags(self) -> Selection:
        """Its tags only, for rows that are within its bounds."""
        return Selection(tags=self.tags)

    @property
    def columns(self) -> list[str]:
        """What a batch must have to be filtered."""
        return (["topic", "queue_id", "queue_offset", "sys_flag", "phy_offset"] if self.bounds is not None else []) + \
            (["tags"] if self.tags is not None else [])  # fmt: skip

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted rows. Time and topic are the scan's own business."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.tags is not None:
            batch = batch.filter(pc.is_in(batch.column("tags"), pa.array(sorted(self.tags), pa.string())))
        if self.bounds is not None and len(batch):
            batch = batch.filter(pa.array(self._within(batch)))
        return batch

    def _within(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        assert self.bounds is not None
        names, keys, lows, highs, floors, ceilings = self._sorted_bounds(self.bounds)
        coded = batch.column("topic").dictionary_encode()
        codes = np.array([names.get(name, -1) for name in coded.dictionary.to_pylist()], np.int64)
        topic = codes[coded.indices.to_numpy(zero_copy_only=False)]
        wanted = (topic << 32) | (batch.column("queue_id").to_numpy().astype(np.int64) & 0xFFFFFFFF)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        offset = batch.column("queue_offset").to_numpy()
        has_unit = batch.column("sys_flag").to_numpy() & L.SYS_FLAG_PREPARED == 0  # nor has ROLLBACK: this bit, too
        lies = batch.column("phy_offset").to_numpy()
        within: npt.NDArray[np.bool_] = (topic >= 0) & has_unit & (keys[place] == wanted) \
            & (offset >= lows[place]) & (offset < highs[place]) \
            & (lies >= floors[place]) & (lies <= ceilings[place])  # fmt: skip
        return within

    def _sorted_bounds(self, bounds: Bounds) -> tuple[dict[str, int], Any, Any, Any, Any, Any]:
        if not self._table:
            names = {name: number for number, name in enumerate(sorted(bounds))}
            limits = self.limits or {}
            rows = sorted((names[name] << 32 | queue, low, *limits.get(name, {}).get(queue, (high, 0, FOREVER)))
                          for name, queues in bounds.items() for queue, (low, high) in queues.items())  # fmt: skip
            table = np.array(rows or [(-1, 0, 0, 0, 0)], np.int64)
            self._table.append((names, *table.T))
        found: tuple[dict[str, int], Any, Any, Any, Any, Any] = self._table[0]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.topics, self.bounds, self.begin, self.end, self.tags, self.limits)


def select(store: Store, options: ReadOptions) -> Selection:
    """The selection of a batch read of one store, as it stands now."""
    offsets = {"startingOffsets", "endingOffsets", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"}
    if "assign" in options.given or offsets & options.given or options.is_by_queue:
        bounds = _bounds(store, options)
        return Selection.of_options(tuple(bounds), bounds, options, limits_of(store, bounds))
    return Selection.of_options(chosen_topics(store, options), None, options)


def chosen_topics(store: Store, options: ReadOptions) -> tuple[str, ...] | None:
    if options["subscribe"] is not None:
        return tuple(options["subscribe"])
    if options["assign"] is not None:
        return tuple(options["assign"])
    if options["subscribePattern"] is not None:
        return tuple(name for name in store.topics() if chooses(options, name, 0))
    return None


def chooses(options: ReadOptions, topic: str, queue: int) -> bool:
    """Whether the options choose a queue, which the store may not have. Light queues are left out."""
    if topic.startswith(LMQ_PREFIX):
        return False
    if options["assign"] is not None:
        return queue in options["assign"].get(topic, ())
    if options["subscribePattern"] is not None:
        return options["subscribePattern"].fullmatch(topic) is not None
    return options["subscribe"] is None or topic in options["subscribe"]


def chosen_queues(store: Store, options: ReadOptions, others: Offsets | None = None) -> Bounds:
    """(min, max) queue offset of each queue that the options choose, or that is one of `others`, and the store has.

    What Spark is appending and has not committed is not counted.
    """
    known, pending = beside_appends(str(store.path), store.topics)
    check_units(store, options)
    check_pending(store, pending)
    chosen: Bounds = {}
    for name, queues in known.items():
        for number, place in queues.items():
            if chooses(options, name, number) or number in (others or {}).get(name, {}):
                chosen.setdefault(name, {})[number] = place
    if pending is None:
        return chosen
    return {name: {number: (low, first_behind(store, (name, number), range(low, high), pending))
                   for number, (low, high) in queues.items()} for name, queues in chosen.items()}  # fmt: skip


def check_units(store: Store, options: ReadOptions) -> None:
    """DataLossError when units were made of a damaged log: what could not be read of it has none."""
    if options["failOnDataLoss"] and store.mode == "r" and store._visible.passed is not None:
        raise DataLossError(f"{store._visible.passed}; failOnDataLoss=false reads what is left")


def check_pending(store: Store, pending: int | None) -> None:
    """DataLossError for an append that was interrupted and can never end, which would hide all messages."""
    if pending is not None and pending < store.min_phy_offset:
        raise DataLossError(f"{store.path}: an append of mode=single was interrupted at byte {pending} of the log, "
                            "which was cleaned away since: remove the .intent in rmq/spark/commits/ to read what "
                            "is there")  # fmt: skip


def phy_offset_of(store: Store, topic: str, queue: int, offset: int) -> int:
    """Where a message lies in the log; behind everything when the queue does not have it."""
    phy_offsets, _, _ = store.units(topic, queue, offset, 1)
    return int(phy_offsets[0]) if len(phy_offsets) else FOREVER


def first_behind(store: Store, queue: tuple[str, int], span: range, place: int) -> int:
    """First offset of a queue in `span` whose message lies at or behind a place of the log; span.stop: none does.
    Cost: a binary search."""
    return span.start + bisect.bisect_left(span, place, key=lambda offset: phy_offset_of(store, *queue, offset))


def starts(store: Store, queues: Bounds, options: ReadOptions) -> Offsets:
    """Where each queue begins by startingOffsets or startingOffsetsByTimestamp."""
    return _places(store, queues, options, "startingOffsets")


def may_move(queues: Bounds, places: Offsets, options: ReadOptions) -> bool:
    """Whether `starts` may find later places when the store has grown: some lie at an end, and are not numbers."""
    times, given = options["startingOffsetsByTimestamp"], options["startingOffsets"]
    if times is None:
        return given == "latest" or any(LATEST in numbers.values() for numbers in _explicit(None, given).values())
    return any(places[topic][queue] == high for topic, numbers in queues.items()
               for queue, (_, high) in numbers.items())  # fmt: skip


def _bounds(store: Store, options: ReadOptions) -> Bounds:
    queues = chosen_queues(store, options)
    first, last = starts(store, queues, options), _places(store, queues, options, "endingOffsets")
    bounds: Bounds = {}
    for topic, numbers in queues.items():
        for queue, (low, high) in numbers.items():
            begin, end = first[topic][queue], last[topic][queue]
            if options["failOnDataLoss"] and begin < low:
                raise DataLossError(f"{store.path}: startingOffsets: {topic} queue {queue} begins at {low}, {begin} is "
                                    "gone; failOnDataLoss=false reads what is left")  # fmt: skip
            if options["failOnDataLoss"] and max(begin, end) > high:
                name = "startingOffsets" if begin > high else "endingOffsets"
                raise DataLossError(f"{store.path}: {name}: {topic} queue {queue} "
                                    f"ends at {high}, before {max(begin, end)}; failOnDataLoss=false reads what is "
                                    "there")  # fmt: skip
            bounds.setdefault(topic, {})[queue] = max(begin, low), min(end, high)
    return bounds


def _places(store: Store, queues: Bounds, options: ReadOptions, name: str) -> Offsets:
    given, times = options[name], options[f"{name}ByTimestamp"]
    unknown = [f"{topic} queue {queue}" for topic, numbers in _explicit(times, given).items() for queue in numbers
               if queue not in queues.get(topic, {})]  # fmt: skip
    if unknown and options["failOnDataLoss"]:
        option = name if times is None else f"{name}ByTimestamp"
        raise DataLossError(f"{store.path}: option {option}: the store has no {', '.join(unknown)}")
    on_damage: Literal["raise", "skip"] = "raise" if options["failOnDataLoss"] else "skip"
    places: Offsets = {}
    for topic, numbers in queues.items():
        for queue, (low, high) in numbers.items():
            default = low if name == "startingOffsets" else high
            if times is not None:
                time = times.get(topic, {}).get(queue)
                # Behind `high` there may be messages by now, or of an append under way.
                place = default if time is None else min(high, store.search_offset(topic, queue, time,
                                                                                   on_damage=on_damage))  # fmt: skip
            elif isinstance(given, str):
                place = low if given == "earliest" else high
            else:
                place = given.get(topic, {}).get(queue, default)
            places.setdefault(topic, {})[queue] = low if place == EARLIEST else high if place == LATEST else place
    return places


def _explicit(times: Offsets | None, given: str | Offsets) -> Offsets:
    return times or (given if isinstance(given, dict) else {})


def ranges(store: Store, selection: Selection, options: ReadOptions) -> list[tuple[int, int]]:
    """The ranges of the log, as it stands now, in which messages of a selection can lie."""
    low, high = log_bounds(store) if selection.bounds is None else log_range(store, selection.bounds)
    # A damaged segment tells no time: then the tasks leave out what is not wanted.
    begin, end = (selection.begin, selection.end) if options["failOnDataLoss"] else (None, None)
    return time_ranges(store, begin, end, low, high)


def log_bounds(store: Store) -> tuple[int, int]:
    """All of the log, less what Spark is appending and has not committed."""
    end, pending = beside_appends(str(store.path), lambda: store.max_phy_offset)
    check_pending(store, pending)
    return store.min_phy_offset, end if pending is None else min(pending, end)


def _messages_at(store: Store, topic: str, queue: int, offset: int) -> list[StoredMessage]:
    """The message, if any. Of a damaged one the read tells, or goes on behind it."""
    try:
        return store.pull(topic, queue, offset, 1).messages
    except CorruptFileError:
        return []


def limits_of(store: Store, bounds: Bounds) -> Limits:
    """Of each queue's range the number behind the last message's own, and where the first and the last one lie.

    In a broker's queue that lost units records have later numbers than their units; below the first one the log may
    have others of these numbers, of a topic that a broker deleted. A unit that cannot be read, or points behind the
    next one, limits nothing.
    """
    limits: Limits = {}
    for topic, queues in bounds.items():
        for queue, (begin, end) in queues.items():
            head, tail = (_in_turn(store, topic, queue, offset) if begin < end else None for offset in (begin, end - 1))
            floor = head.phy_offset if head is not None and head.queue_offset >= begin else 0
            is_later = tail is not None and tail.queue_offset >= end
            limits.setdefault(topic, {})[queue] = \
                (tail.queue_offset + 1, floor, tail.phy_offset) if tail and is_later else (end, floor, FOREVER)
    return limits


def _in_turn(store: Store, topic: str, queue: int, offset: int) -> StoredMessage | None:
    """The message of a unit that does not point behind the next one. Of a queue of inner batches only its own."""
    for message in _messages_at(store, topic, queue, offset):
        if message.queue_offset == offset:
            return message
        with contextlib.suppress(UnsupportedFormatError):
            here, following = (phy_offset_of(store, topic, queue, number) for number in (offset, offset + 1))
            return message if here == message.phy_offset < following else None
    return None


def log_range(store: Store, bounds: Bounds) -> tuple[int, int]:
    """The part of the log from the first to the last message of some queues' ranges."""
    low, high = log_bounds(store)
    first, last = high, low
    for topic, queues in bounds.items():
        for queue, (begin, end) in queues.items():
            if begin < end:
                head, tail = (_in_turn(store, topic, queue, offset) for offset in (begin, end - 1))
                first = min(first, head.phy_offset) if head is not None else low
                last = max(last, tail.phy_offset + tail.size) if tail is not None else high
    return first, last
