# SPDX-License-Identifier: Apache-2.0
"""What lives for months: no call, answered or refused, keeps memory, descriptors or maps."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rmq

CALLS, OF_LONG_ONES = 200, 40
WINDOWS = 3  # free lists of CPython and NumPy may still fill in one of them
LIMITS = {"objects": 0.5, "bytes of malloc": 64, "bytes of Arrow": 64, "descriptors": 0, "maps": 0}  # a call

# Wide enough that no file ends amid a test: a store holds a descriptor and a map for each.
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=64 << 20, max_hash_slot_num=1000, max_index_num=1 << 20)
KEYS = [f"k{number}" for number in range(60)]


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


def allocated() -> int:
    """Bytes that malloc has given out; 0 where libc does not tell (older than glibc 2.33, a sanitizer's)."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _Mallinfo
    told = tell()
    return int(told.uordblks + told.hblkhd)


def held() -> tuple[int, ...]:
    """As LIMITS names them."""
    gc.collect()
    return (sys.getallocatedblocks(), allocated(), pa.total_allocated_bytes(), len(os.listdir("/proc/self/fd")),
            Path("/proc/self/maps").read_bytes().count(b"\n"))  # fmt: skip


def messages(count: int) -> list[rmq.Message]:
    return [rmq.Message("T", b"b" * (number % 90), keys=[KEYS[number % len(KEYS)]], tags="ab"[number % 2],
                        uniq_key=f"u{number:06d}") for number in range(count)]  # fmt: skip


class Life:
    """A store that is written, a reader beside it, and what is done to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writer = rmq.open(root / "s", "x", config=CONFIG)
        self.writer.put_many(messages(2000))
        self.writer.flush()
        self.reader = rmq.open(root / "s")
        self.table = self.reader.scan(columns=["topic", "body", "keys", "tags"]).read_all().slice(0, 100)
        self.id = self.reader.lookup(0).offset_msg_id
        self.consumer = rmq.Consumer(self.reader, "g", "T")

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def consume(self) -> None:
        self.consumer.seek(0, 0)
        self.consumer.poll(50)
        self.consumer.commit()

    def index_file(self) -> None:
        [path] = (self.root / "s/index").iterdir()
        file = rmq.IndexFile(path, max_hash_slot_num=CONFIG.max_hash_slot_num, max_index_num=CONFIG.max_index_num)
        file.select_phy_offset("T#k1")
        file.select_phy_offset_many(KEYS)
        file.close()

    def short_life(self) -> None:
        store = rmq.open(self.root / "short", "x", config=CONFIG)
        store.put_many(messages(50))
        store.close()
        shutil.rmtree(self.root / "short")

    def half_a_scan(self) -> None:
        next(iter(self.reader.scan(batch_rows=100)))

    def refused(self) -> None:
        wrong: list[Callable[[], object]] = [
            lambda: self.writer.put("text"),  # type: ignore[arg-type]
            lambda: self.writer.put_many([*messages(5), 5]),
            lambda: self.writer.put_many([*messages(5), rmq.Message("T", bytes(5 << 20))]),
            lambda: self.writer.put_many(pa.table({"topic": ["T", None], "body": [b"", b""]})),
            lambda: self.reader.put(messages(1)[0]),
            lambda: self.reader.query_many("T", ["k1", None]),
            lambda: self.reader.lookup(13),
            lambda: self.reader.scan(columns=["none such"]),
            lambda: rmq.Message(5, b""),  # type: ignore[arg-type]
            lambda: rmq.open(self.root / "s", "r+"),
        ]
        for call in wrong:
            with suppress(TypeError, ValueError, KeyError, rmq.RmqError):
                call()
                raise AssertionError("not refused")


DONE: dict[str, Callable[[Life], object]] = {
    "put": lambda life: life.writer.put(messages(1)[0]),
    "put_few": lambda life: life.writer.put_many(messages(3)),
    "put_many of messages": lambda life: life.writer.put_many(messages(100)),
    "put_many of Arrow": lambda life: life.writer.put_many(life.table),
    "put_batch": lambda life: life.writer.put_batch([rmq.Message("B", b"x")] * 5),
    "flush": lambda life: (life.writer.put(messages(1)[0]), life.writer.flush()),
    "consume": Life.consume,
    "query": lambda life: life.reader.query("T", "k3", limit=None),
    "query_many": lambda life: life.reader.query_many("T", KEYS, begin=np.zeros(len(KEYS), np.int64)),
    "select_phy_offset_many": lambda life: life.reader.select_phy_offset_many("T", KEYS),
    "index file": Life.index_file,
    "lookup": lambda life: [life.reader.lookup(id) for id in (0, "u000005", life.id, ("T", 0, 3))],
    "lookup_many": lambda life: life.reader.lookup_many([0, 5]),
    "pull": lambda life: life.reader.pull("T", 0, 5, 64, tags="a || b"),
    "search_offset": lambda life: life.reader.search_offset("T", 0, 10**12),
    "scan": lambda life: life.reader.scan().read_all(),
    "half a scan": Life.half_a_scan,
    "tables": lambda life: [life.reader.table(name).read_all() for name in ("queues", "index", "topics", "segments")],
    "info": lambda life: (life.reader.info(), life.reader.topics(), life.reader.groups()),
    "verify": lambda life: rmq.verify(life.root / "s"),
    "open and close": lambda life: rmq.open(life.root / "s").close(),
    "short life": Life.short_life,
    "refused": Life.refused,
}
LONG = "verify", "short life"


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path)
    yield life
    life.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", DONE)
def test_nothing_is_kept_of_a_call(life: Life, name: str) -> None:
    call, count = DONE[name], OF_LONG_ONES if name in LONG else CALLS
    for _ in range(count // 2):
        call(life)
    kept = []
    for _ in range(WINDOWS):
        before = held()
        for _ in range(count):
            call(life)
        kept.append([(now - then) / count for then, now in zip(before, held(), strict=True)])
    grown = dict(zip(LIMITS, (min(figures) for figures in zip(*kept, strict=True)), strict=True))
    assert {name: figure for name, figure in grown.items() if figure > LIMITS[name]} == {}, kept
