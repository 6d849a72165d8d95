/*
 * Trim returns cached memory of bins (cache/bins_trim.h) and of segments (segment/segments_trim.h) to the driver: of
 * one context until enough is returned, or of all contexts down to the limits on the cache. No lock is held at the
 * calls. Nothing here waits for the GPU, except gr_trim_excess with older drivers, which cannot record an event for a
 * whole context.
 */
#ifndef GR_TRIM_H
#define GR_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;
struct gr_core;

/*
 * gr_bins_trim for want_bytes, then gr_segments_trim for what is missing. Returns the bytes that the device got back.
 */
uint64_t gr_trim(struct gr_context *context, uint64_t want_bytes);

/*
 * Returns the excess of all caches to the driver (gr_budget_excess), and spilled blocks that the program has freed, as
 * far as they are idle. True: more waits for its fence.
 */
bool gr_trim_excess(struct gr_core *core);

/* Whether the context has no cached memory, and nothing left for later (gr_segments_trim_has_none). */
bool gr_trim_has_none(struct gr_context *context);

#endif
