# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, final

import numpy as np
import numpy.typing as npt

from rmq._core._logtail import LogTail
from rmq._core._message import Message
from rmq._core._ownedlock import OwnedLock
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable

_Result = TypeVar("_Result", bound=tuple[object, ...])

@final
class Putter(Generic[_Result]):
    def __new__(
        cls,
        *,
        put_lock: OwnedLock,
        flush_lock: OwnedLock,
        tail: LogTail,
        queues: QueueTable,
        batch: PutBatch,
        marks: memoryview,
        clock: Callable[[], int],
        ticks: int,
        kind: type[_Result],
    ) -> Self: ...
    def put(self, message: Message) -> _Result | None: ...
    def put_few(self, messages: list[Message], results: bool) -> tuple[Any, ...] | int | None: ...
    def close(self) -> None: ...

def put_result(batch: PutBatch, store_timestamp: int, *, kind: type[_Result], message: Message) -> _Result: ...
def put_results(
    first: int,
    stop: int,
    *,
    kind: type[_Result],
    topics: list[str],
    hosts: list[bytes],
    queue_id: npt.NDArray[np.int32],
    queue_offset: npt.NDArray[np.int64],
    phy_offset: npt.NDArray[np.int64],
    size: npt.NDArray[np.int32],
    store_timestamp: npt.NDArray[np.int64],
) -> list[_Result]: ...
