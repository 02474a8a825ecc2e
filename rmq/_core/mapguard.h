/* SPDX-License-Identifier: Apache-2.0
   Maps of files that others may truncate. A page that is gone raises SIGBUS; for a guarded map the handler puts a page of
   zeros in its place and notes where, so that the process lives and whoever reads asks afterwards. Linux and other POSIX.
   No lock: guards are added and removed under the GIL, and the handler only walks a list whose items are never freed. */
#ifndef RMQ_MAPGUARD_H
#define RMQ_MAPGUARD_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

typedef struct rmq_guard {
    uintptr_t begin;
    size_t size;           /* 0: guards nothing */
    int64_t lost;          /* position of the first page that was gone, -1: none */
    size_t run_size;       /* of the pages replaced last */
    int is_taken;
    struct rmq_guard *next;
} rmq_guard;

static rmq_guard *rmq_guards;
static int64_t rmq_lost_count;
static struct sigaction rmq_previous;

static int rmq_put_zeros(uintptr_t begin, size_t size) {
    return mmap((void *)begin, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

/* Whether a page can be read, without a signal: the kernel copies from it before it looks at a `how` that is none. */
static int rmq_is_readable(uintptr_t page) {
#if defined(__linux__)
    return syscall(SYS_rt_sigprocmask, -1, page, NULL, 8L) == 0 || errno != EFAULT;
#else
    (void)page;
    return 0;
#endif
}

/* Each run is twice the one before it, so a large file that was cut costs few signals and, wherever it is touched, few of
   the maps that a process may have. It ends before the first page that is there: where the disk cannot read one page,
   those behind it are good. */
static int rmq_replace(rmq_guard *guard, uintptr_t address) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = address & ~(page - 1);
    const uintptr_t end = (guard->begin + guard->size + page - 1) & ~(page - 1);
    if (begin >= end) return 0; /* the guard went to another map meanwhile */
    size_t size = page, most = guard->run_size ? guard->run_size * 2 : page;
    if (most > end - begin) most = end - begin;
    while (size < most && !rmq_is_readable(begin + size)) size += page;
    if (!rmq_put_zeros(begin, size)) {
        size = end - begin; /* up to the end it needs one map less */
        if (!rmq_put_zeros(begin, size)) return 0;
    }
    if (size > guard->run_size) guard->run_size = size;
    const int64_t position = (int64_t)(begin - guard->begin);
    if (guard->lost < 0 || position < guard->lost) guard->lost = position;
    __atomic_add_fetch(&rmq_lost_count, 1, __ATOMIC_SEQ_CST);
    return 1;
}

/* faulthandler restores the handler that it found, which may be ours, and raises again: that ends the process. */
static void rmq_pass_on(int number, siginfo_t *info, void *context) {
    static uintptr_t passing; /* the thread whose signal the previous handler has */
    const uintptr_t self = (uintptr_t)pthread_self();
    const int is_again = __atomic_exchange_n(&passing, self, __ATOMIC_SEQ_CST) == self;
    if (!is_again && rmq_previous.sa_flags & SA_SIGINFO) {
        rmq_previous.sa_sigaction(number, info, context);
    } else if (!is_again && rmq_previous.sa_handler != SIG_DFL && rmq_previous.sa_handler != SIG_IGN) {
        rmq_previous.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
    __atomic_store_n(&passing, 0, __ATOMIC_SEQ_CST);
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
    rmq_pass_on(number, info, context);
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
    const uintptr_t first = (uintptr_t)begin;
    rmq_guard *guard, *made = NULL;
    for (guard = rmq_guards; guard; guard = guard->next) {
        if (!guard->is_taken) made = guard;
        else if (guard->begin < first + size && first < guard->begin + guard->size) /* its map was just closed */
            __atomic_store_n(&guard->size, 0, __ATOMIC_RELEASE);
    }
    const int is_new = made == NULL;
    if (is_new) {
        made = (rmq_guard *)calloc(1, sizeof *made);
        if (!made) return NULL;
        made->next = rmq_guards;
    }
    made->begin = first;
    made->lost = -1;
    made->run_size = 0;
    made->is_taken = 1;
    __atomic_store_n(&made->size, size, __ATOMIC_RELEASE);
    if (is_new) __atomic_store_n(&rmq_guards, made, __ATOMIC_RELEASE);
    return made;
}

/* REQUIRES: the GIL. */
static void rmq_guard_remove(rmq_guard *guard) {
    __atomic_store_n(&guard->size, 0, __ATOMIC_RELEASE);
    guard->is_taken = 0;
}

#endif
