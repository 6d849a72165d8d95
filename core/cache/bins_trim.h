/*
 * Returns blocks of bins to the driver. Nothing here waits for the GPU, and no lock is held. A batch is returned with
 * one wait for the driver.
 */
#ifndef GR_BINS_TRIM_H
#define GR_BINS_TRIM_H

#include <stddef.h>
#include <stdint.h>

struct gr_context;

#define GR_TRIM_BATCH 64 /* allocations that are returned with one wait for the driver */

/*
 * Returns allocations to the driver, count of them at ptrs, of sizes bytes each. They are idle and in no list or
 * ledger. Returns the bytes that the device got back; an allocation that the driver refuses to free stays charged.
 */
uint64_t gr_bins_trim_ptrs(struct gr_context *context, const uint64_t *ptrs, const uint64_t *sizes, size_t count);

/*
 * Returns idle blocks of bins: one block that suffices, or else the largest classes first and of each class the oldest
 * blocks, until want_bytes are returned. Returns the bytes that the device got back.
 */
uint64_t gr_bins_trim(struct gr_context *context, uint64_t want_bytes);

/*
 * Returns idle blocks of one class, oldest first, at most most_bytes of footprint and one batch. Returns the footprint
 * that left the cache.
 */
uint64_t gr_bins_trim_class(struct gr_context *context, unsigned class, uint64_t most_bytes);

/* The footprint of the low water of the class: what no request needed since the last call. Starts it anew. */
uint64_t gr_bins_trim_unneeded(struct gr_context *context, unsigned class);

#endif
