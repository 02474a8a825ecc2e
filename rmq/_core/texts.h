/* SPDX-License-Identifier: Apache-2.0
   The property string of a row whose values are texts of columns: made where the record is, of texts that hold nothing
   that a property string gives a meaning. */
#ifndef RMQ_TEXTS_H
#define RMQ_TEXTS_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "append.h"

enum { RMQ_TEXTS_LIMIT = 3, RMQ_TEXT_HEAD = 16 };

/* Values data[starts[i] .. starts[i + 1]) of one name. */
typedef struct {
    char head[RMQ_TEXT_HEAD]; /* name and 0x01 */
    int64_t head_size;
    const int64_t *starts;
    const uint8_t *data;
    int64_t longest; /* no value has more bytes */
} rmq_text_item;

typedef struct {
    rmq_text_item items[RMQ_TEXTS_LIMIT];
    int64_t frame_size; /* of a row's names, 0x01 and 0x02 */
    int count;
} rmq_texts;

/* REQUIRES: room for an item, a name shorter than RMQ_TEXT_HEAD. */
static inline void rmq_texts_add(rmq_texts *texts, const char *name, const int64_t *starts, const uint8_t *data,
                                 int64_t longest) {
    rmq_text_item *item = &texts->items[texts->count++];
    const size_t size = strlen(name);
    memcpy(item->head, name, size);
    item->head[size] = 1;
    item->head_size = (int64_t)size + 1;
    item->starts = starts;
    item->data = data;
    item->longest = longest;
    texts->frame_size += item->head_size + 1;
}

/* Bytes of row i's property string. */
static inline int64_t rmq_texts_size(const rmq_texts *texts, int64_t i) {
    int64_t size = texts->frame_size;
    for (int k = 0; k < texts->count; k++) size += texts->items[k].starts[i + 1] - texts->items[k].starts[i];
    return size;
}

/* No row's has more. */
static inline int64_t rmq_texts_longest(const rmq_texts *texts) {
    int64_t size = texts->frame_size;
    for (int k = 0; k < texts->count; k++) size += texts->items[k].longest;
    return size;
}

/* Bytes of the property strings of `count` rows. */
static inline int64_t rmq_texts_total(const rmq_texts *texts, int64_t count) {
    int64_t size = count * texts->frame_size;
    for (int k = 0; k < texts->count; k++) size += texts->items[k].starts[count] - texts->items[k].starts[0];
    return size;
}

/* Write row i's property string of that many bytes, and nothing behind it. */
static inline void rmq_texts_copy(uint8_t *dest, const rmq_texts *texts, int64_t i, int64_t size) {
    const uint8_t *end = dest + size;
    for (int k = 0; k < texts->count; k++) {
        const rmq_text_item *item = &texts->items[k];
        const int64_t n = item->starts[i + 1] - item->starts[i];
        /* What a whole head writes too much, the value and what follows write again. */
        if (end - dest >= RMQ_TEXT_HEAD) memcpy(dest, item->head, RMQ_TEXT_HEAD);
        else memcpy(dest, item->head, (size_t)item->head_size);
        dest += item->head_size;
        rmq_copy(dest, item->data + item->starts[i], (size_t)n);
        dest[n] = 2;
        dest += n + 1;
    }
}

/* Whether n bytes are ASCII above 0x02, and above 0x20 if no space may be among them. */
static inline int rmq_is_plain(const uint8_t *p, int64_t n, int with_space) {
    const int8_t most = with_space ? 0x02 : 0x20;
    int64_t i = 0;
#if defined(__SSE2__)
    const uintptr_t ahead = (uintptr_t)rmq_asks->text_ahead;
    const __m128i refused = _mm_set1_epi8(most);
    __m128i plain = _mm_set1_epi8(-1);
    for (; i + 64 <= n; i += 64) {
        const __m128i *at = (const __m128i *)(p + i);
        if (ahead) rmq_prefetch((const void *)((uintptr_t)at + ahead));
        const __m128i low = _mm_and_si128(_mm_cmpgt_epi8(_mm_loadu_si128(at), refused),
                                         _mm_cmpgt_epi8(_mm_loadu_si128(at + 1), refused));
        const __m128i high = _mm_and_si128(_mm_cmpgt_epi8(_mm_loadu_si128(at + 2), refused),
                                          _mm_cmpgt_epi8(_mm_loadu_si128(at + 3), refused));
        plain = _mm_and_si128(plain, _mm_and_si128(low, high));
    }
    if (_mm_movemask_epi8(plain) != 0xFFFF) return 0;
#endif
    for (; i < n; i++)
        if ((int8_t)p[i] <= most) return 0;
    return 1;
}

#endif
