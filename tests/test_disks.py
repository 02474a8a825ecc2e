"""Disks that are full or read-only, and files cut under a map: an OSError or a typed error, never a signal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import digests
from test_processes import (
    CALLS,
    CONFIG,
    SIZES,
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


def fill_disk(path: Path, leave: int, put: Callable[[rmq.Store, int], None], config: rmq.StoreConfig) -> None:
    with rmq.open(path / "s", "a", config=config) as store:
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
            assert [int(found.body[:5]) for found in store.query("T", "all", limit=None)] == acknowledged[::-1]
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
@pytest.mark.parametrize("how", ["put", "flushed", *(pytest.param(how, marks=pytest.mark.faults)
                                                     for how in ("put_many", "put_batch", "SYNC_FLUSH"))])  # fmt: skip
def test_a_full_disk_is_an_error_that_passes(leave: int, how: str) -> None:
    def put(store: rmq.Store, i: int) -> None:
        if how == "put_many":
            store.put_many([message(i, b"x" * 300)])
        elif how == "put_batch":
            store.put_batch([message(i, b"x" * 300)])
        else:
            store.put(message(i, b"x" * 300))
        if how == "flushed" and i % 5 == 0:
            with suppress(OSError):
                store.flush()

    fields = {"flush_disk_type": "SYNC_FLUSH"} if how == "SYNC_FLUSH" else {}
    with mounted("size=1m") as path:
        in_child(lambda: fill_disk(path, leave, put, rmq.StoreConfig(**SIZES | fields)))


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


@pytest.mark.parametrize("leave", [0, 30_000, 300_000])
def test_many_messages_on_a_full_disk_are_stored_up_to_what_the_error_says(leave: int) -> None:
    def table(first: int) -> pa.Table:
        rows = range(first, first + 100)
        return pa.table({"topic": ["T"] * 100, "body": [b"%05d" % i + b"x" * 300 for i in rows], "tags": ["tag"] * 100,
                         "queue_id": pa.array([i % 2 for i in rows], pa.int32()),
                         "keys": [[f"key{i}", "all"] for i in rows]})  # fmt: skip

    def work(path: Path) -> None:
        with rmq.open(path / "s", "a", config=CONFIG) as store:
            with full(path, leave):
                with pytest.raises(OSError, match="No space left") as caught:
                    store.put_many(table(first) for first in range(0, 5000, 100))
                stored = caught.value.stored  # type: ignore[attr-defined]
                assert stored % 100 == 0
                assert numbers(store) == list(range(stored))
            assert_holds(store, list(range(stored)))
            store.put_many([message(i) for i in range(stored, stored + 100)])
        assert_goes_on(path / "s", list(range(stored + 100)))

    with mounted("size=2m") as path:
        in_child(lambda: work(path))


def test_a_full_disk_while_a_torn_tail_is_kept_changes_nothing() -> None:
    def work(path: Path) -> None:
        with rmq.open(path / "live", "a", config=CONFIG) as store:
            store.put_many([message(i) for i in range(20)])
            store.flush()
            torn = store.put(message(20, b"torn" * 700))
            shutil.copytree(path / "live", path / "s")
        with open(path / "s/commitlog" / f"{torn.phy_offset // 4096 * 4096:020d}", "r+b") as file:
            os.pwrite(file.fileno(), bytes(600), torn.phy_offset % 4096 + torn.size - 700)
        before = digests(path / "s", "commitlog", "consumequeue", "index")
        with full(path, 0):
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    rmq.open(path / "s", "r+")
                assert digests(path / "s", "commitlog", "consumequeue", "index") == before
            with rmq.open(path / "s") as reader:
                assert_holds(reader, list(range(20)))
        assert_goes_on(path / "s", list(range(20)))
        assert b"torn" * 10 in b"".join(file.read_bytes() for file in (path / "s/rmq/cut").glob("*.bin"))

    with mounted("size=1m") as path:
        in_child(lambda: work(path))


@pytest.mark.faults
@pytest.mark.parametrize("leave", [4096, 65536, 200_000])
def test_an_ingest_on_a_full_disk_ends_with_a_line_and_what_it_stored_is_there(leave: int) -> None:
    with mounted("size=2m") as path, tempfile.NamedTemporaryFile("w", suffix=".jsonl") as lines:
        lines.writelines(f'{{"id": "{i}", "text": "{"x" * 100}"}}\n' for i in range(20_000))
        lines.flush()
        with rmq.open(path / "s", "a", config=CONFIG) as store:
            store.put_many([message(i) for i in range(10)])
        command = [sys.executable, "-m", "rmq", "ingest", path / "s", lines.name, "--topic", "I", "--key-column", "id"]
        with full(path, leave):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            with rmq.open(path / "s") as reader:
                stored = reader.scan(topics=["I"], columns=["keys"]).read_all()["keys"].to_pylist()
        assert done.returncode == 4, done.stderr
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr
        assert stored == [[str(i)] for i in range(len(stored))]
        with rmq.open(path / "s", "r+") as store:
            assert numbers_of(store, "I") == len(stored)
            store.put_many([message(i) for i in range(10, 40)])
            assert numbers_of(store, "T") == 40
            assert [found.keys for found in store.query("I", "0")] == ([("0",)] if stored else [])


def numbers_of(store: rmq.Store, topic: str) -> int:
    return store.scan(topics=[topic], columns=["queue_id"]).read_all().num_rows


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
