# SPDX-License-Identifier: Apache-2.0
"""The command `rmq` for tests: in this process, in a process on pipes, on a terminal of its own."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import rmq
from rmq.cli import main

PATIENCE_S = 30
COMMAND = (sys.executable, "-m", "rmq")
SGR = re.compile(r"\x1b\[[\d;]*m")  # colours and bold: the only escape sequences of a table


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What jsonl says."""
        assert self.out.endswith("\n") or not self.out
        return [json.loads(line) for line in self.out.split("\n")[:-1]]

    @property
    def table(self) -> list[dict[str, str]]:
        """What csv says."""
        return list(csv.DictReader(io.StringIO(self.out, newline="")))

    @property
    def notes(self) -> list[str]:
        return self.err.split("\n")[:-1]


def call(*args: object, input: bytes | None = None) -> Done:
    """The command in this process. Anything but an end of its own is raised: a person would see a traceback."""
    words = [str(arg) for arg in args]
    result = CliRunner().invoke(main, words, input=input, prog_name="rmq", catch_exceptions=False)
    return Done(result.exit_code, result.stdout_bytes.decode(), result.stderr_bytes.decode())


def good(*args: object, input: bytes | None = None) -> Done:
    """The same, and it must end with 0."""
    done = call(*args, input=input)
    assert done.code == 0, done.err
    return done


def assert_error(done: Done, code: int, *parts: str) -> None:
    """One line on stderr that has these parts, nothing on stdout."""
    assert (done.code, done.out) == (code, ""), done
    assert done.err.startswith("rmq: "), done.err
    assert done.err.count("\n") == 1, done.err
    assert done.err[:-1].isprintable(), done.err
    for part in parts:
        assert part in done.err, f"{part!r} is not in {done.err!r}"


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """That of a plain terminal, with the rmq under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
            and name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "TTY_COMPATIBLE")}  # fmt: skip
    path = os.pathsep.join([str(Path(rmq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": path, "LC_ALL": "C.UTF-8", **(extra or {})}


def start(*args: object, command: Sequence[str] = COMMAND, extra: dict[str, str] | None = None,
          **options: Any) -> subprocess.Popen[bytes]:  # fmt: skip
    """The command as a process on pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *map(str, args)], env=environment(extra), **(pipes | options))


def finish(process: subprocess.Popen[bytes], input: bytes | None = None, patience: float = PATIENCE_S) -> Done:
    """Wait for its end; TimeoutExpired, and it is killed, when there is none."""
    try:
        out, err = process.communicate(input, timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Done(process.returncode, (out or b"").decode(), (err or b"").decode())


def run(*args: object, **options: Any) -> Done:
    return finish(start(*args, **options))


class Terminal:
    """The command on a terminal of its own, which it controls: Ctrl-C is a key."""

    def __init__(self, *args: object, columns: int = 80, extra: dict[str, str] | None = None,
                 command: Sequence[str] = COMMAND, **options: Any) -> None:  # fmt: skip
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        ends = {"stdin": slave, "stdout": slave, "stderr": slave} | options
        self.process = subprocess.Popen(
            [*command, *map(str, args)], env=environment(extra), start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0), **ends)  # fmt: skip
        os.close(slave)
        self._data = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._data += data
        except OSError:  # a terminal that nobody has open any more
            pass

    @property
    def text(self) -> str:
        """Everything that was written so far, escape sequences too."""
        return self._data.decode().replace("\r\n", "\n")

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: str, patience: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience
        while text not in self.text:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text}"
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            time.sleep(0.01)

    def finish(self, patience: float = PATIENCE_S) -> Done:
        """Wait for its end; out is all that the terminal got."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join()
            os.close(self._master)
        return Done(code, self.text, "")


def on_terminal(*args: object, **options: Any) -> Done:
    return Terminal(*args, **options).finish()


def bodies(path: Path, topic: str = "T") -> list[bytes]:
    """Bodies of a topic in log order."""
    with rmq.open(path) as store:
        return [body for batch in store.scan(topics=[topic], columns=["body"]) for body in batch["body"].to_pylist()]


FIELDS = {"topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "reconsume_times", "body_crc",
          "prepared_transaction_offset", "born_host", "store_host", "tags", "uniq_key", "offset_msg_id",
          "properties"}  # fmt: skip


def ms_of(text: str) -> int:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text), text
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def assert_shows(row: dict[str, Any], message: rmq.StoredMessage) -> None:
    """Every field, exact."""
    assert {name: row[name] for name in FIELDS} == {name: getattr(message, name) for name in FIELDS}
    assert row["keys"] == list(message.keys)
    body = row["body"].encode() if row["body_encoding"] == "utf-8" else bytes.fromhex(row["body"])
    assert body == message.body
    for name in ("store_timestamp", "born_timestamp"):
        value = getattr(message, name)
        in_reach = datetime(1, 1, 1, tzinfo=UTC).timestamp() <= value / 1000 < datetime.max.timestamp()
        assert (ms_of(row[name]) if in_reach else row[name]) == value
    assert row.keys() == FIELDS | {"keys", "body", "body_encoding", "store_timestamp", "born_timestamp"}


# ---- another process that writes, and one that follows --------------------------------------------------

WRITER = """
import sys, time, rmq
path, first, count, queues, topic = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
config = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=2000, max_hash_slot_num=100,
                         max_index_num=500)
with rmq.open(path, "a", config=config) as store:
    print("ready", flush=True)
    for i in range(first, first + count):
        body = b"%05d" % i + b"x" * (i % 50)
        store.put(rmq.Message(topic, body, keys=f"k{i}", tags="AB"[i % 2], queue_id=i % queues))
        if i % 7 == 0:
            time.sleep(0.01)
    print("done", flush=True)
    sys.stdin.read()
"""


class Tail:
    """`rmq cat --follow` on a pipe."""

    def __init__(self, *arguments: object) -> None:
        self.process = start("cat", *arguments, "--follow", "-f", "{body:.5}")
        self.numbers: list[int] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.numbers.append(int(line))

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.numbers) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> Done:
        self.process.send_signal(signal.SIGINT)
        self._thread.join(PATIENCE_S)
        assert self.process.stdout
        self.process.stdout.close()
        self.process.stdout = None
        return finish(self.process)


# ---- files of rows, and what Python's own modules read from them -----------------------------------------


def csv_rows(data: bytes, delimiter: str = ",") -> tuple[list[tuple[int, dict[str, str]]], list[int]]:
    """(number, row) of the rows that fit the header, the numbers of the others: as Python's csv module reads them."""
    head, *rest = [row for row in csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter) if row]
    numbered = list(enumerate(rest, 1))
    return ([(number, dict(zip(head, row, strict=True))) for number, row in numbered if len(row) == len(head)],
            [number for number, row in numbered if len(row) != len(head)])  # fmt: skip


CELLS = ("", "x", "1", "a b", '"q"', '"q,r"', '"l\nm"', '"l\r\nm"', '"\r\n"', '""""', "é", '"é😀"', "\x00", " s ",
         '"a"b', 'a"b', "NULL", '""', "'", "\t", "x" * 20, "\\", "nan", "\ufeff", "\u2028")  # fmt: skip


HEADERS = ("a,b,c", '"a",b,c', 'a,"x\ny",c', 'a,"x""y",', 'a,5" pipe,c', 'a"b,c,a', '"",x"y,a', 'a, "b",c')


def random_csv(rng: random.Random) -> bytes:
    lines = [rng.choice(HEADERS), "x,y,z"]
    for _ in range(rng.randrange(60)):
        cells = rng.choices((3, 2, 4, 1, 0), (40, 2, 2, 1, 1))[0]
        lines.append(",".join(rng.choice(CELLS) for _ in range(cells)))
    end = rng.choice(("\n", "\r\n"))
    return (end.join(lines) + rng.choice(("", end))).encode()


def random_jsonl(rng: random.Random) -> bytes:
    values = ['"x"', '"é"', '"\\u00e9"', "1", "1.5", "null", "true", "[1,2]", '{"k":1}', '""', '"a\\nb"',
              '"\\ud83d\\ude00"', "123456789012345678901"]  # fmt: skip
    odd = [b"", b" ", b"[]", b"3", b"nope", b'{"k":}', b'{"k":"a"}{"k":"b"}', b'{"k":', b'"a"}', b"\xff",
           b'{"k":"\xff"}', b"{}", b'{"k":"a","k":"b"}', b' {"k" : "s"}\t', b"null", b'{"k":"a"}null']  # fmt: skip
    lines = []
    for _ in range(rng.randrange(40)):
        name = rng.choice(("k", "k", "n"))
        lines.append(rng.choice(odd) if rng.random() < 0.1 else f'{{"{name}":{rng.choice(values)}}}'.encode())
    end = rng.choice((b"\n", b"\r\n"))
    return rng.choice((b"", b"\xef\xbb\xbf")) + end.join(lines) + rng.choice((b"", end))


def jsonl_rows(data: bytes) -> tuple[list[tuple[int, bytes, Any]], list[int]]:
    """(number, body, key) of the lines that are objects, and the numbers of those that are none."""
    kept, bad = [], []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip(b" \t\r"):
            continue
        try:
            row = json.loads(line.decode())
            assert isinstance(row, dict)
        except (ValueError, AssertionError):
            bad.append(number)
            continue
        value = row.get("k")
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        kept.append((number, line.strip(b" \t\r"), text))
    return kept, bad


def wait_until_idle(process: subprocess.Popen[bytes]) -> None:
    """Until it has done what it can, and waits: two looks in a row find the same time spent."""
    stat, before = Path(f"/proc/{process.pid}/stat"), ["0", "0"]
    while (spent := stat.read_text().rpartition(")")[2].split()[11:13]) != before or spent == ["0", "0"]:
        before = spent
        time.sleep(0.4)
