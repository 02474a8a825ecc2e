# SPDX-License-Identifier: Apache-2.0
"""A broker that ran on a store of ours and did not close it: its messages stand by its own rules, not by our marks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from conftest import digests
from test_recovery_trust import kill, killed

import rmq
import rmq.recovery
from rmq.checkpoint import Checkpoint
from rmq.flushing import Flusher
from rmq.lock import Crash, crash_of
from rmq.paths import StorePaths

START = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20 * 4096,
                         max_hash_slot_num=97, max_index_num=500)  # fmt: skip
ZEROS = rmq.Message("T", b"20", properties={"zeros": "z" * 1200})  # lost sectors, would a crash of ours have left them
LOG = f"commitlog/{0:020d}"


def put(path: Path, data: bytes, at: int) -> None:
    with (path / LOG).open("r+b") as file:
        os.pwrite(file.fileno(), data, at)


def run_broker(path: Path, messages: list[rmq.Message], *, is_closed: bool = False, abort: str = "4711") -> list[int]:
    """Puts that our own files know nothing of; returns where the records lie."""
    os.utime(path / "lock")  # it writes the file anew
    shutil.copytree(path / "rmq", path.with_name("ours"))
    times = count(START + 60_000, 1000)
    with rmq.open(path, "r+", clock=lambda: next(times)) as store:
        placed = [store.put(message).phy_offset for message in messages]
    for phy_offset in placed if ZEROS in messages else ():
        data = (path / LOG).read_bytes()[phy_offset : phy_offset + 1600]
        put(path, data.replace(b"z" * 1200, bytes(1200)), phy_offset)
    shutil.rmtree(path / "rmq")
    path.with_name("ours").rename(path / "rmq")
    if not is_closed:
        (path / "abort").write_text(abort)
    return placed


def flushed_until(path: Path, time: int) -> None:
    """By the broker."""
    checkpoint = Checkpoint(path / "checkpoint")
    checkpoint.physic_msg_timestamp = time
    checkpoint.flush()


def make(path: Path, config: rmq.StoreConfig = CONFIG) -> None:
    times = count(START, 1000)
    with rmq.open(path, "x", config=config, clock=lambda: next(times)) as store:
        store.put_many([rmq.Message("T", b"%d" % i, keys=f"k{i}") for i in range(20)])


def crash(path: Path) -> None:
    """Our own writer, killed; its recovery and its message are on disk."""
    killed(lambda: (store := rmq.open(path, "r+")).put(rmq.Message("U", b"ours")) and store.flush())


def after_a_crash_of_ours(path: Path) -> None:
    """Its owner file stays through the broker's run."""
    make(path)
    crash(path)
    with rmq.open(path, "r+"):
        pass
    (path / "rmq/owner").write_text('{"pid": 99, "aborts": ["99"]}')


@pytest.mark.parametrize("begin", [make, after_a_crash_of_ours])
@pytest.mark.parametrize("last", [[], [rmq.Message("T", b"21")]])
def test_a_broker_s_message_of_many_zeros_is_no_lost_sector(tmp_path: Path, begin: Callable[[Path], None],
                                                            last: list[rmq.Message]) -> None:  # fmt: skip
    path = tmp_path / "s"
    begin(path)
    run_broker(path, [ZEROS, rmq.Message("T", b"20"), *last])
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            messages = store.pull("T", 0, 20, 32).messages
            assert [message.body for message in messages] == [b"20", b"20", *(one.body for one in last)]
            assert len(messages[0].properties["zeros"]) == 1200


@pytest.mark.parametrize("begin", [make, after_a_crash_of_ours])
def test_damage_in_what_a_broker_had_flushed_stops_the_open(tmp_path: Path, begin: Callable[[Path], None]) -> None:
    path = tmp_path / "s"
    begin(path)
    placed = run_broker(path, [rmq.Message("T", b"%d" % i) for i in range(20, 40)])
    put(path, b"!", placed[5] + 88)  # the body
    before = digests(path, "commitlog", "consumequeue", "index")
    with pytest.raises(rmq.CorruptFileError) as error:
        rmq.open(path, "r+")
    assert (error.value.path, error.value.offset) == (str(path / LOG), placed[5])
    assert digests(path, "commitlog", "consumequeue", "index") == before
    with rmq.open(path) as store:
        assert [message.body for message in store.pull("T", 0, 26, 32).messages] == [b"%d" % i for i in range(26, 40)]
    with rmq.open(path, "r+", repair=True) as store:
        assert store.max_phy_offset == placed[5]
    assert any((path / "rmq/cut").iterdir())


def test_what_a_broker_had_not_flushed_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path)
    placed = run_broker(path, [rmq.Message("T", b"%d" % i) for i in range(20, 40)])
    put(path, b"!", placed[5] + 88)
    flushed_until(path, START + 60_000)
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert (store.max_phy_offset, store.topics()["T"]) == (placed[5], {0: (0, 25)})


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
@pytest.mark.parametrize("has_crashed", [False, True])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("messages", [[ZEROS, rmq.Message("T", b"21")], [rmq.Message("T", b"20"), ZEROS]])
def test_a_reader_that_was_there_before_sees_what_a_broker_put(
        tmp_path: Path, has_crashed: bool, is_closed: bool, version: str,
        messages: list[rmq.Message]) -> None:  # fmt: skip
    path = tmp_path / "s"
    make(path, dataclasses.replace(CONFIG, rocketmq_version=version))
    if has_crashed:
        crash(path)
    with rmq.open(path) as reader:
        assert reader.topics()["T"] == {0: (0, 20)}
        abort = "" if version == "4.9.8" else "4711"
        run_broker(path, messages, is_closed=is_closed, abort=abort)
        with rmq.open(path) as fresh:
            assert reader.topics() == fresh.topics()
        assert [found.body for found in reader.pull("T", 0, 20).messages] == [one.body for one in messages]


@pytest.mark.parametrize("has_marks", [True, False])
def test_a_last_message_is_torn_only_if_the_broker_had_not_flushed_it(tmp_path: Path, has_marks: bool) -> None:
    path = tmp_path / "s"
    make(path)
    run_broker(path, [rmq.Message("T", b"20"), ZEROS])
    if not has_marks:
        shutil.rmtree(path / "rmq")
    for flushed, found in ((START + 61_000, 22), (START + 60_999, 21)):
        flushed_until(path, flushed)
        with rmq.open(path) as store:
            assert store.topics() == {"T": {0: (0, found)}}
        copy = Path(shutil.copytree(path, tmp_path / str(found)))
        with rmq.open(copy, "r+") as store:
            assert store.topics() == {"T": {0: (0, found)}}


def test_a_torn_record_that_is_alone_in_its_segment_goes_with_it(tmp_path: Path) -> None:
    path, size = tmp_path / "s", 1 << 14
    make(path, dataclasses.replace(CONFIG, mapped_file_size_commit_log=size))
    torn = rmq.Message("T", b"torn", properties={"end": "z" * 1200})
    bodies = (bytes(size // 2), bytes(size // 3))
    full, last = run_broker(path, [*(rmq.Message("T", body) for body in bodies), torn])[1:]
    segment = path / "commitlog" / f"{size:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"z" * 1200, bytes(1200)))
    assert last == size
    flushed_until(path, START + 61_000)
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert full < store.max_phy_offset <= size
            assert (store.topics(), len(store.scan().read_all())) == ({"T": {0: (0, 22)}}, 22)
    with rmq.open(path, "r+") as store:
        assert (store.put(torn).phy_offset, store.topics()) == (size, {"T": {0: (0, 23)}})


def test_a_broker_s_crash_stays_one_until_its_log_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    make(path)
    run_broker(path, [ZEROS, rmq.Message("T", b"20")])
    for function in ("find_end", "cut_queues", "_continue"):
        with monkeypatch.context() as patched:
            patched.setattr(rmq.recovery, function, kill)
            killed(lambda: rmq.open(path, "r+"))
        assert crash_of(StorePaths(path)) is Crash.BROKERS
    with monkeypatch.context() as patched:
        patched.setattr(Flusher, "flush", kill)
        killed(lambda: rmq.open(path, "r+"))
    with rmq.open(path, "r+") as store:
        assert store.topics()["T"] == {0: (0, 22)}


def test_our_own_crash_behind_it_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path)
    run_broker(path, [ZEROS, rmq.Message("T", b"20")])
    for _ in range(2):
        crash(path)
        assert crash_of(StorePaths(path)) is Crash.OURS
    with rmq.open(path, "r+") as store:
        assert store.topics() == {"T": {0: (0, 22)}, "U": {0: (0, 2)}}
    assert crash_of(StorePaths(path)) is None


@pytest.mark.parametrize("aborts", [[""], ["98"], ["98", "99"]])
@pytest.mark.parametrize("found", ["", "97", "98", "99"])
def test_whose_crash_it_is_the_owner_file_tells(tmp_path: Path, aborts: list[str], found: str) -> None:
    make(tmp_path / "s")
    (tmp_path / "s/abort").write_text(found)
    paths = StorePaths(tmp_path / "s")
    assert crash_of(paths) is Crash.BROKERS  # a closed store has no owner
    for is_open, ours in ((True, Crash.OURS), (False, Crash.OPENING)):
        paths.owner.write_text(json.dumps({"aborts": aborts, "open": is_open}))
        assert crash_of(paths) is (ours if found in aborts else Crash.BROKERS)


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
def test_a_broker_that_left_the_same_abort_is_told_by_its_lock(tmp_path: Path, version: str) -> None:
    """Of 4.x it is always empty; in two containers a broker and a process of ours may have one pid."""
    path = tmp_path / "s"
    make(path, dataclasses.replace(CONFIG, rocketmq_version=version))
    crash(path)
    run_broker(path, [ZEROS, rmq.Message("T", b"20")], abort=(path / "abort").read_text())
    assert crash_of(StorePaths(path)) is Crash.BROKERS
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert store.topics() == {"T": {0: (0, 22)}, "U": {0: (0, 1)}}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_a_broker_is_told_by_its_lock_behind_an_open_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 error: BaseException) -> None:  # fmt: skip
    path = tmp_path / "s"
    make(path, dataclasses.replace(CONFIG, rocketmq_version="4.9.8"))
    crash(path)
    with monkeypatch.context() as patched:
        patched.setattr(rmq.recovery, "cut_queues", mock.Mock(side_effect=error))
        with pytest.raises(type(error)):
            rmq.open(path, "r+")
    assert crash_of(StorePaths(path)) is Crash.OURS
    run_broker(path, [ZEROS, rmq.Message("T", b"21")], abort="")
    assert crash_of(StorePaths(path)) is Crash.BROKERS


@pytest.mark.parametrize("is_open", [False, True])
def test_a_writer_killed_amid_its_owner_file_leaves_the_time_that_it_tells(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:  # fmt: skip
    """Edges: when it is announced; when the log is recovered."""
    def sync(directory: Path) -> None:
        if owner.exists() and json.loads(owner.read_text())["open"] is is_open:
            kill()

    path, owner = tmp_path / "s", tmp_path / "s/rmq/owner"
    make(path)
    with monkeypatch.context() as patched:
        patched.setattr("rmq.segment.sync_directory", sync)
        killed(lambda: rmq.open(path, "r+"))
    assert json.loads(owner.read_text())["open"] is is_open
    assert owner.stat().st_mtime_ns == json.loads(owner.read_text())["written"]


@pytest.mark.parametrize("copy", [shutil.copy, shutil.copy2])
def test_a_copy_of_our_crash_is_one(tmp_path: Path, copy: Callable[[str, str], None]) -> None:
    """Edge: with times and without."""
    make(tmp_path / "s")
    crash(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "copy", copy_function=copy)
    assert crash_of(StorePaths(tmp_path / "copy")) is Crash.OURS


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
@pytest.mark.parametrize("last", [[], [rmq.Message("T", b"21")]])
def test_an_open_that_is_killed_leaves_a_closed_store_closed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: list[rmq.Message], version: str) -> None:  # fmt: skip
    """A broker closed it: its last message may end with zeros, too."""
    path = tmp_path / "s"
    make(path, dataclasses.replace(CONFIG, rocketmq_version=version))
    run_broker(path, [rmq.Message("T", b"20"), ZEROS, *last], is_closed=True)
    for at in ("recovery.find_end", "recovery.cut_queues", "recovery._continue", "store.keep_announced"):
        with monkeypatch.context() as patched:
            patched.setattr(f"rmq.{at}", kill)
            killed(lambda: rmq.open(path, "r+"))
        assert crash_of(StorePaths(path)) is Crash.OPENING
        with rmq.open(path) as store:
            assert store.topics() == {"T": {0: (0, 22 + len(last))}}
    with rmq.open(path, "r+") as store:
        assert store.topics() == {"T": {0: (0, 22 + len(last))}}
        assert crash_of(StorePaths(path)) is Crash.OURS


def test_damage_in_a_closed_store_stops_the_open_behind_one_that_was_killed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = tmp_path / "s"
    make(path)
    placed = run_broker(path, [rmq.Message("T", b"%d" % i) for i in range(20, 40)], is_closed=True)
    put(path, b"!", placed[5] + 88)
    with monkeypatch.context() as patched:
        patched.setattr(rmq.recovery, "find_end", kill)
        killed(lambda: rmq.open(path, "r+"))
    with pytest.raises(rmq.CorruptFileError) as error:
        rmq.open(path, "r+")
    assert (error.value.path, error.value.offset) == (str(path / LOG), placed[5])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_last_segment_that_is_lost_behind_our_mark_stops_the_open(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:  # fmt: skip
    """A broker closed it, its queues and its checkpoint tell; also behind an open that was killed."""
    path, size = tmp_path / "s", 1 << 14
    make(path, dataclasses.replace(CONFIG, mapped_file_size_commit_log=size))
    times = count(START + 30_000)
    with rmq.open(path, "r+", clock=lambda: next(times)) as store:
        while store.max_phy_offset < size - 900:
            store.put(rmq.Message("T", bytes(100)))
        expected = store.topics()
    run_broker(path, [rmq.Message("T", bytes(1000))] * 5, is_closed=True)
    (path / "commitlog" / f"{size:020d}").unlink()
    if is_killed:
        with monkeypatch.context() as patched:
            patched.setattr("rmq.store.recover", kill)
            killed(lambda: rmq.open(path, "r+"))
        assert crash_of(StorePaths(path)) is Crash.OPENING
    with rmq.open(path) as store:
        assert len(store.pull("T", 0, 0, 1000).messages) == expected["T"][0][1]
        with pytest.raises(rmq.CorruptFileError, match=f"{size:020d}: byte 0: segment is missing"):
            store.scan().read_all()
    with pytest.raises(rmq.CorruptFileError, match=f"{size:020d}: byte 0: segment is missing"):
        rmq.open(path, "r+")
    with rmq.open(path, "r+", repair=True) as store:
        assert store.topics() == expected


def test_an_open_that_is_killed_keeps_a_broker_s_geometry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store that was never opened before: the one index file, which tells it, is derived again."""
    path = tmp_path / "s"
    make(path)
    shutil.rmtree(path / "rmq")
    for at in ("store.recover", "recovery._continue"):
        with monkeypatch.context() as patched:
            patched.setattr(f"rmq.{at}", kill)
            killed(lambda: rmq.open(path, "r+"))
    assert list((path / "index").iterdir()) == []
    for _ in range(2):
        with rmq.open(path, "r+") as store:
            assert (store.config.max_hash_slot_num, store.config.max_index_num) == (97, 500)
            assert [found.queue_offset for found in store.query("T", "k7")] == [7]
    assert {file.stat().st_size for file in (path / "index").iterdir()} == {40 + 97 * 4 + 500 * 20}


def test_an_open_that_fails_leaves_a_broker_s_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    make(path)
    shutil.rmtree(path / "rmq")
    with monkeypatch.context() as patched:
        patched.setattr(rmq.recovery, "cut_queues", mock.Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
        with pytest.raises(OSError, match="disk full"):
            rmq.open(path, "r+")
    assert not (path / "abort").exists()
    assert not (path / "rmq/meta.json").exists()
    with rmq.open(path) as store:
        assert store.info().written_by == "RocketMQ"


def test_a_message_below_the_mark_is_no_torn_one(tmp_path: Path) -> None:
    """A broker's of many zeros, which our writer took over; another broker put nothing before it was killed."""
    path = tmp_path / "s"
    make(path)
    run_broker(path, [ZEROS], is_closed=True)
    with rmq.open(path, "r+"):
        pass
    (path / "abort").write_text("4711")
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert store.topics() == {"T": {0: (0, 21)}}


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
def test_a_writer_killed_before_it_makes_abort_is_told_from_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      version: str) -> None:  # fmt: skip
    path, config = tmp_path / "s", dataclasses.replace(CONFIG, rocketmq_version=version)
    make(path, config)
    crash(path)
    with monkeypatch.context() as patched:
        patched.setattr("rmq.lock.write_marker", kill)
        killed(lambda: rmq.open(path, "r+"))
    assert crash_of(StorePaths(path)) is Crash.OURS


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"aborts": 5}', b"9" * 9999])
def test_an_owner_file_that_nobody_understands_tells_of_another(tmp_path: Path, content: bytes) -> None:
    make(tmp_path / "s")
    (tmp_path / "s/abort").write_bytes(b"4711")
    (tmp_path / "s/rmq/owner").write_bytes(content)
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.topics() == {"T": {0: (0, 20)}}


# ---- queue files that outlived the log -------------------------------------------------------------------------


def lose_tail(path: Path, at: int) -> None:
    """Power loss took the log from there on, not the queues' files."""
    put(path, bytes(4096), at)
    checkpoint = Checkpoint(path / "checkpoint")
    checkpoint.physic_msg_timestamp = checkpoint.logics_msg_timestamp = START + 19_000
    checkpoint.flush()


@pytest.mark.parametrize("lost_index", [False, True])
def test_units_that_outlived_a_broker_s_log_do_not_count(tmp_path: Path, lost_index: bool) -> None:
    path = tmp_path / "s"
    make(path)
    lose_tail(path, run_broker(path, [rmq.Message("T", b"lost")] * 5, is_closed=True)[0])
    if lost_index:
        shutil.rmtree(path / "index")
    with rmq.open(path) as store:
        assert (store.topics(), store.pull("T", 0, 20).status.name) == ({"T": {0: (0, 20)}}, "OFFSET_OVERFLOW_ONE")
    with rmq.open(path, "r+") as store:
        assert store.put(rmq.Message("T", b"20")).queue_offset == 20
    with rmq.open(path) as store:
        assert [message.body for message in store.pull("T", 0, 18, 32).messages] == [b"18", b"19", b"20"]
        assert [message.queue_offset for message in store.query("T", "k7")] == [7]
    assert list(rmq.verify(path)) == []


def test_damage_that_begins_where_our_mark_ends_is_judged_alike_by_readers_and_recovery(tmp_path: Path) -> None:
    """A broker whose clock had been set back was killed behind it: all that follows is older, as behind a cut."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: START) as store:
        store.put(rmq.Message("T", b"kept"))
        end = store.max_phy_offset
    kept = {name: (path / name).read_bytes() for name in ("rmq/marks", "rmq/manifest.json")}
    with rmq.open(path, "r+", config=CONFIG, clock=lambda: START - 1000) as store:
        store.put_many([rmq.Message("T", b"damaged"), rmq.Message("T", b"older")])
    for name, data in kept.items():
        (path / name).write_bytes(data)
    (path / "abort").write_text("4711")
    os.utime(path / "lock")
    put(path, bytes(4), end + 4)
    with rmq.open(path, config=CONFIG) as reader:
        answers = reader.max_phy_offset, reader.scan().read_all()["body"].to_pylist()
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert (store.max_phy_offset, store.scan().read_all()["body"].to_pylist()) == answers == (end, [b"kept"])


def test_the_checkpoint_of_a_closed_store_tells_of_no_message_that_the_log_lost_behind_our_mark(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path)
    put(path, bytes(4096), run_broker(path, [rmq.Message("T", b"lost")] * 3, is_closed=True)[0])
    with rmq.open(path, "r+") as store:
        assert store.topics() == {"T": {0: (0, 20)}}
    assert Checkpoint(path / "checkpoint").physic_msg_timestamp <= START + 19_000
    assert list(rmq.verify(path)) == []
