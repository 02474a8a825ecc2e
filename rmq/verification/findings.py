# SPDX-License-Identifier: Apache-2.0
"""What a verification finds, and the collection that keeps so many of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DAMAGE = "damage"
DERIVED = "derived"
NOTE = "note"
SEVERITIES = (DAMAGE, DERIVED, NOTE)
LIMIT = 1000  # findings that are kept

# The vocabulary of Finding.kind; docs/reference/verify.md shows it.
KINDS = {
    "name": "a name that no file of a store has",
    "size": "a file of the wrong length",
    "missing": "a file that must be there and is not",
    "record": "no record where one must be: magic, size, own offset or lengths are wrong, or zeros",
    "crc": "a record whose body CRC or whole-record CRC differs",
    "sector": "a record with a zeroed 512-byte sector in its topic or properties",
    "tail": "bytes behind the end of the log: a torn record, or what recovery left",
    "unit": "a queue's unit that is not that of its record",
    "unit-missing": "messages without a unit in their queue",
    "unit-extra": "a unit of no message of the queue",
    "entry": "an index entry of no key of its record, of no record, out of order, or with a wrong time",
    "entry-missing": "keys without an entry in an index that covers their records",
    "link": "an index entry that does not link to the newest entry of its slot before it",
    "slot": "an index slot that does not hold its newest entry",
    "header": "an index header that differs from the entries",
    "order": "index files that overlap, or one that is not full though another follows",
    "checkpoint": "a checkpoint that is ahead of the log, or holds what is no time",
    "own": "a file of <store>/rmq/ that does not fit the store",
    "open": "the store was not closed; queues and index may be behind the log",
    "leftover": "a file that nothing needs any more",
    "mode": "a file or directory that everybody may write",
    "unread": "a part of the store that is not verified here",
}


@dataclass(frozen=True)
class Finding:
    """One broken rule. path: the file; offset: byte in it, 0 when the whole file is meant; kind: one of KINDS.

    severity: "damage" (messages are lost or doubtful), "derived" (queues, index, checkpoint: can be derived again from
    the log), "note" (harmless). reason: what is wrong, in words.
    """

    path: str
    offset: int
    kind: str
    severity: str
    reason: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.path}: byte {self.offset}: {self.reason}"


class VerifyResult(list[Finding]):
    """Findings, the severest first, then by file and offset; at most `limit` of them.

    state: "closed", "open" (a writer holds the store: what it has made visible and derived was verified) or "not
    closed". record_count: whole records; unit_count, entry_count: units and index entries that are their record's;
    size_read: bytes of log, queues and index that were read. damage_count, derived_count, note_count: findings of each
    severity, those past the limit too; omitted: how many these are.
    """

    def __init__(self, findings: Iterable[Finding], *, state: str, record_count: int, unit_count: int,
                 entry_count: int, size_read: int, counts: dict[str, int]) -> None:  # fmt: skip
        super().__init__(findings)
        self.state = state
        self.record_count = record_count
        self.unit_count = unit_count
        self.entry_count = entry_count
        self.size_read = size_read
        self.damage_count, self.derived_count, self.note_count = (counts[severity] for severity in SEVERITIES)
        self.omitted = sum(counts.values()) - len(self)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found but notes."""
        return not self.damage_count and not self.derived_count


class Report:
    """Collects findings of several threads; of each severity it keeps the first `limit` and counts the others."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[str, list[Finding]] = {severity: [] for severity in SEVERITIES}
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(SEVERITIES, 0)

    def add(self, path: str | os.PathLike[str], offset: int, kind: str, severity: str, reason: str) -> None:
        finding = Finding(os.fspath(path), offset, kind, severity, reason)
        assert kind in KINDS
        with self._lock:
            self.counts[severity] += 1
            if len(self._kept[severity]) < self.limit:
                self._kept[severity].append(finding)

    def count(self, severity: str, more: int) -> None:
        """Findings that are only counted."""
        with self._lock:
            self.counts[severity] += more

    def kept(self) -> list[Finding]:
        """All that are kept, `limit` of each severity at most."""
        return [finding for found in self._kept.values() for finding in found]

    def merge(self, kept: list[Finding], counts: dict[str, int]) -> None:
        """Take over what another report has."""
        with self._lock:
            for finding in kept:
                if len(self._kept[finding.severity]) < self.limit:
                    self._kept[finding.severity].append(finding)
            for severity, count in counts.items():
                self.counts[severity] += count

    def is_full(self, severity: str) -> bool:
        return len(self._kept[severity]) >= self.limit

    def derived(self, path: Path, offset: int, kind: str, reason: str) -> None:
        self.add(path, offset, kind, DERIVED, reason)

    def damage(self, path: Path, offset: int, kind: str, reason: str) -> None:
        self.add(path, offset, kind, DAMAGE, reason)

    def note(self, path: Path, offset: int, kind: str, reason: str) -> None:
        self.add(path, offset, kind, NOTE, reason)

    def findings(self) -> list[Finding]:
        """The kept ones, at most `limit` in all."""
        found = [finding for severity in SEVERITIES
                 for finding in sorted(self._kept[severity], key=lambda item: (item.path, item.offset, item.kind,
                                                                               item.reason))]  # fmt: skip
        return found[: self.limit]
