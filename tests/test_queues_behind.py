# SPDX-License-Identifier: Apache-2.0
"""Timed flushes of a store of many queues: what they sync, what they leave to a later one, and what then counts."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import oracle
import pytest
from cleaning import Disk
from conftest import copy_store
from crashes.judge import healed_nothing

import rmq
import rmq.flushing
from rmq.checkpoint import Checkpoint
from rmq.marks import Mark, Marks
from rmq.queueends import TOLD
from rmq.queueset import QueueSet

NOW = 1_700_000_000_000
MONTH_MS = 30 * 24 * 3600 * 1000
QUEUES = rmq.flushing.QUEUE_FILES_AT_ONCE + 6
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=2**16, mapped_file_size_consume_queue=400, max_hash_slot_num=500,
                         max_index_num=5000, flush_interval_commit_log=2**31 - 1)  # fmt: skip


class Writing:
    """A store of QUEUES queues, and how many queue files each sync of these was for."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[int] = []
        self.now = NOW
        self.store = rmq.open(path, "x", config=CONFIG, clock=lambda: self.now)
        real = QueueSet.sync

        def counted(queues: QueueSet, paths: list[Path]) -> None:
            self.synced.append(sum(path.is_file() for path in paths))
            real(queues, paths)

        monkeypatch.setattr(QueueSet, "sync", counted)

    def put(self, *queues: int) -> None:
        self.now += 1
        self.store.put_many([rmq.Message("T", b"body", queue_id=number, keys=f"k{number}") for number in queues])

    def put_all(self) -> None:
        self.put(*range(QUEUES))

    def tick(self) -> list[int]:
        """What the thread rmq-flush does; how many files of queues it synced."""
        self.synced.clear()
        self.store._flusher.flush_if_due()
        return self.synced

    def checkpoint(self) -> tuple[int, int]:
        """Store timestamps of the last message, and of the last unit, that it says are on disk."""
        found = Checkpoint(self.store.path / "checkpoint")
        return found.physic_msg_timestamp, found.logics_msg_timestamp

    def mark(self) -> Mark:
        mark = self.store._marks.read()
        assert mark is not None
        return mark


@pytest.fixture
def writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    """One message in each queue, and on disk."""
    found = Writing(tmp_path / "s", monkeypatch)
    found.put_all()
    assert found.tick() == [QUEUES]  # new ones: names, too
    with found.store:
        yield found


def test_a_timed_flush_of_many_queues_leaves_them_behind(writing: Writing) -> None:
    before = writing.mark().durable_phy_offset
    for _ in range(3):
        writing.put_all()
        assert writing.tick() == []
        mark = writing.mark()
        assert (mark.durable_phy_offset, mark.indexed_phy_offset) == (writing.store.max_phy_offset,) * 2
        assert mark.derived_phy_offset == before


def test_one_that_finds_nothing_new_brings_them_to_disk(writing: Writing) -> None:
    writing.put_all()
    writing.tick()
    assert writing.tick() == [QUEUES]
    assert writing.mark().derived_phy_offset == writing.store.max_phy_offset
    assert writing.tick() == []


def test_few_queues_are_synced_by_each(writing: Writing) -> None:
    writing.put(0, 1, 2)
    assert writing.tick() == [3]
    assert writing.mark().derived_phy_offset == writing.store.max_phy_offset


def test_those_left_behind_are_synced_with_others_that_are_few(writing: Writing) -> None:
    writing.put(*range(QUEUES - 1))
    assert writing.tick() == []
    writing.put(QUEUES - 1)
    assert writing.tick() == []  # they are many together
    assert writing.tick() == [QUEUES]


def test_so_much_of_the_log_is_too_much_to_derive_again(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    writing.put_all()
    behind = writing.store.max_phy_offset - writing.mark().durable_phy_offset
    monkeypatch.setattr(rmq.flushing, "DERIVED_BEHIND", behind + 1)
    assert writing.tick() == []
    writing.put(0)
    assert writing.tick() == [QUEUES]


@pytest.mark.parametrize("what", ["a new queue", "a new file"])
def test_what_is_new_is_synced_with_its_name(writing: Writing, what: str) -> None:
    writing.put_all()
    assert writing.tick() == []
    if what == "a new queue":
        writing.put(QUEUES)
    else:
        writing.put(*[0] * 20)
    assert writing.tick() == [QUEUES + 1]
    assert writing.mark().derived_phy_offset == writing.store.max_phy_offset


@pytest.mark.parametrize("how", ["flush", "close", "clean"])
def test_nothing_stays_behind(writing: Writing, how: str) -> None:
    writing.put_all()
    end = writing.store.max_phy_offset
    assert writing.tick() == []
    if how == "clean":
        writing.store.clean(NOW, disk_usage=lambda path: Disk(10, 90))
    else:
        getattr(writing.store, how)()
    assert writing.synced == [QUEUES]
    marks = Marks(writing.store.path / "rmq" / "marks", writable=False)
    mark = marks.read()
    marks.close()
    assert mark is not None
    assert (mark.derived_phy_offset, mark.durable_phy_offset) == (end, end)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EMFILE, "full"), OSError(errno.ENOSPC, "full")])
def test_a_flush_that_fails_at_them_leaves_them_to_the_next(writing: Writing, monkeypatch: pytest.MonkeyPatch,
                                                            error: BaseException) -> None:  # fmt: skip
    """The checkpoint, by which a broker goes, speaks of no unit that was left behind."""
    writing.put_all()
    before = writing.mark().derived_phy_offset

    def failing(queues: QueueSet, paths: list[Path]) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(QueueSet, "sync", failing)
        with pytest.raises(type(error)):
            writing.store.flush()
    writing.put_all()
    assert writing.tick() == []
    assert writing.mark().derived_phy_offset == before
    assert writing.checkpoint() == (NOW + 3, NOW + 1)
    writing.store.flush()
    assert writing.synced == [QUEUES]
    assert writing.checkpoint() == (NOW + 3, NOW + 3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("step", ["merge_topics", "write_manifest"])
def test_after_a_flush_that_fails_behind_them_no_mark_goes_back(writing: Writing, monkeypatch: pytest.MonkeyPatch,
                                                                tmp_path: Path, step: str,
                                                                error: BaseException) -> None:  # fmt: skip
    """Else the manifest would know of units behind the mark, and a crash derive all queues from the whole log."""
    writing.put(*range(QUEUES + 1))

    def failing(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rmq.flushing, step, failing)
        with pytest.raises(type(error)):
            writing.store.flush()
    derived = writing.store.max_phy_offset
    assert writing.mark().derived_phy_offset == derived
    writing.put_all()
    writing.tick()
    assert writing.mark().derived_phy_offset >= derived
    image = copy_store(writing.store.path, tmp_path / "image")
    with healed_nothing(), rmq.open(image, "r+", config=CONFIG) as store:
        assert store.topics()["T"][QUEUES] == (0, 1)


def test_a_full_disk_keeps_a_cleaning_from_no_segment(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that it keeps from the queues are of messages that stay."""
    for _ in range(30):
        writing.put_all()
        writing.tick()
    log, dispatcher = writing.store._log, writing.store._flusher._store.dispatcher
    count, advance = len(log.segments), dispatcher.advance
    writing.put_all()

    def full(end: int) -> None:
        if len(log.segments) == count:
            raise OSError(errno.ENOSPC, "full")
        advance(end)

    monkeypatch.setattr(dispatcher, "advance", full)
    writing.store.clean(time.time_ns() // 10**6 + MONTH_MS, disk_usage=lambda path: Disk(10, 90), limit=None)
    assert count > 2
    assert len(log.segments) == 1
    assert writing.store.topics()["T"][0][1] == 32


def test_the_checkpoint_speaks_of_no_unit_that_was_left_behind(writing: Writing) -> None:
    writing.put_all()
    writing.tick()
    assert writing.checkpoint() == (NOW + 2, NOW + 1)
    writing.tick()
    assert writing.checkpoint() == (NOW + 2, NOW + 2)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_store_killed_behind_such_a_flush_has_all_its_units(writing: Writing, tmp_path: Path, is_lost: bool) -> None:
    """is_lost: power goes, too, and takes what was not synced."""
    on_disk = copy_store(writing.store.path, tmp_path / "on disk")
    for _ in range(3):
        writing.put_all()
        writing.tick()
    image = copy_store(writing.store.path, tmp_path / "image")
    for path in (on_disk / "consumequeue").rglob("0*") if is_lost else ():
        if path.is_file():
            (image / path.relative_to(on_disk)).write_bytes(path.read_bytes())
    for mode in ("r", "r+"):
        with rmq.open(image, mode, config=CONFIG) as store:
            assert store.topics() == {"T": dict.fromkeys(range(QUEUES), (0, 4))}
            assert [len(store.pull("T", number, 0).messages) for number in range(QUEUES)] == [4] * QUEUES
            assert len(store.query("T", "k7")) == 4
    assert oracle.check_store(image, 500, 5000) == []
    assert rmq.verify(image, config=CONFIG).is_sound


def test_an_open_after_a_kill_tells_of_a_few_queues_and_how_many_more(
    writing: Writing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writing.put_all()
    writing.tick()
    image = copy_store(writing.store.path, tmp_path / "image")
    caplog.clear()
    rmq.open(image, "r+", config=CONFIG).close()
    words = [record.getMessage() for record in caplog.records if "units" in record.getMessage()]
    assert len(words) == TOLD + 1
    assert words[-1].endswith(f"so are units of {QUEUES - TOLD} more queues")


def test_a_reader_beside_it_sees_all(writing: Writing) -> None:
    with rmq.open(writing.store.path) as early:
        writing.put_all()
        writing.tick()
        with rmq.open(writing.store.path) as late:
            for reader in (early, late):
                assert reader.topics() == {"T": dict.fromkeys(range(QUEUES), (0, 2))}
                assert len(reader.pull("T", QUEUES - 1, 0).messages) == 2
    assert rmq.verify(writing.store.path, config=CONFIG).is_sound
