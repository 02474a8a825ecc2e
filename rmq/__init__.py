# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ's message store: the same files, byte for byte, written, read and queried from Python."""

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
from rmq.index import MAX_TIMESTAMP, IndexFile
from rmq.message import (
    PullResult,
    PullStatus,
    PutResult,
    PutResults,
    StoredMessage,
    parse_offset_msg_id,
    parse_uniq_key,
)
from rmq.query import QueryManyResult, QueryResult
from rmq.store import Store
from rmq.store import open_store as open

__version__ = "0.1.0"

__all__ = [
    "MAX_TIMESTAMP",
    "CorruptFileError",
    "IllegalMessageError",
    "IndexFile",
    "Message",
    "MessageTooLargeError",
    "PullResult",
    "PullStatus",
    "PutResult",
    "PutResults",
    "QueryManyResult",
    "QueryResult",
    "RmqError",
    "Store",
    "StoreClosedError",
    "StoreConfig",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoredMessage",
    "UnsupportedFormatError",
    "index_key_hash",
    "java_hash",
    "open",
    "parse_offset_msg_id",
    "parse_uniq_key",
]
