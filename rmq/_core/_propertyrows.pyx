# SPDX-License-Identifier: Apache-2.0
"""Property strings of a batch's rows, made from columns: KEYS, UNIQ_KEY, TAGS, then what the maps hold.

Source: RocketMQ MessageDecoder#messageProperties2String.
"""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy

cimport rmq._core._layout as L
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._putrow cimport fault
from rmq._core._record cimport CRC_NAME, CRC_NAME_SIZE, PutRow, next_key
from rmq._core._textcolumn cimport TextColumn, text_at

cdef extern from "property.h" nogil:
    int RMQ_HAS_SEPARATOR, RMQ_HAS_SPACE, RMQ_HAS_HIGH
    const uint8_t *rmq_item_end(const uint8_t *p, const uint8_t *end, const uint8_t **mark) noexcept
    int rmq_copy_text(uint8_t *dest, const uint8_t *p, int64_t n) noexcept
    uint8_t *rmq_put_item(uint8_t *dest, const char *name, int64_t name_size, const uint8_t *value, int64_t size,
                          int *found) noexcept

import numpy as np

from rmq._core._message import without_property

cdef int64_t ARENA_KEPT = 8 << 20       # bytes at most that stay from one batch to the next
cdef int64_t ARENA_LEAST = 64 << 10
cdef int64_t ROOM_BEHIND = 16           # bytes: what rmq_put_item may write behind its item


@cython.final
cdef class PropertyRows:
    def __dealloc__(self):
        free(self._arena)

    cdef int begin(self, Py_ssize_t count, TextColumn keys, const int64_t[::1] key_lists, TextColumn tags,
                   TextColumn uniq_key, TextColumn names, TextColumn values, const int64_t[::1] maps,
                   TextColumn raw, bint is_stored, bint drops_crc) except -1:
        """Take the columns of so many rows: see PutBatch.load_columns."""
        self._starts = np.empty(count, np.int64)    # first: release looks at it
        self._keys, self._key_lists, self._tags, self._uniq_key = keys, key_lists, tags, uniq_key
        self._names, self._values, self._maps, self._raw = names, values, maps, raw
        self._is_stored, self._drops_crc = is_stored, drops_crc
        self.is_foreign = maps is not None or raw is not None
        self._size = 0
        self._reserve(1)    # so that rows without properties have an address too
        return 0

    cdef void release(self) noexcept:
        """Let go of the columns, and of an arena that is large; the rows point to nothing then."""
        if self._starts is None:    # after each single put
            return
        self._keys = self._tags = self._uniq_key = self._names = self._values = self._raw = None
        self._key_lists = self._maps = None
        self._starts = None
        if self._room > ARENA_KEPT:
            free(self._arena)
            self._arena, self._room = NULL, 0

    cdef int add(self, Py_ssize_t i, PutRow *row) except -1 nogil:
        """Make the property string of row i, the next one; its size is set. IllegalMessageError with .row."""
        cdef int64_t start = self._size, own_size
        cdef int malformed = 0, held = 0    # RMQ_HAS_* of the row's text
        if self._raw is not None:
            return self._add_raw(i, row)
        self._add_keys(i, &held)
        self._add_one(i, self._uniq_key, "UNIQ_KEY", 8, "uniq_key holds 0x01 or 0x02", &held)
        self._add_one(i, self._tags, "TAGS", 4, "tags hold 0x01 or 0x02", &held)
        if self._maps is not None:
            self._add_map(i, start, &held)
        if held & RMQ_HAS_HIGH:
            rmq_utf16_units(self._arena + start, self._size - start, &malformed)
            if malformed:
                with gil:
                    raise fault(i, "keys, tags, uniq_key or properties are not UTF-8")
        if self._size - start > L.PROPERTIES_SIZE_LIMIT:
            with gil:
                raise _too_large(i, self._size - start)
        row.properties_size = <int32_t>(self._size - start)
        self._starts[i] = start
        return 0

    cdef void point(self, Py_ssize_t i, PutRow *row) noexcept nogil:
        """Point row i to its string. REQUIRES: all rows are added, for the arena moves while it grows."""
        if self._starts[i] >= 0:
            row.properties = self._arena + self._starts[i]

    cdef int _reserve(self, int64_t size) except -1 nogil:
        """Make room for so many bytes more."""
        cdef uint8_t *arena
        cdef int64_t room
        if self._size + size + ROOM_BEHIND > self._room:
            room = max(self._room * 2, self._size + size + ROOM_BEHIND, ARENA_LEAST)
            arena = <uint8_t *>realloc(self._arena, <size_t>room)
            if arena == NULL:
                with gil:
                    raise MemoryError()
            self._arena, self._room = arena, room
        return 0

    cdef int _add_raw(self, Py_ssize_t i, PutRow *row) except -1 nogil:
        """The column's own bytes; a copy in the arena where a CRC property goes."""
        cdef int64_t size
        row.properties = text_at(self._raw, i, &size)
        if size > L.PROPERTIES_SIZE_LIMIT:
            with gil:
                raise _too_large(i, size)
        row.properties_size = <int32_t>max(size, <int64_t>0)
        self._starts[i] = -1
        if self._drops_crc and size > 0:
            with gil:
                encoded = without_property((<const char *>row.properties)[:size], CRC_NAME)
                self._reserve(len(encoded))
                memcpy(self._arena + self._size, <const char *>encoded, len(encoded))
                row.properties_size = <int32_t>len(encoded)
            self._starts[i] = self._size
            self._size += row.properties_size
        return 0

    cdef int _add_keys(self, Py_ssize_t i, int *held) except -1 nogil:
        """KEYS of row i, separated by spaces."""
        cdef Py_ssize_t k, first = i, last = i + 1
        cdef int64_t size, start = self._size
        cdef const uint8_t *p
        cdef uint8_t *at
        cdef int found
        if self._keys is None:
            return 0
        if self._key_lists is not None:
            first, last = <Py_ssize_t>self._key_lists[i], <Py_ssize_t>self._key_lists[i + 1]
        for k in range(first, last):
            p = text_at(self._keys, k, &size)
            if size < 0:
                if self._key_lists is not None:
                    with gil:
                        raise fault(i, "keys hold a null")
                continue
            found = 0
            self._reserve(size + 6)
            at = self._arena + self._size
            if self._size == start:
                self._size += rmq_put_item(at, "KEYS", 4, p, size, &found) - at
            else:
                # Reopen the item: the next key goes where its 0x02 stands.
                (at - 1)[0] = 0x20
                found = rmq_copy_text(at, p, size)
                at[size] = L.PROPERTY_END
                self._size += size + 1
            if size == 0 or found & RMQ_HAS_SPACE:
                with gil:
                    raise fault(i, "a key is empty or holds a space")
            if found & RMQ_HAS_SEPARATOR and (not self._is_stored or memchr(p, L.PROPERTY_END, size) != NULL):
                with gil:
                    raise fault(i, "a key holds 0x01 or 0x02")
            held[0] |= found
        return 0

    cdef int _add_one(self, Py_ssize_t i, TextColumn column, const char *name, int64_t name_size, const char *why,
                      int *held) except -1 nogil:
        """An item of a name of its own, when the column has one for row i. why: what is wrong where it breaks it."""
        cdef int64_t size
        cdef const uint8_t *p
        cdef uint8_t *at
        cdef int found = 0
        if column is None:
            return 0
        p = text_at(column, i, &size)
        if size < 0:
            return 0
        self._reserve(name_size + size + 2)
        at = self._arena + self._size
        self._size += rmq_put_item(at, name, name_size, p, size, &found) - at
        if found & RMQ_HAS_SEPARATOR and (not self._is_stored or memchr(p, L.PROPERTY_END, size) != NULL):
            with gil:
                raise fault(i, (<bytes>why).decode())
        held[0] |= found
        return 0

    cdef int _add_map(self, Py_ssize_t i, int64_t start, int *held) except -1 nogil:
        """What row i's map holds besides its own items, which begin at `start`."""
        cdef Py_ssize_t k
        cdef int64_t size, name_size, own_end = self._size
        cdef const uint8_t *p
        cdef const uint8_t *name
        cdef uint8_t *at
        cdef int found
        cdef bint is_broken
        for k in range(self._maps[i], self._maps[i + 1]):
            name = text_at(self._names, k, &name_size)
            p = text_at(self._values, k, &size)
            if size < 0:
                continue
            if name_size <= 0:
                with gil:
                    raise fault(i, "properties hold an empty name")
            if _is_own(i, self._arena + start, own_end - start, name, name_size, p, size) or (
                    self._drops_crc and name_size == CRC_NAME_SIZE and not memcmp(name, CRC_NAME, name_size)):
                continue
            self._reserve(name_size + size + 2)
            at = self._arena + self._size
            found = rmq_copy_text(at, name, name_size)
            is_broken = found & RMQ_HAS_SEPARATOR
            self._size += rmq_put_item(at, <const char *>name, name_size, p, size, &found) - at
            held[0] |= found
            if found & RMQ_HAS_SEPARATOR and (
                    not self._is_stored or is_broken or memchr(p, L.PROPERTY_END, size) != NULL):
                with gil:
                    raise fault(i, "properties hold 0x01 or 0x02")
        return 0


cdef object _too_large(Py_ssize_t row, int64_t size):
    """fault for properties of so many bytes."""
    return fault(row, f"properties have {size} bytes, more than {L.PROPERTIES_SIZE_LIMIT}")


cdef bint _same_keys(const uint8_t *p, int64_t size, const uint8_t *other, int64_t other_size) noexcept nogil:
    """Whether two texts of KEYS hold the same keys in the same order."""
    cdef const uint8_t *end = p + size
    cdef const uint8_t *other_end = other + other_size
    cdef const uint8_t *key
    cdef const uint8_t *other_key
    while next_key(&p, end, &key, &size):
        if not next_key(&other, other_end, &other_key, &other_size) or size != other_size or \
                memcmp(key, other_key, size) != 0:
            return False
    return not next_key(&other, other_end, &other_key, &other_size)


cdef bint _is_own(Py_ssize_t i, const uint8_t *own, int64_t own_size, const uint8_t *name, int64_t name_size,
                 const uint8_t *value, int64_t size) except -1 nogil:
    """Whether a property of row i is among its own items, of keys, tags and uniq_key; IllegalMessageError when they
    contradict it.
    """
    cdef const uint8_t *end = own + own_size
    cdef const uint8_t *mark
    cdef const uint8_t *stop
    if name_size != 4 and name_size != 8:
        return False  # none of KEYS, TAGS, UNIQ_KEY
    while own < end:
        stop = rmq_item_end(own, end, &mark)
        if mark - own == name_size and memcmp(own, name, name_size) == 0:
            if (stop - mark - 1 != size or memcmp(mark + 1, value, size) != 0) and \
                    not (name[0] == c"K" and _same_keys(mark + 1, stop - mark - 1, value, size)):
                with gil:
                    raise fault(i, f"property {name[:name_size].decode()} contradicts the column of that name")
            return True
        own = stop + 1
    return False
