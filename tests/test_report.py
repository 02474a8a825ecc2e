# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md says what runs measured, and what was not measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import report
from goals import GOALS, ROWS, Table


def run(*ratios: float, commit: str = "a") -> dict[str, Any]:
    table = Table()
    for part, ratio in zip(("100 B", "1 KiB"), ratios, strict=False):
        table.add("C1", part, [1.0], {"memcpy": [ratio]})
    for row in ROWS:
        table.skip(row, "no anchor")
    return {"about": {"cpu": "X", "commit": commit}, "rows": table.as_json(ROWS)}


@pytest.fixture(autouse=True)
def earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two other machines."""
    names = [f"{goal.row} {goal.part}".strip() for goal in GOALS]
    monkeypatch.setattr(report, "EARLIER", [{"machine": machine, "ratios": dict.fromkeys(names, ratio)}
                                            for machine, ratio in (("Y", 0.63), ("Z", 1.2))])  # fmt: skip


def test_the_figures_of_other_machines_are_of_every_row() -> None:
    for other in json.loads((report.ROOT / "bench" / "earlier.json").read_text()):
        assert list(other["ratios"]) == [f"{goal.row} {goal.part}".strip() for goal in GOALS]


def test_the_median_of_all_runs_decides() -> None:
    lines = list(report.goals([run(0.7), run(0.5), run(0.61)]))
    assert len(lines) == 2 + len(GOALS)
    (line,) = (line for line in lines if line.startswith("| C1 100 B"))
    assert line.endswith("| **0.61** | 0.70, 0.50, 0.61 | 0.6 | 0.8 | R | 0.63, R | 1.20, M |")
    assert sum("not run: no anchor" in line for line in lines) == len(GOALS) - 1


def test_a_goal_that_is_missed_or_that_no_run_has_is_told() -> None:
    lines = list(report.goals([run(0.59) | {"rows": run(0.59)["rows"][:-1]}]))
    assert next(line for line in lines if "0.59" in line).endswith("| **below R** | 0.63, R | 1.20, M |")
    assert "not run: no run has it | 0.63, " in lines[-1]


def test_a_page_without_figures_says_how_to_get_them() -> None:
    text = report.page([], None, None)
    assert "`make bench`, then `make performance-page`" in text
    assert "make bench-growth" in text
    assert "make bench-latency" in text
    assert "<!--" not in text


def test_runs_of_different_machines_are_told_apart() -> None:
    assert report.machines([run(1, commit="a"), run(1, commit="b")]) == "Measured: cpu X, commit a / b."


def test_figures_become_tables() -> None:
    growth = {kind: {"1000": {"some": 1234.4}} for kind in ("batches", "keys", "segments")}
    assert "| 1,000 | 1,234 |" in list(report.growth(growth))
    mode = {"name": "ASYNC_FLUSH", "puts": 1000, "p50_us": 1.0, "p99_us": 2.0, "p99_9_us": 3.0, "worst_us": 4000.0,
            "worst": [{"put": 1234, "us": 4000.0, "during": "allocate 3.90 ms"}]}  # fmt: skip
    lines = list(report.latency({"modes": [mode]}))
    assert "| ASYNC_FLUSH | 1,000 | 1.0 | 2.0 | 3.0 | 4,000.0 |" in lines
    assert lines[-1] == "* ASYNC_FLUSH, put 1,234: 4,000 us (allocate 3.90 ms)"
