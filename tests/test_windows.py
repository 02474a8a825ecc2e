# SPDX-License-Identifier: Apache-2.0
"""A log that is read in windows: the same answers, the same errors, and never more than a window in memory."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmq
import rmq.windows
from rmq import logsegment
from rmq._core import _layout as L
from rmq.windows import WindowedSegment, WindowedStore

SEGMENT = 4096
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=2000, max_hash_slot_num=10,
                         max_index_num=100)  # fmt: skip
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 3900]


@pytest.fixture(params=[8, 300, *(pytest.param(size, marks=pytest.mark.slow) for size in (9, 64, SEGMENT, 2**20))])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size: int = request.param
    monkeypatch.setattr(rmq.windows, "WINDOW", size)
    monkeypatch.setattr(rmq.windows, "BLOCK", min(size, 100))
    return size


def fill(path: Path, count: int = 60, first: int = 0) -> Path:
    """Bodies of many sizes, some of which hold records that give themselves out for others."""
    rng = random.Random(7)
    with rmq.open(path, "a" if first else "x", config=CONFIG) as store:
        for number in range(first, first + count):
            body = rng.randbytes(rng.choice(SIZES))
            if number % 5 == 0 and number:
                body = (path / "commitlog" / f"{0:020d}").read_bytes()[: rng.randrange(400)] + body[:100]
            store.put(rmq.Message("t", body, keys=[f"k{number}", "all"], queue_id=number % 2, tags="A"))
    return path


def windowed(path: Path, *, maps_first: bool = False, has_index: bool = True) -> WindowedStore:
    return WindowedStore(path, maps_first=maps_first, has_index=has_index)


ASKS: list[Callable[[rmq.Store], Any]] = [
    lambda store: store.scan(columns=["phy_offset", "raw_body", "keys"]).read_all().to_pylist(),
    lambda store: store.scan(batch_rows=3, check_crc=False, columns=["phy_offset"]).read_all().to_pylist(),
    lambda store: store.scan(begin_phy_offset=777, end_phy_offset=9001, columns=["phy_offset"]).read_all().to_pylist(),
    lambda store: store.scan(on_damage="skip", columns=["phy_offset"]).read_all().to_pylist(),
    lambda store: store.query("t", "all", limit=None),
    lambda store: store.query_many("t", ["k7", "all"], limit=9, columns=["phy_offset", "body"]).table.to_pylist(),
    lambda store: store.pull("t", 1, 3, 20).messages,
    lambda store: store.lookup(("t", 0, 5)),
    lambda store: store.table("segments").read_all().to_pylist(),
    lambda store: store.search_offset("t", 0, 1),
    lambda store: (store.min_phy_offset, store.max_phy_offset, store.topics()),
]  # fmt: skip


def answers(make: Callable[[], rmq.Store]) -> list[Any]:
    found: list[Any] = []
    try:
        store = make()
    except rmq.RmqError as error:
        return [repr(error)]
    with store:
        for ask in ASKS:
            try:
                found.append(ask(store))
            except rmq.RmqError as error:
                found.append(repr(error))
    return found


def test_windows_give_what_maps_give(tmp_path: Path, window: int) -> None:
    path = fill(tmp_path / "s")
    expected = answers(lambda: rmq.open(path))
    assert len(expected[0]) == 60
    assert answers(lambda: windowed(path)) == expected
    (path / "rmq" / "marks").unlink()  # the end of the log is looked for
    assert answers(lambda: windowed(path)) == answers(lambda: rmq.open(path)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [pytest.param(True, marks=pytest.mark.slow), False])
def test_damage_is_told_alike(tmp_path: Path, window: int, is_known: bool) -> None:
    path = fill(tmp_path / "s")
    if not is_known:
        for name in ("marks", "owner"):
            (path / "rmq" / name).unlink(missing_ok=True)
        (path / "abort").touch()
    rng = random.Random(window)
    files = sorted((path / "commitlog").iterdir())
    whole = {file: file.read_bytes() for file in files}
    for _ in range(25):
        file = rng.choice(files)
        data = bytearray(whole[file])
        at, size = rng.randrange(SEGMENT), rng.choice((1, 4, 50, 600))
        data[at : at + size] = rng.choice((bytes, rng.randbytes))(min(size, SEGMENT - at))
        file.write_bytes(data)
        assert answers(lambda: windowed(path)) == answers(lambda: rmq.open(path))
        file.write_bytes(whole[file])


def test_places_in_a_segment_are_found_alike(tmp_path: Path, window: int) -> None:
    path = fill(tmp_path / "s")
    rng = random.Random(1)
    with rmq.open(path) as mapped, windowed(path) as store:
        for one, other in zip(mapped._log.segments, store._log.segments, strict=True):
            assert isinstance(other, WindowedSegment)
            for _ in range(60):
                begin = rng.randrange(one.start, one.end)
                end = rng.randrange(begin, one.end + 1)
                assert other.resync(begin, end) == one.resync(begin, end)
                assert other.used_end(begin - one.start) == one.used_end(begin - one.start)
                assert other.read(begin - one.start, end - begin) == one.read(begin - one.start, end - begin)
            assert other.read(SEGMENT, 8) == one.read(SEGMENT, 8) == b""


@pytest.mark.slow
def test_a_size_that_leads_past_all_data_ends_no_search(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=2**31 - 4096)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        first, *others = [store.put(rmq.Message("t", bytes(100_000))).phy_offset for _ in range(3)]
    (file,) = (tmp_path / "s" / "commitlog").iterdir()
    with file.open("r+b") as log:
        for at in (first + L.RECORD_SIZE_OFFSET, first + L.RECORD_BODY_SIZE_OFFSET):
            log.seek(at)
            size = int.from_bytes(log.read(4)) + 3 * 2**29
            log.seek(at)
            log.write(size.to_bytes(4))
    for opened in (windowed, rmq.open):  # a map makes pages of what it reads, which are no holes any more
        with opened(tmp_path / "s") as one:
            assert one._log.segments[0].resync(first, 2**30) == others[0]


def test_no_more_than_a_window_or_a_record_is_in_memory(tmp_path: Path, window: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path, sizes = fill(tmp_path / "s"), []
    read = WindowedSegment._bytes

    def noted(segment: WindowedSegment, begin: int, end: int) -> bytes:
        sizes.append(end - begin)
        return read(segment, begin, end)

    monkeypatch.setattr(WindowedSegment, "_bytes", noted)
    with windowed(path) as store:
        largest = max(store.scan(columns=["size"]).read_all()["size"].to_pylist())
        store.query("t", "all", limit=None)
    assert max(sizes) <= max(window, largest, 8)


def test_a_reader_sees_at_once_what_is_put_beside_it(tmp_path: Path, window: int) -> None:
    path = fill(tmp_path / "s", 3)
    with windowed(path) as reader, rmq.open(path, "r+") as writer:
        for number in range(3, 40):
            writer.put(rmq.Message("t", b"x" * SIZES[number % len(SIZES)], keys=["all"], queue_id=0))
            assert len(reader.query("t", "all", limit=None)) == number + 1
            assert reader.max_phy_offset == writer.max_phy_offset
        writer.clean(max_used_percent=0)
        assert reader.scan(columns=["phy_offset"]).read_all().num_rows <= 40


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_that_are_cut_short_or_gone_are_told(tmp_path: Path) -> None:
    path = fill(tmp_path / "s")
    gc.collect()  # what tests before this one left
    before = descriptors()
    first = path / "commitlog" / f"{0:020d}"
    with windowed(path) as store:
        scan = store.scan(batch_rows=1, columns=["phy_offset"])
        scan.read_next_batch()
        os.truncate(first, 300)
        with pytest.raises(rmq.CorruptFileError, match=r"page is gone: the file was truncated while it was open"):
            scan.read_all()
    gc.collect()  # the error holds who read
    assert descriptors() == before
    with windowed(path) as store, pytest.raises(rmq.CorruptFileError, match=r"file has 300 bytes, expected 4096"):
        store.scan().read_all()
    with windowed(path) as store:
        segment = store._log.segments[1]
        segment.read(0, 8)
    with pytest.raises(rmq.StoreClosedError):
        segment.read(0, 8)
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EACCES])
def test_what_cannot_be_mapped_is_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = fill(tmp_path / "s")
    expected = answers(lambda: rmq.open(path))
    assert answers(lambda: windowed(path, maps_first=True)) == expected
    made, map_file = [], logsegment.MappedFile

    def fail(path: Path, **options: Any) -> Any:
        made.append(path.name)
        if len(made) > 2:
            raise OSError(number, os.strerror(number))
        return map_file(path, **options)

    monkeypatch.setattr(logsegment, "MappedFile", fail)
    with windowed(path, maps_first=True) as store:
        if number == errno.ENOMEM:
            assert store.scan(columns=["phy_offset", "raw_body", "keys"]).read_all().to_pylist() == expected[0]
            assert any(segment._is_mapped for segment in store._log.segments)  # type: ignore[attr-defined]
            count = len(made)
            assert [store.scan(columns=["phy_offset"]).read_all().num_rows for _ in range(3)] == [60] * 3
            assert len(made) <= count + 3 * 2, "who could not be mapped is not tried again"
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                store.scan().read_all()


@pytest.mark.parametrize("ask", [
    lambda store, places: store.lookup_many(places, columns=["phy_offset"]),
    lambda store, places: store.lookup_many(places, columns=["phy_offset"], check_crc=False),
    lambda store, places: store.query_many("t", ["all"], limit=None, columns=["phy_offset", "body"]).table,
])  # fmt: skip
def test_a_map_that_another_thread_lets_go_of_and_that_has_no_room_again_hides_no_record(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[rmq.Store, Any], Any]) -> None:  # fmt: skip
    at_once = WindowedSegment.at_once

    def beside_another(segment: WindowedSegment, records: int) -> int:
        count = at_once(segment, records)
        segment.let_go()
        return count

    def fail(path: Path, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with windowed(fill(tmp_path / "s"), maps_first=True) as store:
        places = store.scan(columns=["phy_offset"]).read_all()["phy_offset"]
        monkeypatch.setattr(WindowedSegment, "at_once", beside_another)
        monkeypatch.setattr(logsegment, "MappedFile", fail)
        assert sorted(ask(store, places)["phy_offset"].to_pylist()) == places.to_pylist()


def test_without_an_index_no_file_of_it_is_mapped(tmp_path: Path) -> None:
    path = fill(tmp_path / "s")
    with windowed(path, has_index=False) as store:
        maps = Path("/proc/self/maps").read_text()
        assert f"{path}/index" not in maps
        assert f"{path}/commitlog" not in maps
        assert store.scan(columns=["phy_offset"]).read_all().num_rows == 60
        assert store.lookup(("t", 0, 1)).queue_offset == 1
        with pytest.raises(rmq.UnsupportedFormatError, match="opened without its index"):
            store.query("t", "all")


@pytest.mark.parametrize("window", [300], indirect=True)
def test_a_size_that_the_lengths_belie_makes_no_window(tmp_path: Path, window: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path, sizes = tmp_path / "s", []
    with rmq.open(path, "x", config=CONFIG) as store:
        for _ in range(9):
            store.put(rmq.Message("t", b"body", keys=["all"], queue_id=0))
        third = store.pull("t", 0, 2, 1).messages[0].phy_offset
    log = path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[third : third + 4] = (SEGMENT - third).to_bytes(4, "big")
    log.write_bytes(data)
    expected = answers(lambda: rmq.open(path))
    assert "do not add up" in expected[0]
    read = WindowedSegment._bytes
    monkeypatch.setattr(WindowedSegment, "_bytes",
                        lambda segment, begin, end: (sizes.append(end - begin), read(segment, begin, end))[1])
    assert answers(lambda: windowed(path)) == expected
    assert max(sizes) <= window
