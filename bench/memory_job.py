# SPDX-License-Identifier: Apache-2.0
"""One job of test_memory.py in a process of its own: memory_job.py ingest|scan|query STORE MESSAGES."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from sample import SEED, SEGMENT, START, TOPIC

import rmq

ROWS = 8192
BODY = 300
ASKED = 2_000  # keys of a query, whatever the store's size
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=100_000, max_index_num=400_000)


def key(number: int) -> str:
    return f"{number * 2654435761 % 2**32:08x}-{number:08d}"


def batches(count: int) -> Iterator[pa.RecordBatch]:
    filling = np.random.default_rng(SEED).integers(0, 256, ROWS * BODY, np.uint8)
    for first in range(0, count, ROWS):
        rows = min(ROWS, count - first)
        ends = np.arange(rows + 1, dtype=np.int32) * BODY
        body = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(filling)])
        yield pa.record_batch({"body": body, "keys": [key(number) for number in range(first, first + rows)]})


def ingest(path: Path, count: int) -> int:
    """Rows come in batches, as from a file that is larger than memory."""
    first = next(batches(1))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: START) as store:
        source = pa.RecordBatchReader.from_batches(first.schema, batches(count))
        return store.put_many(source, topic=TOPIC, results=False)


def scan(path: Path, count: int) -> int:
    with rmq.open(path) as store:
        return sum(batch.num_rows for batch in store.scan())


def query(path: Path, count: int) -> int:
    """Some keys of all, one by one, together, and their phy offsets."""
    keys = [key(number) for number in random.Random(SEED).sample(range(count), ASKED)]
    with rmq.open(path) as store:
        found = sum(len(store.query(TOPIC, item)) for item in keys[:200])
        assert found == 200
        assert store.query_many(TOPIC, keys).table.num_rows == ASKED
        return sum(TOPIC != "" and len(answer) > 0 for answer in store.select_phy_offset_many(TOPIC, keys).to_pylist())


if __name__ == "__main__":
    job, path, count = {"ingest": ingest, "scan": scan, "query": query}[sys.argv[1]], Path(sys.argv[2]), sys.argv[3]
    print(job(path, int(count)))
