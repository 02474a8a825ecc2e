# SPDX-License-Identifier: Apache-2.0
"""A lock that knows its thread: threading.RLock costs a put 180 ns and its C face is not public."""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport (
    NOWAIT_LOCK,
    PY_LOCK_ACQUIRED,
    PyLockStatus,
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_type_lock,
)

cdef extern from "pythread.h" nogil:
    unsigned long PyThread_get_thread_ident() noexcept
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int intr_flag) noexcept

cdef extern from *:
    """
    /* Read while another thread may change it: a thread's own id is never seen there but when it holds the lock. */
    #define rmq_owner(place) __atomic_load_n(place, __ATOMIC_RELAXED)
    #define rmq_set_owner(place, value) __atomic_store_n(place, value, __ATOMIC_RELAXED)
    """
    unsigned long rmq_owner(unsigned long *place) noexcept nogil
    void rmq_set_owner(unsigned long *place, unsigned long value) noexcept nogil

cdef enum:
    WAIT_US = 100


@cython.final
cdef class OwnedLock:
    def __cinit__(self):
        self._lock = PyThread_allocate_lock()
        if self._lock == NULL:
            raise MemoryError()

    def __dealloc__(self):
        if self._lock != NULL:
            PyThread_free_lock(self._lock)

    cdef bint mine(self) noexcept:
        return rmq_owner(&self._owner) == PyThread_get_thread_ident()

    cdef bint try_take(self) noexcept:
        """Take it if nobody holds it, not its own thread either. Does not wait."""
        if not PyThread_acquire_lock(self._lock, NOWAIT_LOCK):
            return False
        rmq_set_owner(&self._owner, PyThread_get_thread_ident())
        self._depth = 1
        return True

    cdef bint take_soon(self) noexcept:
        """Take it, now or when it gets free within WAIT_US; its own thread does not wait. May give up the GIL.

        Whom the lock wakes must not keep it while it waits for the GIL: all others would wait for it, one step each.
        """
        cdef PyLockStatus status
        if self.try_take():
            return True
        if self.mine():
            return False
        with nogil:
            status = PyThread_acquire_lock_timed(self._lock, WAIT_US, 1)
            if status == PY_LOCK_ACQUIRED:
                PyThread_release_lock(self._lock)
        return status == PY_LOCK_ACQUIRED and self.try_take()

    cdef void give(self) noexcept:
        """REQUIRES: mine()."""
        self._depth -= 1
        if self._depth == 0:
            rmq_set_owner(&self._owner, 0)
            PyThread_release_lock(self._lock)

    def is_mine(self):
        """Whether the calling thread holds it."""
        return self.mine()

    def __enter__(self):
        """Wait for it without the GIL. What a signal handler raises meanwhile comes out, and it is not taken."""
        cdef PyLockStatus status
        if self.mine():
            self._depth += 1
            return self
        while not self.try_take():
            with nogil:
                status = PyThread_acquire_lock_timed(self._lock, -1, 1)
            if status == PY_LOCK_ACQUIRED:
                rmq_set_owner(&self._owner, PyThread_get_thread_ident())
                self._depth = 1
                break
            PyErr_CheckSignals()
        return self

    def __exit__(self, kind, error, trace):
        if not self.mine():
            raise RuntimeError("a lock is given back by the thread that holds it")
        self.give()
