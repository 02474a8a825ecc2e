# SPDX-License-Identifier: Apache-2.0
"""Columns of text as one JSON object for each row: one pass that copies and escapes."""
cimport cython
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free

from rmq._core._textcolumn cimport TextColumn

cdef extern from "json.h":
    int RMQ_JSON_ROOM
    int64_t rmq_json_growth(const uint8_t *p, int64_t n) noexcept nogil
    uint8_t *rmq_json_copy(uint8_t *dest, const uint8_t *p, int64_t n) noexcept nogil
    uint8_t *rmq_json_copy_plain(uint8_t *dest, const uint8_t *p, int64_t n) noexcept nogil

cdef const char *NULL_TEXT = "null"
cdef int64_t NULL_SIZE = 4              # more than the two quotes of a value


@cython.final
cdef class JsonRows:
    def __cinit__(self, list heads not None, list columns not None, list quoted not None, bytes tail not None):
        cdef int i
        cdef TextColumn column
        cdef bytes head
        if not columns or len(heads) != len(columns) or len(quoted) != len(columns):
            raise ValueError("each of one or more columns needs a head and whether it is quoted")
        self._heads, self._columns, self._tail, self._width = list(heads), list(columns), tail, <int>len(columns)
        self._tail_text, self._tail_size = <const uint8_t *><const char *>tail, len(tail)
        self._fields = <JsonField *>calloc(<size_t>self._width, sizeof(JsonField))
        if self._fields == NULL:
            raise MemoryError
        for i in range(self._width):
            head, column = self._heads[i], self._columns[i]
            if head is None or column is None:
                raise TypeError("heads are bytes, columns TextColumn")
            if i == 0:
                self.count = len(column)
            elif len(column) != self.count:
                raise ValueError(f"columns have {self.count} and {len(column)} values")
            self._fields[i].offsets = column.starts
            self._fields[i].data = column.first
            self._fields[i].missing = &column.missing[0] if column.missing.shape[0] else NULL
            self._fields[i].head = <const uint8_t *><const char *>head
            self._fields[i].head_size = len(head)
            self._fields[i].is_quoted = quoted[i]
        with nogil:
            self.room = self._most() + RMQ_JSON_ROOM

    def __dealloc__(self):
        free(self._fields)

    cdef int64_t _most(self) noexcept nogil:
        """Bytes of all rows at most."""
        cdef int64_t size = self.count * self._tail_size, begin, end
        cdef const JsonField *field
        cdef int i
        for i in range(self._width):
            field = &self._fields[i]
            begin, end = field.offsets[0], field.offsets[self.count]
            size += self.count * (field.head_size + NULL_SIZE) + end - begin
            if field.is_quoted:
                size += rmq_json_growth(field.data + begin, end - begin)
        return size

    def write(self, int64_t[::1] offsets not None, uint8_t[::1] into not None):
        """The rows one behind the other into `into`, of at least `room` bytes; offsets[i]: where row i begins, and at
        [count] where the last ends, which is returned."""
        if offsets.shape[0] <= self.count or into.shape[0] < self.room:
            raise ValueError(f"{self.count} rows need {self.count + 1} offsets and {self.room} bytes")
        cdef int64_t size
        with nogil:
            size = self._write(&offsets[0], &into[0])
        return size

    cdef int64_t _write(self, int64_t *offsets, uint8_t *begin) noexcept nogil:
        cdef uint8_t *dest = begin
        cdef int64_t size
        cdef const JsonField *field
        cdef const uint8_t *text
        cdef Py_ssize_t row
        cdef int i
        for row in range(self.count):
            offsets[row] = dest - begin
            for i in range(self._width):
                field = &self._fields[i]
                dest = rmq_json_copy_plain(dest, field.head, field.head_size)
                if field.missing != NULL and field.missing[row]:
                    dest = rmq_json_copy_plain(dest, <const uint8_t *>NULL_TEXT, NULL_SIZE)
                    continue
                text, size = field.data + field.offsets[row], field.offsets[row + 1] - field.offsets[row]
                if field.is_quoted:
                    dest[0] = c'"'
                    dest = rmq_json_copy(dest + 1, text, size)
                    dest[0] = c'"'
                    dest += 1
                else:
                    dest = rmq_json_copy_plain(dest, text, size)
            dest = rmq_json_copy_plain(dest, self._tail_text, self._tail_size)
        offsets[self.count] = dest - begin
        return dest - begin
