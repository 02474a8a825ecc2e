"""Messages put one by one: what the compiled way answers and writes, when it is left, and the parts it is made of."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from conftest import copy_store
from forks import error_in_child

import rmq
from rmq._core import _layout as L
from rmq._core._logtail import LogTail
from rmq._core._mapguard import MapGuard
from rmq._core._ownedlock import OwnedLock
from rmq._core._putbatch import PutBatch
from rmq._core._putter import Putter, put_result
from rmq._core._queuetable import QueueTable
from rmq.columns import put_rules
from rmq.dispatch import BEHIND
from rmq.message import RESULTS_AT_ONCE

NOW = 1_700_000_000_000
SEGMENT = 2 * 1024 * 1024
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=20_000,
                         max_hash_slot_num=500, max_index_num=50_000, flush_interval_commit_log=2**31 - 1)  # fmt: skip
HOSTS = ("1.2.3.4:5", "[2001:db8::1]:65535", "255.254.16.9:65535")


class Counted:
    """How often a store's put went the long way."""

    def __init__(self, store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        put_chunk = store._put_chunk

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return put_chunk(*arguments, **options)

        monkeypatch.setattr(store, "_put_chunk", counted)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: NOW) as opened:
        opened.put(rmq.Message("T", b"first"))
        yield opened


def messages_of_all_kinds() -> list[rmq.Message]:
    source = random.Random(1)
    found = [rmq.Message("T", source.randbytes(size), keys=f"k{size}")
             for size in (*range(70), 127, 128, 129, 255, 256, 1000, 4095, 4096, 4097, 16_000, 17_000)]  # fmt: skip
    found += [rmq.Message("Größe€😀"[:size], b"body", queue_id=size) for size in range(1, 8)]
    found += [rmq.Message("T" * 127, b"", keys=["a" * size, "é"], tags="t", uniq_key="u" * size)
              for size in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)]  # fmt: skip
    found += [rmq.Message("T", b"b", store_host=host, born_host=other) for host in HOSTS for other in HOSTS]
    found += [rmq.Message("T", b"b", sys_flag=flag, prepared_transaction_offset=7) for flag in (0, 0x4, 0x8, 0xC, 1)]
    found += [rmq.Message("T", b"b", raw_properties=raw) for raw in (b"", b"A\1b", b"A\1b\2", b"__CRC32#\0010\2A\1b")]
    found += [rmq.Message("T", b"b", born_timestamp=5, flag=-1, reconsume_times=3, properties={"WAIT": "false"})]
    return found


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("crc", [False, True])
def test_messages_put_one_by_one_are_those_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, crc: bool
) -> None:
    config = dataclasses.replace(CONFIG, store_host=host, enabled_append_prop_crc=crc)
    messages = messages_of_all_kinds()
    with rmq.open(tmp_path / "one", "x", config=config, clock=lambda: NOW) as one, \
            rmq.open(tmp_path / "all", "x", config=config, clock=lambda: NOW) as together:  # fmt: skip
        long_way = Counted(one, monkeypatch)
        results = [one.put(item) for item in messages]
        assert long_way.count == 1
        assert results == list(together.put_many(messages))
        assert {type(result) for result in results} == {rmq.PutResult}
        assert results[-1]._asdict()["store_timestamp"] == NOW
        for item in messages:
            for key in item.keys:
                found = one.query(item.topic, key)
                assert found == together.query(item.topic, key)
                assert item.body in {other.body for other in found}
    for name in (f"commitlog/{0:020d}", f"consumequeue/T/0/{0:020d}"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()
    assert oracle.check_store(tmp_path / "one", 500, 50_000) == []


def test_the_long_way_is_gone_once_for_a_thousand_messages(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long_way = Counted(store, monkeypatch)
    message = rmq.Message("T", b"body", keys="k")
    for number in range(1, 3001):
        store.put(message)
        assert store._log.tail.behind == (number + 1) % BEHIND
    assert long_way.count == 3
    assert len(store.query("T", "k", limit=5000)) == 3000


def test_segments_that_fill_up_are_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, mapped_file_size_commit_log=1024)
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: NOW) as store:
        long_way = Counted(store, monkeypatch)
        sizes = [*range(100), *range(100, 900, 7)]
        results = [store.put(rmq.Message("T", bytes([size % 251 + 1]) * size)) for size in sizes]
        assert 0 < long_way.count < len(sizes)
        assert [len(store.lookup(result.phy_offset).body) for result in results] == sizes
        with pytest.raises(rmq.MessageTooLargeError):
            store.put(rmq.Message("T", bytes(1000)))
    assert oracle.check_store(tmp_path / "s", 500, 50_000) == []


def test_a_put_behind_a_flush_is_on_disk_with_the_next(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long_way = Counted(store, monkeypatch)
    for _ in range(3):
        store.flush()
        assert store._log.unsynced == []
        store.put(rmq.Message("T", b"a"))
        store.put(rmq.Message("T", b"b"))
        assert store._log.unsynced == store._log.segments[-1:]
    assert long_way.count == 3


def test_a_reader_sees_each_message_that_was_put(store: rmq.Store) -> None:
    with rmq.open(store.path) as reader:
        for number in range(20):
            result = store.put(rmq.Message("T", b"%d" % number))
            assert reader.max_phy_offset == result.phy_offset + result.size
            assert reader.lookup(result.phy_offset).body == b"%d" % number


# ---- what goes wrong ----------------------------------------------------------------------------------------


def test_a_message_that_is_refused_leaves_nothing(store: rmq.Store) -> None:
    end = store.max_phy_offset
    with pytest.raises(TypeError, match="expected Message, got int"):
        store.put(5)  # type: ignore[arg-type]
    with pytest.raises(rmq.MessageTooLargeError):
        store.put(rmq.Message("T", bytes(CONFIG.max_message_size + 1)))
    with pytest.raises(rmq.IllegalMessageError):
        store.put(rmq.Message.__new__(rmq.Message))
    assert store.max_phy_offset == end
    assert store.put(rmq.Message("T", b"next")).queue_offset == 1


@pytest.mark.parametrize(("answer", "error"), [("5", TypeError), (2**63, ValueError), (None, TypeError),
                                               (datetime.datetime(2020, 1, 1), ValueError)])  # fmt: skip
def test_a_clock_that_tells_no_time_stores_nothing(tmp_path: Path, answer: object, error: type[Exception]) -> None:
    times: list[Any] = [NOW]
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: times[-1]) as store:
        store.put(rmq.Message("T", b"a"))
        end = store.max_phy_offset
        times.append(answer)
        with pytest.raises(error):
            store.put(rmq.Message("T", b"b"))
        assert store.max_phy_offset == end
        times.append(datetime.datetime.fromtimestamp(NOW / 1000, datetime.UTC))
        assert store.put(rmq.Message("T", b"c"))[2:6] == (1, end, end, NOW)


def test_a_clock_is_read_once_for_each_put(tmp_path: Path) -> None:
    times = iter(range(100))
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: next(times)) as store:
        assert [store.put(rmq.Message("T", b"a")).store_timestamp for _ in range(50)] == list(range(50))


def test_the_system_s_clock_tells_milliseconds(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        times = [store.put(rmq.Message("T", b"a")).store_timestamp for _ in range(5)]
    now = datetime.datetime.now().timestamp() * 1000
    assert now - 60_000 < times[0] <= times[-1] <= now


def test_a_clock_that_puts_is_told_not_to(tmp_path: Path) -> None:
    calls: list[Any] = [lambda: NOW]
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: calls[-1]()) as store:
        store.put(rmq.Message("T", b"a"))
        calls.append(lambda: store.put(rmq.Message("T", b"inner")))
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            store.put(rmq.Message("T", b"b"))
        calls.pop()
        assert store.put(rmq.Message("T", b"c")).queue_offset == 1


def test_the_flush_lock_s_own_thread_is_told_not_to_put(store: rmq.Store) -> None:
    with store._flusher.flush_lock, pytest.raises(RuntimeError, match="in the middle of another call"):
        store.put(rmq.Message("T", b"b"))


def test_a_clock_that_cleans_or_flushes_is_told_not_to(tmp_path: Path) -> None:
    """In the middle of a put: a cleaning would take what it appends for an interrupted one's."""
    calls: list[Any] = [lambda: NOW]
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: calls[-1]()) as store:
        for call in (store.clean, store.flush, store.topics, store.close):
            calls.append(call)
            with pytest.raises(RuntimeError, match="in the middle of another call"):
                store.put_many([rmq.Message("T", b"a")] * 3)
            calls.pop()
            store.put(rmq.Message("T", b"b"))
        assert [message.body for message in store.pull("T").messages] == [b"b"] * 4


def test_a_closed_store_takes_nothing(store: rmq.Store) -> None:
    put = store._putter
    store.close()
    with pytest.raises(rmq.StoreClosedError):
        store.put(rmq.Message("T", b"b"))
    assert put is not None
    assert put.put(rmq.Message("T", b"b")) is None


def test_after_a_failed_sync_nothing_goes_the_short_way(store: rmq.Store) -> None:
    file, position = store._log.segments[0].file, store._log.position
    store._flusher.failure = OSError(5, "lost")
    store._log.tail.stand(file.map, file.map.guard, 0, file.reserved)  # by a put that was under way
    with pytest.raises(rmq.StoreReadOnlyError):
        store.put(rmq.Message("T", b"b"))
    assert store._log.position == position
    store._flusher.failure = None
    assert store.put(rmq.Message("T", b"b")).queue_offset == 1


def test_a_child_of_a_fork_takes_nothing(store: rmq.Store) -> None:
    assert error_in_child(lambda: store.put(rmq.Message("T", b"child"))) == "StoreClosedError"
    assert store.put(rmq.Message("T", b"b")).queue_offset == 1


def test_a_put_while_pages_of_another_file_are_gone_is_stored(store: rmq.Store, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as other:
        guard = MapGuard(other)
        os.truncate(path, 0)
        assert other[5000] == 0
        assert guard.lost >= 0
        results = [store.put(rmq.Message("T", b"b")) for _ in range(3)]
        guard.release()
    assert [result.queue_offset for result in results] == [1, 2, 3]
    assert store.lookup(results[-1].phy_offset).body == b"b"


def test_threads_that_put_share_one_order(store: rmq.Store) -> None:
    results: list[list[rmq.PutResult]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for at in range(2000):
            results[number].append(store.put(rmq.Message("T", b"%d" % at, queue_id=number, keys=f"{number}-{at}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted((result.phy_offset, result.size) for own in results for result in own)
    assert all(place + size == following for (place, size), (following, _) in pairwise(places))
    for number, own in enumerate(results):
        assert [result.queue_offset for result in own] == list(range(number == 0, 2000 + (number == 0)))
        assert store.query("T", f"{number}-1999")[0].body == b"1999"
    store.close()
    assert oracle.check_store(store.path, 500, 50_000) == []


def test_whom_the_put_lock_wakes_keeps_it_from_nobody(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for the GIL, others put: else each would wait for the next, one step each."""
    long_way, tries, message, putting = Counted(store, monkeypatch), 100, rmq.Message("T", b"body"), threading.Event()

    def put() -> None:
        putting.set()  # from here on until it waits for the lock it has the GIL
        store.put(message)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)
    try:
        for _ in range(tries):
            putting.clear()
            thread = threading.Thread(target=put)
            with store._put_lock:
                thread.start()
                while not putting.is_set():
                    time.sleep(0)
            woken = time.perf_counter() + 0.001
            while time.perf_counter() < woken:
                pass
            store.put(message)
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert long_way.count < 1.5 * tries  # both go it where one keeps the lock, one where the other came too late


def test_a_put_gets_in_line_for_a_lock_that_is_held_for_long(store: rmq.Store) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with store._put_lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert store._putter is not None
        assert store._putter.put(rmq.Message("T", b"body")) is None
    finally:
        done.set()
        thread.join(10)
    assert store.put(rmq.Message("T", b"body")).queue_offset == 1


def test_a_store_killed_behind_such_puts_has_them_all(store: rmq.Store, tmp_path: Path) -> None:
    results = [store.put(rmq.Message("T", b"%d" % number, keys=f"k{number}")) for number in range(1500)]
    image = copy_store(store.path, tmp_path / "image")
    with rmq.open(image, "r+") as again:
        assert again.max_phy_offset == store.max_phy_offset
        assert again.lookup(results[-1].phy_offset).body == b"1499"
        assert again.query("T", "k1499")[0].phy_offset == results[-1].phy_offset


# ---- parts --------------------------------------------------------------------------------------------------


def test_a_lock_is_its_thread_s_as_often_as_it_takes_it() -> None:
    lock = OwnedLock()
    seen: list[bool] = []
    entered = threading.Event()

    def other() -> None:
        seen.append(lock.is_mine())
        with lock:
            seen.append(lock.is_mine())
            entered.set()

    assert not lock.is_mine()
    thread = threading.Thread(target=other)
    with lock as taken, lock:
        assert taken is lock
        assert lock.is_mine()
        thread.start()
        assert not entered.wait(0.05)
    thread.join(10)
    assert seen == [False, True]
    assert not lock.is_mine()
    with pytest.raises(RuntimeError, match="given back"):
        lock.__exit__(None, None, None)


def test_a_signal_ends_the_wait_for_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = OwnedLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(10)

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    finally:
        signal.signal(signal.SIGALRM, before)
        done.set()
    thread.join(10)
    with lock:
        assert lock.is_mine()


@pytest.fixture
def tail(tmp_path: Path) -> Iterator[LogTail]:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as segment:
        guard, made = MapGuard(segment), LogTail()
        made.stand(segment, guard, 8192, 4096)
        made.position = made.planned = 8192
        yield made
        made.release()
        guard.release()


def loaded(count: int = 1) -> PutBatch:
    batch = PutBatch(put_rules(CONFIG))
    batch.load([rmq.Message("T", b"body")] * count)
    return batch


def test_a_tail_takes_what_has_blocks(tail: LogTail) -> None:
    queues, size = QueueTable(), loaded().records_size
    most = (4096 - L.BLANK_HEADER_SIZE) // size
    assert not tail.append(loaded(most + 1), NOW, queues)
    assert (tail.position, len(queues)) == (8192, 0)
    assert tail.append(loaded(most), NOW, queues)
    assert (tail.position, tail.last_phy_offset) == (8192 + most * size, 8192 + (most - 1) * size)
    assert not tail.append(loaded(), NOW, queues)
    assert not tail.was_interrupted
    assert tail.append(loaded(0), NOW, queues)
    assert tail.last_phy_offset == 8192 + (most - 1) * size


def test_a_tail_takes_nothing_before_its_segment_at_rest_or_behind_an_interrupt(tail: LogTail) -> None:
    queues = QueueTable()
    tail.position = tail.planned = 0
    assert not tail.append(loaded(), NOW, queues)
    tail.position, tail.planned = 8192, 8300
    assert tail.was_interrupted
    assert not tail.append(loaded(), NOW, queues)
    tail.planned = 8192
    assert tail.is_on(8192)
    tail.rest()
    assert not tail.is_on(8192)
    assert not tail.append(loaded(), NOW, queues)
    assert not LogTail().append(loaded(), NOW, queues)


def test_a_tail_whose_pages_go_takes_nothing(tail: LogTail, tmp_path: Path) -> None:
    os.truncate(tmp_path / "segment", 0)
    assert not tail.append(loaded(), NOW, QueueTable())
    tail.rest()


def test_what_a_putter_is_made_of_is_checked() -> None:
    parts: dict[str, Any] = {"put_lock": OwnedLock(), "flush_lock": OwnedLock(), "tail": LogTail(),
                             "queues": QueueTable(), "batch": PutBatch(put_rules(CONFIG)),
                             "marks": memoryview(bytearray(L.MARKS_SIZE)), "clock": lambda: NOW,
                             "ticks": 1, "kind": rmq.PutResult}  # fmt: skip
    assert Putter(**parts).put(rmq.Message("T", b"")) is None
    for name, value in (("ticks", 0), ("kind", list), ("marks", memoryview(bytearray(L.MARKS_SIZE - 1)))):
        with pytest.raises(ValueError, match=r"ticks must|marks are shorter"):
            Putter(**parts | {name: value})
    with pytest.raises(ValueError, match="for one message"):
        put_result(parts["batch"], NOW, kind=rmq.PutResult, message=rmq.Message("T", b""))


def test_results_are_a_sequence_of_put_results(tmp_path: Path) -> None:
    count = 2 * RESULTS_AT_ONCE + 3
    table = pa.table({"body": [b""] * count, "queue_id": pa.array([row % 7 for row in range(count)], pa.int32())})
    with rmq.open(tmp_path / "s", "a") as store:
        results = store.put_many(table, topic="C")
    listed = list(results)
    assert [result.queue_id for result in listed] == [row % 7 for row in range(count)]
    assert [result.queue_offset for result in listed] == [row // 7 for row in range(count)]
    assert {tuple(map(type, result)) for result in listed} == {(str, int, int, int, int, int, str)}
    assert {type(result) for result in listed} == {rmq.PutResult}
    for part in (slice(None), slice(3, 3), slice(9, 2), slice(-5, None), slice(None, None, -1), slice(1000, 1030, 7),
                 slice(5, 10**9)):  # fmt: skip
        assert results[part] == listed[part]
    assert (results[np.int8(-1)], results[np.uint8(255)]) == (listed[-1], listed[255])
    assert results.index(listed[1500]) == 1500
    assert list(reversed(results)) == listed[::-1]


@pytest.mark.parametrize("name", ["_topics", "_hosts"])
def test_what_a_finalizer_takes_from_results_is_not_read(tmp_path: Path, name: str) -> None:
    """The collector of Python 3.11 may run while results are made; later ones wait until they are."""
    with rmq.open(tmp_path / "s", "a") as store:
        results = store.put_many([rmq.Message("T", b"")] * 500)

    def clear(*_: Any) -> None:
        getattr(results, name).clear()

    threshold = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(clear)
    try:
        gc.set_threshold(200)  # objects from here on: less than there are results
        with pytest.raises(IndexError) if sys.version_info < (3, 12) else nullcontext():
            assert len(results[:]) == 500
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(clear)
