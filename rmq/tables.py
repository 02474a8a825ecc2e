# SPDX-License-Identifier: Apache-2.0
"""The store's own structures as Arrow batches: units of queues, entries of the index, queues, segments."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from rmq.arrays import number_array, text_scalar
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError, escaped
from rmq.index import Index
from rmq.queueset import QueueSet
from rmq.scan import arrow_field

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 65536


TABLES = {  # name -> column -> kind, as of rmq._core._columns
    "queues": {"topic": "text", "queue_id": "int32", "queue_offset": "int64", "phy_offset": "int64", "size": "int32",
               "tags_code": "int64"},
    "index": {"file": "text", "entry": "int32", "slot": "int32", "key_hash": "int32", "phy_offset": "int64",
              "store_timestamp": "timestamp"},
    "topics": {"topic": "text", "queue_id": "int32", "min_queue_offset": "int64", "max_queue_offset": "int64"},
    "segments": {"path": "text", "begin_phy_offset": "int64", "end_phy_offset": "int64",
                 "first_store_timestamp": "timestamp"},
}  # fmt: skip


def table_schema(name: str) -> pa.Schema:
    """Arrow schema of one of TABLES."""
    import pyarrow as pa

    return pa.schema([arrow_field(column, kind) for column, kind in TABLES[name].items()])


def _batch(name: str, columns: list[object]) -> pa.RecordBatch:
    import pyarrow as pa

    schema = table_schema(name)
    arrays = [column if isinstance(column, pa.Array) else number_array(column).view(field.type)
              if isinstance(column, np.ndarray) else pa.array(column, field.type)
              for column, field in zip(columns, schema, strict=True)]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _repeated(text: str, count: int) -> pa.Array:
    import pyarrow as pa

    return pa.repeat(text_scalar(text), count).cast(pa.string())


def queue_units(queues: QueueSet, topics: Collection[str] | None) -> Iterator[pa.RecordBatch]:
    """Units of the queues in their order, as they stand in the files and, of a reader, behind them."""
    for (topic, queue_id), queue in sorted(queues.queues.items()):
        if topics is not None and topic not in topics:
            continue
        first, last = queue.min_offset, queue.max_offset
        while first < last:
            phy_offsets, sizes, tags = queue.read(first, min(BATCH_ROWS, last - first))
            count = len(phy_offsets)
            if not count and first < queue.min_offset:  # cleaned away meanwhile
                first = queue.min_offset
                continue
            if not count:
                break
            numbers = np.arange(first, first + count)
            yield _batch("queues", [_repeated(topic, count), np.full(count, queue_id, np.int32), numbers, phy_offsets,
                                    sizes, tags])  # fmt: skip
            first += count


def index_entries(index: Index) -> Iterator[pa.RecordBatch]:
    """Entries of all index files, oldest first. store_timestamp: as the file has it, in whole seconds."""
    for file in index.files:
        entry, count = 1, file.index_count
        while entry < count:
            last = min(entry + BATCH_ROWS, count)
            hashes, phy_offsets, seconds = file.entries(entry, last)
            times = file.begin_timestamp + seconds.astype(np.int64) * 1000
            yield _batch("index", [_repeated(file.path.name, last - entry), np.arange(entry, last, dtype=np.int32),
                                   (hashes % file.slot_num).astype(np.int32), hashes, phy_offsets, times])  # fmt: skip
            entry = last


def queue_bounds(topics: dict[str, dict[int, tuple[int, int]]]) -> Iterator[pa.RecordBatch]:
    """One row for each queue. topics: as Store.topics gives it."""
    rows = [(topic, queue_id, low, high)
            for topic, queues in topics.items() for queue_id, (low, high) in queues.items()]  # fmt: skip
    yield _batch("topics", [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * 4)


def log_segments(log: CommitLog, log_end: int) -> Iterator[pa.RecordBatch]:
    """One row for each segment that holds records. first_store_timestamp: of its first record, null when that cannot be
    read.
    """
    segments = [segment for segment in log.segments if segment.start < log_end]
    starts = [segment.start for segment in segments]
    yield _batch("segments", [[escaped(str(segment.path)) for segment in segments], starts,
                              [min(segment.end, log_end) for segment in segments],
                              [_first_time(log, start, log_end) for start in starts]])  # fmt: skip


def _first_time(log: CommitLog, start: int, log_end: int) -> int | None:
    try:
        for batch, _ in log.load(np.array([start], np.int64), log_end, any_size=True):
            return int(batch.numbers("store_timestamp")[0])
    except CorruptFileError:
        pass
    return None
