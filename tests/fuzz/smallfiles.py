"""Small files of a store, on what a fuzzer makes of them: seeds, and what reads them."""

from __future__ import annotations

import struct
import zlib
from random import Random

from engine import Fault

import rmq
from rmq._core import _layout as L
from rmq.consumeroffsets import ConsumerOffsets, read_offsets
from rmq.fastjson import parse_fastjson
from rmq.geometry import settle_config
from rmq.marks import Marks, read_meta
from rmq.paths import StorePaths
from rmq.topics import merge_topics


def read_marks(paths: StorePaths) -> None:
    marks = Marks(paths.marks, writable=False)
    mark = marks.read()
    if mark is not None and not 0 <= mark.derived_phy_offset <= mark.durable_phy_offset:
        raise Fault("marks that contradict themselves")
    _ = marks.visible_phy_offset
    marks.close()


def mark_seeds() -> list[bytes]:
    cell = struct.pack(">6q40s", 3, 4096, 4096, 4000, 20260101000000000, 4000, bytes(40))
    cell += struct.pack(">I", zlib.crc32(cell))
    return [(cell.ljust(512, b"\0") * 2 + struct.pack(">q", 4096)).ljust(L.MARKS_SIZE, b"\0"), b"", bytes(4096)]


def mend_marks(data: bytearray, random: Random) -> None:
    data[:] = data[: L.MARKS_SIZE].ljust(L.MARKS_SIZE, b"\0")
    for at in (0, 512):
        data[at + 88 : at + 92] = struct.pack(">I", zlib.crc32(data[at : at + 88]))


def use_meta(paths: StorePaths) -> None:
    meta = read_meta(paths)
    settle_config(paths, rmq.StoreConfig(), meta)


META = {"format": 1, "origin": "rmq", "mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200,
        "max_hash_slot_num": 10, "max_index_num": 30, "rocketmq_version": "5.3.3",
        "enabled_append_prop_crc": False}  # fmt: skip
MANIFEST = {"min_phy_offset": 0, "index": ["20260101000000000"], "queues": [["T", 0, 0, 20], ["U", 1, 0, 3]]}
TOPICS = b'{"dataVersion":{"counter":1},"topicConfigTable":{"T":{"readQueueNums":1,"writeQueueNums":1,1:"x"}}}'
OFFSETS = b'{"dataVersion":{"counter":1},"offsetTable":{"T@g":{0:5,1:-7},"R@g":{2:0}},"lmqOffsetTable":{"L@h":4}}'
CONF = b"# a\r\nbrokerName=a\nmaxMessageSize = 4194304\nflushDiskType:SYNC_FLUSH\\\n\nmappedFileSizeCommitLog 4096\n"


def merge(paths: StorePaths) -> None:
    """Whatever stands in topics.json, afterwards it serves the topic or is what it was."""
    before = paths.topics_json.read_bytes()
    merge_topics(paths.topics_json, {"Fresh": 3})
    after = paths.topics_json.read_bytes()
    if after != before and parse_fastjson(after.decode())["topicConfigTable"]["Fresh"]["readQueueNums"] < 3:
        raise Fault("topics.json was written and does not serve the topic")


def offsets(paths: StorePaths) -> None:
    """What was committed is read back among what was there; what is no table of offsets stays."""
    kept = ConsumerOffsets(paths)
    before = kept.groups()
    kept.commit("Fresh", "T", lambda: {3: 5})
    kept.write(kept.taken())
    before.setdefault("Fresh", {}).setdefault("T", {})[3] = 5
    if read_offsets(paths) != before:
        raise Fault("consumerOffset.json was written and lost something")
