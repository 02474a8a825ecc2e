# SPDX-License-Identifier: Apache-2.0
"""Consumers: what they poll, in which order, where they go on; damage, cleaning, crashes and kills meanwhile."""

from __future__ import annotations

import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES
from forks import error_in_child
from test_groups import CONFIG, filled, keep

import rmq
from rmq import queuereading
from rmq.pull import pull_from
from rmq.retention import Retention

SLOW = rmq.StoreConfig(**SIZES, flush_interval_commit_log=10**9)


def bodies(messages: list[rmq.StoredMessage]) -> list[int]:
    return [int(message.body) for message in messages]


def break_crc(path: Path, place: int) -> None:
    """Damage a message's body CRC."""
    size = SIZES["mapped_file_size_commit_log"]
    with open(path / "commitlog" / f"{place - place % size:020d}", "r+b") as file:
        file.seek(place % size + 8)
        file.write(b"\xff")


# ---- consumers -------------------------------------------------------------------------------------------


def test_polls_give_each_message_once_queues_in_their_order(tmp_path: Path) -> None:
    rng = random.Random(1)
    with rmq.open(filled(tmp_path / "s", 200, 7), "r+") as store:
        consumer, found = rmq.Consumer(store, "g", "Orders"), []
        while messages := consumer.poll(rng.randrange(1, 9)):
            found += messages
    for queue_id in range(7):
        assert bodies([message for message in found if message.queue_id == queue_id]) == [*range(queue_id, 200, 7)]
    assert len(found) == 200


def test_every_queue_has_its_turn(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s", 300, 3), "r+") as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        assert [consumer.poll(10)[0].queue_id for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_next_process_goes_on_where_the_group_committed(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+") as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        first = consumer.poll(12)
        consumer.commit()
        assert consumer.poll(5), "not committed"
        assert len(rmq.Consumer(store, "other", "Orders").poll(100)) == 30
    with rmq.open(path, "r+") as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        rest = consumer.poll(100)
        assert sorted(bodies(first) + bodies(rest)) == [*range(30)]
        assert consumer.positions == {0: 10, 1: 10, 2: 10}
        assert consumer.poll() == []


def test_new_messages_queues_and_topics_come_too(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        consumer = rmq.Consumer(store, "g", "T", consume_from="last")
        assert consumer.poll() == []
        consumer.commit()
        for number in range(5):
            store.put(rmq.Message("T", b"%d" % number, queue_id=number))
        assert sorted(bodies(consumer.poll())) == [0, 1, 2, 3, 4]
        store.put(rmq.Message("T", b"5", queue_id=9))
        store.put(rmq.Message("T", b"6", queue_id=2))
        assert bodies(consumer.poll()) == [6, 5]


def test_a_group_begins_where_it_is_told(tmp_path: Path) -> None:
    times = iter(range(1000, 10_000, 10))
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=lambda: next(times)) as store:
        for number in range(20):
            store.put(rmq.Message("T", b"%d" % number, queue_id=number % 2))

        def first(consume_from: Any) -> list[int]:
            return sorted(bodies(rmq.Consumer(store, "g", "T", consume_from=consume_from).poll(100)))

        assert first("first") == [*range(20)]
        assert first("last") == []
        assert first(1105) == [*range(11, 20)]
        store.commit_offsets("g", "T", {0: 9})
        assert first("last") == [18]
        assert first("first") == [*range(1, 19, 2), 18, 19]


def test_consumers_share_a_group_by_queues_of_their_own(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s", 90, 3), "r+") as store:
        consumers = [rmq.Consumer(store, "g", "Orders", queue_ids=ids) for ids in ([0, 2], [1])]
        found: list[list[int]] = [[], []]

        def consume(number: int) -> None:
            while messages := consumers[number].poll(4):
                found[number] += bodies(messages)
                consumers[number].commit()

        threads = [threading.Thread(target=consume, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found[0]) == [number for number in range(90) if number % 3 != 1]
        assert sorted(found[1]) == [*range(1, 90, 3)]
        assert store.groups() == {"g": {"Orders": {0: 30, 1: 30, 2: 30}}}
        with pytest.raises(ValueError, match="queue_id 1 is not one of"):
            consumers[0].seek(1, 0)


def test_of_tags_only_those_are_polled_and_the_others_consumed(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s", 100), "r+") as store:
        consumer = rmq.Consumer(store, "g", "Orders", tags="paid || sent")
        assert sorted(bodies(consumer.poll(7) + consumer.poll(100))) == [*range(0, 100, 5)]
        consumer.commit()
        assert store.groups() == {"g": {"Orders": {0: 34, 1: 33, 2: 33}}}


def test_seek_goes_back_and_forth(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s", 30, 1), "r+") as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        consumer.seek(0, 25)
        assert bodies(consumer.poll()) == [25, 26, 27, 28, 29]
        consumer.seek(0, 28)
        assert bodies(consumer.poll()) == [28, 29]
        bad: list[tuple[tuple[Any, Any], type[Exception]]] = [
            ((0, -1), ValueError), ((0, 31), ValueError), ((7, 1), ValueError), ((0, 2**63), ValueError),
            (("0", 1), TypeError), ((-1, 0), ValueError), ((2**31, 0), ValueError)]  # fmt: skip
        with pytest.raises(TypeError, match="queue_ids must be a sequence of ints, got int"):
            rmq.Consumer(store, "g", "Orders", queue_ids=0)  # type: ignore[arg-type]
        for wrong, kind in bad:
            with pytest.raises(kind):
                consumer.seek(*wrong)


def test_a_poll_waits_for_the_first_message_and_no_longer_than_told(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        consumer = rmq.Consumer(store, "g", "T")
        began = time.monotonic()
        assert consumer.poll(timeout=0.2) == []
        assert time.monotonic() - began >= 0.2
        timer = threading.Timer(0.1, store.put, (rmq.Message("T", b"7"),))
        timer.start()
        assert bodies(consumer.poll(timeout=600)) == [7]
        timer.join()
        store.put(rmq.Message("T", b"8"))
        assert bodies(consumer.poll(timeout=10**400)) == [8]
        for wrong, kind in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)):
            with pytest.raises(kind, match="timeout"):
                consumer.poll(timeout=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="limit"):
            consumer.poll(0)


def test_wrong_arguments_of_a_consumer(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s")) as store:
        bad: list[tuple[Any, Any, type[Exception]]] = [
            ((tmp_path, "g", "T"), {}, TypeError), ((store, "g@", "T"), {}, ValueError),
            ((store, "g", 5), {}, TypeError), ((store, "g", "T"), {"tags": 5}, TypeError),
            ((store, "g", "T"), {"queue_ids": ["0"]}, TypeError), ((store, "g", "T"), {"queue_ids": 5}, TypeError),
            ((store, "g", "T"), {"queue_ids": [-1]}, ValueError),
            ((store, "g", "T"), {"consume_from": None}, TypeError),
            ((store, "g", "Orders"), {"consume_from": "end"}, ValueError),
        ]  # fmt: skip
        for arguments, options, kind in bad:
            with pytest.raises(kind):
                rmq.Consumer(*arguments, **options)
    with pytest.raises(rmq.StoreClosedError):
        rmq.Consumer(store, "g", "Orders")


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_consumer_of_a_closed_store_says_so(tmp_path: Path, mode: rmq.store.Mode) -> None:
    with rmq.open(filled(tmp_path / "s"), mode) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        consumer.poll(1)
    for call in (consumer.poll, consumer.commit, lambda: consumer.seek(0, 1)):
        with pytest.raises(rmq.StoreClosedError):
            call()


def test_a_childs_consumer_waits_for_no_lock_of_the_parents(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s"), "r+") as store:
        consumer, answers = rmq.Consumer(store, "g", "Orders"), []

        def ask() -> None:
            answers.extend(error_in_child(call) for call in (consumer.poll, consumer.commit))

        thread = threading.Thread(target=ask)
        with store._put_lock:
            thread.start()
            thread.join()
    assert answers == ["StoreClosedError"] * 2


# ---- damage, cleaning, crashes -----------------------------------------------------------------------------


def test_a_damaged_message_stops_a_consumer_behind_all_before_it_and_a_seek_goes_on(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 30, 1)
    with rmq.open(path) as store:
        place = store.lookup(("Orders", 0, 5)).phy_offset
    break_crc(path, place)
    with rmq.open(path) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        assert bodies(consumer.poll()) == [0, 1, 2, 3, 4]
        with pytest.raises(rmq.CorruptFileError) as caught:
            consumer.poll()
        assert caught.value.__notes__ == ["Orders queue 0, queue offset 5"]
        assert consumer.positions == {0: 5}
        consumer.seek(0, 6)
        assert bodies(consumer.poll()) == [*range(6, 30)]


def test_damage_in_one_queue_keeps_nothing_from_another(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 30, 3)
    with rmq.open(path) as store:
        place = store.lookup(("Orders", 1, 0)).phy_offset
    break_crc(path, place)
    with rmq.open(path) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        assert bodies(consumer.poll(100)) == [*range(0, 30, 3)]
        with pytest.raises(rmq.CorruptFileError):
            consumer.poll(100)
        consumer.seek(1, 1)
        assert sorted(bodies(consumer.poll(100))) == sorted({*range(30)} - {*range(0, 30, 3), 1})


def test_what_was_cleaned_is_passed_over_and_a_queue_that_begins_anew_begins_at_0(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 200, 1)
    later = time.time_ns() // 10**6 + 10**9
    with rmq.open(path, "r+") as store:
        slow, quick = (rmq.Consumer(store, group, "Orders") for group in ("slow", "quick"))
        assert bodies(slow.poll(1)) == [0]
        assert len(quick.poll(1000)) == 200
        quick.commit()
        for number in range(100):
            store.put(rmq.Message("Other", b"x" * 100, keys=str(number)))
        store.clean(later, limit=None, expired_queues=True)
        assert "Orders" not in store.topics()
        assert slow.poll() == []
        for number in (7, 8):
            store.put(rmq.Message("Orders", b"%d" % number))
        assert bodies(slow.poll()) == [7, 8]
        assert bodies(quick.poll()) == [7, 8]
        assert bodies(rmq.Consumer(store, "quick", "Orders").poll()) == [7, 8]


def expired(store: rmq.Store) -> None:
    for _ in range(300):
        store.put(rmq.Message("Other", b"x" * 200))
    store.clean(time.time_ns() // 10**6 + 10**9, limit=None, expired_queues=True)
    assert "Orders" not in store.topics()


def put(store: rmq.Store, *numbers: int) -> None:
    for number in numbers:
        store.put(rmq.Message("Orders", b"%d" % number))


@pytest.mark.parametrize("commits", [False, True])
def test_a_consumer_misses_nothing_of_a_queue_that_began_anew_and_grew(tmp_path: Path, commits: bool) -> None:
    with rmq.open(filled(tmp_path / "s", 20, 1), "r+", config=SLOW) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        consumer.poll(5)
        expired(store)
        put(store, *range(100, 108))
        if commits:
            consumer.commit()
            consumer = rmq.Consumer(store, "g", "Orders")
        assert bodies(consumer.poll()) == [*range(100, 108)]


def test_a_poll_that_failed_forgets_no_queue_that_began_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(filled(tmp_path / "s", 20, 1), "r+", config=SLOW) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        consumer.poll(5)
        expired(store)
        put(store, *range(100, 108))

        def failing(*arguments: Any, **options: Any) -> None:
            raise OSError("once")

        with monkeypatch.context() as patch:
            patch.setattr(rmq.Store, "_pull_behind", failing)
            with pytest.raises(OSError, match="once"):
                consumer.poll()
        assert bodies(consumer.poll()) == [*range(100, 108)]


def test_a_commit_after_a_queue_went_is_no_error(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s", 20, 1), "r+", config=SLOW) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        consumer.poll(5)
        expired(store)
        consumer.commit()


def amid_removal(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """A cleaning is about to remove a queue when another thread does this."""
    remove = Retention._remove_queue

    def acted(*arguments: Any) -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        remove(*arguments)

    monkeypatch.setattr(Retention, "_remove_queue", acted)


def test_what_is_committed_while_a_queue_goes_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = filled(tmp_path / "s", 40, 2), []
    with rmq.open(path, "r+", config=SLOW) as store:
        consumer = rmq.Consumer(store, "g", "Orders")
        assert len(consumer.poll(100)) == 40

        def commit() -> None:
            store._offsets.commit("g", "Orders", lambda: {0: 20, 1: 20})  # as a commit that looked before
            done.append(store.groups())

        amid_removal(monkeypatch, commit)
        expired(store)
        assert done == [{"g": {"Orders": {0: 0, 1: 0}}}] * 2
    with rmq.open(path, "r+") as store:
        put(store, *range(100, 130))
        assert bodies(rmq.Consumer(store, "g", "Orders").poll(100)) == [*range(100, 130)]


def test_a_queue_that_begins_anew_amid_a_poll_is_polled_from_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(filled(tmp_path / "s", 20, 1), "r+", config=SLOW) as store:
        for moment in ("before", "behind"):
            consumer, begun = rmq.Consumer(store, moment, "Orders"), []
            old = bodies(consumer.poll(5))

            def pull(*arguments: Any, moment: str = moment, begun: list[int] = begun) -> Any:
                page = pull_from(*arguments) if moment == "behind" else None
                if not begun:
                    begun.append(store.topics()["Orders"][0][1])
                    expired(store)
                    put(store, *range(100, 130))
                return page if moment == "behind" else pull_from(*arguments)

            monkeypatch.setattr(queuereading, "pull_from", pull)
            assert bodies(consumer.poll(7)) == [*range(100, 107)], (moment, old)
            assert bodies(consumer.poll(100)) == [*range(107, 130)]
            monkeypatch.undo()


def test_no_queue_goes_whose_offsets_cannot_be_taken_back(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as store:
        store.commit_offsets("g", "Orders", {0: 20})
        store.flush()
        file = path / "config/consumerOffset.json"
        shutil.copy(file, file.with_name(file.name + ".bak"))  # a broker's that died while it wrote
        file.write_bytes(b"{")
        with pytest.raises(rmq.CorruptFileError, match="consumerOffset"):
            expired(store)
        assert store.topics()["Orders"][0][1] == 20
        file.unlink()
        store.commit_offsets("g", "Orders", {0: 19})
        assert store.groups() == {"g": {"Orders": {0: 19}}}, "it counts again"
        expired(store)
        put(store, *range(100, 108))
        assert bodies(rmq.Consumer(store, "g", "Orders").poll()) == [*range(100, 108)]


def test_a_kill_after_a_queue_went_leaves_nothing_unseen(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as store:
        store.commit_offsets("g", "Orders", {0: 20})
        expired(store)
        put(store, *range(100, 130))
        shutil.copytree(path, tmp_path / "killed")
    with rmq.open(tmp_path / "killed", "r+") as store:
        assert bodies(rmq.Consumer(store, "g", "Orders").poll(100)) == [*range(100, 130)]


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_queues_that_were_lost_and_begin_at_0_are_consumed_from_there(tmp_path: Path, is_rebuilt: bool) -> None:
    path = filled(tmp_path / "s", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as store:
        store.commit_offsets("g", "Orders", {0: 20})
        for _ in range(300):
            store.put(rmq.Message("Other", b"x" * 200))
        store.clean(time.time_ns() // 10**6 + 10**9, limit=None)
    shutil.rmtree(path / "consumequeue")
    if is_rebuilt:
        rmq.rebuild(path, processes=1)
    with rmq.open(path, "r+") as store:
        put(store, *range(100, 108))
        assert bodies(rmq.Consumer(store, "g", "Orders").poll()) == [*range(100, 108)]


def test_after_a_crash_nobody_has_consumed_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path / "s", 30, 3)
    table = '{"Orders@g":{0:10,1:12,2:3},"%LMQ%x@g":{0:9},"Gone@g":{0:4},"Orders@%LMQ%g":{1:12}}'
    file = keep(path, f'{{"offsetTable":{table}}}')
    (path / "abort").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "rmq"), rmq.open(path, "r+") as store:
        assert store.groups() == {"%LMQ%g": {"Orders": {1: 10}},  # an ordinary group where no light queues are
                                  "g": {"%LMQ%x": {0: 9}, "Gone": {0: 0}, "Orders": {0: 10, 1: 10, 2: 3}}}  # fmt: skip
        store.put(rmq.Message("Orders", b"30", queue_id=1))
        assert 30 in bodies(rmq.Consumer(store, "g", "Orders").poll(100))
    assert "group g had consumed Orders queue 1 up to 12, which now ends at 10" in caplog.text
    assert json.loads(file.read_text())["offsetTable"]["Orders@g"] == {"0": 10, "1": 10, "2": 3}


def test_a_repair_that_cuts_the_log_cuts_what_was_consumed(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 30, 1)
    with rmq.open(path, "r+") as store:
        store.commit_offsets("g", "Orders", {0: 30})
        place = store.lookup(("Orders", 0, 20)).phy_offset
    break_crc(path, place)
    with rmq.open(path, "r+", repair=True) as store:
        assert store.groups() == {"g": {"Orders": {0: 20}}}
        store.put(rmq.Message("Orders", b"20"))
        assert bodies(rmq.Consumer(store, "g", "Orders").poll()) == [20]


def test_a_file_that_is_none_keeps_no_crashed_store_from_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path / "s")
    file = keep(path, b"{")
    (path / "abort").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "rmq"), rmq.open(path, "r+") as store:
        assert len(store.scan().read_all()) == 30
    assert "left as it is" in caplog.text
    assert file.read_bytes() == b"{"


KILLED = """
import sys, rmq
with rmq.open(sys.argv[1], "r+") as store:
    consumer = rmq.Consumer(store, "g", "Orders")
    print("ready", flush=True)
    number = 0
    while True:
        for _ in range(50):
            store.put(rmq.Message("Orders", b"%d" % (1000 + number), queue_id=number % 3))
            number += 1
        for message in consumer.poll(20):
            print(int(message.body), flush=True)
        consumer.commit()
"""


@pytest.mark.kill
def test_a_killed_consumer_gets_again_what_was_not_flushed_and_misses_nothing(tmp_path: Path) -> None:
    path, rng = filled(tmp_path / "s"), random.Random(5)
    handed: set[int] = set()
    for _ in range(10):
        command = [sys.executable, "-c", KILLED, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.random())
            process.send_signal(signal.SIGKILL)
            words = process.stdout.read().split("\n")
        handed |= {int(word) for word in words[:-1]}
        with rmq.open(path) as store:
            queues = store.topics()["Orders"]
            for queue_id, place in store.groups().get("g", {}).get("Orders", {}).items():
                assert place <= queues[queue_id][1]
                before = store.pull("Orders", queue_id, 0, place + 1).messages[:place]
                assert {*bodies(before)} <= handed
