# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units beside the records of a pass over the log. Source: RocketMQ ConsumeQueue."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64
from rmq._core._consumequeue cimport has_unit, is_scheduled, tags_code_of
from rmq._core._entrycheck cimport add_fault, take_all
from rmq._core._record cimport RecordRow, find_properties

cdef int64_t LARGEST_QUEUE_OFFSET = 0x7FFFFFFFFFFFFFFF // L.UNIT_SIZE


@cython.final
cdef class UnitCheck:
    def __cinit__(self, const int64_t[::1] delay_levels not None, *, int64_t required_end, bint is_lenient=True,
                  bint has_ext=False):
        self.delay_levels = delay_levels
        self.required_end = required_end
        self.is_lenient = is_lenient
        self.has_ext = has_ext
        self.loaded = {}

    def __dealloc__(self):
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

    @property
    def wanted(self):
        """(queue, queue offset) of the unit that must be loaded before the comparison goes on."""
        return self.wanted_queue, self.wanted_offset

    def ignore(self, int32_t queue):
        """Compare nothing of a queue: its topic names no directory."""
        if queue < 0:
            raise ValueError("needs a queue's number")
        if queue >= self.window_count and not self._grow(queue):
            raise MemoryError()
        self.windows[queue].is_ignored = True

    def load(self, int32_t queue, int64_t first, bytes units not None):
        """Units of a queue from queue offset `first` on, in place of those in memory."""
        cdef int64_t count = len(units) // L.UNIT_SIZE
        if queue < 0 or count < 1:
            raise ValueError("needs a queue's number and at least one unit")
        if queue >= self.window_count and not self._grow(queue):
            raise MemoryError()
        self.loaded[queue] = units
        self.windows[queue].units = <const uint8_t *>PyBytes_AS_STRING(units)
        self.windows[queue].first = first
        self.windows[queue].count = count

    cdef int32_t compare(self, const RecordRow *rows, int32_t row, int32_t count) noexcept nogil:
        """Compare rows from `row` on; returns the row whose unit must be loaded first, or the count; -1: no memory.
        Rows must have queue numbers and parsed properties. Messages that get no unit are passed over.
        """
        cdef const RecordRow *record
        cdef UnitWindow *window
        cdef int64_t queue_offset
        cdef int32_t queue
        cdef bint right
        while row < count:
            record = &rows[row]
            if not has_unit(record):
                row += 1
                continue
            queue, queue_offset = record.queue, record.queue_offset
            if queue >= self.window_count and not self._grow(queue):
                return -1
            window = &self.windows[queue]
            if window.is_ignored:
                row += 1
                continue
            if 0 <= queue_offset < LARGEST_QUEUE_OFFSET:
                if not window.first <= queue_offset < window.first + window.count:
                    self.wanted_queue, self.wanted_offset = queue, queue_offset
                    return row
                right = self._is_right(record, window.units + (queue_offset - window.first) * L.UNIT_SIZE)
            elif window.count == 0:     # maybe the queue is one to ignore
                self.wanted_queue, self.wanted_offset = queue, 0
                return row
            else:
                right = False
            row += 1
            if right:
                self.right += 1
            elif record.phy_offset >= self.required_end:
                self.behind += 1
                continue
            if 0 <= window.high == queue_offset and window.is_right == right:
                window.high += 1
                continue
            if not self._close(queue):
                return -1
            window.low = queue_offset
            window.high = min(queue_offset, LARGEST_QUEUE_OFFSET) + 1 if queue_offset >= 0 else 0
            window.phy_offset = record.phy_offset
            window.is_right = right
            if queue_offset < 0 and not self._close(queue):     # it has no neighbours
                return -1
        return row

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
