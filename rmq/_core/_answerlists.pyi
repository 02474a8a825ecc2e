# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

import numpy as np
import numpy.typing as npt

@final
class AnswerLists:
    def __new__(cls, keys: int) -> Self: ...
    @property
    def done(self) -> int: ...
    def take(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
