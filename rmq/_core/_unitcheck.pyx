# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units beside the records of a pass over the log. Source: RocketMQ ConsumeQueue."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64
from rmq._core._consumequeue cimport has_unit, is_scheduled, tags_code_of
from rmq._core._entrycheck cimport add_fault, take_all
from rmq._core._record cimport CRC_NAME, CRC_NAME_SIZE, RecordRow, crc_of, find_properties
from rmq._core._recordbatch cimport RecordBatch

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept

cdef int32_t ROWS_AHEAD = 8     # whose last bytes are asked for
cdef int64_t LARGEST_QUEUE_OFFSET = 0x7FFFFFFFFFFFFFFF // L.UNIT_SIZE


@cython.final
cdef class UnitCheck:
    def __cinit__(self, const int64_t[::1] delay_levels not None, *, bint is_lenient=True, bint has_ext=False):
        self.delay_levels = delay_levels
        self.is_lenient = is_lenient
        self.has_ext = has_ext

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.window_count):
            free(self.windows[i].units)
        free(self.windows)
        free(self.spans.items)

    cdef bint _grow(self, int32_t queue) noexcept nogil:
        cdef int32_t i, count = max(queue + 1, self.window_count * 2)
        cdef UnitWindow *windows = <UnitWindow *>realloc(self.windows, <size_t>count * sizeof(UnitWindow))
        if windows == NULL:
            return False
        self.windows = windows
        memset(&windows[self.window_count], 0, <size_t>(count - self.window_count) * sizeof(UnitWindow))
        for i in range(self.window_count, count):
            windows[i].high = -1
        self.window_count = count
        return True

    cdef bint _close(self, int32_t queue) noexcept nogil:
        """End the queue's open span."""
        cdef UnitWindow *window = &self.windows[queue]
        if window.high < 0:
            return True
        if not add_fault(&self.spans, window.is_right, 0, queue, window.phy_offset, window.low, window.high):
            return False
        window.high = -1
        return True

    cdef bint _is_right(self, const RecordRow *row, const uint8_t *unit) noexcept nogil:
        cdef int64_t code
        cdef RecordRow old
        if load_i64(unit + L.UNIT_PHY_OFFSET_OFFSET) != row.phy_offset or \
                load_i32(unit + L.UNIT_SIZE_OFFSET) != row.size:
            return False
        code = load_i64(unit + L.UNIT_TAGS_CODE_OFFSET)
        if code == tags_code_of(row, self.delay_levels) or (self.has_ext and code < L.UNIT_TAGS_HASH_MIN):
            return True
        # The broker's own delay levels are not in the store: any delay of whole seconds may be one.
        if is_scheduled(row) and code > row.store_timestamp and \
                (<uint64_t>code - <uint64_t>row.store_timestamp) % 1000 == 0:
            return True
        if not self.is_lenient:
            return False
        old = row[0]
        old.keys_size = old.uniq_key_size = old.tags_size = old.delay_size = -1
        find_properties(&old, True)
        return code == tags_code_of(&old, self.delay_levels)

    def ignore(self, int32_t queue):
        """Compare nothing of a queue: its topic names no directory."""
        if queue < 0:
            raise ValueError("needs a queue's number")
        if queue >= self.window_count and not self._grow(queue):
            raise MemoryError()
        self.windows[queue].is_ignored = True

    def load(self, int32_t queue, int64_t first, const uint8_t[::1] units not None):
        """Units of a queue from queue offset `first` on, in place of those in memory; copied."""
        cdef int64_t count = units.shape[0] // L.UNIT_SIZE
        cdef uint8_t *copy
        if queue < 0 or count < 1:
            raise ValueError("needs a queue's number and at least one unit")
        if queue >= self.window_count and not self._grow(queue):
            raise MemoryError()
        copy = <uint8_t *>malloc(count * L.UNIT_SIZE)
        if copy == NULL:
            raise MemoryError()
        memcpy(copy, &units[0], count * L.UNIT_SIZE)
        free(self.windows[queue].units)
        self.windows[queue].units = copy
        self.windows[queue].first = first
        self.windows[queue].count = count

    def compare(self, RecordBatch batch not None, int32_t row, int64_t required_end):
        """Compare rows from `row` on; returns (row, queue, queue offset) whose unit must be loaded first, or
        (len(batch), -1, 0). Rows must have queue numbers and parsed properties. A record at or past required_end may
        lack its unit. Messages that get no unit are passed over.
        """
        cdef RecordRow *record
        cdef UnitWindow *window
        cdef int64_t queue_offset = 0
        cdef int32_t queue = -1
        cdef bint right, ok = True
        if row < 0:
            raise ValueError("row must not be negative")
        with nogil:
            while row < batch.count:
                record = &batch.rows[row]
                if not has_unit(record):
                    row += 1
                    continue
                queue, queue_offset = record.queue, record.queue_offset
                if queue < 0:
                    with gil:
                        raise ValueError("rows have no queue numbers")
                if queue >= self.window_count:
                    ok = self._grow(queue)
                    if not ok:
                        break
                window = &self.windows[queue]
                if window.is_ignored:
                    row += 1
                    continue
                if 0 <= queue_offset < LARGEST_QUEUE_OFFSET:
                    if not window.first <= queue_offset < window.first + window.count:
                        break
                    right = self._is_right(record, window.units + (queue_offset - window.first) * L.UNIT_SIZE)
                else:
                    right = False
                row += 1
                if right:
                    self.right += 1
                elif record.phy_offset >= required_end:
                    self.behind += 1
                    continue
                if window.high == queue_offset and window.is_right == right:
                    window.high += 1
                    continue
                ok = self._close(queue)
                if not ok:
                    break
                window.low = queue_offset
                window.high = min(queue_offset, LARGEST_QUEUE_OFFSET) + 1 if queue_offset >= 0 else 0
                window.phy_offset = record.phy_offset
                window.is_right = right
                if queue_offset < 0 and not self._close(queue):      # it has no neighbours
                    ok = False
                    break
            else:
                queue, queue_offset = -1, 0
        if not ok:
            raise MemoryError()
        return row, queue, queue_offset

    def take_spans(self, *, bint last=False):
        """Spans that ended since the last call: int64 array [n, 5] of (queue, low, high, phy offset of the record at
        low, 1 when every unit is its record's). last: end the open ones too.
        """
        cdef int32_t i
        if last:
            for i in range(self.window_count):
                if not self._close(i):
                    raise MemoryError()
        found = take_all(&self.spans)
        return found[:, [2, 4, 5, 3, 0]]


cdef bint _has_misnamed_crc(const RecordRow *row) noexcept nogil:
    cdef const uint8_t *tail = row.base + row.size - L.PROPERTY_CRC_SIZE
    cdef int k, named
    cdef int64_t stored = 0
    if row.properties_size < L.PROPERTY_CRC_SIZE:
        return False
    named = (tail[CRC_NAME_SIZE] == L.PROPERTY_NAME_END) + (tail[L.PROPERTY_CRC_SIZE - 1] == L.PROPERTY_END)
    for k in range(CRC_NAME_SIZE):
        named += tail[k] == <uint8_t>CRC_NAME[k]
    if named <= CRC_NAME_SIZE // 2 or named == CRC_NAME_SIZE + 2:
        return False
    for k in range(L.PROPERTY_CRC_DIGITS - 1, -1, -1):
        stored = stored * 10 + (tail[CRC_NAME_SIZE + 1 + k] - 48)
    return stored == crc_of(row.base, row.size - L.PROPERTY_CRC_SIZE)


def looked_at(RecordBatch batch not None):
    """(phy offsets, newest and oldest store timestamp) of a batch's rows; ValueError without one. The offsets: of those
    whose whole-record CRC is right under almost its name, which the scan took for a property like any other, because
    the name itself is damaged.
    """
    cdef int32_t i = 0
    cdef int64_t newest, oldest
    cdef const RecordRow *row
    cdef list found = []
    if batch.count == 0:
        raise ValueError("the batch has no rows")
    newest = oldest = batch.rows[0].store_timestamp
    while True:
        with nogil:
            while i < batch.count:
                row = &batch.rows[i]
                if i + ROWS_AHEAD < batch.count:
                    rmq_prefetch((row + ROWS_AHEAD).base + (row + ROWS_AHEAD).size - L.PROPERTY_CRC_SIZE)
                newest, oldest = max(newest, row.store_timestamp), min(oldest, row.store_timestamp)
                if _has_misnamed_crc(row):
                    break
                i += 1
        if i == batch.count:
            return found, newest, oldest
        found.append(batch.rows[i].phy_offset)
        i += 1
