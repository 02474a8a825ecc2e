# SPDX-License-Identifier: Apache-2.0
"""Reads by queue where a unit is a copy of the next one, as a rebuild leaves it: the same in any pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import rmq
from rmq.scan import schema_of
from rmq.spark.options import ReadOptions
from rmq.spark.selection import DataLossError
from rmq.spark.source import MessageReader

UNIT, COPY = 20, 4


@pytest.mark.parametrize("pieces", [{}, {"batchRows": "5"}, {"batchBytes": "1"}, {"maxRecordsPerPartition": "5"}],
                         ids=str)  # fmt: skip
def test_a_message_that_two_units_name_comes_once_and_the_missing_one_is_told(
    tmp_path: Path, pieces: dict[str, str]
) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        store.put_many([rmq.Message("t", b"x")] * 10)
    with (tmp_path / f"s/consumequeue/t/0/{0:020d}").open("r+b") as file:
        file.seek((COPY + 1) * UNIT)
        following = file.read(UNIT)
        file.seek(COPY * UNIT)
        file.write(following)

    def read(fail: str) -> list[int]:
        asked = {"path": str(tmp_path / "s"), "subscribe": "t", "scanMode": "queue", "failOnDataLoss": fail}
        reader = MessageReader(ReadOptions.parse(asked | pieces), from_arrow_schema(schema_of(["queue_offset"])))
        return [offset for part in reader.partitions() for batch in reader.read(part)
                for offset in batch.column("queue_offset").to_pylist()]  # fmt: skip

    assert read("false") == [*range(COPY), *range(COPY + 1, 10)]
    with pytest.raises(DataLossError, match=f"t queue 0 has no message {COPY + 1}"):
        read("true")
