# SPDX-License-Identifier: Apache-2.0
"""One index file: header | hash slots | entries."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._indexwalk cimport IndexBytes, OffsetList, Question
from rmq._core._sidecar cimport SidecarView


@cython.final
@cython.no_gc_clear
cdef class IndexFileView:
    """Borrows the bytes of one mapped index file; opens, flushes and closes nothing."""
    cdef:
        Py_buffer _buffer                   # held until release(): mmap.close() raises meanwhile
        uint8_t *_base                      # first byte of the file; NULL once released and out of use
        IndexBytes _file
        int _users                          # calls at work without the GIL
        bint _is_released
        bint _writable
        int64_t _present                    # bytes of entries that are in memory for sure, or were
        bint _has_slots                     # all slots are, or were
        public SidecarView sidecar          # answers selects of a full file in its place; None: there is none
        readonly int32_t hash_slot_num
        readonly int32_t index_num          # entry numbers run 1 .. index_num - 1
    cdef uint8_t *_entry(self, int32_t number) noexcept nogil
    cdef int32_t _count(self) noexcept nogil
    cdef int _answer(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                     OffsetList *out) except -1
    cdef int _answer_one(self, const Question *question, int32_t key_hash, int64_t *few) noexcept nogil
    cdef object _walk(self, const int32_t[::1] key_hashes, Question *question, const int32_t[::1] found)
    cdef int _check(self) except -1
    cdef int _check_put(self) except -1
    cdef void _expect(self, int64_t keys) noexcept nogil
    cdef void _leave(self)
