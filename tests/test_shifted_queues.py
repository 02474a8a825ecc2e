"""Queues of a broker whose unit numbers are not their records' queue offsets: it lost units, or a put was refused."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
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


# ---- units of records that a broker cut off ------------------------------------------------------------------


def of_a_broker_that_cut_its_log(path: Path, kept: int, others: int, again: int, before: int = 0) -> list[bytes]:
    """T had 25 messages, behind others; after a crash the broker kept some and went on with messages of U and T, of one
    size with the lost ones, whose units stay behind those of T. Returns the bodies of T.
    """
    bodies = [b"%02d" % number for number in range(25)]
    with rmq.open(path.with_name("before"), "x", config=CONFIG) as store:
        store.put_many([rmq.Message("F", b"")] * before)
        store.put_many([rmq.Message("T", body) for body in bodies])
    bodies[kept:] = [b"n%d" % number for number in range(again)]
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("F", b"")] * before)
        store.put_many([rmq.Message("T", body) for body in bodies[:kept]])
        store.put_many([rmq.Message("U", b"%02d" % number) for number in range(others)])
        store.put_many([rmq.Message("T", body) for body in bodies[kept:]])
    units = b"".join(file.read_bytes() for file in queue_files(path)).rstrip(b"\0")
    units = units.ljust(-(-len(units) // 20) * 20, b"\0")
    for file in queue_files(path.with_name("before")):
        begin = int(file.name)
        new = units[begin : begin + 200]
        (path / "consumequeue/T/0" / file.name).write_bytes(new + file.read_bytes()[len(new) :])
    shutil.rmtree(path / "rmq")
    return bodies


@pytest.fixture
def lives() -> Iterator[Callable[[Path], None]]:
    """A broker's lock, which is one of a process, is held by another process until the test's end."""
    code = "import fcntl, sys\nwith open(sys.argv[1], 'r+') as file:\n fcntl.lockf(file, 2); print(flush=True); input()"
    held = []

    def hold(path: Path) -> None:
        (path / "abort").touch()
        held.append(subprocess.Popen([sys.executable, "-c", code, path / "lock"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE))  # fmt: skip
        assert held[-1].stdout.readline() == b"\n"

    yield hold
    for process in held:
        process.communicate(b"\n")


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(("kept", "others", "again"), [(20, 0, 0), (20, 1, 0), (20, 5, 0), (20, 2, 1), (20, 3, 1),
                                                       (9, 11, 4)])  # fmt: skip
def test_units_of_records_that_a_broker_cut_off_do_not_count(
        tmp_path: Path, lives: Callable[[Path], None], kept: int, others: int, again: int,
        is_live: bool) -> None:  # fmt: skip
    path = tmp_path / "s"
    bodies = of_a_broker_that_cut_its_log(path, kept, others, again)
    if is_live:
        lives(path)
    for mode in ("r",) if is_live else ("r", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert store.topics()["T"] == {0: (0, len(bodies))}
            assert [message.body for message in store.pull("T", limit=100).messages] == bodies
            assert store.pull("T", 0, len(bodies)).status == rmq.PullStatus.OFFSET_OVERFLOW_ONE
            found = [message.body for message in store.pull("U", limit=100).messages]
            assert found == [b"%02d" % number for number in range(others)]
            assert store.search_offset("T", 0, 2**60) == len(bodies)


def test_a_reader_beside_a_broker_takes_up_what_comes_where_units_were_cut(
        tmp_path: Path, lives: Callable[[Path], None]) -> None:  # fmt: skip
    """The log comes first, then the unit in the place of a stale one."""
    path, later = tmp_path / "s", tmp_path / "later" / "s"
    later.parent.mkdir()
    bodies = of_a_broker_that_cut_its_log(later, 20, 3, 2)
    of_a_broker_that_cut_its_log(path, 20, 3, 0)
    lives(path)
    with rmq.open(path, config=CONFIG) as store:
        assert store.pull("T", 0, 20).status == rmq.PullStatus.OFFSET_OVERFLOW_ONE
        for part in ("commitlog", "consumequeue"):
            for file in (later / part).rglob("0*"):
                if file.is_file():
                    shutil.copyfile(file, path / file.relative_to(later))
            assert [message.body for message in store.pull("T", limit=100).messages] == bodies
    with rmq.open(path, config=CONFIG) as store:
        assert [message.body for message in store.pull("T", limit=100).messages] == bodies


def test_units_behind_damage_beside_a_broker_are_told_of(tmp_path: Path, lives: Callable[[Path], None],
                                                         caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    path = tmp_path / "s"
    two_queues_of_a_broker(path)
    with rmq.open(path, config=CONFIG) as store:
        number, place = next((message.queue_offset, message.phy_offset) for message in store.pull("U").messages
                             if message.phy_offset > CONFIG.mapped_file_size_commit_log)  # fmt: skip
    assert number < 24
    with max((path / "commitlog").iterdir()).open("r+b") as file:
        file.seek(place % CONFIG.mapped_file_size_commit_log + L.RECORD_BODY_OFFSET)
        file.write(b"!")
    lives(path)
    with rmq.open(path, config=CONFIG) as store:
        assert f"the log is read up to {place}; behind it lie whole records" in caplog.text
        assert store.topics()["U"] == {0: (0, 25)}
        assert len(store.pull("U", limit=number).messages) == number
        for at in (0, number, 24):
            with pytest.raises(rmq.CorruptFileError):
                store.pull("U", 0, at)


def test_a_cleaning_beside_a_reader_brings_no_unit_back_that_a_broker_left(
        tmp_path: Path, lives: Callable[[Path], None]) -> None:  # fmt: skip
    path = tmp_path / "s"
    bodies = of_a_broker_that_cut_its_log(path, 20, 20, 0, before=60)
    lives(path)
    with rmq.open(path, config=CONFIG) as store:
        assert store.topics()["T"] == {0: (0, 20)}
        min((path / "commitlog").iterdir()).unlink()
        assert store.topics()["T"] == {0: (0, 20)}
        assert store.topics()["F"][0][0] > 0
        assert [message.body for message in store.pull("T", limit=100).messages] == bodies


def test_a_mark_below_which_a_broker_that_lives_cut_the_log_tells_nothing(
        tmp_path: Path, lives: Callable[[Path], None]) -> None:  # fmt: skip
    path, other = tmp_path / "s", tmp_path / "other"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"%02d" % number) for number in range(20)])
    with rmq.open(other, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"%02d" % number) for number in range(15)])
        store.put_many([rmq.Message("VVVV", b"%06d" % number) for number in range(25)])
    shutil.copytree(other / "commitlog", path / "commitlog", dirs_exist_ok=True)
    shutil.copytree(other / "consumequeue/VVVV", path / "consumequeue/VVVV")
    lives(path)
    with rmq.open(path, config=CONFIG) as store:
        assert store.topics() == {"T": {0: (0, 15)}, "VVVV": {0: (0, 25)}}
        assert len(store.pull("T", limit=100).messages) == 15
        assert len(store.pull("VVVV", limit=100).messages) == 25
        assert store.scan().read_all().num_rows == 40


def test_a_gap_in_one_queue_leaves_a_shifted_one_as_it_is(tmp_path: Path, lives: Callable[[Path], None]) -> None:
    """T had lost its first unit. A put of U was refused: its queue offset is passed over, all is dispatched anew."""
    path, later = tmp_path / "s", tmp_path / "later"
    for place, count in ((path, 4), (later, 5)):
        with rmq.open(place, "x", config=CONFIG) as store:
            placed = [store.put(rmq.Message(topic, b"%d" % number)) for number in range(4) for topic in "TU"]
            placed += [store.put(rmq.Message("U", b"new")) for _ in range(count - 4)]
        shutil.rmtree(place / "rmq")
        (file,) = queue_files(place)
        file.write_bytes(file.read_bytes()[20:] + bytes(20))
    log = later / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    struct.pack_into(">q", data, placed[-1].phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET, 5)
    log.write_bytes(data)
    lives(path)
    with rmq.open(path, config=CONFIG) as store:
        for topics in ({"T": {0: (0, 3)}, "U": {0: (0, 4)}}, {"T": {0: (0, 3)}, "U": {0: (0, 5)}}):
            assert store.topics() == topics
            assert [message.body for message in store.pull("T").messages] == [b"1", b"2", b"3"]
            for part in (log, *(later / "consumequeue").rglob("0*")):
                if part.is_file():
                    shutil.copyfile(part, path / part.relative_to(later))
