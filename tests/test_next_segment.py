# SPDX-License-Identifier: Apache-2.0
"""What stands where the log's next segment is to be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_preparing import SEGMENT, message, opened


@pytest.mark.parametrize("size", [SEGMENT, 5])
def test_a_blank_file_in_the_place_of_the_next_segment_is_a_leftover(tmp_path: Path, size: int) -> None:
    """As when a signal ends the cleaning up behind a disk that was full."""
    with opened(tmp_path) as store:
        store.put(message(0))
        (tmp_path / "commitlog" / f"{SEGMENT:020d}").write_bytes(bytes(size))
        for number in range(1, 3000):
            store.put(message(number))
        assert store.max_phy_offset > SEGMENT
    with opened(tmp_path, "r") as store:
        assert store.info().message_count == 3000


def test_a_file_with_bytes_in_the_place_of_the_next_segment_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "commitlog" / f"{SEGMENT:020d}"
    with opened(tmp_path) as store:
        store.put(message(0))
        foreign.write_bytes(bytes(5000) + b"x")
        for number in range(1, 1400):
            store.put(message(number))
        with pytest.raises(FileExistsError):
            store.put_many([message(number) for number in range(1400, 3000)])
        assert foreign.read_bytes() == bytes(5000) + b"x"
        foreign.unlink()
        store.put(message(1))
