# SPDX-License-Identifier: Apache-2.0
"""Every test of compiled code at every level of instructions that this CPU has: `make levels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from sidebyside import side_by_side

from rmq._core._record import CPU_LEVEL, CPU_LEVELS

HERE = Path(__file__).resolve().parent
# What calls rmq._core itself, and what reads and writes RocketMQ's bytes through it.
CORE = [f"test_{name}.py" for name in (
    "arrow_values", "bad_input", "columns", "consumequeue_units", "damage", "golden_read", "golden_write",
    "index_times", "indexbatches", "indexfile", "items", "javahash", "jsonrows", "messagelines", "places", "putbatch",
    "putter", "puttexts",
    "queries", "record", "record_damage", "rowhashes", "scan_damage", "sidecar", "store",
    "storedfields", "views")]  # fmt: skip

ROOT = HERE.parent
WITHOUT_SSE = "without SSE"


def is_here(level: str) -> bool:
    return level == WITHOUT_SSE or CPU_LEVELS.index(level) <= CPU_LEVELS.index(CPU_LEVEL)


def run_core_tests(directory: Path, **environment: str) -> str:
    """Their last line. In a process whose working directory holds no other rmq."""
    done = subprocess.run([sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c",
                           str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", f"--basetemp={directory}",
                           *(str(HERE / name) for name in CORE)], cwd=ROOT, capture_output=True, text=True,
                          check=False, env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout.splitlines()[-1]


def run_without_sse(directory: Path) -> str:
    """Compiled as for machines without it: the branches of headers that a build for x86 leaves out."""
    shutil.copytree(ROOT / "rmq", directory / "rmq", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={directory}",
             f"--build-temp={directory / 'o'}"]  # fmt: skip
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "RMQ_PLAIN": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = subprocess.run([sys.executable, "-P", "-c", "import rmq._core._record as module; print(module.__file__)"],
                           cwd=ROOT, capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": str(directory)})  # fmt: skip
    assert where.stdout.startswith(str(directory))
    return run_core_tests(directory / "pt", RMQ_CPU="plain", PYTHONPATH=str(directory))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    def run(level: str) -> str:
        directory = tmp_path_factory.mktemp("level")
        if level == WITHOUT_SSE:
            return run_without_sse(directory)
        return run_core_tests(directory, RMQ_CPU=level) if is_here(level) else ""

    tmp_path_factory.getbasetemp()  # made here: two threads at once would both
    with side_by_side(request, "level", run) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("level", [WITHOUT_SSE, *CPU_LEVELS])
def test_compiled_code_is_right(level: str, runs: dict[str, Future[str]]) -> None:
    if not is_here(level):
        pytest.skip(f"this CPU goes up to {CPU_LEVEL}")
    print(f"{level}: {runs[level].result()}")
