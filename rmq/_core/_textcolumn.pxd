# SPDX-License-Identifier: Apache-2.0
"""Strings of one Arrow column, borrowed."""
cimport cython
from libc.stdint cimport int64_t, uint8_t


@cython.final
cdef class TextColumn:
    """Borrowed strings data[offsets[i]:offsets[i + 1]]; missing[i] != 0: null."""
    cdef:
        const int64_t[::1] offsets
        const uint8_t[::1] data
        const uint8_t[::1] missing          # empty: no nulls
        const uint8_t *_first               # never NULL, as memcpy asks


cdef inline const uint8_t *text_at(TextColumn column, Py_ssize_t i, int64_t *size) noexcept nogil:
    """First byte and size of string i; size -1 when null."""
    size[0] = column.offsets[i + 1] - column.offsets[i]
    if column.missing.shape[0] and column.missing[i]:
        size[0] = -1
    return column._first + column.offsets[i]
