# SPDX-License-Identifier: Apache-2.0
"""The store: opening and closing. Putting is in `putting`, reading in `reading`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from rmq._core._ownedlock import OwnedLock
from rmq._core._putbatch import PutBatch
from rmq._core._putter import Putter
from rmq._core._queuetable import QueueTable
from rmq.brokerunits import BrokerUnits
from rmq.checkpoint import Checkpoint
from rmq.closers import Closers
from rmq.columns import put_rules
from rmq.commitlog import CommitLog
from rmq.config import CRC_SINCE, SYNC_FLUSH, StoreConfig, config_or_default
from rmq.consumeroffsets import ConsumerOffsets
from rmq.dispatch import Dispatcher
from rmq.errors import CorruptFileError
from rmq.flushing import Flusher
from rmq.geometry import KEPT, settle_config
from rmq.index import Durable, Index
from rmq.keys import Mode, check_bools, check_open_mode
from rmq.legacy import LegacyKeys
from rmq.lock import Crash, StoreLock, announce_writer, holder_pid, keep_announced, restorer
from rmq.logsegment import Segment
from rmq.marks import (
    RECOVERING,
    finish_rebuild,
    give_up_spare,
    is_ours,
    keep_spare,
    marks_to_write,
    read_manifest,
    read_meta,
    write_meta,
)
from rmq.message import PutResult
from rmq.overflow import Overflow
from rmq.paths import StorePaths, store_root
from rmq.preparing import weakly
from rmq.putting import StoreWriter, system_clock
from rmq.queueset import QueueSet
from rmq.recovery import OpenedStore, recover
from rmq.segment import make_directory, sync_directory
from rmq.signs import has_record_crc
from rmq.storeroot import (
    check_is_store,
    check_readable,
    check_writable,
    empty_root,
    foreign_index,
    foreign_queues,
    has_segments,
    is_own_store,
    make_root,
    require_empty,
    require_log,
    require_store,
)
from rmq.visible import Visible


def open(path: str | os.PathLike[str], mode: Mode = "r", *, config: StoreConfig | None = None,
               clock: Callable[[], int] | None = None, repair: bool = False) -> Store:  # fmt: skip
    """Open a store directory: "r" read only, "r+" existing, "a" created when missing, "x" new. A context manager.

    config: geometry and version for a new store; of an existing one the files tell (ValueError when a field passed
    contradicts them), and the last record of a broker's whether records get a CRC (enabled_append_prop_crc).
    clock: ms since 1970, read once per put, put_batch and chunk of put_many. repair=True lets recovery cut at damage in
    what had been durable; the bytes are kept under <store>/rmq/cut/.
    Raises StoreLockedError, CorruptFileError, UnsupportedFormatError, ValueError, OSError.
    """
    check_open_mode(mode)
    if clock is not None and not callable(clock):
        raise TypeError(f"clock must be callable, got {type(clock).__name__}")
    check_bools(repair=repair)
    given = config_or_default(config)
    return Store(store_root(path), mode, given, clock or system_clock, repair)


class Store(StoreWriter):
    """A message store, opened by `rmq.open`. Thread-safe; a forked child must open its own."""

    _make_segment: Callable[..., Segment] = Segment
    _known: Mapping[str, Any] = {}  # arguments of Visible
    _has_index = True

    def __init__(self, path: str | os.PathLike[str], mode: str, config: StoreConfig, clock: Callable[[], int],
                 repair: bool) -> None:  # fmt: skip
        self._closed, self._pid = True, os.getpid()  # closed until everything is open
        self._release = Closers()
        undo = contextlib.ExitStack()  # what an open that fails takes back
        self.path = Path(path)
        self.mode = mode
        self._clock = clock
        # Absolute: files are opened when they are needed, maybe from another working directory.
        self._paths = StorePaths(self.path.absolute(), config.store_path_commit_log)
        self._offsets = ConsumerOffsets(self._paths)
        self._asked, self._batch_queues, self._is_all_new = config, {}, mode == "x" and not self._paths.is_log_elsewhere
        self._settling = threading.Lock()
        self._close_lock = OwnedLock()
        self._putter: Putter[PutResult] | None = None
        try:
            if mode == "r":
                require_store(self.path, self._paths)
                self._open_to_read(config)
            else:
                self._open_to_write(config, repair, undo)
            self._foreign_queues, self._foreign_index = foreign_queues(self._paths), foreign_index(self._paths)
            if mode != "r":
                self._flusher.start()
        except BaseException as error:
            with contextlib.suppress(OSError), self._release:  # released whatever befalls the undoing
                if self._is_all_new or not (getattr(error, "failed_sync", False) or self._is_withdrawn()):
                    undo.close()  # else the next must recover
            raise
        self._closed = False

    # ---- opening ----

    def _is_withdrawn(self) -> bool:
        return self.mode != "r" and hasattr(self, "_checkpoint") and self._checkpoint.is_withdrawn

    def _open_to_read(self, config: StoreConfig) -> None:
        self._root = os.stat(self._paths.root)
        check_readable(self._paths)
        check_is_store(self._paths)
        is_begun = has_segments(self._paths)  # asked before meta.json, which our writer makes first
        if not is_begun:
            require_log(self._paths)
        meta = read_meta(self._paths)
        is_settled = is_begun or meta is not None
        self.config, damaged = settle_config(self._paths, config, meta)
        try:
            self._legacy = LegacyKeys(self._paths, config, meta, is_own=is_ours(meta), mode="r")
            self._open_parts(damaged, meta, False, is_ours(meta))
            self._log.watch(weakly(self._check_place))  # files of the same names may be another store's by now
            dispatcher = Dispatcher(self._log, self._queues, None, self.config)
            dispatcher.others = BrokerUnits(self._paths, self._log, self._queues, dispatcher.table)
            self._visible = Visible(self._paths, self._log, self._queues, self._index, dispatcher, **self._known)
            self._release.callback(self._visible.close)
        except CorruptFileError:
            if is_settled or not has_segments(self._paths):
                raise
        if not is_settled and has_segments(self._paths):
            self._open_to_read(config)  # a writer came while we looked; the sizes are told now
        else:
            self._is_settled = is_settled  # last: other threads wait for the parts

    def _refresh(self) -> int:
        """For readers: see what is there now; returns the log's end. In an empty directory nothing tells the sizes."""
        while not self._is_settled:
            if not has_segments(self._paths):
                self._check_place()
                require_log(self._paths)
                return 0
            with self._settling:
                if not self._is_settled:
                    self._open_to_read(self._asked)
        end = self._visible.refresh()
        if not self._log.segments:
            self._check_place()
            require_log(self._paths)
        return end

    def _open_parts(self, damaged: Collection[Path], meta: dict[str, Any] | None, writable: bool, is_own: bool) -> None:
        self._log = CommitLog(self._paths.commit_logs, self.config.mapped_file_size_commit_log, writable=writable,
                              make_segment=self._make_segment)  # fmt: skip
        self._release.callback(self._log.close)
        self._log.appends_crc = meta is not None and meta.get("enabled_append_prop_crc") is True
        self._log.judges_crc = self._log.appends_crc or self.config.enabled_append_prop_crc
        self._queues = QueueSet(self._paths.consume_queue, self.config.mapped_file_size_consume_queue,
                                writable=writable, is_exact=is_own)  # fmt: skip
        self._release.callback(self._queues.close)
        directory = self._paths.index if self._has_index else self._paths.own / "none"
        self._index = Index(directory, self.config, writable=writable, damaged=damaged)
        self._release.callback(self._index.close)

    def _claim(self, config: StoreConfig) -> dict[str, Any] | None:
        """Make the store, or refuse what we do not write; take its lock. Returns its meta.json."""
        put_rules(config)  # what is wrong with it shows before anything is made
        check_readable(self._paths)
        make_root(self.path, self._paths, self.mode)
        check_writable(self._paths)
        self._lock = StoreLock(self._paths.lock, lambda: holder_pid(self._paths))
        self._release.callback(self._lock.close)
        if self.mode == "x":
            require_empty(self.path, but=self._paths.lock.name)  # another process may have been quicker
        give_up_spare(self._paths)
        finish_rebuild(self._paths)
        return read_meta(self._paths) if self._paths.looks_like_store() else None  # of a bulk_load that died

    def _open_to_write(self, config: StoreConfig, repair: bool, undo: contextlib.ExitStack) -> None:
        meta = self._claim(config)
        if self._is_all_new:
            undo.callback(empty_root, self.path, self._paths)
        if meta is not None and not repair:  # which may set them aside
            self._open_marks(undo, is_known=True, repair=False)  # at once: till then readers take a crash for a writer
        self.config, damaged = settle_config(self._paths, config, meta)
        rules = put_rules(self.config)
        is_own = is_own_store(self._paths, meta)
        self._legacy = LegacyKeys(self._paths, config, meta, is_own=is_own, mode=self.mode)
        new_meta = {"origin": "rmq" if is_own else "rocketmq", **self._legacy.told,
                    **{name: getattr(self.config, name) for name in KEPT}}  # fmt: skip
        is_told = meta is None or {name: meta.get(name) for name in new_meta} == new_meta
        if meta is None and is_own:
            undo.callback(restorer(self._paths.meta))
            write_meta(self._paths, new_meta)  # before any file whose size a reader could misjudge
        for path in (*self._paths.commit_logs, self._paths.consume_queue, self._paths.index, self._paths.own):
            make_directory(path)
        self._checkpoint = Checkpoint(self._paths.checkpoint, self.config.checkpoint_longs)
        taken_over = [self._paths.marks, self._paths.meta] if meta is None and not is_own else []
        for path in (self._paths.abort, self._paths.abort_bak, self._paths.owner, *taken_over):
            undo.callback(restorer(path))
        crashed = announce_writer(self._paths, holds_pid=self.config.abort_holds_pid)
        self._open_parts(damaged, meta, True, is_own)
        if self._paths.is_log_elsewhere:
            self._lock.watch(self._paths.commit_logs)
        check_place = weakly(self._lock.check_place)  # the parts must not keep it
        self._log.watch(check_place)
        self._queues.cache.check_place = check_place
        if meta is None or repair:
            self._open_marks(undo, is_known=meta is not None, repair=repair)
        if meta is None and not is_own:
            write_meta(self._paths, new_meta)  # before files go that tell their sizes
        mark, manifest = (self._marks.read(), read_manifest(self._paths)) if meta is not None else (None, None)
        parts = self._assemble()
        recover(parts, mark, manifest, crashed=crashed, repair=repair)
        if crashed is not None or repair or self._checkpoint.is_withdrawn:  # queues were derived again
            queues = self._queues.queues
            self._offsets.cut_back(lambda *name: queue.max_offset if (queue := queues.get(name)) is not None else 0)
        if not is_own and not config.is_explicit("enabled_append_prop_crc") and self.config.version >= CRC_SINCE and \
                has_record_crc(self._log, self._log.tail.last_phy_offset):  # its broker may cut off records without
            self.config = dataclasses.replace(self.config, enabled_append_prop_crc=True)
            rules, new_meta["enabled_append_prop_crc"], is_told = put_rules(self.config), True, False
        self._prepare_puts(parts, PutBatch(rules), known_queues=0 if is_own else len(self._table))
        self._marks.show(self._log.position)
        self._flusher.flush(waits=False)  # first: records behind the mark must have the CRC that meta.json tells of
        if not is_told:
            write_meta(self._paths, new_meta)
        keep_spare(self._paths)
        if crashed is not Crash.OURS:
            keep_announced(self._paths)

    def _open_marks(self, undo: contextlib.ExitStack, *, is_known: bool, repair: bool) -> None:
        self._marks = marks_to_write(self._paths, is_known=is_known, repair=repair)
        self._release.callback(self._marks.close)
        if has_segments(self._paths):  # else what an earlier writer showed tells that the log is lost
            undo.callback(self._marks.show, self._marks.visible_phy_offset)
            self._marks.show(RECOVERING)

    def _assemble(self) -> OpenedStore:
        self._table = QueueTable()
        indexing = self._index if self.config.message_index_enable else None
        self._dispatcher = Dispatcher(self._log, self._queues, indexing, self.config)
        self._overflow = Overflow(self._log, self._queues, self._dispatcher, self.config)
        self._release.callback(self._overflow.close)
        return OpenedStore(self._paths, self._log, self._queues, self._index, self._table, self._dispatcher,
                           self._checkpoint, self._offsets)  # fmt: skip

    def _prepare_puts(self, parts: OpenedStore, batch: PutBatch, *, known_queues: int) -> None:
        self._batch, self._low = batch, self._log.min_phy_offset
        self._put_lock = OwnedLock()
        self._flusher = Flusher(parts, self._marks, self._put_lock, self.config, lock=self._lock,
                                known_queues=known_queues)  # fmt: skip
        self._release.callback(self._flusher.stop)
        if self.config.flush_disk_type != SYNC_FLUSH:
            clock, ticks = (time.time_ns, 1_000_000) if self._clock is system_clock else (self._clock, 1)
            self._putter = Putter(put_lock=self._put_lock, flush_lock=self._flusher.flush_lock, tail=self._log.tail,
                                  queues=self._table, batch=self._batch, marks=self._marks.view, clock=clock,
                                  ticks=ticks, kind=PutResult)  # fmt: skip
            self._release.callback(self._putter.close)

    # ---- reading ----

    def _log_end(self) -> int:
        return self._refresh() if self.mode == "r" else self._log.position

    def _was_cut_off(self, error: CorruptFileError) -> bool:
        if self.mode == "r":
            self._check_place()  # else another store's bytes are meant
        if self.mode != "r" or not self._is_settled or not self._visible.ends_earlier():
            return False
        places = [segment.start + error.offset for segment in self._log.segments if str(segment.path) == error.path]
        return all(place >= self._visible.end for place in places)

    def _derive(self) -> QueueSet:
        if self.mode == "r":
            self._refresh()
            with self._visible.lock:  # another thread may look at all anew meanwhile
                self._visible.derive()
                return self._queues.as_it_is()
        self._flusher.check_not_nested()
        if self._low != self._log.min_phy_offset:  # a cleaning was interrupted before it told all queues
            with self._put_lock:
                self._low = self._queues.correct_min_offsets(self._log.min_phy_offset)
        if self._flusher.try_dispatch():
            return self._queues
        with self._put_lock:
            return self._overflow.level(self._log.position)

    def _derived_end(self) -> int:
        if self.mode != "r":
            return self._log.position
        with self._visible.lock:
            return self._visible.end

    def _uncovered(self) -> tuple[int, list[tuple[int, int]], Durable | None]:
        if self.mode == "r":
            return self._refresh(), *(self._visible.uncovered() if self._is_settled else ([], None))
        self._flusher.check_not_nested()
        self._flusher.try_dispatch()  # what is not indexed, on a full disk, is searched
        end, covered = self._log.position, max(self._dispatcher.index_phy_offset, self._log.min_phy_offset)
        return end, [(covered, end)] if covered < end else [], None

    def _follow_index(self) -> None:
        if self.mode == "r":
            self._uncovered()
        else:
            self._flusher.check_not_nested()
            self._flusher.dispatch()

    def _writer_now(self) -> object:
        return (self._visible.writer_now(), self._paths.manifest.exists()) if self.mode == "r" else None

    # ---- closing ----

    def close(self) -> None:
        """Flush and close; the store then opens clean, here and in a broker. Closing twice is nothing.

        Raises OSError when the flush fails, or one failed that no call has told of, and CorruptFileError where pages of
        a file are gone, or commits cannot join what another wrote to the groups' file: the store is closed all the
        same, and recovers when opened again. RuntimeError in a signal handler amid a put, flush or close.
        """
        if os.getpid() != self._pid:
            self._closed = True  # the parent's files and lock are not the child's to close
            return
        if self._close_lock.is_mine():
            raise RuntimeError(f"{self.path}: closed in the middle of its close, as by a signal handler")
        if self.mode != "r" and not self._closed:
            self._flusher.check_not_nested()
            self._flusher.tell_files()  # before it is closed: a handler of logging may put
        with self._close_lock:  # a second closer waits: what it would remove may be the next store's
            if self._closed or self.mode == "r":
                self._closed = True
                self._release.close()  # or what an interrupted one has left
                return
            try:
                with self._put_lock:
                    self._closed = self._log.tail.is_shut = True
                self._flusher.stop()  # not before: an interrupt would leave an open store that nobody flushes
                if self._flusher.failure is not None:
                    self._flusher.raise_untold()
                else:
                    self._flusher.flush(closing=True)
                    self._flusher.check_place()
                    self._paths.owner.unlink(missing_ok=True)
                    self._paths.abort.unlink(missing_ok=True)
                    sync_directory(self._paths.root)
            finally:
                if self._closed:  # else interrupted, and the next call does it all
                    with self._release:
                        self._flusher.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if os is not None and not getattr(self, "_closed", True) and os.getpid() == self._pid:  # see FileCache
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)
            self._closed = True
            if threading.current_thread().name.startswith("rmq-"):  # its locks may be what our threads wait for
                threading.Thread(target=self._let_go, name="rmq-close").start()
            else:
                self._let_go()

    def _let_go(self) -> None:
        with self._release:
            if self.mode != "r":
                try:
                    self._flusher.stop()
                finally:
                    self._flusher.close()

    def __repr__(self) -> str:
        return f"<rmq.Store {str(self.path)!r} mode {self.mode!r}{' closed' if self._closed else ''}>"
