# SPDX-License-Identifier: Apache-2.0
"""Inside a service: forks amid a put, and whatever its signal handlers raise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import workload

import rmq
from rmq.closers import Closers


def bodies(store: rmq.Store) -> list[bytes]:
    return store.scan(columns=["body"]).read_all()["body"].to_pylist()


def test_a_put_that_goes_on_in_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    parent, children = os.getpid(), []

    def forks() -> Iterator[rmq.Message]:
        yield from [rmq.Message("T", b"before")] * 8192
        children.append(os.fork())
        if os.getpid() != parent:
            yield rmq.Message("T", b"of the child")

    with rmq.open(tmp_path / "s", "x") as store:
        try:
            store.put_many(forks(), results=False)
        except rmq.StoreClosedError as error:
            if os.getpid() == parent:
                raise
            os._exit(0 if "by the parent process" in str(error) else 1)
        finally:
            if os.getpid() != parent:
                os._exit(2)
        assert os.waitpid(children[0], 0)[1] == 0
        store.put(rmq.Message("T", b"after"))
        assert bodies(store) == [b"before"] * 8192 + [b"after"]


# ---- signal handlers -------------------------------------------------------------------------------------


class Handler:
    """Raises as a signal's handler at the nth place of this library at which the interpreter would run one."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and f"{os.sep}rmq{os.sep}" in frame.f_code.co_filename and self.left:
            self.left -= 1
            if not self.left:
                raise TimeoutError("the deadline")


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_timeout_that_a_signal_handler_raises_is_no_failed_sync(tmp_path: Path, flush: str) -> None:
    config = workload.config(flush_disk_type=flush, flush_interval_commit_log=2**31 - 1)
    acknowledged: set[int] = set()
    told: list[str] = []
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for place in range(1, 400, 3):
            number = 10 * place
            sys.setprofile(Handler(place))
            try:
                store.put_many([workload.message(number + one) for one in range(3)])
                acknowledged |= {number + one for one in range(3)}
                store.flush()
            except TimeoutError as error:
                told.append(str(error))
            finally:
                sys.setprofile(None)
            store.put(workload.message(number + 5))
            acknowledged.add(number + 5)
        store.flush()
        found = [workload.number_of(body) for body in bodies(store)]
    assert told == ["the deadline"] * len(told)
    assert len(told) > 30
    assert len(found) == len(set(found))
    assert acknowledged <= set(found)
    assert rmq.verify(tmp_path / "s").is_sound


@pytest.mark.parametrize(("error", "calls"), [(RuntimeError("a handler's"), 2), (TimeoutError("a handler's"), 2),
                                              (KeyboardInterrupt(), 2), (OSError(5, "the system's"), 1),
                                              (rmq.CorruptFileError("a", 1, "ours"), 1)])  # fmt: skip
def test_what_a_handler_interrupts_is_closed_again_what_fails_is_not(error: BaseException, calls: int) -> None:
    called = []

    def close() -> None:
        called.append(len(called))
        if len(called) == 1:
            raise error

    closers = Closers()
    closers.callback(close)
    with pytest.raises(type(error)):
        closers.close()
    assert len(called) == calls


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_what_a_handler_raises_amid_the_dispatch_of_a_put_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    """The messages are stored: the error tells how many."""
    config = workload.config(flush_disk_type=flush, flush_interval_commit_log=2**31 - 1)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        advance = store._dispatcher.advance

        def interrupted(*_: object) -> None:
            monkeypatch.setattr(store._dispatcher, "advance", advance)
            raise TimeoutError("the deadline")

        monkeypatch.setattr(store._dispatcher, "advance", interrupted)
        with pytest.raises(TimeoutError, match="the deadline") as error:
            store.put_many([workload.message(number) for number in range(3000)])
        stored = getattr(error.value, "stored", None)
        assert stored == len(bodies(store)) > 0
        store.put(workload.message(3000))
        assert len(bodies(store)) == stored + 1
    assert rmq.verify(tmp_path / "s").is_sound
