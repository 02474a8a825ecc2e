# SPDX-License-Identifier: Apache-2.0
"""A lock that knows its thread."""
cimport cython
from cpython.pythread cimport PyThread_type_lock


@cython.final
cdef class OwnedLock:
    """A lock that its thread may take again, as threading.RLock, for Python and for compiled code."""
    cdef:
        PyThread_type_lock _lock
        unsigned long _owner        # thread that holds it, 0: none; others compare it with themselves only
        int _depth
    cdef bint mine(self) noexcept
    cdef bint try_take(self) noexcept
    cdef bint take_soon(self) noexcept
    cdef void give(self) noexcept
