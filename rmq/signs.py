# SPDX-License-Identifier: Apache-2.0
"""Which releases of RocketMQ leave such files: signs in small files, index headers and records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmq._core import _layout as L
from rmq._core._record import ends_with_crc
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored_at
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.errors import CorruptFileError
from rmq.index import Index
from rmq.logscan import CHECK_CRC
from rmq.message import StoredMessage
from rmq.paths import StorePaths

Release = tuple[int, int, int]
SAMPLE_ROWS = 256
BLANKS_ASKED = 16  # of the first segments
BLANK_SIZE = 64 * 1024  # of a segment's end: a blank record is shorter than the record that had no room
_BLANK_MAGIC = (L.BLANK_MAGIC & 0xFFFFFFFF).to_bytes(4, "big")
_FIRST: Release = (4, 0, 0)
_LAST: Release = (5, 99, 99)


@dataclass(frozen=True, kw_only=True)
class VersionSign:
    """A fact in the files that only releases from `first` to `last` leave there."""

    first: Release = _FIRST
    last: Release = _LAST
    fact: str


class Sample(NamedTuple):
    """What the signs need of a record: no body, of which some thousand queues may have large ones."""

    topic: str
    sys_flag: int
    store_timestamp: int
    properties_end: int | None

    @classmethod
    def of(cls, batch: RecordBatch, row: int) -> Sample:
        message = stored_at(batch, row, StoredMessage)
        raw = message.raw_properties
        return cls(message.topic, message.sys_flag, message.store_timestamp, raw[-1] if raw else None)


def generation(signs: list[VersionSign]) -> str:
    """The releases that fit all signs, in words. Signs that contradict each other tell of an upgrade."""
    first = max((sign.first for sign in signs), default=_FIRST)
    last = min((sign.last for sign in signs), default=_LAST)
    if first > last:
        return f"RocketMQ {_text(first)} or later, and before that {_text(last)} or earlier"
    if first == _FIRST and last == _LAST:
        return "RocketMQ 4.x or 5.x"
    if last == _LAST:
        return f"RocketMQ {_text(first)} or later"
    if first == _FIRST:
        return f"RocketMQ {_text(last)} or earlier"
    return f"RocketMQ {_text(first)} to {_text(last)}"


def _text(release: Release) -> str:
    return ".".join(str(number) for number in release)


def file_signs(paths: StorePaths) -> Iterator[VersionSign]:
    checkpoint = Checkpoint(paths.checkpoint)
    if checkpoint.logics_phy_offset:
        yield VersionSign(first=(5, 5, 0), fact="checkpoint has a logicsPhysicalOffset")
    elif checkpoint.confirm_phy_offset:
        yield VersionSign(first=(5, 1, 1), fact="checkpoint has a confirmPhyOffset")
    elif checkpoint.master_flushed_offset:
        yield VersionSign(first=(5, 0, 0), fact="checkpoint has a masterFlushedOffset")
    with contextlib.suppress(FileNotFoundError):  # one that closes takes it
        if paths.abort.is_file() and paths.abort.stat().st_size:
            yield VersionSign(first=(5, 0, 0), fact="abort names a process")
        elif paths.abort.is_file():
            yield VersionSign(last=(4, 9, 8), fact="abort names no process")
    for name, version in (("rocksdbstore", (5, 4, 0)), ("compaction", (5, 1, 0)), ("abort.bak", (5, 0, 0)),
                          ("timerwheel", (5, 0, 0)), ("batchconsumequeue", (5, 0, 0)),
                          ("lock", (4, 2, 0))):  # fmt: skip
        if (paths.root / name).exists():
            yield VersionSign(first=version, fact=f"{name} is there")


def index_signs(index: Index) -> Iterator[VersionSign]:
    if index.counts_every_put():
        yield VersionSign(last=(4, 7, 0), fact="index headers count every put as a slot")
    elif any(file.index_count > file.hash_slot_count + 1 for file in index.files):
        yield VersionSign(first=(4, 7, 1), fact="index headers count used slots")


def record_signs(samples: list[Sample]) -> Iterator[VersionSign]:
    flags = 0
    for sample in samples:
        flags |= sample.sys_flag
    if any(len(sample.topic.encode("utf-16-le")) // 2 > L.TOPIC_UNITS_V1_LIMIT for sample in samples):
        yield VersionSign(first=(5, 1, 0), fact="records of version 2")
    if flags & (L.SYS_FLAG_BORN_HOST_IPV6 | L.SYS_FLAG_STORE_HOST_IPV6):
        yield VersionSign(first=(4, 6, 0), fact="IPv6 hosts in records")
    if flags & L.SYS_FLAG_INNER_BATCH:  # how a body is packed is the producer's affair
        yield VersionSign(first=(5, 0, 0), fact="inner batches")
    ends = {sample.properties_end == L.PROPERTY_END for sample in samples if sample.properties_end is not None}
    if ends == {False}:  # of producers of 4.9.1 and later, too, whose text an older broker stores as it comes
        yield VersionSign(last=(5, 1, 4), fact="properties end without a separator")


def has_old_blanks(log: CommitLog) -> bool:
    """Whether RocketMQ <= 4.9.0 filled one of the log's first segments: the blank record at its end repeats the record
    before it, with its place, from a buffer that later releases leave alone. None of less than 36 bytes tells.
    """
    for segment in log.segments[: min(BLANKS_ASKED, len(log.segments) - 1)]:
        with contextlib.suppress(CorruptFileError, FileNotFoundError):  # cleaned away beside a reader
            tail = segment.read(max(0, log.segment_size - BLANK_SIZE), min(BLANK_SIZE, log.segment_size))
            at = len(tail)
            while (at := tail.rfind(_BLANK_MAGIC, 0, at)) >= L.RECORD_MAGIC_OFFSET:
                blank = tail[at - L.RECORD_MAGIC_OFFSET :]
                if int.from_bytes(blank[: L.RECORD_MAGIC_OFFSET], "big") == len(blank):
                    break
            else:
                continue
            before = int.from_bytes(blank[L.RECORD_PHY_OFFSET_OFFSET : L.RECORD_SYS_FLAG_OFFSET], "big") - segment.start
            size = min(len(blank), log.segment_size - len(blank) - before)
            if before >= 0 and size >= L.RECORD_SYS_FLAG_OFFSET:
                rest = segment.read(before, size)[L.BLANK_HEADER_SIZE :]
                if rest == blank[L.BLANK_HEADER_SIZE : size]:
                    return True
    return False


def has_record_crc(log: CommitLog, phy_offset: int) -> bool:
    """Whether the record at a phy offset ends with its own CRC, as with enabledAppendPropCRC."""
    for batch, _ in log.load(np.array([phy_offset], np.int64), log.max_phy_offset, checks=CHECK_CRC):
        return ends_with_crc(stored_at(batch, 0, StoredMessage).raw_properties)
    return False


def first_messages(log: CommitLog, log_end: int) -> list[Sample]:
    for batch in log.records(log.min_phy_offset, log_end, batch=RecordBatch(SAMPLE_ROWS)):
        return samples([batch])
    return []


def samples(batches: Iterable[RecordBatch]) -> list[Sample]:
    return [Sample.of(batch, row) for batch in batches for row in range(len(batch))]
