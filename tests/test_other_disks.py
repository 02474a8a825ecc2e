# SPDX-License-Identifier: Apache-2.0
"""Directories of a store that are links to another disk, and one disk of them that is full."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from test_groups import filled
from test_syncs import Disk, config, message, numbers, put_some

import rmq
from rmq import fastjson, topics
from rmq.filecache import FileCache
from rmq.marks import set_aside
from rmq.paths import StorePaths

FULL = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def linked(path: Path, part: str, far: Path) -> Path:
    """A store's part lies elsewhere from here on."""
    shutil.move(path / part, far)
    (path / part).symlink_to(far)
    return far


def test_a_damaged_index_file_on_another_disk_is_set_aside_on_the_store_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, far, replace = tmp_path / "s", tmp_path / "far", os.replace
    with rmq.open(path, "x", config=config()) as store:
        put_some(store, 0)
    damaged = max(linked(path, "index", far).iterdir())
    os.truncate(damaged, 50)
    content = damaged.read_bytes()

    def on_one_disk(source: Any, target: Any) -> None:
        if (far in Path(source).resolve().parents) != (far in Path(target).resolve().parents):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(source, target)

    monkeypatch.setattr(os, "replace", on_one_disk)
    disk = Disk(monkeypatch)
    with rmq.open(path, "r+") as store:
        assert numbers(store) == [*range(40)]
        assert len(list(store.query("T", "key39"))) == 1
    kept, = (file for file in (path / "rmq/cut").iterdir() if file.suffix != ".txt")
    assert kept.read_bytes() == disk._content[kept.stat().st_ino] == content
    assert rmq.verify(path) == []


def test_what_cannot_be_set_aside_leaves_no_part_of_it_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, paths = tmp_path / "far" / "20240101000000000", StorePaths(tmp_path / "s")
    source.parent.mkdir()
    source.write_bytes(bytes(1000))
    paths.own.mkdir(parents=True)

    def full(_: Path, target: Path) -> None:
        target.write_bytes(bytes(500))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def apart(old: Path, new: Path) -> None:
        if old == source:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(old, new)

    replace = os.replace
    monkeypatch.setattr(os, "replace", apart)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        set_aside(paths, source, "it is damaged")
    assert [*paths.cut.iterdir()] == []
    assert source.read_bytes() == bytes(1000)


@pytest.mark.parametrize("part", ["consumequeue", "index", "config", "rmq"])
def test_after_a_kill_the_names_in_linked_directories_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    far = linked(filled(tmp_path / "s"), part, tmp_path / "far")
    (far / "new/0").mkdir(parents=True)
    (tmp_path / "s/abort").touch()
    disk = Disk(monkeypatch)
    rmq.open(tmp_path / "s", "r+").close()
    assert {far, far / "new", far / "new/0"} <= set(disk.order)


def test_while_queues_have_no_room_the_timed_flush_makes_puts_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(cache: FileCache, path: Path, position: int, data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    disk = Disk(monkeypatch)
    with rmq.open(tmp_path / "s", "x", config=config(flush_interval_commit_log=20)) as store:
        put_some(store, 0)
        store.flush()
        with monkeypatch.context() as patched:
            patched.setattr(FileCache, "write", full)
            result = store.put(message(40))
            until(lambda: disk.holds(store, result))


def test_a_sync_that_fails_behind_a_flush_without_room_is_told_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    store = rmq.open(tmp_path / "s", "x", config=config())
    store.put(message(0))
    disk.failing = ("/commitlog/",)
    with monkeypatch.context() as patched:
        patched.setattr(store._flusher, "flush", FULL)
        store._flusher.flush_if_due()
    disk.failing = ()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.close()


def test_damage_that_ends_a_timed_flush_ends_none_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rmq.open(tmp_path / "s", "x", config=config(flush_interval_commit_log=5)) as store:
        lost = Mock(side_effect=rmq.CorruptFileError(tmp_path, 0, "pages are gone"))
        with monkeypatch.context() as patched:
            patched.setattr(store._flusher, "sync_log", lost)
            patched.setattr(store._flusher, "flush", FULL)
            store.put(message(0))
            until(lambda: lost.called)
        until(lambda: store._flusher._flushed == store.max_phy_offset)


def test_a_topics_json_that_would_be_too_large_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path / "s")
    file = path / "config/topics.json"
    before = file.read_bytes()
    for module in (fastjson, topics):
        monkeypatch.setattr(module, "CONFIG_LIMIT", len(before) + 10, raising=False)
    with rmq.open(path, "r+") as store:
        store.put(rmq.Message("New", b""))
        store.flush()
    assert "left alone" in caplog.text
    rmq.open(path, "r+").close()
    assert file.read_bytes() == before
    with rmq.open(path) as reader:
        assert [*reader.topics()] == ["New", "Orders"]
