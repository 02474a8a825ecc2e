# SPDX-License-Identifier: Apache-2.0
"""The end of a log that takes records."""
cimport cython
from libc.stdint cimport int64_t

from rmq._core._mapguard cimport MapGuard
from rmq._core._putbatch cimport PutBatch
from rmq._core._queuetable cimport QueueTable


@cython.final
@cython.no_gc_clear
cdef class LogTail:
    """Where the next record goes. It stands on a segment that has blocks and is owed to the disk, or nowhere."""
    cdef:
        Py_buffer _segment              # the map it stands on; buf is NULL when there is none
        MapGuard _guard
        int64_t _begin                  # phy offset of the segment's first byte
        int64_t _limit                  # phy offset behind the blocks; below every position: nothing goes in
        public int64_t written_from     # batches of so many bytes are not taken: they are written
        public bint is_shut             # nothing goes in any more, wherever it stands
        public int64_t position         # phy offset of the next byte to write
        public int64_t planned          # where an append under way will end
        public int64_t last_phy_offset  # the record that ends at position, -1: none or not known
        public int64_t last_timestamp   # store timestamp of what was put last, 0: nothing yet
        public int64_t behind           # messages put that queues and index do not have yet
        int64_t _behind_most            # with so many, or a log that ends there, they are due
        int64_t _due_at
    cdef bint is_due_with(self, int64_t more) noexcept
    cdef bint has_room(self, int64_t size) noexcept
    cdef bint take(self, PutBatch batch, int64_t store_timestamp, QueueTable queues) except -1
    cdef void _reach(self, int64_t phy_offset, PutBatch batch) noexcept
