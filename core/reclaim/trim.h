/*
 * Cached blocks that go back to the driver: those of one context until enough is back, of one class as decay asks for
 * it, or of all contexts down to the threshold. Nothing here waits for the GPU.
 */
#ifndef GR_TRIM_H
#define GR_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;
struct gr_core;

#define GR_TRIM_BATCH 64 /* allocations that go back with one wait for the driver */

/*
 * Gives allocations of the driver that nothing uses or knows any more back to it, count of them at ptrs, of sizes bytes
 * each. Returns the bytes that the device got back; what the driver does not take stays charged.
 */
uint64_t gr_trim_ptrs(struct gr_context *context, const uint64_t *ptrs, const uint64_t *sizes, size_t count);

/*
 * Gives idle cached blocks of context back, without waiting for anything: one that suffices, else the largest and
 * oldest first, until want_bytes are back. Returns the bytes that the device got back.
 */
uint64_t gr_trim(struct gr_context *context, uint64_t want_bytes);

/*
 * Gives back what the caches hold beyond threshold and soft limit, and what of the bins is in split's way. Returns
 * whether more is waiting for its fence.
 */
bool gr_core_maintain(struct gr_core *core);

/*
 * Gives idle blocks of one class back, oldest first, at most most_bytes of footprint and one batch. Returns the
 * footprint that left the cache. The class GR_CLASS_COUNT, here and below, stands for pool kind split.
 */
uint64_t gr_trim_class(struct gr_context *context, unsigned class, uint64_t most_bytes);

/* The footprint that no request of the class needed since the last call; at most what is there. */
uint64_t gr_trim_unneeded(struct gr_context *context, unsigned class);

#endif
