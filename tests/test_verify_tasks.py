# ruff: noqa: F401, F811
"""Verification by tasks of a Runner finds and counts what verification by threads does."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Golden
from test_verify_damage import TABLE, Victim, base

import rmq
from rmq.paths import StorePaths
from rmq.pool import in_processes
from rmq.verification.queues import QueueFiles
from rmq.verification.verify import verify_by
from rmq.verification.work import Tasks

SEVERAL = ("queue: hole", "index: hash", "small: checkpoint cut", "small: abort", "log: body")


def pickling(task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """A Runner of this process through which everything goes as bytes, each item by itself."""
    data = pickle.dumps(task)
    for item in items:
        answer = pickle.loads(data)(pickle.loads(pickle.dumps(item)))
        yield pickle.loads(pickle.dumps(answer))


def facts(result: rmq.VerifyResult) -> dict[str, Any]:
    return vars(result) | {"findings": list(result)}


def assert_same(path: Path, **options: Any) -> rmq.VerifyResult:
    result = rmq.verify(path, jobs=1, **options)
    assert facts(verify_by(pickling, path, **options)) == facts(result)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("group_bytes", [0, 8192, 2**27])
@pytest.mark.parametrize("name", TABLE)
def test_tasks_find_what_threads_find(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                      group_bytes: int) -> None:  # fmt: skip
    monkeypatch.setattr(Tasks, "group_bytes", group_bytes)
    shutil.copytree(base, tmp_path / "s")
    TABLE[name](Victim(tmp_path / "s"))
    assert len(assert_same(tmp_path / "s"))


def test_a_store_with_damage_in_all_its_parts(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "s")
    for name in SEVERAL:
        TABLE[name](Victim(tmp_path / "s"))
    assert len({item.severity for item in assert_same(tmp_path / "s")}) == 3
    assert len(assert_same(tmp_path / "s", limit=10**6)) >= 5


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_spans_of_segments_join_in_any_order(order: tuple[int, ...]) -> None:
    ground: Any = SimpleNamespace(paths=StorePaths(Path("s")), config=rmq.StoreConfig())
    queues = QueueFiles(ground, is_read=False)
    spans = [(0, 7, 100, False), (7, 10, 200, False), (10, 12, 300, False), (12, 20, 400, True)]
    for number in order:
        queues.add_spans(("t", 0), [spans[number]])
    assert queues.queues["t", 0].spans == [(0, 12, 100, False), (12, 20, 400, True)]
    queues.close()


def test_findings_past_the_limit_are_counted_alike(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "s")
    victim = Victim(tmp_path / "s")
    for number in range(0, 60, 2):
        victim.poke(*victim.unit_of(number), b"\xff")
        victim.poke(*victim.in_log(number, 90), b"\x00")
    result, other = rmq.verify(victim.path, limit=3), verify_by(pickling, victim.path, limit=3)
    counts = [(item.damage_count, item.derived_count, item.omitted, len(item)) for item in (result, other)]
    assert counts[0] == counts[1]
    assert counts[0][2] > 10


def test_rocketmq_s_own_stores(golden: Golden) -> None:
    assert assert_same(golden.directory / "store").is_sound


@pytest.mark.slow
def test_a_broker_s_crash_image(small_golden: Golden) -> None:
    assert_same(small_golden.directory / "crash")


def test_beside_a_writer(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200,
                             max_hash_slot_num=10, max_index_num=30)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for number in range(100):
            store.put(rmq.Message("t", b"%d" % number * 50, keys=f"k{number}"))
        store.flush()
        store.put(rmq.Message("t", b"not flushed", keys="last"))
        assert assert_same(tmp_path / "s").state == "open"


@pytest.mark.slow
def test_processes_find_the_same(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tasks, "group_bytes", 8192)
    shutil.copytree(base, tmp_path / "s")
    for name in SEVERAL:
        TABLE[name](Victim(tmp_path / "s"))
    assert facts(verify_by(in_processes(2), tmp_path / "s")) == facts(rmq.verify(tmp_path / "s"))


def test_no_store_is_an_error_before_any_task(tmp_path: Path) -> None:
    def none(*_: Any) -> Iterator[Any]:
        pytest.fail("was run")

    with pytest.raises(FileNotFoundError, match="no such store"):
        verify_by(none, tmp_path / "none")
    with pytest.raises(rmq.UnsupportedFormatError):
        verify_by(none, tmp_path)
    with pytest.raises(ValueError, match="limit"):
        verify_by(none, tmp_path, limit=0)
    with pytest.raises(TypeError, match="config"):
        verify_by(none, tmp_path, config="x")  # type: ignore[arg-type]
