# SPDX-License-Identifier: Apache-2.0
"""The writing half of a Store: put, flush, clean."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar, overload

from rmq._core._message import Message, to_ms
from rmq._core._ownedlock import OwnedLock
from rmq._core._putbatch import PutBatch
from rmq._core._putter import Putter, put_result
from rmq._core._queuetable import QueueTable
from rmq.chunks import batch_items, put_chunks
from rmq.consumeroffsets import check_group, checked_queue_id
from rmq.errors import MessageTooLargeError, RowError, StoreReadOnlyError
from rmq.flushing import Flusher
from rmq.keys import check_bools, checked_int
from rmq.lock import Holder, check_same, lock_holder
from rmq.marks import Marks
from rmq.message import PutResult, PutResults
from rmq.openstore import while_open
from rmq.reading import StoreReader
from rmq.retention import CleanResult, DiskUsage, Retention, checked_rules
from rmq.storeroot import check_writable
from rmq.visible import Visible

logger = logging.getLogger("rmq")

_Answer = TypeVar("_Answer")


def system_clock() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class StoreWriter(StoreReader):
    """Writes a store whose parts a subclass has opened, and reads it. Thread-safe."""

    _clock: Callable[[], int]
    _batch: PutBatch
    _low: int  # phy offset for which the queues' first offsets were corrected last
    _flusher: Flusher
    _marks: Marks
    _put_lock: OwnedLock
    _putter: Putter[PutResult] | None
    _table: QueueTable
    _visible: Visible
    _root: os.stat_result  # of a reader's store

    # ---- putting ----

    def _check_writable(self) -> None:
        if self._closed or os.getpid() != self._pid:
            self._check_open()
        if self.mode == "r":
            raise StoreReadOnlyError(f'{self.path}: store is open "r"; open it "r+" or "a" to put')
        if self._flusher.failure is not None:
            raise StoreReadOnlyError(f"{self.path}: writing failed ({self._flusher.tell()}); reopen the store")

    def put(self, message: Message) -> PutResult:
        """Append one message; returns where it went. In the log, visible to reads of this store; SYNC_FLUSH: on disk.

        Raises IllegalMessageError, MessageTooLargeError, TypeError (no Message), StoreReadOnlyError, StoreClosedError,
        CorruptFileError (pages of the log are gone), OSError (disk full); nothing was stored then, unless its sync
        failed (SYNC_FLUSH). Source: RocketMQ CommitLog#asyncPutMessage.
        """
        try:
            if self._putter is not None and (result := self._putter.put(message)) is not None:
                return result
            self._check_writable()
            # No closure over the message: making one would cost every call.
            return self._put_chunk(partial(PutBatch.load_one, message=message),
                                   partial(put_result, kind=PutResult, message=message))  # fmt: skip
        except RowError as error:  # a message on its own has none
            error.row = None
            raise

    def put_batch(self, messages: Iterable[Message]) -> PutResults:
        """Append messages as RocketMQ's batch: one topic and queue, one store timestamp, one segment, all or none.

        Raises as put, and IllegalMessageError for transactions, delays or different queues in one batch.
        Source: RocketMQ CommitLog#asyncPutMessages.
        """
        self._check_writable()
        try:
            items = batch_items(messages)
            if not items:
                return PutResults()
            return self._put_chunk(lambda batch: batch.load(items, batch=True), _all_results, whole=True)
        except RowError as error:
            error.stored = 0
            raise

    @overload
    def put_many(self, messages: Any, *, topic: str | None = None, queue_id: int | None = None,
                 columns: Mapping[str, str] | None = None,
                 results: Literal[True] = True) -> PutResults: ...  # fmt: skip
    @overload
    def put_many(self, messages: Any, *, topic: str | None = None, queue_id: int | None = None,
                 columns: Mapping[str, str] | None = None, results: Literal[False]) -> int: ...  # fmt: skip
    def put_many(self, messages: Any, *, topic: str | None = None, queue_id: int | None = None,
                 columns: Mapping[str, str] | None = None, results: bool = True) -> PutResults | int:  # fmt: skip
        """Append many messages: an iterable of Message, anything Arrow with message columns, an iterable of such.

        Equals successive puts, each chunk (an Arrow batch or 8,192 messages, whichever is smaller; of an iterator, and
        of what dictionaries stand for, 64 MiB; no more segments than may be mapped) with one store timestamp and
        contiguous. A chunk is checked whole before its first byte is written: a bad row raises with .row and .stored
        (messages stored before; every error has it), nothing of its chunk is kept. topic, queue_id: for every row;
        columns: message field -> column name. results=False: the count.
        Raises as put, and TypeError, ValueError for columns. Cost: docs/performance.md. Source: as of put.
        """
        parts: list[PutResults] = []
        stored = 0
        try:
            check_bools(results=results)
            answer_of: Callable[[PutBatch, int], PutResults | int] = _all_results if results else _row_count
            is_list = type(messages) is list and topic is None and queue_id is None and columns is None
            if is_list and self._putter is not None and (done := self._putter.put_few(messages, results)) is not None:
                stored = done if isinstance(done, int) else len(done[0])
                return PutResults(done) if isinstance(done, tuple) else done
            self._check_writable()
            if isinstance(messages, StoreReader):
                messages = messages.scan()  # whose errors pass as they are
            for count, load in put_chunks(messages, topic, queue_id, columns):
                first = 0
                while first < count:  # once, unless that is too much for one append
                    part = self._put_chunk(partial(load, first=first), answer_of)
                    put = len(part) if isinstance(part, PutResults) else part
                    first, stored = first + put, stored + put
                    if isinstance(part, PutResults):
                        parts.append(part)
            return PutResults.joined(parts) if results else stored
        except Exception as error:
            if isinstance(error, RowError) and error.row is not None:
                error.row += stored
            with contextlib.suppress(AttributeError):  # a caller's own error may take none
                error.stored = stored + vars(error).pop("not_synced", 0)  # type: ignore[attr-defined]
            raise

    def _put_chunk(self, load: Callable[[PutBatch], None], answer_of: Callable[[PutBatch, int], _Answer], *,
                   whole: bool = False) -> _Answer:  # fmt: skip
        flusher, batch, is_put = self._flusher, self._batch, False
        flusher.check_not_nested()
        try:
            with self._put_lock:
                if self._closed or flusher.failure is not None or os.getpid() != self._pid:  # since the caller looked
                    self._check_writable()
                flusher.settle()
                try:
                    load(batch)
                    if whole:
                        self._check_batch(batch)
                    else:
                        self._log.trim(batch)
                    timestamp = to_ms(self._clock(), "clock")
                    waits, count = batch.waits, batch.count
                    end = self._log.append(batch, timestamp, self._table, whole=whole)
                    self._marks.show(end)
                    answer = answer_of(batch, timestamp)
                finally:
                    is_put = batch.is_put
                    batch.release()
                must_sync = flusher.put_done(count, timestamp, waits=waits)
            if must_sync:
                flusher.sync_put(end)
            if len(self._log.unsynced) > self._log.unsynced_limit:
                flusher.relieve()
        except (OSError, MemoryError) as error:
            if is_put:
                error.not_synced = count  # type: ignore[union-attr]  # stored all the same
            raise
        return answer

    def _check_batch(self, batch: PutBatch) -> None:
        size = batch.records_size if self.config.limits_records else batch.packed_size()
        if size > self.config.max_message_size:
            raise MessageTooLargeError(f"batch has {size} bytes, more than max_message_size "
                                       f"{self.config.max_message_size}")  # fmt: skip

    def flush(self) -> None:
        """Log, queues, index and checkpoint are on disk, of everything put before the call.

        Raises OSError: after a failed sync the store takes no more puts until it is opened again; a full disk, or no
        descriptors left, passes. StoreReadOnlyError, StoreClosedError, CorruptFileError.
        """
        self._check_writable()
        self._flusher.check_not_nested()
        self._flusher.flush()

    # ---- consumer groups ----

    def commit_offsets(self, group: str, topic: str, queue_offsets: Mapping[int, int]) -> None:
        """From where a consumer group goes on in queues of a topic: {queue_id: queue_offset}, behind what it consumed.

        At once for `groups` of this store; on disk with the next flush, timed ones too, for a broker as well. A killed
        process loses what was not flushed: the group gets these messages again, never fewer. In mode "r" it is on disk
        when the call returns, the only thing that a reader writes; beside a broker, which keeps the offsets itself, a
        StoreReadOnlyError. Of two commits for a queue the later one to be written counts. Raises ValueError (an offset
        behind the queue's end, a group with "@"), TypeError, CorruptFileError (a file of offsets that is none),
        UnsupportedFormatError (offsets in RocksDB, a light group of a broker with light queues; in mode "r" stores that
        are not written), StoreReadOnlyError, StoreClosedError, and in mode "r" OSError. Cost: an entry in memory for
        each queue; a flush writes those of all groups. In mode "r" that, and two syncs. Source: RocketMQ
        ConsumerOffsetManager#commitOffset.
        """
        check_group(group, topic)
        if not isinstance(queue_offsets, Mapping):
            raise TypeError(f"queue_offsets must be a mapping of queue ids, got {type(queue_offsets).__name__}")
        places = {checked_queue_id(queue_id): checked_int(place, "queue_offset", least=0)
                  for queue_id, place in queue_offsets.items()}  # fmt: skip

        def checked() -> dict[int, int]:
            queues = self._derive().queues  # not the files' alone: a full disk may keep them behind
            for queue_id, place in places.items():
                queue = queues.get((topic, queue_id))
                if place > (end := 0 if queue is None else queue.max_offset):
                    raise ValueError(f"queue_offset {place} lies behind the end of {topic} queue {queue_id}, {end}")
            return places

        self._commit(group, topic, checked)

    def _check_place(self) -> None:
        """Of a reader: OSError (ESTALE) where another directory, or none, lies at its path."""
        check_same(self._paths.root, self._root, self._paths.root)

    def _check_no_broker(self) -> None:
        if lock_holder(self._paths.lock) is Holder.OTHER:
            raise StoreReadOnlyError(f"{self.path}: a broker has the store, which keeps its groups' offsets itself")

    @while_open
    def _commit(self, group: str, topic: str, tell: Callable[[], dict[int, int]]) -> None:
        """tell: the queue offsets, asked while no queue begins anew."""
        if self.mode == "r":
            check_writable(self._paths)
            self._check_place()
            self._check_no_broker()

            def told() -> dict[int, int]:
                self._check_no_broker()  # again: others' commits were waited for
                return tell()

            self._offsets.commit_now(group, topic, told)
            return
        self._check_writable()
        self._offsets.commit(group, topic, tell)

    # ---- cleaning ----

    def clean(self, now: Any = None, *, dry_run: bool = False, limit: int | None = 10,
              file_reserved_time: int | None = None, max_used_percent: int | None = None, expired_queues: bool = False,
              disk_usage: DiskUsage = shutil.disk_usage) -> CleanResult:  # fmt: skip
        """Remove log segments that expired, oldest first, then the queue and index files whose messages are gone.

        A segment expires file_reserved_time hours (None: the config's) after its file's last change. now: int ms or
        aware datetime, None: the system's clock. While the disk is over max_used_percent others go too; None: the
        config's disk_space_clean_forcibly_ratio, held to [30, 85], or disk_space_warning_level_ratio, held to [35, 90],
        whichever is less; 100 (never) without clean_file_forcibly_enable. Never the last; at most `limit`, None: all.
        expired_queues: queues without messages go and begin at 0 again, but those of RocketMQ's own topics. disk_usage:
        as shutil.disk_usage. dry_run: tells only, in mode "r" too. Each removal is on disk before the next; puts and
        reads go on. Raises StoreReadOnlyError, StoreClosedError, CorruptFileError, OSError, UnsupportedFormatError,
        TypeError, ValueError. Cost: a flush, and one removal and sync for each file. Source: RocketMQ
        CleanCommitLogService, CleanConsumeQueueService.
        """
        check_bools(dry_run=dry_run, expired_queues=expired_queues)
        if not callable(disk_usage):
            raise TypeError(f"disk_usage must be callable, got {type(disk_usage).__name__}")
        at = system_clock() if now is None else to_ms(now, "now")
        rules = checked_rules(self.config, at, file_reserved_time, max_used_percent, limit, expired_queues, disk_usage)
        if dry_run:
            self._check_open()
            check_writable(self._paths)
            if self.mode == "r":
                self._derive()  # first: an empty directory's reader gets its parts with the first message
                self._visible.follow_files()
            return Retention(self._log, self._derive(), self._index, rules).plan(self._derived_end())
        self._check_writable()
        self._flusher.check_not_nested()
        with self._flusher.flush_lock:
            end = self._flusher.settled()
            retention = Retention(self._log, self._queues, self._index, rules)
            found = retention.clean(end, self._table, self._put_lock, self._flusher)
            self._low = self._log.min_phy_offset
        if found.removed:
            logger.info("%s: removed %d files, %d bytes; the log begins at phy offset %d", self._log.directories[0],
                        len(found.removed), found.freed_bytes, self._low)  # fmt: skip
        return found


def _all_results(batch: PutBatch, timestamp: int) -> PutResults:
    return PutResults((*batch.results(), timestamp))


def _row_count(batch: PutBatch, timestamp: int) -> int:
    return batch.count
