#include "system/platform.h"
#include "base/no_cancel.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Fields behind the name in /proc/PID/stat, with their numbers in proc(5). */
enum { FIELD_STATE = 3, FIELD_THREADS = 20, FIELD_START = 22 };

struct process_stat {
        char state;
        long threads;
        uint64_t start_ticks;
};

static int read_stat(const char *path, struct process_stat *ret)
{
        char text[1024], *field, *rest;
        ssize_t length = -1;
        int fd;
        GR_NO_CANCEL;

        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
                length = read(fd, text, sizeof(text) - 1);
                close(fd);
        }
        if (fd < 0)
                return -errno;
        if (length <= 0)
                return -ESRCH;
        text[length] = '\0';
        /* The name may contain blanks and parentheses, so the fields begin after the last parenthesis. */
        rest = strrchr(text, ')');
        if (!rest)
                return -EPROTO;
        rest++;
        for (int number = FIELD_STATE; number <= FIELD_START; number++) {
                field = strsep(&rest, " ");
                while (field && !*field && rest)
                        field = strsep(&rest, " ");
                if (!field)
                        return -EPROTO;
                if (number == FIELD_STATE)
                        ret->state = *field;
                else if (number == FIELD_THREADS)
                        ret->threads = strtol(field, NULL, 10);
                else if (number == FIELD_START)
                        ret->start_ticks = strtoull(field, NULL, 10);
        }
        return 0;
}

int gr_platform_identity(struct gr_identity *ret)
{
        struct process_stat process;
        struct stat namespace;
        int rc = read_stat("/proc/self/stat", &process);

        if (rc)
                return rc;
        if (stat("/proc/self/ns/pid", &namespace) != 0)
                return -errno;
        *ret = (struct gr_identity){
                .pid = (uint32_t)getpid(), .start_ticks = process.start_ticks, .pid_namespace = namespace.st_ino};
        return 0;
}

enum gr_process_state gr_platform_process_state(uint32_t pid, uint64_t *ret_start)
{
        struct process_stat process;
        char path[32];

        if (pid == 0 || pid > INT_MAX || (kill((pid_t)pid, 0) != 0 && errno == ESRCH))
                return GR_PROCESS_GONE;
        snprintf(path, sizeof(path), "/proc/%u/stat", pid);
        switch (read_stat(path, &process)) {
        case 0:
                break;
        case -ENOENT:
        case -ESRCH:
                return GR_PROCESS_GONE;
        default:
                return GR_PROCESS_UNKNOWN;
        }
        *ret_start = process.start_ticks;
        /* The main thread may have ended while others run; the memory is freed when the last one ends. */
        if ((process.state == 'Z' || process.state == 'X') && process.threads <= 1)
                return GR_PROCESS_GONE;
        return process.state == 'T' || process.state == 't' ? GR_PROCESS_STOPPED : GR_PROCESS_ALIVE;
}

bool gr_platform_left_alone(unsigned ours)
{
        struct process_stat process;

        /* A main thread that has ended still counts, as a zombie. */
        return read_stat("/proc/self/stat", &process) == 0 && process.state == 'Z' && process.threads - 1 <= (long)ours;
}

static uint64_t read_clock(clockid_t clock)
{
        struct timespec now;

        clock_gettime(clock, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t gr_platform_now_ns(void)
{
        return read_clock(CLOCK_MONOTONIC);
}

uint64_t gr_platform_thread_ns(void)
{
        return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

/*
 * Asks the kernel for a change of the signal mask by an unknown operation. It first reads the eight bytes, which may
 * fail with EFAULT, and then refuses the operation with EINVAL (docs/measurements.md, stack-cost).
 */
bool gr_platform_can_read(uint64_t address)
{
        return syscall(SYS_rt_sigprocmask, -1, address, NULL, 8) != 0 && errno == EINVAL;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                                   .tv_nsec = (long)(timeout_ns % 1000000000u)};

        syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

const struct gr_region_ops gr_platform_ops = {.now_ns = gr_platform_now_ns,
                                              .process_state = gr_platform_process_state,
                                              .wait = futex_wait,
                                              .wake = futex_wake};
