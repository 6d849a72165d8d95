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
 * Where a request fits no free range, the segment grows. What a capture frees becomes whole again at its end, so later
 * captures fit in, whatever the order of their sizes. Memory that lives on between captures can prevent that. Where the
 * segments would grow to a sixth (at least 16 MiB) more than was used at a time since graphs first used them, or memory
 * is short, the memory of free pages gets a second address instead (remap.h), and keeps the old one, which graphs have
 * recorded, until the last graph has gone. Old addresses are in the way of large requests, so that is not done earlier
 * (docs/measurements.md, graph-moves).
 */
#ifndef GR_GRAPH_SEGMENTS_H
#define GR_GRAPH_SEGMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;

/*
 * Graphs use the context's graph segments from now on: they are in_graphs. The caller's graph is one of the context's
 * graph_users. The split's lock is held, but may be released meanwhile.
 */
void gr_graph_segments_begin_use(struct gr_context *context);

/* Where no graph is left: they are no longer in_graphs. The split's lock is held, but may be released meanwhile. */
void gr_graph_segments_end_use(struct gr_context *context);

/* The context has gone, and its graphs with it: ends their use. The split's lock is held; no range is busy. */
void gr_graph_segments_drop(struct gr_context *context);

/*
 * Whether they may grow by growth_bytes for a request of request_bytes before memory moves. What is parked for graphs
 * elsewhere on the device counts as free here, so where there is any, memory moves earlier. The split's lock is held.
 */
bool gr_graph_segments_have_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

#endif
