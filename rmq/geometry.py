# SPDX-License-Identifier: Apache-2.0
"""What the files say of sizes: those of segments, the geometry of the index."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rmq._core import _layout as L
from rmq._core._indexfile import IndexFileView, index_file_size
from rmq._core._indexfit import geometry_candidates
from rmq.config import CRC_SINCE, StoreConfig
from rmq.errors import CorruptFileError
from rmq.index import index_paths
from rmq.lock import lock_holder
from rmq.mappedfile import MappedFile
from rmq.marks import is_ours
from rmq.paths import StorePaths
from rmq.segment import directories_in, file_size, segments_in

GEOMETRY = ("mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num",
            "max_index_num")  # fmt: skip
KEPT = (*GEOMETRY, "rocketmq_version", "enabled_append_prop_crc")


def settle_config(paths: StorePaths, config: StoreConfig, meta: dict[str, Any] | None, *,
                  tolerant: bool = False) -> tuple[StoreConfig, frozenset[Path]]:  # fmt: skip
    """The config with the geometry of the files, and the index files that do not fit it: their lengths, and when no
    meta.json tells the geometry their entries, slots and links. ValueError when a field that was passed contradicts
    the files.

    tolerant: what leaves the geometry in doubt is passed over as far as it can be, not a CorruptFileError.
    """
    damaged: list[Path] = []
    try:
        known = kept_values(paths, meta)
    except CorruptFileError:
        if not tolerant:
            raise
        known = {}
    if not known:
        known, damaged = _geometry_of_files(paths, config, tolerant)
    is_own = is_ours(meta)  # a broker may have been of another release
    known |= changed_by_broker(paths, config, meta, tolerant)
    for name, value in known.items():
        if config.is_explicit(name) and getattr(config, name) != value:
            if name == "enabled_append_prop_crc" or (name == "rocketmq_version" and not is_own):
                known[name] = getattr(config, name)  # the same files may be written on in another way
                continue
            raise ValueError(f"{name}={getattr(config, name)} contradicts the store, which has {value}")
    if config.is_explicit("rocketmq_version") and config.version < CRC_SINCE:
        known.pop("enabled_append_prop_crc", None)  # of a broker's store, by a later release
    config = dataclasses.replace(config, **known)
    if "max_index_num" in known:
        damaged += _of_another_length(paths.index, index_file_size(config.max_hash_slot_num, config.max_index_num))
    return config, frozenset(damaged)


def kept_values(paths: StorePaths, meta: dict[str, Any] | None) -> dict[str, Any]:
    """What meta.json tells of the configuration. CorruptFileError for what none can be."""
    known: dict[str, Any] = {name: meta[name] for name in KEPT if name in meta} if meta else {}
    try:
        StoreConfig(**known)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(paths.meta, 0, f"meta.json: {error}") from None
    return known


def changed_by_broker(paths: StorePaths, config: StoreConfig, meta: dict[str, Any] | None,
                      tolerant: bool) -> dict[str, Any]:  # fmt: skip
    """Sizes of a broker's queues and index, which it derived again since meta.json was written: no file has the old
    one, and several that follow each other have one other, or one has that the caller passes.
    """
    known: dict[str, Any] = {}
    with contextlib.suppress(CorruptFileError):  # of a broken meta.json: who asks for what it says is told
        known = {} if is_ours(meta) else kept_values(paths, meta)
    if not known:
        return {}
    name = "mapped_file_size_consume_queue"
    queues = (queue for topic in directories_in(paths.consume_queue) for queue in directories_in(topic))
    changed: dict[str, Any] = {}
    size, starts = _other_size(known.get(name, 0), segments_in(queues))
    is_passed = config.is_explicit(name) and getattr(config, name) == size
    if size and size % L.UNIT_SIZE == 0 and (is_passed or any(start + size in starts for start in starts)):
        changed[name] = size
    geometry, files = (known.get("max_hash_slot_num", 0), known.get("max_index_num", 0)), index_paths(paths.index)
    size, names = _other_size(index_file_size(*geometry) if all(geometry) else 0,
                              ((int(path.name), file_size(path)) for path in files))  # fmt: skip
    is_passed = config.is_explicit("max_hash_slot_num") and config.is_explicit("max_index_num")
    if size and (is_passed or len(names) > 1):
        is_open = paths.abort.exists() or lock_holder(paths.lock) is not None
        with contextlib.suppress(CorruptFileError, ValueError):  # which do not tell it
            found, _ = find_geometry(files, config, is_open=is_open, tolerant=tolerant)
            if found is not None:
                changed["max_hash_slot_num"], changed["max_index_num"] = found
    return changed


def _other_size(known: int, files: Iterable[tuple[int, int]]) -> tuple[int, set[int]]:
    """The size of files (number, size), when it is one for all and not the known one, and their numbers; else 0.

    known: 0, none is. Files of 0 bytes do not count.
    """
    size, numbers = 0, set[int]()
    for number, length in files:
        if length and (not known or length == known or length != (size or length)):
            return 0, set()
        if length:
            size = length
            numbers.add(number)
    return size, numbers


def segment_sizes(paths: StorePaths) -> dict[str, int]:
    """Lengths of the segments of log and queues, as far as there are any; that of most files holds."""
    queues = [queue for topic in directories_in(paths.consume_queue) for queue in directories_in(topic)]
    sizes = {"mapped_file_size_commit_log": _common_size(segments_in(paths.commit_logs)),
             "mapped_file_size_consume_queue": _common_size(segments_in(queues))}  # fmt: skip
    return {name: size for name, size in sizes.items() if size}


def _geometry_of_files(paths: StorePaths, config: StoreConfig,
                       tolerant: bool) -> tuple[dict[str, Any], list[Path]]:  # fmt: skip
    """What the files tell of the geometry, and the index files that do not fit it."""
    known: dict[str, Any] = dict(segment_sizes(paths))
    size = known.get("mapped_file_size_consume_queue", 0)
    if size % L.UNIT_SIZE:
        if not tolerant:
            raise CorruptFileError(paths.consume_queue, 0,
                                   f"queue segments of {size} bytes hold no {L.UNIT_SIZE}-byte units")  # fmt: skip
        del known["mapped_file_size_consume_queue"]
    is_open = paths.abort.exists() or lock_holder(paths.lock) is not None
    geometry, damaged = find_geometry(index_paths(paths.index), config, is_open=is_open, tolerant=tolerant)
    if geometry is not None:
        known["max_hash_slot_num"], known["max_index_num"] = geometry
    return known, damaged


def _of_another_length(directory: Path, size: int) -> list[Path]:
    """Index files cut short, or that are none; of several all: none, for it is the size that is wrong then."""
    paths = index_paths(directory)
    found = [path for path in paths if file_size(path) not in (0, size)]  # 0: made and not filled yet, or cleaned away
    return found if len(found) < max(2, len(paths)) else []


def _common_size(segments: Iterator[tuple[int, int]]) -> int:
    """Segment size that most files have; 0 for no files. Opening names the file that differs."""
    counts: dict[int, int] = {}
    for start, length in segments:
        # A start that is no multiple of the length speaks against it.
        counts[length] = counts.get(length, 0) + (2 if start % length == 0 else 1)
    return max(counts, key=lambda size: (counts[size], size)) if counts else 0


def find_geometry(paths: list[Path], config: StoreConfig, *, is_open: bool = False,
                  tolerant: bool = False) -> tuple[tuple[int, int] | None, list[Path]]:  # fmt: skip
    """(max_hash_slot_num, max_index_num) of a store's index files, None: the config's; and the files of that length
    that do not fit it.

    The geometry is that of the sound files; without any, the config's when the lengths are those of its files, or when
    it was passed and the only file is shorter. ValueError when they leave it open, CorruptFileError when sound files
    differ and what was passed is none of theirs, or none is sound and the lengths differ.
    is_open: a writer holds the store or was killed, so the last file may be in the middle of a put.
    tolerant: most of the sound files decide, and the caller must pass what none tells (ValueError).
    """
    told: dict[tuple[int, int], list[Path]] = {}  # by which files
    unsure: dict[Path, list[tuple[int, int]]] = {}
    there = list(paths)
    being_put = paths[-1:] if is_open else []
    for path in paths:
        try:
            fitting = _fitting(path, config, path in being_put)
        except FileNotFoundError:
            there.remove(path)  # cleaned away
            continue
        except CorruptFileError:
            if not tolerant:
                raise
            continue
        if fitting is not None and len(fitting) == 1:
            told.setdefault(fitting[0], []).append(path)
        elif fitting is not None:
            unsure[path] = fitting
    asked = config.max_hash_slot_num, config.max_index_num
    is_asked = config.is_explicit("max_hash_slot_num") and config.is_explicit("max_index_num")
    geometry = max(told, key=lambda pair: len(told[pair])) if told else None
    damaged: list[Path] = []
    if len(told) > 1 and is_asked and asked in told:
        geometry = asked
        damaged = [path for pair, files in told.items() if pair != asked for path in files]
    elif len(told) > 1 and not tolerant:
        other = min(told.keys() - {geometry}, key=lambda pair: len(told[pair]))
        raise CorruptFileError(told[other][0], 0, f"entries fit the geometry {other}, those of other files {geometry}; "
                               "max_hash_slot_num and max_index_num can be passed")  # fmt: skip
    lengths = [length for length in map(file_size, there) if length]  # but of what was cleaned away
    is_alone = geometry is None and is_asked and len(lengths) == 1 and lengths[0] < index_file_size(*asked)
    if geometry is None and not is_alone:
        _check_left_open(there, config, unsure, tolerant)
    chosen = geometry or asked
    return geometry, damaged + [
        path for path, fitting in unsure.items()
        if chosen not in fitting and (is_alone or _is_damaged(path, chosen, path in being_put))]  # fmt: skip


def _check_left_open(paths: list[Path], config: StoreConfig, unsure: dict[Path, list[tuple[int, int]]],
                     tolerant: bool) -> None:  # fmt: skip
    """Raise unless the config's geometry may be that of files none of which tells one."""
    size = index_file_size(config.max_hash_slot_num, config.max_index_num)
    for path, fitting in unsure.items():
        if fitting and not tolerant:
            raise ValueError(f"{path}: max_hash_slot_num and max_index_num may be {fitting}: pass them")
    if all(file_size(path) in (0, size) for path in paths):
        return
    if unsure and not tolerant:
        raise CorruptFileError(next(iter(unsure)), 0, "entries fit no geometry: damaged, or no index file; "
                               "max_hash_slot_num and max_index_num can be passed")  # fmt: skip
    why = "entries fit no or several geometries" if unsure else "the files have no entries to tell"
    raise ValueError(f"{paths[0].parent}: pass max_hash_slot_num and max_index_num: {why}")


def _fitting(path: Path, config: StoreConfig, being_put: bool) -> list[tuple[int, int]] | None:
    """The geometries that a file's entries fit: the config's alone when it is among them. None: no entries."""
    usual = config.max_hash_slot_num, config.max_index_num
    with _mapped(path) as file:
        if file.size < L.INDEX_HEADER_SIZE:
            return []
        if file.map[L.INDEX_COUNT_OFFSET : L.INDEX_HEADER_SIZE] in (bytes(4), b"\0\0\0\1"):
            return None
        if file.size == index_file_size(*usual) and _fits(file, *usual, being_put):
            return [usual]
        return [pair for pair in geometry_candidates(file.map, being_put=being_put) if _fits(file, *pair, being_put)]


def _is_damaged(path: Path, geometry: tuple[int, int], being_put: bool) -> bool:
    """Whether a file has the length of a geometry, and does not fit it; opening names the file of another length."""
    with _mapped(path) as file:
        return file.size == index_file_size(*geometry) and not _fits(file, *geometry, being_put)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[MappedFile]:
    """A mapped file, checked at the end."""
    file = MappedFile(path)
    try:
        yield file
    finally:
        try:
            file.check()
        finally:
            file.close()


def _fits(file: MappedFile, slots: int, entries: int, being_put: bool) -> bool:
    view = IndexFileView(file.map, hash_slot_num=slots, index_num=entries)
    try:
        return bool(view.fits(being_put))
    finally:
        view.release()
