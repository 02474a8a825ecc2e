# SPDX-License-Identifier: Apache-2.0
"""Records of a segment beside their units and index entries, some at a time.

Source: RocketMQ CommitLog#checkMessageAndReturnSize; what ConsumeQueue and IndexService make of each record.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

cimport rmq._core._layout as L
from rmq._core._record cimport CRC_NAME, CRC_NAME_SIZE, PARSE_PROPERTIES, RecordRow, SCAN_FULL, crc_of

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept

cdef int64_t ROUND_BYTES = 256 * 1024   # with its rows half of a second-level cache of 1 MiB, at 300 bytes a record
cdef int32_t ROWS_AHEAD = 8             # whose last bytes are asked for


cdef bint _has_misnamed_crc(const RecordRow *row) noexcept nogil:
    """Whether the whole-record CRC is right under almost its name: the scan took it for a property like any other."""
    cdef const uint8_t *tail = row.base + row.size - L.PROPERTY_CRC_SIZE
    cdef int k, named
    cdef int64_t stored = 0
    if row.properties_size < L.PROPERTY_CRC_SIZE:
        return False
    named = (tail[CRC_NAME_SIZE] == L.PROPERTY_NAME_END) + (tail[L.PROPERTY_CRC_SIZE - 1] == L.PROPERTY_END)
    for k in range(CRC_NAME_SIZE):
        named += tail[k] == <uint8_t>CRC_NAME[k]
    if named <= CRC_NAME_SIZE // 2 or named == CRC_NAME_SIZE + 2:
        return False
    for k in range(L.PROPERTY_CRC_DIGITS - 1, -1, -1):
        stored = stored * 10 + (tail[CRC_NAME_SIZE + 1 + k] - 48)
    return stored == crc_of(row.base, row.size - L.PROPERTY_CRC_SIZE)


@cython.final
cdef class RecordCheck:
    def __cinit__(self, QueueTable queues not None, UnitCheck units not None, EntryCheck entries not None):
        self.queues = queues
        self.units = units
        self.entries = entries
        self.misnamed = []

    cdef int _look(self, RecordBatch batch) except -1 nogil:
        """What a round's rows say of themselves."""
        cdef int32_t i
        cdef const RecordRow *row
        for i in range(batch.count):
            row = &batch.rows[i]
            if i + ROWS_AHEAD < batch.count:
                rmq_prefetch((row + ROWS_AHEAD).base + (row + ROWS_AHEAD).size - L.PROPERTY_CRC_SIZE)
            if self.record_count == 0:
                self.newest = self.oldest = row.store_timestamp
            self.record_count += 1
            self.newest, self.oldest = max(self.newest, row.store_timestamp), min(self.oldest, row.store_timestamp)
            if _has_misnamed_crc(row):
                with gil:
                    self.misnamed.append(row.phy_offset)
        return 0

    def begin(self, RecordBatch batch not None, segment not None, int64_t segment_phy_offset, int64_t begin,
              int64_t end, *, int checks, int64_t step, int64_t behind=0):
        """A step: records from phy offset `begin` up to `end` of a segment, until they are `step` bytes or more.

        behind: bytes of the segment that follow, when it is not whole. The batch takes the rows, and must not be used
        or released until the step is done. ValueError as of RecordBatch.scan.
        """
        if step < 1:
            raise ValueError("a step has at least one byte")
        self.batch = None
        self.segment = batch.start(segment, segment_phy_offset, begin, end, &self.segment_size)
        self.segment_phy_offset, self.end, self.behind = segment_phy_offset, end, behind
        self.checks = checks | PARSE_PROPERTIES
        self.step_end = begin + max(1, min(end - begin, step))     # one round at least: it finds the end
        self.unit_row = self.entry_row = 0
        self.batch = batch

    def go_on(self):
        """Go on with the step; returns WANTS_*: what it waits for, or that it is done. Then the batch tells where the
        next one begins, and the scan's stop code. ValueError before `begin`, and once an index file is released;
        MemoryError, which ends the step.
        """
        cdef RecordBatch batch = self.batch
        cdef UnitCheck units = self.units
        cdef EntryCheck entries = self.entries
        cdef int wants = WANTS_NOTHING
        cdef int32_t row = 0
        if batch is None or batch._source is None:
            raise ValueError("no step has begun")
        entries.check_file()
        with nogil:
            while True:
                row = units.compare(batch.rows, self.unit_row, batch.count)
                if row < 0:
                    break
                self.unit_row = row
                if row < batch.count:
                    wants = WANTS_UNITS
                    break
                row = entries.compare(batch.rows, self.entry_row, batch.count)
                if row < 0:
                    break
                self.entry_row = row
                if row < batch.count:
                    wants = WANTS_ENTRIES
                    break
                if batch.stop != SCAN_FULL or batch.next_phy_offset >= self.step_end:
                    break
                batch.fill(self.segment, self.segment_size, self.segment_phy_offset, batch.next_phy_offset, self.end,
                           self.checks, self.queues, ROUND_BYTES, self.behind)
                self._look(batch)
                self.unit_row = self.entry_row = 0
        if wants == WANTS_NOTHING:
            self.batch = None
        if row < 0:
            raise MemoryError()
        return wants

    def take_misnamed(self):
        """Phy offsets, since the last call, of records whose whole-record CRC is right under a damaged name."""
        found, self.misnamed = self.misnamed, []
        return found
