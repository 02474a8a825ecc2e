# SPDX-License-Identifier: Apache-2.0
"""Files of an object store, through pyarrow.fs: what there is, ranges of bytes. An object that changes is an error."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from rmq.errors import RmqError
from rmq.paths import is_elsewhere
from rmq.segment import write_fully

CACHE_BYTES = 10 * 1024**3
REQUEST_BYTES = 8 * 1024 * 1024  # a longer range is fetched in parts, several at a time
REQUESTS = 8
OPEN_OBJECTS = 16
SMALL_BYTES = 64 * 1024 * 1024  # of an object that is read into memory
CONNECT_SECONDS, REQUEST_SECONDS = 10, 60
MARKS = 0xA5, 0x5A  # of the last byte of a buffer that nothing has filled
S3 = ("s3", "s3a", "s3n")
REGIONS, ENDPOINTS = ("AWS_REGION", "AWS_DEFAULT_REGION"), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
SETTINGS = {"endpoint": "", "region": "", "anonymous": "false", "cacheDirectory": "", "cacheBytes": str(CACHE_BYTES)}
NO_CREDENTIALS = ("credentials are not taken from paths and options, which are shown in plans and logs: give the hosts "
                  "a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for driver and executors")  # fmt: skip


def is_secret(setting: str) -> bool:
    """Whether a setting by its name is a credential."""
    return re.search("key|secret|token|credential|password|signature", setting, re.IGNORECASE) is not None


class ObjectStoreError(RmqError):
    """What an object store did not give, or not any more. uri: which object; reason: what is wrong."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(uri, reason)
        self.uri = uri
        self.reason = reason

    def __str__(self) -> str:
        return f"host {socket.gethostname()}: {self.uri}: {self.reason}"


class ObjectChangedError(ObjectStoreError):
    """An object was removed or replaced since its store was listed."""


class ObjectRemovedError(ObjectChangedError):
    """An object is not there any more."""


@dataclass(frozen=True)
class Location:
    """Where a store lies, and how its files are reached. Picklable; holds no secret."""

    uri: str
    endpoint: str = ""
    region: str = ""
    anonymous: bool = False
    cache_directory: str = ""
    cache_bytes: int = CACHE_BYTES

    @classmethod
    def parse(cls, text: str, settings: Mapping[str, str] | None = None) -> Location:
        """A URI; SETTINGS may stand behind its `?` or in settings. ValueError names what is wrong."""
        parts = urlsplit(text)
        asked = dict(parse_qsl(parts.query, keep_blank_values=True)) | dict(settings or {})
        user = parts.netloc.rpartition("@")[0]  # of abfs:// a container
        endpoint = asked.get("endpoint", "")
        if (user and parts.scheme in S3) or ":" in user or "@" in endpoint or any(map(is_secret, asked)):
            raise ValueError(f"{parts.scheme}://...: {NO_CREDENTIALS}")
        unknown = sorted(set(asked) - set(SETTINGS))
        if unknown or parts.fragment:
            raise ValueError(f"{text.partition('?')[0]}: no setting {', '.join(unknown) or '#'}; there are "
                             f"{', '.join(SETTINGS)}")  # fmt: skip
        values = SETTINGS | asked
        if values["anonymous"] not in ("true", "false"):
            raise ValueError(f"fs.anonymous: {values['anonymous']!r} is none of true, false")
        if not values["cacheBytes"].isascii() or not values["cacheBytes"].isdigit():
            raise ValueError(f"fs.cacheBytes: {values['cacheBytes']!r} is no number of bytes")
        scheme = "s3" if parts.scheme in S3 else parts.scheme
        s3_only = [name for name in ("endpoint", "region", "anonymous") if name in asked]
        if scheme != "s3" and s3_only:
            raise ValueError(f"{text.partition('?')[0]}: fs.{s3_only[0]} is for s3:// only")
        if scheme == "s3" and not parts.netloc:
            raise ValueError(f"{text.partition('?')[0]} names no bucket: s3://bucket/path")
        return cls(f"{scheme}://{parts.netloc}{unquote(parts.path).rstrip('/')}", values["endpoint"], values["region"],
                   values["anonymous"] == "true", values["cacheDirectory"], int(values["cacheBytes"]))  # fmt: skip

    def connect(self) -> tuple[Any, str]:
        """pyarrow's file system, and the root's path in it."""
        from pyarrow import fs

        if not self.uri.startswith("s3://"):
            found: tuple[Any, str] = fs.FileSystem.from_uri(quote(self.uri, safe=":/@"))
            return found
        path = self.uri.removeprefix("s3://")
        options: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS}
        if self.endpoint:
            scheme, _, address = self.endpoint.rpartition("://")
            options |= {"endpoint_override": address, "scheme": scheme or "https"}
        region = self.region or next(filter(None, map(os.environ.get, REGIONS)), None)
        if region is None and not self.endpoint and not any(map(os.environ.get, ENDPOINTS)):
            region = fs.resolve_s3_region(path.partition("/")[0])
        return fs.S3FileSystem(anonymous=self.anonymous, region=region or "us-east-1", **options), path


@dataclass(frozen=True)
class Listed:
    """One object as it was listed. name: below the root."""

    name: str
    size: int
    mtime_ns: int


def refuse_elsewhere(path: str) -> None:
    """ValueError for an object store's path, which shows no credentials of it: nothing is written there."""
    if is_elsewhere(path):
        Location.parse(path)
        raise ValueError(f"{path}: stores on object stores are read only; write to a mounted disk")


class Objects:
    """The objects below a location. Thread-safe. requests, bytes_read: so far."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.requests = self.bytes_read = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(REQUESTS, "rmq-fetch")
        self._connected: tuple[Any, str] | None = None
        self._sources: dict[str, Any] = {}

    def uri(self, name: str) -> str:
        return f"{self.location.uri}/{name}" if name else self.location.uri

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[tuple[Any, str]]:
        """The file system and an object's path; what goes wrong is an ObjectStoreError."""
        try:
            with self._lock:
                self.requests += 1
                if self._connected is None:
                    self._connected = self.location.connect()
            system, root = self._connected
            yield system, f"{root}/{name}" if name else root
        except FileNotFoundError:
            raise ObjectRemovedError(self.uri(name), "is not there, or was removed since it was listed") from None
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are of these
            raise ObjectStoreError(self.uri(name), str(error)) from error

    def listing(self) -> list[Listed]:
        """All objects, by name."""
        from pyarrow import fs

        with self._told("") as (system, root):
            try:
                found = system.get_file_info(fs.FileSelector(root, recursive=True))
            except FileNotFoundError:
                found = []
            return sorted((Listed(info.path[len(root) + 1 :], info.size, info.mtime_ns or 0)
                           for info in found if info.type == fs.FileType.File), key=lambda item: item.name)  # fmt: skip

    def check(self, listed: Listed) -> None:
        """ObjectChangedError when an object is not the one that was listed."""
        with self._told(listed.name) as (system, path):
            info = system.get_file_info(path)
            # A listing tells the time more exactly than a look at one object.
            if info.size != listed.size or (info.mtime_ns or 0) // 10**9 != listed.mtime_ns // 10**9:
                raise FileNotFoundError(path) if info.size is None else _changed(self.uri(listed.name))

    def fetch(self, listed: Listed, ranges: list[tuple[int, int]], descriptor: int) -> None:
        """Ranges of bytes of an object into a file, at the same positions. Memory: REQUESTS * REQUEST_BYTES.

        Raises ObjectStoreError, and OSError of the disk.
        """
        parts = [(at, min(at + REQUEST_BYTES, end)) for begin, end in ranges for at in range(begin, end, REQUEST_BYTES)]
        if not parts:
            return
        source = self._source(listed)

        def one(part: tuple[int, int]) -> None:
            write_fully(descriptor, memoryview(self._range(listed, source, *part)), part[0])

        if len(parts) == 1:
            one(parts[0])
        else:
            running = [self._pool.submit(one, part) for part in parts]
            try:
                for future in running:
                    future.result()
            finally:  # whoever closes the descriptor next must be the last to use it
                for future in running:
                    future.cancel()
                wait(running)
        self.check(listed)

    def _range(self, listed: Listed, source: Any, begin: int, end: int) -> bytearray:
        """Bytes of an open object."""
        data = bytearray(end - begin)
        try:
            with self._told(listed.name):
                if data and not _is_filled(data, source, begin):
                    raise OSError(f"bytes {begin} to {end} were asked for, fewer came")
        except ObjectStoreError:
            self.check(listed)  # tells when it is because the object is another one now, or gone
            raise
        with self._lock:
            self.bytes_read += len(data)
        return data

    def _source(self, listed: Listed) -> Any:
        """An open object: to open one is a request."""
        source = self._sources.get(listed.name)
        if source is None:
            with self._told(listed.name) as (system, path):
                source = system.open_input_file(path)
                if source.size() != listed.size:
                    raise _changed(self.uri(listed.name))
            with self._lock:
                if len(self._sources) >= OPEN_OBJECTS:
                    self._sources.clear()
                self._sources[listed.name] = source
        return source

    def read_all(self, listed: Iterable[Listed]) -> list[bytes]:
        """The bytes of small objects, several at a time."""
        return list(self._pool.map(self._read, listed))

    def _read(self, listed: Listed) -> bytes:
        if listed.size > SMALL_BYTES:
            raise ObjectStoreError(self.uri(listed.name), f"has {listed.size} bytes, at most {SMALL_BYTES} make sense")
        with self._told(listed.name) as (system, path), system.open_input_file(path) as source:
            data = bytes(self._range(listed, source, 0, listed.size))
        self.check(listed)
        return data

    def close(self) -> None:
        self._pool.shutdown()
        self._sources.clear()


def _is_filled(data: bytearray, source: Any, begin: int) -> bool:
    """Read an object's bytes from `begin` on; whether as many came. pyarrow's S3 counts those that were asked for."""
    for mark in MARKS:  # the object's own byte may be one of them, not both
        data[-1] = mark
        if source.get_stream(begin, len(data)).readinto(data) != len(data):
            return False
        if data[-1] != mark:
            return True
    return False


def _changed(uri: str) -> ObjectChangedError:
    return ObjectChangedError(uri, "was replaced since it was listed: load the store again")
