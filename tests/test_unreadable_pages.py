# SPDX-License-Identifier: Apache-2.0
"""Single pages that the disk cannot read: what lies behind them, and what does not need them, is read all the same."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import rmq
from rmq.logsegment import Segment
from rmq.mappedfile import GuardedMap, MappedFile

PAGE = mmap.PAGESIZE
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=20_000, max_index_num=30_000)


@pytest.fixture
def empty() -> Iterator[IO[bytes]]:
    """A file without bytes: a page of it that is mapped is as one that the disk cannot read."""
    with tempfile.TemporaryFile() as file:
        yield file


def spoil(mapped: Any, page: int, empty: IO[bytes]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + page * PAGE
    shared_fixed = mmap.MAP_SHARED | 0x10
    assert libc.mmap(place, PAGE, mmap.PROT_READ, shared_fixed, empty.fileno(), 0) == place


def test_each_page_that_cannot_be_read_is_zeros_and_no_other(empty: IO[bytes]) -> None:
    pages, bad = 4096, range(10, 4096, 400)
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * (PAGE * pages))
        file.flush()
        mapped = GuardedMap.of(file.fileno(), PAGE * pages, mmap.ACCESS_WRITE)
        for page in bad:
            spoil(mapped, page, empty)
        lost = [page for page in range(pages) if mapped[page * PAGE] != ord("x")]
        del mapped
    assert lost == [*bad]


@pytest.mark.parametrize("check_crc", [True, False])
def test_a_scan_that_skips_damage_goes_on_behind_an_unreadable_page_of_a_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: IO[bytes], check_crc: bool
) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for _ in range(20):
            store.put(rmq.Message("T", b"x" * 4 * PAGE))
    real = Segment.of_any_size

    def spoiled(segment: Segment, begin: int, end: int) -> MappedFile:
        file = MappedFile(segment.path, writable=True, start=real(segment, begin, end).start)
        spoil(file.map, 42, empty)  # amid the body of the record that begins on page 40
        return file

    monkeypatch.setattr(Segment, "of_any_size", spoiled)
    with rmq.open(tmp_path / "s") as store:
        lost: list[rmq.LostRange] = []
        table = store.scan(columns=["body"], on_damage="skip", check_crc=check_crc, lost=lost).read_all()
    assert table.num_rows == 19
    assert set(table["body"].to_pylist()) == {b"x" * 4 * PAGE}
    assert len(lost) >= 1
    assert lost[0].begin_phy_offset <= 42 * PAGE < lost[0].end_phy_offset


@pytest.mark.parametrize("check_crc", [True, False])
@pytest.mark.parametrize(("column", "rows"), [("raw_properties", 19), ("properties", 19), ("body", 20), ("tags", 20)])
def test_a_scan_that_skips_damage_goes_on_behind_an_unreadable_page_of_properties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: IO[bytes], check_crc: bool, column: str, rows: int
) -> None:
    """Who asks for none of them may get the message. No value holds bytes that nobody put."""
    value = "y" * 4 * PAGE
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for _ in range(20):
            store.put(rmq.Message("T", b"x" * 100, properties={"p": value}))
    real = Segment.of_any_size

    def spoiled(segment: Segment, begin: int, end: int) -> MappedFile:
        file = MappedFile(segment.path, writable=True, start=real(segment, begin, end).start)
        spoil(file.map, 42, empty)
        return file

    monkeypatch.setattr(Segment, "of_any_size", spoiled)
    with rmq.open(tmp_path / "s") as store:
        table = store.scan(columns=[column], on_damage="skip", check_crc=check_crc).read_all()
    assert rows - 1 <= table.num_rows <= rows
    assert "\0" not in str(table[column].to_pylist()).replace("\\x00", "\0")


def test_what_reads_no_index_does_not_fail_for_a_page_of_it(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"x" * 100, keys=f"k{number}") for number in range(6000)])
    with rmq.open(tmp_path / "s") as store:
        os.truncate(next((tmp_path / "s/index").iterdir()), 100_000)
        with pytest.raises(rmq.CorruptFileError, match="index"):
            store.query_many("T", [f"k{number}" for number in range(100)])
        for _ in range(2):
            assert len(store.pull("T", 0, 10, 5).messages) == 5
            assert store.scan().read_all().num_rows == store.scan(on_damage="skip").read_all().num_rows == 6000
            assert store.topics() == {"T": {0: (0, 6000)}}


def ask(path: Path) -> None:
    with rmq.open(path) as store:
        store.pull("T")
        store.info()


@pytest.mark.parametrize("name", ["rmq/meta.json", "checkpoint", "consumequeue"])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"x")] * 10)

    def failing(call: Any) -> Any:
        def read(descriptor: int, *arguments: int) -> bytes:
            if name in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(descriptor, *arguments)  # type: ignore[no-any-return]

        return read

    for call in ("read", "pread"):
        monkeypatch.setattr(os, call, failing(getattr(os, call)))
    with pytest.raises(OSError, match=rf"Input/output error: '.*{name}"):
        ask(tmp_path / "s")
