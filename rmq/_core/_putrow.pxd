# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch to put, and the rules that they must pass."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp, memset

cimport rmq._core._layout as L
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport PutRow, rmq_texts
from rmq._core._textcolumn cimport TextColumn


cdef extern from "property.h" nogil:
    bint rmq_ends_with_crc(const uint8_t *p, int64_t n) noexcept
    bint rmq_ends_with_whole_crc(const uint8_t *p, int64_t n) noexcept

cdef enum:
    REFUSED_FLAGS = L.SYS_FLAG_NEED_UNWRAP | L.SYS_FLAG_INNER_BATCH
    HOST_FLAGS = L.SYS_FLAG_BORN_HOST_IPV6 | L.SYS_FLAG_STORE_HOST_IPV6


cdef enum:
    QUEUES_AT_HAND = 16


cdef struct QueuesAtHand:           # of one topic: numbers that are found without its name
    int32_t ids[QUEUES_AT_HAND]     # each at its last bits; -1: none
    int32_t numbers[QUEUES_AT_HAND]


@cython.final
cdef class PutRules:
    """What a store's configuration says about messages that go in."""
    cdef:
        int64_t max_message_size
        int64_t max_record_size     # of one record, properties and header included
        bint allow_v2
        bint allow_ipv6             # RocketMQ 4.6.0 and later
        bint append_crc
        bint drop_last_separator    # RocketMQ 4.9.1-4.9.8, 5.0.0-5.1.x: no 0x02 at the very end
        bytes store_host


cdef object fault(Py_ssize_t row, str text, kind=*)
cdef object no_topic(Py_ssize_t row, int64_t size)
cdef void set_row(PutRow *row, bytes host) noexcept
cdef void set_rows(PutRow *rows, Py_ssize_t count, bytes host) noexcept
cdef int set_numbers(PutRow *rows, Py_ssize_t count, dict numbers) except -1
cdef int set_hosts(PutRow *rows, Py_ssize_t count, dict hosts, bytes own) except -1
cdef int settle(PutRules rules, Py_ssize_t i, PutRow *row, int64_t topic_units, bint raw, bint batch) except -1 nogil
cdef int take_body_size(Py_ssize_t i, PutRow *row, int64_t size) except -1 nogil
cdef int refuse_large(PutRules rules, Py_ssize_t i, PutRow *row, int64_t body_size, int64_t properties_size,
                      int64_t topic_units) except -1 nogil
cdef int refuse_numbers(Py_ssize_t i, const PutRow *row) except -1
cdef int check_properties(Py_ssize_t i, const PutRow *row) except -1 nogil
cdef int check_row_topic(Py_ssize_t i, PutRow *row) except -1
cdef int64_t set_plain_rows(PutRow *rows, PutRules rules, Py_ssize_t count, TextColumn topic, TextColumn body,
                            const rmq_texts *all_texts, dict numbers) except -1
cdef int find_queues(PutRow *rows, int32_t start, int32_t stop, bint one_queue, QueueTable queues) except -1
cdef tuple results_of(const PutRow *rows, Py_ssize_t count)


cdef inline int32_t queue_of(const PutRow *row, int32_t queue_id, QueueTable queues) except -1:
    """Number of that queue of a row's topic."""
    cdef int32_t queue = queues.find_or_add(row.topic, row.topic_size, queue_id)
    if queue < 0:
        raise MemoryError()
    return queue


cdef inline void forget_queues(QueuesAtHand *at_hand) noexcept:
    memset(at_hand.ids, -1, sizeof(at_hand.ids))


cdef inline int32_t queue_at_hand(QueuesAtHand *at_hand, const PutRow *row, int32_t queue_id,
                                  QueueTable queues) except -1:
    """queue_of. REQUIRES: of the topic of the calls before, or forget_queues."""
    cdef int32_t at = queue_id % QUEUES_AT_HAND
    if at_hand.ids[at] != queue_id:
        at_hand.numbers[at] = queue_of(row, queue_id, queues)
        at_hand.ids[at] = queue_id
    return at_hand.numbers[at]


cdef inline bint same_topic(const PutRow *row, const PutRow *other) noexcept nogil:
    return row.topic_size == other.topic_size and (
        row.topic == other.topic or memcmp(row.topic, other.topic, row.topic_size) == 0)


cdef inline void set_own(PutRow *row, const PutRow *other) noexcept nogil:
    """What each row has for itself."""
    row.body, row.properties = other.body, other.properties
    row.body_size, row.properties_size, row.size = other.body_size, other.properties_size, other.size
    row.queue_offset, row.phy_offset, row.queue_id = other.queue_offset, other.phy_offset, other.queue_id


cdef inline void set_alike(PutRow *row) noexcept nogil:
    """Make a row like the one before it, but for set_own. What follows is_alike in it is not filled."""
    row.is_alike = True
