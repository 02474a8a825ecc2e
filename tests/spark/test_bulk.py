"""bulk_load: one new store of what many tasks have staged. First the protocol, without Spark; then Spark's part."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from forks import fork
from pyspark.sql import DataFrame

import rmq
from rmq.dispatch import Dispatcher
from rmq.logpart import Part
from rmq.marks import Marks
from rmq.scan import COLUMNS
from rmq.spark import bulk_load, clean_staging
from rmq.spark.loading import Placed, Staged, check_new, plan, publish, put_in_place, stage
from rmq.spark.staging import Staging
from rmq.store import Store
from spark.conftest import Crash

SEGMENT = 8192
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT)
TIME = 1_700_000_000_000
HERE = {"phy_offset", "store_timestamp", "born_timestamp", "store_host", "born_host", "offset_msg_id"}
NAMES = [name for name in COLUMNS if name not in HERE]
SCHEMA = "topic string, body binary, keys array<string>, tags string, queue_id int, properties map<string,string>"


def message(number: int) -> rmq.Message:
    return rmq.Message(f"t{number % 2}", b"body %d" % number * (1 + number % 5), tags="AB"[number % 2],
                       keys=[f"k-{number}", f"c-{number % 10}"], queue_id=number % 3,
                       properties={"n": str(number)})  # fmt: skip


def staged_one(staging: Staging, partition: int, numbers: range, attempt: int = 0) -> Staged | None:
    """What a task does first, two batches, with messages in place of Arrow's rows."""
    half = len(numbers) // 2
    batches: Any = [list(map(message, part)) for part in (numbers[:half], [], numbers[half:])]
    return stage(staging, partition, attempt, batches, lambda put, parts: sum(map(put, parts)), CONFIG, TIME)


def staged_all(staging: Staging, *parts: range) -> list[Staged]:
    return [item for number, part in enumerate(parts) if (item := staged_one(staging, number, part)) is not None]


def load(path: Path, *parts: range) -> None:
    """What bulk_load does."""
    staging = Staging(str(path), "job")
    places = plan(staged_all(staging, *parts), SEGMENT)
    publish(staging, places, [put_in_place(staging, place, SEGMENT) for place in reversed(places)], CONFIG)
    staging.abandon()


def by_queue(path: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """All messages in the order of each queue; the store is sound."""
    assert rmq.verify(path) == []
    with rmq.open(path) as store:
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in store.scan(columns=NAMES).read_all().to_pylist():
            found.setdefault((row["topic"], row["queue_id"]), []).append(row)
        for (topic, queue_id), rows in found.items():
            assert [row["queue_offset"] for row in rows] == list(range(len(rows)))
            assert store.topics()[topic][queue_id] == (0, len(rows))
            assert [item.body for item in store.pull(topic, queue_id, limit=10_000).messages] == \
                [row["body"] for row in rows]  # fmt: skip
    return found


def peer(path: Path, numbers: range) -> Path:
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(map(message, numbers))
    return path


def is_empty(path: Path) -> bool:
    """No message is to be seen."""
    with rmq.open(path) as store:
        return store.topics() == {} and store.scan().read_all().num_rows == 0


def is_begun(path: Path) -> bool:
    """There is no store, and readers are told why."""
    with pytest.raises(rmq.UnsupportedFormatError, match="a write of Spark began here and has not committed"):
        rmq.open(path)
    return True


# ---- without Spark -------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [
    (range(1),), (range(300),), (range(100), range(100, 101), range(101, 300)),
    (range(0), range(40), range(0), range(40, 41), range(0)), tuple(range(n, n + 1) for n in range(20)),
], ids=str)  # fmt: skip
def test_a_load_is_what_the_engine_makes_of_the_same_messages(tmp_path: Path, parts: tuple[range, ...]) -> None:
    path, count = tmp_path / "s", sum(map(len, parts))
    load(path, *parts)
    assert by_queue(path) == by_queue(peer(tmp_path / "peer", range(count)))
    assert list((path / "rmq/spark/staging").iterdir()) == []
    with rmq.open(path) as store, rmq.open(tmp_path / "peer") as other:
        for key in ("k-0", "c-7"):
            assert [item.body for item in store.query("t1", key)] == [item.body for item in other.query("t1", key)]
        assert store.config == other.config
    assert (path / "rmq/meta.json").read_bytes() == (tmp_path / "peer/rmq/meta.json").read_bytes()
    told = [json.loads((root / "config/topics.json").read_bytes()) for root in (path, tmp_path / "peer")]
    assert told[0]["topicConfigTable"] == told[1]["topicConfigTable"]
    with rmq.open(path, "r+") as store:
        store.put(message(count))
    assert sum(map(len, by_queue(path).values())) == count + 1


def test_a_load_of_nothing_is_an_empty_store(tmp_path: Path) -> None:
    load(tmp_path / "s", range(0))
    assert is_empty(tmp_path / "s")
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(message(0))
    assert rmq.verify(tmp_path / "s") == []


def test_places_are_whole_segments_in_the_order_of_partitions() -> None:
    staged = [Staged(7, "c", 1, Part(1, {("t", 0): 1})), Staged(3, "b", 4, Part(SEGMENT, {("t", 1): 4})),
              Staged(2, "a", 3, Part(SEGMENT + 1, {("t", 0): 2, ("t", 1): 1}))]  # fmt: skip
    places = plan(staged, SEGMENT)
    assert [(place.staged.name, place.begin, place.is_last) for place in places] == \
        [("a", 0, False), ("b", 2 * SEGMENT, False), ("c", 3 * SEGMENT, True)]  # fmt: skip
    assert [place.queue_offsets for place in places] == [{("t", 0): 0, ("t", 1): 0}, {("t", 1): 1}, {("t", 0): 2}]
    assert plan([], SEGMENT) == []
    with pytest.raises(ValueError, match="staged twice"):
        plan([*staged, staged[0]], SEGMENT)


def test_duplicates_of_tasks_are_left_over_and_do_no_harm(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    first = staged_all(staging, range(50), range(50, 90))
    staged_one(staging, 0, range(50), attempt=1)  # a speculative copy; Spark took the other one
    places = plan(first, SEGMENT)
    put_in_place(staging, places[0], SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT, attempt=1) for place in places]
    publish(staging, places, placed, CONFIG)
    staging.abandon()
    assert by_queue(tmp_path / "s") == by_queue(peer(tmp_path / "peer", range(90)))
    assert list((tmp_path / "s/rmq/spark/staging").iterdir()) == []


def test_a_task_that_fails_in_the_middle_can_be_tried_again(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(200), range(200, 260)), SEGMENT)
    crash(os, "ftruncate", 2)
    with pytest.raises(Crash):
        put_in_place(staging, places[0], SEGMENT)
    assert list((staging.directory / "placed").iterdir()) == []
    publish(staging, places, [put_in_place(staging, place, SEGMENT, 1) for place in places], CONFIG)
    assert by_queue(tmp_path / "s") == by_queue(peer(tmp_path / "peer", range(260)))


@pytest.mark.parametrize("numbers", [range(1, 201), range(100), range(1, 401, 2)], ids=str)
def test_a_staged_log_that_is_another_one_now_is_an_error(tmp_path: Path, numbers: range) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(200)), SEGMENT)
    shutil.rmtree(staging.directory / places[0].staged.name)
    with pytest.raises(FileNotFoundError, match="the driver and all executors need"):
        put_in_place(staging, places[0], SEGMENT)
    other = staged_one(staging, 0, numbers)
    assert other is not None
    os.rename(staging.directory / other.name, staging.directory / places[0].staged.name)
    with pytest.raises(rmq.CorruptFileError):
        put_in_place(staging, places[0], SEGMENT)


@pytest.mark.parametrize("wrong", [[], [0], [0, 0, 1], [0, 2]])
def test_answers_that_are_no_answers_to_the_plan_are_an_error(tmp_path: Path, wrong: list[int]) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(5), range(5, 9)), SEGMENT)
    with pytest.raises(ValueError, match="a place is missing"):
        publish(staging, places, [Placed(number, "x") for number in wrong], CONFIG)
    assert is_begun(tmp_path / "s")


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_driver_that_dies_before_the_last_rename_leaves_nothing_visible(tmp_path: Path, crash: Any,
                                                                          calls: int) -> None:  # fmt: skip
    path, staging = tmp_path / "s", Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(90), range(90, 200)), SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT) for place in places]
    assert [place.end // SEGMENT for place in places] == [1, 3]
    crash(os, "rename", calls)
    with pytest.raises(Crash):
        publish(staging, places, placed, CONFIG)
    assert is_begun(path)
    assert clean_staging(str(path)) == []
    assert clean_staging(str(path), older_than=0) == [str(staging.directory)]
    load(path, range(200))
    assert by_queue(path) == by_queue(peer(tmp_path / "peer", range(200)))


CHANGES = ("open", "mkdir", "ftruncate", "pwrite", "fsync", "rename", "replace", "unlink")  # os functions


def killed(call: int, publish_all: Callable[[], object]) -> bool:
    """Whether a process was killed before the nth call that may change files; False: it came to its end."""
    left = [call]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    def work() -> None:
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        publish_all()

    status = os.waitpid(fork(work), 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.slow
def test_a_driver_that_is_killed_at_any_step_leaves_no_store_or_a_whole_one(tmp_path: Path) -> None:
    path, staging = tmp_path / "s", Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(90), range(90, 200)), SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT) for place in places]
    os.rename(path, tmp_path / "before")
    expected = by_queue(peer(tmp_path / "peer", range(200)))
    call, left = 1, set()
    while True:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "before", path)
        if not killed(call, lambda: publish(staging, places, placed, CONFIG)):
            break
        is_there = (path / "commitlog").is_dir()
        call += 12 if is_there else 1
        if is_there:
            with rmq.open(path) as store:
                assert store.scan(columns=["queue_id"]).read_all().num_rows == 200
                assert len(store.query("t1", "c-7")) == 20
            rmq.open(path, "r+").close()
            assert by_queue(path) == expected
            left.add("a store")
        else:
            assert is_begun(path)
            with pytest.raises(rmq.UnsupportedFormatError, match="has not committed"):
                rmq.verify(path)
            with pytest.raises(FileNotFoundError, match="no store in it; a write of Spark began here and has not"):
                rmq.open(path, "r+")
            found = "|".join(sorted(item.name for item in [*path.glob("lock"), *path.glob("rmq/meta*")]))
            if found in left:
                continue
            left.add(found)
            shutil.copytree(path, tmp_path / "other")
            load(path, range(200))
            another = rmq.StoreConfig(mapped_file_size_commit_log=2 * SEGMENT)
            with rmq.open(tmp_path / "other", "a", config=another) as store:  # sizes of the load do not count
                store.put(message(0))
            assert sum(map(len, by_queue(tmp_path / "other").values())) == 1
            shutil.rmtree(tmp_path / "other")
            assert by_queue(path) == expected
    assert left == {"", "lock", "lock|meta.json.tmp", "lock|meta.json", "a store"}
    assert by_queue(path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", ["r", "r+"])
@pytest.mark.parametrize(("owner", "name"), [(Store, "_open_to_write"), (Marks, "__init__"), (Dispatcher, "advance"),
                                             (Marks, "write")], ids=str)  # fmt: skip
def test_a_driver_that_dies_behind_it_leaves_a_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any,
                                                           name: str, how: str) -> None:  # fmt: skip
    path, staging = tmp_path / "s", Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(90), range(90, 200)), SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT) for place in places]
    real, left = getattr(owner, name), [1]

    def call(*arguments: Any, **named: Any) -> Any:
        if left:  # what is there now is what a kill leaves; an error takes some of it back
            left.clear()
            shutil.copytree(path, tmp_path / "killed")
            raise Crash
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    with pytest.raises(Crash) as caught:
        publish(staging, places, placed, CONFIG)
    assert "the store is there" in caught.value.__notes__[0]
    shutil.rmtree(path)
    os.rename(tmp_path / "killed", path)
    with rmq.open(path, how) as store:
        assert {topic: sum(end for _, end in ids.values()) for topic, ids in store.topics().items()} == \
            {"t0": 100, "t1": 100}  # fmt: skip
        assert len(store.query("t1", "c-7")) == 20
    rmq.open(path, "r+").close()
    assert by_queue(path) == by_queue(peer(tmp_path / "peer", range(200)))
    assert clean_staging(str(path), older_than=0) == [str(staging.directory)]


def test_segments_that_were_lost_since_are_told(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(90), range(90, 200)), SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT) for place in places]
    last = max((staging.directory / "placed" / placed[1].name).iterdir())
    last.write_bytes(bytes(SEGMENT))
    with pytest.raises(rmq.CorruptFileError, match=rf"the log must end at byte {places[1].end}") as caught:
        publish(staging, places, placed, CONFIG)
    assert "the store is there" in caught.value.__notes__[0]


def test_a_reader_that_looked_before_sees_nothing_then_all(tmp_path: Path) -> None:
    path, staging = tmp_path / "s", Staging(str(tmp_path / "s"), "job")
    path.mkdir()
    (path / "lock").touch()  # of a writer that was killed: a store that was begun
    with rmq.open(path) as store:
        assert store.topics() == {}
        places = plan(staged_all(staging, range(90), range(90, 200)), SEGMENT)
        placed = [put_in_place(staging, place, SEGMENT) for place in places]
        assert store.topics() == {}
        publish(staging, places, placed, CONFIG)
        assert store.scan().read_all().num_rows == 200
        assert store.topics() == {f"t{n}": {0: (0, 34 - n), 1: (0, 33 + n), 2: (0, 33)} for n in (0, 1)}


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    check_new(tmp_path / "nix")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_new(tmp_path / "file")
    (tmp_path / "other" / "x").mkdir(parents=True)
    (tmp_path / "lost" / "rmq" / "cut").mkdir(parents=True)
    peer(tmp_path / "peer", range(3))
    for name, holds in (("other", "x"), ("lost", "rmq/cut"), ("peer", "abort.bak")):
        with pytest.raises(FileExistsError, match=f"exists and holds {holds}; bulk_load makes a new store") as caught:
            check_new(tmp_path / name)
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(tmp_path / name))
    load(tmp_path / "s", range(3))
    with pytest.raises(FileExistsError):
        load(tmp_path / "s", range(3, 6))
    assert by_queue(tmp_path / "s") == by_queue(tmp_path / "peer")
    assert list((tmp_path / "s/rmq/spark/staging/job").iterdir()) != []


def test_a_writer_that_came_first_has_the_directory(tmp_path: Path) -> None:
    path, staging = tmp_path / "s", Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(5)), SEGMENT)
    placed = [put_in_place(staging, place, SEGMENT) for place in places]
    with rmq.open(path, "a", config=CONFIG) as store:
        with pytest.raises(rmq.StoreLockedError):
            publish(staging, places, placed, CONFIG)
        store.put(message(0))
    assert sum(map(len, by_queue(path).values())) == 1


def test_what_the_driver_does_not_see_is_an_error(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "s"), "job")
    places = plan(staged_all(staging, range(5)), SEGMENT)
    with pytest.raises(FileNotFoundError):
        publish(staging, places, [Placed(0, "00000.0.nix")], CONFIG)
    assert is_begun(tmp_path / "s")


def test_a_path_may_be_a_file_uri_and_no_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made in a directory of the URI's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    frame = Mock(DataFrame)
    frame.schema.fieldNames.return_value = ["topic", "body"]
    for path in ("s3://bucket/s", "gs://bucket/s"):
        with pytest.raises(ValueError, match=f"{path}: stores on object stores are read only"):
            bulk_load(frame, path)
    with pytest.raises(FileExistsError, match=f"exists and holds x.*'{tmp_path}/other'"):
        bulk_load(frame, f"file://{tmp_path}/other")
    assert [item.name for item in tmp_path.iterdir()] == ["other"]


# ---- with Spark ----------------------------------------------------------------------------------


def frame(spark: Any, count: int, parts: int = 1) -> Any:
    """Rows in order, in so many partitions."""
    rows = [(f"t{number % 2}", *(getattr(message(number), name) for name in ("body", "keys", "tags", "queue_id")),
             {"n": str(number)}) for number in range(count)]  # fmt: skip
    slices = spark.sparkContext.parallelize(rows, parts)
    return spark.createDataFrame(slices, SCHEMA)


@pytest.mark.spark
def test_a_frame_of_many_partitions_is_one_store(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert bulk_load(frame(spark, 500, 5), str(path), segment_bytes=SEGMENT) == 500
    assert by_queue(path) == by_queue(peer(tmp_path / "peer", range(500)))
    assert list((path / "rmq/spark/staging").iterdir()) == []
    with rmq.open(path) as store:
        assert len(set(store.scan(columns=["store_timestamp"]).read_all()["store_timestamp"].to_pylist())) == 1
        assert len(store.query("t1", "c-7")) == 32
    assert spark.read.format("rmq").load(str(path)).count() == 500
    with pytest.raises(FileExistsError, match="mode=single"):
        bulk_load(frame(spark, 1), path)
    more = frame(spark, 1).write.format("rmq").mode("append").option("mode", "single")
    more.save(str(path))
    assert spark.read.format("rmq").load(str(path)).count() == 501


@pytest.mark.spark
def test_columns_are_mapped_and_no_index_is_built(spark: Any, tmp_path: Path) -> None:
    made = spark.sql("SELECT cast(id AS STRING) order_id, cast('x' AS BINARY) payload FROM range(0, 10, 1, 2)")
    assert bulk_load(made, tmp_path / "s", topic="orders", queues=3, segment_bytes=SEGMENT, build_index=False,
                     columns={"keys": "order_id", "body": "payload"}) == 10  # fmt: skip
    assert list((tmp_path / "s").glob("index/*")) == []
    with rmq.open(tmp_path / "s") as store:
        assert store.topics() == {"orders": {0: (0, 3), 1: (0, 4), 2: (0, 3)}}
        assert store.query("orders", "7")[0].body == b"x"
    with pytest.raises(ValueError, match="no column topic"):
        bulk_load(made.withColumnRenamed("payload", "body").drop("order_id"), tmp_path / "n")
    assert not (tmp_path / "n").exists()


@pytest.mark.spark
def test_empty_partitions_and_an_empty_frame(spark: Any, tmp_path: Path) -> None:
    assert bulk_load(frame(spark, 3, 40), tmp_path / "s", segment_bytes=SEGMENT) == 3
    assert by_queue(tmp_path / "s") == by_queue(peer(tmp_path / "peer", range(3)))
    assert bulk_load(frame(spark, 3).where("false"), tmp_path / "none", segment_bytes=SEGMENT) == 0
    assert is_empty(tmp_path / "none")


@pytest.mark.spark
def test_a_task_that_fails_leaves_nothing_and_the_load_can_be_tried_again(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    bad = frame(spark, 100, 4).selectExpr(
        "topic", "body", "keys", "if(properties['n'] = '77', raise_error('no more'), tags) tags", "queue_id",
        "properties")  # fmt: skip
    with pytest.raises(Exception, match="no more"):
        bulk_load(bad, path, segment_bytes=SEGMENT)
    assert is_begun(path)
    clean_staging(str(path), older_than=0)
    assert bulk_load(frame(spark, 100, 4), path, segment_bytes=SEGMENT) == 100
    assert by_queue(path) == by_queue(peer(tmp_path / "peer", range(100)))


@pytest.mark.spark
def test_a_task_that_is_tried_again_loads_once(spark: Any, tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def once(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        if not flag.exists():
            flag.touch()
            raise RuntimeError("first try")

    assert bulk_load(frame(spark, 60, 3).mapInArrow(once, SCHEMA), tmp_path / "s", segment_bytes=SEGMENT) == 60
    assert flag.exists()
    assert by_queue(tmp_path / "s") == by_queue(peer(tmp_path / "peer", range(60)))
