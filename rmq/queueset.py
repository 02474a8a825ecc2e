# SPDX-License-Identifier: Apache-2.0
"""The consume queues of a store. Source: RocketMQ ConsumeQueueStore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from pathlib import Path

from rmq.batchconsumequeue import Tails
from rmq.consumequeue import ConsumeQueue
from rmq.errors import CorruptFileError
from rmq.filecache import FileCache
from rmq.paths import is_queue_id, queue_directories, queue_directory, topic_of
from rmq.segment import LOOKS, NO_DIRECTORY, sync_directory

ADVICE = "`rmq rebuild` makes the queues again"


class QueueSet:
    """The consume queues of a store, made when first needed. Keys: (topic, queue id)."""

    def __init__(self, directory: Path, segment_size: int, *, writable: bool, is_exact: bool) -> None:
        self.directory = directory
        self.is_exact = is_exact
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self.cache = FileCache(writable)
        self._segment_size = segment_size
        self._writable = writable
        self._leaving: set[tuple[str, int]] = set()
        self._memory_only: set[tuple[str, int]] = set()
        self.touched: set[ConsumeQueue] = set()  # that got or lost units since these were last seen to
        self.damage: dict[tuple[str, int], CorruptFileError] = {}  # for readers: queues whose files are damaged
        self.batch_tails: Tails = {}  # for readers
        self.trusted: int | None = None  # for readers, as of ConsumeQueue
        self.bridges_gaps = self.judges_files = False  # as of ConsumeQueue

    def load(self) -> None:
        """Open every queue that has a directory. Source: ConsumeQueueStore#load.

        A reader leaves out those whose files are damaged, and says so in `damage`: the log needs no queue.
        """
        known = dict(self.queues)
        for attempt in range(LOOKS, 0, -1):
            before = self._identity()
            self.damage = {}
            try:
                self._load()
                if self._writable or self._identity() == before:
                    return
            except FileNotFoundError:
                if self._writable or attempt == 1:
                    raise
            if attempt > 1:  # a rebuild has put another directory here, or a topic was removed
                self.queues = dict(known)

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self.directory.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _load(self) -> None:
        for _, topic, queue_id in queue_directories(self.directory):
            try:
                self.open(topic, queue_id)
            except CorruptFileError as error:
                self.refuse((topic, queue_id), error)
        if self.is_exact:
            return  # the manifest tells what is lost
        for path in self.directory.glob("*/*"):
            topic_name = topic_of(path.parent.name)
            if topic_name is not None and is_queue_id(path.name) and not path.is_dir():
                self.refuse((topic_name, int(path.name)), CorruptFileError(path, 0, NO_DIRECTORY))

    def refuse(self, key: tuple[str, int], error: CorruptFileError) -> None:
        """A queue whose files are damaged is an error to writers; readers go on without it, and check tells."""
        if self._writable:
            raise CorruptFileError(error.path, error.offset, f"{error.reason}; {ADVICE}")
        self.damage[key] = error
        self.queues.pop(key, None)

    def check(self) -> None:
        """For readers: CorruptFileError when queues are left out."""
        for error in self.damage.values():
            raise CorruptFileError(error.path, error.offset,
                                   f"{error.reason}; what needs no queues can be read, {ADVICE}")  # fmt: skip

    def end_phy_offset(self) -> int:
        """Behind the last record that a queue ends with; 0 without one."""
        return max((queue.end_phy_offset() for queue in self.queues.values()), default=0)

    def last_phy_offset(self) -> int:
        """Of the last record that a queue ends with; 0 without one. It may have units in other queues, too, which a
        broker makes after the one in its own.
        """
        return max((queue.phy_offset_below(queue.max_offset) for queue in self.queues.values()), default=0)

    def in_files(self, tell: Callable[[QueueSet], int] = end_phy_offset) -> int:
        """For readers: what end_phy_offset or last_phy_offset tells of the files as they are by now."""
        with closing(QueueSet(self.directory, self._segment_size, writable=False, is_exact=self.is_exact)) as fresh:
            fresh.bridges_gaps = self.bridges_gaps
            fresh.load()
            return tell(fresh)

    def drop_tails(self, limit: int, in_files: Callable[[], int]) -> None:
        """For readers: of more bytes of units in memory than the limit leave half of it, the longest queues first.

        in_files: tells below which phy offset all records have their units in files by now; only these go, and none of
        derive_anew.
        """
        tails = sorted((queue for key, queue in self.queues.items() if key not in self._memory_only),
                       key=lambda queue: -queue.tail_size)  # fmt: skip
        total = sum(queue.tail_size for queue in tails)
        if total <= limit:
            return
        derived = in_files()
        for queue in tails:
            if total <= limit // 2:
                return
            total -= queue.tail_size
            queue.follow_files(derived)
            total += queue.tail_size

    def to_read(self, trusted: int, cache: FileCache) -> QueueSet:
        """Another set of the queues, for reading: units in files count as `trusted` says, others are added in memory.

        cache: by which they are read; several sets may share it. CorruptFileError while files of one are damaged.
        """
        fresh = QueueSet(self.directory, self._segment_size, writable=False, is_exact=self.is_exact)
        fresh.cache, fresh.trusted = cache, trusted
        fresh.load()
        fresh.check()
        return fresh

    def as_it_is(self) -> QueueSet:
        """The same queues, those that are known now, whatever `forget` does meanwhile."""
        found = QueueSet.__new__(QueueSet)
        vars(found).update(vars(self))
        return found

    def forget(self) -> None:
        """For readers: no queue is known and no file is open, until they are loaded again."""
        for queue in self.queues.values():
            for path in queue.files.first():
                self.cache.forget(path)
        self.queues, self.damage, self._memory_only, self.batch_tails = {}, {}, set(), {}

    def drop(self, removed: Collection[ConsumeQueue]) -> None:
        """For readers: a cleaning removed these queues; who is at one finds it empty."""
        for queue in removed:
            queue.forget_files()
        gone = {queue for queue in removed if not queue.directory.exists()}
        self.queues = {key: queue for key, queue in self.queues.items() if queue not in gone}

    def derive_anew(self, key: tuple[str, int]) -> None:
        """For readers: a queue is empty, to be derived in memory: its files do not count."""
        self.open(*key).forget_files()
        self._memory_only.add(key)

    def follow_files(self, phy_offset: int, min_phy_offset: int, *, is_whole: bool) -> bool:
        """For readers: ConsumeQueue.follow_files of all queues but those of derive_anew; is_whole: a recovery has made
        their files right. Returns whether some go on in memory, which need the messages before phy_offset, too.
        """
        if is_whole:
            self._memory_only = set()
        self.load()
        for key, queue in self.queues.items():
            if key not in self._memory_only:
                queue.follow_files(phy_offset, min_phy_offset)
        return bool(self._memory_only)

    def open(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, opened or (in memory) made when there is none. The topic must be a directory name."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            directory = queue_directory(self.directory, topic, queue_id)
            queue = ConsumeQueue(directory, topic, queue_id, self._segment_size, self.cache,
                                 writable=self._writable, is_exact=self.is_exact, trusted=self.trusted,
                                 bridges_gap=self.bridges_gaps, judges_files=self.judges_files)  # fmt: skip
            self.queues[(topic, queue_id)] = queue
        return queue

    def extents(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(first queue offset in the files, next queue offset) of each queue whose files stay."""
        return {key: (queue.first_offset, queue.max_offset) for key, queue in self.queues.items()
                if queue.max_offset and key not in self._leaving}  # fmt: skip

    def correct_min_offsets(self, min_phy_offset: int) -> int:
        """Each queue begins with its first message in the log, which begins at a phy offset; that is returned."""
        for queue in list(self.queues.values()):
            queue.correct_min_offset(min_phy_offset)
        return min_phy_offset

    def leave(self, *keys: tuple[str, int]) -> None:
        """The files of these are about to go, those of no others: no manifest may say that they must be there."""
        self._leaving = set(keys)
        self.cache.changes += 1

    def end_at_gaps(self, *, is_derived_again: bool) -> None:
        """Queues of which files are missing end in front of these, or are empty when all their units come again."""
        for queue in self.queues.values():
            if queue.files.not_its_own:
                queue.end_at_gap(0 if is_derived_again else queue.max_offset)
                self.touch(queue)

    def touch(self, queue: ConsumeQueue) -> None:
        self.touched.add(queue)

    def take_dirty(self, into: set[Path]) -> None:
        """Move the names of files written since the last call, and of directories with new names, to a set for sync."""
        for queue in self.touched:
            queue.files.take_dirty(into)
        self.touched = set()

    def sync(self, paths: Iterable[Path]) -> None:
        """Make files and directories durable: files before the directories that name them, in a queue's order."""
        ordered = sorted(paths, key=lambda path: (-len(path.parts), path))
        directories = [path for path in ordered if path.is_dir()]
        named = set(directories)
        self.cache.sync_all([path for path in ordered if path not in named])
        for path in directories:
            sync_directory(path)

    def close(self) -> None:
        self.cache.close()
