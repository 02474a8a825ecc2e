"""Lets each system call of a workload fail, one at a time, and judges what is left.

Run under interpose.c: `python sites.py WORKLOAD SHARE`; prints one JSON document. SHARE: every so many-th site; 0:
each call with each error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
from conftest import digests
from test_processes import assert_holds, message, numbers

import rmq

SHORT = -1
HANG_S = 60
ERRORS: dict[str, list[int]] = {
    "open": [errno.EMFILE, errno.EACCES, errno.EIO, errno.EINTR],
    "create": [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EACCES, errno.EROFS, errno.EIO, errno.EINTR],
    "opendir": [errno.EMFILE, errno.EACCES, errno.EIO],
    "readdir": [errno.EIO],
    "read": [errno.EIO, errno.EINTR],
    "pread": [errno.EIO, errno.EINTR],
    "write": [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, SHORT],
    "pwrite": [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, SHORT],
    "ftruncate": [errno.ENOSPC, errno.EIO, errno.EINTR],
    "fallocate": [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR],
    "fsync": [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR],
    "fdatasync": [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR],
    "rename": [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO],
    "unlink": [errno.EACCES, errno.EROFS, errno.EIO],
    "mkdir": [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO],
    "mmap": [errno.ENOMEM, errno.EACCES],
    "close": [errno.EIO, errno.ENOSPC, errno.EINTR],
    "lseek": [errno.EIO],
    "fstat": [errno.EIO],
    "stat": [errno.EACCES, errno.EIO],
    "dup": [errno.EMFILE],
    "lock": [errno.ENOLCK, errno.EIO, errno.EINTR],
}
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EINTR}
SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200, "max_hash_slot_num": 10,
         "max_index_num": 30, "flush_interval_commit_log": 2**31 - 1}  # fmt: skip


class Interposer:
    """The symbols of interpose.c in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_trace.restype = self._library.fault_hit.restype = ctypes.c_char_p

    def root(self, path: Path) -> None:
        self._library.fault_root(os.fsencode(path))

    def arm(self, n: int, error: int) -> None:
        self._library.fault_arm(ctypes.c_long(n), error)

    def trace(self) -> list[str]:
        return self._library.fault_trace().decode().splitlines()

    def hit(self) -> str:
        return self._library.fault_hit().decode()


def held() -> tuple[int, list[str], int]:
    """What a process holds: descriptors, maps of store files, threads."""
    with open("/proc/self/maps") as lines:
        maps = sorted({line.split()[-1] for line in lines if "/store" in line})
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


class Session:
    """One run of a workload: what was put and answered, what was put and raised, which errors came."""

    def __init__(self, path: Path, rows: list[int], begin: Callable[[], None]) -> None:
        """begin: counts calls from here on, again."""
        self.path = path
        self.begin = begin
        self.groups: list[tuple[list[int], str]] = [([row], "stored") for row in rows]
        self.errors: list[BaseException] = []
        self.store: rmq.Store | None = None
        self.next = 1000

    def attempt(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The answer, or None for an error of a right type; any other error ends the run."""
        try:
            return function(*arguments, **options)
        except (OSError, rmq.RmqError) as error:
            if self.errors and not isinstance(error, rmq.StoreReadOnlyError):
                raise AssertionError(f"a second error, though one call failed: {error!r}") from error
            # Without its frames: they hold what an error must not keep open.
            self.errors.append(error.with_traceback(None))
            error.__context__ = None
            return None

    def open(self, mode: str = "r+", **options: Any) -> rmq.Store:
        """The store; a failed opening is tried once more, without the fault."""
        config = options.pop("config", {})
        options["config"] = rmq.StoreConfig(**SIZES | config)
        abort = "/proc/self/root" + str(self.path / "abort")  # a way that does not count
        was_clean = not os.path.exists(abort)
        self.store = self.attempt(rmq.open, self.path, mode, **options)
        if self.store is None:
            if was_clean and not getattr(self.errors[-1], "failed_sync", False):
                assert not os.path.exists(abort) or self.is_withdrawn(), \
                    "an opening that failed leaves a clean store unclean, whose queues and index are vouched for"
            self.store = rmq.open(self.path, "a" if mode == "x" else mode, **options)
        return self.store

    def is_withdrawn(self) -> bool:
        """Whether the checkpoint says that neither queues nor index are whole."""
        with open("/proc/self/root" + str(self.path / "checkpoint"), "rb") as file:  # a way that does not count
            return not any(file.read(24)[8:])

    def put(self, how: Callable[[rmq.Store, list[rmq.Message]], Any], *groups: list[int], raised: str = "gone") -> None:
        """Put groups of messages; those behind the one that raised were not put. raised: what becomes of it."""
        assert self.store is not None
        before = len(self.errors)
        chunks = [[message(row, b"x" * (row * 7 % 300)) for row in group] for group in groups]
        self.attempt(how, self.store, chunks)
        failed = len(self.errors) > before
        done = getattr(self.errors[-1], "stored", None) or 0 if failed else sum(map(len, groups))
        stored = groups[: next(n for n in range(len(groups) + 1) if sum(map(len, groups[:n])) == done)]
        self.groups += [(group, "stored") for group in stored]
        if failed:
            if len(stored) < len(groups) and not isinstance(self.errors[-1], rmq.StoreReadOnlyError):
                self.groups.append((groups[len(stored)], raised))
            self.check(self.store)

    def fresh(self, count: int, step: int = 1) -> list[int]:
        """Numbers of messages that nobody has put."""
        self.next += count * step + self.next % 2
        return list(range(self.next - count * step, self.next, step))

    def close(self) -> None:
        assert self.store is not None
        self.attempt(self.store.close)
        assert self.store.closed

    def check(self, store: rmq.Store) -> list[int]:
        """What is stored is there, what raised is wholly there or not, nothing else is."""
        found = left = numbers(store)
        for group, state in self.groups:
            if left[: len(group)] == group and state != "gone":
                left = left[len(group) :]
            else:
                assert state != "stored", f"{group} was stored; from there on the store has {left[:9]}"
        assert left == [], f"nobody put {left}"
        assert_holds(store, found)
        return found


Workload = Callable[[Session], None]


class Judge:
    """Runs one workload again and again."""

    def __init__(self, name: str, base: Path, rows: list[int], work: Workload, leaves: str) -> None:
        """leaves: "a store", "nothing new" (of what was there), or "files"."""
        self._name, self._base, self._rows, self._work, self._leaves = name, base, rows, work, leaves
        self._begins = "begin" in work.__code__.co_names  # by itself
        self._root = Path(tempfile.mkdtemp(prefix="rmq-faults-", dir="/dev/shm"))
        self._interposer = Interposer()
        self.sites: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, share: int) -> None:
        self._one(0, 0)
        trace = self._interposer_trace
        for place, (n, error) in enumerate(self._plan(trace, everything=share == 0)):
            if share == 0 or place % share == 0:
                self._one(n, error)
        shutil.rmtree(self._root)

    @staticmethod
    def _plan(trace: list[str], *, everything: bool) -> Iterator[tuple[int, int]]:
        """(number of the call, error): each error for the first call of a kind, one in turn for each of the others.

        Of calls of one kind behind the eighth every third.
        """
        seen: Counter[str] = Counter()
        for n, line in enumerate(trace, 1):
            errors = ERRORS[line.split(" ")[0]]
            kind = re.sub(r"\d+", "#", line)
            seen[kind] += 1
            if seen[kind] > 8 and seen[kind] % 3 and not everything:
                continue
            for error in errors if everything or seen[kind] == 1 else [errors[seen[kind] % len(errors)]]:
                yield n, error

    def _one(self, n: int, error: int) -> None:
        signal.alarm(HANG_S)
        shutil.rmtree(self._root / "store", ignore_errors=True)
        if self._base.exists():
            shutil.copytree(self._base, self._root / "store", symlinks=True)
        before = held()
        interposer = self._interposer
        interposer.arm(0, 0)
        interposer.root(self._root / "store")
        session = Session(self._root / "store", self._rows, lambda: interposer.arm(n, error))
        if not self._begins:
            session.begin()
        hit = ""
        try:
            self._work(session)
            hit = interposer.hit()
            self._interposer_trace = interposer.trace()
            interposer.arm(0, 0)
            session.store = None
            after = held()
            if after != before:
                gc.collect()  # an exception and its frames may hold each other
                after = held()
            assert after == before, f"held before {before}, after {after}"
            if n == 0:
                assert not session.errors, session.errors
            if self._leaves == "a store":
                self._reopen(session)
            elif self._leaves == "nothing new":
                assert digests(session.path, ".") == digests(self._base, "."), "a reader changed files"
        except BaseException as wrong:
            hit = hit or interposer.hit()
            interposer.arm(0, 0)
            with contextlib.suppress(Exception):
                session.store and session.store.close()
            reason = "".join(traceback.format_exception(wrong)[-6:])
            self.faults.append(f"{self._name}: call {n}, {name_of(error)} from `{hit}`: {reason}")
            session.store = None
        if n and not hit:
            return  # threads may take turns another way
        if n:
            self.sites[f"{hit.split(' ')[0]} {name_of(error)}"] += 1
            kinds = {type(wrong).__name__ for wrong in session.errors} or {"absorbed"}
            self.outcomes[" + ".join(sorted(kinds))] += 1
            if hit.startswith(("fsync", "fdatasync")) and error != errno.EINTR and not session.errors:
                self.faults.append(f"{self._name}: call {n}, {name_of(error)} from `{hit}`: nobody was told")
            if error in PASSING and not hit.startswith(("fsync", "fdatasync")) and \
                    any(isinstance(wrong, rmq.StoreReadOnlyError) for wrong in session.errors):  # fmt: skip
                self.faults.append(f"{self._name}: call {n}, {name_of(error)} from `{hit}`: puts do not go on")

    def _reopen(self, session: Session) -> None:
        with rmq.open(session.path) as reader:
            seen = session.check(reader)
        with rmq.open(session.path, "r+") as writer:
            found = numbers(writer)
            assert found == seen, "what a reader saw is not what a writer finds"
            more = session.fresh(12)
            writer.put_many([message(row) for row in more])
            assert_holds(writer, found + more)
        assert oracle.check_store(session.path, 10, 30) == []
        assert list(session.path.rglob("*.tmp")) == [], "temporary files are left"


def name_of(error: int) -> str:
    return "short" if error == SHORT else errno.errorcode.get(error, "none")


def main() -> None:
    import workloads

    faulthandler.register(signal.SIGALRM, chain=True)  # a call that hangs ends here, and shows where
    logging.getLogger("rmq").addHandler(logging.NullHandler())
    logging.getLogger("rmq").propagate = False
    name, share = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="rmq-base-", dir="/dev/shm") as base:
        prepare, work, leaves = workloads.WORKLOADS[name]
        rows = prepare(Path(base) / "store")
        judge = Judge(name, Path(base) / "store", rows, work, leaves)
        judge.run(share)
    print(json.dumps({"sites": judge.sites, "outcomes": judge.outcomes, "faults": judge.faults}))


if __name__ == "__main__":
    main()
