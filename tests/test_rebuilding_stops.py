"""A rebuild in a store that is stopped between its renames, or may not begin."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import copy_store, digests
from test_rebuilding import PARTS, Countdown, Stopped, assert_answers, cleaned, fill

import rmq
from rmq import deriving, rebuilding


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("rebuilding") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return copy_store(made, tmp_path / "store")


def test_a_crash_between_renames_keeps_the_offsets_of_queues_without_messages(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The next open for writing, or the next rebuild, puts in place what the killed one had made."""
    source = cleaned(tmp_path / "source")
    with rmq.open(source, "r+") as store:
        topics = store.topics()
    derive, rename, rmtree = rebuilding.derive, os.rename, shutil.rmtree
    for step, goes_on in [(step, goes_on) for step in range(6) for goes_on in ("r+", "rebuild")]:
        path, countdown = copy_store(source, tmp_path / f"{goes_on}{step}"), Countdown(step)

        def counted(*arguments: Any, countdown: Countdown = countdown) -> deriving.Derived:
            found = derive(*arguments)
            monkeypatch.setattr(os, "rename", countdown.before(rename))
            monkeypatch.setattr(shutil, "rmtree", countdown.before(rmtree))
            return found

        monkeypatch.setattr(rebuilding, "derive", counted)
        with contextlib.suppress(Stopped):
            rmq.rebuild(path, processes=1)
        monkeypatch.undo()
        assert (path / "consumequeue").exists() == (step != 1)
        if goes_on == "rebuild":
            rmq.rebuild(path, processes=1)
        with rmq.open(path, "r+") as store:
            assert store.topics() == topics, (step, goes_on)
            assert store.put(rmq.Message("over", b"")).queue_offset == 130
        assert rmq.verify(path).is_sound
        shutil.rmtree(path)


@pytest.mark.parametrize("error", [OSError(16, "Device or resource busy"), KeyboardInterrupt()])
def test_a_rename_that_fails_leaves_the_store_as_it_was(made: Path, tmp_path: Path, error: BaseException,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    rename = os.rename
    for failing in range(4):
        path, calls = copy_store(made, tmp_path / f"s{failing}"), iter(range(100))
        before = digests(path, *PARTS, "rmq")

        def failed(source: Path, target: Path, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise error
            rename(source, target)

        monkeypatch.setattr(os, "rename", failed)
        with pytest.raises(type(error)):
            rmq.rebuild(path, processes=1)
        monkeypatch.undo()
        assert digests(path, *PARTS, "rmq") == before
        assert not (path / "rmq" / "replaced").exists()
        assert_answers(path)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_lies_elsewhere_is_told_first(store: Path, tmp_path: Path, part: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    shutil.move(store / part, tmp_path / "elsewhere")
    (store / part).symlink_to(tmp_path / "elsewhere")
    before = digests(store, *PARTS, "rmq")
    monkeypatch.setattr(rebuilding, "derive", None)
    with pytest.raises(OSError, match="rebuild with an output") as found:
        rmq.rebuild(store, processes=1)
    assert found.value.filename == str(store / part)
    monkeypatch.undo()
    assert digests(store, *PARTS, "rmq") == before
    rmq.rebuild(store, tmp_path / "new", processes=1)
    if part == "index":
        rmq.rebuild(store, config=rmq.StoreConfig(message_index_enable=False), processes=1)
    assert_answers(store)


@pytest.mark.parametrize("place", ["new", "consumequeue/new", "commitlog/new", "index/new", "rmq/rebuild"])
def test_an_output_in_the_store_is_refused(store: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(store)
    for target in (store / place, tmp_path / "link" / place):
        with pytest.raises(ValueError, match="lies in the store"):
            rmq.rebuild(store, target, processes=1)
    assert not (store / place).exists()
