# SPDX-License-Identifier: Apache-2.0
"""What a reader needs to judge the numbers: machine, versions, file system."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rmq

PACKAGES = ("numpy", "pyarrow", "lmdb", "rocksdict")
ROOT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    found = {"rmq": rmq.__version__, "sqlite3": sqlite3.sqlite_version}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def file_system(path: Path) -> str:
    """Kind of the file system of a path: the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(point), kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(above)[1] if above else "unknown"


def machine(place: Path) -> dict[str, str]:
    """place: where the files of the run lie."""
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
              if line.startswith("model name")]  # fmt: skip
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
                            check=False)  # fmt: skip
    return {"cpu": f"{len(models)} x {models[0] if models else platform.processor()}", "kernel": platform.release(),
            "python": platform.python_version(), "file_system": file_system(place),
            "load": f"{os.getloadavg()[0]:.1f}", "commit": commit.stdout.strip() or "unknown",
            "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip
