# SPDX-License-Identifier: Apache-2.0
"""Copies of stores of which a part is damaged or missing: what can be read of the rest, and what tells of the part."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from agreement import questions
from click.testing import CliRunner
from conftest import Golden, copy_store
from rocketmq import RELEASES, RocketMQ

import rmq
from rmq.cli import DAMAGE, main

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=200, max_hash_slot_num=100,
                         max_index_num=1000)  # fmt: skip
COUNT = 60
UNIQ = "AC11000100002A9F000000000000002A"


@pytest.fixture(params=["closed", "not closed", "a broker's"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Topics A and B of one queue each, six queue files of ten units."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for number in range(COUNT):
            for topic in "AB":
                store.put(rmq.Message(topic, f"{topic}{number}".encode(), keys=f"k{number}",
                                      uniq_key=UNIQ if (topic, number) == ("A", 7) else None))  # fmt: skip
    if request.param == "not closed":
        (tmp_path / "s/abort").touch()
    if request.param == "a broker's":
        shutil.rmtree(tmp_path / "s/rmq")
    return tmp_path / "s"


def queue_file(store: Path, number: int) -> Path:
    return store / "consumequeue/A/0" / f"{number * 200:020d}"


WAYS: dict[str, Callable[[Path], Path]] = {}


def way(damage: Callable[[Path], Path]) -> Callable[[Path], Path]:
    WAYS[damage.__name__] = damage
    return damage


@way
def cut_short(store: Path) -> Path:
    file = queue_file(store, 2)
    file.write_bytes(file.read_bytes()[:90])
    return file


@way
def last_cut_short(store: Path) -> Path:
    file = queue_file(store, 5)
    file.write_bytes(file.read_bytes()[:90])
    return file


@way
def misnamed(store: Path) -> Path:
    return queue_file(store, 2).rename(store / "consumequeue/A/0/backup")


@pytest.mark.parametrize("damage", WAYS)
def test_a_damaged_queue_file_stops_only_what_needs_queues(copy: Path, damage: str) -> None:
    damaged = WAYS[damage](copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with rmq.open(copy, config=CONFIG) as store:
        table = store.scan(columns=["topic", "body", "phy_offset"]).read_all()
        assert table["body"].to_pylist() == [f"{topic}{number}".encode() for number in range(COUNT) for topic in "AB"]
        assert [message.body for message in store.query("A", "k7")] == [b"A7"]
        assert store.query_many("B", ["k1", "k2"]).table["body"].to_pylist() == [b"B1", b"B2"]
        assert store.lookup(UNIQ).body == b"A7"
        assert store.lookup(table["phy_offset"][3].as_py()).body == b"B1"
        asks: list[Callable[[], Any]] = [
            store.topics, store.info, lambda: store.pull("A"), lambda: store.units("A", 0, 0, 1),
            lambda: store.search_offset("A", 0, 0), lambda: store.table("queues"), lambda: store.table("topics"),
            lambda: store.lookup(("A", 0, 0)), lambda: store.clean(dry_run=True)]  # fmt: skip
        for ask in asks:
            for _ in range(2):
                with pytest.raises(rmq.CorruptFileError) as caught:
                    ask()
                assert caught.value.path == str(damaged)
        with pytest.raises(rmq.CorruptFileError, match="`rmq rebuild` makes the queues again"):
            store.pull("B")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    with pytest.raises(rmq.CorruptFileError) as caught:
        rmq.open(copy, "r+", config=CONFIG)
    assert caught.value.path == str(damaged)


def test_a_reader_reads_a_queue_again_when_its_file_is_put_back(copy: Path) -> None:
    sound = queue_file(copy, 2).read_bytes()
    damaged = cut_short(copy)
    with rmq.open(copy, config=CONFIG) as store:
        for _ in range(2):
            with pytest.raises(rmq.CorruptFileError, match="file has 90 bytes"):
                store.pull("A", 0, 20, 1)
        damaged.write_bytes(sound)
        assert [message.body for message in store.pull("A", 0, 20, 1).messages] == [b"A20"]
        assert store.topics() == {"A": {0: (0, COUNT)}, "B": {0: (0, COUNT)}}


@pytest.mark.parametrize("damage", WAYS)
def test_the_command_line_finds_beside_a_damaged_queue_file(copy: Path, damage: str, tmp_path: Path) -> None:
    damaged = WAYS[damage](copy)
    conf = tmp_path / "broker.conf"
    conf.write_text("mappedFileSizeCommitLog=65536\nmappedFileSizeConsumeQueue=200\n")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, [arguments[0], str(copy), *arguments[1:], "--conf", str(conf)])

    found = run("query", "A", "k7", "-f", "{body}")
    assert (found.exit_code, found.stdout) == (0, "A7\n")
    assert run("query", "A", "nothing").exit_code == DAMAGE
    told = run("topics")
    assert told.exit_code == DAMAGE
    assert str(damaged) in told.stderr
    assert run("export", str(tmp_path / "out"), "--processes", "1").exit_code == 0
    assert pq.read_table(tmp_path / "out").num_rows == 2 * COUNT


def test_rebuild_makes_a_damaged_queue_again(copy: Path, tmp_path: Path) -> None:
    cut_short(copy)
    made = rmq.rebuild(copy, tmp_path / "made", config=CONFIG, processes=1)
    assert made.unit_count == 2 * COUNT
    shutil.rmtree(copy / "consumequeue")
    shutil.move(tmp_path / "made/consumequeue", copy)
    with rmq.open(copy, config=CONFIG) as store:
        assert [message.body for message in store.pull("A", 0, 20, 2).messages] == [b"A20", b"A21"]


@pytest.mark.parametrize("name", [".DS_Store", "._00000000000000000000", ".nfs000000000012d687", f".{0:020d}.Qx1f9a"])
@pytest.mark.parametrize("directory", ["commitlog", "consumequeue/A/0", "index", "."])
def test_readers_pass_over_hidden_files_and_writers_refuse_them(copy: Path, directory: str, name: str) -> None:
    with rmq.open(copy, config=CONFIG) as store:
        (copy / directory / name).write_bytes(b"left by a copy")
        for reader in (store, rmq.open(copy, config=CONFIG)):
            with reader:
                assert reader.scan().read_all().num_rows == 2 * COUNT
                assert [message.body for message in reader.pull("A", 0, 20, 1).messages] == [b"A20"]
                assert len(reader.query("A", "k7")) == 1
    if name.startswith(".nfs"):  # which goes by itself, when nobody has the file open any more
        rmq.open(copy, "r+", config=CONFIG).close()
    elif directory.startswith("co"):
        with pytest.raises(rmq.CorruptFileError, match="name is no"):
            rmq.open(copy, "r+", config=CONFIG)
    assert (copy / directory / name).read_bytes() == b"left by a copy"


def test_a_reader_of_a_directory_with_a_hidden_file_lists_it_no_more_often(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b""))
    (tmp_path / "s/commitlog/.DS_Store").touch()
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        store.scan().read_all()
        assert store._log._watch.is_unchanged(store._log.segments)


# ---- what is whole of a damaged log --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,200 messages of 300 bytes in seven segments."""
    path = tmp_path_factory.mktemp("sound") / "s"
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        store.put_many([rmq.Message("AB"[number % 2], b"%05d" % number * 60) for number in range(1200)])
    return path


def segment(store: Path, number: int) -> Path:
    return store / "commitlog" / f"{number * 65536:020d}"


def a_wrong_byte(store: Path) -> None:
    with segment(store, 2).open("r+b") as file:
        file.seek(30_000)
        file.write(b"\xff")


def a_lost_page(store: Path) -> None:
    with segment(store, 3).open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


def a_short_segment(store: Path) -> None:
    segment(store, 4).write_bytes(segment(store, 4).read_bytes()[:20_000])


def a_missing_segment(store: Path) -> None:
    segment(store, 1).unlink()


def all_of_it(store: Path) -> None:
    for damage in (a_wrong_byte, a_lost_page, a_short_segment, a_missing_segment):
        damage(store)


DAMAGES = (a_wrong_byte, a_lost_page, a_short_segment, a_missing_segment, all_of_it)


def missing(lost: Any) -> set[int]:
    return {byte for item in lost for byte in range(item.begin_phy_offset, item.end_phy_offset)}


@pytest.mark.parametrize(("processes", "split_bytes"), [(1, 1 << 30), (1, 5000),
                                                         pytest.param(2, 100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_export_that_skips_damage_is_such_a_scan(sound: Path, tmp_path: Path, damage: Callable[[Path], None],
                                                    processes: int, split_bytes: int) -> None:  # fmt: skip
    copy = copy_store(sound, tmp_path / "s")
    damage(copy)
    lost: list[rmq.LostRange] = []
    with rmq.open(copy) as store:
        rows = store.scan(on_damage="skip", lost=lost, columns=["phy_offset", "body"]).read_all()
    assert 0 < len(rows) < 1200
    options: dict[str, Any] = {"processes": processes, "split_bytes": split_bytes, "columns": ["phy_offset", "body"]}
    with pytest.raises(rmq.CorruptFileError):
        rmq.export(copy, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    done = rmq.export(copy, tmp_path / "out", on_damage="skip", **options)
    found = pq.read_table(tmp_path / "out", columns=["phy_offset", "body"]).sort_by("phy_offset")
    assert found.to_pylist() == rows.to_pylist()
    assert done.row_count == len(rows)
    assert missing(done.lost) == missing(lost)
    assert [item.begin_phy_offset for item in done.lost] == sorted(item.begin_phy_offset for item in done.lost)


@pytest.mark.parametrize("times", [{"begin": 100}, {"end": 900}, {"begin": 100, "end": 900}], ids=str)
@pytest.mark.parametrize("damage", DAMAGES)
def test_such_an_export_may_have_times(tmp_path: Path, damage: Callable[[Path], None], times: dict[str, int]) -> None:
    config, clock = rmq.StoreConfig(mapped_file_size_commit_log=65536), iter(range(1200))
    with rmq.open(tmp_path / "s", "x", config=config, clock=lambda: next(clock)) as store:
        for number in range(1200):
            store.put(rmq.Message("A", b"%05d" % number * 60))
    damage(tmp_path / "s")
    with rmq.open(tmp_path / "s") as store:
        rows = store.scan(on_damage="skip", **times).read_all().num_rows  # type: ignore[call-overload, arg-type]
    done = rmq.export(tmp_path / "s", tmp_path / "out", on_damage="skip", processes=1, begin=times.get("begin"),
                      end=times.get("end"), split_bytes=30_000)  # fmt: skip
    assert 0 < rows == done.row_count
    assert done.lost


def test_an_export_of_a_sound_store_lost_nothing(sound: Path, tmp_path: Path) -> None:
    assert rmq.export(sound, tmp_path / "out", on_damage="skip", processes=1).lost == ()
    with pytest.raises(ValueError, match="on_damage must be 'raise' or 'skip', got 'no'"):
        rmq.export(sound, tmp_path / "no", on_damage="no", processes=1)  # type: ignore[arg-type]


def test_the_command_exports_what_is_whole_and_ends_with_3(sound: Path, tmp_path: Path) -> None:
    copy = copy_store(sound, tmp_path / "s")
    a_missing_segment(copy)
    arguments = ["export", str(copy), str(tmp_path / "out"), "--processes", "1"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == DAMAGE
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(main, [*arguments, "--skip-damage"])
    assert done.exit_code == DAMAGE
    assert f"{segment(copy, 1)}: no whole record in the log's bytes 65536 to 131071: segment is missing" in done.stderr
    assert "65.5 kB of the log were left out, 1 range without a whole message" in done.stderr
    assert pq.read_table(tmp_path / "out").num_rows > 900


def test_a_closed_store_tells_that_its_last_segment_is_missing(small_golden: Golden, tmp_path: Path) -> None:
    path = copy_store(small_golden.directory / "store", tmp_path / "s")
    with rmq.open(path) as store:
        whole = store.scan(columns=["phy_offset", "topic", "queue_id", "queue_offset"]).read_all()
    missing = max((path / "commitlog").iterdir())
    missing.unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    left = whole.filter(pc.less(whole["phy_offset"], int(missing.name)))
    last = whole.slice(len(whole) - 1).to_pylist()[0]
    lost: list[rmq.LostRange] = []
    with rmq.open(path) as store:
        assert store.scan(columns=left.column_names, on_damage="skip", lost=lost).read_all() == left
        assert [(item.path, item.begin_phy_offset) for item in lost] == [(str(missing), int(missing.name))]
        with pytest.raises(rmq.CorruptFileError, match="segment is missing"):
            store.scan().read_all()
        with pytest.raises(rmq.CorruptFileError):
            store.pull(last["topic"], last["queue_id"], last["queue_offset"])
    found = rmq.verify(path)
    assert [(item.path, item.kind, item.severity) for item in found if item.severity != "note"] == \
        [(str(missing), "missing", "damage")]  # fmt: skip
    with pytest.raises(rmq.CorruptFileError, match="segment is missing") as caught:
        rmq.open(path, "r+")
    assert caught.value.path == str(missing)
    assert {file: file.read_bytes() for file in path.rglob("*") if file in before} == before
    with rmq.open(path, "r+", repair=True) as store:
        assert store.scan(columns=left.column_names).read_all() == left
    assert [item for item in rmq.verify(path) if item.severity != "note"] == []
    shutil.rmtree(path / "rmq")
    with rmq.open(path, "r+") as store:
        assert store.scan(columns=left.column_names).read_all() == left


@pytest.mark.interop
@pytest.mark.parametrize("release", RELEASES)
def test_a_log_that_rocketmq_cut_at_a_segments_end_opens(tmp_path: Path, release: str) -> None:
    config = replace(CONFIG, rocketmq_version=release)
    times = itertools.count(1_700_000_000_000, 1000)
    with rmq.open(tmp_path / "s", "x", config=config, clock=times.__next__) as store:
        results = [store.put(rmq.Message("T", bytes(1000), keys="k")) for _ in range(200)]
    shutil.rmtree(tmp_path / "s/rmq")
    lost = max((tmp_path / "s/commitlog").iterdir())
    stored = sum(result.phy_offset < int(lost.name) for result in results)
    checkpoint = tmp_path / "s/checkpoint"
    synced = struct.pack(">q", 1_700_000_000_000 + (stored - 1) * 1000)  # physicMsgTimestamp; the others were further
    checkpoint.write_bytes(synced + checkpoint.read_bytes()[8:])
    lost.unlink()
    (tmp_path / "s/abort").touch()
    judge = RocketMQ(release, tmp_path / "rocketmq")
    try:
        judge.open(tmp_path / "s", config, questions(tmp_path / "s", []))
    finally:
        judge.close()
    assert not lost.exists()
    assert (tmp_path / "s/consumequeue/T/0/00000000000000000000").exists()
    with rmq.open(tmp_path / "s") as store:
        assert store.scan().read_all().num_rows == stored
    with rmq.open(tmp_path / "s", "r+") as store:
        assert store.topics() == {"T": {0: (0, stored)}}


@pytest.mark.parametrize(("state", "which", "size"), [
    *itertools.product(["closed", "not closed", "killed"], ["first", "middle", "last", "only"],
                       [1, 39, 700, 2439, 2441, 5000]),
    *itertools.product(["a broker's"], ["first", "middle", "last"], [1, 39, 700, 2439, 2441])])  # fmt: skip
def test_an_index_file_that_was_cut_short_costs_no_answer(tmp_path: Path, state: str, which: str, size: int) -> None:
    config = replace(CONFIG, max_index_num=1000 if which == "only" else 100)
    length = 40 + 4 * config.max_hash_slot_num + 20 * config.max_index_num
    path = tmp_path / "s"
    with rmq.open(path, "x", config=config) as store:
        store.put_many([rmq.Message("T", b"%d" % number, keys=f"k{number}") for number in range(250)])
        if state == "killed":
            store.flush()
            copy_store(path, tmp_path / "killed")
    path = tmp_path / "killed" if state == "killed" else path
    if state == "not closed":
        (path / "abort").touch()
    if state == "a broker's":
        shutil.rmtree(path / "rmq")
    files = sorted((path / "index").iterdir())
    assert len(files) == (1 if which == "only" else 3)
    file = files[{"first": 0, "middle": 1, "last": -1, "only": 0}[which]]
    sound = file.read_bytes()
    assert len(sound) == length
    os.truncate(file, size if size < 2439 else length + size - 2440)
    keys, bodies = [f"k{number}" for number in range(250)], [b"%d" % number for number in range(250)]
    with rmq.open(path) as store:
        assert [message.body for key in keys for message in store.query("T", key)] == bodies
        assert store.query_many("T", keys).table["body"].to_pylist() == bodies
    assert file.stat().st_size != length
    with rmq.open(path, "r+") as store:
        assert store.query_many("T", keys, complete=False).table["body"].to_pylist() == bodies
    assert rmq.verify(path).is_sound
    kept = [kept.read_bytes() for kept in (path / "rmq/cut").iterdir()]
    assert any(sound[:min(size, 39)] in piece for piece in kept)
    with rmq.open(path, "r+") as store:
        store.put(rmq.Message("T", b"new", keys="k1"))
        assert [message.body for message in store.query("T", "k1")] == [b"new", b"1"]


def test_index_files_all_of_another_length_than_meta_json_says_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x", config=replace(CONFIG, max_index_num=100)) as store:
        store.put_many([rmq.Message("T", b"", keys=f"k{number}") for number in range(250)])
    meta = path / "rmq/meta.json"
    meta.write_text(meta.read_text().replace('"max_index_num": 100', '"max_index_num": 200'))
    before = {file: file.read_bytes() for file in (path / "index").iterdir()}
    for mode in ("r", "r+"):
        with pytest.raises(rmq.CorruptFileError, match="file has 2440 bytes, expected 4440"):
            rmq.open(path, mode)
    assert {file: file.read_bytes() for file in (path / "index").iterdir()} == before


def cut_in_place(segment: Path, aside: Path) -> None:
    shutil.copy(segment, aside)
    os.truncate(segment, 30_000)


def taken_away(segment: Path, aside: Path) -> None:
    segment.rename(aside)


def zeroed(segment: Path, aside: Path) -> None:
    shutil.copy(segment, aside)
    segment.write_bytes(bytes(segment.stat().st_size))


@pytest.mark.parametrize("state", ["closed", "not closed", "a broker's", "a broker's, not closed"])
@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("damage", [cut_in_place, taken_away, zeroed])
def test_a_reader_sees_a_segment_that_is_put_back(tmp_path: Path, state: str, which: int,
                                                  damage: Callable[[Path, Path], None]) -> None:  # fmt: skip
    path = tmp_path / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"%d" % number, keys=f"k{number}", uniq_key=f"u{number}")
                        for number in range(1500)])  # fmt: skip
    if "not closed" in state:
        (path / "abort").touch()
    if "broker" in state:
        shutil.rmtree(path / "rmq")

    def answers(store: rmq.Store) -> list[Any]:
        asked: list[Any] = [store.topics(), store.max_phy_offset, store.min_phy_offset,
                            store.scan().read_all(), store.search_offset("T", 0, 0)]  # fmt: skip
        for number in (0, 400, 1499):
            asked += [store.query("T", f"k{number}"), store.pull("T", 0, number), store.lookup(f"u{number}")]
        return asked

    with rmq.open(path, config=CONFIG) as store:
        whole = answers(store)
    segment = sorted((path / "commitlog").iterdir())[which]
    damage(segment, tmp_path / "aside")
    with rmq.open(path, config=CONFIG) as store:
        with contextlib.suppress(rmq.CorruptFileError, KeyError):
            assert answers(store) != whole
        for name in ("T", "U"):  # by a reader that has looked at the store more than once
            with contextlib.suppress(rmq.CorruptFileError):
                store.pull(name)
        shutil.copy(tmp_path / "aside", segment)
        assert answers(store) == whole
        assert answers(store) == whole


@pytest.mark.parametrize("full", [0, 2], ids=["the only index file", "the third"])
def test_a_last_index_file_that_was_copied_too_early_hides_no_message(tmp_path: Path, full: int) -> None:
    """Of a store whose writer was killed, as a copy of a running one looks; others of the copy are newer."""
    keys = [f"late{number}" for number in range(50)]
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("A", b"", keys=[f"k{number}"]) for number in range(999 * full + 100)])
        store.flush()
        shutil.copytree(tmp_path / "s/index", tmp_path / "index")
        store.put_many([rmq.Message("A", b"", keys=[key]) for key in keys])
        store.flush()
        copied = shutil.copytree(tmp_path / "s", tmp_path / "copy", copy_function=shutil.copy2)
    shutil.rmtree(copied / "index")
    shutil.copytree(tmp_path / "index", copied / "index")
    for mode in ("r", "r+", "r"):
        with rmq.open(copied, mode) as store:
            found = store.query_many("A", keys, columns=["phy_offset"])
            assert found.table["key_index"].to_pylist() == list(range(50))
    assert rmq.verify(copied) == []


def test_opening_stamps_no_other_index_file_as_the_last(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("A", b"", keys=[f"k{number}"]) for number in range(200)])
    (index,) = (tmp_path / "s/index").iterdir()
    older = index.read_bytes()
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(rmq.Message("A", b"", keys=["late"]))
    index.write_bytes(older)
    for mode in ("r", "r+", "r"):
        with rmq.open(tmp_path / "s", mode) as store:
            assert len(store.query("A", "late")) == 1
    assert rmq.verify(tmp_path / "s") == []
