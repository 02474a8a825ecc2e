"""No byte of a store may change unseen, no bytes may break the verification: flips, random faults, hostile records."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES
from test_bad_stores import crafted
from test_verify_damage import Victim, message

import rmq
from rmq.dispatch import Dispatcher
from rmq.verification.indexes import IndexFiles

CONFIG = rmq.StoreConfig(**SIZES, enabled_append_prop_crc=True)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 messages whose records carry a whole-record CRC."""
    path = tmp_path_factory.mktemp("checked") / "s"
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        for i in range(40):
            store.put(message(i))
    return path


def used_bytes(path: Path) -> list[tuple[Path, int]]:
    """Every byte of the records, and of the queue and index files whole."""
    records = oracle.read_records(path)
    places = []
    for file in sorted(path.rglob("*")):
        part = file.relative_to(path).parts[0]
        if file.is_file() and part in ("consumequeue", "index"):
            places += [(file, at) for at in range(file.stat().st_size)]
        elif file.is_file() and part == "commitlog":
            start = int(file.name)
            places += [(file, record.phy_offset - start + at) for record in records
                       if start <= record.phy_offset < start + 4096 for at in range(record.size)]  # fmt: skip
    return places


@pytest.mark.slow
def test_one_flipped_bit_in_any_byte_of_log_queues_and_index_is_found(checked: Path, tmp_path: Path) -> None:
    """2,000 of the 9,630 bytes."""
    shutil.copytree(checked, tmp_path / "s")
    rng, missed = random.Random(1), []
    for file, at in rng.sample(used_bytes(tmp_path / "s"), 2000):
        with open(file, "r+b") as out:
            out.seek(at)
            (byte,) = out.read(1)
            out.seek(at)
            out.write(bytes([byte ^ 1 << rng.randrange(8)]))
            out.flush()
            if rmq.verify(tmp_path / "s", jobs=1).is_sound:
                missed.append((file.name, at))
            out.seek(at)
            out.write(bytes([byte]))
    assert missed == []
    assert rmq.verify(tmp_path / "s") == []


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_random_faults_are_found_whenever_the_oracle_finds_them(checked: Path, tmp_path: Path, own: bool) -> None:
    shutil.copytree(checked, tmp_path / "s")
    if not own:
        shutil.rmtree(tmp_path / "s/rmq")
    config = rmq.StoreConfig(**SIZES)
    for file in sorted(path for path in (tmp_path / "s").rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for seed in range(40):
            file.write_bytes(oracle.damage(whole, seed))
            result = rmq.verify(tmp_path / "s", config=config)
            data = file.parts[len(tmp_path.parts) + 1] in ("commitlog", "consumequeue", "index")
            assert not (data and result.is_sound and oracle.check_store(tmp_path / "s", 10, 30)), (file, seed)
        file.write_bytes(whole)
    assert rmq.verify(tmp_path / "s", config=config) == []


@pytest.mark.slow
def test_faults_in_several_files_at_once_end_with_an_answer(checked: Path, tmp_path: Path) -> None:
    config = rmq.StoreConfig(**SIZES)
    for seed in range(150):
        path = shutil.copytree(checked, tmp_path / f"s{seed}")
        rng = random.Random(seed)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in rng.sample(files, 4):
            for _ in range(rng.randrange(1, 4)):
                file.write_bytes(oracle.damage(file.read_bytes(), rng.randrange(10**6)))
        (path / "abort").touch() if rng.random() < 0.3 else None
        try:
            rmq.verify(path, config=config, limit=rng.choice([1, 3, 1000]))
        except rmq.UnsupportedFormatError as error:
            assert "format" in str(error)  # noqa: PT017
        except ValueError as error:  # both segments were cut short, and meta.json does not tell their size
            assert "mapped_file_size_commit_log=4096 contradicts" in str(error)  # noqa: PT017
            assert all(file.stat().st_size < 4096 for file in (path / "commitlog").iterdir())
        shutil.rmtree(path)


@pytest.mark.parametrize("fields", [
    *({"topic": topic} for topic in ("../x", "/x", "..", "", "a/b", "x" * 120 + "\0")),
    *({"queue_id": number} for number in (-1, -(2**31), 2**31 - 1)),
    *({"queue_offset": number} for number in (-1, 1, 7, 2**31, 2**58, 2**62, 2**63 - 1, -(2**63))),
    {"sys_flag": 128, "body": b"\0" * 40},
    {"store_timestamp": -(2**63)}, {"store_timestamp": 2**63 - 1},
    {"raw_properties": b"KEYS\1k\1\2\2\1"}, {"raw_properties": b"\xff\1\xff\2"},
    {"raw_properties": b"KEYS\1" + b"k " * 16000},
    {"topic": "SCHEDULE_TOPIC_XXXX", "raw_properties": b"DELAY\x01-99999999999999999999\2"},
], ids=lambda fields: ascii(fields)[:60])  # fmt: skip
def test_a_hostile_record_is_verified_like_any_other(tmp_path: Path, fields: dict[str, Any]) -> None:
    time = fields.pop("store_timestamp", None)
    path = crafted(tmp_path / "outer" / "store", fields)
    if time is not None:
        segment = path / "commitlog" / f"{0:020d}"
        data = bytearray(segment.read_bytes())
        struct.pack_into(">q", data, len(oracle.encode_record("T", 0, 0, 0, b"first")) + 56, time)
        segment.write_bytes(data)
    size_of_all = rmq.StoreConfig(mapped_file_size_commit_log=len((path / "commitlog" / f"{0:020d}").read_bytes()),
                                  mapped_file_size_consume_queue=200)  # fmt: skip
    result = rmq.verify(path, config=size_of_all)
    assert result.record_count >= 2
    assert {(item.kind, item.severity) for item in result if item.severity == "note"} == {("missing", "note")}
    assert [entry.name for entry in tmp_path.iterdir()] == ["outer"]


def test_a_lost_sector_is_named(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        results = [store.put(rmq.Message("T", b"x", properties={"p": "y" * 1500}, keys=[f"k{i}"])) for i in range(2)]
    victim = Victim(tmp_path / "s")
    begin = (results[0].phy_offset + 200 + 511) // 512 * 512
    victim.poke(f"commitlog/{0:020d}", begin, bytes(512))
    found = rmq.verify(tmp_path / "s")
    assert [(item.kind, item.severity, item.offset) for item in found] == [("sector", "damage", results[0].phy_offset)]
    assert found.record_count == found.unit_count == 2


def test_units_of_light_queues_may_point_to_any_topic_s_messages(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        results = [store.put(rmq.Message("T", b"x", keys=["k"], tags="a")) for _ in range(3)]
    tags = oracle.java_hash("a")
    units = [oracle.UNIT.pack(result.phy_offset, result.size, tags) for result in results]
    (tmp_path / "s/consumequeue/%LMQ%x/0").mkdir(parents=True)
    file = tmp_path / "s/consumequeue/%LMQ%x/0" / f"{0:020d}"
    file.write_bytes(b"".join(units[1:]).ljust(200, b"\0"))
    assert rmq.verify(tmp_path / "s") == []
    file.write_bytes((units[1] + oracle.UNIT.pack(results[2].phy_offset + 1, 5, tags)).ljust(200, b"\0"))
    (found,) = rmq.verify(tmp_path / "s")
    assert (found.path, found.offset, found.kind) == (str(file), 20, "unit-extra")
    file.write_bytes((units[1] + oracle.UNIT.pack(results[2].phy_offset, 5, tags)).ljust(200, b"\0"))
    (found,) = rmq.verify(tmp_path / "s")
    assert (found.path, found.offset, found.kind) == (str(file), 20, "unit")


def test_an_entry_of_a_negative_hash_is_none_of_the_right_ones(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        for number in range(3):
            store.put(rmq.Message("T", b"x", keys=[f"k{number}"]))
    assert rmq.verify(tmp_path / "s").entry_count == 3
    (index,) = (tmp_path / "s/index").iterdir()
    with index.open("r+b") as file:
        file.seek(40 + SIZES["max_hash_slot_num"] * 4 + 2 * 20)
        file.write(struct.pack(">i", -5))
    found = rmq.verify(tmp_path / "s")
    assert found.entry_count == 2
    assert not found.is_sound


@pytest.mark.parametrize("limit", [1, 7, 10**30])
def test_what_a_limit_leaves_out_of_an_index_file_of_random_bytes_is_counted(tmp_path: Path, limit: int) -> None:
    sizes = SIZES | {"max_hash_slot_num": 100, "max_index_num": 1000}
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**sizes)) as store:
        store.put_many([rmq.Message("T", b"x", keys=[f"k{number}"]) for number in range(999)])
    (index,) = (tmp_path / "s/index").iterdir()
    data = index.read_bytes()
    index.write_bytes(data[:40] + random.Random(1).randbytes(len(data) - 40))
    found, whole = (rmq.verify(tmp_path / "s", limit=most) for most in (limit, 10**6))
    assert whole.derived_count == len([item for item in whole if item.severity == "derived"]) > 1000
    assert found.derived_count == whole.derived_count
    kept = [item for item in found if item.severity == "derived"]
    assert len(kept) == min(limit, whole.derived_count)
    assert found.omitted == max(0, len(whole) - limit)


@pytest.mark.parametrize("entries", [0, 1, 10])
def test_a_count_far_behind_the_last_entry_costs_no_look_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 entries: int) -> None:  # fmt: skip
    """The last entry ends with zeros: no other of its slot is before it. Entry 1 counts as one, whatever it holds."""
    config = rmq.StoreConfig(**SIZES | {"max_hash_slot_num": 1000, "max_index_num": 5000})
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put_many([rmq.Message("T", b"", keys=[f"k{number}"]) for number in range(max(1, entries))])
    (file,) = (tmp_path / "s" / "index").iterdir()
    with open(file, "r+b") as out:
        if not entries:
            out.seek(40 + 4000 + 20)
            out.write(bytes(20))
        out.seek(36)
        out.write(struct.pack(">i", 5000))
    looks: list[int] = []
    is_used = IndexFiles._is_used
    monkeypatch.setattr(IndexFiles, "_is_used",
                        lambda files, part, entry: (looks.append(entry), is_used(files, part, entry))[1])
    found = [item.reason for item in rmq.verify(tmp_path / "s", config=config, jobs=1) if item.offset == 36]
    assert f"entry count is 5000, but the entries end before {max(1, entries) + 1}" in found
    assert len(looks) < 5


def test_parts_that_are_not_verified_are_named(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        store.put(rmq.Message("T", b"x", keys=["k"]))
    (tmp_path / "s/batchconsumequeue/B").mkdir(parents=True)
    found = rmq.verify(tmp_path / "s")
    assert [(item.kind, item.severity, Path(item.path).name) for item in found] == [
        ("unread", "note", "batchconsumequeue")]
    shutil.rmtree(tmp_path / "s/consumequeue")
    (tmp_path / "s/consumequeue").mkdir()
    (tmp_path / "s/consumequeue/CURRENT").touch()
    (tmp_path / "s/consumequeue/MANIFEST-1").touch()
    found = rmq.verify(tmp_path / "s")
    assert found.is_sound
    assert sorted(Path(item.path).name for item in found if item.kind == "unread") == ["batchconsumequeue",
                                                                                        "consumequeue"]  # fmt: skip


@pytest.mark.parametrize("name", ["checkpoint", "lock", "abort", "rmq/owner", "rmq/marks", "rmq/meta.json",
                                  "rmq/manifest.json", f"commitlog/{4096:020d}",
                                  f"consumequeue/T/0/{200:020d}"])  # fmt: skip
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_directory_in_place_of_a_file_is_a_finding_and_never_waited_for(
    checked: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    shutil.copytree(checked, tmp_path / "s")
    (tmp_path / "s" / name).unlink(missing_ok=True)
    make(tmp_path / "s" / name)
    found = rmq.verify(tmp_path / "s")
    assert not found.is_sound
    assert str(tmp_path / "s" / name) in [item.path for item in found if item.kind in ("name", "missing", "leftover")]


@pytest.mark.parametrize("name", ["commitlog", "consumequeue/T/0"])
def test_a_name_far_behind_the_others_is_one_gap(checked: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(checked, tmp_path / "s")
    *_, last = sorted((path / name).iterdir())
    size = last.stat().st_size
    with open(path / name / f"{2**62 // size * size:020d}", "wb") as stray:
        stray.truncate(size)
    (found,) = rmq.verify(path)
    assert (found.path, found.kind) == (str(path / name / f"{int(last.name) + size:020d}"), "missing")
    if name == "commitlog":
        assert found.reason.startswith(f"{(2**62 - int(last.name)) // size - 1} commit-log segments are missing")


def test_a_segment_whose_end_is_no_phy_offset_is_none(checked: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checked, tmp_path / "s")
    stray = path / "commitlog" / f"{2**63 - 4096:020d}"
    stray.write_bytes(bytes(4096))
    assert [(item.path, item.kind, item.severity) for item in rmq.verify(path)] == [(str(stray), "name", "damage")]


def test_a_segment_that_is_there_twice_is_named(checked: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checked, tmp_path / "s")
    log, other = path / "commitlog", path / "other"
    other.mkdir()
    name = sorted(log.iterdir())[1].name
    shutil.copy(log / name, other)
    config = rmq.StoreConfig(store_path_commit_log=f"{log},{other}")
    (found,) = rmq.verify(path, config=config)
    assert (found.path, found.kind, found.severity) == (str(other / name), "name", "damage")
    assert found.reason.startswith(f"the segment is there twice: {log / name}")


def test_a_log_directory_that_is_configured_twice_is_read_once(checked: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checked, tmp_path / "s")
    log, link = path / "commitlog", tmp_path / "link"
    link.symlink_to(log)
    result = rmq.verify(path, config=rmq.StoreConfig(store_path_commit_log=f"{log},{link}"))
    assert [(item.path, item.kind, item.severity) for item in result] == [(str(link), "name", "note")]
    assert result.record_count == 40
    assert rmq.verify(path, config=rmq.StoreConfig(store_path_commit_log=f"{log},{log}")).is_sound


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("make", [emptied, loop, os.mkfifo, os.mkdir])
def test_what_is_no_index_file_in_the_place_of_one_is_a_finding(
    checked: Path, tmp_path: Path, make: Callable[[Path], None], number: int
) -> None:
    """With default sizes most stores have one index file alone: no neighbour misses it."""
    path = shutil.copytree(checked, tmp_path / "s")
    file = sorted((path / "index").iterdir())[number]
    file.unlink()
    make(file)
    result = rmq.verify(path)
    assert not result.is_sound
    assert str(file) in [item.path for item in result if item.severity == "derived"]


@pytest.mark.parametrize("part", ["commitlog", "index", "consumequeue", "consumequeue/T", "consumequeue/T/0"])
def test_a_link_to_itself_keeps_nothing_else_from_being_told(checked: Path, tmp_path: Path, part: str) -> None:
    path = shutil.copytree(checked, tmp_path / "s")
    loop(path / part / "loop")
    (path / "checkpoint").write_bytes(b"short")
    assert {str(path / part / "loop"), str(path / "checkpoint")} <= {item.path for item in rmq.verify(path)}


@pytest.mark.parametrize(("name", "value"), [("rocketmq_version", "5/3.3"), ("rocketmq_version", 5),
                                             ("max_index_num", -5), ("mapped_file_size_commit_log", "x"),
                                             ("enabled_append_prop_crc", None)])  # fmt: skip
def test_a_value_of_meta_json_with_which_no_store_opens_is_damage(checked: Path, tmp_path: Path, name: str,
                                                                  value: object) -> None:  # fmt: skip
    path = shutil.copytree(checked, tmp_path / "s")
    meta = json.loads((path / "rmq/meta.json").read_text())
    (path / "rmq/meta.json").write_text(json.dumps(meta | {name: value}))
    with pytest.raises(rmq.CorruptFileError):
        rmq.open(path, "r+")
    assert ("own", "damage", str(path / "rmq/meta.json")) in [
        (item.kind, item.severity, item.path) for item in rmq.verify(path)]  # fmt: skip


def test_one_wrong_queue_offset_does_not_make_free_units_wrong(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**SIZES)) as store:
        places = [store.put(rmq.Message("T", b"")).phy_offset for _ in range(5)]
    with (tmp_path / "s/commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(places[3] + 20)
        file.write((2**40).to_bytes(8, "big"))
    assert len(rmq.verify(tmp_path / "s")) == 2  # the record's unit is elsewhere; its old unit is no record's


@pytest.mark.parametrize("size", [4095, 4097, 9000])
def test_a_checkpoint_of_another_length_is_made_right_by_the_next_writer(checked: Path, tmp_path: Path,
                                                                         size: int) -> None:  # fmt: skip
    path = shutil.copytree(checked, tmp_path / "s")
    with (path / "checkpoint").open("r+b") as file:
        file.truncate(size)
    assert not rmq.verify(path).is_sound
    with rmq.open(path, "r+", config=CONFIG) as store:
        store.put(message(0))
    assert rmq.verify(path) == []


def test_a_recovery_that_was_killed_leaves_nothing_that_is_wrong(checked: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The index is partly made; nothing vouches for it until it is whole."""
    path = shutil.copytree(checked, tmp_path / "s")
    monkeypatch.setattr("rmq.dispatch.BATCH_ROWS", 10)
    monkeypatch.setattr("rmq.dispatch.UNITS_EACH", 1)
    add, calls = Dispatcher._add_entries, list[int]()

    def stop(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("killed")
        add(*arguments)

    monkeypatch.setattr(Dispatcher, "_add_entries", stop)
    with pytest.raises(OSError, match="killed"):
        rmq.open(path, "r+", config=CONFIG, repair=True)
    result = rmq.verify(path)
    assert (result.state, result.is_sound) == ("not closed", True)
    assert {item.severity for item in result} <= {"note"}
