# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

@final
class ColumnRows:
    def __new__(cls) -> Self: ...
    @property
    def count(self) -> int: ...
    @property
    def records_size(self) -> int: ...
    def results(self) -> tuple[_Int64, _Int64, _Int32, _Int32, list[str], list[bytes]]: ...
