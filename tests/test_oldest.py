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
NESTED = "test_ingest_values.py::test_a_nested_value_has_the_text_that_it_has_in_a_row"
LATER = (
    "test_ingest.py::test_bytes_of_a_body_column_are_the_body[binary_view]",
    "test_ingest_files.py::test_texts_of_a_list_are_keys[list_view",
    "test_ingest_values.py::test_text_that_is_not_utf8_is_a_bad_row_as_value_item_key_and_body[string_view]",
    "test_ingest.py::test_a_row_of_parquet_is_valid_json_of_the_same_values[half]",
    "test_ingest.py::test_a_row_of_parquet_is_valid_json_of_the_same_values[string_view]",
    "test_ingest.py::test_random_csv_is_read_as_the_csv_module_reads_it",
    f"{NESTED}[duration[", f"{NESTED}[extension<arrow.uuid>", f"{NESTED}[extension<arrow.bool8>",
)  # fmt: skip


@pytest.mark.slow
def test_columns_go_in_and_come_out_on_the_oldest_pyarrow_that_may_be_installed(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (found[1] for text in project["dependencies"] if (found := re.fullmatch(r"pyarrow>=([\d.]+)", text)))
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:",
                    "--target", str(tmp_path / "site"), f"pyarrow=={oldest}.*"], check=True)  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
         f"--rootdir={ROOT}", f"--basetemp={tmp_path / 'tests'}", "-m", "slow or not slow",
         *(f"--deselect=tests/{name}" for name in LATER),
         *(str(ROOT / "tests" / f"test_{name}.py") for name in TESTS)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(ROOT))),
             "PYTEST_ADDOPTS": ""})  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
