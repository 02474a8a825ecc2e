"""Where a range of the log begins: at its first record, whatever units or bodies say."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Golden, copy_store

import rmq
from rmq import pull
from rmq._core import _layout as L
from rmq._core._record import resync

SEGMENT = 64 * 1024
BODY_AT = 88  # in a record with IPv4 hosts
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=20 * 100,
                         message_index_enable=False)  # fmt: skip


@pytest.fixture(autouse=True)
def queues_are_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "NEAR", 1)


def starts(path: Path, config: rmq.StoreConfig | None = None) -> list[int]:
    with rmq.open(path, config=config) as store:
        return store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()


def first_from(path: Path, places: range | list[int], config: rmq.StoreConfig | None = None) -> list[int | None]:
    """The first record of a scan that begins at each place."""
    with rmq.open(path, config=config) as store:
        found = []
        for place in places:
            batch = next(iter(store.scan(begin_phy_offset=place, columns=["phy_offset"], batch_rows=1)), None)
            found.append(None if batch is None else batch["phy_offset"][0].as_py())
        return found


def expected(begins: list[int], places: range | list[int]) -> list[int | None]:
    return [next((begin for begin in begins if begin >= place), None) for place in places]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alignment") / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        for number in range(700):
            store.put(rmq.Message("ab"[number % 2], os.urandom(number % 400), queue_id=number % 3))
    return path


def test_every_place_begins_at_the_next_record(made: Path) -> None:
    begins = starts(made)
    assert begins[-1] > 2 * SEGMENT
    near = [begin + step for begin in begins for step in (-1, 0, 1)]
    places = sorted({*range(0, begins[-1] + 500, 997), *near[::7]} - {-1})
    assert first_from(made, places) == expected(begins, places)


@pytest.mark.slow
def test_of_a_broker_s_store(golden: Golden) -> None:
    path = golden.directory / "store"
    begins = starts(path, golden.store_config)
    places = list(range(begins[0], begins[-1] + 500, max(1, (begins[-1] - begins[0]) // 300)))
    with rmq.open(path, config=golden.store_config) as store:
        log = store._log
        assert [store._align(place, store.max_phy_offset) for place in places] == \
            [log.align(place, store.max_phy_offset) for place in places]  # fmt: skip


def queue_files(path: Path) -> list[Path]:
    return [file for file in sorted((path / "consumequeue").rglob("0*")) if file.is_file()]


def no_queues(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")


def random_units(path: Path) -> None:
    for file in queue_files(path):
        file.write_bytes(os.urandom(file.stat().st_size))


def units_of_others(path: Path) -> None:
    """Each queue's units point to records of another one."""
    files = queue_files(path)
    data = [file.read_bytes() for file in files]
    for file, other in zip(files, data[-4:] + data[:-4], strict=True):
        file.write_bytes(other)


def units_into_records(path: Path) -> None:
    for file in queue_files(path):
        units = list(struct.iter_unpack(">qiq", file.read_bytes()))
        file.write_bytes(b"".join(struct.pack(">qiq", place + (7 if size else 0), size, tag)
                                  for place, size, tag in units))  # fmt: skip


@pytest.mark.parametrize("damage", [no_queues, random_units, units_of_others, units_into_records])
def test_units_that_are_wrong_lead_nowhere_else(made: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = copy_store(made, tmp_path / "store")
    shutil.rmtree(path / "rmq")  # a store of ours whose queues are damaged would derive them anew
    begins = starts(path)
    damage(path)
    places = range(0, begins[-1], 1009)
    with rmq.open(path, config=CONFIG) as store:
        assert [store._align(place, store.max_phy_offset) for place in places] == expected(begins, places)


@pytest.mark.slow
def test_a_body_that_holds_a_record_of_that_place_is_no_beginning(tmp_path: Path) -> None:
    """Its sender knew where it would lie: size, magic, own offset, CRC and all are right."""
    with rmq.open(tmp_path / "one", "x", config=CONFIG) as store:
        store.put(rmq.Message("forged", b"it", queue_id=9))
    record = bytearray((tmp_path / "one" / "commitlog" / f"{0:020d}").read_bytes()[:200])
    record = record[: int.from_bytes(record[:4], "big")]
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for _ in range(20):
            store.put(rmq.Message("a", b"x" * 100))
            own = store.max_phy_offset + BODY_AT
            record[L.RECORD_PHY_OFFSET_OFFSET : L.RECORD_PHY_OFFSET_OFFSET + 8] = own.to_bytes(8, "big")
            store.put(rmq.Message("a", bytes(record)))
    begins = starts(tmp_path / "s")
    assert len(begins) == 40
    log = (tmp_path / "s" / "commitlog" / f"{0:020d}").read_bytes()
    assert log[begins[1] + BODY_AT :].startswith(bytes(record[: L.RECORD_PHY_OFFSET_OFFSET]))
    assert resync(log, 0, begins[1] + 1, len(log)) == begins[1] + BODY_AT  # who looks for a record finds the forged one
    places = range(0, begins[-1], 3)
    assert first_from(tmp_path / "s", places) == expected(begins, places)
