/* SPDX-License-Identifier: Apache-2.0 */
/* Ask memory for a cache line before it is needed: to read it soon, or far ahead, or to write it. What comes only into
   the second-level cache does not wait for the few places of the first: of lines from anywhere in memory twice as many
   are on their way. */
#ifndef RMQ_PREFETCH_H
#define RMQ_PREFETCH_H

/* gcc drops a call to a function that does nothing but __builtin_prefetch; it keeps the instruction written out. */
#if defined(__x86_64__)
static inline void rmq_prefetch(const void *p) { __asm__ volatile("prefetcht0 %0" ::"m"(*(const char *)p)); }
static inline void rmq_prefetch_far(const void *p) { __asm__ volatile("prefetcht1 %0" ::"m"(*(const char *)p)); }
static inline void rmq_prefetch_to_write(const void *p) { __asm__ volatile("prefetchw %0" ::"m"(*(const char *)p)); }
#else
static inline void rmq_prefetch(const void *p) { __builtin_prefetch(p); }
static inline void rmq_prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }
static inline void rmq_prefetch_to_write(const void *p) { __builtin_prefetch(p, 1); }
#endif

#endif
