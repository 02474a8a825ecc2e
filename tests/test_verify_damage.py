"""Every kind of damage, planted in a small store of ours, is found at its file and byte, under its kind."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import oracle
import pytest
from conftest import SIZES, digests

import rmq
from rmq.verification.findings import KINDS, SEVERITIES

CONFIG = rmq.StoreConfig(**SIZES)
COUNT = 70
ENTRIES_AT = 40 + 10 * 4


def message(i: int) -> rmq.Message:
    return rmq.Message("TU"[i % 3 == 2], b"body %03d" % i * 8, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "store"
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for i in range(COUNT):
            store.put(message(i))
    assert oracle.check_store(path, 10, 30) == []
    assert rmq.verify(path) == []
    return path


@dataclass
class Victim:
    """A copy of the store, and where things lie in it."""

    path: Path

    @cached_property
    def records(self) -> list[oracle.Record]:
        return oracle.read_records(self.path)

    def files(self, part: str) -> list[str]:
        return sorted(str(file.relative_to(self.path)) for file in (self.path / part).rglob("*") if file.is_file())

    def poke(self, file: str, position: int, data: bytes) -> None:
        with open(self.path / file, "r+b") as out:
            old = os.pread(out.fileno(), len(data), position)
            assert old != data, "nothing would change"
            os.pwrite(out.fileno(), data, position)

    def peek(self, file: str, position: int, size: int) -> bytes:
        with open(self.path / file, "rb") as out:
            return os.pread(out.fileno(), size, position)

    def in_log(self, i: int, position: int = 0) -> tuple[str, int]:
        """Segment and byte of a place in record i."""
        phy_offset = self.records[i].phy_offset + position
        start = self.records[i].phy_offset // 4096 * 4096
        return f"commitlog/{start:020d}", phy_offset - start

    def unit_of(self, i: int) -> tuple[str, int]:
        record = self.records[i]
        start = record.queue_offset * 20 // 200 * 200
        return f"consumequeue/{record.topic}/{record.queue_id}/{start:020d}", record.queue_offset * 20 - start

    def entry(self, file: int, number: int) -> tuple[str, int]:
        return self.files("index")[file], ENTRIES_AT + number * 20


Found = tuple[str, int, str, str]  # file, byte, kind, severity
Planter = Callable[[Victim], Found]


def flip(victim: Victim, file: str, position: int, bit: int = 1) -> None:
    victim.poke(file, position, bytes([victim.peek(file, position, 1)[0] ^ bit]))


# ---- log -------------------------------------------------------------------------------------------------


def in_record(position: int, kind: str = "record", data: bytes | None = None, i: int = 20) -> Planter:
    def plant(victim: Victim) -> Found:
        file, at = victim.in_log(i)
        flip(victim, file, at + position) if data is None else victim.poke(file, at + position, data)
        return file, at, kind, "damage"

    return plant


def last_record_torn(victim: Victim) -> Found:
    file, at = victim.in_log(COUNT - 1)
    flip(victim, file, at + 5)
    return file, at, "record", "damage"


def last_record_zeroed(victim: Victim) -> Found:
    file, at = victim.in_log(COUNT - 1)
    victim.poke(file, at, bytes(victim.records[-1].size))
    return file, at, "record", "damage"


def blank_damaged(victim: Victim) -> Found:
    i = next(i for i, record in enumerate(victim.records) if record.phy_offset >= 4096) - 1
    file, at = victim.in_log(i)
    at += victim.records[i].size
    flip(victim, file, at + 7)
    return file, at, "record", "damage"


def garbage_behind_the_end(victim: Victim) -> Found:
    file, at = victim.in_log(COUNT - 1)
    at += victim.records[-1].size
    victim.poke(file, at, b"\xda\xa3 garbage")
    return file, at, "tail", "note"


def record_behind_the_end(victim: Victim) -> Found:
    file, at = victim.in_log(COUNT - 1)
    at += victim.records[-1].size
    end = int(Path(file).name) + at
    victim.poke(file, at + 100, oracle.encode_record("T", 0, 99, end + 100, b"x"))
    return file, at, "record", "damage"


def segment_lost(number: int) -> Planter:
    def plant(victim: Victim) -> Found:
        file = victim.files("commitlog")[number]
        (victim.path / file).unlink()
        return file, 0, "missing", "damage"

    return plant


def segment_cut(number: int, size: int) -> Planter:
    def plant(victim: Victim) -> Found:
        file = victim.files("commitlog")[number]
        os.truncate(victim.path / file, size)
        return file, size, "size", "damage"

    return plant


def segment_zeroed(victim: Victim) -> Found:
    file = victim.files("commitlog")[1]
    victim.poke(file, 0, bytes(4096))
    return file, 0, "record", "damage"


def last_segment_lost(victim: Victim) -> Found:
    *_, before, file = victim.files("commitlog")
    last = next(i for i in reversed(range(COUNT)) if victim.in_log(i)[0] == before)
    (victim.path / file).unlink()
    return before, victim.in_log(last)[1] + victim.records[last].size, "record", "damage"


def stranger(name: str, kind: str, severity: str) -> Planter:
    def plant(victim: Victim) -> Found:
        (victim.path / name).write_bytes(b"")
        return name, 0, kind, severity

    return plant


LOG: dict[str, Planter] = {
    "size": in_record(2),
    "size beyond the segment": in_record(0, data=b"\x7f\xff\xff\xff"),
    "magic": in_record(4),
    "own offset": in_record(35),
    "sys flag that moves the fields": in_record(39, data=b"\x30"),
    "body length": in_record(87),
    "topic length": in_record(88 + 64),
    "body": in_record(90, "crc"),
    "body CRC": in_record(11, "crc"),
    "zeroed record": in_record(0, data=bytes(200)),
    "first record of the log": in_record(4, i=0),
    "last record torn": last_record_torn,
    "last record zeroed": last_record_zeroed,
    "blank record": blank_damaged,
    "garbage behind the end": garbage_behind_the_end,
    "record behind the end": record_behind_the_end,
    "segment lost": segment_lost(1),
    "segment cut": segment_cut(1, 1000),
    "last segment cut": segment_cut(-1, 4095),
    "segment emptied": segment_cut(1, 0),
    "segment zeroed": segment_zeroed,
    "last segment lost": last_segment_lost,
    "stranger in commitlog": stranger("commitlog/README", "name", "damage"),
    "segment off the grid": stranger(f"commitlog/{100:020d}", "name", "damage"),
}

# ---- queues ----------------------------------------------------------------------------------------------


def in_unit(position: int, data: bytes, kind: str = "unit", i: int = 20) -> Planter:
    def plant(victim: Victim) -> Found:
        file, at = victim.unit_of(i)
        victim.poke(file, at + position, data)
        return file, at, kind, "derived"

    return plant


def units_swapped(victim: Victim) -> Found:
    (file, at), (other, there) = victim.unit_of(6), victim.unit_of(12)
    assert file == other
    one, two = victim.peek(file, at, 20), victim.peek(other, there, 20)
    victim.poke(file, at, two)
    victim.poke(other, there, one)
    return file, at, "unit", "derived"


def unit_behind_the_end(phy_offset: int | None) -> Planter:
    def plant(victim: Victim) -> Found:
        file, at = victim.unit_of(COUNT - 1)
        place = victim.records[5].phy_offset if phy_offset is None else phy_offset
        assert at + 20 < 200
        victim.poke(file, at + 20, oracle.UNIT.pack(place, 100, 0))
        return file, at + 20, "unit-extra", "derived"

    return plant


def queue_file_lost(number: int, kind: str) -> Planter:
    def plant(victim: Victim) -> Found:
        file = victim.files("consumequeue/T/0")[number]
        (victim.path / file).unlink()
        return file, 0, kind, "derived"

    return plant


def queue_file_cut(victim: Victim) -> Found:
    file = victim.files("consumequeue/T/0")[0]
    os.truncate(victim.path / file, 150)
    return file, 150, "size", "derived"


def queue_lost(victim: Victim) -> Found:
    file = victim.files("consumequeue/U/1")[0]
    shutil.rmtree(victim.path / "consumequeue/U/1")
    return file, 0, "unit-missing", "derived"


def queue_of_nothing(victim: Victim) -> Found:
    (victim.path / "consumequeue/V/0").mkdir(parents=True)
    file = f"consumequeue/V/0/{0:020d}"
    (victim.path / file).write_bytes(oracle.UNIT.pack(victim.records[3].phy_offset, victim.records[3].size, 0).ljust(
        200, b"\0"))  # fmt: skip
    return file, 0, "unit-extra", "derived"


QUEUES: dict[str, Planter] = {
    "phy offset": in_unit(7, b"\x01"),
    "negative phy offset": in_unit(0, b"\xff"),
    "size": in_unit(11, b"\x01"),
    "tags code": in_unit(19, b"\x01"),
    "hole": in_unit(0, bytes(20), "unit-missing"),
    "pre-blank": in_unit(0, oracle.UNIT.pack(*oracle.PRE_BLANK), "unit-missing"),
    "last unit zeroed": in_unit(0, bytes(20), "unit-missing", i=COUNT - 1),
    "first unit zeroed": in_unit(0, bytes(20), "unit-missing", i=0),
    "swapped": units_swapped,
    "a second unit of a record": unit_behind_the_end(None),
    "a unit of no record": unit_behind_the_end(77),
    "a unit behind the log": unit_behind_the_end(10**6),
    "a unit with a negative offset": unit_behind_the_end(-1),
    "first file lost": queue_file_lost(0, "unit-missing"),
    "middle file lost": queue_file_lost(1, "missing"),
    "last file lost": queue_file_lost(-1, "unit-missing"),
    "file cut": queue_file_cut,
    "queue lost": queue_lost,
    "queue of nothing": queue_of_nothing,
    "stranger in a queue": stranger("consumequeue/T/0/README", "name", "derived"),
    "stranger in a topic": stranger("consumequeue/T/README", "name", "note"),
    "stranger in consumequeue": stranger("consumequeue/README", "name", "note"),
    "queue file off the grid": stranger(f"consumequeue/T/0/{100:020d}", "name", "derived"),
}

# ---- index -----------------------------------------------------------------------------------------------


def in_entry(position: int, data: bytes, kind: str, offset: int = 0, file: int = 1, number: int = 10) -> Planter:
    def plant(victim: Victim) -> Found:
        name, at = victim.entry(file, number)
        victim.poke(name, at + position, data)
        return name, at + offset, kind, "derived"

    return plant


def in_header(position: int, kind: str = "header", file: int = 1, to: bytes | None = None) -> Planter:
    def plant(victim: Victim) -> Found:
        name = victim.files("index")[file]
        width = 4 if position >= 32 else 8
        flip(victim, name, position + width - 1) if to is None else victim.poke(name, position, to)
        return name, position, kind, "derived"

    return plant


def slot_changed(to: int) -> Planter:
    def plant(victim: Victim) -> Found:
        name = victim.files("index")[1]
        slot = next(n for n in range(10) if victim.peek(name, 40 + 4 * n, 4) != struct.pack(">i", to))
        victim.poke(name, 40 + 4 * slot, struct.pack(">i", to))
        return name, 40 + 4 * slot, "slot", "derived"

    return plant


def index_file_lost(number: int) -> Planter:
    def plant(victim: Victim) -> Found:
        name = victim.files("index")[number]
        (victim.path / name).unlink()
        return name, 0, "missing", "derived"

    return plant


def index_file_cut(victim: Victim) -> Found:
    name = victim.files("index")[1]
    os.truncate(victim.path / name, 300)
    return name, 300, "size", "derived"


def index_names_swapped(victim: Victim) -> Found:
    _, one, two, *_ = victim.files("index")
    (victim.path / one).rename(victim.path / "held")
    (victim.path / two).rename(victim.path / one)
    (victim.path / "held").rename(victim.path / two)
    return two, 0, "order", "derived"


def last_entries_cut(victim: Victim) -> Found:
    """The header, slots and entries of an older moment: the last entry is gone without a trace in the file."""
    name = victim.files("index")[-1]
    file = oracle.IndexFile(victim.path / name, 10, 30)
    number = file.header.index_count - 1
    entry, before = file.entry(number), file.entry(number - 1)
    victim.poke(name, ENTRIES_AT + 20 * number, bytes(20))
    victim.poke(name, 40 + 4 * (entry.key_hash % 10), struct.pack(">i", entry.previous))
    victim.poke(name, 36, struct.pack(">i", number))
    if entry.previous == 0:
        victim.poke(name, 32, struct.pack(">i", file.header.hash_slot_count - 1))
    assert before.phy_offset == entry.phy_offset
    return name, ENTRIES_AT + 20 * number, "entry-missing", "derived"


INDEX: dict[str, Planter] = {
    "hash": in_entry(3, b"\xff", "entry"),
    "negative hash": in_entry(0, b"\x80", "entry"),
    "phy offset to no record": in_entry(11, b"\x01", "entry"),
    "phy offset out of order": in_entry(4, bytes(7) + b"\x05", "entry", 4),
    "phy offset far ahead": in_entry(8, b"\x7f", "entry", 4),
    "time": in_entry(15, b"\x7e", "entry", 12),
    "negative time": in_entry(12, b"\xff", "entry", 12),
    "time of the first entry": in_entry(15, b"\x7e", "entry", 12, number=1),
    "link to itself": in_entry(16, struct.pack(">i", 10), "link", 16),
    "link ahead": in_entry(16, struct.pack(">i", 29), "link", 16),
    "link to another slot": in_entry(16, struct.pack(">i", 8), "link", 16, number=11),
    "link out of the file": in_entry(16, struct.pack(">i", -7), "link", 16),
    "entry zeroed": in_entry(0, bytes(20), "entry"),
    "entry 0 used": in_entry(0, b"\1", "entry", number=0),
    "begin timestamp": in_header(0),
    "end timestamp": in_header(8),
    "begin phy offset": in_header(16),
    "end phy offset": in_header(24),
    "slot count": in_header(32),
    "entry count too small": in_header(36, to=struct.pack(">i", 20)),
    "entry count too large": in_header(36, to=struct.pack(">i", 31)),
    "entry count of the last file too large": in_header(36, file=-1, to=struct.pack(">i", 29)),
    "not full in the middle": in_header(36, "order", to=struct.pack(">i", 20)),
    "slot zeroed": slot_changed(0),
    "slot to another": slot_changed(1),
    "slot out of the file": slot_changed(2**31 - 1),
    "file lost": index_file_lost(1),
    "first file lost": index_file_lost(0),
    "last file lost": index_file_lost(-1),
    "file cut": index_file_cut,
    "names swapped": index_names_swapped,
    "last entry gone": last_entries_cut,
    "stranger in index": stranger("index/README", "name", "note"),
}

# ---- small files -----------------------------------------------------------------------------------------


def small(name: str, change: Callable[[Path], object], kind: str, severity: str, offset: int = 0) -> Planter:
    def plant(victim: Victim) -> Found:
        change(victim.path / name)
        return name, offset, kind, severity

    return plant


def poked(position: int, data: bytes) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[:position] + data + whole[position + len(data) :])

    return change


def manifest_without_queues(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"queues": 5}))


def other_segment_size(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mapped_file_size_commit_log": 8192}))


def damage_both_cells(path: Path) -> None:
    poked(20, b"\xff")(path)
    poked(532, b"\xff")(path)


FUTURE = struct.pack(">q", 2_000_000_000_000)
SMALL: dict[str, Planter] = {
    "checkpoint lost": small("checkpoint", lambda path: path.unlink(), "missing", "note"),
    "marks lost": small("rmq/marks", lambda path: path.unlink(), "missing", "note"),
    "checkpoint cut": small("checkpoint", lambda path: os.truncate(path, 30), "size", "derived", 30),
    "checkpoint shortened": small("checkpoint", lambda path: os.truncate(path, 2000), "size", "derived", 2000),
    "physic ahead": small("checkpoint", poked(0, FUTURE), "checkpoint", "derived"),
    "logics ahead": small("checkpoint", poked(8, FUTURE), "checkpoint", "derived", 8),
    "index ahead": small("checkpoint", poked(16, FUTURE), "checkpoint", "derived", 16),
    "negative time": small("checkpoint", poked(0, b"\xff"), "checkpoint", "derived"),
    "confirmed ahead": small("checkpoint", poked(32, FUTURE), "checkpoint", "derived", 32),
    "abort": small("abort", lambda path: path.write_text("1"), "open", "note"),
    "owner": small("rmq/owner", lambda path: path.write_text("{}"), "leftover", "note"),
    "lock": small("lock", lambda path: path.write_text("other"), "name", "note"),
    "marks cut": small("rmq/marks", lambda path: os.truncate(path, 100), "own", "derived", 100),
    "marks emptied": small("rmq/marks", lambda path: os.truncate(path, 0), "leftover", "note"),
    "both cells": small("rmq/marks", damage_both_cells, "own", "derived"),
    "geometry in meta": small("rmq/meta.json", other_segment_size, "own", "damage"),
    "meta": small("rmq/meta.json", lambda path: path.write_text("{"), "own", "damage"),
    "manifest": small("rmq/manifest.json", lambda path: path.write_text("["), "own", "derived"),
    "manifest of nonsense": small("rmq/manifest.json", manifest_without_queues, "own", "derived"),
    "temporary file": small("rmq/meta.json.tmp", lambda path: path.write_text(""), "leftover", "note"),
    "stranger in rmq": small("rmq/other", lambda path: path.write_text(""), "name", "note"),
    "stranger": small("README", lambda path: path.write_text(""), "name", "note"),
    "empty segment behind": small(f"commitlog/{4096 * 99:020d}", lambda path: path.touch(), "leftover", "note"),
    "empty index file": small("index/99999999999999999", lambda path: path.touch(), "leftover", "note"),
    "empty queue file": small(f"consumequeue/T/0/{2000:020d}", lambda path: path.touch(), "leftover", "note"),
    "mode of a file": small("checkpoint", lambda path: path.chmod(0o666), "mode", "note"),
    "mode of a directory": small("consumequeue/T/0", lambda path: path.chmod(0o777), "mode", "note"),
    "mode of a segment": small(f"commitlog/{0:020d}", lambda path: path.chmod(0o646), "mode", "note"),
}

PARTS = {"log": LOG, "queue": QUEUES, "index": INDEX, "small": SMALL}
TABLE = {f"{part}: {name}": planter for part, table in PARTS.items() for name, planter in table.items()}


# One of each part and of each file that a person would try first; `make test` does all.
QUICK = {"log: body", "queue: hole", "index: hash", "small: checkpoint cut"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
                                  for name in TABLE])  # fmt: skip
def test_planted_damage_is_found_at_its_file_and_byte(base: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(base, tmp_path / "s")
    victim = Victim(tmp_path / "s")
    file, offset, kind, severity = TABLE[name](victim)
    before = digests(victim.path, "")
    result = rmq.verify(victim.path, jobs=2)
    found = [(os.path.relpath(item.path, victim.path), item.offset, item.kind, item.severity) for item in result]
    assert (file, offset, kind, severity) in found, "\n".join(map(str, result))
    assert result.is_sound == (severity == "note")
    if severity != "damage":
        assert not result.damage_count, "\n".join(map(str, result))
    assert digests(victim.path, "") == before
    assert {item.kind for item in result} <= KINDS.keys()
    assert {item.severity for item in result} <= set(SEVERITIES)


@pytest.mark.slow
def test_every_kind_is_planted_or_told_by_another_test(base: Path, tmp_path: Path) -> None:
    kinds = set()
    for name, planter in TABLE.items():
        shutil.copytree(base, tmp_path / "s")
        kinds.add(planter(Victim(tmp_path / "s"))[2])
        shutil.rmtree(tmp_path / "s")
        assert name
    assert KINDS.keys() - kinds == {"sector", "unread"}
