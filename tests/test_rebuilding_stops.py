"""A rebuild in a store that is stopped between its renames, or may not begin."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import copy_store, digests
from test_rebuilding import CONFIG, PARTS, Countdown, Stopped, assert_answers, cleaned, derived_files, dispatched, fill

import rmq
from rmq import deriving, logend, rebuilding, segment
from rmq._core import _layout as L
from rmq.consumequeue import ConsumeQueue
from rmq.filecache import FileCache
from rmq.queueset import QueueSet


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("rebuilding") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return copy_store(made, tmp_path / "store")


def cannot(*_: Path) -> bool:
    """In place of `exchange`: the system has none."""
    return False


@pytest.mark.parametrize("more", [60, 90])
def test_a_queue_without_messages_ends_before_those_that_a_crash_took(tmp_path: Path, more: int) -> None:
    """Edge: their units fill the queue's last file, or go on in another."""
    path = cleaned(tmp_path / "s")
    later = copy_store(path, tmp_path / "later")
    with rmq.open(later, "r+") as store:
        store.put_many([rmq.Message("over", b"")] * more)
    shutil.rmtree(path / "consumequeue")
    copy_store(later / "consumequeue", path / "consumequeue")
    (path / "abort").touch()
    rmq.rebuild(path, tmp_path / "new", processes=1)
    rmq.rebuild(path, processes=1)
    with rmq.open(path) as store:
        assert store.topics()["over"] == {0: (130, 130)}
    assert digests(tmp_path / "new", *PARTS) == digests(path, *PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [segment.exchange, cannot])
def test_a_crash_between_renames_keeps_the_offsets_of_queues_without_messages(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., bool]) -> None:  # fmt: skip
    """The next open for writing, or the next rebuild, puts in place what the killed one had made."""
    source = cleaned(tmp_path / "source")
    with rmq.open(source, "r+") as store:
        topics = store.topics()
    derive, rename, rmtree = rebuilding.derive, os.rename, shutil.rmtree
    for step, goes_on in [(step, goes_on) for step in range(6) for goes_on in ("r+", "rebuild")]:
        path, countdown = copy_store(source, tmp_path / f"{goes_on}{step}"), Countdown(step)

        def counted(*arguments: Any, is_exact: bool, countdown: Countdown = countdown) -> deriving.Derived:
            found = derive(*arguments, is_exact=is_exact)
            swap = cannot if exchange is cannot else countdown.before(exchange)
            monkeypatch.setattr(rebuilding, "exchange", swap)
            monkeypatch.setattr(os, "rename", countdown.before(rename))
            monkeypatch.setattr(shutil, "rmtree", countdown.before(rmtree))
            return found

        monkeypatch.setattr(rebuilding, "derive", counted)
        with contextlib.suppress(Stopped):
            rmq.rebuild(path, processes=1)
        monkeypatch.undo()
        assert (path / "consumequeue").exists() == (exchange is not cannot or step != 1)
        if goes_on == "rebuild":
            rmq.rebuild(path, processes=1)
        with rmq.open(path, "r+") as store:
            assert not {"rebuild", "replaced"} & {*os.listdir(path / "rmq")}
            assert store.topics() == topics, (step, goes_on)
            assert store.put(rmq.Message("over", b"")).queue_offset == 130
        assert rmq.verify(path).is_sound
        shutil.rmtree(path)


@pytest.mark.parametrize(("exchange", "renames"), [(segment.exchange, 2), (cannot, 4)])
@pytest.mark.parametrize("error", [OSError(16, "Device or resource busy"), KeyboardInterrupt()])
def test_a_rename_that_fails_leaves_the_store_as_it_was(
        made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException,
        exchange: Callable[..., bool], renames: int) -> None:  # fmt: skip
    rename = os.rename
    for failing in range(renames):
        path, calls = copy_store(made, tmp_path / f"s{failing}"), iter(range(100))
        before = digests(path, *PARTS, "rmq")

        def failed(source: Path, target: Path, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise error
            rename(source, target)

        monkeypatch.setattr(rebuilding, "exchange", exchange)
        monkeypatch.setattr(os, "rename", failed)
        with pytest.raises(type(error)):
            rmq.rebuild(path, processes=1)
        monkeypatch.undo()
        assert digests(path, *PARTS, "rmq") == before
        assert not (path / "rmq" / "replaced").exists()
        assert_answers(path)


def test_an_exchange_that_fails_leaves_the_store_as_it_was(made: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Before it, of the first part and of the second, and behind it."""
    for failing, is_done in ((0, False), (1, False), (0, True), (1, True)):
        path, calls = copy_store(made, tmp_path / f"s{failing}{is_done}"), iter(range(100))
        before = digests(path, *PARTS, "rmq")

        def failed(new: Path, place: Path, calls: Iterator[int] = calls, failing: int = failing,
                   is_done: bool = is_done) -> bool:  # fmt: skip
            number = next(calls)
            done = segment.exchange(new, place) if is_done or number != failing else False
            if number == failing:
                raise KeyboardInterrupt
            return done

        monkeypatch.setattr(rebuilding, "exchange", failed)
        with pytest.raises(KeyboardInterrupt):
            rmq.rebuild(path, processes=1)
        monkeypatch.undo()
        assert digests(path, *PARTS, "rmq") == before
        assert not (path / "rmq" / "replaced").exists()


@pytest.mark.parametrize("exchange", [segment.exchange, cannot])
def test_a_rebuild_that_has_no_room_for_its_marks_leaves_the_store_as_it_was(
        store: Path, monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., bool]) -> None:  # fmt: skip
    """Behind its renames, while the old parts and the new ones fill the disk."""
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    before = digests(store, *PARTS, "rmq")
    inodes = [(store / part).stat().st_ino for part in PARTS]
    monkeypatch.setattr(rebuilding, "exchange", exchange)
    monkeypatch.setattr(rebuilding, "write_manifest", full)
    with pytest.raises(OSError, match="no room"):
        rmq.rebuild(store, processes=1)
    monkeypatch.undo()
    assert digests(store, *PARTS, "rmq") == before
    assert [(store / part).stat().st_ino for part in PARTS] == inodes
    assert not (store / "rmq" / "replaced").exists()
    assert_answers(store)
    assert rmq.rebuild(store, processes=1).unit_count > 0


def test_names_are_exchanged_or_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"b")
    assert segment.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"b"
    assert (tmp_path / "b").is_dir()
    with pytest.raises(FileNotFoundError, match="none"):
        segment.exchange(tmp_path / "a", tmp_path / "none")
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_lies_elsewhere_is_told_first(store: Path, tmp_path: Path, part: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shutil.move(store / part, tmp_path / "elsewhere")
    (store / part).symlink_to(tmp_path / "elsewhere")
    before = digests(store, *PARTS, "rmq")
    monkeypatch.setattr(rebuilding, "derive", None)
    with pytest.raises(OSError, match="rebuild with an output") as found:
        rmq.rebuild(store, processes=1)
    assert found.value.filename == str(store / part)
    monkeypatch.undo()
    assert digests(store, *PARTS, "rmq") == before
    rmq.rebuild(store, tmp_path / "new", processes=1)
    if part == "index":
        rmq.rebuild(store, config=rmq.StoreConfig(message_index_enable=False), processes=1)
    assert_answers(store)


@pytest.mark.parametrize("place", ["new", "consumequeue/new", "commitlog/new", "index/new", "rmq/rebuild"])
def test_an_output_in_the_store_is_refused(store: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(store)
    for target in (store / place, tmp_path / "link" / place):
        with pytest.raises(ValueError, match="lies in the store"):
            rmq.rebuild(store, target, processes=1)
    assert not (store / place).exists()


def test_an_output_elsewhere_is_refused_a_file_uri_is_not(store: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match="output s3://b/y is no directory of this machine"):
        rmq.rebuild(store, "s3://b/y", processes=1)
    assert sorted(os.listdir()) == before
    assert rmq.rebuild(store, f"file://{tmp_path}/new", processes=1).path == str(tmp_path / "new")


# ---- readers that open at that moment -------------------------------------------------------------------------


def test_queues_that_are_moved_away_while_they_are_listed_are_listed_again(
        store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real = QueueSet.open

    def moved(queues: QueueSet, topic: str, queue_id: int) -> ConsumeQueue:
        if (store / "consumequeue").exists():
            os.rename(store / "consumequeue", tmp_path / "replaced")
        return real(queues, topic, queue_id)

    monkeypatch.setattr(QueueSet, "open", moved)
    assert_answers(store)


def test_queues_that_others_replace_while_they_are_listed_are_listed_again(
        store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real, looks = QueueSet.open, iter(range(100))

    def replaced(queues: QueueSet, topic: str, queue_id: int) -> ConsumeQueue:
        if next(looks) == 2:
            os.rename(store / "consumequeue", tmp_path / "replaced")
            shutil.copytree(tmp_path / "replaced", store / "consumequeue")
            shutil.rmtree(tmp_path / "replaced")
        return real(queues, topic, queue_id)

    monkeypatch.setattr(QueueSet, "open", replaced)
    assert_answers(store)
    assert next(looks) > 6


def test_files_that_are_removed_while_their_end_is_sought_end_the_search(
        store: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    nothing = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
    files = FileCache(writable=False)
    queue = ConsumeQueue(store / "consumequeue" / "orders" / "1", "orders", 1, CONFIG.mapped_file_size_consume_queue,
                         files, writable=False, is_exact=True)  # fmt: skip
    end = queue.max_offset
    monkeypatch.setattr(queue, "read", lambda *place: nothing)
    queue.cut_where(2**62, lambda *place: False)
    assert queue.max_offset == end
    files.close()


# ---- a writer beside an output --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 400])
def test_what_a_writer_puts_while_the_end_is_sought_is_no_damage(store: Path, tmp_path: Path, count: int,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    find_end = logend.find_end
    with rmq.open(store, "r+") as opened:
        def racing(*arguments: Any, **options: Any) -> Any:
            end = find_end(*arguments, **options)
            opened.put_many([rmq.Message("orders", b"later", queue_id=2)] * count)
            return end

        monkeypatch.setattr(logend, "find_end", racing)
        result = rmq.rebuild(store, tmp_path / "new", processes=1)
    assert 1500 <= result.unit_count <= 1500 + 2 * count
    assert sorted(os.listdir(tmp_path / "new")) == list(PARTS)


def test_damage_beside_a_writer_is_told(store: Path, tmp_path: Path) -> None:
    with rmq.open(store, "r+") as opened:
        place = opened.put(rmq.Message("orders", b"x" * 50)).phy_offset
        opened.put(rmq.Message("orders", b"later"))
        opened.flush()
        with sorted((store / "commitlog").iterdir())[-1].open("r+b") as file:
            file.seek(place % CONFIG.mapped_file_size_commit_log)
            file.write(bytes(50))
        with pytest.raises(rmq.CorruptFileError):
            rmq.rebuild(store, tmp_path / "new", processes=1)
    assert not os.listdir(tmp_path / "new")


def test_a_log_that_is_cleaned_meanwhile_is_read_again(store: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    derive = rebuilding.derive
    segments = sorted((store / "commitlog").iterdir())[:2]

    def racing(*arguments: Any, **options: Any) -> deriving.Derived:
        if segments:
            segments.pop(0).unlink()
        return derive(*arguments, **options)

    monkeypatch.setattr(rebuilding, "derive", racing)
    result = rmq.rebuild(store, tmp_path / "new", processes=1)
    assert not segments
    assert 0 < result.unit_count < 1500
    assert sorted(os.listdir(tmp_path / "new")) == list(PARTS)


@pytest.mark.parametrize("is_late", [False, True], ids=["amid", "behind"])
@pytest.mark.parametrize("dies_at", [0, 1, 10**9], ids=["at once", "soon", "never"])
def test_a_segment_that_two_tasks_derive_at_a_time_counts_once(
        made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool, dies_at: int) -> None:  # fmt: skip
    """As Spark's speculation does. Edges: the second one is killed; it is at work when the index is made."""
    put_rows, copied, calls = deriving._KeySink.put_rows, list[int](), list[int]()

    def put_twice(sink: deriving._KeySink, batch: Any, row: int, key: int) -> tuple[int, int]:
        if copied and copied[-1] >= 0:
            calls.append(row)
            if len(calls) > dies_at:
                raise Stopped
        return put_rows(sink, batch, row, key)

    def copy(item: deriving.SegmentTask) -> None:
        copied.append(item.begin)
        with contextlib.suppress(Stopped, FileNotFoundError):  # what it writes into is gone
            deriving.derive_segment(item)
        copied.append(-1)

    def amid(sink: deriving._KeySink, batch: Any, row: int, key: int) -> tuple[int, int]:
        following = put_twice(sink, batch, row, key)
        if not is_late and not copied:
            copy(tasks[0])
        return following

    def run(task: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
        if task is deriving.derive_segment:
            tasks.extend(items)
        elif is_late and not copied:
            copy(tasks[0])
        yield from map(task, items)

    tasks: list[deriving.SegmentTask] = []
    monkeypatch.setattr(deriving._KeySink, "put_rows", amid)
    rebuilding.rebuild_by(run, made, tmp_path / "new")
    assert copied == [0, -1]
    assert derived_files(tmp_path / "new") == derived_files(made)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == list(PARTS)


def set_queue_offset(path: Path, phy_offset: int, queue_offset: int) -> None:
    size = CONFIG.mapped_file_size_commit_log
    with (path / "commitlog" / f"{phy_offset - phy_offset % size:020d}").open("r+b") as file:
        file.seek(phy_offset % size + L.RECORD_QUEUE_OFFSET_OFFSET)
        file.write(queue_offset.to_bytes(8, "big", signed=True))


WRONG_OFFSETS = pytest.mark.parametrize(("number", "queue_offset"), [
    (700, 5000), (700, -1), (700, 2**62), (700, 3), (0, 2**60), (1499, 0)])  # fmt: skip


def set_offset_of(store: Path, number: int, queue_offset: int) -> int:
    with rmq.open(store) as opened:
        [found] = opened.query("rare" if number % 5 == 0 else "orders", f"k{number}")
    set_queue_offset(store, found.phy_offset, queue_offset)
    return found.phy_offset


@WRONG_OFFSETS
def test_queue_offsets_of_a_broker_that_leave_gaps_are_dispatched_in_order(store: Path, tmp_path: Path, number: int,
                                                                           queue_offset: int) -> None:  # fmt: skip
    """It may have lost messages: a queue goes on at its own end."""
    set_offset_of(store, number, queue_offset)
    shutil.rmtree(store / "rmq")
    expected = dispatched(store, tmp_path / "expected", CONFIG)
    rmq.rebuild(store, tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(expected)


@WRONG_OFFSETS
def test_a_wrong_queue_offset_in_a_log_of_ours_moves_no_other_message(store: Path, tmp_path: Path, number: int,
                                                                      queue_offset: int) -> None:  # fmt: skip
    with rmq.open(store) as opened:
        places = {number: opened.query("rare" if number % 5 == 0 else "orders", f"k{number}")[0]
                  for number in range(0, 1500, 7)}  # fmt: skip
    set_offset_of(store, number, queue_offset)
    rmq.rebuild(store, tmp_path / "new", processes=1)
    rmq.rebuild(store, processes=1)
    assert derived_files(tmp_path / "new") == derived_files(store)
    with rmq.open(store) as opened:
        for other, place in places.items():
            if other != number:
                pulled = opened.pull(place.topic, place.queue_id, place.queue_offset, 1).messages
                assert [message.phy_offset for message in pulled] == [place.phy_offset], other


def test_a_try_that_works_on_after_the_rebuild_has_ended_makes_nothing_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        deriving._make_file(tmp_path / "units" / "orders" / "0" / "file", 20)
    assert os.listdir(tmp_path) == []
    (tmp_path / "units").mkdir()
    deriving._make_file(tmp_path / "units" / "orders" / "0" / "file", 20)
    assert (tmp_path / "units" / "orders" / "0" / "file").stat().st_size == 20


@pytest.mark.parametrize("number", [3, 1495, 1499])
def test_a_body_that_is_damaged_is_no_reason_not_to_derive(tmp_path: Path, number: int) -> None:
    """Queues and index come from what stands beside it; in the last segment, too, of whose end it may be the record."""
    store = fill(tmp_path / "s")
    with rmq.open(store) as opened:
        place = opened.scan(columns=["phy_offset"]).read_all()["phy_offset"][number].as_py()
    made = derived_files(store)
    with (store / "commitlog" / f"{place - place % 65536:020d}").open("r+b") as file:
        file.seek(place % 65536 + L.RECORD_BODY_OFFSET)
        file.write(b"!!")
    with rmq.open(store) as opened, pytest.raises(rmq.CorruptFileError, match="CRC"):
        opened.scan().read_all()
    assert rmq.rebuild(store, tmp_path / "new", processes=1).unit_count == 1500
    assert derived_files(tmp_path / "new") == made
