"""Who looks while jobs come and go sees all of a job or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark import clean_staging
from rmq.spark.options import ReadOptions
from rmq.spark.selection import log_bounds, select
from rmq.spark.staging import Staging, Written, roots
from spark.conftest import Crash
from spark.test_staging import CONFIG, bodies, stage


@pytest.mark.parametrize("when", [1, 2])
def test_who_looks_during_an_overwrite_sees_the_jobs_before_or_behind_it(tmp_path: Path, when: int,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker goes before it is read, or it was gone already when the directory was listed."""
    def overwrite(job: str) -> None:
        staging = Staging(str(tmp_path), job)
        staging.commit_shards([stage(staging, 0, [job])], overwrite=True)

    overwrite("a")
    real, calls = Path.glob, iter(range(1, 9))

    def listing(path: Path, pattern: str) -> Iterator[Path]:
        found, call = list(real(path, pattern)), next(calls)
        if pattern == "*.json" and call == 1:
            monkeypatch.setattr(Path, "glob", real)
            overwrite("b")
            monkeypatch.setattr(Path, "glob", listing)
        return iter(found if when == 1 or call > 1 else [])

    monkeypatch.setattr(Path, "glob", listing)
    found = roots(str(tmp_path))
    monkeypatch.undo()
    assert found == [f"{tmp_path}/part-00000-b"]


class Watched:
    """A store whose ends, when they are asked for, come at a bad moment: during `look`."""

    def __init__(self, store: rmq.Store, look: Any) -> None:
        self._store, self._look = store, look

    def __getattr__(self, name: str) -> Any:
        if name == "max_phy_offset":
            return self._look(lambda: self._store.max_phy_offset)
        return getattr(self._store, name)

    def topics(self) -> Any:
        return self._look(self._store.topics)


def append_in_part(staging: Staging, written: list[Written]) -> None:
    real, left = rmq.Store.put_many, iter([True])

    def put_once(*arguments: Any, **named: Any) -> Any:
        if next(left, False):
            return real(*arguments, **named)
        raise Crash

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rmq.Store, "put_many", put_once)
        with pytest.raises(Crash):
            staging.commit_single(written)


@pytest.mark.parametrize("which", ["log", "queues"])
def test_a_plan_does_not_see_a_part_of_an_append_that_begins_or_ends_meanwhile(tmp_path: Path, which: str) -> None:
    first, second = Staging(str(tmp_path), "a"), Staging(str(tmp_path), "b")
    first.commit_single([stage(first, 0, ["0"])], CONFIG)
    written, looks = [stage(second, 0, ["a"]), stage(second, 1, ["b"])], iter(range(9))

    def begins_before(look: Any) -> Any:
        if next(looks) == 0:
            append_in_part(second, written)
        return look()

    def ends_behind(look: Any) -> Any:
        found = look()
        if next(looks) == 0:
            clean_staging(str(tmp_path))
        return found

    def bounds(look: Any) -> Any:
        nonlocal looks
        looks = iter(range(9))
        with rmq.open(tmp_path) as store:
            watched: Any = Watched(store, look)
            if which == "log":
                return log_bounds(watched)[1]
            return select(watched, ReadOptions.parse({"path": str(tmp_path), "assign": '{"t": [0]}'})).bounds

    before = bounds(lambda look: look())
    assert bounds(begins_before) == before
    after = bounds(ends_behind)
    assert after != before
    assert after == bounds(lambda look: look())
    assert bodies(tmp_path) == list("0ab")
