# SPDX-License-Identifier: Apache-2.0
"""Chains of one index file: which slot a hash has, and the walks of many keys at a time."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept
    void rmq_prefetch_far(const void *p) noexcept


cdef struct IndexBytes:             # an index file, borrowed
    uint8_t *header
    uint8_t *slots
    uint8_t *entries
    int32_t hash_slot_num
    int32_t index_num               # entry numbers run 1 .. index_num - 1
    int32_t limit                   # entries from this number on have no blocks yet
    bint count_every_put            # RocketMQ <= 4.7.0: hash_slot_count grows with every put
    uint64_t inverse                # of hash_slot_num: slot_of multiplies, a division takes five times as long
    int shift


cdef struct Question:               # what a walk is to answer
    bint is_raw                     # RocketMQ's walk; else every entry of the hash
    int64_t max_num                 # answers of a key, those in newer files included
    int64_t begin                   # ms, both inclusive; of every entry: those that may be stored in this time
    int64_t end
    const int32_t *found            # answers that each key has from newer files, or NULL


cdef struct OffsetList:
    int64_t *items
    int64_t count
    int64_t room


cdef inline int32_t slot_of(const IndexBytes *file, int32_t key_hash) noexcept nogil:
    """key_hash % hash_slot_num, exact for every hash >= 0."""
    return key_hash - <int32_t>((<uint64_t><uint32_t>key_hash * file.inverse) >> file.shift) * file.hash_slot_num


cdef void set_index_bytes(IndexBytes *file, uint8_t *base, int32_t hash_slot_num, int32_t index_num) noexcept nogil
cdef int32_t count_of(const IndexBytes *file) noexcept nogil
cdef bint may_be_cut(const IndexBytes *file, int32_t key_hash) noexcept nogil
cdef bint walk(const IndexBytes *file, const Question *question, const int32_t *key_hashes, Py_ssize_t keys,
               int32_t *counts, OffsetList *out) noexcept nogil
cdef int walk_one(const IndexBytes *file, const Question *question, int32_t key_hash, int64_t *items,
                  int room) noexcept nogil
