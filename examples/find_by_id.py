# SPDX-License-Identifier: Apache-2.0
"""Find one message by its unique id through the index: from the key to the slot, along the chain, to the record.

What one learns: the hash of `topic#id` names a slot, the slot its newest entry, each entry the one before it. An
entry holds a hash and not the key, so the index proposes and the record decides: of the three entries in the chain
of the usual id, one has another hash and one is of another message. All of it is read from the files with struct
and compared with what rmq answers; exit code 1 when that differs or no message has the id.
Run `python examples/find_by_id.py STORE [ID]` after write_messages.py.
The formats: docs/format/indexfile.md, commitlog.md.
"""

import argparse
import struct
import sys
from pathlib import Path
from socket import inet_ntoa
from typing import Any

import rmq

TOPIC = "TopicTest"
CLASSIC = "8d8eb486-d94c-4da1-bdfe-f0587161ea05"

# The formats, big-endian throughout: i and I have 4 bytes, I without a sign; q has 8; 8s is 8 bytes as they are.
INDEX_HEADER = struct.Struct(">4q2i")  # begin and end timestamp, begin and end phy offset, slots in use, next entry
SLOT = struct.Struct(">i")  # number of the newest entry; 0: none
ENTRY = struct.Struct(">iqii")  # key hash, phy offset, time difference, previous entry
RECORD_FRONT = struct.Struct(">iI3i2qiq8sq8siqi")
FRONT_NAMES = ("size", "magic", "body_crc", "queue_id", "flag", "queue_offset", "phy_offset", "sys_flag",
               "born_timestamp", "born_host", "store_timestamp", "store_host", "reconsume_times",
               "prepared_transaction_offset", "body_size")  # fmt: skip


def read(path: Path, position: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        return file.read(size)


def check(what: str, in_file: object, by_rmq: object) -> None:
    if in_file != by_rmq:
        sys.exit(f"{what}: the file says {in_file}, rmq says {by_rmq}")


def read_record(store: rmq.Store, phy_offset: int) -> dict[str, Any]:
    """The fields of a record; its file in the log is named after the offset of its first byte."""
    position = phy_offset % store.config.mapped_file_size_commit_log
    log = store.path / "commitlog" / f"{phy_offset - position:020d}"
    record = read(log, position, int.from_bytes(read(log, position, 4), "big"))
    fields = dict(zip(FRONT_NAMES, RECORD_FRONT.unpack_from(record), strict=True))
    fields["magic"] = f"0x{fields['magic']:X}"
    for name in ("born_host", "store_host"):
        fields[name] = f"{inet_ntoa(fields[name][:4])}:{int.from_bytes(fields[name][4:], 'big')}"
    topic_at = RECORD_FRONT.size + fields["body_size"]  # one byte for its size, two for that of the properties
    properties_at = topic_at + 1 + record[topic_at]
    return {**fields, "raw_body": record[RECORD_FRONT.size : topic_at],
            "topic": record[topic_at + 1 : properties_at].decode(),
            "raw_properties": record[properties_at + 2 :]}  # fmt: skip


def uniq_key_of(record: dict[str, Any]) -> str | None:
    items = record["raw_properties"].decode().split("\2")  # name \1 value \2 name \1 value \2
    return dict(item.split("\1") for item in items if item).get("UNIQ_KEY")


def show_header(index: Path, file: rmq.IndexFile) -> int:
    """Print an index file's header; returns its begin timestamp."""
    data = read(index, 0, INDEX_HEADER.size)
    begin_ms, end_ms, begin, end, slot_count, next_entry = INDEX_HEADER.unpack(data)
    print(f"index file {index.name}, {index.stat().st_size} bytes")
    print(f"  stored at      {begin_ms} to {end_ms}")
    print(f"  phy offsets    {begin} to {end}")
    print(f"  slots in use   {slot_count}, next entry {next_entry}")
    check("header", (begin_ms, end_ms, begin, end, slot_count, next_entry),
          (file.begin_timestamp, file.end_timestamp, file.begin_phy_offset, file.end_phy_offset,
           file.hash_slot_count, file.index_count))  # fmt: skip
    return begin_ms


def show_slot(index: Path, slots: int, key: str) -> int:
    """Print how a key leads to its slot; returns the number of the entry there."""
    key_hash = rmq.index_key_hash(key)
    slot = key_hash % slots
    position = INDEX_HEADER.size + SLOT.size * slot
    data = read(index, position, SLOT.size)
    (newest,) = SLOT.unpack(data)
    print(f"\nkey {key}")
    print(f"  hash code      {rmq.java_hash(key)}, absolute {key_hash}")
    print(f"  slot number    {key_hash} % {slots} = {slot}")
    print(f"  slot position  {INDEX_HEADER.size} + {SLOT.size} * {slot} = {position}")
    print(f"  in the slot    {data.hex()}: entry {newest}")
    return newest


def show_entry(index: Path, slots: int, number: int, begin_ms: int) -> tuple[int, int, int]:
    """Print an entry; returns its key hash, its phy offset and the number of the previous entry."""
    position = INDEX_HEADER.size + SLOT.size * slots + ENTRY.size * number
    data = read(index, position, ENTRY.size)
    key_hash, phy_offset, seconds, previous = ENTRY.unpack(data)
    print(f"\nentry {number}, at {INDEX_HEADER.size} + {SLOT.size} * {slots} + {ENTRY.size} * {number} = {position}")
    print(f"  its bytes      {data.hex(' ', 4)}")
    print(f"  key hash       {key_hash}")
    print(f"  phy offset     {phy_offset}")
    print(f"  time           {seconds} s after {begin_ms}")
    print(f"  previous       {previous}")
    return key_hash, phy_offset, previous


def find(store: rmq.Store, index: Path, uniq_key: str) -> dict[str, Any] | None:
    """Print the way to an id through an index file; returns the newest record that has it, or None."""
    key, slots = f"{TOPIC}#{uniq_key}", store.config.max_hash_slot_num
    found, candidates = None, []
    with rmq.IndexFile(index, max_hash_slot_num=slots) as file:
        begin_ms = show_header(index, file)
        number = show_slot(index, slots, key)
        while number > 0:
            key_hash, phy_offset, previous = show_entry(index, slots, number, begin_ms)
            if key_hash != rmq.index_key_hash(key):
                print("  verdict        another hash: passed over")
            else:
                candidates.append(phy_offset)
                record = read_record(store, phy_offset)
                is_own = (record["topic"], uniq_key_of(record)) == (TOPIC, uniq_key)
                print(f"  the record     has the id {uniq_key_of(record)}")
                print(f"  verdict        {'found' if is_own else 'the same hash, another id: passed over'}")
                if is_own and found is None:
                    found = record
            number = previous if previous < number else 0  # links only go back
        check("phy offsets of the hash", candidates, file.select_phy_offset(key))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path, help="the directory that write_messages.py made")
    parser.add_argument("id", nargs="?", default=CLASSIC, help="the unique id to look for (default: %(default)s)")
    options = parser.parse_args()
    with rmq.open(options.store) as store:
        (index,) = (store.path / "index").iterdir()
        record = find(store, index, options.id)
        if record is None:
            sys.exit(f"no message has the id {options.id}")
        message = store.lookup(options.id, topic=TOPIC)
        print("\nthe record")
        for name, value in record.items():
            print(f"  {name:<27}  {value}")
            if name not in ("magic", "body_size"):
                check(name, value, getattr(message, name))


if __name__ == "__main__":
    main()
