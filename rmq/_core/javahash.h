/* SPDX-License-Identifier: Apache-2.0
   Java String.hashCode of UTF-16 units u[0..n): the sum of u[i] * 31^(n-1-i), modulo 2^32; a hash goes on where
   another one ended. Units of one byte are taken 16 at a time: pairs by 31, fours by 31^2, and the four sums of fours,
   which stand 31^4 apart, are kept in lanes until the end. Nothing is read outside of p[0..size). */
#ifndef RMQ_JAVAHASH_H
#define RMQ_JAVAHASH_H

#include <stdint.h>
#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

#include "cpu.h"
#include "utf8.h"

#if defined(__SSE4_1__)
/* 31^0 .. 31^16 */
static const uint32_t rmq_powers[17] = {
    1u, 31u, 961u, 29791u, 923521u, 28629151u, 887503681u,
    1742810335u, 2487512833u, 4098453791u, 2498015937u, 129082719u, 4001564289u, 3789408671u,
    1507551809u, 3784433119u, 1353309697u};

static inline __m128i rmq_fours(__m128i units) {
    const __m128i pairs = _mm_maddubs_epi16(units, _mm_set1_epi16(0x011F)); /* 31, 1 */
    return _mm_madd_epi16(pairs, _mm_set1_epi32(0x000103C1));              /* 961, 1 */
}

static inline uint32_t rmq_sum_of_fours(__m128i fours) {
    const __m128i apart = _mm_setr_epi32((int)rmq_powers[12], (int)rmq_powers[8], (int)rmq_powers[4], 1);
    __m128i sum = _mm_mullo_epi32(fours, apart);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(sum);
}
#endif

/* Hash continued over units of one byte each; *bits is the OR of the bytes, at least in bit 7. */
static inline uint32_t rmq_hash_bytes(const uint8_t *p, int64_t size, uint32_t h, uint32_t *bits) {
    const uint8_t *end = p + size;
    uint32_t seen = 0;
#if defined(__SSE4_1__)
    if (size >= 16 && rmq_cpu_level != RMQ_CPU_PLAIN) {
        static const uint8_t last[32] = {0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,
                                         0,    0,    0,    0,    0,    0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                         0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
        __m128i all = _mm_setzero_si128(), sums = _mm_setr_epi32(0, 0, 0, (int)h), units;
        for (; end - p >= 16; p += 16) {
            units = _mm_loadu_si128((const __m128i *)p);
            all = _mm_or_si128(all, units);
            sums = _mm_add_epi32(_mm_mullo_epi32(sums, _mm_set1_epi32((int)rmq_powers[16])), rmq_fours(units));
        }
        const int64_t left = end - p;
        if (left) { /* the last 16 bytes, less those that were taken: zeros in front add nothing */
            units = _mm_loadu_si128((const __m128i *)(end - 16));
            all = _mm_or_si128(all, units);
            units = _mm_and_si128(units, _mm_loadu_si128((const __m128i *)(last + left)));
            sums = _mm_add_epi32(_mm_mullo_epi32(sums, _mm_set1_epi32((int)rmq_powers[left])), rmq_fours(units));
        }
        *bits = _mm_movemask_epi8(all) ? 0x80 : 0;
        return rmq_sum_of_fours(sums);
    }
    if (size >= 8 && rmq_cpu_level != RMQ_CPU_PLAIN) {
        uint64_t front, back;
        __builtin_memcpy(&front, p, 8);
        __builtin_memcpy(&back, end - 8, 8);
        const __m128i units = _mm_set_epi64x((long long)back, (long long)(size > 8 ? front << (8 * (16 - size)) : 0));
        *bits = _mm_movemask_epi8(units) ? 0x80 : 0;
        return h * rmq_powers[size] + rmq_sum_of_fours(rmq_fours(units));
    }
#endif
    while (p < end) {
        seen |= *p;
        h = 31u * h + *p++;
    }
    *bits = seen;
    return h;
}

/* Hash continued over units of one byte each. */
static inline uint32_t rmq_hash_latin1(const uint8_t *p, int64_t size, uint32_t h) {
    uint32_t bits;
    return rmq_hash_bytes(p, size, h, &bits);
}

/* Hash continued over so many units. */
static inline uint32_t rmq_hash_units(const uint16_t *p, int64_t count, uint32_t h) {
    for (; count >= 4; count -= 4, p += 4) h = 923521u * h + (29791u * p[0] + 961u * p[1] + 31u * p[2] + p[3]);
    while (count-- > 0) h = 31u * h + *p++;
    return h;
}

/* Hash continued over one code point: one unit or two. */
static inline uint32_t rmq_hash_code_point(uint32_t c, uint32_t h) {
    if (c < 0x10000) return 31u * h + c;
    c -= 0x10000;
    return 961u * h + 31u * (0xD800u + (c >> 10)) + (0xDC00u + (c & 0x3FF));
}

static inline uint32_t rmq_hash_code_points(const uint32_t *p, int64_t count, uint32_t h) {
    while (count-- > 0) h = rmq_hash_code_point(*p++, h);
    return h;
}

/* Hash of the decoded bytes, continued from `hash`. */
static inline int32_t rmq_hash_utf8(const uint8_t *p, int64_t size, int32_t hash) {
    const uint8_t *end = p + size;
    uint32_t h = (uint32_t)hash, c = 0, bits;
    int malformed = 0;
    const uint32_t of_ascii = rmq_hash_bytes(p, size, h, &bits);
    if (!(bits & 0x80)) return (int32_t)of_ascii;
    while (p < end) {
        p += rmq_utf8_next(p, end, &c, &malformed);
        h = rmq_hash_code_point(c, h);
    }
    return (int32_t)h;
}

#endif
