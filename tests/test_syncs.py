"""What is on disk when: every promise about fsync, checked on what a power cut would leave."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES

import rmq
import rmq.checkpoint
import rmq.flushing
from rmq.segment import sync_directory, write_file

FAR = 2**31 - 1  # ms to the next timed flush


def config(**fields: Any) -> rmq.StoreConfig:
    return rmq.StoreConfig(**SIZES | {"flush_interval_commit_log": FAR} | fields)


def message(i: int, **properties: str) -> rmq.Message:
    return rmq.Message("T", b"%05d" % i + b"x" * (i % 300), keys=[f"key{i}", "all"], queue_id=i % 2,
                       properties=properties)  # fmt: skip


def numbers(store: rmq.Store) -> list[int]:
    return [int(body[:5]) for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()]


class Disk:
    """Stands in for fsync and fdatasync. Knows of each file its content, of each directory its names, at the last
    sync; `image` is the store that a power cut would leave.

    What a name that is on disk leads to is held open: another file may not get its inode once it was removed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[Path] = []
        self.delay = 0.0
        self.failing: tuple[str, ...] = ()  # parts of paths; "" is part of all
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._held: dict[int, ExitStack] = {}
        monkeypatch.setattr(os, "fsync", self._sync)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}")
        number = os.fstat(descriptor).st_ino
        held = ExitStack()
        if path.is_dir():
            content: Any = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
            for name in content:
                with suppress(FileNotFoundError):
                    held.callback(os.close, os.open(path / name, os.O_PATH))
        else:
            content = path.read_bytes()
        time.sleep(self.delay)
        if any(part in str(path.readlink()) for part in self.failing):
            held.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        (self._names if path.is_dir() else self._content)[number] = content
        self._held.pop(number, ExitStack()).close()
        self._held[number] = held
        self.order.append(path.readlink())

    def __del__(self) -> None:
        for held in self._held.values():
            held.close()

    def syncs(self, folder: str) -> int:
        return sum(path.parent.name == folder for path in self.order)

    def holds(self, store: rmq.Store, result: rmq.PutResult) -> bool:
        """Whether a record and the name of its segment are on disk."""
        start = result.phy_offset - result.phy_offset % store.config.mapped_file_size_commit_log
        path = store.path / "commitlog" / f"{start:020d}"
        position = result.phy_offset - start
        data = self._content.get(path.stat().st_ino, b"")[position : position + result.size]
        names = self._names.get(path.parent.stat().st_ino, {})
        with path.open("rb") as file:
            return path.name in names and data == os.pread(file.fileno(), result.size, position)

    def image(self, source: Path, target: Path) -> Path:
        self._restore(source.stat().st_ino, target)
        return target

    def _restore(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_directory) in self._names.get(number, {}).items():
            if is_directory:
                self._restore(child, target / name)
            else:
                (target / name).write_bytes(self._content.get(child, b""))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    return Disk(monkeypatch)


def test_an_image_holds_no_file_that_got_the_inode_of_a_removed_one(tmp_path: Path, disk: Disk) -> None:
    directory = tmp_path / "s"
    directory.mkdir()
    write_file(directory / "removed", b"old", durable=True)
    sync_directory(directory)
    (directory / "removed").unlink()
    write_file(directory / "made", b"new", durable=True)
    image = disk.image(directory, tmp_path / "image")
    assert {path.name: path.read_bytes() for path in image.iterdir()} == {"removed": b"old"}


def assert_left(image: Path, rows: list[int]) -> None:
    """A power cut left these messages, possibly more; reading and writing go on."""
    with rmq.open(image) as store:
        assert numbers(store)[: len(rows)] == rows
    with rmq.open(image, "r+") as store:
        left = numbers(store)
        assert left[: len(rows)] == rows
        store.put(message(90000))
        assert numbers(store) == left + [90000]
    assert oracle.check_store(image, 10, 30) == []


# ---- flush, close, timed flush ---------------------------------------------------------------------------


def put_some(store: rmq.Store, first: int) -> None:
    for i in range(first, first + 20):
        store.put(message(i))
    store.put_many([message(i) for i in range(first + 20, first + 40)])


@pytest.mark.parametrize("call", [rmq.Store.flush, rmq.Store.close])
def test_log_then_queues_and_index_then_checkpoint_then_marks_are_synced(
    tmp_path: Path, disk: Disk, call: Callable[[rmq.Store], None]
) -> None:
    with rmq.open(tmp_path / "s", "a", config=config()) as store:
        for first in (0, 40):
            put_some(store, first)
            disk.order.clear()
            if first:
                call(store)
            else:
                store.flush()
            last = {path.relative_to(tmp_path / "s"): place for place, path in enumerate(disk.order)}
            places: dict[str, list[int]] = {"log": [], "derived": [], "checkpoint": [], "marks": []}
            kinds = {"commitlog": "log", "consumequeue": "derived", "index": "derived"}
            for path, place in last.items():
                kind = kinds.get(path.parts[0] if path.parts else "", path.name)
                if kind in places and (tmp_path / "s" / path).is_file():
                    places[kind].append(place)
            spans = [(min(found), max(found)) for found in places.values()]
            assert all(end < begin for (_, end), (begin, _) in pairwise(spans))
            assert min(len(places["log"]), len(places["derived"])) > 1


def test_after_flush_a_power_cut_takes_nothing(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config()) as store:
        for first in range(0, 160, 40):
            put_some(store, first)
            store.flush()
            image = disk.image(tmp_path / "s", tmp_path / f"image{first}")
            assert oracle.check_store(image, 10, 30) == []
            assert oracle.read_records(image) == oracle.read_records(tmp_path / "s")
            assert len(oracle.read_records(image)) == first + 40
            assert any((image / "checkpoint").read_bytes()[:8])
            assert_left(image, list(range(first + 40)))


def test_after_close_a_power_cut_leaves_a_clean_store(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config()) as store:
        put_some(store, 0)
    image = disk.image(tmp_path / "s", tmp_path / "image")
    assert not (image / "abort").exists()
    assert oracle.check_store(image, 10, 30) == []
    assert_left(image, list(range(40)))


def test_an_open_store_says_on_disk_that_it_is_open(tmp_path: Path, disk: Disk) -> None:
    """Otherwise a power cut would leave a store that looks cleanly closed."""
    rmq.open(tmp_path / "s", "a", config=config()).close()
    with rmq.open(tmp_path / "s", "r+"):
        assert (disk.image(tmp_path / "s", tmp_path / "image") / "abort").exists()


def test_the_timed_flush_makes_puts_durable(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config(flush_interval_commit_log=20)) as store:
        for i in range(5):
            result = store.put(message(i))
            deadline = time.monotonic() + 5
            while not disk.holds(store, result) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert disk.holds(store, result)
        put_some(store, 5)
        disk.order.clear()
        while not any(path.name == "marks" for path in list(disk.order)) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert_left(disk.image(tmp_path / "s", tmp_path / "image"), list(range(45)))


def test_without_a_put_the_timed_flush_leaves_the_disk_alone(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config(flush_interval_commit_log=5)) as store:
        put_some(store, 0)
        store.flush()
        time.sleep(0.05)
        disk.order.clear()
        time.sleep(0.05)
        assert disk.order == []


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: int) -> None:
    """The next call of a function raises instead."""
    real = getattr(owner, name)

    def failing(*arguments: Any) -> None:
        monkeypatch.setattr(owner, name, real)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(os, "dup"), (rmq.checkpoint, "write_fully"), (rmq.flushing, "write_manifest"), (rmq.flushing, "merge_topics")],
)
def test_what_a_flush_without_room_left_out_the_next_one_makes_durable(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    with rmq.open(tmp_path / "s", "a", config=config()) as store:
        put_some(store, 0)
        fail_once(monkeypatch, owner, name, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            store.flush()
        store.flush()
        image = disk.image(tmp_path / "s", tmp_path / "image")
        assert oracle.check_store(image, 10, 30) == []
        assert len(oracle.read_records(image)) == 40
        assert any((image / "checkpoint").read_bytes()[:8])
        assert '"T"' in (image / "rmq/manifest.json").read_text()
        assert '"T"' in (image / "config/topics.json").read_text()
        assert_left(image, list(range(40)))


# ---- SYNC_FLUSH ------------------------------------------------------------------------------------------


def test_a_returned_put_is_on_disk(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config(flush_disk_type="SYNC_FLUSH")) as store:
        done = 0
        for turn in range(30):
            if turn % 3 == 0:
                results = [store.put(message(done))]
            elif turn % 3 == 1:
                results = list(store.put_many([message(i) for i in range(done, done + 15)]))
            else:
                results = list(store.put_batch([rmq.Message("B", b"%05d" % (done + i)) for i in range(3)]))
            assert all(disk.holds(store, result) for result in results)
            done += len(results)
            if turn % 5 == 0:
                with rmq.open(disk.image(tmp_path / "s", tmp_path / f"image{turn}"), "r+") as left:
                    assert numbers(left) == list(range(done))


def test_async_flush_does_not_wait_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    with rmq.open(tmp_path / "s", "a", config=config()) as store:
        store.put(message(0))
        disk.order.clear()
        store.put_many([message(i) for i in range(1, 3)])
        assert disk.order == []


def test_who_does_not_wait_is_not_synced_but_with_one_who_does(tmp_path: Path, disk: Disk) -> None:
    fields = {"flush_disk_type": "SYNC_FLUSH", "mapped_file_size_commit_log": 65536}
    with rmq.open(tmp_path / "s", "a", config=config(**fields)) as store:
        store.put(message(0))
        disk.order.clear()
        for word in ("false", "FALSE", "no"):
            lazy = store.put(message(1, WAIT=word))
            assert not disk.holds(store, lazy)
        store.put_many([message(i, WAIT="false") for i in range(5)])
        store.put_many([])
        assert disk.order == []
        for word in ("true", "True", ""):  # a property without a value is none
            lazy = store.put(message(1, WAIT="false"))
            assert disk.holds(store, store.put(message(2, WAIT=word)))
            assert disk.holds(store, lazy)
        mixed = store.put_many([message(3, WAIT="false"), message(4), message(5, WAIT="false")])
        assert all(disk.holds(store, result) for result in mixed)
        assert disk.syncs("commitlog") == 4
        assert disk.order == [tmp_path / "s/commitlog" / f"{0:020d}"] * 4


def test_one_sync_serves_all_that_wait(tmp_path: Path, disk: Disk) -> None:
    fields = {"flush_disk_type": "SYNC_FLUSH", "mapped_file_size_commit_log": 2**20}
    faults: list[rmq.PutResult] = []

    def put_each(first: int) -> None:
        for i in range(first, first + 20):
            result = store.put(message(i))
            if not disk.holds(store, result):
                faults.append(result)

    with rmq.open(tmp_path / "s", "a", config=config(**fields)) as store:
        store.put(message(0))
        disk.order.clear()
        disk.delay = 0.01
        threads = [threading.Thread(target=put_each, args=(20 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        disk.delay = 0
        assert faults == []
        assert len(numbers(store)) == 161
        assert disk.syncs("commitlog") <= 60  # one each would be 160; eight at a time 20


# ---- a sync that fails -----------------------------------------------------------------------------------


def eio() -> Any:
    return pytest.raises(OSError, match=os.strerror(errno.EIO))


def assert_takes_no_more(store: rmq.Store) -> None:
    before = store.max_phy_offset
    calls: list[Callable[[], Any]] = [
        lambda: store.put(message(41)),
        lambda: store.put(message(41, WAIT="false")),
        lambda: store.put_many([message(41)]),
        lambda: store.put_batch([message(41)]),
        store.flush,
    ]
    for call in calls:
        with pytest.raises(rmq.StoreReadOnlyError, match="writing failed"):
            call()
    assert store.max_phy_offset == before


def assert_reads(store: rmq.Store, rows: int) -> None:
    assert numbers(store)[:rows] == list(range(rows))
    assert [int(found.body[:5]) for found in store.query("T", "key7")] == [7]
    assert [int(found.body[:5]) for found in store.pull("T", 1, 0, rows // 2).messages] == list(range(1, rows, 2))
    assert store.topics()["T"][0][0] == 0


def fail_by_put(store: rmq.Store) -> None:
    with eio() as caught:
        store.put(message(42))
    assert caught.value.errno == errno.EIO


def fail_by_flush(store: rmq.Store) -> None:
    store.put(message(42, WAIT="false"))
    with eio() as caught:
        store.flush()
    assert caught.value.errno == errno.EIO


def fail_by_time(store: rmq.Store) -> None:
    store.put(message(42, WAIT="false"))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.01)
        try:
            store.put(message(42, WAIT="false"))
        except rmq.StoreReadOnlyError:
            return
    pytest.fail("the timed flush met an error, and puts go on")


@pytest.mark.parametrize(
    ("fail", "failing", "fields"),
    [
        (fail_by_put, "/commitlog/", {"flush_disk_type": "SYNC_FLUSH"}),
        (fail_by_time, "/commitlog/", {"flush_interval_commit_log": 20}),
        (fail_by_time, "/commitlog/", {"flush_interval_commit_log": 20, "flush_disk_type": "SYNC_FLUSH"}),
        (fail_by_flush, "", {}),
        (fail_by_flush, "/commitlog/", {}),
        (fail_by_flush, "/consumequeue/", {}),
        (fail_by_flush, "/index/", {}),
        (fail_by_flush, "/checkpoint", {}),
        (fail_by_flush, "/marks", {}),
    ],
)
def test_after_a_failed_sync_nothing_is_put_until_it_is_opened_again(
    tmp_path: Path, disk: Disk, fail: Callable[[rmq.Store], None], failing: str, fields: dict[str, Any]
) -> None:
    store = rmq.open(tmp_path / "s", "a", config=config(mapped_file_size_commit_log=2**16, **fields))
    put_some(store, 0)
    store.put_many([message(40), message(41)])
    store.flush()
    disk.failing = (failing,)
    fail(store)
    disk.failing = ()  # the kernel reports success next time: it has dropped the pages
    assert_takes_no_more(store)
    assert_reads(store, 42)
    image = disk.image(tmp_path / "s", tmp_path / "image")
    store.close()
    assert (tmp_path / "s/abort").exists()
    assert_left(image, list(range(42)))
    assert_left(tmp_path / "s", list(range(42)))


@pytest.mark.parametrize("failing", ["/consumequeue/", "/index/", "/index", "/consumequeue/T/0"])
def test_a_failed_sync_of_a_new_file_is_a_failed_sync(tmp_path: Path, disk: Disk, failing: str) -> None:
    """Queues and index must not stay behind for ever, nor say that a file they left half made exists."""
    store = rmq.open(tmp_path / "s", "a", config=config(mapped_file_size_commit_log=2**16, max_index_num=41))
    put_some(store, 0)  # fills two files of each queue and two of the index
    store.flush()
    disk.failing = (failing,)
    store.put(message(40))
    with eio():
        store.flush()
    disk.failing = ()
    assert_takes_no_more(store)
    assert_reads(store, 40)
    store.close()
    image = disk.image(tmp_path / "s", tmp_path / "image")
    for path in (image, tmp_path / "s"):
        with rmq.open(path, "r+", config=config(mapped_file_size_commit_log=2**16, max_index_num=41)) as again:
            again.put(message(90000))
            assert numbers(again)[:40] == list(range(40))
        assert oracle.check_store(path, 10, 41) == []


def test_all_that_wait_for_a_failed_sync_are_told(tmp_path: Path, disk: Disk) -> None:
    answers: list[str] = []

    def put_one(i: int) -> None:
        try:
            store.put(message(i))
            answers.append("stored")
        except (OSError, rmq.StoreReadOnlyError) as error:
            answers.append(type(error).__name__)

    with rmq.open(tmp_path / "s", "a", config=config(flush_disk_type="SYNC_FLUSH")) as store:
        store.put(message(0))
        disk.delay, disk.failing = 0.05, ("",)
        threads = [threading.Thread(target=put_one, args=(i,)) for i in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        disk.delay = 0
    assert len(answers) == 6
    assert "OSError" in answers
    assert "stored" not in answers
    disk.failing = ()
    assert_left(disk.image(tmp_path / "s", tmp_path / "image"), [0])
    assert_left(tmp_path / "s", [0])


@pytest.mark.parametrize("is_told", [True, False])
def test_close_tells_of_a_timed_flush_that_failed_unless_a_put_did(tmp_path: Path, disk: Disk, is_told: bool) -> None:
    store = rmq.open(tmp_path / "s", "a", config=config())
    store.put(message(0))
    disk.failing = ("/commitlog/",)
    store._flusher.flush_if_due()
    disk.failing = ()
    if is_told:
        assert_takes_no_more(store)
        store.close()
    else:
        with eio():
            store.close()
    assert store.closed
    assert_left(tmp_path / "s", [0])


def test_a_close_that_cannot_sync_says_so_and_the_store_recovers(tmp_path: Path, disk: Disk) -> None:
    store = rmq.open(tmp_path / "s", "a", config=config())
    put_some(store, 0)
    store.flush()
    store.put(message(40))
    disk.failing = ("",)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.close()
    disk.failing = ()
    assert store.closed
    store.close()
    assert_left(disk.image(tmp_path / "s", tmp_path / "image"), list(range(40)))
    assert_left(tmp_path / "s", list(range(41)))
