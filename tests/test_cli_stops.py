# SPDX-License-Identifier: Apache-2.0
"""Verbs that Ctrl-C or SIGTERM stops: what is kept, what is cleaned up, and the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commandline import COMMAND, finish, start, wait_until_idle
from test_cli_terminal import CONFIG, assert_holds_the_first, count_of, table

import rmq

pytestmark = pytest.mark.slow

STOPS = pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"),
                                                             (signal.SIGTERM, 143, "SIGTERM")])  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("sent", [0, 300_000])
@STOPS
def test_ingest_of_a_pipe_that_has_gone_silent_stops(tmp_path: Path, form: str, sent: int, number: int, code: int,
                                                     name: str) -> None:  # fmt: skip
    process = start("ingest", tmp_path / "s", "-", "--format", form, "--topic", "T", stdin=subprocess.PIPE)
    assert process.stdin
    row = "{0},customer {0}\n" if form == "csv" else '{{"id":"{0}"}}\n'
    head = "id,name\n" if form == "csv" else ""
    process.stdin.write((head + "".join(map(row.format, range(sent)))).encode())
    process.stdin.flush()
    wait_until_idle(process)
    process.send_signal(number)
    try:
        assert process.wait(5) == code
    finally:
        process.kill()
    done = finish(process)
    stored = count_of(done.err, rf"^rmq: stopped by {name}; ([\d,]+) messages? stored before[;\n]")
    assert_holds_the_first(tmp_path / "s", stored)


@STOPS
def test_ingest_that_waits_for_the_writer_of_a_fifo_stops(tmp_path: Path, number: int, code: int, name: str) -> None:
    os.mkfifo(tmp_path / "x.csv")
    process = start("ingest", tmp_path / "s", tmp_path / "x.csv", "--topic", "T")
    wait_until_idle(process)
    process.send_signal(number)
    done = finish(process, patience=5)
    assert (done.code, done.err.count("\n") <= 1) == (code, True), done


@pytest.mark.parametrize(("file", "sent"), [("x.csv", b"i"), ("x.csv", b'id,"v'), ("x.parquet", b"")])
@STOPS
def test_ingest_of_a_fifo_that_is_still_being_opened_stops(tmp_path: Path, file: str, sent: bytes, number: int,
                                                           code: int, name: str) -> None:  # fmt: skip
    """What came until then is no header, and no file."""
    os.mkfifo(tmp_path / file)
    process = start("ingest", tmp_path / "s", tmp_path / file, "--topic", "T", "--key-column", "id")
    writer = os.open(tmp_path / file, os.O_WRONLY)
    os.write(writer, sent)
    wait_until_idle(process)
    process.send_signal(number)
    done = finish(process, patience=5)
    os.close(writer)
    assert (done.code, f"stopped by {name}" in done.err) == (code, True), done


@STOPS
def test_a_second_signal_leaves_a_store_that_opens(tmp_path: Path, number: int, code: int, name: str) -> None:
    process = start("ingest", tmp_path / "s", table(tmp_path / "x.csv", 1_500_000), "--topic", "T")
    while process.poll() is None and not list(tmp_path.glob("s/commitlog/*")):
        time.sleep(0.01)
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.05)
    done = finish(process)
    assert done.code in (code, -number)
    assert done.err.count("\n") <= 1
    with rmq.open(tmp_path / "s", "r+") as store:
        stored = sum(high for _, high in store.topics().get("T", {}).values())
    assert_holds_the_first(tmp_path / "s", stored)


@STOPS
def test_an_export_that_is_stopped_leaves_nothing(tmp_path: Path, number: int, code: int, name: str) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        for _ in range(12):
            store.put_many([rmq.Message("T", os.urandom(1000))] * 20_000)
    process = start("export", tmp_path / "s", tmp_path / "out", "--processes", "2")
    while process.poll() is None and not list(tmp_path.glob(".rmq-export-*/*/*")):
        time.sleep(0.01)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.out, done.err) == (code, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@STOPS
def test_a_second_signal_ends_an_export_and_its_processes(tmp_path: Path, number: int, code: int, name: str) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        for _ in range(12):
            store.put_many([rmq.Message("T", os.urandom(1000))] * 20_000)
    for pause in (0.0, 0.02, 0.1):
        process = start("export", tmp_path / "s", tmp_path / "out", "--processes", "2")
        while process.poll() is None and not list(tmp_path.glob(".rmq-export-*/*/*")):
            time.sleep(0.01)
        process.send_signal(number)
        time.sleep(pause)
        process.send_signal(number)
        assert finish(process, patience=20).code in (code, -number)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["ingest", "cat"])
def test_a_signal_that_is_ignored_stays_so(tmp_path: Path, verb: str) -> None:
    """As shells have it of what they start in the background."""
    rmq.open(tmp_path / "s", "x", config=CONFIG).close()
    ignoring = ("sh", "-c", "trap '' TERM INT; exec \"$@\"", "sh", *COMMAND)
    arguments = ("-", "--format", "csv") if verb == "ingest" else ("T",)
    process = start(verb, tmp_path / "s", *arguments, *(["--topic", "T"] if verb == "ingest" else ["--follow"]),
                    command=ignoring, stdin=subprocess.PIPE)  # fmt: skip
    wait_until_idle(process)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    if verb == "ingest":
        done = finish(process, b"id\n1\n2\n")
        assert done.code == 0, done
        assert count_of(done.out, r'"stored": (\d+)') == 2
    else:
        process.kill()
        finish(process)


@pytest.mark.parametrize("arguments", [("cat", "--follow"), ("cat", "--follow", "-f", "{body}")])
@STOPS
def test_a_cat_that_follows_stops_without_a_word(tmp_path: Path, arguments: tuple[str, ...], number: int, code: int,
                                                 name: str) -> None:  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"first"))
    process = start(arguments[0], tmp_path / "s", "T", *arguments[1:])
    wait_until_idle(process)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.err) == (code, "")
    assert "first" in done.out


def test_a_pipe_that_cannot_be_read_on_ends_the_command_while_its_writer_lives_on(tmp_path: Path) -> None:
    """A thread of Arrow's waits for more of it: the interpreter must not end amid that."""
    process = start("ingest", tmp_path / "s", "-", "--format", "csv", "--topic", "T", stdin=subprocess.PIPE)
    assert process.stdin
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b'a,b\n1,2\n"' + b"x" * 15 + b"\n" + b"xxxxxxxxxxxxxxx\n" * 65536 * 14)
            process.stdin.flush()
        assert process.wait(60) == 2
    finally:
        process.kill()
