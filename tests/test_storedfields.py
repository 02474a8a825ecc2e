# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch as objects: their fields are the record's, and what they share is equal."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import sys
from typing import Any

import numpy as np
import oracle
import pytest

import rmq
from rmq._core._record import parse_properties
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import StoredFields, are_of_queue, has_compressed, rows_with, stored, stored_at

BASE = 4096
HOSTS = ("10.0.0.1:1", "10.0.0.2:1", "[::1]:1")
NUMBERS = ("queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "born_timestamp", "store_timestamp",
           "reconsume_times", "prepared_transaction_offset", "body_crc")  # fmt: skip


def scanned(*rows: dict[str, Any]) -> RecordBatch:
    data = b""
    for row in rows:
        place = {"topic": "T", "queue_id": 1, "queue_offset": 7, "body": b"b"} | row
        data += oracle.encode_record(phy_offset=BASE + len(data), **place)
    batch = RecordBatch(len(rows) or 1)
    batch.scan(data, BASE, BASE, BASE + len(data))
    assert len(batch) == len(rows)
    return batch


def test_objects_of_neighbours_that_differ_in_any_way_have_each_its_own_fields() -> None:
    """Every order of topics (one a prefix of the other, one that is not UTF-8's shape) and of hosts (IPv4 and IPv6)."""
    rows = [{"topic": topic, "born_host": born, "store_host": store, "body": bytes([number % 256]) * (number % 3),
             "queue_offset": number, "raw_properties": b"TAGS\1%d\2" % number, "flag": -number}
            for number, ((topic, other), (born, store)) in enumerate(
                itertools.product(itertools.product(("T", "TT", "\N{SNOWMAN}"), repeat=2),
                                  itertools.product(HOSTS, repeat=2)))
            for topic in (topic, other)]  # fmt: skip
    batch = scanned(*rows)
    made = stored(batch, rmq.StoredMessage)
    assert made == [stored_at(batch, row, rmq.StoredMessage) for row in range(len(batch))]
    assert [(message.topic, message.born_host, message.store_host) for message in made] == [
        (row["topic"], row["born_host"], row["store_host"]) for row in rows]  # fmt: skip
    assert made == [rmq.StoredMessage(message.as_tuple()) for message in made]


def test_neighbours_share_topic_and_hosts() -> None:
    one, two = stored(scanned({}, {}), rmq.StoredMessage)
    assert one.topic is two.topic
    assert one._born_host is two._born_host


def test_each_number_is_the_one_on_disk() -> None:
    numbers = {"queue_id": -(2**31), "queue_offset": 2**63 - 1, "flag": 2**31 - 1, "born_timestamp": -(2**63),
               "store_timestamp": 2**63 - 1, "reconsume_times": -1, "prepared_transaction_offset": -(2**63),
               "sys_flag": 0x8}  # fmt: skip
    (message,) = stored(scanned(numbers), StoredFields)
    for name in NUMBERS:
        assert getattr(message, name) == numbers.get(name, getattr(message, name)), name
    assert (message.phy_offset, message.body_crc) == (BASE, oracle.body_crc(b"b"))


PIECES = (b"KEYS\1", b"TAGS\1", b"UNIQ_KEY\1", b"K", b"KEYSX\1", b"tags\1", b"", b"\1", b"\2", b"\2", b"\2", b" ", b"a",
          b"a b", b"\xff", "\u00fc\U0001f600".encode(), b"\xed\xa0\x80", b"\0")  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_keys_tags_and_uniq_key_are_those_of_the_parsed_properties(seed: int) -> None:
    """Of properties that repeat names, lack ends and are not UTF-8."""
    source = random.Random(seed)
    rows = [{"raw_properties": b"".join(source.choices(PIECES, k=source.randrange(20)))} for _ in range(200)]
    found = 0
    for message in stored(scanned(*rows), rmq.StoredMessage):
        parsed = parse_properties(message.raw_properties)
        assert message.keys == tuple(key for key in parsed.get("KEYS", "").split(" ") if key)
        assert (message.tags, message.uniq_key) == (parsed.get("TAGS"), parsed.get("UNIQ_KEY"))
        assert message.properties == parsed == message.properties
        found += len(message.keys) + (message.tags is not None)
    assert found > 20


def test_the_collector_passes_over_messages() -> None:
    messages = [*stored(scanned({}, {}), rmq.StoredMessage), stored_at(scanned({}), 0, rmq.StoredMessage),
                rmq.Message("T", b"", keys="k", properties={"a": "b"})]  # fmt: skip
    assert [gc.is_tracked(message) for message in messages] == [False] * 4


def test_no_rows_are_no_objects() -> None:
    assert stored(RecordBatch(1), rmq.StoredMessage) == []


@pytest.mark.parametrize("kind", [tuple, object, rmq.Message])
def test_objects_of_another_class_are_refused(kind: Any) -> None:
    for call in (lambda batch: stored(batch, kind), lambda batch: stored_at(batch, 0, kind)):
        with pytest.raises(TypeError, match="kind"):
            call(scanned({}))


@pytest.mark.parametrize("row", [-1, 1, 2**31 - 1])
def test_a_row_that_is_not_there_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        stored_at(scanned({}), row, StoredFields)


def test_fields_outlive_the_batch_and_are_freed_with_their_message() -> None:
    batch = scanned({"body": bytes(1000)})
    (message,) = stored(batch, rmq.StoredMessage)
    batch.release()
    del batch
    body = message.raw_body
    assert body == bytes(1000)
    count = sys.getrefcount(body)
    del message
    assert sys.getrefcount(body) == count - 1


def test_messages_are_copied_and_pickled_by_value_and_take_no_new_values() -> None:
    (message,) = stored(scanned({"raw_properties": b"KEYS\1a b\2"}), rmq.StoredMessage)
    assert message.keys == ("a", "b")
    for again in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert (again, again.keys, hash(again)) == (message, ("a", "b"), hash(message))
    with pytest.raises(AttributeError):
        message.queue_id = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        message.other = 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("fields", [(), ("T",), None, [*range(16)]])
def test_fields_of_another_shape_are_refused(fields: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        StoredFields(fields)


def test_rows_with_a_property_are_those_that_have_one_of_just_that_name() -> None:
    texts = [b"", b"N\1v", b"NN\1v", b"a\1N\1v", b"a\1b\2N\1v\2", b"N\2", b"b\1N", b"N\1", b"N\1v\2N\1w"]
    batch = scanned(*({"raw_properties": text} for text in texts))
    assert [row for row, text in enumerate(texts) if "N" in parse_properties(text)] == [1, 4, 8]
    assert rows_with(batch, b"N") == [1, 4, 8]
    assert rows_with(RecordBatch(1), b"N") == []


def test_compressed_rows_are_told() -> None:
    assert not has_compressed(scanned({}, {}))
    assert has_compressed(scanned({}, {"sys_flag": 1}))


@pytest.mark.parametrize(("change", "answer"), [
    ({}, True), ({"topic": None}, True), ({"topic": b"U"}, False), ({"topic": b"T\xff"}, False),
    ({"topic": b""}, False), ({"queue_id": 2}, False), ({"queue_offsets": [7, 9]}, False),
    ({"queue_offsets": None}, True), ({"queue_offsets": [7]}, False), ({"queue_offsets": [7, 8, 9]}, False),
    ({"sizes": 1}, False), ({"topic": None, "queue_id": 2}, True),
])  # fmt: skip
def test_units_are_judged_by_topic_queue_offset_and_size(change: dict[str, Any], answer: bool) -> None:
    batch = scanned({}, {"queue_offset": 8})
    given = {"topic": b"T", "queue_id": 1, "queue_offsets": [7, 8], "sizes": 0} | change
    numbers = None if given["queue_offsets"] is None else np.array(given["queue_offsets"], np.int64)
    sizes = (batch.numbers("size") + [0, given["sizes"]]).astype(np.int32)
    assert are_of_queue(batch, given["topic"], given["queue_id"], numbers, sizes) is answer
    assert not are_of_queue(batch, given["topic"], given["queue_id"], numbers, sizes[:1])


def test_a_class_that_makes_something_else_is_a_type_error() -> None:
    class Other(rmq.StoredMessage):
        def __new__(cls, *_: Any) -> Any:
            return 5

    with pytest.raises(TypeError):
        stored(scanned({}), Other)


def test_a_message_that_is_made_again_forgets_what_was_derived() -> None:
    one, two = stored(scanned({"raw_properties": b"TAGS\1a\2"}, {"raw_properties": b"TAGS\1b\2"}), rmq.StoredMessage)
    assert one.tags == "a"
    one.__init__(two.as_tuple())  # type: ignore[misc]
    assert one.tags == "b"
