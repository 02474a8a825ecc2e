# SPDX-License-Identifier: Apache-2.0
"""`rmq cat`: a topic's messages in order, and those that come."""

from __future__ import annotations

import heapq
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import click

from rmq.cli import DAMAGE, NOT_FOUND, Fault, flush_stdout
from rmq.cli.arguments import (
    LIMIT,
    TIME,
    form_option,
    no_topic,
    open_store,
    store_argument,
    template_option,
    topic_argument,
)
from rmq.cli.output import Output, note
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.message import StoredMessage
from rmq.pull import tag_set
from rmq.store import Store

FIRST_PAGE = 16  # messages of a first pull, so that a long answer starts at once; each next one takes twice as many
PAGE = 512  # messages of one pull at most
POLL_SECONDS = 0.2


@click.command()
@store_argument
@topic_argument()
@click.option("-q", "--queue", type=click.IntRange(0, 2**31 - 1),
              help="One queue only. Without it the queues are merged in log order.")
@click.option("--from", "begin", type=TIME, help="Only messages stored at or after this time.")
@click.option("--until", "end", type=TIME, help="Only messages stored at or before this time.")
@click.option("--limit", type=LIMIT, default="all", show_default=True, help="Messages to show.")
@click.option("--tags", help='Only messages with these tags: "A || B".')
@click.option("--follow", is_flag=True, help="Go on with messages as they come, also of a topic to come, until Ctrl-C.")
@template_option
@form_option
def cat(store: Path, topic: str, queue: int | None, begin: int | None, end: int | None, limit: int | None,
        tags: str | None, template: str | None, follow: bool, conf: StoreConfig | None,
        form: str | None) -> None:  # fmt: skip
    r"""Messages of TOPIC, oldest first.

    TIME is ms since 1970, ISO 8601 (UTC when it names no zone), or a span before now such as -2h. Times are found by
    binary search: exact unless the broker's clock went back.

    FORMAT names fields in braces: topic queue_id queue_offset phy_offset size store_timestamp born_timestamp keys tags
    uniq_key offset_msg_id properties body ..., as in '{store_timestamp} {keys} {body}\n'.
    """
    output = Output(form, template)
    with open_store(store, conf) as opened:
        if missing := _missing(opened, topic, queue, " yet, --follow waits for it" if follow else ""):
            if not follow:
                raise Fault(missing, NOT_FOUND)
            note(missing)
        reader = QueueReader(opened, topic, queue, begin, end, tags)
        shown = 0
        while True:
            began = time.time_ns() // 1_000_000
            messages = reader.stored()
            shown += output.messages(islice(messages, None if limit is None else limit - shown))
            if not follow or shown == limit or (end is not None and began > end):
                break
            flush_stdout()
            _wait()
        if not follow and shown == limit and next(messages, None) is not None:
            note(f"--limit {limit:,} reached; more messages follow")
        if reader.damaged:
            more = f"; {reader.damaged:,} messages cannot be read" if reader.damaged > 1 else ""
            raise Fault(f"{reader.first_damage}{more}", DAMAGE)


def _missing(store: Store, topic: str, queue_id: int | None, more: str) -> str | None:
    """What to say of a topic or a queue that is not there."""
    queues = store.topics().get(topic)
    if queues is None:
        return no_topic(store, topic, more)
    if queue_id in (None, *queues):
        return None
    return f"{store.path}: topic {topic!r} has no queue {queue_id}{more}; it has {', '.join(map(str, queues))}"


class QueueReader:
    """Reads queues of a topic from where it stopped the last time."""

    def __init__(self, store: Store, topic: str, queue_id: int | None, begin: int | None, end: int | None,
                 tags: str | None) -> None:  # fmt: skip
        self._store = store
        self._topic = topic
        self._queue_id = queue_id
        self._begin, self._end = begin, end
        self._tags = tags
        self._next: dict[int, int] = {}  # queue offset of each queue's next page
        self._given: dict[int, tuple[int, int]] = {}  # of each queue's last message: its phy and own queue offset
        self._left_out: dict[int, int] = {}  # of each queue's last damaged message: its queue offset
        self.damaged = 0  # messages that were left out
        self.first_damage: CorruptFileError | None = None

    def stored(self) -> Iterator[StoredMessage]:
        """What is there now and was not given yet; of several queues in log order."""
        log_end = self._store.max_phy_offset
        queues = self._store.topics().get(self._topic, {})
        # A cleaning may have ended a queue, which begins at 0 again.
        self._next = {queue_id: at for queue_id, at in self._next.items() if at <= queues.get(queue_id, (0, 0))[1]}
        self._left_out = {queue_id: at for queue_id, at in self._left_out.items() if queue_id in self._next}
        chosen = [queue_id for queue_id in queues if self._queue_id in (None, queue_id)]
        streams = [self._of_queue(queue_id, *queues[queue_id], log_end) for queue_id in chosen]
        return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda message: message.phy_offset)

    def _of_queue(self, queue_id: int, low: int, high: int, log_end: int) -> Iterator[StoredMessage]:
        if queue_id not in self._next:
            self._next[queue_id] = low
            with suppress(CorruptFileError):  # on the way: every message is looked at
                if self._begin is not None:
                    self._next[queue_id] = self._store.search_offset(self._topic, queue_id, self._begin)
        # A repair may have cut the log below it.
        given = self._given[queue_id] = min(self._given.get(queue_id, (-1, -1)), (log_end, -1))
        size = FIRST_PAGE
        while (at := max(self._next[queue_id], low)) < high:
            messages, following = self._page(queue_id, at, high, size)
            size = min(2 * size, PAGE)
            if following <= at:
                return
            first: StoredMessage | None = None
            for message in messages:
                first = first or message
                if message.phy_offset >= log_end:
                    return  # it came meanwhile; the next call reads this page again
                place = message.phy_offset, message.queue_offset
                if place <= given:
                    continue
                self._given[queue_id] = place
                if self._is_in_time(message) and self._is_readable(message):
                    yield message
            self._next[queue_id] = following
            if self._end is not None and first is not None and first.store_timestamp > self._end:
                return

    def _page(self, queue_id: int, at: int, high: int, size: int) -> tuple[Iterable[StoredMessage], int]:
        """The next messages and where to go on; of a page with damage in it those that are whole, one by one."""
        with suppress(CorruptFileError):
            page = self._store.pull(self._topic, queue_id, at, size, tags=self._tags)
            return page.messages, page.next_queue_offset
        following = min(at + size, high)
        return self._one_by_one(queue_id, range(at, following)), following

    def _one_by_one(self, queue_id: int, queue_offsets: range) -> Iterator[StoredMessage]:
        wanted = tag_set(self._tags)
        for queue_offset in queue_offsets:
            try:
                message = self._store.lookup((self._topic, queue_id, queue_offset))
            except KeyError:
                continue
            except CorruptFileError as error:
                if queue_offset > self._left_out.get(queue_id, -1):  # not counted in an earlier look at this page
                    self._left_out[queue_id] = queue_offset
                    self._leave_out(error)
                continue
            if wanted is None or (message.tags or "") in wanted:
                yield message

    def _leave_out(self, error: CorruptFileError) -> None:
        self.damaged += 1
        self.first_damage = self.first_damage or error

    def _is_readable(self, message: StoredMessage) -> bool:
        """Whether the body decompresses."""
        try:
            return message.body is not None
        except CorruptFileError as error:
            self._leave_out(error)
            return False

    def _is_in_time(self, message: StoredMessage) -> bool:
        after = self._begin is None or message.store_timestamp >= self._begin
        return after and (self._end is None or message.store_timestamp <= self._end)


def _wait() -> None:
    """Sleep a little; BrokenPipeError when whoever reads stdout has gone."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    events = poll.poll(POLL_SECONDS * 1000)
    if any(flags & (select.POLLERR | select.POLLHUP) for _, flags in events):
        raise BrokenPipeError(32, "stdout was closed")
