# SPDX-License-Identifier: Apache-2.0
"""Where a consumer's place is in a queue that was cleaned, cut, or began anew since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_consumers import SLOW, bodies, break_crc, put

import rmq
from rmq.queuereading import QueuePlace


class Queue:
    """As much of a queue as a place looks at: the phy offsets of its units from a first offset on."""

    def __init__(self, min_offset: int, phy_offsets: list[int]) -> None:
        self.min_offset, self._phy_offsets = min_offset, phy_offsets
        self.max_offset = min_offset + len(phy_offsets)

    def phy_offset_below(self, queue_offset: int) -> int:
        number = min(queue_offset, self.max_offset) - 1 - self.min_offset
        return self._phy_offsets[number] if number >= 0 else -1


class Log:
    """Whose messages cannot be read."""

    def segment_at(self, phy_offset: int) -> None:
        return None


PLACES = {
    "it grew": (Queue(0, [7, 8]), 2, Queue(0, [7, 8, 9]), 2),
    "nothing was consumed": (Queue(0, [7]), 0, Queue(0, [9]), 0),
    "its front was cleaned": (Queue(0, [5, 6, 7, 8]), 3, Queue(2, [7, 8]), 3),
    "cleaned over the place": (Queue(0, [5, 6, 7, 8]), 2, Queue(3, [8, 9]), 2),
    "begun at the first message": (Queue(3, [5, 6]), 3, Queue(3, [5, 6, 7]), 3),
    "anew, shorter": (Queue(0, [5, 6, 7]), 3, Queue(0, [8]), 0),
    "anew, as long": (Queue(0, [5, 6, 7]), 3, Queue(0, [8, 9, 10]), 0),
    "anew, longer": (Queue(0, [5, 6, 7]), 3, Queue(0, [8, 9, 10, 11]), 0),
    "anew, begun at the first message": (Queue(3, [5, 6]), 3, Queue(0, [8, 9, 10, 11]), 0),
    "gone": (Queue(0, [5, 6, 7]), 3, None, 0),
    "gone, begun at the first message": (Queue(3, [5, 6]), 3, None, 0),
    "cut": (Queue(0, [5, 6, 7]), 3, Queue(0, [5]), 1),
    "cut to nothing": (Queue(0, [5, 6, 7]), 3, Queue(0, []), 0),
    "not there yet": (None, 0, Queue(0, [5, 6, 7]), 0),
}


@pytest.mark.parametrize(("noted", "place", "queue", "expected"), PLACES.values(), ids=PLACES)
def test_where_a_place_is_now(noted: Queue | None, place: int, queue: Queue | None, expected: int) -> None:
    log: Any = Log()
    assert QueuePlace.of(log, noted, place).now(log, queue) == expected  # type: ignore[arg-type]


# ---- of consumers beside a repair --------------------------------------------------------------------------


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[tuple[Path, rmq.Consumer]]:
    """A store whose queue a repair cut at 20, and a reader's consumer that had polled 25 of its 30 messages."""
    path = tmp_path / "s"
    with rmq.open(path, "a", config=SLOW) as writer:
        put(writer, *range(10, 40))
    with rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        assert len(consumer.poll(25)) == 25
        break_crc(path, reader.lookup(("Orders", 0, 20)).phy_offset)
        with rmq.open(path, "r+", repair=True) as writer:
            assert writer.topics()["Orders"] == {0: (0, 20)}
        yield path, consumer


def test_where_a_repair_cut_is_where_a_consumer_goes_on(cut: tuple[Path, rmq.Consumer]) -> None:
    path, consumer = cut
    assert consumer.poll() == []
    with rmq.open(path, "r+") as writer:
        put(writer, 70)
    assert bodies(consumer.poll()) == [70]


def test_messages_that_took_the_place_of_those_that_were_cut_off_are_polled(cut: tuple[Path, rmq.Consumer]) -> None:
    path, consumer = cut
    with rmq.open(path, "r+") as writer:
        put(writer, *range(70, 80))  # of the same sizes
    assert {*range(70, 80)} <= {*bodies(consumer.poll(100))}


# ---- of messages that cannot be read -----------------------------------------------------------------------


@pytest.mark.parametrize("tags", [None, "a"])
def test_a_poll_names_the_place_of_the_message_that_it_cannot_read(tmp_path: Path, tags: str | None) -> None:
    """Others, of other tags, may lie between it and where the poll began."""
    with rmq.open(tmp_path / "s", "a", config=SLOW) as store:
        for number in range(20):
            store.put(rmq.Message("Orders", b"%d" % number, tags="a" if number in (0, 15, 16, 18) else "b"))
        for number in (15, 16):
            break_crc(tmp_path / "s", store.lookup(("Orders", 0, number)).phy_offset)
    with rmq.open(tmp_path / "s") as store:
        consumer = rmq.Consumer(store, "g", "Orders", tags=tags)
        assert bodies(consumer.poll(100)) == ([0] if tags else [*range(15)])
        for number in (15, 16):
            with pytest.raises(rmq.CorruptFileError) as error:
                consumer.poll(100)
            assert error.value.__notes__ == [f"Orders queue 0, queue offset {number}"]
            consumer.seek(0, number + 1)
        assert bodies(consumer.poll(100)) == ([18] if tags else [17, 18, 19])


def test_a_message_before_a_damaged_one_is_polled_though_tags_of_others_have_its_hash(tmp_path: Path) -> None:
    """A pull that meets one of them reads on: what lies before the damage comes first."""
    with rmq.open(tmp_path / "s", "a", config=SLOW) as store:
        for number, tags in enumerate(["BB", "BB", "Aa", "Aa", "Aa"]):  # one hash
            store.put(rmq.Message("Orders", b"%d" % number, tags=tags))
        break_crc(tmp_path / "s", store.lookup(("Orders", 0, 3)).phy_offset)
    with rmq.open(tmp_path / "s") as store:
        assert bodies(store.pull("Orders", limit=1, tags="Aa").messages) == [2]
        consumer = rmq.Consumer(store, "g", "Orders", tags="Aa")
        assert bodies(consumer.poll(10)) == [2]
        with pytest.raises(rmq.CorruptFileError) as error:
            consumer.poll(10)
        assert error.value.__notes__ == ["Orders queue 0, queue offset 3"]
        consumer.seek(0, 4)
        assert bodies(consumer.poll(10)) == [4]


@pytest.mark.parametrize("stepped_back", [31, 32])
def test_a_search_finds_the_first_where_the_clock_stepped_back_for_messages(tmp_path: Path, stepped_back: int) -> None:
    times = [*range(1000, 1100), *[1050] * stepped_back, *range(1100, 1110)]
    clock = iter(times)
    with rmq.open(tmp_path / "s", "x", clock=lambda: next(clock)) as store:
        for _ in times:
            store.put(rmq.Message("T", b""))
        for time in range(1000, 1112):
            expected = next((number for number, own in enumerate(times) if own >= time), len(times))
            assert store.search_offset("T", 0, time) == expected
