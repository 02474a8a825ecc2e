# SPDX-License-Identifier: Apache-2.0
"""Look-ups on Spark beside Spark's own ways: python bench/spark.py [--entries N] [--keys N] [--json FILE].

Wall time on two cores, local[2], of jobs whose keys come from Parquet and whose results go nowhere (Spark's sink noop).
The sizes of the goals: --entries 20000000 --keys 16000000; the defaults are small. Rules: README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keyfiles
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import machine
from rounds import WALL, Round, Taken, interleaved, timed

import rmq
import rmq.spark
from rmq.keys import hash_keys

TOPIC = "BenchTopic"
SEED = 1
CHUNK = 500_000  # messages, or keys, that are made at a time
FILES = 4  # of the keys
BYTES_OF_ENTRY = 350  # of disk: record, unit, entry, and the row of each export
SAMPLE, LEAST_SAMPLE = 50, 50_000  # of so many keys one is asked by the plain Python function; a job costs a second
RAW, EXACT, CONSTANT = "offsets, raw", "offsets, exact", "Arrow function, constants"
PLAIN_RAW, PLAIN_EXACT = "plain Python function, raw", "plain Python function, exact"
JOIN, MERGE, MERGE_HASHES = "lookup_join", "SortMergeJoin by key", "SortMergeJoin by hash, candidates only"
BROADCAST = "broadcast join by key"
# What is compared: ours, the other, and how many times as fast ours has to be.
GOALS: list[tuple[str, str, float | None]] = [
    (RAW, CONSTANT, 0.6), (RAW, PLAIN_RAW, 8), (EXACT, PLAIN_EXACT, None), (JOIN, MERGE, 2), (JOIN, MERGE_HASHES, None),
    (JOIN, BROADCAST, None)]  # fmt: skip


# ---- what is asked ----


def make_store(path: Path, lines: keyfiles.KeyFile) -> None:
    """A message for each key, and an index file that is full with them."""
    count = len(lines)
    config = rmq.StoreConfig(max_hash_slot_num=max(1, count // 4), max_index_num=count + 1,
                             flush_interval_commit_log=2**31 - 1)  # fmt: skip
    with rmq.open(path, "x", config=config) as store:
        for first in range(0, count, CHUNK):
            keys = lines.arrow(first, min(CHUNK, count - first))
            table = pa.table({"body": pa.repeat(pa.scalar(b"b" * 16), len(keys)), "keys": keys})
            store.put_many(table, topic=TOPIC, results=False)


def make_keys(folder: Path, lines: keyfiles.KeyFile, count: int) -> None:
    """Keys of the store in no order, some twice, with their index hashes, as Parquet."""
    folder.mkdir()
    chosen = np.random.default_rng(SEED).integers(0, len(lines), count)
    rows = np.memmap(lines.path, np.uint8, "r").reshape(-1, keyfiles.WIDTH + 1)[:, : keyfiles.WIDTH]
    for number, part in enumerate(np.array_split(chosen, FILES)):
        schema = pa.schema([("key", pa.string()), ("key_hash", pa.int32())])
        with pq.ParquetWriter(folder / f"{number}.parquet", schema) as file:
            for first in range(0, len(part), CHUNK):
                items = np.ascontiguousarray(rows[part[first : first + CHUNK]])
                ends = pa.py_buffer(np.arange(len(items) + 1, dtype=np.int32) * keyfiles.WIDTH)
                keys = pa.Array.from_buffers(pa.string(), len(items), [None, ends, pa.py_buffer(items)])
                hashes = pa.array(hash_keys(keys, TOPIC), pa.int32())
                file.write_table(pa.table([keys, hashes], schema=schema))


def export_index(spark: Any, store: str, folder: Path) -> None:
    """The index as tables: with the keys themselves, and as the files have it, with their hashes."""
    messages = spark.read.format("rmq").options(subscribe=TOPIC, columns="keys,phy_offset").load(store)
    messages.selectExpr("explode(keys) AS key", "phy_offset").write.parquet(str(folder / "by-key"))
    entries = spark.read.format("rmq").option("table", "index").load(store)
    entries.select("key_hash", "phy_offset").write.parquet(str(folder / "by-hash"))


# ---- who answers ----


def constants() -> Any:
    """An Arrow function that has one number ready for each key."""
    from pyspark.sql.functions import arrow_udf

    ready: dict[int, pa.Array] = {}

    @arrow_udf("array<bigint>")
    def constant(key: pa.Array) -> pa.Array:
        count = len(key)
        if count not in ready:
            starts = pa.array(np.arange(count + 1), pa.int32())
            ready[count] = pa.ListArray.from_arrays(starts, pa.array(np.zeros(count, np.int64)))
        return ready[count]

    return constant


def plain(path: str, *, exact: bool) -> Any:
    """A Python function of one key, as one would write it: the store stays open in its worker."""
    from pyspark.sql.functions import udf

    @udf("array<bigint>")
    def ask(key):  # type: ignore[no-untyped-def]  # Spark warns of hints that are not its own
        from rmq.spark.opened import opened

        store = opened(path)
        if exact:
            return [message.phy_offset for message in store.query(TOPIC, key)]
        return list(store.select_phy_offset_many(TOPIC, [key]).to_pylist()[0])

    return ask


def contenders(spark: Any, store: str, folder: Path, sample: int) -> dict[str, tuple[Any, bool]]:
    """Of each its answers as a frame, and whether it is asked about the sample only."""
    from pyspark.sql import functions as F

    keys = spark.read.parquet(str(folder / "keys"))
    few = spark.read.parquet(str(folder / "sample"))
    by_key, by_hash = (spark.read.parquet(str(folder / name)) for name in ("by-key", "by-hash"))
    functions = {CONSTANT: constants(), RAW: rmq.spark.offsets(store, TOPIC, exact=False),
                 EXACT: rmq.spark.offsets(store, TOPIC)}  # fmt: skip
    asked = {name: (keys.select(function("key").alias("found")), False) for name, function in functions.items()}
    for name, exact in ((PLAIN_RAW, False), (PLAIN_EXACT, True)):
        asked[name] = few.select(plain(store, exact=exact)("key").alias("found")), True
    only_keys = keys.select("key")
    return asked | {
        JOIN: (rmq.spark.lookup_join(only_keys, store, TOPIC, key="key", columns=["phy_offset"]), False),
        MERGE: (only_keys.join(by_key.hint("merge"), "key"), False),
        MERGE_HASHES: (keys.join(by_hash.hint("merge"), "key_hash"), False),
        BROADCAST: (only_keys.join(F.broadcast(by_key), "key"), False),
    }


def run(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def check(found: dict[str, tuple[Any, bool]]) -> None:
    """All of them answer alike: AssertionError. Raw answers and candidates may be more."""

    def total(name: str, column: str) -> tuple[int, int]:
        row = found[name][0].selectExpr(f"{column} AS phy_offset").selectExpr("count(*)", "sum(phy_offset)").first()
        return row[0], row[1]

    joined = total(JOIN, "phy_offset")
    assert joined == total(MERGE, "phy_offset") == total(EXACT, "explode(found)"), joined
    raw, hashes = total(RAW, "explode(found)"), total(MERGE_HASHES, "phy_offset")
    assert raw[0] >= joined[0]
    assert hashes[0] >= joined[0]
    assert total(PLAIN_RAW, "explode(found)")[0] >= total(PLAIN_EXACT, "explode(found)")[0] > 0


# ---- the table ----


def measured(spark: Any, found: dict[str, tuple[Any, bool]], counts: tuple[int, int], rounds: int,
             skipped: dict[str, str]) -> Taken:  # fmt: skip
    """ns for each key of each round. Who fails in a first run is left out; `skipped` says why."""
    runs: dict[str, Round] = {}
    for name, (frame, is_sample) in found.items():
        try:
            run(frame)
        except Exception as error:
            skipped[name] = str(error).strip().splitlines()[0][:200]
            continue
        runs[name] = timed(counts[is_sample], making(frame), WALL)
    return interleaved(runs, rounds, warm=0)


def making(frame: Any) -> Callable[[int], Callable[[], None]]:
    return lambda _: lambda: run(frame)


def ratios(taken: Taken) -> Iterator[dict[str, Any]]:
    for ours, other, goal in GOALS:
        if ours in taken and other in taken:
            each = [theirs / own for own, theirs in zip(taken[ours], taken[other], strict=True)]
            ratio = statistics.median(taken[other]) / statistics.median(taken[ours])
            yield {"ours": ours, "other": other, "ratio": ratio, "worst": min(each), "best": max(each), "goal": goal,
                   "met": None if goal is None else ratio >= goal}  # fmt: skip


def text(taken: Taken, skipped: dict[str, str]) -> Iterator[str]:
    yield "| Who | M keys/s | us a key | best | worst |\n|---|---|---|---|---|"
    for name, nanos in taken.items():
        middle = statistics.median(nanos)
        yield f"| {name} | {1e3 / middle:.3f} | {middle / 1e3:.3f} | {min(nanos) / 1e3:.3f} | {max(nanos) / 1e3:.3f} |"
    yield from (f"| {name} | *not run*: {reason} |" for name, reason in skipped.items())
    yield "\n| Ours | beside | times as fast | worst | best | goal | |\n|---|---|---|---|---|---|---|"
    for row in ratios(taken):
        goal = "" if row["goal"] is None else f"{row['goal']:g}"
        met = "" if row["met"] is None else "met" if row["met"] else "BELOW"
        yield (f"| {row['ours']} | {row['other']} | {row['ratio']:.2f} | {row['worst']:.2f} | {row['best']:.2f} | "
               f"{goal} | {met} |")  # fmt: skip


# ---- the run ----


def session(folder: Path, memory: str) -> Any:
    from pyspark.sql import SparkSession

    log = folder / "log4j2.properties"
    log.write_text("rootLogger.level = off\n")
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable,
                   "SPARK_LOCAL_IP": "127.0.0.1"}  # fmt: skip
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", memory)
        .config("spark.driver.maxResultSize", "0")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={log}")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.shuffle.partitions", "16")
        .config("spark.sql.autoBroadcastJoinThreshold", "-1")
        .config("spark.sql.adaptive.autoBroadcastJoinThreshold", "-1")
        .getOrCreate()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--keys", type=int, default=800_000, help="that are looked up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="6g", help="of Spark's JVM")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=Path("build/spark.json"))
    options = parser.parse_args()
    if shutil.disk_usage(options.disk).free < options.entries * BYTES_OF_ENTRY + 2**30:
        parser.error(f"{options.disk} has no {options.entries * BYTES_OF_ENTRY >> 20} MiB free: --disk")
    folder = Path(tempfile.mkdtemp(prefix="rmq-spark-", dir=options.disk))
    try:
        about = machine(folder)
        store = folder / "store"
        lines = keyfiles.write(folder / "lines", keyfiles.random_lines(options.entries, SEED))
        make_store(store, lines)
        sample = min(options.keys, max(LEAST_SAMPLE, options.keys // SAMPLE))
        make_keys(folder / "keys", lines, options.keys)
        make_keys(folder / "sample", lines, sample)
        spark = session(folder, options.memory)
        about |= {"pyspark": spark.version, "pyarrow": pa.__version__, "entries": str(options.entries),
                  "keys": str(options.keys), "sample": str(sample)}  # fmt: skip
        export_index(spark, str(store), folder)
        found = contenders(spark, str(store), folder, sample)
        check(found)
        skipped: dict[str, str] = {}
        taken = measured(spark, found, (options.keys, sample), options.rounds, skipped)
        spark.stop()
    finally:
        shutil.rmtree(folder)
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(*text(taken, skipped), sep="\n")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "ns": taken, "skipped": skipped,
                                        "ratios": list(ratios(taken))}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
