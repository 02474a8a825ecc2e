# SPDX-License-Identifier: Apache-2.0
"""Store.table and Store.units: a store's own structures, as they stand in its files and behind them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rmq
from rmq import tables

TIME = 1_700_000_000_000
COUNT = 500
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=20 * 40,
                         max_hash_slot_num=50, max_index_num=200)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 messages a second apart, a key each, in three queues of "a"; one of "b" without a key."""
    root = tmp_path_factory.mktemp("tables") / "s"
    clock = iter(range(TIME, 2**62, 1000))
    with rmq.open(root, "x", config=CONFIG, clock=lambda: next(clock)) as store:
        for number in range(COUNT):
            store.put(rmq.Message("a", b"x", keys=f"k{number}", tags="A", queue_id=number % 3))
        store.put(rmq.Message("b", b"y"))
    return root


@pytest.fixture
def store(path: Path) -> Iterator[rmq.Store]:
    with rmq.open(path) as opened:
        yield opened


def test_units_of_all_queues(store: rmq.Store) -> None:
    rows = store.table("queues").read_all().to_pylist()
    records = store.scan(columns=["topic", "queue_id", "queue_offset", "phy_offset", "size", "tags"]).read_all()
    expected = sorted(records.to_pylist(), key=lambda row: (row["topic"], row["queue_id"], row["queue_offset"]))
    for row in expected:
        row["tags_code"] = ord(row.pop("tags") or "\0")
    assert rows == expected


def test_topics_choose_queues(store: rmq.Store) -> None:
    for name in ("queues", "topics"):
        with pytest.raises(TypeError, match="topics must be a sequence of str"):
            store.table(name, topics="b")  # type: ignore[call-overload, arg-type]
    assert store.table("queues", topics=["b"]).read_all().num_rows == 1
    assert store.table("queues", topics=[]).read_all().num_rows == 0
    assert [row["topic"] for row in store.table("topics", topics=["b", "nix"]).read_all().to_pylist()] == ["b"]


def test_entries_of_the_index(store: rmq.Store) -> None:
    rows = store.table("index").read_all().to_pylist()
    assert len({row["file"] for row in rows}) == 3
    phy_offsets = store.scan(topics=["a"], columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
    assert [row["phy_offset"] for row in rows] == phy_offsets
    assert [row["key_hash"] for row in rows] == [rmq.index_key_hash(f"a#k{number}") for number in range(COUNT)]
    assert all(row["slot"] == row["key_hash"] % 50 for row in rows)
    assert [row["entry"] for row in rows[:3]] == [1, 2, 3]
    late = [round(row["store_timestamp"].timestamp()) - TIME // 1000 - number for number, row in enumerate(rows)]
    firsts = [number for number, row in enumerate(rows) if row["entry"] == 1]
    # RocketMQ counts a file's first entry from the end of the file before, all others from its own beginning.
    assert late == [int(number in firsts[1:]) for number in range(COUNT)]


def test_bounds_and_segments(store: rmq.Store, path: Path) -> None:
    assert [tuple(row.values()) for row in store.table("topics").read_all().to_pylist()] == [
        ("a", 0, 0, 167), ("a", 1, 0, 167), ("a", 2, 0, 166), ("b", 0, 0, 1)]  # fmt: skip
    rows = store.table("segments").read_all().to_pylist()
    names = sorted((path / "commitlog").iterdir())[: len(rows)]
    assert [row["path"] for row in rows] == list(map(str, names))
    assert [row["begin_phy_offset"] for row in rows] == [int(name.name) for name in names]
    assert rows[-1]["end_phy_offset"] == store.max_phy_offset
    assert round(rows[0]["first_store_timestamp"].timestamp() * 1000) == TIME


def test_a_segment_of_which_no_record_can_be_read_tells_no_time(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    names = sorted((copy / "commitlog").iterdir())
    os.truncate(names[0], 20)
    os.truncate(names[1], 2000)
    with rmq.open(path) as store, rmq.open(copy) as damaged:
        whole, rows = (opened.table("segments").read_all().to_pylist() for opened in (store, damaged))
    assert [row["first_store_timestamp"] for row in rows[1:]] == [row["first_store_timestamp"] for row in whole[1:]]
    assert rows[0]["first_store_timestamp"] is None


@pytest.mark.parametrize("name", ["queues", "index", "topics", "segments"])
def test_an_empty_store_has_empty_tables(tmp_path: Path, name: str) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as empty:
        assert empty.table(name).read_all().num_rows == 0  # type: ignore[arg-type]


def test_what_a_writer_has_just_put_is_there(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as writer, rmq.open(tmp_path / "s") as reader:
        writer.put(rmq.Message("a", b"x", keys="k"))
        for store in (writer, reader):
            assert [store.table(name).read_all().num_rows for name in ("queues", "topics", "segments")] == [1, 1, 1]
        assert writer.table("index").read_all().num_rows == 1


def test_a_table_that_there_is_not_is_an_error(store: rmq.Store) -> None:
    with pytest.raises(ValueError, match="name must be one of queues, index, topics, segments, got 'nix'"):
        store.table("nix")  # type: ignore[arg-type]


@pytest.mark.parametrize(("offset", "limit", "count"), [(0, 1, 1), (0, 39, 39), (0, 40, 40), (0, 41, 41), (39, 3, 3),
    (166, 5, 1), (167, 1, 0), (10**15, 1, 0), (-1, 1, 0), (0, 0, 0)], ids=str)  # fmt: skip
def test_units_of_one_queue(store: rmq.Store, offset: int, limit: int, count: int) -> None:
    phy_offsets, sizes, tags = store.units("a", 0, offset, limit)
    assert len(phy_offsets) == len(sizes) == len(tags) == count
    pulled = store.pull("a", 0, max(offset, 0), max(limit, 1)).messages[:count]
    assert [(m.phy_offset, m.size) for m in pulled] == list(zip(phy_offsets.tolist(), sizes.tolist(), strict=True))


def test_units_of_a_queue_that_there_is_not(store: rmq.Store) -> None:
    assert [len(part) for part in store.units("nix", 0, 0, 5)] == [0, 0, 0]
    assert [len(part) for part in store.units("a", 9, 0, 5)] == [0, 0, 0]


# ---- messages at phy offsets -----------------------------------------------------------------------------------


def test_messages_at_phy_offsets_come_in_their_order(store: rmq.Store) -> None:
    whole = store.scan().read_all()
    places = whole["phy_offset"].to_pylist()
    order = [*reversed(range(len(places))), 3, 3, 0]
    found = store.lookup_many([places[number] for number in order])
    assert found.column_names == ["place", *whole.column_names]
    assert found["place"].to_pylist() == list(range(len(order)))
    assert found.drop_columns(["place"]).to_pylist() == whole.take(order).to_pylist()


def test_where_no_record_starts_nothing_is_found(store: rmq.Store) -> None:
    first, second = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()[:2]
    hostile = [-(2**63), -1, first + 1, second, second - 1, store.max_phy_offset, 2**63 - 1]
    found = store.lookup_many(np.array(hostile), columns=["phy_offset"])
    assert found.to_pylist() == [{"place": 3, "phy_offset": second}]
    assert store.lookup_many([], columns=["body"]).num_rows == 0


def test_a_crc_that_differs_is_damage_unless_it_is_not_looked_at(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as made:
        place = made.put_many([rmq.Message("a", b"body %d" % n) for n in range(3)])[1].phy_offset
    path = next((tmp_path / "s" / "commitlog").iterdir())
    path.write_bytes(path.read_bytes().replace(b"body 1", b"bodY 1"))
    with rmq.open(tmp_path / "s") as opened:
        with pytest.raises(rmq.CorruptFileError, match="body CRC differs"):
            opened.lookup_many([0, place])
        found = opened.lookup_many([0, place], columns=["body"], check_crc=False)
        assert found["body"].to_pylist() == [b"body 0", b"bodY 1"]


def test_units_of_a_queue_go_on_where_its_files_begin_when_some_are_cleaned_meanwhile(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", 10)
    shutil.copytree(path, tmp_path / "s")
    with rmq.open(tmp_path / "s", "r+") as store:
        batches = iter(store.table("queues", topics=["a"]))
        next(batches)
        for file in (tmp_path / "s/commitlog").iterdir():
            os.utime(file, (1, 1))
        assert store.clean(limit=None, max_used_percent=100).removed
        low, high = store.topics()["a"][0]
        assert 10 < low < high
        rows = [row for batch in batches for row in batch.to_pylist() if row["queue_id"] == 0]
        assert [row["queue_offset"] for row in rows] == list(range(low, high))
