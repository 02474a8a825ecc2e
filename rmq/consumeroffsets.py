# SPDX-License-Identifier: Apache-2.0
"""config/consumerOffset.json: the queue offset from which each consumer group goes on in each queue.

Source: RocketMQ ConsumerOffsetManager; LmqConsumerOffsetManager, which takes its place where a broker has light queues.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.fastjson import count_on, document_bytes, read_document, write_document
from rmq.keys import encoded
from rmq.paths import LARGEST_OFFSET, LMQ_PREFIX, StorePaths, is_rocksdb
from rmq.segment import file_size

logger = logging.getLogger("rmq")

Offsets = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue id -> queue offset

SEPARATOR = "@"  # "topic@group" is the key of what a group has consumed of a topic
_TABLE, _LMQ_TABLE = "offsetTable", "lmqOffsetTable"
_INT = re.compile(r"0|-?[1-9]\d{0,9}", re.ASCII)
_LONGS = range(-(2**63), 2**63)


def check_group(group: Any, topic: Any) -> None:
    """TypeError or ValueError for what are no names of a group and a topic."""
    if not encoded(group, "group") or SEPARATOR in group:
        raise ValueError(f"group must be a name without {SEPARATOR!r}, got {group!r}")
    if not encoded(topic, "topic"):
        raise ValueError("topic must not be empty")


def read_offsets(paths: StorePaths) -> Offsets:
    """What a broker that starts now goes by; {} when no group has committed anything.

    Raises CorruptFileError, UnsupportedFormatError (RocksDB), OSError.
    """
    damage: CorruptFileError | None = None
    for path in _with_backup(_kept_file(paths)):
        try:
            found = _by_group(path, _document(path))
        except FileNotFoundError:  # a broker renames it
            continue
        except CorruptFileError as error:  # or writes in place, after it has written to the .bak what was
            damage = damage or error
            continue
        if damage is not None:
            logger.warning("%s; read from %s, as a broker does", damage, path.name)
        return found
    if damage is not None:
        raise damage
    return {}


def _kept_file(paths: StorePaths) -> Path:
    """The file that the last broker kept; it need not be there."""
    for path in paths.rocksdb_offsets:
        if is_rocksdb(path):
            raise UnsupportedFormatError(path, "consumer offsets in RocksDB", "mqadmin rocksDBConfigToJson shows them")
    return max((paths.consumer_offsets, paths.lmq_consumer_offsets), key=_last_change)


def _with_backup(path: Path) -> list[Path]:
    """The file and its .bak, but for those that are empty or not there."""
    files = (path, path.with_name(path.name + ".bak"))
    return [file for file in files if file_size(file) or not (file.is_file() or not os.path.lexists(file))]


def _last_change(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _document(path: Path) -> dict[str, Any]:
    """A file's object; CorruptFileError when it is none."""
    try:
        return read_document(path, _TABLE)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, 0, f"no table of consumer offsets: {error}") from None


def _by_group(path: Path, document: dict[str, Any]) -> Offsets:
    """Sorted by name and number. Raises CorruptFileError."""
    found: Offsets = {}
    for group, topic, queue_id, queue_offset in sorted(_rows(path, document)):
        found.setdefault(group, {}).setdefault(topic, {})[queue_id] = queue_offset
    return found


def _rows(path: Path, document: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    light = document.get(_LMQ_TABLE, {})
    tables = [document[_TABLE], {key: {"0": place} for key, place in light.items()} if isinstance(light, dict) else {}]
    for table in tables:
        for key, queues in table.items():
            topic, separator, group = key.rpartition(SEPARATOR)
            if not separator or not isinstance(queues, dict):
                raise CorruptFileError(path, 0, f"no consumer offsets of a topic@group: {key!r}")
            for queue_id, place in queues.items():
                if not _INT.fullmatch(queue_id) or type(place) is not int or place not in _LONGS:
                    raise CorruptFileError(path, 0, f"no queue's consumer offset: {key!r}: {queue_id!r}")
                yield group, topic, int(queue_id), place


class ConsumerOffsets:
    """Those of a store that this process writes, kept in memory between flushes. Thread-safe."""

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._lock = threading.RLock()
        self._file: tuple[Path, dict[str, Any]] | None = None  # once it was read
        self._commits = self._written = 0

    @property
    def is_behind(self) -> bool:
        """Whether the file lacks a commit."""
        return self._commits != self._written

    def groups(self) -> Offsets:
        """read_offsets, with what was committed since."""
        with self._lock:
            return read_offsets(self._paths) if self._file is None else _by_group(*self._file)

    def commit(self, group: str, topic: str, queue_offsets: Mapping[int, int]) -> None:
        """In memory. Raises as read_offsets; where a broker would go by the .bak, CorruptFileError."""
        with self._lock:
            queues = self._loaded()[1][_TABLE].setdefault(f"{topic}{SEPARATOR}{group}", {})
            places = {str(queue_id): place for queue_id, place in queue_offsets.items()}
            if places.items() - queues.items():
                self._commits += 1  # first: what an interrupt leaves is written all the same
                queues.update(places)

    def cut_back(self, max_offset_of: Callable[[str, int], int]) -> None:
        """Where a queue ends before it, by a crash or a cleaning: what will be put there has not been consumed."""
        with self._lock:
            try:
                path, document = self._loaded()
            except UnsupportedFormatError:
                return  # who commits is told
            except (CorruptFileError, OSError) as error:
                logger.warning("%s: left as it is: %s", self._paths.consumer_offsets, error)
                return
            for group, topic, queue_id, place in list(_rows(path, {_TABLE: document[_TABLE]})):
                if not topic.startswith(LMQ_PREFIX) and place > (end := max_offset_of(topic, queue_id)):
                    document[_TABLE][f"{topic}{SEPARATOR}{group}"][str(queue_id)] = end
                    self._commits += 1
                    logger.warning("%s: group %s had consumed %s queue %d up to %d, which now ends at %d", path, group,
                                   topic, queue_id, place, end)  # fmt: skip

    def begin_anew(self, queues: Collection[tuple[str, int]]) -> None:
        """Of queues, by topic and queue id, that are about to go nothing has been consumed: they begin at 0 again."""
        if queues:
            self.cut_back(lambda *queue: 0 if queue in queues else LARGEST_OFFSET)

    def _loaded(self) -> tuple[Path, dict[str, Any]]:
        if self._file is None:
            path = _kept_file(self._paths)
            if path.is_symlink():
                raise CorruptFileError(path, 0, "is a symbolic link, which is not written through")
            files = _with_backup(path)
            document = _document(files[0]) if files else {_TABLE: {}}
            _by_group(path, document)
            try:
                document_bytes(document)
            except RecursionError as error:
                raise CorruptFileError(path, 0, f"nests too deep: {error}") from None
            self._file = path, document
        return self._file

    def taken(self) -> tuple[int, dict[str, Any]] | None:
        """What a flush writes; None when the file has it. Before the flush asks where the log ends."""
        with self._lock:
            if self._file is None or not self.is_behind:
                return None
            document = self._file[1]
            count_on(document)
            table = {key: dict(queues) for key, queues in [*document[_TABLE].items()]}
            return self._commits, {**document, "dataVersion": copy.copy(document["dataVersion"]), _TABLE: table}

    def write(self, taken: tuple[int, dict[str, Any]] | None) -> None:
        """On disk. Raises OSError."""
        if taken is not None and self._file is not None:
            write_document(self._file[0], taken[1])
            self._written = taken[0]
