"""The option io, in the address space of a worker that spark.executor.pyspark.memory has limited."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import in_child
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

import rmq
from rmq.spark import opened
from rmq.spark.opened import ExecutorError
from rmq.spark.options import ReadOptions
from rmq.spark.source import MessageReader
from rmq.windows import WindowedStore

SETTING = r"Cannot allocate memory; spark\.executor\.pyspark\.memory"
ROOM = 200 * 2**20  # above what the process has; a segment and an index file have more
COUNT = 3000
SCHEMA = StructType([StructField("phy_offset", LongType()), StructField("body", BinaryType())])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few messages in a segment of nearly 1 GiB, and an index file of 420 MB."""
    path = tmp_path_factory.mktemp("large") / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=2**30 - 4096)) as store:
        store.put_many(rmq.Message("orders", b"%d" % number * 50, keys=[f"o-{number}"]) for number in range(COUNT))
    return path


def planned(path: Path, **options: str) -> tuple[MessageReader, list[Any]]:
    reader = MessageReader(ReadOptions.parse({"path": str(path), "subscribe": "orders"} | options), SCHEMA)
    return reader, reader.partitions()


def rows(reader: MessageReader, parts: list[Any]) -> list[dict[str, Any]]:
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def limited(work: Callable[[], Any]) -> Any:
    """What a child gives that may take ROOM more than it has now."""
    return in_child(lambda: (limit(), work())[1])


def limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def error_of(work: Callable[[], Any]) -> str:
    with pytest.raises(ExecutorError) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize("options", [
    {}, {"minPartitions": "3"}, {"keys": "o-7,o-2999", "scanMode": "log"}, {"verifyCrc": "false"},
    {"startingOffsets": '{"orders": {"0": 2990}}', "scanMode": "queue"}], ids=str)  # fmt: skip
def test_auto_and_pread_read_what_cannot_be_mapped(large: Path, options: dict[str, str]) -> None:
    expected = rows(*planned(large, **options))
    assert expected
    plans = {io: planned(large, io=io, **options) for io in ("auto", "mmap", "pread")}
    opened.forget(str(large))
    for io in ("auto", "pread"):
        assert limited(lambda io=io: rows(*plans[io])) == expected
    message = limited(lambda: error_of(lambda: rows(*plans["mmap"])))
    assert str(large) in message
    assert re.search(SETTING, message)


def test_what_needs_maps_names_the_setting(large: Path) -> None:
    for options in ({"keys": "o-7"}, {"failOnDataLoss": "false"}):
        plan = planned(large, **options)
        opened.forget(str(large))
        assert "; spark.executor.pyspark.memory limits" in limited(lambda plan=plan: error_of(lambda: rows(*plan)))


def test_a_worker_has_one_store_for_each_way(large: Path) -> None:
    ways = {io: opened.opened(str(large), None, io) for io in ("mmap", "auto", "pread")}
    assert [isinstance(store, WindowedStore) for store in ways.values()] == [False, True, True]
    assert opened.opened(str(large)) is ways["mmap"]
    assert len(ways["auto"].query("orders", "o-7")) == 1, "the index is there when it can be"
    with pytest.raises(rmq.UnsupportedFormatError, match="opened without its index"):
        ways["pread"].query("orders", "o-7")
    opened.forget(str(large))
    assert all(store.closed for store in ways.values())


@pytest.mark.spark
def test_through_spark(spark: Any, store: Path) -> None:
    counts = {io: spark.read.format("rmq").options(io=io, subscribe="orders").load(str(store)).count()
              for io in ("auto", "mmap", "pread")}  # fmt: skip
    assert set(counts.values()) == {4000}
