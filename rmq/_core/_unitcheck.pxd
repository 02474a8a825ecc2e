# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units beside the records of a pass over the log."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._entrycheck cimport FaultList
from rmq._core._record cimport RecordRow


cdef struct UnitWindow:
    const uint8_t *units        # of the bytes in `loaded`
    int64_t first               # queue offset of the first unit in memory
    int64_t count
    int64_t low                 # open span: queue offsets [low, high) of records in log order
    int64_t high                # -1: no span is open
    int64_t phy_offset          # of the record at low
    bint is_right               # every unit of the span is its record's
    bint is_ignored             # the queue has no directory and can have none


@cython.final
cdef class UnitCheck:
    """Units of a few queues in memory, compared with the rows of a scan in log order."""
    cdef:
        UnitWindow *windows
        int32_t window_count
        dict loaded                 # queue number: its units, as bytes
        const int64_t[::1] delay_levels
        bint is_lenient
        bint has_ext
        int64_t required_end        # a record at or past it may lack its unit
        int32_t wanted_queue        # of the unit that compare() stopped for
        int64_t wanted_offset
        FaultList spans             # number: queue, a: low, b: high, kind: 1 when right
        readonly int64_t right      # units that are their record's
        readonly int64_t behind     # records at or past the required end without their unit
    cdef int32_t compare(self, const RecordRow *rows, int32_t row, int32_t count) noexcept nogil
    cdef bint _is_right(self, const RecordRow *row, const uint8_t *unit) noexcept nogil
    cdef bint _close(self, int32_t queue) noexcept nogil
    cdef bint _grow(self, int32_t queue) noexcept nogil
