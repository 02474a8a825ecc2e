# SPDX-License-Identifier: Apache-2.0
"""What stands where the log's next segment is to be made."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import oracle
import pytest
from test_preparing import SEGMENT, message, opened

import rmq
from rmq.logsegment import Segment

SMALL = 16384  # of a store whose preparer is called by hand


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


def test_a_segment_that_a_put_has_begun_meanwhile_is_no_leftover(tmp_path: Path) -> None:
    """A clean gives the log another list of segments; the last one of an older list is not the log's."""
    with rmq.open(tmp_path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=SMALL)) as store:
        following, preparer = store._log.following, store._flusher.preparer
        while len(store._log.segments) < 3:
            store.put(message(0))

        class Lock:
            """One that the preparer has only after a clean and puts."""

            def __init__(self) -> None:
                self.lock, self.is_first = threading.Lock(), True

            def __enter__(self) -> None:
                if self.is_first:
                    self.is_first = False
                    assert store.clean(2**42, file_reserved_time=0, limit=1).min_phy_offset == SMALL
                    end = store._log.max_phy_offset
                    while store.max_phy_offset <= end:
                        store.put(message(0))
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                self.lock.release()

        following._lock = Lock()  # type: ignore[assignment]
        preparer.step()
        preparer.step()
        end = store.max_phy_offset
        assert [segment.start for segment in following.kept] == [4 * SMALL]
    with rmq.open(tmp_path) as store:
        assert store.max_phy_offset == end > 3 * SMALL


def test_an_interrupt_as_a_segment_becomes_the_log_s_does_not_leave_it_to_be_removed(tmp_path: Path) -> None:
    """As the one that was prepared: the close removes that."""

    class Interrupted(list[Segment]):
        def append(self, item: Segment) -> None:
            super().append(item)
            raise KeyboardInterrupt

    with rmq.open(tmp_path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=SMALL)) as store:
        count = 0
        while SMALL - store.max_phy_offset > 200:
            count += bool(store.put(message(0)))
        store._log.following.prepare()
        store._log.segments = Interrupted(store._log.segments)
        while len(store._log.segments) < 2:
            with suppress(KeyboardInterrupt):
                count += bool(store.put(message(0)))
        store._log.segments = list(store._log.segments)
        for _ in range(10):
            count += bool(store.put(message(0)))
        end = store.max_phy_offset
    with rmq.open(tmp_path, "r+") as store:
        assert (store.max_phy_offset, store.info().message_count) == (end, count)


@pytest.mark.parametrize("left", range(10))
def test_a_log_whose_end_leaves_no_room_for_a_blank_record_says_so(tmp_path: Path, left: int) -> None:
    """No broker writes one, but bytes from disk may say so."""
    record = oracle.encode_record("T", 0, 0, 0, b"")
    log = oracle.encode_record("T", 0, 0, 0, bytes(1024 - len(record) - left))
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(log.ljust(1024, b"\0"))
    with rmq.open(tmp_path, "r+") as store:
        for put in (store.put, lambda one: store.put_many([one] * 2)):
            if 0 < left < 8:
                with pytest.raises(rmq.CorruptFileError, match=f"byte {1024 - left}: no room is left"):
                    put(rmq.Message("T", bytes(300)))
            else:
                put(rmq.Message("T", bytes(300)))
        store.flush()
        assert store.info().message_count == (1 if 0 < left < 8 else 4)
