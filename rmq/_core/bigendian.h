/* SPDX-License-Identifier: Apache-2.0 */
/* Big-endian stores at any alignment, one instruction each: gcc leaves shifts and bytes in a loop as they are written. */
#ifndef RMQ_BIGENDIAN_H
#define RMQ_BIGENDIAN_H

#include <stdint.h>

static inline void rmq_store_i32(uint8_t *p, int32_t value) {
    uint32_t bits = (uint32_t)value;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap32(bits);
#endif
    __builtin_memcpy(p, &bits, 4);
}

static inline void rmq_store_i64(uint8_t *p, int64_t value) {
    uint64_t bits = (uint64_t)value;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    __builtin_memcpy(p, &bits, 8);
}

/* The same, seen whole by a reader in another process, and behind everything stored before. */
static inline void rmq_publish_i32(uint8_t *p, int32_t value) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    rmq_store_i32(p, value); /* records lie at any alignment: one unaligned store */
}

static inline void rmq_publish_i64(uint8_t *p, int64_t value) {
    uint64_t bits = (uint64_t)value;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    __atomic_store_n((uint64_t *)p, bits, __ATOMIC_RELEASE);
}

/* What rmq_publish_i32 or _i64 stored, whole, and before anything that is read later. */
static inline int32_t rmq_read_published_i32(const uint8_t *p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, 4);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap32(bits);
#endif
    return (int32_t)bits;
}

static inline int64_t rmq_read_published_i64(const uint8_t *p) {
    uint64_t bits = __atomic_load_n((const uint64_t *)p, __ATOMIC_ACQUIRE);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    bits = __builtin_bswap64(bits);
#endif
    return (int64_t)bits;
}

#endif
