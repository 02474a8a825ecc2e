"""What is done to a store while a Recorder notes it. A workload is drawn from its seed, geometry and all."""

from __future__ import annotations

import errno
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle
import pyarrow as pa
from cleaning import Disk

import rmq
from crashes.judge import GROUP, Geometry, Offsets, first_offset, offsets_of
from crashes.recorder import Killed, Recorder
from crashes.states import draw
from rmq import commitlog, consumeroffsets, flushing, preparing
from rmq.checkpoint import Checkpoint
from rmq.marks import Marks
from rmq.queueset import QueueSet

TOPICS = ("a", "b", "%RETRY%g")
MONTH_MS = 30 * 24 * 3600 * 1000
STORE = "s"


class Clock:
    """Store timestamps that rise by 700 ms with each look."""

    now = 1_700_000_000_000

    def __call__(self) -> int:
        self.now += 700
        return self.now


@dataclass
class Run:
    """One workload under way. records: the log's, whether acknowledged or only begun; safe: those that are on disk."""

    recorder: Recorder
    rng: random.Random
    geometry: Geometry
    records: list[oracle.Record] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    number: int = 0
    store: rmq.Store | None = None
    commits: list[Offsets] = field(default_factory=lambda: [{}])  # of the consumer group, each with all before it
    torn: Path | None = None  # where a run that begins on a crashed disk may lay a copy

    def __post_init__(self) -> None:
        self.before = self.records
        self.began = 0
        self.body_size = self.rng.choice((None, None, 40, 200))  # None: all sizes
        self.topics = self.rng.choice((TOPICS, TOPICS[:1]))
        self.queue_count = self.rng.choice((1, 2, 3))

    @property
    def path(self) -> Path:
        return self.recorder.root / STORE

    # ---- messages ----

    def message(self, **fields: Any) -> rmq.Message:
        rng, number = self.rng, self.number
        self.number += 1
        size = rng.randrange(0, rng.choice((20, 300, 1200))) if self.body_size is None else self.body_size
        body = bytes(size) if rng.random() < 0.1 else rng.randbytes(size)
        if self.body_size is None:
            keys = [f"k{rng.randrange(8)}" for _ in range(rng.randrange(4))]
            fields = {"tags": rng.choice((None, "t1", "t2")), "sys_flag": rng.choice((0, 0, 0, 0, 4, 8, 12))} | fields
            long = rng.random() < 0.2
            fields["properties"] = fields.get("properties", {}) | ({"p": "x" * rng.randrange(1, 1000)} if long else {})
        else:
            keys = ["k0"]
        fields = {"topic": rng.choice(self.topics), "queue_id": rng.randrange(self.queue_count)} | fields
        return rmq.Message(body=body, keys=keys, uniq_key=f"u{number:06d}", born_timestamp=1_600_000_000_000 + number,
                           **fields)  # fmt: skip

    # ---- what a program does ----

    def open(self, **fields: Any) -> rmq.Store:
        self.store = rmq.open(self.path, "a", config=self.geometry.config(**fields), clock=self.clock)
        self.recorder.note("safe", len(self.records))
        return self.store

    def put(self, message: rmq.Message) -> None:
        self._put(1, lambda store: [store.put(message)], message.properties.get("WAIT") != "false")

    def put_many(self, messages: list[rmq.Message], how: str = "messages") -> None:
        if how == "batch":
            self._put(len(messages), lambda store: list(store.put_batch(messages)), True)
        elif how == "arrow":
            columns = {name: [getattr(message, name) for message in messages]
                       for name in ("topic", "queue_id", "body", "uniq_key", "tags", "born_timestamp", "sys_flag")}
            columns["keys"] = pa.array([list(message.keys) for message in messages], pa.list_(pa.string()))
            table = pa.table(columns)
            self._put(len(messages), lambda store: list(store.put_many(table)), True)
        else:
            self._put(len(messages), lambda store: list(store.put_many(messages)), True)

    def _put(self, count: int, call: Callable[[rmq.Store], list[rmq.PutResult]], waits: bool) -> None:
        assert self.store is not None
        self.recorder.note("put", len(self.records) + count)
        for result in call(self.store):
            start = result.phy_offset - result.phy_offset % self.geometry.segment
            segment = self.path / "commitlog" / f"{start:020d}"
            record = oracle.decode_record(segment.read_bytes(), result.phy_offset - start)
            assert record is not None
            self.records.append(record)
        if waits and self.store.config.flush_disk_type == "SYNC_FLUSH":
            self.recorder.note("safe", len(self.records))

    def flush(self) -> None:
        assert self.store is not None
        self._safe_after(self.store.flush)

    def _safe_after(self, call: Callable[[], object]) -> None:
        assert self.store is not None
        self.commits.append(offsets_of(self.store))  # not what a killed process had in memory
        call()
        self.recorder.note("safe", len(self.records))
        self.recorder.note("consumed", len(self.commits) - 1)

    def consume(self) -> None:
        """Some of what is there, each topic's queues in turn."""
        assert self.store is not None
        for topic in self.topics:
            consumer = rmq.Consumer(self.store, GROUP, topic)
            consumer.poll(self.rng.choice((1, 5, 1000)))
            consumer.commit()
        self.commits.append(offsets_of(self.store))

    def timed_flush(self) -> None:
        """As the thread rmq-flush does: the log is on disk, queues may stay behind."""
        assert self.store is not None
        self._safe_after(self.store._flusher.flush_if_due)

    def failed_flush(self) -> None:
        """A step of a flush, timed or not, finds no room, or is interrupted once it is done."""
        assert self.store is not None
        flusher, rng = self.store._flusher, self.rng
        owner, name = rng.choice(((QueueSet, "sync"), (Checkpoint, "flush"), (Marks, "write"),
                                  (flushing, "write_manifest"), (flushing, "merge_topics"),
                                  (consumeroffsets, "write_document")))  # fmt: skip
        real, is_interrupted = getattr(owner, name), rng.random() < 0.5

        def failing(*arguments: Any) -> None:
            if is_interrupted:
                real(*arguments)
                raise KeyboardInterrupt
            raise OSError(errno.ENOSPC, "no room")

        setattr(owner, name, failing)
        try:
            with suppress(OSError, KeyboardInterrupt):
                flusher.flush(is_timed=rng.random() < 0.5)
        finally:
            setattr(owner, name, real)

    def clean(self) -> None:
        """Every segment but the last has expired; some of them, or all, are removed."""
        assert self.store is not None
        self.recorder.note("low", first_offset(self.path, -1))
        self.store.clean(time.time_ns() // 1_000_000 + MONTH_MS, limit=self.rng.choice((1, 2, None)),
                         disk_usage=lambda path: Disk(10, 90))  # fmt: skip

    def close(self) -> None:
        assert self.store is not None
        if not self.store.closed:
            self._safe_after(self.store.close)

    @contextmanager
    def killed_within(self, calls: int) -> Iterator[None]:
        """The process is killed at one of that many calls, or at the end of the block."""
        self.recorder.kill_at = self.recorder.calls + self.rng.randint(1, calls)
        try:
            yield
            self.recorder.look()
            self.recorder.is_dead = True
        except Killed:
            pass
        if self.store is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                self.store.__del__()
        self.recorder.revive()
        if (self.path / "commitlog").is_dir():
            self.records = self._left()

    def _left(self) -> list[oracle.Record]:
        """The log's records after a kill. On a crashed disk a torn record may look whole to the oracle: recovery of a
        copy tells, and no message that was put in this run is torn."""
        found = oracle.read_records(self.path)
        if self.torn is None:
            return found
        shutil.rmtree(self.torn, ignore_errors=True)
        shutil.copytree(self.path, self.torn)
        rmq.open(self.torn, "a", config=self.geometry.config()).close()
        whole = oracle.read_records(self.torn)
        assert whole[len(self.before) :] == [record for record in found[len(self.before) :]
                                             if record.store_timestamp >= self.began]  # fmt: skip
        return whole

    def work(self, steps: int) -> None:
        """Puts of all kinds, a flush now and then, more so in the beginning of some runs."""
        rng, flushes = self.rng, self.rng.choice((0.0, 0.05, 0.3))
        for _ in range(steps):
            chance = rng.random()
            if chance < flushes:
                self.flush()
            elif chance < 0.9:
                self.put(self.message())
            else:
                self.put_some()

    def put_some(self) -> None:
        how = self.rng.choice(("messages", "arrow", "batch"))
        fields: dict[str, Any] = {"topic": self.rng.choice(self.topics), "queue_id": 0, "sys_flag": 0}
        count = self.rng.randrange(2, 4 if how == "batch" else 12)
        messages = [self.message(**(fields if how == "batch" else {})) for _ in range(count)]
        if how != "batch" or sum(len(message.body) + 1500 for message in messages) < self.geometry.segment:
            self.put_many(messages, how)


# ---- workloads -------------------------------------------------------------------------------------------


def puts(run: Run) -> None:
    """One put at a time, flushed now and then, across the ends of segments, queue and index files."""
    run.open()
    run.work(run.rng.randrange(10, 50))
    if run.rng.random() < 0.5:
        run.flush()


def many(run: Run) -> None:
    """put_many of messages and of Arrow, put_batch: chunks that reach across segments, large ones past the map."""
    with large_from(run.rng.choice((1, 1000, 10**6))):
        run.open()
    for _ in range(run.rng.randrange(2, 6)):
        run.put_some()
        if run.rng.random() < 0.3:
            run.flush()


def waits(run: Run) -> None:
    """SYNC_FLUSH: what returned is on disk, but for messages that do not wait."""
    run.open(flush_disk_type="SYNC_FLUSH")
    for _ in range(run.rng.randrange(10, 30)):
        if run.rng.random() < 0.1:
            run.put_some()
        else:
            run.put(run.message(properties={"WAIT": "false"} if run.rng.random() < 0.3 else {}))


def sessions(run: Run) -> None:
    """Closed and opened again, some sessions without a put."""
    for _ in range(run.rng.randrange(2, 4)):
        run.open()
        run.work(run.rng.choice((0, 3, 15)))
        run.close()


def cleaned(run: Run) -> None:
    """Segments expire and are removed, queue and index files follow; puts go on."""
    run.open()
    run.work(run.rng.randrange(20, 60))
    for _ in range(run.rng.randrange(1, 4)):
        run.clean()
        run.work(run.rng.choice((0, 3, 20)))


def killed(run: Run) -> None:
    """The process is killed, even while it opens the store; another one goes on. Then the power fails."""
    run_on = run.rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH"))
    for _ in range(run.rng.randrange(1, 3)):
        with run.killed_within(run.rng.choice((20, 60, 200))):
            run.open(flush_disk_type=run.rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH")))
            run.work(run.rng.randrange(1, 25))
    run.open(flush_disk_type=run_on)
    run.work(run.rng.randrange(0, 15))
    if run.rng.random() < 0.5:
        run.flush()


def prepared(run: Run) -> None:
    """What the thread rmq-prepare does, between puts: zeros ahead of the log, the next segment, removed at close."""
    flush = run.rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH"))
    with steps_for_small_files(run.geometry.segment):
        run.open(flush_disk_type=flush)
        for _ in range(run.rng.randrange(5, 20)):
            run.work(run.rng.choice((1, 2, 4)))
            assert run.store is not None
            run.store._flusher.preparer.work()
        if run.rng.random() < 0.5:
            run.close()


def behind(run: Run) -> None:
    """Timed flushes that leave the queues behind, now and then one that does not, or fails; killed, then cleaned."""
    with queues_stay_behind(run.rng.choice((2000, 10**6))):
        for _ in range(run.rng.randrange(0, 3)):
            with run.killed_within(run.rng.choice((60, 200, 10**6))):
                run.open()
                for _ in range(run.rng.randrange(2, 7)):
                    run.work(run.rng.choice((0, 1, 5)))
                    run.failed_flush() if run.rng.random() < 0.2 else run.timed_flush()
        run.open()
        for _ in range(run.rng.randrange(1, 4)):
            run.work(run.rng.choice((0, 1, 10)))
            run.failed_flush() if run.rng.random() < 0.2 else run.timed_flush()
            if run.rng.random() < 0.2:
                run.clean()


def consumed(run: Run) -> None:
    """A consumer group follows, and commits; flushes now and then, some of which fail; killed, then gone on with."""
    for _ in range(run.rng.randrange(0, 2)):
        with run.killed_within(run.rng.choice((60, 200, 10**6))):
            run.open(flush_disk_type=run.rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH")))
            _follow(run)
    run.open()
    _follow(run)


def _follow(run: Run) -> None:
    for _ in range(run.rng.randrange(2, 8)):
        run.work(run.rng.choice((0, 1, 8)))
        run.consume()
        if run.rng.random() < 0.5:
            run.rng.choice((run.flush, run.timed_flush, run.failed_flush))()


@contextmanager
def queues_stay_behind(size: int) -> Iterator[None]:
    """At a timed flush, however few there are, as long as the log is not so many bytes ahead."""
    before = flushing.QUEUE_FILES_AT_ONCE, flushing.DERIVED_BEHIND
    flushing.QUEUE_FILES_AT_ONCE, flushing.DERIVED_BEHIND = 0, size
    try:
        yield
    finally:
        flushing.QUEUE_FILES_AT_ONCE, flushing.DERIVED_BEHIND = before


@contextmanager
def large_from(size: int) -> Iterator[None]:
    """A store that is opened here takes batches of so many bytes for large ones."""
    before = commitlog.WRITTEN_FROM
    commitlog.WRITTEN_FROM = size
    try:
        yield
    finally:
        commitlog.WRITTEN_FROM = before


@contextmanager
def steps_for_small_files(segment: int) -> Iterator[None]:
    """Parts of a segment in place of megabytes."""
    names = {"FILL_STEP": 512, "FILL_AHEAD": segment // 4, "RESERVE_AHEAD": segment // 2}
    before = {name: getattr(preparing, name) for name in names}
    try:
        for name, value in names.items():
            setattr(preparing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(preparing, name, value)


def again(run: Run) -> None:
    """On what a power loss left: recovery, in which the power may fail too, and what is put after it."""
    if run.rng.random() < 0.3:
        with run.killed_within(run.rng.choice((20, 60))):
            run.open()
            run.work(10)
    run.open(flush_disk_type=run.rng.choice(("ASYNC_FLUSH", "SYNC_FLUSH")))
    run.work(run.rng.choice((0, 2, 20)))
    run.close() if run.rng.random() < 0.5 else run.flush()


WORKLOADS: dict[str, Callable[[Run], None]] = {
    "puts": puts, "many": many, "waits": waits, "sessions": sessions, "cleaned": cleaned, "killed": killed,
    "prepared": prepared, "behind": behind, "consumed": consumed, "again": again,
}  # fmt: skip
FIRST = ("puts", "many", "waits", "sessions", "cleaned", "killed", "prepared", "behind", "consumed")


@dataclass
class Recording:
    """What a workload did: events from `begin` on are its own, the earlier ones what it found."""

    geometry: Geometry
    recorder: Recorder
    records: list[oracle.Record]
    commits: list[Offsets]
    number: int  # of the next message
    now: int  # ms


def record(name: str, seed: int, folder: Path, **options: Any) -> Recording:
    """Run a workload in an empty folder; options are the Recorder's. The same seed gives the same events."""
    rng = random.Random(f"{name}:{seed}")
    if name == "again":
        return _record_again(rng, folder, options)
    geometry = Geometry.drawn(rng)
    recorder = Recorder(folder, **options)
    with recorder:
        run = Run(recorder, rng, geometry)
        WORKLOADS[name](run)
    return _finished(run)


def _finished(run: Run) -> Recording:
    if run.store is not None and not run.store.closed:
        run.store.close()
    return Recording(run.geometry, run.recorder, run.records, run.commits, run.number, run.clock.now)


def _record_again(rng: random.Random, folder: Path, options: dict[str, Any]) -> Recording:
    for name in ("first", "probe", "image"):
        (folder / name).mkdir()
    first = record(rng.choice(FIRST), rng.randrange(10**6), folder / "first")
    for level in range(rng.choice((1, 1, 2))):
        state = draw(first.recorder.events, first.recorder.begin, rng)
        for name in ("probe", "image"):
            state.write(folder / name / str(level))
        probe = folder / "probe" / str(level) / STORE
        rmq.open(probe, "a", config=first.geometry.config()).close()
        found = oracle.read_records(probe)
        recorder = Recorder(folder / "image" / str(level), **options)
        with recorder:
            run = Run(recorder, rng, first.geometry, found, number=first.number, torn=probe.with_name("torn"))
            run.began = run.clock.now = first.now + 10_000
            if state.safe >= 0:
                recorder.note("low", first_offset(recorder.root / STORE))
                recorder.note("put", len(found))
                recorder.note("safe", len(found))
            recorder.begin = len(recorder.events)
            again(run)
        first = _finished(run)
    return first
