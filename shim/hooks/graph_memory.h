/*
 * Memory of the program's graphs, of which the driver keeps one pool per device. The pool is charged in the same way as
 * those of stream_ordered.h. Any thread may call these functions.
 */
#ifndef GR_GRAPH_MEMORY_H
#define GR_GRAPH_MEMORY_H

#include "shim.h"

/* Some graph may allocate: graphs that are instantiated later are searched for allocations. */
void gr_graph_memory_seen(void);

/* Whether any graph may have allocated. */
bool gr_graph_memory_in_use(void);

/* Idle graph memory was returned to the driver. */
void gr_graph_memory_trimmed(void);

/* How often that happened, by the program or the library, plus 1. */
extern _Atomic uint64_t gr_graph_memory_trims GR_HIDDEN;

/*
 * A graph is about to reserve memory. Charges need_bytes less the idle graph memory, and stores that in
 * *ret_reserved_bytes. may_have_it: the graph had its memory before a trim, which may have left it; then all reserved
 * graph memory is deducted, not only the idle part. -EDQUOT: the limit; nothing is charged. After a success the caller
 * must call gr_graph_memory_correct, also where the launch fails: it corrects the charge to what the driver has
 * reserved. reserved_bytes there: what was charged here.
 */
int gr_graph_memory_reserve(struct gr_device *device, uint64_t need_bytes, bool may_have_it,
                            uint64_t *ret_reserved_bytes);
void gr_graph_memory_correct(struct gr_device *device, uint64_t reserved_bytes);

/* Corrects the charge; trim: returns idle memory to the driver before. Does not wait for the GPU. */
void gr_graph_memory_refresh(struct gr_device *device, bool trim);

#endif
