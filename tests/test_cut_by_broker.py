# SPDX-License-Identifier: Apache-2.0
"""A reader that stays open beside a broker that cuts its log and goes on, as a replica of controller mode does, or that
deletes queues and begins them anew.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import oracle
import pytest
from forks import lock_of_a_broker
from test_broker_units import ALL, LIGHT, batches, bodies, lights
from test_foreign_formats import Builder

import rmq
from rmq import brokerunits

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


@pytest.mark.parametrize("begin", [0, 5])
def test_light_and_batch_queues_follow_a_broker_that_cuts_its_log(tmp_path: Path, begin: int) -> None:
    """begin: of the light queue, whose first messages may have been cleaned away."""
    builder = Builder(tmp_path / "store")
    lights(builder, "", "", begin=begin)
    kept = len(builder.log)
    lights(builder, "", "", begin=begin + 2)
    batches(builder, begins_single=True)
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert bodies(reader, "%LMQ%a", begin=begin) == [b"%d" % number for number in range(begin, begin + 4)]
        assert bodies(reader, "BT") == ALL
        builder.log = builder.log[:kept]
        builder.record("BT", b"another, which is longer")
        lights(builder, *[""] * 7, begin=begin + 2)
        builder.finish()
        assert bodies(reader, "%LMQ%a", begin=begin) == [b"%d" % number for number in range(begin, begin + 9)]
        assert bodies(reader, "BT") == [b"another, which is longer"]


def test_a_light_queue_that_a_broker_deleted_begins_anew(tmp_path: Path) -> None:
    """Its new units are in its file, or not yet."""
    builder, units = Builder(tmp_path / "store"), []

    def put(count: int, begin: int, in_file: int) -> None:
        for number in range(begin, begin + count):
            raw = (LIGHT % ("%LMQ%a", number)).encode()
            units.append((*builder.record("T", b"%d" % len(units), raw, queue_offset=len(units)), 65))
        builder.finish()
        builder.units("T", 0, units)
        if in_file:
            builder.units("%LMQ%a", 0, units[-in_file:])

    put(4, 0, 4)
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.path), rmq.open(builder.path) as reader:
        assert bodies(reader, "%LMQ%a") == [b"0", b"1", b"2", b"3"]
        shutil.rmtree(builder.path / "consumequeue/%LMQ%a")
        put(1, 0, 1)
        assert bodies(reader, "%LMQ%a") == [b"4"]
        put(2, 1, 0)
        assert bodies(reader, "%LMQ%a") == [b"4", b"5", b"6"]
        with rmq.open(builder.path) as fresh:
            assert bodies(fresh, "%LMQ%a") == [b"4", b"5", b"6"]


def test_light_queues_count_once_however_often_a_reader_looks_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokerunits, "LIGHT_QUEUES", 3)
    builder = Builder(tmp_path / "store")
    lights(builder, ",%LMQ%b", "")
    kept = len(builder.log)
    lights(builder, "", begin=2)
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        topics = reader.topics()
        assert sorted(topics) == ["%LMQ%a", "%LMQ%b", "T"]
        for number in range(3):
            builder.log = builder.log[:kept]
            builder.record("T", b"cut %d" % number, (LIGHT % ("%LMQ%a", "2")).encode(), queue_id=1, queue_offset=2)
            builder.finish()
            assert reader.topics() == topics


def test_messages_of_a_light_queue_before_it_was_deleted_take_no_place_in_its_files(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    places = [*lights(builder, "", "", ""), *lights(builder, "", "")]
    builder.units("T", 1, [(*place, 65) for place in places])
    builder.units("%LMQ%a", 0, [(*place, 65) for place in places[3:]])
    builder.file("abort", b"1", 1)
    with rmq.open(builder.finish()) as store:
        assert bodies(store, "%LMQ%a") == [b"0", b"1"]
        assert store._queues.queues["%LMQ%a", 0].behind == 0
