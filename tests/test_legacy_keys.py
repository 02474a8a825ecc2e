# SPDX-License-Identifier: Apache-2.0
"""Keys in stores of brokers up to 4.9.0, which parsed properties by other rules before they indexed them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import Golden, copy_store

import rmq
from rmq import legacy
from rmq._core import _layout as L
from rmq.signs import has_old_blanks

CONFIG = {"mapped_file_size_commit_log": 65536, "max_hash_slot_num": 50, "max_index_num": 200}
# What the newer rules read as the key; the older ones ignore an item with two 0x01.
HIDDEN, RAW = "a\1b", b"KEYS\1a\1b\2"


def of_broker(path: Path, version: str, plain: bytes = b"KEYS\1k\2") -> Path:
    """A store as a broker of that release leaves it: a message between two others has the key HIDDEN."""
    with rmq.open(path, "x", config=rmq.StoreConfig(**CONFIG, rocketmq_version=version)) as store:
        for raw in (plain, RAW, plain):
            store.put(rmq.Message("T", raw[::-1], raw_properties=raw))
    shutil.rmtree(path / "rmq")
    return path


def passes(store: rmq.Store) -> int:
    """How many times two queries for HIDDEN, which find its message, read the log for such records."""
    with patch.object(legacy, "ambiguous_records", side_effect=legacy.ambiguous_records) as made:
        assert [message.body for message in store.query("T", HIDDEN)] == [RAW[::-1]]
        assert store.query_many("T", [HIDDEN, "none"]).table["key_index"].to_pylist() == [0]
    return made.call_count


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("version", ["4.7.0", "4.7.1", "4.8.0", "4.9.0", "4.9.8"])
def test_keys_that_an_old_broker_indexed_otherwise_are_found(tmp_path: Path, version: str, mode: str) -> None:
    path = of_broker(tmp_path / "s", version)
    with rmq.open(path, mode) as store:
        assert passes(store) == 1
    with rmq.open(path, mode) as store:  # r+: our own files are there now, and tell nothing of the broker
        assert passes(store) == 1


@pytest.mark.parametrize("version", ["5.0.0", "5.1.4", "5.2.0", "5.3.3"])
def test_a_store_that_tells_of_a_newer_broker_is_not_searched(tmp_path: Path, version: str) -> None:
    path = of_broker(tmp_path / "s", version)
    for mode in ("r", "r+", "r+", "r"):
        with rmq.open(path, mode) as store, patch.object(legacy, "ambiguous_records") as made:
            store.query("T", HIDDEN)
            assert not made.called, mode


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("what", ["no last separator", "packed as of 5"])
def test_what_producers_of_later_releases_send_does_not_hide_an_older_broker(
    tmp_path: Path, what: str, mode: str
) -> None:
    """It stores their properties and flags as they come."""
    path = of_broker(tmp_path / "s", "4.9.0", b"KEYS\1k" if what == "no last separator" else b"KEYS\1k\2")
    log, key = path / "commitlog" / f"{0:020d}", HIDDEN
    data = log.read_bytes()
    if what == "no last separator":
        data, key = data.replace(RAW[:-1] + b"\2", RAW[:-1] + b"c"), HIDDEN + "c"
    else:
        at = L.RECORD_SYS_FLAG_OFFSET
        data = data[:at] + (L.SYS_FLAG_COMPRESSED | 1 << 8).to_bytes(4, "big") + data[at + 4 :]
    log.write_bytes(data)
    with rmq.open(path, mode) as store:
        assert store.query("T", key).complete
        assert [message.phy_offset for message in store.query("T", key)] != []


def test_the_release_that_is_passed_to_a_reader_holds(tmp_path: Path) -> None:
    path = of_broker(tmp_path / "s", "5.3.3")
    (path / "abort.bak").unlink()
    with rmq.open(path) as store:
        assert passes(store) == 1
    with rmq.open(path, config=rmq.StoreConfig(rocketmq_version="5.3.3")) as store:
        assert passes(store) == 0
    with rmq.open(path, config=rmq.StoreConfig(rocketmq_version="4.9.0")) as store:
        assert passes(store) == 1


def of_two_brokers(path: Path, *, is_old: bool) -> None:
    """Three segments whose records 4.8.0 indexed, left by 5.x. is_old: with blank records as up to 4.9.0."""
    config = rmq.StoreConfig(**CONFIG | {"mapped_file_size_commit_log": 4096}, rocketmq_version="4.8.0")
    with rmq.open(path, "x", config=config) as store:
        placed = [store.put(rmq.Message("T", RAW[::-1], raw_properties=RAW))]
        placed += [store.put(rmq.Message("T", b"", keys=[f"k{n}"])) for n in range(90)]
    shutil.rmtree(path / "rmq")
    (path / "abort.bak").touch()
    for segment in sorted((path / "commitlog").iterdir())[:-1] if is_old else []:
        last = max(item for item in placed if item.phy_offset // 4096 * 4096 == int(segment.name))
        data, at = bytearray(segment.read_bytes()), last.phy_offset % 4096
        blank = at + last.size
        size = min(4096 - blank, last.size)
        assert size >= 36
        data[blank + 8 : blank + size] = data[at + 8 : at + size]
        segment.write_bytes(data)


@pytest.mark.parametrize("is_old", [True, False])
def test_a_store_that_an_old_broker_began_and_a_newer_one_left_is_searched(tmp_path: Path, is_old: bool) -> None:
    """Up to 4.9.0 a blank record goes on as the record before it; files tell of the newer one."""
    of_two_brokers(tmp_path / "s", is_old=is_old)
    for mode in ("r", "r+", "r+", "r"):
        with rmq.open(tmp_path / "s", mode) as store:
            with patch.object(legacy, "ambiguous_records", side_effect=legacy.ambiguous_records) as made:
                assert len(store.query("T", "k89")) == 1
                assert made.called is is_old
            assert not is_old or [message.body for message in store.query("T", HIDDEN)] == [RAW[::-1]]


@pytest.mark.parametrize(("name", "is_old"), [("4.7.0-small-1", True), ("4.9.8-small-1", False),
                                              ("5.3.3-small-1", False)])  # fmt: skip
def test_blank_records_of_rocketmq_tell(golden_stores: dict[str, Golden], name: str, is_old: bool) -> None:
    golden = golden_stores[name]
    with rmq.open(golden.directory / "store", config=golden.store_config) as store:
        assert has_old_blanks(store._log) is is_old


def test_own_stores_are_not_searched(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**CONFIG)) as store:
        store.put(rmq.Message("T", RAW[::-1], raw_properties=RAW))
        store.put(rmq.Message("T", b"", keys=["k"]))
        assert passes(store) == 0
    assert legacy.NO_LEGACY not in json.loads((tmp_path / "s/rmq/meta.json").read_text())
    with rmq.open(tmp_path / "s") as store:
        assert passes(store) == 0


def test_records_between_gaps_of_the_index_are_searched_too(tmp_path: Path) -> None:
    """A missing file in the middle leaves a range that is scanned; behind it the pass goes on."""
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**CONFIG, rocketmq_version="4.8.0")) as store:
        store.put_many([rmq.Message("T", b"", keys=[f"k{number}"]) for number in range(500)])
        store.put(rmq.Message("T", RAW[::-1], raw_properties=RAW))
        store.put(rmq.Message("T", b"", keys=["k"]))
    shutil.rmtree(tmp_path / "s" / "rmq")
    copy = copy_store(tmp_path / "s", tmp_path / "copy")
    sorted((copy / "index").iterdir())[1].unlink()
    with rmq.open(copy) as store:
        assert passes(store) == 1
        assert len(store.query("T", "k250")) == 1


@pytest.mark.parametrize("at", [0, 1])
def test_damage_that_a_query_does_not_meet_is_of_no_account_to_the_pass(tmp_path: Path, at: int) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(**CONFIG, rocketmq_version="4.8.0")) as store:
        placed = [store.put(rmq.Message("T", b"%d" % number, keys=[f"k{number}"])) for number in range(5)]
        store.put(rmq.Message("T", RAW[::-1], raw_properties=RAW))
    shutil.rmtree(tmp_path / "s" / "rmq")
    log = tmp_path / "s/commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[placed[at].phy_offset + 4 : placed[at].phy_offset + 8] = b"none"
    log.write_bytes(data)
    with rmq.open(tmp_path / "s") as store:
        assert [message.body for message in store.query("T", "k3")] == [b"3"]
        assert passes(store) == 0  # made by that query
