# SPDX-License-Identifier: Apache-2.0
"""Every test of compiled code at every level of instructions that this CPU has: `make levels`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmq._core._record import CPU_LEVEL, CPU_LEVELS

HERE = Path(__file__).resolve().parent
# What calls rmq._core itself, and what reads and writes RocketMQ's bytes through it.
CORE = [f"test_{name}.py" for name in (
    "arrow_values", "bad_input", "columns", "consumequeue_units", "damage", "golden_read", "golden_write",
    "indexbatches", "indexfile", "items", "javahash", "jsonrows", "oracle", "places", "putbatch", "putter", "puttexts",
    "queries", "record", "record_damage", "rowhashes", "scan_damage", "sidecar", "store", "views")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("level", CPU_LEVELS)
def test_compiled_code_is_right_at(level: str, tmp_path: Path) -> None:
    if CPU_LEVELS.index(level) > CPU_LEVELS.index(CPU_LEVEL):
        pytest.skip(f"this CPU goes up to {CPU_LEVEL}")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}",
                           *(str(HERE / name) for name in CORE)], cwd=HERE.parent, capture_output=True, text=True,
                          check=False, env={**os.environ, "RMQ_CPU": level})  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    print(f"{level}: {done.stdout.splitlines()[-1]}")
