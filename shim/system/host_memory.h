/* How much memory the host has left. Linux only; no CUDA. */
#ifndef GR_HOST_MEMORY_H
#define GR_HOST_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Bytes that may be taken now, one take at a time: seven eighths of what is left before something has to be ended or is
 * slowed down for lack of memory. That is what the system calls available (MemAvailable of proc(5)), or less where a
 * control group of the process, or one above it, has less left (cgroups(7), versions 1 and 2; in version 2 also before
 * memory.high). Pages of files that a group has not used for long count as left. Where nothing is known, more than a
 * host can have. Any thread may call it; errno is kept.
 */
uint64_t gr_host_begin_taking(void);

/*
 * Before so many of these bytes are written for the first time: false where the last eighth is no longer there, as
 * others take memory, too. It looks now and then only. Any thread may call it; errno is kept.
 */
bool gr_host_may_take(uint64_t bytes);

#endif
