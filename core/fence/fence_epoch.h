/* What fence_wait.c needs of the epochs of a fence (fence.c). For the files of core/fence only. */
#ifndef GR_FENCE_EPOCH_H
#define GR_FENCE_EPOCH_H

#include <stdbool.h>
#include <stdint.h>

#include "fence/fence.h"

#define GR_KERNEL_FAILED 700 /* CUDA errors from here on come from kernels: every call of the program returns them */

/*
 * After a failed call: -EBUSY if it may be repeated later, as an unknown capture is open or the driver lacks memory.
 * Any other failure breaks the fence.
 */
int gr_fence_failed(struct gr_fence *fence, int rc);

/* As gr_fence_close, even if nothing was freed. *ret_epoch: the epoch that was open. */
int gr_fence_close_always(struct gr_fence *fence, uint64_t *ret_epoch);

/*
 * Ends the open epoch without an event: what is freed from now on belongs to the next one. gr_fence_all_passed: all
 * work submitted before that is done. The fence's lock is held at both.
 */
struct gr_epoch gr_fence_end_epoch(struct gr_fence *fence);
void gr_fence_all_passed(struct gr_fence *fence, const struct gr_epoch *all);

/* Waits for all accessors by the driver's own call, which has no deadline. -EBUSY: a capture is open. */
int gr_fence_sync_by_driver(struct gr_fence *fence);

#endif
