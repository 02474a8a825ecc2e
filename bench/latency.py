# SPDX-License-Identifier: Apache-2.0
"""How long one put takes, of millions: p50, p99, p99.9, the worst, and what went on during the slowest.

    python bench/latency.py [--puts 10000000] [--sync-puts 20000] [--disk /tmp] [--json build/latency.json]

100 B bodies, one key, one thread, wall time, on a disk; segments of 256 MiB. What may hold up a put is timed where it
happens, so that a slow put can be named by what lies in its span.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import machine
from records import CONFIG, TOPIC

import rmq
import rmq.mappedfile
from rmq.dispatch import Dispatcher
from rmq.flushing import Flusher
from rmq.index import Index
from rmq.logsegment import FollowingSegment, Segment

BODY = b"b" * 100
WORST = 10
QUEUES = 4
# Where a put may be held up: what it is called, and the function.
PLACES: list[tuple[str, Any, str]] = [
    ("roll-over", FollowingSegment, "append_to"),
    ("segment made", Segment, "create"),
    ("blocks reserved", rmq.mappedfile, "allocate"),
    ("zeros written", rmq.mappedfile.MappedFile, "fill"),
    ("dispatch", Dispatcher, "advance"),
    ("index file made", Index, "_create"),
    ("flush", Flusher, "flush"),
    ("sync", rmq.mappedfile.MappedFile, "sync"),
]


@dataclass
class Spans:
    """What went on when: name, begin and end in ns."""

    found: list[tuple[str, int, int]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in PLACES if hasattr(owner, name)]
        for what, owner, name in PLACES:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(what, getattr(owner, name)))
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*arguments, **options)
            finally:
                self.found.append((what, begin, time.perf_counter_ns()))

        return wrapper

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_begin = time.perf_counter_ns()
        else:
            self.found.append((f"gc {info['generation']}", self._gc_begin, time.perf_counter_ns()))

    def during(self, begin: int, end: int) -> str:
        """What overlaps, longest first, with the ms of it that lie in the span."""
        parts: dict[str, int] = {}
        for what, start, stop in self.found:
            inside = min(stop, end) - max(start, begin)
            if inside > 0:
                parts[what] = parts.get(what, 0) + inside
        named = sorted(parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{what} {nanos / 1e6:.2f} ms" for what, nanos in named) or "none of these"


def measured(name: str, puts: int, flush: str, folder: Path) -> dict[str, Any]:
    """Put, each timed; the line of the table and the slow puts."""
    config = dataclasses.replace(CONFIG, flush_disk_type=flush, flush_interval_commit_log=500)
    spans = Spans()
    begins, taken, rolls = array("q", bytes(8 * puts)), array("q", bytes(8 * puts)), []
    messages = [rmq.Message(TOPIC, BODY, keys=[f"key{i:08d}"], queue_id=i % QUEUES) for i in range(10_000)]
    clock, last = time.perf_counter_ns, 0
    with spans.watched(), rmq.open(folder / name, "x", config=config) as store:
        for i in range(puts):
            message = messages[i % 10_000]
            begin = clock()
            result = store.put(message)
            taken[i] = clock() - begin
            begins[i] = begin
            if result.phy_offset // config.mapped_file_size_commit_log != last:
                last += 1
                rolls.append(i)
    nanos = np.frombuffer(taken, np.int64)
    slow = [int(i) for i in np.argsort(nanos)[: -WORST - 1 : -1]]

    def told(i: int) -> dict[str, Any]:
        return {"put": i, "us": taken[i] / 1e3, "during": spans.during(begins[i], begins[i] + taken[i])}

    return {"name": name, "puts": puts, **quantiles(nanos), "mean_us": float(nanos.mean()) / 1e3,
            "roll_overs": [told(i) for i in rolls], "worst": [told(i) for i in slow]}  # fmt: skip


def quantiles(nanos: npt.NDArray[np.int64]) -> dict[str, float]:
    points = {"p50_us": 50, "p99_us": 99, "p99_9_us": 99.9, "worst_us": 100}
    return {name: float(np.percentile(nanos, at)) / 1e3 for name, at in points.items()}


def text(found: dict[str, Any]) -> Iterator[str]:
    yield (f"| {found['name']} | {found['puts']:,} | {found['mean_us']:.1f} | {found['p50_us']:.1f} | "
           f"{found['p99_us']:.1f} | {found['p99_9_us']:.1f} | {found['worst_us']:,.0f} |")  # fmt: skip


def spikes(found: dict[str, Any]) -> Iterator[str]:
    for kind in ("roll_overs", "worst"):
        yield f"{found['name']}, {kind.replace('_', '-')}:"
        yield from (f"  put {one['put']:,}: {one['us']:,.0f} us ({one['during']})" for one in found[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--puts", type=int, default=10_000_000, help="ASYNC_FLUSH")
    parser.add_argument("--sync-puts", type=int, default=20_000, help="SYNC_FLUSH")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=Path("build/latency.json"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rmq-latency-", dir=options.disk))
    try:
        about = machine(folder)
        found = [measured(flush, puts, flush, folder) for flush, puts in (("ASYNC_FLUSH", options.puts),
                                                                          ("SYNC_FLUSH", options.sync_puts)) if puts]
    finally:
        shutil.rmtree(folder)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print("| Mode | Puts | Mean, us | p50 | p99 | p99.9 | Worst |\n|---|---|---|---|---|---|---|")
    for one in found:
        print(*text(one), sep="\n")
    for one in found:
        print("", *spikes(one), sep="\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "modes": found}, indent=1))


if __name__ == "__main__":
    main()
