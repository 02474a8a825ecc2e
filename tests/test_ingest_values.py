# SPDX-License-Identifier: Apache-2.0
"""`rmq ingest`: a value has one text, in a row, nested or as a key; a row whose value has none is bad, and named."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import io
import json
import math
import random
import shutil
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from commandline import assert_error, bodies, call, good

import rmq
from rmq.cli.bodies import json_objects
from rmq.cli.inputs import Blocks
from rmq.cli.rows import row_numbers
from rmq.cli.sources import Source, Wanted

TOPIC = ("--topic", "T")
Put = Callable[[str, bytes], Path]
FOREVER = 2**62
HALF = b"\xff\xfe"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def file(tmp_path: Path) -> Put:
    def write(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def of_numbers(values: list[int | None], kind: pa.DataType) -> pa.Array:
    """Times that are stored as these."""
    return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)


def not_utf8(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    """Text that is none, which Arrow does not look at."""
    stored = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    return pa.Array.from_buffers(kind, len(values), pa.array(values, stored[kind]).buffers())


def lists(items: pa.Array) -> pa.Array:
    """Of two items each."""
    return pa.ListArray.from_arrays(list(range(0, len(items) + 1, 2)), items)


def parquet(file: Put, **columns: Any) -> Path:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), sink)
    return file("x.parquet", sink.getvalue())


def read(path: Path) -> tuple[list[str], list[int], list[tuple[int, str]]]:
    """Bodies and numbers of the good rows, and the bad ones."""
    parts = list(Source(str(path), None, None, Wanted((), None)).rows())
    return ([body.decode() for part in parts for body in part.body.to_pylist()],
            [number for part in parts for number in part.numbers.tolist()],
            [bad for part in parts for bad in part.bad])  # fmt: skip


def messages(store: Path) -> list[rmq.StoredMessage]:
    with rmq.open(store) as opened:
        return opened.pull("T", 0, 0, 10**6).messages if opened.topics() else []


def assert_row_2_is_bad(store: Path, path: Path, reason: str, *options: str) -> None:
    """Of three; its neighbours are stored."""
    shutil.rmtree(store, ignore_errors=True)
    done = good("ingest", store, path, *TOPIC, *options, "--skip-bad")
    assert (done.rows[0]["stored"], done.rows[0]["skipped"]) == (2, 1)
    assert done.notes == [f"rmq: skipped {path}: row 2: {reason}"]


# ---- values without a text -------------------------------------------------------------------------------

OUT_OF_RANGE = [  # and the text of 0
    (pa.timestamp("ms"), FOREVER, "1970-01-01T00:00:00.000"),
    (pa.timestamp("ms", "UTC"), FOREVER, "1970-01-01T00:00:00.000Z"),
    (pa.timestamp("ms", "Asia/Tokyo"), -FOREVER, "1970-01-01T09:00:00.000+09:00"),
    (pa.timestamp("us", "-00:30"), FOREVER, "1969-12-31T23:30:00.000000-00:30"),
    (pa.timestamp("ns", "Asia/Tokyo"), 2**63 - 1, "1970-01-01T09:00:00.000000000+09:00"),
    (pa.date32(), 2**30, "1970-01-01"), (pa.time32("ms"), -1, "00:00:00.000"),
    (pa.time64("us"), 99_999_999_999_999, "00:00:00.000000"), (pa.duration("s"), FOREVER, "0:00:00"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "zero"), OUT_OF_RANGE, ids=str)
def test_a_time_out_of_range_is_a_bad_row_as_value_item_key_and_body(store: Path, file: Put, kind: pa.DataType,
                                                                     value: int, zero: str) -> None:  # fmt: skip
    bad = [(2, "a is out of range")]
    items = lists(of_numbers([0, None, 0, value, None, 0], kind))
    path = parquet(file, a=pa.StructArray.from_arrays([items], names=["y"]))
    assert read(path) == ([f'{{"a":{{"y":["{zero}",null]}}}}', f'{{"a":{{"y":[null,"{zero}"]}}}}'], [1, 3], bad)
    path = parquet(file, a=of_numbers([0, value, 0], kind), b=["x", "y", "z"])
    assert read(path) == ([f'{{"a":"{zero}","b":"x"}}', f'{{"a":"{zero}","b":"z"}}'], [1, 3], bad)
    assert_row_2_is_bad(store, path, "a is out of range", "--body-column", "a")
    assert bodies(store) == [zero.encode()] * 2
    assert_row_2_is_bad(store, path, "a is out of range", "--tags-column", "a", "--body-column", "b")
    assert [message.tags for message in messages(store)] == [zero, zero]


def test_the_first_and_the_last_time_that_arrow_writes_are_stored(file: Put) -> None:
    days, times = [-12_687_428, 11_248_737], [-1_096_193_779_200_000, 971_890_963_199_999]
    path = parquet(file, d=of_numbers(days, pa.date32()),
                   t=of_numbers(times, pa.timestamp("ms")))  # fmt: skip
    assert read(path)[0] == ['{"d":"-32767-01-01","t":"-32767-01-01T00:00:00.000"}',
                             '{"d":"32767-12-31","t":"32767-12-31T23:59:59.999"}']  # fmt: skip


@pytest.mark.parametrize(("zone", "text"), [
    ("Asia/Tokyo", "2023-11-15T07:13:20.123456+09:00"), ("America/St_Johns", "2023-11-14T18:43:20.123456-03:30"),
    ("+05:45", "2023-11-15T03:58:20.123456+05:45"), ("-09:30", "2023-11-14T12:43:20.123456-09:30"),
    ("Etc/UTC", "2023-11-14T22:13:20.123456+00:00"),
    ("UTC", "2023-11-14T22:13:20.123456Z"),
])  # fmt: skip
def test_a_time_with_a_zone_is_iso_8601(store: Path, file: Put, zone: str, text: str) -> None:
    path = parquet(file, a=pa.array([T, None]).cast(pa.timestamp("us", zone)), b=["x", "y"])
    assert read(path)[0] == [f'{{"a":"{text}","b":"x"}}', '{"a":null,"b":"y"}']
    assert dt.datetime.fromisoformat(text) == T.replace(tzinfo=dt.UTC)
    good("ingest", store, path, *TOPIC, "--key-column", "a", "--body-column", "b")
    assert [message.keys for message in messages(store)] == [(text,), ()]


def test_rows_before_one_with_a_bad_item_are_counted(store: Path, file: Put) -> None:
    path = parquet(file, a=lists(of_numbers([0, None, FOREVER, 1], pa.timestamp("us"))))
    assert_error(call("ingest", store, path, *TOPIC), 2, "row 2: a is out of range; 1 message stored before")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_that_is_not_utf8_is_a_bad_row_as_value_item_key_and_body(store: Path, file: Put,
                                                                       kind: pa.DataType) -> None:  # fmt: skip
    bad = [(2, "a is not UTF-8")]
    path = parquet(file, a=not_utf8(["é".encode(), HALF, b"z"], kind), b=["x", "y", "z"])
    assert read(path) == (['{"a":"é","b":"x"}', '{"a":"z","b":"z"}'], [1, 3], bad)
    assert_row_2_is_bad(store, path, "a is not UTF-8", "--key-column", "a", "--body-column", "b")
    assert_row_2_is_bad(store, path, "a is not UTF-8", "--body-column", "a")
    if kind != pa.string_view():
        path = parquet(file, a=lists(not_utf8([b"q", None, b"r", HALF, b"s", "é".encode()], kind)))
        assert read(path) == (['{"a":["q",null]}', '{"a":["s","é"]}'], [1, 3], bad)


def test_a_character_cut_between_two_values_is_no_utf8(file: Put) -> None:
    assert read(parquet(file, a=not_utf8([b"\xc3", b"\xa9"], pa.string())))[1:] == \
        ([], [(1, "a is not UTF-8"), (2, "a is not UTF-8")])  # fmt: skip


# ---- one text at every depth -----------------------------------------------------------------------------

D, T = decimal.Decimal, dt.datetime(2023, 11, 14, 22, 13, 20, 123456)
ID = uuid.UUID(int=5)
LEAVES = [
    pa.array([1, None]), pa.array([1.0, 1 / 3]), pa.array([math.nan, -math.inf]), pa.array([True, None]),
    pa.array([D("1.50"), None]), pa.array(["é\n", '"']), pa.array([b"\xff", None]), pa.array([T, None]),
    pa.array([T.date(), None]), of_numbers([1, 2], pa.time64("ns")),
    of_numbers([1, 10**9], pa.timestamp("ns")), of_numbers([1, None], pa.duration("ns")),
    of_numbers([-1, 10**12], pa.duration("ms")), pa.array([ID.bytes, None], pa.uuid()),
    pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, None], pa.int8())),
    pa.array(["a", None]).dictionary_encode(), pa.nulls(2), pa.array([2**64 - 1, 0], pa.uint64()),
]  # fmt: skip


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: str(leaf.type))
def test_a_nested_value_has_the_text_that_it_has_in_a_row(file: Put, leaf: pa.Array) -> None:
    struct = pa.StructArray.from_arrays([leaf, leaf], names=["y", 'z "'])
    path = parquet(file, a=leaf, s=struct, l=pa.ListArray.from_arrays([0, 1, 2], leaf),
                   m=pa.MapArray.from_arrays([0, 1, 2], pa.array(["p", "q"]), leaf),
                   d=pa.LargeListArray.from_arrays([0, 1, 2], struct))  # fmt: skip
    for key, body in zip("pq", read(path)[0], strict=True):
        text = body[len('{"a":') : body.index(',"s":')]
        inner = f'{{"y":{text},"z \\"":{text}}}'
        assert body == f'{{"a":{text},"s":{inner},"l":[{text}],"m":[["{key}",{text}]],"d":[{inner}]}}'


NESTED = {
    "list": (pa.list_(pa.int8()), [[9], [1, None], None, [], [3]]),
    "large_list": (pa.large_list(pa.string()), [["9"], ["1", None], None, [], ["3"]]),
    "fixed_size_list": (pa.list_(pa.int8(), 2), [[9, 9], [1, None], None, [0, 0], [3, 4]]),
    "list_view": (pa.list_view(pa.int8()), [[9], [1, None], None, [], [3]]),
    "large_list_view": (pa.large_list_view(pa.int8()), [[9], [1, None], None, [], [3]]),
    "map": (pa.map_(pa.string(), pa.int8()), [[("a", 9)], [("b", 1), ("b", None)], None, [], [("d", 3)]]),
    "list of lists": (pa.list_(pa.list_(pa.int8())), [[[9]], [None, [1, 2], []], None, [], [[3]]]),
    "struct": (pa.struct([("y", pa.int8()), ("z", pa.list_(pa.string()))]),
               [{"y": 9, "z": ["a"]}, {"y": None, "z": None}, None, {"y": 1, "z": [None]}, {"y": 2, "z": []}]),
    "empty struct": (pa.struct([]), [{}, {}, None, {}, {}]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NESTED)
def test_slices_and_nulls_of_nested_columns(kind: str) -> None:
    type_, values = NESTED[kind]
    wanted = json.loads(json.dumps(values))
    batch = pa.record_batch({"a": pa.array(values, type_)})
    for first in range(6):
        for count in range(6 - first):
            got = [json.loads(text)["a"] for text in json_objects(batch.slice(first, count)).to_pylist()]
            assert got == wanted[first : first + count]


def test_a_missing_parent_hides_what_stands_below_it(file: Put) -> None:
    far = of_numbers([0, FOREVER], pa.timestamp("us"))
    struct = pa.StructArray.from_arrays([far], names=["y"], mask=pa.array([False, True]))
    assert read(parquet(file, a=struct))[0] == ['{"a":{"y":"1970-01-01T00:00:00.000000"}}', '{"a":null}']


def test_times_in_ns_keep_every_digit_without_pandas(file: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    durations = of_numbers([1, 86_400_000_000_001, -1, 1_000_000, 1_001, None], pa.duration("ns"))
    times = [lists(of_numbers([1, 2], kind)) for kind in (pa.timestamp("ns"), pa.time64("ns"))]
    texts = ["0:00:00.000000001", "1 day, 0:00:00.000000001", "-1 day, 23:59:59.999999999", "0:00:00.001000",
             "0:00:00.000001001", None]  # fmt: skip
    assert [json.loads(body)["a"] for body in read(parquet(file, a=durations))[0]] == texts
    assert [json.loads(body)["a"] for body in read(parquet(file, a=lists(durations)))[0]] == \
        [texts[:2], texts[2:4], texts[4:]]  # fmt: skip
    assert read(parquet(file, a=times[0], b=times[1]))[0] == [
        '{"a":["1970-01-01T00:00:00.000000001","1970-01-01T00:00:00.000000002"],'
        '"b":["00:00:00.000000001","00:00:00.000000002"]}']  # fmt: skip


def test_a_struct_with_two_fields_of_one_name_stops_the_file_before_its_first_row(store: Path, file: Put) -> None:
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["y", "y"])
    for column in (struct, pa.ListArray.from_arrays([0, 1], struct)):
        path = parquet(file, k=["a"], a=column)
        assert_error(call("ingest", store, path, *TOPIC), 2, "x.parquet", "'a'", "'y'")
    assert not store.exists()
    good("ingest", store, path, *TOPIC, "--body-column", "k")


# ---- keys, tags and a body column ------------------------------------------------------------------------


@pytest.mark.parametrize("column", [
    pa.array([ID.bytes], pa.uuid()), of_numbers([1500], pa.duration("ms")), pa.array([T]),
    of_numbers([1], pa.timestamp("ns", "Asia/Tokyo")), pa.array([D("1.50")]), pa.array([[1, 2]]),
], ids=lambda column: str(column.type))  # fmt: skip
def test_keys_tags_and_bodies_have_the_text_of_the_row(store: Path, file: Put, column: pa.Array) -> None:
    path = parquet(file, a=column)
    good("ingest", store, path, *TOPIC, "--key-column", "a", "--tags-column", "a")
    good("ingest", store, path, *TOPIC, "--body-column", "a")
    first, second = messages(store)
    value = json.loads(first.body, parse_float=str)["a"]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    assert (first.keys, first.tags, second.body.decode()) == ((text,), text, text)


def test_bytes_of_a_dictionary_are_a_body_as_plain_ones_are(store: Path, file: Put) -> None:
    path = parquet(file, a=pa.array([HALF, b"x", HALF]).dictionary_encode())
    good("ingest", store, path, *TOPIC, "--body-column", "a")
    assert [message.body for message in messages(store)] == [HALF, b"x", HALF]


# ---- CSV and JSONL ---------------------------------------------------------------------------------------


def test_a_noncharacter_beside_a_row_that_is_not_utf8_is_kept(file: Put) -> None:
    path = file("x.csv", "a,b\n1,\uffff\n2,é\n".encode() + b"3,\xff\xfe\n")
    assert read(path) == (['{"a":"1","b":"\uffff"}', '{"a":"2","b":"é"}'], [1, 2], [(3, "b is not UTF-8")])


@pytest.mark.parametrize("other", ['"a"', "1.5"], ids=["the fast way", "line by line"])
@pytest.mark.parametrize("options", [[], ["--key-column", "k"]], ids=str)
def test_a_number_that_json_lacks_makes_a_bad_row(store: Path, file: Put, other: str, options: list[str]) -> None:
    lines = [f'{{"k":{other}}}', '{"k":"c","text":"is: NaN, Infinity"}']
    for value in ("NaN", " Infinity", "-Infinity", "[1, NaN]", '{"z":-Infinity}'):
        path = file("x.jsonl", f'{lines[0]}\n{{"id":{value}}}\n{lines[1]}\n'.encode())
        parts = list(Source(str(path), None, None, Wanted(tuple(options[1:]), None)).rows())
        assert [body.decode() for part in parts for body in part.body.to_pylist()] == lines
        assert [(row, why[:9]) for part in parts for row, why in part.bad] == [(2, "no JSON: ")]
    done = call("ingest", store, path, *TOPIC, *options)
    assert_error(done, 2, f"{path}: row 2: no JSON: -Infinity is no value; 1 message stored before")


def test_numbers_of_json_are_the_text_that_they_were(store: Path, file: Put) -> None:
    numbers = ["1.10", "1e2", "12345678901234567.25", "1e999", "-0", "1" * 5000, '{"a": [1.50, "é", {}], "b": -0.0}']
    lines = "\n".join(f'{{"id": {7 if " " in number else number}, "v": {number}}}' for number in numbers)
    good("ingest", store, file("x.jsonl", lines.encode()), *TOPIC, "--key-column", "id", "--body-column", "v")
    with rmq.open(store) as opened:
        found = opened.scan(columns=["raw_body", "keys"]).read_all()
    assert [body.decode() for body in found["raw_body"].to_pylist()] == numbers
    assert found["keys"].to_pylist() == [*([number] for number in numbers[:-1]), ["7"]]


def test_a_field_that_is_nested_too_deep_makes_a_bad_row(file: Put) -> None:
    deep = [f'{{"v":{"[" * depth}1.0{"]" * depth}}}' for depth in (800, 3000)]
    path = file("x.jsonl", "\n".join(deep).encode())
    parts = list(Source(str(path), None, None, Wanted((), "v")).rows())
    assert [len(body) for part in parts for body in part.body.to_pylist()] == [1603]
    assert [bad for part in parts for bad in part.bad] == [(2, "nested too deep")]


@pytest.mark.parametrize("size", [64, 77, 4 << 20])
def test_a_quote_without_an_end_makes_its_row_bad(store: Path, file: Put, monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", size)
    for head, row, cut in ((b"id,b", b"%d,x", b'7,"oops'), (b"b", b"%d", b'"oops'), (b"id,b", b"%d,x", b'7,8,"oops')):
        for end in (b"\n", b"\r\n"):
            for rest in (b"", end, end + b"2" + end, end + b"2,x" + end + b"3,y" + end + end, end + b"\xff"):
                data = end.join([head, *(row % number for number in range(12)), cut]) + rest
                for path in (file("x.csv", data), file("x.csv.gz", gzip.compress(data, 1))):
                    assert read(path)[1:] == ([*range(1, 13)], [(13, "a quoted field has no end")]), data


def test_a_quote_without_an_end_is_found_in_a_pipe_and_beside_a_body_column(store: Path, file: Put) -> None:
    path = file("x.csv", b'id,b\n1,"oops\n2,x\n3,y\n')
    for words, data in (([path, "--body-column", "b"], None), (["-", "--format", "csv"], path.read_bytes())):
        done = call("ingest", store, *words, *TOPIC, input=data)
        assert_error(done, 2, "row 1: a quoted field has no end; 0 messages stored before")


@pytest.mark.slow
def test_every_end_of_a_csv_is_no_row_of_its_own(file: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 64)
    for last in (b"x", b'"x\ny"', b'""', b'"a""b"', b"\xc3\xa9", b'"' + b"l\n" * 25 + b'"'):
        for end in (b"", b"\n", b"\r\n", b"\r", b"\n\n\r\n"):
            for count in range(4, 20):
                for data in (b"id,b\n" + b"1,y\n" * count + b"7," + last, b"id\n" + b"12\n" * count + last):
                    assert read(file("x.csv", data + end))[1:] == ([*range(1, count + 2)], []), data


@pytest.mark.parametrize("data", [b'a,"b\n' + b"1,x\n" * 5000, b'"a\n1\n', b'a,"b', b'"', b'a,"b""\n1,2\n'])
@pytest.mark.parametrize("size", [64, 4 << 20])
def test_a_quoted_name_without_an_end_in_the_header_is_an_error(store: Path, file: Put, monkeypatch: Any, data: bytes,
                                                                size: int) -> None:  # fmt: skip
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", size)
    for path in (file("x.csv", data), file("x.csv.gz", gzip.compress(data, 1))):
        assert_error(call("ingest", store, path, *TOPIC), 2, "the header: a quoted name has no end")
    assert not store.exists()


def test_minus_zero_is_one_text_whatever_its_neighbours_are(store: Path, file: Put) -> None:
    for other in ("1", "1.5", '"a"', "-0.0"):
        path = file("x.jsonl", f'{{"k":-0}}\n{{"k": {other}}}\n'.encode())
        good("ingest", store, path, *TOPIC, "--key-column", "k")
    with rmq.open(store) as opened:
        assert [opened.pull("T", 0, at).messages[0].keys for at in (0, 2, 4, 6)] == [("-0",)] * 4


@pytest.mark.parametrize(("line", "why"), [('{"b": null}', "b is null"), ('{"c": 1}', "no field 'b'")])
def test_a_body_that_is_null_is_told_from_one_that_is_not_there(store: Path, file: Put, line: str, why: str) -> None:
    done = call("ingest", store, file("x.jsonl", line.encode()), *TOPIC, "--body-column", "b")
    assert_error(done, 2, f"row 1: {why}; 0 messages stored before")


def test_the_suffix_that_tells_the_format_tells_the_delimiter(store: Path, file: Put) -> None:
    for name, data in (("x.tsv.csv", b"a,b\n1,2\n"), ("x.csv.tsv", b"a\tb\n1\t2\n"),
                       ("x.tsv.gz", gzip.compress(b"a\tb\n1\t2\n"))):  # fmt: skip
        good("ingest", store, file(name, data), *TOPIC, "--key-column", "a", "--body-column", "b")
    assert bodies(store) == [b"2"] * 3


@pytest.mark.slow
def test_a_csv_that_is_left_unread_is_read_no_more(file: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow reads ahead in a thread of its own, which must not meet an interpreter that ends."""
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 1000)
    monkeypatch.setattr("rmq.cli.sources.BATCH_ROWS", 10)
    path = file("x.csv", b"id,v\n" + b"12345,xxxxxxxxxxxxxxxx\n" * 5000)
    read, late, is_left = Blocks.read, list[int](), False

    def slow(blocks: Blocks, size: int) -> bytes:
        time.sleep(0.01)
        data = read(blocks, size)
        if is_left:
            late.append(len(data))
        return data

    monkeypatch.setattr(Blocks, "read", slow)
    for taken in range(1, 6):
        is_left = False
        rows = Source(str(path), None, None, Wanted(("id",), None)).rows()
        for _ in range(taken):
            next(rows)
        rows.close()
        is_left = True
        time.sleep(0.1)
    assert late == []


@pytest.mark.parametrize(("zone", "text"), [
    ("Africa/Monrovia", "1971-06-01T11:15:30.000000-00:44:30"),
    ("Europe/Amsterdam", "1971-06-01T13:00:00.000000+01:00"), ("Asia/Tokyo", "1971-06-01T21:00:00.000000+09:00"),
])  # fmt: skip
def test_an_offset_that_is_no_whole_minutes_keeps_its_seconds(zone: str, text: str) -> None:
    """Else the text names another moment."""
    from rmq.cli.values import written

    moment = dt.datetime(1971, 6, 1, 12, tzinfo=dt.UTC)
    texts, _ = written(pa.array([None, moment, moment], pa.timestamp("us", zone))[1:], "at", {})
    assert texts.to_pylist() == [text, text]
    assert dt.datetime.fromisoformat(text) == moment


def test_a_block_of_quotes_needs_no_memory_of_its_own() -> None:
    blocks = Blocks(b"", SimpleNamespace(is_live=True), 1 << 26, ",")  # type: ignore[arg-type]
    data = b'"' + b'""' * 1_000_000
    tracemalloc.start()
    try:
        blocks._keep(data)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()
    assert blocks._before == b'"'


def goes_on(data: bytes) -> bool:
    """Whether CSV ends within quotes, byte by byte."""
    state = "begin"
    for byte in data:
        if byte == ord('"') and state in ("begin", "ended"):
            state = "quoted"
        elif state == "quoted":
            state = "ended" if byte == ord('"') else "quoted"
        else:
            state = "begin" if byte in b",\n" else "plain"
    return state == "quoted"


@pytest.mark.parametrize("seed", range(20))
def test_whether_a_field_goes_on_is_what_each_byte_tells(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        data = bytes(rng.choices(b'a",\n', [2, 4, 2, 2], k=rng.randint(0, 14)))
        blocks = Blocks(b"", SimpleNamespace(is_live=True), 1 << 26, ",")  # type: ignore[arg-type]
        assert blocks._ends_in_quotes(data) == goes_on(data), data


def test_rows_of_the_wrong_width_are_numbered_in_a_time_that_grows_with_them() -> None:
    """A list would be searched for each: for so many that takes hours."""
    left_out = list(range(3, 400_003))
    numbers, past = row_numbers(1, 2, left_out)
    assert (numbers.tolist(), past) == ([1, 2], 400_003)


def test_a_body_column_keeps_its_bytes_beside_a_broken_row_of_the_wrong_width(store: Path, file: Put) -> None:
    path = file("x.csv", b"h,k\nb\xe91,k1\nb2,k2\nb\xff\nb3,k3\nb4,k\xff\n")
    done = call("ingest", store, path, *TOPIC, "--body-column", "h", "--key-column", "k", "--skip-bad")
    assert done.code == 0, done.err
    assert "row 3: 1 columns, the header has 2" in done.err
    assert "row 5: k is not UTF-8" in done.err
    assert bodies(store) == [b"b\xe91", b"b2", b"b3"]


@pytest.mark.parametrize("delimiter", list("abf09,"))
def test_a_body_of_any_bytes_is_whole_whatever_the_delimiter(store: Path, file: Put, delimiter: str) -> None:
    path = file("x.csv", b"h%ck\n\xe9\xff%c1\n" % (ord(delimiter), ord(delimiter)))
    done = call("ingest", store, path, *TOPIC, "--body-column", "h", "--delimiter", delimiter)
    assert done.code == 0, done.err
    assert bodies(store) == [b"\xe9\xff"]
