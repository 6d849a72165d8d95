/*
 * The segments of a context and their ranges: the list by address, which of their bytes are used, and how a range
 * becomes a block or free memory. The segments' lock is held, unless a comment says otherwise; it is never held across
 * a call of the driver.
 */
#ifndef GR_SEGMENTS_H
#define GR_SEGMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "base/lock.h"
#include "context/context.h"
#include "segment/segments_state.h"

#define GR_PEAK_LOOK_REQUESTS 16 /* the peak of live memory is looked at once in so many requests */

struct gr_block;
struct gr_arena;
struct gr_range;
struct gr_segment;

/* The index of the first segment above ptr. */
size_t gr_segments_above(const struct gr_segments *segments, uint64_t ptr);

/* Adds a segment to the list; false: out of memory. */
bool gr_segments_add(struct gr_segments *segments, struct gr_segment *segment);

/* Takes the segment at index, which has no used ranges, off the list; the caller frees it and returns its memory. */
void gr_segments_remove(struct gr_context *context, size_t index);

/* Takes a segment from the driver, charged and counted as cached, in no list yet. Calls the driver; lock not held. */
int gr_segment_take(struct gr_context *context, size_t bytes, struct gr_segment **ret_segment);

/* Returns count segments that are in no list to the driver. Returns the bytes. Calls the driver; lock not held. */
uint64_t gr_segments_return(struct gr_context *context, struct gr_segment **segments, size_t count);

/* Frees the structures of a segment in no list, except those of used ranges, which the ledger owns. Lock not held. */
void gr_segment_destroy(struct gr_segment *segment);

/* Cached bytes that cannot go back because other ranges of the segment are used. */
uint64_t gr_segment_stranded(const struct gr_segment *segment);

/* Counts a range as used and not cached (+1), or as cached and not used (-1; its freed_epoch is set). */
void gr_segments_use(struct gr_context *context, struct gr_range *range, int sign);

/*
 * Whether a freed range is free at once: it is usable, or it may be free ahead of its fence. The thread that hands it
 * out then lays the barrier.
 */
bool gr_segments_serve_ahead(struct gr_context *context, const struct gr_range *range);

/* Appends a range that is no longer counted as used to the queue of those that wait for their epoch. */
void gr_segments_wait(struct gr_segments *segments, struct gr_range *range);

/*
 * Takes ranges back that lay in fastbins, linked by next; gr_segments_merge_fastbins all ranges of all fastbins. Those
 * whose epoch is usable, or that may be free ahead of their fence, are freed and merged. The others go into the queue,
 * at the place of their epoch. False: there were none.
 */
bool gr_segments_merge(struct gr_context *context, struct gr_block *blocks);
bool gr_segments_merge_fastbins(struct gr_context *context);

/* Frees the waiting ranges whose epoch has become usable; they leave the queue. */
void gr_segments_free_usable(struct gr_context *context);

/*
 * Adds a range's block to the ledger. A block that is still listed at its address is stale, and is removed. False: out
 * of memory.
 */
bool gr_segments_list(struct gr_context *context, struct gr_block *block);

/*
 * Makes a block of the first bytes of range, which is in no list, and frees the rest. NULL: out of memory, and all of
 * it is free.
 */
struct gr_block *gr_segments_carve(struct gr_context *context, struct gr_range *range, size_t bytes);

/* Counts a request that a free range served, and looks at the peak of live memory now and then. */
static inline void gr_segments_hit(struct gr_context *context)
{
        gr_assert_locked(&context->segments->lock);
        if (++context->segments->hits % GR_PEAK_LOOK_REQUESTS == 0)
                gr_budget_update_peak(context->device);
}

#endif
