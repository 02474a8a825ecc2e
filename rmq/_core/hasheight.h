/* SPDX-License-Identifier: Apache-2.0
   Index key hashes of eight short texts that lie one behind the other, at a time: each 32 bytes that end where the text
   ends, less those before it, are pairs by 31, fours by 31^2, and eight fours that stand 31^4 apart. */
#ifndef RMQ_HASHEIGHT_H
#define RMQ_HASHEIGHT_H

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu.h"

enum { RMQ_EIGHT_SIZE = 32 }; /* bytes of a text at most; so many bytes before the end of the first are readable */

#if defined(__x86_64__)
/* 31^0 .. 31^32 */
static const uint32_t rmq_eight_powers[RMQ_EIGHT_SIZE + 1] = {
    1u, 31u, 961u, 29791u, 923521u, 28629151u, 887503681u, 1742810335u, 2487512833u, 4098453791u, 2498015937u,
    129082719u, 4001564289u, 3789408671u, 1507551809u, 3784433119u, 1353309697u, 3297894943u, 3450495425u,
    3886143071u, 211350913u, 2256911007u, 1244764481u, 4227960543u, 2217757953u, 31019807u, 961614017u, 4040230751u,
    693101697u, 11316127u, 350799937u, 2284863455u, 2111290369u};

/* 0 when a text is not ASCII: nothing was stored. */
__attribute__((target("avx2"))) static int rmq_hash_eight_avx2(const uint8_t *p, const int32_t *sizes, uint32_t seed,
                                                               int32_t *out) {
    static const uint8_t own[2 * RMQ_EIGHT_SIZE] __attribute__((aligned(64))) = {
        [32] = 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
        255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
    const __m256i apart = _mm256_setr_epi32((int)693101697u, (int)2217757953u, (int)211350913u, (int)1353309697u, (int)4001564289u, (int)2487512833u, (int)923521u, (int)1u);
    __m256i sums[8], all = _mm256_setzero_si256();
    int32_t front[8];
    for (int i = 0; i < 8; i++) {
        p += sizes[i];
        const __m256i mask = _mm256_loadu_si256((const __m256i *)(own + sizes[i]));
        const __m256i units = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(p - RMQ_EIGHT_SIZE)), mask);
        const __m256i pairs = _mm256_maddubs_epi16(units, _mm256_set1_epi16(0x011F)); /* 31, 1 */
        sums[i] = _mm256_mullo_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi32(0x000103C1)), apart); /* 961, 1 */
        all = _mm256_or_si256(all, units);
        front[i] = (int32_t)(seed * rmq_eight_powers[sizes[i]]);
    }
    if (_mm256_movemask_epi8(all)) return 0;
    for (int i = 0; i < 8; i += 2) sums[i] = _mm256_hadd_epi32(sums[i], sums[i + 1]);
    const __m256i four = _mm256_hadd_epi32(sums[0], sums[2]), others = _mm256_hadd_epi32(sums[4], sums[6]);
    __m256i hashes = _mm256_add_epi32(_mm256_permute2x128_si256(four, others, 0x20),
                                      _mm256_permute2x128_si256(four, others, 0x31));
    hashes = _mm256_add_epi32(hashes, _mm256_loadu_si256((const __m256i *)front));
    hashes = _mm256_and_si256(_mm256_abs_epi32(hashes), _mm256_set1_epi32(0x7FFFFFFF)); /* |hash|, 0 for -2^31 */
    _mm256_storeu_si256((__m256i *)out, hashes);
    return 1;
}
#endif

/* Whether rmq_hash_eight does anything here. */
static inline int rmq_hashes_eight(void) {
#if defined(__x86_64__)
    return rmq_cpu_level >= RMQ_CPU_AVX2;
#else
    return 0;
#endif
}

/* Whether it hashed eight texts from p on, sizes[i] bytes each, 0 to RMQ_EIGHT_SIZE: nothing when one is not ASCII.
   REQUIRES: rmq_hashes_eight(), and RMQ_EIGHT_SIZE readable bytes before the end of the first. */
static inline int rmq_hash_eight(const uint8_t *p, const int32_t *sizes, uint32_t seed, int32_t *out) {
#if defined(__x86_64__)
    return rmq_hash_eight_avx2(p, sizes, seed, out);
#else
    (void)p, (void)sizes, (void)seed, (void)out;
    return 0;
#endif
}

#endif
