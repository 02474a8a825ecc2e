# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the disk together: whom a sync serves, who syncs next, and who is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rmq
import rmq.groupcommit
from rmq.groupcommit import OFTEN, GroupCommit

SYNC_S = 0.004


class Log:
    """Something that threads append to and a GroupCommit syncs."""

    def __init__(self) -> None:
        self.group = GroupCommit(0)
        self.end = self.durable = self.syncs = 0
        self.sync_s = SYNC_S
        self._lock = threading.Lock()

    def put(self) -> int:
        with self._lock:
            self.end += 1
            end = self.end
        self.group.sync(end, self.work)
        assert self.durable >= end
        return end

    def work(self) -> int:
        self.syncs += 1
        end = self.end
        time.sleep(self.sync_s)
        self.durable = end
        return end


@contextmanager
def running(*works: Callable[[], object]) -> Iterator[None]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that nobody wakes sleeps longer than a test waits."""
    monkeypatch.setattr(rmq.groupcommit, "HEARD_S", 60)


def times(count: int, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


@pytest.mark.parametrize("sync_s", [0, SYNC_S])
def test_no_thread_is_left_asleep(unheard: None, sync_s: float) -> None:
    log = Log()
    log.sync_s = sync_s
    with running(*[times(60, log.put)] * 7):
        pass
    assert log.durable == log.end == 7 * 60
    assert log.group._waiting == []


@pytest.mark.slow
def test_threads_that_put_in_turn_share_each_sync(unheard: None, patience: None) -> None:
    """Half of them would wait for the next sync if none waited for those that the last one served."""
    log = Log()
    with running(*[times(50, log.put)] * 4):
        pass
    assert log.syncs < 0.4 * 4 * 50


def test_a_sync_is_shared_when_others_waited_for_it(unheard: None) -> None:
    log, begun = Log(), threading.Event()
    log.put()
    assert not log.group.is_shared
    log.end += 1
    end = log.end

    def work() -> int:
        begun.set()
        while not log.group._waiting:
            time.sleep(0.001)
        return log.work()

    with running(lambda: log.group.sync(end, work)):
        assert begun.wait(20)
        log.put()
        assert log.group.is_shared
    log.put()
    assert not log.group.is_shared


class Unopened:
    """Stands in for a lock that nobody releases: a wait for it takes all the time it may."""

    def __init__(self, waits: list[float]) -> None:
        self._waits = waits

    def acquire(self, timeout: float = -1) -> bool:
        if timeout > 0:
            self._waits.append(timeout)
            time.sleep(timeout)
        return True


def test_who_does_not_come_back_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread alone waits for nobody."""
    log, waits = Log(), []
    monkeypatch.setattr(rmq.groupcommit.threading, "Lock", lambda: Unopened(waits))
    times(5, log.put)()
    assert waits == []
    other = -1
    log.group._served.add(other)
    log.group._often[other] = OFTEN
    log.group._awaited += 1
    times(10, log.put)()
    assert len(waits) == 1
    assert waits[0] <= rmq.groupcommit.MOST_SOON_S
    assert other not in log.group._often


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0, 0.01])
def test_who_comes_back_late_is_not_awaited(request: pytest.FixtureRequest, pause: float) -> None:
    if not pause:
        request.getfixturevalue("patience")
    log, awaited = Log(), []
    gather = log.group._gather

    def seen() -> None:
        awaited.append(log.group._awaited)
        gather()

    log.group._gather = seen  # type: ignore[method-assign]

    def work() -> None:
        log.put()
        time.sleep(pause)

    with running(*[times(12, work)] * 3):
        pass
    assert any(awaited) == (pause == 0)


def test_a_sync_that_ends_while_another_tells_leaves_nobody_asleep() -> None:
    """Who is served in that moment is woken, or waits on to be woken."""
    group = GroupCommit(0)
    turn = threading.Lock()
    turn.acquire()

    class Rising(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[object]:
            found = list(super().__iter__())
            yield from found
            group.synced = 20

    group._syncer = 1
    group._waiting = Rising([(20, turn, 2)])
    group.note(10)
    assert turn.locked()
    assert group._waiting == [(20, turn, 2)]


def test_a_signal_handler_that_puts_amid_its_thread_s_sync_is_told_not_to(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(flush_disk_type="SYNC_FLUSH")) as store:
        group, raised = store._flusher._group, []

        def handler() -> None:
            with pytest.raises(RuntimeError, match="in the middle of another call") as found:
                store.put(rmq.Message("T", b"nested"))
            raised.append(found)

        group._gather = handler  # type: ignore[method-assign]
        store.put(rmq.Message("T", b"first"))
        with group._lock:
            handler()
        assert len(raised) == 2
        assert store.scan().read_all().num_rows == 1


def test_a_sync_that_fails_tells_all_that_wait(unheard: None) -> None:
    group, failed = GroupCommit(0), []

    def work() -> int:
        while len(group._waiting) < 3 and not failed:
            time.sleep(0.001)
        raise OSError(5, "disk")

    def sync() -> None:
        try:
            group.sync(10, work)
        except OSError as error:
            failed.append(error.errno)

    with running(*[sync] * 4):
        pass
    assert failed == [5] * 4
    assert group.synced == 0
    group.sync(10, lambda: 10)
    assert group.synced == 10


def test_what_another_has_synced_wakes_those_it_serves(unheard: None) -> None:
    group, began, done = GroupCommit(0), threading.Event(), threading.Event()
    returned: list[int] = []

    def work() -> int:
        began.set()
        done.wait(20)
        return 30

    def sync(end: int) -> None:
        group.sync(end, work)
        returned.append(end)

    with running(lambda: sync(5)):
        began.wait(20)
        with running(lambda: sync(10)):
            while not group._waiting:
                time.sleep(0.001)
            group.note(10)
        assert returned == [10]
        done.set()
    assert returned == [10, 5]
    assert group.synced == 30
