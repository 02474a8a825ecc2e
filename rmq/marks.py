# SPDX-License-Identifier: Apache-2.0
"""<store>/rmq/, our own directory, which a broker ignores: meta, marks, manifest, and what recovery and rebuilds leave.

Layout of the marks: docs/format/directory.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmq._core import _layout as L
from rmq._core._message import check_directory
from rmq._core._record import load_visible, store_visible
from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.mappedfile import MappedFile
from rmq.paths import INDEX_NAME, LARGEST_OFFSET, StorePaths
from rmq.segment import (
    EXHAUSTED,
    SMALL_FILE,
    allocate,
    make_directory,
    open_file,
    opened,
    read_file,
    remove_file,
    remove_tree,
    sync_directory,
    sync_file,
    write_atomically,
)

logger = logging.getLogger("rmq")

FORMAT = 1
MANIFEST_LIMIT = 64 * 1024 * 1024
SPARE_SIZE = 256 * 1024
_CELL = struct.Struct(">6q40s")
_CRC = struct.Struct(">I")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Lower bounds of what is on disk, all in bytes of the commit log.

    durable: the log below it. derived: the queues' units of all records below it. indexed: the index entries
    of all records below it; index_name (0: no file yet) is the file they end in and index_header its header at
    that point.
    """

    durable_phy_offset: int
    derived_phy_offset: int
    indexed_phy_offset: int
    last_phy_offset: int = -1  # the record that ends at durable; -1: none
    index_name: int = 0
    index_header: bytes = bytes(L.INDEX_HEADER_SIZE)

    @property
    def index_count(self) -> int:
        """Of index_header; the last entry's number plus one."""
        return int.from_bytes(self.index_header[L.INDEX_COUNT_OFFSET :], "big", signed=True)


class Marks:
    """Two cells used in turn, each with sequence and CRC, and the visible mark that readers follow."""

    def __init__(self, path: Path, *, writable: bool, create: bool = False) -> None:
        self._name = str(path)
        try:
            self._file = MappedFile(path, size=L.MARKS_SIZE, writable=writable, create=create)
        except CorruptFileError as error:
            raise CorruptFileError(error.path, error.offset, f"{error.reason}; `repair=True` sets it aside") from None
        if writable:
            try:
                self._file.reserve(0, L.MARKS_SIZE, L.MARKS_SIZE)
                if create:
                    self._file.sync_all()
            except BaseException:
                self._file.close()
                raise
        self._sequence = 0
        self._mark: Mark | None = None
        self._data = b""  # the cells that _mark was read from
        self.view = memoryview(self._file.map)  # whoever holds a part of it lets go before `close`

    def _cells(self) -> list[tuple[int, Mark]]:
        found = []
        for offset in (L.MARKS_CELL_A_OFFSET, L.MARKS_CELL_B_OFFSET):
            cell = bytes(self.view[offset : offset + L.CELL_SIZE])
            if _CRC.unpack_from(cell, L.CELL_CRC_OFFSET)[0] != zlib.crc32(cell[: L.CELL_CRC_OFFSET]):
                continue
            sequence, durable, derived, indexed, name, last, header = _CELL.unpack_from(cell)
            if sequence > 0 and 0 <= derived <= durable and 0 <= indexed <= durable:
                mark = Mark(durable_phy_offset=durable, derived_phy_offset=derived,
                            indexed_phy_offset=indexed, last_phy_offset=last, index_name=name,
                            index_header=header)  # fmt: skip
                found.append((sequence, mark))
        self._file.check()
        return found

    def read(self) -> Mark | None:
        """The newest whole cell, or None when there is none."""
        data = bytes(self.view[L.MARKS_CELL_A_OFFSET : L.MARKS_CELL_B_OFFSET + L.CELL_SIZE])
        if data != self._data:
            cells = self._cells()
            self._sequence, self._mark = max(cells, key=lambda item: item[0]) if cells else (self._sequence, None)
            self._data = data
        self._file.check()
        return self._mark

    def write(self, mark: Mark) -> None:
        """Replace the older cell and sync. What the mark says must be on disk before."""
        self._sequence += 1
        cell = _CELL.pack(self._sequence, mark.durable_phy_offset, mark.derived_phy_offset,
                          mark.indexed_phy_offset, mark.index_name, mark.last_phy_offset,
                          mark.index_header)  # fmt: skip
        offset = L.MARKS_CELL_A_OFFSET if self._sequence % 2 else L.MARKS_CELL_B_OFFSET
        self.view[offset : offset + L.CELL_SIZE] = cell + _CRC.pack(zlib.crc32(cell))
        self._file.check()
        self._file.sync()

    @property
    def visible_phy_offset(self) -> int:
        """End of the log for readers; at or above every acknowledged byte of a live writer."""
        value = load_visible(self.view)
        self._file.check()
        return value

    def show(self, phy_offset: int) -> None:
        """Publish the end of the log to readers. Never synced."""
        store_visible(self.view, phy_offset)

    def is_replaced(self) -> bool:
        """Whether another file has its name: it was lost, and a writer made it anew."""
        try:
            return os.stat(self._name).st_ino != self._file.inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self.view.release()
        self._file.close()


RECOVERING = -1  # what a writer shows until it knows the end: what stood there is an earlier one's


def shown_end(paths: StorePaths) -> int:
    """End of the log that a writer of ours has shown to readers; 0 without one, and where marks are none."""
    with (contextlib.suppress(OSError, CorruptFileError),
          contextlib.closing(Marks(paths.marks, writable=False)) as marks):  # fmt: skip
        return marks.visible_phy_offset
    return 0


def read_meta(paths: StorePaths) -> dict[str, Any] | None:
    """meta.json, or None when the store was never written by this library.

    Raises UnsupportedFormatError for a newer format, CorruptFileError when it is no such file.
    """
    try:
        data = read_file(paths.meta, SMALL_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        meta = json.loads(data)
        number = meta["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        remedy = "without the directory rmq/ the store opens as a broker's"
        raise CorruptFileError(paths.meta, 0, f"not what this library writes; {remedy}") from None
    if number != FORMAT:
        raise UnsupportedFormatError(paths.meta, f"rmq directory of format {number}", "a newer rmq reads it")
    return dict(meta)


def is_ours(meta: dict[str, Any] | None) -> bool:
    """Whether this library made a store, by its meta.json."""
    return meta is not None and meta.get("origin") == "rmq"


def write_meta(paths: StorePaths, meta: dict[str, Any]) -> None:
    make_directory(paths.own)
    write_atomically(paths.meta, (json.dumps({"format": FORMAT, **meta}, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Manifest:
    """Which derived files there must be at least, so that a lost one is noticed.

    queues: (topic, queue id) -> (first queue offset in the files, next queue offset). index_files: names.
    """

    min_phy_offset: int
    queues: dict[tuple[str, int], tuple[int, int]]
    index_files: tuple[str, ...]


def read_manifest(paths: StorePaths) -> Manifest | None:
    """The manifest, or None when there is none that can be read: then nothing is known to be missing."""
    try:
        data = json.loads(read_file(paths.manifest, MANIFEST_LIMIT))
        queues = {_queue_key(topic, queue_id): _extent(first, following)
                  for topic, queue_id, first, following in data["queues"]}  # fmt: skip
        return Manifest(int(data["min_phy_offset"]), queues, tuple(_index_name(name) for name in data["index"]))
    except FileNotFoundError:
        return None
    except (CorruptFileError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            raise  # of this process: the manifest may be whole
        logger.warning("%s: not understood (%s); lost queue or index files may go unnoticed", paths.manifest, error)
        return None


def void_manifest(paths: StorePaths) -> None:
    """Before anything that it vouches for is removed or derived again: until all of that is on disk nobody takes the
    files for whole, after power loss neither.
    """
    with contextlib.suppress(FileNotFoundError):
        remove_file(paths.manifest)


def _queue_key(topic: Any, queue_id: Any) -> tuple[str, int]:
    """A topic and queue id that name a directory below consumequeue/. ValueError, TypeError."""
    check_directory(topic)
    if not 0 <= int(queue_id) < 2**31:
        raise ValueError(f"{topic!r}, {queue_id}: no queue")
    return topic, int(queue_id)


def _index_name(name: Any) -> str:
    """ValueError, TypeError."""
    if not INDEX_NAME.fullmatch(name):
        raise ValueError(f"{name!r}: no index file")
    return str(name)


def _extent(first: Any, following: Any) -> tuple[int, int]:
    """Queue offsets of a queue that has units. ValueError, TypeError."""
    if not 0 <= int(first) <= int(following) <= LARGEST_OFFSET or not int(following):
        raise ValueError(f"queue offsets {first} to {following}")
    return int(first), int(following)


def look_at_marks(paths: StorePaths, known: Marks | None) -> Marks | None:
    """A reader's: `known` while it is what stands there, else what does, `known` closed; None: nothing yet."""
    if known is not None and not known.is_replaced():
        return known
    try:
        if paths.marks.stat().st_size == 0:
            return None  # made and not filled yet, or by a process that was killed
        fresh = Marks(paths.marks, writable=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if known is not None:
        known.close()
    return fresh


def write_manifest(paths: StorePaths, manifest: Manifest) -> None:
    queues = [[*key, *offsets] for key, offsets in sorted(manifest.queues.items())]
    document = {"min_phy_offset": manifest.min_phy_offset, "index": list(manifest.index_files), "queues": queues}
    write_atomically(paths.manifest, (json.dumps(document) + "\n").encode())


def keep_spare(paths: StorePaths) -> None:
    """Keep blocks for an open on a full disk, which writes small files: a store must open to be cleaned. The caller has
    the lock; without room, nothing is kept.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage(paths.own).free < 4 * SPARE_SIZE:
            return
        descriptor = open_file(paths.spare, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            allocate(descriptor, 0, SPARE_SIZE)
        finally:
            os.close(descriptor)


def give_up_spare(paths: StorePaths) -> None:
    """Where the disk is full, those blocks are free again. The caller has the lock."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(paths.own).free < SPARE_SIZE:
            remove_file(paths.spare)


def finish_rebuild(paths: StorePaths) -> None:
    """Put new queues or index where a killed rebuild has taken the old ones away: they are whole and on disk, and alone
    know the offsets of queues without messages. Then its copies go. The caller has the lock.
    """
    parts = paths.consume_queue, paths.index
    for part in parts:
        made = paths.rebuilt / part.name
        if not os.path.lexists(part) and (paths.replaced / part.name).is_dir() and made.is_dir():
            os.rename(made, part)
            sync_directory(paths.root)
    if all(os.path.lexists(part) or not os.path.lexists(paths.replaced / part.name) for part in parts):
        remove_rebuild(paths)


def remove_rebuild(paths: StorePaths) -> None:
    """Remove what a rebuild left at its two names, as far as that can be."""
    for leftover in (paths.rebuilt, paths.replaced):
        remove_tree(leftover)


def _free_name(paths: StorePaths, stem: str) -> Path:
    """A name in cut/ that no file has: time, stem and, when needed, a number."""
    make_directory(paths.cut)
    stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{stem}"
    target, number = paths.cut / f"{stem}.bin", 0
    while target.exists():
        number += 1
        target = paths.cut / f"{stem}-{number}.bin"
    return target


def keep_cut(paths: StorePaths, source: Path, position: int, pieces: Iterable[bytes], reason: str) -> None:
    """Keep bytes that are about to be taken off a file, with a line that says what they are; both synced."""
    target = _free_name(paths, f"{source.name}-{position}")
    write_atomically(target, pieces)
    line = f"{target.stat().st_size} bytes from byte {position} of {source}: {reason}\n"
    write_atomically(target.with_suffix(".txt"), line.encode(errors="surrogateescape"))
    logger.warning("kept %s", line.rstrip())


def set_aside(paths: StorePaths, source: Path, reason: str) -> None:
    """Move a whole file that is no message out of the store; its line says why. Durable."""
    target = _free_name(paths, source.name)
    write_atomically(target.with_suffix(".txt"), f"{source}: {reason}\n".encode(errors="surrogateescape"))
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            target.with_suffix(".txt").unlink(missing_ok=True)
            raise
        try:
            shutil.copyfile(source, target)  # its directory is a link to another disk
            with opened(target, os.O_RDONLY) as descriptor:
                sync_file(descriptor)
        except BaseException:  # each open that tries again would leave another on a full disk
            target.unlink(missing_ok=True)
            target.with_suffix(".txt").unlink(missing_ok=True)
            raise
        os.unlink(source)
    sync_directory(paths.cut)
    sync_directory(source.parent)
    logger.warning("set aside %s: %s", source, reason)


def marks_to_write(paths: StorePaths, *, is_known: bool, repair: bool) -> Marks:
    """A writer's marks. is_known: there is a meta.json, so what they say is of this store. CorruptFileError."""
    size = paths.marks.stat().st_size if paths.marks.exists() else 0
    if size and not is_known:
        remove_file(paths.marks)
    elif repair and size not in (0, L.MARKS_SIZE):
        set_aside(paths, paths.marks, f"has {size} bytes, expected {L.MARKS_SIZE}")
        size = 0
    return Marks(paths.marks, writable=True, create=not size or not is_known)
