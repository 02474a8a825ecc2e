# SPDX-License-Identifier: Apache-2.0
"""Batches of messages to put: from a list of Message or from columns, checked whole, then encoded.

Source: RocketMQ MessageExtEncoder#encode.
"""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc

cimport rmq._core._layout as L
from rmq._core._alike cimport Alike, can_be_alike, encode_alike, take_alike
from rmq._core._columnrows cimport ColumnRows
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._message cimport Message, shares_header, waits
from rmq._core._propertyrows cimport PropertyRows
from rmq._core._putrow cimport (
    REFUSED_FLAGS, PutRules, check_properties, check_row_topic, fault, find_queues, no_topic, queue_of,
    refuse_numbers, results_of, same_topic, set_alike, set_hosts, set_numbers, set_plain_rows, set_rows, settle,
    take_body_size,
)
from rmq._core._queuetable cimport QueueSlot, QueueTable
from rmq._core._record cimport CRC_NAME, SECTOR_SIZE, PutRow, encode_record, rmq_texts
from rmq._core._textcolumn cimport TextColumn, find_texts, text_at

cdef extern from "append.h" nogil:
    int RMQ_LINE
    void rmq_prefetch(const void *p) noexcept
    void rmq_prefetch_text(const uint8_t *p, int64_t n) noexcept

cdef extern from "Python.h":
    PyObject *PyList_GET_ITEM(list items, Py_ssize_t i)     # borrowed, unlike Cython's own
    const char *PyBytes_AS_STRING(PyObject *text) noexcept
    Py_ssize_t PyBytes_GET_SIZE(PyObject *text) noexcept

from rmq._core._message import without_property
from rmq.errors import MessageTooLargeError, MessageTypeError

cdef Py_ssize_t MESSAGES_AHEAD = 8, TEXTS_AHEAD = 4, ROWS_AHEAD = 4     # asked for before they are needed
cdef Py_ssize_t MOST_KEPT = 65536    # rows whose room stays for the next batch
cdef int64_t SHORT_WRITE = 16384     # bytes: to let other threads run costs more than writing them


@cython.final
cdef class PutBatch:
    """Messages checked against a store's rules and ready to encode. Reused from call to call; not thread-safe."""

    def __cinit__(self, PutRules rules not None):
        self.rules = rules
        self._columns = ColumnRows()
        self._properties = PropertyRows()

    def __dealloc__(self):
        free(self.rows)

    def __len__(self):
        return self.count

    cdef int _reserve(self, Py_ssize_t count) except -1:
        cdef PutRow *rows
        self.count = 0
        self.records_size = 0
        self._source = None
        self.waits = False
        self._one_queue = False
        self._has_columns = False
        if count > self._capacity:
            rows = <PutRow *>realloc(self.rows, <size_t>count * sizeof(PutRow))
            if rows == NULL:
                raise MemoryError()
            self.rows = rows
            self._capacity = <int32_t>count
        return 0

    cdef inline int64_t _size(self, Py_ssize_t i) noexcept nogil:
        return self._columns.size(i) if self._has_columns else self.rows[i].size

    cdef int _finish(self, Py_ssize_t i, int64_t topic_units, bint raw, bint batch) except -1 nogil:
        """Settle row i and count it in."""
        settle(self.rules, i, &self.rows[i], topic_units, raw, batch)
        self.records_size += self.rows[i].size
        return 0

    def load(self, list messages not None, *, bint batch=False):
        """Take a list of Message. TypeError, IllegalMessageError, MessageTooLargeError with .row: nothing is kept.

        batch: RocketMQ's batch, whose inner messages get no 0x02 before the CRC property.
        """
        cdef Py_ssize_t i = 0, first, count = len(messages), alike = 0
        self._reserve(count)
        self._one_queue = True
        while i < count:
            _ask_fields(messages, i, True)
            _ask_texts(messages, i)
            self._take(i, messages[i], batch)
            first = i + 1
            i = self._take_run(messages, first, count)
            alike += i - first
        self._one_queue = self._one_queue and alike == count - 1
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
        self.count, self.records_size, self._source, self._has_columns, self.is_put = 0, 0, None, False, False
        self._properties.release()
        if self._capacity > MOST_KEPT:  # of one batch that was refused
            free(self.rows)
            self.rows, self._capacity = NULL, 0

    cdef int _take(self, Py_ssize_t i, object item, bint batch) except -1:
        """Row i is a message's."""
        cdef Message message
        cdef PutRow *row = &self.rows[i]
        cdef PyObject *text
        cdef Py_ssize_t size
        if type(item) is not Message:
            raise fault(i, f"expected Message, got {type(item).__name__}", MessageTypeError)
        message = <Message>item
        if message.topic is None:   # set last: the other fields are what __init__ checked
            raise fault(i, "message was not initialised")
        text = <PyObject *>message._topic
        row.topic = <const uint8_t *>PyBytes_AS_STRING(text)
        row.topic_size = <int32_t>PyBytes_GET_SIZE(text)
        text = <PyObject *>message.body
        size = PyBytes_GET_SIZE(text)
        if size > 0x7FFFFFFF:
            raise fault(i, f"body has {size} bytes", MessageTooLargeError)
        row.body = <const uint8_t *>PyBytes_AS_STRING(text)
        row.body_size = <int32_t>size
        text = <PyObject *>message._encoded
        if self.rules.append_crc and not batch:     # of a batch's messages RocketMQ leaves an incoming one
            text = self._shortened(message._encoded)
        row.properties = <const uint8_t *>PyBytes_AS_STRING(text)
        row.properties_size = <int32_t>PyBytes_GET_SIZE(text)
        row.is_alike = False
        row.queue_id = message.queue_id
        row.flag = message.flag
        row.sys_flag = message.sys_flag
        row.reconsume_times = message.reconsume_times
        row.prepared_transaction_offset = 0 if batch else message.prepared_transaction_offset   # as RocketMQ's batch
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
        self._finish(i, message._topic_units, message.raw_properties is not None, batch)
        return 0

    cdef Py_ssize_t _take_run(self, list messages, Py_ssize_t i, Py_ssize_t count) noexcept:
        """_take for the messages from row i on that have the header of the one before, whatever their queues; the row
        behind them."""
        cdef const PutRow *head = &self.rows[i - 1]
        cdef PutRow *row
        cdef PyObject *like = PyList_GET_ITEM(messages, i - 1)
        cdef PyObject *item
        cdef Py_ssize_t body_size, size
        cdef int64_t fixed_size = <int64_t>head.size - head.body_size - head.properties_size, record_size
        cdef int64_t body_most = min(self.rules.max_message_size, <int64_t>0x7FFFFFFF)
        cdef int64_t record_most = self.rules.max_record_size, records_size = 0
        cdef int32_t queue_id = head.queue_id, differ = 0
        cdef bint by_fields = (<Message>like)._header == 0
        if not can_be_alike(head) or self.rules.append_crc or self.rules.drop_last_separator:
            return i
        while i < count:
            _ask_fields(messages, i, by_fields)
            _ask_texts(messages, i)
            item = PyList_GET_ITEM(messages, i)
            if type(<object>item) is not Message or not shares_header(<Message>item, <Message>like):
                break
            body_size = PyBytes_GET_SIZE(<PyObject *>(<Message>item).body)
            size = PyBytes_GET_SIZE(<PyObject *>(<Message>item)._encoded)
            record_size = fixed_size + body_size + size
            if body_size > body_most or size >= SECTOR_SIZE or record_size > record_most:
                break
            row = &self.rows[i]
            set_alike(row)
            row.body = <const uint8_t *>PyBytes_AS_STRING(<PyObject *>(<Message>item).body)
            row.body_size = <int32_t>body_size
            row.properties = <const uint8_t *>PyBytes_AS_STRING(<PyObject *>(<Message>item)._encoded)
            row.properties_size = <int32_t>size
            row.size = <int32_t>record_size
            row.queue_id = (<Message>item).queue_id
            differ |= row.queue_id ^ queue_id
            records_size += record_size
            i += 1
        self.records_size += records_size
        self._one_queue = self._one_queue and differ == 0
        return i

    cdef PyObject *_shortened(self, bytes encoded) except NULL:
        """Properties without an incoming CRC property; they live as long as the batch's other sources."""
        cdef bytes shortened = without_property(encoded, CRC_NAME)
        if shortened is not encoded:
            if self._source is None:
                self._source = []
            self._source.append(shortened)
        return <PyObject *>shortened

    # ---- columns ----

    def load_columns(self, Py_ssize_t count, *, TextColumn topic not None, TextColumn body not None,
                     TextColumn keys, const int64_t[::1] key_lists, TextColumn tags, TextColumn uniq_key,
                     TextColumn names, TextColumn values, const int64_t[::1] maps, TextColumn raw_properties,
                     dict numbers not None, dict hosts not None, bint is_stored=False):
        """Take rows from columns. Each TextColumn has `count` strings, but topic may have one for all, and keys with
        key_lists, names and values with maps have those of row i at list[i] .. list[i + 1].

        numbers: int64 arrays queue_id, flag, sys_flag, reconsume_times, prepared_transaction_offset, born_timestamp,
        born_now (where it is not 0 that of the put), those that are given and in this order. hosts: born_host,
        store_host -> (list of bytes, int64 array of numbers in it, -1 the store's own). raw_properties excludes keys,
        tags, uniq_key and maps. is_stored: read from a store, where values may hold 0x01: the first one of an item ends
        its name. IllegalMessageError with .row.
        """
        cdef Py_ssize_t i
        cdef PutRow *row
        cdef int64_t size, units = 0
        cdef int malformed
        cdef PropertyRows properties = self._properties
        if count == 0:
            self._reserve(0)
            return
        if raw_properties is None and maps is None and key_lists is None and not hosts and \
                not self.rules.drop_last_separator and find_texts(&self._texts, keys, uniq_key, tags):
            self._reserve(0)
            if self._columns.take(self.rules, count, topic, body, &self._texts, numbers):
                self.records_size, self.waits, self._has_columns = self._columns.records_size, True, True
            else:
                self._reserve(count)
                self.records_size = set_plain_rows(self.rows, self.rules, count, topic, body, &self._texts, numbers)
                self._one_queue, self.waits = topic.count == 1 and "queue_id" not in numbers, True
            self._source = (topic, body, keys, uniq_key, tags)
            self.count = <int32_t>count
            return
        self._reserve(count)
        properties.begin(count, keys, key_lists, tags, uniq_key, names, values, maps, raw_properties, is_stored,
                         self.rules.append_crc)
        self._source = (topic, body, raw_properties, hosts)
        set_rows(self.rows, count, self.rules.store_host)
        set_numbers(self.rows, count, numbers)
        if hosts:
            set_hosts(self.rows, count, hosts, self.rules.store_host)
        with nogil:
            for i in range(count):
                row = &self.rows[i]
                row.topic = text_at(topic, i if topic.count > 1 else 0, &size)
                if size <= 0 or size > L.TOPIC_SIZE_LIMIT:
                    with gil:
                        raise no_topic(i, size)
                row.topic_size = <int32_t>size
                if i > 0 and same_topic(row, row - 1):
                    row.topic = (row - 1).topic  # one address for a run of them: who compares them sees it at once
                else:
                    with gil:
                        check_row_topic(i, row)
                row.body = text_at(body, i, &size)
                take_body_size(i, row, size)
                properties.add(i, row)
            for i in range(count):
                row = &self.rows[i]
                properties.point(i, row)
                if properties.is_foreign:
                    check_properties(i, row)
                if row.sys_flag & REFUSED_FLAGS or row.queue_id < 0:
                    with gil:
                        refuse_numbers(i, row)
                if not self.waits and (not properties.is_foreign or waits(row.properties, row.properties_size)):
                    self.waits = True
                if i == 0 or row.topic != (row - 1).topic:
                    malformed = 0  # checked above
                    units = rmq_utf16_units(row.topic, row.topic_size, &malformed)
                self._finish(i, units, raw_properties is not None, False)
        self.count = <int32_t>count

    # ---- encode ----

    @property
    def last_phy_offset(self):
        """Phy offset of the last encoded row, -1 when there are no rows."""
        return self.last_place() if self.count else -1

    cdef int64_t last_place(self) noexcept:
        """last_phy_offset. REQUIRES: there are rows."""
        return self._columns.last_phy_offset() if self._has_columns else self.rows[self.count - 1].phy_offset

    def alike(self):
        """How many rows have the header of the row before: their records are made in half the time."""
        return self.count - 1 if self._has_columns else sum([self.rows[i].is_alike for i in range(self.count)])

    def packed_size(self):
        """Bytes of RocketMQ's packed batch request with these messages. Source: MessageDecoder#encodeMessage."""
        cdef int64_t size = self.count * (L.INNER_FIXED_SIZE - (L.PROPERTY_CRC_SIZE if self.rules.append_crc else 0))
        cdef Py_ssize_t i
        if self._has_columns:
            size += self.count * (self._columns.first.properties_size - <int64_t>self._columns.first.size)
            return size + self.records_size
        for i in range(self.count):
            size += <int64_t>self.rows[i].body_size + self.rows[i].properties_size
        return size

    def fit(self, int32_t start, int64_t room):
        """(rows from `start` that fit into `room` bytes with 8 to spare after each, their bytes)."""
        cdef int64_t used = 0
        cdef int32_t i = start
        if start == 0 and self.records_size + L.BLANK_HEADER_SIZE <= room:
            return self.count, self.records_size
        while i < self.count and used + self._size(i) + L.BLANK_HEADER_SIZE <= room:
            used += self._size(i)
            i += 1
        return i - start, used

    def keep(self, int32_t count):
        """Only the first rows are put. ValueError unless there are as many, and one."""
        cdef int32_t i
        if not 0 < count <= self.count:
            raise ValueError(f"cannot keep {count} of {self.count} rows")
        for i in range(count, self.count):
            self.records_size -= self._size(i)
        self.count = count
        if self._has_columns:
            self._columns.count = count

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
        cdef int64_t i, end = position
        if start == 0 and stop == self.count:
            end += self.records_size
        else:
            for i in range(start, stop):
                end += self._size(i)
        if end + L.BLANK_HEADER_SIZE > room:
            raise ValueError("rows do not fit into the segment")
        if self._has_columns:
            self._columns.find_queues(start, stop, queues)
        elif stop - start == 1 and not self.rows[start].is_alike:
            self.rows[start].queue = queue_of(&self.rows[start], self.rows[start].queue_id, queues)
        else:
            find_queues(self.rows, start, stop, self._one_queue, queues)
        if end - position <= SHORT_WRITE:
            self._encode(base, segment_phy_offset, position, start, stop, store_timestamp, queues)
        else:
            with nogil:
                self._encode(base, segment_phy_offset, position, start, stop, store_timestamp, queues)
        return end

    cdef void _encode(self, uint8_t *base, int64_t segment_phy_offset, int64_t position, int32_t start, int32_t stop,
                      int64_t store_timestamp, QueueTable queues) noexcept nogil:
        cdef int32_t i, transaction, queue = 0
        cdef PutRow *row
        cdef PutRow *rows = self.rows
        cdef QueueSlot *slots = queues.slots
        cdef rmq_texts copied
        cdef const rmq_texts *texts = &self._texts
        cdef Alike alike                        # the row before
        cdef bint is_counted = False, one_queue = self._one_queue
        if self._has_columns:
            self._columns.encode(base, segment_phy_offset, position, start, stop, store_timestamp, slots)
            return
        if stop - start > 1:    # of its own: see set_plain_rows
            copied, texts = self._texts, &copied
        for i in range(start, stop):
            row = &rows[i]
            if row.properties != NULL and i + ROWS_AHEAD < stop:
                rmq_prefetch_text(row[ROWS_AHEAD].body, row[ROWS_AHEAD].body_size)
                rmq_prefetch_text(row[ROWS_AHEAD].properties, row[ROWS_AHEAD].properties_size)
            if not row.is_alike:
                transaction = row.sys_flag & L.SYS_FLAG_TRANSACTION_MASK
                is_counted = transaction != L.SYS_FLAG_PREPARED and transaction != L.SYS_FLAG_ROLLBACK
            if i == start or not one_queue:
                queue = row.queue
            row.queue_offset = 0
            if is_counted:
                row.queue_offset = slots[queue].next_offset
                slots[queue].next_offset += 1
            row.phy_offset = segment_phy_offset + position
            if row.is_alike:
                encode_alike(&alike, base + position, row.size, row.queue_id, row.queue_offset, row.phy_offset,
                             row.body, row.body_size, row.properties, row.properties_size, texts, i)
            else:
                encode_record(row, base + position, row.phy_offset, store_timestamp, texts, i)
                if i + 1 < stop and rows[i + 1].is_alike:
                    take_alike(&alike, row, base + position)
            position += row.size

    def results(self):
        """Columns of the encoded rows: phy_offset, queue_offset int64; size, queue_id int32; lists: topic, host."""
        return self._columns.results() if self._has_columns else results_of(self.rows, self.count)

    def release(self):
        """Let go of the messages or columns."""
        self.forget()


cdef inline void _ask_fields(list messages, Py_ssize_t i, bint all_fields) noexcept:
    """Ask memory for the fields of a later message: those that a run looks at, or all that _take does. The copy of a
    list brought its first line."""
    cdef const char *item
    if i + MESSAGES_AHEAD < len(messages):
        item = <const char *>PyList_GET_ITEM(messages, i + MESSAGES_AHEAD)
        rmq_prefetch(item + RMQ_LINE)
        if all_fields:
            rmq_prefetch(item + 2 * RMQ_LINE)


cdef inline void _ask_texts(list messages, Py_ssize_t i) noexcept:
    """Ask memory for the sizes of a later message's texts."""
    cdef PyObject *item = PyList_GET_ITEM(messages, i + TEXTS_AHEAD) if i + TEXTS_AHEAD < len(messages) else NULL
    if item != NULL and type(<object>item) is Message:
        rmq_prefetch(<PyObject *>(<Message>item).body)
        rmq_prefetch(<PyObject *>(<Message>item)._encoded)
