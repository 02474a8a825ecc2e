# SPDX-License-Identifier: Apache-2.0
"""Whole objects on this disk: fetched once, bounded, never taken from under who reads them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rmq.objectcache import CacheFullError, ObjectCache, default_directory


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache", 1000)


def writer(data: bytes, fetched: list[bytes] | None = None) -> Callable[[int], None]:
    def fetch(descriptor: int) -> None:
        os.pwrite(descriptor, data, 0)
        if fetched is not None:
            fetched.append(data)

    return fetch


def refuse(descriptor: int) -> None:
    raise AssertionError("is there already")


def objects(tmp_path: Path) -> list[str]:
    return sorted(path.read_bytes().decode()[:1] for path in (tmp_path / "cache" / "objects").iterdir())


def test_an_object_is_fetched_once(cache: ObjectCache, tmp_path: Path) -> None:
    cache.place("a", 100, tmp_path / "1", writer(b"a" * 100))
    cache.place("a", 100, tmp_path / "2", refuse)
    ObjectCache(tmp_path / "cache", 1000).place("a", 100, tmp_path / "3", refuse)
    assert [(tmp_path / name).read_bytes() for name in "123"] == [b"a" * 100] * 3
    cache.place("a changed", 50, tmp_path / "4", writer(b"b" * 50))
    assert objects(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("size", [0, 2, 4])
def test_a_file_that_was_cut_or_grew_is_fetched_anew(cache: ObjectCache, tmp_path: Path, size: int) -> None:
    cache.place("a", 3, tmp_path / "one", writer(b"aaa"))
    [kept] = (tmp_path / "cache" / "objects").iterdir()
    os.truncate(kept, size)
    cache.place("a", 3, tmp_path / "two", writer(b"aaa"))
    assert (tmp_path / "two").read_bytes() == b"a" * 3
    assert (tmp_path / "one").stat().st_size == size  # whoever has it keeps it
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 1


def test_an_object_is_on_disk_before_it_has_its_name(cache: ObjectCache, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Power loss may not leave zeros under it."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("sync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    cache.place("a", 3, tmp_path / "one", writer(b"aaa"))
    assert done == ["sync", "name"]


def test_a_directory_among_the_locks_is_left_alone(cache: ObjectCache, tmp_path: Path) -> None:
    strange = tmp_path / "cache" / "open" / "strange.lock"
    strange.mkdir()
    with cache.directory() as own:
        assert own.is_dir()
    assert strange.is_dir()


def test_the_one_not_used_for_longest_goes(cache: ObjectCache, tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        cache.place(name, 300, tmp_path / name, writer(name.encode() * 300))
        (tmp_path / name).unlink()
        time.sleep(0.02 * (number < 2))
    cache.place("a", 300, tmp_path / "again", refuse)
    (tmp_path / "again").unlink()
    cache.place("d", 300, tmp_path / "d", writer(b"d" * 300))
    assert objects(tmp_path) == ["a", "c", "d"]


def test_what_is_in_use_stays_and_more_than_fits_is_an_error(cache: ObjectCache, tmp_path: Path) -> None:
    cache.place("a", 600, tmp_path / "a", writer(b"a" * 600))
    with pytest.raises(CacheFullError, match=r"1200 bytes are needed at once, more than fs.cacheBytes=1000"):
        cache.place("b", 600, tmp_path / "b", refuse)
    with pytest.raises(CacheFullError):
        cache.place("c", 1001, tmp_path / "c", refuse)
    assert objects(tmp_path) == ["a"]
    (tmp_path / "a").unlink()
    cache.place("b", 600, tmp_path / "b", writer(b"b" * 600))
    assert objects(tmp_path) == ["b"]


def test_a_fetch_that_fails_leaves_nothing(cache: ObjectCache, tmp_path: Path) -> None:
    def fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"half", 0)
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        cache.place("a", 100, tmp_path / "a", fail)
    assert objects(tmp_path) == []
    assert not (tmp_path / "a").exists()
    cache.place("a", 100, tmp_path / "a", writer(b"a" * 100))


def test_others_wait_for_who_fetches(cache: ObjectCache, tmp_path: Path) -> None:
    fetched: list[bytes] = []

    def slowly(descriptor: int) -> None:
        time.sleep(0.05)
        writer(b"a" * 100, fetched)(descriptor)

    threads = [threading.Thread(target=cache.place, args=("a", 100, tmp_path / str(number), slowly))
               for number in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert all((tmp_path / str(number)).read_bytes() == b"a" * 100 for number in range(4))


def stand_still(directory: Path, where: Path) -> None:
    with ObjectCache(directory, 1000).directory() as own:
        (own / "file").write_bytes(b"x")

        def hang(descriptor: int) -> None:
            where.write_text(str(own))
            time.sleep(60)

        ObjectCache(directory, 1000).place("a", 900, own / "a", hang)


def test_what_a_killed_process_left_is_removed_and_fetched_anew(cache: ObjectCache, tmp_path: Path) -> None:
    where = tmp_path / "where"
    process = multiprocessing.get_context("fork").Process(target=stand_still, args=(tmp_path / "cache", where))
    process.start()
    while not where.exists() or not where.read_text():
        time.sleep(0.01)
    left = Path(where.read_text())
    with cache.directory() as own:
        assert left.exists(), "it lives"
        assert own.exists()
    with pytest.raises(CacheFullError):
        cache.place("b", 200, tmp_path / "b", refuse)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with cache.directory() as own:
        assert not left.exists()
        assert [path.name for path in own.parent.iterdir() if path.is_dir()] == [own.name]
    assert not own.exists()
    cache.place("b", 200, tmp_path / "b", writer(b"b" * 200))
    cache.place("a", 800, tmp_path / "a", writer(b"a" * 800))


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match=r"link: is a symbolic link; choose fs\.cacheDirectory"):
        ObjectCache(tmp_path / "link", 10)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(PermissionError, match=r"real: belongs to another user; choose fs\.cacheDirectory"):
        ObjectCache(tmp_path / "real", 10)


def test_the_default_is_spark_s_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/a/b,/c")
    assert default_directory() == Path(f"/a/b/rmq-cache-{os.getuid()}")
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert default_directory().name == f"rmq-cache-{os.getuid()}"


def test_an_object_whose_name_goes_just_when_it_is_taken_is_there(
    cache: ObjectCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes room: it saw that nobody used it."""
    cache.place("a", 100, tmp_path / "1", writer(b"a" * 100))
    (tmp_path / "1").unlink()
    link = os.link

    def linked(source: Path, target: Path) -> None:
        link(source, target)
        os.unlink(source)

    monkeypatch.setattr(os, "link", linked)
    cache.place("a", 100, tmp_path / "2", refuse)
    assert (tmp_path / "2").read_bytes() == b"a" * 100


def test_a_fork_s_child_leaves_the_directory_to_its_parent(cache: ObjectCache) -> None:
    held = cache.directory()
    with held as directory:
        child = os.fork()
        if child == 0:
            held.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert directory.is_dir()
    assert not directory.exists()
