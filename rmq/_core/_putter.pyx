# SPDX-License-Identifier: Apache-2.0
"""Messages put one by one or a few at a time, each call compiled: load, append, publish, answer. With the GIL, which is
let go of only while much is copied."""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLong
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t

cimport rmq._core._layout as L
from rmq._core._bytes cimport store_i64
from rmq._core._logtail cimport LogTail
from rmq._core._message cimport Message
from rmq._core._ownedlock cimport OwnedLock
from rmq._core._putbatch cimport PutBatch
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport PutRow, show_end

from rmq._core._message import to_ms

cdef extern from "forks.h" nogil:
    int64_t rmq_forks
    int rmq_forks_install() noexcept

cdef extern from *:
    """
    /* A tuple of a subclass, its items not set yet: as tuple.__new__ makes it, without a plain tuple before. */
    static inline PyObject *rmq_new_tuple(PyObject *kind, Py_ssize_t size) {
        return ((PyTypeObject *)kind)->tp_alloc((PyTypeObject *)kind, size);
    }

    static inline uint8_t *rmq_ascii_of(PyObject *text) { return PyUnicode_1BYTE_DATA(text); }
    """
    tuple rmq_new_tuple(object kind, Py_ssize_t size)
    uint8_t *rmq_ascii_of(object text) noexcept

cdef extern from "numbers.h":
    void rmq_hex(uint8_t *text, const uint8_t *p, int size) noexcept

cdef extern from "Python.h":
    str PyUnicode_New(Py_ssize_t size, Py_UCS4 most)
    void Py_INCREF(object item)
    void PyObject_GC_UnTrack(PyObject *item) noexcept
    void PyTuple_SET_ITEM(object items, Py_ssize_t i, object item)  # takes a reference over

cdef Py_ssize_t FEW = 256

if rmq_forks_install():
    raise MemoryError()


cdef str _msg_id(const uint8_t *host, int size, int64_t phy_offset):
    """Host and phy offset in upper-case hex. Source: MessageDecoder#createMessageId."""
    cdef str text = PyUnicode_New(2 * (size + 8), 127)
    cdef uint8_t *digits = rmq_ascii_of(text)
    cdef uint8_t[8] place
    store_i64(place, phy_offset)
    rmq_hex(digits, host, size)
    rmq_hex(digits + 2 * size, place, 8)
    return text


cdef inline void _set(tuple items, Py_ssize_t i, object item) noexcept:
    Py_INCREF(item)
    PyTuple_SET_ITEM(items, i, item)


cdef tuple _tuple(type kind, str topic, object queue_id, object queue_offset, int64_t phy_offset, object size,
                  object store_timestamp, const uint8_t *host, int host_size):
    """PutResult's fields as a tuple of that kind."""
    cdef object place = phy_offset
    cdef str msg_id = _msg_id(host, host_size, phy_offset)
    cdef tuple items = rmq_new_tuple(kind, 7)
    _set(items, 0, topic)
    _set(items, 1, queue_id)
    _set(items, 2, queue_offset)
    _set(items, 3, place)
    _set(items, 4, size)
    _set(items, 5, store_timestamp)
    _set(items, 6, msg_id)
    PyObject_GC_UnTrack(<PyObject *>items)  # texts and numbers lead nowhere: as tuples of them are, once collected
    return items


cdef tuple _result(type kind, str topic, const PutRow *row, object store_timestamp):
    return _tuple(kind, topic, row.queue_id, row.queue_offset, row.phy_offset, row.size, store_timestamp,
                  row.store_host, row.store_host_size)


def put_result(PutBatch batch not None, store_timestamp, *, type kind not None, Message message not None):
    """The answer for the one message of a batch, as encoded: a PutResult, which is a tuple of seven."""
    if batch.count != 1 or not issubclass(kind, tuple):
        raise ValueError("a result is a tuple, for one message")
    return _result(kind, message.topic, &batch.rows[0], store_timestamp)


@cython.boundscheck(True)   # a list may be shorter by the next row
def put_results(Py_ssize_t first, Py_ssize_t stop, *, type kind not None, list topics not None, list hosts not None,
                const int32_t[::1] queue_id, const int64_t[::1] queue_offset, const int64_t[::1] phy_offset,
                const int32_t[::1] size, const int64_t[::1] store_timestamp):
    """Rows [first, stop) of PutResults' columns as a list of PutResult."""
    cdef Py_ssize_t i, count = min(len(topics), len(hosts), queue_id.shape[0], queue_offset.shape[0],
                                   phy_offset.shape[0], size.shape[0], store_timestamp.shape[0])
    cdef list results = []
    cdef bytes host
    if not 0 <= first <= stop <= count or not issubclass(kind, tuple):
        raise ValueError(f"rows {first} to {stop} of {count}, each a tuple")
    for i in range(first, stop):
        host = hosts[i]
        results.append(_tuple(kind, topics[i], queue_id[i], queue_offset[i], phy_offset[i], size[i],
                              store_timestamp[i], <const uint8_t *><const char *>host, <int>len(host)))
    return results


@cython.final
@cython.no_gc_clear
cdef class Putter:
    def __cinit__(self, *, OwnedLock put_lock not None, OwnedLock flush_lock not None, LogTail tail not None,
                  QueueTable queues not None, PutBatch batch not None, marks not None, clock not None, int64_t ticks,
                  type kind not None):
        """clock: counts `ticks` in a millisecond. kind: what a put answers, a subclass of tuple.

        marks: whose visible mark tells readers where the log ends.
        """
        if ticks < 1 or not issubclass(kind, tuple):
            raise ValueError("ticks must be at least 1, kind a tuple")
        self._put_lock, self._flush_lock, self._tail = put_lock, flush_lock, tail
        self._queues, self._batch, self._clock, self._ticks = queues, batch, clock, ticks
        self._kind, self._forks = kind, rmq_forks
        PyObject_GetBuffer(marks, &self._marks, PyBUF_WRITABLE)
        if self._marks.len < L.MARKS_SIZE:
            raise ValueError("marks are shorter than MARKS_SIZE")

    def __dealloc__(self):
        self.close()

    def close(self):
        """Put nothing from here on, and let go of the marks."""
        if self._marks.buf != NULL:
            PyBuffer_Release(&self._marks)
            self._marks.buf = NULL

    cdef int64_t _now(self) except? -1:
        now = self._clock()
        if self._ticks == 1:
            return to_ms(now, "clock")
        return PyLong_AsLongLong(now) // self._ticks

    cdef bint _take_lock(self) noexcept:
        """Not while many messages are put or dispatched: the caller gets in line, or it would not come up soon."""
        return self._put_lock.try_take() or (self._batch.count <= FEW and not self._tail.is_due_with(-1)
                                             and self._put_lock.take_soon())

    cdef bint _may_begin(self) noexcept:
        """Whether a put may append now; then it has the lock."""
        return rmq_forks == self._forks and not self._flush_lock.mine() and self._take_lock()

    cdef bint _append(self, int64_t *timestamp) except -1:
        """Append and publish what the batch holds; False: nothing was done."""
        cdef LogTail tail = self._tail
        if not tail.has_room(self._batch.records_size):
            return False
        timestamp[0] = self._now()
        if not tail.take(self._batch, timestamp[0], self._queues):
            return False
        tail.last_timestamp = timestamp[0]
        tail.behind += self._batch.count
        show_end(<uint8_t *>self._marks.buf, tail.position)
        return True

    def put(self, message):
        """The result of a put; None when it needs more than an append: then nothing was done, and the caller does it.

        Raises as PutBatch.load_one.
        """
        cdef PutBatch batch = self._batch
        cdef int64_t timestamp = 0
        cdef PutRow row
        if type(message) is not Message or not self._may_begin():
            return None
        try:
            if self._marks.buf == NULL or self._tail.is_due_with(1):
                return None
            batch.borrow_one(message)
            if not self._append(&timestamp):
                return None
            row = batch.rows[0]
        finally:
            batch.forget()
            self._put_lock.give()
        return _result(self._kind, (<Message>message).topic, &row, timestamp)

    def put_few(self, list messages not None, bint results):
        """Of a put of several: PutBatch.results() and the store timestamp, or how many; None as of put. Raises as
        PutBatch.load."""
        cdef PutBatch batch = self._batch
        cdef int64_t timestamp = 0
        cdef list items
        cdef Py_ssize_t count
        if len(messages) > FEW:
            return None
        # Of its own: other threads, while the lock is waited for, and what a collection runs may change the caller's.
        # No slice: that looks at the items, then makes a list, for which a collection may run.
        items = list(messages)
        count = len(items)
        if not 0 < count <= FEW or type(items[0]) is not Message or not self._may_begin():    # it may be a table
            return None
        try:
            if self._marks.buf == NULL or self._tail.is_due_with(count):
                return None
            batch.load(items)
            if not self._append(&timestamp):
                return None
            # No (*results, timestamp): where its list cannot grow, Cython 3.3 lets go of the timestamp twice.
            try:
                return batch.results() + (timestamp,) if results else count
            except MemoryError as error:
                error.not_synced = count    # stored all the same
                raise
        finally:
            batch.forget()
            self._put_lock.give()
