# SPDX-License-Identifier: Apache-2.0
"""Ours against its peers in interleaved rounds, and the table of ratios that ends a run. Rules: README.md."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 7
NEW_FILES = "page cache only, new files"
WARM_PAGES = "page cache only, warm pages"
EACH = "flush each put"
SYNCED = "everything synced"
READS = "reads, page cache warm"
MEMORY = "memory only"

# Which clock a test is measured by; a test carries one of these marks.
CPU = pytest.mark.benchmark(timer=time.thread_time, disable_gc=True)
ALL_CPU = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
WALL = pytest.mark.benchmark(timer=time.perf_counter, disable_gc=True)
CLOCKS = {time.thread_time: "thread CPU time", time.process_time: "CPU time of all threads",
          time.perf_counter: "wall time"}  # fmt: skip

Call = Callable[[], Any]


@dataclass(frozen=True)
class Goal:
    """Times faster than the peer; `name`: row of the goals table, or "first" for the first measurements."""

    name: str
    at_least: float


@dataclass(frozen=True)
class Peer:
    """`make`, untimed, gives the call that is timed. `needs`: the package without which nothing is measured."""

    name: str
    make: Callable[[], Call]
    goals: tuple[Goal, ...] = ()
    needs: str = ""

    @property
    def is_missing(self) -> bool:
        return bool(self.needs) and find_spec(self.needs) is None


@dataclass
class Row:
    """One line of the report: ns per item, the ratio of the medians, and that of the worst round."""

    name: str
    mode: str
    clock: str
    ours: float
    peer: str = ""
    theirs: float = 0.0
    ratio: float = 0.0
    worst: float = 0.0
    goals: tuple[Goal, ...] = ()
    missing: str = ""


@dataclass
class Report:
    place: Path = Path()  # where the files of the run lie
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        width = max((len(row.name) for row in self.rows), default=0)
        peer = max((len(row.peer) for row in self.rows), default=0)
        yield f"{'ns per item, medians':{width}} {'ours':>12}  {'peer':{peer}} {'':>12} {'ratio':>8} {'worst':>8}  goal"
        mode = ""
        for row in sorted(self.rows, key=lambda row: (row.mode, row.clock)):
            if mode != (mode := f"{row.mode}; {row.clock}"):
                yield f"--- {mode}"
            ours = f"{row.name:{width}} {row.ours:12,.1f}  "
            if row.missing:
                yield f"{ours}{row.peer:{peer}} not measured: {row.missing} missing (pip install -e '.[bench]')"
            elif row.peer:
                met = [f"{goal.name} >= {goal.at_least:g} {'met' if row.ratio >= goal.at_least else 'BELOW'}"
                       for goal in row.goals]  # fmt: skip
                yield (f"{ours}{row.peer:{peer}} {row.theirs:12,.1f} {row.ratio:7.2f}x {row.worst:7.2f}x  "
                       f"{', '.join(met)}").rstrip()  # fmt: skip
            else:
                yield f"{ours}no peer"
        yield from self.notes


REPORT = pytest.StashKey[Report]()


def spread(seconds: list[float], items: int) -> dict[str, float]:
    """ns per item of the rounds."""
    nanos = np.array(seconds) / items * 1e9
    return {"median": round(float(np.median(nanos)), 2), "p99": round(float(np.percentile(nanos, 99)), 2),
            "worst": round(float(nanos.max()), 2)}  # fmt: skip


class Measure:
    """What the fixture `measure` gives: call it once in a test, with answers compared before."""

    def __init__(self, benchmark: BenchmarkFixture, report: Report, clock: Callable[[], float]) -> None:
        self._benchmark = benchmark
        self._report = report
        self._clock = clock

    def __call__(self, items: int, mode: str, ours: Callable[[], Call], *peers: Peer, rounds: int = ROUNDS,
                 warm: int = 1) -> None:  # fmt: skip
        """Time `ours`; each round has first the peers, then ours, so that all meet the same machine.

        ours: makes, untimed, the call that is timed. warm: rounds before the first that counts.
        """
        if self._clock is time.perf_counter:
            os.sync()  # what other tests wrote is not to go to disk while this one waits for the disk
        present = [peer for peer in peers if not peer.is_missing]
        times: dict[str, list[float]] = {peer.name: [] for peer in present}

        def setup() -> tuple[tuple[Call], dict[str, Any]]:
            for peer in present:
                times[peer.name].append(self._timed(peer.make()))
            return (ours(),), {}

        for _ in range(warm):
            (call,), _ = setup()
            call()
        for taken in times.values():
            taken.clear()
        self._benchmark.pedantic(lambda call: call(), setup=setup, rounds=rounds)
        self._note(items, mode, peers, times)

    def _timed(self, call: Call) -> float:
        gc.disable()
        begin = self._clock()
        call()
        taken = self._clock() - begin
        gc.enable()
        return taken

    def _note(self, items: int, mode: str, peers: tuple[Peer, ...], times: dict[str, list[float]]) -> None:
        stats = self._benchmark.stats
        if stats is None:  # --benchmark-disable
            return
        own = list(stats.stats.data)
        clock = CLOCKS[self._clock]
        name = self._benchmark.name.removeprefix("test_")
        row = Row(name, mode, clock, statistics.median(own) / items * 1e9)
        info: dict[str, Any] = {"items": items, "durability": mode, "clock": clock, "ns_per_item": spread(own, items),
                                "peers": {}}  # fmt: skip
        for peer in peers:
            goals = {goal.name: goal.at_least for goal in peer.goals}
            if peer.is_missing:
                self._report.rows.append(Row(row.name, mode, clock, row.ours, peer.name, missing=peer.needs))
                info["peers"][peer.name] = {"not_measured": f"{peer.needs} missing", "goals": goals}
                continue
            taken = times[peer.name]
            ratio = statistics.median(taken) / statistics.median(own)
            worst = min(theirs / mine for theirs, mine in zip(taken, own, strict=True))
            self._report.rows.append(Row(row.name, mode, clock, row.ours, peer.name,
                                         statistics.median(taken) / items * 1e9, ratio, worst, peer.goals))  # fmt: skip
            info["peers"][peer.name] = {"ns_per_item": spread(taken, items), "ratio": round(ratio, 2),
                                        "ratio_of_worst_round": round(worst, 2), "goals": goals}  # fmt: skip
        if not peers:
            self._report.rows.append(row)
        self._benchmark.extra_info |= info
