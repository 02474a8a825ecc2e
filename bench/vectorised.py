# SPDX-License-Identifier: Apache-2.0
"""An index file as an expert of numpy would write it: the same bytes, whole arrays at a time, keys of one width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.bytes_]
HEADER = np.dtype([("begin_timestamp", ">i8"), ("end_timestamp", ">i8"), ("begin_phy_offset", ">i8"),
                   ("end_phy_offset", ">i8"), ("slot_count", ">i4"), ("index_count", ">i4")])  # fmt: skip
ENTRY = np.dtype([("key_hash", ">i4"), ("phy_offset", ">i8"), ("time_diff", ">i4"), ("previous", ">i4")])
CHUNK = 8192  # keys whose hashes stay in the cache


def key_hashes(keys: Keys) -> npt.NDArray[np.int32]:
    width = keys.dtype.itemsize
    powers = np.array([pow(31, width - 1 - i, 2**32) for i in range(width)], np.uint32).view(np.int32)
    chars = keys.view(np.uint8).reshape(-1, width)
    hashes = np.empty(len(keys), np.int32)
    for at in range(0, len(keys), CHUNK):
        np.einsum("ij,j->i", chars[at : at + CHUNK], powers, dtype=np.int32, casting="unsafe",
                  out=hashes[at : at + CHUNK])  # fmt: skip
    np.abs(hashes, out=hashes)
    hashes[hashes < 0] = 0
    return hashes


class VectorIndex:
    def __init__(self, path: Path, slots: int, entries: int) -> None:
        size = HEADER.itemsize + 4 * slots + ENTRY.itemsize * entries
        new = not path.exists()
        with path.open("ab") as file:
            file.truncate(size)
        data: Any = np.memmap(path, np.uint8, "r+")
        self._header = data[: HEADER.itemsize].view(HEADER)[0]
        self._slots = data[HEADER.itemsize : HEADER.itemsize + 4 * slots].view(">i4")
        self._entries = data[HEADER.itemsize + 4 * slots :].view(ENTRY)
        if new:
            self._header["index_count"] = 1

    def put(self, keys: Keys, phy_offsets: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> None:
        header, first = self._header, int(self._header["index_count"])
        if first == 1:
            header["begin_timestamp"], header["begin_phy_offset"] = times[0], phy_offsets[0]
        hashes = key_hashes(keys)
        slots = hashes % len(self._slots)
        order = np.argsort(slots, kind="stable")
        grouped = slots[order]
        starts = np.r_[True, grouped[1:] != grouped[:-1]]
        numbers = (order + first).astype(np.int32)
        newest = self._slots[grouped[starts]]
        before = np.empty(len(order), np.int32)
        before[1:] = numbers[:-1]
        before[starts] = newest
        previous = np.empty(len(order), np.int32)
        previous[order] = before
        entries = self._entries[first : first + len(keys)]
        entries["key_hash"], entries["phy_offset"], entries["previous"] = hashes, phy_offsets, previous
        entries["time_diff"] = (times - int(header["begin_timestamp"])) // 1000
        self._slots[grouped[starts]] = numbers[np.r_[starts[1:], True]]
        header["slot_count"] += np.count_nonzero(newest == 0)
        header["index_count"] = first + len(keys)
        header["end_timestamp"], header["end_phy_offset"] = times[-1], phy_offsets[-1]

    def select(self, keys: Keys, max_num: int = 32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(counts, phy offsets) of the keys: all chains walked together, one link at a time."""
        wanted = key_hashes(keys)
        at = self._slots[wanted % len(self._slots)].astype(np.int32)
        rows = np.flatnonzero(at)
        at, wanted = at[rows], wanted[rows]
        counts = np.zeros(len(keys), np.int64)
        found_rows, found = [], []
        while len(rows):
            entries = self._entries[at]
            hit = entries["key_hash"] == wanted
            found_rows.append(rows[hit])
            found.append(entries["phy_offset"][hit].astype(np.int64))
            counts[found_rows[-1]] += 1
            previous = entries["previous"].astype(np.int32)
            on = (previous > 0) & (previous < at) & (counts[rows] < max_num)
            rows, wanted, at = rows[on], wanted[on], previous[on]
        if not found:
            return counts, np.empty(0, np.int64)
        return counts, np.concatenate(found)[np.argsort(np.concatenate(found_rows), kind="stable")]
