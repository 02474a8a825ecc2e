"""How a store ends while others work: close beside threads, interpreter exit, fork, garbage collection, signals."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import workload
from forks import in_child
from workload import message

import rmq

FAR = 2**31 - 1  # ms to the next timed flush


def ask_all(store: rmq.Store, number: int) -> None:
    """One question of each kind about message 0, and puts in mode r+."""
    store.query("T0", "k0")
    store.query_many("T0", ["k0", "ten0"])
    store.select_phy_offset_many("T0", ["k0"])
    store.pull("T0", 0, 0, 50)
    store.lookup(0)
    store.lookup("u0")
    store.search_offset("T0", 0, 0)
    store.topics()
    store.info()
    for batch in store.scan(columns=["body"], batch_rows=10):
        assert batch.num_rows
    assert store.max_phy_offset
    if store.mode != "r":
        store.put(message(number))
        store.put_many([message(number), message(number)])
        store.flush()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_threads_at_work_when_a_store_is_closed_are_told_so(tmp_path: Path, mode: str, kind: str) -> None:
    """Eight threads ask and put, two close; each ends with StoreClosedError, and the store opens clean."""
    with rmq.open(tmp_path / "s", "a", config=workload.config()) as store:
        store.put_many(map(message, range(300)))
    config = workload.config(flush_disk_type=kind, flush_interval_commit_log=1)
    for turn in range(15):
        ends: list[str] = []
        store = rmq.open(tmp_path / "s", mode, config=config)

        def work(store: rmq.Store, number: int, ends: list[str]) -> None:
            try:
                while True:
                    ask_all(store, number)
            except BaseException as error:
                ends.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(store, 300 + n, ends)) for n in range(8)]
        threads += [threading.Thread(target=store.close) for _ in range(2)]
        for thread in threads[:8]:
            thread.start()
        time.sleep(0.004 * turn)
        for thread in threads[8:]:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert len(ends) == 8
        assert [end for end in ends if not end.startswith("StoreClosedError")] == []
        assert not (tmp_path / "s/abort").exists()
    assert oracle.check_store(tmp_path / "s", 100, 500) == []


def test_a_second_close_waits_for_the_first_and_leaves_the_next_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = rmq.open(tmp_path / "s", "a", config=workload.config(flush_interval_commit_log=FAR))
    store.put(message(0))
    reached, go_on = threading.Event(), threading.Event()
    sync = os.fdatasync

    def slow(descriptor: int) -> None:
        reached.set()
        go_on.wait(20)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    threads = [threading.Thread(target=store.close) for _ in range(3)]
    threads[0].start()
    assert reached.wait(20)
    with pytest.raises(rmq.StoreClosedError):
        store.put(message(1))
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    with rmq.open(tmp_path / "s", "r+") as again:
        store.close()
        assert (tmp_path / "s/abort").exists()
        again.put(message(1))
    with pytest.raises(rmq.StoreClosedError):
        store.flush()


def test_a_closed_store_opens_no_file_again(tmp_path: Path) -> None:
    store = rmq.open(tmp_path / "s", "a", config=workload.config())
    store.put_many(map(message, range(300)))
    begun = store.scan(batch_rows=10)
    begun.read_next_batch()
    before = len(os.listdir("/proc/self/fd"))
    parts: Any = store
    log, queues = parts._log, parts._queues
    store.close()
    with pytest.raises(rmq.StoreClosedError):
        begun.read_all()
    with pytest.raises(rmq.StoreClosedError):
        list(log.records(0, log.position))
    with pytest.raises(rmq.StoreClosedError):
        queues.queues["T0", 0].read(0, 1)
    assert len(os.listdir("/proc/self/fd")) < before


# ---- the interpreter ends --------------------------------------------------------------------------------

BEGIN = """
import os, signal, sys, threading, time
import rmq
def body(number):
    return rmq.Message("T0", b"%d" % number)
config = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400, max_hash_slot_num=100,
                         max_index_num=500, flush_disk_type=sys.argv[2], flush_interval_commit_log=1)
store = rmq.open(sys.argv[1], "a", config=config)
store.put(body(0))
def work(store=store):
    number = 1
    while True:
        store.put(body(number))
        number += 1
"""
# The end takes the names of our modules first, then this one.
HELD = "import posixpath\ndel work, body\nposixpath.held = lambda: store"
ENDS = {
    "exit": ("", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "exception": ("1 / 0", 1),
    "daemon threads": ("for _ in range(4): threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.05)", 0),
    "daemon threads, del": (
        "for _ in range(4): threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.05)\ndel store", 0),
    "in a cycle": ("cycle = [store]\ncycle.append(cycle)\ndel store, work, cycle", 0),
    "reader": ("reader = rmq.open(sys.argv[1])\nreader.query('T0', 'k')", 0),
    "begun scan": ("scan = store.scan(batch_rows=1)\nscan.read_next_batch()", 0),
    "SIGTERM": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nos.kill(os.getpid(), signal.SIGTERM)\nwork()", 5),
    "SIGINT": ("threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\nwork()", -signal.SIGINT),
    "held by a module": (HELD, 0),
    "closed, held by a module": (HELD + "\nstore.close()", 0),
    "reader held by a module": (
        HELD + "\nreader = rmq.open(sys.argv[1])\nscan = reader.scan(batch_rows=1)\nscan.read_next_batch()", 0),
    "closed at exit": ("import atexit\natexit.register(store.close)", 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("end", ENDS)
def test_an_interpreter_ends_with_a_store_open(tmp_path: Path, end: str, kind: str) -> None:
    """No hang, its own exit code, no word but that the store was not closed; nothing that was put is lost."""
    code, expected = ENDS[end]
    command = [sys.executable, "-X", "faulthandler", "-W", "always", "-c", BEGIN + code, str(tmp_path / "s"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected, done.stderr
    if end not in ("exception", "SIGINT"):
        words = [line for line in done.stderr.splitlines() if "was not closed" not in line and not line.startswith(" ")]
        assert words == []
    with rmq.open(tmp_path / "s", "r+") as store:
        count = store.scan().read_all().num_rows
        assert count >= 1
        assert store.topics() == {"T0": {0: (0, count)}}
    assert oracle.check_store(tmp_path / "s", 100, 500) == []


# ---- fork ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_fork_while_threads_put_harms_neither_side(tmp_path: Path, kind: str) -> None:
    store = rmq.open(tmp_path / "s", "a", config=workload.config(flush_disk_type=kind, flush_interval_commit_log=1))
    stop = threading.Event()
    counts = [0] * 4

    def work(number: int) -> None:
        while not stop.is_set():
            store.put(message(number * workload.ROUND + counts[number]))
            store.query("T0", "k0")
            counts[number] += 1

    def child() -> str:
        names = []
        for call in (lambda: store.put(message(0)), store.flush, store.topics, lambda: store.query("T0", "k0")):
            try:
                call()
                names.append("nothing")
            except Exception as error:
                names.append(type(error).__name__)
        store.close()
        store.__del__()
        with rmq.open(tmp_path / "s") as reader:
            reader.topics()
        gc.collect()
        return ",".join(sorted(set(names)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert in_child(child) == "StoreClosedError"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with pytest.raises(rmq.StoreLockedError):
        rmq.open(tmp_path / "s", "r+")
    assert store.scan().read_all().num_rows == sum(counts)
    store.close()
    assert not (tmp_path / "s/abort").exists()
    assert oracle.check_store(tmp_path / "s", 100, 500) == []


# ---- nobody holds it -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_that_another_thread_collects_lets_go_of_all(tmp_path: Path, mode: str) -> None:
    rmq.open(tmp_path / "s", "a", config=workload.config()).close()
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(6):
        cycle: list[Any] = [rmq.open(tmp_path / "s", mode)]
        if mode != "r":
            cycle[0].put(message(0))
        cycle.append(cycle)
        reference = weakref.ref(cycle[0])
        del cycle
        with pytest.warns(ResourceWarning, match="was not closed"):
            in_a_thread(gc.collect)
        assert reference() is None
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads


COLLECTED = """
import gc, sys, threading, time
import rmq, workload
from rmq.flushing import Flusher

path = sys.argv[1]
real, collected = Flusher.settle, threading.Event()  # called under the put lock

def collects(self):
    real(self)
    if threading.current_thread().name == "rmq-flush" and not collected.is_set():
        flusher.preparer.wake()
        time.sleep(0.3)  # the other thread comes, and waits for the put lock
        gc.collect()
        collected.set()

gc.disable()
sizes = {"mapped_file_size_commit_log": 4 << 20, "flush_disk_type": "SYNC_FLUSH", "flush_interval_commit_log": 100}
cycle = [rmq.open(path, "x", config=workload.config(**sizes))]
cycle.append(cycle)
flusher = cycle[0]._flusher
cycle[0].put(workload.message(0))
Flusher.settle = collects
del cycle
flusher._flushed = -1
assert collected.wait(20)
for thread in flusher._thread, flusher.preparer._thread:
    thread.join(20)
    assert not thread.is_alive()
"""


@pytest.mark.slow
def test_a_store_that_a_thread_of_its_own_collects_under_its_locks_lets_go_of_all(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "always", "-c", COLLECTED, tmp_path / "s"], text=True,
                          capture_output=True, timeout=60, check=False, cwd=Path(__file__).parent)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "was not closed" in done.stderr
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.scan().read_all().num_rows == 1


def test_a_store_whose_end_was_interrupted_is_locked_as_long_as_anybody_may_write_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes before the first step of __del__."""
    monkeypatch.delattr(rmq.Store, "__del__")
    gc.collect()  # what other tests left
    path, descriptors = tmp_path / "s", len(os.listdir("/proc/self/fd"))
    config = workload.config(mapped_file_size_commit_log=8 << 20, flush_interval_commit_log=FAR)
    store = rmq.open(path, "x", config=config)
    store.put(message(0))
    flusher = store._flusher
    threads = flusher._thread, flusher.preparer._thread
    assert all(thread is not None and thread.is_alive() for thread in threads)
    flushing = flusher.flush_if_due  # as the thread has it amid a flush
    del store, flusher
    with pytest.raises(rmq.StoreLockedError):
        rmq.open(path, "r+")
    del flushing
    for thread in threads:  # a step under way holds the lock to its end
        thread.join(20)
        assert not thread.is_alive()
    with rmq.open(path, "r+") as store:
        assert store.lookup(0).body == message(0).body
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def interrupted(call: Callable[[], Any], delay: float) -> bool:
    """Whether SIGINT after some time ended a call; it must end soon.

    It comes again each second: Python drops what is raised in a callback of its garbage collector (hypothesis has one).
    """
    is_over = threading.Lock()
    is_over.acquire()

    def signal_it() -> None:
        pause = delay
        while not is_over.acquire(timeout=pause):
            os.kill(os.getpid(), signal.SIGINT)
            pause = 1

    sender = threading.Thread(target=signal_it)
    sender.start()
    try:
        call()
        time.sleep(1)
    except KeyboardInterrupt:
        return True
    finally:
        is_over.release()
        sender.join()
    return False


@pytest.mark.slow
def test_a_signal_ends_a_long_call_and_the_store_goes_on(tmp_path: Path) -> None:
    config = workload.config(mapped_file_size_commit_log=2**22, mapped_file_size_consume_queue=20000,
                             max_hash_slot_num=10000, max_index_num=50000)  # fmt: skip
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        store.put_many(map(message, range(20000)))
        first = store.put(message(20000)).phy_offset
        keys = [f"ten{n}" for n in range(2000)]
        calls: list[Callable[[], Any]] = [
            lambda: store.put_many(message(n) for n in range(20001, 10**9)),
            lambda: [store.query_many("T0", keys, limit=None) for _ in range(10**6)],
            lambda: [store.scan().read_all() for _ in range(10**6)],
            lambda: [store.flush() for _ in range(10**6)],
        ]
        for call in calls:
            for delay in (0.01, 0.05):
                assert interrupted(call, delay)
                assert store.lookup("u0").phy_offset == 0
                assert store.lookup(first).phy_offset == first
                store.put(rmq.Message("later", b"x"))
        numbers = [workload.number_of(body) for body in store.scan(topics=["T0", "T1"]).read_all()["body"].to_pylist()]
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))
    assert oracle.check_store(tmp_path / "s", 10000, 50000) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["close", "flush", "topics", "put"])
def test_a_signal_handler_that_uses_the_store_of_its_own_thread_is_told_not_to(tmp_path: Path, name: str) -> None:
    """In the middle of a put it gets RuntimeError, between two it does what it says; no deadlock."""
    calls = {"close": rmq.Store.close, "flush": rmq.Store.flush, "topics": rmq.Store.topics,
             "put": lambda store: store.put(rmq.Message("handler", b""))}  # fmt: skip
    told: list[str] = []
    for turn in range(12):
        store = rmq.open(tmp_path / f"s{turn}", "a", config=workload.config())

        def handle(*_: object, store: rmq.Store = store) -> None:
            calls[name](store)
            signal.setitimer(signal.ITIMER_REAL, 0.002)  # not before: a signal must not come in the middle of this

        before, put = signal.signal(signal.SIGALRM, handle), 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0007 * turn)
            while put < 3000:
                store.put_many([message(put + n) for n in range(50)])
                put += 50
        except (RuntimeError, rmq.StoreClosedError) as error:
            told.append(type(error).__name__)
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        store.close()
        with rmq.open(tmp_path / f"s{turn}") as reader:
            assert reader.scan(topics=["T0", "T1"]).read_all().num_rows >= put
        assert oracle.check_store(tmp_path / f"s{turn}", 100, 500) == []
    assert told
