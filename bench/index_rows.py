# SPDX-License-Identifier: Apache-2.0
"""Rows I1 to I10: one index file beside RocketMQ's own, key by key the same. And the gate before them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import keyfiles
import numpy as np
import peers
import pyarrow as pa
from anchor import RocketMQ
from keyfiles import KeyFile
from rounds import ROUNDS, WALL, WARM, timed, together
from sample import START
from setting import Setting

import rmq
from rmq.sidecar import make_sidecar

SLOTS, ENTRIES = 5_000_000, 20_000_000  # RocketMQ's defaults
FULL = ENTRIES - 1
HOT_SLOTS, HOT_ENTRIES = 50_000, 200_001
PUTS, SINGLE_PUTS, SELECTS, SINGLE_SELECTS = 1_000_000, 200_000, 200_000, 50_000  # keys of a round
MAX_NUM = 32
PRESENT_LINES = 7.25  # of 64 bytes, that a key which is there needs: its slot, and five entries of which some straddle
LINES_BYTES = 400 * 1024**2
CHAINS = (32, 64, 128)
FLOOR_STEPS = 2_000_000
GATE_KEYS = 200_000
TURNS = 10  # of two threads, each a part of a round


class OurFile:
    """An index file that we put into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = rmq.IndexFile(path, "x")
        touch_all(self.file, FULL)
        self.empty()

    def empty(self) -> None:
        """All zeros again, every page touched."""
        np.frombuffer(self.file._file.map, np.uint8)[:] = 0

    def put(self, keys: Any, first: int) -> Callable[[], int]:
        """The call that puts them."""
        numbers = np.arange(first, first + len(keys))
        return functools.partial(self.file.put_keys, keys, numbers, numbers + START)

    def close(self) -> None:
        self.file.close()
        self.path.unlink()


def touch_all(file: rmq.IndexFile, count: int) -> None:
    """Put so many keys: the file then knows that the pages of their entries, and of slots, are in memory."""
    numbers = np.zeros(count, np.int64)
    assert file.put_hashes(numbers.astype(np.int32), numbers, numbers) == count


def geometry(slots: int = SLOTS, entries: int = ENTRIES) -> dict[str, Any]:
    return {"slots": slots, "entries": entries, "time": START, "max_num": MAX_NUM}


@contextmanager
def their_files(rocketmq: RocketMQ, place: Path) -> Iterator[str]:
    """Path of an empty index file of each JVM, its pages touched; {name} stands for the JVM."""
    path = str(place / "{name}" / "1")
    for name, jvm in rocketmq.jvms.items():
        jvm.ask("empty", file=path.format(name=name), **geometry())
    yield path
    for name, jvm in rocketmq.jvms.items():
        jvm.ask("close", file=path.format(name=name))
        Path(path.format(name=name)).unlink()


def fill(path: Path, keys: KeyFile, count: int) -> None:
    with rmq.IndexFile(path, "x") as file:
        for first in range(0, count, keyfiles.CHUNK):
            numbers = np.arange(first, min(first + keyfiles.CHUNK, count))
            assert file.put_keys(keys.arrow(first, len(numbers)), numbers, numbers + START) == len(numbers)


# ---- gate ------------------------------------------------------------------------------------------------


def gate(setting: Setting) -> None:
    """A full file of mixed keys is RocketMQ's, byte for byte; the batch select is the walk. Else AssertionError."""
    place, rocketmq = setting.place, setting.rocketmq
    count = FULL if rocketmq.jvms else GATE_KEYS
    keys = keyfiles.write(place / "mixed", keyfiles.mixed_lines(count, setting.seed))
    path = place / "gate"
    fill(path, keys, count)
    if rocketmq.jvms:
        ours = np.memmap(path, np.uint8, "r")
        name, jvm = next(iter(rocketmq.jvms.items()))
        with their_files(rocketmq, place) as their:
            for first in range(0, count, PUTS):
                jvm.ask("put", file=their.format(name=name), keys=keys.path, first=first,
                        count=min(PUTS, count - first), **geometry())  # fmt: skip
            jvm.ask("close", file=their.format(name=name))
            assert np.array_equal(ours, np.memmap(their.format(name=name), np.uint8, "r"))
        setting.note(f"gate: the index file of {count:,} mixed keys is RocketMQ's, {len(ours):,} bytes")
    check_walk(path, keys, setting)
    path.unlink()
    keys.path.unlink()


def check_walk(path: Path, keys: KeyFile, setting: Setting) -> None:
    numbers = np.random.default_rng(setting.seed).integers(0, len(keys), GATE_KEYS // 2)
    numbers[:200] = numbers[:200] // 500 * 500  # not ASCII
    asked = [key for number in numbers.tolist() for key in keys.text(number, 1)]
    asked += [f"{key}-é" if at % 100 == 0 else f"{key[:-1]}~" for at, key in enumerate(asked)]
    walker = peers.Index(path, SLOTS)
    walked = [walker.select(key) for key in asked]
    walker.close()
    with rmq.IndexFile(path) as file:
        assert file.select_phy_offset_many(asked).to_pylist() == walked
        assert file.select_phy_offset_many(pa.array(asked)).to_pylist() == walked
    assert all(number in answer for number, answer in zip(numbers.tolist(), walked, strict=False))
    setting.note(f"gate: select_phy_offset_many is the plain walk for {len(asked):,} keys, half of them absent")


# ---- put -------------------------------------------------------------------------------------------------


def put_rows(setting: Setting) -> None:
    if not setting.anchored("I1", "I1b", "I2", "I8"):
        return
    place = setting.disk
    count = PUTS * (ROUNDS + WARM)
    ours = OurFile(place / "ours")
    random = keyfiles.write(setting.place / "random-put", keyfiles.random_lines(count, setting.seed))
    uniq = keyfiles.write(setting.place / "uniq", keyfiles.uniq_lines(count, setting.seed))
    forms: list[tuple[str, KeyFile, int, Callable[[int], Callable[[], Any]]]] = [
        ("I1", random, PUTS, lambda first: ours.put(random.arrow(first, PUTS), first)),
        ("I1b", uniq, PUTS, lambda first: ours.put(uniq.arrow(first, PUTS), first)),
        ("I2", random, PUTS, lambda first: ours.put(random.text(first, PUTS), first)),
        ("I8", random, SINGLE_PUTS, lambda first: one_by_one(ours, random.text(first, SINGLE_PUTS), first)),
    ]
    for row, keys, size, make in forms:
        if setting.wants(row):
            ours.empty()
            with their_files(setting.rocketmq, place) as their:
                run = timed(size, lambda number, make=make, size=size: make(number * size))
                setting.add(row, run, setting.rocketmq.rounds(
                    size, "put", file=their, keys=keys.path, first=lambda number, size=size: number * size, count=size,
                    **geometry()))  # fmt: skip
                written = np.memmap(ours.path, np.uint8, "r")
                for name in setting.rocketmq.jvms:
                    setting.rocketmq.jvms[name].ask("close", file=their.format(name=name))
                    assert np.array_equal(written, np.memmap(their.format(name=name), np.uint8, "r"))
    ours.close()
    random.path.unlink()
    uniq.path.unlink()


def one_by_one(ours: OurFile, keys: list[str], first: int) -> Callable[[], None]:
    put = ours.file.put_key
    numbered = list(enumerate(keys, first))

    def run() -> None:
        for number, key in numbered:
            put(key, number, START + number)

    return run


# ---- look up ---------------------------------------------------------------------------------------------


class LookUps:
    """Rounds over one file, ours and RocketMQ's, on the same keys; the answers of each round are compared."""

    def __init__(self, setting: Setting, path: Path, **options: int) -> None:
        self._setting = setting
        self._path = path
        self._geometry = geometry(**options)
        names = {"slots": "max_hash_slot_num", "entries": "max_index_num"}
        self.file = rmq.IndexFile(path, **{names[name]: value for name, value in options.items()})

    def row(self, row: str, keys: KeyFile, form: Callable[[int, int], Any], size: int = SELECTS,
            part: str = "") -> list[float]:  # fmt: skip
        """form: text or arrow of the key file."""
        answers: list[Any] = []

        def make(number: int) -> Callable[[], Any]:
            asked = form(number * size, size)
            answers.clear()
            return lambda: answers.append(self.file.select_phy_offset_many(asked))

        return self._against(row, part, keys, timed(size, make), size, lambda: answers[0].flatten())

    def single_row(self, row: str, keys: KeyFile, size: int, part: str = "") -> list[float]:
        """One call for each key."""
        answers: list[list[int]] = []

        def make(number: int) -> Callable[[], Any]:
            asked, select = keys.text(number * size, size), self.file.select_phy_offset
            answers.clear()
            return lambda: answers.extend(map(select, asked))

        return self._against(row, part, keys, timed(size, make), size,
                             lambda: pa.array(chain.from_iterable(answers), pa.int64()))  # fmt: skip

    def _against(self, row: str, part: str, keys: KeyFile, run: Any, size: int,
                 found: Callable[[], Any]) -> list[float]:  # fmt: skip
        anchors = self._setting.rocketmq.rounds(size, "select", file=str(self._path), keys=keys.path, count=size,
                                                first=lambda number: number * size, **self._geometry)  # fmt: skip

        def checked(number: int) -> float:
            nanos: float = run(number)
            values = found()
            for asked in anchors.values():
                theirs = asked.answer
                assert (theirs["found"], theirs["sum"]) == (len(values), int(values.to_numpy().sum()))
            return nanos

        return self._setting.add(row, checked, anchors, part)

    def close(self) -> None:
        self.file.close()
        for jvm in self._setting.rocketmq.jvms.values():
            jvm.ask("close", file=str(self._path))


def select_rows(setting: Setting) -> None:
    """On a full file; from one round to the next other keys, so that none is in a cache."""
    rows = setting.anchored("I3", "I4", "I5", "I6", "I7", "I10") + setting.wanted("I3b", "I9")
    if not rows:
        return
    place = setting.place
    everything = keyfiles.write(place / "random", keyfiles.random_lines(FULL, setting.seed))
    # RocketMQ wants a number as the name of a file; a sidecar lies beside the directory `index`.
    path = setting.disk / "index" / "2"
    path.parent.mkdir()
    fill(path, everything, FULL)
    setting.settle()
    wanted = SELECTS * (ROUNDS + WARM)
    present = keyfiles.sample(everything, place / "present", wanted, setting.seed + 1)
    absent = keyfiles.write(place / "absent", keyfiles.random_lines(wanted, setting.seed + 2))
    everything.path.unlink()
    cold = LookUps(setting, path)
    if "I3" in rows:
        cold.row("I3", present, present.arrow)
    if "I3b" in rows:
        beside_the_floor(setting, cold.file, present)
    if "I4" in rows:
        cold.row("I4", absent, absent.arrow)
    if "I5" in rows:
        cold.row("I5", present, present.text)
    if "I7" in rows:
        cold.single_row("I7", present, SINGLE_SELECTS)
    if "I9" in rows:
        two_threads(setting, cold.file, present)
    cold.close()
    if "I6" in rows or "I7" in rows:
        sidecar_rows(setting, path, present, absent)
    path.unlink()
    if "I10" in rows:
        hot_row(setting)
    present.path.unlink()
    absent.path.unlink()


def sidecar_rows(setting: Setting, path: Path, present: KeyFile, absent: KeyFile) -> None:
    """The same file again, once it has its sidecar, and the same keys."""
    assert make_sidecar(path, SLOTS, ENTRIES) == ""
    setting.settle()
    sealed = LookUps(setting, path)
    assert sealed.file.view.sidecar is not None
    if setting.wants("I6"):
        sealed.row("I6", present, present.arrow, part="present")
        sealed.row("I6", absent, absent.arrow, part="absent")
    if setting.wants("I7"):
        sealed.single_row("I7", present, SINGLE_SELECTS, part="with sidecar")
    assert not sealed.file.view.sidecar.is_damaged
    sealed.close()
    (path.parent.parent / "rmq" / "sidecar" / path.name).unlink()


def beside_the_floor(setting: Setting, file: rmq.IndexFile, present: KeyFile) -> None:
    lines = setting.floors.Lines(LINES_BYTES, setting.seed)
    ours = timed(SELECTS, lambda number: functools.partial(file.select_phy_offset_many,
                                                           present.arrow(number * SELECTS, SELECTS)))  # fmt: skip
    floors = {f"{chains} walks side by side":
              lambda number, chains=chains: PRESENT_LINES * lines.walk(chains, FLOOR_STEPS, number + 1)
              for chains in CHAINS}  # fmt: skip
    setting.add("I3b", ours, floors)


def two_threads(setting: Setting, file: rmq.IndexFile, present: KeyFile) -> None:
    """The same keys, by one thread and by two that have half each; so often that it counts little when the second
    begins on the other core."""
    def select(keys: Any) -> None:
        for _ in range(TURNS):
            file.select_phy_offset_many(keys)

    def make(number: int, threads: int) -> Callable[[], None]:
        part = SELECTS // threads
        return together([functools.partial(select, present.arrow(number * SELECTS + at * part, part))
                         for at in range(threads)])  # fmt: skip

    count = SELECTS * TURNS
    setting.add("I9", timed(count, lambda number: make(number, 2), WALL),
                {"1 thread": timed(count, lambda number: make(number, 1), WALL)})  # fmt: skip


def hot_row(setting: Setting) -> None:
    """A file of 4 MB, which stays in the cache."""
    place, count = setting.place, HOT_ENTRIES - 1
    keys = keyfiles.write(place / "hot-keys", keyfiles.random_lines(count, setting.seed + 3))
    path = setting.disk / "3"
    with rmq.IndexFile(path, "x", max_hash_slot_num=HOT_SLOTS, max_index_num=HOT_ENTRIES) as file:
        numbers = np.arange(count)
        assert file.put_keys(keys.arrow(0, count), numbers, numbers + START) == count
    wanted = keyfiles.sample(keys, place / "hot-wanted", SELECTS * (ROUNDS + WARM), setting.seed + 4)
    hot = LookUps(setting, path, slots=HOT_SLOTS, entries=HOT_ENTRIES)
    hot.row("I10", wanted, wanted.arrow)
    hot.close()
    for used in (path, keys.path, wanted.path):
        used.unlink()


