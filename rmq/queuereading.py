# SPDX-License-Identifier: Apache-2.0
"""Messages of a Store by queue: pull, units, search by time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from rmq._core._message import to_ms
from rmq.batchconsumequeue import BatchConsumeQueue, batch_queue, batch_queues
from rmq.commitlog import CommitLog
from rmq.consumequeue import ConsumeQueue
from rmq.consumeroffsets import ConsumerOffsets
from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.keys import checked_int, encoded, int64_offset
from rmq.logcuts import Proof
from rmq.message import PullResult
from rmq.openstore import OpenStore, while_open
from rmq.pull import pull_from, search_from, tag_set
from rmq.queueset import QueueSet
from rmq.queueunits import Units
from rmq.segment import LOOKS
from rmq.wholerecords import teller

QUEUES_KEPT, UNITS_KEPT = 64, 1 << 20  # of inner batches, by a reader; with 48 bytes for each unit
_Answer = TypeVar("_Answer")
_Queue = ConsumeQueue | BatchConsumeQueue | None


class QueuePlace(NamedTuple):
    """A queue offset, and by what the queue is known again that it was noted in."""

    queue_offset: int
    min_offset: int
    phy_offset: int  # of the last message below it; -1: it is not there
    proof: Proof | None  # of that message; None: it cannot be read

    @classmethod
    def of(cls, log: CommitLog, queue: _Queue, queue_offset: int) -> QueuePlace:
        if queue is None:
            return cls(queue_offset, 0, -1, None)
        place = queue.phy_offset_below(queue_offset)
        return cls(queue_offset, queue.min_offset, place, Proof.of(log, place) if place >= 0 else None)

    def now(self, log: CommitLog, queue: _Queue) -> int:
        """Where the place is: 0 in a queue that was cleaned away whole, and began at 0 again; the end of one that was
        cut below it, 0 when it has grown since.
        """
        end, before, low = 0, -1, 0
        if queue is not None:
            end, before, low = queue.max_offset, queue.phy_offset_below(self.queue_offset), queue.min_offset
        if before < 0 or self.phy_offset < 0:
            return min(self.queue_offset, end) if low >= self.min_offset else 0
        if self.queue_offset > end:
            return end if before < self.phy_offset else 0
        is_same = before == self.phy_offset and not (self.proof is not None and self.proof.is_cut(log))
        return self.queue_offset if is_same else 0


class QueueReader(OpenStore):
    _offsets: ConsumerOffsets
    _batch_queues: dict[tuple[str, int], BatchConsumeQueue]  # those asked for last

    @while_open
    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Queues that hold or held messages: {topic: {queue_id: (min_queue_offset, max_queue_offset)}}.

        Raises StoreClosedError, CorruptFileError, UnsupportedFormatError (queues in RocksDB). Cost: in a reader a look
        at the directories, and the records that came since.
        """
        self._check_queues()
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for (topic, queue_id), queue in sorted(self._derive().queues.items()):
            if queue.max_offset:
                found.setdefault(topic, {})[queue_id] = (queue.min_offset, queue.max_offset)
        for batched in self._batched():
            if batched.max_offset:
                found.setdefault(batched.topic, {})[batched.queue_id] = batched.min_offset, batched.max_offset
        return found

    def _batched(self) -> list[BatchConsumeQueue]:
        """The queues of inner batches, once the others are derived."""
        low, tails = self._log.min_phy_offset, self._queues.batch_tails
        return [queue.end_at(self._log_end(), low)
                for queue in batch_queues(self._paths.batch_consume_queue, low, tails)]  # fmt: skip

    @while_open
    def groups(self) -> dict[str, dict[str, dict[int, int]]]:
        """From where consumer groups go on: {group: {topic: {queue_id: queue_offset}}}, by config/consumerOffset.json.

        Beside a broker as it wrote them last (each 5 s). An offset may lie outside of its queue's bounds, and the topic
        may be gone. Raises StoreClosedError, CorruptFileError (neither the file nor its .bak tells),
        UnsupportedFormatError (offsets in RocksDB); where there are none, as topics of the log. Cost: the file is read;
        by a writing store when others changed it. Source: RocketMQ ConsumerOffsetManager.
        """
        groups = self._offsets.groups()
        if not groups:
            self._log_end()  # of a directory that is gone: OSError, as of every other answer
        return groups

    def _queue(self, topic: str, queue_id: int, derived: QueueSet | None = None) -> _Queue:
        """derived: what was derived just now."""
        encoded(topic, "topic")
        number = checked_int(queue_id, "queue_id")
        self._check_queues()
        queues = self._derive() if derived is None else derived
        # A topic of inner batches has its single messages in the same queue.
        known = self._batch_queues  # of two threads that come at once the last one's stays
        queue = batch_queue(self._paths.batch_consume_queue, topic, number, self._log.min_phy_offset,
                            known.pop((topic, number), None), queues.batch_tails)  # fmt: skip
        if queue is not None:
            known[topic, number] = queue
            kept = [(key, len(other.units)) for key, other in list(known.items())]
            while len(kept) > QUEUES_KEPT or (sum(count for _, count in kept) > UNITS_KEPT and len(kept) > 1):
                known.pop(kept.pop(0)[0], None)  # the one asked for longest ago
        queue = None if queue is None else queue.end_at(self._log_end(), self._log.min_phy_offset)
        return queue if queue is not None and queue.max_offset else queues.queues.get((topic, number))

    def _ask_queue(self, topic: str, queue_id: int, ask: Callable[[_Queue], _Answer]) -> _Answer:
        """ask(queue), again when the queue was cleaned meanwhile, and maybe began anew."""
        while True:
            begun = self._log.min_phy_offset
            queue = self._queue(topic, queue_id)
            end, lives = (queue.max_offset, queue.lives) if queue is not None else (0, 0)
            try:
                return ask(queue)
            except CorruptFileError:
                self._queue(topic, queue_id)
                is_same = queue is None or (queue.lives == lives and queue.max_offset >= end)
                if self._log.min_phy_offset == begun and is_same:
                    raise

    def _end_for(self, queue: _Queue) -> int:
        """End of the log, not older than the queue's bounds."""
        return self._log_end() if isinstance(queue, BatchConsumeQueue) else self._derived_end()

    @while_open
    def pull(self, topic: str, queue_id: int = 0, queue_offset: int = 0, limit: int = 32, *,
             tags: str | None = None) -> PullResult:  # fmt: skip
        """Up to `limit` messages (0: one) of a queue from a queue offset on, RocketMQ's status and the queue's bounds.

        tags: "A || B" or "*", compared as text; without any tag every message. next_queue_offset: where to go on.
        RocketMQ's transfer caps are not copied. Raises CorruptFileError (a unit points to what is not its message),
        StoreClosedError, UnsupportedFormatError (queues in RocksDB), TypeError, ValueError. Cost: one read of units,
        one record read for each message and for each whose tags' hash is wanted. Source: RocketMQ
        DefaultMessageStore#getMessage.
        """
        place = int64_offset(queue_offset, "queue_offset")
        limit = max(1, checked_int(limit, "limit", least=0))  # RocketMQ hands out one message when asked for none too
        wanted = tag_set(tags)
        return self._ask_queue(topic, queue_id, lambda queue: pull_from(
            self._log, queue, lambda: self._end_for(queue), place, limit, wanted))  # fmt: skip

    @while_open
    def _pull_behind(self, topic: str, queue_id: int, place: QueuePlace, limit: int,
                     wanted: set[str] | None) -> tuple[PullResult, QueuePlace]:  # fmt: skip
        """pull from where a place is now, at the queue's first message if that lies behind it, and the next place."""
        def ask(queue: _Queue) -> tuple[PullResult, QueuePlace] | None:
            lives, begin = 0 if queue is None else queue.lives, place.now(self._log, queue)
            at = max(begin, 0 if queue is None else queue.min_offset)
            page = pull_from(self._log, queue, lambda: self._end_for(queue), at, limit, wanted)
            following = QueuePlace.of(self._log, queue, page.next_queue_offset)
            is_gone = queue is not None and (queue.lives != lives or place.now(self._log, queue) != begin or
                                             bool(page.messages and following.phy_offset < 0))  # fmt: skip
            return None if is_gone else (page, following)

        for _ in range(LOOKS):  # the queue may begin anew meanwhile
            if (answer := self._ask_queue(topic, queue_id, ask)) is not None:
                return answer
        raise CorruptFileError(self.path, 0, f"{topic} queue {queue_id} loses its messages while they are read")

    @while_open
    def _places(self, topic: str, queue_offsets: Mapping[int, int]) -> dict[int, QueuePlace]:
        """Places of queue offsets; those outside of a queue are at 0 or its end, as for a broker's consumers."""
        derived = self._derive()
        queues = {queue_id: self._queue(topic, queue_id, derived) for queue_id in queue_offsets}
        return {queue_id: QueuePlace.of(self._log, queue, max(0, min(queue_offsets[queue_id],
                                                                     queue.max_offset if queue else 0)))
                for queue_id, queue in queues.items()}  # fmt: skip

    @while_open
    def _places_now(self, topic: str, places: Mapping[int, QueuePlace]) -> dict[int, int]:
        """Where places are now, by queue id."""
        derived = self._derive()
        return {queue_id: place.now(self._log, self._queue(topic, queue_id, derived))
                for queue_id, place in places.items()}  # fmt: skip

    @while_open
    def units(self, topic: str, queue_id: int, queue_offset: int, limit: int) -> Units:
        """Up to `limit` units of a queue from a queue offset on: phy offsets, sizes, tags codes, as NumPy arrays.

        Empty when there is no such queue or offset. Raises StoreClosedError, CorruptFileError, UnsupportedFormatError
        (a queue of inner batches, queues in RocksDB), TypeError, ValueError. Cost: one read of the queue's files, the
        log is not touched.
        """
        count = checked_int(limit, "limit", least=0)
        queue = self._queue(topic, queue_id)
        if isinstance(queue, BatchConsumeQueue):
            raise UnsupportedFormatError(self.path, "units of a batch consume queue", "pull reads them")
        place = int64_offset(queue_offset, "queue_offset")
        if queue is None or not queue.min_offset <= place < queue.max_offset:
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        return queue.read(place, min(count, queue.max_offset - place))

    @while_open
    def search_offset(self, topic: str, queue_id: int, timestamp: Any,
                      boundary: Literal["LOWER", "UPPER"] = "LOWER", *,
                      on_damage: Literal["raise", "skip"] = "raise") -> int:  # fmt: skip
        """Queue offset by store timestamp (int ms or aware datetime); exact where times do not decrease.

        LOWER: the first message at or after it, max offset when none; exact also where times step back, and come up
        again within 32 messages. UPPER: the last at or before it, min offset when none. 0 for an unknown queue.
        on_damage: "skip" goes by the messages that can be read. Raises StoreClosedError, CorruptFileError,
        UnsupportedFormatError (queues in RocksDB), TypeError, ValueError. Cost: one record header per step of a binary
        search, and of 32. Source: RocketMQ ConsumeQueue#getOffsetInQueueByTime.
        """
        if boundary not in ("LOWER", "UPPER"):
            raise ValueError(f"boundary must be LOWER or UPPER, got {boundary!r}")
        skips_damage = teller(on_damage, None) is not None
        time = to_ms(timestamp, "timestamp", boundary == "LOWER")
        return self._ask_queue(topic, queue_id, lambda queue: search_from(
            self._log, queue, self._log_end, time, boundary, skips_damage=skips_damage))  # fmt: skip
