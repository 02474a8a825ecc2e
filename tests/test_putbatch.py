# SPDX-License-Identifier: Apache-2.0
"""Messages that go through a PutBatch, byte for byte beside the oracle: texts of all short lengths, runs of queues."""

from __future__ import annotations

import enum
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pandas as pd
import pytest

import rmq
from rmq._core import _layout as L
from rmq._core._message import to_ms
from rmq._core._putbatch import PutBatch
from rmq._core._putrow import PutRules
from rmq._core._putter import put_result
from rmq._core._queuetable import QueueTable
from rmq._core._record import store_visible
from rmq._core._textcolumn import TextColumn

NOW = 1_700_000_000_000
HOSTS = ("1.2.3.4:5", "[2001:db8::1]:65535")
GUARD = 0xAA


def put_batch(**changes: Any) -> PutBatch:
    options: dict[str, Any] = {"max_message_size": 100_000, "max_record_size": 200_000, "allow_v2": True,
                               "allow_ipv6": True, "append_crc": False, "drop_last_separator": False,
                               "store_host": HOSTS[0]}  # fmt: skip
    return PutBatch(PutRules(**options | changes))


def encoded(batch: PutBatch, queues: QueueTable, begin: int = 3) -> bytes:
    """The records, of a segment whose other bytes are as they were."""
    segment = bytearray([GUARD]) * (begin + batch.records_size + L.BLANK_HEADER_SIZE)
    end = batch.encode(segment, 1000 - begin, begin, 0, len(batch), NOW, queues)
    assert set(segment[:begin]) | set(segment[end:]) == {GUARD}
    return bytes(segment[begin:end])


def expected(messages: list[rmq.Message]) -> bytes:
    data = b""
    offsets: dict[tuple[str, int], int] = {}
    for item in messages:
        queue = item.topic, item.queue_id
        is_counted = item.sys_flag & 0xC not in (0x4, 0xC)  # prepared, rolled back
        store_host = item.store_host or HOSTS[0]
        raw = item.raw_properties
        if raw is None:
            own = {"KEYS": " ".join(item.keys) or None, "UNIQ_KEY": item.uniq_key, "TAGS": item.tags}
            items = {name: value for name, value in own.items() if value is not None} | item.properties
            raw = b"".join(b"%s\1%s\2" % (name.encode(), value.encode()) for name, value in items.items())
        data += oracle.encode_record(
            item.topic, item.queue_id, offsets.get(queue, 0) if is_counted else 0, 1000 + len(data), item.body, raw,
            flag=item.flag, sys_flag=item.sys_flag & ~0x30, store_timestamp=NOW, store_host=store_host,
            born_host=item.born_host or store_host,
            born_timestamp=NOW if item.born_timestamp is None else item.born_timestamp,
            reconsume_times=item.reconsume_times, prepared_transaction_offset=item.prepared_transaction_offset,
        )  # fmt: skip
        offsets[queue] = offsets.get(queue, 0) + is_counted
    return data


@pytest.mark.parametrize("count", [2, 4, 8])  # of rows that malloc has at hand again at once
def test_messages_of_one_header_are_alike_whatever_the_rows_memory_held(count: int) -> None:
    """A flag read from bytes that other rows had left there made a process encode each header anew."""
    messages = [rmq.Message("t", b"body", keys=f"key{number}") for number in range(count)]
    others = [rmq.Message("t", b"body", raw_properties=b"a\1b")] * count
    used = put_batch(append_crc=True)
    used.load(others)
    assert used.alike() == 0
    del used
    batch = put_batch()
    batch.load(messages)
    assert batch.alike() == count - 1
    assert encoded(batch, QueueTable()) == expected(messages)


@pytest.mark.parametrize("topics", [1, 3, 1500])  # more than are kept
def test_messages_are_alike_whatever_objects_their_topics_are(topics: int) -> None:
    """As from a file of lines, where each has a text of its own."""
    for number in range(topics):
        rmq.Message(f"T\u00fcr{number}", b"")
    messages = [rmq.Message(f"T\u00fcr{number % topics}", b"x") for number in range(0, 12 * topics, topics)]
    batch = put_batch()
    batch.load(messages)
    assert batch.alike() == 11
    assert encoded(batch, QueueTable()) == expected(messages)


def test_a_topic_of_a_class_of_its_own_is_kept_as_text() -> None:
    class Name(str):
        __hash__, __eq__ = None, None  # type: ignore[assignment]

    made = [rmq.Message(name, b"x") for name in (Name("Mine"), np.str_("Mine"), "Mine", Name("Mine"))]
    assert [(type(message.topic), message.topic) for message in made] == [(str, "Mine")] * 4
    batch = put_batch()
    batch.load(made)
    assert encoded(batch, QueueTable()) == expected(made)


HEADERS: list[dict[str, Any]] = [
    {}, {"queue_id": 1}, {"queue_id": 2**31 - 1}, {"flag": 1}, {"flag": -(2**31)},
    {"sys_flag": 4}, {"sys_flag": 8}, {"sys_flag": 12},
    {"reconsume_times": 2}, {"prepared_transaction_offset": 7}, {"properties": {"WAIT": "false"}},
    {"born_timestamp": 5}, {"born_host": HOSTS[0]}, {"store_host": HOSTS[1]}, {"raw_properties": b"a\1b\2"},
]  # fmt: skip
# With one of these a message is not like the one before.
ALONE = {"born_timestamp", "born_host", "store_host", "raw_properties"}


@pytest.mark.parametrize("seed", range(4))
def test_messages_are_alike_that_follow_one_with_the_same_header(seed: int) -> None:
    source = random.Random(seed)
    messages: list[rmq.Message] = []
    alike, before = 0, None  # a header is the same whatever queue and properties are
    for topic in source.choices(["Orders", "Orders2", "T\u00fcr"], k=60):
        number = source.randrange(len(HEADERS))
        for _ in range(source.choice([1, 1, 2, 9])):
            # Of two queues with the same last bits, as well.
            header = {"queue_id": source.choice([0, 1, 16, 17, 2**31 - 16])} | HEADERS[number]
            messages.append(rmq.Message(topic, source.randbytes(source.randrange(300)), **header))
            kept = topic, {name: value for name, value in header.items() if name not in ("queue_id", "raw_properties")}
            alike += kept == before and not ALONE & set(header)
            before = kept
    batch = put_batch()
    batch.load(messages)
    assert batch.alike() == alike > 50
    assert encoded(batch, QueueTable()) == expected(messages)


def test_texts_of_every_short_length_have_the_oracle_s_bytes() -> None:
    source = random.Random(1)
    messages = [
        rmq.Message("t" * (1 + size % 127), source.randbytes(size), raw_properties=source.randbytes(size).strip(b"\0"),
                    born_host=HOSTS[size % 2], store_host=HOSTS[size // 2 % 2], born_timestamp=size or None,
                    flag=-size, reconsume_times=size, prepared_transaction_offset=-size, queue_id=size % 3)
        for size in range(300)
    ]  # fmt: skip
    batch = put_batch()
    batch.load(messages)
    assert encoded(batch, QueueTable()) == expected(messages)


@pytest.mark.parametrize("seed", range(5))
def test_queues_in_runs_and_in_turn_count_their_own_offsets(seed: int) -> None:
    source = random.Random(seed)
    names = ["Orders", "orders", "Order", "T\u00fcr", "T" * 200]
    messages: list[rmq.Message] = []
    while len(messages) < 200:
        topic, queue_id, length = source.choice(names[:4]), source.randrange(3), source.choice([1, 1, 7])
        # Equal names, not always one object.
        messages += [rmq.Message("".join(list(topic)), b"", queue_id=queue_id) for _ in range(length)]
    batch, queues = put_batch(), QueueTable()
    batch.load(messages)
    assert encoded(batch, queues) == expected(messages)
    results = batch.results()
    assert results[4] == [message.topic for message in messages]
    found = {(topic, queue_id): offset for topic, queue_id, offset in
             zip(results[4], results[3].tolist(), results[1].tolist(), strict=True)}  # fmt: skip
    for (topic, queue_id), offset in found.items():
        assert queues.next_offset(queues.find(topic.encode(), queue_id)) == offset + 1


def test_columns_have_the_bytes_of_messages() -> None:
    source = random.Random(2)
    words = ["k" * size for size in range(1, 80)] + ["\u00fc" * 9]
    rows = [(source.randbytes(size), source.choices(words, k=size % 4), source.choice(words), source.choice(words))
            for size in range(150)]  # fmt: skip
    messages = [rmq.Message("Orders", body, keys=keys, uniq_key=uniq, tags=tags, store_host=HOSTS[1],
                            properties={"a": "b" * (number % 20), "KEYS": " ".join(keys)} if keys else {"a": "1"})
                for number, (body, keys, uniq, tags) in enumerate(rows)]  # fmt: skip

    def column(items: list[bytes]) -> TextColumn:
        return TextColumn(np.cumsum([0, *map(len, items)]), b"".join(items), np.zeros(0, np.uint8))

    keys = [key.encode() for row in rows for key in row[1]]
    maps = [list(message.properties.items()) for message in messages]
    names = [name.encode() for items in maps for name, _ in items]
    values = [value.encode() for items in maps for _, value in items]
    hosts = np.zeros(len(rows), np.int64)
    batch, listed = put_batch(), put_batch()
    batch.load_columns(
        len(rows), topic=column([b"Orders"] * len(rows)), body=column([row[0] for row in rows]), keys=column(keys),
        key_lists=np.cumsum([0, *(len(row[1]) for row in rows)]), uniq_key=column([row[2].encode() for row in rows]),
        tags=column([row[3].encode() for row in rows]), names=column(names), values=column(values),
        maps=np.cumsum([0, *map(len, maps)]), raw_properties=None, numbers={},
        hosts={"store_host": ([oracle.encode_host(HOSTS[1])], hosts)},
    )  # fmt: skip
    listed.load(messages)
    assert encoded(batch, QueueTable()) == encoded(listed, QueueTable())


def test_a_crc_property_that_comes_in_is_replaced_in_every_row() -> None:
    plain = [rmq.Message("T", b"b", raw_properties=b"A\1%d\2" % number) for number in range(100)]
    carrying = [rmq.Message("T", b"b", raw_properties=message.raw_properties + b"__CRC32#\0010123456789\2")
                for message in plain]  # fmt: skip
    batch, other = put_batch(append_crc=True), put_batch(append_crc=True)
    batch.load(plain[:1] + carrying[1:])
    other.load(plain)
    del carrying
    assert encoded(batch, QueueTable()) == encoded(other, QueueTable())


@pytest.mark.parametrize("host", HOSTS)
def test_a_result_has_the_fields_of_a_put_result(host: str) -> None:
    batch = put_batch(store_host=host)
    message = rmq.Message("T", b"body", queue_id=7)
    batch.load_one(message)
    encoded(batch, QueueTable())
    result = rmq.PutResult("T", 7, 0, 1000, batch.records_size, 5, oracle.offset_msg_id(oracle.encode_host(host), 1000))
    assert put_result(batch, 5, kind=rmq.PutResult, message=message) == result
    batch.release()
    assert (len(batch), batch.records_size) == (0, 0)


@pytest.mark.parametrize("bad", [None, "text", object(), rmq.Message.__new__(rmq.Message)])
def test_what_is_no_message_is_found_at_every_place(bad: object) -> None:
    batch = put_batch()
    good = rmq.Message("T", b"")
    for place in range(20):
        with pytest.raises((TypeError, rmq.IllegalMessageError), match=f"row {place}: "):
            batch.load([*[good] * place, bad, *[good] * (19 - place)])  # type: ignore[list-item]
        assert len(batch) == 0
    with pytest.raises((TypeError, rmq.IllegalMessageError), match="row 0: "):
        batch.load_one(bad)  # type: ignore[arg-type]


def test_rows_that_do_not_fit_write_nothing() -> None:
    batch = put_batch()
    batch.load([rmq.Message("T", b"x" * 50)] * 3)
    queues, room = QueueTable(), batch.records_size + L.BLANK_HEADER_SIZE
    segment = bytearray(room - 1)
    with pytest.raises(ValueError, match="do not fit"):
        batch.encode(segment, 0, 0, 0, 3, NOW, queues)
    with pytest.raises(ValueError, match="out of range"):
        batch.encode(bytearray(room), 0, 0, 0, 4, NOW, queues)
    with pytest.raises(BufferError):
        batch.encode(bytes(room), 0, 0, 0, 3, NOW, queues)  # type: ignore[arg-type]
    assert (any(segment), len(queues)) == (False, 0)
    assert batch.fit(0, room - 1) == (2, batch.records_size // 3 * 2)
    assert batch.fit(0, room) == (3, batch.records_size)
    assert batch.fit(1, room) == (2, batch.records_size // 3 * 2)


def test_a_topic_that_was_refused_is_refused_again() -> None:
    for topic in ("a/b", "", "T" * 128):
        for _ in range(2):
            with pytest.raises(rmq.IllegalMessageError):
                rmq.Message(topic, b"")
    topic = "".join(["Or", "ders"])
    assert [rmq.Message(topic, b"").topic for _ in range(3)] == ["Orders"] * 3


def test_marks_that_are_short_or_read_only_take_no_end() -> None:
    with pytest.raises(ValueError, match="MARKS_SIZE"):
        store_visible(bytearray(L.MARKS_SIZE - 1), 1)
    with pytest.raises(BufferError):
        store_visible(bytes(L.MARKS_SIZE), 1)  # type: ignore[arg-type]
    marks = bytearray(L.MARKS_SIZE)
    store_visible(marks, 0x0102030405060708)
    assert marks[L.MARKS_VISIBLE_PHY_OFFSET_OFFSET :][:8] == bytes(range(1, 9))


class Index:
    def __index__(self) -> int:
        return 7


class Half:
    def __index__(self) -> float:
        return 1.5


class Span(timedelta):
    def __floordiv__(self, other: Any) -> Any:
        return other.of_the_same_class()


class Moment(datetime):
    """As pendulum's, whose differences only their own divide."""

    def __sub__(self, other: Any) -> Any:
        span = super().__sub__(other)
        return Span(span.days, span.seconds, span.microseconds)


@pytest.mark.parametrize(("value", "answer"), [
    (-2**63, -2**63), (2**63 - 1, 2**63 - 1), (0, 0), (Index(), 7), (Moment(1970, 1, 2, tzinfo=UTC), 86_400_000)])
def test_a_number_of_milliseconds_is_taken(value: Any, answer: int) -> None:
    assert to_ms(value, "clock") == to_ms(value, "clock", True) == answer


@pytest.mark.parametrize("kind", [datetime, Moment, pd.Timestamp])
def test_a_time_between_milliseconds_is_taken_down_or_up(kind: type[datetime]) -> None:
    for year, down in ((1969, -1), (1970, 31_535_999_999)):
        moment = kind(year, 12, 31, 23, 59, 59, 999_001, tzinfo=UTC)
        assert (to_ms(moment, "clock"), to_ms(moment, "clock", True)) == (down, down + 1)


def test_nanoseconds_count() -> None:
    assert to_ms(pd.Timestamp(1_000_001, tz="UTC"), "clock", True) == 2


@pytest.mark.parametrize(("value", "kind"), [(2**63, ValueError), (-2**63 - 1, ValueError), (True, TypeError),
                                             (1.0, TypeError), (Half(), TypeError)])  # fmt: skip
def test_other_milliseconds_are_refused(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="clock"):
        to_ms(value, "clock")


@pytest.mark.parametrize("value", [Half(), True, 1.0, "1", None])
@pytest.mark.parametrize("name", ["queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset"])
def test_a_number_of_a_message_is_an_int(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        rmq.Message("T", b"", **{name: value})
    assert getattr(rmq.Message("T", b"", **{name: Index()}), name) == 7  # type: ignore[arg-type]


# ---- messages --------------------------------------------------------------------------------------------


class Shown(str):
    """A text that says something else wherever it can."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        return b"shown"

    def __format__(self, _: str) -> str:
        return "shown"

    def __str__(self) -> str:
        return "shown"


class Named(enum.StrEnum):
    TAG = "paid"


@pytest.mark.parametrize("text", [Shown("paid"), Named.TAG, np.str_("paid")], ids=lambda text: type(text).__name__)
def test_a_subclass_of_str_is_the_text_that_it_holds(text: str) -> None:
    message = rmq.Message("T", b"", keys=[text, "k"], tags=text, uniq_key=text, properties={text: text, "a": text})
    raw = b"KEYS\1paid k\2UNIQ_KEY\1paid\2TAGS\1paid\2paid\1paid\2a\1paid\2"
    batch, plain = put_batch(), put_batch()
    batch.load([message])
    plain.load([rmq.Message("T", b"", raw_properties=raw)])
    assert encoded(batch, QueueTable()) == encoded(plain, QueueTable())


def test_code_of_a_text_s_class_does_not_run_while_properties_are_written() -> None:
    """What it changed meanwhile was written beyond the room for it."""
    class Changing(str):
        __slots__ = ()

        def split(self, *_: Any) -> list[str]:  # type: ignore[override]
            raise AssertionError("asked")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("asked")

        __hash__ = str.__hash__

    properties = {"a": "v", "KEYS": Changing(" k  l"), "TAGS": Changing("t"), "UNIQ_KEY": Changing("u")}
    message = rmq.Message("T", b"", keys=["k", "l"], tags="t", uniq_key="u", properties=properties)
    batch, plain = put_batch(), put_batch()
    batch.load([message])
    plain.load([rmq.Message("T", b"", keys=["k", "l"], tags="t", uniq_key="u", properties={"a": "v"})])
    assert encoded(batch, QueueTable()) == encoded(plain, QueueTable())


@pytest.mark.parametrize(("said", "raw"), [
    ({"KEYS": "a b"}, b""), ({"KEYS": " a  b "}, b""), ({"UNIQ_KEY": "u"}, b""), ({"TAGS": "\u00fc"}, b""),
    ({"keys": "x", "KEYS": "a b", "TAG": "", "TAGSS": "y"}, b"keys\1x\2TAG\1\2TAGSS\1y\2"),
    ({"KEYS": "b a"}, None), ({"KEYS": "a"}, None), ({"KEYS": ""}, None), ({"UNIQ_KEY": "U"}, None),
    ({"UNIQ_KEY": ""}, None), ({"TAGS": "u"}, None), ({"TAGS": "\u00fc "}, None),
])  # fmt: skip
def test_properties_may_repeat_what_an_argument_says(said: dict[str, str], raw: bytes | None) -> None:
    """raw: what they add to the stored properties, None: refused."""
    arguments: dict[str, Any] = {"keys": ("a", "b"), "uniq_key": "u", "tags": "\u00fc"}
    if raw is None:
        with pytest.raises(rmq.IllegalMessageError, match=r"properties\[.* contradicts the argument of that name"):
            rmq.Message("T", b"", properties=said, **arguments)
        return
    batch, plain = put_batch(), put_batch()
    batch.load([rmq.Message("T", b"", properties=said, **arguments)])
    own = "KEYS\1a b\2UNIQ_KEY\1u\2TAGS\1\u00fc\2".encode()
    plain.load([rmq.Message("T", b"", raw_properties=own + raw)])
    assert encoded(batch, QueueTable()) == encoded(plain, QueueTable())


def test_a_message_is_made_once() -> None:
    made, failed = rmq.Message.__new__(rmq.Message), rmq.Message.__new__(rmq.Message)

    class Again:
        def __index__(self) -> int:
            with pytest.raises(TypeError, match="immutable"):
                made.__init__("inner", b"inner")  # type: ignore[misc]
            return 0

    made.__init__("outer", b"outer", queue_id=Again())  # type: ignore[misc]
    assert made == rmq.Message("outer", b"outer")
    with pytest.raises(rmq.IllegalMessageError):
        failed.__init__("", b"")  # type: ignore[misc]
    with pytest.raises(TypeError, match="immutable"):
        failed.__init__("T", b"")  # type: ignore[misc]


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_batch_keeps_rows_that_it_has(count: int) -> None:
    batch = put_batch()
    batch.load([rmq.Message("T", b"x" * size) for size in range(3)])
    with pytest.raises(ValueError, match=f"cannot keep {count} of 3 rows"):
        batch.keep(count)
    sizes = [batch.fit(row, 1 << 20)[1] for row in range(3)]
    batch.keep(2)
    assert (len(batch), batch.records_size) == (2, sizes[0] - sizes[2])


def test_messages_are_equal_when_their_properties_stand_in_one_order() -> None:
    one, same = (rmq.Message("T", b"", properties={"A": "1", "B": "2"}) for _ in range(2))
    other = rmq.Message("T", b"", properties={"B": "2", "A": "1"})
    assert one == same != other
    assert {one, same, other} == {one, other}


@pytest.mark.parametrize(("level", "answer"), [
    ("1", True), ("+1", True), ("0" * 5000 + "18", True), ("2147483647", True),
    ("", False), ("0", False), ("-1", False), ("2147483648", False), ("1" * 5000, False), ("\u0661", False),
])  # fmt: skip
def test_a_message_is_delayed_by_a_level_that_java_reads(level: str, answer: bool) -> None:
    assert rmq.Message("T", b"", properties={"DELAY": level}).is_delayed is answer


@pytest.mark.parametrize("ending", [b"", b"\2"])
def test_a_batch_leaves_an_incoming_crc_that_is_not_whole_where_it_is(tmp_path: Path, ending: bytes) -> None:
    """As RocketMQ does, which takes it off single messages alone: no key runs into the record's own."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, enabled_append_prop_crc=True)
    given = b"KEYS\1k1\2__CRC32#\1012345678" + ending
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_batch([rmq.Message("T", b"x", raw_properties=given)])
        (found,) = store.query("T", "k1")
        assert found.keys == ("k1",)
        assert found.raw_properties.startswith(given + b"__CRC32#\1")


@pytest.mark.parametrize("version", ["4.9.4", "5.3.3"])
def test_a_value_that_a_batch_s_crc_ran_into_is_put_again_whole(tmp_path: Path, version: str) -> None:
    """There is no separator before it, and none is taken off."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, enabled_append_prop_crc=True)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_batch([rmq.Message("T", b"x", raw_properties=b"TAGS\1t\2A\1value")])
        table = store.scan(columns=["topic", "body", "properties"]).read_all()
    with rmq.open(tmp_path / "t", "x", config=rmq.StoreConfig(rocketmq_version=version)) as store:
        store.put_many(table)
        assert store.lookup(0).properties == {"TAGS": "t", "A": "value"}


@pytest.mark.parametrize("wrong", [[5], [rmq.Message("U", b"")]])
def test_the_error_of_a_batch_tells_that_nothing_was_stored(tmp_path: Path, wrong: list[Any]) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        with pytest.raises((rmq.IllegalMessageError, TypeError)) as error:
            store.put_batch([rmq.Message("T", b""), *wrong])
        assert (getattr(error.value, "row", None), getattr(error.value, "stored", None)) == (1, 0)


def test_a_batch_has_no_prepared_transaction_offset(tmp_path: Path) -> None:
    """As RocketMQ's, which supports no transactions in one."""
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_batch([rmq.Message("T", b"", prepared_transaction_offset=7) for _ in range(3)])
        store.put(rmq.Message("T", b"", prepared_transaction_offset=7))
        assert [message.prepared_transaction_offset for message in store.pull("T").messages] == [0, 0, 0, 7]


@pytest.mark.parametrize(("version", "is_stored"), [("4.7.0", False), ("4.9.3", False), ("4.9.4", True)])
def test_up_to_4_9_3_a_batch_s_records_have_one_limit(tmp_path: Path, version: str, is_stored: bool) -> None:
    config = rmq.StoreConfig(rocketmq_version=version, max_message_size=4096)
    messages = [rmq.Message("T", bytes(100)) for _ in range(30)]
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        if is_stored:
            assert len(store.put_batch(messages)) == 30
        else:
            with pytest.raises(rmq.MessageTooLargeError, match="more than max_message_size 4096"):
                store.put_batch(messages)
            assert store.max_phy_offset == 0
