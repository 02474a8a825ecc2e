# SPDX-License-Identifier: Apache-2.0
"""The reading half of a Store: query, pull, lookup, search by time, scan. The same code for every mode."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys
from rmq._core._mapguard import lost_pages
from rmq._core._message import to_ms
from rmq.batchconsumequeue import BatchConsumeQueue, batch_queue, batch_queues
from rmq.commitlog import CHECK_CRC, CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import ConsumeQueue, Units
from rmq.errors import CorruptFileError, RmqError, StoreClosedError, UnsupportedFormatError
from rmq.index import Durable, Index
from rmq.indexfile import MAX_TIMESTAMP
from rmq.info import StoreInfo, describe
from rmq.keys import (
    MAX_MS,
    MIN_MS,
    check_keys,
    check_limit,
    checked_int,
    checked_max_num,
    encoded,
    hash_keys,
    int64_array,
    int64_offset,
    key_list,
    list_array,
    time_range,
    times_of,
    topic_names,
)
from rmq.legacy import LegacyKeys
from rmq.lock import lock_holder
from rmq.lookup import loader, newest, numbered, placed_batches, table_of
from rmq.marks import read_meta
from rmq.message import PullResult, StoredMessage, is_hex_id, parse_offset_msg_id
from rmq.paths import StorePaths
from rmq.pull import pull_from, record_before, search_from, tag_set
from rmq.query import (
    QueryManyResult,
    QueryResult,
    Wanted,
    find,
    messages_at,
    messages_with,
    newest_with_id,
    raise_with_file,
)
from rmq.queueset import QueueSet
from rmq.scan import BatchMaker, KeysOf, LostRange, aligned, checked_columns, record_batches, teller
from rmq.tables import TABLES, index_entries, log_segments, queue_bounds, queue_units, table_schema

if TYPE_CHECKING:
    import pyarrow as pa

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def while_open(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Of an open store only. When another thread closes it meanwhile, what that does to the parts is no other error and
    no answer; when pages of its files were gone, CorruptFileError in place of what was made of them.
    """

    @wraps(method)
    def checked(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        store: StoreReader = arguments[0]  # type: ignore[assignment]
        store._check_open()
        try:
            try:
                answer = method(*arguments, **options)
            finally:
                if lost_pages() and not store.closed:
                    store._check_maps()
            store._check_open()
            return answer
        except (ValueError, OSError, RmqError) as error:
            store._check_open()
            raise_with_file(store._log, error)
            raise

    return checked


class StoreReader(ABC):
    """Reads a store whose parts a subclass has opened. Thread-safe."""

    path: Path
    mode: str
    config: StoreConfig
    _paths: StorePaths
    _log: CommitLog
    _queues: QueueSet
    _index: Index
    _closed: bool
    _pid: int
    _foreign_queues: UnsupportedFormatError | None
    _foreign_index: UnsupportedFormatError | None
    _legacy: LegacyKeys
    _batch_queue: BatchConsumeQueue | None = None  # the last one asked for

    @abstractmethod
    def _log_end(self) -> int:
        """End of the log for this answer."""

    @abstractmethod
    def _derive(self) -> QueueSet:
        """The queues, level with the log."""

    @abstractmethod
    def _derived_end(self) -> int:
        """End of the log that the queues were brought level with, or a later one."""

    @abstractmethod
    def _uncovered(self) -> tuple[int, list[tuple[int, int]], Durable | None]:
        """End of the log, the ranges of it that the index does not cover, and what of a crashed one counts."""

    @abstractmethod
    def _follow_index(self) -> None:
        """See the index files as they are now; a writing store's are level with the log, or OSError (disk full)."""

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path}: store is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self.path}: store was opened by the parent process; open it again by its path")

    @abstractmethod
    def _writer_now(self) -> object:
        """What differs when another process began to write; None when this one writes."""

    # ---- bounds ----

    def _check_maps(self) -> None:
        self._log.check()
        self._index.check()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    @while_open
    def min_phy_offset(self) -> int:
        """First byte of the log that is still there; 0 for an empty log."""
        self._log_end()
        return self._log.min_phy_offset

    @property
    @while_open
    def max_phy_offset(self) -> int:
        """End of the last whole record: where the next one goes."""
        return self._log_end()

    @while_open
    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Queues that hold or held messages: {topic: {queue_id: (min_queue_offset, max_queue_offset)}}.

        Raises StoreClosedError, CorruptFileError, UnsupportedFormatError (queues in RocksDB). Cost: in a reader a look
        at the directories, and the records that came since.
        """
        self._check_queues()
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for (topic, queue_id), queue in sorted(self._derive().queues.items()):
            if queue.max_offset:
                found.setdefault(topic, {})[queue_id] = (queue.min_offset, queue.max_offset)
        for batched in batch_queues(self._paths.batch_consume_queue, self._log.min_phy_offset):
            if batched.max_offset:
                found.setdefault(batched.topic, {})[batched.queue_id] = batched.min_offset, batched.max_offset
        return found

    def _check_queues(self) -> None:
        if self._foreign_queues is not None:
            raise self._foreign_queues

    @while_open
    def info(self) -> StoreInfo:
        """Who wrote the store, how it was left, its bounds, and what its queues and index cover.

        Cost: a few records for each queue. Raises StoreClosedError, CorruptFileError.
        """
        queues = self._derive() if self._foreign_queues is None else self._queues
        log_end, uncovered = (self._log_end(), []) if self._foreign_index is not None else self._uncovered()[:2]
        foreign = [error.what for error in (self._foreign_queues, self._foreign_index) if error is not None]
        return describe(str(self.path), self._paths, self._log, queues, self._index, self.config, log_end=log_end,
                        uncovered=uncovered, meta=read_meta(self._paths), foreign=foreign,
                        is_open=self.mode != "r" or lock_holder(self._paths.lock) is not None)  # fmt: skip

    # ---- by key ----

    @while_open
    def query(self, topic: str, key: str, *, begin: Any = None, end: Any = None, limit: int | None = 32,
              complete: bool = True) -> QueryResult:  # fmt: skip
        """Messages of one topic that carry a key among KEYS or as UNIQ_KEY, newest first (descending phy offset).

        begin, end: store timestamp, inclusive, int ms or aware datetime. limit >= 1, None: all; .truncated tells when
        it cut. Exact: hash collisions never show, each message comes once. Ranges that no index file covers are
        scanned; complete=False leaves them out, and .complete tells.
        Raises StoreClosedError, CorruptFileError, TypeError, ValueError. Cost: one chain per index file, one record
        read per candidate, less those whose entries tell another time. Source: RocketMQ
        DefaultMessageStore#queryMessage.
        """
        name = self._checked_query(topic, [key], limit)
        first, last = time_range(begin, end)
        log_end, uncovered, (_, offsets) = self._candidates(lambda: hash_str_keys([key], topic), first, last)
        ranges = uncovered if complete else []
        messages, truncated = messages_with(self._log, name, key, offsets.tolist(), ranges, log_end, begin=first,
                                            end=last, limit=limit)  # fmt: skip
        return QueryResult(messages, complete or not uncovered, truncated, sum(stop - start for start, stop in ranges))

    @while_open
    def query_many(self, topic: str, keys: Any, *, begin: Any = None, end: Any = None, limit: int | None = 32,
                   columns: Iterable[str] | None = None, complete: bool = True) -> QueryManyResult:  # fmt: skip
        """query for many keys at once: a table with key_index (position in `keys`) and message columns.

        keys: list of str, numpy text, or an Arrow string array. begin, end: as of query, or a NumPy array of ms, one
        for each key. limit: of each key. columns: as of scan. Raises as query. Cost: as of query for each key, with
        the waits for memory of many at a time. Memory: all of the rows. Source: as of query.
        """
        import pyarrow as pa

        names = checked_columns(columns)
        listed = key_list(keys)
        name = self._checked_query(topic, listed, limit)
        first = times_of(begin, "begin", MIN_MS, len(listed))
        last = times_of(end, "end", MAX_MS, len(listed))
        low, high = int(np.min(first, initial=MAX_MS)), int(np.max(last, initial=MIN_MS))
        log_end, uncovered, candidates = self._candidates(lambda: hash_str_keys(listed, topic), low, high)
        found = find(self._log, name, listed, candidates, uncovered if complete else [], log_end, begin=first, end=last,
                     limit=limit, is_all=names == ("phy_offset",))  # fmt: skip
        if found.is_sound:
            table, key_index, truncated = pa.table({"phy_offset": found.phy_offsets}), found.numbers, found.truncated
        else:
            table, placed = table_of(self._placed(found.phy_offsets, names, log_end, crc=True,
                                                  keys_of=lambda place: {listed[found.numbers[place]]}))  # fmt: skip
            table, key_index, truncated = newest(table, found, np.sort(placed), limit)
        table = numbered("key_index", key_index.astype(np.int64), table)
        return QueryManyResult(table, complete or not uncovered, bool(truncated.any()), np.flatnonzero(truncated))

    def _checked_query(self, topic: str, keys: list[str], limit: int | None) -> bytes:
        """The topic of a query whose topic, keys and limit are as they should be."""
        if self._foreign_index is not None:
            raise self._foreign_index
        check_limit(limit)
        name = encoded(topic, "topic")
        check_keys(keys)
        return name

    def _candidates(self, hashes: Callable[[], npt.NDArray[np.int32]], begin: int = MIN_MS,
                    end: int = MAX_MS) -> tuple[int, list[tuple[int, int]], Pairs]:  # fmt: skip
        """End of the log, ranges to scan, and what the index holds of the rest; asked again when a writer began."""
        while True:
            writer = self._writer_now()
            log_end, uncovered, durable = self._uncovered()
            ranges = [*self._legacy_ranges(log_end, uncovered), *uncovered]
            pairs = self._index.collect(hashes(), begin, end, durable)
            if self._writer_now() == writer:
                return log_end, ranges, pairs

    def _legacy_ranges(self, log_end: int, uncovered: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The single records whose keys RocketMQ <= 4.9.0 indexed otherwise than they read."""
        covered = uncovered[-1][0] if uncovered and uncovered[-1][1] >= log_end else log_end
        return self._legacy.ranges(self._log, self._index, self.config, covered, log_end)

    @while_open
    def select_phy_offset_many(self, topic: str, keys: Any, *, max_num: int = 32, begin: Any = 0,
                               end: Any = MAX_TIMESTAMP) -> pa.ListArray:  # fmt: skip
        """RocketMQ's raw index answers for each key: list<int64> of phy offsets, newest first, keys not compared.

        max_num is capped at max_msgs_num_batch. The files as they are: after power loss, until the store is opened for
        writing, lost entries may hide older ones. Raises StoreClosedError, CorruptFileError, TypeError, ValueError,
        OSError (no room to write entries: disk full). Cost: one chain per key and index file. Source: RocketMQ
        IndexService#queryOffset.
        """
        encoded(topic, "topic")
        self._follow_index()
        first, last = to_ms(begin, "begin"), to_ms(end, "end")
        return list_array(*self._index.select(hash_keys(keys, topic), checked_max_num(max_num), first, last))

    # ---- by id ----

    @while_open
    def lookup(self, id: int | str | tuple[str, int, int], *, topic: str | None = None) -> StoredMessage:
        """The message of an id: phy_offset (int), offset_msg_id, uniq_key, or (topic, queue_id, queue_offset).

        A text of 32 or 56 hex digits is an offset_msg_id if the record there says so, else a uniq_key; `topic` limits
        the search for it, else every topic with a queue is tried, which prepared messages have none of. A rollback is
        in no index. queue_offset: as of pull. An int gives an inner batch as one. Raises KeyError (no such message),
        StoreClosedError, CorruptFileError, UnsupportedFormatError, TypeError, ValueError. Cost: one record read; of a
        uniq_key as of query, for each topic. Source: DefaultMessageStore#lookMessageByOffset, MQAdminImpl#viewMessage.
        """
        if isinstance(id, bool) or not isinstance(id, int | str | tuple | list | np.integer):
            raise TypeError(f"id must be int, str or (topic, queue_id, queue_offset), got {type(id).__name__}")
        if topic is not None:
            encoded(topic, "topic")
        if isinstance(id, int | np.integer):
            return self._at(int(id))
        if not isinstance(id, str):
            if len(id) != 3:
                raise ValueError(f"id must be (topic, queue_id, queue_offset), got {len(id)} items")
            place_topic, queue_id, queue_offset = id
            answer = self.pull(place_topic, queue_id, queue_offset, 1)
            if answer.messages and answer.next_queue_offset - 1 == queue_offset:
                return answer.messages[0]
            raise KeyError(id)
        if is_hex_id(id):
            try:
                message = self._at(parse_offset_msg_id(id).phy_offset)
            except KeyError:
                pass
            else:
                if message.offset_msg_id == id.upper():
                    return message
        return self._by_uniq_key(id, topic)

    @while_open
    def lookup_many(self, phy_offsets: Any, *, columns: Iterable[str] | None = None, check_crc: bool = True,
                    sizes: Any = None) -> pa.Table:  # fmt: skip
        """Messages at phy offsets, in their order: a table with place (position in phy_offsets) and message columns.

        Offsets at which no whole record starts are left out. columns: as of scan. check_crc: a body whose CRC differs
        is a CorruptFileError. sizes: of the records, as units tell them: when these lie far apart the disk is asked for
        all at once, for nothing between them. An inner batch gives a row for each message. Raises StoreClosedError,
        CorruptFileError, TypeError, ValueError. Cost: one record read for each. Memory: all of the rows.
        """
        names, wanted = checked_columns(columns), int64_array(phy_offsets, "phy_offsets")
        table, placed = table_of(self._placed(wanted, names, self._log_end(), sizes, crc=check_crc))
        return numbered("place", np.sort(placed), table)

    def _placed(self, at: Any, names: Any, end: int, sizes: Any = None, *, crc: bool, skip_damage: bool = False,
                keys_of: KeysOf | None = None, **limit: int) -> Iterator[Any]:  # fmt: skip
        """What lookup_many makes a table of: who reads gigabytes takes it batch by batch."""
        load = loader(self._log, at, sizes, check_crc=crc, skip_damage=skip_damage)
        return self._while_open(placed_batches(load, at, end, names, keys_of=keys_of, **limit))

    def _at(self, phy_offset: int) -> StoredMessage:
        if -(2**63) <= phy_offset < 2**63:
            found = messages_at(self._log, np.array([phy_offset], np.int64), self._log_end(), check_crc=True)
            if phy_offset in found:
                return found[phy_offset]
        raise KeyError(phy_offset)

    def _by_uniq_key(self, uniq_key: str, topic: str | None) -> StoredMessage:
        key, name = encoded(uniq_key, "id"), None if topic is None else encoded(topic, "topic")

        def hashes() -> npt.NDArray[np.int32]:
            is_told = topic is not None or self._foreign_queues is not None or self._queues.damage
            queues = self._queues if is_told else self._derive()  # a reader learns of topics newer than its open
            known = {name for name, _ in [*queues.queues, *queues.damage]}
            topics = sorted(known) if topic is None else [topic]
            return hash_str_keys([f"{name}#{uniq_key}" for name in topics])

        log_end, uncovered, (_, offsets) = self._candidates(hashes)
        found = newest_with_id(self._log, (name, key), offsets.tolist(), uncovered, log_end)
        if found is None:
            raise KeyError(uniq_key)
        return found

    # ---- by queue ----

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | BatchConsumeQueue | None:
        encoded(topic, "topic")
        number = checked_int(queue_id, "queue_id")
        self._check_queues()
        queues = self._derive()
        # A topic of inner batches has its single messages in the same queue.
        queue = self._batch_queue = batch_queue(self._paths.batch_consume_queue, topic, number,
                                                self._log.min_phy_offset, known=self._batch_queue)  # fmt: skip
        return queue if queue is not None and queue.max_offset else queues.queues.get((topic, number))

    def _ask_queue(self, topic: str, queue_id: int,
                   ask: Callable[[ConsumeQueue | BatchConsumeQueue | None], _Answer]) -> _Answer:  # fmt: skip
        """ask(queue), again when the queue was cleaned meanwhile, and maybe began anew."""
        while True:
            begun = self._log.min_phy_offset
            queue = self._queue(topic, queue_id)
            end = queue.max_offset if queue is not None else 0
            try:
                return ask(queue)
            except CorruptFileError:
                self._queue(topic, queue_id)
                if self._log.min_phy_offset == begun and (queue is None or queue.max_offset >= end):
                    raise

    def _end_for(self, queue: ConsumeQueue | BatchConsumeQueue | None) -> int:
        """End of the log, not older than the queue's bounds."""
        return self._log_end() if isinstance(queue, BatchConsumeQueue) else self._derived_end()

    @while_open
    def pull(self, topic: str, queue_id: int = 0, queue_offset: int = 0, limit: int = 32, *,
             tags: str | None = None) -> PullResult:  # fmt: skip
        """Up to `limit` messages (0: one) of a queue from a queue offset on, RocketMQ's status and the queue's bounds.

        tags: "A || B" or "*", compared as text. next_queue_offset: where to go on. RocketMQ's transfer caps are not
        copied. Raises CorruptFileError (a unit points to what is not its message), StoreClosedError, TypeError,
        ValueError. Cost: one read of units, one record read for each message and for each whose tags' hash is wanted.
        Source: RocketMQ DefaultMessageStore#getMessage.
        """
        place = int64_offset(queue_offset, "queue_offset")
        limit = max(1, checked_int(limit, "limit", least=0))  # RocketMQ hands out one message when asked for none too
        wanted = tag_set(tags)
        return self._ask_queue(topic, queue_id, lambda queue: pull_from(
            self._log, queue, self._end_for(queue), place, limit, wanted))  # fmt: skip

    @while_open
    def units(self, topic: str, queue_id: int, queue_offset: int, limit: int) -> Units:
        """Up to `limit` units of a queue from a queue offset on: phy offsets, sizes, tags codes, as NumPy arrays.

        Empty when there is no such queue or offset. Raises StoreClosedError, CorruptFileError, UnsupportedFormatError
        (a queue of inner batches), TypeError, ValueError. Cost: one read of the queue's files, the log is not touched.
        """
        count = checked_int(limit, "limit", least=0)
        queue = self._queue(topic, queue_id)
        if isinstance(queue, BatchConsumeQueue):
            raise UnsupportedFormatError(self.path, "units of a batch consume queue", "pull reads them")
        place = int64_offset(queue_offset, "queue_offset")
        if queue is None or not queue.min_offset <= place < queue.max_offset:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        return queue.read(place, min(count, queue.max_offset - place))

    @while_open
    def search_offset(self, topic: str, queue_id: int, timestamp: Any, boundary: str = "LOWER", *,
                      on_damage: Literal["raise", "skip"] = "raise") -> int:  # fmt: skip
        """Queue offset by store timestamp (int ms or aware datetime); exact unless times step back over 32 messages.

        LOWER: the first message at or after it, max offset when none. UPPER: the last at or before it, min offset when
        none. 0 for an unknown queue. on_damage: "skip" goes by the messages that can be read. Raises StoreClosedError,
        CorruptFileError, TypeError, ValueError. Cost: one record header per step of a binary search, and of 32.
        Source: RocketMQ ConsumeQueue#getOffsetInQueueByTime.
        """
        if boundary not in ("LOWER", "UPPER"):
            raise ValueError(f"boundary must be LOWER or UPPER, got {boundary!r}")
        skips_damage = teller(on_damage, None) is not None
        time = to_ms(timestamp, "timestamp", boundary == "LOWER")
        return self._ask_queue(topic, queue_id, lambda queue: search_from(
            self._log, queue, self._log_end(), time, boundary, skips_damage=skips_damage))  # fmt: skip

    # ---- ranges ----

    @while_open
    def scan(self, *, topics: Iterable[str] | None = None, keys: Any = None, begin: Any = None, end: Any = None,
             begin_phy_offset: int | None = None, end_phy_offset: int | None = None,
             columns: Iterable[str] | None = None, batch_rows: int = 8192, batch_bytes: int = 8 * 1024 * 1024,
             check_crc: bool = True, on_damage: Literal["raise", "skip"] = "raise",
             lost: list[LostRange] | None = None, skip_removed: bool = True) -> pa.RecordBatchReader:  # fmt: skip
        """The log's messages in log order as a stream of Arrow record batches.

        topics: those only. keys: those that query_many finds by one of them, but without the index. begin, end: store
        timestamp, inclusive. begin_phy_offset, end_phy_offset: records that start in [begin, end). columns: names of
        StoredMessage, raw_* only when asked for. A batch has at most batch_rows rows and ends soon after batch_bytes
        bytes. check_crc: a body whose CRC differs is damage. The end of the log is taken now. Memory: about two
        batches; up to 32 MiB stay for the next ones.

        on_damage: "raise" gives what lies before the first damage, then raises CorruptFileError; "skip" goes on at the
        next whole record (magic, own offset, lengths, CRC), logs each range that it left out as a warning of the logger
        `rmq`, and appends it to `lost`. Also files that are gone or cut short are skipped then. skip_removed: whether
        "raise" passes over what is cleaned away before the scan comes to it, with a warning, or else it is damage.
        """
        import pyarrow as pa

        names = checked_columns(columns)
        named = topic_names(topics)
        listed = None if keys is None else key_list(keys)
        check_keys(listed or [])
        for name, number in (("batch_rows", batch_rows), ("batch_bytes", batch_bytes)):
            if not 1 <= checked_int(number, name) < 2**31:
                raise ValueError(f"{name} must lie in [1, 2**31), got {number}")
        tell = teller(on_damage, lost)
        first, last = time_range(begin, end)
        wanted = Wanted(named, first, last, listed)
        log_end, low = self._log_end(), self._log.min_phy_offset
        start = low if begin_phy_offset is None else int64_offset(begin_phy_offset, "begin_phy_offset")
        stop = log_end if end_phy_offset is None else int64_offset(end_phy_offset, "end_phy_offset")
        align = self._align if tell is None else partial(aligned, self._log)
        start, stop = (align(max(low, place), log_end) for place in (start, stop))
        maker, checks = BatchMaker(names), wanted.checks | (CHECK_CRC if check_crc else 0)
        batches = record_batches(self._log, start, max(start, stop), maker, batch_rows=int(batch_rows),
                                 batch_bytes=int(batch_bytes), checks=checks, skip_removed=skip_removed, tell=tell,
                                 keep=None if wanted.is_all else wanted.keep, keys=wanted.keys)  # fmt: skip
        return pa.RecordBatchReader.from_batches(maker.schema, self._while_open(batches))

    def _align(self, place: int, log_end: int) -> int:
        queues = list(self._queues.queues.values()) if self._foreign_queues is None and place < log_end else []
        return self._log.align(place, log_end, record_before(self._log, queues, place, log_end))

    @while_open
    def table(self, name: Literal["queues", "index", "topics", "segments"], *,
              topics: Iterable[str] | None = None) -> pa.RecordBatchReader:  # fmt: skip
        """One of the store's own structures as a stream of Arrow batches.

        "queues": topic, queue_id, queue_offset, phy_offset, size, tags_code of each unit. "index": file, entry, slot,
        key_hash, phy_offset, store_timestamp of each entry, to the second; of a file's first entry RocketMQ counts
        from elsewhere. "topics": topic, queue_id, min_queue_offset, max_queue_offset (exclusive) of each queue.
        "segments": path, begin_phy_offset, end_phy_offset, first_store_timestamp. topics: of the first and third, those
        only. Raises StoreClosedError, CorruptFileError, UnsupportedFormatError, TypeError, ValueError. Cost: one pass
        over the files; of "segments" one record read for each.
        """
        import pyarrow as pa

        if name not in TABLES:
            raise ValueError(f"name must be one of {', '.join(TABLES)}, got {name!r}")
        batches: Iterator[pa.RecordBatch]
        named = topic_names(topics)
        chosen = None if named is None else {topic.decode() for topic in named}
        if name == "topics":
            batches = queue_bounds({topic: queues for topic, queues in self.topics().items()
                                    if chosen is None or topic in chosen})  # fmt: skip
        elif name == "queues":
            self._check_queues()
            batches = queue_units(self._derive(), chosen)
        elif name == "index":
            if self._foreign_index is not None:
                raise self._foreign_index
            self._follow_index()
            batches = index_entries(self._index)
        else:
            batches = log_segments(self._log, self._log_end())
        return pa.RecordBatchReader.from_batches(table_schema(name), self._while_open(batches))

    def _while_open(self, batches: Iterator[_Answer]) -> Iterator[_Answer]:
        following = while_open(lambda store: next(batches, None))
        while (batch := following(self)) is not None:
            yield batch

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.scan().__arrow_c_stream__(requested_schema)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"a Store cannot be pickled: pass its path {str(self.path)!r} and open it there")
