# SPDX-License-Identifier: Apache-2.0
"""Entries behind the last of one index file, many at a time, so that their waits for memory overlap.

Slots are asked of memory one by one while other entries are written: many at once, the processor would stop at those
that it cannot keep in mind. Keys of records are hashed before that: between hashes it would keep few in mind.
A slot is published behind its entry and behind the count of those before, the header behind the entries that it
counts, its end last. Source: RocketMQ IndexFile#putKey.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, publish_i32, publish_i64, store_i32, store_i64
from rmq._core._indexwalk cimport IndexBytes, count_of, rmq_prefetch, rmq_prefetch_far, slot_of
from rmq._core._javahash cimport key_hash_of, rmq_hash_utf8, seed_of_tags, seed_of_topic
from rmq._core._record cimport RecordRow, next_key
from rmq._core._recordbatch cimport RecordBatch
from rmq._core._rowhash cimport NO_KEY_HASH, RowHashes

cdef extern from "asking.h" nogil:
    ctypedef struct rmq_asking:
        bint far
    const rmq_asking *rmq_asks

cdef enum:
    KEYS_AHEAD = 64                 # the slots of so many keys are asked of memory before their turn; beside a writer
                                    # slot count and end of the header may be behind by so many entries
    KEYS_NEAR = 16                  # and once more, where they came far: some processors take no far prefetches until
                                    # there were many
    INT32_LIMIT = 0x7FFFFFFF
cdef int64_t INT64_LIMIT = 0x7FFFFFFFFFFFFFFF


cdef struct Tail:                   # of the file, while entries are put
    uint8_t *entry                  # the next one
    int32_t number                  # of it
    int32_t slots                   # how many more the header is to count
    int64_t since                   # ms from which on time diffs count; INT64_MAX: there are none


cdef inline int64_t _begin(const IndexBytes *file, Tail *tail, int64_t count) noexcept nogil:
    """How many of `count` entries fit."""
    tail.number = count_of(file)
    tail.entry = file.entries + <int64_t>tail.number * L.ENTRY_SIZE
    tail.slots = 0
    _take_since(tail, load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET))
    return max(<int64_t>0, min(count, <int64_t>file.limit - tail.number))


cdef inline void _take_since(Tail *tail, int64_t begin_timestamp) noexcept nogil:
    tail.since = begin_timestamp if begin_timestamp > 0 else INT64_LIMIT


cdef inline void _append(Tail *tail, int32_t key_hash, uint8_t *slot, int64_t phy_offset,
                         int64_t store_timestamp) noexcept nogil:
    cdef uint8_t *entry = tail.entry
    cdef int32_t previous = load_i32(slot)
    # Unsigned: the difference of hostile times may not overflow.
    cdef uint64_t ms = <uint64_t>store_timestamp - <uint64_t>tail.since if store_timestamp > tail.since else 0
    # A number outside 1 .. number is none; whether a slot is empty is a coin, so there is no branch.
    previous &= -<int32_t>(<uint32_t>previous - 1 < <uint32_t>tail.number)
    store_i32(entry + L.ENTRY_KEY_HASH_OFFSET, key_hash)
    store_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET, phy_offset)
    store_i32(entry + L.ENTRY_TIME_DIFF_OFFSET, <int32_t>min(ms // 1000, <uint64_t>INT32_LIMIT))
    store_i32(entry + L.ENTRY_PREVIOUS_OFFSET, previous)
    publish_i32(slot, tail.number)
    tail.slots += previous == 0
    tail.entry += L.ENTRY_SIZE
    tail.number += 1


cdef inline void _count(const IndexBytes *file, Tail *tail, int64_t entries, int64_t phy_offset,
                        int64_t store_timestamp) noexcept nogil:
    """The header counts so many entries that were appended, up to the one of these numbers."""
    cdef int64_t slots = entries if file.count_every_put else tail.slots
    store_i32(file.header + L.INDEX_HASH_SLOT_COUNT_OFFSET,
              <int32_t>(<uint32_t>load_i32(file.header + L.INDEX_HASH_SLOT_COUNT_OFFSET) + <uint32_t>slots))
    store_i64(file.header + L.INDEX_END_TIMESTAMP_OFFSET, store_timestamp)
    publish_i32(file.header + L.INDEX_COUNT_OFFSET, tail.number)
    publish_i64(file.header + L.INDEX_END_PHY_OFFSET_OFFSET, phy_offset)
    tail.slots = 0


cdef inline void _put_alone(const IndexBytes *file, Tail *tail, int32_t key_hash, int64_t phy_offset,
                            int64_t store_timestamp) noexcept nogil:
    """Append the next entry alone; the file's first one says where and when it begins."""
    _append(tail, key_hash, _slot_at(file, key_hash), phy_offset, store_timestamp)
    if tail.number <= 2:
        _take_since(tail, store_timestamp)
        store_i64(file.header + L.INDEX_BEGIN_PHY_OFFSET_OFFSET, phy_offset)
        store_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET, store_timestamp)
    _count(file, tail, 1, phy_offset, store_timestamp)


cdef bint put_one_hashed(const IndexBytes *file, int32_t key_hash, int64_t phy_offset,
                         int64_t store_timestamp) noexcept nogil:
    """Append one entry; False: it does not fit."""
    cdef Tail tail
    if _begin(file, &tail, 1) == 0:
        return False
    _put_alone(file, &tail, key_hash, phy_offset, store_timestamp)
    return True


cdef inline uint8_t *_slot_at(const IndexBytes *file, int32_t key_hash) noexcept nogil:
    return file.slots + <int64_t>slot_of(file, key_hash) * L.INDEX_SLOT_SIZE


cdef inline uint8_t *_ask(const IndexBytes *file, int32_t key_hash, bint far) noexcept nogil:
    """The slot of a hash, asked of memory."""
    cdef uint8_t *slot = _slot_at(file, key_hash)
    if far:
        rmq_prefetch_far(slot)
    else:
        rmq_prefetch(slot)
    return slot


cdef inline void _put_block(const IndexBytes *file, Tail *tail, uint8_t **slots, const int32_t *key_hashes,
                            const int64_t *phy_offsets, const int64_t *store_timestamps, int64_t count,
                            int64_t left, bint far) noexcept nogil:
    """Append `count` entries, at most KEYS_AHEAD, whose slots are asked for; and ask for those behind, of `left`."""
    cdef int64_t k
    cdef uint8_t *slot
    for k in range(count):
        slot = slots[k]
        if k + KEYS_AHEAD < left:
            slots[k] = _ask(file, key_hashes[k + KEYS_AHEAD], far)
        if far and k + KEYS_NEAR < left:
            rmq_prefetch(slots[(k + KEYS_NEAR) & (KEYS_AHEAD - 1)])
        publish_i32(file.header + L.INDEX_COUNT_OFFSET, tail.number)
        _append(tail, key_hashes[k], slot, phy_offsets[k], store_timestamps[k])
    _count(file, tail, count, phy_offsets[count - 1], store_timestamps[count - 1])


cdef int64_t put_hashed(const IndexBytes *file, const int32_t *key_hashes, const int64_t *phy_offsets,
                        const int64_t *store_timestamps, int64_t count) noexcept nogil:
    """Append entries; returns how many fitted. No hash may be negative."""
    cdef IndexBytes bytes_ = file[0]    # which no other function knows, so that it stays in registers
    cdef Tail tail
    cdef int64_t fitting = _begin(file, &tail, count), i = 0, k
    cdef uint8_t *slots[KEYS_AHEAD]
    cdef bint far = rmq_asks.far
    if fitting > 0 and tail.number <= 1:
        _put_alone(&bytes_, &tail, key_hashes[0], phy_offsets[0], store_timestamps[0])
        i = 1
    for k in range(min(<int64_t>KEYS_AHEAD, fitting - i)):
        slots[k] = _ask(&bytes_, key_hashes[i + k], far)
        if far and k < KEYS_NEAR:
            rmq_prefetch(slots[k])
    while fitting - i >= 2 * KEYS_AHEAD:    # constants, so that the loop asks nothing
        _put_block(&bytes_, &tail, slots, key_hashes + i, phy_offsets + i, store_timestamps + i, KEYS_AHEAD,
                   2 * KEYS_AHEAD, far)
        i += KEYS_AHEAD
    while i < fitting:
        k = min(<int64_t>KEYS_AHEAD, fitting - i)
        _put_block(&bytes_, &tail, slots, key_hashes + i, phy_offsets + i, store_timestamps + i, k, fitting - i, far)
        i += k
    return fitting


# ---- keys of records -----------------------------------------------------------------------------------------


cdef inline bint _is_of_topic(const RecordRow *record, const RecordRow *other) noexcept nogil:
    """Whether two rows have one topic."""
    if record.queue >= 0 and record.queue == other.queue:
        return True
    return record.topic_size == other.topic_size and memcmp(
        record.base + record.topic_position, other.base + other.topic_position, record.topic_size) == 0


cdef inline bint _add(KeyBlock *block, const RecordRow *record, int32_t row, int32_t *at, int32_t key,
                      int32_t key_hash) noexcept nogil:
    """Add key number *at of the record unless it comes before `key`; False when the block is full."""
    cdef int32_t number = block.count
    if at[0] >= key:
        if number == KEYS_TOGETHER:
            return False
        block.key_hashes[number] = key_hash
        block.rows[number] = row
        block.keys[number] = at[0]
        block.phy_offsets[number] = record.phy_offset
        block.store_timestamps[number] = record.store_timestamp
        block.count += 1
    at[0] += 1
    return True


cdef bint _add_keys(KeyBlock *block, const RecordRow *record, int32_t row, int32_t *at, int32_t key,
                    int32_t seed) noexcept nogil:
    """_add of each piece of KEYS."""
    cdef const uint8_t *cursor = record.base + record.keys_position
    cdef const uint8_t *end = cursor + record.keys_size
    cdef const uint8_t *piece
    cdef int64_t size
    cdef bint room = True
    while room and next_key(&cursor, end, &piece, &size):
        room = _add(block, record, row, at, key, key_hash_of(rmq_hash_utf8(piece, size, seed)))
    return room


cdef void gather(RecordBatch batch, int32_t *row, int32_t *key, bint index_tags, KeyBlock *block) noexcept nogil:
    """Keys of the rows from (*row, *key) on, as many as the block takes, and where to go on.

    Source: IndexService#buildIndex.
    """
    cdef const RecordRow *record
    cdef const RecordRow *other = NULL
    cdef RowHashes hashes
    cdef int32_t seed = 0, at
    cdef bint room, needs_seed
    block.count = 0
    while row[0] < batch.count:
        record = &batch.rows[row[0]]
        if record.sys_flag & L.SYS_FLAG_TRANSACTION_MASK != L.SYS_FLAG_ROLLBACK:
            hashes.uniq_key = hashes.keys = NO_KEY_HASH
            if batch.has_hashes:
                hashes = batch.hashes[row[0]]
            needs_seed = index_tags or (hashes.uniq_key == NO_KEY_HASH and record.uniq_key_size > 0) or \
                (hashes.keys == NO_KEY_HASH and record.keys_size > 0)
            if needs_seed:
                if other == NULL or not _is_of_topic(record, other):
                    seed = seed_of_topic(record.base + record.topic_position, record.topic_size)
                other = record
            at, room = 0, True
            if record.uniq_key_size > 0:
                if hashes.uniq_key == NO_KEY_HASH:
                    hashes.uniq_key = key_hash_of(rmq_hash_utf8(record.base + record.uniq_key_position,
                                                                record.uniq_key_size, seed))
                room = _add(block, record, row[0], &at, key[0], hashes.uniq_key)
            if room and record.keys_size > 0:
                room = _add(block, record, row[0], &at, key[0], hashes.keys) if hashes.keys != NO_KEY_HASH else \
                    _add_keys(block, record, row[0], &at, key[0], seed)
            if room and index_tags and record.tags_size > 0:
                room = _add(block, record, row[0], &at, key[0], key_hash_of(rmq_hash_utf8(
                    record.base + record.tags_position, record.tags_size, seed_of_tags(seed))))
            if not room:
                key[0] = at
                return
        row[0] += 1
        key[0] = 0


def key_count(RecordBatch batch not None, bint index_tags=False):
    """How many entries an index has of the rows of a batch, whose properties are parsed."""
    cdef KeyBlock block
    cdef int32_t row = 0, key = 0
    cdef int64_t count = 0
    with nogil:
        while row < batch.count:
            gather(batch, &row, &key, index_tags, &block)
            count += block.count
    return count
