/* SPDX-License-Identifier: Apache-2.0
   What makes a message wait: the topic and the DELAY property that RocketMQ reads its delivery time from. */
#ifndef RMQ_SCHEDULE_H
#define RMQ_SCHEDULE_H

#include <stdint.h>
#include <string.h>

#define RMQ_SCHEDULE_TOPIC "SCHEDULE_TOPIC_XXXX"

static inline int rmq_is_schedule_topic(const uint8_t *topic, int64_t size) {
    return size == sizeof RMQ_SCHEDULE_TOPIC - 1 && memcmp(topic, RMQ_SCHEDULE_TOPIC, sizeof RMQ_SCHEDULE_TOPIC - 1) == 0;
}

/* Integer#parseInt of ASCII text. 0: Java throws NumberFormatException, or the digits are not ASCII. */
static inline int rmq_parse_int(const uint8_t *p, int64_t n, int64_t *value) {
    const int64_t sign = n > 0 && p[0] == '-' ? -1 : 1, largest = sign < 0 ? 0x80000000LL : 0x7FFFFFFFLL;
    int64_t i = n > 0 && (p[0] == '-' || p[0] == '+'), number = 0;
    if (i >= n) return 0;
    for (; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return 0;
        number = number * 10 + (p[i] - '0');
        if (number > largest) return 0;
    }
    *value = sign * number;
    return 1;
}

#endif
