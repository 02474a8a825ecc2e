"""Puts and looks amid a cleaning: what was chosen to go gets a message, what was looked at goes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cleaning import CONFIG, SEGMENT, clean, expire, fill, kinds, open_store

import rmq
from rmq import retention
from rmq._core import _layout as L
from rmq._core._recordbatch import RecordBatch
from rmq.consumequeue import ConsumeQueue
from rmq.logcuts import Proof
from rmq.queueset import QueueSet
from rmq.scan import sound

LOW = 4 * SEGMENT


def test_a_put_between_the_choice_of_a_queue_and_its_removal_keeps_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the manifest, which leaves the queue out by then."""
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        with rmq.open(tmp_path / "s") as reader:
            expire(tmp_path / "s", LOW)
            clean(store)
            put = threading.Thread(target=store.put, args=[rmq.Message("old", b"again")])
            answers, real = [], os.replace

            def replace(source: Path, target: Path) -> None:
                real(source, target)
                if Path(target).name == "manifest.json":
                    answers.append(reader.topics().get("old"))
                    put.start()
                    put.join(30)
                    answers.append(put.is_alive())

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", replace)
                assert clean(store, expired_queues=True).removed == ()
            assert answers == [None, False]
            for opened in (store, reader):
                assert opened.topics()["old"] == {0: (10, 11)}
                assert [found.body for found in opened.pull("old", 0, 10).messages] == [b"again"]
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode) as store:
            assert store.topics()["old"] == {0: (10, 11)}
    assert list(rmq.verify(tmp_path / "s")) == []


def test_a_queue_that_gets_a_message_while_it_is_judged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(*asked: Any) -> bool:
        found = has_expired(*asked)
        if asked[0].topic == "old":
            thread = threading.Thread(target=lambda: store.put(rmq.Message("old", b"late")) and store.pull("old"))
            thread.start()
            thread.join()
        return found

    has_expired = retention._has_expired
    monkeypatch.setattr(retention, "_has_expired", judged)
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        expire(tmp_path / "s", LOW)
        clean(store)
        assert kinds(clean(store, expired_queues=True)) == []
        assert store.topics()["old"] == {0: (10, 11)}
        assert store.put(rmq.Message("old", b"later")).queue_offset == 11
        assert [found.body for found in store.pull("old", 0, 10).messages] == [b"late", b"later"]
        assert rmq.verify(tmp_path / "s").is_sound


def test_a_queue_file_that_begins_while_a_cleaning_looks_at_the_one_before_stays(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Edge: the one before is full, and all of it has expired."""
    path, read, count_below = tmp_path / "s", ConsumeQueue.read, ConsumeQueue.count_below
    put = threading.Thread(target=lambda: (store.put(rmq.Message("old", b"again")), store.topics()))

    def read_amid(queue: ConsumeQueue, *place: int) -> Any:
        units = read(queue, *place)
        if put.ident is None:
            put.start()
            put.join()
        return units

    def count_amid(queue: ConsumeQueue, low: int) -> int:
        with monkeypatch.context() as patch:
            if queue.topic == "old":
                patch.setattr(ConsumeQueue, "read", read_amid)
            return count_below(queue, low)

    with open_store(path, "x", CONFIG) as store:
        fill(store)
        expire(path, LOW)
        monkeypatch.setattr(ConsumeQueue, "count_below", count_amid)
        removed = [Path(file.path) for file in clean(store).removed]
        assert [file.name for file in removed if file.parent.parent.name == "old"] == [f"{0:020d}"]
        assert [item.body for item in store.pull("old", 0, 10).messages] == [b"again"]
    assert [file.name for file in (path / "consumequeue/old/0").iterdir()] == [f"{10 * L.UNIT_SIZE:020d}"]
    assert rmq.verify(path).is_sound


def test_a_look_at_a_queue_that_begins_again_and_outgrows_its_old_end_meanwhile_is_made_anew(tmp_path: Path) -> None:
    """Edge: the log begins where it began before the look."""
    def ask(queue: Any) -> list[int]:
        looks.append(queue.max_offset)
        if len(looks) == 1:
            assert kinds(clean(store, expired_queues=True)) == ["consumequeue"]
            store.put_many([rmq.Message("old", b"new")] * 25)
            raise rmq.CorruptFileError("units", 0, "are of a message that was removed")
        return looks

    looks = list[int]()
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        expire(tmp_path / "s", LOW)
        clean(store)
        assert store._ask_queue("old", 0, ask) == [10, 25]


def test_a_last_record_that_is_cleaned_while_it_is_looked_for_was_not_cut_off(tmp_path: Path) -> None:
    """Edge: the log began before it when the look began."""
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        with rmq.open(tmp_path / "s") as reader:
            expire(tmp_path / "s", LOW)
            clean(store)
            assert reader._log.segments[0].start == 0
            assert not Proof(2 * SEGMENT, b"in a segment that nobody mapped").is_cut(reader._log)
            assert reader._log.segments[0].start == LOW


def test_a_broken_body_whose_segment_was_cleaned_since_it_was_read_is_told_by_where_it_was(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        store.put(rmq.Message("T", b"no zlib"))
    data = bytearray((tmp_path / "s/commitlog" / f"{0:020d}").read_bytes())
    data[L.RECORD_SYS_FLAG_OFFSET + 3] |= L.SYS_FLAG_COMPRESSED
    batch, told = RecordBatch(), list[Any]()
    batch.scan(bytes(data), 0, 0, len(data))
    log = SimpleNamespace(segment_at=lambda phy_offset: None, segment_size=SEGMENT, directories=[Path("log")])
    assert list(sound(log, batch, True, None, lambda *lost: told.append(lost))) == []
    assert [lost[:3] for lost in told] == [(Path("log") / f"{0:020d}", 0, batch.numbers("size")[0])]


@pytest.mark.parametrize("turns", [1, 3])
def test_an_open_amid_cleanings_that_take_all_it_has_looked_at_finds_no_queue_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, turns: int
) -> None:
    """The mark that was read then lies below the log's begin, and all units of the files behind it."""
    path, left, load = tmp_path / "s", [turns], QueueSet.load
    with open_store(path, "x", CONFIG) as store:
        fill(store)

        def clean_and_load(queues: QueueSet) -> None:
            if left[0]:
                left[0] -= 1
                fill(store)
                expire(path, store.max_phy_offset - SEGMENT)
                assert clean(store).removed
            load(queues)

        monkeypatch.setattr(QueueSet, "load", clean_and_load)
        with rmq.open(path) as reader:
            assert (left, caplog.messages) == ([0], [])
            assert reader.topics() == store.topics()
            assert reader.min_phy_offset == store.min_phy_offset
            assert [item.phy_offset for item in reader.query("T", "all", limit=None)] == \
                [item.phy_offset for item in store.query("T", "all", limit=None)] != []  # fmt: skip


def test_an_open_amid_a_cleaning_that_takes_queues_finds_none_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest was read before the cleaning, the queues' files after it."""
    path, load, cleaned = tmp_path / "s", QueueSet.load, list[str]()
    with open_store(path, "x", CONFIG) as store:
        store.put_many([rmq.Message("old", b"body", queue_id=number) for number in range(3)])
        fill(store)

        def clean_and_load(queues: QueueSet) -> None:
            if not cleaned:
                expire(path, store.max_phy_offset - SEGMENT)
                cleaned.extend(item.path for item in clean(store, expired_queues=True).removed)
            load(queues)

        monkeypatch.setattr(QueueSet, "load", clean_and_load)
        with rmq.open(path) as reader:
            assert any("/old/" in name for name in cleaned)
            assert caplog.messages == []
            assert reader.topics() == store.topics() != []


def test_topics_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither on the disk nor in a reader; who comes again is there again."""
    path = tmp_path / "s"
    with open_store(path, "x", CONFIG) as store, rmq.open(path) as reader:
        for turn in range(6):
            names = [f"turn{turn}-{number}" for number in range(5)] + ["again"]
            store.put_many([rmq.Message(name, b"body", queue_id=number) for name in names for number in range(2)])
            store.put_many([rmq.Message("T", b"x" * 100) for _ in range(100)])
            store.flush()
            assert set(reader.topics()) == {*names, "T"}
            assert [len(reader.pull("again", number).messages) for number in range(2)] == [1, 1]
            expire(path, store.max_phy_offset - SEGMENT)
            clean(store, expired_queues=True)
            assert set(reader.topics()) == {"T"}
            assert set(reader._queues.queues) == {("T", 0)}  # type: ignore[attr-defined]
            assert [item.name for item in (path / "consumequeue").iterdir()] == ["T"]
