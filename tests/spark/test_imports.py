"""Who may import PySpark, and that what plans and publishes needs none."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT = ["rmq.spark", "rmq.spark.options", "rmq.spark.selection", "rmq.spark.queues", "rmq.spark.schema",
           "rmq.spark.opened", "rmq.spark.staging", "rmq.spark.loading", "rmq.splits", "rmq.tables"]  # fmt: skip


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_only_spark_s_own_rooms_import_pyspark() -> None:
    rooms = {path.parent.relative_to(ROOT).as_posix() for folder in ("rmq", "pyspark_rmq")
             for path in (ROOT / folder).rglob("*.py") if "pyspark" in imported(path)}  # fmt: skip
    assert rooms <= {"rmq/spark", "pyspark_rmq"}


def test_planning_and_publishing_import_no_pyspark() -> None:
    program = ("import sys, importlib\n"
               "for name in sys.argv[1:]: importlib.import_module(name)\n"
               "print('pyspark' in sys.modules)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *WITHOUT], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout == "False\n"


def test_the_architecture_names_every_room_of_spark() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    flow = re.findall(r"^\* \*\*Spark\*\*.*?\n\n", page, re.M | re.S)[0]
    rooms = {path.stem for path in (ROOT / "rmq" / "spark").glob("[a-z]*.py")}
    assert rooms - set(re.findall(r"`(\w+)`", flow)) == set()
    told = flow.rpartition("of these not")[2]
    assert {f"rmq.spark.{name}" for name in re.findall(r"`(\w+)`", told)} == \
        {name for name in WITHOUT if name.startswith("rmq.spark.")}  # fmt: skip


@pytest.mark.spark
def test_a_module_of_the_package_hides_none_of_its_functions() -> None:
    """`import rmq.spark.NAME` makes NAME an attribute of the package."""
    program = ("import importlib, pkgutil, rmq.spark\n"
               "for found in pkgutil.iter_modules(rmq.spark.__path__, 'rmq.spark.'):\n"
               "    importlib.import_module(found.name)\n"
               "print([name for name in rmq.spark.__all__ if not callable(getattr(rmq.spark, name))])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.spark
def test_the_room_that_spark_looks_for_raises_nothing_without_pyspark() -> None:
    program = ("import sys; sys.modules['pyspark.sql.datasource'] = None\n"
               "import pyspark_rmq; print(hasattr(pyspark_rmq, 'DefaultSource'))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_functions_are_made_before_a_session() -> None:
    """As module-level names of a job."""
    done = subprocess.run([sys.executable, "-c", "import rmq.spark\n"
                           "rmq.spark.offsets('/s', 'T'), rmq.spark.messages('/s', 'T')\n"], check=False)  # fmt: skip
    assert done.returncode == 0
