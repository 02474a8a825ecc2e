/* SPDX-License-Identifier: Apache-2.0
   Copies of what is read once, much later, into buffers larger than the cache: past it, so that memory need not be read
   before it is written. */
#ifndef RMQ_STREAMCOPY_H
#define RMQ_STREAMCOPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "append.h"

/* Copy n bytes. Other threads see them after rmq_stream_end. */
static inline void rmq_stream_copy(uint8_t *dest, const uint8_t *p, size_t n) {
#if defined(__SSE2__)
    const size_t front = (size_t)(-(uintptr_t)dest & (RMQ_LINE - 1)); /* up to a line of its own */
    if (n >= 4 * RMQ_LINE) {
        rmq_copy(dest, p, front);
        for (dest += front, p += front, n -= front; n >= RMQ_LINE; dest += RMQ_LINE, p += RMQ_LINE, n -= RMQ_LINE) {
            const __m128i a = _mm_loadu_si128((const __m128i *)p), b = _mm_loadu_si128((const __m128i *)(p + 16));
            const __m128i c = _mm_loadu_si128((const __m128i *)(p + 32));
            const __m128i d = _mm_loadu_si128((const __m128i *)(p + 48));
            _mm_stream_si128((__m128i *)dest, a);
            _mm_stream_si128((__m128i *)(dest + 16), b);
            _mm_stream_si128((__m128i *)(dest + 32), c);
            _mm_stream_si128((__m128i *)(dest + 48), d);
        }
    }
    rmq_copy(dest, p, n);
#else
    memcpy(dest, p, n);
#endif
}

static inline void rmq_stream_end(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#endif
