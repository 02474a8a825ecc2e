"""A reader that stays open while writers come, recover and go: what it may trust of files made before and since."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import workload
from conftest import copy_store
from test_info import broker
from workload import message

import rmq
from rmq import store as store_module
from rmq import visible

pytestmark = pytest.mark.slow

FAR = 2**31 - 1  # ms to the next timed flush


def assert_follows(reader: rmq.Store, numbers: range) -> None:
    """Scan, queue, key and id all give the messages, and nothing else."""
    seen = workload.Seen()
    seen.read_on(reader)
    assert list(seen.places) == list(numbers)
    for number in (numbers[0], numbers[len(numbers) // 2], numbers[-1]):
        seen.check(reader, number)
    for (topic, queue_id), known in seen.queues.items():
        assert [workload.number_of(m.body) for m in reader.pull(topic, queue_id, 0, 10**6).messages] == known
        assert reader.topics()[topic][queue_id] == (0, len(known))


def renew(folder: Path) -> None:
    """Every file below a folder becomes another file of that name and content, as after a recovery."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        shutil.copy2(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store of messages 0 to 199."""
    with rmq.open(tmp_path / "s", "a", config=workload.config()) as store:
        store.put_many(map(message, range(200)))
    return tmp_path / "s"


@pytest.fixture
def reader(path: Path) -> Iterator[rmq.Store]:
    with rmq.open(path) as opened:
        assert_follows(opened, range(200))
        yield opened


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue", "index"])
def test_a_reader_sees_what_is_put_into_a_file_that_a_recovery_made_again(
    path: Path, reader: rmq.Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "TAIL_LIMIT", 0)  # units come from the files as soon as they are there
    renew(path / folder)
    with rmq.open(path, "r+") as writer:
        for first in range(200, 800, 200):
            writer.put_many(map(message, range(first, first + 200)))
            assert_follows(reader, range(first + 200))
            writer.flush()
            assert_follows(reader, range(first + 200))
    assert_follows(reader, range(800))


def test_a_reader_knows_topics_that_are_newer_than_its_open(path: Path, reader: rmq.Store) -> None:
    with rmq.open(path, "r+") as writer:
        result = writer.put(rmq.Message("new", b"body", uniq_key="unique"))
        assert reader.lookup("unique").phy_offset == result.phy_offset
        writer.put_many([rmq.Message("new", b"body")] * 2000)
        assert reader.lookup("unique").phy_offset == result.phy_offset
    assert reader.lookup("unique").phy_offset == result.phy_offset


def test_units_of_records_that_a_reader_cannot_see_yet_are_not_its_units(path: Path) -> None:
    """A writer's files may hold units of records that it published after the reader looked for the end."""
    config = workload.config(flush_interval_commit_log=FAR)
    with rmq.open(path, "r+", config=config) as writer, rmq.open(path) as reader:
        for turn in range(3):
            first = 200 + 60 * turn
            results = writer.put_many([message(n, (f"new{turn}", 0)) for n in range(first, first + 60)])
            writer.topics()  # units stand in the files
            view: Any = reader._visible  # type: ignore[attr-defined]
            view._limit = lambda end=results[40].phy_offset: end
            assert reader.topics()[f"new{turn}"] == {0: (0, 40)}
            assert_follows(reader, range(first + 40))
            del view._limit
            assert_follows(reader, range(first + 60))


def test_a_reader_follows_queues_that_a_recovery_made_shorter(path: Path, tmp_path: Path) -> None:
    """Power was lost: a reader sees all of 20 records, a writer finds the last one of them torn."""
    with rmq.open(path, "r+", config=workload.config(flush_interval_commit_log=FAR)) as writer:
        writer.put_many([rmq.Message("new", b"%d" % number) for number in range(20)])
        last = writer.pull("new", 0, 19, 1).messages[0]
        image = copy_store(path, tmp_path / "image")
    with rmq.open(image) as reader:
        assert len(reader.pull("new", 0, 0, 100).messages) == 20
        zero_record(image, last)
        with rmq.open(image, "r+") as writer:
            assert reader.topics()["new"] == {0: (0, 19)}
            writer.put_many([rmq.Message("new", b"more")] * 5)
            assert reader.topics()["new"] == {0: (0, 24)}
            assert reader.pull("new", 0, 0, 100).messages == writer.pull("new", 0, 0, 100).messages


def zero_record(store: Path, message: rmq.StoredMessage) -> None:
    size = workload.config().mapped_file_size_commit_log
    start = message.phy_offset - message.phy_offset % size
    with (store / "commitlog" / f"{start:020d}").open("r+b") as segment:
        segment.seek(message.phy_offset - start)
        segment.write(bytes(message.size))


def directory_only(path: Path) -> None:
    path.mkdir()
    (path / "commitlog").mkdir()


def locked_only(path: Path) -> None:
    path.mkdir()
    (path / "lock").write_bytes(b"lock")


@pytest.mark.parametrize("begin", [directory_only, locked_only])
def test_a_reader_of_a_store_that_is_being_made_learns_its_sizes(tmp_path: Path, begin: Callable[[Path], None]) -> None:
    begin(tmp_path / "s")
    with rmq.open(tmp_path / "s") as reader, rmq.open(tmp_path / "s") as late:
        assert reader.max_phy_offset == 0
        assert reader.topics() == {}
        assert reader.query("T0", "k1") == []
        with rmq.open(tmp_path / "s", "a", config=workload.config()) as writer:
            writer.put_many(map(message, range(150)))
            assert_follows(reader, range(150))
            assert reader.config.mapped_file_size_commit_log == workload.SIZES["mapped_file_size_commit_log"]
        assert_follows(reader, range(150))
        assert_follows(late, range(150))


def test_a_reader_of_a_store_that_is_being_made_sees_no_file_before_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader opens before every system call that a writer makes; afterwards all of them read."""
    readers: list[rmq.Store] = []

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if not busy and len(readers) < 40:
                busy.append(1)
                try:
                    readers.append(rmq.open(tmp_path / "s"))
                except (FileNotFoundError, rmq.UnsupportedFormatError):
                    assert not (tmp_path / "s/commitlog").exists()
                busy.pop()
            return call(*arguments, **options)

        return wrapper

    busy: list[int] = []
    with monkeypatch.context() as patch:
        for name in ("open", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "replace", "mkdir", "pwrite"):
            patch.setattr(os, name, wrapped(getattr(os, name)))
        with rmq.open(tmp_path / "s", "a", config=workload.config()) as writer:
            writer.put_many(map(message, range(150)))
    assert len(readers) > 20
    for reader in readers:
        with reader:
            assert_follows(reader, range(150))


def as_killed(path: Path) -> None:
    """Messages 0 to 179; units and index entries of the last 80 stand in files and behind the mark."""
    with rmq.open(path, "a", config=workload.config(flush_interval_commit_log=FAR)) as writer:
        writer.put_many(map(message, range(100)))
        writer.flush()
        writer.put_many(map(message, range(100, 180)))
        writer.topics()
        shutil.copytree(path, path.with_name("killed"))
    shutil.rmtree(path)
    path.with_name("killed").rename(path)


def as_it_is(path: Path) -> None:
    """Nothing else happened."""


def without_manifest(path: Path) -> None:
    (path / "rmq/manifest.json").unlink()


def with_next_segment(path: Path) -> None:
    """A segment had been made, and no record put into it."""
    size = workload.SIZES["mapped_file_size_commit_log"]
    last = max(path.glob("commitlog/*"))
    (last.parent / f"{int(last.name) + size:020}").write_bytes(bytes(size))


def by_another_process(path: Path) -> None:
    (path / "abort").write_text("1")


@pytest.mark.parametrize("begin", [as_it_is, without_manifest, with_next_segment, by_another_process])
def test_readers_miss_nothing_at_any_moment_of_a_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path], None]
) -> None:
    """One that was open and one that opens then read before every system call of a writer that opens a killed store."""
    path = tmp_path / "s"
    as_killed(path)
    begin(path)
    busy: list[str] = []
    moments: list[str] = []

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if not busy:
                busy.append(name)
                moments.append(name)
                with rmq.open(path) as fresh:
                    assert_follows(fresh, range(180))
                    assert_follows(before, range(180))
                busy.clear()
            return call(*arguments, **options)

        return wrapper

    with rmq.open(path) as before:
        with monkeypatch.context() as patch:
            for name in ("open", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "replace", "mkdir", "pwrite",
                         "unlink", "utime"):  # fmt: skip
                patch.setattr(os, name, wrapped(name, getattr(os, name)))
            writer = rmq.open(path, "r+", config=workload.config())
        with writer:
            assert {"open", "fdatasync", "pwrite", "utime"} <= set(moments)
            writer.put_many(map(message, range(180, 250)))
            assert_follows(before, range(250))


@pytest.mark.parametrize("name", ["rmq/marks", "rmq"])
def test_a_reader_follows_a_writer_that_made_lost_marks_anew(path: Path, reader: rmq.Store, name: str) -> None:
    lost = path / name
    lost.rename(path.parent / "lost")
    with rmq.open(path, "r+", config=workload.config()) as store:
        for first in (200, 300):
            store.put_many(map(message, range(first, first + 100)))
            assert_follows(reader, range(first + 100))
    assert_follows(reader, range(400))


def damage(path: Path, phy_offset: int) -> None:
    """A record's magic."""
    segment = workload.SIZES["mapped_file_size_commit_log"]
    with (path / "commitlog" / f"{phy_offset // segment * segment:020d}").open("r+b") as file:
        file.seek(phy_offset % segment + 4)
        file.write(b"\xff" * 4)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_reader_follows_a_repair_that_takes_off_what_it_has_seen(path: Path, is_own: bool) -> None:
    """And the log grows past it again, with other records."""
    if not is_own:
        shutil.rmtree(path / "rmq")
    with rmq.open(path) as reader:
        first = reader.scan(columns=["phy_offset"]).read_all()["phy_offset"][100].as_py()
        assert_follows(reader, range(200))
        damage(path, first)
        with rmq.open(path, "r+", config=workload.config(), repair=True) as writer:
            assert_follows(reader, range(100))
            writer.put_many(rmq.Message("T0", b"longer" * 9, keys="after") for _ in range(300))
            assert len(reader.query("T0", "after", limit=None)) == 300
            assert reader.topics() == writer.topics()
            assert reader.scan().read_all() == writer.scan().read_all()
        with rmq.open(path) as fresh:
            assert reader.scan().read_all() == fresh.scan().read_all()
            assert reader.pull("T0", 0, 0, 1000).messages == fresh.pull("T0", 0, 0, 1000).messages


def beside_broker(path: Path) -> Path:
    """Another directory with the store's files and a lock file of its own."""
    other = path.parent / "broker"
    other.mkdir()
    for name in ("commitlog", "consumequeue", "index"):
        (other / name).symlink_to(path / name)
    (other / "lock").touch()
    return other


def test_a_reader_beside_a_broker_keeps_few_units_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "TAIL_LIMIT", 2000)
    other = beside_broker(path)
    with rmq.open(path, "r+") as writer, broker(other), rmq.open(other, config=workload.config()) as reader:
        for _ in range(20):
            writer.put_many([rmq.Message("long", b"body")] * 200)
            writer.flush()
            assert reader.topics() == writer.topics()
            assert max(queue.tail_size for queue in reader._queues.queues.values()) <= 2000
        assert len(reader.pull("long", 0, 0, 10**6).messages) == 4000


@pytest.mark.parametrize("is_broker", [False, True])
def test_a_reader_keeps_few_units_in_memory_of_all_queues(path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          is_broker: bool) -> None:  # fmt: skip
    """Those of queues that get no more messages go too."""
    monkeypatch.setattr(visible, "TAIL_LIMIT", 2000)
    other = beside_broker(path) if is_broker else path
    with rmq.open(path, "r+") as writer, broker(other) if is_broker else nullcontext(), \
            rmq.open(other, config=workload.config()) as reader:  # fmt: skip
        for number in range(30):
            writer.put_many([rmq.Message("many", b"body" * 15, queue_id=number)] * 60)
            writer.flush()
            assert reader.topics() == writer.topics()
            assert sum(queue.tail_size for queue in reader._queues.queues.values()) <= 2000 + 60 * 20
        for number in range(30):
            assert len(reader.pull("many", number, 0, 100).messages) == 60


def test_a_reader_that_finds_a_wrong_queue_file_beside_a_broker_keeps_no_file_open(path: Path) -> None:
    with rmq.open(path, "r+") as writer:
        writer.put_many([rmq.Message("many", b"body", queue_id=number) for number in range(40)])
    other = beside_broker(path)
    with broker(other), rmq.open(other, config=workload.config()) as reader:
        reader.topics()
        min((path / "commitlog").iterdir()).unlink()
        os.truncate(min((path / "consumequeue/many/39").iterdir()), 100)
        count = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(rmq.CorruptFileError, match="has 100 bytes"):
                reader.topics()
        assert len(os.listdir("/proc/self/fd")) <= count


def test_threads_wait_for_the_one_that_learns_a_new_store_s_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_only(tmp_path / "s")
    answers: list[int] = []
    threads: list[threading.Thread] = []

    def slow(*arguments: Any, **options: Any) -> visible.Visible:
        threads.append(threading.Thread(target=lambda: answers.append(reader.max_phy_offset)))
        threads[-1].start()
        threads[-1].join(0.2)
        assert not answers
        return visible.Visible(*arguments, **options)

    with rmq.open(tmp_path / "s") as reader, rmq.open(tmp_path / "s", "a", config=workload.config()) as writer:
        writer.put_many(map(message, range(150)))
        monkeypatch.setattr(store_module, "Visible", slow)
        assert reader.max_phy_offset == writer.max_phy_offset
        for thread in threads:
            thread.join()
        assert answers == [writer.max_phy_offset]
