# SPDX-License-Identifier: Apache-2.0
"""Whole-store jobs by size of the store and number of processes: python bench/jobs.py [--gib 1 2 4 8] [--spark].

Wall time of a job in a process of its own, which is what several cores are for; the largest sum of anonymous memory of
its processes at any moment, mapped files not counted. Stores: 200 B bodies, one key and a tag, four queues, segments of
1 GiB; on a disk, read once before, so that what memory can cache is cached. Rules: README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import machine
from sample import SEED, START, TOPIC

import rmq

GIB = 2**30
BODY, ROWS, QUEUES = 200, 65536, 4
SAMPLE_S = 0.05
LOCAL = ("scan_map", "verify", "rebuild", "export")
SPARK = ("read", "scan_map", "verify", "rebuild", "export")


# ---- stores ----


def batches() -> Iterator[pa.RecordBatch]:
    """Messages without end."""
    source = np.random.default_rng(SEED)
    ends = pa.py_buffer(np.arange(ROWS + 1, dtype=np.int32) * BODY)
    queues = pa.array(np.arange(ROWS) % QUEUES, pa.int32())
    filling = pa.py_buffer(source.integers(97, 123, ROWS * BODY, np.uint8))
    body = pa.Array.from_buffers(pa.binary(), ROWS, [None, ends, filling])
    first = 0
    while True:
        keys = pa.array(np.char.mod("order-%012d", np.arange(first, first + ROWS)))
        yield pa.record_batch({"body": body, "keys": keys, "queue_id": queues, "tags": ["paid"] * ROWS})
        first += ROWS


def make(path: Path, size: int) -> int:
    """A closed store whose log has at least `size` bytes; returns its messages."""
    config = rmq.StoreConfig(flush_interval_commit_log=2**31 - 1)
    count = 0
    with rmq.open(path, "x", config=config, clock=lambda: START + count // 1000) as store:
        for batch in batches():
            if store.max_phy_offset >= size:
                break
            count += store.put_many(batch, topic=TOPIC, results=False)
    return count


# ---- jobs, each in a process of its own ----


def measured(batches: Iterator[pa.RecordBatch]) -> tuple[int, int]:
    """What a user's function may be: messages, and bytes of bodies."""
    rows = size = 0
    for batch in batches:
        rows += len(batch)
        size += batch.column("body").nbytes
    return rows, size


def measured_batch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows, size = measured(batches)
    yield pa.RecordBatch.from_pydict({"rows": [rows], "size": [size]})


def run_local(job: str, store: Path, target: Path, processes: int) -> int:
    if job == "scan_map":
        return sum(rows for rows, _ in rmq.scan_map(store, measured, processes=processes, columns=["body"]))
    if job == "verify":
        return rmq.verify(store, jobs=processes).record_count
    if job == "rebuild":
        return rmq.rebuild(store, target, processes=processes).unit_count
    return int(rmq.export(store, target, processes=processes).row_count)


def run_spark(job: str, store: Path, target: Path, processes: int) -> int:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
                   "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    from jobs import measured_batch  # of a module, which executors find too
    from pyspark.sql import SparkSession

    import rmq.spark

    spark = SparkSession.builder.master(f"local[{processes}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.range(10).mapInArrow(lambda parts: parts, "id bigint").collect()
    started = time.monotonic()
    path = str(store)
    if job == "read":
        frame = spark.read.format("rmq").option("columns", "queue_offset,store_timestamp,body").load(path)
        frame.write.format("noop").mode("overwrite").save()
        rows = -1
    elif job == "scan_map":
        parts = rmq.spark.scan_map(spark, path, measured_batch, "rows bigint, size bigint", columns=["body"])
        rows = parts.groupBy().sum("rows").first()[0]
    elif job == "verify":
        rows = rmq.spark.verify(spark, path).record_count
    elif job == "rebuild":
        rows = rmq.spark.rebuild(spark, path, str(target)).unit_count
    else:
        rows = rmq.spark.export(spark, path, str(target)).row_count
    print(json.dumps({"seconds": time.monotonic() - started}))  # without the start of Spark
    spark.stop()
    return int(rows)


class Memory(threading.Thread):
    """The largest sum of anonymous memory of a process and those below it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak = max(self.peak, sum(map(anonymous, family(self._pid))))

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.peak


def family(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                left += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def timed(engine: str, job: str, store: Path, processes: int, count: int, place: Path) -> dict[str, Any]:
    target = place / "target"
    command = [sys.executable, __file__, "--run", engine, job, str(store), str(target), str(processes)]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        memory = Memory(process.pid)
        memory.start()
        assert process.stdout is not None
        told = [json.loads(line) for line in process.stdout if line.startswith("{")]
    seconds = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"{engine} {job}: exit status {process.returncode}")
    rows = told[-1]["rows"]
    if rows not in (count, -1):
        raise SystemExit(f"{engine} {job}: {rows} messages, there are {count}")
    shutil.rmtree(target, ignore_errors=True)
    return {"engine": engine, "job": job, "processes": processes, "messages": count, "bytes": size_of(store),
            "seconds": told[0].get("seconds", seconds), "memory": memory.end()}  # fmt: skip


def size_of(store: Path) -> int:
    with rmq.open(store) as opened:
        return opened.max_phy_offset - opened.min_phy_offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--spark", action="store_true", help="the jobs on Spark, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        engine, job, store, target, processes = options.run
        run = run_spark if engine == "spark" else run_local
        print(json.dumps({"rows": run(job, Path(store), Path(target), int(processes))}))
        return
    about = machine(options.disk.resolve())
    print(", ".join(f"{name} {text}" for name, text in about.items()))
    found = []
    with tempfile.TemporaryDirectory(prefix="rmq-jobs-", dir=options.disk) as name:
        for gib in options.gib:
            place = Path(name)
            store = place / "store"
            count = make(store, int(gib * GIB))
            runs = [("processes", job, number) for job in LOCAL for number in (1, 2)]
            runs += [("spark", job, number) for job in SPARK for number in (1, 2)] if options.spark else []
            timed("processes", "scan_map", store, 1, count, place)  # reads it once
            for engine, job, number in runs:
                row = timed(engine, job, store, number, count, place)
                found.append(row)
                print(f"{row['bytes'] / GIB:6.1f} GiB {row['messages']:12,} {engine:9} {job:9} {number} "
                      f"{row['seconds']:8.1f} s {row['bytes'] / row['seconds'] / 1e6:8,.0f} MB/s "
                      f"{row['memory'] / 2**20:8,.0f} MiB", flush=True)  # fmt: skip
            shutil.rmtree(store)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"about": about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
