# SPDX-License-Identifier: Apache-2.0
"""Maps whose pages may vanish."""
cimport cython
from libc.stdint cimport int64_t

cdef extern from "mapguard.h" nogil:
    ctypedef struct rmq_guard:
        int64_t lost


@cython.final
cdef class MapGuard:
    """Stands for one map as long as it is mapped: release it once the map is closed."""
    cdef int64_t _lost                  # what it was at release
    cdef rmq_guard *_guard              # NULL once released


cdef bint is_whole(MapGuard guard) noexcept
