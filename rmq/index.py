# SPDX-License-Identifier: Apache-2.0
"""Index files, one by one (`IndexFile`) and as the chain that a store keeps (`Index`).

Source: RocketMQ IndexFile, IndexService. Layout: docs/format/indexfile.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._mapguard import lost_pages
from rmq._core._message import to_ms
from rmq._core._record import used_size
from rmq._core._recordbatch import RecordBatch
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError, StoreClosedError, StoreReadOnlyError
from rmq.keys import checked_max_num, hash_keys, int64_array, list_array
from rmq.paths import INDEX_NAME, next_index_name
from rmq.segment import MappedFile, close_all, guarded, make_directory

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("rmq")

MAX_TIMESTAMP = 2**63 - 1
RESERVE_AHEAD = 8 * 1024 * 1024
LOOKS = 10  # at a directory in which another process removes files
_ENTRY = np.dtype([("hash", ">i4"), ("phy_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


class IndexFile:
    """One index file with RocketMQ's own semantics, nothing added. Context manager.

    mode: "r" opens read only, "r+" and "a" for putting ("a" creates when missing), "x" creates.
    end_phy_offset, end_timestamp: of the file before a new one. Keys are whole index keys (`topic#key`).
    Raises CorruptFileError when the length does not fit the geometry, OSError of the system.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", *, max_hash_slot_num: int = 5_000_000,
                 max_index_num: int = 20_000_000, end_phy_offset: int = 0, end_timestamp: int = 0,
                 rocketmq_version: str = "5.3.3") -> None:  # fmt: skip
        if mode not in ("r", "r+", "a", "x"):
            raise ValueError(f"mode must be r, r+, a or x, got {mode!r}")
        config = StoreConfig(max_hash_slot_num=max_hash_slot_num, max_index_num=max_index_num,
                             rocketmq_version=rocketmq_version)  # fmt: skip
        self.path = Path(path)
        writable = mode != "r"
        size = index_file_size(max_hash_slot_num, max_index_num)
        create = mode == "x" or (mode == "a" and not self.path.exists())
        self._entries_at = L.INDEX_HEADER_SIZE + max_hash_slot_num * L.INDEX_SLOT_SIZE
        self._writable = writable
        self._view: IndexFileView | None = None
        self._file = MappedFile(self.path, size=size, writable=writable, create=create)
        try:
            self._view = IndexFileView(
                self._file.map, hash_slot_num=max_hash_slot_num, index_num=max_index_num, writable=writable,
                count_every_put=config.counts_every_index_put)  # fmt: skip
            if create:
                self._reserve()
                self._file.sync_all()
                self._view.preset(end_phy_offset, to_ms(end_timestamp, "end_timestamp"))
        except BaseException:
            if self._view is not None:
                self._view.release()
            self._file.close()
            if create:
                os.unlink(self.path)  # without blocks it is no index file
            raise

    @property
    def inode(self) -> int:
        return self._file.inode

    @property
    def view(self) -> IndexFileView:
        if self._view is None:
            raise StoreClosedError(f"{self.path}: index file is closed")
        return self._view

    def _reserve(self) -> int:
        """Blocks for the slots, once, and for the entries to come; returns how many more entries they hold."""
        if self._file.reserved == 0:
            self._file.reserve(0, self._entries_at, self._entries_at)
        at = self._entries_at + self.view.index_count * L.ENTRY_SIZE
        self._file.reserve(at - L.ENTRY_SIZE, min(self._file.size, at + L.ENTRY_SIZE), RESERVE_AHEAD)
        self.view.limit((self._file.reserved - self._entries_at) // L.ENTRY_SIZE)
        return self.view.room

    @guarded
    def put_keys(self, keys: Any, phy_offsets: Sequence[int] | npt.NDArray[np.int64],
                 store_timestamps: Sequence[int] | npt.NDArray[np.int64]) -> int:  # fmt: skip
        """Append one entry per key; returns how many fitted. Source: IndexFile#putKey.

        keys: Arrow string array, list of str, or numpy text. The three must have one length: ValueError.
        """
        if not self._writable:
            raise StoreReadOnlyError(f"{self.path}: index file is open read only")
        hashes = hash_keys(keys)
        offsets = int64_array(phy_offsets, "phy_offsets")
        times = int64_array(store_timestamps, "store_timestamps")
        if not len(hashes) == len(offsets) == len(times):
            raise ValueError("keys, phy_offsets and store_timestamps must have one length")
        done = 0
        while done < len(hashes):
            room = self._reserve()
            if room == 0:
                break
            stop = min(len(hashes), done + room)
            done += self.view.put(hashes[done:stop], offsets[done:stop], times[done:stop])
        return done

    def put_key(self, key: str, phy_offset: int, store_timestamp: int) -> bool:
        """Append one entry; False when the file is full."""
        return self.put_keys([key], [phy_offset], [store_timestamp]) == 1

    @guarded
    def put_rows(self, batch: RecordBatch, row: int, key: int, index_tags: bool) -> tuple[int, int]:
        """Index some of a scanned batch from (row, key) on; returns where to go on, here or in the next."""
        self._reserve()
        return self.view.put_rows(batch, row, key, index_tags=index_tags)

    @guarded
    def select_phy_offset_many(self, keys: Any, max_num: int = 32, begin: int = 0,
                               end: int = MAX_TIMESTAMP) -> pa.ListArray:  # fmt: skip
        """RocketMQ's answers for each key, newest first, at most max_num each: list<int64>.

        begin, end: ms, compared with the stored whole seconds. Keys are not compared, only hashes.
        Source: IndexFile#selectPhyOffset.
        """
        first, last = to_ms(begin, "begin"), to_ms(end, "end")
        counts, values = self.view.select(hash_keys(keys), checked_max_num(max_num), first, last)
        return list_array(counts, values)

    @guarded
    def select_phy_offset(self, key: str, max_num: int = 32, begin: int = 0,
                          end: int = MAX_TIMESTAMP) -> list[int]:  # fmt: skip
        """select_phy_offset_many for one key."""
        first, last = to_ms(begin, "begin"), to_ms(end, "end")
        _, values = self.view.select(hash_keys([key]), checked_max_num(max_num), first, last)
        answer: list[int] = values.tolist()
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
        entries = np.frombuffer(self._file.map, _ENTRY, max(1, index_count), self._entries_at)[1:]
        matched = entries[np.isin(entries["hash"], hashes)]
        matched = matched[np.argsort(matched["hash"], kind="stable")]
        first, last = (np.searchsorted(matched["hash"], hashes, side) for side in ("left", "right"))
        values = [matched["phy_offset"][i:j] for i, j in zip(first.tolist(), last.tolist(), strict=True)]
        return last - first, np.concatenate([np.empty(0, np.int64), *values]).astype(np.int64)

    @guarded
    def reset(self, header: bytes) -> str:
        """Take the file back to what it was with this header, zeros behind; "" or what is wrong."""
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
        """Everything put so far is on disk; the count of an untouched file becomes 1, as RocketMQ's flush."""
        if self._writable:
            self.view.settle()
            self._file.sync()

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
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()


class Index:
    """The index files of a store, oldest first; the last one takes entries."""

    def __init__(self, directory: Path, config: StoreConfig, *, writable: bool) -> None:
        self.directory = directory
        self.files: list[IndexFile] = []
        self._config = config
        self._writable = writable
        self._unsynced: list[IndexFile] = []
        self.durable: tuple[int, int] | None = None  # after a crash: the last file's name and index_count that stand
        self.spare_names: list[str] = []  # of files that were removed to be derived again
        self._judged, self._is_old = 0, False
        self.refresh()

    def refresh(self) -> None:
        """Look at the directory again; known files stay open. A file of a known name may be another: a recovery
        removes files and makes them again.
        """
        known = {(file.path, file.inode): file for file in self.files}
        for attempt in range(LOOKS, 0, -1):
            try:
                found = [(path, path.stat().st_ino)
                         for path in index_paths(self.directory, remove_empty=self._writable)]  # fmt: skip
                files = [known.get(key) or self._open(key[0], "r+" if self._writable else "r") for key in found]
                break
            except FileNotFoundError:
                if self._writable or attempt == 1:
                    raise
        for path, inode in known.keys() - set(found):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    raise CorruptFileError(path, 0, "file was truncated while it was open")
        self.files = files

    def count_below(self, min_phy_offset: int) -> int:
        """Files in front whose last entry lies below a phy offset; never the last. Source: #deleteExpiredFile."""
        def is_below(file: IndexFile) -> bool:
            end = file.end_phy_offset
            return end < min_phy_offset and file.view.entries_of(end) > 0  # the header's word is not enough

        return sum(1 for _ in takewhile(is_below, self.files[:-1]))

    def forget_first(self, count: int) -> None:
        """The index begins behind its first `count` files, which the caller removes; those that read them go on."""
        for file in self.files[:count]:
            file.detach()
        self.files = self.files[count:]

    def _open(self, path: Path, mode: str, end_phy_offset: int = 0, end_timestamp: int = 0) -> IndexFile:
        config = self._config
        return IndexFile(path, mode, max_hash_slot_num=config.max_hash_slot_num,
                         max_index_num=config.max_index_num, end_phy_offset=end_phy_offset,
                         end_timestamp=end_timestamp, rocketmq_version=config.rocketmq_version)  # fmt: skip

    def _next_file(self) -> IndexFile:
        """The file to put into; a new one when there is none or the last is full. Source: IndexService."""
        last = self.files[-1] if self.files else None
        if last is not None and not last.is_full:
            return last
        make_directory(self.directory)
        before = last.path.name if last else ""
        spare = [name for name in self.spare_names if name > before]
        name = min(spare) if spare else next_index_name(before, time.time_ns() // 1_000_000)
        while (self.directory / name).exists():
            name = next_index_name(name, 0)
        if last is not None and not INDEX_NAME.fullmatch(name):
            raise CorruptFileError(last.path, 0, "no index file's name comes behind this one")
        self.spare_names = [other for other in spare if other != name]
        path = self.directory / name
        try:
            self.files.append(self._open(path, "x", last.end_phy_offset if last else 0,
                                         last.end_timestamp if last else 0))  # fmt: skip
        except BaseException:
            if not self.files or self.files[-1].path != path:
                path.unlink(missing_ok=True)  # interrupted: nobody knows of it
            raise
        return self.files[-1]

    def end(self) -> tuple[int, int]:
        """The record of the last entry, and how many keys of it are in; (-1, 0) when there are no entries."""
        files = [file for file in self.files if file.index_count > 1]
        done, phy_offset = 0, files[-1].end_phy_offset if files else -1
        for file in reversed(files):
            own = file.view.entries_of(phy_offset)
            done += own
            if own < file.index_count - 1:
                break
        return phy_offset, done

    def put_rows(self, batch: RecordBatch, row: int, key: int) -> tuple[int, int]:
        """Index rows of a batch from (row, key) on; returns where to go on. Source: IndexService#buildIndex."""
        file = self._next_file()
        if file not in self._unsynced:
            self._unsynced.append(file)
        return file.put_rows(batch, row, key, self._config.indexes_tags)

    def take_unsynced(self, into: list[IndexFile]) -> None:
        """Move the files put into since the last call, oldest first, to a list, for the caller to flush."""
        into += [file for file in self._unsynced if file not in into]
        self._unsynced = []

    def select(self, hashes: npt.NDArray[np.int32], max_num: int, begin: int,
               end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
        """RocketMQ's answers: (counts, phy offsets), newest file first. Source: IndexService#queryOffset."""
        limit = min(max_num, self._config.max_msgs_num_batch)
        found = np.zeros(len(hashes), np.int32)
        key_numbers, answers = [], []
        for file in reversed(self.files):
            view = file.view
            if view.index_count > 1 and _is_time_matched(view, begin, end):
                counts, values = view.select(hashes, limit, begin, end, found)
                found += counts
                key_numbers.append(np.repeat(np.arange(len(hashes)), counts))
                answers.append(values)
            if view.begin_timestamp < begin:
                break
        if not answers:
            return found.astype(np.int64), np.empty(0, np.int64)
        self.check()
        order = np.argsort(np.concatenate(key_numbers), kind="stable")
        return found.astype(np.int64), np.concatenate(answers)[order]

    def counts_every_put(self) -> bool:
        """Whether RocketMQ <= 4.7.0 wrote some of the files."""
        if not self._is_old and self._judged != len(self.files):
            self._is_old = any(file.view.counts_every_put() for file in self.files)
            self._judged = len(self.files)
        return self._is_old

    def collect(self, hashes: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Every entry of the key hashes: (key numbers, phy offsets), in no order, repeats included."""
        numbers, offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for file in reversed(self.files):
            name, count = self.durable or (-1, 0)
            if self.durable is not None and int(file.path.name) > name:
                continue
            counts, values = file.collect_entries(hashes, min(count, self._config.max_index_num)) \
                if int(file.path.name) == name else file.view.collect(hashes)  # fmt: skip
            numbers.append(np.repeat(np.arange(len(hashes)), counts))
            offsets.append(values)
        self.check()
        return np.concatenate(numbers), np.concatenate(offsets)

    def check(self) -> None:
        """CorruptFileError when pages of a file's map were gone. A reader opens the file anew next time."""
        for file in list(self.files) if lost_pages() else ():
            try:
                file._check_maps()
            except CorruptFileError:
                if not self._writable:
                    self.files = [other for other in self.files if other is not file]
                    file.close()
                raise

    def close(self) -> None:
        close_all(file.close for file in self.files)


def index_paths(directory: Path, remove_empty: bool = False) -> list[Path]:
    """Index files of a directory in order; other names are skipped, as RocketMQ does."""
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = []
    for path in entries:
        if INDEX_NAME.fullmatch(path.name) and path.is_file():
            if _size_of(path):
                paths.append(path)
            elif remove_empty:
                path.unlink()  # made and not filled by a process that was killed
        elif INDEX_NAME.fullmatch(path.name) and remove_empty:
            raise CorruptFileError(path, 0, "no regular file stands where an index file belongs")
        else:
            logger.debug("%s: no index file, skipped", path)
    return paths


def _size_of(path: Path) -> int:
    """0 too when the file was removed since its directory was read."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_time_matched(view: IndexFileView, begin: int, end: int) -> bool:
    """Source: IndexFile#isTimeMatched."""
    first, last = view.begin_timestamp, view.end_timestamp
    return (begin < first and end > last) or first <= begin <= last or first <= end <= last
