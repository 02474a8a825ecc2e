# ruff: noqa: F401, F811
"""Records are read some bytes at a time: what is found is what a look at whole segments finds."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
from test_verify_damage import COUNT, TABLE, Victim, base
from test_verify_pieces import QUICK, damage_one, facts

import rmq
from rmq.verification import ground, records
from rmq.verification.records import SegmentCheck, Window

SIZES = [1, 8, 100, 333, 1000, 4095]  # bytes; a record has 150 to 700, a segment 4096


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each window held when it was read."""
    sizes: list[int] = []
    move = Window.move

    def noted(window: Window, start: int, end: int) -> None:
        move(window, start, end)
        sizes.append(window.end - window.start)

    monkeypatch.setattr(Window, "move", noted)
    return sizes


def unread(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def assert_same(path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int = 1) -> rmq.VerifyResult:
    """By windows of every size as by maps, with everything that was read counted alike."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", unread)
        mapped = rmq.verify(path, jobs=jobs)
    for size in SIZES:
        with monkeypatch.context() as patch:
            patch.setattr(ground, "READ_BYTES", size)
            result = rmq.verify(path, jobs=jobs)
            assert facts(result) == facts(mapped)
            assert result.size_read == mapped.size_read
    return mapped


def test_a_sound_store_is_read_once_whatever_the_window(
        base: Path, monkeypatch: pytest.MonkeyPatch, moves: list[int]) -> None:  # fmt: skip
    assert assert_same(base, monkeypatch).record_count == COUNT
    assert set(SIZES) <= set(moves)
    assert max(moves) < 4096
    moves.clear()
    monkeypatch.setattr(ground, "READ_BYTES", 1500)
    assert rmq.verify(base, jobs=1).is_sound
    segments = len(list((base / "commitlog").iterdir()))
    assert segments < len(moves) <= 6 * segments


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
                                  for name in TABLE])  # fmt: skip
def test_every_kind_of_damage_is_told_alike(
        base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shutil.copytree(base, tmp_path / "s")
    TABLE[name](Victim(tmp_path / "s"))
    assert len(assert_same(tmp_path / "s", monkeypatch))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_random_damage_is_told_alike(
        base: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    rng = random.Random(seed)
    path = shutil.copytree(base, tmp_path / "s")
    files = sorted((path / "commitlog").iterdir())
    for _ in range(12):
        file, before = damage_one(files, rng)
        assert_same(path, monkeypatch, jobs=rng.choice((1, 3)))
        if rng.random() < 0.7:
            file.write_bytes(before)


def test_damaged_records_in_a_row_are_not_read_anew_for_each(
        base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: list[int]) -> None:  # fmt: skip
    path = shutil.copytree(base, tmp_path / "s")
    for record in oracle.read_records(path):
        start = record.phy_offset - record.phy_offset % 4096
        Victim(path).poke(f"commitlog/{start:020d}", record.phy_offset - start + 90, b"\x00")
    result = rmq.verify(path, jobs=1)
    assert len([finding for finding in result if finding.kind == "crc"]) > COUNT // 2
    assert len(moves) == len(list((path / "commitlog").iterdir()))


@pytest.mark.parametrize("how", ["cut off", "removed"])
@pytest.mark.parametrize("number", [0, 1, 2], ids=["before", "amid", "after"])
def test_a_segment_that_goes_during_a_verification(
        base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, number: int) -> None:  # fmt: skip
    """Before it is looked into, while it is, and after that; the next verification tells in any case."""
    path = shutil.copytree(base, tmp_path / "s")
    middle = sorted((path / "commitlog").iterdir())[1]
    begun: list[int] = []
    step = SegmentCheck._step

    def goes(check: SegmentCheck, *arguments: Any) -> int:
        begun.append(check._begin)
        if len(begun) == number + 1:
            os.truncate(middle, 1000) if how == "cut off" else middle.unlink()
        return step(check, *arguments)

    def damage() -> list[str]:
        return [finding.kind for finding in rmq.verify(path, jobs=1) if finding.severity == "damage"]

    with monkeypatch.context() as patch:
        patch.setattr(SegmentCheck, "_step", goes)
        kinds = damage()
    expected = {("cut off", 0): (["size"], ["record"]), ("cut off", 1): (["record"],), ("removed", 0): (["missing"],)}
    assert kinds in expected.get((how, number), ([],))
    assert damage() == ["size" if how == "cut off" else "missing"]


@pytest.mark.parametrize("error", [FileNotFoundError("mine"), FileNotFoundError(2, "mine", "/elsewhere"),
                                   rmq.CorruptFileError("/elsewhere", 0, "mine")], ids=repr)  # fmt: skip
def test_an_error_of_the_caller_s_own_is_raised_at_once(base: Path, error: Exception) -> None:
    told: list[int] = []

    def progress(done: int, total: int) -> None:
        told.append(done)
        raise error

    with pytest.raises(type(error), match="mine"):
        rmq.verify(base, progress=progress)
    assert len(told) == 1


def test_without_a_descriptor_left_segments_are_looked_at_in_their_maps(
        base: Path, monkeypatch: pytest.MonkeyPatch, moves: list[int]) -> None:  # fmt: skip
    def opened(path: Path) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(records, "opened", opened)
    result = rmq.verify(base)
    assert (result, result.record_count, moves) == ([], COUNT, [])


def test_a_part_that_the_disk_does_not_give_is_looked_at_in_the_map(
        base: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    rng, read, given = random.Random(1), os.preadv, set()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        how = rng.randrange(3)
        given.add(how)
        if how == 0:
            return unread()
        less = buffers[0][: rng.randrange(9)]
        return read(descriptor, buffers if how == 1 else [less], offset)

    monkeypatch.setattr(ground, "READ_BYTES", 700)
    monkeypatch.setattr(os, "preadv", preadv)
    assert rmq.verify(base, jobs=1).is_sound
    assert given == {0, 1, 2}
