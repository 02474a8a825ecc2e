# SPDX-License-Identifier: Apache-2.0
"""What a reader looks at before each answer: no change of a directory is missed, one that rests costs no listing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq
import rmq.directorywatch
from rmq.directorywatch import SETTLED_NS, TRUSTED_S, DirectoryWatch

TICK_S = 0.02  # longer than one of the clock that file systems note


class File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode = path.stat().st_ino


def filled(folder: Path) -> list[File]:
    folder.mkdir()
    for name in "ab":
        (folder / name).write_bytes(b"")
    return [File(folder / name) for name in "ab"]


def replace(folder: Path) -> None:
    """Another file of that name, and the directory's times as they were."""
    times = folder.stat()
    (folder / "new").write_bytes(b"")
    os.replace(folder / "new", folder / "a")
    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_all(folder: Path) -> None:
    """Another directory of that name, with the times of the one before."""
    times = folder.stat()
    filled(folder.with_name("other"))
    shutil.rmtree(folder)
    folder.with_name("other").rename(folder)
    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


class Clock:
    """Times as if some seconds had passed, which stand else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        monkeypatch.setattr(rmq.directorywatch, "time", self)

    def monotonic(self) -> float:
        return self.ahead_s

    def time_ns(self) -> int:
        return time.time_ns() + int(self.ahead_s * 1e9)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories that were listed."""
    names: list[str] = []
    real = os.scandir

    def scandir(name: str) -> Any:
        names.append(name)
        return real(name)

    monkeypatch.setattr(os, "scandir", scandir)
    return names


@pytest.mark.parametrize("rests", [False, True], ids=["changed of late", "rests"])
@pytest.mark.parametrize("change", [
    lambda folder: (folder / "c").write_bytes(b""), lambda folder: (folder / "b").unlink(), replace, replace_all,
    lambda folder: (folder / "a").rename(folder / "A"),
])  # fmt: skip
def test_no_change_of_a_directory_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            change: Callable[[Path], None], *, rests: bool) -> None:  # fmt: skip
    clock, folder = Clock(monkeypatch), tmp_path / "folder"
    files = filled(folder)
    watch = DirectoryWatch([folder, *([] if rests else [tmp_path / "missing"])])
    if rests:
        time.sleep(TICK_S)
        clock.ahead_s = 2 * SETTLED_NS / 1e9
    assert not watch.is_unchanged(files)
    watch.keep(files)
    assert watch.is_unchanged(files)
    assert not watch.is_unchanged(list(files))
    change(folder)
    assert not watch.is_unchanged(files)
    watch.keep(files)  # no longer what is there
    assert not watch.is_unchanged(files)


def test_a_directory_that_rests_is_listed_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    clock, folder = Clock(monkeypatch), tmp_path / "folder"
    files = filled(folder)
    watch = DirectoryWatch([folder])
    assert not watch.is_unchanged(files)
    watch.keep(files)
    for _ in range(3):
        assert watch.is_unchanged(files)
    assert len(listed) == 4  # it changed of late
    clock.ahead_s = SETTLED_NS / 1e9 + 1
    for _ in range(3):
        assert watch.is_unchanged(files)
    assert len(listed) == 5
    clock.ahead_s += TRUSTED_S
    assert watch.is_unchanged(files)
    assert len(listed) == 6
    watch.forget()
    assert not watch.is_unchanged(files)


def test_a_change_without_a_time_is_seen_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on mounts of object stores, whose directories keep one time."""
    clock, folder = Clock(monkeypatch), tmp_path / "folder"
    files = filled(folder)
    monkeypatch.setattr(rmq.directorywatch, "_settled", lambda _: (0, 0, 0, 0))
    watch = DirectoryWatch([folder])
    assert not watch.is_unchanged(files)
    watch.keep(files)
    (folder / "c").write_bytes(b"")
    assert watch.is_unchanged(files)
    clock.ahead_s = TRUSTED_S
    assert not watch.is_unchanged(files)


def test_readers_of_a_store_that_rests_list_no_directory_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    clock = Clock(monkeypatch)
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=100)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("T", b"x" * 1000, keys=f"k{i}") for i in range(300)])
    clock.ahead_s = 2 * SETTLED_NS / 1e9
    with rmq.open(tmp_path / "s", "r") as store:
        assert [m.queue_offset for m in store.query("T", "k7")] == [7]
        listed.clear()
        for number in range(20):
            assert [m.queue_offset for m in store.query("T", f"k{number}")] == [number]
            assert store.pull("T", 0, number, limit=1).messages[0].keys == (f"k{number}",)
        assert listed == []
        with rmq.open(tmp_path / "s", "r+") as writer:
            writer.put_many([rmq.Message("T", b"x" * 1000, keys=f"k{i}") for i in range(300, 600)])
            assert [m.queue_offset for m in store.query("T", "k599")] == [599]
            assert store.pull("T", 0, 599).messages[0].keys == ("k599",)
