# SPDX-License-Identifier: Apache-2.0
"""The reading half of a Store: by key, by queue, by id, and whole ranges. The same code for every mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys
from rmq.batchconsumequeue import BatchConsumeQueue
from rmq.errors import CorruptFileError
from rmq.info import StoreInfo, describe
from rmq.keyreading import KeyReader
from rmq.keys import (
    check_bools,
    check_keys,
    checked_int,
    encoded,
    int64_array,
    int64_offset,
    key_list,
    time_range,
    topic_names,
)
from rmq.lock import lock_holder
from rmq.logscan import CHECK_CRC
from rmq.lookup import numbered, table_of
from rmq.marks import read_meta
from rmq.message import StoredMessage, is_hex_id, parse_offset_msg_id
from rmq.openstore import listing, while_open
from rmq.paths import queue_directories
from rmq.pull import record_before
from rmq.query import Wanted, messages_at, newest_with_id
from rmq.queuereading import QueueReader
from rmq.scan import BatchMaker, checked_columns, record_batches
from rmq.tables import TABLES, index_entries, log_segments, queue_bounds, queue_units, table_schema
from rmq.wholerecords import LostRange, aligned, teller

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BATCH_BYTES = 2**30  # offsets of a column are int32, and what ends a batch goes beyond


class StoreReader(KeyReader, QueueReader):
    """Reads a store whose parts a subclass has opened. Thread-safe."""

    @while_open
    def info(self) -> StoreInfo:
        """Who wrote the store, how it was left, its bounds, and what its queues and index cover.

        Cost: a few records for each queue. Raises StoreClosedError, CorruptFileError.
        """
        queues = self._derive() if self._foreign_queues is None else None  # of files beside it nobody knows the age
        log_end, uncovered = (self._log_end(), []) if self._foreign_index is not None else self._uncovered()[:2]
        foreign = [error.what for error in (self._foreign_queues, self._foreign_index) if error is not None]
        batched: list[BatchConsumeQueue] = []
        with contextlib.suppress(CorruptFileError):  # who asks for the queue is told
            batched = self._batched() if queues is not None else []
        return describe(str(self.path), self._paths, self._log, queues, self._index, self.config, log_end=log_end,
                        batched=batched,
                        uncovered=uncovered, meta=read_meta(self._paths), foreign=foreign,
                        is_open=self.mode != "r" or lock_holder(self._paths.lock) is not None)  # fmt: skip

    # ---- by id ----

    @while_open
    def lookup(self, id: int | str | tuple[str, int, int], *, topic: str | None = None) -> StoredMessage:
        """The message of an id: phy_offset (int), offset_msg_id, uniq_key, or (topic, queue_id, queue_offset).

        A text of 32 or 56 hex digits is an offset_msg_id if the record there says so, else a uniq_key; `topic` limits
        the search for it, else every topic with a queue is tried, which prepared messages have none of. A rollback is
        in no index. queue_offset: as of pull. An int gives an inner batch as one. Raises KeyError (no such message),
        StoreClosedError, CorruptFileError, UnsupportedFormatError, TypeError, ValueError. Cost: one record read; of a
        uniq_key as of query, for each topic; beside queues in RocksDB without topic a scan of the log.
        Source: DefaultMessageStore#lookMessageByOffset, MQAdminImpl#viewMessage.
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
            except CorruptFileError:  # of what a unique key, which may be any digits, does not mean
                with contextlib.suppress(KeyError):
                    return self._by_uniq_key(id, topic)
                raise
            else:
                if message.offset_msg_id == id.upper():
                    return message
        return self._by_uniq_key(id, topic)

    @listing
    @while_open
    def lookup_many(self, phy_offsets: Any, *, columns: Iterable[str] | None = None, check_crc: bool = True,
                    sizes: Any = None) -> pa.Table:  # fmt: skip
        """Messages at phy offsets, in their order: a table with place (position in phy_offsets) and message columns.

        Offsets at which no whole record starts are left out. columns: as of scan. check_crc: a body whose CRC differs
        is a CorruptFileError. sizes: of the records, as units tell them: when these lie far apart the disk is asked for
        all at once, for nothing between them. An inner batch gives a row for each message. Raises StoreClosedError,
        CorruptFileError, TypeError, ValueError. Cost: one record read for each. Memory: all of the rows.
        """
        check_bools(check_crc=check_crc)
        names, wanted = checked_columns(columns), int64_array(phy_offsets, "phy_offsets")
        table, placed = table_of(self._placed(wanted, names, self._log_end(), sizes, crc=check_crc))
        return numbered("place", np.sort(placed), table)

    def _at(self, phy_offset: int) -> StoredMessage:
        if -(2**63) <= phy_offset < 2**63:
            log_end = self._log_end()  # first: it may be what opens the log
            found = messages_at(self._log, np.array([phy_offset], np.int64), log_end, check_crc=True)
            if phy_offset in found:
                return found[phy_offset]
        raise KeyError(phy_offset)

    def _by_uniq_key(self, uniq_key: str, topic: str | None) -> StoredMessage:
        key, name = encoded(uniq_key, "id"), None if topic is None else encoded(topic, "topic")

        def hashes() -> npt.NDArray[np.int32]:
            is_told = topic is not None or self._foreign_queues is not None or self._queues.damage
            queues = self._queues if is_told else self._derive()  # a reader learns of topics newer than its open
            batched = (key[1:] for key in queue_directories(self._paths.batch_consume_queue))
            known = {name for name, _ in [*queues.queues, *queues.damage, *batched, *queues.batch_tails]}
            topics = sorted(known) if topic is None else [topic]
            return hash_str_keys([f"{name}#{uniq_key}" for name in topics])

        log_end, uncovered, (_, offsets) = self._candidates(hashes)
        if topic is None and self._foreign_queues is not None:  # which topics there are nobody tells
            uncovered = [(self._log.min_phy_offset, log_end)]
        found = newest_with_id(self._log, (name, key), offsets.tolist(), uncovered, log_end)
        if found is None:
            raise KeyError(uniq_key)
        return found

    # ---- ranges ----

    @listing
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
        bytes, 1 GiB at most. check_crc: a body whose CRC differs is damage. The end of the log is taken now. Memory:
        about two batches; up to 32 MiB stay for the next ones.

        on_damage: "raise" gives what lies before the first damage, then raises CorruptFileError; "skip" goes on at the
        next whole record (magic, own offset, lengths, CRC), logs each range that it left out as a warning of the logger
        `rmq`, and appends it to `lost`. Also files that are gone or cut short are skipped then. skip_removed: whether
        "raise" passes over what is cleaned away before the scan comes to it, with a warning, or else it is damage.
        Raises StoreClosedError, TypeError, ValueError, and CorruptFileError at damage, from the call itself where the
        range begins in it.
        """
        import pyarrow as pa

        check_bools(check_crc=check_crc, skip_removed=skip_removed)
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
        start = align(max(low, start), log_end)
        try:
            stop = align(max(low, stop), log_end)
        except CorruptFileError:
            stop = max(low, stop)  # reading comes to the damage first, or ends where it begins
        maker, checks = BatchMaker(names), wanted.checks | (CHECK_CRC if check_crc else 0)
        batches = record_batches(self._log, start, max(start, stop), maker, batch_rows=int(batch_rows),
                                 batch_bytes=min(int(batch_bytes), MOST_BATCH_BYTES), checks=checks,
                                 skip_removed=skip_removed, tell=tell, keep=None if wanted.is_all else wanted.keep,
                                 keys=wanted.keys)  # fmt: skip
        return pa.RecordBatchReader.from_batches(maker.schema, self._while_open(batches))

    def _align(self, place: int, log_end: int) -> int:
        queues = list(self._queues.queues.values()) if self._foreign_queues is None and place < log_end else []
        try:
            return self._log.align(place, log_end, record_before(self._log, queues, place, log_end))
        except CorruptFileError:  # behind it there may be a record that a unit tells
            return self._log.align(place, log_end, record_before(self._log, queues, place, log_end, 0))

    @listing
    @while_open
    def table(self, name: Literal["queues", "index", "topics", "segments"], *,
              topics: Iterable[str] | None = None) -> pa.RecordBatchReader:  # fmt: skip
        """One of the store's own structures as a stream of Arrow batches.

        "queues": topic, queue_id, queue_offset, phy_offset, size, tags_code of each unit; queues of inner batches have
        others, and are left out. "index": file, entry, slot, key_hash, phy_offset, store_timestamp of each entry, to
        the second; of a file's first entry RocketMQ counts from elsewhere. "topics": topic, queue_id, min_queue_offset,
        max_queue_offset (exclusive) of each queue. "segments": path, begin_phy_offset, end_phy_offset,
        first_store_timestamp. topics: of the first and third, those only. Raises StoreClosedError, CorruptFileError,
        UnsupportedFormatError, TypeError, ValueError. Cost: one pass over the files; of "segments" one record read for
        each.
        """
        import pyarrow as pa

        if not isinstance(name, str) or name not in TABLES:
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
            self._check_index()
            self._follow_index()
            batches = index_entries(self._index)
        else:
            log_end = self._log_end()
            batches = log_segments(self._log, log_end)
        return pa.RecordBatchReader.from_batches(table_schema(name), self._while_open(batches))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.scan().__arrow_c_stream__(requested_schema)
