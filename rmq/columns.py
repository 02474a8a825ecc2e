# SPDX-License-Identifier: Apache-2.0
"""Arrow tables as put_many takes them: names, types and nulls of their columns are settled here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._columns import KINDS
from rmq._core._message import check_topic, parse_host
from rmq._core._putbatch import PutBatch
from rmq._core._putrow import PutRules
from rmq._core._textcolumn import TextColumn
from rmq.arrays import NO_BYTES, flags, integers, list_starts, offset_size, text_column
from rmq.config import StoreConfig
from rmq.errors import IllegalMessageError

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT = ("topic", "tags", "uniq_key", "born_host", "store_host")
_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset",
            "born_timestamp")  # fmt: skip
_ACCEPTED = {*_TEXT, *_NUMBERS, "body", "raw_body", "keys", "properties", "raw_properties"}
_ENCODED = ("keys", "tags", "uniq_key", "properties")  # what raw_properties stands for
_BYTES = ("body", "raw_body", "raw_properties")  # what may be binary
_INDEX_COLUMN = re.compile(r"__index_level_\d+__")  # what pandas adds for an index without a name
_TICKS_PER_MS = {"ms": 1, "us": 1000, "ns": 1_000_000}
_PLAIN_FLAGS = ~(L.SYS_FLAG_COMPRESSED | L.SYS_FLAG_COMPRESSION_MASK)


def put_rules(config: StoreConfig) -> PutRules:
    """What a store of this config takes. ValueError for a store_host that is none."""
    return PutRules(max_message_size=config.max_message_size, max_record_size=config.max_record_size,
                    allow_v2=config.allows_v2_records, allow_ipv6=config.allows_ipv6_hosts,
                    append_crc=config.enabled_append_prop_crc, drop_last_separator=config.drops_last_separator,
                    store_host=config.store_host)  # fmt: skip


def check_queue_id(queue_id: int | None) -> None:
    """TypeError, ValueError for what is no queue id of all rows."""
    if queue_id is not None and (isinstance(queue_id, bool) or not isinstance(queue_id, int | np.integer)):
        raise TypeError(f"queue_id must be int, got {type(queue_id).__name__}")
    if queue_id is not None and not 0 <= queue_id <= 0x7FFFFFFF:
        raise ValueError(f"queue_id must lie in [0, {0x7FFFFFFF}], got {queue_id}")


class ColumnReader:
    """Checks a table's columns once, then loads its batches. ValueError, TypeError name the column."""

    def __init__(self, schema: pa.Schema, *, topic: str | None, queue_id: int | None,
                 columns: Mapping[str, str] | None) -> None:  # fmt: skip
        """columns: message field -> column name, for those that are named otherwise."""
        from pyarrow.types import is_dictionary

        found, types = schema.names, schema.types
        if columns is not None and not isinstance(columns, Mapping):
            raise TypeError(f"columns must be a mapping, got {type(columns).__name__}")
        columns = columns or {}
        for field, name in columns.items():
            if field not in _ACCEPTED:
                known = ", ".join(sorted(_ACCEPTED))
                raise ValueError(f"columns: no message field {field!r}; there are: {known}")
            if name not in found:
                raise ValueError(f"columns: the table has no column {name!r}")
        names = {**{name: name for name in found if name in KINDS and name not in columns}, **columns}
        unknown = sorted(name for name in {*found} - {*names.values()} if not _INDEX_COLUMN.fullmatch(name))
        if unknown:
            reason = "stands beside the one that columns= names" if unknown[0] in KINDS else "is no message field"
            raise ValueError(f"column {unknown[0]!r} {reason}; map it with columns= or leave it out")
        if len({*found}) != len(found):
            raise ValueError(f"column names repeat: {next(name for name in found if found.count(name) > 1)!r}")
        self._places = {field: found.index(name) for field, name in names.items()}
        self._numbered = [field for field in _NUMBERS if field in self._places]
        self._coded = [field for field, place in self._places.items()
                       if field in _ACCEPTED and field not in _NUMBERS and is_dictionary(types[place])]
        self._widths = {field: 0 if field in _NUMBERS else offset_size(types[place], field in _BYTES)
                        for field, place in self._places.items()}  # fmt: skip
        self._topic = topic
        self._constant: TextColumn | None = None
        self._queue_id = queue_id
        if topic is not None:
            encoded = check_topic(topic)
            self._constant = TextColumn(np.array([0, len(encoded)]), encoded, NO_BYTES)
        elif "topic" not in names:
            raise ValueError("column 'topic' is missing, and no topic= is given")
        if "raw_body" not in names and "body" not in names:
            raise ValueError("column 'body' is missing")
        check_queue_id(queue_id)
        metadata = schema.metadata or {}
        self._is_stored = metadata.get(b"rmq.body") in (b"plain", b"raw")  # by a scan
        self._is_plain = "raw_body" not in names and metadata.get(b"rmq.body") == b"plain"

    def chunk_ends(self, batch: pa.RecordBatch, rows: int, limit: int) -> Iterator[int]:
        """Where chunks of so many rows end; sooner where dictionaries would make more bytes than the limit of them."""
        count, first = batch.num_rows, 0
        if not self._coded:
            yield from [*range(rows, count, rows), count] if count else ()
            return
        coded = [(batch.column(self._places[field]), field) for field in self._coded]
        sizes = [_sizes(column, field) for column, field in coded
                 if column.dictionary.get_total_buffer_size() * min(rows, count) > limit]  # fmt: skip
        while first < count:
            end = min(first + rows, count)
            for column in sizes:
                end = first + max(1, int(np.cumsum(column[first:end]).searchsorted(limit, "right")))
            yield end
            first = end

    def load(self, batch: pa.RecordBatch, into: PutBatch) -> None:
        """Check all rows of one record batch and take them. IllegalMessageError with .row."""
        raw = self._text(batch, "raw_properties")
        if raw is not None:
            self._check_raw(batch)
        keys, key_lists = self._keys(batch) if raw is None else (None, None)
        names, values, maps = self._properties(batch) if raw is None else (None, None, None)
        topic = self._constant if self._topic is not None else self._text(batch, "topic")
        body = self._text(batch, "raw_body" if "raw_body" in self._places else "body")
        assert topic is not None
        assert body is not None
        into.load_columns(
            batch.num_rows,
            topic=topic,
            body=body,
            keys=keys,
            key_lists=key_lists,
            tags=self._text(batch, "tags") if raw is None else None,
            uniq_key=self._text(batch, "uniq_key") if raw is None else None,
            names=names,
            values=values,
            maps=maps,
            raw_properties=raw,
            numbers=self._numbers(batch),
            hosts=self._hosts(batch),
            is_stored=self._is_stored,
        )

    def _check_raw(self, batch: pa.RecordBatch) -> None:
        """Where raw_properties is null, nothing may stand beside it: it would be left out."""
        import pyarrow as pa

        raw = _as_text(self._known(batch, "raw_properties"), "raw_properties")
        if not raw.null_count:
            return
        missing = flags(raw.is_null())
        for field in _ENCODED:
            column = self._column(batch, field)
            if column is None:
                continue
            is_given = flags(column.is_valid())
            if _is_list(column.type) or pa.types.is_map(column.type):
                is_given = is_given & (np.diff(list_starts(column)[1]) > 0)
            if (missing & is_given).any():
                row = int(np.flatnonzero(missing & is_given)[0])
                raise IllegalMessageError(f"raw_properties is null and {field} is not: the table's rows have one "
                                          "or the other", row=row)  # fmt: skip

    def _column(self, batch: pa.RecordBatch, field: str) -> pa.Array | None:
        return self._known(batch, field) if field in self._places else None

    def _known(self, batch: pa.RecordBatch, field: str) -> pa.Array:
        """A column that is there. ValueError for one of other rows than the batch: it comes from another library."""
        column = batch.column(self._places[field])
        if len(column) != batch.num_rows:
            raise ValueError(f"column {field!r} has {len(column)} rows, the table {batch.num_rows}")
        return column

    def _text(self, batch: pa.RecordBatch, field: str) -> TextColumn | None:
        if field not in self._places:
            return None
        column, width = self._known(batch, field), self._widths[field]
        return text_column(column if width else _as_text(column, field), width)

    def _keys(self, batch: pa.RecordBatch) -> tuple[TextColumn | None, npt.NDArray[np.int64] | None]:
        if "keys" not in self._places or self._widths["keys"]:
            return self._text(batch, "keys"), None
        import pyarrow as pa

        column = self._known(batch, "keys")
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.large_list(column.type.value_type))
        if _is_list(column.type):
            column, starts, first, count = list_starts(column)
            keys = _as_text(column.values.slice(first, count), "keys")
            # One key in each list: as a column of keys, of which properties are made in less time.
            is_one_each = count == len(starts) - 1 and not keys.null_count and bool((np.diff(starts) == 1).all())
            return text_column(keys), None if is_one_each else starts
        return text_column(_as_text(column, "keys")), None

    def _properties(self, batch: pa.RecordBatch) -> tuple[TextColumn | None, TextColumn | None,
                                                          npt.NDArray[np.int64] | None]:  # fmt: skip
        column = self._column(batch, "properties")
        if column is None:
            return None, None, None
        import pyarrow as pa

        if pa.types.is_null(column.type):
            return None, None, None
        if _is_list(column.type) and pa.types.is_null(column.type.value_type) and not list_starts(column)[3]:
            return None, None, None  # pandas knows no type of what is nowhere
        if _is_list(column.type) and _is_list(column.type.value_type):
            return _pairs(column)
        if not pa.types.is_map(column.type):
            raise TypeError(f"column 'properties' must be a map of strings, got {column.type}")
        column, starts, first, count = list_starts(column)
        entries = column.values  # whose slice the map's own `keys` and `items` pass over
        names, values = (text_column(_as_text(entries.field(at).slice(first, count), "properties")) for at in (0, 1))
        return names, values, starts

    def _numbers(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[np.int64]]:
        numbers: dict[str, npt.NDArray[np.int64]] = {}
        if self._queue_id is not None:
            numbers["queue_id"] = np.full(batch.num_rows, self._queue_id, np.int64)
        if self._numbered:
            import pyarrow as pa
        for field in self._numbered:
            if field in numbers:
                continue
            column = self._known(batch, field)
            kind, ticks = column.type, 1
            if pa.types.is_null(kind) and field == "born_timestamp":
                continue  # all those of the put
            if pa.types.is_timestamp(kind) and field == "born_timestamp":
                if kind.tz is None:
                    raise ValueError("column 'born_timestamp' must carry a time zone: "
                                     "naive times say no point in time")  # fmt: skip
                if kind.unit == "s":  # may not fit in 64 bits of ms
                    column = _cast(column, pa.timestamp("ms", kind.tz), field)
                ticks = _TICKS_PER_MS[column.type.unit]
            elif not pa.types.is_integer(kind):
                others = " (ms) or timestamps with a time zone" if field == "born_timestamp" else ""
                raise TypeError(f"column {field!r} must be of integers{others}, got {kind}")
            missing = column.is_null() if column.null_count else None
            if missing is not None and field == "born_timestamp":
                column = column.fill_null(0)
            elif missing is not None:
                row = int(np.flatnonzero(flags(missing))[0])
                raise IllegalMessageError(f"column {field!r} holds nulls", row=row)
            values = integers(_cast(column, pa.int64(), field))
            if ticks > 1:
                values = values // ticks  # down, before 1970 too, as a Message does
            numbers[field] = values & _PLAIN_FLAGS if field == "sys_flag" and self._is_plain else values
            if missing is not None:
                numbers["born_now"] = integers(missing.cast("int64"))  # behind the column, whose rows it takes back
        return numbers

    def _hosts(self, batch: pa.RecordBatch) -> dict[str, tuple[list[bytes], npt.NDArray[np.int64]]]:
        hosts = {}
        for field in ("born_host", "store_host"):
            column = self._column(batch, field)
            if column is None:
                continue
            coded = _as_text(column, field).dictionary_encode()
            parsed = []
            for code, text in enumerate(coded.dictionary.cast("large_binary").to_pylist()):
                try:
                    parsed.append(parse_host(text.decode(errors="backslashreplace"), field))
                except ValueError as error:
                    row = int(np.flatnonzero(coded.indices.to_numpy(zero_copy_only=False) == code)[0])
                    raise IllegalMessageError(str(error), row=row) from None
            hosts[field] = parsed, integers(coded.indices.fill_null(-1).cast("int64"))
        return hosts


def _sizes(column: pa.DictionaryArray, field: str) -> npt.NDArray[np.int64]:
    """Bytes of each row."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(_as_text(column.dictionary, field)).cast("int64").take(column.indices)
    return integers(sizes.fill_null(0))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _pairs(column: pa.Array) -> tuple[TextColumn, TextColumn, npt.NDArray[np.int64]]:
    """Names, values and the item numbers at which rows start of lists of pairs, which pandas makes of maps."""
    column, starts, first, count = list_starts(column)
    pairs, pair_starts, first, count = list_starts(column.values.slice(first, count))
    if pairs.null_count or (np.diff(pair_starts) != 2).any():
        raise TypeError("column 'properties' must be a map of strings, or a list of pairs of them")
    texts = _as_text(pairs.values.slice(first, count), "properties")
    names, values = (text_column(texts.take(np.arange(at, count, 2))) for at in (0, 1))
    return names, values, starts


def _cast(column: pa.Array, kind: pa.DataType, field: str) -> pa.Array:
    """The column as another type; IllegalMessageError with .row for the first value that does not fit."""
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        for row in range(len(column)):
            try:
                column.slice(row, 1).cast(kind)
            except pa.ArrowInvalid:
                raise IllegalMessageError(f"{field} is outside 64 bits", row=row) from None
        raise


def _as_text(column: pa.Array, field: str) -> pa.Array:
    """The column as text or bytes with offsets; TypeError when it is neither text nor (bodies) bytes."""
    import pyarrow as pa

    binary = field in _BYTES
    if offset_size(column.type, binary):
        return column
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_binary = (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
                 or pa.types.is_fixed_size_binary(kind))  # fmt: skip
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.large_string())
    if not is_text and not (binary and is_binary):
        wanted = "binary or string" if binary else "string or list of string" if field == "keys" else "string"
        raise TypeError(f"column {field!r} must be {wanted}, got {column.type}")
    wide = pa.large_string() if is_text else pa.large_binary()
    if pa.types.is_dictionary(column.type):
        values = column.dictionary
        if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):  # of which Arrow cannot take items
            values = values.cast(wide)
        column = values.take(column.indices)
    return column.cast(wide)
