"""What is done to a store while a system call fails: each takes a Session and ends with a closed store.

Calls fail from the beginning, or from `begin` on: opening is a workload of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from sites import SIZES, Session
from test_processes import message

import rmq
from rmq import commitlog

CONFIG = rmq.StoreConfig(**SIZES)
ROWS = list(range(24))

# ---- stores to begin with ------------------------------------------------------------------------------


def nothing(path: Path) -> list[int]:
    return []


def closed(path: Path) -> list[int]:
    with rmq.open(path, "a", config=CONFIG) as store:
        for row in ROWS[:12]:
            store.put(message(row, b"y" * 300))
        store.put_many([message(row, b"z" * 100) for row in ROWS[12:]])
    return ROWS


def killed(path: Path) -> list[int]:
    """Queues and index have come further than the mark, the last record is torn."""
    live = path.with_name("live")
    with rmq.open(live, "a", config=CONFIG) as store:
        store.put_many([message(row, b"y" * 300) for row in ROWS[:12]])
        store.flush()
        for row in ROWS[12:]:
            store.put(message(row, b"z" * 100))
        store.query("T", "all")
        end = store.put(message(999, b"torn" * 20))
        shutil.copytree(live, path)
    shutil.rmtree(live)
    with open(path / "commitlog" / f"{end.phy_offset // 4096 * 4096:020d}", "r+b") as file:
        os.pwrite(file.fileno(), bytes(40), end.phy_offset % 4096 + end.size - 60)
    return ROWS


def damaged(path: Path) -> list[int]:
    """Damage in what had been durable: repair cuts there."""
    closed(path)
    with rmq.open(path) as store:
        place = store.pull("T", 0, 9).messages[0]
    with open(path / "commitlog" / f"{place.phy_offset // 4096 * 4096:020d}", "r+b") as file:
        os.pwrite(file.fileno(), b"!", place.phy_offset % 4096 + place.size - 100)
    return ROWS[: ROWS.index(int(place.body[:5]))]


def foreign(path: Path) -> list[int]:
    """Without a directory of ours, as a broker leaves it."""
    closed(path)
    shutil.rmtree(path / "rmq")
    return ROWS


def foreign_killed(path: Path) -> list[int]:
    killed(path)
    shutil.rmtree(path / "rmq")
    return ROWS


# ---- what is done --------------------------------------------------------------------------------------


def put_each(store: rmq.Store, chunks: list[list[rmq.Message]]) -> None:
    for messages in chunks:
        for one in messages:
            store.put(one)


def put_tables(store: rmq.Store, chunks: list[list[rmq.Message]]) -> None:
    store.put_many(pa.table({
        "topic": ["T"] * len(messages), "body": [one.body for one in messages], "tags": ["tag"] * len(messages),
        "queue_id": pa.array([one.queue_id for one in messages], pa.int32()),
        "keys": [list(one.keys) for one in messages]}) for messages in chunks)  # fmt: skip


def put_batch(store: rmq.Store, chunks: list[list[rmq.Message]]) -> None:
    for messages in chunks:
        store.put_batch(messages)


def create(session: Session) -> None:
    session.open("x")
    session.close()


def puts(session: Session) -> None:
    session.open("a")
    session.begin()
    for row in session.fresh(20):
        session.put(put_each, [row])
    session.close()


def puts_dispatched(session: Session) -> None:
    """Queues and index follow now and then; each rolls over."""
    store = session.open("r+")
    session.begin()
    for _ in range(4):
        for row in session.fresh(6):
            session.put(put_each, [row])
        session.attempt(store.topics)
    session.close()


def put_many(session: Session) -> None:
    session.open("r+")
    session.begin()
    put_chunks(session)


def put_many_written(session: Session) -> None:
    """Batches that count as large: they do not go through the map."""
    commitlog.WRITTEN_FROM = 1000
    session.open("r+")
    session.begin()
    put_chunks(session)


def put_chunks(session: Session) -> None:
    for _ in range(2):
        session.put(put_tables, session.fresh(12), session.fresh(20))
    session.close()


def put_batches(session: Session) -> None:
    session.open("r+")
    session.begin()
    for _ in range(5):
        session.put(put_batch, session.fresh(5, step=2))
    session.close()


def sync_flush(session: Session) -> None:
    session.open("r+", config={"flush_disk_type": "SYNC_FLUSH"})
    session.begin()
    for _ in range(4):
        for row in session.fresh(3):
            session.put(put_each, [row], raised="unsure")
        session.put(put_tables, session.fresh(8), raised="unsure")
    session.close()


def flush(session: Session) -> None:
    store = session.open("r+")
    session.begin()
    for _ in range(3):
        session.put(put_tables, session.fresh(12))
        session.attempt(store.flush)
        session.attempt(session.check, store)
    session.close()


def timed_flush(session: Session) -> None:
    """The same as the thread does, in turn with the puts."""
    store = session.open("r+")
    session.begin()
    for _ in range(3):
        session.put(put_tables, session.fresh(12))
        store._flusher.flush_if_due()
    session.close()


def commits(session: Session) -> None:
    """A consumer group commits between flushes: it goes on from what one wrote that returned, or from behind that."""
    store = session.open("r+")
    session.begin()
    known = 0
    for _ in range(2):
        session.put(put_tables, session.fresh(12))
        before = len(session.errors)
        place = known if (topics := session.attempt(store.topics)) is None else topics["T"][0][1]
        session.attempt(store.commit_offsets, "g", "T", {0: place})
        session.attempt(store.flush)
        known = known if len(session.errors) > before else place
    session.close()
    with rmq.open("/proc/self/root" + str(session.path)) as reader:  # a way that does not count
        place = reader.groups().get("g", {"T": {0: 0}})["T"][0]
        assert known <= place <= reader.topics()["T"][0][1], f"the group goes on from {place}, {known} was on disk"


def reopen(session: Session) -> None:
    session.attempt(session.check, session.open("r+"))
    session.close()


def repair(session: Session) -> None:
    session.attempt(session.check, session.open("r+", repair=True))
    session.close()


def read(session: Session) -> None:
    session.open("r")
    ask(session)
    session.close()


def read_and_write(session: Session) -> None:
    session.open("r+")
    session.begin()
    ask(session)
    session.close()


def ask(session: Session) -> None:
    """Every question; an answer is the right one or an error."""
    store = session.store
    assert store is not None
    rows = [row for group, _ in session.groups for row in group]
    even = [row for row in rows if row % 2 == 0]
    questions: list[tuple[Callable[[], object], object]] = [
        (lambda: bodies(store.query("T", f"key{rows[3]}")), [rows[3]]),
        (lambda: bodies(store.query("T", "all", limit=None)), rows[::-1]),
        (lambda: sorted(store.query_many("T", ["all", "none"], limit=None).table["phy_offset"].to_pylist())[:1], [0]),
        (lambda: bodies(store.pull("T", 0, 0, 1000).messages), even),
        (lambda: bodies(store.pull("T", 0, 2, 3, tags="tag").messages), even[2:5]),
        (lambda: store.topics()["T"][0], (0, len(even))),
        (lambda: store.search_offset("T", 0, 0), 0),
        (lambda: bodies([store.lookup(("T", 0, 1))]), even[1:2]),
        (lambda: bodies([store.lookup(0)]), rows[:1]),
        (lambda: [int(body[:5]) for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()], rows),
        (lambda: store.info() and None, None),
    ]
    for question, answer in questions:
        before = len(session.errors)
        found = session.attempt(question)
        assert len(session.errors) > before or found == answer, f"answered {found}, right is {answer}"


def bodies(messages: list[rmq.StoredMessage]) -> list[int]:
    return [int(one.body[:5]) for one in messages]


def index_file(session: Session) -> None:
    """IndexFile alone: made, put into, flushed, opened again, asked."""
    session.path.mkdir()
    session.begin()
    path, sizes = session.path / "index", {"max_hash_slot_num": 10, "max_index_num": 30}
    file = session.attempt(rmq.IndexFile, path, "x", **sizes) or rmq.IndexFile(path, "a", **sizes)
    stored = 0
    for row in range(6):
        before = len(session.errors)
        session.attempt(file.put_keys, [f"T#{row}", "T#all"], [row, row], [1000, 1000])
        stored += len(session.errors) == before
        session.attempt(file.flush)
    session.attempt(file.close)
    for mode in ("r+", "r"):
        file = session.attempt(rmq.IndexFile, path, mode, **sizes) or rmq.IndexFile(path, mode, **sizes)
        assert len(file.select_phy_offset("T#all")) == stored
        session.attempt(file.close)


WORKLOADS: dict[str, tuple[Callable[[Path], list[int]], Callable[[Session], None], str]] = {
    "create": (nothing, create, "a store"),
    "put": (nothing, puts, "a store"),
    "put and dispatch": (closed, puts_dispatched, "a store"),
    "put_many": (closed, put_many, "a store"),
    "put_many, written": (closed, put_many_written, "a store"),
    "put_batch": (closed, put_batches, "a store"),
    "SYNC_FLUSH": (closed, sync_flush, "a store"),
    "flush": (closed, flush, "a store"),
    "timed flush": (closed, timed_flush, "a store"),
    "commits": (closed, commits, "a store"),
    "open clean": (closed, reopen, "a store"),
    "open after a crash": (killed, reopen, "a store"),
    "repair": (damaged, repair, "a store"),
    "open a broker's": (foreign, reopen, "a store"),
    "open a broker's after a crash": (foreign_killed, reopen, "a store"),
    "read": (closed, read, "nothing new"),
    "read after a crash": (killed, read, "nothing new"),
    "read a broker's": (foreign, read, "nothing new"),
    "ask while writing": (closed, read_and_write, "a store"),
    "index file": (nothing, index_file, "files"),
}
