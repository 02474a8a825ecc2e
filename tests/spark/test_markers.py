# SPDX-License-Identifier: Apache-2.0
"""What says that a job has happened: read while others commit, and kept as long as a stream may try a batch again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import rmq
from rmq.scan import schema_of
from rmq.spark import staging
from rmq.spark.options import ReadOptions
from rmq.spark.source import MessageReader, stores_of
from rmq.spark.staging import BATCHES_KEPT, Commit, Staging, Written, commits, roots

QUERY = "0f9c6f4e-9d1b-4f5e-8a46-0c3e1b8a2a11"


def mark(path: Path, number: int, *, overwrite: bool = False) -> None:
    commits_of = path / "rmq" / "spark" / "commits"
    commits_of.mkdir(parents=True, exist_ok=True)
    content = {"number": number, "overwrite": overwrite, "shards": [f"part-00000-{number}"], "rows": 1}
    (commits_of / f"{number}.json").write_text(json.dumps(content))


def test_what_happened_is_told_though_jobs_commit_faster_than_markers_are_read(tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Each marker is read once; those that came since the first look are later jobs."""
    read, real = [], Commit.read
    for number in range(1, 11):
        mark(tmp_path, number)

    def beside_a_writer(marker: Path) -> Commit:
        read.append(marker)
        mark(tmp_path, 10 + len(read))
        return real(marker)

    monkeypatch.setattr(Commit, "read", beside_a_writer)
    assert [commit.number for commit in commits(tmp_path)] == [*range(1, 11)]
    assert len(read) == len(set(read))


def test_an_overwrite_between_two_looks_is_seen_with_all_it_takes_away(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    real = Commit.read
    for number in range(1, 4):
        mark(tmp_path, number)

    def beside_an_overwrite(marker: Path) -> Commit:
        if marker.stem == "2" and not (marker.parent / "4.json").exists():
            mark(tmp_path, 4, overwrite=True)
            for number in range(1, 4):
                (marker.parent / f"{number}.json").unlink()
        return real(marker)

    monkeypatch.setattr(Commit, "read", beside_an_overwrite)
    assert roots(str(tmp_path)) == [str(tmp_path / "part-00000-4")]


def test_a_job_that_a_listing_passed_over_is_found_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is read while files come may show a later one and not one before it."""
    for number in range(1, 5):
        mark(tmp_path, number)
    looks, real = iter([{"3.json"}, set()]), staging._markers
    monkeypatch.setattr(staging, "_markers",
                        lambda path: {marker for marker in real(path) if marker.name not in next(looks, set())})
    assert [commit.number for commit in commits(tmp_path)] == [1, 2, 3, 4]


def append(path: Path, job: str) -> None:
    one = Staging(str(path), job)
    one.directory.mkdir(parents=True)
    with rmq.open(one.directory / "00000.0.x", "x") as store:
        store.put(rmq.Message("t", job.encode()))
    one.commit_single([Written(0, "00000.0.x", 1)], rmq.StoreConfig(mapped_file_size_commit_log=65536))


def test_one_store_keeps_markers_of_the_batches_that_a_stream_may_try_again(tmp_path: Path) -> None:
    for job in ("a-batch-job", "other-0000000001", f"{QUERY}-0000000000"):
        append(tmp_path, job)
    for batch in (1, BATCHES_KEPT - 1, BATCHES_KEPT, BATCHES_KEPT + 1):
        append(tmp_path, f"{QUERY}-{batch:010d}")
    kept = {commit.job for commit in commits(tmp_path)}
    assert kept == {"a-batch-job", "other-0000000001",
                    *(f"{QUERY}-{batch:010d}" for batch in (BATCHES_KEPT - 1, BATCHES_KEPT, BATCHES_KEPT + 1))}
    append(tmp_path, f"{QUERY}-{BATCHES_KEPT:010d}")  # once more, after a failure: it has happened
    with rmq.open(tmp_path) as store:
        assert store.scan().read_all().num_rows == 7


def count(path: Path, **options: str) -> int:
    asked = ReadOptions.parse({"path": str(path)} | options)
    reader = MessageReader(asked, from_arrow_schema(schema_of(["phy_offset"])))
    return sum(len(batch) for part in reader.partitions() for batch in reader.read(part))


def test_one_store_whose_log_lies_elsewhere_is_no_directory_without_shards(tmp_path: Path) -> None:
    path, log = tmp_path / "one", tmp_path / "log"
    for job in ("a", "b"):
        append(path, job)
    (path / "commitlog").rename(log)
    for table in ("messages", "queues"):
        asked = ReadOptions.parse({"path": str(path), "table": table})
        assert stores_of(asked) == [(str(path), str(path))]
    with pytest.raises(rmq.CorruptFileError, match="no segments, but other files do; one that lies elsewhere"):
        count(path)
    (tmp_path / "broker.conf").write_text(f"storePathRootDir={path}\nstorePathCommitLog={log}\n")
    assert count(path, brokerConf=str(tmp_path / "broker.conf")) == 2
    (path / "commitlog").symlink_to(tmp_path / "not mounted")
    with pytest.raises(rmq.CorruptFileError):
        count(path)
    (path / "commitlog").unlink()
    log.rename(path / "commitlog")
    assert count(path) == 2


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_directory_of_no_shards_is_empty(tmp_path: Path, is_overwrite: bool) -> None:
    if is_overwrite:
        mark(tmp_path, 1)
    Staging(str(tmp_path), "nothing").commit_shards([Written(0, None, 0)], overwrite=is_overwrite)
    assert count(tmp_path) == 0


def test_a_marker_that_is_a_link_to_nothing_is_damage_and_is_not_waited_for(tmp_path: Path) -> None:
    """One that another job has just taken away is looked for again."""
    mark(tmp_path, 1)
    (tmp_path / "rmq/spark/commits/2.json").symlink_to("nowhere")
    with pytest.raises(rmq.CorruptFileError, match=r"2\.json: byte 0: is a symbolic link"):
        commits(tmp_path)
