"""What may be deleted at any time, because it comes from the log or from nowhere: all answers stay as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rmq

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=200, max_hash_slot_num=20,
                         max_index_num=60, flush_interval_commit_log=2**31 - 1)  # fmt: skip
FLUSHED, COUNT = 200, 220
PARTS = ["consumequeue", "consumequeue/T0", "consumequeue/T0/0", "consumequeue/T0/0/*first",
         "consumequeue/T0/0/*middle", "consumequeue/T0/0/*last", "index", "index/*first", "index/*last",
         "checkpoint", "config", "config/topics.json", "lock", "abort", "abort.bak", "rmq", "rmq/marks",
         "rmq/manifest.json", "rmq/meta.json", "rmq/owner", "rmq/manifest.json consumequeue",
         "rmq/manifest.json consumequeue/T0", "rmq/manifest.json index",
         "rmq/manifest.json consumequeue/T0/0/*first", "rmq/manifest.json consumequeue/T0/0/*middle",
         "rmq/manifest.json index/*first", "rmq/manifest.json index/*last",
         "rmq consumequeue index checkpoint abort"]  # fmt: skip


def message(number: int) -> rmq.Message:
    return rmq.Message(f"T{number % 2}", b"%d" % number, keys=f"k{number}", uniq_key=f"u{number}", queue_id=number % 3)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that was closed, and one as a killed process leaves it."""
    root = tmp_path_factory.mktemp("derived")
    with rmq.open(root / "closed", "x", config=CONFIG) as store:
        store.put_many([message(number) for number in range(FLUSHED)])
        store.flush()
        store.put_many([message(number) for number in range(FLUSHED, COUNT)])
        store.topics()
        shutil.copytree(root / "closed", root / "killed")
    return {"closed": root / "closed", "killed": root / "killed"}


def chosen(store: Path, part: str) -> Path:
    folder, _, which = part.partition("/*")
    files = sorted((store / folder).iterdir()) if which else [store / part]
    return files[{"first": 0, "middle": len(files) // 2}.get(which, -1)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_derived_may_be_deleted(
    stores: dict[str, Path], tmp_path: Path, part: str, end: str, mode: str
) -> None:
    path = tmp_path / "s"
    shutil.copytree(stores[end], path)
    for name in part.split():
        victim = chosen(path, name)
        assert victim.exists() or name in ("abort", "rmq/owner")  # which a closed store has not
        if victim.is_dir():
            shutil.rmtree(victim)
        victim.unlink(missing_ok=True)
    config = rmq.StoreConfig(max_hash_slot_num=20, max_index_num=60, mapped_file_size_consume_queue=200)
    with rmq.open(path, mode, config=config) as store:
        bodies = store.scan(columns=["body"]).read_all()["body"].to_pylist()
        assert bodies == [b"%d" % number for number in range(COUNT)]
        for number in range(0, COUNT, 7):
            topic = f"T{number % 2}"
            assert [found.body for found in store.query(topic, f"k{number}")] == [b"%d" % number]
            assert store.lookup(f"u{number}", topic=topic).body == b"%d" % number
        assert sum(high - low for queues in store.topics().values() for low, high in queues.values()) == COUNT
        for topic, queues in store.topics().items():
            for queue_id in queues:
                got = [int(found.body) for found in store.pull(topic, queue_id, 0, COUNT).messages]
                assert got == [n for n in range(COUNT) if topic == f"T{n % 2}" and queue_id == n % 3]
