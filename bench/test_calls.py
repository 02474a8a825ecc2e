# SPDX-License-Identifier: Apache-2.0
"""What a call costs before it does anything: into a compiled method, and into a function of Python."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from calls import CALLS, KEY, by_compiled, by_python, call_of_python
from compiled import compiled
from ratios import CPU, MEMORY, NEW_FILES, Call, Goal, Measure, Peer
from sample import CONFIG

import rmq

MESSAGES = 50_000
READ = 10_000
BODY = bytes(100)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """What Python makes of the fields that most messages have: nothing is checked, nothing encoded."""

    topic: str
    body: bytes
    keys: str
    tags: str | None = None
    queue_id: int = 0


@CPU
def test_empty_call(measure: Measure, tmp_path: Path) -> None:
    """The goal, at most 0.8 of the time, is 1.25 times faster."""
    if find_spec("Cython") is None:
        pytest.skip("Cython is missing: pip install -e '.[bench]'")
    empty = compiled("empty", tmp_path).Empty()
    assert empty.call(KEY, 1, 2) is call_of_python(KEY, 1, 2) is None
    measure(CALLS, MEMORY, lambda: lambda: by_compiled(empty),
            Peer("Python function", lambda: by_python, (Goal("P1", 1.25),)))  # fmt: skip


@CPU
@pytest.mark.parametrize("topics", [1, 4])
def test_message_made(measure: Measure, topics: int) -> None:
    """With keys and tags, checked and its properties encoded, and kept: Python's collector passes over a Message. Of so
    many topics in turn."""
    keys = [f"key{number:029}" for number in range(MESSAGES)]
    names = [f"Orders{number}" for number in range(topics)] * (MESSAGES // topics)

    def made(kind: Any) -> Call:
        return lambda: [kind(name, BODY, keys=key, tags="paid") for name, key in zip(names, keys, strict=True)]

    measure(MESSAGES, MEMORY, lambda: made(rmq.Message), Peer("frozen dataclass", lambda: made(Frozen)))


@CPU
def test_stored_message_read(measure: Measure, tmp_path: Path) -> None:
    """Keys, tags and body of what a pull gave. The peer looks its properties up in a dict that parses them."""
    with rmq.open(tmp_path / "store", "x") as store:
        store.put_many([rmq.Message("Orders", BODY, keys=f"key{number}", tags="paid") for number in range(READ)])
        messages = store.pull("Orders", limit=READ).messages

    def of_dict() -> list[object]:
        found = [(message.properties, message.body) for message in messages]
        return [(tuple(properties["KEYS"].split(" ")), properties["TAGS"], body) for properties, body in found]

    assert len(messages) == READ
    measure(READ, MEMORY, lambda: lambda: [(message.keys, message.tags, message.body) for message in messages],
            Peer("properties as a dict", lambda: of_dict))  # fmt: skip


@CPU
def test_results_gone_through(measure: Measure, tmp_path: Path) -> None:
    """Those of a put_many, each a PutResult. The peer makes a named tuple of each row of the columns."""
    with rmq.open(tmp_path / "store", "x") as store:
        results = store.put_many([rmq.Message("Orders", BODY)] * MESSAGES)
    columns = [getattr(results, name).tolist() for name in rmq.PutResult._fields]

    def of_columns() -> None:
        for row in zip(*columns, strict=True):
            rmq.PutResult._make(row)

    def ours() -> None:
        for _ in results:
            pass

    measure(MESSAGES, MEMORY, lambda: ours, Peer("named tuples of lists", lambda: of_columns))


@CPU
@pytest.mark.parametrize("count", [1, 10, 100])
@pytest.mark.parametrize("name", ["put_many", "put_batch"])
def test_put_of_a_few(measure: Measure, tmp_path: Path, name: str, count: int) -> None:
    """Messages of one queue with a key each, so many to a call. The peer puts them one by one."""
    messages = [rmq.Message("Orders", BODY, keys=f"key{number}", tags="paid") for number in range(count)]
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        call, put, calls = getattr(store, name), store.put, range(READ // count)

        def ours() -> None:
            for _ in calls:
                call(messages)

        def one_by_one() -> None:
            for _ in calls:
                for message in messages:
                    put(message)

        measure(len(calls) * count, NEW_FILES, lambda: ours, Peer("put", lambda: one_by_one))
