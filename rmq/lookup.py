# SPDX-License-Identifier: Apache-2.0
"""Messages at phy offsets as Arrow: what look-ups and queries for columns are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmq._core._recordbatch import RecordBatch
from rmq.arrays import number_array
from rmq.commitlog import CommitLog
from rmq.keys import int64_array
from rmq.logscan import CHECK_CRC
from rmq.query import Found, load_sound, rank_in
from rmq.scan import TABLE_BYTES, BatchMaker, KeysOf, unwrapped_rows

if TYPE_CHECKING:
    import pyarrow as pa

Load = Callable[[npt.NDArray[np.int64], int, int], Iterator[tuple[RecordBatch, npt.NDArray[np.int64]]]]


def loader(log: CommitLog, phy_offsets: npt.NDArray[np.int64], sizes: Any, *, check_crc: bool,
           skip_damage: bool = False) -> Load:  # fmt: skip
    """What loads records for a look-up. sizes: theirs, when they shall be read ahead. skip_damage: what is whole."""
    if sizes is not None:
        log.read_ahead(phy_offsets, int64_array(sizes, "sizes"))
    if skip_damage:
        crc = CHECK_CRC if check_crc else 0
        return lambda at, end, checks: log.load(at, end, checks=checks | crc, any_size=True)
    return partial(load_sound, log) if check_crc else lambda at, end, checks: log.load(at, end, checks=checks)


def placed_batches(load: Load, phy_offsets: npt.NDArray[np.int64], log_end: int, columns: Sequence[str],
                   limit: int = TABLE_BYTES, keys_of: KeysOf | None = None
                   ) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:  # fmt: skip
    """Records at phy offsets in the order of the log, inner batches unwrapped, about `limit` bytes a batch, and of each
    row the place of its phy offset.

    load(ascending phy offsets, log_end, checks): batches, each with the positions of its rows. keys_of(place): those
    for which the record was found (message.carrying); None: all messages of an inner batch.
    """
    maker = BatchMaker(columns)
    order = np.argsort(phy_offsets)
    rows: list[npt.NDArray[np.int64]] = []

    def finished() -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:
        placed, first = np.concatenate([np.empty(0, np.int64), *rows]), 0
        rows.clear()
        for made in maker.finish(limit):
            last = first + len(made) if columns else len(placed)
            yield made, placed[first:last]
            first = last

    for batch, positions in load(phy_offsets[order], log_end, maker.checks):
        for part, first, last, placed in _portions(batch, order[positions], limit, keys_of):
            if maker.data_size > limit:
                yield from finished()
            maker.append(part, first, last)
            rows.append(placed)
    yield from finished()


def _portions(batch: RecordBatch, places: npt.NDArray[np.int64], limit: int,
              keys_of: KeysOf | None) -> Iterator[tuple[RecordBatch, int, int, npt.NDArray[np.int64]]]:  # fmt: skip
    """Rows [first, last) of a batch or of an inner batch, `limit` bytes of them at a time, with their places."""
    if batch.has_inner_batches():
        for row, part in unwrapped_rows(batch, None if keys_of is None else lambda row: keys_of(int(places[row]))):
            yield part, 0, len(part), np.full(len(part), places[row], np.int64)
        return
    ends, first = np.cumsum(batch.numbers("size")), 0
    while first < len(batch):
        last = max(first + 1, int(ends.searchsorted(limit + (ends[first - 1] if first else 0), side="right")))
        yield batch, first, last, places[first:last]
        first = last


def table_of(parts: Iterable[tuple[pa.RecordBatch,
                                   npt.NDArray[np.int64]]]) -> tuple[pa.Table, npt.NDArray[np.int64]]:  # fmt: skip
    """placed_batches as a table in the order of the places, and the places as they came. ValueError over 2 GiB."""
    import pyarrow as pa

    batches, places = zip(*parts, strict=True)
    placed, table = np.concatenate(places), pa.Table.from_batches(batches)
    if (placed[1:] >= placed[:-1]).all():
        return table, placed
    try:
        return table.take(number_array(np.argsort(placed, kind="stable"))), placed
    except pa.ArrowInvalid:  # of a column's chunks, which Arrow joins
        raise ValueError(f"{len(placed)} messages have {table.nbytes >> 20} MiB, a look-up takes less than 2 GiB: ask "
                         "for fewer columns, or for fewer messages at a time") from None  # fmt: skip


def newest(table: pa.Table, found: Found, places: npt.NDArray[np.int64],
           limit: int | None) -> tuple[pa.Table, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:  # fmt: skip
    """A table whose rows have ascending places in `found`, the key's number of each row, and which keys have more.
    Newest first in inner batches too, whose messages share a place, and of these too no more than the limit.
    """
    numbers, truncated = found.numbers[places], found.truncated
    if (places[1:] > places[:-1]).all():
        return table, numbers, truncated

    rows = np.lexsort((-np.arange(len(places)), places))
    if limit is not None:
        totals = np.bincount(numbers, minlength=len(truncated))
        is_kept = rank_in(numbers, totals) < limit
        rows, numbers, truncated = rows[is_kept], numbers[is_kept], truncated | (totals > limit)
    return table.take(number_array(rows)) if table.num_columns else table, numbers, truncated


def numbered(name: str, numbers: npt.NDArray[np.int64], table: pa.Table) -> pa.Table:
    """The table behind a column of numbers; one without columns does not know how many rows it has."""
    import pyarrow as pa

    column = number_array(numbers)
    return table.add_column(0, name, column) if table.num_columns else pa.table({name: column})
