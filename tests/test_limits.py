"""Low limits of the process: few descriptors, little address space; modes of files, and links put in our way."""

from __future__ import annotations

import errno
import gc
import os
import resource
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from forks import in_child
from test_putbatch import put_batch
from test_puttexts import column, loaded

import rmq
from rmq.mappedfile import MappedFile

SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 30_000, "flush_interval_commit_log": 2**31 - 1}  # fmt: skip
QUEUES = 300
MIB = 1 << 20


def message(i: int, queues: int = QUEUES, body: bytes = b"") -> rmq.Message:
    return rmq.Message(f"T{i % queues % 7}", b"%06d" % i + body, queue_id=i % queues, keys=[f"k{i}", f"all{i % 3}"])


def make(path: Path, count: int, queues: int = QUEUES, body: bytes = b"", **sizes: int) -> None:
    with rmq.open(path, "x", config=rmq.StoreConfig(**SIZES | sizes)) as store:
        for first in range(0, count, 100):
            store.put_many([message(i, queues, body) for i in range(first, min(first + 100, count))])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def lowered(limit: int, amount: int, work: Callable[[], Any]) -> Any:
    """What `work` gives in a child that has no more than that, and none of this process's files open."""

    def limited() -> Any:
        gc.disable()  # what is garbage here would close descriptors that are others' by then
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(name) > 2 and not stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                    os.close(int(name))
        resource.setrlimit(limit, (amount, amount))
        return work()

    return in_child(limited)


def assert_answers(store: rmq.Store, count: int, queues: int = QUEUES) -> None:
    bodies = store.scan(columns=["body"]).read_all()["body"].to_pylist()
    assert [int(body[:6]) for body in bodies] == list(range(count))
    assert [int(found.body[:6]) for found in store.query("T5", "k5")] == [5]
    assert len(store.query("T0", "all0", limit=None)) == sum(i % 3 == 0 and i % queues % 7 == 0 for i in range(count))
    for queue_id in range(0, queues, 37):
        found = store.pull(f"T{queue_id % 7}", queue_id, 0, 10_000).messages
        assert [int(one.body[:6]) for one in found] == list(range(queue_id, count, queues))


@contextmanager
def all_taken() -> Iterator[None]:
    """Not one descriptor is left."""
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def error_of(call: Callable[[], Any]) -> int | None:
    """Number of the OSError that a call raises; 0: none."""
    try:
        call()
    except OSError as error:
        return error.errno
    return 0


# ---- descriptors -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 queues, more than 50 segments of the log."""
    path = tmp_path_factory.mktemp("limits") / "s"
    make(path, 2000)
    assert len(list((path / "commitlog").iterdir())) > 50
    assert len(list((path / "consumequeue").glob("*/*"))) == QUEUES
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_wide_store_needs_few_descriptors(wide: Path, mode: str) -> None:
    def work() -> None:
        before = descriptors()
        with rmq.open(wide, mode) as store:
            assert_answers(store, 2000)
            assert descriptors() - before < 40
        assert descriptors() == before

    lowered(resource.RLIMIT_NOFILE, 64, work)


@pytest.mark.slow
def test_a_wide_store_grows_with_few_descriptors(tmp_path: Path) -> None:
    def work() -> None:
        make(tmp_path / "s", 2000)
        with rmq.open(tmp_path / "s", "r+") as store:
            for i in range(2000, 2600):
                store.put(message(i))
            store.flush()
            assert_answers(store, 2600)
            with rmq.open(tmp_path / "s") as reader:
                assert_answers(reader, 2600)

    lowered(resource.RLIMIT_NOFILE, 64, work)
    assert oracle.check_store(tmp_path / "s", 10, 30_000) == []


def test_maps_are_let_go_of_under_no_reader(wide: Path) -> None:
    """Eight maps for fifty segments and four threads that ask for all of them."""

    def ask(store: rmq.Store, seed: int, wrong: list[object]) -> None:
        try:
            for i in range(0, 2000, 17):
                number = i * (seed * 2 + 1) % 2000
                found = store.pull(f"T{number % QUEUES % 7}", number % QUEUES, number // QUEUES, 1).messages
                if int(found[0].body[:6]) != number:
                    wrong.append(found)
            if store.scan(columns=["body"]).read_all().num_rows < 2000:
                wrong.append("scan")
        except Exception as error:
            wrong.append(error)

    def work() -> None:
        wrong: list[object] = []
        with rmq.open(wide, "r+") as store:
            threads = [threading.Thread(target=ask, args=(store, seed, wrong)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []

    lowered(resource.RLIMIT_NOFILE, 64, work)


@pytest.mark.slow
def test_a_reader_lets_go_of_a_segment_that_is_gone(tmp_path: Path) -> None:
    make(tmp_path / "s", 500)

    def work() -> None:
        with rmq.open(tmp_path / "s") as store:
            assert_answers(store, 500)
            (tmp_path / "s/commitlog" / f"{0:020d}").unlink()
            assert store.scan(columns=["body"]).read_all().num_rows < 500
            gc.collect()
            maps = Path("/proc/self/maps").read_text().splitlines()
            assert [line for line in maps if str(tmp_path) in line and line.endswith("(deleted)")] == []

    in_child(work)


def test_without_a_descriptor_left_opening_is_an_error_that_passes(wide: Path) -> None:
    def work() -> None:
        with all_taken():
            errors = [error_of(lambda mode=mode: rmq.open(wide, mode)) for mode in ("r", "r+")]
        assert errors == [errno.EMFILE] * 2
        with rmq.open(wide, "r+") as store:
            assert_answers(store, 2000)

    lowered(resource.RLIMIT_NOFILE, 64, work)


@pytest.mark.slow
def test_a_put_without_a_descriptor_left_is_an_error_that_passes(tmp_path: Path) -> None:
    def work() -> None:
        with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
            stored = 0
            for _ in range(20):
                with all_taken():
                    while error_of(lambda: store.put(message(stored))) == 0:  # noqa: B023
                        stored += 1
                store.put(message(stored))
                stored += 1
            assert stored > 200
            assert_answers(store, stored)

    lowered(resource.RLIMIT_NOFILE, 64, work)
    assert oracle.check_store(tmp_path / "s", 10, 30_000) == []


@pytest.mark.faults
def test_ten_thousand_queues_are_made_read_and_recovered_with_few_descriptors(tmp_path: Path) -> None:
    count = 10_000
    sizes = {"mapped_file_size_commit_log": 4 * MIB, "max_hash_slot_num": 100, "max_index_num": 100_000}

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def work() -> None:
        before = peak()
        make(tmp_path / "s", count, count, **sizes)
        with rmq.open(tmp_path / "s") as reader:
            assert_answers(reader, count, count)
        store = rmq.open(tmp_path / "s", "r+")
        store.put_many([message(i, count) for i in range(count, count + 100)])
        store._release.close()  # as a killed process leaves it
        store._closed = True
        with rmq.open(tmp_path / "s", "r+") as store:
            assert_answers(store, count + 100, count)
            assert sum(map(len, store.topics().values())) == count
        assert peak() - before < 300 * MIB

    lowered(resource.RLIMIT_NOFILE, 64, work)


def test_a_file_larger_than_the_process_may_make_is_an_error_that_passes(tmp_path: Path) -> None:
    """The quota that needs no mount: RLIMIT_FSIZE."""

    def work() -> None:
        sys.dont_write_bytecode = True  # CPython keeps a .pyc that the limit cuts short
        with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES | {"max_index_num": 30})) as store:
            stored = 0
            for _ in range(20):
                resource.setrlimit(resource.RLIMIT_FSIZE, (4095, resource.RLIM_INFINITY))
                while error_of(lambda: store.put(message(stored))) == 0:  # noqa: B023
                    stored += 1
                assert error_of(lambda: store.put(message(stored))) == errno.EFBIG  # noqa: B023
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                store.put(message(stored))
                stored += 1
            assert_answers(store, stored)

    in_child(work)
    assert oracle.check_store(tmp_path / "s", 10, 30) == []


# ---- address space ---------------------------------------------------------------------------------------


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def mapped_segments(directory: Path) -> int:
    """Of this store alone: a forked process has the maps of the one before it too."""
    return sum(f"{directory}/commitlog/" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_fifty_segments_are_read_in_the_space_of_few(tmp_path: Path, mode: str) -> None:
    """200 MiB of log in 96 MiB of address space."""
    make(tmp_path / "s", 50, 10, b"x" * (3 * MIB), mapped_file_size_commit_log=4 * MIB)
    make(tmp_path / "warm", 10)

    def work() -> int:
        with rmq.open(tmp_path / "warm") as store:
            assert_answers(store, 10)
        limit = address_space() + 96 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with rmq.open(tmp_path / "s", mode) as store:
            with store.scan(columns=["body"], batch_rows=1) as batches:
                found = [int(batch["body"][0].as_py()[:6]) for batch in batches]
            assert found == list(range(50))
            assert [int(one.body[:6]) for i in range(50) for one in store.query(f"T{i % 10 % 7}", f"k{i}")] == found
            if mode == "r+":
                store.put_many([message(i, 10) for i in range(50, 60)])
                assert len(store.query("T0", "all0", limit=None)) > 0
            return mapped_segments(tmp_path / "s")

    assert 1 <= in_child(work) <= 8


def test_a_segment_that_is_being_made_may_be_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge: another thread maps a segment, and there is room for no second one, before the new one is the log's end."""
    reserve = MappedFile.reserve

    def reserve_late(file: MappedFile, begin: int, end: int, ahead: int) -> None:
        reserve(file, begin, end, ahead)
        store._log._maps.make_room(store._log.segments[0], 0)

    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        store.put(message(0))
        store.flush()
        monkeypatch.setattr(MappedFile, "reserve", reserve_late)
        for i in range(1, 200):
            store.put(message(i))
        assert len(store._log.segments) > 3
        assert_answers(store, 200)
    assert oracle.check_store(tmp_path / "s", SIZES["max_hash_slot_num"], SIZES["max_index_num"]) == []


# ---- modes and links -------------------------------------------------------------------------------------


def test_nobody_else_may_write_what_is_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES))
        store.put_many([message(i) for i in range(300)])
        store.commit_offsets("g", "T0", {0: 1})
        store.flush()
        made = [tmp_path / "s", *(tmp_path / "s").rglob("*")]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
        store.close()
        rmq.rebuild(tmp_path / "s", processes=1)
        modes |= {str(path): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "s").rglob("*")}
        rmq.IndexFile(tmp_path / "index", "x", max_hash_slot_num=10, max_index_num=30).close()
        modes["index"] = stat.S_IMODE((tmp_path / "index").stat().st_mode)
    finally:
        os.umask(before)
    assert {"lock", "abort", "abort.bak", "checkpoint", "owner", "marks", "meta.json", "topics.json", "offsets.lock",
            "consumerOffset.json"} <= modes.keys()
    assert [name for name, mode in modes.items() if mode & 0o022] == []


OURS = ["lock", "abort", "abort.bak", "checkpoint", "rmq/owner", "rmq/marks"]
REPLACED = ["rmq/meta.json", "rmq/manifest.json", "config/topics.json"]


@pytest.mark.parametrize("name", [*OURS, *REPLACED, *(name + ".tmp" for name in REPLACED)])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_link_put_in_our_way_is_not_written_through(tmp_path: Path, name: str, is_new: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 512)
    if not is_new:
        make(tmp_path / "s", 10)
    link = tmp_path / "s" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    (tmp_path / "s/commitlog").mkdir(exist_ok=True)
    try:
        with rmq.open(tmp_path / "s", "a", config=rmq.StoreConfig(**SIZES)) as store:
            store.put_many([message(i) for i in range(10, 20)])
    except (OSError, rmq.RmqError):
        pass
    assert victim.read_bytes() == b"precious" * 512


@pytest.mark.parametrize("batch_bytes", [1, 1_000_000, 2_500_000, 2**30])
def test_bodies_that_grow_when_decompressed_end_a_batch(tmp_path: Path, batch_bytes: int) -> None:
    plain = [bytes([number]) * (1_000_000 if number % 4 else 10) for number in range(21)]
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        for number, body in enumerate(plain):
            packed = bool(number % 3)
            raw = zlib.compress(body) if packed else body[:10]
            store.put(rmq.Message("t", raw, keys=f"k{number}", sys_flag=int(packed)))
        batches = list(store.scan(batch_bytes=batch_bytes))
        names = [name for name in batches[0].schema.names if name != "body"]
        others = store.scan(columns=names).read_all()
        found = store.query_many("t", [f"k{number}" for number in range(21)], columns=["body"]).table["body"]
    sizes = [sum(map(len, batch["body"].to_pylist())) for batch in batches]
    assert all(size < batch_bytes + 1_000_000 for size in sizes)
    assert len(batches) >= min(21, sum(sizes) // (batch_bytes + 1_000_000))
    expected = [body if number % 3 else body[:10] for number, body in enumerate(plain)]
    assert [body for batch in batches for body in batch["body"].to_pylist()] == expected == found.to_pylist()
    assert pa.Table.from_batches(batches).select(names).equals(others)
    assert {batch.schema.metadata[b"rmq.body"] for batch in batches} == {b"plain"}


def take_much_text() -> None:
    rows = 2048
    names, values = column([b"name"] * rows), column([b"x" * 32_000] * rows)
    bodies, batch, before = column([b""] * rows), put_batch(), address_space()
    loaded(batch, rows, topic=column([b"T"]), body=bodies, names=names, values=values, maps=np.arange(rows + 1))
    taken = address_space() - before
    batch.release()
    print(taken, address_space() - before)


@pytest.mark.slow
def test_a_batch_keeps_little_of_the_memory_that_much_text_took() -> None:
    """In a process of its own: what other tests have freed would be taken first."""
    code = "import test_limits; test_limits.take_much_text()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken, kept = map(int, done.stdout.split())
    assert taken > 60 * MIB
    assert kept < 16 * MIB
