# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ opens the stores of rmq, answers as rmq does, writes on, and rmq goes on from there."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import oracle
import pyarrow as pa
import pytest
from agreement import assert_agreement, assert_keys, assert_log_and_queues, questions
from conftest import copy_store
from forks import fork
from rocketmq import RELEASES, Put, RocketMQ, Visit

import rmq

pytestmark = pytest.mark.interop

SMALL = {"mapped_file_size_commit_log": 65536, "mapped_file_size_consume_queue": 1000, "max_hash_slot_num": 97,
         "max_index_num": 500}  # fmt: skip
CONFIGS = {
    "5.3.3-small": rmq.StoreConfig(**SMALL, rocketmq_version="5.3.3"),
    "5.3.3-small-crc": rmq.StoreConfig(**SMALL, rocketmq_version="5.3.3", enabled_append_prop_crc=True),
    "5.3.3-default": rmq.StoreConfig(rocketmq_version="5.3.3"),
    "4.9.8-small": rmq.StoreConfig(**SMALL, rocketmq_version="4.9.8"),
    "4.9.8-default": rmq.StoreConfig(rocketmq_version="4.9.8"),
}
KILLED = ["5.3.3-small", "5.3.3-default", "4.9.8-small", "4.9.8-default"]
KILLED_CONFIGS = [CONFIGS[name] for name in KILLED]
HAND_OVERS, RMQ_IS_KILLED, ROCKETMQ_IS_KILLED = 10, 4, 7  # turns
# What RocketMQ writes beside commitlog/, consumequeue/ and index/ when it loads a closed store, answers and shuts down.
# 5.3.3 sets confirmPhyOffset in the checkpoint too, to the start of the last record. `abort` comes and goes.
WRITTEN = {
    "5.3.3": ("abort.bak", "compaction/position-checkpoint", "compaction/position-checkpoint.bak"),
    "4.9.8": ("config/delayOffset.json", "config/delayOffset.json.bak"),
}
PREPARED, ROLLBACK, TRANSACTION_MASK = 0x4, 0xC, 0xC
BLOCK = 65536


class Known(NamedTuple):
    """A message that somebody has put, and where it went."""

    message: rmq.Message
    phy_offset: int
    offset_msg_id: str


class SteppingClock:
    """Never goes back, and many messages share a time; the first is recent enough for a delay of 2 h to be pending."""

    def __init__(self, seed: int) -> None:
        self.now = int(time.time() * 1000) - 90 * 60_000
        self._rng = random.Random(seed)

    def __call__(self) -> int:
        self.now += self._rng.choice((0, 0, 1, 300, 999, 1000, 7000, 20000))
        return self.now


# ---- what is put ---------------------------------------------------------------------------------


def items(count: int, name: str, release: str) -> list[Put]:
    """Messages with everything that a put takes; each 17th item and the last is a batch. Keys begin with `name`."""
    rng = random.Random(name)
    return [_batch(rng, f"{name}b{number}") if number % 17 == 16 or number == count - 1
            else _message(rng, f"{name}m{number}", release) for number in range(count)]  # fmt: skip


def _message(rng: random.Random, name: str, release: str) -> rmq.Message:
    topics = ["orders", "orders", "a|b", "%RETRY%group", "тема", oracle.SCHEDULE_TOPIC]
    topic = rng.choice(topics if release < "5" else [*topics, "%RETRY%" + "long" * 50])
    keys = [name] * (rng.random() < 0.9) + ["shared"] * (rng.random() < 0.3)
    keys += [rng.choice(["Aa", "BB", "ключ-é", "😀", name])] * (rng.random() < 0.3)
    body, compression = _body(rng, release)
    transaction = rng.choice([0, 0, 0, 0, 0x4, 0x8, 0xC])
    properties = {"имя": "v" * rng.randrange(1, 40)} if rng.random() < 0.3 else {}
    queue_id = rng.choice([0, 0, 0, 1, 2, 5])
    if topic == oracle.SCHEDULE_TOPIC:
        properties |= {"DELAY": "18", "REAL_TOPIC": "orders", "REAL_QID": "1"}
        queue_id, transaction = 17, 0
    return rmq.Message(
        topic, body, keys=keys, tags=rng.choice([None, "paid", "sent", "Aa", "BB", "оплачен"]), properties=properties,
        queue_id=queue_id, flag=rng.randrange(-5, 2**20), sys_flag=compression | transaction,
        uniq_key=f"{name}u" if rng.random() < 0.8 else None, born_timestamp=1_700_000_000_000 + rng.randrange(10**6),
        born_host=rng.choice(["10.1.2.3:55", "10.1.2.3:55", "[2001:db8::1]:1234"]),
        store_host=rng.choice(["127.0.0.1:10911", "127.0.0.1:10911", "[2001:db8::2]:10911"]),
        reconsume_times=rng.randrange(3), prepared_transaction_offset=rng.randrange(1000) if transaction > 4 else 0,
    )  # fmt: skip


def _body(rng: random.Random, release: str) -> tuple[bytes, int]:
    """A body and the bits of sys_flag that tell how it is compressed."""
    plain = rng.randbytes(rng.choice([0, 1, 50, 300])) * rng.choice([1, 1, 3])
    kind = rng.choice(["", "", "", "zlib", "lz4", "zstd"] if release > "5" else ["", "", "zlib"])
    if not kind or not plain:
        return plain, 0
    if kind == "zlib":
        return zlib.compress(plain), 0x1
    return pa.Codec(kind).compress(plain).to_pybytes(), 0x1 | {"lz4": 0x100, "zstd": 0x200}[kind]


def _batch(rng: random.Random, name: str) -> list[rmq.Message]:
    common = {"queue_id": rng.randrange(3), "born_timestamp": 1_700_000_000_000, "born_host": "10.1.2.3:55",
              "store_host": "127.0.0.1:10911"}  # fmt: skip
    return [rmq.Message("orders", b"inner" * number, keys=[f"{name}k{number}", "shared"], uniq_key=f"{name}u{number}",
                        tags="paid", **common) for number in range(5)]  # fmt: skip


def messages_of(what: list[Put]) -> list[rmq.Message]:
    return [message for item in what for message in (item if isinstance(item, list) else [item])]


def put(store: rmq.Store, what: list[Put]) -> list[Known]:
    """Batches by put_batch, what is between them by put and put_many in turn."""
    known: list[Known] = []
    for number, (is_batch, run) in enumerate(groupby(what, lambda item: isinstance(item, list))):
        if is_batch:
            known += [found for batch in run for found in _known(batch, store.put_batch(batch))]
        elif number % 4:
            messages = list(run)
            known += _known(messages, store.put_many(messages))
        else:
            known += [Known(message, result.phy_offset, result.offset_msg_id)
                      for message in run for result in [store.put(message)]]  # fmt: skip
    return known


def _known(messages: list[rmq.Message], results: rmq.PutResults) -> list[Known]:
    return [Known(message, result.phy_offset, result.offset_msg_id)
            for message, result in zip(messages, results, strict=True)]  # fmt: skip


def known_of_visit(what: list[Put], visit: Visit) -> list[Known]:
    """What RocketMQ says of its puts; it must have stored all."""
    known = []
    for item, result in zip(what, visit.put, strict=True):
        assert (result["status"], result["append_status"]) == ("PUT_OK", "PUT_OK")
        for message, name in zip(item if isinstance(item, list) else [item], result["offset_msg_ids"], strict=True):
            known.append(Known(message, rmq.parse_offset_msg_id(name).phy_offset, name))
    return known


# ---- what is claimed of a store ------------------------------------------------------------------


def assert_found(store: rmq.Store, known: list[Known]) -> None:
    """Each message is there as it was put: by place, id, queue, and key."""
    by_key = defaultdict(set)
    for message, phy_offset, offset_msg_id in known:
        stored = store.lookup(offset_msg_id)
        for name in ("topic", "queue_id", "flag", "born_timestamp", "reconsume_times", "prepared_transaction_offset",
                     "keys", "tags", "uniq_key"):  # fmt: skip
            assert getattr(stored, name) == getattr(message, name), name
        assert (stored.phy_offset, stored.raw_body) == (phy_offset, message.body)
        assert stored.sys_flag & ~0x30 == message.sys_flag & ~0x30
        transaction = message.sys_flag & TRANSACTION_MASK
        if transaction not in (PREPARED, ROLLBACK):
            assert store.pull(message.topic, message.queue_id, stored.queue_offset, 1).messages == [stored]
        if transaction != ROLLBACK:
            if message.uniq_key:
                assert store.lookup(message.uniq_key, topic=message.topic) == stored
            for key in message.keys:
                by_key[message.topic, key].add(phy_offset)
    for (topic, key), phy_offsets in by_key.items():
        assert {message.phy_offset for message in store.query(topic, key, limit=None)} >= phy_offsets, (topic, key)


def assert_sound(path: Path, config: rmq.StoreConfig) -> None:
    """Log, queues and index agree by the second opinion."""
    sizes = config.max_hash_slot_num, config.max_index_num
    assert oracle.check_store(path, *sizes, version=config.rocketmq_version) == []


def assert_opens_as_it_is(judge: RocketMQ, path: Path, config: rmq.StoreConfig, known: list[Known]) -> None:
    """RocketMQ loads a closed store, gives our answers, and changes no byte of log, queues and index."""
    date_queue_files(path, config)
    before, elsewhere = contents(path), small_files(path)
    asked = questions(path)
    answers = judge.open(path, config, asked).answers
    assert contents(path) == before
    if judge.release == "5.3.3":
        last = answers["records"][-1]["phy_offset"]
        elsewhere["checkpoint"] = elsewhere["checkpoint"][:32] + last.to_bytes(8, "big") + elsewhere["checkpoint"][40:]
    written = dict.fromkeys(WRITTEN[judge.release], b"")
    assert small_files(path) | written == elsewhere | written
    with rmq.open(path) as store:
        assert_agreement(store, asked, answers)
        assert_found(store, known)


def date_queue_files(path: Path, config: rmq.StoreConfig) -> None:
    """Set each queue file's time to that of its last message, as in a broker; 4.9.8 searches by it."""
    stored = {record.phy_offset: record.store_timestamp for record in oracle.read_records(path)}
    count = config.mapped_file_size_consume_queue // 20
    for (topic, queue_id), units in oracle.read_queues(path).items():
        for number, file in enumerate(sorted((path / "consumequeue" / topic / str(queue_id)).iterdir())):
            last_ms = stored[units[: (number + 1) * count][-1].phy_offset]
            os.utime(file, ns=(last_ms * 1_000_000,) * 2)


def contents(store: Path, *folders: str) -> dict[str, str]:
    """Relative path -> digest of size, and of all blocks that are not zero with their positions; quick on holes."""
    digests = {}
    for folder in folders or ("commitlog", "consumequeue", "index"):
        for path in sorted(file for file in (store / folder).rglob("*") if file.is_file()):
            digest = hashlib.sha256(b"%d" % path.stat().st_size)
            with path.open("rb") as file:
                for position in _blocks(file.fileno()):
                    block = os.pread(file.fileno(), BLOCK, position)
                    if block.strip(b"\0"):
                        digest.update(b"%d" % position + block)
            digests[str(path.relative_to(store))] = digest.hexdigest()
    return digests


def _blocks(file: int) -> Iterator[int]:
    """Positions of the blocks of a file that are not holes, each once, however many extents it lies in."""
    size, position, following = os.fstat(file).st_size, 0, 0
    while position < size:
        try:
            begin = os.lseek(file, position, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return
        position = os.lseek(file, begin, os.SEEK_HOLE)
        blocks = range(max(begin // BLOCK * BLOCK, following), position, BLOCK)
        yield from blocks
        following = blocks[-1] + BLOCK if blocks else following


def small_files(store: Path) -> dict[str, bytes]:
    """The files elsewhere in a store."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()
            and path.relative_to(store).parts[0] not in ("commitlog", "consumequeue", "index")}  # fmt: skip


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RocketMQ]]:
    started = {release: RocketMQ(release, tmp_path_factory.mktemp(f"rocketmq-{release}")) for release in RELEASES}
    yield started
    for judge in started.values():
        judge.close()


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> rmq.StoreConfig:
    return CONFIGS[request.param]


@pytest.fixture
def judge(judges: dict[str, RocketMQ], config: rmq.StoreConfig) -> RocketMQ:
    return judges[config.rocketmq_version]


# ---- closed --------------------------------------------------------------------------------------


def test_a_closed_store_opens_as_it_is_takes_messages_and_comes_back(
    tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig
) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config, clock=SteppingClock(1)) as store:
        known = put(store, items(450, "ours", judge.release))
    assert_opens_as_it_is(judge, path, config, known)

    theirs = items(100, "theirs", judge.release)
    asked = questions(path, messages_of(theirs))
    visit = judge.open(path, config, asked, put=theirs)
    known += known_of_visit(theirs, visit)
    assert_sound(path, config)
    with rmq.open(path) as store:
        assert_agreement(store, asked, visit.answers)
        assert_found(store, known)
    with rmq.open(path, "r+") as store:
        known += put(store, items(100, "more", judge.release))
        assert_found(store, known)
    assert_sound(path, config)
    if config.enabled_append_prop_crc:
        assert all(b"__CRC32#" in record.raw_properties for record in oracle.read_records(path))


@pytest.mark.parametrize("config", [CONFIGS["5.3.3-small"], CONFIGS["4.9.8-small"]], ids=RELEASES)
def test_an_empty_store_takes_messages(tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig) -> None:
    rmq.open(tmp_path / "s", "x", config=config).close()
    theirs = items(20, "theirs", judge.release)
    known = known_of_visit(theirs, judge.open(tmp_path / "s", config, questions(tmp_path / "s"), put=theirs))
    with rmq.open(tmp_path / "s", "r+") as store:
        assert_found(store, known)
        known += put(store, items(20, "ours", judge.release))
    assert_opens_as_it_is(judge, tmp_path / "s", config, known)


@pytest.mark.parametrize("config", [CONFIGS["5.3.3-small"], CONFIGS["4.9.8-small"]], ids=RELEASES)
def test_what_lies_behind_the_last_unit_rocketmq_puts_once_more(
    tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig
) -> None:
    """The exception to the bytes that stay: each load dispatches what lies behind the last unit again, here PREPARED
    messages, and the index takes the keys of the very last record for new ones. Our queries do not show it.
    """
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config) as store:
        store.put(rmq.Message("orders", b"whole"))
        places = [store.put(rmq.Message("orders", b"half", keys="half", sys_flag=PREPARED)).phy_offset for _ in "12"]
    log_and_queues = contents(path, "commitlog", "consumequeue")
    for load in (1, 2):
        asked = questions(path)
        answers = judge.open(path, config, asked).answers
        assert contents(path, "commitlog", "consumequeue") == log_and_queues
        with rmq.open(path) as store:
            assert_agreement(store, asked, answers)
            raw = store.select_phy_offset_many("orders", ["half"])[0].as_py()
            assert raw == [places[1]] * (1 + load) + [places[0]]
            assert [message.phy_offset for message in store.query("orders", "half")] == places[::-1]


# ---- killed --------------------------------------------------------------------------------------


def put_until_killed(path: Path, config: rmq.StoreConfig, what: list[Put],
                     clock: SteppingClock | None = None) -> int:  # fmt: skip
    """Put in another process, the first half flushed, and kill it amid its puts; how many puts had returned."""
    reading, writing = os.pipe()

    def work() -> None:
        with rmq.open(path, "a", config=config, clock=clock) as store:
            for number, item in enumerate(what):
                put(store, [item])
                if number == len(what) // 2:
                    store.flush()
                os.write(writing, b".")
            signal.pause()

    pid = fork(work)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        returned = 0
        while returned < len(what) * 4 // 5:
            assert pipe.read(1), "the other process failed"
            returned += 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return returned + len(pipe.read())


def known_of_log(path: Path, what: list[Put], returned: int, before: int = 0) -> list[Known]:
    """Where the log has the messages of a killed process: those of all puts that had returned, in order.

    before: how many records the log had.
    """
    records = oracle.read_records(path)[before:]
    assert len(records) >= len(messages_of(what[:returned]))
    return [Known(message, record.phy_offset, record.offset_msg_id)
            for message, record in zip(messages_of(what), records, strict=False)]  # fmt: skip


def index_ranges(path: Path, config: rmq.StoreConfig) -> dict[str, range]:
    """The phy offsets from the first to the last entry of each index file."""
    files = oracle.open_index_files(path, config.max_hash_slot_num, config.max_index_num)
    names = sorted(file.name for file in (path / "index").iterdir())
    return {name: range(file.header.begin_phy_offset, file.header.end_phy_offset)
            for name, file in zip(names, files, strict=True)}  # fmt: skip


def lost_by_recovery(before: dict[str, range], after: dict[str, range]) -> range:
    """The phy offsets between the index files that RocketMQ kept and those that it began."""
    kept = [before[name].stop for name in before if name in after]
    begun = [after[name].start for name in after if name not in before]
    end = kept[-1] if kept else -1
    return range(end, begun[0] if begun else end)


@pytest.mark.parametrize("config", KILLED_CONFIGS, ids=KILLED)
def test_a_killed_store_opens_untruncated(tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig) -> None:
    """RocketMQ's own recovery: the log's bytes stay, queues are brought level. It removes the index files that are
    newer than the checkpoint and puts the records of the last segments again; what that loses, rmq brings back.
    """
    path, untouched = tmp_path / "s", tmp_path / "untouched"
    ours = items(600, "ours", judge.release)
    returned = put_until_killed(path, config, ours, SteppingClock(2))
    assert (path / "abort").exists()
    copy_store(path, untouched)
    log, index = contents(path, "commitlog"), index_ranges(path, config)
    known = known_of_log(path, ours, returned)

    asked = questions(path)
    answers = judge.open(path, config, asked).answers
    # A segment that was made and got no bytes or no record before the kill is none of the log: RocketMQ removes it.
    unused = {hashlib.sha256(b"%d" % size).hexdigest() for size in (0, config.mapped_file_size_commit_log)}
    used, kept = ({item for item in held.items() if item[1] not in unused}
                  for held in (log, contents(path, "commitlog")))  # fmt: skip
    assert kept == used
    assert not (path / "abort").exists()
    with rmq.open(untouched) as store:  # derives in memory what the killed process had not written
        assert_log_and_queues(store, asked, answers)
        assert_found(store, known)
    lost = lost_by_recovery(index, index_ranges(path, config))
    with rmq.open(path) as store:
        assert_keys(store, asked["keys"], answers["keys"], lost)
        assert_found(store, known)

    with rmq.open(path, "r+") as store:
        known += put(store, items(50, "more", judge.release))
    assert_opens_as_it_is(judge, path, config, known)


@pytest.mark.parametrize("config", KILLED_CONFIGS, ids=KILLED)
def test_a_killed_store_that_rmq_recovered_opens_as_it_is(
    tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig
) -> None:
    ours = items(450, "ours", judge.release)
    returned = put_until_killed(tmp_path / "s", config, ours, SteppingClock(3))
    known = known_of_log(tmp_path / "s", ours, returned)
    with rmq.open(tmp_path / "s", "r+") as store:
        known += put(store, items(1, "more", judge.release))
    assert_sound(tmp_path / "s", config)
    assert_opens_as_it_is(judge, tmp_path / "s", config, known)


@pytest.mark.parametrize("config", [CONFIGS["5.3.3-small"], CONFIGS["4.9.8-small"]], ids=RELEASES)
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_queue_file_that_power_loss_took_is_there_again_when_rmq_was_first(
    tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig, is_empty: bool
) -> None:
    """Without rmq RocketMQ passes over the units of a missing file; with an empty one it does not load.

    Of one queue the first is lost, of another one the second.
    """
    config = replace(config, mapped_file_size_consume_queue=200)
    ours = items(450, "ours", judge.release)
    returned = put_until_killed(tmp_path / "s", config, ours, SteppingClock(3))
    known = known_of_log(tmp_path / "s", ours, returned)
    queues = sorted((sorted(queue.iterdir()) for queue in (tmp_path / "s/consumequeue").glob("*/*")), key=len)
    assert len(queues[-2]) > 2
    for lost in (queues[-2][0], queues[-1][1]):
        lost.unlink()
        if is_empty:
            lost.touch()
    with rmq.open(tmp_path / "s") as store:
        assert_found(store, known)
    with rmq.open(tmp_path / "s", "r+") as store:
        known += put(store, items(1, "more", judge.release))
    assert_sound(tmp_path / "s", config)
    assert_opens_as_it_is(judge, tmp_path / "s", config, known)


# ---- in turn -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIGS["5.3.3-small-crc"], CONFIGS["4.9.8-small"]], ids=RELEASES)
def test_ten_hand_overs_keep_everything(tmp_path: Path, judge: RocketMQ, config: rmq.StoreConfig) -> None:
    """rmq puts, then RocketMQ, ten times, each into what the other left; both are killed, rmq once, RocketMQ once."""
    path = tmp_path / "s"
    known: list[Known] = []
    for turn in range(1, HAND_OVERS + 1):
        ours, theirs = (items(20, f"{who}{turn}", judge.release) for who in ("ours", "theirs"))
        if turn == RMQ_IS_KILLED:
            known += known_of_log(path, ours, put_until_killed(path, config, ours), len(known))
        else:
            with rmq.open(path, "a", config=config) as store:
                known += put(store, ours)
        index = index_ranges(path, config)
        asked = questions(path, messages_of(theirs), turn)
        visit = judge.open(path, config, asked, put=theirs, leave_open=turn == ROCKETMQ_IS_KILLED)
        if turn == ROCKETMQ_IS_KILLED:
            judge.kill()
        known += known_of_visit(theirs, visit)
        with rmq.open(path) as store:
            assert_log_and_queues(store, asked, visit.answers)
            lost = lost_by_recovery(index, index_ranges(path, config)) if turn == RMQ_IS_KILLED else range(0)
            assert_keys(store, asked["keys"], visit.answers["keys"], lost)
            assert_found(store, known)
            assert store.scan(columns=["phy_offset"]).read_all().num_rows == len(known)
    with rmq.open(path, "r+") as store:
        assert_found(store, known)
    assert_opens_as_it_is(judge, path, config, known)
