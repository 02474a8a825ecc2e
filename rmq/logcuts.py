# SPDX-License-Identifier: Apache-2.0
"""What tells that records were taken off a log's end: the last one is another, or a broker's epoch is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from rmq._core import _layout as L
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError
from rmq.paths import version_of
from rmq.segment import SMALL_FILE, read_file

_PROOF_SIZE = L.RECORD_BODY_OFFSET  # of a record: what is before its body, with its place and its times


@dataclass(frozen=True)
class Proof:
    """Where a record lies that was the log's last one, and how it begins."""

    phy_offset: int
    head: bytes

    @staticmethod
    def of(log: CommitLog, phy_offset: int) -> Proof | None:
        segment = log.segment_at(phy_offset)
        if segment is None:
            return None
        with contextlib.suppress(CorruptFileError):  # who reads there is told
            return Proof(phy_offset, segment.read(phy_offset - segment.start, _PROOF_SIZE))
        return None

    def is_cut(self, log: CommitLog) -> bool:
        """Whether it has gone, and not with a cleaning: a recovery took it off."""
        if self.phy_offset < log.min_phy_offset:
            return False
        with contextlib.suppress(CorruptFileError):
            segment = log.segment_at(self.phy_offset)  # which looks again: it may have been cleaned since
            if segment is None:
                return self.phy_offset >= log.min_phy_offset
            return segment.read(self.phy_offset - segment.start, _PROOF_SIZE) != self.head
        return False


def last_epoch(path: Path) -> int | None:
    """Where in the log a broker of controller mode began its last epoch, None: nobody tells. Source: EpochFileCache."""
    with contextlib.suppress(OSError, ValueError, IndexError, CorruptFileError):
        return int(read_file(path, SMALL_FILE).split()[-1].rpartition(b"-")[2])
    return None


class Epochs:
    """Those of a broker in controller mode, which cuts its log where another one's differs, and goes on there, as they
    stand. last: where the last one began, None: nobody tells.
    """

    def __init__(self, path: Path, log: CommitLog) -> None:
        self._name = str(path)
        self._seen, self.last = version_of(self._name), last_epoch(path)
        self._first = Proof.of(log, self.last) if self.last is not None else None

    def have_changed(self, log: CommitLog) -> bool:
        """Whether another epoch began since, or its first record came."""
        return version_of(self._name) != self._seen or (self._first is not None and self._first.is_cut(log))
