# SPDX-License-Identifier: Apache-2.0
"""What of an append that was interrupted is in the store already."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rmq.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_STORES_OWN = re.compile(rb"\x02?(?:__CRC32#\x01\d{10}\x02)?\Z")  # the last separator, the whole record's CRC
SAME_ROW = ["topic", "queue_id", "flag", "born_timestamp", "body_crc", "raw_body", "raw_properties"]


class Appended:
    """Messages behind a place of a store that an interrupted append may have left there, in order."""

    def __init__(self, store: Store, begin: int) -> None:
        self._is_over = begin >= store.max_phy_offset
        self._rows = (row for batch in store.scan(begin_phy_offset=begin, end_phy_offset=store.max_phy_offset,
                                                  columns=SAME_ROW) for row in _comparable(batch))  # fmt: skip

    def skip(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that are not there yet. Messages that others put meanwhile stand in between."""
        if self._is_over:
            return batch
        for number, row in enumerate(_comparable(batch.select(SAME_ROW))):
            if row not in self._rows:  # goes on behind the one found before
                self._is_over = True
                return batch.slice(number)
        return batch.slice(len(batch))


def _comparable(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows without what a store adds to or leaves out of their properties; times as ms, for Python's end in 9999."""
    import pyarrow as pa

    number = batch.schema.get_field_index("born_timestamp")
    times = batch.column(number).cast(pa.int64())
    rows: list[dict[str, Any]] = batch.set_column(number, "born_timestamp", times).to_pylist()
    for row in rows:
        row["raw_properties"] = _STORES_OWN.sub(b"", row["raw_properties"])
    return rows
