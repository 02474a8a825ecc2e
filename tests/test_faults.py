"""System calls on a store's files fail, one at a time: a typed error, nothing lost, nothing half, work goes on.

tests/faults/interpose.c makes them fail, tests/faults/workloads.py says what is done, tests/faults/sites.py judges.
tests/faults/memory.c refuses memory.
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
             "timed flush", "commits", "open clean", "open after a crash", "repair", "open a broker's",
             "open a broker's after a crash", "read", "read after a crash", "read a broker's", "ask while writing",
             "index file"]  # fmt: skip


@pytest.fixture(scope="session")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("faults"), "interpose")


def built(place: Path, name: str) -> Path:
    """A library of tests/faults, to be preloaded."""
    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip(f"no C compiler to build tests/faults/{name}.c with")
    path, source = place / f"{name}.so", HERE / "faults" / f"{name}.c"
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


NO_MEMORY = """
import ctypes, sys
import rmq
library, path, what = sys.argv[1:]
config = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2000,
                         max_hash_slot_num=100, max_index_num=20000)
with rmq.open(path, "x", config=config) as store:
    if what == "queues":
        store.put_many([rmq.Message("T", b"body", queue_id=number) for number in range(3000)])
    else:
        store.put_many([rmq.Message("T", b"body", keys=[f"k{key}" for key in range(number % 2 * 599 + 1)])
                        for number in range(20)])
memory, number, refused = ctypes.CDLL(library), 0, 0
assert rmq.verify(path, jobs=1) == []
while True:
    number += 1
    memory.arm(ctypes.c_size_t(4096), ctypes.c_long(number))
    try:
        found = rmq.verify(path, jobs=1)
    except MemoryError:
        refused += 1
        continue
    assert found == [], found
    if not memory.has_failed():
        break
print(refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["queues", "keys"])
def test_a_verification_without_memory_is_a_memory_error_and_finds_nothing_wrong(tmp_path: Path, what: str) -> None:
    """Each call for 4 KiB or more fails once."""
    library = built(tmp_path, "memory")
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", NO_MEMORY, library, tmp_path / "s", what], env=environment,
                          capture_output=True, text=True, check=False, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 0
