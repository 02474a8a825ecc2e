"""Whole-store jobs: the tasks of the process pool, run by executors."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from conftest import copy_store, digests
from hostile import TOPICS, make_hostile

import rmq
from rmq.pool import Runner
from spark.orders import COUNT, TIME

pytestmark = pytest.mark.spark


def double(number: int) -> int:
    return 2 * number


def inverse(number: int) -> float:
    return 1 / number


def damaged(number: int) -> int:
    raise rmq.CorruptFileError("a", number, "reason")


def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    found = [len(body) for batch in batches for body in batch.column("body").to_pylist()]
    yield pa.RecordBatch.from_pydict({"count": [len(found)], "bytes": [sum(found)]})


def test_answers_come_in_the_order_of_items(spark: Any, tmp_path: Path) -> None:
    from rmq.spark.jobs import on_executors

    run = on_executors(spark, tmp_path)
    assert list(run(double, list(range(25)))) == list(range(0, 50, 2))
    assert list(run(double, [])) == []
    with pytest.raises(Exception, match="a: byte 7: reason"):
        list(run(damaged, [7]))


def test_an_error_that_a_second_look_may_mend_is_raised_as_it_is(spark: Any, tmp_path: Path) -> None:
    from rmq.spark.jobs import on_executors

    run = on_executors(spark, tmp_path, looks_again=True)
    with pytest.raises(rmq.CorruptFileError, match="a: byte 7: reason") as caught:
        list(run(damaged, [7]))
    assert (caught.value.path, caught.value.offset, caught.value.reason) == ("a", 7, "reason")
    assert caught.value.__notes__ == [f"in a task on host {socket.gethostname()}"]
    with pytest.raises(Exception, match="ZeroDivisionError") as other:
        list(run(inverse, [0]))
    assert not isinstance(other.value, ZeroDivisionError)  # Spark's


@pytest.mark.parametrize("name", ["verify", "rebuild"])
def test_a_log_that_is_cleaned_amid_a_job_is_looked_at_again(spark: Any, store: Path, tmp_path: Path, name: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from rmq.spark import jobs

    path = copy_store(store, tmp_path / "s")
    first = path / "commitlog" / f"{0:020d}"
    on_executors = jobs.on_executors

    def racing(*arguments: Any, **options: Any) -> Runner:
        run = on_executors(*arguments, **options)

        def cleaned(*work: Any) -> Iterator[Any]:
            first.unlink(missing_ok=True)
            return run(*work)

        return cleaned

    monkeypatch.setattr(jobs, "on_executors", racing)
    with rmq.open(path) as opened:
        count = opened.scan(begin_phy_offset=65536, columns=["phy_offset"]).read_all().num_rows
    if name == "rebuild":
        assert jobs.rebuild(spark, path, tmp_path / "new").unit_count == count
    else:
        assert jobs.verify(spark, path).record_count == count
    assert not first.exists()


def test_an_executor_that_sees_no_store_or_has_another_version_is_named(spark: Any, store: Path, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    from rmq.spark import jobs

    with pytest.raises(Exception, match=rf"ExecutorError: host \S+: {tmp_path}/nix: no store is to be read here"):
        list(jobs.on_executors(spark, tmp_path / "nix")(double, [1]))
    monkeypatch.setattr(jobs, "__version__", "0.0.0")
    with pytest.raises(Exception, match=rf"host \S+: {store}: rmq \S+ is installed here, the driver has 0\.0\.0"):
        jobs.verify(spark, str(store))


def test_only_what_the_function_yields_crosses_to_spark(spark: Any, store: Path) -> None:
    import rmq.spark

    frame = rmq.spark.scan_map(spark, str(store), sizes, "count bigint, bytes bigint", split_bytes=40_000,
                               topics=["orders"], columns=["body"])  # fmt: skip
    rows = frame.collect()
    assert frame.rdd.getNumPartitions() == len(rows) > 10
    assert sum(row["count"] for row in rows) == COUNT
    assert sum(row["bytes"] for row in rows) == sum(len(b"body %d" % number) for number in range(COUNT))


@pytest.mark.parametrize("function", [5, None, "len"])
def test_a_function_that_is_none_is_an_error_at_once(spark: Any, store: Path, function: Any) -> None:
    import rmq.spark

    with pytest.raises(TypeError, match=f"function must be callable, got {type(function).__name__}"):
        rmq.spark.scan_map(spark, store, function, "a int")


def test_what_was_cleaned_away_since_the_plan_is_damage(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    copy = copy_store(store, tmp_path / "s")
    frame, skipping = (rmq.spark.scan_map(spark, str(copy), sizes, "count bigint, bytes bigint", on_damage=how)
                       for how in ("raise", "skip"))  # fmt: skip
    (copy / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(Exception, match=r"CorruptFileError: .*the log begins at byte 65536"):
        frame.collect()
    with rmq.open(copy) as left:
        assert sum(row["count"] for row in skipping.collect()) == left.scan(columns=["phy_offset"]).read_all().num_rows


def test_a_time_range_and_an_empty_store_may_leave_no_part(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    schema = "count bigint, bytes bigint"
    assert rmq.spark.scan_map(spark, str(store), sizes, schema, end=TIME - 10**10).collect() == []
    rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)).close()
    assert rmq.spark.scan_map(spark, str(tmp_path / "s"), sizes, schema).collect() == []
    with pytest.raises(ValueError, match="nope"):
        rmq.spark.scan_map(spark, str(store), sizes, schema, columns=["nope"])


def test_queues_and_index_are_made_by_executors(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    result = rmq.spark.rebuild(spark, str(store), str(tmp_path / "new"))
    assert digests(tmp_path / "new", "consumequeue") == digests(store, "consumequeue")
    assert list(digests(tmp_path / "new", "index").values()) == list(digests(store, "index").values())
    assert result.unit_count == COUNT + 10
    again = copy_store(store, tmp_path / "again")
    shutil.rmtree(again / "consumequeue")
    assert rmq.spark.rebuild(spark, str(again)).queue_count == result.queue_count
    assert rmq.verify(again).is_sound
    with pytest.raises(FileExistsError):
        rmq.spark.rebuild(spark, str(store), str(tmp_path / "new"))


def test_export_by_executors_is_that_by_processes(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    done = rmq.spark.export(spark, str(store), str(tmp_path / "lake"), split_bytes=100_000)
    here = rmq.export(store, tmp_path / "here", processes=1, split_bytes=100_000)
    assert done.files == here.files
    assert done.row_count == COUNT + 10
    tables = [ds.dataset(tmp_path / name, partitioning="hive").to_table() for name in ("lake", "here")]
    assert tables[0].equals(tables[1])
    frame = spark.read.parquet(str(tmp_path / "lake"))
    whole = spark.read.format("rmq").load(str(store)).drop("properties")  # maps cannot be compared
    assert frame.select(whole.columns).exceptAll(whole).count() == 0
    assert frame.where("properties['n'] = '7'").first().keys == ["o-7", "c-7"]


def test_spark_reads_hostile_topics_back(spark: Any, tmp_path: Path) -> None:
    make_hostile(tmp_path / "s")
    rmq.export(tmp_path / "s", tmp_path / "lake", processes=1)
    schema = "topic string, body binary, store_timestamp timestamp, date date"
    rows = spark.read.schema(schema).parquet(str(tmp_path / "lake")).collect()
    assert sorted(row.topic for row in rows) == sorted(TOPICS)
    assert all(row.topic.encode() == bytes(row.body) and row.date == row.store_timestamp.date() for row in rows)


def test_spark_tells_the_name_of_null_from_null(spark: Any, tmp_path: Path) -> None:
    from rmq.exporting import NULL, escaped

    for topic in ("", NULL):
        place = tmp_path / "lake" / f"topic={escaped(topic)}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"body": [topic]}), place / "part.parquet")
    rows = spark.read.parquet(str(tmp_path / "lake")).collect()
    assert sorted((row.body, row.topic) for row in rows) == [("", None), (NULL, NULL)]


def test_an_export_of_damage_by_executors_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    import rmq.spark

    make_hostile(tmp_path / "s")
    segment = tmp_path / "s/commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[500:520] = bytes(20)
    segment.write_bytes(data)
    with pytest.raises(Exception, match="CorruptFileError"):
        rmq.spark.export(spark, str(tmp_path / "s"), str(tmp_path / "lake"))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_verification_by_executors_is_that_by_threads(spark: Any, store: Path, tmp_path: Path) -> None:
    import rmq.spark

    shutil.copytree(store, tmp_path / "s")
    for file, position in (("commitlog/00000000000000065536", 3000), ("checkpoint", 1),
                           ("consumequeue/orders/1/00000000000000000000", 405)):  # fmt: skip
        with open(tmp_path / "s" / file, "r+b") as damaged:
            damaged.seek(position)
            damaged.write(b"\x77" * 30)
    for path in (store, tmp_path / "s"):
        found, expected = rmq.spark.verify(spark, str(path)), rmq.verify(path)
        assert (list(found), vars(found)) == (list(expected), vars(expected))
    assert found.damage_count > 0
    assert found.derived_count > 0
