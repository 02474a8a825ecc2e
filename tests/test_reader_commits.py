# SPDX-License-Identifier: Apache-2.0
"""Consumers in other processes than the one that writes: what they commit, beside it, beside each other, and alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Golden, copy_store
from forks import error_in_child, fork, in_child, lock_of_a_broker
from test_consumers import SLOW, amid_removal, bodies, expired, put
from test_groups import OF_5_3, filled, keep

import rmq
from rmq import consumeroffsets

LOCK = "rmq/offsets.lock"


def offsets_of(path: Path) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = json.loads((path / "config/consumerOffset.json").read_text())["offsetTable"]
    return table


def test_a_readers_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        first = consumer.poll(12)
        consumer.commit()
        assert offsets_of(path) == {"Orders@g": {"0": 10, "1": 2, "2": 0}}
        before = (path / "config/consumerOffset.json").stat()
        consumer.commit()
        reader.commit_offsets("h", "Orders", {})
        assert (path / "config/consumerOffset.json").stat() == before, "nothing new"
    with rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        assert sorted(bodies(first) + bodies(consumer.poll(100))) == [*range(30)]


def test_the_writer_and_a_reader_see_what_the_other_commits_and_keep_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        writer.commit_offsets("w", "Orders", {0: 1})
        reader.commit_offsets("r", "Orders", {1: 2})
        assert writer.groups() == {"r": {"Orders": {1: 2}}, "w": {"Orders": {0: 1}}}
        assert reader.groups() == {"r": {"Orders": {1: 2}}}, "of the writer's what was flushed"
        writer.flush()
        assert reader.groups() == writer.groups()
        reader.commit_offsets("w", "Orders", {2: 3})
        writer.commit_offsets("r", "Orders", {1: 4})
    assert offsets_of(path) == {"Orders@r": {"1": 4}, "Orders@w": {"0": 1, "2": 3}}


def test_what_the_writer_commits_again_after_a_reader_counts(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        writer.commit_offsets("g", "Orders", {0: 5})
        writer.flush()
        reader.commit_offsets("g", "Orders", {0: 7})
        writer.commit_offsets("g", "Orders", {0: 5})
        assert writer.groups() == {"g": {"Orders": {0: 5}}}
    assert offsets_of(path) == {"Orders@g": {"0": 5}}


def test_what_is_wrong_with_a_readers_commit_is_told_and_nothing_written(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path) as reader:
        with pytest.raises(ValueError, match="queue_offset 11 lies behind the end of Orders queue 1, 10"):
            reader.commit_offsets("g", "Orders", {0: 1, 1: 11})
        assert not (path / "config/consumerOffset.json").exists()
        file = keep(path, b"{")
        with pytest.raises(rmq.CorruptFileError, match=r"consumerOffset\.json: byte 0"):
            reader.commit_offsets("g", "Orders", {0: 1})
        assert file.read_bytes() == b"{"
    with pytest.raises(rmq.StoreClosedError):
        reader.commit_offsets("g", "Orders", {0: 1})


def test_what_else_the_file_holds_stays_when_a_reader_commits(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    keep(path, OF_5_3)
    with rmq.open(path) as reader:
        before = reader.groups()
        reader.commit_offsets("g1", "Orders", {1: 4})
        before["g1"]["Orders"][1] = 4
        assert reader.groups() == before
    assert json.loads((path / "config/consumerOffset.json").read_text())["groupTopicMap"]["g1"]


def test_beside_a_broker_a_reader_commits_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    (path / "abort").touch()
    with lock_of_a_broker(path), rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        assert len(consumer.poll(100)) == 30
        with pytest.raises(rmq.StoreReadOnlyError, match="a broker has the store"):
            consumer.commit()
    assert not (path / "config/consumerOffset.json").exists()


def test_a_brokers_store_at_rest_takes_a_readers_commits_and_is_sound(small_golden: Golden, tmp_path: Path) -> None:
    path = copy_store(small_golden.directory / "store", tmp_path / "s")
    with rmq.open(path) as reader:
        topic, queues = next(iter(reader.topics().items()))
        consumer = rmq.Consumer(reader, "g", topic)
        while consumer.poll(1000):
            pass
        consumer.commit()
        assert reader.groups()["g"] == {topic: {number: high for number, (_, high) in queues.items()}}
    assert rmq.verify(path) == []
    with rmq.open(path, "r+") as writer:
        assert rmq.Consumer(writer, "g", topic).poll() == []


def test_a_store_that_is_not_written_here_takes_no_commits(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    shutil.copytree(path / "consumequeue/Orders", path / "consumequeue/%LMQ%x")
    with rmq.open(path) as reader, pytest.raises(rmq.UnsupportedFormatError, match="LMQ"):
        reader.commit_offsets("g", "Orders", {0: 1})


def test_a_directory_that_may_not_be_changed_is_an_error_of_the_system(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    for place in (tmp_path, *tmp_path.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)

    def commit() -> None:
        with rmq.open(path) as reader:
            assert len(rmq.Consumer(reader, "g", "Orders").poll(100)) == 30
            reader.commit_offsets("g", "Orders", {0: 1})

    try:
        for place in tmp_path.parents[:3]:
            place.chmod(place.stat().st_mode | 0o055)
        assert error_in_child(commit, user=65534) == "PermissionError"
    finally:
        for place in (tmp_path, *tmp_path.rglob("*")):
            place.chmod(0o755 if place.is_dir() else 0o644)


# ---- one at a time ---------------------------------------------------------------------------------------


def test_who_stops_amid_a_commit_holds_up_others_for_a_time_and_no_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.05)
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        reader.commit_offsets("g", "Orders", {0: 1})
        with open(path / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            writer.commit_offsets("w", "Orders", {0: 2})
            put(writer, 30)
            for change in (lambda: reader.commit_offsets("g", "Orders", {0: 2}), writer.flush):
                with pytest.raises(BlockingIOError, match="held by another process") as caught:
                    change()
                assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, str(path / LOCK))
            put(writer, 31)
        writer.flush()
        reader.commit_offsets("g", "Orders", {0: 2})
    assert offsets_of(path) == {"Orders@g": {"0": 2}, "Orders@w": {"0": 2}}


def test_a_file_that_another_process_spoils_is_an_error_of_flush_alone(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+", config=SLOW) as writer:
        writer.commit_offsets("g", "Orders", {0: 1})
        writer.flush()
        writer.commit_offsets("g", "Orders", {0: 2})
        file = keep(path, b"{")
        put(writer, 30)
        with pytest.raises(rmq.CorruptFileError, match="consumerOffset"):
            writer.flush()
        assert file.read_bytes() == b"{"
        put(writer, 31)
        file.unlink()
    assert offsets_of(path) == {"Orders@g": {"0": 2}}
    with rmq.open(path) as reader:
        assert len(reader.scan().read_all()) == 32


@pytest.mark.slow
def test_processes_commit_beside_each_other_and_the_writer(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 300, 3)
    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=1)) as writer:

        def consume(queue_id: int) -> list[int]:
            found = []
            with rmq.open(path) as reader:
                consumer = rmq.Consumer(reader, "g", "Orders", queue_ids=[queue_id])
                while messages := consumer.poll(3):
                    found += bodies(messages)
                    consumer.commit()
            return found

        code = "import sys, rmq\n" "with rmq.open(sys.argv[1]) as reader:\n" \
            " consumer = rmq.Consumer(reader, 'g', 'Orders', queue_ids=[int(sys.argv[2])])\n" \
            " while messages := consumer.poll(3):\n  consumer.commit()"  # fmt: skip
        others = [subprocess.Popen([sys.executable, "-c", code, path, str(number)]) for number in (0, 1)]
        found = in_child(lambda: consume(2))
        for place in range(101):
            writer.commit_offsets("w", "Orders", {0: place})
            put(writer, place)
            time.sleep(0.001)
        assert [process.wait(60) for process in others] == [0, 0]
    assert found == [*range(2, 300, 3)]
    table = offsets_of(path)
    assert table.pop("Orders@w") == {"0": 100}
    assert list(table) == ["Orders@g"]
    assert table["Orders@g"].pop("0") >= 100
    assert table["Orders@g"] == {"1": 100, "2": 100}


@pytest.mark.kill
def test_a_killed_reader_leaves_a_file_that_is_whole_and_what_it_had_committed(tmp_path: Path) -> None:
    path, rng = filled(tmp_path / "s", 3000, 1), random.Random(7)
    code = "import sys, rmq\n" "with rmq.open(sys.argv[1]) as reader:\n" \
        " consumer = rmq.Consumer(reader, 'g', 'Orders')\n print(0, flush=True)\n" \
        " while messages := consumer.poll(1):\n  consumer.commit()\n" \
        "  print(consumer.positions[0], flush=True)"  # fmt: skip
    last = 0
    with rmq.open(path, "r+") as writer:
        for number in range(12):
            with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(rng.random() / 5)
                process.send_signal(signal.SIGKILL)
                told = [int(word) for word in process.stdout.read().split("\n")[:-1]]
            writer.commit_offsets("w", "Orders", {0: number})
            writer.flush()
            place = writer.groups()["g"]["Orders"][0]
            assert max([last, *told]) <= place <= max([last, *told]) + 1
            last = place
    assert last > 20


# ---- queues that begin anew, or are cut --------------------------------------------------------------------


def test_a_readers_consumer_misses_nothing_of_a_queue_that_began_anew_and_grew_over_its_place(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        polls, commits = (rmq.Consumer(reader, group, "Orders") for group in ("polls", "commits"))
        for consumer in (polls, commits):
            assert bodies(consumer.poll(5)) == [0, 1, 2, 3, 4]
        expired(writer)
        put(writer, *range(100, 108))
        commits.commit()
        assert reader.groups()["commits"] == {"Orders": {0: 0}}
        assert bodies(rmq.Consumer(reader, "commits", "Orders").poll()) == [*range(100, 108)]
        for consumer in (polls, commits):
            assert bodies(consumer.poll()) == [*range(100, 108)]


def test_a_reader_that_looked_amid_a_cleaning_sees_that_its_queue_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look at the log came before the cleaning, that at the manifest behind it."""
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        consumer.poll(100)
        at_files, goes_on = threading.Event(), threading.Event()
        amid_removal(monkeypatch, lambda: (at_files.set(), goes_on.wait()))
        cleaning, refresh = threading.Thread(target=expired, args=(writer,)), reader._refresh

        def looked() -> int:
            end = refresh()
            monkeypatch.setattr(reader, "_refresh", refresh)
            cleaning.start()
            at_files.wait()
            return end

        monkeypatch.setattr(reader, "_refresh", looked)
        for _ in range(2):
            reader.topics()
        goes_on.set()
        cleaning.join()
        assert "Orders" not in reader.topics()
        consumer.commit()
    assert offsets_of(path) == {"Orders@g": {"0": 0}}


def test_while_queues_go_no_reader_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = filled(tmp_path / "s", 20, 1), []
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        consumer.poll(100)
        consumer.commit()

        def commit() -> None:
            try:
                consumer.commit()
            except BlockingIOError:
                answers.append(offsets_of(path))

        monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.05)
        amid_removal(monkeypatch, commit)
        expired(writer)
        assert answers == [{"Orders@g": {"0": 0}}]
        consumer.commit()
        put(writer, *range(100, 130))
        assert bodies(rmq.Consumer(reader, "g", "Orders").poll(100)) == [*range(100, 130)]


def test_who_stops_amid_a_commit_keeps_queues_from_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.05)
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as writer:
        writer.commit_offsets("g", "Orders", {0: 20})
        writer.flush()
        with open(path / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(BlockingIOError):
                expired(writer)
        assert writer.topics()["Orders"][0][1] == 20
        expired(writer)
    assert offsets_of(path) == {"Orders@g": {"0": 0}}


def test_timed_flushes_wait_for_nobody_that_commits(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=1)) as writer:
        writer.commit_offsets("g", "Orders", {0: 1})
        writer.flush()
        with open(path / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            writer.commit_offsets("g", "Orders", {0: 2})
            began = time.monotonic()
            for number in range(20, 23):  # no flush of these is held up by the one before
                put(writer, number)
                while writer._flusher._flushed < writer.max_phy_offset:
                    time.sleep(0.01)
            assert time.monotonic() - began < consumeroffsets.WAIT_S
            assert offsets_of(path) == {"Orders@g": {"0": 1}}
        for _ in range(1000):
            if offsets_of(path) == {"Orders@g": {"0": 2}}:
                break
            time.sleep(0.01)
        assert offsets_of(path) == {"Orders@g": {"0": 2}}


def test_a_queue_that_begins_anew_while_a_consumer_is_made_is_consumed_from_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        reader.commit_offsets("g", "Orders", {0: 20})
        groups, asked = rmq.Store.groups, []

        def then_begun_anew(store: rmq.Store) -> Any:
            found = groups(store)
            if not asked:
                asked.append(found)
                expired(writer)
                put(writer, *range(100, 130))
            return found

        monkeypatch.setattr(rmq.Store, "groups", then_begun_anew)
        assert bodies(rmq.Consumer(reader, "g", "Orders").poll(100)) == [*range(100, 130)]


def test_a_reader_writes_nothing_where_its_store_was(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        consumer.poll(5)
        path.rename(tmp_path / "old")
        for begun in (False, True):
            if begun:
                filled(path)
            for commit in (consumer.commit, lambda: reader.commit_offsets("g", "Orders", {0: 1})):
                with pytest.raises(OSError, match="moved or replaced") as caught:
                    commit()
                assert caught.value.errno == errno.ESTALE
            assert path.exists() == begun
    assert not (path / "config/consumerOffset.json").exists()


def test_a_signal_handler_that_commits_amid_a_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(filled(tmp_path / "s")) as reader:
        write, nested = consumeroffsets.write_document, []

        def interrupted(*arguments: Any) -> None:
            with pytest.raises(RuntimeError, match="signal handler"):
                reader.commit_offsets("h", "Orders", {0: 1})
            nested.append(arguments)
            write(*arguments)

        monkeypatch.setattr(consumeroffsets, "write_document", interrupted)
        reader.commit_offsets("g", "Orders", {0: 1})
        assert (len(nested), reader.groups()) == (1, {"g": {"Orders": {0: 1}}})


def test_a_child_of_a_process_that_died_amid_a_commit_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "s")
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 60)
    (is_done, done) = os.pipe()

    def fork_and_die(*arguments: Any) -> None:
        fork(lambda: os.read(is_done, 1))
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        os.close(done)
        with rmq.open(path) as reader:
            consumeroffsets.write_document = fork_and_die  # type: ignore[assignment]
            reader.commit_offsets("g", "Orders", {0: 1})

    pid = fork(work)
    os.waitpid(pid, 0)
    with rmq.open(path) as reader:
        reader.commit_offsets("g", "Orders", {0: 2})
        assert reader.groups() == {"g": {"Orders": {0: 2}}}
    os.close(done)
    os.close(is_done)


def test_power_that_takes_messages_takes_what_a_reader_had_consumed_of_them(tmp_path: Path) -> None:
    path, cut = filled(tmp_path / "s", 20, 1), tmp_path / "cut"
    with rmq.open(path, "r+", config=SLOW) as writer:
        shutil.copytree(path, cut)
        put(writer, *range(20, 30))
        in_child(lambda: rmq.open(path).commit_offsets("g", "Orders", {0: 30}))
    shutil.copytree(path / "config", cut / "config", dirs_exist_ok=True)
    with rmq.open(cut) as reader:
        consumer = rmq.Consumer(reader, "g", "Orders")
        assert consumer.positions == {0: 20}
        with rmq.open(cut, "r+") as writer:
            assert writer.groups() == {"g": {"Orders": {0: 20}}}
            put(writer, 100)
            assert bodies(consumer.poll()) == [100]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_brokers_offsets_outside_of_a_queue_are_at_its_front_and_its_end(
    tmp_path: Path, mode: rmq.store.Mode
) -> None:
    path = filled(tmp_path / "s")
    keep(path, '{"offsetTable":{"Orders@g":{0:-1,1:9223372036854775807,2:3,7:5}}}')
    with rmq.open(path, mode) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        assert consumer.positions == {0: 0, 1: 10, 2: 3}
        assert len(consumer.poll(100)) == 17
        consumer.commit()
        assert store.groups() == {"g": {"Orders": {0: 10, 1: 10, 2: 10, 7: 5}}}


def test_the_lock_of_offsets_is_nobodys_file_to_follow(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    (path / LOCK).symlink_to("elsewhere")
    with rmq.open(path) as reader, pytest.raises(OSError, match=LOCK) as caught:
        reader.commit_offsets("g", "Orders", {0: 1})
    assert caught.value.errno == errno.ELOOP
    assert not (path / "rmq/elsewhere").exists()
    assert not (path / "config/consumerOffset.json").exists()
