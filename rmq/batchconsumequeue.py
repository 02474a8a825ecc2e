# SPDX-License-Identifier: Apache-2.0
"""Queues of inner batches: for each topic and queue id the 46-byte units of its batches.

Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmq._core._consumequeue import unpack_batch_units
from rmq._core._layout import BATCH_UNIT_SIZE
from rmq._core._message import check_directory
from rmq.errors import CorruptFileError
from rmq.message import LARGEST_BASE
from rmq.paths import SEGMENT_NAME, is_queue_id, queue_directories, queue_directory
from rmq.segment import file_size, is_hidden, opened

NO_UNITS: npt.NDArray[np.int64] = np.empty((0, 6), np.int64)


class BatchTail:
    """Units of a queue of inner batches that were derived from the log, in its order."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self.changes = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def put(self, units: npt.NDArray[np.int64]) -> None:
        """In place of those from the first one on: they may come again."""
        parts = list(self._parts)  # another thread may be reading the old ones
        while parts and parts[-1][0, 0] >= units[0, 0]:
            parts.pop()
        if parts and parts[-1][-1, 0] >= units[0, 0]:
            parts[-1] = parts[-1][: np.searchsorted(parts[-1][:, 0], units[0, 0])]
        self._parts = [*parts, units]
        self.changes += 1

    def drop(self, phy_offset: int) -> None:
        """Those up to a phy offset, which files have by now."""
        units = self.units()
        kept = units[np.searchsorted(units[:, 0], phy_offset, side="right") :].copy()
        self._parts = [kept] if len(kept) else []
        self.changes += 1

    def units(self) -> npt.NDArray[np.int64]:
        parts = self._parts
        return parts[0] if len(parts) == 1 else np.concatenate([NO_UNITS, *parts])


Tails = dict[tuple[str, int], BatchTail]  # by topic and queue id


class BatchConsumeQueue:
    """A queue of inner batches (46-byte units), read only. Source: RocketMQ BatchConsumeQueue."""

    lives = 0  # as of QueueUnits: a look that finds other files makes another object

    def __init__(self, directory: Path, topic: str, queue_id: int, min_phy_offset: int = 0,
                 known: BatchConsumeQueue | None = None, tail: BatchTail | None = None) -> None:  # fmt: skip
        """min_phy_offset: of the log; units below it are of removed records. known: the queue as it was, whose units
        are not read again when the last of them still stands. tail: derived from the log; those behind the files'
        count. CorruptFileError."""
        self.directory = directory
        self.topic = topic
        self.queue_id = queue_id
        paths = _files_of(directory)
        for path in paths:
            if not SEGMENT_NAME.fullmatch(path.name) or file_size(path) % BATCH_UNIT_SIZE:
                raise CorruptFileError(path, 0, "no segment of 46-byte units")
        self._firsts: list[tuple[int, Path]] = []  # number of the first unit of each file
        count, at = 0, 0  # at: where reading begins in the first file that is read
        parts: list[npt.NDArray[np.int64]] = []
        if known is not None and (place := known._last_place(paths)) is not None:
            count, at, parts = len(known._in_files), place[1] + BATCH_UNIT_SIZE, [known._in_files]
            self._firsts = [item for item in known._firsts if item[1] < place[0]]
        self._asked = min_phy_offset, tail, tail.changes if tail is not None else 0  # before units are taken
        for path in paths[len(self._firsts) :]:
            self._firsts.append((count - at // BATCH_UNIT_SIZE, path))
            for part in _units_from(path, at):
                parts.append(part)
                count += len(part)
            at = 0
        self._in_files: npt.NDArray[np.int64] = parts[0] if len(parts) == 1 else np.concatenate([NO_UNITS, *parts])
        self._passed = 0  # units in front that are another topic's, which had the name before
        self.units = self._in_files
        self._add_tail(NO_UNITS if tail is None else tail.units())
        self._check_order()
        self._bound(min_phy_offset)

    def _add_tail(self, tail: npt.NDArray[np.int64]) -> None:
        """Units that were derived behind the files'. Where bases go back the topic was made again and begins there; in
        files only at 0, else a unit is wrong.
        """
        behind = tail[tail[:, 0] > self._in_files[-1, 0]] if len(self._in_files) else tail
        if len(behind):
            self.units = np.concatenate([self._in_files, behind])
        bases, counts = self.units[:, 4], self.units[:, 5]
        begins = 1 + np.flatnonzero(bases[1:] < bases[:-1] + counts[:-1])
        begins = begins[(begins >= len(self._in_files)) | (bases[begins] == 0)]
        if len(begins):
            self._passed = int(begins[-1])
            self.units = self.units[self._passed :]

    def _bound(self, min_phy_offset: int) -> None:
        self.max_offset = int(self.units[-1, 4] + self.units[-1, 5]) if len(self.units) else 0
        kept = self.units[self.units[:, 0] >= min_phy_offset, 4]
        self.min_offset = int(kept[0]) if len(kept) else self.max_offset

    def end_at(self, log_end: int, min_phy_offset: int) -> BatchConsumeQueue:
        """Without the units of records that the log has lost. log_end: taken after the files were read."""
        if not len(self.units) or self.units[-1, 0] < log_end:
            return self
        ended = copy.copy(self)  # other threads may be at this one
        ended.units = self.units[: int((self.units[:, 0] >= log_end).argmax())]
        ended._bound(min_phy_offset)
        return ended

    def is_current(self, min_phy_offset: int, tail: BatchTail | None) -> bool:
        """Whether a look now would find the same."""
        if self._asked != (min_phy_offset, tail, tail.changes if tail is not None else 0):
            return False
        paths = _files_of(self.directory)
        if not len(self._in_files):
            return not paths
        place = self._last_place(paths)
        return place is not None and place[2] == 1 and len(paths) == len(self._firsts)

    @property
    def behind(self) -> int:
        """Units in memory alone."""
        return max(0, self._passed + len(self.units) - len(self._in_files))

    def _last_place(self, paths: list[Path]) -> tuple[Path, int, int] | None:
        """Where the last unit is that stands there still, and how many from there on, of files that begin with ours;
        None: files have changed.
        """
        if not len(self._in_files) or paths[: len(self._firsts)] != [path for _, path in self._firsts]:
            return None
        path, position = self.place_of(len(self._in_files) - 1 - self._passed)
        part = next(_units_from(path, position), NO_UNITS)
        return (path, position, len(part)) if np.array_equal(part[:1], self._in_files[-1:]) else None

    def _check_order(self) -> None:
        bases, counts = self.units[:, 4], self.units[:, 5]
        wrong = bases > LARGEST_BASE
        wrong[1:] |= bases[1:] < bases[:-1] + counts[:-1]
        if wrong.any():
            raise CorruptFileError(*self.place_of(int(np.argmax(wrong))), "unit is out of order")

    def place_of(self, number: int) -> tuple[Path, int]:
        """File and position of a unit."""
        number += self._passed
        first, path = next((item for item in reversed(self._firsts) if item[0] <= number), (0, self.directory))
        return path, (number - first) * BATCH_UNIT_SIZE

    def unit_of(self, queue_offset: int) -> int | None:
        """Number of the unit of the batch that holds a queue offset, or of the next one; None behind the last."""
        number = int(np.searchsorted(self.units[:, 4], queue_offset, side="right")) - 1
        if number < 0 or int(self.units[number, 4] + self.units[number, 5]) <= queue_offset:
            number += 1
        return number if number < len(self.units) else None

    def phy_offset_below(self, queue_offset: int) -> int:
        """Of the batch that holds the last message below a queue offset; -1 where there is none."""
        number = int(np.searchsorted(self.units[:, 4], queue_offset)) - 1
        return int(self.units[number, 0]) if number >= 0 else -1


def _files_of(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_file() and not is_hidden(path.name))


def _units_from(path: Path, position: int) -> Iterator[npt.NDArray[np.int64]]:
    """The units of a file from a position on, as far as they are valid, in parts."""
    with contextlib.suppress(FileNotFoundError), opened(path) as descriptor:  # cleaned away since it was listed
        while data := os.pread(descriptor, BATCH_UNIT_SIZE * 4096, position):
            yield (part := unpack_batch_units(data))
            position += len(data)
            if len(part) * BATCH_UNIT_SIZE < len(data):
                return


def end_in_files(directory: Path) -> tuple[int, int]:
    """Of a queue's files the next queue offset, and the phy offset of the last unit: (0, -1) without one, (-1, -1)
    where they cannot be read, of which who asks for the queue is told.
    """
    try:
        queue = BatchConsumeQueue(directory, "", 0)
    except (CorruptFileError, OSError):
        return -1, -1
    return queue.max_offset, queue.phy_offset_below(queue.max_offset)


def batch_queues(root: Path, min_phy_offset: int, tails: Tails) -> Iterator[BatchConsumeQueue]:
    """The queues of inner batches below a directory, and those that were derived alone. CorruptFileError."""
    known = {(topic, queue_id): directory for directory, topic, queue_id in queue_directories(root)}
    for topic, queue_id in known | tails:
        directory = known.get((topic, queue_id)) or queue_directory(root, topic, queue_id)
        yield BatchConsumeQueue(directory, topic, queue_id, min_phy_offset, tail=tails.get((topic, queue_id)))


def _directory_of(root: Path, topic: str, queue_id: int) -> Path | None:
    """The directory of a queue, whatever zeros its name begins with; the topic may be any text."""
    if not os.path.isdir(root):  # each pull asks, and a Path takes longer
        return None
    try:
        check_directory(topic)
        parent = queue_directory(root, topic, queue_id).parent
        names = sorted(os.listdir(parent))
    except (ValueError, FileNotFoundError, NotADirectoryError):
        return None
    return next((parent / name for name in names
                 if is_queue_id(name) and int(name) == queue_id and (parent / name).is_dir()), None)


def batch_queue(root: Path, topic: str, queue_id: int, min_phy_offset: int, known: BatchConsumeQueue | None,
                tails: Tails) -> BatchConsumeQueue | None:  # fmt: skip
    """The queue of inner batches of a topic and number. known: one as it was read, maybe this one. CorruptFileError."""
    found = _directory_of(root, topic, queue_id)
    if found is None and (topic, queue_id) not in tails:
        return None
    directory = queue_directory(root, topic, queue_id) if found is None else found
    tail = tails.get((topic, queue_id))
    if known is not None and known.directory != directory:
        known = None
    if known is not None and known.is_current(min_phy_offset, tail):
        return known
    return BatchConsumeQueue(directory, topic, queue_id, min_phy_offset, known, tail)
