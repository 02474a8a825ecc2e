# SPDX-License-Identifier: Apache-2.0
"""put_many of short lists: what the compiled way answers and writes, and when it is left."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import copy_store
from forks import error_in_child
from test_putter import CONFIG, HOSTS, NOW, Counted, messages_of_all_kinds

import rmq
from rmq.dispatch import BEHIND


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: NOW) as opened:
        opened.put(rmq.Message("T", b"first"))
        yield opened


def few(count: int, body: bytes = b"body") -> list[rmq.Message]:
    return [rmq.Message("T", body, keys=f"k{number}", queue_id=number % 3) for number in range(count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("crc", [False, True])
def test_messages_of_short_lists_are_those_put_one_by_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, crc: bool) -> None:  # fmt: skip
    source = random.Random(seed)
    config = dataclasses.replace(CONFIG, store_host=HOSTS[seed % 2], enabled_append_prop_crc=crc,
                                 mapped_file_size_commit_log=(2**21, 2**16)[seed % 2])  # fmt: skip
    messages = source.choices(messages_of_all_kinds(), k=500)
    with rmq.open(tmp_path / "one", "x", config=config, clock=lambda: NOW) as one, \
            rmq.open(tmp_path / "few", "x", config=config, clock=lambda: NOW) as store:  # fmt: skip
        long_way, lists = Counted(store, monkeypatch), 0
        results = [one.put(message) for message in messages]
        first = 0
        while first < len(messages):
            part = messages[first : first + source.choice([1, 2, 3, 10, 40])]
            found = store.put_many(part)
            assert list(found) == results[first : first + len(part)]
            for name in rmq.PutResult._fields:
                assert getattr(found, name).tolist() == [getattr(result, name) for result in found]
            first, lists = first + len(part), lists + 1
        assert long_way.count < lists / (2 if seed % 2 else 5)
        for topic in {message.topic for message in messages}:
            for queue_id in range(8):
                assert store.pull(topic, queue_id, limit=500) == one.pull(topic, queue_id, limit=500)
    for path in (tmp_path / "one" / "commitlog").iterdir():
        assert path.read_bytes() == (tmp_path / "few" / "commitlog" / path.name).read_bytes()


@pytest.mark.parametrize("count", [1, 7, 256, 257])
def test_the_count_is_told_of_a_short_list_too(store: rmq.Store, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    long_way = Counted(store, monkeypatch)
    assert store.put_many(few(count), results=False) == count
    assert long_way.count == (count > 256)
    found = store.put_many(few(count))
    assert (len(found), found.store_timestamp.tolist()) == (count, [NOW] * count)


def test_the_long_way_is_gone_once_for_a_thousand(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long_way = Counted(store, monkeypatch)
    messages = few(10)
    for _ in range(300):
        store.put_many(messages, results=False)
        assert store._log.tail.behind < BEHIND
    assert long_way.count == 3
    assert len(store.query("T", "k5", limit=5000)) == 300


@pytest.mark.parametrize(("wrong", "error"), [
    (5, TypeError), (b"body", TypeError),
    (rmq.Message("T", bytes(CONFIG.max_message_size + 1)), rmq.MessageTooLargeError),
    (rmq.Message.__new__(rmq.Message), rmq.IllegalMessageError),
])  # fmt: skip
@pytest.mark.parametrize("row", [0, 3])
def test_a_short_list_is_checked_whole(store: rmq.Store, wrong: Any, error: type[Exception], row: int) -> None:
    end, messages = store.max_phy_offset, few(5)
    messages[row] = wrong
    with pytest.raises(error) as raised:
        store.put_many(messages)
    assert (raised.value.row, raised.value.stored) == (row, 0)  # type: ignore[attr-defined]
    assert store.max_phy_offset == end
    assert store.put_many(few(5)).queue_offset.tolist() == [1, 0, 0, 2, 1]


def test_a_list_that_the_clock_changes_is_put_as_it_was(tmp_path: Path) -> None:
    messages = few(40)
    bodies = [message.body for message in messages]

    def clock() -> int:
        messages[:] = [rmq.Message("T", b"other" * 100)]
        return NOW

    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=clock) as store:
        store.put(rmq.Message("T", b"first"))
        messages[:] = few(40)
        assert len(store.put_many(messages)) == 40
        assert len(messages) == 1
        found = [message.body for queue_id in range(3) for message in store.pull("T", queue_id, limit=99).messages]
        assert sorted(found) == sorted([b"first", *bodies])


def test_a_clock_that_puts_or_tells_no_time_stores_nothing(tmp_path: Path) -> None:
    calls: list[Any] = [lambda: NOW]
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: calls[-1]()) as store:
        store.put(rmq.Message("T", b"first"))
        end = store.max_phy_offset
        for call, error in ((lambda: store.put_many(few(2)), RuntimeError), (lambda: "5", TypeError)):
            calls.append(call)
            with pytest.raises(error) as raised:
                store.put_many(few(3))
            assert raised.value.stored == 0  # type: ignore[attr-defined]
            calls.pop()
            assert store.max_phy_offset == end
        assert store.put_many(few(1)).queue_offset.tolist() == [1]


def test_a_wrong_argument_stores_nothing_and_says_so(store: rmq.Store) -> None:
    with pytest.raises(TypeError, match="results") as raised:
        store.put_many(few(2), results=None)  # type: ignore[call-overload]
    assert raised.value.stored == 0  # type: ignore[attr-defined]


def test_who_may_not_put_may_not_put_few(store: rmq.Store, tmp_path: Path) -> None:
    assert error_in_child(lambda: store.put_many(few(2))) == "StoreClosedError"
    with store._flusher.flush_lock, pytest.raises(RuntimeError, match="in the middle of another call"):
        store.put_many(few(2))
    with rmq.open(store.path) as reader, pytest.raises(rmq.StoreReadOnlyError):
        reader.put_many(few(2))
    store._flusher.failure = OSError(5, "lost")
    with pytest.raises(rmq.StoreReadOnlyError):
        store.put_many(few(2))
    store._flusher.failure = None
    putter = store._putter
    store.close()
    with pytest.raises(rmq.StoreClosedError):
        store.put_many(few(2))
    assert putter is not None
    assert putter.put_few(few(2), True) is None


def test_who_reads_sees_short_lists_at_once(store: rmq.Store, tmp_path: Path) -> None:
    """A reader beside the writer, and who opens what a killed one left."""
    with rmq.open(store.path) as reader:
        for count in (1, 2, 30):
            results = store.put_many(few(count))
            message = reader.lookup(int(results.phy_offset[-1]))
            assert (message.body, message.queue_offset) == (b"body", results[-1].queue_offset)
            assert reader.max_phy_offset == store.max_phy_offset
    with rmq.open(copy_store(store.path, tmp_path / "image"), "r+") as again:
        assert again.max_phy_offset == store.max_phy_offset
        assert len(again.query("T", "k0")) == 3


def test_a_short_list_of_tables_is_one_of_tables(store: rmq.Store) -> None:
    table = pa.table({"body": [b"a", b"b"], "topic": ["T", "T"]})
    assert store.put_many([table, table]).queue_offset.tolist() == [1, 2, 3, 4]


def test_results_of_a_short_list_are_columns_of_their_own(store: rmq.Store) -> None:
    found, others = store.put_many(few(3)), store.put_many(few(4))
    assert (found.phy_offset < others.phy_offset[0]).all()
    assert np.diff(np.concatenate([found.phy_offset, others.phy_offset])).min() > 0
    assert store.put_many([], results=False) == 0
    assert len(store.put_many([])) == 0


def test_a_list_that_changes_while_its_put_waits_is_counted_as_it_was_stored(store: rmq.Store) -> None:
    """Another thread has the lock, for less than the compiled way waits for it, and changes the caller's list."""
    stored = 0

    def change(messages: list[rmq.Message], others: list[rmq.Message], is_held: threading.Event) -> None:
        with store._put_lock:
            is_held.set()
            time.sleep(20e-6)  # now the other one waits
            messages[:] = others

    for number in range(300):
        messages, others, is_held = few(3), few(5) if number % 2 else [], threading.Event()
        thread = threading.Thread(target=change, args=(messages, others, is_held))
        thread.start()
        is_held.wait()
        stored += store.put_many(messages, results=False)
        thread.join()
    counts = [high - low for low, high in store.topics()["T"].values()]
    assert sum(counts) == stored + 1


@pytest.mark.slow
def test_a_list_that_a_collection_empties_is_not_read_any_more() -> None:
    """The collection that a put's own copy of the list brings about."""
    code = """
import gc, sys, tempfile
import rmq
class Trap:
    def __init__(self, items): self.items, self.itself = items, self
    def __del__(self): self.items.clear()
with tempfile.TemporaryDirectory() as path, rmq.open(path + "/s", "x") as store:
    store.put(rmq.Message("T", b"first"))
    put = store._putter.put_few
    gc.collect()
    messages = [rmq.Message("T", b"body") for _ in range(200)]
    Trap(messages)
    kept = [[] for _ in range(400)]  # no list is left that could be taken without an allocation
    gc.set_threshold(gc.get_count()[0] + int(sys.argv[1]))
    found = put(messages, False)
    gc.set_threshold(700)
    assert found in (None, 200), found
"""
    for more in range(-2, 3):
        subprocess.run([sys.executable, "-c", code, str(more)], check=True, capture_output=True, timeout=100)
