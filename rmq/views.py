# SPDX-License-Identifier: Apache-2.0
"""Ranges of the log to Arrow batches whose bodies are views into the map of a segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmq._core._bodyviews import body_views
from rmq._core._columns import GrowingBuffer
from rmq._core._recordbatch import RecordBatch
from rmq.commitlog import CommitLog
from rmq.logscan import CHECK_CRC
from rmq.scan import TABLE_BYTES, BatchMaker

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_TOGETHER = 1024  # whose lines the cache still holds when columns are made of them
BATCH_ROWS = 16384


def view_batches(log: CommitLog, begin: int, end: int, columns: Sequence[str], *,
                 check_crc: bool) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Records in [begin, end) as Arrow batches of `columns`, none of them of bodies, and `raw_body`: a binary_view into
    the segment's map, no copy. Inner batches as they are. Raises as CommitLog.records.

    Internal: a batch keeps its map, behind close() and a removal of the file too; of a file that is cut short meanwhile
    it reads zeros, so whoever reads one asks log.check() before anything is concluded from it. Do not hand it out.
    """
    import pyarrow as pa

    maker, batch = BatchMaker(columns), RecordBatch(ROWS_TOGETHER)
    schema = maker.schema.append(pa.field("raw_body", pa.binary_view()))
    checks = maker.checks | (CHECK_CRC if check_crc else 0)

    def batch_of(views: GrowingBuffer, source: Any) -> pa.RecordBatch:
        buffers = [None, pa.py_buffer(views), pa.py_buffer(source)]
        bodies = pa.Array.from_buffers(pa.binary_view(), maker.count, buffers)
        [copied] = maker.finish(TABLE_BYTES)
        return pa.RecordBatch.from_arrays([*copied.columns, bodies], schema=schema)

    while begin < end:
        stop = min(end, begin - begin % log.segment_size + log.segment_size)  # a buffer of views is one segment's
        views = GrowingBuffer()
        for rows in log.records(begin, stop, batch=batch, checks=checks):
            maker.append(rows)
            source = body_views(rows, views)
            if maker.count >= BATCH_ROWS:
                yield batch_of(views, source)
                views = GrowingBuffer()
        if maker.count:
            yield batch_of(views, source)
        begin = stop
