# SPDX-License-Identifier: Apache-2.0
"""Answers of many keys, as the buffers of Arrow's list<int64>."""
cimport cython
from libc.stdint cimport int32_t

from rmq._core._indexwalk cimport OffsetList


@cython.final
cdef class AnswerLists:
    """For each part: `expect` the keys, write their counts behind offsets[done], append answers to `found`, `end`."""
    cdef:
        readonly Py_ssize_t done            # keys that are answered; -1: taken
        int32_t[::1] offsets                # of the answers of each key, as far as keys are answered
        OffsetList found
    cdef int expect(self, Py_ssize_t keys) except -1
    cdef int end(self, Py_ssize_t keys) except -1
