# SPDX-License-Identifier: Apache-2.0
"""Directories of a store that are links to another disk, and one disk of them that is full."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_groups import filled
from test_syncs import Disk, config, message, numbers, put_some

import rmq
from rmq import fastjson, topics
from rmq.filecache import FileCache


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
            result, deadline = store.put(message(40)), time.monotonic() + 5
            while not disk.holds(store, result) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert disk.holds(store, result)


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
