# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch as objects, and whether they are the messages that units of a queue point to."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp, strlen

cimport rmq._core._layout as L
from rmq._core._javahash cimport decode_utf8
from rmq._core._record cimport Property, RecordRow, born_host_of, next_property, store_host_of
from rmq._core._recordbatch cimport RecordBatch

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(PyObject *item) noexcept

cdef tuple NO_ARGUMENTS = ()


cdef class StoredFields:
    def __init__(self, tuple fields not None, segment=None):
        """fields: in the order of as_tuple. segment: path and phy offset of the file, for errors."""
        (self.topic, self.queue_id, self.queue_offset, self.phy_offset, self.size, self.flag, self.sys_flag,
         self.born_timestamp, self._born_host, self.store_timestamp, self._store_host, self.reconsume_times,
         self.prepared_transaction_offset, self.body_crc, self.raw_body, self.raw_properties) = fields
        self._body = self._properties = None
        self._segment = segment

    def as_tuple(self):
        """The stored fields."""
        return (self.topic, self.queue_id, self.queue_offset, self.phy_offset, self.size, self.flag, self.sys_flag,
                self.born_timestamp, self._born_host, self.store_timestamp, self._store_host, self.reconsume_times,
                self.prepared_transaction_offset, self.body_crc, self.raw_body, self.raw_properties)

    @property
    def keys(self):
        """Those of property KEYS, in order."""
        cdef str text = self._value_of("KEYS", strlen("KEYS"))
        return () if text is None else tuple([key for key in text.split(" ") if key])

    @property
    def tags(self):
        """Property TAGS; None: it has none."""
        return self._value_of("TAGS", strlen("TAGS"))

    @property
    def uniq_key(self):
        """Property UNIQ_KEY; None: it has none."""
        return self._value_of("UNIQ_KEY", strlen("UNIQ_KEY"))

    cdef str _value_of(self, const char *name, Py_ssize_t name_size):
        """parse_properties(raw_properties).get(name)."""
        cdef Py_ssize_t size = len(self.raw_properties)
        cdef const uint8_t *cursor = <const uint8_t *>PyBytes_AS_STRING(self.raw_properties)
        cdef const uint8_t *end = cursor + size
        cdef Property item, found
        found.value = NULL
        while next_property(&cursor, end, False, &item):
            if item.name_size == name_size and memcmp(item.name, name, <size_t>name_size) == 0:
                found = item
        return None if found.value == NULL else decode_utf8(found.value, found.value_size)


cdef inline bytes _copy(const uint8_t *p, int64_t size):
    return PyBytes_FromStringAndSize(<const char *>p, size)


cdef inline bytes _host(const uint8_t *p, bint is_ipv6, bytes before):
    """A host, the object of the message before when that has the same bytes."""
    cdef int64_t size = L.HOST_IPV6_SIZE if is_ipv6 else L.HOST_IPV4_SIZE
    if before is not None and len(before) == size and memcmp(p, <const char *>before, <size_t>size) == 0:
        return before
    return _copy(p, size)


cdef inline bint _is_topic_of(const RecordRow *row, const RecordRow *other) noexcept nogil:
    return row.topic_size == other.topic_size and \
        memcmp(row.base + row.topic_position, other.base + other.topic_position, <size_t>row.topic_size) == 0


cdef StoredFields _stored(type kind, const RecordRow *row, const RecordRow *row_before, StoredFields before):
    """The fields of a row, which shares topic and hosts with the message of the row before where these are the same."""
    cdef StoredFields made = <StoredFields?>(<PyTypeObject *>kind).tp_new(kind, <PyObject *>NO_ARGUMENTS, NULL)
    if before is not None and _is_topic_of(row, row_before):
        made.topic = before.topic
    else:
        made.topic = decode_utf8(row.base + row.topic_position, row.topic_size)
    made._born_host = _host(born_host_of(row), row.sys_flag & L.SYS_FLAG_BORN_HOST_IPV6 != 0,
                            before._born_host if before is not None else None)
    made._store_host = _host(store_host_of(row), row.sys_flag & L.SYS_FLAG_STORE_HOST_IPV6 != 0,
                             before._store_host if before is not None else None)
    made.raw_body = _copy(row.base + row.body_position, row.body_size)
    made.raw_properties = _copy(row.base + row.properties_position, row.properties_size)
    made.queue_offset, made.phy_offset, made.size = row.queue_offset, row.phy_offset, row.size
    made.born_timestamp, made.store_timestamp = row.born_timestamp, row.store_timestamp
    made.prepared_transaction_offset = row.prepared_transaction_offset
    made.queue_id, made.flag, made.sys_flag = row.queue_id, row.flag, row.sys_flag
    made.reconsume_times, made.body_crc = row.reconsume_times, row.body_crc
    PyObject_GC_UnTrack(<PyObject *>made)   # nothing that it holds leads back to it
    return made


def stored(RecordBatch batch not None, type kind not None):
    """An object of a subclass of StoredFields for each row, bytes copied; its __init__ is not called. TypeError when
    its __new__ makes another.
    """
    cdef StoredFields made = None
    cdef list found = []
    cdef int32_t i
    if not issubclass(kind, StoredFields):
        raise TypeError("kind must be a subclass of StoredFields")
    for i in range(batch.count):
        made = _stored(kind, &batch.rows[i], &batch.rows[max(i, 1) - 1], made)
        found.append(made)
    return found


def stored_at(RecordBatch batch not None, int32_t i, type kind not None):
    """The object of row i alone. IndexError outside the rows."""
    if i < 0 or i >= batch.count:
        raise IndexError(i)
    if not issubclass(kind, StoredFields):
        raise TypeError("kind must be a subclass of StoredFields")
    return _stored(kind, &batch.rows[i], NULL, None)


def has_compressed(RecordBatch batch not None):
    """Whether the body of some row is compressed."""
    cdef int32_t i = 0
    with nogil:
        while i < batch.count and not batch.rows[i].sys_flag & L.SYS_FLAG_COMPRESSED:
            i += 1
    return i < batch.count


def rows_with(RecordBatch batch not None, bytes name not None):
    """Numbers of the rows that have a property of a name, ascending."""
    cdef int32_t i
    cdef const uint8_t *wanted = <const uint8_t *>PyBytes_AS_STRING(name)
    cdef const uint8_t *cursor
    cdef const uint8_t *end
    cdef int64_t size = len(name)
    cdef Property item
    cdef list found = []
    for i in range(batch.count):
        cursor = batch.rows[i].base + batch.rows[i].properties_position
        end = cursor + batch.rows[i].properties_size
        while next_property(&cursor, end, False, &item):
            if item.name_size == size and memcmp(item.name, wanted, <size_t>size) == 0:
                found.append(i)
                break
    return found


def are_of_queue(RecordBatch batch not None, bytes topic, int32_t queue_id, const int64_t[::1] queue_offsets,
                 const int32_t[::1] sizes not None):
    """Whether each row has the size, and is of the queue and queue offset, that its unit says.

    topic None: of any queue; queue_offsets None: any. Numbers of another length: False.
    """
    cdef int32_t i = 0
    cdef RecordRow *row
    cdef const uint8_t *name = NULL
    cdef int64_t name_size = 0
    if topic is not None:
        name, name_size = <const uint8_t *>PyBytes_AS_STRING(topic), len(topic)
    if sizes.shape[0] != batch.count or (queue_offsets is not None and queue_offsets.shape[0] != batch.count):
        return False
    with nogil:
        while i < batch.count:
            row = &batch.rows[i]
            if row.size != sizes[i] or (queue_offsets is not None and row.queue_offset != queue_offsets[i]):
                break
            if name != NULL and (row.queue_id != queue_id or row.topic_size != name_size or
                                 memcmp(row.base + row.topic_position, name, <size_t>name_size) != 0):
                break
            i += 1
    return i == batch.count
