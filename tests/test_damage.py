"""Every field of every file of a small store damaged, one at a time, and every way of reading asked.

An answer is the right one, or a CorruptFileError that names file, byte and reason. Where no checksum covers a field
(UNCOVERED, docs/limits.md) that field of that message may be wrong, and nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq._core import _layout as L

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=40)  # fmt: skip
COUNT, VICTIM = 12, 5
START = 1_700_000_000_000
FIELDS = ("topic", "queue_id", "queue_offset", "phy_offset", "size", "flag", "sys_flag", "born_timestamp", "born_host",
          "store_timestamp", "store_host", "reconsume_times", "prepared_transaction_offset", "body_crc", "raw_body",
          "raw_properties")  # fmt: skip


def message(i: int) -> rmq.Message:
    return rmq.Message("TU"[i % 3 == 2], b"body %03d " % i * 5, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2,
                       flag=i, uniq_key=f"7F{i:030X}", born_timestamp=START + i, born_host="10.0.0.1:1",
                       store_host="10.0.0.2:2", reconsume_times=i, prepared_transaction_offset=i)  # fmt: skip


@dataclass(frozen=True)
class Region:
    """Bytes of one file. field: what of the message may be wrong when they are; keys: queries may miss messages."""

    name: str
    file: str
    begin: int
    size: int
    field: str = ""
    keys: bool = False


@dataclass(frozen=True)
class Base:
    path: Path
    places: list[rmq.PutResult]
    regions: dict[str, Region]
    truth: dict[str, Any]


LOG, QUEUE = f"commitlog/{0:020d}", f"consumequeue/U/1/{0:020d}"
# The fields of a record that no checksum covers unless enabled_append_prop_crc is set. docs/limits.md lists them.
UNCOVERED = {
    "queue_id": (L.RECORD_QUEUE_ID_OFFSET, 4),
    "flag": (L.RECORD_FLAG_OFFSET, 4),
    "queue_offset": (L.RECORD_QUEUE_OFFSET_OFFSET, 8),
    "sys_flag": (L.RECORD_SYS_FLAG_OFFSET, 4),
    "born_timestamp": (L.RECORD_BORN_TIMESTAMP_OFFSET, 8),
    "born_host": (L.RECORD_BORN_HOST_OFFSET, 8),
    "store_timestamp": (L.RECORD_STORE_TIMESTAMP_OFFSET, 8),
    "store_host": (L.RECORD_STORE_HOST_OFFSET, 8),
    "reconsume_times": (L.RECORD_RECONSUME_TIMES_OFFSET, 4),
    "prepared_transaction_offset": (L.RECORD_PREPARED_TRANSACTION_OFFSET_OFFSET, 8),
}
COVERED = {
    "size": (L.RECORD_SIZE_OFFSET, 4),
    "magic": (L.RECORD_MAGIC_OFFSET, 4),
    "body_crc": (L.RECORD_BODY_CRC_OFFSET, 4),
    "phy_offset": (L.RECORD_PHY_OFFSET_OFFSET, 8),
    "body_size": (L.RECORD_BODY_SIZE_OFFSET, 4),
    "body": (L.RECORD_BODY_OFFSET, 45),
    "topic_size": (L.RECORD_BODY_OFFSET + 45, 1),
    "properties_size": (L.RECORD_BODY_OFFSET + 47, 2),
}
HEADER = {"begin_timestamp": 8, "end_timestamp": 8, "begin_phy_offset": 8, "end_phy_offset": 8, "hash_slot_count": 4,
          "index_count": 4}  # fmt: skip
TEXTS = ("rmq/meta.json", "rmq/manifest.json", "config/topics.json", "lock", "abort.bak")
ENTRY = {"key_hash": 4, "phy_offset": 8, "time_diff": 4, "previous": 4}


def regions_of(path: Path, place: rmq.PutResult) -> Iterator[Region]:
    for name, (at, size) in UNCOVERED.items():
        yield Region(f"record {name}", LOG, place.phy_offset + at, size, name)
    for name, (at, size) in COVERED.items():
        yield Region(f"record {name}", LOG, place.phy_offset + at, size)
    yield Region("record topic", LOG, place.phy_offset + L.RECORD_BODY_OFFSET + 46, 1, "topic")
    yield Region("record properties", LOG, place.phy_offset + L.RECORD_BODY_OFFSET + 49, 20, "raw_properties")
    yield Region("log behind the end", LOG, 3000, 100)
    for name, at, size in (("phy_offset", 0, 8), ("size", 8, 4), ("tags_code", 12, 8)):
        yield Region(f"unit {name}", QUEUE, place.queue_offset * L.UNIT_SIZE + at, size)
    index = next((path / "index").iterdir()).relative_to(path).as_posix()
    at = 0
    for name, size in HEADER.items():
        yield Region(f"index header {name}", index, at, size, keys=True)
        at += size
    yield Region("index slots", index, L.INDEX_HEADER_SIZE, 40, keys=True)
    at = L.INDEX_HEADER_SIZE + 10 * L.INDEX_SLOT_SIZE + (1 + 3 * VICTIM) * L.ENTRY_SIZE
    for name, size in ENTRY.items():
        yield Region(f"index entry {name}", index, at, size, keys=True)
        at += size
    for number in range(5):
        yield Region(f"checkpoint long {number}", "checkpoint", 8 * number, 8)
    for name, at, size in (("A", 0, 92), ("B", 512, 92), ("visible", 1024, 8)):
        yield Region(f"marks {name}", "rmq/marks", at, size)
    for file in TEXTS:
        length = max(1, (path / file).stat().st_size)
        for tenth in range(0, 10, 3):
            yield Region(f"{file} {tenth}0%", file, length * tenth // 10, 3)


def values(found: Any) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in FIELDS} for one in found]


def scanned(store: rmq.Store) -> list[dict[str, Any]]:
    table = store.scan(columns=FIELDS).read_all()
    columns = [(column.cast("int64") if "timestamp" in name else column).to_pylist()
               for name, column in zip(FIELDS, table.columns, strict=True)]  # fmt: skip
    return [dict(zip(FIELDS, row, strict=True)) for row in zip(*columns, strict=True)]


FEW = ["phy_offset", "raw_body"]
INFO = ("written_by", "generation", "min_phy_offset", "max_phy_offset", "begin_timestamp", "end_timestamp",
        "topic_count", "queue_count", "message_count", "segment_count")  # fmt: skip
CALLS: dict[str, Callable[[rmq.Store, list[rmq.PutResult]], Any]] = {
    "scan": lambda s, _: scanned(s),
    "skip": lambda s, _: s.scan(columns=FEW, on_damage="skip").read_all().to_pylist(),
    "query all": lambda s, _: values(s.query("T", "all", limit=None)),
    "query victim": lambda s, _: values(s.query("U", f"key{VICTIM}")),
    "query time": lambda s, _: values(s.query("U", "all", begin=START + 4000, end=START + 9000)),
    "query_many": lambda s, _: s.query_many("U", ["all", f"key{VICTIM}"], columns=FEW).table.to_pylist(),
    "lookup phy": lambda s, places: values([s.lookup(places[VICTIM].phy_offset)]),
    "lookup id": lambda s, places: values([s.lookup(places[VICTIM].offset_msg_id)]),
    "lookup uniq": lambda s, _: values([s.lookup(f"7F{VICTIM:030X}")]),
    "lookup other": lambda s, places: values([s.lookup(places[VICTIM + 1].phy_offset)]),
    "pull victim": lambda s, _: values(s.pull("U", 1).messages),
    "pull other": lambda s, _: values(s.pull("T", 0).messages),
    "pull tags": lambda s, _: values(s.pull("U", 1, tags="tag").messages),
    "topics": lambda s, _: s.topics(),
    "search_offset": lambda s, _: [s.search_offset("U", 1, START + 1000 * i) for i in (0, VICTIM, COUNT)],
    "info": lambda s, _: {name: getattr(s.info(), name) for name in INFO},
    "select": lambda s, _: sorted(s.select_phy_offset_many("U", ["all", f"key{VICTIM}"]).flatten().to_pylist()),
}


def answer(call: str, store: rmq.Store, places: list[rmq.PutResult]) -> Any:
    try:
        return CALLS[call](store, places)
    except (rmq.CorruptFileError, KeyError) as error:
        return error


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = tmp_path_factory.mktemp("damage") / "store"
    times = iter(range(START, 2 * START, 1000))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
        places = [store.put(message(i)) for i in range(COUNT)]
    with rmq.open(path) as store:
        truth = {call: answer(call, store, places) for call in CALLS}
    assert not any(isinstance(value, Exception) for value in truth.values())
    regions = {region.name: region for region in regions_of(path, places[VICTIM])}
    return Base(path, places, regions, truth)


# ---- judging -----------------------------------------------------------------------------------------------


def without(found: Any, field: str) -> Any:
    return [{name: value for name, value in row.items() if name != field} for row in found]


def is_part(found: list[Any], whole: list[Any]) -> bool:
    """Whether the items are some of the others, in order."""
    items = iter(whole)
    return all(item in items for item in found)


def judge(base: Base, path: Path, region: Region, call: str, got: Any) -> None:
    truth = base.truth[call]
    if isinstance(got, rmq.CorruptFileError):
        assert got.path == "commitlog" or Path(got.path).is_relative_to(path), got
        assert got.offset >= 0
        assert got.reason
        return
    if isinstance(got, KeyError):
        # What lies at the place says that it is no such message, or no entry and no property names it.
        assert call.startswith("lookup"), call
        assert region.file == LOG or region.keys
        assert call != "lookup other"
        return
    if got == truth:
        return
    what = f"{region.name}, {call}: {got!r:.1400} is not {truth!r:.1400}"
    if region.field:
        if isinstance(truth, dict) or call in ("search_offset", "select"):
            assert region.field in ("store_timestamp", "topic", "queue_id"), what
        elif call.startswith(("query", "lookup")):
            assert is_part(without(got, region.field), without(truth, region.field)), what
        elif call == "skip":
            assert is_part(got, truth), what
        else:
            assert without(got, region.field) == without(truth, region.field), what
    elif call == "skip":
        assert is_part(got, truth), what
        assert len(got) >= len(truth) - 1, what
    elif region.name == "unit tags_code":
        assert call == "pull tags", what
        assert is_part(got, truth), what
    elif region.keys:
        assert call.startswith(("query", "lookup uniq", "select")), what
        assert call == "select" or is_part(got, truth), what
    else:
        pytest.fail(what)


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "flip": lambda data, before: flip(data),
    "high bit": lambda data, before: bytes([data[0] ^ 0x80]) + data[1:],
    "zero": lambda data, before: bytes(len(data)),
    "ones": lambda data, before: b"\xff" * len(data),
    "splice": lambda data, before: before,
}
NAMES = [*(f"record {name}" for name in (*UNCOVERED, *COVERED, "topic", "properties")), "log behind the end",
         *(f"unit {name}" for name in ("phy_offset", "size", "tags_code")),
         *(f"index header {name}" for name in HEADER), "index slots", *(f"index entry {name}" for name in ENTRY),
         *(f"checkpoint long {number}" for number in range(5)), "marks A", "marks B", "marks visible",
         *(f"{file} {tenth}0%" for file in TEXTS for tenth in (0, 3, 6, 9))]  # fmt: skip


def test_the_regions_are_all_there_are(base: Base) -> None:
    assert set(base.regions) == set(NAMES)
    for region in base.regions.values():
        assert region.begin < max(1, (base.path / region.file).stat().st_size), region


def opened(path: Path, mode: str) -> rmq.Store | None:
    """The store, or None for an error that names a file of it."""
    try:
        return rmq.open(path, mode)
    except (rmq.CorruptFileError, rmq.UnsupportedFormatError) as error:
        if not Path(error.path).is_relative_to(path):
            raise
        return None


SLOW = [pytest.mark.slow]
CASES = [
    pytest.param(name, damage, mode, marks=[] if (damage, mode) == ("flip", "r") and "record" in name else SLOW)
    for name in NAMES for damage in DAMAGES for mode in ("r", "r+")
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "mode"), CASES)
def test_a_damaged_field_is_an_error_or_wrong_alone(
    base: Base, tmp_path: Path, name: str, damage: str, mode: str
) -> None:
    region, path = base.regions[name], tmp_path / "s"
    shutil.copytree(base.path, path)
    with (path / region.file).open("r+b") as file:
        data = os.pread(file.fileno(), region.size, region.begin).ljust(region.size, b"\0")
        before = os.pread(file.fileno(), region.size, max(0, region.begin - 20)).ljust(region.size, b"\0")
        os.pwrite(file.fileno(), DAMAGES[damage](data, before), region.begin)
    store = opened(path, mode)
    if store is not None:
        with store:
            for call in CALLS:
                judge(base, path, region, call, answer(call, store, base.places))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_in_a_field_is_an_error_or_does_not_show(base: Base, tmp_path: Path, name: str, mode: str) -> None:
    region, path = base.regions[name], tmp_path / "s"
    shutil.copytree(base.path, path)
    os.truncate(path / region.file, region.begin)
    cut = Region(region.name, region.file, region.begin, region.size, keys=region.keys)
    store = opened(path, mode)
    if store is None:
        return
    with store:
        for call in CALLS:
            got = answer(call, store, base.places)
            if call == "skip" and not isinstance(got, Exception):
                assert got == [row for row in base.truth[call] if row in got]
            else:
                judge(base, path, cut, call, got)
