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

/* Bytes from the record's start; size -1: there is none. */
typedef struct {
    int32_t position, size;
} rmq_place;

enum { RMQ_KEYS, RMQ_UNIQ_KEY, RMQ_TAGS, RMQ_DELAY, RMQ_PLACES };

/* Which of the 64 bytes at p, those before `end`, are 0x02. REQUIRES: p < end. */
static inline uint64_t rmq_ends_of(const uint8_t *p, const uint8_t *end) {
    const int64_t left = end - p;
    const uint64_t own = left >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << left) - 1;
    uint8_t part[64];
    uint64_t ends = 0;
    int is_readable = left >= 64;
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__)
    is_readable |= ((uintptr_t)p & 4095) <= 4096 - 64; /* what follows the string is of the same page */
#endif
    if (!is_readable) {
        memset(part, 0, sizeof part);
        memcpy(part, p, (size_t)left);
        p = part;
    }
#if defined(__SSE2__)
    const __m128i two = _mm_set1_epi8(2);
    for (int i = 0; i < 4; i++) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        ends |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, two)) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) ends |= (uint64_t)(p[i] == 2) << i;
#endif
    return ends & own;
}

/* Whether an item of n bytes has that name, and a value. No name holds 0x01, so the one behind it is the item's first. */
#define RMQ_IS_ITEM(item, n, name) ((n) > (int64_t)sizeof(name) && !memcmp(item, name "\1", sizeof(name)))

static inline void rmq_place_item(const uint8_t *record, const uint8_t *item, int64_t n, rmq_place *places) {
    int number, front; /* bytes of the name and the 0x01 behind it */
    if (RMQ_IS_ITEM(item, n, "KEYS")) number = RMQ_KEYS, front = 5;
    else if (RMQ_IS_ITEM(item, n, "UNIQ_KEY")) number = RMQ_UNIQ_KEY, front = 9;
    else if (RMQ_IS_ITEM(item, n, "TAGS")) number = RMQ_TAGS, front = 5;
    else if (RMQ_IS_ITEM(item, n, "DELAY")) number = RMQ_DELAY, front = 6;
    else return;
    places[number].position = (int32_t)(item + front - record);
    places[number].size = (int32_t)(n - front);
}

/* The places of those among the n bytes at record + position. Of a name that comes again the last value counts; an item
   without one is none. */
static inline void rmq_find_places(const uint8_t *record, int64_t position, int64_t n, rmq_place *places) {
    const rmq_place missing = {0, -1};
    const uint8_t *item = record + position, *end = item + n;
    for (int i = 0; i < RMQ_PLACES; i++) places[i] = missing;
    for (const uint8_t *block = item; block < end; block += 64)
        for (uint64_t ends = rmq_ends_of(block, end); ends; ends &= ends - 1) {
            const uint8_t *stop = block + __builtin_ctzll(ends);
            rmq_place_item(record, item, stop - item, places);
            item = stop + 1;
        }
    if (item < end) rmq_place_item(record, item, end - item, places);
}

#endif
