"""Stores to be cleaned, and what a store must answer for what is left of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rmq

SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 40, "flush_interval_commit_log": 2**31 - 1}  # fmt: skip
CONFIG = rmq.StoreConfig(**SIZES)
SEGMENT = SIZES["mapped_file_size_commit_log"]
NOW = 1_800_000_000_000
HOUR = 3_600_000


class Disk(NamedTuple):
    """What shutil.disk_usage tells; as a function, what it is to tell."""

    used: int
    free: int

    def __call__(self, path: Path) -> Disk:
        return self


ROOMY = Disk(10, 90)


def message(i: int) -> rmq.Message:
    """Of 200: `old` up to 30, `late` from 170, between them and beside them `T` in three queues."""
    topic = "old" if i < 30 and i % 3 == 0 else "late" if i >= 170 and i % 3 == 0 else "T"
    return rmq.Message(topic, b"%05d" % i + b"x" * (i * 37 % 120), keys=[f"k{i}", "all"], tags="AB"[i % 2],
                       uniq_key=f"u{i}", queue_id=i % 4 if topic == "T" else 0)  # fmt: skip


class Clock:
    """Never goes back, whoever opens the next store."""

    now = NOW - 10**9

    def __call__(self) -> int:
        Clock.now += 250
        return Clock.now


def open_store(path: Path, mode: str, config: rmq.StoreConfig | None = None) -> rmq.Store:
    return rmq.open(path, mode, config=config, clock=Clock())


def fill(store: rmq.Store, count: int = 200, first: int = 0) -> list[rmq.StoredMessage]:
    """Messages, as they are stored."""
    places = [store.put(message(i)).phy_offset for i in range(first, first + count)]
    store.flush()
    return [store.lookup(place) for place in places]


def make(path: Path, count: int = 200, config: rmq.StoreConfig = CONFIG) -> list[rmq.StoredMessage]:
    """A closed store, its messages."""
    with open_store(path, "x", config) as store:
        return fill(store, count)


def date(path: Path, *ages_ms: int, rest: int = 0, now: int = NOW) -> None:
    """Segments were last changed so many ms before `now`, oldest segment first; the rest `rest` ms before."""
    for number, file in enumerate(sorted((path / "commitlog").iterdir())):
        age = ages_ms[number] if number < len(ages_ms) else rest
        os.utime(file, ns=((now - age) * 1_000_000,) * 2)


def expire(path: Path, low: int) -> None:
    """The segments below a phy offset expire at NOW with a reserved time of one hour, others do not."""
    date(path, *[HOUR] * (low // SEGMENT - first_segment(path)))


def first_segment(path: Path) -> int:
    return int(min(file.name for file in (path / "commitlog").iterdir())) // SEGMENT


def clean(store: rmq.Store, **arguments: Any) -> rmq.CleanResult:
    """Of a store that `expire` or `date` has prepared, on a disk with much room."""
    return store.clean(NOW, **{"file_reserved_time": 1, "limit": None, "disk_usage": ROOMY} | arguments)


def kinds(result: rmq.CleanResult) -> list[str]:
    """What was removed: the folder of the store that each file lay in."""
    return [next(part for part in reversed(Path(file.path).parts) if part in ("commitlog", "consumequeue", "index"))
            for file in result.removed]  # fmt: skip


def names(item: rmq.StoredMessage) -> list[Any]:
    """Every form of id."""
    return [item.phy_offset, item.offset_msg_id, item.uniq_key, (item.topic, item.queue_id, item.queue_offset)]


def assert_left(store: rmq.Store, messages: Sequence[rmq.StoredMessage], low: int) -> None:
    """Every kind of question is answered for the messages at and behind a phy offset, and for no others."""
    left = [item for item in messages if item.phy_offset >= low]
    gone = [item for item in messages if item.phy_offset < low]
    assert store.min_phy_offset == low
    assert store.mode == "r" or rmq.verify(store.path).is_sound  # a reader repairs nothing
    assert store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist() == [item.phy_offset for item in left]
    queues = defaultdict(list)
    for item in messages:
        queues[item.topic, item.queue_id].append(item)
    bounds: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for (topic, queue_id), items in queues.items():
        kept = [item for item in items if item.phy_offset >= low]
        first, following = len(items) - len(kept), len(items)
        bounds[topic][queue_id] = first, following
        if first:
            too_small = store.pull(topic, queue_id, first - 1)
            assert (too_small.status, too_small.next_queue_offset) == (rmq.PullStatus.OFFSET_TOO_SMALL, first)
            assert store.pull(topic, queue_id, 0).next_queue_offset == first
        found = store.pull(topic, queue_id, first, 1000)
        assert found.messages == kept
        assert found.status is (rmq.PullStatus.FOUND if kept else rmq.PullStatus.OFFSET_OVERFLOW_ONE)
        times = [item.store_timestamp for item in kept]
        assert store.search_offset(topic, queue_id, 0) == first
        assert store.search_offset(topic, queue_id, times[-1] + 1 if times else NOW) == following
        if kept:
            assert store.search_offset(topic, queue_id, times[len(times) // 2]) == first + len(times) // 2
    assert store.topics() == bounds
    for topic in {item.topic for item in messages}:
        assert store.query(topic, "all", limit=None) == [item for item in reversed(left) if item.topic == topic]
        asked = [item for item in messages if item.topic == topic]
        found = store.query_many(topic, [item.keys[0] for item in asked], columns=["phy_offset"]).table
        expected = [(number, item.phy_offset) for number, item in enumerate(asked) if item.phy_offset >= low]
        assert list(zip(*found.to_pydict().values(), strict=True)) == expected
    for item in [*gone[-3:], *gone[:3]]:
        for name in names(item):
            with pytest.raises(KeyError):
                store.lookup(name)
    for item in [*left[:3], *left[-3:]]:
        for name in names(item):
            assert store.lookup(name) == item
