# SPDX-License-Identifier: Apache-2.0
"""Stored messages as lines of JSON or CSV."""
cimport cython
from libc.stdint cimport int64_t, uint8_t

from rmq._core._record cimport Property
from rmq._core._storedfields cimport StoredFields


@cython.final
cdef class MessageLines:
    cdef:
        readonly int64_t size           # bytes of the lines that were added and not taken
        bint _is_csv
        uint8_t *_begin
        uint8_t *_at                    # where the line goes on that is being added
        int64_t _room                   # bytes behind _begin
        dict _hosts                     # texts of hosts, by their bytes

    cdef int _reserve(self, int64_t size) except -1
    cdef int _plain(self, const char *text) except -1
    cdef int _name(self, const char *json) except -1
    cdef int _integer(self, const char *name, int64_t value) except -1
    cdef int _time(self, const char *name, int64_t ms) except -1
    cdef int _quoted(self, const uint8_t *p, int64_t size) except -1
    cdef int _copied(self, const uint8_t *p, int64_t size) except -1
    cdef int _end_cell(self, int64_t start) except -1
    cdef int _value(self, const uint8_t *p, int64_t size) except -1
    cdef int _text(self, str text) except -1
    cdef int _found(self, const Property *item) except -1
    cdef int _host(self, const char *name, bytes host) except -1
    cdef int _offset_msg_id(self, bytes host, int64_t phy_offset) except -1
    cdef int _keys(self, const Property *item) except -1
    cdef int _properties(self, const Property *items, int count) except -1
    cdef int _body(self, bytes body) except -1
    cdef int _line(self, StoredFields message) except -1
    cdef int _fields(self, StoredFields message, const Property *items, int count) except -1
