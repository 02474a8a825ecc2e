/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded: counts the system calls on files below a root and lets the N-th one fail, once.
 *
 * fault_root(path)       files below it count; descriptors are known from their opening on
 * fault_arm(n, error)    the n-th call from now on fails; n 0: none does; error -1: half a write is done
 * fault_count()          calls since then
 * fault_trace()          "operation path" of each of them, a line each
 * fault_hit()            "operation path" of the call that failed, or ""
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define DESCRIPTORS 4096
#define PATH 512
#define TRACE (4 << 20)

static char root[PATH], paths[DESCRIPTORS][PATH], hit[PATH + 32], trace[TRACE];
static size_t root_size, trace_size;
static long armed, count;
static int planned;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fault_root(const char *path)
{
    snprintf(root, sizeof root, "%s", path);
    root_size = strlen(root);
    memset(paths, 0, sizeof paths);
}

void fault_arm(long n, int error)
{
    pthread_mutex_lock(&lock);
    armed = n, planned = error, count = 0, trace_size = 0, hit[0] = trace[0] = 0;
    pthread_mutex_unlock(&lock);
}

long fault_count(void) { return count; }
const char *fault_trace(void) { return trace; }
const char *fault_hit(void) { return hit; }

static int is_below(const char *path)
{
    return root_size && path && !strncmp(path, root, root_size) && (path[root_size] == '/' || !path[root_size]);
}

static const char *path_of(int descriptor)
{
    return descriptor >= 0 && descriptor < DESCRIPTORS && paths[descriptor][0] ? paths[descriptor] : NULL;
}

static void know(int descriptor, const char *path)
{
    if (descriptor >= 0 && descriptor < DESCRIPTORS)
        snprintf(paths[descriptor], PATH, "%s", is_below(path) ? path : "");
}

/* The error that a call is to fail with; 0: none. */
static int fault(const char *operation, const char *path)
{
    int error = 0;
    if (!is_below(path))
        return 0;
    pthread_mutex_lock(&lock);
    count++;
    if (trace_size + PATH + 64 < TRACE)
        trace_size += snprintf(trace + trace_size, PATH + 64, "%s %s\n", operation, path + root_size);
    if (count == armed) {
        snprintf(hit, sizeof hit, "%s %s", operation, path + root_size);
        error = planned;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* `real` is the libc function of that name; a call that fails returns `failed`. */
#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define FAIL(operation, path, failed) \
    do { \
        int error_ = fault(operation, path); \
        if (error_ > 0) { \
            errno = error_; \
            return failed; \
        } \
    } while (0)

static int opened(int descriptor, const char *path)
{
    know(descriptor, path);
    return descriptor;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(name); \
        FAIL(flags & O_CREAT ? "create" : "open", path, -1); \
        return opened(real(path, flags, mode), path); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) \
    { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        REAL(name); \
        FAIL(flags & O_CREAT ? "create" : "open", path, -1); \
        return opened(real(directory, path, flags, mode), path); \
    }
OPENAT(openat)
OPENAT(openat64)

/* Linux gives the descriptor back even when close tells of an error. */
int close(int descriptor)
{
    REAL(close);
    int error = fault("close", path_of(descriptor));
    know(descriptor, "");
    int answer = real(descriptor);
    if (error > 0) {
        errno = error;
        return -1;
    }
    return answer;
}

DIR *opendir(const char *path)
{
    REAL(opendir);
    FAIL("opendir", path, NULL);
    DIR *stream = real(path);
    if (stream)
        know(dirfd(stream), path);
    return stream;
}

struct dirent *readdir(DIR *stream)
{
    REAL(readdir);
    FAIL("readdir", path_of(dirfd(stream)), NULL);
    return real(stream);
}

struct dirent64 *readdir64(DIR *stream)
{
    REAL(readdir64);
    FAIL("readdir", path_of(dirfd(stream)), NULL);
    return real(stream);
}

int closedir(DIR *stream)
{
    REAL(closedir);
    know(dirfd(stream), "");
    return real(stream);
}

#define BY_DESCRIPTOR(type, name, operation, parameters, arguments) \
    type name parameters \
    { \
        REAL(name); \
        FAIL(operation, path_of(descriptor), -1); \
        return real arguments; \
    }
#define BY_PATH(name, operation, parameters, arguments) \
    int name parameters \
    { \
        REAL(name); \
        FAIL(operation, path, -1); \
        return real arguments; \
    }
#define WRITE(name, parameters, arguments) \
    ssize_t name parameters \
    { \
        REAL(name); \
        int error = fault(#name[0] == 'p' ? "pwrite" : "write", path_of(descriptor)); \
        if (error > 0) { \
            errno = error; \
            return -1; \
        } \
        if (error && size > 1) \
            size /= 2; \
        return real arguments; \
    }

BY_DESCRIPTOR(ssize_t, read, "read", (int descriptor, void *data, size_t size), (descriptor, data, size))
BY_DESCRIPTOR(ssize_t, pread, "pread", (int descriptor, void *data, size_t size, off_t at), (descriptor, data, size, at))
BY_DESCRIPTOR(ssize_t, pread64, "pread", (int descriptor, void *data, size_t size, off64_t at),
              (descriptor, data, size, at))
WRITE(write, (int descriptor, const void *data, size_t size), (descriptor, data, size))
WRITE(pwrite, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at))
WRITE(pwrite64, (int descriptor, const void *data, size_t size, off64_t at), (descriptor, data, size, at))
BY_DESCRIPTOR(int, ftruncate, "ftruncate", (int descriptor, off_t size), (descriptor, size))
BY_DESCRIPTOR(int, ftruncate64, "ftruncate", (int descriptor, off64_t size), (descriptor, size))
BY_DESCRIPTOR(int, fallocate, "fallocate", (int descriptor, int mode, off_t at, off_t size), (descriptor, mode, at, size))
BY_DESCRIPTOR(int, fallocate64, "fallocate", (int descriptor, int mode, off64_t at, off64_t size),
              (descriptor, mode, at, size))
BY_DESCRIPTOR(int, fsync, "fsync", (int descriptor), (descriptor))
BY_DESCRIPTOR(int, fdatasync, "fdatasync", (int descriptor), (descriptor))
BY_DESCRIPTOR(off_t, lseek, "lseek", (int descriptor, off_t at, int whence), (descriptor, at, whence))
BY_DESCRIPTOR(off64_t, lseek64, "lseek", (int descriptor, off64_t at, int whence), (descriptor, at, whence))
BY_DESCRIPTOR(int, fstat, "fstat", (int descriptor, struct stat *answer), (descriptor, answer))
BY_DESCRIPTOR(int, fstat64, "fstat", (int descriptor, struct stat64 *answer), (descriptor, answer))
BY_PATH(stat, "stat", (const char *path, struct stat *answer), (path, answer))
BY_PATH(stat64, "stat", (const char *path, struct stat64 *answer), (path, answer))
BY_PATH(lstat, "stat", (const char *path, struct stat *answer), (path, answer))
BY_PATH(lstat64, "stat", (const char *path, struct stat64 *answer), (path, answer))
BY_PATH(fstatat, "stat", (int directory, const char *path, struct stat *answer, int flags),
        (directory, path, answer, flags))
BY_PATH(fstatat64, "stat", (int directory, const char *path, struct stat64 *answer, int flags),
        (directory, path, answer, flags))
BY_PATH(rename, "rename", (const char *path, const char *target), (path, target))
BY_PATH(renameat, "rename", (int directory, const char *path, int other, const char *target),
        (directory, path, other, target))
BY_PATH(unlink, "unlink", (const char *path), (path))
BY_PATH(unlinkat, "unlink", (int directory, const char *path, int flags), (directory, path, flags))
BY_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode))
BY_PATH(mkdirat, "mkdir", (int directory, const char *path, mode_t mode), (directory, path, mode))

#define FALLOCATE(name, type) \
    int name(int descriptor, type at, type size) \
    { \
        REAL(name); \
        int error = fault("fallocate", path_of(descriptor)); \
        return error > 0 ? error : real(descriptor, at, size); \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

#define MMAP(name, type) \
    void *name(void *address, size_t size, int protection, int flags, int descriptor, type at) \
    { \
        REAL(name); \
        FAIL("mmap", path_of(descriptor), MAP_FAILED); \
        return real(address, size, protection, flags, descriptor, at); \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

#define FCNTL(name) \
    int name(int descriptor, int command, ...) \
    { \
        va_list more; \
        va_start(more, command); \
        void *argument = va_arg(more, void *); \
        va_end(more); \
        REAL(name); \
        int is_copy = command == F_DUPFD || command == F_DUPFD_CLOEXEC; \
        int is_lock = command == F_OFD_SETLK || command == F_OFD_GETLK || command == F_SETLK || command == F_GETLK; \
        if (!is_copy && !is_lock) \
            return real(descriptor, command, argument); \
        FAIL(is_copy ? "dup" : "lock", path_of(descriptor), -1); \
        int answer = real(descriptor, command, argument); \
        if (is_copy && answer >= 0) \
            know(answer, path_of(descriptor)); \
        return answer; \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
