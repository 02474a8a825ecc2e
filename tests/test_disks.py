"""Disks that are full or read-only, and files cut under a map: an OSError or a typed error, never a signal."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import SIZES, digests
from forks import error_in_child, in_child
from test_processes import CALLS, CONFIG, assert_goes_on, assert_holds, message, numbers

import rmq
from rmq.marks import SPARE_SIZE
from rmq.rebuilding import rebuild_sidecars

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


def answers(store: rmq.Store) -> list[object]:
    """What reads tell of a store whose log is that of another one."""
    topics = store.topics()
    queues = [(topic, queue_id) for topic, ids in topics.items() for queue_id in ids]
    told = store.info()
    return [topics, told.topic_count, told.queue_count, told.message_count, told.max_phy_offset,
            store.table("queues").read_all().to_pylist(), store.table("topics").read_all().to_pylist(),
            *(store.pull(*queue, 0, 10**6, tags="tag") for queue in queues),
            *(store.pull(*queue, 3, 2).next_queue_offset for queue in queues),
            *([part.tolist() for part in store.units(*queue, 1, 10**6)] for queue in queues),
            *(store.search_offset(*queue, 1_700_000_000_050, side) for queue in queues for side in ("LOWER", "UPPER")),
            store.lookup("UK7").body, store.lookup(("N1", 1, 0)).body, store.clean(dry_run=True).removed]  # fmt: skip


def put_on_a_full_disk(path: Path, leave: int, how: str) -> None:
    """Messages whose units and entries have no room, but for `leave` bytes, are read as those of a store with room."""
    fields = SIZES | {"mapped_file_size_commit_log": 1 << 19, "message_index_enable": how != "no index"}
    stores = [rmq.open(path / name / "s", "a", config=rmq.StoreConfig(**fields), clock=lambda: 1_700_000_000_000)
              for name in ("full", "roomy")]  # fmt: skip
    one = [message(i) for i in range(100)]
    two = [rmq.Message(f"N{i % 3}", b"%05d" % i, queue_id=i % 2, keys=["n"], tags="tag", uniq_key=f"UK{i}")
           for i in range(200)]  # fmt: skip
    for number, store in enumerate(stores):
        store.put_many(one)
        store.close()
        if how == "broker's":
            shutil.rmtree(store.path / "rmq")
        stores[number] = rmq.open(store.path, "r+", config=store.config, clock=count(1_700_000_000_010).__next__)
    with full(path / "full", leave):
        failed = 0
        for item in [*two, *one]:
            for store in stores:
                store.put(item)
            if item.body in (b"00000", b"00001", b"00099", b"00199"):
                with suppress(OSError):
                    stores[0].flush()
                    failed -= 1
                failed += 1
                if item is not two[0]:
                    assert stores[0].lookup(("N0", 0, 0)) == stores[1].lookup(("N0", 0, 0))
                    assert stores[0].topics() == stores[1].topics()
        assert failed > 0
        assert answers(stores[0]) == answers(stores[1])
        assert answers(stores[0]) == answers(stores[1])
        if how != "no index":
            for call in (lambda: stores[0].select_phy_offset_many("N0", ["n"]), lambda: stores[0].table("index")):
                with pytest.raises(OSError, match=r"No space left on device: '.*/full/s/(index|consumequeue)/"):
                    call()
    assert answers(stores[0]) == answers(stores[1])
    found = [store.select_phy_offset_many("N0", ["n"], max_num=64).to_pylist() for store in stores]
    assert found[0] == found[1]
    for store in stores:
        store.close()
    assert rmq.verify(path / "full" / "s") == []


@pytest.mark.slow
@pytest.mark.parametrize("leave", [0, 4096, 20480, 65536])
@pytest.mark.parametrize("how", ["ours", "broker's", "no index"])
def test_what_a_full_disk_keeps_from_the_queues_is_read_all_the_same(leave: int, how: str) -> None:
    with mounted("size=2m") as path, tempfile.TemporaryDirectory() as roomy:
        (path / "roomy").symlink_to(roomy)
        (path / "full").mkdir()
        in_child(lambda: put_on_a_full_disk(path, leave, how))


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


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_store_on_a_disk_without_a_free_block_opens_to_be_cleaned(how: str) -> None:
    def work(path: Path) -> None:
        store = rmq.open(path / "live", "a", config=CONFIG)
        store.put_many([message(i, b"x" * 300) for i in range(200)])
        store.flush()
        if how == "killed":
            store.put_many([message(i, b"x" * 300) for i in range(200, 210)])
            shutil.copytree(path / "live", path / "s")
            os.posix_fallocate(spare := os.open(path / "s/rmq/spare", os.O_RDWR), 0, SPARE_SIZE)  # a copy has holes
            os.close(spare)
        store.close()
        if how == "closed":
            (path / "live").rename(path / "s")
        with full(path, 0):
            with rmq.open(path / "s", "r+") as store:
                assert not (path / "s/rmq/spare").exists()
                assert store.clean(file_reserved_time=0).freed_bytes >= 40_000
                kept = numbers(store)
                assert 0 < len(kept) < 200
                store.put(message(1000))
            with rmq.open(path / "s") as reader:
                assert numbers(reader) == [*kept, 1000]
        rmq.open(path / "s", "r+").close()
        assert (path / "s/rmq/spare").stat().st_blocks * 512 >= SPARE_SIZE

    with mounted("size=4m") as path:
        in_child(lambda: work(path))


def test_a_disk_with_little_room_keeps_no_blocks_for_an_open() -> None:
    with mounted("size=1m") as path:
        with rmq.open(path / "s", "a", config=CONFIG) as store:
            store.put(message(0))
        assert not (path / "s/rmq/spare").exists()
        assert_goes_on(path / "s", [0])


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
        assert any(made.size for made in rebuild_sidecars(path / "s"))
        assert rmq.verify(path / "s").is_sound  # loaded: who may not write need not be able to read our modules
        for entry in [path, *path.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        before = digests(path, "s")
        for mode in (0, 0o555):  # a sidecar that may not be read is none
            (path / "s/rmq/sidecar").chmod(mode)
            in_child(lambda: read_only_only(path / "s", list(range(50))), user=NOBODY)
        for part in ("commitlog", "consumequeue", "index", "rmq"):
            (path / "s" / part).chmod(0)
            assert error_in_child(lambda: rmq.open(path / "s").query("T", "all"), user=NOBODY) == "PermissionError"
            (path / "s" / part).chmod(0o555)
        for name in ("meta.json", "manifest.json"):  # damage is told only of what was read
            (path / "s/rmq" / name).chmod(0)
            assert error_in_child(lambda: rmq.verify(path / "s"), user=NOBODY) == "PermissionError"
            (path / "s/rmq" / name).chmod(0o444)
        assert digests(path, "s") == before
    finally:
        for entry in [path, *path.rglob("*")]:
            entry.chmod(0o755)
        shutil.rmtree(path)


# ---- a limit of file sizes ----


def test_a_limit_of_file_sizes_is_an_error_that_passes_as_a_full_disk_is(tmp_path: Path) -> None:
    def work() -> None:
        sys.dont_write_bytecode = True  # CPython keeps a .pyc that the limit cuts short
        with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
            store.put(message(0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            store.put(message(1))
            assert_holds(store, [0, 1])
            with pytest.raises(OSError, match="File too large"):
                store.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            store.put(message(2))
            store.flush()
            assert_holds(store, [0, 1, 2])

    in_child(work)
    assert rmq.verify(tmp_path / "s") == []


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
