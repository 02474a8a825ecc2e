"""Messages that were read from one store and put into another."""

from __future__ import annotations

from pathlib import Path

import oracle
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
