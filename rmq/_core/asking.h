/* SPDX-License-Identifier: Apache-2.0
   How much of memory that a pass goes through is asked for before its turn. Processors differ in what they bring by
   themselves; each was measured (docs/performance.md). */
#ifndef RMQ_ASKING_H
#define RMQ_ASKING_H

enum { RMQ_READ_AHEAD = 8192 }; /* bytes: two pages, which the processor does not cross by itself */

typedef struct {
    int read_step;   /* bytes of which the first line is asked for, where every byte is read */
    int write_most;  /* of a record that is written: of longer ones the processor sees itself how they go on */
    int write_ahead; /* bytes of the log before their turn */
    int text_most;   /* of a text that is read soon, as above */
    int slots_once;  /* those of keys that are put: else far ahead, and near once more */
    int between;     /* CRC-32 asks for a line whenever it has taken one; else those of a record are asked for together */
} rmq_asking;

static const rmq_asking *rmq_asks; /* written by the constructor alone */

__attribute__((constructor)) static void rmq_asks_choose(void) {
    static const rmq_asking little = {256, 384, 2048, 256, 0, 0};
    rmq_asks = &little;
#if defined(__x86_64__)
    static const rmq_asking zen5 = {64, 384, 4096, 1 << 14, 1, 1};
    static const rmq_asking intel = {64, 1 << 14, 2048, 256, 0, 0};
    static const rmq_asking older = {64, 384, 2048, 256, 0, 0};
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) rmq_asks = &intel;
    else if (!__builtin_cpu_supports("avx512f")) rmq_asks = &older;
    else if (__builtin_cpu_supports("avx512vp2intersect")) rmq_asks = &zen5; /* of AMD's Zen 5 is the first with it */
#endif
}

#endif
