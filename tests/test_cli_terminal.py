# SPDX-License-Identifier: Apache-2.0
"""The command as a process of its own: on terminals, on pipes that close, beside writers, on full disks, stopped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import (
    PATIENCE_S,
    SGR,
    WRITER,
    Done,
    Tail,
    Terminal,
    assert_error,
    bodies,
    call,
    finish,
    on_terminal,
    run,
    start,
)
from forks import in_child
from rich.cells import cell_len
from test_disks import NOBODY, full, mounted

import rmq

pytestmark = pytest.mark.slow

NOW = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000,
                         max_hash_slot_num=100, max_index_num=10_000)  # fmt: skip
EVIL = "\x1b]0;title\x07 \x1b[31mred \x1b[2J \x9b31m \r \x08 \x00 \x7f \u202e rtl \u200b \x85"
TEXTS = ("plain", "日本語のテキスト、とても長い行です。" * 6, "😀👍🏽 é ñ", "x" * 5000, EVIL, "")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 orders: more than a pipe holds."""
    path = tmp_path_factory.mktemp("shop") / "s"
    with rmq.open(path, "a", config=CONFIG, clock=lambda: NOW) as store:
        store.put_many([rmq.Message("T", b"%05d" % i, keys=["all", f"k{i}"], queue_id=i % 4) for i in range(3000)])
    return path


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that are wide, long, or move a cursor, in every field that holds text."""
    path = tmp_path_factory.mktemp("evil") / "s"
    with rmq.open(path, "a", config=CONFIG, clock=lambda: NOW) as store:
        for text in TEXTS:
            key = text.replace(" ", "")
            store.put(rmq.Message("T", text.encode(), tags=text, keys=["all", key] if key else "all"))
        store.put(rmq.Message("T", EVIL.encode("latin-1", "replace"), keys="all"))
        store.put(rmq.Message("P", b"plain", keys="k", properties={"p\x9b": "\x9b31m \u202e"}))
        store.put(rmq.Message("K", b"plain", keys="k\x9b31m"))
        store.put(rmq.Message("a\x1b[31m\n\x9b", b"x", keys="k"))
    return path


def assert_tame(text: str, *, colours: bool = True) -> None:
    """Nothing but text, line ends, and colours where a table may have them."""
    rest = SGR.sub("", text) if colours else text
    wild = sorted({c for c in rest if c != "\n" and not c.isprintable()})
    assert not wild, f"{wild} in {text!r}"


def looks(store: Path) -> list[list[object]]:
    return [["info", store], ["topics", store], ["cat", store, "T"], ["query", store, "T", "all"], ["get", store, "0"],
            *(["get", store, f"T/0/{number}"] for number in (1, 4))]  # fmt: skip


# ---- terminals -------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_table_and_a_pipe_jsonl(shop: Path) -> None:
    for arguments in (["info", shop], ["topics", shop], ["cat", shop, "T", "--limit", 1], ["get", shop, "0"]):
        assert [line for line in on_terminal(*arguments).out.split("\n") if line.startswith("{")] == []
        assert json.loads(run(*arguments).out.split("\n")[0])
        assert "\x1b" not in run(*arguments, "-o", "table", extra={"COLUMNS": "80"}).out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_wild_reaches_it(evil: Path, columns: int) -> None:
    for arguments in looks(evil):
        done = on_terminal(*arguments, columns=columns)
        assert done.code == 0, done.out
        assert_tame(done.out)
        assert max(cell_len(line) for line in SGR.sub("", done.out).split("\n")) <= columns, arguments


@pytest.mark.parametrize("options", [["-o", "jsonl"], ["-o", "csv"], ["-f", "{tags} {keys} {properties} {body}"]],
                         ids=" ".join)  # fmt: skip
def test_nothing_wild_reaches_a_terminal_in_any_form(evil: Path, options: list[str]) -> None:
    topics = [["cat", evil, topic] for topic in ("T", "P", "K", "a\x1b[31m\n\x9b")]
    for arguments in [*topics, *([["topics", evil], ["get", evil, "P/0/0"]] if options[0] == "-o" else [])]:
        done = on_terminal(*arguments, *options)
        assert done.code == 0, done.out
        assert_tame(done.out, colours=False)
        if options[1] == "jsonl":
            exact = [json.loads(line) for line in run(*arguments).out.split("\n")[:-1]]
            assert [json.loads(line) for line in done.out.split("\n")[:-1]] == exact


def test_nothing_wild_of_an_argument_reaches_a_terminal(evil: Path) -> None:
    wild = "x\x1b[31m\n\x9b\u202e"
    for arguments in ([wild], ["info", wild], ["topics", evil, wild], ["query", evil, "T", wild], ["get", evil, wild],
                      ["cat", evil, "T", "--from", wild], ["ingest", evil, wild, "--topic", "T"],
                      ["cat", evil, "T", "-f", "{" + wild + "}"]):  # fmt: skip
        done = on_terminal(*arguments)
        assert done.code in (1, 2, 4)
        assert done.out.startswith("rmq: ")
        assert done.out.count("\n") == 1
        assert_tame(done.out, colours=False)


def test_nothing_wild_of_a_warning_reaches_a_terminal(tmp_path: Path) -> None:
    topic = "a\x1b[31m\n\x9b"
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=200)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        store.put_many([rmq.Message(topic, b"%d" % i) for i in range(40)])
    (tmp_path / "s/consumequeue" / topic / "0" / f"{600:020d}").unlink()
    done = on_terminal("info", tmp_path / "s", "-o", "jsonl")
    assert (done.code, "lost units" in done.out) == (0, True)
    assert_tame(done.out)
    assert all(line.startswith(("rmq: ", "{")) for line in done.out.split("\n")[:-1]), "each warning is one line"


@pytest.mark.parametrize("extra", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_color_and_a_dumb_terminal_get_plain_text(evil: Path, extra: dict[str, str]) -> None:
    for arguments in looks(evil)[:5]:
        done = on_terminal(*arguments, extra=extra)
        assert done.code == 0
        assert "\x1b" not in done.out, done.out


@pytest.mark.parametrize("form", ["table", "jsonl", "csv"])
def test_a_terminal_that_knows_ascii_only_gets_escapes(evil: Path, form: str) -> None:
    for arguments in looks(evil)[:4]:
        done = on_terminal(*arguments, "-o", form, extra={"PYTHONIOENCODING": "ascii"})
        assert (done.code, SGR.sub("", done.out).isascii()) == (0, True), done.out


def test_ctrl_c_ends_a_followed_table(shop: Path) -> None:
    terminal = Terminal("cat", shop, "T", "--follow", "-q", 0)
    terminal.wait_for("02996")
    terminal.press(b"\x03")
    done = terminal.finish()
    assert done.code == 130
    assert done.out.endswith("02996\n^C")


# ---- one command under two names -------------------------------------------------------------------------


def test_the_module_and_the_entry_point_say_the_same(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "rmq").write_text("import sys\nfrom rmq.cli import main\nsys.exit(main())\n")
    entry = (sys.executable, str(tmp_path / "rmq"))
    for arguments in (["--help"], ["--version"], [], ["info", shop], ["topics", shop, "x"], ["cat", "--help"], ["nope"],
                      ["cat", shop, "T", "--limit", 3], ["query", shop, "T", "k5", "-o", "csv"]):  # fmt: skip
        assert run(*arguments, command=entry) == run(*arguments), arguments
    extra = {"_RMQ_COMPLETE": "bash_complete", "COMP_WORDS": f"rmq cat {shop} ", "COMP_CWORD": "3"}
    assert run(command=entry, extra=extra) == run(extra=extra) == Done(0, "plain,T\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "rmq").write_text(f'#!/bin/sh\nexec {sys.executable} -m rmq "$@"\n')
    (tmp_path / "rmq").chmod(0o755)
    script = f"""PATH={tmp_path}:$PATH; complete() {{ :; }}; eval "$(rmq completion bash)"
        COMP_WORDS=(rmq query {shop} T); COMP_CWORD=3; _rmq_completion rmq; echo "${{COMPREPLY[@]}}" """
    assert finish(start(command=("bash", "-c", script))).out == "T\n"


# ---- pipes that close ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["cat", "T"], ["cat", "T", "-o", "csv"], ["cat", "T", "-o", "table"],
                                       ["cat", "T", "-f", "{body} {properties}" + "x" * 200], ["cat", "T", "--follow"],
                                       ["query", "T", "all", "--limit", "all"]], ids=" ".join)  # fmt: skip
def test_a_closed_pipe_ends_the_command_quietly(shop: Path, arguments: list[str]) -> None:
    process = start(arguments[0], shop, *arguments[1:])
    assert process.stdout
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert finish(process) == Done(141, "", "")


def test_follow_ends_when_nobody_reads_any_more(shop: Path) -> None:
    process = start("cat", shop, "T", "--follow", "--limit", 5000, "-f", "{queue_offset}")
    assert process.stdout
    for _ in range(3000):
        assert process.stdout.readline()
    time.sleep(0.5)
    assert process.poll() is None
    process.stdout.close()
    process.stdout = None
    assert finish(process, patience=5) == Done(141, "", "")


COMMANDS: list[list[str]] = [["--version"], ["--help"], ["cat", "--help"], ["completion", "bash"], ["info", "SHOP"],
                             ["cat", "SHOP", "T"], ["topics", "SHOP", "-o", "table"], ["get", "SHOP", "0"]]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_under_stdout_is_one_line(shop: Path, arguments: list[str]) -> None:
    with open("/dev/full", "wb") as sink:
        done = run(*(str(shop) if word == "SHOP" else word for word in arguments), stdout=sink)
    assert_error(done, 4, "No space left on device")


@pytest.mark.parametrize("arguments", [*COMMANDS, ["info", "nowhere"]], ids=" ".join)
@pytest.mark.parametrize("closed", [1, 2])
def test_a_stdout_or_stderr_that_was_closed_from_the_start_is_no_traceback(shop: Path, arguments: list[str],
                                                                           closed: int) -> None:  # fmt: skip
    words = [str(shop) if word == "SHOP" else word for word in arguments]
    done = run(*words, command=("sh", "-c", f'exec "$0" -m rmq "$@" {closed}>&-', sys.executable))
    assert "Traceback" not in done.err
    wanted = {4} if arguments[1:] == ["nowhere"] else {0} if closed == 2 else {0, 4, 141}
    assert done.code in wanted, done


# ---- beside a writer -------------------------------------------------------------------------------------

@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a writer of `count` messages that holds the store until its stdin closes."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(first: int, count: int, *, queues: int = 2, topic: str = "T") -> subprocess.Popen[bytes]:
        words = (tmp_path / "s", first, count, queues, topic)
        process = start(*words, command=(sys.executable, "-c", WRITER), stdin=subprocess.PIPE)
        running.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


def end_of(writer: subprocess.Popen[bytes]) -> None:
    assert writer.stdout
    assert writer.stdout.readline() == b"done\n"
    assert writer.stdin
    writer.stdin.close()
    assert writer.wait(PATIENCE_S) == 0


def test_follow_shows_every_message_of_another_process_once_and_in_order(tmp_path: Path, write: Any) -> None:
    writer = write(0, 300)
    tails = [Tail(tmp_path / "s", "T"), Tail(tmp_path / "s", "T", "-q", 1), Tail(tmp_path / "s", "T", "--tags", "A"),
             Tail(tmp_path / "s", "Later"), Tail(tmp_path / "s", "T", "-q", 3)]  # fmt: skip
    end_of(writer)
    end_of(write(300, 300, queues=4))  # two queues that were not there
    end_of(write(1000, 50, topic="Later"))
    wanted = [range(600), [*range(1, 300, 2), *range(301, 600, 4)], range(0, 600, 2), range(1000, 1050),
              range(303, 600, 4)]  # fmt: skip
    for tail, numbers in zip(tails, map(list, wanted), strict=True):
        tail.wait_for(len(numbers))
        done = tail.stop()
        assert (done.code, done.out) == (130, "")
        assert all("yet, --follow waits for it" in note for note in done.notes), "what began before its topic was there"
        assert sorted(tail.numbers) == numbers, "each once"
        by_queue = [[n for n in tail.numbers if n % 4 == queue_id and n >= 300] for queue_id in range(4)]
        assert all(part == sorted(part) for part in by_queue)


def test_follow_goes_on_after_a_writer_was_killed(tmp_path: Path, write: Any) -> None:
    writer = write(0, 100)
    assert writer.stdout.readline() == b"done\n"
    tail = Tail(tmp_path / "s", "T")
    tail.wait_for(100)
    writer.kill()
    writer.wait()
    end_of(write(100, 100))
    tail.wait_for(200)
    assert tail.stop() == Done(130, "", "")
    assert tail.numbers == list(range(200))


def test_follow_with_a_limit_or_a_time_ends_or_begins_there(tmp_path: Path, write: Any) -> None:
    end_of(write(0, 50))
    late = Tail(tmp_path / "s", "T", "--from", "now")
    limited = Tail(tmp_path / "s", "T", "--limit", 70)
    limited.wait_for(50)
    time.sleep(0.5)
    end_of(write(50, 50))
    late.wait_for(50)
    assert late.stop().code == 130
    assert limited.process.wait(PATIENCE_S) == 0
    assert late.numbers == list(range(50, 100))
    assert sorted(limited.numbers) == list(range(70))
    limited.stop()


def test_reading_verbs_work_beside_a_writer_and_ingest_is_refused(tmp_path: Path, write: Any) -> None:
    writer = write(0, 200)
    assert writer.stdout.readline() == b"done\n"
    path = tmp_path / "s"
    assert run("info", path).rows[0]["state"] == "open"
    assert [row["max_queue_offset"] for row in run("topics", path).rows] == [100, 100]
    assert len(run("cat", path, "T").rows) == 200
    assert run("query", path, "T", "k199").code == run("get", path, "T/1/99").code == 0
    (tmp_path / "x.csv").write_text("a\n1\n")
    assert_error(run("ingest", path, tmp_path / "x.csv", "--topic", "T"), 4, f"process {writer.pid}")
    assert len(run("cat", path, "T").rows) == 200


# ---- rights ----------------------------------------------------------------------------------------------


def test_a_store_without_rights(shop: Path, tmp_path: Path) -> None:
    """As another user when this one is root, to whom nothing is forbidden."""
    root = Path(tempfile.mkdtemp(prefix="rmq-user-"))
    try:
        shutil.copytree(shop, root / "s")
        (root / "x.csv").write_text("a\n1\n")
        for entry in [root, *root.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)

        def refused(*arguments: object) -> Done:
            store = tmp_path / "s" if arguments[0] == "ingest" else shop
            call(arguments[0], store, *arguments[2:])  # loads every module: they too may be out of that user's reach
            done: Done = in_child(lambda: call(*arguments), user=NOBODY)
            return done

        assert len(refused("cat", root / "s", "T").rows) == 3000
        assert refused("info", root / "s").rows[0]["state"] == "closed"
        for target in ("s", "new"):
            done = refused("ingest", root / target, root / "x.csv", "--topic", "T")
            assert_error(done, 4, str(root / target), "Permission denied")
        for part, verb in (("commitlog", ["cat", "T"]), ("consumequeue", ["cat", "T"]), ("index", ["query", "T", "k1"]),
                           (".", ["info"]), (".", ["topics"])):  # fmt: skip
            (root / "s" / part).chmod(0)
            done = refused(verb[0], root / "s", *verb[1:])
            assert_error(done, 4, str((root / "s" / part).resolve()), "Permission denied")
            (root / "s" / part).chmod(0o555)
        (root / "x.csv").chmod(0)
        assert_error(refused("ingest", root / "s", root / "x.csv", "--topic", "T"), 4, "x.csv: Permission denied")
    finally:
        for entry in [root, *root.rglob("*")]:
            entry.chmod(0o755)
        shutil.rmtree(root)


# ---- ingest: full disks, Ctrl-C, progress ----------------------------------------------------------------


def table(path: Path, count: int) -> Path:
    path.write_text("id,name\n" + "".join(f"{i},customer {i}\n" for i in range(count)))
    return path


def assert_holds_the_first(store: Path, count: int) -> None:
    """The first rows of table(), each once and in order; the store was closed cleanly and goes on."""
    assert [int(json.loads(body)["id"]) for body in bodies(store)] == list(range(count))
    with rmq.open(store, "r+") as opened:
        assert opened.info().state == "open"
        opened.put(rmq.Message("T", b"more"))
    with rmq.open(store) as opened:
        assert opened.info().state == "closed"


def count_of(line: str, pattern: str) -> int:
    found = re.search(pattern, line)
    assert found, line
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("leave", [0, 100_000, 1_000_000])
def test_a_full_disk_stops_ingest_and_the_count_is_what_is_kept(tmp_path: Path, leave: int) -> None:
    rows = table(tmp_path / "x.csv", 100_000)
    with mounted("size=8m") as path:
        config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=100, max_index_num=500)
        rmq.open(path / "s", "a", config=config).close()
        with full(path, leave):
            done = run("ingest", path / "s", rows, "--topic", "T", "--key-column", "id")
        assert_error(done, 4, "No space left on device", *(["stored before"] if leave else []))
        stored = count_of(done.err, r"; ([\d,]+) messages? stored before") if "stored" in done.err else 0
        assert_holds_the_first(path / "s", stored)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_ctrl_c_stops_ingest_and_the_count_is_what_is_kept(tmp_path: Path, form: str) -> None:
    rows = table(tmp_path / "x.csv", 1_500_000)
    if form == "jsonl":
        lines = (f'{{"id":"{i}"}}\n' for i in range(1_500_000))
        rows = tmp_path / "x.jsonl"
        rows.write_text("".join(lines))
    terminal = Terminal("ingest", tmp_path / "s", rows, "--topic", "T")
    terminal.wait_for(" rows, ")
    terminal.press(b"\x03")
    done = terminal.finish()
    assert done.code == 130
    last = done.out.rstrip("\n").split("\n")[-1]
    stored = count_of(last, r"^rmq: stopped by Ctrl-C; ([\d,]+) messages stored before; ")
    assert last.endswith(f"; --skip-rows {stored} goes on behind them")
    assert 0 < stored < 1_500_000
    assert_holds_the_first(tmp_path / "s", stored)


def frames(text: str) -> list[tuple[int, int]]:
    """(percent, rows) of each state of the bar."""
    return [(int(percent), int(rows.replace(",", "")))
            for percent, rows in re.findall(r"(\d+)% +([\d,]+) rows, [\d,]+/s", SGR.sub("", text))]  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_progress_shows_rows_a_second_and_the_time_left(tmp_path: Path, form: str) -> None:
    total = 4_000_000  # some seconds: a frame comes now and then
    row = "{0},customer {0},{0}{0}{0}\n" if form == "csv" else '{{"id":"{0}","name":"customer {0}","x":"{0}{0}"}}\n'
    path = tmp_path / f"x.{form}"
    path.write_text(("id,name,x\n" if form == "csv" else "") + "".join(map(row.format, range(total))))
    done = on_terminal("ingest", tmp_path / "s", path, "--topic", "T")
    assert done.code == 0
    assert re.search(r"rows, [\d,]+/s (\d:\d\d:\d\d|-:--:--)", SGR.sub("", done.out)), "rows/s and time left"
    seen = frames(done.out)
    assert len(seen) > 3
    assert all(abs(percent / 100 - rows / total) < 0.25 for percent, rows in seen), seen
    assert re.search(rf"stored +{total:,} messages in [\d.]+ s \([\d,]+ a second\)\n", SGR.sub("", done.out))


def test_progress_fits_40_columns_and_keeps_to_stderr(tmp_path: Path) -> None:
    rows = table(tmp_path / "x.csv", 600_000)
    done = on_terminal("ingest", tmp_path / "s", rows, "--topic", "T", columns=40)
    assert done.code == 0
    assert re.search(r"[\d,]+/s (\d:\d\d:\d\d|-:--:--)", SGR.sub("", done.out)), "the time left is not cut"
    terminal = Terminal("ingest", tmp_path / "s", rows, "--topic", "T", stdout=subprocess.PIPE)
    assert terminal.process.stdout
    (answer,) = terminal.process.stdout.read().decode().split("\n")[:-1]
    assert json.loads(answer)["stored"] == 600_000
    assert frames(terminal.finish().out)
    assert run("ingest", tmp_path / "s", rows, "--topic", "T").err == ""
    plain = on_terminal("ingest", tmp_path / "s", rows, "--topic", "T", extra={"NO_COLOR": "1"})
    assert not SGR.findall(plain.out)
    assert "\x1b" not in on_terminal("ingest", tmp_path / "s", rows, "--topic", "T", extra={"TERM": "dumb"}).out
