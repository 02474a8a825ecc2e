# SPDX-License-Identifier: Apache-2.0
"""Readers beside a writer that removes a file and makes it again under its name: while it has no bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cleaning import CONFIG, SEGMENT, clean, expire, fill, open_store
from conftest import copy_store

import rmq
from rmq import retention
from rmq.index import Index
from rmq.logsegment import Segment
from rmq.verification import indexes


def emptied(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
    return tmp_path / "s"


def before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[..., object]) -> list[int]:
    """Something happens before the first call of a method, of which `act` wants to know; gives how often it did."""
    real, done = getattr(owner, name), [0]

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if not done[0] and act(self, *arguments) is not False:
            done[0] += 1
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, name, method)
    return done


def test_an_index_file_that_is_being_made_again_holds_no_keys_yet(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = max((path / "index").iterdir())
    done = before(monkeypatch, Index, "_open", lambda _, file, *mode: file == last and emptied(file))
    with rmq.open(path) as reader:
        assert done == [1]
        assert len(reader.query("T", "k199", limit=None)) + len(reader.query("late", "k198", limit=None)) == 2


def test_an_index_file_that_is_cut_short_is_no_file_that_is_being_made(
        path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    last = max((path / "index").iterdir())
    done = before(monkeypatch, Index, "_open", lambda _, file, *mode: file == last and os.truncate(file, 50))
    with pytest.raises(rmq.CorruptFileError, match=f"{last.name}: byte 50"):
        rmq.open(path)
    assert done == [1]


def test_a_segment_that_is_being_made_again_is_not_the_log_s_yet(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(path, "r+") as store:
        end = store.max_phy_offset
    last = path / "commitlog" / f"{-(-end // SEGMENT) * SEGMENT:020d}"
    last.write_bytes(b"\1" * SEGMENT)  # as of a put that was not finished
    (path / "abort").touch()
    done = before(monkeypatch, Segment, "_map", lambda segment, *_: segment.path == last and emptied(last))
    with rmq.open(path) as reader:
        assert reader.max_phy_offset == end
        assert sum(batch.num_rows for batch in reader.scan()) == 200
    assert done == [1]


def test_verify_passes_over_an_index_file_that_is_being_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = max((path / "index").iterdir())
    done = before(monkeypatch, indexes.IndexFiles, "_mapped", lambda _, file: file == last and emptied(file))
    found = [item for item in rmq.verify(path) if item.severity != "note"]  # nobody is at work here: it is lost
    assert ({item.severity for item in found}, done) == ({"derived"}, [1])
    assert any(item.path == str(last) and item.reason.endswith("there is none, or an empty one") for item in found)


@pytest.mark.parametrize("first", [True, False], ids=["opened amid the cleaning", "opened before"])
@pytest.mark.parametrize("count", [1, 2, 10, 12])
def test_a_queue_that_begins_again_ends_where_its_new_files_do(
        path: Path, monkeypatch: pytest.MonkeyPatch, count: int, first: bool) -> None:  # fmt: skip
    """It had 10 messages. The reader looks between the removal of its messages and that of its files."""
    readers = [] if first else [rmq.open(path)]

    def look(*_: object) -> None:
        readers.extend([rmq.open(path)] if first else [])
        assert readers[0].topics().get("old", {0: (10, 10)}) == {0: (10, 10)}

    with open_store(path, "r+") as store:
        expire(path, 4 * SEGMENT)
        done = before(monkeypatch, retention.Retention, "_remove_queue", look)
        clean(store, expired_queues=True)
        store.put_many([rmq.Message("old", b"new %d" % number) for number in range(count)])
        store.flush()
        (reader,) = readers
        reader._queues.cache._keep(0)  # type: ignore[attr-defined]  # as where many queues are read
        for _ in range(2):
            assert reader.topics()["old"] == {0: (0, count)}
            page = reader.pull("old", 0, 0)
            assert [item.body for item in page.messages] == [b"new %d" % number for number in range(count)]
        reader.close()
    assert done == [1]


@pytest.mark.parametrize("ask", [
    lambda reader: reader.lookup(0).phy_offset,
    lambda reader: reader.lookup("7F00000100002A9F0000000000000000").phy_offset,
    lambda reader: reader.table("segments").read_all().num_rows - 1,
    lambda reader: reader.scan().read_all().num_rows - 1,
], ids=["a phy offset", "an id", "segments", "a scan"])  # fmt: skip
def test_the_first_question_of_a_reader_from_before_the_first_put_is_answered(
        tmp_path: Path, ask: Callable[[rmq.Store], int]) -> None:  # fmt: skip
    (tmp_path / "s/commitlog").mkdir(parents=True)
    with rmq.open(tmp_path / "s") as reader, open_store(tmp_path / "s", "a", CONFIG) as store:
        store.put(rmq.Message("T", b"body"))
        assert ask(reader) == 0


def test_verify_judges_no_index_file_while_a_repair_has_not_ended(tmp_path: Path) -> None:
    """Nobody is at work at it any more: it was killed behind the removal of a file."""
    path = tmp_path / "killed"
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        fill(store)
        copy_store(tmp_path / "s", path)
    (path / "rmq/manifest.json").unlink()
    min((path / "index").iterdir()).unlink()
    found = rmq.verify(path)
    assert {item.severity for item in found} == {"note"}
    assert "index files are being derived again: not verified" in [item.reason for item in found]
    open_store(path, "r+").close()
    assert list(rmq.verify(path)) == []
