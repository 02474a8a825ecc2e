# SPDX-License-Identifier: Apache-2.0
"""Messages put one by one or a few at a time."""
cimport cython
from libc.stdint cimport int64_t

from rmq._core._logtail cimport LogTail
from rmq._core._ownedlock cimport OwnedLock
from rmq._core._putbatch cimport PutBatch
from rmq._core._queuetable cimport QueueTable


@cython.final
@cython.no_gc_clear
cdef class Putter:
    """Puts messages into an open store as long as nothing is out of the ordinary."""
    cdef:
        OwnedLock _put_lock
        OwnedLock _flush_lock
        LogTail _tail
        QueueTable _queues
        PutBatch _batch
        Py_buffer _marks            # buf is NULL once closed
        object _clock
        int64_t _ticks              # of the clock in a millisecond
        int64_t _forks              # when it was made
        type _kind                  # PutResult
    cdef int64_t _now(self) except? -1
    cdef bint _take_lock(self) noexcept
    cdef bint _may_begin(self) noexcept
    cdef bint _append(self, int64_t *timestamp) except -1
