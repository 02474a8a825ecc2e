# SPDX-License-Identifier: Apache-2.0
"""What `rmq cat --follow` shows of a writer in the same process; beside another one: test_cli_terminal.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cleaning import CONFIG, SEGMENT, clean, expire, make, open_store
from commandline import good

import rmq
from rmq.cli.cat import QueueReader

END = 1_700_000_000_000

def put(store: rmq.Store, numbers: range, topic: str = "T") -> list[bytes]:
    """To two queues, with the tag A but for each third; returns the bodies."""
    bodies = [b"%d" % number for number in numbers]
    for number, body in zip(numbers, bodies, strict=True):
        store.put(rmq.Message(topic, body, queue_id=number % 2, tags="B" if number % 3 == 0 else "A"))
    return bodies


def look(follower: QueueReader) -> list[bytes]:
    return [message.body for message in follower.stored()]


@pytest.mark.parametrize("tags", [None, "A", "B"])
def test_what_comes_during_a_look_is_shown_by_the_next(tmp_path: Path, tags: str | None) -> None:
    """So several queues stay in log order."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as writer, rmq.open(tmp_path / "s") as reader:
        follower = QueueReader(reader, "T", None, None, None, tags)
        for first in range(0, 120, 40):
            put(writer, range(first, first + 20))
            begun = follower.stored()
            put(writer, range(first + 20, first + 40))
            for shown, begin in ([message.body for message in begun], first), (look(follower), first + 20):
                wanted = {None: (0, 1, 2), "A": (1, 2), "B": (0,)}[tags]
                assert shown == [b"%d" % number for number in range(begin, begin + 20) if number % 3 in wanted]


def test_until_shows_what_was_stored_in_time_while_the_last_messages_were_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, stored = END, QueueReader.stored

    def slowly(reader: QueueReader) -> Iterator[rmq.StoredMessage]:
        nonlocal moment
        found = list(stored(reader))
        writer.put(rmq.Message("T", b"later"))
        moment = END + 1
        return iter(found)

    monkeypatch.setattr(QueueReader, "stored", slowly)
    monkeypatch.setattr("rmq.cli.cat._wait", lambda: None)
    monkeypatch.setattr(time, "time_ns", lambda: moment * 1_000_000)
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: END) as writer:
        writer.put(rmq.Message("T", b"first"))
        done = good("cat", tmp_path / "s", "T", "--follow", "--until", END, "-f", "{body}")
    assert done.out.split() == ["first", "later"]


@pytest.mark.parametrize(("topic", "queue", "told"), [
    ("Order", 0, ["no topic 'Order' yet, --follow waits for it; did you mean 'Orders'?"]),
    ("Orders", 7, ["topic 'Orders' has no queue 7 yet, --follow waits for it; it has 0"]), ("Orders", 0, []),
])  # fmt: skip
def test_a_topic_or_queue_that_is_not_there_yet_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str, queue: int, told: list[str]
) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as writer:
        writer.put(rmq.Message("Orders", b"first"))
        monkeypatch.setattr("rmq.cli.cat._wait", lambda: writer.put(rmq.Message(topic, b"later", queue_id=queue)))
        done = good("cat", path, topic, "-q", queue, "--follow", "--limit", 1 if told else 2, "-f", "{body}")
    assert done.out.split()[-1] == "later"
    assert done.notes == [f"rmq: {path}: {reason}" for reason in told]


@pytest.mark.parametrize(("is_seen", "count"), [(False, 6), (True, 60)])
def test_a_queue_that_a_cleaning_ended_is_shown_from_its_new_beginning(
    tmp_path: Path, is_seen: bool, count: int
) -> None:
    """Whether it was seen to be gone, or is only shorter than it was."""
    make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as writer, rmq.open(tmp_path / "s") as reader:
        follower = QueueReader(reader, "old", None, None, None, None)
        assert len(look(follower)) == 10
        expire(tmp_path / "s", 4 * SEGMENT)
        clean(writer, expired_queues=True)
        assert "old" not in writer.topics()
        if is_seen:
            assert look(follower) == []
        assert put(writer, range(count), "old") == look(follower)
        assert put(writer, range(count, 2 * count), "old") == look(follower)
