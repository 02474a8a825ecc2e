"""Bytes that may hold no record: why a scan stops, where it goes on, and damage judged like the oracle.

H.1 is RocketMQ's own check (CommitLog#checkMessageAndReturnSize), which `oracle.decode_record` follows. The library is
stricter in two rules: a record must state its own physical offset, and a blank must end where its segment ends. It is
laxer in two: a one-byte topic length of 128 to 255 is read unsigned, and a DELAY, INNER_NUM or INNER_BASE that is no
number does not make the record unreadable. Each rule has its own test below.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import oracle
import pytest

from rmq._core import _record
from rmq._core._consumequeue import pack_units
from rmq._core._javahash import hash_str_keys
from rmq._core._queuetable import QueueTable
from rmq._core._record import (
    CHECK_BODY_CRC,
    CHECK_RECORD_CRC,
    CHECK_SECTORS,
    LEGACY_PROPERTIES,
    PARSE_PROPERTIES,
    parse_properties,
    resync,
    used_size,
)
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import StoredFields, stored, stored_at

SEEDS = 2500
BASE = 4096  # phy offset of the segment
ALL_CHECKS = CHECK_BODY_CRC | CHECK_RECORD_CRC | CHECK_SECTORS | PARSE_PROPERTIES
BLANK = struct.Struct(">iI")
DELAYS = np.array([1000, 5000], np.int64)
STOPS = {getattr(_record, name): name.removeprefix("SCAN_") for name in dir(_record)
         if name.startswith("SCAN_") and name != "SCAN_REASONS"}  # fmt: skip


def blank(size: int) -> bytes:
    return BLANK.pack(size, 0xCBD43194).ljust(size, b"\0")


def record(phy: int = BASE, body: bytes = b"body", raw_properties: bytes = b"", **fields: Any) -> bytes:
    place = {"topic": "T", "queue_id": 0, "queue_offset": 0} | fields
    return oracle.encode_record(phy_offset=phy, body=body, raw_properties=raw_properties, **place)


def with_record_crc(phy: int = BASE, properties: bytes = b"A\1b\2") -> bytes:
    data = record(phy, raw_properties=properties + b"__CRC32#\1" + bytes(10) + b"\2")
    digits = f"{oracle.body_crc(data[:-20]):010d}"[::-1].encode()
    return data[:-11] + digits + b"\2"


def scan(data: bytes, checks: int = CHECK_BODY_CRC, *, end: int | None = None, capacity: int = 100,
         **options: Any) -> tuple[RecordBatch, str]:  # fmt: skip
    batch = RecordBatch(capacity)
    stop = batch.scan(data, BASE, BASE, BASE + len(data) if end is None else end, checks=checks, **options)
    assert stop == batch.stop
    return batch, STOPS[stop]


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# ---- why a scan stops ------------------------------------------------------------------------------------

ONE = record()
TWO = ONE + record(BASE + len(ONE))
PROPERTIES_AT = len(ONE) - 2  # of a record without properties: its length field
LONG = record(body=b"x" * 100, raw_properties=b"KEYS\1" + b"k" * 2000 + b"\2")

STOPPING = [
    ("LIMIT", TWO, 2),
    ("BLANK", TWO + blank(8), 2),
    ("BLANK", ONE + blank(300), 1),
    ("BLANK", blank(8), 0),
    ("ZERO", ONE + bytes(8), 1),
    ("ZERO", ONE + bytes(4000), 1),
    ("TRUNCATED", ONE + bytes(7), 1),
    ("TRUNCATED", ONE + ONE[:7], 1),
    ("BAD_SIZE", TWO[:-1], 1),
    ("BAD_SIZE", ONE + ONE[:8], 1),
    ("BAD_SIZE", patched(ONE, 0, struct.pack(">i", 90)), 0),
    ("BAD_SIZE", patched(ONE, 0, struct.pack(">i", -1)), 0),
    ("BAD_SIZE", patched(ONE, 0, bytes(4)), 0),
    ("BAD_MAGIC", patched(ONE, 7, b"\xa8"), 0),
    ("BAD_MAGIC", patched(ONE, 4, bytes(4)), 0),
    ("BAD_PHY_OFFSET", ONE + ONE, 1),
    ("BAD_LENGTHS", patched(ONE, 84, struct.pack(">i", 3)), 0),
    ("BAD_LENGTHS", patched(ONE, 84, struct.pack(">i", -1)), 0),
    ("BAD_LENGTHS", patched(ONE, 84, struct.pack(">i", 2**31 - 1)), 0),
    ("BAD_LENGTHS", patched(ONE, 92, b"\2"), 0),
    ("BAD_LENGTHS", patched(ONE, PROPERTIES_AT, b"\0\1"), 0),
    ("BAD_LENGTHS", patched(ONE, 36, struct.pack(">i", 0x30)), 0),
    ("BAD_LENGTHS", record(raw_properties=b"x" * 32767).replace(b"\x7f\xff" + b"x" * 32767,
                                                               b"\x80\x00" + b"x" * 32767), 0),
    ("BAD_BODY_CRC", patched(ONE, 88, b"B"), 0),
]  # fmt: skip


@pytest.mark.parametrize(("stop", "data", "count"), STOPPING, ids=lambda value: value if isinstance(value, str) else "")
def test_a_scan_says_why_it_stops_and_keeps_what_came_before(stop: str, data: bytes, count: int) -> None:
    batch, found = scan(data)
    assert (found, len(batch)) == (stop, count)
    assert batch.next_phy_offset == BASE + sum(batch.numbers("size"))
    code = next(code for code, name in STOPS.items() if name == stop)
    assert (code in _record.SCAN_REASONS) == (stop not in ("FULL", "LIMIT", "BLANK"))


def test_an_end_inside_a_record_truncates_it() -> None:
    for end in range(1, len(ONE)):
        assert scan(TWO, end=BASE + end)[1] == "TRUNCATED"
        batch, stop = scan(TWO, end=BASE + len(ONE) + end)
        assert (stop, len(batch)) == ("TRUNCATED", 1)
    assert scan(TWO, end=BASE + len(ONE))[1] == "LIMIT"
    assert scan(TWO, end=BASE)[1] == "LIMIT"


def test_a_scan_is_full_at_its_capacity_or_at_its_byte_limit_and_goes_on_there() -> None:
    for options in ({"capacity": 1}, {"byte_limit": 1}, {"byte_limit": len(ONE)}):
        batch, stop = scan(TWO, **options)
        assert (stop, len(batch), batch.next_phy_offset) == ("FULL", 1, BASE + len(ONE))
        batch.scan(TWO, BASE, batch.next_phy_offset, BASE + len(TWO))
        assert (len(batch), batch.next_phy_offset) == (1, BASE + len(TWO))
    assert len(scan(TWO, byte_limit=len(ONE) + 1)[0]) == 2


@pytest.mark.parametrize(("begin", "end"), [(BASE - 1, BASE), (BASE, BASE - 1), (BASE, BASE + len(TWO) + 1),
                                            (BASE + 5, BASE + 4), (0, 2**63 - 1), (-(2**63), 0)])  # fmt: skip
def test_a_range_outside_the_segment_is_refused(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="outside the segment"):
        RecordBatch().scan(TWO, BASE, begin, end)
    with pytest.raises(ValueError, match="outside the segment"):
        resync(TWO, BASE, begin, end)


def test_checks_that_are_not_asked_for_are_not_made() -> None:
    assert scan(patched(ONE, 88, b"B"), 0)[1] == "LIMIT"
    assert scan(patched(with_record_crc(), 16, b"x"), CHECK_BODY_CRC)[1] == "LIMIT"


def test_the_crc_of_an_empty_body_is_not_compared() -> None:
    assert scan(patched(record(body=b""), 8, b"wxyz"))[1] == "LIMIT"


def test_the_record_crc_notices_every_bit_but_those_that_make_it_a_crc() -> None:
    """Without the property's name there is no CRC to compare, and its last 0x02 is in no sum."""
    whole = with_record_crc()
    assert scan(whole, ALL_CHECKS)[1] == "LIMIT"
    unseen = {*range(len(whole) - 20, len(whole) - 11), len(whole) - 1}
    for at in range(len(whole)):
        for bit in range(8):
            stop = scan(patched(whole, at, bytes([whole[at] ^ 1 << bit])), CHECK_RECORD_CRC)[1]
            assert (stop == "LIMIT") == (at in unseen), (at, bit, stop)


def test_a_zeroed_sector_of_topic_or_properties_is_noticed() -> None:
    assert scan(LONG, ALL_CHECKS)[1] == "LIMIT"
    for sector in (512, 1024, 1536):
        lost = patched(LONG, sector, bytes(512))
        assert scan(lost, CHECK_SECTORS)[1] == "LOST_SECTOR"
        assert scan(lost)[1] == "LIMIT"
        assert scan(patched(LONG, sector, bytes(511)), CHECK_SECTORS)[1] == "LIMIT"
    assert scan(patched(LONG, 2048, bytes(len(LONG) - 2048)), CHECK_SECTORS)[1] == "LOST_SECTOR"


def test_a_zeroed_sector_of_the_body_is_for_the_body_crc() -> None:
    data = patched(record(body=b"x" * 2000), 512, bytes(512))
    assert scan(data, CHECK_SECTORS)[1] == "LIMIT"
    assert scan(data)[1] == "BAD_BODY_CRC"


def test_rows_get_the_number_of_their_queue() -> None:
    table, data = QueueTable(), b""
    for topic, queue_id in [("T", 0), ("T", 1), ("U", 0), ("T", 0), ("U", 0)]:
        data += record(BASE + len(data), topic=topic, queue_id=queue_id)
    batch, _ = scan(data, queues=table)
    assert batch.numbers("queue").tolist() == [0, 1, 2, 0, 2]
    assert [table.queue(number) for number in range(len(table))] == [(b"T", 0), (b"T", 1), (b"U", 0)]
    assert (table.find(b"T", 1), table.find(b"T", 2), table.find(b"", 0)) == (1, -1, -1)


# ---- damage ----------------------------------------------------------------------------------------------

def mixed() -> bytes:
    """V1 and V2 records, hosts of both families, empty and full bodies, then a blank."""
    pieces = [
        {"body": b"hello", "raw_properties": b"KEYS\1k1 k2\2UNIQ_KEY\1u1\2TAGS\1TagA\2"},
        {"body": b"", "queue_id": 3, "flag": -7, "reconsume_times": 2, "store_timestamp": 1_700_000_000_000},
        {"body": b"v2" * 30, "topic": "%RETRY%" + "T" * 130, "raw_properties": b"A\1b"},
        {"body": b"v6", "born_host": "[2001:db8::1]:1", "store_host": "[::1]:10911", "raw_properties": b"A\1b\2"},
        {"body": b"4 and 6", "store_host": "[::1]:10911", "topic": "caf\u00e9", "sys_flag": 8},
        {"body": bytes(200), "born_host": "[::2]:9", "prepared_transaction_offset": 77, "sys_flag": 12},
    ]  # fmt: skip
    data = b""
    for number, piece in enumerate(pieces):
        data += record(BASE + len(data), queue_offset=number, **piece)
    return data + blank(100)


def judge(data: bytes) -> tuple[list[oracle.Record], str]:
    """Records up to the first place that holds none by H.1 and by the two rules in which the library is stricter."""
    records: list[oracle.Record] = []
    at = 0
    while at < len(data):
        try:
            found = oracle.decode_record(data, at)
        except ValueError:
            return records, "none"
        if found is None:
            return records, "BLANK" if BLANK.unpack_from(data, at)[0] == len(data) - at else "none"
        if found.phy_offset != BASE + at:
            return records, "none"
        records.append(found)
        at += found.size
    return records, "LIMIT"


def fields_of(found: oracle.Record) -> tuple[Any, ...]:
    """As StoredFields.as_tuple has them."""
    return (found.topic, found.queue_id, found.queue_offset, found.phy_offset, found.size, found.flag, found.sys_flag,
            found.born_timestamp, oracle.encode_host(found.born_host), found.store_timestamp,
            oracle.encode_host(found.store_host), found.reconsume_times, found.prepared_transaction_offset,
            found.body_crc, found.body, found.raw_properties)  # fmt: skip


def test_damaged_records_are_judged_like_the_oracle() -> None:
    whole, stops = mixed(), set()
    for seed in range(-1, SEEDS):
        data = whole if seed < 0 else oracle.damage(whole, seed)
        batch, stop = scan(data, CHECK_BODY_CRC | PARSE_PROPERTIES)
        records, expected = judge(data)
        assert stop == expected or (expected == "none" and stop not in ("FULL", "LIMIT", "BLANK")), (seed, stop)
        expected_fields = [fields_of(found) for found in records]
        assert [made.as_tuple() for made in stored(batch, StoredFields)] == expected_fields, seed
        for row, found in enumerate(records):
            assert parse_properties(stored_at(batch, row, StoredFields).raw_properties) == found.properties, seed
        stops.add(stop)
    assert stops >= {"BLANK", "LIMIT", "ZERO", "TRUNCATED", "BAD_SIZE", "BAD_MAGIC", "BAD_PHY_OFFSET", "BAD_LENGTHS",
                     "BAD_BODY_CRC"}  # fmt: skip


def test_stricter_than_h1_a_record_must_state_its_own_place() -> None:
    moved = record(BASE + 1)
    assert oracle.decode_record(moved) is not None
    assert scan(moved)[1] == "BAD_PHY_OFFSET"


@pytest.mark.parametrize("size", [8, 99, 101, 0, -1])
def test_stricter_than_h1_a_blank_must_end_with_its_segment(size: int) -> None:
    data = ONE + patched(blank(100), 0, struct.pack(">i", size))
    assert scan(data)[1] == "BAD_SIZE"
    if 0 < size <= 100:
        assert oracle.decode_record(data, len(ONE)) is None


def test_laxer_than_h1_a_topic_of_128_to_255_bytes_may_have_a_one_byte_length() -> None:
    """RocketMQ writes such records (127 characters, more bytes) and cannot read them back."""
    topic = "\u4e3b" * 50
    data = oracle.encode_record("T" * 150, 0, 0, BASE, b"b", magic=oracle.MAGIC_V2)
    size = struct.pack(">i", len(data) - 1)
    data = size + struct.pack(">I", oracle.MAGIC_V1) + data[8:89] + b"\x96" + topic.encode() + data[91 + 150 :]
    with pytest.raises(ValueError, match="negative"):
        oracle.decode_record(data)
    batch, stop = scan(data)
    assert (stop, stored_at(batch, 0, StoredFields).topic) == ("LIMIT", topic)


@pytest.mark.parametrize("properties", [b"TAGS\1TagA\2DELAY\1x\2", b"TAGS\1TagA\2DELAY\1\xff\2",
                                        b"TAGS\1TagA\2INNER_NUM\1x\2INNER_BASE\0012\2"])  # fmt: skip
def test_laxer_than_h1_a_number_that_is_none_leaves_the_record_readable(properties: bytes) -> None:
    data = record(topic="SCHEDULE_TOPIC_XXXX", raw_properties=properties)
    with pytest.raises(ValueError, match="number"):
        oracle.decode_record(data)
    batch, stop = scan(data, ALL_CHECKS, queues=QueueTable())
    assert stop == "LIMIT"
    assert pack_units(batch, DELAYS)[0].tobytes()[12:] == (2598919).to_bytes(8, "big")


# ---- going on behind damage ------------------------------------------------------------------------------

def test_resync_finds_the_next_whole_record_as_a_search_of_every_byte_does() -> None:
    whole = mixed()
    for seed in range(300):
        data = oracle.damage(oracle.damage(whole, seed), seed + 1)
        rng = random.Random(seed)
        begin = rng.randrange(len(data) + 1)
        end = rng.choice([len(data), rng.randrange(begin, len(data) + 1)])
        expected = -1
        for at in range(begin, end):
            try:
                found = oracle.decode_record(data[:end], at)
            except ValueError:
                continue
            if found is not None and found.phy_offset == BASE + at:
                expected = BASE + at
                break
        assert resync(data, BASE, BASE + begin, BASE + end) == expected, seed


def test_resync_of_nothing_finds_nothing() -> None:
    assert resync(b"", BASE, BASE, BASE) == -1
    assert resync(TWO, BASE, BASE + len(TWO), BASE + len(TWO)) == -1
    assert resync(TWO, BASE, BASE, BASE + len(ONE)) == BASE
    assert resync(TWO, BASE, BASE, BASE + len(ONE) - 1) == -1
    assert resync(TWO, BASE, BASE + 1, BASE + len(TWO)) == BASE + len(ONE)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_used_size_ends_behind_the_last_byte_that_is_not_zero(size: int) -> None:
    for last in range(size):
        data = bytes(last) + b"x" + bytes(size - last - 1)
        for begin in (0, last, last + 1, size):
            assert used_size(data, begin) == (last + 1 if begin <= last else begin)
    assert used_size(bytes(size), 0) == 0


# ---- any bytes -------------------------------------------------------------------------------------------

def use(data: bytes, checks: int) -> None:
    """Ask everything of a scan."""
    table = QueueTable()
    batch, _ = scan(data, checks, queues=table)
    for row in range(len(batch)):
        fields = stored_at(batch, row, StoredFields).as_tuple()
        assert fields[3] + fields[4] <= BASE + len(data)
        parse_properties(fields[15])
    batch.has_keys()
    batch.has_inner_batches()
    assert batch.match(b"T", ["k"], np.zeros(len(batch), np.int64)).shape == (len(batch),)
    assert batch.find_keys({(b"T", b"k"), (None, b"k1")}, np.unique(hash_str_keys(["k", "k1"]))) is not None
    batch.ambiguous()
    pack_units(batch, DELAYS)
    resync(data, BASE, BASE, BASE + len(data))


def test_random_bytes_never_crash() -> None:
    rng = random.Random(3)
    for _ in range(500):
        use(rng.randbytes(rng.randrange(300)), ALL_CHECKS)
    head = ONE[:36]
    for seed in range(2000):
        rng = random.Random(seed)
        size = rng.randrange(91, 400)
        front = struct.pack(">iI", size, rng.choice([oracle.MAGIC_V1, oracle.MAGIC_V2])) + head[8:]
        body = rng.choices([0, 0, 0, 0, 1, 2, 5, 0x7F, 0x80, 0xFF], k=size - 36)
        checks = rng.choice([0, LEGACY_PROPERTIES | PARSE_PROPERTIES, ALL_CHECKS])
        use(front + bytes(body) + rng.randbytes(rng.randrange(100)), checks)


def test_damaged_records_never_crash_without_a_crc_check() -> None:
    whole = mixed() + with_record_crc(BASE + len(mixed()))
    for seed in range(1000):
        use(oracle.damage(whole, seed), random.Random(seed).choice([0, 6, 14, 24, 30]))


def test_rows_outside_a_batch_are_refused() -> None:
    batch, _ = scan(TWO)
    for row in (-1, 2, 2**31 - 1):
        with pytest.raises(IndexError):
            stored_at(batch, row, StoredFields)
    batch.release()
    assert len(batch) == 0
    with pytest.raises(ValueError, match="capacity"):
        RecordBatch(0)


def nested(count: int) -> bytes:
    """Headers one behind the other, whose bodies all reach to one end."""
    head, tail = struct.Struct(">iIiiiqqiq8sq8siqi"), b"\1T\0\0"
    end = head.size * count + 1
    heads = [head.pack(end + len(tail) - at, oracle.MAGIC_V1, 12345, 0, 0, 0, BASE + at, 0, 1, bytes(8), 1, bytes(8), 0,
                       0, end - at - head.size) for at in range(0, end - 1, head.size)]  # fmt: skip
    return b"".join(heads) + b"x" + tail


@pytest.mark.parametrize(("count", "is_found"), [(20, True), (4000, False)])
def test_a_search_that_reads_the_same_bodies_again_and_again_ends(count: int, is_found: bool) -> None:
    data = nested(count)
    place = BASE + len(data)
    data += record(place)
    assert resync(data, BASE, BASE, BASE + len(data)) == (place if is_found else -1)
