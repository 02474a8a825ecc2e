"""Fuzz the parsers and whole stores: tests/fuzz/run.py --executions 10000000 --stores 10000 --seed 1 --jobs 2

`tools/fuzz.sh` runs this on a build with ASan, UBSan and coverage; on an ordinary build inputs are only mutated.
A worker process that dies, hangs or finds something leaves the input under --findings; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from engine import Coverage, Finding, Loop, Scratch  # noqa: E402
from stores import StoreLoop, replay_store  # noqa: E402
from targets import TARGETS  # noqa: E402

HANG_S = 30  # one input, sanitized, on a busy machine
ADDRESS_SPACE = 4 * 1024**3  # of a worker without ASan, whose shadow is larger than any limit
RESTARTS = 20
SLICE_S = 0.2  # of one parser, then the next: each has as much time, whatever an input costs it


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, help="inputs for the parsers, all together")
    parser.add_argument("--stores", type=int, help="damaged store directories")
    parser.add_argument("--seconds", type=float, help="stop then; without the two above two thirds go to the parsers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--target", action="append", help="these parsers only, or: store")
    parser.add_argument("--compare-every", type=int, default=32, help="compare every Nth input with tests/oracle.py")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz-findings"))
    parser.add_argument("--replay", type=Path, help="run the one input of a finding (--target NAME), in this process")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


# ---- worker ------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One job: parsers in turn, then stores. What it found is saved at once."""
    coverage = Coverage()
    if not coverage.is_there:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    scratch = Scratch(options.worker)
    wanted = [target for target in TARGETS if not options.target or target.name in options.target]
    loops = [Loop(target, number, coverage, scratch, Random(f"{options.seed} {target.name}"), options.compare_every)
             for number, target in enumerate(TARGETS) if target in wanted]  # fmt: skip
    start = time.monotonic()
    seconds = float("inf") if options.seconds is None else options.seconds
    shares = options.executions is None and options.stores is None and not options.target
    parsers_until = start + (seconds * 2 / 3 if shares else seconds)
    findings: list[Finding] = []
    if loops and (options.executions is not None or options.stores is None):
        for loop in loops:
            loop.seed()
        limit = float("inf") if options.executions is None else options.executions
        while (left := limit - sum(loop.executions for loop in loops)) > 0 and time.monotonic() < parsers_until:
            for loop in loops:
                loop.run(left / len(loops), min(time.monotonic() + SLICE_S, parsers_until))
                for finding in loop.findings.values():
                    finding.save(options.findings)  # a later input may end the process
    for loop in loops:
        findings += loop.findings.values()
    report = {loop.target.name: [loop.executions, len(loop.corpus)] for loop in loops if loop.executions}
    report["edges"] = [coverage.edges, 0]
    report["guided"] = [int(coverage.is_there), 0]
    if (options.stores is not None or options.executions is None) and (not options.target or "store" in options.target):
        stores = StoreLoop(scratch, len(TARGETS), Random(f"{options.seed} store"))
        coverage.begin()
        stores.run(options.stores, start + seconds)
        coverage.end()
        findings += stores.findings.values()
        report["store"] = [stores.executions, stores.opened]
        report["all edges"] = [coverage.edges, 0]
    for finding in findings:
        print(f"FOUND {finding.save(options.findings)}\n{finding.what}", file=sys.stderr)
    return report | {"findings": [len(findings), 0]}


# ---- parent ------------------------------------------------------------------------------------------------


class Job:
    """A worker and the file in which it says what it does."""

    def __init__(self, options: argparse.Namespace, number: int, words: list[str], folder: Path) -> None:
        self.options, self.number, self.words = options, number, words
        self.scratch_path = folder / f"scratch{number}"
        self.scratch = Scratch(self.scratch_path)
        self.output = folder / f"output{number}"
        self.folder = folder
        self.found: set[Path] = set()
        self.report: dict[str, Any] | None = None
        self.start(options.seed * 1000 + number)

    def start(self, seed: int) -> None:
        command = [sys.executable, str(FOLDER / "run.py"), *self.words, "--seed", str(seed), "--worker",
                   str(self.scratch_path)]  # fmt: skip
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, env={**os.environ, "TMPDIR": str(self.folder)})
        self.seed, self.begun, self.since = seed, -1, time.monotonic()

    def look(self) -> bool:
        """Whether it goes on. A dead or hanging worker leaves its input and, a few times, is started anew."""
        code = self.process.poll()
        begun, target, data = self.scratch.said()
        if code is None:
            if begun != self.begun:
                self.begun, self.since = begun, time.monotonic()
            elif time.monotonic() - self.since > HANG_S and begun:
                self.process.send_signal(signal.SIGABRT)
                self.process.wait()
                return self.died(target, data, f"no end after {HANG_S} s")
            return True
        if code == 0:
            self.report = json.loads(self.output.read_bytes().splitlines()[-1])
            return False
        return self.died(target, data, f"the process ended with {code}")

    def died(self, target: int, data: bytes, what: str) -> bool:
        """Keep the input; go on with another seed, unless the same input did it before."""
        name = TARGETS[target].name if target < len(TARGETS) else "store"
        path = Finding(name, data, what).save(self.options.findings)
        print(f"FOUND {path}: {what}", file=sys.stderr)
        if path in self.found or len(self.found) == RESTARTS:
            return False
        self.found.add(path)
        self.start(self.seed + 100_000)
        return True


def without(words: list[str], *names: str) -> list[str]:
    """The words less some options that have a value."""
    kept, skip = [], False
    for word in words:
        if not skip and word not in names and not word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
        skip = not skip and word in names
    return kept


def main() -> int:
    options = arguments()
    if options.replay is not None:
        name, data = (options.target or [options.replay.name.split("-")[0]])[0], options.replay.read_bytes()
        if name == "store":
            replay_store(data)
            return 0
        target = next(target for target in TARGETS if target.name == name)
        target.run(data)
        if target.compare is not None:
            target.compare(data)
        return 0
    if options.worker is not None:
        print(json.dumps(work(options)))
        return 0
    words = without(sys.argv[1:], "--seed", "--jobs", "--executions", "--stores")
    for name in ("executions", "stores"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(-(-getattr(options, name) // options.jobs))]
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rmq-fuzz-", dir=place) as folder:
        jobs = [Job(options, number, words, Path(folder)) for number in range(options.jobs)]
        running = jobs
        while running:
            time.sleep(0.2)
            running = [job for job in running if job.look()]
    return tell(jobs, time.monotonic() - start)


def tell(jobs: list[Job], seconds: float) -> int:
    found = sum(len(job.found) for job in jobs)
    total: dict[str, list[int]] = {}
    for job in jobs:
        for name, (first, second) in (job.report or {}).items():
            held = total.setdefault(name, [0, 0])
            is_most = "edges" in name  # jobs reach the same ones
            total[name] = [max(held[0], first) if is_most else held[0] + first, held[1] + second]
    found += total.pop("findings", [0, 0])[0]
    edges, all_edges = total.pop("edges", [0, 0])[0], total.pop("all edges", [0, 0])[0]
    stores, is_guided = total.pop("store", [0, 0]), total.pop("guided", [0, 0])[0]
    for name, (executions, kept) in total.items():
        print(f"{name:12} {executions:>11,} inputs {kept:>7,} kept")
    executions = sum(count for count, _ in total.values())
    print(f"{executions:,} inputs for {len(total)} parsers, "
          f"{stores[0]:,} damaged stores ({stores[1]:,} opened to write), "
          f"{max(edges, all_edges):,} edges ({edges:,} by the parsers), {seconds:.0f} s, {found} findings")  # fmt: skip
    print("sanitized and guided by coverage" if is_guided else "NOT sanitized, not guided: an ordinary build")
    dead = [job for job in jobs if job.report is None]
    return 1 if found or dead or not executions + stores[0] else 0


if __name__ == "__main__":
    sys.exit(main())
