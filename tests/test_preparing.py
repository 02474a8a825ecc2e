# SPDX-License-Identifier: Apache-2.0
"""What is written into is ready before it is needed, and what is written at a position is what a map would hold."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import oracle
import pytest

import rmq
import rmq.commitlog
import rmq.logsegment
import rmq.mappedfile
import rmq.preparing
import rmq.segment
from rmq.dispatch import BEHIND
from rmq.mappedfile import MappedFile
from rmq.preparing import SMALLEST

pytestmark = pytest.mark.synced
FAR = 2**31 - 1  # ms to the next timed flush
SEGMENT, FLUSHES = 256 * 1024, ("ASYNC_FLUSH", "SYNC_FLUSH")


def config(**fields: Any) -> rmq.StoreConfig:
    sizes = {"mapped_file_size_commit_log": SEGMENT, "mapped_file_size_consume_queue": 2000, "max_hash_slot_num": 10,
             "max_index_num": 3000, "flush_interval_commit_log": FAR}  # fmt: skip
    return rmq.StoreConfig(**sizes | fields)


def message(i: int, size: int = 50) -> rmq.Message:
    return rmq.Message("T", b"%06d" % i + b"x" * size, keys=[f"key{i}"], queue_id=i % 2, born_timestamp=i)


def opened(path: Path, mode: str = "a", **fields: Any) -> rmq.Store:
    return rmq.open(path, mode, config=config(**fields), clock=lambda: 1_700_000_000_000)


def log_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((path / "commitlog").iterdir())}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that suit small files; the thread does nothing, `work` is called by hand."""
    monkeypatch.setattr(rmq.preparing, "FILL_STEP", 8192)
    monkeypatch.setattr(rmq.preparing, "FILL_AHEAD", 32768)
    monkeypatch.setattr(rmq.preparing, "RESERVE_AHEAD", 65536)
    monkeypatch.setattr(rmq.logsegment, "RESERVE_AHEAD", 65536)


# ---- positioned writes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("write_size", [1, 100, 1000, 1024 * 1024])
def test_a_log_that_is_written_has_the_bytes_of_one_that_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_size: int
) -> None:
    for name, flush in (("mapped", "ASYNC_FLUSH"), ("large ones written", "ASYNC_FLUSH"), ("written", "SYNC_FLUSH")):
        with opened(tmp_path / name, flush_disk_type=flush) as store:
            for i in range(0, 300, 10):
                store.put(message(i, i * 3))
                store.put_many([message(i + k, k * 1000) for k in range(1, 8)])
                store.put_batch([rmq.Message("B", b"%d" % i, born_timestamp=i) for _ in range(3)])
            store.put(message(0, 100_000))
            store.put(message(1, SEGMENT - 500))
        monkeypatch.setattr(rmq.logsegment, "WRITE_SIZE", write_size)
        monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", write_size)
        assert log_files(tmp_path / name) == log_files(tmp_path / "mapped")
        assert oracle.check_store(tmp_path / name, 10, 3000) == []
    assert len(log_files(tmp_path / "mapped")) > 4


def test_large_batches_alone_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = MappedFile.write

    def noted(file: MappedFile, position: int, data: memoryview) -> None:
        written.append(position)
        write(file, position, data)

    monkeypatch.setattr(MappedFile, "write", noted)
    monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", 2000)
    with opened(tmp_path / "s") as store:
        store.put(message(0))
        large = [*store.put_many([message(i, 1500) for i in (2, 4)]), store.put(message(6, 2000))]
        store._log.segments[-1].file.warmed = large[2].phy_offset + 8000
        store.put(message(8, 3000))  # into pages that are in the cache
        assert written == [large[0].phy_offset, large[2].phy_offset]
        assert [m.body[:6] for m in store.pull("T", 0, 0).messages] == [b"%06d" % i for i in range(0, 10, 2)]


@pytest.mark.parametrize("size", [0, 4096, SEGMENT - 1])
def test_a_write_into_a_file_that_was_truncated_is_refused(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH")
    store.put(message(0))
    os.truncate(tmp_path / "s/commitlog" / f"{0:020d}", size)
    for _ in range(2):
        with pytest.raises(rmq.CorruptFileError):
            store.put(message(1))
    assert (tmp_path / "s/commitlog" / f"{0:020d}").stat().st_size == size
    with suppress(rmq.CorruptFileError):  # when it looks at a page that is gone
        store.close()


def test_a_synced_put_asks_for_no_times_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks makes the next write note new ones, and its sync slower."""
    real = os.fstat

    def asked(descriptor: int) -> os.stat_result:
        assert not sys._getframe(1).f_globals["__name__"].startswith("rmq.")  # but the stand-in for a sync may
        return real(descriptor)

    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH") as store:
        store.put(message(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", asked)
            store.put(message(1))
            store.put_many([message(i) for i in range(2, 5)])


def test_the_disk_begins_with_what_is_written_before_its_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(rmq.mappedfile, "begin_write_out", lambda _, position, size: begun.append((position, size)))
    monkeypatch.setattr(rmq.logsegment, "WRITE_OUT_FROM", 5000)
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH") as store:
        store.put(message(0))
        begin = store.max_phy_offset
        store.put_many([message(i, 1000) for i in range(5)])
        end = store.max_phy_offset
        store.put(rmq.Message("T", b"x" * 5000, properties={"WAIT": "false"}))  # nobody waits for its sync
        assert begun == [(begin, end - begin)]
        small = store.put(message(6))  # less, too, of who is alone
    assert begun[1:] == [(small.phy_offset, small.size)]


def test_a_system_that_cannot_begin_leaves_all_to_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmq.segment.begin_write_out(-1, 0, 10)  # an error is the sync's to tell
    monkeypatch.setattr(rmq.segment, "_sync_file_range", lambda: None)
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH") as store:
        assert store.put(message(0)).queue_offset == 0


@pytest.mark.parametrize("segment", [SEGMENT, SMALLEST], ids=["alone", "beside a thread"])
def test_queues_and_index_follow_a_put_of_many_before_it_returns(tmp_path: Path, segment: int) -> None:
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH", mapped_file_size_commit_log=segment) as store:
        for first in range(0, 3 * BEHIND, BEHIND):
            store.put_many([message(i) for i in range(first, first + BEHIND)])
            assert store._log.tail.behind == 0


def test_queues_and_index_follow_while_the_disk_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, behind = MappedFile.sync, []

    def noted(file: MappedFile) -> None:
        behind.append(store._log.tail.behind)
        sync(file)

    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH", mapped_file_size_commit_log=SMALLEST) as store:
        with monkeypatch.context() as patch:
            patch.setattr(MappedFile, "sync", noted)
            store.put_many([message(i) for i in range(BEHIND)])
        assert behind == [0]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("written", [0, 100, 4000])
@pytest.mark.parametrize("flush", FLUSHES)
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, written: int, flush: str
) -> None:
    monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", 4500)
    real = os.pwrite
    failures = []

    def failing(descriptor: int, data: memoryview, position: int) -> int:
        if written and not failures:
            failures.append(1)
            return real(descriptor, data[:written], position)
        raise OSError(error, os.strerror(error))

    with opened(tmp_path / "s", flush_disk_type=flush) as store:
        store.put_many([message(i) for i in range(5)])
        end = store.max_phy_offset
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing)
            with pytest.raises(OSError, match=os.strerror(error)):
                store.put_many([message(i) for i in range(50)])
        assert store.max_phy_offset == end
        assert store.put(message(5)).queue_offset == 2
        assert [body[:6] for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()] == [
            b"%06d" % i for i in range(6)
        ]
    assert oracle.check_store(tmp_path / "s", 10, 3000) == []


def test_a_put_does_not_wait_for_a_flush_that_syncs_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        begun.set()
        assert go_on.wait(10)

    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH") as store:
        store.put(message(0))
        with monkeypatch.context() as patch:
            patch.setattr(store._queues.cache, "sync", slow)
            thread = threading.Thread(target=store.flush)
            thread.start()
            assert begun.wait(10)
            assert [store.put(message(i)).queue_offset for i in range(1, 4)] == [0, 1, 1]
            go_on.set()
            thread.join()
        assert store._marks.read().durable_phy_offset < store.max_phy_offset
        store.flush()
        assert store._marks.read().durable_phy_offset == store.max_phy_offset


def test_a_failed_sync_that_a_flush_was_told_of_is_no_success_of_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once."""
    begun, go_on, told = threading.Event(), threading.Event(), []
    real = os.fdatasync

    def failing(descriptor: int) -> None:
        if begun.is_set():
            real(descriptor)
            return
        begun.set()
        assert go_on.wait(10)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def put() -> None:
        try:
            told.append(store.put(message(1)))
        except OSError as error:
            told.append(error)

    store = opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH")
    store.put(message(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        flush = threading.Thread(target=lambda: suppress_flush(store))
        flush.start()
        assert begun.wait(10)
        thread = threading.Thread(target=put)
        thread.start()
        go_on.set()
        thread.join()
        flush.join()
    assert [getattr(answer, "errno", answer) for answer in told] == [errno.EIO]
    store.close()


def suppress_flush(store: rmq.Store) -> None:
    with suppress(OSError):
        store.flush()


# ---- zeros ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1, 511, 4095, 4096, 8191, 8192, 8193, 65535, 65536])
@pytest.mark.parametrize("taken", [0, 5000, 65536])
def test_filling_touches_nothing_that_is_used(tmp_path: Path, used: int, taken: int) -> None:
    file = MappedFile(tmp_path / "f", size=65536, writable=True, create=True)
    file.map[:used] = b"\xff" * used
    if taken:
        file.take(taken)
        file.map[:taken] = b"\xff" * taken
    end = max(used, taken)
    for _ in range(20):
        file.fill(used, 8192)
        assert bytes(file.map) == b"\xff" * end + bytes(65536 - end)
    assert file.filled == 65536
    assert file.data_end() == 65536
    file.close()


@pytest.mark.slow
def test_puts_beside_a_thread_that_fills_keep_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmq.preparing, "SMALLEST", 0)
    monkeypatch.setattr(rmq.preparing, "FILL_STEP", 4096)
    monkeypatch.setattr(rmq.preparing, "FILL_AHEAD", 16384)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH") as store:
        for i in range(3000):
            store.put(message(i, i % 700))
        store.put_many([message(i) for i in range(3000, 9000)])
        bodies = store.scan(columns=["body"]).read_all()["body"].to_pylist()
        assert [int(body[:6]) for body in bodies] == [*range(9000)]
        assert [found.queue_offset for found in store.query("T", "key8999")] == [4499]
    assert not [thread for thread in threading.enumerate() if thread.name == "rmq-prepare"]
    assert oracle.check_store(tmp_path / "s", 10, 3000) == []


@pytest.mark.usefixtures("small")
def test_zeros_lie_ahead_under_sync_flush_only(tmp_path: Path) -> None:
    for flush in FLUSHES:
        with opened(tmp_path / flush, flush_disk_type=flush) as store:
            store.put(message(0))
            store._flusher.preparer.work()
            file = store._log.segments[-1].file
            assert file.reserved >= 32768
            assert file.filled == (40960 if flush == "SYNC_FLUSH" else 0)
            store.put(message(1, 100_000))
            store._flusher.preparer.work()
            assert file.filled == (139264 if flush == "SYNC_FLUSH" else 0)
        with opened(tmp_path / flush, "r+", flush_disk_type=flush) as store:
            store.put(message(2))
            store._flusher.preparer.work()
            assert store.scan().read_all().num_rows == 3


@pytest.mark.usefixtures("small")
def test_after_a_failed_sync_of_zeros_nothing_is_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of it once: records may be among what it has dropped."""
    store = opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH")
    store.put(message(0))

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        store._flusher.preparer.work()
    with pytest.raises(rmq.StoreReadOnlyError, match="writing failed"):
        store.put(message(1))
    store.close()
    with opened(tmp_path / "s", "r+") as store:
        assert store.scan().read_all().num_rows == 1


# ---- the next segment ------------------------------------------------------------------------------------


def fill_to(store: rmq.Store, end: int) -> int:
    """Put messages up to an end; how many."""
    count = 0
    while store.max_phy_offset < end:
        store.put(message(0, 5000))
        count += 1
    return count


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flush", FLUSHES)
def test_the_next_segment_is_there_before_it_is_needed_and_goes_at_close(tmp_path: Path, flush: str) -> None:
    path = tmp_path / "s"
    with opened(path, flush_disk_type=flush) as store:
        fill_to(store, SEGMENT - 70_000)
        store._flusher.preparer.work()
        assert len(log_files(path)) == 1
        fill_to(store, SEGMENT - 60_000)
        store._flusher.preparer.work()
        following = path / "commitlog" / f"{SEGMENT:020d}"
        inode = following.stat().st_ino
        assert following.read_bytes() == bytes(SEGMENT)
        with rmq.open(path) as reader:
            assert reader.scan().read_all() == store.scan().read_all()
        assert rmq.verify(path, config=config()).is_sound
        fill_to(store, SEGMENT + 1)
        assert following.stat().st_ino == store._log.segments[-1].inode == inode
        fill_to(store, 2 * SEGMENT - 60_000)
        store._flusher.preparer.work()
        assert len(log_files(path)) == 3
        rows = store.scan().read_all()
    assert len(log_files(path)) == 2
    assert oracle.check_store(path, 10, 3000) == []
    with rmq.open(path) as store:
        assert store.scan().read_all() == rows


@pytest.mark.usefixtures("small")
def test_a_killed_writer_may_leave_the_next_segment(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = opened(path)
    fill_to(store, SEGMENT - 60_000)
    store._flusher.preparer.work()
    rows = store.scan().read_all()
    assert len(log_files(path)) == 2
    with pytest.warns(ResourceWarning):
        store.__del__()
    with rmq.open(path) as reader:
        assert reader.scan().read_all() == rows
    with opened(path, "r+") as store:
        assert store.scan().read_all() == rows
        store._flusher.preparer.work()
        fill_to(store, SEGMENT + 60_000)
        store._flusher.preparer.work()
    assert len(log_files(path)) == 2
    assert oracle.check_store(path, 10, 3000) == []


def until_prepared(store: rmq.Store) -> None:
    ends = time.monotonic() + 10
    while store._flusher.preparer.due_at <= store._log.position:
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_the_next_segment_is_prepared_when_the_one_before_is_begun(tmp_path: Path) -> None:
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH", mapped_file_size_commit_log=SMALLEST) as store:
        store.put(message(0, 3_000_000))
        for number in range(1, 4):
            until_prepared(store)
            assert [segment.file.filled for segment in store._log.following.kept] == [SMALLEST]
            store.put(message(number, 3_000_000))
            assert len(store._log.segments) == number + 1


def test_zeros_are_written_in_long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them a sync takes longer."""
    real, filled = MappedFile.fill, []

    def noted(file: MappedFile, used: int, count: int) -> None:
        filled.append(used)
        real(file, used, count)

    monkeypatch.setattr(rmq.preparing, "FILL_STEP", 65536)
    monkeypatch.setattr(rmq.preparing, "FILL_AHEAD", 1024 * 1024)
    monkeypatch.setattr(MappedFile, "fill", noted)
    with opened(tmp_path / "s", flush_disk_type="SYNC_FLUSH", mapped_file_size_commit_log=SMALLEST) as store:
        store.put(message(0))
        until_prepared(store)
        begun = len(filled)
        assert begun >= 16
        for first in range(0, 1500, 150):
            store.put_many([message(i) for i in range(first, first + 150)])
            until_prepared(store)
        assert store._log.position < 512 * 1024
        assert len(filled) == begun
        store.put(message(1, 300_000))
        until_prepared(store)
        assert len(filled) >= begun + 8


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("call", ["posix_fallocate", "open", "fsync", "ftruncate"])
def test_what_cannot_be_prepared_is_left_to_the_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "s") as store:
        count = fill_to(store, SEGMENT - 40_000)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, call, failing)
            store._flusher.preparer.work()
        assert "No space left" in caplog.text
        assert len(log_files(tmp_path / "s")) == 1
        count += fill_to(store, 2 * SEGMENT)
        assert store.scan().read_all().num_rows == count
    assert oracle.check_store(tmp_path / "s", 10, 3000) == []


@pytest.mark.usefixtures("small")
def test_pages_ahead_are_in_the_cache_under_async_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmq.preparing, "WARM_AHEAD", 32768)
    with opened(tmp_path / "s") as store:
        store.put(message(0, 9000))
        store._flusher.preparer.work()
        first = store._log.segments[-1].file
        assert first.warmed == 49152
        fill_to(store, SEGMENT - 10_000)
        store._flusher.preparer.work()
        assert first.warmed == SEGMENT
        count = fill_to(store, SEGMENT + 1) + 1
        assert store._log.segments[-1].file.warmed == 32768
        assert store.scan().read_all().num_rows > count


@pytest.mark.usefixtures("small")
def test_no_pages_are_brought_in_for_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", 2000)
    with opened(tmp_path / "s") as store:
        for size, warmed in ((9000, 0), (10, SEGMENT)):
            store.put(message(0, size))
            store._flusher.preparer.work()
            assert store._log.segments[-1].file.warmed == warmed


def test_a_file_that_a_recovery_removed_under_a_reader_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100 + bytes(8092))
    file = MappedFile(path)
    path.unlink()
    assert file.data_end() == 8192
    file.close()
