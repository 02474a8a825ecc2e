# SPDX-License-Identifier: Apache-2.0
"""Entries behind the last of one index file, many at a time, so that their waits for memory overlap.

Slots are asked of memory one by one while other entries are written: many at once, the processor would stop at those
that it cannot keep in mind. Keys of records are hashed before that: between hashes it would keep few in mind.
The header comes after the entries that it counts. Source: RocketMQ IndexFile#putKey.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, store_i32, store_i64
from rmq._core._indexwalk cimport IndexBytes, count_of, rmq_prefetch, rmq_prefetch_far, slot_of
from rmq._core._javahash cimport key_hash_of, rmq_hash_utf8, seed_of_topic
from rmq._core._record cimport RecordRow, next_key
from rmq._core._recordbatch cimport RecordBatch
from rmq._core._rowhash cimport NO_KEY_HASH, RowHashes

cdef enum:
    KEYS_AHEAD = 64                 # the slots of so many keys are asked of memory before their turn
    KEYS_NEAR = 16                  # and once more: some processors take no far prefetches until there were many
    ENTRIES_UNSEEN = 64             # beside a writer a slot may be ahead of the header by so many entries
cdef int32_t INT32_LIMIT = 0x7FFFFFFF
cdef int32_t HASH_OF_SEPARATOR = 35             # '#'


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


cdef bint put_one_hashed(const IndexBytes *file, int32_t key_hash, int64_t phy_offset,
                         int64_t store_timestamp) noexcept nogil:
    """Append one entry; False: it does not fit."""
    cdef Tail tail
    if _begin(file, &tail, 1) == 0:
        return False
    _append(file, &tail, key_hash, slot_of(file, key_hash), phy_offset, store_timestamp)
    _count(file, &tail, phy_offset, store_timestamp)
    return True


cdef inline int32_t _ask(const IndexBytes *file, int32_t key_hash) noexcept nogil:
    """The slot of a hash, asked of memory."""
    cdef int32_t slot = slot_of(file, key_hash)
    rmq_prefetch_far(file.slots + <int64_t>slot * L.INDEX_SLOT_SIZE)
    return slot


cdef int64_t put_hashed(const IndexBytes *file, const int32_t *key_hashes, const int64_t *phy_offsets,
                        const int64_t *store_timestamps, int64_t count) noexcept nogil:
    """Append entries; returns how many fitted. No hash may be negative."""
    cdef IndexBytes bytes_ = file[0]
    cdef Tail tail
    cdef int64_t fitting = _begin(&bytes_, &tail, count), i, stop = 0
    cdef int32_t[KEYS_AHEAD] slots
    cdef int32_t slot
    for i in range(min(<int64_t>KEYS_AHEAD, fitting)):
        slots[i] = _ask(&bytes_, key_hashes[i])
        if i < KEYS_NEAR:
            rmq_prefetch(bytes_.slots + <int64_t>slots[i] * L.INDEX_SLOT_SIZE)
    i = 0
    while i < fitting:
        stop = min(fitting, i + ENTRIES_UNSEEN)
        while i < stop:
            slot = slots[i & (KEYS_AHEAD - 1)]
            if i + KEYS_AHEAD < fitting:
                slots[i & (KEYS_AHEAD - 1)] = _ask(&bytes_, key_hashes[i + KEYS_AHEAD])
            if i + KEYS_NEAR < fitting:
                rmq_prefetch(bytes_.slots + <int64_t>slots[(i + KEYS_NEAR) & (KEYS_AHEAD - 1)] * L.INDEX_SLOT_SIZE)
            _append(&bytes_, &tail, key_hashes[i], slot, phy_offsets[i], store_timestamps[i])
            i += 1
        _count(&bytes_, &tail, phy_offsets[i - 1], store_timestamps[i - 1])
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
    cdef int32_t seed = 0, seed_of_tags, at
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
                # The key is "T#tags" behind "topic#": three characters more.
                seed_of_tags = <int32_t>(31 * (31 * <uint32_t>seed + 84) + <uint32_t>HASH_OF_SEPARATOR)
                room = _add(block, record, row[0], &at, key[0], key_hash_of(rmq_hash_utf8(
                    record.base + record.tags_position, record.tags_size, seed_of_tags)))
            if not room:
                key[0] = at
                return
        row[0] += 1
        key[0] = 0
