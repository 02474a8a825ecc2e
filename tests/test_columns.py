"""Scans as Arrow: types, limits, selections, bodies made plain, and the way back through put_many."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest

import rmq
from rmq._core._columns import KINDS, ColumnBuilder
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch

T0 = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=30)  # fmt: skip
RAW = ("raw_body", "raw_properties")
DEFAULT = [name for name in KINDS if name not in RAW]
COPIED = ["topic", "queue_id", "flag", "sys_flag", "born_timestamp", "born_host", "store_host", "reconsume_times",
          "prepared_transaction_offset", *RAW]  # fmt: skip
TYPES = {
    "topic": pa.string(), "queue_id": pa.int32(), "queue_offset": pa.int64(), "phy_offset": pa.int64(),
    "size": pa.int32(), "flag": pa.int32(), "sys_flag": pa.int32(), "born_timestamp": pa.timestamp("ms", "UTC"),
    "born_host": pa.string(), "store_timestamp": pa.timestamp("ms", "UTC"), "store_host": pa.string(),
    "reconsume_times": pa.int32(), "prepared_transaction_offset": pa.int64(), "body_crc": pa.int32(),
    "body": pa.binary(), "properties": pa.map_(pa.string(), pa.string()), "keys": pa.list_(pa.string()),
    "tags": pa.string(), "uniq_key": pa.string(), "offset_msg_id": pa.string(), "raw_body": pa.binary(),
    "raw_properties": pa.binary(),
}  # fmt: skip


def message(number: int) -> rmq.Message:
    """Every field has a value of its own; some rows lack what may be missing."""
    return rmq.Message(
        ["T", "U", "\u4e3b\u9898", "%RETRY%" + "g" * 130][number % 4], b"body" * (number % 7), queue_id=number % 3,
        keys=[f"k{number}", "\u8ba2\u5355"][: number % 3], tags=[None, "TagA", "\U0001f600"][number % 3],
        uniq_key=f"u{number}" if number % 2 else None, properties={"E": "", f"p{number}": "v"}, flag=-number,
        sys_flag=[0, 0, 4, 8, 12][number % 5], born_timestamp=T0 - number, reconsume_times=number,
        born_host=["1.2.3.4:5", "[2001:db8::1]:6", None][number % 3],
        store_host=["[::1]:10911", None][number % 2], prepared_transaction_offset=number * 7)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rmq.Store]:
    """100 messages over several segments, three per second."""
    times = iter([T0 + 1000 * (number // 3) for number in range(100)])
    path = tmp_path_factory.mktemp("columns") / "store"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for number in range(100):
            store.put(message(number))
        yield store


def small(path: Path, *messages: rmq.Message) -> rmq.Store:
    store = rmq.open(path, "x", config=CONFIG, clock=lambda: T0)
    store.put_many(messages)
    return store


def checked(reader: pa.RecordBatchReader) -> pa.Table:
    table = reader.read_all()
    table.validate(full=True)
    return table


def starts(store: rmq.Store, **selection: Any) -> list[int]:
    return checked(store.scan(columns=["phy_offset"], **selection))["phy_offset"].to_pylist()


# ---- columns ---------------------------------------------------------------------------------------------

def test_every_column_has_its_type(store: rmq.Store) -> None:
    assert set(TYPES) == set(KINDS)
    table = checked(store.scan(columns=list(KINDS)))
    assert {field.name: field.type for field in table.schema} == TYPES
    assert table.num_rows == 100
    assert {name for name in KINDS if table[name].null_count} == {"tags", "uniq_key"}


def test_without_a_choice_all_but_the_raw_columns_come(store: rmq.Store) -> None:
    assert checked(store.scan()).schema.names == DEFAULT


def test_columns_hold_what_the_messages_say(store: rmq.Store) -> None:
    for row in checked(store.scan(columns=list(KINDS))).to_pylist():
        stored = store.lookup(row["phy_offset"])
        row["properties"] = dict(row["properties"])
        row["keys"] = tuple(row["keys"])
        for name in ("born_timestamp", "store_timestamp"):
            row[name] = round(row[name].timestamp() * 1000)
        assert row == {name: getattr(stored, name) for name in KINDS}


def test_columns_hold_what_the_oracle_reads(store: rmq.Store) -> None:
    table = checked(store.scan(columns=list(KINDS)))
    records = oracle.read_records(store.path)
    for name in ("topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "reconsume_times",
                 "prepared_transaction_offset", "body_crc", "body", "keys", "tags", "uniq_key", "offset_msg_id",
                 "raw_properties"):  # fmt: skip
        assert table[name].to_pylist() == [getattr(record, name) for record in records], name
    for name in ("born_timestamp", "store_timestamp"):
        assert table[name].cast(pa.int64()).to_pylist() == [getattr(record, name) for record in records]
    assert [dict(row) for row in table["properties"].to_pylist()] == [record.properties for record in records]
    for name in ("born_host", "store_host"):
        hosts = [oracle.encode_host(host) for host in table[name].to_pylist()]
        assert hosts == [oracle.encode_host(getattr(record, name)) for record in records]


@pytest.mark.parametrize("name", KINDS)
def test_a_column_alone_is_the_one_among_all(store: rmq.Store, name: str) -> None:
    alone = checked(store.scan(columns=[name]))
    assert alone.schema.names == [name]
    assert alone[name].combine_chunks() == checked(store.scan(columns=list(KINDS)))[name].combine_chunks()


def test_columns_come_in_the_order_asked_for(store: rmq.Store) -> None:
    names = list(KINDS)
    random.Random(1).shuffle(names)
    table = checked(store.scan(columns=names))
    assert table.schema.names == names
    assert table.select(DEFAULT).equals(checked(store.scan()))
    assert checked(store.scan(columns=[])).schema.names == []
    assert checked(store.scan(columns=np.array(names))) == table


@pytest.mark.parametrize("columns", [["nothing"], ["topic", "topic"], ["Topic"]])
def test_columns_that_are_none_are_refused(store: rmq.Store, columns: list[str]) -> None:
    with pytest.raises(ValueError, match="column"):
        store.scan(columns=columns)
    with pytest.raises(ValueError, match="column"):
        ColumnBuilder(columns)


def test_an_empty_store_scans_to_an_empty_table(tmp_path: Path) -> None:
    with small(tmp_path / "s") as store:
        table = checked(store.scan(columns=list(KINDS)))
        assert (table.num_rows, {field.name: field.type for field in table.schema}) == (0, TYPES)
        assert pa.table(store).num_rows == 0


def test_times_outside_the_calendar_stay_numbers(tmp_path: Path) -> None:
    times = [-(2**63), -1, 2**63 - 1]
    with small(tmp_path / "s", *(rmq.Message("T", b"", born_timestamp=time) for time in times)) as store:
        found = checked(store.scan(columns=["born_timestamp"]))["born_timestamp"].cast(pa.int64()).to_pylist()
    assert found == times


def test_properties_that_are_no_utf8_read_as_in_java(tmp_path: Path) -> None:
    raw = b"TAGS\1\xff\xfeA\2KEYS\1a\xc3 \xed\xa0\x80\2UNIQ_KEY\1\xf0\x9f\x98\2\xc0\x80\1\xe0\xa0\2"
    with small(tmp_path / "s", rmq.Message("T", b"", raw_properties=raw)) as store:
        (row,) = checked(store.scan(columns=[*DEFAULT, "raw_properties"])).to_pylist()
        (stored,) = store.pull("T").messages
    expected = {"TAGS": "\ufffd\ufffdA", "KEYS": "a\ufffd \ufffd", "UNIQ_KEY": "\ufffd", "\ufffd\ufffd": "\ufffd"}
    assert dict(row["properties"]) == stored.properties == expected
    assert (row["tags"], row["keys"], row["uniq_key"]) == ("\ufffd\ufffdA", ["a\ufffd", "\ufffd"], "\ufffd")
    assert (stored.tags, stored.keys, stored.uniq_key) == ("\ufffd\ufffdA", ("a\ufffd", "\ufffd"), "\ufffd")
    assert row["raw_properties"] == stored.raw_properties == raw


def test_property_names_that_read_alike_are_one(tmp_path: Path) -> None:
    """Two names that are no UTF-8 and one that is: all read as U+FFFD, the last counts."""
    raw = b"a\1x\2\xff\1one\2\xfe\1two\2" + "\ufffd\1three\2é\1y\2".encode()
    with small(tmp_path / "s", rmq.Message("T", b"", raw_properties=raw)) as store:
        (row,) = store.scan(columns=["properties"]).read_all().to_pylist()
        assert row["properties"] == [("a", "x"), ("\ufffd", "three"), ("é", "y")]
        assert store.lookup(0).properties == dict(row["properties"])


# ---- limits ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 2, 7, 99, 100, 101, 2**31 - 1])
def test_a_batch_has_at_most_batch_rows(store: rmq.Store, rows: int) -> None:
    batches = list(store.scan(batch_rows=rows))
    assert [batch.num_rows for batch in batches] == [min(rows, 100 - at) for at in range(0, 100, rows)]
    for batch in batches:
        batch.validate(full=True)
    assert pa.Table.from_batches(batches).combine_chunks().equals(checked(store.scan()).combine_chunks())


@pytest.mark.parametrize("limit", [1, 500, 5000])
def test_a_batch_ends_soon_after_batch_bytes(tmp_path: Path, limit: int) -> None:
    with small(tmp_path / "s", *(rmq.Message("T", bytes(200)) for _ in range(100))) as store:
        batches = list(store.scan(columns=["body"], batch_bytes=limit))
    assert sum(batch.num_rows for batch in batches) == 100
    assert max(batch.num_rows for batch in batches) * 200 <= 2 * limit + 200
    assert min(batch.num_rows for batch in batches[:-1]) * 200 >= limit


# ---- rows ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("topics", [[], ["T"], ["\u4e3b\u9898", "%RETRY%" + "g" * 130], ["none"], ["T", "T"], ["t"]])
def test_rows_of_chosen_topics(store: rmq.Store, topics: list[str]) -> None:
    table = checked(store.scan(topics=topics, columns=["topic", "phy_offset"]))
    expected = [record.phy_offset for record in oracle.read_records(store.path) if record.topic in topics]
    assert table["phy_offset"].to_pylist() == expected


@pytest.mark.parametrize(("begin", "end"), [
    (None, None), (T0 + 5000, None), (None, T0 + 5000), (T0 + 5000, T0 + 5000), (T0 + 5001, T0 + 5999),
    (T0 + 4999, T0 + 5001), (T0 + 9000, T0), (0, 0),
])  # fmt: skip
def test_rows_of_a_time_both_ends_included(store: rmq.Store, begin: int | None, end: int | None) -> None:
    low, high = -(2**63) if begin is None else begin, 2**63 if end is None else end
    expected = [r.phy_offset for r in oracle.read_records(store.path) if low <= r.store_timestamp <= high]
    assert starts(store, begin=begin, end=end) == expected


def test_a_range_of_the_log_may_start_and_end_anywhere(store: rmq.Store) -> None:
    """Records that start in it; in the middle of a record or of a blank the next one is the first."""
    every = [record.phy_offset for record in oracle.read_records(store.path)]
    rng = random.Random(4)
    places = [0, 1, *every[:3], *range(3900, 4200, 7), *(rng.randrange(store.max_phy_offset) for _ in range(80)),
              store.max_phy_offset - 1, store.max_phy_offset, store.max_phy_offset + 5000, -5, 2**63 - 1]  # fmt: skip
    for place in places:
        assert starts(store, begin_phy_offset=place) == [phy for phy in every if phy >= place], place
        assert starts(store, end_phy_offset=place) == [phy for phy in every if phy < place], place
        other = rng.choice(places)
        found = starts(store, begin_phy_offset=place, end_phy_offset=other)
        assert found == [phy for phy in every if place <= phy < other], (place, other)


def test_selections_work_together(store: rmq.Store) -> None:
    records = oracle.read_records(store.path)
    begin, end = records[20].phy_offset, records[80].phy_offset
    found = starts(store, topics=["T", "U"], begin=T0 + 10_000, end=T0 + 20_000, begin_phy_offset=begin,
                   end_phy_offset=end, batch_rows=3)  # fmt: skip
    expected = [record.phy_offset for record in records[20:80]
                if record.topic in ("T", "U") and T0 + 10_000 <= record.store_timestamp <= T0 + 20_000]  # fmt: skip
    assert found == expected != []


# ---- Arrow's own door ------------------------------------------------------------------------------------

def test_a_store_is_an_arrow_table(store: rmq.Store) -> None:
    table = pa.table(store)
    table.validate(full=True)
    assert table.equals(checked(store.scan()))
    assert pa.RecordBatchReader.from_stream(store).read_all().equals(table)


def test_a_stream_of_a_closed_store_ends_with_an_error(tmp_path: Path) -> None:
    store = small(tmp_path / "s", *(rmq.Message("T", b"") for _ in range(9)))
    reader = store.scan(batch_rows=2)
    assert reader.read_next_batch().num_rows == 2
    store.close()
    with pytest.raises(rmq.StoreClosedError):
        reader.read_all()


# ---- the way back ----------------------------------------------------------------------------------------

def test_a_scan_put_into_another_store_gives_the_same_messages(store: rmq.Store, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "copy", "x", config=CONFIG) as copy:
        assert copy.put_many(store.scan(), results=False) == 100
        first, second = checked(store.scan()), checked(copy.scan())
    other = [name for name in DEFAULT if name not in ("store_timestamp", "phy_offset", "size", "offset_msg_id",
                                                      "properties")]  # fmt: skip
    assert second.select(other).equals(first.select(other))
    assert list(map(dict, second["properties"].to_pylist())) == list(map(dict, first["properties"].to_pylist()))


@pytest.mark.parametrize("field", ["keys", "tags", "uniq_key"])
def test_a_separator_anywhere_in_a_text_is_refused(tmp_path: Path, field: str) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for length in range(1, 36):
            for place in range(length):
                for separator in "\1\2":
                    text = "x" * place + separator + "x" * (length - place - 1)
                    with pytest.raises(rmq.IllegalMessageError, match="0x01 or 0x02"):
                        store.put_many(pa.table({"body": [b""], field: [text]}), topic="T")
        assert store.put_many(pa.table({"body": [b""], field: ["\0\3" * 20 + "x"]}), topic="T", results=False) == 1


def test_a_generator_of_record_batches_is_taken_one_by_one(tmp_path: Path) -> None:
    tables = [pa.record_batch({"body": ["a", "b"]}), pa.table({"body": [b"c"], "keys": ["k"]}),
              pa.table({"body": ["d"]})]  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        assert store.put_many((table for table in tables), topic="T", results=False) == 4
        assert [message.body for message in store.pull("T").messages] == [b"a", b"b", b"c", b"d"]
        assert [message.body for message in store.query("T", "k")] == [b"c"]


def test_a_fault_in_a_generator_of_tables_tells_what_was_stored(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        with pytest.raises(TypeError, match="expected Arrow data as before, got Message") as mixed:
            store.put_many([pa.table({"body": ["a", "b"]}), rmq.Message("T", b"")], topic="T")
        assert (mixed.value.stored, mixed.value.row) == (2, 2)
        with pytest.raises(ValueError, match="no message field") as unknown:
            store.put_many([pa.table({"body": ["c"]}), pa.table({"q": ["d"]})], topic="T")
        assert unknown.value.stored == 1
        assert store.topics() == {"T": {0: (0, 3)}}


@pytest.mark.parametrize("rows", [1, 7, 8192])
def test_raw_columns_put_into_another_store_give_the_same_log(tmp_path: Path, rows: int) -> None:
    bodies = [zlib.compress(b"packed" * 9), b"plain"]
    messages = [message(number) for number in range(60)]
    messages += [rmq.Message("T", bodies[0], sys_flag=1), rmq.Message("T", bodies[1], raw_properties=b"\xff\1\xfe")]
    with small(tmp_path / "s", *messages) as store, \
            rmq.open(tmp_path / "copy", "x", config=CONFIG, clock=lambda: T0) as copy:  # fmt: skip
        copy.put_many(store.scan(columns=COPIED, batch_rows=rows))
        assert copy.max_phy_offset == store.max_phy_offset
        assert checked(copy.scan(columns=list(KINDS))).equals(checked(store.scan(columns=list(KINDS))))
    logs = [[path.read_bytes() for path in sorted((tmp_path / name / "commitlog").iterdir())] for name in ("s", "copy")]
    assert logs[0] == logs[1]


# ---- compressed bodies -----------------------------------------------------------------------------------

PLAIN = b"a body that repeats, " * 50
PACKED = [
    (0x001, zlib.compress(PLAIN)), (0x301, zlib.compress(PLAIN, 1)), (0x101, pa.compress(PLAIN, "lz4", asbytes=True)),
    (0x201, pa.compress(PLAIN, "zstd", asbytes=True)),
]  # fmt: skip
NAMES = ["zlib", "zlib as 3", "lz4", "zstd"]


@pytest.mark.parametrize(("sys_flag", "body"), PACKED, ids=NAMES)
def test_a_compressed_body_comes_out_plain(tmp_path: Path, sys_flag: int, body: bytes) -> None:
    with small(tmp_path / "s", rmq.Message("T", b"other"), rmq.Message("T", body, sys_flag=sys_flag)) as store:
        table = checked(store.scan(columns=["body", "raw_body", "sys_flag", "body_crc"]))
        assert table["body"].to_pylist() == [b"other", PLAIN]
        assert table["raw_body"].to_pylist() == [b"other", body]
        assert table["sys_flag"].to_pylist() == [0, sys_flag]
        assert table["body_crc"].to_pylist()[1] == oracle.body_crc(body)
        stored = store.pull("T", 0, 1).messages[0]
        assert (stored.body, stored.raw_body, stored.sys_flag) == (PLAIN, body, sys_flag)
        assert checked(store.scan(columns=["body"]))["body"].to_pylist() == [b"other", PLAIN]
        with rmq.open(tmp_path / "copy", "x", config=CONFIG) as copy:
            copy.put_many(store.scan())
            assert checked(copy.scan(columns=["raw_body", "sys_flag"])).to_pylist()[1] == {
                "raw_body": PLAIN, "sys_flag": 0}  # fmt: skip


@pytest.mark.parametrize("sys_flag", [0x000, 0x100, 0x200, 0x300, 0x700])
def test_without_bit_0_no_body_is_compressed(tmp_path: Path, sys_flag: int) -> None:
    with small(tmp_path / "s", rmq.Message("T", PACKED[0][1], sys_flag=sys_flag)) as store:
        assert store.pull("T").messages[0].body == PACKED[0][1]
        assert checked(store.scan())["body"].to_pylist() == [PACKED[0][1]]


def test_an_empty_body_is_plain_whatever_its_bits_say(tmp_path: Path) -> None:
    """RocketMQ decompresses a body only when there is one (MessageDecoder#decode)."""
    with small(tmp_path / "s", *(rmq.Message("T", b"", sys_flag=flag) for flag, _ in PACKED)) as store:
        assert [stored.body for stored in store.pull("T").messages] == [b""] * 4
        assert checked(store.scan())["body"].to_pylist() == [b""] * 4


def refused(path: Path, body: bytes, sys_flag: int) -> None:
    """The body is an error in both ways to read it, and only the body is."""
    with small(path, rmq.Message("T", body, sys_flag=sys_flag)) as store:
        (stored,) = store.pull("T").messages
        with pytest.raises(rmq.CorruptFileError):
            print(len(stored.body))
        with pytest.raises(rmq.CorruptFileError):
            store.scan().read_all()
        assert stored.raw_body == checked(store.scan(columns=["raw_body"]))["raw_body"].to_pylist()[0] == body


@pytest.mark.parametrize(("sys_flag", "body"), PACKED, ids=NAMES)
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_a_compressed_body_that_ends_early_is_an_error(tmp_path: Path, sys_flag: int, body: bytes, cut: int) -> None:
    refused(tmp_path / "end", body[:-cut], sys_flag)
    refused(tmp_path / "front", body[:cut], sys_flag)


@pytest.mark.parametrize(("sys_flag", "body"), PACKED, ids=NAMES)
def test_a_body_that_is_not_compressed_as_its_bits_say_is_an_error(tmp_path: Path, sys_flag: int, body: bytes) -> None:
    refused(tmp_path / "plain", PLAIN, sys_flag)
    refused(tmp_path / "front", b"\0" + body[1:], sys_flag)


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_a_compression_that_rocketmq_has_not_is_an_error(tmp_path: Path, kind: int) -> None:
    refused(tmp_path / "s", PACKED[0][1], kind << 8 | 1)


@pytest.mark.parametrize(("sys_flag", "body"), PACKED, ids=NAMES)
def test_a_body_that_explodes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sys_flag: int,
                                          body: bytes) -> None:  # fmt: skip
    monkeypatch.setattr("rmq.message.PLAIN_BODY_LIMIT", len(PLAIN) - 1)
    refused(tmp_path / "over", body, sys_flag)
    monkeypatch.setattr("rmq.message.PLAIN_BODY_LIMIT", len(PLAIN))
    with rmq.open(tmp_path / "over") as store:
        assert store.pull("T").messages[0].body == PLAIN


def test_a_bomb_of_the_real_limit_is_an_error(tmp_path: Path) -> None:
    squeezed = zlib.compressobj(1)
    body = b"".join(squeezed.compress(bytes(2**20)) for _ in range(65)) + squeezed.flush()
    config = rmq.StoreConfig(mapped_file_size_commit_log=2**20, max_hash_slot_num=10, max_index_num=30)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        stored = store.lookup(store.put(rmq.Message("T", body, sys_flag=1)).phy_offset)
        with pytest.raises(rmq.CorruptFileError, match="decompresses to over"):
            print(len(stored.body))


def test_a_batch_that_is_kept_stays_as_it_is_while_others_come_and_go(tmp_path: Path) -> None:
    """Memory of batches that were let go is used again."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=32 * 2**20, max_hash_slot_num=10, max_index_num=30)
    bodies = [bytes([number]) * 700_000 for number in range(1, 60)]
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many(pa.table({"body": bodies}), topic="T", results=False)
        for keeps in (2, 3):
            reader = store.scan(columns=["queue_offset", "body"], batch_bytes=2**20)
            kept = [batch for number, batch in enumerate(reader) if number % keeps == 0]
            assert len(kept) > 3
            for row in pa.Table.from_batches(kept).to_pylist():
                assert row["body"] == bodies[row["queue_offset"]]


# ---- the builder -----------------------------------------------------------------------------------------

def test_a_builder_takes_parts_of_batches_and_starts_anew() -> None:
    data = b""
    for number in range(5):
        data += oracle.encode_record("T", number, 0, len(data), b"b" * number)
    batch = RecordBatch()
    batch.scan(data, 0, 0, len(data), checks=PARSE_PROPERTIES)
    builder = ColumnBuilder(["queue_id", "body"])
    builder.append(batch, 1, 3)
    builder.append(batch, 4)
    builder.append(batch, 2, 2)
    assert (builder.names, builder.count, builder.data_size, builder.compressed) == (("queue_id", "body"), 3, 7, 0)
    count, columns = builder.finish()
    assert (count, bytes(columns["queue_id"][0])) == (3, struct.pack("=3i", 1, 2, 4))
    assert [bytes(buffer) for buffer in columns["body"]] == [struct.pack("=4i", 0, 1, 3, 7), b"b" * 7]
    assert (builder.count, builder.data_size) == (0, 0)
    for first, last in ((-1, 2), (0, 6)):
        with pytest.raises(IndexError):
            builder.append(batch, first, last)
    assert builder.finish()[0] == 0


@pytest.mark.parametrize("order", ["a", "aab", "aba", "bb", "bbaa", "cab", "ccc", "acca", "dd", "add", "dcba" * 20])
def test_topics_that_repeat_read_as_they_do_alone(order: str) -> None:
    """Plain, malformed (longer when made good), of the same length as another, empty."""
    topics = {"a": b"Plain", "b": b"\xff\xfe", "c": b"Plai\xc3", "d": b""}
    data = b""
    for letter in order:
        record = oracle.encode_record("x" * len(topics[letter]), 0, 0, len(data), b"")
        at = len(record) - 2 - len(topics[letter])
        data += record[:at] + topics[letter] + record[-2:]
    batch = RecordBatch()
    batch.scan(data, 0, 0, len(data))
    assert len(batch) == len(order)
    builder = ColumnBuilder(["topic"])
    builder.append(batch, 0, 1)
    builder.append(batch, 1)
    builder.append(batch, 1, 0)
    count, columns = builder.finish()
    offsets, text = (bytes(buffer) for buffer in columns["topic"])
    ends = struct.unpack(f"={count + 1}i", offsets)
    found = [text[begin:end].decode() for begin, end in pairwise(ends)]
    assert found == [topics[letter].decode(errors="replace") for letter in order]


def test_a_row_of_a_scanned_batch_is_found_by_its_phy_offset(store: rmq.Store) -> None:
    segment = (store.path / "commitlog" / f"{0:020d}").read_bytes()
    batch = RecordBatch()
    assert batch.row_at(0) == 0
    batch.scan(segment, 0, 0, len(segment))
    places = batch.numbers("phy_offset").tolist()
    assert [batch.phy_offset(row) for row in range(len(batch))] == places
    assert [batch.store_timestamp(row) for row in range(len(batch))] == batch.numbers("store_timestamp").tolist()
    assert [batch.row_at(place) for place in places] == list(range(len(batch)))
    assert [batch.row_at(place + 1) for place in places] == list(range(1, len(batch) + 1))
    assert (batch.row_at(-(2**63)), batch.row_at(2**63 - 1)) == (0, len(batch))
    for row in (-1, len(batch)):
        with pytest.raises(IndexError):
            batch.phy_offset(row)
        with pytest.raises(IndexError):
            batch.store_timestamp(row)


def test_bodies_of_any_length_are_copied_whole_into_large_batches(tmp_path: Path) -> None:
    """Behind 1 MiB they go past the cache."""
    sizes = [*range(70), *(64 * lines + step for lines in (2, 3, 4, 5, 8) for step in range(-2, 3)), 4097]
    bodies = [random.Random(size).randbytes(size) for size in sizes] * 100
    tags = ["\u00e9" * (number % 9) + "t" * (number % 33) for number in range(len(bodies))]
    assert sum(map(len, bodies)) > 1 << 20
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=8 << 20)) as store:
        store.put_many(pa.table({"body": pa.array(bodies, pa.binary()), "tags": tags}), topic="T")
        for _ in range(2):  # with new buffers, and with those of before
            table = checked(store.scan(columns=["raw_body", "tags"], batch_rows=len(bodies)))
            assert table.column("raw_body").to_pylist() == bodies
            assert [text or "" for text in table.column("tags").to_pylist()] == tags
