# SPDX-License-Identifier: Apache-2.0
"""Queues and index get the same of rows whose tags and keys the scan hashed as of rows that it did not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmq
from rmq._core._consumequeue import pack_units
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._queuetable import QueueTable
from rmq._core._record import HASH_KEYS, LEGACY_PROPERTIES, PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch

T0 = 1_700_000_000_000
SEGMENT = 4 * 1024 * 1024
DELAYS = np.array(rmq.StoreConfig().delay_levels_ms, np.int64)
LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
SLOTS, SCRIPTS = 37, "kÿ漢😀"
KEYS_TOGETHER = 512  # of _indexput


def messages(rng: random.Random, count: int) -> Iterator[rmq.Message]:
    """Keys of no, one and many pieces, of all lengths and scripts; tags, delays, some topics."""
    for number in range(count):
        pieces = range(rng.choice((0, 1, 1, 1, 2, 9)))
        keys = [rng.choice(SCRIPTS) * rng.choice(LENGTHS) + f"{number}-{piece}" for piece in pieces]
        options: dict[str, Any] = {}
        if rng.random() < 0.3:
            options["tags"] = rng.choice(SCRIPTS) * rng.choice(LENGTHS[1:])
        if rng.random() < 0.5:
            options["uniq_key"] = rng.choice(SCRIPTS) * rng.choice(LENGTHS[1:]) + str(number)
        if rng.random() < 0.1:
            options["properties"] = {"DELAY": str(rng.randrange(20))}
        topic = rng.choice(("T", "Topic", "SCHEDULE_TOPIC_XXXX", "a" * 60))
        yield rmq.Message(topic, b"b" * rng.choice((0, 10, 700)), keys=keys, **options)


def segment_of(path: Path, listed: list[rmq.Message]) -> tuple[bytes, int]:
    """The first segment of a log of them, and its end."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, max_hash_slot_num=SLOTS, max_index_num=10_000)
    with rmq.open(path, "x", config=config, clock=lambda: T0) as store:
        for message in listed:
            store.put(message)
        end = store.max_phy_offset
    return (path / "commitlog" / f"{0:020d}").read_bytes(), end


def scanned(data: bytes, end: int, checks: int) -> RecordBatch:
    batch = RecordBatch(8192)
    batch.scan(data, 0, 0, end, checks=checks, queues=QueueTable())
    assert batch.next_phy_offset == end
    return batch


def images(batch: RecordBatch, size: int, *, index_tags: bool, limits: list[int]) -> Iterator[tuple[bytes, int, int]]:
    """Index files, one after the other, and where each stopped; limits: how many entries have blocks by and by."""
    row = key = 0
    while row < len(batch):
        data = bytearray(index_file_size(SLOTS, size))
        view = IndexFileView(data, hash_slot_num=SLOTS, index_num=size, writable=True)
        for limit in [*limits, size]:
            view.limit(limit)
            row, key = view.put_rows(batch, row, key, index_tags=index_tags)
        assert view.fits()
        yield bytes(data), row, key


@pytest.mark.parametrize("legacy", [0, LEGACY_PROPERTIES])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hashed_by_the_scan_give_the_same_units_and_entries(tmp_path: Path, seed: int, legacy: int) -> None:
    rng = random.Random(seed)
    data, end = segment_of(tmp_path / "s", list(messages(rng, 600)))
    plain, hashed = (scanned(data, end, PARSE_PROPERTIES | legacy | more) for more in (0, HASH_KEYS))
    for found, expected in zip(pack_units(hashed, DELAYS), pack_units(plain, DELAYS), strict=True):
        assert found.tobytes() == expected.tobytes()
    for size, limits in ((10_000, []), (700, []), (700, [3, 65, 66, 600]), (2, [])):
        for index_tags in (False, True):
            expected = images(plain, size, index_tags=index_tags, limits=limits)
            found = images(hashed, size, index_tags=index_tags, limits=limits)
            for _, one, other in zip(range(4), found, expected, strict=False):
                assert one == other


@pytest.mark.parametrize("count", [KEYS_TOGETHER - 1, KEYS_TOGETHER, KEYS_TOGETHER + 1, 2 * KEYS_TOGETHER + 1])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_keys_of_a_row_that_fill_a_block_are_all_put(tmp_path: Path, count: int, before: int) -> None:
    """Each once and in order, whatever rows stand before and behind."""
    keys = [str(number) for number in range(count)]
    listed = [rmq.Message("T", b"", keys=f"b{n}") for n in range(before)]
    listed += [rmq.Message("T", b"", keys=keys), rmq.Message("T", b""), rmq.Message("T", b"", keys="last")]
    data, end = segment_of(tmp_path / "s", listed)
    batch = scanned(data, end, PARSE_PROPERTIES | HASH_KEYS)
    wanted = [f"T#{key}" for key in (*(f"b{n}" for n in range(before)), *keys, "last")]
    offsets = [batch.phy_offset(row) for row in (*range(before), *[before] * count, before + 2)]
    with rmq.IndexFile(tmp_path / "i", "x", max_hash_slot_num=SLOTS, max_index_num=10_000) as file:
        file.put_keys(wanted, offsets, [T0] * len(wanted))
        expected = (tmp_path / "i").read_bytes()
    image, row, key = next(images(batch, 10_000, index_tags=False, limits=[]))
    assert (image, row, key) == (expected, len(listed), 0)


def test_rows_that_another_scan_found_have_no_hashes_left(tmp_path: Path) -> None:
    data, end = segment_of(tmp_path / "s", [rmq.Message("T", b"", keys=f"k{n}", tags=f"t{n}") for n in range(100)])
    batch = scanned(data, end, PARSE_PROPERTIES | HASH_KEYS)
    places = np.array([batch.phy_offset(row) for row in (7, 50)])
    first = [image for image, _, _ in images(batch, 200, index_tags=True, limits=[])]
    batch.scan(data, 0, int(places[0]), end, checks=PARSE_PROPERTIES, queues=QueueTable())
    plain = RecordBatch(100)
    plain.scan(data, 0, int(places[0]), end, checks=PARSE_PROPERTIES, queues=QueueTable())
    assert list(images(batch, 200, index_tags=True, limits=[])) == list(images(plain, 200, index_tags=True, limits=[]))
    batch.scan(data, 0, 0, end, checks=PARSE_PROPERTIES | HASH_KEYS, queues=QueueTable())
    batch.load(data, 0, places, end, checks=PARSE_PROPERTIES)
    plain.load(data, 0, places, end, checks=PARSE_PROPERTIES)
    assert list(images(batch, 200, index_tags=True, limits=[])) == list(images(plain, 200, index_tags=True, limits=[]))
    batch.scan(data, 0, 0, end, checks=PARSE_PROPERTIES | HASH_KEYS, queues=QueueTable())
    assert [image for image, _, _ in images(batch, 200, index_tags=True, limits=[])] == first
    assert batch.keep([b"nobody's"]) == 0
    assert batch.keep([b"T"]) == 0


def test_hashes_want_queues(tmp_path: Path) -> None:
    """Without the numbers of queues a scan takes none: they begin with that of the topic."""
    data, end = segment_of(tmp_path / "s", [rmq.Message("T", b"", keys="k")])
    batch = RecordBatch(8)
    batch.scan(data, 0, 0, end, checks=PARSE_PROPERTIES | HASH_KEYS)
    expected = scanned(data, end, PARSE_PROPERTIES)
    assert list(images(batch, 9, index_tags=False, limits=[])) == list(images(expected, 9, index_tags=False, limits=[]))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 817, 818, 820, 5000])
def test_pages_made_present_ahead_change_no_byte(tmp_path: Path, count: int) -> None:
    """Of a map, all keys at once, which brings pages of entries and slots into memory together, or one by one."""
    options: dict[str, Any] = {"max_hash_slot_num": 20_000, "max_index_num": 5000}
    keys, numbers = [f"T#{number}" for number in range(count)], list(range(count))
    with rmq.IndexFile(tmp_path / "many", "x", **options) as many:
        assert many.put_keys(keys, numbers, numbers) == min(count, 4999)
    with rmq.IndexFile(tmp_path / "one", "x", **options) as one:
        for key, number in zip(keys, numbers, strict=True):
            one.put_key(key, number, number)
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_batch_of_few_keys_takes_no_memory_ahead(tmp_path: Path) -> None:
    """Of a new file with ten entries neither all slots are in memory, 20 MB, nor the entries that have blocks, 8 MB."""
    with rmq.IndexFile(tmp_path / "few", "x") as file:
        before = resident(tmp_path / "few")
        file.put_keys([f"T#{n}" for n in range(10)], range(10), range(10))
        assert resident(tmp_path / "few") - before < 4 * 1024 * 1024  # ten slots, as the system maps neighbours


def resident(path: Path) -> int:
    """Bytes of this process's map of a file that are in memory."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(f"/{path.name}"):
            found = True
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    pytest.skip("no /proc/self/smaps")
