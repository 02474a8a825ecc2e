# SPDX-License-Identifier: Apache-2.0
"""The sidecar of a sealed index file: its entries again, those of neighbouring slots side by side."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t

cimport rmq._core._layout as L
from rmq._core._indexwalk cimport IndexBytes, OffsetList, Question
from rmq._core._mapguard cimport MapGuard


cdef struct Block:                      # of SIDECAR_BLOCK_BUCKETS buckets, and of their items
    int32_t first                       # item
    int32_t buckets_crc
    int32_t items_crc


cdef struct Bucket:                     # of some neighbouring slots: their entries, the newest first
    int32_t first                       # item
    int32_t count
    uint16_t[L.SIDECAR_BUCKET_MARKS] marks  # of its first items: what tells their hashes apart, mostly


cdef struct Item:                       # an entry
    int64_t phy_offset
    int32_t key_hash
    int32_t time_diff


cdef struct SidecarBytes:               # a sidecar, borrowed
    uint8_t *header
    Block *blocks
    Bucket *buckets
    Item *items
    int32_t block_count
    int32_t bucket_count
    int32_t item_count
    int slot_bits                       # 2 ** slot_bits slots share a bucket
    IndexBytes slots                    # of the index file: slot_of only, its bytes are not here


cdef struct Chain:                  # of a key in flight
    const Bucket *bucket
    int32_t key_hash
    int32_t first                   # item of the bucket
    int32_t count
    uint16_t mark
    uint32_t hits                   # bit i: mark i of the bucket is the key's


cdef struct Window:                 # of times that a question is about, as differences
    int64_t begin                   # an older item ends the chain; none is below 0
    int64_t oldest                  # that counts
    int64_t newest


cdef enum Outcome:
    ANSWERED
    DAMAGED
    NO_MEMORY


@cython.final
@cython.no_gc_clear
cdef class SidecarView:
    """Borrows the bytes of one mapped sidecar, as long as it lives."""
    cdef:
        Py_buffer _buffer
        MapGuard _guard
        SidecarBytes _file
        uint8_t *_checked               # of each block: its CRCs were found right
        int64_t _base_ms                # times of items count from here
        Item _last                      # as it was: zeros now when the file was cut
        bint _is_damaged
    cdef bint _check_block(self, int32_t number) noexcept nogil
    cdef Outcome _scan(self, const Chain *chain, const Window *window, int64_t left, OffsetList *out) noexcept nogil
    cdef Window _window(self, const Question *question) noexcept nogil
    cdef Outcome answer(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                        OffsetList *out) noexcept nogil
    cdef Outcome _ask(self, const Question *question, const int32_t *key_hashes, Py_ssize_t keys, int32_t *counts,
                      OffsetList *out) noexcept nogil
