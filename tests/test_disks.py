"""Disks that are full or read-only, and files cut under a map: an OSError or a typed error, never a signal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import digests
from test_processes import (
    CALLS,
    CONFIG,
    assert_goes_on,
    assert_holds,
    error_in_child,
    in_child,
    message,
    numbers,
)

import rmq

NOBODY = 65534


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    """A tmpfs of its own; skips where mounting is not allowed."""
    path = Path(tempfile.mkdtemp(prefix="rmq-mount-"))
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rmq-test", path], capture_output=True, check=False)
    if done.returncode:
        path.rmdir()
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
        path.rmdir()


# ---- full disk -------------------------------------------------------------------------------------------


@contextmanager
def full(path: Path, leave: int) -> Iterator[None]:
    """Fill the file system but for so many bytes; frees them again."""
    ballast = path / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(path).f_bavail * os.statvfs(path).f_frsize - leave)
    yield
    ballast.unlink()


def fill_disk(path: Path, leave: int, put: Callable[[rmq.Store, int], None]) -> None:
    with rmq.open(path / "s", "a", config=CONFIG) as store:
        acknowledged = []
        for i in range(8):
            put(store, i)
            acknowledged.append(i)
        with full(path, leave):
            for i in range(8, 2000):
                try:
                    put(store, i)
                except OSError as error:
                    failed = error
                    break
                acknowledged.append(i)
            assert failed.errno == errno.ENOSPC
            assert numbers(store) == acknowledged
            with suppress(OSError):
                assert_holds(store, acknowledged)
            with rmq.open(path / "s") as reader:
                assert_holds(reader, acknowledged)
        for i in range(5000, 5040):
            put(store, i)
            acknowledged.append(i)
        assert_holds(store, acknowledged)
        store.flush()
    assert_goes_on(path / "s", acknowledged)


@pytest.mark.parametrize("leave", [0, 4096, 12288, 40960])
@pytest.mark.parametrize("how", ["put", "flushed"])
def test_a_full_disk_is_an_error_that_passes(leave: int, how: str) -> None:
    def put(store: rmq.Store, i: int) -> None:
        store.put(message(i, b"x" * 300))
        if how == "flushed" and i % 5 == 0:
            with suppress(OSError):
                store.flush()

    with mounted("size=1m") as path:
        in_child(lambda: fill_disk(path, leave, put))


@pytest.mark.parametrize("leave", [0, 4096, 8192, 16384])
def test_a_full_disk_at_open_and_close_loses_nothing(leave: int) -> None:
    def work(path: Path) -> None:
        store = rmq.open(path / "s", "a", config=CONFIG)
        for i in range(20):
            store.put(message(i))
        with full(path, leave):
            with suppress(OSError):
                store.close()
            assert store.closed
            with rmq.open(path / "s") as reader:
                assert_holds(reader, list(range(20)))
            with suppress(OSError):
                rmq.open(path / "s", "r+").close()
            with suppress(OSError):
                rmq.open(path / "new", "a", config=CONFIG).close()
        rmq.open(path / "new", "a", config=CONFIG).close()
        assert_goes_on(path / "s", list(range(20)))

    with mounted("size=1m") as path:
        in_child(lambda: work(path))


# ---- read-only -------------------------------------------------------------------------------------------


def read_only_only(path: Path, rows: list[int]) -> None:
    with rmq.open(path) as store:
        assert_holds(store, rows)
    for mode in ("r+", "a"):
        with pytest.raises(OSError):  # noqa: PT011
            rmq.open(path, mode)
    with pytest.raises(OSError):  # noqa: PT011
        rmq.open(path / "new", "a")


@pytest.mark.parametrize("closed", [True, False])
def test_a_store_on_a_read_only_mount_is_read_and_never_written(closed: bool) -> None:
    with mounted("size=2m") as path:
        store = rmq.open(path / "live", "a", config=CONFIG)
        store.put_many([message(i) for i in range(50)])
        shutil.copytree(path / "live", path / "killed")
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        read_only_only(path / ("live" if closed else "killed"), list(range(50)))
        subprocess.run(["mount", "-o", "remount,rw", path], check=True)
        assert_goes_on(path / ("live" if closed else "killed"), list(range(50)))


def test_a_user_who_may_not_write_reads_and_is_refused() -> None:
    path = Path(tempfile.mkdtemp(prefix="rmq-user-"))
    try:
        with rmq.open(path / "s", "a", config=CONFIG) as store:
            store.put_many([message(i) for i in range(50)])
        for entry in [path, *path.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        before = digests(path, "s")
        in_child(lambda: read_only_only(path / "s", list(range(50))), user=NOBODY)
        for part in ("commitlog", "consumequeue", "index", "rmq"):
            (path / "s" / part).chmod(0)
            assert error_in_child(lambda: rmq.open(path / "s").query("T", "all"), user=NOBODY) == "PermissionError"
            (path / "s" / part).chmod(0o555)
        assert digests(path, "s") == before
    finally:
        for entry in [path, *path.rglob("*")]:
            entry.chmod(0o755)
        shutil.rmtree(path)


# ---- files that change under a reader --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_queue_file_cut_under_an_open_store_kills_nobody(tmp_path: Path, mode: str) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put_many([message(i) for i in range(50)])

    def work() -> None:
        store = rmq.open(tmp_path / "s", mode)
        assert_holds(store, list(range(50)))
        root = tmp_path / "s" / "consumequeue"
        for path in [path for path in root.rglob("*") if path.is_file()]:
            os.truncate(path, 0)
        for call in CALLS[1:]:
            with suppress(rmq.RmqError, OSError, KeyError):
                call(store)
        with suppress(rmq.RmqError, OSError):
            store.close()

    in_child(work)
