# SPDX-License-Identifier: Apache-2.0
"""Stored messages as lines of JSON or CSV: what the modules json and csv make of message_row (cli/fields.py)."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, strlen

cimport rmq._core._layout as L
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._record cimport Property, next_key, next_property
from rmq._core._storedfields cimport StoredFields

from rmq._core._message import format_host

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef extern from "json.h" nogil:
    int RMQ_JSON_ROOM
    int64_t rmq_json_growth(const uint8_t *p, int64_t n) noexcept
    uint8_t *rmq_json_copy(uint8_t *dest, const uint8_t *p, int64_t n) noexcept
    uint8_t *rmq_json_copy_plain(uint8_t *dest, const uint8_t *p, int64_t n) noexcept

cdef extern from "numbers.h" nogil:
    int RMQ_NUMBER_ROOM
    uint8_t *rmq_write_integer(uint8_t *dest, int64_t value) noexcept
    uint8_t *rmq_write_time(uint8_t *dest, int64_t value, int64_t per_second, int digits) noexcept
    void rmq_hex(uint8_t *text, const uint8_t *p, int size) noexcept
    void rmq_store_i64(uint8_t *p, int64_t value) noexcept


cdef enum:
    ITEMS = 32                          # properties, each of which is compared with each
    HOSTS = 1024                        # kept: as many as write to a broker at a time
    PLACE_SIZE = 8
    MS_PER_SECOND = 1000
    MS_DIGITS = 3

cdef int64_t FIRST_YEAR = -62135596800000       # ms: Python's calendar begins with year 1


cdef inline bint _is_utf8(const uint8_t *p, int64_t size) noexcept nogil:
    cdef int malformed = 0
    rmq_utf16_units(p, size, &malformed)
    return not malformed


cdef inline const uint8_t *_first(bytes data) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(data)


cdef const uint8_t *_utf8_of(str text, int64_t *size) except NULL:
    """Borrowed from the text."""
    cdef Py_ssize_t found = 0
    cdef const char *p = PyUnicode_AsUTF8AndSize(text, &found)
    size[0] = found
    return <const uint8_t *>p


cdef int _find_items(bytes raw, Property *items) noexcept:
    """The properties in their order; -1: some text is not UTF-8, a name comes twice, or there are more than ITEMS."""
    cdef const uint8_t *cursor = _first(raw)
    cdef const uint8_t *end = cursor + len(raw)
    cdef Property item
    cdef int count = 0
    if not _is_utf8(cursor, len(raw)):
        return -1
    while next_property(&cursor, end, False, &item):
        if count == ITEMS or _named(items, count, item.name, item.name_size) != NULL:
            return -1
        items[count] = item
        count += 1
    return count


cdef const Property *_named(const Property *items, int count, const uint8_t *name, int64_t size) noexcept:
    cdef int i
    for i in range(count):
        if items[i].name_size == size and memcmp(items[i].name, name, <size_t>size) == 0:
            return &items[i]
    return NULL


cdef inline const Property *_item(const Property *items, int count, const char *name) noexcept:
    return _named(items, count, <const uint8_t *>name, <int64_t>strlen(name))


cdef int64_t _csv_growth(const uint8_t *p, int64_t size) noexcept nogil:
    """Bytes that quotes take, around a cell that needs them and one more for each in it."""
    cdef int64_t quotes = 0, others = 0, i
    for i in range(size):
        quotes += p[i] == c'"'
        others += (p[i] == c',') | (p[i] == c'\n') | (p[i] == c'\r')
    return quotes + 2 if quotes + others else 0


cdef void _csv_quote(uint8_t *p, int64_t size, int64_t growth) noexcept nogil:
    """In place, from the end on."""
    cdef uint8_t *dest = p + size + growth - 1
    cdef uint8_t byte
    dest[0] = c'"'
    while size:
        size -= 1
        byte = p[size]
        dest -= 1
        dest[0] = byte
        if byte == c'"':
            dest -= 1
            dest[0] = byte
    p[0] = c'"'


@cython.final
cdef class MessageLines:
    """Lines are added one by one and taken together. Not thread-safe."""

    def __cinit__(self, str form not None):
        if form not in ("jsonl", "csv"):
            raise ValueError(f"form must be jsonl or csv, got {form!r}")
        self._is_csv = form == "csv"
        self._hosts = {}

    def __dealloc__(self):
        free(self._begin)

    def add(self, StoredFields message not None):
        """One line more. Raises as its `body`; nothing of the message is added then."""
        self._at = self._begin + self.size
        self._line(message)
        self.size = self._at - self._begin

    def take(self):
        """The lines that were added, as text, each with its end; none are left."""
        cdef int64_t size = self.size
        self.size = 0
        return PyUnicode_DecodeUTF8(<const char *>self._begin, size, NULL) if size else ""

    cdef int _reserve(self, int64_t size) except -1:
        """Room for so many bytes more of this line, for a number, and for what copies write behind them."""
        cdef int64_t used = self._at - self._begin, wanted = used + size + RMQ_JSON_ROOM + RMQ_NUMBER_ROOM
        cdef uint8_t *grown
        if wanted > self._room:
            wanted += wanted // 2
            grown = <uint8_t *>realloc(self._begin, <size_t>wanted)
            if grown == NULL:
                raise MemoryError
            self._begin, self._at, self._room = grown, grown + used, wanted
        return 0

    # ---- pieces ----

    cdef int _copied(self, const uint8_t *p, int64_t size) except -1:
        self._reserve(size)
        self._at = rmq_json_copy_plain(self._at, p, size)
        return 0

    cdef int _plain(self, const char *text) except -1:
        return self._copied(<const uint8_t *>text, <int64_t>strlen(text))

    cdef int _quoted(self, const uint8_t *p, int64_t size) except -1:
        """UTF-8 as a string of JSON."""
        self._reserve(size + rmq_json_growth(p, size) + 2)
        self._at[0] = c'"'
        self._at = rmq_json_copy(self._at + 1, p, size)
        self._at[0] = c'"'
        self._at += 1
        return 0

    cdef int _end_cell(self, int64_t start) except -1:
        """Quotes for the cell of CSV that begins `start` bytes behind _begin."""
        cdef int64_t size = self._at - self._begin - start
        cdef int64_t growth = _csv_growth(self._begin + start, size)
        if growth:
            self._reserve(growth)
            _csv_quote(self._begin + start, size, growth)
            self._at += growth
        return 0

    cdef int _name(self, const char *json) except -1:
        """What stands before a value that is not the line's first."""
        if self._is_csv:
            json = ","
        return self._plain(json)

    # ---- values ----

    cdef int _integer(self, const char *name, int64_t value) except -1:
        self._name(name)
        self._at = rmq_write_integer(self._at, value)
        return 0

    cdef int _time(self, const char *name, int64_t ms) except -1:
        """ISO 8601 in UTC; a number where the calendar has no such year."""
        cdef uint8_t text[64]                           # RMQ_NUMBER_ROOM
        cdef uint8_t *end = NULL
        if ms >= FIRST_YEAR:
            end = rmq_write_time(text, ms, MS_PER_SECOND, MS_DIGITS)
        if end == NULL:
            return self._integer(name, ms)
        end[0] = c'Z'
        self._name(name)
        return self._value(text, end + 1 - text)

    cdef int _value(self, const uint8_t *p, int64_t size) except -1:
        """UTF-8."""
        cdef int64_t start = self._at - self._begin
        if not self._is_csv:
            return self._quoted(p, size)
        self._copied(p, size)
        return self._end_cell(start)

    cdef int _text(self, str text) except -1:
        cdef int64_t size = 0
        cdef const uint8_t *p = _utf8_of(text, &size)
        return self._value(p, size)

    cdef int _found(self, const Property *item) except -1:
        if item != NULL:
            return self._value(item.value, item.value_size)
        return 0 if self._is_csv else self._plain("null")

    cdef int _host(self, const char *name, bytes host) except -1:
        cdef str text = self._hosts.get(host)
        if text is None:
            if len(self._hosts) == HOSTS:
                self._hosts.clear()
            text = self._hosts[host] = format_host(host)
        self._name(name)
        return self._text(text)

    cdef int _offset_msg_id(self, bytes host, int64_t phy_offset) except -1:
        cdef uint8_t place[PLACE_SIZE]
        cdef uint8_t text[2 * (L.HOST_IPV6_SIZE + PLACE_SIZE)]
        cdef int size = <int>len(host)
        rmq_store_i64(place, phy_offset)
        rmq_hex(text, _first(host), size)
        rmq_hex(text + 2 * size, place, PLACE_SIZE)
        self._name(', "offset_msg_id": ')
        return self._value(text, 2 * (size + PLACE_SIZE))

    cdef int _keys(self, const Property *item) except -1:
        """A list; of CSV a cell with a space between them."""
        cdef int64_t start = self._at - self._begin, key_size = 0
        cdef const uint8_t *cursor = item.value if item != NULL else NULL
        cdef const uint8_t *end = cursor + item.value_size if item != NULL else NULL
        cdef const uint8_t *key
        cdef bint is_first = True
        if not self._is_csv:
            self._plain("[")
        while next_key(&cursor, end, &key, &key_size):
            if not is_first:
                self._plain(" ") if self._is_csv else self._plain(", ")
            is_first = False
            self._copied(key, key_size) if self._is_csv else self._quoted(key, key_size)
        return self._end_cell(start) if self._is_csv else self._plain("]")

    cdef int _properties(self, const Property *items, int count) except -1:
        """An object of JSON, also in a cell of CSV."""
        cdef int64_t start = self._at - self._begin
        cdef int i
        self._plain("{")
        for i in range(count):
            if i:
                self._plain(", ")
            self._quoted(items[i].name, items[i].name_size)
            self._plain(": ")
            self._quoted(items[i].value, items[i].value_size)
        self._plain("}")
        return self._end_cell(start) if self._is_csv else 0

    cdef int _body(self, bytes body) except -1:
        """The body and its encoding."""
        cdef bint is_text = _is_utf8(_first(body), len(body))
        self._name(', "body": ')
        if is_text:
            self._value(_first(body), len(body))
        else:
            self._text(body.hex())
        self._name(', "body_encoding": ')
        return self._text("utf-8" if is_text else "hex")

    cdef int _line(self, StoredFields message) except -1:
        cdef Property few[ITEMS]
        cdef Property *many
        cdef int count = _find_items(message.raw_properties, few)
        cdef dict properties
        if count >= 0:
            return self._fields(message, few, count)
        properties = message.properties
        many = <Property *>malloc(<size_t>max(len(properties), 1) * sizeof(Property))
        if many == NULL:
            raise MemoryError
        try:
            count = 0
            for name, value in properties.items():
                many[count].name = _utf8_of(name, &many[count].name_size)
                many[count].value = _utf8_of(value, &many[count].value_size)
                count += 1
            return self._fields(message, many, count)
        finally:
            free(many)

    cdef int _fields(self, StoredFields message, const Property *items, int count) except -1:
        """The line: the fields of message_row in their order."""
        cdef const Property *keys = _item(items, count, "KEYS")
        cdef bint is_packed = message.sys_flag & L.SYS_FLAG_COMPRESSED != 0
        if not self._is_csv:
            self._plain('{"topic": ')
        self._text(message.topic)
        self._integer(', "queue_id": ', message.queue_id)
        self._integer(', "queue_offset": ', message.queue_offset)
        self._integer(', "phy_offset": ', message.phy_offset)
        self._integer(', "size": ', message.size)
        self._time(', "store_timestamp": ', message.store_timestamp)
        self._time(', "born_timestamp": ', message.born_timestamp)
        self._host(', "store_host": ', message._store_host)
        self._host(', "born_host": ', message._born_host)
        self._offset_msg_id(message._store_host, message.phy_offset)
        self._name(', "uniq_key": ')
        self._found(_item(items, count, "UNIQ_KEY"))
        self._name(', "keys": ')
        self._keys(keys)
        self._name(', "tags": ')
        self._found(_item(items, count, "TAGS"))
        self._name(', "properties": ')
        self._properties(items, count)
        self._integer(', "flag": ', message.flag)
        self._integer(', "sys_flag": ', message.sys_flag)
        self._integer(', "reconsume_times": ', message.reconsume_times)
        self._integer(', "prepared_transaction_offset": ', message.prepared_transaction_offset)
        self._integer(', "body_crc": ', message.body_crc)
        self._body(message.body if is_packed else message.raw_body)
        if not self._is_csv:
            self._plain("}")
        return self._plain("\n")
