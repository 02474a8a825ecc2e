# SPDX-License-Identifier: Apache-2.0
"""Large messages: how many of them are in memory at a time, of what is asked for and of what is given."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq
from rmq import chunks, mappedfile, pull, query
from rmq.errors import MessageTypeError

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
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 << 20)

    def put() -> Any:
        return store.put_many((rmq.Message("T", bytes(1 << 20)) for _ in range(COUNT)), results=results)

    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        assert bodies_held(put) < 2 * 4 + 2  # one chunk while the next is collected
        assert store.put_many(iter(()), results=False) == 0
        phy_offsets = store.scan(columns=["phy_offset", "store_timestamp"]).read_all()
    assert len(phy_offsets) == 2 * COUNT


@pytest.mark.parametrize(("sizes", "chunks_of"), [((400, 0), [3, 3, 3, 1]), ((1200, 0), [1] * 10), ((0, 1), [10])])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.string()], ids=str)
def test_put_many_holds_so_many_bytes_of_a_dictionary_s_rows(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, sizes: tuple[int, ...],
        chunks_of: list[int]) -> None:  # fmt: skip
    """Each chunk has a store timestamp of its own."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1200)
    words = pa.array([b"x" * size for size in sizes], pa.binary()).cast(kind if kind != pa.string() else pa.binary())
    bodies = pa.DictionaryArray.from_arrays(pa.array([0] * 10), words.cast(kind))
    clock = count(1_700_000_000_000)
    with rmq.open(tmp_path / "store", "x", config=CONFIG, clock=lambda: next(clock)) as store:
        put = store.put_many(pa.table({"body": bodies}), topic="T")
        assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == [b"x" * sizes[0]] * 10
    assert [len([*group]) for _, group in groupby(put, key=lambda result: result.store_timestamp)] == chunks_of


def test_a_dictionary_may_stand_for_more_than_two_gib(tmp_path: Path) -> None:
    """What its rows stand for together is never made: a chunk ends sooner."""
    bodies = pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int16()), pa.array([bytes(5 << 20)]))
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store, pytest.raises(rmq.MessageTooLargeError) as error:
        store.put_many(pa.table({"body": bodies}), topic="T")
    assert (error.value.row, error.value.stored) == (0, 0)


def open_in(directory: Path) -> set[Path]:
    """Files of a directory that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            found.add(Path(os.readlink(f"/proc/self/fd/{name}")))
    return {path for path in found if path.parent == directory}


@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize("results", [False, True])
def test_more_segments_than_may_be_mapped_are_filled_in_several_appends(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_table: bool, results: bool) -> None:  # fmt: skip
    monkeypatch.setattr(mappedfile, "room_for_files", lambda limit: 8)
    bodies = [b"%d" % number + bytes(1000) for number in range(500)]
    config = rmq.StoreConfig(mapped_file_size_commit_log=8192, max_hash_slot_num=100, max_index_num=1000)
    clock = count(1_700_000_000_000)
    with rmq.open(tmp_path / "store", "x", config=config, clock=lambda: next(clock)) as store:
        messages = [rmq.Message("T", body, keys="k") for body in bodies]
        put = store.put_many(pa.table({"body": bodies, "keys": ["k"] * 500}) if as_table else messages,
                             topic="T" if as_table else None, results=results)  # fmt: skip
        assert 0 < len(open_in(store.path / "commitlog")) <= 8
        rows = store.scan(columns=["body", "queue_offset", "phy_offset", "store_timestamp"]).read_all()
        assert rows["body"].to_pylist() == bodies
        assert rows["queue_offset"].to_pylist() == [*range(500)]
        assert len(store.query("T", "k", limit=None)) == 500
        assert len(set(rows["store_timestamp"].to_pylist())) > 15
        if isinstance(put, rmq.PutResults):
            assert [result.phy_offset for result in put] == rows["phy_offset"].to_pylist()
        else:
            assert put == 500
        with pytest.raises(MessageTypeError) as error:
            store.put_many([*messages, "no message"])  # the whole chunk is looked at before its first part is put
        assert (error.value.row, error.value.stored) == (500, 0)
        assert store.info().message_count == 500


@pytest.mark.parametrize("count", [0, 1, 8191, 8192, 8193, 20_000])
def test_an_iterator_comes_whole_and_in_order(tmp_path: Path, count: int) -> None:
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        sent = (rmq.Message("T", number.to_bytes(4, "big")) for number in range(count))
        assert store.put_many(sent, results=False) == count
        bodies = store.scan(columns=["body"]).read_all()["body"].to_pylist()
    assert [int.from_bytes(body, "big") for body in bodies] == [*range(count)]


class EndsOnce:
    """Who asks a queue or a terminal once more would wait for it."""

    def __init__(self, items: int) -> None:
        self._items: list[rmq.Message | None] = [None, *[rmq.Message("T", b"")] * items]

    def __iter__(self) -> Iterator[rmq.Message]:
        return self

    def __next__(self) -> rmq.Message:
        assert self._items, "asked once more"
        if (message := self._items.pop()) is None:
            raise StopIteration
        return message


@pytest.mark.parametrize("count", [0, 3, 8192])
def test_an_iterator_is_asked_no_more_behind_its_end(tmp_path: Path, count: int) -> None:
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        assert store.put_many(EndsOnce(count), results=False) == count
