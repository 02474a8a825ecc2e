# SPDX-License-Identifier: Apache-2.0
"""Verifications into which a writer comes, writes, cleans, and goes: a sound store is found sound."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from forks import lock_of_a_broker

import rmq
from rmq import rebuilding
from rmq.retention import Retention
from rmq.verification import ground
from rmq.verification.records import SegmentCheck
from rmq.verification.verify import _Verification

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400, max_hash_slot_num=50,
                         max_index_num=300)  # fmt: skip
LATER = 2**42  # ms: everything has expired


def messages(first: int, last: int, topic: str = "T") -> list[rmq.Message]:
    return [rmq.Message(topic, b"%d" % number * 20, keys=f"k{number}") for number in range(first, last)]


def is_sound(path: Path) -> bool:
    result = rmq.verify(path, config=CONFIG)
    assert result.is_sound, [str(finding) for finding in result]
    return True


@pytest.mark.parametrize("torn", [0, 30, 75])
def test_what_a_broker_appends_while_it_is_looked_at_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  torn: int) -> None:  # fmt: skip
    """Records come whole, or first in part, while the end of the log is searched for another record."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(messages(0, 50))
        ends = [place + size for place, size in zip(*(store.scan(columns=[name]).read_all()[name].to_pylist()
                                                      for name in ("phy_offset", "size")), strict=True)]  # fmt: skip
    for name in ("rmq", "consumequeue", "index"):
        shutil.rmtree(path / name)
    segment = path / "commitlog" / f"{0:020d}"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: ends[9] + torn].ljust(len(whole), b"\0"))
    real = SegmentCheck._next_record

    def next_record(check: SegmentCheck, place: int, stop: int) -> int:
        with segment.open("r+b") as file:
            file.write(whole[: ends[20]])
        return real(check, place, stop)

    monkeypatch.setattr(SegmentCheck, "_next_record", next_record)
    with lock_of_a_broker(path):
        result = rmq.verify(path, config=CONFIG)
    assert ([finding for finding in result if finding.severity == "damage"], result.record_count) == ([], 21)


def test_a_writer_that_comes_and_goes_meanwhile_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(messages(0, 500))
    real = _Verification._tail

    def tail(work: _Verification) -> Any:
        found = real(work)
        monkeypatch.setattr(_Verification, "_tail", real)
        with rmq.open(path, "r+") as store:
            store.put_many(messages(500, 520))
        return found

    monkeypatch.setattr(_Verification, "_tail", tail)
    assert is_sound(path)


def test_a_cleaning_of_all_that_was_listed_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has removed the segments, and not come to the queues yet."""
    path, is_gone, go_on = tmp_path / "s", threading.Event(), threading.Event()
    real, choose = ground.scan_directory, Retention._choose
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(messages(0, 500))
        store.flush()
        cleaning = threading.Thread(target=lambda: store.clean(LATER, file_reserved_time=0, limit=None))

        def waiting(*arguments: Any) -> Any:
            is_gone.set()
            assert go_on.wait(60)
            return choose(*arguments)

        def listing(directory: Path) -> list[os.DirEntry[str]]:
            found = real(directory)
            if directory.name == "commitlog" and not is_gone.is_set():
                store.put_many(messages(500, 1000))
                store.flush()
                cleaning.start()
                assert is_gone.wait(60)
            return found

        monkeypatch.setattr(Retention, "_choose", waiting)
        monkeypatch.setattr(ground, "scan_directory", listing)
        try:
            assert is_sound(path)
        finally:
            go_on.set()
            cleaning.join()


def test_a_rebuild_beside_a_cleaning_leaves_out_a_queue_that_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many(messages(0, 100, "old"))
        store.put_many(messages(0, 1000))
        store.flush()
        store.clean(LATER, file_reserved_time=0, limit=None)
        real = shutil.copyfile

        def copyfile(source: Path, target: Path) -> Any:
            monkeypatch.setattr(rebuilding.shutil, "copyfile", real)
            store.clean(LATER, file_reserved_time=0, limit=None, expired_queues=True)
            return real(source, target)

        monkeypatch.setattr(rebuilding.shutil, "copyfile", copyfile)
        assert rmq.rebuild(path, tmp_path / "made", processes=1).queue_count == 1
    assert [topic.name for topic in (tmp_path / "made" / "consumequeue").iterdir() if list(topic.iterdir())] == ["T"]
