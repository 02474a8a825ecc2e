# SPDX-License-Identifier: Apache-2.0
"""Files of index keys, one a line, which RocketMQ and we read alike. Everything from fixed seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHUNK = 1_000_000  # keys
WIDTH = 32  # characters of a random or uniq key
PRODUCERS = 8
HEX = np.array([f"{value:02X}" for value in range(256)], "S2").view(np.uint16)  # both digits of a byte
Matrix = npt.NDArray[np.uint8]


class KeyFile:
    """Keys of a file by number, made anew each time: strings whose hash nobody knows yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r")
        ends = [np.flatnonzero(self._bytes[at : at + 2**26] == ord("\n")) + at + 1
                for at in range(0, len(self._bytes), 2**26)]  # fmt: skip
        self._starts = np.concatenate([np.zeros(1, np.int64), *ends])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def text(self, first: int, count: int) -> list[str]:
        begin, end = self._starts[first], self._starts[first + count]
        return self._bytes[begin : end - 1].tobytes().decode().split("\n")

    def arrow(self, first: int, count: int) -> pa.Array:
        return pa.array(self.text(first, count))


def _lines(raw: Matrix) -> Matrix:
    """16 bytes a key -> lines of 32 hex digits."""
    lines = np.full((len(raw), WIDTH + 1), ord("\n"), np.uint8)
    lines[:, :WIDTH] = HEX.take(raw).view(np.uint8)
    return lines


def random_lines(count: int, seed: int) -> Iterator[Matrix]:
    source = np.random.default_rng(seed)
    for first in range(0, count, CHUNK):
        yield _lines(source.integers(0, 256, (min(CHUNK, count - first), WIDTH // 2), np.uint8))


def uniq_lines(count: int, seed: int) -> Iterator[Matrix]:
    """As MessageClientIDSetter makes them: address, process, class loader; ms since a time, counter."""
    who = np.random.default_rng(seed).integers(0, 256, (PRODUCERS, 10), np.uint8)
    for first in range(0, count, CHUNK):
        number = np.arange(first, min(first + CHUNK, count))
        turn = number // PRODUCERS
        raw = np.empty((len(number), WIDTH // 2), np.uint8)
        raw[:, :10] = who[number % PRODUCERS]
        raw[:, 10:14] = (turn // 50).astype(">u4").view(np.uint8).reshape(-1, 4)
        raw[:, 14:] = turn.astype(">u2").view(np.uint8).reshape(-1, 2)
        yield _lines(raw)


def mixed_lines(count: int, seed: int) -> Iterator[bytes]:
    """Uniq keys and order ids in turn, each 500th of another script, of 1 to 80 characters."""
    whole = uniq_lines(count, seed)
    for first, matrix in zip(range(0, count, CHUNK), whole, strict=True):
        keys = matrix[:, :WIDTH].tobytes().decode()
        yield "".join(f"{_odd(number, keys[at : at + WIDTH])}\n"
                      for number, at in enumerate(range(0, len(keys), WIDTH), first)).encode()  # fmt: skip


def _odd(number: int, uniq: str) -> str:
    if number % 500 == 0:
        return ("ключ-é-😀-" * (number // 500 % 8 + 1))[: number // 500 % 80] + str(number)
    return f"{number * 0x9E3779B97F4A7C15 % 10**18:018d}" if number % 2 else uniq


def write(path: Path, parts: Iterator[Any]) -> KeyFile:
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
    return KeyFile(path)


def sample(source: KeyFile, path: Path, count: int, seed: int) -> KeyFile:
    """Some keys of a file of random ones, in no order."""
    rows = np.memmap(source.path, np.uint8, "r").reshape(-1, WIDTH + 1)
    chosen = np.random.default_rng(seed).integers(0, len(rows), count)
    return write(path, iter([rows[chosen]]))
