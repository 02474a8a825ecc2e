# SPDX-License-Identifier: Apache-2.0
"""Messages into a store, many at once and one by one, beside pure Python and lmdb."""

from __future__ import annotations

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import peers
import pyarrow as pa
import pytest
from databases import OFFSET, Lmdb
from ratios import ALL_CPU, CPU, EACH, NEW_FILES, SYNCED, WALL, Call, Goal, Measure, Peer
from sample import CONFIG, SEGMENT, START, TOPIC, Fresh, body, messages, random_keys, table

import rmq
import rmq.commitlog
from rmq.mappedfile import MappedFile

MESSAGES = 200_000  # of one put_many, and of one transaction
MANY = 2_000_000  # of a store whose key tree no longer fits into the processor's caches
TRANSACTION = 100_000
SIZE = 100  # bytes of a body
LOG = 600 * 10**6  # bytes of one that is synced
QUEUES = 1000
LARGE = 4000  # messages of one of several put_many
SINGLE = 20_000  # messages put one by one
SYNCED_PUTS = 100
THREADED = [("ASYNC_FLUSH", 200_000, 0), ("SYNC_FLUSH", 1600, 0), ("SYNC_FLUSH", 240, 0.002)]


def append(fresh: Fresh, keys: list[str], *, sync: bool = False) -> Call:
    """The peer's put: one record after the other into one file."""
    appender = fresh.make("log", peers.Appender)
    rows = [(body(number, SIZE), (key,)) for number, key in enumerate(keys)]

    def run() -> None:
        for data, row_keys in rows:
            appender.put(TOPIC, 0, data, row_keys, "paid", START)
            if sync:
                appender.sync()
        appender.flush()

    return run


def made_records(fresh: Fresh, root: Path, keys: list[str]) -> list[bytes]:
    """What the peer's put writes, which is what ours writes."""
    append(fresh, keys)()
    store = fresh.make("store", lambda path: rmq.open(path, "x", config=CONFIG, clock=lambda: START))
    store.put_many(messages(keys, SIZE), results=False)
    data = (root / "log").read_bytes()
    with (store.path / "commitlog" / f"{0:020d}").open("rb") as file:
        assert file.read(len(data)) == data
    return list(peers.split(root / "log"))


class LmdbMessages:
    """The messages in lmdb: made records by number, and the number of each key."""

    def __init__(self, fresh: Fresh, keys: list[str], records: list[bytes]) -> None:
        self._fresh = fresh
        self._records = [(OFFSET.pack(number), record) for number, record in enumerate(records)]
        self._keys = [(key.encode(), OFFSET.pack(number)) for number, key in enumerate(keys)]

    def put_records(self) -> Call:
        database = self._fresh.make("lmdb", Lmdb)
        return lambda: database.put_many(self._records, append=True)

    def put_records_and_keys(self) -> Call:
        database = self._fresh.make("lmdb", Lmdb)
        return lambda: database.put_messages(self._records, self._keys)

    def put_parts(self) -> Call:
        """put_records_and_keys in transactions of TRANSACTION messages."""
        database = self._fresh.make("lmdb", Lmdb)

        def run() -> None:
            for first in range(0, len(self._records), TRANSACTION):
                last = first + TRANSACTION
                database.put_messages(self._records[first:last], self._keys[first:last])

        return run

    def check(self) -> None:
        database = self._fresh.make("lmdb", Lmdb)
        database.put_messages(self._records, self._keys)
        assert database.get(key for key, _ in self._records) == [record for _, record in self._records]


@CPU
@pytest.mark.parametrize("form", ["arrow", "list"])
def test_put_many(measure: Measure, fresh: Fresh, tmp_path: Path, form: str) -> None:
    """Ours also checks, locks, and makes queue and index; the peers' names say what they write."""
    keys = random_keys(MESSAGES)
    source = table(keys, SIZE) if form == "arrow" else messages(keys, SIZE)
    lmdb = LmdbMessages(fresh, keys, made_records(fresh, tmp_path, keys))
    store = fresh.store()
    store.put_many(source, topic=TOPIC if form == "arrow" else None)
    stored = store.scan(columns=["body", "keys"], topics=[TOPIC]).read_all().to_pydict()
    assert stored == {"body": [body(number, SIZE) for number in range(MESSAGES)], "keys": [[key] for key in keys]}

    def ours() -> Call:
        opened = fresh.store()
        if form == "arrow":
            return lambda: opened.put_many(source, topic=TOPIC, results=False)
        return lambda: opened.put_many(source, results=False)

    python = Peer("pure Python, records", lambda: append(fresh, keys))
    log_only = Peer("lmdb putmulti, records", lmdb.put_records, needs="lmdb")
    with_keys = Peer("lmdb putmulti, records and keys", lmdb.put_records_and_keys, needs="lmdb")
    if not with_keys.is_missing:
        lmdb.check()
    measure(MESSAGES, NEW_FILES, ours, python, log_only, with_keys)


@CPU
@pytest.mark.parametrize("queues", [8, QUEUES, 5000])
def test_put_many_into_many_queues(measure: Measure, fresh: Fresh, queues: int) -> None:
    """In turn; each of them has units already. The peer has the same messages in one queue."""
    keys = random_keys(MESSAGES)

    def items(queues: int) -> list[rmq.Message]:
        return [rmq.Message(TOPIC, body(number, SIZE), keys=key, tags="paid", queue_id=number % queues)
                for number, key in enumerate(keys)]  # fmt: skip

    def put(name: str, messages: list[rmq.Message], queues: int) -> Call:
        store = store_of(fresh, name)
        store.put_many(messages[:queues])
        store.flush()
        return lambda: store.put_many(messages, results=False)

    measure(MESSAGES, NEW_FILES, partial(put, "store", items(queues), queues),
            Peer("into one queue", partial(put, "one", items(1), 1)), rounds=5)


@CPU
@pytest.mark.parametrize("queues", [QUEUES, 5000])
def test_put_into_many_queues(measure: Measure, fresh: Fresh, queues: int) -> None:
    """One by one, in turn; each of them has units already. The peer has the same messages in one queue."""
    def put(name: str, queues: int) -> Call:
        store = store_of(fresh, name)
        items = [rmq.Message(f"{TOPIC}{number % queues // 8}", body(number, SIZE), queue_id=number % queues % 8)
                 for number in range(MESSAGES)]  # fmt: skip
        store.put_many(items[:queues])
        store.flush()
        return lambda: [store.put(message) for message in items]

    measure(MESSAGES, NEW_FILES, partial(put, "store", queues),
            Peer("into one queue", partial(put, "one", 1)), rounds=3)  # fmt: skip


def store_of(fresh: Fresh, name: str) -> rmq.Store:
    return fresh.make(name, lambda path: rmq.open(path, "x", config=CONFIG, clock=lambda: START))


@CPU
@pytest.mark.parametrize("column", ["queue_id", "topic", "keys"])
def test_put_many_of_a_table_in_turn(measure: Measure, fresh: Fresh, column: str) -> None:
    """Rows of eight queues, or of four topics, in turn; or with a list of one key in each. The peer has one queue."""
    keys = random_keys(MESSAGES)
    one = table(keys, SIZE)
    values = {"topic": [f"{TOPIC}{number % 4}" for number in range(MESSAGES)],
              "queue_id": [number % 8 for number in range(MESSAGES)],
              "keys": [[key] for key in keys]}[column]  # fmt: skip
    kept = one.drop_columns([column]) if column in one.column_names else one
    several = kept.append_column(column, pa.array(values))

    def put(name: str, source: pa.Table, topic: str | None) -> Call:
        store = store_of(fresh, name)
        store.put_many(source.slice(0, 8), topic=topic)
        return lambda: store.put_many(source, topic=topic, results=False)

    measure(MESSAGES, NEW_FILES, partial(put, "store", several, None if column == "topic" else TOPIC),
            Peer("of one queue", partial(put, "one", one, TOPIC)), rounds=5)  # fmt: skip


@CPU
def test_put_many_of_lines(measure: Measure, fresh: Fresh) -> None:
    """Each message has a topic text of its own, as from a file. The peer's have one."""
    keys = random_keys(MESSAGES)
    shared = messages(keys, SIZE)
    own = [rmq.Message("".join([*TOPIC]), body(number, SIZE), keys=key, tags="paid") for number, key in enumerate(keys)]

    def put(name: str, items: list[rmq.Message]) -> Call:
        store = store_of(fresh, name)
        return lambda: store.put_many(items, results=False)

    measure(MESSAGES, NEW_FILES, partial(put, "store", own), Peer("one text", partial(put, "one", shared)), rounds=5)


@CPU
def test_put_many_of_millions(measure: Measure, fresh: Fresh) -> None:
    """A store of the default geometry, and lmdb with the same records and keys, 100,000 to a transaction."""
    config = rmq.StoreConfig(flush_interval_commit_log=2**31 - 1)
    keys = random_keys(MANY)
    source = table(keys, SIZE)
    size = fresh.store(config).put_many(source.slice(0, 1), topic=TOPIC)[0].size
    lmdb = LmdbMessages(fresh, keys, [bytes(size)] * MANY)

    def ours() -> Call:
        opened = fresh.store(config)
        return lambda: opened.put_many(source, topic=TOPIC, results=False)

    peer = Peer("lmdb putmulti, records and keys", lmdb.put_parts, (Goal("first", 5),), "lmdb")
    measure(MANY, NEW_FILES, ours, peer, rounds=3)


@ALL_CPU
@pytest.mark.parametrize("size", [100, 1024])
def test_put_many_until_synced(measure: Measure, fresh: Fresh, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Batches that are written to the log; the peers store them through its map, or write as many bytes to a file."""
    keys = random_keys(LOG // (size + 130))
    source = table(keys, size)
    config = rmq.StoreConfig(flush_interval_commit_log=500)

    def put(name: str, written_from: int) -> Call:
        with monkeypatch.context() as patch:
            patch.setattr(rmq.commitlog, "WRITTEN_FROM", written_from)
            store = fresh.make(name, lambda path: rmq.open(path, "x", config=config, clock=lambda: START))

        def run() -> None:
            store.put_many(source, topic=TOPIC, results=False)
            store.flush()

        return run

    def file() -> Call:
        opened, data = fresh.make("file", lambda path: path.open("wb", buffering=0)), bytes(1 << 20)

        def run() -> None:
            for _ in range(0, LOG, len(data)):
                opened.write(data)
            os.fdatasync(opened.fileno())

        return run

    measure(len(keys), SYNCED, partial(put, "store", rmq.commitlog.WRITTEN_FROM),
            Peer("through the map", partial(put, "mapped", 2**62)), Peer("write of as many bytes", file), rounds=5)


@CPU
def test_put_many_after_small_ones(measure: Measure, fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches into a segment whose next pages were brought into the page cache for single puts."""
    keys = random_keys(LARGE * 32)
    items = messages(keys, 1024)
    batches = [items[first : first + LARGE] for first in range(0, len(items), LARGE)]
    config = dataclasses.replace(CONFIG, mapped_file_size_commit_log=4 * SEGMENT, max_index_num=2 * len(items))

    def put(name: str, *, reads_on: bool) -> Call:
        if reads_on:
            monkeypatch.setattr(MappedFile, "read_on", lambda *_, **__: None)
        else:
            monkeypatch.undo()
        store = fresh.make(name, lambda path: rmq.open(path, "x", config=config, clock=lambda: START))
        store.put(items[0])
        while store._flusher.preparer.due_at <= store._log.position or not store._log.segments[-1].file.warmed:
            time.sleep(0.01)

        def run() -> None:
            for batch in batches:
                store.put_many(batch, results=False)

        return run

    measure(len(items), NEW_FILES, partial(put, "store", reads_on=False),
            Peer("where dispatch reads ahead", partial(put, "reading on", reads_on=True)), rounds=5)


@CPU
def test_put(measure: Measure, fresh: Fresh, tmp_path: Path) -> None:
    keys = random_keys(SINGLE)
    items = messages(keys, SIZE)
    made_records(fresh, tmp_path, keys)

    def ours() -> Call:
        put = fresh.store().put
        return lambda: [put(message) for message in items]

    measure(SINGLE, NEW_FILES, ours, Peer("pure Python, records", lambda: append(fresh, keys)))


@WALL
@pytest.mark.parametrize(("flush", "count", "sync_s"), THREADED)
def test_put_of_threads(measure: Measure, fresh: Fresh, monkeypatch: pytest.MonkeyPatch, flush: str, count: int,
                        sync_s: float) -> None:  # fmt: skip
    """Eight threads put one by one; the peer is one thread with as many messages. sync_s: what a slower disk takes."""
    config = dataclasses.replace(CONFIG, flush_disk_type=flush)
    items = messages(random_keys(count), SIZE)
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        time.sleep(sync_s)
        fdatasync(descriptor)

    if sync_s:
        monkeypatch.setattr(os, "fdatasync", slow)

    def put(threads: int) -> Call:
        store = fresh.make("store", lambda path: rmq.open(path, "x", config=config, clock=lambda: START))
        store.put_many(items[:1])
        time.sleep(0.5)  # until the zeros ahead of a log that is synced are there

        def work(first: int) -> None:
            for message in items[first::threads]:
                store.put(message)

        def run() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, range(threads)))

        return run

    measure(count, EACH if flush == "SYNC_FLUSH" else NEW_FILES, partial(put, 8), Peer("one thread", partial(put, 1)))


@WALL
def test_synced_put_beside_many_queues(measure: Measure, fresh: Fresh) -> None:
    """SYNC_FLUSH, into 2,000 queues in turn, flushed every 100 ms. The peer puts into one queue."""
    config = dataclasses.replace(CONFIG, flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=100)
    count = 2000

    def put(name: str, queues: int) -> Call:
        store = fresh.make(name, lambda path: rmq.open(path, "x", config=config, clock=lambda: START))
        items = [rmq.Message(TOPIC, body(number, SIZE), queue_id=number % queues) for number in range(count)]
        store.put_many(items)
        store.flush()
        time.sleep(0.5)  # until the zeros ahead of the log are there
        return lambda: [store.put(message) for message in items]

    measure(count, EACH, partial(put, "store", count), Peer("into one queue", partial(put, "one", 1)), rounds=5)


@WALL
def test_put_on_disk(measure: Measure, fresh: Fresh, tmp_path: Path) -> None:
    """SYNC_FLUSH: each put returns when the log is on disk."""
    config = dataclasses.replace(CONFIG, flush_disk_type="SYNC_FLUSH")
    keys = random_keys(SYNCED_PUTS)
    items = messages(keys, SIZE)
    made_records(fresh, tmp_path, keys)

    def ours() -> Call:
        put = fresh.store(config).put
        return lambda: [put(message) for message in items]

    measure(SYNCED_PUTS, EACH, ours, Peer("pure Python, fdatasync", lambda: append(fresh, keys, sync=True)))
