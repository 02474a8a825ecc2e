# SPDX-License-Identifier: Apache-2.0
"""The index file of a broker's store in the middle of IndexFile#putKey: of a live broker, or of one that was killed."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import copy_store

import rmq
from rmq._core import _layout as L
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._indexfit import geometry_candidates

SLOTS, ENTRIES = 10, 40
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=SLOTS, max_index_num=ENTRIES)
COUNT = 6  # entries before the one that is being put
SIZE = index_file_size(SLOTS, ENTRIES)


def slot_of(key: str) -> int:
    return rmq.index_key_hash(f"T#{key}") % SLOTS


def key_of_slot(is_slot: bool, other: str) -> str:
    return next(f"n{number}" for number in range(99) if (slot_of(f"n{number}") == slot_of(other)) == is_slot)


def entry_at(number: int) -> int:
    return L.INDEX_HEADER_SIZE + SLOTS * L.INDEX_SLOT_SIZE + number * L.ENTRY_SIZE


def stored(number: int, slot: int) -> list[tuple[int, int]]:
    """(position, size) of what a put of entry `number` stores, in its order."""
    entry = entry_at(number)
    begin = [(L.INDEX_BEGIN_PHY_OFFSET_OFFSET, 8), (L.INDEX_BEGIN_TIMESTAMP_OFFSET, 8)] if number == 1 else []
    return [(entry, 4), (entry + L.ENTRY_PHY_OFFSET_OFFSET, 8), (entry + L.ENTRY_TIME_DIFF_OFFSET, 4),
            (entry + L.ENTRY_PREVIOUS_OFFSET, 4), (L.INDEX_HEADER_SIZE + slot * L.INDEX_SLOT_SIZE, 4), *begin,
            (L.INDEX_HASH_SLOT_COUNT_OFFSET, 4), (L.INDEX_COUNT_OFFSET, 4), (L.INDEX_END_PHY_OFFSET_OFFSET, 8),
            (L.INDEX_END_TIMESTAMP_OFFSET, 8)]  # fmt: skip


def states(before: bytes, after: bytes, number: int, slot: int) -> Iterator[bytes]:
    """What a file holds while entry `number` is put."""
    now = bytearray(before)
    yield bytes(now)
    for position, size in stored(number, slot):
        now[position : position + size] = after[position : position + size]
        yield bytes(now)
    assert now == after


def images(count: int, key: str) -> tuple[bytes, bytes]:
    """A file with `count` entries, and with the key behind them."""
    data = bytearray(SIZE)
    view = IndexFileView(data, hash_slot_num=SLOTS, index_num=ENTRIES, writable=True)
    made = []
    for number, name in enumerate([*(f"k{number}" for number in range(count)), key], 1):
        made.append(bytes(data))
        view.put_one(f"T#{name}", 1000 * number, 5000 * number)
    return made[-1], bytes(data)


@pytest.mark.parametrize("count", [1, 2, 3, 20, ENTRIES - 2])
@pytest.mark.parametrize("same_slot", [False, True])
def test_every_state_of_a_put_fits_its_geometry(count: int, same_slot: bool) -> None:
    key = key_of_slot(same_slot, f"k{count - 1}")
    for data in states(*images(count, key), count + 1, slot_of(key)):
        assert IndexFileView(data, hash_slot_num=SLOTS, index_num=ENTRIES).fits(being_put=True)
        assert (SLOTS, ENTRIES) in geometry_candidates(data, being_put=True)


@pytest.mark.parametrize("late", range(1, 8))
def test_a_header_whose_offset_is_some_puts_older_than_its_count_tells_the_geometry(late: int) -> None:
    data = bytearray(images(20, "k")[1])
    data[L.INDEX_END_PHY_OFFSET_OFFSET : L.INDEX_END_PHY_OFFSET_OFFSET + 8] = (1000 * (21 - late)).to_bytes(8, "big")
    assert (SLOTS, ENTRIES) in geometry_candidates(data, being_put=True)
    assert (SLOTS, ENTRIES) not in geometry_candidates(data)


def test_the_first_entry_tells_the_geometry_as_soon_as_it_is_counted() -> None:
    found = [geometry_candidates(data, being_put=True) for data in states(*images(0, "k"), 1, slot_of("k"))]
    assert found == [[]] * 9 + [[(SLOTS, ENTRIES)]] * 3


@pytest.fixture
def broker(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store as a killed broker leaves it, and its lone index file during the put of its last key."""
    path, key = tmp_path / "broker", key_of_slot(True, f"k{COUNT - 1}")
    with rmq.open(path, "x", config=CONFIG) as store:
        for number in range(COUNT):
            store.put(rmq.Message("T", b"", keys=[f"k{number}"]))
        store.flush()
        (index,) = (path / "index").iterdir()
        before = index.read_bytes()
        store.put(rmq.Message("T", b"last", keys=[key]))
    shutil.rmtree(path / "rmq")
    (path / "abort").touch()
    return path, list(states(before, index.read_bytes(), COUNT + 1, slot_of(key)))


def with_index(broker: Path, path: Path, data: bytes) -> Path:
    copy_store(broker, path)
    (index,) = (path / "index").iterdir()
    index.write_bytes(data)
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_in_the_middle_of_a_put_opens_without_a_config(
        tmp_path: Path, broker: tuple[Path, list[bytes]], mode: str) -> None:  # fmt: skip
    for number, data in enumerate(broker[1]):
        with rmq.open(with_index(broker[0], tmp_path / f"{number}", data), mode) as store:
            assert (store.config.max_hash_slot_num, store.config.max_index_num) == (SLOTS, ENTRIES)
            for key in (*(f"k{n}" for n in range(COUNT)), key_of_slot(True, f"k{COUNT - 1}")):
                assert len(store.query("T", key)) == 1, (number, key)


def test_a_closed_store_has_no_put_in_its_middle(tmp_path: Path, broker: tuple[Path, list[bytes]]) -> None:
    (broker[0] / "abort").unlink()
    for number, data in enumerate(broker[1][1:8], 1):  # up to where the entry is counted
        with pytest.raises(rmq.CorruptFileError, match="fit no geometry"):
            rmq.open(with_index(broker[0], tmp_path / f"{number}", data))


SECOND = L.INDEX_HEADER_SIZE + L.INDEX_SLOT_SIZE * slot_of("k1")


@pytest.mark.parametrize(("position", "value"), [
    (SECOND, COUNT + 2),  # a slot points behind the entry that is being put
    (SECOND, COUNT + 1),  # another slot than that of its hash points to it
    (entry_at(COUNT + 2), 7),  # an entry follows it
    (entry_at(COUNT + 1) + L.ENTRY_PREVIOUS_OFFSET, 1),  # it links to another than the newest of its slot
    (entry_at(COUNT + 1), -7),
    (entry_at(2) + L.ENTRY_PREVIOUS_OFFSET, 1),
])  # fmt: skip
def test_what_no_put_leaves_is_damage(
        tmp_path: Path, broker: tuple[Path, list[bytes]], position: int, value: int) -> None:  # fmt: skip
    data = bytearray(broker[1][5])  # its slot is stored, the header is not
    data[position : position + 4] = value.to_bytes(4, "big", signed=True)
    with pytest.raises(rmq.CorruptFileError, match="fit no geometry"):
        rmq.open(with_index(broker[0], tmp_path / "s", bytes(data)))


WRITER = """
import sys, rmq
with rmq.IndexFile(sys.argv[1], "x", max_hash_slot_num=1000, max_index_num=400_000) as file:
    print(flush=True)
    for number in range(1, 400_000):
        file.put_key(f"T#{number}", number * 100, number)
"""


@pytest.mark.slow
def test_a_file_fits_while_another_process_puts_into_it(tmp_path: Path) -> None:
    path, looks = tmp_path / "20260101000000000", 0
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with (path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
              contextlib.ExitStack() as at_end):  # fmt: skip
            view = IndexFileView(data, hash_slot_num=1000, index_num=400_000)
            at_end.callback(view.release)
            while writer.poll() is None:
                assert view.fits(being_put=True)
                if view.index_count > 1:
                    assert (1000, 400_000) in geometry_candidates(data, being_put=True)
                looks += 1
            assert looks > 3
            assert view.fits()
            assert view.is_full


def test_a_sidecar_that_another_thread_gave_up_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at it: it is looked at once."""

    class View:
        is_damaged = True

        @property
        def sidecar(self) -> View | None:
            seen.append(self)
            return self if len(seen) == 1 else None

        @sidecar.setter
        def sidecar(self, value: None) -> None:
            given_up.append(value)

    seen: list[View] = []
    given_up: list[None] = []
    with rmq.IndexFile(tmp_path / "f", "x", max_hash_slot_num=SLOTS, max_index_num=ENTRIES) as file:
        monkeypatch.setattr(rmq.IndexFile, "view", View())
        file.look()
        monkeypatch.undo()
    assert given_up == [None]
