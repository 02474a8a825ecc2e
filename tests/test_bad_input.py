"""Wrong arguments: a typed error that names the argument, nothing stored, nothing lost."""

from __future__ import annotations

import datetime as dt
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from conftest import SIZES

import rmq

CONFIG = rmq.StoreConfig(**SIZES)
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
NAIVE = NOON.replace(tzinfo=None)
HUGE = 10**30
Illegal, TooLarge = rmq.IllegalMessageError, rmq.MessageTooLargeError


def message(i: int, **changes: Any) -> rmq.Message:
    fields = {"topic": "T", "body": b"body %d" % i, "keys": [f"key{i}", "all"], "tags": "tag", "queue_id": i % 2}
    return rmq.Message(**fields | changes)


def assert_holds(store: rmq.Store, bodies: list[bytes], topic: str = "T") -> None:
    """Scan, query and topics speak of these messages and no others."""
    assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == bodies
    assert [found.body for found in store.query(topic, "all", limit=None)] == bodies[::-1]
    assert sum(high - low for queues in store.topics().values() for low, high in queues.values()) == len(bodies)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    """Holds messages 0 to 4. Afterwards it must hold those still, take a sixth, and agree with itself on disk."""
    path = tmp_path / "outer" / "store"
    with rmq.open(path, "a", config=CONFIG) as opened:
        opened.put_many([message(i) for i in range(5)])
        yield opened
        assert_holds(opened, [b"body %d" % i for i in range(5)])
        assert opened.put(message(5)).queue_offset == 2
    assert oracle.check_store(path, 10, 30) == []
    assert [record.body for record in oracle.read_records(path)] == [b"body %d" % i for i in range(6)]
    assert sorted(os.listdir(tmp_path)) == ["outer"]
    assert os.listdir(tmp_path / "outer") == ["store"]


# ---- messages --------------------------------------------------------------------------------------------

NUMBERS = {
    "queue_id": 32,
    "flag": 32,
    "sys_flag": 32,
    "reconsume_times": 32,
    "prepared_transaction_offset": 64,
    "born_timestamp": 64,
}
BAD_HOSTS = (
    "",
    ":",
    "1.2.3.4",
    "1.2.3.4:",
    "1.2.3.4:65536",
    "1.2.3.4:-1",
    "1.2.3.4:\uff11",
    "1.2.3:1",
    "host:1",
    "[::1]",
    "[::1:5",
    "::1:5",
    "1.2.3.4:1 ",
    "\ud800:1",
    "1.2.3.4\0:1",
)
BAD_MESSAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"topic": topic}, Illegal, "topic")
        for topic in (
            "",
            "a" * 128,
            "\u00e9" * 64,
            "%RETRY%" + "a" * 249,
            "../x",
            "/x",
            "x/",
            "a/b",
            "a/../../b",
            ".",
            "..",
            "a\0b",
            "\0",
            "a\1b",
            "a\2b",
            "\ud800",
            "T\udfff",
        )
    ),
    *(({"topic": topic}, TypeError, "topic") for topic in (None, 5, b"T", ["T"], Path("T"))),
    *(({"body": body}, TypeError, "body") for body in (None, 5, "text", [1, 2], {}, 1.5, ...)),
    *(
        ({"keys": keys}, Illegal, "keys")
        for keys in ("", "a b", " ", "a\1", "\2a", ["a", ""], ["a", "b c"], "\ud800", ["a", "\udc80"])
    ),
    *(
        (fields, Illegal, "more than 32767")
        for fields in (
            {"keys": "k" * 32768},
            {"keys": ["k" * 300] * 120},
            {"tags": "t" * 32768},
            {"uniq_key": "u" * 32768},
        )
    ),
    *(({"keys": keys}, TypeError, "keys") for keys in (5, None, b"ab", ["a", 5], ["a", None], [b"a"], 1.5)),
    *(({"tags": tags}, Illegal, "tags") for tags in ("a\1", "\2", "\ud800")),
    *(({"tags": tags}, TypeError, "tags") for tags in (5, b"a", ["a"])),
    *(({"uniq_key": key}, Illegal, "uniq_key") for key in ("a\1", "\2", "\ud800")),
    *(({"uniq_key": key}, TypeError, "uniq_key") for key in (5, b"a", ["a"])),
    *(
        ({"properties": properties}, Illegal, "propert")
        for properties in (
            {"a": "\1"},
            {"a": "\2"},
            {"a\1": "b"},
            {"\2": "b"},
            {"": "b"},
            {"\ud800": "b"},
            {"a": "\ud800"},
            {"a": "b" * 32768},
            {"a" * 32768: "b"},
            {str(i): "b" * 1000 for i in range(40)},
            {"KEYS": "other"},
            {"TAGS": "other"},
            {"INNER_NUM": "2"},
        )
    ),
    *(
        ({"properties": properties}, TypeError, "propert")
        for properties in (
            {"a": 5},
            {"a": None},
            {5: "a"},
            {None: "a"},
            {b"a": "b"},
            [("a", "b")],
            "ab",
            5,
            b"ab",
            ["ab"],
        )
    ),
    *(
        ({"keys": (), "tags": None, "raw_properties": raw}, error, "propert")
        for raw, error in (
            ("text", TypeError),
            (5, TypeError),
            ([1], TypeError),
            (b"b" * 32768, Illegal),
            (b"INNER_NUM\x012\x02", Illegal),
        )
    ),
    ({"raw_properties": b"a\1b\2"}, ValueError, "raw_properties excludes"),
    *(({name: value}, TypeError, name) for name in NUMBERS for value in ("0", 1.0, True, b"1", [1], 1j)),
    *(
        ({name: value}, ValueError, name)
        for name, bits in NUMBERS.items()
        for value in (2 ** (bits - 1), -(2 ** (bits - 1)) - 1, HUGE, -HUGE)
    ),
    *(({name: None}, TypeError, name) for name in NUMBERS if name != "born_timestamp"),
    *(({"queue_id": value}, ValueError, "queue_id") for value in (-1, -(2**31))),
    *(({"sys_flag": value}, Illegal, "sys_flag") for value in (64, 128, -1)),
    ({"born_timestamp": NAIVE}, ValueError, "born_timestamp"),
    ({"born_timestamp": NOON.date()}, TypeError, "born_timestamp"),
    *(({name: host}, ValueError, name) for name in ("born_host", "store_host") for host in BAD_HOSTS),
    *(({name: host}, TypeError, name) for name in ("born_host", "store_host") for host in (5, b"1.2.3.4:1", ["x"])),
]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    BAD_MESSAGES,
    ids=[f"{i}-{ascii(case[0])[:40]}" for i, case in enumerate(BAD_MESSAGES)],
)
def test_a_bad_message_is_refused_when_it_is_made(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        message(0, **changes)


@pytest.mark.parametrize("wrong", [None, 5, "text", b"bytes", {"topic": "T"}, ("T", b""), rmq.Message, [message(9)]])
def test_only_a_message_can_be_put(store: rmq.Store, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^expected Message"):
        store.put(wrong)
    with pytest.raises(TypeError, match="Message"):
        store.put_batch([message(6), wrong])
    with pytest.raises(TypeError, match="Message") as caught:
        store.put_many([message(6), message(7), wrong, message(8)])
    assert (caught.value.row, caught.value.stored) == (2, 0)  # type: ignore[attr-defined]


def test_a_message_that_was_never_initialised_is_refused(store: rmq.Store) -> None:
    hollow = rmq.Message.__new__(rmq.Message)
    for put in (store.put, lambda one: store.put_batch([one]), lambda one: store.put_many([one])):
        with pytest.raises((Illegal, TypeError)):
            put(hollow)


def test_a_message_stays_as_it_was_made() -> None:
    made = message(1)
    with pytest.raises(TypeError, match="immutable"):
        made.__init__("other", b"")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        made.topic = "other"  # type: ignore[misc]
    made.properties["new"] = "x"
    assert made == message(1)
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        (b"x" * 4096, {}),
        (b"x" * 10**6, {}),
        (b"x" * 1001, {"max_message_size": 1000}),
        (b"x" * 901, {"max_message_size": 1000, "rocketmq_version": "4.9.3"}),
    ],
)
def test_a_record_that_fits_nowhere_is_refused_and_changes_nothing(tmp_path: Path, body: bytes, sizes: Any) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES, **sizes)) as store:
        store.put(message(0, body=b"z" * 800))
        for put in (
            store.put,
            lambda one: store.put_batch([message(0), one]),
            lambda one: store.put_many([message(0), one]),
        ):
            with pytest.raises(TooLarge, match="bytes"):
                put(message(2, body=body))
        assert_holds(store, [b"z" * 800])
        store.put(message(1))
    version = sizes.get("rocketmq_version", "5.3.3")
    assert oracle.check_store(tmp_path / "s", 10, 30, version) == []


def test_a_long_retry_topic_is_refused_where_the_version_cannot_store_it(tmp_path: Path) -> None:
    long = "%RETRY%" + "g" * 200
    with rmq.open(tmp_path / "old", "a", config=rmq.StoreConfig(**SIZES, rocketmq_version="4.9.8")) as store:
        with pytest.raises(Illegal, match="topic"):
            store.put(message(0, topic=long))
        assert store.topics() == {}
    with rmq.open(tmp_path / "new", "a", config=CONFIG) as store:
        store.put(message(0, topic=long))
        assert_holds(store, [b"body 0"], long)


# ---- put_many and put_batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 5, 1.5, object(), "text", b"bytes", message(9), {"topic": ["T"]},
                                   pa.array(["T"]), pa.chunked_array([["T"]])])  # fmt: skip
def test_put_many_takes_no_other_things(store: rmq.Store, wrong: Any) -> None:
    with pytest.raises(TypeError):
        store.put_many(wrong)
    with pytest.raises(TypeError):
        store.put_batch(wrong)


@pytest.mark.parametrize(
    "nothing",
    [[], (), iter([]), pa.table({"topic": pa.array([], pa.string()), "body": pa.array([], pa.binary())})],
)
def test_nothing_to_put_puts_nothing(store: rmq.Store, nothing: Any) -> None:
    assert len(store.put_many(nothing, topic="T", queue_id=1)) == 0
    assert len(store.put_many(nothing)) == 0
    assert store.put_many(nothing, results=False) == 0
    assert len(store.put_batch([])) == 0


@pytest.mark.parametrize("bad", [rmq.Message("T", bytes(2**21)), "no message"])
def test_a_bad_row_tells_its_number_and_how_many_are_stored(tmp_path: Path, bad: Any) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=2**21, max_hash_slot_num=10, max_index_num=100_000)
    rows = [rmq.Message("T", b"%d" % i) for i in range(8192 + 100)]
    rows[8192 + 40] = bad
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        with pytest.raises((TooLarge, TypeError), match=f"^row {8192 + 40}: ") as caught:
            store.put_many(iter(rows))
        assert (caught.value.row, caught.value.stored) == (8192 + 40, 8192)  # type: ignore[union-attr]
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert store.topics() == {"T": {0: (0, 8192)}}
        assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == [b"%d" % i for i in range(8192)]


@pytest.mark.parametrize("count", [0, 3])
def test_a_generator_that_raises_keeps_its_own_error_and_nothing_of_its_chunk(store: rmq.Store, count: int) -> None:
    def broken() -> Iterator[rmq.Message]:
        yield from (message(i) for i in range(count))
        raise ZeroDivisionError("the caller's own")

    for put in (store.put_many, store.put_batch):
        with pytest.raises(ZeroDivisionError, match="the caller's own"):
            put(broken())


@pytest.mark.parametrize(
    "rows",
    [
        [message(0), message(1)],
        [message(0), message(0, topic="U")],
        [message(0, sys_flag=4)],
        [message(0, sys_flag=8)],
        [message(0, properties={"DELAY": "1"})],
        [message(0, body=b"x" * 1500) for _ in range(3)],
    ],
)
def test_a_batch_is_of_one_queue_plain_and_whole(store: rmq.Store, rows: list[rmq.Message]) -> None:
    with pytest.raises(Illegal):
        store.put_batch(rows)


@pytest.mark.parametrize("extra", [{"topic": "T"}, {"queue_id": 1}, {"columns": {}}])
def test_constants_are_for_tables_only(store: rmq.Store, extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Arrow"):
        store.put_many([message(6)], **extra)


GOOD = {"topic": ["T", "T"], "body": [b"6", b"7"]}
TEXTS = pa.map_(pa.string(), pa.string())


def not_utf8() -> pa.Array:
    """Two strings of which the second is no UTF-8, as a careless producer makes them."""
    return pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"a\xff\xfe")]
    )


# The second row is the bad one.
BAD_ROWS: list[tuple[str, pa.Array]] = [
    *(("topic", pa.array(["T", topic])) for topic in (None, "", "../x", "a/b", ".", "a\0b", "t" * 128)),
    ("topic", not_utf8()),
    ("body", pa.array([b"a", None])),
    ("body", pa.array([b"a", b"x" * 5000])),
    *(("keys", pa.array(["a", key])) for key in ("", "a b", "a\1b", "\2", "k" * 32768)),
    *(("keys", pa.array([["a"], keys])) for keys in (["b", None], ["b", ""], ["b", "c d"], ["\1"], ["k" * 300] * 120)),
    ("keys", not_utf8()),
    *(("tags", pa.array(["a", tag])) for tag in ("a\1b", "\2", "t" * 32768)),
    ("tags", not_utf8()),
    *(("uniq_key", pa.array(["a", key])) for key in ("a\1b", "\2", "t" * 32768)),
    ("uniq_key", not_utf8()),
    *(
        ("properties", pa.array([[], [item]], TEXTS))
        for item in (("a", "\1"), ("\2", "a"), ("", "a"), ("a", "b" * 32768), ("INNER_NUM", "1"))
    ),
    *(("raw_properties", pa.array([b"", raw])) for raw in (b"b" * 32768, b"INNER_NUM\x011\x02")),
    *((name, pa.array([1, None], pa.int64())) for name in NUMBERS if name != "born_timestamp"),
    *(
        (name, pa.array([1, value], pa.int64()))
        for name, bits in NUMBERS.items()
        if bits == 32
        for value in (2**31, -(2**31) - 1)
    ),
    *((name, pa.array([1, 2**63], pa.uint64())) for name in NUMBERS),
    ("queue_id", pa.array([1, -1], pa.int32())),
    ("sys_flag", pa.array([1, 64], pa.int32())),
    ("born_timestamp", pa.array([1, 2**62], pa.timestamp("s", "UTC"))),
    *((name, pa.array([b"1.2.3.4:1", host]).view(pa.string()))
      for name in ("born_host", "store_host") for host in (b"", b"x", b"1.2.3.4", b"1.2.3.4:1\xff")),
]


@pytest.mark.parametrize(("name", "column"), BAD_ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(BAD_ROWS)])
def test_a_bad_row_of_a_table_stores_nothing_of_its_chunk(tmp_path: Path, name: str, column: pa.Array) -> None:
    bad = pa.record_batch(GOOD | {name: column})
    good = pa.RecordBatch.from_arrays([column.take([0, 0]) for column in bad.columns], schema=bad.schema)
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        with pytest.raises(Illegal, match=r"^row 3: ") as caught:
            store.put_many(pa.Table.from_batches([good, bad, good]))
        assert (caught.value.row, caught.value.stored) == (3, 2)
        assert store.scan(columns=["topic"]).read_all().num_rows == 2
        assert store.put_many(good, results=False) == 2
    assert oracle.check_store(tmp_path / "s", 10, 30) == []
    assert len(oracle.read_records(tmp_path / "s")) == 4


NUMBERLESS = [pa.array(["a", "b"]), pa.array([1.5, 2]), pa.array([True, False]), pa.array([None, None])]
BAD_TABLES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *(
        (GOOD | {name: pa.array([1, 2])}, {}, TypeError, name)
        for name in (
            "topic",
            "body",
            "keys",
            "tags",
            "uniq_key",
            "properties",
            "raw_properties",
            "born_host",
            "store_host",
        )
    ),
    *((GOOD | {name: pa.array([b"a", b"b"])}, {}, TypeError, name) for name in ("topic", "tags", "keys", "uniq_key")),
    *(
        (GOOD | {"keys": keys}, {}, TypeError, "keys")
        for keys in (
            pa.array([[1], [2]]),
            pa.array([{"a": 1}] * 2),
            pa.array([[["a"]], []]),
            pa.array([1.5, 2]),
        )
    ),
    *(
        (GOOD | {"properties": column}, {}, TypeError, "properties")
        for column in (
            pa.array(["a", "b"]),
            pa.array([{"a": "b"}] * 2),
            pa.array([[("a", 1)]] * 2, pa.map_(pa.string(), pa.int32())),
        )
    ),
    *((GOOD | {name: column}, {}, (TypeError, Illegal), name) for name in NUMBERS for column in NUMBERLESS
      if name != "born_timestamp" or not column.null_count),
    (GOOD | {"born_timestamp": pa.array([1, 2], pa.timestamp("ms"))}, {}, ValueError, "born_timestamp"),
    (GOOD | {"born_timestamp": pa.array([1, 2], pa.date32())}, {}, TypeError, "born_timestamp"),
    ({"topic": ["T"]}, {}, ValueError, "body"),
    ({"body": [b""]}, {}, ValueError, "topic"),
    (GOOD | {"Body": ["a", "b"]}, {}, ValueError, "Body"),
    (GOOD, {"columns": {"keys": "nowhere"}}, ValueError, "nowhere"),
    (GOOD, {"columns": {"nothing": "body"}}, ValueError, "nothing"),
    (GOOD, {"columns": {"keys": 5}}, (TypeError, ValueError), "columns"),
    (GOOD, {"columns": {5: "body"}}, (TypeError, ValueError), "columns"),
    (GOOD, {"columns": ["keys"]}, TypeError, "columns"),
    (GOOD, {"columns": 5}, TypeError, "columns"),
    *((GOOD, {"topic": topic}, ValueError, "topic") for topic in ("", "../x", "a\0", "t" * 128, "\ud800")),
    *((GOOD, {"topic": topic}, TypeError, "topic") for topic in (5, b"T", ["T"])),
    *((GOOD, {"queue_id": number}, ValueError, "queue_id") for number in (-1, 2**31, HUGE)),
    *((GOOD, {"queue_id": number}, TypeError, "queue_id") for number in ("0", 1.0, True, [0])),
]


@pytest.mark.parametrize(
    ("columns", "extra", "error", "named"),
    BAD_TABLES,
    ids=[f"{i}-{case[3]}" for i, case in enumerate(BAD_TABLES)],
)
def test_a_table_of_another_shape_is_refused_by_its_columns_name(
    store: rmq.Store, columns: Any, extra: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        store.put_many(pa.table(columns), **extra)


def test_columns_of_one_name_are_refused(store: rmq.Store) -> None:
    twice = pa.table([pa.array(["T"]), pa.array([b"a"]), pa.array([b"b"])], names=["topic", "body", "body"])
    with pytest.raises(ValueError, match="repeat"):
        store.put_many(twice)


def test_a_table_stream_that_fails_keeps_the_batches_before(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch(GOOD)
        raise ValueError("the source broke")

    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        with pytest.raises(Exception, match="the source broke"):
            store.put_many(pa.RecordBatchReader.from_batches(pa.record_batch(GOOD).schema, batches()))
        assert store.topics() == {"T": {0: (0, 2)}}


@pytest.mark.parametrize(
    ("now", "error"),
    [
        (lambda: "soon", (TypeError, ValueError)),
        (lambda: None, TypeError),
        (lambda: 2**63, ValueError),
        (lambda: -HUGE, ValueError),
        (lambda: float("nan"), (TypeError, ValueError)),
        (lambda: 1 // 0, ZeroDivisionError),
    ],
    ids=["text", "none", "2**63", "-10**30", "nan", "raises"],
)
def test_a_broken_clock_stores_nothing(tmp_path: Path, now: Callable[[], Any], error: Any) -> None:
    times: list[Callable[[], Any]] = [lambda: 1000, now, lambda: 2000]
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=lambda: times.pop(0)()) as store:
        store.put(message(0))
        with pytest.raises(error):
            store.put(message(1))
        store.put(message(2))
        assert_holds(store, [b"body 0", b"body 2"])
    assert oracle.check_store(tmp_path / "s", 10, 30) == []
