# SPDX-License-Identifier: Apache-2.0
"""Index files that go, or are cut short, below a reader that has them open: no message is missed without an error."""

from __future__ import annotations

import os
import shutil
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import copy_store

import rmq
from rmq import index, openstore
from rmq.indexfile import IndexFile

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=50,
                         max_index_num=101)  # fmt: skip
COUNT = 350  # of one key each: three full files and half a one
SIZE = 40 + 4 * 50 + 20 * 101


def fill(store: rmq.Store, first: int = 0) -> None:
    for number in range(first, first + COUNT):
        store.put(rmq.Message("T", bytes(500), keys=[f"k{number}"]))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closed") / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        fill(store)
    return path


def index_files(path: Path) -> list[Path]:
    return sorted((path / "index").iterdir())


def scanned(store: rmq.Store, count: int = COUNT) -> int:
    """All keys are found, one by one and together; how much of the log was read for one of them."""
    for number in range(0, count, 23):
        found = store.query("T", f"k{number}")
        assert (len(found), found.complete) == (1, True), number
    assert store.query_many("T", [f"k{number}" for number in range(count)]).table.num_rows == count
    return store.query("T", "none").scanned_size


@pytest.mark.parametrize("lost", [[0], [1], [3], [0, 1, 2], [2, 3], [0, 1, 2, 3]])
def test_what_a_removed_file_held_is_looked_for_in_the_log(tmp_path: Path, closed: Path, lost: list[int]) -> None:
    path = copy_store(closed, tmp_path / "s")
    with rmq.open(path) as store:
        assert scanned(store) == 0
        gone = [index_files(path)[number] for number in lost]
        for file in gone:
            file.rename(tmp_path / file.name)
        whole = store.max_phy_offset - store.min_phy_offset
        assert len(lost) / 7 < scanned(store) / whole <= (len(lost) + 1) / 4
        assert not store.query("T", f"k{100 * lost[0] + 1}", complete=False).complete
        for file in gone:
            shutil.move(tmp_path / file.name, file)
        assert scanned(store) == 0


def test_a_file_that_goes_beside_a_writer_is_missed_too(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as writer:
        fill(writer)
        with rmq.open(path) as store:
            fill(writer, COUNT)
            writer.flush()
            assert scanned(store, 2 * COUNT) == 0
            index_files(path)[1].unlink()
            assert scanned(store, 2 * COUNT) > 0


def test_a_file_that_another_thread_finds_short_is_short_for_who_has_asked_what_the_index_covers(
        tmp_path: Path, closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path, told = copy_store(closed, tmp_path / "s"), []
    with rmq.open(path) as store:
        real = store._index.collect

        def look() -> None:
            with pytest.raises(rmq.CorruptFileError, match="was truncated"):
                store.query("T", "k130")
            told.append(True)

        def hooked(*arguments: Any) -> Any:
            monkeypatch.undo()
            other = threading.Thread(target=look)
            other.start()
            other.join()
            return real(*arguments)

        assert len(store.query("T", "k130")) == 1
        data = index_files(path)[1].read_bytes()
        os.truncate(index_files(path)[1], len(data) - 1)
        monkeypatch.setattr(store._index, "collect", hooked)
        with pytest.raises(rmq.CorruptFileError, match="was truncated"):
            store.query("T", "k130")
        assert told == [True]
        index_files(path)[1].write_bytes(data)
        assert scanned(store) == 0


def test_a_file_that_a_cleaning_removed_is_not_missed(tmp_path: Path, closed: Path) -> None:
    path = copy_store(closed, tmp_path / "s")
    with rmq.open(path) as store:
        assert scanned(store) == 0
        for segment in sorted((path / "commitlog").iterdir())[:2]:
            os.utime(segment, (0, 0))
        with rmq.open(path, "r+") as writer:
            writer.clean(max_used_percent=100)
        assert len(index_files(path)) == 2
        assert len(store.query("T", f"k{COUNT - 1}")) == 1
        assert store.query("T", "none").scanned_size == 0


@pytest.mark.parametrize("cut", [0, 1, 39, 41, 100, 150, 240, 241, 300, 1000, 2000, SIZE - 1])
@pytest.mark.parametrize("number", [0, 3])
def test_a_file_of_one_page_that_is_truncated_is_an_error(
        tmp_path: Path, closed: Path, number: int, cut: int) -> None:  # fmt: skip
    """What is gone of the page reads as zeros, without a signal."""
    path = copy_store(closed, tmp_path / "s")
    with rmq.open(path) as store:
        assert scanned(store) == 0
        victim = index_files(path)[number]
        os.truncate(victim, cut)
        with pytest.raises(rmq.CorruptFileError, match="truncated") as error:
            scanned(store)
        assert error.value.path == str(victim)
        if cut:
            with pytest.raises(rmq.CorruptFileError) as error:
                scanned(store)
            assert error.value.path == str(victim)
        else:  # a file that is made and not filled yet: as if there were none
            assert scanned(store) > 0


@pytest.mark.parametrize("read", [
    lambda store: store.table("index").read_all(),
    lambda store: store.select_phy_offset_many("T", ["none"]),
    lambda store: store.query_many("T", ["none"]),
    lambda store: store.lookup("none", topic="T"),
])  # fmt: skip
def test_each_read_of_an_index_tells_that_a_file_was_truncated(tmp_path: Path, closed: Path, read: Any) -> None:
    path = copy_store(closed, tmp_path / "s")
    with rmq.open(path) as store:
        store.query("T", "none")
        os.truncate(index_files(path)[1], 1000)
        with pytest.raises(rmq.CorruptFileError, match="truncated"):
            read(store)


@pytest.mark.parametrize("how", ["open", "query"])
def test_a_cleaning_that_takes_index_files_off_as_long_as_a_reader_looks_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each look at the directory finds one file less than it listed, far more often than a reader looks in vain."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(max_hash_slot_num=10, max_index_num=3)) as store:
        store.put_many([rmq.Message("T", b"", keys=f"k{number}") for number in range(80)])
    listed = index.index_paths

    def racing(directory: Path, **options: bool) -> list[Path]:
        paths = listed(directory, **options)
        if len(paths) > 2:
            paths[0].unlink()
        return paths

    if how == "open":
        monkeypatch.setattr(index, "index_paths", racing)
    with rmq.open(path) as reader:
        monkeypatch.setattr(index, "index_paths", racing)
        listed(path / "index")[0].unlink()
        assert len(reader.query("T", "k79")) == 1
    assert len(listed(path / "index")) <= 2


@pytest.mark.parametrize("size", [39, 40, 1000, SIZE - 20, SIZE - 1, SIZE + 4, SIZE + 20])
@pytest.mark.parametrize("number", [0, 3])
def test_a_brokers_index_file_of_a_wrong_length_is_passed_over_when_the_sizes_are_passed(
    tmp_path: Path, closed: Path, number: int, size: int
) -> None:
    path = copy_store(closed, tmp_path / "s")
    shutil.rmtree(path / "rmq")
    os.truncate(index_files(path)[number], size)
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode, config=CONFIG) as store:
            scanned(store)
    assert all(file.stat().st_size == SIZE for file in index_files(path))


@pytest.mark.parametrize("size", [39, 1000])
def test_the_only_index_file_of_a_broker_may_be_cut_short_when_the_sizes_are_passed(tmp_path: Path, size: int) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"", keys=[f"k{number}"]) for number in range(50)])
    shutil.rmtree(tmp_path / "s/rmq")
    os.truncate(*index_files(tmp_path / "s"), size)
    with pytest.raises(rmq.CorruptFileError, match="max_hash_slot_num and max_index_num can be passed"):
        rmq.open(tmp_path / "s")
    for mode in ("r", "r+", "r"):
        with rmq.open(tmp_path / "s", mode, config=CONFIG) as store:
            scanned(store, 50)


def ask_all(path: Path, config: rmq.StoreConfig, keys: dict[str, int], *, hidden: bool) -> None:
    """Each key is found in each mode. hidden: until a writer has opened the store, what no file covers is searched."""
    for mode, is_hidden in (("r", hidden), ("r+", False), ("r", False)):
        with rmq.open(path, mode, config=config) as store:
            for key, phy_offset in keys.items():
                assert [message.phy_offset for message in store.query("T", key)] == [phy_offset], (mode, key)
            assert store.query("T", "none", complete=False).complete is not is_hidden
            assert store.query_many("T", list(keys)).table.num_rows == len(keys)
    assert rmq.verify(path, config=config).is_sound


@pytest.mark.parametrize("brokers", [False, True])
@pytest.mark.parametrize(("entries", "lost"), [(5, 0), (5, 1), (5, 2), (3, 1), (3, 2), (4, 3), (2, 2)])
def test_a_lost_file_of_keys_of_its_neighbours_records_is_missed(tmp_path: Path, brokers: bool, entries: int,
                                                                   lost: int) -> None:  # fmt: skip
    """Files of one to four entries, records of five keys: no whole record lies between a file's neighbours."""
    config = rmq.StoreConfig(max_hash_slot_num=7, max_index_num=entries)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        keys = {f"k{number}-{piece}": result.phy_offset for number in range(4)
                for result in [store.put(rmq.Message("T", b"x", keys=[f"k{number}-{piece}" for piece in range(5)]))]
                for piece in range(5)}  # fmt: skip
        store.put(rmq.Message("T", b"no keys"))
    if brokers:
        shutil.rmtree(tmp_path / "s" / "rmq")
    index_files(tmp_path / "s")[lost].unlink()
    ask_all(tmp_path / "s", config, keys, hidden=True)


@pytest.mark.parametrize("again", [["c0", "c1", "d0"], ["c1", "d0"], ["d0"], ["p1", "c0", "c1", "d0"]], ids="-".join)
def test_a_broker_that_indexes_again_from_a_later_segment_hides_no_key(tmp_path: Path, again: list[str]) -> None:
    """Source: CommitLog#recoverAbnormally dispatches from the last segments on; the full index file before stays."""
    sizes = {"max_hash_slot_num": 3, "max_index_num": 10}
    config = rmq.StoreConfig(**sizes)
    with rmq.open(tmp_path / "s", "x", config=config, clock=count(1_700_000_000_000, 400).__next__) as store:
        names = [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"], ["p0", "p1"], [], [], ["c0", "c1"], ["d0"]]
        put = [store.put(rmq.Message("T", b"x", keys=each)) for each in names]
    keys = {key: result.phy_offset for each, result in zip(names, put, strict=True) for key in each}
    times = {key: result.store_timestamp for each, result in zip(names, put, strict=True) for key in each}
    shutil.rmtree(tmp_path / "s" / "rmq")
    first, second = index_files(tmp_path / "s")
    second.unlink()
    with rmq.IndexFile(first, **sizes) as before:
        assert (before.is_full, before.end_phy_offset) == (True, keys["p0"])
        end = {"end_phy_offset": before.end_phy_offset, "end_timestamp": before.end_timestamp}
    with rmq.IndexFile(second, "x", **sizes, **end) as file:
        for key in again:
            file.put_key(f"T#{key}", keys[key], times[key])
    ask_all(tmp_path / "s", config, keys, hidden=len(again) < 4)


@pytest.mark.parametrize("gone", range(1, 7))
def test_index_files_of_a_cleaned_broker_that_begin_before_the_log_stay(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: int) -> None:  # fmt: skip
    """Edge: the record in which a file begins had other keys than the first one that is left."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=2000,
                             max_hash_slot_num=7, max_index_num=48)  # fmt: skip
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config) as store:
        put = [(store.put(rmq.Message("T", bytes(100), keys=[f"k{number}-{piece}" for piece in range(number % 5 + 1)])))
               for number in range(200)]  # fmt: skip
    shutil.rmtree(path / "rmq")
    for file in sorted((path / "commitlog").iterdir())[:gone]:
        file.unlink()
    for file in index_files(path):
        with rmq.IndexFile(file, max_hash_slot_num=7, max_index_num=48) as opened:
            end = opened.end_phy_offset
        if end < gone * 4096:
            file.unlink()
    before = {file.name: file.read_bytes() for file in index_files(path)}
    left = {f"k{number}-{number % 5}": place.phy_offset for number, place in enumerate(put)
            if place.phy_offset >= gone * 4096}  # fmt: skip
    assert rmq.verify(path, config=config).is_sound
    ask_all(path, config, left, hidden=False)
    assert {file.name: file.read_bytes() for file in index_files(path)} == before
    assert not (path / "rmq/cut").exists()
    assert caplog.messages == []


def given_other_sizes(tmp_path: Path, slots: int, entries: int) -> tuple[Path, list[rmq.PutResult]]:
    """A store as of a broker that was closed and given other index sizes: it makes its files as long as it wants them,
    and goes on in the last one in its new way.
    """
    path = tmp_path / "store"
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=400,
                             max_hash_slot_num=50, max_index_num=300)  # fmt: skip
    with rmq.open(path, "x", config=config) as store:
        puts = [store.put(rmq.Message("T", b"", keys=[f"k{n}"], uniq_key=f"u{n}")) for n in range(250)]
    shutil.rmtree(path / "rmq")
    for file in index_files(path):
        os.truncate(file, 40 + 4 * slots + 20 * entries)
    with rmq.IndexFile(index_files(path)[-1], "r+", max_hash_slot_num=slots, max_index_num=entries) as last:
        last.put_keys([f"T#new{n}" for n in range(50)], [puts[-1].phy_offset] * 50, [puts[-1].store_timestamp] * 50)
    return path, puts


def test_a_message_whose_keys_go_on_in_a_file_of_other_sizes_is_found(tmp_path: Path) -> None:
    path, puts = given_other_sizes(tmp_path, 100, 800)
    with rmq.open(path) as store:
        for number, put in enumerate(puts):
            found = store.query("T", f"k{number}")
            assert ([message.phy_offset for message in found], found.complete) == ([put.phy_offset], True)


def test_verify_says_of_files_that_fit_no_sizes_what_an_open_says(tmp_path: Path) -> None:
    path, _ = given_other_sizes(tmp_path, 51, 400)
    with pytest.raises(rmq.CorruptFileError, match="entries fit no geometry"):
        rmq.open(path)
    with pytest.raises(ValueError, match="entries fit no or several geometries"):
        rmq.verify(path)


def test_a_query_sees_a_file_cut_that_another_thread_has_noticed_meanwhile(
    tmp_path: Path, closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That took the file off the list: what was read of it as zeros is no answer all the same."""
    path = copy_store(closed, tmp_path / "s")
    with rmq.open(path) as store:
        assert len(store.query("T", "k3")) == 1
        os.truncate(index_files(path)[0], 300)
        look = index.IndexFile.look

        def looked(file: rmq.IndexFile) -> None:
            look(file)
            if file.path == index_files(path)[0]:
                with pytest.raises(rmq.CorruptFileError, match="truncated"):
                    store._index._check(store._index.files)

        monkeypatch.setattr(index.IndexFile, "look", looked)
        with pytest.raises(rmq.CorruptFileError):
            store.query("T", "k3")


def test_after_a_page_was_lost_later_answers_look_at_no_file(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost an fstat for each index file, in a process that lost a page of any store."""
    for module in (index, openstore):
        monkeypatch.setattr(module, "lost_pages", lambda: 1)
    with rmq.open(closed) as store:
        store.pull("T")
        monkeypatch.setattr(IndexFile, "_check_maps", lambda _: pytest.fail("a file was looked at"))
        assert store.pull("T").messages
