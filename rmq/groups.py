# SPDX-License-Identifier: Apache-2.0
"""Consumer groups of an open store: poll messages of a topic, commit how far they were consumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable
from datetime import datetime
from typing import Literal

from rmq._core._message import to_ms
from rmq.consumeroffsets import check_group, checked_queue_id
from rmq.errors import CorruptFileError, RmqError
from rmq.keys import checked_int
from rmq.message import StoredMessage
from rmq.pull import tag_set
from rmq.queuereading import QueuePlace
from rmq.store import Store

LOOK_S = 0.05  # while a poll waits


class Consumer:
    """A consumer group's way through the queues of a topic, which may be one to come. Used by one thread at a time.

    Each message comes at least once: again, when it was polled and its commit is not on disk (`Store.commit_offsets`).
    Those of a queue come in its order. A broker that takes over the store goes on where the group stands, and the other
    way round. Consumers of a group take different queues; they may be in other processes, which open the store "r".

    queue_ids: None for all, those to come too; others for consumers that share a group. tags: as of `Store.pull`.
    consume_from: where queues begin of which the group has committed nothing: at their "first" message, behind their
    "last" one, or at a store timestamp (int ms or aware datetime). Queues that are made later begin at their first.
    Raises TypeError, ValueError, and as Store.topics and Store.groups. Cost: as these two. Source: RocketMQ
    DefaultLitePullConsumer.
    """

    def __init__(self, store: Store, group: str, topic: str, *, queue_ids: Iterable[int] | None = None,
                 tags: str | None = None,
                 consume_from: Literal["first", "last"] | int | datetime = "first") -> None:  # fmt: skip
        if not isinstance(store, Store):
            raise TypeError(f"store must be an open Store, got {type(store).__name__}")
        check_group(group, topic)
        self._wanted = tag_set(tags)
        if not isinstance(consume_from, str):
            consume_from = to_ms(consume_from, "consume_from", True)
        elif consume_from not in ("first", "last"):
            raise ValueError(f"consume_from must be first, last or a time, got {consume_from!r}")
        if queue_ids is not None and not isinstance(queue_ids, Iterable):
            raise TypeError(f"queue_ids must be a sequence of ints, got {type(queue_ids).__name__}")
        self.store, self.group, self.topic = store, group, topic
        self._chosen = None if queue_ids is None else {checked_int(item, "queue_ids", least=0) for item in queue_ids}
        self._places = self._new_places((), consume_from)

    @property
    def positions(self) -> dict[int, int]:
        """{queue_id: queue_offset} of what the next polls give, by queue id; what a commit commits."""
        return {queue_id: place.queue_offset for queue_id, place in sorted(self._places.items())}

    def poll(self, limit: int = 32, timeout: float = 0.0) -> list[StoredMessage]:
        """Up to `limit` messages that were not polled yet, of one queue after the other; [] when there are none.

        The next poll begins with the queue behind the last one that was asked. timeout: seconds to wait for the first
        message. One that cannot be read is a CorruptFileError with a note of its place in the queue, once all before it
        were given: `seek` behind it goes on. What was cleaned away is passed over. Raises as Store.pull and
        Store.topics, TypeError, ValueError. Cost: a pull for each queue that is asked, and a look for new queues when
        all of them gave fewer than `limit`; while it waits, each 50 ms.
        """
        count = checked_int(limit, "limit", least=1)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__}")
        if not timeout >= 0:
            raise ValueError(f"timeout must not be negative, got {timeout}")
        end = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        while not (messages := self._next(count)):
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, LOOK_S))
        return messages

    def commit(self) -> None:
        """All that was polled is consumed: the group goes on behind it. When it is on disk: as Store.commit_offsets.

        Raises as that, but no ValueError: of a queue that began at 0 again, or was cut, that is consumed.
        """
        self.store._commit(self.group, self.topic, lambda: self.store._places_now(self.topic, self._places))

    def seek(self, queue_id: int, queue_offset: int) -> None:
        """The next polls give the messages of a queue from this offset on, such as Store.search_offset finds.

        Raises TypeError, ValueError (negative, behind the queue's end, or a queue that is not one of queue_ids), and
        as Store.topics. Cost: as that.
        """
        number = checked_queue_id(queue_id)
        if self._chosen is not None and number not in self._chosen:
            raise ValueError(f"queue_id {number} is not one of this consumer's queue_ids")
        place = checked_int(queue_offset, "queue_offset", least=0)
        _, end = self.store.topics().get(self.topic, {}).get(number, (0, 0))
        if place > end:
            raise ValueError(f"queue_offset {place} lies behind the end of {self.topic} queue {number}, {end}")
        self._places |= self.store._places(self.topic, {number: place})

    def _new_places(self, known: Container[int], consume_from: str | int = "first") -> dict[int, QueuePlace]:
        """Where to begin in queues that are not known yet."""
        bounds = self.store.topics().get(self.topic, {})
        fresh = [item for item in bounds if item not in known and (self._chosen is None or item in self._chosen)]
        if not fresh:
            return {}
        ends = {queue_id: bounds[queue_id][1] for queue_id in fresh}
        noted = self.store._places(self.topic, ends)  # first: what is committed may be of a queue that began anew since
        places = self.store.groups().get(self.group, {}).get(self.topic, {})
        for queue_id in fresh:
            low, high = bounds[queue_id]
            if queue_id in places:
                continue
            if isinstance(consume_from, str):
                places[queue_id] = high if consume_from == "last" else low
            else:
                places[queue_id] = self.store.search_offset(self.topic, queue_id, consume_from)
        found = self.store._places(self.topic, {queue_id: places[queue_id] for queue_id in fresh})
        if self.store._places_now(self.topic, noted) != ends:
            return self._new_places(known, consume_from)
        return found

    def _next(self, count: int) -> list[StoredMessage]:
        places = dict(self._places)
        messages: list[StoredMessage] = []
        try:
            self._take(places, list(places), messages, count)
            if len(messages) < count and (fresh := self._new_places(places)):
                places |= fresh
                self._take(places, list(fresh), messages, count)
        except (RmqError, OSError):
            if not messages:
                raise  # else the next poll comes to it
        self._places = places  # last: what an exception kept from the caller was not polled
        return messages

    def _take(self, places: dict[int, QueuePlace], queue_ids: list[int], messages: list[StoredMessage],
              count: int) -> None:  # fmt: skip
        """Fill `messages` up to `count`; queues that were asked go to the end of `places`, others have their turn."""
        for queue_id in queue_ids:
            if len(messages) == count:
                break
            found, place = self._pulled(queue_id, places[queue_id], count - len(messages))
            messages += found
            del places[queue_id]
            places[queue_id] = place

    def _pulled(self, queue_id: int, place: QueuePlace, count: int) -> tuple[list[StoredMessage], QueuePlace]:
        """Up to `count` messages of a queue, and the place behind them; fewer where one cannot be read."""
        messages: list[StoredMessage] = []
        size = count
        while len(messages) < count:
            try:
                page, following = self.store._pull_behind(self.topic, queue_id, place,
                                                          min(size, count - len(messages)), self._wanted)  # fmt: skip
            except CorruptFileError:
                if size > 1:
                    size = 1  # those before it
                    continue
                if messages:
                    break
                raise
            messages += page.messages
            at, place = place.queue_offset, following
            if place.queue_offset in (at, page.max_queue_offset):
                break
        return messages, place
