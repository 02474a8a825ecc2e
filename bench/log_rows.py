# SPDX-License-Identifier: Apache-2.0
"""Rows C1 to C5: records into the log, beside memcpy, RocketMQ's encoder and append, databases, and msync."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peers
from databases import OFFSET, Lmdb, Sqlite
from peer_rows import NO_LMDB
from records import CONFIG, HOST, POOL_BYTES, PORT, RECORD_SIZES, SEGMENT, TOPIC, Records, WarmLog, make_records
from rounds import WALL, Round, Taken, timed
from sample import START, Fresh
from setting import Setting

import rmq
from rmq._core._record import CPU_LEVEL
from rmq.preparing import FILL_AHEAD

PIECE = 1024**2
SINGLE = 10_000  # messages put one by one
DISTINCT, DATABASE_BYTES = 2000, 43_060_000  # messages that both put again and again, until so many bytes of records
TOGETHER = {"1": 100, "10": 100, "100": 40, "1000": 15}  # messages of a commit -> commits of a round
NO_SWITCH = "this CPU has none of the instructions that RMQ_CPU chooses"


def append_rows(setting: Setting) -> None:
    if setting.wants("C1b"):
        without_avx512(setting)
    rows = setting.anchored("C2", "C3") + setting.wanted("C1", "C4")
    if not rows:
        return
    for part in RECORD_SIZES:
        with filled(setting, part) as (records, log, source):
            if "C1" in rows:
                taken = beside_memcpy(setting, records, log, source)
                setting.record("C1", part, taken.pop("rmq"), taken)
            if "C2" in rows or "C3" in rows:
                beside_rocketmq(setting, records, log, source, rows)
            if "C4" in rows:
                beside_databases(setting, records, log)
    if "C4" in rows:
        setting.table.skip("C4", NO_LMDB)


@contextlib.contextmanager
def filled(setting: Setting, part: str) -> Iterator[tuple[Records, WarmLog, Any]]:
    """Messages, their table, and a log whose segment they have filled once."""
    records = make_records(part, setting.place, setting.seed)
    log = WarmLog(setting.place / "commitlog")
    log.append(source := records.table(), records.passes)
    assert log.end == len(records) * records.record_size * records.passes
    yield records, log, source
    log.close()
    records.bodies_path.unlink()
    records.keys_path.unlink()


def without_avx512(setting: Setting) -> None:
    """RMQ_CPU chooses for a whole process, so row C1 runs in another one."""
    if CPU_LEVEL == "plain":
        setting.table.skip("C1b", NO_SWITCH)
        return
    place = setting.place / "narrow"
    place.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("narrow_job.py")), place, setting.seed, setting.quick]
    done = subprocess.run([str(word) for word in command], env={**os.environ, "RMQ_CPU": "v2"}, check=True,
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
    for part, taken in json.loads(done.stdout).items():
        setting.record("C1b", part, taken.pop("rmq"), taken)
    shutil.rmtree(place)


def whole(records: Records, log: WarmLog, source: Any) -> Round:
    """The segment full."""
    def make(_: int) -> Callable[[], None]:
        log.restart()
        return functools.partial(log.append, source, records.passes)

    return timed(len(records) * records.passes, make)


def beside_memcpy(setting: Setting, records: Records, log: WarmLog, source: Any) -> Taken:
    with copying(setting, records) as copy:
        return setting.interleaved({"memcpy of 1 MiB": copy, "rmq": whole(records, log, source)})


@contextlib.contextmanager
def copying(setting: Setting, records: Records) -> Iterator[Round]:
    """memcpy from as many bytes as the columns have into a warm file of a segment's size; ns per record."""
    path = setting.place / "copied"
    with path.open("w+b") as file:
        file.truncate(SEGMENT)
        target = mmap.mmap(file.fileno(), SEGMENT)
    np.frombuffer(target, np.uint8)[:] = 1
    copy, pool = setting.floors.copy, np.resize(records.pool, POOL_BYTES)
    yield lambda _: records.record_size * copy(target, pool, PIECE)
    target.close()
    path.unlink()


def beside_rocketmq(setting: Setting, records: Records, log: WarmLog, source: Any, rows: list[str]) -> None:
    """The bytes of both are the same."""
    rocketmq, place = setting.rocketmq, setting.place
    rocketmq.ask("messages", bodies=records.bodies_path, keys=records.keys_path, count=len(records),
                 topic=TOPIC, time=START, address=HOST, port=int(PORT),
                 properties=log.properties(records.keys[0], records.uniq_keys[0]))  # fmt: skip
    their = str(place / "{name}" / f"{0:020d}")
    count = len(records) * records.passes
    anchors = rocketmq.rounds(count, "append", store=str(place / "{name}" / "append"), file=their, size=SEGMENT,
                              passes=records.passes)  # fmt: skip
    if "C2" in rows:
        setting.add("C2", whole(records, log, source), anchors, records.part)
        written = np.memmap(log.path, np.uint8, "r")[: log.end]
        for name in rocketmq.jvms:
            assert np.array_equal(written, np.memmap(their.format(name=name), np.uint8, "r")[: log.end])
    if "C3" in rows:
        messages = records.messages(SINGLE)

        def one_by_one(_: int) -> Callable[[], None]:
            log.restart()
            return lambda: log.append_each(messages[: len(records)])

        setting.add("C3", timed(min(SINGLE, len(records)), one_by_one), anchors, records.part)
    for name in rocketmq.jvms:
        rocketmq.jvms[name].ask("forget", file=their.format(name=name))
        Path(their.format(name=name)).unlink()


def beside_databases(setting: Setting, records: Records, log: WarmLog) -> None:
    """They get the records made, of the same few messages. What memcpy takes, as in C1, says what is in reach."""
    messages = records.messages(DISTINCT)
    passes = DATABASE_BYTES // (len(messages) * records.record_size)
    log.restart()
    log.append(messages)
    made = list(peers.split(log.path, 0, log.end)) * passes
    pairs = [(OFFSET.pack(number), record) for number, record in enumerate(made)]
    numbered = list(enumerate(made))
    fresh = Fresh(setting.place / "databases")
    (setting.place / "databases").mkdir()
    sqlite = fresh.make("sqlite", lambda path: Sqlite(path, of_records=True))

    def ours(_: int) -> Callable[[], None]:
        log.restart()
        return lambda: log.append(messages, passes)

    def by_lmdb(_: int) -> Callable[[], None]:
        lmdb = fresh.make("lmdb", Lmdb)
        return lambda: lmdb.put_many(pairs, append=True)

    def by_sqlite(_: int) -> Callable[[], None]:
        sqlite.clear()
        return lambda: sqlite.put_many(numbered)

    runs = {"sqlite executemany": timed(len(made), by_sqlite)}
    if find_spec("lmdb"):
        runs["lmdb putmulti"] = timed(len(made), by_lmdb)
    with copying(setting, records) as copy:
        taken = setting.interleaved({**runs, "memcpy": copy, "rmq": timed(len(made), ours)})
    for name in runs:
        setting.record("C4", f"{records.part}, {name.split()[0]}", taken["rmq"], {name: taken[name]}, taken["memcpy"])
    fresh.close()


# ---- on disk ---------------------------------------------------------------------------------------------


class Mapped:
    """The plain way to have records on disk: copied into a mapped file whose blocks are there, then msync."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, SEGMENT)
            self._map = mmap.mmap(file.fileno(), SEGMENT)
        self._position = 0

    def put(self, records: bytes) -> None:
        begin, self._position = self._position, self._position + len(records)
        self._map[begin : self._position] = records
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.flush(page, self._position - page)

    def close(self) -> None:
        self._map.close()
        self.path.unlink()


def disk_row(setting: Setting) -> None:
    """SYNC_FLUSH: put_many returns when its messages are on disk. It also makes queue and index."""
    if not setting.wants("C5"):
        return
    config = dataclasses.replace(CONFIG, flush_disk_type="SYNC_FLUSH")
    records = make_records("1 KiB", setting.place, setting.seed)
    os.sync()  # what other rows wrote is not to go to disk meanwhile
    for part, most in TOGETHER.items():
        count, commits = int(part), max(1, most // 4) if setting.quick else most
        messages = records.messages(count)
        made = bytes(records.record_size * count)
        mapped = Mapped(setting.disk / "mapped")
        with rmq.open(setting.disk / "store", "x", config=config, clock=lambda: START) as store:
            store.put_many(messages)

            def ours(_: int, store: rmq.Store = store, messages: list[rmq.Message] = messages,
                     commits: int = commits) -> Callable[[], None]:  # fmt: skip
                until_zeroed(store)
                return repeated(commits, store.put_many, messages)

            def plain(_: int, mapped: Mapped = mapped, made: bytes = made,
                      commits: int = commits) -> Callable[[], None]:  # fmt: skip
                return repeated(commits, mapped.put, made)

            setting.add("C5", timed(count * commits, ours, WALL),
                        {"mmap and msync": timed(count * commits, plain, WALL)}, part)  # fmt: skip
        mapped.close()
        shutil.rmtree(setting.disk / "store")


def until_zeroed(store: rmq.Store) -> None:
    """Wait for the zeros ahead of the log's end that a store which rests now and then has."""
    preparer, ends = store._flusher.preparer, time.monotonic() + 10
    preparer.due_at = store._log.position
    preparer.wake()
    while preparer.due_at <= store._log.position:
        assert time.monotonic() < ends, "nothing writes zeros ahead of the log"
        time.sleep(0.01)
    assert store._log.segments[-1].file.filled >= min(SEGMENT, store._log.position + FILL_AHEAD)


def repeated(times: int, call: Callable[[Any], Any], argument: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call(argument)

    return run
