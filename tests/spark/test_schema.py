"""What crosses to Spark at a time. Its types: test_read.py. Without Spark."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType, TimestampType

import rmq
from rmq.scan import schema_of
from rmq.spark.options import ReadOptions
from rmq.spark.schema import in_pieces
from rmq.spark.source import check_subset

LARGE = 1_000_000
SIZES = [0, 1, 1000, 5, 5, 5, 2000, 0, 999, 1, 0]


@pytest.mark.parametrize("size", [1, 10, 1000, 1500, 5000, 10**6])
@pytest.mark.parametrize("first", [0, 3])
def test_pieces_are_the_batch_and_no_larger_than_asked(size: int, first: int) -> None:
    bodies = [bytes(length) for length in SIZES]
    batch = pa.record_batch({"body": bodies, "keys": [["k"]] * len(bodies)}).slice(first)
    pieces = list(in_pieces(batch, size))
    assert pa.Table.from_batches(pieces).to_pylist() == batch.to_pylist()
    assert all(piece.nbytes <= size or len(piece) == 1 for piece in pieces)
    assert len(pieces) == 1 or size < batch.nbytes


@pytest.mark.parametrize(("options", "column", "kind"), [
    ({}, "tags", StringType()), ({}, "uniq_key", StringType()), ({}, "store_timestamp", TimestampType()),
    ({"schemaMode": "kafka"}, "key", BinaryType()), ({"schemaMode": "kafka"}, "timestamp", TimestampType()),
    ({"table": "segments"}, "first_store_timestamp", TimestampType())], ids=str)  # fmt: skip
def test_what_may_be_null_cannot_be_not_null(options: dict[str, str], column: str, kind: DataType) -> None:
    asked = ReadOptions.parse({"path": "/s"} | options)
    check_subset(StructType([StructField(column, kind)]), asked)
    with pytest.raises(ValueError, match=f"schema: column '{column}' may be NULL, it cannot be NOT NULL"):
        check_subset(StructType([StructField(column, kind, False)]), asked)


def test_what_is_never_null_may_be_not_null() -> None:
    schema = StructType([StructField("topic", StringType(), False), StructField("body", BinaryType(), False)])
    check_subset(schema, ReadOptions.parse({"path": "/s"}))


def test_a_column_twice_is_an_error() -> None:
    twice = StructType([StructField("topic", StringType()), StructField("topic", StringType())])
    with pytest.raises(ValueError, match="schema: column 'topic' is there twice"):
        check_subset(twice, ReadOptions.parse({"path": "/s"}))


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_one_row_are_one_piece(count: int) -> None:
    batch = pa.record_batch({"body": [bytes(1000)] * count})
    assert list(in_pieces(batch, 1)) == [batch]


def test_messages_of_keys_come_in_batches_of_few_bytes(tmp_path: Path) -> None:

    from rmq.spark.source import MessageReader

    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", bytes([number]) * LARGE, keys="k") for number in range(20)])
    asked = {"path": str(tmp_path / "s"), "subscribe": "t", "keys": "k", "batchBytes": str(3 * LARGE)}
    reader = MessageReader(ReadOptions.parse(asked), StructType([StructField("body", BinaryType())]))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert sorted(body[0] for batch in batches for body in batch.column("body").to_pylist()) == list(range(20))
    assert all(batch.nbytes <= 3 * LARGE for batch in batches)


@pytest.mark.parametrize("how", [{"scanMode": "queue"}, {"keys": "k"}, {"keys": "k", "scanMode": "log"}], ids=str)
def test_compressed_bodies_are_unpacked_a_batch_at_a_time(tmp_path: Path, how: dict[str, str]) -> None:
    """1,000 bytes of the log are a MB in Arrow."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from rmq.spark.source import MessageReader

    body = zlib.compress(bytes(LARGE))
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", body, keys="k", sys_flag=1)] * 40)
    asked = {"path": str(tmp_path / "s"), "subscribe": "t", "batchBytes": str(2 * LARGE)} | how
    reader = MessageReader(ReadOptions.parse(asked), from_arrow_schema(schema_of(["body", "queue_offset"])))
    tracemalloc.start()
    offsets, before = [], pa.total_allocated_bytes()
    for batch in (batch for part in reader.partitions() for batch in reader.read(part)):
        assert batch.nbytes <= 2 * LARGE + 100
        assert pa.total_allocated_bytes() - before < 9 * LARGE
        offsets += batch.column("queue_offset").to_pylist()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert offsets == list(range(40))
    assert peak < 9 * LARGE
