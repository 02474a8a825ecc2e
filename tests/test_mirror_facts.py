# SPDX-License-Identifier: Apache-2.0
"""Small files that say whose store it is: a store on an object store is judged by them as its copy here is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from objectstore import CONFIG, Bucket
from test_legacy_keys import HIDDEN, of_broker

import rmq
from rmq import legacy
from rmq.mirror import MirroredStore
from rmq.objects import Location
from rmq.snapshot import Snapshot

Opened = Callable[[Path], list[rmq.Store]]


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The store at a path, and the same on an object store."""

    def opened(path: Path) -> list[rmq.Store]:
        bucket = Bucket(path, tmp_path / "cache")
        monkeypatch.setattr(Location, "connect", lambda location: bucket.connect(location))
        return [rmq.open(path), MirroredStore(Snapshot.take(bucket.location).of("queues", "index"))]

    return opened


@pytest.mark.parametrize("lost", ["a sector", "a header"])
def test_what_a_killed_writer_of_ours_left_torn_is_served_by_neither(both: Opened, tmp_path: Path, lost: str) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG, clock=lambda: 10**12) as store:
        store.put_many([rmq.Message("T", b"%d" % number) for number in range(5)])
        store.flush()
        torn = store.put(rmq.Message("T", b"torn", keys="torn", properties={"p": "v" * 3000})).phy_offset
        store.put_many([rmq.Message("T", b"behind")] * 3)
        shutil.copytree(path, tmp_path / "killed")
    place, size = (torn + 4, 4) if lost == "a header" else ((torn // 512 + 3) * 512, 512)
    with (tmp_path / f"killed/commitlog/{0:020d}").open("r+b") as file:
        file.seek(place)
        file.write(bytes(size))
    for store in both(tmp_path / "killed"):
        with store:
            assert store.scan().read_all()["body"].to_pylist() == [b"%d" % number for number in range(5)]
            assert (store.max_phy_offset, store.query("T", "torn")) == (torn, [])


def test_a_broker_s_topics_of_batches_are_known_to_both(both: Opened, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message(topic, b"", keys="k") for topic in "BBA"])
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue/B")
    topic = {"topicName": "B", "readQueueNums": 1, "writeQueueNums": 1, "attributes": {"queue.type": "BatchCQ"}}
    (path / "config/topics.json").write_text(json.dumps({"topicConfigTable": {"B": topic}}))
    (path / "abort").touch()
    here, there = both(path)
    with here, there:
        assert there.table("queues").read_all().equals(here.table("queues").read_all())


@pytest.mark.parametrize(("sign", "is_searched"), [(None, True), ("timerwheel", False), ("rocksdbstore/LOG", False)])
def test_signs_of_a_later_broker_spare_both_the_search_of_the_log(both: Opened, tmp_path: Path, sign: str | None,
                                                                  is_searched: bool) -> None:  # fmt: skip
    path = of_broker(tmp_path / "s", "5.3.3")
    (path / "abort.bak").unlink()
    if sign is not None:
        (path / sign).parent.mkdir(exist_ok=True)
        (path / sign).write_bytes(b"x")
    for store in both(path):
        with store, patch.object(legacy, "ambiguous_records", side_effect=legacy.ambiguous_records) as made:
            store.query("T", HIDDEN)
            assert made.called is is_searched
