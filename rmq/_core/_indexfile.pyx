# SPDX-License-Identifier: Apache-2.0
"""Index files under a borrowed pointer. Layout: docs/format/indexfile.md.

Source: RocketMQ IndexHeader, IndexFile#putKey, IndexFile#selectPhyOffset, IndexService#buildIndex.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, store_i32, store_i64
from rmq._core._javahash cimport key_hash_of, rmq_hash_utf8
from rmq._core._record cimport RecordRow, next_key
from rmq._core._recordbatch cimport RecordBatch

import numpy as np

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept

cdef enum:
    KEYS_AHEAD = 64                 # slots and entries of that many keys are asked of memory together
cdef int32_t TIME_DIFF_LIMIT = 0x7FFFFFFF
cdef int32_t HASH_OF_SEPARATOR = 35             # '#'


cdef bint _append(OffsetList *list_, int64_t item) noexcept nogil:
    cdef int64_t *items
    if list_.count == list_.room:
        list_.room = list_.room * 2 if list_.room else 64
        items = <int64_t *>realloc(list_.items, <size_t>list_.room * sizeof(int64_t))
        if items == NULL:
            return False
        list_.items = items
    list_.items[list_.count] = item
    list_.count += 1
    return True


cdef inline bint _add(Pending *block, int *count, const RecordRow *record, int32_t row, int32_t *at, int32_t key,
                      int32_t key_hash) noexcept nogil:
    """Add key number *at of the record unless it comes before `key`; False when the block is full."""
    cdef Pending *entry
    if at[0] >= key:
        if count[0] == KEYS_AHEAD:
            return False
        entry = &block[count[0]]
        entry.key_hash = key_hash
        entry.row = row
        entry.key = at[0]
        entry.is_last = False
        entry.phy_offset = record.phy_offset
        entry.store_timestamp = record.store_timestamp
        count[0] += 1
    at[0] += 1
    return True


cdef object _to_array(OffsetList *list_):
    result = np.empty(list_.count, np.int64)
    cdef int64_t[::1] out = result
    if list_.count:
        memcpy(&out[0], list_.items, <size_t>list_.count * sizeof(int64_t))
    return result


def index_file_size(int64_t hash_slot_num, int64_t index_num):
    """Bytes of an index file of that geometry."""
    return L.INDEX_HEADER_SIZE + hash_slot_num * L.INDEX_SLOT_SIZE + index_num * L.ENTRY_SIZE


@cython.final
cdef class IndexFileView:
    def __cinit__(self, buffer, *, int32_t hash_slot_num, int32_t index_num, bint writable=False,
                  bint count_every_put=False):
        if hash_slot_num < 1 or index_num < 2:
            raise ValueError("an index file needs at least 1 slot and 2 entries")
        PyObject_GetBuffer(buffer, &self._buffer, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        if self._buffer.len < index_file_size(hash_slot_num, index_num):
            PyBuffer_Release(&self._buffer)
            raise ValueError(f"{self._buffer.len} bytes are too few for {hash_slot_num} slots and {index_num} entries")
        self._base = <uint8_t *>self._buffer.buf
        self._writable = writable
        self._count_every_put = count_every_put
        self.hash_slot_num = hash_slot_num
        self.index_num = index_num
        self._limit = index_num

    def __dealloc__(self):
        self.release()

    def release(self):
        """Let go of the bytes, as soon as no call works on them; every other call raises ValueError from here on."""
        self._is_released = True
        if self._base != NULL and not self._users:
            self._base = NULL
            PyBuffer_Release(&self._buffer)

    cdef int _check(self) except -1:
        if self._is_released or self._base == NULL:
            raise ValueError("index file view is released")
        return 0

    cdef void _leave(self):
        self._users -= 1
        if self._is_released:
            self.release()

    cdef uint8_t *_entry(self, int32_t number) noexcept nogil:
        return self._base + L.INDEX_HEADER_SIZE + <int64_t>self.hash_slot_num * L.INDEX_SLOT_SIZE + \
            <int64_t>number * L.ENTRY_SIZE

    cdef uint8_t *_slot(self, int32_t key_hash) noexcept nogil:
        return self._base + L.INDEX_HEADER_SIZE + <int64_t>(key_hash % self.hash_slot_num) * L.INDEX_SLOT_SIZE

    cdef int32_t _count(self) noexcept nogil:
        """Number of the next entry; what is stored as 0 or less counts as 1, what lies outside as full."""
        cdef int32_t count = load_i32(self._base + L.INDEX_COUNT_OFFSET)
        return 1 if count < 1 else min(count, self.index_num)

    # ---- header ----

    @property
    def begin_timestamp(self):
        self._check()
        return load_i64(self._base + L.INDEX_BEGIN_TIMESTAMP_OFFSET)

    @property
    def end_timestamp(self):
        self._check()
        return load_i64(self._base + L.INDEX_END_TIMESTAMP_OFFSET)

    @property
    def begin_phy_offset(self):
        self._check()
        return load_i64(self._base + L.INDEX_BEGIN_PHY_OFFSET_OFFSET)

    @property
    def end_phy_offset(self):
        self._check()
        return load_i64(self._base + L.INDEX_END_PHY_OFFSET_OFFSET)

    @property
    def hash_slot_count(self):
        self._check()
        return load_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET)

    @property
    def index_count(self):
        self._check()
        return self._count()

    @property
    def is_full(self):
        self._check()
        return self._count() >= self.index_num

    def limit(self, int64_t entries):
        """Entries numbered below this have blocks; puts stop there until the limit is raised."""
        self._limit = <int32_t>max(<int64_t>1, min(entries, <int64_t>self.index_num))

    @property
    def room(self):
        """Entries that can be put below the limit."""
        self._check()
        return max(0, self._limit - self._count())

    def preset(self, int64_t end_phy_offset, int64_t end_timestamp):
        """Header of a new file: the end of the file before it stands as begin and end until the first put."""
        self._check()
        if end_phy_offset > 0:
            store_i64(self._base + L.INDEX_BEGIN_PHY_OFFSET_OFFSET, end_phy_offset)
            store_i64(self._base + L.INDEX_END_PHY_OFFSET_OFFSET, end_phy_offset)
        if end_timestamp > 0:
            store_i64(self._base + L.INDEX_BEGIN_TIMESTAMP_OFFSET, end_timestamp)
            store_i64(self._base + L.INDEX_END_TIMESTAMP_OFFSET, end_timestamp)

    def settle(self):
        """Store the count of an untouched file: RocketMQ's flush writes 1 where 0 stood."""
        self._check()
        store_i32(self._base + L.INDEX_COUNT_OFFSET, self._count())

    # ---- put ----

    cdef int _put(self, const Pending *block, int count) noexcept nogil:
        """Append entries; returns how many fitted. The header comes last. Source: IndexFile#putKey."""
        cdef int32_t number = self._count(), previous, slots = 0
        cdef int64_t begin_timestamp = load_i64(self._base + L.INDEX_BEGIN_TIMESTAMP_OFFSET), diff
        cdef int fitting = <int>max(<int64_t>0, min(<int64_t>count, <int64_t>self._limit - number)), i
        cdef const Pending *item
        cdef uint8_t *slot
        cdef uint8_t *entry = self._entry(number)
        if fitting == 0:
            return 0
        for i in range(fitting):
            item = &block[i]
            slot = self._slot(item.key_hash)
            previous = load_i32(slot)
            if previous <= 0 or previous > number:
                previous = 0
            diff = 0
            if begin_timestamp > 0 and item.store_timestamp > begin_timestamp:
                # Unsigned: the difference of hostile times may not overflow.
                diff = <int64_t>((<unsigned long long>item.store_timestamp - <unsigned long long>begin_timestamp)
                                 // 1000)
                diff = min(diff, TIME_DIFF_LIMIT)
            store_i32(entry + L.ENTRY_KEY_HASH_OFFSET, item.key_hash)
            store_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET, item.phy_offset)
            store_i32(entry + L.ENTRY_TIME_DIFF_OFFSET, <int32_t>diff)
            store_i32(entry + L.ENTRY_PREVIOUS_OFFSET, previous)
            store_i32(slot, number)
            if number <= 1:
                begin_timestamp = item.store_timestamp
                store_i64(self._base + L.INDEX_BEGIN_PHY_OFFSET_OFFSET, item.phy_offset)
                store_i64(self._base + L.INDEX_BEGIN_TIMESTAMP_OFFSET, begin_timestamp)
            if previous == 0 or self._count_every_put:
                slots += 1
            number += 1
            entry += L.ENTRY_SIZE
        store_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET,
                  <int32_t>(<uint32_t>load_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET) + <uint32_t>slots))
        store_i32(self._base + L.INDEX_COUNT_OFFSET, number)
        store_i64(self._base + L.INDEX_END_PHY_OFFSET_OFFSET, block[fitting - 1].phy_offset)
        store_i64(self._base + L.INDEX_END_TIMESTAMP_OFFSET, block[fitting - 1].store_timestamp)
        return fitting

    def put(self, const int32_t[::1] key_hashes not None, const int64_t[::1] phy_offsets not None,
            const int64_t[::1] store_timestamps not None):
        """Append entries in order; returns how many fitted. Arrays of one length; no hash may be negative."""
        cdef Py_ssize_t i, count = key_hashes.shape[0]
        cdef Pending[KEYS_AHEAD] block
        cdef int k, size, done
        self._check()
        if not self._writable:
            raise ValueError("index file is read only")
        if phy_offsets.shape[0] != count or store_timestamps.shape[0] != count:
            raise ValueError("key_hashes, phy_offsets and store_timestamps must have one length")
        for i in range(count):
            if key_hashes[i] < 0:
                raise ValueError(f"key_hashes[{i}] is negative")
        i = 0
        self._users += 1
        with nogil:
            while i < count:
                size = <int>min(<Py_ssize_t>KEYS_AHEAD, count - i)
                for k in range(size):
                    rmq_prefetch(self._slot(key_hashes[i + k]))
                    block[k].key_hash = key_hashes[i + k]
                    block[k].phy_offset = phy_offsets[i + k]
                    block[k].store_timestamp = store_timestamps[i + k]
                done = self._put(block, size)
                i += done
                if done < size:
                    break
        self._leave()
        return i

    def put_rows(self, RecordBatch batch not None, int32_t row, int32_t key, *, bint index_tags=False):
        """Index the rows of a scanned batch from (row, key) on; returns the (row, key) to go on with in the next file.

        A returned row equal to len(batch) means all are in. `key` counts the keys of a row that are done, in RocketMQ's
        order: UNIQ_KEY, then KEYS from left to right, then (index_tags) its tags. A row that meets a full file stops
        there even when it has no keys, unless all its keys are in. ROLLBACK messages have none. Source:
        IndexService#buildIndex.
        """
        cdef Pending[KEYS_AHEAD] block
        cdef int32_t next_row, next_key
        cdef int count, done
        self._check()
        if not self._writable:
            raise ValueError("index file is read only")
        if row < 0 or key < 0:
            raise ValueError("row and key must not be negative")
        self._users += 1
        with nogil:
            while row < batch.count and self._count() < self._limit:
                next_row, next_key = row, key
                count = self._gather(batch, &next_row, &next_key, index_tags, block)
                done = self._put(block, count)
                if done < count:
                    row, key = block[done].row, block[done].key
                elif count and self._count() >= self._limit:
                    # Rows without keys behind the last entry meet a full file too.
                    row = block[count - 1].row + (1 if block[count - 1].is_last else 0)
                    key = 0 if block[count - 1].is_last else block[count - 1].key + 1
                else:
                    row, key = next_row, next_key
            if key > 0 and row < batch.count:
                next_row, next_key = row, key
                count = self._gather(batch, &next_row, &next_key, index_tags, block)
                if count == 0 or block[0].row > row:
                    row, key = row + 1, 0
        self._leave()
        return row, key

    cdef int _gather(self, RecordBatch batch, int32_t *row, int32_t *key, bint index_tags,
                     Pending *block) noexcept nogil:
        """Entries of the rows from (*row, *key) on, at most KEYS_AHEAD, and where to go on; memory is asked for their
        slots. Returns how many."""
        cdef RecordRow *record
        cdef const RecordRow *other = NULL
        cdef int32_t seed = 0, tags_seed, at, hashed
        cdef int count = 0, before
        cdef const uint8_t *cursor
        cdef const uint8_t *end
        cdef const uint8_t *piece
        cdef int64_t size
        cdef bint room = True
        while row[0] < batch.count:
            record = &batch.rows[row[0]]
            before = count
            if record.sys_flag & L.SYS_FLAG_TRANSACTION_MASK != L.SYS_FLAG_ROLLBACK:
                if other == NULL or other.topic_size != record.topic_size or memcmp(
                        other.base + other.topic_position, record.base + record.topic_position, record.topic_size):
                    # Every key's hash begins with that of `topic#`.
                    seed = rmq_hash_utf8(record.base + record.topic_position, record.topic_size, 0)
                    seed = <int32_t>(31 * <uint32_t>seed + <uint32_t>HASH_OF_SEPARATOR)
                    other = record
                at = 0
                if record.uniq_key_size > 0:
                    hashed = key_hash_of(rmq_hash_utf8(record.base + record.uniq_key_position, record.uniq_key_size,
                                                       seed))
                    rmq_prefetch(self._slot(hashed))
                    room = _add(block, &count, record, row[0], &at, key[0], hashed)
                if room and record.keys_size > 0:
                    cursor = record.base + record.keys_position
                    end = cursor + record.keys_size
                    while room and next_key(&cursor, end, &piece, &size):
                        hashed = key_hash_of(rmq_hash_utf8(piece, size, seed))
                        rmq_prefetch(self._slot(hashed))
                        room = _add(block, &count, record, row[0], &at, key[0], hashed)
                if room and index_tags and record.tags_size > 0:
                    # The key is "T#tags" behind "topic#": three characters more.
                    tags_seed = <int32_t>(31 * (31 * <uint32_t>seed + 84) + <uint32_t>HASH_OF_SEPARATOR)
                    hashed = key_hash_of(rmq_hash_utf8(record.base + record.tags_position, record.tags_size, tags_seed))
                    rmq_prefetch(self._slot(hashed))
                    room = _add(block, &count, record, row[0], &at, key[0], hashed)
                if not room:
                    key[0] = at
                    return count
                if count > before:
                    block[count - 1].is_last = True
            row[0] += 1
            key[0] = 0
        return count

    # ---- select ----

    cdef bint _select(self, int32_t key_hash, int64_t max_num, int64_t begin, int64_t end,
                      OffsetList *out) noexcept nogil:
        """RocketMQ's walk of one chain, newest first, appended to *out; False when memory is short.

        Links only go back (previous < position), so the loop ends on any bytes. Source: IndexFile#selectPhyOffset.
        """
        cdef int32_t count = self._count(), position, previous, diff
        cdef int64_t base_ms, stored_ms, found = 0
        cdef const uint8_t *entry
        position = load_i32(self._slot(key_hash))
        if position <= 0 or position > count or position >= self.index_num or count <= 1:
            return True
        base_ms = load_i64(self._base + L.INDEX_BEGIN_TIMESTAMP_OFFSET)
        while found < max_num:
            entry = self._entry(position)
            diff = load_i32(entry + L.ENTRY_TIME_DIFF_OFFSET)
            if diff < 0:
                break
            stored_ms = <int64_t>(<unsigned long long>base_ms + <unsigned long long>diff * 1000)
            if load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) == key_hash and begin <= stored_ms <= end:
                if not _append(out, load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)):
                    return False
                found += 1
            previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
            if previous <= 0 or previous >= position or stored_ms < begin:
                break
            position = previous
        return True

    cdef bint _collect(self, int32_t key_hash, OffsetList *out) noexcept nogil:
        """Every phy offset of one key hash, whatever its time. A slot ahead of the count is followed: beside a writer
        the header comes last, and what the offset points to is compared anyway."""
        cdef int32_t position, previous
        cdef const uint8_t *entry
        position = load_i32(self._slot(key_hash))
        while 0 < position < self.index_num:
            entry = self._entry(position)
            if load_i32(entry + L.ENTRY_KEY_HASH_OFFSET) == key_hash:
                if not _append(out, load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)):
                    return False
            previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
            if previous >= position:
                break
            position = previous
        return True

    cdef void _prefetch(self, const int32_t *key_hashes, Py_ssize_t count) noexcept nogil:
        """Ask memory for the slots of up to KEYS_AHEAD keys, then for their newest entries, then for those before, so
        that the waits overlap."""
        cdef const uint8_t *slots[KEYS_AHEAD]
        cdef int32_t newest[KEYS_AHEAD]
        cdef int32_t position, previous
        cdef Py_ssize_t i
        for i in range(count):
            slots[i] = self._slot(key_hashes[i])
            rmq_prefetch(slots[i])
        for i in range(count):
            position = load_i32(slots[i])
            newest[i] = position if 0 < position < self.index_num else 0
            rmq_prefetch(self._entry(newest[i]))
            rmq_prefetch(self._entry(newest[i]) + L.ENTRY_SIZE - 1)
        for i in range(count):
            previous = load_i32(self._entry(newest[i]) + L.ENTRY_PREVIOUS_OFFSET)
            if 0 < previous < newest[i]:
                rmq_prefetch(self._entry(previous))
                rmq_prefetch(self._entry(previous) + L.ENTRY_SIZE - 1)

    cdef object _walk(self, const int32_t[::1] key_hashes, bint raw, int64_t max_num, int64_t begin, int64_t end,
                      const int32_t[::1] found):
        """(counts, phy offsets) of each key's chain: RocketMQ's walk when raw, else every entry."""
        cdef Py_ssize_t i, keys = key_hashes.shape[0]
        cdef OffsetList out
        cdef int64_t before
        cdef int32_t newest
        cdef bint ok = True
        self._check()
        for i in range(keys):
            if key_hashes[i] < 0:
                raise ValueError(f"key_hashes[{i}] is negative")
        if found is not None and found.shape[0] != keys:
            raise ValueError("found must have one number per key")
        counts = np.empty(keys, np.int32)
        cdef int32_t[::1] count = counts
        memset(&out, 0, sizeof(out))
        self._users += 1
        try:
            with nogil:
                while True:
                    newest = self._count()
                    out.count = 0
                    for i in range(keys):
                        if i % KEYS_AHEAD == 0:
                            self._prefetch(&key_hashes[i], min(<Py_ssize_t>KEYS_AHEAD, keys - i))
                        before = out.count
                        if raw:
                            ok = self._select(key_hashes[i], max_num - (found[i] if found is not None else 0), begin,
                                              end, &out)
                        else:
                            ok = self._collect(key_hashes[i], &out)
                        if not ok:
                            break
                        count[i] = <int32_t>(out.count - before)
                    if not ok or self._count() >= newest:
                        break  # else a recovery beside us took entries back, maybe under our feet
            if not ok:
                raise MemoryError()
            return counts, _to_array(&out)
        finally:
            self._leave()
            free(out.items)

    def select(self, const int32_t[::1] key_hashes not None, int64_t max_num, int64_t begin, int64_t end,
               const int32_t[::1] found=None):
        """Raw answers for a batch of key hashes: (counts int32, phy offsets int64), each key's newest first.

        max_num caps each key's answers, less found[i] that it has from newer files. No hash may be negative.
        """
        return self._walk(key_hashes, True, max_num, begin, end, found)

    def collect(self, const int32_t[::1] key_hashes not None):
        """Every entry of the key hashes: (counts int32, phy offsets int64), whatever its time. For exact queries."""
        return self._walk(key_hashes, False, 0, 0, 0, None)

    # ---- whole file ----

    def entries_of(self, int64_t phy_offset):
        """How many of the last entries point to phy_offset: the keys of that record which are in this file."""
        cdef int32_t position, count = 0
        self._check()
        position = self._count() - 1
        while position > 0 and load_i64(self._entry(position) + L.ENTRY_PHY_OFFSET_OFFSET) == phy_offset:
            count += 1
            position -= 1
        return count

    def restore(self, const uint8_t[::1] header not None):
        """Make the file what it was when it had this header: entries below its count stand, slots are recomputed from
        them, the rest is cleared. Returns "" or what is wrong with the entries; then nothing was changed.
        """
        cdef int32_t count, i, key_hash, previous, slots = 0
        cdef int64_t slot_bytes = <int64_t>self.hash_slot_num * L.INDEX_SLOT_SIZE
        cdef uint8_t *entry
        self._check()
        if not self._writable or header.shape[0] != L.INDEX_HEADER_SIZE:
            raise ValueError("needs a writable file and a whole header")
        count = load_i32(&header[L.INDEX_COUNT_OFFSET])
        if count > self.index_num:
            return "entry count of the header is out of range"
        table = np.zeros(self.hash_slot_num, np.int32)
        cdef int32_t[::1] newest = table
        for i in range(1, count):
            entry = self._entry(i)
            key_hash = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET)
            previous = load_i32(entry + L.ENTRY_PREVIOUS_OFFSET)
            if key_hash < 0 or previous != newest[key_hash % self.hash_slot_num]:
                return f"entry {i} does not link to the newest entry of its slot"
            newest[key_hash % self.hash_slot_num] = i
        with nogil:
            for i in range(self.hash_slot_num):
                store_i32(self._base + L.INDEX_HEADER_SIZE + <int64_t>i * L.INDEX_SLOT_SIZE, newest[i])
            memcpy(self._base, &header[0], L.INDEX_HEADER_SIZE)
        return ""

    def counts_every_put(self):
        """Whether the header can only come from RocketMQ <= 4.7.0: it counts a slot for an entry that has a link."""
        cdef int32_t i, count
        self._check()
        count = self._count()
        if load_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET) != count - 1:
            return False
        for i in range(1, count):
            if load_i32(self._entry(i) + L.ENTRY_PREVIOUS_OFFSET) != 0:
                return True
        return False

    def header(self):
        """The 40 header bytes."""
        self._check()
        return bytes(self._base[:L.INDEX_HEADER_SIZE])

    def fits(self):
        """Whether the bytes look like a file of this geometry: every entry links to the newest of its slot before it,
        every slot holds its newest entry, and nothing follows. Cost: one pass over slots and entries.
        """
        cdef int32_t count, i, key_hash
        cdef const uint8_t *entry
        self._check()
        count = self._count()
        entry = self._entry(0)
        if load_i64(entry) != 0 or load_i64(entry + 8) != 0 or load_i32(entry + 16) != 0:
            return False
        if count < self.index_num and load_i64(self._entry(count)) != 0:
            return False
        table = np.zeros(self.hash_slot_num, np.int32)
        cdef int32_t[::1] newest = table
        for i in range(1, count):
            entry = self._entry(i)
            key_hash = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET)
            if key_hash < 0 or load_i32(entry + L.ENTRY_PREVIOUS_OFFSET) != newest[key_hash % self.hash_slot_num]:
                return False
            newest[key_hash % self.hash_slot_num] = i
        for i in range(self.hash_slot_num):
            if load_i32(self._base + L.INDEX_HEADER_SIZE + <int64_t>i * L.INDEX_SLOT_SIZE) != newest[i]:
                return False
        return True


def geometry_candidates(const uint8_t[::1] data not None, int limit=16):
    """(hash_slot_num, index_num) pairs that the file's length and its newest entry allow, at most `limit`.

    Empty when the header's count is no count of a used file. Cost: one probe per pair that the length allows.
    """
    cdef int64_t quarter = (<int64_t>data.shape[0] - L.INDEX_HEADER_SIZE) // 4, num, slots
    cdef int32_t count, key_hash
    cdef int64_t end_phy_offset
    cdef const uint8_t *entry
    cdef list found = []
    if data.shape[0] < L.INDEX_HEADER_SIZE + 4 + 2 * L.ENTRY_SIZE or (data.shape[0] - L.INDEX_HEADER_SIZE) % 4:
        return found
    count = load_i32(&data[L.INDEX_COUNT_OFFSET])
    end_phy_offset = load_i64(&data[L.INDEX_END_PHY_OFFSET_OFFSET])
    if count < 2:
        return found
    for num in range(count, min(quarter // 5, <int64_t>0x7FFFFFFF) + 1):
        slots = quarter - 5 * num
        if slots < 1 or slots > 0x7FFFFFFF:
            continue
        entry = &data[data.shape[0] - (num - count + 1) * L.ENTRY_SIZE]
        key_hash = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET)
        if key_hash < 0 or load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET) != end_phy_offset:
            continue
        if load_i32(&data[L.INDEX_HEADER_SIZE + (key_hash % slots) * L.INDEX_SLOT_SIZE]) == count - 1:
            found.append((int(slots), int(num)))
            if len(found) >= limit:
                break
    return found
