# SPDX-License-Identifier: Apache-2.0
"""What a reader takes from files in two looks, between which a writer puts: neither an answer is missing nor a fault
made up."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import lock_of_a_broker

import rmq
from rmq import legacy
from rmq._core import _layout as L
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq.commitlog import CommitLog
from rmq.consumequeue import QueueGapError
from rmq.errors import CorruptFileError
from rmq.lock import StoreLock
from rmq.marks import Marks
from rmq.queueset import QueueSet
from rmq.signs import has_old_blanks, index_signs
from rmq.verification import indexes, verify
from rmq.verification.ground import list_segments
from rmq.verification.queues import QueueFiles
from rmq.verification.records import SegmentCheck, Window
from rmq.visible import Visible

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=30)  # fmt: skip
EVER = -(2**63), 2**63 - 1


def index_of(entries: int, slots: int = 1, **options: Any) -> IndexFileView:
    """A view of an empty index file in memory, for so many entries."""
    return IndexFileView(bytearray(index_file_size(slots, entries + 1)), hash_slot_num=slots, index_num=entries + 1,
                         writable=True, **options)  # fmt: skip


@pytest.mark.parametrize("together", [1, 1000], ids=["one by one", "in batches"])
@pytest.mark.parametrize("select", [
    lambda view: view.select_one("k", 1, *EVER),
    lambda view: view.select(np.array([rmq.java_hash("k")], np.int32), 1, *EVER)[1],
], ids=["select_one", "select"])  # fmt: skip
def test_an_entry_is_found_while_others_of_its_slot_are_put(select: Callable[[IndexFileView], Any],
                                                            together: int) -> None:  # fmt: skip
    """Looks at slot and count come in the order in which they are published, the other way round."""
    count = 100_000 if together == 1 else 2_000_000
    view, hashes = index_of(count), np.full(together, rmq.java_hash("k"), np.int32)
    offsets, times = np.arange(together), np.full(together, 10**12)
    view.put_one("k", 0, 10**12)

    def put() -> None:
        while view.put(hashes, offsets, times):
            pass

    putter = threading.Thread(target=put)
    putter.start()
    found = []
    while putter.is_alive():
        answer = select(view)
        if answer is not None:  # None: nothing was looked for
            found.append(len(answer))
    putter.join()
    assert len(found) > 10
    assert set(found) == {1}


def test_older_index_files_are_asked_while_the_next_one_has_no_header(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(rmq.Message("T", b"", keys=[f"k{number}"]) for number in range(29))
    (index,) = (path / "index").iterdir()
    (path / "index" / f"{int(index.name) + 1:017d}").write_bytes(bytes(index.stat().st_size))
    shutil.rmtree(path / "rmq")
    with lock_of_a_broker(path), rmq.open(path, "r", config=CONFIG) as store:
        assert [len(found) for found in store.select_phy_offset_many("T", ["k0", "k28"], begin=1)] == [1, 1]


@pytest.mark.parametrize("behind", [0, 1, 2, 40])
def test_a_file_that_counts_every_put_is_known_while_others_are_put(behind: int) -> None:
    view = index_of(100, count_every_put=True)
    view.put(np.zeros(60, np.int32), np.arange(60), np.full(60, 10**12))
    data = bytearray(view.header())
    data[L.INDEX_HASH_SLOT_COUNT_OFFSET : L.INDEX_HASH_SLOT_COUNT_OFFSET + 4] = (60 - behind).to_bytes(4, "big")
    assert not view.restore(data)
    assert view.counts_every_put()


@pytest.mark.parametrize(("links", "ahead"), [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (20, 0), (20, 1)])
def test_a_file_that_counts_used_slots_is_taken_for_no_older_one(links: int, ahead: int) -> None:
    """ahead: its slot count is, of its entry count, while an entry is put."""
    view = index_of(100, slots=1000)
    hashes = np.concatenate([np.arange(60), np.zeros(links)]).astype(np.int32)
    view.put(hashes, np.arange(len(hashes)), np.full(len(hashes), 10**12))
    data = bytearray(view.header())
    data[L.INDEX_HASH_SLOT_COUNT_OFFSET : L.INDEX_HASH_SLOT_COUNT_OFFSET + 4] = (60 + ahead).to_bytes(4, "big")
    assert not view.restore(data)
    assert not view.counts_every_put()


@dataclass
class GrowingIndex:
    """One file, to which each look at a count adds an entry in a slot of its own."""

    entries: int = 5

    @property
    def files(self) -> list[GrowingIndex]:
        return [self]

    @property
    def hash_slot_count(self) -> int:
        self.entries += 1
        return self.entries

    @property
    def index_count(self) -> int:
        self.entries += 1
        return self.entries + 1

    def counts_every_put(self) -> bool:
        return False


def test_no_release_is_told_from_counts_of_two_moments() -> None:
    assert list(index_signs(GrowingIndex())) == []  # type: ignore[arg-type]


@dataclass
class Broker:
    """A store as a broker writes it, message by message: its files after each."""

    path: Path
    states: list[dict[Path, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        made = self.path.with_name("made")
        with rmq.open(made, "x", config=CONFIG) as store:
            for number in range(40):
                for topic in ("A", "B"):
                    store.put(rmq.Message(topic, b"%d" % number, keys=f"{topic}{number}"))
                store.flush()
                self.states.append({
                    path.relative_to(made): path.read_bytes() for name in ("commitlog", "consumequeue", "index")
                    for path in (made / name).rglob("*") if path.is_file()})  # fmt: skip
        self.path.mkdir()
        (self.path / "lock").touch()
        (self.path / "abort").touch()

    def write(self, number: int) -> None:
        """The files as they are when `number` messages of each topic are there."""
        for name, data in self.states[number - 1].items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as file:
                file.write(data)


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path / "s")


def test_a_message_that_comes_while_queues_are_loaded_is_pulled(broker: Broker,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """To a queue that was loaded, and then one to a queue that was not."""
    broker.write(3)
    real, loaded = QueueSet.open, []

    def open_(queues: QueueSet, topic: str, queue_id: int) -> Any:
        if loaded == ["A"]:
            broker.write(5)
        loaded.append(topic)
        return real(queues, topic, queue_id)

    monkeypatch.setattr(QueueSet, "open", open_)
    with lock_of_a_broker(broker.path), rmq.open(broker.path, "r", config=CONFIG) as store:
        assert loaded[:2] == ["A", "B"]
        assert [store.topics()[topic][0] for topic in ("A", "B")] == [(0, 5), (0, 5)]


def test_a_unit_that_a_recovery_of_ours_has_not_written_yet_is_derived(broker: Broker) -> None:
    broker.write(3)
    queue = broker.path / "consumequeue" / "A" / "0" / f"{0:020d}"
    with queue.open("r+b") as file:
        file.seek(2 * L.UNIT_SIZE)
        file.write(bytes(L.UNIT_SIZE))
    lock = StoreLock(broker.path / "lock", lambda: None)
    try:
        with rmq.open(broker.path, "r", config=CONFIG) as store:
            assert [store.topics()[topic][0] for topic in ("A", "B")] == [(0, 3), (0, 3)]
    finally:
        lock.close()


def test_units_that_a_recovery_of_ours_has_not_written_yet_are_no_fault(broker: Broker) -> None:
    """It writes them queue by queue."""
    broker.write(3)
    queue = broker.path / "consumequeue" / "A" / "0" / f"{0:020d}"
    queue.write_bytes(queue.read_bytes()[: L.UNIT_SIZE].ljust(200, b"\0"))
    lock = StoreLock(broker.path / "lock", lambda: None)
    try:
        result = rmq.verify(broker.path, config=CONFIG)
    finally:
        lock.close()
    assert [str(finding) for finding in result if finding.severity != "note"] == []


def test_the_log_is_read_to_its_end_while_a_recovery_of_ours_has_published_none(broker: Broker) -> None:
    broker.write(40)
    (broker.path / "rmq").mkdir()
    lock = StoreLock(broker.path / "lock", lambda: None)
    marks = Marks(broker.path / "rmq" / "marks", writable=True, create=True)
    try:
        with rmq.open(broker.path, "r", config=CONFIG) as store:
            assert [store.topics()[topic][0] for topic in ("A", "B")] == [(0, 40), (0, 40)]
            assert [message.body for message in store.query("B", "B39")] == [b"39"]
            assert store.scan().read_all().num_rows == 80
    finally:
        marks.close()
        lock.close()


def test_a_queue_file_that_comes_while_others_are_listed_is_none_missing(
        broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Messages come each time that the queues are listed, to one of which all was listed, and to one behind it."""
    numbers = iter((10, 20, 30, 40))
    broker.write(next(numbers))
    real = QueueFiles._list_files

    def list_files(files: QueueFiles, directory: Path) -> Any:
        if directory.parent.name == order[-1]:
            broker.write(next(numbers))
        return real(files, directory)

    order = [entry.name for entry in os.scandir(broker.path / "consumequeue")]
    monkeypatch.setattr(QueueFiles, "_list_files", list_files)
    with lock_of_a_broker(broker.path):
        result = rmq.verify(broker.path, config=CONFIG)
    assert [str(finding) for finding in result if finding.severity != "note"] == []
    assert list(numbers)


def test_units_of_a_segment_that_comes_when_others_were_listed_point_to_records(
        broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def list_(*given: Any, **options: Any) -> Any:
        found = list_segments(*given, **options)
        broker.write(40)
        return found

    broker.write(3)
    monkeypatch.setattr(verify, "list_segments", list_)
    with lock_of_a_broker(broker.path):
        result = rmq.verify(broker.path, config=CONFIG)
    assert [str(finding) for finding in result if finding.severity != "note"] == []
    assert len(list((broker.path / "commitlog").iterdir())) > 1


def test_a_record_that_comes_behind_what_was_read_is_verified(broker: Broker,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The store is at rest when it is looked at, then a writer comes."""
    real = Window.move

    def move(window: Window, start: int, end: int) -> None:
        real(window, start, end)
        (broker.path / "abort").touch()
        broker.write(5)

    def pass_over(check: SegmentCheck, place: int, following: int, stop: int) -> None:
        raise AssertionError(f"a record at {place} was passed over")  # again and again

    broker.write(3)
    (broker.path / "abort").unlink()
    monkeypatch.setattr(Window, "move", move)
    monkeypatch.setattr(SegmentCheck, "_pass_over", pass_over)
    result = rmq.verify(broker.path, config=CONFIG, jobs=1)
    assert [str(finding) for finding in result if finding.severity != "note"] == []
    assert result.record_count == 10


def test_a_full_index_file_is_not_held_against_an_older_header(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last entry is put between looks at its count and its header, or behind both."""
    full = next(number for number, files in enumerate(broker.states, 1)
                if len([name for name in files if name.parts[0] == "index"]) == 2)  # fmt: skip
    real = indexes._HEADER

    class Header:
        def unpack_from(self, data: Any) -> Any:
            found = real.unpack_from(data)
            broker.write(full)
            return found

    broker.write(full - 1)
    monkeypatch.setattr(indexes, "_HEADER", Header())
    with lock_of_a_broker(broker.path):
        result = rmq.verify(broker.path, config=CONFIG)
    assert [str(finding) for finding in result if finding.severity != "note"] == []


def test_the_end_of_a_header_may_come_behind_the_count_that_makes_its_file_full(broker: Broker) -> None:
    """Source: RocketMQ IndexFile#putKey."""
    broker.write(40)
    full, *others = sorted((broker.path / "index").iterdir())
    for other in others:
        other.unlink()
    with full.open("r+b") as file:
        for position in (L.INDEX_END_TIMESTAMP_OFFSET, L.INDEX_END_PHY_OFFSET_OFFSET):
            file.seek(position)
            file.write(bytes(8))
    with lock_of_a_broker(broker.path):
        result = rmq.verify(broker.path, config=CONFIG)
    assert [str(finding) for finding in result if finding.severity != "note"] == []


def test_a_segment_that_goes_while_blanks_are_looked_for_is_no_error(
        broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def look(log: CommitLog) -> bool:
        log.segments[0].let_go()
        log.segments[0].path.unlink()
        return has_old_blanks(log)

    broker.write(40)
    monkeypatch.setattr(legacy, "has_old_blanks", look)
    with lock_of_a_broker(broker.path), rmq.open(broker.path, "r", config=CONFIG) as store:
        assert [message.body for message in store.query("B", "B39")] == [b"39"]


def test_a_cleaning_while_gaps_are_filled_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(rmq.Message("A", b"%d" % number * 20) for number in range(100))
    with rmq.open(path, "r") as store:
        count = store.topics()["A"][0][1]
    real, calls = Visible._advance, []

    def advance(visible: Visible, end: int) -> None:
        calls.append(end)
        if len(calls) == 1:
            raise QueueGapError("units are missing")
        if len(calls) == 2:
            first = min((path / "commitlog").iterdir())
            first.unlink()
            raise CorruptFileError(first, 0, "file is gone")
        real(visible, end)

    monkeypatch.setattr(Visible, "_advance", advance)
    with rmq.open(path, "r") as store:
        low, high = store.topics()["A"][0]
    assert (low > 0, high) == (True, count)
    assert len(calls) > 2


def test_a_gap_before_a_reader_looked_at_all_anew_is_filled(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look itself finds that queues lost units."""
    broker.write(5)
    real, refresh, calls = Visible._advance, Visible.refresh, []

    def advance(visible: Visible, end: int) -> None:
        calls.append(end)
        if len(calls) == 1:
            monkeypatch.setattr(Visible, "refresh", look_anew)
            raise QueueGapError("units are missing")
        real(visible, end)

    def look_anew(visible: Visible) -> int:
        monkeypatch.setattr(Visible, "refresh", refresh)
        visible._look()
        visible._derive_anew([("A", 0)])
        return visible.end

    monkeypatch.setattr(Visible, "_advance", advance)
    with lock_of_a_broker(broker.path), rmq.open(broker.path, "r", config=CONFIG) as store:
        assert [store.topics()[topic][0] for topic in ("A", "B")] == [(0, 5), (0, 5)]
    assert len(calls) > 1
