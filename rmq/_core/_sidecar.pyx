# SPDX-License-Identifier: Apache-2.0
"""Sidecars of sealed index files: made from one, asked in its place. Layout: docs/format/sidecar.md.

A bucket is one line of memory: where the items of some neighbouring slots lie, and a mark for each. An absent key costs
one line, one that is there another for its item. What is asked gives what walks of the chains give (_indexwalk): only
files whose chains are whole get a sidecar, and a block counts once its CRCs were found right.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, store_i32, store_i64
from rmq._core._indexwalk cimport IndexBytes, OffsetList, Question, rmq_prefetch_far, set_index_bytes, slot_of
from rmq._core._mapguard cimport MapGuard
from rmq._core._record cimport crc_of

import numpy as np

cdef extern from "sidecar.h" nogil:
    uint32_t rmq_marks_equal(const void *bucket, uint16_t mark) noexcept
    int rmq_lowest_bit(uint32_t bits) noexcept

cdef extern from "asking.h" nogil:
    enum: RMQ_BUCKETS_LIMIT
    ctypedef struct rmq_asking:
        int buckets
    const rmq_asking *rmq_asks

cdef enum:
    ENTRIES_AT_A_TIME = 64          # their buckets, then their items are asked of memory together
    ENTRIES_OF_A_STEP = 1 << 20     # between looks at whether to go on
    ITEMS_OF_A_BUCKET = 16          # at most, on average
cdef int64_t BASE_LIMIT = 1 << 62   # so far from there that no time of an item overflows


# ---- layout --------------------------------------------------------------------------------------------------


cdef int _slot_bits(int32_t hash_slot_num, int32_t index_num) noexcept nogil:
    """So many slots share a bucket, as a power of two, that ITEMS_OF_A_BUCKET come together when the file is full."""
    cdef int bits = 0
    while bits < 24 and (<int64_t>index_num << (bits + 1)) <= <int64_t>ITEMS_OF_A_BUCKET * hash_slot_num:
        bits += 1
    return bits


cdef int64_t _place(SidecarBytes *file, uint8_t *base, int32_t hash_slot_num, int32_t index_num) noexcept nogil:
    """Set where the parts lie; returns the size of the whole."""
    cdef int64_t blocks_at = L.SIDECAR_HEADER_SIZE, buckets_at, items_at
    file.slot_bits = _slot_bits(hash_slot_num, index_num)
    file.bucket_count = ((hash_slot_num - 1) >> file.slot_bits) + 1
    file.block_count = (file.bucket_count - 1) // L.SIDECAR_BLOCK_BUCKETS + 1
    file.item_count = index_num - 1
    buckets_at = blocks_at + <int64_t>file.block_count * L.SIDECAR_BLOCK_SIZE
    buckets_at = (buckets_at + L.SIDECAR_BUCKET_SIZE - 1) // L.SIDECAR_BUCKET_SIZE * L.SIDECAR_BUCKET_SIZE
    items_at = buckets_at + <int64_t>file.bucket_count * L.SIDECAR_BUCKET_SIZE
    file.header = base
    if base != NULL:
        file.blocks = <Block *>(base + blocks_at)
        file.buckets = <Bucket *>(base + buckets_at)
        file.items = <Item *>(base + items_at)
        set_index_bytes(&file.slots, base, hash_slot_num, index_num)
    return items_at + <int64_t>file.item_count * L.SIDECAR_ITEM_SIZE


cdef int64_t _index_size(int32_t hash_slot_num, int32_t index_num) noexcept nogil:
    return L.INDEX_HEADER_SIZE + <int64_t>hash_slot_num * L.INDEX_SLOT_SIZE + <int64_t>index_num * L.ENTRY_SIZE


def sidecar_size(int32_t hash_slot_num, int32_t index_num):
    """Bytes of the sidecar of an index file of that geometry."""
    cdef SidecarBytes file
    if hash_slot_num < 1 or index_num < 2:
        raise ValueError("an index file needs at least 1 slot and 2 entries")
    return _place(&file, NULL, hash_slot_num, index_num)


cdef inline int32_t _slot_and_mark(const SidecarBytes *file, int32_t key_hash, uint16_t *mark) noexcept nogil:
    """The slot, and what tells the hash from most others of its bucket: from all of them when slots are many."""
    cdef int32_t slot = slot_of(&file.slots, key_hash)
    cdef uint32_t round_ = <uint32_t>((<uint64_t><uint32_t>key_hash * file.slots.inverse) >> file.slots.shift)
    mark[0] = <uint16_t>((round_ << file.slot_bits) | (<uint32_t>slot & ((<uint32_t>1 << file.slot_bits) - 1)))
    return slot


cdef int64_t _block_size(const SidecarBytes *file, int32_t number, const Bucket **buckets) noexcept nogil:
    """Bytes of the buckets of a block, and where they begin."""
    cdef int32_t first = number * L.SIDECAR_BLOCK_BUCKETS
    buckets[0] = file.buckets + first
    return <int64_t>min(<int32_t>L.SIDECAR_BLOCK_BUCKETS, file.bucket_count - first) * L.SIDECAR_BUCKET_SIZE


cdef inline int32_t _end_of(const SidecarBytes *file, int32_t number) noexcept nogil:
    """Item behind those of a block."""
    return file.blocks[number + 1].first if number + 1 < file.block_count else file.item_count


# ---- making --------------------------------------------------------------------------------------------------


cdef bint _count(const IndexBytes *index, const SidecarBytes *file, int32_t first, int32_t end, int32_t *newest,
                 int32_t *counts) noexcept nogil:
    """Count entries into their buckets; False when one has no hash, a negative time or not the link it must have."""
    cdef const uint8_t *entry = index.entries + <int64_t>first * L.ENTRY_SIZE
    cdef int32_t i, k, size, slot, key_hash, signs = 0, wrong = 0
    cdef int32_t[ENTRIES_AT_A_TIME] slots
    while first < end:
        size = min(end - first, <int32_t>ENTRIES_AT_A_TIME)
        for k in range(size):
            key_hash = load_i32(entry + k * L.ENTRY_SIZE + L.ENTRY_KEY_HASH_OFFSET)
            signs |= key_hash
            slots[k] = slot_of(&index[0], key_hash & 0x7FFFFFFF)
            rmq_prefetch_far(newest + slots[k])
        for k in range(size):
            signs |= load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
            slot = slots[k]
            wrong |= load_i32(entry + L.ENTRY_PREVIOUS_OFFSET) ^ newest[slot]
            newest[slot] = first + k
            counts[slot >> file.slot_bits] += 1
            entry += L.ENTRY_SIZE
        first += size
    return signs >= 0 and wrong == 0


cdef bint _fill(const IndexBytes *index, SidecarBytes *file, int32_t first, int32_t end) noexcept nogil:
    """Put entries [first, end), the last one first, behind those of their buckets that are there. False: they are not
    those that were counted.
    """
    cdef const uint8_t *entry
    cdef int32_t k, size, key_hash
    cdef int32_t[ENTRIES_AT_A_TIME] hashes
    cdef int32_t[ENTRIES_AT_A_TIME] places
    cdef uint16_t[ENTRIES_AT_A_TIME] marks
    cdef Bucket *bucket
    cdef Bucket *buckets[ENTRIES_AT_A_TIME]
    cdef const Bucket *last = file.buckets + file.bucket_count - 1
    cdef Item *item
    while end > first:
        size = min(end - first, <int32_t>ENTRIES_AT_A_TIME)
        for k in range(size):
            entry = index.entries + <int64_t>(end - 1 - k) * L.ENTRY_SIZE
            hashes[k] = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) & 0x7FFFFFFF
            buckets[k] = file.buckets + (_slot_and_mark(file, hashes[k], &marks[k]) >> file.slot_bits)
            rmq_prefetch_far(buckets[k])
        for k in range(size):
            bucket = buckets[k]
            if bucket.count < L.SIDECAR_BUCKET_MARKS:
                bucket.marks[bucket.count] = marks[k]
            places[k] = bucket.first + bucket.count
            if places[k] >= (file.item_count if bucket == last else (bucket + 1).first):
                return False
            bucket.count += 1
            rmq_prefetch_far(file.items + places[k])
        for k in range(size):
            entry = index.entries + <int64_t>(end - 1 - k) * L.ENTRY_SIZE
            item = file.items + places[k]
            item.phy_offset = load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)
            item.key_hash = hashes[k]
            item.time_diff = load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
        end -= size
    return True


cdef void _seal(SidecarBytes *file) noexcept nogil:
    """The blocks' CRCs."""
    cdef const Bucket *buckets = NULL
    cdef int32_t number
    cdef int64_t size
    for number in range(file.block_count):
        size = _block_size(file, number, &buckets)
        file.blocks[number].first = buckets[0].first
        file.blocks[number].buckets_crc = crc_of(<const uint8_t *>buckets, size)
    for number in range(file.block_count):
        size = <int64_t>(_end_of(file, number) - file.blocks[number].first) * L.SIDECAR_ITEM_SIZE
        file.blocks[number].items_crc = crc_of(<const uint8_t *>(file.items + file.blocks[number].first), size)


def build_sidecar(const uint8_t[::1] index not None, uint8_t[::1] out not None, *, int32_t hash_slot_num,
                  int32_t index_num, int64_t index_mtime_ns, goes_on not None):
    """Make the sidecar of a full index file in a buffer of zeros, aligned to 64, of its very size.

    Returns "" or why the file gets none: it is not full, its chains are not whole, or goes_on(), which is asked every
    million entries, said no. Cost: two passes over the entries in about 40 ns each, 4 bytes a slot and 4 a bucket.
    """
    cdef IndexBytes file
    cdef SidecarBytes made
    cdef int32_t i, at, step, first = 0
    cdef int64_t base_ms
    cdef bint ok = True
    if hash_slot_num < 1 or index_num < 2 or out.shape[0] != sidecar_size(hash_slot_num, index_num) or \
            <uintptr_t>&out[0] % L.SIDECAR_BUCKET_SIZE:
        raise ValueError("the sidecar has not the size or alignment that it needs")
    if index.shape[0] != _index_size(hash_slot_num, index_num):
        raise ValueError("the index file has another size")
    set_index_bytes(&file, <uint8_t *>&index[0], hash_slot_num, index_num)
    _place(&made, &out[0], hash_slot_num, index_num)
    base_ms = load_i64(&index[L.INDEX_BEGIN_TIMESTAMP_OFFSET])
    if load_i32(&index[L.INDEX_COUNT_OFFSET]) < index_num:
        return "it is not full"
    if base_ms < 0 or base_ms > BASE_LIMIT:
        return "its begin timestamp is no time"
    newest_array, counts_array = np.zeros(hash_slot_num, np.int32), np.zeros(made.bucket_count, np.int32)
    cdef int32_t[::1] newest = newest_array
    cdef int32_t[::1] counts = counts_array
    for at in range(1, index_num, ENTRIES_OF_A_STEP):
        step = min(index_num - at, <int32_t>ENTRIES_OF_A_STEP)
        with nogil:
            ok = _count(&file, &made, at, at + step, &newest[0], &counts[0])
        if not ok:
            return "an entry does not link to the newest one of its slot, or its hash or time is negative"
        if not goes_on():
            return "it was interrupted"
    with nogil:
        for i in range(hash_slot_num):
            ok &= load_i32(file.slots + <int64_t>i * L.INDEX_SLOT_SIZE) == newest[i]
        for i in range(made.bucket_count):
            made.buckets[i].first = first
            first += counts[i]
    if not ok:
        return "a slot does not hold its newest entry"
    for at in range(index_num, 1, -ENTRIES_OF_A_STEP):
        with nogil:
            ok = _fill(&file, &made, max(<int32_t>1, at - <int32_t>ENTRIES_OF_A_STEP), at)
        if not ok:
            return "it was changed meanwhile"
        if not goes_on():
            return "it was interrupted"
    with nogil:
        _seal(&made)
        store_i32(made.header + L.SIDECAR_MAGIC_OFFSET, L.SIDECAR_MAGIC)
        (<int32_t *>(made.header + L.SIDECAR_ORDER_OFFSET))[0] = L.SIDECAR_ORDER
        store_i64(made.header + L.SIDECAR_INDEX_SIZE_OFFSET, index.shape[0])
        store_i64(made.header + L.SIDECAR_INDEX_MTIME_OFFSET, index_mtime_ns)
        store_i32(made.header + L.SIDECAR_HASH_SLOT_NUM_OFFSET, hash_slot_num)
        store_i32(made.header + L.SIDECAR_INDEX_NUM_OFFSET, index_num)
        store_i32(made.header + L.SIDECAR_SLOT_BITS_OFFSET, made.slot_bits)
        store_i32(made.header + L.SIDECAR_BLOCKS_CRC_OFFSET,
                  crc_of(<const uint8_t *>made.blocks, <int64_t>made.block_count * L.SIDECAR_BLOCK_SIZE))
        memcpy(made.header + L.SIDECAR_INDEX_HEADER_OFFSET, &index[0], L.INDEX_HEADER_SIZE)
        store_i32(made.header + L.SIDECAR_CRC_OFFSET, crc_of(made.header, L.SIDECAR_CRC_OFFSET))
    return ""


# ---- asking --------------------------------------------------------------------------------------------------


cdef bint _make_room(OffsetList *out, int64_t more) noexcept nogil:
    cdef int64_t *items
    cdef int64_t room
    if out.count + more <= out.room:
        return True
    room = max(2 * out.room, out.count + more)
    items = <int64_t *>realloc(out.items, <size_t>room * sizeof(int64_t))
    if items == NULL:
        return False
    out.items = items
    out.room = room
    return True


@cython.final
@cython.no_gc_clear
cdef class SidecarView:
    """ValueError with the reason when the bytes are not the sidecar of that index file, or their head is damaged."""

    def __cinit__(self, buffer, MapGuard guard not None, *, int32_t hash_slot_num, int32_t index_num,
                  int64_t index_mtime_ns, bytes index_header not None):
        cdef const uint8_t *header
        cdef int32_t number, first = 0
        cdef int64_t size = sidecar_size(hash_slot_num, index_num)
        PyObject_GetBuffer(buffer, &self._buffer, PyBUF_SIMPLE)
        self._guard = guard
        header = <const uint8_t *>self._buffer.buf
        if self._buffer.len != size or <uintptr_t>header % L.SIDECAR_BUCKET_SIZE:
            raise ValueError(f"{self._buffer.len} bytes, expected {size}, aligned to {L.SIDECAR_BUCKET_SIZE}")
        if load_i32(header + L.SIDECAR_MAGIC_OFFSET) != L.SIDECAR_MAGIC or \
                (<const int32_t *>(header + L.SIDECAR_ORDER_OFFSET))[0] != L.SIDECAR_ORDER or \
                load_i32(header + L.SIDECAR_CRC_OFFSET) != crc_of(header, L.SIDECAR_CRC_OFFSET):
            raise ValueError("no sidecar that this machine made")
        _place(&self._file, <uint8_t *>header, hash_slot_num, index_num)
        if load_i64(header + L.SIDECAR_INDEX_SIZE_OFFSET) != _index_size(hash_slot_num, index_num) or \
                load_i32(header + L.SIDECAR_HASH_SLOT_NUM_OFFSET) != hash_slot_num or \
                load_i32(header + L.SIDECAR_INDEX_NUM_OFFSET) != index_num or \
                load_i32(header + L.SIDECAR_SLOT_BITS_OFFSET) != self._file.slot_bits or \
                load_i64(header + L.SIDECAR_INDEX_MTIME_OFFSET) != index_mtime_ns or \
                len(index_header) != L.INDEX_HEADER_SIZE or \
                memcmp(header + L.SIDECAR_INDEX_HEADER_OFFSET, <const uint8_t *>index_header, L.INDEX_HEADER_SIZE):
            raise ValueError("sidecar of another index file, or the file was changed")
        self._base_ms = load_i64(header + L.SIDECAR_INDEX_HEADER_OFFSET + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
        if self._base_ms < 0 or self._base_ms > BASE_LIMIT or load_i32(header + L.SIDECAR_BLOCKS_CRC_OFFSET) != \
                crc_of(<const uint8_t *>self._file.blocks, <int64_t>self._file.block_count * L.SIDECAR_BLOCK_SIZE):
            raise ValueError("the list of its blocks is damaged")
        for number in range(self._file.block_count):
            if self._file.blocks[number].first < first or self._file.blocks[number].first > self._file.item_count:
                raise ValueError("its blocks do not lie in order")
            first = self._file.blocks[number].first
        self._last = self._file.items[self._file.item_count - 1]
        self._checked = <uint8_t *>calloc(self._file.block_count, 1)
        if self._checked == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self._checked)
        if self._buffer.buf != NULL:
            PyBuffer_Release(&self._buffer)

    @property
    def is_damaged(self):
        """Whether a block was met whose CRCs or places are wrong, or whose pages are gone; ask the index file."""
        return self._is_damaged

    cdef bint _check_block(self, int32_t number) noexcept nogil:
        """Whether a block is what was made: CRCs, and items that lie where its buckets say."""
        cdef const Block *block = &self._file.blocks[number]
        cdef const Bucket *buckets = NULL
        cdef int64_t size = _block_size(&self._file, number, &buckets), i
        cdef int64_t item = block.first, end = _end_of(&self._file, number)
        if item < 0 or end < item or end > self._file.item_count or \
                crc_of(<const uint8_t *>buckets, size) != block.buckets_crc or \
                crc_of(<const uint8_t *>(self._file.items + item), (end - item) * L.SIDECAR_ITEM_SIZE) != \
                block.items_crc:
            return False
        for i in range(size // L.SIDECAR_BUCKET_SIZE):
            if buckets[i].first != item or buckets[i].count < 0:
                return False
            item += buckets[i].count
        if item != end:
            return False
        self._checked[number] = 1
        return True

    cdef Outcome _scan(self, const Chain *chain, const Window *window, int64_t left, OffsetList *out) noexcept nogil:
        """Answers of one key, item after item: of buckets with more items than marks, or when an older item of the
        slot ends its chain."""
        cdef int32_t slot = slot_of(&self._file.slots, chain.key_hash), i
        cdef const Item *item = self._file.items + chain.first
        for i in range(chain.count):
            if item.time_diff < window.begin and slot_of(&self._file.slots, item.key_hash & 0x7FFFFFFF) == slot:
                break
            if item.key_hash == chain.key_hash and window.oldest <= item.time_diff <= window.newest:
                if left <= 0:
                    break
                if not _make_room(out, 1):
                    return NO_MEMORY
                out.items[out.count] = item.phy_offset
                out.count += 1
                left -= 1
            item += 1
        return ANSWERED

    cdef Window _window(self, const Question *question) noexcept nogil:
        cdef Window window
        if question.is_raw:
            window.begin = (question.begin - self._base_ms - 1) // 1000 + 1 if question.begin > self._base_ms else 0
            window.oldest = window.begin
            window.newest = (question.end - self._base_ms) // 1000 if question.end >= self._base_ms else -1
        else:
            # An item does not tell whether it is entry 1, whose time counts from elsewhere.
            window.begin, window.oldest, window.newest = 0, INT64_MIN, INT64_MAX
        return window

    cdef Outcome answer(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                        OffsetList *out) noexcept nogil:
        """As _indexwalk.walk. DAMAGED: what was appended is not to be used, and the sidecar neither."""
        cdef Outcome outcome = DAMAGED
        if not self._is_damaged:
            outcome = self._ask(question, key_hashes, keys, counts, out)
            if outcome == DAMAGED or (self._guard._guard != NULL and self._guard._guard.lost >= 0) or \
                    memcmp(&self._file.items[self._file.item_count - 1], &self._last, sizeof(Item)):
                self._is_damaged = True     # another thread may have found so meanwhile
        return DAMAGED if self._is_damaged else outcome

    cdef Outcome _ask(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                      OffsetList *out) noexcept nogil:
        cdef Chain[RMQ_BUCKETS_LIMIT] chains
        cdef Window window = self._window(question)
        cdef SidecarBytes file = self._file         # what is stored may not make the compiler load these again
        cdef uint8_t *checked = self._checked
        # A key waits for its bucket, and again for its item, while others have their turn: so many together that the
        # processor looks up their pages side by side.
        cdef Py_ssize_t ring = rmq_asks.buckets, together = min(keys, ring // 2), first = -2 * together, i
        cdef int32_t number
        cdef int64_t left, begun
        cdef Chain *chain
        cdef const Item *item
        cdef uint32_t hits
        cdef bint is_hit
        if not _make_room(out, keys):
            return NO_MEMORY
        while first < keys:
            for i in range(max(<Py_ssize_t>0, first), min(keys, first + together)):
                chain = &chains[i & (ring - 1)]
                begun = out.count
                if chain.hits or chain.count > L.SIDECAR_BUCKET_MARKS:
                    if not _make_room(out, L.SIDECAR_BUCKET_MARKS):
                        return NO_MEMORY
                    left = question.max_num
                    if question.found != NULL:
                        left -= question.found[i]
                    if chain.count > L.SIDECAR_BUCKET_MARKS or window.begin > 0:
                        if self._scan(chain, &window, left, out) != ANSWERED:
                            return NO_MEMORY
                    else:
                        hits = chain.hits
                        while hits:
                            item = file.items + chain.first + rmq_lowest_bit(hits)
                            is_hit = (item.key_hash == chain.key_hash) & (item.time_diff >= window.oldest) & \
                                (item.time_diff <= window.newest) & (left > 0)
                            out.items[out.count] = item.phy_offset
                            out.count += is_hit
                            left -= is_hit
                            hits &= hits - 1
                counts[i] = <int32_t>(out.count - begun)
            for i in range(max(<Py_ssize_t>0, first + together), min(keys, first + 2 * together)):
                chain = &chains[i & (ring - 1)]
                number = <int32_t>(chain.bucket - file.buckets) // L.SIDECAR_BLOCK_BUCKETS
                if not checked[number] and not self._check_block(number):
                    return DAMAGED
                chain.first, chain.count = chain.bucket.first, chain.bucket.count
                # Once more, for each: the file may have been changed since the block was looked at.
                if chain.first < 0 or chain.count < 0 or chain.first > file.item_count - chain.count:
                    return DAMAGED
                hits = rmq_marks_equal(chain.bucket, chain.mark)
                chain.hits = hits & ((<uint32_t>1 << min(chain.count, <int32_t>L.SIDECAR_BUCKET_MARKS)) - 1)
                if chain.hits:
                    rmq_prefetch_far(file.items + chain.first + rmq_lowest_bit(chain.hits))
            for i in range(max(<Py_ssize_t>0, first + 2 * together), min(keys, first + 3 * together)):
                chain = &chains[i & (ring - 1)]
                chain.key_hash = key_hashes[i]
                chain.bucket = file.buckets + (_slot_and_mark(&file, chain.key_hash, &chain.mark) >> file.slot_bits)
                rmq_prefetch_far(chain.bucket)
            first += together
        return ANSWERED
