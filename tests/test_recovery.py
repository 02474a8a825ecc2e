"""Crashes of rmq's own stores: what was flushed is back, queues and index are as if there had been no crash."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tracemalloc
from pathlib import Path

import oracle
import pytest
from conftest import copy_store, digests

import rmq
from rmq.marks import read_manifest
from rmq.paths import StorePaths

SMALL = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 30, "flush_interval_commit_log": 2**31 - 1}  # fmt: skip
CONFIG = rmq.StoreConfig(**SMALL)
PAGE = 512


def messages(count: int, seed: int = 1) -> list[rmq.Message]:
    rng = random.Random(seed)
    return [
        rmq.Message(rng.choice(["a", "b", "%RETRY%g"]), rng.randbytes(rng.randrange(0, 300)),
                    queue_id=rng.randrange(3), tags=rng.choice([None, "t1", "t2"]),
                    keys=[f"k{rng.randrange(20)}" for _ in range(rng.randrange(4))],
                    uniq_key=f"u{number}", sys_flag=rng.choice([0, 0, 0, 4, 8, 12]))
        for number in range(count)
    ]  # fmt: skip


class Clock:
    now = 1_700_000_000_000

    def __call__(self) -> int:
        self.now += 700
        return self.now


def check(path: Path) -> list[str]:
    return oracle.check_store(path, SMALL["max_hash_slot_num"], SMALL["max_index_num"])


def seeds(count: int, *, in_the_loop: int) -> list[object]:
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= in_the_loop else []) for seed in range(count)]


def uniq_keys(store: rmq.Store) -> list[str]:
    return store.scan(columns=["uniq_key"]).read_all()["uniq_key"].to_pylist()


@pytest.mark.parametrize("seed", seeds(12, in_the_loop=4))
def test_a_killed_store_recovers_to_the_bytes_of_one_that_never_crashed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sent = messages(160, seed)
    cut = rng.randrange(len(sent))
    with rmq.open(tmp_path / "never", "x", config=CONFIG, clock=Clock()) as store:
        for message in sent:
            store.put(message)
    clock = Clock()
    with rmq.open(tmp_path / "live", "x", config=CONFIG, clock=clock) as store:
        for number, message in enumerate(sent[:cut]):
            store.put(message)
            if rng.random() < 0.05:
                store.flush()
            if rng.random() < 0.05:
                store.topics()  # dispatches without a mark
            if number == cut - 1:
                copy_store(tmp_path / "live", tmp_path / "killed")
    if cut == 0:
        copy_store(tmp_path / "live", tmp_path / "killed")
    with rmq.open(tmp_path / "killed", "r+", clock=clock) as store:
        assert uniq_keys(store) == [f"u{number}" for number in range(cut)]
        for message in sent[cut:]:
            store.put(message)
    for folder in ("commitlog", "consumequeue"):
        assert digests(tmp_path / "killed", folder) == digests(tmp_path / "never", folder), f"seed {seed}"
    killed, never = (list(digests(tmp_path / name, "index").values()) for name in ("killed", "never"))
    assert killed == never, f"seed {seed}"
    assert check(tmp_path / "killed") == []


def mix(old: Path, new: Path, target: Path, rng: random.Random) -> None:
    """What power loss may leave: of every 512 bytes that changed since the flush the old or the new ones."""
    shutil.copytree(new, target)
    for path in target.rglob("*"):
        before = old / path.relative_to(target)
        if not path.is_file() or path.name in ("lock", "meta.json", "owner", "abort", "abort.bak"):
            continue
        now = path.read_bytes()
        then = before.read_bytes() if before.exists() else bytes(len(now))
        pieces = [(now if rng.random() < 0.5 else then)[i : i + PAGE] for i in range(0, len(now), PAGE)]
        path.write_bytes(b"".join(pieces))


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("seed", seeds(40, in_the_loop=4))
def test_any_mix_of_old_and_new_sectors_keeps_what_was_flushed(tmp_path: Path, seed: int, crc: bool) -> None:
    rng = random.Random(seed)
    sent = messages(120, seed)
    flushed = rng.randrange(20, 80)
    last = flushed + rng.randrange(1, 40)
    config = rmq.StoreConfig(**SMALL, enabled_append_prop_crc=crc)
    with rmq.open(tmp_path / "live", "x", config=config, clock=Clock()) as store:
        store.put_many(sent[:flushed])
        store.flush()
        copy_store(tmp_path / "live", tmp_path / "old")
        for message in sent[flushed:last]:
            store.put(message)
        store.topics()
        copy_store(tmp_path / "live", tmp_path / "new")
    mix(tmp_path / "old", tmp_path / "new", tmp_path / "power", rng)
    with rmq.open(tmp_path / "power") as reader:
        assert uniq_keys(reader)[:flushed] == [f"u{number}" for number in range(flushed)]
    with rmq.open(tmp_path / "power", "r+", config=config, clock=Clock()) as store:
        found = uniq_keys(store)
        assert found == [f"u{number}" for number in range(len(found))], f"seed {seed}"
        assert flushed <= len(found) <= last
        for number in range(0, len(found), 9):
            if sent[number].sys_flag & 0xC != 0xC:
                assert [m.uniq_key for m in store.query(sent[number].topic, f"u{number}")] == [f"u{number}"]
    assert check(tmp_path / "power") == [], f"seed {seed}"
    settled = digests(tmp_path / "power", "commitlog", "consumequeue", "index")
    with rmq.open(tmp_path / "power", "r+"):
        pass
    assert digests(tmp_path / "power", "commitlog", "consumequeue", "index") == settled
    with rmq.open(tmp_path / "power", "r+", config=config, clock=Clock()) as store:
        store.put(rmq.Message("a", b"again", uniq_key="new"))
        assert uniq_keys(store) == [*found, "new"]
    assert check(tmp_path / "power") == [], f"seed {seed}"


def test_a_record_behind_the_torn_tail_does_not_come_back(tmp_path: Path) -> None:
    """A new record that ends where a torn one ended must not bring the next old record to life."""
    path = tmp_path / "s"
    store = rmq.open(path, "x", config=CONFIG)
    store.put(rmq.Message("a", b"first"))
    store.flush()
    torn = store.put(rmq.Message("a", b"torn!"))
    store.put(rmq.Message("a", b"ghost"))
    copy_store(path, tmp_path / "killed")
    store.close()
    segment = tmp_path / "killed" / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[torn.phy_offset + 88] ^= 1
    segment.write_bytes(data)
    with rmq.open(tmp_path / "killed", "r+") as store:
        assert store.max_phy_offset == torn.phy_offset
        assert store.put(rmq.Message("a", b"again")).phy_offset == torn.phy_offset
        copy_store(tmp_path / "killed", tmp_path / "again")
    for name in ("killed", "again"):
        with rmq.open(tmp_path / name, "r+") as store:
            assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == [b"first", b"again"]
    assert (tmp_path / "killed" / "rmq" / "cut").is_dir()


def test_damage_below_the_mark_stops_the_open_and_repair_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = rmq.open(path, "x", config=CONFIG)
    results = [store.put(rmq.Message("a", b"x" * 50)) for _ in range(10)]
    copy_store(path, tmp_path / "early")
    store.flush()
    copy_store(path, tmp_path / "killed")
    store.close()
    killed = tmp_path / "killed"
    segment = killed / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes()[: results[9].phy_offset] + bytes(4096 - results[9].phy_offset))
    early = (tmp_path / "early" / "rmq" / "marks").read_bytes()
    assert early != (killed / "rmq" / "marks").read_bytes()
    with pytest.raises(rmq.CorruptFileError) as error:
        rmq.open(killed, "r+")
    assert (error.value.path, error.value.offset) == (str(segment), results[9].phy_offset)
    with rmq.open(killed, "r+", repair=True) as store:
        assert store.topics() == {"a": {0: (0, 9)}}
    assert check(killed) == []


@pytest.mark.parametrize("lost", ["marks", "meta.json", "."])
def test_our_own_directory_may_be_lost(tmp_path: Path, lost: str) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=Clock()) as store:
        store.put_many(messages(100))
    own = tmp_path / "s" / "rmq"
    shutil.rmtree(own) if lost == "." else (own / lost).unlink()
    before = digests(tmp_path / "s", "commitlog", "consumequeue", "index")
    with rmq.open(tmp_path / "s", "r+", config=CONFIG) as store:
        assert len(uniq_keys(store)) == 100
    assert digests(tmp_path / "s", "commitlog", "consumequeue", "index") == before
    assert check(tmp_path / "s") == []


def test_a_broker_that_ran_in_between_is_noticed(tmp_path: Path) -> None:
    """Records behind our mark in a store that was closed cleanly since: taken over, with their units and entries."""
    path = tmp_path / "s"
    sent = messages(90)
    with rmq.open(path, "x", config=CONFIG, clock=Clock()) as store:
        store.put_many(sent[:50])
    shutil.copytree(path / "rmq", tmp_path / "old-marks")
    with rmq.open(path, "r+", clock=Clock()) as store:
        store.put_many(sent[50:])
    shutil.rmtree(path / "rmq")
    shutil.copytree(tmp_path / "old-marks", path / "rmq")
    with rmq.open(path) as store:
        assert len(uniq_keys(store)) == 90
        seen = store.topics()
    before = digests(path, "commitlog", "consumequeue", "index")
    with rmq.open(path, "r+", clock=Clock()) as store:
        assert store.topics() == seen
        assert [m.uniq_key for m in store.query(sent[1].topic, "u1")] == ["u1"]
    assert digests(path, "commitlog", "consumequeue", "index") == before
    assert check(path) == []


def test_the_record_crc_stays_on_without_being_asked_for_again(tmp_path: Path) -> None:
    config = rmq.StoreConfig(**SMALL, enabled_append_prop_crc=True)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(rmq.Message("a", b"1"))
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(rmq.Message("a", b"2"))
        assert all("__CRC32#" in message.properties for message in store.pull("a").messages)
    with rmq.open(tmp_path / "s", "r+", config=rmq.StoreConfig(enabled_append_prop_crc=False)) as store:
        assert "__CRC32#" not in store.lookup(store.put(rmq.Message("a", b"3")).phy_offset).properties


def test_a_mark_below_which_a_broker_cut_and_went_on_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG, clock=Clock()) as store:
        results = store.put_many([rmq.Message("a", b"x" * 40, queue_id=i % 2) for i in range(20)])
    shutil.copytree(path / "rmq", tmp_path / "old-marks")
    segment = path / "commitlog" / f"{0:020d}"
    cut = int(results.phy_offset[15])
    segment.write_bytes(segment.read_bytes()[:cut] + bytes(4096 - cut))
    with rmq.open(path, "r+", repair=True, clock=Clock()) as store:
        for i in range(20):
            store.put(rmq.Message("a", b"y" * 47, queue_id=i % 2))
        seen, bodies = store.topics(), store.scan(columns=["body"]).read_all()
    shutil.rmtree(path / "rmq")
    shutil.copytree(tmp_path / "old-marks", path / "rmq")
    with rmq.open(path) as store:
        assert store.topics() == seen
        assert store.scan(columns=["body"]).read_all() == bodies
        assert [len(store.pull("a", queue, 0, 99).messages) for queue in (0, 1)] == [18, 17]
    with pytest.raises(rmq.CorruptFileError):
        rmq.open(path, "r+")


def test_a_last_record_that_ends_with_zeros_still_tells_damage_from_a_torn_tail(tmp_path: Path) -> None:
    """Without properties its last two bytes are the zeros of their length."""
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG, clock=Clock()) as store:
        results = [store.put(rmq.Message("a", b"x" * 40)) for _ in range(3)]
    shutil.rmtree(path / "rmq")
    segment = path / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[results[1].phy_offset + 4] ^= 1
    segment.write_bytes(data)
    with pytest.raises(rmq.CorruptFileError) as error:
        rmq.open(path, "r+", config=CONFIG)
    assert error.value.offset == results[1].phy_offset
    assert segment.read_bytes() == data


@pytest.mark.parametrize("repair", [False, True])
def test_a_torn_first_record_of_a_segment_is_cut_with_its_segment(tmp_path: Path, repair: bool) -> None:
    with rmq.open(tmp_path / "live", "x", config=CONFIG) as store:
        ends = [store.put(rmq.Message("a", b"x" * 300, keys=["k"])) for _ in range(11)]
        torn = store.put(rmq.Message("a", b"x" * 300, keys=["k"]))
        while torn.phy_offset % 4096:
            ends.append(torn)
            torn = store.put(rmq.Message("a", b"x" * 300, keys=["k"]))
        copy_store(tmp_path / "live", tmp_path / "s")
    with open(tmp_path / "s/commitlog" / f"{torn.phy_offset:020d}", "r+b") as file:
        file.seek(torn.size - 60)
        file.write(bytes(40))
    with rmq.open(tmp_path / "s") as reader:
        assert len(reader.query("a", "k", limit=None)) == len(ends)
    with rmq.open(tmp_path / "s", "r+", repair=repair) as store:
        found = [message.phy_offset for message in store.query("a", "k", limit=None)]
        assert found[::-1] == [end.phy_offset for end in ends]
        assert store.put(rmq.Message("a", b"y", keys=["k"])).phy_offset < torn.phy_offset + torn.size
    assert check(tmp_path / "s") == []


@pytest.mark.parametrize("lost", [slice(0, 1), slice(2, 3), slice(1, 4)])
@pytest.mark.parametrize("is_closed", [True, False])
def test_keys_that_a_lost_index_file_held_are_found(tmp_path: Path, lost: slice, is_closed: bool) -> None:
    """Edge: the file behind the lost one begins with a record whose first keys were in that one."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200,
                             max_hash_slot_num=10, max_index_num=8)  # fmt: skip
    store = rmq.open(tmp_path / "s", "x", config=config)
    places = [store.put(rmq.Message("T", b"x", keys=[f"a{i}", f"b{i}", f"c{i}"])).phy_offset for i in range(20)]
    store.flush()
    files = sorted((tmp_path / "s/index").iterdir())
    if is_closed:
        store.close()
        for path in files[lost]:
            path.unlink()
        left = tmp_path / "s"
    else:
        left = tmp_path / "left"
        shutil.copytree(tmp_path / "s", left)
        store.close()
        for path in files[lost]:
            (left / "index" / path.name).unlink()
    for mode in ("r", "r+"):
        with rmq.open(left, mode) as reader:
            for i, place in enumerate(places):
                for key in (f"a{i}", f"b{i}", f"c{i}"):
                    assert [found.phy_offset for found in reader.query("T", key)] == [place], (mode, key)


def test_a_repair_keeps_any_amount_in_little_memory(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, mapped_file_size_commit_log=2**23)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for _ in range(24):
            store.put(rmq.Message("a", b"x" * 1_000_000))
    before = b"".join(file.read_bytes() for file in sorted((tmp_path / "s/commitlog").iterdir()))
    with (tmp_path / f"s/commitlog/{0:020d}").open("r+b") as file:
        file.write(b"????")
    tracemalloc.start()
    with rmq.open(tmp_path / "s", "r+", repair=True) as store:
        assert store.topics() == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000
    kept = {file.name.split("-")[1]: file.read_bytes() for file in (tmp_path / "s/rmq/cut").glob("*.bin")}
    assert sorted(kept) == [f"{2**23 * number:020d}" for number in range(len(kept))]
    data = b"".join(kept[name].ljust(2**23, b"\0") for name in sorted(kept))
    assert data[4:] == before[4 : len(data)]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("queue", [
    ["Q", 0, 5, -3], ["Q", 0, 0, 0], ["a\0b", 0, 0, 5], ["\ud800", 0, 0, 5], ["x" * 300, 0, 0, 5], ["a/0", 0, 0, 5],
    ["../commitlog", 0, 0, 5], ["a", -1, 0, 5], ["a", 0, 0, 10**30], ["", 0, 0, 5], [5, 0, 0, 5],
])  # fmt: skip
def test_a_list_of_queues_that_makes_no_sense_counts_as_none(tmp_path: Path, queue: list[object], mode: str) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many(messages(50))
        topics = store.topics()
    place = tmp_path / "s/rmq/manifest.json"
    manifest = json.loads(place.read_text())
    place.write_text(json.dumps(manifest | {"queues": [*manifest["queues"], queue], "min_phy_offset": -1}))
    assert read_manifest(StorePaths(tmp_path / "s")) is None
    with rmq.open(tmp_path / "s", mode) as store:
        assert store.topics() == topics


@pytest.mark.parametrize("count", [1, 2])
def test_segments_that_a_killed_process_made_and_did_not_fill_go(tmp_path: Path, count: int) -> None:
    """RocketMQ up to 4.9 loads no log with an empty one."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(rmq.Message("T", b"1"))
    made = [tmp_path / "s/commitlog" / f"{4096 * number:020d}" for number in range(1, count + 1)]
    for path in made:
        path.touch()
    with rmq.open(tmp_path / "s") as store:
        assert len(store.pull("T").messages) == 1
    assert all(path.exists() for path in made)
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(rmq.Message("T", b"2"))
    assert not any(path.exists() for path in made)
    assert rmq.verify(tmp_path / "s") == []


def test_the_first_segment_that_was_made_and_not_filled_goes_too(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x", config=CONFIG).close()
    first = tmp_path / "s/commitlog" / f"{0:020d}"
    first.touch()
    rmq.open(tmp_path / "s", "a").close()
    assert not first.exists()


def test_an_open_that_refuses_a_log_leaves_its_empty_segments(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many(messages(40))
    *_, last = sorted((tmp_path / "s/commitlog").iterdir())
    last.write_bytes(b"")
    with pytest.raises(rmq.CorruptFileError, match="segment is missing"):
        rmq.open(tmp_path / "s", "r+")
    assert last.exists()
