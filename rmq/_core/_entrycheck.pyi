# SPDX-License-Identifier: Apache-2.0
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

from rmq._core._indexfile import IndexFileView

FAULT_HASH_RANGE: Final[int]
FAULT_LINK: Final[int]
FAULT_ORDER: Final[int]
FAULT_SLOT: Final[int]
FAULT_NO_RECORD: Final[int]
FAULT_NO_KEY: Final[int]
FAULT_TIME: Final[int]
FAULT_MISSING: Final[int]

@final
class EntryCheck:
    def __new__(
        cls, *, begin: int, required_end: int, is_lenient: bool = True, index_tags: bool = False
    ) -> Self: ...
    @property
    def right(self) -> int: ...
    @property
    def behind(self) -> int: ...
    @property
    def is_through(self) -> bool: ...
    def open_file(
        self,
        view: IndexFileView,
        file: int,
        entry: int,
        limit: int,
        *,
        begin_timestamp: int,
        first_begin_timestamp: int,
        is_last: bool,
    ) -> None: ...
    def pass_over(self, blind_end: int) -> None: ...
    def finish(self, end: int) -> bool: ...
    def take_faults(self, *, last: bool = False) -> npt.NDArray[np.int64]: ...

def check_links(
    view: IndexFileView,
    file: int,
    limit: int,
    places: npt.NDArray[np.int64],
    *,
    most: int,
    check_slots: bool = True,
    is_growing: bool = False,
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.int32], int]: ...
