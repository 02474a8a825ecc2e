"""Store.clean: what goes, what stays, and that every answer afterwards is right for what is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cleaning import (
    CONFIG,
    HOUR,
    NOW,
    ROOMY,
    SEGMENT,
    SIZES,
    Disk,
    assert_left,
    clean,
    date,
    expire,
    fill,
    kinds,
    make,
    message,
    open_store,
)
from conftest import digests

import rmq


def segments(path: Path) -> list[int]:
    return sorted(int(file.name) // SEGMENT for file in (path / "commitlog").iterdir())


# ---- what expires ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "goes"), [(NOW - 1, 0), (NOW, 2), (datetime.fromtimestamp(NOW / 1000, UTC), 2)])
def test_a_segment_goes_in_the_millisecond_in_which_its_time_is_over(tmp_path: Path, now: Any, goes: int) -> None:
    make(tmp_path / "s")
    date(tmp_path / "s", HOUR, HOUR)
    with open_store(tmp_path / "s", "r+") as store:
        result = store.clean(now, file_reserved_time=1, disk_usage=ROOMY)
    assert kinds(result).count("commitlog") == goes
    assert segments(tmp_path / "s")[0] == goes


def test_a_segment_that_has_not_expired_keeps_those_behind_it(tmp_path: Path) -> None:
    make(tmp_path / "s")
    date(tmp_path / "s", HOUR, HOUR - 1, rest=9 * HOUR)
    with open_store(tmp_path / "s", "r+") as store:
        assert clean(store).min_phy_offset == SEGMENT


def test_without_a_number_the_reserved_time_is_that_of_the_config(tmp_path: Path) -> None:
    make(tmp_path / "s")
    for config, hours in ((None, 72), (rmq.StoreConfig(file_reserved_time=5), 5)):
        with open_store(tmp_path / "s", "r+", config) as store:
            date(tmp_path / "s", hours * HOUR - 1)
            assert store.clean(NOW, disk_usage=ROOMY, dry_run=True).removed == ()
            date(tmp_path / "s", hours * HOUR)
            (first, *_) = store.clean(NOW, disk_usage=ROOMY, dry_run=True).removed
            assert first.reason == f"last changed {hours} h ago or earlier"


def test_without_a_time_it_is_the_systems_whatever_clock_stamps_the_messages(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: 2**50) as store:
        fill(store)
        assert store.clean(disk_usage=ROOMY).removed == ()
        for file in (tmp_path / "s/commitlog").iterdir():
            os.utime(file, (0, 0))
        assert store.clean(disk_usage=ROOMY).min_phy_offset > 0


@pytest.mark.parametrize("now", [0, NOW - 10 * HOUR, -(2**63)])
def test_when_the_clock_has_gone_back_nothing_expires(tmp_path: Path, now: int) -> None:
    make(tmp_path / "s")
    date(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        assert store.clean(now, file_reserved_time=0, disk_usage=ROOMY).removed == ()


@pytest.mark.slow
def test_at_most_ten_segments_go_unless_more_are_asked_for(tmp_path: Path) -> None:
    messages = make(tmp_path / "s", 500)
    date(tmp_path / "s", rest=HOUR)
    with open_store(tmp_path / "s", "r+") as store:
        result = store.clean(NOW, file_reserved_time=1, disk_usage=ROOMY)
        assert (result.min_phy_offset, result.truncated) == (10 * SEGMENT, True)
        result = clean(store, limit=1)
        assert (result.min_phy_offset, result.truncated) == (11 * SEGMENT, True)
        last = store.max_phy_offset // SEGMENT
        result = clean(store, limit=last - 11)
        assert (result.min_phy_offset, result.truncated) == (last * SEGMENT, False)
        assert_left(store, messages, last * SEGMENT)


def test_the_last_segment_never_goes(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    date(tmp_path / "s", rest=9 * HOUR)
    with open_store(tmp_path / "s", "r+") as store:
        low = messages[-1].phy_offset // SEGMENT * SEGMENT
        assert clean(store, disk_usage=Disk(100, 0)).min_phy_offset == low
        assert clean(store, disk_usage=Disk(100, 0)).removed == ()
        assert_left(store, messages, low)


def test_a_store_of_one_segment_or_none_keeps_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        assert clean(store, file_reserved_time=0).removed == ()
        messages = fill(store, 5)
        assert clean(store, file_reserved_time=0, disk_usage=Disk(100, 0)).removed == ()
        assert_left(store, messages, 0)


def test_an_empty_segment_behind_the_last_byte_does_not_give_that_up(tmp_path: Path) -> None:
    """A put that a full disk stopped may leave one."""
    messages = make(tmp_path / "s")
    with open_store(tmp_path / "s", "r+") as store:
        low = store.max_phy_offset // SEGMENT * SEGMENT
        store._log.following.append(low + SEGMENT)
        date(tmp_path / "s", rest=HOUR)
        assert clean(store).min_phy_offset == low
        assert_left(store, messages, low)


# ---- a full disk -----------------------------------------------------------------------------------------

TB = 10**12


@pytest.mark.parametrize(
    ("used", "fields", "goes"),
    [
        (75, {}, False),  # RocketMQ's disk_max_used_space_ratio only says when what has expired goes
        (85, {}, False),
        (86, {}, True),
        (95, {}, True),
        (86, {"clean_file_forcibly_enable": False}, False),
        (86, {"disk_space_clean_forcibly_ratio": 99}, True),  # RocketMQ's bounds: 30 to 85
        (31, {"disk_space_clean_forcibly_ratio": 1}, True),
        (30, {"disk_space_clean_forcibly_ratio": 1}, False),
        (50, {"disk_space_warning_level_ratio": 40}, True),
        (36, {"disk_space_warning_level_ratio": 1}, True),  # 35 to 90
        (35, {"disk_space_warning_level_ratio": 1}, False),
        (80, {"disk_max_used_space_ratio": 10}, False),
    ],
)
def test_above_rocketmqs_level_segments_go_that_have_not_expired(
    tmp_path: Path, used: int, fields: dict[str, Any], goes: bool
) -> None:
    make(tmp_path / "s", 50)
    date(tmp_path / "s")
    with open_store(tmp_path / "s", "r+", rmq.StoreConfig(**fields)) as store:
        result = clean(store, disk_usage=Disk(used * TB, (100 - used) * TB), limit=10)
        assert ("commitlog" in kinds(result)) == goes
        if goes:
            assert "% full" in result.removed[0].reason


def test_above_the_level_no_more_goes_than_brings_the_disk_back_to_it(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    date(tmp_path / "s", HOUR)
    size = 4096  # of a segment on this disk
    disk = Disk(90 * size, 10 * size)
    with open_store(tmp_path / "s", "r+") as store:
        assert clean(store, disk_usage=disk, max_used_percent=100, dry_run=True).min_phy_offset == SEGMENT
        result = clean(store, disk_usage=disk, max_used_percent=87)
        assert result.min_phy_offset == 3 * SEGMENT
        reasons = [file.reason for file in result.removed[:3]]
        assert reasons == ["last changed 1 h ago or earlier", "disk 89 % full, over 87 %", "disk 88 % full, over 87 %"]
        assert result.disk_used_percent == 90 - sum(file.size for file in result.removed) // size
        assert_left(store, messages, 3 * SEGMENT)


def test_use_is_rounded_up_as_rocketmq_rounds_it(tmp_path: Path) -> None:
    make(tmp_path / "s", 10)
    with rmq.open(tmp_path / "s") as store:
        for disk, percent in ((Disk(850 * TB, 150 * TB), 85), (Disk(850 * TB + 1, 150 * TB), 86), (Disk(0, 0), 0)):
            assert clean(store, disk_usage=disk, dry_run=True).disk_used_percent == percent


# ---- what is left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [4, *(pytest.param(low, marks=pytest.mark.slow) for low in (1, 2, 3, 5))])
def test_every_answer_is_right_for_what_is_left(tmp_path: Path, low: int) -> None:
    """In the writer, in readers that were there before and come after, and when it is opened again."""
    path, low = tmp_path / "s", low * SEGMENT
    messages = make(path)
    with rmq.open(path) as fresh, rmq.open(path) as used:
        assert_left(used, messages, 0)
        with open_store(path, "r+") as store:
            expire(path, low)
            result = clean(store)
            for opened in (store, used, fresh):
                assert_left(opened, messages, low)
            messages += fill(store, 60, 200)
            for opened in (store, used, fresh):
                assert_left(opened, messages, low)
    assert result.min_phy_offset == low
    assert kinds(result).count("commitlog") == low // SEGMENT
    assert low < 4 * SEGMENT or set(kinds(result)) == {"commitlog", "consumequeue", "index"}
    for mode in ("r", "r+", "r"):
        with rmq.open(path, mode) as store:
            assert_left(store, messages, low)


def test_a_queue_whose_messages_are_all_gone_goes_on_where_it_was(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    low = 4 * SEGMENT
    assert max(item.phy_offset for item in messages if item.topic == "old") < low
    with open_store(tmp_path / "s", "r+") as store:
        expire(tmp_path / "s", low)
        clean(store)
        assert store.topics()["old"] == {0: (10, 10)}
        assert store.pull("old", 0, 10).status is rmq.PullStatus.OFFSET_OVERFLOW_ONE
    with open_store(tmp_path / "s", "r+") as store:
        assert store.put(rmq.Message("old", b"again")).queue_offset == 10
        assert [item.body for item in store.pull("old", 0, 10).messages] == [b"again"]


def test_a_file_that_straddles_the_cut_stays(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    low = 3 * SEGMENT
    expire(tmp_path / "s", low)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
        begins = [(file.begin_phy_offset, file.end_phy_offset) for file in store._index.files]
        assert begins[0][0] < low <= begins[0][1]
        starts = [queue.first_offset for queue in store._queues.queues.values()]
        assert any(start < queue.min_offset for start, queue in zip(starts, store._queues.queues.values(), strict=True))
        assert_left(store, messages, low)
        raw = store.select_phy_offset_many("T", ["all"], max_num=64)[0].as_py()
        assert raw, "RocketMQ's raw answers"


def test_without_an_index_it_is_cleaned_and_may_get_one_later(tmp_path: Path) -> None:
    messages = make(tmp_path / "s", config=rmq.StoreConfig(**SIZES, message_index_enable=False))
    expire(tmp_path / "s", 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+", rmq.StoreConfig(message_index_enable=False)) as store:
        clean(store)
        assert_left(store, messages, 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        assert_left(store, messages, 3 * SEGMENT)
        assert store.query("T", "all").scanned_size == 0


def test_a_lost_queue_is_derived_from_what_is_left(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    expire(tmp_path / "s", 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
    for file in (tmp_path / "s/consumequeue/T/1").iterdir():
        file.unlink()
    with rmq.open(tmp_path / "s") as store:
        assert_left(store, messages, 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        assert_left(store, messages, 3 * SEGMENT)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rmq/marks", "rmq/meta.json", "rmq/manifest.json", "rmq", "index"])
def test_our_own_directory_and_the_index_may_be_lost_after_cleaning(tmp_path: Path, lost: str) -> None:
    messages = make(tmp_path / "s", 199)
    expire(tmp_path / "s", 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
    before = digests(tmp_path / "s", "commitlog", "consumequeue")
    path = tmp_path / "s" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for mode in ("r", "r+", "r"):
        with open_store(tmp_path / "s", mode, CONFIG) as store:
            assert_left(store, messages, 3 * SEGMENT)
    assert digests(tmp_path / "s", "commitlog", "consumequeue") == before


def test_a_repair_after_cleaning_keeps_what_is_left(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    expire(tmp_path / "s", 3 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
    with rmq.open(tmp_path / "s", "r+", repair=True) as store:
        assert_left(store, messages, 3 * SEGMENT)


def test_a_file_whose_units_or_entries_contradict_its_end_stays(tmp_path: Path) -> None:
    """A last unit, and the end of a header, that damage has made small."""
    make(tmp_path / "s")
    low = 4 * SEGMENT
    expire(tmp_path / "s", low)
    with rmq.open(tmp_path / "s") as store:
        told = clean(store, dry_run=True)
        queue = store._queues.queues["T", 3]
        units = queue.files.first(queue.count_below(low) + 1)[-1]
        entries = store._index.files[store._index.count_below(low)].path
    for path, position in ((units, 180), (entries, 24)):
        assert str(path) not in {file.path for file in told.removed}
        with path.open("r+b") as file:
            file.seek(position)
            assert int.from_bytes(file.read(8), "big") >= low
            file.seek(position)
            file.write(bytes(8))
    with rmq.open(tmp_path / "s") as store:
        assert clean(store, dry_run=True).removed == told.removed


# ---- queues without messages -----------------------------------------------------------------------------


def test_queues_without_messages_go_when_that_is_asked_and_begin_again(tmp_path: Path) -> None:
    messages = make(tmp_path / "s")
    low = 4 * SEGMENT
    expire(tmp_path / "s", low)
    with rmq.open(tmp_path / "s") as reader, open_store(tmp_path / "s", "r+") as store:
        assert reader.topics()["old"] == {0: (0, 10)}
        clean(store)
        result = clean(store, expired_queues=True)
        assert [(Path(file.path).parent, file.reason) for file in result.removed] == [
            (tmp_path / "s/consumequeue/old/0", "queue without messages")]  # fmt: skip
        assert not (tmp_path / "s/consumequeue/old/0").exists()
        kept = [item for item in messages if item.topic != "old"]
        for opened in (store, reader):
            assert_left(opened, kept, low)
        again = store.put(rmq.Message("old", b"again", keys=["all"], uniq_key="u"))
        assert again.queue_offset == 0
        kept.append(store.lookup(again.phy_offset))
        for opened in (store, reader):
            assert_left(opened, kept, low)
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode) as store:
            assert_left(store, kept, low)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_queue_keeps_its_messages_whatever_its_last_unit_says(tmp_path: Path, is_open: bool) -> None:
    """Of a store that was closed it is derived again."""
    messages, low = make(tmp_path / "s"), 3 * SEGMENT
    expire(tmp_path / "s", low)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
        place, position = store._queues.queues["T", 3].place_of(store.topics()["T"][3][1] - 1)
    with open_store(tmp_path / "s", "r+") if is_open else contextlib.nullcontext() as store:
        with place.open("r+b") as file:
            file.seek(position)
            file.write((100).to_bytes(8, "big"))
        if store is None:
            with rmq.open(tmp_path / "s") as reader, open_store(tmp_path / "s", "r+") as writer:
                assert_left(reader, messages, low)
                assert_left(writer, messages, low)
        else:
            removed = clean(store, expired_queues=True).removed
            assert [Path(file.path).parent.parent.name for file in removed] == ["old"]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_units_lost_where_a_queue_begins_are_an_error_and_hide_no_message(tmp_path: Path, mode: str) -> None:
    make(tmp_path / "s")
    expire(tmp_path / "s", 4 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:
        clean(store)
        low, high = store.topics()["T"][3]
        place, position = store._queues.queues["T", 3].place_of(low)
    with place.open("r+b") as file:
        file.seek(position)
        file.write(bytes(2 * 20))
    with rmq.open(tmp_path / "s", mode) as store:
        assert store.topics()["T"][3] == (low, high)
        with pytest.raises(rmq.CorruptFileError) as caught:
            store.pull("T", 3, low)
        assert (caught.value.path, caught.value.offset) == (str(place), position)


def test_a_message_that_came_meanwhile_keeps_its_queue(tmp_path: Path) -> None:
    make(tmp_path / "s")
    expire(tmp_path / "s", 4 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:

        def disk_usage(path: Path) -> Disk:
            """Asked when everything has been flushed and nothing is removed yet."""
            other = threading.Thread(target=store.put, args=[rmq.Message("old", b"again")])
            other.start()
            other.join()
            return ROOMY

        clean(store, expired_queues=True, disk_usage=disk_usage)
        first, following = store.topics()["old"][0]
        assert first == 10
        assert len(store.pull("old", 0, 10).messages) == following - first > 0


def test_a_queue_that_goes_begins_again_only_when_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put of its topic waits meanwhile: its file would have the name of one that is being removed."""
    make(tmp_path / "s")
    expire(tmp_path / "s", 4 * SEGMENT)
    with open_store(tmp_path / "s", "r+") as store:

        def put() -> None:
            store.put(rmq.Message("old", b"again"))
            answers.append(store.topics()["old"])

        threads: list[threading.Thread] = []
        answers, real = [], os.unlink

        def unlink(path: Path) -> None:
            if "/old/" in str(path):
                threads.append(threading.Thread(target=put))
                threads[-1].start()
                threads[-1].join(0.1)
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            clean(store, expired_queues=True)
        threads[0].join()
        assert answers == [{0: (0, 1)}]
    for mode in ("r", "r+"):
        with open_store(tmp_path / "s", mode) as store:
            assert store.topics()["old"] == {0: (0, 1)}
            assert [item.body for item in store.pull("old").messages] == [b"again"]


def test_system_topics_keep_their_queues(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        store.put(rmq.Message("RMQ_SYS_TRANS_OP_HALF_TOPIC", b"x"))
        store.put(rmq.Message("mine", b"x"))
        fill(store)
        expire(tmp_path / "s", 2 * SEGMENT)
        clean(store, expired_queues=True)
        assert store.topics()["RMQ_SYS_TRANS_OP_HALF_TOPIC"] == {0: (1, 1)}
        assert "mine" not in store.topics()


# ---- a dry run, wrong arguments --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_dry_run_tells_what_would_go_and_changes_nothing(tmp_path: Path, mode: str) -> None:
    messages = make(tmp_path / "s")
    expire(tmp_path / "s", 4 * SEGMENT)
    with rmq.open(tmp_path / "s", mode) as store:
        before, listed = digests(tmp_path / "s", "."), sorted(tmp_path.rglob("*"))
        told = clean(store, dry_run=True, expired_queues=True)
        assert (digests(tmp_path / "s", "."), sorted(tmp_path.rglob("*"))) == (before, listed)
        assert_left(store, messages, 0)
    with open_store(tmp_path / "s", "r+") as store:
        done = clean(store, expired_queues=True)
    assert told.dry_run
    assert not done.dry_run
    for name in ("removed", "freed_bytes", "min_phy_offset", "disk_used_percent", "truncated"):
        assert getattr(told, name) == getattr(done, name), name
    assert done.freed_bytes == sum(file.size for file in done.removed) > 0
    assert not any(os.path.exists(file.path) for file in done.removed)


def test_a_reader_may_not_clean(tmp_path: Path) -> None:
    make(tmp_path / "s", 20)
    with rmq.open(tmp_path / "s") as store, pytest.raises(rmq.StoreReadOnlyError):
        store.clean()
    for arguments in ({}, {"dry_run": True}):
        with pytest.raises(rmq.StoreClosedError):
            store.clean(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"now": "today"}, TypeError, "now"),
        ({"now": datetime(2026, 1, 1)}, ValueError, "now"),
        ({"limit": 0}, ValueError, "limit"),
        ({"limit": True}, TypeError, "limit"),
        ({"file_reserved_time": -1}, ValueError, "file_reserved_time"),
        ({"file_reserved_time": 1.5}, TypeError, "file_reserved_time"),
        ({"max_used_percent": 101}, ValueError, "max_used_percent"),
        ({"max_used_percent": "80"}, TypeError, "max_used_percent"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], name: str
) -> None:
    with open_store(tmp_path / "s", "x", CONFIG) as store:
        store.put(message(0))
        with pytest.raises(error, match=name):
            store.clean(**arguments)
