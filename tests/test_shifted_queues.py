"""Queues of a broker whose unit numbers are not their records' queue offsets: it lost units, or a put was refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from test_queue_gaps import CONFIG, queue_files, two_queues_of_a_broker

import rmq
from rmq._core import _layout as L

LOST = 12  # a put of this queue offset was refused: the records behind it lie one unit before their queue offset


def of_a_broker_that_refused_a_put(path: Path) -> list[bytes]:
    """25 messages of T, then of U, closed; returns the bodies of T's."""
    placed = two_queues_of_a_broker(path)
    first, *others = sorted((path / "commitlog").iterdir())
    log = bytearray(first.read_bytes())
    for result in placed[LOST:]:
        at = result.phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET
        assert struct.unpack_from(">q", log, at) == (result.queue_offset,)
        struct.pack_into(">q", log, at, result.queue_offset + 1)
    assert placed[-1].phy_offset < len(log)
    first.write_bytes(log)
    assert others
    return [b"%d" % number for number in range(25)]


def crashed(path: Path, units: int) -> None:
    """As the broker's kill leaves it, with so many units of T on disk, all of U's."""
    (path / "abort").touch()
    (path / "checkpoint").unlink()
    rest = b"".join(file.read_bytes() for file in queue_files(path))[: units * 20].ljust(600, b"\0")
    for number, file in enumerate(queue_files(path)):
        file.write_bytes(rest[number * 200 : (number + 1) * 200])


@pytest.mark.parametrize("units", [0, LOST - 1, LOST, LOST + 1, 24, 25])
def test_a_recovery_doubles_no_unit_that_lies_before_its_record_s_queue_offset(tmp_path: Path, units: int) -> None:
    path = tmp_path / "s"
    bodies = of_a_broker_that_refused_a_put(path)
    crashed(path, units)
    for mode in ("r", "r+", "r", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert store.topics() == {"T": {0: (0, 25)}, "U": {0: (0, 25)}}
            assert [message.body for message in store.pull("T").messages] == bodies
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert store.put(rmq.Message("T", b"new")).queue_offset == 25
        assert [message.body for message in store.pull("T").messages] == [*bodies, b"new"]


def test_a_reader_derives_what_follows_a_shift_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bodies = of_a_broker_that_refused_a_put(path)
    crashed(path, LOST + 3)
    with rmq.open(path, config=CONFIG) as store:
        for _ in range(3):
            assert [message.body for message in store.pull("T").messages] == bodies


@pytest.mark.parametrize("kept", [0, 5, 15])
def test_a_topic_that_was_deleted_and_made_again_has_its_new_messages_only(tmp_path: Path, kept: int) -> None:
    """The old ones are in the log before them; the broker is killed with so many units of the new ones on disk."""
    path = tmp_path / "s"
    placed = two_queues_of_a_broker(path)
    first = min((path / "commitlog").iterdir())
    log = bytearray(first.read_bytes())
    for result in placed[10:]:
        at = result.phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET
        struct.pack_into(">q", log, at, result.queue_offset - 10)
    first.write_bytes(log)
    units = b"".join(file.read_bytes() for file in queue_files(path))[200 : (10 + kept) * 20].ljust(600, b"\0")
    for number, file in enumerate(queue_files(path)):
        file.write_bytes(units[number * 200 : (number + 1) * 200])
    (path / "abort").touch()
    (path / "checkpoint").unlink()
    for mode in ("r", "r+", "r", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert store.topics() == {"T": {0: (0, 15)}, "U": {0: (0, 25)}}
            assert [message.body for message in store.pull("T").messages] == [b"%d" % n for n in range(10, 25)]


def test_a_broker_s_queue_of_units_that_are_shifted_keeps_its_numbers(tmp_path: Path) -> None:
    """A broker that had lost a queue's first unit went on one unit in front of its records' queue offsets."""
    path = tmp_path / "s"
    two_queues_of_a_broker(path)
    files = queue_files(path)
    units = b"".join(file.read_bytes() for file in files)[20 : 25 * 20].ljust(600, b"\0")
    for number, file in enumerate(files):
        file.write_bytes(units[number * 200 : (number + 1) * 200])
    bodies = [b"%d" % number for number in range(1, 25)]
    for opens in range(3):
        for mode in ("r", "r+"):
            with rmq.open(path, mode, config=CONFIG) as store:
                assert [message.body for message in store.pull("T").messages] == bodies
        with rmq.open(path, "r+", config=CONFIG) as store:
            assert store.put(rmq.Message("T", b"new")).queue_offset == 24 + opens
        bodies.append(b"new")
