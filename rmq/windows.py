# SPDX-License-Identifier: Apache-2.0
"""Stores whose log is read in windows: pieces of segments, in memory of their own, where a segment cannot be mapped."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._record import NESTED_LIMIT, SCAN_TRUNCATED, used_size
from rmq._core._recordbatch import RecordBatch
from rmq.config import StoreConfig, config_or_default
from rmq.errors import CorruptFileError, StoreClosedError, UnsupportedFormatError
from rmq.logscan import CHECK_CRC
from rmq.logsegment import BLANK_HEADER, RECORD_MAGICS, ZEROS_AT_END, Held, Segment
from rmq.mappedfile import MappedFile, data_end
from rmq.putting import system_clock
from rmq.segment import open_regular
from rmq.store import Store

WINDOW = 1024 * 1024  # bytes of a window for a scan, which takes as many in one step; more for a larger record
BLOCK = 64 * 1024  # of a window for one record
MAGIC_BEGIN = L.RECORD_MAGIC_V1.to_bytes(4, "big", signed=True)[:3]  # and of version 2


class Window:
    """Bytes of a segment from a phy offset on, as they were when they were read."""

    def __init__(self, start: int, data: bytes, behind: int) -> None:
        self.start, self.map, self.behind = start, data, behind

    def check(self) -> None:
        pass  # what is here does not go

    def data_end(self) -> int:
        return len(self.map)


class _Descriptor:
    """Closed with the last that uses it."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular(path, os.O_RDONLY)

    def __del__(self) -> None:
        if os is not None and getattr(self, "number", -1) >= 0:  # see FileCache
            os.close(self.number)


class WindowedSegment(Segment):
    """A reader's segment of which a window is read for each step, always or from when it could not be mapped on."""

    def __init__(self, *arguments: Any, maps_first: bool) -> None:
        """arguments: of Segment."""
        super().__init__(*arguments)
        self._is_mapped = maps_first
        self._open: _Descriptor | None = None

    def _whole(self) -> MappedFile | None:
        """The map, if there is one."""
        if self._is_mapped:
            try:
                return self.file
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                self._is_mapped = False
        return None

    def _opened(self) -> _Descriptor:
        with self._lock:
            found = self._open
            if self._is_closed:
                raise StoreClosedError(f"{self.path}: store is closed")
            if found is None:
                self._maps.make_room(self)
                found = _Descriptor(self.path)
                size = os.fstat(found.number).st_size
                if size != self._size:
                    raise CorruptFileError(self.path, min(size, self._size),
                                           f"file has {size} bytes, expected {self._size}")  # fmt: skip
                self._open = found
            return found

    def _bytes(self, begin: int, end: int) -> bytes:
        """What lies at the phy offsets [begin, end)."""
        descriptor = self._opened()
        data = b""
        while len(data) < end - begin:
            position = begin - self.start + len(data)
            piece = os.pread(descriptor.number, end - begin - len(data), position)
            if not piece:
                raise CorruptFileError(self.path, position, "page is gone: the file was truncated while it was open")
            data = data + piece if data else piece
        return data

    def _record_size(self, begin: int) -> int:
        """Bytes that the record at a phy offset says it has; 0: there is none for sure, as its first block shows."""
        head = self._bytes(begin, min(begin + BLANK_HEADER.size, self.end))
        if len(head) < BLANK_HEADER.size:
            return 0
        size, magic = BLANK_HEADER.unpack(head)
        if magic not in RECORD_MAGICS or not 0 < size <= self.end - begin:
            return 0
        return size if size <= BLOCK or self._seems_whole(begin) else 0

    def _seems_whole(self, begin: int) -> bool:
        """Whether nothing is wrong with the first block of the record at a phy offset, which is longer."""
        first, one = Window(begin, self._bytes(begin, begin + BLOCK), self.end - begin - BLOCK), RecordBatch(1)
        found = one.scan(first.map, begin, begin, begin + BLOCK, behind=first.behind) == SCAN_TRUNCATED
        one.release()
        return found

    def _is_own(self, place: int) -> bool:
        """Whether what may be a record at a phy offset says so too."""
        begin, end = place + L.RECORD_PHY_OFFSET_OFFSET, place + L.RECORD_SYS_FLAG_OFFSET
        return self._bytes(begin, min(end, self.end)) == place.to_bytes(end - begin, "big")

    def reach(self, begin: int, end: int, records: int) -> int:
        if self._whole() is not None:
            return end
        return min(end, begin + max(WINDOW if records > 1 else BLOCK, self._record_size(begin)))

    def holding(self, begin: int, end: int) -> Held:
        found = self._whole()
        if found is not None:
            return found
        return Window(begin, self._bytes(begin, max(begin, end)), self.end - max(begin, end))

    def at_once(self, records: int) -> int:
        try:
            return records if self._whole() is not None else 1
        except CorruptFileError:
            return records  # who reads it is told

    def holding_records(self, phy_offsets: npt.NDArray[np.int64]) -> Held:
        begin = int(phy_offsets[0])
        return self.holding(begin, min(self.end, begin + max(BLANK_HEADER.size, self._record_size(begin))))

    def read_ahead(self, begin: int, end: int) -> None:
        if self._whole() is not None:
            super().read_ahead(begin, end)
            return
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._opened().number, begin - self.start, end - begin, os.POSIX_FADV_WILLNEED)

    def is_there(self) -> bool:
        try:
            return self._whole() is not None or self._opened() is not None
        except FileNotFoundError:
            return False
        except CorruptFileError:
            return True  # who reads it is told

    def used_end(self, begin: int) -> int:
        if self._whole() is not None:
            return super().used_end(begin)
        end = self._data_end()
        while end > begin:
            first = max(begin, end - WINDOW)
            used = used_size(self._bytes(self.start + first, self.start + end), 0)
            if used:
                return first + used
            end = first
        return begin

    def resync(self, begin: int, end: int) -> int:
        if self._whole() is not None:
            return super().resync(begin, end)
        end = min(end, self.start + self._data_end() + ZEROS_AT_END)
        one, first, left = RecordBatch(1), begin, NESTED_LIMIT * (end - begin)
        while begin < end:
            data = self._bytes(begin, min(end, begin + WINDOW))
            at = data.find(MAGIC_BEGIN)
            while at >= 0:
                place = begin + at - L.RECORD_MAGIC_OFFSET
                if place >= first and self._is_own(place) and 0 < (size := self._record_size(place)) <= end - place:
                    self.scan(one, place, end, checks=CHECK_CRC)
                    if one.count:
                        one.release()
                        return place
                    left -= size
                    if left < 0:
                        return -1
                at = data.find(MAGIC_BEGIN, at + 1)
            begin += max(len(data) - len(MAGIC_BEGIN) + 1, len(MAGIC_BEGIN))
        return -1

    def _data_end(self) -> int:
        try:
            return data_end(self.path, self._size)
        except FileNotFoundError:
            return self._size

    def let_go(self) -> None:
        super().let_go()
        self._open = None

    def close(self) -> None:
        super().close()
        self._open = None


class WindowedStore(Store):
    """A store, mode "r", whose log is read in windows: with maps_first only where a segment cannot be mapped.

    has_index: False: index files are not mapped either, and queries are an error.
    """

    def __init__(self, path: str | os.PathLike[str], config: StoreConfig | None = None, *, maps_first: bool,
                 has_index: bool) -> None:  # fmt: skip
        """Raises as rmq.open."""
        self._make_segment = partial(WindowedSegment, maps_first=maps_first)
        self._has_index = has_index
        super().__init__(path, "r", config_or_default(config), system_clock, False)
        if not has_index and self._foreign_index is None:
            self._foreign_index = UnsupportedFormatError(path, "opened without its index", "rmq.open maps it")
