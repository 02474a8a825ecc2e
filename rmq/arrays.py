# SPDX-License-Identifier: Apache-2.0
"""Values of Arrow arrays as numpy and compiled code take them. pyarrow's own ways would import pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmq._core._textcolumn import TextColumn

if TYPE_CHECKING:
    import pyarrow as pa

NO_BYTES = np.empty(0, np.uint8)


def text_scalar(text: str) -> pa.Scalar:
    """large_string. pa.scalar would import pandas, to ask whether the text is a value of its."""
    import pyarrow as pa

    data = text.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    return pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, pa.py_buffer(data)])[0]


def number_array(numbers: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """Of int32 or int64 numbers, which it borrows when they are contiguous. pa.array would import pandas."""
    import pyarrow as pa

    kind = pa.int32() if numbers.dtype.itemsize == 4 else pa.int64()
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def flag_array(flags: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """Of booleans. pa.array would import pandas."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(np.packbits(flags, bitorder="little"))])


def integers(array: pa.Array) -> npt.NDArray[Any]:
    """Signed integers without nulls, borrowed. to_numpy would import pandas."""
    size, data = array.type.bit_width // 8, array.buffers()[1]
    return np.frombuffer(data, f"i{size}", len(array), array.offset * size) if len(array) else np.empty(0, f"i{size}")


def flags(array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Booleans without nulls."""
    data = array.buffers()[1]
    if data is None:
        return np.empty(0, np.bool_)
    begin, end = array.offset, array.offset + len(array)
    return np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")[begin:].view(np.bool_)


def offset_size(kind: pa.DataType, binary: bool = True) -> int:
    """Bytes of an offset of text or (binary) bytes; 0: the type is none of those that have offsets."""
    import pyarrow as pa

    if pa.types.is_string(kind) or (binary and pa.types.is_binary(kind)):
        return 4
    return 8 if pa.types.is_large_string(kind) or (binary and pa.types.is_large_binary(kind)) else 0


def text_column(array: pa.Array, width: int = 0) -> TextColumn:
    """Offsets, bytes and a mask of an Arrow array of strings or binaries, large or not, borrowed.

    width: bytes of an offset, when they are known.
    """
    _, offsets, data = array.buffers()
    count, missing = len(array), NO_BYTES
    if array.null_count:
        missing = flags(array.is_null()).view(np.uint8)
    if count == 0 or offsets is None:
        return TextColumn(bytes(8 * (count + 1)), b"", missing)
    return TextColumn(offsets, b"" if data is None else data, missing, width=width or offset_size(array.type),
                      first=array.offset, count=count)  # fmt: skip


def _without_views(kind: pa.DataType) -> pa.DataType:
    """A type with large text and bytes in the place of views, of which Arrow takes no items."""
    import pyarrow as pa

    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(_without_views(kind.value_type))
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def list_starts(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64], int, int]:
    """The column whose items are meant (another one where nulls hid items); item numbers at which the rows start and
    the last ends, counted from the first item that is used; the number of that item, and how many are used. A null row
    is empty. A slice of a large table pays for its own items only.
    """
    offsets: npt.NDArray[np.int64] = integers(column.offsets).astype(np.int64)
    _check_offsets(column, offsets)  # first: Arrow's own `take` believes them
    if column.null_count and np.diff(offsets)[~flags(column.is_valid())].any():
        column = column.cast(_without_views(column.type)).take(np.arange(len(column)))
        offsets = integers(column.offsets).astype(np.int64)
    first = int(offsets[0])
    return column, offsets - first, first, int(offsets[-1]) - first


def _check_offsets(column: pa.Array, offsets: npt.NDArray[np.int64]) -> None:
    items = len(column.values)
    if hasattr(column, "keys"):  # of all entries, of which a slice may be meant; Arrow aborts where they end before it
        items = min(items, min(len(column.keys), len(column.items)) - column.values.offset)
    if offsets[0] < 0 or offsets[-1] > items or (np.diff(offsets) < 0).any():
        raise ValueError("list offsets lie outside the items")
