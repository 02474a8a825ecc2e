# SPDX-License-Identifier: Apache-2.0
"""Records of a store of ours that say a wrong place in the queues, which no checksum covers: the others keep theirs."""

from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from test_queue_gaps import CONFIG

import rmq
import rmq.dispatch
import rmq.visible
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
    monkeypatch.setattr(rmq.dispatch, "UNITS_EACH", 1)
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
    """Of it and the one whose place it says the later in the log has the place: nothing tells which is right."""
    path = tmp_path / "s"
    places = put_all(path)
    shutil.rmtree(path / "consumequeue")
    own = 1 - others
    write(path, places[own, 12] + L.RECORD_QUEUE_ID_OFFSET, ">i", others)
    theirs: list[bytes | None] = list(BODIES[others])
    theirs[12] = BODIES[max(QUEUES)][12]
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


# ---- a topic that a broker deleted and made again in a store of ours -------------------------------------------


def made_again(path: Path, old: int, new: int, *, has_files: bool) -> None:
    """Messages of the deleted topic stand in the log before those of the new one, which begin at 0."""
    with rmq.open(path.with_name("live"), "x", config=CONFIG) as store:
        placed = [store.put(rmq.Message("T", b"%s %d" % (kind, number)))
                  for kind, count in ((b"old", old), (b"new", new)) for number in range(count)]  # fmt: skip
        store.flush()
        shutil.copytree(path.with_name("live"), path)
    for number, result in enumerate(placed[old:]):
        write(path, result.phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET, ">q", number)
    shutil.rmtree(path / "consumequeue")
    if has_files:
        (path / "consumequeue/T/0").mkdir(parents=True)
        units = b"".join(struct.pack(">qiq", put.phy_offset, put.size, 0) for put in placed[old:])
        for first in range(0, len(units), 200):
            (path / "consumequeue/T/0" / f"{first:020d}").write_bytes(units[first : first + 200].ljust(200, b"\0"))


@pytest.mark.parametrize("has_files", [False, True], ids=["queues lost", ""])
@pytest.mark.parametrize(("old", "new"), [(10, 4), (4, 10), (1, 2), (1, 12), (12, 2), (25, 25)])
def test_a_topic_that_was_deleted_and_made_again_has_its_new_messages_only(
        tmp_path: Path, batch_rows: int, old: int, new: int, has_files: bool) -> None:  # fmt: skip
    path = tmp_path / "s"
    made_again(path, old, new, has_files=has_files)
    expected = [b"new %d" % number for number in range(new)]
    for mode, options in (("r", {}), ("r+", {}), ("r", {}), ("r+", {}), ("r+", {"repair": True}), ("r", {})):
        with rmq.open(path, mode, config=CONFIG, **options) as store:  # type: ignore[arg-type]
            assert queue_of(store, 0) == expected, mode
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert store.put(rmq.Message("T", b"more")).queue_offset == new


def test_an_older_record_gets_no_second_place_when_all_is_dispatched_again(tmp_path: Path) -> None:
    """Edge: it says the place behind the last unit that is on disk."""
    path = tmp_path / "s"
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        placed = [store.put(rmq.Message("T", b"%d" % number)) for number in range(8)]
        store.put(rmq.Message("T", b"other", queue_id=1))
        store.flush()
        for number in range(8, 14):
            store.put(rmq.Message("T", b"%d" % number))
        shutil.copytree(tmp_path / "live", path)
    write(path, placed[2].phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET, ">q", 8)
    shutil.rmtree(path / "consumequeue/T/1")
    expected = [b"%d" % number if number != 2 else None for number in range(14)]
    for mode, options in (("r", {}), ("r+", {}), ("r", {}), ("r+", {"repair": True}), ("r", {})):
        with rmq.open(path, mode, config=CONFIG, **options) as store:  # type: ignore[arg-type]
            assert queue_of(store, 0) == expected


def test_a_reader_sees_a_queue_begin_again_though_it_has_the_removed_messages_mapped(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The writer cleans and puts between the reader's look at the log and at its mark."""
    writer = rmq.open(tmp_path / "s", "x", config=CONFIG)
    for number in range(3):
        writer.put(rmq.Message("A", b"old %d" % number))
    for _ in range(50):
        writer.put(rmq.Message("B", b"x" * 100))
    writer.flush()
    reader = rmq.open(tmp_path / "s")
    assert reader.topics()["A"] == {0: (0, 3)}
    assert reader.pull("A", 0, 0, 9).messages[0].body == b"old 0"
    looks, real = iter([True]), rmq.visible.lock_holder

    def look(path: Path) -> object:
        if next(looks, False):
            writer.clean(int(time.time() * 1000) + 10**10, limit=None, expired_queues=True)
            writer.put(rmq.Message("A", b"new 0"))
        return real(path)

    monkeypatch.setattr(rmq.visible, "lock_holder", look)
    for number in range(1, 4):
        assert reader.topics()["A"] == {0: (0, number)}
        pulled = reader.pull("A", 0, 0, 9).messages
        assert [message.body for message in pulled] == [b"new %d" % n for n in range(number)]
        writer.put(rmq.Message("A", b"new %d" % number))
    reader.close()
    writer.close()


def test_a_gap_that_is_too_wide_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmq.dispatch, "FILL_LIMIT", 100)
    nothing: Any = None
    dispatcher: rmq.dispatch.Dispatcher[Any] = rmq.dispatch.Dispatcher(nothing, nothing, None, rmq.StoreConfig())
    assert [dispatcher.may_fill(count) for count in (60, 41, 40, 1)] == [True, False, True, False]


def test_places_that_are_filled_are_few_whatever_many_queues_say(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Each alone would have had room for its messages."""
    monkeypatch.setattr(rmq.dispatch, "FILL_LIMIT", 100)
    path = tmp_path / "s"
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        first = [store.put(rmq.Message(f"T{queue}", b"first")) for queue in range(9)]
        store.put_many([rmq.Message("other", b"x" * 3000)] * 9)
        later = [[store.put(rmq.Message(f"T{queue}", b"later")) for _ in range(2)] for queue in range(9)]
        store.flush()
        shutil.copytree(tmp_path / "live", path)
    assert first
    for pair in later:
        for number, result in enumerate(pair):
            write(path, result.phy_offset + L.RECORD_QUEUE_OFFSET_OFFSET, ">q", 61 + number)
    shutil.rmtree(path / "consumequeue")
    for mode in ("r", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            ends = sorted(store.topics()[f"T{queue}"][0][1] for queue in range(9))
            assert ends == [3] * 8 + [63]
