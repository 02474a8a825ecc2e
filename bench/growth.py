# SPDX-License-Identifier: Apache-2.0
"""How cost grows: python bench/growth.py [--json FILE] [--most KEYS]. Rules: README.md.

put_many by batch size, the index file by its number of keys, a store by its number of segments. Medians, ns of
thread-CPU time; page cache only, files in memory when it has room.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import index_rows
import keyfiles
from machine import machine, versions
from rounds import ROUNDS, WARM, Round, interleaved, timed
from run import with_room
from sample import START

import rmq

BATCHES = (1, 10, 100, 1000, 10_000)  # messages of a put_many
BATCH_MESSAGES = 20_000  # of a round, fewer in batches of one
KEYS = (100_000, 1_000_000, 10_000_000, index_rows.FULL)
ASKED = 50_000  # keys looked up in a round
SEGMENTS = (1, 4, 16)
SEGMENT = 16 * 1024**2
BODY = 1024
Found = dict[str, dict[str, float]]


def messages(count: int, size: int) -> list[rmq.Message]:
    return [rmq.Message("T", b"%-*d" % (size, number), keys=f"key-{number}") for number in range(count)]


def by_batch(place: Path) -> Found:
    """put_many of Message objects of 100 bytes with a key: log, queue and index. A store for each size of batches."""
    rows = messages(BATCH_MESSAGES, 100)
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT * 16, max_hash_slot_num=500_000,
                             max_index_num=2_000_000, flush_interval_commit_log=2**31 - 1)  # fmt: skip
    runs: dict[str, Round] = {}
    with ExitStack() as opened:
        for size in BATCHES:
            store = opened.enter_context(rmq.open(place / str(size), "x", config=config, clock=lambda: START))
            count = min(BATCH_MESSAGES, size * 2000)
            batches = [rows[at : at + size] for at in range(0, count, size)]
            runs[str(size)] = timed(count, put_in_batches(store, batches))
        taken = interleaved(runs)
    for size in BATCHES:
        shutil.rmtree(place / str(size))
    return {size: {"put_many": statistics.median(nanos)} for size, nanos in taken.items()}


def put_in_batches(store: rmq.Store, batches: list[list[rmq.Message]]) -> Callable[[int], Callable[[], None]]:
    def run() -> None:
        for batch in batches:
            store.put_many(batch, results=False)

    return lambda _: run


def by_keys(place: Path, most: int, seed: int) -> Found:
    """An index file of so many random keys: look-ups, each round of other keys, present and absent."""
    found: Found = {}
    wanted = ASKED * (ROUNDS + WARM)
    absent = keyfiles.write(place / "absent", keyfiles.random_lines(wanted, seed + 1))
    for count in (count for count in KEYS if count <= most):
        keys = keyfiles.write(place / "keys", keyfiles.random_lines(count, seed))
        present = keyfiles.sample(keys, place / "present", wanted, seed + 2)
        path = place / "index"
        index_rows.fill(path, keys, count)
        keys.path.unlink()
        with rmq.IndexFile(path) as file:
            taken = interleaved({"present": looked_up(file, present), "absent": looked_up(file, absent)})
        found[str(count)] = {name: statistics.median(nanos) for name, nanos in taken.items()}
        path.unlink()
        present.path.unlink()
    absent.path.unlink()
    return found


def looked_up(file: rmq.IndexFile, keys: keyfiles.KeyFile) -> Round:
    def make(number: int) -> Callable[[], Any]:
        asked = keys.arrow(number * ASKED, ASKED)
        return lambda: file.select_phy_offset_many(asked)

    return timed(ASKED, make)


def by_segments(place: Path) -> Found:
    """A closed store of so many segments of 16 MiB: opening for reading, a query, a scan."""
    found: Found = {}
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, flush_interval_commit_log=2**31 - 1)
    rows = messages(10_000, BODY)
    for segments in SEGMENTS:
        path = place / "segments"
        with rmq.open(path, "x", config=config, clock=lambda: START) as store:
            while store.max_phy_offset < (segments - 1) * SEGMENT + SEGMENT // 2:
                store.put_many(rows[:1000], results=False)
            count = store.topics()["T"][0][1]
        with rmq.open(path) as store:
            taken = interleaved({
                "open": timed(1, lambda _: lambda: rmq.open(path).close()),  # noqa: B023
                "query": timed(100, lambda _, store=store: lambda: [store.query("T", f"key-{number}", limit=1)
                                                                     for number in range(100)]),
                "scan": timed(count, lambda _, store=store: lambda: deque(store.scan(columns=["body"]), 0)),
            })  # fmt: skip
        found[str(segments)] = {name: statistics.median(nanos) for name, nanos in taken.items()}
        shutil.rmtree(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How cost grows with batches, keys, segments.")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--most", type=int, default=index_rows.FULL, help="keys of the largest index file")
    options = parser.parse_args()
    place = with_room(Path(tempfile.gettempdir()))
    about = machine(place.resolve()) | versions() | {"durability": "page cache only", "rounds": str(ROUNDS)}
    with tempfile.TemporaryDirectory(prefix="rmq-growth-", dir=place) as files:
        found = {"batches": by_batch(Path(files)), "keys": by_keys(Path(files), options.most, 1),
                 "segments": by_segments(Path(files))}  # fmt: skip
    print(", ".join(f"{name} {text}" for name, text in about.items()))
    for kind, rows in found.items():
        for size, row in rows.items():
            print(f"{int(size):>12,} {kind:9}", ", ".join(f"{name} {nanos:,.1f} ns" for name, nanos in row.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"about": about, **found}, indent=1))


if __name__ == "__main__":
    main()
