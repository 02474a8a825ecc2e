# SPDX-License-Identifier: Apache-2.0
"""Units that brokers alone make: in light queues, of messages of other topics, and in queues of inner batches.

Readers derive in memory those that are in no file yet. Source: RocketMQ MultiDispatch, LmqDispatch, BatchConsumeQueue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_units
from rmq._core._javahash import decode_text
from rmq._core._layout import SYS_FLAG_INNER_BATCH, SYS_FLAG_PREPARED, UNIT_SIZE
from rmq._core._message import check_directory
from rmq._core._queuetable import QueueTable
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import rows_with, stored_at
from rmq.batchconsumequeue import end_in_files
from rmq.commitlog import CommitLog
from rmq.consumequeue import QueueGapError
from rmq.message import MULTI_DISPATCH, StoredMessage, dispatched_to, inner_bounds
from rmq.paths import LMQ_PREFIX, RETRY_PREFIX, StorePaths, queue_directory
from rmq.queueset import QueueSet


class LightUnit(NamedTuple):
    topic: str
    queue_id: int
    queue_offset: int
    unit: bytes


class BrokerUnits:
    """What readers of a broker's store make of records beside the units of their own queues."""

    def __init__(self, paths: StorePaths, log: CommitLog, queues: QueueSet, table: QueueTable) -> None:
        self._root, self._log, self._queues, self._table = paths.batch_consume_queue, log, queues, table
        self._looked_at = 0  # queue numbers
        self._batched: dict[int, tuple[str, int]] = {}  # queues of inner batches by number

    def batched(self, batch: RecordBatch, begin: int, *, fills_gaps: bool) -> dict[int, tuple[str, int]]:
        """Keep the units of rows from a phy offset on in queues of inner batches; returns all of these by number.

        QueueGapError, unless fills_gaps, where the files end before them.
        """
        while self._looked_at < len(self._table):
            key = self._key(self._looked_at)
            if key is not None and end_in_files(queue_directory(self._root, *key)):
                self._batched[self._looked_at] = key
            self._looked_at += 1
        numbers, sys_flags = batch.numbers("queue"), batch.numbers("sys_flag")
        has_unit = (batch.numbers("phy_offset") >= begin) & (sys_flags & SYS_FLAG_PREPARED == 0)
        for number in np.unique(numbers[has_unit & (sys_flags & SYS_FLAG_INNER_BATCH != 0)]).tolist():
            if number not in self._batched:
                self._learn(number)
        for number, key in self._batched.items():
            units = _batch_units(batch, np.flatnonzero(has_unit & (numbers == number)))
            if len(units) and key not in self._queues.batch_tails and not fills_gaps:
                directory = queue_directory(self._root, *key)
                if (end := end_in_files(directory)) < units[0, 4]:
                    raise QueueGapError(f"{directory}: units {end} to {units[0, 4] - 1} are missing")
            self._queues.keep_batches(key, units)
        return self._batched

    def _key(self, number: int) -> tuple[str, int] | None:
        """None when the topic cannot name a directory."""
        topic, queue_id = self._table.queue(number)
        name = decode_text(topic)
        return (name, queue_id) if name.encode() == topic and _is_name(name) and queue_id >= 0 else None

    def _learn(self, number: int) -> None:
        """A queue turns out to be one of inner batches; the single messages before the first one are in it, too."""
        key = self._key(number)
        queue = self._queues.queues.get(key) if key is not None else None
        if key is None or (queue is not None and queue.files.starts):
            return  # a broker stores no batch there
        self._batched[number] = key
        if queue is not None:
            phy_offsets, _, _ = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
            for batch, _ in self._log.load(phy_offsets, self._log.max_phy_offset):
                self._queues.keep_batches(key, _batch_units(batch, np.arange(len(batch))))
            del self._queues.queues[key]

    def light(self, batch: RecordBatch, begin: int, units: bytes) -> Iterator[LightUnit]:
        """Units in queues of other topics, of rows from a phy offset on. units: of the rows in their own queues."""
        rows = rows_with(batch, MULTI_DISPATCH)
        places = unpack_units(units)[0] if rows else np.empty(0, np.int64)
        ends: dict[tuple[str, int], int] = {}
        for row in rows:
            message = stored_at(batch, row, StoredMessage)
            found = np.flatnonzero(places == message.phy_offset)
            if message.phy_offset < begin or not len(found):
                continue
            at = int(found[0]) * UNIT_SIZE
            for topic, queue_offset in dispatched_to(message.properties).items():
                if topic == message.topic or not _is_name(topic):
                    continue
                key = topic, 0 if topic.startswith(LMQ_PREFIX) else message.queue_id
                queue = self._queues.queues.get(key)
                end = max(ends.get(key, 0), queue.max_offset if queue is not None else 0)
                if queue_offset >= end or not message.topic.startswith(RETRY_PREFIX):
                    ends[key] = queue_offset + 1
                    yield LightUnit(*key, queue_offset, units[at : at + UNIT_SIZE])
                # else RocketMQ 5 dispatched it once; tried again it says what it had said before


def _is_name(topic: str) -> bool:
    try:
        return bool(check_directory(topic))
    except ValueError:
        return False


def _batch_units(batch: RecordBatch, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Units of rows as BatchConsumeQueue has them: of single messages, too."""
    units = np.zeros((len(rows), 6), np.int64)
    units[:, 0], units[:, 1] = batch.numbers("phy_offset")[rows], batch.numbers("size")[rows]
    units[:, 3], units[:, 4] = batch.numbers("store_timestamp")[rows], batch.numbers("queue_offset")[rows]
    units[:, 5] = 1
    for at in np.flatnonzero(batch.numbers("sys_flag")[rows] & SYS_FLAG_INNER_BATCH).tolist():
        units[at, 4:] = inner_bounds(stored_at(batch, int(rows[at]), StoredMessage))
    return units[units[:, 5] > 0]
