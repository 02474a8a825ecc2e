# SPDX-License-Identifier: Apache-2.0
"""Errors of the system name their file and what to do, and none is taken for damage."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rmq
from rmq import marks, segment
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
