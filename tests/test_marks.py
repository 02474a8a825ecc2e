"""The marks file: what its bytes mean. When it is written and what it survives: power loss and recovery tests."""

from __future__ import annotations

import os
import signal
import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from forks import fork, in_child

import rmq
from rmq._core import _layout as L
from rmq._core._record import load_visible, store_visible
from rmq.marks import Mark, Marks


def test_a_cell_of_the_marks_has_each_number_where_the_layout_says(tmp_path: Path) -> None:
    mark = Mark(durable_phy_offset=5, derived_phy_offset=4, indexed_phy_offset=3, index_name=20260101000000000,
                last_phy_offset=2, index_header=bytes(range(L.INDEX_HEADER_SIZE)))  # fmt: skip
    with closing(Marks(tmp_path / "marks", writable=True, create=True)) as marks:
        marks.write(mark)
        marks.write(mark)
    data = (tmp_path / "marks").read_bytes()
    assert len(data) == L.MARKS_SIZE
    for sequence, begin in ((1, L.MARKS_CELL_A_OFFSET), (2, L.MARKS_CELL_B_OFFSET)):
        cell = data[begin : begin + L.CELL_SIZE]
        at = L.CELL_INDEX_HEADER_OFFSET
        assert {place: struct.unpack_from(">q", cell, place)[0] for place in range(0, at, 8)} == {
            L.CELL_SEQUENCE_OFFSET: sequence, L.CELL_DURABLE_PHY_OFFSET_OFFSET: 5, L.CELL_DERIVED_PHY_OFFSET_OFFSET: 4,
            L.CELL_INDEXED_PHY_OFFSET_OFFSET: 3, L.CELL_INDEX_NAME_OFFSET: mark.index_name,
            L.CELL_LAST_PHY_OFFSET_OFFSET: 2}  # fmt: skip
        assert cell[at : L.CELL_CRC_OFFSET] == mark.index_header
        assert struct.unpack_from(">I", cell, L.CELL_CRC_OFFSET)[0] == zlib.crc32(cell[: L.CELL_CRC_OFFSET])


def test_a_reader_sees_the_visible_mark_whole_whenever_another_process_stores_it(tmp_path: Path) -> None:
    low, high = 0x00FF_FFFF_FFFF_FFFF, 0x0100_0000_0000_0000  # all bytes differ
    with closing(Marks(tmp_path / "marks", writable=True, create=True)) as marks:
        marks.show(low)

        def store() -> None:
            while os.getppid() == parent:
                for value in (high, low) * 1000:
                    store_visible(marks.view, value)

        parent = os.getpid()
        child = fork(store)
        try:
            seen = {low}
            while len(seen) == 1:  # until the other process is at it
                seen.add(marks.visible_phy_offset)
            seen.update(marks.visible_phy_offset for _ in range(300_000))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert seen == {low, high}


def test_the_visible_mark_of_too_few_bytes_is_refused() -> None:
    for call in (load_visible, lambda marks: store_visible(marks, 1)):
        with pytest.raises(ValueError, match="shorter than MARKS_SIZE"):
            call(bytearray(L.MARKS_SIZE - 1))


@pytest.mark.parametrize("name", ["rebuild", "replaced"])
def test_an_open_waits_for_no_pipe_where_a_rebuild_leaves_its_files(tmp_path: Path, name: str) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x"))
    os.mkfifo(tmp_path / "s" / "rmq" / name)

    def put() -> int:
        with rmq.open(tmp_path / "s", "r+") as store:
            return store.put(rmq.Message("T", b"y")).queue_offset

    assert in_child(put, patience=10) == 1
    assert not (tmp_path / "s" / "rmq" / name).exists()


def test_a_repair_that_is_refused_for_its_sizes_leaves_damaged_marks(tmp_path: Path) -> None:
    """Without them the next open would go by a broker's rules, and tell nobody."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 16)) as store:
        store.put(rmq.Message("T", b"x"))
    os.truncate(tmp_path / "s/rmq/marks", 100)
    with pytest.raises(ValueError, match="mapped_file_size_commit_log"):
        rmq.open(tmp_path / "s", "a", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 17), repair=True)
    assert (tmp_path / "s/rmq/marks").stat().st_size == 100
    with pytest.raises(rmq.CorruptFileError, match="marks"):
        rmq.open(tmp_path / "s", "a")
