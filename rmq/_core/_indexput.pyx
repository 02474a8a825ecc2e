# SPDX-License-Identifier: Apache-2.0
"""Entries behind the last of one index file, many at a time, so that their waits for memory overlap.

Slots are asked of memory one by one while other entries are written: many at once, the processor would stop at those
that it cannot keep in mind. The header comes after the entries that it counts. Source: RocketMQ IndexFile#putKey.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, store_i32, store_i64
from rmq._core._indexwalk cimport IndexBytes, count_of, rmq_prefetch, slot_of

cdef enum:
    ENTRIES_UNSEEN = 64             # beside a writer a slot may be ahead of the header by so many entries
cdef int32_t INT32_LIMIT = 0x7FFFFFFF


cdef struct Tail:                   # of the file, while entries are put
    int32_t number                  # of the next entry
    int32_t slots                   # how many more the header is to count
    int64_t begin_timestamp


cdef inline int64_t _begin(const IndexBytes *file, Tail *tail, int64_t count) noexcept nogil:
    """How many of `count` entries fit."""
    tail.number = count_of(file)
    tail.slots = 0
    tail.begin_timestamp = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
    return max(<int64_t>0, min(count, <int64_t>file.limit - tail.number))


cdef inline void _append(const IndexBytes *file, Tail *tail, int32_t key_hash, int32_t slot_number, int64_t phy_offset,
                         int64_t store_timestamp) noexcept nogil:
    cdef uint8_t *slot = file.slots + <int64_t>slot_number * L.INDEX_SLOT_SIZE
    cdef uint8_t *entry = file.entries + <int64_t>tail.number * L.ENTRY_SIZE
    cdef int32_t previous = load_i32(slot)
    cdef int64_t diff = 0
    # A number outside 1 .. number is none; whether a slot is empty is a coin, so there is no branch.
    previous &= -<int32_t>(<uint32_t>previous - 1 < <uint32_t>tail.number)
    if tail.begin_timestamp > 0 and store_timestamp > tail.begin_timestamp:
        # Unsigned: the difference of hostile times may not overflow.
        diff = <int64_t>((<uint64_t>store_timestamp - <uint64_t>tail.begin_timestamp) // 1000)
        diff = min(diff, INT32_LIMIT)
    store_i32(entry + L.ENTRY_KEY_HASH_OFFSET, key_hash)
    store_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET, phy_offset)
    store_i32(entry + L.ENTRY_TIME_DIFF_OFFSET, <int32_t>diff)
    store_i32(entry + L.ENTRY_PREVIOUS_OFFSET, previous)
    store_i32(slot, tail.number)
    if tail.number <= 1:
        tail.begin_timestamp = store_timestamp
        store_i64(file.header + L.INDEX_BEGIN_PHY_OFFSET_OFFSET, phy_offset)
        store_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET, store_timestamp)
    tail.slots += (previous == 0) | file.count_every_put
    tail.number += 1


cdef inline void _count(const IndexBytes *file, Tail *tail, int64_t phy_offset, int64_t store_timestamp) noexcept nogil:
    """The header counts what was appended, up to the entry of these numbers."""
    store_i32(file.header + L.INDEX_HASH_SLOT_COUNT_OFFSET,
              <int32_t>(<uint32_t>load_i32(file.header + L.INDEX_HASH_SLOT_COUNT_OFFSET) + <uint32_t>tail.slots))
    store_i32(file.header + L.INDEX_COUNT_OFFSET, tail.number)
    store_i64(file.header + L.INDEX_END_PHY_OFFSET_OFFSET, phy_offset)
    store_i64(file.header + L.INDEX_END_TIMESTAMP_OFFSET, store_timestamp)
    tail.slots = 0


cdef void ask(const IndexBytes *file, Pending *entry, int32_t key_hash) noexcept nogil:
    """Set the hash of an entry to put, and ask memory for its slot."""
    entry.key_hash = key_hash
    entry.slot = slot_of(file, key_hash)
    rmq_prefetch(file.slots + <int64_t>entry.slot * L.INDEX_SLOT_SIZE)


cdef int put_pending(const IndexBytes *file, const Pending *block, int count) noexcept nogil:
    """Append entries, at most KEYS_AHEAD; returns how many fitted."""
    cdef IndexBytes bytes_ = file[0]        # what is stored may not make the compiler load these again
    cdef Tail tail
    cdef int fitting = <int>_begin(&bytes_, &tail, count), i
    for i in range(fitting):
        _append(&bytes_, &tail, block[i].key_hash, block[i].slot, block[i].phy_offset, block[i].store_timestamp)
    if fitting:
        _count(&bytes_, &tail, block[fitting - 1].phy_offset, block[fitting - 1].store_timestamp)
    return fitting


cdef inline void _ask(const IndexBytes *file, int32_t key_hash) noexcept nogil:
    rmq_prefetch(file.slots + <int64_t>slot_of(file, key_hash) * L.INDEX_SLOT_SIZE)


cdef int64_t put_hashed(const IndexBytes *file, const int32_t *key_hashes, const int64_t *phy_offsets,
                        const int64_t *store_timestamps, int64_t count) noexcept nogil:
    """Append entries; returns how many fitted. No hash may be negative."""
    cdef IndexBytes bytes_ = file[0]
    cdef Tail tail
    cdef int64_t fitting = _begin(&bytes_, &tail, count), i, stop = 0
    for i in range(min(<int64_t>KEYS_AHEAD, fitting)):
        _ask(&bytes_, key_hashes[i])
    i = 0
    while i < fitting:
        stop = min(fitting, i + ENTRIES_UNSEEN)
        while i < stop:
            if i + KEYS_AHEAD < fitting:
                _ask(&bytes_, key_hashes[i + KEYS_AHEAD])
            _append(&bytes_, &tail, key_hashes[i], slot_of(&bytes_, key_hashes[i]), phy_offsets[i], store_timestamps[i])
            i += 1
        _count(&bytes_, &tail, phy_offsets[i - 1], store_timestamps[i - 1])
    return fitting
