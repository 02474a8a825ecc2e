"""Queues of a broker's store whose first files somebody removed: where they begin, and how readers go on."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from test_info import broker
from test_queue_gaps import CONFIG, IN_A_FILE, queue_files

import rmq
import rmq.filecache
from rmq import PullStatus

COUNT = 100
IN_A_SEGMENT = 43  # records of T


def of_a_broker(path: Path, lost: int, *, is_closed: bool = True) -> None:
    """COUNT messages, without so many of the queue's first files."""
    clock = itertools.count(1_700_000_000_000, 1000).__next__
    with rmq.open(path, "x", config=CONFIG, clock=clock) as store:
        for number in range(COUNT):
            store.put(rmq.Message("T", b"%d" % number))
    shutil.rmtree(path / "rmq")
    for file in queue_files(path)[:lost]:
        file.unlink()
    if not is_closed:
        (path / "abort").touch()


def assert_begins(path: Path, mode: str, low: int) -> None:
    with rmq.open(path, mode, config=CONFIG) as store:
        assert store.topics() == {"T": {0: (low, COUNT)}}
        for below in {0, max(0, low - 1)} - {low}:
            page = store.pull("T", 0, below)
            assert (page.status, page.next_queue_offset, page.messages) == (PullStatus.OFFSET_TOO_SMALL, low, [])
        found = store.pull("T", 0, low, COUNT).messages
        assert [(message.queue_offset, int(message.body)) for message in found] == [(n, n) for n in range(low, COUNT)]


@pytest.mark.parametrize("lost", [0, 1, 3, 9])
def test_a_closed_store_s_queue_begins_with_its_first_file(tmp_path: Path, lost: int) -> None:
    """As RocketMQ 5.3.3 and 4.9.8 say of it."""
    of_a_broker(tmp_path / "s", lost)
    for mode in ("r", "r+", "r"):
        assert_begins(tmp_path / "s", mode, lost * IN_A_FILE)


@pytest.mark.parametrize("lost", [1, 8, 9])
def test_after_a_kill_readers_and_writers_have_the_units_that_a_recovery_derives_again(
    tmp_path: Path, lost: int
) -> None:
    """It begins at the last segment, whose first message may stand before what is left of the queue."""
    of_a_broker(tmp_path / "s", lost, is_closed=False)
    low = min(lost * IN_A_FILE, 2 * IN_A_SEGMENT)
    for mode in ("r", "r+", "r"):
        assert_begins(tmp_path / "s", mode, low)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_reader_goes_on_behind_files_that_go_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """File by file, as in RocketMQ."""
    monkeypatch.setattr(rmq.filecache, "FILE_CACHE_LIMIT", 4)
    of_a_broker(tmp_path / "s", 0)
    with broker(tmp_path / "s"), rmq.open(tmp_path / "s", config=CONFIG) as store:
        store.pull("T", 0, COUNT - 4 * IN_A_FILE, COUNT)  # else the files that go may be open still
        for file in queue_files(tmp_path / "s")[:lost]:
            file.unlink()
        at = 3
        for number in range(1, lost + 1):
            page = store.pull("T", 0, at, COUNT)
            at = page.next_queue_offset
            assert (page.status, at, page.messages) == (PullStatus.OFFSET_FOUND_NULL, number * IN_A_FILE, [])
        assert [int(message.body) for message in store.pull("T", 0, at, COUNT).messages] == list(range(at, COUNT))


def test_a_reader_stays_where_it_is_while_no_later_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery removes a queue's files, the last first, and writes them again."""
    monkeypatch.setattr(rmq.filecache, "FILE_CACHE_LIMIT", 4)
    of_a_broker(tmp_path / "s", 0)
    with broker(tmp_path / "s"), rmq.open(tmp_path / "s", config=CONFIG) as store:
        store.pull("T", 0, COUNT - 4 * IN_A_FILE, COUNT)  # else the files that go may be open still
        (tmp_path / "s/consumequeue/T/0").rename(tmp_path / "away")
        page = store.pull("T", 0, 3)
        assert (page.status, page.next_queue_offset) == (PullStatus.OFFSET_FOUND_NULL, 3)
        (tmp_path / "away").rename(tmp_path / "s/consumequeue/T/0")
        assert len(store.pull("T", 0, 3, COUNT).messages) == COUNT - 3
