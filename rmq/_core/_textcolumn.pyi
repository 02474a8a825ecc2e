# SPDX-License-Identifier: Apache-2.0
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

_Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]  # or pyarrow's

@final
class TextColumn:
    def __new__(
        cls,
        offsets: _Buffer,
        data: _Buffer,
        missing: bytes | npt.NDArray[np.uint8],
        *,
        width: int = 8,
        first: int = 0,
        count: int = -1,
    ) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def count(self) -> int: ...
