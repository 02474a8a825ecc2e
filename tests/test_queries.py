# SPDX-License-Identifier: Apache-2.0
"""Queries by one key: what a record that shares only the key's hash may do."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rmq
import rmq.query
from rmq._core import _layout as L
from rmq._core._record import CHECK_BODY_CRC, PARSE_PROPERTIES, SCAN_BAD_BODY_CRC
from rmq._core._recordbatch import RecordBatch
from rmq.lookup import table_of

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=1000)
KEY, TWIN = "Aa", "BB"  # of one Java hash, also behind "T#"
LOG = f"commitlog/{0:020d}"


def fill(path: Path, keys: list[str]) -> list[int]:
    """A store with one message for each key, closed; the phy offset of each."""
    with rmq.open(path, "x", config=CONFIG) as store:
        return [store.put(rmq.Message("T", b"body of %d" % n, keys=[key])).phy_offset for n, key in enumerate(keys)]


def damage_body(path: Path, phy_offset: int) -> None:
    with (path / LOG).open("r+b") as file:
        file.seek(phy_offset + L.RECORD_BODY_OFFSET)
        file.write(b"X")


def bodies(found: list[rmq.StoredMessage]) -> list[bytes]:
    return [message.body for message in found]


def test_a_damaged_record_that_shares_only_the_hash_of_a_key_is_of_no_account(tmp_path: Path) -> None:
    places = fill(tmp_path / "store", [KEY, TWIN, KEY])
    damage_body(tmp_path / "store", places[1])
    with rmq.open(tmp_path / "store") as store:
        assert bodies(store.query("T", KEY)) == [b"body of 2", b"body of 0"]
        with pytest.raises(rmq.CorruptFileError, match="body CRC differs") as caught:
            store.query("T", TWIN)
        assert caught.value.offset == places[1]


def test_a_message_is_found_by_its_id_without_the_others_that_carry_it(tmp_path: Path) -> None:
    """Newer ones that have it as a key are read one by one, older ones, here a damaged one, not at all."""
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        first, wanted = (store.put(rmq.Message("T", b"body", uniq_key=KEY)).phy_offset for _ in range(2))
        store.put_many([rmq.Message("T", bytes(10_000), keys=[KEY]) for _ in range(50)])
    damage_body(tmp_path / "store", first)
    with rmq.open(tmp_path / "store") as store:
        tracemalloc.start()
        try:
            assert store.lookup(KEY).phy_offset == wanted
            assert tracemalloc.get_traced_memory()[1] < 10 * 10_000
        finally:
            tracemalloc.stop()


def test_a_damaged_match_behind_the_limit_is_counted_and_not_read(tmp_path: Path) -> None:
    places = fill(tmp_path / "store", [KEY, KEY, KEY])
    damage_body(tmp_path / "store", places[0])
    with rmq.open(tmp_path / "store") as store:
        found = store.query("T", KEY, limit=2)
        assert (bodies(found), found.truncated) == ([b"body of 2", b"body of 1"], True)
        assert not store.query("T", KEY, limit=2, begin=found[0].store_timestamp + 1)
        with pytest.raises(rmq.CorruptFileError, match="body CRC differs"):
            store.query("T", KEY, limit=3)


@pytest.mark.parametrize("limit", [1, 2, 69, 70, 71, None, np.int8(127), np.uint8(255), np.int32(2**31 - 1),
                                   np.int64(2**63 - 1), 2**100])  # fmt: skip
def test_query_and_query_many_give_the_same(tmp_path: Path, limit: int | None) -> None:
    fill(tmp_path / "store", [KEY, TWIN] * 70)
    with rmq.open(tmp_path / "store") as store:
        one, many = store.query("T", KEY, limit=limit), store.query_many("T", [KEY], limit=limit)
        assert bodies(one) == many.table["body"].to_pylist() == [b"body of %d" % n for n in range(138, -1, -2)][:limit]
        assert one.truncated == many.truncated == (limit is not None and limit < 70)


ONLY, MORE = ["phy_offset"], ["phy_offset", "body"]  # of the first no record is read twice


@pytest.mark.parametrize("columns", [ONLY, MORE])
def test_offsets_of_damaged_matches_are_an_error_others_are_not(tmp_path: Path, columns: list[str]) -> None:
    places = fill(tmp_path / "store", [KEY, TWIN, KEY, KEY])
    damage_body(tmp_path / "store", places[1])
    with rmq.open(tmp_path / "store") as store:
        found = store.query_many("T", [KEY, "none", KEY], limit=2, columns=columns)
        assert found.table["phy_offset"].to_pylist() == [places[3], places[2]] * 2
        assert found.table["key_index"].to_pylist() == [0, 0, 2, 2]
        assert found.truncated_keys.tolist() == [0, 2]
        with pytest.raises(rmq.CorruptFileError, match="body CRC differs") as caught:
            store.query_many("T", ["none", TWIN], columns=columns)
        assert caught.value.offset == places[1]
    damage_body(tmp_path / "store", places[0])
    with rmq.open(tmp_path / "store") as store:
        found = store.query_many("T", [KEY], limit=2, columns=columns)  # behind the limit
        assert (found.table["phy_offset"].to_pylist(), found.truncated) == ([places[3], places[2]], True)


@pytest.mark.parametrize("limit", [1, 70, 71, None])
@pytest.mark.parametrize("keys", [[], [KEY], [KEY, "none", TWIN, KEY]])
def test_offsets_alone_are_those_beside_other_columns(tmp_path: Path, keys: list[str], limit: int | None) -> None:
    fill(tmp_path / "store", [KEY, TWIN] * 70)
    with rmq.open(tmp_path / "store", "r+") as store:
        one, more = (store.query_many("T", keys, limit=limit, columns=columns) for columns in (ONLY, MORE))
        assert one.table.equals(more.table.select(["key_index", "phy_offset"]))
        assert one.table.schema == more.table.select(["key_index", "phy_offset"]).schema
        assert one.truncated_keys.tolist() == more.truncated_keys.tolist()


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("limit", [1, 3, None])
def test_each_key_has_its_own_time_range(tmp_path: Path, indexed: bool, limit: int | None) -> None:
    """Of few messages in the range among many outside, the limit counts those in the range only."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, message_index_enable=indexed)
    clock = iter(range(1000, 2000))
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: next(clock)) as store:
        for number in range(300):
            store.put(rmq.Message("T", b"%d" % number, keys=[(KEY, TWIN)[number % 2]]))
        keys = [KEY, KEY, TWIN, KEY, "none", TWIN]
        begins = np.array([1000, 1100, -(2**63), 1200, 0, 1299], np.int64)
        ends = np.array([1010, 1107, 2**63 - 1, 1100, 2**63 - 1, 1299], np.int64)
        many = store.query_many("T", keys, begin=begins, end=ends, limit=limit)
        found = [[] for _ in keys]
        for row in many.table.to_pylist():
            found[row["key_index"]].append(row["body"])
        expected = [store.query("T", key, begin=int(begin), end=int(end), limit=limit)
                    for key, begin, end in zip(keys, begins, ends, strict=True)]  # fmt: skip
        assert found == [bodies(one) for one in expected]
        assert many.truncated_keys.tolist() == [number for number, one in enumerate(expected) if one.truncated]
        half = store.query_many("T", keys, begin=begins, end=1100, limit=None)
        assert half.table.num_rows == sum(len(store.query("T", key, begin=int(begin), end=1100, limit=None))
                                          for key, begin in zip(keys, begins, strict=True))  # fmt: skip
        none = np.array([], np.int64)
        assert store.query_many("T", [], begin=none, end=none).table.num_rows == 0


# Bytes that are no UTF-8, and how Java and Python read them.
NOT_UTF8 = {b"k\xff": "k\ufffd", b"\xe2\x82": "\ufffd", b"\xf0\x9f\x98x\xed\xa0\x80": "\ufffdx\ufffd",
            b"caf\xc3\xa9\xc3": "caf\xe9\ufffd", "\ufffd\uff01".encode(): "\ufffd\uff01"}  # fmt: skip


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("name", ["KEYS", "UNIQ_KEY"])
def test_a_key_that_is_no_utf8_is_found_by_the_text_that_it_reads_as(tmp_path: Path, name: str, indexed: bool) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, message_index_enable=indexed)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for key in NOT_UTF8:
            store.put(rmq.Message("T", key, raw_properties=name.encode() + b"\1" + key + b"\2"))
        for key, text in NOT_UTF8.items():
            [message] = store.query("T", text)
            assert (message.body, message.uniq_key or message.keys) == (key, text if name == "UNIQ_KEY" else (text,))
            assert next(store.scan(keys=[text]))["body"].to_pylist() == [key]
        for columns in (None, ["phy_offset"]):
            many = store.query_many("T", list(NOT_UTF8.values()), columns=columns)
            assert many.table["key_index"].to_pylist() == list(range(len(NOT_UTF8)))
        for other in ("k", "k\ufffd\ufffd", "\ufffd\ufffd", "k?", "\uff01", "\ufffdx"):
            assert not store.query("T", other), other


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 31, 32, 33, 255, 256, 257, 300])
@pytest.mark.parametrize("checks", [PARSE_PROPERTIES, PARSE_PROPERTIES | CHECK_BODY_CRC])
def test_a_batch_grows_with_its_rows(tmp_path: Path, count: int, checks: int) -> None:
    places = fill(tmp_path / "store", [f"k{n}" for n in range(count)])
    data = (tmp_path / "store" / LOG).read_bytes()
    for capacity in (count, count + 1, 8192):
        batch = RecordBatch(capacity)
        batch.scan(data, 0, 0, len(data), checks=checks)
        assert batch.numbers("phy_offset").tolist() == places
        assert [batch.carries(n, b"T", b"k%d" % n, -(2**63), 2**63 - 1) for n in range(count)] == [True] * count
    hostile = [-(2**63), -1, 2**63 - 1, len(data) - 1, len(data), places[0] + 1]
    asked = np.array([place for n in range(count) for place in (places[n], hostile[n % 6])], np.int64)
    batch = RecordBatch(2 * count)
    assert batch.load(data, 0, asked, 2**63 - 1, checks=checks).tolist() == list(range(0, 2 * count, 2))
    assert batch.numbers("phy_offset").tolist() == places
    assert batch.load(data[: places[-1]], 0, asked, 2**63 - 1).tolist() == list(range(0, 2 * count - 2, 2))


def test_look_ahead_stays_inside_a_segment_at_the_ends_of_the_offsets(tmp_path: Path) -> None:
    fill(tmp_path / "store", [KEY])
    data = (tmp_path / "store" / LOG).read_bytes()[:200]
    batch = RecordBatch(3)
    for start in (-(2**63), 2**63 - 1 - 200):
        asked = np.array([-(2**63), 0, 2**63 - 1], np.int64)
        assert not len(batch.load(data, start, asked, 2**63 - 1))
    assert not len(batch.load(b"", 0, np.array([0], np.int64), 10))


def test_carries_asks_for_topic_key_and_time(tmp_path: Path) -> None:
    fill(tmp_path / "store", [KEY])
    data = bytearray((tmp_path / "store" / LOG).read_bytes())
    batch = RecordBatch()
    batch.scan(data, 0, 0, 300, checks=PARSE_PROPERTIES)
    time = int(batch.numbers("store_timestamp")[0])
    for topic, key, begin, end, answer in (
            (b"T", b"Aa", time, time, True), (None, b"Aa", time, time, True), (b"U", b"Aa", time, time, False),
            (b"T", b"BB", time, time, False), (b"T", b"Aa", time + 1, time + 1, False),
            (b"T", b"Aa", time - 1, time - 1, False)):  # fmt: skip
        assert batch.carries(0, topic, key, begin, end) is answer
    for row in (-1, 1):
        with pytest.raises(IndexError):
            batch.carries(row, b"T", b"Aa", time, time)
    with pytest.raises(ValueError, match="contiguous"):
        batch.scan(memoryview(data)[::2], 0, 0, 10)
    assert batch.scan(data, 0, 0, 300, checks=CHECK_BODY_CRC) != SCAN_BAD_BODY_CRC
    data[L.RECORD_BODY_OFFSET] ^= 1
    assert batch.scan(data, 0, 0, 300, checks=CHECK_BODY_CRC) == SCAN_BAD_BODY_CRC


# ---- rows of a scan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 300])
def test_a_mask_keeps_the_rows_that_are_not_0(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "store", [KEY] * count)
    data = (tmp_path / "store" / LOG).read_bytes()
    for mask in (np.zeros(count, np.uint8), np.ones(count, np.uint8), np.arange(count, dtype=np.uint8) % 3):
        batch = RecordBatch()
        batch.scan(data, 0, 0, len(data))
        places = batch.numbers("phy_offset")
        for wrong in (mask[1:], np.r_[mask, 1].astype(np.uint8)):
            with pytest.raises(ValueError, match="mask must have one number per row"):
                batch.keep(mask=wrong)
        assert batch.keep([b"T"], mask=mask) == len(batch) == np.count_nonzero(mask)
        assert batch.numbers("phy_offset").tolist() == places[mask > 0].tolist()
        assert batch.keep([b"none"], mask=np.ones(len(batch), np.uint8)) == 0


def test_no_columns_are_the_rows_alone(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", b"x", keys=["a"])] * 3)
        table = store.query_many("t", ["b", "a"], columns=[]).table
        assert table.to_pydict() == {"key_index": [1, 1, 1]}
        assert store.lookup_many([5, 0], columns=[]).to_pydict() == {"place": [1]}


def test_answers_of_query_many_compare_without_an_error(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", b"x", keys=["a"])] * 3)
        first, second = (store.query_many("t", ["a", "b"], limit=1) for _ in range(2))
    assert [first, second].index(second) == 1


def test_arrow_text_that_is_not_utf8_is_an_error_that_names_the_argument(tmp_path: Path) -> None:
    text = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for call in (lambda: store.query_many("T", text), lambda: store.scan(keys=text)):
            with pytest.raises(ValueError, match=r"^keys holds text that is not UTF-8$"):
                call()
        with pytest.raises(ValueError, match=r"^topics holds text that is not UTF-8$"):
            store.scan(topics=text)


@pytest.mark.slow
def test_a_table_past_2_gib_is_an_error_that_says_what_to_do() -> None:
    """Of chunks that share their bytes."""
    batch = pa.record_batch({"body": pa.array([bytes(1 << 26)], pa.binary())})
    parts = [(batch, np.array([place])) for place in range(33, 0, -1)]
    with pytest.raises(ValueError, match="33 messages have 2112 MiB, a look-up takes less than 2 GiB: ask for fewer"):
        table_of(parts)
    assert len(table_of(reversed(parts))[0]) == 33


def test_a_time_between_two_milliseconds_is_after_the_first(tmp_path: Path) -> None:
    noon, ms = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC), dt.timedelta(milliseconds=1)
    times = [int((noon + n * ms).timestamp() * 1000) for n in range(3)]
    with rmq.open(tmp_path / "s", "x", clock=lambda: times.pop(0)) as store:
        store.put_many([rmq.Message("T", b"0", keys="k")])
        store.put_many([rmq.Message("T", b"1", keys="k")])
        store.put_many([rmq.Message("T", b"2", keys="k")])
        moment = noon + 1.5 * ms
        assert [store.search_offset("T", 0, moment, boundary) for boundary in ("LOWER", "UPPER")] == [2, 1]
        assert [store.search_offset("T", 0, noon + ms, boundary) for boundary in ("LOWER", "UPPER")] == [1, 1]
        assert bodies(store.query("T", "k", begin=moment)) == [b"2"]
        assert sorted(bodies(store.query("T", "k", end=moment))) == [b"0", b"1"]
        for begin in (moment, np.array([moment])):
            assert store.query_many("T", ["k"], begin=begin).table["body"].to_pylist() == [b"2"]
        assert store.scan(begin=moment).read_all()["body"].to_pylist() == [b"2"]
        assert store.scan(end=moment).read_all()["body"].to_pylist() == [b"0", b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_searches_by_time_are_exact_where_the_clock_went_back_for_32_messages(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    times = list(itertools.accumulate((rng.choice((0, 0, 1, 1, 2, 50)) for _ in range(600)), initial=1_700_000_000_000))
    for place in rng.sample(range(50, 550, 50), 3):
        times[place:] = [time - rng.randint(0, times[place] - times[place - 15]) * (rng.random() < 0.9)
                         if number < 15 else time for number, time in enumerate(times[place:])]  # fmt: skip
    clock = iter(times)
    config = rmq.StoreConfig(mapped_file_size_consume_queue=20 * rng.choice((50, 1000)))
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: next(clock)) as store:
        for _ in times:
            store.put(rmq.Message("T", b""))
        for time in {time + change for time in times for change in (-1, 0, 1)}:
            lower = next((number for number, found in enumerate(times) if found >= time), len(times))
            upper = next((number for number in reversed(range(len(times))) if times[number] <= time), 0)
            assert store.search_offset("T", 0, time) == lower, time
            assert store.search_offset("T", 0, time, "UPPER") == upper, time


def test_a_scan_without_columns_counts_its_rows(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", b"%d" % number) for number in range(10)])
        assert [batch.num_rows for batch in store.scan(columns=[], batch_rows=4)] == [4, 4, 2]
        assert store.scan(columns=[]).read_all().num_rows == 10


@pytest.mark.parametrize("limit", [1, 3, 70, None])
@pytest.mark.parametrize("at_a_time", [100, 2**20])
def test_a_key_asked_often_and_keys_of_one_hash_cost_the_memory_of_their_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, at_a_time: int
) -> None:
    monkeypatch.setattr("rmq.query.CANDIDATES_AT_A_TIME", at_a_time)
    looked_at: list[int] = []
    matches = rmq.query._matches

    def counted(*arguments: Any) -> Any:
        looked_at.append(len(arguments[4]))
        return matches(*arguments)

    alike = ["".join(parts) for parts in itertools.product(("Aa", "BB"), repeat=5)]
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(max_hash_slot_num=50, max_index_num=150)) as store:
        store.put_many([rmq.Message("T", b"", keys=[alike[number % 31], "hot"]) for number in range(310)])
        keys = ["hot", *alike, "none", *["hot"] * 20, alike[30], alike[3]]
        expected = [[item.phy_offset for item in store.query("T", key, limit=limit)] for key in keys]
        monkeypatch.setattr("rmq.query._matches", counted)
        found = store.query_many("T", keys, limit=limit, columns=["phy_offset"])
    table = found.table.to_pydict()
    assert [[place for number, place in zip(table["key_index"], table["phy_offset"], strict=True) if number == key]
            for key in range(len(keys))] == expected  # fmt: skip
    assert sum(map(len, expected)) > 22
    assert 0 < max(looked_at) <= at_a_time + 310


@pytest.mark.parametrize("limit", [1, 2, 9, 10, None])
def test_damage_behind_the_limit_of_a_key_is_none_of_any_key_s_answer(tmp_path: Path, limit: int | None) -> None:
    """query tells it where it comes to it; so does query_many, for each key."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 16)) as store:
        first = store.put(rmq.Message("T", b"0", keys="k")).phy_offset
        for number in range(1, 10):
            store.put(rmq.Message("T", b"%d" % number, keys=["k", f"k{number}"]))
    with (tmp_path / "s/commitlog" / f"{0:020d}").open("r+b") as log:
        log.seek(first + 4)
        log.write(b"\xff\xff\xff\xff")
    with rmq.open(tmp_path / "s") as store:
        if limit is None or limit >= 9:
            for ask in (lambda: store.query("T", "k", limit=limit), lambda: store.query_many("T", ["k"], limit=limit)):
                with pytest.raises(rmq.CorruptFileError, match="no whole record"):
                    ask()
        else:
            found = store.query_many("T", ["k3", "k", "none"], limit=limit, columns=["body"])
            bodies = [message.body for message in store.query("T", "k", limit=limit)]
            assert found.table["body"].to_pylist() == [b"3", *bodies]
            assert (found.table["key_index"].to_pylist(), found.truncated) == ([0, *[1] * limit], True)
