# SPDX-License-Identifier: Apache-2.0
"""2 million random keys, and everything that takes them: index files of three writers, databases, a dict."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import peers
from databases import OFFSET, Lmdb, Rocks, Sqlite
from ratios import Call
from sample import START, random_keys
from vectorised import VectorIndex

import rmq

KEYS = 2_000_000
ROUND = 100_000  # keys of one put, which is one transaction
SLOTS, ENTRIES = 5_000_000, 20_000_000  # RocketMQ's defaults


class Keys:
    """The keys in each form that somebody takes; the phy offset of a key is its number."""

    def __init__(self) -> None:
        self.text = random_keys(KEYS)
        self.encoded = [key.encode() for key in self.text]
        self.array = np.array(self.encoded, "S32")
        self.offsets = np.arange(KEYS, dtype=np.int64)
        self.packed = [OFFSET.pack(number) for number in range(KEYS)]
        self.times = np.full(KEYS, START, np.int64)


class Taker:
    """Takes the keys in order, a round at a time. put(first, last): makes, untimed, the call that puts them."""

    def __init__(self, put: Callable[[int, int], Call], close: Callable[[], None]) -> None:
        self._put = put
        self.close = close
        self.count = 0

    def round(self) -> Call:
        first, self.count = self.count, self.count + ROUND
        return self._put(first, self.count)

    def fill(self) -> None:
        while self.count < KEYS:
            self.round()()


class Contenders:
    """All takers by name; those whose package is missing are not there."""

    def __init__(self, root: Path, keys: Keys) -> None:
        self._root = root
        self._keys = keys
        self.dict: dict[str, int] = {}
        self.file = rmq.IndexFile(root / "rmq", "x")
        self.vector = VectorIndex(root / "vector", SLOTS, ENTRIES)
        python = peers.IndexWriter(root / "python", SLOTS, ENTRIES)
        self.sqlite = Sqlite(root / "sqlite")
        self.takers = {
            "rmq": self.taker_of(self.file),
            "numpy expert": Taker(self._numpy, lambda: None),
            "pure Python": Taker(lambda first, last: self._python(python, first, last), python.close),
            "dict": Taker(self._dict, self.dict.clear),
            "sqlite executemany": Taker(self._sqlite, self.sqlite.close),
        }
        if find_spec("lmdb"):
            self.lmdb, many = Lmdb(root / "lmdb"), Lmdb(root / "lmdb-many")
            self.takers["lmdb put"] = Taker(lambda *part: self._pairs(self.lmdb.put, *part), self.lmdb.close)
            self.takers["lmdb putmulti"] = Taker(lambda *part: self._pairs(many.put_many, *part), many.close)
        if find_spec("rocksdict"):
            self.rocks = Rocks(root / "rocks")
            self.takers["rocksdict WriteBatch"] = Taker(lambda *part: self._pairs(self.rocks.put_many, *part),
                                                        self.rocks.close)  # fmt: skip

    def fill(self) -> None:
        """Bring everybody to 2 million, and check that the three writers of index files wrote the same bytes."""
        for taker in self.takers.values():
            taker.fill()
        files = [np.memmap(self._root / name, np.uint8, "r") for name in ("rmq", "vector", "python")]
        used = 40 + 4 * SLOTS + 20 * (KEYS + 1)
        for other in files[1:]:
            assert len(other) == len(files[0])
            assert np.array_equal(files[0][:used], other[:used])

    def close(self) -> None:
        for taker in self.takers.values():
            taker.close()

    def taker_of(self, file: rmq.IndexFile) -> Taker:
        """Ours, of a file."""
        keys = self._keys

        def put(first: int, last: int) -> Call:
            part = keys.text[first:last], keys.offsets[first:last], keys.times[first:last]
            return lambda: file.put_keys(*part)

        return Taker(put, file.close)

    def _numpy(self, first: int, last: int) -> Call:
        keys = self._keys
        part = keys.array[first:last], keys.offsets[first:last], keys.times[first:last]
        return lambda: self.vector.put(*part)

    def _python(self, index: peers.IndexWriter, first: int, last: int) -> Call:
        items = [(key, number, START) for number, key in enumerate(self._keys.text[first:last], first)]
        return lambda: index.put_many(items)

    def _dict(self, first: int, last: int) -> Call:
        items = list(enumerate(self._keys.text[first:last], first))

        def run() -> None:
            table = self.dict
            for number, key in items:
                table[key] = number

        return run

    def _sqlite(self, first: int, last: int) -> Call:
        items = list(zip(self._keys.text[first:last], range(first, last), strict=True))
        return lambda: self.sqlite.put_many(items)

    def _pairs(self, put: Callable[[list[tuple[bytes, bytes]]], None], first: int, last: int) -> Call:
        items = list(zip(self._keys.encoded[first:last], self._keys.packed[first:last], strict=True))
        return lambda: put(items)
