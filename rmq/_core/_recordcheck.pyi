# SPDX-License-Identifier: Apache-2.0
from typing import Final, Self, final

from rmq._core._entrycheck import EntryCheck
from rmq._core._queuetable import QueueTable
from rmq._core._recordbatch import RecordBatch, _Buffer
from rmq._core._unitcheck import UnitCheck

WANTS_NOTHING: Final[int]
WANTS_UNITS: Final[int]
WANTS_ENTRIES: Final[int]

@final
class RecordCheck:
    def __new__(cls, queues: QueueTable, units: UnitCheck, entries: EntryCheck) -> Self: ...
    @property
    def record_count(self) -> int: ...
    @property
    def newest(self) -> int: ...
    @property
    def oldest(self) -> int: ...
    def begin(
        self,
        batch: RecordBatch,
        segment: _Buffer,
        segment_phy_offset: int,
        begin: int,
        end: int,
        *,
        checks: int,
        step: int,
        behind: int = 0,
    ) -> None: ...
    def go_on(self) -> int: ...
    def take_misnamed(self) -> list[int]: ...
