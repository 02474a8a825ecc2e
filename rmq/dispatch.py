# SPDX-License-Identifier: Apache-2.0
"""The dispatch flow: records of the log, in log order, to consume-queue units and index entries. Restartable.

Live puts, catching up after a crash and rebuilding from nothing are this one function.
Source: RocketMQ DefaultMessageStore.ReputMessageService#doReput.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from rmq._core._consumequeue import pack_units
from rmq._core._javahash import decode_text
from rmq._core._layout import SYS_FLAG_PREPARED, UNIT_SIZE
from rmq._core._mapguard import lost_pages
from rmq._core._message import check_directory
from rmq._core._queuetable import QueueTable
from rmq._core._record import HASH_KEYS, LEGACY_PROPERTIES, PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import are_of_queue
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import Told
from rmq.paths import LIGHT_QUEUE_ID

logger = logging.getLogger("rmq")

# Of a batch: units, then entries are made of records that the cache still holds.
BATCH_ROWS = 8192
BATCH_BYTES = 16 * 1024 * 1024
# A queue's units are one write to its file, which costs as much as dozens of records: with many queues batches grow.
UNITS_EACH = 16
MANY_ROWS = 65536
BEHIND = 1000  # messages that are worth a dispatch where few queues take them
FILL_LIMIT = 1 << 20  # places, 20 MB of units


Queue = TypeVar("Queue", bound="UnitSink")


class UnitSink(Protocol):
    """A queue, as ConsumeQueue."""

    def append(self, first: int, data: bytes, lost_below: int | None = None, told: Told | None = None) -> None: ...


class QueueSink(Protocol[Queue]):
    """The queues, as QueueSet."""

    def open(self, topic: str, queue_id: int) -> Queue: ...
    def touch(self, queue: Queue) -> None: ...


class OtherUnits(Protocol):
    """As BrokerUnits."""

    def batched(self, batch: RecordBatch, begin: int, *, fills_gaps: bool) -> Collection[int]: ...
    def light(self, batch: RecordBatch, begin: int, units: bytes) -> Iterable[tuple[str, int, bytes]]: ...


class KeySink(Protocol):
    """The index, as Index."""

    def end(self) -> tuple[int, int]: ...
    def put_rows(self, batch: RecordBatch, row: int, key: int) -> tuple[int, int]: ...


class Dispatcher(Generic[Queue]):
    """Moves queues and index up to the log's end. queue_phy_offset, index_phy_offset: how far each has come.

    index_key: keys of the record at index_phy_offset that are in the index already.
    """

    def __init__(self, log: CommitLog, queues: QueueSink[Queue], index: KeySink | None,
                 config: StoreConfig) -> None:  # fmt: skip
        self.queue_phy_offset = 0
        self.index_phy_offset = 0
        self.index_key = 0
        self._is_putting = False  # into the index; still so when that was interrupted
        self.fills_gaps = False  # whether records before the first dispatched one are gone for good
        self.last_unit_timestamp = 0  # store timestamp of the last record that got a unit
        self.wanted = BEHIND  # messages that are worth the next dispatch, by what the last one met
        self._filled = 0  # places whose messages are missing
        self._log = log
        self._queues = queues
        self._index = index
        self.table = QueueTable()
        self.others: OtherUnits | None = None  # for readers of brokers' stores
        self.is_brokers = True  # whether a broker has put what is dispatched; a writer of ours makes no others
        self.own_end = 0  # below it all is ours, whatever it says
        self._by_number: list[Queue | None] = []
        self._batch: RecordBatch | None = None
        self._delay_levels = np.array(config.delay_levels_ms, np.int64)
        self._checks = PARSE_PROPERTIES | HASH_KEYS | (LEGACY_PROPERTIES if config.parses_legacy_properties else 0)
        self._lost = 0  # pages, when the last dispatch began
        self.lock = threading.RLock()

    @property
    def phy_offset(self) -> int:
        """Up to where both queues and index have come."""
        return self.queue_phy_offset if self._index is None else min(self.queue_phy_offset, self.index_phy_offset)

    def advance(self, end: int) -> None:
        """Dispatch every record below `end`, which must be whole. May be called again after any error.

        Raises CorruptFileError, QueueGapError, OSError of the disk.
        """
        with self.lock:
            if self.queue_phy_offset < self.own_end < end:
                self.advance(self.own_end)
            begin = self.phy_offset
            if begin >= end:
                return
            self._lost = lost_pages()
            if self.queue_phy_offset <= self._log.min_phy_offset:
                self._filled = 0
            if self._is_putting and self._index is not None:
                phy_offset, keys = self._index.end()
                if phy_offset >= self.index_phy_offset:
                    self.index_phy_offset, self.index_key = phy_offset, keys
                self._is_putting = False
            if self._batch is None:
                self._batch = RecordBatch(BATCH_ROWS)
            # What is cleaned away beside a reader must not be passed over: its units are in the writer's files.
            scan = self._log.scan(begin, end, batch=self._batch, skip_removed=False, checks=self._checks,
                                  queues=self.table, byte_limit=BATCH_BYTES)  # fmt: skip
            self.wanted = BEHIND
            for batch in scan:
                self._add_units(batch)
                if self._index is not None:
                    self._add_entries(self._index, batch)
            if scan.phy_offset < end:
                raise self._log.damage(scan.phy_offset, scan.stop)
            # A blank record at the end of a segment belongs to what is done.
            self.queue_phy_offset = max(self.queue_phy_offset, end)
            if self._index is not None:
                self.index_phy_offset = max(self.index_phy_offset, end)

    def forget_queues(self) -> None:
        """The next unit of each queue goes where `queues` opens it then."""
        with self.lock:
            self._by_number.clear()

    def _queue(self, number: int) -> Queue | None:
        """The queue of a number in the table; None when its topic cannot name a directory."""
        while len(self._by_number) <= number:
            topic, queue_id = self.table.queue(len(self._by_number))
            name = decode_text(topic)
            try:
                if check_directory(name) != topic or queue_id < 0:
                    raise ValueError("not UTF-8, or a negative queue id")
            except ValueError as error:
                logger.warning("messages of topic %r, queue %d, get no queue: %s", topic, queue_id, error)
                self._by_number.append(None)
            else:
                self._by_number.append(self._queues.open(name, queue_id))
        return self._by_number[number]

    def _add_units(self, batch: RecordBatch) -> None:
        if batch.row_at(self.queue_phy_offset) == len(batch):
            return
        units, runs = pack_units(batch, self._delay_levels, self.queue_phy_offset)
        self._log.check(self._lost)
        data = units.tobytes()
        lost_below = self._log.min_phy_offset if self.fills_gaps else None
        made = self._runs(data, runs.tolist())
        if self.others is not None and self.is_brokers and batch.next_phy_offset > self.own_end:
            made = self._with_others(self.others, batch, data, runs.tolist())
        for queue, first, run in made:
            queue.append(first, run, lost_below, self)
            self._queues.touch(queue)
        has_unit = np.flatnonzero(batch.numbers("sys_flag") & SYS_FLAG_PREPARED == 0)  # ROLLBACK has this bit too
        if len(has_unit):
            self.last_unit_timestamp = batch.store_timestamp(int(has_unit[-1]))
        self.queue_phy_offset = batch.next_phy_offset
        many = min(UNITS_EACH * len(runs), MANY_ROWS)
        self.wanted = max(self.wanted, many)
        batch.allow(MANY_ROWS if many > BATCH_ROWS else BATCH_ROWS)

    def _runs(self, units: bytes, runs: list[list[int]],
              but: Collection[int] = ()) -> Iterator[tuple[Queue, int, bytes]]:  # fmt: skip
        """(queue, queue offset, units) of runs of pack_units, of queues with a directory; but: of others than these."""
        for number, first, at, count in runs:
            queue = self._queue(number) if number not in but else None
            if queue is not None:
                yield queue, first, units[at * UNIT_SIZE : (at + count) * UNIT_SIZE]

    def _with_others(self, others: OtherUnits, batch: RecordBatch, units: bytes,
                     runs: list[list[int]]) -> Iterator[tuple[Queue, int, bytes]]:  # fmt: skip
        """_runs, and what a broker makes beside them."""
        batched = others.batched(batch, self.queue_phy_offset, fills_gaps=self.fills_gaps)
        yield from self._runs(units, runs, batched)
        for topic, first, unit in others.light(batch, self.queue_phy_offset, units):
            yield self._queues.open(topic, LIGHT_QUEUE_ID), first, unit

    def holds(self, topic: str, queue_id: int, queue_offset: int | None, phy_offset: int, size: int) -> bool:
        """Whether the log has a message of a queue and queue offset (None: any) at a phy offset, of a size."""
        segment = self._log.segment_at(phy_offset)
        if segment is None or not segment.path.exists():  # cleaned away: a map shows it still
            return False
        queue_offsets = None if queue_offset is None else np.array([queue_offset], np.int64)
        for batch, _ in self._log.load(np.array([phy_offset], np.int64), self._log.max_phy_offset, any_size=True):
            return are_of_queue(batch, topic.encode(), queue_id, queue_offsets, np.array([size], np.int32))
        return False

    def may_fill(self, count: int) -> bool:
        """Whether so many places more may be filled whose messages are missing."""
        if self._filled + count > FILL_LIMIT:
            return False
        self._filled += count
        return True

    def _add_entries(self, index: KeySink, batch: RecordBatch) -> None:
        row = batch.row_at(self.index_phy_offset)
        while row < len(batch):
            self.index_phy_offset = batch.phy_offset(row)
            self._is_putting = True
            row, self.index_key = index.put_rows(batch, row, self.index_key)
            self._log.check(self._lost)
            if row < len(batch):
                self.index_phy_offset = batch.phy_offset(row)
        self.index_phy_offset = max(self.index_phy_offset, batch.next_phy_offset)
        self._is_putting = False
