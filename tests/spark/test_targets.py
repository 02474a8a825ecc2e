"""Where a write of Spark may begin: in a store, among shards or in an empty directory, not among files of others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark.staging import Staging, commits
from rmq.spark.write import check_target
from spark.test_staging import CONFIG, bodies, stage

MODES = pytest.mark.parametrize("mode", ["shards", "single"])
STORE = "no message store, but a directory with other files; choose an empty or new directory"
SHARDS = "no directory of shards, but one with other files"


def listed(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


@pytest.mark.parametrize("name", ["precious.txt", "src/a", "part-00000-a1.snappy.parquet", "rmq/__init__.py"])
def test_nothing_begins_among_files_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    found = name.partition("/")[0]
    with pytest.raises(rmq.UnsupportedFormatError, match=rf"{SHARDS} \({found}\); choose an empty or new directory"):
        check_target(str(tmp_path), "shards")
    if found != "rmq":  # which makes a directory a store
        with pytest.raises(rmq.UnsupportedFormatError, match=STORE):
            check_target(str(tmp_path), "single")


@MODES
def test_what_spark_has_begun_and_what_it_passes_over_are_no_files_of_others(tmp_path: Path, mode: str) -> None:
    check_target(str(tmp_path / "new"), mode)
    for name in ("lost+found", "_checkpoint", ".hidden.crc", "_SUCCESS"):
        (tmp_path / name).mkdir()
        check_target(str(tmp_path), mode)
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    check_target(str(tmp_path), mode)
    (tmp_path / "lock").touch()  # of a bulk_load that died
    check_target(str(tmp_path), mode)
    staging.commit_single(written, CONFIG) if mode == "single" else staging.commit_shards(written)
    (tmp_path / "notes.txt").touch()
    check_target(str(tmp_path), mode)  # a store, or a directory of shards, is one whatever lies beside
    assert bodies(tmp_path) == ["a"]


def test_shards_are_not_published_in_a_directory_that_became_a_store(tmp_path: Path) -> None:
    check_target(str(tmp_path), "shards")
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    single = Staging(str(tmp_path), "b")
    single.commit_single([stage(single, 0, ["b"])], CONFIG)
    with pytest.raises(ValueError, match="became a store meanwhile"):
        staging.commit_shards(written)
    staging.abandon()
    assert bodies(tmp_path) == ["b"]
    check_target(str(tmp_path), "single")
    assert not list(tmp_path.glob("part-*"))


def test_shards_do_not_go_into_a_store_whose_log_is_away(tmp_path: Path) -> None:
    """They would be read by nobody when it is back."""
    path = tmp_path / "one"
    single, shards = Staging(str(path), "a"), Staging(str(path), "b")
    single.commit_single([stage(single, 0, ["a"])], CONFIG)
    written = [stage(shards, 0, ["b"])]
    (path / "commitlog").rename(tmp_path / "log")
    with pytest.raises(ValueError, match="is a store: mode=single appends to it"):
        check_target(str(path), "shards")
    with pytest.raises(ValueError, match="became a store meanwhile"):
        shards.commit_shards(written)
    with pytest.raises(rmq.CorruptFileError, match="the commit log has no segments, but other files do"):
        shards.commit_single(written, CONFIG)
    (path / "commitlog").rmdir()
    (tmp_path / "log").rename(path / "commitlog")
    shards.commit_single(written, CONFIG)
    assert bodies(path) == ["a", "b"]


def test_shards_that_are_not_committed_yet_are_shards(tmp_path: Path) -> None:
    (tmp_path / "part-00000-a1").mkdir()
    check_target(str(tmp_path), "shards")
    with pytest.raises(rmq.UnsupportedFormatError, match=STORE):
        check_target(str(tmp_path), "single")


def test_a_store_does_not_begin_beside_what_spark_began_among_files_of_others(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["a"])]
    (tmp_path / "precious.txt").touch()
    before = listed(tmp_path)
    for call in (lambda: rmq.open(tmp_path, "a"), lambda: staging.commit_single(written, CONFIG)):
        with pytest.raises(rmq.UnsupportedFormatError, match=STORE):
            call()
    assert [name for name in listed(tmp_path) if not name.startswith("rmq/spark")] == \
        [name for name in before if not name.startswith("rmq/spark")]  # fmt: skip


@pytest.mark.parametrize("name", ["checkpoint", "state/orders"])
def test_a_stream_s_own_checkpoint_may_lie_among_its_shards(tmp_path: Path, name: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "out" / name
    place.mkdir(parents=True)
    for checkpoint in (str(place), f"out/{name}", f"{tmp_path}/x/../out/{name}"):
        check_target("out", "shards", checkpoint)
        check_target(str(tmp_path / "out"), "shards", checkpoint)
        with pytest.raises(rmq.UnsupportedFormatError, match=STORE):
            check_target("out", "single", checkpoint)  # `checkpoint` is a file of a store's
    for checkpoint in (str(tmp_path / "elsewhere"), None):
        with pytest.raises(rmq.UnsupportedFormatError, match=rf"{SHARDS} \({name.split('/')[0]}\)"):
            check_target("out", "shards", checkpoint)


@pytest.mark.spark
@pytest.mark.parametrize(("mode", "how"), [("shards", "append"), ("shards", "overwrite"), ("single", "append")])
def test_a_write_into_a_directory_of_others_makes_nothing(spark: Any, tmp_path: Path, mode: str, how: str) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    frame = spark.createDataFrame([(b"a",)], "body binary")
    with pytest.raises(Exception, match="choose an empty or new directory"):
        frame.write.format("rmq").mode(how).options(topic="t", mode=mode).save(str(tmp_path))
    with pytest.raises(FileExistsError, match=r"exists and holds precious\.txt"):
        rmq.spark.bulk_load(frame, tmp_path, topic="t")
    assert listed(tmp_path) == ["precious.txt"]


@pytest.mark.spark
def test_a_stream_begins_beside_its_checkpoint_and_not_among_files_of_others(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "from", "x") as store:
        store.put_many([rmq.Message("t", b"a")] * 3)

    def run(path: Path, **options: str) -> None:
        stream = spark.readStream.format("rmq").load(str(tmp_path / "from")).select("topic", "body")
        writer = stream.writeStream.format("rmq").options(segmentBytes="65536", **options)
        query = writer.trigger(availableNow=True).start(str(path))
        query.awaitTermination()

    for name, mode in (("checkpoint", "shards"), ("_checkpoint", "single")):
        path = tmp_path / mode
        run(path, mode=mode, checkpointLocation=f"{path}/{name}")
        with rmq.open(tmp_path / "from", "r+") as store:
            store.put(rmq.Message("t", mode.encode()))
        run(path, mode=mode, checkpointLocation=f"{path}/{name}")
        assert [commit.rows for commit in commits(path)][1:] == [1]
        assert bodies(path)[-1] == mode
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").touch()
    with pytest.raises(Exception, match="choose an empty or new directory"):
        run(tmp_path / "other", checkpointLocation=str(tmp_path / "elsewhere"))
    assert os.listdir(tmp_path / "other") == ["precious.txt"]
