# SPDX-License-Identifier: Apache-2.0
"""The files of one queue: what is written, cut and written again, and what stands behind the end."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rmq._core._layout import UNIT_SIZE
from rmq.consumequeue import ConsumeQueue
from rmq.errors import CorruptFileError
from rmq.filecache import FileCache
from rmq.queuefiles import QueueFiles

IN_A_FILE = 10


def opened(directory: Path, cache: FileCache) -> ConsumeQueue:
    return ConsumeQueue(directory, "T", 0, IN_A_FILE * UNIT_SIZE, cache, writable=True, is_exact=True)


def units(first: int, count: int) -> bytes:
    return b"".join(struct.pack(">qiq", 1000 * number, 100, number) for number in range(first, first + count))


def bytes_of(directory: Path) -> bytes:
    files = sorted(directory.iterdir())
    assert [int(file.name) for file in files] == [IN_A_FILE * UNIT_SIZE * number for number in range(len(files))]
    return b"".join(file.read_bytes() for file in files)


@pytest.mark.parametrize("seed", range(20))
def test_behind_the_end_all_is_zero_whatever_was_there(tmp_path: Path, seed: int) -> None:
    """Edges: units behind the end of a queue that is opened, and a disk that fails in the midst of a write."""
    rng, directory = random.Random(seed), tmp_path / "0"
    cache = FileCache(True)
    queue, there = opened(directory, cache), 0
    for _ in range(60):
        act = rng.randrange(4)
        if act == 0:
            there = rng.randrange(there + 1)
            queue.cut(there)
        elif act == 1 and there % IN_A_FILE:
            cache.close()
            cache = FileCache(True)
            stale = rng.randrange(IN_A_FILE - there % IN_A_FILE)  # behind a unit that is none
            path = sorted(directory.iterdir())[-1]
            with path.open("r+b") as file:
                file.seek((there % IN_A_FILE + 1) * UNIT_SIZE)
                file.write(units(900, stale)[: (IN_A_FILE - there % IN_A_FILE - 1) * UNIT_SIZE])
            queue = opened(directory, cache)
            queue.cut(there)  # as a recovery, which knows where the log ends
        elif act == 2:
            real, left = cache.write, rng.randrange(2)

            def fail(path: Path, position: int, data: Any, real: Any = real, left: int = left) -> None:
                real(path, position, data[: left * UNIT_SIZE])
                raise OSError(errno.ENOSPC, "No space left on device")

            cache.write = fail  # type: ignore[method-assign]
            with pytest.raises(OSError, match="No space"):
                queue.append(there, units(there, 3))
            cache.write = real  # type: ignore[method-assign]
            queue.cut(there)
        else:
            count = rng.randrange(1, 2 * IN_A_FILE)
            queue.append(there, units(there, count))
            there += count
        assert queue.max_offset == there
        data = bytes_of(directory) if directory.exists() else b""
        assert data.rstrip(b"\0") == units(0, there).rstrip(b"\0")
    cache.close()


def test_a_cut_reads_no_more_than_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a broker's size has 6 MB, and each of many wrong records may cut one unit."""
    cache = FileCache(True)
    queue = ConsumeQueue(tmp_path / "0", "T", 0, 300_000 * UNIT_SIZE, cache, writable=True, is_exact=True)
    queue.append(0, units(0, 8))
    queue.cut(7)
    sizes, real = [], cache.read
    monkeypatch.setattr(cache, "read", lambda path, position, size: (sizes.append(size), real(path, position, size))[1])
    queue.append(7, units(7, 5))
    sizes.clear()
    queue.cut(9)
    queue.cut(3)
    assert sum(sizes) == (12 - 9 + 9 - 3) * UNIT_SIZE
    cache.close()


@pytest.mark.parametrize(("length", "writable", "found"), [
    (None, False, IN_A_FILE), (0, False, IN_A_FILE), (0, True, None), (UNIT_SIZE, False, None), (UNIT_SIZE, True, None),
])  # fmt: skip
def test_a_file_that_the_writer_began_again_holds_no_units_and_one_cut_short_is_damage(
        tmp_path: Path, length: int | None, writable: bool, found: int | None) -> None:  # fmt: skip
    directory, cache = tmp_path / "0", FileCache(True)
    opened(directory, cache).append(0, units(0, 2 * IN_A_FILE))
    cache.close()
    cache = FileCache(writable)
    files = QueueFiles(directory, IN_A_FILE * UNIT_SIZE, cache, writable=writable, bridges_gap=False)
    files.look(is_last=True)
    last = files.path(IN_A_FILE * UNIT_SIZE)
    last.unlink()
    if length is not None:
        last.write_bytes(bytes(length))
    if found is None:
        with pytest.raises(CorruptFileError, match="file was truncated"):
            files.read(0, 2 * IN_A_FILE)
    else:
        assert files.read(0, 2 * IN_A_FILE) == units(0, found)
    cache.close()


def test_a_queue_whose_only_file_was_begun_again_while_it_was_opened_is_looked_at_again(tmp_path: Path) -> None:
    directory, cache = tmp_path / "0", FileCache(True)
    opened(directory, cache).append(0, units(0, 2 * IN_A_FILE))
    first, last = sorted(directory.iterdir())
    first.unlink()
    cache.close()
    cache = FileCache(False)
    real, looks = cache.with_file, []

    def with_file(path: Path, call: Callable[[int], Any]) -> Any:
        if not looks:
            last.unlink()
            last.touch()
        looks.append(path)
        return real(path, call)

    cache.with_file = with_file  # type: ignore[method-assign]
    queue = ConsumeQueue(directory, "T", 0, IN_A_FILE * UNIT_SIZE, cache, writable=False, is_exact=True)
    assert (queue.min_offset, queue.max_offset, set(looks)) == (0, 0, {last})
    cache.close()
