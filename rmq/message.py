# SPDX-License-Identifier: Apache-2.0
"""What is read back: stored messages, results of puts and pulls, ids, decompressed bodies."""

from __future__ import annotations

import datetime
import enum
import operator
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from rmq._core import _layout as L
from rmq._core._message import format_host, to_ms
from rmq._core._putter import put_results
from rmq._core._record import body_crc, parse_properties
from rmq._core._storedfields import StoredFields
from rmq.errors import CorruptFileError

RESULTS_AT_FIRST, RESULTS_AT_ONCE = 8, 1024  # made for who goes through them: many look at few
PLAIN_BODY_LIMIT = 64 * 1024 * 1024  # bytes a compressed body may grow to; 16 times RocketMQ's default limit
LARGEST_BASE = 2**62  # of an inner batch: its messages have queue offsets behind it
DECIMALS = 18  # of a number in a property that an int64 holds whatever it is
MULTI_DISPATCH = "INNER_MULTI_DISPATCH"  # the property that names a message's light queues
SOME_SEGMENT = "commitlog"  # the path of an error whose offset is a phy offset: the files are not known where it arises
_HEX_ID = re.compile(r"[0-9A-Fa-f]{32}(?:[0-9A-Fa-f]{24})?")
_COMPRESSION = {0: "zlib", 3: "zlib", 1: "lz4", 2: "zstd"}


class PutResult(NamedTuple):
    """Where a message went: fields as those of StoredMessage; size of the record in bytes, times in ms since 1970."""

    topic: str
    queue_id: int
    queue_offset: int
    phy_offset: int
    size: int
    store_timestamp: int
    offset_msg_id: str


class PutResults(Sequence[PutResult]):
    """Results of put_many and put_batch in put order; numpy columns under the names of PutResult's fields."""

    def __init__(self, part: tuple[Any, ...] | None = None) -> None:
        """part: of a chunk, PutBatch.results() and its store timestamp; None: of no message."""
        if part is None:
            none64, none32 = np.empty(0, np.int64), np.empty(0, np.int32)
            part = none64, none64, none32, none32, [], [], 0
        phy_offset, queue_offset, size, queue_id, topics, hosts, time = part
        self.phy_offset: npt.NDArray[np.int64] = phy_offset
        self.queue_offset: npt.NDArray[np.int64] = queue_offset
        self.size: npt.NDArray[np.int32] = size
        self.queue_id: npt.NDArray[np.int32] = queue_id
        self._topics: list[str] = topics
        self._hosts: list[bytes] = hosts
        self.store_timestamp: npt.NDArray[np.int64] = np.empty(len(phy_offset), np.int64)
        self.store_timestamp.fill(time)  # as np.full, in less time

    @classmethod
    def joined(cls, parts: list[PutResults]) -> PutResults:
        """One result of several, in order."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for name in ("phy_offset", "queue_offset", "size", "queue_id", "store_timestamp"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in (whole, *parts)]))
        for part in parts:  # a comprehension takes ten times as long
            whole._topics += part._topics
            whole._hosts += part._hosts
        return whole

    @property
    def topic(self) -> npt.NDArray[np.object_]:
        return np.array(self._topics, dtype=object)

    @property
    def offset_msg_id(self) -> npt.NDArray[np.object_]:
        return np.array([result.offset_msg_id for result in self], dtype=object)

    def __len__(self) -> int:
        return len(self.phy_offset)

    @overload
    def __getitem__(self, i: int) -> PutResult: ...
    @overload
    def __getitem__(self, i: slice) -> list[PutResult]: ...
    def __getitem__(self, i: int | slice) -> PutResult | list[PutResult]:
        if isinstance(i, slice):
            first, stop, step = i.indices(len(self))
            return self._rows(first, max(first, stop)) if step == 1 else [self[k] for k in range(first, stop, step)]
        i = operator.index(i)  # a small NumPy integer has no room for what is added to it
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        row = i if i >= 0 else i + len(self)
        return self._rows(row, row + 1)[0]

    def __iter__(self) -> Iterator[PutResult]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[list[PutResult]]:
        first, at_once = 0, RESULTS_AT_FIRST
        while first < len(self):
            yield self._rows(first, min(first + at_once, len(self)))
            first, at_once = first + at_once, min(8 * at_once, RESULTS_AT_ONCE)

    def _rows(self, first: int, stop: int) -> list[PutResult]:
        return put_results(first, stop, kind=PutResult, topics=self._topics, hosts=self._hosts, queue_id=self.queue_id,
                           queue_offset=self.queue_offset, phy_offset=self.phy_offset, size=self.size,
                           store_timestamp=self.store_timestamp)  # fmt: skip

    def __repr__(self) -> str:
        return f"<PutResults of {len(self)} messages>"


class StoredMessage(StoredFields):
    """One message as the log holds it; what is derived from it is computed when asked for.

    Timestamps in ms since 1970, offsets and size as in the record; hosts as text. Text that is not UTF-8
    decodes with U+FFFD, as in Java; raw_body and raw_properties are the bytes. sys_flag is the record's own,
    so its bit 0 tells whether raw_body is compressed. Compared by value. Each attribute, with type and unit:
    docs/reference/reading.md. Source: RocketMQ MessageExt, MessageDecoder#decode.
    """

    __slots__ = ()

    @property
    def born_host(self) -> str:
        return format_host(self._born_host)

    @property
    def store_host(self) -> str:
        return format_host(self._store_host)

    @property
    def offset_msg_id(self) -> str:
        """Host and phy offset in hex, 32 digits, 56 with IPv6. Source: MessageDecoder#createMessageId."""
        return format_offset_msg_id(self._store_host, self.phy_offset)

    @property
    def properties(self) -> dict[str, str]:
        """A copy; later duplicates win, malformed items are left out."""
        if self._properties is None:
            self._properties = parse_properties(self.raw_properties)
        return dict(self._properties)

    @property
    def body(self) -> bytes:
        """The body, decompressed. Raises CorruptFileError when it does not decompress within 64 MiB."""
        if not self.sys_flag & L.SYS_FLAG_COMPRESSED:
            return self.raw_body
        if self._body is None:
            try:
                self._body = plain_body(self.raw_body, self.sys_flag, self.phy_offset)
            except CorruptFileError as error:
                if self._segment is None:
                    raise
                path, start = self._segment
                raise CorruptFileError(path, self.phy_offset - start, error.reason) from None
        return self._body

    @property
    def is_rollback(self) -> bool:
        """Whether the record rolls a transaction back: it has no unit and no entries."""
        return self.sys_flag & L.SYS_FLAG_TRANSACTION_MASK == L.SYS_FLAG_ROLLBACK

    def __eq__(self, other: object) -> bool:
        return self.as_tuple() == other.as_tuple() if isinstance(other, StoredMessage) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.phy_offset, self.queue_offset, self.body_crc))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return StoredMessage, (self.as_tuple(), self._segment)

    def __repr__(self) -> str:
        at = datetime.datetime.fromtimestamp(self.store_timestamp // 1000, datetime.UTC).isoformat() \
            if 0 <= self.store_timestamp < 2**45 else self.store_timestamp  # fmt: skip
        return (f"<StoredMessage {self.topic}/{self.queue_id}/{self.queue_offset} "
                f"phy_offset={self.phy_offset} stored {at} keys={self.keys!r} "
                f"{len(self.raw_body)} bytes>")  # fmt: skip


class PullStatus(enum.Enum):
    """RocketMQ's GetMessageStatus, each told in docs/reference/reading.md. Source: DefaultMessageStore#getMessage."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclass(frozen=True)
class PullResult:
    """Answer of a pull: where the next one goes on, the queue's bounds [min, max), and the messages in queue order."""

    status: PullStatus
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    messages: list[StoredMessage] = field(default_factory=list)


def plain_body(raw: bytes, sys_flag: int, phy_offset: int = 0) -> bytes:
    """The body of a message, decompressed by the bits of sys_flag: zlib stream, LZ4 frame or zstd frame.

    Raises CorruptFileError when it is damaged or grows past PLAIN_BODY_LIMIT. Source: MessageDecoder#decode.
    """
    if not raw or not sys_flag & L.SYS_FLAG_COMPRESSED:
        return raw
    kind = (sys_flag & L.SYS_FLAG_COMPRESSION_MASK) >> L.SYS_FLAG_COMPRESSION_SHIFT
    name = _COMPRESSION.get(kind)
    if name is None:
        raise CorruptFileError(SOME_SEGMENT, phy_offset, f"compression type {kind} is none of RocketMQ's")
    try:
        if name == "zlib":
            stream = zlib.decompressobj()
            plain = stream.decompress(raw, PLAIN_BODY_LIMIT + 1)
            whole = stream.eof or len(plain) > PLAIN_BODY_LIMIT
        else:
            import pyarrow as pa

            with pa.CompressedInputStream(pa.BufferReader(raw), name) as compressed:
                plain = compressed.read(PLAIN_BODY_LIMIT + 1)
            whole = True
    except (zlib.error, OSError, ValueError) as error:
        reason = f"body does not decompress as {name}: {error}"
        raise CorruptFileError(SOME_SEGMENT, phy_offset, reason) from None
    if not whole:
        raise CorruptFileError(SOME_SEGMENT, phy_offset, f"body does not decompress as {name}: it ends early")
    if len(plain) > PLAIN_BODY_LIMIT:
        raise CorruptFileError(SOME_SEGMENT, phy_offset, f"body decompresses to over {PLAIN_BODY_LIMIT} bytes")
    return bytes(plain)


def inner_messages(wrapper: StoredMessage) -> list[StoredMessage] | None:
    """Each message of an inner batch, with its own queue offset; None when it is no inner batch.

    Raises CorruptFileError when the packed body breaks the format or holds over 32,767 messages.
    Source: MessageDecoder#decodeMessage.
    """
    phy_offset = wrapper.phy_offset
    if not wrapper.sys_flag & L.SYS_FLAG_INNER_BATCH or not wrapper.sys_flag & L.SYS_FLAG_NEED_UNWRAP:
        return None
    packed = plain_body(wrapper.raw_body, wrapper.sys_flag, phy_offset)
    try:
        base = int(wrapper.properties.get("INNER_BASE", wrapper.queue_offset))
    except ValueError:
        raise CorruptFileError(SOME_SEGMENT, phy_offset, "INNER_BASE is no number") from None
    if not 0 <= base <= LARGEST_BASE:
        raise CorruptFileError(SOME_SEGMENT, phy_offset, f"INNER_BASE {base} is no queue offset")
    plain_flag = wrapper.sys_flag & ~(L.SYS_FLAG_INNER_BATCH | L.SYS_FLAG_NEED_UNWRAP | L.SYS_FLAG_COMPRESSED)
    shared = (wrapper.born_timestamp, wrapper._born_host, wrapper.store_timestamp, wrapper._store_host,
              wrapper.reconsume_times, wrapper.prepared_transaction_offset)  # fmt: skip
    found: list[StoredMessage] = []
    at = 0
    while at < len(packed):
        size = int.from_bytes(packed[at : at + L.INNER_MAGIC_OFFSET], "big", signed=True)
        item = packed[at : at + size] if size >= L.INNER_FIXED_SIZE else b""
        body_size = int.from_bytes(item[L.INNER_BODY_SIZE_OFFSET : L.INNER_BODY_OFFSET], "big", signed=True)
        tail = L.INNER_BODY_OFFSET + body_size
        properties_at = tail + L.RECORD_PROPERTIES_SIZE_SIZE
        properties_size = int.from_bytes(item[tail:properties_at], "big")
        is_whole = len(item) >= max(size, L.INNER_FIXED_SIZE) and body_size >= 0
        if not is_whole or properties_at + properties_size != size or properties_size > L.PROPERTIES_SIZE_LIMIT:
            reason = f"inner batch is damaged at byte {at} of its body"
            raise CorruptFileError(SOME_SEGMENT, phy_offset, reason)
        if len(found) == L.INNER_COUNT_LIMIT:
            raise CorruptFileError(SOME_SEGMENT, phy_offset, f"inner batch holds over {L.INNER_COUNT_LIMIT} messages")
        flag = int.from_bytes(item[L.INNER_FLAG_OFFSET : L.INNER_BODY_SIZE_OFFSET], "big", signed=True)
        own = item[L.INNER_BODY_OFFSET : tail]
        found.append(StoredMessage((wrapper.topic, wrapper.queue_id, base + len(found), phy_offset, wrapper.size, flag,
                                    plain_flag, *shared, body_crc(own), own, item[properties_at:])))  # fmt: skip
        at += size
    return found


def inner_bounds(wrapper: StoredMessage) -> tuple[int, int]:
    """Queue offset of the first message of an inner batch, and how many there are; (0, 0) where no properties tell."""
    texts = [wrapper.properties.get(name, "") for name in ("INNER_BASE", "INNER_NUM")]
    base, count = (int(text) if _is_decimal(text) else 0 for text in texts)
    return (base, count) if _is_decimal(texts[0]) and count <= L.INNER_COUNT_LIMIT else (0, 0)


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= DECIMALS


def dispatched_to(properties: Mapping[str, str]) -> dict[str, int]:
    """Topics in whose queues, beside its own, a broker has given a message a unit, and its queue offset there.

    Source: RocketMQ 4.9 MultiDispatch#wrapMultiDispatch, of any name; from 5.0 on of `%LMQ%` names alone.
    """
    names = properties.get(MULTI_DISPATCH, "").rstrip(",").split(",")
    offsets = properties.get("INNER_MULTI_QUEUE_OFFSET", "").rstrip(",").split(",")
    pairs = [pair for pair in zip(names, offsets, strict=False) if any(pair)]
    if len(names) != len(offsets) or not all(_is_decimal(offset) for _, offset in pairs):
        return {}
    return {name: int(offset) for name, offset in pairs}


def carrying(wrapper: StoredMessage, items: list[StoredMessage], asked: Set[str]) -> list[StoredMessage]:
    """Of the messages of an inner batch those that carry a key that was asked for and that the wrapper carries too; all
    of them when of some such key the wrapper alone knows.
    """
    own = [_carried(item) for item in items]
    found = [[number for number, keys in enumerate(own) if key in keys] for key in asked & _carried(wrapper)]
    return [items[number] for number in sorted(set(chain(*found)))] if found and all(found) else items


def _carried(message: StoredMessage) -> set[str | None]:
    return {message.uniq_key, *message.keys}


# ---- ids -------------------------------------------------------------------------------------------


class OffsetMsgId(NamedTuple):
    """What an offset_msg_id says: the broker that stored the message, and where."""

    store_host: str
    phy_offset: int


class UniqKey(NamedTuple):
    """What a client's unique key says; born_timestamp in ms, right for ids at most about a month old."""

    address: str
    pid: int
    class_loader_hash: int
    born_timestamp: int
    counter: int


def format_offset_msg_id(store_host: bytes, phy_offset: int) -> str:
    """Source: MessageDecoder#createMessageId."""
    return (store_host + phy_offset.to_bytes(8, "big", signed=True)).hex().upper()


def is_hex_id(text: str) -> bool:
    """Whether a text has the form of an offset_msg_id or of a client's unique key: 32 or 56 hex digits."""
    return _HEX_ID.fullmatch(text) is not None


def parse_offset_msg_id(text: str) -> OffsetMsgId:
    """Decode an offset_msg_id (32 hex digits, 56 with an IPv6 host, either case). ValueError for other text.

    Source: MessageDecoder#decodeMessageId.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be str, got {type(text).__name__}")
    if not is_hex_id(text):
        raise ValueError(f"{text!r} is no offset_msg_id: 32 or 56 hex digits")
    data = bytes.fromhex(text)
    return OffsetMsgId(format_host(data[:-8]), int.from_bytes(data[-8:], "big", signed=True))


def parse_uniq_key(text: str, now: datetime.datetime | None = None) -> UniqKey:
    """Decode a client's unique key (32 or 56 hex digits). ValueError for other text.

    The id holds the time since the start of a local month, not which: the newest month that puts it before
    `now` (aware, else ValueError; default: the present) is taken. Source: MessageClientIDSetter#getNearlyTimeFromID.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be str, got {type(text).__name__}")
    if not is_hex_id(text):
        raise ValueError(f"{text!r} is no unique key: 32 or 56 hex digits")
    data = bytes.fromhex(text)
    size = len(data) - 12
    address = format_host(data[:size] + bytes(4)).rpartition(":")[0].strip("[]")
    span = datetime.timedelta(milliseconds=int.from_bytes(data[size + 6 : size + 10], "big"))
    if now is not None and not isinstance(now, datetime.datetime):
        raise TypeError(f"now must be an aware datetime, got {type(now).__name__}")
    if now is not None and now.utcoffset() is None:
        raise ValueError("now must be an aware datetime")
    try:
        present = (now or datetime.datetime.now(datetime.UTC)).astimezone()
        first = datetime.datetime(present.year, present.month, 1)  # of that day, which may have another offset
        if first.astimezone() + span >= present:
            first = (first - datetime.timedelta(days=1)).replace(day=1)
        born = to_ms(first.astimezone() + span, "text")
    except (OverflowError, ValueError):
        raise ValueError(f"the month before {now} is none that a datetime holds") from None
    return UniqKey(address, int.from_bytes(data[size : size + 2], "big"),
                   int.from_bytes(data[size + 2 : size + 6], "big", signed=True), born,
                   int.from_bytes(data[size + 10 :], "big"))  # fmt: skip
