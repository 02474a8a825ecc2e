"""The marks file: what its bytes mean. When it is written and what it survives: power loss and recovery tests."""

from __future__ import annotations

import struct
import zlib
from contextlib import closing
from pathlib import Path

from rmq._core import _layout as L
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
