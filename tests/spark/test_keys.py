"""The option keys: by index and by a pass over the log the same messages, without Spark's JVM."""

from __future__ import annotations

import ctypes
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType
from test_foreign_formats import Builder
from test_inner_batches import packed

import rmq
from rmq.scan import COLUMNS
from rmq.spark import functions
from rmq.spark.options import ReadOptions
from rmq.spark.schema import native_ddl
from rmq.spark.source import MessageReader
from spark.orders import COUNT, TIME

LOG = {"scanMode": "log", "splitBytes": "65536"}
TYPES = {"bigint": LongType(), "binary": BinaryType(), "array<string>": ArrayType(StringType())}


def batches(path: Path, columns: str = "queue_offset,keys,phy_offset,body", **options: str) -> list[list[Any]]:
    """The Arrow batches of each partition of a batch read."""
    asked = ReadOptions.parse({"path": str(path), "subscribe": "orders"} | options)
    schema = StructType([StructField(name, TYPES[kind]) for name, kind in native_ddl(columns.split(",")).items()])
    reader = MessageReader(asked, schema)
    return [list(reader.read(pickle.loads(pickle.dumps(part)))) for part in reader.partitions()]


def rows(path: Path, **options: str) -> list[dict[str, Any]]:
    found = [row for part in batches(path, **options) for batch in part for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["phy_offset"], row["queue_offset"]))


def kinds(path: Path, **options: str) -> set[str]:
    asked = ReadOptions.parse({"path": str(path), "subscribe": "orders"} | options)
    return {type(part).__name__ for part in MessageReader(asked, StructType()).partitions()}


def test_who_finds_keys(store: Path) -> None:
    assert kinds(store, keys="o-5") == kinds(store, keys="o-5", scanMode="index") == {"KeysPartition"}
    assert kinds(store, keys="o-5", scanMode="log") == kinds(store) == {"SplitPartition"}


@pytest.mark.parametrize("options", [
    {"keys": "c-7,o-107,o-5,nix"}, {"keys": '[""]'}, {"keys": "o-1,o-1,c-1"}, {"keys": '["o-5 c-5"]'},
    {"keys": "c-7,c-8", "tags": "A"}, {"keys": f"{77:032X}"}, {"keys": f"{77:032X},o-77,c-77"},
    {"keys": "c-7", "subscribe": "orders,other"}, {"keys": "c-7", "subscribe": "nix"},
    {"keys": "c-7", "startingTimestamp": str(TIME + 1007), "endingTimestamp": str(TIME + 2007)},
    {"keys": "c-7", "endingOffsets": '{"orders": {"3": 600}}'}, {"keys": "c-7", "startingOffsets": "latest"},
    {"keys": "c-7", "batchRows": "3"}, {"keys": "c-7", "batchBytes": "1"}], ids=str)  # fmt: skip
def test_the_log_gives_what_the_index_gives(store: Path, options: dict[str, str]) -> None:
    assert rows(store, **LOG, **options) == rows(store, **options) == rows(store, scanMode="index", **options)


def test_the_log_is_read_in_many_parts_and_gives_a_message_once(store: Path) -> None:
    found = batches(store, keys="c-7,o-107", **LOG)
    assert len(found) > 5
    assert sum(len(batch) for part in found for batch in part) == COUNT // 100


@pytest.mark.parametrize("columns", ["body,queue_offset,phy_offset", "phy_offset,body,queue_offset"])
def test_columns_stand_in_the_order_of_the_schema(store: Path, columns: str) -> None:
    for options in ({}, LOG):
        found = [batch for part in batches(store, columns, keys="c-7", **options) for batch in part]
        assert {",".join(batch.schema.names) for batch in found} == {columns}
    assert rows(store, columns=columns, keys="c-7") == rows(store, columns=columns, keys="c-7", **LOG)


def properties(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"".join(name + b"\1" + value + b"\2" for name, value in pairs)


STRANGE = [
    properties((b"KEYS", b"k  k other")), properties((b"UNIQ_KEY", b"k"), (b"KEYS", b"k")),
    properties((b"KEYS", b"first"), (b"KEYS", b"k")), properties((b"KEYS", b"k"), (b"KEYS", b"last")),
    properties((b"KEYS", b"k\xff")), properties((b"KEYS", "k\ufffd".encode())), properties((b"KEYS", b"\xc3\xa4")),
    properties((b"UNIQ_KEY", b"a b")), properties((b"KEYS", b" ")), properties((b"KEYS", b"")), b"",
    b"KEYS\1k", b"KEYS", b"\2\2KEYS\1k\2", properties((b"XKEYS", b"k")), properties((b"KEYS", b"K"))]  # fmt: skip
ASKED = ["k", "other", "first", "last", "k\ufffd", "k\xff", "\xe4", "a b", "a", "", " ", "K", "T#k"]


@pytest.fixture(params=[True, False], ids=["index", "no-index"])
def strange(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Properties of all kinds in each state of a transaction."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=100,
                             message_index_enable=request.param)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        for sys_flag in (0, 4, 8, 12):
            for raw in STRANGE:
                made.put(rmq.Message("orders", b"x", raw_properties=raw, sys_flag=sys_flag))
        made.put(rmq.Message("other", b"x", keys="k"))
    return tmp_path / "s"


@pytest.mark.parametrize("key", ASKED)
def test_strange_keys_are_found_alike(strange: Path, key: str) -> None:
    asked = {"keys": json.dumps([key])}
    assert rows(strange, **LOG, **asked) == rows(strange, **asked)
    assert rows(strange, **LOG, keys=json.dumps(ASKED)) == rows(strange, keys=json.dumps(ASKED)) != []


def test_a_damaged_index_hides_nothing_of_the_log(strange: Path) -> None:
    expected = rows(strange, keys="k")
    for file in (strange / "index").glob("*"):
        file.write_bytes(file.read_bytes()[:40] + b"\x7f" * (file.stat().st_size - 40))
    assert rows(strange, keys="k", **LOG) == expected != []


def test_messages_of_an_inner_batch_come_by_their_own_keys(tmp_path: Path) -> None:
    """As query_many gives them: all, when of a key the batch alone knows."""
    builder = Builder(tmp_path / "store")
    inner = packed((b"three", b"KEYS\1k3\2", 5), (b"", b"", -1), (b"five", b"KEYS\1k5\2TAGS\1t1\2", 7))
    for number, keys in enumerate((b"k3 k5", b"k9")):
        builder.record("BT", inner, b"INNER_BASE\1%d\2INNER_NUM\0013\2KEYS\1%s\2" % (3 * number, keys), sys_flag=0xC0,
                       queue_offset=3 * number)  # fmt: skip
    path = builder.finish()
    for keys, expected in ("k3,k5", [0, 2]), ("k9", [3, 4, 5]), ("k9,k5", [2, 3, 4, 5]):
        by_log, by_index = (rows(path, subscribe="BT", keys=keys, **how) for how in ({"scanMode": "log"}, {}))
        assert by_log == by_index
        assert [row["queue_offset"] for row in by_log] == expected


def test_damage_is_an_error_of_the_index_and_left_out_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as made:
        made.put_many([rmq.Message("orders", b"body %03d" % number, keys=["k"]) for number in range(100)])
    segment = path / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"body 050", b"bodY 050"))
    for options in ({}, LOG, {"failOnDataLoss": "false"}):
        with pytest.raises(rmq.CorruptFileError, match="body CRC differs"):
            rows(path, keys="k", **options)
    assert len(rows(path, keys="k", failOnDataLoss="false", **LOG)) == 99
    assert len(rows(path, keys="k", verifyCrc="false", **LOG)) == 100


def test_a_scan_by_keys_gives_what_query_many_gives(store: Path) -> None:
    """Of any topics, in log order; keys in any form that query_many takes."""
    with rmq.open(store) as opened:
        expected = opened.query_many("orders", ["c-7"], limit=None, columns=list(COLUMNS)).table.drop("key_index")
        for keys in (["c-7"], pa.array(["c-7"]), ("c-7", "c-7", "nix")):
            assert opened.scan(keys=keys, columns=list(COLUMNS)).read_all().to_pylist() == expected.to_pylist()[::-1]
        found = rmq.scan_map(store, list, processes=1, split_bytes=65536, keys=pa.array(["c-7"]),
                             columns=["phy_offset"])  # fmt: skip
        offsets = [offset for part in found for batch in part for offset in batch["phy_offset"].to_pylist()]
        assert offsets == expected["phy_offset"].to_pylist()[::-1]
        assert opened.scan(keys=[]).read_all().num_rows == 0
        assert opened.scan(keys=["c-7"], topics=["other"]).read_all().num_rows == 0
        for keys, kind in (("c-7", TypeError), ([1], TypeError), (["\ud800"], ValueError), (5, TypeError)):
            with pytest.raises(kind, match="key"):
                opened.scan(keys=keys)


@pytest.mark.parametrize("size", [1, 3000, 2**30])
@pytest.mark.parametrize("limit", [None, 1, 7])
def test_a_join_reads_what_query_many_finds_in_batches_of_bounded_size(
    store: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, size: int
) -> None:
    """Of keys that share messages: each pair once."""
    keys = ["c-7", "nix", "o-107", "o-3", "c-99", "c-7"]
    probe = functions.Probe(str(store), "orders", None, None, limit, None)
    expected = probe.found(pa.array(keys), ["phy_offset", "body"]).to_pylist()
    monkeypatch.setattr(functions, "PIECE_BYTES", size)
    parts = list(probe.matches(pa.array(keys), ["phy_offset", "body"]))
    rows = [(key, row["phy_offset"], row["body"]) for batch, numbers in parts
            for key, row in zip(numbers.tolist(), batch.to_pylist(), strict=True)]  # fmt: skip
    assert sorted(rows) == sorted((row["key_index"], row["phy_offset"], row["body"]) for row in expected)
    assert all(batch.nbytes < 2 * size + 100 for batch, _ in parts)
    for none in ([], ["nix"]):
        assert sum(len(numbers) for _, numbers in probe.matches(pa.array(none, pa.string()), [])) == 0


def test_a_join_has_each_message_of_an_inner_batch_with_its_own_keys(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    inner = packed((b"three", b"KEYS\1k3\2", 5), (b"", b"", -1), (b"five", b"KEYS\1k5\2TAGS\1t1\2", 7))
    for number in range(2):
        builder.record("BT", inner, b"INNER_BASE\1%d\2INNER_NUM\0013\2KEYS\1k3 k5\2" % (3 * number), sys_flag=0xC0,
                       queue_offset=3 * number)  # fmt: skip
    probe = functions.Probe(str(builder.finish()), "BT", None, None, None, None)
    pairs = [(key, offset) for batch, numbers in probe.matches(pa.array(["k5", "k3"]), ["queue_offset"])
             for key, offset in zip(numbers.tolist(), batch["queue_offset"].to_pylist(), strict=True)]  # fmt: skip
    assert sorted(pairs) == [(0, 2), (0, 5), (1, 0), (1, 3)]


def test_a_join_with_a_limit_has_all_messages_of_the_last_inner_batch_it_reaches_into(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    inner = packed(*((b"%d" % number, b"", number) for number in range(3)))
    for number in range(2):
        builder.record("BT", inner, b"INNER_BASE\1%d\2INNER_NUM\0013\2KEYS\1k\2" % (3 * number), sys_flag=0xC0,
                       queue_offset=3 * number)  # fmt: skip
    path = str(builder.finish())
    for limit, offsets in (1, [3, 4, 5]), (3, [3, 4, 5]), (4, [0, 1, 2, 3, 4, 5]):
        parts = functions.Probe(path, "BT", None, None, limit, None).matches(pa.array(["k"]), ["queue_offset"])
        assert sorted(offset for batch, _ in parts for offset in batch["queue_offset"].to_pylist()) == offsets


def drop_zeros(directory: Path, phy_offset: int, size: int) -> None:
    """Bytes of a log that are zeros need no disk, where the file system has holes."""
    segment = max(path for path in directory.iterdir() if int(path.name) <= phy_offset)
    keep_size, punch_hole = 1, 2
    with segment.open("r+b") as file:
        place = (ctypes.c_long(number) for number in (phy_offset - int(segment.name), size))
        ctypes.CDLL(None).fallocate(file.fileno(), keep_size | punch_hole, *place)


@pytest.mark.slow
def test_a_join_may_find_more_than_2_gib_for_one_batch_of_keys(tmp_path: Path) -> None:
    """One table of them, newest first, is more than Arrow joins."""
    count, size = 520, 4 * 1024 * 1024 + 1024
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(max_message_size=size + 1024)) as made:
        for number in range(count):
            put = made.put(rmq.Message("t", bytes(size - 2) + number.to_bytes(2, "big"), keys="all"))
            drop_zeros(tmp_path / "s" / "commitlog", put.phy_offset + 4096, size - 8192)
    probe = functions.Probe(str(tmp_path / "s"), "t", None, None, None, None)
    with pytest.raises(ValueError, match="520 messages have 2080 MiB, a look-up takes less than 2 GiB"):
        probe.found(pa.array(["all"]), ["body"])
    found, largest = [], 0
    for batch, numbers in probe.matches(pa.array(["all"]), ["body"]):
        assert not numbers.any()
        largest = max(largest, batch.nbytes)
        found += [bytes(body.as_buffer()[-2:]) for body in batch["body"]]
    assert found == [number.to_bytes(2, "big") for number in range(count)]
    assert largest < 2 * functions.PIECE_BYTES + size
