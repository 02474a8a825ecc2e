# SPDX-License-Identifier: Apache-2.0
"""Rows S1 to S4: a full segment read again, beside RocketMQ's recovery and reput, reading alone, and pure Python."""

from __future__ import annotations

import dataclasses
import mmap
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import peers
from records import CONFIG as SMALL
from records import RECORD_SIZES, TOPIC, Records, make_records
from rounds import timed
from sample import START
from setting import Setting

import rmq
from rmq._core import _layout as L
from rmq._core._record import PARSE_PROPERTIES
from rmq.commitlog import CommitLog
from rmq.dispatch import Dispatcher
from rmq.index import Index
from rmq.logscan import CHECK_CRC
from rmq.queueset import QueueSet
from rmq.views import view_batches

SEGMENT = 1024**3  # bytes, as RocketMQ's own
CONFIG = dataclasses.replace(SMALL, mapped_file_size_commit_log=SEGMENT)
WALKED = 20_000  # records that pure Python reads in a round
COLUMNS = ["phy_offset", "topic", "body", "keys"]
COPIED_PART = "1 KiB"
BESIDE_BODY = ["phy_offset", "topic", "keys"]


class Filled:
    """A store whose only segment is full of records of one size."""

    def __init__(self, setting: Setting, records: Records) -> None:
        self.path = setting.disk / "store"
        passes = (SEGMENT - 4096) // (len(records) * records.record_size)
        self.count = len(records) * passes
        self.end = self.count * records.record_size
        table = records.table()
        with rmq.open(self.path, "x", config=CONFIG, clock=lambda: START) as store:
            for _ in range(passes):
                store.put_many(table, topic=TOPIC, results=False)
        setting.settle()
        self.segment = self.path / "commitlog" / f"{0:020d}"
        self.log = CommitLog([self.path / "commitlog"], SEGMENT, writable=False)

    def close(self) -> None:
        self.log.close()
        shutil.rmtree(self.path)


def scan_rows(setting: Setting) -> None:
    rows = setting.anchored("S1", "S2") + setting.wanted("S1b", "S3", "S4")
    if not rows:
        return
    for part, size in RECORD_SIZES.items():
        records = make_records(part, setting.place, setting.seed)
        filled = Filled(setting, records)
        if "S1" in rows:
            beside_recovery(setting, filled, part)
        if "S1b" in rows:
            setting.add("S1b", walk(filled), {"read": read(setting, filled, size)}, part)
        if "S2" in rows:
            beside_reput(setting, filled, part)
        if "S3" in rows and part == COPIED_PART:
            with rmq.open(filled.path) as store:
                ours = timed(filled.count, lambda _, store=store: lambda: deque(store.scan(columns=COLUMNS), 0))
                setting.add("S3", ours, {"read": read(setting, filled, size)}, "copied, CRC")
            setting.add("S3", timed(filled.count, lambda _, filled=filled: lambda: views(filled)),
                        {"read": read(setting, filled, size)}, "views")  # fmt: skip
        if "S4" in rows:
            beside_python(setting, filled, part)
        filled.close()
        records.bodies_path.unlink()
        records.keys_path.unlink()


def walk(filled: Filled) -> Callable[[int], float]:
    """The scan of recovery: CRC and properties of every record, nothing kept."""
    def run() -> None:
        batches = filled.log.records(0, filled.end, checks=CHECK_CRC | PARSE_PROPERTIES)
        assert sum(len(batch) for batch in batches) == filled.count

    return timed(filled.count, lambda _: run)


def views(filled: Filled) -> None:
    """Without CRC: bodies are passed over. What `scan` hands out is copied; this is the entry inside the package."""
    batches = view_batches(filled.log, 0, filled.end, BESIDE_BODY, check_crc=False)
    assert sum(batch.num_rows for batch in batches) == filled.count
    filled.log.check()


def read(setting: Setting, filled: Filled, record_size: int) -> Callable[[int], float]:
    """Every byte of the records once."""
    data = np.memmap(filled.segment, np.uint8, "r")[: filled.end]
    return lambda _: record_size * setting.floors.read(data)


def beside_recovery(setting: Setting, filled: Filled, part: str) -> None:
    """RocketMQ takes every record for sound."""
    anchors = setting.rocketmq.rounds(filled.count, "scan", store=str(setting.place / "{name}" / "scan"),
                                      log=str(filled.segment), end=filled.end)  # fmt: skip
    setting.add("S1", walk(filled), anchors, part)
    for asked in anchors.values():
        assert asked.answer["count"] == filled.count
    if "S2" not in setting.rows:
        setting.rocketmq.ask("unmap", log=str(filled.segment))


def beside_reput(setting: Setting, filled: Filled, part: str) -> None:
    """Queue and index of a new store each round, those of the round before are let go of; two keys a message. The index
    file's pages are in memory, as far as it is filled."""
    place, rocketmq = setting.place / "derived", setting.rocketmq
    warm = L.INDEX_HEADER_SIZE + CONFIG.max_hash_slot_num * L.INDEX_SLOT_SIZE + (1 + 2 * filled.count) * L.ENTRY_SIZE

    def make(_: int) -> Callable[[], Any]:
        opened.close()
        shutil.rmtree(place, ignore_errors=True)
        queues = QueueSet(place / "consumequeue", CONFIG.mapped_file_size_consume_queue, writable=True, is_exact=True)
        index = Index(place / "index", CONFIG, writable=True)
        np.frombuffer(index._next_file()._file.map, np.uint8)[: warm : mmap.PAGESIZE] = 0
        dispatcher = Dispatcher(filled.log, queues, index, CONFIG)
        opened.callback(queues.close)
        opened.callback(index.close)
        return lambda: dispatcher.advance(filled.end)

    anchors = rocketmq.rounds(filled.count, "dispatch", store=str(setting.place / "{name}" / "dispatch"),
                              log=str(filled.segment), end=filled.end, warm=warm)  # fmt: skip
    with ExitStack() as opened:
        setting.add("S2", timed(filled.count, make), anchors, part)
    for asked in anchors.values():
        assert asked.answer["count"] == filled.count
    for derived in ("consumequeue", "index"):
        check_same(filled.path / derived, place / derived)
    shutil.rmtree(place)
    rocketmq.ask("unmap", log=str(filled.segment))


def check_same(ours: Path, again: Path) -> None:
    """What dispatch made is what the puts made; an index file's name is the time it was made."""
    first, second = ([path for path in sorted(root.rglob("*")) if path.is_file()] for root in (ours, again))
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(np.memmap(one, np.uint8, "r"), np.memmap(other, np.uint8, "r")), other


def beside_python(setting: Setting, filled: Filled, part: str) -> None:
    log = peers.Log(filled.segment)
    count = min(WALKED, filled.count)
    setting.add("S4", walk(filled),
                {"pure Python": timed(count, lambda _: lambda: deque(islice(log.walk(), count), 0))}, part)  # fmt: skip
    log.close()
