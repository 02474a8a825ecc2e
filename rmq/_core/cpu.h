/* SPDX-License-Identifier: Apache-2.0
   Which instructions this process uses: what the CPU has, or less when RMQ_CPU in the environment names less. Chosen in
   each compiled module when it is loaded, before any of its code runs. */
#ifndef RMQ_CPU_H
#define RMQ_CPU_H

#include <stdlib.h>
#include <string.h>
#if defined(__AARCH64EL__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* Each level runs where those after it do. */
#if defined(__AARCH64EL__)
enum { RMQ_CPU_PLAIN, RMQ_CPU_CRC, RMQ_CPU_LEVELS };
static const char *const rmq_cpu_names[RMQ_CPU_LEVELS] = {"plain", "crc"};
#else
enum { RMQ_CPU_PLAIN, RMQ_CPU_V2, RMQ_CPU_AVX2, RMQ_CPU_VPCLMUL256, RMQ_CPU_VPCLMUL512, RMQ_CPU_LEVELS };
static const char *const rmq_cpu_names[RMQ_CPU_LEVELS] = {"plain", "v2", "avx2", "vpclmul256", "vpclmul512"};
#endif

static int rmq_cpu_level; /* written by the constructor alone */

/* The highest level that this CPU and system have. */
static int rmq_cpu_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return RMQ_CPU_PLAIN;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi")) return RMQ_CPU_V2;
    if (!__builtin_cpu_supports("vpclmulqdq")) return RMQ_CPU_AVX2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vbmi"))
        return RMQ_CPU_VPCLMUL256;
    return RMQ_CPU_VPCLMUL512;
#elif defined(__AARCH64EL__) && defined(__ARM_FEATURE_CRC32)
    return RMQ_CPU_CRC;
#elif defined(__AARCH64EL__) && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_CRC32 ? RMQ_CPU_CRC : RMQ_CPU_PLAIN;
#else
    return RMQ_CPU_PLAIN;
#endif
}

/* A name that is none of these is an error of the import (_record.pyx). */
__attribute__((constructor)) static void rmq_cpu_choose(void) {
    const int best = rmq_cpu_best();
    const char *most = getenv("RMQ_CPU");
    rmq_cpu_level = best;
    for (int level = 0; most && level < best; level++)
        if (strcmp(most, rmq_cpu_names[level]) == 0) rmq_cpu_level = level;
}

#endif
