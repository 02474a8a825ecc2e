# SPDX-License-Identifier: Apache-2.0
"""Stores on object stores, read only: a directory with the names and sizes of a store, whose bytes are fetched.

Index and queue files are fetched whole before the store is opened. Of log segments only what a reader wants is fetched,
in blocks; a place that was not fetched is never read, it is no part of what FetchedSegment gives out.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq.config import StoreConfig, config_or_default
from rmq.errors import CorruptFileError, RmqError, StoreClosedError, UnsupportedFormatError
from rmq.logsegment import BLANK_HEADER, RECORD_MAGICS, Segment
from rmq.mappedfile import MappedFile, room_for_maps
from rmq.objectcache import CacheFullError, ObjectCache, default_directory
from rmq.objects import Listed, ObjectRemovedError, Objects, ObjectStoreError
from rmq.paths import LARGEST_OFFSET
from rmq.putting import system_clock
from rmq.segment import open_file
from rmq.snapshot import FILES, MANIFEST, Snapshot
from rmq.store import Store

BLOCK = 256 * 1024  # bytes that are fetched for a record
WINDOW = 32 * 1024 * 1024  # bytes that are fetched for a scan
LOG_BYTES = 256 * 1024 * 1024  # of fetched blocks that a store keeps
QUEUE_FILES = 8  # fetched at a time


class Mirror:
    """The directory of an open snapshot, and what of its log was fetched. Thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        location = snapshot.location
        self.lock = threading.RLock()
        self._files = {item.name: item for item in snapshot.files}
        self._held: OrderedDict[FetchedSegment, int] = OrderedDict()  # bytes, the one used last behind
        self.room = max(1, room_for_maps(max((item.size for item in snapshot.files), default=1)) // 2)  # of them
        self._undo = contextlib.ExitStack()
        directory = Path(location.cache_directory).resolve() if location.cache_directory else default_directory()
        self._cache = ObjectCache(directory, location.cache_bytes)
        with contextlib.ExitStack() as undo:
            self.objects = Objects(location)
            undo.callback(self.objects.close)
            self.directory = undo.enter_context(self._cache.directory())
            self.root = self.directory / "store"
            with self._on_disk():
                self._fill()
            self._undo = undo.pop_all()

    def _fill(self) -> None:
        for name in self.snapshot.signs:
            self._named(name).touch()
        for name, data in self.snapshot.small:
            self._named(name).write_bytes(self._without_queues(data) if name == MANIFEST else data)
        queue_files = []
        for item in self.snapshot.files:
            target = self._named(item.name)
            if FILES["log"].fullmatch(item.name):
                with target.open("wb") as file:
                    file.truncate(item.size)
            elif FILES["index"].fullmatch(item.name):
                endpoint = self.snapshot.location.endpoint
                identity = f"{self.objects.uri(item.name)} {item.size} {item.mtime_ns} {endpoint}"
                self._cache.place(identity, item.size, target, lambda to, item=item:  # type: ignore[misc]
                                  self.objects.fetch(item, [(0, item.size)], to))  # fmt: skip
            else:
                queue_files.append(item)
        needed = sum(item.size for item in queue_files)
        if needed > self.snapshot.location.cache_bytes:
            raise CacheFullError(f"{self.snapshot.location.uri}: the queues have {needed} bytes, more than "
                                 f"fs.cacheBytes={self.snapshot.location.cache_bytes}")  # fmt: skip
        with ThreadPoolExecutor(QUEUE_FILES, "rmq-fetch-queues") as pool:
            for _ in pool.map(self._fetch_whole, queue_files):
                pass

    def _named(self, name: str) -> Path:
        target = self.root / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):  # an object store may have both, a directory has not
            raise ObjectStoreError(self.objects.uri(name), "another object has the name of its directory") from None
        return target

    def _fetch_whole(self, item: Listed) -> None:
        with (self.root / item.name).open("wb") as file:
            file.truncate(item.size)
            self.objects.fetch(item, [(0, item.size)], file.fileno())

    def _without_queues(self, manifest: bytes) -> bytes:
        """Queues that were not fetched are not lost ones."""
        if "queues" in self.snapshot.parts:
            return manifest
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return json.dumps({**json.loads(manifest), "queues": []}).encode()
        return manifest

    def segment(self, maps: Any, path: Path, start: int, size: int, writable: bool, inode: int = 0) -> Segment:
        """Stands for Segment."""
        return FetchedSegment(self, self._files[f"commitlog/{path.name}"], maps, path, start, size, writable, inode)

    def make_room(self, segment: FetchedSegment, size: int) -> None:
        """A segment fetches so many bytes more: those used longest ago let go of theirs, it itself the last."""
        for other in (*(held for held in self._held if held is not segment), segment):
            is_one_more = segment not in self._held and len(self._held) >= self.room
            if sum(self._held.values()) + size <= LOG_BYTES and not is_one_more:
                break
            if self._held.pop(other, 0):
                other.let_go()

    def holds(self, segment: FetchedSegment, size: int) -> None:
        """So many bytes of a segment are here, and in use."""
        self._held[segment] = size
        self._held.move_to_end(segment)

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        """An error of this disk says where: a write knows no path."""
        try:
            yield
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(self.directory)
            raise

    def fetch(self, listed: Listed, ranges: list[tuple[int, int]], descriptor: int) -> None:
        """objects.fetch, into a file of this directory."""
        with self._on_disk():
            self.objects.fetch(listed, ranges, descriptor)

    def file(self, size: int) -> tuple[int, MappedFile]:
        """A file without a name, of zeros: a descriptor to write, and its map to read."""
        path = self.directory / f"fetched-{uuid.uuid4().hex}"
        try:
            descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # no segment is gone: whoever cleans temporary files has been here
            raise ObjectStoreError(self.snapshot.location.uri, f"{self.directory} was removed") from None
        try:
            with self._on_disk():
                os.ftruncate(descriptor, size)
            return descriptor, MappedFile(path, size=size)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            os.unlink(path)

    def close(self) -> None:
        self._undo.close()


class FetchedSegment(Segment):
    """A segment whose bytes are fetched for those who read them. Its own file here is a hole and is never read."""

    def __init__(self, mirror: Mirror, listed: Listed, maps: Any, path: Path, start: int, size: int, writable: bool,
                 inode: int = 0) -> None:  # fmt: skip
        super().__init__(maps, path, start, size, writable, inode)
        self._mirror, self._listed = mirror, listed
        self._descriptor = -1
        self._blocks: set[int] = set()  # that are in the file

    @property
    def file(self) -> MappedFile:
        raise NotImplementedError(f"{self.path}: is fetched piece by piece; `holding` says which")

    def is_there(self) -> bool:
        return True  # who reads it is told

    def holding(self, begin: int, end: int) -> MappedFile:
        return self._with([(begin - self.start, end - self.start)])

    def holding_records(self, phy_offsets: npt.NDArray[np.int64]) -> MappedFile:
        places = (phy_offsets - self.start).tolist()
        with self._mirror.lock:
            file = self._with([(place, self._head_end(place)) for place in places])
            return self._with([(place, self._record_end(file, place)) for place in places])

    def at_once(self, records: int) -> int:
        return min(records, max(1, LOG_BYTES // BLOCK))

    def reach(self, begin: int, end: int, records: int) -> int:
        step = WINDOW if records > 1 else BLOCK
        place = begin - self.start
        until = min(end - self.start, (place // step + 1) * step)
        with self._mirror.lock:
            file = self._with([(place, max(until, self._head_end(place)))])
            return min(end, self.start + max(until, self._record_end(file, place)))

    def read_ahead(self, begin: int, end: int) -> None:
        pass  # who reads it fetches it

    def of_any_size(self, begin: int, end: int) -> MappedFile:
        first, last = begin - self.start, min(end - self.start, self._listed.size)
        descriptor, file = self._mirror.file(self._listed.size)
        try:
            self._mirror.fetch(self._listed, [(first, last)] if first < last else [], descriptor)
        except ObjectRemovedError as error:  # a replaced one is no damage: loaded anew, it reads
            file.close()
            raise CorruptFileError(self.path, 0, error.reason) from None
        except OSError as error:  # of this disk, no damage of the object
            raise ObjectStoreError(self._mirror.objects.uri(self._listed.name), str(error)) from error
        finally:
            os.close(descriptor)
        file.start = self.start
        return file

    def _head_end(self, place: int) -> int:
        return min(place + BLANK_HEADER.size, self._size)

    def _record_end(self, file: MappedFile, place: int) -> int:
        """Position behind the record whose first bytes lie at a place, as far as they tell."""
        if self._head_end(place) - place < BLANK_HEADER.size:
            return self._size
        size, magic = BLANK_HEADER.unpack_from(file.map, place)
        return max(self._head_end(place), min(self._size, place + size) if magic in RECORD_MAGICS else 0)

    def _with(self, ranges: Iterable[tuple[int, int]]) -> MappedFile:
        """The file, with ranges of positions in it."""
        with self._mirror.lock:
            blocks = {block for begin, end in ranges for block in range(begin // BLOCK, -(-end // BLOCK))}
            missing = blocks - self._blocks
            if missing:
                self._mirror.make_room(self, len(missing) * BLOCK)
                if not self._blocks:  # let go of
                    missing = blocks
            file = self._opened()
            if missing:
                self._mirror.fetch(self._listed, self._runs(missing), self._descriptor)
                self._blocks |= missing
            self._mirror.holds(self, len(self._blocks) * BLOCK)
            return file

    def _opened(self) -> MappedFile:
        if self._is_closed:
            raise StoreClosedError(f"{self.path}: store is closed")
        if self._file is None:
            if self._listed.size != self._size:
                raise CorruptFileError(self.path, min(self._listed.size, self._size),
                                       f"file has {self._listed.size} bytes, expected {self._size}")  # fmt: skip
            self._descriptor, self._file = self._mirror.file(self._size)
            self._file.start = self.start
        return self._file

    def _runs(self, blocks: Iterable[int]) -> list[tuple[int, int]]:
        """Ranges of bytes of some blocks, as few as possible."""
        runs: list[tuple[int, int]] = []
        for block in sorted(blocks):
            begin, end = block * BLOCK, min((block + 1) * BLOCK, self._size)
            if runs and runs[-1][1] == begin:
                begin = runs.pop()[0]
            runs.append((begin, end))
        return runs

    def let_go(self) -> None:
        with self._mirror.lock:
            super().let_go()
            self._blocks = set()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def close(self) -> None:
        super().close()  # from here on nothing is fetched
        self.let_go()


class MirroredStore(Store):
    """A snapshot as an open store, mode "r". What it has not fetched, queues or index, is an error when asked for."""

    def __init__(self, snapshot: Snapshot, config: StoreConfig | None = None) -> None:
        """Raises ObjectStoreError, CacheFullError, and as rmq.open."""
        given = config_or_default(config)
        if given.store_path_commit_log:
            raise ValueError(f"{snapshot.location.uri}: store_path_commit_log: the log must lie below the store's root")
        self.snapshot = snapshot.require_store()
        self._mirror = Mirror(snapshot)
        self._make_segment = self._mirror.segment
        self._known = {"follows": False}
        if "queues" not in snapshot.parts:
            self._known = {**self._known, "queue_end": LARGEST_OFFSET, "known_end": snapshot.end}
        try:
            super().__init__(self._mirror.root, "r", given, system_clock, False)
        except RmqError as error:
            if (better := told(self, error)) is not error:
                raise better from None
            raise
        for part, name in (("queues", "_foreign_queues"), ("index", "_foreign_index")):
            if part not in snapshot.parts:
                setattr(self, name, UnsupportedFormatError(snapshot.location.uri, f"opened without its {part}",
                                                           f"Snapshot.of({part!r}) has it"))  # fmt: skip

    def _open_to_read(self, config: StoreConfig) -> None:
        self._release.callback(self._mirror.close)
        super()._open_to_read(config)

    @property
    def objects(self) -> Objects:
        return self._mirror.objects

    def place(self, text: str) -> str:
        """A text with paths below the mirror as the URIs that they stand for."""
        return text.replace(str(self._mirror.root), self.snapshot.location.uri)


def told(store: Store, error: Exception) -> Exception:
    """An error, with the URI of a file in place of its mirror's path."""
    if not isinstance(store, MirroredStore) or not isinstance(error, RmqError):
        return error
    better = type(error)(*(store.place(item) if isinstance(item, str) else item for item in error.args))
    for note in getattr(error, "__notes__", ()):
        better.add_note(store.place(note))
    return better
