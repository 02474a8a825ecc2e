/* SPDX-License-Identifier: Apache-2.0
   The items `name 0x01 value 0x02` of a property string one after the other, looked at 64 bytes at a time. */
#ifndef RMQ_ITEMS_H
#define RMQ_ITEMS_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef struct {
    const uint8_t *next;  /* where the next item begins */
    const uint8_t *block; /* the 64 bytes that the masks tell of */
    const uint8_t *end;
    uint64_t marks, ends; /* 0x01 and 0x02 among them that no item has taken yet */
} rmq_items;

/* Masks of the bytes of `items->block` up to the end. */
static inline void rmq_items_look(rmq_items *items) {
    const uint8_t *p = items->block;
    const int64_t left = items->end - p;
    const uint64_t own = left >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << left) - 1;
    uint8_t part[64];
    int is_readable = left >= 64;
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__)
    is_readable |= ((uintptr_t)p & 4095) <= 4096 - 64; /* what follows the string is of the same page */
#endif
    if (!is_readable) {
        memset(part, 0, sizeof part);
        memcpy(part, p, (size_t)left);
        p = part;
    }
    items->marks = items->ends = 0;
#if defined(__SSE2__)
    const __m128i one = _mm_set1_epi8(1), two = _mm_set1_epi8(2);
    for (int i = 0; i < 4; i++) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + 16 * i));
        items->marks |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, one)) << (16 * i);
        items->ends |= (uint64_t)(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, two)) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) {
        items->marks |= (uint64_t)(p[i] == 1) << i;
        items->ends |= (uint64_t)(p[i] == 2) << i;
    }
#endif
    items->marks &= own;
    items->ends &= own;
}

static inline void rmq_items_begin(rmq_items *items, const uint8_t *p, int64_t n) {
    items->next = items->block = p;
    items->end = p + n;
    if (n > 0) rmq_items_look(items);
}

/* The next item [name, stop), false when there is none: `stop` is the first 0x02 or the string's end, `mark` the first
   0x01 before it or NULL. */
static inline int rmq_items_next(rmq_items *items, const uint8_t **name, const uint8_t **mark, const uint8_t **stop) {
    if (items->next >= items->end) return 0;
    *name = items->next;
    *mark = NULL;
    while (!items->ends) {
        if (items->marks && !*mark) *mark = items->block + __builtin_ctzll(items->marks);
        if (items->end - items->block <= 64) {
            *stop = items->next = items->end;
            return 1;
        }
        items->block += 64;
        rmq_items_look(items);
    }
    const uint64_t bit = items->ends & -items->ends, before = items->marks & (bit - 1);
    if (before && !*mark) *mark = items->block + __builtin_ctzll(before);
    *stop = items->block + __builtin_ctzll(bit);
    items->next = *stop + 1;
    items->ends ^= bit;
    items->marks ^= before;
    return 1;
}

#endif
