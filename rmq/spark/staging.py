# SPDX-License-Identifier: Apache-2.0
"""What tasks have written becomes part of a directory of stores, or of one store: all of it, once.

    <path>/rmq/spark/staging/<job>/<partition>.<attempt>.<id>    whole small stores, one for each task attempt
    <path>/rmq/spark/commits/<job>.json                          the job's shards: with this file it has happened
    <path>/rmq/spark/commits/<job>.intent                        mode=single: staged whole, its append is under way
    <path>/part-<partition>-<job>                                shards; readers take those that a commit names

Nothing else tells: staged stores and shards without a commit are leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rmq._core._putbatch import PutBatch
from rmq.chunks import put_chunks
from rmq.columns import put_rules
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.objects import refuse_elsewhere
from rmq.paths import local_path
from rmq.segment import make_directory, opened, read_file, remove_tree, sync_directory, write_atomically
from rmq.spark.appended import Appended
from rmq.store import Store
from rmq.store import open as open_store

Answer = TypeVar("Answer")
OWN = Path("rmq", "spark")
BATCHES_KEPT = 100  # as spark.sql.streaming.minBatchesToRetain
MARKER_LIMIT = 64 * 1024 * 1024  # bytes; a shard takes 60
SHARD = re.compile(r"part-\d{5,10}-[\w-]{1,100}", re.ASCII)
_BATCH = re.compile(r"[\w-]+-\d{10,}", re.ASCII)  # a stream's job
_STAGED = re.compile(r"\d{5,10}\.\d{1,10}\.\w{1,32}", re.ASCII)
PUT_COLUMNS = ["topic", "queue_id", "flag", "sys_flag", "born_timestamp", "born_host", "store_host", "reconsume_times",
               "prepared_transaction_offset", "raw_body", "raw_properties"]  # fmt: skip


@dataclass(frozen=True)
class Commit:
    """A job that has happened; number: its place among those of its directory."""

    job: str
    number: int
    overwrite: bool
    shards: tuple[str, ...]
    rows: int

    @property
    def is_append(self) -> bool:  # of mode=single: its rows are in the log, wherever that is now
        return self.rows > 0 and not self.shards

    @classmethod
    def read(cls, marker: Path) -> Commit:
        """CorruptFileError for what is no marker: later jobs remove what it names."""
        found = read_json(marker)
        shards, numbers = found.get("shards"), (found.get("number"), found.get("rows"))
        if not (isinstance(shards, list) and all(type(number) is int and number >= 0 for number in numbers)
                and all(isinstance(name, str) and SHARD.fullmatch(name) for name in shards)):  # fmt: skip
            raise CorruptFileError(marker, 0, "no marker of a job")
        return cls(marker.stem, found["number"], found.get("overwrite") is True, tuple(shards), found["rows"])


@dataclass(frozen=True)
class Intent:
    """An append to one store: where it began in the log, and which staged stores it takes."""

    begin: int
    staged: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Intent:
        """CorruptFileError for what is none."""
        found = read_json(path)
        begin, staged = found.get("begin"), found.get("staged")
        if not (type(begin) is int and 0 <= begin < 2**63 and isinstance(staged, list)
                and all(isinstance(name, str) and _STAGED.fullmatch(name) for name in staged)):  # fmt: skip
            raise CorruptFileError(path, 0, "no intent of an append")
        return cls(begin, tuple(staged))


def read_json(path: Path) -> dict[str, Any]:
    if path.is_symlink():  # to nothing it would be one that is about to go, for ever
        raise CorruptFileError(path, 0, "is a symbolic link")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(read_file(path, MARKER_LIMIT)), dict):
            return found
    raise CorruptFileError(path, 0, "no JSON object")


@dataclass(frozen=True)
class Written:
    """What one task has staged. name: None when it had no rows."""

    partition: int
    name: str | None
    rows: int


class Staging:
    """The protocol of one job in one directory. job: the same for all tasks and for each try of a stream's batch."""

    def __init__(self, path: str, job: str) -> None:
        self.path, self.job = Path(path), job
        self.directory = self.path / OWN / "staging" / job
        self._commits = self.path / OWN / "commits"
        self.marker = self._commits / f"{job}.json"
        self.intent = self._commits / f"{job}.intent"

    @property
    def is_committed(self) -> bool:
        return self.marker.exists()

    def commit_shards(self, written: list[Written], *, overwrite: bool = False) -> None:
        """Publish the staged stores as shards, once; ValueError in what became a store meanwhile."""
        with self.locked():
            if not self.is_committed:
                if is_store(self.path):
                    raise ValueError(f"{self.path} became a store meanwhile: shards need a directory of their own")
                shards = [self._publish(item.partition, item.name) for item in _in_order(written) if item.name]
                sync_directory(self.path)
                self._mark(overwrite, shards, sum(item.rows for item in written))
            self._drop_replaced()
            self.drop()

    def _publish(self, partition: int, name: str) -> str:
        staged, shard = self.directory / name, self.path / f"part-{partition:05d}-{self.job}"
        if staged.exists():
            remove_tree(shard)  # of a try that did not get to the marker
            os.rename(staged, shard)
        elif not shard.exists():
            raise self._unseen(staged)
        return shard.name

    def commit_single(self, written: list[Written], config: StoreConfig | None = None) -> None:
        """Append the staged stores' messages to the store at `path`, in the order of partitions.

        config: of a store that is not there yet. OSError and others after the append has begun: it is finished by the
        next write or by clean_staging, the rows must not be written again.
        """
        with self.locked():
            finish_interrupted(self.path)
            if not self.is_committed:
                names = [item.name for item in _in_order(written) if item.name]
                self._check_seen(names)
                config = None if (self.path / "commitlog").is_dir() else config
                try:
                    with open_store(self.path, "a", config=config) as store:
                        self._check(store, names)
                        store.flush()
                        begun = {"begin": store.max_phy_offset, "staged": names}
                        write_atomically(self.intent, json.dumps(begun).encode())
                        self.append(store)
                except BaseException as error:
                    if self.is_committed or self.intent.exists():  # also of the store's close
                        error.add_note(f"{self.path}: the append has begun; clean_staging or the next write ends it")
                    raise
            self.drop()

    def _check_seen(self, names: list[str]) -> None:
        for name in names:
            if not (self.directory / name).is_dir():
                raise self._unseen(self.directory / name)

    def _unseen(self, staged: Path) -> FileNotFoundError:
        return FileNotFoundError(f"{staged} is not to be seen here: the driver and all executors need {self.path}")

    def _check(self, store: Store, names: list[str]) -> None:
        """Every row by the rules of the store, which may be others than those of the staged ones: an append that has
        begun could never end. IllegalMessageError.
        """
        batch = PutBatch(put_rules(store.config))
        for name in names:
            with open_store(self.directory / name) as staged:
                for _, load in put_chunks(staged.scan(columns=PUT_COLUMNS), None, None, None):
                    load(batch)
                    batch.release()

    def append(self, store: Store) -> None:
        """Append what the intent says and was not appended yet; then the job has happened."""
        intent = Intent.read(self.intent)
        if intent.begin < store.min_phy_offset:  # rows that were appended are no more to be told from missing ones
            raise CorruptFileError(self.intent, 0, f"the append began at byte {intent.begin} of the log, which was "
                                   f"cleaned to byte {store.min_phy_offset} since: rows of it are gone; remove this "
                                   "file to give up those that are missing; a stream that is started again writes its "
                                   "batch again, whole")  # fmt: skip
        present, rows = Appended(store, intent.begin), 0
        for name in intent.staged:
            with open_store(self.directory / name) as staged:
                for batch in staged.scan(columns=[*PUT_COLUMNS, "body_crc"]):
                    missing = present.skip(batch)
                    rows += len(batch)
                    if len(missing):
                        store.put_many(missing.select(PUT_COLUMNS), results=False)
        store.flush()
        self._mark(False, [], rows)
        self._forget_batches()
        self.intent.unlink()
        sync_directory(self._commits)

    def _forget_batches(self) -> None:
        """Markers of a stream's batches that it never tries again go, where they name no shards."""
        query, _, batch = self.job.rpartition("-")
        if not _BATCH.fullmatch(self.job):
            return
        for marker in self._commits.glob(f"{query}-*.json"):
            if _BATCH.fullmatch(marker.stem) and int(marker.stem.rpartition("-")[2]) <= int(batch) - BATCHES_KEPT:
                marker.unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove what this job has staged, unless its append is under way."""
        if not self.intent.exists():
            remove_tree(self.directory)

    def abandon(self) -> None:
        """Remove what a job that failed has left, unless it has happened or its append is under way."""
        with self.locked():
            if not self.is_committed:
                for shard in self.path.glob(f"part-*-{self.job}"):
                    remove_tree(shard)
            self.drop()

    def _drop_replaced(self) -> None:
        """Shards and markers of before the last overwrite go."""
        known = commits(self.path)
        last = last_overwrite(known)
        for commit in known:
            if commit.number < last:
                for shard in commit.shards:
                    remove_tree(self.path / shard)
                (self._commits / f"{commit.job}.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One driver at a time."""
        make_directory(self._commits)
        with opened(self.path / OWN / "commit.lock", os.O_RDWR | os.O_CREAT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _mark(self, overwrite: bool, shards: list[str], rows: int) -> None:
        number = max((commit.number for commit in commits(self.path)), default=0) + 1
        content = {"number": number, "overwrite": overwrite, "shards": shards, "rows": rows}
        write_atomically(self.marker, json.dumps(content).encode())


def _in_order(written: list[Written]) -> list[Written]:
    return sorted(written, key=lambda item: item.partition)


def is_store(path: Path) -> bool:
    return (path / "commitlog").is_dir() or any(commit.is_append for commit in commits(path))


def commits(path: Path) -> list[Commit]:
    """What has happened in a directory, in its order. Cost: reads each marker once."""
    read: dict[Path, Commit] = {}
    while True:
        known = _markers(path)
        with contextlib.suppress(FileNotFoundError):  # a job came meanwhile, whose overwrite takes others away
            _read_markers(known, read)
            newer = _markers(path) - known
            last = max((read[marker].number for marker in known), default=0)
            _read_markers(newer, read)
            are_later = all(read[marker].number > last and not read[marker].overwrite for marker in newer)
            if are_later and known <= _markers(path):
                return sorted((read[marker] for marker in known), key=lambda commit: commit.number)


def _read_markers(markers: set[Path], into: dict[Path, Commit]) -> None:
    for marker in markers - into.keys():
        into[marker] = Commit.read(marker)


def _markers(path: Path) -> set[Path]:
    return set((path / OWN / "commits").glob("*.json"))


def last_overwrite(known: list[Commit]) -> int:
    return max((commit.number for commit in known if commit.overwrite), default=0)


def roots(path: str) -> list[str]:
    """The stores of a directory: itself, or the shards that commits name since the last overwrite."""
    known = [] if (Path(path) / "commitlog").is_dir() else commits(Path(path))
    if not known or any(commit.is_append for commit in known):
        return [path]
    last = last_overwrite(known)
    return [os.path.join(path, shard) for commit in known if commit.number >= last for shard in commit.shards]


def pending_begin(path: str) -> int | None:
    """Where an append that is under way, or was interrupted, began in a store's log; None: there is none."""
    places = []
    for intent in (Path(path) / OWN / "commits").glob("*.intent"):
        with contextlib.suppress(FileNotFoundError):
            begin = Intent.read(intent).begin
            if not intent.with_suffix(".json").exists():  # else it has happened
                places.append(begin)
    return min(places, default=None)


def beside_appends(path: str, look: Callable[[], Answer]) -> tuple[Answer, int | None]:
    """look(), and pending_begin of the appends that it may have seen in part."""
    while True:
        jobs = _names(path)
        answer, pending = look(), pending_begin(path)
        if jobs == _names(path):  # else an append may have ended between the two
            return answer, pending


def _names(path: str) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(Path(path) / OWN / "commits"))
    return set()


def finish_interrupted(path: Path) -> int:
    """Finish appends that were decided and not finished; returns how many. The lock is the caller's."""
    intents = sorted((path / OWN / "commits").glob("*.intent"))
    for intent in intents:
        staging = Staging(str(path), intent.stem)
        if staging.is_committed:
            intent.unlink()
        else:
            Intent.read(intent)
            with open_store(path, "r+") as store:
                staging.append(store)
        staging.drop()
    return len(intents)


def clean_staging(path: str, older_than: float = 86400.0) -> list[str]:
    """Finish appends that were interrupted, and remove what jobs that ended without commit have left in a directory.

    older_than: seconds since the last change of what may go; jobs at work must be younger. Returns the paths that were
    removed, [] when Spark never wrote there. Raises OSError, CorruptFileError of a marker, of mode=single's store what
    opening it raises, and ValueError for an object store, where Spark never writes.
    """
    refuse_elsewhere(path := os.fspath(path))
    root, limit = Path(local_path(path)), time.time() - older_than
    removed: list[str] = []
    if not (root / OWN).is_dir():
        return removed
    with Staging(str(root), "").locked():
        finish_interrupted(root)
        named = {shard for commit in commits(root) for shard in commit.shards}
        shards = [] if is_store(root) else [item for item in root.iterdir() if SHARD.fullmatch(item.name)
                                            and item.is_dir() and item.name not in named]  # fmt: skip
        for item in [*(root / OWN / "staging").glob("*"), *shards]:
            with contextlib.suppress(FileNotFoundError):  # its own task was quicker
                if item.stat().st_mtime <= limit and _remove(item):
                    removed.append(str(item))
    return removed


def _remove(directory: Path) -> bool:
    """Whether it went: a task at work may be removing it too, and leaves it when it still writes there."""
    while directory.exists():
        try:
            (shutil.rmtree if directory.is_dir() else os.unlink)(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
    return True
