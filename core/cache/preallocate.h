/*
 * Preallocated blocks are taken from the driver although the bin has some, to save fences. Where a thread allocates and
 * frees blocks of one class in a loop, all blocks of its bin wait for a fence after each round through them. One fence
 * then readies all of them at once: a bin of n blocks pays for one fence in n allocations.
 *
 * Each fence that a bin pays for earns it one block (why one and not four: docs/measurements.md, preallocated-blocks).
 * Their number has bounds (preallocate.c). They are cached memory like any other: decay and the ladder give them back.
 *
 * No block above 1 MiB is preallocated. The GPU takes longer to write such a block than a fence takes, and a loop over
 * many of them does not stay in the GPU's cache, as one over few does.
 */
#ifndef GR_PREALLOCATE_H
#define GR_PREALLOCATE_H

#include <stdbool.h>

struct gr_arena;

/*
 * What to do where the bin of class in own, the calling thread's arena, has blocks, but none that is usable. True: take
 * one more from the driver; it has been counted as preallocated. False: look in the bin again, and if nothing is usable
 * pay for a fence. The bin may have usable blocks now: those of other arenas that were not in use for some epochs have
 * been moved to it. So blocks that threads left behind, because they ended or do something else, are used before the
 * driver is asked. No lock from GR_RANK_ARENA up is held.
 */
bool gr_preallocate_or_gather(struct gr_arena *own, unsigned class);

#endif
