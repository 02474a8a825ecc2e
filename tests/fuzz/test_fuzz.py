"""What the fuzzer found stays fixed, its targets take any bytes, and a run of it finds nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from engine import Fault, Finding, Loop, Scratch, Target, mutated
from run import arguments, without
from stores import replay_store
from targets import TARGETS, mend_marks, mend_records, record_seeds

import rmq
from rmq.fastjson import parse_fastjson
from rmq.topics import merge_topics

FOLDER = Path(__file__).parent
CRASHES = sorted((FOLDER / "crashes").iterdir())
BY_NAME = {target.name: target for target in TARGETS}


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.message.PLAIN_BODY_LIMIT", 2**20)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("targets.root", lambda: place)
    place = tmp_path / "root"
    for name in ("rmq", "config"):
        (place / name).mkdir(parents=True)


@pytest.mark.parametrize("path", CRASHES, ids=lambda path: path.name)
def test_what_once_failed_does_not(path: Path) -> None:
    target, data = BY_NAME[path.name.split("-")[0]], path.read_bytes()
    target.run(data)
    if target.compare is not None:
        target.compare(data)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_parser_takes_seeds_and_their_mutations_and_reads_them_as_the_oracle_does(target: Target) -> None:
    random, seeds = Random(target.name), target.seeds()
    inputs = [*seeds, *(mutated(random.choice(seeds), seeds, random, target.mend) for _ in range(40))]
    for number, data in enumerate(inputs):
        target.run(data)
        if target.compare is not None and (number < len(seeds) or number % 4 == 0):
            target.compare(data)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_store_damaged_at_random_gives_what_it_held_or_an_error(seed: int) -> None:
    replay_store(seed.to_bytes(8, "big"))


@pytest.mark.fuzz
def test_a_run_under_asan_and_ubsan_finds_nothing(tmp_path: Path) -> None:
    """FUZZ_SECONDS long, 60 by default; the first one compiles the modules once more."""
    seconds = os.environ.get("FUZZ_SECONDS", "60")
    command = [FOLDER.parent.parent / "tools" / "fuzz.sh", "--seconds", seconds, "--jobs", "2"]
    done = subprocess.run([*command, "--findings", tmp_path / "findings"], check=False, capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable})  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:] + done.stdout
    assert "sanitized and guided by coverage" in done.stdout
    assert " 0 findings" in done.stdout


# ---- the fuzzer itself -------------------------------------------------------------------------------------


class Blocks:
    """Coverage of a parser in Python: each first byte is a block of its own."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.now = -1
        self.is_there = True
        self.edges = 0

    def begin(self) -> None:
        self.now = -1

    def end(self) -> int:
        fresh = self.now not in self.seen
        self.seen.add(self.now)
        return fresh


def loop_of(run: Callable[[bytes], object], path: Path, **fields: object) -> tuple[Loop, Blocks]:
    blocks = Blocks()

    def watched(data: bytes) -> None:
        blocks.now = data[0] if data else -1
        run(data)

    target = Target("t", lambda: [b"a"], watched, **fields)  # type: ignore[arg-type]
    loop = Loop(target, 0, blocks, Scratch(path / "scratch"), Random(5), 4)  # type: ignore[arg-type]
    loop.seed()
    return loop, blocks


def test_an_input_that_reaches_something_new_is_kept(tmp_path: Path) -> None:
    loop, blocks = loop_of(lambda data: None, tmp_path)
    loop.run(2000, float("inf"))
    assert len(loop.corpus) >= 20
    assert len({data[:1] for data in loop.corpus}) == len(loop.corpus) == len(blocks.seen)
    assert not loop.findings


def test_an_exception_and_a_wrong_answer_are_findings_with_their_input(tmp_path: Path) -> None:
    def fail(data: bytes) -> None:
        if len(data) > 3:
            raise KeyError(len(data))

    def differ(data: bytes) -> None:
        if data == b"":
            raise Fault("empty")

    loop, _ = loop_of(fail, tmp_path, compare=differ)
    loop.run(2000, float("inf"))
    raised = {type_of: finding for type_of in ("KeyError", "Fault") for place, finding in loop.findings.items()
              if place.startswith(type_of)}  # fmt: skip
    assert len(raised["KeyError"].data) > 3
    assert raised["Fault"].data == b""
    assert raised["Fault"].save(tmp_path / "findings").read_bytes() == b""
    assert len(loop.findings) == 2, "the same place is one finding"


def test_a_worker_that_dies_has_said_its_input(tmp_path: Path) -> None:
    Scratch(tmp_path / "scratch").say(3, b"the last words")
    assert Scratch(tmp_path / "scratch").said() == (1, 3, b"the last words")
    assert Finding("scan", b"x", "died").save(tmp_path).name.startswith("scan-")


def test_mended_inputs_pass_the_checks_that_hide_what_lies_behind() -> None:
    data = bytearray(record_seeds()[1])
    whole = bytes(data)
    data[29:37] = bytes(8)
    data[9:13] = b"\1\2\3\4"
    mend_records(data, Random(1))
    assert bytes(data) == whole
    marks = bytearray(BY_NAME["marks"].seeds()[0])
    whole = bytes(marks)
    marks[88:92] = bytes(4)
    mend_marks(marks, Random(1))
    assert bytes(marks) == whole


def test_options_reach_the_workers_but_for_those_that_are_shared_out() -> None:
    words = ["--seed", "7", "--seconds", "5", "--jobs=2", "--executions", "10", "--target", "scan"]
    assert without(words, "--seed", "--jobs", "--executions") == ["--seconds", "5", "--target", "scan"]
    assert arguments(words).target == ["scan"]


# ---- what it found outside the compiled modules ------------------------------------------------------------


def test_topics_json_with_a_lone_surrogate_is_written_in_ascii_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text('{"topicConfigTable": {"\\ud800": {"readQueueNums": 2}}}')
    merge_topics(path, {"T": 1})
    table = parse_fastjson(path.read_text())["topicConfigTable"]
    assert table["\ud800"] == {"readQueueNums": 2}
    assert table["T"]["writeQueueNums"] == 1


def test_topics_json_that_nests_without_end_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text('{"x":' * 100_000 + "1" + "}" * 100_000)
    before = path.read_bytes()
    merge_topics(path, {"T": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["99991231235959999", "99999999999999998"])
def test_an_index_file_named_for_the_end_of_time_has_a_follower(tmp_path: Path, name: str) -> None:
    config = rmq.StoreConfig(max_hash_slot_num=3, max_index_num=4, mapped_file_size_commit_log=4096)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(rmq.Message("T", b"b", keys=["a", "b"]))
    (file,) = (tmp_path / "s" / "index").iterdir()
    file.rename(file.with_name(name))
    shutil.rmtree(tmp_path / "s" / "rmq")
    with rmq.open(tmp_path / "s", "r+", config=config) as store:
        store.put(rmq.Message("T", b"b", keys=["c", "d"]))
        assert len(store.query("T", "d")) == 1
    assert min(path.name for path in (tmp_path / "s" / "index").iterdir()) == name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lock", "abort", "checkpoint", "abort.bak", "rmq/meta.json", "rmq/marks", "rmq/owner",
                                  "rmq/manifest.json", "config/topics.json", "commitlog/00000000000000000000",
                                  "consumequeue/T/0/00000000000000000000"])  # fmt: skip
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_fifo_in_a_store_is_never_waited_for(tmp_path: Path, name: str, mode: str) -> None:
    config = rmq.StoreConfig(max_hash_slot_num=3, max_index_num=4, mapped_file_size_commit_log=4096)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(rmq.Message("T", b"b", keys="a"))
    (tmp_path / "s" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "s" / name)
    with suppress(rmq.RmqError, OSError), alarm(20), rmq.open(tmp_path / "s", mode) as store:
        assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == [b"b"]
        assert len(store.pull("T").messages) == 1
        store.info()


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """AssertionError in place of waiting longer."""

    def ring(number: int, frame: object) -> None:
        raise AssertionError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
