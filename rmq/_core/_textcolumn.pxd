# SPDX-License-Identifier: Apache-2.0
"""Strings of Arrow columns: their bytes borrowed, their offsets copied."""
cimport cython
from libc.stdint cimport int64_t, uint8_t

from rmq._core._record cimport rmq_texts


@cython.final
@cython.no_gc_clear
cdef class TextColumn:
    """Borrowed strings first[starts[i]:starts[i + 1]]; missing[i] != 0: null."""
    cdef:
        int64_t *starts                     # count + 1 of them, a copy: what was checked stays as it was
        const uint8_t *first                # never NULL, as memcpy asks
        const uint8_t[::1] missing          # empty: no nulls
        readonly Py_ssize_t count
        int64_t longest                     # no string has more bytes; less than twice those of the longest
        Py_buffer _data
    cdef int _copy_starts(self, const Py_buffer *offsets, int width, Py_ssize_t first, Py_ssize_t count) except -1


cdef inline const uint8_t *text_at(TextColumn column, Py_ssize_t i, int64_t *size) noexcept nogil:
    """First byte and size of string i; size -1 when null."""
    size[0] = column.starts[i + 1] - column.starts[i]
    if column.missing.shape[0] and column.missing[i]:
        size[0] = -1
    return column.first + column.starts[i]


cdef bint find_texts(rmq_texts *texts, TextColumn keys, TextColumn uniq_key, TextColumn tags)
