# SPDX-License-Identifier: Apache-2.0
"""The index of a store: the chain of its index files.

Source: RocketMQ IndexService. Layout: docs/format/indexfile.md.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq._core._indexfile import IndexFileView
from rmq._core._mapguard import lost_pages
from rmq._core._recordbatch import RecordBatch
from rmq.closers import close_all
from rmq.config import StoreConfig
from rmq.directorywatch import DirectoryWatch
from rmq.errors import CorruptFileError, StoreClosedError
from rmq.indexfile import IndexFile
from rmq.keys import Mode
from rmq.paths import INDEX_NAME, next_index_name
from rmq.segment import LOOKS, file_size, make_directory

logger = logging.getLogger("rmq")

Durable = tuple[int, int]  # what counts after a crash: up to the file of this name, of it the entries below a count


def entries_at_end(files: Sequence[IndexFile], phy_offset: int) -> int:
    """How many of the last entries of successive files, all of which have some, are of the record at a phy offset."""
    done = 0
    for file in reversed(files):
        own = file.view.entries_of(phy_offset)
        done += own
        if own < file.index_count - 1:
            break
    return done


def entries_at_begin(files: Sequence[IndexFile], phy_offset: int) -> int:
    """How many of the first entries are."""
    done = 0
    for file in files:
        own = file.view.entries_of(phy_offset, first=True)
        done += own
        if own < file.index_count - 1:
            break
    return done


class Index:
    """The index files of a store, oldest first; the last one takes entries.

    damaged: files that are none of them; a reader looks in the log for what they held, recovery sets them aside.
    """

    def __init__(self, directory: Path, config: StoreConfig, *, writable: bool,
                 damaged: Collection[Path] = ()) -> None:  # fmt: skip
        self.directory = directory
        self.files: list[IndexFile] = []
        self.damaged = damaged
        self._watch = DirectoryWatch([directory])
        self._config = config
        self.indexes_tags = config.indexes_tags
        self._writable = writable
        self._unsynced: list[IndexFile] = []
        self.spare_names: list[str] = []  # of files that were removed to be derived again
        self._judged, self._is_old, self._lost_pages, self._is_closed = 0, False, 0, False
        self._broken: set[IndexFile] = set()  # of a reader: found short, or with pages gone; listed until opened anew
        for path in () if writable else sorted(damaged):
            logger.warning("%s: length, entries, slots and links do not fit together; the log is searched for its keys",
                           path)
        self.refresh()

    def refresh(self) -> None:
        """Look at the directory again; known files stay open. A file of a known name may be another: a recovery
        removes files and makes them again.
        """
        if not self._writable and self._watch.is_unchanged(self.files):
            return
        broken, self._broken = self._broken, set()
        known = {(file.path, file.inode): file for file in self.files if file not in broken}
        left, count = LOOKS, 0
        while True:
            paths = [path for path in index_paths(self.directory, remove_empty=self._writable)
                     if path not in self.damaged]  # fmt: skip
            left -= len(paths) >= count > 0  # fewer: a cleaning is at work, which ends
            count = len(paths)
            try:
                found = [(path, path.stat().st_ino) for path in paths]
                for key in found:
                    if key not in known:
                        known[key] = self._open(key[0], "r+" if self._writable else "r")
                break
            except (FileNotFoundError, CorruptFileError) as error:  # removed, and maybe made again and not filled yet
                is_there = isinstance(error, CorruptFileError) and file_size(Path(error.path)) > 0
                if self._writable or not left or is_there:
                    raise
        files = [known[key] for key in found]
        for path, inode in known.keys() - set(found):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    raise CorruptFileError(path, 0, "file was truncated while it was open")
        self.files = files
        if self._is_closed:  # by another thread or a signal handler meanwhile
            self.close()
            raise StoreClosedError(f"{self.directory}: store is closed")
        if not self._writable:
            self._watch.keep(files)
            self._broken.update(file for file in files if file.lost >= 0)

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

    def _open(self, path: Path, mode: Mode, end_phy_offset: int = 0, end_timestamp: int = 0) -> IndexFile:
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
        phy_offset = files[-1].end_phy_offset if files else -1
        return phy_offset, entries_at_end(files, phy_offset)

    def put_rows(self, batch: RecordBatch, row: int, key: int) -> tuple[int, int]:
        """Index rows of a batch from (row, key) on; returns where to go on. Source: IndexService#buildIndex."""
        if key and self.files and self.files[-1].is_full:
            done = self.files[-1].put_rows(batch, row, key, self.indexes_tags)
            if done != (row, key):
                return done  # every key of the record was in; no other file is begun for it
        file = self._next_file()
        if file not in self._unsynced:
            self._unsynced.append(file)
        return file.put_rows(batch, row, key, self.indexes_tags)

    def take_unsynced(self, into: list[IndexFile]) -> None:
        """Move the files put into since the last call, oldest first, to a list, for the caller to sync."""
        for file in self._unsynced:
            file.settle()
        into += [file for file in self._unsynced if file not in into]
        self._unsynced = []

    def select(self, hashes: npt.NDArray[np.int32], max_num: int, begin: int,
               end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
        """RocketMQ's answers: (counts, phy offsets), newest file first. Source: IndexService#queryOffset."""
        limit = min(max_num, self._config.max_msgs_num_batch)
        found = np.zeros(len(hashes), np.int32)
        key_numbers, answers = [], []
        files = self.files
        for file in reversed(files):
            file.look()
            view = file.view
            if view.index_count > 1 and _is_time_matched(view, begin, end):
                counts, values = view.select(hashes, limit, begin, end, found)
                found += counts
                key_numbers.append(np.repeat(np.arange(len(hashes)), counts))
                answers.append(values)
            # The last may be one whose header does not tell yet where it begins.
            is_new = file is files[-1] and view.index_count <= 1 and view.begin_timestamp == 0
            if view.begin_timestamp < begin and not is_new:
                break
        self._check(files)  # also without an answer: a header that is gone reads as zeros
        if not answers:
            return found.astype(np.int64), np.empty(0, np.int64)
        order = np.argsort(np.concatenate(key_numbers), kind="stable")
        return found.astype(np.int64), np.concatenate(answers)[order]

    def counts_every_put(self) -> bool:
        """Whether RocketMQ <= 4.7.0 wrote some of the files."""
        if not self._is_old and self._judged != len(self.files):
            self._is_old = any(file.view.counts_every_put() for file in self.files)
            self._judged = len(self.files)
        return self._is_old

    def collect(self, hashes: npt.NDArray[np.int32], begin: int, end: int,
                durable: Durable | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # fmt: skip
        """Every entry of the key hashes that counts: (key numbers, phy offsets), in no order, repeats included.

        Left out are only such whose message is for sure not stored in [begin, end], whatever the clock did.
        """
        numbers, offsets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        every, files = np.arange(len(hashes)), self.files
        for file in reversed(files):
            file.look()
            counts, values = file.view.collect(hashes, begin, end) if durable is None else \
                self._collect_durable(file, hashes, *durable)  # fmt: skip
            if len(values):
                numbers.append(np.repeat(every, counts))
                offsets.append(values)
        self._check(files)
        return np.concatenate(numbers), np.concatenate(offsets)

    def _collect_durable(self, file: IndexFile, hashes: npt.NDArray[np.int32], name: int,
                         count: int) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:  # fmt: skip
        """What stands of a file after a crash: of the named one the entries below `count`, of later ones nothing."""
        own = int(file.path.name)
        if own == name and count < self._config.max_index_num:
            return file.collect_entries(hashes, count)
        return file.view.collect(hashes) if own <= name else (np.zeros(len(hashes), np.int32), np.empty(0, np.int64))

    def check(self) -> None:
        """CorruptFileError when pages of a file were gone. A reader opens it anew next time. Cost: nothing until one
        more page is lost.
        """
        if (count := lost_pages()) != self._lost_pages:
            # A reader's that was told of already says nothing of an answer that came from elsewhere.
            self._check([file for file in self.files if file not in self._broken])
            self._lost_pages = count

    def _check(self, files: Sequence[IndexFile]) -> None:
        """Of files that were read, also whether one was truncated within a page: another thread may have taken one of
        them off the list. Cost: an fstat for each.
        """
        for file in files:
            try:
                file.check_size()
                file._check_maps()
            except CorruptFileError:
                if not self._writable:  # whoever has asked what the files cover must come to it, too
                    self._broken.add(file)
                    self._watch.forget()
                raise

    def close(self) -> None:
        self._is_closed = True
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
            if file_size(path):
                paths.append(path)
            elif remove_empty:
                path.unlink()  # made and not filled by a process that was killed
        elif INDEX_NAME.fullmatch(path.name) and remove_empty:
            raise CorruptFileError(path, 0, "no regular file stands where an index file belongs")
        else:
            logger.debug("%s: no index file, skipped", path)
    return paths


def _is_time_matched(view: IndexFileView, begin: int, end: int) -> bool:
    """Source: IndexFile#isTimeMatched."""
    first, last = view.begin_timestamp, view.end_timestamp
    return (begin < first and end > last) or first <= begin <= last or first <= end <= last
