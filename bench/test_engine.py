# SPDX-License-Identifier: Apache-2.0
"""How fast the store is, beside the same work in pure Python (peers.py). Rules and how to run: README.md."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import pyarrow as pa
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import rmq

MESSAGES = 20_000
KEYS = 2_000  # of one query_many or select
SLOTS, ENTRIES = 50_000, 200_000
START = 1_700_000_000_000
ROUNDS = 7
BODY = random.Random(1).randbytes(1024)
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=64 * 1024**2, max_hash_slot_num=SLOTS, max_index_num=ENTRIES,
                         flush_interval_commit_log=2**31 - 1)  # fmt: skip
CACHE = "page cache only"
EACH = "flush each put"
READS = "reads, page cache warm"

Call = Callable[[], Any]


def key(i: int) -> str:
    return f"order-{i:012d}"


def body(i: int) -> bytes:
    return b"%012d" % i + BODY[: 100 - 12]


@pytest.fixture(scope="module")
def messages() -> list[rmq.Message]:
    return [rmq.Message("Orders", body(i), keys=key(i), tags="paid") for i in range(MESSAGES)]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pa.table({"body": pa.array([body(i) for i in range(MESSAGES)], pa.binary()),
                     "keys": [key(i) for i in range(MESSAGES)], "tags": ["paid"] * MESSAGES})  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, table: pa.Table) -> Iterator[rmq.Store]:
    """20,000 messages of 100 bytes, flushed; then read only."""
    path = tmp_path_factory.mktemp("bench") / "s"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: START) as store:
        store.put_many(table, topic="Orders", results=False)
    with rmq.open(path) as store:
        yield store


@pytest.fixture(scope="module")
def log(filled: rmq.Store) -> Iterator[peers.Log]:
    opened = peers.Log(filled.path / "commitlog" / f"{0:020d}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def index(filled: rmq.Store) -> Iterator[peers.Index]:
    (path,) = (filled.path / "index").iterdir()
    opened = peers.Index(path, SLOTS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def chosen() -> list[str]:
    return [key(i) for i in random.Random(2).choices(range(MESSAGES), k=KEYS)]


def timed(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare(benchmark: BenchmarkFixture, items: int, durability: str, ours: Callable[[], Call],
            peer: Callable[[], Call] | None = None, *, rounds: int = ROUNDS) -> None:  # fmt: skip
    """Time ours; before each round the peer once, so that both meet the same machine. The ratio is of the medians.

    ours, peer: make, untimed, the call that is timed.
    """
    times: list[float] = []

    def setup() -> tuple[tuple[Call], dict[str, Any]]:
        if peer is not None:
            times.append(timed(peer()))
        return (ours(),), {}

    ours()()
    benchmark.pedantic(lambda call: call(), setup=setup, rounds=rounds)
    benchmark.extra_info |= {"items": items, "durability": durability}
    if benchmark.stats is not None:
        median = benchmark.stats.stats.median
        benchmark.extra_info["us_per_item"] = round(median / items * 1e6, 3)
        if peer is not None:
            theirs = statistics.median(times)
            benchmark.extra_info["peer_us_per_item"] = round(theirs / items * 1e6, 3)
            benchmark.extra_info["times_faster_than_peer"] = round(theirs / median, 2)
        print(f"\n{benchmark.name}: {benchmark.extra_info}")


class Fresh:
    """New stores and files, the one before removed: every round writes to files that are new."""

    def __init__(self, root: Path) -> None:
        self._path = root / "fresh"
        self._store: rmq.Store | None = None

    def store(self, config: rmq.StoreConfig = CONFIG) -> rmq.Store:
        self.clear()
        self._store = rmq.open(self._path / "s", "x", config=config, clock=lambda: START)
        self._store.put(rmq.Message("Warm", b""))
        return self._store

    def file(self) -> Path:
        self.clear()
        self._path.mkdir(exist_ok=True)
        return self._path / "log"

    def clear(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._path.exists():
            shutil.rmtree(self._path)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Fresh]:
    made = Fresh(tmp_path)
    yield made
    made.clear()


# ---- put -------------------------------------------------------------------------------------------------


def peer_put(fresh: Fresh, count: int) -> Call:
    appender = peers.Appender(fresh.file())
    rows = [(body(i), (key(i),)) for i in range(count)]

    def run() -> None:
        for data, keys in rows:
            appender.put("Orders", 0, data, keys, "paid", START)
        appender.close()

    return run


def test_the_peer_writes_the_same_bytes(filled: rmq.Store, tmp_path: Path) -> None:
    appender = peers.Appender(tmp_path / "log")
    for i in range(100):
        appender.put("Orders", 0, body(i), (key(i),), "paid", START)
    appender.close()
    data = (tmp_path / "log").read_bytes()
    with (filled.path / "commitlog" / f"{0:020d}").open("rb") as file:
        assert file.read(len(data)) == data


def test_put_many_arrow(benchmark: BenchmarkFixture, fresh: Fresh, table: pa.Table) -> None:
    """The peer writes the log only; ours dispatches to queues and index too."""

    def ours() -> Call:
        store = fresh.store()
        return lambda: store.put_many(table, topic="Orders", results=False)

    compare(benchmark, MESSAGES, CACHE, ours, lambda: peer_put(fresh, MESSAGES))


def test_put_many_list(benchmark: BenchmarkFixture, fresh: Fresh, messages: list[rmq.Message]) -> None:
    def ours() -> Call:
        store = fresh.store()
        return lambda: store.put_many(messages)

    compare(benchmark, MESSAGES, CACHE, ours, lambda: peer_put(fresh, MESSAGES))


def test_put_one_by_one(benchmark: BenchmarkFixture, fresh: Fresh, messages: list[rmq.Message]) -> None:
    def ours() -> Call:
        store = fresh.store()
        return lambda: [store.put(message) for message in messages]

    compare(benchmark, MESSAGES, CACHE, ours, lambda: peer_put(fresh, MESSAGES), rounds=5)


def test_put_one_by_one_on_disk(benchmark: BenchmarkFixture, fresh: Fresh, messages: list[rmq.Message]) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=64 * 1024**2, max_hash_slot_num=SLOTS,
                             max_index_num=ENTRIES, flush_disk_type="SYNC_FLUSH")  # fmt: skip

    def ours() -> Call:
        store = fresh.store(config)
        return lambda: [store.put(message) for message in messages[:100]]

    compare(benchmark, 100, EACH, ours, rounds=5)


# ---- read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_query(benchmark: BenchmarkFixture, filled: rmq.Store, log: peers.Log, index: peers.Index, chosen: list[str],
               tmp_path: Path, mode: str) -> None:  # fmt: skip
    few = chosen[:500]
    shutil.copytree(filled.path, tmp_path / "s")
    with rmq.open(tmp_path / "s", mode) as store:
        assert store.query("Orders", few[0])[0].body == log.query(index, "Orders", few[0])[0]["body"]
        compare(benchmark, len(few), READS, lambda: lambda: [store.query("Orders", item) for item in few],
                lambda: lambda: [log.query(index, "Orders", item) for item in few])  # fmt: skip


def test_query_many(benchmark: BenchmarkFixture, filled: rmq.Store, log: peers.Log, index: peers.Index,
                    chosen: list[str]) -> None:  # fmt: skip
    assert filled.query_many("Orders", chosen).table.num_rows == KEYS
    compare(benchmark, KEYS, READS, lambda: lambda: filled.query_many("Orders", chosen),
            lambda: lambda: [log.query(index, "Orders", item) for item in chosen])  # fmt: skip


@pytest.mark.parametrize("form", ["list", "arrow"])
def test_select_phy_offset_many(benchmark: BenchmarkFixture, filled: rmq.Store, index: peers.Index, chosen: list[str],
                                form: str) -> None:  # fmt: skip
    keys = pa.array(chosen) if form == "arrow" else chosen
    assert filled.select_phy_offset_many("Orders", keys).to_pylist() == [index.select(f"Orders#{k}") for k in chosen]
    compare(benchmark, KEYS, READS, lambda: lambda: filled.select_phy_offset_many("Orders", keys),
            lambda: lambda: [index.select(f"Orders#{item}") for item in chosen])  # fmt: skip


def test_pull(benchmark: BenchmarkFixture, filled: rmq.Store, log: peers.Log) -> None:
    queue = peers.Queue(filled.path / "consumequeue/Orders/0" / f"{0:020d}")
    places = range(0, 6400, 32)
    assert [m.body for m in filled.pull("Orders", 0, 64, 32).messages] == [m["body"] for m in queue.pull(log, 64, 32)]
    compare(benchmark, 6400, READS, lambda: lambda: [filled.pull("Orders", 0, place, 32) for place in places],
            lambda: lambda: [queue.pull(log, place, 32) for place in places])  # fmt: skip
    queue.close()


def test_scan(benchmark: BenchmarkFixture, filled: rmq.Store, log: peers.Log) -> None:
    columns = ["phy_offset", "topic", "body", "keys"]
    assert filled.scan(columns=columns).read_all().to_pydict() == log.scan()
    compare(benchmark, MESSAGES, READS, lambda: lambda: filled.scan(columns=columns).read_all(), lambda: log.scan)


# ---- open ------------------------------------------------------------------------------------------------


def test_dispatch(benchmark: BenchmarkFixture, filled: rmq.Store, log: peers.Log, tmp_path: Path) -> None:
    """Open a store of which nothing but the log is left: read it whole, make queues and index, sync them.

    The peer makes units and hashes in memory and writes nothing.
    """
    path = tmp_path / "s"

    def ours() -> Call:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(filled.path / "commitlog", path / "commitlog")
        return lambda: rmq.open(path, "a", config=CONFIG).close()

    compare(benchmark, MESSAGES, "everything synced", ours, lambda: lambda: peers.derive(log))


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open_clean(benchmark: BenchmarkFixture, filled: rmq.Store, tmp_path: Path, mode: str) -> None:
    shutil.copytree(filled.path, tmp_path / "s")
    compare(benchmark, 1, "everything synced" if mode == "r+" else READS,
            lambda: lambda: rmq.open(tmp_path / "s", mode).close())  # fmt: skip


def test_open_after_a_kill(benchmark: BenchmarkFixture, tmp_path: Path, table: pa.Table) -> None:
    """20,000 messages behind the last mark: the tail is read, queues and index are made anew."""
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        store.put(rmq.Message("Orders", b""))
        store.flush()
        store.put_many(table, topic="Orders", results=False)
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    path = tmp_path / "s"

    def ours() -> Call:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "killed", path)
        return lambda: rmq.open(path, "r+").close()

    compare(benchmark, MESSAGES, "everything synced", ours)
