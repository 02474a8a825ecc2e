# SPDX-License-Identifier: Apache-2.0
"""Items of property strings as the scanner finds them, 64 bytes at a time, beside the oracle's parser."""

from __future__ import annotations

import ctypes
import mmap
import random
from itertools import pairwise, product

import oracle
import pytest

from rmq._core._columns import ColumnBuilder
from rmq._core._record import PARSE_PROPERTIES, SCAN_FULL, SCAN_LIMIT
from rmq._core._recordbatch import RecordBatch

EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 4095, 4096)
PIECES = (b"KEYS", b"TAGS", b"UNIQ_KEY", b"DELAY", b"\1", b"\2", b"a", b" ", b"\xff", b"KEY", b"x" * 60, b"KEYS\1k\2",
          b"TAGS\1t\2", b"UNIQ_KEY\1u\2", b"\0")  # fmt: skip


def found_in(data: bytes | memoryview, begin: int = 0) -> tuple[list[str], str | None, str | None]:
    """keys, tags and uniq_key of the one record at `begin`."""
    batch = RecordBatch(1)
    assert batch.scan(data, 0, begin, len(data), checks=PARSE_PROPERTIES) in (SCAN_FULL, SCAN_LIMIT)
    assert len(batch) == 1
    builder = ColumnBuilder(["keys", "tags", "uniq_key"])
    builder.append(batch)
    _, columns = builder.finish()
    items = [bytes(buffer) for buffer in columns["keys"]]
    ends = memoryview(items[1]).cast("i").tolist()
    keys = [items[2][first:last].decode() for first, last in pairwise(ends)]
    one, other = ((bytes(text).decode() if bytes(valid)[0] else None) for valid, _, text in
                  (columns["tags"], columns["uniq_key"]))  # fmt: skip
    return keys, one, other


def wanted_of(raw: bytes) -> tuple[list[str], str | None, str | None]:
    properties = oracle.parse_properties(raw)
    keys = [key for key in properties.get("KEYS", "").split(" ") if key]
    return keys, properties.get("TAGS"), properties.get("UNIQ_KEY")


def check(raw: bytes, begin: int = 0) -> None:
    record = oracle.encode_record("T", 0, 0, begin, b"", raw)
    assert found_in(bytes(begin) + record, begin) == wanted_of(raw), raw


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("tail", [b"", b"\2", b"\1", b"\2\2", b"TAGS\1t", b"TAGS\1t\2", b"\2TAGS\1t\2KEYS\1k j\2",
                                  b"KEYS"])  # fmt: skip
def test_values_of_every_length(size: int, tail: bytes) -> None:
    for head in (b"", b"KEYS\1", b"UNIQ_KEY\1", b"KEYS\1k\2UNIQ_KEY\1", b"\2", b"\1", b"A\1b\2TAGS\1"):
        check(head + b"v" * size + tail)


def test_separators_at_every_place_around_a_block() -> None:
    for first, second, third in product(range(55, 70), (0, 1, 2, 5, 60, 64), (0, 1, 3)):
        check(b"p\1" + b"v" * first + b"\2TAGS\1" + b"t" * second + b"\2" + b"KEYS" + b"\1" * third + b"k\2")


@pytest.mark.parametrize("seed", range(20))
def test_random_pieces(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(200):
        check(b"".join(source.choices(PIECES, k=source.randrange(24))), source.randrange(64))


def test_a_string_that_ends_with_the_last_page_is_not_read_past() -> None:
    """The page behind it may not be touched."""
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 3 * page)
    view = memoryview(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + 2 * page, page, 0) == 0
    try:
        for size in EDGES[:-2]:
            raw = b"TAGS\1t\2KEYS\1" + b"k" * size
            record = oracle.encode_record("T", 0, 0, 0, b"", raw)
            begin = 2 * page - len(record)
            view[begin : 2 * page] = oracle.encode_record("T", 0, 0, begin, b"", raw)
            assert found_in(view[: 2 * page], begin) == wanted_of(raw)
    finally:
        protect(start + 2 * page, page, mmap.PROT_READ | mmap.PROT_WRITE)
        view.release()
