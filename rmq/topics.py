# SPDX-License-Identifier: Apache-2.0
"""config/topics.json: what a broker must know to serve a topic. Merged with what stands there, never less.

Source: RocketMQ TopicConfigManager.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from rmq._core._queuetable import QueueTable
from rmq.errors import CorruptFileError
from rmq.fastjson import CONFIG_LIMIT, count_on, document_bytes, read_document, with_backup, write_document

logger = logging.getLogger("rmq")

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"  # of delayed messages: their units hold times of delivery, not hashes of tags
SYSTEM_PREFIX = "rmq_sys_"
_SYSTEM_TOPICS = frozenset({
    "TBW102", SCHEDULE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT",
    "CHECKPOINT_TOPIC",
})  # fmt: skip
_TABLE = "topicConfigTable"
_READ_WRITE = 6
_UNWRITTEN = {"queue.type": ("BatchCQ", "with queues of inner batches (BatchCQ)"),
              "cleanup.policy": ("COMPACTION", "that is compacted")}  # fmt: skip
_MOST_QUEUES = 2**31 - 1  # a Java int


def is_system_topic(topic: str) -> bool:
    """Topics that a broker sets up itself. Source: TopicValidator#isSystemTopic."""
    return topic.startswith(SYSTEM_PREFIX) or topic in _SYSTEM_TOPICS


def batch_topics(path: Path) -> frozenset[str]:
    """Topics of inner batches, by a topics.json; none where it cannot be read. Source: QueueTypeUtils#isBatchCq."""
    return frozenset(topic for topic, entry in _entries(path).items() if _attribute(entry, "queue.type") == "BatchCQ")


def unwritten_topic(path: Path) -> str | None:
    """What a topics.json has of topics whose messages a broker keeps in more than is written here, None: nothing. It
    would not load such a queue, or never see what is put. Source: ConsumeQueueStore#queueTypeShouldBe, CompactionStore.
    """
    for topic, entry in _entries(path).items():
        for name, (value, what) in _UNWRITTEN.items():
            if _attribute(entry, name) == value:
                return f"topic {topic!r} {what}"
    return None


def _entries(path: Path) -> dict[str, Any]:
    """As a broker loads them: of the .bak where the file is none."""
    for file in with_backup(path):
        with contextlib.suppress(CorruptFileError, ValueError, RecursionError):
            table: dict[str, Any] = read_document(file, _TABLE)[_TABLE]
            return table
    return {}  # it begins without any


def _attribute(entry: Any, name: str) -> Any:
    attributes = entry.get("attributes") if isinstance(entry, dict) else None
    return attributes.get(name) if isinstance(attributes, dict) else None


def topics_from(table: QueueTable, first: int) -> dict[str, int]:
    """Queues per topic, of topics with a queue from number `first` of a table on."""
    found: dict[str, int] = {}
    for number in range(first, len(table)):
        name, queue_id = table.queue(number)
        topic = name.decode(errors="replace")
        found[topic] = max(found.get(topic, 0), queue_id + 1)
    return found


def merge_topics(path: Path, queues: dict[str, int]) -> None:
    """Make sure that each topic stands in topics.json with at least that many queues; everything else stays.

    Where a broker died while it wrote the file there is its .bak alone, which it would read. A file that is no JSON is
    left alone, with a warning: a broker would fall back to its .bak.
    """
    wanted = {topic: min(count, _MOST_QUEUES) for topic, count in queues.items() if not is_system_topic(topic)}
    if not wanted:
        return
    files = with_backup(path)
    try:
        document = read_document(files[0], _TABLE) if files else {_TABLE: {}}
    except (CorruptFileError, ValueError, RecursionError) as error:
        _warn(path, error)
        return
    table, changed = document[_TABLE], False
    for topic, count in wanted.items():
        entry = table.get(topic)
        if not isinstance(entry, dict):
            entry = table[topic] = {
                "attributes": {}, "order": False, "perm": _READ_WRITE, "readQueueNums": 0,
                "topicFilterType": "SINGLE_TAG", "topicName": topic, "topicSysFlag": 0, "writeQueueNums": 0,
            }  # fmt: skip
        for name in ("readQueueNums", "writeQueueNums"):
            if not isinstance(entry.get(name), int) or entry[name] < count:
                entry[name] = count
                changed = True
    if not changed:
        return
    count_on(document)
    try:
        if len(document_bytes(document)) > CONFIG_LIMIT:
            raise ValueError(f"would have more than {CONFIG_LIMIT} bytes")
        write_document(path, document)
    except (ValueError, RecursionError) as error:
        _warn(path, error)


def _warn(path: Path, error: Exception) -> None:
    logger.warning("%s: not understood and left alone (%s); a broker may not serve new topics", path, error)
