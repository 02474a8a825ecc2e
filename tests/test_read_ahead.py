# SPDX-License-Identifier: Apache-2.0
"""Reading beside putting: order, errors, how far ahead, and that no thread stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from commandline import finish, start

from rmq.cli.ahead import DEPTH, read_ahead
from rmq.cli.sources import Source, Wanted


def never() -> None:
    pytest.fail("a read that ended by itself was woken")


def reading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rmq-read"]


@pytest.mark.parametrize("count", [0, 1, DEPTH, DEPTH + 1, 100])
def test_items_come_in_order_and_the_thread_ends(count: int) -> None:
    with read_ahead((number for number in range(count)), never) as items:
        assert list(items) == list(range(count))
    assert reading() == []


def test_no_more_than_a_few_items_are_made_ahead() -> None:
    made: list[int] = []

    def items() -> Generator[int, None, None]:
        for number in range(100):
            made.append(number)
            yield number

    with read_ahead(items(), lambda: None) as parts:
        assert next(parts) == 0
        time.sleep(0.05)
        assert len(made) <= DEPTH + 2
    assert reading() == []


def take_all(items: Generator[int, None, None], into: list[int]) -> None:
    with read_ahead(items, never) as parts:
        for item in parts:
            into.append(item)


def test_an_error_comes_after_what_stands_before_it() -> None:
    def items() -> Generator[int, None, None]:
        yield from range(5)
        raise OSError(5, "unreadable")

    taken: list[int] = []
    with pytest.raises(OSError, match="unreadable"):
        take_all(items(), taken)
    assert taken == list(range(5))
    assert reading() == []


def test_leaving_early_wakes_a_read_that_waits() -> None:
    begin, end = os.pipe()

    def items() -> Generator[bytes, None, None]:
        yield b"first"
        while data := os.read(begin, 1):
            yield data

    with read_ahead(items(), lambda: os.close(end)) as parts:
        assert next(parts) == b"first"
    assert reading() == []
    os.close(begin)


def test_ctrl_c_while_the_thread_ends_waits_for_it_too() -> None:
    """Read by Arrow's threads, a stream must be closed before the interpreter goes."""
    is_closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield from range(10)
        finally:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            is_closed.set()

    with pytest.raises(KeyboardInterrupt), read_ahead(items(), lambda: None) as parts:
        assert next(parts) == 0
    assert is_closed.is_set()
    assert reading() == []


@pytest.mark.slow
def test_a_bad_row_ends_ingest_of_a_pipe_that_stays_open(tmp_path: Path) -> None:
    process = start("ingest", tmp_path / "s", "-", "--format", "jsonl", "--topic", "T", stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(b'{"id":"0"}\n[]\n')
    process.stdin.flush()
    try:
        assert process.wait(20) == 2
    finally:
        process.kill()
    assert "-: row 2: no JSON object; 1 message stored before" in finish(process).err


def parquet_rows(path: Path, count: int, size: int) -> Source:
    table = pa.table({"v": [f"{number:0{size}}" for number in range(count)]})
    pa.parquet.write_table(table, path, use_dictionary=False)
    return Source(str(path), None, None, Wanted((), "v"))


def test_a_parquet_file_that_is_left_early_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BATCH_ROWS", 10)
    with read_ahead(parquet_rows(tmp_path / "x.parquet", 1000, 10).rows(), lambda: None) as parts:
        assert next(parts).numbers.tolist() == list(range(1, 11))
    assert reading() == []


def test_long_rows_of_parquet_come_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.cli.sources.BATCH_BYTES", 10_000)
    parts = list(parquet_rows(tmp_path / "x.parquet", 95, 1000).rows())
    assert [number for part in parts for number in part.numbers.tolist()] == list(range(1, 96))
    assert {len(part.body) for part in parts[:-1]} == {9}
    monkeypatch.setattr("rmq.cli.sources.BATCH_BYTES", 1)
    assert {len(part.body) for part in parquet_rows(tmp_path / "x.parquet", 80, 10).rows()} == {8}
