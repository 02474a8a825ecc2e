# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers and times as text."""
from libc.stdint cimport int64_t, uint8_t


cdef enum Form:
    INTEGER = -2
    DOUBLE = -1                         # forms that are not negative: times, digits behind their seconds


cdef int64_t write_numbers(const int64_t *values, Py_ssize_t count, const uint8_t *missing, int form, bint is_utc,
                           int64_t *offsets, uint8_t *begin) noexcept nogil
