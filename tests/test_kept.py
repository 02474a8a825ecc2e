# SPDX-License-Identifier: Apache-2.0
"""What a store keeps of a call that failed: no frame of the caller's, no room of a batch that was refused. And what a
view keeps of its bytes while the collector takes a cycle apart: all."""

from __future__ import annotations

import errno
import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import workload
from workload import message

import rmq
from rmq import flushing
from rmq._core._indexfile import IndexFileView
from rmq._core._logtail import LogTail
from rmq._core._mapguard import MapGuard
from rmq._core._textcolumn import TextColumn
from rmq.dispatch import Dispatcher

FAR = 2**31 - 1


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Local:
    """What a caller has in its frame."""


def is_kept(call: Callable[[], Any], error: type[Exception]) -> bool:
    """Whether a call that fails leaves its caller's frame behind."""

    def caller() -> weakref.ref[Local]:
        local = Local()
        with suppress(error):
            call()
            pytest.fail("it does not fail")
        return weakref.ref(local)

    return caller()() is not None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    with rmq.open(tmp_path / "s", "x", config=workload.config(flush_interval_commit_log=FAR)) as opened:
        opened.put_many([message(number) for number in range(100)])
        yield opened


def test_of_a_scan_that_met_damage(store: rmq.Store, tmp_path: Path) -> None:
    store.close()
    segment = min((tmp_path / "s/commitlog").iterdir())
    data = bytearray(segment.read_bytes())
    data[data.index(message(20).body) + 1] ^= 1
    segment.write_bytes(data)
    with rmq.open(tmp_path / "s") as reader:
        assert not is_kept(lambda: reader.scan(check_crc=True).read_all(), rmq.CorruptFileError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_of_a_dispatch_that_the_disk_failed(store: rmq.Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "failed")

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "advance", fail)
        assert not is_kept(store.flush, OSError)


def test_of_a_sync_that_failed(store: rmq.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "failed")

    store.put(message(100))
    monkeypatch.setattr(flushing.MappedFile, "sync", fail)
    assert not is_kept(store.flush, OSError)
    with pytest.raises(rmq.StoreReadOnlyError, match=r"writing failed \(\[Errno 5\] failed\)"):
        store.flush()
    with suppress(OSError):
        store.close()


@pytest.mark.parametrize("folder", ["consumequeue", "index"])
def test_of_a_question_that_the_files_cannot_answer(store: rmq.Store, tmp_path: Path, folder: str) -> None:
    store.close()
    (tmp_path / "s" / folder / "CURRENT").touch()
    (tmp_path / "s" / folder / "MANIFEST-000001").touch()
    with rmq.open(tmp_path / "s") as reader:
        ask = (lambda: reader.pull("T0", 0, 0)) if folder == "consumequeue" else (lambda: reader.query("T0", "k0"))
        assert not is_kept(ask, rmq.UnsupportedFormatError)


REFUSED = """
import sys, rmq
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
one = rmq.Message("T", b"x" * 20)
with rmq.open(sys.argv[1], "x") as store:
    store.put_batch([one] * 10)
    many = [one] * 1_000_000
    before = resident()
    try:
        store.put_batch(many)
    except rmq.MessageTooLargeError:
        print((resident() - before) >> 20)
"""


@pytest.mark.slow
def test_of_a_batch_that_was_refused(tmp_path: Path) -> None:
    """A row takes over a hundred bytes while its batch is checked."""
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path / "s"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16


def tail_on(segment: Any) -> LogTail:
    tail = LogTail()
    tail.stand(segment, MapGuard(mmap.mmap(-1, 4096)), 0, 0)
    return tail


@pytest.mark.parametrize("view_of", [
    lambda data: IndexFileView(data, hash_slot_num=10, index_num=40),
    lambda data: TextColumn(bytes(16), data, b""),
    tail_on,
], ids=["index file", "texts", "log tail"])  # fmt: skip
def test_a_view_holds_its_bytes_until_it_goes(view_of: Callable[[bytearray], Any],
                                              capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """The collector clears a cycle object by object, the bytes before or after the view."""
    cycle: list[Any] = [view_of(bytearray(5000))]
    cycle.append(cycle)
    del cycle
    assert gc.collect() > 0
    assert capfd.readouterr().err == ""
