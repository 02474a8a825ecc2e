# SPDX-License-Identifier: Apache-2.0
"""What a store is, from its files: who wrote it, how it was left, what its queues and index cover."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rmq._core import _layout as L
from rmq._core._recordbatch import RecordBatch
from rmq.checkpoint import Checkpoint
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import ConsumeQueue
from rmq.index import Index
from rmq.message import StoredMessage
from rmq.paths import StorePaths
from rmq.queueset import QueueSet

Version = tuple[int, int, int]
SAMPLE_ROWS = 256
_FIRST: Version = (4, 0, 0)
_LAST: Version = (5, 99, 99)


@dataclass(frozen=True, kw_only=True)
class VersionSign:
    """A fact in the files that only releases from `first` to `last` leave there."""

    first: Version = _FIRST
    last: Version = _LAST
    fact: str


class Sample(NamedTuple):
    """What the signs need of a record: no body, of which some thousand queues may have large ones."""

    topic: str
    sys_flag: int
    store_timestamp: int
    properties_end: int | None

    @classmethod
    def of(cls, batch: RecordBatch, row: int) -> Sample:
        message = StoredMessage(batch.fields(row))
        raw = message.raw_properties
        return cls(message.topic, message.sys_flag, message.store_timestamp, raw[-1] if raw else None)


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """One look at a store. Offsets and sizes in bytes, timestamps in ms since 1970 (None: no messages).

    written_by: "rmq", "RocketMQ" or "RocketMQ and rmq". generation: the releases of RocketMQ that leave such files;
    signs: the facts behind it. state: "closed", "open" (a writer holds it) or "not closed" (a writer was killed, or
    this is a copy of an open store). units_behind: messages that the queues' files miss, derived in memory here.
    unindexed: ranges [begin, end) of the log that no index file covers; queries scan them. cut_files: what recovery
    kept. others: parts of a broker's store that are not read here.
    """

    path: str
    written_by: str
    generation: str
    signs: tuple[str, ...]
    state: str
    config: StoreConfig
    min_phy_offset: int
    max_phy_offset: int
    segment_count: int
    begin_timestamp: int | None
    end_timestamp: int | None
    topic_count: int
    queue_count: int
    message_count: int
    units_behind: int
    index_file_count: int
    index_entry_count: int
    unindexed: tuple[tuple[int, int], ...]
    cut_files: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def unindexed_size(self) -> int:
        """Bytes of the log that no index file covers."""
        return sum(end - begin for begin, end in self.unindexed)


def describe(path: str, paths: StorePaths, log: CommitLog, queues: QueueSet, index: Index, config: StoreConfig, *,
             log_end: int, uncovered: list[tuple[int, int]], meta: dict[str, Any] | None, foreign: list[str],
             is_open: bool) -> StoreInfo:  # fmt: skip
    """StoreInfo of opened parts whose queues are level with the log. Cost: a few records for each queue."""
    # Asked once: another thread's put may make queues at any time.
    used = {key: queue for key, queue in list(queues.queues.items()) if queue.max_offset}
    head, tails = _first_messages(log, log_end), _last_messages(log, used.values(), log_end)
    signs = [*_file_signs(paths), *_index_signs(index), *_record_signs([*head, *tails])]
    if paths.checkpoint.is_file() and not paths.abort_bak.exists() and not paths.abort.exists() \
            and all(sign.first < (5, 0, 0) for sign in signs):  # a copy may leave it out  # fmt: skip
        signs.append(VersionSign(last=(4, 9, 8), fact="abort.bak is not there"))
    own = meta is not None
    writer = {None: "RocketMQ", "rmq": "rmq"}.get(meta.get("origin") if meta else None, "RocketMQ and rmq")
    return StoreInfo(
        path=path,
        written_by=writer,
        generation=f"as RocketMQ {config.rocketmq_version}" if own else generation(signs),
        signs=tuple(sign.fact for sign in signs),
        state="open" if is_open else "not closed" if paths.abort.exists() else "closed",
        config=config,
        min_phy_offset=log.min_phy_offset,
        max_phy_offset=log_end,
        segment_count=len(log.segments),
        begin_timestamp=head[0].store_timestamp if head else None,
        end_timestamp=max((sample.store_timestamp for sample in tails), default=None),
        topic_count=len({topic for topic, _ in used}),
        queue_count=len(used),
        message_count=sum(queue.max_offset - queue.min_offset for queue in used.values()),
        units_behind=sum(queue.tail_size for queue in used.values()) // L.UNIT_SIZE,
        index_file_count=len(index.files),
        index_entry_count=sum(max(0, file.index_count - 1) for file in index.files),
        unindexed=tuple(uncovered),
        cut_files=tuple(sorted(path.name for path in paths.cut.glob("*.bin"))),
        others=(*foreign, *(name for name in _OTHERS if (paths.root / name).exists())),
    )


_OTHERS = ("timerwheel", "timerlog", "compaction/compactionLog", "consumequeue_ext", "batchconsumequeue",
           "epochFileCheckpoint")  # fmt: skip


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


def _text(version: Version) -> str:
    return ".".join(str(number) for number in version)


def _file_signs(paths: StorePaths) -> Iterator[VersionSign]:
    checkpoint = Checkpoint(paths.checkpoint)
    if checkpoint.confirm_phy_offset:
        yield VersionSign(first=(5, 1, 1), fact="checkpoint has a confirmPhyOffset")
    elif checkpoint.master_flushed_offset:
        yield VersionSign(first=(5, 0, 0), fact="checkpoint has a masterFlushedOffset")
    if paths.abort.is_file():
        if paths.abort.stat().st_size:
            yield VersionSign(first=(5, 0, 0), fact="abort names a process")
        else:
            yield VersionSign(last=(4, 9, 8), fact="abort names no process")
    for name, version in (("compaction", (5, 1, 0)), ("abort.bak", (5, 0, 0)), ("timerwheel", (5, 0, 0)),
                          ("batchconsumequeue", (5, 0, 0)), ("lock", (4, 2, 0))):  # fmt: skip
        if (paths.root / name).exists():
            yield VersionSign(first=version, fact=f"{name} is there")


def _index_signs(index: Index) -> Iterator[VersionSign]:
    if index.counts_every_put():
        yield VersionSign(last=(4, 7, 0), fact="index headers count every put as a slot")
    elif any(file.hash_slot_count + 1 < file.index_count for file in index.files):
        yield VersionSign(first=(4, 7, 1), fact="index headers count used slots")


def _record_signs(samples: list[Sample]) -> Iterator[VersionSign]:
    flags = 0
    for sample in samples:
        flags |= sample.sys_flag
    if any(len(sample.topic.encode("utf-16-le")) // 2 > L.TOPIC_UNITS_V1_LIMIT for sample in samples):
        yield VersionSign(first=(5, 1, 0), fact="records of version 2")
    if flags & (L.SYS_FLAG_BORN_HOST_IPV6 | L.SYS_FLAG_STORE_HOST_IPV6):
        yield VersionSign(first=(4, 6, 0), fact="IPv6 hosts in records")
    if flags & (L.SYS_FLAG_COMPRESSION_MASK | L.SYS_FLAG_INNER_BATCH):
        yield VersionSign(first=(5, 0, 0), fact="bodies in LZ4 or zstd, or inner batches")
    ends = {sample.properties_end == L.PROPERTY_END for sample in samples if sample.properties_end is not None}
    if ends == {False}:
        yield VersionSign(first=(4, 9, 1), last=(5, 1, 4), fact="properties end without a separator")


def _first_messages(log: CommitLog, log_end: int) -> list[Sample]:
    for batch in log.records(log.min_phy_offset, log_end, batch=RecordBatch(SAMPLE_ROWS)):
        return _samples([batch])
    return []


def _samples(batches: Iterable[RecordBatch]) -> list[Sample]:
    return [Sample.of(batch, row) for batch in batches for row in range(len(batch))]


def _last_messages(log: CommitLog, queues: Collection[ConsumeQueue], log_end: int) -> list[Sample]:
    """The last message of each queue; of a log whose messages are in none, its last."""
    if log.segments and not queues:
        last: list[Sample] = []
        for batch in log.records(max(log.min_phy_offset, log_end - 1 - (log_end - 1) % log.segment_size), log_end):
            last = [Sample.of(batch, len(batch) - 1)]
        return last
    places = [queue.read(queue.max_offset - 1, 1)[0] for queue in queues]
    offsets = np.unique(np.concatenate([np.empty(0, np.int64), *places]))
    return _samples(batch for batch, _ in log.load(offsets, log_end))
