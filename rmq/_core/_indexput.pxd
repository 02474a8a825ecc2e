# SPDX-License-Identifier: Apache-2.0
"""Entries behind the last of one index file, many at a time."""
from libc.stdint cimport int32_t, int64_t

from rmq._core._indexwalk cimport IndexBytes
from rmq._core._recordbatch cimport RecordBatch

cdef enum:
    KEYS_TOGETHER = 512             # keys of rows that are gathered before they are put


cdef struct KeyBlock:               # keys of rows of a batch, in RocketMQ's order
    int32_t count
    int32_t[KEYS_TOGETHER] key_hashes
    int32_t[KEYS_TOGETHER] rows     # where each comes from: row of the batch,
    int32_t[KEYS_TOGETHER] keys     # number of the key in it
    int64_t[KEYS_TOGETHER] phy_offsets
    int64_t[KEYS_TOGETHER] store_timestamps


cdef void gather(RecordBatch batch, int32_t *row, int32_t *key, bint index_tags, KeyBlock *block) noexcept nogil
cdef bint put_one_hashed(const IndexBytes *file, int32_t key_hash, int64_t phy_offset,
                         int64_t store_timestamp) noexcept nogil
cdef int64_t put_hashed(const IndexBytes *file, const int32_t *key_hashes, const int64_t *phy_offsets,
                        const int64_t *store_timestamps, int64_t count) noexcept nogil
