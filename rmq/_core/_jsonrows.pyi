# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

import numpy as np
import numpy.typing as npt

from rmq._core._textcolumn import TextColumn

@final
class JsonRows:
    def __new__(cls, heads: list[bytes], columns: list[TextColumn], quoted: list[bool], tail: bytes) -> Self: ...
    @property
    def count(self) -> int: ...
    @property
    def room(self) -> int: ...
    def write(self, offsets: npt.NDArray[np.int64], into: npt.NDArray[np.uint8]) -> int: ...
