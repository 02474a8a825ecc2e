# ruff: noqa: F401, F811
"""Sound stores give no finding: RocketMQ's own, ours of every kind, recovered, repaired, and while they are written."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES, Golden, copy_store
from forks import lock_of_a_broker
from test_verify_damage import CONFIG, base, message

import rmq

SMALL = dict(SIZES)


def assert_sound(path: Path, **options: Any) -> rmq.VerifyResult:
    result = rmq.verify(path, **options)
    assert result == [], "\n".join(map(str, result))
    assert result.is_sound
    return result


# ---- RocketMQ's --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rocketmq_s_own_stores_give_no_finding_and_every_record_unit_and_entry_is_counted(golden: Golden) -> None:
    result = assert_sound(golden.directory / "store")
    records = oracle.read_records(golden.directory / "store")
    version = golden.config["rocketmq_version"]
    assert result.record_count == len(records) == len(golden.stored)
    assert result.unit_count == sum(map(len, oracle.expected_units(records, version).values()))
    assert result.entry_count == len(oracle.expected_index_entries(records, version))
    assert result.state == "closed"


@pytest.mark.parametrize("is_ours_since", [True, False])
def test_an_index_file_that_releases_before_and_after_4_8_wrote_is_sound(tmp_path: Path, is_ours_since: bool) -> None:
    """The older count each entry as a used slot, the later ones go on from there."""
    path = tmp_path / "s"
    for version, count in (("4.7.0", 12), ("5.3.3", 3)):
        with rmq.open(path, "a", config=rmq.StoreConfig(**SIZES, rocketmq_version=version)) as store:
            store.put_many([rmq.Message("T", b"", keys=f"k{number}") for number in range(count)])
        if version == "4.7.0" or not is_ours_since:
            shutil.rmtree(path / "rmq")
    assert_sound(path)


@pytest.mark.parametrize("is_brokers", [True, False])
def test_properties_that_end_with_nul_are_damage_of_ours_and_no_finding_of_a_brokers(
    tmp_path: Path, is_brokers: bool
) -> None:
    """RocketMQ 5.2.0 and 5.3.0 store such ones of messages for light queues."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(**SIZES, rocketmq_version="4.9.8")) as store:
        places = [store.put(rmq.Message("T", b"body", keys="k", properties={"p": "v"})) for _ in range(3)]
    if is_brokers:
        shutil.rmtree(path / "rmq")
    with open(path / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(places[1].phy_offset + places[1].size - 1)
        assert file.read(1) == b"v"
        file.seek(-1, 1)
        file.write(b"\0")
    result = rmq.verify(path)
    assert [item.kind for item in result] == ([] if is_brokers else ["sector"])
    assert (result.record_count, result.unit_count, result.entry_count) == (3, 3, 3)


@pytest.mark.parametrize(("before", "after"), [(6, 3), (3, 6)])
def test_a_topic_that_was_deleted_and_made_again_is_sound(tmp_path: Path, before: int, after: int) -> None:
    store = tmp_path / "store"
    with rmq.open(store, "x") as writer:
        writer.put_many([rmq.Message("Orders", b"%d" % number) for number in range(before)])
        writer.put(rmq.Message("A", b""))  # else the topic comes back: see docs/limits.md
    shutil.rmtree(store / "consumequeue" / "Orders")  # as a broker's deleteTopic does
    shutil.rmtree(store / "rmq")  # of which a broker's store has none
    with rmq.open(store, "a") as writer:
        writer.put_many([rmq.Message("Orders", b"again %d" % number) for number in range(after)])
        writer.put(rmq.Message("A", b""))
        assert writer.topics()["Orders"] == {0: (0, after)}
    assert list(rmq.verify(store)) == []
    rmq.rebuild(store, processes=1)
    assert list(rmq.verify(store)) == []


def test_a_lost_unit_of_a_topic_that_was_made_again_is_found(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with rmq.open(store, "x") as writer:
        writer.put_many([rmq.Message("Orders", b"")] * 6)
        writer.put(rmq.Message("A", b""))
    shutil.rmtree(store / "consumequeue" / "Orders")
    shutil.rmtree(store / "rmq")
    with rmq.open(store, "a") as writer:
        writer.put_many([rmq.Message("Orders", b"")] * 9)
    queue = next((store / "consumequeue" / "Orders" / "0").iterdir())
    with open(queue, "r+b") as file:
        file.seek(8 * 20)
        file.write(bytes(20))
    assert [finding.kind for finding in rmq.verify(store)] == ["unit-missing"]


@pytest.mark.slow
def test_a_broker_s_crash_image_gives_notes_only_and_after_our_recovery_nothing(
    small_golden: Golden, tmp_path: Path
) -> None:
    path = copy_store(small_golden.directory / "crash", tmp_path / "s")
    result = rmq.verify(path)
    assert result.is_sound
    assert result.state == "not closed"
    assert {item.kind for item in result} == {"open"}
    version = rmq.StoreConfig(rocketmq_version=small_golden.config["rocketmq_version"])
    with rmq.open(path, "r+", config=version):
        pass
    after = assert_sound(path)
    assert after.record_count == result.record_count
    with rmq.open(path, "r+", config=version) as store:
        store.put_many([rmq.Message("Exact", b"x" * 500, keys=[f"new{i}"]) for i in range(300)])
    assert assert_sound(path).record_count == result.record_count + 300


# ---- ours --------------------------------------------------------------------------------------------------


LONG_TOPICS = ("%RETRY%" + "long" * 40,)  # of V2 records, which RocketMQ has from 5.1 on


def mixed(i: int) -> rmq.Message:
    rng = random.Random(i)
    return rmq.Message(
        rng.choice(["T", "%RETRY%g", "topic-" + "é" * 40, *LONG_TOPICS]),
        rng.randbytes(rng.randrange(0, 400)), tags=rng.choice([None, "a", "é"]),
        keys=rng.choice([[], [f"k{i}"], [f"k{i}", "all", "all"], ["Aa", "BB", "ключ"]]),
        queue_id=rng.randrange(3), uniq_key=rng.choice([None, f"U{i}", "all"]), sys_flag=rng.choice([0, 0, 4, 8, 12]),
        born_host=rng.choice(["1.2.3.4:1", "[2001:db8::1]:2"]), store_host=rng.choice([None, "[::1]:10911"]),
        properties=rng.choice([{}, {"a": "b"}, {"DELAY": "3"}]),
    )  # fmt: skip


def delayed(i: int) -> rmq.Message:
    return rmq.Message("SCHEDULE_TOPIC_XXXX", b"x", queue_id=i % 18, properties={"DELAY": str(i % 20)}, tags="later")


def fill_mixed(store: rmq.Store) -> None:
    for i in range(150):
        if mixed(i).topic not in LONG_TOPICS or store.config.allows_v2_records:
            store.put(mixed(i))


def fill_batches(store: rmq.Store) -> None:
    for i in range(20):
        store.put_batch([rmq.Message("B", b"x" * n, keys=[f"k{i}-{n}", "all"], queue_id=i % 2) for n in range(1, 9)])
    store.put_many([message(i) for i in range(400)])


def fill_delayed(store: rmq.Store) -> None:
    store.put_many([delayed(i) for i in range(60)])


def fill_empty(store: rmq.Store) -> None:
    pass


def fill_without_keys(store: rmq.Store) -> None:
    store.put_many([rmq.Message("T", b"x" * 10) for _ in range(300)])


FILLS = [fill_mixed, fill_batches, fill_delayed, fill_empty, fill_without_keys]
CONFIGS: list[dict[str, Any]] = [
    {},
    {"rocketmq_version": "4.7.0"},
    {"rocketmq_version": "4.9.2"},
    {"rocketmq_version": "5.4.0"},
    {"enabled_append_prop_crc": True},
    {"message_index_enable": False},
    {"message_delay_level": "7s 2m"},
]


class Clock:
    """Now and then the clock goes back."""

    def __init__(self) -> None:
        self.random, self.now = random.Random(5), 1_700_000_000_000

    def __call__(self) -> int:
        self.now += self.random.choice([0, 1, 900, 5000, -2500, 90_000])
        return self.now


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_what_we_write_is_sound(tmp_path: Path, fill: Callable[[rmq.Store], None], fields: dict[str, Any]) -> None:
    path = tmp_path / "s"
    config = rmq.StoreConfig(**SMALL | fields)
    with rmq.open(path, "x", config=config, clock=Clock()) as store:
        fill(store)
        count = store.scan(columns=["phy_offset"]).read_all().num_rows
    assert assert_sound(path).record_count == count
    if not {"message_index_enable", "message_delay_level"} & fields.keys():
        assert oracle.check_store(path, 10, 30, config.rocketmq_version) == []
    with rmq.open(path, "r+", clock=Clock()) as store:
        fill(store)
    assert_sound(path)


def test_our_directory_may_be_lost_and_all_that_it_told_comes_from_the_files(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "s")
    whole = assert_sound(tmp_path / "s")
    shutil.rmtree(tmp_path / "s/rmq")
    found = assert_sound(tmp_path / "s")
    assert vars(found) == vars(whole) | {"size_read": found.size_read}


def test_a_log_whose_newest_record_was_removed_is_sound(tmp_path: Path) -> None:
    """The clock went back; what the checkpoint tells of is gone."""
    now = [1_700_000_010_000]
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: now[0]) as store:
        for number in range(40):
            store.put(message(number))
        store.flush()
        now[0] -= 5000
        for _ in range(40):
            store.put(rmq.Message("T", b"x" * 700))
        assert store.clean(2**42, file_reserved_time=0, limit=None).min_phy_offset > 0
    assert_sound(tmp_path / "s")


@pytest.mark.parametrize("count", [1, 3])
def test_units_of_segments_that_hold_few_of_each_queue_are_read_a_few_times(tmp_path: Path, count: int) -> None:
    """Edge: a queue's files are smaller than what is read at a time of a queue with many units in a row."""
    config = rmq.StoreConfig(**SMALL | {"message_index_enable": False})
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("t", b"", queue_id=number % count) for number in range(3000)])
        end = store.max_phy_offset
    assert end > 50 * SMALL["mapped_file_size_commit_log"]
    assert 3000 * 20 <= assert_sound(tmp_path / "s").size_read - end <= 4 * 3000 * 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_store_is_sound_before_and_after_recovery(tmp_path: Path, seed: int) -> None:
    with rmq.open(tmp_path / "live", "x", config=CONFIG, clock=Clock()) as store:
        for i in range(50):
            store.put(message(i))
        store.flush()
        for i in range(50, 50 + 15 * seed):
            store.put(message(i))
        shutil.copytree(tmp_path / "live", tmp_path / "s")
    before = rmq.verify(tmp_path / "s")
    assert before.is_sound, "\n".join(map(str, before))
    assert {item.kind for item in before} <= {"open", "tail"}
    with rmq.open(tmp_path / "s", "r+"):
        pass
    assert assert_sound(tmp_path / "s").record_count == before.record_count


@pytest.mark.slow
def test_a_torn_tail_is_a_note_and_gone_after_recovery(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        store.put_many([message(i) for i in range(20)])
        store.flush()
        last = store.put(message(20))
        shutil.copytree(tmp_path / "live", tmp_path / "s")
    segment = tmp_path / "s/commitlog" / f"{last.phy_offset // 4096 * 4096:020d}"
    data = bytearray(segment.read_bytes())
    data[last.phy_offset % 4096 + 90] ^= 1
    segment.write_bytes(data)
    result = rmq.verify(tmp_path / "s")
    found = {(item.kind, item.severity, Path(item.path).name, item.offset) for item in result}
    assert ("tail", "note", segment.name, last.phy_offset % 4096) in found or not result.is_sound
    assert result.is_sound, "\n".join(map(str, result))
    with rmq.open(tmp_path / "s", "r+"):
        pass
    assert list((tmp_path / "s/rmq/cut").glob("*.bin"))
    assert_sound(tmp_path / "s")


@pytest.mark.slow
def test_after_a_repair_nothing_is_left_to_find(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "s")
    segment = sorted((tmp_path / "s/commitlog").iterdir())[1]
    segment.write_bytes(segment.read_bytes()[:500] + bytes(300) + segment.read_bytes()[800:])
    assert not rmq.verify(tmp_path / "s").is_sound
    with rmq.open(tmp_path / "s", "r+", repair=True) as store:
        store.put(message(99))
    assert_sound(tmp_path / "s")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_files_that_cleaning_takes_from_the_front_are_not_missed(base: Path, tmp_path: Path, lost: int) -> None:
    """Segments of the log go first, then queue and index files whose records are all gone."""
    shutil.copytree(base, tmp_path / "s")
    whole = rmq.verify(base).record_count
    for segment in sorted((tmp_path / "s/commitlog").iterdir())[:2]:
        segment.unlink()
    if lost:
        sorted((tmp_path / "s/index").iterdir())[0].unlink()
        sorted((tmp_path / "s/consumequeue/T/0").iterdir())[0].unlink()
        for own in ("marks", "meta.json", "manifest.json"):
            (tmp_path / "s/rmq" / own).unlink()
    result = rmq.verify(tmp_path / "s")
    assert 0 < result.record_count < whole
    assert result.is_sound
    told = [] if lost else [("missing", "note", "the log began at 0 when the store was closed, and begins at 8192")]
    assert [(item.kind, item.severity, item.reason) for item in result] == told


def test_a_queue_that_begins_later_has_pre_blank_units_in_front(tmp_path: Path) -> None:
    (tmp_path / "s/commitlog").mkdir(parents=True)
    log = b""
    for n in range(5):
        log += oracle.encode_record("T", 0, 13 + n, len(log), b"x", b"", store_timestamp=1_700_000_000_000 + n)
    (tmp_path / "s/commitlog" / f"{0:020d}").write_bytes(log.ljust(4096, b"\0"))
    with rmq.open(tmp_path / "s", "r+", config=CONFIG):
        pass
    file = tmp_path / "s/consumequeue/T/0" / f"{200:020d}"
    assert file.read_bytes()[:60] == oracle.UNIT.pack(*oracle.PRE_BLANK) * 3
    assert assert_sound(tmp_path / "s").unit_count == 5


def test_entries_that_come_twice_after_a_restart_are_rocketmq_s_own(base: Path, tmp_path: Path) -> None:
    """Source: IndexService#buildIndex, where a phy offset equal to the end's is not skipped."""
    shutil.copytree(base, tmp_path / "s")
    shutil.rmtree(tmp_path / "s/rmq")
    last = oracle.read_records(tmp_path / "s")[-1]
    file = sorted((tmp_path / "s/index").iterdir())[-1]
    with rmq.IndexFile(file, "r+", max_hash_slot_num=10, max_index_num=30) as index:
        for key in oracle.index_keys(last):
            assert index.put_key(key, last.phy_offset, last.store_timestamp)
    assert assert_sound(tmp_path / "s").entry_count == 142
    with rmq.IndexFile(file, "r+", max_hash_slot_num=10, max_index_num=30) as index:
        assert index.put_key("T#other", last.phy_offset, last.store_timestamp)
    (found,) = rmq.verify(tmp_path / "s")
    assert (found.path, found.kind, found.severity) == (str(file), "entry", "derived")


@pytest.mark.parametrize("number", [0, 1, 2, 3, -1])
def test_a_store_of_another_geometry_part_for_part(tmp_path: Path, number: int) -> None:
    """Files of one unit, one entry, one record for a segment."""
    fields = [{"mapped_file_size_consume_queue": 20}, {"max_index_num": 2}, {"max_hash_slot_num": 1},
              {"mapped_file_size_commit_log": 300}, {}][number]  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SMALL | fields)) as store:
        for i in range(12):
            store.put(message(i))
    result = assert_sound(tmp_path / "s")
    assert (result.record_count, result.unit_count, result.entry_count) == (12, 12, 24)


# ---- beside a writer ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_store_that_is_written_gives_no_finding_and_no_less_than_what_was_flushed(tmp_path: Path) -> None:
    path, stop, failed = tmp_path / "s", threading.Event(), []

    def write(store: rmq.Store) -> None:
        number = 0
        try:
            while not stop.wait(0.001):
                store.put_many([message(number + i) for i in range(7)])
                number += 7
                if number % 49 == 0:
                    store.flush()
        except Exception as error:
            failed.append(error)

    wide = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000,
                           max_hash_slot_num=100, max_index_num=500)  # fmt: skip
    with rmq.open(path, "x", config=wide) as store:
        store.put_many([message(i) for i in range(100)])
        store.flush()
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        try:
            seen = 100
            for _ in range(15):
                result = assert_sound(path)
                assert result.state == "open"
                assert result.record_count >= seen
                assert result.unit_count >= 100
                seen = result.record_count
        finally:
            stop.set()
            writer.join()
    assert not failed
    assert_sound(path)


def test_damage_below_what_a_writer_flushed_is_found_beside_it(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([message(i) for i in range(100)])
        store.flush()
        file = tmp_path / "s/consumequeue/T/0" / f"{0:020d}"
        file.write_bytes(file.read_bytes()[:20] + bytes(20) + file.read_bytes()[40:])
        found = rmq.verify(tmp_path / "s")
    assert [(item.path, item.offset, item.kind) for item in found] == [(str(file), 20, "unit-missing")]


@pytest.mark.slow
def test_a_broker_s_open_store_gives_no_finding(small_golden: Golden, tmp_path: Path) -> None:
    path = copy_store(small_golden.directory / "crash", tmp_path / "s")
    (path / "lock").touch()
    with lock_of_a_broker(path):
        result = assert_sound(path)
        assert result.state == "open"
        file = next(iter(sorted((path / "consumequeue").glob("*/0/*"))))
        data = file.read_bytes()
        file.write_bytes(bytes(20) + data[20:])
        assert [(item.path, item.offset) for item in rmq.verify(path)] == [(str(file), 0)]


@pytest.mark.parametrize("times", [[-1000], [5, -7], [-7, 5], [5, -7, 3, -9]])
def test_a_store_with_times_before_1970_is_sound(tmp_path: Path, times: list[int]) -> None:
    with rmq.open(tmp_path / "s", "x", clock=iter(times).__next__) as store:
        for _ in times:
            store.put(rmq.Message("T", b"1", keys="k"))
    assert list(rmq.verify(tmp_path / "s")) == []


def test_a_time_of_the_checkpoint_below_all_of_the_log_is_a_finding(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", clock=iter([5, -7]).__next__) as store:
        store.put(rmq.Message("T", b"1"))
        store.put(rmq.Message("T", b"1"))
    checkpoint = tmp_path / "s" / "checkpoint"
    checkpoint.write_bytes((-8).to_bytes(8, "big", signed=True) + checkpoint.read_bytes()[8:])
    assert [finding.reason for finding in rmq.verify(tmp_path / "s")] == ["physicMsgTimestamp is -8, which is no time"]
