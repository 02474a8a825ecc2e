# SPDX-License-Identifier: Apache-2.0
"""Property strings of a batch's rows, made from columns."""
cimport cython
from libc.stdint cimport int64_t, uint8_t

from rmq._core._record cimport PutRow
from rmq._core._textcolumn cimport TextColumn


@cython.final
cdef class PropertyRows:
    """Columns of keys, tags, unique keys and maps, or of whole strings; rows are added in order."""
    cdef:
        uint8_t *_arena
        int64_t _size
        int64_t _room
        int64_t[::1] _starts                # of each row in the arena, -1: the row's properties stand elsewhere
        TextColumn _keys
        const int64_t[::1] _key_lists
        TextColumn _tags
        TextColumn _uniq_key
        TextColumn _names
        TextColumn _values
        const int64_t[::1] _maps
        TextColumn _raw
        bint _is_stored                     # read from a store, where values may hold 0x01
        bint _drops_crc                     # a CRC property that comes along is left out
        bint is_foreign                     # there may be names that mean something to RocketMQ
    cdef int begin(self, Py_ssize_t count, TextColumn keys, const int64_t[::1] key_lists, TextColumn tags,
                   TextColumn uniq_key, TextColumn names, TextColumn values, const int64_t[::1] maps,
                   TextColumn raw, bint is_stored, bint drops_crc) except -1
    cdef int add(self, Py_ssize_t i, PutRow *row) except -1 nogil
    cdef void point(self, Py_ssize_t i, PutRow *row) noexcept nogil
    cdef void release(self) noexcept
    cdef int _reserve(self, int64_t size) except -1 nogil
    cdef int _add_raw(self, Py_ssize_t i, PutRow *row) except -1 nogil
    cdef int _add_keys(self, Py_ssize_t i, int *held) except -1 nogil
    cdef int _add_one(self, Py_ssize_t i, TextColumn column, const char *name, int64_t name_size, const char *why,
                      int *held) except -1 nogil
    cdef int _add_map(self, Py_ssize_t i, int64_t start, int *held) except -1 nogil
