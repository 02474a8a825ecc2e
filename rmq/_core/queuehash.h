/* SPDX-License-Identifier: Apache-2.0 */
/* Hash of a queue's topic and id, for tables of our own: no file holds it, and no two processes have the same, so that
   nobody makes topics that collide. */
#ifndef RMQ_QUEUEHASH_H
#define RMQ_QUEUEHASH_H

#include <stdint.h>
#include <sys/random.h>

static uint64_t rmq_queue_key = 0x9E3779B97F4A7C15ull; /* odd */

__attribute__((constructor)) static void rmq_choose_queue_key(void) {
    uint64_t key;
    if (getentropy(&key, sizeof key) == 0) rmq_queue_key = key | 1;
}

/* A word at a time, all bytes in; the last word may overlap the one before it. */
static inline uint32_t rmq_queue_hash(const uint8_t *topic, int32_t size, int32_t queue_id) {
    const uint64_t k = rmq_queue_key;
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
