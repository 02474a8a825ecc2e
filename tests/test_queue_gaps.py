# SPDX-License-Identifier: Apache-2.0
"""Queue files that power loss or somebody took: which are on disk when, and how a queue comes back."""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from cleaning import ROOMY

import rmq
import rmq.filecache
import rmq.retention
from rmq.consumequeue import ConsumeQueue
from rmq.segment import remove_file

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=20,
                         max_index_num=60, flush_interval_commit_log=2**31 - 1)  # fmt: skip
IN_A_FILE = 10  # units
COUNT = 200


def fill(store: rmq.Store, count: int = COUNT, first: int = 0) -> None:
    store.put_many([rmq.Message("T", b"%d" % number) for number in range(first, first + count)])
    store.topics()  # dispatched


def queue_files(path: Path) -> list[Path]:
    return sorted((path / "consumequeue/T/0").iterdir())


def crashed(tmp_path: Path, flushed: int, count: int = COUNT) -> Path:
    """As a killed process leaves it, `count` messages put and the first of them flushed."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        fill(store, flushed)
        store.flush()
        fill(store, count - flushed, flushed)
        shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    return tmp_path / "crashed"


def assert_whole(path: Path, low: int = 0, high: int = COUNT, **options: bool) -> None:
    """Readers and, twice, writers find the messages [low, high) at their queue offsets, and puts go on behind them."""
    for mode in ("r", "r+", "r+")["repair" in options :]:
        with rmq.open(path, mode, config=CONFIG, **options) as store:  # type: ignore[arg-type]
            assert store.topics() == {"T": {0: (low, high)}}
            pulled = store.pull("T", 0, low, high).messages
            assert [(found.queue_offset, int(found.body)) for found in pulled] == [(n, n) for n in range(low, high)]
    assert rmq.verify(path, config=CONFIG).is_sound
    with rmq.open(path, "r+") as store:
        assert store.put(rmq.Message("T", b"")).queue_offset == high


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Each sync: what, and how many files there were beside it."""
    real, seen = os.fsync, []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((path, len(list(path.parent.iterdir()))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


# ---- what is on disk -------------------------------------------------------------------------------------


def test_a_put_into_a_new_queue_syncs_nothing_and_flush_all_files_in_front_of_their_names(
    tmp_path: Path, syncs: list[tuple[Path, int]]
) -> None:
    """The names are the topic's and the queue's directories too."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        syncs.clear()
        fill(store, 35)
        files = queue_files(tmp_path / "s")
        assert len(files) == 4
        queues = tmp_path / "s/consumequeue"
        assert [path for path, _ in syncs if path.is_relative_to(queues)] == []
        store.flush()
        assert [path for path, _ in syncs if path.is_relative_to(queues)] == [*files, *files[0].parents[:3]]
        syncs.clear()
        fill(store, 10, 35)
        store.flush()
        names = [path for path, _ in syncs if path.is_relative_to(queues)]
        assert names == [files[3], queue_files(tmp_path / "s")[4], files[0].parent]


@pytest.mark.parametrize("count", [1, 2, 32, 33, 70])
def test_the_disk_begins_with_many_files_before_a_sync_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: list[tuple[Path, int]], count: int
) -> None:
    """32 at a time; what is synced at once need not be begun."""
    begun: list[tuple[Path, int]] = []

    def begin(descriptor: int, position: int, size: int) -> None:
        assert (position, size) == (0, 0)
        begun.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), len(files())))

    def files() -> list[Path]:
        return [path for path, _ in syncs if path.parent.parent.name == "T" and path.name.isdigit()]

    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for number in range(count):
            store.put(rmq.Message("T", b"", queue_id=number))
        store.topics()
        syncs.clear()
        monkeypatch.setattr(rmq.filecache, "begin_write_out", begin)
        store.flush()
        monkeypatch.undo()
    made = sorted((tmp_path / "s/consumequeue/T").glob("*/*"))
    assert files() == made
    assert begun == [(path, place - place % 32) for place, path in enumerate(made) if place % 32]


def test_without_a_mark_each_file_is_on_disk_before_the_next_is_made(
    tmp_path: Path, syncs: list[tuple[Path, int]]
) -> None:
    """Nothing would tell, after another crash, that a file is missing."""
    path = crashed(tmp_path, 20)
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue")
    syncs.clear()
    rmq.open(path, "r+", config=CONFIG).close()
    files = queue_files(path)
    made = {}
    for synced, count in syncs:
        if synced in files:
            made.setdefault(synced, count)
    assert made == {file: place for place, file in enumerate(files, 1)}


def test_units_that_a_recovery_takes_off_are_gone_from_the_disk_too(
    tmp_path: Path, syncs: list[tuple[Path, int]]
) -> None:
    """Edge: the queue's end stays where it is; the page in front of these units was lost."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        fill(store, 25)
        store.flush()
        end = store.max_phy_offset
        fill(store, 5, 25)
        shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    log, file = tmp_path / "crashed/commitlog" / ("0" * 20), queue_files(tmp_path / "crashed")[2]
    log.write_bytes(log.read_bytes()[:end].ljust(4096, b"\0"))
    units = file.read_bytes()
    file.write_bytes(units[:100] + bytes(20) + units[120:])
    syncs.clear()
    rmq.open(tmp_path / "crashed", "r+", config=CONFIG).close()
    assert file.read_bytes() == units[:100].ljust(200, b"\0")
    assert file in [synced for synced, _ in syncs]


def test_each_queue_file_that_a_recovery_removes_is_gone_from_the_disk_before_the_next_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: list[tuple[Path, int]]
) -> None:
    """Else one may come back behind new units, with units of another life."""
    real = os.unlink

    def unlink(path: Path) -> None:
        real(path)
        syncs.append((path, -1))

    path = crashed(tmp_path, 25, 65)
    directory, unsynced = path / "consumequeue/T/0", queue_files(path)[3:]
    assert len(unsynced) == 4
    monkeypatch.setattr(os, "unlink", unlink)
    syncs.clear()
    rmq.open(path, "r+", config=CONFIG).close()
    removed = [place for place, (file, count) in enumerate(syncs) if count == -1 and file in unsynced]
    assert [syncs[place][0] for place in removed] == unsynced[::-1]
    assert all(syncs[place + 1][0] == directory for place in removed)


# ---- what comes back -------------------------------------------------------------------------------------


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("lose", [remove, pytest.param(empty, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("flushed", "places"), [
    *((15, places) for places in ([2], [3], [3, 4], [3, 5], [2, 19], [18, 19])),
    *((0, places) for places in ([0], [1], [0, 1], [0, 4], [0, 1, 2, 19], [3, 5], [*range(20)])),
])  # fmt: skip
def test_files_behind_the_mark_that_power_loss_took_are_derived_again(
    tmp_path: Path, lose: Callable[[Path], None], flushed: int, places: list[int]
) -> None:
    path = crashed(tmp_path, flushed)
    files = queue_files(path)
    for place in places:
        lose(files[place])
    assert_whole(path)
    assert all(file.stat().st_size == 200 for file in queue_files(path))


@pytest.mark.parametrize("lost", ["T", "T/0", ""])
def test_directories_behind_the_mark_that_power_loss_took_are_made_again(tmp_path: Path, lost: str) -> None:
    path = crashed(tmp_path, 0)
    shutil.rmtree(path / "consumequeue" / lost)
    if lost == "T/0":
        (path / "consumequeue/T").mkdir(exist_ok=True)
    assert_whole(path)


@pytest.mark.parametrize("left", [[1], [2], [1, 2]])
def test_a_new_queue_of_which_only_later_files_are_left_begins_at_0(tmp_path: Path, left: list[int]) -> None:
    """Power loss took its messages, its first file and nobody knows which others."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("A", b""))
        store.flush()
        end = store.max_phy_offset
        fill(store, 25)
        shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    path = tmp_path / "crashed"
    log = path / "commitlog" / ("0" * 20)
    log.write_bytes(log.read_bytes()[:end].ljust(4096, b"\0"))
    for file in {*queue_files(path)} - {queue_files(path)[place] for place in left}:
        file.unlink()
    with rmq.open(path, config=CONFIG) as reader:
        assert reader.topics() == {"A": {0: (0, 1)}}
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert store.topics() == {"A": {0: (0, 1)}}
        assert store.put(rmq.Message("T", b"new")).queue_offset == 0
    assert [int(file.name) for file in queue_files(path)] == [0]
    assert rmq.verify(path, config=CONFIG).is_sound


def test_a_queue_that_a_broker_filled_and_emptied_since_the_mark_goes_on_at_its_offset(tmp_path: Path) -> None:
    """It was killed: its units lie behind the mark, and its messages below the log's begin."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        fill(store, 10)
    shutil.copytree(path / "rmq", tmp_path / "older")
    with rmq.open(path, "r+") as store:
        store.put_many([rmq.Message("old", b"")] * 25)
        end = store.max_phy_offset
        fill(store, 100, 10)
    shutil.rmtree(path / "rmq")
    shutil.move(tmp_path / "older", path / "rmq")
    for segment in (path / "commitlog").iterdir():
        if int(segment.name) < end + 4096:
            segment.unlink()
    (path / "abort").touch()
    for mode in ("r", "r+", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert store.topics()["old"] == {0: (25, 25)}
    with rmq.open(path, "r+") as store:
        assert store.put(rmq.Message("old", b"")).queue_offset == 25


def test_no_empty_file_stays_where_the_log_lost_its_end(tmp_path: Path) -> None:
    """A broker would not load the store."""
    path = crashed(tmp_path, 15)
    for file in queue_files(path)[2:]:
        empty(file)
    for segment in sorted((path / "commitlog").iterdir())[1:]:
        segment.unlink()
    rmq.open(path, "r+", config=CONFIG).close()
    assert all(file.stat().st_size == 200 for file in queue_files(path))
    assert rmq.verify(path, config=CONFIG).is_sound


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("manifest", ["there", pytest.param("gone", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", [slice(0, 1), slice(1, 2), slice(5, 6), slice(3, None), slice(6, None), slice(20)])
def test_missing_files_below_the_log_s_begin_shift_no_queue_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool, manifest: str, lost: slice
) -> None:
    """Edge: a clean that ended between the log's files and the queue's; then some of these files are deleted."""

    class Ended(BaseException):
        pass

    def ends(path: Path, sync: Callable[[Path], None]) -> None:
        if "consumequeue" in path.parts:
            raise Ended
        remove_file(path, sync)

    path = tmp_path / "s"
    monkeypatch.setattr(rmq.retention, "remove_file", ends)
    with rmq.open(path, "x", config=CONFIG) as store:
        fill(store)
        store.flush()
        with pytest.raises(Ended):
            store.clean(2 * 10**12, limit=3, disk_usage=ROOMY)
        low = store.scan(columns=["queue_offset"]).read_all()["queue_offset"][0].as_py()
        if not is_closed:
            shutil.copytree(path, tmp_path / "killed")
    path = path if is_closed else tmp_path / "killed"
    assert low // IN_A_FILE > 6
    for file in queue_files(path)[lost]:
        file.unlink()
    if manifest == "gone":
        (path / "rmq/manifest.json").unlink()
    comes_again = manifest == "gone" and not is_closed and lost not in (slice(1, 2), slice(5, 6))  # those leave a gap
    assert rmq.verify(path, config=CONFIG).is_sound == (lost == slice(0, 1) or comes_again)
    assert_whole(path, low)


def test_verify_tells_a_gap_below_the_mark_from_one_behind_it(tmp_path: Path) -> None:
    path = crashed(tmp_path, 100)
    files = queue_files(path)
    for place, is_sound in ((15, True), (11, True), (5, False)):
        lost = files[place].read_bytes()
        files[place].unlink()
        assert rmq.verify(path, config=CONFIG).is_sound == is_sound
        files[place].write_bytes(lost)


def test_without_marks_a_missing_file_is_an_error_unless_it_is_repaired(tmp_path: Path) -> None:
    """Nobody knows which units there must be."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        fill(store)
    shutil.rmtree(tmp_path / "s/rmq")
    lost = queue_files(tmp_path / "s")[1]
    lost.unlink()
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        assert store.scan().read_all().num_rows  # needs no queue
        asks: list[Callable[[], object]] = [store.topics, store.info, lambda: store.pull("A")]
        for ask in [*asks, lambda: rmq.open(tmp_path / "s", "r+", config=CONFIG)]:
            with pytest.raises(rmq.CorruptFileError, match="segment is missing") as error:
                ask()
            assert error.value.path == str(lost)
    assert_whole(tmp_path / "s", repair=True)
    assert [int(file.name) for file in queue_files(tmp_path / "s")] == [*range(0, COUNT * 20 + 1, 200)]


# ---- units in the middle of a file -----------------------------------------------------------------------


def zeroed(begin: int, end: int) -> Callable[[Path], None]:
    def damage(queues: Path) -> None:
        with (queues / f"A/0/{0:020d}").open("r+b") as file:
            file.seek(begin)
            file.write(bytes(end - begin))

    return damage


def swapped(queues: Path) -> None:
    first, second = (queues / topic / f"0/{0:020d}" for topic in "AB")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def emptied(queues: Path) -> None:
    os.truncate(queues / f"A/0/{0:020d}", 0)


@pytest.fixture(scope="module")
def long_queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """killed: flushed, and no message since; closed: without our directory, as a broker's store."""
    path = tmp_path_factory.mktemp("long")
    config = dataclasses.replace(CONFIG, mapped_file_size_commit_log=65_536, mapped_file_size_consume_queue=20_000)
    with rmq.open(path / "closed", "x", config=config) as store:
        store.put_many([rmq.Message(topic, b"") for topic in "ABC"])
        store.flush()  # the manifest tells of these units only
        store.put_many([rmq.Message(topic, b"%d" % number) for number in range(1, 900) for topic in "ABC"])
        store.flush()
        shutil.copytree(path / "closed", path / "killed")
    for name in ("rmq", "index"):
        shutil.rmtree(path / "closed" / name)
    return path


LOST_UNITS = [("killed", zeroed(10_000, 10_020)), ("killed", zeroed(8192, 12_288)), ("killed", zeroed(9728, 10_240)),
              ("killed", swapped), ("closed", zeroed(10_000, 10_020)), ("closed", zeroed(8192, 12_288)),
              ("closed", swapped), ("closed", emptied)]  # fmt: skip


def assert_long_queues(path: Path, *modes: str) -> None:
    for mode in modes:
        with rmq.open(path, mode) as store:
            assert store.topics() == {topic: {0: (0, 900)} for topic in "ABC"}
            for topic in "ABC":
                pulled = store.pull(topic, 0, 0, 900).messages
                assert [found.queue_offset for found in pulled] == list(range(900))


@pytest.mark.parametrize(("state", "damage"), LOST_UNITS)
def test_a_queue_does_not_end_at_a_unit_that_was_lost(
    tmp_path: Path, long_queues: Path, state: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(long_queues / state, tmp_path / "s")
    damage(tmp_path / "s/consumequeue")
    assert_long_queues(tmp_path / "s", "r", "r+", "r")
    assert rmq.verify(tmp_path / "s").is_sound
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.put(rmq.Message("A", b"")).queue_offset == 900


@pytest.mark.parametrize(("state", "damage"), [LOST_UNITS[1], LOST_UNITS[5]])
@pytest.mark.parametrize("stop", [1, 2, 5, 8])
def test_a_queue_that_lost_units_is_found_again_when_its_recovery_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_queues: Path, state: str, damage: Callable[[Path], None],
    stop: int,
) -> None:  # fmt: skip
    shutil.copytree(long_queues / state, tmp_path / "s")
    damage(tmp_path / "s/consumequeue")
    real, calls = ConsumeQueue.append, iter(range(1, 10))

    def append(self: ConsumeQueue, *arguments: object) -> None:
        if next(calls) == stop:
            raise OSError("stopped")
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ConsumeQueue, "append", append)
    with pytest.raises(OSError, match="stopped"):
        rmq.open(tmp_path / "s", "r+")
    monkeypatch.undo()
    assert_long_queues(tmp_path / "s", "r", "r+")


def two_queues_of_a_broker(path: Path) -> list[rmq.PutResult]:
    """25 messages of T, then 25 of U, closed; where those of T went."""
    with rmq.open(path, "x", config=CONFIG) as store:
        placed = [store.put(rmq.Message(topic, b"%d" % number)) for topic in "TU" for number in range(25)]
    shutil.rmtree(path / "rmq")
    return placed[:25]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["behind the log", "between records"])
@pytest.mark.parametrize("lost", [1, 3])
def test_a_last_unit_that_is_wrong_costs_no_message_of_a_closed_store(tmp_path: Path, wrong: str, lost: int) -> None:
    """Where others' later units would let a recovery go on behind its record."""
    path = tmp_path / "s"
    last = two_queues_of_a_broker(path)[-1]
    unit = {"behind the log": (2**40, 100), "between records": (last.phy_offset + 3, 100)}[wrong]
    file, position = queue_files(path)[2], (5 - lost) * 20
    data = file.read_bytes()
    file.write_bytes(data[:position] + struct.pack(">qiq", *unit, 0) * lost + data[100:])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with rmq.open(path, config=CONFIG) as store:
        assert store.scan().read_all().num_rows == 50
        for ask in (store.topics, lambda: store.pull("T"), lambda: store.pull("U")):
            with pytest.raises(rmq.CorruptFileError, match="no message of its queue, of which") as caught:
                ask()
            assert (caught.value.path, caught.value.offset) == (str(file), position)
    with pytest.raises(rmq.CorruptFileError, match="`rmq rebuild` makes the queues again"):
        rmq.open(path, "r+", config=CONFIG)
    assert {file: file.read_bytes() for file in before} == before
    shutil.copytree(path, tmp_path / "copy")
    rmq.rebuild(tmp_path / "copy", config=CONFIG)
    rmq.open(path, "r+", config=CONFIG, repair=True).close()
    for store_path in (path, tmp_path / "copy"):
        with rmq.open(store_path, "r+", config=CONFIG) as store:
            assert store.topics() == {"T": {0: (0, 25)}, "U": {0: (0, 25)}}
            assert [message.body for message in store.pull("T").messages] == [b"%d" % number for number in range(25)]


def test_units_behind_a_log_that_a_broker_cut_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    begin = two_queues_of_a_broker(path)[-2].phy_offset
    first, *others = sorted((path / "commitlog").iterdir())
    first.write_bytes(first.read_bytes()[:begin].ljust(4096, b"\0"))  # without T's last two messages and all of U's
    for segment in others:
        segment.unlink()
    for mode in ("r", "r+", "r+"):
        with rmq.open(path, mode, config=CONFIG) as store:
            assert store.topics() == {"T": {0: (0, 23)}}
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert store.put(rmq.Message("T", b"")).queue_offset == 23
