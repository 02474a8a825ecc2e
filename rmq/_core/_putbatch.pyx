# SPDX-License-Identifier: Apache-2.0
"""Batches of messages to put: from a list of Message or from columns, checked whole, then encoded.

Source: RocketMQ MessageExtEncoder#encode, MessageDecoder#messageProperties2String.
"""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

cimport rmq._core._layout as L
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._message cimport Message, has_property, waits
from rmq._core._queuetable cimport QueueTable
from rmq._core._record cimport PutRow, encode_record, looks_lost
from rmq._core._textcolumn cimport TextColumn, text_at

cdef extern from "property.h" nogil:
    int RMQ_HAS_SEPARATOR, RMQ_HAS_SPACE, RMQ_HAS_HIGH
    int rmq_copy_text(uint8_t *dest, const uint8_t *p, int64_t n) noexcept
    uint8_t *rmq_put_item(uint8_t *dest, const char *name, int64_t name_size, const uint8_t *value, int64_t size,
                          int *found) noexcept

cdef extern from "append.h" nogil:
    int RMQ_LINE
    void rmq_prefetch(const void *p) noexcept
    void rmq_prefetch_text(const uint8_t *p, int64_t n) noexcept

cdef extern from "Python.h":
    PyObject *PyList_GET_ITEM(list items, Py_ssize_t i)     # borrowed, unlike Cython's own
    const char *PyBytes_AS_STRING(PyObject *text) noexcept
    Py_ssize_t PyBytes_GET_SIZE(PyObject *text) noexcept

import numpy as np

from rmq._core._message import check_topic, parse_host, without_property
from rmq.errors import IllegalMessageError, MessageTooLargeError

cdef int32_t REFUSED_FLAGS = L.SYS_FLAG_NEED_UNWRAP | L.SYS_FLAG_INNER_BATCH
cdef Py_ssize_t MESSAGES_AHEAD = 8, TEXTS_AHEAD = 4, ROWS_AHEAD = 2     # asked for before they are needed
cdef int64_t SHORT_WRITE = 16384     # bytes: to let other threads run costs more than writing them
cdef int32_t HOST_FLAGS = L.SYS_FLAG_BORN_HOST_IPV6 | L.SYS_FLAG_STORE_HOST_IPV6


@cython.final
cdef class PutRules:
    def __cinit__(self, *, int64_t max_message_size, int64_t max_record_size, bint allow_v2, bint append_crc,
                  bint drop_last_separator, str store_host not None):
        self.max_message_size = max_message_size
        self.max_record_size = max_record_size
        self.allow_v2 = allow_v2
        self.append_crc = append_crc
        self.drop_last_separator = drop_last_separator
        self.store_host = parse_host(store_host, "store_host")


cdef object _fault(Py_ssize_t row, str text, kind=IllegalMessageError):
    error = kind(f"row {row}: {text}")
    error.row = row
    return error


@cython.final
cdef class PutBatch:
    """Messages checked against a store's rules and ready to encode. Reused from call to call; not thread-safe."""

    def __cinit__(self, PutRules rules not None):
        self.rules = rules

    def __dealloc__(self):
        free(self.rows)
        free(self._arena)

    def __len__(self):
        return self.count

    cdef int _reserve(self, Py_ssize_t count) except -1:
        cdef PutRow *rows
        self.count = 0
        self._arena_size = 0
        self.records_size = 0
        self._source = None
        self.waits = False
        if count > self._capacity:
            rows = <PutRow *>realloc(self.rows, <size_t>count * sizeof(PutRow))
            if rows == NULL:
                raise MemoryError()
            self.rows = rows
            self._capacity = <int32_t>count
        return 0

    cdef int _finish(self, Py_ssize_t i, int64_t topic_units, bint raw, bint batch) except -1 nogil:
        """Settle version, properties, CRC and size of row i; the first check that fails raises with .row."""
        cdef PutRow *row = &self.rows[i]
        cdef int64_t size
        if row.body_size > self.rules.max_message_size:
            with gil:
                raise _fault(i, f"body has {row.body_size} bytes, more than {self.rules.max_message_size}",
                             MessageTooLargeError)
        row.is_v2 = self.rules.allow_v2 and topic_units > L.TOPIC_UNITS_V1_LIMIT
        if not row.is_v2 and row.topic_size > L.TOPIC_UNITS_V1_LIMIT:
            with gil:
                raise _fault(i, f"topic has {row.topic_size} UTF-8 bytes: this record version holds 127")
        row.append_crc = self.rules.append_crc
        if not row.append_crc and self.rules.drop_last_separator and not raw and row.properties_size > 0:
            row.properties_size -= 1
        if row.properties_size > 0 and looks_lost(row.properties, row.properties_size):
            with gil:
                raise _fault(i, "properties end with NUL or hold 512 of them: recovery takes that for a lost sector")
        if row.append_crc:
            row.separate_crc = not batch and row.properties_size > 0 and \
                row.properties[row.properties_size - 1] != L.PROPERTY_END
            row.properties_size += L.PROPERTY_CRC_SIZE + (1 if row.separate_crc else 0)
        if row.properties_size > L.PROPERTIES_SIZE_LIMIT:
            with gil:
                raise _fault(i, f"properties have {row.properties_size} bytes, more than {L.PROPERTIES_SIZE_LIMIT}")
        row.sys_flag &= ~HOST_FLAGS
        if row.born_host_size == L.HOST_IPV6_SIZE:
            row.sys_flag |= L.SYS_FLAG_BORN_HOST_IPV6
        if row.store_host_size == L.HOST_IPV6_SIZE:
            row.sys_flag |= L.SYS_FLAG_STORE_HOST_IPV6
        size = L.RECORD_FIXED_SIZE + <int64_t>row.body_size + row.topic_size + row.properties_size + \
            (row.born_host_size - L.HOST_IPV4_SIZE) + (row.store_host_size - L.HOST_IPV4_SIZE) + \
            (L.RECORD_TOPIC_SIZE_V2_SIZE - L.RECORD_TOPIC_SIZE_V1_SIZE if row.is_v2 else 0)
        if size > self.rules.max_record_size:
            with gil:
                raise _fault(i, f"record has {size} bytes, more than {self.rules.max_record_size}",
                             MessageTooLargeError)
        row.size = <int32_t>size
        self.records_size += size
        return 0

    def load(self, list messages not None, *, bint batch=False):
        """Take a list of Message. TypeError, IllegalMessageError, MessageTooLargeError with .row: nothing is kept.

        batch: RocketMQ's batch, whose inner messages get no 0x02 before the CRC property.
        """
        cdef Py_ssize_t i, count = len(messages)
        self._reserve(count)
        for i in range(count):
            if i + MESSAGES_AHEAD < count:
                _prefetch_message(PyList_GET_ITEM(messages, i + MESSAGES_AHEAD))
            if i + TEXTS_AHEAD < count:
                _prefetch_texts(PyList_GET_ITEM(messages, i + TEXTS_AHEAD))
            self._take(i, messages[i], batch)
        self._source = messages if self._source is None else (messages, self._source)
        self.count = <int32_t>count

    def load_one(self, message):
        """load([message])."""
        self.borrow_one(message)
        self._source = message if self._source is None else (message, self._source)

    cdef int borrow_one(self, object message) except -1:
        """load_one of a message that the caller keeps until the batch is released."""
        self._reserve(1)
        self._take(0, message, False)
        self.count = 1
        return 0

    cdef void forget(self) noexcept:
        """release()."""
        self.count = 0
        self.records_size = 0
        self._source = None

    cdef int _take(self, Py_ssize_t i, object item, bint batch) except -1:
        """Row i is a message's."""
        cdef Message message
        cdef PutRow *row = &self.rows[i]
        cdef PyObject *text
        cdef Py_ssize_t size
        if type(item) is not Message:
            raise _fault(i, f"expected Message, got {type(item).__name__}", TypeError)
        message = <Message>item
        if message.topic is None:   # set last: the other fields are what __init__ checked
            raise _fault(i, "message was not initialised")
        text = <PyObject *>message._topic
        row.topic = <const uint8_t *>PyBytes_AS_STRING(text)
        row.topic_size = <int32_t>PyBytes_GET_SIZE(text)
        text = <PyObject *>message.body
        size = PyBytes_GET_SIZE(text)
        if size > 0x7FFFFFFF:
            raise _fault(i, f"body has {size} bytes", MessageTooLargeError)
        row.body = <const uint8_t *>PyBytes_AS_STRING(text)
        row.body_size = <int32_t>size
        text = <PyObject *>message._encoded
        if self.rules.append_crc:
            text = self._shortened(message._encoded)
        row.properties = <const uint8_t *>PyBytes_AS_STRING(text)
        row.properties_size = <int32_t>PyBytes_GET_SIZE(text)
        row.queue_id = message.queue_id
        row.flag = message.flag
        row.sys_flag = message.sys_flag
        row.reconsume_times = message.reconsume_times
        row.prepared_transaction_offset = message.prepared_transaction_offset
        row.is_born_now = message.born_timestamp is None
        row.born_timestamp = 0
        if not row.is_born_now:
            row.born_timestamp = message.born_timestamp
        text = <PyObject *>message._store_host
        if PyBytes_GET_SIZE(text) == 0:
            text = <PyObject *>self.rules.store_host
        row.store_host = <const uint8_t *>PyBytes_AS_STRING(text)
        row.store_host_size = <uint8_t>PyBytes_GET_SIZE(text)
        if PyBytes_GET_SIZE(<PyObject *>message._born_host):
            text = <PyObject *>message._born_host
        row.born_host = <const uint8_t *>PyBytes_AS_STRING(text)
        row.born_host_size = <uint8_t>PyBytes_GET_SIZE(text)
        if message._wait:
            self.waits = True
        return self._finish(i, message._topic_units, message.raw_properties is not None, batch)

    cdef PyObject *_shortened(self, bytes encoded) except NULL:
        """Properties without an incoming CRC property; they live as long as the batch's other sources."""
        cdef bytes shortened = without_property(encoded, b"__CRC32#")
        if shortened is not encoded:
            if self._source is None:
                self._source = []
            self._source.append(shortened)
        return <PyObject *>shortened

    # ---- columns ----

    cdef int _room(self, int64_t size) except -1 nogil:
        """Make room for so many bytes more, and for 16 behind them."""
        cdef uint8_t *arena
        cdef int64_t room
        if self._arena_size + size + 16 > self._arena_room:
            room = max(self._arena_room * 2, self._arena_size + size + 16, <int64_t>65536)
            arena = <uint8_t *>realloc(self._arena, <size_t>room)
            if arena == NULL:
                with gil:
                    raise MemoryError()
            self._arena = arena
            self._arena_room = room
        return 0

    def load_columns(self, Py_ssize_t count, *, TextColumn topic not None, TextColumn body not None,
                     TextColumn keys, const int64_t[::1] key_lists, TextColumn tags, TextColumn uniq_key,
                     TextColumn names, TextColumn values, const int64_t[::1] maps, TextColumn raw_properties,
                     dict numbers not None, dict hosts not None):
        """Take rows from columns. Each TextColumn has `count` strings, but keys with key_lists, and names and values
        with maps: there row i has the strings list[i] .. list[i + 1].

        numbers: int64 arrays queue_id, flag, sys_flag, reconsume_times, prepared_transaction_offset, born_timestamp,
        those that are given. hosts: born_host, store_host -> (list of bytes, int64 array of numbers in it, -1 the
        store's own). raw_properties excludes keys, tags, uniq_key and maps. IllegalMessageError with .row.
        """
        cdef Py_ssize_t i, k
        cdef PutRow *row
        cdef int64_t size, name_size, units = 0, start
        cdef const uint8_t *p
        cdef const uint8_t *name
        cdef uint8_t *at
        cdef int malformed, found, held
        cdef bint own_keys, own_uniq, own_tags, append_crc = self.rules.append_crc
        cdef bint is_foreign = maps is not None or raw_properties is not None   # may hold names that mean something
        cdef int64_t[::1] starts
        self._reserve(count)
        self._room(1)  # so that rows without properties have an address too
        starts = np.empty(count, np.int64)
        self._source = (topic, body, raw_properties, hosts)
        _set_rows(self.rows, count, self.rules.store_host)
        _set_numbers(self.rows, count, numbers)
        if hosts:
            _set_hosts(self.rows, count, hosts, self.rules.store_host)
        with nogil:
            for i in range(count):
                row = &self.rows[i]
                row.topic = text_at(topic, i, &size)
                row.topic_size = <int32_t>size
                if size <= 0:
                    with gil:
                        raise _fault(i, "topic is null or empty")
                if i > 0 and _same_topic(row, row - 1):
                    row.topic = (row - 1).topic  # one address for a run of them: who compares them sees it at once
                else:
                    with gil:
                        _check_row_topic(i, row)
                row.body = text_at(body, i, &size)
                if size < 0 or size > 0x7FFFFFFF:
                    with gil:
                        raise _fault(i, "body is null or over 2 GiB")
                row.body_size = <int32_t>size
                start = self._arena_size
                if raw_properties is not None:
                    row.properties = text_at(raw_properties, i, &size)
                    if size > L.PROPERTIES_SIZE_LIMIT:
                        with gil:
                            raise _fault(i, f"properties have {size} bytes, more than {L.PROPERTIES_SIZE_LIMIT}")
                    row.properties_size = <int32_t>max(size, <int64_t>0)
                    starts[i] = -1
                    if append_crc and size > 0:
                        with gil:
                            starts[i] = self._without_crc(row)
                    continue
                held = 0            # RMQ_HAS_* of the row's text
                own_keys = self._keys_of(i, keys, key_lists, &held)
                own_uniq = own_tags = False
                if uniq_key is not None:
                    p = text_at(uniq_key, i, &size)
                    own_uniq = size >= 0
                    if own_uniq:
                        found = 0
                        self._room(size + 10)
                        at = self._arena + self._arena_size
                        self._arena_size += rmq_put_item(at, "UNIQ_KEY", 8, p, size, &found) - at
                        held |= found
                        if found & RMQ_HAS_SEPARATOR:
                            with gil:
                                raise _fault(i, "uniq_key holds 0x01 or 0x02")
                if tags is not None:
                    p = text_at(tags, i, &size)
                    own_tags = size >= 0
                    if own_tags:
                        found = 0
                        self._room(size + 6)
                        at = self._arena + self._arena_size
                        self._arena_size += rmq_put_item(at, "TAGS", 4, p, size, &found) - at
                        held |= found
                        if found & RMQ_HAS_SEPARATOR:
                            with gil:
                                raise _fault(i, "tags hold 0x01 or 0x02")
                if maps is not None:
                    for k in range(maps[i], maps[i + 1]):
                        name = text_at(names, k, &name_size)
                        p = text_at(values, k, &size)
                        if size < 0:
                            continue
                        if name_size <= 0:
                            with gil:
                                raise _fault(i, "properties hold an empty name")
                        if (own_keys and name_size == 4 and memcmp(name, "KEYS", 4) == 0) or \
                                (own_tags and name_size == 4 and memcmp(name, "TAGS", 4) == 0) or \
                                (own_uniq and name_size == 8 and memcmp(name, "UNIQ_KEY", 8) == 0) or \
                                (append_crc and name_size == 8 and memcmp(name, "__CRC32#", 8) == 0):
                            continue
                        self._room(name_size + size + 2)
                        at = self._arena + self._arena_size
                        found = rmq_copy_text(at, name, name_size)
                        self._arena_size += rmq_put_item(at, <const char *>name, name_size, p, size, &found) - at
                        held |= found
                        if found & RMQ_HAS_SEPARATOR:
                            with gil:
                                raise _fault(i, "properties hold 0x01 or 0x02")
                if held & RMQ_HAS_HIGH:
                    malformed = 0
                    rmq_utf16_units(self._arena + start, self._arena_size - start, &malformed)
                    if malformed:
                        with gil:
                            raise _fault(i, "keys, tags, uniq_key or properties are not UTF-8")
                if self._arena_size - start > L.PROPERTIES_SIZE_LIMIT:
                    with gil:
                        raise _fault(i, f"properties have {self._arena_size - start} bytes, more than "
                                        f"{L.PROPERTIES_SIZE_LIMIT}")
                row.properties_size = <int32_t>(self._arena_size - start)
                starts[i] = start
            for i in range(count):
                row = &self.rows[i]
                # The arena moved while it grew: only now are the addresses final.
                if starts[i] >= 0:
                    row.properties = self._arena + starts[i]
                if is_foreign and has_property(row.properties, row.properties_size, "INNER_NUM", 9):
                    with gil:
                        raise _fault(i, "property INNER_NUM marks inner batches, which are not written")
                if row.sys_flag & REFUSED_FLAGS:
                    with gil:
                        raise _fault(i, "sys_flag bits 6 and 7 mark inner batches, which are not written")
                if row.queue_id < 0:
                    with gil:
                        raise _fault(i, "queue_id is negative")
                if not self.waits and (not is_foreign or waits(row.properties, row.properties_size)):
                    self.waits = True
                if i == 0 or row.topic != (row - 1).topic:
                    malformed = 0  # checked above
                    units = rmq_utf16_units(row.topic, row.topic_size, &malformed)
                self._finish(i, units, raw_properties is not None, False)
        self.count = <int32_t>count

    cdef int64_t _without_crc(self, PutRow *row) except -1:
        """Copy a row's raw properties without an incoming CRC property; returns where they start in the arena."""
        cdef int64_t start = self._arena_size
        cdef bytes encoded = without_property((<const char *>row.properties)[:row.properties_size], b"__CRC32#")
        self._room(len(encoded))
        memcpy(self._arena + start, <const char *>encoded, len(encoded))
        self._arena_size += len(encoded)
        row.properties_size = <int32_t>len(encoded)
        return start

    cdef int _keys_of(self, Py_ssize_t i, TextColumn keys, const int64_t[::1] key_lists, int *held) except -1 nogil:
        """Append KEYS of row i; whether it has any. *held: RMQ_HAS_* of them are added."""
        cdef Py_ssize_t k, first, last
        cdef int64_t size, start = self._arena_size
        cdef const uint8_t *p
        cdef uint8_t *at
        cdef int found
        if keys is None:
            return 0
        first, last = i, i + 1
        if key_lists is not None:
            first, last = <Py_ssize_t>key_lists[i], <Py_ssize_t>key_lists[i + 1]
        for k in range(first, last):
            p = text_at(keys, k, &size)
            if size < 0:
                if key_lists is not None:
                    with gil:
                        raise _fault(i, "keys hold a null")
                continue
            found = 0
            self._room(size + 6)
            at = self._arena + self._arena_size
            if self._arena_size == start:
                self._arena_size += rmq_put_item(at, "KEYS", 4, p, size, &found) - at
            else:
                # Reopen the item: the next key goes where its 0x02 stands.
                (at - 1)[0] = 0x20
                found = rmq_copy_text(at, p, size)
                at[size] = L.PROPERTY_END
                self._arena_size += size + 1
            if size == 0 or found & RMQ_HAS_SPACE:
                with gil:
                    raise _fault(i, "a key is empty or holds a space")
            if found & RMQ_HAS_SEPARATOR:
                with gil:
                    raise _fault(i, "a key holds 0x01 or 0x02")
            held[0] |= found
        return self._arena_size > start

    # ---- encode ----

    @property
    def last_phy_offset(self):
        """Phy offset of the last encoded row, -1 when there are no rows."""
        return self.rows[self.count - 1].phy_offset if self.count else -1

    def packed_size(self):
        """Bytes of RocketMQ's packed batch request with these messages. Source: MessageDecoder#encodeMessage."""
        cdef int64_t size = 0
        cdef Py_ssize_t i
        for i in range(self.count):
            size += L.INNER_FIXED_SIZE + <int64_t>self.rows[i].body_size + self.rows[i].properties_size
        return size

    def fit(self, int32_t start, int64_t room):
        """(rows from `start` that fit into `room` bytes with 8 to spare after each, their bytes)."""
        cdef int64_t used = 0
        cdef int32_t i = start
        if start == 0 and self.records_size + L.BLANK_HEADER_SIZE <= room:
            return self.count, self.records_size
        while i < self.count and used + self.rows[i].size + L.BLANK_HEADER_SIZE <= room:
            used += self.rows[i].size
            i += 1
        return i - start, used

    def encode(self, segment, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
               int64_t store_timestamp, QueueTable queues not None):
        """Write rows [start, stop) at `position` of a segment (writable bytes); returns the position behind them.

        Each takes its queue's next offset (0 for PREPARED and ROLLBACK, which leave it). ValueError when the rows do
        not fit: then nothing was written.
        """
        cdef Py_buffer buffer
        if start < 0 or stop > self.count or position < 0:
            raise ValueError("rows or position out of range")
        PyObject_GetBuffer(segment, &buffer, PyBUF_WRITABLE)
        try:
            position = self.write(<uint8_t *>buffer.buf, buffer.len, segment_phy_offset, position, start, stop,
                                  store_timestamp, queues)
        finally:
            PyBuffer_Release(&buffer)
        return position

    cdef int64_t write(self, uint8_t *base, int64_t room, int64_t segment_phy_offset, int64_t position,
                       int32_t start, int32_t stop, int64_t store_timestamp, QueueTable queues) except -1:
        cdef int32_t i
        cdef PutRow *row
        cdef PutRow *before = NULL
        cdef int64_t end = position
        if start == 0 and stop == self.count:
            end += self.records_size
        else:
            for i in range(start, stop):
                end += self.rows[i].size
        if end + L.BLANK_HEADER_SIZE > room:
            raise ValueError("rows do not fit into the segment")
        for i in range(start, stop):
            row = &self.rows[i]
            if before != NULL and row.topic == before.topic and row.topic_size == before.topic_size and \
                    row.queue_id == before.queue_id:
                row.queue = before.queue
            else:
                row.queue = queues.find_or_add(row.topic, row.topic_size, row.queue_id)
                if row.queue < 0:
                    raise MemoryError()
            before = row
        if end - position <= SHORT_WRITE:
            self._encode(base, segment_phy_offset, position, start, stop, store_timestamp, queues)
        else:
            with nogil:
                self._encode(base, segment_phy_offset, position, start, stop, store_timestamp, queues)
        return end

    cdef void _encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                      int64_t store_timestamp, QueueTable queues) noexcept nogil:
        cdef int32_t i, transaction
        cdef PutRow *row
        for i in range(start, stop):
            row = &self.rows[i]
            if i + ROWS_AHEAD < stop:
                rmq_prefetch_text(row[ROWS_AHEAD].body, row[ROWS_AHEAD].body_size)
                rmq_prefetch_text(row[ROWS_AHEAD].properties, row[ROWS_AHEAD].properties_size)
            transaction = row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK
            if transaction == L.SYS_FLAG_PREPARED or transaction == L.SYS_FLAG_ROLLBACK:
                row.queue_offset = 0
            else:
                row.queue_offset = queues.slots[row.queue].next_offset
                queues.slots[row.queue].next_offset += 1
            row.phy_offset = segment_phy_offset + position
            encode_record(row, base + position, row.phy_offset, store_timestamp)
            position += row.size

    def results(self):
        """Columns of the encoded rows: phy_offset, queue_offset int64; size, queue_id int32; topics, store hosts
        (lists).
        """
        cdef Py_ssize_t i
        phy_offset = np.empty(self.count, np.int64)
        queue_offset = np.empty(self.count, np.int64)
        size = np.empty(self.count, np.int32)
        queue_id = np.empty(self.count, np.int32)
        cdef int64_t[::1] phy = phy_offset, queue = queue_offset
        cdef int32_t[::1] sizes = size, ids = queue_id
        cdef PutRow *row
        cdef list topics = [None] * self.count, stored_hosts = [None] * self.count
        cdef object topic = None, host = None
        for i in range(self.count):
            row = &self.rows[i]
            phy[i] = row.phy_offset
            queue[i] = row.queue_offset
            sizes[i] = row.size
            ids[i] = row.queue_id
            if i == 0 or not _same_topic(row, &self.rows[i - 1]):
                topic = (<const char *>row.topic)[:row.topic_size].decode()
            if i == 0 or row.store_host != self.rows[i - 1].store_host:
                host = (<const char *>row.store_host)[:row.store_host_size]
            topics[i] = topic
            stored_hosts[i] = host
        return phy_offset, queue_offset, size, queue_id, topics, stored_hosts

    def release(self):
        """Let go of the messages or columns."""
        self.forget()


cdef inline void _prefetch_message(PyObject *item) noexcept:
    rmq_prefetch(item)
    rmq_prefetch(<const char *>item + RMQ_LINE)


cdef inline void _prefetch_texts(PyObject *item) noexcept:
    """The sizes of a message's body and properties."""
    if type(<object>item) is Message:
        rmq_prefetch(<PyObject *>(<Message>item).body)
        rmq_prefetch(<PyObject *>(<Message>item)._encoded)


cdef inline bint _same_topic(const PutRow *row, const PutRow *other) noexcept nogil:
    return row.topic_size == other.topic_size and (
        row.topic == other.topic or memcmp(row.topic, other.topic, row.topic_size) == 0)


cdef int _check_row_topic(Py_ssize_t i, PutRow *row) except -1:
    """check_topic for column values: same rules, the row named."""
    try:
        check_topic((<const char *>row.topic)[:row.topic_size].decode())
    except UnicodeDecodeError:
        raise _fault(i, "topic is not UTF-8") from None
    except IllegalMessageError as error:
        raise _fault(i, str(error)) from None
    return 0


cdef void _set_rows(PutRow *rows, Py_ssize_t count, bytes host) noexcept:
    """Rows as they are when no column says otherwise: the store's own host, born when stored."""
    cdef PutRow row
    cdef Py_ssize_t i
    memset(&row, 0, sizeof(row))
    row.is_born_now = True
    row.store_host_size = row.born_host_size = <uint8_t>len(host)
    row.store_host = row.born_host = <const uint8_t *><const char *>host
    for i in range(count):
        rows[i] = row


cdef int _set_numbers(PutRow *rows, Py_ssize_t count, dict numbers) except -1:
    cdef const int64_t[::1] column
    cdef Py_ssize_t i
    cdef int field
    for name, values in numbers.items():
        column = values
        field = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset",
                 "born_timestamp").index(name)
        if column.shape[0] != count:
            raise ValueError(f"{name} must have one number per row")
        for i in range(count):
            if field < 4 and (column[i] < -0x80000000 or column[i] > 0x7FFFFFFF):
                raise _fault(i, f"{name} is outside 32 bits")
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
            else:
                rows[i].born_timestamp = column[i]
                rows[i].is_born_now = False
    return 0


cdef int _set_hosts(PutRow *rows, Py_ssize_t count, dict hosts, bytes own) except -1:
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
