"""Messages that were read from one store and put into another."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest

import rmq

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, message_index_enable=False)
CRC_CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, message_index_enable=False,
                             enabled_append_prop_crc=True)  # fmt: skip


@pytest.mark.parametrize("how", ["put", "list", "alike", "batch", "raw column", "map column", "scan", "raw scan"])
@pytest.mark.parametrize("crc", [False, True])
def test_a_crc_of_the_record_that_was_read_is_not_put(tmp_path: Path, how: str, crc: bool) -> None:
    """It would say of a whole record that it is damaged."""
    with rmq.open(tmp_path / "from", "x", config=CRC_CONFIG) as source:
        source.put_many([rmq.Message("T", b"abc", tags="A"), rmq.Message("T", b"ab", tags="A", keys="k"),
                         rmq.Message("T", b"a")])  # fmt: skip
        read = source.pull("T").messages
        tables = {"map column": source.scan(columns=["topic", "body", "properties"]).read_all(),
                  "raw column": source.scan(columns=["topic", "body", "raw_properties"]).read_all(),
                  "scan": source.scan(),
                  "raw scan": source.scan(columns=["topic", "body", "raw_body", "raw_properties"])
                  .read_all().drop_columns(["body"])}  # fmt: skip
        messages = [rmq.Message("T", item.body, raw_properties=item.raw_properties) for item in read]
        with rmq.open(tmp_path / "to", "x", config=CRC_CONFIG if crc else CONFIG) as store:
            if how == "put":
                for message in messages:
                    store.put(message)
            elif how == "batch":
                store.put_batch(messages)
            elif how in tables:
                store.put_many(tables[how])
            else:
                store.put_many(messages if how == "list" else [messages[0]] * 3)
    assert rmq.verify(tmp_path / "to").is_sound
    for record in oracle.read_records(tmp_path / "to"):
        assert record.raw_properties.count(b"__CRC32#") == crc
    with rmq.open(tmp_path / "to") as store:
        assert len(next(iter(store.scan()))) == 3


@pytest.mark.parametrize("name", ["my__CRC32#", "___CRC32#", "é__CRC32#", "x" * 600 + "__CRC32#"])
@pytest.mark.parametrize("crc", [False, True])
def test_a_property_whose_name_ends_like_the_crc_s_is_kept(tmp_path: Path, name: str, crc: bool) -> None:
    """Neither a put nor a check takes it for the CRC."""
    for before in ({}, {"A": "b"}):
        message = rmq.Message("T", b"abc", properties={**before, name: "0123456789"})
        path = tmp_path / f"s{len(before)}"
        with rmq.open(path, "x", config=CRC_CONFIG if crc else CONFIG) as store:
            store.put(message)
            store.put_many([message] * 3)
            store.put_batch([message] * 2)
            store.put_many(store.scan(columns=["topic", "body", "properties"]).read_all())
            store.put_many(store.scan(columns=["topic", "body", "raw_properties"]).read_all())
        assert rmq.verify(path).is_sound
        with rmq.open(path) as store:
            found = store.pull("T").messages
            assert len(list(store.scan())) == 1
        assert len(found) == 24
        for item in found:
            assert {key: value for key, value in item.properties.items() if key != "__CRC32#"} == message.properties


def test_the_crc_behind_a_value_without_its_end_is_left_out_too(tmp_path: Path) -> None:
    """As in records that RocketMQ made of a batch."""
    crc = b"__CRC32#\x010123456789\x02"
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for raw in (b"", b"A\x01", b"A\x01b", b"A\x01b\x02"):
            place = store.put(rmq.Message("T", b"abc", raw_properties=raw + crc))
            assert store.lookup(place.phy_offset).raw_properties == raw


@pytest.mark.parametrize("tail", [b"\x01hello-world", b"\x01hello-worl\x02", b"\x01012345678-\x02", b"\x0101234567890"])
def test_what_readers_take_for_a_damaged_crc_is_refused(tmp_path: Path, tail: bytes) -> None:
    message = rmq.Message("T", b"abc", raw_properties=b"A\x01b\x02__CRC32#" + tail)
    table = pa.table({"body": [b"abc"], "raw_properties": [message.raw_properties]})
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for put in (lambda: store.put(message), lambda: store.put_many([message]), lambda: store.put_batch([message]),
                    lambda: store.put_many(table, topic="T")):  # fmt: skip
            with pytest.raises(rmq.IllegalMessageError, match="end with __CRC32# and no CRC"):
                put()
        assert store.topics() == {}


@pytest.mark.parametrize("given", ["a scan", "a list of scans", "the store"])
def test_damage_of_the_store_that_is_read_is_told_by_the_put(tmp_path: Path, given: str) -> None:
    with rmq.open(tmp_path / "from", "x", config=CONFIG) as source:
        places = [source.put(rmq.Message("T", b"body %d" % number)) for number in range(10)]
    segment = next((tmp_path / "from/commitlog").iterdir())
    with segment.open("r+b") as file:
        file.seek(places[6].phy_offset + 4)
        file.write(b"torn")
    with rmq.open(tmp_path / "from") as source, rmq.open(tmp_path / "to", "x", config=CONFIG) as store:
        scan = source.scan(batch_rows=2)
        with pytest.raises(rmq.CorruptFileError) as caught:
            store.put_many({"a scan": scan, "a list of scans": [scan], "the store": source}[given])
        assert (caught.value.path, caught.value.offset) == (str(segment), places[6].phy_offset)
        assert caught.value.stored == 6  # type: ignore[attr-defined]
        assert store.pull("T").max_queue_offset == 6


def test_numpy_s_integers_are_ints(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many(pa.table({"topic": ["T"] * 5, "body": [b"b"] * 5}), queue_id=np.int32(3))
        batches = store.scan(batch_rows=np.int64(2), batch_bytes=np.uint32(10**6))
        assert [batch.num_rows for batch in batches] == [2, 2, 1]
        answer = store.pull("T", np.int8(3), np.uint64(1), np.int16(2))
        assert [message.queue_offset for message in answer.messages] == [1, 2]
        assert len(store.query("T", "none", limit=np.int64(1))) == 0
        assert not store.clean(file_reserved_time=np.int64(72), max_used_percent=np.int64(100), limit=np.int64(1),
                               dry_run=True).removed  # fmt: skip


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_brokers_store_is_written_on_with_the_crc_that_its_last_record_has(
    tmp_path: Path, before: bool, given: bool | None
) -> None:
    """A broker with forceVerifyPropCRC cuts off records without."""
    with rmq.open(tmp_path / "s", "x", config=dataclasses.replace(CONFIG, enabled_append_prop_crc=before)) as store:
        store.put(rmq.Message("T", b"its", keys="k"))
    shutil.rmtree(tmp_path / "s/rmq")
    config = rmq.StoreConfig() if given is None else rmq.StoreConfig(enabled_append_prop_crc=given)
    expected = before if given is None else given
    for _ in range(2):
        with rmq.open(tmp_path / "s", "r+", config=config) as store:
            assert store.config.enabled_append_prop_crc is expected
            store.put(rmq.Message("T", b"ours", keys="k"))
        config = rmq.StoreConfig()
    records = oracle.read_records(tmp_path / "s")
    assert [record.raw_properties[-20:-11] == b"__CRC32#\1" for record in records] == [before, expected, expected]
    assert rmq.verify(tmp_path / "s") == []


@pytest.mark.parametrize(("given", "error", "named"), [
    ({"topic": 5}, TypeError, "topic"), ({"topic": ""}, ValueError, "topic"),
    ({"queue_id": -1}, ValueError, "queue_id"), ({"queue_id": True}, TypeError, "queue_id"),
    ({"results": 5}, TypeError, "results"),
    ({"results": None}, TypeError, "results"), ({"topic": "T", "columns": {"body": "x"}}, ValueError, "columns"),
])  # fmt: skip
@pytest.mark.parametrize("messages", [[], iter(()), pa.table({"body": pa.array([], pa.binary())})],
                         ids=["list", "iterator", "table"])  # fmt: skip
def test_arguments_of_a_put_of_no_message_are_checked(
    tmp_path: Path, messages: Any, given: dict[str, Any], error: type[Exception], named: str
) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        if isinstance(messages, pa.Table):
            given = {"topic": "T"} | given
        if named == "columns" and not isinstance(messages, pa.Table):
            assert len(store.put_many(messages, **given)) == 0  # whose they are nobody knows
            return
        with pytest.raises(error, match=named):
            store.put_many(messages, **given)


def test_a_message_tells_its_signature() -> None:
    signature = inspect.signature(rmq.Message)
    assert list(signature.parameters)[:4] == ["topic", "body", "keys", "tags"]
    assert signature.parameters["queue_id"].default == 0
    assert inspect.getdoc(rmq.Message).startswith("A message to put.")  # type: ignore[union-attr]


def test_a_reader_may_name_an_older_broker_after_the_crc_was_taken_over(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=dataclasses.replace(CONFIG, enabled_append_prop_crc=True)) as store:
        store.put(rmq.Message("T", b"its", keys="k"))
    shutil.rmtree(tmp_path / "s/rmq")
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.config.enabled_append_prop_crc
    with rmq.open(tmp_path / "s", config=rmq.StoreConfig(rocketmq_version="4.9.0")) as store:
        assert len(store.query("T", "k")) == 1


@pytest.mark.parametrize("version", ["4.9.8", "5.1.4", "5.3.3"])
@pytest.mark.parametrize("value", ["12345678901", "1234567890", "123456789012"])
def test_a_property_of_the_crc_s_name_is_read_back_or_refused(tmp_path: Path, version: str, value: str) -> None:
    config = dataclasses.replace(CONFIG, rocketmq_version=version)
    message = rmq.Message("T", b"x", properties={"__CRC32#": value})
    for number, put in enumerate((rmq.Store.put, lambda store, item: store.put_many([item]))):
        with rmq.open(tmp_path / str(number), "x", config=config) as store:
            if len(value) == 11 and version != "5.3.3":  # without its last 0x02 it looks like a CRC
                with pytest.raises(rmq.IllegalMessageError, match="end with __CRC32#"):
                    put(store, message)
            else:
                put(store, message)
                assert store.scan().read_all().num_rows == 1
        assert rmq.verify(tmp_path / str(number)).is_sound
