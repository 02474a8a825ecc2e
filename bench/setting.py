# SPDX-License-Identifier: Apache-2.0
"""What all rows of a run share: which are wanted, where files lie, RocketMQ, the floors, the table."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anchor import RocketMQ
from goals import Table, ratio_text
from rounds import QUICK_ROUNDS, QUICK_WARM, Round, Taken, interleaved

REST_S = 5.0


@dataclass
class Setting:
    """place: in memory when it has room, for new files; disk: for files in its page cache, and for syncs."""

    rows: tuple[str, ...]
    place: Path
    disk: Path
    seed: int
    quick: bool
    rocketmq: RocketMQ
    floors: Any
    table: Table = field(default_factory=Table)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def wants(self, row: str) -> bool:
        return row in self.rows

    def wanted(self, *rows: str) -> list[str]:
        return [row for row in rows if self.wants(row)]

    def anchored(self, *rows: str) -> list[str]:
        """Those wanted that need RocketMQ; without it they are noted as not run, and there are none."""
        if self.rocketmq.why_not:
            for row in self.wanted(*rows):
                self.table.skip(row, self.rocketmq.why_not)
            return []
        return self.wanted(*rows)

    def add(self, row: str, ours: Round, anchors: Mapping[str, Round], part: str = "") -> list[float]:
        """Time a row; ours comes last in each round. Returns our times."""
        taken = self.interleaved({**anchors, "": ours})
        mine = taken.pop("")
        self.record(row, part, mine, taken)
        return mine

    def interleaved(self, contenders: Mapping[str, Round]) -> Taken:
        if self.quick:
            return interleaved(contenders, QUICK_ROUNDS, QUICK_WARM)
        return interleaved(contenders)

    def record(self, row: str, part: str, ours: list[float], anchors: Taken, memory: list[float] | None = None) -> None:
        line = self.table.add(row, part, ours, anchors, memory)
        beside = f", memory alone {line.memory:.1f} ns" if line.memory else ""
        times = f"{line.ours:.1f} ns, {line.anchor} {line.theirs:.1f} ns{beside}"
        self.note(f"{line.name}: {times}, {ratio_text(line.ratio)}")

    def settle(self) -> None:
        """What was written is on disk, and whatever serves the disk has come to rest."""
        os.sync()
        time.sleep(REST_S)

    def note(self, text: str) -> None:
        """Say it now, and again under the table when it is about the gate or a figure beside the rows."""
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", flush=True)
        if text.startswith(("gate", "ungated")):
            self.notes.append(text)
