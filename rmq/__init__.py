# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ's message store: the same files, byte for byte, written, read and queried from Python.

Names are loaded when first used: `import rmq` alone costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rmq.version import __version__

if TYPE_CHECKING:
    from rmq._core._javahash import index_key_hash, java_hash
    from rmq._core._message import Message
    from rmq.config import StoreConfig
    from rmq.errors import (
        CorruptFileError,
        IllegalMessageError,
        MessageTooLargeError,
        RmqError,
        StoreClosedError,
        StoreLockedError,
        StoreReadOnlyError,
        UnsupportedFormatError,
    )
    from rmq.exporting import ExportedFile, ExportResult, export
    from rmq.groups import Consumer
    from rmq.indexfile import MAX_TIMESTAMP, IndexFile
    from rmq.info import StoreInfo
    from rmq.message import (
        PullResult,
        PullStatus,
        PutResult,
        PutResults,
        StoredMessage,
        parse_offset_msg_id,
        parse_uniq_key,
    )
    from rmq.parallel import scan_map
    from rmq.query import QueryManyResult, QueryResult
    from rmq.rebuilding import RebuildResult, rebuild
    from rmq.retention import CleanResult, RemovedFile
    from rmq.store import Store, open
    from rmq.verification.findings import Finding, VerifyResult
    from rmq.verification.verify import verify
    from rmq.wholerecords import LostRange

__all__ = [
    "MAX_TIMESTAMP",
    "CleanResult",
    "Consumer",
    "CorruptFileError",
    "ExportResult",
    "ExportedFile",
    "Finding",
    "IllegalMessageError",
    "IndexFile",
    "LostRange",
    "Message",
    "MessageTooLargeError",
    "PullResult",
    "PullStatus",
    "PutResult",
    "PutResults",
    "QueryManyResult",
    "QueryResult",
    "RebuildResult",
    "RemovedFile",
    "RmqError",
    "Store",
    "StoreClosedError",
    "StoreConfig",
    "StoreInfo",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoredMessage",
    "UnsupportedFormatError",
    "VerifyResult",
    "__version__",
    "export",
    "index_key_hash",
    "java_hash",
    "open",
    "parse_offset_msg_id",
    "parse_uniq_key",
    "rebuild",
    "scan_map",
    "verify",
]

_HOMES = {
    "rmq._core._javahash": ("index_key_hash", "java_hash"),
    "rmq._core._message": ("Message",),
    "rmq.config": ("StoreConfig",),
    "rmq.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "rmq.exporting": ("ExportResult", "ExportedFile", "export"),
    "rmq.groups": ("Consumer",),
    "rmq.indexfile": ("MAX_TIMESTAMP", "IndexFile"),
    "rmq.info": ("StoreInfo",),
    "rmq.message": ("PullResult", "PullStatus", "PutResult", "PutResults", "StoredMessage", "parse_offset_msg_id",
                    "parse_uniq_key"),
    "rmq.parallel": ("scan_map",),
    "rmq.query": ("QueryManyResult", "QueryResult"),
    "rmq.rebuilding": ("RebuildResult", "rebuild"),
    "rmq.retention": ("CleanResult", "RemovedFile"),
    "rmq.store": ("Store", "open"),
    "rmq.verification.findings": ("Finding", "VerifyResult"),
    "rmq.verification.verify": ("verify",),
    "rmq.wholerecords": ("LostRange",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'rmq' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
