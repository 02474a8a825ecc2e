# SPDX-License-Identifier: Apache-2.0
"""The floors under the times: random lines of memory, read bandwidth, memcpy. Thread CPU time."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

import mmap

cdef extern from "floors.h" nogil:
    enum: LINE_BYTES
    enum: CHAINS_LIMIT
    void rmq_link_lines(uint8_t *lines, uint32_t count, uint64_t seed)
    double rmq_walk_lines(const uint8_t *lines, uint32_t count, int chains, int64_t steps, uint64_t seed)
    double rmq_read(const uint8_t *data, size_t size)
    double rmq_copy(uint8_t *target, size_t size, const uint8_t *source, size_t source_size, size_t piece)


cdef class Lines:
    """Lines of 64 bytes in pages of 4 KiB, each of which names another: one cycle through `size` bytes."""
    cdef object _map
    cdef uint8_t[::1] _bytes
    cdef uint32_t _count

    def __init__(self, size_t size, uint64_t seed=1):
        self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = self._map
        self._count = <uint32_t>(size // LINE_BYTES)
        rmq_link_lines(&self._bytes[0], self._count, seed)

    def walk(self, int chains, int64_t steps, uint64_t seed):
        """ns per line when that many walks go side by side; 1: each line waits for the one before."""
        if not 1 <= chains <= CHAINS_LIMIT or not seed:
            raise ValueError(f"chains must lie in [1, {CHAINS_LIMIT}], seed must not be 0")
        return rmq_walk_lines(&self._bytes[0], self._count, chains, steps, seed) / (steps // chains * chains)


def read(const uint8_t[::1] data):
    """ns per byte of reading it all once. Other threads run meanwhile."""
    cdef double taken
    with nogil:
        taken = rmq_read(&data[0], <size_t>data.shape[0])
    return taken / data.shape[0]


def copy(uint8_t[::1] target, const uint8_t[::1] source, size_t piece):
    """ns per byte of filling the target, a memcpy for each piece, from a source that repeats."""
    if not 0 < piece <= <size_t>source.shape[0] or <size_t>target.shape[0] < piece:
        raise ValueError("piece must fit into source and target")
    return rmq_copy(&target[0], <size_t>target.shape[0], &source[0], <size_t>source.shape[0], piece) / (
        <size_t>target.shape[0] // piece * piece)
