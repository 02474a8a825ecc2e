# SPDX-License-Identifier: Apache-2.0
"""The goals, row by row, and the table that a run makes of them. Every ratio: the anchor's time over ours."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rounds import Taken

PER_SIZE = ("100 B", "1 KiB", "4 KiB")  # of a body
CHECKED = ("I3b", "I11", "I12", "C1", "C1b", "C4", "S1b")  # rows that need no JVM, by thread-CPU time
MARGIN = 0.85  # of R that a check takes for the noise of a shared machine
# Of memory's speed: a check asks for no more, where that was measured. It is the lowest R of C1b.
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Goal:
    """realistic, moonshot: the ratios R and M."""

    row: str
    part: str
    what: str
    realistic: float
    moonshot: float


def _parts(row: str, what: str, parts: tuple[str, ...], realistic: tuple[float, ...],
           moonshot: tuple[float, ...]) -> list[Goal]:  # fmt: skip
    return [Goal(row, part, what, *ratios) for part, *ratios in zip(parts, realistic, moonshot, strict=True)]


GOALS = [
    Goal("I1", "", "put_keys(Arrow), random keys, warm file / putKey", 15, 23),
    Goal("I1b", "", "the same, sequential uniq keys", 9, 13),
    Goal("I2", "", "put_keys(list), random keys, warm file / putKey", 6, 9.5),
    Goal("I3", "", "select_many(Arrow), present, cold / selectPhyOffset", 18, 28),
    Goal("I3b", "", "the same / 7.25 random lines a key", 0.55, 0.9),
    Goal("I4", "", "select_many(Arrow), absent, cold / selectPhyOffset", 20, 34),
    Goal("I5", "", "select_many(list), present, cold / selectPhyOffset", 14, 22),
    *_parts("I6", "with sidecar, sealed file / selectPhyOffset", ("present", "absent"), (35, 50), (55, 80)),
    *_parts("I7", "select, a call each, cold / selectPhyOffset", ("", "with sidecar"), (0.85, 0.85), (2, 2)),
    Goal("I8", "", "put_key, a call each, warm file / putKey", 0.6, 1),
    Goal("I9", "", "select_many(Arrow), 2 threads / 1, wall time", 1.7, 1.95),
    Goal("I10", "", "select_many(Arrow), hot file of 4 MB / selectPhyOffset", 4, 8),
    *_parts("I11", "select_many(list), 2 million keys", ("lmdb get", "numpy expert", "dict get"), (25, 4, 12),
            (45, 7, 25)),
    *_parts("I12", "put_keys(list), 2 million keys, warm pages", ("lmdb put", "sqlite executemany"), (60, 180),
            (110, 330)),
    *_parts("C1", "append(Arrow) with CRC, warm / memcpy_1M", PER_SIZE, (0.6, 0.8, 0.8), (0.8, 1.15, 1.1)),
    *_parts("C1b", "the same without AVX-512", PER_SIZE, (0.55, 0.55, 0.5), (0.65, 0.75, 0.75)),
    *_parts("C2", "append(Arrow), warm / encode and doAppend", PER_SIZE, (4, 2.5, 1.4), (5.5, 3.7, 1.8)),
    *_parts("C3", "append, a call each, warm / encode and doAppend", PER_SIZE, (0.85, 1.2, 0.9), (1.05, 1.5, 1.2)),
    *_parts("C4", "append(list), warm / lmdb putmulti, new file", ("100 B, lmdb", "1 KiB, lmdb", "4 KiB, lmdb"),
            (14,) * 3, (23,) * 3),
    *_parts("C4", "append(list), warm / sqlite executemany", ("100 B, sqlite", "1 KiB, sqlite", "4 KiB, sqlite"),
            (45,) * 3, (75,) * 3),
    *_parts("C5", "messages on disk together / mmap and msync, wall time", ("1", "10", "100", "1000"),
            (1.1, 1.5, 2, 2.5), (1.3, 1.8, 2.7, 3.2)),
    *_parts("C6", "put_many, live, new files / append alone + queue and index alone", PER_SIZE, (0.6,) * 3, (1,) * 3),
    *_parts("S1", "scan, CRC and properties / checkMessageAndReturnSize", PER_SIZE, (6, 5, 3.5), (12, 8, 5)),
    *_parts("S1b", "the same / read bandwidth", PER_SIZE, (0.25, 0.6, 0.75), (0.5, 0.85, 0.95)),
    *_parts("S2", "dispatch to queue and warm index, no CRC / doReput", PER_SIZE, (6, 7, 8), (12, 12, 14)),
    *_parts("S3", "Arrow columns, 1 KiB / read bandwidth", ("views", "copied, CRC"), (0.5, 0.3), (0.8, 0.5)),
    *_parts("S4", "scan, CRC and properties / pure Python", PER_SIZE, (60, 40, 18), (115, 75, 28)),
    Goal("Q1", "", "query_many, no bodies, 10 index files, 5 million messages", 1, 2),
    *_parts("T1", "2 threads / 1, 100 B, wall time", ("scan", "verify"), (1.7, 1.7), (1.95, 1.95)),
    Goal("P1", "", "a method call that does nothing / Python function", 1.25, 1.67),
]  # fmt: skip
ROWS = list(dict.fromkeys(goal.row for goal in GOALS))


@dataclass
class Line:
    """ns per item, medians and the fastest round of each side; the ratio of the medians, that of the worst and the best
    round. memory: what memory alone takes, as a memcpy of as many bytes; 0 where that was not measured."""

    goal: Goal
    why_not: str = ""
    ours: float = 0.0
    anchor: str = ""
    theirs: float = 0.0
    ratio: float = 0.0
    worst: float = 0.0
    best: float = 0.0
    rounds: int = 0
    fastest_ours: float = 0.0
    fastest_theirs: float = 0.0
    memory: float = 0.0
    fastest_memory: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.goal.row} {self.goal.part}".strip()

    @property
    def fastest(self) -> float:
        """The ratio of the fastest rounds: noise only slows. Of a database that grows the first are the fastest."""
        return self.fastest_theirs / self.fastest_ours

    @property
    def is_out_of_reach(self) -> bool:
        """On this machine R asks for more than MEMORY_SHARE of memory's speed."""
        return self.memory > MEMORY_SHARE * self.theirs / self.goal.realistic

    @property
    def share(self) -> float:
        """Of memory's speed, by the medians or by the fastest rounds."""
        return max(self.memory / self.ours, self.fastest_memory / self.fastest_ours)

    @property
    def falls_short(self) -> bool:
        """Below R by more than noise, by the medians and by the fastest rounds.

        Where R is out of reach, MEMORY_SHARE is asked for. A row that did not run does not: it was not checked.
        """
        if self.why_not:
            return False
        if self.is_out_of_reach:
            return self.share < MARGIN * MEMORY_SHARE
        return max(self.ratio, self.fastest) < MARGIN * self.goal.realistic

    @property
    def verdict(self) -> str:
        if self.why_not:
            return f"not run: {self.why_not}"
        if self.ratio < self.goal.realistic:
            return f"BELOW, memory alone takes {self.memory:.0f} ns" if self.is_out_of_reach else "BELOW"
        return "M" if self.ratio >= self.goal.moonshot else "R"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 3 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


@dataclass
class Table:
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)

    def add(self, row: str, part: str, ours: list[float], anchors: Taken, memory: list[float] | None = None) -> Line:
        """Of several anchors the fastest counts."""
        anchor = min(anchors, key=lambda name: statistics.median(anchors[name]))
        goal = next(goal for goal in GOALS if (goal.row, goal.part) == (row, part))
        each = np.array(anchors[anchor]) / np.array(ours)
        mine, theirs = statistics.median(ours), statistics.median(anchors[anchor])
        alone = memory or [0.0]
        line = Line(goal, "", mine, anchor, theirs, theirs / mine, float(each.min()), float(each.max()), len(ours),
                    min(ours), min(anchors[anchor]), statistics.median(alone), min(alone))  # fmt: skip
        self.lines[row, part] = line
        return line

    def skip(self, row: str, why_not: str) -> None:
        """For all parts of a row that are not there yet."""
        for goal in GOALS:
            if goal.row == row:
                self.lines.setdefault((row, goal.part), Line(goal, why_not))

    def short(self) -> list[Line]:
        return [line for line in self.lines.values() if line.falls_short]

    def take_faster(self, again: Table) -> None:
        """Of a row that was measured twice, each side's faster times count: noise slows the anchor too."""
        for place, line in again.lines.items():
            if not line.why_not:
                first = self.lines[place]
                ours, theirs = min(first.ours, line.ours), min(first.theirs, line.theirs)
                self.lines[place] = replace(line, ours=ours, theirs=theirs, ratio=theirs / ours,
                                            fastest_ours=min(first.fastest_ours, line.fastest_ours),
                                            fastest_theirs=min(first.fastest_theirs, line.fastest_theirs),
                                            memory=min(first.memory, line.memory),
                                            fastest_memory=min(first.fastest_memory,
                                                               line.fastest_memory))  # fmt: skip

    def text(self, rows: Collection[str]) -> Iterator[str]:
        """Those rows, as Markdown."""
        yield "| Row | Ours / anchor | Ours, ns | Anchor, ns | | Ratio | Rounds | R | M | Pass |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for line in self.chosen(rows):
            goal = line.goal
            numbers = ["", "", "", "", ""]
            if not line.why_not:
                numbers = [f"{line.ours:.1f}", f"{line.theirs:.1f}", line.anchor, f"**{ratio_text(line.ratio)}**",
                           f"{ratio_text(line.worst)} to {ratio_text(line.best)}"]  # fmt: skip
            goals = [f"{goal.realistic:g}", f"{goal.moonshot:g}"]
            yield f"| {' | '.join([line.name, goal.what, *numbers, *goals, line.verdict])} |"

    def as_json(self, rows: Collection[str]) -> list[dict[str, Any]]:
        return [asdict(line) | {"pass": line.verdict} for line in self.chosen(rows)]

    def chosen(self, rows: Collection[str]) -> list[Line]:
        return [self.lines[goal.row, goal.part] for goal in GOALS if goal.row in rows]
