# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ opens a store whose log was put together from parts, answers as rmq does, and writes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import assert_agreement, questions
from rocketmq import RELEASES, RocketMQ

import rmq
from rmq.logpart import PartWriter, Queue, place_part

pytestmark = pytest.mark.interop
SEGMENT, TIME = 65536, 1_700_000_000_000


def message(number: int) -> rmq.Message:
    return rmq.Message(f"topic-{number % 2}", b"body %d " % number * (number % 40), queue_id=number % 3, tags="paid",
                       keys=[f"k-{number}", "shared"], born_timestamp=TIME, born_host="10.0.0.1:1000",
                       store_host="10.0.0.2:10911")  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_rocketmq_opens_a_log_of_parts(tmp_path: Path, release: str) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=1000,
                             max_hash_slot_num=97, max_index_num=500, rocketmq_version=release)  # fmt: skip
    path, following, begin = tmp_path / "s", dict[Queue, int](), 0
    (path / "commitlog").mkdir(parents=True)
    for number, numbers in enumerate((range(400), range(400, 401), range(401, 700))):
        source = tmp_path / str(number)
        source.mkdir()
        with PartWriter(source, config, TIME) as writer:
            writer.put_many(map(message, numbers))
            part = writer.finish()
        place_part(source, path / "commitlog", part, segment_size=SEGMENT, begin=begin, queue_offsets=following,
                   closed=number < 2)  # fmt: skip
        following |= {queue: following.get(queue, 0) + count for queue, count in part.queues.items()}
        begin += -(-part.end // SEGMENT) * SEGMENT
    rmq.open(path, "r+", config=config).close()
    assert rmq.verify(path) == []

    more = [message(number) for number in range(700, 720)]
    asked = questions(path, more)
    judge = RocketMQ(release, tmp_path / "rocketmq")
    try:
        visit = judge.open(path, config, asked, put=more)
    finally:
        judge.close()
    with rmq.open(path) as store:
        assert_agreement(store, asked, visit.answers)
        assert {topic: sum(end for _, end in ids.values()) for topic, ids in store.topics().items()} == \
            {"topic-0": 360, "topic-1": 360}  # fmt: skip
    assert rmq.verify(path) == []
