/* SPDX-License-Identifier: Apache-2.0
   Which edges of the compiled modules an input reaches. gcc -fsanitize-coverage=trace-pc calls in at each block. */
#include <stdint.h>
#include <string.h>

enum { SIZE = 1 << 16 };

static uint8_t hits[SIZE];       /* of this input, by edge */
static uint8_t seen[SIZE];       /* of all inputs: a bit for each of eight ranges of hits */
static uint32_t edges;
static __thread uintptr_t before;

void __sanitizer_cov_trace_pc(void) {
    const uintptr_t here = (uintptr_t)__builtin_return_address(0);
    uint8_t *hit = &hits[((here >> 2) ^ (before << 1)) % SIZE];
    *hit += *hit < 255;
    before = here >> 2;
}

/* Forget what was hit: the next input begins. */
void coverage_begin(void) {
    memset(hits, 0, SIZE);
    before = 0;
}

/* How many edges were hit for the first time, or in a new range of counts, since coverage_begin. */
uint32_t coverage_end(void) {
    uint32_t fresh = 0;
    for (uint32_t word = 0; word < SIZE; word += 8) {
        uint64_t eight;
        memcpy(&eight, hits + word, 8);
        if (eight == 0)
            continue;
        for (uint32_t i = word; i < word + 8; i++) {
            const uint8_t n = hits[i];
            if (n == 0)
                continue;
            const uint8_t range = n < 4 ? 1 << (n - 1) : n < 8 ? 8 : n < 16 ? 16 : n < 32 ? 32 : n < 128 ? 64 : 128;
            if (seen[i] & range)
                continue;
            edges += seen[i] == 0;
            seen[i] |= range;
            fresh++;
        }
    }
    return fresh;
}

/* Edges that any input has hit. */
uint32_t coverage_edges(void) {
    return edges;
}
