# SPDX-License-Identifier: Apache-2.0
"""Rows C1 to C5: records into the log, beside memcpy, RocketMQ's encoder and append, databases, and msync."""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peers
from databases import OFFSET, Lmdb, Sqlite
from peer_rows import NO_LMDB
from records import CONFIG, HOST, PORT, RECORD_SIZES, SEGMENT, TOPIC, Records, WarmLog, make_records
from rounds import WALL, Round, timed
from sample import START, Fresh
from setting import Setting

import rmq

PIECE = 1024**2
SINGLE = 10_000  # messages put one by one
DATABASE_MESSAGES = 10_000
TOGETHER = {"1": 100, "10": 100, "100": 40, "1000": 15}  # messages of a commit -> commits of a round
NO_SWITCH = "RMQ_CPU=v2 chooses the instructions, for a whole process: not built yet"


def append_rows(setting: Setting) -> None:
    setting.table.skip("C1b", NO_SWITCH)
    rows = setting.anchored("C2", "C3") + setting.wanted("C1", "C4")
    if not rows:
        return
    for part in RECORD_SIZES:
        records = make_records(part, setting.place, setting.seed)
        log = WarmLog(setting.place / "commitlog")
        log.append(source := records.table(), records.passes)
        assert log.end == len(records) * records.record_size * records.passes
        if "C1" in rows:
            beside_memcpy(setting, records, log, source)
        if "C2" in rows or "C3" in rows:
            beside_rocketmq(setting, records, log, source, rows)
        if "C4" in rows:
            beside_databases(setting, records, log)
        log.close()
        records.bodies_path.unlink()
        records.keys_path.unlink()
    if "C4" in rows:
        setting.table.skip("C4", NO_LMDB)


def whole(records: Records, log: WarmLog, source: Any) -> Round:
    """The segment full."""
    def make(_: int) -> Callable[[], None]:
        log.restart()
        return functools.partial(log.append, source, records.passes)

    return timed(len(records) * records.passes, make)


def beside_memcpy(setting: Setting, records: Records, log: WarmLog, source: Any) -> None:
    """Pieces of 1 MiB of the same bodies into a file of a segment's size, as many bytes as the records have."""
    path = setting.place / "copied"
    with path.open("w+b") as file:
        file.truncate(SEGMENT)
        target = mmap.mmap(file.fileno(), SEGMENT)
    np.frombuffer(target, np.uint8)[:] = 1
    copy, pool, size = setting.floors.copy, records.pool, records.record_size
    setting.add("C1", whole(records, log, source),
                {"memcpy of 1 MiB": lambda _: size * copy(target, pool, PIECE)}, records.part)  # fmt: skip
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
    """They get the records made, and store the same bytes."""
    messages = records.messages(min(DATABASE_MESSAGES, len(records)))
    log.restart()
    log.append(messages)
    made = list(peers.split(log.path, 0, log.end))
    pairs = [(OFFSET.pack(number), record) for number, record in enumerate(made)]
    numbered = list(enumerate(made))
    fresh = Fresh(setting.place / "databases")
    (setting.place / "databases").mkdir()
    sqlite = fresh.make("sqlite", lambda path: Sqlite(path, of_records=True))

    def ours(_: int) -> Callable[[], None]:
        log.restart()
        return lambda: log.append(messages)

    def by_lmdb(_: int) -> Callable[[], None]:
        lmdb = fresh.make("lmdb", Lmdb)
        return lambda: lmdb.put_many(pairs, append=True)

    def by_sqlite(_: int) -> Callable[[], None]:
        sqlite.clear()
        return lambda: sqlite.put_many(numbered)

    runs = {"sqlite executemany": timed(len(made), by_sqlite)}
    if find_spec("lmdb"):
        runs["lmdb putmulti"] = timed(len(made), by_lmdb)
    taken = setting.interleaved({**runs, "rmq": timed(len(made), ours)})
    for name in runs:
        setting.record("C4", f"{records.part}, {name.split()[0]}", taken["rmq"], {name: taken[name]})
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
            setting.add("C5", timed(count * commits, repeated(commits, store.put_many, messages), WALL),
                        {"mmap and msync": timed(count * commits, repeated(commits, mapped.put, made), WALL)},
                        part)  # fmt: skip
        mapped.close()
        shutil.rmtree(setting.disk / "store")


def repeated(times: int, call: Callable[[Any], Any], argument: Any) -> Callable[[int], Callable[[], None]]:
    def run() -> None:
        for _ in range(times):
            call(argument)

    return lambda _: run
