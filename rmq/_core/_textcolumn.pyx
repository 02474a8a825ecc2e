# SPDX-License-Identifier: Apache-2.0
"""Strings of Arrow columns, their bytes borrowed, their offsets copied and checked once."""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from rmq._core._record cimport rmq_texts

cdef extern from "texts.h" nogil:
    void rmq_texts_add(rmq_texts *texts, const char *name, const int64_t *starts, const uint8_t *data,
                       int64_t longest) noexcept
    bint rmq_is_plain(const uint8_t *p, int64_t n, bint with_space) noexcept

cdef uint8_t NOTHING = 0


cdef int64_t _longest(const int64_t *starts, Py_ssize_t count, int64_t size) noexcept nogil:
    """All bits of the strings' sizes; -1 when an offset lies outside [0, size] or before the one in front of it."""
    cdef Py_ssize_t i
    cdef uint64_t sizes = 0, places = <uint64_t>starts[count]   # the sign bit: some number is negative
    for i in range(count):      # a loop without a way out runs on vectors
        sizes |= <uint64_t>starts[i + 1] - <uint64_t>starts[i]
        places |= <uint64_t>starts[i]
    return -1 if <int64_t>(sizes | places) < 0 or starts[count] > size else <int64_t>sizes


cdef void _widen(int64_t *dest, const int32_t *numbers, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):      # of its own: fields of an object in it would keep it off vectors
        dest[i] = numbers[i]


@cython.final
@cython.no_gc_clear
cdef class TextColumn:
    """Strings whose offsets, one more than strings, are those from number `first` on in a buffer of integers of `width`
    bytes, 4 or 8; count -1: all of them. missing: one byte per string, or none when there are no nulls.
    """

    def __cinit__(self, offsets not None, data not None, const uint8_t[::1] missing not None, *, int width=8,
                  Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef Py_ssize_t i
        cdef Py_buffer buffer
        if width != 4 and width != 8:
            raise ValueError("offsets have 4 or 8 bytes")
        PyObject_GetBuffer(data, &self._data, PyBUF_SIMPLE)
        PyObject_GetBuffer(offsets, &buffer, PyBUF_SIMPLE)
        try:
            self._copy_starts(&buffer, width, first, count)
        finally:
            PyBuffer_Release(&buffer)
        self.longest = _longest(self.starts, self.count, self._data.len)
        if self.longest < 0:
            for i in range(self.count + 1):
                if self.starts[i] < 0 or self.starts[i] > self._data.len or (i and self.starts[i] < self.starts[i - 1]):
                    raise ValueError(f"offsets[{i}] lies outside the data")
        if missing.shape[0] and missing.shape[0] != self.count:
            raise ValueError("missing must have one byte per string")
        self.missing = missing
        self.first = <const uint8_t *>self._data.buf if self._data.len else &NOTHING

    def __dealloc__(self):
        free(self.starts)
        PyBuffer_Release(&self._data)

    cdef int _copy_starts(self, const Py_buffer *offsets, int width, Py_ssize_t first, Py_ssize_t count) except -1:
        cdef Py_ssize_t room = offsets.len // width - 1 - max(first, <Py_ssize_t>0)
        cdef size_t size
        self.count = room if count < 0 else count
        if first < 0 or not 0 <= self.count <= room:
            raise ValueError("there must be one more offset than strings")
        size = <size_t>(self.count + 1) * sizeof(int64_t)
        self.starts = <int64_t *>malloc(size)
        if self.starts == NULL:
            raise MemoryError()
        if width == 8:
            memcpy(self.starts, <const int64_t *>offsets.buf + first, size)
        else:
            _widen(self.starts, <const int32_t *>offsets.buf + first, self.count + 1)
        return 0

    def __len__(self):
        return self.count


cdef bint find_texts(rmq_texts *texts, TextColumn keys, TextColumn uniq_key, TextColumn tags):
    """Whether property strings can be made of the columns just as they are: no nulls, nothing but plain ASCII."""
    cdef TextColumn column
    cdef int64_t size
    cdef Py_ssize_t i
    cdef bint is_empty = False
    texts.count, texts.frame_size = 0, 0
    for name, column in ((b"KEYS", keys), (b"UNIQ_KEY", uniq_key), (b"TAGS", tags)):
        if column is None:
            continue
        size = column.starts[column.count] - column.starts[0]
        if column.missing.shape[0] or not rmq_is_plain(column.first + column.starts[0], size, column is not keys):
            return False
        rmq_texts_add(texts, <const char *>name, column.starts, column.first, column.longest)
    if keys is not None:
        for i in range(keys.count):
            is_empty |= keys.starts[i + 1] == keys.starts[i]
    return not is_empty
