# SPDX-License-Identifier: Apache-2.0
"""Columns of text as one JSON object for each row."""
cimport cython
from libc.stdint cimport int64_t, uint8_t


cdef struct JsonField:
    const int64_t *offsets              # of value i: its text is data[offsets[i]:offsets[i + 1]]
    const uint8_t *data
    const uint8_t *missing              # NULL: no nulls
    const uint8_t *head                 # what stands before each value
    int64_t head_size
    bint is_quoted


@cython.final
cdef class JsonRows:
    """Borrows the columns."""
    cdef:
        readonly Py_ssize_t count       # rows
        readonly int64_t room           # bytes that the rows take at most, with those a copy may write behind them
        list _columns
        list _heads
        bytes _tail                     # what ends each row
        const uint8_t *_tail_text
        int64_t _tail_size
        JsonField *_fields
        int _width

    cdef int64_t _most(self) noexcept nogil
    cdef int64_t _write(self, int64_t *offsets, uint8_t *begin) noexcept nogil
