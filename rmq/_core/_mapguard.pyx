# SPDX-License-Identifier: Apache-2.0
"""Maps whose pages may vanish: another process truncates the file, or the disk cannot read it (SIGBUS).

A guarded map then reads as zeros, and what is written to it is lost: ask `lost` after each use, before anything is
concluded from what was read. `faulthandler.enable()` must come before the first map, not after it.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetFromErrno
from libc.stdint cimport int64_t

cdef extern from "mapguard.h" nogil:
    int64_t rmq_lost_count
    int rmq_guard_install() noexcept
    rmq_guard *rmq_guard_add(void *begin, size_t size) noexcept
    void rmq_guard_remove(rmq_guard *guard) noexcept


@cython.final
cdef class MapGuard:
    def __cinit__(self, map not None):
        cdef Py_buffer buffer
        self._lost = -1
        PyObject_GetBuffer(map, &buffer, PyBUF_SIMPLE)
        try:
            if rmq_guard_install():
                PyErr_SetFromErrno(OSError)
            self._guard = rmq_guard_add(buffer.buf, <size_t>buffer.len)
        finally:
            PyBuffer_Release(&buffer)
        if self._guard == NULL:
            raise MemoryError()

    def __dealloc__(self):
        self.release()

    @property
    def lost(self):
        """Position of the first page that was gone when it was touched, -1: none so far."""
        return self._guard.lost if self._guard != NULL else self._lost

    def release(self):
        """The map was closed."""
        if self._guard != NULL:
            self._lost = self._guard.lost
            rmq_guard_remove(self._guard)
            self._guard = NULL


cdef bint is_whole(MapGuard guard) noexcept:
    """Whether the map is there, and no page of it was gone."""
    return guard._guard != NULL and guard._guard.lost < 0


def lost_pages():
    """How often a guarded map of this process met a page that was gone; 0: no map need be asked."""
    return rmq_lost_count
