# SPDX-License-Identifier: Apache-2.0
import mmap
from collections.abc import Iterable
from typing import Literal, Self, final

import numpy as np
import numpy.typing as npt

from rmq._core._queuetable import QueueTable

_Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]
_Item = tuple[bytes | None, bytes]
# topic, queue_id, queue_offset, phy_offset, size, flag, sys_flag, born_timestamp, born_host, store_timestamp,
# store_host, reconsume_times, prepared_transaction_offset, body_crc, body, properties
_Fields = tuple[str, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int, bytes, bytes]
_Number = Literal["phy_offset", "size", "queue", "queue_offset", "store_timestamp", "sys_flag"]

@final
class RecordBatch:
    def __new__(cls, capacity: int = 8192) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def next_phy_offset(self) -> int: ...
    def release(self) -> None: ...
    def scan(
        self,
        segment: _Buffer,
        segment_phy_offset: int,
        begin: int,
        end: int,
        *,
        checks: int = 0,
        queues: QueueTable | None = None,
        byte_limit: int = 0,
        behind: int = 0,
    ) -> int: ...
    def load(
        self,
        segment: _Buffer,
        segment_phy_offset: int,
        phy_offsets: npt.NDArray[np.int64],
        end: int,
        *,
        checks: int = 0,
        behind: int = 0,
    ) -> npt.NDArray[np.int32]: ...
    def adopt(self, data: bytes, places: list[tuple[int, int]]) -> None: ...
    def keep(
        self,
        topics: Iterable[bytes] | None = None,
        begin: int = -9223372036854775808,
        end: int = 9223372036854775807,
        mask: npt.NDArray[np.uint8] | None = None,
    ) -> int: ...
    def match(
        self, topic: bytes, keys: list[str], wanted: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]: ...
    def carries(self, i: int, topic: bytes | None, key: bytes, begin: int, end: int) -> bool: ...
    def find_keys(self, items: set[_Item], hashes: npt.NDArray[np.int32]) -> list[tuple[int, _Item]]: ...
    def has_inner_batches(self) -> bool: ...
    def has_keys(self) -> bool: ...
    def ambiguous(self) -> list[tuple[int, int]]: ...
    def numbers(self, field: _Number) -> npt.NDArray[np.int64]: ...
    def row_at(self, phy_offset: int) -> int: ...
    def phy_offset(self, i: int) -> int: ...
    def store_timestamp(self, i: int) -> int: ...
