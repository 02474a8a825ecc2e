# SPDX-License-Identifier: Apache-2.0
"""Two threads of a process, or a signal, that meet at one place of a call: the place is chosen here, not by chance."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rmq
import rmq.index
from rmq import filecache, flushing, logfiles, logsegment, queuereading
from rmq.flushing import Flusher
from rmq.indexfile import IndexFile
from rmq.logsegment import MappedFile

SMALL = rmq.StoreConfig(mapped_file_size_commit_log=4096, flush_interval_commit_log=2**31 - 1)


def beside(work: Callable[[], object]) -> None:
    """Done by another thread, to its end."""
    failures: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    assert failures == []


def fill(store: rmq.Store, segments: int) -> None:
    """Put until the log has so many segments."""
    while len(store._log.segments) < segments:
        store.put(rmq.Message("T", bytes(1000)))


@pytest.mark.parametrize(("place", "ask"), [
    ("pull_from", lambda store, _: len(store.pull("T").messages)),
    ("search_from", lambda store, _: store.search_offset("T", 0, 2**42)),
    ("pull_from", lambda _, consumer: 3 + len(consumer.poll(1))),
], ids=["pull", "search_offset", "Consumer"])  # fmt: skip
@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_queue_that_grows_before_it_is_looked_at_has_no_unit_behind_the_log_s_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, place: str,
        ask: Callable[[rmq.Store, rmq.Consumer], int]) -> None:  # fmt: skip
    """What another thread puts and reads meanwhile is in the answer: no error tells of it."""
    with rmq.open(tmp_path / "s", "x") as writer, rmq.open(tmp_path / "s") as reader:
        store = reader if mode == "r" else writer
        writer.put_many([rmq.Message("T", b"x")] * 3)
        consumer, real = rmq.Consumer(store, "g", "T"), getattr(queuereading, place)
        assert len(consumer.poll()) == 3

        def hooked(*arguments: Any, **options: Any) -> object:
            monkeypatch.setattr(queuereading, place, real)
            beside(lambda: (writer.put(rmq.Message("T", b"y")), store.topics()))
            return real(*arguments, **options)

        monkeypatch.setattr(queuereading, place, hooked)
        assert ask(store, consumer) == 4


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_search_goes_no_further_than_the_queue_did_before_the_log_s_end_was_asked(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:  # fmt: skip
    with rmq.open(tmp_path / "s", "x") as writer, rmq.open(tmp_path / "s") as reader:
        store = reader if mode == "r" else writer
        writer.put_many([rmq.Message("T", b"x")] * 3)
        real = store._log_end

        def hooked() -> int:
            end = real()
            monkeypatch.setattr(store, "_log_end", real)
            beside(lambda: (writer.put(rmq.Message("T", b"y")), store.topics()))
            return end

        monkeypatch.setattr(store, "_log_end", hooked)
        assert store.search_offset("T", 0, 2**42) == 3


def test_of_two_listings_of_the_log_the_later_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the segment that another thread has found is missing, where its record is looked for."""
    with rmq.open(tmp_path / "s", "x", config=SMALL) as writer:
        fill(writer, 2)
        with rmq.open(tmp_path / "s") as reader:
            other = threading.Thread(target=reader._log.refresh)

            def scandir(path: Path) -> Iterator[os.DirEntry[str]]:
                found = list(os.scandir(path))
                if not other.ident:
                    fill(writer, 4)
                    other.start()
                    other.join(0.02)  # it waits for us, or has listed more by now
                return iter(found)

            fill(writer, 3)
            with monkeypatch.context() as patch:
                patch.setattr(logfiles, "os", SimpleNamespace(scandir=scandir))
                reader._log.refresh()
                other.join()
            assert [segment.start for segment in reader._log.segments] == [0, 4096, 8192, 12288]


@pytest.mark.parametrize("makes", [False, True])
def test_no_more_segments_stay_mapped_than_the_limit_when_threads_map_together(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes: bool) -> None:  # fmt: skip
    """One that others took off the list while it was mapped, or made, would stay mapped for good."""
    monkeypatch.setattr(logfiles, "room_for_maps", lambda size: 2)
    met: list[Path] = []

    def mapped(path: Path, **options: Any) -> MappedFile:
        if options.get("create", False) is makes and not met:
            met.append(path)
            beside(lambda: look_at(1, 2, 3))
        return MappedFile(path, **options)

    def look_at(*segments: int) -> None:
        for number in segments:
            assert store.lookup(number * 4096).size > 1000

    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        fill(store, 5)
    with rmq.open(tmp_path / "s", "r+" if makes else "r") as store:
        look_at(3)
        monkeypatch.setattr(logsegment, "MappedFile", mapped)
        fill(store, 6) if makes else look_at(0)
        assert met == [store._log.segments[-1 if makes else 0].path]
        if makes:
            fill(store, 7)
            store.flush()
        look_at(1, 2, 3)
        found = [segment.start // 4096 for segment in store._log.segments if segment._file is not None]
        assert found == [3, 6 if makes else 4]


def test_an_interrupt_while_a_close_waits_for_the_timed_flush_leaves_no_open_store_without_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    stop = Flusher.stop

    def interrupted(flusher: Flusher) -> None:
        stop(flusher)
        raise KeyboardInterrupt

    store = rmq.open(tmp_path / "s", "x")
    store.put(rmq.Message("T", b"x"))
    with monkeypatch.context() as patch:
        patch.setattr(Flusher, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    with pytest.raises(rmq.StoreClosedError):
        store.put(rmq.Message("T", b"y"))
    store.close()
    with rmq.open(tmp_path / "s", "r+") as store:
        assert [message.body for message in store.pull("T").messages] == [b"x"]


def test_a_sync_that_failed_is_not_forgotten_for_a_handler_s_error(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Another thread's, told between the looks at both: the next flush would vouch for what is not on disk."""
    failed = OSError(errno.EIO, "sync failed")
    is_handlers, calls = flushing.is_handlers, itertools.count()

    def sync() -> None:
        raise TimeoutError("a handler's")

    def hooked(error: BaseException) -> bool:
        if next(calls) == 0:
            beside(lambda: setattr(store._flusher, "failure", failed))
        return is_handlers(error)

    store = rmq.open(tmp_path / "s", "x")
    store.put(rmq.Message("T", b"x"))
    with monkeypatch.context() as patch:
        patch.setattr(flushing, "is_handlers", hooked)
        with pytest.raises(TimeoutError, match="a handler's"):
            store._flusher._sync_segments([SimpleNamespace(sync=sync)])  # type: ignore[list-item]
    with pytest.raises(rmq.StoreReadOnlyError):
        store.put(rmq.Message("T", b"y"))
    store.close()


@pytest.mark.parametrize(("module", "name"), [(logsegment, "MappedFile"), (filecache, "open_regular")])
def test_a_handler_s_close_amid_a_read_leaves_nothing_open(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:  # fmt: skip
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x"))
    real: Any = getattr(module, name)

    def closing(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        reader.close()
        return made

    reader = rmq.open(tmp_path / "s")
    reader._log.segments[0].let_go()
    reader._queues.cache._keep(0)
    monkeypatch.setattr(module, name, closing)
    with pytest.raises(rmq.StoreClosedError):
        reader.pull("T")
    assert reader._log.segments[0]._file is None
    assert not reader._queues.cache._open


def test_a_handler_s_close_amid_a_look_at_the_index_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=40)
    with rmq.open(tmp_path / "s", "x", config=config) as writer:
        writer.put_many([rmq.Message("T", b"x", keys="k")] * 10)
        reader = rmq.open(tmp_path / "s")
        assert reader.query("T", "k").complete
        writer.put_many([rmq.Message("T", b"x", keys="k")] * 100)
        writer.flush()
    real = rmq.index.IndexFile

    def opening(*arguments: Any, **options: Any) -> IndexFile:
        made = real(*arguments, **options)
        monkeypatch.undo()
        reader.close()
        return made

    monkeypatch.setattr(rmq.index, "IndexFile", opening)
    with pytest.raises(rmq.StoreClosedError):
        reader.query("T", "k")
    assert not [link for link in held_files() if str(tmp_path) in link]


def held_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{number}")


def test_a_handler_s_error_amid_the_sync_behind_a_put_tells_that_all_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise TimeoutError("a signal handler's")

    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store._log.unsynced_limit = 0
        monkeypatch.setattr(store._flusher, "sync_log", interrupted)
        with pytest.raises(TimeoutError) as caught:
            store.put_many(iter([rmq.Message("T", b"x")] * 3))
        monkeypatch.undo()
        assert caught.value.stored == store.scan().read_all().num_rows > 0  # type: ignore[attr-defined]


def test_a_handler_of_logging_may_put_amid_a_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The new files of a short run are told then."""
    handler, put = logging.Handler(), list[rmq.PutResult]()
    store = rmq.open(tmp_path / "s", "x", config=SMALL)
    handler.emit = lambda record: put.append(store.put(rmq.Message("log", record.msg.encode())))  # type: ignore
    caplog.set_level(logging.INFO, "rmq")
    logging.getLogger("rmq").addHandler(handler)
    try:
        store.put(rmq.Message("T", b"x"))
        store.close()
    finally:
        logging.getLogger("rmq").removeHandler(handler)
    assert len(put) >= 1
    assert not (tmp_path / "s/abort").exists()
