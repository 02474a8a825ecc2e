# SPDX-License-Identifier: Apache-2.0
"""One new store of what many tasks have staged: each task's log gets a place in the store's, whole segments, then all
appear by one rename.

    <path>/rmq/spark/staging/<job>/<partition>.<attempt>.<id>           staged logs, all offsets from 0
    <path>/rmq/spark/staging/<job>/placed/<partition>.<attempt>.<id>    their segments as the store has them
    <path>/rmq/spark/staging/<job>/commitlog                            all of these; renamed, they are the store
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.geometry import KEPT
from rmq.lock import StoreLock, holder_pid
from rmq.logpart import Part, PartWriter, Queue, place_part
from rmq.marks import write_meta
from rmq.paths import BEGUN_BY_SPARK, StorePaths, segment_name
from rmq.segment import DIRECTORY_MODE, make_directory, sync_directory
from rmq.spark.staging import Staging
from rmq.store import open as open_store

if TYPE_CHECKING:
    import pyarrow as pa

    Put = Callable[[Callable[..., object], Iterable[pa.RecordBatch]], int]  # puts rows of batches by a put_many

PLACED, GATHERED = "placed", "commitlog"
OF_A_NEW_STORE = {"rmq", "lock"}  # in its directory, and below in rmq/: what loads that failed may have left


@dataclass(frozen=True)
class Staged:
    """What one task has staged. name: of its directory."""

    partition: int
    name: str
    rows: int
    part: Part


@dataclass(frozen=True)
class Place:
    """Where a staged part stands in the store's log: from phy offset `begin`, which starts a segment, on.

    queue_offsets: of its first message in each queue.
    """

    staged: Staged
    begin: int
    queue_offsets: dict[Queue, int]
    is_last: bool

    @property
    def end(self) -> int:
        return self.begin + self.staged.part.end


@dataclass(frozen=True)
class Placed:
    """The segments of a partition, ready to be renamed: a directory below `placed`."""

    partition: int
    name: str


def check_new(path: Path) -> None:
    """FileExistsError when there is anything at a path but what a load that failed has left; NotADirectoryError."""
    if not path.exists():
        return
    found = {item.name for item in path.iterdir()} - OF_A_NEW_STORE
    own = path / "rmq"
    if own.is_dir():
        found |= {f"rmq/{item.name}" for item in own.iterdir() if item.name not in BEGUN_BY_SPARK}
        found |= {f"rmq/spark/commits/{item.name}" for item in StorePaths(path).commits.glob("*.json")}
    if found:
        raise FileExistsError(errno.EEXIST, f"exists and holds {min(found)}; bulk_load makes a new store, mode=single "
                              "of df.write appends to one", str(path))  # fmt: skip


@contextlib.contextmanager
def made(directory: Path, partition: int, attempt: int) -> Iterator[Path]:
    """A new directory for one attempt; it loses its `.tmp` when all in it is there, and goes with an error."""
    make_directory(directory)
    # Of its own: Spark's numbers come again after a restart.
    place = directory / f"{partition:05d}.{attempt}.{uuid.uuid4().hex[:12]}.tmp"
    place.mkdir(DIRECTORY_MODE)
    try:
        yield place
        os.rename(place, place.with_suffix(""))
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def stage(staging: Staging, partition: int, attempt: int, batches: Iterable[pa.RecordBatch], put: Put,
          config: StoreConfig, store_timestamp: int) -> Staged | None:  # fmt: skip
    """What a task does first: all rows of a partition as a log of its own. None when it has no rows."""
    filled = (batch for batch in batches if len(batch))
    first = next(filled, None)
    if first is None:
        return None
    with made(staging.directory, partition, attempt) as place:
        with PartWriter(place, config, store_timestamp) as writer:
            rows = put(writer.put_many, chain([first], filled))
            part = writer.finish()
        return Staged(partition, place.stem, rows, part)


def plan(staged: Sequence[Staged], segment_size: int) -> list[Place]:
    """Places one behind the other, in the order of partitions. ValueError for a partition that was staged twice."""
    places: list[Place] = []
    begin, following = 0, dict[Queue, int]()
    items = sorted(staged, key=lambda item: item.partition)
    if len({item.partition for item in items}) < len(items):
        raise ValueError("a partition was staged twice")
    for item in items:
        end, queues = item.part
        first = {queue: following.get(queue, 0) for queue in queues}
        places.append(Place(item, begin, first, item is items[-1]))
        following |= {queue: first[queue] + count for queue, count in queues.items()}
        begin += -(-end // segment_size) * segment_size
    return places


def put_in_place(staging: Staging, place: Place, segment_size: int, attempt: int = 0) -> Placed:
    """What a task does then: the segments of one place. What was staged stays, for another attempt.

    Raises CorruptFileError when that is not what was staged, FileNotFoundError when it is not here, OSError.
    """
    staged = place.staged
    source = staging.directory / staged.name
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not to be seen here: the driver and all executors need {staging.path}")
    with made(staging.directory / PLACED, staged.partition, attempt) as target:
        part = place_part(source, target, staged.part, segment_size=segment_size, begin=place.begin,
                          queue_offsets=place.queue_offsets, closed=not place.is_last)  # fmt: skip
        if part != staged.part:
            raise CorruptFileError(source, 0, "the log has other messages than were staged")
        return Placed(staged.partition, target.stem)


def publish(staging: Staging, places: Sequence[Place], placed: Sequence[Placed], config: StoreConfig) -> None:
    """The store is there, with all messages, queues and index, and on disk, when this returns.

    Raises ValueError when a place is missing or was made twice, FileExistsError, StoreLockedError, OSError. An error
    whose note says so came behind the rename: the log is whole, the next open for writing derives what is missing.
    """
    if sorted(item.partition for item in placed) != [place.staged.partition for place in places]:
        raise ValueError("a place is missing, or was made twice")
    names = {item.partition: item.name for item in placed}
    size, paths = config.mapped_file_size_commit_log, StorePaths(staging.path.absolute())
    gathered = staging.directory / GATHERED
    with staging.locked():
        make_directory(gathered)
        for place in places:
            for start in range(place.begin, place.end, size):
                source = staging.directory / PLACED / names[place.staged.partition] / segment_name(start)
                os.rename(source, gathered / source.name)
        sync_directory(gathered)
        with contextlib.closing(StoreLock(paths.lock, lambda: holder_pid(paths))):
            check_new(staging.path)
            write_meta(paths, {"origin": "rmq", **{name: getattr(config, name) for name in KEPT}})
            os.rename(gathered, paths.commit_logs[0])
    try:
        sync_directory(paths.root)
        with open_store(staging.path, "r+", config=config) as store:
            end = places[-1].end if places else 0
            if store.max_phy_offset != end:
                raise CorruptFileError(paths.commit_logs[0], store.max_phy_offset, f"the log must end at byte {end}")
    except BaseException as error:
        error.add_note(f"{staging.path}: the store is there; opening it for writing derives its queues and index")
        raise
