# SPDX-License-Identifier: Apache-2.0
"""Consumer offsets: RocketMQ's own JSON classes read what rmq committed, and rmq reads what they write."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocketmq import RELEASES, RocketMQ
from test_groups import CONFIG, filled

import rmq

pytestmark = pytest.mark.interop
NAMES = ("g", "GID-\u00fc\U0001f680", 'quote"d', "%RETRY%g", "{0:1}")


@pytest.mark.parametrize("release", RELEASES)
def test_a_broker_goes_on_from_what_was_committed_and_the_other_way_round(tmp_path: Path, release: str) -> None:
    path = filled(tmp_path / "s", 90, 3, rocketmq_version=release)
    with rmq.open(path, "r+") as store:
        for number, group in enumerate(NAMES):
            store.commit_offsets(group, "Orders", {queue_id: 7 * number + queue_id for queue_id in range(3)})
        committed = store.groups()
    file = path / "config" / "consumerOffset.json"
    judge = RocketMQ(release, tmp_path / "rocketmq")
    try:
        asked = {"pulls": [], "keys": [], "times": [], "offsets": str(file)}
        answers = judge.open(path, CONFIG, asked).answers
    finally:
        judge.close()
    assert sorted(answers["offsets"]) == sorted(
        [f"{topic}@{group}", queue_id, place]
        for group, topics in committed.items() for topic, queues in topics.items()
        for queue_id, place in queues.items())  # fmt: skip
    assert "{0:0,1:1,2:2" in file.read_text(), "written by RocketMQ"
    with rmq.open(path) as store:
        assert store.groups() == committed
