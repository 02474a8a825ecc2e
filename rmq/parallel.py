# SPDX-License-Identifier: Apache-2.0
"""A function on the decoded batches of each part of a store, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rmq.config import StoreConfig
from rmq.errors import CorruptFileError
from rmq.keys import checked_int, key_list
from rmq.paths import segment_name
from rmq.pool import cores, in_processes
from rmq.splits import SPLIT_BYTES, Split, plan, time_ranges
from rmq.store import Store
from rmq.store import open as open_store
from rmq.wholerecords import Tell, teller

if TYPE_CHECKING:
    import pyarrow as pa

Answer = TypeVar("Answer")

WORTH_A_PROCESS = 1024 * 1024  # bytes of the log


@dataclass(frozen=True)
class ScanTask:
    """What one process reads: a split of a store, and how. options: of Store.scan. Picklable."""

    split: Split
    config: StoreConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self, store: Store, **more: Any) -> Iterator[pa.RecordBatch]:
        """Messages of the split's range in log order; what the log has lost since the plan, or loses before it is read,
        is damage.

        more: options of Store.scan that are this process's.
        """
        options = {**self.options, **more}
        tell = teller(options.get("on_damage", "raise"), options.get("lost")) or _fail
        begin, end, high = self.split.begin, self.split.end, store.max_phy_offset
        found = store.scan(begin_phy_offset=begin, end_phy_offset=end, **{**options, "skip_removed": False})
        low = store.min_phy_offset  # behind the scan, which has fixed by now where it begins
        _tell_gone(store, begin, min(low, end), f"was planned, by now the log begins at byte {low}", tell)
        yield from found
        if tell is _fail:  # else what a broker cut off meanwhile was told
            high = min(high, store.max_phy_offset)
        _tell_gone(store, max(high, begin), end, f"was planned, by now the log ends at byte {high}", tell)


def _tell_gone(store: Store, begin: int, end: int, reason: str, tell: Tell) -> None:
    """Tell of [begin, end) of the log, file by file."""
    size, log = store.config.mapped_file_size_commit_log, store._log
    while begin < end:
        segment, start = log.segment_at(begin), begin - begin % size
        stop = min(end, start + size)
        tell(segment.path if segment is not None else log.directories[0] / segment_name(start), begin, stop, reason)
        begin = stop


def _fail(path: Path, begin: int, end: int, reason: str) -> None:
    raise CorruptFileError(path, begin - int(path.name), reason)


def plan_scan(path: str | os.PathLike[str], *, config: StoreConfig | None = None, split_bytes: int = SPLIT_BYTES,
              min_partitions: int | None = 1, **options: Any) -> list[ScanTask]:  # fmt: skip
    """The parts of a store as it stands now, in log order; segments outside of the time range are left out.

    min_partitions: None for one on each core, as far as each is worth a process.

    options: topics, keys, begin, end, columns, batch_rows, batch_bytes, check_crc, on_damage of Store.scan, checked
    here.
    """
    split_bytes = checked_int(split_bytes, "split_bytes", least=1)
    for name in options.keys() & {"lost", "skip_removed", "begin_phy_offset", "end_phy_offset"}:
        raise TypeError(f"{name} is an option of Store.scan alone")  # a part has its own bounds, and nobody its list
    for name in ("topics", "columns"):
        if isinstance(options.get(name), Iterable) and not isinstance(options[name], str):
            options[name] = list(options[name])
    if options.get("keys") is not None:
        options["keys"] = key_list(options["keys"])
    with open_store(path, config=config) as store:
        store.scan(begin_phy_offset=0, end_phy_offset=0, **options)  # raises for what is wrong with them
        # A damaged segment tells no time: the scan leaves out what is not wanted.
        times = (None, None) if options.get("on_damage") == "skip" else (options.get("begin"), options.get("end"))
        ranges = time_ranges(store, *times)
    if min_partitions is None:
        min_partitions = min(cores(), max(1, sum(last - first for first, last in ranges) // WORTH_A_PROCESS))
    splits = plan(os.path.abspath(store.path), ranges, split_bytes=split_bytes, min_partitions=min_partitions)
    return [ScanTask(split, config, options) for split in splits]


@dataclass(frozen=True)
class _Call(Generic[Answer]):
    function: Callable[[Iterator[pa.RecordBatch]], Answer]

    def __call__(self, task: ScanTask) -> Answer:
        with open_store(task.split.path, config=task.config) as store:
            return self.function(task.batches(store))


def scan_map(path: str | os.PathLike[str], function: Callable[[Iterator[pa.RecordBatch]], Answer], *,
             processes: int | None = None, split_bytes: int = SPLIT_BYTES, config: StoreConfig | None = None,
             **options: Any) -> Iterator[Answer]:  # fmt: skip
    """function(batches) for each part of a store, on `processes` processes; its answers in the order of the log.

    batches: an iterator of the part's Arrow record batches, valid during the call. Together the parts are all that one
    `Store.scan` with the same options (topics, keys, begin, end, columns, batch_rows, batch_bytes, check_crc,
    on_damage) gives, once; with a begin or end only while the store's clock went back by no more than an hour. What was
    cleaned away before it was read, or is gone with the end of the log, is damage.
    processes: None for one on each core, fewer where there is less than 1 MiB of the log for each; one is this process,
    without any pickling, and so is any number in a worker of a multiprocessing.Pool. Else function must be importable
    and its answers picklable, and a script needs `if __name__ == "__main__":`. split_bytes: of the log for a part.
    Cost: a process starts in about 0.3 s; a part finds its first record by the queues' units, without queues by a walk
    from its segment's start.
    Raises as `rmq.open` and `Store.scan`, what function raises, ChildProcessError when a process died.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    run = in_processes(processes)
    tasks = plan_scan(path, config=config, split_bytes=split_bytes,
                      min_partitions=processes, **options)  # fmt: skip
    return run(_Call(function), tasks)
