# SPDX-License-Identifier: Apache-2.0
"""Rows of columns that differ in body, texts and queue only: what they share is kept once, of each where it went."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._putrow cimport PutRules
from rmq._core._queuetable cimport QueueSlot, QueueTable
from rmq._core._record cimport PutRow, rmq_texts
from rmq._core._textcolumn cimport TextColumn


cdef struct InQueue:        # of a row
    int64_t offset
    int32_t id
    int32_t number          # in the QueueTable


@cython.final
cdef class ColumnRows:
    cdef:
        PutRow first            # what they share; sizes: of a row without body and texts
        rmq_texts texts
        const uint8_t *bodies
        const int64_t *body_starts
        readonly int32_t count          # 0: none were taken
        readonly int64_t records_size   # bytes of all rows' records
        int64_t *_phy_offsets           # filled by encoding
        Py_ssize_t _capacity
        bint _has_queues                # several; else that of `first` is the one of all
        InQueue *_in_queues             # of several queues
        Py_ssize_t _queue_capacity
        int64_t _queue_offset           # of one queue: that of row 0, were it encoded like those that were
    cdef bint _take_queue_ids(self, dict numbers, Py_ssize_t count) except -1
    cdef bint take(self, PutRules rules, Py_ssize_t count, TextColumn topic, TextColumn body,
                   const rmq_texts *texts, dict numbers) except -1
    cdef int64_t size(self, Py_ssize_t i) noexcept nogil
    cdef int64_t last_phy_offset(self) noexcept
    cdef int find_queues(self, int32_t start, int32_t stop, QueueTable queues) except -1
    cdef void encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                     int64_t store_timestamp, QueueSlot *slots) noexcept nogil
