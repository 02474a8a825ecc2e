# SPDX-License-Identifier: Apache-2.0
"""Rows of columns that differ in body and texts only, checked by the longest of each column, encoded from the columns.

Source: RocketMQ MessageExtEncoder#encode.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc

cimport rmq._core._layout as L
from rmq._core._alike cimport Alike, can_be_alike, encode_alike, take_alike
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._putrow cimport PutRules, check_row_topic, set_row, settle
from rmq._core._queuetable cimport QueueSlot
from rmq._core._record cimport PutRow, encode_record, rmq_texts
from rmq._core._textcolumn cimport TextColumn, text_at

import numpy as np

cdef extern from "texts.h" nogil:
    int64_t rmq_texts_size(const rmq_texts *texts, int64_t i) noexcept
    int64_t rmq_texts_longest(const rmq_texts *texts) noexcept
    int64_t rmq_texts_total(const rmq_texts *texts, int64_t count) noexcept


cdef int64_t _queue_id_of_all(dict numbers, Py_ssize_t count) except -2:
    """The one queue id of all rows; -1: they have several, one that is none, or other numbers of their own."""
    cdef const int64_t[::1] queue_ids
    cdef int64_t first, differ = 0
    cdef Py_ssize_t i
    if not numbers:
        return 0
    if len(numbers) > 1 or "queue_id" not in numbers:
        return -1
    queue_ids = numbers["queue_id"]
    if queue_ids.shape[0] != count:
        return -1
    first = queue_ids[0]
    for i in range(count):
        differ |= queue_ids[i] ^ first
    return first if not differ and 0 <= first <= 0x7FFFFFFF else -1


@cython.final
cdef class ColumnRows:
    def __dealloc__(self):
        free(self._phy_offsets)

    cdef bint take(self, PutRules rules, Py_ssize_t count, TextColumn topic, TextColumn body,
                   const rmq_texts *texts, dict numbers) except -1:
        """Take rows of one topic, one queue and texts; False: there may be a bad one among them, or they are not alike.

        IllegalMessageError for the topic. The columns are borrowed, but for numbers.
        """
        cdef int64_t size, most, queue_id
        cdef int64_t *phy_offsets
        cdef int malformed = 0
        self.count = 0
        if count < 2 or topic.count != 1 or body.missing.shape[0]:
            return False
        queue_id = _queue_id_of_all(numbers, count)
        if queue_id < 0:
            return False
        set_row(&self.first, rules.store_host)
        self.first.queue_id = <int32_t>queue_id
        self.first.topic = text_at(topic, 0, &size)
        if size <= 0 or size > L.TOPIC_SIZE_LIMIT:
            return False
        self.first.topic_size = <int32_t>size
        check_row_topic(0, &self.first)
        settle(rules, 0, &self.first, rmq_utf16_units(self.first.topic, size, &malformed), False, False)
        most = rmq_texts_longest(texts)
        if not can_be_alike(&self.first) or body.longest > rules.max_message_size or \
                self.first.properties_size + most > L.PROPERTIES_SIZE_LIMIT or \
                self.first.size + body.longest + most > min(rules.max_record_size, <int64_t>0x7FFFFFFF):
            return False
        if count > self._capacity:
            phy_offsets = <int64_t *>realloc(self._phy_offsets, <size_t>count * sizeof(int64_t))
            if phy_offsets == NULL:
                raise MemoryError()
            self._phy_offsets, self._capacity = phy_offsets, count
        self.texts = texts[0]
        self.bodies, self.body_starts = body.first, body.starts
        self.records_size = count * <int64_t>self.first.size + body.starts[count] - body.starts[0] + \
            rmq_texts_total(texts, count)
        self.count = <int32_t>count
        return True

    cdef int64_t size(self, Py_ssize_t i) noexcept nogil:
        """Bytes of row i's record."""
        return self.first.size + self.body_starts[i + 1] - self.body_starts[i] + rmq_texts_size(&self.texts, i)

    cdef int64_t last_phy_offset(self) noexcept:
        return self._phy_offsets[self.count - 1]

    cdef void encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                     int64_t store_timestamp, QueueSlot *slots) noexcept nogil:
        """Write rows [start, stop) at base + position. REQUIRES: room for them; first.queue is a number of `slots`."""
        cdef PutRow row = self.first
        cdef Alike alike
        cdef rmq_texts texts = self.texts
        cdef const uint8_t *bodies = self.bodies
        cdef const int64_t *starts = self.body_starts
        cdef int64_t *phy_offsets = self._phy_offsets
        cdef int64_t queue_offset = slots[self.first.queue].next_offset, size
        cdef int32_t i, body_size, properties_size, fixed = self.first.size, frame = self.first.properties_size
        if start >= stop:
            return
        self._queue_offset = queue_offset - start
        slots[self.first.queue].next_offset += stop - start
        for i in range(start, stop):
            body_size = <int32_t>(starts[i + 1] - starts[i])
            size = rmq_texts_size(&texts, i)
            properties_size = <int32_t>(frame + size)
            size += fixed + body_size
            phy_offsets[i] = segment_phy_offset + position
            if i == start:
                row.body, row.body_size = bodies + starts[i], body_size
                row.properties_size, row.size, row.queue_offset = properties_size, <int32_t>size, queue_offset
                encode_record(&row, base + position, phy_offsets[i], store_timestamp, &texts, i)
                take_alike(&alike, &row, base + position)
            else:
                encode_alike(&alike, base + position, <int32_t>size, row.queue_id, queue_offset + i - start,
                             phy_offsets[i], bodies + starts[i], body_size, NULL, properties_size, &texts, i)
            position += size

    def results(self):
        """PutBatch.results."""
        cdef Py_ssize_t i
        phy_offset = np.empty(self.count, np.int64)
        size = np.empty(self.count, np.int32)
        cdef int64_t[::1] phy = phy_offset
        cdef int32_t[::1] sizes = size
        for i in range(self.count):
            phy[i] = self._phy_offsets[i]
            sizes[i] = <int32_t>self.size(i)
        topic = (<const char *>self.first.topic)[:self.first.topic_size].decode()
        host = (<const char *>self.first.store_host)[:self.first.store_host_size]
        return (phy_offset, np.arange(self._queue_offset, self._queue_offset + self.count), size,
                np.full(self.count, self.first.queue_id, np.int32), [topic] * self.count, [host] * self.count)
