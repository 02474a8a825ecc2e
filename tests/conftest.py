"""Shared fixtures: RocketMQ's own stores, unpacked once per run."""

from __future__ import annotations

import base64
import fcntl
import gc
import hashlib
import json
import lzma
import os
import shutil
import signal
import stat
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import rocketmq

import rmq
import rmq.groupcommit

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has it
NEEDED = {"no C compiler": "system calls and memory that fail: a C compiler builds tests/faults/*.c",
          "mounting is not allowed": "full and read-only disks: only root may mount a tmpfs"}  # fmt: skip
SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 30}  # a few messages fill a file
MEMORY, ROOM = "/dev/shm", 4 << 30  # where tests keep their files, when so much is free there
CASES_IN_THE_LOOP = 3
SYNCED = ("synced", "crash", "kill", "faults", "interop")  # markers
NOTHING = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
REAL_SYNCS = os.fsync, os.fdatasync
# Stand in for them, as C functions too: no test sees what a machine that goes on has not written yet.
NO_SYNCS = os.fstat, os.fstat
CRASH_NAMES = [name for name in GOLDEN_NAMES if (GOLDEN / name / "crash.tar.xz").exists()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many cases the developer loop runs the first, one amid them and the last; the others are slow."""
    cases = defaultdict[Any, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        kept = {(len(same) - 1) * number // (CASES_IN_THE_LOOP - 1) for number in range(CASES_IN_THE_LOOP)}
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the collector need not walk it again and again."""
    gc.freeze()


@dataclass(frozen=True)
class Golden:
    """A store that RocketMQ wrote, what was put into it and what RocketMQ answered."""

    name: str
    directory: Path  # unpacked: store/ and, of small ones, crash/

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((GOLDEN / self.name / "config.json").read_text())

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        with lzma.open(GOLDEN / self.name / "messages.jsonl.xz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    @cached_property
    def answers(self) -> dict[str, Any]:
        with lzma.open(GOLDEN / self.name / "answers.json.xz", "rt", encoding="utf-8") as file:
            return json.load(file)

    @property
    def store_config(self) -> rmq.StoreConfig:
        """Everything that the files do not tell, and what they do."""
        return rmq.StoreConfig(
            mapped_file_size_commit_log=self.config["commit_log_segment"],
            mapped_file_size_consume_queue=self.config["consume_queue_segment"],
            max_hash_slot_num=self.config["index_slots"],
            max_index_num=self.config["index_entries"],
            rocketmq_version=self.config["rocketmq_version"],
        )

    @property
    def stored(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["phy_offset"] is not None]


@pytest.fixture(scope="session")
def golden_stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    root = tmp_path_factory.mktemp("golden")
    for name in GOLDEN_NAMES:
        for archive in sorted((GOLDEN / name).glob("*.tar.xz")):
            with tarfile.open(archive) as tar:
                tar.extractall(root / name, **SAFELY)
    return {name: Golden(name, root / name) for name in GOLDEN_NAMES}


def in_the_loop(name: str) -> object:
    """The small store of the newest release; the others are left to `make test`."""
    return pytest.param(name, marks=[] if name == "5.3.3-small-1" else [pytest.mark.slow])


@pytest.fixture(params=map(in_the_loop, GOLDEN_NAMES))
def golden(request: pytest.FixtureRequest, golden_stores: dict[str, Golden]) -> Golden:
    return golden_stores[request.param]


@pytest.fixture(params=map(in_the_loop, CRASH_NAMES))
def small_golden(request: pytest.FixtureRequest, golden_stores: dict[str, Golden]) -> Golden:
    return golden_stores[request.param]


def copy_store(source: Path, target: Path) -> Path:
    """A copy that keeps holes."""
    shutil.copytree(source, target, copy_function=_copy_sparse)
    return target


def _copy_sparse(source: str, target: str) -> None:
    size = os.path.getsize(source)
    with open(source, "rb") as reader, open(target, "wb") as writer:
        os.ftruncate(writer.fileno(), size)
        position = 0
        while position < size:
            try:
                begin = os.lseek(reader.fileno(), position, os.SEEK_DATA)
            except OSError:
                break
            position = os.lseek(reader.fileno(), begin, os.SEEK_HOLE)
            os.pwrite(writer.fileno(), os.pread(reader.fileno(), position - begin, begin), begin)
    shutil.copymode(source, target)


def digest(path: Path) -> str:
    """sha256 of a file of full length, holes as zeros."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(store: Path, *folders: str) -> dict[str, str]:
    """Relative path -> sha256 of the files below some folders of a store."""
    return {str(path.relative_to(store)): digest(path)
            for folder in folders for path in sorted((store / folder).rglob("*")) if path.is_file()}  # fmt: skip


def message_of(line: dict[str, Any], raw_properties: bytes | None = None) -> rmq.Message:
    """The message that one line of messages.jsonl says was put."""
    return rmq.Message(
        line["topic"], base64.b64decode(line["body"]), queue_id=line["queue_id"], flag=line["flag"],
        sys_flag=line["sys_flag"], born_timestamp=line["born_timestamp"], born_host=line["born_host"],
        store_host=line["store_host"], reconsume_times=line["reconsume_times"],
        prepared_transaction_offset=line["prepared_transaction_offset"],
        raw_properties=base64.b64decode(line["properties"]) if raw_properties is None else raw_properties,
    )  # fmt: skip


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads that sync together none comes late because the machine is busy; one that has ended is waited for as
    long as this."""
    monkeypatch.setattr(rmq.groupcommit, "SOON", 100)
    monkeypatch.setattr(rmq.groupcommit, "MOST_SOON_S", 0.4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--synced", action="store_true", help="tests of SYNCED have files on the disk, and wait for it")


def available_memory() -> int:
    """Bytes that can be taken without swapping, by what the kernel thinks."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def pipes() -> list[int]:
    """Those of this process but its standard ones."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            if int(name) > 2 and stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


def _let_go_of(descriptors: list[int]) -> None:
    """A forked process that outlives its parent must not keep from pytest-xdist that the parent has ended."""
    for descriptor in descriptors:
        os.dup2(NOTHING, descriptor)


def pytest_configure(config: pytest.Config) -> None:
    """Processes that a shell starts in the background ignore SIGINT, and so would those that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.register_at_fork(after_in_child=partial(_let_go_of, pipes()))
    os.fsync, os.fdatasync = NO_SYNCS  # type: ignore[assignment]
    needed = ROOM * 2 if config.getoption("--synced") else ROOM  # Spark and RocketMQ take memory too
    if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > ROOM and available_memory() > needed:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Of a whole run each CPU takes some files, where pytest-xdist is there and no debugger or terminal is in the way.

    Two of them at most: what is tested has threads and processes of its own, and patience that a crowd would wear out.
    """
    options = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if config.args_source is config.ArgsSource.TESTPATHS and getattr(options, "numprocesses", 0) is None:
        options.numprocesses = 0 if options.usepdb or options.capture == "no" else min(2, os.cpu_count() or 1)
        options.dist = "loadfile" if options.dist == "no" else options.dist
        options.maxworkerrestart = options.maxworkerrestart or "0"  # else it hands out files already done, and hangs


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """While a test that measures runs no other process of the run is amid a test."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # for processes that it left behind too, which hold the same lock


def is_synced(item: pytest.Item) -> bool:
    """Whether a test waits for the disk."""
    return item.config.getoption("--synced") and any(map(item.get_closest_marker, SYNCED))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On the disk for a test that waits for it. Of a failed one, too, nothing is kept where RMQ_KEEP_FILES is 0: a full
    disk fails all tests behind it."""
    failed = request.session.testsfailed
    place = Path(tempfile.mkdtemp(prefix="rmq-test-")) if is_synced(request.node) else tmp_path
    yield place
    if os.environ.get("RMQ_KEEP_FILES") == "0" or (place != tmp_path and request.session.testsfailed == failed):
        shutil.rmtree(place, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any], dict[str, Any]]:
    """Between processes goes UTF-8, which names of files that a test printed need not be."""
    return json.loads(json.dumps((yield), ensure_ascii=False, default=str).encode("utf-8", "replace"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.fsync, os.fdatasync = REAL_SYNCS if is_synced(item) else NO_SYNCS  # type: ignore[assignment]
    if item.get_closest_marker("interop") is None or not rocketmq.missing():
        return
    if os.environ.get("RMQ_REQUIRE_JAVA") == "1":
        pytest.fail(f"RocketMQ must open our stores, but Java or Maven is missing: {rocketmq.missing()}", pytrace=False)
    pytest.skip(f"Java or Maven is missing: {rocketmq.missing()}")


def boxed(terminalreporter: pytest.TerminalReporter, lines: list[str]) -> None:
    width = max(map(len, lines))
    frame = "+-" + "-" * width + "-+"
    for line in (frame, *(f"| {line:{width}} |" for line in lines), frame):
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Behind everything else: which calls failed, and, unmissably, what was not tested for want of something.

    When tests failed, also how much room there is: a full disk fails tests that have nothing to do with each other.
    """
    yield
    if terminalreporter.getreports("failed") or terminalreporter.getreports("error"):
        free = {str(place): shutil.disk_usage(place).free >> 20 for place in (tempfile.gettempdir(), MEMORY, Path.cwd())
                if os.path.isdir(place)}  # fmt: skip
        terminalreporter.write_line("MiB free: " + ", ".join(f"{place} {size}" for place, size in free.items()))
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name == "faults":
                terminalreporter.write_line(str(value))
    skipped = terminalreporter.getreports("skipped")
    untested = [report for report in skipped if "interop" in report.keywords]
    if untested:
        boxed(terminalreporter, [
            "NOT TESTED: RocketMQ itself did not open our stores.",
            f"Java 17 or newer and Maven are needed ({rocketmq.missing()}); {len(untested)} tests were left out.",
            "With both, `make interop` runs them."])  # fmt: skip
    for reason, needed in NEEDED.items():
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            boxed(terminalreporter, [f"NOT TESTED: {needed}; {count} tests were left out."])
