/* SPDX-License-Identifier: Apache-2.0
   What is asked of memory before its turn, and how much at once. Processors differ in what they bring by themselves;
   measured on these (docs/performance.md), others take what is asked for on the Zen 4. */
#ifndef RMQ_ASKING_H
#define RMQ_ASKING_H

enum {
    RMQ_READ_AHEAD = 8192, /* bytes: two pages, which the processor does not cross by itself */
    RMQ_WALKS_LIMIT = 160, /* a multiple of 16 */
    RMQ_BUCKETS_LIMIT = 256,
    RMQ_NEVER = 1 << 30, /* no body has so many bytes */
};

typedef struct {
    int read_step;   /* bytes of which the first line is asked for, where every byte is read */
    int write_most;  /* of a record that is written: of longer ones the processor sees itself how they go on */
    int write_ahead; /* bytes of the log before their turn */
    int text_most;   /* of a text that is read soon, as above */
    int text_ahead;  /* bytes of a column of texts before their turn; 0: none */
    int walks;       /* of an index file side by side, at most RMQ_WALKS_LIMIT: with more they do not wait less */
    int buckets;     /* of a sidecar side by side: a power of two, at most RMQ_BUCKETS_LIMIT */
    int far;         /* lines of an index file come into the second-level cache first */
    int copies_from; /* bytes of a body that is copied: CRC-32 asks for a line whenever it has taken one; of smaller
                        ones all lines are asked for at once, which is quicker where requests between others wait */
    int reads_from;  /* the same of a body that is read */
} rmq_asking;

static const rmq_asking *rmq_asks; /* written by the constructor alone */

__attribute__((constructor)) static void rmq_asks_choose(void) {
    static const rmq_asking zen4 = {.read_step = 256, .write_most = 384, .write_ahead = 2048, .text_most = 256,
                                    .text_ahead = 0, .walks = 96, .buckets = 64, .far = 1,
                                    .copies_from = RMQ_NEVER, .reads_from = RMQ_NEVER};
    rmq_asks = &zen4;
#if defined(__x86_64__)
    static const rmq_asking zen5 = {.read_step = 64, .write_most = 384, .write_ahead = 4096, .text_most = 16384,
                                    .text_ahead = 4096, .walks = 160, .buckets = 256, .far = 0,
                                    .copies_from = 512, .reads_from = 512};
    static const rmq_asking zen3 = {.read_step = 64, .write_most = 384, .write_ahead = 2048, .text_most = 256,
                                    .text_ahead = 0, .walks = 96, .buckets = 64, .far = 1,
                                    .copies_from = RMQ_NEVER, .reads_from = RMQ_NEVER};
    static const rmq_asking intel = {.read_step = 64, .write_most = 16384, .write_ahead = 2048, .text_most = 256,
                                     .text_ahead = 4096, .walks = 96, .buckets = 64, .far = 1,
                                     .copies_from = 512, .reads_from = 2048};
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) rmq_asks = &intel;
    else if (!__builtin_cpu_supports("avx512f")) rmq_asks = &zen3; /* and before */
    else if (__builtin_cpu_supports("avx512vp2intersect")) rmq_asks = &zen5;
#endif
}

#endif
