# SPDX-License-Identifier: Apache-2.0
"""Rows I11 and I12: 2 million keys beside what one would use instead. P1: a call that does nothing."""

from __future__ import annotations

import random
import shutil
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from calls import CALLS, by_compiled, by_python
from compiled import MODULES, compiled
from contenders import KEYS, ROUND, SLOTS, Contenders, Keys
from goals import ratio_text
from index_rows import touch_all
from keyfiles import WIDTH
from rounds import Round, interleaved, timed
from setting import Setting

import rmq
from rmq._core._indexfile import index_file_size
from rmq._core._layout import INDEX_SLOT_SIZE

LOOK_UPS = 200_000
NO_LMDB = "lmdb is missing (pip install -e '.[bench]')"
PUTTERS = ("lmdb put", "sqlite executemany")
NEW, MEMORY = "rmq, new file", "memory"
WALKS = 64  # side by side, as many as the put asks slots of memory ahead
HOLDERS = ("rmq", "lmdb put", "numpy expert", "dict")


def index_rows(setting: Setting) -> None:
    if not setting.wanted("I11", "I12"):
        return
    place = setting.disk / "contenders"
    place.mkdir()
    keys = Keys()
    with closing(Contenders(place, keys)) as contenders:
        if setting.wants("I12"):
            put_row(setting, contenders)
        if setting.wants("I11"):
            look_up_row(setting, contenders, keys)
    shutil.rmtree(place)


def put_row(setting: Setting, contenders: Contenders) -> None:
    """All of the keys, in rounds and transactions of 100,000: the median is that of a file of a million.

    The pages of our file are touched before, as in I1. Beside it a new one, whose pages are first touched by its puts:
    what that takes falls into some rounds, so its mean counts. What memory alone takes says what is in reach.
    """
    touch_all(contenders.file, KEYS)
    np.frombuffer(contenders.file._file.map, np.uint8)[: index_file_size(SLOTS, KEYS + 1)] = 0
    with rmq.IndexFile(setting.disk / "contenders" / "new", "x") as new:
        takers = contenders.takers | {NEW: contenders.taker_of(new)}
        runs = {name: timed(ROUND, lambda _, taker=takers[name]: taker.round())
                for name in (NEW, *PUTTERS, "rmq") if name in takers}  # fmt: skip
        rounds = KEYS // ROUND // (2 if setting.quick else 1)
        taken = interleaved({MEMORY: memory_alone(setting), **runs}, rounds, warm=0)
    for name in PUTTERS:
        if name in taken:
            setting.record("I12", name, taken["rmq"], {name: taken[name]}, taken[MEMORY])
    means = {name: statistics.mean(taken[name]) for name in runs}
    beside = "".join(f"; {name} {means[name]:.1f} ns, {ratio_text(means[name] / means[NEW])}"
                     for name in PUTTERS if name in means)  # fmt: skip
    setting.note(f"ungated: I12 into a new file, means: {means[NEW]:.1f} ns{beside}")
    setting.table.skip("I12", NO_LMDB)


def memory_alone(setting: Setting) -> Round:
    """A random line of as many bytes as the slots have, and reading as many as a key that is a str; ns per key."""
    lines = setting.floors.Lines(SLOTS * INDEX_SLOT_SIZE, setting.seed)
    part = ROUND * sys.getsizeof("k" * WIDTH)
    texts = np.ones(KEYS // ROUND * part, np.uint8)

    def run(number: int) -> float:
        read = setting.floors.read(texts[number * part : (number + 1) * part])
        return float(lines.walk(WALKS, ROUND, number + 1) + read * part / ROUND)

    return run


def look_up_row(setting: Setting, contenders: Contenders, keys: Keys) -> None:
    """Keys that are there, as objects that nobody has hashed yet; the peers get them as they like them best."""
    for name in HOLDERS:
        if name in contenders.takers:
            contenders.takers[name].fill()
    numbers = random.Random(setting.seed).sample(range(KEYS), LOOK_UPS)
    encoded = [keys.encoded[number] for number in numbers]
    array = np.array(encoded, "S32")
    vector, table, file = contenders.vector, contenders.dict, contenders.file

    def texts() -> list[str]:
        return [key.decode() for key in encoded]

    def ours(_: int) -> Callable[[], Any]:
        text = texts()
        return lambda: file.select_phy_offset_many(text)

    def by_dict(_: int) -> Callable[[], Any]:
        text, get = texts(), table.get
        return lambda: [get(key) for key in text]

    answers = file.select_phy_offset_many(texts()).to_pylist()
    assert all(number in answer for number, answer in zip(numbers, answers, strict=True))
    assert [table[key] for key in texts()] == numbers
    peers: dict[str, Round] = {"numpy expert": timed(LOOK_UPS, lambda _: lambda: vector.select(array)),
                               "dict get": timed(LOOK_UPS, by_dict)}  # fmt: skip
    if "lmdb put" in contenders.takers:
        lmdb = contenders.lmdb
        assert lmdb.get(encoded) == [keys.packed[number] for number in numbers]
        peers["lmdb get"] = timed(LOOK_UPS, lambda _: lambda: lmdb.get(encoded))
    taken = setting.interleaved({**peers, "rmq": timed(LOOK_UPS, ours)})
    for name in peers:
        setting.record("I11", name, taken["rmq"], {name: taken[name]})
    setting.table.skip("I11", NO_LMDB)


def call_row(setting: Setting) -> None:
    if setting.wants("P1"):
        empty = compiled("empty", MODULES).Empty()
        setting.add("P1", timed(CALLS, lambda _: lambda: by_compiled(empty)),
                    {"Python function": timed(CALLS, lambda _: by_python)})  # fmt: skip
