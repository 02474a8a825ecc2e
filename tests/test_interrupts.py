"""KeyboardInterrupt at every place of every call where Python lets a signal in: the store goes on as if nothing was."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import oracle
import pytest
import workload
from test_syncs import Disk
from workload import message

import rmq
import rmq.groupcommit
from rmq.consumequeue import ConsumeQueue
from rmq.filecache import FileCache
from rmq.groupcommit import GroupCommit
from rmq.sleeper import Sleeper

pytestmark = pytest.mark.slow

PACKAGE = str(Path(rmq.__file__).parent)
FAR = 2**31 - 1  # ms to the next timed flush


@pytest.fixture(autouse=True)
def syncs_count_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a sync served are awaited, as behind one of a disk: these places are met too."""
    monkeypatch.setattr(rmq.groupcommit, "LEAST_SOON_S", 0.0)


def is_within(frame: FrameType | None, name: str) -> bool:
    """Whether a function of that name is running, at the frame or below it."""
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class Interrupter:
    """Raises KeyboardInterrupt at one of the places where the interpreter looks for signals: at the begin of a function
    of rmq, and behind each C function that such a one calls; not in __del__, where Python drops what is raised."""

    def __init__(self, number: int, folder: str = PACKAGE) -> None:
        self.left = number
        self.where = ""
        self._folder = folder

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.left and event in ("call", "c_return") and frame.f_code.co_filename.startswith(self._folder):
            if is_within(frame, "__del__"):
                return
            self.left -= 1
            if not self.left:
                name = os.path.relpath(frame.f_code.co_filename, PACKAGE)
                self.where = f"{event} {name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call ended without reaching the place."""
        profile = self._profile  # held here: Python 3.11.2 may call it once more after it let go of it
        sys.setprofile(profile)
        try:
            call()
        except KeyboardInterrupt:
            return False
        finally:
            sys.setprofile(None)
        return True


def everywhere(call: Callable[[], Any], after: Callable[[str], None], step: int = 1) -> int:
    """Interrupt a call at its first place, its second (or `step` further), and so on until it ends; `after` each."""
    number = 1 - step
    is_done = False
    while not is_done:
        number += step
        interrupter = Interrupter(number)
        is_done = interrupter.run(call)
        after(interrupter.where)
    return number


class Model:
    """A store, and the numbers that calls put: those of a call that was interrupted may be there, from its first on."""

    def __init__(self, store: rmq.Store) -> None:
        self.store = store
        self.number = 0
        self.sure: set[int] = set()
        self.seen = workload.Seen()

    def put(self, count: int, call: Callable[[range], Any]) -> Callable[[], None]:
        def put() -> None:
            numbers = range(self.number, self.number + count)
            self.number += count
            call(numbers)
            self.sure.update(numbers)

        return put

    def check(self, where: str) -> None:
        """The store takes one more, holds all that is sure, whole and in order, and answers all questions alike."""
        try:
            self.put(1, lambda numbers: self.store.put(message(numbers[0])))()
            self.seen.read_on(self.store)
            missing = self.sure - set(self.seen.places)
            assert not missing, f"missing: {sorted(missing)[:5]}"
            self.seen.check(self.store, self.number - 1)
            self.store.flush()
        except Exception as error:
            error.add_note(f"after an interrupt at {where}")
            raise


def put_one(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    return 1, lambda numbers: store.put(message(numbers[0]))


def put_twice(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    """The second goes the short way, when its segment has room."""
    return 2, lambda numbers: [store.put(message(n)) for n in numbers]


def put_many(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    return 70, lambda numbers: store.put_many([message(n) for n in numbers])


def put_batch(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    return 5, lambda numbers: store.put_batch([message(n, workload.BATCH_QUEUE) for n in numbers])


def put_and_read(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    """Each call makes queue files, some an index file: dispatch is under way when the interrupt comes."""

    def call(numbers: range) -> None:
        store.put_many(list(map(message, numbers)))
        store.topics()

    return 9, call


def flush(store: rmq.Store) -> tuple[int, Callable[[range], Any]]:
    def call(numbers: range) -> None:
        store.put_many(list(map(message, numbers)))
        store.flush()

    return 9, call


@pytest.mark.parametrize(("what", "kind"), [
    *itertools.product((put_one, put_twice, put_many, put_batch, put_and_read, flush), ("ASYNC_FLUSH", "SYNC_FLUSH")),
    (put_many, workload.WRITTEN)])  # fmt: skip
def test_an_interrupted_put_leaves_a_store_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, kind: str
) -> None:
    if kind == workload.WRITTEN:
        monkeypatch.setattr("rmq.commitlog.WRITTEN_FROM", workload.WRITTEN_SIZE)
        kind = "ASYNC_FLUSH"
    entries = 5000 if what is flush else 60  # a flush has one more place for each index file
    config = workload.config(flush_interval_commit_log=FAR, flush_disk_type=kind, max_index_num=entries,
                             mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=40)  # fmt: skip
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        model = Model(store)
        assert everywhere(model.put(*what(store)), model.check) > 20
    assert oracle.check_store(tmp_path / "s", 100, entries) == []
    with rmq.open(tmp_path / "s", "r+") as again:
        again.put(message(model.number))
        seen = workload.Seen()
        seen.read_on(again)
        assert seen.places.keys() == {*model.seen.places, model.number}
    assert oracle.check_store(tmp_path / "s", 100, entries) == []


def test_what_an_interrupted_flush_left_is_on_disk_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    config = workload.config(flush_interval_commit_log=FAR, flush_disk_type="SYNC_FLUSH")
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        model = Model(store)
        lazily = {"properties": {"WAIT": "false"}}

        def put_and_flush(numbers: range) -> None:
            store.put_many([rmq.Message("T0", workload.body_of(n), **lazily) for n in numbers])
            store.flush()

        def check(where: str) -> None:
            number = model.number
            model.number += 1
            assert disk.holds(store, store.put(message(number))), where
            if number % 7 == 0:
                store.flush()
                with rmq.open(disk.image(tmp_path / "s", tmp_path / f"image{number}")) as image:
                    assert image.max_phy_offset == store.max_phy_offset, where

        everywhere(model.put(40, put_and_flush), check)
        store.flush()
        image = disk.image(tmp_path / "s", tmp_path / "image")
        assert oracle.check_store(image, 100, 500) == []
        assert oracle.read_records(image) == oracle.read_records(tmp_path / "s")


def test_topics_of_an_interrupted_flush_are_written_by_the_next(tmp_path: Path) -> None:
    number, is_done = 0, False
    while not is_done:
        number += 1
        path = tmp_path / str(number)
        with rmq.open(path, "a", config=workload.config(flush_interval_commit_log=FAR)) as store:
            store.put(rmq.Message("T", b""))
            interrupter = Interrupter(number)
            is_done = interrupter.run(store.flush)
            store.flush()
            topics = json.loads((path / "config/topics.json").read_text())["topicConfigTable"]
            queues = json.loads((path / "rmq/manifest.json").read_text())["queues"]
            assert ["T"] == list(topics) == [topic for topic, *_ in queues], interrupter.where
        shutil.rmtree(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that hit a generator's end
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_an_interrupted_question_leaves_a_store_that_answers(tmp_path: Path, mode: str) -> None:
    with rmq.open(tmp_path / "s", "a", config=workload.config()) as store:
        store.put_many(map(message, range(300)))
    seen = workload.Seen()
    with rmq.open(tmp_path / "s", mode) as store:
        seen.read_on(store)
        questions = [
            lambda: store.query("T0", "k0"),
            lambda: store.query_many("T0", ["k0", "ten1"]),
            lambda: store.pull("T0"),
            lambda: store.lookup("u0"),
            lambda: store.scan(batch_rows=100).read_all(),
            lambda: store.search_offset("T0", 0, 0),
            lambda: store.topics(),
        ]
        for question in questions:
            assert everywhere(question, lambda where: seen.check(store, 0), 7) > 5


def test_units_that_a_reader_took_before_it_was_interrupted_are_taken_once(tmp_path: Path) -> None:
    """In memory they are, and the queue's end does not count them yet."""
    units = b"".join(struct.pack(">qiq", 100 * number, 100, 0) for number in range(9))
    queue = ConsumeQueue(tmp_path, "T", 0, 200, FileCache(False), writable=False, is_exact=False)
    queue.append(0, units[:100])
    queue.max_offset = 2
    queue.append(2, units[40:])
    assert queue.read(0, 100)[0].tolist() == [*range(0, 900, 100)]


def test_a_second_close_does_what_an_interrupted_one_has_left(tmp_path: Path) -> None:
    """Of what holds lock and files, too."""
    is_done, number = False, 0
    while not is_done:
        number += 1
        store = rmq.open(tmp_path / "s", "a", config=workload.config())
        put = store.put(rmq.Message("T", b"%d" % number))
        interrupter = Interrupter(number, PACKAGE)
        is_done = interrupter.run(store.close)
        store.close()
        try:
            with rmq.open(tmp_path / "s", "r+") as again:
                assert again.pull("T", 0, put.queue_offset).messages[0].body == b"%d" % number
        except rmq.RmqError as error:
            error.add_note(f"after an interrupt at {interrupter.where}")
            raise
    assert number > 300


def test_an_interrupted_cleaning_leaves_queues_that_begin_with_the_log(tmp_path: Path) -> None:
    config = workload.config(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_index_num=60)
    with rmq.open(tmp_path / "whole", "x", config=config) as store:
        store.put_many([rmq.Message("T", bytes(300), queue_id=number % 3, keys="k") for number in range(100)])
    is_done, number = False, -4
    while not is_done and number < 5000:
        number += 5
        shutil.copytree(tmp_path / "whole", tmp_path / "s")
        with rmq.open(tmp_path / "s", "r+") as store:
            interrupter = Interrupter(number)
            is_done = interrupter.run(lambda store=store: store.clean(2 * 10**12, limit=3))
            low = {queue: bounds[0] for queue, bounds in store.topics()["T"].items()}
            found = {queue: store.pull("T", queue, low[queue], 1).messages[0].queue_offset for queue in low}
            assert low == found, interrupter.where
            store.clean(2 * 10**12, limit=3)
            segments = sorted(int(path.name) for path in (tmp_path / "s" / "commitlog").iterdir())
            assert store.min_phy_offset == segments[0], interrupter.where
            assert store.lookup(segments[0]).phy_offset == segments[0], interrupter.where
        shutil.rmtree(tmp_path / "s")
    assert is_done
    assert number > 200


class Interrupting:
    """A lock that the main thread is interrupted at where it takes it for the `number`th time."""

    def __init__(self, lock: Any, number: int) -> None:
        self.lock, self.left = lock, number

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(*error)

    def is_mine(self) -> bool:
        return bool(self.lock.is_mine())


def test_a_sync_that_is_interrupted_before_it_tells_leaves_others_to_sync(tmp_path: Path) -> None:
    """A thread that waits for it finds out by itself, and the next put syncs."""
    config = rmq.StoreConfig(flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=FAR)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        store.put(message(0))
        flusher, group = store._flusher, store._flusher._group
        waiting, later = (threading.Thread(target=lambda n=n: store.put(message(n)), daemon=True) for n in (2, 3))
        real = flusher._sync_segments

        def while_another_waits(files: Any) -> None:
            flusher._sync_segments = real
            waiting.start()
            while not group._waiting:
                time.sleep(0.01)
            real(files)

        flusher._sync_segments = while_another_waits
        lock, group._lock = group._lock, Interrupting(group._lock, 2)
        with pytest.raises(KeyboardInterrupt):
            store.put(message(1))
        group._lock = lock
        later.start()
        for thread in (waiting, later):
            thread.join(10)
            assert not thread.is_alive()
        assert group.synced == store.max_phy_offset
    with rmq.open(tmp_path / "s") as store:
        assert len(store.scan().read_all()) == 4


def test_an_interrupt_anywhere_in_waiting_for_a_sync_harms_nobody_else() -> None:
    """In functions that the wait calls too; what comes out is that interrupt."""
    number, is_done = 0, False
    while not is_done:
        number += 1
        group, began, failed = GroupCommit(0), threading.Event(), []

        def sync(group: GroupCommit = group, began: threading.Event = began, failed: list[Any] = failed) -> None:
            def work() -> int:
                began.set()
                time.sleep(0.02)
                return 10

            try:
                group.sync(10, work)
            except BaseException as error:
                failed.append(error)

        other = threading.Thread(target=sync, daemon=True)
        other.start()
        began.wait(10)
        interrupter = Interrupter(number, folder="")
        is_done = interrupter.run(lambda group=group: group.sync(10, lambda: 10))
        other.join(10)
        assert (other.is_alive(), failed, group.synced, group.is_mine()) == (False, [], 10, False)
        group.sync(20, lambda: 20)
        assert group.synced == 20
    assert number > 3


@pytest.mark.parametrize("is_awake", [False, True])
def test_an_interrupt_anywhere_in_waking_a_thread_leaves_it_to_be_woken(is_awake: bool) -> None:
    sleeper = Sleeper()

    def wake() -> None:
        if is_awake:
            sleeper.wake()
        sleeper.wake()

    def after(where: str) -> None:
        sleeper.wake()
        assert sleeper.sleep(0), f"not woken after an interrupt at {where}"
        assert not sleeper.sleep(0), f"woken twice after an interrupt at {where}"

    number = 1
    while not (interrupter := Interrupter(number, folder="")).run(wake):
        after(interrupter.where)
        number += 1
    assert number > 2
