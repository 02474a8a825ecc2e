/* SPDX-License-Identifier: Apache-2.0 */
/* Hash of a queue's topic and id, for tables of our own: no file holds it. */
#ifndef RMQ_QUEUEHASH_H
#define RMQ_QUEUEHASH_H

#include <stdint.h>

/* A word at a time, all bytes in; the last word may overlap the one before it. */
static inline uint32_t rmq_queue_hash(const uint8_t *topic, int32_t size, int32_t queue_id) {
    const uint64_t k = 0x9E3779B97F4A7C15ull;
    uint64_t h = ((uint64_t)(uint32_t)queue_id << 32 | (uint32_t)size) * k, word = 0;
    int32_t i = 0;
    for (; i + 8 <= size; i += 8) {
        __builtin_memcpy(&word, topic + i, 8);
        h = (h ^ (h >> 29) ^ word) * k;
    }
    if (i < size && size >= 8) {
        __builtin_memcpy(&word, topic + size - 8, 8);
        h = (h ^ (h >> 29) ^ word) * k;
    } else if (i < size) {
        for (word = 0; i < size; i++) word = word << 8 | topic[i];
        h = (h ^ (h >> 29) ^ word) * k;
    }
    return (uint32_t)(h >> 32);
}

#endif
