# SPDX-License-Identifier: Apache-2.0
"""`rmq ingest` of many files, and of columns that hold several keys."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from commandline import assert_error, call, environment, good

import rmq
from rmq.cli.inputs import Input
from rmq.cli.rows import Wanted
from rmq.cli.sources import Source

TOPIC = ("--topic", "T")


def keys_of(store: Path) -> list[tuple[str, ...]]:
    with rmq.open(store) as opened:
        return [message.keys for message in opened.pull("T", 0, 0, 1000).messages]


def ingest_with(descriptors: int, *arguments: object, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """With so many descriptors at most."""
    command = [sys.executable, "-m", "rmq", "ingest", *map(str, arguments)]
    return subprocess.run(command, input=data, capture_output=True, check=False, env=environment(),
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors,) * 2))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_of_many_files_one_is_open_at_a_time(tmp_path: Path, form: str) -> None:
    for number in range(60):
        path = tmp_path / f"{number:03}.{form}"
        if form == "parquet":
            pa.parquet.write_table(pa.table({"k": [f"k{number}"]}), path)
        else:
            path.write_text(f"k\nk{number}\n" if form == "csv" else f'{{"k": "k{number}"}}\n')
    done = ingest_with(50, tmp_path / "s", *sorted(tmp_path.glob(f"*.{form}")), *TOPIC, "--key-column", "k")
    assert done.returncode == 0, done.stderr
    assert keys_of(tmp_path / "s") == [(f"k{number}",) for number in range(60)]


@pytest.mark.parametrize("name", [b"s3:x.parquet", b"file:x.parquet", b"a%20b.parquet", b"\xff.parquet"])
def test_the_name_of_a_parquet_file_is_a_path_and_no_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    pa.parquet.write_table(pa.table({"k": ["k1"]}), "plain")
    os.rename("plain", name)
    good("ingest", "s", os.fsdecode(name), *TOPIC, "--key-column", "k")
    assert keys_of(tmp_path / "s") == [("k1",)]


def test_every_file_is_looked_at_before_the_first_is_put(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("k\n1\n")
    (tmp_path / "b.csv").write_text("other\n1\n")
    assert_error(call("ingest", tmp_path / "s", tmp_path / "a.csv", tmp_path / "b.csv", *TOPIC, "--key-column", "k"), 2,
                 "b.csv: no column 'k'")  # fmt: skip
    assert not (tmp_path / "s").exists()


def test_a_pipe_may_have_any_descriptor(tmp_path: Path) -> None:
    """select(2) knows those below 1,024 only."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("no more descriptors to be had")
    script = ("import os, sys; [os.dup(0) for _ in range(1100)]; from rmq.cli import main; "
              f"main(['ingest', {os.fspath(tmp_path / 's')!r}, '-', '--format', 'csv', '--topic', 'T'])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], input=b"k\n1\n2\n", capture_output=True, check=False,
                          env=environment(),
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)))
    assert (done.returncode, len(keys_of(tmp_path / "s"))) == (0, 2), done.stderr


def parquet(path: Path, **columns: Any) -> Path:
    pa.parquet.write_table(pa.table(columns), path)
    return path


def bodies_of(store: Path) -> list[Any]:
    with rmq.open(store) as opened:
        return [json.loads(body) for body in opened.scan(columns=["body"]).read_all()["body"].to_pylist()]


def test_a_dictionary_within_a_list_is_read_across_row_groups(tmp_path: Path) -> None:
    """pyarrow makes no batch of several row groups of it."""
    count = 100
    texts = pa.array([f"c{n % 7}" for n in range(count)]).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), texts)
    pa.parquet.write_table(pa.table({"k": lists}), tmp_path / "x.parquet", row_group_size=30)
    good("ingest", tmp_path / "s", tmp_path / "x.parquet", *TOPIC, "--key-column", "k")
    assert keys_of(tmp_path / "s") == [(f"c{n % 7}",) for n in range(count)]
    assert bodies_of(tmp_path / "s") == [{"k": [f"c{n % 7}"]} for n in range(count)]


@pytest.mark.parametrize("kind", [
    pa.list_(pa.struct([("p", pa.null()), ("q", pa.int64())])), pa.list_(pa.null()), pa.list_(pa.list_(pa.null(), 2)),
    pa.map_(pa.string(), pa.null()), pa.null(), pa.int64(),
], ids=str)  # fmt: skip
def test_a_map_of_any_values_is_pairs(tmp_path: Path, kind: pa.DataType) -> None:
    """Edges: values of no type, also within others; null and empty ones; a file of several batches."""
    value, text = {
        pa.list_(pa.null()): ([None, None], [None, None]), pa.list_(pa.list_(pa.null(), 2)): ([[None] * 2] * 2,) * 2,
        pa.map_(pa.string(), pa.null()): ([("b", None), ("c", None)], [["b", None], ["c", None]]),
        pa.null(): (None, None), pa.int64(): (5, 5),
    }.get(kind, ([{"p": None, "q": 3}, {"p": None, "q": 8}],) * 2)
    rows = [[("a", value), ("b", None)], [], None, [("c", value)]] * 20
    table = pa.table({"v": pa.array(rows, pa.map_(pa.string(), kind))})
    pa.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=7)
    good("ingest", tmp_path / "s", tmp_path / "x.parquet", *TOPIC)
    pairs: list[Any] = [[["a", text], ["b", None]], [], None, [["c", text]]]
    assert bodies_of(tmp_path / "s") == [{"v": row} for row in pairs * 20]


@pytest.mark.parametrize("first", [1, 4])
def test_a_row_of_csv_without_end_is_named(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 4096)
    lines = "\n".join(["x" * 80] * 300)
    (tmp_path / "x.csv").write_text("id,v\n" + "b,c\n" * (first - 1) + f'a,"{lines}"\n')
    done = call("ingest", tmp_path / "s", tmp_path / "x.csv", *TOPIC)
    assert_error(done, 2, f"x.csv: row {first}: no end of the row in 4,096 bytes")


def test_rows_before_the_end_of_cut_packed_lines_are_stored(tmp_path: Path) -> None:
    texts = [f'{{"k": "k{n}"}}\n' for n in range(100_000)]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress("".join(texts).encode(), 1)[:-100])
    done = call("ingest", tmp_path / "s", tmp_path / "x.jsonl.gz", *TOPIC)
    stored = len(found := bodies_of(tmp_path / "s"))
    assert_error(done, 2, f"ended before the end-of-stream marker was reached; {stored:,} messages stored before; "
                          f"--skip-rows {stored} goes on behind them")  # fmt: skip
    assert stored > 90_000
    assert found == [{"k": f"k{n}"} for n in range(stored)]


LISTS: list[list[str | None] | None] = [["a", "b"], [], None, ["c"], ["d", None, "", "e"]]
EXPECTED = [("a", "b"), (), (), ("c",), ("d", "e")]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_view(pa.string())],
                         ids=str)  # fmt: skip
def test_texts_of_a_list_are_keys(tmp_path: Path, kind: pa.DataType) -> None:
    path = parquet(tmp_path / "x.parquet", k=pa.array(LISTS, kind))
    good("ingest", tmp_path / "s", path, *TOPIC, "--key-column", "k")
    assert keys_of(tmp_path / "s") == EXPECTED


def test_numbers_of_a_list_are_keys_too(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", k=pa.array([[1, 2], [3]]))
    good("ingest", tmp_path / "s", path, *TOPIC, "--key-column", "k")
    assert keys_of(tmp_path / "s") == [("1", "2"), ("3",)]


def test_lists_and_texts_of_json_are_keys(tmp_path: Path) -> None:
    values = [*LISTS, "f", 5]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"k": value, "n": "z"}) + "\n" for value in values))
    good("ingest", tmp_path / "s", tmp_path / "x.jsonl", *TOPIC, "--key-column", "k")
    assert keys_of(tmp_path / "s") == [*EXPECTED, ("f",), ("5",)]
    good("ingest", tmp_path / "t", tmp_path / "x.jsonl", *TOPIC, "--key-column", "n", "--key-column", "k")
    assert keys_of(tmp_path / "t") == [("z", *keys) for keys in [*EXPECTED, ("f",), ("5",)]]


def test_the_first_key_of_a_list_chooses_the_queue(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", k=pa.array([[f"k{i % 7}", f"x{i}"] for i in range(50)]))
    plain = parquet(tmp_path / "y.parquet", k=pa.array([f"k{i % 7}" for i in range(50)]))
    for store, file in (("s", path), ("t", plain)):
        good("ingest", tmp_path / store, file, *TOPIC, "--key-column", "k", "--queues", 4)
    with rmq.open(tmp_path / "s") as lists, rmq.open(tmp_path / "t") as texts:
        assert lists.scan(columns=["queue_id"]).read_all() == texts.scan(columns=["queue_id"]).read_all()


def test_a_list_with_a_space_in_a_key_is_a_bad_row(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", k=pa.array([["a"], ["b c"], ["d"]]))
    done = call("ingest", tmp_path / "s", path, *TOPIC, "--key-column", "k")
    assert_error(done, 2, "row 2", "1 message stored before")


def test_an_export_keeps_its_keys(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", b"body", keys=keys) for keys in (["a", "b"], [], ["c"])])
    good("export", tmp_path / "s", tmp_path / "lake", "--partition-by", "none", "--processes", 1)
    (path,) = (tmp_path / "lake").glob("*.parquet")
    good("ingest", tmp_path / "t", path, *TOPIC, "--key-column", "keys", "--body-column", "body")
    assert keys_of(tmp_path / "t") == [("a", "b"), (), ("c",)]
    lines = call("cat", tmp_path / "s", "T", "-o", "jsonl").out
    (tmp_path / "x.jsonl").write_text(lines)
    good("ingest", tmp_path / "u", tmp_path / "x.jsonl", *TOPIC, "--key-column", "keys", "--body-column", "body")
    assert keys_of(tmp_path / "u") == [("a", "b"), (), ("c",)]


def test_a_number_of_32_bits_has_one_text(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", x=pa.array([0.1, 3.3, 1e-7, 65504.0], pa.float32()))
    good("ingest", tmp_path / "s", path, *TOPIC, "--key-column", "x")
    with rmq.open(tmp_path / "s") as store:
        found = [(message.keys[0], message.body.decode()) for message in store.pull("T", 0, 0).messages]
    assert found == [(text, f'{{"x":{text}}}') for text in ("0.1", "3.3", "1e-7", "65504")]


@pytest.mark.parametrize("option", ["--body-column", "--tags-column", "--key-column"])
def test_an_empty_name_is_that_of_no_column(tmp_path: Path, option: str) -> None:
    (tmp_path / "x.csv").write_text("k\n1\n")
    done = call("ingest", tmp_path / "s", tmp_path / "x.csv", *TOPIC, option, "")
    assert_error(done, 2, "no column ''; there are: k")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("delimiter", ["\t", r"\t"])
def test_a_tab_may_be_written_as_two_characters(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "x.csv").write_text("n\tm\nk1\t4\n")
    good("ingest", tmp_path / "s", tmp_path / "x.csv", *TOPIC, "--key-column", "n", "--delimiter", delimiter)
    assert keys_of(tmp_path / "s") == [("k1",)]


@pytest.mark.parametrize("delimiter", ["é", '"', "\n", "\r", ",,", "", "\udcff"])
def test_what_is_no_delimiter_is_told_the_rule(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "x.csv").write_text("n\n1\n")
    done = call("ingest", tmp_path / "s", tmp_path / "x.csv", *TOPIC, "--delimiter", delimiter)
    assert_error(done, 2, '--delimiter must be one ASCII character other than ", CR and LF, got ')


# ---- pipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "pieces", "bodies"), [
    ("jsonl", ["\ufeff", '{"a":1}\n', '{"a":2}\n'], ['{"a":1}', '{"a":2}']),
    ("jsonl", [b"\xef", b"\xbb", b'\xbf{"a":1}\n'], ['{"a":1}']),
    ("jsonl", ["\ufeff"], []),
    ("csv", [b"\xef\xbb", b'\xbfa,b\n', b"1,2\n"], ['{"a":"1","b":"2"}']),
    ("csv", ["a,b\n", '1,"x\n', "y\n", "z\n", 'w"\n2,v\n'], ['{"a":"1","b":"x\\ny\\nz\\nw"}', '{"a":"2","b":"v"}']),
    ("csv", ["a,b\n", '1,"x""\n', '""y""\n', '"\n2,"",\n', "3,v\n"],
     ['{"a":"1","b":"x\\"\\n\\"y\\"\\n"}', '{"a":"3","b":"v"}']),
    ("csv", ["a,b\n", '1,x"y\n', "2,v\n"], ['{"a":"1","b":"x\\"y"}', '{"a":"2","b":"v"}']),
])  # fmt: skip
def test_what_a_pipe_gives_in_any_pieces_are_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, form: str, pieces: list[str | bytes], bodies: list[str]
) -> None:
    assert bodies_of_pipe(monkeypatch, form, pieces) == bodies


@pytest.mark.parametrize("fill", range(50, 64))
def test_a_block_of_a_pipe_may_end_anywhere_in_a_quoted_field(monkeypatch: pytest.MonkeyPatch, fill: int) -> None:
    """The next one's first line end is none of a row."""
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 64)
    pieces = ["a,b\n", f"1,{'x' * fill}\n" + '2,"l""1\n', 'l2"\n', "3,v\n"]
    rows = [{"a": "1", "b": "x" * fill}, {"a": "2", "b": 'l"1\nl2'}, {"a": "3", "b": "v"}]
    assert [json.loads(body) for body in bodies_of_pipe(monkeypatch, "csv", pieces)] == rows


def bodies_of_pipe(monkeypatch: pytest.MonkeyPatch, form: str, pieces: list[Any]) -> list[str]:
    """Each piece is what a read of the pipe gives, if it asks for so much."""
    left = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def read(source: Input, size: int) -> bytes:
        data = left.pop(0) if left else b""
        if len(data) > size:
            left.insert(0, data[size:])
        source._is_over = not data
        return data[:size]

    monkeypatch.setattr(Input, "read", read)
    pipe = os.pipe()
    try:
        rows = list(Source(f"/dev/fd/{pipe[0]}", form, None, Wanted((), None)).rows())
    finally:
        for descriptor in pipe:
            os.close(descriptor)
    return [body.decode() for part in rows for body in part.body.to_pylist()]


@pytest.mark.parametrize("columns", [{"kkkkkk": ["1"]}, {"k": [{"kkkkkk": 1}]}], ids=["column", "field"])
def test_a_parquet_file_whose_names_are_not_utf_8_is_told_in_a_line(tmp_path: Path, columns: dict[str, Any]) -> None:
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table(columns), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"kkkkkk", b"kk\xff\xfekk"))
    done = call("ingest", tmp_path / "s", path, *TOPIC)
    assert_error(done, 2, str(path), "utf-8")
    assert len(done.notes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "part", "told"), [
    ("", ",", "the header repeats ''"), ("", '"a",', "the header repeats 'a'"),
    ('"', "a", "the header: a quoted name has no end"), ('"', '""', "the header: a quoted name has no end"),
], ids=["commas", "names", "letters", "quotes"])  # fmt: skip
def test_a_header_without_end_takes_little_memory_for_each_byte(tmp_path: Path, begin: str, part: str,
                                                                told: str) -> None:  # fmt: skip
    """Names take some; no turn of a loop over them is kept."""
    size = 1 << 19
    (tmp_path / "x.csv").write_text(begin + part * (size // len(part)))
    tracemalloc.start()
    try:
        done = call("ingest", tmp_path / "s", tmp_path / "x.csv", *TOPIC, "--key-column", "k")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_error(done, 2, told)
    assert peak < 40 * size


@pytest.mark.parametrize("pieces", [
    ["a,b\r\n1,2\r\n", "\r", "\n", "3,4\r\n5,6\r\n"], ["a,b\n1,2\n", "\n", "\n", "3,4\n5,6\n"],
], ids=["CRLF", "LF"])  # fmt: skip
def test_a_pipe_may_give_a_blank_line_in_pieces(monkeypatch: pytest.MonkeyPatch, pieces: list[str]) -> None:
    """Each is a block, and one without rows would be the end."""
    expected = [f'{{"a":"{a}","b":"{b}"}}' for a, b in ((1, 2), (3, 4), (5, 6))]
    assert bodies_of_pipe(monkeypatch, "csv", pieces) == expected


def test_a_long_row_of_jsonl_may_come_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ['{"a":"1"}\n{"a":"', *["x" * 1000] * 500, '"}\n{"a":"2"}', "\n", '{"a":"3"}']
    found = bodies_of_pipe(monkeypatch, "jsonl", pieces)
    assert found == ['{"a":"1"}', '{"a":"%s"}' % ("x" * 500_000), '{"a":"2"}', '{"a":"3"}']
