"""The disks that power loss may leave: any choice of what was not synced, in any order that the syncs allow.

A sync of a file makes its sectors and its size durable, that of a directory the names in it; nothing else does. Names
of one rename change together. Method: ALICE (Pillai 2014), CrashMonkey (Mohan 2018).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crashes.recorder import SECTOR, Event, Name

PAGE = 4096
ZEROS = bytes(SECTOR)
CHANCES = (0.0, 1.0, 0.5, 0.5, 0.1, 0.9)


@dataclass
class File:
    """content, size, names: on disk for sure. The others, in order, may have come after it: (event, value)."""

    is_directory: bool
    content: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    names: dict[str, int] = field(default_factory=dict)
    new_content: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    new_sizes: list[int] = field(default_factory=list)
    new_names: list[tuple[Name, ...]] = field(default_factory=list)
    last_size: int = 0

    def resize(self, size: int, at_once: bool, moment: int) -> None:
        if not at_once:  # written bytes reach the disk page by page
            self.new_sizes += range(self.last_size - self.last_size % PAGE + PAGE, size, PAGE)
        for sector in range(size // SECTOR, -(-self.last_size // SECTOR)):  # what a file grows by again is zero
            kept = self.last(sector)[: max(0, size - sector * SECTOR)]
            self.new_content.setdefault(sector, []).append((moment, kept.ljust(SECTOR, b"\0")))
        self.new_sizes.append(size)
        self.last_size = size

    def last(self, sector: int) -> bytes:
        pending = self.new_content.get(sector)
        return pending[-1][1] if pending else self.content.get(sector, ZEROS)

    def sync(self) -> None:
        self.content.update((sector, values[-1][1]) for sector, values in self.new_content.items())
        self.size = self.last_size
        for together in self.new_names:
            rename(self.names, together)
        self.new_content, self.new_sizes, self.new_names = {}, [], []


def rename(names: dict[str, int], together: tuple[Name, ...]) -> None:
    for _, name, file in together:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def replay(events: Sequence[Event]) -> dict[int, File]:
    """What is on disk, and what may be, after some events."""
    files: dict[int, File] = {}
    for moment, (kind, number, place, value) in enumerate(events):
        if kind == "data":
            files[number].new_content.setdefault(place, []).append((moment, value.ljust(SECTOR, b"\0")))
        elif kind == "size":
            files[number].resize(value, bool(place), moment)
        elif kind == "names":
            files[number].new_names.append(value)
        elif kind == "sync":
            files[number].sync()
        elif kind in ("file", "directory"):
            files[number] = File(kind == "directory")
    return files


@dataclass
class State:
    """One disk: files by path below the root (None: a directory). moment: events that had happened.

    begun, safe: messages that had been put so far, and acknowledged as on disk; safe is -1 until the store is open.
    low: phy offset below which a cleaning may have removed segments.
    consumed: how often a consumer group had committed what was on disk.
    """

    moment: int
    begun: int
    safe: int
    low: int
    consumed: int
    files: dict[str, bytes | None]
    story: list[str]  # files and directories of which not everything need be there

    def write(self, target: Path) -> None:
        target.mkdir()
        for name, content in self.files.items():
            if content is None:
                (target / name).mkdir()
            else:
                (target / name).write_bytes(content)


class Weather:
    """One way in which a disk loses things: chances that sectors, sizes and names come through, drawn once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.data, self.sizes, self.names = (rng.choice(CHANCES) for _ in range(3))
        self.by_file = rng.random() < 0.3  # a file comes through as a whole or not at all
        self.sectors = rng.choice((1, 1, PAGE // SECTOR))  # of them are written together
        self.latest = rng.choice((1.0, 0.7, 0.2))  # chance that what comes through is the newest value
        self.tears = rng.choice((0.0, 0.0, 0.02, 0.2))  # a sector caught while it was stored to, upwards

    def content(self, file: File) -> dict[int, bytes]:
        result = dict(file.content)
        units: dict[int, list[int]] = {}
        for sector in file.new_content:
            units.setdefault(sector // self.sectors, []).append(sector)
        all_or_none = self.rng.random() < self.data
        for sectors in units.values():
            if not (all_or_none if self.by_file else self.rng.random() < self.data):
                continue
            moments = sorted({moment for sector in sectors for moment, _ in file.new_content[sector]})
            until = moments[-1] if self.rng.random() < self.latest else self.rng.choice(moments)
            for sector in sectors:
                values = [file.content.get(sector, ZEROS)]
                values += [value for moment, value in file.new_content[sector] if moment <= until]
                result[sector] = values[-1]
                if len(values) > 1 and self.rng.random() < self.tears:
                    cut = self.rng.randrange(1, SECTOR)
                    result[sector] = values[-1][:cut] + values[-2][cut:]
        return result

    def size(self, file: File) -> int:
        if not file.new_sizes or self.rng.random() >= self.sizes:
            return file.size
        return file.last_size if self.rng.random() < self.latest else self.rng.choice(file.new_sizes)

    def entries(self, file: File) -> dict[str, int]:
        names = dict(file.names)
        for together in file.new_names:
            if self.rng.random() < self.names:
                rename(names, together)
        return names


def choose_moment(events: Sequence[Event], begin: int, rng: random.Random) -> int:
    """Any moment, and more often the one before or after a sync or an acknowledgement."""
    if rng.random() < 0.5:
        marked = [i for i in range(begin, len(events)) if events[i].kind in ("sync", "safe")]
        if marked:
            return min(len(events), rng.choice(marked) + rng.randrange(2))
    return rng.randint(begin, len(events))


def left(events: Sequence[Event], weather: Weather) -> State:
    """The disk that power loss after these events leaves."""
    begun = next((event.value for event in reversed(events) if event.kind == "put"), 0)
    safe = next((event.value for event in reversed(events) if event.kind == "safe"), -1)
    low = next((event.value for event in reversed(events) if event.kind == "low"), 0)
    consumed = next((event.value for event in reversed(events) if event.kind == "consumed"), 0)
    files = replay(events)
    found: dict[str, bytes | None] = {}
    story: list[str] = []

    def restore(number: int, path: str) -> None:
        file = files[number]
        if file.new_names or file.new_content or file.new_sizes:
            story.append(path or ".")
        if not file.is_directory:
            size, content = weather.size(file), weather.content(file)
            last = max(content, default=-1)
            data = b"".join(content.get(sector, ZEROS) for sector in range(last + 1))
            found[path] = data[:size].ljust(size, b"\0")
            return
        if path:
            found[path] = None
        for name, child in sorted(weather.entries(file).items()):
            restore(child, f"{path}/{name}" if path else name)

    restore(0, "")
    return State(len(events), begun, safe, low, consumed, found, story)


def only_synced(events: Sequence[Event]) -> State:
    """The disk that has nothing but what was synced."""
    weather = Weather(random.Random(0))
    weather.data = weather.sizes = weather.names = 0.0
    return left(events, weather)


def everything(events: Sequence[Event]) -> State:
    """The disk that has all that was done."""
    weather = Weather(random.Random(0))
    weather.data = weather.sizes = weather.names = weather.latest = 1.0
    weather.tears = 0.0
    return left(events, weather)


def draw(events: Sequence[Event], begin: int, rng: random.Random) -> State:
    """One disk that power loss at some moment behind `begin` may leave."""
    return left(events[: choose_moment(events, begin, rng)], Weather(rng))
