# SPDX-License-Identifier: Apache-2.0
"""File by file copies of a store that is being written, `rmq/` first: all that was flushed before is in them, once."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

import rmq

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=4000, max_hash_slot_num=50,
                         max_index_num=300, flush_interval_commit_log=20)  # fmt: skip
PARTS = ["commitlog", "consumequeue", "index", "checkpoint", "abort", "lock", "config"]


def copy(source: Path, target: Path, names: list[str]) -> None:
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=shutil.copy2)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)
        time.sleep(0.01)


def assert_whole(path: Path, least: int) -> None:
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            numbers = [int(body[:6]) for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= least
            for queue_id in range(3):
                pulled = store.pull("T", queue_id, 0, 10**6).messages
                assert [int(message.body[:6]) for message in pulled] == numbers[queue_id::3], mode
            found = store.query_many("T", [f"k{number}" for number in numbers], columns=["phy_offset"])
            assert found.table["key_index"].to_pylist() == numbers
    assert rmq.verify(path) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_copy_that_begins_with_what_vouches_for_the_rest_is_whole(tmp_path: Path, seed: int) -> None:
    order, stop, done = random.Random(seed).sample(PARTS, len(PARTS)), threading.Event(), []
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        def put() -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                body = b"%06d" % number + bytes(number % 300)
                store.put(rmq.Message("T", body, queue_id=number % 3, keys=f"k{number}"))
                done.append(number)
                time.sleep(0.001 if number % 50 == 0 else 0)

        thread = threading.Thread(target=put)
        thread.start()
        while len(done) < 1000:
            time.sleep(0.01)
        store.flush()
        least = len(done)
        (tmp_path / "copy").mkdir()
        copy(tmp_path / "s", tmp_path / "copy", ["rmq", *order])
        stop.set()
        thread.join()
    assert set(os.listdir(tmp_path / "s")) <= {"rmq", "abort", "abort.bak", *PARTS}
    assert_whole(tmp_path / "copy", least)


def test_a_checkpoint_that_was_copied_after_the_log_says_no_more_than_the_log(tmp_path: Path) -> None:
    """A broker that comes next, and verify, take it at its word."""
    clock = itertools.count(1_700_000_000_000, 1000)
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=clock.__next__) as store:
        store.put_many([rmq.Message("T", b"%06d" % number, queue_id=number % 3, keys=f"k{number}")
                        for number in range(90)])  # fmt: skip
        store.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "copy", copy_function=shutil.copy2)
        store.put(rmq.Message("T", b"later"))
        store.flush()
        shutil.copy2(tmp_path / "s" / "checkpoint", tmp_path / "copy" / "checkpoint")
    assert_whole(tmp_path / "copy", 90)


@pytest.mark.parametrize(("topic", "bodies"), [
    ("T", [b"3", b"4"]), ("RMQ_SYS_TRANS_HALF_TOPIC", [b"3", b"4"]), ("SELF_TEST_TOPIC", [b"3", b"4"]),
    ("rmq_sys_x", [b"0", b"1", b"2"]), ("%RETRY%g", [b"0", b"1", b"2"])])  # fmt: skip
def test_a_light_queue_begins_anew_with_a_message_of_any_topic_but_those_of_copies(
    tmp_path: Path, topic: str, bodies: list[bytes]
) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 16)) as store:
        for number, (name, offset) in enumerate([("T", 0), ("T", 1), ("T", 2), (topic, 0), ("T", 1)]):
            raw = b"INNER_MULTI_DISPATCH\1%%LMQ%%a\2INNER_MULTI_QUEUE_OFFSET\1%d\2" % offset
            store.put(rmq.Message(name, b"%d" % number, raw_properties=raw))
    for part in ("rmq", "consumequeue"):
        shutil.rmtree(path / part)
    with rmq.open(path) as store:
        assert [message.body for message in store.pull("%LMQ%a").messages] == bodies
