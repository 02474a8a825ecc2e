# SPDX-License-Identifier: Apache-2.0
"""Queues by (topic, queue id), with the offset of each queue's next message (RocketMQ: topicQueueTable)."""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

from rmq._core._javahash cimport seed_of_topic

cdef extern from "queuehash.h" nogil:
    uint32_t rmq_queue_hash(const uint8_t *topic, int32_t size, int32_t queue_id) noexcept


@cython.final
cdef class QueueTable:
    def __cinit__(self):
        self.bucket_mask = 63
        self.room = 32
        self.buckets = <int32_t *>calloc(self.bucket_mask + 1, sizeof(int32_t))
        self.slots = <QueueSlot *>calloc(self.room, sizeof(QueueSlot))
        if self.buckets == NULL or self.slots == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef int32_t i
        if self.slots != NULL:
            for i in range(self.count):
                free(self.slots[i].topic)
        free(self.slots)
        free(self.buckets)

    def __len__(self):
        return self.count

    cdef int32_t _find(self, const uint8_t *topic, int32_t topic_size, int32_t queue_id,
                       int32_t *bucket) noexcept nogil:
        """Number of the queue, or -1 with *bucket the place for it. Ends: a quarter of the buckets stays free."""
        cdef int32_t at = <int32_t>(rmq_queue_hash(topic, topic_size, queue_id) & <uint32_t>self.bucket_mask), number
        cdef QueueSlot *slot
        while self.buckets[at] != 0:
            number = self.buckets[at] - 1
            slot = &self.slots[number]
            if slot.queue_id == queue_id and slot.topic_size == topic_size and \
                    memcmp(slot.topic, topic, topic_size) == 0:
                return number
            at = (at + 1) & self.bucket_mask
        bucket[0] = at
        return -1

    cdef bint _grow(self) noexcept nogil:
        cdef int32_t mask = self.bucket_mask * 2 + 1, at, i
        cdef int32_t *buckets
        cdef QueueSlot *slots = <QueueSlot *>realloc(self.slots, <size_t>self.room * 2 * sizeof(QueueSlot))
        if slots == NULL:
            return False
        self.slots = slots
        buckets = <int32_t *>calloc(<size_t>mask + 1, sizeof(int32_t))
        if buckets == NULL:
            return False
        self.room *= 2
        for i in range(self.count):
            at = <int32_t>(rmq_queue_hash(slots[i].topic, slots[i].topic_size, slots[i].queue_id) & <uint32_t>mask)
            while buckets[at] != 0:
                at = (at + 1) & mask
            buckets[at] = i + 1
        free(self.buckets)
        self.buckets = buckets
        self.bucket_mask = mask
        return True

    cdef int32_t find_or_add(self, const uint8_t *topic, int32_t topic_size, int32_t queue_id) noexcept nogil:
        """Number of the queue, added with next offset 0 when new; -1 when memory is short."""
        cdef int32_t bucket = 0, number
        cdef QueueSlot *slot
        if self.count:  # messages of one queue often follow each other
            slot = &self.slots[self.last]
            if slot.queue_id == queue_id and slot.topic_size == topic_size and \
                    memcmp(slot.topic, topic, topic_size) == 0:
                return self.last
        number = self._find(topic, topic_size, queue_id, &bucket)
        if number >= 0:
            self.last = number
            return number
        if self.count == self.room:
            if not self._grow():
                return -1
            self._find(topic, topic_size, queue_id, &bucket)
        slot = &self.slots[self.count]
        slot.topic = <uint8_t *>malloc(topic_size + 1)
        if slot.topic == NULL:
            return -1
        memcpy(slot.topic, topic, topic_size)
        slot.topic_size = topic_size
        slot.queue_id = queue_id
        slot.seed = seed_of_topic(topic, topic_size)
        slot.next_offset = 0
        self.buckets[bucket] = self.count + 1
        self.count += 1
        return self.count - 1

    def add(self, bytes topic not None, int32_t queue_id):
        """Number of the queue, added with next offset 0 when new."""
        cdef int32_t number = self.find_or_add(<const uint8_t *><const char *>topic, <int32_t>len(topic), queue_id)
        if number < 0:
            raise MemoryError()
        return number

    def find(self, bytes topic not None, int32_t queue_id):
        """Number of the queue, or -1."""
        cdef int32_t bucket = 0
        return self._find(<const uint8_t *><const char *>topic, <int32_t>len(topic), queue_id, &bucket)

    def queue(self, int32_t number):
        """(topic bytes, queue id) of a queue; IndexError when there is none of that number."""
        if number < 0 or number >= self.count:
            raise IndexError(number)
        cdef QueueSlot *slot = &self.slots[number]
        return PyBytes_FromStringAndSize(<const char *>slot.topic, slot.topic_size), slot.queue_id

    def next_offset(self, int32_t number):
        if number < 0 or number >= self.count:
            raise IndexError(number)
        return self.slots[number].next_offset

    def set_next_offset(self, int32_t number, int64_t next_offset):
        if number < 0 or number >= self.count:
            raise IndexError(number)
        self.slots[number].next_offset = next_offset
