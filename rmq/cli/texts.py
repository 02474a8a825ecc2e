# SPDX-License-Identifier: Apache-2.0
"""Values of columns and of JSON fields as text."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq.arrays import flags, text_scalar
from rmq.cli.inputs import MASK, unmasked

# A value of Python's among a function's arguments would make pyarrow import pandas, to ask whether it is a Series.
NO_TEXT = text_scalar("")
NULL = pa.nulls(1, pa.large_string())[0]
Texts = str | list[str | None] | None  # of one field: of a list several
_NO_NUMBER = re.compile(rb"[:,\[][ \t\r]*-?(?:NaN|Inf)")


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


def as_it_was(column: pa.Array) -> pa.Array:
    """A binary column with the bytes that Blocks put MASK in place of."""
    column = column.cast(pa.large_binary())
    holds = pc.match_substring(column, MASK)
    values = pa.array(map(unmasked, column.filter(holds).to_pylist()), pa.large_binary())
    return pc.replace_with_mask(column, holds, values) if len(values) else column


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
                or pa.types.is_binary_view(kind))  # fmt: skip


def leave_out(rows: pa.BooleanArray, reason: str, broken: dict[int, str]) -> None:
    """Put those that are true into `broken`, unless they are there."""
    for row in np.flatnonzero(flags(pc.and_kleene(rows, rows.is_valid()))).tolist():
        broken.setdefault(row, reason)


def last_value(batch: pa.RecordBatch) -> bytes:
    """Of the last column in the last row; empty without rows."""
    values = batch.columns[-1][-1:].cast(pa.large_binary()).to_pylist()
    return values[0] if values else b""


def may_hold_nan(data: bytes) -> bool:
    """Whether JSON may hold NaN or Infinity, numbers to Arrow; text that looks like it is told apart by json_value."""
    return (b"NaN" in data or b"Inf" in data) and _NO_NUMBER.search(data) is not None


class _Number(str):
    """A number of JSON as it was written: a float would not give its text again."""

    __slots__ = ()


def json_value(text: bytes) -> Any:
    """As the json module reads it, but for numbers, which json_text gives again; NaN and Infinity: ValueError."""
    return json.loads(text.decode(), parse_constant=_refuse, parse_int=_Number, parse_float=_Number)


def _dump(value: Any, parts: list[str]) -> None:
    """Add a json_value as json.dumps writes it, with the numbers as they were."""
    if isinstance(value, _Number):
        parts.append(value)
    elif isinstance(value, dict):
        parts.append("{")
        for place, (name, item) in enumerate(value.items()):
            parts += [", "] if place else []
            parts += [json.dumps(name, ensure_ascii=False), ": "]
            _dump(item, parts)
        parts.append("}")
    elif isinstance(value, list):
        parts.append("[")
        for place, item in enumerate(value):
            parts += [", "] if place else []
            _dump(item, parts)
        parts.append("]")
    else:
        parts.append(json.dumps(value, ensure_ascii=False))


def _refuse(constant: str) -> None:
    raise ValueError(f"no JSON: {constant} is no value")


def text_array(values: list[Texts]) -> pa.Array:
    """Texts as large_string; as lists of them when one of the values is a list."""
    if not any(isinstance(value, list) for value in values):
        return pa.array(values, pa.large_string())
    lists = [value if isinstance(value, list) else [value] for value in values]
    return pa.array(lists, pa.large_list(pa.large_string()))


def json_text(value: Any, name: str) -> str | None:
    """A field's text: of text itself, of anything else its JSON. ValueError when it has no UTF-8 form."""
    text: str | None = value
    if value is not None and not isinstance(value, str):
        parts: list[str] = []
        try:
            _dump(value, parts)
        except RecursionError:
            raise ValueError("nested too deep") from None
        text = "".join(parts)
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair: it has no UTF-8 form") from None
    return text
