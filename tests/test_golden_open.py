"""RocketMQ's stores opened for writing: nothing is lost, nothing changes that should not, puts go on."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from conftest import Golden, copy_store, digests

import rmq

DATA = ("commitlog", "consumequeue", "index")


def check(path: Path, golden: Golden) -> list[str]:
    return oracle.check_store(path, golden.config["index_slots"], golden.config["index_entries"],
                              golden.config["rocketmq_version"])  # fmt: skip


@pytest.fixture
def closed(small_golden: Golden, tmp_path: Path) -> Path:
    return copy_store(small_golden.directory / "store", tmp_path / "store")


@pytest.fixture
def crashed(small_golden: Golden, tmp_path: Path) -> Path:
    return copy_store(small_golden.directory / "crash", tmp_path / "crash")


def hot_key(golden: Golden) -> tuple[str, str]:
    """The topic and key that most messages carry."""
    question = max(golden.answers["query_offset"], key=lambda asked: len(asked["phy_offsets"]))
    return question["topic"], question["key"]


def open_as(golden: Golden, path: Path) -> rmq.Store:
    return rmq.open(path, "r+", config=rmq.StoreConfig(rocketmq_version=golden.config["rocketmq_version"]))


def test_a_closed_store_is_taken_over_without_a_change(small_golden: Golden, closed: Path) -> None:
    before = digests(closed, *DATA)
    for _ in range(2):
        with open_as(small_golden, closed) as store:
            assert store.max_phy_offset == small_golden.answers["max_phy_offset"]
            assert store.scan(columns=["phy_offset"]).read_all().num_rows == len(small_golden.stored)
        assert digests(closed, *DATA) == before
        assert not (closed / "abort").exists()
    assert not (closed / "rmq" / "cut").exists()


def test_a_crash_image_loses_nothing(small_golden: Golden, crashed: Path) -> None:
    original = {name: sha for name, sha in digests(small_golden.directory / "store", *DATA).items()
                if not name.startswith("index")}  # fmt: skip
    indexes = list(digests(small_golden.directory / "store", "index").values())
    with open_as(small_golden, crashed) as store:
        assert store.max_phy_offset == small_golden.answers["max_phy_offset"]
        for queue in small_golden.answers["queues"]:
            found = store.topics().get(queue["topic"], {}).get(queue["queue_id"], (0, 0))
            assert found == (queue["min"], queue["max"])
    assert check(crashed, small_golden) == []
    # As if there had been no crash: RocketMQ's own files of the same store after its clean shutdown.
    assert {name: sha for name, sha in digests(crashed, *DATA).items() if not name.startswith("index")} == original
    assert list(digests(crashed, "index").values()) == indexes
    settled = digests(crashed, *DATA)
    with open_as(small_golden, crashed):
        pass
    assert digests(crashed, *DATA) == settled


def test_puts_go_on_behind_rocketmq_s(small_golden: Golden, crashed: Path) -> None:
    with open_as(small_golden, crashed) as store:
        end = store.max_phy_offset
        results = [store.put(rmq.Message("Exact", b"x" * 900, queue_id=i % 3, keys=[f"new-{i}"])) for i in range(300)]
        assert results[0].phy_offset >= end
        assert [r.queue_offset for r in results[:3]] == [100, 50, 0]
    assert check(crashed, small_golden) == []
    with rmq.open(crashed) as store:
        assert [m.phy_offset for m in store.query("Exact", "new-299")] == [results[299].phy_offset]
        with rmq.open(small_golden.directory / "store") as original:
            hot = hot_key(small_golden)
            assert store.query(*hot, limit=None) == original.query(*hot, limit=None) != []


@pytest.mark.slow
@pytest.mark.parametrize("folders", [("consumequeue",), ("index",), ("consumequeue", "index"), ("checkpoint",)])
@pytest.mark.parametrize("image", ["store", "crash"])
def test_derived_files_may_be_deleted(small_golden: Golden, tmp_path: Path, image: str,
                                      folders: tuple[str, ...]) -> None:  # fmt: skip
    import shutil

    path = copy_store(small_golden.directory / image, tmp_path / "s")
    for folder in folders:
        shutil.rmtree(path / folder) if (path / folder).is_dir() else (path / folder).unlink()
    config = rmq.StoreConfig(rocketmq_version=small_golden.config["rocketmq_version"],
                             mapped_file_size_consume_queue=1000, max_hash_slot_num=97, max_index_num=500)  # fmt: skip
    with rmq.open(path, config=config) as store:
        reader_topics = store.topics()
        reader_answer = store.query(*hot_key(small_golden), limit=None)
        assert reader_answer
    with rmq.open(path, "r+", config=config) as store:
        assert store.topics() == reader_topics
        assert store.query(*hot_key(small_golden), limit=None) == reader_answer
    assert check(path, small_golden) == []


def test_a_lost_index_file_is_derived_again(small_golden: Golden, closed: Path) -> None:
    files = sorted((closed / "index").iterdir())
    before = [digest for _, digest in sorted(digests(closed, "index").items())]
    files[len(files) // 2].unlink()
    with rmq.open(closed) as store:
        reader_answer = store.query(*hot_key(small_golden), limit=None)
    with open_as(small_golden, closed) as store:
        assert store.query(*hot_key(small_golden), limit=None) == reader_answer
    assert check(closed, small_golden) == []
    assert [digest for _, digest in sorted(digests(closed, "index").items())] == before


def test_a_torn_last_record_is_cut_and_kept(small_golden: Golden, crashed: Path) -> None:
    last = next(line for line in reversed(small_golden.stored) if len(line["body"]) > 40)
    segment = crashed / "commitlog" / f"{last['phy_offset'] - last['phy_offset'] % 65536:020d}"
    data = bytearray(segment.read_bytes())
    place = last["phy_offset"] % 65536
    data[place + 120] ^= 0xFF
    segment.write_bytes(data)
    with open_as(small_golden, crashed) as store:
        assert store.max_phy_offset == last["phy_offset"]
    assert check(crashed, small_golden) == []
    kept = b"".join(path.read_bytes() for path in sorted((crashed / "rmq" / "cut").glob("*.bin")))
    assert kept.startswith(bytes(data[place : place + last["size"]]))
    assert any("torn tail" in path.read_text() for path in (crashed / "rmq" / "cut").glob("*.txt"))


def test_damage_in_a_closed_store_stops_the_open(small_golden: Golden, closed: Path) -> None:
    victim = next(line for line in reversed(small_golden.stored) if line["phy_offset"] % 65536 == 0)
    victim = small_golden.stored[small_golden.stored.index(victim) + 5]  # in the segment where the scan begins
    segment = closed / "commitlog" / f"{victim['phy_offset'] - victim['phy_offset'] % 65536:020d}"
    data = bytearray(segment.read_bytes())
    data[victim["phy_offset"] % 65536 + 4] ^= 0xFF  # its magic
    segment.write_bytes(data)
    before = digests(closed, *DATA)
    with pytest.raises(rmq.CorruptFileError) as error:
        open_as(small_golden, closed)
    assert error.value.path == str(segment)
    assert error.value.offset == victim["phy_offset"] % 65536
    assert digests(closed, *DATA) == before
    assert not (closed / "abort").exists()
    with rmq.open(closed) as store:  # readers get what is whole on both sides of it
        assert store.lookup(small_golden.stored[-1]["phy_offset"])
        with pytest.raises(KeyError):
            store.lookup(victim["phy_offset"])
        with pytest.raises(rmq.CorruptFileError):
            store.scan().read_all()
    config = rmq.StoreConfig(rocketmq_version=small_golden.config["rocketmq_version"])
    with rmq.open(closed, "r+", config=config, repair=True) as store:
        assert store.max_phy_offset == victim["phy_offset"]
    assert list((closed / "rmq" / "cut").glob("*.bin"))
    assert check(closed, small_golden) == []
