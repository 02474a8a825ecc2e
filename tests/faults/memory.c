/* One call of realloc fails: the number-th of so many bytes or more, once armed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static size_t least;
static long left;

void arm(size_t bytes, long number) { least = bytes, left = number; }

/* Whether it has failed since. */
int has_failed(void) { return left == 0; }

void *realloc(void *p, size_t size)
{
    static void *(*real)(void *, size_t);
    if (!real) real = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    if (left > 0 && size >= least && --left == 0) return NULL;
    return real(p, size);
}
