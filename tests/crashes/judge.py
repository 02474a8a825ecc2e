"""Whether a store came back from a crash: nothing durable lost, nothing invented, all parts in agreement."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import oracle

import rmq
from crashes.states import State

if TYPE_CHECKING:
    from crashes.workloads import Recording

FAR = 2**31 - 1  # ms to the next timed flush
COLUMNS = ["topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "born_timestamp",
           "store_timestamp", "reconsume_times", "prepared_transaction_offset", "body_crc", "raw_body",
           "raw_properties"]  # fmt: skip
GROUP = "g"  # the consumer group of all workloads
LATER = 1_800_000_000_000  # ms: when the judge puts


Offsets = dict[tuple[str, int], int]  # topic, queue id -> what the group consumes next


class Violation(Exception):
    """What the store promised does not hold."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a store's files, and whether its records have checksums of their own."""

    segment: int
    queue_file: int
    slots: int
    entries: int
    version: str
    crc: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        version = rng.choice(("5.3.3", "5.3.3", "4.9.8", "4.7.0"))
        return cls(rng.choice((4096, 8192)), rng.choice((200, 1000)), 10, rng.choice((12, 30, 60)), version,
                   version == "5.3.3" and rng.random() < 0.7)  # fmt: skip

    def config(self, **fields: Any) -> rmq.StoreConfig:
        return rmq.StoreConfig(
            mapped_file_size_commit_log=self.segment, mapped_file_size_consume_queue=self.queue_file,
            max_hash_slot_num=self.slots, max_index_num=self.entries, rocketmq_version=self.version,
            enabled_append_prop_crc=self.crc, flush_interval_commit_log=FAR, **fields)  # fmt: skip

    def disagreements(self, store: Path) -> list[str]:
        """Of log, queues and index; the oracle knows what they must be when nothing was removed."""
        if first_offset(store):
            findings = rmq.verify(store, config=self.config(), jobs=1)
            return [] if findings.is_sound else [*map(str, findings)]
        return oracle.check_store(store, self.slots, self.entries, self.version)


def first_offset(store: Path, number: int = 0) -> int:
    """Where a segment of the log begins, the first unless told."""
    names = sorted(path.name for path in (store / "commitlog").glob("*"))
    return int(names[number]) if names else 0


def demand(holds: object, claim: str) -> None:
    if not holds:
        raise Violation(claim)


class _Healed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "have lost units" in record.getMessage():
            raise Violation(f"not on disk when the mark was: {record.getMessage()}")


@contextmanager
def healed_nothing() -> Iterator[None]:
    """What is derived again for being gone below the mark was not synced when the mark was: a sync is missing."""
    handler, logger = _Healed(), logging.getLogger("rmq")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def opened(path: Path, mode: str, geometry: Geometry, what: str) -> Iterator[rmq.Store]:
    """A store that must open; errors of rmq inside are violations."""
    try:
        with healed_nothing(), rmq.open(path, mode, config=geometry.config(), clock=lambda: LATER) as store:
            yield store
    except (rmq.RmqError, OSError, ValueError, KeyError) as error:
        raise Violation(f"{what}: {type(error).__name__}: {error}") from error


# ---- what a store shows ----------------------------------------------------------------------------------


def row_of(record: oracle.Record) -> tuple[Any, ...]:
    return (record.topic, record.queue_id, record.queue_offset, record.phy_offset, record.size, record.flag,
            record.sys_flag, record.born_timestamp, record.store_timestamp, record.reconsume_times,
            record.prepared_transaction_offset, record.body_crc, record.body, record.raw_properties)  # fmt: skip


def rows_of(store: rmq.Store) -> list[tuple[Any, ...]]:
    table = store.scan(columns=COLUMNS).read_all()
    columns = [table[name] for name in COLUMNS]
    values = [column.cast("int64").to_pylist() if name.endswith("timestamp") else column.to_pylist()
              for name, column in zip(COLUMNS, columns, strict=True)]  # fmt: skip
    return list(zip(*values, strict=True))


def queues_of(store: rmq.Store) -> dict[tuple[str, int], list[int]]:
    return {(topic, queue_id): [message.phy_offset for message in store.pull(topic, queue_id, first, 10_000).messages]
            for topic, queues in store.topics().items() for queue_id, (first, _) in queues.items()}  # fmt: skip


def check_answers(store: rmq.Store, records: list[oracle.Record], rng: random.Random, what: str) -> None:
    """Queues hold the messages of the log; a few of them are found by key and by each id."""
    units = oracle.expected_units(records)
    expected = {key: [unit.phy_offset for unit in queue] for key, queue in units.items()}
    found = {key: queue for key, queue in queues_of(store).items() if queue}
    demand(found == expected, f"{what}: queues hold {found}, the log {expected}")
    for record in rng.sample(records, min(2, len(records))):
        where = f"{what}: message {record.uniq_key} at {record.phy_offset}"
        for key in {record.uniq_key, *record.keys} - {None}:
            hits = [message.phy_offset for message in store.query(record.topic, key, limit=None)]
            demand(hits == oracle.brute_force_query(records, record.topic, key), f"{where}: key {key} finds {hits}")
        for name in (record.phy_offset, record.offset_msg_id):
            demand(store.lookup(name).phy_offset == record.phy_offset, f"{where}: id {name} finds another")
        if record.uniq_key is not None and record.transaction != oracle.ROLLBACK:
            demand(store.lookup(record.uniq_key, topic=record.topic).uniq_key == record.uniq_key,
                   f"{where}: its uniq_key finds another")  # fmt: skip


def offsets_of(store: rmq.Store) -> Offsets:
    return {(topic, queue_id): place for topic, queues in store.groups().get(GROUP, {}).items()
            for queue_id, place in queues.items()}  # fmt: skip


def check_group(store: rmq.Store, safe: Offsets, what: str) -> None:
    """Nothing comes again that a commit on disk had consumed; nothing that is not there was consumed."""
    found = offsets_of(store)
    lost = {queue: place for queue, place in safe.items() if found.get(queue, 0) < place}
    demand(not lost, f"{what}: the group had consumed {lost} for sure, and goes on from {found}")
    ends = {(topic, queue_id): high for topic, queues in store.topics().items()
            for queue_id, (_, high) in queues.items()}  # fmt: skip
    ahead = {queue: place for queue, place in found.items() if place > ends.get(queue, 0)}
    demand(not ahead, f"{what}: the group goes on from {ahead}, queues end at {ends}")


# ---- the judgement ---------------------------------------------------------------------------------------


def compare(rows: list[tuple[Any, ...]], records: Sequence[oracle.Record], state: State, geometry: Geometry,
            what: str) -> int:  # fmt: skip
    """The log is what was put, up to some message behind the last safe one. Returns how many of those that were not
    safe have a header, topic or properties that no checksum covers and that differ."""
    demand(len(rows) >= state.safe, f"{what}: {state.safe} messages were on disk, {len(rows)} are there")
    demand(len(rows) <= state.begun, f"{what}: {state.begun} messages were put, {len(rows)} are there")
    unseen = 0
    for number, (row, record) in enumerate(zip(rows, records, strict=False)):
        if row == row_of(record):
            continue
        wrong = [name for name, a, b in zip(COLUMNS, row, row_of(record), strict=True) if a != b]
        is_free = number >= state.safe and not geometry.crc and not {"raw_body", "body_crc", "phy_offset"} & {*wrong}
        demand(is_free, f"{what}: message {number} of {state.safe} safe ones differs in {', '.join(wrong)}")
        unseen += 1
    return unseen


def digests(store: Path) -> dict[str, str]:
    """Of all files but those that say who has the store open, and of the marks, which count their writes."""
    skipped = {"abort", "abort.bak", "rmq/owner", "rmq/marks"}
    names = {str(path.relative_to(store)): path for path in store.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in names.items() if name not in skipped}  # fmt: skip


def put_more(store: rmq.Store, name: str, rng: random.Random) -> None:
    """New messages find their place behind what is there and are read back."""
    before = rows_of(store)
    messages = [rmq.Message(rng.choice("ac"), rng.randbytes(rng.randrange(200)), queue_id=rng.randrange(2),
                            keys=["k0", "new"], uniq_key=f"{name}{number}") for number in range(3)]  # fmt: skip
    places = [store.put(message).phy_offset for message in messages]
    after = rows_of(store)
    demand(after[: len(before)] == before, "a new put changed an old message")
    demand([row[3] for row in after[len(before) :]] == places, "new messages are not where put says")
    for message, place in zip(messages, places, strict=True):
        hits = [found.phy_offset for found in store.query(message.topic, message.uniq_key or "")]
        demand(hits == [place], f"new message {message.uniq_key} is found at {hits}, not at {place}")


def judge(path: Path, state: State, recording: Recording, seed: str) -> int:
    """Raises Violation. Returns how many messages that were not safe changed unseen. The store is changed."""
    rng, geometry, records = random.Random(seed), recording.geometry, recording.records
    if state.safe < 0:
        return _judge_unborn(path, geometry)
    low = first_offset(path)
    demand(low <= state.low, f"segments below {low} are gone, a cleaning may have removed those below {state.low}")
    gone = sum(record.phy_offset < low for record in records)
    records = records[gone:]
    state = replace(state, begun=max(0, state.begun - gone), safe=max(0, state.safe - gone))
    try:
        with opened(path, "r", geometry, "reading what the crash left") as store:
            seen = rows_of(store)
            seen_queues = queues_of(store)
    except Violation as error:
        # Of a header that no checksum covers and that lost its queue offset, the queue may be an error.
        demand(not geometry.crc, str(error))
        with opened(path, "r+", geometry, "recovery") as store:
            unseen = compare(rows_of(store), records, state, geometry, "recovery")
        demand(unseen > 0, str(error))
        return unseen
    with opened(path, "r", geometry, "reading what the crash left") as store:
        known = [*records[: state.begun]]
        keys = {(record.topic, key) for record in rng.sample(known, min(3, len(known)))
                for key in (record.uniq_key, *record.keys) if key}  # fmt: skip
        answers = {(topic, key): [found.phy_offset for found in store.query(topic, key, limit=None)]
                   for topic, key in sorted(keys)}  # fmt: skip
        check_group(store, recording.commits[state.consumed], "reading what the crash left")
    with opened(path, "r+", geometry, "recovery") as store:
        rows = rows_of(store)
        unseen = compare(rows, records, state, geometry, "recovery")
        demand(seen == rows, f"a reader sees {len(seen)} messages, recovery finds {len(rows)}, or others")
        log = oracle.read_records(path)
        demand([row_of(record) for record in log] == rows, "the log holds other messages than the store shows")
        queues = queues_of(store)
        demand({k: v for k, v in seen_queues.items() if v} == {k: v for k, v in queues.items() if v},
               f"a reader sees queues {seen_queues}, recovery finds {queues}")  # fmt: skip
        for (topic, key), hits in answers.items():
            right = oracle.brute_force_query(log, topic, key)
            demand(hits == right, f"a reader finds key {key} of {topic} at {hits}, not at {right}")
        check_answers(store, log, rng, "recovery")
        check_group(store, recording.commits[state.consumed], "recovery")
        if rng.random() < 0.5:
            put_more(store, "more", rng)
    demand(not (wrong := geometry.disagreements(path)), f"after recovery: {wrong}")
    _check_json(path)
    before = digests(path)
    with opened(path, "r+", geometry, "second open") as store:
        after = digests(path)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        demand(not changed, f"the second open changed {', '.join(changed)}")
        put_more(store, "last", rng)
    demand(not (wrong := geometry.disagreements(path)), f"after new puts: {wrong}")
    if not unseen and rng.random() < 0.3:
        findings = rmq.verify(path, config=geometry.config(), jobs=1)
        demand(findings.is_sound, f"rmq.verify finds {[str(finding) for finding in findings]}")
    if rng.random() < 0.3:
        with opened(path, "r", geometry, "reading at last") as store:
            check_answers(store, oracle.read_records(path), rng, "reading at last")
    return unseen


def _judge_unborn(path: Path, geometry: Geometry) -> int:
    """The first open had not returned: there is no store yet, or an empty one; creating it succeeds."""
    with opened(path, "a", geometry, "creating again") as store:
        demand(rows_of(store) == [], "messages in a store that had none")
        put_more(store, "more", random.Random(0))
    demand(not (wrong := geometry.disagreements(path)), f"after creation: {wrong}")
    return 0


def _check_json(path: Path) -> None:
    for name in ("config/topics.json", "config/consumerOffset.json", "rmq/manifest.json", "rmq/meta.json"):
        if (path / name).exists():
            json.loads((path / name).read_bytes())
