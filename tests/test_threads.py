"""Threads on one Store, all calls at once, judged by a model; one sync for all that wait.

RMQ_THREADS_SECONDS sets how long the long form takes.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import workload
from workload import message

import rmq
from rmq.checkpoint import Checkpoint
from rmq.indexfile import IndexFile
from rmq.mappedfile import MappedFile

pytestmark = pytest.mark.synced

SECONDS = float(os.environ.get("RMQ_THREADS_SECONDS", "60"))
FAR = 2**31 - 1  # ms to the next timed flush


class Crew:
    """Eight threads on one store: each puts messages of its own numbers and asks about those of all."""

    def __init__(self, writer: rmq.Store, readers: list[rmq.Store], seed: int) -> None:
        self.writer, self.readers, self.seed = writer, readers, seed
        self.results: list[list[rmq.PutResult]] = [[] for _ in range(8)]  # by thread, by the number's rest
        self.faults: list[str] = []
        self.stop = threading.Event()

    def run(self, seconds: float) -> None:
        threads = [threading.Thread(target=self._guarded, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert self.faults == []

    def _guarded(self, thread: int) -> None:
        chance = random.Random(self.seed * 8 + thread)
        try:
            while not self.stop.is_set():
                self._put(thread, chance)
                for _ in range(3):
                    self._ask(thread, chance)
        except BaseException as error:
            import traceback

            self.faults.append(f"thread {thread}: {type(error).__name__}: {error} {traceback.format_exc(limit=-4)}")
            self.stop.set()

    def _put(self, thread: int, chance: random.Random) -> None:
        own = self.results[thread]
        first = thread * 1_000_000 + len(own)
        count = chance.choice([1, 1, 1, 5, 40])
        items = [message(n) for n in range(first, first + count)]
        results = [self.writer.put(items[0])] if count == 1 else list(self.writer.put_many(items))
        last = results[-1]
        assert self.writer.lookup(last.phy_offset).body == items[-1].body, "a put is not seen by its own thread"
        assert self.writer.query(last.topic, f"k{first + count - 1}")[0].phy_offset == last.phy_offset
        own += results
        if chance.random() < 0.05:
            self.writer.flush()

    def _ask(self, thread: int, chance: random.Random) -> None:
        """About something that was put before the question: the answer is that, and nothing that was never put."""
        store = chance.choice([self.writer, *self.readers])
        other = chance.randrange(8)
        before = [len(own) for own in self.results]
        if not before[other]:
            return
        at = chance.randrange(before[other])
        number, result = other * 1_000_000 + at, self.results[other][at]
        place = result.topic, result.queue_id, result.queue_offset
        what = chance.randrange(7)
        if what == 0:
            assert [m.phy_offset for m in store.query(result.topic, f"k{number}")] == [result.phy_offset]
        elif what == 1:
            keys = [f"k{number}", "no such key", f"ten{number // 10}"]
            table = store.query_many(result.topic, keys, limit=None).table
            rows = list(zip(table["key_index"].to_pylist(), table["phy_offset"].to_pylist(), strict=True))
            assert [phy_offset for index, phy_offset in rows if index < 2] == [result.phy_offset]
            assert (2, result.phy_offset) in rows
        elif what == 2:
            found = store.pull(*place, 30)
            assert found.messages[0].phy_offset == result.phy_offset
            assert [m.queue_offset for m in found.messages] == list(range(place[2], found.next_queue_offset))
            for item in found.messages:
                workload.number_of(item.body)
        elif what == 3:
            assert store.lookup(place).body == store.lookup(result.phy_offset).body == workload.body_of(number)
            if number % 3 == 0:
                assert store.lookup(f"u{number}").phy_offset == result.phy_offset
        elif what == 4:
            begin = chance.choice([0, result.phy_offset])
            table = store.scan(begin_phy_offset=begin, columns=["body", "phy_offset"]).read_all()
            numbers = [workload.number_of(body) for body in table["body"].to_pylist()]
            places = table["phy_offset"].to_pylist()
            assert result.phy_offset in set(places)
            assert places == sorted(set(places))
            for own in range(8):
                mine = [n for n in numbers if n // 1_000_000 == own]
                assert mine == list(range(mine[0], mine[-1] + 1)) if mine else True
                assert not mine or begin or mine[0] == own * 1_000_000
                assert not before[own] or begin or mine[-1] >= own * 1_000_000 + before[own] - 1
        elif what == 5:
            low, high = store.topics()[result.topic][result.queue_id]
            assert low == 0
            assert high > result.queue_offset
        else:
            assert store.search_offset(*place[:2], result.store_timestamp) <= result.queue_offset

    def check(self) -> None:
        """Everything put is there once, where its put said; each queue's order is that of its offsets."""
        model = {result.phy_offset: (thread * 1_000_000 + at, result) for thread, own in enumerate(self.results)
                 for at, result in enumerate(own)}  # fmt: skip
        assert len(model) == sum(map(len, self.results)) > 100
        for store in (self.writer, *self.readers):
            table = store.scan(columns=["body", "phy_offset", "queue_offset"]).read_all()
            assert table["phy_offset"].to_pylist() == sorted(model)
            assert list(map(workload.number_of, table["body"].to_pylist())) == [model[p][0] for p in sorted(model)]
            assert table["queue_offset"].to_pylist() == [model[p][1].queue_offset for p in sorted(model)]
            for place in workload.QUEUES:
                known = [number for _, (number, result) in sorted(model.items())
                         if (result.topic, result.queue_id) == place]  # fmt: skip
                assert [workload.number_of(m.body) for m in store.pull(*place, 0, 10**7).messages] == known


def run_threads(path: Path, seconds: float) -> None:
    seed = int(os.environ.get("RMQ_SEED", str(time.time_ns() % 10**6)))
    print(f"RMQ_SEED={seed}")
    config = workload.config(mapped_file_size_commit_log=2**18, mapped_file_size_consume_queue=4000,
                             max_hash_slot_num=2000, max_index_num=20000)  # fmt: skip
    with rmq.open(path, "a", config=config) as writer, rmq.open(path) as reader, rmq.open(path) as other:
        crew = Crew(writer, [reader, other], seed)
        crew.run(seconds)
        crew.check()
    assert oracle.check_store(path, 2000, 20000) == []
    assert rmq.verify(path).is_sound


@pytest.fixture
def often() -> Iterator[None]:
    """The interpreter changes threads every 50 us, so that more orders of events are met."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(50e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
def test_eight_threads_agree_with_a_model(tmp_path: Path, often: None) -> None:
    run_threads(tmp_path / "s", 3)


@pytest.mark.kill
def test_eight_threads_agree_with_a_model_for_a_minute(tmp_path: Path) -> None:
    run_threads(tmp_path / "s", SECONDS)


# ---- one sync for all that wait --------------------------------------------------------------------------


class Syncs:
    """Stands in for fdatasync: counts, and lets each take as long as a disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.delay = 0.0
        self.before: Callable[[], Any] = lambda: None
        self._sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._counted)

    def _counted(self, descriptor: int) -> None:
        self.count += 1
        self.before()
        time.sleep(self.delay)
        self._sync(descriptor)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(monkeypatch)


def durable_store(path: Path) -> rmq.Store:
    return rmq.open(path, "a", config=rmq.StoreConfig(
        mapped_file_size_commit_log=2**20, mapped_file_size_consume_queue=6000, max_hash_slot_num=100,
        max_index_num=5000, flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=FAR))  # fmt: skip


@pytest.mark.slow
def test_more_threads_share_each_sync(tmp_path: Path, syncs: Syncs, patience: None) -> None:
    """Syncs per put: one alone; with n threads that put in turn little more than 1 / n."""
    ratios = []
    for count in (1, 4, 16):
        with durable_store(tmp_path / str(count)) as store:
            store.put(message(0))
            syncs.count, syncs.delay = 0, 0.004

            def work(store: rmq.Store) -> None:
                for n in range(50):
                    store.put(message(n))

            threads = [threading.Thread(target=work, args=(store,)) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            syncs.delay = 0
            ratios.append(syncs.count / (50 * count))
    print("syncs per put with 1, 4, 16 threads:", ratios)
    assert ratios[0] == 1
    assert ratios[1] <= 0.4
    assert ratios[2] <= 0.115


def test_a_sync_under_way_holds_up_no_put_and_no_question(tmp_path: Path, syncs: Syncs) -> None:
    """While one thread waits for the disk, others put without waiting, read, and see its message."""
    reached, go_on = threading.Event(), threading.Event()
    with durable_store(tmp_path / "s") as store:
        store.put(message(0))
        syncs.before = lambda: (reached.set(), go_on.wait(20))
        waiting = [threading.Thread(target=store.put, args=(message(1),))]
        waiting[0].start()
        assert reached.wait(20)
        lazy = store.put(rmq.Message("lazy", b"x", properties={"WAIT": "false"}))
        assert store.lookup(lazy.phy_offset).body == b"x"
        assert [m.body for m in store.query("T1", "k1")] == [workload.body_of(1)]
        assert store.scan().read_all().num_rows == 3
        waiting += [threading.Thread(target=store.put, args=(message(n),)) for n in range(2, 6)]
        for thread in waiting[1:]:
            thread.start()
        while store.scan().read_all().num_rows < 7:
            time.sleep(0.001)
        assert all(thread.is_alive() for thread in waiting)
        before = syncs.count
        go_on.set()
        for thread in waiting:
            thread.join(20)
        assert not any(thread.is_alive() for thread in waiting)
        assert syncs.count == before + 1  # one for the four that came meanwhile


def test_two_stores_of_one_path_in_one_process(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=workload.config()) as store:
        with pytest.raises(rmq.StoreLockedError):
            rmq.open(tmp_path / "s", "a")
        with rmq.open(tmp_path / "s") as reader:
            store.put(message(0))
            assert reader.lookup(0).body == workload.body_of(0)
        store.put(message(1))
    rmq.open(tmp_path / "s", "r+").close()


@pytest.mark.parametrize("ask", [
    lambda store: store.query("T", "k"), lambda store: store.query_many("T", ["k"]), lambda store: store.pull("T"),
    lambda store: store.min_phy_offset])  # fmt: skip
def test_a_call_during_which_the_store_was_closed_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                ask: Callable[[rmq.Store], object]) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=4096)) as store:
        store.put(rmq.Message("T", b"", keys="k"))
    reader = rmq.open(tmp_path / "s")
    refresh = reader._refresh

    def closed_meanwhile() -> int:
        end = refresh()
        reader.close()
        return end

    monkeypatch.setattr(reader, "_refresh", closed_meanwhile)
    with pytest.raises(rmq.StoreClosedError):
        ask(reader)


@pytest.mark.parametrize("name", ["rmq-flush", "rmq-prepare"])
@pytest.mark.parametrize("mode", ["x", "r+"])
def test_an_open_without_room_for_a_thread_leaves_the_store_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   mode: str, name: str) -> None:  # fmt: skip
    start, config = threading.Thread.start, rmq.StoreConfig(mapped_file_size_commit_log=64 << 20)
    if mode == "r+":
        with rmq.open(tmp_path / "store", "x", config=config) as store:
            store.put(rmq.Message("T", b"x"))

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rmq.open(tmp_path / "store", mode, config=config)
    assert set(threading.enumerate()) <= before  # another test's store may wait for the garbage collector
    assert not (tmp_path / "store" / "abort").exists()
    with rmq.open(tmp_path / "store", mode) as store:
        assert store.put(rmq.Message("T", b"y")).queue_offset == (mode == "r+")


def test_a_segment_filled_while_it_is_synced_is_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They roll over, too: no put returns before a sync of its segment that began behind its bytes."""
    is_synced, goes_on = threading.Event(), threading.Event()
    real = MappedFile.sync
    synced: list[str] = []

    def sync(file: MappedFile) -> None:
        begun = file.path.name
        real(file)
        if threading.current_thread().name == "first" and not is_synced.is_set():
            is_synced.set()
            assert goes_on.wait(20)
        synced.append(begun)

    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, flush_disk_type="SYNC_FLUSH",
                             flush_interval_commit_log=3_600_000)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("T", bytes(4000))] * 14)
        monkeypatch.setattr(MappedFile, "sync", sync)
        places: list[int] = []

        def put(size: int) -> threading.Thread:
            thread = threading.Thread(target=lambda: places.append(store.put(rmq.Message("T", bytes(size))).phy_offset),
                                      name="others" if places or is_synced.is_set() else "first")  # fmt: skip
            thread.start()
            return thread

        threads = [put(100)]
        assert is_synced.wait(20)
        for size in (4000, 8000):
            end = store._log.position
            threads.append(put(size))
            while store._log.position == end:
                time.sleep(0.001)
        assert store._log.position > 65536
        goes_on.set()
        for thread in threads:
            thread.join(20)
        assert sorted(place // 65536 for place in places) == [0, 0, 1]
        assert synced.count(f"{0:020d}") == 2


def test_a_flush_stores_index_counts_under_the_put_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put beside it stores the same word: the older count must not come last."""
    real, held = IndexFile.settle, []

    def settle(file: IndexFile) -> None:
        held.append(store._put_lock.is_mine())
        real(file)

    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"", keys=["k"]))
        monkeypatch.setattr(IndexFile, "settle", settle)
        store.flush()
        assert held == [True]
        monkeypatch.undo()


def test_a_checkpoint_vouches_for_no_index_file_that_its_flush_did_not_sync(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Puts go on while a flush syncs: an index file that they fill meanwhile is the next flush's."""
    real = MappedFile.sync

    def sync(file: MappedFile) -> None:
        monkeypatch.setattr(MappedFile, "sync", real)
        other = threading.Thread(target=put)
        other.start()
        other.join()
        real(file)

    def put() -> None:
        store.put_many([rmq.Message("T", b"", keys=[f"k{n}"]) for n in range(20)])
        store._flusher.dispatch()

    config = rmq.StoreConfig(max_index_num=9, max_hash_slot_num=3, flush_interval_commit_log=FAR)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        first = store.put(rmq.Message("T", b"", keys=["k"]))
        born = store.lookup(first.phy_offset).store_timestamp
        while time.time() * 1000 < born + 2:
            time.sleep(0.001)
        monkeypatch.setattr(MappedFile, "sync", sync)
        store.flush()
        checkpoint = Checkpoint(tmp_path / "s" / "checkpoint")
        assert len(list((tmp_path / "s" / "index").iterdir())) > 2
        assert (checkpoint.index_msg_timestamp, checkpoint.logics_msg_timestamp) == (0, born)
        store.flush()
        checkpoint = Checkpoint(tmp_path / "s" / "checkpoint")
        assert checkpoint.index_msg_timestamp > born
        assert checkpoint.logics_msg_timestamp > born


@pytest.mark.parametrize("call", ["fits", "restore"])
def test_a_pass_over_an_index_file_holds_up_no_other_thread(tmp_path: Path, call: str) -> None:
    count = 1_000_000
    with IndexFile(tmp_path / "20260101000000000", "x", max_hash_slot_num=500_000, max_index_num=count + 1) as file:
        numbers = np.arange(count, dtype=np.int64)
        file.put_hashes((numbers * 7919 % 2**31).astype(np.int32), numbers, numbers)
        ask = file.view.fits if call == "fits" else partial(file.view.restore, file.view.header())

        def goes_on_beside() -> bool:
            begun, answers = threading.Event(), []

            def work() -> None:
                begun.set()
                answers.append(ask())

            thread, interval = threading.Thread(target=work), sys.getswitchinterval()
            sys.setswitchinterval(1000)  # no thread gets the GIL from one that does not let it go
            try:
                thread.start()
                begun.wait()
                went_on = not answers
            finally:
                sys.setswitchinterval(interval)
                thread.join()
            assert answers == [True if call == "fits" else ""]
            return went_on

        # a pass takes some ms, in which a busy machine may leave this thread without a core
        assert any(goes_on_beside() for _ in range(100))


def test_a_synced_put_does_not_wait_for_a_cleaning(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=workload.config(flush_disk_type="SYNC_FLUSH")) as store:
        store.put_many([message(number) for number in range(300)])
        is_cleaning, is_put = threading.Event(), threading.Event()

        def disk_usage(path: Any) -> Any:
            is_cleaning.set()
            assert is_put.wait(60)
            return shutil.disk_usage(path)

        def clean() -> None:
            removed.append(store.clean(file_reserved_time=0, limit=None, disk_usage=disk_usage).removed)

        removed: list[Any] = []
        thread = threading.Thread(target=clean)
        thread.start()
        assert is_cleaning.wait(60)
        store.put(message(300))
        is_put.set()
        thread.join()
        assert any(removed)
        assert store.max_phy_offset > store.min_phy_offset > 0
