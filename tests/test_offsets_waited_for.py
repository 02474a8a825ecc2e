# SPDX-License-Identifier: Apache-2.0
"""Offsets of groups that another process commits at the same moment: while a store is opened or rebuilt, while its
directory is moved or a broker takes it, and within a tick of the file system's clock."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import lock_of_a_broker
from test_consumers import SLOW, put
from test_groups import filled
from test_moved import MOVED
from test_reader_commits import LOCK, offsets_of

import rmq
from rmq import consumeroffsets
from rmq.consumeroffsets import ConsumerOffsets


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """What power loss left: 20 messages, of which a group has consumed 30."""
    path = filled(tmp_path / "whole", 20, 1)
    with rmq.open(path, "r+", config=SLOW) as writer:
        shutil.copytree(path, tmp_path / "cut")
        put(writer, *range(20, 30))
        writer.commit_offsets("g", "Orders", {0: 30})
    shutil.copytree(path / "config", tmp_path / "cut/config", dirs_exist_ok=True)
    assert offsets_of(tmp_path / "cut") == {"Orders@g": {"0": 30}}
    return tmp_path / "cut"


def test_no_open_returns_before_offsets_behind_a_queue_s_end_are_taken_back_on_disk(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the group passes over what is put next, where another process is amid a commit for a time."""
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.02)
    monkeypatch.setattr(consumeroffsets, "SOON_S", 0.02)
    with (cut / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="held by another process"):
            rmq.open(cut, "r+", config=SLOW)
    with rmq.open(cut, "r+", config=SLOW) as writer, rmq.open(cut) as reader:
        put(writer, *range(100, 110))
        assert reader.groups() == {"g": {"Orders": {0: 20}}}
        assert len(rmq.Consumer(reader, "g", "Orders").poll(100)) == 10


@pytest.mark.parametrize("take", [lambda path: rmq.open(path, "r+", config=SLOW).close(),
                                  lambda path: rmq.rebuild(path, processes=1)], ids=["open", "rebuild"])  # fmt: skip
def test_what_a_reader_commits_behind_the_taking_back_of_offsets_is_not_undone(
    cut: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[Path], object]
) -> None:
    real = ConsumerOffsets.cut_back

    def cut_back(offsets: ConsumerOffsets, max_offset_of: Any) -> None:
        real(offsets, max_offset_of)
        monkeypatch.undo()  # a rebuild opens the store, too
        with rmq.open(cut) as reader:
            reader.commit_offsets("g", "Orders", {0: 5})

    monkeypatch.setattr(ConsumerOffsets, "cut_back", cut_back)
    take(cut)
    assert offsets_of(cut) == {"Orders@g": {"0": 5}}


@contextmanager
def held(path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Another process is amid a commit; what happens while it is waited for, before it is done."""
    with (path / LOCK).open("a") as lock, monkeypatch.context() as patched:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(_: float) -> None:
            meanwhile()
            fcntl.flock(lock, fcntl.LOCK_UN)

        patched.setattr(consumeroffsets, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        yield


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_commit_that_waited_while_its_store_was_moved_changes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: rmq.store.Mode
) -> None:
    """Its log lies elsewhere: a reader of it would not tell by that."""
    log = {"store_path_commit_log": str(tmp_path / "log")}
    path, other = filled(tmp_path / "s", **log), filled(tmp_path / "other")
    with rmq.open(other) as reader:
        reader.commit_offsets("g", "Orders", {0: 7})

    def move() -> None:
        path.rename(tmp_path / "moved")
        other.rename(path)

    def commit() -> None:
        store.commit_offsets("g", "Orders", {0: 9})
        if mode == "r+":
            store.flush()

    store = rmq.open(path, mode, config=dataclasses.replace(SLOW, **log))
    with held(path, monkeypatch, move), pytest.raises(OSError, match=MOVED):
        commit()
    with suppress(OSError):
        store.close()
    assert offsets_of(path) == {"Orders@g": {"0": 7}}


def test_a_reader_s_commit_that_waited_while_a_broker_came_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path) as reader, ExitStack() as stack:
        reader.commit_offsets("g", "Orders", {0: 5})
        with (held(path, monkeypatch, lambda: stack.enter_context(lock_of_a_broker(path))),
              pytest.raises(rmq.StoreReadOnlyError, match="a broker has the store")):  # fmt: skip
            reader.commit_offsets("g", "Orders", {0: 9})
        assert offsets_of(path) == {"Orders@g": {"0": 5}}


def test_a_reader_s_commit_within_a_tick_of_the_file_system_s_clock_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inode, size and time of the file are what they were before the reader came."""
    path = filled(tmp_path / "s")
    monkeypatch.setattr(consumeroffsets, "version_of", lambda _: (1, 2, 3))
    with rmq.open(path, "r+", config=SLOW) as writer, rmq.open(path) as reader:
        writer.commit_offsets("g", "Orders", {0: 1})
        writer.flush()
        reader.commit_offsets("g", "Orders", {1: 2})
        writer.commit_offsets("g", "Orders", {0: 3})
        writer.flush()
        assert offsets_of(path) == {"Orders@g": {"0": 3, "1": 2}}


def test_commits_are_told_when_a_flush_could_not_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(filled(tmp_path / "s"), "r+", config=SLOW) as store:
        store.commit_offsets("g", "Orders", {0: 3})
        with monkeypatch.context() as patched:
            patched.setattr(consumeroffsets, "_kept_file", lambda _: os.stat(tmp_path / "none"))
            with pytest.raises(FileNotFoundError):
                store.flush()
        assert store.groups() == {"g": {"Orders": {0: 3}}}
