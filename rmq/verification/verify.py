# SPDX-License-Identifier: Apache-2.0
"""The whole of a store, verified: log, then queues and index against it in both directions, then the small files."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from rmq._core._record import SCAN_BLANK, SCAN_LIMIT, SCAN_REASONS, SCAN_ZERO, resync
from rmq.config import StoreConfig, config_or_default
from rmq.geometry import changed_by_broker, segment_sizes, settle_config
from rmq.keys import checked_int
from rmq.lock import Crash, crash_of, lock_holder
from rmq.logend import fits, misses_last_segment, start_without_marks, was_left_alone
from rmq.logsegment import Segment
from rmq.marks import Manifest, Mark, is_ours, read_manifest
from rmq.paths import StorePaths, segment_name
from rmq.pool import Runner, cores
from rmq.storeroot import NO_LOG, foreign_index, foreign_queues, has_lost_log, paths_to_read
from rmq.verification.findings import DAMAGE, DERIVED, LIMIT, Report, VerifyResult
from rmq.verification.ground import NO_LIMIT, Ground, HeldLog, holds_bytes, list_segments
from rmq.verification.indexes import IndexFiles
from rmq.verification.queues import QueueFiles, last_unit_of
from rmq.verification.records import Range, SegmentReport, joined
from rmq.verification.smallfiles import (
    judge_checkpoint,
    judge_markers,
    judge_names,
    read_checkpoint,
    read_mark,
    read_own_manifest,
    read_own_meta,
    visible_end,
)
from rmq.verification.work import (
    QUEUE_GROUPS,
    Crew,
    Site,
    Tasks,
    Tell,
    Threads,
    check_ranges,
    in_groups,
    judge_part,
    judge_queues,
    until_quiet,
)

PIECES = 4  # for each thread, of the last segments: when one has nothing left to do, others are soon done
PIECE_BYTES = 4 * 1024 * 1024  # at least
SEARCHED = 1024 * 1024  # bytes in which a piece's first record is looked for

Progress = Callable[[int, int], object]


def verify(path: str | os.PathLike[str], *, config: StoreConfig | None = None, progress: Progress | None = None,
           jobs: int | None = None, limit: int = LIMIT) -> VerifyResult:  # fmt: skip
    """Every broken rule of a store directory: read only, nothing is created, locked or changed.

    Log records, queues and index in both directions, checkpoint, the files of <store>/rmq/, names, sizes, modes. What
    releases of RocketMQ do differently is no finding. Beside a writer what it has made visible and derived is verified,
    and findings while one came or went are looked at again, as is a store of which files went meanwhile, up to three
    times in all. config: geometry that the files do not tell, as for `rmq.open`. progress: called here now and then
    with (bytes read, bytes to read). jobs: threads, default the number of cores. limit: findings that are kept; the
    others are counted. Cost: for each look one pass over log, queues and index, by several threads a second one over
    damaged segments; memory does not grow with the store, but for four bytes for each slot of an index file and a few
    hundred for each queue. Raises OSError, UnsupportedFormatError, ValueError (geometry), CorruptFileError only when
    files go at every look: else that is a finding. Source: what RocketMQ's CommitLog, ConsumeQueue and IndexFile write.
    """
    _check_numbers(limit, jobs)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, got {type(progress).__name__}")
    paths, given = _found(path, config)
    run = partial(Threads, jobs or cores())
    return until_quiet(paths, lambda: _Verification(paths, given, Report(limit), progress).run(run))


def verify_by(run: Runner, path: str | os.PathLike[str], *, config: StoreConfig | None = None,
              limit: int = LIMIT) -> VerifyResult:  # fmt: skip
    """`verify` by any Runner: index files, groups of segments and groups of queues are its tasks, in this order.

    Past the limit other findings of the same severity may be kept than `verify` keeps.
    """
    _check_numbers(limit)
    paths, given = _found(path, config)
    return until_quiet(paths, lambda: _Verification(paths, given, Report(limit), None).run(partial(Tasks, run)))


def _check_numbers(limit: int, jobs: int | None = None) -> None:
    checked_int(limit, "limit", least=1)
    if jobs is not None:
        checked_int(jobs, "jobs", least=1)


def _found(path: str | os.PathLike[str], config: StoreConfig | None) -> tuple[StorePaths, StoreConfig]:
    """The store's files and what is known of it; raises when there is no store."""
    given = config_or_default(config)
    return paths_to_read(path, given), given


class _Verification:
    def __init__(self, paths: StorePaths, config: StoreConfig, report: Report, progress: Progress | None) -> None:
        self._paths = paths
        self._report = report
        self._progress = progress
        self._total = 0
        self._given = config
        self._ground = self._look()

    def _look(self) -> Ground:
        """The small files first: beside a writer each of the others may be newer than they are, never older."""
        paths, report = self._paths, self._report
        state = "open" if lock_holder(paths.lock) else "not closed" if paths.abort.exists() else "closed"
        is_live = state == "open"
        meta = read_own_meta(paths, report)
        mark = read_mark(paths, report)
        self._manifest: Manifest | None = read_own_manifest(paths, report) if mark is not None else None
        checkpoint = read_checkpoint(paths, report, is_live=is_live)
        changed = changed_by_broker(paths, self._given, meta, True)
        for name, size in segment_sizes(paths).items() if meta is not None else ():
            if meta is not None and meta.get(name, size) != size:
                tell = report.note if changed.get(name) == size else report.damage
                tell(paths.meta, 0, "own", f"meta.json says {name} {meta[name]}, the files have {size}")
                meta[name] = size
        config, _ = settle_config(paths, self._given, meta, tolerant=True)
        log = HeldLog(paths.commit_logs, config.mapped_file_size_commit_log)
        ground = Ground(paths, config, report, state, mark, checkpoint, log)
        if is_live and crash_of(paths) is Crash.OURS and mark is not None:
            ground.log_limit = visible_end(paths, report)
        judge_names(paths, report, is_live=is_live)
        judge_markers(paths, report, state)
        for begin, end in list_segments(log, report, is_live=is_live):
            ground.add_blind(begin, end)
        ground.leave_out_cut()
        if has_lost_log(paths):
            report.damage(log.directories[0], 0, "missing", NO_LOG)
        if is_ours(meta) and mark is not None:
            ground.is_own = was_left_alone(log, mark) if ground.is_closed else crash_of(paths) is Crash.OURS
        return ground

    # ---- the passes ----

    def run(self, crew_of: Callable[[Tell], Crew]) -> VerifyResult:
        ground, crew = self._ground, crew_of(self.tell)
        foreign = [error for error in (foreign_queues(self._paths), foreign_index(self._paths)) if error is not None]
        for error in foreign:
            self._report.note(Path(error.path), 0, "unread", f"{error.what}: not verified")
        for part, what in _UNREAD:
            if any((self._paths.root / part).glob("*")):
                self._report.note(self._paths.root / part, 0, "unread", f"{what}: not verified")
        is_remade = ground.mark is not None and not ground.is_closed and not self._paths.manifest.exists()
        if ground.mark is not None and is_remade:  # by a recovery that is under way, or was killed
            self._report.note(self._paths.index, 0, "open", "index files are being derived again: not verified")
            ground.mark = replace(ground.mark, index_name=0)
        last_unit = last_unit_of(ground)  # before files are listed
        queues = QueueFiles(ground, is_read=foreign_queues(self._paths) is None)
        index = IndexFiles(ground, is_read=foreign_index(self._paths) is None and not is_remade)
        site = Site(ground, queues, index)
        try:
            tail = self._tail()
            self._set_ends(last_unit, index)
            self._total = index.size + sum(segment.end - segment.start for segment in ground.log.segments)
            self._judge_index_names(index)
            index.cut_counts()
            ranges = self._ranges(tail, crew)
            starts = [segment.start for segment in ground.log.segments]
            ground.places = np.unique(np.array([*starts, *(begin for begin, _ in ranges)], np.int64))
            parts = {part.path: part for part in index.parts}
            for path, times in crew.each(site, judge_part, list(parts)):
                if times is not None:
                    parts[path].times = times
            if self._report.counts[DAMAGE] or self._report.counts[DERIVED]:
                ranges = [(segment.start, segment.end) for segment in tail]
            found = self._read(crew, site, ranges)
            self._judge_begin()
            self._judge_end(found)
            self._judge_last_segment(queues)
            names = list(queues.queues)
            groups = [{name: queues.queues[name].spans for name in group}
                      for group in in_groups(names, -(-len(names) // QUEUE_GROUPS))]  # fmt: skip
            for _ in crew.each(site, judge_queues, groups):
                pass
            return self._result(found)
        finally:
            ground.stop.set()
            crew.close()
            site.close()

    def _ranges(self, segments: list[Segment], crew: Crew) -> list[Range]:
        """Segments, and the last ones in pieces that begin with records; beside a writer all are whole."""
        whole = len(segments) if crew.count == 1 or self._ground.is_live else max(0, len(segments) - crew.count)
        ranges = [(segment.start, segment.end) for segment in segments[:whole]]
        left, pieces = segments[whole:], []
        size = max(PIECE_BYTES, sum(segment.end - segment.start for segment in left) // (crew.count * PIECES))
        for segment in left:
            begin, used = segment.start, min(segment.start + segment.file.data_end(), self._ground.log_limit)
            for place in range(begin + size, used - size // 2, size):
                following = resync(segment.file.map, segment.start, place, min(place + SEARCHED, used))
                if following > begin:
                    pieces.append((begin, following))
                    begin = following
            pieces.append((begin, segment.end))
        return ranges + pieces[::-1]  # of the log's end, which takes longer, not as the last one

    def _read(self, crew: Crew, site: Site, ranges: list[Range]) -> list[SegmentReport]:
        """Pass over the log; reports in its order. A segment of which a piece is not sound is read again as a whole."""
        log, found = self._ground.log, []
        count = max(1, crew.group_bytes // log.segment_size)
        order = deque(sorted({begin - begin % log.segment_size for begin, _ in ranges}))
        waiting: dict[int, SegmentReport] = {}
        while ranges:
            pieces: dict[Segment, list[SegmentReport]] = {}
            left = Counter(log.listed_at(begin) for begin, _ in ranges)
            again: list[Range] = []
            for piece in chain.from_iterable(crew.each(site, check_ranges, in_groups(ranges, count))):
                segment = log.listed_at(piece.start)
                pieces.setdefault(segment, []).append(piece)
                left[segment] -= 1
                if left[segment]:
                    continue
                report = joined(pieces.pop(segment))
                if report is None:
                    again.append((segment.start, segment.end))
                    continue
                segment.let_go()
                waiting[report.start] = report
                while order and order[0] in waiting:
                    report = waiting.pop(order.popleft())
                    for name, spans in report.spans.items():
                        site.queues.add_spans(name, spans)
                    report.spans = {}
                    found.append(report)
            ranges = again
        return found

    def tell(self) -> None:
        """Progress."""
        if self._progress is not None:
            self._progress(min(self._ground.size_read, self._total), self._total)

    def _tail(self) -> list[Segment]:
        """The segments to read: all but those behind the last one that holds anything."""
        ground = self._ground
        segments = [segment for segment in ground.log.segments if segment.start < ground.log_limit]
        while segments and not (segments[-1].is_there() and (any(segments[-1].read(0, 8)) or segments[-1].used_end(0))):
            segments.pop().let_go()
        return segments

    def _set_ends(self, last_unit: int, index: IndexFiles) -> None:
        """Up to where queues and index must have followed the log."""
        ground, mark = self._ground, self._ground.mark
        if not ground.is_closed:
            if mark is not None and not self._paths.manifest.exists():
                ground.unit_end = ground.entry_end = 0  # a recovery that is under way, or was killed, makes them again
            elif mark is not None:
                ground.unit_end, ground.entry_end = mark.derived_phy_offset, mark.indexed_phy_offset
            else:
                ends = [part.phy_offset(part.limit - 1) for part in index.parts if part.limit > 1]
                ground.entry_end = max(ends, default=0)
                ground.unit_end = 0
                if ground.is_live:
                    ground.unit_end = last_unit
                elif ground.checkpoint is not None and ground.log.segments:
                    ground.unit_end = start_without_marks(ground.log, False, ground.checkpoint, 0)
        elif mark is not None and ground.is_own:
            ground.unit_end, ground.entry_end = mark.derived_phy_offset, mark.indexed_phy_offset
        if not self._given.message_index_enable:
            ground.entry_end = 0

    def _judge_index_names(self, index: IndexFiles) -> None:
        there = {part.path.name for part in index.parts}
        lost = [name for name in sorted(_index_names(self._manifest, self._ground.mark) - there)
                if self._ground.is_own and not holds_bytes(self._paths.index / name)]  # fmt: skip
        if lost:  # a cleaning takes a file's name off both before it removes the file
            named = _index_names(read_manifest(self._paths), read_mark(self._paths, Report(0)))
            for name in lost:
                if name in named:
                    self._report.derived(self._paths.index / name, 0, "missing",
                                         "rmq/manifest.json or rmq/marks name this index file, and there "
                                         "is none, or an empty one")  # fmt: skip

    # ---- the end of the log ----

    def _judge_end(self, found: list[SegmentReport]) -> None:
        """Where each segment's records end: a blank record must stand there, or it is the end of the log."""
        ground, report = self._ground, self._report
        ground.log.refresh()
        whole = [item for item in found if item.record_count]
        last = whole[-1].start if whole else -1
        ground.log_end = max([ground.log.min_phy_offset, *(item.end for item in whole)])
        for item in found:
            if item.stop in (SCAN_LIMIT, SCAN_BLANK) or ground.was_cleaned(item.start):
                continue
            segment = ground.log.listed_at(item.start)
            position = item.end - segment.start
            reason = SCAN_REASONS.get(item.stop, "no record")
            if segment.start < last:
                what = "zeros, and no record behind them" if item.stop == SCAN_ZERO else f"{reason}, and none follows"
                report.damage(segment.path, position, "record", f"{what} in this segment")
                ground.add_blind(item.end, segment.end)
            elif ground.tail is None and not ground.is_live and item.used_end > item.end:
                ground.tail = segment.path, position, reason
        if ground.mark is not None and ground.log.segments and not (ground.is_live and not ground.is_own):
            self._judge_mark()

    def _judge_last_segment(self, queues: QueueFiles) -> None:
        """Whether the segment behind the last one was lost: then its units and index entries are no fault."""
        ground, last = self._ground, queues.last_phy_offset()
        end = ground.log.max_phy_offset
        if ground.is_closed and ground.checkpoint is not None and not ground.is_blind(end) and \
                misses_last_segment(ground.log, ground.checkpoint, last + 1):
            ground.add_blind(end, NO_LIMIT)
            self._report.damage(ground.log.directories[0] / segment_name(end), 0, "missing",
                                f"the log ends before this segment, and a queue has a message at {last}")

    def _judge_begin(self) -> None:
        """What lies before the log of a store that we closed: a cleaning of ours notes where the log begins since."""
        ground, manifest = self._ground, self._manifest
        if manifest is not None and ground.is_own and ground.is_closed and \
                (low := ground.log.min_phy_offset) > manifest.min_phy_offset:  # fmt: skip
            self._report.note(ground.log.directories[0], 0, "missing", f"the log began at {manifest.min_phy_offset} "
                              f"when the store was closed, and begins at {low}")  # fmt: skip

    def _judge_mark(self) -> None:
        """The log against the mark: below it nothing may be gone."""
        ground, mark = self._ground, self._ground.mark
        assert mark is not None
        if mark.durable_phy_offset > ground.log_end and not self._ends_with_blank(mark.durable_phy_offset):
            ground.add_blind(ground.log_end, NO_LIMIT)
            segment = ground.log.segment_at(ground.log_end)
            path, position = (segment.path, ground.log_end - segment.start) if segment is not None else \
                (ground.log.directories[0], 0)  # fmt: skip
            reason = ground.tail[2] if ground.tail is not None else "the log ends here"
            ground.tail = None
            self._report.damage(path, position, "record", f"{reason}; up to phy offset {mark.durable_phy_offset} it "
                                "was on disk")  # fmt: skip
        elif not (fits(ground.log, mark) or ground.is_blind(mark.last_phy_offset)
                  or ground.was_cleaned(mark.last_phy_offset)):  # fmt: skip
            self._report.derived(self._paths.marks, 0, "own", f"no record that ends at {mark.durable_phy_offset} "
                                 f"begins at {mark.last_phy_offset}, as the mark says")  # fmt: skip

    def _ends_with_blank(self, phy_offset: int) -> bool:
        """Whether the log ends with the blank record behind which a phy offset lies."""
        ground = self._ground
        segment = ground.log.segment_at(ground.log_end)
        return segment is not None and phy_offset == segment.end and \
            segment.ends_with_blank(ground.log_end - segment.start)  # fmt: skip

    # ---- the answer ----

    def _result(self, found: list[SegmentReport]) -> VerifyResult:
        ground, report = self._ground, self._report
        if ground.tail is not None:
            path, position, reason = ground.tail
            if ground.is_closed and ground.log_lost >= 0 and not ground.was_cut_off():
                report.damage(path, position, "record", f"{reason}; a queue has a message at {ground.log_lost}")
            else:
                report.note(path, position, "tail", f"bytes behind the end of the log: {reason}")
        times = [item.last_timestamp for item in found if item.last_timestamp is not None]
        judge_checkpoint(ground, max(times, default=None), min((item.least_timestamp for item in found), default=0))
        if ground.state == "not closed":
            behind = sum(item.units_behind for item in found)
            keys = sum(item.keys_behind for item in found)
            if behind or keys:
                report.note(self._paths.abort, 0, "open", f"{behind} messages have no unit yet, {keys} keys no index "
                            "entry; opening derives them")  # fmt: skip
        return VerifyResult(
            report.findings(), state=ground.state, record_count=sum(item.record_count for item in found),
            unit_count=sum(item.unit_count for item in found), entry_count=sum(item.entry_count for item in found),
            size_read=ground.size_read, counts=report.counts)  # fmt: skip


_UNREAD = (("batchconsumequeue", "queues of inner batches"), ("consumequeue_ext", "tags codes in extended queues"),
           ("timerlog", "timers"), ("compaction/compactionLog", "compacted topics"))  # fmt: skip


def _index_names(manifest: Manifest | None, mark: Mark | None) -> set[str]:
    """Names of the index files that there must be."""
    names = set(manifest.index_files) if manifest is not None else set()
    return names | {f"{mark.index_name:017d}"} if mark is not None and mark.index_name else names
