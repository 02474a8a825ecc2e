# SPDX-License-Identifier: Apache-2.0
"""Numbers and times as text: what Arrow's cast makes of them, or a refusal; nothing written outside."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from rmq._core._numbertext import NUMBER_ROOM, number_texts
from rmq.cli.bodies import json_objects

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
NOTHING = np.empty(0, np.uint8)
YEAR_0, YEAR_9999 = -62_167_219_200, 253_402_300_799  # first and last second
GUARD = 0xA5


def texts(values: npt.NDArray[np.int64], form: str, is_utc: bool = False,
          missing: npt.NDArray[np.uint8] = NOTHING) -> list[str] | None:  # fmt: skip
    """None: refused. What lies behind the room stays as it was."""
    offsets = np.full(len(values) + 2, -7, np.int64)
    into = np.full(len(values) * NUMBER_ROOM + 64, GUARD, np.uint8)
    room = into[: len(values) * NUMBER_ROOM]
    end = number_texts(values, missing, form, is_utc, offsets[:-1], room)
    assert offsets[-1] == -7
    assert (into[len(room) :] == GUARD).all()
    if end < 0:
        assert end == -1
        return None
    assert offsets[len(values)] == end
    return [room[begin:stop].tobytes().decode() for begin, stop in pairwise(offsets[:-1].tolist())]


def arrow_texts(values: pa.Array) -> list[str]:
    return [text.replace(" ", "T") for text in values.cast(pa.large_string()).to_pylist()]


def doubles(values: Sequence[float]) -> npt.NDArray[np.int64]:
    return np.array(values, np.float64).view(np.int64)


def integers() -> list[int]:
    near = [sign * 10**power + step for power in range(19) for sign in (1, -1) for step in (-1, 0, 1)]
    rng = random.Random(5)
    return [*near, 0, 2**63 - 1, -(2**63), 2**63 - 2, *(rng.randrange(-(2**63), 2**63) >> rng.randrange(64)
                                                        for _ in range(20_000))]  # fmt: skip


def test_integers_of_every_length() -> None:
    values = integers()
    assert texts(np.array(values, np.int64), "int64") == [str(value) for value in values]


def test_doubles_that_are_decimals_are_written_as_arrow_writes_them() -> None:
    rng = random.Random(7)
    values = [value / 10**places for value in integers() for places in range(7)
              if abs(value) < 10 ** (9 + places) and (value or not places)]  # fmt: skip
    values += [round(rng.uniform(-180, 180), rng.randrange(7)) + 0.0 for _ in range(20_000)]  # no -0.0
    values += [0.1, 1e-6, -1e-6, 999999999.999999, -999999999.999999, 123456789.0, 0.5]
    assert texts(doubles(values), "double") == arrow_texts(pa.array(values, pa.float64()))


@pytest.mark.parametrize("value", [-0.0, 1e-7, 5e-324, 1e9, -1e9, 1e300, 1 / 3, 0.1 + 0.2, 0.1234567, 2.5e-6 + 1e-9,
                                   999999999.9999995, float("nan"), float("inf"), -float("inf")])  # fmt: skip
def test_other_doubles_are_left_to_arrow(value: float) -> None:
    assert texts(doubles([1.5, value, 2.5]), "double") is None


@pytest.mark.slow
def test_no_double_gets_another_text_than_arrow_s() -> None:
    rng = np.random.default_rng(11)
    values = np.concatenate([rng.integers(0, 2**64, 20_000, np.uint64).view(np.float64), rng.normal(0, 1e4, 20_000),
                             np.nextafter(np.round(rng.uniform(0, 1e6, 20_000), 3), 1e9)])  # fmt: skip
    for value, expected in zip(values, arrow_texts(pa.array(values)), strict=True):
        assert texts(doubles([value]), "double") in (None, [expected])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("is_utc", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_times_of_every_day_of_four_centuries_and_at_the_ends(unit: str, is_utc: bool) -> None:
    rng = np.random.default_rng(3)
    per_second = UNITS[unit]

    def one_of(units: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        """The first, the last and any part of size of each."""
        parts = np.stack([np.zeros_like(units), np.full_like(units, size - 1), rng.integers(0, size, len(units))])
        return units * size + parts[rng.integers(0, 3, len(units)), np.arange(len(units))]

    days, ends = np.arange(-110_000, 60_000), np.array([YEAR_0, YEAR_0 + 86_399, YEAR_9999, -1, 0])  # 1668 to 2134
    seconds = np.concatenate([one_of(days, 86_400), ends, rng.integers(YEAR_0, YEAR_9999, 20_000)])
    if unit == "ns":
        seconds = seconds[np.abs(seconds) < 2**63 // per_second]
    values = one_of(seconds, per_second)
    if unit == "ns":
        values = np.append(values, [-(2**63), 2**63 - 1])
    got = texts(values, unit, is_utc)
    assert got == arrow_texts(pa.array(values, pa.timestamp(unit, "UTC" if is_utc else None)))
    if unit == "us":
        epoch = datetime.datetime(1970, 1, 1, tzinfo=None)
        for value, text in zip(values[::97].tolist(), got[::97], strict=True):
            if value // per_second > YEAR_0 + 366 * 86_400:  # Python's years begin with 1
                expected = (epoch + datetime.timedelta(microseconds=value)).isoformat(timespec="microseconds")
                assert text == expected + "Z" * is_utc


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_of_other_years_are_left_to_arrow(unit: str) -> None:
    for value in (YEAR_0 * UNITS[unit] - 1, (YEAR_9999 + 1) * UNITS[unit], 2**63 - 1, -(2**63)):
        assert texts(np.array([0, value], np.int64), unit) is None


@pytest.mark.parametrize("form", ["int64", "double", *UNITS])
def test_a_missing_value_has_no_text_whatever_stands_there(form: str) -> None:
    values = np.array([2**63 - 1, 0, -(2**63)], np.int64)
    got = texts(values, form, missing=np.array([1, 0, 7], np.uint8))
    assert got is not None
    assert (got[0], got[2]) == ("", "")
    assert texts(values[:0], form) == []


def test_what_does_not_fit_is_refused() -> None:
    values = np.zeros(3, np.int64)
    for missing, offsets, room in ((0, 3, 96), (0, 4, 95), (0, 0, 0), (2, 4, 96), (4, 4, 96)):
        with pytest.raises(ValueError, match=r"missing must|need 4 offsets"):
            number_texts(values, np.zeros(missing, np.uint8), "int64", False, np.empty(offsets, np.int64),
                         np.empty(room, np.uint8))  # fmt: skip
    with pytest.raises(KeyError):
        number_texts(values, NOTHING, "float", False, np.empty(4, np.int64), np.empty(96, np.uint8))


def test_rows_of_slices_nulls_and_mixed_columns_are_the_same_json() -> None:
    """Edge: a slice, whose nulls and values begin amid a byte; one value of a column that Arrow must write."""
    numbers = pa.array([None, 7, None, -3, 2**40, None, 9, 10, 11, None], pa.int64())
    decimals = pa.array([0.5, None, 2.25, -4.0, None, 1e6, 3.0, 8.5, 7.125, 6.0])
    others = pa.array([0.5, None, 1 / 3, float("nan"), None, 1e30, 3.0, 8.5, -0.0, 6.0])
    times = pa.array([None, 5, 10, None, -1, 0, 86_400_000, 1, 2, 3], pa.timestamp("ms", "UTC"))
    local = pa.array([0, 5, 10, None, -1, 0, 86_400_000, 1, 2, 3], pa.timestamp("ms", "+02:00"))
    small = pa.array([1, None, 3, -4, 5, 6, 7, 8, 9, 127], pa.int8())
    large = pa.array([1, None, 2**64 - 1, 4, 5, 6, 7, 8, 9, 10], pa.uint64())
    batch = pa.RecordBatch.from_arrays([numbers, decimals, others, times, local, small, large], names=list("ndotlse"))
    rows = json_objects(batch).to_pylist()
    assert rows[2:4] == [
        '{"n":null,"d":2.25,"o":0.3333333333333333,"t":"1970-01-01T00:00:00.010Z","l":"1970-01-01T02:00:00.010+02:00",'
        '"s":3,"e":18446744073709551615}',
        '{"n":-3,"d":-4,"o":null,"t":null,"l":null,"s":-4,"e":4}',
    ]
    for first, count in ((0, 10), (1, 9), (3, 5), (9, 1), (10, 0)):
        assert json_objects(batch.slice(first, count)).to_pylist() == rows[first : first + count]
