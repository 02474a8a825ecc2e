"""The same messages put again through rmq give the files that RocketMQ wrote, byte for byte."""

from __future__ import annotations

import base64
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from conftest import Golden, digest, message_of

import rmq

BLANK_MAGIC = 0xCBD43194 - 2**32


class RecordedClock:
    """Tells the store timestamp that the next put had."""

    now = 0

    def __call__(self) -> int:
        return self.now


def with_batch_properties(line: dict[str, Any], version: tuple[int, ...]) -> bytes:
    """Releases 4.8.0 to 5.3.3 append the batch's own properties to each inner message's."""
    own, batch = base64.b64decode(line["properties"]), base64.b64decode(line["batch_properties"] or "")
    if version < (4, 8, 0) or not batch:
        return own
    if version >= (4, 9, 3) and own and not own.endswith(b"\x02"):
        own += b"\x02"
    return own + batch


def replay(golden: Golden, path: Path) -> None:
    """Put every message again, one put or put_batch per recorded call; refused ones must be refused."""
    clock = RecordedClock()
    version = tuple(int(part) for part in golden.config["rocketmq_version"].split("."))
    calls = groupby(golden.messages, key=lambda line: ("batch", line["batch"]) if line["batch"] is not None
                    else ("single", line["seq"]))  # fmt: skip
    with rmq.open(path, "x", config=golden.store_config, clock=clock) as store:
        for (kind, _), group in calls:
            lines = list(group)
            if lines[0]["phy_offset"] is None:
                with pytest.raises(rmq.IllegalMessageError):
                    store.put(message_of(lines[0]))
                continue
            clock.now = lines[0]["store_timestamp"]
            if kind == "batch":
                batch = [message_of(line, with_batch_properties(line, version)) for line in lines]
                results = list(store.put_batch(batch))
            else:
                results = [store.put(message_of(lines[0]))]
            for line, result in zip(lines, results, strict=True):
                assert (result.topic, result.queue_id) == (line["topic"], line["queue_id"])
                assert result.phy_offset == line["phy_offset"]
                assert result.size == line["size"]
                assert result.queue_offset == line["queue_offset"]
                assert result.store_timestamp == line["store_timestamp"]
                assert result.offset_msg_id == line["offset_msg_id"]


@pytest.fixture
def replayed(golden: Golden, tmp_path: Path) -> Path:
    replay(golden, tmp_path / "store")
    return tmp_path / "store"


def blank_tails_cleared(path: Path) -> bytes:
    """Segment with the bytes behind the 8 of its blank record zeroed: before 4.9.1 they are stale."""
    data = bytearray(path.read_bytes())
    position = 0
    while position + 8 <= len(data):
        size, magic = (int.from_bytes(data[position + i : position + i + 4], "big", signed=True) for i in (0, 4))
        if magic == BLANK_MAGIC:
            data[position + 8 :] = bytes(len(data) - position - 8)
            break
        if size <= 0:
            break
        position += size
    return bytes(data)


def test_files_are_those_of_rocketmq(golden: Golden, replayed: Path) -> None:
    recorded = {entry["path"]: entry["sha256"] for entry in golden.answers["files"]}
    kinds = ("commitlog/", "consumequeue/", "index/")
    assert {p for p in recorded if p.startswith(kinds[:2])} == {
        str(path.relative_to(replayed)) for kind in kinds[:2] for path in (replayed / kind).rglob("*") if path.is_file()
    }
    for name, digest_there in recorded.items():
        if name.startswith("consumequeue/"):
            assert digest(replayed / name) == digest_there, name
        elif name.startswith("commitlog/"):
            if golden.config["rocketmq_version"] >= "4.9.1":
                assert digest(replayed / name) == digest_there, name
            else:
                there = golden.directory / "store" / name
                assert blank_tails_cleared(replayed / name) == blank_tails_cleared(there), name
    index_there = [digest_there for name, digest_there in sorted(recorded.items()) if name.startswith("index/")]
    assert index_there
    assert [digest(path) for path in sorted((replayed / "index").iterdir())] == index_there


def test_stamped_files_have_the_version_s_form(golden: Golden, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=golden.store_config) as store:
        store.put(rmq.Message("T", b"x"))
        abort = (tmp_path / "s" / "abort").read_bytes()
        is_new = golden.config["rocketmq_version"] >= "5"
        assert abort.isdigit() if is_new else abort == b""
        assert (tmp_path / "s" / "abort.bak").exists() is is_new
    assert (tmp_path / "s" / "lock").read_bytes() == b"lock"
    assert (tmp_path / "s" / "checkpoint").stat().st_size == 4096
    assert not (tmp_path / "s" / "abort").exists()


def test_what_a_scan_gives_is_put_again(golden: Golden, tmp_path: Path) -> None:
    """Keys and values with 0x01 among it. KEYS come out with single spaces between them."""
    columns = ["topic", "queue_id", "body", "keys", "tags", "uniq_key", "flag", "born_timestamp", "properties"]

    def rows(store: rmq.Store) -> list[dict[str, Any]]:
        table = store.scan(columns=columns).read_all()
        times = table["born_timestamp"].cast("int64")  # some are no dates
        found = table.set_column(columns.index("born_timestamp"), "born_timestamp", times).to_pylist()
        for row in found:
            row["properties"] = dict(row["properties"])
            if row["keys"]:
                row["properties"]["KEYS"] = " ".join(row["keys"])
        return found

    config = rmq.StoreConfig(mapped_file_size_commit_log=1 << 26, max_hash_slot_num=1000, max_index_num=100_000)
    with rmq.open(golden.directory / "store") as store, rmq.open(tmp_path / "s", "x", config=config) as copy:
        count = copy.put_many(store.scan(), results=False)
        first, second = rows(store), rows(copy)
    assert count == len(first)
    assert second == first
    assert any("\1" in value for row in first for value in row["properties"].values())
