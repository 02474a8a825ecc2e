# SPDX-License-Identifier: Apache-2.0
"""What of a store is on disk when: log, then queues and index, then checkpoint, then the mark that speaks of them."""

from __future__ import annotations

import atexit
import copy
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from rmq._core._ownedlock import OwnedLock
from rmq.config import SYNC_FLUSH, StoreConfig
from rmq.dispatch import BATCH_BYTES
from rmq.errors import StoreClosedError, is_handlers
from rmq.groupcommit import GroupCommit
from rmq.lock import StoreLock
from rmq.mappedfile import MappedFile
from rmq.marks import Manifest, Mark, Marks, write_manifest
from rmq.owed import Owed
from rmq.preparing import Preparer, weakly
from rmq.recovery import OpenedStore, fill_table
from rmq.segment import passes, sync_file
from rmq.sidecar import SidecarMaker
from rmq.sleeper import Sleeper, waking
from rmq.topics import merge_topics, topics_from

logger = logging.getLogger("rmq")

_running: weakref.WeakSet[Flusher] = weakref.WeakSet()
# Of more queue files a timed flush may leave the sync to a later one, as long as the log is not so many bytes ahead.
QUEUE_FILES_AT_ONCE, DERIVED_BEHIND = 64, 32 * 1024 * 1024


class Flusher:
    """Dispatches and syncs an open store. A sync that failed leaves `failure`: nothing is trusted after it."""

    def __init__(self, store: OpenedStore, marks: Marks, put_lock: OwnedLock, config: StoreConfig, *,
                 lock: StoreLock, known_queues: int) -> None:  # fmt: skip
        """lock: the store's, which must not go before who may write. known_queues: that many queues of the table stand
        in topics.json, or are not ours to add."""
        self._store, self._lock, self._marks = store, lock, marks
        self.check_place, self.offsets = lock.check_place, store.offsets
        self._failure: OSError | None = None
        self._put_lock = put_lock  # before it, when they are held: the flush lock, then the log lock
        self.flush_lock, self._log_lock = OwnedLock(), OwnedLock()  # of the log: the kernel tells of an error once
        self._is_sync = config.flush_disk_type == SYNC_FLUSH
        if self._is_sync:
            store.log.tail.written_from, store.log.writer.is_synced = 0, True
        self.preparer = Preparer(store.log, lock, fills=self._is_sync, failed=weakly(self._distrust))
        self._interval, self._known_queues = config.flush_interval_commit_log / 1000, known_queues
        store.log.tail.followed(store.dispatcher.wanted, BATCH_BYTES)
        self._flushed = self._derived = store.log.position  # up to there the log, and the queues, are on disk
        self._written = (-1, -1, -1, -1)  # what the manifest was written for
        self._group, self._owed = GroupCommit(self._flushed), Owed(store.log, store.queues, store.index)
        self.tell_files, self._sidecars, self._sleeper = self._owed.tell, SidecarMaker(), Sleeper()  # woken to end
        self._is_closed, self._has_dispatch_failed, self._is_untold, self.pid = False, False, False, os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def failure(self) -> OSError | None:
        return self._failure

    @failure.setter
    def failure(self, error: OSError | None) -> None:
        self._failure = copy.copy(error)  # itself it would keep its callers' frames
        self._store.log.tail.is_shut = error is not None  # for good: a put under way may let the tail stand again

    # ---- dispatch ----

    def dispatch(self) -> None:
        """Queues and index follow the log to its end."""
        with self._put_lock:
            self._check_open()
            if self._store.dispatcher.phy_offset < self._store.log.position:
                self.check_place()
            self._store.dispatcher.advance(self._store.log.position)
            self._store.log.tail.followed(self._store.dispatcher.wanted, BATCH_BYTES)
            self._has_dispatch_failed = False

    def try_dispatch(self) -> bool:
        """dispatch, and whether it came to the end: what is full, used up or read only may keep it from that."""
        try:
            self.dispatch()
        except OSError as error:
            if is_handlers(error) or error.errno == errno.ESTALE or getattr(error, "failed_sync", False):
                raise
            return False
        return True

    def settle(self) -> None:
        """Try a dispatch that failed again: a put raises before it stores anything. Take back what an interrupted put
        began. Call under the put lock.
        """
        store = self._store
        if not self._has_dispatch_failed and not store.log.tail.was_interrupted:
            return
        self.dispatch()
        if store.log.tail.was_interrupted:
            fill_table(store.queues, store.table)
            store.log.erase_interrupted()

    def put_done(self, count: int, timestamp: int, *, waits: bool) -> bool:
        """Account for stored messages; whether sync_put must follow. Call under the put lock."""
        tail, must_sync = self._store.log.tail, waits and count > 0 and self._is_sync
        tail.last_timestamp, tail.behind = timestamp, tail.behind + count
        if tail.is_due and not must_sync:
            self._follow()
        if tail.position >= self.preparer.due_at:
            self.preparer.wake()
        return must_sync

    def _follow(self) -> None:
        """dispatch, its failure kept for the next put. Call under the put lock."""
        try:
            self.dispatch()
        except Exception as error:
            self._has_dispatch_failed = True  # these messages are stored; the next put tries again first
            if isinstance(error, OSError):
                if is_handlers(error):
                    raise
                self._note(error)
                self._is_untold = self.failure is not None
            logger.error("%s: queues and index cannot follow: %r", self._store.paths.root, error)

    def _dispatch_due(self) -> None:
        if self._store.log.tail.is_due:
            with self._put_lock:
                if self._store.log.tail.is_due and not self._has_dispatch_failed and not self._is_closed:
                    self._follow()

    # ---- sync ----

    def sync_put(self, end: int) -> None:
        """sync_log; queues and index follow what others put meanwhile. Raises OSError."""
        self.sync_log(end)
        self._dispatch_due()

    def sync_log(self, end: int) -> None:
        """The log is on disk up to `end`. One thread syncs for all that wait. Raises OSError when it failed."""
        self._group.sync(end, self._sync_log)
        self._store.log.writer.is_alone = not self._group.is_shared

    def _sync_log(self) -> int:
        with self._log_lock:
            self._raise_failure()
            with self._put_lock:
                position, segments = self._store.log.position, [*self._owed.segments, *self._store.log.unsynced]
            if self._is_sync:  # the disk is at work meanwhile
                self._dispatch_due()
            self._sync_segments(segment.file for segment in segments)
            if full := [segment for segment in segments if segment.end <= position]:  # others may have new records
                with self._put_lock:
                    self._store.log.drop_unsynced(full)
        return position

    def _sync_segments(self, files: Iterable[MappedFile]) -> None:
        """Nobody else's sync of a segment returns before a failure of this one is known. Raises OSError."""
        with self._log_lock:
            try:
                for file in files:
                    file.sync()
            except OSError as error:
                if not is_handlers(error):
                    self.failure = self.failure or error
                raise

    def relieve(self) -> None:
        """Sync the log when more segments than it may keep mapped are not synced. Not under the put lock."""
        log = self._store.log
        if len(log.unsynced) > log.unsynced_limit:
            try:
                self.sync_log(log.position)
            except OSError as error:
                if is_handlers(error):
                    raise
                self._is_untold = True
                logger.error("%s: sync failed: %s", self._store.paths.root, error)

    def flush(self, *, closing: bool = False, is_timed: bool = False, waits: bool = True) -> None:
        """All that was put is on disk, and marks; is_timed: but for many queues; waits: for who commits. OSError."""
        store, owed = self._store, self._owed
        with self.flush_lock:
            self._check_open()
            self._raise_failure()
            offsets = self.offsets.taken()  # first: what was consumed lies below the end that follows
            with self._put_lock:
                with self._noting():
                    self.check_place()
                    self.settle()
                    self.dispatch()
                end, timestamp = store.log.position, store.log.tail.last_timestamp
                owed.take()
                files = [segment.file for segment in owed.segments]
                self._marks.show(end)
                version = self._version(closing)
                manifest = None if version == self._written else self._manifest()
                derived = self._derived if is_timed and manifest is None and self._may_stay_behind(end) else end
                self._fill_checkpoint(end, timestamp)
                mark, last_unit = self._mark(end, derived), store.dispatcher.last_unit_timestamp
                known, topics = len(store.table), topics_from(store.table, self._known_queues)
            with self._noting():
                self._sync_segments(files)
                owed.segments, store.checkpoint.is_behind = [], store.checkpoint.is_behind or bool(files)
                if derived == end:
                    self._sync_queues(end, last_unit)
                for index_file in owed.index_files:
                    index_file.sync()
                self.check_place()  # that took its time, and what follows goes by names
                if store.checkpoint.is_behind:
                    store.checkpoint.flush()
                self._marks.write(mark)
                store.queues.cache.syncs_new = False  # from now on the mark tells which units there must be
                index_files, owed.index_files = owed.index_files, []
                if manifest is not None:
                    write_manifest(store.paths, manifest)
                    self._written = version
                self.check_place()
                if closing:
                    store.log.following.remove()
                merge_topics(store.paths.topics_json, topics)
                self._known_queues = known
            self._flushed = end
            self._group.note(end)
            for index_file in index_files:
                if index_file.view.is_full:
                    self._sidecars.add(index_file.path, index_file.view.hash_slot_num, index_file.view.index_num)
            with self._noting():
                self.check_place()
                self.offsets.write(offsets, waits=waits)
        if not (closing or self.flush_lock.is_mine()):
            self.tell_files()

    def _sync_queues(self, end: int, last_unit: int) -> None:
        """Units of all records below `end` are on disk, the last one stored at `last_unit` ms. Call amid a flush."""
        self._owed.sync_queues()
        self._derived, checkpoint = end, self._store.checkpoint  # from here on no mark goes back
        if last_unit and checkpoint.logics_msg_timestamp != last_unit:
            checkpoint.logics_msg_timestamp, checkpoint.is_behind = last_unit, True

    def _catch_up(self) -> None:
        """Sync queues that the last flush left behind; a full disk keeps what came since from them."""
        try:
            with self._noting():
                self._owed.sync_queues()
                self._derived = max(self._derived, self._flushed)
        except OSError as error:
            if self.failure is not None or is_handlers(error):
                raise

    def _may_stay_behind(self, end: int) -> bool:
        """Whether queues need no sync yet: there are many of them, and little to derive again after a crash."""
        return len(self._owed.queue_files) > QUEUE_FILES_AT_ONCE and end - self._derived < DERIVED_BEHIND and \
            not self._store.queues.cache.syncs_new  # fmt: skip

    def settled(self) -> int:
        """Flush, under the flush lock, which the caller holds in a `with` (no generator's, whose end an interrupt may
        put off) while files go that no manifest may name then. The end of what is on disk. Puts go on. Raises OSError.
        """
        try:
            self.flush()
        except OSError as error:
            if self.failure is not None or is_handlers(error):
                raise
            self._catch_up()
        with self._log_lock:  # a sync under way may still look at segments that go
            return self._derived

    def sync_names(self, descriptor: int) -> None:
        """Names in a directory are on disk. Raises OSError when the sync failed."""
        with self._noting():
            sync_file(descriptor)

    def _note(self, error: OSError) -> None:
        """What is full, used up or refused passes; after a sync that failed, or any other error, nothing is trusted."""
        if not passes(error):
            self.failure = error

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._note(error)
            raise

    def _distrust(self, error: OSError) -> None:
        """A sync off the put path failed: the next put or close tells."""
        self.failure, self._is_untold = self.failure or error, True

    def tell(self) -> OSError | None:
        """The failure; from now on somebody knows of it."""
        self._is_untold = False
        return self.failure

    def raise_untold(self) -> None:
        """Before the store goes: a failure that nobody was told of must not go with it."""
        if self._is_untold:
            self._raise_failure()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError(f"{self._store.paths.root}: store is closed")

    def check_not_nested(self) -> None:
        """A signal handler must not use a store that its own thread is at work on: it would find it half changed."""
        if self._put_lock.is_mine() or self.flush_lock.is_mine() or self._log_lock.is_mine() or self._group.is_mine():
            where = f"{self._store.paths.root}: called in the middle of another call of its thread"
            raise RuntimeError(f"{where}, as by a signal handler; raise an exception there instead")

    def close(self) -> None:
        """From here on nothing is written: another process may have the store. Waits for a flush or put under way."""
        with self.flush_lock, self._log_lock, self._put_lock:
            self._is_closed = True

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise OSError(self.failure.errno, f"writing failed before: {self.failure.strerror}")

    def _fill_checkpoint(self, end: int, timestamp: int) -> None:
        """What the flush that follows makes durable; of what was cut off the log nothing. Call under the put lock."""
        store, checkpoint = self._store, self._store.checkpoint
        checkpoint.physic_msg_timestamp = timestamp or checkpoint.physic_msg_timestamp
        followed = [file.end_timestamp for file in store.index.files[:-1] if file.is_full]
        checkpoint.index_msg_timestamp = followed[-1] if followed else checkpoint.index_msg_timestamp
        newest = 0 if followed else max(timestamp, store.dispatcher.last_unit_timestamp)
        checkpoint.take_back(end, store.log.tail.last_phy_offset, newest)

    def _mark(self, end: int, derived: int) -> Mark:
        index, dispatcher = self._store.index, self._store.dispatcher
        last = index.files[-1] if index.files else None
        return Mark(durable_phy_offset=end, derived_phy_offset=derived, indexed_phy_offset=dispatcher.index_phy_offset,
                    last_phy_offset=self._store.log.tail.last_phy_offset,
                    index_name=int(last.path.name) if last else 0,
                    index_header=last.view.header() if last else Mark.index_header)  # fmt: skip

    def _version(self, closing: bool) -> tuple[int, int, int, int]:
        """What a manifest speaks of: the set of files, and on close, when its offsets are worth most, the log's end."""
        store = self._store
        return (store.queues.cache.changes, len(store.index.files), store.log.min_phy_offset,
                store.log.position if closing else self._written[3])  # fmt: skip

    def _manifest(self) -> Manifest:
        store = self._store
        names = [file.path.name for file in store.index.files]
        return Manifest(store.log.min_phy_offset, store.queues.extents(), tuple(names))

    # ---- now and then ----

    def start(self) -> None:
        """Flush every flush_interval_commit_log ms what was put meanwhile, in the thread rmq-flush."""
        own = weakref.ref(self, waking(self._sleeper))
        thread = threading.Thread(target=_run, name="rmq-flush", daemon=True, args=(own, self._sleeper, self._interval))
        thread.start()
        self._thread = thread  # one that could not start is not waited for
        self.preparer.start()
        _running.add(self)

    def stop(self) -> None:
        """End the threads; a flush under way is finished."""
        self._sleeper.wake()
        self.preparer.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._sidecars.stop()

    def flush_if_due(self) -> None:
        """What was put since the last flush; when that is nothing, what it left behind."""
        has_more, owed = self._store.log.position != self._flushed, self._derived != self._flushed
        if self.failure is not None or not (has_more or owed or self.offsets.is_behind):
            return
        try:
            self.flush(is_timed=has_more, waits=False)
        except Exception as error:  # the next one tries again
            logger.error("%s: timed flush failed: %r", self._store.paths.root, error)
            with suppress(Exception):  # as where queues have no room: what was put is on disk all the same
                self.sync_log(self._store.log.position)
            self._is_untold = self.failure is not None


@atexit.register
def _stop_threads() -> None:
    """Before the interpreter ends: it would cut a thread off in the middle of a flush, and in C++ that is an abort."""
    for flusher in list(_running):
        if flusher.pid == os.getpid():
            flusher.stop()


def _run(reference: weakref.ref[Flusher], sleeper: Sleeper, interval: float) -> None:
    """Holds the flusher only while it flushes, so that a store nobody holds can go."""
    while not sleeper.sleep(interval):
        flusher = reference()
        if flusher is None:
            return
        flusher.flush_if_due()
        del flusher
