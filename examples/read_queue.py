# SPDX-License-Identifier: Apache-2.0
"""Read all messages of a consume queue unit by unit, each with its record from the commit log.

What one learns: a queue is an array of 20-byte units, each of which says where a record is, how long it is and
which tags it has; the first unit without a size ends the queue. The record stands in the log and says itself where
it belongs. All of it is read from the files with struct and compared with what store.pull answers; a difference
ends with exit code 1.
Run `python examples/read_queue.py STORE` after write_messages.py.
The formats: docs/format/consumequeue.md, commitlog.md.
"""

import argparse
import struct
import sys
from pathlib import Path

import rmq

TOPIC, QUEUE_ID = "TopicTest", 0

# The formats, big-endian throughout: i has 4 bytes, q has 8; what x counts is passed over.
UNIT = struct.Struct(">qiq")  # phy offset, record size, tags code
RECORD_FRONT = struct.Struct(">i8xi4x2q20xq20xi")  # size, queue id, queue offset, phy offset, store time, body size


def check(what: str, in_file: object, by_rmq: object) -> None:
    if in_file != by_rmq:
        sys.exit(f"{what}: the file says {in_file}, rmq says {by_rmq}")


def read_units(queue: Path) -> list[bytes]:
    """The units of a queue's file, up to the first without a size: the rest of the file is not used yet."""
    data, units = queue.read_bytes(), []
    for position in range(0, len(data), UNIT.size):
        unit = data[position : position + UNIT.size]
        _, size, _ = UNIT.unpack(unit)
        if size <= 0:
            break
        units.append(unit)
    return units


def read_record(store: rmq.Store, phy_offset: int, size: int) -> bytes:
    """Bytes of the log, from the file that has them: it is named after the offset of its first byte."""
    position = phy_offset % store.config.mapped_file_size_commit_log
    with (store.path / "commitlog" / f"{phy_offset - position:020d}").open("rb") as file:
        file.seek(position)
        return file.read(size)


def show_unit(store: rmq.Store, number: int, unit: bytes, message: rmq.StoredMessage) -> None:
    phy_offset, size, tags_code = UNIT.unpack(unit)
    print(f"\nunit {number}, at {number} * {UNIT.size} = {number * UNIT.size}")
    print(f"  its bytes    {unit.hex(' ', 4)}")
    print(f"  its fields   phy offset {phy_offset}, size {size}, tags code {tags_code}")
    check("unit", (phy_offset, size, tags_code), (message.phy_offset, message.size, rmq.java_hash(message.tags or "")))
    record = read_record(store, phy_offset, size)
    own_size, queue_id, queue_offset, own_phy_offset, stored, body_size = RECORD_FRONT.unpack_from(record)
    body = record[RECORD_FRONT.size : RECORD_FRONT.size + body_size]
    print(f"  the record   size {own_size}, queue {queue_id}, queue offset {queue_offset}, phy offset {own_phy_offset}")
    print(f"  stored at    {stored}")
    print(f"  body         {body.decode()}")
    check("record", (own_size, queue_id, queue_offset, own_phy_offset, stored, body),
          (message.size, QUEUE_ID, number, message.phy_offset, message.store_timestamp, message.body))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path, help="the directory that write_messages.py made")
    with rmq.open(parser.parse_args().store) as store:
        queue = store.path / "consumequeue" / TOPIC / str(QUEUE_ID) / f"{0:020d}"
        units = read_units(queue)
        print(f"{queue.relative_to(store.path)}: {len(units)} units of {queue.stat().st_size // UNIT.size}")
        answer = store.pull(TOPIC, QUEUE_ID, 0, limit=len(units))
        check("units", len(units), answer.max_queue_offset)
        for number, (unit, message) in enumerate(zip(units, answer.messages, strict=True)):
            show_unit(store, number, unit, message)


if __name__ == "__main__":
    main()
