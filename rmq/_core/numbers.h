/* SPDX-License-Identifier: Apache-2.0
   Numbers and times as text: what Arrow's cast makes of them, but with a T between date and time (ISO 8601). */
#ifndef RMQ_NUMBERS_H
#define RMQ_NUMBERS_H

#include "bigendian.h"

enum { RMQ_NUMBER_ROOM = 32 }; /* bytes that a text takes at most, with what is written behind it: digits come in eights */

/* Digits as in "0123456789ABCDEF", two for each byte, without a branch. */
static inline void rmq_hex(uint8_t *text, const uint8_t *p, int size) {
    for (int i = 0; i < size; i++) {
        const int high = p[i] >> 4, low = p[i] & 15;
        text[2 * i] = (uint8_t)('0' + high + (high > 9 ? 7 : 0));
        text[2 * i + 1] = (uint8_t)('0' + low + (low > 9 ? 7 : 0));
    }
}

/* The digits of n < 10^8, one a byte, the first of eight in the highest: all at once, without a branch. */
static inline uint64_t rmq_eight_digits(uint32_t n) {
    const uint64_t fours = (uint64_t)(n / 10000) << 32 | n % 10000;
    const uint64_t hundreds = (fours * 10486 >> 20) & 0x0000007F0000007Fu; /* 10486 / 2^20 is a hundredth, to 9,999 */
    const uint64_t twos = fours + hundreds * (65536 - 100);
    const uint64_t tens = (twos * 103 >> 10) & 0x000F000F000F000Fu; /* 103 / 2^10 is a tenth, to 99 */
    return twos + tens * (256 - 10);
}

static inline void rmq_write_eight(uint8_t *dest, uint64_t digits) {
    rmq_store_i64(dest, (int64_t)(digits + 0x3030303030303030u));
}

static inline uint8_t *rmq_write_natural(uint8_t *dest, uint64_t n) {
    if (n >= 100000000) {
        dest = rmq_write_natural(dest, n / 100000000);
        rmq_write_eight(dest, rmq_eight_digits((uint32_t)(n % 100000000)));
        return dest + 8;
    }
    const uint64_t digits = rmq_eight_digits((uint32_t)n);
    const int zeros = __builtin_clzll(digits | 1) / 8;
    rmq_write_eight(dest, digits << 8 * zeros);
    return dest + 8 - zeros;
}

static inline uint8_t *rmq_write_integer(uint8_t *dest, int64_t value) {
    if (value < 0) *dest++ = '-';
    return rmq_write_natural(dest, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
}

/* The shortest decimal that gives `value` back, when it has at most nine digits before its point and six behind it;
   else NULL. Decimals of fifteen digits all have doubles of their own, so there is no shorter one. */
static inline uint8_t *rmq_write_double(uint8_t *dest, double value) {
    if (!(value > -1e9 && value < 1e9)) return NULL;
    const int64_t scaled = (int64_t)(value * 1e6 + (value < 0 ? -0.5 : 0.5));
    if ((double)scaled / 1e6 != value || (scaled == 0 && __builtin_signbit(value))) return NULL;
    const uint64_t n = (uint64_t)(scaled < 0 ? -scaled : scaled), fraction = n % 1000000;
    if (scaled < 0) *dest++ = '-';
    dest = rmq_write_natural(dest, n / 1000000);
    if (!fraction) return dest;
    const uint64_t digits = rmq_eight_digits((uint32_t)fraction * 100);
    *dest = '.';
    rmq_write_eight(dest + 1, digits);
    return dest + 9 - __builtin_ctzll(digits) / 8;
}

/* Date and time of `value`, counted from 1970 in units of 10^-digits seconds; NULL for years that have not four digits.
   The sums run over days and years from 1 March -400 on, so that a leap day ends what it is in. */
static inline uint8_t *rmq_write_time(uint8_t *dest, int64_t value, int64_t per_second, int digits) {
    const int64_t to_1970 = 62167219200, second = value / per_second - (value % per_second < 0); /* from 0000-01-01 */
    if (second < -to_1970 || second > 253402300799) return NULL;
    const uint32_t of_day = (uint32_t)((second + to_1970) % 86400);
    const uint32_t day = (uint32_t)((second + to_1970) / 86400) + 146037;
    const uint32_t of_century = (4 * day + 3) % 146097 / 4, of_year = (4 * of_century + 3) % 1461 / 4;
    const uint32_t month = (5 * of_year + 2) / 153, of_month = (5 * of_year + 2) % 153 / 5; /* month 0 is March */
    const uint32_t year = (4 * day + 3) / 146097 * 100 + (4 * of_century + 3) / 1461 - 400 + (month >= 10);
    const uint64_t date = rmq_eight_digits(year * 10000 + (month < 10 ? month + 3 : month - 9) * 100 + of_month + 1);
    const uint64_t time = rmq_eight_digits(of_day / 3600 * 10000 + of_day / 60 % 60 * 100 + of_day % 60);
    rmq_write_eight(dest, date);
    rmq_write_eight(dest + 5, date << 32);
    rmq_write_eight(dest + 8, date << 48);
    rmq_write_eight(dest + 11, time << 16);
    rmq_write_eight(dest + 14, time << 32);
    rmq_write_eight(dest + 17, time << 48);
    dest[4] = dest[7] = '-', dest[10] = 'T', dest[13] = dest[16] = ':';
    if (!digits) return dest + 19;
    uint32_t fraction = (uint32_t)(value - second * per_second);
    for (int i = digits; i < 9; i++) fraction *= 10;
    dest[19] = '.';
    rmq_write_eight(dest + 20, rmq_eight_digits(fraction / 10));
    dest[28] = (uint8_t)('0' + fraction % 10);
    return dest + 20 + digits;
}

#endif
