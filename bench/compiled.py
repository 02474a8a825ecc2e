# SPDX-License-Identifier: Apache-2.0
"""The compiled modules of the benchmarks themselves, made when they are needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODULES = HERE.parent / "build" / "bench"


def compiled(name: str, directory: Path) -> Any:
    """The module of bench/NAME.pyx and its header, compiled in a directory, optimised and with C's methods as setup.py.

    One that is newer than both, and than this file, is taken as it is.
    """
    sources = list(HERE.glob(f"{name}.*"))
    made = directory / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    newest = max(path.stat().st_mtime for path in [*sources, Path(__file__)])
    if not made.exists() or made.stat().st_mtime < newest:
        compile_module(name, sources, directory)
    spec = spec_from_file_location(name, made)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_module(name: str, sources: list[Path], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in sources:
        shutil.copy(path, directory)
    done = subprocess.run([sys.executable, "-m", "Cython.Build.Cythonize", "-3", "-X", "binding=False", "--inplace",
                           f"{name}.pyx"],
                          cwd=directory, env={**os.environ, "CFLAGS": "-O3"}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
