/* SPDX-License-Identifier: Apache-2.0
   Where an item `name 0x01 value 0x02` of a property string ends, whether the last one is a record's CRC, and a copy
   that tells what the bytes hold. */
#ifndef RMQ_PROPERTY_H
#define RMQ_PROPERTY_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { RMQ_HAS_SEPARATOR = 1, RMQ_HAS_SPACE = 2, RMQ_HAS_HIGH = 4 };

#if defined(__SSE2__)
/* Sixteen bytes of which only n > 0 are the caller's: the others are of the same page, or zero. */
static inline __m128i rmq_load_part(const uint8_t *p, int64_t n) {
#if !defined(__SANITIZE_ADDRESS__)
    if (((uintptr_t)p & 4095) <= 4096 - 16) return _mm_loadu_si128((const __m128i *)p);
#endif
    uint8_t part[16] = {0};
    memcpy(part, p, n < 16 ? (size_t)n : 16);
    return _mm_loadu_si128((const __m128i *)part);
}
#endif

/* The first 0x02 in [p, end), else end. *mark: the first 0x01 before it, else NULL. */
static inline const uint8_t *rmq_item_end(const uint8_t *p, const uint8_t *end, const uint8_t **mark) {
    *mark = NULL;
#if defined(__SSE2__)
    const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2);
    for (; p < end; p += 16) {
        const __m128i bytes = end - p >= 16 ? _mm_loadu_si128((const __m128i *)p) : rmq_load_part(p, end - p);
        const unsigned own = end - p >= 16 ? 0xFFFFu : (1u << (end - p)) - 1;
        const unsigned ends = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, two)) & own;
        unsigned marks = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, one)) & own;
        if (ends) marks &= (ends & -ends) - 1;
        if (marks && !*mark) *mark = p + __builtin_ctz(marks);
        if (ends) return p + __builtin_ctz(ends);
    }
    return end;
#else
    for (; p < end && *p != 2; p++)
        if (*p == 1 && !*mark) *mark = p;
    return p;
#endif
}

/* Whether the n bytes of properties end with what the CRC of a whole record begins with: `__CRC32#` 0x01, eleven bytes
   from the end. What follows, ten digits and 0x02, may be damaged.
   A name that only ends so is another item's. Behind a value without its 0x02, as in RocketMQ's batches, it is the CRC,
   and behind a NUL, which stands where bytes were lost. */
#define RMQ_CRC_NAME "__CRC32#"
enum { RMQ_CRC_NAME_SIZE = 8 };
static inline int rmq_ends_with_crc(const uint8_t *p, int64_t n) {
    static const uint8_t name[RMQ_CRC_NAME_SIZE + 1] = RMQ_CRC_NAME "\1";
    if (n < (int64_t)sizeof name + 11) return 0;
    const uint8_t *const tail = p + n - (sizeof name + 11), *at = tail;
    if (memcmp(tail, name, sizeof name) != 0) return 0;
    while (at > p && at[-1] > 2) at--;
    return at == tail || (at > p && at[-1] != 2);
}

/* rmq_ends_with_crc, and its digits are digits: what a put leaves out, to put its own. */
static inline int rmq_ends_with_whole_crc(const uint8_t *p, int64_t n) {
    if (!rmq_ends_with_crc(p, n) || p[n - 1] != 2) return 0;
    for (int64_t i = n - 11; i < n - 1; i++)
        if (p[i] < '0' || p[i] > '9') return 0;
    return 1;
}

/* Copy n bytes; returns RMQ_HAS_* of what they hold. REQUIRES: 15 bytes of room behind dest + n. */
static inline int rmq_copy_text(uint8_t *dest, const uint8_t *p, int64_t n) {
    int found = 0;
#if defined(__SSE2__)
    const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2), space = _mm_set1_epi8(0x20);
    __m128i parts = _mm_setzero_si128(), spaces = parts, high = parts;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + i));
        _mm_storeu_si128((__m128i *)(dest + i), bytes);
        parts = _mm_or_si128(parts, _mm_or_si128(_mm_cmpeq_epi8(bytes, one), _mm_cmpeq_epi8(bytes, two)));
        spaces = _mm_or_si128(spaces, _mm_cmpeq_epi8(bytes, space));
        high = _mm_or_si128(high, bytes);
    }
    found |= _mm_movemask_epi8(parts) ? RMQ_HAS_SEPARATOR : 0;
    found |= _mm_movemask_epi8(spaces) ? RMQ_HAS_SPACE : 0;
    found |= _mm_movemask_epi8(high) ? RMQ_HAS_HIGH : 0;
    if (i < n) {
        const __m128i bytes = rmq_load_part(p + i, n - i);
        const int own = (1 << (n - i)) - 1;
        _mm_storeu_si128((__m128i *)(dest + i), bytes);
        parts = _mm_or_si128(_mm_cmpeq_epi8(bytes, one), _mm_cmpeq_epi8(bytes, two));
        found |= _mm_movemask_epi8(parts) & own ? RMQ_HAS_SEPARATOR : 0;
        found |= _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, space)) & own ? RMQ_HAS_SPACE : 0;
        found |= _mm_movemask_epi8(bytes) & own ? RMQ_HAS_HIGH : 0;
    }
#else
    for (int64_t i = 0; i < n; i++) {
        dest[i] = p[i];
        found |= (p[i] == 1 || p[i] == 2 ? RMQ_HAS_SEPARATOR : 0) | (p[i] == 0x20 ? RMQ_HAS_SPACE : 0) |
                 (p[i] >= 0x80 ? RMQ_HAS_HIGH : 0);
    }
#endif
    return found;
}

/* Put the item `name 0x01 value 0x02`; returns the place behind it. *found |= RMQ_HAS_* of the value.
   REQUIRES: 15 bytes of room behind it. */
static inline uint8_t *rmq_put_item(uint8_t *dest, const char *name, int64_t name_size, const uint8_t *value,
                                    int64_t size, int *found) {
    memcpy(dest, name, (size_t)name_size);
    dest += name_size;
    *dest++ = 1;
    *found |= rmq_copy_text(dest, value, size);
    dest[size] = 2;
    return dest + size + 1;
}

#endif
