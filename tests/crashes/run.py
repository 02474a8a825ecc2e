"""Draw crash states of a store and judge them: python tests/crashes/run.py --states 100000 --jobs 2 --seed 7"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS)]
sys.path.append(str(TESTS.parent))  # an installed rmq comes first

from crashes.judge import Violation, judge  # noqa: E402
from crashes.states import State, draw  # noqa: E402
from crashes.workloads import STORE, WORKLOADS, Recording, record  # noqa: E402

STATES_EACH = 60  # of one recording


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    place = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="rmq-crash-", dir=place if os.access(place, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def drawn(recording: Recording, name: str, seed: int, number: int) -> State:
    """State `number` of a recording."""
    return draw(recording.recorder.events, recording.recorder.begin, random.Random(f"{name}:{seed}:{number}"))


def judged(recording: Recording, name: str, seed: int, number: int, folder: Path) -> tuple[str, int]:
    """("", messages changed unseen) or what is wrong, of one state."""
    image = folder / f"image{number}"
    try:
        state = drawn(recording, name, seed, number)
        state.write(image)
        return "", judge(image / STORE, state, recording, f"{name}:{seed}:{number}")
    except Violation as error:
        return str(error), 0
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {where.filename}:{where.lineno}: {error}", 0
    finally:
        shutil.rmtree(image, ignore_errors=True)


def judge_some(task: tuple[str, int, int]) -> tuple[int, int, list[tuple[str, str]]]:
    """States 0 to count-1 of a workload: how many, messages changed unseen, [(reproducer, what is wrong)]."""
    name, seed, count = task
    logging.getLogger("rmq").setLevel(logging.CRITICAL)
    failures, unseen = [], 0
    with scratch() as folder:
        (folder / "live").mkdir()
        try:
            recording = record(name, seed, folder / "live")
        except Exception as error:
            return 0, 0, [(f"{name}:{seed}:0", f"recording: {type(error).__name__}: {error}")]
        for number in range(count):
            wrong, changed = judged(recording, name, seed, number, folder)
            unseen += changed
            if wrong:
                failures.append((f"{name}:{seed}:{number}", wrong))
    return count, unseen, failures


def tasks(states: int, seed: int, names: list[str]) -> Iterator[tuple[str, int, int]]:
    rng, left, turn = random.Random(seed), states, 0
    while left > 0:
        count = min(STATES_EACH, left, max(1, states // (2 * len(names))))
        yield names[turn % len(names)], rng.randrange(10**6), count
        left -= count
        turn += 1


def show(only: str) -> int:
    """One state in full: its story, then the judgement."""
    name, seed, number = only.split(":")
    with scratch() as folder:
        (folder / "live").mkdir()
        recording = record(name, int(seed), folder / "live")
        state = drawn(recording, name, int(seed), int(number))
        print(recording.geometry)
        print(f"power lost after event {state.moment} of {len(recording.recorder.events)}, messages put {state.begun}, "
              f"on disk for sure {state.safe}")  # fmt: skip
        print("not or partly on disk:", *state.story)
        for event in recording.recorder.events[max(0, state.moment - 12) : state.moment]:
            print("   ", event.kind, event.file, event.place, event.value if event.kind != "data" else "")
        state.write(folder / "image")
        print("unseen:", judge(folder / "image" / STORE, state, recording, only))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=3000, help="how many (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("RMQ_CRASH_SEED") or random.randrange(10**6)),
                        help="random, or RMQ_CRASH_SEED")  # fmt: skip
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="these only")
    parser.add_argument("--only", metavar="WORKLOAD:SEED:STATE", help="one state, with its story")
    parser.add_argument("--failures", type=int, default=20, help="stop at so many (%(default)s)")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # files are synced in the order of sets
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    if arguments.only:
        return show(arguments.only)
    begin, done, unseen, failures = time.monotonic(), 0, 0, 0
    kinds: Counter[str] = Counter()
    print(f"seed {arguments.seed}", flush=True)
    with multiprocessing.Pool(arguments.jobs) as pool:
        for count, changed, wrong in pool.imap_unordered(
                judge_some, tasks(arguments.states, arguments.seed, arguments.workload or [*WORKLOADS])):  # fmt: skip
            done, unseen, failures = done + count, unseen + changed, failures + len(wrong)
            for reproducer, text in wrong:
                kinds[text[:40]] += 1
                if kinds[text[:40]] <= 3:
                    print(f"FAILED --only {reproducer}\n    {text[:1000]}", flush=True)
            if failures >= arguments.failures:
                pool.terminate()
                break
    seconds = time.monotonic() - begin
    print(f"{done} states in {seconds:.1f} s, {done / seconds:.1f} each second, {failures} failures; "
          f"{unseen} messages never acknowledged, of stores without a CRC property, changed unseen; "
          f"seed {arguments.seed}")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
