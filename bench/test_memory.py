# SPDX-License-Identifier: Apache-2.0
"""Peak memory of ingest, scan and query does not grow with the store: 100,000 messages, and ten times as many.

This is no matter of time: it fails when it is not so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import memory_job
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from ratios import SYNCED, WALL, Report

SMALL = 100_000
LARGE = 10 * SMALL
JOBS = {"ingest": (SMALL, LARGE), "scan": (SMALL, LARGE), "query": (memory_job.ASKED, memory_job.ASKED)}
SLACK = 4 * 1024**2  # bytes; the large store has 900,000 messages and 400 MB more
POLL = 0.002


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    root = tmp_path_factory.mktemp("memory")
    yield {count: root / str(count) for count in (SMALL, LARGE)}
    shutil.rmtree(root)


def anonymous(process: subprocess.Popen[str]) -> int:
    """Bytes that only the process holds. Pages of mapped files are page cache: the system takes them when it wants."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def peak(job: str, path: Path, count: int) -> tuple[int, int]:
    """(its answer, most anonymous memory seen) of one job."""
    process = subprocess.Popen([sys.executable, memory_job.__file__, job, str(path), str(count)],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    most = 0
    while process.poll() is None:
        most = max(most, anonymous(process))
        time.sleep(POLL)
    output, _ = process.communicate()
    assert process.returncode == 0
    return int(output), most


@WALL
@pytest.mark.parametrize("job", JOBS)
def test_peak_memory(benchmark: BenchmarkFixture, report: Report, stores: dict[int, Path], job: str) -> None:
    """ingest comes first and leaves the stores."""
    for count, path in stores.items():
        if job != "ingest" and not path.exists():
            assert memory_job.ingest(path, count) == count
    peaks = benchmark.pedantic(lambda: [peak(job, path, count) for count, path in stores.items()], rounds=1)
    assert tuple(answer for answer, _ in peaks) == JOBS[job]
    small, large = (most for _, most in peaks)
    sizes = [sum(file.stat().st_blocks * 512 for file in path.rglob("*")) for path in stores.values()]
    megabytes = [round(size / 1e6, 1) for size in (small, large, *sizes)]
    names = "peak_mb", "peak_mb_of_10x", "store_mb", "store_mb_of_10x"
    benchmark.extra_info |= {"durability": SYNCED, **dict(zip(names, megabytes, strict=True))}
    report.notes.append(f"peak memory of {job}: {megabytes[0]} MB on a store of {megabytes[2]} MB, "
                        f"{megabytes[1]} MB on one of {megabytes[3]} MB")  # fmt: skip
    assert large <= small + SLACK
