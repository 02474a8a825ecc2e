"""The protocol of a write, without Spark: what each crash leaves, and that the next try makes it whole, once."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import rmq
from rmq.lock import StoreLock
from rmq.marks import write_meta
from rmq.parallel import plan_scan
from rmq.paths import StorePaths
from rmq.scan import schema_of
from rmq.spark import clean_staging
from rmq.spark.opened import for_lookups
from rmq.spark.options import ReadOptions
from rmq.spark.selection import log_bounds, select
from rmq.spark.source import MessageReader
from rmq.spark.staging import PUT_COLUMNS, Staging, Written, commits, pending_begin, roots
from rmq.spark.stream import StreamReader
from rmq.spark.write import check_target
from spark.conftest import Crash

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20 * 1000,
                         max_hash_slot_num=100, max_index_num=400)  # fmt: skip


def message(text: str) -> rmq.Message:
    return rmq.Message("t", text.encode(), keys=[text], properties={"n": text})


def stage(staging: Staging, partition: int, texts: list[str], attempt: int = 0) -> Written:
    """What a task does."""
    if not texts:
        return Written(partition, None, 0)
    name = f"{partition:05d}.{attempt}.x"
    staging.directory.mkdir(parents=True, exist_ok=True)
    with rmq.open(staging.directory / name, "x", config=CONFIG) as store:
        store.put_many(map(message, texts))
    return Written(partition, name, len(texts))


def bodies(path: Path) -> list[str]:
    found: list[str] = []
    for root in roots(str(path)):
        with rmq.open(root) as store:
            found += [body.decode() for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()]
    return found


def is_sound(path: Path) -> bool:
    return all(rmq.verify(root) == [] for root in roots(str(path)))


def nothing_is_staged(path: Path) -> bool:
    return list((path / "rmq" / "spark" / "staging").iterdir()) == []


# ---- shards --------------------------------------------------------------------------------------


def test_shards_are_there_when_their_commit_is(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 2, ["c"]), stage(staging, 0, ["a", "b"]), stage(staging, 1, [])]
    assert roots(str(tmp_path)) == [str(tmp_path)]
    staging.commit_shards(written)
    assert bodies(tmp_path) == ["a", "b", "c"]
    assert is_sound(tmp_path)
    assert nothing_is_staged(tmp_path)
    assert commits(tmp_path)[0].rows == 3


def test_a_directory_of_shards_is_no_store(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "s"), "a-0000000007")
    staging.commit_shards([stage(staging, 0, ["a"]), stage(staging, 1, ["b"])])
    pattern = rf"{tmp_path}/s: no store, but a directory of 2 .*spark.read.*part-00000-a-0000000007"
    calls: list[Callable[[], object]] = [partial(rmq.open, tmp_path / "s", mode) for mode in ("r", "r+", "a")]
    calls += [partial(call, tmp_path / "s") for call in (rmq.verify, rmq.rebuild, plan_scan)]
    calls += [partial(call, tmp_path / "s", tmp_path / "out") for call in (rmq.rebuild, rmq.export)]
    calls.append(lambda: for_lookups(str(tmp_path / "s"), None))
    for call in calls:
        with pytest.raises(rmq.UnsupportedFormatError, match=pattern):
            call()
    assert bodies(tmp_path / "s") == ["a", "b"]


def test_the_same_commit_twice_is_one(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "q-0000000007")
    staging.commit_shards([stage(staging, 0, ["a"])])
    again = Staging(str(tmp_path), "q-0000000007")
    again.commit_shards([stage(again, 0, ["a"], attempt=1), stage(again, 1, ["z"])])
    assert bodies(tmp_path) == ["a"]
    assert nothing_is_staged(tmp_path)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_crash_before_the_marker_shows_nothing_and_the_next_try_all(tmp_path: Path, crash: Any, calls: int) -> None:
    first = Staging(str(tmp_path), "zero")
    first.commit_shards([stage(first, 0, ["0"])])
    staging = Staging(str(tmp_path), "q-1")
    written = [stage(staging, 0, ["a"]), stage(staging, 1, ["b"])]
    crash(os, "rename", calls) if calls == 1 else crash(Staging, "_mark")
    with pytest.raises(Crash):
        staging.commit_shards(written)
    assert bodies(tmp_path) == ["0"]
    again = Staging(str(tmp_path), "q-1")
    again.commit_shards([stage(again, 0, ["a"], attempt=1), stage(again, 1, ["b"], attempt=1)])
    assert bodies(tmp_path) == ["0", "a", "b"]


def test_a_crash_between_rename_and_marker_is_finished_by_the_same_messages(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"]), stage(staging, 1, ["b"])]
    crash(Staging, "_mark")
    with pytest.raises(Crash):
        staging.commit_shards(written)
    staging.commit_shards(written)
    assert bodies(tmp_path) == ["a", "b"]


def test_a_crash_behind_the_marker_changes_nothing(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    crash(Staging, "drop")
    with pytest.raises(Crash):
        staging.commit_shards(written)
    assert bodies(tmp_path) == ["a"]
    staging.commit_shards(written)
    assert bodies(tmp_path) == ["a"]


def test_overwrite_replaces_at_its_marker(tmp_path: Path, crash: Any) -> None:
    for job in ("a", "b"):
        staging = Staging(str(tmp_path), job)
        staging.commit_shards([stage(staging, 0, [job])])
    assert bodies(tmp_path) == ["a", "b"]
    new = Staging(str(tmp_path), "new")
    written = [stage(new, 0, ["c"])]
    crash(Staging, "_drop_replaced")
    with pytest.raises(Crash):
        new.commit_shards(written, overwrite=True)
    assert bodies(tmp_path) == ["c"]
    new.commit_shards(written, overwrite=True)
    assert bodies(tmp_path) == ["c"]
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-00000-new"]
    empty = Staging(str(tmp_path), "empty")
    empty.commit_shards([], overwrite=True)
    assert roots(str(tmp_path)) == []


def test_an_abandoned_job_leaves_nothing(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    crash(Staging, "_mark")
    with pytest.raises(Crash):
        staging.commit_shards(written)
    staging.abandon()
    assert list(tmp_path.glob("part-*")) == []
    done = Staging(str(tmp_path), "b")
    done.commit_shards([stage(done, 0, ["b"])])
    done.abandon()
    assert bodies(tmp_path) == ["b"]


def test_a_directory_that_the_driver_does_not_see_is_an_error(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    with pytest.raises(FileNotFoundError, match="the driver and all executors need"):
        staging.commit_shards([Written(0, "00000.0.x", 1)])
    assert commits(tmp_path) == []


def test_a_directory_whose_first_write_has_not_committed_is_no_store(tmp_path: Path) -> None:
    """Readers and streams of it would find nothing, for ever."""
    path, text = tmp_path / "out", "a write of Spark began here and has not committed"
    staging = Staging(str(path), "a")
    stage(staging, 0, ["a"])
    asked, columns = ReadOptions.parse({"path": str(path)}), from_arrow_schema(schema_of(["body"]))
    for look in (lambda: rmq.open(path), lambda: rmq.verify(path), lambda: rmq.rebuild(path, tmp_path / "new"),
                 MessageReader(asked, columns).partitions, StreamReader(asked, columns).initialOffset):  # fmt: skip
        with pytest.raises(rmq.RmqError, match=text):
            look()
    with pytest.raises(FileNotFoundError, match="no store in it"):
        rmq.open(path, "r+")
    staging.abandon()
    with pytest.raises(rmq.UnsupportedFormatError, match=text):
        rmq.open(path)
    staging.commit_shards([])  # has happened, without a row
    assert bodies(path) == []


def test_a_store_that_was_just_begun_is_one_beside_a_write_of_spark(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    stage(staging, 0, ["a"])
    paths = StorePaths(tmp_path)
    with closing(StoreLock(paths.lock, lambda: None)):  # what a writer of ours does first
        assert bodies(tmp_path) == []
        write_meta(paths, {"origin": "rmq"})
        assert bodies(tmp_path) == []
        with pytest.raises(rmq.StoreLockedError):
            rmq.open(tmp_path, "r+")
    with pytest.raises(rmq.UnsupportedFormatError, match="a write of Spark began here and has not committed"):
        rmq.open(tmp_path)  # it died


# ---- one store -----------------------------------------------------------------------------------


def test_single_appends_in_the_order_of_partitions(tmp_path: Path) -> None:
    for job, texts in (("a", [["1"], ["2", "3"]]), ("b", [["4"]])):
        staging = Staging(str(tmp_path), job)
        staging.commit_single([stage(staging, *item) for item in reversed(list(enumerate(texts)))], CONFIG)
        staging.commit_single([stage(staging, 0, ["never"], attempt=1)], CONFIG)
    assert bodies(tmp_path) == ["1", "2", "3", "4"]
    assert is_sound(tmp_path)
    assert nothing_is_staged(tmp_path)
    with rmq.open(tmp_path) as store:
        assert store.query("t", "3")[0].body == b"3"


@pytest.mark.parametrize("job", ["same", "another"])
@pytest.mark.parametrize(("name", "calls", "present"), [("append", 1, 0), ("put_many", 2, 1), ("put_many", 3, 2),
                                                        ("_mark", 1, 3)], ids=str)  # fmt: skip
def test_an_append_that_was_interrupted_goes_on_where_it_stood(tmp_path: Path, crash: Any, name: str, calls: int,
                                                               present: int, job: str) -> None:  # fmt: skip
    with rmq.open(tmp_path, "x", config=CONFIG) as store:
        store.put(message("0"))
        end = store.max_phy_offset
    staging = Staging(str(tmp_path), "same")
    written = [stage(staging, number, [text]) for number, text in enumerate("abc")]
    crash(rmq.Store if name == "put_many" else Staging, name, calls)
    with pytest.raises(Crash) as caught:
        staging.commit_single(written)
    assert "clean_staging or the next write ends it" in caught.value.__notes__[0]
    with rmq.open(tmp_path, "r+") as store:  # what others put meanwhile stands in between
        store.put(message("other"))
        assert store.max_phy_offset > end
        assert log_bounds(store) == (0, end)
        asked = ReadOptions.parse({"path": str(tmp_path), "subscribe": "t", "startingOffsets": "earliest"})
        assert select(store, asked).bounds == {"t": {0: (0, 1)}}
    assert len(bodies(tmp_path)) == 2 + present
    assert pending_begin(str(tmp_path)) == end
    staging.abandon()
    again = Staging(str(tmp_path), job)
    again.commit_single([stage(again, 0, ["d"], attempt=1)])
    found = bodies(tmp_path)
    assert sorted(found) == sorted(["0", *"abc", "other", *([] if job == "same" else ["d"])])
    assert [text for text in found if text in "abc"] == list("abc")
    assert pending_begin(str(tmp_path)) is None
    assert is_sound(tmp_path)


@pytest.mark.parametrize("fields", [{"enabled_append_prop_crc": True}, {"rocketmq_version": "4.9.4"}], ids=str)
def test_rows_that_were_appended_are_known_again_whatever_the_store_adds(tmp_path: Path, crash: Any,
                                                                         fields: dict[str, Any]) -> None:
    with rmq.open(tmp_path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536, **fields)) as store:
        store.put(message("0"))
    staging = Staging(str(tmp_path), "same")
    written = [stage(staging, number, [text, text]) for number, text in enumerate("abc")]
    crash(Staging, "_mark", 1)
    with pytest.raises(Crash):
        staging.commit_single(written)
    clean_staging(str(tmp_path))
    assert bodies(tmp_path) == ["0", *"aabbcc"]


def test_rows_that_were_appended_and_cleaned_away_are_not_appended_again(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "same")
    written = [stage(staging, 0, [f"{number}-" + "x" * 1000 for number in range(100)])]
    crash(Staging, "_mark", 1)
    with pytest.raises(Crash):
        staging.commit_single(written, CONFIG)
    with rmq.open(tmp_path, "r+") as store:
        assert store.clean(now=2**42, file_reserved_time=0, limit=1).removed
    left = bodies(tmp_path)
    with pytest.raises(rmq.CorruptFileError, match="cleaned to byte 65536 since"):
        clean_staging(str(tmp_path))
    assert bodies(tmp_path) == left


@pytest.mark.parametrize("born", [253402300800000, -62135596800001, 2**62])
def test_an_append_of_times_that_pythons_have_not_is_finished(tmp_path: Path, crash: Any, born: int) -> None:
    staging = Staging(str(tmp_path), "same")
    staging.directory.mkdir(parents=True)
    with rmq.open(staging.directory / "00000.0.x", "x", config=CONFIG) as store:
        store.put(rmq.Message("t", b"1", born_timestamp=born))
    crash(Staging, "_mark", 1)
    with pytest.raises(Crash):
        staging.commit_single([Written(0, "00000.0.x", 1)])
    clean_staging(str(tmp_path))
    assert bodies(tmp_path) == ["1"]
    assert pending_begin(str(tmp_path)) is None


def test_a_row_that_the_store_cannot_take_stops_an_append_before_it_begins(tmp_path: Path) -> None:
    rmq.open(tmp_path, "x", config=CONFIG).close()
    staging = Staging(str(tmp_path), "large")
    staging.directory.mkdir(parents=True)
    with rmq.open(staging.directory / "00000.0.x", "x") as store:
        store.put_many([message("a"), rmq.Message("t", b"x" * 100_000)])
    with pytest.raises(rmq.MessageTooLargeError) as caught:
        staging.commit_single([Written(0, "00000.0.x", 2)])
    assert not hasattr(caught.value, "__notes__")
    assert pending_begin(str(tmp_path)) is None
    staging.abandon()
    again = Staging(str(tmp_path), "small")
    again.commit_single([stage(again, 0, ["b"])])
    assert bodies(tmp_path) == ["b"]


def test_an_append_that_was_cut_within_a_batch_goes_on_there(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, list("abcaab"))]
    crash(Staging, "append")
    with pytest.raises(Crash):
        staging.commit_single(written, CONFIG)
    with rmq.open(staging.directory / "00000.0.x") as staged, rmq.open(tmp_path, "r+") as store:
        store.put_many(staged.scan(columns=PUT_COLUMNS).read_next_batch().slice(0, 4))
    clean_staging(str(tmp_path))
    assert bodies(tmp_path) == list("abcaab")


def test_a_crash_before_the_intent_appends_nothing(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    crash(rmq.spark.staging, "write_atomically")
    with pytest.raises(Crash):
        staging.commit_single(written, CONFIG)
    assert bodies(tmp_path) == []
    staging.commit_single(written, CONFIG)
    assert bodies(tmp_path) == ["a"]


def test_a_store_that_another_writer_has_is_not_touched(tmp_path: Path) -> None:
    with rmq.open(tmp_path, "x", config=CONFIG):
        staging = Staging(str(tmp_path), "a")
        with pytest.raises(rmq.StoreLockedError):
            staging.commit_single([stage(staging, 0, ["a"])])
        assert pending_begin(str(tmp_path)) is None
        staging.abandon()
    assert bodies(tmp_path) == []
    assert nothing_is_staged(tmp_path)


def test_shards_and_one_store_do_not_mix(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "shards"), "a")
    staging.commit_shards([stage(staging, 0, ["a"])])
    rmq.open(tmp_path / "store", "x", config=CONFIG).close()
    check_target(str(tmp_path / "shards"), "shards")
    check_target(str(tmp_path / "store"), "single")
    check_target(str(tmp_path / "new"), "single")
    with pytest.raises(ValueError, match="shards is a directory of shards"):
        check_target(str(tmp_path / "shards"), "single")
    with pytest.raises(ValueError, match="store is a store: mode=single appends to it"):
        check_target(str(tmp_path / "store"), "shards")


# ---- leftovers -----------------------------------------------------------------------------------


def test_cleaning_removes_leftovers_and_keeps_what_was_committed(tmp_path: Path, crash: Any) -> None:
    kept = Staging(str(tmp_path), "kept")
    kept.commit_shards([stage(kept, 0, ["a"])])
    stage(Staging(str(tmp_path), "staged"), 0, ["b"])
    shard = Staging(str(tmp_path), "renamed")
    written = [stage(shard, 0, ["c"])]
    crash(Staging, "_mark")
    with pytest.raises(Crash):
        shard.commit_shards(written)
    assert clean_staging(str(tmp_path)) == []
    removed = clean_staging(str(tmp_path), older_than=0)
    names = {Path(item).name for item in removed}
    assert names == {"staged", "renamed", "part-00000-renamed"}
    assert bodies(tmp_path) == ["a"]
    assert clean_staging(str(tmp_path), older_than=0) == []


@pytest.mark.parametrize("gone", ["commitlog", ".", None])
def test_cleaning_beside_the_task_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str | None) -> None:
    """Which removes its store too, in part or whole, or still writes there."""
    left = stage(Staging(str(tmp_path), "left"), 0, ["a"])
    place = Staging(str(tmp_path), "left").directory
    remove = shutil.rmtree

    def meanwhile(directory: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        if gone is None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(directory))
        remove(place / str(left.name) / gone)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "commitlog")

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    assert clean_staging(str(tmp_path), older_than=0) == ([] if gone is None else [str(place)])
    assert place.exists() == (gone is None)
    clean_staging(str(tmp_path), older_than=0)
    assert not place.exists()


def test_cleaning_finishes_an_append(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"]), stage(staging, 1, ["b"])]
    crash(rmq.Store, "put_many", 2)
    with pytest.raises(Crash):
        staging.commit_single(written, CONFIG)
    assert clean_staging(str(tmp_path)) == []
    assert bodies(tmp_path) == ["a", "b"]
    assert commits(tmp_path)[0].rows == 2


def test_cleaning_where_spark_never_wrote_makes_nothing(tmp_path: Path) -> None:
    assert clean_staging(str(tmp_path)) == []
    assert clean_staging(str(tmp_path / "nix")) == []
    assert list(tmp_path.iterdir()) == []


def test_cleaning_takes_a_file_uri_and_no_object_store(tmp_path: Path) -> None:
    stage(Staging(str(tmp_path), "staged"), 0, ["b"])
    removed = clean_staging(f"file://{tmp_path}", older_than=0)
    assert removed == [f"{tmp_path}/rmq/spark/staging/staged"]
    with pytest.raises(ValueError, match="s3://bucket/s: stores on object stores are read only"):
        clean_staging("s3://bucket/s")


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "[" * 10**5,
    '{"number": 1, "rows": 1, "shards": ["../x"]}', '{"number": 1, "rows": 1, "shards": ["part-00000-a/../../x"]}',
    '{"number": -1, "rows": 1, "shards": []}', '{"number": true, "rows": 1, "shards": []}',
    '{"number": 1, "rows": 1, "shards": "x"}'], ids=lambda text: text[:50])  # fmt: skip
def test_a_marker_that_is_none_is_an_error_and_nothing_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").mkdir()
    path = tmp_path / "out"
    staging = Staging(str(path), "a")
    written = [stage(staging, 0, ["a"])]
    (path / "rmq" / "spark" / "commits").mkdir()
    (path / "rmq" / "spark" / "commits" / "bad.json").write_text(text)
    for call in (lambda: staging.commit_shards(written, overwrite=True), lambda: roots(str(path)),
                 lambda: clean_staging(str(path), older_than=0)):  # fmt: skip
        with pytest.raises(rmq.CorruptFileError, match=r"bad\.json: byte 0: no "):
            call()
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("text", ["", "{}", '{"begin": -1, "staged": []}', '{"begin": 0, "staged": ["../../../x"]}',
                                  '{"begin": 0, "staged": [1]}', '{"begin": 1e300, "staged": []}'])  # fmt: skip
def test_an_intent_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "rmq" / "spark" / "commits").mkdir(parents=True)
    (tmp_path / "rmq" / "spark" / "commits" / "bad.intent").write_text(text)
    with pytest.raises(rmq.CorruptFileError, match=r"bad\.intent: byte 0: no "):
        pending_begin(str(tmp_path))
    with pytest.raises(rmq.CorruptFileError, match=r"bad\.intent: byte 0: no "):
        clean_staging(str(tmp_path))
    assert not (tmp_path / "commitlog").exists()


def test_a_staged_store_that_is_gone_is_an_error_that_keeps_the_intent(tmp_path: Path, crash: Any) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    crash(Staging, "append")
    with pytest.raises(Crash):
        staging.commit_single(written, CONFIG)
    shutil.rmtree(staging.directory)
    with pytest.raises(FileNotFoundError):
        clean_staging(str(tmp_path))
    assert pending_begin(str(tmp_path)) == 0


def test_cleaning_leaves_what_is_named_nearly_like_a_shard(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    staging.commit_shards([stage(staging, 0, ["a"])], overwrite=False)
    for name in ("part-2024-x", "part-00000-notes.txt", "part-a-b"):
        (tmp_path / name).mkdir()
    (tmp_path / "part-00001-mine").touch()
    (tmp_path / "part-00002-left").mkdir()
    assert clean_staging(str(tmp_path), older_than=0) == [str(tmp_path / "part-00002-left")]
    assert {"part-2024-x", "part-00000-notes.txt", "part-a-b", "part-00001-mine"} <= set(os.listdir(tmp_path))
