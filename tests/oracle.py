"""A second, independent reading of RocketMQ store files, to check `rmq` against.

Written from the format document with nothing but the standard library, sharing no code with `rmq`.
Section names in brackets (B.1, E.4, ...) are those of that document.
"""

from __future__ import annotations

import ipaddress
import mmap
import random
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
ANY_MAGIC = re.compile(b"\xda\xa3\x20[\xa7\xab]|\xcb\xd4\x31\x94")
V1_MAX_TOPIC_CHARS = 127
BORN_V6, STORE_V6, TRANSACTION_MASK, PREPARED, ROLLBACK = 0x10, 0x20, 0xC, 0x4, 0xC
FRONT = struct.Struct(">iI")  # totalSize magic
FIXED = struct.Struct(">iiiqqiq")  # bodyCRC queueId flag queueOffset physicalOffset sysFlag bornTimestamp
UNIT, PRE_BLANK = struct.Struct(">qiq"), (0, 0x7FFFFFFF, 0)
INDEX_HEADER, SLOT, ENTRY = struct.Struct(">qqqqii"), struct.Struct(">i"), struct.Struct(">iqii")
MAX_QUERY, MAX_INT = 64, 2**31 - 1
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAY_SECONDS = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
NAME_VALUE, ITEM_END = "\x01", "\x02"
LAST_OLD_PARSER, LAST_COUNT_EVERY_PUT, FIRST_TAG_ENTRY = (4, 9, 0), (4, 7, 0), (5, 4, 0)
MAX_REPORTED = 5  # differences of one kind that check_store lists for a file or queue

Buffer = bytes | mmap.mmap
QueueKey = tuple[str, int]


def _signed(value: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


@lru_cache(maxsize=100_000)
def java_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 units, wrapped to a signed 32-bit int [C]."""
    result = 0
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be", "surrogatepass")):
        result = (31 * result + unit) & 0xFFFFFFFF
    return _signed(result, 32)


def index_key_hash(text: str) -> int:
    """The hash an index entry stores: |hashCode|, but 0 for -2^31, which has no absolute int [E.1]."""
    return abs(hashed) if (hashed := java_hash(text)) != -(2**31) else 0


def body_crc(body: bytes) -> int:
    """CRC-32 of the stored body without its top bit [B.4]."""
    return zlib.crc32(body) & 0x7FFFFFFF


def parse_properties(raw: bytes, old_parser: bool = False) -> dict[str, str]:
    """Properties string as a dict, later duplicates win [B.5]; old_parser: as up to 4.9.0 [A]."""
    result = {}
    for item in raw.decode("utf-8", "replace").split(ITEM_END):
        name, _, value = item.partition(NAME_VALUE)
        if old_parser:  # Java's split drops empty parts at the end, and there must be two
            value = value.rstrip(NAME_VALUE)
        if value and (NAME_VALUE not in value if old_parser else name):
            result[name] = value
    return result


def _split_keys(properties: dict[str, str]) -> list[str]:
    return [piece for piece in properties.get("KEYS", "").split(" ") if piece]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _java_number(text: str, bits: int) -> int:
    """As Integer.parseInt and the like: unlike int(), no spaces, no underscores, range checked."""
    if not re.fullmatch(r"[+-]?\d+", text) or _signed(int(text), bits) != int(text):
        raise ValueError(f"not a {bits}-bit number: {text!r}")
    return int(text)


def _tags_code(topic: str, properties: dict[str, str], store_timestamp: int) -> int:
    if topic == SCHEDULE_TOPIC and "DELAY" in properties:
        level = min(_java_number(properties["DELAY"], 32), len(DELAY_SECONDS))
        if level > 0:
            return store_timestamp + DELAY_SECONDS[level - 1] * 1000
    return java_hash(properties.get("TAGS", ""))


def decode_host(host: bytes) -> str:
    """8 or 20 stored bytes (address, int port) as "a.b.c.d:port" or "[v6]:port", v6 uncompressed."""
    address, (port,) = host[:-4], struct.unpack(">i", host[-4:])
    if len(address) == 4:
        return f"{'.'.join(map(str, address))}:{port}"
    return f"[{':'.join(f'{group:x}' for group in struct.unpack('>8H', address))}]:{port}"


def encode_host(text: str) -> bytes:
    """Inverse of decode_host; takes compressed v6 text too."""
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def offset_msg_id(store_host: bytes, phy: int) -> str:
    """The message id that names a log position [C]; store_host as stored (8 or 20 bytes)."""
    return (store_host + struct.pack(">q", phy)).hex().upper()


@dataclass(frozen=True)
class Record:
    """One commit log record: the stored fields [B.1] and what RocketMQ derives from them."""

    topic: str
    queue_id: int
    queue_offset: int
    phy_offset: int
    size: int
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    body: bytes
    raw_properties: bytes
    magic: int

    @cached_property
    def properties(self) -> dict[str, str]:
        """The properties as the parser of 4.9.1 and later reads them."""
        return parse_properties(self.raw_properties)

    @property
    def keys(self) -> list[str]:
        """The non-empty pieces of KEYS, duplicates kept."""
        return _split_keys(self.properties)

    @property
    def tags(self) -> str | None:
        return self.properties.get("TAGS")

    @property
    def uniq_key(self) -> str | None:
        return self.properties.get("UNIQ_KEY")

    @property
    def offset_msg_id(self) -> str:
        return offset_msg_id(encode_host(self.store_host), self.phy_offset)

    @property
    def tags_code(self) -> int:
        """Hash of TAGS, or the delivery time of a delayed message [C]."""
        return _tags_code(self.topic, self.properties, self.store_timestamp)

    @property
    def transaction(self) -> int:
        return self.sys_flag & TRANSACTION_MASK

    def encode(self) -> bytes:
        """The stored bytes; exact unless the topic was not valid UTF-8."""
        return encode_record(crc=self.body_crc, **{name: getattr(self, name) for name in _ENCODED})


_ENCODED = set(Record.__dataclass_fields__) - {"size", "body_crc"}


def encode_record(
    topic: str, queue_id: int, queue_offset: int, phy_offset: int, body: bytes, raw_properties: bytes = b"",
    *, flag: int = 0, sys_flag: int = 0, born_timestamp: int = 0, born_host: str = "127.0.0.1:0",
    store_timestamp: int = 0, store_host: str = "127.0.0.1:10911", reconsume_times: int = 0,
    prepared_transaction_offset: int = 0, magic: int | None = None, crc: int | None = None,
) -> bytes:
    """The bytes of a record [B.1]. V1 or V2 by topic length, v6 bits by the hosts, CRC by the body."""
    if magic is None:
        magic = MAGIC_V2 if len(topic.encode("utf-16-be")) // 2 > V1_MAX_TOPIC_CHARS else MAGIC_V1
    crc = body_crc(body) if crc is None else crc
    born, store, name = encode_host(born_host), encode_host(store_host), topic.encode()
    sys_flag |= BORN_V6 * (len(born) > 8) | STORE_V6 * (len(store) > 8)
    data = b"".join((
        FIXED.pack(crc, queue_id, flag, queue_offset, phy_offset, sys_flag, born_timestamp),
        born, struct.pack(">q", store_timestamp), store,
        struct.pack(">iq", reconsume_times, prepared_transaction_offset),
        struct.pack(">i", len(body)), body,
        struct.pack(">h" if magic == MAGIC_V2 else ">b", len(name)), name,
        struct.pack(">h", len(raw_properties)), raw_properties,
    ))
    return FRONT.pack(FRONT.size + len(data), magic) + data


def decode_record(data: Buffer, start: int = 0) -> Record | None:
    """The record at a position [H.1, with body CRC]; None for a blank, ValueError for anything else."""
    at = start

    def take(size: int) -> bytes:
        nonlocal at
        if size < 0 or at + size > len(data):
            raise ValueError("negative or too long")
        at += size
        return data[at - size:at]

    def number(size: int) -> int:
        return int.from_bytes(take(size), "big", signed=True)

    total, magic = FRONT.unpack(take(FRONT.size))
    if total > len(data) - start or magic not in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK):
        raise ValueError("no record here")
    if magic == MAGIC_BLANK:
        return None
    crc, queue_id, flag, queue_offset, phy, sys_flag, born_timestamp = FIXED.unpack(take(FIXED.size))
    born_host = decode_host(take(20 if sys_flag & BORN_V6 else 8))
    store_timestamp = number(8)
    store_host = decode_host(take(20 if sys_flag & STORE_V6 else 8))
    reconsume_times, prepared_transaction_offset = number(4), number(8)
    body = take(number(4))
    topic = take(number(2 if magic == MAGIC_V2 else 1)).decode("utf-8", "replace")
    raw_properties = take(number(2))
    if (body and body_crc(body) != crc) or at - start != total:
        raise ValueError("wrong CRC or length")
    record = Record(
        topic, queue_id, queue_offset, phy, total, flag, sys_flag, born_timestamp, born_host, store_timestamp,
        store_host, reconsume_times, prepared_transaction_offset, crc, body, raw_properties, magic)
    _ = record.tags_code  # a DELAY or an inner batch property that is no number fails the record too
    if {"INNER_NUM", "INNER_BASE"} <= record.properties.keys():
        _java_number(record.properties["INNER_BASE"], 64)
        _java_number(record.properties["INNER_NUM"], 16)
    return record


def _map(path: Path) -> Buffer:
    """A file's content, mapped because default-sized files are sparse and up to 1 GiB long."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _numbered(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def read_records(store: Path) -> list[Record]:
    """All records of the commit log, up to the first position that holds none or another's."""
    records: list[Record] = []
    for path in _numbered(store / "commitlog"):
        data, start, at = _map(path), int(path.name), 0
        try:
            while (record := decode_record(data, at)) is not None:
                if record.phy_offset != start + at:
                    return records
                records.append(record)
                at += record.size
        except ValueError:
            return records
    return records


class Unit(NamedTuple):
    """One consume queue unit [D.1] and the place it has in its queue."""

    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int


def _read_units(folder: Path) -> Iterator[Unit]:
    for path in _numbered(folder):
        data, start = _map(path), int(path.name)
        for at in range(0, len(data) - UNIT.size + 1, UNIT.size):
            phy, size, tags_code = UNIT.unpack_from(data, at)
            if phy < 0 or size <= 0:
                return
            if (phy, size, tags_code) != PRE_BLANK:
                yield Unit((start + at) // UNIT.size, phy, size, tags_code)


def read_queues(store: Path) -> dict[QueueKey, list[Unit]]:
    """The units of every queue that has any; a queue ends at its first invalid unit [D.4]."""
    root = store / "consumequeue"
    folders = [folder for topic in root.iterdir() for folder in _numbered(topic)] if root.is_dir() else []
    queues = {(folder.parent.name, int(folder.name)): list(_read_units(folder)) for folder in folders}
    return {key: units for key, units in queues.items() if units}


def expected_units(records: Iterable[Record], version: str = "5.3.3") -> dict[QueueKey, list[Unit]]:
    """The units dispatch must have made of these records, in log order [D.3]."""
    queues: dict[QueueKey, list[Unit]] = {}
    for record in records:
        if record.transaction not in (PREPARED, ROLLBACK):
            properties = parse_properties(record.raw_properties, _version(version) <= LAST_OLD_PARSER)
            tags_code = _tags_code(record.topic, properties, record.store_timestamp)
            unit = Unit(record.queue_offset, record.phy_offset, record.size, tags_code)
            queues.setdefault((record.topic, record.queue_id), []).append(unit)
    return queues


class IndexHeader(NamedTuple):
    """The start of an index file [E.1]; index_count is the number of the next entry."""

    begin_timestamp: int
    end_timestamp: int
    begin_phy_offset: int
    end_phy_offset: int
    hash_slot_count: int
    index_count: int


EMPTY_INDEX = IndexHeader(0, 0, 0, 0, 0, 1)


class IndexEntry(NamedTuple):
    """One index entry; previous is the number of the next older entry of its slot, 0 for none."""

    key_hash: int
    phy_offset: int
    seconds: int
    previous: int


class IndexFile:
    """An index file, whose geometry the caller must know: the file does not record it."""

    def __init__(self, source: Path | bytes, slots: int, entries: int) -> None:
        self.data = _map(source) if isinstance(source, Path) else source
        self.slot_num, self.entry_num = slots, entries
        self.entries_at = INDEX_HEADER.size + slots * SLOT.size
        if len(self.data) != self.entries_at + entries * ENTRY.size:
            raise ValueError(f"{len(self.data)} bytes are not {slots} slots and {entries} entries")
        header = IndexHeader(*INDEX_HEADER.unpack_from(self.data))
        # Nothing put yet leaves 0 in the file, which RocketMQ reads as 1 [E.2].
        self.header = header._replace(index_count=header.index_count if header.index_count > 0 else 1)

    def slot(self, number: int) -> int:
        """Number of the newest entry of a slot, as stored."""
        return int(SLOT.unpack_from(self.data, INDEX_HEADER.size + number * SLOT.size)[0])

    def entry(self, number: int) -> IndexEntry:
        """An entry by its number, 1 being the first written."""
        return IndexEntry(*ENTRY.unpack_from(self.data, self.entries_at + number * ENTRY.size))

    def entries(self) -> list[IndexEntry]:
        """The entries put so far, oldest first."""
        return [self.entry(number) for number in range(1, min(self.header.index_count, self.entry_num))]

    def is_time_matched(self, begin: int, end: int) -> bool:
        """Whether a query's time range touches the file's [E.4]."""
        first, last = self.header.begin_timestamp, self.header.end_timestamp
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    def select(
        self, key: str, max_num: int, begin: int, end: int, found: list[int] | None = None
    ) -> list[int]:
        """Offsets for topic#key, newest first [E.4], added to those found in newer files."""
        found = [] if found is None else found
        wanted, count, seen = index_key_hash(key), self.header.index_count, set[int]()
        number = self.slot(wanted % self.slot_num)
        # A number past the file or met before is damage: there Java throws, or loops for ever.
        while 0 < number <= count and count > 1 and number < self.entry_num and number not in seen:
            entry = self.entry(number)
            if len(found) >= max_num or entry.seconds < 0:
                break
            timestamp = _signed(self.header.begin_timestamp + entry.seconds * 1000, 64)
            if entry.key_hash == wanted and begin <= timestamp <= end:
                found.append(entry.phy_offset)
            if timestamp < begin:
                break
            seen.add(number)
            number = entry.previous
        return found


def open_index_files(store: Path, slots: int, entries: int) -> list[IndexFile]:
    """The index files of a store, newest last."""
    return [IndexFile(path, slots, entries) for path in _numbered(store / "index")]


def query_offset(files: Sequence[IndexFile], key: str, max_num: int, begin: int, end: int) -> list[int]:
    """Offsets for topic#key over all files (newest last), newest first [E.5]."""
    if max_num < 0:
        raise ValueError("negative max_num")
    max_num, found = min(max_num, MAX_QUERY), list[int]()
    for file in reversed(files):
        if file.is_time_matched(begin, end):
            file.select(key, max_num, begin, end, found)
        if file.header.begin_timestamp < begin or len(found) >= max_num:
            break
    return found


def index_keys(record: Record, version: str = "5.3.3") -> list[str]:
    """The topic#key strings dispatch puts in the index for one record, in order [E.6]."""
    if record.transaction == ROLLBACK:
        return []
    properties = parse_properties(record.raw_properties, _version(version) <= LAST_OLD_PARSER)
    keys = ([properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []) + _split_keys(properties)
    if _version(version) >= FIRST_TAG_ENTRY and "TAGS" in properties:
        keys.append(f"T#{properties['TAGS']}")
    return [f"{record.topic}#{key}" for key in keys]


def expected_index_entries(records: Iterable[Record], version: str = "5.3.3") -> list[tuple[int, int]]:
    """(key hash, phy) of all entries dispatch must have put, oldest first, over all files."""
    return [(index_key_hash(key), record.phy_offset)
            for record in records for key in index_keys(record, version)]


@dataclass
class ExpectedIndex:
    """What an index file must hold after the puts made to it [E.3]."""

    slot_num: int
    entry_num: int
    count_every_put: bool = False
    header: IndexHeader = EMPTY_INDEX
    slots: dict[int, int] = field(default_factory=dict)
    entries: list[IndexEntry] = field(default_factory=list)

    def follower(self) -> ExpectedIndex:
        """The next file, which starts with this one's end as its begin and end [E.2]."""
        phy, timestamp = max(self.header.end_phy_offset, 0), max(self.header.end_timestamp, 0)
        header = IndexHeader(timestamp, timestamp, phy, phy, 0, 1)
        return ExpectedIndex(self.slot_num, self.entry_num, self.count_every_put, header)

    def put(self, key: str, phy: int, timestamp: int) -> bool:
        """Add an entry; False when the file is full."""
        old, key_hash = self.header, index_key_hash(key)
        if old.index_count >= self.entry_num:
            return False
        previous, first = self.slots.get(key_hash % self.slot_num, 0), old.index_count == 1
        # Differences below zero become 0 anyway, so floor division is as good as Java's.
        seconds = min(max((timestamp - old.begin_timestamp) // 1000, 0), MAX_INT)
        self.entries.append(IndexEntry(key_hash, phy, seconds if old.begin_timestamp > 0 else 0, previous))
        self.slots[key_hash % self.slot_num] = old.index_count
        self.header = IndexHeader(
            timestamp if first else old.begin_timestamp, timestamp,
            phy if first else old.begin_phy_offset, phy,
            old.hash_slot_count + (self.count_every_put or previous == 0), old.index_count + 1)
        return True


def expected_index_files(
    records: Iterable[Record], slots: int, entries: int, version: str = "5.3.3"
) -> list[ExpectedIndex]:
    """The index files an uninterrupted run leaves; a record without keys can open one too [E.6]."""
    files: list[ExpectedIndex] = []
    for record in records:
        if not files:
            files.append(ExpectedIndex(slots, entries, _version(version) <= LAST_COUNT_EVERY_PUT))
        elif files[-1].header.index_count >= entries:
            files.append(files[-1].follower())
        for key in index_keys(record, version):
            if not files[-1].put(key, record.phy_offset, record.store_timestamp):
                files.append(files[-1].follower())
                files[-1].put(key, record.phy_offset, record.store_timestamp)
    return files


def _check_queues(store: Path, records: list[Record], version: str) -> list[str]:
    wanted, stored, found = expected_units(records, version), read_queues(store), list[str]()
    for topic, queue in sorted(wanted.keys() | stored.keys()):
        units, got = wanted.get((topic, queue), []), stored.get((topic, queue), [])
        if len({unit.queue_offset for unit in units}) != len(units):
            found.append(f"queue {topic}/{queue}: several records have the same queue offset")
        for what, odd in (("lacks", set(units) - set(got)), ("has stray", set(got) - set(units))):
            found += [f"queue {topic}/{queue} {what} {unit}" for unit in sorted(odd)[:MAX_REPORTED]]
    return found


def _check_index_file(name: str, wanted: ExpectedIndex, got: IndexFile) -> list[str]:
    header = zip(IndexHeader._fields, wanted.header, got.header, strict=True)
    found = [f"{name} {title}: {b} instead of {a}" for title, a, b in header if a != b]
    entries = enumerate(zip(wanted.entries, got.entries(), strict=False), 1)
    unequal = [f"{name} entry {number}: {b} instead of {a}" for number, (a, b) in entries if a != b]
    found += unequal[:MAX_REPORTED]
    # Of 5,000,000 slots only the filled ones are looked at.
    filled = re.finditer(rb"[^\0]", got.data[INDEX_HEADER.size:got.entries_at])
    numbers = sorted({match.start() // SLOT.size for match in filled} | wanted.slots.keys())
    slots = [(slot, wanted.slots.get(slot, 0), got.slot(slot)) for slot in numbers]
    found += [f"{name} slot {slot}: {b} instead of {a}" for slot, a, b in slots if a != b][:MAX_REPORTED]
    return found + ([f"{name}: entry 0 is used"] if any(got.entry(0)) else [])


def check_store(store: Path, slots: int, entries: int, version: str = "5.3.3") -> list[str]:
    """Differences between log, queues and index of a store from which nothing was deleted yet."""
    records = read_records(store)
    found = _check_queues(store, records, version)
    wanted, paths = expected_index_files(records, slots, entries, version), _numbered(store / "index")
    for path, file in zip(paths, wanted, strict=False):
        try:
            found += _check_index_file(f"index {path.name}", file, IndexFile(path, slots, entries))
        except ValueError as error:
            found.append(f"index {path.name}: {error}")
    if len(paths) != len(wanted):
        found.append(f"index: {len(paths)} files instead of {len(wanted)}")
    return found


def brute_force_query(
    records: Iterable[Record], topic: str, key: str, begin: int | None = None, end: int | None = None
) -> list[int]:
    """Offsets of the records that really have the key, newest first; begin and end included."""
    return [
        record.phy_offset for record in records
        if record.topic == topic and record.transaction != ROLLBACK
        and (key == record.uniq_key or key in record.keys)
        and (begin is None or begin <= record.store_timestamp)
        and (end is None or record.store_timestamp <= end)
    ][::-1]


def _length_fields(data: bytes) -> list[tuple[int, int]]:
    """(position, width) of the length fields of the records and blanks in commit log bytes."""
    fields = []
    for start in (match.start() - 4 for match in ANY_MAGIC.finditer(data, 4)):
        try:
            record = decode_record(data, start)
        except ValueError:
            continue
        fields.append((start, 4))
        if record is not None:
            hosts = len(encode_host(record.born_host)) + len(encode_host(record.store_host))
            body_at = start + FRONT.size + FIXED.size + hosts + 8 + 4 + 8
            topic_at = body_at + 4 + len(record.body)
            properties_at = start + record.size - len(record.raw_properties) - 2
            fields += [(body_at, 4), (topic_at, 2 if record.magic == MAGIC_V2 else 1), (properties_at, 2)]
    return fields


def damage(data: bytes, seed: int) -> bytes:
    """A copy with one fault: a flipped bit, a cut end, a zeroed run or a false length; never equal."""
    rng = random.Random(seed)
    while data:
        result, at = bytearray(data), rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                del result[at:]
            case 2:
                end = min(at + rng.randint(1, 256), len(data))
                result[at:end] = bytes(end - at)
            case _:
                at, width = rng.choice(_length_fields(data) or [(at, min(4, len(data) - at))])
                value = rng.choice((0, 1, -1, 0x7F, 0x80, 0x7F80, 4096, MAX_INT, -(2**31), len(data)))
                result[at:at + width] = (value % 2**(8 * width)).to_bytes(width, "big")
        if result != data:
            return bytes(result)
    return data
