# SPDX-License-Identifier: Apache-2.0
"""What is derived, made again on demand: sidecars."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rmq._core._sidecar import sidecar_size
from rmq.config import StoreConfig
from rmq.geometry import check_readable, require_directory, settle_config
from rmq.index import index_paths
from rmq.indexfile import IndexFile
from rmq.marks import read_meta
from rmq.paths import StorePaths, sidecar_path
from rmq.sidecar import make_sidecar


class RebuiltFile(NamedTuple):
    """size: bytes, 0 when it was not made; reason: why not."""

    path: str
    size: int
    reason: str


def rebuild_sidecars(path: str | os.PathLike[str], config: StoreConfig | None = None) -> Iterator[RebuiltFile]:
    """Make the sidecar of each full index file of a store, oldest first, whether or not it has one. Needs no lock: full
    index files do not change. Raises CorruptFileError, UnsupportedFormatError, ValueError as `rmq.open`, OSError.
    """
    require_directory(Path(path))
    asked = config or StoreConfig()
    paths = StorePaths(Path(path).absolute(), asked.store_path_commit_log)
    check_readable(paths)
    known, damaged = settle_config(paths, asked, read_meta(paths))
    slots, entries = known.max_hash_slot_num, known.max_index_num
    for index in index_paths(paths.index):
        target = str(sidecar_path(index))
        if index in damaged:
            yield RebuiltFile(target, 0, "the index file is damaged")
            continue
        with IndexFile(index, max_hash_slot_num=slots, max_index_num=entries) as file:
            if not file.is_full:
                continue
        why = make_sidecar(index, slots, entries)
        yield RebuiltFile(target, 0 if why else sidecar_size(slots, entries), why)
