# SPDX-License-Identifier: Apache-2.0
"""What the reading methods of a Store stand on: its parts, their ends, and that it is open. The same for every mode."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rmq._core._mapguard import lost_pages
from rmq.commitlog import CommitLog
from rmq.config import StoreConfig
from rmq.errors import CorruptFileError, RmqError, StoreClosedError, UnsupportedFormatError
from rmq.index import Durable, Index
from rmq.legacy import LegacyKeys
from rmq.paths import StorePaths
from rmq.query import raise_with_file
from rmq.queueset import QueueSet

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def while_open(method: Callable[_Arguments, _Answer], *, asks_again: bool = True) -> Callable[_Arguments, _Answer]:
    """Of an open store only. When another thread closes it meanwhile, what that does to the parts is no other error and
    no answer; when pages of its files were gone, CorruptFileError in place of what was made of them. asks_again: where
    damage turns out to be what a broker cut off meanwhile, the answer is another one.
    """

    @wraps(method)
    def checked(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        store: OpenStore = arguments[0]  # type: ignore[assignment]
        store._check_open()
        lost = lost_pages()
        try:
            try:
                try:
                    answer = method(*arguments, **options)
                except CorruptFileError as error:
                    if not asks_again or not store._was_cut_off(error):
                        raise
                    answer = method(*arguments, **options)
            finally:
                if lost_pages() and not store.closed:
                    store._check_maps(lost)
            store._check_open()
            return answer
        except (ValueError, OSError, RmqError) as error:
            store._check_open()
            raise_with_file(store._log, error)
            raise

    return checked


def listing(method: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Iterators among the arguments as lists: an answer that is asked again wants them again."""
    def kept(argument: Any) -> Any:
        return list(argument) if hasattr(type(argument), "__next__") else argument

    @wraps(method)
    def listed(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        return method(*map(kept, arguments), **{name: kept(value) for name, value in options.items()})

    return listed


class OpenStore(ABC):
    """The parts of a store that a subclass has opened, and how far each goes for this answer. Thread-safe."""

    path: Path
    mode: str
    config: StoreConfig
    _paths: StorePaths
    _log: CommitLog
    _queues: QueueSet
    _index: Index
    _closed: bool
    _pid: int
    _foreign_queues: UnsupportedFormatError | None
    _foreign_index: UnsupportedFormatError | None
    _legacy: LegacyKeys

    @abstractmethod
    def _log_end(self) -> int:
        """End of the log for this answer."""

    @abstractmethod
    def _derive(self) -> QueueSet:
        """The queues, level with the log."""

    @abstractmethod
    def _derived_end(self) -> int:
        """End of the log that the queues were brought level with, or a later one."""

    @abstractmethod
    def _uncovered(self) -> tuple[int, list[tuple[int, int]], Durable | None]:
        """End of the log, the ranges of it that the index does not cover, and what of a crashed one counts."""

    @abstractmethod
    def _follow_index(self) -> None:
        """See the index files as they are now; a writing store's are level with the log, or OSError (disk full)."""

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path}: store is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self.path}: store was opened by the parent process; open it again by its path")

    @abstractmethod
    def _was_cut_off(self, error: CorruptFileError) -> bool:
        """Whether the log ends before the damage by now: a broker had cut it there, and the answer is another."""

    @abstractmethod
    def _writer_now(self) -> object:
        """What differs when another process began to write; None when this one writes."""

    def _check_maps(self, since: int) -> None:
        self._log.check(since)
        self._index.check()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    @while_open
    def min_phy_offset(self) -> int:
        """First byte of the log that is still there; 0 for an empty log."""
        self._log_end()
        return self._log.min_phy_offset

    @property
    @while_open
    def max_phy_offset(self) -> int:
        """End of the last whole record: where the next one goes."""
        return self._log_end()

    def _check_queues(self) -> None:
        if self._foreign_queues is not None:
            raise copy.copy(self._foreign_queues)  # itself it would keep the frames of each caller

    def _check_index(self) -> None:
        if self._foreign_index is not None:
            raise copy.copy(self._foreign_index)

    def _while_open(self, batches: Iterator[_Answer], *, ends_at_cut: bool = True) -> Iterator[_Answer]:
        """ends_at_cut: batches are in the log's order, and end where a broker has cut it meanwhile: else it is told."""
        def following(store: OpenStore) -> _Answer | None:
            try:
                return next(batches, None)
            except CorruptFileError as error:  # the batches are at their end by it: nothing can be asked again
                is_of_log = error.path in {str(segment.path) for segment in store._log.segments}
                if not (ends_at_cut and is_of_log and store._was_cut_off(error)):
                    raise
                return None

        guarded = while_open(following, asks_again=False)
        while (batch := guarded(self)) is not None:
            yield batch

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"a Store cannot be pickled: pass its path {str(self.path)!r} and open it there")
