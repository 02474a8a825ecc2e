# SPDX-License-Identifier: Apache-2.0
"""Units that brokers alone make: in light queues, of messages of other topics, and in queues of inner batches.

Readers derive in memory those that are in no file yet. Source: RocketMQ MultiDispatch, LmqDispatch, BatchConsumeQueue.
"""

from __future__ import annotations

import contextlib
import logging
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
from rmq.batchconsumequeue import BatchTail, end_in_files
from rmq.commitlog import CommitLog
from rmq.consumequeue import QueueGapError
from rmq.message import MULTI_DISPATCH, StoredMessage, dispatched_to, inner_bounds
from rmq.paths import LIGHT_QUEUE_ID, LMQ_PREFIX, RETRY_PREFIX, FileVersion, StorePaths, queue_directory, version_of
from rmq.queueset import QueueSet
from rmq.topics import SCHEDULE_TOPIC, SYSTEM_PREFIX, batch_topics

logger = logging.getLogger("rmq")

TAIL_UNITS = 1 << 16  # of a queue of inner batches, before files are asked which they have
LIGHT_QUEUES = 1 << 16  # without files: a message may name thousands


class LightUnit(NamedTuple):
    topic: str
    queue_offset: int
    unit: bytes


class BrokerUnits:
    """What readers of a broker's store make of records beside the units of their own queues."""

    def __init__(self, paths: StorePaths, log: CommitLog, queues: QueueSet, table: QueueTable) -> None:
        self._paths, self._log, self._queues, self._table = paths, log, queues, table
        self._looked_at = 0  # queue numbers
        self._batched: dict[int, tuple[str, int]] = {}  # queues of inner batches by number
        self._configured: tuple[FileVersion | None, frozenset[str]] = None, frozenset()
        self._kept: dict[tuple[str, int], int] = {}  # units of each that are in no file
        self._made: set[str] = set()  # light queues
        self._is_told = False  # that there are too many
        self._ends: dict[str, int] = {}  # of light queues, as messages up to _derived say
        self._derived = 0

    # ---- queues of inner batches ----

    def batched(self, batch: RecordBatch, begin: int, *, fills_gaps: bool) -> dict[int, tuple[str, int]]:
        """Keep the units of rows from a phy offset on in queues of inner batches; returns all of these by number.

        QueueGapError, unless fills_gaps, where the files end before them.
        """
        while self._looked_at < len(self._table):
            key = self._key(self._looked_at)
            if key is not None and (key[0] in self._batch_topics() or self._has_units(key)):
                self._batched[self._looked_at] = key
            self._looked_at += 1
        numbers, sys_flags = batch.numbers("queue"), batch.numbers("sys_flag")
        has_unit = (batch.numbers("phy_offset") >= begin) & (sys_flags & SYS_FLAG_PREPARED == 0)
        for number in np.unique(numbers[has_unit & (sys_flags & SYS_FLAG_INNER_BATCH != 0)]).tolist():
            if number not in self._batched:
                self._learn(number)
        own = np.flatnonzero(has_unit & np.isin(numbers, list(self._batched)))
        for number in np.unique(numbers[own]).tolist():
            self._keep(self._batched[number], _batch_units(batch, own[numbers[own] == number]), fills_gaps)
        return self._batched

    def _keep(self, key: tuple[str, int], units: npt.NDArray[np.int64], fills_gaps: bool) -> None:
        if not len(units):
            return
        tails, directory = self._queues.batch_tails, queue_directory(self._paths.batch_consume_queue, *key)
        if key not in tails and not fills_gaps and 0 <= (end := end_in_files(directory)[0]) < units[0, 4]:
            raise QueueGapError(f"{directory}: units {end} to {units[0, 4] - 1} are missing")
        tail = tails.setdefault(key, BatchTail())
        tail.put(units)
        if len(tail) > max(TAIL_UNITS, 2 * self._kept.get(key, 0)):  # where files do not grow, seldom
            tail.drop(end_in_files(directory)[1])
            self._kept[key] = len(tail)

    def _key(self, number: int) -> tuple[str, int] | None:
        """None when the topic cannot name a directory."""
        topic, queue_id = self._table.queue(number)
        name = decode_text(topic)
        return (name, queue_id) if name.encode() == topic and _is_name(name) and queue_id >= 0 else None

    def _has_units(self, key: tuple[str, int]) -> bool:
        return end_in_files(queue_directory(self._paths.batch_consume_queue, *key))[0] > 0

    def _batch_topics(self) -> frozenset[str]:
        version = version_of(str(self._paths.topics_json))
        if version != self._configured[0]:
            self._configured = version, frozenset()
            with contextlib.suppress(OSError):  # the batches themselves tell
                self._configured = version, batch_topics(self._paths.topics_json)
        return self._configured[1]

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
                self._keep(key, _batch_units(batch, np.arange(len(batch))), True)
            del self._queues.queues[key]

    # ---- light queues ----

    def light(self, batch: RecordBatch, begin: int, units: bytes) -> Iterator[LightUnit]:
        """Units in light queues, of rows from a phy offset on. units: of the rows in their own queues.

        What lies below a queue's end was put before, or is a copy that says what its original had; a queue that was
        deleted begins at 0 again. What lies behind the end goes there when the messages before were looked at. Source:
        ConsumeQueue#putMessagePositionInfo.
        """
        if begin != self._derived:
            self._ends = {}
        self._derived = -1  # until all are put: a gap begins anew
        rows = rows_with(batch, MULTI_DISPATCH.encode())
        places = unpack_units(units)[0] if rows else np.empty(0, np.int64)
        for row in rows:
            message = stored_at(batch, row, StoredMessage)
            found = np.flatnonzero(places == message.phy_offset)
            if message.phy_offset < begin or not len(found):
                continue
            at, is_copy = int(found[0]) * UNIT_SIZE, _is_copied(message.topic)
            for topic, queue_offset in dispatched_to(message.properties).items():
                if not topic.startswith(LMQ_PREFIX) or not _is_name(topic) or not self._may_make(topic):
                    continue
                queue = self._queues.open(topic, LIGHT_QUEUE_ID)
                end = queue.max_offset
                if queue.phy_offset_below(end) >= message.phy_offset:
                    continue  # it has its unit, or is of a queue that was deleted
                following = self._ends.get(topic, end)
                if queue_offset == following or not (is_copy or 0 < queue_offset < following):
                    first = end if topic in self._ends and queue_offset else queue_offset
                    self._ends[topic] = queue_offset + 1
                    yield LightUnit(topic, first, units[at : at + UNIT_SIZE])
        self._derived = batch.next_phy_offset

    def _may_make(self, topic: str) -> bool:
        if (topic, LIGHT_QUEUE_ID) in self._queues.queues or topic in self._made:
            return True
        if len(self._made) == LIGHT_QUEUES and not self._is_told:
            self._is_told = True
            logger.warning("%s: over %d light queues have no files; of more nothing is derived", self._paths.root,
                           LIGHT_QUEUES)  # fmt: skip
        if len(self._made) < LIGHT_QUEUES:
            self._made.add(topic)
        return topic in self._made


def _is_copied(topic: str) -> bool:
    """Whether RocketMQ 5.2 makes no light units of a topic's messages: they are copies, of what is tried again or
    waits. Older releases make some of them, and write their own offsets. Source: MixAll#topicAllowsLMQ.
    """
    return topic.startswith((RETRY_PREFIX, SYSTEM_PREFIX)) or topic == SCHEDULE_TOPIC


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
