# SPDX-License-Identifier: Apache-2.0
"""Stores on an object store in Spark: the same rows, whole segments for a task, a cache that is bounded."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3server
from objectstore import Bucket, touch
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

import rmq
import rmq.spark
from rmq.mirror import MirroredStore
from rmq.objectcache import CacheFullError
from rmq.objects import Location, ObjectStoreError
from rmq.snapshot import Snapshot
from rmq.spark import opened as opened_stores
from rmq.spark.opened import ExecutorError, for_lookups, hash_slots, opened, using
from rmq.spark.options import ReadOptions, WriteOptions
from rmq.spark.partitions import read_partition
from rmq.spark.remote import for_table, remote_partitions, snapshots, with_uris
from rmq.spark.selection import DataLossError
from rmq.spark.source import MessageReader, stores_of
from spark.orders import COUNT, TIME

SEGMENT = 65536


# ---- without Spark and S3 ----


@pytest.fixture
def bucket(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    shutil.copytree(store, tmp_path / "bucket")
    found = Bucket(tmp_path / "bucket", tmp_path / "cache")
    monkeypatch.setattr(Location, "connect", lambda location: found.connect(location))
    return found


def asked(bucket: Bucket, **options: str) -> ReadOptions:
    given = {name.replace("fs_", "fs."): value for name, value in options.items()}
    return ReadOptions.parse({"path": "test://bucket", "fs.cacheDirectory": bucket.location.cache_directory} | given)


def planned(bucket: Bucket, **options: str) -> tuple[ReadOptions, list[Any]]:
    given = asked(bucket, **options)
    [(path, taken)] = snapshots("test://bucket", given)
    return given, remote_partitions(path, taken, given)


def rows(given: ReadOptions, parts: list[Any]) -> list[dict[str, Any]]:
    import pyarrow as pa

    target = pa.schema([("phy_offset", pa.int64()), ("queue_id", pa.int32())])
    return [row for part in parts for batch in read_partition(part, given, target) for row in batch.to_pylist()]


def test_an_error_of_a_plan_names_the_store_and_no_directory_of_the_cache(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("t", b"x")] * 10)
    asked = ReadOptions.parse({"path": "s3://b/s", "subscribe": "t", "startingOffsets": '{"t":{"0":50}}'})
    taken = Snapshot.take(Location.parse(f"file://{tmp_path}/s", {"cacheDirectory": str(tmp_path / "cache")}))
    with pytest.raises(DataLossError, match=f"^file://{tmp_path}/s: startingOffsets: t queue 0 ends at 10") as caught:
        remote_partitions(f"file://{tmp_path}/s", taken, asked)
    assert "cache" not in str(caught.value)


def test_tasks_read_whole_segments_and_each_its_own(bucket: Bucket, store: Path) -> None:
    given, parts = planned(bucket, splitBytes=str(2 * SEGMENT))
    bucket.asked.clear()
    assert all(part.split.begin % (2 * SEGMENT) == 0 for part in parts)
    found = []
    for part in parts:
        found += rows(given, [part])
        names = {name for name, _, _ in bucket.asked}
        assert len(names) <= 2
        assert bucket.asked_of("") <= 2 * SEGMENT
        bucket.asked.clear()
    with rmq.open(store) as opened_here:
        assert found == opened_here.scan(columns=["phy_offset", "queue_id"]).read_all().to_pylist()
    assert not list(Path(bucket.location.cache_directory, "open").iterdir()), "a task leaves nothing"


@pytest.mark.parametrize("options", [
    {"startingOffsets": '{"orders": {"0": 300, "1": 500, "2": -1, "3": -1}}'},
    {"assign": '{"orders": [2]}', "endingOffsets": '{"orders": {"2": 77}}'},
    {"subscribePattern": "oth.*"},
    {"subscribe": "orders", "startingTimestamp": str(TIME + 1000), "endingTimestamp": str(TIME + 1500)},
    {"subscribe": "orders", "keys": "c-7,o-107,nix"},
    {"subscribe": "orders", "keys": "c-7,o-107,nix", "scanMode": "log"},
    {"minPartitions": "3"},
], ids=str)  # fmt: skip
def test_options_choose_as_of_a_store_here(bucket: Bucket, store: Path, options: dict[str, str]) -> None:
    given, parts = planned(bucket, **options)
    local = ReadOptions.parse({"path": str(store)} | options)
    schema = StructType([StructField("phy_offset", LongType()), StructField("queue_id", IntegerType())])
    here = MessageReader(local, schema)
    expected = [row for part in here.partitions() for batch in here.read(part) for row in batch.to_pylist()]
    assert expected
    assert rows(given, parts) == expected


@pytest.mark.parametrize("is_broker_s", [False, True])
def test_the_driver_learns_the_hash_slots_with_as_little_as_it_can(bucket: Bucket, is_broker_s: bool) -> None:
    if is_broker_s:
        shutil.rmtree(bucket.root / "rmq")
    place = Snapshot.take(bucket.location).of("index")
    bucket.asked.clear()
    assert hash_slots(place, None) == 1000
    assert (bucket.asked_of("index/") > 0) == is_broker_s


@pytest.mark.parametrize("number", [2, -1], ids=["between others", "last"])
def test_a_split_without_any_segment_is_passed_over_or_told(bucket: Bucket, store: Path, number: int) -> None:
    """As of a store here."""
    segment = sorted((bucket.root / "commitlog").iterdir())[number]
    segment.unlink()
    given, parts = planned(bucket, splitBytes=str(SEGMENT), failOnDataLoss="false")
    with rmq.open(store) as whole:
        numbers = whole.scan(columns=["phy_offset", "queue_id"]).read_all().to_pylist()
    gone = range(int(segment.name), int(segment.name) + SEGMENT)
    assert rows(given, parts) == [row for row in numbers if row["phy_offset"] not in gone]
    given, parts = planned(bucket, splitBytes=str(SEGMENT))
    with pytest.raises(rmq.CorruptFileError, match=f"^test://bucket/commitlog/{segment.name}: byte 0: .*missing"):
        rows(given, parts)


@pytest.mark.parametrize("options", [{"scanMode": "queue"}, {"maxRecordsPerPartition": "5"}], ids=str)
def test_messages_one_by_one_want_a_disk(bucket: Bucket, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not for stores on object stores"):
        planned(bucket, subscribe="orders", **options)


def test_a_time_range_leaves_out_the_segments_before_it(bucket: Bucket) -> None:
    given, parts = planned(bucket, startingTimestamp=str(TIME + 4_000_000_000), subscribe="orders")
    assert rows(given, parts) == []
    assert sum(part.split.size for part in parts) <= 2 * SEGMENT


def test_what_an_append_under_way_has_written_is_not_read(bucket: Bucket, store: Path) -> None:
    commits = bucket.root / "rmq" / "spark" / "commits"
    commits.mkdir(parents=True)
    with rmq.open(store) as here:
        places = here.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
    (commits / "job.intent").write_text(f'{{"begin": {places[1000]}, "staged": []}}')
    given, parts = planned(bucket)
    assert [row["phy_offset"] for row in rows(given, parts)] == places[:1000]


def test_segments_that_were_removed_since_are_an_error_or_left_out(bucket: Bucket) -> None:
    for fail in ("true", "false"):
        given, parts = planned(bucket, failOnDataLoss=fail, splitBytes=str(SEGMENT))
        (bucket.root / "commitlog" / f"{SEGMENT:020d}").rename(bucket.root / "gone")
        if fail == "true":
            with pytest.raises(ObjectStoreError, match=f"{SEGMENT:020d}: is not there"):
                rows(given, parts)
        else:
            found = rows(given, parts)
            assert 0 < len(found) < COUNT
            assert not any(SEGMENT <= row["phy_offset"] < 2 * SEGMENT for row in found)
        (bucket.root / "gone").rename(bucket.root / "commitlog" / f"{SEGMENT:020d}")


def test_a_segment_that_was_replaced_since_is_an_error_and_never_left_out(bucket: Bucket) -> None:
    given, parts = planned(bucket, failOnDataLoss="false", splitBytes=str(SEGMENT))
    touch(bucket.root / "commitlog" / f"{SEGMENT:020d}", 5)
    with pytest.raises(ObjectStoreError, match=f"{SEGMENT:020d}: was replaced since it was listed"):
        rows(given, parts)


def test_damage_is_told_by_the_object_s_uri(bucket: Bucket) -> None:
    path = bucket.root / "commitlog" / f"{SEGMENT:020d}"
    data = bytearray(path.read_bytes())
    data[1000:1100] = b"\xff" * 100
    path.write_bytes(data)
    given, parts = planned(bucket)
    with pytest.raises(rmq.CorruptFileError, match=f"^test://bucket/commitlog/{SEGMENT:020d}: byte "):
        rows(given, parts)


def in_shards(bucket: Bucket) -> list[str]:
    """The bucket is a directory of two shards now: their names."""
    root = bucket.root
    shards = [f"part-0000{number}-job" for number in range(2)]
    kept = root.rename(root.parent / "kept")
    for name in shards:
        shutil.copytree(kept, root / name)
    commits = root / "rmq" / "spark" / "commits"
    commits.mkdir(parents=True)
    names = ", ".join(f'"{name}"' for name in shards)
    (commits / "job.json").write_text(f'{{"number": 1, "overwrite": false, "shards": [{names}], "rows": 1}}')
    return shards


def test_shards_that_spark_wrote_are_stores(bucket: Bucket) -> None:
    shards = in_shards(bucket)
    found = snapshots("test://bucket?cacheBytes=12345678", ReadOptions.parse({"path": "test://bucket"}))
    assert [path for path, _ in found] == [f"test://bucket/{name}?cacheBytes=12345678" for name in shards]
    assert all(taken.location.cache_bytes == 12345678 and taken.is_store for _, taken in found)


@pytest.mark.parametrize("settings", ["", "?cacheBytes=12345678"])
def test_a_directory_of_shards_and_one_of_them_are_no_two_stores(bucket: Bucket, settings: str) -> None:
    """As of directories here: its messages would come twice."""
    paths = ["test://bucket", f"test://bucket/{in_shards(bucket)[1]}{settings}"]
    with pytest.raises(ValueError, match=r"part-00001-job.* is named twice"):
        stores_of(ReadOptions.parse({"paths": json.dumps(paths)}))


def test_a_damaged_marker_of_shards_is_told_by_its_uri(bucket: Bucket) -> None:
    in_shards(bucket)
    (bucket.root / "rmq/spark/commits/job.json").write_text("{}")
    with pytest.raises(rmq.CorruptFileError, match=r"^test://bucket/rmq/spark/commits/job\.json: byte 0: "):
        snapshots("test://bucket", asked(bucket))


@pytest.mark.parametrize("name", ["job.json", "job.intent"])
def test_one_store_that_spark_wrote_and_whose_log_is_not_there_is_told(bucket: Bucket, name: str) -> None:
    """A copy that was not made whole is no directory without shards."""
    commits = bucket.root / "rmq" / "spark" / "commits"
    commits.mkdir(parents=True)
    (commits / name).write_text('{"number": 1, "overwrite": false, "shards": [], "rows": 10}')
    assert [path for path, _ in stores_of(asked(bucket))] == ["test://bucket"]
    (bucket.root / "commitlog").rename(bucket.root.parent / "log")
    with pytest.raises(ObjectStoreError, match=r"^host \S+: test://bucket: no message store: there is no object below"):
        stores_of(asked(bucket))


def test_a_read_that_is_let_go_of_waits_for_no_open(bucket: Bucket) -> None:
    """The collector may end it in the thread that opens a store."""
    import pyarrow as pa

    given, parts = planned(bucket)
    batches = read_partition(parts[0], given, pa.schema([("phy_offset", pa.int64())]))
    next(iter(batches))
    ending = threading.Thread(target=batches.close)  # type: ignore[attr-defined]
    with opened_stores._lock:
        ending.start()
        ending.join(10)
        has_waited = ending.is_alive()
    ending.join()
    assert not has_waited


def test_a_look_up_opens_once_and_sees_the_store_as_it_was(bucket: Bucket) -> None:
    place = for_lookups(f"test://bucket?cacheDirectory={bucket.location.cache_directory}", None)
    assert isinstance(place, Snapshot)
    first = opened(place)
    assert opened(place) is first
    assert isinstance(first, MirroredStore)
    assert len(first.query("orders", "o-5")) == 1
    assert for_lookups("file:///a/b", None) == "/a/b"


def with_index(bucket: Bucket, name: str, cache_bytes: int) -> Snapshot:
    """For look-ups in a store below the bucket. Its index has as many bytes as any other's."""
    place = Location(f"test://bucket/{name}", cache_directory=bucket.location.cache_directory, cache_bytes=cache_bytes)
    return Snapshot.take(place).of("index")


@pytest.fixture
def index_bytes(bucket: Bucket, store: Path) -> int:
    """Of each of three stores a, b, c in the bucket."""
    for name in "abc":
        shutil.copytree(store, bucket.root / name)
    return sum(path.stat().st_size for path in (store / "index").iterdir())


def test_stores_that_nobody_uses_give_way_when_the_cache_is_full(bucket: Bucket, index_bytes: int) -> None:
    first, second, third = (with_index(bucket, name, 2 * index_bytes) for name in "abc")
    with using(first) as used:
        with using(second) as idle:
            assert len(idle.query("orders", "o-5")) == 1
        with using(third) as store:
            assert len(store.query("orders", "o-5")) == 1
            assert (used.closed, idle.closed) == (False, True)
            with pytest.raises(CacheFullError), using(second):
                pass
    with using(second):
        assert (used.closed, store.closed) == (True, False), "the one used longest ago"


def test_the_index_of_a_store_that_was_copied_anew_takes_the_place_of_the_former(bucket: Bucket,
                                                                                 index_bytes: int) -> None:  # fmt: skip
    with using(with_index(bucket, "b", 10 * index_bytes)) as other:
        pass
    for _ in range(3):
        with using(with_index(bucket, "a", 10 * index_bytes)) as store:
            assert len(store.query("orders", "o-5")) == 1
        for path in (bucket.root / "a" / "index").iterdir():
            touch(path, 5)
        with using(with_index(bucket, "a", 10 * index_bytes)):
            assert (store.closed, other.closed) == (True, False)


def test_a_full_disk_is_told_with_host_store_and_directory(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = rf"host \S+: test://bucket: .*{bucket.location.cache_directory}/open/\w+: No space left on device"
    place = Snapshot.take(bucket.location)
    with using(place.of()) as store:
        pass
    monkeypatch.setattr(rmq.objects, "write_fully", fail)
    for part in (), ("index",):
        with pytest.raises(ExecutorError, match=told), using(place.of(*part)) as store:
            store.scan().read_all()


def test_files_of_tables_are_told_by_their_uris(bucket: Bucket) -> None:
    with MirroredStore(Snapshot.take(bucket.location).of()) as here:
        [batch] = [with_uris(here, batch) for batch in here.table("segments")]
    assert batch.column("path")[0].as_py() == "test://bucket/commitlog/00000000000000000000"


@pytest.mark.parametrize("name", ["fs.accessKey", "fs.secretKey", "fs.sessionToken"])
def test_credentials_are_no_options(name: str) -> None:
    with pytest.raises(ValueError, match=f"option {name}: credentials are not taken"):
        ReadOptions.parse({"path": "s3://a/b", name: "x"})


@pytest.mark.parametrize("path", ["s3://KEY:PW1@a/b", "s3://a/b?secretKey=PW1", "s3://a/b?endpoint=http://KEY:PW1@h:1"])
def test_no_error_shows_credentials_and_no_endpoint_has_any(path: str) -> None:
    for refused in (Location.parse, lambda path: WriteOptions.parse({"path": path}), rmq.spark.clean_staging):
        with pytest.raises(ValueError, match="credentials are not taken") as caught:
            refused(path)
        assert "PW1" not in str(caught.value)


def test_object_stores_are_neither_written_nor_streams() -> None:
    with pytest.raises(ValueError, match="read only"):
        WriteOptions.parse({"path": "s3://a/b"})
    with pytest.raises(ValueError, match="stream reads stores on mounted disks"):
        ReadOptions.parse({"path": "s3://a/b"}).check_stream()
    assert WriteOptions.parse({"path": "file:///a/b"}).path == "/a/b"
    assert WriteOptions.parse({"path": "file:/a/b"}).path == "/a/b"
    assert ReadOptions.parse({"paths": "file:///a,file:/c,/b"}).paths == ("/a", "/c", "/b")


def test_tables_need_no_more_than_they_show(bucket: Bucket) -> None:
    """Nothing is kept on this disk for a table of segments, so a cache of no size will do."""
    given = asked(bucket, table="segments", fs_cacheBytes="0")
    [(_, taken)] = snapshots("test://bucket", given)
    assert taken.location.cache_bytes == 0
    with MirroredStore(for_table(taken, "segments")) as here:
        assert here.table("segments").read_all().num_rows > 4


# ---- with both ----


@pytest.fixture(scope="module")
def s3() -> Iterator[s3server.S3]:
    with s3server.running() as server:
        yield server


@pytest.mark.spark
def test_a_store_on_s3_is_read_and_asked_as_one_here(spark: Any, store: Path, s3: s3server.S3, tmp_path: Path) -> None:
    uri = s3.upload(store, "orders")
    options = {"fs.endpoint": s3.endpoint, "fs.anonymous": "true", "fs.region": "us-east-1",
               "fs.cacheDirectory": str(tmp_path / "cache")}  # fmt: skip

    def load(path: str, **more: str) -> Any:
        return spark.read.format("rmq").options(**options, **more).load(path)

    columns = "topic,queue_id,queue_offset,phy_offset,body"
    frame = load(uri, columns=columns, splitBytes=str(SEGMENT))
    assert frame.rdd.getNumPartitions() > 4
    here = spark.read.format("rmq").option("columns", columns).load(str(store))
    assert sorted(frame.collect()) == sorted(here.collect())
    assert load(uri, subscribe="orders", keys="o-5,o-77", columns="body").count() == 2
    assert load(uri, assign='{"orders": [1]}', endingOffsets='{"orders": {"1": 10}}').count() == 10
    assert load(uri, table="topics").count() == 5
    with rmq.open(store) as opened_here:
        assert load(uri, table="index").count() == opened_here.table("index").read_all().num_rows
    assert load(uri, table="segments").first()["path"].startswith(f"{uri}/commitlog/")

    place = f"{uri}?endpoint={s3.endpoint}&anonymous=true&region=us-east-1&cacheDirectory={tmp_path}/cache"
    ids = spark.createDataFrame([("o-7",), ("nix",)], "id string")
    found = ids.select("id", F.size(rmq.spark.offsets(place, "orders")("id"))).collect()
    assert [tuple(row) for row in found] == [("o-7", 1), ("nix", 0)]
    joined = rmq.spark.lookup_join(ids, place, "orders", key="id", columns=["body"]).collect()
    assert [bytes(row.body) for row in joined] == [b"body 7"]
    index = sum(path.stat().st_size for path in (store / "index").iterdir())
    assert sum(path.stat().st_size for path in (tmp_path / "cache" / "objects").iterdir()) == index

    small = f"{place}&cacheBytes=1000".replace("/cache&", "/small&")
    for refused, reason in ((lambda: load(f"{uri}-nix"), "no message store"),
                            (lambda: load(uri, **{"fs.accessKey": "x"}), "credentials are not taken"),
                            (lambda: ids.select(rmq.spark.offsets(small, "orders")("id")), "CacheFull")):  # fmt: skip
        with pytest.raises(Exception, match=reason):
            refused().collect()
    with pytest.raises(Exception, match="read only"):
        ids.write.format("rmq").mode("append").save(uri)
