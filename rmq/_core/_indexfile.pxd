# SPDX-License-Identifier: Apache-2.0
"""One index file: header | hash slots | entries."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._record cimport RecordRow


cdef struct OffsetList:
    int64_t *items
    int64_t count
    int64_t room


@cython.final
cdef class IndexFileView:
    """Borrows the bytes of one mapped index file; opens, flushes and closes nothing."""
    cdef:
        Py_buffer _buffer                   # held until release(): mmap.close() raises meanwhile
        uint8_t *_base                      # first byte of the file; NULL once released
        bint _writable
        bint _count_every_put               # RocketMQ <= 4.7.0: hash_slot_count grows with every put
        int32_t _limit                      # entries from this number on have no blocks yet
        readonly int32_t hash_slot_num
        readonly int32_t index_num          # entry numbers run 1 .. index_num - 1
    cdef uint8_t *_entry(self, int32_t number) noexcept nogil
    cdef uint8_t *_slot(self, int32_t key_hash) noexcept nogil
    cdef int32_t _count(self) noexcept nogil
    cdef bint _put(self, int32_t key_hash, int64_t phy_offset, int64_t store_timestamp) noexcept nogil
    cdef bint _select(self, int32_t key_hash, int64_t max_num, int64_t begin, int64_t end,
                      OffsetList *out) noexcept nogil
    cdef bint _collect(self, int32_t key_hash, OffsetList *out) noexcept nogil
    cdef bint _put_key(self, const RecordRow *record, int32_t seed, const uint8_t *piece, int64_t size,
                       int32_t *at, int32_t *done) noexcept nogil
    cdef void _prefetch_slots(self, const RecordRow *record) noexcept nogil
    cdef void _prefetch(self, const int32_t *key_hashes, Py_ssize_t count, bint slots_only) noexcept nogil
    cdef object _walk(self, const int32_t[::1] key_hashes, bint raw, int64_t max_num, int64_t begin, int64_t end,
                      const int32_t[::1] found)
    cdef int _check(self) except -1
