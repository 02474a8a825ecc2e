"""Look-ups with a time range of each row: columns beside the key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rmq
import rmq.spark
from rmq.spark.functions import MAX_MS, MIN_MS, Probe, answered, times_of_column
from spark.orders import TIME

pytestmark = pytest.mark.spark
ROWS = [("c-7", TIME + 1000, TIME + 2999), ("c-7", TIME + 1000, None), ("c-7", None, TIME + 999), ("c-7", None, None),
        ("c-8", TIME + 8, TIME + 8), ("c-8", TIME + 9, TIME + 8), ("o-5", TIME + 6, None), ("nix", TIME, None),
        (None, TIME, TIME + 5), ("", None, TIME)]  # fmt: skip


def expected(store: Path, limit: int | None) -> list[list[int] | None]:
    with rmq.open(store) as opened:
        return [None if key is None else [message.phy_offset for message in
                                          opened.query("orders", key, begin=begin, end=end, limit=limit)]
                for key, begin, end in ROWS]  # fmt: skip


def columns(*kinds: pa.DataType) -> list[pa.Array]:
    return [pa.array(values, kind) for values, kind in zip(zip(*ROWS, strict=True), kinds, strict=True)]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(number, *row) for number, row in enumerate(ROWS)]
    made = spark.createDataFrame(rows, "n int, key string, begin bigint, end bigint")
    return made.selectExpr("*", "timestamp_millis(begin) first", "timestamp_millis(end) last").cache()


def in_order(frame: Any, function: Any, *names: str) -> list[Any]:
    return [row[1] for row in sorted(frame.select("n", function(*names)).collect())]


@pytest.mark.parametrize("limit", [1, 3, None])
@pytest.mark.parametrize("names", [("begin", "end"), ("first", "last"), ("first", "end")], ids=str)
def test_each_row_has_its_own_range(store: Path, frame: Any, limit: int | None, names: tuple[str, str]) -> None:
    found = in_order(frame, rmq.spark.offsets(str(store), "orders", max_offsets=limit), "key", *names)
    assert found == expected(store, limit)


def test_a_begin_alone_leaves_the_end_open(store: Path, frame: Any) -> None:
    found = in_order(frame, rmq.spark.offsets(str(store), "orders"), "key", "begin")
    assert [len(row) for row in found if row is not None] == [30, 30, 32, 32, 32, 32, 0, 0, 0]


def test_messages_have_ranges_too(store: Path, frame: Any) -> None:
    function = rmq.spark.messages(str(store), "orders", columns=["phy_offset"], limit=3)
    found = in_order(frame, function, "key", "begin", "end")
    assert [None if row is None else [item.phy_offset for item in row] for row in found] == expected(store, 3)


def test_ranges_in_sql(spark: Any, store: Path) -> None:
    rmq.spark.register(spark, str(store), "orders")
    moment = datetime.datetime.fromtimestamp((TIME + 1000) / 1000, datetime.UTC).isoformat()
    row = spark.sql(f"SELECT size(rmq_offsets('c-7', {TIME + 1000}, {TIME + 1999})) a, "
                    f"size(rmq_offsets('c-7', NULL, {TIME + 1999})) b, size(rmq_offsets('c-7', end => {TIME + 99})) c, "
                    f"size(rmq_messages('c-7', timestamp'{moment}', timestamp'{moment}' + INTERVAL 1 SECOND)) d, "
                    "size(rmq_offsets('c-7')) e").first()  # fmt: skip
    assert tuple(row) == (10, 20, 1, 10, 32)


@pytest.mark.parametrize("begin", [None, TIME + 500, datetime.datetime.fromtimestamp(TIME / 1000 + 0.5, datetime.UTC)])
def test_a_row_s_range_lies_within_that_of_the_function(store: Path, begin: Any) -> None:
    probe = Probe(str(store), "orders", begin, TIME + 1500, None, None)
    keys, begins, ends = columns(pa.string(), pa.int64(), pa.int64())
    first = TIME + 500 if begin is not None else MIN_MS
    with rmq.open(store) as opened:
        wanted = [None if key is None else
                  [message.phy_offset for message in opened.query(
                      "orders", key, limit=None, begin=max(low if low is not None else MIN_MS, first),
                      end=min(high if high is not None else MAX_MS, TIME + 1500))]
                  for key, low, high in ROWS]  # fmt: skip

    def exact(keys: pa.Array, begins: Any, ends: Any) -> pa.ListArray:
        table = probe.found(keys, ["phy_offset"], begins, ends)
        counts = np.bincount(table["key_index"].to_numpy(), minlength=len(keys))
        starts = np.concatenate([[0], np.cumsum(counts)])
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), table["phy_offset"].combine_chunks())

    assert answered(keys, exact, begins, ends).to_pylist() == wanted


def test_raw_answers_of_ranges_are_those_of_one_call_each(store: Path) -> None:
    probe = Probe(str(store), "orders", None, None, 32, None)
    keys, begins, ends = columns(pa.string(), pa.int64(), pa.timestamp("ms", "UTC"))
    with rmq.open(store) as opened:
        wanted = [None if key is None else opened.select_phy_offset_many(
            "orders", [key], begin=begin or 0, end=MAX_MS if end is None else end).to_pylist()[0]
            for key, begin, end in ROWS]  # fmt: skip
    assert answered(keys, probe.raw_offsets, begins, ends).to_pylist() == wanted
    part = [column.slice(3, 6) for column in (keys, begins, ends)]
    assert answered(part[0], probe.raw_offsets, *part[1:]).to_pylist() == wanted[3:9]
    assert answered(keys[:0], probe.raw_offsets, begins[:0], ends[:0]).to_pylist() == []
    assert len(answered(keys, probe.raw_offsets, None, ends)) == len(ROWS)


@pytest.mark.parametrize(("values", "kind", "first", "last"), [
    ([5, None], pa.int32(), [5, MIN_MS], [5, MAX_MS]), ([5, None], pa.int64(), [5, MIN_MS], [5, MAX_MS]),
    ([5, -5], pa.int8(), [5, -5], [5, -5]), ([None, None], pa.null(), [MIN_MS] * 2, [MAX_MS] * 2),
    ([], pa.int64(), [], []),
    ([1000, 1001, 1999, -1, None], pa.timestamp("us", "Europe/Berlin"), [1, 2, 2, 0, MIN_MS], [1, 1, 1, -1, MAX_MS]),
    ([-(2**63), 2**63 - 1], pa.timestamp("us", "UTC"), [-9223372036854775, 9223372036854776],
     [-9223372036854776, 9223372036854775]),
    ([2, None], pa.timestamp("s", "UTC"), [2000, MIN_MS], [2000, MAX_MS])], ids=str)  # fmt: skip
def test_times_become_ms_inside_the_range(values: list[Any], kind: pa.DataType, first: list[int],
                                          last: list[int]) -> None:  # fmt: skip
    array = pa.nulls(2) if kind == pa.null() else pa.array([0, *values], kind)[1:]
    assert times_of_column(array, "begin").tolist() == first
    assert times_of_column(array, "end").tolist() == last


@pytest.mark.parametrize(("array", "error", "message"), [
    (pa.array([0], pa.timestamp("us")), ValueError, "begin is timestamp_ntz"),
    (pa.array(["2024-01-01"]), TypeError, "begin must be bigint .* got string"),
    (pa.array([1.5]), TypeError, "got double"),
    (pa.array([0], pa.date32()), TypeError, "got date32")], ids=str)  # fmt: skip
def test_what_says_no_point_in_time_is_an_error(array: pa.Array, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        times_of_column(array, "begin")


def test_a_naive_time_of_a_function_is_an_error(store: Path) -> None:
    with pytest.raises(ValueError, match="begin must be an aware datetime"):
        rmq.spark.offsets(str(store), "orders", begin=datetime.datetime(2024, 1, 1))


