# SPDX-License-Identifier: Apache-2.0
"""Values of Arrow columns as text: the same at every depth. One that has none is null, and why is put into `broken`."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq.arrays import flags, integers
from rmq.cli.texts import NO_TEXT, NULL, as_text, is_bytes, leave_out

_WHOLE_MINUTES_S = 63_593_070  # from then on each zone's offset has no seconds; Africa/Monrovia's was the last
_OF_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_S = 86_400
_FOUR_DIGITS = range(-62_167_132_800, 253_402_214_400)  # seconds of the years 0 to 9999, less a day for time zones
_WRITTEN_S = (-1_096_193_779_200, 971_890_963_200)  # seconds of the years -32767 to 32767, which Arrow has texts of
_INT64 = 2**63
_OFFSET = re.compile(r"([+-])(\d\d):(\d\d)", re.ASCII)


def readable(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """The column without a dictionary or an extension; text is large_string, and UTF-8."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return readable(column.dictionary_decode(), name, broken)
    if isinstance(kind, pa.BaseExtensionType):
        return readable(_of_extension(column), name, broken)
    return _utf8(column, name, broken) if _is_text(kind) else column


def written(column: pa.Array, name: str, broken: dict[int, str]) -> tuple[pa.Array, bool]:
    """(text of readable values that are not nested, whether JSON has it between quotes); what is null stays null."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.large_string()), False
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column.cast(pa.large_string()), NULL), False
    if pa.types.is_timestamp(kind):
        return _iso_times(_in_range(column, name, broken)), True
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return _in_range(column, name, broken).cast(pa.large_string()), True
    if pa.types.is_duration(kind):
        return _durations(column, name, broken), True
    if is_bytes(kind):
        return _strings(None if value is None else value.hex() for value in column.to_pylist()), True
    return column.cast(pa.large_string()), True


def repeated_field(schema: pa.Schema, names: list[str] | None) -> str | None:
    """What to say when a struct in a named column (None: in any) has two fields of one name: a JSON object cannot."""
    for field in schema:
        double = _double(field.type) if names is None or field.name in names else None
        if double is not None:
            return f"a struct in {field.name!r} repeats the field {double!r}"
    return None


def nests_dictionary(schema: pa.Schema) -> bool:
    """Whether lists, structs or maps hold a dictionary: pyarrow makes no batch of several row groups of these."""
    return any("dictionary<" in str(kind) and not pa.types.is_dictionary(kind) for kind in schema.types)


def _double(kind: pa.DataType) -> str | None:
    if pa.types.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        inner = [kind.field(place).type for place in range(kind.num_fields)]
    else:
        # An extension is read as what stores it; a map's items are pairs, so its names do not matter.
        parts = ("key_type", "item_type") if pa.types.is_map(kind) else ("storage_type", "value_type")
        names, inner = [], [getattr(kind, part) for part in parts if hasattr(kind, part)]
    double = [name for name in names if names.count(name) > 1]
    return next((name for name in [*double, *map(_double, inner)] if name is not None), None)


def _of_extension(column: pa.Array) -> pa.Array:
    name, stored = column.type.extension_name, column.storage
    if name == "arrow.uuid":
        return _strings(None if value is None else str(uuid.UUID(bytes=value)) for value in stored.to_pylist())
    return stored.cast(pa.bool_()) if name == "arrow.bool8" else stored


def _utf8(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    text = column.cast(pa.large_string())
    data = text.buffers()[2]
    if data is None or not data.size or np.frombuffer(data, np.int8).min() >= 0:  # ASCII: known in a tenth of the time
        return text
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return as_text(text.cast(pa.large_binary()), name, broken)
    return text


def _in_range(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """Without the times that Arrow would write no text of, or a garbled one."""
    low, high = _range(column.type)
    numbers = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    extremes = [value for value in pc.min_max(numbers).as_py().values() if value is not None]
    if all(low <= value < high for value in extremes):
        return column
    outside = pc.or_(pc.less(numbers, low), pc.greater_equal(numbers, high))
    leave_out(outside, f"{name} is out of range", broken)
    return pc.if_else(outside, pa.nulls(1, column.type)[0], column)


def _range(kind: pa.DataType) -> tuple[int, int]:
    """The first value that has a text, and the one behind the last."""
    if pa.types.is_date32(kind):
        return _WRITTEN_S[0] // _DAY_S, _WRITTEN_S[1] // _DAY_S
    if pa.types.is_date64(kind):
        return _WRITTEN_S[0] * 1000, _WRITTEN_S[1] * 1000
    units = _OF_A_SECOND[kind.unit]
    if pa.types.is_time(kind):
        return 0, _DAY_S * units
    # Arrow adds the offset of a zone, which is less than a day, without a look at what becomes of the sum.
    shift = 0 if kind.tz in (None, "UTC") else _DAY_S * units
    return max(_WRITTEN_S[0] * units, -_INT64) + shift, min(_WRITTEN_S[1] * units, _INT64) - shift


def _iso_times(column: pa.Array) -> pa.Array:
    """Timestamps in ISO 8601: Arrow puts a space between date and time, and writes a zone as +0900, UTC as Z."""
    units, zone = _OF_A_SECOND[column.type.unit], column.type.tz
    numbers = column.cast(pa.int64())
    seconds = [value // units for value in pc.min_max(numbers).as_py().values() if value is not None]
    if offset := _OFFSET.fullmatch(zone or ""):  # which pyarrow before 22 does not take for a zone
        minutes = int(offset[1] + offset[2]) * 60 + int(offset[1] + offset[3])
        moved = pc.add(numbers, minutes * 60 * units).cast(pa.timestamp(column.type.unit))
        texts = pc.binary_join_element_wise(moved.cast(pa.large_string()), pa.scalar(zone, pa.large_string()), NO_TEXT)
    else:
        texts = column.cast(pa.large_string())
        if zone not in (None, "UTC"):
            texts = pc.binary_replace_slice(texts, -2, -2, ":")
            if min(seconds, default=0) < _WHOLE_MINUTES_S:
                texts = _with_odd_seconds(column, texts, units)
    if all(second in _FOUR_DIGITS for second in seconds):  # then it is always the eleventh character, found in no time
        return pc.binary_replace_slice(texts, 10, 11, "T")
    return pc.replace_substring(texts, " ", "T")


def _with_odd_seconds(column: pa.Array, texts: pa.Array, units: int) -> pa.Array:
    """Offsets that are no whole minutes, of zones in earlier times, with their seconds, which Arrow leaves out."""
    offsets = pc.subtract(pc.local_timestamp(column).cast(pa.int64()), column.cast(pa.int64()))
    valid = flags(offsets.is_valid())
    seconds = np.zeros(len(column), np.int64)
    seconds[valid] = np.abs(integers(offsets.drop_null())) // units % 60
    if not seconds.any():
        return texts
    return _strings(f"{text}:{odd:02}" if odd else text
                    for text, odd in zip(texts.to_pylist(), seconds.tolist(), strict=True))  # fmt: skip


def _durations(column: pa.Array, name: str, broken: dict[int, str]) -> pa.Array:
    """As Python's timedelta is written, with nine digits where six do not do."""
    scale = 10**9 // _OF_A_SECOND[column.type.unit]
    texts: list[str | None] = []
    for row, value in enumerate(column.cast(pa.int64()).to_pylist()):
        try:
            texts.append(None if value is None else _duration(value * scale))
        except OverflowError:
            texts.append(None)
            broken.setdefault(row, f"{name} is out of range")
    return pa.array(texts, pa.large_string())


def _duration(nanoseconds: int) -> str:
    """OverflowError for one that timedelta cannot hold."""
    microseconds, rest = divmod(nanoseconds, 1000)
    text = str(datetime.timedelta(microseconds=microseconds))
    if not rest:
        return text
    return f"{text}{'' if '.' in text else '.000000'}{rest:03}"


def _strings(values: Iterator[str | None]) -> pa.Array:
    return pa.array(list(values), pa.large_string())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
