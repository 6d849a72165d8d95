/* Waits of the host for work that may use freed blocks, where no event of an epoch says enough (fence.h). */
#ifndef GR_FENCE_WAIT_H
#define GR_FENCE_WAIT_H

#include <stdint.h>

struct gr_fence;

/*
 * Waits for all work of all accessors. While captures are open the driver waits, by a free of pinned memory (drain).
 * -EBUSY: that is not possible, or one of the contexts is about to end. Else the driver's error. No lock above the
 * ladder's is held. Where events can be recorded, captures may begin while this waits.
 */
int gr_fence_sync(struct gr_fence *fence);

/* As gr_fence_sync, for the work of the context itself. 0, or the driver's error. */
int gr_fence_wait_work(struct gr_fence *fence);

/*
 * Waits for all work of all contexts that may use the memory, also of those that the fence has no room for: all of the
 * device, and those of other devices if one of them is an accessor. The work of one in which a kernel failed is over.
 */
int gr_fence_wait_all(struct gr_fence *fence);

/*
 * Waits for the context by a call of the driver. Even if events have passed, the driver gives back what was freed in
 * stream order only after such a call. For work that is known to have finished. -EBUSY: a capture is open.
 */
int gr_fence_wait_driver(struct gr_fence *fence);

/*
 * As gr_fence_sync with a deadline, for work that may never end. -ETIMEDOUT: an epoch has not passed by deadline_ns.
 * -EBUSY: no event can be recorded, and streams may still wait for others.
 */
int gr_fence_sync_by(struct gr_fence *fence, uint64_t deadline_ns);

#endif
