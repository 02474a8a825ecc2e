# SPDX-License-Identifier: Apache-2.0
"""Names of the files of a store, and what tells one file from another.

Source: RocketMQ StorePathConfigHelper, UtilAll#offset2FileName.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

logger = logging.getLogger("rmq")

SEGMENT_NAME = re.compile(r"\d{20}", re.ASCII)
RETRY_PREFIX = "%RETRY%"  # of topics of messages that a group tries again. Source: RocketMQ MixAll
LIGHT_QUEUE_ID = 0  # of each light queue. Source: RocketMQ MixAll
LMQ_PREFIX = "%LMQ%"  # of topics whose units point to messages of other topics. Source: RocketMQ MixAll
INDEX_NAME = re.compile(r"\d{17}", re.ASCII)
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
FILE_URI = re.compile(r"(?i:file:(?://(?:localhost)?(?=/)|(?!//)))(/.*)", re.DOTALL)
LARGEST_OFFSET = 2**63 - 1
PATH_BELOW = 350  # bytes of the longest path below a root: rmq/replaced/consumequeue, a topic, a queue id, a segment
FileVersion = tuple[int, int, int]
BEGUN_BY_SPARK = {"spark", "meta.json", "meta.json.tmp"}  # in rmq/, while there is no store yet


def version_of(name: str) -> FileVersion | None:
    """What tells a file from one that takes its place or is written over it; None without one."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_rocksdb(path: Path) -> bool:
    """Whether a directory is a database of RocksDB's."""
    return (path / "CURRENT").is_file() and any(path.glob("MANIFEST-*"))


class StorePaths:
    """Paths below the root of a store."""

    def __init__(self, root: Path, commit_log: str | None = None) -> None:
        self.root = root
        given = [Path(part).absolute() for part in (commit_log or "").split(",") if part]
        self.commit_logs = list(dict.fromkeys(given)) or [root / "commitlog"]
        self.is_log_elsewhere = bool(given)
        self.consume_queue = root / "consumequeue"
        self.batch_consume_queue = root / "batchconsumequeue"
        self.index = root / "index"
        self.checkpoint = root / "checkpoint"
        self.abort = root / "abort"
        self.abort_bak = root / "abort.bak"
        self.lock = root / "lock"
        self.config = root / "config"
        self.topics_json = self.config / "topics.json"
        self.consumer_offsets = self.config / "consumerOffset.json"
        self.lmq_consumer_offsets = self.config / "lmqConsumerOffset.json"
        self.rocksdb_offsets = (self.config / "consumerOffsets", self.config / "rdb")
        self.epochs = root / "epochFileCheckpoint"  # of a broker in controller mode
        self.own = root / "rmq"
        self.meta = self.own / "meta.json"
        self.marks = self.own / "marks"
        self.manifest = self.own / "manifest.json"
        self.owner = self.own / "owner"
        self.spare = self.own / "spare"
        self.offsets_lock = self.own / "offsets.lock"  # of who changes the file of consumer offsets
        self.cut = self.own / "cut"
        self.rebuilt, self.replaced = self.own / "rebuild", self.own / "replaced"  # while a rebuild is at work
        self.sidecars = self.own / "sidecar"
        self.commits = self.own / "spark" / "commits"  # what Spark has written here, a file for each job

    def looks_like_store(self) -> bool:
        """Whether anything below the root is a store's."""
        return (
            any(path.is_dir() for path in (*self.commit_logs, self.consume_queue))
            or self.checkpoint.is_file()
            or ((self.lock.is_file() or self.own.is_dir()) and not self.is_begun_by_spark())
        )

    def is_begun_by_spark(self) -> bool:
        """Whether `rmq/` has only what a write of Spark leaves there before the first commit, or a bulk_load (which
        takes the lock, too) before its log is there.
        """
        names = {path.name for path in self.own.glob("*")}
        return {"spark"} <= names <= BEGUN_BY_SPARK and not any(self.commits.glob("*.json"))

    def shards(self) -> list[str]:
        """Names of the stores that Spark has committed to this directory, each next to the others."""
        jobs = {path.stem for path in self.commits.glob("*.json")}
        return sorted(path.name for path in self.root.glob("part-*-*") if path.name.split("-", 2)[2] in jobs)


def queue_directory(queues: Path, topic: str, queue_id: int) -> Path:
    """Where the files of a queue lie. The topic must have passed check_directory; its UTF-8 is one directory name,
    whatever encoding the locale has for names.
    """
    return queues / os.fsdecode(topic.encode()) / str(queue_id)


def topic_of(name: str) -> str | None:
    """The topic that a directory is named after; None when the name is not UTF-8."""
    try:
        return os.fsencode(name).decode()
    except UnicodeDecodeError:
        return None


def is_queue_id(name: str) -> bool:
    """Whether a directory of a topic is a queue's."""
    return name.isascii() and name.isdigit() and len(name) <= 10 and int(name) < 2**31


def queue_directories(queues: Path) -> Iterator[tuple[Path, str, int]]:
    """Path, topic and queue id of each queue's directory, in order; others are skipped, with a warning."""
    if not queues.is_dir():
        return
    for directory in sorted(path for path in queues.iterdir() if path.is_dir()):
        topic = topic_of(directory.name)
        if topic is None:
            logger.warning("%s: no topic's directory, its name is not UTF-8; skipped", directory)
            continue
        try:
            paths = sorted(path for path in directory.iterdir() if path.is_dir())
        except FileNotFoundError:
            continue  # a topic that was deleted meanwhile
        for path in paths:
            if is_queue_id(path.name):
                yield path, topic, int(path.name)
            else:
                logger.warning("%s: no queue's directory, skipped", path)


def sidecar_path(index_file: Path) -> Path | None:
    """Where the sidecar of an index file of a store lies; None for a file in no store's index directory."""
    directory = index_file.parent
    return directory.parent / "rmq" / "sidecar" / index_file.name if directory.name == "index" else None


def segment_name(offset: int) -> str:
    """File name of the segment that starts at a byte offset: 20 digits."""
    return f"{offset:020d}"


def index_name(ms: int) -> str:
    """File name of an index file made at a time: yyyyMMddHHmmssSSS, local time."""
    moment = datetime.fromtimestamp(ms // 1000)
    return f"{moment.year:04d}{moment:%m%d%H%M%S}{ms % 1000:03d}"  # %Y of the year 900 has three digits


def next_index_name(name: str, ms: int) -> str:
    """Name for an index file made at `ms` after the file `name`: strictly greater, whatever the clock did.

    Behind the last name of 17 digits comes one of 18, which is no index file's.
    """
    fresh = index_name(ms)
    if fresh > name:
        return fresh
    try:
        later = datetime.strptime(name[:14], "%Y%m%d%H%M%S") + timedelta(milliseconds=int(name[14:]) + 1)
        return f"{later.year:04d}{later:%m%d%H%M%S}{later.microsecond // 1000:03d}"
    except (ValueError, OverflowError):
        return f"{int(name) + 1:017d}"  # seventeen digits that are no time; RocketMQ sorts them all the same


def is_elsewhere(path: str) -> bool:
    """Whether a path is the URI of what is not among this machine's files."""
    return URI.match(path) is not None and FILE_URI.fullmatch(path) is None


def local_path(path: str) -> str:
    """A URI such as file:/a or file:///a as a path, with `#` and `?` as they stand; others as they are."""
    uri = FILE_URI.fullmatch(path)
    return path if uri is None else unquote(uri[1])


def session_path(path: str) -> str:
    """local_path of what Spark reads or writes; ValueError for a relative one in a session of Spark Connect, whose
    directory goes with it.
    """
    local = local_path(path)
    if not (os.path.isabs(local) or is_elsewhere(local)) and "/userFiles-" in os.getcwd():
        raise ValueError(f"{path}: a session of Spark Connect has no directory to begin from: give an absolute path")
    return local


def path_text(path: str | os.PathLike[str], name: str) -> str:
    """What a caller passed as a path; TypeError with the argument's name."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be str or os.PathLike, got {type(path).__name__}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a path of str, got one of {type(text).__name__}")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds what no file's name can: {text!r}") from None
    if has_nul:
        raise ValueError(f"{name} holds a NUL: {text!r}")
    return text


def _without_secrets(uri: str) -> str:
    """What of a URI may stand in a log."""
    place, asks, _ = re.sub(r"//[^/?#@]*:[^/?#]*@", "//...@", uri).partition("?")
    return place + "?..." * bool(asks)


def store_root(path: str | os.PathLike[str]) -> Path:
    """A store's directory; FileNotFoundError for no name and for the URI of what is not among this machine's files."""
    text = path_text(path, "path")
    if not text:
        raise FileNotFoundError(errno.ENOENT, "the path of the store is empty", text)
    if is_elsewhere(text):
        raise FileNotFoundError(errno.ENOENT, "no directory of this machine; Spark reads stores on object stores",
                                _without_secrets(text))  # fmt: skip
    return Path(local_path(text))


def directory_here(path: str | os.PathLike[str], name: str) -> Path:
    """The absolute path of a directory to write; ValueError with the argument's name for another place's URI."""
    text = local_path(path_text(path, name))
    if is_elsewhere(text):
        raise ValueError(f"{name} {_without_secrets(text)} is no directory of this machine")
    return Path(text).absolute()
