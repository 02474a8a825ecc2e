# SPDX-License-Identifier: Apache-2.0
"""Queues of a store whose disk has no room for their units: as far as the files came, and the rest in memory."""

from __future__ import annotations

from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import ConsumeQueue
from rmq.dispatch import Dispatcher
from rmq.filecache import FileCache
from rmq.queueset import QueueSet


class Overflow:
    """What a writing store reads in place of its queues while they cannot follow the log. Nothing is written."""

    def __init__(self, log: CommitLog, queues: QueueSet, dispatcher: Dispatcher[ConsumeQueue],
                 config: StoreConfig) -> None:  # fmt: skip
        """queues, dispatcher: the writer's."""
        self._log, self._queues, self._dispatcher, self._config = log, queues, dispatcher, config
        self._files = FileCache(writable=False)
        self._made: tuple[tuple[int, int], QueueSet, Dispatcher[ConsumeQueue]] | None = None

    def level(self, end: int) -> QueueSet:
        """Queues with the units of all records below `end`, the writer's own once they have them. Call under the put
        lock, with the log's end. Raises CorruptFileError, OSError when their files cannot be read.
        """
        derived, low = self._dispatcher.queue_phy_offset, self._log.min_phy_offset
        if derived >= end:
            self._made = None
            return self._queues
        if self._made is None or self._made[0] != (derived, low):  # dispatched further, or cleaned
            # Others may still read the one before.
            queues = self._queues.to_read(derived, self._files)
            for queue in queues.queues.values():
                queue.correct_min_offset(low)
            dispatcher = Dispatcher(self._log, queues, None, self._config)
            dispatcher.queue_phy_offset = derived
            self._made = (derived, low), queues, dispatcher
        _, queues, dispatcher = self._made
        dispatcher.advance(end)
        return queues

    def close(self) -> None:
        self._files.close()
