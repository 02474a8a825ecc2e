# SPDX-License-Identifier: Apache-2.0
"""Messages that are put by the thousand: property strings made of columns, headers like the one before."""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_putbatch import HOSTS, encoded, expected, put_batch

import rmq
from rmq._core._queuetable import QueueTable
from rmq._core._textcolumn import TextColumn
from rmq.errors import IllegalMessageError, MessageTooLargeError

NOTHING = np.empty(0, np.uint8)
SIZES = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500)
PRINTED = bytes(0x21 + byte % 0x5E for byte in range(256))


def guarded(data: bytes) -> npt.NDArray[np.uint8]:
    """The bytes, before a page that nobody may read."""
    page = mmap.PAGESIZE
    room = -(-max(len(data), 1) // page) * page
    pages = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), page, 0) == 0
    view = np.frombuffer(pages, np.uint8, room)[room - len(data) :]
    view[:] = np.frombuffer(data, np.uint8)
    return view


def column(texts: list[bytes], width: type = np.int64) -> TextColumn:
    offsets = np.cumsum([0, *map(len, texts)], dtype=width)
    return TextColumn(offsets, guarded(b"".join(texts)), NOTHING, width=offsets.itemsize)


def loaded(batch: Any, count: int, **given: Any) -> Any:
    columns = dict.fromkeys(("keys", "key_lists", "tags", "uniq_key", "names", "values", "maps", "raw_properties"))
    batch.load_columns(count, **columns | {"numbers": {}, "hosts": {}} | given)
    return batch


def texts_of(count: int, seed: int, least: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    sizes = [size for size in SIZES if size >= least]
    return [rng.randbytes(rng.choice(sizes)).translate(PRINTED) for _ in range(count)]


@pytest.mark.parametrize("append_crc", [False, True])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("fields", ["", "keys", "tags", "uniq_key", "keys tags", "keys uniq_key tags"])
def test_plain_columns_have_the_bytes_of_messages(fields: str, width: type, host: str, append_crc: bool) -> None:
    count, names = 300, fields.split()
    given = {name: texts_of(count, number, name == "keys") for number, name in enumerate(("keys", "uniq_key", "tags"))}
    given = {name: texts for name, texts in given.items() if name in names}
    bodies = texts_of(count, 9)
    messages = [rmq.Message("Orders", body, **{name: given[name][row].decode() for name in given})
                for row, body in enumerate(bodies)]  # fmt: skip
    rules = {"append_crc": append_crc, "store_host": host}
    batch = loaded(put_batch(**rules), count, topic=column([b"Orders"]), body=column(bodies, width),
                   **{name: column(texts, width) for name, texts in given.items()})  # fmt: skip
    listed = put_batch(**rules)
    listed.load(messages)
    assert encoded(batch, QueueTable()) == encoded(listed, QueueTable())
    if not append_crc and host == HOSTS[0]:
        assert encoded(batch, QueueTable()) == expected(messages)
    assert batch.waits
    assert batch.results()[4] == ["Orders"] * count


def test_topics_and_numbers_of_columns_have_the_bytes_of_messages() -> None:
    rng, count = random.Random(3), 400
    topics = [topic for _ in range(count // 4) for topic in [rng.choice(["Orders", "orders", "T\u00fcr", "T"])] * 4]
    plain = ("queue_id", "flag", "reconsume_times", "prepared_transaction_offset", "born_timestamp")
    numbers = {name: np.array(rng.choices((0, 1, 7), k=count)) for name in plain}
    numbers["sys_flag"] = np.array(rng.choices((0, 1, 0x10, 0x30), k=count))
    bodies, tags = texts_of(count, 4), texts_of(count, 5)
    for names in ((), ("queue_id",), ("flag", "sys_flag"), tuple(numbers)):
        some = {name: numbers[name] for name in names}
        messages = [rmq.Message(topic, body, tags=tag.decode(), **{name: int(some[name][row]) for name in some})
                    for row, (topic, body, tag) in enumerate(zip(topics, bodies, tags, strict=True))]  # fmt: skip
        batch = loaded(put_batch(), count, topic=column([topic.encode() for topic in topics]), body=column(bodies),
                       tags=column(tags), numbers=some)  # fmt: skip
        assert encoded(batch, QueueTable()) == expected(messages)
    with pytest.raises(IllegalMessageError, match="row 3: queue_id is negative"):
        loaded(put_batch(), 4, topic=column([b"T"]), body=column([b""] * 4),
               numbers={"queue_id": np.array([0, 0, 0, -1])})  # fmt: skip
    with pytest.raises(IllegalMessageError, match="row 1: sys_flag"):
        loaded(put_batch(), 2, topic=column([b"T"]), body=column([b""] * 2), numbers={"sys_flag": np.array([0, 128])})


@pytest.mark.parametrize("field", ["keys", "uniq_key", "tags"])
@pytest.mark.parametrize("strange", ["\0", "\1", "\2", " ", "\t", "\u00fc", "\U0001f600", "\x7f"])
def test_one_strange_character_anywhere_is_as_in_a_message(field: str, strange: str) -> None:
    count = 40
    for row, place in ((0, 0), (0, 5), (3, 15), (17, 2), (39, 0), (39, 16)):
        texts = ["x" * 16] * count
        texts[row] = texts[row][:place] + strange + texts[row][place:]
        columns = {"topic": column([b"T"]), "body": column([b"b"] * count),
                   field: column([text.encode() for text in texts])}  # fmt: skip
        try:
            messages = [rmq.Message("T", b"b", **{field: text}) for text in texts]
        except IllegalMessageError:
            with pytest.raises(IllegalMessageError) as raised:
                loaded(put_batch(), count, **columns)
            assert raised.value.row == row
            continue
        assert encoded(loaded(put_batch(), count, **columns), QueueTable()) == expected(messages)


def test_rows_that_are_too_large_say_which() -> None:
    topic, few = column([b"T"]), put_batch(max_message_size=50, max_record_size=300)
    with pytest.raises(MessageTooLargeError, match="row 2: body has 51 bytes, more than 50"):
        loaded(few, 3, topic=topic, body=column([b"", b"", b"b" * 51]))
    with pytest.raises(MessageTooLargeError, match="row 1: record has 342 bytes, more than 300"):
        loaded(few, 2, topic=topic, body=column([b"b" * 50] * 2), tags=column([b"", b"t" * 194]))
    with pytest.raises(IllegalMessageError, match="row 0: properties have 32768 bytes, more than 32767"):
        loaded(put_batch(), 1, topic=topic, body=column([b""]), tags=column([b"t" * 32762]))
    huge = column([b"t" * 2**27])
    for append_crc, size in ((False, 2**27 + 6), (True, 2**27 + 26)):
        with pytest.raises(IllegalMessageError, match=f"row 0: properties have {size} bytes, more than 32767"):
            loaded(put_batch(append_crc=append_crc), 1, topic=topic, body=column([b""]), tags=huge)
    with pytest.raises(IllegalMessageError, match="row 1: a key is empty"):
        loaded(few, 2, topic=topic, body=column([b""] * 2), keys=column([b"a", b""]))
    with pytest.raises(IllegalMessageError, match="row 0: topic is null or empty"):
        loaded(few, 1, topic=column([b""]), body=column([b""]))
    with pytest.raises(IllegalMessageError, match="row 1: body is null"):
        loaded(few, 2, topic=topic, body=TextColumn(np.array([0, 0, 0]), b"", np.array([0, 1], np.uint8)))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [300, 2**31 - 1, 2**32 + 5])
def test_a_topic_is_measured_before_it_is_taken(rows: int, size: int) -> None:
    """Of 2^32 + 5 bytes the lowest 32 bits say 5. The pages are zeros that nobody reads."""
    data = np.zeros(size, np.uint8)
    data[:5] = list(b"hello")
    topics = TextColumn(np.array([0, size] if rows == 1 else [0, 5, size]), data, NOTHING)
    for more in ({}, {"raw_properties": column([b""] * rows)}):
        with pytest.raises(rmq.IllegalMessageError, match=f"topic has {size - 5 * (rows - 1)} UTF-8 bytes, more than"):
            loaded(put_batch(), rows, topic=topics, body=column([b"x"] * rows), **more)


def test_a_long_run_of_nuls_in_a_column_is_refused() -> None:
    with pytest.raises(IllegalMessageError, match="row 0: properties end with NUL or hold 512"):
        loaded(put_batch(), 1, topic=column([b"T"]), body=column([b""]), tags=column([b"\0" * 512]))


def test_headers_that_change_between_messages_are_their_own() -> None:
    rng = random.Random(6)
    fields: list[tuple[str, list[Any]]] = [
        ("queue_id", [0, 1]), ("flag", [0, 5]), ("sys_flag", [0, 1]), ("reconsume_times", [0, 3]),
        ("prepared_transaction_offset", [0, 9]), ("born_timestamp", [None, 1]), ("born_host", [None, HOSTS[1]]),
        ("store_host", [None, HOSTS[1]]), ("tags", [None, "t" * 16, "t" * 505, "t" * 506, "t" * 700]),
    ]  # fmt: skip
    given: dict[str, Any] = {}
    messages = []
    for number in range(600):
        if number % 3 == 0:
            name, values = rng.choice(fields)
            given[name] = rng.choice(values)
        messages.append(rmq.Message("Orders" if number % 50 else "Other", rng.randbytes(number % 70), **given))
        if number % 40 == 39:
            messages.append(rmq.Message("Orders", b"raw", raw_properties=b"A\1b"))
    batch = put_batch()
    batch.load(messages)
    assert encoded(batch, QueueTable()) == expected(messages)


def test_a_batch_that_is_encoded_in_parts_has_the_same_bytes() -> None:
    messages = [rmq.Message("Orders", b"b" * number, keys="k") for number in range(30)]
    batch = put_batch()
    batch.load(messages)
    whole, queues, place, row = encoded(batch, QueueTable()), QueueTable(), 0, 0
    segment = bytearray(len(whole) + 8)
    for stop in (1, 2, 15, 30):
        place = batch.encode(segment, 1000, place, row, stop, 1_700_000_000_000, queues)
        row = stop
    assert bytes(segment[:place]) == whole


@pytest.mark.parametrize("queues_asked", [1, 2, 16, 40])
@pytest.mark.parametrize("append_crc", [False, True])
def test_rows_of_columns_alone_end_where_messages_do(append_crc: bool, queues_asked: int) -> None:
    """In parts, at a segment's end, in their results: what keeps little of each row is as what keeps all."""
    count, rng = 60, random.Random(queues_asked)
    bodies, keys = texts_of(count, 7), texts_of(count, 8, 1)
    queue_ids = [rng.randrange(queues_asked) * 16 for _ in range(count)]
    batch, listed = put_batch(append_crc=append_crc), put_batch(append_crc=append_crc)
    loaded(batch, count + 1, topic=column([b"Other"]), body=column([b""] * (count + 1)))  # another, before
    loaded(batch, count, topic=column([b"Orders"]), body=column(bodies), keys=column(keys),
           numbers={"queue_id": np.array(queue_ids)})  # fmt: skip
    listed.load([rmq.Message("Orders", body, keys=[key.decode()], queue_id=queue_id)
                 for body, key, queue_id in zip(bodies, keys, queue_ids, strict=True)])  # fmt: skip
    assert batch.alike() == count - 1
    found = []
    for each in (batch, listed):
        assert (len(each), each.records_size) == (count, listed.records_size)
        rooms = [each.fit(row, room) for row in range(count) for room in (0, 99, 1000, each.records_size + 8)]
        queues, place, row = QueueTable(), 0, 0
        segment = bytearray(each.records_size + 8)
        for stop in (0, 1, 2, 31, 31, count):
            place = each.encode(segment, 1000, place, row, stop, 1_700_000_000_000, queues)
            row = stop
        results = [np.asarray(part).tolist() for part in each.results()]
        found.append((bytes(segment), place, rooms, each.packed_size(), each.last_phy_offset, results))
        each.release()
        assert (len(each), each.records_size, each.last_phy_offset, each.results()[4]) == (0, 0, -1, [])
    assert found[0] == found[1]


def test_queue_ids_that_change_after_they_were_checked_are_those_that_were() -> None:
    queue_ids = np.array([1, 2, 3])
    batch = loaded(put_batch(), 3, topic=column([b"T"]), body=column([b"x"] * 3), numbers={"queue_id": queue_ids})
    queue_ids[:] = -7
    assert encoded(batch, QueueTable()) == expected([rmq.Message("T", b"x", queue_id=number) for number in (1, 2, 3)])


@pytest.mark.parametrize("count", [2, 64, 200])
def test_topics_in_turn_are_each_checked(count: int) -> None:
    topics = [f"Topic{number}" for number in range(count)] * 3
    bodies = [b"b" * (row % 5) for row in range(len(topics))]
    batch = loaded(put_batch(), len(topics), topic=column([topic.encode() for topic in topics]), body=column(bodies))
    assert encoded(batch, QueueTable()) == expected(list(map(rmq.Message, topics, bodies)))
    assert batch.results()[4] == topics
    for wrong, error in ((b"a/b", "no name for a directory"), (b"\xff", "not UTF-8"), (b"", "null or empty")):
        with pytest.raises(IllegalMessageError, match=f"row {2 * count}: topic.* {error}"):
            loaded(batch, 3 * count, topic=column([*(topic.encode() for topic in topics[: 2 * count]), wrong,
                                                   *[b"T"] * (count - 1)]), body=column(bodies))  # fmt: skip
    with pytest.raises(MessageTooLargeError, match=f"row {2 * count}: body has 101 bytes, more than 100"):
        loaded(put_batch(max_message_size=100), 3 * count, topic=column([topic.encode() for topic in topics]),
               body=column([*bodies[: 2 * count], b"b" * 101, *bodies[2 * count + 1 :]]))  # fmt: skip


@pytest.mark.parametrize("queue_ids", [[5] * 6, [0] * 6, [2**31 - 1] * 6, [5, 5, 5, 5, 5, 4], [4, 5, 5, 5, 5, 5]])
def test_a_column_of_queue_ids_is_that_of_messages(queue_ids: list[int]) -> None:
    bodies = [b"b" * size for size in range(6)]
    batch = loaded(put_batch(), 6, topic=column([b"Orders"]), body=column(bodies), tags=column([b"t"] * 6),
                   numbers={"queue_id": np.array(queue_ids)})  # fmt: skip
    messages = [rmq.Message("Orders", body, tags="t", queue_id=queue_id)
                for body, queue_id in zip(bodies, queue_ids, strict=True)]  # fmt: skip
    assert encoded(batch, QueueTable()) == expected(messages)
    assert batch.results()[3].tolist() == queue_ids
    for wrong, error in (([-1] * 6, "row 0: queue_id is negative"), ([2**31] * 6, "row 0: queue_id is outside 32 bits"),
                         ([0] * 5, "one number per row")):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            loaded(batch, 6, topic=column([b"T"]), body=column(bodies), numbers={"queue_id": np.array(wrong)})


def test_rows_of_columns_alone_may_be_as_large_as_any() -> None:
    limits = {"max_message_size": 65, "max_record_size": 91 + 1 + 65 + 22}
    bodies = [b"b" * size for size in (65, 62, 1)]
    for tags in ([b"t" * 16] * 3, [b"t" * 9, b"t" * 16, b"t" * 2]):
        batch = loaded(put_batch(**limits), 3, topic=column([b"T"]), body=column(bodies), tags=column(tags))
        messages = [rmq.Message("T", body, tags=tag.decode()) for body, tag in zip(bodies, tags, strict=True)]
        assert encoded(batch, QueueTable()) == expected(messages)
    with pytest.raises(MessageTooLargeError, match="row 1: body has 66 bytes, more than 65"):
        loaded(batch, 3, topic=column([b"T"]), body=column([b"", b"b" * 66, b"b" * 66]))
    with pytest.raises(MessageTooLargeError, match="row 0: record has 180 bytes, more than 179"):
        loaded(batch, 3, topic=column([b"T"]), body=column(bodies), tags=column([b"t" * 17] * 3))
    assert (len(batch), batch.records_size) == (0, 0)


def test_messages_like_the_one_before_meet_the_same_limits() -> None:
    batch = put_batch(max_message_size=50, max_record_size=600)
    with pytest.raises(MessageTooLargeError, match="row 1: body has 51 bytes, more than 50"):
        batch.load([rmq.Message("T", b""), rmq.Message("T", b"b" * 51)])
    with pytest.raises(MessageTooLargeError, match="row 1: record has 604 bytes, more than 600"):
        batch.load([rmq.Message("T", b"", tags="t"), rmq.Message("T", b"b" * 12, tags="t" * 494)])
    with pytest.raises(IllegalMessageError, match="row 1: properties end with NUL or hold 512"):
        put_batch().load([rmq.Message("T", b"", tags="t"), rmq.Message("T", b"", tags="\0" * 600)])
    with pytest.raises(TypeError, match="row 1: expected Message"):
        batch.load([rmq.Message("T", b""), "T"])  # type: ignore[list-item]
    assert len(batch) == 0


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("offsets", [[-1, 0], [0, 4], [2, 1], [0, 1, -5], [0, 3, 2], [1, 0, 3], []])
def test_offsets_outside_the_data_are_refused(offsets: list[int], width: type) -> None:
    with pytest.raises(ValueError, match="offset"):
        TextColumn(np.array(offsets, width), b"abc", NOTHING, width=np.dtype(width).itemsize)


def test_offsets_whose_differences_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"offsets\[2\]"):
        TextColumn(np.array([0, 1, -(2**63)]), b"abc", NOTHING)
    with pytest.raises(ValueError, match=r"offsets\[1\]"):
        TextColumn(np.array([0, 3 * 2**61, -(2**63), -1, 3]), b"abc", NOTHING)  # each seems to ascend


@pytest.mark.parametrize("width", [4, 8])
def test_offsets_of_a_part_begin_where_it_does(width: int) -> None:
    offsets = np.array([9, 0, 1, 3, 3, 9], f"i{width}")  # those of another part lie outside the data
    part = TextColumn(offsets, b"abc", NOTHING, width=width, first=1, count=3)
    assert (len(part), part.count) == (3, 3)
    assert len(TextColumn(offsets[1:5], b"abc", NOTHING, width=width)) == 3
    assert len(TextColumn(offsets, b"abc", NOTHING, width=width, first=4, count=0)) == 0


@pytest.mark.parametrize(("first", "count"), [(0, 5), (-1, 1), (4, 1), (2**60, 0), (2**60, -1), (5, -1)])
def test_a_part_outside_the_offsets_is_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="offset"):
        TextColumn(np.zeros(5, np.int64), b"", NOTHING, first=first, count=count)


def test_offsets_have_4_or_8_bytes() -> None:
    with pytest.raises(ValueError, match="4 or 8"):
        TextColumn(np.zeros(5, np.int16), b"", NOTHING, width=2)


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_offsets_that_change_after_they_were_checked_are_those_that_were(width: type) -> None:
    offsets, data = np.array([0, 10, 20], width), PRINTED[:20]
    texts = TextColumn(offsets, data, NOTHING, width=offsets.itemsize)
    batch = loaded(put_batch(), 2, topic=column([b"T"]), body=texts, keys=texts, uniq_key=texts, tags=texts)
    offsets[1] = 5
    messages = [rmq.Message("T", half, keys=half.decode(), uniq_key=half.decode(), tags=half.decode())
                for half in (data[:10], data[10:])]  # fmt: skip
    assert encoded(batch, QueueTable()) == expected(messages)
