# SPDX-License-Identifier: Apache-2.0
"""Records at phy offsets as Arrow batches: of bounded size whatever lies there, each row with its place."""

from __future__ import annotations

import datetime as dt
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_foreign_formats import Builder
from test_inner_batches import BATCH_UNIT, packed

import rmq

LARGEST = 200_000  # bytes of a body with all that its record has beside it
SIZES: dict[str, int] = {"max_hash_slot_num": 100, "max_index_num": 400}
COLUMNS = ("phy_offset", "queue_offset", "tags", "body")


@pytest.fixture(params=[0, 9])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> rmq.Store:
    """Bodies of 0 to LARGEST bytes, none or every ninth compressed; open for reading."""
    chance = random.Random(1)
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=2**22)) as made:
        for number in range(300):
            body = chance.randbytes(chance.choice([0, 10, 1000, LARGEST - 1000]))
            zipped = zlib.compress(b"x" * (LARGEST - 1000)) if request.param and number % request.param == 0 else None
            made.put(rmq.Message("T", zipped or body, tags=f"t{number}", sys_flag=1 if zipped else 0))
    return rmq.open(tmp_path / "s")


@pytest.mark.parametrize("limit", [1, 300_000, 2**21, 2**40])
@pytest.mark.parametrize("columns", [COLUMNS, ("phy_offset",), ("body",), ()], ids=str)
def test_a_batch_ends_soon_after_its_limit(store: rmq.Store, columns: tuple[str, ...], limit: int) -> None:
    """Offsets in any order, some twice, some where no record starts: what comes is what was asked for, by its place."""
    with store:
        offsets = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_numpy()
        asked = np.random.default_rng(2).permutation(np.r_[offsets, offsets[:50], offsets[:9] + 1])
        parts = list(store._placed(asked, columns, store.max_phy_offset, crc=True, limit=limit))
        whole = store.lookup_many(asked, columns=columns)
    assert all(batch.nbytes <= 2 * limit + LARGEST for batch, _ in parts)
    places = np.concatenate([places for _, places in parts])
    assert sorted(places.tolist()) == whole["place"].to_pylist() == np.flatnonzero(np.isin(asked, offsets)).tolist()
    if columns:
        assert [len(batch) for batch, _ in parts] == [len(places) for _, places in parts]
        table = pa.Table.from_batches([batch for batch, _ in parts]).take(pa.array(np.argsort(places, kind="stable")))
        assert table.to_pylist() == whole.drop_columns(["place"]).to_pylist()


def test_messages_of_an_inner_batch_have_the_place_of_their_record(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    inner = packed(*((b"%d" % number, b"", number) for number in range(3)))
    for number in range(4):
        builder.record("BT", inner, b"INNER_BASE\1%d\2INNER_NUM\0013\2" % (3 * number), sys_flag=0xC0,
                       queue_offset=3 * number)  # fmt: skip
    with rmq.open(builder.finish()) as store:
        offsets = np.unique(store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_numpy())
        asked = offsets[[2, 0, 3]]
        for limit in (1, 2**20):
            parts = list(store._placed(asked, ["queue_offset"], store.max_phy_offset, crc=False, limit=limit))
            rows = sorted((place, offset) for batch, places in parts for place, offset in
                          zip(places.tolist(), batch["queue_offset"].to_pylist(), strict=True))  # fmt: skip
            assert rows == [(place, 3 * number + row) for place, number in enumerate((2, 0, 3)) for row in range(3)]



def test_messages_without_a_queue_are_found_as_far_as_an_index_has_them(tmp_path: Path) -> None:
    prepared, rollback = (rmq.Message("half", b"", uniq_key=key, sys_flag=flag) for key, flag in (("P", 4), ("R", 12)))
    with rmq.open(tmp_path / "s", "x") as made:
        placed = [made.put(message).phy_offset for message in (prepared, rollback)]
    with rmq.open(tmp_path / "s") as store:
        assert (store.topics(), store.lookup("P", topic="half").phy_offset) == ({}, placed[0])
        for key, topic in (("P", None), ("R", None), ("R", "half")):
            with pytest.raises(KeyError, match=key):
                store.lookup(key, topic=topic)
        assert store.lookup(placed[1]).is_rollback


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A single message and an inner batch with unique keys, all of them in an index file."""
    builder = Builder(tmp_path / "store")
    places = [builder.record("T", b"one", b"UNIQ_KEY\1u1\2"),
              builder.record("BT", packed((b"two", b"", 0)), b"INNER_BASE\0010\2UNIQ_KEY\1u2\2INNER_NUM\0011\2",
                             sys_flag=0xC0)]  # fmt: skip
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", BATCH_UNIT.pack(*places[1], 0, builder.times, 0, 1, -1, 0), 460)
    builder.units("T", 0, [(*places[0], 0)])
    path = builder.finish()
    (path / "index").mkdir(exist_ok=True)
    with rmq.IndexFile(path / "index/20240101000000000", "x", **SIZES) as file:
        for number, (topic, place) in enumerate(zip(("T", "BT"), places, strict=True), 1):
            assert file.put_key(f"{topic}#u{number}", place[0], builder.times)
    return path


def in_rocksdb(path: Path) -> None:
    """A broker keeps the queues of the store there, whatever files are left."""
    (path / "consumequeue_r").mkdir()
    (path / "consumequeue_r/CURRENT").write_text("MANIFEST-000001\n")
    (path / "consumequeue_r/MANIFEST-000001").touch()


@pytest.mark.parametrize("queues", ["files", "RocksDB"])
def test_a_unique_key_alone_finds_a_message_wherever_its_queue_is(indexed: Path, queues: str) -> None:
    if queues == "RocksDB":
        shutil.rmtree(indexed / "consumequeue")
        shutil.rmtree(indexed / "batchconsumequeue")
        (indexed / "consumequeue").mkdir()
        in_rocksdb(indexed)
    with rmq.open(indexed, config=rmq.StoreConfig(**SIZES)) as store:
        assert store.info().unindexed == ()
        for topic, key, body in (("T", "u1", b"one"), ("BT", "u2", b"two")):
            assert store.lookup(key).body == store.lookup(key, topic=topic).body == body
        with pytest.raises(KeyError):
            store.lookup("u3")


def test_queue_files_that_a_broker_left_for_rocksdb_are_not_counted(indexed: Path) -> None:
    in_rocksdb(indexed)
    with rmq.open(indexed, config=rmq.StoreConfig(**SIZES)) as store:
        assert (store.info().message_count, store.info().topic_count) == (0, 0)


def test_a_place_outside_64_bits_among_others_is_a_value_error(tmp_path: Path) -> None:
    """NumPy makes floats of such ints when smaller ones stand beside them."""
    with rmq.open(tmp_path / "s", "x") as store:
        for places in ([2**63, 1], [2**64, 1], [np.int64(1), 2**63], iter([-1, 2**63])):
            with pytest.raises(ValueError, match="phy_offsets holds a number outside 64 bits"):
                store.lookup_many(places)
        with pytest.raises(TypeError, match="phy_offsets must be integers, got float"):
            store.lookup_many([2**63, 1.5])


def test_a_unique_key_of_digits_is_found_where_its_place_as_an_id_is_damaged(tmp_path: Path) -> None:
    """Without such a message the damage is told."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 16)) as store:
        store.put(rmq.Message("T", b"first"))
        bad = store.put(rmq.Message("T", b"second")).phy_offset
        good = store.put(rmq.Message("T", b"third", uniq_key=f"{bad:032X}")).phy_offset
    segment = tmp_path / "s/commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"second", b"Second"))
    with rmq.open(tmp_path / "s") as store:
        assert store.lookup(f"{bad:032X}", topic="T").phy_offset == good
        with pytest.raises(rmq.CorruptFileError, match="CRC"):
            store.lookup(f"{1:016X}{bad:016X}", topic="T")


def test_a_unique_key_tells_each_millisecond() -> None:
    """Of 2038, where a float of seconds has fewer digits."""
    now, begin = dt.datetime(2038, 6, 20, tzinfo=dt.UTC), dt.datetime(2038, 6, 1).astimezone()
    first = round(begin.timestamp() * 1000)
    for span in range(1000):
        key = rmq.parse_uniq_key(f"C0A80107D6F173D16E93{span:08X}0001", now)
        assert key.born_timestamp == first + span
