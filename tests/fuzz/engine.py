"""The loop of the fuzzer: mutate an input, run it, keep it when it reached an edge that none before it did."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

NUMBERS = (0, 1, -1, 2, 7, 8, 91, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, -(2**31), 2**62, 2**63 - 1,
           -(2**63), 0xDAA320A7, 0xDAA320AB, 0xCBD43194)  # fmt: skip
TOKENS = (b"\x01", b"\x02", b"KEYS\x01", b"UNIQ_KEY\x01", b"TAGS\x01", b"DELAY\x01", b"__CRC32#\x01", b"INNER_BASE\x01",
          b"INNER_NUM\x01", b"SCHEDULE_TOPIC_XXXX", b" ", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xc0\x80",
          b"{", b"[", b'"', b":", b",", b"1e999", b"NaN", b"\\ud800", b"null", b"true", b"\r\n")  # fmt: skip
LARGEST_INPUT = 8192
MEMORY_STEP = 96 * 1024  # KiB that one input may add to the peak of the process
_SCRATCH = struct.Struct("<QII")  # inputs begun, number of the target, bytes of the input
SCRATCH_SIZE = _SCRATCH.size + 2 * LARGEST_INPUT


class Fault(AssertionError):
    """An answer that is wrong."""


@dataclass(frozen=True)
class Target:
    """One parser. run: any exception is a finding. compare: a second reading of the same bytes, Fault when it differs.

    mend: make sizes, offsets and checksums of a mutated input right again, so that what lies behind them is reached.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    compare: Callable[[bytes], object] | None = None
    mend: Callable[[bytearray, Random], None] | None = None


@dataclass
class Finding:
    """An input that did what none may do."""

    target: str
    data: bytes
    what: str

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        path.with_suffix(".txt").write_text(self.what + "\n")
        return path


class Coverage:
    """Edges of the compiled modules, as tests/fuzz/coverage.c counts them; none in an ordinary build."""

    def __init__(self) -> None:
        library = next((Path(folder) / "libcoverage.so" for folder in sys.path
                        if folder and (Path(folder) / "libcoverage.so").exists()), None)  # fmt: skip
        self.is_there = library is not None
        if library is not None:
            calls = ctypes.CDLL(str(library))
            self.begin: Callable[[], object] = calls.coverage_begin
            self.end: Callable[[], int] = calls.coverage_end
            self._edges = calls.coverage_edges
        else:
            self.begin, self.end = lambda: None, lambda: 0

    @property
    def edges(self) -> int:
        return int(self._edges()) if self.is_there else 0


class Scratch:
    """A file in which a worker says what it is about to do, for whoever has to tell why it died."""

    def __init__(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size != SCRATCH_SIZE:
            path.write_bytes(bytes(SCRATCH_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SCRATCH_SIZE)
        self.begun = 0

    def say(self, target: int, data: bytes) -> None:
        self.begun += 1
        self._map[_SCRATCH.size : _SCRATCH.size + len(data)] = data
        self._map[: _SCRATCH.size] = _SCRATCH.pack(self.begun, target, len(data))

    def said(self) -> tuple[int, int, bytes]:
        """(inputs begun, target, input)."""
        begun, target, size = _SCRATCH.unpack_from(self._map)
        return begun, target, self._map[_SCRATCH.size : _SCRATCH.size + size]


Mend = Callable[[bytearray, Random], None]


def mutated(data: bytes, others: list[bytes], random: Random, mend: Mend | None) -> bytes:
    """A copy with a few faults; with mend, half of the time, one whose checksums hold again."""
    result = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        at = random.randrange(len(result) + 1)
        match random.randrange(9):
            case 0 if at < len(result):
                result[at] ^= 1 << random.randrange(8)
            case 1 if at < len(result):
                result[at] = random.randrange(256)
            case 2:
                width = random.choice((1, 2, 4, 4, 4, 8))
                number = random.choice((*NUMBERS, len(result), at, random.getrandbits(64)))
                result[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "big")[: len(result) - at]
            case 3 if at < len(result):
                width = random.choice((1, 2, 4, 8))
                number = int.from_bytes(result[at : at + width], "big") + random.randint(-9, 9)
                result[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "big")[: len(result) - at]
            case 4:
                del result[at : at + random.choice((1, 2, 4, 20, 100, len(result)))]
            case 5:
                run = result[at : at + random.choice((1, 4, 20, 46, 200))]
                place = random.randrange(len(result) + 1)
                result[place:place] = run
            case 6:
                size = min(random.choice((1, 8, 20, 100, 512)), len(result) - at)
                result[at : at + size] = bytes(size)
            case 7:
                result[at : at + random.choice((0, 0, 1, 4))] = random.choice(TOKENS)
            case 8 if others:
                other = random.choice(others)
                place = random.randrange(len(other) + 1)
                result[at : at + random.choice((0, 20, 8192))] = other[place : place + random.choice((20, 91, 8192))]
    if mend is not None and random.random() < 0.5:
        mend(result, random)
    return bytes(result[:LARGEST_INPUT])


@dataclass
class Loop:
    """Runs one target. Findings are kept once for each place in the code."""

    target: Target
    number: int
    coverage: Coverage
    scratch: Scratch
    random: Random
    compare_every: int
    corpus: list[bytes] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)
    executions: int = 0

    def seed(self) -> None:
        for data in self.target.seeds():
            self.one(data, compare=True)
            self.corpus.append(data)

    def one(self, data: bytes, *, compare: bool) -> bool:
        """Run an input; True when it reached something new."""
        self.scratch.say(self.number, data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.coverage.begin()
        try:
            self.target.run(data)
            is_new = self.coverage.end() > 0
            if self.target.compare is not None and (compare or is_new):
                self.target.compare(data)
        except Exception as error:
            self._found(data, error)
            is_new = False
        self.executions += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > MEMORY_STEP:
            self._found(data, Fault(f"{grown} KiB more memory"))
        return is_new

    def _found(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{type(error).__name__} at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:0:-1])
        if place not in self.findings:
            text = "".join(traceback.format_exception(error))
            self.findings[place] = Finding(self.target.name, data, text)

    def run(self, count: float, until: float) -> None:
        """`count` inputs, fewer when the time (time.monotonic) is over."""
        random, corpus, last = self.random, self.corpus, self.executions + count
        while self.executions < last:
            # Newer inputs lie deeper: every second one comes from the last eighth.
            low = len(corpus) * 7 // 8 if random.random() < 0.5 else 0
            data = mutated(corpus[random.randrange(low, len(corpus))], corpus, random, self.target.mend)
            if self.one(data, compare=self.executions % self.compare_every == 0):
                corpus.append(data)
            if self.executions % 16 == 0 and time.monotonic() > until:
                break
