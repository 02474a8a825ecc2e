# SPDX-License-Identifier: Apache-2.0
"""The command line, each time in a fresh process: until the answer, until the first line, and ingest of whole files.

RMQ_BENCH_MB: size of the CSV file that is ingested. JSONL and Parquet files hold the same rows.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from ratios import READS, SYNCED, WALL, Call, Goal, Measure, Peer, Report
from sample import SEED, TOPIC, random_keys, table

import rmq

MESSAGES = 100_000
MEGABYTES = int(os.environ.get("RMQ_BENCH_MB", "64"))
ROW_BYTES = 132  # of CSV, about
PART = 100_000  # rows made at a time
GOAL_MS = 150
RMQ = ("-m", "rmq")
VERBS = {"query": ("query", "{store}", TOPIC, "{key}"), "cat": ("cat", "{store}", TOPIC, "--limit", "1")}
READERS = {
    "csv": "import pyarrow.csv as c; t = c.read_csv(f, read_options=c.ReadOptions(use_threads=threads))",
    "jsonl": "import pyarrow.json as j; t = j.read_json(f, read_options=j.ReadOptions(use_threads=threads))",
    "parquet": "import pyarrow.parquet as q; t = q.read_table(f, use_threads=threads)",
}
WRITERS = {
    "jsonl": "w = lambda row: print(json.dumps(row, ensure_ascii=False))",
    "csv": "c = csv.writer(sys.stdout); w = lambda row: c.writerow(row.values())",
}
LOOP = """import csv, json, sys, rmq; from rmq.cli.fields import message_row; {writer}
with rmq.open({store!r}) as s:
    at = 0
    while (page := s.pull({topic!r}, 0, at, 512)).messages:
        at = page.next_queue_offset
        for message in page.messages: w(message_row(message))
"""


class Processes:
    """Runs Python in fresh processes, with bytecode on disk as after an installation, and adds up their CPU time."""

    def __init__(self, cache: Path) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(Path(rmq.__file__).parent.parent),
                             "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}  # fmt: skip
        self.cpu: dict[str, list[float]] = {}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, env=self._environment)

    def run(self, name: str, *words: str) -> bytes:
        """What a process printed."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = self.start(*words)
        output, _ = process.communicate()
        assert process.returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.cpu.setdefault(name, []).append(taken)
        return output

    def note(self, name: str) -> str:
        medians = (f"{who} {statistics.median(taken) * 1e3:,.0f} ms" for who, taken in self.cpu.items())
        return f"{name}: CPU time of the process and all its threads: {', '.join(medians)}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def processes(cache: Path) -> Processes:
    return Processes(cache)


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return random_keys(MESSAGES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> Iterator[Path]:
    """100,000 messages in a store of the default geometry."""
    root = tmp_path_factory.mktemp("cli")
    with rmq.open(root / "s", "x") as made:
        made.put_many(table(keys, 100), topic=TOPIC, results=False)
    yield root / "s"
    shutil.rmtree(root)


def floors(processes: Processes) -> list[Peer]:
    """What a process pays before it can do anything."""
    programs = "pass", "import numpy, click", "import pyarrow"
    return [Peer(code, partial(partial, processes.run, code, "-c", code)) for code in programs]


@WALL
@pytest.mark.parametrize("verb", VERBS)
def test_cold_start(measure: Measure, report: Report, processes: Processes, store: Path, keys: list[str],
                    verb: str, request: pytest.FixtureRequest) -> None:  # fmt: skip
    """A process from its start to its end; the peers are what such a process imports, or could."""
    source = random.Random(SEED)

    def ours() -> Call:
        words = [word.format(store=store, key=source.choice(keys)) for word in VERBS[verb]]
        return partial(processes.run, verb, *RMQ, *words)

    assert ours()().startswith(b'{"')
    measure(1, READS, ours, *floors(processes), rounds=9)
    best = min(processes.cpu[verb]) * 1e3
    report.notes.append(f"{processes.note(request.node.name)}; least of {verb} {best:,.0f} ms, goal {GOAL_MS} ms "
                        f"{'met' if best < GOAL_MS else 'MISSED'}")  # fmt: skip


@WALL
def test_first_line(measure: Measure, processes: Processes, store: Path) -> None:
    """Of `rmq cat` on a pipe that wants all; the process is ended when the line is there."""
    running: list[subprocess.Popen[bytes]] = []

    def first_line(*words: str) -> None:
        running.append(processes.start(*words))
        output = running[-1].stdout
        assert output is not None
        assert output.readline().endswith(b"\n")

    def make(*words: str) -> Call:
        while running:
            running[-1].kill()
            running.pop().communicate()
        return partial(first_line, *words)

    cat = partial(make, *RMQ, "cat", str(store), TOPIC)
    measure(1, READS, cat, Peer("import numpy, click", partial(make, "-c", "import numpy, click; print()")), rounds=9)
    make()


@WALL
@pytest.mark.parametrize("form", WRITERS)
def test_whole_topic(measure: Measure, processes: Processes, store: Path, form: str) -> None:
    """`rmq cat` of all messages; the peer pulls the same and writes each row by Python's own module."""
    loop = LOOP.format(writer=WRITERS[form], store=str(store), topic=TOPIC)
    cat = partial(processes.run, "cat", *RMQ, "cat", str(store), TOPIC, "-o", form)
    assert cat().count(b"\n") == MESSAGES + (form == "csv")
    peer = Peer("a row each", partial(partial, processes.run, "loop", "-c", loop))
    measure(MESSAGES, READS, lambda: cat, peer, rounds=5)


def rows(first: int, count: int) -> pa.Table:
    source = np.random.default_rng(SEED + first)
    states = np.array(["paid", "shipped", "cancelled", "returned", "open", "waiting"])
    streets = np.array([f"{i} old mill street" for i in range(150)])
    placed = pa.array(source.integers(1_600_000_000_000, 1_700_000_000_000, count)).cast(pa.timestamp("ms"))
    return pa.table({
        "id": [f"order-{number:010d}" for number in range(first, first + count)],
        "customer": source.integers(0, 10**6, count), "total": np.round(source.random(count) * 500, 2),
        "state": states[source.integers(0, len(states), count)], "placed": placed,
        "address": streets[source.integers(0, len(streets), count)],
        "note": [source.bytes(20).hex() for _ in range(count)],
    })  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The same rows as CSV, JSONL and Parquet."""
    root = tmp_path_factory.mktemp("rows")
    made = {form: root / f"rows.{form}" for form in READERS}
    count = MEGABYTES * 10**6 // ROW_BYTES
    schema = rows(0, 1).schema
    with pyarrow.csv.CSVWriter(made["csv"], schema) as as_csv, made["jsonl"].open("w") as as_jsonl, \
            pyarrow.parquet.ParquetWriter(made["parquet"], schema) as as_parquet:  # fmt: skip
        for first in range(0, count, PART):
            part = rows(first, min(PART, count - first))
            as_csv.write_table(part)
            as_parquet.write_table(part)
            text = part.set_column(4, "placed", part.column("placed").cast(pa.string()))
            as_jsonl.writelines(json.dumps(row) + "\n" for row in text.to_pylist())
    yield made
    shutil.rmtree(root)


@WALL
@pytest.mark.parametrize("form", READERS)
def test_ingest(measure: Measure, report: Report, processes: Processes, files: dict[str, Path], tmp_path: Path,
                form: str, request: pytest.FixtureRequest) -> None:  # fmt: skip
    """All rows with a key, on disk at the end; the peers read the file into an Arrow table and do nothing with it."""
    path, store = files[form], tmp_path / "s"
    count = MEGABYTES * 10**6 // ROW_BYTES

    def ours() -> Call:
        shutil.rmtree(store, ignore_errors=True)

        def ingest() -> None:
            words = "ingest", str(store), str(path), "--topic", TOPIC, "--key-column", "id"
            answer = processes.run("ingest", *RMQ, *words)
            assert json.loads(answer)["stored"] == count

        return ingest

    def arrow(threads: bool, name: str) -> Call:
        code = f"f, threads = {str(path)!r}, {threads}; {READERS[form]}; assert t.num_rows == {count}"
        return partial(processes.run, name, "-c", code)

    peers = [Peer(name, partial(arrow, threads, name), (Goal("ingest", 0.6),))
             for name, threads in (("Arrow, its threads", True), ("Arrow, one thread", False))]  # fmt: skip
    measure(count, SYNCED, ours, *peers, rounds=5)
    report.notes.append(f"{processes.note(request.node.name)}; file of {path.stat().st_size / 1e6:,.0f} MB")
    shutil.rmtree(store)
