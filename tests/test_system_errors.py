# SPDX-License-Identifier: Apache-2.0
"""Errors of the system name their file and what to do, and none is taken for damage."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cleaning
import pytest
from forks import lock_of_a_broker

import rmq
from rmq import lock, mappedfile, marks, queuefiles, segment
from rmq.owed import Owed
from rmq.paths import StorePaths

CONFIG = rmq.StoreConfig(max_hash_slot_num=10, max_index_num=40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("t", b""))
    return tmp_path / "s"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_manifest_that_cannot_be_opened_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """What this process lacks is an error; else the warning has the system's reason."""
    def read(path: Path, limit: int) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(marks, "read_file", read)
    if number == errno.EIO:
        assert marks.read_manifest(StorePaths(path)) is None
        assert os.strerror(number) in caplog.text
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            marks.read_manifest(StorePaths(path))
        assert caplog.text == ""


def test_a_file_that_finds_no_room_to_be_mapped_is_named(path: Path) -> None:
    code = f"import resource, rmq; resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2); rmq.open({str(path)!r})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert told.splitlines()[-1] == f"OSError: [Errno {errno.ENOMEM}] Cannot allocate memory: " \
        f"'{path / 'commitlog' / f'{0:020d}'}'"  # fmt: skip


class C:
    """The C library whose renameat2 fails."""

    def __init__(self, number: int) -> None:
        self.number = number

    def renameat2(self, *arguments: object) -> int:
        ctypes.set_errno(self.number)
        return -1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_directories_cannot_be_exchanged_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(segment.ctypes, "CDLL", lambda *_, **__: C(number))
    assert not segment.exchange(tmp_path / "a", tmp_path / "b")


def test_a_directory_that_cannot_be_renamed_at_all_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment.ctypes, "CDLL", lambda *_, **__: C(errno.EXDEV))
    with pytest.raises(OSError, match="rebuild with an output") as error:
        segment.exchange(tmp_path / "a", tmp_path / "b")
    assert error.value.errno == errno.EXDEV


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENAMETOOLONG])
def test_a_writer_that_can_make_no_queue_file_any_more_reads_all_it_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As a file system that turned read only after an error of its disk. What is refused may be granted later."""
    config = rmq.StoreConfig(mapped_file_size_consume_queue=400, flush_interval_commit_log=2**31 - 1)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("T", b"%d" % number, keys=f"k{number}") for number in range(20)])
        store.flush()

        def refused(path: Path, *args: object) -> int:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(queuefiles, "create_file", refused)
        store.put_many([rmq.Message("T", b"%d" % number, keys=f"k{number}") for number in range(20, 25)])
        assert store.topics() == {"T": {0: (0, 25)}}
        assert [message.body for message in store.pull("T", 0, 18).messages] == [b"%d" % n for n in range(18, 25)]
        for key in (3, 24):
            assert [message.body for message in store.query("T", f"k{key}")] == [b"%d" % key]
        with pytest.raises(OSError, match=os.strerror(number)):
            store.flush()
        assert store.lookup(("T", 0, 24)).body == b"24"
        passes = number == errno.EACCES
        if not passes:
            with pytest.raises(rmq.StoreReadOnlyError):
                store.put(rmq.Message("T", b""))
        monkeypatch.undo()
        if passes:
            store.put(rmq.Message("T", b""))
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.topics() == {"T": {0: (0, 25 + passes)}}


@pytest.mark.parametrize("is_there", [False, True])
def test_no_store_is_made_below_which_a_queue_has_no_room_in_a_path(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path
    while len(os.fsencode(path)) < 3800:
        path /= "d" * 100
    path.parent.mkdir(parents=True)
    if is_there:
        path.mkdir()
    for mode in ("x", "a"):
        with pytest.raises(OSError, match="leaves less than 350 bytes") as raised:
            rmq.open(path, mode)  # type: ignore[arg-type]
        assert raised.value.errno == errno.ENAMETOOLONG
        assert not path.exists() or not list(path.iterdir())
    with rmq.open(Path(*path.parts[:-2], "s"), "x") as store:
        store.put(rmq.Message("%RETRY%" + "t" * 248, b"", queue_id=2**31 - 1))
        store.flush()
        assert len(store.pull("%RETRY%" + "t" * 248, 2**31 - 1).messages) == 1


def test_a_deadline_amid_a_cleaning_of_a_full_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal handler raises while queues are synced that a flush without room left behind."""
    with cleaning.open_store(tmp_path / "s", "x", cleaning.CONFIG) as store:
        cleaning.fill(store)
        cleaning.expire(tmp_path / "s", 4 * cleaning.SEGMENT)

        def full() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def late(_: object) -> None:
            raise TimeoutError("the deadline")

        with monkeypatch.context() as patched:
            patched.setattr(store._flusher, "flush", full)
            patched.setattr(Owed, "sync_queues", late)
            with pytest.raises(TimeoutError, match="the deadline"):
                cleaning.clean(store)
        assert store.min_phy_offset == 0
        assert cleaning.clean(store).removed


def test_an_exclusive_open_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other sizes, and where the directory was there."""
    for path in (tmp_path / "new", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(mappedfile, "allocate", full)
        with pytest.raises(OSError, match="No space left"):
            rmq.open(path, "x")
        monkeypatch.undo()
        assert list(path.iterdir()) == []
        with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=4096)) as store:
            store.put(rmq.Message("T", b"x"))


def test_what_nfs_keeps_of_a_removed_file_is_no_damage(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=4096)) as store:
        store.put_many([rmq.Message("T", b"x" * 200)] * 60)
    for directory in ("commitlog", "consumequeue/T/0", "index"):
        (tmp_path / "s" / directory / ".nfs000000000123abcd00000001").write_bytes(b"x" * 100)
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode) as store:  # type: ignore[call-overload]
            assert len(store.pull("T", limit=99).messages) == 60


def test_errors_of_the_lock_and_of_a_sync_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refused)
        with pytest.raises(OSError, match=r"No locks available: '.*/lock'"):
            rmq.open(tmp_path / "s", "a")

    def failed(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = rmq.open(tmp_path / "s", "a")
    store.put(rmq.Message("T", b"x"))
    monkeypatch.setattr(os, "fdatasync", failed)
    with pytest.raises(OSError, match=r"Input/output error: '.*commitlog"):
        store.flush()
    store.close()


def test_without_descriptors_nobody_is_taken_for_the_holder_of_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit beside a broker would be lost."""
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x"))
    real = os.open

    def none_left(path: Any, *arguments: Any, **options: Any) -> int:
        if os.fspath(path).endswith("/lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real(path, *arguments, **options)

    with lock_of_a_broker(tmp_path / "s"), rmq.open(tmp_path / "s") as reader:
        monkeypatch.setattr(os, "open", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            reader.commit_offsets("g", "T", {0: 1})
        monkeypatch.undo()
        with pytest.raises(rmq.StoreReadOnlyError):
            reader.commit_offsets("g", "T", {0: 1})


@pytest.mark.parametrize("fails", ["lock", "sync"])
def test_an_exclusive_open_can_be_tried_again_whatever_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The lock's own bytes; a sync, as NFS and quotas tell that there is no room."""
    count, fsync = [0], os.fsync

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fourth(descriptor: int) -> None:
        count[0] += 1
        (full if count[0] == 4 else fsync)(descriptor)

    monkeypatch.setattr(*((lock, "write_fully", full) if fails == "lock" else (os, "fsync", fourth)))
    with pytest.raises(OSError, match="No space left"):
        rmq.open(tmp_path / "s", "x", config=CONFIG)
    monkeypatch.undo()
    rmq.open(tmp_path / "s", "x", config=CONFIG).close()


def test_an_exclusive_open_that_fails_leaves_what_others_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        (tmp_path / "s/theirs").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mappedfile, "allocate", full)
    with pytest.raises(OSError, match="No space left"):
        rmq.open(tmp_path / "s", "x", config=CONFIG)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["theirs"]
