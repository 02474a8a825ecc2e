# SPDX-License-Identifier: Apache-2.0
"""A row of a table as one JSON object, made column by column."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq._core._jsonrows import JsonRows
from rmq._core._numbertext import NUMBER_ROOM, number_texts
from rmq._core._textcolumn import TextColumn
from rmq.cli.texts import NULL
from rmq.columns import flags, text_column

_OF_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FOUR_DIGITS = range(-62_167_132_800, 253_402_214_400)  # seconds of the years 0 to 9999, less a day for time zones


def json_objects(batch: pa.RecordBatch) -> pa.Array:
    """Each row as the text of a JSON object, fields in column order; large_string.

    Numbers and booleans stay what they are, times become ISO 8601, bytes hex digits; null, NaN and infinity are null.
    """
    if not batch.num_columns:
        return pa.repeat(pa.scalar("{}", pa.large_string()), batch.num_rows)
    heads: list[bytes] = []
    texts: list[TextColumn] = []
    quoted: list[bool] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        text, is_quoted = _json_text(column)
        heads.append(f"{',' if heads else '{'}{json.dumps(name, ensure_ascii=False)}:".encode())
        texts.append(text)
        quoted.append(is_quoted)
    rows = JsonRows(heads, texts, quoted, b"}")
    # Of Arrow's pool: fresh memory for each batch would cost a page fault for each 4 KiB.
    offsets, data = pa.allocate_buffer((rows.count + 1) * 8), pa.allocate_buffer(rows.room)
    size = rows.write(np.frombuffer(offsets, np.int64), np.frombuffer(data, np.uint8))
    return pa.Array.from_buffers(pa.large_string(), rows.count, [None, offsets, data.slice(0, size)])


def _json_text(column: pa.Array) -> tuple[TextColumn, bool]:
    """(values as text, whether JSON has them between quotes)."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    numbers = _number_text(column)
    if numbers is not None:
        return numbers, pa.types.is_timestamp(column.type)
    text, is_quoted = _arrow_text(column)
    return text_column(text), is_quoted


def _number_text(column: pa.Array) -> TextColumn | None:
    """Integers, doubles and times, if each has a text that number_texts can write."""
    kind, is_utc = column.type, False
    if pa.types.is_integer(kind) and kind != pa.uint64():
        form, column = "int64", column.cast(pa.int64())
    elif pa.types.is_floating(kind):
        form, column = "double", column.cast(pa.float64())
    elif pa.types.is_timestamp(kind) and kind.tz in (None, "UTC"):
        form, is_utc = kind.unit, kind.tz is not None
    else:
        return None
    count = len(column)
    values = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][:count] if count else np.empty(0, np.int64)
    missing = flags(column.is_null()).view(np.uint8) if column.null_count else np.empty(0, np.uint8)
    offsets, data = pa.allocate_buffer((count + 1) * 8), pa.allocate_buffer(count * NUMBER_ROOM)
    size = number_texts(values, missing, form, is_utc, np.frombuffer(offsets, np.int64), np.frombuffer(data, np.uint8))
    return TextColumn(offsets, data, missing) if size >= 0 else None


def _arrow_text(column: pa.Array) -> tuple[pa.Array, bool]:
    """The same for a column of any type, as Arrow and the json module write it; what is null stays null."""
    kind = column.type
    if _is_text(kind):
        return column.cast(pa.large_string()), True
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.large_string()), False
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column.cast(pa.float64()).cast(pa.large_string()), NULL), False
    if pa.types.is_timestamp(kind):
        return _iso_times(column), True
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return column.cast(pa.large_string()), True
    values = (json.dumps(_plain(value), ensure_ascii=False) for value in column.to_pylist())
    return pa.array(values, pa.large_string()), False


def _iso_times(column: pa.Array) -> pa.Array:
    """Timestamps with a T between date and time, which Arrow puts a space between."""
    texts = column.cast(pa.large_string())
    extremes = pc.min_max(column.cast(pa.int64()))
    seconds = [value // _OF_A_SECOND[column.type.unit] for value in extremes.as_py().values() if value is not None]
    if all(second in _FOUR_DIGITS for second in seconds):  # then it is always the eleventh character, found in no time
        return pc.binary_replace_slice(texts, 10, 11, "T")
    return pc.replace_substring(texts, " ", "T")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _plain(value: Any) -> Any:
    """A nested value as JSON has it."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.hex() if isinstance(value, bytes) else re.sub(r"^(\S+) (?=\d)", r"\1T", str(value))
