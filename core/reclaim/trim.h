/*
 * Trim returns cached blocks to the driver: of one context until enough is returned, of one size class or of the
 * segments for decay, or of all contexts down to the threshold. No lock is held at the calls. Nothing here waits for
 * the GPU, except gr_trim_excess with older drivers, which cannot record an event for a whole context.
 */
#ifndef GR_TRIM_H
#define GR_TRIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;
struct gr_core;

/*
 * Returns idle cached blocks of context to the driver: one block that suffices, or else the largest classes first and
 * of each class the oldest blocks, until want_bytes are returned. Returns the bytes that the device got back.
 */
uint64_t gr_trim(struct gr_context *context, uint64_t want_bytes);

/*
 * Returns to the driver what the caches hold beyond the release threshold and the soft limit, and blocks of bins whose
 * sizes split now serves. Returns whether more waits for its fence.
 */
bool gr_trim_excess(struct gr_core *core);

/*
 * Returns idle blocks of one size class to the driver, oldest first, at most most_bytes of footprint and one batch.
 * Returns the footprint that left the cache.
 */
uint64_t gr_trim_class(struct gr_context *context, unsigned class, uint64_t most_bytes);

/* The same for idle free memory of segments. */
uint64_t gr_trim_segments(struct gr_context *context, uint64_t most_bytes);

/* The footprint of the low water of the size class: what no request needed since the last call. Starts it anew. */
uint64_t gr_trim_unneeded(struct gr_context *context, unsigned class);

/* The same for the surplus of segments. */
uint64_t gr_trim_segments_unneeded(struct gr_context *context);

/* Returns what was freed and could not go back at once (gr_split_trim_collect). */
void gr_trim_collect(struct gr_context *context);

/* Whether the context has no cached block, and nothing that was left, so that there is nothing to return. */
bool gr_trim_has_none(struct gr_context *context);

#endif
