"""Bytes that may hold no record: why a scan stops, where it goes on, and damage judged like the oracle.

H.1 is RocketMQ's own check (CommitLog#checkMessageAndReturnSize), which `oracle.decode_record` follows. The library is
stricter in three rules: a record must state its own physical offset, a blank must end where its segment ends, and no
record may need bytes behind the segment. It is laxer in two: a one-byte topic length of 128 to 255 is read unsigned,
and a DELAY that is no number does not make the record unreadable. Each has its own test below.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import oracle
import pytest

from rmq._core import _record
from rmq._core._consumequeue import pack_units
from rmq._core._javahash import decode_text
from rmq._core._queuetable import QueueTable
from rmq._core._record import (
    CHECK_BODY_CRC,
    CHECK_RECORD_CRC,
    CHECK_SECTORS,
    LEGACY_PROPERTIES,
    PARSE_PROPERTIES,
    parse_properties,
    resync,
    used_size,
)
from rmq._core._recordbatch import RecordBatch

SEEDS = 2500
BASE = 4096  # phy offset of the segment in most tests
ALL_CHECKS = CHECK_BODY_CRC | CHECK_RECORD_CRC | CHECK_SECTORS | PARSE_PROPERTIES
BLANK = struct.Struct(">iI")


def segment_of(bodies: list[bytes], *, phy: int = BASE, blank: int = 0, **fields: Any) -> bytes:
    """Records of one queue of topic T one behind the other, then a blank of that many bytes."""
    data = b""
    for number, body in enumerate(bodies):
        data += oracle.encode_record("T", 0, number, phy + len(data), body, **fields)
    return data + (BLANK.pack(blank, 0xCBD43194).ljust(blank, b"\0") if blank else b"")


def scan(data: bytes, checks: int = CHECK_BODY_CRC, *, phy: int = BASE, capacity: int = 100, **options: Any) -> RecordBatch:
    batch = RecordBatch(capacity)
    end = options.pop("end", phy + len(data))
    assert batch.scan(data, phy, phy, end, checks=checks, **options) == batch.stop
    return batch


def stop_of(data: bytes, checks: int = CHECK_BODY_CRC, **options: Any) -> str:
    names = {getattr(_record, name): name for name in dir(_record) if name.startswith("SCAN_") and name.isupper()}
    del names[_record.SCAN_REASONS] if _record.SCAN_REASONS in names else names[None]
    return names[scan(data, checks, **options).stop]
