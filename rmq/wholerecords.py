# SPDX-License-Identifier: Apache-2.0
"""Scans that go on behind damage: the whole records of a log, and what of it was left out, told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmq._core._mapguard import lost_pages
from rmq._core._record import (
    CHECK_SECTORS,
    SCAN_BAD_BODY_CRC,
    SCAN_BAD_RECORD_CRC,
    SCAN_BLANK,
    SCAN_FULL,
    SCAN_LIMIT,
    SCAN_REASONS,
    resync,
)
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError
from rmq.logscan import CHECK_CRC
from rmq.logsegment import Segment
from rmq.mappedfile import MappedFile
from rmq.paths import segment_name
from rmq.segment import EXHAUSTED

logger = logging.getLogger("rmq")

Tell = Callable[[Path, int, int, str], None]


@dataclass(frozen=True)
class LostRange:
    """Bytes [begin_phy_offset, end_phy_offset) of the log in which a scan found no whole record; `path` holds them all.

    What lay there is not known: messages, or the unused end of a segment. reason: what is wrong at the first byte.
    """

    path: str
    begin_phy_offset: int
    end_phy_offset: int
    reason: str


def teller(on_damage: str, lost: list[LostRange] | None) -> Tell | None:
    """What a scan that goes on behind damage calls for each range: a warning, and an item of `lost`; None: "raise"."""
    if on_damage not in ("raise", "skip"):
        raise ValueError(f"on_damage must be 'raise' or 'skip', got {on_damage!r}")
    if lost is not None and not isinstance(lost, list):
        raise TypeError(f"lost must be a list, got {type(lost).__name__}")
    if on_damage == "raise":
        return None

    def tell(path: Path, begin: int, end: int, reason: str) -> None:
        logger.warning("%s: no whole record in the log's bytes %d to %d: %s", path, begin, end - 1, reason)
        if lost is not None:
            lost.append(LostRange(str(path), begin, end, reason))

    return tell


class WholeRecords:
    """CommitLog.records that goes on at the next whole record; what it leaves out is told, file by file."""

    def __init__(self, log: CommitLog, begin: int, end: int, batch: RecordBatch, tell: Tell, *, checks: int = 0,
                 copies: bool = False, **options: Any) -> None:  # fmt: skip
        """copies: of the records more is copied than headers."""
        self._copies = copies
        self._log, self._begin, self._end = log, begin, end
        self._batch, self._tell, self._checks, self._options = batch, tell, checks, options
        self._file: MappedFile | None = None  # of the rows at hand
        self._lost = 0  # pages of any file, when these rows had been found whole

    def __iter__(self) -> Iterator[RecordBatch]:
        log, begin = self._log, self._begin
        while begin < self._end:
            start = begin - begin % log.segment_size
            stop = min(self._end, start + log.segment_size)
            segment = log.segment_at(begin)
            if segment is None:
                self._tell(log.directories[0] / segment_name(start), begin, stop, "segment is missing")
            else:
                yield from self._of_segment(segment, begin, stop)
            begin = stop

    def check(self) -> None:
        """CorruptFileError when a page has gone since the rows at hand were found whole: ask once they are copied."""
        if self._file is not None and lost_pages() != self._lost:
            self._file.check()

    def _of_segment(self, segment: Segment, begin: int, end: int) -> Iterator[RecordBatch]:
        """The whole records of one segment in [begin, end), whatever lies between them."""
        batch, tell = self._batch, self._tell
        try:
            file = segment.of_any_size(begin, end)  # what is there is read
        except (CorruptFileError, OSError) as error:
            if getattr(error, "errno", None) in EXHAUSTED:
                raise  # of this process: the file may be whole
            tell(segment.path, begin, end, error.reason if isinstance(error, CorruptFileError) else str(error.strerror))
            return
        with closing(file), memoryview(file.map)[: self._log.segment_size] as data:
            limit = min(end, segment.start + file.size)
            while begin < limit:
                stop = self._scan(file, data, begin, limit)
                begin = batch.next_phy_offset
                if batch.count:
                    yield batch
                    self.check()
                if stop == SCAN_BLANK:
                    break
                if stop in (SCAN_FULL, SCAN_LIMIT):
                    continue
                position = begin - segment.start
                if stop in (SCAN_BAD_BODY_CRC, SCAN_BAD_RECORD_CRC):  # lengths add up: they say where the next one is
                    following = begin + int.from_bytes(data[position : position + 4], "big")
                elif (following := resync(data, segment.start, begin + 1, limit)) < 0:
                    following = limit
                tell(segment.path, begin, following, SCAN_REASONS[stop])
                begin = following
            batch.release()
            self._file = None
            if begin < limit:  # a blank record ends the segment
                return
        if max(begin, limit) < end:
            tell(segment.path, max(begin, limit), end,
                 f"file has {file.size} bytes, expected {self._log.segment_size}")  # fmt: skip

    def _scan(self, file: MappedFile, data: memoryview, begin: int, limit: int) -> int:
        """Rows from `begin` on. A page that is gone reads as zeros: bodies are checked then, wanted or not."""
        stop = self._batch.scan(data, file.start, begin, limit, checks=self._checks, **self._options)
        if self._copies:  # else the pages of headers alone, or of bodies, were read
            file.touch(begin - file.start, self._batch.next_phy_offset - file.start)
        if lost_pages() and file.map.lost >= 0:
            stop = self._batch.scan(data, file.start, begin, limit,
                                    checks=self._checks | CHECK_CRC | CHECK_SECTORS, **self._options)
        self._file, self._lost = file, lost_pages()
        return stop


def aligned(log: CommitLog, phy_offset: int, end: int) -> int:
    """CommitLog.align on a damaged log."""
    segment = log.segment_at(phy_offset) if phy_offset < end else None
    if segment is None or segment.start == phy_offset:
        return min(phy_offset, end)
    for batch in WholeRecords(log, segment.start, min(end, segment.end), RecordBatch(), lambda *_: None):
        offsets = batch.numbers("phy_offset")
        if offsets[-1] >= phy_offset:
            return int(offsets[np.searchsorted(offsets, phy_offset)])
    return min(segment.end, end)
