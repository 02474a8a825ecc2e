# SPDX-License-Identifier: Apache-2.0
"""Files of config/ as a broker keeps them: one JSON object each, with what is not understood kept.

Source: RocketMQ ConfigManager, RemotingSerializable; its fastjson writes integer keys without quotes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from rmq.segment import LOOKS, file_size, make_directory, read_file, write_atomically

_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([{,]\s*)(-?\d+)(\s*:)')  # possessive: no turn is kept
CONFIG_LIMIT = 64 * 1024 * 1024  # bytes of one file


def parse_fastjson(text: str) -> Any:
    """JSON in which integer keys may stand without quotes. ValueError or RecursionError when it is none."""
    def quoted(match: re.Match[str]) -> str:
        return f'{match[1]}"{match[2]}"{match[3]}' if match[2] else match[0]

    return json.loads(_TOKEN.sub(quoted, text))


def read_document(path: Path, table: str) -> dict[str, Any]:
    """A file's object, which has or gets a member `table` that is one, too. Raises OSError, CorruptFileError (size),
    ValueError, RecursionError.
    """
    data = read_file(path, CONFIG_LIMIT)
    for _ in range(LOOKS):
        before, data = data, read_file(path, CONFIG_LIMIT)
        if data == before:
            break  # else a broker is at it, which writes in place
    document = parse_fastjson(data.decode())
    if not isinstance(document, dict) or not isinstance(document.setdefault(table, {}), dict):
        raise ValueError(f"no object with a {table}")
    return document


def with_backup(path: Path) -> list[Path]:
    """The files that a broker would read, one after the other: the file and its .bak, but for those that are empty or
    not there. Source: ConfigManager#load.
    """
    files = (path, path.with_name(path.name + ".bak"))
    return [file for file in files if file_size(file) or not (file.is_file() or not os.path.lexists(file))]


def count_on(document: dict[str, Any]) -> None:
    """A change of its content is about to be written."""
    version = document.setdefault("dataVersion", {"counter": 0, "stateVersion": 0, "timestamp": 0})
    if isinstance(version, dict) and isinstance(version.get("counter"), int):
        version["counter"] += 1
        version["timestamp"] = time.time_ns() // 1_000_000


def write_document(path: Path, document: dict[str, Any]) -> bytes:
    """Replace a file durably; what it holds then. Raises OSError; EFBIG or RecursionError before it writes."""
    data = document_bytes(document)
    if len(data) > CONFIG_LIMIT:
        raise OSError(errno.EFBIG, f"would have {len(data)} bytes, at most {CONFIG_LIMIT} are read", str(path))
    make_directory(path.parent)
    write_atomically(path, data, keeps_mode=True)  # a broker's, which may run as another user
    return data


def document_bytes(document: dict[str, Any]) -> bytes:
    """Pretty JSON in UTF-8; in ASCII when a text has lone surrogates, which UTF-8 cannot hold."""
    try:
        return (json.dumps(document, indent="\t", ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(document, indent="\t") + "\n").encode()
