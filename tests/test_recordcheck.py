# SPDX-License-Identifier: Apache-2.0
"""Records beside units and index entries in compiled steps: where these stop, and calls in a wrong order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rmq
from rmq._core import _layout as L
from rmq._core._entrycheck import FAULT_NO_RECORD, EntryCheck
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._queuetable import QueueTable
from rmq._core._record import CHECK_BODY_CRC, SCAN_FULL, SCAN_LIMIT, SCAN_ZERO
from rmq._core._recordbatch import RecordBatch
from rmq._core._recordcheck import WANTS_ENTRIES, WANTS_NOTHING, WANTS_UNITS, RecordCheck
from rmq._core._unitcheck import UnitCheck

SEGMENT = 8 * 1024 * 1024
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=100, max_index_num=100_000)
ALL = 2**62
NO_DELAYS = np.array([], np.int64)


def unit_check() -> UnitCheck:
    return UnitCheck(NO_DELAYS, required_end=ALL)


def check_of(units: UnitCheck, entries: EntryCheck | None = None) -> RecordCheck:
    return RecordCheck(QueueTable(), units, entries or EntryCheck(begin=0, required_end=ALL))


def log_of(path: Path, bodies: list[bytes], *, queues: int = 1, times: list[int] | None = None) -> bytes:
    """The log of one store with a message for each body, queue by queue in turn."""
    clock = iter(times or range(1, len(bodies) + 1))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(clock)) as store:
        for number, body in enumerate(bodies):
            store.put(rmq.Message("T", body, queue_id=number % queues))
    return (path / "commitlog" / f"{0:020d}").read_bytes()


def queue_of(path: Path, number: int, count: int) -> bytes:
    return (path / f"consumequeue/T/{number}/{0:020d}").read_bytes()[: count * L.UNIT_SIZE]


def test_each_queue_s_units_are_asked_for_once_and_those_of_an_ignored_one_not_again(tmp_path: Path) -> None:
    data = log_of(tmp_path / "s", [b"body"] * 30, queues=3)
    units, batch = unit_check(), RecordBatch()
    check = check_of(units)
    check.begin(batch, data, 0, 0, len(data), checks=CHECK_BODY_CRC, step=len(data))
    asked = []
    while (wants := check.go_on()) == WANTS_UNITS:
        asked.append(units.wanted)
        number, first = units.wanted
        if number == 1:
            units.ignore(number)
        else:
            units.load(number, first, queue_of(tmp_path / "s", number, 10))
    assert (wants, batch.stop, asked) == (WANTS_NOTHING, SCAN_ZERO, [(0, 0), (1, 0), (2, 0)])
    assert (check.record_count, units.right, units.behind) == (30, 20, 0)
    assert units.take_spans(last=True).tolist() == [[0, 0, 10, 0, 1], [2, 0, 10, record_begin(data, 2), 1]]
    batch.release()


@pytest.mark.parametrize("queue_offset", [-1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_queue_that_begins_with_an_offset_that_no_unit_has_is_asked_for_too(tmp_path: Path, queue_offset: int,
                                                                              is_ignored: bool) -> None:  # fmt: skip
    data = log_of(tmp_path / "s", [b"body"] * 2)
    data = data[: L.RECORD_QUEUE_OFFSET_OFFSET] + queue_offset.to_bytes(8, "big", signed=True) \
        + data[L.RECORD_QUEUE_OFFSET_OFFSET + 8 :]  # fmt: skip
    units, batch = unit_check(), RecordBatch()
    check = check_of(units)
    check.begin(batch, data, 0, 0, len(data), checks=0, step=len(data))
    assert (check.go_on(), units.wanted) == (WANTS_UNITS, (0, 0))
    if is_ignored:
        units.ignore(0)
    else:
        units.load(0, 0, queue_of(tmp_path / "s", 0, 2))
    assert (check.go_on(), check.record_count, units.right) == (WANTS_NOTHING, 2, 0 if is_ignored else 1)
    wrong = [row for row in units.take_spans(last=True).tolist() if not row[4]]
    assert [(low, phy_offset) for _, low, _, phy_offset, _ in wrong] == ([] if is_ignored else [(queue_offset, 0)])
    batch.release()


def record_begin(data: bytes, number: int) -> int:
    """Where a record begins."""
    batch = RecordBatch()
    batch.scan(data, 0, 0, len(data))
    place = batch.phy_offset(number)
    batch.release()
    return place


@pytest.mark.parametrize("size", [1, 300, 70_000, 400_000])
def test_a_step_ends_behind_its_bytes_and_the_next_one_goes_on_there(tmp_path: Path, size: int) -> None:
    bodies = [bytes([number % 251]) * size for number in range(max(3, 3_000_000 // (size + 100)))]
    data = log_of(tmp_path / "s", bodies)
    units, batch, place, steps = unit_check(), RecordBatch(), 0, 0
    units.load(0, 0, queue_of(tmp_path / "s", 0, len(bodies)))
    check = check_of(units)
    while batch.stop == SCAN_FULL:
        check.begin(batch, data, 0, place, len(data), checks=CHECK_BODY_CRC, step=1024 * 1024)
        assert check.go_on() == WANTS_NOTHING
        assert batch.stop != SCAN_FULL or 1024 * 1024 <= batch.next_phy_offset - place < 1024 * 1024 + 256 * 1024 + size
        place, steps = batch.next_phy_offset, steps + 1
    assert (check.record_count, units.right, batch.stop) == (len(bodies), len(bodies), SCAN_ZERO)
    assert 1 < steps <= place // (1024 * 1024) + 1
    batch.release()


@pytest.mark.parametrize("times", [[5], [5, 6, 7], [7, 6, 5], [0, -3, 9, 2] * 20, list(range(-40, 40))])
def test_the_newest_and_oldest_times_are_those_of_all_records(tmp_path: Path, times: list[int]) -> None:
    data = log_of(tmp_path / "s", [b"body"] * len(times), times=times)
    units, batch = unit_check(), RecordBatch(1)  # a round for each record
    units.ignore(0)
    check = check_of(units)
    check.begin(batch, data, 0, 0, len(data), checks=0, step=len(data))
    assert check.go_on() == WANTS_NOTHING
    assert (check.record_count, check.newest, check.oldest) == (len(times), max(times), min(times))
    batch.release()


def test_calls_in_another_order_are_errors(tmp_path: Path) -> None:
    data = log_of(tmp_path / "s", [b"body"] * 3)
    units, batch = unit_check(), RecordBatch()
    check = check_of(units)
    with pytest.raises(ValueError, match="no step"):
        check.go_on()
    for begin, end in ((-1, 5), (5, 4), (0, len(data) + 1)):
        with pytest.raises(ValueError, match="outside the segment"):
            check.begin(batch, data, 0, begin, end, checks=0, step=1)
        with pytest.raises(ValueError, match="no step"):
            check.go_on()
    with pytest.raises(ValueError, match="at least one byte"):
        check.begin(batch, data, 0, 0, len(data), checks=0, step=0)
    check.begin(batch, data, 0, 0, len(data), checks=0, step=1)
    assert check.go_on() == WANTS_UNITS
    batch.release()
    with pytest.raises(ValueError, match="no step"):
        check.go_on()
    check.begin(batch, data, 0, 0, 0, checks=0, step=1)
    assert (check.go_on(), batch.stop, len(batch)) == (WANTS_NOTHING, SCAN_LIMIT, 0)
    with pytest.raises(ValueError, match="no step"):  # it is done
        check.go_on()
    for queue, wrong in ((-1, bytes(20)), (0, b""), (0, bytes(19))):
        with pytest.raises(ValueError, match="queue's number and at least one unit"):
            units.load(queue, 0, wrong)


def test_an_index_file_that_is_released_stops_a_step(tmp_path: Path) -> None:
    data = log_of(tmp_path / "s", [b"body"] * 3)
    units, batch, entries = unit_check(), RecordBatch(), EntryCheck(begin=0, required_end=ALL)
    view = IndexFileView(bytes(index_file_size(1, 4)), hash_slot_num=1, index_num=4)
    for entry, limit, file in ((0, 4, 0), (1, 5, 0), (1, 4, -1)):
        with pytest.raises(ValueError, match="outside the file"):
            entries.open_file(view, file, entry, limit, begin_timestamp=0, first_begin_timestamp=0, is_last=True)
    entries.open_file(view, 0, 1, 4, begin_timestamp=0, first_begin_timestamp=0, is_last=True)
    check = check_of(units, entries)
    check.begin(batch, data, 0, 0, len(data), checks=0, step=1)
    view.release()
    for call in (check.go_on, lambda: entries.finish(ALL)):
        with pytest.raises(ValueError, match="released"):
            call()
    batch.release()


def test_of_an_index_file_without_a_right_entry_a_bounded_number_of_faults_is_held(tmp_path: Path) -> None:
    """300,000 entries that point between the first record and the second."""
    data = log_of(tmp_path / "s", [b"body"] * 3)
    count, second = 300_000, record_begin(data, 1)
    bytes_of = np.zeros(index_file_size(1, count + 1), np.uint8)
    numbers = bytes_of[-(count + 1) * L.ENTRY_SIZE :].reshape(count + 1, L.ENTRY_SIZE)[:, 4:12].view(">i8")
    numbers[:] = second - 1
    view = IndexFileView(bytes_of, hash_slot_num=1, index_num=count + 1)
    units, batch, entries = unit_check(), RecordBatch(), EntryCheck(begin=0, required_end=0)
    units.ignore(0)
    entries.open_file(view, 7, 1, count + 1, begin_timestamp=0, first_begin_timestamp=0, is_last=True)
    check = check_of(units, entries)
    check.begin(batch, data, 0, 0, len(data), checks=0, step=len(data))
    told: list[int] = []
    while check.go_on() == WANTS_ENTRIES:
        faults = entries.take_faults()
        assert 0 < len(faults) <= 65536
        assert not entries.is_through
        told += faults[:, 2].tolist()
    rest = entries.take_faults(last=True)
    assert set(rest[:, 0].tolist()) == {FAULT_NO_RECORD}
    assert told + rest[:, 2].tolist() == list(range(1, count + 1))
    assert entries.finish(ALL)
    batch.release()
    view.release()
