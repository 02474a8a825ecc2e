# SPDX-License-Identifier: Apache-2.0
"""The same work in pure Python: struct, zlib and mmap, as one would write it without rmq. Same bytes, same answers."""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

MAGIC = -626843481
BLANK_MAGIC = 0xCBD43194 - 2**32
HOST = struct.Struct(">4Bi")
FRONT = struct.Struct(">iiIiiqqiq8sq8siqi")  # size, magic, CRC, ... up to the length of the body
FRONT_SIZE = FRONT.size
UNIT = struct.Struct(">qiq")
ENTRY = struct.Struct(">iqii")
SLOT = struct.Struct(">i")
INDEX_HEADER = struct.Struct(">qqqqii")  # begin and end time, begin and end phy offset, slots in use, next entry
INDEX_HEADER_SIZE = INDEX_HEADER.size


def java_hash(text: str) -> int:
    value = 0
    for char in text.encode("utf-16-be")[1::2] if text.isascii() else _utf16(text):
        value = (31 * value + char) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def _utf16(text: str) -> Sequence[int]:
    return memoryview(text.encode("utf-16-le")).cast("H")


def index_key_hash(text: str) -> int:
    value = abs(java_hash(text))
    return value if value < 2**31 else 0


def host(text: str) -> bytes:
    address, _, port = text.rpartition(":")
    return HOST.pack(*(int(part) for part in address.split(".")), int(port))


class Appender:
    """Appends records to one file that is as large as it likes."""

    def __init__(self, path: Path, store_host: str = "127.0.0.1:10911") -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._host = host(store_host)
        self.position = 0
        self._queues: dict[tuple[str, int], int] = {}

    def put(self, topic: str, queue_id: int, body: bytes, keys: Iterable[str], tags: str | None, now: int) -> int:
        properties = f"KEYS\x01{' '.join(keys)}\x02"
        if tags is not None:
            properties += f"TAGS\x01{tags}\x02"
        raw, name = properties.encode(), topic.encode()
        size = FRONT_SIZE + len(body) + 1 + len(name) + 2 + len(raw)
        queue_offset = self._queues.get((topic, queue_id), 0)
        self._queues[topic, queue_id] = queue_offset + 1
        front = FRONT.pack(size, MAGIC, zlib.crc32(body) & 0x7FFFFFFF, queue_id, 0, queue_offset, self.position, 0,
                           now, self._host, now, self._host, 0, 0, len(body))  # fmt: skip
        self._file.write(b"".join((front, body, bytes((len(name),)), name, struct.pack(">h", len(raw)), raw)))
        self.position += size
        return self.position - size

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def split(path: Path, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The records of a file that holds nothing else from `begin` to `end`."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(-1 if end is None else end - begin)
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield data[at : at + size]
        at += size


class IndexWriter:
    """RocketMQ's put into one index file."""

    def __init__(self, path: Path, slots: int, entries: int) -> None:
        self._slots = slots
        self._entries_at = INDEX_HEADER_SIZE + 4 * slots
        with path.open("w+b") as file:
            file.truncate(self._entries_at + 20 * entries)
            self._map = mmap.mmap(file.fileno(), 0)
        self._count, self._used_slots, self._begin = 1, 0, (0, 0)

    def put_many(self, items: Iterable[tuple[str, int, int]]) -> None:
        """(key, phy offset, store timestamp) of each entry."""
        phy_offset = now = 0
        for key, phy_offset, now in items:
            if self._count == 1:
                self._begin = now, phy_offset
            key_hash = index_key_hash(key)
            at = INDEX_HEADER_SIZE + 4 * (key_hash % self._slots)
            (previous,) = SLOT.unpack_from(self._map, at)
            ENTRY.pack_into(self._map, self._entries_at + 20 * self._count, key_hash, phy_offset,
                            (now - self._begin[0]) // 1000, previous)  # fmt: skip
            SLOT.pack_into(self._map, at, self._count)
            self._used_slots += previous == 0
            self._count += 1
        INDEX_HEADER.pack_into(self._map, 0, self._begin[0], now, self._begin[1], phy_offset, self._used_slots,
                               self._count)  # fmt: skip

    def close(self) -> None:
        self._map.close()


class Mapped:
    """A file mapped to read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        self.map.close()


class Index(Mapped):
    """RocketMQ's walk over one index file."""

    def __init__(self, path: Path, slots: int) -> None:
        super().__init__(path)
        self._slots = slots
        self._entries_at = INDEX_HEADER_SIZE + 4 * slots

    def select(self, key: str, max_num: int = 32) -> list[int]:
        wanted, found = index_key_hash(key), []
        (number,) = SLOT.unpack_from(self.map, INDEX_HEADER_SIZE + 4 * (wanted % self._slots))
        while number > 0 and len(found) < max_num:
            key_hash, phy_offset, _, previous = ENTRY.unpack_from(self.map, self._entries_at + 20 * number)
            if key_hash == wanted:
                found.append(phy_offset)
            if previous >= number:
                break
            number = previous
        return found


class Log(Mapped):
    """One segment that starts at phy offset 0."""

    def record(self, at: int) -> dict[str, Any] | None:
        """The record there; None for a blank or nothing."""
        size, magic, crc, queue_id, _, queue_offset, phy_offset, _, _, _, stored, _, _, _, length = FRONT.unpack_from(
            self.map, at)  # fmt: skip
        if magic != MAGIC:
            return None
        place = at + FRONT_SIZE
        body = self.map[place : place + length]
        if zlib.crc32(body) & 0x7FFFFFFF != crc:
            raise ValueError(f"CRC at {at}")
        place += length
        topic = self.map[place + 1 : place + 1 + self.map[place]].decode()
        place += 1 + len(topic)
        (length,) = struct.unpack_from(">h", self.map, place)
        text = self.map[place + 2 : place + 2 + length].decode()
        properties = dict(item.split("\x01", 1) for item in text.split("\x02") if item)
        return {"size": size, "topic": topic, "queue_id": queue_id, "queue_offset": queue_offset,
                "phy_offset": phy_offset, "store_timestamp": stored, "body": body,
                "properties": properties}  # fmt: skip

    def walk(self) -> Iterator[dict[str, Any]]:
        """All records."""
        at = 0
        while (record := self.record(at)) is not None:
            yield record
            at += record["size"]

    def scan(self, rows: int = 8192) -> Iterator[dict[str, list[Any]]]:
        """Columns phy_offset, topic, body, keys of all records, in batches."""
        records = self.walk()
        while batch := list(islice(records, rows)):
            yield {"phy_offset": [record["phy_offset"] for record in batch],
                   "topic": [record["topic"] for record in batch],
                   "body": [record["body"] for record in batch],
                   "keys": [record["properties"].get("KEYS", "").split() for record in batch]}  # fmt: skip

    def query(self, index: Index, topic: str, key: str, limit: int = 32) -> list[dict[str, Any]]:
        found = []
        for phy_offset in index.select(f"{topic}#{key}", limit):
            record = self.record(phy_offset)
            if record is not None and record["topic"] == topic and key in record["properties"]["KEYS"].split():
                found.append(record)
        return found


class Queue(Mapped):
    """One consume queue file."""

    def pull(self, log: Log, queue_offset: int, limit: int) -> list[dict[str, Any]]:
        found = []
        for number in range(queue_offset, queue_offset + limit):
            phy_offset, size, _ = UNIT.unpack_from(self.map, 20 * number)
            if size <= 0:
                break
            record = log.record(phy_offset)
            assert record is not None
            found.append(record)
        return found


def derive(log: Log) -> tuple[dict[tuple[str, int], bytearray], dict[int, list[tuple[int, int]]]]:
    """Units of each queue and (hash, phy offset) of each key, from the log alone, in memory."""
    queues: dict[tuple[str, int], bytearray] = {}
    entries: dict[int, list[tuple[int, int]]] = {}
    for record in log.walk():
        at, tags = record["phy_offset"], record["properties"].get("TAGS")
        unit = UNIT.pack(at, record["size"], java_hash(tags) if tags else 0)
        queues.setdefault((record["topic"], record["queue_id"]), bytearray()).extend(unit)
        for key in record["properties"].get("KEYS", "").split():
            key_hash = index_key_hash(f"{record['topic']}#{key}")
            entries.setdefault(key_hash, []).append((key_hash, at))
    return queues, entries
