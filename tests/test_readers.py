"""One process writes, four read beside it: they follow new files, see whole messages only, and hold few files open.

RMQ_READERS_SECONDS sets how long the long form takes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import workload

from rmq.filecache import FILE_CACHE_LIMIT

pytestmark = pytest.mark.synced

SECONDS = float(os.environ.get("RMQ_READERS_SECONDS", "60"))


def follow(root: Path, kind: str, seconds: float) -> None:
    workload.warm_up(root / "warm")
    path, acked, stop, stop_readers, faults = (root / name for name in ("s", "acked", "stop", "stop-readers", "faults"))
    answers = [root / f"seen{number}" for number in range(4)]
    processes = [workload.start(workload.write_until, path, acked, stop, kind, faults=faults)]
    processes += [workload.start(workload.read, path, acked, stop_readers, answer, seed, faults=faults)
                  for seed, answer in enumerate(answers)]  # fmt: skip
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not faults.exists():
            time.sleep(0.05)
        stop.touch()
        assert os.waitpid(processes.pop(0), 0)[1] == 0, faults.read_text()
        stop_readers.touch()
        while processes:
            assert os.waitpid(processes.pop(), 0)[1] == 0, faults.read_text()
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    workload.assert_whole(path, acked, answers)
    segments, index_files = (len(list((path / name).iterdir())) for name in ("commitlog", "index"))
    assert segments > 3
    for answer in answers:
        told = json.loads(answer.read_text())
        assert told["rounds"] > 5
        assert told["opened"] > 0
        assert told["files"] <= segments + index_files + FILE_CACHE_LIMIT + 10  # a mapped file holds one of its own
        assert told["maps"] <= segments + index_files + 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_four_readers_follow_a_writer(tmp_path: Path, kind: str) -> None:
    follow(tmp_path, kind, 5)


@pytest.mark.kill
def test_four_readers_follow_a_writer_for_a_minute(tmp_path: Path) -> None:
    follow(tmp_path, "ASYNC_FLUSH", SECONDS)
