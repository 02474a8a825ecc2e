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
