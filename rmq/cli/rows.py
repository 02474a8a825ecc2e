# SPDX-License-Identifier: Apache-2.0
"""What becomes of a file of rows: bodies, and the text of columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class SourceError(Exception):
    """A file that cannot be read as what it is said to be. row: as Rows.place has it, or None."""

    def __init__(self, path: str, row: int | str | None, reason: str) -> None:
        where = f"{path}: row {row}" if row is not None else path
        super().__init__(f"{where}: {reason}")


@dataclass
class Rows:
    """Part of a file. numbers: row numbers, from 1, without a CSV's header and blank lines; columns: text of the wanted
    columns, lists of texts where keys are lists; bad: (row, why) of rows that are none, in order; those are not among
    the others. lines: of JSONL those of all rows, the bad ones too, from row `first`.
    """

    numbers: npt.NDArray[np.int64]
    body: pa.Array
    columns: dict[str, pa.Array]
    bad: list[tuple[int, str]] = field(default_factory=list)
    lines: npt.NDArray[np.int64] | None = None
    first: int = 1

    def place(self, number: int) -> str:
        """What a message calls a row: its number, and its line where blank ones make that another number."""
        line = number if self.lines is None else int(self.lines[number - self.first])
        return str(number) if line == number else f"{number} (line {line})"


@dataclass(frozen=True)
class Wanted:
    """What becomes of a row: the columns whose text is needed, and the body column (None: the whole row).

    keys: of the columns those whose lists are several texts.
    """

    columns: tuple[str, ...]
    body: str | None
    keys: tuple[str, ...] = ()

    def check(self, path: str, names: list[str]) -> None:
        for name in (*self.columns, *([] if self.body is None else [self.body])):
            if name not in names:
                raise SourceError(path, None, f"no column {name!r}; there are: {', '.join(names)}")


def row_numbers(following: int, count: int, left_out: list[int]) -> tuple[npt.NDArray[np.int64], int]:
    """Numbers of the next `count` rows, without those left out, and the number after them."""
    numbers = np.arange(following, following + count + len(left_out))
    numbers = numbers[~np.isin(numbers, left_out)][:count]
    past, out = int(numbers[-1]) + 1 if count else following, set(left_out)
    while past in out:
        past += 1
    return numbers, past
