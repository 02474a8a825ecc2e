# SPDX-License-Identifier: Apache-2.0
import mmap
from collections.abc import Callable
from typing import Self, final

import numpy as np
import numpy.typing as npt

from rmq._core._mapguard import MapGuard

_Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]

def sidecar_size(hash_slot_num: int, index_num: int) -> int: ...
def build_sidecar(
    index: _Buffer,
    out: _Buffer,
    *,
    hash_slot_num: int,
    index_num: int,
    index_mtime_ns: int,
    goes_on: Callable[[], bool],
) -> str: ...

@final
class SidecarView:
    def __new__(
        cls,
        buffer: _Buffer,
        guard: MapGuard,
        *,
        hash_slot_num: int,
        index_num: int,
        index_mtime_ns: int,
        index_header: bytes,
    ) -> Self: ...
    @property
    def is_damaged(self) -> bool: ...
