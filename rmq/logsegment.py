# SPDX-License-Identifier: Apache-2.0
"""Segments of the commit log as files: mapped when needed, so many at a time."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from rmq._core import _layout as L
from rmq._core._record import used_size
from rmq.segment import EXHAUSTED, MappedFile

BLANK_HEADER = struct.Struct(">ii")
RESERVE_AHEAD = 64 * 1024 * 1024


class Segment:
    """One file of the log, mapped at first use; the map may be let go of, then the next use maps it again.

    Who needs the same map twice keeps it: another thread may let go of it in between.
    """

    def __init__(self, maps: SegmentMaps, path: Path, start: int, size: int, writable: bool) -> None:
        self._maps = maps
        self.path = path
        self.start = start
        self.end = start + size
        self._size = size
        self._writable = writable
        self._file: MappedFile | None = None
        self._lock = threading.Lock()

    @property
    def file(self) -> MappedFile:
        return self._file or self._map()

    def _map(self) -> MappedFile:
        with self._lock:
            file = self._file
            if file is None:
                self._maps.make_room(self)
                try:
                    file = MappedFile(self.path, size=self._size, writable=self._writable)
                except OSError as error:
                    if error.errno not in EXHAUSTED or not self._maps.make_room(self, 0):
                        raise
                    file = MappedFile(self.path, size=self._size, writable=self._writable)
                self._file = file
        return file

    def let_go(self) -> None:
        """Unmap it as soon as nobody looks at it."""
        self._file = None

    def map_has_blank(self, position: int) -> bool:
        """Whether an end-of-segment record lies at a position."""
        blank = BLANK_HEADER.pack(self._size - position, L.BLANK_MAGIC)
        return 0 <= position < self._size and bytes(self.file.map[position : position + len(blank)]) == blank

    def used_end(self, begin: int) -> int:
        """Position behind the last byte at or behind `begin` that is not zero; `begin` when there is none."""
        file = self.file
        data_end = file.data_end()
        return used_size(memoryview(file.map)[:data_end], begin) if begin < data_end else begin

    def create(self) -> None:
        """Make the file with its first blocks; file and directory entry are durable before it is used."""
        self._maps.make_room(self)
        self._file = MappedFile(self.path, size=self._size, writable=True, create=True)
        try:
            self._file.reserve(0, min(self._size, RESERVE_AHEAD), RESERVE_AHEAD)
            self._file.sync_all()
        except BaseException:
            self.close()
            os.unlink(self.path)
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class SegmentMaps:
    """Which segments are mapped: at most `limit`, and those that must be. Thread-safe."""

    def __init__(self, limit: int, kept: Callable[[], Collection[Segment]]) -> None:
        """kept: tells the segments that must stay mapped."""
        self._limit = limit
        self._kept = kept
        self._mapped: list[Segment] = []
        self._lock = threading.Lock()

    def make_room(self, segment: Segment, limit: int | None = None) -> int:
        """Before a segment is mapped: let go of those mapped longest ago; returns of how many."""
        with self._lock:
            kept = self._kept()
            excess = len(self._mapped) + 1 - (self._limit if limit is None else limit)
            gone = [other for other in self._mapped if other not in kept and other is not segment][: max(0, excess)]
            for other in gone:
                other.let_go()
            self._mapped = [other for other in self._mapped if other not in gone and other is not segment]
            self._mapped.append(segment)
            return len(gone)

    def retain(self, segments: Collection[Segment]) -> None:
        """Let go of all others: their files are gone, and a map would keep the disk's space."""
        with self._lock:
            self._mapped = [segment for segment in self._mapped if segment in segments]
