# SPDX-License-Identifier: Apache-2.0
"""Bodies as Arrow views into a mapped segment, for readers inside the package: what they read, and how long."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pytest

import rmq
from rmq import views as viewing
from rmq._core._bodyviews import body_views
from rmq._core._columns import GrowingBuffer
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.views import view_batches

SEGMENT = 64 * 1024
BODIES = [random.Random(size).randbytes(size) for size in [*range(70), 127, 128, 4095, 4096, 4097, 20_000]] * 3


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    """Several segments, as a reader has them."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=10, max_index_num=1000)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("T", body, keys=f"k{n}") for n, body in enumerate(BODIES)])
    return CommitLog([tmp_path / "s" / "commitlog"], SEGMENT, writable=False)


def batches_of(log: CommitLog) -> list[pa.RecordBatch]:
    end = max(log.segments[-1].used_end(0) + log.segments[-1].start, 0)
    return list(view_batches(log, 0, end, ["topic", "keys"], check_crc=True))


def test_views_are_the_bodies_as_stored(log: CommitLog) -> None:
    batches = batches_of(log)
    for batch in batches:
        batch.validate(full=True)
    table = pa.Table.from_batches(batches)
    log.check()
    assert table.schema.names == ["topic", "keys", "raw_body"]
    assert [bytes(body) for body in table.column("raw_body").to_pylist()] == BODIES
    assert table.column("keys").to_pylist() == [[f"k{n}"] for n in range(len(BODIES))]
    assert len(batches) == len(log.segments) == 2


def test_a_batch_holds_many_scans(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "ROWS_TOGETHER", 7)
    monkeypatch.setattr(viewing, "BATCH_ROWS", 50)
    batches = batches_of(log)
    for batch in batches:
        batch.validate(full=True)
    assert [body for batch in batches for body in batch.column("raw_body").to_pylist()] == BODIES
    assert max(batch.num_rows for batch in batches) == 56
    assert len(batches) > 3


def test_views_live_on_behind_the_log_and_its_files(log: CommitLog) -> None:
    batches = batches_of(log)
    for segment in log.segments:
        os.unlink(segment.path)
    log.close()
    assert [body for batch in batches for body in batch.column("raw_body").to_pylist()] == BODIES


def test_a_file_cut_short_under_views_is_told_and_kills_nobody(log: CommitLog) -> None:
    batches = batches_of(log)
    os.truncate(log.segments[1].path, 4096)
    found = [body for batch in batches for body in batch.column("raw_body").to_pylist()]
    assert len(found) == len(BODIES)
    with pytest.raises(rmq.CorruptFileError, match="truncated"):
        log.check()


def test_an_empty_batch_has_no_views() -> None:
    views = GrowingBuffer()
    assert bytes(body_views(RecordBatch(), views)) == b""
    assert len(views) == 0
