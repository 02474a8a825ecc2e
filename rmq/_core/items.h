/* SPDX-License-Identifier: Apache-2.0
   Where the properties lie that a scan asks for, among the items `name 0x01 value 0x02` of a property string, which is
   looked at 64 bytes at a time. */
#ifndef RMQ_ITEMS_H
#define RMQ_ITEMS_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cpu.h"

/* Bytes from the record's start; size -1: there is none. */
typedef struct {
    int32_t position, size;
} rmq_place;

enum { RMQ_KEYS, RMQ_UNIQ_KEY, RMQ_TAGS, RMQ_DELAY, RMQ_PLACES };

#define RMQ_ITEMS_INLINE static inline __attribute__((always_inline))

/* Which of 64 bytes are 0x02. */
RMQ_ITEMS_INLINE uint64_t rmq_ends_in(const uint8_t *p) {
    uint64_t ends = 0;
#if defined(__SSE2__)
    const __m128i two = _mm_set1_epi8(2);
    for (int i = 0; i < 4; i++) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        ends |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, two)) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) ends |= (uint64_t)(p[i] == 2) << i;
#endif
    return ends;
}

#if defined(__SSE2__)
#define RMQ_ITEMS_AVX2 __attribute__((target("avx2,bmi")))
RMQ_ITEMS_AVX2 RMQ_ITEMS_INLINE uint64_t rmq_ends_in_avx2(const uint8_t *p) {
    const __m256i two = _mm256_set1_epi8(2);
    const __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 32));
    return (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, two)) |
           (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, two)) << 32;
}
#endif

/* Whether an item of n bytes has that name, and a value. No name holds 0x01, so the one behind it is the item's first. */
#define RMQ_IS_ITEM(item, n, name) ((n) > (int64_t)sizeof(name) && !memcmp(item, name "\1", sizeof(name)))

RMQ_ITEMS_INLINE void rmq_place_item(const uint8_t *record, const uint8_t *item, int64_t n, rmq_place *places) {
    int number, front; /* bytes of the name and the 0x01 behind it */
    if (RMQ_IS_ITEM(item, n, "KEYS")) number = RMQ_KEYS, front = 5;
    else if (RMQ_IS_ITEM(item, n, "UNIQ_KEY")) number = RMQ_UNIQ_KEY, front = 9;
    else if (RMQ_IS_ITEM(item, n, "TAGS")) number = RMQ_TAGS, front = 5;
    else if (RMQ_IS_ITEM(item, n, "DELAY")) number = RMQ_DELAY, front = 6;
    else return;
    places[number].position = (int32_t)(item + front - record);
    places[number].size = (int32_t)(n - front);
}

/* rmq_find_places with a way to find the ends. */
RMQ_ITEMS_INLINE void rmq_find_by(const uint8_t *record, int64_t position, int64_t n, rmq_place *places,
                                  uint64_t (*ends_in)(const uint8_t *)) {
    const rmq_place missing = {0, -1};
    const uint8_t *item = record + position, *end = item + n;
    uint8_t part[64];
    for (int i = 0; i < RMQ_PLACES; i++) places[i] = missing;
    for (const uint8_t *block = item; block < end; block += 64) {
        const int64_t left = end - block;
        const uint8_t *bytes = block;
        int is_readable = left >= 64;
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__)
        is_readable |= ((uintptr_t)block & 4095) <= 4096 - 64; /* what follows the string is of the same page */
#endif
        if (!is_readable) bytes = memcpy(memset(part, 0, sizeof part), block, (size_t)left);
        uint64_t ends = ends_in(bytes);
        if (left < 64) ends &= ((uint64_t)1 << left) - 1;
        for (; ends; ends &= ends - 1) {
            const uint8_t *stop = block + __builtin_ctzll(ends);
            rmq_place_item(record, item, stop - item, places);
            item = stop + 1;
        }
    }
    if (item < end) rmq_place_item(record, item, end - item, places);
}

#if defined(__SSE2__)
RMQ_ITEMS_AVX2 static void rmq_find_avx2(const uint8_t *record, int64_t position, int64_t n, rmq_place *places) {
    rmq_find_by(record, position, n, places, rmq_ends_in_avx2);
}
#endif

/* The places of those among the n bytes at record + position. Of a name that comes again the last value counts; an item
   without one is none. */
static inline void rmq_find_places(const uint8_t *record, int64_t position, int64_t n, rmq_place *places) {
#if defined(__SSE2__)
    if (rmq_cpu_level >= RMQ_CPU_AVX2) {
        rmq_find_avx2(record, position, n, places);
        return;
    }
#endif
    rmq_find_by(record, position, n, places, rmq_ends_in);
}

#endif
