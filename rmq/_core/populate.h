/* SPDX-License-Identifier: Apache-2.0
   Pages that are about to be written get into memory together: one by one each is a fault of its own, which takes longer
   than what is written. Nothing changes; where the system cannot, or pages are gone, the stores find out. */
#ifndef RMQ_POPULATE_H
#define RMQ_POPULATE_H

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; EINVAL before */
#endif

enum { RMQ_LARGE_PAGE = 2 * 1024 * 1024 };

/* Pages of the bytes [begin, begin + size) of one writable map. */
static inline void rmq_populate(uint8_t *begin, int64_t size) {
#if defined(MADV_POPULATE_WRITE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)begin & ~(page - 1);
    if (size > 0) (void)madvise((void *)first, (uintptr_t)begin + (uintptr_t)size - first, MADV_POPULATE_WRITE);
#else
    (void)begin, (void)size;
#endif
}

/* Large pages for memory that is filled front to back: fewer faults. Whoever has the memory later may get them too. */
static inline void rmq_ask_large(void *begin, int64_t size) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)begin + page - 1) & ~(page - 1);
    if (size >= RMQ_LARGE_PAGE) (void)madvise((void *)first, (uintptr_t)begin + (uintptr_t)size - first, MADV_HUGEPAGE);
#else
    (void)begin, (void)size;
#endif
}

#endif
