/* How much memory the host has left. Linux only; no CUDA. */
#ifndef GR_HOST_MEMORY_H
#define GR_HOST_MEMORY_H

#include <stdint.h>

/*
 * Bytes that may be taken before something has to be ended for lack of memory: what the system calls available
 * (MemAvailable of proc(5)), or less where a control group of the process, or one above it, has less left
 * (cgroups(7), versions 1 and 2). Pages of files that a group has not used for long count as left. UINT64_MAX: nothing
 * is known. Any thread may call it; errno is kept.
 */
uint64_t gr_host_free_bytes(void);

#endif
