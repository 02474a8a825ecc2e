# SPDX-License-Identifier: Apache-2.0
"""Where a scan finds KEYS, UNIQ_KEY, TAGS and DELAY among the properties, beside the oracle's reading."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import numpy as np
import oracle
import pytest

from rmq._core._consumequeue import pack_units, unpack_units
from rmq._core._queuetable import QueueTable
from rmq._core._record import LEGACY_PROPERTIES, PARSE_PROPERTIES, SCAN_LIMIT
from rmq._core._recordbatch import RecordBatch
from rmq.scan import BatchMaker

STORED = 1_700_000_000_000
LEVELS = np.array([seconds * 1000 for seconds in oracle.DELAY_SECONDS], np.int64)
NAMES = [b"KEYS", b"UNIQ_KEY", b"TAGS", b"DELAY", b"KEY", b"KEYS2", b"TAG", b"UNIQ_KEYS", b"DELAY1", b"X", b""]
VALUES = [b"", b"1", b"2", b"+3", b"k", b"k1 k2", b"\xc3\xa9t\xc3\xa9", b"\xff", b"a\1b", b"\1"]


def edges() -> Iterator[bytes]:
    """Lengths around the 64 bytes that are looked at together; items that end there, that have no end, no value."""
    yield from (b"", b"\1", b"\2", b"\1\2", b"\2\2\1\1", b"KEYS\0011\2KEYS\1\2", b"KEYS\0011\2KEYS\0012")
    for name in (b"KEYS", b"UNIQ_KEY", b"TAGS", b"DELAY"):
        yield from ((name + b"\0011")[:size] for size in range(len(name) + 3))
        for size in (*range(14, 19), *range(30, 35), *range(62, 67), *range(126, 131), *range(190, 194)):
            item = name + b"\1" + b"1" * (size - len(name) - 2)
            yield from (item + b"\2", item + b"1", item + b"\2" + item + b"\2TAGS\1t")
            yield b"X\1" + b"x" * (size - 3) + b"\2" + name + b"\0012\2"
            yield b"\2" * size + name + b"\0012\2"


def random_strings(count: int) -> Iterator[bytes]:
    rng = random.Random(3)
    for _ in range(count):
        items = [rng.choice(NAMES) + rng.choice([b"\1", b"\1", b"\1", b""]) + rng.choice(VALUES) * rng.choice([1, 1, 9])
                 for _ in range(rng.randrange(9))]  # fmt: skip
        yield b"\2".join(items) + rng.choice([b"", b"\2", b"\2\2"])


@pytest.mark.parametrize("legacy", [False, True])
def test_keys_tags_uniq_key_and_delay_are_found_as_the_oracle_finds_them(legacy: bool) -> None:
    maker, batch, page = BatchMaker(["keys", "tags", "uniq_key"]), RecordBatch(), mmap.mmap(-1, mmap.PAGESIZE)
    checks = PARSE_PROPERTIES | (LEGACY_PROPERTIES if legacy else 0)
    for raw in [*edges(), *random_strings(2000)]:
        data = oracle.encode_record(oracle.SCHEDULE_TOPIC, 0, 0, 0, b"", raw, store_timestamp=STORED)
        page[-len(data) :] = data  # nothing may be read behind it
        with memoryview(page)[-len(data) :] as view:
            assert batch.scan(view, 0, 0, len(data), checks=checks, queues=QueueTable()) == SCAN_LIMIT
            maker.append(batch)
            units, _ = pack_units(batch, LEVELS)
            batch.release()
        found = oracle.parse_properties(raw, legacy)
        assert next(maker.finish(1)).to_pylist() == [{
            "keys": [key for key in found.get("KEYS", "").split(" ") if key],
            "tags": found.get("TAGS"), "uniq_key": found.get("UNIQ_KEY")}], raw  # fmt: skip
        assert unpack_units(units)[2].tolist() == [tags_code(found)], raw


def tags_code(properties: dict[str, str]) -> int:
    delay = properties.get("DELAY", "")
    number = delay.removeprefix("+")
    if number.isascii() and number.isdigit() and len(number) <= 10 and 0 < int(number) < 2**31:
        return STORED + int(LEVELS[min(int(number), len(LEVELS)) - 1])
    return oracle.java_hash(properties.get("TAGS", ""))
