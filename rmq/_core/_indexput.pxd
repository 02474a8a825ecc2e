# SPDX-License-Identifier: Apache-2.0
"""Entries behind the last of one index file, many at a time."""
from libc.stdint cimport int32_t, int64_t

from rmq._core._indexwalk cimport IndexBytes

cdef enum:
    KEYS_AHEAD = 64                 # the slots of so many keys are asked of memory before their turn


cdef struct Pending:                # an entry to put, whose slot was asked of memory
    int32_t key_hash
    int32_t slot
    int32_t row                     # where it comes from: row of the batch, number of the key in it
    int32_t key
    bint is_last                    # of its row
    int64_t phy_offset
    int64_t store_timestamp


cdef void ask(const IndexBytes *file, Pending *entry, int32_t key_hash) noexcept nogil
cdef int put_pending(const IndexBytes *file, const Pending *block, int count) noexcept nogil
cdef int64_t put_hashed(const IndexBytes *file, const int32_t *key_hashes, const int64_t *phy_offsets,
                        const int64_t *store_timestamps, int64_t count) noexcept nogil
