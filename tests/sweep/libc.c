/*
 * Functions of the C library as the library sees them: a program's own come before all others. They count the calls
 * whose code is the library's, leave an errno, and let the one that is planned fail.
 */
#include "sweep.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct sweep_report *sweep_report;
struct sweep_plan sweep_plan;
bool sweep_beside;

static uintptr_t library_begin, library_end;

static int look(struct dl_phdr_info *info, size_t bytes, void *arg)
{
        (void)bytes;
        (void)arg;
        if (!info->dlpi_name || !strstr(info->dlpi_name, "libgpureclaim"))
                return 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr) *part = &info->dlpi_phdr[i];
                uintptr_t begin = info->dlpi_addr + part->p_vaddr;

                if (part->p_type != PT_LOAD || !(part->p_flags & PF_X))
                        continue;
                library_begin = begin;
                library_end = begin + part->p_memsz;
        }
        return 1;
}

void sweep_find_library(void)
{
        dl_iterate_phdr(look, NULL);
}

bool sweep_has_library(void)
{
        return library_end > 0;
}

/* For a debugger to stop at. */
static __attribute__((noinline)) void happens(void)
{
        atomic_store(&sweep_report->refused, true);
}

/* 0, or what this call has to fail with. */
static int due(enum sweep_function function, const void *caller)
{
        uintptr_t at = (uintptr_t)caller;
        unsigned long nth;

        if (at < library_begin || at >= library_end || !sweep_report)
                return 0;
        errno = SWEEP_ERRNO;
        nth = atomic_fetch_add(&sweep_report->calls[function], 1) + 1;
        if (sweep_plan.nth != nth || sweep_plan.function != function)
                return 0;
        happens();
        return sweep_plan.error;
}

#define DUE(function)                                                                                                  \
        ({                                                                                                             \
                int due_error = due(SWEEP_CALL_##function, __builtin_return_address(0));                               \
                if (due_error && due_error != SWEEP_SHORT)                                                             \
                        errno = due_error;                                                                             \
                due_error;                                                                                             \
        })

/* The next function of that name, by its name in the library's table of symbols. */
#define NEXT(name, symbol, ...)                                                                                        \
        static __typeof__(&(name)) next;                                                                               \
        if (!next)                                                                                                     \
                *(void **)&next = dlsym(RTLD_NEXT, symbol);                                                            \
        return next(__VA_ARGS__)

#pragma GCC visibility push(default) /* the program's come first only where they are seen */

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
        *__libc_memalign(size_t, size_t);

void *malloc(size_t bytes)
{
        return DUE(malloc) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
        return DUE(calloc) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *ptr, size_t bytes)
{
        return DUE(realloc) ? NULL : __libc_realloc(ptr, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
        return DUE(aligned_alloc) ? NULL : __libc_memalign(alignment, bytes);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
        int error = DUE(pthread_create);

        if (error)
                return error;
        NEXT(pthread_create, "pthread_create", thread, attributes, run, arg);
}

int open(const char *path, int flags, ...)
{
        va_list args;
        mode_t mode;

        va_start(args, flags);
        mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
        va_end(args);
        if (DUE(open))
                return -1;
        NEXT(open, "open64", path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
        va_list args;
        mode_t mode;

        va_start(args, flags);
        mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
        va_end(args);
        if (DUE(openat))
                return -1;
        NEXT(openat, "openat64", folder, path, flags, mode);
}

int mkdir(const char *path, mode_t mode)
{
        if (DUE(mkdir))
                return -1;
        NEXT(mkdir, "mkdir", path, mode);
}

/* The library calls these for stat, lstat and fstat (tools/glibc/stat.c). */
#define STAT(name, old, type)                                                                                          \
        int old(int version, type file, struct stat *ret);                                                             \
        int old(int version, type file, struct stat *ret)                                                              \
        {                                                                                                              \
                if (DUE(name))                                                                                         \
                        return -1;                                                                                     \
                NEXT(old, #old, version, file, ret);                                                                   \
        }
STAT(stat, __xstat64, const char *)
STAT(lstat, __lxstat64, const char *)
STAT(fstat, __fxstat64, int)

int flock(int fd, int kind)
{
        if (DUE(flock))
                return -1;
        NEXT(flock, "flock", fd, kind);
}

int fcntl(int fd, int what, ...)
{
        va_list args;
        long arg;

        va_start(args, what);
        arg = va_arg(args, long);
        va_end(args);
        if (DUE(fcntl))
                return -1;
        NEXT(fcntl, "fcntl64", fd, what, arg);
}

int ftruncate(int fd, off_t bytes)
{
        if (DUE(ftruncate))
                return -1;
        NEXT(ftruncate, "ftruncate64", fd, bytes);
}

/* How much of a read or write is done, or -1. */
static size_t part_of(size_t bytes, int error)
{
        return error == SWEEP_SHORT ? bytes / 2 : bytes;
}

ssize_t read(int fd, void *buffer, size_t bytes)
{
        int error = DUE(read);

        if (error && error != SWEEP_SHORT)
                return -1;
        NEXT(read, "read", fd, buffer, part_of(bytes, error));
}

ssize_t pread(int fd, void *buffer, size_t bytes, off_t at)
{
        int error = DUE(pread);

        if (error && error != SWEEP_SHORT)
                return -1;
        NEXT(pread, "pread64", fd, buffer, part_of(bytes, error), at);
}

ssize_t write(int fd, const void *buffer, size_t bytes)
{
        int error = DUE(write);

        if (error && error != SWEEP_SHORT)
                return -1;
        NEXT(write, "write", fd, buffer, part_of(bytes, error));
}

ssize_t pwrite(int fd, const void *buffer, size_t bytes, off_t at)
{
        int error = DUE(pwrite);

        if (error && error != SWEEP_SHORT)
                return -1;
        NEXT(pwrite, "pwrite64", fd, buffer, part_of(bytes, error), at);
}

int unlinkat(int folder, const char *path, int flags)
{
        if (DUE(unlinkat))
                return -1;
        NEXT(unlinkat, "unlinkat", folder, path, flags);
}

int kill(pid_t pid, int signal)
{
        if (DUE(kill))
                return -1;
        NEXT(kill, "kill", pid, signal);
}

int madvise(void *begin, size_t bytes, int advice)
{
        if (DUE(madvise))
                return -1;
        NEXT(madvise, "madvise", begin, bytes, advice);
}

int shmget(key_t key, size_t bytes, int flags)
{
        if (DUE(shmget))
                return -1;
        NEXT(shmget, "shmget", key, bytes, flags);
}

void *shmat(int id, const void *at, int flags)
{
        if (DUE(shmat))
                return (void *)-1;
        NEXT(shmat, "shmat", id, at, flags);
}

int shmctl(int id, int what, struct shmid_ds *buffer)
{
        if (DUE(shmctl))
                return -1;
        NEXT(shmctl, "shmctl", id, what, buffer);
}

ssize_t getrandom(void *buffer, size_t bytes, unsigned flags)
{
        if (DUE(getrandom))
                return -1;
        NEXT(getrandom, "getrandom", buffer, bytes, flags);
}

int socket(int domain, int type, int protocol)
{
        if (DUE(socket))
                return -1;
        NEXT(socket, "socket", domain, type, protocol);
}

int bind(int fd, const struct sockaddr *address, socklen_t bytes)
{
        if (DUE(bind))
                return -1;
        NEXT(bind, "bind", fd, address, bytes);
}

int listen(int fd, int backlog)
{
        if (DUE(listen))
                return -1;
        NEXT(listen, "listen", fd, backlog);
}

int accept4(int fd, struct sockaddr *restrict address, socklen_t *restrict bytes, int flags)
{
        if (DUE(accept4))
                return -1;
        NEXT(accept4, "accept4", fd, address, bytes, flags);
}

int connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
        if (DUE(connect))
                return -1;
        NEXT(connect, "connect", fd, address, bytes);
}

int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict bytes)
{
        if (DUE(getsockopt))
                return -1;
        NEXT(getsockopt, "getsockopt", fd, level, name, value, bytes);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes)
{
        if (DUE(setsockopt))
                return -1;
        NEXT(setsockopt, "setsockopt", fd, level, name, value, bytes);
}

int poll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
        if (DUE(poll))
                return -1;
        NEXT(poll, "poll", fds, count, timeout_ms);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
        if (DUE(sendmsg))
                return -1;
        NEXT(sendmsg, "sendmsg", fd, message, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
        if (DUE(recvmsg))
                return -1;
        NEXT(recvmsg, "recvmsg", fd, message, flags);
}

long syscall(long number, ...)
{
        va_list args;
        long a[6];

        va_start(args, number);
        for (int i = 0; i < 6; i++)
                a[i] = va_arg(args, long);
        va_end(args);
        if (DUE(syscall))
                return -1;
        NEXT(syscall, "syscall", number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

void *dlopen(const char *file, int flags)
{
        if (DUE(dlopen))
                return NULL;
        NEXT(dlopen, "dlopen", file, flags);
}

#pragma GCC visibility pop
