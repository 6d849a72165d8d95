/*
 * What the region (core/region/region.h) needs from the operating system. Linux only; no CUDA; used by the library, the
 * command and the simulated device. Any thread may call these; errno is not kept.
 */
#ifndef GR_PLATFORM_H
#define GR_PLATFORM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "region/region.h"

/* Identity of the calling process. 0 or -errno. It never changes; a child after fork has another one. */
int gr_platform_identity(struct gr_identity *ret);

/* The state of process pid and its start time, as struct gr_region_ops says. */
enum gr_process_state gr_platform_process_state(uint32_t pid, uint64_t *ret_start);

/*
 * Whether the main thread has ended and only threads of the library are left; `ours` says how many it has. They must
 * end then, too, because a process lives until its last thread ends.
 */
bool gr_platform_left_alone(unsigned ours);

/* Monotonic time since the machine was started, the same in all processes. */
uint64_t gr_platform_now_ns(void);

/* The time in ns from now, by the clock that a condition variable waits with. */
static inline struct timespec gr_platform_time_in(clockid_t clock, uint64_t ns)
{
        struct timespec time;

        clock_gettime(clock, &time);
        ns += (uint64_t)time.tv_nsec;
        time.tv_sec += (time_t)(ns / 1000000000);
        time.tv_nsec = (long)(ns % 1000000000);
        return time;
}

/* Processor time of the calling thread, which does not depend on other work of the machine. */
uint64_t gr_platform_thread_ns(void);

/* Whether eight bytes at this address can be read. */
bool gr_platform_can_read(uint64_t address);

extern const struct gr_region_ops gr_platform_ops;

#endif
