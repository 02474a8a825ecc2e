# SPDX-License-Identifier: Apache-2.0
"""Large messages: how many of them are in memory at a time, of what is asked for and of what is given."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq import columns, pull, query

BODY = bytes(1 << 20)
COUNT = 24
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=32 << 20, mapped_file_size_consume_queue=20_000,
                         max_hash_slot_num=100, max_index_num=1000)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rmq.Store]:
    """A message of a MiB in each of many queues, and as many in one."""
    with rmq.open(tmp_path_factory.mktemp("large") / "store", "x", config=CONFIG) as store:
        for number in range(COUNT):
            store.put(rmq.Message("spread", BODY, queue_id=number))
            store.put(rmq.Message("one", BODY, tags="t"))
        yield store


def bodies_held(call: Callable[[], Any]) -> float:
    """How many bodies Python held at a time, at most, while it ran."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / len(BODY)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("tags", [None, "t", "t || u"])
def test_a_pull_holds_what_it_was_asked_for(store: rmq.Store, tags: str | None, limit: int) -> None:
    assert bodies_held(lambda: store.pull("one", 0, 0, limit, tags=tags)) < limit + 1.5


@pytest.mark.parametrize(("tag", "first"), [("t", 0), ("rare", 3000)])
def test_a_pull_by_tags_reads_the_records_that_it_gives_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, first: int
) -> None:
    """Edges: every unit of a page has the tag; those that have it lie behind some pages of others."""
    read: list[int] = []

    def own_messages(log: Any, of: Any, numbers: Any, offsets: Any, *rest: Any, **options: Any) -> Any:
        read.extend(offsets.tolist())
        return query.own_messages(log, of, numbers, offsets, *rest, **options)

    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"b", tags="t" if number < 3000 else "rare") for number in range(4000)])
        store.put(rmq.Message("T", b"b", tags="t"))  # the newest unit of the files is looked at whatever it says
        monkeypatch.setattr(pull, "own_messages", own_messages)
        page = store.pull("T", 0, 0, 32, tags=tag)
    assert [message.queue_offset for message in page.messages] == [*range(first, first + 32)]
    assert read == [message.phy_offset for message in page.messages]


def test_a_pull_by_tags_goes_on_behind_the_last_message_it_gave(store: rmq.Store) -> None:
    at, found = 0, []
    while (page := store.pull("one", 0, at, 7, tags="t")).status is rmq.PullStatus.FOUND:
        found += [message.queue_offset for message in page.messages]
        at = page.next_queue_offset
    assert found == [*range(COUNT)]
    assert at == COUNT


@pytest.mark.parametrize("body", [b"", bytes(300_000)], ids=len)
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_tags_of_one_hash_hide_no_message(tmp_path: Path, limit: int, body: bytes) -> None:
    """"Aa" and "BB": what a page leaves unread is the next one's."""
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        tags = ["Aa" if number % 5 == 4 else "BB" for number in range(30)]
        store.put_many([rmq.Message("T", body, tags=tag) for tag in tags])
        at, found = 0, []
        while (page := store.pull("T", 0, at, limit, tags="Aa")).status is rmq.PullStatus.FOUND:
            found += [message.queue_offset for message in page.messages]
            at = page.next_queue_offset
    assert found == [*range(4, 30, 5)]


def test_info_holds_one_body_at_a_time(store: rmq.Store) -> None:
    assert store.info().message_count == 2 * COUNT
    assert bodies_held(store.info) < 2.5


@pytest.mark.parametrize("results", [True, False])
def test_put_many_holds_so_many_bytes_of_an_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     results: bool) -> None:  # fmt: skip
    monkeypatch.setattr(columns, "CHUNK_BYTES", 4 << 20)

    def put() -> Any:
        return store.put_many((rmq.Message("T", bytes(1 << 20)) for _ in range(COUNT)), results=results)

    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        assert bodies_held(put) < 2 * 4 + 2  # one chunk while the next is collected
        assert store.put_many(iter(()), results=False) == 0
        phy_offsets = store.scan(columns=["phy_offset", "store_timestamp"]).read_all()
    assert len(phy_offsets) == 2 * COUNT


@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 8193, 20_000])
def test_an_iterator_comes_whole_and_in_order(tmp_path: Path, count: int) -> None:
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        sent = (rmq.Message("T", number.to_bytes(4, "big")) for number in range(count))
        assert store.put_many(sent, results=False) == count
        bodies = store.scan(columns=["body"]).read_all()["body"].to_pylist()
    assert [int.from_bytes(body, "big") for body in bodies] == [*range(count)]
