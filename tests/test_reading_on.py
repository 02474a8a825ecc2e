# SPDX-License-Identifier: Apache-2.0
"""Where a fault of the log's map may read the file ahead: not behind the end of a log that large batches go to."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_preparing import FLUSHES, SEGMENT, message, opened

import rmq
import rmq.commitlog
import rmq.preparing
from rmq.mappedfile import MappedFile

PAGE = 4096


def random_parts(path: Path) -> list[tuple[int, int]]:
    """Positions [begin, end) of a file, as this process has mapped it, that are not read ahead."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        pytest.skip("no /proc/self/smaps")
    found, part = [], None
    for line in lines:
        name, *values = line.split()
        if len(values) > 4 and values[4] == str(path):
            begin, end = (int(address, 16) for address in name.split("-"))
            part = (int(values[1], 16), int(values[1], 16) + end - begin)
        elif name == "VmFlags:":
            if part is not None and "rr" in values:
                found.append(part)
            part = None
    return found


@pytest.mark.parametrize("flush", FLUSHES)
def test_large_batches_end_it_and_small_ones_have_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", 20_000)
    for limit in ("WARM_AHEAD", "FILL_STEP"):  # into pages that were brought in large ones are stored, too
        monkeypatch.setattr(rmq.preparing, limit, PAGE)
    path = tmp_path / "s/commitlog" / f"{0:020d}"
    with opened(tmp_path / "s", flush_disk_type=flush) as store:
        work = store._flusher.preparer.work

        def put(count: int, size: int) -> int:
            """The page that the log then ends in."""
            store.put_many([message(i, size) for i in range(count)])
            work()
            return store.max_phy_offset // PAGE * PAGE

        is_written = flush == "SYNC_FLUSH"  # also a small batch
        end = put(1, 100)
        assert random_parts(path) == ([(end, SEGMENT)] if is_written else [])
        for _ in range(2):
            end = put(50, 1000)
            assert random_parts(path) == [(end, SEGMENT)]
        end = put(1, 100)
        assert random_parts(path) == ([(end, SEGMENT)] if is_written else [])
        put(20, 1000)
        assert random_parts(path) != []
        while store.max_phy_offset < SEGMENT:
            store.put_many([message(i, 1000) for i in range(20)])
        assert random_parts(path) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_segment_that_a_put_left_meanwhile_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """Before the preparer's advice for it, or after; the new segment is made ready all the same."""
    monkeypatch.setattr(rmq.commitlog, "WRITTEN_FROM", 0)
    real = MappedFile.read_on
    path = tmp_path / "s/commitlog" / f"{0:020d}"
    with opened(tmp_path / "s") as store:
        store.put_many([message(i, 1000) for i in range(20)])

        def rolled(file: MappedFile, used: int, *, behind: bool) -> None:
            monkeypatch.setattr(MappedFile, "read_on", real)
            for step in ("before", "after"):
                if step == moment:
                    store.put_many([message(i, 1000) for i in range(300)])
                else:
                    real(file, used, behind=behind)

        monkeypatch.setattr(MappedFile, "read_on", rolled)
        store._flusher.preparer.work()
        assert len(store._log.segments) == 2
        assert random_parts(path) == []
        assert store._log.segments[-1].file.reserved > 0
    assert caplog.text == ""
