"""Numbered messages whose bodies prove themselves, the processes that put and read them, and what all must agree on."""

from __future__ import annotations

import json
import os
import random
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle
import pyarrow as pa  # here, not in each forked process
from forks import fork

import rmq
from rmq import commitlog

SIZES = {
    "mapped_file_size_commit_log": 16384,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 100,
    "max_index_num": 500,
}
QUEUES = [(f"T{number % 2}", number // 2) for number in range(6)]
BATCH_QUEUE = ("B", 0)
ROUND = 100_000  # numbers that one life of a writer may use


def config(**fields: Any) -> rmq.StoreConfig:
    return rmq.StoreConfig(**SIZES | {"flush_interval_commit_log": 20} | fields)


def body_of(number: int) -> bytes:
    """The number, and a length and a content that only this number has."""
    return b"%09d " % number + b"%08x" % zlib.crc32(b"%d" % number) * (number % 40)


def number_of(body: bytes) -> int:
    """The number of a body; AssertionError when not every byte is that message's."""
    assert body[:9].isdigit(), f"no body of ours: {body[:40]!r}"
    assert body == body_of(int(body[:9])), f"torn or mixed body: {body[:40]!r}"
    return int(body[:9])


def message(number: int, place: tuple[str, int] | None = None) -> rmq.Message:
    topic, queue_id = place or QUEUES[number % len(QUEUES)]
    return rmq.Message(topic, body_of(number), keys=[f"k{number}", f"ten{number // 10}"], queue_id=queue_id,
                       uniq_key=f"u{number}" if number % 3 == 0 else None)  # fmt: skip


@dataclass
class Seen:
    """What one reader has seen of the log, from its start: number -> phy offset, and each queue's messages."""

    places: dict[int, int] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    end: int = 0
    last: int = -1

    def before(self, end: int) -> Seen:
        """What of it lies before an end of the log."""
        places = {number: place for number, place in self.places.items() if place < end}
        queues = {key: [number for number in numbers if number in places] for key, numbers in self.queues.items()}
        return Seen(places, queues, min(self.end, end), max(places, default=-1))

    def read_on(self, store: rmq.Store) -> None:
        """Scan what is new: whole messages, ascending numbers, each queue without gap or repeat."""
        names = ["body", "phy_offset", "topic", "queue_id", "queue_offset", "raw_properties"]
        table = store.scan(begin_phy_offset=self.end, columns=names)
        for row in table.read_all().to_pylist():
            number = number_of(row["body"])
            assert f"KEYS\1k{number} ten{number // 10}".encode() in row["raw_properties"], f"message {number}: {row}"
            assert number > self.last, f"message {number} behind {self.last}"
            assert row["phy_offset"] >= self.end, f"message {number} lies at {row['phy_offset']} before {self.end}"
            queue = self.queues.setdefault((row["topic"], row["queue_id"]), [])
            assert row["queue_offset"] == len(queue), f"message {number} of queue offset {row['queue_offset']}, " \
                f"{len(queue)} is next"  # fmt: skip
            queue.append(number)
            self.places[number] = row["phy_offset"]
            self.last = number
            self.end = row["phy_offset"] + 1

    def check(self, store: rmq.Store, number: int) -> None:
        """Every way to a message that was seen leads to it."""
        place = self.places[number]
        at = store.lookup(place)
        assert number_of(at.body) == number
        assert [m.phy_offset for m in store.query(at.topic, f"k{number}")] == [place], f"query of k{number}"
        ten = store.query(at.topic, f"ten{number // 10}", limit=None)
        numbers = [number_of(m.body) for m in ten]
        assert numbers == sorted(numbers, reverse=True)
        assert number in numbers
        if number % 3 == 0:
            assert store.lookup(f"u{number}").phy_offset == place
        assert store.lookup((at.topic, at.queue_id, at.queue_offset)).phy_offset == place
        known = self.queues[at.topic, at.queue_id]
        pulled = store.pull(at.topic, at.queue_id, at.queue_offset, 20)
        numbers = [number_of(m.body) for m in pulled.messages]
        assert numbers[: len(known) - at.queue_offset] == known[at.queue_offset : at.queue_offset + len(numbers)]
        assert store.topics()[at.topic][at.queue_id][1] >= len(known)
        assert store.search_offset(at.topic, at.queue_id, at.store_timestamp) <= at.queue_offset


@dataclass
class Acks:
    """Ranges of numbers whose put has returned, as the writer told before it went on."""

    path: Path
    position: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def read_on(self) -> None:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a killed writer may leave half a line
            self.position += len(whole)
            self.ranges += [(int(first), int(stop)) for first, stop in map(bytes.split, whole.splitlines())]

    def assert_all_in(self, numbers: Any, since: int = 0) -> None:
        missing = [n for first, stop in self.ranges[since:] for n in range(first, stop) if n not in numbers]
        assert not missing, f"{len(missing)} acknowledged messages are missing, from {missing[0]} on"


def start(function: Callable[..., None], *arguments: Any, faults: Path) -> int:
    """Run a function in a forked process; what it raises is told in `faults` and by exit code 1."""

    def work() -> None:
        try:
            function(*arguments)
        except BaseException:
            with faults.open("a") as file:
                file.write(f"{function.__name__}{arguments[1:]}: {traceback.format_exc()}\n")
            raise

    return fork(work)


def warm_up(path: Path) -> None:
    """Import all that is imported late, so that forked processes need not."""
    with rmq.open(path, "a", config=config()) as store:
        numbers = range(12)
        store.put_many(table_of(numbers))
        store.put_batch([message(n, BATCH_QUEUE) for n in (12, 13)])
        seen = Seen()
        seen.read_on(store)
        seen.check(store, 12)


# ---- the writer ----------------------------------------------------------------------------------------------

WRITTEN = "ASYNC_FLUSH, written"  # the kind of writer whose batches count as large: they do not go through the map
WRITTEN_SIZE = 2000  # bytes of such a batch; a message has less


def flush_disk_type(kind: str) -> str:
    """Of a kind of writer, for this process from here on."""
    if kind == WRITTEN:
        commitlog.WRITTEN_FROM, kind = WRITTEN_SIZE, "ASYNC_FLUSH"
    return kind


def write(path: Path, acked: Path, first: int, kind: str, told: int, closes: bool) -> None:
    """Put until killed. Says "o" on `told` when open, "c" before it closes the first time.

    closes: soon, and again and again; else seldom.
    """
    chance = random.Random(first)
    log = os.open(acked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number, lives = first, 0
    while True:
        with rmq.open(path, "a", config=config(flush_disk_type=flush_disk_type(kind))) as store:
            if not lives:
                os.write(told, b"o")
            lives += 1
            for _ in range(chance.randrange(1, 6) if closes else 100):
                count = _put_some(store, number, chance)
                os.write(log, b"%d %d\n" % (number, number + count))
                number += count
                if chance.random() < 0.1:
                    store.flush()
            if lives == 1:
                os.write(told, b"c")


def _put_some(store: rmq.Store, number: int, chance: random.Random) -> int:
    """One call that puts; how many messages it put, all in the order of their numbers."""
    what = chance.random()
    if what < 0.7:
        store.put(message(number))
        return 1
    count = chance.randrange(1, 60)
    numbers = range(number, number + count)
    if what < 0.8:
        count = min(count, 20)
        store.put_batch([message(n, BATCH_QUEUE) for n in numbers[:20]])
    elif what < 0.9:
        store.put_many(map(message, numbers))
    else:
        store.put_many(table_of(numbers), results=False)
    return count


def table_of(numbers: Iterable[int]) -> Any:
    """The messages as an Arrow table."""
    rows = [message(number) for number in numbers]
    return pa.table({"topic": [row.topic for row in rows], "body": [row.body for row in rows],
                     "queue_id": [row.queue_id for row in rows], "uniq_key": pa.array([row.uniq_key for row in rows],
                     pa.string()), "keys": [list(row.keys) for row in rows]})  # fmt: skip


def write_until(path: Path, acked: Path, stop: Path, kind: str) -> None:
    """Put in one life until `stop` is there, at the readers' pace of some thousand messages a second."""
    chance, number = random.Random(kind), 0
    log = os.open(acked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with rmq.open(path, "a", config=config(flush_disk_type=flush_disk_type(kind))) as store:
        while not stop.exists():
            count = _put_some(store, number, chance)
            os.write(log, b"%d %d\n" % (number, number + count))
            number += count
            time.sleep(0.002)


# ---- the reader ----------------------------------------------------------------------------------------------


def read(path: Path, acked: Path, stop: Path, answer: Path, seed: int) -> None:
    """Read until `stop` is there with one store that follows, and now and then a fresh one. Then tell what was seen."""
    chance, seen, acks, rounds, opened = random.Random(seed), Seen(), Acks(acked), 0, 0
    places: dict[int, int] = {}
    inherited = len(os.listdir("/proc/self/fd"))
    store = open_soon(path, acks, stop)
    is_last = False
    while not is_last and store is not None:
        is_last = stop.exists()
        known = len(acks.ranges)
        acks.read_on()
        read_round(store, seen, chance)
        acks.assert_all_in(seen.places, known)
        if chance.random() < 0.3:
            with rmq.open(path) as fresh:  # while a writer recovers it may end before a put that never returned
                seen_now = seen.before(fresh.max_phy_offset)
                read_round(fresh, seen_now, chance)
            acks.assert_all_in(seen_now.places, known)
            places |= seen_now.places
            opened += 1
        rounds += 1
    places |= seen.places
    files = len(os.listdir("/proc/self/fd")) - inherited
    maps = sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    answer.write_text(json.dumps({"rounds": rounds, "opened": opened, "files": files, "maps": maps,
                                  "places": list(places.items())}))  # fmt: skip


def read_round(store: rmq.Store, seen: Seen, chance: random.Random) -> None:
    """Read on, and find each way to some messages."""
    seen.read_on(store)
    if seen.places:
        for number in [*chance.choices(list(seen.places), k=2), seen.last]:
            seen.check(store, number)


def open_soon(path: Path, acks: Acks, stop: Path) -> rmq.Store | None:
    """The store as soon as there is one; before anything was put it may not be one yet."""
    while not stop.exists():
        acks.read_on()
        try:
            return rmq.open(path)
        except (FileNotFoundError, rmq.UnsupportedFormatError):
            assert not acks.ranges, "messages were put, but there is no store"
            time.sleep(0.001)
    return None


# ---- the end -------------------------------------------------------------------------------------------------


def assert_whole(path: Path, acked: Path, answers: Iterable[Path] = ()) -> Seen:
    """Log, queues and index agree; all that was acknowledged is there once; each reader saw what is there, no more."""
    assert oracle.check_store(path, SIZES["max_hash_slot_num"], SIZES["max_index_num"]) == []
    findings = rmq.verify(path)
    assert findings.is_sound, [*map(str, findings)]
    seen, acks = Seen(), Acks(acked)
    acks.read_on()
    with rmq.open(path) as store:
        seen.read_on(store)
    acks.assert_all_in(seen.places)
    for answer in answers:
        told = dict(json.loads(answer.read_text())["places"])
        gone = [number for number, place in told.items() if seen.places.get(number) != place]
        assert not gone, f"a reader saw messages that are gone: {gone[:5]}"
        unseen = [number for number in seen.places if number not in told]
        assert not unseen, f"a reader did not see messages: {unseen[:5]}"
    return seen
