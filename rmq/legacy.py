# SPDX-License-Identifier: Apache-2.0
"""Records whose keys RocketMQ <= 4.9.0 indexed by other rules than they are read by: few or none, found by one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.index import Index
from rmq.paths import StorePaths
from rmq.signs import Release, VersionSign, file_signs, first_messages, has_old_blanks, record_signs
from rmq.wholerecords import WholeRecords

Range = tuple[int, int]
_NEW_RULES: Release = (4, 9, 1)
NO_LEGACY = "has_no_legacy_keys"  # in meta.json: what a broker's small files told before we wrote any


class LegacyKeys:
    """Of one open store. Only a store that may have been indexed by such a release needs the pass."""

    def __init__(self, paths: StorePaths, config: StoreConfig, meta: dict[str, Any] | None, *, is_own: bool,
                 mode: str) -> None:  # fmt: skip
        """config: as it was passed. A reader's names the release that wrote the store, a writer's how it goes on."""
        self.told = {} if is_own else {NO_LEGACY: _is_told(paths, meta)}  # for meta.json
        is_passed = mode == "r" and config.is_explicit("rocketmq_version")
        self._is_possible = False if is_own or is_passed else None  # None: the log tells
        self._found: list[Range] = []
        self._end = 0  # of the pass

    def ranges(self, log: CommitLog, index: Index, config: StoreConfig, covered: int, log_end: int) -> list[Range]:
        """The single records below `covered`, up to where the index is asked."""
        low = log.min_phy_offset
        if self._is_possible is None and low < covered:
            with contextlib.suppress(CorruptFileError):
                # Small files tell of the last broker only, records of the first.
                self._is_possible = has_old_blanks(log) or not (
                    self.told[NO_LEGACY] or _is_later(record_signs(first_messages(log, log_end))))
        if self._is_possible is not False or config.parses_legacy_properties or index.counts_every_put():
            if self._end < covered:
                self._found += ambiguous_records(log, max(self._end, low), covered)
                self._end = covered
            self._found = [place for place in self._found if place[0] >= low]
        return self._found


def ambiguous_records(log: CommitLog, begin: int, end: int) -> list[Range]:
    """Such records of a range, what is damaged left out: of no account to a query that does not meet it."""
    batches = WholeRecords(log, begin, end, RecordBatch(), lambda *_: None, checks=PARSE_PROPERTIES)
    return [place for batch in batches for place in batch.ambiguous()]


def _is_told(paths: StorePaths, meta: dict[str, Any] | None) -> bool:
    """Whether small files show that a later release was at work."""
    if paths.marks.exists():  # they are ours by now
        return meta is not None and meta.get(NO_LEGACY) is True
    with contextlib.suppress(CorruptFileError):  # who must read it tells
        return _is_later(file_signs(paths))
    return False


def _is_later(signs: Iterable[VersionSign]) -> bool:
    return any(sign.first >= _NEW_RULES for sign in signs)
