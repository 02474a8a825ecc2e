/* SPDX-License-Identifier: Apache-2.0
   Short copies that end exactly where they should, and texts asked for before they are read. */
#ifndef RMQ_APPEND_H
#define RMQ_APPEND_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "asking.h"
#include "prefetch.h"

enum { RMQ_LINE = 64 };

/* The lines of n bytes that will be read soon; of long ones the first. */
static inline void rmq_prefetch_text(const uint8_t *p, int64_t n) {
    const int64_t end = n < rmq_asks->text_most ? n : rmq_asks->text_most;
    for (int64_t i = 0; i < end; i += RMQ_LINE) rmq_prefetch(p + i);
}

/* The lines of n bytes that will be written soon. */
static inline void rmq_prefetch_room(const uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i += RMQ_LINE) rmq_prefetch_to_write(p + i);
}

/* memcpy without the call for what is at most 64 bytes: parts that overlap, all loaded before the first is stored. */
static inline void rmq_copy(uint8_t *dest, const uint8_t *p, size_t n) {
#if defined(__SSE2__)
    if (n > 64) {
        memcpy(dest, p, n);
    } else if (n > 32) {
        const __m128i a = _mm_loadu_si128((const __m128i *)p), b = _mm_loadu_si128((const __m128i *)(p + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(p + n - 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(p + n - 16));
        _mm_storeu_si128((__m128i *)dest, a);
        _mm_storeu_si128((__m128i *)(dest + 16), b);
        _mm_storeu_si128((__m128i *)(dest + n - 32), c);
        _mm_storeu_si128((__m128i *)(dest + n - 16), d);
    } else if (n >= 16) {
        const __m128i a = _mm_loadu_si128((const __m128i *)p), b = _mm_loadu_si128((const __m128i *)(p + n - 16));
        _mm_storeu_si128((__m128i *)dest, a);
        _mm_storeu_si128((__m128i *)(dest + n - 16), b);
    } else if (n >= 8) {
        uint64_t a, b;
        memcpy(&a, p, 8);
        memcpy(&b, p + n - 8, 8);
        memcpy(dest, &a, 8);
        memcpy(dest + n - 8, &b, 8);
    } else if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, p, 4);
        memcpy(&b, p + n - 4, 4);
        memcpy(dest, &a, 4);
        memcpy(dest + n - 4, &b, 4);
    } else if (n) {
        const uint8_t a = p[0], b = p[n / 2], c = p[n - 1];
        dest[0] = a;
        dest[n / 2] = b;
        dest[n - 1] = c;
    }
#else
    memcpy(dest, p, n);
#endif
}

#endif
