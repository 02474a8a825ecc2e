"""Many small files behind few descriptors: a slow one holds up no other, and used-up descriptors are made free."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
from forks import in_child

import rmq.filecache
from rmq.errors import StoreClosedError
from rmq.filecache import FileCache


def test_a_slow_read_of_one_queue_file_holds_up_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = tmp_path / "slow", tmp_path / "other"
    slow.write_bytes(b"1")
    other.write_bytes(b"2")
    real, reached, go_on, answers = os.pread, threading.Event(), threading.Event(), []

    def pread(descriptor: int, size: int, position: int) -> bytes:
        if not reached.is_set():
            reached.set()
            go_on.wait()
        return real(descriptor, size, position)

    monkeypatch.setattr(os, "pread", pread)
    with closing(FileCache(writable=True)) as files:
        thread = threading.Thread(target=lambda: answers.append(files.read(slow, 0, 1)))
        thread.start()
        reached.wait()
        files.write(other, 0, b"3")
        files.forget(slow)
        assert files.read(other, 0, 1) == b"3"
        go_on.set()
        thread.join()
    assert answers == [b"1"]


def test_a_file_is_read_where_descriptors_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other files are closed for it."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(path.name.encode())
    with closing(FileCache(writable=False)) as files:
        assert [files.read(path, 0, 1) for path in paths] == [b"a", b"b", b"c"]
        opened = len(os.listdir("/proc/self/fd"))
        real, failures = os.dup, [OSError(errno.EMFILE, "used up")]

        def dup(descriptor: int) -> int:
            if failures:
                raise failures.pop()
            return real(descriptor)

        monkeypatch.setattr(os, "dup", dup)
        assert files.read(paths[0], 0, 1) == b"a"
        assert len(os.listdir("/proc/self/fd")) == opened - 2
        failures.append(OSError(errno.EMFILE, "used up"))
        with pytest.raises(OSError, match="used up"):
            files.read(paths[0], 0, 1)


def test_what_an_interrupted_close_has_left_open_the_next_closes(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    files = FileCache(writable=False)
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"x")
        files.read(tmp_path / str(number), 0, 1)
    before, real, calls = open_descriptors(), os.close, itertools.count()

    def close(descriptor: int) -> None:
        real(descriptor)
        if next(calls) == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(KeyboardInterrupt):
        files.close()
    files.close()
    assert open_descriptors() == before - 3


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_dropped_unclosed_closes_its_files_and_a_fork_s_child_keeps_its_own(tmp_path: Path) -> None:
    """A child has none of its parent's, and may have files of its own under these numbers."""
    (tmp_path / "file").write_bytes(b"1")
    caches = [FileCache(writable=False)]
    caches[0].read(tmp_path / "file", 0, 1)
    (descriptor,) = caches[0]._open.values()

    def is_open() -> bool:
        try:
            return os.fstat(descriptor).st_size == 1
        except OSError:
            return False

    def of_a_child() -> tuple[bool, bool, str]:
        was_open = is_open()
        os.dup2(os.open(tmp_path / "file", os.O_RDONLY), descriptor)
        with pytest.raises(StoreClosedError) as told:
            caches[0].read(tmp_path / "file", 0, 1)
        caches.clear()
        return was_open, is_open(), str(told.value)

    assert in_child(of_a_child) == (False, True, f"{tmp_path / 'file'}: store is closed")
    assert is_open()
    caches.clear()
    assert not is_open()


def test_caches_share_what_the_process_keeps_open_and_each_may_have_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmq.filecache, "_caches", {})
    monkeypatch.setattr(rmq.filecache, "FILE_CACHE_LIMIT", 12)
    monkeypatch.setattr(rmq.filecache, "FILE_CACHE_LEAST", 3)
    paths = [tmp_path / str(number) for number in range(20)]
    for path in paths:
        path.write_bytes(b"x")

    def kept(cache: FileCache) -> int:
        """Files that are open when all were read."""
        for path in paths:
            assert cache.read(path, 0, 1) == b"x"
        return len(cache._open)

    first, second, third = (FileCache(False) for _ in range(3))
    assert kept(first) == 12
    assert second.read(paths[0], 0, 1) == b"x"
    assert (kept(second), kept(third), kept(first)) == (3, 3, 6)
    assert (kept(third), kept(second)) == (3, 3)
    first.close()
    assert (kept(third), kept(second)) == (9, 3)
    second.close()
    third.close()
