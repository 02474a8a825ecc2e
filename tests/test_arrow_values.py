# SPDX-License-Identifier: Apache-2.0
"""Values of Arrow arrays without pyarrow's own conversions, which would import pandas: slices, odd bits, no values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rmq.columns import flags, integers, text_scalar

COUNTS = (0, 1, 7, 8, 9, 63, 64, 65)


@pytest.mark.parametrize("begin", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("count", COUNTS)
def test_flags_of_any_slice(begin: int, count: int) -> None:
    values = [number % 3 == 0 for number in range(begin + count + 5)]
    got = flags(pa.array(values).slice(begin, count))
    assert got.tolist() == values[begin : begin + count]
    assert got.dtype == bool


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize("count", COUNTS)
def test_integers_of_any_slice(kind: pa.DataType, count: int) -> None:
    values = list(range(-3, count + 2))
    got = integers(pa.array(values, kind).slice(3, count))
    assert got.tolist() == values[3 : 3 + count]
    assert got.itemsize * 8 == kind.bit_width


def test_arrays_without_values() -> None:
    assert flags(pa.array([], pa.bool_())).tolist() == []
    assert integers(pa.array([], pa.int32())).tolist() == []


@pytest.mark.parametrize("text", ["", "a", "é😀" * 20, "\x00"])
def test_a_scalar_is_its_text(text: str) -> None:
    assert text_scalar(text).equals(pa.scalar(text, pa.large_string()))
