"""Index files of a store without marks: which are taken over, which are made anew, and none without need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import copy_store

import rmq

SMALL = {"mapped_file_size_commit_log": 65536, "mapped_file_size_consume_queue": 2000, "max_hash_slot_num": 10,
         "max_index_num": 40}  # fmt: skip
CONFIG = rmq.StoreConfig(**SMALL)
START = 1_700_000_000_000
ENTRIES = 39  # of a full file: the first is never used


def message(number: int, keys: int) -> rmq.Message:
    return rmq.Message("a", b"%d" % number, keys=[f"{letter}{number}" for letter in "abc"[:keys]])


def fill(store: rmq.Store, first: int, count: int, keys: int = 3) -> None:
    for number in range(first, first + count):
        store.put(message(number, keys))


def index_bytes(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((store / "index").iterdir())]


@pytest.mark.parametrize("keys", [1, 3])
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("has_marks", [False, True])
def test_opening_begins_no_file_behind_one_that_is_exactly_full(
        tmp_path: Path, keys: int, is_killed: bool, has_marks: bool) -> None:  # fmt: skip
    """The next message begins it, as RocketMQ's IndexService does: one with a key, or without any."""
    count = 2 * ENTRIES // keys
    for following in (keys, 0):
        never, path = tmp_path / f"never{following}", tmp_path / f"s{following}"
        with rmq.open(never, "x", config=CONFIG, clock=lambda: START) as store:
            fill(store, 0, count, keys)
            store.flush()
            copy_store(never, path)
            before = index_bytes(path)
            fill(store, count, 1, following)
        if not is_killed:
            (path / "abort").unlink()
        if not has_marks:
            shutil.rmtree(path / "rmq")
        rmq.open(path, "r+", config=CONFIG).close()
        assert len(before) == 2
        assert index_bytes(path) == before
        with rmq.open(path, "r+", config=CONFIG, clock=lambda: START) as store:
            fill(store, count, 1, following)
        assert index_bytes(path) == index_bytes(never)
        assert len(index_bytes(path)) == 3
