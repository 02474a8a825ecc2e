# SPDX-License-Identifier: Apache-2.0
"""A store whose directory is moved or removed while it is open, as logs are rotated, or whose program moves."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES, digests
from test_groups import filled

import rmq
import rmq.flushing
from rmq.flushing import Flusher
from rmq.index import Index
from rmq.mappedfile import MappedFile
from rmq.sidecar import make_sidecar

CONFIG = rmq.StoreConfig(**SIZES, flush_interval_commit_log=10**9)
MOVED = "the store was moved or replaced since it was opened"


def put(store: rmq.Store, what: str, count: int) -> int:
    """Puts until one raises; how many did not."""
    for number in range(count):
        try:
            store.put(rmq.Message("T", f"{what}{number}".encode(), keys=f"{what}{number}"))
        except (OSError, rmq.StoreReadOnlyError):
            return number
    return count


def bodies(path: Path) -> list[str]:
    with rmq.open(path) as store:
        return [message.body.decode() for message in store.pull("T", limit=10_000).messages]


def moved(path: Path) -> tuple[rmq.Store, rmq.Store]:
    """A writer whose directory went to `path`.1, and the writer of a new store in its place."""
    old = rmq.open(path, "x", config=CONFIG)
    assert put(old, "old", 10) == 10
    path.rename(path.with_suffix(".1"))
    new = rmq.open(path, "x", config=CONFIG)
    assert put(new, "new", 20) == 20
    return old, new


CALLS: dict[str, Callable[[rmq.Store], object]] = {
    "close": lambda store: store.close(),
    "flush": lambda store: store.flush(),
    "pull": lambda store: store.pull("T"),
    "clean": lambda store: store.clean(2**42, limit=None, max_used_percent=1),
    "puts": lambda store: [store.put(rmq.Message("T", bytes(1000))) for _ in range(20)],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_writer_whose_directory_was_moved_leaves_the_next_store_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "events"
    old, new = moved(path)
    assert put(new, "more", 100) == 100
    before = sorted(item.relative_to(path) for item in path.rglob("*"))
    with pytest.raises(OSError, match=MOVED):
        CALLS[name](old)
    assert sorted(item.relative_to(path) for item in path.rglob("*")) == before
    with suppress(OSError):  # when nobody was told yet
        old.close()
    new.close()
    assert bodies(path) == [f"new{number}" for number in range(20)] + [f"more{number}" for number in range(100)]
    assert rmq.verify(path) == []
    rmq.open(path.with_suffix(".1"), "r+").close()
    assert bodies(path.with_suffix(".1"))[:10] == [f"old{number}" for number in range(10)]
    assert rmq.verify(path.with_suffix(".1")) == []


def test_what_both_writers_acknowledge_is_in_their_own_stores(tmp_path: Path) -> None:
    path = tmp_path / "events"
    old, new = moved(path)
    count = put(old, "still", 500)
    assert 0 < count < 500
    new.close()
    with suppress(OSError):
        old.close()
    assert bodies(path) == [f"new{number}" for number in range(20)]
    rmq.open(path.with_suffix(".1"), "r+").close()
    assert bodies(path.with_suffix(".1")) == [f"old{number}" for number in range(10)] + \
        [f"still{number}" for number in range(count)]  # fmt: skip


def test_a_writer_whose_directory_was_removed_makes_none_anew(tmp_path: Path) -> None:
    path = tmp_path / "events"
    store = rmq.open(path, "x", config=CONFIG)
    put(store, "old", 10)
    shutil.rmtree(path)
    assert put(store, "gone", 500) < 500
    with pytest.raises(OSError, match=MOVED):
        store.flush()
    with pytest.raises(rmq.StoreReadOnlyError, match=MOVED):
        store.put(rmq.Message("T", b""))
    store.close()
    assert not path.exists()


def test_a_writer_whose_directory_was_moved_reads_nothing_of_another_store(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 2000, 1)
    old = rmq.open(path, "r+", config=CONFIG)
    path.rename(tmp_path / "moved")
    with rmq.open(path, "x", config=CONFIG) as new:
        new.put_many([rmq.Message("Orders", b"-%d" % (number % 9)) for number in range(2000)])
    with pytest.raises(OSError, match="moved or replaced"):
        old.scan().read_all()
    with pytest.raises(OSError, match="moved or replaced"):
        old.close()


READS: dict[str, Callable[[rmq.Store], object]] = {
    "topics": lambda store: store.topics(),
    "pull": lambda store: store.pull("T"),
    "search_offset": lambda store: store.search_offset("T", 0, 0),
    "lookup of a place": lambda store: store.lookup(("T", 0, 0)),
    "query": lambda store: store.query("T", "old3"),
    "scan": lambda store: store.scan().read_all(),
    "poll": lambda store: rmq.Consumer(store, "g", "T").poll(),
    "groups": lambda store: store.groups(),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("how", ["moved", "removed", "emptied"])
def test_a_reader_whose_directory_is_gone_says_so(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / "events"
    with rmq.open(path, "x", config=CONFIG) as store:
        put(store, "old", 100)
    with rmq.open(path) as reader:
        READS[name](reader)
        if how == "removed":
            shutil.rmtree(path)
        else:
            path.rename(tmp_path / "elsewhere")
        if how == "emptied":
            path.mkdir()  # as a directory from which a disk was unmounted
        for _ in range(2):
            with pytest.raises(OSError, match=MOVED):
                READS[name](reader)


@pytest.mark.parametrize("name", READS)
def test_a_reader_calls_no_store_damaged_that_was_begun_in_its_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / "events"
    with rmq.open(path, "x", config=CONFIG) as store:
        put(store, "old", 100)
    with rmq.open(path) as reader:
        READS[name](reader)
        path.rename(tmp_path / "elsewhere")
        other = dataclasses.replace(CONFIG, mapped_file_size_commit_log=3 * CONFIG.mapped_file_size_commit_log + 500,
                                    mapped_file_size_consume_queue=60)  # fmt: skip
        with rmq.open(path, "x", config=other) as store:
            put(store, "new", 300)
        with pytest.raises(OSError, match=MOVED):
            READS[name](reader)


@pytest.mark.parametrize("name", [*READS, "units", "scan", "query"])
@pytest.mark.parametrize("has_looked", [True, False])
def test_a_reader_reads_nothing_of_a_store_of_the_same_sizes_in_its_place(
    tmp_path: Path, name: str, has_looked: bool
) -> None:
    more = {"units": lambda store: store.units("T", 0, 0, 100), "scan": lambda store: store.scan().read_all(),
            "query": lambda store: list(store.query("T", "new5"))}  # fmt: skip
    path, read = tmp_path / "events", (READS | more)[name]
    for place, what, count in ((path, "old", 100), (tmp_path / "other", "new", 200)):
        with rmq.open(place, "x", config=CONFIG) as store:
            put(store, what, count)
    with rmq.open(path) as reader:
        if has_looked:
            read(reader)
        path.rename(tmp_path / "elsewhere")
        (tmp_path / "other").rename(path)
        for _ in range(2):
            with pytest.raises(OSError, match=MOVED) as caught:
                read(reader)
            assert caught.value.errno == errno.ESTALE


def test_a_reader_of_an_empty_directory_that_is_removed_says_so(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x").close()
    with rmq.open(tmp_path / "s") as reader:
        assert reader.topics() == {}
        shutil.rmtree(tmp_path / "s")
        with pytest.raises(OSError, match=MOVED):
            reader.topics()


def test_a_reader_whose_look_at_what_was_put_back_fails_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        put(store, "old", 20)
    shutil.copytree(path, tmp_path / "backup")
    with rmq.open(path, "r+") as store:
        put(store, "more", 200)
    with rmq.open(path) as reader:
        assert reader.topics() == {"T": {0: (0, 220)}}
        for part in path.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)

        def failing(index: Index) -> None:
            monkeypatch.undo()
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(Index, "refresh", failing)
        with pytest.raises(OSError, match="Too many open files"):
            reader.topics()
        assert reader.topics() == {"T": {0: (0, 20)}}
        assert len(reader.pull("T", limit=1000).messages) == 20


def test_a_cleaning_whose_directory_is_moved_removes_nothing_of_another_store(tmp_path: Path) -> None:
    path, old = tmp_path / "s", rmq.open(filled(tmp_path / "s", 2000, 1), "r+", config=CONFIG)

    def moving(place: str | os.PathLike[str]) -> object:
        if not (tmp_path / "moved").exists():
            path.rename(tmp_path / "moved")
            filled(path, 2000, 1)
        return shutil.disk_usage(place)

    with pytest.raises(OSError, match="moved or replaced"):
        old.clean(time.time_ns() // 10**6 + 10**9, limit=None, disk_usage=moving)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="moved or replaced"):
        old.close()
    with rmq.open(path) as store:
        assert store.scan().read_all().num_rows == 2000


def test_a_writer_whose_directory_was_moved_reads_no_queue_of_another_store(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 2000, 1)
    old = rmq.open(path, "r+", config=CONFIG)
    path.rename(tmp_path / "moved")
    filled(path, 2000, 1)
    old._queues.cache._keep(0)  # as when other files took their place
    with pytest.raises(OSError, match=MOVED):
        old.units("Orders", 0, 0, 10)
    with suppress(OSError):
        old.close()


def test_a_log_that_lies_elsewhere_may_be_moved_too(tmp_path: Path) -> None:
    path, log = tmp_path / "s", tmp_path / "log"
    config = rmq.StoreConfig(**SIZES, flush_interval_commit_log=10**9, store_path_commit_log=str(log))
    old = rmq.open(path, "x", config=config)
    assert put(old, "old", 10) == 10
    log.rename(tmp_path / "log.1")
    with rmq.open(tmp_path / "next", "x", config=config) as new:
        assert put(new, "new", 100) == 100
        assert put(old, "still", 500) < 500
        with suppress(OSError):
            old.close()
        assert new.scan().read_all().num_rows == 100
    assert rmq.verify(tmp_path / "next", config=config) == []


def test_no_sidecar_is_made_where_a_store_was(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 200, 1)
    index = next((path / "index").iterdir())
    path.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        make_sidecar(index, SIZES["max_hash_slot_num"], SIZES["max_index_num"])
    assert not path.exists()


def test_a_log_of_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, store_path_commit_log="log")
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with rmq.open("s", "x", config=config) as store, rmq.open("s", config=config) as reader:
        monkeypatch.chdir(tmp_path / "b")
        store.put_many([rmq.Message("T", b"x" * 1000)] * 20)
        assert reader.scan().read_all().num_rows == 20
    assert len(list((tmp_path / "a" / "log").iterdir())) > 5
    assert list((tmp_path / "b").iterdir()) == []


def test_a_reader_of_a_relative_path_sees_what_is_begun_after_its_program_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s/commitlog").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with rmq.open("s") as reader:
        monkeypatch.chdir("/")
        assert reader.topics() == {}
        with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
            store.put(rmq.Message("T", b"a"))
            assert [message.body for message in reader.pull("T").messages] == [b"a"]


def test_zeros_are_not_written_into_a_file_that_took_a_segment_s_name(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    file = MappedFile(path, size=1 << 16, writable=True, create=True)
    path.rename(tmp_path / "moved")
    path.write_bytes(b"m" * (1 << 16))
    with pytest.raises(OSError, match="another file has its name"):
        file.fill(100, 4096)
    assert path.read_bytes() == b"m" * (1 << 16)
    file.close()


def test_a_store_that_takes_the_place_of_one_amid_its_last_flush_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is waited for; what follows goes by names."""
    config = rmq.StoreConfig(**SIZES, flush_interval_commit_log=10**9)
    rmq.open(tmp_path / "other", "x", config=config).close()
    with rmq.open(tmp_path / "other", "r+", config=config) as store:
        assert put(store, "new", 100) == 100
    store = rmq.open(tmp_path / "live", "x", config=config)
    assert put(store, "old", 10) == 10
    store._log.following.prepare()
    before = digests(tmp_path, "other")
    sync = Flusher._sync_segments

    def synced(flusher: Flusher, files: Any) -> None:
        sync(flusher, files)
        (tmp_path / "live").rename(tmp_path / "away")
        (tmp_path / "other").rename(tmp_path / "live")

    monkeypatch.setattr(Flusher, "_sync_segments", synced)
    with pytest.raises(OSError, match=MOVED):
        store.close()
    (tmp_path / "live").rename(tmp_path / "other")
    assert digests(tmp_path, "other") == before


@pytest.mark.parametrize("name", ["write_manifest", "merge_topics"])
def test_a_flush_whose_directory_goes_when_a_file_of_it_is_written_writes_no_other_store_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither its topics nor its groups' offsets."""
    with rmq.open(tmp_path / "other", "x", config=CONFIG) as store:
        store.put(rmq.Message("O", b""))
        store.commit_offsets("g", "O", {0: 1})
    store = rmq.open(tmp_path / "live", "x", config=CONFIG)
    store.put(rmq.Message("T", b""))
    store.commit_offsets("g", "T", {0: 1})
    before, real = digests(tmp_path, "other"), getattr(rmq.flushing, name)

    def moving(*arguments: Any) -> None:
        real(*arguments)
        (tmp_path / "live").rename(tmp_path / "away")
        (tmp_path / "other").rename(tmp_path / "live")

    monkeypatch.setattr(rmq.flushing, name, moving)
    with pytest.raises(OSError, match=MOVED):
        store.flush()
    monkeypatch.undo()
    with suppress(OSError):
        store.close()
    (tmp_path / "live").rename(tmp_path / "other")
    assert digests(tmp_path, "other") == before
