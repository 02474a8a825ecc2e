"""Forked processes for tests: whatever happens in one, it ends there, and in time."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 600


def fork(work: Callable[[], object]) -> int:
    """Run it in a forked process, whose exit status is 1 when it raises; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)  # its default ends the process
        signal.alarm(PATIENCE_S)
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def in_child(function: Callable[[], Any], *, user: int | None = None, patience: int = PATIENCE_S) -> Any:
    """What a function gives in a forked process; its exception is raised here; a signal is an error, as after
    `patience` seconds."""
    reading, writing = os.pipe()

    def work() -> None:
        signal.alarm(patience)
        try:
            if user is not None and os.getuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            answer: tuple[bool, Any] = (True, function())
        except BaseException as error:
            answer = (False, (type(error), traceback.format_exc()))
        with suppress(BaseException), os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))

    pid = fork(work)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFSIGNALED(status), f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    good, value = pickle.loads(data)
    if not good:
        kind, text = value
        raise (
            AssertionError(text) if kind is AssertionError else RuntimeError(f"{kind.__name__} in the child: {text}")
        )
    return value


def error_in_child(function: Callable[[], Any], **options: Any) -> str:
    """Name of the exception that a function raises in a forked process."""

    def caught() -> str:
        try:
            function()
        except Exception as error:
            return type(error).__name__
        return "none"

    return str(in_child(caught, **options))


@contextmanager
def lock_of_a_broker(store: Path) -> Iterator[int]:
    """Another process holds the lock file as a broker does, without rmq's owner file; gives its number."""
    (is_ready, ready), (is_done, done) = os.pipe(), os.pipe()

    def work() -> None:
        os.close(done)  # or the end of this process's parent would not show
        with open(store / "lock", "r+b") as file:
            fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            os.write(ready, b"x")
            os.read(is_done, 1)

    pid = fork(work)
    os.close(ready)
    try:
        assert os.read(is_ready, 1), "the other process failed"
        yield pid
    finally:
        os.write(done, b"x")
        os.waitpid(pid, 0)
        for end in (is_ready, is_done, done):
            os.close(end)
