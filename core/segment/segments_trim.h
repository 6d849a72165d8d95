/* Returns free memory of segments to the driver. The functions may call the driver; no lock is held. */
#ifndef GR_SEGMENTS_TRIM_H
#define GR_SEGMENTS_TRIM_H

#include <stdbool.h>
#include <stdint.h>

struct gr_context;
struct gr_core;
struct gr_device;

/*
 * Merges the fastbins, then gives back, without waiting, what was left for later and idle free segments and extents,
 * until that is want_bytes. Returns the bytes that the device got back.
 */
uint64_t gr_segments_trim(struct gr_context *context, uint64_t want_bytes);

/*
 * For decay: gives idle free segments and extents back, at most most_bytes and one batch. Returns the bytes that left
 * the cache.
 */
uint64_t gr_segments_trim_most(struct gr_context *context, uint64_t most_bytes);

/* The low water of the surplus: what no request needed since the last call. Starts it anew, with merged fastbins. */
uint64_t gr_segments_trim_unneeded(struct gr_context *context);

/* Empties the fastbins and merges their ranges, so that whole extents become free and can go back. */
void gr_segments_trim_merge_fastbins(struct gr_context *context);

/*
 * Called before gr_budget_share: merges the fastbins of all contexts of a device, and collects
 * (gr_segments_trim_collect). Ranges in fastbins count as used, so the free memory beside them would count as stranded.
 * After this only blocks of the program strand memory.
 */
void gr_segments_trim_merge_and_collect(struct gr_core *core, struct gr_device *device);

/* Closes the open epoch, if anything is left for later, and gives that back if it is idle (gr_expandable_collect). */
void gr_segments_trim_collect(struct gr_context *context);

/* Whether there is no surplus, and nothing was left for later. */
bool gr_segments_trim_has_none(struct gr_context *context);

#endif
