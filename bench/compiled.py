# SPDX-License-Identifier: Apache-2.0
"""The compiled modules of the benchmarks themselves, made when they are needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def compiled(name: str, directory: Path) -> Any:
    """The module of bench/NAME.pyx and its header, compiled in a directory with the optimisation of setup.py."""
    for path in HERE.glob(f"{name}.*"):
        shutil.copy(path, directory)
    done = subprocess.run([sys.executable, "-m", "Cython.Build.Cythonize", "-3", "--inplace", f"{name}.pyx"],
                          cwd=directory, env={**os.environ, "CFLAGS": "-O3"}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    found = list(directory.glob(f"{name}*.so"))
    if not found:
        raise RuntimeError(done.stdout + done.stderr)
    spec = spec_from_file_location(name, found[0])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
