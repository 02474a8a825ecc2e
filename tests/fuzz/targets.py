"""The parsers of rmq as fuzz targets, each beside a second reading of the same bytes."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import oracle
from engine import Fault, Target
from smallfiles import (
    CONF,
    MANIFEST,
    META,
    OFFSETS,
    TOPICS,
    mark_seeds,
    mend_marks,
    merge,
    offsets,
    read_marks,
    use_meta,
)

import rmq
import rmq.message
from rmq._core import _layout as L
from rmq._core._columns import KINDS, ColumnBuilder
from rmq._core._consumequeue import pack_units, unpack_batch_units, unpack_units, valid_units
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._indexfit import geometry_candidates
from rmq._core._javahash import hash_str_keys
from rmq._core._messagelines import MessageLines
from rmq._core._queuetable import QueueTable
from rmq._core._record import CHECK_BODY_CRC, HASH_KEYS, PARSE_PROPERTIES, parse_properties, resync, used_size
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored, stored_at
from rmq.checkpoint import Checkpoint
from rmq.cli.fields import message_row
from rmq.lock import holder_pid
from rmq.marks import read_manifest
from rmq.message import StoredMessage, inner_messages, parse_offset_msg_id, parse_uniq_key, plain_body
from rmq.paths import INDEX_NAME, StorePaths, next_index_name
from rmq.scan import TABLE_BYTES, BatchMaker, unwrapped

BASE = 3 * 4096  # phy offset of the segment that an input stands for
DELAYS = np.array([1000, 5000], np.int64)
UNIT, BATCH_UNIT = struct.Struct(">qiq"), struct.Struct(">qiqqqhiI")
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
HASHES = hash_str_keys(["k", "k1", "T#k1"])
logging.getLogger("rmq").addHandler(logging.NullHandler())
logging.getLogger("rmq").propagate = False


def equal(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise Fault(f"{what}: {ours!r:.300} and {theirs!r:.300}")


# ---- records -----------------------------------------------------------------------------------------------

RECORDS: tuple[dict[str, Any], ...] = (
    {"body": b"hello", "raw_properties": b"KEYS\1k1 k2\2UNIQ_KEY\1u1\2TAGS\1TagA\2"},
    {"body": b"", "queue_id": 3, "flag": -7, "reconsume_times": 2, "store_timestamp": 1_700_000_000_000},
    {"body": b"v2" * 30, "topic": "%RETRY%" + "T" * 130, "raw_properties": b"A\1b"},
    {"body": b"v6", "born_host": "[2001:db8::1]:1", "store_host": "[::1]:10911", "raw_properties": b"A\1b\2"},
    {"body": b"4 and 6", "store_host": "[::1]:10911", "topic": "caf\u00e9", "sys_flag": 8},
    {"body": bytes(700), "born_host": "[::2]:9", "prepared_transaction_offset": 77, "sys_flag": 12},
    {"body": zlib.compress(b"plain" * 9), "sys_flag": 1, "raw_properties": b"KEYS\1k\2KEYS\1k1\2X\1\2"},
    {"body": b"d", "topic": "SCHEDULE_TOPIC_XXXX", "raw_properties": b"DELAY\0013\2TAGS\1t\2"},
    {"body": struct.pack(">iiiii2sh", 24, 0, 0, 7, 2, b"in", 0), "sys_flag": 192, "raw_properties": b"A\1b\2"},
    {"body": b"x", "raw_properties": b"KEYS\1k1\1k2\2\2\1\2TAGS\1a\1\1\2UNIQ_KEY\1\xff\xed\xa0\x80\2"},
)  # fmt: skip


def log_of(records: tuple[dict[str, Any], ...], blank: int = 0) -> bytes:
    data = b""
    for number, fields in enumerate(records):
        whole = {"topic": "T", "queue_id": 0, "queue_offset": number} | fields
        data += oracle.encode_record(phy_offset=BASE + len(data), **whole)
    return data + struct.pack(">iI", blank, oracle.MAGIC_BLANK) + bytes(blank - 8) if blank else data


def with_record_crc(data: bytes) -> bytes:
    """One more record, with the property __CRC32#. Its digits run backwards."""
    record = oracle.encode_record("T", 0, 0, BASE + len(data), b"sum", b"A\1b\2__CRC32#\x010000000000\2")
    digits = f"{zlib.crc32(record[: -L.PROPERTY_CRC_SIZE]) & 0x7FFFFFFF:010d}"[::-1]
    return data + record[: -L.PROPERTY_CRC_DIGITS - 1] + digits.encode() + b"\2"


@cache
def record_seeds() -> list[bytes]:
    logs = [log_of(RECORDS[i : i + 1]) for i in range(len(RECORDS))]
    logs += [log_of(RECORDS, 100), log_of(RECORDS[:2]) + bytes(40), with_record_crc(log_of(RECORDS[:1])), b""]
    return [bytes([control]) + log for log in logs for control in (0, 15 + 32, 31 + 64, 15 + 128)]


def mend_records(data: bytearray, random: Random) -> None:
    """Right sizes, own offsets and body CRCs, as far as the length fields let one walk."""
    at = 1
    while at + L.RECORD_FIXED_SIZE <= len(data):
        magic = int.from_bytes(data[at + 4 : at + 8], "big")
        if magic == oracle.MAGIC_BLANK:
            data[at : at + 4] = (len(data) - at).to_bytes(4, "big")
            return
        if magic not in (oracle.MAGIC_V1, oracle.MAGIC_V2):
            return
        flags = int.from_bytes(data[at + 36 : at + 40], "big")
        body_at = at + L.RECORD_BODY_OFFSET + 12 * bool(flags & 0x10) + 12 * bool(flags & 0x20)
        body = int.from_bytes(data[body_at - 4 : body_at], "big")
        width = 2 if magic == oracle.MAGIC_V2 else 1
        topic_at = body_at + body + width
        properties_at = topic_at + int.from_bytes(data[topic_at - width : topic_at], "big") + 2
        end = properties_at + int.from_bytes(data[properties_at - 2 : properties_at], "big")
        if end > len(data):
            if properties_at > len(data) or random.random() < 0.2:
                return
            end = len(data)
            data[properties_at - 2 : properties_at] = min(end - properties_at, 65535).to_bytes(2, "big")
        data[at : at + 4] = (end - at).to_bytes(4, "big")
        data[at + 8 : at + 12] = oracle.body_crc(bytes(data[body_at : body_at + body])).to_bytes(4, "big")
        data[at + 28 : at + 36] = (BASE + at - 1).to_bytes(8, "big")
        at = end


def scan(data: bytes) -> None:
    """A scan and everything that is asked of its rows. The first byte says how."""
    control, segment = data[:1], data[1:]
    flags = control[0] if control else 0
    batch = RecordBatch(3 if flags & 128 else 64)
    queues = QueueTable()
    checks = flags & 31 | (HASH_KEYS if flags & 64 else 0)
    batch.scan(segment, BASE, BASE, BASE + len(segment), checks=checks, queues=queues,
               byte_limit=200 if flags & 64 else 0)  # fmt: skip
    use(batch, bool(flags & 32))


def use(batch: RecordBatch, has_columns: bool) -> None:
    for row, message in enumerate(stored(batch, StoredMessage)):
        if stored_at(batch, row, StoredMessage) != message:
            raise Fault("a row alone is another message than among its neighbours")
    for name in ("phy_offset", "size", "queue", "queue_offset", "store_timestamp", "sys_flag"):
        batch.numbers(name)
    batch.has_inner_batches()
    batch.has_keys()
    batch.ambiguous()
    batch.match(b"T", ["k1", "u1"], np.arange(len(batch), dtype=np.int64) % 2)
    batch.find_keys({(b"T", b"k1"), (None, b"k")}, np.unique(HASHES))
    if len(batch) and batch.numbers("queue")[0] >= 0:
        pack_units(batch, DELAYS)
    index = bytearray(index_file_size(5, 12))
    view = IndexFileView(index, hash_slot_num=5, index_num=12, writable=True)
    view.put_rows(batch, 0, 0, index_tags=True)
    view.release()
    if has_columns:
        builder = ColumnBuilder(list(KINDS))
        builder.append(batch)
        builder.finish()
        for keys in (None, {"k", "k1", "u1"}):
            with suppress(rmq.CorruptFileError):
                for part in unwrapped(batch, keys):
                    part.numbers("queue_offset")
    batch.keep([b"T"], 0)


def has_surrogates(data: bytes) -> bool:
    """Whether text may hold encoded surrogates: Java reads U+FFFD for three bytes, the oracle one for each."""
    return SURROGATE.search(data) is not None


def compare_scan(data: bytes) -> None:
    if has_surrogates(data):
        return
    segment = data[1:]
    batch = RecordBatch(512)
    batch.scan(segment, BASE, BASE, BASE + len(segment), checks=CHECK_BODY_CRC | PARSE_PROPERTIES)
    messages = stored(batch, StoredMessage)
    rows = [message.as_tuple() for message in messages]
    at, records = 0, []
    while at < len(segment):
        is_ours = len(records) < len(rows)
        try:
            found = oracle.decode_record(segment, at)
        except ValueError as error:
            # Where the library reads on: a topic of 128 to 255 bytes, numbers in properties that are none.
            if is_ours and ("number" in str(error) or "negative" in str(error)):
                records.append(None)
                at += rows[len(records) - 1][4]
                continue
            found = None
        if found is None or found.phy_offset != BASE + at:
            break
        records.append(found)
        at += found.size
    if len(rows) != len(records):
        raise Fault(f"{len(rows)} records, not {len(records)}; stop {batch.stop} at {batch.next_phy_offset}")
    for ours, theirs in zip(rows, records, strict=True):
        if theirs is not None:
            equal("fields", ours, oracle_fields(theirs))
            equal("properties", parse_properties(ours[15]), theirs.properties)
    compare_columns(batch, messages)
    compare_lines(messages)


def oracle_fields(found: oracle.Record) -> tuple[Any, ...]:
    """As StoredFields.as_tuple has them."""
    return (found.topic, found.queue_id, found.queue_offset, found.phy_offset, found.size, found.flag, found.sys_flag,
            found.born_timestamp, oracle.encode_host(found.born_host), found.store_timestamp,
            oracle.encode_host(found.store_host), found.reconsume_times, found.prepared_transaction_offset,
            found.body_crc, found.body, found.raw_properties)  # fmt: skip


def compare_columns(batch: RecordBatch, messages: list[StoredMessage]) -> None:
    """Arrow columns are valid to the last bit and say what single messages say."""
    maker = BatchMaker([name for name in KINDS if name != "body"])
    maker.append(batch)
    [arrow] = maker.finish(TABLE_BYTES)
    arrow.validate(full=True)
    for name in arrow.schema.names:
        column = arrow[name]
        values = column.cast("int64").to_pylist() if "timestamp" in name else column.to_pylist()
        if name == "properties":
            values = [dict(items) for items in values]
        wanted = [getattr(message, name) for message in messages]
        equal(name, values, [list(item) for item in wanted] if name == "keys" else wanted)


def compare_lines(messages: list[StoredMessage]) -> None:
    lines, cells = MessageLines("jsonl"), MessageLines("csv")
    for message in messages:
        with suppress(rmq.CorruptFileError):
            row = message_row(message)
            lines.add(message)
            equal("line", lines.take(), json.dumps(row, ensure_ascii=False) + "\n")
            cells.add(message)
            row |= {"keys": " ".join(row["keys"]), "properties": json.dumps(row["properties"], ensure_ascii=False)}
            [read] = csv.reader(io.StringIO(cells.take(), newline=""))
            equal("cells", read, ["" if value is None else str(value) for value in row.values()])


def load(data: bytes) -> None:
    """Single records at places that the input itself names: its last 32 bytes."""
    segment, tail = data[1:-32], data[-32:].ljust(32, b"\0")
    places = sorted(BASE + number % (len(segment) + 64) - 32 for number in struct.unpack(">8i", tail))
    batch = RecordBatch(64)
    batch.load(segment, BASE, np.array([*places, -(2**63), 2**63 - 1], np.int64), BASE + len(segment),
               checks=data[0] & 31 if data else 0)  # fmt: skip
    use(batch, bool(data[:1]) and bool(data[0] & 32))
    places = [BASE + at for at in range(min(len(segment), 40))]
    batch.load(segment, BASE, np.array(places, np.int64), BASE + len(segment))
    resync(segment, BASE, BASE, BASE + len(segment))
    used_size(segment, min(len(segment), 3))


def compare_load(data: bytes) -> None:
    segment, expected = data[1:], -1
    for at in range(len(segment)):
        if segment[at + 4 : at + 5] != b"\xda":
            continue
        try:
            found = oracle.decode_record(segment, at)
        except ValueError as error:
            if "number" in str(error) or "negative" in str(error):
                return  # the library is laxer there
            continue
        if found is not None and found.phy_offset == BASE + at:
            expected = BASE + at
            break
    equal("resync", resync(segment, BASE, BASE, BASE + len(segment)),
          expected if b"__CRC32#" not in segment else resync(segment, BASE, BASE, BASE + len(segment)))  # fmt: skip


# ---- properties, bodies ------------------------------------------------------------------------------------


def properties(data: bytes) -> None:
    parse_properties(data)


def compare_properties(data: bytes) -> None:
    if not has_surrogates(data):
        equal("properties", parse_properties(data), oracle.parse_properties(data))


def inner_of(*bodies: bytes) -> bytes:
    packed = b""
    for body in bodies:
        tail = struct.pack(">iiii", 0, 0, 7, len(body)) + body + struct.pack(">h", 4) + b"A\1b\2"
        packed += struct.pack(">i", len(tail) + 4) + tail
    return packed


def body_seeds() -> list[bytes]:
    import pyarrow as pa

    plain = b"a body that packs well " * 20
    lz4, zstd = (pa.compress(plain, codec, asbytes=True) for codec in ("lz4", "zstd"))
    zipped = zlib.compress(plain)
    return [b"\0\0" + plain, b"\0\1" + zipped, b"\1\1" + lz4, b"\2\1" + zstd, b"\3\1" + zipped, b"\7\1x",
            b"\0\xc0" + inner_of(b"one", b"", b"three"), b"\0\xc1" + zlib.compress(inner_of(b"one")),
            b"\0\1" + zlib.compress(bytes(3_000_000))]  # fmt: skip


def bodies(data: bytes) -> None:
    """Decompression and inner batches. The limit is lowered: what counts is that it holds."""
    rmq.message.PLAIN_BODY_LIMIT = 2**20
    sys_flag, raw = int.from_bytes(data[:2], "big") & 0x7FF, data[2:]
    with suppress(rmq.CorruptFileError):
        if len(plain_body(raw, sys_flag, 5)) > max(2**20, len(raw)):
            raise Fault("a body larger than the limit")
    wrapper = StoredMessage(("T", 0, 0, 5, 99, 0, sys_flag, 0, bytes(8), 0, bytes(8), 0, 0, 0, raw, data[-60:]))
    with suppress(rmq.CorruptFileError):
        for message in inner_messages(wrapper) or [wrapper]:
            _ = message.properties, message.keys, message.tags, message.uniq_key, message.offset_msg_id, repr(message)


# ---- units, index ------------------------------------------------------------------------------------------


def unit_seeds() -> list[bytes]:
    units = [(i * 100, 100, i) for i in range(20)]
    batches = [(i * 100, 100, 0, 1_700_000_000_000, i * 10, 10, 0, 0) for i in range(9)]
    return [b"".join(UNIT.pack(*unit) for unit in units) + bytes(100), UNIT.pack(0, 2**31 - 1, 0) * 3, b"",
            b"".join(BATCH_UNIT.pack(*unit) for unit in batches) + bytes(46)]  # fmt: skip


def units(data: bytes) -> None:
    unpack_units(data)
    valid_units(data)
    unpack_batch_units(data)


def compare_units(data: bytes) -> None:
    expected = [UNIT.unpack_from(data, at) for at in range(0, len(data) - 19, 20)]
    equal("units", list(zip(*(column.tolist() for column in unpack_units(data)), strict=True)), expected)
    bad = [number for number, (phy, size, _) in enumerate(expected) if phy < 0 or size <= 0]
    equal("valid units", valid_units(data), bad[0] if bad else len(expected))
    rows = []
    for at in range(0, len(data) - 45, 46):
        unit = BATCH_UNIT.unpack_from(data, at)
        if unit[0] < 0 or unit[1] <= 0 or unit[4] < 0 or unit[5] <= 0:
            break
        rows.append(list(unit[:6]))
    equal("batch units", unpack_batch_units(data).tolist(), rows)


def index_seeds() -> list[bytes]:
    seeds = [b"\0\0", bytes(200)]
    for slots, entries, count in ((5, 20, 12), (1, 8, 8), (7, 30, 3)):
        index = bytearray(index_file_size(slots, entries))
        view = IndexFileView(index, hash_slot_num=slots, index_num=entries, writable=True)
        hashes = np.array([(i * i) % 11 for i in range(count)], np.int32)
        view.put(hashes, np.arange(count, dtype=np.int64) * 100, 1_700_000_000_000 + np.arange(count) * 1500)
        view.release()
        seeds.append(bytes([slots - 1, entries - 2]) + index)
    return seeds


def index_of(data: bytes) -> tuple[int, int, bytes]:
    slots, entries = 1 + (data[0] if data else 0) % 8, 2 + (data[1] if data[1:] else 0) % 30
    return slots, entries, data[2 : 2 + index_file_size(slots, entries)].ljust(index_file_size(slots, entries), b"\0")


def index(data: bytes) -> None:
    """Every walk over any bytes, then puts into them and a restore from a header that they hold."""
    slots, entries, image = index_of(data)
    stored = [int.from_bytes(image[at : at + 4], "big") & 0x7FFFFFFF for at in range(len(image) - 40, len(image), 20)]
    hashes = np.array([*range(12), 2**31 - 1, *stored], np.int32)
    view = IndexFileView(image, hash_slot_num=slots, index_num=entries)
    for begin, end in ((0, 2**63 - 1), (1_700_000_003_000, 1_700_000_009_000), (-(2**63), -1)):
        counts, values = view.select(hashes, 32, begin, end)
        if counts.sum() != len(values) or counts.max(initial=0) > 32:
            raise Fault("counts of select")
    counts, values = view.collect(hashes)
    if counts.max(initial=0) > entries:
        raise Fault("a chain longer than the file")
    view.fits()
    view.fits(being_put=True)
    view.counts_every_put()
    view.entries_of(int(values[0]) if len(values) else 0)
    _ = view.header(), view.index_count, view.is_full, view.hash_slot_count
    view.release()
    for being_put in (False, True):
        geometry_candidates(image, being_put=being_put)
        geometry_candidates(data, being_put=being_put)
    copy = bytearray(image)
    view = IndexFileView(copy, hash_slot_num=slots, index_num=entries, writable=True)
    view.put(hashes, hashes.astype(np.int64), hashes.astype(np.int64) << 20)
    view.settle()
    wrong = view.restore(image[:40])
    if not wrong and view.header() != image[:40]:
        raise Fault("restore took another header")
    wrong = view.restore(data[-40:].ljust(40, b"\0"))
    view.preset(5, 6)
    view.put(hashes, hashes.astype(np.int64), hashes.astype(np.int64))
    view.release()


def compare_index(data: bytes) -> None:
    """Where links only go back both walks give the same; a link forward ends ours, so ours is then the beginning."""
    slots, entries, image = index_of(data)
    view = IndexFileView(image, hash_slot_num=slots, index_num=entries)
    theirs = oracle.IndexFile(image, slots, entries)
    is_backward = all(theirs.entry(number).previous < number for number in range(entries))
    for key_hash in range(12):
        for begin, end, limit in ((0, 2**63 - 1, 32), (1_700_000_003_000, 1_700_000_009_000, 2)):
            values = view.select(np.array([key_hash], np.int32), limit, begin, end)[1].tolist()
            expected = theirs.select(chr(key_hash), limit, begin, end)
            equal("select", values, expected if is_backward else expected[: len(values)])
    view.release()


# ---- small files, names ------------------------------------------------------------------------------------


@cache
def root() -> Path:
    """A directory of this process, for parsers that want a file. Whoever sets TMPDIR takes it away."""
    folder = Path(tempfile.mkdtemp(prefix="rmq-fuzz-"))
    (folder / "rmq").mkdir()
    (folder / "config").mkdir()
    return folder


def small_file(name: str, parse: Callable[[StorePaths], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        (root() / name).write_bytes(data)
        with suppress(rmq.RmqError):
            parse(StorePaths(root()))

    return run


def config(data: bytes) -> None:
    (root() / "broker.conf").write_bytes(data)
    with suppress(ValueError, TypeError):
        rmq.StoreConfig.from_broker_conf(root() / "broker.conf")


def names(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in (parse_offset_msg_id, parse_uniq_key):
        with suppress(ValueError):
            parse(text)
    if INDEX_NAME.fullmatch(text) and text.isascii():
        following = next_index_name(text, 0)
        if text < "9" * 17 and (following <= text or not INDEX_NAME.fullmatch(following)):
            raise Fault(f"{following} is no name behind {text}")


TARGETS: tuple[Target, ...] = (
    Target("scan", record_seeds, scan, compare_scan, mend_records),
    Target("load", record_seeds, load, compare_load, mend_records),
    Target("properties", lambda: [fields.get("raw_properties", b"") for fields in RECORDS], properties,
           compare_properties),
    Target("bodies", body_seeds, bodies),
    Target("units", unit_seeds, units, compare_units),
    Target("index", index_seeds, index, compare_index),
    Target("checkpoint", lambda: [struct.pack(">5q", 1, 2, 3, 4, 5).ljust(4096, b"\0"), b""],
           small_file("checkpoint", lambda paths: Checkpoint(paths.checkpoint))),
    Target("marks", mark_seeds, small_file("rmq/marks", read_marks), mend=mend_marks),
    Target("meta", lambda: [json.dumps(META).encode(), b"{}"], small_file("rmq/meta.json", use_meta)),
    Target("manifest", lambda: [json.dumps(MANIFEST).encode()], small_file("rmq/manifest.json", read_manifest)),
    Target("owner", lambda: [b'{"pid": 5, "host": "h"}', b"5"], small_file("rmq/owner", holder_pid)),
    Target("topics", lambda: [TOPICS, b"{}", b"", b'{"x":' * 900 + b"1" + b"}" * 900],
           small_file("config/topics.json", merge)),
    Target("offsets", lambda: [OFFSETS, b"{}", b"", b'{"x":' * 900 + b"1" + b"}" * 900],
           small_file("config/consumerOffset.json", offsets)),
    Target("config", lambda: [CONF], config),
    Target("names", lambda: [b"7F0000010000271000000000000000FF", b"20260101000000000", b"99991231235959999",
                             b"99999999999999999"], names),
)  # fmt: skip
