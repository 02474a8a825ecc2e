# SPDX-License-Identifier: Apache-2.0
"""Hashes that queues and index want of a record, taken while its bytes are at hand. No .pyx behind it."""
from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memchr

from rmq._core._javahash cimport key_hash_of, rmq_hash_utf8
from rmq._core._record cimport RecordRow


cdef enum:
    NO_KEY_HASH = -1                # no hash of a key is negative


cdef struct RowHashes:
    int32_t tags                    # 0 of none
    int32_t uniq_key                # as an index entry has it, or NO_KEY_HASH
    int32_t keys                    # of KEYS that are one key, as an index entry has it; else NO_KEY_HASH


cdef inline void hash_row(const RecordRow *row, int32_t seed, RowHashes *hashes) noexcept nogil:
    """seed: the hash of `topic#`. The row has parsed properties."""
    cdef const uint8_t *keys = row.base + row.keys_position
    hashes.tags = 0
    hashes.uniq_key = hashes.keys = NO_KEY_HASH
    if row.tags_size > 0:
        hashes.tags = rmq_hash_utf8(row.base + row.tags_position, row.tags_size, 0)
    if row.uniq_key_size > 0:
        hashes.uniq_key = key_hash_of(rmq_hash_utf8(row.base + row.uniq_key_position, row.uniq_key_size, seed))
    if row.keys_size > 0 and memchr(keys, 0x20, row.keys_size) == NULL:
        hashes.keys = key_hash_of(rmq_hash_utf8(keys, row.keys_size, seed))
