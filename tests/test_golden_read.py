"""Stores that RocketMQ wrote read as RocketMQ recorded them."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

import oracle
import pyarrow.compute as pc
import pytest
from conftest import Golden, copy_store
from forks import lock_of_a_broker

import rmq
from rmq.indexfile import IndexFile

TRANSACTION_MASK, ROLLBACK = 0xC, 0xC


@pytest.fixture
def store(golden: Golden):
    with rmq.open(golden.directory / "store") as opened:
        yield opened


def host_of(text: str) -> bytes:
    from rmq._core._message import parse_host

    return parse_host(text, "host")


def test_bounds(golden: Golden, store: rmq.Store) -> None:
    assert store.min_phy_offset == golden.answers["min_phy_offset"]
    assert store.max_phy_offset == golden.answers["max_phy_offset"]
    topics = store.topics()
    for queue in golden.answers["queues"]:
        assert topics.get(queue["topic"], {}).get(queue["queue_id"], (0, 0)) == (queue["min"], queue["max"])


def test_scan_gives_every_record_as_put(golden: Golden, store: rmq.Store) -> None:
    columns = ["topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "born_timestamp",
               "born_host", "store_timestamp", "store_host", "reconsume_times", "prepared_transaction_offset",
               "raw_body", "offset_msg_id"]  # fmt: skip
    table = store.scan(columns=columns).read_all()
    for name in ("born_timestamp", "store_timestamp"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast("int64"))
    rows = table.to_pylist()
    assert len(rows) == len(golden.stored)
    for row, line in zip(rows, golden.stored, strict=True):
        for name in ("topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "born_timestamp",
                     "store_timestamp", "reconsume_times", "prepared_transaction_offset", "offset_msg_id"):  # fmt: skip
            assert row[name] == line[name], (line["seq"], name)
        assert row["sys_flag"] & ~0x30 == line["sys_flag"] & ~0x30
        assert row["raw_body"] == base64.b64decode(line["body"])
        assert host_of(row["born_host"]) == host_of(line["born_host"])
        assert host_of(row["store_host"]) == host_of(line["store_host"])


def test_compressed_bodies_come_out_plain(golden: Golden, store: rmq.Store) -> None:
    compressed = [line for line in golden.stored if line.get("plain_sha256")]
    assert compressed
    bodies = dict(zip(*(store.scan(columns=["phy_offset", "body"]).read_all()[name].to_pylist()
                        for name in ("phy_offset", "body")), strict=True))  # fmt: skip
    for line in compressed:
        for body in (store.lookup(line["phy_offset"]).body, bodies[line["phy_offset"]]):
            assert (len(body), hashlib.sha256(body).hexdigest()) == (line["plain_length"], line["plain_sha256"])


def test_derived_columns_equal_the_message_objects_and_the_oracle(golden: Golden, store: rmq.Store) -> None:
    records = {record.phy_offset: record for record in oracle.read_records(golden.directory / "store")}
    columns = ["phy_offset", "keys", "tags", "uniq_key", "properties", "raw_properties"]
    rows = store.scan(columns=columns).read_all().to_pylist()
    assert len(rows) == len(records)
    for row in rows:
        record, message = records[row["phy_offset"]], store.lookup(row["phy_offset"])
        assert tuple(row["keys"]) == tuple(record.keys) == message.keys
        assert row["tags"] == record.tags == message.tags
        assert row["uniq_key"] == record.uniq_key == message.uniq_key
        assert dict(row["properties"]) == record.properties == message.properties
        assert row["raw_properties"] == record.raw_properties == message.raw_properties


def test_index_headers(golden: Golden) -> None:
    index = golden.directory / "store" / "index"
    for header in golden.answers["index"]:
        with IndexFile(index / header["name"], max_hash_slot_num=golden.config["index_slots"],
                       max_index_num=golden.config["index_entries"]) as file:  # fmt: skip
            found = {name: getattr(file, name) for name in ("begin_timestamp", "end_timestamp", "begin_phy_offset",
                                                             "end_phy_offset", "hash_slot_count", "index_count")}
            assert found == {name: header[name] for name in found}


def test_raw_key_queries_answer_as_rocketmq(golden: Golden, store: rmq.Store) -> None:
    questions = golden.answers["query_offset"]
    assert len(questions) > 100
    for question in questions:
        answer = store.select_phy_offset_many(question["topic"], [question["key"]], max_num=question["max_num"],
                                              begin=question["begin"], end=question["end"])  # fmt: skip
        assert answer.to_pylist() == [question["phy_offsets"]], question


def test_pull_has_the_same_status_bounds_and_first_messages(golden: Golden, store: rmq.Store) -> None:
    for question in golden.answers["get_message"]:
        result = store.pull(question["topic"], question["queue_id"], question["offset"], question["max_num"])
        assert result.status.value == question["status"], question
        if question["status"] != "NO_MESSAGE_IN_QUEUE":
            assert (result.min_queue_offset, result.max_queue_offset) == (question["min"], question["max"])
        count = len(question["phy_offsets"])
        assert [message.phy_offset for message in result.messages[:count]] == question["phy_offsets"]
        assert [message.queue_offset for message in result.messages[:count]] == question["queue_offsets"]
        assert len(result.messages) >= count


def test_time_searches_are_rocketmq_s_or_exact(golden: Golden, store: rmq.Store) -> None:
    if golden.config["rocketmq_version"] < "5.1.1":
        assert all(question["boundary"] is None for question in golden.answers["offset_by_time"])
        return
    times: dict[tuple[str, int], list[int]] = {}
    for record in oracle.read_records(golden.directory / "store"):
        if record.transaction in (0, 0x8):
            times.setdefault((record.topic, record.queue_id), []).append(record.store_timestamp)
    for question in golden.answers["offset_by_time"]:
        where = question["topic"], question["queue_id"]
        found = store.search_offset(*where, question["timestamp"], question["boundary"])
        stamps, time = times.get(where, []), question["timestamp"]
        if question["boundary"] == "LOWER":
            exact = next((i for i, stamp in enumerate(stamps) if stamp >= time), len(stamps))
        else:
            exact = next((i for i in reversed(range(len(stamps))) if stamps[i] <= time), 0)
        assert found in (question["offset"], exact), question


def test_query_is_exact_by_brute_force(golden: Golden, store: rmq.Store) -> None:
    wanted: dict[tuple[str, str], list[int]] = {}
    for row in store.scan(columns=["topic", "keys", "uniq_key", "phy_offset", "sys_flag"]).read_all().to_pylist():
        if row["sys_flag"] & TRANSACTION_MASK == ROLLBACK:
            continue
        for key in {*row["keys"], *([row["uniq_key"]] if row["uniq_key"] else [])}:
            wanted.setdefault((row["topic"], key), []).append(row["phy_offset"])
    by_topic: dict[str, list[str]] = {}
    for topic, key in wanted:
        by_topic.setdefault(topic, []).append(key)
    for topic, keys in by_topic.items():
        result = store.query_many(topic, [*keys, "absent"], limit=None, columns=["phy_offset"])
        assert result.complete
        found: dict[int, list[int]] = {}
        for row in result.table.to_pylist():
            found.setdefault(row["key_index"], []).append(row["phy_offset"])
        for number, key in enumerate(keys):
            assert found.pop(number) == wanted[topic, key][::-1], (topic, key)
        assert not found
    topic, key = max(wanted, key=lambda item: len(wanted[item]))
    hot = store.query(topic, key, limit=5)
    assert [message.phy_offset for message in hot] == wanted[topic, key][::-1][:5]
    assert hot.truncated
    assert hot.complete


def test_query_by_time_is_exact_to_the_millisecond(golden: Golden, store: rmq.Store) -> None:
    table = store.scan(columns=["topic", "uniq_key", "phy_offset", "store_timestamp"]).read_all()
    table = table.filter(pc.is_valid(table["uniq_key"]))
    rows = table.set_column(3, "ms", table["store_timestamp"].cast("int64")).slice(0, 400).to_pylist()
    for row in rows[::7]:
        def offsets(begin: int, end: int, row: dict = row) -> list[int]:
            return [m.phy_offset for m in store.query(row["topic"], row["uniq_key"], begin=begin, end=end, limit=None)]

        assert row["phy_offset"] in offsets(row["ms"], row["ms"])
        assert row["phy_offset"] not in offsets(row["ms"] + 1, 2**62)
        assert row["phy_offset"] not in offsets(0, row["ms"] - 1)


def test_lookup_by_each_kind_of_id(golden: Golden, store: rmq.Store) -> None:
    for line in golden.stored[::37]:
        by_offset = store.lookup(line["phy_offset"])
        assert store.lookup(line["offset_msg_id"].lower()) == by_offset
        if line["sys_flag"] & TRANSACTION_MASK in (0, 0x8):
            assert store.lookup((line["topic"], line["queue_id"], line["queue_offset"])) == by_offset
        if by_offset.uniq_key and not by_offset.is_rollback:
            assert store.lookup(by_offset.uniq_key).uniq_key == by_offset.uniq_key
    for absent in (1, -1, 2**62, "F" * 32, "no such id", ("Exact", 0, 10**9), ("nope", 0, 0)):
        with pytest.raises(KeyError):
            store.lookup(absent)


def test_reading_writes_nothing(golden: Golden) -> None:
    path = golden.directory / "store"
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    with rmq.open(path) as store:
        store.topics()
        store.query("Exact", "k1")
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_crash_image_reads_like_the_closed_store(small_golden: Golden, tmp_path: Path) -> None:
    closed = rmq.open(small_golden.directory / "store")
    crashed = rmq.open(small_golden.directory / "crash")
    with closed, crashed:
        assert crashed.max_phy_offset == closed.max_phy_offset
        assert crashed.topics() == closed.topics()
        assert crashed.scan().read_all().equals(closed.scan().read_all())
        for key in ("k1", "warm-4"):
            assert crashed.query("Exact", key, limit=None) == closed.query("Exact", key, limit=None)


@pytest.mark.parametrize("place", ["second", "middle"])
def test_a_segment_that_a_copy_of_a_crashed_store_lacks_hides_no_other(small_golden: Golden, tmp_path: Path,
                                                                       place: str) -> None:  # fmt: skip
    """Its checkpoint tells nothing: RocketMQ writes that now and then, and a copy may have an old one or none."""
    path = copy_store(small_golden.directory / "crash", tmp_path / "s")
    with rmq.open(path, config=small_golden.store_config) as store:
        sound = store.scan(columns=["phy_offset"], on_damage="skip").read_all()["phy_offset"].to_pylist()
    segments = sorted((path / "commitlog").iterdir())
    missing = segments[1 if place == "second" else len(segments) // 2]
    begin, end = int(missing.name), int(missing.name) + missing.stat().st_size
    assert any(begin <= offset < end for offset in sound)
    missing.unlink()
    left = [offset for offset in sound if not begin <= offset < end]
    for without in ((), ("checkpoint",)):
        for name in without:
            (path / name).unlink(missing_ok=True)
        with rmq.open(path, config=small_golden.store_config) as store:
            found = store.scan(columns=["phy_offset"], on_damage="skip").read_all()["phy_offset"].to_pylist()
            assert found == left
            with pytest.raises(rmq.CorruptFileError, match="segment is missing") as error:
                store.scan().read_all()
            assert Path(error.value.path).name == missing.name
            assert store.lookup(left[-1]).phy_offset == left[-1]


@pytest.mark.parametrize("image", ["store", "crash"])
def test_a_backup_whose_log_was_not_copied_is_refused_untouched_and_whole_with_it(
    small_golden: Golden, tmp_path: Path, image: str
) -> None:
    source = small_golden.directory / image
    path = copy_store(source, tmp_path / "s")
    shutil.rmtree(path / "commitlog")
    before = sorted(path.rglob("*"))
    for how in ({"mode": "r+"}, {"mode": "a"}, {"mode": "r+", "repair": True}):
        with pytest.raises(rmq.CorruptFileError, match="the commit log has no segments, but other files do"):
            rmq.open(path, config=small_golden.store_config, **how)
        assert set(path.rglob("*")) - set(before) <= {path / "lock"}
    for is_there in (False, True):
        if is_there:
            (path / "commitlog").mkdir()
        found = rmq.verify(path, config=small_golden.store_config)
        assert any("the commit log has no segments" in item.reason for item in found if item.severity == "damage")
    (path / "commitlog").rmdir()
    copy_store(source / "commitlog", path / "commitlog")
    with rmq.open(path) as store, rmq.open(source) as whole:
        assert store.scan().read_all().equals(whole.scan().read_all())


def test_beside_a_broker_whose_log_lies_elsewhere_the_option_is_named_and_with_it_all_is_there(
    small_golden: Golden, tmp_path: Path
) -> None:
    path = copy_store(small_golden.directory / "crash", tmp_path / "s")
    (path / "commitlog").rename(tmp_path / "log")
    with lock_of_a_broker(path), rmq.open(small_golden.directory / "crash") as whole:
        for is_there in (False, True):
            if is_there:
                (path / "commitlog").mkdir()
            with pytest.raises(rmq.CorruptFileError, match="elsewhere: store_path_commit_log"):
                rmq.open(path)
            (found,) = [item for item in rmq.verify(path) if item.severity == "damage"]
            assert found.reason.endswith("elsewhere: store_path_commit_log")
        config = rmq.StoreConfig(store_path_commit_log=str(tmp_path / "log"))
        with rmq.open(path, config=config) as store:
            assert store.scan().read_all().equals(whole.scan().read_all())


def test_an_id_in_a_segment_that_is_missing_is_an_error_that_names_it(small_golden: Golden, tmp_path: Path) -> None:
    path = copy_store(small_golden.directory / "store", tmp_path / "s")
    with rmq.open(path) as store:
        places = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
    missing = sorted((path / "commitlog").iterdir())[2]
    missing.unlink()
    (gone, *_) = [place for place in places if int(missing.name) <= place]
    with rmq.open(path) as store:
        for ask in (lambda: store.lookup(gone), lambda: store.lookup_many([gone])):
            with pytest.raises(rmq.CorruptFileError, match="segment is missing"):
                ask()
        with pytest.raises(KeyError):
            store.lookup(store.max_phy_offset)
