# SPDX-License-Identifier: Apache-2.0
"""Opening stores of 1, 4 and 16 segments: closed, and killed with 4 MiB behind the last flush.

The peer is not RocketMQ: it is our own scanner reading the range that RocketMQ's start rules read of the same store.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from ratios import READS, SYNCED, WALL, Call, Measure, Peer, Report
from sample import TOPIC, random_keys, table

import rmq
from rmq import commitlog
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.logend import start_without_marks
from rmq.logscan import CHECK_CRC, LogScan
from rmq.paths import StorePaths

SEGMENT = 16 * 1024**2
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=50_000, max_index_num=250_000,
                         flush_interval_commit_log=2**31 - 1)  # fmt: skip
BODY, CHUNK = 1024, 1000  # bytes, messages
UNFLUSHED = 4 * 1024**2
SEGMENT_SECONDS = 10  # of the messages' clock; RocketMQ takes 3 s off the checkpoint's time


class Clock:
    """A store timestamp that follows the log: a segment takes SEGMENT_SECONDS."""

    def __init__(self) -> None:
        self.phy_offset = 0

    def __call__(self) -> int:
        return 1_700_000_000_000 + self.phy_offset * SEGMENT_SECONDS * 1000 // SEGMENT


@dataclass(frozen=True)
class Grown:
    path: Path
    end: int
    unflushed: int
    count: int


def copy(source: Path, target: Path) -> None:
    """A copy of a store; full segments, which no opening writes to, are the same files."""
    shutil.rmtree(target, ignore_errors=True)
    full = set(sorted((source / "commitlog").iterdir())[:-2])

    def copy_file(path: str, to: str) -> None:
        if Path(path) in full:
            os.link(path, to)
            return
        size = os.path.getsize(path)
        with open(path, "rb") as reader, open(to, "wb") as writer:
            os.truncate(to, size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(reader.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(reader.fileno(), at, os.SEEK_HOLE)
                at += os.copy_file_range(reader.fileno(), writer.fileno(), end - at, at, at)

    shutil.copytree(source, target, copy_function=copy_file)


@pytest.fixture(scope="module", params=[1, 4, 16])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Grown]]:
    """A store of so many segments, the last one three quarters full, closed and killed."""
    root, clock = tmp_path_factory.mktemp("grown"), Clock()
    keys = iter(random_keys(16 * SEGMENT // BODY))
    made: dict[str, Grown] = {}
    with rmq.open(root / "live", "x", config=CONFIG, clock=clock) as live:
        count = 0

        def fill(end: int) -> None:
            nonlocal count
            while live.max_phy_offset < end:
                count += live.put_many(table([next(keys) for _ in range(CHUNK)], BODY, count), topic=TOPIC,
                                       results=False)  # fmt: skip
                clock.phy_offset = live.max_phy_offset

        end = request.param * SEGMENT - SEGMENT // 4
        fill(end - UNFLUSHED)
        live.flush()
        flushed = live.max_phy_offset
        fill(end)
        live.topics()
        copy(root / "live", root / "killed")
        made["killed"] = Grown(root / "killed", live.max_phy_offset, live.max_phy_offset - flushed, count)
    made["closed"] = Grown(root / "live", made["killed"].end, 0, count)
    yield made
    shutil.rmtree(root)


def scanned_by_rule(store: Grown, kind: str) -> Iterator[Peer]:
    """Our scanner on what RocketMQ reads: after a normal exit the last three segments (up to 5.3.1) or the one of the
    last unit (later); after another from the segment whose first record the checkpoint's time covers."""
    directories = [store.path / "commitlog"]
    log = CommitLog(directories, SEGMENT, writable=False)
    checkpoint = Checkpoint(StorePaths(store.path).checkpoint)
    starts = {"": start_without_marks(log, kind == "closed", checkpoint, store.end)}
    if kind == "closed":
        starts = {" 5.3.2 or later": starts[""], " up to 5.3.1": log.segments[max(0, len(log.segments) - 3)].start}
    log.close()

    def scan(start: int) -> None:
        log = CommitLog(directories, SEGMENT, writable=False)
        deque(log.records(start, store.end, checks=CHECK_CRC | PARSE_PROPERTIES), 0)
        log.close()

    for releases, start in starts.items():
        size = f"{(store.end - start) / 1e6:.0f} MB"
        yield Peer(f"our scanner on the {size} of RocketMQ{releases}", partial(partial, scan, start))


@WALL
@pytest.mark.parametrize("kind", ["closed", "killed"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open(measure: Measure, report: Report, grown: dict[str, Grown], tmp_path: Path, mode: str, kind: str,
              request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Until the bounds of a queue are told: a reader derives units then."""
    store, place = grown[kind], tmp_path / "store"

    def opened() -> None:
        with rmq.open(place, mode) as found:
            assert found.topics() == {TOPIC: {0: (0, store.count)}}

    def ours() -> Call:
        copy(store.path, place)
        return opened

    scanned = []

    class CountedScan(LogScan):
        def __iter__(self) -> Iterator[RecordBatch]:
            before = self.phy_offset
            for batch in super().__iter__():
                scanned.append((before, batch.next_phy_offset))
                yield batch
                before = batch.next_phy_offset

    with monkeypatch.context() as patch:
        patch.setattr(commitlog, "LogScan", CountedScan)
        ours()()
    low = min((begin for begin, _ in scanned), default=store.end)
    read, last, unflushed, whole = (f"{size / 1e6:.1f} MB" for size in (
        sum(end - begin for begin, end in scanned), store.end - low, store.unflushed, store.end))  # fmt: skip
    report.notes.append(f"{request.node.name}: {read} of records read, of the last {last}; {unflushed} unflushed, "
                        f"log of {whole}")  # fmt: skip
    measure(1, SYNCED if mode == "r+" else READS, ours, *scanned_by_rule(store, kind))
