# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

import numpy as np
import numpy.typing as npt

_Offsets = npt.NDArray[np.int32] | npt.NDArray[np.int64]
_Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

@final
class TextColumn:
    def __new__(cls, offsets: _Offsets, data: _Buffer, missing: _Buffer) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def count(self) -> int: ...
