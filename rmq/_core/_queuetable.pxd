# SPDX-License-Identifier: Apache-2.0
"""Queues by (topic, queue id), with the offset of each queue's next message."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t


cdef struct QueueSlot:
    uint8_t *topic              # owned
    int32_t topic_size
    int32_t queue_id
    int32_t seed                # hash of `topic#`, on which those of its keys go on
    int64_t next_offset         # queue offset of the queue's next message


@cython.final
cdef class QueueTable:
    """Queues by (topic, queue id), numbered from 0 in order of appearance (RocketMQ: topicQueueTable)."""
    cdef:
        QueueSlot *slots
        int32_t *buckets        # open addressing: number + 1, 0 is free
        int32_t bucket_mask
        int32_t count
        int32_t room
        int32_t last            # number that find_or_add answered last
    cdef int32_t find_or_add(self, const uint8_t *topic, int32_t topic_size, int32_t queue_id) noexcept nogil
    cdef int32_t _find(self, const uint8_t *topic, int32_t topic_size, int32_t queue_id, int32_t *bucket) noexcept nogil
    cdef bint _grow(self) noexcept nogil
