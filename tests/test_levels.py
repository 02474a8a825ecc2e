# SPDX-License-Identifier: Apache-2.0
"""Every test of compiled code at every level of instructions that this CPU has: `make levels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rmq._core._record import CPU_LEVEL, CPU_LEVELS

HERE = Path(__file__).resolve().parent
# What calls rmq._core itself, and what reads and writes RocketMQ's bytes through it.
CORE = [f"test_{name}.py" for name in (
    "arrow_values", "bad_input", "columns", "consumequeue_units", "damage", "golden_read", "golden_write",
    "index_times", "indexbatches", "indexfile", "items", "javahash", "jsonrows", "oracle", "places", "putbatch",
    "putter", "puttexts",
    "queries", "record", "record_damage", "rowhashes", "scan_damage", "sidecar", "store", "views")]  # fmt: skip


ROOT = HERE.parent


def run_core_tests(directory: Path, **environment: str) -> str:
    """Their last line. In a process whose working directory holds no other rmq."""
    done = subprocess.run([sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c",
                           str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", f"--basetemp={directory}",
                           *(str(HERE / name) for name in CORE)], cwd=ROOT, capture_output=True, text=True,
                          check=False, env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("level", CPU_LEVELS)
def test_compiled_code_is_right_at(level: str, tmp_path: Path) -> None:
    if CPU_LEVELS.index(level) > CPU_LEVELS.index(CPU_LEVEL):
        pytest.skip(f"this CPU goes up to {CPU_LEVEL}")
    print(f"{level}: {run_core_tests(tmp_path, RMQ_CPU=level)}")


@pytest.mark.slow
def test_compiled_code_is_right_on_machines_without_sse(tmp_path: Path) -> None:
    """Compiled as for them: the branches of headers that a build for x86 leaves out."""
    shutil.copytree(ROOT / "rmq", tmp_path / "rmq", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path / 'o'}"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "RMQ_PLAIN": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = subprocess.run([sys.executable, "-P", "-c", "import rmq._core._record as module; print(module.__file__)"],
                           cwd=ROOT, capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert where.stdout.startswith(str(tmp_path))
    print(f"without SSE: {run_core_tests(tmp_path / 'pt', RMQ_CPU='plain', PYTHONPATH=str(tmp_path))}")
