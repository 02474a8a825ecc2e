# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

import numpy as np
import numpy.typing as npt

@final
class UnitCheck:
    def __new__(
        cls,
        delay_levels: npt.NDArray[np.int64],
        *,
        required_end: int,
        is_lenient: bool = True,
        has_ext: bool = False,
    ) -> Self: ...
    @property
    def wanted(self) -> tuple[int, int]: ...
    @property
    def right(self) -> int: ...
    @property
    def behind(self) -> int: ...
    def ignore(self, queue: int) -> None: ...
    def load(self, queue: int, first: int, units: bytes) -> None: ...
    def take_spans(self, *, last: bool = False) -> npt.NDArray[np.int64]: ...
