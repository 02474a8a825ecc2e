"""What a store promises to those who put and read in one process: visibility, order, forms of data."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from conftest import SIZES, digests

import rmq

FAR = 2**31 - 1  # ms to the next timed flush
CONFIG = rmq.StoreConfig(**SIZES, flush_interval_commit_log=FAR)
START = 1_700_000_000_000


def message(i: int, **fields: Any) -> rmq.Message:
    return rmq.Message("T", b"%05d" % i, keys=[f"key{i}", "all"], tags="tag", uniq_key=f"uniq{i}", **fields)


def numbers(store: rmq.Store) -> list[int]:
    return [int(body) for body in store.scan(columns=["body"]).read_all()["body"].to_pylist()]


class Clock:
    """Ten ms later with each reading."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> int:
        self.readings += 1
        return START + 10 * self.readings


# ---- a returned put is seen ------------------------------------------------------------------------------

PUTS: dict[str, Callable[[rmq.Store, rmq.Message], rmq.PutResult]] = {
    "put": lambda s, m: s.put(m),
    "put_many": lambda s, m: s.put_many([m])[0],
    "put_batch": lambda s, m: s.put_batch([m])[0],
}
READS: dict[str, Callable[[rmq.Store, int, rmq.PutResult], Any]] = {
    "query": lambda s, i, r: [m.phy_offset for m in s.query("T", f"key{i}")] == [r.phy_offset],
    "query by uniq_key": lambda s, i, r: [m.body for m in s.query("T", f"uniq{i}")] == [b"%05d" % i],
    "query newest": lambda s, i, r: [m.phy_offset for m in s.query("T", "all", limit=1)] == [r.phy_offset],
    "query_many": lambda s, i, r: s.query_many("T", ["no", f"key{i}"]).table["body"].to_pylist() == [b"%05d" % i],
    "select": lambda s, i, r: r.phy_offset in s.select_phy_offset_many("T", [f"key{i}"])[0].as_py(),
    "pull": lambda s, i, r: [m.body for m in s.pull("T", 0, i).messages] == [b"%05d" % i],
    "topics": lambda s, i, r: s.topics() == {"T": {0: (0, i + 1)}},
    "scan": lambda s, i, r: numbers(s) == list(range(i + 1)),
    "search_offset": lambda s, i, r: s.search_offset("T", 0, r.store_timestamp) == i,
    "search_offset upper": lambda s, i, r: s.search_offset("T", 0, 2**62, "UPPER") == i,
    "lookup by phy_offset": lambda s, i, r: s.lookup(r.phy_offset).keys == (f"key{i}", "all"),
    "lookup by offset_msg_id": lambda s, i, r: s.lookup(r.offset_msg_id).queue_offset == i,
    "lookup by uniq_key": lambda s, i, r: s.lookup(f"uniq{i}").phy_offset == r.phy_offset,
    "lookup by place": lambda s, i, r: s.lookup(("T", 0, i)).phy_offset == r.phy_offset,
    "max_phy_offset": lambda s, i, r: s.max_phy_offset == r.phy_offset + r.size,
}


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("read", READS)
def test_a_read_sees_every_returned_put(tmp_path: Path, read: str, put: str) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=Clock()) as store:
        for i in range(45):
            result = PUTS[put](store, message(i))
            assert READS[read](store, i, result), f"{read} after {put} {i}"


@pytest.mark.parametrize("how", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_queues_and_index_lag_at_most_a_thousand_records(tmp_path: Path, how: str) -> None:
    config = rmq.StoreConfig(max_hash_slot_num=1000, max_index_num=100_000, flush_interval_commit_log=FAR,
                             flush_disk_type=how)  # fmt: skip

    def assert_lag(puts: int) -> None:
        units = oracle.read_queues(tmp_path / "s").get(("T", 0), [])
        entries = sum(file.header.index_count - 1 for file in oracle.open_index_files(tmp_path / "s", 1000, 100_000))
        assert puts - 1000 <= len(units) <= puts
        assert puts - 1000 <= entries // 3 <= puts

    with rmq.open(tmp_path / "s", "a", config=config) as store:
        for puts in range(1, 2600):
            store.put(message(puts))
            if puts % 300 == 0 or puts in (1000, 1001, 2000, 2001):
                assert_lag(puts)
        store.put_many([message(i) for i in range(400)])
        assert_lag(2999)
        store.put_many(message(i) for i in range(9000))
        assert_lag(11999)


def test_records_that_were_not_indexed_are_found_and_indexed_later(tmp_path: Path) -> None:
    for turn, enable in enumerate((False, True, False, False, True)):
        config = rmq.StoreConfig(**SIZES, message_index_enable=enable)
        with rmq.open(tmp_path / "s", "a", config=config) as store:
            for phase in (0, 1):
                seen = range(turn * 40 + phase * 40)
                assert [int(found.body) for found in store.query("T", "all", limit=None)] == list(seen)[::-1]
                assert all([int(found.body) for found in store.query("T", f"key{i}")] == [i] for i in seen[::17])
                if not phase:
                    store.put_many([message(turn * 40 + i) for i in range(40)])
        with rmq.open(tmp_path / "s") as reader:
            assert [int(found.body) for found in reader.query("T", "all", limit=None)] == list(seen)[::-1]
        faults = oracle.check_store(tmp_path / "s", 10, 30)
        assert all(fault.startswith("index") for fault in faults)
        assert not (enable and faults), faults


# ---- forms of put_many -----------------------------------------------------------------------------------

ROWS = 60
FIELDS: dict[str, list[Any]] = {
    "topic": [f"T{i % 3}" for i in range(ROWS)],
    "body": [b"%05d" % i for i in range(ROWS)],
    "keys": [[f"key{i}", "all"] for i in range(ROWS)],
    "tags": ["tag" if i % 4 else None for i in range(ROWS)],
    "queue_id": [i % 2 for i in range(ROWS)],
    "properties": [[("a", str(i))] for i in range(ROWS)],
}
TABLE = pa.table(FIELDS, schema=pa.schema({
    "topic": pa.string(), "body": pa.binary(), "keys": pa.list_(pa.string()), "tags": pa.string(),
    "queue_id": pa.int32(), "properties": pa.map_(pa.string(), pa.string())}))  # fmt: skip
MESSAGES = [rmq.Message(**{name: dict(value) if name == "properties" else value for name, value in
                           zip(FIELDS, row, strict=True)}) for row in zip(*FIELDS.values(), strict=True)]  # fmt: skip


class Stream:
    """Shows nothing but one Arrow method; so does Array."""

    def __init__(self, data: pa.Table) -> None:
        self._data = data

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._data.__arrow_c_stream__(requested_schema)


class Array:
    def __init__(self, data: pa.RecordBatch) -> None:
        self._data = data

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._data.__arrow_c_array__(requested_schema)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: MESSAGES,
    "tuple": lambda: tuple(MESSAGES),
    "generator": lambda: (item for item in MESSAGES),
    "dict view": lambda: dict(enumerate(MESSAGES)).values(),
    "table": lambda: TABLE,
    "slice": lambda: pa.concat_tables([TABLE, TABLE]).slice(ROWS, ROWS),
    "chunked table": lambda: pa.concat_tables([TABLE.slice(i, 7) for i in range(0, ROWS, 7)]),
    "record batch": lambda: TABLE.combine_chunks().to_batches()[0],
    "reader": lambda: TABLE.to_reader(max_chunksize=11),
    "stream capsule": lambda: Stream(TABLE),
    "array capsule": lambda: Array(TABLE.to_batches()[0]),
    "other types": lambda: TABLE.cast(pa.schema({
        "topic": pa.large_string(), "body": pa.large_binary(), "keys": pa.large_list(pa.large_string()),
        "tags": pa.string_view(), "queue_id": pa.int64(), "properties": pa.map_(pa.string(), pa.string())})),
    "text bodies": lambda: TABLE.set_column(1, "body", TABLE["body"].cast(pa.string())),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_put_many_equals_successive_puts_whatever_the_form(tmp_path: Path, source: str) -> None:
    stores: list[Any] = []
    for name in ("one by one", "many"):
        with rmq.open(tmp_path / name, "a", config=CONFIG, clock=lambda: START) as store:
            results = [store.put(item) for item in MESSAGES] if name == "one by one" else \
                store.put_many(SOURCES[source]())  # fmt: skip
            stores.append((list(results), store.scan().read_all()))
        files = digests(tmp_path / name, "commitlog", "consumequeue"), list(digests(tmp_path / name, "index").values())
        stores.append(files)
    assert stores[0] == stores[2]
    assert stores[1] == stores[3]


def test_names_and_constants_stand_in_for_columns(tmp_path: Path) -> None:
    table = TABLE.select(["body", "keys"]).rename_columns(["payload", "order_id"])
    names = {"body": "payload", "keys": "order_id"}
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        results = store.put_many(table, topic="C", queue_id=5, columns=names)
        assert results[7][:3] == ("C", 5, 7)
        assert store.query("C", "key7")[0].body == b"00007"
        with_column = table.append_column("queue_id", pa.array([3] * ROWS))
        assert set(store.put_many(with_column, topic="C", columns=names).queue_id) == {3}
        assert set(store.put_many(with_column, topic="D", queue_id=4, columns=names).queue_id) == {4}
        before = store.max_phy_offset
        for arguments in ({"columns": names}, {"topic": "C"}, {"topic": "C", "columns": names | {"tags": "no"}}):
            with pytest.raises(ValueError, match="column"):
                store.put_many(table, **arguments)
        with pytest.raises(ValueError, match="topic"):
            store.put_many(MESSAGES, topic="C")
        assert store.max_phy_offset == before


def test_without_results_the_count_is_given(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        for form in (MESSAGES, iter(MESSAGES), TABLE):
            assert store.put_many(form, results=False) == ROWS
        assert store.put_many([], results=False) == 0
        assert store.put_many(TABLE.slice(0, 0), results=False) == 0
        assert len(store.put_many([])) == 0
        assert len(numbers(store)) == 3 * ROWS


def test_results_have_columns_and_places(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        results = store.put_many(TABLE.to_reader(max_chunksize=25))
        assert len(results) == ROWS
        names = rmq.PutResult._fields
        columns = [getattr(results, name) for name in names]
        assert all(isinstance(column, np.ndarray) for column in columns)
        kinds = {name: column.dtype for name, column in zip(names, columns, strict=True)}
        assert {name: str(kinds[name]) for name in ("phy_offset", "size", "queue_id", "queue_offset")} == {
            "phy_offset": "int64", "size": "int32", "queue_id": "int32", "queue_offset": "int64"}  # fmt: skip
        assert [tuple(row) for row in results] == list(zip(*(column.tolist() for column in columns), strict=True))
        assert results[-1] == results[ROWS - 1] == list(results)[-1]
        assert results[5:8] == [results[5], results[6], results[7]]
        for place in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError):
                results[place]
        for result, item in zip(results, MESSAGES, strict=True):
            found = store.lookup(result.offset_msg_id)
            assert (found.topic, found.queue_id, found.body) == (item.topic, item.queue_id, item.body)
            assert all(getattr(found, name) == getattr(result, name) for name in names)


def test_the_clock_is_read_once_per_put_batch_and_chunk(tmp_path: Path) -> None:
    clock = Clock()
    config = rmq.StoreConfig(max_hash_slot_num=10, max_index_num=30_000, flush_interval_commit_log=FAR)
    calls: list[tuple[int, Callable[[], Any]]] = [
        (1, lambda: [store.put(message(0))]),
        (1, lambda: store.put_batch([message(i) for i in range(10)])),
        (1, lambda: store.put_many([message(i) for i in range(10)])),
        (3, lambda: store.put_many(message(i) for i in range(2 * 8192 + 1))),
        (4, lambda: store.put_many(TABLE.to_reader(max_chunksize=15))),
        (2, lambda: store.put_many(pa.table({"body": ["x"] * 8193}), topic="T")),
    ]
    with rmq.open(tmp_path / "s", "a", config=config, clock=clock) as store:
        for readings, call in calls:
            before = clock.readings
            times = {result.store_timestamp for result in call()}
            assert times == {START + 10 * i for i in range(before + 1, before + 1 + readings)}
            assert clock.readings == before + readings
        before = clock.readings
        store.query("T", "all")
        store.pull("T")
        store.flush()
    assert clock.readings == before


# ---- topics.json -----------------------------------------------------------------------------------------


def put_to(path: Path, *places: tuple[str, int]) -> None:
    with rmq.open(path, "a", config=CONFIG) as store:
        store.put_many([rmq.Message(topic, b"0", queue_id=queue_id) for topic, queue_id in places])


SYSTEM = ("TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_REVIVE_LOG_x", "OFFSET_MOVED_EVENT")


def test_topics_json_tells_a_broker_of_the_topics(tmp_path: Path) -> None:
    put_to(tmp_path / "s", ("Orders", 3), ("Orders", 0), ("%RETRY%g", 0), ("Last", 2**31 - 1),
           *((name, 1) for name in SYSTEM))
    document = json.loads((tmp_path / "s/config/topics.json").read_text())
    assert set(document) == {"dataVersion", "topicConfigTable"}
    assert set(document["dataVersion"]) >= {"counter", "timestamp"}
    assert {name: entry["readQueueNums"] for name, entry in document["topicConfigTable"].items()} == {
        "Orders": 4, "%RETRY%g": 1, "Last": 2**31 - 1}  # fmt: skip
    assert document["topicConfigTable"]["Orders"] == {
        "attributes": {}, "order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG",
        "topicName": "Orders", "topicSysFlag": 0, "writeQueueNums": 4}  # fmt: skip


FOREIGN = (
    '{\n\t"dataVersion":{"counter":7,"stateVersion":0,"timestamp":1700000000000},\n\t"topicConfigTable":{\n\t\t'
    '"Orders":{"attributes":{"queue.type":"SimpleCQ"},"order":true,"perm":4,"readQueueNums":8,"topicFilterType":'
    '"MULTI_TAG","topicName":"Orders","topicSysFlag":1,"writeQueueNums":2},\n\t\t'
    '"a\\":{1:2}":{"perm":2,"readQueueNums":1,"writeQueueNums":1}\n\t},\n\t"other":{0:5,1:{12:"x{3:4}"},-3:null}\n}'
)


@pytest.mark.parametrize("name", ["topics.json", "topics.json.bak"])  # the second alone is a broker's that died at it
def test_a_foreign_topics_json_is_kept_and_only_grows(tmp_path: Path, name: str) -> None:
    put_to(tmp_path / "s", ("Orders", 0))
    path = tmp_path / "s/config/topics.json"
    path.write_bytes(b"")
    path.with_name(name).write_text(FOREIGN)
    put_to(tmp_path / "s", ("Orders", 4), ("New", 0))
    document = json.loads(path.read_text())
    orders = {"attributes": {"queue.type": "SimpleCQ"}, "order": True, "perm": 4, "readQueueNums": 8,
              "topicFilterType": "MULTI_TAG", "topicName": "Orders", "topicSysFlag": 1,
              "writeQueueNums": 5}  # fmt: skip
    assert set(document["topicConfigTable"]) == {"Orders", 'a":{1:2}', "New"}
    assert document["topicConfigTable"]["Orders"] == orders
    assert document["topicConfigTable"]['a":{1:2}'] == {"perm": 2, "readQueueNums": 1, "writeQueueNums": 1}
    assert document["other"] == {"0": 5, "1": {"12": "x{3:4}"}, "-3": None}
    assert document["dataVersion"]["counter"] > 7


@pytest.mark.parametrize("content", [b"{", b"[]", b"{'a': 1}", b"\xff\xfe", b'{"topicConfigTable": 5}', b"null"])
def test_a_topics_json_that_is_none_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    put_to(tmp_path / "s", ("Orders", 0))
    path = tmp_path / "s/config/topics.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "rmq"):
        put_to(tmp_path / "s", ("New", 0))
    assert path.read_bytes() == content
    assert "topics.json" in caplog.text


def test_topics_json_is_not_written_when_nothing_changed(tmp_path: Path) -> None:
    put_to(tmp_path / "s", ("Orders", 0))
    path = tmp_path / "s/config/topics.json"
    path.write_text(FOREIGN)  # has what is put below
    before = path.stat()
    put_to(tmp_path / "s", ("Orders", 1), ("TBW102", 0))
    after = path.stat()
    assert (path.read_text(), after.st_ino, after.st_mtime_ns) == (FOREIGN, before.st_ino, before.st_mtime_ns)


# ---- versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "last_separator", "longs", "abort_holds_pid", "tag_entries"),
    [
        ("4.7.0", True, 3, False, False),
        ("4.9.0", True, 3, False, False),
        ("4.9.1", False, 3, False, False),
        ("4.9.8", False, 3, False, False),
        ("5.0.0-ALPHA", False, 3, False, False),
        ("5.0.0", False, 4, True, False),
        ("5.1.0", False, 4, True, False),
        ("5.1.1", False, 5, True, False),
        ("5.2.0", True, 5, True, False),
        ("5.3.3", True, 5, True, False),
        ("5.4.0", True, 5, True, True),
    ],
)
def test_bytes_are_those_of_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, last_separator: bool, longs: int,
    abort_holds_pid: bool | None, tag_entries: bool,
) -> None:  # fmt: skip
    sizes = set()
    pwrite = os.pwrite

    def recorded(descriptor: int, data: bytes, position: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/checkpoint"):
            sizes.add(len(data))
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", recorded)
    config = dataclasses.replace(CONFIG, rocketmq_version=version)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        abort = (tmp_path / "s/abort").read_text()
        assert abort_holds_pid is None or abort == (str(os.getpid()) if abort_holds_pid else "")
        store.put_many([message(i % 5) for i in range(40)])
        found = store.select_phy_offset_many("T", ["T#tag"])[0].as_py()
        assert len(found) == (32 if tag_entries else 0)
    assert [record.raw_properties.endswith(b"\2") for record in oracle.read_records(tmp_path / "s")] == \
        [last_separator] * 40  # fmt: skip
    assert oracle.check_store(tmp_path / "s", 10, 30, version) == []
    with (tmp_path / "s/checkpoint").open("r+b") as file:  # what a broker of a later version left there
        file.seek(8 * longs)
        file.write(b"\x11" * (40 - 8 * longs))
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.config.rocketmq_version == version
        now = store.put(message(0)).store_timestamp
    checkpoint = (tmp_path / "s/checkpoint").read_bytes()
    assert struct.unpack(">2q", checkpoint[:16]) == (now, now)
    assert checkpoint[8 * longs : 40] == b"\x11" * (40 - 8 * longs)
    assert len(checkpoint) == 4096
    assert sizes == {8 * longs}


def test_the_checkpoint_has_the_time_of_the_last_unit_and_of_the_last_index_file_that_is_followed(
    tmp_path: Path,
) -> None:
    """Half messages and rollbacks are indexed and in no queue; RocketMQ syncs an index file when it begins the next."""
    clock = iter(range(1_000, 2_000)).__next__
    config = rmq.StoreConfig(mapped_file_size_commit_log=8192, max_hash_slot_num=10, max_index_num=5)

    def times() -> tuple[int, ...]:
        return struct.unpack(">3q", (tmp_path / "s/checkpoint").read_bytes()[:24])

    with rmq.open(tmp_path / "s", "x", config=config, clock=clock) as store:
        timestamps = [store.put(rmq.Message("T", b"", keys=[f"k{number}"])).store_timestamp for number in range(4)]
        store.flush()
        assert len(list((tmp_path / "s/index").iterdir())) == 1
        assert times() == (timestamps[3], timestamps[3], 0)
        half = store.put(rmq.Message("T", b"", sys_flag=0x4)).store_timestamp
        rolled_back = store.put(rmq.Message("T", b"", keys=["k4"], sys_flag=0xC)).store_timestamp
        store.flush()
        assert timestamps[3] < half < rolled_back
        assert len(list((tmp_path / "s/index").iterdir())) == 2
        assert times() == (rolled_back, timestamps[3], timestamps[3])


def test_the_log_and_the_index_tell_of_the_files_they_go_on_in(tmp_path: Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    """Under no lock: a handler may put what it is told, and whoever holds the handler's lock may be waiting to put."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, max_hash_slot_num=10, max_index_num=30,
                             flush_interval_commit_log=10**9)  # fmt: skip
    caplog.set_level(logging.INFO, "rmq")
    lines, handler = list[str](), logging.Handler()
    store = rmq.open(tmp_path / "s", "x", config=config)

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        store.put(rmq.Message("told", b""))

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("rmq").addHandler(handler)
    try:
        store.put_many([rmq.Message("T", bytes(90), keys=f"k{i}") for i in range(100)])
        store.flush()
        store.close()
    finally:
        logging.getLogger("rmq").removeHandler(handler)
    for part, told in (("commitlog", "the log goes on here"), ("index", "the index goes on here")):
        files = sorted((tmp_path / "s" / part).iterdir())
        assert len(files) > 3
        assert [line for line in lines if told in line] == [f"{file}: {told}" for file in files]


def test_records_with_more_keys_than_an_index_file_holds_are_indexed_whole(tmp_path: Path) -> None:
    """Keys go into the index 64 at a time: records with none, 63, 64, 65 and 200 keys, files of 29, 63, 64 and 65."""
    counts = [0, 63, 0, 64, 1, 65, 0, 0, 200, 128, 0]
    for entries in (29, 63, 64, 65):
        config = rmq.StoreConfig(max_hash_slot_num=7, max_index_num=entries + 1, mapped_file_size_commit_log=65536)
        with rmq.open(tmp_path / str(entries), "a", config=config) as store:
            for number, count in enumerate(counts):
                store.put(rmq.Message("T", b"x", keys=[f"{number}-{key}" for key in range(count)]))
            keys = [(number, f"{number}-{key}") for number, count in enumerate(counts) for key in range(count)]
            found = store.query_many("T", [key for _, key in keys], columns=["queue_offset"]).table
            assert found["queue_offset"].to_pylist() == [number for number, _ in keys]
        assert oracle.check_store(tmp_path / str(entries), 7, entries + 1) == []
        files = sorted((tmp_path / str(entries) / "index").iterdir())
        assert len(files) == -(-sum(counts) // entries)


@pytest.mark.parametrize("size", [64, 100, 2**20])
def test_a_message_on_its_own_is_refused_without_a_row(tmp_path: Path, size: int) -> None:
    for mode in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        config = rmq.StoreConfig(max_message_size=63, flush_disk_type=mode)
        with rmq.open(tmp_path / mode, "x", config=config) as store:
            with pytest.raises(rmq.MessageTooLargeError, match=f"^body has {size} bytes") as caught:
                store.put(rmq.Message("t", b"x" * size))
            assert (caught.value.row, caught.value.stored) == (None, None)
            store.put(rmq.Message("t", b"x" * 63))


def test_a_light_queue_s_topic_is_refused_which_would_lock_the_store(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        with pytest.raises(rmq.IllegalMessageError, match="LMQ"):
            rmq.Message("%LMQ%a", b"")
        for topics in (["T", "%LMQ%a"], pa.array(["T", "%LMQ%a"]), pa.array(["T", "%LMQ%a"]).dictionary_encode()):
            with pytest.raises(rmq.IllegalMessageError, match=r"row 1: .*LMQ"):
                store.put_many(pa.table({"topic": topics, "body": [b"", b""]}))
        with pytest.raises(rmq.IllegalMessageError, match="LMQ"):
            store.put_many(pa.table({"body": [b""]}), topic="%LMQ%a")
    rmq.open(tmp_path / "s", "r+").close()


def test_an_arrow_stream_that_fails_raises_its_own_error(tmp_path: Path) -> None:
    class Failing:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            raise pa.ArrowInvalid("the producer's disk failed")

    with rmq.open(tmp_path / "s", "x") as store:
        with pytest.raises(pa.ArrowInvalid, match="disk failed"):
            store.put_many(Failing())
        with pytest.raises(pa.ArrowInvalid, match="null"):
            store.put_many(Array(pa.array([{"topic": "T", "body": b"x"}, None])))
        assert store.max_phy_offset == 0


@pytest.mark.parametrize(("size", "more"), [(0, ""), (64, ""), (65, "... 65 bytes"), (4_000_000, "... 4000000 bytes")])
def test_a_message_shows_the_beginning_of_a_long_body(size: int, more: str) -> None:
    shown = repr(rmq.Message("T", b"x" * size, keys="k", tags="a", queue_id=2))
    assert shown == f"Message('T', {b'x' * min(size, 64)!r}{more}, keys=('k',), tags='a', queue_id=2)"
