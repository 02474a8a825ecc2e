# SPDX-License-Identifier: Apache-2.0
"""Rows of records found by one scan or look-up."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport RecordRow
from rmq._core._rowhash cimport RowHashes


@cython.final
cdef class RecordBatch:
    """Rows of one scan over one segment's bytes. Reused; borrows the bytes until the next scan."""
    cdef:
        RecordRow *rows
        RowHashes *hashes           # memory for those of the rows, once a scan wanted them
        bint has_hashes             # the last scan took them
        int32_t _room               # rows there is memory for; grows up to the capacity
        object _source              # memoryview that keeps the scanned bytes mapped
        readonly int32_t capacity
        readonly int32_t count      # rows filled
        readonly int stop           # SCAN_*
        readonly int64_t next_phy_offset   # where the next scan starts; at a stop with an error: the bad byte
    cdef int _grow(self, int64_t room, bint with_hashes) except -1 nogil
    cdef const uint8_t *_borrow_source(self, object source, int64_t *size) except? NULL
    cdef const uint8_t *start(self, object segment, int64_t segment_phy_offset, int64_t begin, int64_t end,
                              int64_t *segment_size) except? NULL
    cdef int fill(self, const uint8_t *base, int64_t segment_size, int64_t segment_phy_offset, int64_t begin,
                  int64_t end, int checks, QueueTable queues, int64_t byte_limit, int64_t behind) except -1 nogil
    cdef bint _may_carry(self, const RecordRow *row, const int32_t *hashes, Py_ssize_t count) noexcept nogil
