"""Queue units byte for byte, pulls and searches by time with RocketMQ's answers, queues whose start is gone."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest

import rmq
from rmq import pull
from rmq._core import _layout as L
from rmq._core._consumequeue import pack_units, pre_blank_units, unpack_batch_units, unpack_units, valid_units
from rmq._core._queuetable import QueueTable
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq.pull import tag_set

T0 = 1_700_000_000_000
UNIT = struct.Struct(">qiq")
BATCH_UNIT = struct.Struct(">qiqqqhii")
PRE_BLANK = "0000000000000000 7fffffff 0000000000000000"
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=512, mapped_file_size_consume_queue=80, max_hash_slot_num=10,
                         max_index_num=6)  # fmt: skip
DELAYS = np.array(rmq.StoreConfig().delay_levels_ms, np.int64)
SCHEDULE = "SCHEDULE_TOPIC_XXXX"


# ---- one unit --------------------------------------------------------------------------------------------

def test_units_are_unpacked_and_a_partial_one_is_ignored() -> None:
    units = [(0, 168, 2598919), (2**63 - 1, 2**31 - 1, -(2**63)), (-1, -5, -2147483648)]
    data = b"".join(UNIT.pack(*unit) for unit in units)
    for rest in (b"", data[:19]):
        columns = unpack_units(data + rest)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == units
        assert [column.dtype for column in columns] == [np.int64, np.int32, np.int64]
    assert [len(column) for column in unpack_units(b"")] == [0, 0, 0]


@pytest.mark.parametrize(("unit", "valid"), [
    ((0, 1, 0), True), ((0, 0, 0), False), ((-1, 1, 0), False), ((0, -1, 0), False), ((2**63 - 1, 2**31 - 1, -1), True),
    ((0, 0x7FFFFFFF, 0), True),
])  # fmt: skip
def test_a_unit_is_valid_with_an_offset_and_a_size(unit: tuple[int, int, int], valid: bool) -> None:
    good = UNIT.pack(5, 5, 5)
    assert valid_units(UNIT.pack(*unit)) == valid
    assert valid_units(good * 2 + UNIT.pack(*unit) + good) == (4 if valid else 2)
    assert valid_units(good * 2 + UNIT.pack(*unit)[:19]) == 2


def test_a_pre_blank_unit_has_rocketmq_s_bytes() -> None:
    assert pre_blank_units(1) == bytes.fromhex(PRE_BLANK)
    assert pre_blank_units(3) == bytes.fromhex(PRE_BLANK) * 3
    assert pre_blank_units(0) == b""


def test_a_batch_unit_has_rocketmq_s_fields() -> None:
    data = bytes.fromhex("0000000000000282 000000fd 0000000000000000 0000018bcfe56fd0 0000000000000000 0002"
                         "ffffffff 00000000")  # fmt: skip
    assert unpack_batch_units(data).tolist() == [[642, 253, 0, T0 + 2000, 0, 2]]
    assert len(unpack_batch_units(data + data[:45])) == 1


@pytest.mark.parametrize(("field", "value", "count"), [
    (0, -1, 1), (1, 0, 1), (1, -1, 1), (4, -1, 1), (5, 0, 1), (5, -1, 1), (0, 0, 3), (2, -1, 3), (3, -1, 3),
    (5, 32767, 3), (6, 0, 3), (7, 9, 3),
])  # fmt: skip
def test_batch_units_end_at_the_first_that_is_invalid(field: int, value: int, count: int) -> None:
    good = [642, 253, 0, T0, 0, 2, -1, 0]
    changed = [*good[:field], value, *good[field + 1 :]]
    found = unpack_batch_units(b"".join(BATCH_UNIT.pack(*unit) for unit in (good, changed, good)))
    assert len(found) == count
    assert found[0].tolist() == good[:6]


# ---- packing ---------------------------------------------------------------------------------------------

def scanned(records: list[dict[str, Any]], table: QueueTable | None = None) -> tuple[RecordBatch, QueueTable, bytes]:
    data = b""
    for fields in records:
        data += oracle.encode_record(**{"topic": "T", "queue_id": 0, "queue_offset": 0, "body": b""} | fields,
                                     phy_offset=len(data))  # fmt: skip
    batch, table = RecordBatch(), table or QueueTable()
    batch.scan(data, 0, 0, len(data), checks=PARSE_PROPERTIES, queues=table)
    assert len(batch) == len(records)
    return batch, table, data


@pytest.mark.parametrize("others", [0, 3, 0xFFFB, 0x10000])  # queues numbered before: up to 16 bits, and beyond
def test_units_are_grouped_by_queue_and_keep_the_log_s_order(others: int) -> None:
    queue_ids = random.Random(others).choices(range(8), k=500)
    records = [{"queue_id": queue_id, "queue_offset": queue_ids[:row].count(queue_id), "body": b"b" * row}
               for row, queue_id in enumerate(queue_ids)]  # fmt: skip
    table = QueueTable()
    for queue_id in range(others):
        table.add(b"Others", queue_id)
    batch, table, _ = scanned(records, table)
    units, runs = pack_units(batch, DELAYS)
    sizes = unpack_units(units)[1]
    assert runs[:, 0].tolist() == list(range(others, others + 8))
    for number, queue_offset, first, count in runs.tolist():
        topic, queue_id = table.queue(number)
        rows = [row for row, other in enumerate(queue_ids) if other == queue_id]
        assert (topic, queue_offset, count) == (b"T", 0, len(rows))
        assert (sizes[first : first + count] - min(sizes)).tolist() == rows


def delayed(level: str, topic: str = SCHEDULE, **fields: Any) -> dict[str, Any]:
    raw = f"TAGS\1TagA\2DELAY\1{level}\2".encode()
    return {"topic": topic, "raw_properties": raw, "store_timestamp": T0 + 5000, **fields}


@pytest.mark.parametrize(("level", "delay"), [
    ("1", 1000), ("2", 5000), ("3", 10_000), ("4", 30_000), ("5", 60_000), ("14", 600_000), ("17", 3_600_000),
    ("18", 7_200_000), ("19", 7_200_000), ("2147483647", 7_200_000), ("+3", 10_000), ("03", 10_000),
    ("00000000003", 10_000), ("0", None), ("-1", None), ("-2147483648", None),
])  # fmt: skip
def test_a_delayed_message_has_its_delivery_time_for_a_tags_code(level: str, delay: int | None) -> None:
    batch, _, data = scanned([delayed(level)])
    expected = 2598919 if delay is None else T0 + 5000 + delay
    assert unpack_units(pack_units(batch, DELAYS)[0].reshape(-1))[2].tolist() == [expected]
    record = oracle.decode_record(data)
    assert record is not None
    assert record.tags_code == expected


def test_delayed_messages_are_pulled_by_their_tags(tmp_path: Path) -> None:
    """Their units do not hold the hash of these."""
    with rmq.open(tmp_path / "s", "x") as store:
        for i, tags in enumerate(["TagA", "TagB", None, "TagA"]):
            store.put(rmq.Message(SCHEDULE, b"%d" % i, tags=tags, properties={"DELAY": "3"}, queue_id=2))
        pulled = store.pull(SCHEDULE, 2, tags="TagA || TagC")
        assert [message.body for message in pulled.messages] == [b"0", b"3"]
        assert store.pull(SCHEDULE, 2, tags="TagC").status is rmq.PullStatus.NO_MATCHED_MESSAGE


@pytest.mark.parametrize("level", ["x", "", "+", "-", " 3", "3 ", "1_0", "2147483648", "-2147483649",
                                   "9" * 30, "\u0663"])
def test_a_delay_with_which_rocketmq_could_not_read_the_log_is_refused(tmp_path: Path, level: str) -> None:
    """Its recovery would end the log there. An empty value is no property."""
    as_map = pa.array([[("DELAY", "3"), ("DELAY", level)]], pa.map_(pa.string(), pa.string()))
    tables = [pa.table({"topic": [SCHEDULE], "body": [b""], **more}) for more in (
        {"properties": as_map}, {"raw_properties": [f"DELAY\1{level}\2".encode()]})]  # fmt: skip
    rmq.Message("T", b"", properties={"DELAY": level})
    if not level:
        rmq.Message(SCHEDULE, b"", properties={"DELAY": level})
        return
    with pytest.raises(rmq.IllegalMessageError, match="DELAY"):
        rmq.Message(SCHEDULE, b"", properties={"DELAY": level})
    with rmq.open(tmp_path / "s", "x") as store:
        for table in tables:
            with pytest.raises(rmq.IllegalMessageError, match="DELAY"):
                store.put_many(table)
        assert store.max_phy_offset == 0


def test_only_messages_of_the_schedule_topic_are_delayed() -> None:
    for topic in ("T", SCHEDULE + "X", SCHEDULE[:-1], SCHEDULE.lower()):
        batch, _, _ = scanned([delayed("3", topic)])
        assert unpack_units(pack_units(batch, DELAYS)[0].reshape(-1))[2].tolist() == [2598919]


@pytest.mark.parametrize(("tags", "code"), [
    ("TagA", 2598919), ("TagB", 2598920), ("\u6807\u7b7e", 857175), ("A || B", 1894261793), ("\U0001f600", 1772899),
    ("*", 42), ("polygenelubricants", -2147483648),
])  # fmt: skip
def test_a_tags_code_is_the_hash_of_the_tags_sign_extended(tags: str, code: int) -> None:
    batch, _, _ = scanned([{"raw_properties": f"TAGS\1{tags}\2".encode()}, {}, {"raw_properties": b"TAGS\1\2"}])
    units, _ = pack_units(batch, DELAYS)
    assert unpack_units(units.reshape(-1))[2].tolist() == [code, 0, 0]
    assert units.tobytes()[12:20] == struct.pack(">q", code)


def test_units_of_a_batch_are_the_oracle_s_queue_by_queue() -> None:
    """Of any mix of queues, transactions and gaps, taken from any place on."""
    for seed in range(150):
        rng = random.Random(seed)
        following: dict[tuple[str, int], int] = {}
        records = []
        for _ in range(rng.randrange(40)):
            key = rng.choice(["T", "U", SCHEDULE]), rng.randrange(3)
            kind = rng.choice([0, 0, 0, 8, 4, 12])
            offset = 0 if kind in (4, 12) else following.get(key, 5)
            if kind in (0, 8):
                following[key] = offset + rng.choice([1, 1, 1, 1, 3])
            records.append(delayed(str(rng.randrange(20)), key[0], queue_id=key[1], queue_offset=offset, sys_flag=kind,
                                   body=bytes(rng.randrange(9))))  # fmt: skip
        batch, table, data = scanned(records)
        begin = rng.choice([0, rng.randrange(len(data) + 1)])
        units, runs = pack_units(batch, DELAYS, begin)
        offsets, sizes, codes = unpack_units(units.reshape(-1))
        found: dict[tuple[str, int], list[oracle.Unit]] = {}
        used = 0
        for queue, first, start, count in runs.tolist():
            topic, queue_id = table.queue(queue)
            for n in range(count):
                place = start + n
                unit = oracle.Unit(first + n, int(offsets[place]), int(sizes[place]), int(codes[place]))
                found.setdefault((topic.decode(), queue_id), []).append(unit)
            used += count
        assert used == len(offsets)
        expected, at = [], 0
        while at < len(data):
            record = oracle.decode_record(data, at)
            assert record is not None
            expected += [record] * (at >= begin)
            at += record.size
        assert found == oracle.expected_units(expected), seed


def test_inner_batches_and_rows_without_queues_get_no_units() -> None:
    batch, _, _ = scanned([{"sys_flag": 0xC0}, {"queue_offset": 1}])
    assert unpack_units(pack_units(batch, DELAYS)[0].reshape(-1))[0].tolist() == [91 + 1]
    data = oracle.encode_record("T", 0, 0, 0, b"")
    batch.scan(data, 0, 0, len(data), checks=PARSE_PROPERTIES)
    with pytest.raises(ValueError, match="queue numbers"):
        pack_units(batch, DELAYS)


# ---- reads of a queue ------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["r", "r+"])
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rmq.Store]:
    """9 messages of 108 bytes at T0 + 1000 * (i // 2): 4 units per queue segment, 4 records per log segment."""
    times = iter([T0 + 1000 * (number // 2) for number in range(9)])
    path = tmp_path_factory.mktemp("queue") / "store"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for number in range(9):
            assert store.put(rmq.Message("T", b"12345678", keys=f"k{number}")).size == 108
    with rmq.open(path, request.param) as store:
        yield store


@pytest.mark.parametrize(("offset", "limit", "status", "found", "following"), [
    (-1, 32, "OFFSET_TOO_SMALL", [], 0), (0, 32, "FOUND", range(9), 9), (0, 4, "FOUND", range(4), 4),
    (3, 1, "FOUND", [3], 4), (3, 2, "FOUND", [3, 4], 5), (4, 32, "FOUND", range(4, 9), 9), (8, 32, "FOUND", [8], 9),
    (9, 32, "OFFSET_OVERFLOW_ONE", [], 9), (10, 32, "OFFSET_OVERFLOW_BADLY", [], 9),
    (2**63 - 1, 32, "OFFSET_OVERFLOW_BADLY", [], 9), (-(2**63), 32, "OFFSET_TOO_SMALL", [], 0),
])  # fmt: skip
def test_a_pull_has_rocketmq_s_status_and_does_not_stop_at_segment_ends(
    queue: rmq.Store, offset: int, limit: int, status: str, found: Any, following: int
) -> None:
    answer = queue.pull("T", 0, offset, limit)
    assert (answer.status.name, answer.next_queue_offset) == (status, following)
    assert (answer.min_queue_offset, answer.max_queue_offset) == (0, 9)
    assert [message.queue_offset for message in answer.messages] == list(found)
    assert [message.keys for message in answer.messages] == [(f"k{number}",) for number in found]


@pytest.mark.parametrize("place", [("none", 0), ("T", 1), ("T", 2**31 - 1), ("T", -1)])
def test_an_unknown_queue_has_no_message(queue: rmq.Store, place: tuple[str, int]) -> None:
    answer = queue.pull(*place, 5)
    assert (answer.status.name, answer.next_queue_offset, answer.messages) == ("NO_MESSAGE_IN_QUEUE", 0, [])
    assert queue.search_offset(*place, T0) == queue.search_offset(*place, T0, "UPPER") == 0


@pytest.mark.parametrize(("time", "lower", "upper"), [
    (-1, 0, 0), (0, 0, 1), (1, 2, 1), (500, 2, 1), (1000, 2, 3), (1001, 4, 3), (2000, 4, 5), (3000, 6, 7),
    (3999, 8, 7), (4000, 8, 8), (4001, 9, 8), (-T0, 0, 0), (2**62, 9, 8),
])  # fmt: skip
def test_a_search_by_time_has_rocketmq_s_answers(queue: rmq.Store, time: int, lower: int, upper: int) -> None:
    assert queue.search_offset("T", 0, T0 + time) == queue.search_offset("T", 0, T0 + time, "LOWER") == lower
    assert queue.search_offset("T", 0, T0 + time, "UPPER") == upper


def test_tags_that_match_nothing_are_looked_for_to_the_end(queue: rmq.Store) -> None:
    answer = queue.pull("T", 0, 2, 3, tags="TagA")
    assert (answer.status.name, answer.next_queue_offset, answer.messages) == ("NO_MATCHED_MESSAGE", 9, [])
    assert len(queue.pull("T", 0, 2, 3, tags=" * ").messages) == 3


@pytest.mark.parametrize(("text", "tags"), [
    (None, None), ("*", None), (" * ", None), ("", None), ("A", {"A"}), ("A || B", {"A", "B"}), ("A||B||", {"A", "B"}),
    (" A  ", {"A"}), ("||", None), ("A | B", {"A | B"}), ("A\u00a0 ||\u3000B", {"A\u00a0", "\u3000B"}),
])  # fmt: skip
def test_a_subscription_is_split_at_double_bars(text: str | None, tags: set[str] | None) -> None:
    assert tag_set(text) == tags


def test_an_ext_address_is_below_every_tags_code_of_a_tag() -> None:
    assert L.UNIT_TAGS_HASH_MIN == -2_147_483_648 == rmq.java_hash("polygenelubricants")


# ---- queues whose start is gone --------------------------------------------------------------------------

@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """8 records of 140 bytes, 3 per log segment; the first segment and the queues are removed."""
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: T0) as store:
        places = [store.put(rmq.Message("T", bytes(48))) for _ in range(8)]
        assert [place.phy_offset for place in places] == [0, 140, 280, 512, 652, 792, 1024, 1164]
    (path / "commitlog" / f"{0:020d}").unlink()
    shutil.rmtree(path / "consumequeue")
    return path


@pytest.mark.parametrize("own", [True, False], ids=["with our directory", "without it"])
def test_a_queue_that_starts_behind_0_is_filled_in_front(headless: Path, own: bool) -> None:
    if not own:
        shutil.rmtree(headless / "rmq")
    with rmq.open(headless, "r+", config=CONFIG, clock=lambda: T0) as store:
        assert store.topics() == {"T": {0: (3, 8)}}
        assert store.min_phy_offset == 512
    first, second = ((headless / "consumequeue" / "T" / "0" / f"{start:020d}").read_bytes() for start in (0, 80))
    assert first.hex() == bytes.fromhex(PRE_BLANK).hex() * 3 + UNIT.pack(512, 140, 0).hex()
    assert second == b"".join(UNIT.pack(phy, 140, 0) for phy in (652, 792, 1024, 1164))
    for mode in ("r", "r+"):
        with rmq.open(headless, mode) as store:
            assert store.topics() == {"T": {0: (3, 8)}}
            answers = [store.pull("T", 0, offset, 2) for offset in (0, 2, 3)]
            assert [answer.status.name for answer in answers] == ["OFFSET_TOO_SMALL", "OFFSET_TOO_SMALL", "FOUND"]
            assert [answer.next_queue_offset for answer in answers] == [3, 3, 5]
            assert [message.phy_offset for message in answers[2].messages] == [512, 652]
            assert store.search_offset("T", 0, 0) == store.search_offset("T", 0, 0, "UPPER") == 3


def test_a_reader_needs_no_queue_files(headless: Path) -> None:
    with rmq.open(headless) as store:
        assert store.topics() == {"T": {0: (3, 8)}}
        assert [message.phy_offset for message in store.pull("T", 0, 3).messages] == [512, 652, 792, 1024, 1164]
    assert not (headless / "consumequeue").exists()


def test_puts_go_on_behind_a_queue_without_its_start(headless: Path) -> None:
    with rmq.open(headless, "r+", clock=lambda: T0) as store:
        assert store.put(rmq.Message("T", b"")).queue_offset == 8
        assert store.pull("T", 0, 8).messages[0].body == b""
        assert store.topics() == {"T": {0: (3, 9)}}


def test_units_of_records_that_are_gone_are_below_the_minimum(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: T0) as store:
        store.put_many([rmq.Message("T", bytes(48), queue_id=number % 2) for number in range(8)])
    (path / "commitlog" / f"{0:020d}").unlink()
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            assert store.topics() == {"T": {0: (2, 4), 1: (1, 4)}}
            assert store.pull("T", 1, 0).status is rmq.PullStatus.OFFSET_TOO_SMALL
            assert [message.phy_offset for message in store.pull("T", 1, 1).messages] == [512, 792, 1164]


def pre_blanked(path: Path, count: int) -> None:
    """A store of "U", then "T" of tags BB, whose first units are pre-blank, as after a cleaning."""
    with rmq.open(path, "x") as store:
        store.put(rmq.Message("U", b"u"))
        store.put_many([rmq.Message("T", b"t", tags="BB")] * 4)
    with (path / f"consumequeue/T/0/{0:020d}").open("r+b") as file:
        file.write(pre_blank_units(count))


def test_units_of_removed_messages_are_told_whatever_the_tags_hash_says(tmp_path: Path) -> None:
    """"Aa" and "BB" have one hash: a message was looked at, and is not asked for."""
    pre_blanked(tmp_path / "s", 2)
    with rmq.open(tmp_path / "s") as store:
        low = store.topics()["T"][0][0]
        assert low == 2
        bounds = low, 4
        queue = store._queues.queues["T", 0]
        answer = pull.pull_units(store._log, queue, (0, 4), store.max_phy_offset, 0, 9, {"Aa"})
        assert (answer.status.name, answer.next_queue_offset) == ("MESSAGE_WAS_REMOVING", 4)
        answer = pull.pull_units(store._log, queue, bounds, store.max_phy_offset, 2, 9, {"Aa"})
        assert answer.status.name == "NO_MATCHED_MESSAGE"


def test_a_pre_blank_unit_points_to_no_record_not_even_a_damaged_one(tmp_path: Path) -> None:
    """Its phy offset is 0, where the log's first record lies."""
    pre_blanked(tmp_path / "s", 2)
    with (tmp_path / f"s/commitlog/{0:020d}").open("r+b") as file:
        file.seek(88)
        file.write(b"x")  # the body of "U"
    with rmq.open(tmp_path / "s") as store:
        queue = store._queues.queues["T", 0]
        answer = pull.pull_units(store._log, queue, (0, 4), store.max_phy_offset, 0, 9, None)
        assert [message.queue_offset for message in answer.messages] == [2, 3]
