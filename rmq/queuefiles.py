# SPDX-License-Identifier: Apache-2.0
"""The files of one consume queue: bytes of its units by queue offset, across files.

Read and written by position, not mapped: a full disk is an OSError, a truncated file a short read.
Source: RocketMQ MappedFileQueue. Layout: docs/format/consumequeue.md.
"""

from __future__ import annotations

import bisect
import logging
import os
from itertools import pairwise
from pathlib import Path

from rmq._core._consumequeue import pre_blank_units, valid_units
from rmq._core._layout import UNIT_SIZE
from rmq.errors import CorruptFileError
from rmq.filecache import FileCache
from rmq.paths import segment_name
from rmq.segment import create_file, file_size, make_directory, sized_files, sync_directory, sync_file, telling

logger = logging.getLogger("rmq")


class QueueFiles:
    """Files of one size, end to end. `starts`: the byte of the queue that each begins with, ascending."""

    def __init__(self, directory: Path, segment_size: int, cache: FileCache, *, writable: bool,
                 bridges_gap: bool) -> None:  # fmt: skip
        """bridges_gap: where a file is missing the queue ends; whoever opens it knows what units there must be."""
        self.directory, self.segment_size = directory, segment_size
        self.writable, self.bridges_gap = writable, bridges_gap
        self.starts: list[int] = []
        self.not_its_own: list[int] = []  # files behind a missing one, and empty ones
        self._cache = cache
        self._known_paths: dict[int, Path] = {}  # one object for each, which knows its own hash
        self._written: set[int] = set()  # starts of files that are not synced
        self._named: set[Path] = set()  # directories with new names
        self._zeros: int | None = None  # byte of the queue from which on all is zero, when that is known

    def look(self, *, is_last: bool) -> None:
        """List the files. CorruptFileError where one is missing; is_last: so it is, and nobody has just removed it."""
        self.starts, empty = sized_files(self.directory, self.segment_size, skip_hidden=not self.writable)
        for start in [] if self.writable else [*self.starts, *empty]:
            self._cache.forget(self.path(start))  # a recovery may have made another file of that name
        self.not_its_own = empty if self.bridges_gap else []
        for place, (start, following) in enumerate(pairwise(self.starts), 1):
            if following != start + self.segment_size:
                path = self.path(start + self.segment_size)
                if not (self.bridges_gap and is_last):
                    raise CorruptFileError(path, 0, "consume-queue segment is missing")
                logger.warning("%s: consume-queue segment is missing; the queue ends there", path)
                self.starts, self.not_its_own = self.starts[:place], sorted([*empty, *self.starts[place:]])
                break

    def path(self, start: int) -> Path:
        path = self._known_paths.get(start)
        if path is None:
            path = self._known_paths[start] = self.directory / segment_name(start)
        return path

    def place_of(self, queue_offset: int) -> tuple[Path, int]:
        """File and position of a unit."""
        number, position = divmod(queue_offset * UNIT_SIZE, self.segment_size)
        return self.path(number * self.segment_size), position

    def first_offset(self) -> int | None:
        """Queue offset of the first unit, None without files."""
        return self.starts[0] // UNIT_SIZE if self.starts else None

    def behind_lost(self, queue_offset: int) -> int:
        """Where the next file begins when that of a unit is gone and a later one is not, as after no recovery; else the
        unit's queue offset. Source: ConsumeQueue#rollNextFile."""
        start = queue_offset * UNIT_SIZE // self.segment_size * self.segment_size
        later = [self.path(other) for other in self.starts if other > start]
        is_lost = not self.path(start).exists() and any(path.exists() for path in later)
        return (start + self.segment_size) // UNIT_SIZE if is_lost else queue_offset

    def read(self, queue_offset: int, count: int) -> bytes:
        """Units across files; fewer where a file is missing. CorruptFileError where one is cut short."""
        parts = []
        position, left = queue_offset * UNIT_SIZE, count * UNIT_SIZE
        while left > 0:
            start = position - position % self.segment_size
            if not self._has(start):
                break
            size = min(left, start + self.segment_size - position)
            try:
                data = self._cache.read(self.path(start), position - start, size)
            except FileNotFoundError:
                break  # cleaned away by the writer beside us
            if not (data or self.writable or self.is_filled(start)):
                break  # and begun again
            if len(data) < size:
                raise CorruptFileError(self.path(start), position - start + len(data), "file was truncated")
            parts.append(data)
            position, left = position + size, left - size
        return b"".join(parts)

    def valid_in(self, start: int) -> int:
        """How many units the file of a start begins with. CorruptFileError where it is cut short."""
        path, count = self.path(start), self.segment_size // UNIT_SIZE

        def search(descriptor: int) -> int:
            return bisect.bisect_left(range(count), True, key=lambda place: not _is_unit(path, descriptor, place))

        try:
            return self._cache.with_file(path, search)
        except FileNotFoundError:
            return 0  # cleaned away by the writer beside us
        except CorruptFileError:
            if self.writable or self.is_filled(start):
                raise
            return 0  # and begun again

    def is_filled(self, start: int) -> bool:
        """Whether a file is there, and was not made just now."""
        return file_size(self.path(start)) > 0

    def _has(self, start: int) -> bool:
        if self.starts and self.starts[-1] == start:
            return True
        number = bisect.bisect_left(self.starts, start)
        return number < len(self.starts) and self.starts[number] == start

    # ---- write ----

    def write(self, first: int, data: bytes) -> None:
        """Put units into the files, new ones where there is none. OSError of the disk."""
        position = first * UNIT_SIZE
        while data:
            start = position - position % self.segment_size
            size = min(len(data), start + self.segment_size - position)
            path = self.path(start)
            if not self._has(start):
                self._create(path, start)
            if self._zeros is not None:
                self._zeros = max(self._zeros, position + size)
            self._cache.write(path, position - start, data[:size])
            self._written.add(start)
            data, position = data[size:], position + size

    def write_pre_blank(self, end: int) -> None:
        """Fill the file of a queue offset with pre-blank units up to it."""
        begin = (end * UNIT_SIZE - end * UNIT_SIZE % self.segment_size) // UNIT_SIZE
        self.write(begin, pre_blank_units(end - begin))

    def _create(self, path: Path, start: int) -> None:
        """Durable at once until there is a mark; then power loss may take one and leave the next."""
        make_directory(self.directory, sync_directory if self._cache.syncs_new else self._named.add)
        self._cache.changes += 1
        descriptor = create_file(path)
        try:
            with telling(path):
                os.ftruncate(descriptor, self.segment_size)
            if self._cache.syncs_new:
                sync_file(descriptor)
                sync_directory(self.directory)
            self._written.add(start)
            self._named.add(self.directory)
            self.starts = sorted([*self.starts, start])
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def cut(self, max_offset: int) -> None:
        """Zero the units from a queue offset on; later files are gone."""
        position = max_offset * UNIT_SIZE
        for start in [start for start in reversed(self.starts) if start >= position]:
            self._remove(start)
            self.starts.remove(start)
        for start in self.starts:
            end = start + self.segment_size
            if end > position:
                size = (end if self._zeros is None else min(end, self._zeros)) - position
                rest = self._cache.read(self.path(start), position - start, size) if size > 0 else b""
                if used := len(rest.rstrip(b"\0")):
                    self._cache.write(self.path(start), position - start, bytes(used))
                    self._written.add(start)
        self._zeros = position if self._zeros is None else min(position, self._zeros)

    def remove_strangers(self) -> None:
        """Remove the files that are not the queue's own; a reader forgets them."""
        while self.not_its_own:
            if self.writable:
                self._remove(self.not_its_own[-1])
            self.not_its_own.pop()

    def _remove(self, start: int) -> None:
        """Remove a file: one after the other, the last first, for no crash may leave a gap."""
        self._cache.forget(self.path(start))
        os.unlink(self.path(start))
        sync_directory(self.directory)
        self._written.discard(start)

    def distrust(self) -> None:
        """Take all files as written since the last sync: a process that was killed may have."""
        self._written.update(self.starts)

    def take_dirty(self, into: set[Path]) -> None:
        """Move the names of files written since the last call, and of directories with new names, to a set for sync."""
        into |= self._named.union(map(self.path, self._written))
        self._written, self._named = set(), set()

    # ---- cleaning ----

    def first(self, count: int | None = None) -> list[Path]:
        """The first files, oldest first; None: all."""
        return [self.path(start) for start in self.starts[:count]]

    def forget_first(self, count: int) -> None:
        """The queue's files begin behind the first `count`, which the caller removes."""
        for start in self.starts[:count]:
            self._cache.forget(self.path(start))
            self._written.discard(start)
        self.starts = self.starts[count:]
        self._known_paths.clear()

    def take(self, fresh: QueueFiles) -> None:
        """The files that another look at the directory found."""
        self.starts, self._known_paths = fresh.starts, fresh._known_paths

    def forget_open(self) -> None:
        """Open the files anew at the next read: another process may have replaced them."""
        for start in self.starts:
            self._cache.forget(self.path(start))


def _is_unit(path: Path, descriptor: int, place: int) -> bool:
    data = os.pread(descriptor, UNIT_SIZE, place * UNIT_SIZE)
    if len(data) < UNIT_SIZE:
        raise CorruptFileError(path, place * UNIT_SIZE + len(data), "file was truncated")
    return valid_units(data) == 1
