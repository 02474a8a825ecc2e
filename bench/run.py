# SPDX-License-Identifier: Apache-2.0
"""The table of goals: python bench/run.py [--quick | --check] [--rows I1,S1] [--place DIR] [--disk DIR].

Every row is timed beside its anchor in the same run. A row whose anchor cannot run is printed as not run.
--check ends with 1 when a row stays below R by more than noise, measured five times. Rules: README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import index_rows
import live_rows
import log_rows
import peer_rows
import query_rows
import scan_rows
from anchor import RELEASE, RocketMQ
from compiled import MODULES, compiled
from goals import CHECKED, MARGIN, ROWS, ratio_text
from machine import file_system, machine, versions
from records import SEGMENT
from rounds import QUICK_ROUNDS, QUICK_WARM, ROUNDS, WARM
from setting import Setting

from rmq._core._record import CPU_LEVEL

ROOM = 5 * 1024**3  # bytes that the files of a run take at most
MEMORY = Path("/dev/shm")
AGAIN = 4  # times that rows of a check which fall short are measured again
NOT_WRITTEN = "no benchmark yet"
CRC_512 = ("C1", "S1b")  # set on 512-bit instructions; a check elsewhere leaves them out
# Those that read come first: what others write keeps the disk busy for a long time, and memory with it.
GROUPS: list[Callable[[Setting], None]] = [index_rows.select_rows, scan_rows.scan_rows, query_rows.query_row,
                                           query_rows.thread_row, index_rows.put_rows, peer_rows.index_rows,
                                           peer_rows.call_row, log_rows.append_rows, log_rows.disk_row,
                                           live_rows.live_rows]  # fmt: skip


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the rows of goals.py beside their anchors.")
    parser.add_argument("--quick", action="store_true", help="no JVM, fewer rounds")
    parser.add_argument("--check", action="store_true", help=f"quick, and an error below {MARGIN} of R")
    parser.add_argument("--rows", help=f"some rows, with commas between; all, of a check {','.join(CHECKED)}")
    parser.add_argument("--place", type=Path, help=f"where C1 to C4, C6 and S2 write; {MEMORY} when it has room")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where all other files lie")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the run there too")
    options = parser.parse_args(arguments)
    options.quick |= options.check
    options.rows = tuple(options.rows.split(",")) if options.rows else CHECKED if options.check else tuple(ROWS)
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return options


def available_memory() -> int:
    """Bytes that can be taken without swapping, by what the kernel thinks."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def place_of(wanted: Path | None) -> Path:
    # Files in memory take memory, and JVMs and keys want some beside them, whatever the file system says is free.
    if wanted is None and MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, available_memory()) >= 2 * ROOM:
        wanted = MEMORY
    return with_room(wanted or Path(tempfile.gettempdir()))


def with_room(place: Path) -> Path:
    if shutil.disk_usage(place).free < ROOM:
        raise SystemExit(f"{place}: {ROOM >> 30} GiB must be free")
    return place


def run(options: argparse.Namespace, rows: tuple[str, ...], place: Path) -> Setting:
    """One measurement of each row, with files of its own."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=place) as files, \
            tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=options.disk) as synced, \
            RocketMQ(Path(files), wanted=not options.quick) as rocketmq:  # fmt: skip
        setting = Setting(rows, Path(files), Path(synced), options.seed, options.quick, rocketmq,
                          compiled("floors", MODULES))  # fmt: skip
        if options.check and CPU_LEVEL != "vpclmul512":
            setting.rows = tuple(row for row in rows if row not in CRC_512)
            for row in CRC_512:
                setting.table.skip(row, f"its goal is that of 512-bit instructions, here it is {CPU_LEVEL}")
        index_rows.gate(setting)
        for group in GROUPS:
            group(setting)
    for row in ROWS:
        setting.table.skip(row, NOT_WRITTEN)
    return setting


def checked(options: argparse.Namespace, place: Path) -> Setting:
    """A run, and of a check the rows that fall short up to AGAIN times more."""
    setting = run(options, options.rows, place)
    for _ in range(AGAIN if options.check else 0):
        rows = tuple(dict.fromkeys(line.goal.row for line in setting.table.short()))
        if rows:
            print(f"once more: {', '.join(rows)}", flush=True)
            setting.table.take_faster(run(options, rows, place).table)
    return setting


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # gigabytes of files are removed first
    place, disk = place_of(options.place), with_room(options.disk)
    rounds = (QUICK_ROUNDS, QUICK_WARM) if options.quick else (ROUNDS, WARM)
    about = machine(place.resolve()) | versions() | {
        "file_system": f"{file_system(disk.resolve())}, what C1 to C4, C6 and S2 write {file_system(place.resolve())}",
        "rocketmq": RELEASE, "seed": str(options.seed), "rounds": "{} after {}".format(*rounds),
        "sizes": f"index {index_rows.FULL:,} entries, segment {SEGMENT >> 20} MiB, S1 to S4 {scan_rows.SEGMENT >> 20}",
        "durability": "page cache only, C5 flushes each put"}  # fmt: skip
    setting = checked(options, place)
    about["load_after"] = f"{os.getloadavg()[0]:.1f}"
    lines = [", ".join(f"{name} {text}" for name, text in about.items()), "", *setting.notes, "",
             *setting.table.text(options.rows)]  # fmt: skip
    print("\n" + "\n".join(lines))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"about": about, "notes": setting.notes, "rows": setting.table.as_json(options.rows)}
        options.json.write_text(json.dumps(found, indent=1))
    if options.check and (short := setting.table.short()):
        told = [f"{line.name} {ratio_text(line.ratio)}, fastest rounds {ratio_text(line.fastest)} < {MARGIN} of "
                f"{line.goal.realistic:g}" for line in short]  # fmt: skip
        sys.exit(f"below R by more than noise: {'; '.join(told)}")


if __name__ == "__main__":
    main(sys.argv[1:])
