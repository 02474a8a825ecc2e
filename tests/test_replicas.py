# SPDX-License-Identifier: Apache-2.0
"""Stores of brokers in controller mode that cut their log, went on, and wrote less than they had cut off."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from forks import lock_of_a_broker

import rmq
from rmq import keyreading, logend
from rmq.mirror import MirroredStore
from rmq.objects import Location
from rmq.snapshot import Snapshot

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096)
START = 1_700_000_000_000  # ms
OLD = [b"old%d" % number for number in range(8)]


class Replica:
    """A broker's store of eight messages."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "commitlog" / f"{0:020d}"
        self.bodies: list[bytes] = []
        self.places: list[int] = []
        self._log, self._now = b"", START
        self.path.parent.mkdir()
        self.path.write_bytes(bytes(CONFIG.mapped_file_size_commit_log))
        (root / "lock").write_bytes(b"lock")
        self._tell("1-0")
        self.put(*OLD)

    def put(self, *bodies: bytes) -> None:
        for body in bodies:
            self._now += 1
            self.places.append(len(self._log))
            self._log += oracle.encode_record(
                "T", 0, len(self.bodies), len(self._log), body, b"KEYS\1%s\2" % body.split(b" ")[0],
                store_timestamp=self._now, born_timestamp=1)  # fmt: skip
            self.bodies.append(body)
        with self.path.open("r+b") as file:  # what was cut off stays behind it
            file.write(self._log)

    def cut(self, kept: int, passed_ms: int = 1000) -> None:
        """passed_ms: since the last message."""
        self._log, self._now = self._log[: self.places[kept]], self._now + passed_ms
        del self.bodies[kept:], self.places[kept:]
        self._tell("1-0", f"2-{len(self._log)}")

    def _tell(self, *epochs: str) -> None:
        (self.root / "epochFileCheckpoint").write_text("\n".join([str(len(epochs)), "0", *epochs, ""]))

    @property
    def size(self) -> int:
        return len(self._log)

    def end(self, *, is_closed: bool) -> None:
        times = [START + 10_000] * 2
        (self.root / "checkpoint").write_bytes(struct.pack(">6q", *times, 0, 0, len(self._log), 0).ljust(4096, b"\0"))
        if not is_closed:
            (self.root / "abort").write_text("1")


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


QUESTIONS: dict[str, Callable[[rmq.Store], Any]] = {
    "scan": lambda store: store.scan().read_all()["body"].to_pylist(),
    "pull": lambda store: [message.body for message in store.pull("T", 0, 0, 32).messages],
    "topics": lambda store: store.topics()["T"][0],
    "query": lambda store: [[message.body for message in store.query("T", f"{age}{number}")]
                            for age in ("old", "new") for number in range(8)],
}  # fmt: skip


def answer(replica: Replica, question: str) -> Any:
    """What a reader should say."""
    if question == "topics":
        return 0, len(replica.bodies)
    if question == "query":
        keys = [f"{age}{number}".encode() for age in ("old", "new") for number in range(8)]
        return [[body for body in replica.bodies if body.split(b" ")[0] == key] for key in keys]
    return replica.bodies


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("was_ours", [False, True])
def test_what_a_replica_cut_off_is_no_damage_and_is_not_served(
    replica: Replica, mode: str, *, is_closed: bool, was_ours: bool
) -> None:
    """was_ours: `rmq` had written to the store, before the broker put what it then cut off."""
    if was_ours:
        replica.cut(2)
        replica.path.write_bytes(bytes(CONFIG.mapped_file_size_commit_log))
        replica.put()
        rmq.open(replica.root, "a", config=CONFIG).close()
        replica.put(*OLD[2:])
    replica.cut(4)
    replica.put(b"new4 longer", b"new5 longer")
    replica.end(is_closed=is_closed)
    with rmq.open(replica.root, mode, config=CONFIG) as store:
        assert {name: ask(store) for name, ask in QUESTIONS.items()} == {name: answer(replica, name)
                                                                         for name in QUESTIONS}  # fmt: skip
    if mode == "a":
        assert [path.name for path in (replica.root / "rmq/cut").iterdir()] != []


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_a_replica_cut_off_is_no_damage_to_verify(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    """Nor what of it is left in queues and index; several threads read pieces that begin before it."""
    monkeypatch.setattr("rmq.verification.verify.PIECE_BYTES", 200)
    rmq.open(replica.root, "a", config=CONFIG).close()
    shutil.rmtree(replica.root / "rmq")
    replica.cut(4)
    replica.put(b"new4 longer", b"new5 longer")
    replica.end(is_closed=is_closed)
    for jobs in (1, 8):
        found = rmq.verify(replica.root, config=CONFIG, jobs=jobs)
        assert (found.damage_count, found.record_count) == (0, 6)
        assert [finding.offset for finding in found if finding.kind == "record"] == [replica.size]


def test_a_rebuild_leaves_out_what_a_replica_cut_off(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    replica = Replica(tmp_path / "s")
    replica.cut(4)
    replica.put(b"new4 longer")
    replica.end(is_closed=True)
    assert rmq.rebuild(replica.root, tmp_path / "rebuilt", config=CONFIG).unit_count == 5


@pytest.mark.parametrize("mode", ["r", "a"])
def test_what_a_broker_cut_off_when_it_started_is_no_damage_without_epochs_either(replica: Replica, mode: str) -> None:
    """At a record that power loss took, or that its release cannot read."""
    replica.cut(4)
    (replica.root / "epochFileCheckpoint").unlink()
    replica.put(b"new4 longer", b"new5 longer")
    replica.end(is_closed=True)
    with rmq.open(replica.root, mode, config=CONFIG) as store:
        assert store.topics() == {"T": {0: (0, 6)}}
        assert [message.body for message in store.pull("T").messages] == [*OLD[:4], b"new4 longer", b"new5 longer"]
        assert store.scan().read_all().num_rows == 6
    assert rmq.verify(replica.root, config=CONFIG).damage_count == 0


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("damaged", [5, 6, 7])
def test_a_damaged_body_in_what_a_broker_cut_off_is_none_of_its_log(
    replica: Replica, mode: Any, damaged: int
) -> None:
    replica.cut(4)
    (replica.root / "epochFileCheckpoint").unlink()
    replica.put(b"new4 longer")
    replica.end(is_closed=True)
    data = replica.path.read_bytes()
    assert data.count(OLD[damaged]) == 2  # body and key
    replica.path.write_bytes(data[: (at := data.index(OLD[damaged]))] + b"!" + data[at + 1 :])
    with rmq.open(replica.root, mode, config=CONFIG) as store:
        assert store.scan(columns=["body"]).read_all()["body"].to_pylist() == [*OLD[:4], b"new4 longer"]


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("back", [5, 1000])
def test_damage_where_a_clock_was_set_back_is_damage(tmp_path: Path, mode: Any, back: int) -> None:
    """Later ones of the records behind it are newer; or the log ends before the clock has come up again, of which the
    checkpoint tells.
    """
    path, times = tmp_path / "s", iter([*range(200), *range(200 - back, 400 - back)])
    with rmq.open(path, "x", config=CONFIG, clock=lambda: START + next(times)) as store:
        places = [store.put(rmq.Message("T", b"%d" % number)).phy_offset for number in range(400)]
    shutil.rmtree(path / "rmq")
    segment = path / "commitlog" / f"{places[199] // 4096 * 4096:020d}"
    with segment.open("r+b") as file:
        file.seek(places[199] % 4096)
        file.write(b"\xaa" * 50)
    assert rmq.verify(path).damage_count == 1
    if mode == "a":
        with pytest.raises(rmq.CorruptFileError):
            rmq.open(path, mode)
    with rmq.open(path) as store:
        assert store.scan(on_damage="skip").read_all().num_rows == 399
        assert store.topics() == {"T": {0: (0, 400)}}


@pytest.mark.parametrize("mode", ["r", "a"])
def test_records_that_are_newer_behind_a_break_are_damage_of_a_replica_too(replica: Replica, mode: str) -> None:
    replica.cut(4, passed_ms=-1000)
    replica.put(b"new4 longer", b"new5 longer")
    replica.end(is_closed=True)
    with pytest.raises(rmq.CorruptFileError), rmq.open(replica.root, mode, config=CONFIG) as store:
        store.scan().read_all()


def test_damage_before_the_last_epoch_is_none_of_what_a_replica_cut_off(replica: Replica) -> None:
    """Though the clock of the next master was behind, so that its messages are older."""
    replica.cut(7, passed_ms=-1000)
    replica.put(b"new7 longer")
    with replica.path.open("r+b") as file:
        file.seek(replica.places[6])
        file.write(b"damage!!")
    replica.end(is_closed=True)
    with pytest.raises(rmq.CorruptFileError, match=f"byte {replica.places[6]}: "):
        rmq.open(replica.root, "a", config=CONFIG)


def test_what_a_replica_s_epochs_tell_holds_where_the_store_is_an_object_store_s(
    replica: Replica, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Damage behind which all is older, and an epoch began."""
    replica.put(b"x")
    replica.cut(8, passed_ms=-1000)
    replica.put(b"new8 longer", b"new9 longer")
    with replica.path.open("r+b") as file:
        file.seek(replica.places[7])
        file.write(b"damage!!")
    replica.end(is_closed=False)
    cache = str(tmp_path_factory.mktemp("cache"))
    place = Location.parse(f"file://{replica.root}", {"cacheDirectory": cache})
    stores = [rmq.open(replica.root), MirroredStore(Snapshot.take(place))]
    for store in stores:
        with store, pytest.raises(rmq.CorruptFileError, match=f"byte {replica.places[7]}: "):
            store.scan().read_all()


# ---- beside the broker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reader_follows_a_replica_that_begins_another_epoch(replica: Replica, question: str) -> None:
    ask = QUESTIONS[question]
    with lock_of_a_broker(replica.root), rmq.open(replica.root) as reader:
        assert ask(reader) == answer(replica, question)
        replica.cut(4)
        ask(reader)  # it looks before the epoch's first message came
        for number in range(4, 8):
            replica.put(b"new%d longer" % number)
            assert ask(reader) == answer(replica, question)


@pytest.mark.parametrize("question", ["scan", "pull", "query"])
def test_a_reader_that_comes_to_old_records_behind_new_ones_ends_before_them(replica: Replica, question: str) -> None:
    """The first new message ends where an old one begins."""
    ask = QUESTIONS[question]
    with lock_of_a_broker(replica.root), rmq.open(replica.root) as reader:
        replica.cut(4)
        replica.put(b"new4")
        ask(reader)
        replica.put(b"new5 longer")
        for name in (question, *QUESTIONS):
            assert QUESTIONS[name](reader) == answer(replica, name)


@pytest.mark.parametrize("question", ["scan", "pull"])
def test_damage_before_the_place_of_a_cut_is_told(replica: Replica, question: str) -> None:
    with lock_of_a_broker(replica.root), rmq.open(replica.root) as reader:
        replica.cut(4)
        replica.put(b"new4")
        QUESTIONS[question](reader)
        with replica.path.open("r+b") as file:
            file.seek(replica.path.read_bytes().index(OLD[1]))
            file.write(b"X")
        with pytest.raises(rmq.CorruptFileError, match=f"byte {replica.places[1]}: "):
            QUESTIONS[question](reader)


@pytest.mark.parametrize("question", ["scan", "pull", "topics"])
def test_units_that_a_replica_left_behind_its_cut_do_not_count(replica: Replica, question: str) -> None:
    rmq.open(replica.root, "a", config=CONFIG).close()  # which makes the queue's file
    shutil.rmtree(replica.root / "rmq")
    replica.cut(4)
    replica.put(b"new4 longer")
    with lock_of_a_broker(replica.root), rmq.open(replica.root) as reader:
        assert QUESTIONS[question](reader) == answer(replica, question)


def test_a_verification_leaves_out_what_was_cut_off_though_the_log_has_outgrown_our_mark(replica: Replica) -> None:
    """A broker that came after us cut below it, and its records end elsewhere."""
    replica.end(is_closed=True)
    rmq.open(replica.root, "a", config=CONFIG).close()
    replica.cut(6)
    replica.put(b"new6 " + bytes(200))
    rest = oracle.encode_record("T", 0, 7, replica.size + 9, OLD[7], b"", store_timestamp=START + 8, born_timestamp=1)
    with replica.path.open("r+b") as file:
        file.seek(replica.size)
        file.write(bytes(range(1, 10)) + rest)
    replica.end(is_closed=True)
    assert rmq.verify(replica.root, config=CONFIG).damage_count == 0


def test_of_a_log_of_breaks_what_follows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record but the last older than the one before, every second one damaged: each break may be a cut."""
    log = b""
    for number in range(200):
        body = b"%08d" % number
        stored = START - number if number < 198 else START + 1
        record = oracle.encode_record("T", 0, number, len(log), body, store_timestamp=stored, born_timestamp=1)
        log += record.replace(body, b"damaged!") if number % 2 else record
    path = tmp_path / "s/commitlog" / f"{0:020d}"
    path.parent.mkdir(parents=True)
    path.write_bytes(log)
    (tmp_path / "s/checkpoint").write_bytes(struct.pack(">6q", START, START, 0, 0, 0, 0).ljust(4096, b"\0"))
    config = rmq.StoreConfig(mapped_file_size_commit_log=len(log))
    looks: list[int] = []
    real = logend._newest
    monkeypatch.setattr(logend, "_newest", lambda log, place: looks.append(place) or real(log, place))
    with rmq.open(tmp_path / "s", config=config) as store:
        assert store.scan(on_damage="skip").read_all().num_rows == 100
    assert len(looks) == 1


@pytest.mark.parametrize("kind", [list, iter])
def test_an_answer_that_is_asked_again_has_all_that_was_asked_for(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, kind: Callable[[list[str]], Any]
) -> None:
    """An iterator gives its items once."""
    real = keyreading.find

    def cutting(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        replica.cut(4)
        replica.put(b"new4 longer", b"new5 longer")
        return real(*arguments, **options)

    with lock_of_a_broker(replica.root), rmq.open(replica.root, config=CONFIG) as reader:
        assert reader.query_many("T", ["old0"]).table.num_rows == 1
        monkeypatch.setattr(keyreading, "find", cutting)
        found = reader.query_many("T", kind(["old0", "new4"]), columns=["body"])
    assert (found.table["key_index"].to_pylist(), found.complete) == ([0, 1], True)


@pytest.mark.parametrize("keys", [["old5"], ["old0", "old5"], ["old0"]])
def test_a_cut_while_the_messages_of_an_answer_are_read_is_no_damage(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """The broker is amid its copy of a record as long as the one that it cut off."""
    real = keyreading.find

    def cutting(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        found = real(*arguments, **options)
        replica.cut(4)
        replica.put(b"new4", b"new5")
        data = bytearray(replica.path.read_bytes())
        at = data.index(b"new5")
        data[at : at + 4] = b"ol\0\0"
        replica.path.write_bytes(data)
        return found

    with lock_of_a_broker(replica.root), rmq.open(replica.root, config=CONFIG) as reader:
        monkeypatch.setattr(keyreading, "find", cutting)
        found = reader.query_many("T", keys, columns=["body"]).table
    assert found["body"].to_pylist() == [b"old0"] * ("old0" in keys)


def test_a_body_that_does_not_decompress_is_no_end_of_a_log_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = oracle.encode_record

    def encode(topic: str, queue: int, number: int, *rest: Any, **options: Any) -> bytes:
        return real(topic, queue, number, *rest, **options, **({"sys_flag": 1} if number == 1 else {}))

    monkeypatch.setattr(oracle, "encode_record", encode)
    replica = Replica(tmp_path)
    with lock_of_a_broker(tmp_path), rmq.open(tmp_path, config=CONFIG) as reader:
        stream = reader.scan(columns=["body"])
        replica.cut(4)
        replica.put(b"new4 longer")
        with pytest.raises(rmq.CorruptFileError, match="does not decompress"):
            stream.read_all()
