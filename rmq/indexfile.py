# SPDX-License-Identifier: Apache-2.0
"""One index file. Source: RocketMQ IndexFile. Layout: docs/format/indexfile.md."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._answerlists import AnswerLists
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._mapguard import lost_pages
from rmq._core._message import to_ms
from rmq._core._record import used_size
from rmq._core._recordbatch import RecordBatch
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError, StoreClosedError, StoreReadOnlyError
from rmq.keys import Mode, check_open_mode, checked_max_num, hash_keys, hash_parts, int64_array, lists_of, ms_array
from rmq.mappedfile import MappedFile, guarded
from rmq.paths import path_text
from rmq.sidecar import open_sidecar

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("rmq")

MAX_TIMESTAMP = 2**63 - 1
RESERVE_AHEAD = 8 * 1024 * 1024  # bytes of entries, at most as many as there are
RESERVE_FIRST = 1024 * 1024
ENTRY = np.dtype([("hash", ">i4"), ("phy_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"key must be str, got {type(key).__name__}")
    return key


class IndexFile:
    """One index file with RocketMQ's own semantics, nothing added. Context manager. Any thread may read it, one at a
    time may put.

    mode: "r" opens read only, "r+" and "a" for putting ("a" creates when missing), "x" creates.
    end_phy_offset, end_timestamp: of the file before a new one; left out of the header when not above 0. Keys are
    whole index keys (`topic#key`). Raises CorruptFileError when the length does not fit the geometry, OSError of the
    system, ValueError and TypeError that name the argument.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode = "r", *, max_hash_slot_num: int = 5_000_000,
                 max_index_num: int = 20_000_000, end_phy_offset: int = 0, end_timestamp: int = 0,
                 rocketmq_version: str = "5.3.3") -> None:  # fmt: skip
        check_open_mode(mode)
        config = StoreConfig(max_hash_slot_num=max_hash_slot_num, max_index_num=max_index_num,
                             rocketmq_version=rocketmq_version)  # fmt: skip
        before = int(int64_array([end_phy_offset], "end_phy_offset")[0]), to_ms(end_timestamp, "end_timestamp")
        if not path_text(path, "path"):
            raise FileNotFoundError(errno.ENOENT, "the path of the index file is empty", "")
        self.path = Path(path)
        writable = mode != "r"
        max_hash_slot_num, max_index_num = config.max_hash_slot_num, config.max_index_num  # checked ints
        size = index_file_size(max_hash_slot_num, max_index_num)
        create = mode == "x" or (mode == "a" and not self.path.exists())
        self.slot_num = max_hash_slot_num
        self._entries_at = L.INDEX_HEADER_SIZE + max_hash_slot_num * L.INDEX_SLOT_SIZE
        self._writable = writable
        self._stores_untouched = config.stores_untouched_count
        self._view: IndexFileView | None = None
        self._looks = 0  # for a sidecar; -1: no more
        try:
            self._file = MappedFile(self.path, size=size, writable=writable, create=create)
        except CorruptFileError as error:
            if not self.path.is_file():
                raise
            raise CorruptFileError(self.path, error.offset, f"{error.reason} by max_hash_slot_num={max_hash_slot_num} "
                                   f"and max_index_num={max_index_num}") from None  # fmt: skip
        self.check_size = self._file.check_size  # after a select, which may have met zeros; no call in between
        try:
            self._view = IndexFileView(
                self._file.map, hash_slot_num=max_hash_slot_num, index_num=max_index_num, writable=writable,
                count_every_put=config.counts_every_index_put)  # fmt: skip
            if create:
                self._reserve()
                self._file.sync_all()
                self._view.preset(*before)
            elif writable:
                self._view.limit(0)  # until blocks are reserved
        except BaseException:
            if self._view is not None:
                self._view.release()
            self._file.close()
            if create:
                os.unlink(self.path)  # without blocks it is no index file
            raise
        self.look()

    @property
    def inode(self) -> int:
        return self._file.inode

    @property
    def lost(self) -> int:
        """Position of the first page that was gone when it was touched, -1: none so far."""
        return self._file.map.lost

    @property
    def view(self) -> IndexFileView:
        if self._view is None:
            raise StoreClosedError(f"{self.path}: index file is closed")
        return self._view

    def has_header(self, header: bytes) -> bool:
        """Whether its header is that one. RocketMQ's count of a file without entries is 0 when new, then 1."""
        own, at = self.view.header(), L.INDEX_COUNT_OFFSET
        counts = [max(1, int.from_bytes(each[at:], "big", signed=True)) for each in (own, header)]
        return own[:at] == header[:at] and counts[0] == counts[1]

    def has_entries(self, header: bytes) -> bool:
        """Whether its first and its last entry, of as many as a header counts, are those of that header."""
        count = int.from_bytes(header[L.INDEX_COUNT_OFFSET :], "big", signed=True)
        if not 1 < count <= self.view.index_num:
            return count <= 1
        ends = (self.entries(number, number + 1)[1] for number in (1, count - 1))
        places = (L.INDEX_BEGIN_PHY_OFFSET_OFFSET, L.INDEX_END_PHY_OFFSET_OFFSET)
        return all(int(found[0]) == int.from_bytes(header[at : at + 8], "big", signed=True)
                   for found, at in zip(ends, places, strict=True))

    def look(self) -> None:
        """Take up the sidecar of a full file. It may come later: looks are ever further apart."""
        view = self.view
        sidecar = view.sidecar  # another thread may take it off
        if sidecar is not None:
            if sidecar.is_damaged:
                logger.warning("%s: its sidecar is damaged and not used; `rmq rebuild --sidecar` makes it again",
                               self.path)  # fmt: skip
                view.sidecar, self._looks = None, -1
        elif self._looks >= 0 and view.is_full:
            self._looks += 1
            if self._looks & (self._looks - 1) == 0:
                view.sidecar = open_sidecar(self.path, self.inode, view)

    def _reserve(self) -> int:
        """Blocks for the slots, once, and for the entries to come; returns how many more entries they hold."""
        if self._file.reserved == 0:
            self._file.reserve(0, self._entries_at, self._entries_at)
        used = self.view.index_count * L.ENTRY_SIZE
        at = self._entries_at + used
        ahead = min(RESERVE_AHEAD, max(RESERVE_FIRST, used))
        self._file.reserve(at - L.ENTRY_SIZE, min(self._file.size, at + L.ENTRY_SIZE), ahead)
        self.view.limit((self._file.reserved - self._entries_at) // L.ENTRY_SIZE)
        return self.view.room

    @guarded
    def put_keys(self, keys: Any, phy_offsets: Sequence[int] | npt.NDArray[np.int64],
                 store_timestamps: Sequence[int] | npt.NDArray[np.int64]) -> int:  # fmt: skip
        """Append one entry per key; returns how many fitted. Source: IndexFile#putKey.

        keys: Arrow string array, list of str, or numpy text. The three must have one length: ValueError. Raises
        TypeError, StoreReadOnlyError, StoreClosedError, CorruptFileError (pages are gone), OSError (disk full). Cost:
        about one wait for memory a key, many at a time.
        """
        self._check_writable()
        count, parts = hash_parts(keys)
        offsets = int64_array(phy_offsets, "phy_offsets")
        times = ms_array(store_timestamps, "store_timestamps")
        if not count == len(offsets) == len(times):
            raise ValueError("keys, phy_offsets and store_timestamps must have one length")
        done = 0
        for hashes in parts:
            stop = done + len(hashes)
            done += self.put_hashes(hashes, offsets[done:stop], times[done:stop])
            if done < stop:
                break
        return done

    @guarded
    def put_hashes(self, hashes: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64],
                   times: npt.NDArray[np.int64]) -> int:  # fmt: skip
        """put_keys of keys whose hashes are known."""
        done = 0
        while done < len(hashes):
            room = self._reserve()
            if room == 0:
                break
            stop = min(len(hashes), done + room)
            done += self.view.put(hashes[done:stop], offsets[done:stop], times[done:stop])
        return done

    def put_key(self, key: str, phy_offset: int, store_timestamp: int) -> bool:
        """Append one entry; False when the file is full. Raises as put_keys. Source: IndexFile#putKey."""
        try:
            view = self._view  # another thread may close the file
            if view is not None and view.put_one(key, phy_offset, store_timestamp):
                return True
        finally:
            if lost_pages():
                self._check_maps()
        self._check_writable()
        hashes = hash_keys([_checked_key(key)])
        offsets, times = int64_array([phy_offset], "phy_offset"), ms_array([store_timestamp], "store_timestamp")
        return self.put_hashes(hashes, offsets, times) == 1

    def _check_writable(self) -> None:
        if not self._writable:
            raise StoreReadOnlyError(f"{self.path}: index file is open read only")

    @guarded
    def put_rows(self, batch: RecordBatch, row: int, key: int, index_tags: bool) -> tuple[int, int]:
        """Index some of a scanned batch from (row, key) on; returns where to go on, here or in the next."""
        self._reserve()
        return self.view.put_rows(batch, row, key, index_tags=index_tags)

    @guarded
    def select_phy_offset_many(self, keys: Any, max_num: int = 32, begin: int = 0,
                               end: int = MAX_TIMESTAMP) -> pa.ListArray:  # fmt: skip
        """RocketMQ's answers for each key, newest first, at most max_num each: list<int64>.

        begin, end: ms, compared with the stored whole seconds. Keys are not compared, only hashes. Raises TypeError,
        ValueError, StoreClosedError, CorruptFileError. Cost: the whole chain of each key's slot, many at a time.
        Source: IndexFile#selectPhyOffset.
        """
        first, last = to_ms(begin, "begin"), to_ms(end, "end")
        most = checked_max_num(max_num)
        count, parts = hash_parts(keys)
        answers = AnswerLists(count)
        for hashes in parts:
            self.view.select_into(answers, hashes, most, first, last)
        self._check_size()
        return lists_of(*answers.take())

    def select_phy_offset(self, key: str, max_num: int = 32, begin: int = 0,
                          end: int = MAX_TIMESTAMP) -> list[int]:  # fmt: skip
        """select_phy_offset_many for one key, a list. Raises as that."""
        try:
            view = self._view
            answer = None if view is None else view.select_one(key, max_num, begin, end)
        finally:
            if lost_pages():
                self._check_maps()
        if answer is None:
            answer = self.select_phy_offset_many([_checked_key(key)], max_num, begin, end).values.to_pylist()
        return answer

    @property
    @guarded
    def begin_timestamp(self) -> int:
        return self.view.begin_timestamp

    @property
    @guarded
    def end_timestamp(self) -> int:
        return self.view.end_timestamp

    @property
    @guarded
    def begin_phy_offset(self) -> int:
        return self.view.begin_phy_offset

    @property
    @guarded
    def end_phy_offset(self) -> int:
        return self.view.end_phy_offset

    @property
    @guarded
    def hash_slot_count(self) -> int:
        return self.view.hash_slot_count

    @property
    @guarded
    def index_count(self) -> int:
        """Number of the next entry, from 1; max_index_num when full."""
        return self.view.index_count

    @property
    @guarded
    def is_full(self) -> bool:
        return self.view.is_full

    @guarded
    def collect_entries(self, hashes: npt.NDArray[np.int32], index_count: int) -> tuple[
            npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
        """As the view's collect, of the entries below index_count, without slots and links: for a file after a crash.

        Reads all those entries: about 0.1 s for a full file of default size.
        """
        entries = np.frombuffer(self._file.map, ENTRY, max(1, index_count), self._entries_at)[1:]
        matched = entries[np.isin(entries["hash"], hashes)]
        matched = matched[np.argsort(matched["hash"], kind="stable")]
        first, last = (np.searchsorted(matched["hash"], hashes, side) for side in ("left", "right"))
        values = [matched["phy_offset"][i:j] for i, j in zip(first.tolist(), last.tolist(), strict=True)]
        return last - first, np.concatenate([np.empty(0, np.int64), *values]).astype(np.int64)

    @guarded
    def entries(self, first: int, last: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64],
                                                      npt.NDArray[np.int32]]:  # fmt: skip
        """Key hashes, phy offsets and seconds since begin_timestamp of the entries [first, last), copied."""
        raw = np.frombuffer(self._file.map, ENTRY, last - first, self._entries_at + first * L.ENTRY_SIZE)
        copied = raw["hash"].astype(np.int32), raw["phy_offset"].astype(np.int64), raw["seconds"].astype(np.int32)
        self.check_size()
        return copied

    @guarded
    def reset(self, header: bytes) -> str:
        """Take the file back to what it was with this header, zeros behind; "" or what is wrong."""
        self.view.sidecar = None
        self._reserve()
        wrong = self.view.restore(header)
        if wrong:
            return wrong
        begin = self._entries_at + self.view.index_count * L.ENTRY_SIZE
        end = used_size(self._file.map, begin)
        if end > begin:
            self._file.reserve(begin, end, 0)
            self._file.map[begin:end] = bytes(end - begin)
        self.flush()
        return ""

    @guarded
    def flush(self) -> None:
        """Everything put so far is on disk. The count of an untouched file becomes 1. Source: IndexFile#flush."""
        if self._writable:
            self.view.settle()
        self.sync()

    def settle(self) -> None:
        """Store the count of a file without entries, where a store's flush does. Not beside a put, whose count it would
        take back.
        """
        if self._writable and self._stores_untouched:
            self.view.settle()

    def sync(self) -> None:
        """Everything put before is on disk."""
        if self._writable:
            _ = self.view  # StoreClosedError
            self._file.sync()

    def _check_size(self) -> None:
        """check_size, of a file that another thread may close."""
        try:
            self.check_size()
        except CorruptFileError:
            if self._view is None:
                raise StoreClosedError(f"{self.path}: index file is closed") from None
            raise

    def _check_maps(self) -> None:
        self._file.check()

    def detach(self) -> None:
        """Close the descriptor; the map stays for those that read it."""
        self._file.detach()

    def close(self) -> None:
        """Close without syncing; what was put stays in the page cache."""
        if self._view is not None:
            self._view = None  # not released here: another thread may be walking it without the GIL
            self._file.close()

    def __enter__(self) -> Self:
        _ = self.view  # StoreClosedError
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()
