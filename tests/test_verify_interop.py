"""Stores that rmq and RocketMQ write in turn, closed and killed, give rmq.verify nothing to find but what is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rocketmq import RELEASES, RocketMQ
from test_interop import SMALL, items

import rmq
from rmq._core import _layout as L

pytestmark = pytest.mark.interop

NOTHING: dict[str, list[object]] = {"pulls": [], "keys": [], "times": []}


@pytest.fixture(params=RELEASES)
def rocketmq(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RocketMQ]:
    java = RocketMQ(request.param, tmp_path / "java")
    yield java
    java.close()


def put(store: rmq.Store, turn: int, release: str) -> None:
    for item in items(120, f"turn{turn}", release):
        if isinstance(item, list):
            store.put_batch(item)
        else:
            store.put(item)


def test_both_write_in_turn_and_every_closed_store_is_sound(rocketmq: RocketMQ, tmp_path: Path) -> None:
    config = rmq.StoreConfig(**SMALL, rocketmq_version=rocketmq.release)
    path, count = tmp_path / "s", 0
    for turn in range(6):
        if turn % 2:
            rocketmq.open(path, config, NOTHING, put=items(120, f"turn{turn}", rocketmq.release))
        else:
            with rmq.open(path, "a", config=config) as store:
                put(store, turn, rocketmq.release)
        result = rmq.verify(path)
        assert result == [], "\n".join(map(str, result))
        assert result.record_count > count
        count = result.record_count


def test_what_a_killed_rocketmq_leaves_is_sound_and_so_is_our_recovery_of_it(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    config = rmq.StoreConfig(**SMALL, rocketmq_version=rocketmq.release)
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config) as store:
        put(store, 0, rocketmq.release)
    for turn in range(1, 4):
        rocketmq.open(path, config, NOTHING, put=items(120, f"turn{turn}", rocketmq.release), leave_open=True)
        open_result = rmq.verify(path)
        assert open_result.state == "open"
        assert open_result == [], "\n".join(map(str, open_result))
        rocketmq.kill()
        result = rmq.verify(path)
        assert result.state == "not closed"
        assert result.is_sound, "\n".join(map(str, result))
        with rmq.open(path, "r+", config=config):
            pass
        after = rmq.verify(path)
        assert after == [], "\n".join(map(str, after))
        assert after.record_count >= result.record_count


def test_a_torn_end_that_rocketmq_recovered_is_sound(rocketmq: RocketMQ, tmp_path: Path) -> None:
    """It leaves the torn record, and from 5.x on its unit; the checkpoint tells that from one that was lost later."""
    config = rmq.StoreConfig(**SMALL, rocketmq_version=rocketmq.release)
    path = tmp_path / "s"
    rocketmq.open(path, config, NOTHING, put=[item for item in items(40, "T", rocketmq.release)
                                              if not isinstance(item, list)], leave_open=True)  # fmt: skip
    image = shutil.copytree(path, tmp_path / "image")
    rocketmq.close()
    with rmq.open(image) as store:
        places = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
    start = places[-1] - places[-1] % config.mapped_file_size_commit_log
    with (image / "commitlog" / f"{start:020d}").open("r+b") as file:
        file.seek(places[-1] - start + L.RECORD_BODY_SIZE_OFFSET)
        file.write(bytes(30))
    rocketmq.open(image, config, NOTHING)
    result = rmq.verify(image)
    assert (result.state, result.record_count) == ("closed", len(places) - 1)
    assert result.is_sound, "\n".join(map(str, result))
