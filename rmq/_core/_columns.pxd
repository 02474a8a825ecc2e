# SPDX-License-Identifier: Apache-2.0
"""Rows of scans to the buffers of Arrow columns. Everything is copied: no reader outside stands on a mapping."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._record cimport RecordRow
from rmq._core._recordbatch cimport RecordBatch


cdef struct Block:
    uint8_t *data
    int64_t room


@cython.final
cdef class GrowingBuffer:
    """Bytes that grow while a column is built, then are lent out read only; freed with the last reader."""
    cdef:
        uint8_t *data
        int64_t size
        int64_t room
    cdef int _grow(self, int64_t room) except -1 nogil
    cdef uint8_t *take(self, int64_t size) except NULL nogil
    cdef int add(self, const uint8_t *data, int64_t size) except -1 nogil
    cdef int add_i32(self, int64_t value) except -1 nogil


@cython.final
cdef class ColumnBuilder:
    """Columns of records, filled batch by batch."""
    cdef:
        readonly tuple names
        readonly int64_t count          # rows so far
        readonly int64_t compressed     # rows whose body is compressed
        readonly int64_t data_size      # bytes of the variable-length columns so far
        list _kinds
        list _buffers                   # per column: list of GrowingBuffer
    cdef int _numbers(self, Py_ssize_t position, Py_ssize_t size, GrowingBuffer out, RecordBatch batch, int32_t first,
                      int32_t stop) except -1 nogil
    cdef int _copies(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, bint is_body, int32_t first,
                     int32_t stop) except -1 nogil
    cdef int _topics(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, int32_t first,
                     int32_t stop) except -1 nogil
    cdef int _keys(self, GrowingBuffer list_ends, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch,
                   int32_t first, int32_t stop) except -1 nogil
    cdef int _nullable(self, bint is_tags, GrowingBuffer valid, GrowingBuffer ends, GrowingBuffer data,
                       RecordBatch batch, int32_t first, int32_t stop) except -1 nogil
    cdef int _ids(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, int32_t first,
                  int32_t stop) except -1 nogil
    cdef int _maps(self, GrowingBuffer map_ends, GrowingBuffer name_ends, GrowingBuffer names,
                   GrowingBuffer value_ends, GrowingBuffer values, RecordBatch batch, int32_t first,
                   int32_t stop) except -1 nogil
    cdef int _map(self, GrowingBuffer name_ends, GrowingBuffer names, GrowingBuffer value_ends, GrowingBuffer values,
                  RecordRow *row) except -1 nogil
    cdef int _long_map(self, GrowingBuffer name_ends, GrowingBuffer names, GrowingBuffer value_ends,
                       GrowingBuffer values, RecordRow *row) except -1 with gil
    cdef int _text(self, GrowingBuffer data, const uint8_t *p, int64_t size) except -1 nogil
