# SPDX-License-Identifier: Apache-2.0
"""Units that brokers alone make, of light queues and inner batches: readers derive those that are in no file yet."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import oracle
import pytest
from forks import fork, lock_of_a_broker
from test_foreign_formats import CONFIG, SEGMENT, T0, TOPICS, Builder
from test_inner_batches import BATCH_UNIT, FIRST, SECOND

import rmq
import rmq.visible
from rmq import batchconsumequeue, brokerunits, queueset
from rmq._core._recordbatch import RecordBatch
from rmq.consumequeue import ConsumeQueue
from rmq.dispatch import Dispatcher

LIGHT = "INNER_MULTI_DISPATCH\1%s\2INNER_MULTI_QUEUE_OFFSET\1%s\2TAGS\1A\2"


def crashed(builder: Builder) -> Path:
    builder.file("abort", b"1", 1)
    return builder.finish()


def bodies(store: rmq.Store, topic: str, queue_id: int = 0, begin: int = 0, tags: str | None = None) -> list[bytes]:
    return [message.body for message in store.pull(topic, queue_id, begin, 99, tags=tags).messages]


def lights(builder: Builder, *names: str, begin: int = 0, topic: str = "T", queue_id: int = 1) -> list[tuple[int, int]]:
    """Messages of a topic, each dispatched to %LMQ%a and what else its name says; the bodies count from 0."""
    places = []
    for number, others in enumerate(names, begin):
        offsets = ",".join([str(number), *["0"] * others.count(",")])
        raw = (LIGHT % (f"%LMQ%a{others}", offsets)).encode()
        places.append(builder.record(topic, b"%d" % number, raw, queue_id=queue_id, queue_offset=number))
    return places


# ---- light queues ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_files", [0, 1, 2, 3])
def test_light_queues_of_a_crashed_store_go_on_behind_their_files(tmp_path: Path, in_files: int) -> None:
    builder = Builder(tmp_path / "store")
    places = lights(builder, "", ",%LMQ%b", "")
    builder.units("T", 1, [(*place, 65) for place in places])
    if in_files:
        builder.units("%LMQ%a", 0, [(*place, 65) for place in places[:in_files]])
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"%LMQ%a": {0: (0, 3)}, "%LMQ%b": {0: (0, 1)}, "T": {1: (0, 3)}}
        assert bodies(store, "%LMQ%a", tags="A") == [b"0", b"1", b"2"]
        assert bodies(store, "%LMQ%b") == [b"1"]
        assert bodies(store, "%LMQ%a", tags="B") == []
        assert store.search_offset("%LMQ%a", 0, T0 + 2001) == 2
        assert store.lookup(("%LMQ%a", 0, 2)).body == b"2"
    assert rmq.verify(builder.path).damage_count == 0


def test_light_queues_without_any_queue_s_files_are_derived(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    lights(builder, ",%LMQ%b", "")
    with rmq.open(builder.finish()) as store:
        assert store.topics() == {"%LMQ%a": {0: (0, 2)}, "%LMQ%b": {0: (0, 1)}, "T": {1: (0, 2)}}


@pytest.mark.parametrize("begin", [0, 5])
def test_a_light_queue_with_a_gap_before_its_first_message_is_derived_from_all_of_the_log(
    tmp_path: Path, begin: int
) -> None:
    """As one that a broker deleted, when the log's last message is of it."""
    builder = Builder(tmp_path / "store")
    places = lights(builder, "", "", "", begin=begin)
    builder.units("T", 1, [(0, 2**31 - 1, 0)] * begin + [(*place, 65) for place in places])
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert reader.topics()["%LMQ%a"] == {0: (begin, begin + 3)}
        assert bodies(reader, "%LMQ%a", begin=begin) == [b"%d" % (begin + number) for number in range(3)]


@pytest.mark.parametrize("is_running", [False, True])
def test_properties_that_name_an_ordinary_queue_change_nothing_there(tmp_path: Path, *, is_running: bool) -> None:
    """A producer may send anything where the broker makes no light queues; of 4.9's under any name the files tell."""
    builder = Builder(tmp_path / "store")
    builder.units("x", 0, [(*builder.record("x", b"%d" % number, queue_offset=number), 0) for number in range(3)])
    builder.record("T", b"other", (LIGHT % ("x", "0")).encode())
    builder.record("T", b"other", (LIGHT % ("x", "3")).encode(), queue_offset=1)
    builder.file("lock", b"lock", 4)
    path = builder.finish() if is_running else crashed(builder)
    with lock_of_a_broker(path) if is_running else contextlib.nullcontext(), rmq.open(path) as store:
        assert store.topics() == {"T": {0: (0, 2)}, "x": {0: (0, 3)}}
        assert bodies(store, "x") == [b"0", b"1", b"2"]


def test_an_open_reader_beside_a_broker_sees_light_queues_grow_and_begin(tmp_path: Path) -> None:
    """The broker had made the unit in the message's own queue, but not yet in the light one."""
    builder = Builder(tmp_path / "store")
    (place,) = lights(builder, "")
    builder.units("T", 1, [(*place, 65)])
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert bodies(reader, "%LMQ%a") == [b"0"]
        lights(builder, ",%LMQ%b", "", begin=1)
        builder.finish()
        assert bodies(reader, "%LMQ%a") == [b"0", b"1", b"2"]
        assert bodies(reader, "%LMQ%b") == [b"1"]


def test_a_light_unit_that_a_broker_makes_while_queues_are_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The light queue is listed before it has its unit, the message's own when it has the next one already."""
    builder, looks = Builder(tmp_path / "store"), []
    (place,) = lights(builder, "")
    builder.units("T", 1, [(*place, 65)])
    builder.file("lock", b"lock", 4)
    real = queueset.queue_directories

    def listed(root: Path) -> Iterator[tuple[Path, str, int]]:
        looks.append(root)
        for item in real(root):
            if len(looks) == 2 and item[1] == "T":
                following = builder.record("T", queue_id=1, queue_offset=1)
                builder.finish()
                builder.units("%LMQ%a", 0, [(*place, 65)])
                builder.units("T", 1, [(*place, 65), (*following, 0)])
            yield item

    monkeypatch.setattr(queueset, "queue_directories", listed)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert reader.topics() == {"%LMQ%a": {0: (0, 1)}, "T": {1: (0, 2)}}
    assert len(looks) >= 2


def test_a_light_unit_that_a_broker_has_not_made_yet_outlives_a_cleaning(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    units = [(*builder.record("T", queue_id=1), 0)]
    left = SEGMENT - len(builder.log)
    builder.log += struct.pack(">iI", left, oracle.MAGIC_BLANK).ljust(left, b"\0")
    builder.file(f"commitlog/{0:020d}", builder.log, SEGMENT)
    builder.units("T", 1, units)
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.path), rmq.open(builder.path) as reader:
        assert reader.topics() == {"T": {1: (0, 1)}}
        raw = (LIGHT % ("%LMQ%a", "0")).encode()
        units.append((*builder.record("T", b"light", raw, queue_id=1, queue_offset=1), 65))
        builder.file(f"commitlog/{SEGMENT:020d}", builder.log[SEGMENT:], SEGMENT)
        builder.units("T", 1, units)
        (builder.path / "commitlog" / f"{0:020d}").unlink()
        assert bodies(reader, "%LMQ%a") == bodies(reader, "T", 1, 1) == [b"light"]


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("topic", ["%RETRY%g", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"])
def test_a_copy_of_a_message_is_in_no_light_queue_again(tmp_path: Path, topic: str, *, in_files: bool) -> None:
    """RocketMQ 5 leaves what the original had said, or another broker's; 4.9 gives the copy the next place."""
    builder = Builder(tmp_path / "store")
    places = lights(builder, "", "", "")
    if in_files:
        builder.units("%LMQ%a", 0, [(*place, 65) for place in places])
    for at in (1, 9, 3):
        lights(builder, "", begin=at, topic=topic, queue_id=0)
    with rmq.open(crashed(builder)) as store:
        assert [(m.topic, m.body) for m in store.pull("%LMQ%a").messages] == [
            ("T", b"0"), ("T", b"1"), ("T", b"2"), (topic, b"3")]  # fmt: skip


@pytest.mark.parametrize(("names", "offsets", "made"), [
    ("%LMQ%a,x", "0,", []), ("x,%LMQ%a", ",0", []), ("%LMQ%a,,%LMQ%b", "0,,0", ["%LMQ%a", "%LMQ%b"]),
    ("%LMQ%a,,%LMQ%b", "0,0,0", ["%LMQ%a", "%LMQ%b"]), ("%LMQ%a,", "0", ["%LMQ%a"]),
])  # fmt: skip
def test_a_list_of_names_counts_where_each_has_an_offset(
    tmp_path: Path, names: str, offsets: str, made: list[str]
) -> None:
    """RocketMQ 5 makes no unit where one has none, 4.9 gives one to what is empty between two commas."""
    builder = Builder(tmp_path / "store")
    builder.record(raw_properties=(LIGHT % (names, offsets)).encode())
    with rmq.open(crashed(builder)) as store:
        assert sorted(store.topics()) == [*made, "T"]


def test_a_gap_among_a_light_queue_s_offsets_does_not_derive_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ 5 counts a name twice that is given twice; the unit behind it goes to the end."""
    builder, begins = Builder(tmp_path / "store"), []
    builder.record(body=b"0", raw_properties=(LIGHT % ("%LMQ%a,%LMQ%a", "0,0")).encode())
    builder.file("lock", b"lock", 4)
    real = Dispatcher._add_units

    def add(dispatcher: Dispatcher[ConsumeQueue], batch: RecordBatch) -> None:
        begins.append(dispatcher.queue_phy_offset)
        real(dispatcher, batch)

    monkeypatch.setattr(Dispatcher, "_add_units", add)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert bodies(reader, "%LMQ%a") == [b"0"]
        for number in range(2, 6):
            raw = (LIGHT % ("%LMQ%a", number)).encode()
            builder.record(body=b"%d" % number, raw_properties=raw, queue_offset=number - 1)
            builder.finish()
            assert bodies(reader, "%LMQ%a") == [b"0", *(b"%d" % behind for behind in range(2, number + 1))]
    assert begins == sorted(set(begins))


def test_so_many_light_queues_are_made_of_a_log_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(brokerunits, "LIGHT_QUEUES", 3)
    builder = Builder(tmp_path / "store")
    names = ",".join(f"%LMQ%{number}" for number in range(9))
    builder.record(raw_properties=(LIGHT % (names, "0,0,0,0,0,0,0,0,0")).encode())
    lights(builder, "")
    with rmq.open(crashed(builder)) as store:
        assert sorted(store.topics()) == ["%LMQ%0", "%LMQ%1", "%LMQ%2", "T"]
    assert caplog.text.count("over 3 light queues") == 1


@pytest.mark.parametrize(("names", "offsets"), [
    ("../../x", "0"), ("%LMQ%/a", "0"), ("", "0"), ("%LMQ%a", ""), ("%LMQ%a", "-1"), ("%LMQ%a", "1" * 30),
    ("%LMQ%a", "\u0661"), ("T", "5"), ("%LMQ%a" * 60, "0"),
])  # fmt: skip
def test_what_names_no_other_queue_makes_none(tmp_path: Path, names: str, offsets: str) -> None:
    builder = Builder(tmp_path / "store")
    builder.record(raw_properties=(LIGHT % (names, offsets)).encode())
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"T": {0: (0, 1)}}


def test_prepared_messages_are_in_no_light_queue(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.record(raw_properties=(LIGHT % ("%LMQ%a", "0")).encode(), sys_flag=4)
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {}


# ---- inner batches -----------------------------------------------------------------------------------------------


Unit = tuple[int, int, int, int, int]  # place, size, store timestamp, base, count


def batches(builder: Builder, *, begins_single: bool) -> list[Unit]:
    """Single messages and batches of BT."""
    found, base = [], 0

    def add(count: int, body: bytes) -> None:
        nonlocal base
        raw = b"INNER_BASE\1%d\2INNER_NUM\1%d\2" % (base, count) if count > 1 else b""
        place = builder.record("BT", body, raw, queue_offset=base, sys_flag=0xC0 if count > 1 else 0)
        found.append((*place, builder.times, base, count))
        base += count

    if begins_single:
        add(1, b"zero")
    add(2, FIRST)
    add(1, b"plain")
    add(3, SECOND)
    return found


def keep_units(builder: Builder, units: list[Unit]) -> None:
    data = b"".join(BATCH_UNIT.pack(place, size, 0, time, base, count, -1, 0)
                    for place, size, time, base, count in units)  # fmt: skip
    builder.file(f"batchconsumequeue/BT/0/{0:020d}", data, 460)


ALL = [b"zero", b"one", b"two!", b"plain", b"three", b"", b"five"]


@pytest.mark.parametrize("begins_single", [False, True])
@pytest.mark.parametrize("in_files", [0, 1, 2, 3])
def test_queues_of_inner_batches_of_a_crashed_store_go_on_behind_their_files(
    tmp_path: Path, in_files: int, begins_single: bool
) -> None:
    builder = Builder(tmp_path / "store")
    units = batches(builder, begins_single=begins_single)
    if in_files:
        keep_units(builder, units[:in_files])
    expected = ALL if begins_single else ALL[1:]
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"BT": {0: (0, len(expected))}}
        assert [(m.queue_offset, m.body) for m in store.pull("BT").messages] == list(enumerate(expected))
        assert bodies(store, "BT", begin=2) == expected[2:]
        assert store.search_offset("BT", 0, builder.times) == len(expected) - 3
    builder.record("BT", b"one more", queue_offset=len(expected))
    with rmq.open(crashed(builder)) as store:
        assert bodies(store, "BT") == [*expected, b"one more"]


def test_single_messages_alone_read_alike_with_and_without_a_batch_queue(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    place = builder.record("BT", b"a")
    keep_units(builder, [(*place, T0, 0, 1)])
    builder.record("BT", b"b", queue_offset=1)
    for _ in range(2):
        with rmq.open(crashed(builder)) as store:
            assert (store.topics(), bodies(store, "BT")) == ({"BT": {0: (0, 2)}}, [b"a", b"b"])
        shutil.rmtree(builder.path / "batchconsumequeue", ignore_errors=True)


def test_a_queue_of_inner_batches_whose_files_end_before_what_is_derived_is_derived_whole(tmp_path: Path) -> None:
    """Queues of a closed store are derived from behind the last unit on, which another queue has here."""
    builder = Builder(tmp_path / "store")
    first, *others = batches(builder, begins_single=True)
    builder.units("T", 0, [(*builder.record(), 0)])
    base = sum(count for *_, count in others) + 1
    builder.record("BT", FIRST, b"INNER_BASE\1%d\2INNER_NUM\0012\2" % base, queue_offset=base, sys_flag=0xC0)
    keep_units(builder, [first])
    with rmq.open(builder.finish()) as store:
        assert bodies(store, "BT") == [*ALL, b"one", b"two!"]


def test_a_batch_unit_whose_record_a_crash_took_is_behind_the_end(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    units = batches(builder, begins_single=True)
    keep_units(builder, units)
    builder.log = builder.log[: units[-1][0]]
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"BT": {0: (0, 4)}}
        answer = store.pull("BT", 0, 4)
        assert (answer.status, answer.max_queue_offset) == (rmq.PullStatus.OFFSET_OVERFLOW_ONE, 4)


@pytest.mark.parametrize("raw", [
    b"", b"INNER_BASE\0011\2", b"INNER_BASE\1x\2INNER_NUM\0012\2", b"INNER_BASE\0011\2INNER_NUM\00132768\2",
    b"INNER_BASE\0011\2INNER_NUM\0010\2",
])  # fmt: skip
def test_a_batch_that_does_not_tell_its_place_has_no_unit_and_is_scanned(tmp_path: Path, raw: bytes) -> None:
    builder = Builder(tmp_path / "store")
    builder.record("BT", b"a")
    builder.record("BT", FIRST, raw, queue_offset=1, sys_flag=0xC0)
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"BT": {0: (0, 1)}}
        assert bodies(store, "BT") == [b"a"]
        assert len(store.scan(on_damage="skip").read_all()) >= 1


@pytest.mark.parametrize("in_files", [0, 3, 4, 5])
def test_a_topic_of_batches_that_was_made_again_begins_anew(tmp_path: Path, in_files: int) -> None:
    """Also in its files: a broker that is killed then makes units of all that the log has under the name."""
    builder = Builder(tmp_path / "store")
    units = batches(builder, begins_single=False)
    units.append((*builder.record("BT", b"again", queue_offset=0), builder.times, 0, 1))
    raw = b"INNER_BASE\0011\2INNER_NUM\0012\2"
    units.append((*builder.record("BT", FIRST, raw, queue_offset=1, sys_flag=0xC0), builder.times, 1, 2))
    if in_files:
        keep_units(builder, units[:in_files])
    with rmq.open(crashed(builder)) as store:
        assert store.topics() == {"BT": {0: (0, 3)}}
        for _ in range(2):
            assert bodies(store, "BT") == [b"again", b"one", b"two!"]
        assert store.info().units_behind == 5 - in_files


def test_single_messages_of_a_topic_of_batches_beside_a_broker_are_known_by_topics_json(tmp_path: Path) -> None:
    """The broker is about to make the first units."""
    builder = Builder(tmp_path / "store")
    builder.units("T", 0, [(*builder.record(), 0)])
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        assert reader.topics() == {"T": {0: (0, 1)}}
        builder.file("config/topics.json", (TOPICS % ("queue.type", "BatchCQ")).replace('"B"', '"BT"').encode(), 0)
        place = builder.record("BT", b"a")
        builder.record("BT", b"b", queue_offset=1)
        builder.finish()
        assert bodies(reader, "BT") == [b"a", b"b"]
        keep_units(builder, [(*place, T0, 0, 1)])
        assert (reader.topics()["BT"], bodies(reader, "BT")) == ({0: (0, 2)}, [b"a", b"b"])


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(b"\1" * 45), lambda path: (path.unlink(), path.mkdir()),
    lambda path: (path.parent / "junk").write_bytes(b"x"),
    lambda path: (shutil.rmtree(path.parent), path.parent.symlink_to("0")), None,
])  # fmt: skip
def test_a_queue_of_batches_that_cannot_be_read_leaves_the_others_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object] | None
) -> None:
    """Its files are wrong, or (None) another user's."""
    builder = Builder(tmp_path / "store")
    builder.units("T", 0, [(*builder.record(), 0)])
    keep_units(builder, batches(builder, begins_single=True))
    builder.record("T", b"behind", queue_offset=1)
    path = crashed(builder) / f"batchconsumequeue/BT/0/{0:020d}"
    files_of = batchconsumequeue._files_of

    def refused(directory: Path) -> list[Path]:
        if directory == path.parent:
            raise PermissionError(errno.EACCES, "Permission denied", str(directory))
        return files_of(directory)

    if spoil is None:
        monkeypatch.setattr(batchconsumequeue, "_files_of", refused)
    else:
        spoil(path)
    with rmq.open(builder.path) as store:
        assert bodies(store, "T") == [b"body", b"behind"]


def test_a_batch_in_a_topic_with_ordinary_queue_files_hides_nothing(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "store")
    builder.units("BT", 0, [(*builder.record("BT", b"a"), 0)])
    builder.record("BT", FIRST, b"INNER_BASE\0011\2INNER_NUM\0012\2", queue_offset=1, sys_flag=0xC0)
    with rmq.open(crashed(builder)) as store:
        assert bodies(store, "BT") == [b"a"]


def test_units_in_memory_go_when_the_files_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker's: the newest batch and message have none yet."""
    monkeypatch.setattr(brokerunits, "TAIL_UNITS", 1)
    monkeypatch.setattr(rmq.visible, "TAIL_LIMIT", 48)
    monkeypatch.setattr(rmq.visible, "WEIGHED_EACH", 1)
    builder, units, own = Builder(tmp_path / "store"), [], []

    def put() -> None:
        number = len(units)
        raw = b"INNER_BASE\1%d\2INNER_NUM\0012\2" % (2 * number)
        place = builder.record("BT", FIRST, raw, queue_offset=2 * number, sys_flag=0xC0)
        units.append((*place, T0, 2 * number, 2))
        own.append((*builder.record("T", b"%d" % number, queue_offset=number), 0))
        builder.finish()
        keep_units(builder, units[:-1])
        builder.units("T", 0, own[:-1])

    put()
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.path), rmq.open(builder.path) as reader:
        for number in range(1, 7):
            put()
            assert bodies(reader, "BT") == [b"one", b"two!"] * len(units)
            assert bodies(reader, "T") == [b"%d" % number for number in range(len(own))]
            assert len(reader._queues.batch_tails["BT", 0]) <= 2


def test_units_in_files_that_a_reader_has_seen_stay_when_those_in_memory_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmq.visible, "TAIL_LIMIT", 48)
    monkeypatch.setattr(rmq.visible, "WEIGHED_EACH", 1)
    builder = Builder(tmp_path / "store")
    builder.units("T", 0, [(*builder.record("T", b"last in the files"), 0)])
    builder.file("lock", b"lock", 4)
    with lock_of_a_broker(builder.finish()), rmq.open(builder.path) as reader:
        for number in range(5):
            builder.record("U", b"%d" % number, queue_offset=number)
        builder.finish()
        for _ in range(2):
            assert bodies(reader, "U") == [b"%d" % number for number in range(5)]
            assert bodies(reader, "T") == [b"last in the files"]


@pytest.mark.parametrize("in_files", [0, 2, 4])
def test_info_counts_queues_of_batches(tmp_path: Path, in_files: int) -> None:
    builder = Builder(tmp_path / "store")
    units = batches(builder, begins_single=True)
    keep_units(builder, units[:in_files])
    with rmq.open(crashed(builder)) as store:
        info = store.info()
    assert (info.topic_count, info.queue_count, info.message_count) == (1, 1, len(ALL))
    assert (info.units_behind, info.end_timestamp) == (4 - in_files, builder.times)


def test_what_rmq_put_into_a_broker_s_store_is_in_no_queue_that_rmq_does_not_make(tmp_path: Path) -> None:
    """Beside the writer, when it was killed, and when it has closed."""
    builder = Builder(tmp_path / "store")
    builder.units("T", 0, [(*builder.record(), 0)])
    path, properties = builder.finish(), {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "0"}
    builder.file("checkpoint", b"", 4096)

    def seen() -> dict[str, dict[int, tuple[int, int]]]:
        with rmq.open(path) as reader:
            return reader.topics()

    with rmq.open(path, "r+", config=CONFIG) as writer:
        writer.put(rmq.Message("T", b"copied", properties=properties))
        assert seen() == {"T": {0: (0, 2)}}
    assert seen() == {"T": {0: (0, 2)}}

    def killed() -> None:
        rmq.open(path, "r+", config=CONFIG).put(rmq.Message("T", b"copied", properties=properties))
        os._exit(0)

    os.waitpid(fork(killed), 0)
    assert seen() == {"T": {0: (0, 3)}}
    with rmq.open(path, "r+", config=CONFIG) as writer:
        assert writer.topics() == seen() == {"T": {0: (0, 3)}}
