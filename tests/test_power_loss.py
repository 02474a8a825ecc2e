"""Power loss at its worst moments, each one a store that once did not come back, or came back wrong."""

from __future__ import annotations

import itertools
import shutil
import struct
import threading
import warnings
from pathlib import Path
from typing import Any

import oracle
import pytest
from crashes.recorder import Killed, Recorder
from crashes.states import State, only_synced

import rmq
from rmq import visible
from rmq.coverage import Coverage
from rmq.index import Index

SEGMENT, SECTOR = 4096, 512
FAR = 2**31 - 1  # ms to the next timed flush


def config(**fields: Any) -> rmq.StoreConfig:
    sizes = {"mapped_file_size_commit_log": SEGMENT, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
             "max_index_num": 30, "flush_interval_commit_log": FAR}  # fmt: skip
    return rmq.StoreConfig(**sizes | fields)


def message(number: int, size: int = 50, **fields: Any) -> rmq.Message:
    return rmq.Message(**{"topic": "a", "body": bytes([number % 251 + 1]) * size, "uniq_key": f"u{number}"} | fields)


def names(store: rmq.Store) -> list[str]:
    return store.scan(columns=["uniq_key"]).read_all()["uniq_key"].to_pylist()


def pulled(store: rmq.Store) -> dict[tuple[str, int], list[str | None]]:
    return {(topic, queue_id): [found.uniq_key for found in store.pull(topic, queue_id, 0, 1000).messages]
            for topic, queues in store.topics().items() for queue_id in queues}  # fmt: skip


def image_of(path: Path, target: Path) -> Path:
    """A copy of a store that is open: everything stored is on disk, and it was not closed."""
    return Path(shutil.copytree(path, target))


def left_at(state: State, target: Path) -> Path:
    state.write(target)
    return target / "s"


def zero(path: Path, begin: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def assert_whole(path: Path, expected: list[str]) -> None:
    """Both kinds of reader see these messages, in log and queues, and the parts of the store agree."""
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            assert names(store) == expected
            assert sorted(name for queue in pulled(store).values() for name in queue) == sorted(expected)
    assert oracle.check_store(path, 10, 30) == []


def abandon(store: rmq.Store) -> None:
    """Let go of a store as a killed process does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        store.__del__()


# ---- queues ----------------------------------------------------------------------------------------------


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """Eight messages of queue 0, of which a flush covered four; the rest had reached every file."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        for number in range(4):
            store.put(message(number))
        store.flush()
        for number in range(4, 8):
            store.put(message(number))
        store.topics()
        return image_of(tmp_path / "s", tmp_path / "crashed")


QUEUE = "consumequeue/a/0/00000000000000000000"


@pytest.mark.parametrize(("begin", "end"), [(80, 100), (100, 120), (80, 140), (80, 88), (108, 120)])
def test_a_reader_derives_the_units_behind_the_mark_whatever_the_file_holds(
    crashed: Path, begin: int, end: int
) -> None:
    zero(crashed / QUEUE, begin, end)
    assert_whole(crashed, [f"u{number}" for number in range(8)])


@pytest.mark.parametrize(("begin", "end"), [(80, 88), (80, 87)])
def test_a_unit_that_lost_its_offset_is_none(crashed: Path, begin: int, end: int) -> None:
    """Half of the unit was in a sector that is lost, and so is the message: what is left points below the mark."""
    zero(crashed / "commitlog" / f"{0:020d}", oracle.read_records(crashed)[4].phy_offset, SEGMENT)
    zero(crashed / QUEUE, begin, end)
    zero(crashed / QUEUE, 100, 160)
    with rmq.open(crashed) as reader:
        found = names(reader)
    assert found == [f"u{number}" for number in range(4)]
    assert_whole(crashed, found)


@pytest.fixture
def unmarked(tmp_path: Path) -> Path:
    """As a broker's store: 120 messages in one queue file of several sectors, 40 of them flushed.

    Each has a time of its own: the checkpoint's time says of every record of that millisecond that it was durable.
    """
    ticks = itertools.count(1_700_000_000_000)
    with rmq.open(tmp_path / "s", "x", config=config(mapped_file_size_consume_queue=2400),
                  clock=lambda: next(ticks)) as store:  # fmt: skip
        for number in range(120):
            store.put(message(number))
            if number == 39:
                store.flush()
        store.topics()
        image = image_of(tmp_path / "s", tmp_path / "unmarked")
    shutil.rmtree(image / "rmq")
    return image


@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [2], [1, 3], [0, 1, 2, 3, 4]])
def test_without_marks_a_reader_takes_from_the_log_what_a_queue_lost(unmarked: Path, lost: list[int]) -> None:
    for sector in lost:
        zero(unmarked / QUEUE, sector * SECTOR, min((sector + 1) * SECTOR, 2400))
    assert_whole(unmarked, [f"u{number}" for number in range(120)])


def test_a_reader_that_derived_a_queue_anew_does_not_go_back_to_its_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Edge: for more units than it keeps in memory of other queues."""
    monkeypatch.setattr(visible, "TAIL_LIMIT", 400)
    with rmq.open(tmp_path / "s", "x", config=config(mapped_file_size_consume_queue=2400)) as store:
        for number in range(120):
            store.put(message(number))
        store.flush()
        image = image_of(tmp_path / "s", tmp_path / "image")
    zero(image / QUEUE, 0, SECTOR)
    with rmq.open(image) as reader:
        for _ in range(2):
            assert pulled(reader) == {("a", 0): [f"u{number}" for number in range(120)]}
            reader.clean(dry_run=True)  # which looks at the files anew
    assert_whole(image, [f"u{number}" for number in range(120)])


@pytest.mark.parametrize("lost", [40, 41, 118, 119])
def test_without_marks_units_of_what_lies_behind_a_lost_message_are_none(unmarked: Path, lost: int) -> None:
    record = oracle.read_records(unmarked)[lost]
    place = record.phy_offset % SEGMENT
    zero(unmarked / "commitlog" / f"{record.phy_offset - place:020d}", place, place + record.size)
    assert_whole(unmarked, [f"u{number}" for number in range(lost)])


def test_a_reader_of_a_shifted_queue_beside_one_that_is_gone_sees_what_a_recovery_finds(tmp_path: Path) -> None:
    """A broker's store, crashed: X lost a unit long ago and went on; for Y the whole log is dispatched."""
    ticks = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    with rmq.open(tmp_path / "s", "x", config=config(mapped_file_size_consume_queue=2000),
                  clock=lambda: next(ticks)) as store:  # fmt: skip
        for number in range(90):
            store.put(message(number, topic="XY"[number % 3 == 2]))
        store.topics()
        image = image_of(tmp_path / "s", tmp_path / "crashed")
    shutil.rmtree(image / "rmq")
    shutil.rmtree(image / "consumequeue/Y")
    (image / "checkpoint").write_bytes(struct.pack(">3q", *[next(ticks) - 6000] * 3).ljust(4096, b"\0"))
    queue = image / "consumequeue/X/0" / ("0" * 20)
    units = queue.read_bytes()
    queue.write_bytes((units[:260] + units[280:]).ljust(2000, b"\0"))
    with rmq.open(image) as reader:
        seen = pulled(reader)
    with rmq.open(image, "r+") as store:
        assert seen == pulled(store)
    assert {key: len(found) for key, found in seen.items()} == {("X", 0): 60, ("Y", 0): 30}


def test_a_queue_of_which_only_files_behind_the_mark_are_left_is_derived_anew(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        for number in range(4):
            store.put(message(number))
        store.flush()
        for number in range(4, 12):
            store.put(message(number))
        store.topics()
        image = image_of(tmp_path / "s", tmp_path / "image")
    (image / QUEUE).unlink()
    assert (image / "consumequeue" / "a" / "0" / f"{200:020d}").exists()
    with rmq.open(image) as reader:
        assert pulled(reader) == {("a", 0): [f"u{number}" for number in range(12)]}
    assert_whole(image, [f"u{number}" for number in range(12)])


@pytest.fixture
def entries_lost(tmp_path: Path) -> Path:
    """Slots point to entries that did not reach the disk, and with them to all older ones."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        for number in range(4):
            store.put(message(number, keys=["k0"]))
        store.flush()
        for number in range(4, 8):
            store.put(message(number, keys=["k0"]))
        store.topics()
        image = image_of(tmp_path / "s", tmp_path / "image")
    (index,) = (image / "index").iterdir()
    entry = 40 + 4 * 10 + 20 * 9
    assert any(index.read_bytes()[entry : entry + 160])
    zero(index, entry, entry + 160)
    return image


@pytest.mark.parametrize("keys", [["k0"], ["k0", "none", "k0"], []])
def test_a_reader_finds_by_key_what_was_flushed_though_newer_entries_are_lost(
        entries_lost: Path, keys: list[str]) -> None:  # fmt: skip
    with rmq.open(entries_lost) as reader:
        found = reader.query_many("a", keys).table
        assert found["uniq_key"].to_pylist() == [f"u{number}" for number in range(7, -1, -1)] * keys.count("k0")
        assert reader.lookup("u2", topic="a").uniq_key == "u2"


def test_a_query_takes_from_the_index_what_counts_though_another_thread_asks_too(
        entries_lost: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Edge: the other one is amid its look at what counts."""
    looks, collected = threading.Event(), threading.Event()
    by_manifest, collect = Coverage.by_manifest, Index.collect

    def look(coverage: Coverage) -> tuple[bool, bool]:
        if threading.current_thread() is other:
            looks.set()
            assert collected.wait(10)
        return by_manifest(coverage)

    def collect_amid(*asked: Any) -> Any:
        if threading.current_thread() is not other:
            other.start()
            assert looks.wait(10)
        answer = collect(*asked)
        collected.set()
        return answer

    monkeypatch.setattr(Coverage, "by_manifest", look)
    monkeypatch.setattr(Index, "collect", collect_amid)
    with rmq.open(entries_lost) as reader:
        other = threading.Thread(target=lambda: reader.query("a", "k0"))
        assert [found.uniq_key for found in reader.query("a", "k0")] == [f"u{number}" for number in range(7, -1, -1)]
        other.join()


# ---- the log ---------------------------------------------------------------------------------------------


def test_a_torn_first_record_of_a_segment_ends_the_log_in_the_one_before(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        store.put(message(0))
        store.flush()
        places = [store.put(message(number, 1000)).phy_offset for number in range(1, 5)]
        image = image_of(tmp_path / "s", tmp_path / "image")
    assert places[-1] == SEGMENT
    for name in ("rmq/marks", "commitlog/00000000000000004096"):
        assert (image / name).stat().st_size == SEGMENT
    zero(image / "commitlog" / f"{SEGMENT:020d}", 0, 4)
    assert_whole(image, ["u0", "u1", "u2", "u3"])
    with rmq.open(image, "r+") as store:
        assert store.put(message(5, 1000)).phy_offset == SEGMENT
    assert_whole(image, ["u0", "u1", "u2", "u3", "u5"])


def test_what_lies_behind_an_end_of_segment_record_does_not_come_back(tmp_path: Path) -> None:
    """A sector of the record that was written over the blank one is lost: the old blank one shows, with its junk."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        places = [store.put(message(number)).phy_offset for number in range(3)]
        image = image_of(tmp_path / "s", tmp_path / "image")
    segment = image / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    struct.pack_into(">iI", data, places[1], SEGMENT - places[1], oracle.MAGIC_BLANK)
    segment.write_bytes(data)
    with rmq.open(image, "r+") as store:
        assert names(store) == ["u0"]
        assert store.put(message(3)).phy_offset == places[1]
        assert names(store) == ["u0", "u3"]
        again = image_of(image, tmp_path / "again")
    assert_whole(again, ["u0", "u3"])


def test_an_old_end_of_segment_record_does_not_stand_for_a_lost_message(tmp_path: Path) -> None:
    """Recovery takes it off: else messages behind it would follow the gap."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        store.put(message(0))
        store.flush()
        places = [store.put(message(number, 1000)).phy_offset for number in range(1, 5)]
        image = image_of(tmp_path / "s", tmp_path / "image")
    zero(image / "commitlog" / f"{SEGMENT:020d}", 0, 4)
    with rmq.open(image, "r+") as store:
        end = store.max_phy_offset
        assert places[-2] < end < SEGMENT
        assert store.put(message(5, 100)).phy_offset == end
        assert store.put(message(6, 1000)).phy_offset == SEGMENT
        again = image_of(image, tmp_path / "again")
    zero(again / "commitlog" / f"{0:020d}", end, SEGMENT)  # what is on disk of it since the recovery
    assert_whole(again, ["u0", "u1", "u2", "u3"])


@pytest.mark.parametrize("first", [20, 30, 70])
def test_properties_that_lost_the_name_of_their_crc_are_torn(tmp_path: Path, first: int) -> None:
    """Their last bytes reached the disk, those before them did not."""
    with rmq.open(tmp_path / "s", "x", config=config(enabled_append_prop_crc=True)) as store:
        store.put(message(0, properties={"p": "a\0b"}))
        store.flush()
        torn = store.put(message(1, properties={"p": "x" * 100}))
        image = image_of(tmp_path / "s", tmp_path / "image")
    end = torn.phy_offset + torn.size
    zero(image / "commitlog" / f"{0:020d}", end - first, end - 2)
    assert_whole(image, ["u0"])


def test_properties_of_which_the_end_was_not_stored_are_torn(tmp_path: Path) -> None:
    """The CRC is the last property: without it nothing else tells."""
    with rmq.open(tmp_path / "s", "x", config=config(enabled_append_prop_crc=True)) as store:
        store.put(message(0))
        store.flush()
        torn = store.put(message(1, properties={"p": "x" * 100}))
        image = image_of(tmp_path / "s", tmp_path / "image")
    end = torn.phy_offset + torn.size
    zero(image / "commitlog" / f"{0:020d}", end - 60, end)
    assert_whole(image, ["u0"])


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
def test_properties_that_would_end_with_a_nul_are_refused(tmp_path: Path, version: str) -> None:
    """Releases 4.9.1 to 5.1 drop the separator behind the last property."""
    with rmq.open(tmp_path / "s", "x", config=config(rocketmq_version=version)) as store:
        with pytest.raises(rmq.IllegalMessageError, match="NUL"):
            store.put(message(0, raw_properties=b"p\1x\0", uniq_key=None))
        odd = message(1, properties={"p": "x\0"})
        if version == "4.9.8":
            with pytest.raises(rmq.IllegalMessageError, match="NUL"):
                store.put(odd)
        else:
            assert store.lookup(store.put(odd).phy_offset).properties["p"] == "x\0"
        assert store.lookup(store.put(message(2, properties={"p": "x\0y"})).phy_offset).properties["p"] == "x\0y"


# ---- a process that was killed before the power failed ---------------------------------------------------


def session(path: Path, first: int, kind: str) -> rmq.Store:
    store = rmq.open(path, "a", config=config(flush_disk_type=kind))
    for number in range(first, first + 3):
        store.put(message(number, 1000, queue_id=number % 2))
    return store


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_what_is_flushed_after_a_killed_process_is_on_disk_with_all_before_it(tmp_path: Path, kind: str) -> None:
    """The process is killed at each of its calls in turn; names and bytes it left unsynced count for nothing."""
    kill_at, is_killed = 1, True
    while is_killed:
        root = tmp_path / str(kill_at)
        root.mkdir()
        with Recorder(root) as recorder:
            recorder.kill_at = kill_at
            store = None
            try:
                store = session(root / "s", 0, "ASYNC_FLUSH")
                store.flush()
            except Killed:
                pass
            is_killed = recorder.is_dead
            recorder.is_dead = True
            if store is not None:
                abandon(store)
            recorder.revive()
            store = session(root / "s", 10, kind)
            if kind == "ASYNC_FLUSH":
                store.flush()
            expected = names(store)
            recorder.look()
            moment = len(recorder.events)
            store.close()
        assert expected[-3:] == ["u10", "u11", "u12"]
        assert_whole(left_at(only_synced(recorder.events[:moment]), tmp_path / f"image{kill_at}"), expected)
        kill_at += 1
    assert kill_at > 60


# ---- power that fails again during recovery --------------------------------------------------------------


def recovering(image: Path, root: Path, queue_id: int) -> list[State]:
    """Disks with nothing but what was synced, after each event of a recovery and of a flushed put behind it."""
    root.mkdir()
    image_of(image, root / "s")
    with Recorder(root) as recorder, rmq.open(root / "s", "r+") as store:
        store.put(message(90, queue_id=queue_id))
        store.flush()
        recorder.look()
    return [only_synced(recorder.events[:moment]) for moment in range(recorder.begin, len(recorder.events))]


@pytest.mark.slow
def test_a_recovery_that_removes_files_may_stop_anywhere(tmp_path: Path) -> None:
    """Later segments of log and queues go one by one, the last first; what is gone stays gone."""
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        store.put(message(0))
        store.flush()
        places = [store.put(message(number, 600)).phy_offset for number in range(1, 30)]
        store.topics()
        image = image_of(tmp_path / "s", tmp_path / "image")
    assert len(list((image / "commitlog").iterdir())) > 4
    assert len(list((image / "consumequeue" / "a" / "0").iterdir())) == 3
    zero(image / "commitlog" / f"{0:020d}", places[0], places[0] + 1000)
    states = recovering(image, tmp_path / "root", 1)
    gaps = {len([name for name in state.files if name.startswith("s/commitlog/")]) for state in states}
    assert gaps >= {1, 2, 3, 4}
    for number, state in enumerate(states):
        path = left_at(state, tmp_path / str(number))
        with rmq.open(path, "r+") as store:
            assert names(store)[0] == "u0"
            assert set(names(store)) <= {"u0", "u90"}
            assert pulled(store)["a", 0] == ["u0"]
        assert oracle.check_store(path, 10, 30) == []
