# SPDX-License-Identifier: Apache-2.0
"""Reading a store and opening one, beside the same work in pure Python."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import peers
import pyarrow as pa
import pytest
from ratios import CPU, READS, SYNCED, WALL, Call, Goal, Measure, Peer
from sample import CONFIG, SEGMENT, SIZES, SLOTS, START, TOPIC, random_keys, table

import rmq
from rmq._core._record import PARSE_PROPERTIES
from rmq.commitlog import CommitLog
from rmq.logscan import CHECK_CRC

PAUSED_SEGMENT = 512 * 1024**2
PAUSE = 1.5  # seconds; the first pass over memory behind it is slower on virtual machines
KEYS = 2_000  # of one query_many or select
QUEUE = "consumequeue/Orders/0/" + "0" * 20


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return random_keys(max(SIZES.values()))


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return request.param


def fill(path: Path, keys: list[str], size: int) -> Path:
    """A store, closed."""
    with rmq.open(path, "x", config=CONFIG, clock=lambda: START) as store:
        store.put_many(table(keys[: SIZES[size]], size), topic=TOPIC, results=False)
    return path


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> Path:
    """50,000 messages of 100 bytes."""
    return fill(tmp_path_factory.mktemp("engine") / "store", keys, 100)


@pytest.fixture(scope="module")
def store(filled: Path) -> Iterator[rmq.Store]:
    with rmq.open(filled) as opened:
        yield opened


@pytest.fixture(scope="module")
def log(filled: Path) -> Iterator[peers.Log]:
    opened = peers.Log(filled / "commitlog" / f"{0:020d}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def index(filled: Path) -> Iterator[peers.Index]:
    (path,) = (filled / "index").iterdir()
    opened = peers.Index(path, SLOTS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def chosen(keys: list[str]) -> list[str]:
    return random.Random(2).choices(keys[: SIZES[100]], k=KEYS)


# ---- read ------------------------------------------------------------------------------------------------


@CPU
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_query(measure: Measure, filled: Path, log: peers.Log, index: peers.Index, chosen: list[str],
               tmp_path: Path, mode: str) -> None:  # fmt: skip
    few = chosen[:500]
    copy(filled, tmp_path / "store")
    with rmq.open(tmp_path / "store", mode) as opened:
        for key in few:
            theirs = log.query(index, TOPIC, key)
            assert [message.body for message in opened.query(TOPIC, key)] == [record["body"] for record in theirs]
        measure(len(few), READS, lambda: lambda: [opened.query(TOPIC, key) for key in few],
                Peer("pure Python", lambda: lambda: [log.query(index, TOPIC, key) for key in few]))  # fmt: skip


@CPU
def test_query_many(measure: Measure, store: rmq.Store, log: peers.Log, index: peers.Index,
                    chosen: list[str]) -> None:  # fmt: skip
    theirs = [record["body"] for key in chosen for record in log.query(index, TOPIC, key)]
    assert store.query_many(TOPIC, chosen).table["body"].to_pylist() == theirs
    measure(KEYS, READS, lambda: lambda: store.query_many(TOPIC, chosen),
            Peer("pure Python", lambda: lambda: [log.query(index, TOPIC, key) for key in chosen]))  # fmt: skip


@CPU
def test_query_many_of_ten_files(measure: Measure, tmp_path: Path) -> None:
    """500,000 messages whose keys fill ten index files, each with four entries for a slot; bodies are not asked for."""
    count, files = 500_000, 10
    config = rmq.StoreConfig(mapped_file_size_commit_log=4 * SEGMENT, max_hash_slot_num=count // files // 4,
                             max_index_num=count // files + 1, flush_interval_commit_log=2**31 - 1)  # fmt: skip
    columns, many = ["phy_offset", "queue_offset", "store_timestamp", "keys"], random_keys(count)
    with rmq.open(tmp_path / "store", "x", config=config, clock=lambda: START) as made:
        for first in range(0, count, 50_000):
            made.put_many(table(many[first : first + 50_000], 50, first), topic=TOPIC, results=False)
    asked = random.Random(3).choices(many, k=5 * KEYS)
    own = peers.Log(tmp_path / "store" / "commitlog" / f"{0:020d}")
    indexes = [peers.Index(path, config.max_hash_slot_num) for path in sorted((tmp_path / "store" / "index").iterdir())]
    assert len(indexes) == files

    def theirs() -> list[int]:
        return [record["phy_offset"] for key in asked for index in reversed(indexes)
                for record in own.query(index, TOPIC, key)]  # fmt: skip

    with rmq.open(tmp_path / "store") as opened:
        found = opened.query_many(TOPIC, asked, columns=columns)
        assert (found.table["phy_offset"].to_pylist(), found.complete) == (theirs(), True)
        measure(len(asked), READS, lambda: lambda: opened.query_many(TOPIC, asked, columns=columns),
                Peer("pure Python", lambda: theirs))  # fmt: skip
    for peer in (own, *indexes):
        peer.close()


@CPU
@pytest.mark.parametrize("form", ["arrow", "list"])
def test_select_phy_offset_many(measure: Measure, store: rmq.Store, index: peers.Index, chosen: list[str],
                                form: str) -> None:  # fmt: skip
    """2,000 keys of 50,000; of 2 million: test_index.py."""
    asked = pa.array(chosen) if form == "arrow" else chosen
    theirs = [index.select(f"{TOPIC}#{key}") for key in chosen]
    assert store.select_phy_offset_many(TOPIC, asked).to_pylist() == theirs
    measure(KEYS, READS, lambda: lambda: store.select_phy_offset_many(TOPIC, asked),
            Peer("pure Python", lambda: lambda: [index.select(f"{TOPIC}#{key}") for key in chosen]))  # fmt: skip


@CPU
@pytest.mark.parametrize("tags", [None, "paid"])
def test_pull(measure: Measure, store: rmq.Store, log: peers.Log, filled: Path, tags: str | None) -> None:
    """Every message has the tag."""
    queue = peers.Queue(filled / QUEUE)
    places = range(0, 6400, 32)
    for place in places:
        theirs = [record["body"] for record in queue.pull(log, place, 32)]
        assert [message.body for message in store.pull(TOPIC, 0, place, 32, tags=tags).messages] == theirs
    measure(6400, READS, lambda: lambda: [store.pull(TOPIC, 0, place, 32, tags=tags) for place in places],
            Peer("pure Python", lambda: lambda: [queue.pull(log, place, 32) for place in places]))  # fmt: skip
    queue.close()


@pytest.fixture(scope="module")
def sized(size: int, tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> Iterator[tuple[Path, peers.Log]]:
    """A store of bodies of one size, and the peer's look at its log."""
    path = fill(tmp_path_factory.mktemp("sized") / "store", keys, size)
    opened = peers.Log(path / "commitlog" / f"{0:020d}")
    yield path, opened
    opened.close()
    shutil.rmtree(path)


@CPU
def test_scan(measure: Measure, sized: tuple[Path, peers.Log], size: int) -> None:
    """CRC checked, batch by batch; ours gives Arrow columns, the peer lists."""
    path, log = sized
    columns = ["phy_offset", "topic", "body", "keys"]
    with rmq.open(path) as opened:
        assert opened.scan(columns=columns).read_all().to_pylist() == [
            dict(zip(columns, row, strict=True)) for batch in log.scan() for row in zip(*batch.values(), strict=True)]
        measure(SIZES[size], READS, lambda: lambda: deque(opened.scan(columns=columns), 0),
                Peer("pure Python", lambda: lambda: deque(log.scan(), 0), (Goal("first", 10),)))  # fmt: skip


@CPU
def test_walk(measure: Measure, sized: tuple[Path, peers.Log], size: int) -> None:
    """The scan that recovery and dispatch make: CRC and properties, nothing kept."""
    path, log = sized
    own = CommitLog([path / "commitlog"], SEGMENT, writable=False)
    theirs = [record["phy_offset"] for record in log.walk()]
    end = own.segments[0].used_end(0)

    def walk() -> list[int]:
        return [at for batch in own.records(0, end, checks=CHECK_CRC | PARSE_PROPERTIES)
                for at in batch.numbers("phy_offset").tolist()]  # fmt: skip

    assert walk() == theirs
    wanted = {100: 60, 1024: 40, 4096: 18}[size]
    measure(SIZES[size], READS, lambda: lambda: deque(own.records(0, end, checks=CHECK_CRC | PARSE_PROPERTIES), 0),
            Peer("pure Python", lambda: lambda: deque(log.walk(), 0), (Goal("S4", wanted),)))  # fmt: skip
    own.close()


@CPU
def test_walk_after_a_pause(measure: Measure, tmp_path: Path, keys: list[str]) -> None:
    """The same of 240 MB that lie in the page cache, and that nobody read for a second."""
    messages, passes = table(keys, 1024), 5
    config = replace(CONFIG, mapped_file_size_commit_log=PAUSED_SEGMENT)
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: START) as store:
        for _ in range(passes):
            store.put_many(messages, topic=TOPIC, results=False)
    own = CommitLog([tmp_path / "s" / "commitlog"], PAUSED_SEGMENT, writable=False)
    end = own.segments[0].used_end(0)
    words = np.memmap(own.segments[0].path, np.uint64, "r")[: end // 8]

    def paused(call: Call) -> Call:
        time.sleep(PAUSE)
        return call

    def walk() -> None:
        batches = own.records(0, end, checks=CHECK_CRC | PARSE_PROPERTIES)
        assert sum(len(batch) for batch in batches) == passes * len(messages)

    measure(passes * len(messages), READS, lambda: paused(walk),
            Peer("each byte read by numpy", lambda: paused(lambda: np.bitwise_or.reduce(words))))  # fmt: skip
    own.close()
    shutil.rmtree(tmp_path / "s")


# ---- open ------------------------------------------------------------------------------------------------


def copy(source: Path, target: Path) -> None:
    """Copy a store; what was never written stays a hole."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    subprocess.run(["cp", "-r", "--sparse=always", source, target], check=True)


def check_derived(path: Path, filled: Path) -> None:
    """The queue made again is the one that the puts made."""
    units = (path / QUEUE).read_bytes().rstrip(b"\0")
    assert units == (filled / QUEUE).read_bytes().rstrip(b"\0")


@WALL
def test_dispatch(measure: Measure, filled: Path, log: peers.Log, tmp_path: Path) -> None:
    """Open a store of which nothing but the log is left: read it whole, make queues and index, sync them.

    The peer makes units and hashes in memory and writes nothing.
    """
    path = tmp_path / "store"

    def ours() -> Call:
        shutil.rmtree(path, ignore_errors=True)
        copy(filled / "commitlog", path / "commitlog")
        return lambda: rmq.open(path, "a", config=CONFIG).close()

    ours()()
    check_derived(path, filled)
    queues, _ = peers.derive(log)
    assert (filled / QUEUE).read_bytes().startswith(queues[TOPIC, 0])
    measure(SIZES[100], SYNCED, ours, Peer("pure Python", lambda: lambda: peers.derive(log)))


@WALL
def test_recovery(measure: Measure, filled: Path, keys: list[str], tmp_path: Path) -> None:
    """Open after a kill with 50,000 messages behind the last mark: their records are read, their queues and index
    made anew. The peer reads them and makes units and hashes in memory."""
    with rmq.open(tmp_path / "live", "x", config=CONFIG, clock=lambda: START) as live:
        live.flush()
        live.put_many(table(keys[: SIZES[100]], 100), topic=TOPIC, results=False)
        copy(tmp_path / "live", tmp_path / "killed")
    path = tmp_path / "store"
    log = peers.Log(tmp_path / "killed" / "commitlog" / f"{0:020d}")

    def ours() -> Call:
        copy(tmp_path / "killed", path)
        return lambda: rmq.open(path, "r+").close()

    ours()()
    check_derived(path, filled)
    measure(SIZES[100], SYNCED, ours, Peer("pure Python", lambda: lambda: peers.derive(log)))
    log.close()


@WALL
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open_clean(measure: Measure, filled: Path, tmp_path: Path, mode: str) -> None:
    """A store that was closed: nothing is read again. No peer does this."""
    copy(filled, tmp_path / "store")
    measure(1, SYNCED if mode == "r+" else READS, lambda: lambda: rmq.open(tmp_path / "store", mode).close())
