# SPDX-License-Identifier: Apache-2.0
"""`rmq info` and store.info(): who wrote a store, how it was left, what of its log the queues and the index cover."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import oracle
import pytest
from commandline import assert_error, call, good
from conftest import CRASH_NAMES, GOLDEN_NAMES, Golden, copy_store, digests, message_of
from forks import lock_of_a_broker

import rmq

NOW = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=30)  # fmt: skip
RANGE = re.compile(r"RocketMQ (\d+)\.(\d+)\.(\d+) (?:to (\d+)\.(\d+)\.(\d+)|or (later|earlier))")


def info(path: Path) -> dict[str, Any]:
    (row,) = good("info", path).rows
    return row


def shown(path: Path) -> dict[str, str]:
    """The lines of the screen by their names."""
    lines: dict[str, str] = {}
    for line in good("info", path, "-o", "table").out.rstrip("\n").split("\n"):
        name, text = line[:13].strip(), line[13:]
        if name:
            lines[name] = text
        else:
            lines[list(lines)[-1]] += f" {text}"
    return lines


def contains(generation: str, version: str) -> bool:
    """Whether the releases that a sentence names contain one; a sentence of another form contains none."""
    found = RANGE.fullmatch(generation)
    if not found:
        return generation == "RocketMQ 4.x or 5.x"
    numbers = [int(text) for text in found.groups()[:6] if text is not None]
    first, last, one = tuple(numbers[:3]), tuple(numbers[3:]), tuple(int(text) for text in version.split("."))
    if found[7] == "earlier":
        return one <= first
    return first <= one and (not last or one <= last)


@pytest.fixture
def copy(small_golden: Golden, tmp_path: Path) -> Path:
    return copy_store(small_golden.directory / "store", tmp_path / "s")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """60 messages of rmq, one every second."""
    ticks = iter(range(NOW, NOW + 10**6, 1000))
    with rmq.open(tmp_path / "own", "a", config=CONFIG, clock=lambda: next(ticks)) as store:
        for i in range(60):
            store.put(rmq.Message("T", b"%d" % i, keys=f"k{i}", queue_id=i % 2))
    return tmp_path / "own"


# ---- who wrote it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "part"), [*((name, "store") for name in GOLDEN_NAMES),
                                            *((name, "crash") for name in CRASH_NAMES)])  # fmt: skip
def test_the_generation_of_a_brokers_store_contains_its_release(golden_stores: dict[str, Golden], name: str,
                                                                part: str) -> None:  # fmt: skip
    golden = golden_stores[name]
    path = golden.directory / part
    row = info(path)
    assert row["written_by"] == "RocketMQ"
    assert contains(row["generation"], golden.config["rocketmq_version"]), row
    assert row["signs"], "a generation has its reasons"
    lines = shown(path)
    assert (lines["written by"], lines["signs"]) == (row["generation"], "; ".join(row["signs"]))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("abort.bak",), ("compaction",), ("checkpoint",), ("lock",), ("index",), ("config",),
                                   ("abort.bak", "compaction", "lock", "checkpoint", "config")])  # fmt: skip
def test_what_a_backup_left_out_is_no_sign_of_another_release(copy: Path, small_golden: Golden,
                                                              names: tuple[str, ...]) -> None:  # fmt: skip
    for name in names:
        path = copy / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    row = info(copy)
    assert contains(row["generation"], small_golden.config["rocketmq_version"]), (row["generation"], row["signs"])


@pytest.mark.slow
def test_later_releases_are_told_by_what_they_leave(copy: Path) -> None:
    (copy / "rocksdbstore").mkdir()
    (copy / "kvStore").mkdir()
    assert info(copy)["generation"].startswith("RocketMQ 5.4.0 or later")
    assert {"rocksdbstore", "kvStore"} <= set(info(copy)["others"])
    assert not [finding for finding in rmq.verify(copy) if finding.kind == "name"]
    with (copy / "checkpoint").open("r+b") as file:
        os.pwrite(file.fileno(), (100).to_bytes(8, "big"), 40)
    assert info(copy)["generation"].startswith("RocketMQ 5.5.0 or later")


@pytest.mark.parametrize("release", ["4.7.0", "4.9.8", "5.3.3"])
def test_a_store_of_rmq_says_so_and_after_which_release(tmp_path: Path, release: str) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, rocketmq_version=release)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        store.put(rmq.Message("T", b"x"))
    assert (info(tmp_path / "s")["written_by"], info(tmp_path / "s")["generation"]) == ("rmq", f"as RocketMQ {release}")
    assert shown(tmp_path / "s")["written by"] == f"rmq, as RocketMQ {release}"


@pytest.mark.slow
def test_a_brokers_store_in_which_rmq_wrote_names_both(copy: Path, small_golden: Golden) -> None:
    before, release = info(copy)["generation"], small_golden.config["rocketmq_version"]
    with rmq.open(copy, "r+", config=small_golden.store_config) as store:
        store.put(rmq.Message("T", b"x"))
    assert info(copy)["written_by"] == "RocketMQ and rmq"
    assert shown(copy)["written by"] == f"RocketMQ and rmq, {before}, written here as {release}"


# ---- how it was left -------------------------------------------------------------------------------------


def test_a_brokers_store_was_closed_cleanly_or_was_not(small_golden: Golden) -> None:
    assert info(small_golden.directory / "store")["state"] == "closed"
    assert shown(small_golden.directory / "store")["state"] == "closed cleanly"
    assert info(small_golden.directory / "crash")["state"] == "not closed"
    assert shown(small_golden.directory / "crash")["state"].startswith("not closed: its writer was killed")


def test_a_store_that_a_writer_holds_is_open_and_its_copy_was_not_closed(own: Path, tmp_path: Path) -> None:
    assert info(own)["state"] == "closed"
    with rmq.open(own, "r+") as store:
        store.put(rmq.Message("T", b"new"))
        row = info(own)
        assert (row["state"], row["message_count"]) == ("open", 61)
        shutil.copytree(own, tmp_path / "taken")
        assert info(tmp_path / "taken")["state"] == "not closed"
    assert info(own)["state"] == "closed"


@contextmanager
def broker(path: Path) -> Iterator[None]:
    """One runs on a store."""
    (path / "abort").touch()
    with lock_of_a_broker(path):
        yield


@pytest.mark.slow
def test_a_store_that_a_broker_runs_on_is_open(copy: Path) -> None:
    with broker(copy):
        assert info(copy)["state"] == "open"
        done = call("ingest", copy, "-", "--format", "jsonl", "--topic", "T", input=b"{}")
        assert_error(done, 4, str(copy), "process")
    assert info(copy)["state"] == "not closed"


@pytest.mark.slow
def test_info_changes_nothing(small_golden: Golden, tmp_path: Path) -> None:
    for part in ("store", "crash"):
        path = copy_store(small_golden.directory / part, tmp_path / part)
        before = digests(path, ".")
        info(path)
        assert digests(path, ".") == before


# ---- what it holds ---------------------------------------------------------------------------------------


def test_counts_bounds_and_times_are_those_of_the_store(golden: Golden) -> None:
    path = golden.directory / "store"
    row = info(path)
    records = oracle.read_records(path)
    with rmq.open(path) as store:
        queues = [bounds for topic in store.topics().values() for bounds in topic.values()]
        assert row["topic_count"] == len(store.topics())
    assert (row["queue_count"], row["message_count"]) == (len(queues), sum(high - low for low, high in queues))
    assert (row["min_phy_offset"], row["max_phy_offset"]) == (golden.answers["min_phy_offset"],
                                                              golden.answers["max_phy_offset"])  # fmt: skip
    times = [record.store_timestamp for record in records]
    assert row["begin_timestamp"] == iso(times[0])
    assert row["end_timestamp"] == iso(max(times[-len(queues):]))
    geometry = ("mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num", "max_index_num")
    assert [row[name] for name in geometry] == [getattr(golden.store_config, name) for name in geometry]
    assert (row["path"], row["segment_count"]) == (str(path), len(list((path / "commitlog").iterdir())))
    headers = golden.answers["index"]
    assert (row["index_file_count"], row["index_entry_count"]) == \
        (len(headers), sum(header["index_count"] - 1 for header in headers))  # fmt: skip


def iso(ms: int) -> str:
    second, rest = divmod(ms, 1000)
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def test_a_screen_for_people_and_exact_rows_for_programs(own: Path) -> None:
    row, lines = info(own), shown(own)
    assert lines["messages"] == "60 in 2 queues of 1 topic"
    size = row["max_phy_offset"]
    assert lines["log"] == f"{size:,} bytes ({size / 1000:.2f} kB) in 2 segments, phy offsets 0 to {size:,}"
    assert lines["times (UTC)"] == "2023-11-14 22:13:20.000 to 2023-11-14 22:14:19.000"
    assert lines["store"].replace(" ", "") == str(own)  # a long line is broken
    table = {line["name"]: line["value"] for line in good("info", own, "-o", "csv").table}
    assert table.keys() == row.keys()
    assert all(str(row[name]) == table[name] for name in row if not isinstance(row[name], list))
    with rmq.open(own) as store:
        found = store.info()
        assert {name: value for name, value in row.items() if name in vars(found) and "timestamp" not in name} == \
            {name: json.loads(json.dumps(value)) for name, value in vars(found).items()
             if name in row and "timestamp" not in name}  # fmt: skip
        assert (found.begin_timestamp, found.end_timestamp) == (NOW, NOW + 59_000)


def test_a_store_of_half_messages_alone_ends_with_its_last(tmp_path: Path) -> None:
    """They stand in no queue, and there are more than info takes a look at."""
    clock = iter(range(NOW, NOW + 10**6, 1000))
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: next(clock)) as store:
        times = [store.put(rmq.Message("t", b"half", sys_flag=0x4)).store_timestamp for _ in range(200)]
        found = store.info()
    assert (found.begin_timestamp, found.end_timestamp, found.message_count) == (times[0], times[-1], 0)


def test_an_empty_store(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "a", config=CONFIG).close()
    row, lines = info(tmp_path / "s"), shown(tmp_path / "s")
    assert (row["message_count"], row["begin_timestamp"], row["end_timestamp"]) == (0, None, None)
    assert lines["times (UTC)"] == "no messages"
    assert lines["messages"] == "0 in 0 queues of 0 topics"
    assert "%" not in lines["index"]
    for verb in (["topics"], ["topics", "-o", "table"], ["topics", "-o", "csv"]):
        assert good(verb[0], tmp_path / "s", *verb[1:]).out.count("\n") <= 1


# ---- what the queues and the index cover -----------------------------------------------------------------


def test_a_closed_store_is_covered(small_golden: Golden) -> None:
    row, lines = info(small_golden.directory / "store"), shown(small_golden.directory / "store")
    assert (row["units_behind"], row["unindexed"], row["unindexed_size"]) == (0, [], 0)
    assert lines["queues"] == "cover the whole log"
    assert lines["index"].endswith("covers the whole log")


def test_the_index_of_a_crash_copy_ends_with_its_last_full_file(small_golden: Golden) -> None:
    path = small_golden.directory / "crash"
    row, lines = info(path), shown(path)
    full = [header for header in index_headers(path) if header[1] == small_golden.config["index_entries"]]
    begin, end = max(header[0] for header in full), small_golden.answers["max_phy_offset"]
    assert row["unindexed"] == [[begin, end]]
    assert row["unindexed_size"] == end - begin
    assert f"no file covers {end - begin:,} bytes ({(end - begin) / 1000:.1f} kB, " in lines["index"]
    assert f"{(end - begin) / end:.1%} of the log): queries scan them" in lines["index"]


def index_headers(path: Path) -> list[tuple[int, int]]:
    """(end phy offset, index count) of each index file."""
    heads = [file.read_bytes()[:40] for file in sorted((path / "index").iterdir())]
    return [(values[3], values[5]) for values in (struct.unpack(">qqqqii", head) for head in heads)]


@pytest.mark.slow
def test_a_store_without_an_index_is_scanned(copy: Path) -> None:
    shutil.rmtree(copy / "index")
    row = info(copy)
    assert (row["unindexed"], row["index_file_count"]) == ([[0, row["max_phy_offset"]]], 0)
    assert "100.0% of the log" in shown(copy)["index"]


@pytest.mark.slow
def test_index_files_in_the_middle_that_are_lost_are_a_gap(copy: Path) -> None:
    files = sorted((copy / "index").iterdir())
    ends = [end for end, _ in index_headers(copy)]
    files[5].unlink()
    ((begin, end),) = info(copy)["unindexed"]
    assert begin <= ends[4] + 8192
    assert ends[5] <= end <= ends[5] + 8192
    assert begin < end


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["all", "last files"])
def test_queues_that_are_lost_are_derived_and_counted(copy: Path, lost: str) -> None:
    whole = info(copy)
    if lost == "all":
        shutil.rmtree(copy / "consumequeue")
    for queue in (copy / "consumequeue").glob("*/*"):
        for file in sorted(queue.iterdir())[1:][-1:]:
            file.unlink()
    missing = whole["message_count"] - sum(len(units) for units in oracle.read_queues(copy).values())
    assert missing > 0
    row = info(copy)
    names = ("topic_count", "queue_count", "message_count")
    assert [row[name] for name in names] == [whole[name] for name in names]
    assert row["units_behind"] == missing
    assert shown(copy)["queues"] == f"{missing:,} messages not in the files of the queues, derived from the log"


def test_what_a_writer_has_not_yet_put_into_the_queues_is_behind(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, flush_interval_commit_log=3_600_000)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        for i in range(5):
            store.put(rmq.Message("T", b"%d" % i, keys=f"k{i}"))
        row = info(tmp_path / "s")
        assert row["message_count"] == 5
        assert row["units_behind"] in (0, 5)
        assert len(good("cat", tmp_path / "s", "T").rows) == 5


def test_pieces_that_recovery_cut_are_named(own: Path) -> None:
    (own / "abort").write_text("0")
    (log,) = [path for path in (own / "commitlog").iterdir() if path.name.endswith("4096")]
    end = info(own)["max_phy_offset"]
    with open(log, "r+b") as file:
        file.seek(end - 4096)
        file.write(b"torn" * 20)
    rmq.open(own, "r+").close()
    row = info(own)
    assert row["max_phy_offset"] == end
    assert row["cut_files"] == [path.name for path in (own / "rmq/cut").glob("*.bin")]
    assert shown(own)["kept"] == "1 piece that recovery cut off, in rmq/cut/"


@pytest.mark.parametrize("name", ["timerwheel", "consumequeue_ext"])
def test_parts_that_are_not_read_are_named(own: Path, name: str) -> None:
    (own / name).mkdir()
    (own / name / "x").write_bytes(b"x")
    assert name in info(own)["others"]
    assert name in shown(own)["not read"]


@pytest.mark.parametrize("name", ["batchconsumequeue", "epochFileCheckpoint"])
def test_parts_that_are_read_are_not_named_among_the_others(own: Path, name: str) -> None:
    (own / name).mkdir()
    assert info(own)["others"] == []
    assert "not read" not in shown(own)


@pytest.mark.slow
def test_messages_of_a_golden_store_put_again_are_counted_alike(small_golden: Golden, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=small_golden.store_config) as store:
        for line in small_golden.stored[:200]:
            store.put(message_of(line))
    row = info(tmp_path / "s")
    assert row["message_count"] == sum(len(units) for units in oracle.read_queues(tmp_path / "s").values())
    assert row["topic_count"] == len(list((tmp_path / "s/consumequeue").iterdir()))


def test_queues_may_be_made_while_a_store_is_described(tmp_path: Path) -> None:
    """As by another thread's put, at any time."""
    class Queue:
        tail_size = 0

        @property
        def max_offset(self) -> int:
            queues["T", len(queues)] = self  # type: ignore[assignment]
            return 0

    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=4096)) as store:
        store.put(rmq.Message("T", b"body"))
        queues = store._queues.queues
        queues["T", 1] = Queue()  # type: ignore[assignment]
        assert store.info().message_count == 1
        for key in list(queues)[1:]:
            del queues[key]


def test_a_writer_may_close_while_a_store_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = rmq.open(tmp_path / "s", "x", config=CONFIG)
    is_file = Path.is_file

    def closing(path: Path) -> bool:
        found = is_file(path)
        if path.name == "abort":
            writer.close()
        return found

    monkeypatch.setattr(Path, "is_file", closing)
    with rmq.open(tmp_path / "s") as reader:
        assert not [sign for sign in reader.info().signs if "abort names" in sign]
    assert writer.closed
