/*
 * Expandable segments of pool kinds `split` and `auto`: large pieces of addresses, one for large blocks and one for
 * small ones, of which any pages can have memory behind them. If a request fits no free range, new memory is mapped
 * only for the pages that its place lacks. Free pages from elsewhere can be mapped there instead (remap.h), even while
 * work that used them has not run, and idle pages can be returned by themselves. So the footprint is what is live, the
 * unused parts of pages partly in use, and what has just been freed.
 *
 * In an expandable segment ranges may also be holes. Memory is mapped in extents, one handle of the driver each, which
 * cannot be unmapped in part: an extent goes back only when no byte of it is in use and the last work that may use it
 * has passed. Mapping one costs as much as an allocation of the driver, whatever its size (docs/measurements.md,
 * mapping-cost), and neither waits for running kernels nor delays launches. So an extent grows with its request and
 * with what is reserved (expandable_grow.c has the formula), in whole pages: at least one, and no more than the hole.
 *
 * If a little is used in each of many large extents, a large request can have none of their memory. So once an eighth
 * of the device or the limit is reserved, extents stay small, and a request opens no extent that is more than half as
 * large as itself: such extents go back instead, and smaller ones are mapped.
 *
 * A large request that lacks little maps more than it lacks: a 16th of what is reserved, at most 32 MiB, one extent for
 * each hole. It does not once an eighth of the device is reserved, or where the footprint would pass its bound
 * (slack.h). What is not needed yet is free for the requests to come, but an extent still goes back, or moves, only as
 * a whole.
 *
 * The memory belongs to the process, not to the context: when the context ends, gr_expandable_close returns it.
 */
#ifndef GR_EXPANDABLE_H
#define GR_EXPANDABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment/range.h"
#include "segment/segments_state.h"

struct gr_context;

/*
 * Makes the context's expandable segment of this kind, unless another thread has just done so. -ENOSPC: no addresses.
 * No lock held.
 */
int gr_expandable_open(struct gr_context *context, enum gr_expandable_kind kind);

/*
 * Gives the mapped extents that lie wholly inside a busy range, and that nothing has used since they were mapped, back
 * to the driver. Returns how many bytes went back. Calls the driver; no lock held.
 */
uint64_t gr_expandable_unmap_fresh(struct gr_context *context, struct gr_range *range);

/*
 * Gives idle extents back without waiting: those in the smallest free ranges first, until the sum is want_bytes, and
 * none with which it would exceed most_bytes. Returns the bytes that the device got back. Calls the driver; no lock
 * held.
 */
uint64_t gr_expandable_trim(struct gr_context *context, uint64_t want_bytes, uint64_t most_bytes);

/*
 * The program frees range, which must not be reused: it becomes STUCK, and still counts as used. gr_expandable_unstick
 * or gr_expandable_leave must follow, for its addresses. The segments' lock is held.
 */
void gr_expandable_discard(struct gr_context *context, struct gr_range *range);

/*
 * A range from ptr to last was freed: whether it was the last one in use in an extent that has stuck ranges, so that
 * the extent can go back. The segments' lock is held.
 */
bool gr_expandable_ends_stuck(const struct gr_segment *segment, uint64_t ptr, uint64_t last);

/*
 * Called after gr_expandable_discard, or where gr_expandable_ends_stuck: waits for the context as the driver's free
 * would, and gives back the extents from ptr to last that have stuck ranges and in which nothing is used any more. If
 * the wait fails they are left for gr_expandable_collect. The caller has added one to segments->busy; this takes it off
 * again. Calls the driver; no lock held.
 */
void gr_expandable_unstick(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t last);

/*
 * In place of gr_expandable_unstick where the free must not wait: leaves the extents from ptr to last for
 * gr_expandable_collect. The segments' lock is held.
 */
void gr_expandable_leave(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t last);

/*
 * Gives back the extents that gr_expandable_unstick and gr_expandable_leave have left for later, once the last of them
 * is idle; until then it does nothing. Does not wait. They did not count as cached. Returns the bytes that the device
 * got back. Calls the driver; no lock held.
 */
uint64_t gr_expandable_collect(struct gr_context *context);

/* Returns all memory and addresses of a segment that is off the segments' list; its context may be gone. */
void gr_expandable_close(struct gr_context *context, struct gr_segment *segment);

#endif
