/* How an expandable segment grows: the place for a request, and the memory that it lacks. */
#ifndef GR_EXPANDABLE_GROW_H
#define GR_EXPANDABLE_GROW_H

#include <stddef.h>

#include "segment/segments_state.h"

struct gr_block;
struct gr_context;

/*
 * A block of bytes, as gr_range_bytes rounds them, behind which memory is mapped where there is none; in the ledger as
 * CACHED. What is mapped beyond it is free. kind: the one for bytes; for a graph segment the caller's graph
 * is one of the context's graph_users (graph_segments.h). -ENOSPC: there is no expandable segment, or no addresses are
 * left in it, and nothing has happened. -EDQUOT, -ENOMEM, or the driver's error: what was mapped until then is cached.
 * Calls the driver; no lock held.
 */
int gr_expandable_grow(struct gr_context *context, enum gr_expandable_kind kind, size_t bytes,
                       struct gr_block **ret_block);

#endif
