"""Stores that a worker has open: once for all its tasks, anew when they are others. Without Spark."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import socket
from pathlib import Path

import pytest
from forks import in_child
from pyspark.sql.pandas.types import from_arrow_schema

import rmq
from rmq.scan import schema_of
from rmq.spark import opened, source
from rmq.spark.opened import ExecutorError, check_seen, forget
from rmq.spark.options import ReadOptions

NO_ROOM = r"Cannot allocate memory; spark\.executor\.pyspark\.memory"


@pytest.fixture
def path(tmp_path: Path) -> str:
    rmq.open(tmp_path / "s", "x").close()
    return str(tmp_path / "s")


def test_a_store_is_opened_once_and_only_to_read(path: str) -> None:
    store = opened.opened(path)
    assert opened.opened(path) is store
    assert store.mode == "r"
    assert opened.opened(path, rmq.StoreConfig()) is not store
    forget(path)
    assert store.closed
    assert opened.opened(path) is not store


def test_a_store_that_was_closed_or_replaced_is_opened_anew(path: str, tmp_path: Path) -> None:
    store = opened.opened(path)
    store.close()
    again = opened.opened(path)
    assert again is not store
    shutil.copytree(path, tmp_path / "copy")
    Path(path).rename(tmp_path / "old")
    (tmp_path / "copy").rename(path)
    assert opened.opened(path) is not again
    assert again.closed


def bodies(path: Path, **options: str) -> list[bytes]:
    """Planned by another process, as a driver, and read by this one, as a worker."""
    asked = ReadOptions.parse({"path": str(path), "subscribe": "t", **options})
    reader = source.MessageReader(asked, from_arrow_schema(schema_of(["body"])))
    batches = [batch for part in in_child(reader.partitions) for batch in reader.read(part)]
    return [body for batch in batches for body in batch.column("body").to_pylist()]


def remove_what_is_in(path: Path) -> None:
    for item in path.glob("*"):
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def test_a_store_that_was_made_anew_in_the_same_directory_is_opened_anew(tmp_path: Path) -> None:
    found = []
    for size in (1 << 20, 1 << 16):
        remove_what_is_in(tmp_path / "s")
        with rmq.open(tmp_path / "s", "a", config=rmq.StoreConfig(mapped_file_size_commit_log=size)) as store:
            store.put(rmq.Message("t", b"%d" % size))
        found += bodies(tmp_path / "s")
    assert found == [b"1048576", b"65536"]


@pytest.mark.parametrize("how", [{}, {"keys": "k"}, {"scanMode": "queue"}], ids=["log", "index", "queue"])
def test_another_store_of_a_broker_in_the_same_directory_is_opened_anew(tmp_path: Path, how: dict[str, str]) -> None:
    """Neither has a file of ours."""
    found, config = [], rmq.StoreConfig(mapped_file_size_commit_log=1 << 16, max_hash_slot_num=10, max_index_num=100)
    for body, count in ((b"a longer body", 1), (b"new", 3)):
        with rmq.open(tmp_path / "broker", "x", config=config) as store:
            store.put_many([rmq.Message("t", body, keys="k")] * count)
        shutil.rmtree(tmp_path / "broker" / "rmq")
        remove_what_is_in(tmp_path / "s")
        shutil.copytree(tmp_path / "broker", tmp_path / "s", dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "broker")
        found += bodies(tmp_path / "s", **how)
    assert found == [b"a longer body", *[b"new"] * 3]


def test_a_store_whose_first_record_is_another_one_is_another_store(tmp_path: Path) -> None:
    """A file system may give a new file the number of one that was removed."""
    segment = tmp_path / "s" / "commitlog" / f"{0:020d}"
    segment.parent.mkdir(parents=True)
    seen = set()
    for head in (b"a", b"b"):
        segment.write_bytes(head * 100)
        seen.add(opened._identity(str(tmp_path / "s")))
    assert len(seen) == 2


def test_a_log_that_a_broker_keeps_elsewhere_is_looked_at_there(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    config = rmq.StoreConfig(store_path_commit_log=str(tmp_path / "log"))
    before = opened._identity(str(tmp_path / "s"), config)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / f"{0:020d}").write_bytes(b"x")
    assert opened._identity(str(tmp_path / "s"), config) != before


def test_a_plan_that_meets_damage_opens_the_store_anew_next_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise rmq.CorruptFileError("x", 0, "other files than were opened")

    reader = source.MessageReader(ReadOptions.parse({"path": path}), from_arrow_schema(schema_of(["body"])))
    store = opened.opened(path)
    monkeypatch.setattr(source, "ranges", fail)
    with pytest.raises(rmq.CorruptFileError):
        reader.partitions()
    assert store.closed


def test_the_one_not_used_for_longest_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "LIMIT", 2)
    paths = [str(tmp_path / name) for name in "abc"]
    for item in paths:
        rmq.open(item, "x").close()
    first, second = map(opened.opened, paths[:2])
    assert opened.opened(paths[0]) is first
    opened.opened(paths[2])
    assert (first.closed, second.closed) == (False, True)


def test_a_store_in_use_is_not_closed_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "LIMIT", 2)
    paths = [str(tmp_path / name) for name in "abcd"]
    for item in paths:
        rmq.open(item, "x").close()
    with opened.using(paths[0]) as first, opened.using(paths[1]) as second:
        third = opened.opened(paths[2])
        fourth = opened.opened(paths[3])
        assert [store.closed for store in (first, second, third, fourth)] == [False, False, True, False]
    assert [store.closed for store in (first, second, fourth, opened.opened(paths[2]))] == [True, True, False, False]


@pytest.mark.parametrize("why", ["replaced", "forgotten"])
def test_a_store_that_is_opened_anew_is_closed_when_its_last_user_ends(path: str, tmp_path: Path, why: str) -> None:
    with opened.using(path) as first:
        with opened.using(path) as same:
            assert same is first
            if why == "replaced":
                shutil.copytree(path, tmp_path / "copy")
                Path(path).rename(tmp_path / "old")
                (tmp_path / "copy").rename(path)
            else:
                forget(path)
            with opened.using(path) as second:
                assert second is not first
            assert not first.closed
        assert not first.closed
    assert (first.closed, second.closed) == (True, False)
    assert not opened._in_use
    assert not opened._let_go


def test_a_read_goes_on_when_another_of_the_same_store_fails(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        places = [store.put(rmq.Message("t", bytes(5000))).phy_offset for _ in range(45)]
    with (tmp_path / "s" / "commitlog" / f"{3 * 65536:020d}").open("r+b") as file:
        file.write(b"\xff" * 8)
    asked = ReadOptions.parse({"path": str(tmp_path / "s"), "splitBytes": "131072", "batchRows": "1"})
    reader = source.MessageReader(asked, from_arrow_schema(schema_of(["body"])))
    whole, damaged = reader.partitions()
    batches = reader.read(whole)
    rows = len(next(batches))
    with pytest.raises(rmq.CorruptFileError):
        list(reader.read(damaged))
    assert rows + sum(map(len, batches)) == sum(place < damaged.split.begin for place in places)


def test_a_path_without_store_is_told_with_host_and_path(tmp_path: Path) -> None:
    pattern = re.escape(f"host {socket.gethostname()}: {tmp_path}/nix: no store is to be read here: No such file")
    for call in (opened.opened, check_seen):
        with pytest.raises(ExecutorError, match=pattern):
            call(f"{tmp_path}/nix")
    with pytest.raises(ExecutorError, match=re.escape(f": {tmp_path}: cannot be opened: ")):
        opened.opened(str(tmp_path))


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=repr)
def test_an_address_space_that_is_too_small_names_spark_s_setting(path: str, monkeypatch: pytest.MonkeyPatch,
                                                                  error: Exception) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise error

    store = opened.opened(path)
    with pytest.raises(ExecutorError, match=r"(memory|Cannot).*; spark\.executor\.pyspark\.memory"), opened.using(path):
        raise error
    assert store.closed
    monkeypatch.setattr(opened, "open_store", fail)
    with pytest.raises(ExecutorError, match=r"cannot be opened: .*spark\.executor\.pyspark\.memory"):
        opened.opened(path)


@pytest.mark.parametrize("what", ["index", "log"])
def test_a_map_that_fails_names_spark_s_setting(tmp_path: Path, what: str) -> None:
    """In the address space of a worker that Spark has limited: for the index when it is opened, for the log later."""
    path, sizes = str(tmp_path / "s"), {"index": {}, "log": {"mapped_file_size_commit_log": 2**30 - 4096}}
    small = {"max_hash_slot_num": 10, "max_index_num": 100}
    config = rmq.StoreConfig(mapped_file_size_consume_queue=2000, **({} if what == "index" else small), **sizes[what])
    with rmq.open(path, "x", config=config) as store:
        store.put(rmq.Message("t", b"x", keys="k"))

    def work() -> str:
        store = opened.opened(path) if what == "log" else None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if store is not None:
            used -= 2**30
            store._log.segments[0].let_go()
        resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, used + 200 * 2**20))
        with pytest.raises(ExecutorError, match=NO_ROOM) as caught, opened.using(path) as store:
            store.scan(on_damage="skip").read_all()
        return str(caught.value)

    assert path in in_child(work)
