# SPDX-License-Identifier: Apache-2.0
"""The messages of the log rows: 16 MB of bodies of one size and of texts, which become properties of 109 bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import keyfiles
import numpy as np
import numpy.typing as npt
import peers
import pyarrow as pa
from goals import PER_SIZE
from sample import START

import rmq
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq.chunks import put_chunks
from rmq.columns import put_rules
from rmq.commitlog import CommitLog

TOPIC = "BenchTopic"
TAGS = "TagOfTwentyThreeLetters"
POOL_BYTES = 16 * 1024**2
TEXT_BYTES = 32 + 32 + len(TAGS)  # of a message: key, uniq key and tags
SEGMENT = 256 * 1024**2
BODY_SIZES = dict(zip(PER_SIZE, (100, 1024, 4096), strict=True))
RECORD_SIZES = dict(zip(PER_SIZE, (310, 1234, 4306), strict=True))
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, flush_interval_commit_log=2**31 - 1)
HOST, PORT = CONFIG.store_host.rsplit(":", 1)


@dataclass
class Records:
    """The same messages as columns, as objects, and as files from which RocketMQ makes its own."""

    part: str
    record_size: int
    pool: npt.NDArray[np.uint8]
    keys: list[str]
    uniq_keys: list[str]
    bodies_path: Path
    keys_path: Path

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def passes(self) -> int:
        """How often all of them fit into a segment."""
        return (SEGMENT - 4096) // (len(self) * self.record_size)

    def table(self, count: int | None = None) -> pa.Table:
        size = BODY_SIZES[self.part]
        offsets = pa.py_buffer(np.arange(0, len(self.pool) + 1, size, dtype=np.int32))
        bodies = pa.Array.from_buffers(pa.binary(), len(self), [None, offsets, pa.py_buffer(self.pool)])
        columns = {"body": bodies, "keys": self.keys, "uniq_key": self.uniq_keys, "tags": [TAGS] * len(self)}
        return pa.table(columns).slice(0, count)

    def messages(self, count: int) -> list[rmq.Message]:
        size = BODY_SIZES[self.part]
        bodies = self.pool[: count * size].tobytes()
        return [rmq.Message(TOPIC, bodies[at * size : (at + 1) * size], keys=key, uniq_key=uniq, tags=TAGS)
                for at, (key, uniq) in enumerate(zip(self.keys[:count], self.uniq_keys, strict=False))]  # fmt: skip


def make_records(part: str, place: Path, seed: int) -> Records:
    size = BODY_SIZES[part]
    count = POOL_BYTES // (size + TEXT_BYTES)
    bodies_path, keys_path = place / f"bodies-{size}", place / f"keys-{size}"
    pool = np.frombuffer(random.Random(seed).randbytes(count * size), np.uint8)
    pool.tofile(bodies_path)
    keys = keyfiles.write(keys_path, keyfiles.random_lines(2 * count, seed))
    return Records(part, RECORD_SIZES[part], pool, keys.text(0, count), keys.text(count, count), bodies_path, keys_path)


class WarmLog:
    """A commit log of one segment, every page touched, that starts again at its first byte for every round."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{0:020d}"
        directory.mkdir(exist_ok=True)
        self._log = CommitLog([directory], SEGMENT, writable=True)
        self._batch = PutBatch(put_rules(CONFIG))
        self.queues = QueueTable()

    def restart(self) -> None:
        self._log.position = 0
        file = self._log.segments[0].file
        file.warmed = file.size  # filled once, so its pages are in the cache: nothing is written past its map
        self.queues = QueueTable()

    @property
    def end(self) -> int:
        return self._log.position

    def append(self, source: object, passes: int = 1) -> None:
        """A table or a list of messages, `passes` times."""
        topic = None if isinstance(source, list) else TOPIC
        for _ in range(passes):
            for _, load in put_chunks(source, topic, None, None):
                load(self._batch)
                self._log.append(self._batch, START, self.queues)
                self._batch.release()

    def append_each(self, messages: list[rmq.Message]) -> None:
        """A call for each message."""
        batch, append, queues = self._batch, self._log.append, self.queues
        for message in messages:
            batch.load([message])
            append(batch, START, queues)
            batch.release()

    def properties(self, key: str, uniq_key: str) -> str:
        """Those of the first record as a format for RocketMQ: %1$s for its key, %2$s for its uniq key."""
        first = peers.split(self.path, 0, self.end)
        record = next(iter(first))
        return record[-109:].decode().replace(key, "%1$s").replace(uniq_key, "%2$s")

    def close(self) -> None:
        self._log.close()
        self.path.unlink()


