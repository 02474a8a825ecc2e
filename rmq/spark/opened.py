# SPDX-License-Identifier: Apache-2.0
"""Stores that a Python worker of Spark has open: read only, opened once, used by all its tasks."""

from __future__ import annotations

import os
import socket
import threading
from collections import OrderedDict

from rmq.config import StoreConfig
from rmq.errors import RmqError
from rmq.store import Store
from rmq.store import open as open_store
from rmq.version import __version__

LIMIT = 16  # stores of a worker; the one not used for longest is closed

Identity = tuple[int, int, int]

_lock = threading.Lock()
_stores: OrderedDict[tuple[str, StoreConfig | None], tuple[Identity, Store]] = OrderedDict()


class ExecutorError(RmqError):
    """What a task cannot do on its host: host, path and reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"host {socket.gethostname()}: {self.path}: {self.reason}"


def check_version(planned_by: str, path: str) -> None:
    """ExecutorError when the driver's rmq, whose plan this is, is not the executor's."""
    if planned_by != __version__:
        raise ExecutorError(path, f"rmq {__version__} is installed here, the driver has {planned_by}")


def opened(path: str, config: StoreConfig | None = None) -> Store:
    """The store, open for reading. Another store at the same path is opened anew; ExecutorError when there is none."""
    key = path, config
    with _lock:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ExecutorError(path, f"no store is to be read here: {error.strerror}; "
                                "all executors and the driver need it at this path") from None  # fmt: skip
        identity = os.getpid(), found.st_dev, found.st_ino
        if key in _stores:
            known, store = _stores[key]
            if known == identity and not store.closed:
                _stores.move_to_end(key)
                return store
            _close(key)
        try:
            store = open_store(path, config=config)
        except OSError as error:
            raise ExecutorError(path, f"cannot be opened: {_advice(error)}") from error
        _stores[key] = identity, store
        while len(_stores) > LIMIT:
            _close(next(iter(_stores)))
        return store


def forget(path: str) -> None:
    """Open it anew next time, for after an error: files may have been replaced below a store that is open."""
    with _lock:
        for key in [key for key in _stores if key[0] == path]:
            _close(key)


def _close(key: tuple[str, StoreConfig | None]) -> None:
    (pid, _, _), store = _stores.pop(key)
    if pid == os.getpid():
        store.close()


def _advice(error: OSError) -> str:
    reason = error.strerror or str(error)
    if isinstance(error, MemoryError) or error.errno == 12:  # ENOMEM of a map
        reason += "; spark.executor.pyspark.memory limits the address space: leave it unset, or at 4g and more"
    return reason
