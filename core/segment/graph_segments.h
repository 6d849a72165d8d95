/*
 * Graph segments: where the memory of graphs lies with GPURECLAIM_GRAPH_ARENA=shared, in which no two graphs run at the
 * same time. What a capture has freed serves later captures, so that all graphs together take little more than the
 * largest.
 *
 * They are expandable segments of the context (expandable.h) whose free ranges serve captures only. While graphs use
 * them they are held: launches use their memory whether it is free or not. So nothing of them goes back, and its free
 * part is in graph_bytes, neither live nor cached. Where a request fits no free range, the memory of free pages gets a
 * second address there (remap.h), and keeps the old one, which graphs have recorded. When the last graph has gone, free
 * memory is cached as any other, behind a fence, and the old addresses are unmapped.
 */
#ifndef GR_GRAPH_SEGMENTS_H
#define GR_GRAPH_SEGMENTS_H

struct gr_context;

/*
 * Makes the context's graph segments held. The caller's graph is one of its graph_users. The split's lock is held, but
 * may be released meanwhile.
 */
void gr_graph_segments_hold(struct gr_context *context);

/* Ends the hold where no graph is left. The split's lock is held, but may be released meanwhile. */
void gr_graph_segments_release(struct gr_context *context);

/* As release, where the context has gone, and its graphs with it. The split's lock is held; no range is busy. */
void gr_graph_segments_end(struct gr_context *context);

#endif
