# SPDX-License-Identifier: Apache-2.0
"""The messages that the benchmarks put, and the sizes of the stores they put them into."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa

import rmq

SEED = 1
START = 1_700_000_000_000
TOPIC = "Orders"
SLOTS, ENTRIES = 50_000, 250_000
SIZES = {100: 50_000, 1024: 40_000, 4096: 12_000}  # bytes of a body -> messages, which fit into one segment
SEGMENT = 64 * 1024**2
# As many entries for a slot as in a full index file of RocketMQ's size; no timed flush comes in between.
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=SLOTS, max_index_num=ENTRIES,
                         flush_interval_commit_log=2**31 - 1)  # fmt: skip
_FILLING = random.Random(SEED).randbytes(4096)


def body(number: int, size: int) -> bytes:
    return b"%012d" % number + _FILLING[: size - 12]


def random_keys(count: int, seed: int = SEED) -> list[str]:
    """32 hex digits each."""
    source = random.Random(seed)
    return [source.randbytes(16).hex() for _ in range(count)]


def messages(keys: Sequence[str], size: int, first: int = 0) -> list[rmq.Message]:
    return [rmq.Message(TOPIC, body(number, size), keys=key, tags="paid") for number, key in enumerate(keys, first)]


def table(keys: Sequence[str], size: int, first: int = 0) -> pa.Table:
    """The same messages as Arrow columns."""
    bodies = pa.array([body(number, size) for number in range(first, first + len(keys))], pa.binary())
    return pa.table({"body": bodies, "keys": list(keys), "tags": ["paid"] * len(keys)})


class Closes(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=Closes)


class Fresh:
    """New stores, files and databases, the one before of that name removed: every round writes to new files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Closes] = {}

    def make(self, name: str, maker: Callable[[Path], Made]) -> Made:
        """What `maker` makes of a path where nothing is any more."""
        if name in self._made:
            self._made.pop(name).close()
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        made = self._made[name] = maker(path)
        return made

    def store(self, config: rmq.StoreConfig = CONFIG) -> rmq.Store:
        store = self.make("store", lambda path: rmq.open(path, "x", config=config, clock=lambda: START))
        store.put(rmq.Message("Warm", b""))
        return store

    def close(self) -> None:
        for made in self._made.values():
            made.close()
        shutil.rmtree(self._root, ignore_errors=True)
