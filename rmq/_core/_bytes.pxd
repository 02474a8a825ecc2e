# SPDX-License-Identifier: Apache-2.0
"""Big-endian loads and stores at any alignment. Callers have checked the bounds."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "bigendian.h" nogil:
    void store_i32 "rmq_store_i32"(uint8_t *p, int32_t value) noexcept
    void store_i64 "rmq_store_i64"(uint8_t *p, int64_t value) noexcept
    void publish_i32 "rmq_publish_i32"(uint8_t *p, int32_t value) noexcept
    void publish_i64 "rmq_publish_i64"(uint8_t *p, int64_t value) noexcept
    int32_t read_published_i32 "rmq_read_published_i32"(const uint8_t *p) noexcept
    int64_t read_published_i64 "rmq_read_published_i64"(const uint8_t *p) noexcept


cdef inline uint16_t load_u16(const uint8_t *p) noexcept nogil:
    return <uint16_t>((p[0] << 8) | p[1])


cdef inline uint32_t load_u32(const uint8_t *p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | <uint32_t>p[3]


cdef inline int32_t load_i32(const uint8_t *p) noexcept nogil:
    return <int32_t>load_u32(p)


cdef inline int64_t load_i64(const uint8_t *p) noexcept nogil:
    return <int64_t>((<uint64_t>load_u32(p) << 32) | load_u32(p + 4))


cdef inline void store_u16(uint8_t *p, uint16_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 8)
    p[1] = <uint8_t>value
