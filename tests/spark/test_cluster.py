"""Spark on several executors, and one of them dies: each message is read once and written once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark import clean_staging
from rmq.spark.staging import commits, roots
from spark.cluster import Application, application, until

pytestmark = pytest.mark.spark
QUEUES, COUNT = 4, 4000
BODY = "x" * 1000  # enough for what is on its way between processes to be a small part
SMALL = {"segmentBytes": "1048576"}
IN_PARTS = {"minPartitions": "6", "batchRows": "100"}

Row = list[Any]


def orders(first: int, count: int) -> list[rmq.Message]:
    return [rmq.Message("orders", f"{number} {BODY}".encode(), keys=[f"o-{number}", f"c-{number % 10}"],
                        queue_id=number % QUEUES) for number in range(first, first + count)]  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """4,000 orders of 1.1 KB, of its own for each test."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 20)) as made:
        made.put_many(orders(0, COUNT))
    return tmp_path / "s"


def stored(store: Path) -> list[Row]:
    """What the engine reads."""
    with rmq.open(store) as opened:
        rows = opened.scan(columns=["topic", "queue_id", "queue_offset", "body"]).read_all().to_pylist()
    return sorted([row["topic"], row["queue_id"], row["queue_offset"], row["body"].decode()] for row in rows)


def bodies(out: Path) -> list[str]:
    """Of all committed shards of a directory, or of a store."""
    return sorted(row[3] for root in roots(str(out)) for row in stored(Path(root)))


def expected(first: int, count: int) -> list[str]:
    return sorted(message.body.decode() for message in orders(first, count))


def put(store: Path, messages: list[rmq.Message]) -> None:
    with rmq.open(store, "r+") as opened:
        opened.put_many(messages)


# ---- two executors in one machine's process tree -------------------------------------------------


def test_two_executors_answer_what_the_engine_answers(java: str, live: Path, tmp_path: Path) -> None:
    place = tmp_path / "application"
    place.mkdir()
    with application("local-cluster[2,1,1024]", place, java) as spark:
        assert len(set(spark.ask("where"))) == 2
        assert sorted(spark.ask("read", store=live, options=IN_PARTS)) == stored(live)
        for mode in ("shards", "single"):
            spark.ask("write", store=live, out=tmp_path / mode, options=IN_PARTS, to=SMALL | {"mode": mode})
            assert bodies(tmp_path / mode) == expected(0, COUNT)
        assert len(roots(str(tmp_path / "shards"))) == 6

        keys = ["o-7", "c-3", "nix", None]
        found = spark.ask("look_up", store=live, topic="orders", keys=keys)
        with rmq.open(live) as store:
            messages = {key: store.query("orders", key, limit=None) for key in keys if key is not None}
        assert dict(map(tuple, found["offsets"])) == {None: None} | {
            key: [message.phy_offset for message in own] for key, own in messages.items()}  # fmt: skip
        assert sorted(found["joined"]) == sorted(
            [key, message.phy_offset, message.body.decode()] for key, own in messages.items() for message in own)

        into = {"store": live, "out": tmp_path / "lake", "options": {"maxOffsetsPerTrigger": "2500"}}
        assert spark.ask("stream", **into) == 2
        put(live, orders(COUNT, 10))
        assert spark.ask("stream", **into) == 1
        assert sorted(spark.ask("read_parquet", out=tmp_path / "lake")) == stored(live)


# ---- an executor dies ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone(java: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """An application on a master and two workers of one core each."""
    with application(None, tmp_path_factory.mktemp("cluster"), java) as made:
        yield made


class Kill:
    """The executor that reads a message is held there, kill() ends it, and dead() asserts that another one read on."""

    def __init__(self, spark: Application, marker: Path, number: int) -> None:
        self.spark, self.marker = spark, marker
        self.hold = {"marker": str(marker), "body": f"{number} {BODY}"}
        self.lost_before = self.lost()

    def lost(self) -> set[str]:
        return {item["id"] for item in self.spark.ask("executors") if not item["is_active"]}

    def held(self) -> dict[str, int]:
        """Wait for the task; its executor's pid, its partition and its attempt."""
        until(self.marker.exists, "the task's marker")
        found: dict[str, int] = json.loads(self.marker.read_text())
        return found

    def kill(self) -> None:
        pid = self.held()["pid"]
        assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGKILL)

    def dead(self) -> None:
        assert len(self.lost() - self.lost_before) == 1
        tries = [json.loads(item.read_text()) for item in self.marker.parent.glob(f"{self.marker.name}.*")]
        assert sorted(item["attempt"] for item in tries) == [0, 1]
        assert len({item["pid"] for item in tries}) == 2


@pytest.mark.cluster
def test_a_read_gives_each_row_once_when_an_executor_dies(standalone: Application, live: Path, tmp_path: Path) -> None:
    """What was planned is read again: messages that come meanwhile are none of it."""
    before, kill = stored(live), Kill(standalone, tmp_path / "marker", 150)
    standalone.tell("read", store=live, options=IN_PARTS, hold=kill.hold)
    assert kill.held()["attempt"] == 0
    put(live, orders(COUNT, 100))
    kill.kill()
    assert sorted(standalone.answer()) == before
    kill.dead()


class Observer(threading.Thread):
    """Reads a directory of shards again and again: how many messages it had, each time."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out, self.seen = out, set[int]()
        self.errors: list[BaseException] = []
        self._end = threading.Event()

    def run(self) -> None:
        try:
            while not self._end.wait(0.05):
                self.look()
        except BaseException as error:
            self.errors.append(error)

    def look(self) -> None:
        self.seen.add(len(bodies(self.out)))

    def stop(self) -> None:
        self._end.set()
        self.join()
        assert self.errors == []


@pytest.mark.cluster
def test_a_write_is_there_once_and_at_once_when_an_executor_dies(standalone: Application, live: Path,
                                                                  tmp_path: Path) -> None:  # fmt: skip
    out, kill = tmp_path / "out", Kill(standalone, tmp_path / "marker", 350)
    standalone.ask("write", store=live, out=out, options=IN_PARTS, to=SMALL)
    observer = Observer(out)
    observer.start()
    try:
        standalone.tell("write", store=live, out=out, options=IN_PARTS, to=SMALL, hold=kill.hold)
        partition = kill.held()["partition"]
        staging = out / "rmq" / "spark" / "staging"
        until(lambda: list(staging.glob(f"*/{partition:05d}.0.*.tmp")), "a store that the task stages")
        observer.look()
        kill.kill()
        standalone.answer()
    finally:
        observer.stop()
    observer.look()
    assert observer.seen == {COUNT, 2 * COUNT}
    assert bodies(out) == sorted(2 * expected(0, COUNT))
    for root in roots(str(out)):
        assert rmq.verify(root) == []
    kill.dead()
    assert_only_staging_is_left(out)
    clean_staging(str(out), older_than=0)
    assert list(staging.iterdir()) == []
    assert bodies(out) == sorted(2 * expected(0, COUNT))


def assert_only_staging_is_left(out: Path) -> None:
    named = {shard for commit in commits(out) for shard in commit.shards}
    assert {item.name for item in out.iterdir()} == named | {"rmq"}
    assert {item.name for item in (out / "rmq" / "spark").iterdir()} == {"commits", "commit.lock", "staging"}


@pytest.mark.cluster
@pytest.mark.parametrize("sink", ["parquet", "rmq"])
def test_a_stream_has_each_message_once_when_an_executor_dies(standalone: Application, live: Path, tmp_path: Path,
                                                               sink: str) -> None:  # fmt: skip
    """In its second batch of four."""
    out, kill = tmp_path / "out", Kill(standalone, tmp_path / "marker", 1500)
    to = SMALL if sink == "rmq" else {}
    standalone.tell("stream", store=live, out=out, sink=sink, to=to, hold=kill.hold,
                    options={"maxOffsetsPerTrigger": "1000", "splitBytes": "262144", "batchRows": "100"})  # fmt: skip
    kill.kill()
    assert standalone.answer() == 4
    kill.dead()
    found = bodies(out) if sink == "rmq" else sorted(row[3] for row in standalone.ask("read_parquet", out=out))
    assert found == expected(0, COUNT)


@pytest.mark.cluster
def test_a_write_whose_driver_dies_shows_nothing_and_is_cleaned_away(standalone: Application, live: Path,
                                                                      tmp_path: Path) -> None:  # fmt: skip
    """The last test of this cluster: its application is gone."""
    out, hold = tmp_path / "out", {"marker": str(tmp_path / "marker"), "body": f"{COUNT - 150} {BODY}"}
    standalone.ask("write", store=live, out=out, options=IN_PARTS, to=SMALL)
    standalone.tell("write", store=live, out=out, options=IN_PARTS, to=SMALL, hold=hold)
    until((tmp_path / "marker").exists, "the task's marker")
    executor = Path("/proc", str(json.loads((tmp_path / "marker").read_text())["pid"]))
    staging = out / "rmq" / "spark" / "staging"
    until(lambda: list(staging.glob("*/*.tmp")), "a store that the task stages")
    standalone.kill()
    until(lambda: not executor.exists(), "the end of an executor without driver")
    assert bodies(out) == expected(0, COUNT)
    assert_only_staging_is_left(out)
    assert list(staging.glob("*/*"))

    def is_clean() -> bool:  # Python workers may outlive their executor for a moment
        clean_staging(str(out), older_than=0)
        return not list(staging.iterdir())

    until(is_clean, "an empty staging directory")
    assert bodies(out) == expected(0, COUNT)


# ---- two tries of one task -----------------------------------------------------------------------

SPECULATION = {"speculation": "true", "speculation.interval": "100ms", "speculation.quantile": "0.5",
               "speculation.multiplier": "1.1", "speculation.minTaskRuntime": "500ms"}  # fmt: skip


@pytest.fixture(scope="module")
def speculating(java: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """An application on two hosts that starts slow tasks a second time, on the other one."""
    with application(None, tmp_path_factory.mktemp("speculating"), java, **SPECULATION) as made:
        yield made


@pytest.mark.cluster
@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("mode", ["shards", "single"])
def test_a_write_is_there_once_when_a_slow_task_is_tried_twice(speculating: Application, live: Path, tmp_path: Path,
                                                               mode: str, races: bool) -> None:  # fmt: skip
    """The slow one hangs, or both write to their ends."""
    out, marker = tmp_path / "out", tmp_path / "marker"
    hold = {"marker": str(marker), "body": f"350 {BODY}", "races": races}
    speculating.ask("write", store=live, out=out, options=IN_PARTS, to=SMALL | {"mode": mode}, hold=hold)
    tries = [json.loads(item.read_text()) for item in tmp_path.glob("marker.*")]
    assert sorted(item["attempt"] for item in tries) == [0, 1]
    assert len({item["partition"] for item in tries}) == 1
    assert len({item["pid"] for item in tries}) == 2
    assert bodies(out) == expected(0, COUNT)
    for root in roots(str(out)):
        assert rmq.verify(root) == []

    def is_clean() -> bool:  # the slower try may not have been told yet
        clean_staging(str(out), older_than=0)
        return not list((out / "rmq" / "spark" / "staging").iterdir())

    until(is_clean, "an empty staging directory")
    assert bodies(out) == expected(0, COUNT)


@pytest.mark.cluster
def test_a_read_gives_each_row_once_when_a_slow_task_is_tried_twice(speculating: Application, live: Path,
                                                                    tmp_path: Path) -> None:  # fmt: skip
    hold = {"marker": str(tmp_path / "marker"), "body": f"150 {BODY}", "races": True}
    assert sorted(speculating.ask("read", store=live, options=IN_PARTS, hold=hold)) == stored(live)
    assert len(list(tmp_path.glob("marker.*"))) == 2
