# SPDX-License-Identifier: Apache-2.0
"""Errors and interrupts amid commits of consumer groups and amid cleaning: the next call makes up for them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_interrupts import Interrupter

import rmq
from rmq import consumeroffsets, segment

SMALL = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=100,
                        max_index_num=100, flush_interval_commit_log=10**7)  # fmt: skip


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_an_open_that_cannot_read_the_offsets_now_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """They say more than the log has after power loss: what is put there would be passed over."""
    first, after = tmp_path / "first", tmp_path / "after"
    with rmq.open(first, "x", config=SMALL) as store:
        store.put_many([rmq.Message("t", b"old")] * 10)
        store.flush()
        shutil.copytree(first, after)
        store.put_many([rmq.Message("t", b"lost")] * 20)
        store.commit_offsets("g", "t", {0: 30})
        store.flush()
        shutil.copytree(first / "config", after / "config", dirs_exist_ok=True)
    real = os.open

    def fails(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("consumerOffset.json"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        with pytest.raises(OSError, match=r"consumerOffset\.json"):
            rmq.open(after, "r+")
    with rmq.open(after, "r+") as store:
        assert store.groups() == {"g": {"t": {0: 10}}}


def test_a_commit_whose_directory_could_not_be_synced_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put_many([rmq.Message("t", b"x")] * 10)
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        is_directory = os.path.isdir(f"/proc/self/fd/{descriptor}")
        if is_directory and not synced:
            synced.append("failed")
            raise OSError(errno.EIO, "io")
        synced.append("directory" if is_directory else "file")
        real(descriptor)

    with rmq.open(tmp_path / "s") as reader:
        os.makedirs(tmp_path / "s" / "config", exist_ok=True)
        reader.commit_offsets("g", "t", {0: 4})
        monkeypatch.setattr(os, "fsync", lambda descriptor: fsync(descriptor) if os.path.isdir(
            f"/proc/self/fd/{descriptor}") else real(descriptor))  # fmt: skip
        with pytest.raises(OSError, match="io"):
            reader.commit_offsets("g", "t", {0: 5})
        assert reader.groups() == {"g": {"t": {0: 5}}}
        reader.commit_offsets("g", "t", {0: 5})
        assert synced == ["failed", "directory"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_queues_that_must_stay_keep_no_other_files_and_stay_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_damaged: bool
) -> None:
    """Another process holds the offsets' lock, or what it wrote cannot be read."""
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.1)
    path = tmp_path / "s"
    with rmq.open(path, "x", config=SMALL) as store, (path / "rmq/offsets.lock").open("a") as lock:
        store.put_many([rmq.Message("old", b"x" * 200)] * 50)
        store.put_many([rmq.Message("new", b"x" * 2000, keys=f"k{number}") for number in range(300)])
        store.commit_offsets("g", "old", {0: 50})
        store.flush()
        if is_damaged:
            time.sleep(0.01)
            (path / "config/consumerOffset.json").write_text("{broken")
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(rmq.CorruptFileError if is_damaged else BlockingIOError):
            store.clean(file_reserved_time=0, expired_queues=True, limit=None)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert len(os.listdir(path / "index")) == 2
        assert len(os.listdir(path / "consumequeue/new/0")) == 1
        assert '"old"' in (path / "rmq/manifest.json").read_text()
        with rmq.open(path) as reader:
            assert reader.topics() == store.topics()
        if is_damaged:
            (path / "config/consumerOffset.json").unlink()


def commit(path: Path) -> Callable[[int], Any]:
    reader = rmq.open(path)
    return lambda number: reader.commit_offsets("g", "t", {0: number % 10})


def clean(path: Path) -> Callable[[int], Any]:
    writer = rmq.open(path, "r+", config=SMALL)

    def call(number: int) -> None:
        writer.put_many([rmq.Message("expired", b"x" * 2000)] * 35 + [rmq.Message("t", b"x" * 2000)] * 35)
        writer.clean(file_reserved_time=0, expired_queues=True, limit=None)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("begin", [commit, clean])
def test_an_interrupt_that_somebody_keeps_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path], Callable[[int], Any]]
) -> None:
    """At every place of contextlib, whose generators an exception keeps alive with its traceback."""
    monkeypatch.setattr(consumeroffsets, "WAIT_S", 0.2)
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put_many([rmq.Message("t", b"x")] * 10)
    call, kept = begin(tmp_path / "s"), []
    for number in itertools.count(1):
        interrupter, interrupts = Interrupter(number, contextlib.__file__), len(kept)

        def keep(number: int = number) -> None:
            try:
                call(number)
            except KeyboardInterrupt as error:
                kept.append(error)

        interrupter.run(keep)
        if len(kept) == interrupts:
            break
        call(number + 1)  # RuntimeError or BlockingIOError while a lock is held
    assert len(kept) > 8


def test_offsets_that_are_another_user_s_do_not_end_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root's commit leaves them: each flush tells, and all else goes on."""
    refusals = [1]

    def refused(path: Path, *arguments: int) -> int:
        if refusals and path.name == "offsets.lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_regular(path, *arguments)

    open_regular = consumeroffsets.open_regular
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        monkeypatch.setattr(consumeroffsets, "open_regular", refused)
        store.put(rmq.Message("t", b"a"))
        store.commit_offsets("g", "t", {0: 1})
        for _ in range(2):
            with pytest.raises(PermissionError, match=r"offsets\.lock"):
                store.flush()
        store.put(rmq.Message("t", b"b"))
        refusals.clear()
    with rmq.open(tmp_path / "s") as store:
        assert len(store.pull("t", 0).messages) == 2
        assert store.groups() == {"g": {"t": {0: 1}}}


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_commit_keeps_the_offsets_readable_and_writable_for_whom_they_were(tmp_path: Path, mode: Any) -> None:
    """A broker may run as another user than who commits."""
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put(rmq.Message("t", b"a"))
        store.commit_offsets("g", "t", {0: 1})
    file = tmp_path / "s/config/consumerOffset.json"
    file.chmod(0o660)
    if os.getuid() == 0:
        os.chown(file, 12345, 23456)
    before = file.stat()
    with rmq.open(tmp_path / "s", mode) as store:
        store.commit_offsets("other", "t", {0: 1})
    after = file.stat()
    assert "other" in file.read_text()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL])
def test_a_commit_whose_file_cannot_be_given_to_its_owner_leaves_it_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """EINVAL: a container knows no such user. A broker must read what its groups consumed."""
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put(rmq.Message("t", b"a"))
        store.commit_offsets("g", "t", {0: 1})
    file = tmp_path / "s/config/consumerOffset.json"
    file.chmod(0o640)
    real, owner = segment.hand_on, (os.getuid() + 1, os.getgid() + 1)

    def handed(old: os.stat_result, path: Path) -> None:
        values = list(old)
        values[4:6] = owner
        real(os.stat_result(values), path)

    def refused(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(segment, "hand_on", handed)
    monkeypatch.setattr(os, "chown", refused)
    with rmq.open(tmp_path / "s") as store:
        store.commit_offsets("other", "t", {0: 1})
    assert file.stat().st_mode & 0o777 == 0o644


def test_offsets_that_become_a_link_are_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "s/config/consumerOffset.json"
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put(rmq.Message("t", b"a"))
        store.commit_offsets("g", "t", {0: 1})
        store.flush()
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        store.commit_offsets("g", "t", {0: 0})
        with pytest.raises(rmq.CorruptFileError, match="symbolic link"):
            store.flush()
        assert file.is_symlink()
        file.unlink()
