# SPDX-License-Identifier: Apache-2.0
"""Ingest from a generator as fast as put_many takes it: a million orders into a new store.

What one learns: put_many takes a generator of Arrow record batches one at a time, so the data need never be in memory
as a whole. The generator is timed alone too: it is several times faster, so put_many sets the pace.
Run `python examples/ingest.py STORE [--rows N]`.
"""

import argparse
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import rmq

SCHEMA = pa.schema({"body": pa.string(), "keys": pa.string(), "queue_id": pa.int64()})
BATCH_ROWS = 8192  # what put_many checks and writes as one


# Batches, not Message objects: those are made and taken one by one. Measured, page cache only: 2 against 0.3 million/s.
def orders(rows: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, rows, BATCH_ROWS):
        numbers = np.arange(first, min(first + BATCH_ROWS, rows))
        keys = pa.array(numbers).cast(pa.string())
        bodies = pc.binary_join_element_wise('{"order": ', keys, ', "amount": 1250, "currency": "EUR"}', "")
        yield pa.record_batch([bodies, keys, pa.array(numbers % 4)], schema=SCHEMA)


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("store", help="a directory that does not exist yet")
parser.add_argument("--rows", type=int, default=1_000_000)
options = parser.parse_args()
next(orders(1))  # the first array makes pyarrow load pandas where it is installed
begin = perf_counter()
made = sum(len(batch) for batch in orders(options.rows))
print(f"generator alone: {made:,} messages, {made / (perf_counter() - begin):,.0f} messages/s")
with rmq.open(options.store, "x") as store:
    begin = perf_counter()
    count = store.put_many(orders(options.rows), topic="orders", results=False)
    print(f"put_many: {count:,} messages, {count / (perf_counter() - begin):,.0f} messages/s, page cache only")
    store.flush()
    print(f"with a flush to disk at the end: {count / (perf_counter() - begin):,.0f} messages/s")
