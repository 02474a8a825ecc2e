# SPDX-License-Identifier: Apache-2.0
"""Messages of a store as a directory of partitioned Parquet files: tasks write parts, one rename shows all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from rmq.config import StoreConfig, config_or_default
from rmq.parallel import ScanTask, plan_scan
from rmq.paths import StorePaths, directory_here, store_root
from rmq.pool import Runner, in_processes
from rmq.scan import checked_columns
from rmq.segment import hand_on, sync_directory, sync_file, telling
from rmq.splits import SPLIT_BYTES
from rmq.store import open as open_store
from rmq.wholerecords import LostRange

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[int, int], object]

PARTITIONS = {"topic": "topic", "date": "store_timestamp", "hour": "store_timestamp", "queue_id": "queue_id"}
Compression = Literal["zstd", "snappy", "gzip", "none"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
NULL = "__HIVE_DEFAULT_PARTITION__"  # what Hive, Spark and pyarrow read as NULL
TEMPORARY = ".rmq-export-"  # begins a name that readers of directories pass over
ROUND_BYTES = 192 * 1024 * 1024  # rows that a task holds before it writes them
ROW_GROUP_BYTES = 128 * 1024 * 1024
ROW_GROUP_ROWS = 1_000_000
BATCH_ROWS = 65536
NAME_LIMIT = 255  # bytes of a name in a directory
DAY_MS, HOUR_MS = 86_400_000, 3_600_000
FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31
# Columns whose values come again and again; of the others Parquet would try a dictionary in vain.
REPEATED = ("topic", "queue_id", "size", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset", "tags",
            "born_host", "store_host", "properties.key_value.key", "properties.key_value.value")  # fmt: skip
UNCOMPARED = ("body", "raw_body", "raw_properties")  # no statistics: minimum and maximum of a body help nobody


@dataclass(frozen=True)
class ExportedFile:
    """path: below the target; row_count: messages; size: bytes."""

    path: str
    row_count: int
    size: int


@dataclass(frozen=True)
class ExportResult:
    """files: in the order of their paths. row_count: messages of all; size: bytes of all. lost: what on_damage="skip"
    left out, in the order of the log.
    """

    path: str
    files: tuple[ExportedFile, ...]
    row_count: int
    size: int
    lost: tuple[LostRange, ...] = ()


class WrittenPart(NamedTuple):
    """What a task wrote: where each file is, and what it is to be; and what it left out."""

    files: list[tuple[str, ExportedFile]]
    lost: list[LostRange]


@dataclass(frozen=True)
class ExportTask:
    """One part of an export, picklable. staging: the directory below which each try makes one of its own."""

    scan: ScanTask
    number: int
    staging: str
    columns: tuple[str, ...]
    partition_by: tuple[str, ...]
    compression: Compression


def export(path: str | os.PathLike[str], target: str | os.PathLike[str], *,
           partition_by: Iterable[str] = ("topic", "date"), topics: Iterable[str] | None = None, begin: Any = None,
           end: Any = None, columns: Iterable[str] | None = None, compression: Compression = "zstd",
           on_damage: Literal["raise", "skip"] = "raise", processes: int | None = None,
           split_bytes: int = SPLIT_BYTES, config: StoreConfig | None = None,
           progress: Progress | None = None) -> ExportResult:  # fmt: skip
    """Write the messages of a store into a new directory of Parquet files, on `processes` processes.

    target: is made, or is an empty directory; `<target>/topic=orders/date=2026-11-21/part-00007-0.parquet`, with
    partition_by () `<target>/part-...`. partition_by: of "topic", "date" and "hour" (of the store timestamp, UTC),
    "queue_id"; topic and queue_id are then in the path, not in the files. A name has %XX for ASCII that is no letter,
    digit, - or _; no topic, and a time outside of the years 1 to 9999, is NULL. topics, begin, end, columns: as
    `Store.scan`, with its types. compression: zstd, snappy, gzip or none. on_damage: as `Store.scan`; what "skip"
    leaves out is the result's .lost. processes, split_bytes: as `scan_map`; each part makes a file or more for each
    partition value in it. progress: called with (bytes read, bytes to read).

    All or nothing: parts are written into `.rmq-export-*` beside the target, and shown by one rename when all are on
    disk. An export that fails removes that directory; one that is killed leaves it, and nothing else. Memory: 300 to
    400 MiB for each process, beside the pages of the log. Raises as `scan_map`, CorruptFileError at damage (what is
    cleaned away meanwhile is some), FileExistsError when the target holds anything, FileNotFoundError when its parent
    is not there, ValueError when it lies in the store, OSError when a topic makes a name of more than 255 bytes.
    """
    run = in_processes(processes)
    return run_export(run, path, target, partition_by=partition_by, compression=compression, progress=progress,
                      columns=columns, config=config, split_bytes=split_bytes,
                      min_partitions=processes, topics=topics, begin=begin, end=end, on_damage=on_damage)  # fmt: skip


def run_export(run: Runner, path: str | os.PathLike[str], target: str | os.PathLike[str], *,
               partition_by: Iterable[str], compression: Compression, columns: Iterable[str] | None,
               progress: Progress | None = None, **options: Any) -> ExportResult:  # fmt: skip
    """`export` by any Runner. options: of plan_scan."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, got {type(progress).__name__}")
    config = options.get("config")
    config_or_default(config)
    chosen, wanted = checked_partitions(partition_by), checked_columns(columns)
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
    kept = tuple(name for name in wanted if name not in chosen)
    if not kept:
        raise ValueError("columns: none is left beside those of partition_by")
    place = checked_target(target, path, config)
    read = dict.fromkeys([*kept, *(PARTITIONS[name] for name in chosen)])
    scans = plan_scan(path, columns=list(read), batch_rows=BATCH_ROWS, **options)
    temporary = place.parent / f"{TEMPORARY}{uuid.uuid4().hex[:12]}"
    temporary.mkdir()
    try:
        (temporary / "parts").mkdir()
        _try_to_show(temporary / "done", place)
        tasks = [ExportTask(scan, number, str(temporary / "parts"), kept, chosen, compression)
                 for number, scan in enumerate(scans)]  # fmt: skip
        return _publish(_collected(run, tasks, progress), temporary / "done", place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def checked_partitions(partition_by: Iterable[str]) -> tuple[str, ...]:
    if isinstance(partition_by, str) or not isinstance(partition_by, Iterable):
        raise TypeError(f"partition_by must be a sequence of names, got {type(partition_by).__name__}")
    names = tuple(partition_by)
    for name in names:
        if not isinstance(name, str) or name not in PARTITIONS:
            raise ValueError(f"partition_by: no {name!r}; there are: {', '.join(PARTITIONS)}")
    if len(set(names)) != len(names):
        raise ValueError("partition_by repeats a name")
    return names


def checked_target(target: str | os.PathLike[str], store: str | os.PathLike[str],
                   config: StoreConfig | None = None) -> Path:  # fmt: skip
    """The target's real path. It must be absent or an empty directory, and not lie in the store."""
    place = Path(os.path.realpath(directory_here(target, "target")))
    elsewhere = config.store_path_commit_log if config is not None else None
    paths = StorePaths(store_root(store).absolute(), elsewhere)
    roots = {Path(os.path.realpath(root)) for root in (paths.root, *paths.commit_logs)}
    if roots & {place, *place.parents}:
        raise ValueError(f"target {place} lies in the store")
    if not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place.parent))
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(errno.EEXIST, "an export makes a new directory, this is there", str(place))
    return place


def _try_to_show(tree: Path, target: Path) -> None:
    """An empty target is replaced by another one now: where that cannot be, no part need be written."""
    if target.exists():
        tree.mkdir()
        try:
            _rename_over(tree, target)
        except OSError as error:
            reason = "a rename cannot put the export here, as on a mount point: name a directory in it"
            raise OSError(error.errno, reason, str(target)) from error


def _rename_over(tree: Path, target: Path) -> None:
    """The tree at the target's place. An empty directory that is there hands its mode, access list and owner on, the
    owner where the system lets us."""
    if not target.exists():
        os.rename(tree, target)
        return
    old = target.stat()
    hand_on(old, tree)
    shutil.copystat(target, tree)
    os.utime(tree)
    mode = stat.S_IMODE(old.st_mode)
    os.chmod(tree, mode | stat.S_IRWXU)  # a directory that may not be written cannot be moved
    os.rename(tree, target)
    os.chmod(target, mode)


def _collected(run: Runner, tasks: list[ExportTask], progress: Progress | None) -> list[WrittenPart]:
    """The answers of all tasks; when one fails, the others have ended before that is told."""
    total, done = sum(task.scan.split.size for task in tasks), 0
    found = []
    answers = run(write_part, tasks)
    with contextlib.ExitStack() as stack:
        stack.callback(getattr(answers, "close", lambda: None))
        for task, part in zip(tasks, answers, strict=True):
            found.append(part)
            done += task.scan.split.size
            if progress is not None:
                progress(done, total)
    return found


def _publish(written: list[WrittenPart], tree: Path, target: Path) -> ExportResult:
    """Files of the tries that counted, under their names, then the whole tree at once."""
    directories = {tree}
    tree.mkdir()
    files = sorted((item for part in written for item in part.files), key=lambda item: item[1].path)
    for source, file in files:
        place = tree / file.path
        if place.parent not in directories:
            place.parent.mkdir(parents=True, exist_ok=True)
            directories.update(parent for parent in place.parents if tree in parent.parents)
        os.rename(source, place)
    for directory in directories:
        sync_directory(directory)
    _rename_over(tree, target)
    sync_directory(target.parent)
    listed = tuple(file for _, file in files)
    return ExportResult(str(target), listed, sum(file.row_count for file in listed),
                        sum(file.size for file in listed),
                        tuple(item for part in written for item in part.lost))  # fmt: skip


# ---- a task --------------------------------------------------------------------------------------


def write_part(task: ExportTask) -> WrittenPart:
    """Write one part's files, on disk when it returns."""
    writer = PartWriter(task)
    lost: list[LostRange] = []
    with open_store(task.scan.split.path, config=task.scan.config) as store:
        for batch in task.scan.batches(store, lost=lost):
            writer.add(batch)
    writer.flush()
    return WrittenPart(writer.files, lost)


class PartWriter:
    """Collects rows by partition value, in log order, and writes them as files when there are enough."""

    def __init__(self, task: ExportTask) -> None:
        self.files: list[tuple[str, ExportedFile]] = []
        self._task = task
        # Each try has its own: a second one of Spark's may run beside the first.
        self._root = Path(task.staging) / f"{task.number:05d}-{uuid.uuid4().hex[:12]}"
        self._root.mkdir()
        self._pending: dict[str, list[pa.RecordBatch]] = {}
        self._size = 0
        self._round = 0

    def add(self, batch: pa.RecordBatch) -> None:
        for directory, rows in partitions_of(batch, self._task.partition_by):
            self._pending.setdefault(directory, []).append(rows)
        self._size += batch.nbytes
        if self._size >= ROUND_BYTES:
            self.flush()

    def flush(self) -> None:
        """One file for each partition value. Only one is open at a time, however many values there are."""
        for directory in sorted(self._pending):
            self._write(directory, self._pending.pop(directory))
        self._size = 0
        self._round += 1

    def _write(self, directory: str, batches: list[pa.RecordBatch]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_batches(batches).select(self._task.columns)
        name = f"part-{self._task.number:05d}-{self._round}.parquet"
        path = self._root / directory / name
        level = self._root  # not made again: an export that has ended has removed it
        for part in filter(None, directory.split("/")):
            level /= part
            level.mkdir(exist_ok=True)
        rows = max(1, min(ROW_GROUP_ROWS, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes)))
        with telling(path), open(path, "xb") as file:
            pq.write_table(table, file, row_group_size=rows, compression=self._task.compression,
                           use_dictionary=list(REPEATED),
                           write_statistics=[n for n in table.column_names if n not in UNCOMPARED])  # fmt: skip
            file.flush()
            sync_file(file.fileno())
            size = os.fstat(file.fileno()).st_size
        shown = os.path.join(directory, name)
        self.files.append((str(path), ExportedFile(shown, table.num_rows, size)))


# ---- partition values ----------------------------------------------------------------------------


def partitions_of(batch: pa.RecordBatch, partition_by: tuple[str, ...]) -> list[tuple[str, pa.RecordBatch]]:
    """(directory, rows) for each combination of values in a batch; rows stay in their order."""
    count = batch.num_rows
    if not count:
        return []
    names: list[Callable[[int], str]] = []
    codes = np.zeros(count, np.int64)
    for name in partition_by:
        values, name_of = _values(batch, name)
        names.append(name_of)
        distinct, numbers = np.unique(values, return_inverse=True)
        codes = np.unique(codes * len(distinct) + numbers, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = [0, *(np.flatnonzero(np.diff(codes[order])) + 1).tolist(), count]
    rows = batch if len(starts) == 2 else batch.take(order)
    found = []
    for first, last in pairwise(starts):
        directory = "/".join(name_of(int(order[first])) for name_of in names)
        found.append((directory, rows.slice(first, last - first)))
    return found


def _values(batch: pa.RecordBatch, name: str) -> tuple[npt.NDArray[np.int64], Callable[[int], str]]:
    """Numbers that are equal where the values are, and what names the directory of a row."""
    column = batch.column(PARTITIONS[name])
    if name == "topic":
        coded = column.dictionary_encode()
        numbers = coded.indices.to_numpy().astype(np.int64)
        return numbers, lambda row: f"topic={escaped(coded.dictionary[numbers[row]].as_py())}"
    values = column.cast("int64").to_numpy()
    if name == "queue_id":
        return values, lambda row: f"queue_id={values[row]}"
    days = values // DAY_MS
    if name == "date":
        return days, lambda row: f"date={date_of(int(days[row]))}"
    hours = (values - days * DAY_MS) // HOUR_MS
    return hours, lambda row: f"hour={NULL if date_of(int(days[row])) == NULL else f'{hours[row]:02d}'}"


def date_of(day: int) -> str:
    """ISO 8601 of a day since 1970, NULL when it has no such date."""
    return str(np.datetime64(day, "D")) if FIRST_DAY <= day <= LAST_DAY else NULL


def escaped(topic: str) -> str:
    """A topic as part of a file's name, as Spark and pyarrow read it back.

    Characters that are not ASCII stay as they are: Spark takes %XX for a character, pyarrow for a byte of UTF-8.
    """
    if not topic:
        return NULL
    text = "".join(c if c.isalnum() or c in "-_" or ord(c) > 127 else f"%{ord(c):02X}" for c in topic)
    if text == NULL:
        text = f"%5F{text[1:]}"  # Spark compares before it decodes; pyarrow needs another null_fallback
    if len(f"topic={text}".encode()) > NAME_LIMIT:
        raise OSError(errno.ENAMETOOLONG, f"topic {topic!r} makes a name of more than {NAME_LIMIT} bytes; "
                      "partition_by without topic keeps it as a column")  # fmt: skip
    return text
