"""Apache RocketMQ opens a store that rmq has cleaned, with the same bounds and answers, and cleans it itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import assert_agreement, questions
from cleaning import HOUR, ROOMY, date
from rocketmq import RocketMQ
from test_interop import (
    CONFIGS,
    Known,
    SteppingClock,
    assert_found,
    contents,
    items,
    known_of_visit,
    messages_of,
    put,
)

import rmq

pytestmark = pytest.mark.interop

CONFIG = CONFIGS["5.3.3-small"]
NOW = 2_000_000_000_000
SEGMENT = CONFIG.mapped_file_size_commit_log
AGAIN = rmq.Message("early", b"again", born_timestamp=1, born_host="10.1.2.3:55", store_host="127.0.0.1:10911")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ]:
    started = RocketMQ("5.3.3", tmp_path_factory.mktemp("rocketmq"))
    yield started
    started.close()


def make_cleaned(path: Path, low: int, **options: Any) -> list[Known]:
    """A closed store of which everything below `low` is gone; what is left."""
    with rmq.open(path, "x", config=CONFIG, clock=SteppingClock(4)) as store:
        known = put(store, [rmq.Message("early", b"%d" % i, keys="shared", queue_id=i % 2) for i in range(9)])
        known += put(store, items(900, "ours", "5.3.3"))
    date(path, *[HOUR] * (low // SEGMENT), now=NOW)
    with rmq.open(path, "r+") as store:
        result = store.clean(NOW, file_reserved_time=1, limit=None, disk_usage=ROOMY, **options)
    assert result.min_phy_offset == low
    folders = {Path(file.path).relative_to(path).parts[0] for file in result.removed}
    assert folders == {"commitlog", "consumequeue", "index"} - ({"consumequeue"} if low == SEGMENT else set())
    return [item for item in known if item.phy_offset >= low]


def questions_of_cleaned(path: Path) -> dict[str, Any]:
    """Those of a whole store, and pulls at every offset that a queue has or had."""
    asked = questions(path)
    with rmq.open(path) as store:
        asked["pulls"] += [[topic, queue_id, offset, 32, None] for topic, queues in store.topics().items()
                           for queue_id, (_, high) in queues.items() for offset in range(high + 6)]  # fmt: skip
        early = store.topics().get("early", {})
        asked["times"] += [["early", queue_id, time] for queue_id in early for time in (1, 2**40)]
    return asked


@pytest.mark.parametrize("low", [1, 2])
def test_a_cleaned_store_opens_as_it_is_takes_messages_and_comes_back(
    tmp_path: Path, judge: RocketMQ, low: int
) -> None:
    path, low = tmp_path / "s", low * SEGMENT
    known = make_cleaned(path, low)
    before, asked = contents(path), questions_of_cleaned(path)
    answers = judge.open(path, CONFIG, asked).answers
    assert answers["min_phy_offset"] == low
    assert contents(path) == before
    with rmq.open(path) as store:
        assert [ends for ends in answers["queues"] if ends[0] == "early"] == [["early", 0, 5, 5], ["early", 1, 4, 4]]
        assert_agreement(store, asked, answers)
        assert_found(store, known)

    theirs = [AGAIN, *items(60, "theirs", "5.3.3")]
    asked = questions(path, messages_of(theirs))
    visit = judge.open(path, CONFIG, asked, put=theirs)
    known += known_of_visit(theirs, visit)
    with rmq.open(path, "r+") as store:
        assert store.topics()["early"] == {0: (5, 6), 1: (4, 4)}
        assert_agreement(store, asked, visit.answers)
        known += put(store, items(20, "more", "5.3.3"))
        assert_found(store, known)


def test_queues_that_were_removed_begin_at_0_in_rocketmq_too(tmp_path: Path, judge: RocketMQ) -> None:
    path = tmp_path / "s"
    make_cleaned(path, 2 * SEGMENT, expired_queues=True)
    theirs = [AGAIN]
    visit = judge.open(path, CONFIG, questions(path, theirs), put=theirs)
    assert [ends for ends in visit.answers["queues"] if ends[0] == "early"] == [["early", 0, 0, 1]]
    with rmq.open(path, "r+") as store:
        assert store.topics()["early"] == {0: (0, 1)}
