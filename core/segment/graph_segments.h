/*
 * Graph segments: where the memory of graphs lies with GPURECLAIM_GRAPH_ARENA=shared, in which no two graphs run at the
 * same time. What a capture has freed serves later captures, so that all graphs together take little more than the
 * largest.
 *
 * They are expandable segments of the context (expandable.h) whose free ranges serve captures only. While graphs use
 * them (in_graphs), launches use their memory whether it is free or not. So nothing of them goes back, and their free
 * part is in graph_bytes, neither live nor cached. When the last graph has gone, free memory is cached as any other,
 * behind a fence.
 *
 * A request gets the best fit, and the last range of what is mapped only where nothing else serves. What a capture
 * frees becomes whole again at its end. So the next capture of the same program is laid out like the one before it in
 * fresh addresses, and all of them take what the largest takes alone, whatever the order of their sizes. Where no free
 * range serves, the segment grows. Memory that lives on between captures makes it grow further. Where it would grow to
 * a third (at least 16 MiB) more than was used at a time since graphs first used it, or memory is short, the memory of
 * free pages gets a second address instead (remap.h), and keeps the old one, which graphs have recorded, until the last
 * graph has gone. Old addresses are in the way of large requests, so that is not done earlier (docs/measurements.md,
 * graph-moves).
 *
 * Also here: how ranges that graphs have parked are cut and merged, in whatever segment they lie.
 */
#ifndef GR_GRAPH_SEGMENTS_H
#define GR_GRAPH_SEGMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_block;
struct gr_context;

/*
 * A hold joins those that share the context's graph segments, until gr_graph_segments_leave is called with the number
 * that this returns. Each context that gets the structure has a new number, so a graph that outlives its context counts
 * for no other. Neither takes a lock.
 */
uint32_t gr_graph_segments_join(struct gr_context *context);
void gr_graph_segments_leave(struct gr_context *context, uint32_t number);

/* Whether a hold that joined with this number is still one of the context's. */
bool gr_graph_segments_joined(struct gr_context *context, uint32_t number);

/*
 * As gr_segments_take and gr_segments_grow, from these segments, which are in_graphs from then on; the caller's graph
 * is one of the context's graph_users. gr_graph_segments_grow returns as gr_expandable_grow. No fence is needed: what
 * is free there was freed by captures that have ended, or by the same capture, which then has a single stream.
 */
struct gr_block *gr_graph_segments_take(struct gr_context *context, size_t bytes);
int gr_graph_segments_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/*
 * If no graph uses these segments any more, what is free there is cached from now on. False: it is not, as more
 * contexts can use the memory than the fence covers. A call with waits waits for all of them first. No lock is held.
 */
bool gr_graph_segments_end_use(struct gr_context *context, bool waits);

/* The context has gone, and its graphs with it: ends their use. The segments' lock is held; no range is busy. */
void gr_graph_segments_context_gone(struct gr_context *context);

/*
 * The next three are for ranges that the program has freed and the caller keeps (parked ones, alloc/graph_hold.h). The
 * segments' lock is not held. If the context has gone, block is unchanged and the answer is NULL, block or false.
 */

/*
 * Shortens block, whose only flag is GR_BLOCK_RANGE, to bytes, at most its capacity, rounded up to
 * gr_range_unit of its segment. Returns the rest as a block, which is the caller's, too. NULL: there is no rest, or no
 * host memory for its structure; block is unchanged.
 */
struct gr_block *gr_graph_range_cut(struct gr_block *block, size_t bytes);

/*
 * Whether the used range adjacent is to be merged: true means that the function has taken it out of the caller's list.
 * Called with the segments' lock held.
 */
typedef bool gr_graph_range_leaves(struct gr_block *adjacent, void *arg);

/*
 * Merges block, whose only flag is GR_BLOCK_RANGE, with the ranges right before and behind it for which leaves is true.
 * Returns the merged block; the structures of the others are freed. Cannot fail.
 */
struct gr_block *gr_graph_range_join(struct gr_block *block, gr_graph_range_leaves *leaves, void *arg);

/* Whether block, a range, lies in a segment for requests up to 1 MiB. */
bool gr_graph_range_is_small(struct gr_block *block);

#endif
