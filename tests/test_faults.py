"""System calls on a store's files fail, one at a time: a typed error, nothing lost, nothing half, work goes on.

tests/faults/interpose.c makes them fail, tests/faults/workloads.py says what is done, tests/faults/sites.py judges.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sidebyside import side_by_side

HERE = Path(__file__).parent
WORKLOADS = ["create", "put", "put and dispatch", "put_many", "put_many, written", "put_batch", "SYNC_FLUSH", "flush",
             "timed flush", "open clean", "open after a crash", "repair", "open a broker's",
             "open a broker's after a crash", "read", "read after a crash", "read a broker's", "ask while writing",
             "index file"]  # fmt: skip


@pytest.fixture(scope="session")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("no C compiler to build tests/faults/interpose.c with")
    path = tmp_path_factory.mktemp("faults") / "interpose.so"
    source = HERE / "faults" / "interpose.c"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"], check=True)
    return path


def judged(interposer: Path, workload: str, share: int) -> dict[str, Any]:
    """What became of each call that failed. share: every so many-th site, 0: each call with each error."""
    paths = [str(HERE.parent), str(HERE), str(HERE / "faults"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"LD_PRELOAD": str(interposer), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, HERE / "faults" / "sites.py", workload, str(share)], env=environment,
                          capture_output=True, text=True, check=False, timeout=3600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def table(workload: str, answer: dict[str, Any]) -> str:
    """Sites by call and error."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for site, count in answer["sites"].items():
        operation, error = site.split(" ")
        rows[operation][error] += count
    lines = [f"{workload}: {sum(answer['sites'].values())} sites; {answer['outcomes']}"]
    lines += [f"  {operation:10}" + "".join(f" {error} {count}" for error, count in sorted(errors.items()))
              for operation, errors in sorted(rows.items())]  # fmt: skip
    return "\n".join(lines)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, interposer: Path) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    share = 0 if os.environ.get("RMQ_FAULTS") == "all" else 1
    with side_by_side(request, "workload", lambda workload: judged(interposer, workload, share)) as found:
        yield found


@pytest.mark.faults
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_system_call_that_fails_is_a_typed_error_that_loses_nothing(
    runs: dict[str, Future[dict[str, Any]]], workload: str, record_property: Any
) -> None:
    answer = runs[workload].result()
    record_property("faults", table(workload, answer))
    assert answer["faults"] == []
    assert sum(answer["sites"].values()) > 50


def test_some_system_calls_that_fail_lose_nothing(interposer: Path) -> None:
    answer = judged(interposer, "put and dispatch", 40)
    assert answer["faults"] == []
    assert sum(answer["sites"].values()) > 5


def test_the_list_of_workloads_is_whole() -> None:
    program = "import workloads; print(*workloads.WORKLOADS, sep=chr(10))"
    paths = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE / "faults")])
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.splitlines() == WORKLOADS
