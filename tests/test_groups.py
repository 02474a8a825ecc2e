# SPDX-License-Identifier: Apache-2.0
"""Consumer groups: what was polled and committed, by RocketMQ's own file, in this process, the next, and a broker's."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import assert_error, call, good
from conftest import SIZES

import rmq
from rmq import fastjson
from rmq.consumeroffsets import ConsumerOffsets
from rmq.fastjson import parse_fastjson
from rmq.paths import StorePaths

CONFIG = rmq.StoreConfig(**SIZES)
# As ConsumerOffsetManager of 4.9.7 and of 5.3.3 wrote them, LmqConsumerOffsetManager of 5.3.3 the third.
OF_4_9 = (
    '{\n\t"offsetTable":{\n\t\t"T\u00f6pic@g\u00e9\\"x":{2147483647:9007199254740993\n\t\t},\n\t\t'
    '"%RETRY%g1@g1":{0:0\n\t\t},\n\t\t"Orders@g1":{0:11,1:11,2:12\n\t\t}\n\t}\n}'
)
OF_5_3 = (
    '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":1795970211620\n\t},\n\t'
    '"groupTopicMap":{\n\t\t"g1":["Orders","%RETRY%g1"],\n\t\t"g\u00e9\\"x":["T\u00f6pic"]\n\t},\n\t'
    + OF_4_9.removeprefix("{\n\t")
)  # fmt: skip
OF_LIGHT = (
    '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":1795970212148\n\t},\n\t'
    '"groupTopicMap":{\n\t\t"g1":["Orders"]\n\t},\n\t"lmqOffsetTable":{\n\t\t"%LMQ%t@%LMQ%g":5\n\t},\n\t'
    '"offsetTable":{\n\t\t"Orders@g1":{1:7\n\t\t}\n\t}\n}'
)
OFFSETS = {"g1": {"%RETRY%g1": {0: 0}, "Orders": {0: 11, 1: 11, 2: 12}},
           "g\u00e9\"x": {"T\u00f6pic": {2147483647: 9007199254740993}}}  # fmt: skip


def filled(path: Path, count: int = 30, queues: int = 3, **config: Any) -> Path:
    """Messages 0, 1, 2... of Orders, in its queues in turn; every fifth has tags."""
    with rmq.open(path, "a", config=rmq.StoreConfig(**SIZES, **config)) as store:
        store.put_many([rmq.Message("Orders", b"%d" % number, queue_id=number % queues,
                                    tags="paid" if number % 5 == 0 else None) for number in range(count)])  # fmt: skip
    return path


def keep(path: Path, text: str | bytes, name: str = "consumerOffset.json") -> Path:
    """A file of a broker's in config/."""
    file = path / "config" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


# ---- what a broker wrote ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [OF_4_9, OF_5_3], ids=["4.9", "5.3"])
def test_groups_are_those_of_the_brokers_file(tmp_path: Path, text: str) -> None:
    keep(filled(tmp_path / "s"), text)
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode) as store:
            assert store.groups() == OFFSETS
            assert list(store.groups()["g1"]) == ["%RETRY%g1", "Orders"]


def test_a_store_in_which_nobody_consumed_has_no_groups(tmp_path: Path) -> None:
    with rmq.open(filled(tmp_path / "s")) as store:
        assert store.groups() == {}


def test_where_a_broker_had_light_queues_the_file_that_was_written_last_counts(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    files = keep(path, OF_4_9), keep(path, OF_LIGHT, "lmqConsumerOffset.json")
    for newest, expected in ((files[1], {"%LMQ%g": {"%LMQ%t": {0: 5}}, "g1": {"Orders": {1: 7}}}), (files[0], OFFSETS)):
        os.utime(newest, (2e9 + files.index(newest), 2e9 - files.index(newest)))
        with rmq.open(path) as store:
            assert store.groups() == expected


@pytest.mark.parametrize("text", [b"", None, b"{", b"[]", b"\0" * 100, b"\xff", b'{"offsetTable":{"T@g":{0:1'])
def test_a_file_that_a_broker_could_not_read_is_passed_over_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes | None
) -> None:
    path = filled(tmp_path / "s")
    keep(path, OF_5_3, "consumerOffset.json.bak")
    if text is not None:
        keep(path, text)
    with rmq.open(path) as store, caplog.at_level(logging.WARNING, "rmq"):
        assert store.groups() == OFFSETS
    assert ("consumerOffset.json.bak" in caplog.text) == bool(text)


WRONG = {
    "no JSON": (b"{", "no table of consumer offsets"),
    "a list": (b"[]", "no object with a offsetTable"),
    "no UTF-8": (b"\xff\xfe", "no table of consumer offsets"),
    "deep": (b'{"offsetTable":' * 50_000, "no table of consumer offsets"),
    "no group": (b'{"offsetTable":{"Orders":{0:1}}}', "topic@group: 'Orders'"),
    "a queue id": (b'{"offsetTable":{"Orders@g":{"x":1}}}', "'Orders@g': 'x'"),
    "a queue id twice": (b'{"offsetTable":{"Orders@g":{0:1,"00":9}}}', "'Orders@g': '00'"),
    "a float": (b'{"offsetTable":{"Orders@g":{0:1.5}}}', "no queue's consumer offset"),
    "a bool": (b'{"offsetTable":{"Orders@g":{0:true}}}', "no queue's consumer offset"),
    "no long": (b'{"offsetTable":{"Orders@g":{0:9223372036854775808}}}', "no queue's consumer offset"),
    "no map": (b'{"offsetTable":{"Orders@g":5}}', "topic@group: 'Orders@g'"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_none_is_an_error_that_names_it_and_stays(tmp_path: Path, text: bytes, reason: str) -> None:
    file = keep(filled(tmp_path / "s"), text)
    with rmq.open(tmp_path / "s") as store, pytest.raises(rmq.CorruptFileError) as caught:
        store.groups()
    assert caught.value.path == str(file)
    assert reason in caught.value.reason
    with rmq.open(tmp_path / "s", "r+") as store:
        with pytest.raises(rmq.CorruptFileError):
            store.commit_offsets("g", "Orders", {0: 1})
        store.put(rmq.Message("Orders", b"30"))
    assert file.read_bytes() == text


def test_a_file_that_a_broker_could_not_read_is_not_written_over(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    file = keep(path, b"{")
    keep(path, OF_5_3, "consumerOffset.json.bak")
    with rmq.open(path, "r+") as store, pytest.raises(rmq.CorruptFileError, match=r"consumerOffset\.json: byte 0"):
        store.commit_offsets("g", "Orders", {0: 1})
    assert file.read_bytes() == b"{"


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("elsewhere")], ids=["pipe", "link"])
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = filled(tmp_path / "s")
    (path / "config" / "elsewhere").write_text(OF_5_3)
    file = path / "config" / "consumerOffset.json"
    make(file)
    before = file.lstat()
    with rmq.open(path, "r+") as store, pytest.raises(rmq.CorruptFileError):
        store.commit_offsets("g", "Orders", {0: 1})
    assert file.lstat() == before
    assert (path / "config" / "elsewhere").read_text() == OF_5_3


def test_a_file_that_a_broker_writes_over_is_read_until_it_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, texts = filled(tmp_path / "s"), ['{"offsetTable":{"T@g":{0:11', OF_5_3[:100], OF_5_3, OF_5_3]
    keep(path, OF_4_9)
    monkeypatch.setattr(fastjson, "read_file", lambda file, limit: texts.pop(0).encode())
    with rmq.open(path) as store:
        assert store.groups() == OFFSETS
    assert texts == []


def test_more_than_is_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+") as store:
        store.commit_offsets("g", "Orders", {0: 1})
        store.flush()
        before = (path / "config" / "consumerOffset.json").read_bytes()
        monkeypatch.setattr(fastjson, "CONFIG_LIMIT", 300)
        store.commit_offsets("g" * 300, "Orders", {0: 1})
        with pytest.raises(OSError, match="at most 300 are read"):
            store.flush()
        assert (path / "config" / "consumerOffset.json").read_bytes() == before
        monkeypatch.undo()
    with rmq.open(path) as store:
        assert sorted(store.groups()) == ["g", "g" * 300]


def test_a_commit_that_was_interrupted_and_made_again_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "s")
    keep_it = ConsumerOffsets._keep

    def interrupted(*arguments: Any) -> None:
        keep_it(*arguments)
        raise KeyboardInterrupt

    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=10**9)) as store:
        store.commit_offsets("g", "Orders", {0: 1})
        store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(ConsumerOffsets, "_keep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit_offsets("g", "Orders", {0: 2})
        store.commit_offsets("g", "Orders", {0: 2})
    with rmq.open(path) as store:
        assert store.groups() == {"g": {"Orders": {0: 2}}}


@pytest.mark.parametrize("place", ["consumerOffsets", "rdb"])
def test_offsets_in_rocksdb_are_an_error_that_says_what_reads_them(tmp_path: Path, place: str) -> None:
    path = filled(tmp_path / "s")
    keep(path, OF_5_3)
    (path / "config" / place).mkdir()
    for name in ("CURRENT", "MANIFEST-000001"):
        (path / "config" / place / name).write_bytes(b"")
    with rmq.open(path, "r+") as store:
        for call_it in (store.groups, lambda: store.commit_offsets("g", "Orders", {0: 1})):
            with pytest.raises(rmq.UnsupportedFormatError, match="consumer offsets in RocksDB; mqadmin"):
                call_it()


def test_what_else_the_file_holds_stays(tmp_path: Path) -> None:
    file = keep(filled(tmp_path / "s"), OF_5_3)
    with rmq.open(tmp_path / "s", "r+") as store:
        store.commit_offsets("g1", "Orders", {1: 4, 2: 5})
    found, before = parse_fastjson(file.read_text()), parse_fastjson(OF_5_3)
    assert found["offsetTable"].pop("Orders@g1") == {"0": 11, "1": 4, "2": 5}
    assert before["offsetTable"].pop("Orders@g1")
    assert found["dataVersion"].pop("counter") == before["dataVersion"].pop("counter") + 1
    assert found["dataVersion"].pop("timestamp") > before["dataVersion"].pop("timestamp") - 10**12
    assert found == before


def test_commits_go_to_the_file_of_light_queues_where_that_counts(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    file = keep(path, OF_LIGHT, "lmqConsumerOffset.json")
    with rmq.open(path, "r+") as store:
        store.commit_offsets("g1", "Orders", {0: 3})
    assert sorted(path.name for path in (path / "config").iterdir()) == [file.name, "topics.json"]
    found = json.loads(file.read_text())
    assert (found["lmqOffsetTable"], found["offsetTable"]) == ({"%LMQ%t@%LMQ%g": 5}, {"Orders@g1": {"1": 7, "0": 3}})


# ---- commits ---------------------------------------------------------------------------------------------


def test_a_commit_is_known_at_once_and_on_disk_after_a_flush(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    file = path / "config" / "consumerOffset.json"
    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=10**9)) as store:
        store.commit_offsets("g", "Orders", {0: 3, 2: 1})
        assert store.groups() == {"g": {"Orders": {0: 3, 2: 1}}}
        assert not file.exists()
        store.flush()
        assert json.loads(file.read_text())["offsetTable"] == {"Orders@g": {"0": 3, "2": 1}}
        before = file.stat()
        store.commit_offsets("g", "Orders", {0: 3})  # nothing new
        store.flush()
        assert file.stat() == before
        store.commit_offsets("g", "Orders", {0: 2})  # and back
        store.commit_offsets("h", "Orders", {})
    assert json.loads(file.read_text())["offsetTable"] == {"Orders@g": {"0": 2, "2": 1}}


def test_a_commit_alone_is_on_disk_soon(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=10)) as store:
        store.commit_offsets("g", "Orders", {0: 3})
        with rmq.open(path) as reader:
            for _ in range(1000):
                if reader.groups():
                    break
                time.sleep(0.01)
            assert reader.groups() == {"g": {"Orders": {0: 3}}}


BAD = [
    (("", "Orders", {0: 1}), ValueError, "group must be a name"),
    (("a@b", "Orders", {0: 1}), ValueError, "without '@'"),
    (("\ud800", "Orders", {0: 1}), ValueError, "group holds a lone surrogate"),
    ((b"g", "Orders", {0: 1}), TypeError, "group must be str"),
    (("g", None, {0: 1}), TypeError, "topic must be str"),
    (("g", "Orders", [(0, 1)]), TypeError, "queue_offsets must be a mapping"),
    (("g", "Orders", {"0": 1}), TypeError, "queue_id must be int"),
    (("g", "Orders", {0: 1.0}), TypeError, "queue_offset must be int"),
    (("g", "Orders", {0: True}), TypeError, "queue_offset must be int"),
    (("g", "Orders", {0: -1}), ValueError, "queue_offset must not be negative"),
    (("g", "Orders", {0: 1, 1: 11}), ValueError, "queue_offset 11 lies behind the end of Orders queue 1, 10"),
    (("g", "Orders", {2**31: 0}), ValueError, "queue_id must be an int of Java's, got 2147483648"),
    (("g", "Orders", {-1: 0}), ValueError, "queue_id must not be negative"),
    (("g", "", {0: 0}), ValueError, "topic must not be empty"),
    (("g", "Orders", {7: 1}), ValueError, "the end of Orders queue 7, 0"),
    (("g", "New", {0: 1}), ValueError, "the end of New queue 0, 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "says"), BAD, ids=[f"{kind.__name__}, {says}" for _, kind, says in BAD])
def test_a_wrong_commit_says_what_is_wrong_and_commits_nothing(
    tmp_path: Path, arguments: Any, kind: type[Exception], says: str
) -> None:
    with rmq.open(filled(tmp_path / "s"), "r+") as store:
        with pytest.raises(kind, match=says):
            store.commit_offsets(*arguments)
        assert store.groups() == {}
    assert not (tmp_path / "s/config/consumerOffset.json").exists()


def test_the_end_of_a_queue_that_was_just_put_may_be_committed(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put(rmq.Message("T", b"", queue_id=5))
        store.commit_offsets("g", "T", {5: 1})
        assert store.groups() == {"g": {"T": {5: 1}}}


def test_while_queues_go_only_what_was_consumed_of_them_is_written(tmp_path: Path) -> None:
    """What else was committed may speak of messages that are not on disk yet."""
    path = filled(tmp_path / "s")
    offsets = ConsumerOffsets(StorePaths(path))
    for topic in ("Orders", "Other"):
        offsets.commit("g", topic, lambda: {0: 5, 1: 6})
    with offsets.lock_file() as file, offsets.leaving(file, {("Orders", 0)}):
        kept = json.loads((path / "config/consumerOffset.json").read_text())["offsetTable"]
        assert kept == {"Orders@g": {"0": 0}}
        offsets.commit("g", "Orders", lambda: {0: 7, 1: 7})
    expected = {"g": {"Orders": {0: 0, 1: 7}, "Other": {0: 5, 1: 6}}}
    assert offsets.groups() == expected
    offsets.write(offsets.taken())
    assert ConsumerOffsets(StorePaths(path)).groups() == expected


# ---- the command line --------------------------------------------------------------------------------------


def test_rmq_groups_shows_offsets_bounds_and_lag(tmp_path: Path) -> None:
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=lambda: next(times)) as store:
        for number in range(9):
            store.put(rmq.Message("T", b"", queue_id=number % 2))
        store.commit_offsets("g", "T", {0: 2, 1: 4})
        store.commit_offsets("h", "T", {0: 0})
    rows = good("groups", tmp_path / "s").rows
    assert rows[0] == {"group": "g", "topic": "T", "queue_id": 0, "queue_offset": 2, "min_queue_offset": 0,
                       "max_queue_offset": 5, "lag": 3, "consumed_timestamp": "2023-11-14T22:13:22.000Z"}  # fmt: skip
    assert [(row["group"], row["queue_id"], row["lag"]) for row in rows] == [("g", 0, 3), ("g", 1, 0), ("h", 0, 5)]
    assert rows[2]["consumed_timestamp"] is None
    assert good("groups", tmp_path / "s", "h").rows == rows[2:]
    table = good("groups", tmp_path / "s", "-o", "table").out
    assert " ".join(table.split("\n")[0].split()) == "group topic queue next min max lag last consumed (UTC)"
    assert_error(call("groups", tmp_path / "s", "H"), 1, "no group 'H' has consumed anything; did you mean 'h'")


def test_rmq_groups_of_queues_that_are_gone_and_of_cleaned_messages(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 200, 1)
    keep(path, '{"offsetTable":{"Gone@g":{3:7},"Orders@g":{0:5}}}')
    with rmq.open(path, "r+") as store:
        store.clean(time.time_ns() // 10**6 + 10**9, limit=2)
        low, high = store.topics()["Orders"][0]
    assert low > 5
    gone, cleaned = good("groups", path).rows
    assert list(gone.values()) == ["g", "Gone", 3, 7, None, None, None, None]
    assert (cleaned["lag"], cleaned["consumed_timestamp"]) == (high - low, None)


def test_rmq_groups_of_a_store_without_groups_and_of_a_file_that_is_none(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    assert good("groups", path).rows == []
    keep(path, b"{")
    assert_error(call("groups", path), 3, "consumerOffset.json: byte 0")


# ---- threads and forms -------------------------------------------------------------------------------------


def test_commits_beside_flushes_are_all_written(tmp_path: Path) -> None:
    path = filled(tmp_path / "s", 300, 3)
    with rmq.open(path, "r+", config=rmq.StoreConfig(flush_interval_commit_log=1)) as store:

        def commit(queue_id: int) -> None:
            for place in range(101):
                store.commit_offsets(f"g{queue_id}", "Orders", {queue_id: min(place, 100)})
                if place % 10 == queue_id:
                    store.flush()

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    offsets = ConsumerOffsets(StorePaths(path))
    assert offsets.groups() == {f"g{number}": {"Orders": {number: 100}} for number in range(3)}


def test_a_string_without_an_end_is_no_json_and_is_read_once() -> None:
    """At each of its quotes another search of all that follows would take hours."""
    for text in ('"' + '\\"' * 500_000, '{"a":"' + "\\\"" * 500_000, '{1:"' + "x" * 1_000_000):
        with pytest.raises(ValueError, match="Unterminated string"):
            parse_fastjson(text)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_the_offsets_of_a_light_group_are_a_broker_s_own(tmp_path: Path, mode: str) -> None:
    """With light queues it keeps them in a table of their own; of others nothing changes."""
    path = filled(tmp_path / "s", 20, 1)
    (path / "config").mkdir(exist_ok=True)
    table = {"offsetTable": {"Orders@plain": {"0": 3}}, "lmqOffsetTable": {"Orders@%LMQ%g": 12}}
    (path / "config/lmqConsumerOffset.json").write_text(json.dumps(table))
    with rmq.open(path, mode) as store:
        assert store.groups() == {"%LMQ%g": {"Orders": {0: 12}}, "plain": {"Orders": {0: 3}}}
        with pytest.raises(rmq.UnsupportedFormatError, match="light group"):
            store.commit_offsets("%LMQ%g", "Orders", {0: 15})
        store.commit_offsets("plain", "Orders", {0: 15})
        assert store.groups() == {"%LMQ%g": {"Orders": {0: 12}}, "plain": {"Orders": {0: 15}}}


@pytest.mark.parametrize("character", ["a", "\\n"])
def test_offsets_are_read_in_memory_of_a_few_times_their_size(character: str) -> None:
    text = '{"x":"' + character * 1_000_000 + '"}'
    tracemalloc.start()
    try:
        assert parse_fastjson(text) == json.loads(text)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()
