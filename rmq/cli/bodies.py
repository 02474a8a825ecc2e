# SPDX-License-Identifier: Apache-2.0
"""A row of a table as one JSON object, made column by column."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq._core._jsonrows import JsonRows
from rmq._core._numbertext import NUMBER_ROOM, number_texts
from rmq._core._textcolumn import TextColumn
from rmq.arrays import NO_BYTES, flags, integers, number_array, text_column, text_scalar
from rmq.cli.texts import NO_TEXT, NULL, as_text, is_bytes
from rmq.cli.values import readable, written

_COMMA, _OPEN, _CLOSE = text_scalar(","), text_scalar("["), text_scalar("]")
_ZERO = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(bytes(8))])[0]
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view,
          pa.types.is_large_list_view)  # fmt: skip
_Write = Callable[[pa.Array, str, dict[int, str]], pa.Array]
_Text = tuple[TextColumn, bool]  # values as text, and whether JSON has them between quotes


def json_objects(batch: pa.RecordBatch, broken: dict[int, str] | None = None) -> pa.Array:
    """Each row of readable columns as the text of a JSON object, fields in column order; large_string.

    Numbers and booleans stay what they are, times become ISO 8601, bytes hex digits; null, NaN and infinity are null.
    Rows that hold a value without a text are put into `broken`, with the reason.
    """
    broken = {} if broken is None else broken
    texts = [_json_text(column, name, broken) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return _objects(batch.schema.names, texts, batch.num_rows)


def plain_text(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """The text that a row has of each value of a readable column, for keys, tags and bodies; bytes are text as well."""
    if is_bytes(column.type):
        return as_text(column.cast(pa.large_binary()), name, broken)
    if pa.types.is_floating(column.type):  # NaN and infinity have a name here
        return column.cast(pa.large_string())
    nested = _nested(column, name, broken)
    return written(column, name, broken)[0] if nested is None else nested


def key_texts(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """plain_text for keys: of a list a list of its values' texts."""
    if any(is_list(column.type) for is_list in _LISTS):
        return _of_items(column, name, broken, lambda items, name, inner: plain_text(readable(items, name, inner), name,
                                                                                    inner))  # fmt: skip
    return plain_text(column, name, broken)


def _objects(names: Sequence[str], texts: list[_Text], count: int) -> pa.Array:
    if not names:
        return pa.repeat(text_scalar("{}"), count)
    heads = [f"{',' if place else '{'}{json.dumps(name, ensure_ascii=False)}:".encode()
             for place, name in enumerate(names)]  # fmt: skip
    return _lines(heads, texts, b"}")


def _lines(heads: list[bytes], texts: list[_Text], tail: bytes) -> pa.Array:
    """For each row a head and a value of each column, then the tail."""
    rows = JsonRows(heads, [text for text, _ in texts], [is_quoted for _, is_quoted in texts], tail)
    # Of Arrow's pool: fresh memory for each batch would cost a page fault for each 4 KiB.
    offsets, data = pa.allocate_buffer((rows.count + 1) * 8), pa.allocate_buffer(rows.room)
    size = rows.write(np.frombuffer(offsets, np.int64), np.frombuffer(data, np.uint8))
    return pa.Array.from_buffers(pa.large_string(), rows.count, [None, offsets, data.slice(0, size)])


def _json_text(column: pa.Array, name: str, broken: dict[int, str]) -> _Text:
    numbers = _number_text(column)
    if numbers is not None:
        return numbers, pa.types.is_timestamp(column.type)
    nested = _nested(column, name, broken)
    text, is_quoted = (nested, False) if nested is not None else written(column, name, broken)
    return text_column(text), is_quoted


def _number_text(column: pa.Array) -> TextColumn | None:
    """Integers, doubles and times, if each has a text that number_texts can write."""
    kind, is_utc = column.type, False
    if pa.types.is_integer(kind) and kind != pa.uint64():
        form, column = "int64", column.cast(pa.int64())
    elif kind == pa.float64():
        form = "double"
    elif pa.types.is_timestamp(kind) and kind.tz in (None, "UTC"):
        form, is_utc = kind.unit, kind.tz is not None
    else:
        return None
    count = len(column)
    values = integers(column)  # of a double its bits
    missing = flags(column.is_null()).view(np.uint8) if column.null_count else NO_BYTES
    offsets, data = pa.allocate_buffer((count + 1) * 8), pa.allocate_buffer(count * NUMBER_ROOM)
    size = number_texts(values, missing, form, is_utc, np.frombuffer(offsets, np.int64), np.frombuffer(data, np.uint8))
    return TextColumn(offsets, data, missing) if size >= 0 else None


def _nested(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array | None:
    """Structs, lists and maps as JSON, null where they are; None for what is not nested."""
    kind = column.type
    if pa.types.is_struct(kind):
        text = _structs(column, name, broken)
    elif pa.types.is_map(kind):  # a list of pairs: a key need not be text, and may come twice
        pairs = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
        # No cast: where the values hold nulls of no type, pyarrow 26 makes arrays of it that are too short.
        lists = pa.Array.from_buffers(pa.list_(pairs.type), len(column), column.buffers()[:2], column.null_count,
                                      column.offset, [pairs])  # fmt: skip
        text = _lists(lists, name, broken, _pairs)
    elif any(is_list(kind) for is_list in _LISTS):
        text = _lists(column, name, broken, _items)
    else:
        return None
    return pc.if_else(column.is_valid(), text, NULL) if column.null_count else text


def _structs(column: pa.StructArray, name: str, broken: dict[int, str]) -> pa.Array:
    names = [column.type.field(place).name for place in range(column.type.num_fields)]
    return _objects(names, [_inner_text(field, name, broken) for field in column.flatten()], len(column))


def _lists(column: pa.Array, name: str, broken: dict[int, str], write: _Write) -> pa.Array:
    """write: makes JSON of the items of all lists, those of null ones left out."""
    joined = pc.binary_join(_of_items(column, name, broken, write), _COMMA)
    return pc.binary_join_element_wise(_OPEN, joined, _CLOSE, NO_TEXT)


def _of_items(column: pa.Array, name: str, broken: dict[int, str], write: _Write) -> pa.LargeListArray:
    """What is written of each item, as lists; null ones are empty."""
    lengths = pc.if_else(column.is_valid(), pc.list_value_length(column).cast(pa.int64()), _ZERO)
    ends = np.cumsum(integers(lengths))
    inner: dict[int, str] = {}
    items = write(column.flatten(), name, inner)
    for item, reason in inner.items():
        broken.setdefault(int(np.searchsorted(ends, item, side="right")), reason)
    return pa.LargeListArray.from_arrays(number_array(np.r_[0, ends]), items)


def _items(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    return _lines([b""], [_inner_text(column, name, broken)], b"")


def _pairs(column: pa.StructArray, name: str, broken: dict[int, str]) -> pa.Array:
    return _lines([b"[", b","], [_inner_text(part, name, broken) for part in column.flatten()], b"]")


def _inner_text(column: pa.Array, name: str, broken: dict[int, str]) -> _Text:
    return _json_text(readable(column, name, broken), name, broken)
