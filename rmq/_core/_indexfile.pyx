# SPDX-License-Identifier: Apache-2.0
"""Index files under a borrowed pointer. Layout: docs/format/indexfile.md.

Source: RocketMQ IndexHeader, IndexFile#putKey, IndexFile#selectPhyOffset, IndexService#buildIndex.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

cimport rmq._core._layout as L
from rmq._core._answerlists cimport AnswerLists
from rmq._core._bytes cimport load_i32, load_i64, read_published_i32, read_published_i64, store_i32, store_i64
from rmq._core._indexfit cimport first_unlinked, fits
from rmq._core._indexput cimport KeyBlock, gather, put_hashed, put_one_hashed
from rmq._core._indexwalk cimport OffsetList, Question, count_of, may_be_cut, set_index_bytes, walk, walk_one
from rmq._core._javahash cimport hash_of_str, key_hash_of
from rmq._core._recordbatch cimport RecordBatch
from rmq._core._sidecar cimport ANSWERED, DAMAGED, Outcome, SidecarView

import numpy as np

cdef extern from "populate.h" nogil:
    void rmq_populate(uint8_t *begin, int64_t size) noexcept

cdef enum:
    FEW_ANSWERS = 32                # of one key, that need no memory
    SLOTS_OF_A_KEY = 1365           # 4/3 of those of a page: so many keys touch more than half of the pages
    BYTES_TOGETHER = 16384          # of entries: fewer are not worth a call of the system
    PUTS_BETWEEN = 64               # two looks at a header, of which a file that counts every put is still known
cdef int32_t INT32_LIMIT = 0x7FFFFFFF

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1


cdef inline bint _is_plain(object number, int64_t *value) except -1:
    """Whether it is an int, of no other class, of 64 bits; then *value."""
    cdef int overflow = 0
    if type(number) is not int:
        return False
    value[0] = PyLong_AsLongLongAndOverflow(number, &overflow)
    return overflow == 0


cdef int _check_hashes(const int32_t[::1] key_hashes) except -1:
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    for i in range(key_hashes.shape[0]):
        signs |= key_hashes[i]
    if signs < 0:
        i = int(np.argmax(np.asarray(key_hashes) < 0))
        raise ValueError(f"key_hashes[{i}] is negative")
    return 0


cdef list _listed(const int64_t *items, int64_t count):
    """No comprehension: where its list cannot grow, Cython 3.3 lets go of the item twice."""
    cdef list found = [None] * count
    cdef int64_t i
    for i in range(count):
        found[i] = items[i]
    return found


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
@cython.no_gc_clear
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
        set_index_bytes(&self._file, self._base, hash_slot_num, index_num)
        self._file.count_every_put = count_every_put
        self._writable = writable
        self.hash_slot_num = hash_slot_num
        self.index_num = index_num

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
        return self._file.entries + <int64_t>number * L.ENTRY_SIZE

    cdef int32_t _count(self) noexcept nogil:
        return count_of(&self._file)

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
        return read_published_i64(self._base + L.INDEX_END_PHY_OFFSET_OFFSET)

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
        self._file.limit = <int32_t>max(<int64_t>1, min(entries, <int64_t>self.index_num))

    @property
    def room(self):
        """Entries that can be put below the limit."""
        self._check()
        return max(0, self._file.limit - self._count())

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

    cdef int _check_put(self) except -1:
        self._check()
        if not self._writable:
            raise ValueError("index file is read only")
        return 0

    cdef void _expect(self, int64_t keys) noexcept nogil:
        """So many keys are about to be put: the pages that they will touch get into memory, hardly any more."""
        cdef int64_t count = self._count(), begin, end
        begin = max(self._present, count * L.ENTRY_SIZE)
        end = min(count + keys, <int64_t>self._file.limit) * L.ENTRY_SIZE
        if end - begin >= BYTES_TOGETHER:
            rmq_populate(self._file.entries + begin, end - begin)
            self._present = end
        if not self._has_slots and keys >= self.hash_slot_num // SLOTS_OF_A_KEY and end - begin >= BYTES_TOGETHER:
            rmq_populate(self._file.slots, <int64_t>self.hash_slot_num * L.INDEX_SLOT_SIZE)
            self._has_slots = True

    def put(self, const int32_t[::1] key_hashes not None, const int64_t[::1] phy_offsets not None,
            const int64_t[::1] store_timestamps not None):
        """Append entries in order; returns how many fitted. Arrays of one length; no hash may be negative."""
        cdef Py_ssize_t count = key_hashes.shape[0]
        self._check_put()
        if phy_offsets.shape[0] != count or store_timestamps.shape[0] != count:
            raise ValueError("key_hashes, phy_offsets and store_timestamps must have one length")
        _check_hashes(key_hashes)
        if count == 0:
            return 0
        self._users += 1
        with nogil:
            self._expect(count)
            count = put_hashed(&self._file, &key_hashes[0], &phy_offsets[0], &store_timestamps[0], count)
        self._leave()
        return count

    def put_one(self, key, phy_offset, store_timestamp):
        """Append one entry for a whole index key. False: there is no room below the limit, or an argument is not just a
        str and two int of 64 bits, or the file is read only; nothing was done, and put tells more."""
        cdef int64_t offset, timestamp
        if type(key) is not str or not _is_plain(phy_offset, &offset) or \
                not _is_plain(store_timestamp, &timestamp) or not self._writable:
            return False
        self._check()
        # With the GIL: to let it go and take it again takes as long as the entry.
        return put_one_hashed(&self._file, key_hash_of(hash_of_str(key, 0)), offset, timestamp)

    def put_rows(self, RecordBatch batch not None, int32_t row, int32_t key, *, bint index_tags=False):
        """Index the rows of a scanned batch from (row, key) on; returns the (row, key) to go on with in the next file.

        A returned row equal to len(batch) means all are in. `key` counts the keys of a row that are done, in RocketMQ's
        order: UNIQ_KEY, then KEYS from left to right, then (index_tags) its tags. A row that meets a full file stops
        there even when it has no keys, unless all its keys are in. ROLLBACK messages have none. Source:
        IndexService#buildIndex.
        """
        cdef KeyBlock block
        cdef int32_t next_row, next_key
        cdef int64_t done
        self._check_put()
        if row < 0 or key < 0:
            raise ValueError("row and key must not be negative")
        self._users += 1
        with nogil:
            while row < batch.count and self._count() < self._file.limit:
                next_row, next_key = row, key
                gather(batch, &next_row, &next_key, index_tags, &block)
                # As if the rows to come had as many keys each.
                self._expect(block.count + <int64_t>block.count * (batch.count - next_row) // max(1, next_row - row))
                done = put_hashed(&self._file, block.key_hashes, block.phy_offsets, block.store_timestamps, block.count)
                if done < block.count:
                    row, key = block.rows[done], block.keys[done]
                elif done and self._count() >= self._file.limit:
                    # Rows without keys behind the last entry meet a full file too.
                    row, key = block.rows[done - 1], block.keys[done - 1] + 1
                    if next_row > row:
                        row, key = row + 1, 0
                else:
                    row, key = next_row, next_key
            if key > 0 and row < batch.count:
                next_row, next_key = row, key
                gather(batch, &next_row, &next_key, index_tags, &block)
                if block.count == 0 or block.rows[0] > row:
                    row, key = row + 1, 0
        self._leave()
        return row, key

    # ---- select ----

    cdef int _answer(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                     OffsetList *out) except -1:
        """Ask the sidecar or walk the chains, without the GIL; behind what is in *out, the caller's to free."""
        cdef int32_t newest
        cdef int64_t before = out.count
        cdef bint ok
        cdef SidecarView sidecar = self.sidecar     # another thread may take it away
        cdef Outcome outcome = DAMAGED
        self._users += 1
        with nogil:
            while True:
                newest = self._count()
                if sidecar is not None and newest == self.index_num:
                    outcome = sidecar.answer(question, key_hashes, keys, counts, out)
                    if outcome == ANSWERED and self._count() == newest:
                        ok = True
                        break
                out.count = before
                ok = walk(&self._file, question, key_hashes, keys, counts, out)
                if not ok or self._count() >= newest:
                    break  # else a recovery beside us took entries back, maybe under our feet
        self._leave()
        if not ok:
            out.count = before
            raise MemoryError()
        return 0

    cdef int _answer_one(self, const Question *question, int32_t key_hash, int64_t *few) noexcept nogil:
        """How many answers one key has; -1: more than FEW_ANSWERS."""
        cdef int32_t newest
        cdef int count
        while True:                         # as in _answer
            newest = self._count()
            count = walk_one(&self._file, question, key_hash, few, FEW_ANSWERS)
            if self._count() >= newest:
                return count

    cdef object _walk(self, const int32_t[::1] key_hashes, Question *question, const int32_t[::1] found):
        """(counts, phy offsets) of each key's chain."""
        cdef Py_ssize_t keys = key_hashes.shape[0]
        cdef OffsetList out
        self._check()
        _check_hashes(key_hashes)
        if found is not None and found.shape[0] != keys:
            raise ValueError("found must have one number per key")
        counts = np.empty(keys, np.int32)
        if keys == 0:
            return counts, np.empty(0, np.int64)
        cdef int32_t[::1] count = counts
        question.found = &found[0] if found is not None else NULL
        memset(&out, 0, sizeof(out))
        try:
            self._answer(question, &key_hashes[0], keys, &count[0], &out)
            return counts, _to_array(&out)
        finally:
            free(out.items)

    def select(self, const int32_t[::1] key_hashes not None, int64_t max_num, int64_t begin, int64_t end,
               const int32_t[::1] found=None):
        """Raw answers for a batch of key hashes: (counts int32, phy offsets int64), each key's newest first.

        max_num caps each key's answers, less found[i] that it has from newer files. No hash may be negative.
        """
        cdef Question question
        question.is_raw, question.max_num, question.begin, question.end = True, max_num, begin, end
        return self._walk(key_hashes, &question, found)

    def select_into(self, AnswerLists answers not None, const int32_t[::1] key_hashes not None, int64_t max_num,
                    int64_t begin, int64_t end):
        """select for the next keys of `answers`."""
        cdef Question question
        cdef Py_ssize_t keys = key_hashes.shape[0]
        self._check()
        _check_hashes(key_hashes)
        answers.expect(keys)
        if keys == 0:
            return
        question.is_raw, question.max_num, question.begin, question.end = True, max_num, begin, end
        question.found = NULL
        self._answer(&question, &key_hashes[0], keys, &answers.offsets[answers.done + 1], &answers.found)
        answers.end(keys)

    def select_one(self, key, max_num, begin, end):
        """Raw answers for one whole index key, a list; None when an argument is not just a str and int of 64 bits,
        max_num >= 0, or the file may be shorter than its map: select, and the system, tell more."""
        cdef Question question
        cdef OffsetList out
        cdef int64_t[FEW_ANSWERS] few
        cdef int32_t key_hash, count
        if type(key) is not str or not _is_plain(max_num, &question.max_num) or question.max_num < 0 or \
                not _is_plain(begin, &question.begin) or not _is_plain(end, &question.end):
            return None
        self._check()
        key_hash = key_hash_of(hash_of_str(key, 0))
        if may_be_cut(&self._file, key_hash):
            return None
        if self.sidecar is None:
            self._users += 1
            with nogil:
                count = self._answer_one(&question, key_hash, few)
            self._leave()
            if count >= 0:
                return _listed(few, count)
        question.is_raw, question.found = True, NULL
        memset(&out, 0, sizeof(out))
        try:
            self._answer(&question, &key_hash, 1, &count, &out)
            return _listed(out.items, out.count)
        finally:
            free(out.items)

    def collect(self, const int32_t[::1] key_hashes not None, int64_t begin=-9223372036854775808,
                int64_t end=9223372036854775807):
        """Every entry of the key hashes whose message may be stored in [begin, end], ms, and with a sidecar others too:
        (counts int32, phy offsets int64). For exact queries: right also where the clock went back.

        A slot ahead of the count is followed: beside a writer the header comes last, and what the offset points to is
        compared anyway.
        """
        cdef Question question
        question.is_raw, question.max_num, question.begin, question.end = False, INT32_LIMIT, begin, end
        return self._walk(key_hashes, &question, None)

    # ---- whole file ----

    def entries_of(self, int64_t phy_offset, bint first=False):
        """How many of the last, or of the first, entries point to phy_offset: keys of that record in this file."""
        cdef int32_t end, position, count = 0
        self._check()
        end = self._count()
        position = 1 if first else end - 1
        while 0 < position < end and load_i64(self._entry(position) + L.ENTRY_PHY_OFFSET_OFFSET) == phy_offset:
            count += 1
            position += 1 if first else -1
        return count

    def restore(self, const uint8_t[::1] header not None):
        """Give the file this header again: entries below its count stand, slots are recomputed from them. Returns "" or
        what is wrong with the entries; then nothing was changed. Entries behind are the caller's to clear.
        """
        cdef int32_t count, i, unlinked
        self._check()
        if not self._writable or header.shape[0] != L.INDEX_HEADER_SIZE:
            raise ValueError("needs a writable file and a whole header")
        count = load_i32(&header[L.INDEX_COUNT_OFFSET])
        if count > self.index_num:
            return "entry count of the header is out of range"
        table = np.zeros(self.hash_slot_num, np.int32)
        cdef int32_t[::1] newest = table
        self._users += 1
        with nogil:
            unlinked = first_unlinked(&self._file, count, &newest[0])
            if not unlinked:
                for i in range(self.hash_slot_num):
                    store_i32(self._file.slots + <int64_t>i * L.INDEX_SLOT_SIZE, newest[i])
                memcpy(self._base, &header[0], L.INDEX_HEADER_SIZE)
        self._leave()
        return f"entry {unlinked} does not link to the newest entry of its slot" if unlinked else ""

    def counts_every_put(self):
        """Whether the header can only come from RocketMQ <= 4.7.0: it counts a slot for an entry that has a link.

        Of a file that is being put, too: one that counts used slots may be a slot ahead of its count, for a moment.
        """
        cdef int32_t i = 1, slots, count, missing, linked = 0
        self._check()
        slots = read_published_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET)
        count = self._count()
        if not count - PUTS_BETWEEN <= slots <= count:
            return False
        missing = count - slots
        self._users += 1
        with nogil:
            while i < count and linked <= missing:
                linked += load_i32(self._entry(i) + L.ENTRY_PREVIOUS_OFFSET) != 0
                i += 1
        self._leave()
        if linked != 1 or missing != 1:
            return linked > missing
        return self._count() == count and load_i32(self._base + L.INDEX_HASH_SLOT_COUNT_OFFSET) == slots

    def header(self):
        """The 40 header bytes."""
        self._check()
        return bytes(self._base[:L.INDEX_HEADER_SIZE])

    def fits(self, bint being_put=False):
        """Whether the bytes look like a file of this geometry: every entry links to the newest of its slot before it,
        every slot holds its newest entry, and nothing follows. being_put: but for what an IndexFile#putKey that has not
        ended may leave by the order of its stores. Cost: one pass over slots and entries.
        """
        cdef bint is_fitting
        self._check()
        table = np.zeros(self.hash_slot_num, np.int32)
        cdef int32_t[::1] newest = table
        self._users += 1
        with nogil:
            is_fitting = fits(&self._file, &newest[0], being_put)
        self._leave()
        return is_fitting
