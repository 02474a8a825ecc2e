# SPDX-License-Identifier: Apache-2.0
"""The small files of a store: checkpoint, abort, lock, those of <store>/rmq/, and what does not belong there."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from rmq._core import _layout as L
from rmq.checkpoint import Checkpoint
from rmq.errors import CorruptFileError
from rmq.geometry import kept_values
from rmq.marks import MANIFEST_LIMIT, RECOVERING, Manifest, Mark, Marks, read_manifest, read_meta
from rmq.paths import LARGEST_OFFSET, StorePaths
from rmq.segment import SMALL_FILE, read_file
from rmq.verification.findings import DAMAGE, DERIVED, NOTE, Report
from rmq.verification.ground import UNFILLED, Ground, check_mode, scan_directory

_Answer = TypeVar("_Answer")
_REMEDY = "no open takes them but with `repair=True`, which sets them aside"

# What RocketMQ and its parts that are not read here leave below the root.
_ROOT_NAMES = frozenset({
    "commitlog", "consumequeue", "consumequeue_ext", "batchconsumequeue", "index", "checkpoint", "abort", "abort.bak",
    "lock", "config", "rmq", "compaction", "brokerIdentity", "delayOffset", "rocksdbstore", "kvStore",
})  # fmt: skip
_ROOT_PREFIXES = ("consumequeue_r", "indexRocksDB", "dledger-", "tiered", "epochFileCheckpoint", "checkpoint.",
                  "timer")  # fmt: skip
_OWN_NAMES = frozenset({"meta.json", "marks", "manifest.json", "owner", "cut", "sidecar", "spark", "spare",
                        "offsets.lock"})  # fmt: skip


def _is_there(path: Path, report: Report, severity: str = DERIVED) -> bool:
    """Whether there is a file to read; what is none is reported, and left alone: a pipe would never end."""
    if path.is_file():
        return True
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    report.add(path, 0, "name", severity, "no regular file stands where a file of the store belongs")
    return False


def read_own_meta(paths: StorePaths, report: Report) -> dict[str, Any] | None:
    """meta.json, or None; one that is broken is reported. Raises UnsupportedFormatError for a newer format."""
    meta: dict[str, Any] | None = None
    try:
        meta = read_meta(paths) if _is_there(paths.meta, report, DAMAGE) else None
        kept_values(paths, meta)
    except CorruptFileError as error:
        report.damage(paths.meta, 0, "own", f"{error.reason}; the store does not open with it")
    return meta


def read_mark(paths: StorePaths, report: Report) -> Mark | None:
    """The newest mark; cells that are neither whole nor unused are reported."""
    if not _is_there(paths.marks, report):
        return None
    try:
        data = read_file(paths.marks, SMALL_FILE)
    except CorruptFileError as error:
        report.derived(paths.marks, error.offset, "own", f"{error.reason}; {_REMEDY}")
        return None
    if not data:
        report.note(paths.marks, 0, "leftover", UNFILLED)
        return None
    if len(data) != L.MARKS_SIZE:
        report.derived(paths.marks, min(len(data), L.MARKS_SIZE), "own", f"marks have {len(data)} bytes, expected "
                       f"{L.MARKS_SIZE}; {_REMEDY}")  # fmt: skip
        return None
    torn = [offset for offset in (L.MARKS_CELL_A_OFFSET, L.MARKS_CELL_B_OFFSET)
            if not _is_whole(data[offset : offset + L.CELL_SIZE])]  # fmt: skip
    mark = _of_marks(paths, report, Marks.read)
    for offset in torn:
        severity = NOTE if mark is not None else DERIVED  # of two cells one may be torn
        report.add(paths.marks, offset, "own", severity, "the cell's CRC is not that of its bytes")
    return mark


def _is_whole(cell: bytes) -> bool:
    """Whether a cell's CRC is right, or the cell was never written."""
    stored: int = struct.unpack_from(">I", cell, L.CELL_CRC_OFFSET)[0]
    return not any(cell) or stored == zlib.crc32(cell[: L.CELL_CRC_OFFSET])


def read_own_manifest(paths: StorePaths, report: Report) -> Manifest | None:
    """The manifest, or None; one that is broken is reported."""
    manifest = None
    if not _is_there(paths.manifest, report):
        return manifest
    with suppress(CorruptFileError, ValueError, RecursionError):
        json.loads(read_file(paths.manifest, MANIFEST_LIMIT))
        manifest = read_manifest(paths)
    if manifest is None:
        report.derived(paths.manifest, 0, "own", "manifest.json is not what this library writes")
    return manifest


def read_checkpoint(paths: StorePaths, report: Report, *, is_live: bool) -> Checkpoint | None:
    """The checkpoint, None when it cannot be read."""
    if not _is_there(paths.checkpoint, report):
        return None
    try:
        checkpoint = Checkpoint(paths.checkpoint)
        length = paths.checkpoint.stat().st_size if checkpoint.exists else L.CHECKPOINT_SIZE
    except CorruptFileError as error:
        report.derived(paths.checkpoint, error.offset, "size", error.reason)
        return None
    if length != L.CHECKPOINT_SIZE and not is_live:
        report.derived(paths.checkpoint, min(length, L.CHECKPOINT_SIZE), "size", f"checkpoint has {length} bytes, "
                       f"expected {L.CHECKPOINT_SIZE}")  # fmt: skip
    return checkpoint


def judge_checkpoint(ground: Ground, last_timestamp: int | None, least_timestamp: int) -> None:
    """Its times against the newest one in the log, and the least one below 0. Source: StoreCheckpoint."""
    checkpoint, report = ground.checkpoint, ground.report
    if checkpoint is None or not checkpoint.exists or ground.is_live:
        return
    latest = 0 if last_timestamp is None else last_timestamp
    times = ((L.CHECKPOINT_PHYSIC_MSG_TIMESTAMP_OFFSET, "physicMsgTimestamp", checkpoint.physic_msg_timestamp),
             (L.CHECKPOINT_LOGICS_MSG_TIMESTAMP_OFFSET, "logicsMsgTimestamp", checkpoint.logics_msg_timestamp),
             (L.CHECKPOINT_INDEX_MSG_TIMESTAMP_OFFSET, "indexMsgTimestamp",
              checkpoint.index_msg_timestamp))  # fmt: skip
    for offset, name, time in times:
        if time < least_timestamp and latest >= 0 and not ground.log.min_phy_offset:  # or it was removed
            report.derived(checkpoint.path, offset, "checkpoint", f"{name} is {time}, which is no time")
        elif time > max(latest, 0) and not ground.blind and not ground.log.min_phy_offset:  # or it was removed
            # What queues and index had reached may have been cut with the log behind it.
            severity = DERIVED if ground.is_closed or name == "physicMsgTimestamp" else NOTE
            report.add(checkpoint.path, offset, "checkpoint", severity, f"{name} is {time}, but the newest record was "
                       f"stored at {latest}")  # fmt: skip
    if ground.is_closed and checkpoint.confirm_phy_offset > ground.log_end:
        report.derived(checkpoint.path, L.CHECKPOINT_CONFIRM_PHY_OFFSET_OFFSET, "checkpoint",
                       f"confirmPhyOffset is {checkpoint.confirm_phy_offset}, the log ends at {ground.log_end}")


def judge_names(paths: StorePaths, report: Report, *, is_live: bool) -> None:
    """Names and modes below the root and in <store>/rmq/."""
    check_mode(paths.root, report)
    for path in (paths.consume_queue, paths.index, paths.own, paths.config):
        if os.path.lexists(path) and not path.is_dir():
            report.derived(path, 0, "name", "no directory; a store does not open with it for writing")
    for entry in scan_directory(paths.root):
        path = Path(entry.path)
        check_mode(path, report)
        if entry.name not in _ROOT_NAMES and not entry.name.startswith(_ROOT_PREFIXES) \
                and path not in paths.commit_logs:  # fmt: skip
            report.note(path, 0, "name", "no file of a store has this name")
    for entry in scan_directory(paths.own):
        path = Path(entry.path)
        check_mode(path, report)
        if entry.name.endswith(".tmp"):
            if not is_live:
                report.note(path, 0, "leftover", "a file whose writer was killed before it had its name")
        elif path in (paths.rebuilt, paths.replaced):
            if not is_live:
                report.note(path, 0, "leftover", "a killed rebuild left it; the next open for writing removes it")
        elif entry.name not in _OWN_NAMES:
            report.note(path, 0, "name", "no file of <store>/rmq/ has this name")


def judge_markers(paths: StorePaths, report: Report, state: str) -> None:
    """abort, lock and owner."""
    if state == "not closed":
        report.note(paths.abort, 0, "open", "the store was not closed: its writer was killed, or this is a copy of an "
                    "open store")  # fmt: skip
    if state == "closed":
        own = (paths.marks, paths.manifest) if paths.meta.exists() else ()
        for path in (paths.checkpoint, *own):
            if not path.exists() and any(directory.is_dir() for directory in paths.commit_logs):
                report.note(path, 0, "missing", "a closed store has this file; it is made again")
    if state == "closed" and paths.owner.exists():
        report.note(paths.owner, 0, "leftover", "names a writer, but the store is closed")
    for path in (paths.abort, paths.owner):
        _is_there(path, report)
    if _is_there(paths.lock, report) and not _is_lock(paths.lock):
        report.note(paths.lock, 0, "name", "does not hold the text `lock`")


def _is_lock(path: Path) -> bool:
    try:
        return read_file(path, SMALL_FILE)[:5] in (b"", b"lock")
    except CorruptFileError:
        return False


def visible_end(paths: StorePaths, report: Report) -> int:
    """End of the log that a writer of ours has published; behind all logs where nothing tells."""
    end = _of_marks(paths, report, lambda marks: marks.visible_phy_offset)
    return LARGEST_OFFSET if end is None or end == RECOVERING else end


def _of_marks(paths: StorePaths, report: Report, ask: Callable[[Marks], _Answer]) -> _Answer | None:
    """What marks say that were whole a moment ago; None, and a report, when they are not now."""
    try:
        with closing(Marks(paths.marks, writable=False)) as marks:
            return ask(marks)
    except CorruptFileError as error:
        report.derived(paths.marks, error.offset, "own", error.reason)
        return None
