"""Parts of a log: what is changed in one that stands elsewhere, and that nothing else is."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq
from rmq._core import _layout as L
from rmq.logpart import Part, PartWriter, place_part
from rmq.mappedfile import MappedFile
from rmq.scan import COLUMNS

SEGMENT = 8192
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT)
TIME = 1_700_000_000_000
PREPARED, COMMIT, ROLLBACK = 4, 8, 12
SAME = [name for name in COLUMNS if name not in ("phy_offset", "queue_offset", "offset_msg_id")]


def messages(count: int) -> list[rmq.Message]:
    """Sizes at all alignments, names that are not ASCII, four queues."""
    return [rmq.Message(["orders", "Bücher"][number // 2 % 2], bytes([number % 256]) * (number % 67),
                        keys=[f"k-{number}"], queue_id=number % 2, properties={"ü": "x" * (number % 5)})
            for number in range(count)]  # fmt: skip


def written(path: Path, items: Iterable[rmq.Message], config: rmq.StoreConfig = CONFIG) -> Part:
    path.mkdir()
    with PartWriter(path, config, TIME) as writer:
        assert writer.put_many(items) == len(list(items))
        return writer.finish()


def placed(source: Path, target: Path, part: Part, begin: int = 0, *, closed: bool = False,
           first: dict[tuple[str, int], int] | None = None, size: int = SEGMENT) -> Part:  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    return place_part(source, target, part, segment_size=size, begin=begin, queue_offsets=first or {}, closed=closed)


def peer(path: Path, items: list[rmq.Message]) -> int:
    """A store; the end of its log."""
    with rmq.open(path, "x", config=CONFIG, clock=lambda: TIME) as store:
        store.put_many(items)
        return store.max_phy_offset


def rows(path: Path, *names: str) -> list[dict[str, Any]]:
    with rmq.open(path) as store:
        return store.scan(columns=names).read_all().to_pylist()


def files(path: Path) -> list[tuple[str, bytes]]:
    return [(item.name, item.read_bytes()) for item in sorted(path.iterdir())]


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 400])
def test_at_its_own_place_it_is_the_log_that_the_engine_writes(tmp_path: Path, count: int) -> None:
    part = written(tmp_path / "a", messages(count))
    assert part.end == peer(tmp_path / "peer", messages(count))
    assert files(tmp_path / "a") == files(tmp_path / "peer" / "commitlog")
    assert placed(tmp_path / "a", tmp_path / "b", part) == part
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_behind_another_part_both_are_one_log(tmp_path: Path) -> None:
    log, items = tmp_path / "all" / "commitlog", messages(300)
    first, second = written(tmp_path / "a", items[:170]), written(tmp_path / "b", items[170:])
    assert placed(tmp_path / "a", log, first, closed=True) == first
    begin = -(-first.end // SEGMENT) * SEGMENT
    assert placed(tmp_path / "b", log, second, begin, first=first.queues) == second
    with rmq.open(tmp_path / "all", "r+", config=CONFIG) as store:
        assert store.max_phy_offset == begin + second.end
        store.put(items[0])
    assert rmq.verify(tmp_path / "all") == []
    peer(tmp_path / "peer", [*items, items[0]])
    assert rows(tmp_path / "all", *SAME, "queue_offset")[:-1] == rows(tmp_path / "peer", *SAME, "queue_offset")[:-1]
    counted = Counter((message.topic, message.queue_id) for message in items)
    assert dict(Counter(first.queues) + Counter(second.queues)) == counted


def test_tables_are_put_as_a_store_puts_them(tmp_path: Path) -> None:
    table = pa.table({"body": [b"%d" % number for number in range(20_000)], "id": [str(n) for n in range(20_000)]})
    (tmp_path / "a").mkdir()
    with PartWriter(tmp_path / "a", CONFIG, TIME) as writer:
        assert writer.put_many(table, topic="t", columns={"keys": "id"}) == 20_000
        assert writer.put_many(table.slice(0, 0), topic="t", columns={"keys": "id"}) == 0
        part = writer.finish()
    assert part.queues == {("t", 0): 20_000}
    with rmq.open(tmp_path / "peer", "x", config=CONFIG, clock=lambda: TIME) as store:
        store.put_many(table, topic="t", columns={"keys": "id"})
    assert files(tmp_path / "a") == files(tmp_path / "peer" / "commitlog")


def test_few_segments_are_mapped_at_a_time_and_each_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = MappedFile.sync
    monkeypatch.setattr(MappedFile, "sync", lambda self: (synced.append(self.path.name), real(self)))
    (tmp_path / "a").mkdir()
    with PartWriter(tmp_path / "a", CONFIG, TIME) as writer:
        for _ in range(40):
            writer.put_many([rmq.Message("t", b"x" * 1000)] * 10)
            assert len(writer._log.unsynced) <= 1
        writer.finish()
    assert set(synced) == {name for name, _ in files(tmp_path / "a")}


def test_a_bad_message_is_an_error_and_the_writer_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with PartWriter(tmp_path / "a", CONFIG, TIME) as writer:
        writer.put_many([rmq.Message("t", b"1")])
        with pytest.raises(rmq.MessageTooLargeError):
            writer.put_many([rmq.Message("t", b"x" * SEGMENT)])
        writer.put_many([rmq.Message("t", b"2")])
        part = writer.finish()
    assert part.queues == {("t", 0): 2}
    placed(tmp_path / "a", tmp_path / "b" / "commitlog", part)
    assert [row["body"] for row in rows(tmp_path / "b", "body")] == [b"1", b"2"]


def test_a_crc_of_whole_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enabled_append_prop_crc"):
        PartWriter(tmp_path, rmq.StoreConfig(enabled_append_prop_crc=True), TIME)


def test_the_unused_part_of_the_last_segment_takes_no_space(tmp_path: Path) -> None:
    big = 64 << 20
    part = written(tmp_path / "a", messages(10), rmq.StoreConfig(mapped_file_size_commit_log=big))
    placed(tmp_path / "a", tmp_path / "b", part, big, closed=True, size=big)
    status = (tmp_path / "b" / f"{big:020d}").stat()
    assert status.st_size == big
    assert status.st_blocks * 512 < 1 << 20


def test_messages_without_a_queue_offset_keep_none(tmp_path: Path) -> None:
    items = [rmq.Message("t", b"x", sys_flag=flag) for flag in (PREPARED, 0, ROLLBACK, COMMIT, 0)]
    part = written(tmp_path / "a", [*items, rmq.Message("only", b"x", sys_flag=PREPARED)])
    assert part.queues == {("t", 0): 3}
    assert placed(tmp_path / "a", tmp_path / "b" / "commitlog", part, first={("t", 0): 7}) == part
    assert [row["queue_offset"] for row in rows(tmp_path / "b", "queue_offset")] == [0, 7, 0, 8, 9, 0]


def test_a_record_that_is_larger_than_what_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq.logpart.COPY_BYTES", 100)
    part = written(tmp_path / "a", [rmq.Message("t", b"x" * size) for size in (0, 3000, 1, 7000, 5)])
    placed(tmp_path / "a", tmp_path / "b" / "commitlog", part)
    assert [len(row["body"]) for row in rows(tmp_path / "b", "body")] == [0, 3000, 1, 7000, 5]


@pytest.mark.parametrize("position", [0, L.RECORD_PHY_OFFSET_OFFSET, L.RECORD_BODY_OFFSET + 2])
def test_damage_is_an_error(tmp_path: Path, position: int) -> None:
    part = written(tmp_path / "a", [rmq.Message("t", b"body")] * 100)
    segment = tmp_path / "a" / f"{SEGMENT:020d}"
    data = bytearray(segment.read_bytes())
    data[position] ^= 0x11
    segment.write_bytes(data)
    with pytest.raises(rmq.CorruptFileError) as caught:
        placed(tmp_path / "a", tmp_path / "b", part)
    assert caught.value.path == str(segment)


def test_a_segment_that_is_gone_is_an_error(tmp_path: Path) -> None:
    part = written(tmp_path / "a", messages(200))
    (tmp_path / "a" / f"{SEGMENT:020d}").unlink()
    with pytest.raises(rmq.CorruptFileError, match="segment is missing"):
        placed(tmp_path / "a", tmp_path / "b", part)


def test_files_that_are_there_and_a_full_disk_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = written(tmp_path / "a", messages(20))
    placed(tmp_path / "a", tmp_path / "b", part)
    with pytest.raises(FileExistsError):
        placed(tmp_path / "a", tmp_path / "b", part)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("rmq.logpart.write_fully", full)
    with pytest.raises(OSError, match="full"):
        placed(tmp_path / "a", tmp_path / "c", part)


def test_a_file_that_had_no_room_for_a_part_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    with PartWriter(source, rmq.StoreConfig(mapped_file_size_commit_log=65536), 1) as writer:
        writer.put_many([rmq.Message("t", b"x")])
        part = writer.finish()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space") as caught:
        place_part(source, target, part, segment_size=65536, begin=0, queue_offsets={("t", 0): 0}, closed=False)
    assert caught.value.filename == str(target / "00000000000000000000")
