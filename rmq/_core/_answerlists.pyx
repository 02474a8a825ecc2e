# SPDX-License-Identifier: Apache-2.0
"""Answers of many keys, asked in parts one after the other, in memory that goes on to the caller."""
cimport cython
from cython cimport view as memory
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

import numpy as np

cdef extern from "populate.h" nogil:
    void rmq_ask_large(void *begin, int64_t size) noexcept

cdef enum:
    FIRST_ROOM = 4194304        # answers for which there is room at first, at most


cdef void *_memory(int64_t size) except NULL:
    """For so many bytes, which free() takes back."""
    cdef void *begin = malloc(<size_t>max(size, <int64_t>1))
    if begin == NULL:
        raise MemoryError()
    rmq_ask_large(begin, size)
    return begin


@cython.final
cdef class AnswerLists:
    def __cinit__(self, Py_ssize_t keys):
        cdef memory.array owner
        if not 0 <= keys < INT64_MAX // <int64_t>sizeof(int64_t):
            raise ValueError(f"keys must be a number of keys, got {keys}")
        owner = <int32_t[:keys + 1]><int32_t *>_memory((keys + 1) * sizeof(int32_t))
        owner.callback_free_data = free
        self.offsets = owner
        self.offsets[0] = 0
        self.found.room = min(keys, FIRST_ROOM)
        self.found.items = <int64_t *>_memory(self.found.room * sizeof(int64_t))

    def __dealloc__(self):
        free(self.found.items)

    cdef int expect(self, Py_ssize_t keys) except -1:
        """ValueError unless so many keys more may be answered."""
        if self.done < 0 or keys > self.offsets.shape[0] - 1 - self.done:
            raise ValueError("more keys than were to be answered")
        return 0

    cdef int end(self, Py_ssize_t keys) except -1:
        """So many keys more are answered, whose counts stand behind the offsets so far."""
        cdef int64_t offset = self.offsets[self.done]
        cdef Py_ssize_t i
        if self.found.count > INT32_MAX:
            raise ValueError("more than 2**31 answers in one call: ask for fewer keys")
        for i in range(self.done + 1, self.done + keys + 1):
            offset += self.offsets[i]
            self.offsets[i] = <int32_t>offset
        self.done += keys
        return 0

    def take(self):
        """(offsets int32[keys + 1], phy offsets int64), once all keys are answered; no more is asked or taken then."""
        cdef int64_t *items
        cdef memory.array values
        if self.done + 1 != self.offsets.shape[0]:
            raise RuntimeError(f"{self.done} of {self.offsets.shape[0] - 1} keys are answered, or all were taken")
        self.done = -1
        if self.found.count == 0:
            return np.asarray(self.offsets), np.empty(0, np.int64)
        items = <int64_t *>realloc(self.found.items, <size_t>self.found.count * sizeof(int64_t))
        if items != NULL:
            self.found.items, self.found.room = items, self.found.count
        values = <int64_t[:self.found.count]>self.found.items
        values.callback_free_data = free
        memset(&self.found, 0, sizeof(self.found))
        return np.asarray(self.offsets), np.asarray(values)
