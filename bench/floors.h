/* SPDX-License-Identifier: Apache-2.0
 * What memory allows: random lines, reading, copying. Each returns CPU ns of the calling thread. */
#ifndef RMQ_BENCH_FLOORS_H
#define RMQ_BENCH_FLOORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE_BYTES 64
#define CHAINS_LIMIT 128
#define READ_LANES 32

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RMQ_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RMQ_WIDEST
#endif

static volatile uint64_t rmq_sink; /* keeps the compiler from leaving work out */

static double rmq_thread_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static uint32_t rmq_line_next(const uint8_t *lines, uint32_t line) {
    uint32_t next;
    memcpy(&next, lines + (size_t)line * LINE_BYTES, sizeof next);
    return next;
}

static uint64_t rmq_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Make each line name the next of one cycle through all of them (Sattolo). */
static void rmq_link_lines(uint8_t *lines, uint32_t count, uint64_t seed) {
    uint64_t state = seed;
    for (uint32_t i = 0; i < count; i++) memcpy(lines + (size_t)i * LINE_BYTES, &i, sizeof i);
    for (uint32_t i = count - 1; i > 0; i--) {
        uint32_t other = (uint32_t)(rmq_random(&state) % i);
        uint32_t mine = rmq_line_next(lines, i), theirs = rmq_line_next(lines, other);
        memcpy(lines + (size_t)i * LINE_BYTES, &theirs, sizeof theirs);
        memcpy(lines + (size_t)other * LINE_BYTES, &mine, sizeof mine);
    }
}

/* `chains` walks side by side, `steps` lines together; 1 chain: each line waits for the one before. */
static double rmq_walk_lines(const uint8_t *lines, uint32_t count, int chains, int64_t steps, uint64_t seed) {
    uint32_t at[CHAINS_LIMIT];
    uint64_t state = seed;
    for (int i = 0; i < chains; i++) at[i] = (uint32_t)(rmq_random(&state) % count);
    double begin = rmq_thread_ns();
    for (int64_t step = 0; step < steps / chains; step++) {
        for (int i = 0; i < chains; i++) {
            at[i] = rmq_line_next(lines, at[i]);
            __builtin_prefetch(lines + (size_t)at[i] * LINE_BYTES);
        }
    }
    double taken = rmq_thread_ns() - begin;
    for (int i = 0; i < chains; i++) rmq_sink += at[i];
    return taken;
}

RMQ_WIDEST static uint64_t rmq_sum(const uint64_t *words, size_t count) {
    uint64_t lanes[READ_LANES] = {0}, sum = 0;
    for (size_t i = 0; i + READ_LANES <= count; i += READ_LANES)
        for (int lane = 0; lane < READ_LANES; lane++) lanes[lane] += words[i + (size_t)lane];
    for (int lane = 0; lane < READ_LANES; lane++) sum += lanes[lane];
    return sum;
}

static double rmq_read(const uint8_t *data, size_t size) {
    double begin = rmq_thread_ns();
    rmq_sink += rmq_sum((const uint64_t *)data, size / sizeof(uint64_t));
    return rmq_thread_ns() - begin;
}

/* Fill the target in pieces from a source that is as often repeated as needed; both hold whole pieces. */
static double rmq_copy(uint8_t *target, size_t size, const uint8_t *source, size_t source_size, size_t piece) {
    size_t from = 0;
    double begin = rmq_thread_ns();
    for (size_t at = 0; at + piece <= size; at += piece) {
        memcpy(target + at, source + from, piece);
        from = from + 2 * piece <= source_size ? from + piece : 0;
    }
    return rmq_thread_ns() - begin;
}

#endif
