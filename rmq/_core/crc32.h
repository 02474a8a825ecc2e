/* SPDX-License-Identifier: Apache-2.0
   CRC-32 (IEEE 802.3, reflected 0xEDB88320). Carry-less multiply where the CPU has it, tables elsewhere.
   Method: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel, 2009. */
#ifndef RMQ_CRC32_H
#define RMQ_CRC32_H

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static uint32_t rmq_crc_table[8][256];
static int rmq_crc_ready, rmq_crc_clmul;

static void rmq_crc_init(void) {
    if (rmq_crc_ready) return;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = (c & 1) ? (c >> 1) ^ 0xEDB88320u : c >> 1;
        rmq_crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            rmq_crc_table[t][i] = (rmq_crc_table[t - 1][i] >> 8) ^ rmq_crc_table[0][rmq_crc_table[t - 1][i] & 0xFF];
#if defined(__x86_64__)
    rmq_crc_clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
    rmq_crc_ready = 1;
}

/* `crc` is the running value before the final inversion. */
static uint32_t rmq_crc_by_table(uint32_t crc, const uint8_t *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        const uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = rmq_crc_table[7][low & 0xFF] ^ rmq_crc_table[6][(low >> 8) & 0xFF] ^
              rmq_crc_table[5][(low >> 16) & 0xFF] ^ rmq_crc_table[4][low >> 24] ^ rmq_crc_table[3][p[4]] ^
              rmq_crc_table[2][p[5]] ^ rmq_crc_table[1][p[6]] ^ rmq_crc_table[0][p[7]];
    }
    while (n--) crc = (crc >> 8) ^ rmq_crc_table[0][(crc ^ *p++) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("pclmul,sse4.1"))) static inline __m128i rmq_crc_fold(__m128i value, __m128i next, __m128i k) {
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(value, k, 0x00), _mm_clmulepi64_si128(value, k, 0x11)));
}

/* Bytes moved up (by < 0: down) in the register, zeros behind them. REQUIRES: |by| <= 16. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i rmq_crc_shift(__m128i value, int by) {
    static const uint8_t steps[48] = {
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
        0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    return _mm_shuffle_epi8(value, _mm_loadu_si128((const __m128i *)(steps + 16 - by)));
}

/* REQUIRES: n >= 16. The odd bytes go first, with zeros before them: zeros change nothing in a register of zeros, so
   the initial value moves with the bytes and no tail is left. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t rmq_crc_by_clmul(uint32_t crc, const uint8_t *p, size_t n) {
    const __m128i k512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i k128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i k64 = _mm_set_epi64x(0, 0x163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
    const int odd = (int)(n & 15);
    const __m128i init = _mm_cvtsi32_si128((int)crc);
    const __m128i head = rmq_crc_shift(_mm_xor_si128(_mm_loadu_si128((const __m128i *)p), init), 16 - odd);
    __m128i x0, x1, x2, x3;
    p += odd;
    n -= (size_t)odd;
    x0 = _mm_xor_si128(_mm_loadu_si128((const __m128i *)p), rmq_crc_shift(init, -odd));
    x0 = rmq_crc_fold(head, x0, k128); /* no odd bytes: head is zero */
    p += 16;
    n -= 16;
    if (n >= 48) {
        x1 = _mm_loadu_si128((const __m128i *)p);
        x2 = _mm_loadu_si128((const __m128i *)(p + 16));
        x3 = _mm_loadu_si128((const __m128i *)(p + 32));
        for (p += 48, n -= 48; n >= 64; p += 64, n -= 64) {
            x0 = rmq_crc_fold(x0, _mm_loadu_si128((const __m128i *)p), k512);
            x1 = rmq_crc_fold(x1, _mm_loadu_si128((const __m128i *)(p + 16)), k512);
            x2 = rmq_crc_fold(x2, _mm_loadu_si128((const __m128i *)(p + 32)), k512);
            x3 = rmq_crc_fold(x3, _mm_loadu_si128((const __m128i *)(p + 48)), k512);
        }
        x0 = rmq_crc_fold(x0, x1, k128);
        x0 = rmq_crc_fold(x0, x2, k128);
        x0 = rmq_crc_fold(x0, x3, k128);
    }
    for (; n >= 16; p += 16, n -= 16) x0 = rmq_crc_fold(x0, _mm_loadu_si128((const __m128i *)p), k128);
    /* 128 -> 64 bits, then Barrett reduction to 32. */
    x0 = _mm_xor_si128(_mm_srli_si128(x0, 8), _mm_clmulepi64_si128(x0, k128, 0x10));
    x1 = _mm_srli_si128(x0, 4);
    x0 = _mm_xor_si128(x1, _mm_clmulepi64_si128(_mm_and_si128(x0, low32), k64, 0x00));
    x1 = _mm_clmulepi64_si128(_mm_and_si128(x0, low32), barrett, 0x10);
    x1 = _mm_clmulepi64_si128(_mm_and_si128(x1, low32), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x0, x1), 1);
}
#endif

/* The running value behind n more bytes. */
static inline uint32_t rmq_crc_more(uint32_t crc, const uint8_t *p, size_t n) {
#if defined(__x86_64__)
    if (n >= 16 && rmq_crc_clmul) return rmq_crc_by_clmul(crc, p, n);
#endif
    return rmq_crc_by_table(crc, p, n);
}

/* CRC-32 of n bytes, masked to 31 bits as RocketMQ stores it (UtilAll#crc32). */
static inline int32_t rmq_crc32(const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more(0xFFFFFFFFu, p, n) & 0x7FFFFFFFu);
}

/* rmq_crc32 of n bytes as if the first 4 of them were `head`. REQUIRES: n >= 4. */
static inline int32_t rmq_crc32_headed(const uint8_t *head, const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more(rmq_crc_by_table(0xFFFFFFFFu, head, 4), p + 4, n - 4) & 0x7FFFFFFFu);
}

#endif
