# SPDX-License-Identifier: Apache-2.0
"""The units of a verification's work, and who does them: threads on one site, or tasks that open their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rmq.errors import CorruptFileError
from rmq.lock import lock_holder
from rmq.paths import StorePaths, version_of
from rmq.splits import SPLIT_BYTES
from rmq.verification.findings import Finding, Report, VerifyResult
from rmq.verification.ground import Ground, HeldLog
from rmq.verification.indexes import IndexFiles, PartPlan, PartTimes
from rmq.verification.queues import Name, Queue, QueueFiles, Span
from rmq.verification.records import Range, SegmentReport, check_range

if TYPE_CHECKING:
    from rmq.pool import Runner

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Tell = Callable[[], object]
TICK_S = 0.1
LOOKS = 3  # at a store into which writers come
QUEUE_GROUPS = 64  # so many items of queues at most
# What a task takes over of the ground; the rest it opens, or begins anew.
_CARRIED = ("paths", "config", "state", "mark", "checkpoint", "is_own", "log_limit", "unit_end", "entry_end", "blind",
            "places", "log_end", "tail")  # fmt: skip


def until_quiet(paths: StorePaths, look: Callable[[], VerifyResult]) -> VerifyResult:
    """What a look at a store finds. Looks again when that is anything and a writer came meanwhile, or went; and when a
    file was cut off or removed since it was listed, which the next look tells. Raises what the last look raises.
    """
    left = LOOKS
    while True:
        left -= 1
        before = _signs_of_writers(paths)
        try:
            result = look()
        except (CorruptFileError, FileNotFoundError) as error:
            if not left or not _is_of_store(error, paths):
                raise
        else:
            if not left or result.is_sound or _signs_of_writers(paths) == before:
                return result


def _is_of_store(error: CorruptFileError | FileNotFoundError, paths: StorePaths) -> bool:
    """Whether an error tells of a file of the store: those of a caller's own functions are not for us."""
    name = error.path if isinstance(error, CorruptFileError) else error.filename
    return isinstance(name, str | os.PathLike) and \
        any(Path(name).is_relative_to(place) for place in (paths.root, *paths.commit_logs))  # fmt: skip


def _signs_of_writers(paths: StorePaths) -> list[object]:
    """What differs when one has come or gone; of one that stays nothing but what it derives again."""
    is_open = lock_holder(paths.lock) is not None
    files = [paths.owner, paths.abort, *([paths.manifest] if is_open else [paths.checkpoint, paths.marks])]
    directories = [version_of(str(path)) for path in (paths.consume_queue, paths.index)]
    return [is_open, *(version_of(str(file)) for file in files), *(found and found[0] for found in directories)]


def in_groups(items: list[Item], count: int) -> list[list[Item]]:
    """The items in their order, at most `count` in a group."""
    return [items[first : first + count] for first in range(0, len(items), max(1, count))]


@dataclass(frozen=True)
class Site:
    """A store under verification, its files open."""

    ground: Ground
    queues: QueueFiles
    index: IndexFiles

    def plan(self) -> Plan:
        """What another process needs to go on from here."""
        ground = self.ground
        return Plan({name: getattr(ground, name) for name in _CARRIED}, ground.report.limit,
                    [(segment.path, segment.start) for segment in ground.log.listed.values()], self.queues.is_read,
                    {name: replace(queue, spans=[]) for name, queue in self.queues.queues.items()},
                    self.index.plan())  # fmt: skip

    def close(self) -> None:
        self.index.close()
        self.queues.close()
        self.ground.log.close()


@dataclass(frozen=True)
class Plan:
    """A site as it stands, picklable. ground: fields of Ground; limit: findings that a task keeps."""

    ground: dict[str, Any]
    limit: int
    segments: list[tuple[Path, int]]
    is_read: bool
    queues: dict[Name, Queue]
    parts: list[PartPlan]

    def open(self) -> Site:
        """The same files with a report, a blind list and counts of their own. Raises OSError."""
        facts = self.ground | {"blind": list(self.ground["blind"])}
        log = HeldLog(facts["paths"].commit_logs, facts["config"].mapped_file_size_commit_log)
        log.take([log.segment(path, start) for path, start in self.segments])
        ground = Ground(report=Report(self.limit), log=log, **facts)
        return Site(ground, QueueFiles(ground, is_read=self.is_read, known=self.queues),
                    IndexFiles(ground, is_read=True, known=self.parts))  # fmt: skip


@dataclass(frozen=True)
class Gathered:
    """What work added to the ground of its own site."""

    findings: list[Finding]
    counts: dict[str, int]
    blind: list[tuple[int, int]]
    log_lost: int
    size_read: int

    def add_to(self, ground: Ground) -> None:
        ground.report.merge(self.findings, self.counts)
        for begin, end in self.blind:
            ground.add_blind(begin, end)
        ground.log_lost = max(ground.log_lost, self.log_lost)
        ground.read(self.size_read)


# ---- units of work -------------------------------------------------------------------------------


def judge_part(site: Site, path: Path) -> tuple[Path, PartTimes | None]:
    """One index file by itself: what the segments' passes need of it, None when it was cleaned away."""
    numbers = [number for number, part in enumerate(site.index.parts) if part.path == path]
    return path, site.index.judge(numbers[0]) if numbers else None


def check_ranges(site: Site, ranges: list[Range]) -> list[SegmentReport]:
    """Segments of the log or pieces of them, each with its units and index entries."""
    return [check_range(site.ground, *found, site.queues, site.index) for found in ranges]


def judge_queues(site: Site, spans: dict[Name, list[Span]]) -> None:
    """Queues, once the whole log was read: what records said of them."""
    for name, known in spans.items():
        site.queues.queues[name].spans = known
        site.queues.judge(name)


# ---- who does it ---------------------------------------------------------------------------------


class Crew(Protocol):
    """Does a unit of work for each item. group_bytes: of the log that make an item, whole segments. count: how many
    share one open site, for whom the last segments are cut into pieces.
    """

    group_bytes: int
    count: int

    def each(self, site: Site, work: Callable[[Site, Item], Answer], items: Sequence[Item]) -> Iterator[Answer]: ...

    def close(self) -> None: ...


class Threads:
    """Several threads on the site itself; answers in the order in which they come, a tick now and then."""

    group_bytes = 0

    def __init__(self, count: int, tick: Callable[[], object]) -> None:
        self.count = count
        self._tick = tick
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="rmq-verify")

    def each(self, site: Site, work: Callable[[Site, Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        left = iter(items)
        running: set[Future[Answer]] = set()
        while True:
            while len(running) < self.count * 2 and (item := next(left, _NOTHING)) is not _NOTHING:
                running.add(self._pool.submit(work, site, item))  # type: ignore[arg-type]
            if not running:
                return
            done, running = wait(running, TICK_S, FIRST_COMPLETED)
            self._tick()
            for future in done:
                yield future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_NOTHING = object()


class Tasks:
    """Tasks of a Runner, in other processes; what they found is added here."""

    group_bytes = SPLIT_BYTES
    count = 1

    def __init__(self, run: Runner, tick: Callable[[], object]) -> None:
        self._run = run
        self._tick = tick

    def each(self, site: Site, work: Callable[[Site, Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        for answer, gathered in self._run(_Elsewhere(site.plan(), work), items):
            gathered.add_to(site.ground)
            self._tick()
            yield answer

    def close(self) -> None:
        """Nothing of it is here."""


@dataclass(frozen=True)
class _Elsewhere(Generic[Item, Answer]):
    plan: Plan
    work: Callable[[Site, Item], Answer]

    def __call__(self, item: Item) -> tuple[Answer, Gathered]:
        site = self.plan.open()
        try:
            answer = self.work(site, item)
            ground = site.ground
            known = set(self.plan.ground["blind"])
            return answer, Gathered(ground.report.kept(), ground.report.counts,
                                    [found for found in ground.blind if found not in known], ground.log_lost,
                                    ground.size_read)  # fmt: skip
        finally:
            site.close()
