# SPDX-License-Identifier: Apache-2.0
"""What of a store a flush has to sync."""

from __future__ import annotations

import logging
from itertools import takewhile
from pathlib import Path

from rmq.commitlog import CommitLog
from rmq.index import Index
from rmq.indexfile import IndexFile
from rmq.logsegment import Segment
from rmq.queueset import QueueSet

logger = logging.getLogger("rmq")


class Owed:
    """Files that are not on disk as they stand. They stay here until they are: an interrupt may end a flush anywhere.
    Whoever syncs segments and index files takes them off.
    """

    def __init__(self, log: CommitLog, queues: QueueSet, index: Index) -> None:
        self.segments: list[Segment] = []
        self.queue_files: set[Path] = set()  # and directories with new names
        self.index_files: list[IndexFile] = []
        self._log, self._queues, self._index = log, queues, index
        self._told = {"log": "", "index": ""}  # names of the last ones
        self._news()

    def take(self) -> None:
        """What was written since the last call; not what a cleaning has removed. Call under the put lock."""
        self._log.take_unsynced(self.segments)
        self._queues.take_dirty(self.queue_files)
        self._index.take_unsynced(self.index_files)
        self.segments = [segment for segment in self.segments if segment in self._log.segments]
        self.index_files = [file for file in self.index_files if file in self._index.files]

    def _news(self) -> list[tuple[str, Path]]:
        """Files that log and index have gone on to since the last call."""
        log = self._behind("log", [segment.path for segment in self._log.segments])
        return [("log", path) for path in log] + [
            ("index", path) for path in self._behind("index", [file.path for file in self._index.files])]

    def _behind(self, part: str, paths: list[Path]) -> list[Path]:
        """Those that come behind the last one that was told."""
        told = self._told[part]
        new = list(takewhile(lambda path: path.name > told, reversed(paths)))[::-1]
        self._told[part] = new[-1].name if new else told
        return new

    def tell(self) -> None:
        """Of new files. Call under no lock: a handler of logging has its own, and may put."""
        for part, path in self._news():
            logger.info("%s: the %s goes on here", path, part)

    def sync_queues(self) -> None:
        """Sync all of queue_files that no cleaning has removed, and forget them. Call beside no cleaning."""
        self._queues.sync([path for path in self.queue_files if path.exists()])
        self.queue_files = set()
