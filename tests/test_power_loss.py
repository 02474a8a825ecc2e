"""Power loss at its worst moments, each one a store that once did not come back, or came back wrong."""

from __future__ import annotations

import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import oracle
import pytest
from crashes.recorder import Killed, Recorder
from crashes.states import State, only_synced

import rmq

SEGMENT, SECTOR = 4096, 512
FAR = 2**31 - 1  # ms to the next timed flush


def config(**fields: Any) -> rmq.StoreConfig:
    sizes = {"mapped_file_size_commit_log": SEGMENT, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
             "max_index_num": 30, "flush_interval_commit_log": FAR}  # fmt: skip
    return rmq.StoreConfig(**sizes | fields)


def message(number: int, size: int = 50, **fields: Any) -> rmq.Message:
    return rmq.Message(**{"topic": "a", "body": bytes([number % 251 + 1]) * size, "uniq_key": f"u{number}"} | fields)


def names(store: rmq.Store) -> list[str]:
    return store.scan(columns=["uniq_key"]).read_all()["uniq_key"].to_pylist()


def pulled(store: rmq.Store) -> dict[tuple[str, int], list[str | None]]:
    return {(topic, queue_id): [found.uniq_key for found in store.pull(topic, queue_id, 0, 1000).messages]
            for topic, queues in store.topics().items() for queue_id in queues}  # fmt: skip


def image_of(path: Path, target: Path) -> Path:
    """A copy of a store that is open: everything stored is on disk, and it was not closed."""
    return Path(shutil.copytree(path, target))


def left_at(state: State, target: Path) -> Path:
    state.write(target)
    return target / "s"


def zero(path: Path, begin: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def assert_whole(path: Path, expected: list[str]) -> None:
    """Both kinds of reader see these messages, in log and queues, and the parts of the store agree."""
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            assert names(store) == expected
            assert sorted(name for queue in pulled(store).values() for name in queue) == sorted(expected)
    assert oracle.check_store(path, 10, 30) == []


def abandon(store: rmq.Store) -> None:
    """Let go of a store as a killed process does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        store.__del__()


# ---- queues ----------------------------------------------------------------------------------------------


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """Eight messages of queue 0, of which a flush covered four; the rest had reached every file."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        for number in range(4):
            store.put(message(number))
        store.flush()
        for number in range(4, 8):
            store.put(message(number))
        store.topics()
        return image_of(tmp_path / "s", tmp_path / "crashed")


QUEUE = "consumequeue/a/0/00000000000000000000"


@pytest.mark.parametrize(("begin", "end"), [(80, 100), (100, 120), (80, 140), (80, 88), (108, 120)])
def test_a_reader_derives_the_units_behind_the_mark_whatever_the_file_holds(
    crashed: Path, begin: int, end: int
) -> None:
    zero(crashed / QUEUE, begin, end)
    assert_whole(crashed, [f"u{number}" for number in range(8)])


@pytest.mark.parametrize(("begin", "end"), [(80, 88), (80, 87)])
def test_a_unit_that_lost_its_offset_is_none(crashed: Path, begin: int, end: int) -> None:
    """Half of the unit was in a sector that is lost, and so is the message: what is left points below the mark."""
    zero(crashed / "commitlog" / f"{0:020d}", oracle.read_records(crashed)[4].phy_offset, SEGMENT)
    zero(crashed / QUEUE, begin, end)
    zero(crashed / QUEUE, 100, 160)
    with rmq.open(crashed) as reader:
        found = names(reader)
    assert found == [f"u{number}" for number in range(4)]
    assert_whole(crashed, found)
