# SPDX-License-Identifier: Apache-2.0
"""The fixtures of all benchmarks, and the table of ratios at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import machine, versions
from pytest_benchmark.fixture import BenchmarkFixture
from ratios import REPORT, Measure, Report
from sample import Fresh


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


@pytest.fixture
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    found = request.config.stash[REPORT]
    found.place = tmp_path_factory.getbasetemp().resolve()
    return found


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, report: Report) -> Measure:
    marker = request.node.get_closest_marker("benchmark")
    assert marker is not None, "a test that measures is marked CPU, ALL_CPU or WALL"
    return Measure(benchmark, report, marker.kwargs["timer"])


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Fresh]:
    made = Fresh(tmp_path)
    yield made
    made.close()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["rmq"] = machine(config.stash[REPORT].place) | versions()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[REPORT]
    if not found.rows and not found.notes:
        return
    terminalreporter.section("ratios: the peer's time over ours")
    terminalreporter.write_line(", ".join(f"{name} {text}" for name, text in machine(found.place).items()))
    terminalreporter.write_line(", ".join(f"{name} {text}" for name, text in versions().items()))
    for line in found.lines():
        terminalreporter.write_line(line)
