# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units in batches: no state of its own."""
from libc.stdint cimport int32_t, int64_t

cimport rmq._core._layout as L
from rmq._core._record cimport RecordRow


cdef inline bint has_unit(const RecordRow *row) noexcept nogil:
    """Whether a queue has a unit for the record."""
    cdef int32_t transaction = row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK
    return transaction != L.SYS_FLAG_PREPARED and transaction != L.SYS_FLAG_ROLLBACK and \
        not row.sys_flag & L.SYS_FLAG_INNER_BATCH


cdef bint is_scheduled(const RecordRow *row) noexcept nogil
cdef int64_t tags_code_of(const RecordRow *row, const int64_t[::1] delay_levels) noexcept nogil
