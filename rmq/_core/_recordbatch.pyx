# SPDX-License-Identifier: Apache-2.0
"""The one scanner: a range of a segment to rows, and what is asked of rows. Rows borrow the segment's bytes.

Source: RocketMQ CommitLog#checkMessageAndReturnSize, MessageDecoder#decode.
"""
cimport cython
from cpython.buffer cimport PyBuffer_IsContiguous
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i64
from rmq._core._javahash cimport decode_utf8, key_hash_of, rmq_hash_utf8
from rmq._core._prefetch cimport (
    FRONTS_AHEAD,
    NEAR,
    TAILS_AHEAD,
    position_in,
    prefetch_ahead,
    prefetch_bytes,
    prefetch_front,
    prefetch_tail,
)
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport (
    CHECK_BODY_CRC,
    CHECK_RECORD_CRC,
    HASH_KEYS,
    PARSE_PROPERTIES,
    READS_ON,
    RecordRow,
    SCAN_FULL,
    SCAN_LIMIT,
    find_properties,
    next_key,
    parse_record,
    row_has_key,
)
from rmq._core._rowhash cimport RowHashes, hash_row

import numpy as np

cdef int32_t FIRST_ROOM = 32        # rows of a batch before it grows


cdef struct Span:
    const uint8_t *data         # borrowed; NULL for None
    int64_t size


cdef int _borrow(bytes data, Span *span) except -1:
    """The bytes of an object that outlives the span."""
    span.data = <const uint8_t *>PyBytes_AS_STRING(data) if data is not None else NULL
    span.size = len(data) if data is not None else 0
    return 0


cdef inline bint _is_span(const uint8_t *p, int64_t size, const Span *span) noexcept nogil:
    return size == span.size and memcmp(p, span.data, <size_t>size) == 0


cdef bint _is_named(const uint8_t *p, int64_t size, const Span *names, int32_t count) noexcept nogil:
    """Whether one of the names, which are sorted, has these bytes."""
    cdef int32_t low = 0, middle
    cdef int64_t order
    while low < count:
        middle = (low + count) // 2
        order = memcmp(p, names[middle].data, <size_t>min(size, names[middle].size)) or size - names[middle].size
        if order == 0:
            return True
        if order < 0:
            count = middle
        else:
            low = middle + 1
    return False


cdef inline bint _carries(const RecordRow *row, const Span *topic, const Span *key) noexcept nogil:
    return row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK != L.SYS_FLAG_ROLLBACK and \
        (topic.data == NULL or _is_span(row.base + row.topic_position, row.topic_size, topic)) and \
        row_has_key(row, key.data, key.size)


cdef bytes _as_read(const uint8_t *p, int64_t size):
    """UTF-8 of a key as it reads: what is malformed is U+FFFD."""
    return decode_utf8(p, size).encode()


cdef bint _has_keys(const RecordRow *row) noexcept nogil:
    cdef const uint8_t *cursor = row.base + row.keys_position
    cdef const uint8_t *piece
    cdef int64_t size
    return row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK != L.SYS_FLAG_ROLLBACK and (row.uniq_key_size > 0 or (
        row.keys_size > 0 and next_key(&cursor, cursor + row.keys_size, &piece, &size)))


cdef bint _is_ambiguous(const RecordRow *row) noexcept nogil:
    cdef RecordRow old = row[0]
    find_properties(&old, True)
    return old.keys_size != row.keys_size or old.uniq_key_size != row.uniq_key_size or \
        (row.keys_size > 0 and old.keys_position != row.keys_position) or \
        (row.uniq_key_size > 0 and old.uniq_key_position != row.uniq_key_position)


cdef inline bint _is_among(int32_t key_hash, const int32_t *hashes, Py_ssize_t count) noexcept nogil:
    """Binary search."""
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] < key_hash:
            low = middle + 1
        else:
            high = middle
    return low < count and hashes[low] == key_hash


@cython.final
cdef class RecordBatch:
    def __cinit__(self, int32_t capacity=8192):
        self.allow(capacity)
        self.stop = SCAN_FULL
        self._grow(min(capacity, FIRST_ROOM), False)

    def __dealloc__(self):
        free(self.rows)
        free(self.hashes)

    def __len__(self):
        return self.count

    def allow(self, int32_t rows):
        """From now on the capacity is so many rows. ValueError below 1."""
        if rows < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = rows

    cdef int _grow(self, int64_t room, bint with_hashes) except -1 nogil:
        """Room for so many rows; most batches hold few."""
        cdef RecordRow *rows = <RecordRow *>realloc(self.rows, <size_t>room * sizeof(RecordRow))
        cdef RowHashes *hashes = NULL
        cdef bint ok = rows != NULL
        if rows != NULL:
            self.rows = rows
        if ok and (with_hashes or self.hashes != NULL):
            hashes = <RowHashes *>realloc(self.hashes, <size_t>room * sizeof(RowHashes))
            ok = hashes != NULL
            if ok:
                self.hashes = hashes
        if not ok:
            with gil:
                raise MemoryError()
        self._room = <int32_t>room
        return 0

    cdef const uint8_t *_borrow_source(self, object source, int64_t *size) except? NULL:
        """First byte of a buffer that is kept until release()."""
        cdef object view = PyMemoryView_FromObject(source)
        cdef Py_buffer *buffer = PyMemoryView_GET_BUFFER(view)
        if not PyBuffer_IsContiguous(buffer, b"C"):
            raise ValueError("segment must be contiguous")
        self.release()
        self._source = view
        size[0] = buffer.len
        return <const uint8_t *>buffer.buf

    def release(self):
        """Forget the rows and let go of the bytes they borrow."""
        self.count = 0
        self.has_hashes = False
        self._source = None

    def scan(self, segment not None, int64_t segment_phy_offset, int64_t begin, int64_t end, *,
             int checks=0, QueueTable queues=None, int64_t byte_limit=0, int64_t behind=0):
        """Fill the batch with the records from phy offset `begin` up to `end` of one segment; returns the stop code.

        begin and end lie in [segment_phy_offset, segment_phy_offset + len(segment)], else ValueError. With `queues`
        each row gets its queue's number; HASH_KEYS wants them. byte_limit > 0 ends the batch (SCAN_FULL) at the first
        record at or past that many bytes. behind: bytes of the segment that follow, when it is not whole.
        """
        cdef int64_t segment_size = 0
        cdef const uint8_t *base = self.start(segment, segment_phy_offset, begin, end, &segment_size)
        with nogil:
            self.fill(base, segment_size, segment_phy_offset, begin, end, checks, queues, byte_limit, behind)
        if self.stop == SCAN_LIMIT and self.count == 0:
            self.release()
        return self.stop

    cdef const uint8_t *start(self, object segment, int64_t segment_phy_offset, int64_t begin, int64_t end,
                              int64_t *segment_size) except? NULL:
        """Empty, before the first fill(): the bytes of a segment, borrowed until release(). ValueError as of scan()."""
        cdef const uint8_t *base = self._borrow_source(segment, segment_size)
        if begin < segment_phy_offset or end < begin or end - segment_phy_offset > segment_size[0]:
            self.release()
            raise ValueError(f"range [{begin}, {end}) lies outside the segment at {segment_phy_offset}")
        self.stop = SCAN_FULL
        self.next_phy_offset = begin
        return base

    cdef int fill(self, const uint8_t *base, int64_t segment_size, int64_t segment_phy_offset, int64_t begin,
                  int64_t end, int checks, QueueTable queues, int64_t byte_limit, int64_t behind) except -1 nogil:
        """scan() of bytes that start() gave."""
        cdef int64_t position = begin - segment_phy_offset, limit = end - segment_phy_offset, start = position
        cdef bint skips_bodies = not checks & (CHECK_BODY_CRC | CHECK_RECORD_CRC)
        cdef bint has_hashes = queues is not None and checks & HASH_KEYS and checks & PARSE_PROPERTIES
        cdef RecordRow *row
        cdef int stop = SCAN_FULL
        cdef int32_t count = 0
        cdef bint checks_body = checks & CHECK_BODY_CRC, goes_on = self.capacity > 1
        if has_hashes and self.hashes == NULL:
            self._grow(self._room, True)
        while count < self.capacity:
            if position == limit:
                stop = SCAN_LIMIT
                break
            if byte_limit > 0 and position - start >= byte_limit:
                break
            if count == self._room:
                self._grow(min(<int64_t>self.capacity, 8 * <int64_t>self._room), has_hashes)
            row = &self.rows[count]
            stop = parse_record(base + position, limit - position, segment_size + behind - position,
                                segment_phy_offset + position, checks | READS_ON if goes_on else checks, row)
            if stop != SCAN_FULL:
                break
            if queues is not None:
                row.queue = queues.find_or_add(row.base + row.topic_position, row.topic_size, row.queue_id)
                if row.queue < 0:
                    with gil:
                        raise MemoryError()
                if has_hashes:
                    hash_row(row, queues.slots[row.queue].seed, &self.hashes[count])
            position += row.size
            count += 1
            if not goes_on:
                break
            if skips_bodies and row.size > NEAR:
                prefetch_ahead(base, position, segment_size, row, count)
            else:
                prefetch_bytes(base, position, segment_size, row, checks_body)
        self.count = count
        self.has_hashes = has_hashes
        self.stop = stop
        self.next_phy_offset = segment_phy_offset + position
        return 0

    def load(self, segment not None, int64_t segment_phy_offset, const int64_t[::1] phy_offsets not None,
             int64_t end, *, int checks=0, int64_t behind=0):
        """Fill the batch with the records at the given phy offsets of one segment, those that are whole there.

        Returns an int32 array with the position in phy_offsets of each row; what is no record below `end` is left
        out. At most `capacity` offsets: ValueError.
        """
        cdef int64_t segment_size = 0, position, limit
        cdef Py_ssize_t i, number = phy_offsets.shape[0]
        cdef int32_t count = 0
        if number > self.capacity:
            raise ValueError("more offsets than the batch has rows")
        cdef const uint8_t *base = self._borrow_source(segment, &segment_size)
        if number > self._room:
            self._grow(number, False)
        found = np.empty(number, np.int32)
        cdef int32_t[::1] out = found
        limit = min(segment_size, end - segment_phy_offset)
        with nogil:
            for i in range(min(number, FRONTS_AHEAD)):
                prefetch_front(base, position_in(phy_offsets[i], segment_phy_offset, limit), limit)
            for i in range(number):
                if i + FRONTS_AHEAD < number:
                    prefetch_front(base, position_in(phy_offsets[i + FRONTS_AHEAD], segment_phy_offset, limit), limit)
                if i + TAILS_AHEAD < number:
                    prefetch_tail(base, position_in(phy_offsets[i + TAILS_AHEAD], segment_phy_offset, limit), limit)
                position = position_in(phy_offsets[i], segment_phy_offset, limit)
                if position < 0:
                    continue
                if parse_record(base + position, limit - position, segment_size + behind - position, phy_offsets[i],
                                checks, &self.rows[count]) == SCAN_FULL:
                    out[count] = <int32_t>i
                    count += 1
        self.count = count
        return found[:count]

    def adopt(self, bytes data not None, list places not None):
        """Rows from records that are built in memory, for inner batches: places holds (position in data, size to show).

        Offsets are taken as the records state them. At most `capacity` records: ValueError, also for a bad record.
        """
        cdef const uint8_t[::1] view = data
        cdef int32_t i
        cdef int64_t position, room, own_offset
        if len(places) > self.capacity:
            raise ValueError("more records than the batch has rows")
        self.release()
        self._source = data
        if len(places) > self._room:
            self._grow(len(places), False)
        for i in range(<int32_t>len(places)):
            position, size = places[i]
            room = view.shape[0] - position
            if position < 0 or room < L.RECORD_FIXED_SIZE:
                raise ValueError(f"no record at {position}")
            own_offset = load_i64(&view[position] + L.RECORD_PHY_OFFSET_OFFSET)
            if parse_record(&view[position], room, room + L.BLANK_HEADER_SIZE, own_offset, PARSE_PROPERTIES,
                            &self.rows[i]) != SCAN_FULL:
                raise ValueError(f"no record at {position}")
            self.rows[i].size = size
        self.count = <int32_t>len(places)

    def keep(self, topics=None, int64_t begin=-9223372036854775808, int64_t end=9223372036854775807,
             const uint8_t[::1] mask=None):
        """Keep rows of `topics` (bytes; None: any), stored in [begin, end], and not 0 in a mask; returns how many."""
        cdef int32_t kept = 0, i, k, count = -1 if topics is None else <int32_t>len(topics)
        cdef RecordRow *row
        cdef list names = sorted(topics or ())
        cdef Span *wanted = <Span *>calloc(len(names) + 1, sizeof(Span))
        if wanted == NULL:
            raise MemoryError()
        try:
            if mask is not None and mask.shape[0] != self.count:
                raise ValueError("mask must have one number per row")
            for k in range(count):
                _borrow(names[k], &wanted[k])
            with nogil:
                for i in range(self.count):
                    row = &self.rows[i]
                    if not begin <= row.store_timestamp <= end or (mask is not None and not mask[i]) or (
                            count >= 0 and not _is_named(row.base + row.topic_position, row.topic_size, wanted, count)):
                        continue
                    if kept != i:
                        self.rows[kept] = row[0]
                    kept += 1
        finally:
            free(wanted)
        self.count = kept
        self.has_hashes = False
        return kept

    def match(self, bytes topic not None, list keys not None, const int64_t[::1] wanted not None):
        """Mask (bool array): row i has parsed properties, the topic and carries keys[wanted[i]] (str).

        ROLLBACK messages never match, as RocketMQ does not index them.
        """
        cdef Py_ssize_t i, number
        cdef Span name
        cdef Span *spans
        if wanted.shape[0] != self.count:
            raise ValueError("wanted must have one number per row")
        result = np.zeros(self.count, np.bool_)
        cdef uint8_t[::1] out = result.view(np.uint8)
        spans = <Span *>calloc(<size_t>self.count + 1, sizeof(Span))
        if spans == NULL:
            raise MemoryError()
        _borrow(topic, &name)
        try:
            for i in range(self.count):
                if not 0 <= wanted[i] < len(keys):
                    raise IndexError(wanted[i])
                spans[i].data = <const uint8_t *>PyUnicode_AsUTF8AndSize(keys[wanted[i]], &number)
                spans[i].size = number
            with nogil:
                for i in range(self.count):
                    out[i] = _carries(&self.rows[i], &name, &spans[i])
        finally:
            free(spans)
        return result

    def carries(self, int32_t i, bytes topic, bytes key not None, int64_t begin, int64_t end):
        """match of row i with one topic (None: any) and key, both bytes, and a store timestamp in [begin, end]."""
        cdef Span name, text
        if i < 0 or i >= self.count:
            raise IndexError(i)
        _borrow(topic, &name)
        _borrow(key, &text)
        return begin <= self.rows[i].store_timestamp <= end and _carries(&self.rows[i], &name, &text)

    cdef bint _may_carry(self, const RecordRow *row, const int32_t *hashes, Py_ssize_t count) noexcept nogil:
        """Whether a key of the row has one of the sorted hashes."""
        cdef const uint8_t *cursor
        cdef const uint8_t *end
        cdef const uint8_t *piece
        cdef int64_t size
        if row.uniq_key_size > 0 and _is_among(key_hash_of(rmq_hash_utf8(
                row.base + row.uniq_key_position, row.uniq_key_size, 0)), hashes, count):
            return True
        if row.keys_size > 0:
            cursor = row.base + row.keys_position
            end = cursor + row.keys_size
            while next_key(&cursor, end, &piece, &size):
                if _is_among(key_hash_of(rmq_hash_utf8(piece, size, 0)), hashes, count):
                    return True
        return False

    def find_keys(self, set items not None, const int32_t[::1] hashes not None):
        """Pairs (row, (topic, key)) for each distinct item (topic bytes, key bytes) that a row carries; key: UTF-8.

        hashes: index key hashes of the items' keys alone, ascending; only rows that have one are looked at closely.
        Rows must have parsed properties. With topic None an item matches every topic. Source: IndexService#buildIndex.
        """
        cdef int32_t i
        cdef RecordRow *row
        cdef const uint8_t *cursor
        cdef const uint8_t *end
        cdef const uint8_t *piece
        cdef int64_t size
        cdef list found = []
        near = np.zeros(self.count, np.uint8)
        cdef uint8_t[::1] is_near = near
        with nogil:
            for i in range(self.count):
                is_near[i] = hashes.shape[0] > 0 and self._may_carry(&self.rows[i], &hashes[0], hashes.shape[0])
        for i in np.flatnonzero(near):
            row = &self.rows[i]
            if row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK == L.SYS_FLAG_ROLLBACK:
                continue
            pieces = set()
            if row.uniq_key_size > 0:
                pieces.add(_as_read(row.base + row.uniq_key_position, row.uniq_key_size))
            if row.keys_size > 0:
                cursor = row.base + row.keys_position
                end = cursor + row.keys_size
                while next_key(&cursor, end, &piece, &size):
                    pieces.add(_as_read(piece, size))
            if not pieces:
                continue
            topic = PyBytes_FromStringAndSize(<const char *>row.base + row.topic_position, row.topic_size)
            for key in pieces:
                if (topic, key) in items:
                    found.append((i, (topic, key)))
                if (None, key) in items:
                    found.append((i, (None, key)))
        return found

    def has_inner_batches(self):
        """Whether some row is an inner batch."""
        cdef int32_t i = 0
        with nogil:
            while i < self.count and not self.rows[i].sys_flag & L.SYS_FLAG_INNER_BATCH:
                i += 1
        return i < self.count

    def has_keys(self):
        """Whether some row with parsed properties has a key to index."""
        cdef int32_t i = 0
        with nogil:
            while i < self.count and not _has_keys(&self.rows[i]):
                i += 1
        return i < self.count

    def ambiguous(self):
        """(phy offset, end) of the rows whose keys RocketMQ <= 4.9.0 reads otherwise than the newer rules."""
        cdef int32_t i = 0
        cdef list found = []
        while True:
            with nogil:
                while i < self.count and not _is_ambiguous(&self.rows[i]):
                    i += 1
            if i == self.count:
                return found
            found.append((self.rows[i].phy_offset, self.rows[i].phy_offset + self.rows[i].size))
            i += 1

    def numbers(self, str field not None):
        """int64 array of one field: phy_offset, size, queue, queue_offset, store_timestamp or sys_flag."""
        cdef int32_t i
        cdef RecordRow *row
        result = np.empty(self.count, np.int64)
        cdef int64_t[::1] out = result
        cdef int which = ("phy_offset", "size", "queue", "queue_offset", "store_timestamp", "sys_flag").index(field)
        with nogil:
            for i in range(self.count):
                row = &self.rows[i]
                out[i] = (row.phy_offset if which == 0 else row.size if which == 1 else row.queue if which == 2
                          else row.queue_offset if which == 3 else row.store_timestamp if which == 4
                          else row.sys_flag)
        return result

    def row_at(self, int64_t phy_offset):
        """The first row at or behind a phy offset, of rows in log order; len(batch) when there is none."""
        cdef int32_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) // 2
            if self.rows[middle].phy_offset < phy_offset:
                low = middle + 1
            else:
                high = middle
        return low

    def phy_offset(self, int32_t i):
        """Phy offset of row i. IndexError outside the rows."""
        if i < 0 or i >= self.count:
            raise IndexError(i)
        return self.rows[i].phy_offset

    def store_timestamp(self, int32_t i):
        """Store timestamp of row i. IndexError outside the rows."""
        if i < 0 or i >= self.count:
            raise IndexError(i)
        return self.rows[i].store_timestamp
