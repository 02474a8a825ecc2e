# SPDX-License-Identifier: Apache-2.0
"""Options of the data source: their names, what they may be, what they mean. docs/spark.md has the same table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmq.config import StoreConfig
from rmq.keys import encoded
from rmq.objects import CACHE_BYTES, NO_CREDENTIALS, is_secret, refuse_elsewhere
from rmq.paths import LMQ_PREFIX, is_elsewhere, session_path
from rmq.scan import COLUMNS, checked_columns
from rmq.splits import SPLIT_BYTES

EARLIEST, LATEST = -2, -1  # Kafka's numbers for them in an offsets JSON
SMALLEST_SPLIT = 64 * 1024
Offsets = dict[str, dict[int, int]]


@dataclass(frozen=True)
class Option:
    """name: as written, any case is taken. about: for docs and errors. read: from the text of the option."""

    name: str
    default: Any
    about: str
    read: Callable[[str, str], Any]


def _text(_: str, value: str) -> str:
    return value


def _chosen(*words: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value.lower() not in words:
            raise ValueError(f"option {name}: {value!r} is none of {', '.join(words)}")
        return value.lower()

    return read


def _bool(name: str, value: str) -> bool:
    return _chosen("true", "false")(name, value) == "true"


def _number(low: int, high: int = 2**63 - 1) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,19}", value.strip()) or not low <= int(value) <= high:
            raise ValueError(f"option {name}: {value!r} is no number from {low} to {high}")
        return int(value)

    return read


def _list(name: str, value: str) -> tuple[str, ...]:
    """JSON list of texts, or names with commas between."""
    if value.lstrip().startswith("["):
        items = _json(name, value)
        if not all(isinstance(item, str) for item in items):
            raise ValueError(f"option {name}: {value!r} is no JSON list of texts")
        for item in items:
            encoded(item, f"option {name}")
        return tuple(items)
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _some(name: str, value: str) -> tuple[str, ...]:
    """_list, of which an empty one is an error: it is asked for by mistake."""
    items = _list(name, value)
    if not items:
        raise ValueError(f"option {name}: {value!r} names none")
    return items


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, which Python does not take
        raise ValueError(f"option {name}: no JSON: {error}") from None


def _columns(name: str, value: str) -> tuple[str, ...]:
    return checked_columns(_some(name, value))


def _pattern(name: str, value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"option {name}: {value!r} is no regular expression: {error}") from None


def _assigned(name: str, value: str) -> dict[str, tuple[int, ...]]:
    found = _json(name, value)
    if not isinstance(found, dict) or not all(
        isinstance(ids, list) and all(type(number) is int and number >= 0 for number in ids) for ids in found.values()
    ):
        raise ValueError(f'option {name}: {value!r} is not of the form {{"topic": [0, 1]}}')
    if not found:
        raise ValueError(f"option {name}: {value!r} names none")
    return {topic: tuple(ids) for topic, ids in found.items()}


def per_queue(name: str, value: Any, lowest: int = EARLIEST) -> Offsets:
    """{topic: {queue id: number}} of Kafka's JSON shape {"topic": {"0": 23}}."""
    form = f'option {name}: {value!r} is not of the form {{"topic": {{"0": 23}}}}'
    if not isinstance(value, dict):
        raise ValueError(form)
    offsets: Offsets = {}
    for topic, queues in value.items():
        if not isinstance(queues, dict):
            raise ValueError(form)
        for queue, number in queues.items():
            if not re.fullmatch(r"[0-9]{1,10}", queue) or type(number) is not int or not lowest <= number < 2**63:
                raise ValueError(form)
            offsets.setdefault(topic, {})[int(queue)] = number
    return offsets


def _broker_conf(name: str, value: str) -> StoreConfig:
    try:
        return StoreConfig.from_broker_conf(value)
    except ValueError as error:
        raise ValueError(f"option {name}: {error}") from None
    except OSError as error:
        raise type(error)(error.errno, f"option {name}: {error.strerror}", error.filename) from None


def _offsets(name: str, value: str) -> str | Offsets:
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    return per_queue(name, _json(name, value))


def _times(name: str, value: str) -> Offsets:
    return per_queue(name, _json(name, value), 0)


OPTIONS = (
    Option("path", None, "root directory of a store; load(path) sets it", _text),
    Option("paths", (), "several roots, one for each broker; load([...]) of a batch sets it; adds the column `store`",
           _list),
    Option("table", "messages", "messages, queues, index, topics or segments",
           _chosen("messages", "queues", "index", "topics", "segments")),
    Option("schemaMode", "native", "native: rmq's columns; kafka: those of Spark's Kafka source",
           _chosen("native", "kafka")),
    Option("includeHeaders", False, "kafka: the properties as column `headers`", _bool),
    Option("columns", None, "columns of the native schema, raw_body and raw_properties among them", _columns),
    Option("subscribe", None, "topics, with commas between; no topic is named: the whole log", _list),
    Option("subscribePattern", None, "regular expression for whole names of topics that have a queue", _pattern),
    Option("assign", None, 'queues, as {"topic": [0, 1]}', _assigned),
    Option("startingOffsets", "earliest", 'earliest, latest or {"topic": {"0": 23}}; -2 earliest, -1 latest', _offsets),
    Option("endingOffsets", "latest", "as startingOffsets, exclusive; not for streams", _offsets),
    Option("startingTimestamp", None, "ms since 1970: messages stored then or later", _number(0)),
    Option("endingTimestamp", None, "ms since 1970: messages stored before; not for streams", _number(0)),
    Option("startingOffsetsByTimestamp", None, 'for each queue the time where it begins, as {"topic": {"0": ms}}',
           _times),
    Option("endingOffsetsByTimestamp", None, "for each queue the time before which it ends; not for streams", _times),
    Option("tags", None, "tags of which a message has one, as `A || B`", _text),
    Option("keys", None, "keys of which a message has one, found by the index unless scanMode=log; needs subscribe",
           _some),
    Option("splitBytes", SPLIT_BYTES, "bytes of the log that a partition reads", _number(SMALLEST_SPLIT)),
    Option("minPartitions", 1, "as many partitions, when the log has as many bytes", _number(1, 1_000_000)),
    Option("maxRecordsPerPartition", None, "messages of a partition at most; needs topics or queues, read by queue",
           _number(1)),
    Option("scanMode", "auto", "log: pass over the log; queue: take each message by its queue, needs topics or queues; "
           "index: find keys by the index; auto: as below", _chosen("auto", "log", "queue", "index")),
    Option("batchRows", 8192, "rows of an Arrow batch at most", _number(1, 1_000_000)),
    Option("batchBytes", 8 * 1024 * 1024, "bytes of bodies and texts after which an Arrow batch ends",
           _number(1, 2**30)),
    Option("verifyCrc", True, "check the CRC of bodies", _bool),
    Option("failOnDataLoss", True, "false: go on behind damage, and without what was cleaned away", _bool),
    Option("io", "auto", "of a pass over the log: mmap: map whole segments; pread: read windows of them; auto: map, "
           "and read windows of what no room is for", _chosen("auto", "mmap", "pread")),
    Option("brokerConf", None, "broker.conf, for a store whose geometry the files leave open", _broker_conf),
    Option("fs.endpoint", None, "s3:// only: where the object store answers, as http://host:port", _text),
    Option("fs.region", None, "s3:// only: region of the bucket; found out by default", _text),
    Option("fs.anonymous", False, "s3:// only: without credentials", _bool),
    Option("fs.cacheDirectory", None, "of executors and driver, for what was fetched; Spark's local directory", _text),
    Option("fs.cacheBytes", CACHE_BYTES, "whole files kept there at most, those of the index", _number(0)),
    Option("maxOffsetsPerTrigger", None, "streams: messages of a batch at most", _number(1)),
    Option("maxBytesPerTrigger", None, "streams: bytes of the log of a batch at most", _number(1)),
)
_FIELDS = ("topic", "body", "queue_id", "keys", "tags", "uniq_key", "properties", "flag", "sys_flag", "born_timestamp",
           "born_host", "store_host", "reconsume_times", "prepared_transaction_offset", "raw_properties",
           "raw_body")  # of put_many  # fmt: skip
READ_ONLY = {*COLUMNS, "store"} - set(_FIELDS)  # what a read gives besides; a store makes its own


def _mapping(name: str, value: str) -> dict[str, str]:
    found = _json(name, value)
    if not isinstance(found, dict) or not all(isinstance(column, str) for column in found.values()):
        raise ValueError(f'option {name}: {value!r} is not of the form {{"keys": "order_id"}}')
    unknown = sorted(set(found) - set(_FIELDS))
    if unknown:
        raise ValueError(f"option {name}: no field {', '.join(unknown)}; there are {', '.join(_FIELDS)}")
    return found


WRITE_OPTIONS = (
    Option("path", None, "directory of the shards, or the store; save(path), start(path) set it", _text),
    Option("mode", "shards", "shards: a store for each task; single: all into one store, by the driver",
           _chosen("shards", "single")),
    Option("topic", None, "topic of all rows, when there is no column `topic`", _text),
    Option("columns", None, 'columns by field of a message, as {"keys": "order_id"}; others by their names', _mapping),
    Option("queues", 1, "queues over which rows go in turn, a task beginning with its number, when there is no column "
           "`queue_id`", _number(1, 2**31 - 1)),
    Option("segmentBytes", None, "size of a segment of new stores; RocketMQ's default is 1 GiB",
           _number(4096, 2**31 - 1)),
    Option("buildIndex", True, "whether new stores have an index", _bool),
)
OF_OBJECT_STORES = {option.name for option in OPTIONS if option.name.startswith("fs.")}
OF_SPARK = {"checkpointlocation"}  # what Spark adds by itself
ONE_OF = ("subscribe", "subscribePattern", "assign")
NO_PATH = ("option path is missing: spark.read.format('rmq').load(path). A table of the catalog loses its options: "
           "SELECT * FROM t WITH (path='...'), spark.read.option('path', ...).table('t'), or CREATE TEMPORARY VIEW v "
           "USING rmq OPTIONS (path '...') keep them")  # fmt: skip
NO_TARGET = ("option path is missing: df.write.format('rmq').mode('append').save(path). A table of the catalog loses "
             "it, INSERT INTO t WITH (path='...') keeps it")  # fmt: skip
OF_A_TABLE = ("a table of the catalog needs its columns, as CREATE TABLE t (body BINARY) USING rmq; it has no options: "
              "SELECT * FROM t WITH (path='...'); CREATE TEMPORARY VIEW v USING rmq OPTIONS (path '...') needs neither")


def _parsed(options: Mapping[str, str], table: tuple[Option, ...]) -> tuple[dict[str, Any], frozenset[str]]:
    """Values of all options, and the names of those given. ValueError names what is wrong."""
    by_name = {option.name.lower(): option for option in table}
    values: dict[str, Any] = {option.name: option.default for option in table}
    given = set()
    for name, value in options.items():
        option = by_name.get(name.lower())
        if option is not None:
            values[option.name] = option.read(option.name, value)
            given.add(option.name)
        elif name.lower() == "location" or name.lower().startswith("option."):
            raise ValueError(OF_A_TABLE)
        elif name.lower().startswith("fs.") and is_secret(name):
            raise ValueError(f"option {name}: {NO_CREDENTIALS}")
        elif name.lower() not in OF_SPARK:
            raise ValueError(f"no option {name!r}; there are {', '.join(option.name for option in table)}")
    return values, frozenset(given)


@dataclass(frozen=True)
class WriteOptions:
    """What a write was asked for, checked. values: by the option's own name."""

    values: dict[str, Any]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """ValueError that names an option which is unknown or has no such value."""
        values, _ = _parsed(options, WRITE_OPTIONS)
        if not values["path"]:
            raise ValueError(NO_TARGET)
        refuse_elsewhere(values["path"])
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def path(self) -> str:
        return session_path(self["path"])

    @property
    def geometry(self) -> dict[str, Any]:
        """Of new stores, as arguments of StoreConfig."""
        size = self["segmentBytes"]
        return ({} if size is None else {"mapped_file_size_commit_log": size}) | \
            ({} if self["buildIndex"] else {"message_index_enable": False})  # fmt: skip

    def columns_of(self, names: Sequence[str]) -> dict[str, str]:
        """Column of each field of a message. ValueError for a column that belongs to none, and for what is missing."""
        asked = self["columns"] or {}
        missing = sorted(set(asked.values()) - set(names))
        if missing:
            raise ValueError(f"option columns: the frame has no column {', '.join(missing)}; it has {', '.join(names)}")
        taken = set(asked.values())
        for field in asked.keys() & set(names) - taken:
            raise ValueError(f"the frame's column {field} stands beside {asked[field]}, which option columns maps to "
                             "that field")  # fmt: skip
        if "body" in asked and "raw_body" in {*asked, *(set(names) - taken)}:
            raise ValueError("option columns maps body, and the frame has raw_body, which would be stored in its place")
        found = asked | {name: name for name in names if name in _FIELDS and name not in taken and name not in asked}
        if "raw_body" in found:
            found.pop("body", None)
        unknown = [name for name in names if name not in taken and name not in READ_ONLY and name not in _FIELDS]
        if unknown:
            raise ValueError(f"the frame's column {', '.join(unknown)} is no field of a message; there are "
                             f"{', '.join(_FIELDS)}; option columns maps names")  # fmt: skip
        if "body" not in found and "raw_body" not in found:
            raise ValueError("the frame has no column body")
        if "topic" not in found and self["topic"] is None:
            raise ValueError("the frame has no column topic, and no option topic is given")
        return found


@dataclass(frozen=True)
class ReadOptions:
    """What a read was asked for, checked. values: by the option's own name."""

    values: dict[str, Any]
    given: frozenset[str]

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """ValueError that names an option which is unknown, contradicts another, or has no such value."""
        parsed = cls(*_parsed(options, OPTIONS))
        parsed._check()
        return parsed

    def _check(self) -> None:
        if not self.paths:
            raise ValueError(NO_PATH)
        chosen = [name for name in ONE_OF if name in self.given]
        if len(chosen) > 1:
            raise ValueError(f"options {' and '.join(chosen)}: only one of {', '.join(ONE_OF)} can be given")
        for side in ("starting", "ending"):
            both = [name for name in (f"{side}Timestamp", f"{side}Offsets", f"{side}OffsetsByTimestamp")
                    if name in self.given]  # fmt: skip
            if len(both) > 1:
                raise ValueError(f"options {' and '.join(both)}: only one of them can be given")
        if {"path", "paths"} <= self.given:
            raise ValueError("options path and paths: only one of them can be given")
        if self["subscribe"] == ():
            raise ValueError("option subscribe: names no topic")
        self._check_lite()
        if "keys" in self.given and "subscribe" not in self.given:
            raise ValueError("option keys: subscribe must say of which topics")
        if self["scanMode"] == "index" and "keys" not in self.given and self["table"] == "messages":
            raise ValueError("option scanMode=index: keys must say which messages, and subscribe of which topics")
        if self.is_by_queue:
            name = "maxRecordsPerPartition" if "maxRecordsPerPartition" in self.given else "scanMode=queue"
            if not chosen:
                raise ValueError(f"option {name}: one of {', '.join(ONE_OF)} must say of which queues")
            if "keys" in self.given:
                raise ValueError(f"options keys and {name}: only one of them can be given; keys are found by the index "
                                 "or with scanMode=log")  # fmt: skip
            if self["scanMode"] == "log":
                raise ValueError("options maxRecordsPerPartition and scanMode=log: only queues tell how many messages "
                                 "they have")  # fmt: skip
        if self["io"] == "pread":
            self._check_windows()
        if self["schemaMode"] == "kafka" and "columns" in self.given:
            raise ValueError("option columns: the schema of schemaMode=kafka is fixed")
        if self["schemaMode"] != "kafka" and self["includeHeaders"]:
            raise ValueError("option includeHeaders: for schemaMode=kafka; the native schema has `properties`")
        if self["table"] != "messages":
            topics = {"subscribe", "subscribePattern"} if self["table"] in ("queues", "topics") else set()
            others = self.given - {"path", "paths", "table", "brokerConf"} - topics - OF_OBJECT_STORES
            if others:
                raise ValueError(f"table={self['table']}: options {', '.join(sorted(others))} are not for it")

    def _check_lite(self) -> None:
        """ValueError for queues without messages of their own, when messages are asked for."""
        named = [*(self["subscribe"] or ()), *(self["assign"] or ())] if self["table"] == "messages" else []
        for topic in named:
            if topic.startswith(LMQ_PREFIX):
                raise ValueError(f"option {'assign' if 'assign' in self.given else 'subscribe'}: {topic} is a light "
                                 "queue of messages of other topics; Store.pull reads it")  # fmt: skip

    def _check_windows(self) -> None:
        if self.is_by_index:
            raise ValueError("options keys and io=pread: the index is mapped; scanMode=log needs no index")
        if not self["failOnDataLoss"]:
            raise ValueError("options failOnDataLoss=false and io=pread: damage is passed over in maps")

    def check_stream(self) -> None:
        """ValueError for options that a stream has not."""
        others = self.given & {"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "keys"}
        if others or self["table"] != "messages":
            raise ValueError(f"options {', '.join(sorted(others)) or 'table'}: not for streams")
        for path in filter(is_elsewhere, self.paths):
            raise ValueError(f"{path}: a stream reads stores on mounted disks; read this one as a batch")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(map(session_path, self["paths"] or ((self["path"],) if self["path"] else ())))

    @property
    def is_by_queue(self) -> bool:
        """Whether only what queues hold is asked for."""
        return self["scanMode"] == "queue" or "maxRecordsPerPartition" in self.given

    @property
    def is_by_index(self) -> bool:
        """Whether the index finds the messages, and no partition passes over the log."""
        return "keys" in self.given and self["scanMode"] != "log"

    @property
    def has_store_column(self) -> bool:
        return len(self.paths) > 1
