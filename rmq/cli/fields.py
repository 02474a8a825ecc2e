# SPDX-License-Identifier: Apache-2.0
"""A message's fields as programs get them: exact values under their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any

from rmq._core._message import format_host
from rmq.message import StoredMessage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_host = lru_cache(1024)(format_host)  # as many as write to a broker at a time


@lru_cache(1024)
def _second(seconds: int) -> str | None:
    try:
        return (_EPOCH + timedelta(seconds=seconds)).isoformat().removesuffix("+00:00")
    except OverflowError:
        return None


def iso_time(ms: int | None) -> str | int | None:
    """ISO 8601 in UTC with milliseconds; a number that is no year's stays a number."""
    if ms is None:
        return None
    seconds, rest = divmod(ms, 1000)
    text = _second(seconds)
    return ms if text is None else f"{text}.{rest:03d}Z"


def body_text(body: bytes) -> tuple[str, str]:
    """(text, "utf-8"), or (digits, "hex") when the body is not UTF-8."""
    try:
        return body.decode(), "utf-8"
    except UnicodeDecodeError:
        return body.hex(), "hex"


_VALUES: dict[str, Callable[[StoredMessage], Any]] = {
    "topic": attrgetter("topic"),
    "queue_id": attrgetter("queue_id"),
    "queue_offset": attrgetter("queue_offset"),
    "phy_offset": attrgetter("phy_offset"),
    "size": attrgetter("size"),
    "store_timestamp": lambda message: iso_time(message.store_timestamp),
    "born_timestamp": lambda message: iso_time(message.born_timestamp),
    "store_host": lambda message: _host(message._store_host),
    "born_host": lambda message: _host(message._born_host),
    "offset_msg_id": attrgetter("offset_msg_id"),
    "uniq_key": attrgetter("uniq_key"),
    "keys": lambda message: list(message.keys),
    "tags": attrgetter("tags"),
    "properties": attrgetter("properties"),
    "flag": attrgetter("flag"),
    "sys_flag": attrgetter("sys_flag"),
    "reconsume_times": attrgetter("reconsume_times"),
    "prepared_transaction_offset": attrgetter("prepared_transaction_offset"),
    "body_crc": attrgetter("body_crc"),
    "body": lambda message: body_text(message.body)[0],
    "body_encoding": lambda message: body_text(message.body)[1],
}
FIELDS = tuple(_VALUES)
TIME_FIELDS = ("store_timestamp", "born_timestamp")


def message_row(message: StoredMessage, names: Iterable[str] = FIELDS) -> dict[str, Any]:
    """Fields under their names."""
    return {name: _VALUES[name](message) for name in names}
