# SPDX-License-Identifier: Apache-2.0
"""A reader that stays open beside a broker that cuts its log and goes on, as a replica of controller mode does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import oracle
import pytest
from forks import lock_of_a_broker

import rmq

SEGMENT = 4096


def log_of(bodies: list[bytes]) -> bytes:
    log = b""
    for number, body in enumerate(bodies):
        log += oracle.encode_record("T", 0, number, len(log), body, b"KEYS\1%s\2" % body.split(b" ")[0],
                                    store_timestamp=1_700_000_000_000 + number, born_timestamp=1)  # fmt: skip
    return log


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("kept", [0, 4, 7])
def test_a_reader_sees_what_took_the_place_of_records_that_a_broker_cut_off(
    tmp_path: Path, kept: int, *, is_running: bool
) -> None:
    """Also when the broker came and went between two calls."""
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "lock").write_bytes(b"lock")
    path = tmp_path / "commitlog" / f"{0:020d}"
    old = [b"old%d" % number for number in range(8)]
    path.write_bytes(log_of(old).ljust(SEGMENT, b"\0"))
    with contextlib.ExitStack() as running:
        if is_running:
            running.enter_context(lock_of_a_broker(tmp_path))
        reader = running.enter_context(rmq.open(tmp_path))
        assert len(reader.pull("T", 0, 0, 32).messages) == 8
        new = [*old[:kept], *(b"new%d and longer" % number for number in range(8))]
        with path.open("r+b") as file:
            file.write(log_of(new))
        if not is_running:
            (tmp_path / "lock").write_bytes(b"lock")  # as a broker does that starts
        for _ in range(2):
            assert [message.body for message in reader.pull("T", 0, 0, 32).messages] == new
            assert reader.scan().read_all()["body"].to_pylist() == new
            assert [message.body for message in reader.query("T", "new7")] == new[-1:]
            assert reader.query("T", "old7") == []
            assert reader.topics() == {"T": {0: (0, len(new))}}


def test_a_log_that_a_broker_cut_to_nothing_is_judged_anew_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "lock").write_bytes(b"lock")
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.write_bytes(log_of([b"old"] * 8).ljust(SEGMENT, b"\0"))
    with lock_of_a_broker(tmp_path), rmq.open(tmp_path) as reader:
        assert len(reader.pull("T", 0, 0, 32).messages) == 8
        with path.open("r+b") as file:
            file.write(bytes(SEGMENT))
        for _ in range(3):
            assert (reader.topics(), reader.max_phy_offset) == ({}, 0)
        assert caplog.text.count("looks at all anew") == 1
        with path.open("r+b") as file:
            file.write(log_of([b"new"]))
        assert [message.body for message in reader.pull("T").messages] == [b"new"]
