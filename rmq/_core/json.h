/* SPDX-License-Identifier: Apache-2.0
   Text between the quotes of JSON: `"`, `\` and what lies below 0x20 is escaped, all else stands as it is (RFC 8259, 7). */
#ifndef RMQ_JSON_H
#define RMQ_JSON_H

#include "property.h"

enum { RMQ_JSON_ROOM = 16 }; /* bytes behind the end of the text that a copy may write to */

static inline int rmq_json_is_plain(uint8_t b) { return b >= 0x20 && b != '"' && b != '\\'; }

/* How many bytes more than n the escaped text has at most. */
static inline int64_t rmq_json_growth(const uint8_t *p, int64_t n) {
    int64_t growth = 0, i = 0;
#if defined(__SSE2__)
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), last = _mm_set1_epi8(0x1F);
    for (; i + 16 <= n; i += 16) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + i));
        const __m128i pairs = _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, backslash));
        const __m128i controls = _mm_cmpeq_epi8(_mm_min_epu8(bytes, last), bytes);
        growth += __builtin_popcount((unsigned)_mm_movemask_epi8(pairs)) +
                  5 * __builtin_popcount((unsigned)_mm_movemask_epi8(controls));
    }
#endif
    for (; i < n; i++) growth += rmq_json_is_plain(p[i]) ? 0 : p[i] < 0x20 ? 5 : 1;
    return growth;
}

/* One byte that is not plain, escaped; returns where the text goes on. */
static inline uint8_t *rmq_json_escape(uint8_t *dest, uint8_t b) {
    static const char short_forms[] = "\bb\tt\nn\ff\rr\"\"\\\\";
    *dest++ = '\\';
    for (int i = 0; short_forms[i]; i += 2) {
        if ((uint8_t)short_forms[i] == b) {
            *dest++ = (uint8_t)short_forms[i + 1];
            return dest;
        }
    }
    *dest++ = 'u', *dest++ = '0', *dest++ = '0';
    *dest++ = (uint8_t)('0' + (b >> 4));
    *dest++ = (uint8_t)"0123456789abcdef"[b & 15];
    return dest;
}

/* Copy n bytes, escaped; returns the end. REQUIRES: RMQ_JSON_ROOM bytes of room behind n + rmq_json_growth(p, n). */
static inline uint8_t *rmq_json_copy(uint8_t *dest, const uint8_t *p, int64_t n) {
#if defined(__SSE2__)
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), last = _mm_set1_epi8(0x1F);
    while (n > 0) {
        const __m128i bytes = n >= 16 ? _mm_loadu_si128((const __m128i *)p) : rmq_load_part(p, n);
        const __m128i pairs = _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, backslash));
        const __m128i controls = _mm_cmpeq_epi8(_mm_min_epu8(bytes, last), bytes);
        const unsigned own = n >= 16 ? 0xFFFFu : (1u << n) - 1;
        const unsigned odd = (unsigned)_mm_movemask_epi8(_mm_or_si128(pairs, controls)) & own;
        const int64_t plain = odd ? __builtin_ctz(odd) : n < 16 ? n : 16;
        _mm_storeu_si128((__m128i *)dest, bytes);
        dest += plain, p += plain, n -= plain;
        if (plain < 16 && n > 0) {
            dest = rmq_json_escape(dest, *p);
            p++, n--;
        }
    }
#else
    for (; n > 0; p++, n--) {
        if (rmq_json_is_plain(*p)) *dest++ = *p;
        else dest = rmq_json_escape(dest, *p);
    }
#endif
    return dest;
}

/* Copy n bytes as they are; returns the end. REQUIRES: RMQ_JSON_ROOM bytes of room behind n. */
static inline uint8_t *rmq_json_copy_plain(uint8_t *dest, const uint8_t *p, int64_t n) {
#if defined(__SSE2__)
    if (n <= 16) {
        if (n) _mm_storeu_si128((__m128i *)dest, n == 16 ? _mm_loadu_si128((const __m128i *)p) : rmq_load_part(p, n));
        return dest + n;
    }
#endif
    memcpy(dest, p, (size_t)n);
    return dest + n;
}

#endif
