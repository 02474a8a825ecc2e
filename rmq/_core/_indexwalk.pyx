# SPDX-License-Identifier: Apache-2.0
"""Walks of many chains of an index file at a time, so that their waits for memory overlap.

Keys in flight go round by round: each round reads one entry of every chain and asks memory for the one before it;
chains that end make room for the next keys. Nothing in a round depends on a coin: what is found is written and then
counted or not. Source: RocketMQ IndexFile#selectPhyOffset.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64

cdef enum:
    IN_FLIGHT = 96                  # more do not wait less
    KEYS_AT_A_TIME = 4096           # answers are put in the order of their keys after so many
    CACHED = 16 * 1024 * 1024       # bytes of a file that the caches near the processor may hold whole
cdef int32_t INT32_LIMIT = 0x7FFFFFFF


cdef struct Lane:
    int32_t key                     # number of the key among KEYS_AT_A_TIME
    int32_t position                # of the entry to read next; before the first, number of the slot
    int32_t key_hash
    int32_t left                    # answers that the key may still have


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
    cdef int32_t count = load_i32(file.header + L.INDEX_COUNT_OFFSET)
    return 1 if count < 1 else min(count, file.index_num)


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


cdef bint _hand_over(const HitList *hits, const int32_t *counts, Py_ssize_t keys, OffsetList *out) noexcept nogil:
    """Append the hits in the order of their keys; those of one key stay newest first."""
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


cdef inline bint _rounds(const IndexBytes *bytes_, const Question *question, const int32_t *key_hashes,
                         const int32_t *found, int32_t keys, bint is_raw, int32_t *counts,
                         HitList *hits) noexcept nogil:
    """Hits of up to KEYS_AT_A_TIME keys, and how many each has. Links only go back (previous < position), so every
    chain ends on any bytes. False when memory is short."""
    cdef Lane chains[IN_FLIGHT]         # whose next entry was asked for
    cdef Lane slots[IN_FLIGHT]          # whose slot was asked for
    cdef IndexBytes file = bytes_[0]
    cdef int64_t begin = question.begin, end = question.end, base_ms = 0, stored_ms, left
    cdef int32_t active = 0, asked = 0, next_key = 0, kept, free_lanes, i, position, previous, diff, count
    cdef const uint8_t *entry
    cdef const uint8_t *slot
    cdef Lane lane
    cdef Hit *hit
    cdef bint is_hit, goes_on
    cdef Seconds seconds = seconds_of(question, load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET))
    cdef bint is_far = <int64_t>file.hash_slot_num * L.INDEX_SLOT_SIZE + <int64_t>file.index_num * L.ENTRY_SIZE > CACHED
    while True:
        if not _make_room(hits, active + 1):
            return False
        hit = hits.items + hits.count
        kept = 0
        for i in range(active):
            lane = chains[i]
            entry = file.entries + <int64_t>lane.position * L.ENTRY_SIZE
            previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
            is_hit = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) == lane.key_hash
            goes_on = (previous > 0) & (previous < lane.position)
            diff = load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
            if is_raw:
                stored_ms = <int64_t>(<uint64_t>base_ms + <uint64_t>(<int64_t>diff) * 1000)
                is_hit &= (diff >= 0) & (stored_ms >= begin) & (stored_ms <= end)
                goes_on &= (diff >= 0) & (stored_ms >= begin)
            else:
                is_hit &= (diff >= seconds.oldest) & (diff <= seconds.newest)
            hit.key = lane.key
            hit.phy_offset = load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)
            hit += is_hit
            counts[lane.key] += is_hit
            lane.left -= is_hit
            lane.position = previous
            chains[kept] = lane
            kept += goes_on & (lane.left > 0)
            entry = file.entries + <int64_t>previous * L.ENTRY_SIZE
            _ask(entry, entry + L.ENTRY_SIZE - 1, is_far)
        hits.count = hit - hits.items
        active = kept
        if asked:
            # The count before the slot: beside a writer a slot may be ahead of it, which ends RocketMQ's walk.
            count = count_of(&file)
            if is_raw:
                base_ms = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
                count = 0 if count <= 1 else min(count, file.index_num - 1)
            else:
                count = file.index_num - 1
            for i in range(asked):
                lane = slots[i]
                position = load_i32(file.slots + <int64_t>lane.position * L.INDEX_SLOT_SIZE)
                lane.position = position
                chains[active] = lane
                active += (position > 0) & (position <= count) & (lane.left > 0)
                entry = file.entries + <int64_t>position * L.ENTRY_SIZE
                _ask(entry, entry + L.ENTRY_SIZE - 1, is_far)
        free_lanes = min(IN_FLIGHT - active, keys - next_key)
        for i in range(free_lanes):
            left = question.max_num
            if found != NULL:
                left -= found[next_key]
            lane.key = next_key
            lane.key_hash = key_hashes[next_key]
            lane.position = slot_of(&file, lane.key_hash)
            lane.left = <int32_t>min(max(left, <int64_t>0), <int64_t>INT32_LIMIT)
            slots[i] = lane
            slot = file.slots + <int64_t>lane.position * L.INDEX_SLOT_SIZE
            _ask(slot, slot, is_far)
            next_key += 1
        asked = free_lanes
        if not active and not asked:
            return True


cdef bint walk(const IndexBytes *file, const Question *question, const int32_t *key_hashes, Py_ssize_t keys,
               int32_t *counts, OffsetList *out) noexcept nogil:
    """Append each key's answers, newest first, and count them; False when memory is short. No hash may be negative."""
    cdef HitList hits
    cdef Py_ssize_t first = 0, i
    cdef int32_t size
    cdef const int32_t *found
    cdef bint ok = True
    hits.items, hits.room = NULL, 0
    while ok and first < keys:
        size = <int32_t>min(<Py_ssize_t>KEYS_AT_A_TIME, keys - first)
        found = question.found + first if question.found != NULL else NULL
        for i in range(size):
            counts[first + i] = 0
        hits.count = 0
        if question.is_raw:
            ok = _rounds(file, question, key_hashes + first, found, size, True, counts + first, &hits)
        else:
            ok = _rounds(file, question, key_hashes + first, found, size, False, counts + first, &hits)
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
    count = count_of(file)              # before the slot, as in _rounds
    base_ms = load_i64(file.header + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
    previous = load_i32(file.slots + <int64_t>slot_of(file, key_hash) * L.INDEX_SLOT_SIZE)
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
