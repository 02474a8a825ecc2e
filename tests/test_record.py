"""Records, blanks and checkpoints byte for byte: vectors written by RocketMQ's own classes."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

import rmq
from rmq._core._record import body_crc, encode_blank, parse_properties

T0 = 1_700_000_000_000
HOSTS = {"born_host": "192.168.1.7:54321", "born_timestamp": T0 + 123}
LARGE = rmq.StoreConfig(mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=400, max_hash_slot_num=10,
                        max_index_num=20)  # fmt: skip
SMALL = rmq.StoreConfig(mapped_file_size_commit_log=512, mapped_file_size_consume_queue=80, max_hash_slot_num=10,
                        max_index_num=20)  # fmt: skip

R1 = """
000000a8daa320a73610a686000000000000000000000000000000000000000000000000000000000000018bcfe5687b
c0a801070000d4310000018bcfe56be87f00000100002a9f0000000000000000000000000000000568656c6c6f09546f
70696354657374003f4b455953016b31206b3202554e49515f4b45590143304138303130374436463137334431364539
333042314132433344303030310254414753015461674102"""
R2 = """
00000084daa320a7401e72eb0000000100000000000000000000000000000000000000a8000000000000018bcfe5687b
c0a801070000d4310000018bcfe571c47f00000100002a9f00000000000000000000000000000006e4b896e7958c0954
6f70696354657374001a5441475301e6a087e7adbe024b45595301e8aea2e58d952d3102"""
R3 = """
00000064daa320a70000000000000000000000000000000000000001000000000000012c000000000000018bcfe5687b
c0a801070000d4310000018bcfe5779f7f00000100002a9f0000000000000000000000000000000009546f7069635465
73740000"""
R4 = """
00000088daa320a777065916000000000000000000000000000000020000000000000190000000300000018bcfe5687b
20010db8000000000000000000000001000000010000018bcfe57b880000000000000000000000000000000100002a9f
00000000000000000000000000000002763609546f70696354657374000a54414753015461674202"""
R9_TOPIC = "%RETRY%" + 130 * "T"


class Clock:
    """Gives the times it was told, then the last of them for ever."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = list(offsets)

    def __call__(self) -> int:
        return T0 + (self.offsets.pop(0) if len(self.offsets) > 1 else self.offsets[0])


def nine() -> list[rmq.Message]:
    """R1 to R9. Only lengths of R8's and R9's bodies are given, so those two are compared by their fields."""
    transactions = [
        rmq.Message("TopicTest", b"tx", keys="tx1", sys_flag=flag, prepared_transaction_offset=offset, **HOSTS)
        for flag, offset in ((4, 0), (12, 0), (8, 77))
    ]
    return [
        rmq.Message("TopicTest", b"hello", keys=["k1", "k2"], uniq_key="C0A80107D6F173D16E930B1A2C3D0001", tags="TagA",
                    **HOSTS),
        rmq.Message("TopicTest", "\u4e16\u754c".encode(), queue_id=1, **HOSTS,
                    properties={"TAGS": "\u6807\u7b7e", "KEYS": "\u8ba2\u5355-1"}),
        rmq.Message("TopicTest", b"", **HOSTS),
        rmq.Message("TopicTest", b"v6", tags="TagB", born_timestamp=T0 + 123, born_host="[2001:db8::1]:1",
                    store_host="[::1]:10911"),
        *transactions,
        rmq.Message("SCHEDULE_TOPIC_XXXX", b"d" * 47, queue_id=2, properties={"DELAY": "3"}, **HOSTS),
        rmq.Message(R9_TOPIC, b"v2", **HOSTS),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def nine_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nine") / "store"
    with rmq.open(path, "x", config=LARGE, clock=Clock(1000, 2500, 3999, 5000)) as store:
        places = [store.put(message) for message in nine()]
        store.flush()
        assert [place.phy_offset for place in places] == [0, 168, 300, 400, 536, 647, 758, 869, 1034]
        assert [place.size for place in places] == [168, 132, 100, 136, 111, 111, 111, 165, 231]
        assert [place.queue_offset for place in places] == [0, 0, 1, 2, 0, 0, 3, 0, 0]
        assert places[0].offset_msg_id == "7F00000100002A9F0000000000000000"
        assert places[3].offset_msg_id == "0000000000000000000000000000000100002A9F0000000000000190"
    return path


def log_of(path: Path, start: int = 0) -> bytes:
    return (path / "commitlog" / f"{start:020d}").read_bytes()


def units_of(path: Path, topic: str, queue_id: int) -> str:
    return (path / "consumequeue" / topic / str(queue_id) / f"{0:020d}").read_bytes().rstrip(b"\0").hex()


@pytest.mark.parametrize(("start", "record"), [(0, R1), (168, R2), (300, R3), (400, R4)])
def test_a_record_has_rocketmq_s_bytes(nine_records: Path, start: int, record: str) -> None:
    expected = bytes.fromhex(record)
    assert log_of(nine_records)[start : start + len(expected)].hex() == expected.hex()


def test_transactional_delayed_and_long_topic_records_have_rocketmq_s_fields(nine_records: Path) -> None:
    records = oracle.read_records(nine_records)
    found = [(r.phy_offset, r.size, r.queue_offset, r.sys_flag, r.prepared_transaction_offset) for r in records[4:7]]
    assert found == [(536, 111, 0, 4, 0), (647, 111, 0, 12, 0), (758, 111, 3, 8, 77)]
    assert [record.magic for record in records] == [0xDAA320A7] * 8 + [0xDAA320AB]
    assert log_of(nine_records)[1034 + 90 : 1034 + 94].hex() == "0089" + b"%R".hex()
    assert (records[8].topic, records[8].size) == (R9_TOPIC, 231)


def test_nothing_stands_behind_the_last_record(nine_records: Path) -> None:
    assert not any(log_of(nine_records)[1034 + 231 :])


def test_a_queue_has_units_of_plain_and_committed_messages_only(nine_records: Path) -> None:
    assert units_of(nine_records, "TopicTest", 0) == (
        "0000000000000000000000a8000000000027a807" "000000000000012c000000640000000000000000"
        "000000000000019000000088000000000027a808" "00000000000002f60000006f"
    )  # fmt: skip
    assert units_of(nine_records, "TopicTest", 1) == "00000000000000a80000008400000000000d1457"
    assert units_of(nine_records, "SCHEDULE_TOPIC_XXXX", 2) == "0000000000000365000000a50000018bcfe5a298"
    assert units_of(nine_records, R9_TOPIC, 0) == "000000000000040a000000e7"


def test_the_index_holds_prepared_but_not_rolled_back_messages(nine_records: Path) -> None:
    (file,) = (nine_records / "index").iterdir()
    found = oracle.IndexFile(file, 10, 20)
    assert [found.slot(number) for number in range(10)] == [0, 0, 0, 6, 2, 4, 0, 0, 0, 0]
    assert (found.header.index_count, found.header.hash_slot_count) == (7, 3)
    assert [tuple(entry) for entry in found.entries()] == [
        (665746754, 0, 0, 0), (2746024, 0, 0, 1), (2746025, 0, 0, 0), (573861415, 168, 1, 3), (85137643, 536, 4, 0),
        (85137643, 758, 4, 5)]  # fmt: skip


def test_checkpoint_and_lock_have_rocketmq_s_bytes(nine_records: Path) -> None:
    checkpoint = (nine_records / "checkpoint").read_bytes()
    assert len(checkpoint) == 4096
    assert checkpoint[:24].hex() == "0000018bcfe57b88" "0000018bcfe57b88" "0000000000000000"  # fmt: skip
    assert (nine_records / "lock").read_bytes() == b"lock"


def test_put_many_writes_what_successive_puts_write(nine_records: Path, tmp_path: Path) -> None:
    """With one time for all, so both clocks say the same."""
    for name in ("one", "many"):
        with rmq.open(tmp_path / name, "x", config=LARGE, clock=Clock(1000)) as store:
            if name == "one":
                for message in nine():
                    store.put(message)
            else:
                store.put_many(nine())
    assert log_of(tmp_path / "one") == log_of(tmp_path / "many")
    assert log_of(tmp_path / "one")[:168] == log_of(nine_records)[:168]


# ---- blank records ---------------------------------------------------------------------------------------

FIXED = 92  # bytes of a record of topic T without body and properties


def sized(size: int) -> rmq.Message:
    return rmq.Message("T", b"x" * (size - FIXED))


def test_a_blank_record_fills_the_segment_where_the_next_record_does_not_fit(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        places = [store.put(sized(size)).phy_offset for size in (200, 304, 102, 403)]
        assert places == [0, 200, 512, 1024]
        end = store.max_phy_offset
        with pytest.raises(rmq.MessageTooLargeError):
            store.put(sized(512))
        assert (store.max_phy_offset, store.topics()) == (end, {"T": {0: (0, 4)}}) == (1427, {"T": {0: (0, 4)}})
        assert store.put(sized(102)).phy_offset == 1536
        assert [message.size for message in store.pull("T").messages] == [200, 304, 102, 403, 102]
    assert log_of(tmp_path / "s", 0)[504:].hex() == "00000008cbd43194"
    assert log_of(tmp_path / "s", 512)[102:].hex() == "0000019acbd43194" + "00" * 402
    assert log_of(tmp_path / "s", 1024)[403:].hex() == "0000006dcbd43194" + "00" * 101


@pytest.mark.parametrize(("size", "fits"), [(503, True), (504, True), (505, False), (512, False), (513, False)])
def test_a_record_leaves_eight_bytes_or_is_refused(tmp_path: Path, size: int, fits: bool) -> None:
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        if fits:
            assert store.put(sized(size)).phy_offset == 0
        else:
            with pytest.raises(rmq.MessageTooLargeError):
                store.put(sized(size))
            assert store.max_phy_offset == 0
        assert store.put(sized(100)).phy_offset == (512 if fits else 0)


@pytest.mark.parametrize(("first", "second"), [(200, 0), (205, 512)])
def test_a_batch_that_does_not_fit_moves_whole_to_the_next_segment(tmp_path: Path, first: int, second: int) -> None:
    """200 + 2 * 152 leaves the 8 bytes that a blank record needs, 205 + 2 * 152 does not."""
    with rmq.open(tmp_path / "s", "x", config=SMALL) as store:
        store.put(sized(first))
        places = store.put_batch([sized(152), sized(152)])
    begin = second or first
    assert places.phy_offset.tolist() == [begin, begin + 152]
    room = 512 - first
    assert not second or log_of(tmp_path / "s")[first:] == struct.pack(">iI", room, 0xCBD43194).ljust(room, b"\0")


def test_a_blank_record_needs_eight_bytes() -> None:
    segment = bytearray(20)
    encode_blank(segment, 12)
    assert segment.hex() == "00" * 12 + "00000008cbd43194"
    for position in (-1, 13, 20, 21):
        with pytest.raises(ValueError, match="position"):
            encode_blank(bytearray(20), position)


# ---- body CRC --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("properties", [None, {"a": "b"}])
def test_the_limit_of_a_batch_is_on_what_is_sent_which_has_no_record_crc(tmp_path: Path, crc: bool,
                                                                         properties: dict[str, str] | None) -> None:
    size = 2 * (22 + 10 + (4 if properties else 0))
    message = rmq.Message("T", b"0123456789", properties=properties)
    for limit, fits in ((size, True), (size - 1, False)):
        config = rmq.StoreConfig(mapped_file_size_commit_log=4096, max_message_size=limit, enabled_append_prop_crc=crc)
        with rmq.open(tmp_path / str(limit), "x", config=config) as store:
            if fits:
                assert len(store.put_batch([message] * 2)) == 2
            else:
                with pytest.raises(rmq.MessageTooLargeError, match=f"batch has {size} bytes"):
                    store.put_batch([message] * 2)


@pytest.mark.parametrize(("body", "crc"), [
    (b"", 0), (b"a", 0x68B7BE43), (b"hello", 907060870), (b"123456789", 1274296614),
    ("\u4e16\u754c".encode(), 1075737323), (bytes(4), 0x2144DF1C),
])  # fmt: skip
def test_a_body_has_rocketmq_s_crc(body: bytes, crc: int) -> None:
    assert body_crc(body) == crc


def test_a_body_crc_is_zlib_s_without_the_top_bit_at_every_length_and_alignment() -> None:
    data = random.Random(1).randbytes(4096 + 300)
    for size in (*range(301), 4096):
        for start in (0, 1, 3, 7, 8, 13):
            piece = memoryview(data)[start : start + size]
            assert body_crc(piece) == zlib.crc32(piece) & 0x7FFFFFFF, (start, size)


@pytest.mark.parametrize("buffer", [bytearray(b"hello"), memoryview(b"-hello-")[1:6], np.frombuffer(b"hello", "u1")])
def test_a_body_of_any_buffer_has_the_same_crc(buffer: Any) -> None:
    assert body_crc(buffer) == 907060870


# ---- properties ------------------------------------------------------------------------------------------

def test_properties_are_written_in_order_and_empty_values_too(tmp_path: Path) -> None:
    message = rmq.Message("T", b"", keys=["k1", "k2"], tags="TagA", properties={"E": ""})
    with rmq.open(tmp_path / "s", "x", config=LARGE) as store:
        stored = store.lookup(store.put(message).phy_offset)
    assert stored.raw_properties.hex() == "4b455953016b31206b3202544147530154616741" + "02450102"
    assert stored.properties == {"KEYS": "k1 k2", "TAGS": "TagA"}


@pytest.mark.parametrize(("raw", "properties"), [
    ("410162", {"A": "b"}), ("41010242016302", {"B": "c"}), ("01760241016202", {"A": "b"}),
    ("414202430164", {"C": "d"}), ("410162016302", {"A": "b\1c"}), ("4101620241017a02", {"A": "z"}),
    ("414102420163", {"B": "c"}), ("", {}), ("02", {}), ("01", {}), ("0102", {}), ("410102", {}),
    ("020241016202", {"A": "b"}),
    ("4101ff02", {"A": "\ufffd"}), ("41010102", {"A": "\1"}),
])  # fmt: skip
def test_properties_are_read_as_rocketmq_reads_them(raw: str, properties: dict[str, str]) -> None:
    data = bytes.fromhex(raw)
    assert parse_properties(data) == oracle.parse_properties(data) == properties


def test_random_properties_are_read_like_the_oracle() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        data = bytes(rng.choices(b"\1\2AB \xc3\xa9", k=rng.randrange(30)))
        assert list(parse_properties(data).items()) == list(oracle.parse_properties(data).items()), data.hex()


# ---- whole-record CRC ------------------------------------------------------------------------------------

CRC_CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=400,
                             max_hash_slot_num=10, max_index_num=20, enabled_append_prop_crc=True)  # fmt: skip
SOURCE = {"queue_id": 3, **HOSTS}
BATCH = [("one", "k1", "t1"), ("two!", "k2", "t2")]


@pytest.fixture(scope="module")
def crc_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of section O.9: three puts and a batch of two."""
    path = tmp_path_factory.mktemp("crc") / "store"
    with rmq.open(path, "x", config=CRC_CONFIG, clock=Clock(2000)) as store:
        store.put(rmq.Message("T", b"abc", raw_properties=b"TAGS\1A\2", **SOURCE))
        store.put(rmq.Message("T", b"abc", raw_properties=b"TAGS\1A", **SOURCE))
        store.put(rmq.Message("T", b"abc", **SOURCE))
        raw = [f"KEYS\1{key}\2WAIT\1true\2TAGS\1{tags}\2".encode() for _, key, tags in BATCH]
        rows = [rmq.Message("T", row[0].encode(), raw_properties=properties, **SOURCE)
                for row, properties in zip(BATCH, raw, strict=True)]  # fmt: skip
        assert store.put_batch(rows).phy_offset.tolist() == [359, 500]
        assert store.max_phy_offset == 642
    return path


CRC_NAME = "5f5f43524333322301"


def test_the_record_crc_is_rocketmq_s(crc_store: Path) -> None:
    records = oracle.read_records(crc_store)
    assert [(record.phy_offset, record.size) for record in records[:3]] == [(0, 122), (122, 122), (244, 115)]
    assert records[0].raw_properties.hex() == "54414753014102" + CRC_NAME + b"9231524180".hex() + "02"
    assert records[1].raw_properties.hex() == "54414753014102" + CRC_NAME + b"2467321260".hex() + "02"
    assert records[2].raw_properties.hex() == CRC_NAME + b"5776052761".hex() + "02"


def test_the_record_crc_covers_all_but_itself(crc_store: Path) -> None:
    log = log_of(crc_store)
    assert zlib.crc32(log[:102]) & 0x7FFFFFFF == 814251329
    for record in oracle.read_records(crc_store):
        end = record.phy_offset + record.size
        number = int(log[end - 11 : end - 1][::-1])
        assert number == zlib.crc32(log[record.phy_offset : end - 20]) & 0x7FFFFFFF


def test_a_batch_is_unpacked_into_records_of_their_own(crc_store: Path) -> None:
    first, second = oracle.read_records(crc_store)[3:]
    assert (first.size, second.size, first.queue_offset, second.queue_offset) == (141, 142, 3, 4)
    assert (first.body_crc, second.body_crc) == (0x7A6C86F1, 0x3AABF134)
    assert (first.body, second.body, first.store_timestamp, second.store_timestamp) == (
        b"one", b"two!", T0 + 2000, T0 + 2000)  # fmt: skip
    assert first.raw_properties[:26].hex() == "4b455953016b3102574149540174727565025441475301743102"
    units = oracle.read_queues(crc_store)["T", 3]
    assert [(unit.phy_offset, unit.size, unit.tags_code) for unit in units[3:]] == [(359, 141, 3645), (500, 142, 3646)]


def test_a_batch_gets_no_separator_before_the_record_crc(tmp_path: Path) -> None:
    """RocketMQ inserts the missing 0x02 for a single put only: in a batch the last value runs into the CRC."""
    with rmq.open(tmp_path / "s", "x", config=CRC_CONFIG) as store:
        places = store.put_batch([rmq.Message("T", b"abc", raw_properties=b"TAGS\1A")])
        stored = store.lookup(int(places.phy_offset[0]))
    assert stored.raw_properties[:-11] == b"TAGS\1A__CRC32#\1"


def test_a_crc_that_comes_in_is_replaced(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CRC_CONFIG, clock=Clock(2000)) as store:
        store.put(rmq.Message("T", b"abc", raw_properties=b"TAGS\1A\2__CRC32#\0011234567890\2", **SOURCE))
    assert oracle.read_records(tmp_path / "s")[0].raw_properties.endswith(b"\2__CRC32#\0019231524180\2")


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_kept_whose_topic_is_one_of_many(tmp_path: Path, seed: int) -> None:
    """Edges: names that begin others, of equal length, that lie before and behind all, twice."""
    rng = random.Random(seed)
    names = ["".join(rng.choices("ab\u0080\uffff", k=rng.randint(1, 4))) for _ in range(100)]
    wanted = rng.choices(names, k=rng.randint(0, 60)) + ["no such name"]
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(message_index_enable=False)) as store:
        store.put_many([rmq.Message(name, b"") for name in names])
        found = store.scan(topics=wanted, columns=["topic"]).read_all()["topic"].to_pylist()
    assert found == [name for name in names if name in wanted]
