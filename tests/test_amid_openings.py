# SPDX-License-Identifier: Apache-2.0
"""Who looks at a store while another one recovers, rebuilds or puts, and a rebuild of what a broker closed."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import test_half_records
from test_broker_crashes import make, run_broker
from test_groups import keep
from test_syncs import FAR, config, message, numbers

import rmq
import rmq.lock
import rmq.recovery
import rmq.store
from rmq import rebuilding
from rmq.lock import StoreLock
from rmq.logcuts import Proof
from rmq.mappedfile import MappedFile
from rmq.marks import Marks, shown_end
from rmq.paths import StorePaths


def look_amid(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[[], object]) -> list[object]:
    """What a look gives that is taken when a function is called for the first time, before it does anything."""
    real, found, looks = getattr(owner, name), list[object](), [look]

    def looking(*arguments: Any, **options: Any) -> Any:
        if looks:
            found.append(looks.pop()())  # which may come here, too
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, looking)
    return found


def told(path: Path) -> tuple[int, object, int]:
    """By a reader that is opened now: how many messages there are, queues, and messages of the newest one's key."""
    with rmq.open(path) as reader:
        return reader.scan().read_all().num_rows, reader.topics(), len(reader.query("T", "newest"))


def behind_a_broker(path: Path) -> Path:
    """A store of 20 messages that a broker has put a newest one into, and closed."""
    make(path)
    run_broker(path, [rmq.Message("T", b"newest", keys="newest")], is_closed=True)
    return path


BEHIND = 21, {"T": {0: (0, 21)}}, 1


def test_a_reader_opened_amid_a_rebuild_sees_what_a_broker_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = behind_a_broker(tmp_path / "s")
    found = look_amid(monkeypatch, rebuilding, "derive", lambda: told(path))
    rmq.rebuild(path, processes=1)
    assert [*found, told(path)] == [BEHIND] * 2


amid_an_open = pytest.mark.parametrize(("owner", "name"), [
    (rmq.store, "settle_config"), (rmq.store, "announce_writer"), (rmq.store, "read_manifest"), (rmq.store, "recover"),
    (rmq.recovery, "find_end"),
])  # fmt: skip


@amid_an_open
def test_a_reader_opened_amid_an_open_sees_what_a_broker_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             owner: Any, name: str) -> None:  # fmt: skip
    path = behind_a_broker(tmp_path / "s")
    found = look_amid(monkeypatch, owner, name, lambda: (told(path), rmq.verify(path)))
    rmq.open(path, "r+").close()
    assert found == [(BEHIND, [])]


@amid_an_open
def test_a_reader_opened_amid_the_recovery_from_power_loss_sees_all_that_was_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """What readers are shown is as old as the last flush then."""
    image = tmp_path / "image"
    with rmq.open(tmp_path / "s", "x", config=config(flush_disk_type="SYNC_FLUSH")) as store:
        store.put_many([message(number) for number in range(10)])
        store.flush()
        marks = (tmp_path / "s/rmq/marks").read_bytes()
        store.put_many([message(number) for number in range(10, 20)])
        shutil.copytree(tmp_path / "s", image)
    (image / "rmq/marks").write_bytes(marks)

    def look() -> tuple[list[int], object]:
        with rmq.open(image) as reader:
            return numbers(reader), rmq.verify(image).is_sound

    found = [look(), look_amid(monkeypatch, owner, name, look)]
    rmq.open(image, "r+").close()
    assert found == [([*range(20)], True), [([*range(20)], True)]]


def half_on_disk(path: Path, image: Path, *, is_shown: bool = False) -> None:
    """What power loss leaves: the second message, which was not flushed, lacks a sector of its properties. is_shown:
    that readers saw it is on disk.
    """
    with rmq.open(path, "x", config=config()) as store:
        store.put(message(0))
        store.flush()
        durable = shown = store.max_phy_offset
        store.put(message(1, long="v" * 2000))
        if is_shown:
            shown = store.max_phy_offset
        shutil.copytree(path, image)
    with (image / "commitlog" / f"{0:020d}").open("r+b") as log:
        log.seek((durable // 512 + 2) * 512)
        log.write(bytes(512))
    marks = Marks(image / "rmq/marks", writable=True)
    marks.show(shown)
    marks.close()


@amid_an_open
@pytest.mark.parametrize(("is_shown", "lost"), [(False, ""), (True, ""), (True, "rmq/marks"), (True, "rmq")])
def test_a_reader_amid_a_recovery_sees_no_message_that_it_cuts_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_shown: bool, lost: str
) -> None:
    """Also without marks, and of a store that is a broker's by then."""
    half_on_disk(tmp_path / "s", tmp_path / "image", is_shown=is_shown)
    if lost == "rmq":
        shutil.rmtree(tmp_path / "image/rmq")
        name = {"read_manifest": "recover"}.get(name, name)  # there is none
    elif lost:
        (tmp_path / "image" / lost).unlink()

    def look() -> tuple[rmq.Store, list[int]]:
        reader = stack.enter_context(rmq.open(tmp_path / "image"))
        return reader, numbers(reader)

    with ExitStack() as stack:
        found: Any = look_amid(monkeypatch, owner, name, look)
        writer = stack.enter_context(rmq.open(tmp_path / "image", "r+", config=config()))
        (reader, seen), = found
        assert seen == numbers(reader) == [0]
        writer.put(message(2))
        assert numbers(reader) == [0, 2]
        assert reader.pull("T", 0).messages == writer.pull("T", 0).messages


def test_an_open_that_fails_shows_what_was_shown_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "s")
    before = shown_end(StorePaths(tmp_path / "s"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(rmq.Store, "_prepare_puts", full)
    with pytest.raises(OSError, match="no room"):
        rmq.open(tmp_path / "s", "r+")
    assert shown_end(StorePaths(tmp_path / "s")) == before > 0


def test_of_two_processes_that_begin_a_store_one_has_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one made and closed it between our look at the directory and our lock."""
    real = rmq.store.StoreLock

    def later(*arguments: Any) -> StoreLock:
        monkeypatch.undo()
        with rmq.open(tmp_path / "s", "x") as store:
            store.put(message(0))
        return real(*arguments)

    monkeypatch.setattr(rmq.store, "StoreLock", later)
    with pytest.raises(FileExistsError, match="is not empty"):
        rmq.open(tmp_path / "s", "x")
    with rmq.open(tmp_path / "s") as reader:
        assert numbers(reader) == [0]


def test_a_reader_older_than_the_log_tells_what_expires(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (path / "commitlog").mkdir(parents=True)
    with rmq.open(path) as reader:
        with rmq.open(path, "a", config=config()) as store:
            for number in range(50):
                store.put(message(number, long="v" * 2000))
        with rmq.open(path) as other:
            expected = other.clean(dry_run=True, now=2**42)
        assert reader.clean(dry_run=True, now=2**42) == expected
        assert expected.removed


# ---- rebuild ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_rebuild_keeps_the_last_message_of_a_closed_store_that_ends_with_nul(
    tmp_path: Path, is_in_place: bool
) -> None:
    """And what groups have consumed of it: only beside a broker it may be half there."""
    path, old = tmp_path / "s", dataclasses.replace(test_half_records.CONFIG, rocketmq_version="4.9.4")
    with rmq.open(path, "x", config=old) as store:
        store.put(rmq.Message("T", b"first"))
        store.put(rmq.Message("T", b"last", raw_properties=b"KEYS\1k\2a\1value"))
    segment = path / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"value", b"valu\0"))
    shutil.rmtree(path / "rmq")
    offsets = keep(path, '{"offsetTable":{"T@g":{0:2}}}')
    done = rmq.rebuild(path, None if is_in_place else tmp_path / "new", processes=1)
    assert (done.unit_count, done.key_count) == (2, 1)
    assert json.loads(offsets.read_text().replace("0:", '"0":'))["offsetTable"] == {"T@g": {"0": 2}}
    assert rmq.verify(path) == []


def test_a_rebuild_beside_a_writer_takes_nothing_of_a_put_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, results = MappedFile.write, list[int]()
    sizes = rmq.StoreConfig(mapped_file_size_commit_log=1 << 24, max_hash_slot_num=10, max_index_num=40,
                            flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=FAR)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=sizes) as store:
        store.put_many([message(number) for number in range(10)])
        calls = iter(range(100))

        def full(file: MappedFile, position: int, data: memoryview) -> None:
            if next(calls) == 1:  # behind the first piece
                results.append(rmq.rebuild(tmp_path / "s", tmp_path / "new", processes=1).unit_count)
                raise OSError(errno.ENOSPC, "no room")
            write(file, position, data)

        monkeypatch.setattr(MappedFile, "write", full)
        with pytest.raises(OSError, match="no room"):
            store.put_many([rmq.Message("T", b"x" * 100_000)] * 30)
        monkeypatch.undo()
        assert (results, numbers(store)) == ([10], [*range(10)])


def test_an_open_that_cannot_see_who_had_the_store_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a broker's a half message would stay: in its files no mark tells how far the log is on disk."""
    half_on_disk(tmp_path / "s", tmp_path / "image")
    real = rmq.lock.read_file

    def fails(path: Path, limit: int) -> bytes:
        if path.name == "owner":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(path, limit)

    monkeypatch.setattr(rmq.lock, "read_file", fails)
    for mode in ("r", "r+"):
        with pytest.raises(OSError, match=r"Too many open files.*owner"):
            rmq.open(tmp_path / "image", mode)  # type: ignore[call-overload]
    monkeypatch.undo()
    with rmq.open(tmp_path / "image", "r+") as store:
        assert numbers(store) == [0]


def test_a_reader_whose_look_at_a_recovery_s_cut_failed_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image"
    with rmq.open(tmp_path / "s", "x", config=config()) as store:
        store.put_many([message(number) for number in range(5)])
        last = store.scan(columns=["phy_offset"]).read_all()["phy_offset"][-1].as_py()
        shutil.copytree(tmp_path / "s", image)
    with ExitStack() as stack:
        with closing(StoreLock(StorePaths(image).lock, lambda: None)):  # its writer's, which then dies
            reader = stack.enter_context(rmq.open(image))
            assert numbers(reader) == [*range(5)]
        with (image / "commitlog" / f"{0:020d}").open("r+b") as log:
            log.seek(last)
            log.write(bytes(500))
        with rmq.open(image, "r+", config=config()) as writer:
            writer.put(message(7, long="v" * 1000))

            def fails(*_: object) -> bool:
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(Proof, "is_cut", fails)
            with pytest.raises(OSError, match="Too many"):
                numbers(reader)
            monkeypatch.undo()
            assert numbers(reader) == [0, 1, 2, 3, 7]
