# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store for tests: what is asked of it is counted, and it may answer wrongly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow import fs

import rmq
from rmq.objects import Location

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20 * 100,
                         max_hash_slot_num=100, max_index_num=250)  # fmt: skip
SECOND = 10**9
COUNT = 700


def make_store(path: Path, count: int = COUNT, size: int = 120) -> Path:
    """Messages with a key each in four queues; segments of 64 KiB, index files of 249 keys."""
    clock = iter(range(1_700_000_000_000, 2**62))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(clock)) as store:
        for number in range(count):
            store.put(rmq.Message("orders", b"%d." % number * size, keys=[f"o-{number}"], queue_id=number % 4))
    return path


def touch(path: Path, seconds: int) -> None:
    """As if the object had been written so many seconds later."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * SECOND))


class Bucket:
    """The files below a directory. asked: (name, first byte, bytes) of each read. before_read: called with a name."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str], None] = lambda name: None
        self.location = Location("test://bucket", cache_directory=str(cache))

    def connect(self, location: Location) -> tuple[Any, str]:
        """Takes the place of Location.connect. Paths below the root's follow the URI."""
        return fs.PyFileSystem(_Handler(self)), str(self.root) + location.uri.removeprefix("test://bucket")

    def asked_of(self, name: str) -> int:
        """Bytes that were read of objects whose names begin so."""
        return sum(size for asked, _, size in self.asked if asked.startswith(name))


class _Handler(fs.FileSystemHandler):
    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._local = bucket, fs.LocalFileSystem()

    def get_type_name(self) -> str:
        return "test"

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._local.get_file_info(selector)

    def open_input_file(self, path: str) -> Any:
        import pyarrow as pa

        return pa.PythonFile(_Object(self._bucket, path), mode="r")

    def _refused(self, *_: object, **__: object) -> Any:
        raise PermissionError("read only")

    create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _refused
    copy_file = move = open_append_stream = open_output_stream = normalize_path = open_input_stream = _refused


class _Object:
    """A file for PythonFile: whoever reads is written down."""

    def __init__(self, bucket: Bucket, path: str) -> None:
        self._bucket, self._file = bucket, open(path, "rb")  # noqa: SIM115
        self._name = os.path.relpath(path, bucket.root)

    def read(self, size: int = -1) -> bytes:
        self._bucket.before_read(self._name)
        begin = self._file.tell()
        data = self._file.read(size)
        self._bucket.asked.append((self._name, begin, len(data)))
        return data

    def seek(self, *arguments: int) -> int:
        return self._file.seek(*arguments)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True
