"""Cleaning that is interrupted: at each call that changes a directory, by a kill, by a power cut, by an error."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cleaning import SEGMENT, SIZES, assert_left, clean, date, expire, fill, first_segment, make, open_store
from conftest import copy_store, digests
from test_syncs import Disk as SyncedDisk

import rmq
from rmq import retention
from rmq.consumequeue import ConsumeQueue

LOW = 4 * SEGMENT
pytestmark = pytest.mark.slow

SHORT_QUEUES = rmq.StoreConfig(**SIZES | {"mapped_file_size_consume_queue": 80})  # several files of each go
FOLDERS = ("commitlog", "consumequeue", "index")


@pytest.fixture
def no_complaint(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Recovery finds nothing to warn of: a cleaned prefix is no damage."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


class Images:
    """Copies of a store, one before each call of os.unlink, rmdir, replace and fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Path, target: Path) -> None:
        self.paths: list[Path] = []
        self.calls: list[str] = []
        for name in ("unlink", "rmdir", "replace", "fsync"):
            monkeypatch.setattr(os, name, self._imaged(name, getattr(os, name), store, target))

    def _imaged(self, name: str, call: Callable[..., Any], store: Path, target: Path) -> Callable[..., Any]:
        def imaged(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            self.paths.append(copy_store(store, target / f"{len(self.calls)}-{name}"))
            return call(*arguments, **options)

        return imaged


def inodes(directory: Path) -> set[tuple[str, int]]:
    return {(entry.name, entry.inode()) for entry in os.scandir(directory)}


def assert_comes_back(path: Path, messages: list[rmq.StoredMessage], settled: dict[str, str], **options: bool) -> None:
    """An interrupted cleaning left a whole store; it opens as it is, and cleaning goes on from there."""
    low = first_segment(path) * SEGMENT
    assert low <= LOW
    before, index = digests(path, "commitlog"), inodes(path / "index")
    with rmq.open(path) as store:
        assert_left(store, messages, low)
    with open_store(path, "r+") as store:
        assert_left(store, messages, low)
        assert (digests(path, "commitlog"), inodes(path / "index")) == (before, index), "made again"
        expire(path, LOW)
        clean(store, **options)
        assert_left(store, messages, LOW)
    assert digests(path, *FOLDERS) == settled


@pytest.mark.usefixtures("no_complaint")
def test_killed_before_any_removal_it_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = make(tmp_path / "s", config=SHORT_QUEUES)
    (tmp_path / "images").mkdir()
    with open_store(tmp_path / "s", "r+") as store, monkeypatch.context() as patch:
        expire(tmp_path / "s", LOW)
        images = Images(patch, tmp_path / "s", tmp_path / "images")
        result = clean(store)
    settled = digests(tmp_path / "s", *FOLDERS)
    assert images.calls.count("unlink") >= len(result.removed) > 12
    assert images.calls.count("fsync") >= len(result.removed)
    for image in images.paths:
        assert_comes_back(image, messages, settled)


@pytest.mark.usefixtures("no_complaint")
def test_killed_amid_the_removal_of_whole_queues_it_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = make(tmp_path / "s", config=SHORT_QUEUES)
    (tmp_path / "images").mkdir()
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        clean(store)
        with monkeypatch.context() as patch:
            images = Images(patch, tmp_path / "s", tmp_path / "images")
            result = clean(store, expired_queues=True)
        assert [Path(file.path).parent.parent.name for file in result.removed] == ["old"]
        store.put(rmq.Message("old", b"again"))
    assert {"unlink", "rmdir", "replace"} <= set(images.calls)
    kept = [item for item in messages if item.topic != "old"]
    for image in images.paths:
        with rmq.open(image) as store:
            has_queue = "old" in store.topics()
            assert_left(store, messages if has_queue else kept, LOW)
        with open_store(image, "r+") as store:
            date(image)
            clean(store, expired_queues=True)
            assert_left(store, kept, LOW)
            assert store.put(rmq.Message("old", b"again")).queue_offset == 0


@pytest.mark.usefixtures("no_complaint")
def test_a_power_cut_after_any_sync_leaves_a_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not synced is lost: names come back that were removed, and content that was not flushed."""
    images: list[Path] = []
    with monkeypatch.context() as patch:
        disk = SyncedDisk(patch)
        messages = make(tmp_path / "s", config=SHORT_QUEUES)
        with open_store(tmp_path / "s", "r+") as store:
            expire(tmp_path / "s", LOW)
            sync = os.fsync

            def imaged(descriptor: int) -> None:
                images.append(disk.image(tmp_path / "s", tmp_path / f"{len(images)}"))
                sync(descriptor)

            patch.setattr(os, "fsync", imaged)
            clean(store)
        last = disk.image(tmp_path / "s", tmp_path / "last")
    settled = digests(last, *FOLDERS)
    assert settled == digests(tmp_path / "s", *FOLDERS)
    assert len(images) > 15
    for image in images:
        assert_comes_back(image, messages, settled)


@pytest.mark.parametrize("number", [1, 3, 5, 8, 12])
def test_a_file_that_cannot_be_removed_is_told_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        real, left = os.unlink, [number]

        def unlink(path: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            real(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            with pytest.raises(PermissionError):
                clean(store)
        low = first_segment(tmp_path / "s") * SEGMENT
        assert_left(store, messages, low)
        messages += fill(store, 20, 200)
        assert_left(store, messages, low)
        clean(store)
        assert_left(store, messages, LOW)
    with open_store(tmp_path / "s", "r+") as store:
        assert_left(store, messages, LOW)
        clean(store)  # what was forgotten and could not be removed
    with rmq.open(tmp_path / "s") as store:
        assert_left(store, messages, LOW)


@pytest.mark.parametrize("failing", ["/commitlog", "/consumequeue/T/1", "/index"])
def test_a_sync_that_fails_stops_the_cleaning_and_the_puts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    messages = make(tmp_path / "s")
    store = open_store(tmp_path / "s", "r+")
    expire(tmp_path / "s", LOW)
    with monkeypatch.context() as patch:
        disk = SyncedDisk(patch)
        disk.failing = (failing,)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            clean(store)
    for call in (lambda: store.put(rmq.Message("T", b"x")), lambda: clean(store)):
        with pytest.raises(rmq.StoreReadOnlyError):
            call()
    assert_left(store, messages, first_segment(tmp_path / "s") * SEGMENT)
    store.close()
    with open_store(tmp_path / "s", "r+") as store:
        assert_left(store, messages, first_segment(tmp_path / "s") * SEGMENT)
        expire(tmp_path / "s", LOW)
        clean(store)
        assert_left(store, messages, LOW)


@pytest.mark.parametrize("folder", ["commitlog", "index", "0"])
def test_without_a_descriptor_for_a_directory_nothing_goes_and_puts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        real = os.open

        def used_up(path: Any, flags: int, *mode: int, **options: Any) -> int:
            if flags & os.O_DIRECTORY and os.path.basename(path) == folder:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return real(path, flags, *mode, **options)

        before = digests(tmp_path / "s", "commitlog" if folder == "commitlog" else "index")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", used_up)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                clean(store)
        if folder != "0":
            assert digests(tmp_path / "s", "commitlog" if folder == "commitlog" else "index") == before
        assert_left(store, messages, first_segment(tmp_path / "s") * SEGMENT)
        clean(store)
        assert_left(store, messages, LOW)
        store.put(rmq.Message("T", b"goes on"))


def test_on_a_full_disk_what_is_flushed_can_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither queues nor index find a block for what was put last; it stays, and they follow when there is room."""
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        last = store.put(rmq.Message("new", b"x", keys=["k", "all"], uniq_key="u"))
        with monkeypatch.context() as patch:
            real = os.ftruncate

            def ftruncate(descriptor: int, size: int) -> None:
                if first_segment(tmp_path / "s") < 4:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real(descriptor, size)

            patch.setattr(os, "ftruncate", ftruncate)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                store.flush()
            assert clean(store).min_phy_offset == LOW
        assert [item.phy_offset for item in store.query("new", "k")] == [last.phy_offset]
        messages.append(store.lookup(last.phy_offset))
        assert_left(store, messages, LOW)
    with rmq.open(tmp_path / "s") as store:
        assert_left(store, messages, LOW)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_cleaning_after_one_that_was_interrupted_leaves_no_gap_in_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """count: queue files that the first one removed."""
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        real, removed = os.unlink, []

        def unlink(path: Path) -> None:
            if "consumequeue" in str(path):
                if len(removed) == count:
                    raise KeyboardInterrupt
                removed.append(path)
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                clean(store)
        expire(tmp_path / "s", 2 * LOW)
        clean(store)
        assert_left(store, messages, 2 * LOW)
        with rmq.open(tmp_path / "s") as reader:
            assert_left(reader, messages, 2 * LOW)
    with open_store(tmp_path / "s", "r+") as store:
        assert_left(store, messages, 2 * LOW)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_queue_of_which_a_file_cannot_be_removed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            failing: int) -> None:  # fmt: skip
    def remove(path: Path, sync: Any) -> None:
        if path.parent.parent.name == "old":
            calls.append(path)
            if len(calls) == failing + 1:
                raise PermissionError(errno.EPERM, "not now", str(path))
        remove_file(path, sync)

    calls: list[Path] = []
    with open_store(tmp_path / "s", "x", SHORT_QUEUES) as store, rmq.open(tmp_path / "s") as reader:
        fill(store)
        assert reader.topics()["old"] == {0: (0, 10)}
        expire(tmp_path / "s", LOW)
        files = len(list((tmp_path / "s/consumequeue/old/0").iterdir()))
        assert files > failing
        remove_file = retention.remove_file
        with monkeypatch.context() as patched:
            patched.setattr(retention, "remove_file", remove)
            with pytest.raises(PermissionError, match="not now"):
                clean(store, expired_queues=True)
        assert len(list((tmp_path / "s/consumequeue/old/0").iterdir())) == files - failing
        assert store.topics()["old"] == reader.topics()["old"] == {0: (10, 10)}
        assert store.put(rmq.Message("old", b"more")).queue_offset == 10
        store.flush()
        assert [found.body for found in store.pull("old", 0, 10).messages] == [b"more"]
    with rmq.open(tmp_path / "s") as reader:
        assert reader.topics()["old"] == {0: (10, 11)}
    assert rmq.verify(tmp_path / "s").is_sound


# ---- interrupts and errors that pass --------------------------------------------------------------------------


def test_a_queue_whose_removal_was_interrupted_begins_at_0_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has no units any more its next message must not have the offset behind them."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        store.put_many([rmq.Message("Old", bytes(100))] * 20)
        store.put_many([rmq.Message("New", bytes(500))] * 100)
        forget = ConsumeQueue.forget_files

        def interrupted(queue: ConsumeQueue) -> None:
            forget(queue)
            raise KeyboardInterrupt

        monkeypatch.setattr(ConsumeQueue, "forget_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.clean(2**42, file_reserved_time=0, limit=None, expired_queues=True)
        monkeypatch.undo()
        for number in range(3):
            assert store.put(rmq.Message("Old", b"%d" % number)).queue_offset == number
            assert [int(message.body) for message in store.pull("Old").messages] == [*range(number + 1)]
        store.flush()
    assert rmq.verify(tmp_path / "s").is_sound


def test_segments_that_a_flush_synced_before_it_failed_may_be_cleaned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that syncs asks nothing of them any more."""
    config = rmq.StoreConfig(**SIZES, flush_disk_type="SYNC_FLUSH")
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        unsynced = [rmq.Message("T", bytes(200), properties={"WAIT": "false"}) for _ in range(100)]
        store.put_many(unsynced)
        assert len(store._log.unsynced) > 1
        flush = store._checkpoint.flush

        def full() -> None:
            monkeypatch.setattr(store._checkpoint, "flush", flush)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(store._checkpoint, "flush", full)
        remove, puts = retention._remove, []

        def removed(*arguments: Any) -> None:
            remove(*arguments)
            if not puts:
                thread = threading.Thread(target=lambda: puts.append(store.put(rmq.Message("T", b"amid"))))
                thread.start()
                thread.join()

        monkeypatch.setattr(retention, "_remove", removed)
        assert store.clean(2**42, file_reserved_time=0, limit=None).removed
        assert [put.queue_offset for put in puts] == [100]
