# SPDX-License-Identifier: Apache-2.0
"""Rows of columns that differ in body, texts and queue only: checked by the longest of each column, encoded from them.

Source: RocketMQ MessageExtEncoder#encode.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc

cimport rmq._core._layout as L
from rmq._core._alike cimport Alike, can_be_alike, encode_alike, take_alike
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._putrow cimport (
    PutRules, QueuesAtHand, check_row_topic, forget_queues, queue_at_hand, queue_of, set_row, settle,
)
from rmq._core._queuetable cimport QueueSlot, QueueTable
from rmq._core._record cimport PutRow, encode_record, rmq_texts
from rmq._core._textcolumn cimport TextColumn, text_at

import numpy as np

cdef extern from "texts.h" nogil:
    int64_t rmq_texts_size(const rmq_texts *texts, int64_t i) noexcept
    int64_t rmq_texts_longest(const rmq_texts *texts) noexcept
    int64_t rmq_texts_total(const rmq_texts *texts, int64_t count) noexcept


cdef void *_with_room(void *items, Py_ssize_t *capacity, Py_ssize_t count, size_t size) except NULL:
    """Room for so many items of a size."""
    cdef void *more = items
    if count > capacity[0]:
        more = realloc(items, <size_t>count * size)
        if more == NULL:
            raise MemoryError()
        capacity[0] = count
    return more


@cython.final
cdef class ColumnRows:
    def __dealloc__(self):
        free(self._phy_offsets)
        free(self._in_queues)

    cdef bint _take_queue_ids(self, dict numbers, Py_ssize_t count) except -1:
        """Copy the queue ids; False: one of them is none, or rows have other numbers of their own."""
        cdef const int64_t[::1] queue_ids
        cdef int64_t number, all_bits = 0, first, differ = 0
        cdef Py_ssize_t i
        self._has_queues = False
        if not numbers:
            return True
        queue_ids = numbers.get("queue_id")
        if len(numbers) > 1 or queue_ids is None or queue_ids.shape[0] != count:
            return False
        self._in_queues = <InQueue *>_with_room(self._in_queues, &self._queue_capacity, count, sizeof(InQueue))
        first = queue_ids[0]
        for i in range(count):
            number = queue_ids[i]
            all_bits |= number
            differ |= number ^ first
            self._in_queues[i].id = <int32_t>number
        self._has_queues, self.first.queue_id = differ != 0, <int32_t>first
        return 0 <= all_bits <= 0x7FFFFFFF

    cdef bint take(self, PutRules rules, Py_ssize_t count, TextColumn topic, TextColumn body,
                   const rmq_texts *texts, dict numbers) except -1:
        """Take rows of one topic and texts; False: there may be a bad one among them, or they are not alike.

        IllegalMessageError for the topic. The columns are borrowed, but for numbers.
        """
        cdef int64_t size, most
        cdef int malformed = 0
        self.count = 0
        if count < 2 or topic.count != 1 or body.missing.shape[0]:
            return False
        set_row(&self.first, rules.store_host)
        if not self._take_queue_ids(numbers, count):
            return False
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
        self._phy_offsets = <int64_t *>_with_room(self._phy_offsets, &self._capacity, count, sizeof(int64_t))
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

    cdef int find_queues(self, int32_t start, int32_t stop, QueueTable queues) except -1:
        """Find or add the queues of rows [start, stop)."""
        cdef QueuesAtHand at_hand
        cdef int32_t i
        if not self._has_queues:
            self.first.queue = queue_of(&self.first, self.first.queue_id, queues)
            return 0
        forget_queues(&at_hand)
        for i in range(start, stop):
            self._in_queues[i].number = queue_at_hand(&at_hand, &self.first, self._in_queues[i].id, queues)
        return 0

    cdef void encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                     int64_t store_timestamp, QueueSlot *slots) noexcept nogil:
        """Write rows [start, stop) at base + position. REQUIRES: room for them, find_queues of them."""
        cdef PutRow row = self.first
        cdef Alike alike
        cdef rmq_texts texts = self.texts
        cdef const uint8_t *bodies = self.bodies
        cdef const int64_t *starts = self.body_starts
        cdef int64_t *phy_offsets = self._phy_offsets
        cdef InQueue *in_queues = self._in_queues
        cdef QueueSlot *slot = &slots[self.first.queue]
        cdef bint has_queues = self._has_queues
        cdef int64_t size
        cdef int32_t i, body_size, properties_size, fixed = self.first.size, frame = self.first.properties_size
        if start >= stop:
            return
        self._queue_offset = slot.next_offset - start
        for i in range(start, stop):
            body_size = <int32_t>(starts[i + 1] - starts[i])
            size = rmq_texts_size(&texts, i)
            properties_size = <int32_t>(frame + size)
            size += fixed + body_size
            phy_offsets[i] = segment_phy_offset + position
            if has_queues:
                slot = &slots[in_queues[i].number]
                row.queue_id, in_queues[i].offset = in_queues[i].id, slot.next_offset
            row.queue_offset = slot.next_offset
            slot.next_offset += 1
            if i == start:
                row.body, row.body_size = bodies + starts[i], body_size
                row.properties_size, row.size = properties_size, <int32_t>size
                encode_record(&row, base + position, phy_offsets[i], store_timestamp, &texts, i)
                take_alike(&alike, &row, base + position)
            else:
                encode_alike(&alike, base + position, <int32_t>size, row.queue_id, row.queue_offset,
                             phy_offsets[i], bodies + starts[i], body_size, NULL, properties_size, &texts, i)
            position += size

    def results(self):
        """PutBatch.results."""
        cdef Py_ssize_t i
        phy_offset = np.empty(self.count, np.int64)
        size = np.empty(self.count, np.int32)
        queue_id = np.full(self.count, self.first.queue_id, np.int32)
        queue_offset = np.arange(self._queue_offset, self._queue_offset + self.count)
        cdef int64_t[::1] phy_offsets = phy_offset, offsets = queue_offset
        cdef int32_t[::1] sizes = size, ids = queue_id
        for i in range(self.count):
            phy_offsets[i] = self._phy_offsets[i]
            sizes[i] = <int32_t>self.size(i)
            if self._has_queues:
                offsets[i], ids[i] = self._in_queues[i].offset, self._in_queues[i].id
        topic = (<const char *>self.first.topic)[:self.first.topic_size].decode()
        host = (<const char *>self.first.store_host)[:self.first.store_host_size]
        return phy_offset, queue_offset, size, queue_id, [topic] * self.count, [host] * self.count
