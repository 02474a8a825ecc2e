# SPDX-License-Identifier: Apache-2.0
import mmap
from typing import Self, final

import numpy as np
import numpy.typing as npt

from rmq._core._message import Message
from rmq._core._putrow import PutRules
from rmq._core._queuetable import QueueTable
from rmq._core._textcolumn import TextColumn

_Writable = bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]
_Buffer = bytes | _Writable
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

@final
class PutBatch:
    def __new__(cls, rules: PutRules) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def records_size(self) -> int: ...
    @property
    def waits(self) -> bool: ...
    @property
    def is_put(self) -> bool: ...
    def load(self, messages: list[Message], *, batch: bool = False) -> None: ...
    def load_one(self, message: Message) -> None: ...
    def load_columns(self, count: int, *, topic: TextColumn, body: TextColumn, keys: TextColumn | None,
                     key_lists: _Int64 | None, tags: TextColumn | None, uniq_key: TextColumn | None,
                     names: TextColumn | None, values: TextColumn | None, maps: _Int64 | None,
                     raw_properties: TextColumn | None, numbers: dict[str, _Int64],
                     hosts: dict[str, tuple[list[bytes], _Int64]], is_stored: bool = False) -> None: ...  # fmt: skip
    @property
    def last_phy_offset(self) -> int: ...
    def alike(self) -> int: ...
    def packed_size(self) -> int: ...
    def fit(self, start: int, room: int) -> tuple[int, int]: ...
    def keep(self, count: int) -> None: ...
    def encode(
        self,
        segment: _Writable,
        segment_phy_offset: int,
        position: int,
        start: int,
        stop: int,
        store_timestamp: int,
        queues: QueueTable,
    ) -> int: ...
    def results(self) -> tuple[_Int64, _Int64, _Int32, _Int32, list[str], list[bytes]]: ...
    def release(self) -> None: ...
