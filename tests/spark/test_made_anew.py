# SPDX-License-Identifier: Apache-2.0
"""Stores that others change below Spark: cleaned amid an append, made anew, topics too; tasks of other versions."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pyarrow as pa
import pytest
from forks import lock_of_a_broker
from pyspark.sql.pandas.types import from_arrow_schema
from test_replicas import Replica

import rmq
from rmq.parallel import plan_scan
from rmq.scan import schema_of
from rmq.spark import clean_staging, write
from rmq.spark.loading import check_new
from rmq.spark.opened import ExecutorError
from rmq.spark.options import ReadOptions
from rmq.spark.selection import DataLossError
from rmq.spark.source import MessageReader
from rmq.spark.staging import Staging, Written
from rmq.spark.stream import StreamReader

TIME = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536)
LARGE = b"x" * 1000


def reader_of(path: Path, columns: list[str], **options: str) -> MessageReader:
    asked = ReadOptions.parse({"path": str(path), **options})
    return MessageReader(asked, from_arrow_schema(schema_of(columns)))


def rows(path: Path, column: str, **options: str) -> list[Any]:
    reader = reader_of(path, [column], **options)
    return [value for part in reader.partitions() for batch in reader.read(part)
            for value in batch.column(column).to_pylist()]  # fmt: skip


def staged(path: Path, rows: int = 5) -> tuple[Staging, list[Written]]:
    job = Staging(str(path), "j1")
    job.directory.mkdir(parents=True)
    with rmq.open(job.directory / "00000.0.abc", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", LARGE)] * rows)
    return job, [Written(0, "00000.0.abc", rows)]


def clean_first(store: rmq.Store, count: int) -> None:
    for segment in sorted((store.path / "commitlog").iterdir())[:count]:
        os.utime(segment, (1, 1))
    assert store.clean().removed


def test_an_append_that_can_never_end_is_told_by_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its begin was cleaned away: what it hides would be all of the store."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", LARGE)] * 100)
    job, written = staged(path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        job.commit_single(written)
    monkeypatch.undo()
    with rmq.open(path, "r+") as store:
        store.put_many([rmq.Message("t", LARGE)] * 300)
        clean_first(store, 3)
        left = store.scan(columns=["phy_offset"]).read_all().num_rows
    for options in ({}, {"subscribe": "t", "scanMode": "queue"}):
        with pytest.raises(DataLossError, match=r"interrupted at byte .* remove the \.intent"):
            rows(path, "phy_offset", **options)
    with pytest.raises(rmq.CorruptFileError, match="remove this file to give up those that are missing"):
        clean_staging(str(path))
    job.intent.unlink()
    assert len(rows(path, "phy_offset")) == left


def test_of_a_topic_made_anew_only_the_new_messages_are_read(tmp_path: Path) -> None:
    """The log has those that a broker deleted with the topic, of the same queue offsets."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put(rmq.Message("B", b"b0"))
        store.put_many([rmq.Message("A", b"old%d" % number) for number in range(5)])
        store.put(rmq.Message("B", b"b1"))
        places = [store.put(rmq.Message("A", b"new%d" % number)).phy_offset for number in range(3)]
        store.put(rmq.Message("B", b"b2"))
    with (path / "commitlog" / f"{0:020d}").open("r+b") as log:
        for number, place in enumerate(places):
            log.seek(place + 20)
            log.write(struct.pack(">q", number))
    shutil.rmtree(path / "consumequeue")
    rmq.rebuild(path, processes=1)
    for mode in ("log", "queue", "auto"):
        found = rows(path, "body", subscribe="A,B", scanMode=mode, startingOffsets='{"A":{"0":0},"B":{"0":0}}')
        assert sorted(found) == [b"b0", b"b1", b"b2", b"new0", b"new1", b"new2"]


@pytest.mark.parametrize("first", [0, 5])
def test_a_message_behind_a_unit_that_points_too_far_is_read(tmp_path: Path, first: int) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"%d" % number) for number in range(10)])
    file = tmp_path / "s/consumequeue/T/0" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[4 * 20 : 5 * 20] = data[8 * 20 : 9 * 20]
    file.write_bytes(data)
    found = rows(tmp_path / "s", "body", subscribe="T", scanMode="queue", failOnDataLoss="false",
                 startingOffsets=f'{{"T":{{"0":{first}}}}}')  # fmt: skip
    assert {b"5", b"6", b"7", b"9"} <= set(found)
    with pytest.raises(DataLossError, match="T queue 0 has no message 5"):  # the step back tells of the one before it
        rows(tmp_path / "s", "body", subscribe="T", scanMode="queue")


def test_a_store_made_anew_since_a_plan_is_told_where_the_former_one_had_been_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", LARGE)] * 200)
        clean_first(store, 1)
    reader = reader_of(path, ["body"])
    parts = reader.partitions()
    shutil.rmtree(path)
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", LARGE)] * 300)
    with pytest.raises(DataLossError, match="made anew"):
        [*reader.read(parts[0])]


def test_an_error_behind_an_append_says_that_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would write again would write the rows twice."""
    job, written = staged(tmp_path / "s")
    close = rmq.Store.close

    def full(store: rmq.Store) -> None:
        close(store)
        if store.path == tmp_path / "s":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rmq.Store, "close", full)
    with pytest.raises(OSError, match="No space left") as caught:
        job.commit_single(written)
    assert "the append has begun" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert len(rows(tmp_path / "s", "phy_offset")) == 5


def test_what_tasks_staged_out_of_the_driver_s_sight_is_named_and_no_store_is_made(tmp_path: Path) -> None:
    job, written = staged(tmp_path / "s")
    shutil.rmtree(job.directory)
    with pytest.raises(FileNotFoundError, match="is not to be seen here: the driver and all executors need"):
        job.commit_single(written)
    assert not (tmp_path / "s/commitlog").exists()


def test_a_bulk_load_begins_in_no_directory_where_spark_has_committed(tmp_path: Path) -> None:
    """Shards without rows leave nothing but their marker."""
    Staging(str(tmp_path / "s"), "j1").commit_shards([Written(0, None, 0)])
    with pytest.raises(FileExistsError, match=r"holds rmq/spark/commits/j1\.json"):
        check_new(tmp_path / "s")


def test_a_task_on_another_version_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write.BatchWriter({"path": str(tmp_path / "s"), "topic": "t"}, from_arrow_schema(schema_of(["body"])), False)
    monkeypatch.setattr("rmq.spark.opened.__version__", "0.0.other")
    monkeypatch.setattr(write, "TaskContext", SimpleNamespace(get=lambda: None))
    with pytest.raises(ExecutorError, match=r"rmq 0\.0\.other is installed here, the driver has"):
        task.write(iter([pa.RecordBatch.from_pydict({"body": [b"x"]})]))
    assert not (tmp_path / "s").exists()


def test_a_queue_whose_messages_have_later_numbers_than_their_units_is_read_whole(tmp_path: Path) -> None:
    """As brokers of 5.3.2 and later leave one that lost a unit: batches, and streams in any steps, give each once."""
    for directory in ("commitlog", "consumequeue/T/0"):
        (tmp_path / "s" / directory).mkdir(parents=True)
    log, units = b"", b""
    for number in range(100):
        record = oracle.encode_record("T", 0, number, len(log), b"%d" % number, b"", store_timestamp=TIME + number)
        units += struct.pack(">qiq", len(log), len(record), 0) if number != 20 else b""
        log += record
    (tmp_path / "s/commitlog" / f"{0:020d}").write_bytes(log.ljust(65536, b"\0"))
    (tmp_path / "s/consumequeue/T/0" / f"{0:020d}").write_bytes(units.ljust(6_000_000, b"\0"))
    times = struct.pack(">6q", *[TIME + 10_000] * 2, 0, 0, len(log), 0)
    (tmp_path / "s/checkpoint").write_bytes(times.ljust(4096, b"\0"))
    (tmp_path / "s/lock").write_bytes(b"lock")
    (tmp_path / "conf").write_text("mappedFileSizeCommitLog=65536\n")
    expected = [b"%d" % number for number in range(100) if number != 20]  # passing over the log shows that one, too
    for mode in ("queue", "auto", "log"):
        options = {"subscribe": "T", "scanMode": mode, "brokerConf": str(tmp_path / "conf")}
        found = rows(tmp_path / "s", "body", startingOffsets='{"T":{"0":0}}', **options)
        assert [body for body in found if body != b"20"] == expected
        stream = StreamReader(ReadOptions.parse({"path": str(tmp_path / "s"), **options}),
                              from_arrow_schema(schema_of(["body"])))  # fmt: skip
        found = [body for begin, end in pairwise([0, 10, 30, 50, 70, 99])
                 for part in stream.partitions({"T": {"0": begin}}, {"T": {"0": end}})
                 for batch in stream.read(part) for body in batch.column("body").to_pylist()]  # fmt: skip
        assert [body for body in found if body != b"20"] == expected


def test_a_read_of_a_log_that_a_replica_cuts_meanwhile_is_an_error(tmp_path: Path) -> None:
    """A scan ends where the log does; what was planned of it has not come."""
    (tmp_path / "s").mkdir()
    replica = Replica(tmp_path / "s")
    (tmp_path / "conf").write_text("mappedFileSizeCommitLog=4096\n")
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096)

    def cut() -> None:
        replica.cut(3)
        replica.path.write_bytes(replica._log.ljust(4096, b"\0"))

    with lock_of_a_broker(tmp_path / "s"):
        reader = reader_of(tmp_path / "s", ["body"], batchRows="1", brokerConf=str(tmp_path / "conf"))
        begun = reader.read(reader.partitions()[0])
        next(begun)
        cut()
        with pytest.raises(DataLossError, match="by now, the read 0 to"):
            list(begun)
        replica.put(*[b"x%d" % number for number in range(6)])
        (task,) = plan_scan(tmp_path / "s", config=config, batch_rows=1)
        with rmq.open(tmp_path / "s", config=config) as store:
            batches = task.batches(store)
            next(batches)
            cut()
            with pytest.raises(rmq.CorruptFileError, match="by now the log ends at byte"):
                list(batches)


def test_a_segment_that_is_put_back_makes_no_other_store(tmp_path: Path) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("t", LARGE)] * 200)
    first = path / "commitlog" / f"{0:020d}"
    shutil.copy(first, kept)
    with rmq.open(path, "r+") as store:
        clean_first(store, 1)
    reader = reader_of(path, ["body"])
    parts = reader.partitions()
    count = sum(len(batch) for part in parts for batch in reader.read(part))
    shutil.copy(kept, first)
    assert sum(len(batch) for part in parts for batch in reader.read(part)) == count
