# SPDX-License-Identifier: Apache-2.0
"""What a store is, from its files: who wrote it, how it was left, what its queues and index cover."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmq.batchconsumequeue import BatchConsumeQueue
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.consumequeue import ConsumeQueue
from rmq.index import Index
from rmq.marks import is_ours
from rmq.paths import StorePaths
from rmq.queueset import QueueSet
from rmq.signs import Sample, VersionSign, file_signs, first_messages, generation, index_signs, record_signs, samples


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """One look at a store. Offsets and sizes in bytes, timestamps in ms since 1970 (None: no messages).

    written_by: "rmq", "RocketMQ" or "RocketMQ and rmq". generation: the releases of RocketMQ that leave such files, and
    as which one they are written here; signs: the facts behind it. state: "closed", "open" (a writer holds it) or "not
    closed" (a writer was killed, or this is a copy of an open store). units_behind: messages that the queues' files
    miss, derived in memory here. unindexed: ranges [begin, end) of the log that no index file covers; queries scan
    them; unindexed_size: their bytes. cut_files: what recovery kept. others: parts of a broker's store that are not
    read here.
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


def describe(path: str, paths: StorePaths, log: CommitLog, queues: QueueSet | None, index: Index,
             config: StoreConfig, *, batched: list[BatchConsumeQueue], log_end: int, uncovered: list[tuple[int, int]],
             meta: dict[str, Any] | None, foreign: list[str], is_open: bool) -> StoreInfo:  # fmt: skip
    """StoreInfo of opened parts whose queues (None: they are not read) are level with the log. Cost: a few records for
    each queue.
    """
    # Asked once: another thread's put may make queues at any time.
    used: dict[tuple[str, int], ConsumeQueue | BatchConsumeQueue] = {
        key: queue for key, queue in (list(queues.queues.items()) if queues is not None else ())
        if queue.max_offset}  # fmt: skip
    used |= {(queue.topic, queue.queue_id): queue for queue in batched if queue.max_offset}
    head, tails = first_messages(log, log_end), _last_messages(log, used.values(), log_end)
    signs = [*file_signs(paths), *index_signs(index), *record_signs([*head, *tails])]
    if paths.checkpoint.is_file() and not paths.abort_bak.exists() and not paths.abort.exists() \
            and all(sign.first < (5, 0, 0) for sign in signs):  # a copy may leave it out  # fmt: skip
        signs.append(VersionSign(last=(4, 9, 8), fact="abort.bak is not there"))
    own = is_ours(meta)
    going_on = f", written here as {config.rocketmq_version}" if meta is not None else ""
    writer = {None: "RocketMQ", "rmq": "rmq"}.get(str(meta.get("origin")) if meta else None, "RocketMQ and rmq")
    return StoreInfo(
        path=path,
        written_by=writer,
        generation=f"as RocketMQ {config.rocketmq_version}" if own else generation(signs) + going_on,
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
        units_behind=sum(queue.behind for queue in used.values()),
        index_file_count=len(index.files),
        index_entry_count=sum(max(0, file.index_count - 1) for file in index.files),
        unindexed=tuple(uncovered),
        cut_files=tuple(sorted(path.name for path in paths.cut.glob("*.bin"))),
        others=(*foreign, *(name for name in _OTHERS if (paths.root / name).exists())),
    )


_OTHERS = ("timerwheel", "timerlog", "compaction/compactionLog", "consumequeue_ext", "rocksdbstore", "kvStore")


def _last_messages(log: CommitLog, queues: Collection[ConsumeQueue | BatchConsumeQueue],
                   log_end: int) -> list[Sample]:  # fmt: skip
    """The last message of each queue; of a log whose messages are in none, its last."""
    if log.segments and not queues:
        last: list[Sample] = []
        for batch in log.records(max(log.min_phy_offset, log_end - 1 - (log_end - 1) % log.segment_size), log_end):
            last = [Sample.of(batch, len(batch) - 1)]
        return last
    offsets = np.unique(np.array([queue.phy_offset_below(queue.max_offset) for queue in queues], np.int64))
    return samples(batch for batch, _ in log.load(offsets, log_end))
