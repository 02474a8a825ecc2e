# ruff: noqa: F401, F811
"""Several threads read pieces of segments: they find and count what a pass over whole segments does."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import oracle
import pytest
from conftest import SIZES
from test_verify_damage import COUNT, TABLE, Victim, base

import rmq
from rmq.verification import verify as module
from rmq.verification.records import Range, SegmentCheck, SegmentReport, joined
from rmq.verification.work import Threads

QUICK = [name for number, name in enumerate(TABLE) if number % 12 == 0]


@pytest.fixture(params=[200, pytest.param(1500, marks=pytest.mark.slow)])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """Ranges of the log that were begun to be read, with pieces of at least so many bytes."""
    ranges: list[Range] = []
    run = SegmentCheck.run

    def noted(check: SegmentCheck) -> SegmentReport:
        ranges.append((check._begin, check._end))
        return run(check)

    monkeypatch.setattr(SegmentCheck, "run", noted)
    monkeypatch.setattr(module, "PIECE_BYTES", request.param)
    return ranges


def facts(result: rmq.VerifyResult) -> dict[str, Any]:
    """All but the bytes that were read: some are read twice."""
    return {**vars(result), "size_read": 0, "findings": list(result)}


def assert_same(path: Path, **options: Any) -> rmq.VerifyResult:
    result = rmq.verify(path, jobs=1, **options)
    assert facts(rmq.verify(path, jobs=8, **options)) == facts(result)  # pieces of all segments
    return result


def damage_one(files: list[Path], rng: random.Random) -> tuple[Path, bytes]:
    """Zeros or random bytes somewhere in one of the files; which, and what it held before."""
    file = rng.choice(files)
    before = file.read_bytes()
    at, size = rng.randrange(len(before)), rng.choice((1, 4, 60, 700))
    change = rng.choice((bytes, rng.randbytes))(size)
    file.write_bytes((before[:at] + change + before[at + size :])[: len(before)])
    return file, before


def whole(path: Path) -> set[Range]:
    starts = [int(file.name) for file in (path / "commitlog").iterdir()]
    return {(start, start + 4096) for start in starts}


def test_the_pieces_of_a_sound_store_are_read_once_and_nothing_twice(base: Path, read: list[Range]) -> None:
    assert rmq.verify(base, jobs=2).record_count == COUNT
    offsets = {record.phy_offset for record in oracle.read_records(base)}
    assert {begin for begin, _ in read} <= offsets
    assert len(read) > len(list((base / "commitlog").iterdir()))
    assert sum(end - begin for begin, end in read) == 4096 * len(list((base / "commitlog").iterdir()))
    assert assert_same(base) == []


def test_one_thread_reads_whole_segments(base: Path, read: list[Range]) -> None:
    rmq.verify(base, jobs=1)
    assert set(read) == whole(base)
    assert len(read) == len(whole(base))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
                                  for name in TABLE])  # fmt: skip
def test_every_kind_of_damage_is_told_alike(base: Path, tmp_path: Path, name: str, read: list[Range]) -> None:
    shutil.copytree(base, tmp_path / "s")
    TABLE[name](Victim(tmp_path / "s"))
    assert len(assert_same(tmp_path / "s"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_random_damage_is_told_alike(base: Path, tmp_path: Path, seed: int, read: list[Range]) -> None:
    rng = random.Random(seed)
    path = shutil.copytree(base, tmp_path / "s")
    files = [file for part in ("commitlog", "consumequeue", "index") for file in (path / part).rglob("*")
             if file.is_file()]  # fmt: skip
    for _ in range(12):
        file, before = damage_one(files, rng)
        assert_same(path)
        if rng.random() < 0.7:
            file.write_bytes(before)


def test_damage_in_a_piece_has_its_segment_read_again(base: Path, tmp_path: Path, read: list[Range]) -> None:
    path = shutil.copytree(base, tmp_path / "s")
    start = sorted(whole(path))[-2][0]
    record = next(record for record in oracle.read_records(path) if record.phy_offset > start + 1000)
    Victim(path).poke(f"commitlog/{start:020d}", record.phy_offset - start + 90, b"\x00")
    result = rmq.verify(path, jobs=2)
    assert [(item.kind, item.severity) for item in result] == [("crc", "damage")]
    assert [found for found in read if found in whole(path)][-1:] == [(start, start + 4096)]
    assert result.record_count == result.unit_count == COUNT


def test_an_entry_behind_those_of_later_records_is_told_alike(tmp_path: Path, read: list[Range]) -> None:
    """It points into another piece than the entries around it, of the same segment."""
    config = rmq.StoreConfig(**SIZES | {"mapped_file_size_commit_log": 32768, "max_index_num": 100})
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for number in range(80):
            store.put(rmq.Message("t", b"body" * 20, keys=f"k{number}"))
        first = store.lookup(0)
    (index,) = (tmp_path / "s/index").iterdir()
    with rmq.IndexFile(index, "r+", max_hash_slot_num=10, max_index_num=100) as file:
        assert file.put_key("t#k0", first.phy_offset, first.store_timestamp)
    reasons = [item.reason for item in assert_same(tmp_path / "s", config=config)]
    assert any("out of the order" in reason for reason in reasons)
    assert any("no record begins" in reason for reason in reasons)


def test_a_record_within_a_body_is_no_end_of_a_piece(tmp_path: Path, read: list[Range]) -> None:
    """Its phy offset and CRC are right: whoever begins to read there takes it for one of the log."""
    path, config, inner = tmp_path / "s", rmq.StoreConfig(**SIZES), set()
    fixed = len(oracle.encode_record("t", 0, 0, 0, b"")) - 4  # what lies before a body
    with rmq.open(path, "x", config=config) as store:
        for number in range(20):
            at = store.max_phy_offset + fixed + 600
            false = oracle.encode_record("t", 0, number, at, b"inner")
            store.put(rmq.Message("t", bytes(600) + false))
            inner.add(at)
    assert oracle.decode_record((path / "commitlog" / f"{0:020d}").read_bytes(), min(inner)) is not None
    result = rmq.verify(path, jobs=3, config=config)
    assert inner & {begin for begin, _ in read}, "no piece began within a body"
    assert set(read) >= whole(path)
    assert facts(rmq.verify(path, jobs=1, config=config)) == facts(result)
    assert result == []


def log_of(path: Path, queue_offsets: list[int]) -> Path:
    """A store of nothing but a log: 40 messages to a segment."""
    size, data = 40 * len(oracle.encode_record("t", 0, 0, 0, b"x")), b""
    for queue_offset in queue_offsets:
        data += oracle.encode_record("t", 0, queue_offset, len(data), b"x")
    (path / "commitlog").mkdir(parents=True)
    for start in range(0, len(data), size):
        (path / "commitlog" / f"{start:020d}").write_bytes(data[start : start + size].ljust(size, b"\0"))
    return path


@pytest.mark.parametrize("count", [13, 100])
@pytest.mark.parametrize("seed", range(6))
def test_queue_offsets_out_of_order_are_told_alike(tmp_path: Path, seed: int, count: int, read: list[Range]) -> None:
    """Edges: below 0, the largest, a second life from 0; within a segment and across segments."""
    rng, offsets = random.Random(seed), list(range(count))
    for _ in range(3):
        at = rng.randrange(count)
        if rng.random() < 0.5:
            offsets[at] = rng.choice((-1, -(2**63), 2**63 - 1, 2**62, 3))
        else:
            offsets[at:] = range(len(offsets) - at)
    path = log_of(tmp_path / "s", offsets)
    size = next((path / "commitlog").iterdir()).stat().st_size
    found = assert_same(path, config=rmq.StoreConfig(**SIZES | {"mapped_file_size_commit_log": size}))
    none = sum(not 0 <= offset < 2**62 // 20 for offset in offsets)
    assert sum("which no unit can have" in item.reason for item in found) == none


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_queue_offset_below_0_hides_no_unit_that_is_missing_beside_it(tmp_path: Path, jobs: int) -> None:
    path = log_of(tmp_path / "s", [0, 1, 2, -1, 4, 5])
    size = next((path / "commitlog").iterdir()).stat().st_size
    config = rmq.StoreConfig(**SIZES | {"mapped_file_size_commit_log": size})
    reasons = [item.reason for item in rmq.verify(path, config=config, jobs=jobs) if item.severity != "note"]
    assert [reason.split(" is not there")[0] for reason in reasons] == [
        "the record has queue offset -1, which no unit can have", "unit 0", "unit 4"]  # fmt: skip


def test_beside_a_writer_segments_are_read_whole(tmp_path: Path, read: list[Range]) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        for number in range(60):
            store.put(rmq.Message("t", b"%d" % number * 50, keys=f"k{number}"))
        store.flush()
        assert rmq.verify(tmp_path / "s", jobs=2).is_sound
        assert {begin % 4096 for begin, _ in read} == {0}


def test_pieces_that_do_not_meet_are_no_segment() -> None:
    def report(begin: int, end: int, **fields: Any) -> SegmentReport:
        return SegmentReport(begin, end, record_count=1, spans={("t", 0): [(begin, end, 0, True)]}, **fields)

    pieces = [report(20, 30, last_timestamp=5), report(0, 10), report(10, 20, last_timestamp=-7)]
    assert joined(pieces) == SegmentReport(0, 30, record_count=3, last_timestamp=5,
                                           spans={("t", 0): [(0, 10, 0, True), (10, 20, 0, True), (20, 30, 0, True)]})
    assert joined([report(0, 10), report(11, 20)]) is None
    assert joined([report(0, 12), report(10, 20)]) is None
    assert joined([report(0, 10), report(10, 20, is_sound=False)]) is None
    assert joined([report(0, 10)]) == report(0, 10)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_go_no_further_ahead_than_two_items_each_of_who_takes_the_answers(threads: int) -> None:
    """Reports and maps of segments wait for them."""
    begun: list[int] = []

    def work(_: Any, item: int) -> int:
        begun.append(item)
        return item

    crew = Threads(threads, lambda: None)
    answers = crew.each(Mock(), work, range(100))
    taken = [next(answers) for _ in range(5)]
    crew.close()  # waits for what was begun
    assert set(taken) <= set(begun)
    assert len(begun) <= 5 + 2 * threads
