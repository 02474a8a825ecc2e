/* SPDX-License-Identifier: Apache-2.0
   CRC-32 (IEEE 802.3, reflected 0xEDB88320), and with a copy of the bytes on the way. Carry-less multiply or instructions
   for it where the CPU has them, tables elsewhere. Method: V. Gopal et al., "Fast CRC Computation for Generic Polynomials
   Using PCLMULQDQ", Intel, 2009. */
#ifndef RMQ_CRC32_H
#define RMQ_CRC32_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__AARCH64EL__)
#include <arm_acle.h>
#endif

#include "asking.h"
#include "cpu.h"
#include "prefetch.h"

static uint32_t rmq_crc_table[8][256];

__attribute__((constructor)) static void rmq_crc_fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = (c & 1) ? (c >> 1) ^ 0xEDB88320u : c >> 1;
        rmq_crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            rmq_crc_table[t][i] = (rmq_crc_table[t - 1][i] >> 8) ^ rmq_crc_table[0][rmq_crc_table[t - 1][i] & 0xFF];
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
#define RMQ_CRC_INLINE static inline __attribute__((always_inline))
#define RMQ_AT_128 __attribute__((target("pclmul,sse4.1")))
#define RMQ_AT_256 __attribute__((target("vpclmulqdq,pclmul,avx2")))
#define RMQ_AT_512 __attribute__((target("vpclmulqdq,pclmul,avx2,avx512f,avx512bw,avx512vbmi")))

/* x^(d - 32) and x^(d + 32) by which the halves of a value move d bits on: bits reflected, shifted by one. */
#define RMQ_X_480 0x1c6e41596
#define RMQ_FOLD_128 0x0ccaa009e, 0x1751997d0
#define RMQ_FOLD_256 0x15a546366, 0x0f1da05aa
#define RMQ_FOLD_384 0x174359406, 0x03db1ecdc
#define RMQ_FOLD_512 RMQ_X_480, 0x154442bd4
#define RMQ_FOLD_1024 0x14a7fe880, 0x1e88ef372
#define RMQ_FOLD_2048 0x1322d1430, 0x11542778a

RMQ_AT_128 RMQ_CRC_INLINE __m128i rmq_crc_fold(__m128i value, __m128i next, __m128i k) {
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(value, k, 0x00), _mm_clmulepi64_si128(value, k, 0x11)));
}

/* Bytes moved up (by < 0: down) in the register, zeros behind them. REQUIRES: |by| <= 16. */
RMQ_AT_128 RMQ_CRC_INLINE __m128i rmq_crc_shift(__m128i value, int by) {
    static const uint8_t steps[48] = {
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
        0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    return _mm_shuffle_epi8(value, _mm_loadu_si128((const __m128i *)(steps + 16 - by)));
}

/* 96 -> 32 bits: a multiple of the polynomial takes the first 64 away. Bits reflected, its factor is found from below, by
   the polynomial's inverse modulo x^64 (Montgomery's reduction). */
RMQ_AT_128 RMQ_CRC_INLINE uint32_t rmq_crc_reduce_96(__m128i x) {
    const __m128i k = _mm_set_epi64x(0x1db710641, (long long)0xb4e5b025f7011641);
    const __m128i factor = _mm_clmulepi64_si128(x, k, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, _mm_clmulepi64_si128(factor, k, 0x10)), 2);
}

/* 128 -> 32 bits. */
RMQ_AT_128 RMQ_CRC_INLINE uint32_t rmq_crc_reduce(__m128i x) {
    const __m128i k = _mm_set_epi64x(RMQ_FOLD_128);
    return rmq_crc_reduce_96(_mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, k, 0x10)));
}

/* The kernels give the running value behind n more bytes and, when `copies`, copy them to dest; each is made twice.
   ahead > 0: with each line that a loop takes they ask for the one so far behind. REQUIRES: n >= 16. */

/* Such a line may not be there. */
RMQ_CRC_INLINE void rmq_crc_ask(const uint8_t *p, uint8_t *dest, int copies, size_t ahead) {
    if (!ahead) return;
    rmq_prefetch((const void *)((uintptr_t)p + ahead));
    if (copies) rmq_prefetch_to_write((const void *)((uintptr_t)dest + ahead));
}

RMQ_AT_128 RMQ_CRC_INLINE __m128i rmq_crc_take(const uint8_t *p, uint8_t *dest, int copies) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    if (copies) _mm_storeu_si128((__m128i *)dest, bytes);
    return bytes;
}

/* The odd bytes go first, with zeros before them: zeros change nothing in a register of zeros, so the running value
   moves with the bytes and no tail is left. */
RMQ_AT_128 RMQ_CRC_INLINE uint32_t rmq_crc_by_128(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, int copies,
                                                  size_t ahead) {
    const __m128i k512 = _mm_set_epi64x(RMQ_FOLD_512), k128 = _mm_set_epi64x(RMQ_FOLD_128);
    const int odd = (int)(n & 15);
    const __m128i init = _mm_cvtsi32_si128((int)crc);
    const __m128i head = rmq_crc_shift(_mm_xor_si128(rmq_crc_take(p, dest, copies), init), 16 - odd);
    size_t i = (size_t)odd;
    __m128i x0, x1, x2, x3;
    x0 = _mm_xor_si128(rmq_crc_take(p + i, dest + i, copies), rmq_crc_shift(init, -odd));
    x0 = rmq_crc_fold(head, x0, k128); /* no odd bytes: head is zero */
    i += 16;
    if (n - i >= 48) {
        x1 = rmq_crc_take(p + i, dest + i, copies);
        x2 = rmq_crc_take(p + i + 16, dest + i + 16, copies);
        x3 = rmq_crc_take(p + i + 32, dest + i + 32, copies);
        for (i += 48; n - i >= 64; i += 64) {
            rmq_crc_ask(p + i, dest + i, copies, ahead);
            x0 = rmq_crc_fold(x0, rmq_crc_take(p + i, dest + i, copies), k512);
            x1 = rmq_crc_fold(x1, rmq_crc_take(p + i + 16, dest + i + 16, copies), k512);
            x2 = rmq_crc_fold(x2, rmq_crc_take(p + i + 32, dest + i + 32, copies), k512);
            x3 = rmq_crc_fold(x3, rmq_crc_take(p + i + 48, dest + i + 48, copies), k512);
        }
        x0 = rmq_crc_fold(x0, x1, k128);
        x0 = rmq_crc_fold(x0, x2, k128);
        x0 = rmq_crc_fold(x0, x3, k128);
    }
    for (; n - i >= 16; i += 16) x0 = rmq_crc_fold(x0, rmq_crc_take(p + i, dest + i, copies), k128);
    return rmq_crc_reduce(x0);
}

RMQ_AT_256 RMQ_CRC_INLINE __m256i rmq_crc_fold_256(__m256i value, __m256i next, __m256i k) {
    return _mm256_xor_si256(next, _mm256_xor_si256(_mm256_clmulepi64_epi128(value, k, 0x00),
                                                   _mm256_clmulepi64_epi128(value, k, 0x11)));
}

RMQ_AT_256 RMQ_CRC_INLINE __m256i rmq_crc_take_256(const uint8_t *p, uint8_t *dest, int copies) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
    if (copies) _mm256_storeu_si256((__m256i *)dest, bytes);
    return bytes;
}

/* REQUIRES: n >= 128. The odd bytes come last: those of the value before them that they push out are folded by 128. */
RMQ_AT_256 RMQ_CRC_INLINE uint32_t rmq_crc_by_256(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, int copies,
                                                  size_t ahead) {
    const __m128i f128 = _mm_set_epi64x(RMQ_FOLD_128);
    const __m256i k256 = _mm256_broadcastsi128_si256(_mm_set_epi64x(RMQ_FOLD_256));
    const __m256i k1024 = _mm256_broadcastsi128_si256(_mm_set_epi64x(RMQ_FOLD_1024));
    __m256i y0 = rmq_crc_take_256(p, dest, copies), y1 = rmq_crc_take_256(p + 32, dest + 32, copies);
    __m256i y2 = rmq_crc_take_256(p + 64, dest + 64, copies), y3 = rmq_crc_take_256(p + 96, dest + 96, copies);
    const int odd = (int)(n & 15);
    size_t i = 128;
    __m128i x;
    y0 = _mm256_xor_si256(y0, _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)));
    for (; n - i >= 128; i += 128) {
        rmq_crc_ask(p + i, dest + i, copies, ahead);
        rmq_crc_ask(p + i + 64, dest + i + 64, copies, ahead);
        y0 = rmq_crc_fold_256(y0, rmq_crc_take_256(p + i, dest + i, copies), k1024);
        y1 = rmq_crc_fold_256(y1, rmq_crc_take_256(p + i + 32, dest + i + 32, copies), k1024);
        y2 = rmq_crc_fold_256(y2, rmq_crc_take_256(p + i + 64, dest + i + 64, copies), k1024);
        y3 = rmq_crc_fold_256(y3, rmq_crc_take_256(p + i + 96, dest + i + 96, copies), k1024);
    }
    y0 = rmq_crc_fold_256(rmq_crc_fold_256(rmq_crc_fold_256(y0, y1, k256), y2, k256), y3, k256);
    for (; n - i >= 32; i += 32) y0 = rmq_crc_fold_256(y0, rmq_crc_take_256(p + i, dest + i, copies), k256);
    x = rmq_crc_fold(_mm256_castsi256_si128(y0), _mm256_extracti128_si256(y0, 1), f128);
    if (n - i >= 16) x = rmq_crc_fold(x, rmq_crc_take(p + i, dest + i, copies), f128);
    if (odd) {
        if (copies) memcpy(dest + n - odd, p + n - odd, (size_t)odd); /* what lies before them was stored as it was read */
        const __m128i last = _mm_loadu_si128((const __m128i *)((copies ? dest : p) + n - 16));
        const __m128i tail = rmq_crc_shift(rmq_crc_shift(last, odd - 16), 16 - odd);
        x = rmq_crc_fold(rmq_crc_shift(x, 16 - odd), _mm_or_si128(rmq_crc_shift(x, -odd), tail), f128);
    }
    return rmq_crc_reduce(x);
}

RMQ_AT_512 RMQ_CRC_INLINE __m512i rmq_crc_fold_512(__m512i value, __m512i next, __m512i k) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, k, 0x00), _mm512_clmulepi64_epi128(value, k, 0x11),
                                     next, 0x96);
}

RMQ_AT_512 RMQ_CRC_INLINE __m512i rmq_crc_take_512(const uint8_t *p, uint8_t *dest, int copies, size_t ahead) {
    const __m512i bytes = _mm512_loadu_si512(p);
    rmq_crc_ask(p, dest, copies, ahead);
    if (copies) _mm512_storeu_si512(dest, bytes);
    return bytes;
}

/* The first 1 to 64 bytes stand alone in a register, with zeros before them, then come whole ones. */
RMQ_AT_512 RMQ_CRC_INLINE uint32_t rmq_crc_by_512(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, int copies,
                                                  size_t ahead) {
    static const uint8_t place[192] = {[64] = 0xFF, 0xFF, 0xFF, 0xFF}; /* of the running value */
    static const uint8_t count[128] = { /* count[64 + k] is k */
        [64] = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
        30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58,
        59, 60, 61, 62, 63};
    const __m512i k512 = _mm512_broadcast_i32x4(_mm_set_epi64x(RMQ_FOLD_512));
    size_t i = ((n - 1) & 63) + 1;
    const __mmask64 own = ~0ull << (64 - i);
    const unsigned turn = (unsigned)(8 * (64 - i)) & 31;
    const __m512i init = _mm512_set1_epi32((int)(crc << turn | crc >> ((32 - turn) & 31)));
    __m512i spill = _mm512_and_si512(init, _mm512_loadu_si512(place + 64 + i)); /* i < 4: some of it is for the next */
    __m512i x0, x1, x2, x3;
    if (copies && n >= 64) { /* each byte is read once: another thread may change it meanwhile */
        const __m512i first = _mm512_loadu_si512(p);
        _mm512_storeu_si512(dest, first);
        x0 = _mm512_maskz_permutexvar_epi8(own, _mm512_loadu_si512(count + i), first);
    } else {
        x0 = _mm512_maskz_loadu_epi8(own, (const void *)((uintptr_t)p + i - 64));
        if (copies) _mm512_mask_storeu_epi8((void *)((uintptr_t)dest + i - 64), own, x0);
    }
    x0 = _mm512_xor_si512(x0, _mm512_and_si512(init, _mm512_loadu_si512(place + i)));
    if (n - i >= 448) {
        const __m512i k2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(RMQ_FOLD_2048));
        x1 = _mm512_xor_si512(rmq_crc_take_512(p + i, dest + i, copies, ahead), spill);
        x2 = rmq_crc_take_512(p + i + 64, dest + i + 64, copies, ahead);
        x3 = rmq_crc_take_512(p + i + 128, dest + i + 128, copies, ahead);
        for (i += 192; n - i >= 256; i += 256) {
            x0 = rmq_crc_fold_512(x0, rmq_crc_take_512(p + i, dest + i, copies, ahead), k2048);
            x1 = rmq_crc_fold_512(x1, rmq_crc_take_512(p + i + 64, dest + i + 64, copies, ahead), k2048);
            x2 = rmq_crc_fold_512(x2, rmq_crc_take_512(p + i + 128, dest + i + 128, copies, ahead), k2048);
            x3 = rmq_crc_fold_512(x3, rmq_crc_take_512(p + i + 192, dest + i + 192, copies, ahead), k2048);
        }
        x0 = rmq_crc_fold_512(rmq_crc_fold_512(rmq_crc_fold_512(x0, x1, k512), x2, k512), x3, k512);
        spill = _mm512_setzero_si512();
    }
    for (; i < n; i += 64) {
        x0 = rmq_crc_fold_512(x0, _mm512_xor_si512(rmq_crc_take_512(p + i, dest + i, copies, ahead), spill), k512);
        spill = _mm512_setzero_si512();
    }
    /* 512 -> 96 bits: each half of a lane moves to where the last one is, which stays. */
    const __m512i halves = _mm512_set_epi64(1, RMQ_FOLD_128, RMQ_FOLD_256, RMQ_FOLD_384, RMQ_X_480);
    x0 = _mm512_xor_si512(_mm512_clmulepi64_epi128(x0, halves, 0x00), _mm512_clmulepi64_epi128(x0, halves, 0x11));
    const __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(x0), _mm512_extracti64x4_epi64(x0, 1));
    return rmq_crc_reduce_96(_mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

RMQ_AT_128 static uint32_t rmq_crc_more_128(uint32_t crc, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_128(crc, (uint8_t *)p, p, n, 0, ahead);
}
RMQ_AT_128 static uint32_t rmq_crc_copy_128(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_128(crc, dest, p, n, 1, ahead);
}
RMQ_AT_256 static uint32_t rmq_crc_more_256(uint32_t crc, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_256(crc, (uint8_t *)p, p, n, 0, ahead);
}
RMQ_AT_256 static uint32_t rmq_crc_copy_256(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_256(crc, dest, p, n, 1, ahead);
}
RMQ_AT_512 static uint32_t rmq_crc_more_512(uint32_t crc, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_512(crc, (uint8_t *)p, p, n, 0, ahead);
}
RMQ_AT_512 static uint32_t rmq_crc_copy_512(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n, size_t ahead) {
    return rmq_crc_by_512(crc, dest, p, n, 1, ahead);
}
#endif

#if defined(__AARCH64EL__)
#if defined(__ARM_FEATURE_CRC32)
#define RMQ_AT_CRC
#else
#define RMQ_AT_CRC __attribute__((target("+crc")))
#endif

RMQ_AT_CRC static uint32_t rmq_crc_by_instruction(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t eight;
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&eight, p, 8);
        crc = __crc32d(crc, eight);
    }
    while (n--) crc = __crc32b(crc, *p++);
    return crc;
}
#endif

/* Whether a line is asked for whenever one of n bytes is taken: of what follows them in the log, or for a copy. */
static inline int rmq_crc_asks(size_t n, int copies) {
    const int from = copies ? rmq_asks->copies_from : rmq_asks->reads_from;
    return n >= (size_t)from && rmq_cpu_level != RMQ_CPU_PLAIN;
}

/* The running value behind n more bytes. */
static inline uint32_t rmq_crc_more(uint32_t crc, const uint8_t *p, size_t n, size_t ahead) {
#if defined(__x86_64__)
    if (n >= 16 && rmq_cpu_level == RMQ_CPU_VPCLMUL512) return rmq_crc_more_512(crc, p, n, ahead);
    if (n >= 128 && rmq_cpu_level == RMQ_CPU_VPCLMUL256) return rmq_crc_more_256(crc, p, n, ahead);
    if (n >= 16 && rmq_cpu_level != RMQ_CPU_PLAIN) return rmq_crc_more_128(crc, p, n, ahead);
#elif defined(__AARCH64EL__)
    if (rmq_cpu_level == RMQ_CPU_CRC) return rmq_crc_by_instruction(crc, p, n);
#endif
    (void)ahead;
    return rmq_crc_by_table(crc, p, n);
}

/* The same, and the bytes are copied to dest. They do not overlap. */
static inline uint32_t rmq_crc_more_copied(uint32_t crc, uint8_t *dest, const uint8_t *p, size_t n) {
#if defined(__x86_64__)
    const size_t ahead = rmq_crc_asks(n, 1) ? (size_t)rmq_asks->write_ahead : 0;
    if (n >= 16 && rmq_cpu_level == RMQ_CPU_VPCLMUL512) return rmq_crc_copy_512(crc, dest, p, n, ahead);
    if (n >= 128 && rmq_cpu_level == RMQ_CPU_VPCLMUL256) return rmq_crc_copy_256(crc, dest, p, n, ahead);
    if (n >= 16 && rmq_cpu_level != RMQ_CPU_PLAIN) return rmq_crc_copy_128(crc, dest, p, n, ahead);
#endif
    memcpy(dest, p, n);
    return rmq_crc_more(crc, dest, n, 0); /* of what was stored, whatever another thread does to p meanwhile */
}

/* CRC-32 of n bytes, masked to 31 bits as RocketMQ stores it (UtilAll#crc32). */
static inline int32_t rmq_crc32(const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more(0xFFFFFFFFu, p, n, 0) & 0x7FFFFFFFu);
}

/* The same of bytes behind which others are read next. */
static inline int32_t rmq_crc32_on(const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more(0xFFFFFFFFu, p, n, rmq_crc_asks(n, 0) ? RMQ_READ_AHEAD : 0) & 0x7FFFFFFFu);
}

/* Copy n bytes; their rmq_crc32. */
static inline int32_t rmq_crc32_copied(uint8_t *dest, const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more_copied(0xFFFFFFFFu, dest, p, n) & 0x7FFFFFFFu);
}

/* rmq_crc32 of n bytes as if the first 4 of them were `head`. REQUIRES: n >= 4. */
static inline int32_t rmq_crc32_headed(const uint8_t *head, const uint8_t *p, size_t n) {
    return (int32_t)(~rmq_crc_more(rmq_crc_by_table(0xFFFFFFFFu, head, 4), p + 4, n - 4, 0) & 0x7FFFFFFFu);
}

#endif
