# SPDX-License-Identifier: Apache-2.0
"""Rows of a frame joined with the messages that carry their keys."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    BinaryType,
    CharType,
    IntegralType,
    NullType,
    StringType,
    StructType,
    VarcharType,
)

from rmq.config import StoreConfig
from rmq.scan import checked_columns
from rmq.spark.functions import MESSAGE_COLUMNS, PIECE_BYTES, Probe, as_text, readable_keys, struct_of
from rmq.spark.opened import check_frame
from rmq.spark.partitions import arrow_schema
from rmq.spark.schema import in_pieces, native_batch

PAIRS = 65_536  # of a row and a message, made at a time
Numbers = npt.NDArray[np.int64]


def lookup_join(df: DataFrame, path: str | os.PathLike[str], topic: str, *, key: str,
                columns: Sequence[str] = MESSAGE_COLUMNS, limit: int | None = None, begin: Any = None, end: Any = None,
                config: StoreConfig | None = None) -> DataFrame:  # fmt: skip
    """The rows of df joined (inner) with the messages that carry the row's key: one row for each pair.

    Cost: one probe of all index files for a batch of rows, one record read for each candidate. No shuffle.
    Raises ValueError when df has no column `key`, or one that is named like a column of `columns`, by
    spark.sql.caseSensitive.
    """
    check_frame(df)
    names = checked_columns(columns)
    if key not in df.columns:
        raise ValueError(f"key: df has no column {key!r}; it has {', '.join(df.columns)}")
    kind = df.schema[key].dataType
    if not isinstance(kind, StringType | CharType | VarcharType | BinaryType | IntegralType | NullType):
        raise TypeError(f"key: column {key!r} must be string, binary or integer, not {kind.simpleString()}: cast it")
    as_spark = str if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true" else str.lower
    both = sorted(column for column in df.columns if as_spark(column) in set(map(as_spark, names)))
    if both:
        raise ValueError(f"columns: df has {', '.join(both)} too; rename them first")
    probe = Probe(path, topic, begin, end, limit, config)
    added = struct_of(names)
    schema = StructType([*df.schema.fields, *added.fields])

    def join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        target = arrow_schema(added)
        for batch in batches:
            keys = as_text(batch.column(key))
            asked = pc.is_valid(keys)
            readable = readable_keys(keys)
            numbers = pc.indices_nonzero(asked if readable is None else pc.and_(asked, readable))
            texts = keys.take(numbers).dictionary_encode()  # a key of many rows is asked for once
            holders = numbers.to_numpy()[np.argsort(texts.indices, kind="stable")]
            counts = np.bincount(texts.indices, minlength=len(texts.dictionary))
            sizes, is_repeated = _row_sizes(batch), len(texts.dictionary) < len(texts)
            for found, places in probe.matches(texts.dictionary, names):
                first = 0
                for part in in_pieces(found, PIECE_BYTES):
                    last = first + len(part) if names else len(places)
                    more = _row_sizes(part) if is_repeated and names else np.zeros(last - first, np.int64)
                    for messages, rows in _pairs(places[first:last], counts, holders):
                        for begin, end in _runs(sizes[rows] + more[messages], PIECE_BYTES):
                            left = batch.take(pa.array(rows[begin:end]))
                            right = native_batch(_chosen(part, messages[begin:end]), target, probe.path)
                            yield _beside(left, right)
                    first = last

    return df.mapInArrow(join, schema)


def _beside(left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*left.columns, *right.columns], names=[*left.schema.names, *right.schema.names])


def _row_sizes(batch: pa.RecordBatch) -> Numbers:
    """About how many bytes each row has."""
    sizes = np.full(len(batch), 1, np.int64)
    for column in batch.columns if len(batch) else ():
        if column.type in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        elif pa.types.is_nested(column.type):
            sizes += np.array([column.slice(row, 1).nbytes for row in range(len(column))], np.int64)
        else:
            sizes += column.nbytes // len(column)
    return sizes


def _runs(sizes: Numbers, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that have at most so many bytes together, or are one row."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield begin, end
        begin = end


def _pairs(places: Numbers, counts: Numbers, holders: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Messages, and for each the rows that hold its key: numbers of both, some thousand pairs at a time, one message's
    at least. places: key of each message. counts, holders: how many rows hold each key, and these, key by key.
    """
    firsts = np.cumsum(counts) - counts
    for begin, end in _runs(counts[places], PAIRS):
        asked = places[begin:end]
        many = counts[asked]
        messages = np.repeat(np.arange(begin, end), many)
        within = np.arange(len(messages)) - np.repeat(np.cumsum(many) - many, many)
        yield messages, holders[np.repeat(firsts[asked], many) + within]


def _chosen(batch: pa.RecordBatch, numbers: Numbers) -> pa.RecordBatch:
    """Rows by ascending numbers without gaps; a slice when none comes twice."""
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    is_slice = last - first == len(numbers) or not batch.num_columns
    return batch.slice(first, last - first) if is_slice else batch.take(pa.array(numbers))
