# SPDX-License-Identifier: Apache-2.0
"""Records of a segment beside their units and index entries, some at a time."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._entrycheck cimport EntryCheck
from rmq._core._queuetable cimport QueueTable
from rmq._core._recordbatch cimport RecordBatch
from rmq._core._unitcheck cimport UnitCheck

# What `go_on` waits for.
cpdef enum:
    WANTS_NOTHING = 0           # the step is done
    WANTS_UNITS = 1             # those of UnitCheck.wanted
    WANTS_ENTRIES = 2           # the next index file, or faults to be taken


@cython.final
cdef class RecordCheck:
    """Scans and compares: rows of a few records at a time, and all that is asked of them while they are in the cache.

    It stops where only Python can go on, in the middle of its rows, and goes on there.
    """
    cdef:
        QueueTable queues
        UnitCheck units
        EntryCheck entries
        RecordBatch batch           # None until begin()
        const uint8_t *segment      # which the batch borrows
        int64_t segment_size
        int64_t segment_phy_offset
        int64_t end
        int64_t behind              # bytes of the segment that follow it
        int64_t step_end            # a round that ends here or behind is the last one of the step
        int checks
        int32_t unit_row            # rows before are compared
        int32_t entry_row
        list misnamed
        readonly int64_t record_count
        readonly int64_t newest     # store timestamps; hold once record_count is above 0
        readonly int64_t oldest
    cdef int _look(self, RecordBatch batch) except -1 nogil
