"""Other processes and sudden ends: locks, forks, kill -9 anywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES, digests
from forks import error_in_child, fork, in_child, lock_of_a_broker

import rmq
from rmq.lock import Holder, lock_holder

pytestmark = pytest.mark.synced

CONFIG = rmq.StoreConfig(**SIZES)


def message(i: int, body: bytes = b"") -> rmq.Message:
    return rmq.Message("T", b"%05d" % i + body, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2)


def numbers(store: rmq.Store) -> list[int]:
    return [int(body[:5]) for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()]


def assert_holds(store: rmq.Store, rows: list[int]) -> None:
    """Scan, query, pull and topics give exactly these messages."""
    assert numbers(store) == rows
    assert [int(found.body[:5]) for found in store.query("T", "all", limit=None)] == rows[::-1]
    for queue_id in (0, 1):
        wanted = [i for i in rows if i % 2 == queue_id]
        assert [int(found.body[:5]) for found in store.pull("T", queue_id, 0, 10**6).messages] == wanted
        assert store.topics().get("T", {}).get(queue_id, (0, 0)) == (0, len(wanted))


def assert_goes_on(path: Path, rows: list[int]) -> None:
    """Opens for writing, holds the rows, takes more, agrees with itself; a second open changes nothing."""
    with rmq.open(path, "r+") as store:
        assert_holds(store, rows)
        store.put_many([message(i) for i in range(90000, 90030)])
        assert_holds(store, rows + list(range(90000, 90030)))
    assert oracle.check_store(path, 10, 30) == []
    before = digests(path, "commitlog", "consumequeue", "index", "config", "rmq/cut")
    rmq.open(path, "r+").close()
    assert digests(path, "commitlog", "consumequeue", "index", "config", "rmq/cut") == before


# ---- locks -----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    """Holds messages 0 to 9, and afterwards still."""
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as opened:
        opened.put_many([message(i) for i in range(10)])
        yield opened
        assert_holds(opened, list(range(10)))
    assert_goes_on(tmp_path / "s", list(range(10)))


@pytest.mark.parametrize("mode", ["r+", "a"])
def test_a_second_writer_is_told_the_pid_of_the_first(store: rmq.Store, mode: str) -> None:
    with pytest.raises(rmq.StoreLockedError, match=str(os.getpid())) as caught:
        rmq.open(store.path, mode)
    assert caught.value.pid == os.getpid()

    def second() -> int | None:
        try:
            rmq.open(store.path, mode)
        except rmq.StoreLockedError as error:
            return error.pid
        return -1

    assert in_child(second) == os.getpid()
    code = f"import rmq\ntry: rmq.open({str(store.path)!r}, {mode!r})\nexcept rmq.StoreLockedError as e: print(e.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.getpid()}\n"


def test_x_on_an_open_store_is_refused(store: rmq.Store) -> None:
    with pytest.raises((rmq.StoreLockedError, FileExistsError)):
        rmq.open(store.path, "x")


@pytest.mark.parametrize("stale", [None, '{"pid": 4194303}', "garbage", "{}"])
def test_a_writer_that_is_no_rmq_is_named_by_its_own_pid(tmp_path: Path, stale: str | None) -> None:
    """A broker holds the lock; `owner` may still tell of a process that is gone."""
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put_many([message(i) for i in range(10)])
    if stale is not None:
        (tmp_path / "s/rmq/owner").write_text(stale)
    with lock_of_a_broker(tmp_path / "s") as pid:
        with pytest.raises(rmq.StoreLockedError) as caught:
            rmq.open(tmp_path / "s", "r+")
        assert lock_holder(tmp_path / "s/lock") is Holder.OTHER
        with rmq.open(tmp_path / "s") as reader:
            assert_holds(reader, list(range(10)))
    assert lock_holder(tmp_path / "s/lock") is None
    assert caught.value.pid == pid
    assert_goes_on(tmp_path / "s", list(range(10)))


def test_the_kernel_tells_that_this_library_holds_the_lock(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG):
        assert lock_holder(tmp_path / "s/lock") is Holder.RMQ
    assert lock_holder(tmp_path / "s/lock") is None
    assert lock_holder(tmp_path / "none") is None


def test_a_reader_beside_a_writer_works_whatever_abort_and_owner_hold(store: rmq.Store) -> None:
    for data in (b"\xff\xfe", b"", b"12 34", b"9" * 5000, b"\0" * 100):
        for name in ("abort", "rmq/owner"):
            kept = (store.path / name).read_bytes()
            (store.path / name).write_bytes(data)
            with rmq.open(store.path) as reader:
                assert_holds(reader, list(range(10)))
            with pytest.raises(rmq.StoreLockedError):
                rmq.open(store.path, "r+")
            (store.path / name).write_bytes(kept)


# ---- forks -----------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_closes(tmp_path: Path) -> None:
    store = rmq.open(tmp_path / "s", "a", config=CONFIG)
    pid = fork(lambda: time.sleep(60))
    try:
        assert error_in_child(lambda: rmq.open(tmp_path / "s", "r+")) == "StoreLockedError"
        store.close()
        rmq.open(tmp_path / "s", "r+").close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def work() -> None:
        store = rmq.open(tmp_path / "s", "a", config=CONFIG)
        store.put(message(0))
        if not os.fork():
            os.write(writing, os.getpid().to_bytes(4, "big"))  # once it runs it has let go of the lock
        time.sleep(60)
        store.close()

    parent = fork(work)
    child = int.from_bytes(os.read(reading, 4), "big")
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert_goes_on(tmp_path / "s", [0])
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)

CALLS: list[Callable[[rmq.Store], Any]] = [
    lambda s: s.put(message(99)),
    lambda s: s.put_many([message(99)]),
    lambda s: s.put_batch([message(99)]),
    lambda s: s.flush(),
    lambda s: s.query("T", "all"),
    lambda s: s.query_many("T", ["all"]),
    lambda s: s.select_phy_offset_many("T", ["all"]),
    lambda s: s.pull("T"),
    lambda s: s.lookup(0),
    lambda s: s.search_offset("T", 0, 0),
    lambda s: s.scan(),
    lambda s: s.topics(),
    lambda s: s.min_phy_offset,
    lambda s: s.max_phy_offset,
    lambda s: s.__arrow_c_stream__(),
    lambda s: s.__enter__(),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path, mode: str) -> None:
    rmq.open(tmp_path / "s", "a", config=CONFIG).close()
    with rmq.open(tmp_path / "s", "r+") as writer:
        writer.put_many([message(i) for i in range(10)])
        with writer if mode == "r+" else rmq.open(tmp_path / "s") as store:
            begun = store.scan(batch_rows=1)
            for call in CALLS:
                assert error_in_child(lambda call=call: call(store)) == "StoreClosedError"
            assert error_in_child(begun.read_all) == "StoreClosedError"
            assert error_in_child(store.close) == "none"
            assert error_in_child(store.__del__) == "none"
            assert (tmp_path / "s/abort").exists()
            assert in_child(lambda: numbers(rmq.open(tmp_path / "s"))) == list(range(10))
            assert error_in_child(lambda: rmq.open(tmp_path / "s", "r+")) == "StoreLockedError"
            assert_holds(store, list(range(10)))
    assert_goes_on(tmp_path / "s", list(range(10)))


def test_what_a_daemon_prints_after_it_closed_its_standard_descriptors_goes_into_no_file(tmp_path: Path) -> None:
    def daemon() -> list[str]:
        for descriptor in range(3):
            os.close(descriptor)
        with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
            store.put(message(0))
            os.close(1)
            for number in range(1, 60):  # new segments, queue and index files
                store.put(message(number))
            places = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in range(3)]
            os.write(1, b"x" * 100)
            os.write(2, b"x" * 100)
        return places

    assert in_child(daemon) == ["/dev/null"] * 3
    with rmq.open(tmp_path / "s", "r+") as store:
        assert_holds(store, list(range(60)))


def test_a_child_that_ends_by_itself_leaves_the_parents_store_alone(store: rmq.Store) -> None:
    assert os.waitpid(fork(store.close), 0)[1] == 0
    with pytest.raises(rmq.StoreLockedError):
        rmq.open(store.path, "r+")


# ---- kill ------------------------------------------------------------------------------------------------

WRITER = """
import sys, rmq
config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=30, flush_disk_type=sys.argv[2])
store = rmq.open(sys.argv[1], "a", config=config)
i = len(store.scan(columns=["flag"]).read_all())
while True:
    store.put(rmq.Message("T", b"%05d" % i, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2))
    i += 1
    if i % 7 == 0 or sys.argv[2] == "SYNC_FLUSH":
        if sys.argv[2] != "SYNC_FLUSH":
            store.flush()
        print(i, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_a_killed_writer_loses_nothing_that_was_flushed(tmp_path: Path, flush: str) -> None:
    done = 0
    for lines in (3, 20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "s"), flush], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(lines):
            done = int(writer.stdout.readline())
        writer.kill()
        done = int(([str(done).encode(), *writer.stdout.read().splitlines()])[-1])
        writer.wait()
        with rmq.open(tmp_path / "s") as store:
            seen = numbers(store)
            assert_holds(store, list(range(len(seen))))
        assert len(seen) >= done
        with rmq.open(tmp_path / "s", "r+") as store:
            assert_holds(store, list(range(len(seen))))
        assert oracle.check_store(tmp_path / "s", 10, 30) == []
    assert_goes_on(tmp_path / "s", list(range(len(seen))))


class Snapshots:
    """Copies a store before every system call that changes files: what a kill -9 there leaves."""

    NAMES = ("open", "ftruncate", "pwrite", "write", "posix_fallocate", "replace", "unlink", "mkdir")

    def __init__(self, path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Path, int]] = []
        self.returned = 0  # puts that have returned
        self._path, self._images, self._busy = path, images, False
        self._last: dict[str, str] = {}
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if not self._busy and self._path.exists():
                self._busy = True
                now = digests(self._path, ".")
                if now != self._last:
                    image = self._images / f"{len(self.taken):04d}-{call.__name__}"
                    shutil.copytree(self._path, image)
                    self.taken.append((image, self.returned))
                self._last, self._busy = now, False
            return call(*arguments, **options)

        return wrapper


def assert_recovers(image: Path, returned: int) -> int:
    """Opens, holds at least what was returned, takes more, agrees with itself; returns how many there were."""
    with rmq.open(image, "a", config=CONFIG) as store:
        rows = numbers(store)
        assert rows == list(range(len(rows)))
        assert len(rows) >= returned
        store.put_many([message(i) for i in range(90000, 90030)])
        assert_holds(store, rows + list(range(90000, 90030)))
    assert oracle.check_store(image, 10, 30) == []
    return len(rows)


@pytest.mark.slow
def test_a_writer_killed_before_any_system_call_comes_back_whole(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        snapshots = Snapshots(tmp_path / "s", tmp_path, patch)
        with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
            for i in range(28):
                store.put(message(i, b"x" * 200))
                snapshots.returned = i + 1
                if i == 13:
                    store.flush()
    faults = []
    for image, returned in snapshots.taken:
        try:
            assert_recovers(image, returned)
        except Exception as error:
            faults.append(f"{image.name}, {returned} puts returned: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_a_recovery_killed_before_any_system_call_can_be_run_again(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "live", "a", config=CONFIG) as store:
        store.put_many([message(i, b"x" * 200) for i in range(20)])
        store.flush()
        for i in range(20, 40):
            store.put(message(i, b"x" * 200))
        shutil.copytree(tmp_path / "live", tmp_path / "s")
    with open(tmp_path / "s/commitlog" / f"{4096 * 3:020d}", "r+b") as file:
        file.seek(1000)  # a torn tail
        file.write(b"torn" * 50)
    shutil.copytree(tmp_path / "s", tmp_path / "judge")
    with rmq.open(tmp_path / "judge", "r+") as store:
        rows = numbers(store)
    faults = []
    with pytest.MonkeyPatch.context() as patch:
        snapshots = Snapshots(tmp_path / "s", tmp_path, patch)
        rmq.open(tmp_path / "s", "r+").close()
    for image, _ in snapshots.taken:
        try:
            assert assert_recovers(image, len(rows)) == len(rows)
        except Exception as error:
            faults.append(f"{image.name}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


ODD = [
    {"body": bytes(3000)},
    {"body": b"", "properties": {"a": "\0" * 1500}},
    {"body": b"x", "properties": {"a\0": "b"}},
    {"body": b"x", "raw_properties": b""},
    {"body": b"x", "raw_properties": b"no separators"},
    {"body": b"x", "raw_properties": b"\1\2\1\2"},
    {"body": b"x", "raw_properties": b"\xff\1\xfe\2"},
    {"body": b"x", "raw_properties": bytes(1500)},
    {"body": b"x", "topic": "\x7f \n"},
    {"body": b"x", "topic": "%RETRY%" + "a" * 248},
    {"body": b"x", "sys_flag": 4},
    {"body": b"x", "sys_flag": 12},
    {"body": b"x", "sys_flag": 8, "prepared_transaction_offset": -5},
    {"body": b"x", "born_timestamp": -1},
    {"body": b"x", "born_timestamp": 0},
    {"body": b"x", "born_host": "[::1]:1"},
    {"body": b"x", "store_host": "[::]:0"},
    {"body": b"x", "queue_id": 2**31 - 1},
    {"body": b"x", "tags": "", "uniq_key": ""},
    {"body": b"x", "properties": {"DELAY": "9" * 400}},
    {"body": b"x", "properties": {"a": ""}},
    {"body": b"x", "topic": "SCHEDULE_TOPIC_XXXX", "properties": {"DELAY": "-5"}},
    {"body": b"x", "keys": ["\0" * 600]},
]


@pytest.mark.parametrize(
    ("fields", "now"),
    [
        *((fields, 1_700_000_000_000) for fields in ODD),
        *((ODD[0], now) for now in (0, -1, 2**63 - 1, -(2**63))),
    ],
    ids=lambda part: ascii(part)[:50],
)
def test_whatever_a_put_accepts_survives_a_kill(tmp_path: Path, fields: dict[str, Any], now: int) -> None:
    sizes = SIZES | {"mapped_file_size_commit_log": 8192}
    config = rmq.StoreConfig(**sizes, flush_disk_type="SYNC_FLUSH")
    with rmq.open(tmp_path / "live", "a", config=config, clock=lambda: now) as store:
        store.put(rmq.Message("T", b"first", keys="first"))
        store.flush()
        try:
            store.put(rmq.Message(**{"topic": "T"} | fields))
        except rmq.IllegalMessageError:
            return
        store.put(rmq.Message("T", b"last", keys="last"))
        whole = store.scan().read_all()
        shutil.copytree(tmp_path / "live", tmp_path / "s")
        assert store.query("T", "last")[0].body == b"last"
    for mode in ("r", "r+", "r"):
        with rmq.open(tmp_path / "s", mode) as store:
            assert store.scan().read_all() == whole
            assert store.query("T", "last")[0].body == b"last"


def test_a_timed_flush_covers_puts_nobody_flushed(tmp_path: Path) -> None:
    config = rmq.StoreConfig(**SIZES, flush_interval_commit_log=20)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        store.put_many([message(i) for i in range(10)])
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and oracle.check_store(tmp_path / "s", 10, 30):
            time.sleep(0.01)
        assert oracle.check_store(tmp_path / "s", 10, 30) == []
        assert sum(len(units) for units in oracle.read_queues(tmp_path / "s").values()) == 10
