"""bench/spark.py tells what was measured, and no goal of what did not run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("bench_spark", BENCH / "spark.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCH))


def test_ratios_are_of_medians_beside_the_worst_and_the_best_round(bench: Any) -> None:
    taken = {bench.RAW: [200.0, 100.0, 100.0], bench.CONSTANT: [100.0, 50.0, 90.0], bench.PLAIN_RAW: [500.0] * 3}
    rows = {row["other"]: row for row in bench.ratios(taken)}
    assert rows.keys() == {bench.CONSTANT, bench.PLAIN_RAW}
    first, second = rows[bench.CONSTANT], rows[bench.PLAIN_RAW]
    assert (first["ratio"], first["worst"], first["best"], first["met"]) == (0.9, 0.5, 0.9, True)
    assert (second["ratio"], second["met"]) == (5, False)


def test_the_table_has_a_line_for_each_and_says_what_did_not_run(bench: Any) -> None:
    lines = list(bench.text({bench.JOIN: [1000.0], bench.MERGE: [1500.0]}, {bench.BROADCAST: "no memory"}))
    assert "| lookup_join | 1.000 | 1.000 | 1.000 | 1.000 |" in lines
    assert "| broadcast join by key | *not run*: no memory |" in lines
    assert "| lookup_join | SortMergeJoin by key | 1.50 | 1.50 | 1.50 | 2 | BELOW |" in lines
