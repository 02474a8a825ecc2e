# SPDX-License-Identifier: Apache-2.0
"""Parts of a log: each is written by itself, from phy offset 0 on, and then copied to where it stands in the whole log.

Several are written at once, as none needs the records of another: where a record lies and its number in its queue stand
in the record, and the CRC of the body does not cover them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq._core._record import SCAN_ZERO
from rmq._core._recordbatch import RecordBatch
from rmq.chunks import put_chunks
from rmq.columns import put_rules
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.logscan import CHECK_CRC
from rmq.logsegment import BLANK_HEADER, Segment
from rmq.paths import segment_name
from rmq.segment import opened, sync_file, telling, write_fully

COPY_BYTES = 1024 * 1024  # or one record: so much is read, changed and written while a CPU's cache holds it

Queue = tuple[str, int]
Numbers = npt.NDArray[np.int64]


class Part(NamedTuple):
    """end: of its log, which starts at 0. queues: messages with a queue offset, by queue."""

    end: int
    queues: dict[Queue, int]


class PartWriter:
    """Appends messages to a new log in a directory: its segments, nothing else. A context manager; one thread."""

    def __init__(self, directory: Path, config: StoreConfig, store_timestamp: int) -> None:
        """store_timestamp: of all messages, ms. ValueError for a config with a CRC of whole records."""
        if config.enabled_append_prop_crc:
            raise ValueError("enabled_append_prop_crc: the CRC of a record would not hold at another place")
        self._timestamp = store_timestamp
        self._log = CommitLog([directory], config.mapped_file_size_commit_log, writable=True)
        self._batch, self._table = PutBatch(put_rules(config)), QueueTable()

    def put_many(self, messages: Any, *, topic: str | None = None, columns: Mapping[str, str] | None = None) -> int:
        """As Store.put_many with results=False."""
        stored = 0
        for count, load in put_chunks(messages, topic, None, columns):
            first = 0
            while first < count:  # once, unless that is too much for one append
                try:
                    load(self._batch, first)
                    self._log.trim(self._batch)
                    self._log.append(self._batch, self._timestamp, self._table)
                    first += len(self._batch)
                finally:
                    self._batch.release()
                if len(self._log.unsynced) > 1:
                    self._sync()
            stored += count
        return stored

    def _sync(self) -> None:
        written: list[Segment] = []
        self._log.take_unsynced(written)
        for segment in written:
            segment.file.sync()

    def finish(self) -> Part:
        """Everything is on disk but the names of the files. Raises OSError."""
        self._sync()
        return Part(self._log.position, _counted(self._table, [self._table.next_offset(number)
                                                              for number in range(len(self._table))]))  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._log.close()


def place_part(source: Path, target: Path, part: Part, *, segment_size: int, begin: int,
               queue_offsets: Mapping[Queue, int], closed: bool) -> Part:  # fmt: skip
    """Copy the part in the directory `source` so that it stands at phy offset `begin`, a segment's start, of a log:
    segments in the directory `target`, whole files of which only the used part takes space. Returns what was copied.

    queue_offsets: of the first message of each queue, 0 of others. closed: an end-of-segment record follows the last
    one, since another segment follows. Files are synced, their names are not. `source` stays.
    Raises CorruptFileError, OSError (disk full, a file that is there). Cost: one pass that checks and copies.
    """
    moved = _Moved(begin, queue_offsets)
    log = CommitLog([source], segment_size, writable=False)
    try:
        for start in range(0, part.end, segment_size):
            segment, stop = log.segment_at(start), min(part.end, start + segment_size)
            if segment is None:
                raise log.damage(start, SCAN_ZERO)
            with (opened(place := target / segment_name(begin + start), os.O_RDWR | os.O_CREAT | os.O_EXCL) as file,
                  telling(place)):  # fmt: skip
                os.ftruncate(file, segment_size)
                used = 0
                for batch in log.records(start, stop, queues=moved.table, checks=CHECK_CRC, byte_limit=COPY_BYTES):
                    position = batch.phy_offset(0) - start
                    used = batch.next_phy_offset - start
                    write_fully(file, memoryview(moved.copy(segment, position, used - position, batch)), position)
                if stop < part.end or closed:
                    write_fully(file, BLANK_HEADER.pack(segment_size - used, L.BLANK_MAGIC), used)
                sync_file(file)
    finally:
        log.close()
    return Part(part.end, moved.queues())


class _Moved:
    """The records of a part as the whole log has them."""

    def __init__(self, begin: int, queue_offsets: Mapping[Queue, int]) -> None:
        self.table = QueueTable()
        self._begin = begin
        self._queue_offsets = queue_offsets
        self._first: list[int] = []  # by number in the table
        self._counts = np.zeros(0, np.int64)

    def copy(self, segment: Segment, position: int, size: int, batch: RecordBatch) -> bytearray:
        """The bytes of a batch's records, which lie in a segment one behind the other, for the whole log."""
        data = bytearray(segment.read(position, size))
        phy_offsets, numbers = batch.numbers("phy_offset"), batch.numbers("queue")
        has_offset = batch.numbers("sys_flag") & L.SYS_FLAG_PREPARED == 0  # nor has ROLLBACK, which has this bit too
        self._learn()
        queue_offsets = batch.numbers("queue_offset") + np.array(self._first, np.int64)[numbers] * has_offset
        self._counts += np.bincount(numbers[has_offset], minlength=len(self._counts))
        positions = phy_offsets - phy_offsets[0]
        _store(data, positions + L.RECORD_PHY_OFFSET_OFFSET, phy_offsets + self._begin)
        _store(data, positions + L.RECORD_QUEUE_OFFSET_OFFSET, queue_offsets)
        return data

    def _learn(self) -> None:
        """First offsets of the queues that the last batch added to the table."""
        for number in range(len(self._first), len(self.table)):
            self._first.append(self._queue_offsets.get(_queue(self.table, number), 0))
        self._counts = np.pad(self._counts, (0, len(self._first) - len(self._counts)))

    def queues(self) -> dict[Queue, int]:
        return _counted(self.table, self._counts.tolist())


def _queue(table: QueueTable, number: int) -> Queue:
    topic, queue_id = table.queue(number)
    return topic.decode(), queue_id


def _counted(table: QueueTable, counts: list[int]) -> dict[Queue, int]:
    return {_queue(table, number): count for number, count in enumerate(counts) if count}


def _store(data: bytearray, positions: Numbers, values: Numbers) -> None:
    """Big-endian 64-bit integers at positions, which need no alignment."""
    places = np.ndarray(len(data) - 7, "V8", data, strides=(1,))
    places[positions] = values.astype(">i8").view("V8")
