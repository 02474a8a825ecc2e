# SPDX-License-Identifier: Apache-2.0
"""Messages checked against a store's rules and ready to encode."""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._columnrows cimport ColumnRows
from rmq._core._propertyrows cimport PropertyRows
from rmq._core._putrow cimport PutRules
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport PutRow, rmq_texts


@cython.final
cdef class PutBatch:
    cdef:
        PutRow *rows
        ColumnRows _columns
        bint _has_columns                   # all rows are those of _columns, none is in `rows`
        PropertyRows _properties
        rmq_texts _texts                    # of which property strings are made while they are written
        bint _one_queue                     # all rows go to that of the first
        object _source                      # keeps what the rows borrow
        PutRules rules
        readonly int32_t count
        readonly int64_t records_size       # bytes of all rows' records
        readonly bint waits                 # some message asks SYNC_FLUSH to wait for it
        readonly bint is_put                # the log has its rows
        int32_t _capacity
    cdef int _reserve(self, Py_ssize_t count) except -1
    cdef int64_t last_place(self) noexcept
    cdef int64_t _size(self, Py_ssize_t i) noexcept nogil
    cdef int _finish(self, Py_ssize_t i, int64_t topic_units, bint raw, bint batch) except -1 nogil
    cdef PyObject *_shortened(self, bytes encoded) except NULL
    cdef int _take(self, Py_ssize_t i, object item, bint batch) except -1
    cdef int borrow_one(self, object message) except -1
    cdef void forget(self) noexcept
    cdef int64_t write(self, uint8_t *base, int64_t room, int64_t segment_phy_offset, int64_t position,
                       int32_t start, int32_t stop, int64_t store_timestamp, QueueTable queues) except -1
    cdef void _encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                      int64_t store_timestamp, QueueTable queues) noexcept nogil
    cdef Py_ssize_t _take_run(self, list messages, Py_ssize_t i, Py_ssize_t count) noexcept
