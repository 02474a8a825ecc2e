/* SPDX-License-Identifier: Apache-2.0
   UTF-8 to code points by the rules of Java's String(byte[], UTF_8): what is malformed reads as U+FFFD, and as
   many bytes are swallowed as the JDK swallows. Source: java.lang.String#decodeUTF8_UTF16 (JDK 17). */
#ifndef RMQ_UTF8_H
#define RMQ_UTF8_H

#include <stdint.h>

#define RMQ_REPLACEMENT 0xFFFDu

static inline int rmq_not_continuation(uint8_t b) { return (b & 0xC0) != 0x80; }

static inline int rmq_bad_second_of_3(uint8_t b1, uint8_t b2) {
    return (b1 == 0xE0 && (b2 & 0xE0) == 0x80) || rmq_not_continuation(b2);
}

static inline int rmq_bad_second_of_4(uint8_t b1, uint8_t b2) {
    return (b1 == 0xF0 && (b2 < 0x90 || b2 > 0xBF)) || (b1 == 0xF4 && (b2 & 0xF0) != 0x80) ||
           rmq_not_continuation(b2);
}

/* One code point from p < end; returns how many bytes it took (>= 1). *malformed is set, never cleared. */
static inline int64_t rmq_utf8_next(const uint8_t *p, const uint8_t *end, uint32_t *code_point, int *malformed) {
    const int64_t left = end - p;
    const uint8_t b1 = p[0];
    if (b1 < 0x80) {
        *code_point = b1;
        return 1;
    }
    if (b1 >= 0xC2 && b1 <= 0xDF && left >= 2 && !rmq_not_continuation(p[1])) {
        *code_point = ((uint32_t)(b1 & 0x1F) << 6) | (p[1] & 0x3F);
        return 2;
    }
    if (b1 >= 0xE0 && b1 <= 0xEF && left >= 3 && !rmq_bad_second_of_3(b1, p[1]) && !rmq_not_continuation(p[2])) {
        const uint32_t c = ((uint32_t)(b1 & 0x0F) << 12) | ((uint32_t)(p[1] & 0x3F) << 6) | (p[2] & 0x3F);
        if (c < 0xD800 || c > 0xDFFF) {
            *code_point = c;
            return 3;
        }
        *malformed = 1;
        *code_point = RMQ_REPLACEMENT;
        return 3;
    }
    if (b1 >= 0xF0 && b1 <= 0xF4 && left >= 4 && !rmq_bad_second_of_4(b1, p[1]) && !rmq_not_continuation(p[2]) &&
        !rmq_not_continuation(p[3])) {
        *code_point = ((uint32_t)(b1 & 0x07) << 18) | ((uint32_t)(p[1] & 0x3F) << 12) |
                      ((uint32_t)(p[2] & 0x3F) << 6) | (p[3] & 0x3F);
        return 4;
    }
    *malformed = 1;
    *code_point = RMQ_REPLACEMENT;
    if (b1 >= 0xC2 && b1 <= 0xDF) return 1;
    if (b1 >= 0xE0 && b1 <= 0xEF) {
        if (left >= 2 && rmq_bad_second_of_3(b1, p[1])) return 1;
        return left < 2 ? left : 2; /* a good second byte goes with the first, also at the end */
    }
    if (b1 >= 0xF0 && b1 <= 0xF4) {
        if (left >= 2 && rmq_bad_second_of_4(b1, p[1])) return 1;
        if (left >= 3 && rmq_not_continuation(p[2])) return 2;
        return left < 3 ? left : 3;
    }
    return 1;
}

/* Length of the leading run that is plain ASCII, in steps of eight bytes: a lower bound. */
static inline int64_t rmq_ascii_prefix(const uint8_t *p, int64_t size) {
    int64_t done = 0;
    uint64_t word;
    for (; done + 8 <= size; done += 8) {
        __builtin_memcpy(&word, p + done, 8);
        if (word & 0x8080808080808080ull) break;
    }
    return done;
}

/* UTF-16 units of the decoded bytes (Java String.length); *malformed tells whether the bytes were not UTF-8. */
static inline int64_t rmq_utf16_units(const uint8_t *p, int64_t size, int *malformed) {
    const uint8_t *end = p + size;
    int64_t units = rmq_ascii_prefix(p, size);
    uint32_t c = 0;
    p += units;
    while (p < end) {
        p += rmq_utf8_next(p, end, &c, malformed);
        units += c >= 0x10000 ? 2 : 1;
    }
    return units;
}

/* Whether the bytes read as a text that is UTF-8: where they are malformed, it holds U+FFFD. */
static inline int rmq_utf8_reads_as(const uint8_t *p, int64_t size, const uint8_t *text, int64_t text_size) {
    const uint8_t *end = p + size, *text_end = text + text_size;
    uint32_t c = 0, wanted = 0;
    int malformed = 0;
    while (p < end && text < text_end) {
        p += rmq_utf8_next(p, end, &c, &malformed);
        text += rmq_utf8_next(text, text_end, &wanted, &malformed);
        if (c != wanted) return 0;
    }
    return p == end && text == text_end;
}

/* Decoded and encoded again, so that what was malformed is U+FFFD. Needs 3 * size bytes; returns bytes written. */
static inline int64_t rmq_utf8_repair(const uint8_t *p, int64_t size, uint8_t *out) {
    const uint8_t *end = p + size;
    uint8_t *start = out;
    uint32_t c = 0;
    while (p < end) {
        int malformed = 0;
        const int64_t step = rmq_utf8_next(p, end, &c, &malformed);
        if (malformed) {
            *out++ = 0xEF;
            *out++ = 0xBF;
            *out++ = 0xBD;
        } else {
            __builtin_memcpy(out, p, (size_t)step);
            out += step;
        }
        p += step;
    }
    return out - start;
}

#endif
