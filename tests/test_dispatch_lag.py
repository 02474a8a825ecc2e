# SPDX-License-Identifier: Apache-2.0
"""How far queues and index may lag behind the log, and that nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import copy_store

import rmq
from rmq._core._recordbatch import RecordBatch
from rmq.dispatch import BATCH_BYTES, BATCH_ROWS, BEHIND, MANY_ROWS, UNITS_EACH, Dispatcher

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=64 * 1024 * 1024, mapped_file_size_consume_queue=20 * 1000,
                         max_hash_slot_num=500, max_index_num=200_000, flush_interval_commit_log=2**31 - 1)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as opened:
        yield opened


@pytest.fixture
def dispatched(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each dispatch found to do."""
    found: list[int] = []
    advance = Dispatcher.advance

    def noted(dispatcher: Dispatcher[Any], end: int) -> None:
        found.append(store._log.tail.behind)
        advance(dispatcher, end)

    monkeypatch.setattr(Dispatcher, "advance", noted)
    return found


def message(number: int, queues: int, body: bytes = b"body") -> rmq.Message:
    return rmq.Message(f"T{number % queues // 8}", body, queue_id=number % queues % 8, keys=f"k{number}")


@pytest.mark.parametrize(("queues", "then"), [(1, BEHIND), (BEHIND // UNITS_EACH, BEHIND), (100, 100 * UNITS_EACH),
                                              (300, 300 * UNITS_EACH)])  # fmt: skip
def test_the_more_queues_take_messages_the_more_gather_for_a_dispatch(
        store: rmq.Store, dispatched: list[int], queues: int, then: int) -> None:  # fmt: skip
    for number in range(BEHIND + 2 * then + 1):
        store.put(message(number, queues))
    assert dispatched == [BEHIND, then, then]
    for number in range(then + BEHIND):  # of one queue: that many are waited for once more
        store.put(message(number, 1))
    assert dispatched[3:] == [then, BEHIND]


@pytest.mark.slow
def test_no_dispatch_waits_for_more_messages_than_its_limit(store: rmq.Store, dispatched: list[int]) -> None:
    store.put_many([message(number, 5000) for number in range(2 * MANY_ROWS + 3 * BATCH_ROWS)], results=False)
    assert dispatched == [BATCH_ROWS, MANY_ROWS, MANY_ROWS]
    assert store._log.tail.behind == 2 * BATCH_ROWS


@pytest.mark.parametrize("queues", [1, 300])
def test_no_dispatch_waits_for_more_bytes_than_its_limit(
        store: rmq.Store, dispatched: list[int], queues: int) -> None:  # fmt: skip
    body = bytes(100_000)
    for number in range(400):
        store.put(message(number, queues, body))
    assert dispatched == [-(-BATCH_BYTES // len(body)) + 1] * 2  # the one that comes upon it


def test_what_queues_and_index_lack_is_read_all_the_same(store: rmq.Store, tmp_path: Path) -> None:
    """By the store itself, a reader beside it, and who opens it after it was killed."""
    count, queues = 5000, 300
    store.put_many([message(number, queues) for number in range(BEHIND)])
    results = [store.put(message(number, queues)) for number in range(BEHIND, count)]
    assert store._log.tail.behind > BEHIND
    image = copy_store(store.path, tmp_path / "image")
    with rmq.open(store.path) as beside, rmq.open(image) as dead, rmq.open(image, "r+") as again:
        for each in (beside, dead, again, store):
            for number in (0, BEHIND, count - 1):
                assert [found.body for found in each.query(f"T{number % queues // 8}", f"k{number}")] == [b"body"]
            last = results[-1]
            pulled = each.pull(last.topic, last.queue_id, last.queue_offset)
            assert [found.phy_offset for found in pulled.messages] == [last.phy_offset]
            assert sum(high - low for ids in each.topics().values() for low, high in ids.values()) == count
    assert rmq.verify(image) == []


def test_a_batch_holds_as_many_rows_as_were_allowed_last() -> None:
    batch = RecordBatch(1)
    for rows in (5, 70_000, 2):
        batch.allow(rows)
        assert batch.capacity == rows
    with pytest.raises(ValueError, match="at least 1"):
        batch.allow(0)
    assert batch.capacity == 2
