# SPDX-License-Identifier: Apache-2.0
"""What is derived, made again on demand: queues and index from the log, sidecars from index files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rmq._core._layout import UNIT_SIZE
from rmq._core._record import SCAN_ZERO
from rmq._core._sidecar import sidecar_size
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig, config_or_default
from rmq.consumequeue import ConsumeQueue
from rmq.consumeroffsets import ConsumerOffsets
from rmq.deriving import Derived, derive
from rmq.errors import CorruptFileError, StoreLockedError
from rmq.geometry import settle_config
from rmq.index import index_paths
from rmq.indexfile import IndexFile
from rmq.lock import Crash, Holder, StoreLock, crash_of, holder_pid, lock_holder
from rmq.logcuts import last_epoch
from rmq.logend import (
    end_to_derive,
    is_outdated,
    misses_last_segment,
    on_disk_since,
    was_left_alone,
)
from rmq.marks import (
    Manifest,
    Mark,
    Marks,
    finish_rebuild,
    is_ours,
    read_meta,
    remove_rebuild,
    shown_end,
    write_manifest,
)
from rmq.paths import StorePaths, directory_here, queue_directories, queue_directory, sidecar_path
from rmq.pool import Runner, in_processes
from rmq.queueends import refuse_light
from rmq.queueset import QueueSet
from rmq.segment import LOOKS, exchange, make_directory, sync_directories, sync_directory
from rmq.sidecar import make_sidecar, sweep_sidecars
from rmq.store import open as open_store
from rmq.storeroot import check_writable, paths_to_read

logger = logging.getLogger("rmq")

PARTS = ("consumequeue", "index")
STAGED = ".rebuild"  # in an output, while a rebuild is at work


class RebuildResult(NamedTuple):
    """path: the directory in which consumequeue/ and index/ are new."""

    path: str
    queue_count: int
    unit_count: int
    index_file_count: int
    key_count: int


class RebuiltFile(NamedTuple):
    """size: bytes, 0 when it was not made; reason: why not."""

    path: str
    size: int
    reason: str


def rebuild(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *,
            config: StoreConfig | None = None, processes: int | None = None) -> RebuildResult:  # fmt: skip
    """Make queues and index of a store again, from nothing but its log, on `processes` processes.

    output None: in the store, which nobody may have open for writing. The new files are whole and on disk before an old
    one is touched; a crash at any moment leaves a store that opens as before. One that was not closed is opened for
    writing first, and so recovered. output: a new or empty directory gets consumequeue/ and index/; the store is only
    read, may be read only, and may have a writer. It must not lie in the store.
    Queues whose messages have all been cleaned away keep their files, so that their offsets go on. Index files are
    named by the time of their first message; sidecars of replaced ones go.
    processes: as of `scan_map`, but None is one on each core whatever the log's size. Cost: one pass over the log, of a
    broker's one more, here, for queues that cannot be made, and one over its keys; disk for the new files and 20 bytes
    for each key. Raises CorruptFileError for a log that is damaged where queues and index come from (bodies are not
    looked at), StoreLockedError, UnsupportedFormatError for queues that are not written here, FileExistsError,
    ValueError as `rmq.open`, OSError (disk full; a consumequeue/ or index/ that is a link or another disk, in the
    store), ChildProcessError; then queues and index are as they were.
    """
    return rebuild_by(in_processes(processes), path, output, config)


def rebuild_by(run: Runner, path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None,
               config: StoreConfig | None = None) -> RebuildResult:  # fmt: skip
    """`rebuild` with tasks that run elsewhere."""
    asked = config_or_default(config)
    paths = paths_to_read(path, asked)
    check_writable(paths)
    if output is not None:
        return _rebuild_into(run, paths, directory_here(output, "output"), asked)
    if paths.abort.exists():
        open_store(path, "r+", config=config).close()
    with closing(StoreLock(paths.lock, lambda: holder_pid(paths))):
        if paths.abort.exists():
            raise StoreLockedError(paths.root, holder_pid(paths))  # a writer came, and died
        return _rebuild_in_place(run, paths, asked)


def _rebuild_into(run: Runner, paths: StorePaths, target: Path, asked: StoreConfig) -> RebuildResult:
    real = Path(os.path.realpath(target))
    if any(Path(os.path.realpath(path)) in real.parents for path in (paths.root, *paths.commit_logs)):
        raise ValueError(f"output {target} lies in the store")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(errno.EEXIST, "exists and is not empty", str(target))
    make_directory(target)
    for attempt in range(LOOKS, 0, -1):
        first = _first_file(paths)
        try:
            derived = _derive_into(run, paths, target, asked)
            break
        except (CorruptFileError, FileNotFoundError):
            if attempt == 1 or _first_file(paths) == first:
                raise  # else the writer cleaned the log meanwhile
    for part in PARTS:
        os.rename(target / STAGED / part, target / part)
    shutil.rmtree(target / STAGED, ignore_errors=True)
    sync_directory(target)
    return _result(target, derived)


def _derive_into(run: Runner, paths: StorePaths, target: Path, asked: StoreConfig) -> Derived:
    """New queues and index below a directory's STAGED, which goes with an error."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, target / STAGED, ignore_errors=True)
        source = _Source(paths, asked)
        with closing(source.log):
            source.check_queues(is_alone=lock_holder(paths.lock) is None and not paths.abort.exists())
            derived = source.derive(run, target / STAGED)
        stack.pop_all()
    return derived


def _first_file(paths: StorePaths) -> str:
    """Name of the log's oldest segment."""
    return min((name for path in paths.commit_logs if path.is_dir() for name in os.listdir(path)), default="")


def _rebuild_in_place(run: Runner, paths: StorePaths, asked: StoreConfig) -> RebuildResult:
    staged, replaced = paths.rebuilt, paths.replaced
    finish_rebuild(paths)
    remove_rebuild(paths)
    with ExitStack() as stack:
        stack.callback(_clear, paths)
        source = _Source(paths, asked, is_alone=True)
        stack.callback(source.log.close)
        parts = PARTS if source.config.message_index_enable else PARTS[:1]
        _check_replaceable(paths, parts)
        source.check_queues(is_alone=True)
        derived = source.derive(run, staged)
        offsets = ConsumerOffsets(paths)
        offsets.cut_back(lambda *queue: derived.extents.get(queue, (0, 0))[1])
        offsets.write(offsets.taken())
        make_directory(replaced)
        _replace(paths, parts, lambda: source.write_marks(derived))
        for old in index_paths(replaced / "index"):
            sidecar = sidecar_path(paths.index / old.name)
            if sidecar is not None:
                sidecar.unlink(missing_ok=True)
        sweep_sidecars(paths.sidecars, paths.index)
        shutil.rmtree(replaced)
    return _result(paths.root, derived)


def _clear(paths: StorePaths) -> None:
    """Remove what was made, unless old parts are still away: then the next open for writing may need it."""
    with suppress(OSError):
        paths.replaced.rmdir()
    if not paths.replaced.exists():
        shutil.rmtree(paths.rebuilt, ignore_errors=True)


def _check_replaceable(paths: StorePaths, parts: tuple[str, ...]) -> None:
    """OSError when renames cannot put new directories in the place of the old ones."""
    disk = paths.root.stat().st_dev
    for path in (paths.own, *(paths.root / part for part in parts)):
        if (path.exists() and path.stat().st_dev != disk) or (path != paths.own and path.is_symlink()):
            reason = "a link or another disk, which a rename cannot replace: rebuild with an output"
            raise OSError(errno.EXDEV, reason, str(path))


def _replace(paths: StorePaths, parts: tuple[str, ...], tell: Callable[[], None]) -> None:
    """Each part by a new one, all or none, none where `tell` raises. Where the system cannot exchange names at one
    instant, a crash may leave a part away: the next open for writing puts the new one there.
    """
    with ExitStack() as undo:
        for part in parts:
            place, new, old = paths.root / part, paths.rebuilt / part, paths.replaced / part
            kept = place.stat().st_ino if place.exists() else 0
            undo.callback(_put_back, place, new, old, kept)
            if kept and exchange(new, place):
                os.rename(new, old)
                continue
            if kept:
                os.rename(place, old)
            os.rename(new, place)
        sync_directory(paths.root)
        tell()
        undo.pop_all()


def _put_back(place: Path, new: Path, old: Path, kept: int) -> None:
    """The directory of the inode `kept` (0: there was none) is at its place again, the other where it was made."""
    if (place.stat().st_ino if place.exists() else 0) == kept:
        return
    if place.exists() and new.exists():
        exchange(new, place)
        return
    if place.exists():
        os.rename(place, new)
    if old.exists():
        os.rename(old, place)


def _result(path: Path, derived: Derived) -> RebuildResult:
    return RebuildResult(str(path), len(derived.extents), derived.unit_count, len(derived.index_files),
                         derived.key_count)  # fmt: skip


class _Source:
    """The log that queues and index are made of, and what the store knows of them."""

    def __init__(self, paths: StorePaths, asked: StoreConfig, *, is_alone: bool = False) -> None:
        """Raises CorruptFileError when the log does not end as it must."""
        meta = read_meta(paths)
        self.config, _ = settle_config(paths, asked, meta)
        self._paths = paths
        self._mark = _read_mark(paths) if meta is not None else None
        self._is_own = is_ours(meta)
        self.log = CommitLog(paths.commit_logs, self.config.mapped_file_size_commit_log, writable=False)
        self.log.judges_crc = self.config.enabled_append_prop_crc
        try:
            durable = self._mark.durable_phy_offset if self._mark is not None else 0
            holder, self._checkpoint = None if is_alone else lock_holder(paths.lock), Checkpoint(paths.checkpoint)
            crashed = crash_of(paths)
            if crashed is Crash.OURS and self._mark is None:
                crashed = Crash.BROKERS  # as recovery judges it
            if crashed is not Crash.OURS and self._mark and is_outdated(self.log, self._mark, self._checkpoint, 0):
                durable = 0
            self._own_end = durable if self._is_own and crashed is not Crash.OURS and holder is not Holder.RMQ else None
            on_disk = on_disk_since(durable, crashed, self._checkpoint, last_epoch(paths.epochs))
            if holder is not None:
                crashed, on_disk = None, replace(on_disk, time=None)  # beside a writer nothing is torn for good
            self._end = end_to_derive(self.log, on_disk, holder is not None, crashed, self._checkpoint)
            if holder is Holder.RMQ and paths.abort.exists() and (shown := shown_end(paths)) > 0:
                self._end = min(self._end, shown)  # behind it a put is under way, and may fail
        except BaseException:
            self.log.close()
            raise

    def check_queues(self, *, is_alone: bool) -> None:
        """UnsupportedFormatError for queues that no log gives again. is_alone: nobody writes, and the store was closed;
        CorruptFileError where they tell of a last segment that is lost.
        """
        with closing(self._queues()) as queues:
            queues.load()
            if is_alone and misses_last_segment(self.log, self._checkpoint, queues.end_phy_offset()):
                raise self.log.damage(self.log.max_phy_offset, SCAN_ZERO)
            refuse_light(self.log, queues, 0, self._own_end)

    def _queues(self) -> QueueSet:
        """Those that are there."""
        queues = QueueSet(self._paths.consume_queue, self.config.mapped_file_size_consume_queue, writable=False,
                          is_exact=self._is_own)  # fmt: skip
        queues.bridges_gaps = self._mark is not None
        return queues

    def derive(self, run: Runner, target: Path) -> Derived:
        """New consumequeue/ and index/ below target, on disk."""
        starts = [segment.start for segment in self.log.segments if segment.start < self._end]
        derived = derive(self._paths.commit_logs, starts, self._end, target, self.config, run,
                         is_exact=self._is_own)  # fmt: skip
        if self.log.min_phy_offset:
            self._keep_cleaned(target / "consumequeue", derived)
        return derived

    def _keep_cleaned(self, target: Path, derived: Derived) -> None:
        """Copy queues of which no message is left: their next offset stands nowhere else."""
        with closing(self._queues()) as queues:
            for _, topic, queue_id in queue_directories(self._paths.consume_queue):
                if (topic, queue_id) in derived.extents:
                    continue
                try:
                    queue = queues.open(topic, queue_id)
                    # What follows are units of messages that a crash took off the log.
                    queue.cut_where(self.log.min_phy_offset, lambda *place: True)
                except CorruptFileError as error:
                    logger.warning("%s; it has no message, its next one gets queue offset 0", error)
                    continue
                if not queue.end_phy_offset():
                    continue
                kept = queue_directory(target, topic, queue_id)
                try:
                    self._copy_queue(queue, kept)
                except FileNotFoundError:  # a cleaning removed it meanwhile
                    shutil.rmtree(kept)
                    continue
                derived.extents[topic, queue_id] = queue.first_offset, queue.max_offset
        sync_directories(target)

    def _copy_queue(self, queue: ConsumeQueue, target: Path) -> None:
        """Its files up to its last unit; synced, but for their names."""
        make_directory(target)
        last, position = queue.place_of(queue.max_offset - 1)
        for path in [path for path in queue.files.first() if path <= last]:
            copied = target / path.name
            shutil.copyfile(path, copied)
            with copied.open("rb+") as file:
                if path == last:
                    file.truncate(position + UNIT_SIZE)
                    file.truncate(self.config.mapped_file_size_consume_queue)
                os.fsync(file.fileno())

    def write_marks(self, derived: Derived) -> None:
        """What is on disk now. A mark that is not of this log's end stays; without a manifest its word on the index and
        queues is not believed."""
        paths, mark = self._paths, self._mark
        if mark is None or not was_left_alone(self.log, mark):
            paths.manifest.unlink(missing_ok=True)
            return
        names = tuple(path.name for path in derived.index_files)
        if self.config.message_index_enable:
            mark = replace(mark, derived_phy_offset=mark.durable_phy_offset, index_name=int(names[-1]) if names else 0,
                           indexed_phy_offset=mark.durable_phy_offset, index_header=derived.index_header)  # fmt: skip
        else:
            mark = replace(mark, derived_phy_offset=mark.durable_phy_offset)
            names = tuple(path.name for path in index_paths(paths.index))
        write_manifest(paths, Manifest(self.log.min_phy_offset, derived.extents, names))
        with closing(Marks(paths.marks, writable=True)) as marks:
            marks.read()
            marks.write(mark)


def _read_mark(paths: StorePaths) -> Mark | None:
    if not paths.marks.exists() or not paths.marks.stat().st_size:
        return None
    with closing(Marks(paths.marks, writable=False)) as marks:
        return marks.read()


def rebuild_sidecars(path: str | os.PathLike[str], config: StoreConfig | None = None) -> Iterator[RebuiltFile]:
    """Make the sidecar of each full index file of a store, oldest first, whether or not it has one. Needs no lock: full
    index files do not change. Raises CorruptFileError, UnsupportedFormatError, ValueError as `rmq.open`, OSError.
    """
    asked = config_or_default(config)
    paths = paths_to_read(path, asked)
    known, damaged = settle_config(paths, asked, read_meta(paths))
    slots, entries = known.max_hash_slot_num, known.max_index_num
    for index in index_paths(paths.index):
        target = str(sidecar_path(index))
        if index in damaged:
            yield RebuiltFile(target, 0, "the index file is damaged")
            continue
        with IndexFile(index, max_hash_slot_num=slots, max_index_num=entries) as file:
            if not file.is_full:
                continue
        why = make_sidecar(index, slots, entries)
        yield RebuiltFile(target, 0 if why else sidecar_size(slots, entries), why)
    sweep_sidecars(paths.sidecars, paths.index)
