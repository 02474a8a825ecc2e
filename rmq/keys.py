# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass as keys and numbers of index calls, and how answers go back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from rmq._core._javahash import hash_str_keys, hash_utf8_keys, in_order
from rmq._core._message import to_ms
from rmq.arrays import number_array

if TYPE_CHECKING:
    import pyarrow as pa

Mode = Literal["r", "r+", "a", "x"]  # of open: read only, existing, created when missing, new
MAX_ANSWERS = 2**31 - 1
INT64_MAX = 2**63 - 1
HASHED_TOGETHER = 32_000  # keys of a column: their hashes stay in the cache, and in memory that malloc keeps
MIN_MS, MAX_MS = -(2**63), INT64_MAX  # a time that is left open


def time_range(begin: Any, end: Any) -> tuple[int, int]:
    """Times in ms, both inclusive, of int ms or aware datetimes; None: left open. TypeError, ValueError."""
    return MIN_MS if begin is None else to_ms(begin, "begin", True), MAX_MS if end is None else to_ms(end, "end")


def hash_keys(keys: Any, topic: str | None = None) -> npt.NDArray[np.int32]:
    """Index key hashes of keys: list of str, numpy S/U/object array, Arrow string array of any kind.

    topic: hash `topic#key`; None: the keys are whole index keys. TypeError and ValueError name the item.
    """
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys must be a sequence of str, not one {type(keys).__name__}")
    if isinstance(keys, np.ndarray):
        keys = decoded_items(keys)
    elif is_arrow(keys):
        return hash_utf8_keys(*_utf8_column(keys), topic)
    elif not isinstance(keys, Iterable):
        raise TypeError(f"keys must be a sequence of str, got {type(keys).__name__}")
    return hash_str_keys(keys if type(keys) is list else list(keys), topic)


def is_arrow(values: Any) -> bool:
    """Whether values come by an Arrow C interface."""
    return hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_c_stream__")


def hash_parts(keys: Any) -> tuple[int, Iterable[npt.NDArray[np.int32]]]:
    """How many keys there are, and hash_keys of them, an Arrow array's in parts. All are checked before the first."""
    if not is_arrow(keys):
        hashes = hash_keys(keys)
        return len(hashes), (hashes,)
    starts, data = _utf8_column(keys)
    if not in_order(starts, len(data)):
        hash_utf8_keys(starts, data)  # names the first that is not
    count = len(starts) - 1
    return count, (hash_utf8_keys(starts[first : first + HASHED_TOGETHER + 1], data)
                   for first in range(0, count, HASHED_TOGETHER))  # fmt: skip


def decoded_items(array: npt.NDArray[Any]) -> list[Any]:
    """Items of a numpy text array as a list. TypeError for another array; ValueError for bytes that are not UTF-8."""
    if array.ndim != 1 or (array.size and array.dtype.kind not in "SUTO"):
        raise TypeError(f"keys must be one-dimensional text, got numpy {array.dtype} of {array.ndim} dimensions")
    items: list[Any] = array.tolist()
    for number, item in enumerate(items):
        if isinstance(item, bytes):
            try:
                items[number] = item.decode()
            except UnicodeDecodeError:
                raise ValueError(f"keys[{number}] is not UTF-8") from None
    return items


def _one_dimensional(values: Any, name: str) -> npt.NDArray[Any]:
    listed = list(values) if isinstance(values, Iterator) else values
    try:
        array = np.asarray(listed)
        if array.dtype.kind == "f" and not hasattr(listed, "dtype"):  # of ints outside 64 bits, too
            array = np.asarray(listed, object)
    except ValueError:
        raise ValueError(f"{name} must be one-dimensional") from None
    if array.ndim == 0:
        raise TypeError(f"{name} must be a sequence of numbers, got {type(values).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional")
    return array


def int64_array(values: Any, name: str) -> npt.NDArray[np.int64]:
    """Integers as an int64 array; TypeError and ValueError with the argument's name."""
    array = _one_dimensional(values, name)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind == "O":
        items = array.tolist()
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int | np.integer):
                raise TypeError(f"{name} must be integers, got {type(item).__name__}")
        if not -INT64_MAX - 1 <= min(items) <= max(items) <= INT64_MAX:
            raise ValueError(f"{name} holds a number outside 64 bits")
        return np.array(items, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.max() > INT64_MAX:
        raise ValueError(f"{name} holds a number outside 64 bits")
    return np.ascontiguousarray(array, dtype=np.int64)


def ms_array(values: Any, name: str, up: bool = False) -> npt.NDArray[np.int64]:
    """int64_array of ms since 1970; aware datetimes may be among them, down or `up` to whole ms."""
    array = _one_dimensional(values, name)
    if array.dtype.kind == "O":
        return int64_array([to_ms(item, name, up) for item in array.tolist()], name)
    return int64_array(array, name)


def checked_max_num(max_num: Any) -> int:
    """A limit on answers: int >= 0, at most MAX_ANSWERS."""
    return min(checked_int(max_num, "max_num", least=0), MAX_ANSWERS)


def _utf8_column(keys: Any) -> tuple[npt.NDArray[np.int32] | npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets, one more than keys, and data of an Arrow string array of any kind. TypeError, ValueError."""
    import pyarrow as pa

    if hasattr(keys, "combine_chunks") and not isinstance(keys, pa.RecordBatch | pa.Table):
        keys = keys.combine_chunks()
    elif hasattr(keys, "__arrow_c_stream__") and not isinstance(keys, pa.Array):
        keys = pa.chunked_array(keys).combine_chunks()
    array = keys if isinstance(keys, pa.Array) else pa.array(keys)
    if pa.types.is_run_end_encoded(array.type):
        import pyarrow.compute as pc

        array = pc.run_end_decode(array)
    if pa.types.is_null(array.type):  # what has no values has no type
        array = array.cast(pa.string())
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise TypeError(f"keys must be an Arrow string array, got {array.type}")
    if pa.types.is_dictionary(array.type):  # by its values: Arrow casts no dictionary of views
        array = array.dictionary.cast(pa.large_string()).take(array.indices)
    elif not pa.types.is_string(array.type):
        array = array.cast(pa.large_string())
    if array.null_count:  # asked of the plain array: a dictionary may hold null values
        raise ValueError(f"keys hold {array.null_count} nulls")
    _, offsets, data = array.buffers()
    if len(array) == 0:
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    width = np.dtype(np.int32 if pa.types.is_string(array.type) else np.int64)
    starts = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize)
    return starts, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def list_array(counts: npt.NDArray[np.integer[Any]], values: npt.NDArray[np.int64]) -> pa.ListArray:
    """Arrow list<int64> with counts[i] values in row i, and no others."""
    if len(values) > MAX_ANSWERS:
        raise ValueError("more than 2**31 answers in one call: ask for fewer keys")
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, dtype=np.int32, out=offsets[1:])
    return lists_of(offsets, values)


def lists_of(offsets: npt.NDArray[np.int32], values: npt.NDArray[np.int64]) -> pa.ListArray:
    """Arrow list<int64> with values[offsets[i] : offsets[i + 1]] in row i; borrows both."""
    import pyarrow as pa

    # Of the buffers: pa.array looks at every kind of thing that it might be given, at each call.
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(offsets) - 1, [None, pa.py_buffer(offsets)],
                                 0, 0, [number_array(values)])  # fmt: skip


def key_list(keys: Any) -> list[str]:
    """Keys as a list of str; TypeError and ValueError name the item."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys must be a sequence of str, not one {type(keys).__name__}")
    is_column = is_arrow(keys)
    if is_column:
        import pyarrow as pa

        keys = _listed(keys if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.chunked_array(keys)
                       if hasattr(keys, "__arrow_c_stream__") else pa.array(keys), "keys")  # fmt: skip
    elif isinstance(keys, np.ndarray):
        keys = decoded_items(keys)
    elif not isinstance(keys, Iterable):
        raise TypeError(f"keys must be a sequence of str, got {type(keys).__name__}")
    items: list[str] = list(keys)
    for number, key in enumerate(items if set(map(type, items)) - {str} else ()):
        if key is None and is_column:
            raise ValueError(f"keys[{number}] is null")
        if not isinstance(key, str):
            raise TypeError(f"keys[{number}] must be str, got {type(key).__name__}")
    return items


def _listed(array: Any, name: str) -> list[Any]:
    """Items of an Arrow array; ValueError for text that is not UTF-8."""
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        raise ValueError(f"{name} holds text that is not UTF-8") from None


def check_keys(keys: list[str]) -> None:
    """TypeError, ValueError for what is no str, or has no UTF-8 form."""
    try:
        is_plain = all(map(str.isascii, keys))
    except TypeError:
        is_plain = False
    for key in () if is_plain else keys:
        encoded(key, "key")


def encoded(text: Any, name: str) -> bytes:
    """UTF-8 of a topic or key; TypeError, ValueError with the argument's name."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds a lone surrogate: it has no UTF-8 form") from None


def topic_names(topics: Any) -> list[bytes] | None:
    """Topics as records have them, None for any; TypeError, ValueError."""
    if topics is None:
        return None
    topics = _listed(topics, "topics") if hasattr(topics, "to_pylist") else topics
    if isinstance(topics, str | bytes) or not isinstance(topics, Iterable):
        raise TypeError(f"topics must be a sequence of str, got {type(topics).__name__}")
    return [encoded(topic, "topics") for topic in topics]


def times_of(value: Any, name: str, default: int, count: int) -> int | npt.NDArray[np.int64]:
    """A bound in ms of all keys, or of each of `count` keys; TypeError, ValueError with the argument's name."""
    if not isinstance(value, np.ndarray):
        return default if value is None else to_ms(value, name, name == "begin")
    times = ms_array(value, name, name == "begin")
    if len(times) != count:
        raise ValueError(f"{name} must have a time for each of {count} keys, got {len(times)}")
    return times


def check_open_mode(mode: Any) -> None:
    """ValueError for what is none of Mode."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be r, r+, a or x, got {mode!r}")


def check_bools(**switches: Any) -> None:
    """TypeError with the argument's name for what is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be bool, got {type(value).__name__}")


def checked_int(value: Any, name: str, least: int | None = None) -> int:
    """A number as int; TypeError, ValueError with the argument's name."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name} must {f'be at least {least}' if least else 'not be negative'}, got {value}")
    return int(value)


def int64_offset(value: Any, name: str) -> int:
    """An offset as int; TypeError, ValueError with the argument's name."""
    number = checked_int(value, name)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} is outside 64 bits")
    return number


def checked_limit(limit: Any) -> int | None:
    """A limit on messages: int >= 1, or None for all."""
    return None if limit is None else checked_int(limit, "limit", least=1)
