# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units in batches: no state of its own."""
from libc.stdint cimport int64_t

from rmq._core._record cimport RecordRow

cdef bint is_scheduled(const RecordRow *row) noexcept nogil
cdef int64_t tags_code_of(const RecordRow *row, const int64_t[::1] delay_levels) noexcept nogil
