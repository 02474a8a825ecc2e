# SPDX-License-Identifier: Apache-2.0
"""Rows to put: as columns say, checked against a store's rules; the queues that they go to.

Source: RocketMQ MessageExtEncoder#encode.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memset

cimport rmq._core._layout as L
from rmq._core._alike cimport can_be_alike
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._message cimport refusal
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport PutRow, looks_lost, rmq_texts
from rmq._core._textcolumn cimport TextColumn, text_at

import numpy as np

from rmq._core._message import check_topic, parse_host
from rmq.errors import IllegalMessageError, MessageTooLargeError


cdef extern from "queuehash.h" nogil:
    uint32_t rmq_queue_hash(const uint8_t *topic, int32_t size, int32_t queue_id) noexcept

cdef extern from "texts.h" nogil:
    int64_t rmq_texts_size(const rmq_texts *texts, int64_t i) noexcept

cdef enum:
    TOPICS_AT_HAND = 64     # checked ones of a table


@cython.final
cdef class PutRules:
    def __cinit__(self, *, int64_t max_message_size, int64_t max_record_size, bint allow_v2, bint allow_ipv6,
                  bint append_crc, bint drop_last_separator, str store_host not None):
        self.max_message_size = max_message_size
        self.max_record_size = max_record_size
        self.allow_v2 = allow_v2
        self.allow_ipv6 = allow_ipv6
        self.append_crc = append_crc
        self.drop_last_separator = drop_last_separator
        self.store_host = parse_host(store_host, "store_host")
        if not allow_ipv6 and len(self.store_host) > L.HOST_IPV4_SIZE:
            raise ValueError(f"store_host {store_host!r} is of IPv6, which RocketMQ has from 4.6.0 on")


cdef object fault(Py_ssize_t row, str text, kind=IllegalMessageError):
    """An error about a row, its number in .row."""
    return kind(text, row=row)


cdef object no_topic(Py_ssize_t row, int64_t size):
    """fault for a topic of so many bytes; -1: null."""
    return fault(row, "topic is null or empty" if size <= 0 else
                 f"topic has {size} UTF-8 bytes, more than {L.TOPIC_SIZE_LIMIT}")


cdef void set_row(PutRow *row, bytes host) noexcept:
    """A row as it is when no column says otherwise: the store's own host, born when stored."""
    memset(row, 0, sizeof(PutRow))
    row.is_born_now = True
    row.store_host_size = row.born_host_size = <uint8_t>len(host)
    row.store_host = row.born_host = <const uint8_t *><const char *>host


cdef void set_rows(PutRow *rows, Py_ssize_t count, bytes host) noexcept:
    cdef PutRow row
    cdef Py_ssize_t i
    set_row(&row, host)
    for i in range(count):
        rows[i] = row


cdef int set_numbers(PutRow *rows, Py_ssize_t count, dict numbers) except -1:
    cdef const int64_t[::1] column
    cdef Py_ssize_t i
    cdef int field
    for name, values in numbers.items():
        column = values
        field = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset",
                 "born_timestamp", "born_now").index(name)
        if column.shape[0] != count:
            raise ValueError(f"{name} must have one number per row")
        for i in range(count):
            if field < 4 and (column[i] < -0x80000000 or column[i] > 0x7FFFFFFF):
                raise fault(i, f"{name} is outside 32 bits")
            if field == 0:
                rows[i].queue_id = <int32_t>column[i]
            elif field == 1:
                rows[i].flag = <int32_t>column[i]
            elif field == 2:
                rows[i].sys_flag = <int32_t>column[i]
            elif field == 3:
                rows[i].reconsume_times = <int32_t>column[i]
            elif field == 4:
                rows[i].prepared_transaction_offset = column[i]
            elif field == 5:
                rows[i].born_timestamp = column[i]
                rows[i].is_born_now = False
            else:
                rows[i].is_born_now = column[i] != 0
    return 0


cdef int set_hosts(PutRow *rows, Py_ssize_t count, dict hosts, bytes own) except -1:
    cdef const int64_t[::1] store = None, born = None
    cdef list store_hosts = [], born_hosts = []
    cdef bytes host
    cdef Py_ssize_t i
    if "store_host" in hosts:
        store_hosts, store = hosts["store_host"]
    if "born_host" in hosts:
        born_hosts, born = hosts["born_host"]
    for i in range(count):
        host = store_hosts[store[i]] if store is not None and store[i] >= 0 else own
        rows[i].store_host_size = <uint8_t>len(host)
        rows[i].store_host = <const uint8_t *><const char *>host
        host = born_hosts[born[i]] if born is not None and born[i] >= 0 else host
        rows[i].born_host_size = <uint8_t>len(host)
        rows[i].born_host = <const uint8_t *><const char *>host
    return 0


cdef int settle(PutRules rules, Py_ssize_t i, PutRow *row, int64_t topic_units, bint raw, bint batch) except -1 nogil:
    """Settle version, properties, CRC and size of a row; the first check that fails raises with .row."""
    cdef int64_t size
    if row.body_size > rules.max_message_size:
        with gil:
            raise fault(i, f"body has {row.body_size} bytes, more than {rules.max_message_size}",
                         MessageTooLargeError)
    row.is_v2 = rules.allow_v2 and topic_units > L.TOPIC_UNITS_V1_LIMIT
    if not row.is_v2 and row.topic_size > L.TOPIC_UNITS_V1_LIMIT:
        with gil:
            raise fault(i, f"topic has {row.topic_size} UTF-8 bytes: this record version holds 127")
    row.append_crc = rules.append_crc
    if row.properties != NULL and rmq_ends_with_whole_crc(row.properties, row.properties_size):
        row.properties_size -= L.PROPERTY_CRC_SIZE      # of the record that they were read from
    if not row.append_crc and rules.drop_last_separator and not raw and row.properties_size > 0 and \
            row.properties[row.properties_size - 1] == L.PROPERTY_END:  # a batch's has none before its record's CRC
        row.properties_size -= 1
    if row.properties != NULL and not row.append_crc and rmq_ends_with_crc(row.properties, row.properties_size):
        with gil:
            raise fault(i, "properties end with __CRC32# and no CRC: readers take that for a damaged record")
    if row.properties != NULL and looks_lost(row.properties, row.properties_size):
        with gil:
            raise fault(i, "properties end with NUL or hold 512 of them: recovery takes that for a lost sector")
    row.separate_crc = row.append_crc and row.properties != NULL and not batch and row.properties_size > 0 and \
        row.properties[row.properties_size - 1] != L.PROPERTY_END
    if row.append_crc:
        row.properties_size += L.PROPERTY_CRC_SIZE + (1 if row.separate_crc else 0)
    if row.properties_size > L.PROPERTIES_SIZE_LIMIT:
        refuse_properties(i, row.properties_size)
    row.sys_flag &= ~HOST_FLAGS
    if row.born_host_size == L.HOST_IPV6_SIZE:
        row.sys_flag |= L.SYS_FLAG_BORN_HOST_IPV6
    if row.store_host_size == L.HOST_IPV6_SIZE:
        row.sys_flag |= L.SYS_FLAG_STORE_HOST_IPV6
    if row.sys_flag & HOST_FLAGS and not rules.allow_ipv6:
        with gil:
            raise fault(i, "born_host or store_host is of IPv6, which RocketMQ has from 4.6.0 on")
    size = L.RECORD_FIXED_SIZE + <int64_t>row.body_size + row.topic_size + row.properties_size + \
        (row.born_host_size - L.HOST_IPV4_SIZE) + (row.store_host_size - L.HOST_IPV4_SIZE) + \
        (L.RECORD_TOPIC_SIZE_V2_SIZE - L.RECORD_TOPIC_SIZE_V1_SIZE if row.is_v2 else 0)
    if size > rules.max_record_size:
        with gil:
            raise fault(i, f"record has {size} bytes, more than {rules.max_record_size}",
                         MessageTooLargeError)
    row.size = <int32_t>size
    return 0


cdef int refuse_properties(Py_ssize_t i, int64_t size) except -1 nogil:
    with gil:
        raise fault(i, f"properties have {size} bytes, more than {L.PROPERTIES_SIZE_LIMIT}")


cdef int take_body_size(Py_ssize_t i, PutRow *row, int64_t size) except -1 nogil:
    """size: -1 of a null."""
    if size < 0 or size > 0x7FFFFFFF:
        with gil:
            raise fault(i, "body is null or over 2 GiB")
    row.body_size = <int32_t>size
    return 0


cdef int refuse_large(PutRules rules, Py_ssize_t i, PutRow *row, int64_t body_size, int64_t properties_size,
                      int64_t topic_units) except -1 nogil:
    """settle of a row without its sizes, of which one is too large, or which has no body: raises."""
    take_body_size(i, row, body_size)
    if body_size <= rules.max_message_size and properties_size > L.PROPERTIES_SIZE_LIMIT:
        refuse_properties(i, properties_size + row.properties_size)
    row.properties_size = <int32_t>min(properties_size, <int64_t>L.PROPERTIES_SIZE_LIMIT)
    return settle(rules, i, row, topic_units, False, False)


cdef int refuse_numbers(Py_ssize_t i, const PutRow *row) except -1:
    if row.sys_flag & REFUSED_FLAGS:
        raise fault(i, "sys_flag bits 6 and 7 mark inner batches, which are not written")
    raise fault(i, "queue_id is negative")


cdef int check_properties(Py_ssize_t i, const PutRow *row) except -1 nogil:
    """Whether RocketMQ reads the record back; rows have their topics and properties."""
    cdef const char *why = refusal(row.topic, row.topic_size, row.properties, row.properties_size)
    if why != NULL:
        with gil:
            raise fault(i, (<bytes>why).decode())
    return 0


cdef int check_row_topic(Py_ssize_t i, PutRow *row) except -1:
    """check_topic for column values: same rules, the row named."""
    try:
        check_topic((<const char *>row.topic)[:row.topic_size].decode())
    except UnicodeDecodeError:
        raise fault(i, "topic is not UTF-8") from None
    except IllegalMessageError as error:
        raise fault(i, str(error)) from None
    return 0


cdef int64_t _units_of(const PutRow *row) noexcept nogil:
    """UTF-16 units of a topic that was checked."""
    cdef int malformed = 0
    return rmq_utf16_units(row.topic, row.topic_size, &malformed)


cdef int64_t set_plain_rows(PutRow *rows, PutRules rules, Py_ssize_t count, TextColumn topic, TextColumn body,
                            const rmq_texts *all_texts, dict numbers) except -1:
    """Rows of columns where texts have the properties; the bytes of their records. Raises with .row."""
    cdef PutRow first       # of a topic: what its rows share, and their size without body and properties
    cdef PutRow known[TOPICS_AT_HAND]       # that of topics before, each at its hash; topic NULL: none
    cdef PutRow *row
    cdef Py_ssize_t i
    cdef int64_t size, properties_size, records_size = 0
    cdef int64_t body_limit = min(rules.max_message_size, <int64_t>0x7FFFFFFF)
    # Of its own: a compiler must take every byte stored for one that may be a field of an object.
    cdef int64_t record_limit = rules.max_record_size
    cdef const int64_t *body_starts = body.starts
    cdef const uint8_t *bodies = body.first
    cdef rmq_texts texts = all_texts[0]
    cdef bint has_topics = topic.count > 1, has_numbers = len(numbers) > 0
    cdef bint may_miss = body.missing.shape[0] > 0, is_new, has_like = False
    cdef uint32_t at = 0
    if has_numbers:
        set_rows(rows, count, rules.store_host)
        set_numbers(rows, count, numbers)
    with nogil:
        if has_topics:
            for at in range(<uint32_t>TOPICS_AT_HAND):
                known[at].topic = NULL
        for i in range(count):
            row = &rows[i]
            is_new = i == 0
            if is_new or has_topics:
                row.topic = text_at(topic, i, &size)
                if size <= 0 or size > L.TOPIC_SIZE_LIMIT:
                    with gil:
                        raise no_topic(i, size)
                row.topic_size = <int32_t>size
                is_new = i == 0 or not same_topic(row, &first)
                if is_new and has_topics:
                    at = rmq_queue_hash(row.topic, row.topic_size, 0) % TOPICS_AT_HAND
                if is_new and has_topics and known[at].topic != NULL and same_topic(row, &known[at]):
                    first = known[at]
                elif is_new:
                    with gil:
                        check_row_topic(i, row)
                        set_row(&first, rules.store_host)
                    first.topic, first.topic_size = row.topic, row.topic_size
                    settle(rules, i, &first, _units_of(row), False, False)
                    if has_topics:
                        known[at] = first
                if is_new:
                    has_like = can_be_alike(&first)
            if has_numbers:
                row.topic, row.topic_size = first.topic, first.topic_size
                row.is_v2, row.append_crc = first.is_v2, first.append_crc
                row.properties_size = first.properties_size
                row.sys_flag = row.sys_flag & ~HOST_FLAGS | first.sys_flag
                if row.sys_flag & REFUSED_FLAGS or row.queue_id < 0:
                    with gil:
                        refuse_numbers(i, row)
            elif is_new or not has_like:
                row[0] = first
            else:
                set_alike(row)
                row.properties, row.properties_size = NULL, first.properties_size
                row.queue_id = first.queue_id
            row.body = bodies + body_starts[i]
            size = -1 if may_miss and body.missing[i] else body_starts[i + 1] - body_starts[i]
            properties_size = rmq_texts_size(&texts, i)
            if size < 0 or size > body_limit or first.size + size + properties_size > record_limit or \
                    properties_size + first.properties_size > L.PROPERTIES_SIZE_LIMIT:
                if not has_numbers:
                    row[0] = first
                refuse_large(rules, i, row, size, properties_size, _units_of(&first))
            row.body_size = <int32_t>size
            row.properties_size += <int32_t>properties_size
            row.size = <int32_t>(first.size + size + properties_size)
            records_size += row.size
    return records_size


cdef void _stand_alone(PutRow *rows, Py_ssize_t i) noexcept:
    """Give row i what it has in common with the row before."""
    cdef PutRow row
    cdef Py_ssize_t head = i
    while rows[head].is_alike:      # the first row is not
        head -= 1
    if head < i:
        row = rows[i]
        rows[i] = rows[head]
        set_own(&rows[i], &row)
        rows[i].is_alike = False


cdef int find_queues(PutRow *rows, int32_t start, int32_t stop, bint one_queue, QueueTable queues) except -1:
    """Number the queues of rows [start, stop), one_queue: that of the first. It stands alone from here on."""
    cdef int32_t i
    cdef QueuesAtHand at_hand
    cdef PutRow *row
    cdef const PutRow *head = NULL
    if start < stop:
        _stand_alone(rows, start)
    for i in range(start, min(start + 1, stop) if one_queue else stop):
        row = &rows[i]
        if not row.is_alike:
            if head == NULL or row.topic != head.topic or row.topic_size != head.topic_size:
                forget_queues(&at_hand)
            head = row
        row.queue = queue_at_hand(&at_hand, head, row.queue_id, queues)
    return 0


cdef tuple results_of(const PutRow *rows, Py_ssize_t count):
    """PutBatch.results."""
    cdef Py_ssize_t i
    phy_offset = np.empty(count, np.int64)
    queue_offset = np.empty(count, np.int64)
    size = np.empty(count, np.int32)
    queue_id = np.empty(count, np.int32)
    cdef int64_t[::1] phy = phy_offset, queue = queue_offset
    cdef int32_t[::1] sizes = size, ids = queue_id
    cdef const PutRow *row
    cdef const PutRow *head = NULL
    cdef list topics = [None] * count, stored_hosts = [None] * count
    cdef object topic = None, host = None
    for i in range(count):
        row = &rows[i]
        phy[i] = row.phy_offset
        queue[i] = row.queue_offset
        sizes[i] = row.size
        if not row.is_alike:
            if head == NULL or not same_topic(row, head):
                topic = (<const char *>row.topic)[:row.topic_size].decode()
            if head == NULL or row.store_host != head.store_host:
                host = (<const char *>row.store_host)[:row.store_host_size]
            head = row
        ids[i] = row.queue_id
        topics[i] = topic
        stored_hosts[i] = host
    return phy_offset, queue_offset, size, queue_id, topics, stored_hosts
