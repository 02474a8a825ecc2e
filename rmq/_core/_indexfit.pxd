# SPDX-License-Identifier: Apache-2.0
"""Whether bytes are an index file of a geometry."""
from libc.stdint cimport int32_t

from rmq._core._indexwalk cimport IndexBytes

cdef int32_t first_unlinked(const IndexBytes *file, int32_t count, int32_t *newest) noexcept nogil
cdef bint fits(const IndexBytes *file, int32_t *newest, bint being_put) noexcept nogil
