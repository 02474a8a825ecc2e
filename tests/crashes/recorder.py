"""What a workload does to the files below a directory, in order: names, sizes, 512-byte sectors, syncs.

Stores through a map cannot be intercepted. So before and after each call that names, sizes, writes or syncs a file all
files are compared with what they were; `look` may be called in between. Small stores only.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

SECTOR = 512
CALLS = ("open", "write", "pwrite", "ftruncate", "truncate", "posix_fallocate", "replace", "rename", "unlink", "remove",
         "mkdir", "rmdir")  # fmt: skip
ATOMIC = ("open", "ftruncate", "truncate", "posix_fallocate")  # what they do to a size is on disk whole or not at all
SYNCS = ("fsync", "fdatasync")
io_open = io.open


class Name(NamedTuple):
    """A name got a file, or lost it (None). Several of one event belong together: a rename."""

    directory: int
    name: str
    file: int | None


class Event(NamedTuple):
    """kind: file, directory (made); size (value: bytes, place: 1 when it changed in one step); data (place: sector,
    value: bytes); names (value: Names that change together); sync; put (value: messages begun so far); safe (value:
    messages acknowledged as on disk)."""

    kind: str
    file: int = 0
    place: int = 0
    value: Any = None


class Killed(BaseException):
    """The process ends here; what runs on while the exception is on its way has no effect on files."""


class Recorder:
    """A context manager: notes `events` below `root`. Files are numbered from 0, the root itself, and never anew.

    kill_at: the number of the call (of CALLS and SYNCS, from 1) that a process does not live to make; 0: none.
    ignores(call, path): whether a sync is to be noted as nothing, to prove that the loss of one is found.
    """

    def __init__(self, root: Path, ignores: Callable[[str, str], bool] | None = None) -> None:
        self.root = root
        self.events: list[Event] = []
        self.calls = 0
        self.kill_at = 0
        self.is_dead = False
        self._ignores = ignores
        self._numbers: dict[int, int] = {}  # inode -> file
        self._count = 0
        self._names: dict[int, dict[str, int]] = {}  # directory -> names
        self._content: dict[int, bytes] = {}
        self._descriptors: dict[int, int] = {}
        self._originals: list[tuple[Any, str, Any]] = []
        self._is_looking = False
        self.begin = 0  # events before it: what was there, on disk

    # ---- calls ----

    def __enter__(self) -> Self:
        self._open = os.open
        for call in CALLS:
            self._wrap(os, call, self._noted)
        for call in SYNCS:
            self._wrap(os, call, self._synced)
        self._wrap(io, "open", self._noted)
        self._number(os.stat(self.root).st_ino, True)
        self.look()
        for file in range(self._count):
            self.events.append(Event("sync", file))
        self.begin = len(self.events)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.look()
        for module, call, original in self._originals:
            setattr(module, call, original)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _wrap(self, module: Any, call: str, around: Callable[..., Any]) -> None:
        original = getattr(module, call)
        self._originals.append((module, call, original))

        def wrapper(*arguments: Any, **options: Any) -> Any:
            if self._is_looking:
                return original(*arguments, **options)
            return around(call, original, *arguments, **options)

        setattr(module, call, wrapper)

    def _lives(self, call: str) -> bool:
        self.calls += 1
        if self.calls == self.kill_at:
            self.look()
            self.is_dead = True
            raise Killed
        if self.is_dead and call in ("open", "mkdir"):
            raise Killed
        return not self.is_dead

    def _noted(self, call: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if original is self._open and not arguments[1] & (os.O_CREAT | os.O_TRUNC):
            return original(*arguments, **options)
        if original is io_open and set(arguments[1] if len(arguments) > 1 else "r") <= set("rbt"):
            return original(*arguments, **options)
        if not self._lives(call):
            return None
        self.look()
        answer = original(*arguments, **options)
        self.look(is_atomic=call in ATOMIC)
        return answer

    def _synced(self, call: str, original: Callable[..., Any], descriptor: int) -> None:
        if not self._lives(call):
            return
        self.look()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self._ignores is None or not self._ignores(call, path):
            file = self._numbers.get(os.fstat(descriptor).st_ino)
            if file is not None:
                self.events.append(Event("sync", file))

    def note(self, kind: str, value: int) -> None:
        """What the workload knows at this point: kind put, safe, low or consumed."""
        self.look()
        self.events.append(Event(kind, value=value))

    def revive(self) -> None:
        """Another process begins, on the files that the killed one left."""
        self.kill_at = 0
        self.is_dead = False

    # ---- files ----

    def look(self, *, is_atomic: bool = False) -> None:
        """Note what differs from the last look. is_atomic: a size that changed did so in one step."""
        if self.is_dead:
            return
        self._is_looking = True
        try:
            self._look_below(self.root, 0, is_atomic)
        finally:
            self._is_looking = False

    def _number(self, inode: int, is_directory: bool) -> int:
        if inode not in self._numbers:
            self._numbers[inode] = self._count
            self._count += 1
            self.events.append(Event("directory" if is_directory else "file", self._numbers[inode]))
            if is_directory:
                self._names[self._numbers[inode]] = {}
        return self._numbers[inode]

    def _look_below(self, path: Path | str, number: int, is_atomic: bool) -> None:
        now: dict[str, int] = {}
        files: list[tuple[str, int]] = []
        directories: list[tuple[str, int]] = []
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_directory = entry.is_dir(follow_symlinks=False)
                file = self._number(entry.inode(), is_directory)
                now[entry.name] = file
                (directories if is_directory else files).append((entry.path, file))
        before = self._names[number]
        if now != before:
            self._note_names(number, before, now)
            self._names[number] = now
        for name, file in files:
            self._look_at(name, file, is_atomic)
        for name, file in directories:
            self._look_below(name, file, is_atomic)

    def _note_names(self, number: int, before: dict[str, int], now: dict[str, int]) -> None:
        changed = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        moved = {now[name] for name in changed if name in now} & {before[name] for name in changed if name in before}
        together = [Name(number, name, now.get(name)) for name in sorted(changed)
                    if now.get(name) in moved or before.get(name) in moved]  # fmt: skip
        if together:
            self.events.append(Event("names", number, value=tuple(together)))
        for name in sorted(changed):
            if now.get(name) not in moved and before.get(name) not in moved:
                self.events.append(Event("names", number, value=(Name(number, name, now.get(name)),)))

    def _look_at(self, path: str, file: int, is_atomic: bool) -> None:
        descriptor = self._descriptors.get(file, -1)
        if descriptor < 0:
            descriptor = self._descriptors[file] = os.open(path, os.O_RDONLY)
        now = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        before = self._content.get(file, b"")
        if now == before:
            return
        self._content[file] = now
        if len(now) != len(before):
            self.events.append(Event("size", file, int(is_atomic), len(now)))
        before = before[: len(now)].ljust(len(now), b"\0")
        for start in range(0, len(now), SECTOR):
            sector = now[start : start + SECTOR]
            if sector != before[start : start + SECTOR]:
                self.events.append(Event("data", file, start // SECTOR, sector))
