# SPDX-License-Identifier: Apache-2.0
"""Java String.hashCode and what RocketMQ's index makes of it."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

cdef extern from "utf8.h" nogil:
    int32_t rmq_hash_utf8(const uint8_t *p, int64_t size, int32_t hash) noexcept
    uint32_t rmq_hash_latin1(const uint8_t *p, int64_t size, uint32_t hash) noexcept
    int64_t rmq_utf16_units(const uint8_t *p, int64_t size, int *malformed) noexcept
    int64_t rmq_utf8_repair(const uint8_t *p, int64_t size, uint8_t *out) noexcept


cdef inline int32_t key_hash_of(int32_t java_hash) noexcept nogil:
    """RocketMQ: IndexFile#indexKeyHashMethod. |hash|, and 0 for -2^31, whose absolute value is no int."""
    if java_hash >= 0:
        return java_hash
    return 0 if java_hash == (-2147483647 - 1) else -java_hash


cdef int32_t hash_of_str(object text, int32_t seed) except? -1
cdef object decode_utf8(const uint8_t *p, int64_t size)
