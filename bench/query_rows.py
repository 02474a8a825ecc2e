# SPDX-License-Identifier: Apache-2.0
"""Row Q1: exact answers of a store with ten index files. Row T1: two threads beside one, in wall time."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keyfiles
import numpy as np
import pyarrow as pa
from goals import ratio_text
from keyfiles import KeyFile
from records import CONFIG, SEGMENT, TOPIC, make_records
from rounds import ROUNDS, WALL, WARM, Round, timed, together
from sample import START
from scan_rows import Filled
from setting import Setting

import rmq
from rmq._core._record import PARSE_PROPERTIES
from rmq.logscan import CHECK_CRC

MESSAGES, FILES = 5_000_000, 10
ENTRIES = MESSAGES // FILES + 1  # of an index file; as many for a slot as in a full one of RocketMQ's size
ASKED = 100_000  # keys of a round, each of one message
ALLOWED = 2500.0  # ns: 400,000 answers per second
COLUMNS = ["phy_offset", "queue_offset", "store_timestamp"]
PUT_TOGETHER = 100_000
PART = "100 B"  # at 1 KiB the row would be about memory, of which a second thread gets little more: see reading_alone
TURNS = 4  # of two threads, each a part of a round


def query_row(setting: Setting) -> None:
    """Keys that are there, others in each round; also of a store of a tenth, which is one index file."""
    if not setting.wants("Q1"):
        return
    whole = answers(setting, "whole", MESSAGES)
    tenth = answers(setting, "tenth", MESSAGES // FILES)
    taken = setting.interleaved({"tenth": tenth, "": whole})
    setting.record("Q1", "", taken[""], {"400,000 a second": [ALLOWED] * len(taken[""])})
    setting.note(f"Q1: {statistics.median(taken['tenth']):.1f} ns in a store of one index file, a tenth as large")
    for path in setting.disk.glob("answers-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def answers(setting: Setting, name: str, count: int) -> Round:
    """query_many without bodies on a store of so many messages, each with one key."""
    path = setting.disk / f"answers-{name}"
    keys = keyfiles.write(path.with_suffix(".keys"), keyfiles.random_lines(count, setting.seed))
    wanted = keyfiles.sample(keys, path.with_suffix(".wanted"), ASKED * (ROUNDS + WARM), setting.seed + 1)
    store = filled_store(path, keys)

    def make(number: int) -> Callable[[], None]:
        asked = wanted.text(number * ASKED, ASKED)

        def run() -> None:
            assert store.query_many(TOPIC, asked, columns=COLUMNS).table.num_rows == ASKED

        return run

    return timed(ASKED, make)


def filled_store(path: Path, keys: KeyFile) -> rmq.Store:
    config = dataclasses.replace(CONFIG, max_index_num=ENTRIES, max_hash_slot_num=ENTRIES // 4)
    bodies = pa.array([bytes(100)] * PUT_TOGETHER, pa.binary())
    with rmq.open(path, "x", config=config, clock=lambda: START) as store:
        for first in range(0, len(keys), PUT_TOGETHER):
            table = pa.table({"body": bodies, "keys": keys.arrow(first, PUT_TOGETHER)})
            store.put_many(table, topic=TOPIC, results=False)
    os.sync()
    return rmq.open(path, config=config)


def reading_alone(setting: Setting, filled: Filled) -> None:
    """How far memory lets two threads be quicker than one, on the same bytes."""
    data = np.memmap(filled.segment, np.uint8, "r")[: filled.end]
    halves = [functools.partial(setting.floors.read, part) for part in (data[: len(data) // 2], data[len(data) // 2 :])]
    taken = setting.interleaved({
        "2": timed(1, lambda _: together(halves), WALL),
        "1": timed(1, lambda _: together([functools.partial(setting.floors.read, data)]), WALL)})  # fmt: skip
    ratio = statistics.median(taken["1"]) / statistics.median(taken["2"])
    setting.note(f"ungated: T1, every byte read and nothing done with it, 2 threads / 1: {ratio_text(ratio)}")


def thread_row(setting: Setting) -> None:
    if not setting.wants("T1"):
        return
    records = make_records(PART, setting.place, setting.seed)
    filled = Filled(setting, records)
    middle = filled.log.align(filled.end // 2, filled.end)

    def scan(begin: int, end: int) -> Callable[[], Any]:
        return lambda: [sum(map(len, filled.log.records(begin, end, checks=CHECK_CRC | PARSE_PROPERTIES)))
                        for _ in range(TURNS)]  # fmt: skip

    halves, all_of_it = [scan(0, middle), scan(middle, filled.end)], [scan(0, filled.end)]
    count = filled.count * TURNS
    setting.add("T1", timed(count, lambda _: together(halves), WALL),
                {"1 thread": timed(count, lambda _: together(all_of_it), WALL)}, "scan")  # fmt: skip
    reading_alone(setting, filled)
    filled.close()
    count = records.passes * len(records)
    path = setting.disk / "split"
    config = dataclasses.replace(CONFIG, mapped_file_size_commit_log=SEGMENT // 8, max_hash_slot_num=25_000,
                                 max_index_num=100_001)  # fmt: skip
    with rmq.open(path, "x", config=config) as store:
        for _ in range(records.passes):
            store.put_many(records.table(), topic=TOPIC, results=False)
    setting.settle()

    def check(jobs: int) -> Round:
        return timed(count, lambda _: lambda: rmq.verify(path, config=config, jobs=jobs), WALL)

    assert rmq.verify(path, config=config).is_sound
    setting.add("T1", check(2), {"1 thread": check(1)}, "verify")
    shutil.rmtree(path)
