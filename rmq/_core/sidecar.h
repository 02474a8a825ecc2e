/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the marks of a bucket are a given one: 28 numbers of 16 bits behind 8 other bytes, one line of memory. */
#ifndef RMQ_SIDECAR_H
#define RMQ_SIDECAR_H

#include <stdint.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Bit i: marks[i] equals mark. REQUIRES: 64 readable bytes, aligned to 64. */
static inline uint32_t rmq_marks_equal(const void *bucket, uint16_t mark) {
#if defined(__SSE2__)
    const __m128i *p = (const __m128i *)bucket;
    const __m128i wanted = _mm_set1_epi16((short)mark);
    const __m128i low = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_load_si128(p), wanted),
                                        _mm_cmpeq_epi16(_mm_load_si128(p + 1), wanted));
    const __m128i high = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_load_si128(p + 2), wanted),
                                         _mm_cmpeq_epi16(_mm_load_si128(p + 3), wanted));
    return ((uint32_t)_mm_movemask_epi8(low) | (uint32_t)_mm_movemask_epi8(high) << 16) >> 4;
#else
    const uint16_t *marks = (const uint16_t *)bucket + 4;
    uint32_t found = 0;
    for (int i = 0; i < 28; i++) found |= (uint32_t)(marks[i] == mark) << i;
    return found;
#endif
}

/* Number of the lowest bit that is set. REQUIRES: bits != 0. */
static inline int rmq_lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }

#endif
