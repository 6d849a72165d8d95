/*
 * Graph segments: where the memory of graphs lies. They are expandable segments of the context (expandable.h) whose free
 * ranges serve captures only. While they are held nothing of them goes back, and all of it counts as used; what is free
 * is in graph_bytes.
 *
 * With GPURECLAIM_GRAPH_ARENA=private they are held while a capture has them for itself (split->graph_owner). What it
 * frees may serve it again. At its end that becomes blocks of its hold (cache/graph_hold.h), which are parked.
 *
 * With GPURECLAIM_GRAPH_ARENA=shared no two graphs run at the same time. What a capture has freed serves later captures,
 * so that all graphs together take little more than the largest. The segments are held while there are graphs, as
 * launches use their memory whether it is free or not. Where a request fits no free range, the memory of free pages gets
 * a second address there (remap.h), and keeps the old one, which graphs have recorded. When the last graph has gone,
 * free memory is cached as any other, and the old addresses are unmapped.
 */
#ifndef GR_GRAPH_SEGMENTS_H
#define GR_GRAPH_SEGMENTS_H

#include <stdbool.h>

struct gr_block;
struct gr_context;

/*
 * Makes the context's graph segments held. The caller's capture has them, or its graph is a user (core->graph_users).
 * The split's lock is held, but may be released meanwhile.
 */
void gr_graph_segments_hold(struct gr_context *context);

/* Ends that, where there is none of the two any more. The split's lock is held, but may be released meanwhile. */
void gr_graph_segments_release(struct gr_context *context);

/*
 * Makes what split->graph_owner has freed blocks, as gr_split_keep does. False: not all, out of memory. The split's
 * lock is held.
 */
bool gr_graph_segments_keep(struct gr_context *context, struct gr_block **ret_kept);

/* The same as release, where the context has gone, and its graphs with it. The split's lock is held; no range is busy. */
void gr_graph_segments_end(struct gr_context *context);

#endif
