# SPDX-License-Identifier: Apache-2.0
"""Messages of a Store by key, through the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys
from rmq._core._message import to_ms
from rmq.arrays import number_array
from rmq.indexfile import MAX_TIMESTAMP
from rmq.keys import (
    MAX_MS,
    MIN_MS,
    check_bools,
    check_keys,
    checked_limit,
    checked_max_num,
    encoded,
    hash_keys,
    key_list,
    list_array,
    time_range,
    times_of,
)
from rmq.lookup import loader, newest, numbered, placed_batches, table_of
from rmq.openstore import OpenStore, listing, while_open
from rmq.query import QueryManyResult, QueryResult, find, messages_with
from rmq.scan import KeysOf, checked_columns

if TYPE_CHECKING:
    import pyarrow as pa

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class KeyReader(OpenStore):
    @while_open
    def query(self, topic: str, key: str, *, begin: Any = None, end: Any = None, limit: int | None = 32,
              complete: bool = True) -> QueryResult:  # fmt: skip
        """Messages of one topic that carry a key among KEYS or as UNIQ_KEY, newest first (descending phy offset).

        begin, end: store timestamp, inclusive, int ms or aware datetime. limit >= 1, None: all; .truncated tells when
        it cut. Exact: hash collisions never show, each message comes once. Ranges that no index file covers are
        scanned; complete=False leaves them out, and .complete tells.
        Raises StoreClosedError, CorruptFileError, UnsupportedFormatError (an index of RocksDB), TypeError, ValueError.
        Cost: one chain per index file, one record read per candidate, less those whose entries tell another time.
        Source: RocketMQ DefaultMessageStore#queryMessage.
        """
        check_bools(complete=complete)
        limit = checked_limit(limit)
        name = self._checked_query(topic, [key])
        first, last = time_range(begin, end)
        log_end, uncovered, (_, offsets) = self._candidates(lambda: hash_str_keys([key], topic), first, last)
        ranges = uncovered if complete else []
        messages, truncated = messages_with(self._log, name, key, offsets.tolist(), ranges, log_end, begin=first,
                                            end=last, limit=limit)  # fmt: skip
        return QueryResult(messages, complete or not uncovered, truncated, sum(stop - start for start, stop in ranges))

    @listing
    @while_open
    def query_many(self, topic: str, keys: Any, *, begin: Any = None, end: Any = None, limit: int | None = 32,
                   columns: Iterable[str] | None = None, complete: bool = True) -> QueryManyResult:  # fmt: skip
        """query for many keys at once: a table with key_index (position in `keys`) and message columns.

        keys: list of str, numpy text, or an Arrow string array. begin, end: as of query, or a NumPy array of ms, one
        for each key. limit: of each key. columns: as of scan. Raises as query. Cost: as of query for each key, with
        the waits for memory of many at a time. Memory: all of the rows. Source: as of query.
        """
        import pyarrow as pa

        check_bools(complete=complete)
        names = checked_columns(columns)
        limit = checked_limit(limit)
        listed = key_list(keys)
        name = self._checked_query(topic, listed)
        first = times_of(begin, "begin", MIN_MS, len(listed))
        last = times_of(end, "end", MAX_MS, len(listed))
        low, high = int(np.min(first, initial=MAX_MS)), int(np.max(last, initial=MIN_MS))
        hashes, groups = np.unique(hash_str_keys(listed, topic), return_inverse=True)  # a key may be asked many times
        log_end, uncovered, candidates = self._candidates(lambda: hashes, low, high)
        found = find(self._log, name, listed, groups, candidates, uncovered if complete else [], log_end, begin=first,
                     end=last, limit=limit, is_all=names == ("phy_offset",))  # fmt: skip
        if found.is_sound:
            table = pa.table({"phy_offset": number_array(found.phy_offsets)})
            key_index, truncated = found.numbers, found.truncated
        else:
            table, placed = table_of(self._placed(found.phy_offsets, names, log_end, crc=True,
                                                  keys_of=lambda place: {listed[found.numbers[place]]}))  # fmt: skip
            table, key_index, truncated = newest(table, found, np.sort(placed), limit)
        table = numbered("key_index", key_index.astype(np.int64), table)
        return QueryManyResult(table, complete or not uncovered, bool(truncated.any()), np.flatnonzero(truncated))

    def _checked_query(self, topic: str, keys: list[str]) -> bytes:
        """The topic of a query whose topic and keys are as they should be."""
        self._check_index()
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

    @listing
    @while_open
    def select_phy_offset_many(self, topic: str, keys: Any, *, max_num: int = 32, begin: Any = 0,
                               end: Any = MAX_TIMESTAMP) -> pa.ListArray:  # fmt: skip
        """RocketMQ's raw index answers for each key: list<int64> of phy offsets, newest first, keys not compared.

        max_num is capped at max_msgs_num_batch. The files as they are: after power loss, until the store is opened for
        writing, lost entries may hide older ones. Raises as query, and OSError (no room to write entries: disk full).
        Cost: one chain per key and index file. Source: RocketMQ IndexService#queryOffset.
        """
        self._check_index()
        encoded(topic, "topic")
        self._follow_index()
        first, last = to_ms(begin, "begin"), to_ms(end, "end")
        return list_array(*self._index.select(hash_keys(keys, topic), checked_max_num(max_num), first, last))

    def _placed(self, at: Any, names: Any, end: int, sizes: Any = None, *, crc: bool, skip_damage: bool = False,
                keys_of: KeysOf | None = None, **limit: int) -> Iterator[Any]:  # fmt: skip
        """What lookup_many makes a table of: who reads gigabytes takes it batch by batch."""
        load = loader(self._log, at, sizes, check_crc=crc, skip_damage=skip_damage)
        batches = placed_batches(load, at, end, names, keys_of=keys_of, **limit)
        return self._while_open(batches, ends_at_cut=False)
