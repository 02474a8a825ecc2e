/* SPDX-License-Identifier: Apache-2.0
   How often this process is a fork's child: asking costs a load, where getpid is a system call. */
#ifndef RMQ_FORKS_H
#define RMQ_FORKS_H

#include <pthread.h>
#include <stdint.h>

static int64_t rmq_forks;

static void rmq_count_fork(void) { rmq_forks++; }

/* Count from now on. 0, or an error number. REQUIRES: called once. */
static int rmq_forks_install(void) { return pthread_atfork(NULL, NULL, rmq_count_fork); }

#endif
