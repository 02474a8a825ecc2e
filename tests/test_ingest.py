# SPDX-License-Identifier: Apache-2.0
"""`rmq ingest`: every row of CSV, JSONL and Parquet becomes one message, or is named and counted."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import errno
import gzip
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pyarrow as pa
import pyarrow.parquet
import pytest
from commandline import assert_error, bodies, call, csv_rows, environment, good, jsonl_rows, random_csv, random_jsonl

import rmq

KEYS = ("--key-column", "k")
Put = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 64)


def messages(store: Path) -> list[rmq.StoredMessage]:
    """All of topic T in log order."""
    with rmq.open(store) as opened:
        queues = opened.topics().get("T", {})
        found = [message for queue_id in queues for message in opened.pull("T", queue_id, 0, 10**6).messages]
    return sorted(found, key=lambda message: message.phy_offset)


def rows(store: Path) -> list[Any]:
    return [json.loads(body) for body in bodies(store)]


def assert_stopped(done: Any, store: Path, code: int, stored: int, *parts: str) -> None:
    """An error of one line whose count is what the store holds."""
    assert_error(done, code, *parts, f"; {stored:,} message{'' if stored == 1 else 's'} stored before")
    assert len(bodies(store)) == stored
    with rmq.open(store) as opened:
        assert opened.info().state == "closed"


def assert_counts(done: Any, store: Path, stored: int, skipped: int) -> None:
    (row,) = done.rows
    assert (row["stored"], row["skipped"]) == (stored, skipped), done
    assert len(bodies(store)) == stored


# ---- what becomes of a row -------------------------------------------------------------------------------


def test_a_row_is_one_message(store: Path, file: Put) -> None:
    path = file("x.csv", b'k,t,n\na,red,1\nb,,"x, ""y"""\n,blue,\n')
    done = good("ingest", store, path, "--topic", "T", *KEYS, "--tags-column", "t")
    assert_counts(done, store, 3, 0)
    assert done.rows[0].keys() == {"stored", "skipped", "seconds", "rows_per_second"}
    got = messages(store)
    assert [(m.keys, m.tags) for m in got] == [(("a",), "red"), (("b",), None), ((), "blue")]
    assert rows(store) == [{"k": "a", "t": "red", "n": "1"}, {"k": "b", "t": "", "n": 'x, "y"'},
                           {"k": "", "t": "blue", "n": ""}]  # fmt: skip
    assert [json.loads(row["body"])["k"] for row in good("query", store, "T", "b").rows] == ["b"]
    assert good("ingest", store, path, "--topic", "T", "-o", "csv").out.startswith("name,value\nstored,3\nskipped,0\n")
    assert good("ingest", store, path, "--topic", "T", "-o", "table").out.startswith("stored   3 messages in ")


def test_several_key_columns_and_a_body_column(store: Path, file: Put) -> None:
    path = file("x.csv", b"k,l,b\na,b,\xff\xfe\nc,,\n,d,x\n,,y\n")
    good("ingest", store, path, "--topic", "T", *KEYS, "--key-column", "l", "--body-column", "b")
    assert [(m.keys, m.body) for m in messages(store)] == \
        [(("a", "b"), b"\xff\xfe"), (("c",), b""), (("d",), b"x"), ((), b"y")]  # fmt: skip


def test_several_files_one_after_the_other(store: Path, file: Put) -> None:
    paths = [file("a.csv", b"n\n1\n"), file("b.jsonl", b'{"n":"2"}\n'), file("c.tsv", b"n\tm\n3\t4\n"),
             file("d.ndjson.gz", gzip.compress(b'{"n":"5"}\n'))]  # fmt: skip
    assert_counts(good("ingest", store, *paths, "--topic", "T"), store, 4, 0)
    assert [row["n"] for row in rows(store)] == ["1", "2", "3", "5"]
    bad = file("e.csv", b"n\n6\n7,8\n")
    done = call("ingest", store, paths[0], bad, paths[1], "--topic", "T")
    assert_error(done, 2, f"{bad}: row 2", "2 messages stored")
    assert [row["n"] for row in rows(store)][4:] == ["1", "6"]


@pytest.mark.parametrize("queues", [1, 3, 8])
def test_queues_are_chosen_as_rocketmqs_hash_selector_does(store: Path, file: Put, queues: int) -> None:
    keys = [*(f"order-{i}" for i in range(200)), "", "Aa", "BB", "é😀", "polygenelubricants"]
    path = file("x.jsonl", "".join(json.dumps({"k": key}) + "\n" for key in keys).encode())
    good("ingest", store, path, "--topic", "T", *KEYS, "--queues", queues)
    for message in messages(store):
        if message.keys:  # Java's % keeps the sign, then Math.abs
            assert message.queue_id == abs(int(math.fmod(oracle.java_hash(message.keys[0]), queues))), message.keys


def test_without_keys_queues_take_turns_over_blocks_and_files(store: Path, file: Put, small_blocks: None) -> None:
    paths = [file(f"{i}.csv", b"n\n" + b"".join(b"%d\n" % n for n in range(i * 50, i * 50 + 50))) for i in range(3)]
    good("ingest", store, *paths, "--topic", "T", "--queues", 4)
    assert [(int(json.loads(m.body)["n"]), m.queue_id) for m in messages(store)] == [(n, n % 4) for n in range(150)]


def test_a_column_that_no_row_has_is_told(store: Path, file: Put) -> None:
    done = good("ingest", store, file("x.jsonl", b'{"a":1}\n'), "--topic", "T", *KEYS)
    assert done.notes == ["rmq: no row has a 'k'"]
    assert good("ingest", store, file("y.jsonl", b'{"a":1}\n{"k":2}\n'), "--topic", "T", *KEYS).err == ""


@pytest.mark.parametrize(("form", "data"), [("csv", b"n\n1\n"), ("jsonl", b'{"n":"1"}')])
def test_stdin(store: Path, form: str, data: bytes) -> None:
    good("ingest", store, "-", "--format", form, "--topic", "T", input=data)
    assert rows(store) == [{"n": "1"}]
    assert_error(call("ingest", store, "-", "--topic", "T", input=data), 2, "--format")
    assert_error(call("ingest", store, "-", "--format", form, "--topic", "T", input=b"\xff"), 2, "-:", "UTF-8")


# ---- CSV -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [
    b"a,b\n1,2", b"a,b\r\n1,2\r\n", b"\xef\xbb\xbfa,b\n1,2\n", b"\n\na,b\n\n1,2\n\n\n", b'"a","b"\n"1","2"\n',
    b"a,b\r1,2\r",
])  # fmt: skip
def test_one_row_in_all_ways_to_write_it(store: Path, file: Put, data: bytes) -> None:
    good("ingest", store, file("x.csv", data), "--topic", "T")
    assert rows(store) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(("name", "data"), [
    ("x.csv", b""), ("x.csv", b"a,b\n"), ("x.csv", b"a,b"), ("x.csv", b"\xef\xbb\xbfa\r\n\r\n"), ("x.csv", b"\n"),
    ("x.jsonl", b""), ("x.jsonl", b"\n \n"), ("x.csv.gz", gzip.compress(b"a\n", mtime=0)),
    ("x.jsonl.gz", gzip.compress(b"", mtime=0)),
])  # fmt: skip
def test_a_file_without_rows_gives_no_message(store: Path, file: Put, name: str, data: bytes) -> None:
    empty, full = file(name, data), file("full.csv", b"a\n1\n")
    assert_counts(good("ingest", store, empty, "--topic", "T"), store, 0, 0)
    assert_counts(good("ingest", store, empty, full, "--topic", "T"), store, 1, 0)


def read(path: Path, wanted: str) -> tuple[list[tuple[int, bytes, Any]], list[int]]:
    """(number, body, text of a column) of the rows of a file, and the numbers of the bad ones."""
    from rmq.cli.sources import Source, Wanted

    kept: list[tuple[int, bytes, Any]] = []
    bad: list[int] = []
    for part in Source(str(path), None, None, Wanted((wanted,), None)).rows():
        bad += [number for number, _ in part.bad]
        kept += zip(part.numbers.tolist(), part.body.to_pylist(), part.columns[wanted].to_pylist(), strict=True)
    return kept, bad


@pytest.mark.parametrize("size", [64, 100, 1000, 4 << 20])
def test_random_csv_is_read_as_the_csv_module_reads_it(file: Put, monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", size)
    for seed in range(60):
        data = random_csv(random.Random(seed))
        kept, bad = read(file("x.csv", data), "a")
        assert ([(number, json.loads(body)) for number, body, _ in kept], bad) == csv_rows(data), f"seed {seed}"
        assert all(json.loads(body)["a"] == text for _, body, text in kept)


@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), 64, 4 << 20])
def test_random_jsonl_is_read_as_the_json_module_reads_it(file: Put, monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", size)
    for seed in range(25):
        data = random_jsonl(random.Random(seed))
        filled = b"\n".join(line for line in data.split(b"\n") if line.strip(b"\xef\xbb\xbf \t\r"))
        assert read(file("x.jsonl", data), "k") == jsonl_rows(filled), f"seed {seed}: blank lines are no rows"


@pytest.mark.slow
def test_a_quoted_line_end_survives_the_end_of_a_block(store: Path, file: Put, small_blocks: None) -> None:
    for length in range(56, 66):
        shutil.rmtree(store, ignore_errors=True)
        value = "z" * length + "\r\nend"
        good("ingest", store, file("x.csv", f'a,b\n"{value}",w\n1,2\n'.encode()), "--topic", "T")
        assert rows(store) == [{"a": value, "b": "w"}, {"a": "1", "b": "2"}]


def test_lines_that_hold_no_single_object_are_bad_whatever_they_add_up_to(store: Path, file: Put) -> None:
    for lines in (b'{"k":"a"}{"k":"b"}\n{"k":\n"c"}\n', b'{"a":\n{"k":"b"}}\n{"k":"c"}null\n'):
        shutil.rmtree(store, ignore_errors=True)
        path = file("x.jsonl", lines + b'{"k":"d"}\n')
        assert_counts(good("ingest", store, path, "--topic", "T", *KEYS, "--skip-bad"), store, 1, 3)
        assert rows(store) == [{"k": "d"}]


# ---- bad rows --------------------------------------------------------------------------------------------

BAD = {
    "ragged": ("x.csv", b"k,v\n", b"%d,v\n", b"1,2,3\n", "3 columns, the header has 2"),
    "short": ("x.csv", b"k,v\n", b"%d,v\n", b"x\n", "1 columns, the header has 2"),
    "short and not UTF-8": ("x.csv", b"k,v\n", b"%d,v\n", b"\xff\n", "1 columns, the header has 2"),
    "not UTF-8": ("x.csv", b"k,v\n", b"%d,v\n", b"1,\xff\n", "v is not UTF-8"),
    "key with a space": ("x.csv", b"k,v\n", b"%d,v\n", b"a b,1\n", "space"),
    "key with a separator": ("x.csv", b"k,v\n", b"%d,v\n", b"a\x01,1\n", "0x01"),
    "no JSON": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b"{'k':1}\n", "no JSON"),
    "no object": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b"[1]\n", "no JSON object"),
    "JSON cut": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b'{"k":\n', "no JSON"),
    "JSON not UTF-8": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b'{"k":"\xff"}\n', "not UTF-8"),
    "JSON in UTF-16": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', '{"k":"a"}'.encode("utf-16") + b"\n", "not UTF-8"),
    "JSON key with a space": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b'{"k":"a b"}\n', "space"),
    "key that is half a character": ("x.jsonl", b"", b'{"k":"%d","v":"v"}\n', b'{"k":"\\ud800"}\n', ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("before", [9, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1, 100))])
def test_a_bad_row_is_named_and_what_stands_before_it_is_kept(store: Path, file: Put, small_blocks: None, kind: str,
                                                              before: int) -> None:  # fmt: skip
    name, head, row, bad, reason = BAD[kind]
    path = file(name, head + b"".join(row % i for i in range(before)) + bad + row % before)
    done = call("ingest", store, path, "--topic", "T", *KEYS)
    assert_stopped(done, store, 2, before, f"{path}: row {before + 1}: ", reason)
    assert [row["k"] for row in rows(store)] == [str(i) for i in range(before)]
    shutil.rmtree(store)
    done = good("ingest", store, path, "--topic", "T", *KEYS, "--skip-bad")
    assert_counts(done, store, before + 1, 1)
    (note,) = done.notes
    assert note.startswith(f"rmq: skipped {path}: row {before + 1}: ")


@pytest.mark.parametrize("size", [64, 4 << 20])
def test_skip_bad_counts_every_kind_and_names_the_first(store: Path, file: Put, monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", size)
    kinds = [BAD[kind][3] for kind in ("ragged", "short", "not UTF-8", "key with a space", "key with a separator")]
    data, wanted = b"k,v\n", []
    for i in range(400):
        if i % 10 == 3:
            data += kinds[i // 10 % len(kinds)]
        else:
            data += b"%d,v\n" % i
            wanted.append(str(i))
    done = good("ingest", store, file("x.csv", data), "--topic", "T", *KEYS, "--skip-bad")
    assert_counts(done, store, 360, 40)
    assert [row["k"] for row in rows(store)] == wanted
    assert done.notes[-1] == "rmq: 40 rows skipped; the first 5 are named above"
    assert len(done.notes) == 6
    assert all(int(line.split(": row ")[1].split(":")[0]) % 10 == 4 for line in done.notes[:-1])


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
@pytest.mark.parametrize("size", [4 << 20, pytest.param(9 << 20, marks=pytest.mark.slow)])
def test_a_row_that_is_too_large_is_a_bad_row(store: Path, file: Put, name: str, size: int) -> None:
    big = b"q" * size
    rows_of = {"x.csv": [b"a,b\n1,2\n", big + b",2\n", b"3,4\n"],
               "x.jsonl": [b'{"a":"1"}\n', b'{"a":"' + big + b'"}\n', b'{"a":"3"}\n']}[name]  # fmt: skip
    path = file(name, b"".join(rows_of))
    assert_stopped(call("ingest", store, path, "--topic", "T"), store, 2, 1, f"{path}: row 2: ")
    shutil.rmtree(store)
    assert_counts(good("ingest", store, path, "--topic", "T", "--skip-bad"), store, 2, 1)
    assert [row["a"] for row in rows(store)] == ["1", "3"]


@pytest.mark.parametrize("odd", ['{"z":' + "[" * 5000 + "]" * 5000 + "}", '{"z":' + "1" * 5000 + "}", '{"z":NaN}'],
                         ids=["deep", "long", "NaN"])  # fmt: skip
def test_a_row_is_good_or_bad_whatever_stands_beside_it(store: Path, file: Put, odd: str) -> None:
    counts = []
    for other in ('{"k":"a"}', '{"k":1}'):
        path = file("x.jsonl", f"{odd}\n{other}\n".encode())
        (row,) = good("ingest", store, path, "--topic", "T", *KEYS, "--skip-bad").rows
        counts.append((row["stored"], row["skipped"]))
    assert counts[0] == counts[1]


def test_a_disk_that_fills_just_before_a_bad_row_is_counted_right(store: Path, file: Put, monkeypatch: Any) -> None:
    put_many, calls = rmq.Store.put_many, iter((True, False))

    def put(opened: rmq.Store, *args: Any, **options: Any) -> Any:
        if next(calls):
            return put_many(opened, *args, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rmq.Store, "put_many", put)
    done = call("ingest", store, file("x.csv", b"k\n" + b"a\n" * 20_000 + b"a b\n"), "--topic", "T", *KEYS)
    monkeypatch.undo()
    assert_stopped(done, store, 4, 16384, "No space left on device")


# ---- wrong files and arguments ---------------------------------------------------------------------------


def test_a_missing_column_is_named_beside_those_there_are(store: Path, file: Put) -> None:
    for option in ("--key-column", "--tags-column", "--body-column"):
        done = call("ingest", store, file("x.csv", b"id,name\n1,2\n"), "--topic", "T", option, "Id")
        assert_error(done, 2, "x.csv: no column 'Id'", "id, name")
    assert_error(call("ingest", store, file("x.csv", b"id,id\n1,2\n"), "--topic", "T"), 2, "repeats 'id'")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])
    assert_error(call("ingest", store, file("x.parquet", parquet(twice)), "--topic", "T"), 2, "'id'")
    assert not store.exists(), "nothing is made before the files are known to fit"


ROW = b"a,b\n1,2\n"
PACKED = bytearray(gzip.compress(ROW + random.Random(0).randbytes(20_000).hex().encode()))
PACKED[500:600] = bytes(100)


@pytest.mark.parametrize(("name", "data", "options", "reason"), [
    ("x.txt", ROW, [], "--format"), ("x", ROW, [], "--format"), ("x.csv.zip", ROW, [], "--format"),
    ("x.csv.gz", ROW, [], "gzip"), ("x.csv.gz", gzip.compress(ROW * 99, mtime=0)[:-9], [], "ended before"),
    ("x.csv.gz", bytes(PACKED), [], "x.csv.gz"), ("x.jsonl.gz", bytes(PACKED), [], "x.jsonl.gz"),
    ("x.csv", ROW.decode().encode("utf-16"), [], "the header is not UTF-8"), ("x.csv", b"\xff" + ROW, [], "header"),
    ("x.csv", b'"' + b"h" * 200_000 + b'"\n1\n', [], "x.csv"),
    ("x.parquet", b"", [], "x.parquet"), ("x.parquet", b"PAR1", [], "x.parquet"), ("x.parquet", ROW, [], "x.parquet"),
    ("x.csv", ROW, ["--format", "parquet"], "x.csv"), ("x.csv", ROW, ["--format", "jsonl"], "row 1: no JSON"),
    ("x.csv", ROW, ["--delimiter", ""], "--delimiter"), ("x.csv", ROW, ["--delimiter", ",,"], "--delimiter"),
    ("x.csv", ROW, ["--delimiter", "é"], "--delimiter"), ("x.csv", ROW, ["--delimiter", '"'], "--delimiter"),
    ("x.csv", ROW, ["--queues", "0"], "--queues"), ("x.csv", ROW, ["--queues", "x"], "--queues"),
    ("x.csv", ROW, ["--topic", "a/b"], "--topic"), ("x.csv", ROW, ["--topic", ""], "--topic"),
    ("x.csv", ROW, ["--topic", "x" * 300], "--topic"), ("x.csv", ROW, ["--topic", ".."], "--topic"),
    ("x.csv", ROW, ["--topic", "\udcff"], "--topic"),
])  # fmt: skip
def test_a_file_or_an_option_that_does_not_fit(store: Path, file: Put, name: str, data: bytes, options: list[str],
                                               reason: str) -> None:  # fmt: skip
    assert_error(call("ingest", store, file(name, data), "--topic", "T", *options), 2, reason)
    assert not store.exists() or not bodies(store)


def test_files_and_stores_that_are_not_what_they_should_be(store: Path, file: Put, tmp_path: Path) -> None:
    path = file("x.csv", ROW)
    assert_error(call("ingest", store, tmp_path / "no.csv", "--topic", "T"), 4, "no.csv: No such file")
    (tmp_path / "d.csv").mkdir()
    assert_error(call("ingest", store, tmp_path / "d.csv", "--topic", "T"), 4, "d.csv: Is a directory")
    assert_error(call("ingest", path, path, "--topic", "T"), 4, str(path))
    assert_error(call("ingest", store, "--topic", "T"), 2, "FILE")
    assert_error(call("ingest", store, path), 2, "--topic")


def test_a_store_that_is_being_written_is_refused_and_names_the_writer(store: Path, file: Put) -> None:
    with rmq.open(store, "a") as writer:
        writer.put(rmq.Message("T", b"x"))
        done = call("ingest", store, file("x.csv", ROW), "--topic", "T")
        assert_error(done, 4, str(store), f"opened for writing by process {os.getpid()}")
        assert len(good("cat", store, "T").rows) == 1
    assert len(bodies(store)) == 1


# ---- Parquet ---------------------------------------------------------------------------------------------


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


D, T = decimal.Decimal, dt.datetime(2023, 11, 14, 22, 13, 20, 123456)
AWARE = T.replace(tzinfo=dt.UTC)
TEXTS = ["a", None, 'q"\\\n\r\t\x00\x1f\x7f', "\u2028é😀", "", "null"]
VALUES: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
    "int8": (pa.int8(), [1, None, -128], [1, None, -128]),
    "uint64": (pa.uint64(), [2**64 - 1, 0], [2**64 - 1, 0]),
    "bool": (pa.bool_(), [True, None, False], [True, None, False]),
    "double": (pa.float64(), [0.1, 1.0, -0.0, 1e300, 5e-324, math.nan, None], [0.1, 1, 0, 1e300, 5e-324, None, None]),
    "float": (pa.float32(), [0.5, math.nan, -math.inf], [0.5, None, None]),
    "half": (pa.float16(), [1.5, None], [1.5, None]),
    "decimal": (pa.decimal128(38, 10), [D("0.0000000001"), D("-12.5"), None, D(0)], [1e-10, -12.5, None, 0]),
    "decimal256": (pa.decimal256(50, 2), [D("1.25")], [1.25]),
    "string": (pa.string(), TEXTS, TEXTS),
    "large_string": (pa.large_string(), TEXTS, TEXTS),
    "string_view": (pa.string_view(), TEXTS, TEXTS),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a", '"'], ["a", None, "a", '"']),
    "binary": (pa.binary(), [b"\xff\x00", None], ["ff00", None]),
    "large_binary": (pa.large_binary(), [b"\xff\x00", None], ["ff00", None]),
    "fixed_size_binary": (pa.binary(2), [b"\xff\x00", None], ["ff00", None]),
    "timestamp": (pa.timestamp("us"), [T, None], ["2023-11-14T22:13:20.123456", None]),
    "timestamp of UTC": (pa.timestamp("us", "UTC"), [AWARE], ["2023-11-14T22:13:20.123456Z"]),
    "timestamp of a zone": (pa.timestamp("us", "Asia/Kolkata"), [AWARE], ["2023-11-15T03:43:20.123456+05:30"]),
    "timestamp in ns": (pa.timestamp("ns"), [1_700_000_000_123_456_789], ["2023-11-14T22:13:20.123456789"]),
    "far years": (pa.timestamp("ms"), [253402300800000, 0, None, -62167219200001],
                  ["10000-01-01T00:00:00.000", "1970-01-01T00:00:00.000", None, "-0001-12-31T23:59:59.999"]),
    "date": (pa.date32(), [T.date(), None], ["2023-11-14", None]),
    "time": (pa.time64("us"), [T.time()], ["22:13:20.123456"]),
    "null": (pa.null(), [None, None], [None, None]),
    "list": (pa.list_(pa.int64()), [[1, None], None, []], [[1, None], None, []]),
    "list with NaN": (pa.list_(pa.float64()), [[1.5, math.nan, -math.inf]], [[1.5, None, None]]),
    "list of binary": (pa.list_(pa.binary()), [[b"\xff"]], [["ff"]]),
    "list of timestamps": (pa.list_(pa.timestamp("us")), [[T]], [["2023-11-14T22:13:20.123456"]]),
    "struct": (pa.struct([("y", pa.string())]), [{"y": '"'}, None], [{"y": '"'}, None]),
    "struct with infinity": (pa.struct([("x", pa.float64())]), [{"x": math.inf}], [{"x": None}]),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_a_row_of_parquet_is_valid_json_of_the_same_values(file: Put, kind: str) -> None:
    type_, values, wanted = VALUES[kind]
    names = ['a "b"\n', "é", "c"]
    column = pa.array(values, type_)
    table = pa.table({names[0]: column, names[1]: list(range(len(values))), names[2]: column})
    kept, bad = read(file("x.parquet", parquet(table)), names[1])
    got = [json.loads(body.decode(), parse_constant=pytest.fail) for _, body, _ in kept]
    assert bad == []
    assert got == [{names[0]: value, names[1]: number, names[2]: value} for number, value in enumerate(wanted)]
    assert [list(row) for row in got] == [names] * len(values), "fields stand in column order"


@pytest.mark.parametrize(("type_", "values", "wanted"), [
    (pa.int64(), [1, None], ["1", None]), (pa.string(), ["a", ""], ["a", None]), (pa.bool_(), [True], ["true"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", None], ["a", None]), (pa.binary(), [b"a", None], ["a", None]),
    (pa.decimal128(5, 2), [D("1.50"), None], ["1.50", None]), (pa.date32(), [T.date(), None], ["2023-11-14", None]),
    (pa.timestamp("us"), [T], ["2023-11-14T22:13:20.123456"]),
])  # fmt: skip
def test_a_column_of_parquet_becomes_the_key(file: Put, type_: pa.DataType, values: list[Any],
                                             wanted: list[Any]) -> None:  # fmt: skip
    table = pa.table({"k": pa.array(values, type_)})
    assert [text or None for _, _, text in read(file("x.parquet", parquet(table)), "k")[0]] == wanted


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary(), pa.binary(2), pa.binary_view()], ids=str)
def test_bytes_of_a_body_column_are_the_body(store: Path, file: Put, type_: pa.DataType) -> None:
    table = pa.table({"b": pa.array([b"\xff\x00", b"ok"], type_), "k": ["a", None]})
    done = good("ingest", store, file("x.parquet", parquet(table)), "--topic", "T", *KEYS, "--body-column", "b")
    assert_counts(done, store, 2, 0)
    assert [(m.body, m.keys) for m in messages(store)] == [(b"\xff\x00", ("a",)), (b"ok", ())]


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary()], ids=str)
def test_a_key_or_body_of_parquet_that_is_none_is_a_bad_row(store: Path, file: Put, type_: pa.DataType) -> None:
    table = pa.table({"k": pa.array([b"a", b"\xff", b"c", b"d"], type_), "b": ["x", "y", None, "z"]})
    path = file("x.parquet", parquet(table))
    done = good("ingest", store, path, "--topic", "T", *KEYS, "--body-column", "b", "--skip-bad")
    assert_counts(done, store, 2, 2)
    assert [": row 2: " in done.notes[0], ": row 3: " in done.notes[1]] == [True, True]


def test_a_damaged_parquet_file_is_named(store: Path, file: Put) -> None:
    data = bytearray(parquet(pa.table({"c": [f"value{i}" for i in range(5000)]})))
    data[300:400] = bytes(100)
    assert_error(call("ingest", store, file("x.parquet", bytes(data)), "--topic", "T"), 2, "x.parquet")


# ---- many rows -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_of_100_000_rows_of_csv_is_the_csv_modules_row(store: Path, file: Put) -> None:
    rng = random.Random(3)
    text = io.StringIO()
    csv.writer(text).writerow(["k", "v", "w"])
    csv.writer(text).writerows([f"key{i}", rng.choice(TEXTS[3:]), "x" * rng.randrange(90)] for i in range(100_000))
    data = text.getvalue().encode()
    assert_counts(good("ingest", store, file("x.csv", data), "--topic", "T", *KEYS), store, 100_000, 0)
    assert rows(store) == list(csv.DictReader(io.StringIO(data.decode(), newline="")))


@pytest.mark.slow
def test_many_ragged_rows_are_counted_one_by_one(store: Path, file: Put, monkeypatch: Any) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 10_000)
    data = b"k,v\n" + b"".join(b"%d\n" % i if i % 7 == 0 else b"%d,x\n" % i for i in range(300_000))
    wanted = [i for i in range(300_000) if i % 7]
    done = good("ingest", store, file("x.csv", data), "--topic", "T", "--skip-bad")
    assert_counts(done, store, len(wanted), 300_000 - len(wanted))
    assert [int(row["k"]) for row in rows(store)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"null\n", b'null\n{"k":"a"}\n', b'{"k":"a"}\nnull\n'])
def test_null_is_no_row_of_jsonl(store: Path, file: Put, data: bytes) -> None:
    command = [sys.executable, "-m", "rmq", "ingest", store, file("x.jsonl", data), "--topic", "T"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    number = data.split(b"\n").index(b"null") + 1
    assert (done.returncode, done.stdout) == (2, ""), done
    assert f"row {number}: no JSON object; {number - 1} message" in done.stderr
