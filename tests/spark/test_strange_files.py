# SPDX-License-Identifier: Apache-2.0
"""Links, pipes and wrong units where Spark writes and reads: none is followed, nobody waits for ever. No session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import error_in_child, in_child

import rmq
from rmq.spark import clean_staging, opened, stream
from rmq.spark.staging import Staging, commits
from spark.test_staging import bodies, stage

PATIENCE_S = 5  # who waits for a pipe, waits for ever


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "others").write_text("precious")
    lock = tmp_path / "s" / "rmq" / "spark" / "commit.lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to(tmp_path / "others")
    for call in (lambda: clean_staging(str(tmp_path / "s")), Staging(str(tmp_path / "s"), "a").abandon):
        with pytest.raises(OSError, match=r"commit\.lock"):
            call()
    assert (tmp_path / "others").read_text() == "precious"


def test_a_lock_that_is_a_pipe_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rmq" / "spark").mkdir(parents=True)
    os.mkfifo(tmp_path / "rmq" / "spark" / "commit.lock")
    for call in (lambda: clean_staging(str(tmp_path)), lambda: Staging(str(tmp_path), "a").commit_shards([])):
        assert error_in_child(call, patience=PATIENCE_S) == "CorruptFileError"


@pytest.mark.parametrize("end", [Staging.drop, Staging.abandon, lambda staging: clean_staging(str(staging.path), -10)],
                         ids=["drop", "abandon", "clean_staging"])  # fmt: skip
def test_a_pipe_among_the_jobs_is_removed(tmp_path: Path, end: Callable[[Staging], object]) -> None:
    staging = Staging(str(tmp_path), "a")
    staging.directory.parent.mkdir(parents=True)
    os.mkfifo(staging.directory)
    in_child(lambda: end(staging), patience=PATIENCE_S)
    assert not staging.directory.exists()


def test_a_pipe_in_a_shard_s_place_is_removed_by_the_job_that_has_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "part-00000-a")
    in_child(Staging(str(tmp_path), "a").abandon, patience=PATIENCE_S)
    assert os.listdir(tmp_path) == ["rmq"]


def test_a_pipe_in_a_shard_s_place_is_replaced_by_the_shard(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), "a")
    written = [stage(staging, 0, ["one"])]
    os.mkfifo(tmp_path / "part-00000-a")
    in_child(lambda: staging.commit_shards(written), patience=PATIENCE_S)
    assert bodies(tmp_path) == ["one"]


def test_a_pipe_in_the_place_of_a_shard_that_is_replaced_is_removed(tmp_path: Path) -> None:
    (shard,) = [commit.shards[0] for commit in committed(tmp_path, "a")]
    (tmp_path / shard).rename(tmp_path.with_name("elsewhere"))
    os.mkfifo(tmp_path / shard)
    in_child(lambda: committed(tmp_path, "b"), patience=PATIENCE_S)
    assert not (tmp_path / shard).exists()
    assert bodies(tmp_path) == ["b"]


def committed(path: Path, job: str) -> list[object]:
    """An overwrite by a job; what happened."""
    staging = Staging(str(path), job)
    staging.commit_shards([stage(staging, 0, [job])], overwrite=True)
    return commits(path)


def test_a_store_whose_first_segment_is_a_pipe_is_opened_as_without_spark(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    os.mkfifo(tmp_path / "commitlog" / f"{0:020d}")

    def rows() -> tuple[int, object]:
        with opened.using(str(tmp_path)) as store:
            return store.scan().read_all().num_rows, opened.log_head(str(tmp_path))

    with rmq.open(tmp_path) as store:
        expected = store.scan().read_all().num_rows
    assert in_child(rows, patience=PATIENCE_S) == (expected, None)


@pytest.mark.parametrize("wrong", [1, 4, 5])
def test_a_limit_on_rows_gets_over_a_unit_that_points_back(tmp_path: Path, wrong: int) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", bytes(100))] * 6)
    with (tmp_path / "s" / "consumequeue" / "T" / "0" / f"{0:020d}").open("r+b") as file:
        unit = file.read(20)
        file.seek(20 * wrong)
        file.write(unit)

    def reached() -> list[int]:
        places = [1]
        with rmq.open(tmp_path / "s") as store:
            while places[-1] < 6:
                places += stream._behind_rows(store, {("T", 0): range(places[-1], 6)}, 1).values()
        return places

    found = in_child(reached, patience=PATIENCE_S)
    assert found == sorted(set(found))
