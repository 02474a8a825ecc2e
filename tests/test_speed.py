# SPDX-License-Identifier: Apache-2.0
"""The goals that need no JVM hold on this machine: `.ci/run` asks for it, machines of others may be slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent.parent / "bench" / "run.py"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(os.environ.get("RMQ_CHECK_SPEED") != "1", reason="RMQ_CHECK_SPEED=1 asks for it, three minutes")
def test_no_row_is_below_its_goal_by_more_than_noise() -> None:
    done = subprocess.run([sys.executable, str(RUN), "--check"], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
