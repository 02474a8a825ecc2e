# SPDX-License-Identifier: Apache-2.0
"""Which ranges of the log the index covers, by the headers of its files and the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rmq._core._indexput import key_count
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.index import Durable, Index, entries_at_begin, entries_at_end
from rmq.indexfile import IndexFile
from rmq.marks import read_manifest
from rmq.paths import FileVersion, StorePaths, version_of
from rmq.query import has_keys

Range = tuple[int, int]


def record_at(log: CommitLog, phy_offset: int, end: int) -> tuple[int, int]:
    """End of the record at a phy offset below `end`, and how many keys an index has of it: of tags none was asked of a
    broker below 5.4, nor is one that goes on in its store. Of what is no record the offset and 0.
    """
    for batch in log.scan(phy_offset, end, checks=PARSE_PROPERTIES, batch=RecordBatch(1)):
        return int(phy_offset + batch.numbers("size")[0]), key_count(batch)
    return phy_offset, 0


def hides_keys(log: CommitLog, files: Sequence[IndexFile], number: int, end: int) -> bool:
    """Whether keys are missing where a file of the index follows those before it, or the begin of the log: of records
    between, of the last one before, or of the first one in the file. All files have entries. end: of the log.
    """
    before, first = files[:number], files[number].begin_phy_offset
    last = before[-1].end_phy_offset if before else -1
    following, missing = log.min_phy_offset, 0
    if last >= log.min_phy_offset:
        following, missing = record_at(log, last, end)
        missing -= entries_at_end(before, last)
    if first < max(last, log.min_phy_offset):
        return False  # what a broker indexed again, or a record that was cleaned away
    found = entries_at_begin(files[number:], first)
    if first == last:
        return missing > found
    return missing > 0 or record_at(log, first, end)[1] > found or (
        following < first and has_keys(log, following, first))


class Coverage:
    """Of an index's files, as a reader finds them."""

    def __init__(self, paths: StorePaths, log: CommitLog, index: Index) -> None:
        self._paths, self._log, self._index = paths, log, index
        self._manifest_name = str(paths.manifest)
        self._judged: tuple[list[IndexFile], FileVersion | None] | None = None
        self._misses_files = False
        self._whole: set[Range] = set()  # ends and begins of files between which no key is missing

    def by_manifest(self) -> tuple[bool, bool]:
        """Whether the manifest is there, which it is not while a recovery derives again, and whether files that it
        names are not. They are looked for after a change.
        """
        files, version = self._index.files, version_of(self._manifest_name)
        if self._judged is None or self._judged[0] is not files or self._judged[1] != version:
            manifest = read_manifest(self._paths)
            names = {file.path.name for file in files}
            self._misses_files = manifest is not None and not names.issuperset(manifest.index_files)
            self._judged = files, version
        return version is not None, self._misses_files

    def flushed(self, *, is_told: bool) -> tuple[list[IndexFile], Durable]:
        """After a crash: the files that were on disk, if the checkpoint tells, and what of the index counts then."""
        until = Checkpoint(self._paths.checkpoint).index_msg_timestamp if is_told else -1
        files = list(takewhile(lambda file: file.is_full and file.end_timestamp <= until, self._index.files))
        return files, (int(files[-1].path.name), files[-1].index_count) if files else (0, 0)

    def gaps(self, files: Sequence[IndexFile], end: int, *, is_closed: bool) -> tuple[list[Range], int]:
        """Ranges in front of and between files whose keys none of them holds, and where the last one ends.

        files: with entries. end: of the log. is_closed: the writer left no record half indexed.
        """
        log, index = self._log, self._index
        covered, ranges = log.min_phy_offset, []
        for number, file in enumerate(files):
            begin = file.begin_phy_offset
            if begin >= covered and (index.damaged or self._hides_keys(files, number, covered, end)):
                ranges.append((covered, record_at(log, begin, end)[0]))
            covered = max(covered, file.end_phy_offset)
        holds_all = is_closed and not index.damaged  # a damaged one may hold the rest of the last record's keys
        if holds_all and files and covered == files[-1].end_phy_offset and not files[-1].is_full:
            covered = record_at(log, covered, end)[0]
        return ranges, covered

    def _hides_keys(self, files: Sequence[IndexFile], number: int, covered: int, end: int) -> bool:
        """hides_keys; that nothing is missing is kept."""
        place = covered, files[number].begin_phy_offset
        if place not in self._whole:
            if place[1] > end or hides_keys(self._log, files, number, end):
                return True
            self._whole.add(place)
        return False
