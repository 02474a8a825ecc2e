# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ runs on what a crash of ours left, and is killed too: its messages stand by its own rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from agreement import questions
from rocketmq import RELEASES, RocketMQ
from test_broker_crashes import CONFIG, crash, make

import rmq
from rmq.lock import Crash, crash_of
from rmq.paths import StorePaths

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("release", RELEASES)
def test_a_rocketmq_that_was_killed_is_told_though_it_left_the_same_abort(tmp_path: Path, release: str) -> None:
    path, config = tmp_path / "s", replace(CONFIG, rocketmq_version=release)
    make(path, config)
    crash(path)
    text, before = (path / "abort").read_bytes(), (path / "lock").stat().st_mtime_ns
    assert crash_of(StorePaths(path)) is Crash.OURS
    hosts = {"born_host": "10.0.0.1:1000", "store_host": "10.0.0.2:10911"}
    zeros = rmq.Message("T", b"20", properties={"zeros": "-" + "\0" * 1200 + "-"}, **hosts)  # as lost sectors
    put = [zeros, rmq.Message("T", b"21", **hosts)]
    judge = RocketMQ(release, tmp_path / "rocketmq")
    judge.open(path, config, questions(path, put), put=put, leave_open=True)
    judge.kill()
    assert (path / "lock").stat().st_mtime_ns > before
    (path / "abort").write_bytes(text)
    assert crash_of(StorePaths(path)) is Crash.BROKERS
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert store.topics() == {"T": {0: (0, 22)}, "U": {0: (0, 1)}}
            assert [found.body for found in store.pull("T", 0, 20).messages] == [b"20", b"21"]
