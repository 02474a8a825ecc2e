# SPDX-License-Identifier: Apache-2.0
"""Values of columns and of JSON fields as text."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq.columns import text_scalar

# A str or None among a function's arguments would make pyarrow import pandas, to ask whether it is a Series.
EMPTY = text_scalar("")
NULL = pa.nulls(1, pa.large_string())[0]


def as_text(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """A binary column as text; rows that are not UTF-8 become null and are put into `broken`."""
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts: list[str | None] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                texts.append(None)
                broken.setdefault(row, f"{name} is not UTF-8")
        return pa.array(texts, pa.large_string())


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
                or pa.types.is_binary_view(kind))  # fmt: skip


def key_text(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """Text of a column whose values become keys or tags."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_bytes(column.type):
        return as_text(column.cast(pa.large_binary()), name, broken)
    text = column.cast(pa.large_string())
    return pc.replace_substring(text, " ", "T") if pa.types.is_timestamp(column.type) else text


def json_text(value: Any, name: str) -> str | None:
    """A field's text: of text itself, of anything else its JSON. ValueError when it has no UTF-8 form."""
    text = value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair: it has no UTF-8 form") from None
    return text
