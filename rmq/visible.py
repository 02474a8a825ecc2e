# SPDX-License-Identifier: Apache-2.0
"""What a reader may see of a store: the log's end, units not in files yet, ranges that the index covers."""

from __future__ import annotations

import logging
import threading

from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.consumequeue import ConsumeQueue, QueueGapError
from rmq.coverage import Coverage
from rmq.dispatch import Dispatcher
from rmq.errors import CorruptFileError
from rmq.index import Durable, Index
from rmq.lock import Crash, Holder, crash_of, lock_holder
from rmq.logcuts import Epochs, Proof
from rmq.logend import (
    LogEnd,
    end_past_damage,
    ends_for_sure,
    find_end,
    is_outdated,
    look_behind,
    may_go_on,
    misses_last_segment,
    on_disk_since,
    own_end,
    record_behind,
    rules_of,
    start_without_marks,
    was_closed,
    was_left_alone,
)
from rmq.marks import RECOVERING, Mark, Marks, look_at_marks, read_manifest
from rmq.paths import FileVersion, StorePaths, version_of
from rmq.queueends import QueueKey, cut_queues, lost_queues
from rmq.queueset import QueueSet
from rmq.recovery import index_is_whole
from rmq.segment import LOOKS

TAIL_LIMIT = 4 * 1024 * 1024  # bytes of units in memory, of all queues, before those in files are dropped
WEIGHED_EACH = 4  # limits of bytes of the log: a record has as many bytes for each of its unit

logger = logging.getLogger("rmq")


class Visible:
    """A reader's view. refresh() before each answer; derive() before answers from queues."""

    def __init__(self, paths: StorePaths, log: CommitLog, queues: QueueSet, index: Index,
                 dispatcher: Dispatcher[ConsumeQueue], *, known_end: int | None = None,
                 queue_end: int = 0, follows: bool = True) -> None:  # fmt: skip
        """known_end: where the log ends, of one that does not change. queue_end: of a store without queues, behind the
        last record that its queues had. follows: writers may come."""
        self._known_end, self._queue_end, self._follows, self._paths = known_end, queue_end, follows, paths
        self._owner_name, self._manifest_name, self._lock_name = map(str, (paths.owner, paths.manifest, paths.lock))
        self._log, self._queues, self._index, self._dispatcher = log, queues, index, dispatcher
        self._marks: Marks | None = None
        self._mark: Mark | None = None
        self._weighed = 0  # end of the log when the units in memory were last looked at
        self._last: Proof | None = None  # of a record that was the last one
        self.lock = threading.RLock()
        self._look()

    def _look(self) -> None:
        """Judge the store as it stands now."""
        paths, log = self._paths, self._log
        self._judged: tuple[FileVersion | None, Mark | None, bool] | None = None  # an error leaves it so
        self._epochs, self._coverage = Epochs(paths.epochs, log), Coverage(paths, log, self._index)
        self._holder, self._writer = lock_holder(paths.lock), self.writer_now()
        self._signs = None if self._is_live else (self._writer, version_of(self._lock_name))
        self._crashed = None if self._is_live else crash_of(paths)
        self._is_clean = not self._is_live and self._crashed is None
        self._cuts, self._last = False, None  # _cuts: units count as cut_queues finds, beside a broker
        seen: object = None
        for _ in range(LOOKS):
            self._read_files()
            mark = self._mark if self._holder is Holder.RMQ else None
            if mark is None or mark.durable_phy_offset >= log.min_phy_offset or seen == (mark, log.min_phy_offset):
                break  # else a cleaning took all below the mark since: behind it no unit of the files counts
            seen = mark, log.min_phy_offset
        self._derived = self._dispatcher.fills_gaps = self._index_is_whole = False
        self._cut_short: tuple[str, FileVersion | None] | None = None  # a segment, as it was when it stopped us
        self.passed: CorruptFileError | None = None  # damage that was passed over: its records have no units
        judged = self._writer, self._mark, self._is_recovered()
        try:
            self._start()
        except CorruptFileError as error:
            if error.path not in {str(segment.path) for segment in log.segments}:
                raise
            self._cut_short = error.path, version_of(error.path)  # a scan can skip it, every other read tells
            self.end = log.max_phy_offset
        self._judged = judged

    def _read_files(self) -> None:
        """Beside a writer each of these may be newer than the one before it, never older."""
        self.end = self._low = self._log.min_phy_offset  # _low: the minimum that the queues were made level with
        self._judged_manifest, manifest = version_of(self._manifest_name), read_manifest(self._paths)
        self._read_mark()
        self._first_mark: Mark | None = self._mark  # of this writer: until another follows, it may be recovering
        self._manifest = manifest if self._mark is not None else None
        self._queues.bridges_gaps = self._mark is not None
        self._queues.judges_files = not self._is_live and not self._is_clean  # as a recovery would
        if not self._is_clean:
            self._trust_files()
        self._index.refresh()
        self._load_queues()

    def _load_queues(self) -> None:
        """Of all queues what their files hold now; the log then has their records."""
        self._queues.forget()
        self._dispatcher.forget_queues()
        self._queues.load()
        self._log.refresh()

    def _look_anew(self, why: str) -> None:
        logger.warning("%s: %s; the reader looks at all anew", self._paths.root, why)
        self._look()

    def ends_earlier(self) -> bool:
        """Whether the log's end has gone back: what a read came to is no damage then, but what a broker had cut off."""
        with self.lock:
            before, last = self.end, self._last
            if self._follows and self._epochs.last is not None and self._holder is Holder.OTHER:
                self._look()
                if not self._cuts:
                    self.end, self._last = before, last
            return self.end < before

    def _read_mark(self) -> None:
        if (marks := look_at_marks(self._paths, self._marks)) is not None:
            self._marks, self._mark = marks, marks.read()

    @property
    def _is_live(self) -> bool:
        return self._holder is not None

    def writer_now(self) -> FileVersion | None:
        """What tells one writer from the next: each makes its owner file anew."""
        return version_of(self._owner_name)

    def _trust_files(self) -> None:
        """Of queue files only units below the mark count: those behind it a recovery takes off and writes again."""
        if self._mark is not None and self._holder is not Holder.OTHER:
            self._queues.trusted = max(self._mark.derived_phy_offset, self._log.min_phy_offset)

    def _start(self) -> None:
        """Find the end for the first time, and from where queues must be derived."""
        log, mark = self._log, self._mark
        in_files = self._queues.in_files() if self._crashed is Crash.OPENING else self._queues.end_phy_offset()
        queue_end = max(self._queue_end, in_files)
        is_foreign = self._holder is not Holder.RMQ and self._crashed is not Crash.OURS
        if mark is not None and is_foreign and is_outdated(log, mark, Checkpoint(self._paths.checkpoint), queue_end):
            mark = None
        is_closed = not self._is_live and was_closed(self._crashed) and self._known_end is None
        is_short = is_closed and misses_last_segment(log, Checkpoint(self._paths.checkpoint), in_files)
        start = mark.durable_phy_offset if mark is not None else 0
        if mark is not None:
            is_alone = not is_short and (start >= log.max_phy_offset or (is_closed and was_left_alone(log, mark)))
            self._start_queues(mark, is_cut=self._is_clean and is_alone and queue_end > start)
            self._index_is_whole = index_is_whole(self._index, mark, self._manifest, is_closed=self._is_clean)
            if is_alone:
                self._end_at(start, mark.last_phy_offset)  # what of it is gone or damaged shows when it is read
                return
        elif self._known_end is None:
            start = self._start_without_marks(queue_end)
        if self._known_end is not None:
            self.end = self._known_end
        elif log.segments:
            trusted = start if mark is not None else 0
            end = self._first_end(start, trusted)
            if is_short or (is_closed and misses_last_segment(log, Checkpoint(self._paths.checkpoint), queue_end)):
                self.end = trusted = min(queue_end, log.max_phy_offset + log.segment_size)  # scans tell that it is gone
            self._cuts = self._holder is Holder.OTHER and ends_for_sure(log, end, self._epochs.last)
            if (mark is None or self._crashed is None) and (not self._is_live or self._cuts):
                self._cut_queues(start, trusted, is_marked=mark is not None)

    def _start_queues(self, mark: Mark, *, is_cut: bool) -> None:
        """is_cut: units point behind the log's end. After a crash what lies behind the mark is judged anew."""
        derived = mark.derived_phy_offset
        beside = self._paths if self._is_live else None
        lost = cut_queues(self._log, self._queues, derived, derived, derived) if is_cut or self._crashed else []
        self._derive_anew(lost := [*lost, *lost_queues(self._log, self._queues, self._manifest, derived, beside)])
        is_known = not lost and self._manifest is not None
        self._dispatcher.queue_phy_offset = max(self._log.min_phy_offset, derived if is_known else 0)
        self._queues.end_at_gaps(is_derived_again=not is_known)

    def _start_without_marks(self, queue_end: int) -> int:
        """From where to look for the end, by RocketMQ's rules."""
        self._crashed = self._crashed if was_closed(self._crashed) else Crash.BROKERS
        is_whole = self._is_clean or self._is_live
        start = start_without_marks(self._log, is_whole, Checkpoint(self._paths.checkpoint), queue_end)
        if self._is_live:  # of records below queue_end units may have come to queues that were loaded by then
            queue_end = 0 if self._holder is Holder.RMQ else min(queue_end, self._queues.last_phy_offset())
            self._load_queues()
        self._dispatcher.queue_phy_offset = max(queue_end, self._log.min_phy_offset) if is_whole else start
        return start

    def _first_end(self, start: int, trusted: int) -> LogEnd:
        """Of the log, looked for from `start`; records below `trusted` are on disk whatever follows them."""
        end = self._find_end(max(start, self._log.min_phy_offset))
        if end.last_phy_offset < 0 and trusted and self._mark is not None:
            end.last_phy_offset = self._mark.last_phy_offset
        if not self._is_live:
            on_disk = on_disk_since(trusted, self._crashed, Checkpoint(self._paths.checkpoint), self._epochs.last)
            end = look_behind(self._log, end, on_disk)
        end = end_past_damage(self._log, end) if end.is_damage else end
        self._end_at(end.place, end.last_phy_offset)
        return end

    def _cut_queues(self, start: int, trusted: int, *, is_marked: bool) -> None:
        """A broker that cut its log leaves the units behind until others take their places, beside us too."""
        log, dispatcher = self._log, self._dispatcher
        derived = self.end if not is_marked and self._is_clean else 0 if self._is_live else start
        self._derive_anew(cut_queues(log, self._queues, self.end, trusted, derived, is_closed=self._is_clean))
        queue_end = self._queues.end_phy_offset() if self._is_live and not is_marked else self.end
        dispatcher.queue_phy_offset = max(min(dispatcher.queue_phy_offset, queue_end, self.end), log.min_phy_offset)

    def _derive_anew(self, lost: list[QueueKey]) -> None:
        """These queues miss units: nothing of their files counts, and all records are dispatched."""
        for key in lost:
            self._queues.derive_anew(key)
        if lost:
            self._dispatcher.fills_gaps, self._dispatcher.queue_phy_offset = True, self._log.min_phy_offset

    def _end_at(self, end: int, last_phy_offset: int) -> None:
        """last_phy_offset: of the last record, -1: not scanned."""
        self.end = end
        if self._follows and last_phy_offset >= 0:
            self._last = Proof.of(self._log, last_phy_offset) or self._last

    def _is_put_back(self) -> bool:
        """Whether a segment is there now that was missing before all others, or cut short, when last judged."""
        was_short = self._cut_short is not None and version_of(self._cut_short[0]) != self._cut_short[1]
        return was_short or (bool(self._log.segments) and self._log.min_phy_offset < self._low)

    def _find_end(self, begin: int) -> LogEnd:
        """What recovery would not take for a record is none for a reader either."""
        crashed = crash_of(self._paths) if self._is_recovered() else self._crashed
        own_from, on_disk = rules_of(crashed, self._mark, Checkpoint(self._paths.checkpoint), self._holder)
        return find_end(self._log, begin, self._limit(), own_from=own_from, on_disk=on_disk)

    def _is_recovered(self) -> bool:
        """Whether a writer of ours is amid it: how the store was left, its files still tell."""
        return self._holder is Holder.RMQ and (self._marks is None or self._marks.visible_phy_offset == RECOVERING)

    def _limit(self) -> int:
        """Readers beside our own writer never look past what it published, and no further where the end is known."""
        if self._known_end is not None:
            return self.end
        if self._holder is Holder.RMQ and self._paths.abort.exists():  # else a rebuild has it, closed
            visible = self._marks.visible_phy_offset if self._marks is not None else 0
            if visible > 0 or (visible != RECOVERING and self._mark is not None):
                return min(self._log.max_phy_offset, max(visible, self.end))
        return self._log.max_phy_offset  # a broker's, or of one that is recovered

    def refresh(self) -> int:
        """See what is there now; returns the end of the log."""
        with self.lock:
            if not self._follows:
                return self.end
            self._log.refresh()
            self._holder, writer = lock_holder(self._paths.lock), self.writer_now()
            self._read_mark()
            if writer != self._writer:
                self._writer, self._first_mark = writer, self._mark
            if self._judged is None:
                self._look_anew("an error ended the last look")
            signs = None if self._is_live else (writer, version_of(self._lock_name))
            judged = writer, self._mark, self._is_recovered()
            may_be_cut = self._judged != judged or self._holder is Holder.OTHER or signs != self._signs
            if may_be_cut and self._last is not None and self._last.is_cut(self._log):
                self._look_anew("records were taken off that this reader had seen")
            elif may_be_cut and self._epochs.have_changed(self._log):
                self._look_anew("another epoch began")
            else:
                self._judged = judged  # last: an error above asks again
            if self._is_put_back():
                self._look_anew("a segment was put back")
            if self._is_live:
                self._trust_files()
            if signs != self._signs:  # a writer came or went
                self._signs, self._crashed = signs, crash_of(self._paths) if signs is not None else None
            if self._log.segments:
                self.end = max(self.end, self._log.min_phy_offset)
                if self.end < self._limit() and may_go_on(self._log, self.end):
                    end = self._find_end(self.end)
                    self._end_at(end.place, end.last_phy_offset)
            return self.end

    def derive(self) -> None:
        """Bring the queues level with the end, in memory. CorruptFileError while files of one are damaged."""
        with self.lock:
            if self._queues.damage:
                self._look()  # at files that were put in their place, maybe
            self._queues.check()
            if (low := self._log.min_phy_offset) > self._low:
                self._follow_cleaning(low)
            all_changed = not self._derived or low > self._low
            if all_changed or self._dispatcher.queue_phy_offset < self.end:
                filled = self._dispatcher.fills_gaps
                try:
                    self._advance(self.end)
                except (CorruptFileError, QueueGapError) as error:
                    self.refresh()
                    if self._log.min_phy_offset == low:  # else cleaned meanwhile: nothing is lost
                        if isinstance(error, CorruptFileError) or (filled and self._dispatcher.fills_gaps):
                            raise
                        self._dispatcher.fills_gaps, self._dispatcher.queue_phy_offset = True, low
                    self.derive()
                    return
                self._dispatcher.fills_gaps = False
                is_told = self._mark is not None or self._holder is Holder.OTHER
                if is_told and self.end - self._weighed > WEIGHED_EACH * TAIL_LIMIT:
                    self._weighed = self.end
                    self._queues.drop_tails(TAIL_LIMIT, lambda: self._in_files(low))
                for queue in self._queues.queues.values() if all_changed else self._queues.touched:
                    queue.correct_min_offset(low)
                self._queues.touched, self._derived, self._low = set(), True, low
            self._forget_removed()

    def follow_files(self) -> None:
        """derive, with the files of queues and index as they are now."""
        with self.lock:
            self._index.refresh()
            self.derive()
            self._follow_cleaning(self._low)
            self.derive()

    def _forget_removed(self) -> None:
        """Queues without messages that a cleaning removed begin at 0 again: a new manifest leaves them out."""
        if self._judged_manifest == (now := version_of(self._manifest_name)):
            return
        self._judged_manifest = now
        empty = [queue for queue in self._queues.queues.values() if queue.max_offset == queue.min_offset]
        manifest = read_manifest(self._paths) if empty else None
        if manifest is not None:
            self._queues.drop([queue for queue in empty if (queue.topic, queue.queue_id) not in manifest.queues])
            self._dispatcher.forget_queues()

    def _follow_cleaning(self, low: int) -> None:
        """The writer removed segments, maybe ones that we had not derived: then the units are in its files by now."""
        self._read_mark()
        derived, self._derived, self._judged_manifest = max(min(self._in_files(low), self.end), low), False, None
        derived = low if self._queues.follow_files(derived, low, is_whole=self._holder is Holder.RMQ) else derived
        if self._cuts:  # the files still have the units that were left behind
            cut_queues(self._log, self._queues, self.end, level=logging.DEBUG)
        self._dispatcher.queue_phy_offset = max(self._dispatcher.queue_phy_offset, derived)

    def _in_files(self, low: int) -> int:
        """Below it all records have their units in files: by the mark, which a broker does not move."""
        derived = self._mark.derived_phy_offset if self._mark is not None and self._holder is not Holder.OTHER else -1
        return derived if derived >= low else self._queues.in_files(QueueSet.last_phy_offset)

    def _advance(self, end: int) -> None:
        """Dispatch up to the end; records behind damage are left to scans, which report it."""
        self._dispatcher.is_brokers = may_be = self._holder is not Holder.RMQ and self._crashed is not Crash.OURS
        self._dispatcher.own_end = own_end(self._log, self._mark) if may_be and self._queues.is_exact else 0
        while True:
            try:
                self._dispatcher.advance(end)
                return
            except CorruptFileError as error:
                if self._is_live or self._dispatcher.queue_phy_offset < self._log.min_phy_offset:
                    raise
                following = record_behind(self._log, self._dispatcher.queue_phy_offset)
                self.passed = self.passed or error
                if not 0 <= following < end:
                    return
                self._dispatcher.queue_phy_offset = following

    def uncovered(self) -> tuple[list[tuple[int, int]], Durable | None]:
        """Ranges of the log whose keys no index file holds that counts, and what then counts for Index.collect."""
        with self.lock:
            self._index.refresh()
            mark, files = self._mark, self._index.files
            # A writer that recovers takes the index back to the mark; when it lacks nothing again, it moves the mark.
            is_calm = self._is_live and mark != self._first_mark
            is_after_crash = not self._is_live and not self._is_clean
            has_manifest, misses_files = self._coverage.by_manifest()
            is_whole = (self._index_is_whole and has_manifest) or (is_calm and not self._index.damaged)
            if mark is not None and is_whole and not misses_files:
                covered = max(self._log.min_phy_offset, mark.indexed_phy_offset)
                if is_calm and files and files[-1].path.name >= str(mark.index_name):
                    covered = max([covered, *(file.end_phy_offset for file in files if file.index_count > 1)])
                durable = (mark.index_name, mark.index_count) if is_after_crash else None
                return [(covered, self.end)] if covered < self.end else [], durable
            is_told = has_manifest or mark is None
            files, durable = self._coverage.flushed(is_told=is_told) if is_after_crash else (files, None)
            files = [file for file in files if file.index_count > 1]
            ranges, covered = self._coverage.gaps(files, self.end, is_closed=self._is_clean)
            if mark is not None and self._holder is Holder.RMQ:
                covered = min(covered, max(mark.indexed_phy_offset, self._log.min_phy_offset))
            ranges.append((covered, self.end))
            return [(begin, min(end, self.end)) for begin, end in ranges if begin < min(end, self.end)], durable

    def close(self) -> None:
        if self._marks is not None:
            self._marks.close()  # and kept: a thread that reads them now gets an error that means closed
