/*
 * What the region between processes needs from the system. Linux only; no CUDA; used by the library, by the command and
 * by the simulated device. Any thread may call these; errno is not kept.
 */
#ifndef GR_PLATFORM_H
#define GR_PLATFORM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

/* Of the calling process. 0 or -errno; *ret is final for the life of the process, but not for its children. */
int gr_system_identity(struct gr_identity *ret);

/* As struct gr_region_ops says. */
enum gr_peer gr_system_peer(uint32_t pid, uint64_t *ret_start);

/*
 * Whether the main thread has ended and no more than ours threads are left. The C library ends a process with its last
 * thread; ours must not keep it alive, so they end where this is true, and the last of them takes the process along.
 */
bool gr_system_left_alone(unsigned ours);

/* Monotonic, the same in every process since the machine was started. */
uint64_t gr_system_now_ns(void);

/* Of the processor, used by the calling thread: what work cost, however busy the machine was. */
uint64_t gr_system_thread_ns(void);

extern const struct gr_region_ops gr_system_ops;

#endif
