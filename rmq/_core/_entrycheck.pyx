# SPDX-License-Identifier: Apache-2.0
"""Index entries beside the records of a pass over the log; what an index file says of itself.

Source: RocketMQ IndexFile#putKey, IndexService#buildIndex.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, qsort, realloc
from libc.string cimport memcpy, memset

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64
from rmq._core._indexfile cimport IndexFileView
from rmq._core._javahash cimport key_hash_of, rmq_hash_utf8, seed_of_tags, seed_of_topic
from rmq._core._record cimport RecordRow, find_properties, next_key

import numpy as np

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept

cdef enum:
    SLOTS_AHEAD = 32            # a power of two; their newest entries, of a full file 20 MB, are asked for

cdef int64_t FOUND_LIMIT = 65536                # entries of one record that are compared with its keys
cdef int64_t FAULTS_HELD = 65536                # of index files that hold nothing right, until they are taken
cdef int32_t TIME_DIFF_LIMIT = 0x7FFFFFFF


cdef void *_with_room(void *items, int64_t count, int64_t *room, size_t size) noexcept nogil:
    """The items, moved maybe, with room for one more of a size behind `count`; NULL: they stay as they are."""
    cdef int64_t more = room[0] * 2 if room[0] else 64
    if count < room[0]:
        return items
    items = realloc(items, <size_t>more * size)
    if items != NULL:
        room[0] = more
    return items


cdef bint add_fault(FaultList *list_, int64_t kind, int64_t file, int64_t number, int64_t phy_offset, int64_t a,
                  int64_t b) noexcept nogil:
    cdef Fault *items
    if 0 < list_.most <= list_.count:
        list_.omitted += 1
        return True
    items = <Fault *>_with_room(list_.items, list_.count, &list_.room, sizeof(Fault))
    if items == NULL:
        return False
    list_.items = items
    list_.items[list_.count].kind = kind
    list_.items[list_.count].file = file
    list_.items[list_.count].number = number
    list_.items[list_.count].phy_offset = phy_offset
    list_.items[list_.count].a = a
    list_.items[list_.count].b = b
    list_.count += 1
    return True


cdef object take_all(FaultList *list_):
    """The faults as an int64 array [n, 6] of (kind, file, number, phy_offset, a, b); the list is empty after."""
    result = np.empty((list_.count, 6), np.int64)
    cdef int64_t[:, ::1] out = result
    if list_.count:
        memcpy(&out[0, 0], list_.items, <size_t>list_.count * sizeof(Fault))
        list_.count = 0
    return result


cdef inline int64_t _entry_phy_offset(IndexFileView view, int32_t number) noexcept nogil:
    return load_i64(view._entry(number) + L.ENTRY_PHY_OFFSET_OFFSET)


cdef inline bint _is_odd(IndexFileView view, int32_t number, int32_t limit) noexcept nogil:
    """Whether an entry lies higher in the log than both entries behind it, which go on from the one before: it is the
    one that breaks the order.
    """
    cdef int64_t phy_offset = _entry_phy_offset(view, number), following
    if number + 1 >= limit:
        return False
    following = _entry_phy_offset(view, number + 1)
    if following >= phy_offset or (number > 1 and following < _entry_phy_offset(view, number - 1)):
        return False
    return number + 2 >= limit or _entry_phy_offset(view, number + 2) < phy_offset


cdef int64_t _seconds(int64_t begin, int64_t store_timestamp) noexcept nogil:
    """Source: IndexFile#putKey. Unsigned: the difference of hostile times may not overflow."""
    if begin <= 0 or store_timestamp <= begin:
        return 0
    return min(<int64_t>((<uint64_t>store_timestamp - <uint64_t>begin) // 1000), <int64_t>TIME_DIFF_LIMIT)


cdef int _by_hash(const void *one, const void *other) noexcept nogil:
    cdef int32_t first = (<const KeyHash *>one).key_hash, second = (<const KeyHash *>other).key_hash
    return (first > second) - (first < second)


@cython.final
cdef class EntryCheck:
    def __cinit__(self, *, int64_t begin, int64_t required_end, bint is_lenient=True, bint index_tags=False):
        self.least = begin
        self.required_end = required_end
        self.is_lenient = is_lenient
        self.index_tags = index_tags

    def __dealloc__(self):
        free(self.hashes)
        free(self.found)
        free(self.faults.items)

    cdef bint _add_hash(self, int32_t key_hash) noexcept nogil:
        cdef KeyHash *items = <KeyHash *>_with_room(self.hashes, self.key_count, &self.key_room, sizeof(KeyHash))
        if items == NULL:
            return False
        self.hashes = items
        self.hashes[self.key_count].key_hash = key_hash
        self.hashes[self.key_count].is_found = False
        self.key_count += 1
        return True

    cdef bint _hash_keys(self, const RecordRow *row, bint tags) noexcept nogil:
        """Hashes of a row's keys in the order of IndexService#buildIndex; with its tags as the last one."""
        cdef int32_t seed
        cdef const uint8_t *cursor
        cdef const uint8_t *end
        cdef const uint8_t *piece
        cdef int64_t size
        self.key_count = 0
        if row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK == L.SYS_FLAG_ROLLBACK:
            return True
        seed = seed_of_topic(row.base + row.topic_position, row.topic_size)
        if row.uniq_key_size > 0 and not self._add_hash(key_hash_of(rmq_hash_utf8(
                row.base + row.uniq_key_position, row.uniq_key_size, seed))):
            return False
        if row.keys_size > 0:
            cursor = row.base + row.keys_position
            end = cursor + row.keys_size
            while next_key(&cursor, end, &piece, &size):
                if not self._add_hash(key_hash_of(rmq_hash_utf8(piece, size, seed))):
                    return False
        if tags and row.tags_size > 0:
            return self._add_hash(key_hash_of(rmq_hash_utf8(row.base + row.tags_position, row.tags_size,
                                                            seed_of_tags(seed))))
        return True

    cdef bint _find(self, int32_t key_hash) noexcept nogil:
        """Note the entry at hand as one of the row's."""
        cdef FoundEntry *items = <FoundEntry *>_with_room(self.found, self.found_count, &self.found_room,
                                                          sizeof(FoundEntry))
        if items == NULL:
            return False
        self.found = items
        self.found[self.found_count].key_hash = key_hash
        self.found[self.found_count].file = self.file
        self.found[self.found_count].number = self.entry
        self.found[self.found_count].is_right = False
        self.found_count += 1
        return True

    cdef int64_t _match(self) noexcept nogil:
        """Tell the entries that have one of the hashes, which are sorted then; returns of how many none has it."""
        cdef int64_t i, k, low, high, missing = 0
        if self.key_count == 0:
            return 0
        qsort(self.hashes, <size_t>self.key_count, sizeof(KeyHash), _by_hash)
        for k in range(self.found_count):
            low, high = 0, self.key_count
            while low < high:
                i = (low + high) // 2
                if self.hashes[i].key_hash < self.found[k].key_hash:
                    low = i + 1
                else:
                    high = i
            if low < self.key_count and self.hashes[low].key_hash == self.found[k].key_hash:
                self.found[k].is_right = self.hashes[low].is_found = True
        for i in range(self.key_count):
            if i > 0 and self.hashes[i].key_hash == self.hashes[i - 1].key_hash:
                self.hashes[i].is_found = self.hashes[i - 1].is_found
            missing += not self.hashes[i].is_found
        return missing

    cdef bint _judge(self, const RecordRow *row) noexcept nogil:
        """Compare the keys of a row with the entries that were found for it.

        An entry may come twice: RocketMQ indexes the last record again after a restart. Up to 4.9.0 properties are
        read by other rules, from 5.4.0 on tags have an entry: is_lenient lets both pass.
        """
        cdef int64_t i = 0, k, missing
        cdef bint is_same = self.found_count == self.key_count
        cdef RecordRow old
        while is_same and i < self.key_count:
            is_same = self.found[i].key_hash == self.hashes[i].key_hash
            i += 1
        if is_same:
            self.right += self.key_count
            return self._end_run() if self.key_count and self.has_run else True
        missing = self._match()
        if self.is_lenient:
            old = row[0]
            old.keys_size = old.uniq_key_size = old.tags_size = -1
            find_properties(&old, True)
            if missing:
                if not self._hash_keys(&old, False):
                    return False
                if self._match() == 0:
                    missing = 0
            if not self._hash_keys(&old, True):
                return False
            self._match()
            if not self._hash_keys(row, True):
                return False
            self._match()
        for k in range(self.found_count):
            if self.found[k].is_right:
                self.right += 1
            elif not add_fault(&self.faults, FAULT_NO_KEY, self.found[k].file, self.found[k].number, row.phy_offset,
                               self.found[k].key_hash, 0):
                return False
        if missing == 0:
            return True
        if row.phy_offset >= self.required_end:
            self.behind += missing
            return True
        if not self.has_run:
            self.has_run = True
            self.run.file = self.file
            self.run.number = self.entry
            self.run.phy_offset = row.phy_offset
            self.run.b = 0
        self.run.a = row.phy_offset
        self.run.b += missing
        return True

    cdef bint _add(self, int64_t kind, int64_t phy_offset, int64_t a, int64_t b) noexcept nogil:
        """A fault of the entry at hand."""
        return add_fault(&self.faults, kind, self.file, self.entry, phy_offset, a, b)

    cdef bint _end_run(self) noexcept nogil:
        self.has_run = False
        return add_fault(&self.faults, FAULT_MISSING, self.run.file, self.run.number, self.run.phy_offset, self.run.a,
                       self.run.b)

    def open_file(self, IndexFileView view not None, int64_t file, int32_t entry, int32_t limit, *,
                  int64_t begin_timestamp, int64_t first_begin_timestamp, bint is_last):
        """Go on at an entry of an index file, whose entries below `limit` are compared. file: a number of the caller's;
        begin_timestamp: the header's; first_begin_timestamp: what it was when entry 1 was put, -1 when not known.
        """
        view._check()
        if entry < 1 or limit > view.index_num or file < 0:
            raise ValueError("entries lie outside the file")
        self.view, self.file, self.entry, self.limit, self.is_last = view, file, entry, limit, is_last
        self.begin_timestamp, self.first_begin_timestamp = begin_timestamp, first_begin_timestamp

    @property
    def is_through(self):
        """Whether the entries of the file are, and another one follows."""
        return self.view is not None and self.entry >= self.limit and not self.is_last

    def pass_over(self, int64_t blind_end):
        """Judge no entries of records below a phy offset."""
        self.least = max(self.least, blind_end)

    cdef int check_file(self) except -1:
        if self.view is not None:
            self.view._check()
        return 0

    cdef int32_t compare(self, const RecordRow *rows, int32_t row, int32_t count) noexcept nogil:
        """Compare rows from `row` on with the entries of the file; returns the row that goes on in the next file, or
        once faults are taken, or the count; -1: no memory. Without a file all rows pass.
        """
        cdef const RecordRow *record
        cdef const uint8_t *at
        cdef int64_t phy_offset, stored, right
        if self.view is None:
            return count
        while row < count:
            record = &rows[row]
            if not self.is_under_way:
                self.found_count = 0
                self.is_under_way = True
                if not self._hash_keys(record, self.index_tags):
                    return -1
            while self.entry < self.limit:
                if self.faults.count >= FAULTS_HELD:
                    return row
                at = self.view._entry(self.entry)
                phy_offset = load_i64(at + L.ENTRY_PHY_OFFSET_OFFSET)
                if phy_offset < record.phy_offset:
                    if phy_offset >= self.least and not self._add(FAULT_NO_RECORD, phy_offset, 0, 0):
                        return -1
                elif phy_offset > record.phy_offset:
                    if not _is_odd(self.view, self.entry, self.limit):
                        break
                else:
                    stored = load_i32(at + L.ENTRY_TIME_DIFF_OFFSET)
                    right = _seconds(self.begin_timestamp if self.entry > 1 else self.first_begin_timestamp,
                                     record.store_timestamp)
                    if stored != right and (self.entry > 1 or self.first_begin_timestamp >= 0 or stored < 0) and \
                            not self._add(FAULT_TIME, phy_offset, stored, right):
                        return -1
                    if self.found_count < FOUND_LIMIT and not self._find(load_i32(at + L.ENTRY_KEY_HASH_OFFSET)):
                        return -1
                self.entry += 1
            if self.entry >= self.limit and not self.is_last:
                return row
            self.is_under_way = False
            if not self._judge(record):
                return -1
            row += 1
        return row

    def finish(self, int64_t end):
        """Behind the last record of a range that ends at `end`: entries that point into it point to no record. Returns
        whether the range's entries are through; else faults must be taken, or the next file opened. The open run of
        missing keys ends.
        """
        cdef int64_t phy_offset
        cdef bint ok = True
        if self.view is None:
            return True
        self.check_file()
        with nogil:
            while self.entry < self.limit and self.faults.count < FAULTS_HELD:
                phy_offset = _entry_phy_offset(self.view, self.entry)
                if phy_offset >= end and not _is_odd(self.view, self.entry, self.limit):
                    break
                if self.least <= phy_offset < end:
                    ok = self._add(FAULT_NO_RECORD, phy_offset, 0, 0)
                    if not ok:
                        break
                self.entry += 1
        if not ok:
            raise MemoryError()
        if self.entry < self.limit:
            return self.faults.count < FAULTS_HELD
        return self.is_last

    def take_faults(self, *, bint last=False):
        """Faults since the last call: int64 array [n, 6] of (FAULT_*, file, number, phy offset, a, b). FAULT_MISSING:
        a is the last record of the run, b how many keys; it comes when the run ends, or with `last`.
        """
        if last and self.has_run and not self._end_run():
            raise MemoryError()
        return take_all(&self.faults)


# ---- one index file by itself --------------------------------------------------------------------------------

cdef inline int32_t _slot_of(IndexFileView view, int32_t number) noexcept nogil:
    """The slot of an entry; 0 where its hash is negative."""
    return max(load_i32(view._entry(number) + L.ENTRY_KEY_HASH_OFFSET), 0) % view.hash_slot_num


def check_links(IndexFileView view not None, int64_t file, int32_t limit, const int64_t[::1] places not None, *,
                int64_t most, bint check_slots=True, bint is_growing=False):
    """What an index file says of itself: (faults, how many beyond the first `most`, first entries, used slots).

    Entries below `limit` are looked at: hash, link to the newest entry of the slot before it, ascending phy offsets;
    then, with check_slots, the slots (is_growing: a slot may name an entry at or past limit). first entries: for each
    of the ascending `places` the number of the first entry at or behind it, limit when none. faults: as of
    EntryCheck.take_faults. Cost: one pass, four bytes of memory for each slot, 48 for each fault that is kept.
    """
    cdef int32_t i, key_hash, stored, slot, used = 0
    cdef int32_t ahead[SLOTS_AHEAD]     # slots of entry i and those behind it
    cdef int64_t phy_offset, highest = -1, place = 0
    cdef const uint8_t *at
    cdef FaultList faults
    cdef bint ok = True
    view._check()
    if limit < 1 or limit > view.index_num or most < 1:
        raise ValueError("limit lies outside the file, or most is below 1")
    memset(&faults, 0, sizeof(faults))
    faults.most = most
    table = np.zeros(view.hash_slot_num, np.int32)
    firsts = np.full(places.shape[0], limit, np.int32)
    cdef int32_t[::1] newest = table, first = firsts
    try:
        with nogil:
            for i in range(1, min(limit, 1 + SLOTS_AHEAD)):
                ahead[i & (SLOTS_AHEAD - 1)] = _slot_of(view, i)
            for i in range(1, limit):
                at = view._entry(i)
                slot = ahead[i & (SLOTS_AHEAD - 1)]
                if i + SLOTS_AHEAD < limit:
                    ahead[i & (SLOTS_AHEAD - 1)] = _slot_of(view, i + SLOTS_AHEAD)
                    rmq_prefetch(&newest[ahead[i & (SLOTS_AHEAD - 1)]])
                key_hash = load_i32(at + L.ENTRY_KEY_HASH_OFFSET)
                phy_offset = load_i64(at + L.ENTRY_PHY_OFFSET_OFFSET)
                if phy_offset < highest or _is_odd(view, i, limit):
                    ok = add_fault(&faults, FAULT_ORDER, file, i, phy_offset, highest, 0)
                else:
                    highest = phy_offset
                    while place < first.shape[0] and places[place] <= phy_offset:
                        first[place] = i
                        place += 1
                if key_hash < 0:
                    ok = ok and add_fault(&faults, FAULT_HASH_RANGE, file, i, phy_offset, key_hash, 0)
                else:
                    stored = load_i32(at + L.ENTRY_PREVIOUS_OFFSET)
                    if stored != newest[slot]:
                        ok = ok and add_fault(&faults, FAULT_LINK, file, i, phy_offset, stored, newest[slot])
                    used += newest[slot] == 0
                    newest[slot] = i
                if not ok:
                    break
            if check_slots and ok:
                for i in range(view.hash_slot_num):
                    stored = load_i32(view._base + L.INDEX_HEADER_SIZE + <int64_t>i * L.INDEX_SLOT_SIZE)
                    if stored != newest[i] and not (is_growing and limit <= stored < view.index_num):
                        ok = add_fault(&faults, FAULT_SLOT, file, i, 0, stored, newest[i])
                        if not ok:
                            break
        if not ok:
            raise MemoryError()
        return take_all(&faults), faults.omitted, firsts, used
    finally:
        free(faults.items)
