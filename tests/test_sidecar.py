"""Sidecars of full index files: answers are those of the walk, whatever lies in the sidecar; when they are made."""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from commandline import assert_error, good
from commandline import call as called

import rmq
from rmq import sidecar
from rmq._core import _layout as L
from rmq._core._indexfile import index_file_size
from rmq._core._sidecar import SidecarView, build_sidecar, sidecar_size
from rmq.keys import hash_keys
from rmq.mappedfile import MappedFile
from rmq.paths import sidecar_path
from rmq.sidecar import make_sidecar

T0 = 1_700_000_000_000
MAX = rmq.MAX_TIMESTAMP
NAME = "20231114221320000"
Geometry = dict[str, int]


def geometry(slots: int, entries: int) -> Geometry:
    return {"max_hash_slot_num": slots, "max_index_num": entries}


def full_file(root: Path, slots: int, entries: int, rng: random.Random, keys: int) -> Path:
    """A full index file of a store: some keys often, their times mostly but not always later than those before."""
    path = root / "index" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    count = entries - 1
    often = [rng.randrange(rng.choice([3, keys])) for _ in range(count)]
    times = [T0 + number * 700 + rng.randrange(-3000, 3000) for number in range(count)]
    with rmq.IndexFile(path, "x", **geometry(slots, entries)) as file:
        assert file.put_keys([f"T#{number}" for number in often], np.arange(count) * 100, times) == count
    return path


def made_for(root: Path, slots: int, entries: int, rng: random.Random, keys: int) -> Path:
    path = full_file(root, slots, entries, rng, keys)
    assert make_sidecar(path, slots, entries) == ""
    return path


def windows(rng: random.Random, entries: int) -> list[tuple[int, int, int]]:
    begin = T0 + rng.randrange(-5000, entries * 700)
    return [(32, 0, MAX), (1, 0, MAX), (0, 0, MAX), (2**40, -(2**63), MAX), (64, begin, MAX), (3, begin, begin + 9000),
            (64, 0, begin), (64, 0, 0), (64, MAX, MAX), (64, begin, begin - 1), (64, 0, -(2**63))]  # fmt: skip


def assert_same(path: Path, sizes: Geometry, asked: list[str], arguments: tuple[int, int, int]) -> int:
    """With and without its sidecar, at once and one by one; how many answers."""
    with rmq.IndexFile(path, **sizes) as file:
        hashes = hash_keys(asked)
        found = np.arange(len(asked), dtype=np.int32) % 4
        assert file.view.sidecar is not None
        quick = [file.view.select(hashes, *arguments), file.view.select(hashes, *arguments, found),
                 file.view.collect(hashes)]  # fmt: skip
        single = [file.select_phy_offset(key, *arguments) for key in asked[:40]]
        assert file.view.sidecar is not None
        assert not file.view.sidecar.is_damaged
        file.view.sidecar = None
        walked = [file.view.select(hashes, *arguments), file.view.select(hashes, *arguments, found),
                  file.view.collect(hashes)]  # fmt: skip
        for mine, other in zip(quick, walked, strict=True):
            assert [part.tolist() for part in mine] == [part.tolist() for part in other]
        assert single == [file.select_phy_offset(key, *arguments) for key in asked[:40]]
        return len(quick[0][1])


@pytest.mark.parametrize(("slots", "entries"), [
    (1, 2), (1, 29), (1, 30), (1, 31), (1, 500), (2, 64), (3, 57), (7, 200), (64, 16), (100, 3), (1000, 4001),
    (4097, 700), (2**20, 40),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(4096, 16385), (5000, 20001)])])  # fmt: skip
def test_answers_are_those_of_the_walk(tmp_path: Path, slots: int, entries: int) -> None:
    rng = random.Random(slots * entries)
    found = 0
    for keys in (2, entries):
        path = made_for(tmp_path, slots, entries, rng, keys)
        asked = ["", "T#0", *(f"T#{rng.randrange(2 * keys)}" for _ in range(500))]
        numbers = [1, 32, 33, 95, 127, 128, 129, 255, 256, 257, len(asked)]
        for arguments, number in zip(windows(rng, entries), rng.sample(numbers, len(numbers)), strict=True):
            found += assert_same(path, geometry(slots, entries), asked[:number], arguments)
    assert found > 10


def test_answers_are_the_oracle_s(tmp_path: Path) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        slots, entries = rng.randrange(1, 12), rng.randrange(2, 90)
        path = made_for(tmp_path, slots, entries, rng, 12)
        keys, second = [f"T#{number}" for number in range(14)], oracle.IndexFile(path.read_bytes(), slots, entries)
        with rmq.IndexFile(path, **geometry(slots, entries)) as file:
            assert file.view.sidecar is not None
            for arguments in windows(rng, entries):
                if 0 < arguments[0] < 2**31:
                    got = file.select_phy_offset_many(keys, *arguments).to_pylist()
                    assert got == [second.select(key, *arguments) for key in keys], (seed, arguments)


def test_any_number_of_keys_is_answered_in_their_order(tmp_path: Path) -> None:
    path = made_for(tmp_path, 50, 300, random.Random(1), 60)
    with rmq.IndexFile(path, **geometry(50, 300)) as file:
        alone = [file.select_phy_offset(f"T#{number}") for number in range(70)]
        for count in (0, 1, 2, 31, 32, 33, 63, 64, 65, 70):
            assert file.select_phy_offset_many([f"T#{n}" for n in range(count)]).to_pylist() == alone[:count]
        assert file.view.sidecar is not None
    assert sum(map(len, alone)) > 50


def test_no_more_are_mapped_than_the_process_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_for(tmp_path, 10, 20, random.Random(2), 5)
    gc.collect()
    there = len(sidecar._mapped)
    monkeypatch.setattr(sidecar, "room_for_maps", lambda size: there + 1)
    with rmq.IndexFile(path, **geometry(10, 20)) as first:
        with rmq.IndexFile(path, **geometry(10, 20)) as second:
            assert [file.view.sidecar is None for file in (first, second)] == [False, True]
        assert len(sidecar._mapped) == there + 1
    assert opened(path, geometry(10, 20))


# ---- files that get none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "number"), [
    (36, 19),  # count
    (0, -1), (0, 2**31 - 1),  # half of the begin timestamp
    (40, 7), (60, 5),  # slots
    (80 + 20, -5), (80 + 20 + 12, -1), (80 + 20 + 16, 1), (80 + 20 * 9 + 16, 3)])  # fmt: skip
def test_a_file_that_is_not_full_or_whole_gets_none(tmp_path: Path, at: int, number: int) -> None:
    path = full_file(tmp_path, 10, 20, random.Random(2), 5)
    data = bytearray(path.read_bytes())
    written = (number & 0xFFFFFFFF).to_bytes(4, "big")
    assert data[at : at + 4] != written
    data[at : at + 4] = written
    path.write_bytes(data)
    assert make_sidecar(path, 10, 20)
    assert list((tmp_path / "rmq" / "sidecar").iterdir()) == []


def test_only_a_store_s_file_gets_one_and_not_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = full_file(tmp_path, 10, 20, random.Random(2), 5)
    assert sidecar_path(tmp_path / NAME) is None
    assert make_sidecar(tmp_path / NAME, 10, 20)
    with pytest.raises(rmq.CorruptFileError):
        make_sidecar(path, 10, 21)
    monkeypatch.setattr(sidecar, "DISK_LEFT", 2**60)
    assert "free" in make_sidecar(path, 10, 20)


def test_one_that_is_interrupted_or_made_elsewhere_leaves_nothing(tmp_path: Path) -> None:
    path = full_file(tmp_path, 10, 20, random.Random(2), 5)
    target = tmp_path / "rmq" / "sidecar" / NAME
    assert make_sidecar(path, 10, 20, lambda: False) == "it was interrupted"
    answers = iter([True, False])
    assert make_sidecar(path, 10, 20, lambda: next(answers)) == "it was interrupted"
    assert list(target.parent.iterdir()) == []
    with sidecar._temporary(target) as mine:
        assert mine >= 0
        assert make_sidecar(path, 10, 20) == "another process makes it"
        assert target.with_suffix(".tmp").exists()
    assert list(target.parent.iterdir()) == []
    target.with_suffix(".tmp").write_bytes(b"of a process that was killed")
    (target.parent / "20231114221320001").write_bytes(b"its index file is gone")
    (target.parent / "20231114221320002.tmp").write_bytes(b"killed, and its index file is gone")
    others = [target.parent / "thesis.tex", target.parent / "notes.tmp"]
    for other in others:
        other.write_bytes(b"somebody else's")
    (target.parent / "20231114221320003").mkdir()
    assert make_sidecar(path, 10, 20) == ""
    assert sorted(target.parent.iterdir()) == sorted([target, *others, target.parent / "20231114221320003"])


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    path = full_file(tmp_path / "s", 10, 20, random.Random(2), 5)
    (tmp_path / "s/rmq").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/20231114221320009").touch()
    (tmp_path / "s/rmq/sidecar").symlink_to(tmp_path / "other")
    assert make_sidecar(path, 10, 20) == ""
    assert {file.name for file in (tmp_path / "other").iterdir()} == {NAME, "20231114221320009"}


# ---- tampering ---------------------------------------------------------------------------------------------


def opened(path: Path, sizes: Geometry) -> bool:
    with rmq.IndexFile(path, **sizes) as file:
        return file.view.sidecar is not None


@pytest.mark.parametrize("change", ["touched", "header", "other geometry", "cut", "longer", "empty", "a directory"])
def test_one_that_does_not_fit_its_file_is_not_used(tmp_path: Path, change: str) -> None:
    sizes = geometry(50, 300)
    path = made_for(tmp_path, 50, 300, random.Random(3), 60)
    target = sidecar_path(path)
    assert target is not None
    assert opened(path, sizes)
    whole = target.read_bytes()
    if change == "touched":
        os.utime(path, ns=(T0, T0))
    elif change == "header":
        before = path.stat().st_mtime_ns
        path.write_bytes(bytes(8) + path.read_bytes()[8:])
        os.utime(path, ns=(before, before))
    elif change == "other geometry":
        same = index_file_size(50, 300) == index_file_size(55, 299)
        assert same
        sizes = geometry(55, 299)
        with rmq.IndexFile(path, **sizes) as file:
            assert file.view.sidecar is None
        return
    elif change == "a directory":
        target.unlink()
        target.mkdir()
    else:
        target.write_bytes({"cut": whole[:-1], "longer": whole + b"\0", "empty": b""}[change])
    assert not opened(path, sizes)


def test_damage_is_noticed_and_the_file_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any bytes, at any place: never another answer. Without new CRCs, and with them."""
    slots, entries, keys = 700, 2800, [f"T#{number}" for number in range(3000)]
    path = made_for(tmp_path, slots, entries, random.Random(4), 2000)
    target = sidecar_path(path)
    assert target is not None
    whole = target.read_bytes()
    with rmq.IndexFile(path, **geometry(slots, entries)) as file:
        expected = file.select_phy_offset_many(keys)
        assert file.view.sidecar is not None
    noticed = unopened = 0
    for seed in range(150):
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 20])):
            at = rng.choice([rng.randrange(200), rng.randrange(len(data)), 192 + 64 * rng.randrange(175)]) & ~3
            data[at : at + 4] = rng.choice([rng.randbytes(4), bytes(4), b"\xff\xff\xff\x7f", b"\xff" * 4])
        target.write_bytes(data)
        with rmq.IndexFile(path, **geometry(slots, entries)) as file:
            unopened += file.view.sidecar is None
            assert file.select_phy_offset_many(keys).equals(expected), seed
            if file.view.sidecar is not None and file.view.sidecar.is_damaged:
                caplog.clear()
                file.look()
                assert file.view.sidecar is None
                assert "is damaged" in caplog.text
                noticed += 1
    assert noticed > 60
    assert unopened > 20


@pytest.mark.parametrize("cut", [8192, -3119, -16, -9])
def test_a_page_that_goes_while_it_is_asked_is_noticed(tmp_path: Path, cut: int) -> None:
    path = made_for(tmp_path, 5000, 20001, random.Random(5), 9000)
    target, keys = sidecar_path(path), [f"T#{number}" for number in range(9000)]
    assert target is not None
    with rmq.IndexFile(path, **geometry(5000, 20001)) as file:
        expected = file.select_phy_offset_many(keys)  # every block was found right
        assert file.view.sidecar is not None
        os.truncate(target, cut if cut > 0 else target.stat().st_size + cut)
        assert file.select_phy_offset_many(keys).equals(expected)
        assert file.view.sidecar.is_damaged
        assert file.select_phy_offset("T#0") == expected[0].as_py()


def test_a_block_changed_after_it_was_checked_stays_in_bounds(tmp_path: Path) -> None:
    path = made_for(tmp_path, 64, 400, random.Random(6), 90)
    target, keys = sidecar_path(path), [f"T#{number}" for number in range(100)]
    assert target is not None
    buckets = (L.SIDECAR_HEADER_SIZE + L.SIDECAR_BLOCK_SIZE + 63) // 64 * 64
    for seed in range(60):
        rng, whole = random.Random(seed), target.read_bytes()
        with rmq.IndexFile(path, **geometry(64, 400)) as file:
            file.select_phy_offset_many(keys)
            with target.open("r+b") as other:
                for _ in range(40):
                    other.seek(buckets + rng.randrange(0, len(whole) - buckets, 4))
                    other.write(rng.choice([rng.randbytes(4), b"\xff\xff\xff\x7f", b"\xff" * 4, bytes(4)]))
            for arguments in windows(rng, 400):
                file.select_phy_offset_many(keys, *arguments)
        target.write_bytes(whole)


@pytest.mark.parametrize("key_hash", [-5, -(2**31), 7])
def test_an_index_file_that_changes_while_its_sidecar_is_made_makes_none(tmp_path: Path, key_hash: int) -> None:
    """Another process writes other hashes between the pass that counts and the one that fills."""
    index = bytearray(full_file(tmp_path, 1000, 4001, random.Random(7), 5).read_bytes())
    out = mmap.mmap(-1, sidecar_size(1000, 4001))
    calls = itertools.count()

    def goes_on() -> bool:
        if next(calls) == 0:
            for entry in range(1, 4001):
                struct.pack_into(">i", index, 40 + 4 * 1000 + 20 * entry, key_hash)
        return True

    made = build_sidecar(index, out, hash_slot_num=1000, index_num=4001, index_mtime_ns=1, goes_on=goes_on)
    assert made == "it was changed meanwhile"


def test_a_view_refuses_what_is_no_sidecar(tmp_path: Path) -> None:
    path = full_file(tmp_path, 10, 20, random.Random(7), 5)
    index = path.read_bytes()
    out = mmap.mmap(-1, sidecar_size(10, 20))
    options: dict[str, Any] = {"hash_slot_num": 10, "index_num": 20, "index_mtime_ns": 1}
    for wrong in ({"hash_slot_num": 0}, {"index_num": 1}, {"hash_slot_num": 11}, {"index_num": 19}):
        with pytest.raises(ValueError, match=r"size|at least"):
            build_sidecar(index, out, goes_on=lambda: True, **{**options, **wrong})
    with pytest.raises(ValueError, match="alignment"):
        build_sidecar(index, memoryview(mmap.mmap(-1, len(out) + 4))[4:], goes_on=lambda: True, **options)
    assert build_sidecar(index, out, goes_on=lambda: True, **options) == ""
    (tmp_path / "side").write_bytes(out)
    file = MappedFile(tmp_path / "side")
    header = index[:40]
    assert not SidecarView(file.map, file.map.guard, index_header=header, **options).is_damaged
    for wrong in ({"index_header": header[1:]}, {"index_header": b""}, {"index_mtime_ns": 2}, {"hash_slot_num": 11}):
        with pytest.raises(ValueError, match=r"another index file|expected"):
            SidecarView(file.map, file.map.guard, **{"index_header": header, **options, **wrong})


# ---- stores ------------------------------------------------------------------------------------------------


FEW = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=4,
                      max_index_num=9)  # fmt: skip


@pytest.fixture
def worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "WORTHWHILE", 0)


def put_some(store: rmq.Store, first: int, count: int) -> None:
    for number in range(first, first + count):
        store.put(rmq.Message("T", b"x" * 300, keys=[f"k{number % 7}"]))
    store.flush()


def settled(store: rmq.Store) -> list[str]:
    """Names of the sidecars, once those that are being made are there."""
    thread = store._flusher._sidecars._thread
    if thread is not None:
        thread.join()
    directory = store.path / "rmq" / "sidecar"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.usefixtures("worthwhile")
def test_a_store_makes_them_as_files_fill_up_and_asks_them(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 7)
        assert settled(store) == []
        put_some(store, 7, 30)
        names = [file.path.name for file in store._index.files if file.is_full]
        assert settled(store) == names
        assert len(names) >= 4
        expected = [[message.phy_offset for message in store.query("T", f"k{number}")] for number in range(9)]
        assert sum(file.view.sidecar is not None for file in store._index.files) == len(names)
        walked = list(map(len, expected))
        with rmq.open(tmp_path / "s") as reader:
            assert [[m.phy_offset for m in reader.query("T", f"k{number}")] for number in range(9)] == expected
            assert sum(file.view.sidecar is not None for file in reader._index.files) == len(names)
    assert walked == [6, 6, 5, 5, 5, 5, 5, 0, 0]
    with rmq.open(tmp_path / "s", "r+") as store:
        assert [file.view.sidecar is not None for file in store._index.files if file.is_full] == [True] * len(names)
    assert rmq.verify(tmp_path / "s").is_sound


@pytest.mark.usefixtures("worthwhile")
def test_a_reader_takes_up_what_comes_later(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 40)
        names = settled(store)
    directory, aside = tmp_path / "s" / "rmq" / "sidecar", tmp_path / "aside"
    directory.rename(aside)
    with rmq.open(tmp_path / "s") as reader:
        reader.query("T", "k1")
        assert all(file.view.sidecar is None for file in reader._index.files)
        aside.rename(directory)
        for _ in range(4):
            reader.query("T", "k1")
        assert sum(file.view.sidecar is not None for file in reader._index.files) == len(names)


def test_small_index_files_get_none(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 40)
        assert settled(store) == []
    assert not (tmp_path / "s" / "rmq" / "sidecar").exists()


@pytest.mark.usefixtures("worthwhile")
def test_what_goes_wrong_is_told_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar, "allocate", fail)
    caplog.set_level(logging.INFO, "rmq")
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 40)
        assert settled(store) == []
        assert "no sidecar: [Errno 28]" in caplog.text
        put_some(store, 40, 1)
        assert len(store.query("T", "k1")) == 6


def refused(thread: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.usefixtures("worthwhile")
def test_without_a_thread_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 3)
        with monkeypatch.context() as patch:
            patch.setattr("threading.Thread.start", refused)
            put_some(store, 3, 20)
        assert settled(store) == []
        put_some(store, 23, 20)
        assert settled(store)


@pytest.mark.usefixtures("worthwhile")
def test_a_store_that_closes_gives_up_what_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "build_sidecar",
                        lambda *_, goes_on, **__: "" if all(iter(goes_on, False)) else "unreachable")  # fmt: skip
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 40)
        maker = store._flusher._sidecars
        assert maker._thread is not None
    assert maker._thread is None


@pytest.mark.usefixtures("worthwhile")
def test_a_sidecar_goes_with_its_index_file(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 60)
        names = settled(store)
        plan = store.clean(now=2**50, dry_run=True, limit=2)
        done = store.clean(now=2**50, limit=2)
        assert [file.path for file in plan.removed] == [file.path for file in done.removed]
        gone = [Path(file.path) for file in done.removed if Path(file.path).parent.name == "sidecar"]
        assert gone
        assert {path.name for path in gone} == {Path(file.path).name for file in done.removed
                                                if Path(file.path).parent.name == "index"}  # fmt: skip
        assert settled(store) == [name for name in names if name not in {path.name for path in gone}]


# ---- rmq rebuild ---------------------------------------------------------------------------------------------


def test_the_command_makes_those_of_full_files(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 3)
        assert "no index file is full" in good("rebuild", "--sidecar", tmp_path / "s").err
        put_some(store, 3, 27)
        full = [file.path.name for file in store._index.files if file.is_full]
        for _ in range(2):
            done = good("rebuild", "--sidecar", tmp_path / "s", "-o", "jsonl")
            assert [(Path(row["path"]).name, row["size"], row["reason"]) for row in done.rows] == [
                (name, sidecar_size(4, 9), "") for name in full]  # fmt: skip
            assert settled(store) == full
        assert f"{len(full)} sidecars" in done.err
    with rmq.open(tmp_path / "s") as reader:
        assert [len(reader.query("T", f"k{number}")) for number in range(7)] == [5, 5, 4, 4, 4, 4, 4]
        assert sum(file.view.sidecar is not None for file in reader._index.files) == len(full)
    assert rmq.verify(tmp_path / "s").is_sound


def test_the_command_tells_which_file_is_damaged(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=FEW) as store:
        put_some(store, 0, 20)
    first = sorted((tmp_path / "s" / "index").iterdir())[0]
    data = bytearray(first.read_bytes())
    data[-4:] = b"\0\0\0\7"
    first.write_bytes(data)
    done = good("rebuild", "--sidecar", tmp_path / "s", "-o", "jsonl")
    assert [bool(row["reason"]) for row in done.rows] == [True, False]
    (tmp_path / "s" / "rmq" / "meta.json").unlink()
    done = good("rebuild", "--sidecar", tmp_path / "s", "-o", "jsonl")
    assert [row["reason"] for row in done.rows] == ["the index file is damaged", ""]
    assert_error(called("rebuild", "--sidecar", tmp_path / "none"), 4, "no such store")
