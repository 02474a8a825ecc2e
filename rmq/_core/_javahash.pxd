# SPDX-License-Identifier: Apache-2.0
"""Java String.hashCode and what RocketMQ's index makes of it."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t

cdef extern from "javahash.h" nogil:
    int32_t rmq_hash_utf8(const uint8_t *p, int64_t size, int32_t hash) noexcept
    uint32_t rmq_hash_latin1(const uint8_t *p, int64_t size, uint32_t hash) noexcept
    uint32_t rmq_hash_units(const uint16_t *p, int64_t count, uint32_t hash) noexcept
    uint32_t rmq_hash_code_points(const uint32_t *p, int64_t count, uint32_t hash) noexcept

cdef extern from "utf8.h" nogil:
    int64_t rmq_utf16_units(const uint8_t *p, int64_t size, int *malformed) noexcept
    bint rmq_utf8_reads_as(const uint8_t *p, int64_t size, const uint8_t *text, int64_t text_size) noexcept
    int64_t rmq_utf8_repair(const uint8_t *p, int64_t size, uint8_t *out) noexcept


cdef inline int32_t key_hash_of(int32_t java_hash) noexcept nogil:
    """RocketMQ: IndexFile#indexKeyHashMethod. |hash|, and 0 for -2^31, whose absolute value is no int.

    Without a branch: the sign of a hash is a coin.
    """
    cdef uint32_t sign = <uint32_t>(java_hash >> 31)
    return <int32_t>(((<uint32_t>java_hash ^ sign) - sign) & <uint32_t>0x7FFFFFFF)


cdef inline int32_t seed_of_topic(const uint8_t *topic, int64_t size) noexcept nogil:
    """Hash of `topic#`, on which those of its index keys go on."""
    return <int32_t>(31 * <uint32_t>rmq_hash_utf8(topic, size, 0) + 35)       # '#'


cdef inline int32_t seed_of_tags(int32_t seed) noexcept nogil:
    """Hash of `topic#T#`, on which that of the tags' index key goes on. seed: of the topic."""
    return <int32_t>(31 * (31 * <uint32_t>seed + 84) + 35)      # 'T', '#'


cdef int32_t hash_of_str(object text, int32_t seed) except? -1
cdef object decode_utf8(const uint8_t *p, int64_t size)
