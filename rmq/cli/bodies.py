# SPDX-License-Identifier: Apache-2.0
"""A row of a table as one JSON object, made column by column."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_CONTROL = r"[\x00-\x1f]"


def json_objects(batch: pa.RecordBatch) -> pa.Array:
    """Each row as the text of a JSON object, fields in column order; large_string.

    Numbers and booleans stay what they are, times become ISO 8601, bytes hex digits; null, NaN and infinity are null.
    """
    names = [json.dumps(name, ensure_ascii=False) for name in batch.schema.names]
    parts: list[Any] = []
    for number, (name, column) in enumerate(zip(names, batch.columns, strict=True)):
        parts += [pa.scalar(f"{',' if number else '{'}{name}:", pa.large_string()), json_values(column)]
    if not parts:
        return pa.repeat(pa.scalar("{}", pa.large_string()), batch.num_rows)
    end, separator = pa.scalar("}", pa.large_string()), pa.scalar("", pa.large_string())
    return pc.binary_join_element_wise(*parts, end, separator)


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
        values = (json.dumps(value, ensure_ascii=False, default=_plain) for value in column.to_pylist())
        texts = pa.array(values, pa.large_string())
    return pc.coalesce(texts, pa.scalar("null", pa.large_string()))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _quoted(column: pa.Array) -> pa.Array:
    """Text between quotes, escaped; null stays null."""
    if pc.any(pc.match_substring_regex(column, _CONTROL)).as_py():
        values = (None if text is None else json.dumps(text, ensure_ascii=False) for text in column.to_pylist())
        return pa.array(values, pa.large_string())
    escaped = pc.replace_substring(pc.replace_substring(column, "\\", "\\\\"), '"', '\\"')
    quote = pa.scalar('"', pa.large_string())
    return pc.binary_join_element_wise(quote, escaped, quote, pa.scalar("", pa.large_string()))


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    return value.hex() if isinstance(value, bytes) else re.sub(r"^(\S+) (?=\d)", r"\1T", str(value))
