# SPDX-License-Identifier: Apache-2.0
"""Whether a directory holds the files that it did, for readers that ask before each answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from rmq.segment import is_hidden

SETTLED_NS = 2_000_000_000  # changes so far apart have different times, however slowly a file system's clock ticks
TRUSTED_S = 1.0  # not every file system notes a time for each change: from then on it is listed again

Listing = list[tuple[str, int]]
Times = tuple[int, int, int, int]


class HasPath(Protocol):
    path: Path

    @property
    def inode(self) -> int: ...


class _Look(NamedTuple):
    """listed_at: seconds, monotonic. times: of the directories before they were listed, None of one that changed
    shortly before."""

    listed_at: float
    times: list[Times | None]
    listings: list[Listing]


class DirectoryWatch:
    """Whether directories hold the very files, by name and inode, that a list was made of.

    Cost: a stat of each directory; of one that changed within 2 s, and each second, a listing.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self._names = [str(directory) for directory in directories]
        self._seen = _Look(0.0, [], [])
        self._kept: tuple[Sequence[HasPath], _Look] | None = None

    def is_unchanged(self, files: Sequence[HasPath]) -> bool:
        """Look; `files`: the object that was kept."""
        kept, now, times = self._kept, time.monotonic(), [_settled(name) for name in self._names]
        before = kept[1] if kept is not None and kept[0] is files else None
        if before is not None and before.times == times and None not in times and now - before.listed_at < TRUSTED_S:
            return True
        self._seen = seen = _Look(now, times, [_listing(name) for name in self._names])
        if before is None or before.listings != seen.listings:
            return False
        if self._kept is kept:  # and no other thread had it forgotten meanwhile
            self._kept = (files, seen)
        return True

    def keep(self, files: Sequence[HasPath]) -> None:
        """Keep a list in order of names, if it holds all that is_unchanged saw, and nothing else; of others none, for
        what is kept stays open.
        """
        seen = self._seen
        is_all = [(file.path.name, file.inode) for file in files] == sorted(chain.from_iterable(seen.listings))
        self._kept = (files, seen) if is_all else None

    def forget(self) -> None:
        """A file of the list is not what it was, though its name and inode may be: nothing is unchanged."""
        self._kept = None


def _settled(directory: str) -> Times | None:
    """What changes with each name that comes or goes, of a directory in which none did of late."""
    try:
        status = os.stat(directory)
    except OSError:
        return None
    # Who copies sets the first time back, nobody the second.
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < SETTLED_NS:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _listing(directory: str) -> Listing:
    """(name, inode) of what is not hidden in a directory, in the file system's order; [] when there is none."""
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.inode()) for entry in entries if not is_hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
