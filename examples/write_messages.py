# SPDX-License-Identifier: Apache-2.0
"""Write ten messages, then find each of them in the files: commit log, consume queue, index.

What one learns: the log holds the messages one behind the other; the queue holds 20 bytes for each, so a queue
offset is a position; the index turns a key into a slot by Java's string hash, so a key is a position too. Every
figure is read from the files with struct and compared with what rmq says; a difference ends with exit code 1.
Run `python examples/write_messages.py STORE` with a new directory, then read_queue.py and find_by_id.py on it.
The formats: docs/format/commitlog.md, consumequeue.md, indexfile.md.
"""

import argparse
import itertools
import struct
import sys
from pathlib import Path

import rmq

TOPIC, QUEUE_ID = "TopicTest", 0
CLASSIC = "8d8eb486-d94c-4da1-bdfe-f0587161ea05"
MESSAGES = (  # unique id, tags, body
    ("537d950a-a57b-4209-b70f-bce7b118d8ff", "TagA", b"one"),
    ("208fed1a-a66c-4081-9298-31415535e884", "TagB", b"two"),
    (CLASSIC, "TagC", b"three"),
    ("5f872b2a-1c78-4bee-b2b7-1c728cc80ba9", "TagA", b"four"),
    ("9E8eb486-d94c-4da1-bdfe-f0587161ea05", "TagB", b"five: a hash like three's, as 31*'9'+'E' is 31*'8'+'d'"),
    ("5e6039d9-6be9-48b4-be8d-2f9cb6692a96", "TagC", b"six"),
    ("0ee5b305-1576-4f38-ba1d-07c3cbf4f5db", "TagA", b"seven"),
    ("87805daf-76f1-4cdf-8b1e-6d9ab4076648", "TagB", b"eight: another hash, the same slot"),
    ("1f7fd6c9-01f5-47e3-ab06-20bbdaa6999d", "TagC", b"nine"),
    ("341a10b1-0dbf-4d4e-9b78-c61cd766c903", "TagA", b"ten"),
)
FIRST_MS = 1_700_000_000_000  # the store's clock: a fixed time, and a second more for each message

# The formats, big-endian throughout: i and I have 4 bytes, I without a sign; q has 8.
RECORD_FRONT = struct.Struct(">iI3i2q")  # size, magic, body CRC, queue id, flag, queue offset, phy offset
UNIT = struct.Struct(">qiq")  # phy offset, record size, tags code
INDEX_HEADER = struct.Struct(">4q2i")  # begin and end timestamp, begin and end phy offset, slots in use, next entry
SLOT = struct.Struct(">i")  # number of the newest entry; 0: none
ENTRY = struct.Struct(">iqii")  # key hash, phy offset, time difference, previous entry


def read(path: Path, layout: struct.Struct, position: int) -> bytes:
    """As many bytes of a file as the layout has."""
    with path.open("rb") as file:
        file.seek(position)
        return file.read(layout.size)


def check(what: str, in_file: object, by_rmq: object) -> None:
    if in_file != by_rmq:
        sys.exit(f"{what}: the file says {in_file}, rmq says {by_rmq}")


def write(directory: Path) -> tuple[list[rmq.PutResult], int]:
    """Returns where the messages went, and how many slots an index file of the store has."""
    with rmq.open(directory, "x", clock=itertools.count(FIRST_MS, 1000).__next__) as store:
        results = [
            store.put(rmq.Message(TOPIC, body, queue_id=QUEUE_ID, tags=tags, uniq_key=uniq_key))
            for uniq_key, tags, body in MESSAGES
        ]
        return results, store.config.max_hash_slot_num


def show_record(log: Path, put: rmq.PutResult) -> None:
    size, magic, _, queue_id, _, queue_offset, phy_offset = RECORD_FRONT.unpack(read(log, RECORD_FRONT, put.phy_offset))
    print(f"  commit-log offset  {phy_offset}: {size} bytes, magic 0x{magic:X}")
    check("record", (size, queue_id, queue_offset, phy_offset),
          (put.size, put.queue_id, put.queue_offset, put.phy_offset))  # fmt: skip


def show_unit(queue: Path, put: rmq.PutResult, tags: str) -> None:
    position = put.queue_offset * UNIT.size
    data = read(queue, UNIT, position)
    phy_offset, size, tags_code = UNIT.unpack(data)
    print(f"  queue unit         {put.queue_offset}, at {put.queue_offset} * {UNIT.size} = {position}")
    print(f"  its bytes          {data.hex(' ', 4)}")
    print(f"  its fields         phy offset {phy_offset}, size {size}, tags code {tags_code}")
    check("unit", (phy_offset, size, tags_code), (put.phy_offset, put.size, rmq.java_hash(tags)))


def show_hash(key: str, slots: int) -> tuple[int, int]:
    """Print what the hash of a key is; returns its slot and the position of that."""
    hash_code = rmq.java_hash(key)
    absolute = abs(hash_code) if hash_code != -(2**31) else 0  # an int has no 2**31; RocketMQ then takes 0
    slot = absolute % slots
    position = INDEX_HEADER.size + SLOT.size * slot
    print(f"  hash code          {hash_code}")
    print(f"  absolute hash      {absolute}")
    print(f"  slot number        {absolute} % {slots} = {slot}")
    print(f"  slot position      {INDEX_HEADER.size} + {SLOT.size} * {slot} = {position}")
    check("absolute hash", absolute, rmq.index_key_hash(key))
    return slot, position


def show_slot(index: Path, slots: int, put: rmq.PutResult, uniq_key: str) -> None:
    key = f"{put.topic}#{uniq_key}"
    print(f"  index key          {key}")
    slot, position = show_hash(key, slots)
    data = read(index, SLOT, position)
    (newest,) = SLOT.unpack(data)
    print(f"  in the slot        {data.hex()}: entry {newest}, the newest of its chain")
    entry = read(index, ENTRY, INDEX_HEADER.size + SLOT.size * slots + ENTRY.size * newest)
    key_hash, _, _, _ = ENTRY.unpack(entry)
    check("slot of the entry", key_hash % slots, slot)
    with rmq.IndexFile(index, max_hash_slot_num=slots) as file:
        check("phy offset in the chain", put.phy_offset in file.select_phy_offset(key), True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path, help="a directory that does not exist yet")
    directory: Path = parser.parse_args().store
    results, slots = write(directory)
    log = directory / "commitlog" / f"{0:020d}"  # a file is named after the offset of its first byte
    queue = directory / "consumequeue" / TOPIC / str(QUEUE_ID) / f"{0:020d}"
    (index,) = (directory / "index").iterdir()  # named after the time when it was made
    print(f"the files in {directory}")
    for name, path in (("commit log", log), ("consume queue", queue), ("index file", index)):
        print(f"  {name:<17}  {path.relative_to(directory)}  {path.stat().st_size} bytes")
    for put, (uniq_key, tags, body) in zip(results, MESSAGES, strict=True):
        print(f"\nmessage {uniq_key}, {body.decode()}")
        show_record(log, put)
        show_unit(queue, put, tags)
        show_slot(index, slots, put, uniq_key)
    print(f"\nThe classic figures: the id {CLASSIC} itself as the key, without a topic")
    show_hash(CLASSIC, slots)


if __name__ == "__main__":
    main()
