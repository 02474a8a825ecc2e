# SPDX-License-Identifier: Apache-2.0
"""What takes and makes Arrow's data, on the oldest pyarrow that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("arrow_values", "columns", "exporting", "ingest", "ingest_files", "ingest_resume", "ingest_values", "tables")
# A later pyarrow writes Parquet of views, makes half floats of Python's, and tells what values of maps were in Parquet.
# NUL in quoted fields of CSV: docs/limits.md.
LATER = "view or random_csv or half"
NESTED = "tests/test_ingest_values.py::test_a_nested_value_has_the_text_that_it_has_in_a_row"
IN_MAPS = ("duration[", "extension<arrow.uuid>", "extension<arrow.bool8>")


@pytest.mark.slow
def test_columns_go_in_and_come_out_on_the_oldest_pyarrow_that_may_be_installed(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (found[1] for text in project["dependencies"] if (found := re.fullmatch(r"pyarrow>=([\d.]+)", text)))
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:",
                    "--target", str(tmp_path / "site"), f"pyarrow=={oldest}.*"], check=True)  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
         f"--rootdir={ROOT}", f"--basetemp={tmp_path / 'tests'}", "-m", "slow or not slow", "-k", f"not ({LATER})",
         *(f"--deselect={NESTED}[{kind}" for kind in IN_MAPS),
         *(str(ROOT / "tests" / f"test_{name}.py") for name in TESTS)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(ROOT))),
             "PYTEST_ADDOPTS": ""})  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
