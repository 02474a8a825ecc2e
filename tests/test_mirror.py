# SPDX-License-Identifier: Apache-2.0
"""Stores on object stores: what is fetched is what is asked for, what was not fetched is never read."""

from __future__ import annotations

import dataclasses
import errno
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from objectstore import CONFIG, COUNT, Bucket, make_store, touch

import rmq
from rmq import mirror, objects, snapshot
from rmq.mirror import MirroredStore
from rmq.objectcache import CacheFullError
from rmq.objects import Location, ObjectChangedError, ObjectStoreError
from rmq.snapshot import Snapshot

SEGMENT = 65536
BLOCK, WINDOW, LOG_BYTES = 4096, 16384, 49152


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("original") / "store")


@pytest.fixture
def bucket(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A copy of the store, its log fetched in small pieces."""
    for name, size in (("BLOCK", BLOCK), ("WINDOW", WINDOW), ("LOG_BYTES", LOG_BYTES)):
        monkeypatch.setattr(mirror, name, size)
    monkeypatch.setattr(objects, "REQUEST_BYTES", 8192)
    shutil.copytree(original, tmp_path / "bucket")
    found = Bucket(tmp_path / "bucket", tmp_path / "cache")
    monkeypatch.setattr(Location, "connect", lambda location: found.connect(location))
    return found


def take(bucket: Bucket) -> Snapshot:
    return Snapshot.take(bucket.location).require_store()


def leftovers(bucket: Bucket) -> list[Path]:
    return list(Path(bucket.location.cache_directory, "open").iterdir())


@pytest.mark.slow
def test_every_answer_is_that_of_the_store_itself(bucket: Bucket, original: Path) -> None:
    with rmq.open(original) as here, MirroredStore(take(bucket).of("queues", "index")) as there:
        assert there.max_phy_offset == here.max_phy_offset
        assert there.scan().read_all().equals(here.scan().read_all())
        assert there.topics() == here.topics()
        for queue_id in range(4):
            assert there.pull("orders", queue_id, 60, 60) == here.pull("orders", queue_id, 60, 60)
        keys = [f"o-{number}" for number in range(0, COUNT, 7)] + ["nix"]
        assert there.query_many("orders", keys).table.equals(here.query_many("orders", keys).table)
        assert there.query("orders", "o-7") == here.query("orders", "o-7")
        assert there.lookup(0) == here.lookup(0)
        assert there.search_offset("orders", 1, 1_700_000_000_400) == here.search_offset("orders", 1, 1_700_000_000_400)
        assert there.table("index").read_all().equals(here.table("index").read_all())
        assert there.select_phy_offset_many("orders", keys).equals(here.select_phy_offset_many("orders", keys))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 200, 500, 2000], ids=str)
def test_records_may_cross_blocks_and_windows(bucket: Bucket, tmp_path: Path, size: int) -> None:
    """Records from less than a block to more than a window."""
    shutil.rmtree(bucket.root)
    make_store(bucket.root, 60, size * 8)
    with rmq.open(bucket.root) as here, MirroredStore(take(bucket).of("index")) as there:
        assert there.scan().read_all().equals(here.scan().read_all())
        keys = [f"o-{number}" for number in range(60)]
        assert there.query_many("orders", keys).table.equals(here.query_many("orders", keys).table)


@pytest.mark.slow
@pytest.mark.parametrize("batch_rows", [1, 2, 8192])
def test_a_scan_is_the_same_whatever_fits_a_batch(bucket: Bucket, original: Path, batch_rows: int) -> None:
    with rmq.open(original) as here, MirroredStore(take(bucket).of()) as there:
        begin = here.lookup(SEGMENT).phy_offset
        found = there.scan(begin_phy_offset=begin, end_phy_offset=begin + SEGMENT, batch_rows=batch_rows).read_all()
        assert found.combine_chunks().equals(here.scan(begin_phy_offset=begin, end_phy_offset=begin + SEGMENT)
                                             .read_all().combine_chunks())  # fmt: skip


def test_opening_fetches_neither_queues_nor_index_nor_more_than_blocks_of_the_log(bucket: Bucket) -> None:
    with MirroredStore(take(bucket).of()) as store:
        assert store.max_phy_offset > 5 * SEGMENT
        assert bucket.asked_of("commitlog/") <= 2 * BLOCK
        assert bucket.asked_of("index/") == bucket.asked_of("consumequeue/") == 0
        with pytest.raises(rmq.UnsupportedFormatError, match="opened without its queues"):
            store.topics()
        with pytest.raises(rmq.UnsupportedFormatError, match="opened without its index"):
            store.query("orders", "o-1")


def test_a_split_fetches_its_range_and_nothing_else(bucket: Bucket, original: Path) -> None:
    snapshot = take(bucket)
    with MirroredStore(snapshot.of()) as store:
        part = pickle.loads(pickle.dumps(snapshot.range(2 * SEGMENT, 4 * SEGMENT, store)))
    bucket.asked.clear()
    with MirroredStore(part) as store, rmq.open(original) as here:
        found = store.scan(begin_phy_offset=2 * SEGMENT, end_phy_offset=4 * SEGMENT).read_all()
        assert found.equals(here.scan(begin_phy_offset=2 * SEGMENT, end_phy_offset=4 * SEGMENT).read_all())
    assert {name for name, _, _ in bucket.asked} == {f"commitlog/{2 * SEGMENT:020d}", f"commitlog/{3 * SEGMENT:020d}"}
    assert 2 * SEGMENT <= bucket.asked_of("") <= 2 * (SEGMENT + 2 * BLOCK), "once, but where blocks are given up"


def test_a_key_fetches_each_index_file_once_and_a_few_blocks(bucket: Bucket) -> None:
    snapshot = take(bucket)
    with MirroredStore(snapshot.of()) as store:
        snapshot = snapshot.of("index", end=store.max_phy_offset)
    sizes = sum(path.stat().st_size for path in (bucket.root / "index").iterdir())
    bucket.asked.clear()
    for _ in range(2):
        with MirroredStore(snapshot) as store:
            assert [message.keys for message in store.query("orders", "o-234")] == [("o-234",)]
    assert bucket.asked_of("index/") == sizes, "the second one finds them on this disk"
    assert bucket.asked_of("commitlog/") <= 2 * 5 * BLOCK


@pytest.mark.slow
def test_what_cleans_temporary_files_takes_no_message(bucket: Bucket, original: Path) -> None:
    """Placeholders of segments are read by nobody, so that they look old; then the directory itself goes."""
    with rmq.open(original) as here, MirroredStore(take(bucket).of("index")) as there:
        lost: list[rmq.LostRange] = []
        for name in sorted(path.name for path in (there._mirror.root / "commitlog").iterdir())[::2]:
            (there._mirror.root / "commitlog" / name).unlink()
        assert there.scan(on_damage="skip", lost=lost).read_all().equals(here.scan().read_all())
        assert lost == []
        assert there.query("orders", "o-7") == here.query("orders", "o-7")
        shutil.rmtree(there._mirror.directory)
        with pytest.raises(ObjectStoreError, match="was removed"):
            there.scan(on_damage="skip", lost=lost).read_all()


def test_a_look_up_of_many_records_holds_no_more_of_the_log_than_may(
        bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A whole segment is more."""
    held, holds = [], mirror.Mirror.holds

    def counted(self: mirror.Mirror, *arguments: Any) -> None:
        holds(self, *arguments)
        held.append(sum(self._held.values()))

    monkeypatch.setattr(mirror.Mirror, "holds", counted)
    with MirroredStore(take(bucket).of("index")) as there:
        assert there.query_many("orders", [f"o-{number}" for number in range(COUNT)]).table.num_rows == COUNT
    assert BLOCK < max(held) <= LOG_BYTES + 2 * BLOCK < SEGMENT


def test_of_the_log_no_more_stays_than_may(bucket: Bucket) -> None:
    with MirroredStore(take(bucket).of("index")) as store:
        for _ in range(2):
            store.scan().read_all()
            store.query_many("orders", [f"o-{number}" for number in range(0, COUNT, 100)])
            assert sum(store._mirror._held.values()) <= LOG_BYTES + SEGMENT
        blocks = {segment: segment._blocks for segment in store._log.segments}  # type: ignore[attr-defined]
        held = {segment: len(own) * BLOCK for segment, own in blocks.items() if own}
        assert held == dict(store._mirror._held)


def test_a_hole_is_never_data(bucket: Bucket) -> None:
    with MirroredStore(take(bucket).of()) as store:
        segment = store._log.segments[1]
        with pytest.raises(NotImplementedError, match="piece by piece"):
            _ = segment.file
        here = segment.holding(segment.start + 5000, segment.start + 5001)
        data = (bucket.root / "commitlog" / segment.path.name).read_bytes()
        assert here.map[4096:8192] == data[4096:8192]
        assert here.map[8192:] == bytes(SEGMENT - 8192)
        assert segment.read(0, SEGMENT) == data
        assert segment.read(SEGMENT - 1, 10) == data[-1:]
        assert segment.holding_records(np.array([segment.end - 1])).map[SEGMENT - BLOCK :] == data[-BLOCK:]


def test_a_map_that_is_held_keeps_what_it_showed(bucket: Bucket) -> None:
    """Blocks are given up by leaving their file, never by taking bytes out of it."""
    with MirroredStore(take(bucket).of()) as store:
        first = store._log.segments[0]
        held = first.holding(0, BLOCK)
        seen = bytes(held.map[:BLOCK])
        store.scan().read_all()
        assert first._blocks != {0}  # type: ignore[attr-defined]
        assert held.map[:BLOCK] == seen


@pytest.mark.slow
def test_a_blank_record_is_not_fetched_to_its_end(bucket: Bucket) -> None:
    shutil.rmtree(bucket.root)
    with rmq.open(bucket.root, "x", config=CONFIG) as store:
        for size in (1000, 64000, 1000):
            store.put(rmq.Message("t", b"x" * size))
    with MirroredStore(take(bucket).of()) as store:
        bucket.asked.clear()
        assert store._log.segments[0].reach(1100, SEGMENT, 1) == BLOCK
        assert len(store.scan().read_all()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: touch(path, 5),
                                    lambda path: path.write_bytes(path.read_bytes()[:-1])],
                         ids=["removed", "replaced", "shorter"])  # fmt: skip
def test_an_object_that_is_not_what_was_listed_is_an_error(bucket: Bucket, change: Callable[[Path], Any]) -> None:
    with MirroredStore(take(bucket).of()) as store:
        change(bucket.root / "commitlog" / f"{SEGMENT:020d}")
        with pytest.raises(ObjectChangedError, match=rf"host .*: test://bucket/commitlog/{SEGMENT:020d}: "):
            store.scan().read_all()
        if not (bucket.root / "commitlog" / f"{SEGMENT:020d}").exists():  # else it is there to be read, loaded anew
            lost: list[rmq.LostRange] = []
            found = store.scan(on_damage="skip", lost=lost).read_all()
            assert 0 < len(found) < COUNT
            assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == [(SEGMENT, 2 * SEGMENT)]
            return
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.scan(on_damage="skip").read_all()


@pytest.mark.slow
def test_an_object_that_changes_while_it_is_read_is_an_error(bucket: Bucket) -> None:
    with MirroredStore(take(bucket).of()) as store:
        bucket.before_read = lambda name: touch(bucket.root / name, 2)
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.scan().read_all()


@pytest.mark.slow
def test_a_store_that_changes_while_it_is_listed_is_an_error(bucket: Bucket) -> None:
    bucket.before_read = lambda name: touch(bucket.root / name, 2)
    with pytest.raises(ObjectChangedError, match="was replaced"):
        take(bucket)
    bucket.before_read = lambda name: (bucket.root / name).write_bytes(b"")
    with pytest.raises(ObjectChangedError, match="was replaced"):
        take(bucket)


@pytest.mark.slow
def test_what_the_store_answers_with_is_an_error_that_names_host_and_object(bucket: Bucket) -> None:
    def refuse(name: str) -> None:
        raise PermissionError("ACCESS_DENIED")

    with MirroredStore(take(bucket).of()) as store:
        bucket.before_read = refuse
        with pytest.raises(ObjectStoreError, match=r"host \S+: test://bucket/commitlog/\d{20}: .*ACCESS_DENIED"):
            store.scan().read_all()
        bucket.before_read = lambda name: None
        assert len(store.scan().read_all()) == COUNT, "what failed once is asked for again"


@pytest.mark.slow
def test_damage_is_told_by_its_uri_and_where_it_is_skipped_the_rest_is_read(bucket: Bucket) -> None:
    path = bucket.root / "commitlog" / f"{SEGMENT:020d}"
    data = bytearray(path.read_bytes())
    data[20000:20100] = b"\xff" * 100
    path.write_bytes(data)
    with MirroredStore(take(bucket).of()) as store:
        with pytest.raises(rmq.CorruptFileError) as caught:
            store.scan().read_all()
        better = mirror.told(store, caught.value)
        assert str(better).startswith(f"test://bucket/commitlog/{SEGMENT:020d}: byte ")
        assert mirror.told(store, error := ValueError("other")) is error
        lost: list[rmq.LostRange] = []
        assert len(store.scan(on_damage="skip", lost=lost).read_all()) >= COUNT - 3
        assert lost


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100, SEGMENT // 2, SEGMENT + 1])
def test_a_segment_of_another_length_is_damage(bucket: Bucket, size: int) -> None:
    path = bucket.root / "commitlog" / f"{SEGMENT:020d}"
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    with MirroredStore(take(bucket).of()) as store:
        with pytest.raises(rmq.CorruptFileError):
            store.scan().read_all()
        assert len(store.scan(on_damage="skip").read_all()) > COUNT // 2


@pytest.mark.slow
def test_sizes_that_records_claim_are_fetched_no_further_than_their_segment(bucket: Bucket) -> None:
    path = bucket.root / "commitlog" / f"{SEGMENT:020d}"
    data = bytearray(path.read_bytes())
    for size in (2**31 - 1, -5, 0, 91):
        struct.pack_into(">i", data, 0, size)
        path.write_bytes(data)
        with MirroredStore(take(bucket).of()) as store:
            with pytest.raises(rmq.CorruptFileError, match=r"."):
                store.scan().read_all()
            with pytest.raises(KeyError):
                store.lookup(SEGMENT)


@pytest.mark.slow
def test_a_store_that_a_broker_left_has_its_end_found(bucket: Bucket, original: Path) -> None:
    """Without marks of ours the last segment is walked, and looked through behind its last record."""
    shutil.rmtree(bucket.root / "rmq")
    with rmq.open(original) as here, MirroredStore(take(bucket).of()) as there:
        assert there.max_phy_offset == here.max_phy_offset
        assert {name for name, _, _ in bucket.asked if name.startswith("commitlog")} == \
            {f"commitlog/{here.max_phy_offset // SEGMENT * SEGMENT:020d}"}  # fmt: skip
    with rmq.open(original) as here, MirroredStore(take(bucket).of("queues", "index")) as there:
        assert there.topics() == here.topics()
        assert there.query("orders", "o-699") == here.query("orders", "o-699")
    bucket.asked.clear()
    with MirroredStore(take(bucket).of("index", end=5 * SEGMENT)) as there:
        assert there.max_phy_offset == 5 * SEGMENT
        assert bucket.asked_of("commitlog") == 0, "where somebody has looked, nobody looks again"


@pytest.mark.slow
def test_a_store_that_was_killed_reads_as_a_copy_of_it(bucket: Bucket, original: Path, tmp_path: Path) -> None:
    (bucket.root / "abort").write_bytes(b"")
    with rmq.open(bucket.root) as here, MirroredStore(take(bucket).of("queues", "index")) as there:
        assert there.scan().read_all().equals(here.scan().read_all())
        assert there.query("orders", "o-5") == here.query("orders", "o-5")
        assert there.topics() == here.topics()


@pytest.mark.slow
def test_what_is_no_store_is_an_error(bucket: Bucket) -> None:
    shutil.rmtree(bucket.root / "commitlog")
    with pytest.raises(ObjectStoreError, match=r"test://bucket: no message store"):
        take(bucket)
    shutil.rmtree(bucket.root)
    with pytest.raises(ObjectStoreError, match="no message store"):
        take(bucket)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dledger-a/commitlog/x", "dledger-a/data/00000000000000004096", "index/CURRENT",
                                  "tiered/x"])  # fmt: skip
def test_foreign_formats_are_told_as_of_directories(bucket: Bucket, name: str) -> None:
    """DLedger's log beside a commit log, too: what it holds is not looked at."""
    if not name.startswith("index") and "/data/" not in name:
        shutil.rmtree(bucket.root / "commitlog")
        shutil.rmtree(bucket.root / "rmq")
    target = bucket.root / name.replace("/commitlog", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()
    (target.parent / "MANIFEST-1").touch()
    with pytest.raises(rmq.UnsupportedFormatError, match=r"^test://bucket|index in RocksDB"):  # noqa: SIM117
        with MirroredStore(take(bucket).of("index")) as store:
            store.query("orders", "o-1")


def test_names_that_lead_elsewhere_are_passed_over(bucket: Bucket) -> None:
    for name in ("commitlog/../x", "/commitlog/1", "commitlog//1", "commitlog/.", "a\0", "commitlog/" + "1" * 256):
        assert not snapshot._is_plain(name), name
    assert snapshot._is_plain("commitlog/00000000000000000000")


@pytest.mark.slow
def test_an_object_with_the_name_of_a_directory_is_an_error(bucket: Bucket) -> None:
    snapshot = dataclasses.replace(take(bucket), signs=("consumequeue/orders",))
    with pytest.raises(ObjectStoreError, match=r"consumequeue/orders/.*another object has the name of its directory"):
        MirroredStore(snapshot.of("queues"))
    assert leftovers(bucket) == []


def test_a_small_file_may_not_be_large(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SMALL_BYTES", 8)
    with pytest.raises(ObjectStoreError, match="at most 8 make sense"):
        take(bucket)


@pytest.mark.slow
def test_a_cache_that_is_too_small_is_an_error(bucket: Bucket) -> None:
    bucket.location = Location("test://bucket", cache_directory=bucket.location.cache_directory, cache_bytes=10_000)
    for part in ("index", "queues"):
        with pytest.raises(CacheFullError, match=r"fs\.cacheBytes=10000"):
            MirroredStore(take(bucket).of(part))  # type: ignore[arg-type]
    assert leftovers(bucket) == []


def test_the_cache_may_be_a_link_that_the_user_named(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    bucket.location = Location("test://bucket", cache_directory=str(tmp_path / "link"))
    with MirroredStore(take(bucket).of("index")) as store:
        assert len(store.query("orders", "o-5")) == 1
    assert list((tmp_path / "real" / "objects").iterdir())


@pytest.mark.parametrize("part", ["index", "queues"])
def test_a_full_disk_is_an_error_that_says_where(bucket: Bucket, monkeypatch: pytest.MonkeyPatch,
                                                 part: snapshot.Part) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = MirroredStore(take(bucket).of())
    monkeypatch.setattr(objects, "write_fully", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        store.scan().read_all()
    assert caught.value.filename == str(store._mirror.directory)
    with pytest.raises(ObjectStoreError, match=f"No space left on device: '{store._mirror.directory}'"):
        store.scan(on_damage="skip").read_all()  # no damage of the object, which would be left out
    with pytest.raises(OSError, match=f"No space left on device: '{bucket.location.cache_directory}/open/"):
        MirroredStore(take(bucket).of(part))
    store.close()
    assert leftovers(bucket) == []


@pytest.mark.slow
def test_nothing_stays_behind_but_whole_files_of_the_index(bucket: Bucket) -> None:
    store = MirroredStore(take(bucket).of("index", "queues"))
    store.scan().read_all()
    assert len(leftovers(bucket)) == 2
    store.close()
    assert leftovers(bucket) == []
    with pytest.raises(rmq.StoreClosedError):
        store.scan()
    assert len(list(Path(bucket.location.cache_directory, "objects").iterdir())) == len(
        list((bucket.root / "index").iterdir()))  # fmt: skip


@pytest.mark.slow
def test_an_open_that_fails_leaves_nothing(bucket: Bucket) -> None:
    (bucket.root / "rmq" / "meta.json").write_text("{")
    with pytest.raises(rmq.CorruptFileError, match=r"^test://bucket/rmq/meta\.json: byte 0: "):
        MirroredStore(take(bucket).of())
    assert leftovers(bucket) == []
    with pytest.raises(ValueError, match="must lie below the store's root"):
        MirroredStore(take(bucket).of(), rmq.StoreConfig(store_path_commit_log="/x"))


@pytest.mark.slow
def test_no_more_segments_are_open_than_may(bucket: Bucket) -> None:
    with MirroredStore(take(bucket).of("index")) as store:
        store._mirror.room = 2
        assert len(store.scan().read_all()) == COUNT
        keys = [f"o-{number}" for number in range(0, COUNT, 50)]
        assert len(store.query_many("orders", keys).table) == len(keys)
        assert len(store._mirror._held) == 2
        assert sum(segment._descriptor >= 0 for segment in store._log.segments) == 2  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_whatever_lies_there_reads_as_it_does_here(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Records of any size, pieces of any size, bytes damaged anywhere: the same rows, errors, lost ranges."""
    rng = random.Random(seed)
    monkeypatch.setattr(mirror, "BLOCK", rng.choice([512, 4096, 65536]))
    monkeypatch.setattr(mirror, "WINDOW", rng.choice([4096, 20000, 2**20]))
    monkeypatch.setattr(mirror, "LOG_BYTES", rng.choice([1, 30000, 2**30]))
    shutil.rmtree(bucket.root)
    with rmq.open(bucket.root, "x", config=CONFIG) as store:
        for number in range(150):
            size = rng.choice([0, 10, 400, 5000, 30000])
            store.put(rmq.Message("orders", rng.randbytes(size), keys=[f"o-{number}"], queue_id=number % 3))
    for path in rng.sample(sorted((bucket.root / "commitlog").iterdir()), rng.choice([0, 1, 3])):
        data = bytearray(path.read_bytes())
        at = rng.randrange(SEGMENT)
        data[at : at + 40] = rng.randbytes(len(data[at : at + 40]))
        path.write_bytes(data)
    with rmq.open(bucket.root) as here, MirroredStore(take(bucket).of("index", "queues")) as there:
        assert there.max_phy_offset == here.max_phy_offset
        for options in ({}, {"check_crc": False}, {"on_damage": "skip"}, {"on_damage": "skip", "check_crc": False},
                        {"on_damage": "skip", "begin_phy_offset": rng.randrange(here.max_phy_offset)}):  # fmt: skip
            assert outcome(there, lambda store: store.scan(**options).read_all()) == \
                outcome(here, lambda store: store.scan(**options).read_all()), options  # noqa: B023
        for number in range(0, 150, 9):
            key = f"o-{number}"
            assert outcome(there, lambda store: store.query("orders", key)) == \
                outcome(here, lambda store: store.query("orders", key))  # noqa: B023
        for queue in range(3):
            assert outcome(there, lambda store: store.pull("orders", queue, 0, 50)) == \
                outcome(here, lambda store: store.pull("orders", queue, 0, 50))  # noqa: B023


def outcome(store: rmq.Store, answer: Callable[[rmq.Store], Any]) -> Any:
    """An answer, or the error with the place in the store's file."""
    try:
        return answer(store)
    except rmq.CorruptFileError as error:
        return str(error).replace(str(store.path), "")


@pytest.mark.slow
def test_a_closed_store_s_segments_are_closed(bucket: Bucket) -> None:
    store = MirroredStore(take(bucket).of())
    segment = store._log.segments[0]
    store.close()
    with pytest.raises(rmq.StoreClosedError):
        segment.holding(0, 1)


def test_sizes_of_records_are_of_no_use_here(bucket: Bucket, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.commitlog.READ_GAP", 1)
    with rmq.open(original) as here, MirroredStore(take(bucket)) as store:
        table = here.scan(columns=["phy_offset", "size"]).read_all()
        offsets, sizes = (table[name].to_numpy() for name in ("phy_offset", "size"))
        found = store.lookup_many(offsets[::7], columns=["phy_offset"], sizes=sizes[::7])
        assert found["phy_offset"].to_pylist() == offsets[::7].tolist()
