/* SPDX-License-Identifier: Apache-2.0
   One round of a walk over many chains of an index file, sixteen chains at a time: what _indexwalk does one by one. */
#ifndef RMQ_WALK16_H
#define RMQ_WALK16_H

#include <stdint.h>

#include "cpu.h"
#include "prefetch.h"

/* Entry 0 of a file, field by field; an entry has so many words of four bytes. */
typedef struct {
    const uint8_t *key_hash, *phy_offset, *seconds, *previous;
    int32_t words;
} rmq_walk_entries;

/* The lanes of a round, in lists of equal length. What stays goes to the front of them. */
typedef struct {
    int32_t *key, *position, *key_hash, *left;
} rmq_walk_lanes;

/* Differences of time: of a hit, both inclusive; below `going_on` a chain ends. The entry `any_time` is a hit at any. */
typedef struct {
    int32_t oldest, newest, going_on, any_time;
} rmq_walk_limits;

#if defined(__x86_64__) && defined(__SSE2__)
#include <immintrin.h>

/* Whether this CPU has it, and the words of so many entries fit the 32 bits of a gather. */
static inline int rmq_walks_by_16(rmq_walk_entries entries, int32_t index_num) {
    return rmq_cpu_level >= RMQ_CPU_VPCLMUL512 && index_num <= INT32_MAX / entries.words;
}

/* Asks memory for the entries of lanes up to `end`. */
static inline void rmq_walk_ask(rmq_walk_entries entries, const int32_t *position, int32_t *asked, int32_t end, int is_far) {
    for (; *asked < end; ++*asked) {
        const int64_t next = 4 * (int64_t)position[*asked] * entries.words;
        if (is_far) {
            rmq_prefetch_far(entries.key_hash + next);
            rmq_prefetch_far(entries.previous + next + 3);
        } else {
            rmq_prefetch(entries.key_hash + next);
            rmq_prefetch(entries.previous + next + 3);
        }
    }
}

/* Reads one entry of each lane, appends hits (pairs of key and phy offset) and asks memory for the entries before those;
   returns how many lanes go on. The lists have room for a multiple of 16. */
__attribute__((target("avx512f,avx512bw"))) static int32_t rmq_walk_by_16(
    rmq_walk_entries entries, rmq_walk_lanes lanes, int32_t active, rmq_walk_limits limits, int is_far, int64_t **hits) {
    const __m512i swapped = _mm512_broadcast_i32x4(_mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12));
    const __m512i zero = _mm512_setzero_si512(), oldest = _mm512_set1_epi32(limits.oldest);
    const __m512i newest = _mm512_set1_epi32(limits.newest), going_on = _mm512_set1_epi32(limits.going_on);
    int64_t *hit = *hits;
    int32_t kept = 0, asked = 0;
    for (int32_t first = 0; first < active; first += 16) {
        const __mmask16 used = active - first >= 16 ? 0xFFFF : (__mmask16)((1u << (active - first)) - 1);
        const __m512i position = _mm512_loadu_si512(lanes.position + first), key = _mm512_loadu_si512(lanes.key + first);
        const __m512i key_hash = _mm512_loadu_si512(lanes.key_hash + first);
        const __m512i at = _mm512_mullo_epi32(position, _mm512_set1_epi32(entries.words));
        __m512i left = _mm512_loadu_si512(lanes.left + first);
        __m512i found = _mm512_mask_i32gather_epi32(zero, used, at, entries.key_hash, 4);
        rmq_walk_ask(entries, lanes.position, &asked, asked + (kept - asked) / 3, is_far);
        __m512i seconds = _mm512_mask_i32gather_epi32(zero, used, at, entries.seconds, 4);
        rmq_walk_ask(entries, lanes.position, &asked, asked + (kept - asked) / 2, is_far);
        __m512i previous = _mm512_mask_i32gather_epi32(zero, used, at, entries.previous, 4);
        rmq_walk_ask(entries, lanes.position, &asked, kept, is_far);
        found = _mm512_shuffle_epi8(found, swapped);
        seconds = _mm512_shuffle_epi8(seconds, swapped);
        previous = _mm512_shuffle_epi8(previous, swapped);
        __mmask16 is_hit = _mm512_mask_cmpge_epi32_mask(used, seconds, oldest);
        is_hit = _mm512_mask_cmple_epi32_mask(is_hit, seconds, newest);
        is_hit |= _mm512_mask_cmpeq_epi32_mask(used, position, _mm512_set1_epi32(limits.any_time));
        is_hit = _mm512_mask_cmpeq_epi32_mask(is_hit, found, key_hash);
        left = _mm512_mask_sub_epi32(left, is_hit, left, _mm512_set1_epi32(1));
        __mmask16 goes_on = _mm512_mask_cmpgt_epi32_mask(used, previous, zero);
        goes_on = _mm512_mask_cmplt_epi32_mask(goes_on, previous, position);
        goes_on = _mm512_mask_cmpge_epi32_mask(goes_on, seconds, going_on);
        goes_on = _mm512_mask_cmpgt_epi32_mask(goes_on, left, zero);
        for (unsigned bits = is_hit; bits; bits &= bits - 1) {
            const int32_t lane = first + __builtin_ctz(bits);
            uint64_t offset;
            __builtin_memcpy(&offset, entries.phy_offset + 4 * (int64_t)lanes.position[lane] * entries.words, 8);
            hit[0] = lanes.key[lane];
            hit[1] = (int64_t)__builtin_bswap64(offset);
            hit += 2;
        }
        /* Whole vectors: what they overwrite behind the lanes that stay has been read. */
        const int32_t end = kept + __builtin_popcount(goes_on);
        _mm512_storeu_si512(lanes.key + kept, _mm512_maskz_compress_epi32(goes_on, key));
        _mm512_storeu_si512(lanes.key_hash + kept, _mm512_maskz_compress_epi32(goes_on, key_hash));
        _mm512_storeu_si512(lanes.left + kept, _mm512_maskz_compress_epi32(goes_on, left));
        _mm512_storeu_si512(lanes.position + kept, _mm512_maskz_compress_epi32(goes_on, previous));
        kept = end;
    }
    rmq_walk_ask(entries, lanes.position, &asked, kept, is_far);
    *hits = hit;
    return kept;
}
#else
static inline int rmq_walks_by_16(rmq_walk_entries entries, int32_t index_num) {
    (void)entries, (void)index_num;
    return 0;
}
static inline int32_t rmq_walk_by_16(rmq_walk_entries entries, rmq_walk_lanes lanes, int32_t active,
                                     rmq_walk_limits limits, int is_far, int64_t **hits) {
    (void)entries, (void)lanes, (void)active, (void)limits, (void)is_far, (void)hits;
    return 0;
}
#endif

#endif
