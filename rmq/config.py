# SPDX-License-Identifier: Apache-2.0
"""Store configuration under RocketMQ's broker.conf names, in snake_case, with its defaults."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Self

ASYNC_FLUSH = "ASYNC_FLUSH"
SYNC_FLUSH = "SYNC_FLUSH"
DEFAULT_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
CRC_SINCE = (5, 2, 0)  # the release that knows enabled_append_prop_crc
UNIT_SIZE = 20
RECORD_SLACK = 65536
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_INT_MAX = 2**31 - 1
_CONF_LIMIT = 1 << 20  # bytes of a broker.conf
_MAY_BE_ZERO = ("file_reserved_time", "disk_max_used_space_ratio", "disk_space_warning_level_ratio",
                "disk_space_clean_forcibly_ratio")  # fmt: skip
_PROPERTY = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*", re.S)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.S)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@functools.cache
def _numbers_of(version: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(-[A-Za-z0-9]+)?", version, re.ASCII)
    if match is None:
        raise ValueError(f"rocketmq_version {version!r} is no version such as 5.3.3")
    return int(match[1]), int(match[2]), int(match[3])


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a store is laid out and written. Sizes in bytes, times in the unit that RocketMQ gives the name.

    A field passed here that contradicts the files of an existing store makes `rmq.open` raise ValueError; fields left
    alone never contradict (`dataclasses.replace` passes all of them). rocketmq_version: whose bytes to write; reading
    accepts every version.
    Source: RocketMQ MessageStoreConfig.
    """

    mapped_file_size_commit_log: int = 1024 * 1024 * 1024
    mapped_file_size_consume_queue: int = 300_000 * UNIT_SIZE
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    max_msgs_num_batch: int = 64
    message_index_enable: bool = True
    flush_disk_type: str = ASYNC_FLUSH
    flush_interval_commit_log: int = 500
    max_message_size: int = 4 * 1024 * 1024
    enabled_append_prop_crc: bool = False
    auto_message_version_on_topic_len: bool = True
    message_delay_level: str = DEFAULT_DELAY_LEVEL
    file_reserved_time: int = 72
    disk_max_used_space_ratio: int = 75
    disk_space_warning_level_ratio: int = 90
    disk_space_clean_forcibly_ratio: int = 85
    clean_file_forcibly_enable: bool = True
    store_path_commit_log: str | None = None
    store_host: str = "127.0.0.1:10911"
    rocketmq_version: str = "5.3.3"

    _explicit = frozenset[str]()

    def __new__(cls, **given: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "_explicit", frozenset(given))
        return self

    def __post_init__(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            if field.name == "store_path_commit_log":
                if value is not None and not isinstance(value, str):
                    raise TypeError(f"store_path_commit_log must be str, got {type(value).__name__}")
                if value and not value.strip(","):
                    raise ValueError(f"store_path_commit_log names no directory: {value!r}")
            elif type(default) is int and isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, field.name, int(value))  # of NumPy
            elif type(value) is not type(default):
                raise TypeError(f"{field.name} must be {type(default).__name__}, got {type(value).__name__}")
            if type(default) is int:
                least = 0 if field.name in _MAY_BE_ZERO else 1
                if not least <= value <= _INT_MAX:
                    raise ValueError(f"{field.name} must lie in [{least}, {_INT_MAX}], got {value}")
        if self.flush_disk_type not in (ASYNC_FLUSH, SYNC_FLUSH):
            raise ValueError(f"flush_disk_type must be {ASYNC_FLUSH} or {SYNC_FLUSH}, "
                             f"got {self.flush_disk_type!r}")  # fmt: skip
        if self.mapped_file_size_commit_log < 128:
            raise ValueError("mapped_file_size_commit_log must be at least 128 bytes")
        if self.max_index_num < 2:
            raise ValueError("max_index_num must be at least 2: entry 0 is never used")
        if 40 + 4 * self.max_hash_slot_num + 20 * self.max_index_num > _INT_MAX:
            raise ValueError("max_hash_slot_num and max_index_num make an index file over 2 GiB, "
                             "which RocketMQ cannot map")  # fmt: skip
        queue_size = -(-self.mapped_file_size_consume_queue // UNIT_SIZE) * UNIT_SIZE
        if queue_size > _INT_MAX:
            raise ValueError(f"mapped_file_size_consume_queue, of whole units, is {queue_size}, more than {_INT_MAX}")
        object.__setattr__(self, "mapped_file_size_consume_queue", queue_size)
        if self.version < (4, 0, 0) or self.version >= (6, 0, 0):
            raise ValueError(f"rocketmq_version {self.rocketmq_version!r} is none of 4.x and 5.x")
        if self.enabled_append_prop_crc and self.version < CRC_SINCE:
            raise ValueError("enabled_append_prop_crc needs rocketmq_version 5.2.0 or later")
        if not self.delay_levels_ms:
            raise ValueError("message_delay_level is empty")

    @classmethod
    def from_broker_conf(cls, file: str | os.PathLike[str]) -> Self:
        """Read a broker's own properties file; names that are no field here are left out.

        So are mapedFileSizeCommitLog and mapedFileSizeConsumeQueue, which releases after 4.4 do not know: the store's
        files tell them. readOnlyCommitLogStorePaths: further directories where storePathCommitLog names several, as in
        RocketMQ. brokerIP1, when it is an address, and listenPort (10911) are the store_host, unless a line says
        storeHost; of a host's name, and without brokerIP1, the address is the broker's own affair: store_host keeps its
        default. Raises OSError when it cannot be read, ValueError for what is no text of at most 1 MiB, and with file
        and line for a value that does not fit.
        """
        if not isinstance(file, str | os.PathLike):
            raise TypeError(f"file must be str or os.PathLike, got {type(file).__name__}")
        known = {field.name: field for field in fields(cls)}
        given: dict[str, Any] = {}
        lines: dict[str, int] = {}
        others = {"readOnlyCommitLogStorePaths": "", "brokerIP1": "", "listenPort": "10911"}
        with Path(file).open("rb") as opened:
            data = opened.read(_CONF_LIMIT + 1)
        if len(data) > _CONF_LIMIT or b"\0" in data:
            raise ValueError(f"{os.fspath(file)}: no properties file, which is text of at most {_CONF_LIMIT:,} bytes")
        for number, name, value in _java_properties(data.splitlines()):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
            if name in others:
                others[name], lines[name] = value, number
            if snake not in known:
                continue
            default = known[snake].default
            try:
                if isinstance(default, bool):
                    given[snake] = {"true": True, "false": False}[value.lower()]
                elif isinstance(default, int):
                    given[snake] = _java_number(value)
                else:
                    given[snake] = value
                lines[snake] = number
            except (KeyError, ValueError):
                where = f"{os.fspath(file)}, line {number}"
                raise ValueError(f"{where}: {name} has no value {value!r}") from None
        read_only, ip, port = others.values()
        if read_only and "," in given.get("store_path_commit_log", ""):
            given["store_path_commit_log"] += f",{read_only}"
        if not (re.fullmatch("0*[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
            raise ValueError(f"{os.fspath(file)}, line {lines['listenPort']}: listenPort has no value {port!r}")
        if _is_address(ip):
            given.setdefault("store_host", f"[{ip}]:{int(port)}" if ":" in ip else f"{ip}:{int(port)}")
        try:
            return cls(**given)
        except ValueError as error:  # its first word is the field
            line = lines.get(str(error).split()[0])
            raise ValueError(f"{os.fspath(file)}{f', line {line}' if line else ''}: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, whose working directory is another."""
        named = (self.store_path_commit_log or "").split(",")
        absolute = ",".join(str(Path(part).absolute()) for part in named if part)
        return {**vars(self), "store_path_commit_log": absolute or self.store_path_commit_log}

    def is_explicit(self, name: str) -> bool:
        """Whether the field was passed, not left at its default."""
        return name in self._explicit

    @property
    def version(self) -> tuple[int, int, int]:
        """rocketmq_version as numbers; a suffix such as -ALPHA does not count."""
        return _numbers_of(self.rocketmq_version)

    @property
    def _is_alpha(self) -> bool:
        return self.rocketmq_version == "5.0.0-ALPHA"

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of each level, from level 1."""
        levels = []
        for item in self.message_delay_level.split():
            is_delay = item.isascii() and item[:-1].isdigit() and item[-1] in _UNIT_MS
            # 19 digits hold an int64; int() of thousands has an error of its own.
            if not is_delay or len(item) > 20 or (delay := int(item[:-1]) * _UNIT_MS[item[-1]]) >= 2**63:
                raise ValueError(f"message_delay_level item {item!r} is no delay such as 10s, in 64 bits of ms")
            levels.append(delay)
        return tuple(levels)

    @property
    def limits_records(self) -> bool:
        """Whether max_message_size is that of a record, and of a batch's records together, not of bodies."""
        return self.version <= (4, 9, 3) or self._is_alpha

    @property
    def max_record_size(self) -> int:
        """Largest record that a put may make."""
        if self.limits_records:
            return min(self.max_message_size, self.mapped_file_size_commit_log - 8)
        return min(self.max_message_size + RECORD_SLACK, self.mapped_file_size_commit_log - 8)

    @property
    def drops_last_separator(self) -> bool:
        return (4, 9, 1) <= self.version < (5, 2, 0)

    @property
    def parses_legacy_properties(self) -> bool:
        return self.version <= (4, 9, 0)

    @property
    def counts_every_index_put(self) -> bool:
        return self.version <= (4, 7, 0)

    @property
    def stores_untouched_count(self) -> bool:
        """Whether a store's flush stores the count of an index file without entries, 1 where 0 stood."""
        return self.version >= (5, 0, 0) and not self._is_alpha

    @property
    def indexes_tags(self) -> bool:
        return self.version >= (5, 4, 0)

    @property
    def allows_v2_records(self) -> bool:
        return self.version >= (5, 1, 0) and self.auto_message_version_on_topic_len

    @property
    def allows_ipv6_hosts(self) -> bool:
        return self.version >= (4, 6, 0)

    @property
    def abort_holds_pid(self) -> bool:
        return self.version >= (5, 0, 0) and not self._is_alpha

    @property
    def checkpoint_longs(self) -> int:
        """How many of the checkpoint's fields the version knows."""
        if self.version < (5, 0, 0) or self._is_alpha:
            return 3
        return 4 if self.version < (5, 1, 1) else 5


# __new__ takes any name; help() and completion ask for the fields.
StoreConfig.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*inspect.signature(StoreConfig.__init__).parameters.values()][1:])  # fmt: skip


def config_or_default(config: Any) -> StoreConfig:
    """What a caller passes as config; None: nothing is known. TypeError."""
    if config is not None and not isinstance(config, StoreConfig):
        raise TypeError(f"config must be StoreConfig, got {type(config).__name__}")
    return StoreConfig() if config is None else config


def _is_address(text: str) -> bool:
    """Whether it is a number of IPv4 or IPv6, not a host's name."""
    import socket

    try:
        socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except (OSError, ValueError):
        return False
    return True


def _java_properties(lines: Iterable[bytes]) -> Iterator[tuple[int, str, str]]:
    """(line number, name, value) of a Java properties file. Source: java.util.Properties#load, ISO 8859-1."""
    logical, first = "", 0
    for number, line in enumerate(chain(lines, [b""]), 1):  # the empty one ends a last line that ends in a backslash
        text = line.decode("latin-1").lstrip(" \t\f")
        if not logical and (not text or text[0] in "#!"):
            continue
        first = first if logical else number
        logical += text
        if (len(logical) - len(logical.rstrip("\\"))) % 2:
            logical = logical[:-1]
            continue
        match = _PROPERTY.match(logical)
        assert match is not None  # every text has a name, at least the empty one
        yield first, _unescaped(match[1]), _unescaped(logical[match.end() :])
        logical = ""


def _java_number(text: str) -> int:
    """ValueError for what Python takes and Java does not. Source: java.lang.Integer#parseInt, of ASCII digits."""
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _unescaped(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else _CONTROL.get(match[2], match[2])

    return _ESCAPE.sub(plain, text).strip()
