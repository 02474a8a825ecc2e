# SPDX-License-Identifier: Apache-2.0
"""Records of a store of ours that say a wrong place in the queues, which no checksum covers: the others keep theirs."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from test_queue_gaps import CONFIG

import rmq
import rmq.dispatch
from rmq._core import _layout as L

COUNT = 25
QUEUES = (0, 1)
BODIES = {queue_id: [b"%d of %d" % (number, queue_id) for number in range(COUNT)] for queue_id in QUEUES}


def put_all(path: Path) -> dict[tuple[int, int], int]:
    """COUNT messages of each queue by turns, as a killed process leaves them. Returns (queue id, queue offset) to phy
    offset."""
    places = {}
    with rmq.open(path.with_name("live"), "x", config=CONFIG) as store:
        for number in range(COUNT):
            for queue_id in QUEUES:
                put = store.put(rmq.Message("T", BODIES[queue_id][number], queue_id=queue_id))
                places[queue_id, number] = put.phy_offset
        store.flush()
        shutil.copytree(path.with_name("live"), path)
    return places


def write(path: Path, phy_offset: int, form: str, value: int) -> None:
    size = CONFIG.mapped_file_size_commit_log
    with (path / "commitlog" / f"{phy_offset // size * size:020d}").open("r+b") as file:
        file.seek(phy_offset % size)
        file.write(struct.pack(form, value))


def queue_of(store: rmq.Store, queue_id: int) -> list[bytes | None]:
    """The body at each queue offset, None where it is an error."""
    bodies: list[bytes | None] = []
    first, following = store.topics()["T"][queue_id]
    assert first == 0
    for queue_offset in range(following):
        try:
            [message] = store.pull("T", queue_id, queue_offset, 1).messages
            bodies.append(message.body)
        except rmq.CorruptFileError:
            bodies.append(None)
    return bodies


def check(path: Path, expected: dict[int, list[bytes | None]], *, repair: bool = False) -> None:
    """Readers and, twice, writers see the queues so, and a put goes behind them."""
    if repair:
        rmq.open(path, "r+", config=CONFIG, repair=True).close()
    for mode in ("r", "r+", "r", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert {queue_id: queue_of(store, queue_id) for queue_id in QUEUES} == expected
            assert store.scan().read_all().num_rows == 2 * COUNT
    with rmq.open(path, "r+", config=CONFIG) as store:
        for queue_id, bodies in expected.items():
            assert store.put(rmq.Message("T", b"new", queue_id=queue_id)).queue_offset == len(bodies)
            assert queue_of(store, queue_id) == [*bodies, b"new"]


def altered(bodies: list[bytes], place: int) -> list[bytes | None]:
    return [*bodies[:place], None, *bodies[place + 1 :]]


@pytest.fixture(params=[rmq.dispatch.BATCH_ROWS, 1], ids=["many at once", "one by one"])
def batch_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many records a dispatch sees at once."""
    monkeypatch.setattr(rmq.dispatch, "BATCH_ROWS", request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("repair", [False, True], ids=["", "repair"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["", "queues lost"])
@pytest.mark.parametrize(("place", "says"), [(COUNT - 1, 0), (COUNT - 1, 5), (COUNT - 1, COUNT - 2), (COUNT - 1, 2**40),
                                             (1, 0), (12, 0), (12, 5), (12, 11), (12, -1)])  # fmt: skip
def test_a_wrong_queue_offset_moves_no_other_message(tmp_path: Path, batch_rows: int, place: int, says: int,
                                                     is_lost: bool, repair: bool) -> None:  # fmt: skip
    path = tmp_path / "s"
    places = put_all(path)
    write(path, places[0, place] + L.RECORD_QUEUE_OFFSET_OFFSET, ">q", says)
    if is_lost:
        shutil.rmtree(path / "consumequeue")
    check(path, {0: altered(BODIES[0], place), 1: list(BODIES[1])}, repair=repair)


@pytest.mark.parametrize("repair", [False, True], ids=["", "repair"])
@pytest.mark.parametrize("others", QUEUES)
def test_a_wrong_queue_id_moves_no_other_message(tmp_path: Path, batch_rows: int, others: int, repair: bool) -> None:
    """Of it and the one whose place it says the first in the log has the place: nothing tells which is right."""
    path = tmp_path / "s"
    places = put_all(path)
    shutil.rmtree(path / "consumequeue")
    own = 1 - others
    write(path, places[own, 12] + L.RECORD_QUEUE_ID_OFFSET, ">i", others)
    theirs: list[bytes | None] = list(BODIES[others])
    theirs[12] = BODIES[min(QUEUES)][12]
    check(path, {own: altered(BODIES[own], 12), others: theirs}, repair=repair)


@pytest.mark.parametrize("repair", [False, True], ids=["", "repair"])
def test_places_that_the_log_had_no_room_for_are_not_filled(tmp_path: Path, repair: bool) -> None:
    """All behind a place say queue offsets that are far too large: they go on at the end, an error each."""
    path = tmp_path / "s"
    places = put_all(path)
    shutil.rmtree(path / "consumequeue")
    for number in range(12, COUNT):
        write(path, places[0, number] + L.RECORD_QUEUE_OFFSET_OFFSET, ">q", number + 2**40)
    check(path, {0: [*BODIES[0][:12], *[None] * (COUNT - 12)], 1: list(BODIES[1])}, repair=repair)
    assert sorted(int(file.name) for file in (path / "consumequeue/T/0").iterdir()) == [0, 200, 400]


def test_a_reader_that_passes_over_damage_keeps_the_places_behind_it(tmp_path: Path, batch_rows: int) -> None:
    path = tmp_path / "s"
    places = put_all(path)
    shutil.rmtree(path / "consumequeue")
    for number in (11, 12, 13):
        write(path, places[0, number] + L.RECORD_MAGIC_OFFSET, ">i", 0)
    with rmq.open(path, config=CONFIG) as store:
        assert queue_of(store, 0) == [*BODIES[0][:11], None, None, None, *BODIES[0][14:]]
        assert queue_of(store, 1) == BODIES[1]
