# SPDX-License-Identifier: Apache-2.0
"""Segments of the commit log as files: mapped when needed, so many at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._mapguard import lost_pages
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq._core._record import resync, used_size
from rmq._core._recordbatch import RecordBatch
from rmq.errors import CorruptFileError, StoreClosedError
from rmq.mappedfile import MappedFile, data_end
from rmq.segment import EXHAUSTED, file_size, opened, remove_file

LOOK = 1024 * 1024  # bytes that are looked at at a time
BLANK_HEADER = struct.Struct(">ii")
RECORD_MAGICS = (L.RECORD_MAGIC_V1, L.RECORD_MAGIC_V2)
RESERVE_AHEAD = 64 * 1024 * 1024
WRITTEN_FROM = 256 * 1024  # bytes of a batch that is not small
WRITE_OUT_FROM = 64 * 1024  # bytes; with less of them others that write meanwhile take longer
WRITE_SIZE = 2 * 1024 * 1024  # bytes of records that are encoded before they are written; of a file copied
ZEROS_AT_END = 128 * 1024  # more than a record may end with: its topic and its properties


class Held(Protocol):
    """Bytes of a segment: `map` begins at the phy offset `start`; `behind` bytes of the segment follow it."""

    map: Any
    start: int
    behind: int

    def check(self) -> None:
        """CorruptFileError when some of them were gone."""

    def data_end(self) -> int:
        """Position in the map behind the last byte that may be no zero."""


class Segment:
    """One file of the log, mapped at first use; the map may be let go of, then the next use maps it again.

    Who needs the same map twice keeps it: another thread may let go of it in between.
    """

    def __init__(self, maps: SegmentMaps, path: Path, start: int, size: int, writable: bool, inode: int = 0) -> None:
        self._maps = maps
        self.path = path
        self.inode = inode  # as listed; another file of that name is another segment
        self.start = start
        self.end = start + size
        self._size = size
        self._writable = writable
        self._file: MappedFile | None = None
        self._lost: MappedFile | None = None  # let go of with pages that were gone
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler's call may come amid another of its thread

    @property
    def file(self) -> MappedFile:
        file = self._file
        if file is None or (lost_pages() and not self._writable and file.map.lost >= 0):
            return self._map(file)
        return file

    def _map(self, old: MappedFile | None) -> MappedFile:
        """Map the file; a reader maps it anew when pages were gone."""
        with self._lock:
            file = self._file
            if self._is_closed:
                raise StoreClosedError(f"{self.path}: store is closed")
            if file is None or file is old:
                self._maps.make_room(self)
                self._maps.check_place()
                try:
                    file = MappedFile(self.path, size=self._size, writable=self._writable, start=self.start)
                except OSError as error:
                    if error.errno not in EXHAUSTED or not self._maps.make_room(self, 0):
                        raise
                    file = MappedFile(self.path, size=self._size, writable=self._writable, start=self.start)
                if old is not None:
                    self._lost = old  # others may have read it
                self._maps.keep(self, file)
                if self._is_closed:  # by a signal handler meanwhile
                    self.close()
                    raise StoreClosedError(f"{self.path}: store is closed")
        return file

    # What a store reads of a segment goes through these: of one that is fetched piece by piece the rest reads as zeros,
    # of one that is read in windows there is no more than was asked for.

    def holding(self, begin: int, end: int) -> Held:
        """The file, of which only the phy offsets [begin, end) are read."""
        return self.file

    def holding_records(self, phy_offsets: npt.NDArray[np.int64]) -> Held:
        """The file, of which only records that begin at some phy offsets are read."""
        return self.file

    def holding_what_is_left(self, phy_offsets: npt.NDArray[np.int64]) -> Held:
        """holding_records; of a file that has another size what is there."""
        try:
            return self.holding_records(phy_offsets)
        except CorruptFileError:
            return self.of_any_size(int(phy_offsets[0]), self.end)

    def at_once(self, records: int) -> int:
        """Of how many phy offsets, of so many, `holding_records` takes the records in at a time."""
        return records

    def reach(self, begin: int, end: int, records: int) -> int:
        """How far to go in one step, for a reader of so many records from `begin` on: over one of them at least."""
        return end

    def of_any_size(self, begin: int, end: int) -> MappedFile:
        """The file as it is, mapped for the caller, who closes it and reads only the phy offsets [begin, end)."""
        return MappedFile(self.path, start=self.start)

    def read_ahead(self, begin: int, end: int) -> None:
        """Ask the disk for the phy offsets [begin, end), and wait for nothing. What cannot be asked for is no error."""
        position = begin - self.start
        position -= position % mmap.PAGESIZE
        with contextlib.suppress(OSError, CorruptFileError):
            self.file.map.madvise(mmap.MADV_WILLNEED, position, end - self.start - position)

    def is_there(self) -> bool:
        """Whether the file is mapped or can be: false when it was removed before anybody looked into it."""
        try:
            return self.file is not None
        except FileNotFoundError:
            return False
        except CorruptFileError:  # who reads it is told, but where it was removed and is being made again
            return self._writable or file_size(self.path) > 0

    def is_emptied(self) -> bool:
        """Whether nobody has mapped it, and it holds no bytes now: it was made again, of the same inode even."""
        return self._file is None and file_size(self.path) == 0

    def let_go(self) -> None:
        """Unmap it as soon as nobody looks at it."""
        file, self._file = self._file, None
        if file is not None and lost_pages() and file.map.lost >= 0:
            self._lost = file

    def detach(self) -> None:
        """Before its file is removed: mapped to its end, so that those who read it can go on."""
        file = None
        while file is None or self._file is not file:  # let go of before the maps forgot it
            file = self.file
            self._maps.forget(self)
        file.detach()

    def check(self) -> None:
        """CorruptFileError when pages of a map were gone, of a reader's once."""
        if lost_pages():
            for file in (self._lost, self._file):
                if file is not None and file.map.lost >= 0:
                    self._lost = None
                    if not self._writable and file is self._file:
                        self._file = None
                    file.check()

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        begin = self.start + position
        file = self.holding(begin, min(begin + size, self.end))
        data = bytes(file.map[begin - file.start : begin - file.start + size])
        file.check()
        return data

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """Bytes of the file from one position to another, so many at a time that memory has room for them."""
        for position in range(begin, end, WRITE_SIZE):
            yield self.read(position, min(WRITE_SIZE, end - position))

    def scan(self, batch: RecordBatch, begin: int, end: int, **options: Any) -> int:
        """RecordBatch.scan of a range of phy offsets, a part of it when the segment has to be fetched."""
        end = self.reach(begin, end, batch.capacity)
        file = self.holding(begin, end)
        stop: int = batch.scan(file.map, file.start, begin, end, behind=file.behind, **options)
        file.check()
        return stop

    def ends_with_blank(self, position: int) -> bool:
        """Whether an end-of-segment record lies at a position, and nothing behind it."""
        blank = BLANK_HEADER.pack(self._size - position, L.BLANK_MAGIC)
        end = position + len(blank)
        return 0 <= position < self._size and self.read(position, len(blank)) == blank and self.used_end(end) == end

    def used_end(self, begin: int) -> int:
        """Position behind the last byte at or behind `begin` that is not zero; `begin` when there is none."""
        file = self.holding(self.start + begin, self.end)
        data_end = file.data_end()
        end = used_size(memoryview(file.map)[:data_end], begin) if begin < data_end else begin
        file.check()
        return end

    def resync(self, begin: int, end: int) -> int:
        """Phy offset of the first whole record at or behind `begin` and below `end`, -1 when none."""
        # A record without properties ends with zeros. `used_end` would look at all that follow, for each damaged place.
        file = self.holding(begin, end)
        end = max(begin, min(end, file.start + file.data_end() + ZEROS_AT_END))
        found: int = resync(file.map, file.start, begin, end)
        file.check()
        return found

    def create(self) -> None:
        """Make the file with its first blocks; file and directory entry are durable before it is used."""
        self._maps.make_room(self)
        try:
            # Kept here: not yet the log's end, so another thread that maps a segment may let go of it.
            file = MappedFile(self.path, size=self._size, writable=True, create=True, start=self.start)
            self._maps.keep(self, file)
            self.inode = file.inode
            file.reserve(0, min(self._size, RESERVE_AHEAD), RESERVE_AHEAD)
            file.sync_all()
        except FileExistsError:
            raise
        except BaseException:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            file, self._file = self._file, None
        if file is not None:
            file.close()


class RecordWriter:
    """Rows of a batch into a segment: small batches through its map, large ones by positioned writes.

    A store through the map fills each fresh page with zeros first, and makes the kernel write back its whole folio. A
    write does neither: 1 KiB messages take a tenth to a third less of the processors' time. Small batches are quicker
    through the map, and so are all whose pages are in the page cache.
    """

    def __init__(self) -> None:
        self.is_small = True  # the last batch
        self.is_synced = False  # after each batch
        self.is_alone = False  # nobody else waited for the last sync
        self.has_written = False  # a large batch, since the preparer looked
        self._buffer = bytearray()

    def write(self, batch: PutBatch, file: MappedFile, start: int, position: int, first: int, stop: int,
              store_timestamp: int, queues: QueueTable) -> None:  # fmt: skip
        """Rows [first, stop) at a position of a segment that begins at phy offset `start`. Raises OSError.

        Whole records in order, so that a process that is killed leaves a beginning of them.
        """
        if self.is_small or position + batch.records_size <= file.warmed:
            batch.encode(file.map, start, position, first, stop, store_timestamp, queues)
            return
        self.has_written = True
        while first < stop:
            while not (rows := batch.fit(first, len(self._buffer))[0]):
                self._buffer = bytearray(max(WRITE_SIZE, 2 * len(self._buffer)))
            rows = min(rows, stop - first)
            size = batch.encode(self._buffer, start + position, 0, first, first + rows, store_timestamp, queues)
            file.write(position, memoryview(self._buffer)[:size])
            if self.is_synced and batch.waits and (self.is_alone or size >= WRITE_OUT_FROM):  # the disk begins
                file.begin_write_out(position, size)
            position += size
            first += rows


class FollowingSegment:
    """The segment behind the last one: made before the log needs it, by another thread. Thread-safe."""

    def __init__(self, make: Callable[[int], Segment], segments: Callable[[], list[Segment]]) -> None:
        """make: a segment, as yet without a file, that begins at a phy offset. segments: those of the log now, asked
        under the lock: behind the last of an older list may be one that holds messages.
        """
        self._make, self._segments = make, segments
        self._segment: Segment | None = None
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[Segment]:
        """It, if it was made."""
        segment = self._segment
        return [] if segment is None else [segment]

    def prepare(self) -> Segment:
        """Make it, behind the last one of the log, unless it is there. OSError (ENOSPC)."""
        with self._lock:
            self._segment = segment = self._at(self._segments()[-1].end)
        return segment

    def append(self, start: int) -> Segment:
        """Add it to the log's, made now if it was not. The put lock is the caller's. OSError (ENOSPC)."""
        with self._lock:
            segment = self._at(start)
            self._segment = None  # first: what is the log's `remove` must not find here, whenever an interrupt comes
            self._segments().append(segment)
        return segment

    def _at(self, start: int) -> Segment:
        segment = self._segment
        return segment if segment is not None and segment.start == start else self._made(start)

    def _made(self, start: int) -> Segment:
        segment = self._make(start)
        try:
            segment.create()
        except FileExistsError:
            if not _is_blank(segment.path):
                raise
            os.unlink(segment.path)  # of an earlier try, of which a signal ended the cleaning up
            segment = self._make(start)
            segment.create()
        return segment

    def remove(self) -> None:
        """Remove its file, if it was made; durable. OSError."""
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
            remove_file(segment.path)


def _is_blank(path: Path) -> bool:
    """Whether a file holds nothing but zeros."""
    with opened(path) as descriptor:
        size = data_end(path, os.fstat(descriptor).st_size)
        return all(used_size(os.pread(descriptor, LOOK, at), 0) == 0 for at in range(0, size, LOOK))


class SegmentMaps:
    """Which segments are mapped: at most `limit`, and those that must be. Thread-safe."""

    def __init__(self, limit: int, kept: Callable[[], Collection[Segment]]) -> None:
        """kept: tells the segments that must stay mapped."""
        self._limit = limit
        self._kept = kept
        self._mapped: list[Segment] = []
        self._lock = threading.RLock()
        self.check_place: Callable[[], None] = lambda: None  # raises where files of these names are no longer the log's

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

    def keep(self, segment: Segment, file: MappedFile) -> None:
        """It is mapped: others that were meanwhile may have taken it off the list."""
        with self._lock:
            segment._file = file
            if segment not in self._mapped:
                self._mapped.append(segment)

    def forget(self, segment: Segment) -> None:
        """Never let go of it."""
        with self._lock:
            self._mapped = [other for other in self._mapped if other is not segment]

    def retain(self, segments: Collection[Segment]) -> None:
        """Forget all others, whose files are gone; who holds one closes it."""
        with self._lock:
            self._mapped = [segment for segment in self._mapped if segment in segments]
