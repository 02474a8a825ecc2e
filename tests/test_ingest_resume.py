# SPDX-License-Identifier: Apache-2.0
"""`rmq ingest --skip-rows`: a run that stopped goes on behind what it stored; no row is lost or put twice."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from commandline import assert_error, bodies, call, good

import rmq
from rmq.mappedfile import MappedFile

ADVICE = re.compile(r"; --skip-rows (\d+) goes on behind them\n$")
COUNT, BAD = 40, {3, 17, 18, 39}  # rows from 0; those that are broken
FORMS = ("csv", "csv.gz", "jsonl", "parquet")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 64)
    monkeypatch.setattr("rmq.cli.sources.BATCH_ROWS", 7)


def file_of(path: Path, rows: list[int], bad: set[int]) -> Path:
    """Rows {"n": number, "k": key}; of Parquet a bad one has a key with a space, of the others the row is none."""
    form = path.name.partition(".")[2]
    if form == "parquet":
        keys = [f"a b{n}" if n in bad else f"k{n}" for n in rows]
        pyarrow.parquet.write_table(pa.table({"n": rows, "k": keys}), path, row_group_size=9)
    elif form == "jsonl":
        path.write_text("".join("{\n" if n in bad else f'{{"n":{n},"k":"k{n}"}}\n\n' for n in rows))
    else:
        text = ("n,k\n" + "".join(f"{n}\n" if n in bad else f"{n},k{n}\n" for n in rows)).encode()
        path.write_bytes(gzip.compress(text) if form == "csv.gz" else text)
    return path


def numbers(store: Path) -> list[int]:
    return [int(json.loads(body)["n"]) for body in bodies(store)]


def ingest(store: Path, *rest: object) -> Any:
    return call("ingest", store, *rest, "--topic", "T", "--key-column", "k", "-o", "jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_first_rows_are_left_out_whether_they_are_sound_or_broken(tmp_path: Path, form: str) -> None:
    path = file_of(tmp_path / f"x.{form}", list(range(COUNT)), BAD)
    for count in (0, 1, 3, 4, 7, 8, 18, 19, 38, 39, 40):
        done = ingest(tmp_path / f"s{count}", path, "--skip-bad", "--skip-rows", count)
        left = [n for n in range(count, COUNT) if n not in BAD]
        assert (done.code, numbers(tmp_path / f"s{count}")) == (0, left)
        assert (done.rows[0]["stored"], done.rows[0]["skipped"]) == (len(left), COUNT - count - len(left))


def test_rows_are_counted_through_all_files(tmp_path: Path) -> None:
    paths = [file_of(tmp_path / f"{form}.{form}", list(range(first, first + 10)), {first + 2})
             for first, form in ((0, "csv"), (10, "jsonl"), (20, "parquet"))]  # fmt: skip
    assert ingest(tmp_path / "s", *paths, "--skip-bad", "--skip-rows", 13).code == 0
    assert numbers(tmp_path / "s") == [*range(13, 22), *range(23, 30)]


@pytest.mark.parametrize("form", FORMS)
def test_after_each_bad_row_is_mended_the_advice_stores_every_row_once(tmp_path: Path, form: str) -> None:
    path, store, bad, advised = tmp_path / f"x.{form}", tmp_path / "s", set(BAD), 0
    while bad:
        done = ingest(store, file_of(path, list(range(COUNT)), bad), "--skip-rows", advised)
        found = ADVICE.search(done.err)
        assert_error(done, 2, f"; {min(bad) - advised} message")
        assert found, done.err
        assert int(found[1]) == min(bad)
        advised = min(bad)
        bad.remove(advised)
    assert ingest(store, file_of(path, list(range(COUNT)), bad), "--skip-rows", advised).code == 0
    assert numbers(store) == list(range(COUNT))


@pytest.mark.parametrize(("bad", "keys"), [("5", []), ("\0", []), ('{"k":"a b"}', ["--key-column", "k"]),
                                           ('{"k":1.5}x', ["--key-column", "k"])])  # fmt: skip
def test_a_row_of_jsonl_has_the_number_that_skip_rows_counts_and_its_line(tmp_path: Path, bad: str,
                                                                          keys: list[str]) -> None:  # fmt: skip
    path, store = tmp_path / "x.jsonl", tmp_path / "s"
    path.write_text(f'{{"k":"1"}}\n\n \t\r\n{bad}\n{{"k":"2"}}\n\n{bad}\n{{"k":"3"}}')
    done = call("ingest", store, path, "--topic", "T", *keys)
    assert_error(done, 2, f"{path}: row 2 (line 4): ", "; 1 message stored before; --skip-rows 1 goes on behind them")
    done = good("ingest", store, path, "--topic", "T", *keys, "--skip-bad", "--skip-rows", 1)
    assert [note.partition(path.name)[2][:17] for note in done.notes] == [": row 2 (line 4):", ": row 4 (line 7):"]
    assert [json.loads(body)["k"] for body in bodies(store)] == ["1", "2", "3"]


def test_lines_are_counted_through_all_blocks(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(f'{{"n":{n},"k":"k"}}' + "\n" * (n % 3) for n in range(100)) + "\nnone\n")
    line = path.read_text().splitlines().index("none") + 1
    assert_error(ingest(tmp_path / "s", path), 2, f"row 101 (line {line}): no JSON")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("room", range(0, 38, 5))
def test_a_disk_that_was_full_loses_no_row_and_repeats_none(tmp_path: Path, form: str, room: int,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Bad rows of a part are told before its sound ones are put: those behind the last that was stored do not count."""
    path, real, left = file_of(tmp_path / f"x.{form}", list(range(COUNT)), BAD), rmq.Store.put_many, room

    def put_many(self: rmq.Store, rows: pa.RecordBatch, **options: Any) -> Any:
        nonlocal left
        fitting = min(left, rows.num_rows)
        stored = real(self, rows[:fitting], **options)
        left -= fitting
        if fitting < rows.num_rows:
            error = OSError(28, "No space left on device")
            error.stored = stored  # type: ignore[attr-defined]
            raise error
        return stored

    with monkeypatch.context() as patched:
        patched.setattr(rmq.Store, "put_many", put_many)
        done = ingest(tmp_path / "s", path, "--skip-bad")
    assert (done.code, len(numbers(tmp_path / "s"))) == (4, room)
    found = ADVICE.search(done.err)
    assert ingest(tmp_path / "s", path, "--skip-bad", "--skip-rows", found[1] if found else 0).code == 0
    assert numbers(tmp_path / "s") == [n for n in range(COUNT) if n not in BAD]


@pytest.mark.parametrize("advised", [20, 25])
def test_a_run_that_stops_again_among_the_rows_it_leaves_out_advises_no_fewer(tmp_path: Path, advised: int) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n":%d,"k":"k"}\n' % n for n in range(COUNT)))[:-9])
    done = ingest(tmp_path / "s", path, "--skip-rows", COUNT + advised)
    assert_error(done, 2, f"; 0 messages stored before; --skip-rows {COUNT + advised} goes on behind them")


@pytest.mark.parametrize("number", range(1, 7))
def test_what_a_failed_sync_left_in_the_log_is_not_stored_again(tmp_path: Path, number: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Each part is put, then synced."""
    store, path = tmp_path / "s", file_of(tmp_path / "x.parquet", list(range(COUNT)), set())
    (tmp_path / "broker.conf").write_text("flushDiskType=SYNC_FLUSH\n")
    real, left = MappedFile.sync, number

    def sync(self: MappedFile) -> None:
        nonlocal left
        left -= "commitlog" in self.path.parts
        if not left:
            raise OSError(5, "Input/output error")
        real(self)

    rmq.open(store, "x").close()
    with monkeypatch.context() as patched:
        patched.setattr(MappedFile, "sync", sync)
        done = ingest(store, path, "--conf", tmp_path / "broker.conf")
    found = ADVICE.search(done.err)
    assert done.code == 4, done
    assert ingest(store, path, "--skip-rows", found[1] if found else 0).code == 0
    assert numbers(store) == list(range(COUNT))


@pytest.mark.parametrize("skips", [False, True])
def test_illegal_rows_are_told_in_their_order_whatever_rule_they_break(
    tmp_path: Path, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put names a bad key before a body that is too large in an earlier row."""
    monkeypatch.setattr("rmq.cli.sources.BLOCK_SIZE", 2**22)
    rows = [{"n": n, "k": "a b" if n == 4 else "k", "x": "x" * (5_000_000 if n in (2, 5) else 1)} for n in range(7)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = ingest(tmp_path / "s", tmp_path / "x.jsonl", *(["--skip-bad"] if skips else []))
    if skips:
        assert (done.code, numbers(tmp_path / "s")) == (0, [0, 1, 3, 6])
        assert [note.split(": ")[2] for note in done.notes] == ["row 3", "row 5", "row 6"]
    else:
        assert_error(done, 2, "x.jsonl: row 3: body has ", "; 2 messages stored before; --skip-rows 2 goes on")
        assert numbers(tmp_path / "s") == [0, 1]


def test_queues_are_taken_in_turn_as_if_nothing_had_stopped(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.csv", list(range(20)), set())
    for first in (0, 10):
        rows = file_of(tmp_path / "y.csv", list(range(10)), set()) if not first else path
        good("ingest", tmp_path / "s", rows, "--topic", "T", "--queues", 3, "--skip-rows", first)
    with rmq.open(tmp_path / "s") as store:
        for queue in range(3):
            found = [int(json.loads(message.body)["n"]) for message in store.pull("T", queue, 0, 32).messages]
            assert found == list(range(queue, 20, 3))


def test_more_rows_than_there_are_is_said(tmp_path: Path) -> None:
    done = ingest(tmp_path / "s", file_of(tmp_path / "x.csv", [1, 2], set()), "--skip-rows", 3)
    assert (done.code, done.rows[0]["stored"]) == (0, 0)
    assert done.notes == ["rmq: --skip-rows 3: the input has 2 rows"]


@pytest.mark.parametrize("count", ["-1", "x", "1.5"])
def test_what_is_no_number_of_rows_is_a_usage_error(tmp_path: Path, count: str) -> None:
    done = ingest(tmp_path / "s", file_of(tmp_path / "x.csv", [1], set()), "--skip-rows", count)
    assert_error(done, 2, "--skip-rows")
    assert not (tmp_path / "s").exists()
