# SPDX-License-Identifier: Apache-2.0
"""The end of a log that takes records, one batch after the other. The put lock is the caller's."""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, int64_t, uint8_t

cimport rmq._core._layout as L
from rmq._core._mapguard cimport MapGuard, is_whole
from rmq._core._putbatch cimport PutBatch
from rmq._core._queuetable cimport QueueTable


@cython.final
@cython.no_gc_clear
cdef class LogTail:
    def __cinit__(self):
        self.last_phy_offset = self._limit = -1
        self.written_from = INT64_MAX
        self.followed(1, 0)

    def __dealloc__(self):
        self.release()

    def stand(self, segment not None, MapGuard guard not None, int64_t segment_phy_offset, int64_t reserved):
        """Take records into a segment's map, whose first `reserved` bytes have blocks, until `rest`."""
        self.release()
        PyObject_GetBuffer(segment, &self._segment, PyBUF_WRITABLE)
        self._guard, self._begin = guard, segment_phy_offset
        self._limit = segment_phy_offset + min(reserved, <int64_t>self._segment.len)

    def followed(self, int64_t most, int64_t size):
        """Queues and index have all that was put; they are due again with `most` messages or `size` bytes more."""
        self.behind, self._behind_most, self._due_at = 0, most, self.position + size

    cdef bint is_due_with(self, int64_t more) noexcept:
        return self.behind + more >= self._behind_most or (self.behind and self.position >= self._due_at)

    @property
    def is_due(self):
        """Whether queues and index have to follow."""
        return self.is_due_with(0)

    def is_on(self, int64_t segment_phy_offset):
        """Whether it stands on the segment that begins there."""
        return self._limit >= 0 and self._begin == segment_phy_offset

    def rest(self):
        """Take nothing until it stands again."""
        self._limit = -1

    def release(self):
        """rest, and let go of the map."""
        self.rest()
        if self._segment.buf != NULL:
            PyBuffer_Release(&self._segment)
            self._segment.buf = NULL

    cdef bint has_room(self, int64_t size) noexcept:
        """Whether records of so many bytes may go in now: nothing is half done, lost, shut or beyond the blocks."""
        return size < self.written_from and self._begin <= self.position == self.planned and \
            self.position + size + L.BLANK_HEADER_SIZE <= self._limit and is_whole(self._guard) and \
            not self.is_shut

    cdef bint take(self, PutBatch batch, int64_t store_timestamp, QueueTable queues) except -1:
        cdef int64_t end = self.position + batch.records_size
        if not self.has_room(batch.records_size):
            return False
        self.planned = end
        batch.write(<uint8_t *>self._segment.buf, self._segment.len, self._begin, self.position - self._begin, 0,
                    batch.count, store_timestamp, queues)
        if not is_whole(self._guard):
            return False
        self._reach(end, batch)
        return True

    def reach(self, int64_t phy_offset, PutBatch batch not None):
        """The log ends there, with the rows of a batch that is encoded; no signal comes in between the two."""
        self._reach(phy_offset, batch)

    cdef void _reach(self, int64_t phy_offset, PutBatch batch) noexcept:
        if batch.count:
            self.last_phy_offset = batch.last_place()
        self.position, batch.is_put = phy_offset, True

    @property
    def was_interrupted(self):
        """Whether an exception such as KeyboardInterrupt ended an append that may have encoded rows."""
        return self.planned > self.position

    def append(self, PutBatch batch not None, int64_t store_timestamp, QueueTable queues not None):
        """Encode all rows at the end, if all have room there; False: nothing counts as put.

        False with `planned` past `position`: pages of the map were gone.
        """
        return self.take(batch, store_timestamp, queues)
