# SPDX-License-Identifier: Apache-2.0
"""What is derived again is not taken for what had been on disk: recoveries that are killed, then lose pages."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import oracle
import pytest
from agreement import assert_agreement, questions
from forks import fork
from rocketmq import RELEASES, RocketMQ

import rmq
import rmq.dispatch
import rmq.recovery
from rmq.checkpoint import Checkpoint
from rmq.dispatch import Dispatcher
from rmq.flushing import Flusher
from rmq.indexfile import IndexFile

SIZES: dict[str, Any] = {"mapped_file_size_commit_log": 1 << 20, "mapped_file_size_consume_queue": 20 * 4096,
                         "max_hash_slot_num": 97, "max_index_num": 500, "flush_interval_commit_log": 10**8}  # fmt: skip
CONFIG = rmq.StoreConfig(**SIZES)
COUNT = 1200
START = 1_700_000_000_000
PAGE = 4096


def killed(work: Callable[[], object]) -> None:
    """Run it in a process that is killed at its end, or where it kills itself."""

    def work_and_end() -> None:
        work()
        kill()

    assert os.WTERMSIG(os.waitpid(fork(work_and_end), 0)[1]) == signal.SIGKILL


def kill(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path, config: rmq.StoreConfig = CONFIG, **how: Any) -> rmq.Store:
    store = rmq.open(path, "x", config=config, **how)
    for first in range(0, COUNT, 100):
        store.put_many([rmq.Message("T", b"%d" % i, keys=f"k{i}") for i in range(first, first + 100)])
    store.flush()
    return store


def open_without_flush(path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Killed at the end of the open's recovery, before anything of it is on disk."""
    with monkeypatch.context() as patched:
        patched.setattr(Flusher, "flush", kill)
        killed(lambda: rmq.open(path, "r+", **how))


def assert_whole(path: Path) -> None:
    keys = [f"k{i}" for i in range(COUNT)]
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            assert store.topics() == {"T": {0: (0, COUNT)}}
            assert store.query_many("T", keys).table["key_index"].to_pylist() == list(range(COUNT)), mode
            at = 0
            while at < COUNT:
                at = store.pull("T", 0, at, 500).next_queue_offset
    assert rmq.verify(path).is_sound


@pytest.mark.parametrize("how", ["an index file is gone", "repair"])
@pytest.mark.parametrize("number", [0, 1])
def test_pages_of_an_index_that_was_derived_again_may_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str,
                                                              number: int) -> None:  # fmt: skip
    path = tmp_path / "s"
    fill(path).close()
    if how != "repair":
        min((path / "index").iterdir()).unlink()
    open_without_flush(path, monkeypatch, repair=how == "repair")
    with sorted((path / "index").iterdir())[number].open("r+b") as file:
        os.pwrite(file.fileno(), bytes(PAGE), PAGE)
    assert_whole(path)


@pytest.mark.parametrize("how", ["a queue is gone", "repair"])
def test_pages_of_a_queue_that_was_derived_again_may_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             how: str) -> None:  # fmt: skip
    path = tmp_path / "s"
    fill(path).close()
    if how != "repair":
        shutil.rmtree(path / "consumequeue/T")
    open_without_flush(path, monkeypatch, repair=how == "repair")
    with (path / f"consumequeue/T/0/{0:020d}").open("r+b") as file:
        os.pwrite(file.fileno(), bytes(PAGE), PAGE)
    assert_whole(path)


def repair_until_second_file(path: Path, reached: Callable[[], object]) -> None:
    put_rows = IndexFile.put_rows

    def stop(self: IndexFile, *arguments: Any) -> Any:
        done = put_rows(self, *arguments)
        if len(list((path / "index").iterdir())) == 2:
            reached()
        return done

    rmq.dispatch.BATCH_ROWS, rmq.dispatch.UNITS_EACH = 100, 1
    IndexFile.put_rows = stop  # type: ignore[method-assign]
    rmq.open(path, "r+", repair=True)


def test_a_repair_that_was_killed_hides_no_key(tmp_path: Path) -> None:
    path = tmp_path / "s"
    killed(lambda: fill(path))
    killed(lambda: repair_until_second_file(path, kill))
    assert len(list((path / "index").iterdir())) == 2
    assert_whole(path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_repair_of_a_closed_store_leaves_one_to_be_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Index files are gone by then: a broker that found no `abort` would never make them again."""
    path = tmp_path / "s"
    fill(path).close()

    def interrupt() -> None:
        raise error

    monkeypatch.setattr("rmq.dispatch.BATCH_ROWS", 100)
    monkeypatch.setattr("rmq.dispatch.UNITS_EACH", 1)
    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, "put_rows", IndexFile.put_rows)  # put back what the next line changes
        with pytest.raises(error):
            repair_until_second_file(path, interrupt)
    assert (path / "abort").exists()
    assert rmq.verify(path).state == "not closed"
    assert_whole(path)


def test_a_repair_under_way_hides_no_key_from_readers(tmp_path: Path) -> None:
    path, keys = tmp_path / "s", [f"k{i}" for i in range(COUNT)]
    killed(lambda: fill(path))
    with rmq.open(path) as before:
        assert before.query("T", "k1")
        pid = fork(lambda: repair_until_second_file(path, lambda: ((tmp_path / "reached").touch(), time.sleep(60))))
        try:
            while not (tmp_path / "reached").exists():
                assert os.waitpid(pid, os.WNOHANG) == (0, 0)
                time.sleep(0.01)
            with rmq.open(path) as meanwhile:
                for reader in (before, meanwhile):
                    assert len(reader.query_many("T", keys).table) == COUNT
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert len(before.query_many("T", keys).table) == COUNT
    assert_whole(path)


@pytest.mark.parametrize(("at", "form", "value"), [(24, ">q", 777), (24, ">q", 2**62), (36, ">i", 200), (36, ">i", 0),
                                                   (0, ">q", 5), (16, ">q", 100_000)])  # fmt: skip
def test_a_wrong_index_header_of_a_closed_store_is_made_right(tmp_path: Path, at: int, form: str, value: int) -> None:
    path = tmp_path / "s"
    fill(path).close()
    with max((path / "index").iterdir()).open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack(form, value), at)
    with rmq.open(path, "r+") as store:
        store.put(rmq.Message("T", b"new", keys="new"))
        keys = [f"k{i}" for i in range(COUNT)]
        assert len(store.query_many("T", [*keys, "new"]).table) == COUNT + 1
    assert rmq.verify(path).is_sound


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_last_unit_that_points_past_64_bits_is_derived_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path).close()
    with (path / f"consumequeue/T/0/{0:020d}").open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack(">q", 2**63 - 1), 20 * (COUNT - 1))
    assert_whole(path)


def test_records_put_before_the_record_crc_was_turned_on_stand_after_a_crash(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a NUL among their properties, which says of a record that lacks its CRC that a sector was lost."""
    path = tmp_path / "s"

    def put() -> None:
        with rmq.open(path, "x", config=rmq.StoreConfig(**SIZES, flush_disk_type="SYNC_FLUSH")) as store:
            for i in range(20):
                store.put(rmq.Message("T", b"%d" % i, properties={"a": "x\0y"}))
            kill()

    killed(put)
    open_without_flush(path, monkeypatch, config=rmq.StoreConfig(enabled_append_prop_crc=True))
    with rmq.open(path, "r+") as store:
        assert store.topics() == {"T": {0: (0, 20)}}


@pytest.mark.parametrize("part", ["index", "consumequeue/T/0"])
def test_the_checkpoint_does_not_vouch_for_what_a_repair_derives_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       part: str) -> None:  # fmt: skip
    """A broker's store has no other marks, and a broker that comes next asks nothing else."""
    path, times = tmp_path / "s", count(START, 1000)
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for i in range(COUNT):
            store.put(rmq.Message("T", b"%d" % i, keys=f"k{i}"))
    shutil.rmtree(path / "rmq")
    with (path / "checkpoint").open("r+b") as file:  # a broker of 5.5 has a sixth long
        os.pwrite(file.fileno(), (200).to_bytes(8, "big"), 40)
    open_without_flush(path, monkeypatch, repair=True)
    found = Checkpoint(path / "checkpoint")
    assert (found.physic_msg_timestamp > START, found.logics_msg_timestamp, found.index_msg_timestamp) == (True, 0, 0)
    assert found.logics_phy_offset == 0
    shutil.rmtree(path / "rmq")
    with min((path / part).iterdir()).open("r+b") as file:
        os.pwrite(file.fileno(), bytes(PAGE), PAGE)
    assert_whole(path)
    found = Checkpoint(path / "checkpoint")
    assert START < found.index_msg_timestamp < found.logics_msg_timestamp == found.physic_msg_timestamp


@pytest.mark.parametrize("how", ["repair", "crash", "zeros"])
def test_the_checkpoint_says_nothing_of_what_was_cut_off_a_broker_s_log(tmp_path: Path, how: str) -> None:
    path, times = tmp_path / "s", count(START, 1000)
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        placed = [store.put(rmq.Message("T", b"%d" % i)).phy_offset for i in range(20)]
        placed += [store.put(rmq.Message("T", b"%d" % i, keys=f"k{i}")).phy_offset for i in range(20, 40)]
    shutil.rmtree(path / "rmq")
    log, checkpoint = path / "commitlog" / f"{0:020d}", Checkpoint(path / "checkpoint")
    with log.open("r+b") as file:
        if how == "repair":
            os.pwrite(file.fileno(), b"!", placed[30] + 88)  # the body
        else:
            os.pwrite(file.fileno(), bytes(8192), placed[30])
        if how == "crash":
            (path / "abort").touch()
            checkpoint.physic_msg_timestamp = 0
    checkpoint.index_msg_timestamp, checkpoint.confirm_phy_offset = START + 100_000, placed[-1]
    checkpoint.flush()
    with (path / "checkpoint").open("r+b") as file:  # a broker of 5.5 has a sixth long
        os.pwrite(file.fileno(), placed[-2].to_bytes(8, "big"), 40)
    with rmq.open(path, "r+", repair=how == "repair") as store:
        assert store.max_phy_offset == placed[30]
    found = Checkpoint(path / "checkpoint")
    assert found.confirm_phy_offset == found.logics_phy_offset == placed[29]
    assert found.index_msg_timestamp <= found.logics_msg_timestamp < START + 40_000
    assert list(rmq.verify(path)) == []


@pytest.mark.parametrize(("last", "held", "left"), [
    (700, 500, 500), (700, 700, 700), (700, 701, 700), (700, 2000, 700), (0, 5, 0), (-1, 500, 500), (-1, 1001, 0)])
def test_the_sixth_long_of_a_checkpoint_is_no_more_than_the_last_record_s_begin(
        tmp_path: Path, last: int, held: int, left: int) -> None:  # fmt: skip
    """Edge: -1, where nobody knows it: then what lies in the log may stay. It ends at 1000."""
    (tmp_path / "checkpoint").write_bytes(bytes(40) + held.to_bytes(8, "big") + bytes(4048))
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.take_back(1000, last, 0)
    assert (checkpoint.logics_phy_offset, checkpoint.is_behind) == (left, held != left)
    checkpoint.flush()
    assert Checkpoint(tmp_path / "checkpoint").logics_phy_offset == left


def crash(path: Path) -> None:
    killed(lambda: rmq.open(path, "r+").put(rmq.Message("U", b"x")))


def append_as_a_broker(path: Path) -> None:
    with rmq.open(path) as store:
        end = store.max_phy_offset
    with max((path / "commitlog").iterdir()).open("r+b") as file:
        os.pwrite(file.fileno(), oracle.encode_record("U", 0, 0, end, b"x"), end - int(Path(file.name).name))


def without_marks(path: Path) -> None:
    shutil.rmtree(path / "rmq")


def lose_first_index_file(path: Path) -> None:
    min((path / "index").iterdir()).unlink()


def lose_last_index_file(path: Path) -> None:
    max((path / "index").iterdir()).unlink()


def lose_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def damage_index_file(path: Path, which: Callable[..., Path] = min) -> None:
    with which((path / "index").iterdir()).open("r+b") as file:
        os.pwrite(file.fileno(), b"\x7f" * 40, 0)


def damage_last_index_file(path: Path) -> None:
    damage_index_file(path, max)


def lose_queue(path: Path) -> None:
    shutil.rmtree(path / "consumequeue/T")


def lose_last_units(path: Path) -> None:
    max((path / "consumequeue/T/0").iterdir()).unlink()


LOSSES = (lose_first_index_file, lose_last_index_file, lose_index, lose_queue, lose_last_units)
DAMAGE = (damage_index_file, damage_last_index_file)  # a reopen of a closed store of our own does not look for it


@pytest.mark.parametrize("steps", [
    *([loss] for loss in LOSSES), *([without_marks, loss] for loss in LOSSES + DAMAGE),
    [crash], [crash, lose_index], [crash, without_marks, lose_queue],
    [append_as_a_broker, lose_index], [append_as_a_broker, lose_first_index_file],
    ], ids=lambda steps: ", ".join(step.__name__ for step in steps))  # fmt: skip
def test_the_checkpoint_vouches_for_nothing_before_anything_is_derived_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[Callable[[Path], None]]
) -> None:
    """Killed where a file is set aside, or else before what was derived is on disk."""
    path, times = tmp_path / "s", count(START, 100_000)
    sizes = SIZES | {"mapped_file_size_consume_queue": 20 * 500, "mapped_file_size_commit_log": 1 << 14}
    fill(path, rmq.StoreConfig(**sizes), clock=lambda: next(times)).close()
    for step in steps:
        step(path)
    assert Checkpoint(path / "checkpoint").logics_msg_timestamp > 0
    real = Dispatcher.advance

    def killing(self: Dispatcher, end: int) -> None:
        is_behind = min(self.queue_phy_offset, self.index_phy_offset) < end
        real(self, end)
        if is_behind:
            kill()

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "advance", killing)
        patched.setattr(rmq.recovery, "set_aside", kill)
        killed(lambda: rmq.open(path, "r+"))
    found = Checkpoint(path / "checkpoint")
    assert (found.logics_msg_timestamp, found.index_msg_timestamp) == (0, 0)
    with rmq.open(path, "r+") as store:
        assert store.query_many("T", [f"k{i}" for i in range(COUNT)]).table["key_index"].to_pylist() == [*range(COUNT)]
        assert store.topics()["T"] == {0: (0, COUNT)}
    assert rmq.verify(path).is_sound


@pytest.mark.interop
@pytest.mark.parametrize("release", RELEASES)
def test_rocketmq_finds_every_key_in_a_store_whose_repair_was_killed(tmp_path: Path, release: str) -> None:
    """The second of its new index files was not full yet, but older than the last full one of before."""
    path, times = tmp_path / "s", count(START, 20_000)
    config = rmq.StoreConfig(**SIZES | {"mapped_file_size_commit_log": 1 << 14}, rocketmq_version=release)
    with rmq.open(path, "x", config=config, clock=lambda: next(times)) as store:
        for i in range(COUNT):
            store.put(rmq.Message("T", b"%d" % i, keys=f"k{i}"))
    killed(lambda: repair_until_second_file(path, kill))
    judge = RocketMQ(release, tmp_path / "rocketmq")
    asked = questions(path)
    try:
        answers = judge.open(path, config, asked).answers
    finally:
        judge.close()
    with rmq.open(path) as store:
        assert_agreement(store, asked, answers)
        assert len(store.query_many("T", [f"k{i}" for i in range(COUNT)]).table) == COUNT


def test_the_checkpoint_tells_times_again_after_a_recovery_with_nothing_to_derive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    killed(lambda: fill(path))
    told = (path / "checkpoint").read_bytes()
    for how in ({}, {"repair": True}):
        with rmq.open(path, "r+", **how):
            assert (path / "checkpoint").read_bytes() == told


def test_an_index_file_without_entries_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ makes the file with the first message, whether it has keys or not."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"x"))
    monkeypatch.setattr(rmq.recovery, "void_manifest", lambda _: pytest.fail("nothing is derived again"))
    for _ in range(2):
        with rmq.open(path) as store:
            found = store.query("T", "k")
            assert (found.complete, found.scanned_size) == (True, 0)
        rmq.open(path, "r+").close()


@pytest.mark.parametrize("queue_offset", [-5, 2**40, 2**62, COUNT + 7])
def test_a_repair_puts_no_earlier_message_behind_the_end_of_its_queue(tmp_path: Path, queue_offset: int) -> None:
    """One that says a queue offset which is none of the queue's: it has its unit."""
    path = tmp_path / "s"
    with fill(path) as store:
        place = store.pull("T", 0, 700, 1).messages[0].phy_offset
    size = CONFIG.mapped_file_size_commit_log
    with (path / f"commitlog/{place - place % size:020d}").open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack(">q", queue_offset), place % size + 20)
    for _ in range(2):
        with rmq.open(path, "r+", repair=True) as store:
            assert store.topics() == {"T": {0: (0, COUNT)}}
            assert len(store.pull("T", 0, 701, COUNT).messages) == COUNT - 701
            with pytest.raises(rmq.CorruptFileError):
                store.pull("T", 0, 700, 1)
