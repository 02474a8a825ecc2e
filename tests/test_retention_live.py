"""Cleaning beside readers and puts: of another process, of other threads, before and amid what they do."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cleaning import (
    CONFIG,
    HOUR,
    NOW,
    ROOMY,
    SEGMENT,
    SIZES,
    assert_left,
    clean,
    date,
    expire,
    fill,
    first_segment,
    kinds,
    make,
    message,
    open_store,
)
from commandline import environment
from conftest import Golden, copy_store, digests

import rmq
from rmq import pull
from rmq._core._layout import UNIT_SIZE
from rmq.consumequeue import ConsumeQueue
from rmq.filecache import FileCache
from rmq.logsegment import Segment
from rmq.queuefiles import QueueFiles

LOW = 4 * SEGMENT
ROUNDS = 60  # segments that go while others look


# ---- readers that were there before ------------------------------------------------------------------------


def test_a_reader_that_missed_what_was_put_and_cleaned_finds_its_units_in_the_files(tmp_path: Path) -> None:
    """It derived up to here; of what came since, the first part is gone from the log."""
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        messages = fill(store, 40)
        with rmq.open(tmp_path / "s") as reader:
            assert_left(reader, messages, 0)
            messages += fill(store, 200, 40)
            low = 6 * SEGMENT
            assert messages[40].phy_offset < low
            expire(tmp_path / "s", low)
            clean(store)
            assert_left(reader, messages, low)
            messages += fill(store, 30, 240)
            assert_left(reader, messages, low)


def test_a_reader_sees_that_queues_without_messages_go_though_the_log_stays(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        with rmq.open(tmp_path / "s") as reader:
            expire(tmp_path / "s", LOW)
            clean(store)
            assert reader.topics()["old"] == {0: (10, 10)}
            assert kinds(clean(store, expired_queues=True)) == ["consumequeue"]
            assert reader.topics() == store.topics()
            assert "old" not in reader.topics()
            assert reader.pull("old").status is rmq.PullStatus.NO_MESSAGE_IN_QUEUE
            store.put(rmq.Message("old", b"again"))
            assert [found.body for found in reader.pull("old").messages] == [b"again"]


def test_a_reader_tells_of_all_files_that_would_go_though_it_derived_their_units(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store, 60)
        with rmq.open(tmp_path / "s") as reader:
            reader.topics()
            fill(store, 140, 60)
            date(tmp_path / "s", rest=HOUR)
            told = clean(reader, dry_run=True)
            assert told == clean(store, dry_run=True)
            assert kinds(told).count("consumequeue") > 10
            assert reader.topics() == store.topics()


@pytest.mark.slow
def test_a_reader_with_units_in_memory_keeps_them_when_the_files_before_go(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        messages = fill(store, 100)
        with rmq.open(tmp_path / "s") as reader:
            for first in range(100, 300, 25):
                messages += fill(store, 25, first)
                assert_left(reader, messages, reader.min_phy_offset)
                messages.append(store.lookup(store.put(message(900 + first)).phy_offset))  # not flushed
                reader.topics()
                low = reader.min_phy_offset + SEGMENT
                expire(tmp_path / "s", low)
                clean(store)
                assert_left(reader, messages, low)


@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_follows_a_queue_of_a_brokers_store_that_goes_and_begins_again(tmp_path: Path, count: int) -> None:
    """Edge: its units were in the reader's memory alone."""
    make(tmp_path / "s", 10)
    (tmp_path / "s/rmq/meta.json").unlink()
    with open_store(tmp_path / "s", "r+", CONFIG) as store:
        store.put_many([rmq.Message("gone", b"old")] * 3)
        with rmq.open(tmp_path / "s") as reader:
            assert reader.topics()["gone"] == {0: (0, 3)}
            fill(store, 200)
            expire(tmp_path / "s", LOW)
            clean(store)
            clean(store, expired_queues=True)
            assert "gone" not in reader.topics()
            store.put_many([rmq.Message("gone", b"new")] * count)
            store.flush()
            assert reader.topics() == store.topics()
            assert [found.body for found in reader.pull("gone").messages] == [b"new"] * count


@pytest.mark.parametrize("is_derived", [True, False])
@pytest.mark.parametrize("is_moved", [True, False])
@pytest.mark.parametrize("count", [1, 300])
def test_a_reader_sees_a_queue_that_begins_at_0_again(tmp_path: Path, is_derived: bool, is_moved: bool,
                                                      count: int) -> None:  # fmt: skip
    """is_derived: the reader has units of the ended queue in memory. is_moved: segments go after the new messages, too.

    Edge: the reader looks only when the log has moved past all that it knew (300).
    """
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store, 40)
        with rmq.open(tmp_path / "s") as reader:
            reader.topics()
            if is_derived:
                fill(store, 60)
            assert reader.topics()["old"] == {0: (0, 20 if is_derived else 10)}
            fill(store, 60, first=130)
            expire(tmp_path / "s", store.max_phy_offset // SEGMENT * SEGMENT)
            assert "queue without messages" in [file.reason for file in clean(store, expired_queues=True).removed]
            again = [store.put(rmq.Message("old", b"%d" % i)).queue_offset for i in range(count)]
            if is_moved:
                fill(store, 40, first=130)
                expire(tmp_path / "s", (store.max_phy_offset // SEGMENT - 2) * SEGMENT)
                clean(store)
            assert again == list(range(count))
            assert reader.topics() == store.topics()
            for low, high in store.topics().get("old", {}).values():
                assert reader.pull("old", 0, low, 1000).messages == store.pull("old", 0, low, 1000).messages
                assert high in (0, count)


@pytest.mark.parametrize("moment", ["_load", "valid_in"])
def test_a_reader_that_looks_at_a_queue_while_its_files_go_loses_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Edge: while (or right after) it looks for the queue's end, all files go but one that had no unit a moment ago."""
    size = SIZES["mapped_file_size_consume_queue"] // UNIT_SIZE
    files = FileCache(True)
    writer = ConsumeQueue(tmp_path / "T" / "0", "T", 0, size * UNIT_SIZE, files, writable=True, is_exact=True)

    def units(first: int, count: int) -> bytes:
        return b"".join(struct.pack(">qiq", 1000 + n * 100, 100, 0) for n in range(first, first + count))

    writer.append(0, units(0, 3 * size))
    reader = ConsumeQueue(writer.directory, "T", 0, size * UNIT_SIZE, FileCache(False), writable=False, is_exact=True)
    kind = ConsumeQueue if moment == "_load" else QueueFiles
    real, calls = getattr(kind, moment), []

    def look(looked_at: Any, *arguments: Any, **options: Any) -> Any:
        own = getattr(looked_at, "files", looked_at)
        answer = real(looked_at, *arguments, **options) if moment == "_load" else None
        if own is not writer.files and (own is not reader.files or moment == "_load") and not calls:
            calls.append(moment)
            if moment != "_load":
                writer.append(3 * size, units(3 * size, 2))
            for path in writer.files.first(3):
                path.unlink()
            for start in range(4):
                own._cache.forget(own.path(start * size * UNIT_SIZE))
        return answer if moment == "_load" else real(looked_at, *arguments)

    writer.files._create(writer.files.path(3 * size * UNIT_SIZE), 3 * size * UNIT_SIZE)
    if moment == "_load":
        writer.append(3 * size, units(3 * size, 2))
    monkeypatch.setattr(kind, moment, look)
    reader.follow_files(1000 + (3 * size + 2) * 100)
    assert calls == [moment]
    assert reader.max_offset == 3 * size + 2
    files.close()


def test_min_phy_offset_of_a_reader_is_what_it_is_now(tmp_path: Path) -> None:
    make(tmp_path / "s")
    with rmq.open(tmp_path / "s") as reader, open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", LOW)
        clean(store)
        assert reader.min_phy_offset == LOW


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_scan_under_way_goes_on_behind_what_was_removed(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the writer's own process removes it still has mapped; another process may find a file gone."""
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store, rmq.open(tmp_path / "s") as reader:
        scan = (store if mode == "r+" else reader).scan(columns=["phy_offset"], batch_rows=5)
        first = scan.read_next_batch()["phy_offset"].to_pylist()
        expire(tmp_path / "s", LOW)
        clean(store)
        rest = scan.read_all()["phy_offset"].to_pylist()
    assert first == [item.phy_offset for item in messages[:5]]
    assert rest[-1] == messages[-1].phy_offset
    assert set(rest) >= {item.phy_offset for item in messages if item.phy_offset >= LOW}
    assert rest == sorted(set(rest))
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.endswith("to 16384 were cleaned away while they were read")


def test_a_damaged_log_is_not_taken_for_a_cleaned_one(tmp_path: Path) -> None:
    make(tmp_path / "s")
    with rmq.open(tmp_path / "s") as reader:
        scan = reader.scan(columns=["phy_offset"], batch_rows=5)
        (tmp_path / "s/commitlog" / f"{2 * SEGMENT:020d}").unlink()
        with pytest.raises(rmq.CorruptFileError, match=r"segment is missing|no record"):
            scan.read_all()


def removed_but_open(path: Path) -> list[str]:
    """Files of log and index that are gone and take room all the same, for this process has them open or mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if f"{path}/" in line}
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    parts = tuple(f"{path}/{part}/" for part in ("commitlog", "index"))
    return [name for name in (*mapped, *opened) if name.startswith(parts) and name.endswith("(deleted)")]


@pytest.mark.parametrize("mode", ["x", "r+"])
@pytest.mark.parametrize("stray", [None, "commitlog/backup", "index/backup"])
def test_what_is_removed_gives_its_room_back_though_writer_and_reader_go_on(
        tmp_path: Path, mode: str, stray: str | None) -> None:  # fmt: skip
    """Edge: a directory that is no file of the store's."""
    path = tmp_path / "s"
    if mode == "r+":
        with open_store(path, "x", CONFIG) as store:
            fill(store, 1)
    with open_store(path, mode, CONFIG) as store, rmq.open(path) as reader:
        fill(store, 100)
        assert reader.query("T", "all", limit=None)
        if stray is not None:
            (path / stray).mkdir()
        for _ in range(2):
            fill(store, 100)
            expire(path, store.max_phy_offset - 2 * SEGMENT)
            assert {"commitlog", "index"} <= set(kinds(clean(store)))
            assert reader.query("T", "all", limit=None)
            assert reader.scan().read_all().num_rows
            assert removed_but_open(path) == []


# ---- while others work -------------------------------------------------------------------------------------

READER = """
import os, sys, rmq
path, stop = sys.argv[1:]
STATUSES = ("FOUND", "OFFSET_TOO_SMALL", "OFFSET_FOUND_NULL", "MESSAGE_WAS_REMOVING", "OFFSET_OVERFLOW_ONE")

def look(store):
    for topic, queues in store.topics().items():
        for queue_id, (low, high) in queues.items():
            page = store.pull(topic, queue_id, low, 40)
            assert page.status.name in STATUSES, page.status
            offsets = [message.queue_offset for message in page.messages]
            assert not offsets or offsets == list(range(offsets[0], offsets[0] + len(offsets))), offsets
            assert {message.topic for message in page.messages} <= {topic}
            assert store.search_offset(topic, queue_id, 0) >= low
    found = [message.phy_offset for message in store.query("T", "all", limit=None)]
    assert found == sorted(set(found), reverse=True)
    places = [place for batch in store.scan(columns=["phy_offset"]) for place in batch["phy_offset"].to_pylist()]
    assert places == sorted(set(places))
    assert store.clean(dry_run=True).min_phy_offset >= store.info().min_phy_offset - 2**40

turns = 0
while not os.path.exists(stop):
    with rmq.open(path) as store:
        for _ in range(1 + turns % 4):
            look(store)
            turns += 1
    if turns > 6:
        open(stop + "-may", "w").close()
"""


@pytest.mark.slow
def test_readers_and_puts_go_on_while_it_is_cleaned_again_and_again(tmp_path: Path) -> None:
    """In another process, in threads of this one; each answer is one that was right at some time."""
    path, faults, stop = tmp_path / "s", [], threading.Event()
    counts = [0, 0]

    def look(store: rmq.Store) -> None:
        while not stop.is_set():
            for topic, queues in store.topics().items():
                for queue_id, (low, high) in queues.items():
                    page = store.pull(topic, queue_id, low, 40)
                    offsets = [item.queue_offset for item in page.messages]
                    assert not offsets or offsets == list(range(offsets[0], offsets[0] + len(offsets))), offsets
                    assert low <= store.search_offset(topic, queue_id, 0) <= high + 10**6
            found = [item.phy_offset for item in store.query("T", "all", limit=None)]
            assert found == sorted(set(found), reverse=True)
            counts[0] += 1

    def work(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:
            faults.append(error)
            raise

    def put(store: rmq.Store) -> None:
        number = 200
        while not stop.is_set():
            store.put_many([message(i) for i in range(number, number + 20)])
            number += 20
            counts[1] += 1
            time.sleep(0.002)

    may_stop = tmp_path / "stop-may"
    make(path)
    process = subprocess.Popen([sys.executable, "-c", READER, str(path), str(tmp_path / "stop")], env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    with open_store(path, "r+") as store, rmq.open(path) as reader:
        threads = [threading.Thread(target=work, args=args) for args in ((look, store), (look, reader), (put, store))]
        for thread in threads:
            thread.start()
        removed, deadline = 0, time.monotonic() + 300
        while (removed < ROUNDS or min(counts) < 4 or not may_stop.exists()) and not faults:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            date(path, rest=HOUR)
            removed += clean(store, limit=3).min_phy_offset // SEGMENT - removed
            time.sleep(0.01)
        stop.set()
        (tmp_path / "stop").touch()
        for thread in threads:
            thread.join()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert all(line.endswith("were cleaned away while they were read") for line in err.splitlines()), err
        assert faults == []
        messages = [store.lookup(place) for place in
                    store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()]  # fmt: skip
        for topic, queues in store.topics().items():
            for queue_id, (low, high) in queues.items():
                kept = [item for item in messages if (item.topic, item.queue_id) == (topic, queue_id)]
                assert store.pull(topic, queue_id, low, 10**6).messages == kept
                assert len(kept) == high - low
        topics = store.topics()
    with rmq.open(path) as again:
        assert again.topics() == topics


# ---- stores of a broker --------------------------------------------------------------------------------------


def expire_half(path: Path) -> int:
    """The first half of the segments expires; the minimum afterwards."""
    files = sorted((path / "commitlog").iterdir())
    half = len(files) // 2
    date(path, *[HOUR] * half)
    return int(files[half].name)


@pytest.mark.slow
def test_a_brokers_store_is_cleaned_too(small_golden: Golden, tmp_path: Path) -> None:
    path = copy_store(small_golden.directory / "store", tmp_path / "s")
    with rmq.open(path, config=small_golden.store_config) as store:
        before, messages = store.topics(), store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
        pages = {(topic, queue_id): store.pull(topic, queue_id, 0, 10**6).messages
                 for topic, queues in before.items() for queue_id in queues}  # fmt: skip
    low = expire_half(path)
    assert low > 0
    with rmq.open(path, config=small_golden.store_config) as reader:
        assert reader.topics() == before
        with rmq.open(path, "r+", config=small_golden.store_config) as store:
            assert store.clean(NOW, file_reserved_time=1, limit=None, disk_usage=ROOMY).min_phy_offset == low
        for opened in (reader, rmq.open(path, config=small_golden.store_config)):
            assert opened.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist() == [
                place for place in messages if place >= low]  # fmt: skip
            for (topic, queue_id), page in pages.items():
                kept = [item for item in page if item.phy_offset >= low]
                first, last = opened.topics()[topic][queue_id]
                assert (last - first, last) == (len(kept), before[topic][queue_id][1])
                assert opened.pull(topic, queue_id, first, 10**6).messages == kept
                for item in [item for item in kept if item.keys][:10]:
                    found = opened.query(topic, item.keys[0], limit=None)
                    assert item in found
                    assert all(other.phy_offset >= low for other in found)
    opened.close()


def test_a_store_that_a_broker_cleaned_past_our_mark_opens(tmp_path: Path) -> None:
    """Our mark and manifest speak of segments that are gone; others came."""
    path = tmp_path / "s"
    messages = make(path, 60)
    shutil.copytree(path / "rmq", tmp_path / "old")
    with open_store(path, "r+") as store:
        messages += fill(store, 199, 60)
        low = 6 * SEGMENT
        assert messages[60].phy_offset < low
        expire(path, low)
        clean(store)
    shutil.rmtree(path / "rmq")
    shutil.copytree(tmp_path / "old", path / "rmq")
    before = digests(path, "commitlog", "consumequeue", "index")
    with rmq.open(path) as store:
        assert_left(store, messages, low)
    with open_store(path, "r+") as store:
        assert_left(store, messages, low)
    assert digests(path, "commitlog", "consumequeue", "index") == before
    assert first_segment(path) == 6


def test_a_reader_follows_a_broker_that_cleans(tmp_path: Path) -> None:
    """Without marks of ours: a broker holds the lock, removes files in front and appends."""
    path = tmp_path / "s"
    with open_store(path, "x", CONFIG) as store:
        messages = fill(store, 60)
        hidden = tmp_path / "hidden"
        os.rename(path / "rmq", hidden)
        with rmq.open(path, config=CONFIG) as reader:
            assert_left(reader, messages, 0)
            os.rename(hidden, path / "rmq")
            messages += fill(store, 200, 60)
            expire(path, 6 * SEGMENT)
            clean(store)
            os.rename(path / "rmq", hidden)
            assert_left(reader, messages, 6 * SEGMENT)
            os.rename(hidden, path / "rmq")


def test_a_segment_is_read_until_it_has_left_though_few_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the removal of its file and the log's new begin, others may be mapped."""
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        messages = fill(store)
        log = store._log
        segments = list(log.segments)

        def forget_first(segment: Segment) -> None:
            for other in segments[1:]:
                log._maps.make_room(other, 1)
            assert store.lookup(segment.start).body == messages[0].body
            log_forget_first(segment)

        log_forget_first = log.forget_first
        monkeypatch.setattr(log, "forget_first", forget_first)
        expire(tmp_path / "s", SEGMENT)
        clean(store)
        monkeypatch.undo()
        assert_left(store, messages, SEGMENT)


@pytest.mark.parametrize("count", [1, 25])
@pytest.mark.parametrize("call", ["pull_units", "search_units"])
def test_a_queue_that_goes_and_begins_again_amid_a_look_at_it_tells_no_damage(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int) -> None:  # fmt: skip
    """Edge: it has more messages then than before."""
    def look_late(log: Any, queue: ConsumeQueue, *asked: Any, **options: Any) -> Any:
        if queue.topic == "old" and not result:
            expire(tmp_path / "s", LOW)
            result.append(clean(store, expired_queues=True))
            assert store.put(rmq.Message("old", b"new")).queue_offset == 0
            store.put_many([rmq.Message("old", b"new")] * (count - 1))
            store.flush()
            for path in queue.files.first():
                queue.files._cache.forget(path)
        return look(log, queue, *asked, **options)

    look, result = getattr(pull, call), list[rmq.CleanResult]()
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        with rmq.open(tmp_path / "s") as reader:
            assert reader.topics()["old"] == {0: (0, 10)}
            monkeypatch.setattr(pull, call, look_late)
            assert call == "search_units" or reader.pull("old", 0, 9).next_queue_offset == count
            assert reader.search_offset("old", 0, NOW) == count
            assert [found.body for found in reader.pull("old", 0, 0, 99).messages] == [b"new"] * count
