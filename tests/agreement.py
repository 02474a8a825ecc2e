# SPDX-License-Identifier: Apache-2.0
"""Questions to a store, and whether RocketMQ and rmq answer them alike."""

from __future__ import annotations

import base64
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import oracle

import rmq

EVERYTHING = (0, rmq.MAX_TIMESTAMP)
MAX_HITS = 64  # RocketMQ's cap for one query of its index
TAGS = ("*", "paid || sent", "Aa", "оплачен || none")
COMMON_KEYS = ("shared", "Aa", "BB", "ключ-é", "😀")


def questions(path: Path, coming: Iterable[rmq.Message] = (), seed: int = 0) -> dict[str, Any]:
    """Pulls at every queue offset and beyond, every key of every message, times at, beside and between.

    coming: messages that will have been put when the questions are asked.
    """
    rng = random.Random(seed)
    records = oracle.read_records(path)
    queues: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in records:
        if record.transaction not in (oracle.PREPARED, oracle.ROLLBACK):
            queues[record.topic, record.queue_id].append(record.store_timestamp)
    more = Counter((message.topic, message.queue_id) for message in coming)
    pulls: list[list[Any]] = [["no-such-topic", 0, 0, 32, None]]
    for topic, queue_id in queues.keys() | more.keys():
        count = len(queues[topic, queue_id]) + more[topic, queue_id]
        offsets = [*range(count + 1), 0, count + 1, count + 5]
        pulls += [[topic, queue_id, offset, rng.randint(1, 40), None] for offset in offsets]
        if topic != oracle.SCHEDULE_TOPIC:  # its units hold times in place of the hashes of tags
            pulls += [[topic, queue_id, rng.randrange(count), rng.randint(1, 40), tags] for tags in TAGS]
    times = []
    for (topic, queue_id), stored in queues.items():
        if stored:
            asked = [1, stored[0] - 1, stored[0], stored[-1], stored[-1] + 1, 2**40 - 1]
            asked += [time + step for time in rng.sample(stored, min(5, len(stored))) for step in (-1, 0, 1)]
            asked += [(a + b) // 2 for a, b in pairwise(stored) if rng.random() < 0.1]
            times += [[topic, queue_id, time] for time in asked]
    return {"pulls": pulls, "keys": _key_questions([*records, *coming], records, rng), "times": times}


def _key_questions(carriers: Sequence[oracle.Record | rmq.Message], records: list[oracle.Record],
                   rng: random.Random) -> list[list[Any]]:  # fmt: skip
    """[topic, key, count, begin, end]: each key that somebody carries, and common ones with counts and times."""
    carried = {(carrier.topic, key) for carrier in carriers for key in [*carrier.keys, carrier.uniq_key] if key}
    asked = [[topic, key, MAX_HITS, *EVERYTHING] for topic, key in sorted(carried)]
    stored = [record.store_timestamp for record in records]
    for topic in sorted({carrier.topic for carrier in carriers}):
        asked.append([topic, "no such key", MAX_HITS, *EVERYTHING])
        for key in COMMON_KEYS:
            for max_num in (1, 3, 32, 100):
                asked.append([topic, key, max_num, *EVERYTHING])
                if len(stored) > 1:
                    begin, end = sorted(rng.sample(stored, 2))
                    asked.append([topic, key, max_num, begin + rng.randint(-1, 1), end + rng.choice((-1, 0, 500))])
    return asked


def assert_agreement(store: rmq.Store, asked: dict[str, Any], answers: dict[str, Any]) -> None:
    """Bounds, every record, every pull, every key, every time: each answer of RocketMQ is that of the store."""
    assert_log_and_queues(store, asked, answers)
    assert_keys(store, asked["keys"], answers["keys"])


def assert_log_and_queues(store: rmq.Store, asked: dict[str, Any], answers: dict[str, Any]) -> None:
    """assert_agreement without the index."""
    assert (store.min_phy_offset, store.max_phy_offset) == (answers["min_phy_offset"], answers["max_phy_offset"])
    bounds = {(topic, queue_id): tuple(ends) for topic, queue_id, *ends in answers["queues"]}
    assert {(topic, queue_id): ends for topic, queues in store.topics().items()
            for queue_id, ends in queues.items()} == bounds  # fmt: skip
    _assert_records(store, answers["records"])
    for question, answer in zip(asked["pulls"], answers["pulls"], strict=True):
        _assert_pull(store, question, answer)
    for message in answers["pulled"]:
        ours = store.lookup(message["phy_offset"])
        assert _fields(ours, ours.body) | {"sys_flag": message["sys_flag"]} == message
        assert message["sys_flag"] in (ours.sys_flag, ours.sys_flag & ~1)  # bit 0: RocketMQ has decompressed the body
    times = _times_of_queues(store)
    for question, answer in zip(asked["times"], answers["times"], strict=True):
        _assert_time(store, question, answer, times)


def _fields(message: rmq.StoredMessage, body: bytes) -> dict[str, Any]:
    """A message as the harness writes it: what is missing is left out."""
    names = ("topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "born_timestamp",
             "store_timestamp", "reconsume_times", "prepared_transaction_offset", "body_crc", "properties", "tags",
             "uniq_key", "offset_msg_id")  # fmt: skip
    fields = {name: getattr(message, name) for name in names}
    fields |= {"body": base64.b64encode(body).decode(), "keys": message.properties.get("KEYS")}
    fields |= {name: oracle.decode_host(oracle.encode_host(getattr(message, name)))
               for name in ("born_host", "store_host")}  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def _assert_records(store: rmq.Store, records: list[dict[str, Any]]) -> None:
    phy_offsets = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
    assert phy_offsets == [record["phy_offset"] for record in records]
    for record in records:
        ours = store.lookup(record["phy_offset"])
        delay_ms = 2 * 3_600_000 if ours.topic == oracle.SCHEDULE_TOPIC else None  # level 18
        tags_code = rmq.java_hash(ours.tags or "") if delay_ms is None else ours.store_timestamp + delay_ms
        assert _fields(ours, ours.raw_body) | {"tags_code": tags_code} == record
        assert ours.keys == tuple(filter(None, record.get("keys", "").split(" ")))


def _assert_pull(store: rmq.Store, question: list[Any], answer: dict[str, Any]) -> None:
    topic, queue_id, queue_offset, count, tags = question
    found = [tuple(place) for place in answer["messages"]]
    if tags is None:  # RocketMQ may stop before `count`: at 256 KiB, 32 messages, the end of a queue file
        ours = store.pull(topic, queue_id, queue_offset, len(found) or count)
        assert [(message.phy_offset, message.size) for message in ours.messages] == found, question
        assert (ours.status.name, ours.next_queue_offset) == (answer["status"], answer["next"]), question
        if answer["status"] != "NO_MESSAGE_IN_QUEUE":
            assert (ours.min_queue_offset, ours.max_queue_offset) == (answer["min"], answer["max"]), question
        return
    # RocketMQ compares hashes of tags, its consumers the text.
    wanted = {tag.strip() for tag in tags.split("||")}
    chosen = [place for place in found if tags == "*" or store.lookup(place[0]).tags in wanted]
    ours = store.pull(topic, queue_id, queue_offset, count, tags=tags)
    assert [(message.phy_offset, message.size) for message in ours.messages
            if message.queue_offset < answer["next"]] == chosen, question  # fmt: skip


def assert_keys(store: rmq.Store, asked: list[list[Any]], answers: list[dict[str, Any]],
                lost: range = range(0)) -> None:  # fmt: skip
    """The raw answers are equal; and those that carry the key are our exact ones, in the same order.

    lost: phy offsets that are not in RocketMQ's index; of the first, only some keys may be.
    """
    carriers = defaultdict(set)
    for message in store.scan(columns=["phy_offset", "topic", "keys", "uniq_key"]).read_all().to_pylist():
        for key in [*message["keys"], message["uniq_key"]]:
            carriers[message["topic"], key].add(message["phy_offset"])
    for (topic, key, max_num, begin, end), raw, answer in zip(asked, _select(store, asked), answers, strict=True):
        name = f"{topic} {key} {max_num} {begin} {end}"
        assert answer["index"] == raw, name
        assert answer["found"] == [place for place in sorted(raw) if place >= store.min_phy_offset], name
        found = [phy_offset for phy_offset, _ in groupby(raw) if phy_offset in carriers[topic, key]]
        exact = [message.phy_offset for message in store.query(topic, key, begin=begin, end=end, limit=None)]
        if (begin, end) != EVERYTHING:  # RocketMQ's index knows whole seconds only
            assert {phy_offset for phy_offset in found
                    if begin <= store.lookup(phy_offset).store_timestamp <= end} <= set(exact), name  # fmt: skip
            continue
        if lost:
            assert found == [place for place in found if place not in lost[1:]], name
            found, exact = ([place for place in places if place not in lost] for places in (found, exact))
        assert found == (exact if len(raw) < min(max_num, MAX_HITS) else exact[: len(found)]), name


def _select(store: rmq.Store, asked: list[list[Any]]) -> list[list[int]]:
    """The raw answers of the index; keys of one topic, count and time are asked together."""
    together = defaultdict(list)
    for number, (topic, _, *rest) in enumerate(asked):
        together[topic, *rest].append(number)
    answers = {}
    for (topic, max_num, begin, end), numbers in together.items():
        keys = [asked[number][1] for number in numbers]
        found = store.select_phy_offset_many(topic, keys, max_num=max_num, begin=begin, end=end)
        answers.update(zip(numbers, found.to_pylist(), strict=True))
    return [answers[number] for number in range(len(asked))]


def _times_of_queues(store: rmq.Store) -> dict[tuple[str, int], list[int]]:
    """Store timestamps of the messages of each queue, in order."""
    return {(topic, queue_id): [message.store_timestamp for message in store.pull(topic, queue_id, 0, high).messages]
            for topic, queues in store.topics().items() for queue_id, (_, high) in queues.items()}  # fmt: skip


def _assert_time(store: rmq.Store, question: list[Any], answer: list[int],
                 times: dict[tuple[str, int], list[int]]) -> None:  # fmt: skip
    topic, queue_id, time = question
    lower, upper = (store.search_offset(topic, queue_id, time, boundary) for boundary in ("LOWER", "UPPER"))
    if len(answer) == 2:
        assert [lower, upper] == answer, question
        return
    # 4.9.8 takes the first file modified at or after the time, in it one of that time or else the nearest.
    files = sorted((store.path / "consumequeue" / topic / str(queue_id)).iterdir())
    count = store.config.mapped_file_size_consume_queue // 20
    number = next((n for n, file in enumerate(files) if file.stat().st_mtime_ns // 1_000_000 >= time), len(files) - 1)
    stored = times[topic, queue_id]
    first, last = number * count, min((number + 1) * count, len(stored)) - 1
    lower, upper = (min(max(offset, first), last) for offset in (lower, upper))
    if stored[lower] == time:
        assert lower <= answer[0] <= upper, question
    else:
        nearest = lower if abs(time - stored[lower]) < abs(time - stored[upper]) else upper
        assert answer == [nearest], question
