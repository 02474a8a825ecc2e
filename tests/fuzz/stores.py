"""Whole stores, damaged at random, asked everything: right answers, typed errors, nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import oracle
from engine import Fault, Finding, Scratch, mutated
from targets import inner_of

import rmq
from rmq._core._layout import SYS_FLAG_INNER_BATCH

SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 30}  # fmt: skip
CONFIG = rmq.StoreConfig(**SIZES)
COUNT = 40
START = 1_700_000_000_000
OPENING = (rmq.RmqError, OSError, ValueError)  # ValueError: two geometries fit, or a config contradicts the files
ASKING = (rmq.RmqError, OSError, KeyError)
STRANGE = ("x", "..x", ".hidden", "00000000000000004097", "00000000000000008192", "20260101000000000", "\n", "a" * 255,
           "99999999999999999", "18446744073709551615", "T", "0", "7")  # fmt: skip


def message(i: int) -> rmq.Message:
    body = b"" if i % 11 == 5 else b"body %03d " % i * (1 + i % 30)
    return rmq.Message("TU"[i % 3 == 2], body, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2)


def build(folder: Path) -> list[Path]:
    """Closed by rmq; killed; a broker's; a broker's with an inner batch and a queue of such."""
    times = iter(range(START, START * 2, 1000))
    live = folder / "live"
    with rmq.open(live, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for i in range(COUNT - 6):
            store.put(message(i))
        store.flush()
        for i in range(COUNT - 6, COUNT):
            store.put(message(i))
        shutil.copytree(live, folder / "killed")
    os.rename(live, folder / "closed")
    shutil.copytree(folder / "closed", folder / "broker")
    shutil.rmtree(folder / "broker" / "rmq")
    batches = folder / "batches"
    (batches / "commitlog").mkdir(parents=True)
    (batches / "batchconsumequeue" / "B" / "0").mkdir(parents=True)
    body, base = inner_of(b"one", b"two"), 4
    wrapper = oracle.encode_record("B", 0, base, 0, body, b"INNER_NUM\0012\2INNER_BASE\0014\2KEYS\1k\2", sys_flag=0xC0,
                                   store_timestamp=START)  # fmt: skip
    plain = oracle.encode_record("T", 0, 0, len(wrapper), b"plain", b"KEYS\1all\2", store_timestamp=START + 5)
    (batches / "commitlog" / f"{0:020d}").write_bytes((wrapper + plain).ljust(4096, b"\0"))
    unit = b"".join(number.to_bytes(size, "big") for number, size in (
        (0, 8), (len(wrapper), 4), (0, 8), (START, 8), (base, 8), (2, 2), (0, 4), (0, 4)))  # fmt: skip
    (batches / "batchconsumequeue" / "B" / "0" / f"{0:020d}").write_bytes(unit.ljust(46 * 4, b"\0"))
    return [folder / name for name in ("closed", "killed", "broker", "batches")]


class Truth:
    """What a store held before it was damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        records = oracle.read_records(path)
        self.bodies = {record.phy_offset: record.body for record in records}
        self.wrappers = {record.phy_offset for record in records if record.sys_flag & SYS_FLAG_INNER_BATCH}
        self.files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())

    def check_body(self, phy_offset: int, raw_body: bytes) -> None:
        """The body CRC covers the body; an empty one has none. Of an inner batch single messages are shown."""
        if phy_offset not in self.wrappers and raw_body and raw_body != self.bodies.get(phy_offset):
            raise Fault(f"the body at {phy_offset} is {raw_body[:60]!r} and was "
                        f"{(self.bodies.get(phy_offset) or b'')[:60]!r}")  # fmt: skip


def damage(path: Path, files: list[Path], random: Random) -> None:
    """One fault in one file or directory of a store."""
    file = path / random.choice(files)
    if not os.path.lexists(file) or not file.is_file() or file.is_symlink():
        return
    other = path / random.choice(files)
    size = file.stat().st_size
    choice = random.randrange(20)
    if choice < 12 and size:
        with file.open("r+b") as opened:
            limit = size if random.random() < 0.3 else min(size, 1200)
            at = random.randrange(limit)
            run = os.pread(opened.fileno(), random.choice((4, 20, 91, 400)), at)
            os.pwrite(opened.fileno(), mutated(run, [], random, None)[: len(run)], at)
    elif choice == 12:
        os.truncate(file, random.randrange(size + 1))
    elif choice == 13:
        with file.open("ab") as opened:
            opened.write(random.randbytes(random.choice((1, 20, 4096))))
    elif choice == 14:
        file.unlink()
    elif choice == 15 and other.is_file():
        file.write_bytes(other.read_bytes())
    elif choice == 16:
        file.unlink()
        match random.randrange(4):
            case 0:
                file.mkdir()
            case 1:
                os.symlink(random.choice((file.name, "..", "/dev/zero", str(other), "missing")), file)
            case 2:
                os.mkfifo(file)
            case _:
                os.symlink("/dev/null", file)
    elif choice == 17:
        strange = file.parent / random.choice(STRANGE)
        if not os.path.lexists(strange):
            random.choice((strange.mkdir, strange.touch, lambda: os.symlink(strange.name, strange)))()
    elif choice == 18:
        shutil.rmtree(random.choice([parent for parent in file.parents if parent != path and path in parent.parents]
                                    or [path / "none"]), ignore_errors=True)  # fmt: skip
    else:
        fresh = file.with_name(random.choice((*STRANGE, other.name)))
        if not os.path.lexists(fresh):
            file.rename(fresh)


def snapshot(path: Path) -> dict[str, tuple[Any, ...]]:
    return {str(entry): (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
            for entry in sorted(path.rglob("*")) for status in (entry.lstat(),)}  # fmt: skip


def ask(store: rmq.Store, truth: Truth) -> None:
    """Every reading call. Bodies must be what they were; errors typed."""

    def scan(**options: Any) -> None:
        for batch in store.scan(columns=["phy_offset", "raw_body", "topic", "keys", "store_timestamp"], **options):
            for row in batch.select(["phy_offset", "raw_body"]).to_pylist():
                truth.check_body(row["phy_offset"], row["raw_body"])

    def messages(found: list[rmq.StoredMessage]) -> None:
        for one in found:
            truth.check_body(one.phy_offset, one.raw_body)
            _ = one.properties, one.keys, one.offset_msg_id

    def pull_all() -> None:
        for topic, queues in store.topics().items():
            for queue_id, (low, high) in list(queues.items())[:4]:
                for at in (low, high - 1, high):
                    if -(2**63) <= at < 2**63:
                        messages(store.pull(topic, queue_id, at, 50).messages)

    calls: list[Callable[[], object]] = [
        scan, store.topics, pull_all, store.info,
        lambda: messages(store.query("T", "all", limit=None)),
        lambda: messages(store.query("U", "key2", begin=START, end=START + 5000)),
        lambda: messages(store.query("B", "k")),
        lambda: store.query_many("T", ["key0", "all", "none"], limit=5, columns=["phy_offset", "keys"]),
        lambda: store.select_phy_offset_many("T", ["all", "key1"]),
        lambda: messages([store.lookup(0)]),
        lambda: messages([store.lookup("7F00000100002A9F0000000000000000")]),
        lambda: messages([store.lookup(("T", 0, 1))]),
        lambda: store.search_offset("T", 1, START + 7000),
        lambda: store.search_offset("T", 0, START + 7000, "UPPER"),
        lambda: messages(store.pull("T", 0, 3, 5, tags="tag").messages),
        lambda: scan(begin_phy_offset=500, end_phy_offset=6000),
    ]  # fmt: skip
    for call in calls:
        with suppress(ASKING):
            call()


def one(path: Path, truth: Truth) -> bool:
    """Open a damaged store in every way; whether it could be written."""
    before = snapshot(path)
    try:
        with rmq.open(path, "r", config=CONFIG) as store:
            ask(store, truth)
    except OPENING:
        pass
    if snapshot(path) != before:
        raise Fault("a reader changed the store")
    written = False
    for repair in (False, True):
        try:
            with rmq.open(path, "r+", config=CONFIG, repair=repair) as store:
                ask(store, truth)
                place = store.put(rmq.Message("T", b"fresh", keys="fresh"))
                if store.lookup(place.phy_offset).body != b"fresh":
                    raise Fault("what was put is not there")
                truth.bodies[place.phy_offset] = b"fresh"
                written = True
                ask(store, truth)
        except OPENING:
            pass
    return written


class StoreLoop:
    """Copies of the stores, each with one to four faults."""

    def __init__(self, scratch: Scratch, number: int, random: Random) -> None:
        self._scratch, self._number, self._random = scratch, number, random
        self.findings: dict[str, Finding] = {}
        self.executions = self.opened = 0

    def run(self, count: int | None, until: float) -> None:
        with tempfile.TemporaryDirectory(prefix="rmq-fuzz-") as folder:
            (Path(folder) / "bases").mkdir()
            bases = [Truth(path) for path in build(Path(folder) / "bases")]
            while (count is None or self.executions < count) and time.monotonic() < until:
                data = self._random.randbytes(8)
                self._scratch.say(self._number, data)
                try:
                    self.opened += damaged(bases, Path(folder) / "store", data)
                except Exception as error:
                    frames = traceback.extract_tb(error.__traceback__)
                    place = f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"
                    self.findings.setdefault(place, Finding("store", data, "".join(traceback.format_exception(error))))
                self.executions += 1


def damaged(bases: list[Truth], path: Path, data: bytes) -> bool:
    """The store that `data` (a seed) stands for."""
    random = Random(data)
    truth = random.choice(bases)
    bodies = dict(truth.bodies)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(truth.path, path)
    for _ in range(random.choice((1, 1, 2, 4))):
        damage(path, truth.files, random)
    try:
        return one(path, truth)
    finally:
        truth.bodies = bodies


def replay_store(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="rmq-fuzz-") as folder:
        (Path(folder) / "bases").mkdir()
        damaged([Truth(path) for path in build(Path(folder) / "bases")], Path(folder) / "store", data)
