# ruff: noqa: F401, F811
"""Verification by tasks of a Runner finds and counts what verification by threads does, beside a writer too."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Golden, copy_store
from test_verify_damage import TABLE, Victim, base

import rmq
from rmq import geometry
from rmq.lock import StoreLock
from rmq.logsegment import Segment
from rmq.paths import StorePaths
from rmq.pool import in_processes
from rmq.verification import ground, indexes, queues, verify
from rmq.verification.queues import QueueFiles
from rmq.verification.records import SegmentCheck
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


@dataclass
class Cleaned:
    """A store that is open, to be cleaned: of topic "gone" only the first third of the log has messages."""

    path: Path
    store: rmq.Store
    broker: StoreLock | None = None  # it has the store at `path` open; `store` is a copy

    def clean(self, share: float) -> None:
        """Remove a share of the log with its queue and index files; the queue that lost them all begins again.

        1: all that was there, behind which new messages stand.
        """
        if share == 1:
            self.store.put_many([rmq.Message("t", b"x" * 150)] * 60)
            self.store.flush()
        segments = sorted(Path(self.store.path, "commitlog").iterdir())
        for number, segment in enumerate(segments):
            os.utime(segment, (1, 1) if number < share * len(segments) else None)
        removed = self.store.clean(limit=None, max_used_percent=100, expired_queues=True).removed
        assert removed
        if self.broker is None:
            self.store.put_many([rmq.Message("gone", b"new", keys="k0")] * 30)
            return
        for segment in Path(self.store.path, "commitlog").iterdir():
            if not (self.path / "commitlog" / segment.name).exists():  # which its queues have not followed yet
                shutil.copy2(segment, self.path / "commitlog")
        for file in removed:
            (self.path / Path(file.path).relative_to(self.store.path)).unlink(missing_ok=True)


@pytest.fixture(params=["ours", "broker"])
def cleaned(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cleaned]:
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200,
                             max_hash_slot_num=10, max_index_num=30)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for number in range(300):
            store.put(rmq.Message("gone" if number % 3 == 0 and number < 100 else "t", b"x" * 150, keys=f"k{number}"))
        store.flush()
        if request.param == "ours":
            yield Cleaned(tmp_path / "s", store)
            return
        path = copy_store(tmp_path / "s", tmp_path / "broker")
        shutil.rmtree(path / "rmq")
        lock = StoreLock(path / "lock", lambda: None)
        yield Cleaned(path, store, lock)
        lock.close()


def behind_the_listing(begin: Callable[[], None], listed: Callable[..., Any], *args: Any) -> Any:
    """A directory of which the first file is seen, then what a cleaning leaves."""
    entries = listed(*args)
    _ = [entry.stat() for entry in entries[:1]]  # a DirEntry keeps it
    begin()
    return [entry for number, entry in enumerate(entries) if number == 0 or Path(entry.path).exists()]


def before(begin: Callable[[], None], method: Callable[..., Any], *args: Any) -> Any:
    begin()
    return method(*args)


def behind(begin: Callable[[], None], method: Callable[..., Any], *args: Any) -> Any:
    answer = method(*args)
    begin()
    return answer


def behind_its_map(begin: Callable[[], None], is_there: Callable[[Segment], bool], segment: Segment) -> bool:
    """Another thread needs the room of the map, then the file goes."""
    answer = is_there(segment)
    segment.let_go()
    begin()
    return answer


Moment = Callable[..., Any]
POINTS: dict[str, tuple[Any, str, Moment, tuple[int, ...]]] = {  # with the calls at which the cleaning comes
    "before the small files": (verify, "read_own_meta", before, (1,)),
    "before the sizes of a queue's files": (os, "listdir", before, (2,)),
    "before the geometry of an index file": (geometry, "_fitting", before, (1, 3)),
    "before the log": (ground, "scan_directory", before, (1,)),
    "during the list of the log": (ground, "scan_directory", behind_the_listing, (1,)),
    "behind the list of the log": (ground, "scan_directory", behind, (1,)),
    "during a list of queues": (queues, "scan_directory", behind_the_listing, (3, 5)),
    "behind a list of queues": (queues, "scan_directory", behind, (1, 2, 3, 5)),
    "behind the list of the index": (indexes, "scan_directory", behind, (1,)),
    "before an index file": (indexes.IndexFiles, "judge", before, (1, 2, 5)),
    "behind the map of a segment": (Segment, "is_there", behind_its_map, (2, 5, 20)),
    "before a segment": (SegmentCheck, "run", before, (1, 2, 12)),
    "within a segment": (SegmentCheck, "_load_units", before, (1, 2, 12)),
    "behind a segment": (SegmentCheck, "run", behind, (1, 2, 12)),
    "before units": (QueueFiles, "read", before, (1, 2, 20)),
    "before the log's end": (verify._Verification, "_judge_end", before, (1,)),
    "before a queue": (QueueFiles, "judge", before, (1, 2)),
    "before the end of a queue file": (queues, "data_end", before, (1, 2, 5)),
}


@pytest.mark.parametrize("by_tasks", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("point", "call"), [
    pytest.param(point, call, marks=[] if call == POINTS[point][3][0] else [pytest.mark.slow])
    for point in POINTS for call in POINTS[point][3]])  # fmt: skip
def test_what_is_cleaned_away_meanwhile_is_no_finding(cleaned: Cleaned, monkeypatch: pytest.MonkeyPatch, point: str,
                                                      call: int, share: float, by_tasks: bool) -> None:  # fmt: skip
    owner, name, moment, _ = POINTS[point]
    method, calls = getattr(owner, name), count(1)

    def called(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            return moment(partial(cleaned.clean, share), partial(method, **options), *args)
        return method(*args, **options)

    monkeypatch.setattr(owner, name, called)
    result = verify_by(pickling, cleaned.path) if by_tasks else rmq.verify(cleaned.path, jobs=1)
    assert next(calls) > call or owner is geometry, "nothing was cleaned"  # ours is told by rmq/meta.json
    assert result == []
    assert result.state == "open"


@pytest.mark.slow
@pytest.mark.parametrize("by_tasks", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_beside_a_cleaning_at_any_time(cleaned: Cleaned, seed: int, by_tasks: bool) -> None:
    rng = random.Random(seed)
    cleaning = threading.Timer(rng.uniform(0, 0.05), cleaned.clean, (rng.uniform(0.1, 0.98),))
    cleaning.start()
    for _ in range(3):
        assert (verify_by(pickling, cleaned.path) if by_tasks else rmq.verify(cleaned.path)) == []
    cleaning.join()


def test_damage_in_what_a_cleaning_leaves_is_found(cleaned: Cleaned, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = cleaned.path, SegmentCheck.run
    segment = sorted((path / "commitlog").iterdir())[-3]
    data = bytearray(segment.read_bytes())
    data[data.index(b"x" * 150)] ^= 1
    segment.write_bytes(data)

    def cleaned_first(check: SegmentCheck) -> Any:
        monkeypatch.undo()
        cleaned.clean(0.5)
        return run(check)

    monkeypatch.setattr(SegmentCheck, "run", cleaned_first)
    assert [(item.path, item.kind) for item in rmq.verify(path, jobs=1)] == [(str(segment), "crc")]


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
