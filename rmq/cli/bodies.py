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

_ESCAPED = np.zeros(256, np.bool_)  # bytes that JSON text does not hold as they are
_ESCAPED[:0x20] = _ESCAPED[ord('"')] = _ESCAPED[ord("\\")] = True


def json_objects(batch: pa.RecordBatch) -> pa.Array:
    """Each row as the text of a JSON object, fields in column order; large_string.

    Numbers and booleans stay what they are, times become ISO 8601, bytes hex digits; null, NaN and infinity are null.
    """
    parts: list[Any] = []
    between = "{"
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        # Quotes that every value needs go with the text between the values: one join less for each column.
        quote = '"' if _is_text(column.type) and not column.null_count else ""
        values = _escaped(column.cast(pa.large_string())) if quote else json_values(column)
        parts += [_text(f"{between}{json.dumps(name, ensure_ascii=False)}:{quote}"), values]
        between = f"{quote},"
    if not parts:
        return pa.repeat(_text("{}"), batch.num_rows)
    return pc.binary_join_element_wise(*parts, _text(f"{between[:-1]}}}"), _text(""))


def json_values(column: pa.Array) -> pa.Array:
    """Each value as JSON text; large_string without nulls."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if _is_text(kind):
        texts = _quoted(column.cast(pa.large_string()))
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        texts = column.cast(pa.large_string())
    elif pa.types.is_floating(kind):
        texts = pc.if_else(pc.is_finite(column), column.cast(pa.float64()).cast(pa.large_string()), None)
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        texts = _quoted(pc.replace_substring(column.cast(pa.large_string()), " ", "T"))
    else:
        values = (json.dumps(_plain(value), ensure_ascii=False) for value in column.to_pylist())
        texts = pa.array(values, pa.large_string())
    return pc.coalesce(texts, _text("null"))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _quoted(column: pa.Array) -> pa.Array:
    """Text between quotes, escaped; null stays null."""
    return pc.binary_join_element_wise(_text('"'), _escaped(column), _text('"'), _text(""))


def _escaped(column: pa.Array) -> pa.Array:
    """Text as it stands between the quotes of JSON; null stays null."""
    data = column.buffers()[2]
    used = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    seen = np.flatnonzero(np.bincount(used[_ESCAPED[used]], minlength=256))
    if len(seen) and seen[0] < 0x20:
        texts = (None if text is None else json.dumps(text, ensure_ascii=False)[1:-1] for text in column.to_pylist())
        return pa.array(texts, pa.large_string())
    for byte in sorted(seen.tolist(), reverse=True):  # the backslash before what it escapes
        column = pc.replace_substring(column, chr(byte), "\\" + chr(byte))
    return column


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
