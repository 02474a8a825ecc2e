# SPDX-License-Identifier: Apache-2.0
"""Walks of many chains of an index file at a time, so that their waits for memory overlap.

Keys in flight go round by round: each round reads one entry of every chain and asks memory for the one before it;
chains that end make room for the next keys. Source: RocketMQ IndexFile#selectPhyOffset.
"""
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, realloc

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, read_published_i32

cdef extern from "walk16.h" nogil:
    ctypedef struct rmq_walk_lanes:
        int32_t *key
        int32_t *position
        int32_t *key_hash
        int32_t *left
    ctypedef struct rmq_walk_limits:
        int32_t oldest
        int32_t newest
        int32_t going_on
        int32_t any_time
    ctypedef struct rmq_walk_entries:
        const uint8_t *key_hash
        const uint8_t *phy_offset
        const uint8_t *seconds
        const uint8_t *previous
        int32_t words
    bint rmq_walks_by_16(rmq_walk_entries entries, int32_t index_num) noexcept
    int32_t rmq_walk_by_16(rmq_walk_entries entries, rmq_walk_lanes lanes, int32_t active, rmq_walk_limits limits,
                           bint is_far, int64_t **hits) noexcept

cdef extern from "asking.h" nogil:
    enum: RMQ_WALKS_LIMIT
    ctypedef struct rmq_asking:
        int walks
        bint far
    const rmq_asking *rmq_asks

cdef enum:
    KEYS_AT_A_TIME = 4096           # answers are put in the order of their keys after so many
    CACHED = 16 * 1024 * 1024       # bytes of a file that the caches near the processor may hold whole
cdef int32_t INT32_LIMIT = 0x7FFFFFFF
cdef int64_t BASE_LIMIT = 1 << 62    # ms; of a base below it no time of an entry overflows


cdef struct Lanes:                  # a list for each: as structs, gcc would put them together and take them apart
    int32_t[RMQ_WALKS_LIMIT] key          # number of the key among KEYS_AT_A_TIME
    int32_t[RMQ_WALKS_LIMIT] position     # of the entry to read next; before the first, number of the slot
    int32_t[RMQ_WALKS_LIMIT] key_hash
    int32_t[RMQ_WALKS_LIMIT] left         # answers that the key may still have


cdef struct Hit:
    int64_t key
    int64_t phy_offset


cdef struct HitList:
    Hit *items
    int64_t count
    int64_t room


cdef void set_index_bytes(IndexBytes *file, uint8_t *base, int32_t hash_slot_num, int32_t index_num) noexcept nogil:
    cdef int bits = 0
    while (<int64_t>1 << bits) < hash_slot_num:
        bits += 1
    file.header = base
    file.slots = base + L.INDEX_HEADER_SIZE
    file.entries = file.slots + <int64_t>hash_slot_num * L.INDEX_SLOT_SIZE
    file.hash_slot_num = hash_slot_num
    file.index_num = file.limit = index_num
    file.count_every_put = False
    # Rounded up, 2^(31 + bits) / slots is too large by less than 2^bits / slots: no hash below 2^31 notices.
    file.shift = 31 + bits
    file.inverse = (<uint64_t>1 << file.shift) // <uint64_t>hash_slot_num + 1


cdef int32_t count_of(const IndexBytes *file) noexcept nogil:
    """Number of the next entry; what is stored as 0 or less counts as 1, what lies outside as full."""
    cdef int32_t count = read_published_i32(file.header + L.INDEX_COUNT_OFFSET)
    return 1 if count < 1 else min(count, file.index_num)


cdef bint may_be_cut(const IndexBytes *file, int32_t key_hash) noexcept nogil:
    """Whether the walk of a hash may meet what lies behind the end of a truncated file: its last page reads as zeros.

    The newest entry ends with zeros then. When its offset does not, no more than its own time and link can be gone.
    """
    cdef int32_t newest = count_of(file) - 1, its_hash
    cdef const uint8_t *entry = file.entries + <int64_t>newest * L.ENTRY_SIZE
    if newest > 0 and entry[L.ENTRY_SIZE - 1] != 0:
        return False
    its_hash = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) & INT32_LIMIT
    return newest < 1 or entry[L.ENTRY_TIME_DIFF_OFFSET - 1] == 0 or slot_of(file, its_hash) == slot_of(file, key_hash)


cdef bint _make_room(HitList *hits, int64_t more) noexcept nogil:
    cdef Hit *items
    cdef int64_t room
    if hits.count + more <= hits.room:
        return True
    room = max(max(<int64_t>64, 2 * hits.room), hits.count + more)
    items = <Hit *>realloc(hits.items, <size_t>room * sizeof(Hit))
    if items == NULL:
        return False
    hits.items = items
    hits.room = room
    return True


cdef bint _hand_over(const HitList *hits, int32_t *counts, Py_ssize_t keys, OffsetList *out) noexcept nogil:
    """Append the hits in the order of their keys, and count each key's; those of one key stay newest first."""
    cdef int64_t places[KEYS_AT_A_TIME]
    cdef int64_t *items
    cdef int64_t place = out.count, room
    cdef Py_ssize_t i
    if out.count + hits.count > out.room:
        room = max(2 * out.room, out.count + hits.count)
        items = <int64_t *>realloc(out.items, <size_t>room * sizeof(int64_t))
        if items == NULL:
            return False
        out.items = items
        out.room = room
    for i in range(keys):
        counts[i] = 0
    for i in range(hits.count):
        counts[hits.items[i].key] += 1
    for i in range(keys):
        places[i] = place
        place += counts[i]
    for i in range(hits.count):
        out.items[places[hits.items[i].key]] = hits.items[i].phy_offset
        places[hits.items[i].key] += 1
    out.count = place
    return True


cdef inline void _ask(const uint8_t *first, const uint8_t *last, bint is_far) noexcept nogil:
    """Ask memory for a byte or two."""
    if is_far:
        rmq_prefetch_far(first)
        if last != first:
            rmq_prefetch_far(last)
    else:
        rmq_prefetch(first)
        if last != first:
            rmq_prefetch(last)


cdef rmq_walk_limits _limits(const Question *question, int64_t base_ms) noexcept nogil:
    """Of a question, in a file whose first entry has this time: a sound one, when the walk is RocketMQ's.

    RocketMQ writes 0 for what is older than the first, as after a clock that went back, and the greatest number for all
    that lies further ahead. Of entry 1 the difference counts from the end of the file before.
    """
    cdef rmq_walk_limits limits
    if not question.is_raw:
        limits.oldest, limits.newest, limits.going_on, limits.any_time = INT32_MIN, INT32_MAX, INT32_MIN, 1
        if 0 < base_ms <= BASE_LIMIT:           # else no entry tells its time
            if question.begin > base_ms + 999:
                limits.oldest = <int32_t>min((question.begin - base_ms) // 1000, <int64_t>INT32_MAX)
            limits.newest = 0 if question.end < base_ms else <int32_t>min((question.end - base_ms) // 1000,
                                                                          <int64_t>INT32_MAX)
        return limits
    limits.oldest, limits.newest, limits.any_time = 0, -1, 0
    if question.end >= base_ms:
        limits.newest = <int32_t>min((question.end - base_ms) // 1000, <int64_t>INT32_MAX)
    if question.begin > base_ms + <int64_t>INT32_MAX * 1000:
        limits.oldest, limits.newest = INT32_MAX, -1
    elif question.begin > base_ms:
        limits.oldest = <int32_t>((question.begin - base_ms - 1) // 1000 + 1)
    limits.going_on = limits.oldest
    return limits


cdef int32_t _one_by_one(const uint8_t *entries, rmq_walk_lanes lanes, int32_t active, rmq_walk_limits limits,
                         bint is_far, int64_t **hits) noexcept nogil:
    """rmq_walk_by_16 on any CPU. Nothing depends on a coin: what is found is written and then counted or not."""
    cdef int32_t kept = 0, i, key, key_hash, position, previous, diff, rest
    cdef int64_t *hit = hits[0]
    cdef const uint8_t *entry
    cdef bint is_hit, goes_on
    for i in range(active):
        position, key, key_hash = lanes.position[i], lanes.key[i], lanes.key_hash[i]
        entry = entries + <int64_t>position * L.ENTRY_SIZE
        previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
        diff = load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
        is_hit = (load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) == key_hash) & (
            ((diff >= limits.oldest) & (diff <= limits.newest)) | (position == limits.any_time))
        goes_on = (previous > 0) & (previous < position) & (diff >= limits.going_on)
        hit[0] = key
        hit[1] = load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)
        hit += 2 * is_hit
        rest = lanes.left[i] - is_hit
        lanes.key[kept], lanes.key_hash[kept] = key, key_hash
        lanes.position[kept], lanes.left[kept] = previous, rest
        kept += goes_on & (rest > 0)
        entry = entries + <int64_t>previous * L.ENTRY_SIZE
        _ask(entry, entry + L.ENTRY_SIZE - 1, is_far)
    hits[0] = hit
    return kept


cdef bint _rounds(const IndexBytes *bytes_, const Question *question, const int32_t *key_hashes,
                         const int32_t *found, int32_t keys, HitList *hits) noexcept nogil:
    """Hits of up to KEYS_AT_A_TIME keys. Links only go back (previous < position), so every chain ends on any bytes.
    False when memory is short."""
    cdef Lanes chains                   # whose next entry was asked for
    cdef Lanes slots                    # whose slot was asked for
    cdef IndexBytes file = bytes_[0]
    cdef int64_t base_ms = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET), base_now, left
    cdef rmq_walk_limits limits = _limits(question, base_ms)
    cdef rmq_walk_lanes lanes
    cdef int32_t active = 0, asked = 0, next_key = 0, free_lanes, i, position, count
    cdef const uint8_t *entry
    cdef const uint8_t *slot
    cdef int64_t *hit
    cdef rmq_walk_entries entries
    cdef bint by_16
    cdef int64_t size = <int64_t>file.hash_slot_num * L.INDEX_SLOT_SIZE + <int64_t>file.index_num * L.ENTRY_SIZE
    cdef bint is_far = size > CACHED and rmq_asks.far
    entries.key_hash = file.entries + L.ENTRY_KEY_HASH_OFFSET
    entries.phy_offset = file.entries + L.ENTRY_PHY_OFFSET_OFFSET
    entries.seconds = file.entries + L.ENTRY_TIME_DIFF_OFFSET
    entries.previous = file.entries + L.ENTRY_PREVIOUS_OFFSET
    entries.words = L.ENTRY_SIZE // 4
    by_16 = rmq_walks_by_16(entries, file.index_num)
    lanes.key, lanes.position, lanes.key_hash, lanes.left = chains.key, chains.position, chains.key_hash, chains.left
    while True:
        if not _make_room(hits, active + 1):
            return False
        hit = <int64_t *>(hits.items + hits.count)
        if by_16:
            active = rmq_walk_by_16(entries, lanes, active, limits, is_far, &hit)
        else:
            active = _one_by_one(file.entries, lanes, active, limits, is_far, &hit)
        hits.count = <Hit *>hit - hits.items
        if asked:
            # Slots before the count: beside a writer they must not be ahead of it, which ends RocketMQ's walk.
            for i in range(asked):
                slots.position[i] = read_published_i32(file.slots + <int64_t>slots.position[i] * L.INDEX_SLOT_SIZE)
            count = count_of(&file)
            base_now = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
            if base_now != base_ms and 0 <= base_now <= BASE_LIMIT:     # the first entry came
                base_ms = base_now
                limits = _limits(question, base_ms)
            if question.is_raw:
                count = 0 if count <= 1 else min(count, file.index_num - 1)
            else:
                count = file.index_num - 1
            for i in range(asked):
                position = slots.position[i]
                chains.key[active], chains.key_hash[active] = slots.key[i], slots.key_hash[i]
                chains.position[active], chains.left[active] = position, slots.left[i]
                active += (position > 0) & (position <= count) & (slots.left[i] > 0)
                entry = file.entries + <int64_t>position * L.ENTRY_SIZE
                _ask(entry, entry + L.ENTRY_SIZE - 1, is_far)
        free_lanes = min(rmq_asks.walks - active, keys - next_key)
        for i in range(free_lanes):
            left = question.max_num
            if found != NULL:
                left -= found[next_key]
            slots.key[i], slots.key_hash[i] = next_key, key_hashes[next_key]
            slots.position[i] = slot_of(&file, key_hashes[next_key])
            slots.left[i] = <int32_t>min(max(left, <int64_t>0), <int64_t>INT32_LIMIT)
            slot = file.slots + <int64_t>slots.position[i] * L.INDEX_SLOT_SIZE
            _ask(slot, slot, is_far)
            next_key += 1
        asked = free_lanes
        if not active and not asked:
            return True


cdef bint _walk_each(const IndexBytes *file, const Question *question, const int32_t *key_hashes, Py_ssize_t keys,
                     int32_t *counts, OffsetList *out) noexcept nogil:
    """RocketMQ's walk, key by key: of a file whose first time is so far off that sums of times may overflow."""
    cdef Question one = question[0]
    cdef int64_t room, more
    cdef int64_t *items
    cdef Py_ssize_t i
    for i in range(keys):
        one.max_num = question.max_num - (question.found[i] if question.found != NULL else 0)
        more, room = -1, 64
        while more < 0:
            items = <int64_t *>realloc(out.items, <size_t>(out.count + room) * sizeof(int64_t))
            if items == NULL:
                return False
            out.items, out.room = items, out.count + room
            more = walk_one(file, &one, key_hashes[i], out.items + out.count, <int>min(room, <int64_t>INT32_LIMIT))
            room *= 8
        counts[i] = <int32_t>more
        out.count += more
    return True


cdef bint walk(const IndexBytes *file, const Question *question, const int32_t *key_hashes, Py_ssize_t keys,
               int32_t *counts, OffsetList *out) noexcept nogil:
    """Append each key's answers, newest first, and count them; False when memory is short. No hash may be negative."""
    cdef HitList hits
    cdef Py_ssize_t first = 0
    cdef int32_t size
    cdef const int32_t *found
    cdef int64_t base_ms = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
    cdef bint ok = True
    if question.is_raw and not 0 <= base_ms <= BASE_LIMIT:
        return _walk_each(file, question, key_hashes, keys, counts, out)
    hits.items, hits.room = NULL, 0
    while ok and first < keys:
        size = <int32_t>min(<Py_ssize_t>KEYS_AT_A_TIME, keys - first)
        found = question.found + first if question.found != NULL else NULL
        hits.count = 0
        ok = _rounds(file, question, key_hashes + first, found, size, &hits)
        ok = ok and _hand_over(&hits, counts + first, size, out)
        first += size
    free(hits.items)
    return ok


cdef int walk_one(const IndexBytes *file, const Question *question, int32_t key_hash, int64_t *items,
                  int room) noexcept nogil:
    """RocketMQ's answers of one key, newest first: how many were put in `items`, -1 when there are more than `room`.

    Alone there is nothing to overlap: branches let the processor guess on to the next entry before it knows this one.
    """
    cdef int32_t position, previous, diff, count, answers = 0
    cdef int64_t base_ms, stored_ms
    cdef const uint8_t *entry
    previous = read_published_i32(file.slots + <int64_t>slot_of(file, key_hash) * L.INDEX_SLOT_SIZE)
    count = count_of(file)              # behind the slot, as in _rounds
    base_ms = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
    position = min(count, file.index_num - 1) + 1 if count > 1 else 0
    while 0 < previous < position and answers < question.max_num:
        position = previous
        entry = file.entries + <int64_t>position * L.ENTRY_SIZE
        previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
        diff = load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
        stored_ms = <int64_t>(<uint64_t>base_ms + <uint64_t>(<int64_t>diff) * 1000)
        if diff < 0 or stored_ms < question.begin:
            break
        if load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) == key_hash and stored_ms <= question.end:
            if answers == room:
                return -1
            items[answers] = load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)
            answers += 1
    return answers
