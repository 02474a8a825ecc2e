# SPDX-License-Identifier: Apache-2.0
"""Which ranges of the log the index covers, by the headers of its files."""

from __future__ import annotations

from collections.abc import Sequence

from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.index import Index
from rmq.indexfile import IndexFile
from rmq.query import has_keys

Range = tuple[int, int]


class Coverage:
    """Of an index's files, as a reader finds them."""

    def __init__(self, log: CommitLog, index: Index) -> None:
        self._log, self._index = log, index
        self._keyless: set[Range] = set()  # gaps between files that hide no key

    def gaps(self, files: Sequence[IndexFile], end: int, *, is_closed: bool) -> tuple[list[Range], int]:
        """Ranges in front of and between files whose keys none of them holds, and where the last one ends.

        end: of the log. is_closed: the writer left no record half indexed.
        """
        log, index = self._log, self._index
        covered, ranges = log.min_phy_offset, []
        for file in files:
            begin = file.begin_phy_offset
            is_hidden = begin >= covered if index.damaged else begin > covered
            if is_hidden and (index.damaged or not self._is_keyless(covered, begin, end)):
                # Of the record that this file begins with the missing one may hold keys too.
                ranges.append((covered, self._end_of_record(begin, end)))
            covered = max(covered, file.end_phy_offset)
        if is_closed and files and covered == files[-1].end_phy_offset and not files[-1].is_full:
            covered = self._record_after(covered, end)
        return ranges, covered

    def _is_keyless(self, begin: int, stop: int, end: int) -> bool:
        """Whether a gap between index files hides no key; the answer is kept. Its first record is indexed."""
        if (begin, stop) not in self._keyless:
            following = self._record_after(begin, end)
            if stop > end or has_keys(self._log, following, stop):
                return False
            self._keyless.add((begin, stop))
        return True

    def _record_after(self, phy_offset: int, end: int) -> int:
        """Behind the record at a phy offset when an index file ends with it, else the offset itself."""
        is_end = any(file.end_phy_offset == phy_offset and file.index_count > 1 for file in self._index.files)
        return self._end_of_record(phy_offset, end) if is_end else phy_offset

    def _end_of_record(self, phy_offset: int, end: int) -> int:
        for batch in self._log.records(phy_offset, end, batch=RecordBatch(1)):
            return int(phy_offset + batch.numbers("size")[0])
        return phy_offset
