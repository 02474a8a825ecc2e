# SPDX-License-Identifier: Apache-2.0
"""Rows as JSON, made in C: byte for byte what the json module writes, and no byte read or written outside."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rmq._core._jsonrows import JsonRows
from rmq._core._textcolumn import TextColumn

PAGE = mmap.PAGESIZE
SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 200)
NOTHING = np.empty(0, np.uint8)


class Guarded:
    """Memory that ends where nobody may read or write."""

    def __init__(self, size: int) -> None:
        self._pages = -(-max(size, 1) // PAGE)
        self._map = mmap.mmap(-1, (self._pages + 1) * PAGE)
        self._protect(0)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, self._pages * PAGE)[
            self._pages * PAGE - size :
        ]

    def _protect(self, how: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self._pages * PAGE
        assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), PAGE, how) == 0


def column(texts: list[bytes | None], filler: bytes = b"") -> tuple[TextColumn, Guarded]:
    """Texts whose bytes end at such a place; `filler` stands where a null's bytes would."""
    parts = [filler if text is None else text for text in texts]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    memory = Guarded(int(offsets[-1]))
    memory.bytes[:] = np.frombuffer(b"".join(parts), np.uint8)
    missing = np.array([text is None for text in texts], np.uint8) if None in texts else NOTHING
    return TextColumn(offsets, memory.bytes, missing), memory


def written(heads: list[bytes], columns: list[list[bytes | None]], quoted: list[bool], tail: bytes = b"}",
            filler: bytes = b'"\\\x00') -> list[bytes]:  # fmt: skip
    made = [column(texts, filler) for texts in columns]
    rows = JsonRows(heads, [text for text, _ in made], quoted, tail)
    memory = Guarded(rows.room)
    offsets = np.empty(rows.count + 1, np.int64)
    end = rows.write(offsets, memory.bytes)
    assert offsets[-1] == end <= rows.room
    data = memory.bytes.tobytes()
    return [data[begin:stop] for begin, stop in pairwise(offsets.tolist())]


def expected(texts: list[bytes | None]) -> list[bytes]:
    return [json.dumps(None if text is None else text.decode(), ensure_ascii=False).encode() for text in texts]


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_of_ascii_at_every_place(size: int) -> None:
    texts: list[bytes | None] = [b"x" * size, None]
    for place in {0, size // 2, size - 1} - {-1}:
        texts += [b"x" * place + bytes([byte]) + b"y" * (size - place - 1) for byte in range(128)]
    texts += [bytes([byte]) * size for byte in (0, 0x1F, 0x20, ord('"'), ord("\\"), 0x7F)]
    assert written([b""], [texts], [True], b"") == expected(texts)


@pytest.mark.parametrize("seed", range(20))
def test_random_text_is_what_the_json_module_writes(seed: int) -> None:
    rng = random.Random(seed)
    letters = ["a", "é", "😀", '"', "\\", "\n", "\x00", "\x1f", "\u2028", "\x7f", "z" * 17]
    count = rng.choice((0, 1, 2, 200))

    def some() -> list[bytes | None]:
        return [None if rng.random() < 0.1 else "".join(rng.choices(letters, k=rng.choice((0, 1, 7, 40)))).encode()
                for _ in range(count)]  # fmt: skip

    first, second, third = some(), some(), [b"%d" % rng.randrange(-999, 999) for _ in range(count)]
    got = written([b'{"a":', b',"' + b"b" * 40 + b'":', b',"c":'], [first, second, list(third)], [True, True, False])
    wanted = [b'{"a":%s,"%s":%s,"c":%s}' % (a, b"b" * 40, b, c)
              for a, b, c in zip(expected(first), expected(second), third, strict=True)]  # fmt: skip
    assert got == wanted
    assert all(json.loads(row) for row in got)


def test_a_slice_of_a_column_is_its_own_rows() -> None:
    data = np.frombuffer(b'one"two\\three', np.uint8)
    rows = JsonRows([b"{"], [TextColumn(np.array([3, 4, 8], np.int64), data, NOTHING)], [True], b"}")
    into, offsets = np.empty(rows.room, np.uint8), np.empty(3, np.int64)
    assert into[: rows.write(offsets, into)].tobytes() == rb'{"\""}{"two\\"}'


def test_what_does_not_fit_is_refused() -> None:
    one, _ = column([b"a"])
    two, _ = column([b"a", b"b"])
    wrong: list[tuple[Any, Any, Any]] = [([], [], []), ([b""], [], []), ([b""], [one], []), ([b"", b""], [one], [True]),
                                         ([b"", b""], [one, two], [True, True])]  # fmt: skip
    for heads, columns, quoted in wrong:
        with pytest.raises(ValueError, match="columns"):
            JsonRows(heads, columns, quoted, b"")
    for heads, columns in (([None], [one]), ([""], [one]), ([b""], [None]), ([b""], [b"a"])):
        with pytest.raises(TypeError):
            JsonRows(heads, columns, [True], b"")  # type: ignore[arg-type, list-item]
    rows = JsonRows([b""], [two], [True], b"")
    for offsets, room in ((2, rows.room), (3, rows.room - 1), (3, 0)):
        with pytest.raises(ValueError, match="need 3 offsets"):
            rows.write(np.empty(offsets, np.int64), np.empty(room, np.uint8))
