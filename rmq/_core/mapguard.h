/* SPDX-License-Identifier: Apache-2.0
   Maps of files that others may truncate. A page that is gone raises SIGBUS; for a guarded map the handler puts a page of
   zeros in its place and notes where, so that the process lives and whoever reads asks afterwards. Linux and other POSIX.
   No lock: guards are added and removed under the GIL, and the handler only walks a list whose items are never freed. */
#ifndef RMQ_MAPGUARD_H
#define RMQ_MAPGUARD_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct rmq_guard {
    uintptr_t begin;
    size_t size;           /* 0: free for the next map */
    int64_t lost;          /* position of the first page that was gone, -1: none */
    uintptr_t run_end;     /* behind the pages replaced last */
    size_t run_size;
    struct rmq_guard *next;
} rmq_guard;

static rmq_guard *rmq_guards;
static int64_t rmq_lost_count;
static struct sigaction rmq_previous;

/* Neighbours of a page that is gone are mostly gone too: each run is twice the one before it, so a large file that was
   cut costs few signals. What such a run covers beyond is taken for lost. */
static int rmq_replace(rmq_guard *guard, uintptr_t address) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = address & ~(page - 1);
    const uintptr_t end = (guard->begin + guard->size + page - 1) & ~(page - 1);
    size_t size = begin == guard->run_end ? guard->run_size * 2 : page;
    if (size > end - begin) size = end - begin;
    if (mmap((void *)begin, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
        return 0;
    guard->run_end = begin + size;
    guard->run_size = size;
    const int64_t position = (int64_t)(begin - guard->begin);
    if (guard->lost < 0 || position < guard->lost) guard->lost = position;
    __atomic_add_fetch(&rmq_lost_count, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static void rmq_on_sigbus(int number, siginfo_t *info, void *context) {
    const int saved = errno;
    const uintptr_t address = (uintptr_t)info->si_addr;
    if (info->si_code > 0) { /* the kernel's, not somebody's kill */
        for (rmq_guard *guard = __atomic_load_n(&rmq_guards, __ATOMIC_ACQUIRE); guard; guard = guard->next) {
            const size_t size = __atomic_load_n(&guard->size, __ATOMIC_ACQUIRE);
            if (address >= guard->begin && address - guard->begin < size && rmq_replace(guard, address)) {
                errno = saved;
                return;
            }
        }
    }
    errno = saved;
    if (rmq_previous.sa_flags & SA_SIGINFO) {
        rmq_previous.sa_sigaction(number, info, context);
    } else if (rmq_previous.sa_handler != SIG_DFL && rmq_previous.sa_handler != SIG_IGN) {
        rmq_previous.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* Make sure that the handler is the first to be called. 0, or -1 with errno. */
static int rmq_guard_install(void) {
    struct sigaction action, now;
    if (sigaction(SIGBUS, NULL, &now)) return -1;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == rmq_on_sigbus) return 0;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = rmq_on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    rmq_previous = now;
    return sigaction(SIGBUS, &action, NULL);
}

/* NULL when memory is short. REQUIRES: the GIL. */
static rmq_guard *rmq_guard_add(void *begin, size_t size) {
    rmq_guard *guard = rmq_guards;
    while (guard && guard->size) guard = guard->next;
    const int is_new = guard == NULL;
    if (is_new) {
        guard = (rmq_guard *)calloc(1, sizeof *guard);
        if (!guard) return NULL;
        guard->next = rmq_guards;
    }
    guard->begin = (uintptr_t)begin;
    guard->lost = -1;
    guard->run_end = 0;
    guard->run_size = 0;
    __atomic_store_n(&guard->size, size, __ATOMIC_RELEASE);
    if (is_new) __atomic_store_n(&rmq_guards, guard, __ATOMIC_RELEASE);
    return guard;
}

static void rmq_guard_remove(rmq_guard *guard) { __atomic_store_n(&guard->size, 0, __ATOMIC_RELEASE); }

#endif
